"""Products by wgmma, the tensor cores of Hopper: shared memory, copies, accumulators."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxkern.core import target
from jaxkern.core.target import interpreted
from jaxkern.mosaic.instructions import widened
from jaxkern.mosaic.registers import elements, i32, inline_mlir

WARPS = 4
"""Warps of a warpgroup, each with 16 of the rows of an accumulator."""
ACCUMULATOR_ROWS = 64
"""Rows of an accumulator, which are the rows of one wgmma instruction."""

SWIZZLE = 128
"""Bytes of a row of shared memory that are swizzled together."""

ACCUMULATOR: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""An accumulator of some shape and dtype, in registers."""


def swizzled(*shape: int, dtype: Any) -> Any:
    """Shared memory of tiles that the tensor cores and the TMA read, in rows of `SWIZZLE` bytes."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(SWIZZLE)))


def start_fetch(source: Any, to: Any, full: Any, collective_axes: Any = None) -> None:
    """Starts a copy by the TMA to shared memory; what is past the end of an array is zero there.

    Args:
      source: a part of an array in global memory.
      to: shared memory of its shape.
      full: the barrier at which the copy arrives.
      collective_axes: of the cluster whose blocks share the copy, or ``None``.
    """
    plgpu.copy_gmem_to_smem(
        source, to, full, collective_axes=collective_axes, oob_mode=plgpu.OOBFillMode.ZEROS
    )


def without_wgmma() -> str | None:
    """Why the kernels cannot run on the GPU that is lowered for, if that is no Hopper."""
    gpu = target.current()
    if gpu is None or gpu.capability == (9, 0):
        return None
    return f"its kernels multiply by wgmma, which Hopper alone has, and this is for {gpu}"


TILE: Any = plgpu.Layout.WGMMA
"""The layout of accumulators, and of what is multiplied from registers."""
ROWS: Any = plgpu.Layout.WGMMA.reduce(1)
"""The layout of one number for each row of an accumulator."""
COLUMNS: Any = plgpu.Layout.WGMMA.reduce(0)


def over_rows(v: Any, columns: int) -> Any:
    """(R,), a number for each row, as (R, columns)."""
    return lax.broadcast_in_dim(v, (v.shape[0], columns), [0])


def over_columns(v: Any, rows: int) -> Any:
    """(C,), a number for each column, as (rows, C)."""
    return lax.broadcast_in_dim(v, (rows, v.shape[0]), [1])


@dataclasses.dataclass
class _Held:
    """An accumulator in Pallas's interpreter, which multiplies from shared memory alone."""

    value: Any


def with_accumulators(f: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """Runs `f` with an accumulator of the tensor cores, zero, of each shape."""
    if interpreted():
        return f(*(_Held(jnp.zeros(shape, jnp.float32)) for shape in shapes))
    return pl.run_scoped(f, *(ACCUMULATOR(shape, jnp.float32) for shape in shapes))


def accumulated(f: Callable[..., None], *begin: Any) -> list[Any]:
    """Runs `f` on accumulators that begin as these values, and returns how they end."""
    if interpreted():
        held = [_Held(value) for value in begin]
        f(*held)
        return [acc.value for acc in held]
    return list(pl.run_state(lambda accs: f(*accs))(tuple(map(ACCUMULATOR.init, begin))))


def loop(count: Any, step: Callable[..., None], *accs: Any) -> None:
    """Runs ``step(n, *accs)`` on accumulators for each n below `count`."""
    if not interpreted():
        lax.fori_loop(0, count, lambda n, _: step(n, *accs), None)
        return

    def run(n: Any, values: list[Any]) -> list[Any]:
        return accumulated(functools.partial(step, n), *values)

    ended = lax.fori_loop(0, count, run, [acc.value for acc in accs])
    for acc, value in zip(accs, ended, strict=True):
        acc.value = value


def multiply(acc: Any, a: Any, b: Any) -> None:
    """Starts adding a · b to an accumulator; `a` may be in registers."""
    if interpreted():
        values = (v[...].astype(jnp.float32) for v in (a, b))
        acc.value = acc.value + jnp.dot(*values, precision=lax.Precision.HIGHEST)
    else:
        plgpu.wgmma(acc, a, b)


def read(acc: Any, running: int = 0) -> Any:
    """Waits until at most `running` products are in flight, and returns an accumulator."""
    return acc.value if interpreted() else plgpu.wgmma_accumulator_load(acc, wait_n=running)


def product(a: Any, b: Any, shape: tuple[int, int]) -> Any:
    """Multiplies a · b in fp32."""

    def run(acc: Any) -> Any:
        multiply(acc, a, b)
        return read(acc)

    return with_accumulators(run, shape)


def to_fp32(v: Any) -> Any:
    """Widens `v`, in the layout of accumulators, to fp32."""
    return widened(v, TILE) if v.dtype == jnp.bfloat16 else v.astype(jnp.float32)


def causal(v: Any, *, transposed: bool = False, first: int = 0) -> Any:
    """Masks (64, n), fp32, with −∞ above the diagonal, or if `transposed` below it.

    A lane compares one number with constants: with the columns' numbers in registers, there would
    not be enough of these.

    Args:
      v: in the layout of accumulators.
      transposed: whether rows are the earlier tokens.
      first: the number of the first column.
    """
    if interpreted():
        rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, a) for a in (0, 1))
        columns = columns + first
        return jnp.where(rows <= columns if transposed else columns <= rows, v, -jnp.inf)
    order = arith.CmpIPredicate.sle if transposed else arith.CmpIPredicate.sge

    @inline_mlir(TILE, returns=plgpu.ShapeDtypeStruct(v.shape, v.dtype, layout=TILE))
    def select(v: Any) -> Any:
        lane, f32 = mgpu_utils.thread_idx(), ir.F32Type.get()
        bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
        row = arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3))
        ahead = arith.subi(row, arith.muli(bits(0, 2), i32(2)))  # of the lane's first column
        never = arith.constant(f32, -math.inf)
        chosen = np.empty_like(v.registers)
        for index, register in np.ndenumerate(v.registers):
            column = first + 8 * index[1] - 8 * index[4]  # less the row's distance to the first
            parts = []
            for k, value in enumerate(elements(register)):
                keep = arith.cmpi(order, ahead, i32(column + k))
                parts.append(arith.select(keep, value, never))
            chosen[index] = vector.from_elements(ir.VectorType.get((len(parts),), f32), parts)
        return mgpu.FragmentedArray(_registers=chosen, _layout=v.layout, _is_signed=None)

    return select(v)
