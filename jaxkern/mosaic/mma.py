"""Products of a warpgroup: by mma.sync on every GPU from Ampere on, on Hopper by wgmma.

An accumulator (64, n) is an fp32 array in the layout TILE of :mod:`jaxkern.mosaic.wgmma`: a warp
has 16 rows. The left operand, (64, k) in 16 bits in the same layout, is in registers, so that an
accumulator becomes a left operand without moving, or in a tile (:mod:`jaxkern.mosaic.tiles`). The
right one is read from a tile: with mma.sync by each warp, with wgmma once for all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import REF, VECTOR_BYTES, dtype_of, element, elements, i32, inline_mlir
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.tiles import (
    UNIT,
    UNITS,
    WIDTH,
    Left,
    Tile,
    bits_of,
    by_wgmma,
    from_quads,
    narrowed_to,
    shape_of,
    tile_ref,
    tile_type,
    values_of,
)
from jaxkern.mosaic.wgmma import ACCUMULATOR_ROWS, COLUMNS, TILE


def accumulator(columns: int) -> jax.Array:
    """(64, columns), fp32 zeros."""
    return plgpu.layout_cast(jnp.zeros((ACCUMULATOR_ROWS, columns), jnp.float32), TILE)


@dataclasses.dataclass(frozen=True)
class Products:
    """Products that run. Until :func:`finish` the registers here and tiles stay as they are."""

    accs: list[jax.Array]
    lefts: list[jax.Array]


def multiply(
    accs: Sequence[jax.Array],
    lefts: Sequence[Any],
    right: Any,
    *,
    transposed: bool = False,
    first: int = 0,
) -> list[jax.Array]:
    """Adds left · right to each accumulator; what is read of `right` serves all of them.

    Args:
      accs: accumulators (64, n).
      lefts: left operands (64, k), one for each, in registers or in tiles. Of fp32 each 16 columns
        are rounded when they are multiplied.
      right: a tile (k, n), or `transposed` (n, k), or more columns n.
      first: the column of n to begin with, a multiple of 16.
    """
    return finish(start(accs, lefts, right, transposed=transposed, first=first))


def start(
    accs: Sequence[jax.Array],
    lefts: Sequence[Any],
    right: Any,
    *,
    transposed: bool = False,
    first: int = 0,
) -> Products:
    """Starts what :func:`multiply` does; mma.sync has then done it."""
    n = accs[0].shape[1]
    in_registers = [isinstance(a, jax.Array) for a in lefts]
    inner = lefts[0].shape[1] if in_registers[0] else shape_of(lefts[0])[1]
    if interpreted():
        values = values_of(right).astype(jnp.float32)
        values = (values.T if transposed else values)[:, first : first + n]
        narrow = (
            (a if own else values_of(a)).astype(right.dtype).astype(jnp.float32)
            for own, a in zip(in_registers, lefts, strict=True)
        )
        dot = lambda a: jnp.dot(a, values, precision=lax.Precision.HIGHEST)
        return Products([acc + dot(a) for acc, a in zip(accs, narrow, strict=True)], [])
    assert right.dtype == jnp.bfloat16, right.dtype
    count = len(accs)
    layouts: Any = [tile_ref(), *[TILE] * count]
    layouts += [TILE if own else tile_ref() for own in in_registers]
    types = [tile_type(a.shape, a.dtype) for a in accs]
    if by_wgmma():
        held = [a for a, own in zip(lefts, in_registers, strict=True) if own]
        types += [tile_type(a.shape, right.dtype) for a in held]

        @inline_mlir(*layouts, returns=tuple(types))
        def begin(right: Any, *args: Any) -> Any:
            return _wgmma(right, args[:count], args[count:], inner, n, transposed, first)

        running = list(begin(right, *accs, *lefts))
        return Products(running[:count], running[count:])

    @inline_mlir(*layouts, returns=tuple(types))
    def run(right: Any, *args: Any) -> Any:
        sums = [_accumulator(v) for v in args[:count]]
        tile = Tile(right)
        lefts = [Left(v, dtype_of(right)) for v in args[count:]]
        of_inner, of_n = tile.lane_digits()  # halves of 16 along k, and along n
        row, unit = (of_n, of_inner) if transposed else (of_inner, of_n)
        row = tile.row_of(row)
        for k in range(inner // 16):
            operands = [left.columns(k) for left in lefts]
            for m in range(n // 16):
                column = first + 16 * m
                at = (column, 2 * k) if transposed else (16 * k, column // UNIT)
                b = tile.matrices(row, unit, *at, transposed=not transposed)
                for acc, a in zip(sums, operands, strict=True):
                    for half in range(2):
                        part = acc[2 * m + half]
                        acc[2 * m + half] = _mma(part, a, b[2 * half :][:2])
        return tuple(
            from_quads(acc, v.registers.shape) for acc, v in zip(sums, args[:count], strict=True)
        )

    return Products(list(run(right, *accs, *lefts)), [])


def finish(
    products: Products, later: int = 0, *, ready: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Waits for products, and for all before them; returns their accumulators, and `ready`.

    Args:
      products: which run.
      later: how many of :func:`start` were called after them.
      ready: arrays that are to be in registers before: accumulators, and numbers of columns.
    """
    if not by_wgmma():
        return [*products.accs, *ready]
    accs, held = products.accs, [*products.accs, *products.lefts]
    layouts: Any = [TILE if v.ndim == 2 else COLUMNS for v in (*held, *ready)]
    types = (
        plgpu.ShapeDtypeStruct(v.shape, v.dtype, layout=layout)
        for v, layout in zip((*held, *ready), layouts, strict=True)
    )

    @inline_mlir(*layouts, returns=tuple(types))
    def wait(*arrays: Any) -> Any:
        loaded = _barrier(*arrays[len(held) :]) if ready else ()
        nvvm.wgmma_wait_group_sync_aligned(later)
        return *_barrier(*arrays[: len(held)]), *loaded

    found = list(wait(*held, *ready))
    return found[: len(accs)] + found[len(held) :]


def _barrier(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, which the compiler has in registers here."""
    held = fa.optimization_barrier(*arrays)
    return tuple(held) if isinstance(held, (list, tuple)) else (held,)


def anew(v: jax.Array) -> jax.Array:
    """(64, n) in the layout of accumulators, which the compiler takes for another value.

    So what is computed from it here and elsewhere is not kept in between.
    """
    if interpreted():
        return v

    @inline_mlir(TILE, returns=tile_type(v.shape, v.dtype))
    def hide(v: Any) -> Any:
        return _barrier(v)[0]

    return hide(v)


HALF = 32
"""Rows of a block on the diagonal whose inverse is found by substitution: the lanes of a warp."""
PADDED = 2 * HALF + 4
"""Elements of a row in fp32 of which lanes of a warp read parts of 8 rows without conflicts."""


def invert_unit_lower(lower: Any, into: Any) -> None:
    """Stores the inverses of two matrices that are `lower` below a diagonal of ones.

    The blocks of `HALF` rows on the diagonal are inverted by substitution in fp32: a warp has one
    of them, and a lane a column, all of it in registers. With X and Y their inverses, and A the
    block below X, that one of the inverse is −Y A X. For this fp32 is multiplied as the sum of two
    bf16, less the product of the small parts: to 16 bits.

    Args:
      lower: (2, 64, PADDED), fp32 in shared memory, of which 64 columns count. What is not below
        the diagonal does not count; the inverses overwrite it.
      into: (2, 64, 64) in global memory, 16 bits; the matrices may lie apart.
    """
    n = 2 * HALF
    if interpreted():
        ones = jnp.eye(n, dtype=jnp.float32)
        tril = jnp.tril(lower[...][..., :n], -1) + ones
        inverse = jax.scipy.linalg.solve_triangular(
            tril, jnp.broadcast_to(ones, tril.shape), lower=True, unit_diagonal=True
        )
        into[...] = inverse.astype(into.dtype)
        return

    @inline_mlir(REF, REF)
    def invert(lower: Any, into: Any) -> None:
        _invert_halves(lower)
        mgpu_utils.warpgroup_barrier()
        found = _lower_left(lower)
        mgpu_utils.warpgroup_barrier()  # all warps have read the blocks
        _store_lower_left(lower, found)
        mgpu_utils.warpgroup_barrier()
        _write_lower(lower, into)

    invert(lower, into)


def _warp_of(thread: Any) -> tuple[Any, Any, Any]:
    """A matrix of two, a half of it, and the number in the warp that has these."""
    bit = lambda n: arith.andi(arith.shrui(thread, i32(n)), i32(1))
    return bit(6), bit(5), arith.andi(thread, i32(HALF - 1))


def _in_fp32(ref: Any, *index: Any) -> Any:
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), list(index), ir.F32Type.get())


def _invert_halves(lower: Any) -> None:
    f32 = ir.F32Type.get()
    matrix, half, column = _warp_of(mgpu_utils.thread_idx())
    start = arith.addi(
        arith.muli(matrix, i32(2 * HALF * PADDED)), arith.muli(half, i32(HALF * (PADDED + 1)))
    )
    row_of, own_of = _in_fp32(lower, start), _in_fp32(lower, arith.addi(start, column))
    quad, contract = ir.VectorType.get((4,), f32), arith.FastMathFlags.contract
    zero, one = arith.constant(f32, 0.0), arith.constant(f32, 1.0)
    add = lambda a, b: arith.addf(a, b, fastmath=contract)
    found = []
    for i in range(HALF):
        own = arith.cmpi(arith.CmpIPredicate.eq, column, i32(i))
        sums = [arith.select(own, one, zero), zero, zero, zero]
        for m in range(0, i, 4):
            address = mgpu_utils.getelementptr(row_of, [i * PADDED + m], f32)
            row = llvm.load(quad, address, alignment=VECTOR_BYTES)
            for k in range(min(4, i - m)):
                product = arith.mulf(element(row, k), found[m + k], fastmath=contract)
                sums[k] = arith.subf(sums[k], product, fastmath=contract)
        found.append(add(add(sums[0], sums[1]), add(sums[2], sums[3])))
    mgpu_utils.warp_barrier()
    for i, value in enumerate(found):
        llvm.store(value, mgpu_utils.getelementptr(own_of, [i * PADDED], f32), alignment=4)


def _lower_left(lower: Any) -> list[list[Any]]:
    """A lane's part of −Y A X, of which a warp has 16 rows: four values in each 8 columns."""
    f32 = ir.F32Type.get()
    matrix, part, lane = _warp_of(mgpu_utils.thread_idx())
    row, pair = arith.shrui(lane, i32(2)), arith.muli(arith.andi(lane, i32(3)), i32(2))
    start = arith.muli(matrix, i32(2 * HALF * PADDED))
    two = ir.VectorType.get((2,), f32)

    def halves(a: Any, b: Any) -> tuple[Any, Any]:
        """Two numbers as the sum of pairs in 16 bits."""
        kind = ir.VectorType.get((2,), ir.BF16Type.get())
        values = vector.from_elements(two, [a, b])
        high = arith.truncf(kind, values)
        # A bf16 is the upper half of its fp32, which arith.extf does not say on all GPUs.
        bits = bits_of(high)
        wide = [
            arith.bitcast(f32, v)
            for v in (arith.shli(bits, i32(16)), arith.andi(bits, i32(-(1 << 16))))
        ]
        low = arith.truncf(kind, arith.subf(values, vector.from_elements(two, wide)))
        return bits, bits_of(low)

    def left(first_row: int, column: int) -> list[Any]:
        own = arith.addi(arith.muli(part, i32(16)), row)
        own = arith.addi(start, arith.addi(arith.muli(own, i32(PADDED)), pair))
        found = []
        for k, m in ((0, 0), (0, 8), (8, 0), (8, 8)):
            address = _in_fp32(lower, own)
            offset = (first_row + m) * PADDED + column + k
            address = mgpu_utils.getelementptr(address, [offset], f32)
            value = llvm.load(two, address, alignment=8)
            found.append(halves(*elements(value)))
        return found

    def right(first_row: int, column: int) -> list[Any]:
        own = arith.addi(start, arith.addi(arith.muli(pair, i32(PADDED)), row))
        address, found = _in_fp32(lower, own), []
        for k in (0, 8):
            offsets = ((first_row + k + m) * PADDED + column for m in range(2))
            values = [
                llvm.load(f32, mgpu_utils.getelementptr(address, [at], f32), alignment=4)
                for at in offsets
            ]
            found.append(halves(*values))
        return found

    def product(lefts: list[Any], first_row: int, column: int) -> list[Any]:
        accs = [[arith.constant(f32, 0.0)] * 4 for _ in range(HALF // 8)]
        for k, a in enumerate(lefts):
            for m, acc in enumerate(accs):
                b = right(first_row + 16 * k, column + 8 * m)
                for of_a, of_b in ((0, 0), (0, 1), (1, 0)):
                    pick = lambda pairs, which: [v[which] for v in pairs]
                    acc[:] = _mma(acc, pick(a, of_a), pick(b, of_b))
        return accs

    first = product([left(HALF, HALF + 16 * k) for k in range(2)], HALF, 0)
    pairs = [halves(*map(arith.negf, acc[k : k + 2])) for acc in first for k in (0, 2)]
    return product([pairs[:4], pairs[4:]], 0, 0)


def _store_lower_left(lower: Any, found: list[list[Any]]) -> None:
    matrix, part, lane = _warp_of(mgpu_utils.thread_idx())
    row, pair = arith.shrui(lane, i32(2)), arith.muli(arith.andi(lane, i32(3)), i32(2))
    row = arith.addi(arith.addi(arith.muli(part, i32(16)), row), i32(HALF))
    start = arith.addi(arith.muli(matrix, i32(2 * HALF)), row)
    address = _in_fp32(lower, arith.addi(arith.muli(start, i32(PADDED)), pair))
    f32 = ir.F32Type.get()
    for m, acc in enumerate(found):
        for k in range(2):
            to = mgpu_utils.getelementptr(address, [8 * k * PADDED + 8 * m], f32)
            pair = vector.from_elements(ir.VectorType.get((2,), f32), acc[2 * k :][:2])
            llvm.store(pair, to, alignment=8)


def _write_lower(lower: Any, into: Any) -> None:
    """Writes both matrices, and zeros right of the diagonal's upper block."""
    f32, dtype = ir.F32Type.get(), dtype_of(into)
    lane = arith.andi(mgpu_utils.thread_idx(), i32(LANES - 1))
    unit, row = arith.andi(lane, i32(UNITS - 1)), arith.divui(lane, i32(UNITS))
    column = arith.muli(unit, i32(UNIT))
    right = arith.cmpi(arith.CmpIPredicate.uge, unit, i32(UNITS // 2))
    source = _in_fp32(lower, arith.addi(arith.muli(row, i32(PADDED)), column))
    to = mgpu_utils.getelementptr(
        mgpu_utils.memref_ptr(into), [arith.addi(arith.muli(row, i32(2 * HALF)), column)], dtype
    )
    apart = ir.MemRefType(into.type).get_strides_and_offset()[0][0]
    kind, quad = ir.VectorType.get((UNIT,), dtype), ir.VectorType.get((4,), f32)
    zeros = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(dtype, 0)))
    for first in range(0, 4 * HALF, LANES // UNITS):
        parts = [
            llvm.load(
                quad,
                mgpu_utils.getelementptr(source, [first * PADDED + k], f32),
                alignment=VECTOR_BYTES,
            )
            for k in (0, 4)
        ]
        value = arith.truncf(kind, mgpu_utils.vector_concat(parts))
        if first % (2 * HALF) < HALF:
            value = arith.select(right, zeros, value)
        matrix, of_matrix = divmod(first, 2 * HALF)
        there = mgpu_utils.getelementptr(to, [matrix * apart + of_matrix * 2 * HALF], dtype)
        llvm.store(value, there, alignment=VECTOR_BYTES)


def _wgmma(
    right: Any, accs: Any, lefts: Any, inner: int, n: int, transposed: bool, first: int
) -> tuple[Any, ...]:
    """Starts the products of :func:`start`: accumulators, and left operands in registers."""
    dtype = dtype_of(right)
    of_left: Any = [v if isinstance(v, mgpu.FragmentedArray) else _Operand(v) for v in lefts]
    of_right = _Operand(right)
    rounded = (_rounded(v, dtype) for v in of_left if not isinstance(v, _Operand))
    held = _barrier(*accs, *rounded)
    own = held[len(accs) :]
    arrays = iter(own)
    of_left = [v if isinstance(v, _Operand) else next(arrays) for v in of_left]
    sums = [[v for quad in _accumulator(acc) for v in quad] for acc in held[: len(accs)]]
    nvvm.wgmma_fence_aligned()
    for k in range(inner // 16):
        b = of_right.across(k, first) if transposed else of_right.along(k, first)
        for m, left in enumerate(of_left):
            if isinstance(left, _Operand):
                a = [left.across(k)]
            else:
                a = [bits_of(v) for v in left.registers.flat[4 * k : 4 * k + 4]]
            sums[m] = _wgmma_m64(n, sums[m], a, b, not transposed)
    nvvm.wgmma_commit_group_sync_aligned()
    quads = lambda values: [values[k : k + 4] for k in range(0, len(values), 4)]
    found = (from_quads(quads(v), acc.registers.shape) for v, acc in zip(sums, accs, strict=True))
    return *found, *own


def _wgmma_m64(n: int, acc: list[Any], a: list[Any], b: Any, by_columns: bool) -> list[Any]:
    """64 × n sums, with 16 products added to each; `a` is four registers or a descriptor."""
    f32, count = ir.F32Type.get(), len(acc)
    numbers = iter(range(2 * count + len(a) + 1))
    list_of = lambda m: "{" + ",".join(f"${next(numbers)}" for _ in range(m)) + "}"
    sums, _ = list_of(count), list_of(count)
    left = list_of(4) if len(a) == 4 else f"${next(numbers)}"
    flags = f"{int(by_columns)}" if len(a) == 4 else f"0, {int(by_columns)}"
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*acc, *a, b],
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
        f"{sums}, {left}, ${next(numbers)}, 1, 1, 1, {flags};",
        ",".join(
            ["=f"] * count
            + [str(i) for i in range(count)]
            + (["r"] * 4 if len(a) == 4 else ["l"])
            + ["l"]
        ),
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, struct, [i]) for i in range(count)]


class _Operand:
    """A tile as wgmma reads it: descriptors of 16 of its columns, or of 16 of its rows."""

    def __init__(self, ref: Any):
        word = ir.IntegerType.get_signless(32)
        strides = ir.MemRefType(ref.type).get_strides_and_offset()[0]
        self._block, row = 2 * strides[0], 2 * strides[1]
        assert row == 2 * WIDTH, strides
        # Anew: else a loop would hold the descriptors of all operands.
        address = mgpu_utils.inline_ptx(
            "mov.u32 $0, $1;",
            llvm.ptrtoint(word, mgpu_utils.memref_ptr(ref)),
            result_types=word,
            has_side_effects=True,
        )
        self._start = arith.andi(arith.shrui(address, i32(4)), i32(0x3FFF))

    def _at(self, offset: int, leading: int) -> Any:
        """The descriptor at an offset in bytes: rows of 8 are 1024 bytes apart."""
        wide = ir.IntegerType.get_signless(64)
        low = arith.addi(self._start, i32((leading >> 4) << 16 | offset >> 4))
        high = (1 << 30 | 8 * 2 * WIDTH >> 4) << 32
        return arith.ori(arith.extui(wide, low), arith.constant(wide, high))

    def across(self, k: int, first: int = 0) -> Any:
        """The `k`-th 16 columns, which are multiplied, from row `first` on."""
        block, column = divmod(16 * k, WIDTH)
        return self._at(block * self._block + first * 2 * WIDTH + 2 * column, 16)

    def along(self, k: int, first: int) -> Any:
        """The `k`-th 16 rows, which are multiplied, from column `first` on."""
        block, column = divmod(first, WIDTH)
        return self._at(block * self._block + 16 * k * 2 * WIDTH + 2 * column, self._block)


def _rounded(v: Any, dtype: Any) -> Any:
    """A left operand in 16 bits."""
    registers = np.empty_like(v.registers)
    for index, register in np.ndenumerate(v.registers):
        registers[index] = narrowed_to(register, dtype)
    return mgpu.FragmentedArray(_registers=registers, _layout=v.layout, _is_signed=None)


def _mma(acc: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """16 × 8 sums of a warp, four of a lane, with 16 products added to each."""
    f32 = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*a, *b, *acc],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
    )
    return [llvm.extractvalue(f32, struct, [i]) for i in range(4)]


def _accumulator(v: Any) -> list[list[Any]]:
    """The four values of a lane in each 8 columns."""
    return [
        [value for register in pair for value in elements(register)]
        for pair in v.registers.reshape(-1, 2)
    ]
