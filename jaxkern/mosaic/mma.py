"""Products by mma.sync, the tensor cores of every GPU from Ampere on, for blocks of one warpgroup.

Tiles of 16-bit elements lie in shared memory in rows of whole 128 bytes. Within each 128 bytes the
unit u of 16 bytes of row r is stored at u xor (r mod 8), so that neither a row nor a column of
units meets a bank twice. Only the functions here read and write tiles; in Pallas's interpreter they
lie as they are.

An accumulator (64, n) is an fp32 array in the layout TILE of :mod:`jaxkern.mosaic.wgmma`: a warp
has 16 rows. The left operand, (64, k) in 16 bits in the same layout, is in registers, so that an
accumulator becomes a left operand without moving. The right one is read from a tile, by all warps.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jaxkern.core.target import interpreted
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import REF, VECTOR_BYTES, element, elements, i32, inline_mlir
from jaxkern.mosaic.wgmma import TILE

UNIT = 8
"""Elements of a unit of 16 bytes."""
UNITS = 8
"""Units that are permuted together."""
PTX_TYPES = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}


def tile_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of (64, n) in the layout of accumulators."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=TILE)


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


def store_matrix(ref: Any, v: jax.Array) -> None:
    """Stores (64, n), fp32, to a matrix of fp32 or 16-bit elements in global memory."""
    if interpreted():
        ref[...] = v.astype(ref.dtype)
        return

    @inline_mlir(REF, TILE)
    def store(ref: Any, v: Any) -> None:
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
    stride = ir.MemRefType(outside.type).get_strides_and_offset()[0][0]
    units = width // UNIT
    apart = LANES // units  # rows from one unit of a lane to its next
    assert LANES % units == 0, width
    assert apart % UNITS == rows % apart == 0, (rows, width)
    unit, row = arith.remui(lane, i32(units)), arith.divui(lane, i32(units))
    swapped = arith.xori(unit, arith.andi(row, i32(UNITS - 1)))
    there = arith.addi(arith.muli(row, i32(stride)), arith.muli(unit, i32(UNIT)))
    here = arith.addi(arith.muli(row, i32(width)), arith.muli(swapped, i32(UNIT)))
    for first in range(0, rows, apart):
        yield arith.addi(there, i32(first * stride)), arith.addi(here, i32(first * width))


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
