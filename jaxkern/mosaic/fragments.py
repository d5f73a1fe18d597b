"""Per-lane fragments of an accumulator: their sums, and shared memory that only their lane reads.

Of (64, n) in the layout of accumulators a warp has 16 rows, and a lane two rows, 8 apart, of two
columns in every 8.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import LaneOffsets, pointer_of_lane, store_lanes, sum_lanes
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import REF, VECTOR_BYTES, elements, fragmented, inline_mlir, row_type
from jaxkern.mosaic.wgmma import ACCUMULATOR_ROWS, ROWS, TILE, WARPS

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


def store_column_sums(ref: Any, first: int, v: Any) -> None:
    """Stores the sums of columns over each warp's 16 rows.

    Args:
      ref: (WARPS, n) in shared memory.
      first: the column of `ref` where the columns of `v` begin.
      v: (64, 32), in the layout of accumulators.
    """
    (sums,) = sum_lanes(_sums_of_row_pairs(v), (16, 8, 4))
    columns = ref.at[:, pl.ds(first, v.shape[1])]  # the interpreter stores all that it is given
    row = v.shape[1] if interpreted() else ref.shape[1]
    # After each of the three steps a lane has half of its columns: of 4 · 2, one.
    digits = (1, 4, 2), (4, 2, 1), (8, 4, 8), (32, WARPS, row)
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
        dtype = ir.MemRefType(source.type).element_type
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1)
        for vector_of_lane, address in _vectors_of_lane(source):
            kind = ir.VectorType.get((vector_of_lane.stop - vector_of_lane.start,), dtype)
            values = llvm.load(kind, address, alignment=VECTOR_BYTES)
            first = vector_of_lane.start
            for k in range(first, vector_of_lane.stop, 2):
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
