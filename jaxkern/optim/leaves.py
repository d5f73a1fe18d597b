"""Launches over the leaves of a tree: several leaves in one, in place where they are written."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxkern.mosaic.launch import LANES, grid_axes, interpreted, launch_kernel
from jaxkern.optim.registers import with_chosen

BLOCK = grid_axes("block")[0]

DTYPES = ("float32", "bfloat16", "float16")
"""Of the arrays that the kernels take."""

MAX_REFS = 128
"""Most arrays of one launch. From 256 on the branches that choose among them take registers."""


def may_be_split(arrays: Sequence[jax.Array]) -> bool:
    """Whether the compiler, or an Explicit mesh, may split the arrays over devices.

    Without a mesh in their types any array may be, where there are several devices: those that
    only ``in_shardings`` splits have the types of arrays on one device.
    """
    meshes = {jax.typeof(a).sharding.mesh for a in arrays}
    meshes = [mesh for mesh in meshes if mesh.axis_types]
    if any(AxisType.Manual in mesh.axis_types for mesh in meshes):
        return False
    return max((mesh.size for mesh in meshes), default=jax.device_count()) > 1


def varying(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes over which an array varies.

    Leaves of one launch vary alike, as all results of it vary as its operands do together.
    """
    types = (jax.typeof(a).manual_axis_type for a in arrays if a is not None)
    return frozenset().union(*(t.varying for t in types))


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
      units: of each leaf.
      per_lane: units of a lane.
    """

    units: Sequence[int]
    per_lane: int

    @property
    def starts(self) -> list[int]:
        """The first block of each leaf, and their number."""
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


def launch_in_place(
    name: str,
    body: Callable[..., None],
    blocks: int,
    fixed: Sequence[jax.Array],
    written: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs a kernel that works in place: XLA copies only what the caller still needs.

    Args:
      name: of the kernel.
      body: takes references to `fixed` and then to `written`.
      blocks: of the grid's axis `BLOCK`, each a warpgroup.
      fixed: arrays that are read.
      written: arrays that are read and written.

    Returns:
      `written` after the kernel.
    """

    def run(*arrays: jax.Array) -> list[jax.Array]:
        fixed_here, written_here = arrays[: len(fixed)], list(arrays[len(fixed) :])

        @pl.run_state
        def in_place(refs: Any) -> None:
            launch_kernel(
                body,
                out_type=(),
                grid=(blocks,),
                grid_names=(BLOCK,),
                kernel_name=name,
                approx_math=True,
            )(*fixed_here, *refs)

        return in_place(written_here)

    if interpreted():
        return run(*fixed, *written)
    return _launch_p.bind(*fixed, *written, fixed=len(fixed), run=run)


def _lower_launch(ctx: Any, *operands: Any, fixed: int, run: Callable[..., Any]) -> Any:
    del fixed
    plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


_launch_p = Primitive("launch_in_place")
"""Calls ``run`` on arrays that may vary over manual mesh axes, as references may not."""
_launch_p.multiple_results = True
_launch_p.def_abstract_eval(
    lambda *arrays, fixed, run: [ShapedArray(a.shape, a.dtype) for a in arrays[fixed:]]
)
mlir.register_lowering(_launch_p, _lower_launch)
