"""Products by wgmma, the tensor cores of Hopper: shared memory, copies, accumulators.

The last section is about a lane's fragments of an accumulator: their sums, and shared memory that
only their lane reads. Of (64, n) in the layout of accumulators a warp has 16 rows, and a lane two
rows, 8 apart, of two columns in every 8.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxkern.core import target
from jaxkern.core.target import interpreted
from jaxkern.mosaic.arithmetic import widened
from jaxkern.mosaic.lanes import (
    REF,
    VECTOR_BYTES,
    LaneOffsets,
    dtype_of,
    element,
    elements,
    fragmented,
    i32,
    inline_mlir,
    pointer_of_lane,
    row_type,
    store_lanes,
    sum_lanes,
)
from jaxkern.mosaic.launch import LANES

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
    """Why the kernels cannot run on the GPU that is lowered for, if that is no Hopper.

    A Hopper GPU without its TMA stands for older ones, on whose kernels it then runs.
    """
    gpu = target.current()
    if gpu is None or (gpu.capability == (9, 0) and gpu.tma):
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


def keep_pairs(v: Any, size: int, apart: int | None = None) -> Any:
    """Zeros in (64, 64) but for pairs of rows and columns in the two halves of a block.

    Blocks have 2 · size rows and columns. All pairs are of one size, but those of a number with
    itself, which are of size 0.

    Args:
      v: fp32 or 16 bits, in the layout of accumulators.
      size: 0 or a power of 2.
      apart: 0 to keep all pairs in the same block of `size` instead.
    """
    mask, apart = -max(size, 1), size if apart is None else apart
    if interpreted():
        rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, a) for a in (0, 1))
        return jnp.where((rows ^ columns) & mask == apart, v, jnp.zeros((), v.dtype))

    @inline_mlir(TILE, returns=plgpu.ShapeDtypeStruct(v.shape, v.dtype, layout=TILE))
    def select(v: Any) -> Any:
        lane, f32 = mgpu_utils.thread_idx(), ir.F32Type.get()
        bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
        row = arith.ori(arith.shli(bits(5, 2), i32(4)), bits(2, 3))
        found = arith.andi(arith.xori(row, arith.shli(bits(0, 2), i32(1))), i32(mask))
        kept = lambda k, half, n: arith.cmpi(
            arith.CmpIPredicate.eq, found, i32((8 * half ^ 8 * k ^ n) & mask ^ apart)
        )
        chosen = np.empty_like(v.registers)
        flat, to = v.registers.reshape(-1, 2), chosen.reshape(-1, 2)
        for (k, half), register in np.ndenumerate(flat):
            if size > 1 and v.mlir_dtype != f32:  # both elements of a register, or none
                to[k, half] = _selected(kept(k, half, 0), register)
                continue
            parts = [
                _selected(kept(k, half, n), value) for n, value in enumerate(elements(register))
            ]
            to[k, half] = vector.from_elements(register.type, parts)
        return mgpu.FragmentedArray(_registers=chosen, _layout=v.layout, _is_signed=None)

    return select(v)


def _selected(keep: Any, value: Any) -> Any:
    """`value`, a number or a register of two, or zero."""
    word = ir.IntegerType.get_signless(32)
    if not isinstance(value.type, ir.VectorType):
        zero = arith.constant(value.type, ir.FloatAttr.get(value.type, 0.0))
        return arith.select(keep, value, zero)
    bits = vector.bitcast(ir.VectorType.get((1,), word), value)
    bits = arith.select(keep, element(bits, 0), i32(0))
    return vector.bitcast(value.type, vector.from_elements(ir.VectorType.get((1,), word), [bits]))


# Fragments of an accumulator

_CONTRACT = arith.FastMathFlags.contract
_add = functools.partial(arith.addf, fastmath=_CONTRACT)


def lane_sums(v: Any, weights: Any = None) -> Any:
    """Sums each lane's elements of (64, n), in the layout of accumulators: (LANES,).

    `weights` are for rows, in their layout.
    """
    if interpreted():
        v = v if weights is None else v * weights[:, None]
        return v.reshape(WARPS, 2, 8, -1, 4, 2).sum((1, 3, 5)).reshape(-1)

    @inline_mlir(TILE, *([] if weights is None else [ROWS]), returns=row_type(1))
    def add(v: Any, weights: Any = None) -> Any:
        sums = []
        for row in _registers_of_columns(v.registers).T:
            even, odd = zip(*map(elements, row), strict=True)
            sums.append(_add(functools.reduce(_add, even), functools.reduce(_add, odd)))
        if weights is not None:
            of_rows = [e for register in weights.registers.flat for e in elements(register)]
            sums = [
                arith.mulf(*pair, fastmath=_CONTRACT) for pair in zip(sums, of_rows, strict=True)
            ]
        return fragmented(_add(*sums))

    return add(v) if weights is None else add(v, weights)


def _registers_of_columns(registers: Any) -> Any:
    """(n / 8, 2): the registers of (64, n), of two columns and one of a lane's two rows each."""
    return registers.reshape(-1, 2)


def store_column_sums(ref: Any, first: int, v: Any, row: int | None = None) -> None:
    """Stores the sums of columns over each warp's 16 rows.

    Args:
      ref: (WARPS, n) in shared memory.
      first: the column of `ref` where the columns of `v` begin.
      v: (64, 32), in the layout of accumulators.
      row: elements from one row of `ref` to the next, by default n.
    """
    (sums,) = sum_lanes(_sums_of_row_pairs(v), (16, 8, 4))
    columns = ref.at[:, pl.ds(first, v.shape[1])]  # the interpreter stores all that it is given
    apart = v.shape[1] if interpreted() else row or ref.shape[1]
    # After each of the three steps a lane has half of its columns: of 4 · 2, one.
    digits = (1, 4, 2), (4, 2, 1), (8, 4, 8), (32, WARPS, apart)
    store_lanes(columns, LaneOffsets(digits), [sums])


def _sums_of_row_pairs(v: Any) -> list[Any]:
    """n / 4 arrays (LANES,): of each column of a lane, in (64, n), the sum of its two rows."""
    if interpreted():
        sums = v.reshape(WARPS, 2, 8, -1, 4, 2).sum(1)
        return [sums[:, :, m, :, c].reshape(-1) for m in range(sums.shape[2]) for c in range(2)]

    @inline_mlir(TILE, returns=(row_type(1),) * (v.shape[1] // 4))
    def add(v: Any) -> Any:
        columns = _registers_of_columns(v.registers)
        pairs = (zip(*map(elements, rows), strict=True) for rows in columns)
        return tuple(fragmented(_add(*pair)) for column in pairs for pair in column)

    return list(add(v))


def own_shape(columns: int, dtype: Any) -> tuple[int, ...]:
    """The shape of shared memory for :func:`store_own` of (64, columns): vectors of each lane."""
    of_vector = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    return ACCUMULATOR_ROWS * columns // LANES // of_vector, LANES, of_vector


def store_own(ref: Any, v: Any) -> None:
    """Stores (64, n) in the layout of accumulators so that each lane reads its own elements alone.

    `ref` is shared memory, of :func:`own_shape`.
    """
    if interpreted():
        ref[...] = v.reshape(ref.shape)
        return

    @inline_mlir(REF, TILE)
    def store(target: Any, v: Any) -> None:
        values = mgpu_utils.vector_concat([*v.registers.flat])
        for vector_of_lane, address in _vectors_of_lane(target):
            part = mgpu_utils.vector_slice(values, vector_of_lane)
            llvm.store(part, address, alignment=VECTOR_BYTES)

    store(ref, v)


def load_own(ref: Any) -> Any:
    """Loads what :func:`store_own` stored."""
    shape = ACCUMULATOR_ROWS, math.prod(ref.shape) // ACCUMULATOR_ROWS
    if interpreted():
        return ref[...].reshape(shape)

    @inline_mlir(REF, returns=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=TILE))
    def load(source: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1)
        for vector_of_lane, address in _vectors_of_lane(source):
            first, last = vector_of_lane.start, vector_of_lane.stop
            kind = ir.VectorType.get((last - first,), dtype_of(source))
            values = llvm.load(kind, address, alignment=VECTOR_BYTES)
            for k in range(first, last, 2):
                pair = slice(k - first, k - first + 2)
                flat[k // 2] = mgpu_utils.vector_slice(values, pair)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(ref)


def _vectors_of_lane(ref: Any) -> Iterator[tuple[slice, Any]]:
    """Yields which elements of the lane each of its vectors in `ref` has, and the address of it.

    `ref` is of :func:`own_shape`.
    """
    kind = ir.MemRefType(ref.type)
    count, lanes, size = kind.shape
    start = pointer_of_lane(ref, LaneOffsets(((1, LANES, size),)))
    for k in range(count):
        address = mgpu_utils.getelementptr(start, [k * lanes * size], kind.element_type)
        yield slice(k * size, (k + 1) * size), address
