"""Launches of a kernel over several leaves of a tree at once, in place where it writes them."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from jaxkern.core import mesh
from jaxkern.mosaic.launch import LANES, grid_axes, launch_in_place
from jaxkern.mosaic.units import with_chosen

BLOCK = grid_axes("block")[0]

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that the kernels take, of all arrays but codes of 8 bits."""

MAX_REFS = 128
"""A launch takes at most so many arrays: from 256 on the choice among them takes registers."""


def may_be_split(arrays: Sequence[jax.Array]) -> bool:
    """Says whether the compiler, or an Explicit mesh, may split the arrays over devices.

    Without a mesh in their types any array may be, where there are several devices: those that
    only ``in_shardings`` splits have the types of arrays on one device.
    """
    meshes = {jax.typeof(a).sharding.mesh for a in arrays}
    meshes = [m for m in meshes if m.axis_types]
    if any(AxisType.Manual in m.axis_types for m in meshes):
        return False
    return max((m.size for m in meshes), default=jax.device_count()) > 1


def varying(*arrays: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which any of `arrays`, or ``None``, varies.

    Leaves of one launch vary alike: each result of it varies over all axes of its operands.
    """
    return frozenset[str]().union(*(mesh.varying(a) for a in arrays if a is not None))


def grouped(kinds: Mapping[int, Hashable]) -> list[list[int]]:
    """Groups leaves, by their index, whose kinds are equal."""
    groups: dict[Hashable, list[int]] = {}
    for i, kind in kinds.items():
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def flattened(leaves: Sequence[Any]) -> Any:
    """Makes vectors of several leaves, each an array or a tuple of arrays, for one pass.

    A leaf on its own keeps its axes, between which devices may split it, but for a scalar.
    """
    if len(leaves) == 1 and jax.tree.leaves(leaves)[0].shape:
        return leaves
    return jax.tree.map(lambda a: a.reshape(-1), leaves)


def reshaped(arrays: Any, like: Any) -> Any:
    """Gives arrays the shapes of `like` back, which they had before :func:`flattened`."""
    return jax.tree.map(lambda a, b: a.reshape(b.shape), arrays, like)


def leaf_factors(ranks: Sequence[int]) -> list[str]:
    """Names the dimensions of each leaf for a KernelPass: no two leaves share a factor."""
    return [" ".join(f"l{i}d{d}" for d in range(rank)) for i, rank in enumerate(ranks)]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a launch, each a warpgroup that works on one leaf.

    Attributes:
      units: how many units each leaf has.
      per_lane: how many units a lane takes.
    """

    units: Sequence[int]
    per_lane: int

    @property
    def starts(self) -> list[int]:
        """The first block of each leaf, and last the number of blocks."""
        each = (-(-n // (LANES * self.per_lane)) for n in self.units)
        return list(itertools.accumulate(each, initial=0))

    @property
    def number(self) -> int:
        return self.starts[-1]

    def run(
        self, body: Callable[..., None], rows: Sequence[Sequence[Any]], *numbers: Sequence[int]
    ) -> None:
        """Runs ``body(block, refs, (start, units, *numbers))`` for the leaf that a block works on.

        Args:
          body: takes the block's index, the leaf's references as :func:`load_units` takes them,
            and numbers as (LANES,), uint32: the leaf's first block, its units and `numbers`.
          rows: references of each leaf.
          *numbers: of each leaf.
        """
        block = lax.axis_index(BLOCK)
        starts = self.starts[:-1]
        of_leaves = list(zip(starts, self.units, *numbers, strict=True))
        with_chosen(lambda *leaf: body(block, *leaf), block, rows, starts, of_leaves)


def launch_blocks(
    name: str,
    body: Callable[..., None],
    blocks: int,
    fixed: Sequence[jax.Array],
    written: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs a kernel in place, in as many blocks, each a warpgroup, along the axis `BLOCK`."""
    launch: dict[str, Any] = {"grid": (blocks,), "grid_names": (BLOCK,), "kernel_name": name}
    return launch_in_place(body, fixed, written, approx_math=True, **launch)
