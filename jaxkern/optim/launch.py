"""Launches over the leaves of a tree: several leaves in one, in place where they are written."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxkern.mosaic.launch import grid_axes, interpreted, launch_kernel

BLOCK = grid_axes("block")[0]

DTYPES = ("float32", "bfloat16", "float16")
"""Of the arrays that the kernels take."""

MAX_REFS = 128
"""Most arrays of one launch. From 256 on the branches that choose among them take registers."""


def may_be_split(arrays: Sequence[jax.Array]) -> bool:
    """Whether the compiler, or an Explicit mesh, may split the arrays over devices."""
    types = {t for a in arrays for t in jax.typeof(a).sharding.mesh.axis_types}
    return AxisType.Manual not in types and (bool(types) or jax.device_count() > 1)


def varying(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes over which an array varies.

    Leaves of one launch vary alike, as all results of it vary as its operands do together.
    """
    types = (jax.typeof(a).manual_axis_type for a in arrays if a is not None)
    return frozenset().union(*(t.varying for t in types))


def launch_in_place(
    name: str,
    body: Callable[..., None],
    blocks: int,
    fixed: Sequence[jax.Array],
    written: Sequence[jax.Array],
) -> list[jax.Array]:
    """`written` after a kernel that XLA lets work in place, but for what its caller still needs.

    Args:
      name: of the kernel.
      body: takes references to `fixed` and then to `written`.
      blocks: of the grid's axis `BLOCK`, each a warpgroup.
      fixed: arrays that are read.
      written: arrays that are read and written.
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
"""``run``, of arrays that may vary over manual mesh axes, which references may not."""
_launch_p.multiple_results = True
_launch_p.def_abstract_eval(
    lambda *arrays, fixed, run: [ShapedArray(a.shape, a.dtype) for a in arrays[fixed:]]
)
mlir.register_lowering(_launch_p, _lower_launch)
