"""A batch where the devices want it, of which each process makes the rows of its own devices."""

from typing import Any

import jax
import numpy as np

Rows = tuple[int, int]
"""The first of some rows, and the one after the last."""


def own_rows(sharding: Any, shape: tuple[int, ...]) -> Rows | None:
    """Which rows of each part of a batch, of `shape` (K, B/K, …), this process makes.

    ``None`` where they are all: its devices are all there are.
    """
    if sharding.is_fully_addressable:
        return None
    indices = sharding.addressable_devices_indices_map(shape).values()
    parts = [index[1].indices(shape[1]) for index in indices]
    return min(start for start, _, _ in parts), max(end for _, end, _ in parts)


def rows_of_parts(own: Rows | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """The numbers that these rows of every part have in the whole batch, one part after another."""
    if own is None:
        return None
    return (np.arange(shape[0])[:, None] * shape[1] + np.arange(*own)).ravel()


def put(
    tree: Any, sharding: Any, own: Rows | None = None, shape: tuple[int, ...] | None = None
) -> Any:
    """Brings arrays to the devices.

    Args:
      tree: the whole arrays, or of each part of a batch the rows `own` alone.
      sharding: how the whole arrays are split.
      own: see :func:`own_rows`.
      shape: of the whole arrays, where `own` is given.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def of_process(leaf: Any) -> jax.Array:
        if own is None or shape is None:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        first, rows = own[0], shape[1]

        def of_device(index: Any) -> Any:
            start, end, _ = index[1].indices(rows)
            return leaf[index[0], start - first : end - first, *index[2:]]

        return jax.make_array_from_callback(shape, sharding, of_device)

    return jax.tree.map(of_process, tree)
