"""Products by mma.sync, the tensor cores of every GPU from Ampere on, for blocks of one warpgroup.

Tiles of 16-bit elements lie in shared memory in rows of whole 128 bytes. Within each 128 bytes the
unit u of 16 bytes of row r is stored at u xor (r mod 8), so that neither a row nor a column of
units meets a bank twice. Only the functions here read and write tiles; in Pallas's interpreter they
lie as they are.

An accumulator (64, n) is an fp32 array in the layout TILE of :mod:`jaxkern.mosaic.wgmma`: a warp
has 16 rows. The left operand, (64, k) in 16 bits in the same layout, is in registers, so that an
accumulator becomes a left operand without moving. The right one is read from a tile, by all warps.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.mosaic.launch import LANES, shared_memory
from jaxkern.mosaic.registers import REF, VECTOR_BYTES, element, elements, i32, inline_mlir
from jaxkern.mosaic.ring import close_copies, start_copy, wait_for_copy
from jaxkern.mosaic.wgmma import ACCUMULATOR_ROWS, TILE

UNIT = 8
"""Elements of a unit of 16 bytes."""
UNITS = 8
"""Units that are permuted together."""
PTX_TYPES = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}


def accumulator(columns: int) -> jax.Array:
    """(64, columns), fp32 zeros."""
    return plgpu.layout_cast(jnp.zeros((ACCUMULATOR_ROWS, columns), jnp.float32), TILE)


def tile_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of (64, n) in the layout of accumulators."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=TILE)


BLOCKS = 2
"""Blocks of a multiprocessor, for whose registers kernels are made: of 255 a lane."""


@dataclasses.dataclass(frozen=True)
class TileRing:
    """Stages of shared memory that the lanes of a block fill ahead.

    Attributes:
      tiles: shape and dtype of each array's stage: tiles of 16-bit elements, and rows of fp32.
      stages: two where a multiprocessor then still has room for `BLOCKS` blocks, else one.
    """

    tiles: dict[str, tuple[tuple[int, ...], Any]]
    stages: int

    @classmethod
    def of(cls, other: int, tiles: dict[str, tuple[tuple[int, ...], Any]]) -> "TileRing":
        """A ring beside `other` bytes of shared memory."""
        sizes = (np.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tiles.values())
        size = int(sum(sizes))
        return cls(tiles, 2 if BLOCKS * (2 * size + other + 1024) <= shared_memory() else 1)

    def scratch(self) -> dict[str, Any]:
        return {
            name: plgpu.SMEM((self.stages, *shape), dtype)
            for name, (shape, dtype) in self.tiles.items()
        }

    def loop(
        self,
        smem: Any,
        count: Any,
        sources: Callable[[Any], dict[str, Any]],
        step: Callable[[Any, dict[str, Any], Any], Any],
        carry: Any,
    ) -> Any:
        """Runs ``carry = step(n, stage, carry)`` for n below `count`; `stage` has the tiles.

        Args:
          smem: of :meth:`scratch`.
          count: of steps.
          sources: the parts of arrays in global memory for step n.
          step: reads and may write its stage.
          carry: to begin with.
        """

        def fetch(n: Any) -> None:
            slot = lax.rem(n, self.stages)

            @pl.when(n < count)
            def _() -> None:
                for name, source in sources(n).items():
                    copy_to_tile(source, getattr(smem, name).at[slot])

            close_copies(True)

        def run(n: Any, carry: Any) -> Any:
            sync_warpgroup()  # all warps are done with the stage that comes next
            fetch(n + self.stages - 1)
            wait_for_copy(None, self.stages - 1)
            slot = lax.rem(n, self.stages)
            return step(n, {name: getattr(smem, name).at[slot] for name in self.tiles}, carry)

        for n in range(self.stages - 1):
            fetch(n)
        return lax.fori_loop(0, count, run, carry)


def copy_to_tile(source: Any, into: Any) -> None:
    """Has the lanes start to copy a tile, or rows of fp32."""
    if into.dtype.itemsize == 2:
        start_tile_copy(source, into)
    else:
        start_copy(source, into, None)


def start_tile_copy(source: Any, into: Any) -> None:
    """Has the lanes start to copy a tile with cp.async.

    Args:
      source: (rows, n) of an array in global memory, its rows aligned to 16 bytes.
      into: shared memory of its shape.
    """
    if interpreted():
        into[...] = source[...]
        return

    @inline_mlir(REF, REF)
    def copy(source: Any, into: Any) -> None:
        outside = llvm.PointerType.get(address_space=1)
        start = llvm.addrspacecast(outside, mgpu_utils.memref_ptr(source))
        for there, here in _units(source, into):
            nvvm.cp_async_shared_global(
                mgpu_utils.getelementptr(mgpu_utils.memref_ptr(into), [here], _dtype(into)),
                mgpu_utils.getelementptr(start, [there], _dtype(into)),
                VECTOR_BYTES,
                nvvm.LoadCacheModifierKind.CG,
            )

    copy(source, into)


def write_tile(source: Any, into: Any) -> None:
    """Copies a tile from shared to global memory; all lanes' parts of it must be there."""
    if interpreted():
        into[...] = source[...]
        return

    @inline_mlir(REF, REF)
    def copy(source: Any, into: Any) -> None:
        kind = ir.VectorType.get((UNIT,), _dtype(source))
        for there, here in _units(into, source):
            held = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(source), [here], _dtype(source))
            to = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(into), [there], _dtype(into))
            value = llvm.load(kind, held, alignment=VECTOR_BYTES)
            llvm.store(value, to, alignment=VECTOR_BYTES)

    copy(source, into)


def load_left(
    ref: Any, *, transposed: bool = False, columns: tuple[int, int] | None = None
) -> jax.Array:
    """Loads a left operand (64, k) from a tile of its shape, or `transposed` from (k, 64).

    Where it is not transposed, `columns` may say at which one to begin, and how many to load.
    """
    shape = ref.shape[::-1] if transposed else ref.shape
    first, count = columns or (0, shape[1])
    shape = shape[0], count
    if interpreted():
        return ref[...].T if transposed else ref[:, first : first + count]

    @inline_mlir(REF, returns=tile_type(shape, ref.dtype))
    def load(ref: Any) -> Any:
        left = _Left(ref, _dtype(ref), transposed)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1, 2)
        kind = ir.VectorType.get((2,), _dtype(ref))
        for k in range(count // 16):
            loaded = left.columns(first // 16 + k)
            for n, value in enumerate(loaded):
                flat[2 * k + n // 2, n % 2] = vector.bitcast(kind, _as_vector(value))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(ref)


def store_tile(ref: Any, v: jax.Array, *, transposed: bool = False) -> None:
    """Stores (64, n) in 16 bits to a tile of its shape, or `transposed` to (n, 64)."""
    if interpreted():
        ref[...] = v.T if transposed else v
        return

    @inline_mlir(REF, TILE)
    def store(ref: Any, v: Any) -> None:
        tile, word = _Tile(ref), ir.IntegerType.get_signless(32)
        group, pair = tile.digit(2, 3), arith.muli(tile.digit(0, 2), i32(2))
        for (k, half), register in np.ndenumerate(v.registers.reshape(-1, 2)):
            value = _bits(register)
            if transposed:
                value = llvm.inline_asm(
                    word, [value], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r"
                )
                row = arith.addi(group, i32(8 * k))
                unit = arith.addi(arith.muli(tile.warp, i32(2)), i32(half))
            else:
                row = arith.addi(arith.addi(arith.muli(tile.warp, i32(16)), group), i32(8 * half))
                unit = i32(k)
            llvm.store(value, tile.address(row, unit, group, pair), alignment=4)

    store(ref, v)


def store_matrix(ref: Any, v: jax.Array, *, transposed: bool = False) -> None:
    """Stores (64, n), fp32, to a matrix of its shape, in fp32 or 16 bits, or transposed in fp32."""
    if interpreted():
        ref[...] = (v.T if transposed else v).astype(ref.dtype)
        return

    @inline_mlir(REF, TILE)
    def store(ref: Any, v: Any) -> None:
        if transposed:
            for (k, half), register in np.ndenumerate(v.registers.reshape(-1, 2)):
                for n, to in enumerate(_column_of_lane(ref, k, half)):
                    llvm.store(element(register, n), to, alignment=4)
            return
        lane, stride = _lane(), ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
        row = arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3))
        start = arith.addi(arith.muli(row, i32(stride)), arith.muli(bits(0, 2), i32(2)))
        start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [start], _dtype(ref))
        for (k, half), register in np.ndenumerate(v.registers.reshape(-1, 2)):
            to = mgpu_utils.getelementptr(start, [8 * half * stride + 8 * k], _dtype(ref))
            llvm.store(
                _narrowed(register, _dtype(ref)),
                to,
                alignment=2 * mgpu_utils.bytewidth(_dtype(ref)),
            )

    store(ref, v)


def load_transposed(ref: Any) -> jax.Array:
    """Loads (64, n) from a matrix (n, 64), fp32."""
    if interpreted():
        return ref[...].T
    n, f32 = ref.shape[0], jnp.float32

    @inline_mlir(REF, returns=tile_type((ACCUMULATOR_ROWS, n), f32))
    def load(ref: Any) -> Any:
        kind = ir.F32Type.get()
        values = [[None] * 4 for _ in range(n // UNIT)]
        for k in range(n // UNIT):
            for half in range(2):
                for m, address in enumerate(_column_of_lane(ref, k, half)):
                    values[k][2 * half + m] = llvm.load(kind, address, alignment=4)
        return _fragmented(values, mgpu.WGMMA_LAYOUT.registers_shape((ACCUMULATOR_ROWS, n)))

    return load(ref)


def _column_of_lane(ref: Any, k: int, half: int) -> list[Any]:
    """Where a lane's pair of (64, n) lies in (n, 64): register `half` of the `k`-th 8 columns."""
    stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
    lane = arith.remui(mgpu_utils.thread_idx(), i32(LANES))
    bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
    row = arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3))
    column = arith.muli(bits(0, 2), i32(2 * stride))
    start = mgpu_utils.getelementptr(
        mgpu_utils.memref_ptr(ref), [arith.addi(row, column)], _dtype(ref)
    )
    offsets = (8 * half + (8 * k + m) * stride for m in range(2))
    return [mgpu_utils.getelementptr(start, [at], _dtype(ref)) for at in offsets]


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
    n, inner = accs[0].shape[1], lefts[0].shape[1]
    if interpreted():
        values = right[...].astype(jnp.float32)
        values = (values.T if transposed else values)[:, first : first + n]
        narrow = (a[...].astype(right.dtype).astype(jnp.float32) for a in lefts)
        dot = lambda a: jnp.dot(a, values, precision=lax.Precision.HIGHEST)
        return [acc + dot(a) for acc, a in zip(accs, narrow, strict=True)]
    count, name = len(accs), PTX_TYPES[jnp.dtype(right.dtype)]
    layouts: Any = [REF, *[TILE] * count]
    layouts += [TILE if isinstance(a, jax.Array) else REF for a in lefts]

    @inline_mlir(*layouts, returns=tuple(tile_type(a.shape, a.dtype) for a in accs))
    def run(right: Any, *args: Any) -> Any:
        sums = [_accumulator(v) for v in args[:count]]
        tile = _Tile(right)
        lefts = [_Left(v, _dtype(right)) for v in args[count:]]
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
                        acc[2 * m + half] = _mma(name, part, a, b[2 * half :][:2])
        return tuple(
            _fragmented(acc, v.registers.shape) for acc, v in zip(sums, args[:count], strict=True)
        )

    return list(run(right, *accs, *lefts))


class _Left:
    """A left operand (64, k), in registers or in a tile, which may be transposed."""

    def __init__(self, v: Any, dtype: Any, transposed: bool = False):
        self._array = v if isinstance(v, mgpu.FragmentedArray) else None
        self._dtype, self._transposed = dtype, transposed
        if self._array is not None:
            return
        self._tile = tile = _Tile(v)
        rows, columns = tile.lane_digits()  # halves of 16 rows, and of 16 columns
        if transposed:
            self._row = tile.row_of(columns)
            self._unit = arith.addi(arith.muli(tile.warp, i32(2)), rows)
        else:
            self._row = arith.addi(arith.muli(tile.warp, i32(16)), tile.row_of(rows))
            self._unit = columns

    def columns(self, k: int) -> list[Any]:
        """A lane's four pairs of the `k`-th 16 columns."""
        if self._array is None and self._transposed:
            return self._tile.matrices(self._row, self._unit, 16 * k, 0, transposed=True)
        if self._array is None:
            return self._tile.matrices(self._row, self._unit, 0, 2 * k)
        pairs = self._array.registers.flat[4 * k : 4 * k + 4]
        return [_bits(_narrowed(v, self._dtype)) for v in pairs]


def invert_unit_lower(lower: Any, into: Any) -> None:
    """Stores the inverses of two matrices that are `lower` below a diagonal of ones.

    By substitution in fp32. A lane has a column of one of them, all of it in registers.

    Args:
      lower: (2, 64, 64), fp32 in shared memory; what is not below the diagonal is not read.
      into: (2, 64, 64) in global memory, 16 bits.
    """
    n = lower.shape[-1]
    if interpreted():
        ones = jnp.eye(n, dtype=jnp.float32)
        tril = jnp.tril(lower[...], -1) + ones
        inverse = jax.scipy.linalg.solve_triangular(
            tril, jnp.broadcast_to(ones, tril.shape), lower=True, unit_diagonal=True
        )
        into[...] = inverse.astype(into.dtype)
        return

    @inline_mlir(REF, REF)
    def invert(lower: Any, into: Any) -> None:
        f32, lane = ir.F32Type.get(), arith.remui(mgpu_utils.thread_idx(), i32(LANES))
        matrix, column = arith.divui(lane, i32(n)), arith.remui(lane, i32(n))
        start = mgpu_utils.getelementptr(
            mgpu_utils.memref_ptr(lower), [arith.muli(matrix, i32(n * n))], f32
        )
        offset = arith.addi(arith.muli(matrix, i32(n * n)), column)
        to = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(into), [offset], _dtype(into))
        quad, contract = ir.VectorType.get((4,), f32), arith.FastMathFlags.contract
        zero, one = arith.constant(f32, 0.0), arith.constant(f32, 1.0)
        found = []
        for i in range(n):
            own = arith.cmpi(arith.CmpIPredicate.eq, column, i32(i))
            sums = [arith.select(own, one, zero), zero, zero, zero]
            for m in range(0, i, 4):
                at = mgpu_utils.getelementptr(start, [i * n + m], f32)
                row = llvm.load(quad, at, alignment=VECTOR_BYTES)
                for k in range(min(4, i - m)):
                    product = arith.mulf(element(row, k), found[m + k], fastmath=contract)
                    sums[k] = arith.subf(sums[k], product, fastmath=contract)
            add = lambda a, b: arith.addf(a, b, fastmath=contract)
            found.append(add(add(sums[0], sums[1]), add(sums[2], sums[3])))
            address = mgpu_utils.getelementptr(to, [i * n], _dtype(into))
            llvm.store(arith.truncf(_dtype(into), found[-1]), address, alignment=2)

    invert(lower, into)


def _mma(name: str, acc: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """16 × 8 sums of a warp, four of a lane, with 16 products added to each."""
    f32 = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*a, *b, *acc],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
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


def _fragmented(values: list[list[Any]], shape: tuple[int, ...]) -> Any:
    """Undoes :func:`_accumulator`."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(shape, dtype=object)
    flat = registers.reshape(-1, 2)
    for (k, half), _ in np.ndenumerate(flat):
        flat[k, half] = vector.from_elements(kind, values[k][2 * half : 2 * half + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _bits(register: Any) -> Any:
    """The 32 bits of two 16-bit elements."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return element(vector.bitcast(word, register), 0)


def _narrowed(register: Any, dtype: Any) -> Any:
    """A pair of elements, rounded to `dtype` if it is narrower."""
    kind = ir.VectorType.get((2,), dtype)
    return register if register.type == kind else arith.truncf(kind, register)


def _as_vector(word: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((1,), word.type), [word])


def _dtype(ref: Any) -> Any:
    return ir.MemRefType(ref.type).element_type


def _units(outside: Any, tile: Any) -> Iterator[tuple[Any, Any]]:
    """The offsets of each of this lane's units, in global memory and in a tile.

    A lane has the same unit of every row that it has a unit of, and all those rows are the same
    modulo 8: its units are at constant distances.
    """
    (rows, width), lane = ir.MemRefType(tile.type).shape, _lane()
    stride, own = (ir.MemRefType(v.type).get_strides_and_offset()[0][0] for v in (outside, tile))
    units = width // UNIT
    apart = LANES // units  # rows from one unit of a lane to its next
    assert LANES % units == 0, width
    assert apart % UNITS == rows % apart == 0, (rows, width)
    unit, row = arith.remui(lane, i32(units)), arith.divui(lane, i32(units))
    swapped = arith.xori(unit, arith.andi(row, i32(UNITS - 1)))
    there = arith.addi(arith.muli(row, i32(stride)), arith.muli(unit, i32(UNIT)))
    here = arith.addi(arith.muli(row, i32(own)), arith.muli(swapped, i32(UNIT)))
    for first in range(0, rows, apart):
        yield arith.addi(there, i32(first * stride)), arith.addi(here, i32(first * own))


def _lane() -> Any:
    """The number of this lane, anew: else a loop would hold the addresses of all operands."""
    word = ir.IntegerType.get_signless(32)
    return mgpu_utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=word, has_side_effects=True)


class _Tile:
    """A tile in shared memory, and the digits of this lane's number."""

    def __init__(self, ref: Any):
        self._pointer, self._dtype = mgpu_utils.memref_ptr(ref), _dtype(ref)
        kind = ir.MemRefType(ref.type)
        self._stride = kind.get_strides_and_offset()[0][0]
        self._lane = _lane()
        self.warp = self.digit(5, 2)

    def digit(self, low: int, bits: int) -> Any:
        """`bits` bits of the lane's number from bit `low` on."""
        return arith.andi(arith.shrui(self._lane, i32(low)), i32((1 << bits) - 1))

    def lane_digits(self) -> tuple[Any, Any]:
        """Which of four matrices this lane has the address of a row of, as two digits."""
        return self.digit(3, 1), self.digit(4, 1)

    def row_of(self, digit: Any) -> Any:
        """The row in the matrix whose address this lane has, 8 · digit further on."""
        return arith.addi(arith.muli(digit, i32(8)), self.digit(0, 3))

    def address(self, row: Any, unit: Any, swap: Any, offset: Any = None) -> Any:
        """Of an element in a unit of a row that is `swap` modulo 8."""
        unit = arith.muli(arith.xori(unit, swap), i32(UNIT))
        start = arith.addi(arith.muli(row, i32(self._stride)), unit)
        start = start if offset is None else arith.addi(start, offset)
        return mgpu_utils.getelementptr(self._pointer, [start], self._dtype)

    def matrices(
        self, row: Any, unit: Any, rows: int, units: int, *, transposed: bool = False
    ) -> list[Any]:
        """Four matrices of 8 by 8, two neighbours of each in a lane.

        Args:
          row, unit: where this lane's row begins, from the constants `rows` and `units` on.
          transposed: whether a lane has neighbours of a column.
        """
        word = ir.IntegerType.get_signless(32)
        unit = arith.addi(unit, i32(units)) if units else unit
        row = arith.addi(row, i32(rows)) if rows else row
        address = self.address(row, unit, self.digit(0, 3))
        trans = ".trans" if transposed else ""
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([word] * 4),
            [llvm.ptrtoint(word, address)],
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            has_side_effects=True,
        )
        return [llvm.extractvalue(word, struct, [i]) for i in range(4)]
