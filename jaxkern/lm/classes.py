"""Embedding and loss of a vocabulary that is split between devices, inside ``shard_map``.

A device has the rows of its classes of an embedding, and their columns of an output layer. Of the
loss

    loss = log Σ_v exp(l_v) − l_y

the devices add up their sums of exp(l_v), relative to the largest of their logarithms, and l_y,
which one of them has: three numbers of a token, and no logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxkern
from jaxkern.nn.collectives import enter, leave


def rows_of_parts(
    read: Callable[..., jax.Array], table: jax.Array, tokens: jax.Array, axis_name: str | None
) -> jax.Array:
    """Reads rows by `read` (table, tokens) of a table of which each device has a part (V/n, D).

    Args:
      read: gives (..., D), for tokens below V/n.
      table: the device's part; all of it, (V, D), if `axis_name` is ``None``.
      tokens: (...), integers of all V classes.
      axis_name: the mesh axis over which V is split.
    """
    if axis_name is None:
        return read(table, tokens)
    tokens, mine = _of_device(tokens, len(table), axis_name)
    rows = read(table, jnp.where(mine, tokens, 0))
    return leave(jnp.where(mine[..., None], rows, 0), axis_name)


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    axis_name: str | None,
    *,
    ignore_index: int,
    **options: Any,
) -> Any:
    """:func:`jaxkern.linear_cross_entropy`, the mean, where each device has some of the classes.

    Args:
      x: (..., K), the same on every device.
      weight: (K, V/n), the device's classes; all of them if `axis_name` is ``None``.
      labels: (...), integers, of all V classes; a negative `ignore_index` for rows without a loss.
      axis_name: the mesh axis over which V is split.
      ignore_index: as for the op, and so are `options`.
    """
    if axis_name is None:
        return jaxkern.linear_cross_entropy(x, weight, labels, ignore_index=ignore_index, **options)
    size = weight.shape[1]
    classes, mine = _of_device(labels, size, axis_name)
    unknown = (labels < 0) | (labels >= size * lax.axis_size(axis_name))
    counted = labels != ignore_index
    losses, lse = jaxkern.linear_cross_entropy(
        enter(x, axis_name),
        weight,
        jnp.where(counted, jnp.where(mine, classes, 0), ignore_index),
        ignore_index=ignore_index,
        reduction="none",
        return_lse=True,
        **options,
    )
    largest = lax.pmax(lax.stop_gradient(lse), axis_name)
    sums = jnp.stack([jnp.exp(lse - largest), jnp.where(mine, lse - losses, 0)])
    exps, of_label = leave(sums, axis_name)
    losses = jnp.where(counted, largest + jnp.log(exps) - of_label, 0)
    losses = jnp.where(unknown & counted, jnp.nan, losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1)


def _of_device(classes: jax.Array, size: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Numbers classes from the first of the device's `size`, and tells which are among them."""
    wide = classes.astype(jnp.promote_types(classes.dtype, jnp.int32))
    classes = wide - lax.axis_index(axis_name) * size
    return classes, (classes >= 0) & (classes < size)
