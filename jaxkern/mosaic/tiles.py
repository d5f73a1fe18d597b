"""Tiles in shared memory, which a warpgroup copies, hands over and multiplies.

A tile (rows, n) of 16-bit elements lies in shared memory as (n / 64, rows, 64): in rows of 128
bytes. The unit u of 16 bytes of row r is stored at u xor (r mod 8), so that neither a row nor a
column of units meets a bank twice; wgmma and the TMA know this as their swizzle of 128 bytes. Only
the functions here and of :mod:`jaxkern.mosaic.mma` read and write tiles; in Pallas's interpreter
the units lie as they are. On Hopper the TMA copies tiles; elsewhere lanes do, with cp.async.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
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

from jaxkern.core import target
from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import (
    REF,
    ROW,
    VECTOR_BYTES,
    dtype_of,
    element,
    i32,
    inline_mlir,
    lane_value,
    ptx,
    scalar_type,
    sync_warpgroup,
)
from jaxkern.mosaic.launch import LANES, launch_named, num_sms, shared_memory
from jaxkern.mosaic.ring import close_copies, release_stage, start_copy, wait_for_copy
from jaxkern.mosaic.wgmma import ACCUMULATOR_ROWS, TILE, without_wgmma

UNIT = 8
"""Elements of a unit of 16 bytes."""
UNITS = 8
"""Units of a row, which are permuted."""
WIDTH = UNIT * UNITS
"""Columns that lie side by side."""


def launch_tiles(
    kernel: Callable[[Any, Any], None],
    name: str,
    ins: dict[str, Any],
    outs: dict[str, Any],
    scratch: dict[str, Any],
    axes: tuple[Any, Any],
    grid: int,
    warpgroups: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Launches `grid` blocks; `axes` name a block and a warpgroup of it.

    `more` are other arguments of :func:`jaxkern.mosaic.launch.launch_named`.
    """
    block, warpgroup = axes
    return launch_named(
        kernel,
        ins,
        outs,
        scratch,
        grid=(grid,),
        grid_names=(block,),
        num_threads=warpgroups,
        thread_name=warpgroup,
        kernel_name=name,
        approx_math=True,
        sums_across_warps=False,
        **more,
    )


def tile(rows: int, columns: int, dtype: Any, stages: int | tuple[int, ...] = ()) -> Any:
    """Shared memory for a tile, or for `stages` of them, which may have several dimensions."""
    stages = (stages,) if isinstance(stages, int) else stages
    shape = *stages, columns // WIDTH, rows, WIDTH
    return plgpu.SMEM(shape, dtype, transforms=tile_ref().transforms)


def tile_ref() -> Any:
    """The type of tiles; the TMA is told how their units are permuted."""
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.RefType((swizzle(2 * WIDTH),)) if by_wgmma() else REF


def rows_of(ref: Any, first: Any, count: int) -> Any:
    """Some rows of a tile."""
    return ref.at[:, pl.ds(first, count)]


def shape_of(ref: Any) -> tuple[Any, ...]:
    """(rows, n) of a tile."""
    blocks, rows, width = ref.shape
    return rows, blocks * width


def values_of(ref: Any) -> jax.Array:
    """A tile as a matrix, in the interpreter."""
    return jnp.moveaxis(ref[...], 0, 1).reshape(shape_of(ref))


def _set_values(ref: Any, v: jax.Array) -> None:
    blocks, rows, width = ref.shape
    ref[...] = jnp.moveaxis(v.reshape(rows, blocks, width), 1, 0)


def by_wgmma() -> bool:
    """Whether wgmma multiplies, and the TMA copies."""
    gpu = target.current()
    return gpu is not None and without_wgmma() is None and not interpreted()


def sync_tiles() -> None:
    """Waits for the other lanes, whose stores to tiles are then there for products."""
    release_stage(by_lanes=not by_wgmma())


type Tiles = dict[str, tuple[tuple[int, ...], Any]]
"""The shape and dtype of some arrays' shared memory: tiles of 16-bit elements, and rows of fp32."""


def copies_barrier(
    name: str, tiles: Iterable[tuple[tuple[int, ...], Any]], count: int = 1
) -> dict[str, Any]:
    """Scratch memory `name`: `count` barriers at which copies of `tiles` arrive, if by the TMA."""
    if not by_wgmma():
        return {}
    copies = (shape[-1] // WIDTH if _is_tile(dtype) else 1 for shape, dtype in tiles)
    return {name: plgpu.Barrier(num_arrivals=sum(copies), num_barriers=count)}


def barrier_of(smem: Any, name: str, slot: Any = None) -> Any:
    """A barrier of :func:`copies_barrier`, or ``None`` where lanes copy."""
    barrier = getattr(smem, name, None)
    return barrier if slot is None or barrier is None else barrier.at[slot]


def start_copies(copies: Iterable[tuple[Any, Any]], barrier: Any = None, when: Any = True) -> None:
    """Starts to copy tiles, and rows of fp32, from global to shared memory: a group of copies.

    They begin when what was written from there (:func:`write_tile`) has been read.

    Args:
      copies: pairs of a source, its rows aligned to 16 bytes, and a tile of its shape.
      barrier: of :func:`copies_barrier`, at which the TMA's copies arrive.
      when: whether to copy. Where lanes copy, a group without copies is one, too.
    """

    @pl.when(when)
    def _() -> None:
        finish_writes()
        for source, into in copies:
            if not _is_tile(into.dtype):
                start_copy(source, into, barrier)
            elif by_wgmma():
                for block in range(into.shape[0]):
                    columns = source.at[:, pl.ds(block * WIDTH, WIDTH)]
                    plgpu.copy_gmem_to_smem(columns, into.at[block], barrier)
            else:
                _start_tile_copy(source, into)

    if not by_wgmma():
        close_copies(True)


def wait_for_copies(barrier: Any = None, later: int = 0) -> None:
    """Waits for a group of copies.

    Where lanes copy, it is waited for all groups but `later`, and for the other lanes.
    """
    wait_for_copy(barrier, later)


def _is_tile(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize == 2


def tile_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of (64, n) in the layout of accumulators."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=TILE)


WARPGROUPS = 2
"""Warpgroups of a multiprocessor, for whose registers kernels are made: of 255 a lane."""
STAGES = 3
"""The most stages of a ring."""
RESERVED = 1024
"""Bytes of shared memory that each block takes beside its own, and a multiprocessor has more of."""


@dataclasses.dataclass(frozen=True)
class TileRing:
    """Stages of shared memory that the lanes of a warpgroup fill ahead.

    Attributes:
      tiles: of a stage.
      stages: of the ring.
      prefix: of the names in shared memory.
      fetches: whether this warpgroup starts the copies.
    """

    tiles: Tiles
    stages: int
    prefix: str = ""
    fetches: bool = True

    @classmethod
    def of(cls, other: int, grid: int, *tiles: Tiles, fetcher: int = 0) -> "tuple[TileRing, ...]":
        """A ring for each warpgroup of a block, with as many stages as fit.

        Where the TMA copies, it is one ring, which warpgroup `fetcher` fills. Elsewhere each has
        its own. A multiprocessor has several blocks if there are more of them than multiprocessors,
        and if there are registers.

        Args:
          other: bytes of shared memory that the block uses beside them.
          grid: blocks.
          *tiles: of each warpgroup.
          fetcher: a warpgroup.
        """
        all_tiles, shared = functools.reduce(operator.or_, tiles), by_wgmma()
        rings = [all_tiles] if shared else tiles
        sizes = (math.prod(x) * jnp.dtype(t).itemsize for ring in rings for x, t in ring.values())
        blocks = max(1, WARPGROUPS // len(tiles)) if grid > num_sms() else 1
        # A byte more is Mosaic's own, and sizes are rounded up.
        room = (shared_memory() + RESERVED) // blocks - RESERVED - 256 - other
        stages = max(1, min(STAGES, room // sum(sizes)))
        if shared:
            assert stages > 1 or len(tiles) == 1, room
            return tuple(cls(all_tiles, stages, "", n == fetcher) for n in range(len(tiles)))
        return tuple(cls(own, stages, f"{n}_" if n else "") for n, own in enumerate(tiles))

    def scratch(self) -> dict[str, Any]:
        def memory(shape: tuple[int, ...], dtype: Any) -> Any:
            if _is_tile(dtype):
                return tile(shape[0], shape[1], dtype, stages=self.stages)
            return plgpu.SMEM((self.stages, *shape), dtype)

        found = {self.prefix + name: memory(*of) for name, of in self.tiles.items()}
        return found | copies_barrier("arrived", self.tiles.values(), self.stages)

    def loop(
        self,
        smem: Any,
        count: Any,
        sources: Callable[[Any], dict[str, Any]],
        step: Callable[..., Any],
        carry: Any,
        *,
        early: bool = True,
    ) -> Any:
        """Runs ``carry = step(n, stage, carry)`` for n below `count`; `stage` has the tiles.

        Args:
          smem: of :meth:`scratch`.
          count: of steps.
          sources: the parts of arrays in global memory for step n.
          step: reads and may write its stage.
          carry: to begin with.
          early: whether a step begins with the start of the copies for a later one. If not, `step`
            takes a function that does this as its last argument. It calls it while products run,
            when all warps are done with step n − 1: both warpgroups', if the block has two.
        """
        memory = lambda name: getattr(smem, self.prefix + name)
        arrived = lambda slot: barrier_of(smem, "arrived", slot)

        def fetch(n: Any) -> None:
            slot = lax.rem(n, self.stages)
            if self.fetches:
                copies = ((v, memory(name).at[slot]) for name, v in sources(n).items())
                start_copies(copies, arrived(slot), n < count)

        def run(n: Any, carry: Any) -> Any:
            slot = lax.rem(n, self.stages)
            ahead = lambda: fetch(n + self.stages - 1)
            if self.stages == 1:
                sync_warpgroup()  # all warps are done with the stage
                ahead()
                ahead = lambda: None
            wait_for_copies(arrived(slot), max(0, self.stages - 2))
            stage = {name: memory(name).at[slot] for name in self.tiles}
            if not early:
                return step(n, stage, carry, ahead)
            if by_wgmma():
                sync_warpgroup()  # as above
            ahead()
            return step(n, stage, carry)

        for n in range(self.stages - 1):
            fetch(n)
        return lax.fori_loop(0, count, run, carry)


_FIRST_BARRIER = 8
"""The first of the barriers of a block that :class:`Handoffs` are; Mosaic takes lower ones."""


@dataclasses.dataclass(frozen=True)
class Handoffs:
    """Barriers by which one warpgroup lets another go on: as often as this one waits.

    What the first read from shared memory may then be written, and what it stored is there: to
    tiles, which products and copies read, if it called :func:`fence_tiles`.
    """

    names: tuple[str, ...]

    def scratch(self) -> dict[str, Any]:
        count = len(self.names)
        return {"handoffs": plgpu.Barrier(num_barriers=count)} if interpreted() else {}

    def give(self, smem: Any, name: str) -> None:
        """Lets the other warpgroup go on."""
        self._at(smem, name, plgpu.barrier_arrive, "bar.arrive")

    def take(self, smem: Any, name: str) -> None:
        """Waits for the other warpgroup."""
        self._at(smem, name, plgpu.barrier_wait, "bar.sync")

    def _at(self, smem: Any, name: str, interpret: Callable[[Any], None], do: str) -> None:
        number = self.names.index(name)
        if interpreted():
            interpret(smem.handoffs.at[number])
        else:
            ptx(f"{do} {_FIRST_BARRIER + number}, {2 * LANES};")


@dataclasses.dataclass(frozen=True)
class Meetings:
    """A barrier of two warpgroups, `axis` the name of the axis of these."""

    axis: Any

    def scratch(self) -> dict[str, Any]:
        if not interpreted():
            return {}
        return {"meetings": plgpu.Barrier(num_arrivals=2), "votes": plgpu.SMEM((2,), jnp.int32)}

    def meet(self, smem: Any) -> None:
        """Waits for the other warpgroup; the stores of both, to tiles too, are then there."""
        fence_tiles()
        if interpreted():
            plgpu.barrier_arrive(smem.meetings)
            plgpu.barrier_wait(smem.meetings)
        else:
            ptx(f"bar.sync {_FIRST_BARRIER}, {2 * LANES};")

    def any_above(self, smem: Any, row: jax.Array, most: float) -> jax.Array:
        """Meets; 1 if a value of `row`, fp32, (LANES,) of each, is above `most`, and else 0."""
        if interpreted():
            own = lax.axis_index(self.axis)
            smem.votes[own] = jnp.any(row > most).astype(jnp.int32)
            self.meet(smem)
            above = jnp.maximum(smem.votes[0], smem.votes[1])
            self.meet(smem)
            return above
        fence_tiles()

        @inline_mlir(ROW, returns=scalar_type(np.int32))
        def vote(row: Any) -> Any:
            voted = llvm.inline_asm(
                ir.IntegerType.get_signless(32),
                [lane_value(row), arith.constant(ir.F32Type.get(), most)],
                "{ .reg .pred p, q; setp.gt.f32 p, $1, $2; "
                f"bar.red.or.pred q, {_FIRST_BARRIER}, {2 * LANES}, p; selp.s32 $0, 1, 0, q; }}",
                "=r,f,f,~{memory}",
                has_side_effects=True,
            )
            return mgpu.FragmentedArray.splat(voted, (), is_signed=True)

        return vote(row)


def _start_tile_copy(source: Any, into: Any) -> None:
    """Has the lanes start to copy a tile with cp.async."""
    if interpreted():
        _set_values(into, source[...])
        return

    @inline_mlir(REF, REF)
    def copy(source: Any, into: Any) -> None:
        outside = llvm.PointerType.get(address_space=1)
        start = llvm.addrspacecast(outside, mgpu_utils.memref_ptr(source))
        for there, here in _units(source, into):
            nvvm.cp_async_shared_global(
                mgpu_utils.getelementptr(mgpu_utils.memref_ptr(into), [here], dtype_of(into)),
                mgpu_utils.getelementptr(start, [there], dtype_of(into)),
                VECTOR_BYTES,
                nvvm.LoadCacheModifierKind.CG,
            )

    copy(source, into)


def write_tile(source: Any, into: Any) -> None:
    """Copies a tile from shared to global memory; all lanes' parts of it must be there.

    It may be written to again after :func:`finish_writes` and a barrier.
    """
    if interpreted():
        into[...] = values_of(source)
        return
    if by_wgmma():
        for block in range(source.shape[0]):
            columns = into.at[:, pl.ds(block * WIDTH, WIDTH)]
            plgpu.copy_smem_to_gmem(source.at[block], columns)
        return

    @inline_mlir(REF, REF)
    def copy(source: Any, into: Any) -> None:
        kind = ir.VectorType.get((UNIT,), dtype_of(source))
        for there, here in _units(into, source):
            held = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(source), [here], dtype_of(source))
            to = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(into), [there], dtype_of(into))
            value = llvm.load(kind, held, alignment=VECTOR_BYTES)
            llvm.store(value, to, alignment=VECTOR_BYTES)

    copy(source, into)


def fence_tiles() -> None:
    """Before a barrier: makes what this lane stored to tiles visible to products and copies."""
    if by_wgmma():
        ptx("fence.proxy.async.shared::cta;")


def finish_writes() -> None:
    """Waits until the tiles that are being written have been read."""
    if by_wgmma():
        ptx("cp.async.bulk.wait_group.read 0;")


def load_left(
    ref: Any, *, transposed: bool = False, columns: tuple[int, int] | None = None
) -> jax.Array:
    """Loads a left operand (64, k) from a tile of its shape, or `transposed` from (k, 64).

    Where it is not transposed, `columns` may say at which one to begin, and how many to load.
    """
    shape = shape_of(ref)[::-1] if transposed else shape_of(ref)
    first, count = columns or (0, shape[1])
    shape = shape[0], count
    if interpreted():
        return values_of(ref).T if transposed else values_of(ref)[:, first : first + count]

    @inline_mlir(tile_ref(), returns=tile_type(shape, ref.dtype))
    def load(ref: Any) -> Any:
        left = Left(ref, dtype_of(ref), transposed)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        flat = registers.reshape(-1, 2)
        kind = ir.VectorType.get((2,), dtype_of(ref))
        for k in range(count // 16):
            for n, word in enumerate(left.columns(first // 16 + k)):
                value = vector.from_elements(ir.VectorType.get((1,), word.type), [word])
                flat[2 * k + n // 2, n % 2] = vector.bitcast(kind, value)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(ref)


def store_tile(ref: Any, v: jax.Array, *, transposed: bool = False, first: int = 0) -> None:
    """Stores (64, n) in 16 bits to a tile of its shape, or `transposed` to (n, 64).

    Where it is not transposed, a tile with more columns may be given, and the `first` to begin
    with, a multiple of 16.
    """
    if interpreted():
        if not transposed and v.shape != shape_of(ref):
            v = values_of(ref).at[:, first : first + v.shape[1]].set(v)
        _set_values(ref, v.T if transposed else v)
        return

    @inline_mlir(tile_ref(), TILE)
    def store(ref: Any, v: Any) -> None:
        tile, registers = Tile(ref), v.registers.reshape(-1, 2)
        if own:
            for k in range(0, len(registers), 2):
                words = [bits_of(v) for v in registers[k : k + 2].flat]
                tile.store_matrices(k + first // UNIT, words, transposed)
            return
        word = ir.IntegerType.get_signless(32)
        group, pair = tile.digit(2, 3), arith.muli(tile.digit(0, 2), i32(2))
        for (k, half), register in np.ndenumerate(registers):
            value = bits_of(register)
            if transposed:
                value = llvm.inline_asm(
                    word, [value], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r"
                )
                block, row = 0, arith.addi(group, i32(8 * k))
                unit = arith.addi(arith.muli(tile.warp, i32(2)), i32(half))
            else:
                row = arith.addi(arith.addi(arith.muli(tile.warp, i32(16)), group), i32(8 * half))
                block, unit = divmod(k + first // UNIT, UNITS)
                unit = i32(unit)
            llvm.store(value, tile.address(row, unit, group, pair, block), alignment=4)

    own = by_wgmma()  # Hopper's instruction, which takes four matrices
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
        stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        row, pair = _row_and_pair(_lane())
        start = arith.addi(arith.muli(row, i32(stride)), arith.muli(pair, i32(2)))
        start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [start], dtype_of(ref))
        for (k, half), register in np.ndenumerate(v.registers.reshape(-1, 2)):
            to = mgpu_utils.getelementptr(start, [8 * half * stride + 8 * k], dtype_of(ref))
            llvm.store(
                narrowed_to(register, dtype_of(ref)),
                to,
                alignment=2 * mgpu_utils.bytewidth(dtype_of(ref)),
            )

    store(ref, v)


def load_rows(ref: Any, first: int, columns: int, *, anchor: int | None = None) -> jax.Array:
    """Loads (64, columns) from a matrix of 64 rows, fp32, from column `first` on.

    With `anchor` a row i is the last one before i's half of its block of 2 · anchor rows, or of the
    other half: row anchor − 1 of the block.
    """
    if interpreted():
        rows = jnp.arange(ACCUMULATOR_ROWS)
        rows = rows if anchor is None else rows // (2 * anchor) * 2 * anchor + anchor - 1
        return ref[...][rows, first : first + columns]

    @inline_mlir(REF, returns=tile_type((ACCUMULATOR_ROWS, columns), jnp.float32))
    def load(ref: Any) -> Any:
        f32 = ir.F32Type.get()
        stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        row, pair = _row_and_pair(_lane())
        starts = []
        for half in range(2):
            own = arith.addi(row, i32(8 * half))
            if anchor is not None:
                own = arith.addi(arith.andi(own, i32(-2 * anchor)), i32(anchor - 1))
            at = arith.addi(arith.muli(own, i32(stride)), arith.muli(pair, i32(2)))
            starts.append(mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], f32))
        registers = np.empty(
            mgpu.WGMMA_LAYOUT.registers_shape((ACCUMULATOR_ROWS, columns)), dtype=object
        )
        flat, kind = registers.reshape(-1, 2), ir.VectorType.get((2,), f32)
        for (k, half), _ in np.ndenumerate(flat):
            address = mgpu_utils.getelementptr(starts[half], [first + UNIT * k], f32)
            flat[k, half] = llvm.load(kind, address, alignment=8)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(ref)


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
        return from_quads(values, mgpu.WGMMA_LAYOUT.registers_shape((ACCUMULATOR_ROWS, n)))

    return load(ref)


def _column_of_lane(ref: Any, k: int, half: int) -> list[Any]:
    """Addresses in (n, 64) of a lane's pair of (64, n): register `half` of the `k`-th 8 columns."""
    stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
    row, pair = _row_and_pair(mgpu_utils.thread_idx())
    start = arith.addi(row, arith.muli(pair, i32(2 * stride)))
    start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [start], dtype_of(ref))
    offsets = (8 * half + (8 * k + m) * stride for m in range(2))
    return [mgpu_utils.getelementptr(start, [at], dtype_of(ref)) for at in offsets]


def _row_and_pair(lane: Any) -> tuple[Any, Any]:
    """The first row of an accumulator that a lane has, and which pair of every 8 columns."""
    bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
    return arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3)), bits(0, 2)


class Left:
    """A left operand (64, k), in registers or in a tile, which may be transposed."""

    def __init__(self, v: Any, dtype: Any, transposed: bool = False):
        self._array = v if isinstance(v, mgpu.FragmentedArray) else None
        self._dtype, self._transposed = dtype, transposed
        if self._array is not None:
            return
        self._tile = tile = Tile(v)
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
        return [bits_of(narrowed_to(v, self._dtype)) for v in pairs]


def from_quads(values: list[list[Any]], shape: tuple[int, ...]) -> Any:
    """An accumulator, or a part of one, of a lane's four values in each 8 columns."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(shape, dtype=object)
    flat = registers.reshape(-1, 2)
    for (k, half), _ in np.ndenumerate(flat):
        flat[k, half] = vector.from_elements(kind, values[k][2 * half : 2 * half + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def bits_of(register: Any) -> Any:
    """The 32 bits of two 16-bit elements."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return element(vector.bitcast(word, register), 0)


def narrowed_to(register: Any, dtype: Any) -> Any:
    """A pair of elements, rounded to `dtype` if it is narrower."""
    kind = ir.VectorType.get((2,), dtype)
    return register if register.type == kind else arith.truncf(kind, register)


def _units(outside: Any, tile: Any) -> Iterator[tuple[Any, Any]]:
    """The offsets of each of this lane's units, in global memory and in a tile.

    A lane has the same unit of every row that it has a unit of, and all those rows are the same
    modulo 8: its units are at constant distances.
    """
    (blocks, rows, _), lane = ir.MemRefType(tile.type).shape, arith.andi(_lane(), i32(LANES - 1))
    stride = ir.MemRefType(outside.type).get_strides_and_offset()[0][0]
    block, own, _ = ir.MemRefType(tile.type).get_strides_and_offset()[0]
    units = blocks * UNITS
    apart = LANES // units  # rows from one unit of a lane to its next
    assert LANES % units == 0, blocks
    assert apart % UNITS == rows % apart == 0, (rows, blocks)
    unit, row = arith.remui(lane, i32(units)), arith.divui(lane, i32(units))
    there = arith.addi(arith.muli(row, i32(stride)), arith.muli(unit, i32(UNIT)))
    swapped = arith.xori(arith.andi(unit, i32(UNITS - 1)), arith.andi(row, i32(UNITS - 1)))
    here = arith.addi(arith.muli(row, i32(own)), arith.muli(swapped, i32(UNIT)))
    here = arith.addi(here, arith.muli(arith.divui(unit, i32(UNITS)), i32(block)))
    for first in range(0, rows, apart):
        yield arith.addi(there, i32(first * stride)), arith.addi(here, i32(first * own))


def _lane() -> Any:
    """The number of this thread, anew: else a loop would hold the addresses of all operands."""
    word = ir.IntegerType.get_signless(32)
    return mgpu_utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=word, has_side_effects=True)


class Tile:
    """A tile in shared memory, and the digits of this lane's number."""

    def __init__(self, ref: Any):
        self._pointer, self._dtype = mgpu_utils.memref_ptr(ref), dtype_of(ref)
        self._block, self._stride, _ = ir.MemRefType(ref.type).get_strides_and_offset()[0]
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

    def address(self, row: Any, unit: Any, swap: Any, offset: Any = None, block: int = 0) -> Any:
        """The address in a unit of a row that is `swap` modulo 8, in a block of columns."""
        unit = arith.muli(arith.xori(unit, swap), i32(UNIT))
        start = arith.addi(arith.muli(row, i32(self._stride)), unit)
        start = start if offset is None else arith.addi(start, offset)
        start = arith.addi(start, i32(block * self._block)) if block else start
        return mgpu_utils.getelementptr(self._pointer, [start], self._dtype)

    def matrices(
        self, row: Any, unit: Any, rows: int, units: int, *, transposed: bool = False
    ) -> list[Any]:
        """Four matrices of 8 by 8, two neighbours of each in a lane.

        Args:
          row, unit: where this lane's row begins, from the constants `rows` and `units` on.
          transposed: whether a lane has neighbours of a column.
        """
        word, (block, units) = ir.IntegerType.get_signless(32), divmod(units, UNITS)
        unit = arith.addi(unit, i32(units)) if units else unit
        row = arith.addi(row, i32(rows)) if rows else row
        address = self.address(row, unit, self.digit(0, 3), block=block)
        trans = ".trans" if transposed else ""
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([word] * 4),
            [llvm.ptrtoint(word, address)],
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            has_side_effects=True,
        )
        return [llvm.extractvalue(word, struct, [i]) for i in range(4)]

    def store_matrices(self, k: int, words: list[Any], transposed: bool) -> None:
        """Stores four matrices of 8 by 8: of 16 columns from the `k`-th 8 on, in this warp's rows.

        With one instruction, which Ampere and Ada do not have.
        """
        half, column = self.lane_digits()
        if transposed:
            row = arith.addi(self.row_of(column), i32(8 * k))
            block, unit = 0, arith.addi(arith.muli(self.warp, i32(2)), half)
        else:
            row = arith.addi(arith.muli(self.warp, i32(16)), self.row_of(half))
            block, unit = k // UNITS, arith.addi(column, i32(k % UNITS))
        address = self.address(row, unit, self.digit(0, 3), block=block)
        trans = ".trans" if transposed else ""
        llvm.inline_asm(
            None,
            [llvm.ptrtoint(words[0].type, address), *words],
            f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1,$2,$3,$4}};",
            "r,r,r,r,r,~{memory}",
            has_side_effects=True,
        )
