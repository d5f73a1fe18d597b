"""What a block knows of a call, its share of the arrays, and its rings of tokens.

The arrays along time come through rings of two stages, copied by the TMA while the block works on
the other stage.

Pallas would put a barrier around every store. The kernels have their own instead: release_stage
where a stage is copied to again and where warps exchange sums, sync_warp where lanes of a warp do.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes
from jaxkern.mosaic.launch import LANES, grid_axes, interpreted
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.ring import Ring, close_copies, release_stage, ring_scratch
from jaxkern.ops.selective_scan.reference import CHUNK, Options
from jaxkern.ops.selective_scan.tiles import CHANNELS, Grid, Tile
from jaxkern.ops.softplus import softplus

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

Rows = list[jax.Array]
"""Arrays (LANES,), fp32: registers."""


def map_states(f: Callable[..., Any], *states: Any) -> Any:
    """`f` over each state of each channel."""
    return jax.tree.map(f, *states)


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the kernels know about a call while they are compiled."""

    options: Options
    tile: Tile
    length: int  # of the sequence, before padding
    padded: int
    channels: int  # D, padded
    blocks: int  # of channels
    blocks_per_group: int  # that share B and C
    warpgroups: int  # of a block, each with a tile of its channels
    exact: bool  # fp32 tokens: no shortcut in softplus and sigmoid
    every: int  # steps from one saved state to the next
    grid: Grid  # of blocks
    stage_width: int  # channels of a ring's stages: those of the tile, or more

    def load(
        self,
        ref: Any,
        *digits: Any,
        start: int = 0,
        count: int = 1,
        volatile: bool = False,
    ) -> Rows:
        offsets = LaneOffsets(digits, start)
        return load_lanes(ref, offsets, count, volatile=volatile)

    @property
    def per_unit(self) -> int:
        """Chunks from one saved state to the next; 1 where there is one before every chunk."""
        return max(1, self.every // CHUNK)

    def load1(self, ref: Any, *digits: Any, start: int = 0, volatile: bool = False) -> jax.Array:
        return self.load(ref, *digits, start=start, volatile=volatile)[0]

    def store(self, ref: Any, values: Sequence[jax.Array], *digits: Any, start: int = 0) -> None:
        store_lanes(ref, LaneOffsets(digits, start), values)

    def sum(self, values: Sequence[jax.Array], distances: Sequence[int], swapped: int = 0) -> Rows:
        return sum_lanes(values, distances, swapped=swapped)

    @property
    def token_stride(self) -> int:
        """Elements from token to token of (B, L, D); the interpreter's copy is compact."""
        return self.tile.width if interpreted() else self.channels

    @property
    def stage_stride(self) -> int:
        """The same in a ring's stage."""
        return self.tile.width if interpreted() else self.stage_width

    @property
    def chunks(self) -> int:
        return self.padded // CHUNK

    def chunks_of_units(self, first: Any, units: Any) -> tuple[Any, Any]:
        """The first chunk of `units` of the backward, and how many chunks there are."""
        first = first * self.per_unit
        return first, jnp.minimum(units * self.per_unit, self.chunks - first)

    def load_states(self, ref: Any) -> list[Rows]:
        """Loads [R][K] from the block's channels of states, (width, S · K)."""
        return self.swapped(self.load_unswapped(ref))

    def load_unswapped(self, ref: Any) -> list[Rows]:
        """The same, for :meth:`swapped` when they are needed: it waits for them."""
        t = self.tile
        rows = [t.of_channel(r, t.all_states) for r in range(CHANNELS)]
        return [self.load_pairs(ref, 1, *digits, start=start) for start, digits in rows]

    def load_pairs(self, ref: Any, copies: int, *digits: Any, start: int) -> Rows:
        """[K] states of as many copies."""
        t = self.tile
        pairs = [i * t.pair * t.lanes * copies for i in range(t.states // t.pair)]
        load = lambda at: self.load(ref, *digits, t.of_states(), start=start + at, count=t.pair)
        return [v for at in pairs for v in load(at)]

    def store_states(self, ref: Any, h: Sequence[Rows]) -> None:
        t = self.tile
        for r, row in enumerate(self.swapped(h)):
            start, digits = t.of_channel(r, t.all_states)
            for k in range(0, t.states, t.pair):
                at = start + k * t.lanes
                self.store(ref, row[k : k + t.pair], *digits, t.of_states(), start=at)

    def swapped(self, h: Sequence[Rows]) -> list[Rows]:
        """States from their own order to the lane's, or back."""
        rows = [list(row) for row in h]
        for distance, d in self.tile.state_swaps:
            upper = self.lane() & distance != 0
            rows = [[jnp.where(upper, row[k ^ d], v) for k, v in enumerate(row)] for row in rows]
        return rows

    def lane(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=ROW)

    def load_lane(self, ref: Any, start: int, count: int) -> Rows:
        """Loads `count` values that the lane stored by :meth:`store_lane`."""
        vec = math.gcd(4, count)
        return [
            v
            for i in range(start, start + count, vec)
            for v in self.load(ref, (1, LANES, vec), start=i * LANES, count=vec)
        ]

    def store_lane(self, ref: Any, start: int, values: Rows) -> None:
        vec = math.gcd(4, len(values))
        for i in range(0, len(values), vec):
            self.store(ref, values[i : i + vec], (1, LANES, vec), start=(start + i) * LANES)

    def constants(self, refs: Any) -> tuple[list[Rows], jax.Array, jax.Array]:
        """A · log2(e), so that a decay is one exp2, and D and dt_bias, of the block's channels."""
        channels = Block(self).channels
        owned = self.tile.owned(step=0)
        D, dt_bias = (self.load1(ref.at[channels], *owned) for ref in (refs.D, refs.dt_bias))
        rate = map_states(lambda a: a * LOG2E, self.load_states(refs.A.at[channels]))
        return rate, *once_read([D, dt_bias])

    def load_channels(self, ref: Any) -> Rows:
        """Loads [R] from the block's channels of (D,)."""
        return [row[0] for row in self.load_per_channel(ref, 1)]

    def load_per_channel(self, ref: Any, n: int, start: int = 0, volatile: bool = False) -> Any:
        """[R][n] from (width, n)."""
        rows = [self.tile.of_channel(r, n) for r in range(CHANNELS)]
        return [
            self.load(ref, *digits, start=start + at, count=n, volatile=volatile)
            for at, digits in rows
        ]

    def step_size(self, raw: jax.Array, token: Any) -> tuple[jax.Array, Any]:
        """dt after softplus and clamp, and where its slope counts (None: everywhere).

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
            valid = token + (self.lane() // self.tile.low % self.tile.lanes) // each < self.length
            inside = valid if inside is None else inside & valid
            dt = jnp.where(valid, dt, 0.0)
        return dt, inside


def stored(name: str) -> str:
    return "weights" if name in ("B", "C") else name


_TOKENS = "x", "dt", "z", "B", "C", "keep", "crossed", "dout"
"""Arrays along time."""


def fp32_array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_PER_TOKEN = "keep", "crossed"
"""Arrays (B, L)."""

KEEP_STEPS = 32
"""Tokens of these in a stage, and the most of a tile: each lane of a warpgroup announces its share
of a copy, which makes 128 bytes the least of one."""


class TokenTiles:
    """The tiles of some chunks of token arrays that a ring of two stages holds."""

    def __init__(self, scan: Scan, prefix: str, chunks: int, arrays: dict[str, Any]):
        self.scan, self.prefix, self.chunks = scan, prefix, chunks
        self.steps = chunks * CHUNK
        self.arrays = {k: v for k, v in arrays.items() if v is not None}
        self.tiles = {name: (self._shape(name), v.dtype) for name, v in self.arrays.items()}

    def scratch(self) -> dict[str, Any]:
        """The rings, one for each warpgroup."""
        return ring_scratch(2 * self.scan.warpgroups, self.tiles, self.prefix)

    def bytes(self) -> int:
        """The shared memory of one warpgroup's ring."""
        return 2 * sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tiles.values())

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in ("B", "C"):
            return self.steps, *self.arrays[name].shape[3:]
        if name in _PER_TOKEN:
            return (KEEP_STEPS,)
        return self.steps, self.scan.stage_width


class TokenRing:
    """A ring of token arrays in a kernel, for the blocks of `scan`."""

    def __init__(self, tiles: TokenTiles, refs: Any, smem: Any, scan: Scan):
        self.of, self.refs, self.smem, self.scan = tiles, refs, smem, scan
        self.chunks, self.steps = tiles.chunks, tiles.steps
        self.at = Block(scan)
        self.arrays = {name: getattr(smem, tiles.prefix + name) for name in tiles.arrays}
        self.arrived = getattr(smem, f"{tiles.prefix}arrived", None)

    def of_blocks(self, scan: Scan) -> "TokenRing":
        return TokenRing(self.of, self.refs, self.smem, scan)

    @property
    def ring(self) -> Ring:
        return Ring(self.arrays, self.arrived, 2, 2 * self.at.warpgroup)

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
        return types.SimpleNamespace(**(dict.fromkeys(_TOKENS) | views))

    def upward(self, first: Any, count: Any, i: Any) -> "Span":
        """The i-th tile of `count` chunks from `first` on."""
        chunk = first + i * self.chunks
        start = jnp.minimum(chunk, self.scan.chunks - self.chunks)
        return Span(start, chunk - start, jnp.minimum(self.chunks, first + count - start))

    def tiles(self, count: Any) -> Any:
        """How many cover `count` chunks."""
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


class Span(NamedTuple):
    """The chunks of a tile that are worked on.

    The last tile of a sequence ends with it, so its first chunks may be those of the tile before.
    """

    start: Any  # the tile's first chunk in the sequence
    first: Any  # in the tile
    stop: Any


class Block:
    """A block's share of the call: its column, its part of the sequence, its channels."""

    def __init__(self, scan: Scan):
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
        self.first = self.part * grid.length
        self.units = jnp.where(
            is_whole, grid.units, jnp.minimum(grid.length, grid.units - self.first)
        )
        self.later = jnp.where(is_whole, 0, grid.parts - 1 - self.part)
        block = lax.rem(column, scan.blocks)
        self.block, self.batch = block, lax.div(column, scan.blocks)
        self.group = lax.div(block, scan.blocks_per_group)
        self.warpgroup = lax.axis_index(WARPGROUP) if scan.warpgroups > 1 else 0
        start = self.warpgroup * width
        self.local = pl.ds(start, width)  # among the block's channels
        self.channels = pl.ds(block * scan.warpgroups * width + start, width)
