"""Memory of the scan's kernels: arrays of a call, blocks, rings of tokens, and the launch.

The arrays along time come through rings of two stages: the TMA fills one while the block works on
the other. Pallas would put a barrier around every store. The kernels have their own instead:
release_stage where a stage is copied to again and where warps exchange sums, sync_warp where lanes
of a warp exchange values.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.target import interpreted
from jaxkern.mosaic.arithmetic import LOG2E, once_read, softplus
from jaxkern.mosaic.lanes import LaneOffsets, lane_numbers, load_lanes, store_lanes, zeros
from jaxkern.mosaic.launch import LANES, grid_axes, launch_named, shared_memory
from jaxkern.mosaic.ring import Ring, close_copies, release_stage, ring_scratch
from jaxkern.ops.segments import with_zeros
from jaxkern.ops.selective_scan.reference import CHUNK, SelectiveScanOptions
from jaxkern.ops.selective_scan.tiles import CHANNELS, ScanGrid, ScanTile

BLOCK = grid_axes("block")[0]

Registers = list[jax.Array]
"""Arrays (LANES,), fp32."""

_ALONG_TIME = "x", "dt", "z", "B", "C", "keep", "crossed", "dout"
_PER_TOKEN = "keep", "crossed"  # (B, L)

KEEP_STEPS = 32
"""Tokens of `keep` and `crossed` in a stage, and the most of a tile: each lane of a warpgroup
announces its share of a copy, which makes 128 bytes the least of one."""

_OVERHEAD = 2560
"""Bytes of shared memory for barriers and for what a block takes itself."""


def load(
    ref: Any, *digits: Any, start: int = 0, count: int = 1, volatile: bool = False
) -> Registers:
    return load_lanes(ref, LaneOffsets(digits, start), count, volatile=volatile)


def load1(ref: Any, *digits: Any, start: int = 0, volatile: bool = False) -> jax.Array:
    return load(ref, *digits, start=start, volatile=volatile)[0]


def store(ref: Any, values: Sequence[jax.Array], *digits: Any, start: int = 0) -> None:
    store_lanes(ref, LaneOffsets(digits, start), values)


def load_own(ref: Any, start: int, count: int) -> Registers:
    """Loads `count` values that the lane stored by :func:`store_own`."""
    vec = math.gcd(4, count)
    return [
        v
        for i in range(start, start + count, vec)
        for v in load(ref, (1, LANES, vec), start=i * LANES, count=vec)
    ]


def store_own(ref: Any, start: int, values: Registers) -> None:
    """Stores values that no other lane reads."""
    vec = math.gcd(4, len(values))
    for i in range(0, len(values), vec):
        store(ref, values[i : i + vec], (1, LANES, vec), start=(start + i) * LANES)


def dot(a: Registers, b: Registers) -> jax.Array:
    return functools.reduce(jnp.add, (v * w for v, w in zip(a, b, strict=True)))


def fp32_array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """The static sizes of a call, and a block's accesses to states and step sizes."""

    options: SelectiveScanOptions
    tile: ScanTile
    length: int  # of the sequence, before padding
    padded: int
    channels: int  # D, padded
    blocks: int  # of channels
    blocks_per_group: int  # that share B and C
    exact: bool  # fp32 tokens: no shortcut in softplus and sigmoid
    every: int  # steps from one saved state to the next
    grid: ScanGrid  # of blocks
    stage_width: int  # channels of a ring's stages: at least the tile's

    @property
    def per_unit(self) -> int:
        """Chunks from one saved state to the next; 1 where there is one before every chunk."""
        return max(1, self.every // CHUNK)

    @property
    def token_stride(self) -> int:
        """Elements from token to token of (B, L, D); the interpreter's copy is compact."""
        return self.tile.width if interpreted() else self.channels

    @property
    def stage_stride(self) -> int:
        """Elements from token to token of a ring's stage."""
        return self.tile.width if interpreted() else self.stage_width

    @property
    def chunks(self) -> int:
        return self.padded // CHUNK

    def chunks_of_units(self, first: Any, units: Any) -> tuple[Any, Any]:
        """First chunk and number of chunks of some units of the backward."""
        first = first * self.per_unit
        return first, jnp.minimum(units * self.per_unit, self.chunks - first)

    def zero_states(self) -> list[Registers]:
        return [[zeros() for _ in range(self.tile.states)] for _ in range(CHANNELS)]

    def load_states(self, ref: Any) -> list[Registers]:
        """Loads [R][K] from the block's channels of states, (width, S · K)."""
        return self.swapped(self.load_unswapped(ref))

    def load_unswapped(self, ref: Any) -> list[Registers]:
        """Loads states in the order of memory: :meth:`swapped`, called when they are needed, waits
        for them."""
        t = self.tile
        rows = [t.of_channel(r, t.all_states) for r in range(CHANNELS)]
        return [self.load_pairs(ref, 1, *digits, start=start) for start, digits in rows]

    def load_pairs(self, ref: Any, copies: int, *digits: Any, start: int) -> Registers:
        """Loads the lane's K states, pair by pair, from an array of `copies` copies."""
        t = self.tile
        pairs = [i * t.pair * t.lanes * copies for i in range(t.states // t.pair)]
        pair = lambda at: load(ref, *digits, t.of_states(), start=start + at, count=t.pair)
        return [v for at in pairs for v in pair(at)]

    def store_states(self, ref: Any, h: Sequence[Registers]) -> None:
        t = self.tile
        for r, row in enumerate(self.swapped(h)):
            start, digits = t.of_channel(r, t.all_states)
            for k in range(0, t.states, t.pair):
                at = start + k * t.lanes
                store(ref, row[k : k + t.pair], *digits, t.of_states(), start=at)

    def swapped(self, h: Sequence[Registers]) -> list[Registers]:
        """Reorders states from memory's order to the lane's, or back."""
        rows = [list(row) for row in h]
        for distance, d in self.tile.state_swaps:
            upper = lane_numbers() & distance != 0
            rows = [[jnp.where(upper, row[k ^ d], v) for k, v in enumerate(row)] for row in rows]
        return rows

    def constants(self, refs: Any) -> tuple[list[Registers], jax.Array, jax.Array]:
        """A · log2(e), so that a decay is one exp2, and D and dt_bias, of the block's channels."""
        channels = ScanBlock(self).channels
        owned = self.tile.owned(step=0)
        D, dt_bias = (load1(ref.at[channels], *owned) for ref in (refs.D, refs.dt_bias))
        rate = jax.tree.map(lambda a: a * LOG2E, self.load_states(refs.A.at[channels]))
        return rate, *once_read([D, dt_bias])

    def load_per_channel(
        self, ref: Any, n: int, start: int = 0, volatile: bool = False
    ) -> list[Registers]:
        """Loads [R][n] from (width, n)."""
        rows = [self.tile.of_channel(r, n) for r in range(CHANNELS)]
        return [
            load(ref, *digits, start=start + at, count=n, volatile=volatile) for at, digits in rows
        ]

    def step_size(self, raw: jax.Array, token: Any) -> tuple[jax.Array, Any]:
        """dt after softplus and limits, and a mask of where it has a slope (None: everywhere).

        `token` is the first of a round. Beyond the end of the sequence dt is 0 and keeps the state.
        """
        sizes, dt, inside = self.options.sizes, raw, None
        if sizes.softplus:
            dt = softplus(raw, self.exact)
        if sizes.least:
            inside = dt >= sizes.low
            dt = jnp.where(dt < sizes.low, sizes.low, dt)
        if sizes.most:
            below = dt <= sizes.high
            inside = below if inside is None else inside & below
            dt = jnp.where(dt > sizes.high, sizes.high, dt)
        if self.length != self.padded:
            each = self.tile.owners * CHANNELS
            lanes = lane_numbers() // self.tile.low % self.tile.lanes
            valid = token + lanes // each < self.length
            inside = valid if inside is None else inside & valid
            dt = jnp.where(valid, dt, 0.0)
        return dt, inside


class ScanBlock:
    """A block's share of the call: its column, its part of the sequence, its channels."""

    def __init__(self, scan: ScanPlan):
        grid, width = scan.grid, scan.tile.width
        self.index = lax.axis_index(BLOCK) + grid.skipped
        other = self.index - grid.whole
        if not grid.rest:
            self.rest, self.part, column = 0, 0, self.index
        else:
            self.rest, self.part = lax.rem(other, grid.rest), lax.div(other, grid.rest)
            column = grid.whole + self.rest
            if grid.whole:
                self.part = jnp.where(other < 0, 0, self.part)
                column = jnp.where(other < 0, self.index, column)
        is_whole = other < 0 if grid.whole else not grid.rest
        self.first, most = self.part * grid.length, grid.length
        if grid.head:
            self.first += jnp.where(self.part > 0, grid.head - grid.length, 0)
            most = jnp.where(self.part > 0, grid.length, grid.head)
        self.units = jnp.where(is_whole, grid.units, jnp.minimum(most, grid.units - self.first))
        self.later = jnp.where(is_whole, 0, grid.parts - 1 - self.part)
        block = lax.rem(column, scan.blocks)
        self.block, self.batch = block, lax.div(column, scan.blocks)
        self.group = lax.div(block, scan.blocks_per_group)
        self.channels = pl.ds(block * width, width)


# Rings of tokens


def stored(name: str) -> str:
    """Name of the array that has B or C: they are the two halves of one."""
    return "weights" if name in ("B", "C") else name


class TokenTiles:
    """The tiles, of some chunks of token arrays, that a ring of two stages holds."""

    def __init__(self, scan: ScanPlan, chunks: int, arrays: dict[str, Any]):
        self.scan, self.chunks = scan, chunks
        self.steps = chunks * CHUNK
        self.arrays = {k: v for k, v in arrays.items() if v is not None}
        self.tiles = {name: (self._shape(name), v.dtype) for name, v in self.arrays.items()}

    def scratch(self) -> dict[str, Any]:
        return ring_scratch(2, self.tiles)

    def bytes(self) -> int:
        """The shared memory of the ring."""
        return 2 * sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tiles.values())

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in ("B", "C"):
            return self.steps, *self.arrays[name].shape[3:]
        if name in _PER_TOKEN:
            return (KEEP_STEPS,)
        return self.steps, self.scan.stage_width


class TokenRing:
    """A ring of token arrays in a kernel, for the blocks of `scan`."""

    def __init__(self, tiles: TokenTiles, refs: Any, smem: Any, scan: ScanPlan):
        self.of, self.refs, self.smem, self.scan = tiles, refs, smem, scan
        self.chunks, self.steps = tiles.chunks, tiles.steps
        self.at = ScanBlock(scan)
        self.arrays = {name: getattr(smem, name) for name in tiles.arrays}
        self.arrived = getattr(smem, "arrived", None)

    def of_blocks(self, scan: ScanPlan) -> "TokenRing":
        return TokenRing(self.of, self.refs, self.smem, scan)

    @property
    def ring(self) -> Ring:
        return Ring(self.arrays, self.arrived, 2, 0)

    def fetch(self, chunk: Any, n: Any) -> None:
        """Starts the n-th copy of this ring, of the tile from `chunk` on."""
        self.ring.copy(n, self._sources(chunk))

    def _sources(self, chunk: Any) -> Iterator[tuple[str, Any]]:
        at, width = self.at, self.scan.stage_width
        channels = at.channels
        if width > self.scan.tile.width:
            channels = pl.ds(lax.div(channels.start, width) * width, width)
        for name, stages in self.arrays.items():
            ref = getattr(self.refs, stored(name))
            time = pl.ds(chunk * CHUNK, stages.shape[1])
            if name in ("B", "C"):
                row = at.batch + (ref.shape[0] // 2 if name == "C" else 0)
                yield name, ref.at[row, time, at.group]
            elif name in _PER_TOKEN:
                yield name, ref.at[at.batch, time]
            else:
                yield name, ref.at[at.batch, time, channels]

    def wait(self, n: Any) -> None:
        """Waits until the n-th copy has arrived."""
        ring = self.ring
        ring.wait(ring.stage(n))

    def tile(self, n: Any) -> Any:
        return self._views(n, 0, self.steps)

    def chunk(self, n: Any, chunk: Any) -> Any:
        return self._views(n, chunk * CHUNK, CHUNK)

    def _views(self, n: Any, start: Any, steps: int) -> Any:
        at, width = (self.ring.stage(n), pl.ds(start, steps)), self.scan.tile.width
        views = {name: stages.at[at] for name, stages in self.arrays.items()}
        if width < self.scan.stage_width:
            mine = pl.ds(lax.rem(self.at.channels.start, self.scan.stage_width), width)
            for name in views.keys() - {"B", "C", *_PER_TOKEN}:
                views[name] = self.arrays[name].at[(*at, mine)]
        return types.SimpleNamespace(**(dict.fromkeys(_ALONG_TIME) | views))

    def upward(self, first: Any, count: Any, i: Any) -> "TileSpan":
        """The i-th tile of `count` chunks from `first` on."""
        chunk = first + i * self.chunks
        start = jnp.minimum(chunk, self.scan.chunks - self.chunks)
        return TileSpan(start, chunk - start, jnp.minimum(self.chunks, first + count - start))

    def tiles(self, count: Any) -> Any:
        """Number of tiles of `count` chunks."""
        return lax.div(count + self.chunks - 1, self.chunks)

    def stream(self, first: Any, count: Any, body: Any, init: Any) -> Any:
        """``init = body(n, span, init)`` for the tiles of those chunks, as they arrive."""
        tiles = self.tiles(count)
        self.fetch(self.upward(first, count, 0).start, 0)
        close_copies()

        def run(i, carry):
            release_stage()

            @pl.when(i + 1 < tiles)
            def _():
                self.fetch(self.upward(first, count, i + 1).start, i + 1)

            close_copies()
            self.wait(i)
            return body(i, self.upward(first, count, i), carry)

        return lax.fori_loop(0, tiles, run, init)


class TileSpan(NamedTuple):
    """The chunks of a tile that are worked on.

    The last tile of a sequence ends with it, so it may begin with chunks of the previous tile.
    """

    start: Any  # the tile's first chunk in the sequence
    first: Any  # in the tile
    stop: Any


# The arrays of a call, and the launch of a kernel on them


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The shared memory of a kernel that works on some chunks at a time.

    Attributes:
      rings: of token arrays.
      own: shapes of fp32 arrays, by name.
    """

    rings: list[TokenTiles]
    own: dict[str, tuple[int, ...]]

    def bytes(self) -> int:
        own = sum(map(math.prod, self.own.values()))
        return sum(ring.bytes() for ring in self.rings) + 4 * own


class ScanCall:
    """The arrays of a call as the kernels take them: whole chunks and blocks, groups in a row."""

    def __init__(self, options: SelectiveScanOptions, tile: ScanTile, every: int, *arrays):
        x, dt, A, B, C, D, z, dt_bias, keep, crossed = arrays
        f32 = jnp.float32
        self.tile = tile
        self.width = tile.width  # of a block
        self.batch, self.length, self.groups, self.dim = x.shape
        self.states = A.shape[-1]
        none = jnp.zeros((self.groups, self.dim), f32)
        self.arrays = {
            "x": self.pad_tokens(x),
            "dt": self.pad_tokens(dt),
            "z": None if z is None else self.pad_tokens(z),
            "weights": self.pad_weights(jnp.concatenate([B, C])),
            "A": self.pad_states(A.astype(f32)),
            "D": self.pad_channels((none if D is None else D).astype(f32), 1),
            "dt_bias": self.pad_channels((none if dt_bias is None else dt_bias).astype(f32), 1),
            "keep": None if keep is None else self.pad_keep(keep.astype(f32), 1),
            "crossed": None if crossed is None else self.pad_keep(crossed, -1),
        }
        padded, channels = self.arrays["x"].shape[1:]
        self.blocks = channels // self.width
        self.scan = ScanPlan(
            options=options,
            tile=tile,
            length=self.length,
            padded=padded,
            channels=channels,
            blocks=self.blocks,
            blocks_per_group=self.blocks // self.groups,
            exact=any(v is not None and v.dtype == f32 for v in (x, dt, z)),
            every=every,
            grid=ScanGrid(1, 1, 1, 1),
            stage_width=tile.width,
        )

    def pad_channels(self, v: Any, axis: int) -> Any:
        """(…, G, P, …) with P at `axis` as (…, D, …), every group in whole blocks."""
        v = _pad(v, (axis, self.width))
        return v.reshape(
            *v.shape[: axis - 1], v.shape[axis - 1] * v.shape[axis], *v.shape[axis + 1 :]
        )

    def pad_tokens(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (1, CHUNK)), 3)

    def pad_keep(self, v: Any, value: int) -> Any:
        """(B, L) with `value` after its end, as far as the copy of the last chunk reads."""
        missing = -v.shape[1] % CHUNK + KEEP_STEPS - CHUNK
        return jnp.pad(v, ((0, 0), (0, missing)), constant_values=value)

    def pad_states(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (v.ndim - 1, self.tile.all_states)), v.ndim - 2)

    def pad_weights(self, v: Any) -> Any:
        """(2B, L, G, N) in fp32, N in parts of at most 256: the most that the TMA takes."""
        v = self.tile.copies(_pad(v.astype(jnp.float32), (1, CHUNK), (3, self.tile.all_states)))
        parts = -(-v.shape[3] // 256)
        return v.reshape(*v.shape[:3], parts, v.shape[3] // parts)

    def cut_channels(self, v: Any, axis: int) -> Any:
        """Undoes pad_channels along `axis`, the axis of D."""
        v = v.reshape(
            *v.shape[:axis], self.groups, v.shape[axis] // self.groups, *v.shape[axis + 1 :]
        )
        return lax.slice_in_dim(v, 0, self.dim, axis=axis + 1)

    def cut_tokens(self, v: Any) -> Any:
        return self.cut_channels(v[:, : self.length], 2)

    def cut_states(self, v: Any) -> Any:
        return self.cut_channels(v[..., : self.states], v.ndim - 2)

    @property
    def columns(self) -> int:
        return self.batch * self.blocks

    def cut(self, grid: ScanGrid) -> ScanPlan:
        self.scan = dataclasses.replace(self.scan, grid=grid)
        return self.scan

    def of_segments(self, states: Any) -> Any:
        """Initial states of segments, or gradients of final ones, with zeros behind them."""
        return None if states is None else with_zeros(self.pad_states(states.astype(jnp.float32)))

    def states_like(self, *lead: int) -> Any:
        return fp32_array(*lead, self.scan.channels, self.tile.all_states)

    def per_block(self, *lead: int) -> Any:
        return fp32_array(*lead, self.width, self.tile.all_states)

    def sum_over_parts(self, v: jax.Array) -> jax.Array:
        """Sums (blocks, width, ...) over batch rows and parts: (D, ...)."""
        v = self.scan.grid.sum(v)
        return v.reshape(self.batch, self.scan.channels, *v.shape[2:]).sum(0)

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        scan: ScanPlan,
        ins: dict[str, Any],
        outs: dict[str, Any],
        memory: Scratch,
    ) -> dict[str, Any]:
        """Launches ``kernel(scan, refs, smem, *rings)`` on the grid of `scan`, arrays by name."""

        def body(refs: Any, smem: Any) -> None:
            kernel(scan, refs, smem, *(TokenRing(r, refs, smem, scan) for r in memory.rings))

        scratch: dict[str, Any] = {k: plgpu.SMEM(v, jnp.float32) for k, v in memory.own.items()}
        for ring in memory.rings:
            scratch |= ring.scratch()
        return launch_named(
            body,
            ins,
            outs,
            scratch,
            grid=(scan.grid.count,),
            grid_names=(BLOCK,),
            kernel_name=name,
            approx_math=True,
        )

    def scratch(self, most: int, of_chunks: Callable[[int], Scratch], resident: int = 1) -> Scratch:
        """Picks the chunks per tile, up to `most`, that fit shared memory, and their scratch.

        `of_chunks` gives the scratch memory of a number of chunks; `resident` blocks share a
        multiprocessor.
        """
        room = shared_memory() // resident - _OVERHEAD
        for chunks in (4, 2):
            scratch = of_chunks(chunks)
            if chunks <= most and scratch.bytes() <= room:
                return scratch
        return of_chunks(1)

    def pick(self, names: str) -> dict[str, Any]:
        """The arrays of these names."""
        return {stored(name): self.arrays[stored(name)] for name in names.split()}

    def ring(self, chunks: int, names: str, **others: Any) -> TokenTiles:
        arrays = {name: self.arrays[stored(name)] for name in names.split()} | others
        return TokenTiles(self.scan, chunks, arrays)


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)
