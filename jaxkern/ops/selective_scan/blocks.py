"""Parts that both directions share: arrays of a call, blocks, rings, steps, and carries.

The arrays along time come through rings of two stages: the TMA fills one while the block works on
the other. Pallas would put a barrier around every store. The kernels have their own instead:
release_stage where a stage is copied to again and where warps exchange sums, sync_warp where lanes
of a warp exchange values.

Where sequences are cut into parts, a first kernel finds, for every subpart of a part, the state
after it from zeros (in the backward: the gradient before it) and the sum of its step sizes, as a
state decays by exp(Σdt · A). Every block of the main kernel folds the subparts before its part (in
the backward: after it) into the state that it starts from.
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
from jaxkern.mosaic.arithmetic import LOG2E, exp2_by_polynomial, once_read, sigmoid, softplus
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes, sync_warp
from jaxkern.mosaic.launch import LANES, grid_axes, launch_named, shared_memory
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.ring import Ring, close_copies, release_stage, ring_scratch
from jaxkern.ops.sections import state_after_all
from jaxkern.ops.segments import with_zeros
from jaxkern.ops.selective_scan.reference import CHUNK, SelectiveScanOptions, decay_of
from jaxkern.ops.selective_scan.tiles import CHANNELS, ScanGrid, ScanTile, forward_grid

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

Registers = list[jax.Array]
"""Arrays (LANES,), fp32."""

_ALONG_TIME = "x", "dt", "z", "B", "C", "keep", "crossed", "dout"
_PER_TOKEN = "keep", "crossed"  # (B, L)

KEEP_STEPS = 32
"""Tokens of `keep` and `crossed` in a stage, and the most of a tile: each lane of a warpgroup
announces its share of a copy, which makes 128 bytes the least of one."""

_OVERHEAD = 3584
"""Bytes of shared memory for barriers and for what a block takes itself."""

_FOLD = 4
"""Subparts whose carries are loaded together, to wait for memory once."""


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


def zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)


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
    warpgroups: int  # of a block, each with a tile of its channels
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
            upper = self.lane() & distance != 0
            rows = [[jnp.where(upper, row[k ^ d], v) for k, v in enumerate(row)] for row in rows]
        return rows

    def lane(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=ROW)

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
            valid = token + (self.lane() // self.tile.low % self.tile.lanes) // each < self.length
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


# Rings of tokens


def stored(name: str) -> str:
    """Name of the array that has B or C: they are the two halves of one."""
    return "weights" if name in ("B", "C") else name


class TokenTiles:
    """The tiles, of some chunks of token arrays, that a ring of two stages holds."""

    def __init__(self, scan: ScanPlan, prefix: str, chunks: int, arrays: dict[str, Any]):
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

    def __init__(self, tiles: TokenTiles, refs: Any, smem: Any, scan: ScanPlan):
        self.of, self.refs, self.smem, self.scan = tiles, refs, smem, scan
        self.chunks, self.steps = tiles.chunks, tiles.steps
        self.at = ScanBlock(scan)
        self.arrays = {name: getattr(smem, tiles.prefix + name) for name in tiles.arrays}
        self.arrived = getattr(smem, f"{tiles.prefix}arrived", None)

    def of_blocks(self, scan: ScanPlan) -> "TokenRing":
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
      own: sizes of each warpgroup's fp32 arrays, by name.
      sums: the shape of an fp32 array that a block's warpgroups share; ``None`` for none.
    """

    rings: list[TokenTiles]
    own: dict[str, tuple[int, ...]]
    sums: tuple[int, ...] | None = None

    def bytes(self, warpgroups: int) -> int:
        """Bytes for one of a block's `warpgroups`."""
        own = sum(map(math.prod, self.own.values()))
        shared = math.prod(self.sums) // warpgroups if self.sums else 0
        return sum(ring.bytes() for ring in self.rings) + 4 * (own + shared)


class ScanCall:
    """The arrays of a call as the kernels take them: whole chunks and blocks, groups in a row."""

    def __init__(
        self, options: SelectiveScanOptions, tile: ScanTile, warpgroups: int, every: int, *arrays
    ):
        x, dt, A, B, C, D, z, dt_bias, keep, crossed = arrays
        f32 = jnp.float32
        self.tile = tile
        self.width = tile.width * warpgroups  # of a block
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
            warpgroups=warpgroups,
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
        barriers: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Launches ``kernel(scan, refs, smem, *rings)`` on the grid of `scan`, arrays by name."""

        def body(refs: Any, smem: Any) -> None:
            of_warpgroup = {
                name: getattr(smem, name).at[ScanBlock(scan).warpgroup] for name in memory.own
            }
            smem = types.SimpleNamespace(**vars(smem) | of_warpgroup)
            kernel(scan, refs, smem, *(TokenRing(r, refs, smem, scan) for r in memory.rings))

        fp32 = lambda *shape: plgpu.SMEM(shape, jnp.float32)
        scratch = {k: fp32(scan.warpgroups, *v) for k, v in memory.own.items()}
        for ring in memory.rings:
            scratch |= ring.scratch()
        if memory.sums:
            scratch["sums"] = fp32(*memory.sums)
        threads: dict[str, Any] = {}
        if scan.warpgroups > 1:
            threads = {"num_threads": scan.warpgroups, "thread_name": WARPGROUP}
        return launch_named(
            body,
            ins,
            outs,
            scratch | (barriers or {}),
            **threads,
            grid=(scan.grid.count,),
            grid_names=(BLOCK,),
            kernel_name=name,
            approx_math=True,
        )

    def scratch(self, most: int, of_chunks: Callable[[int], Scratch], resident: int = 1) -> Scratch:
        """Picks the chunks per tile, up to `most`, that fit shared memory, and their scratch.

        `of_chunks` gives the scratch memory of a number of chunks; `resident` warpgroups share a
        multiprocessor.
        """
        room = shared_memory() // max(resident, self.scan.warpgroups) - _OVERHEAD
        for chunks in (4, 2):
            scratch = of_chunks(chunks)
            if chunks <= most and scratch.bytes(self.scan.warpgroups) <= room:
                return scratch
        return of_chunks(1)

    def fits(self, scratch: Scratch) -> bool:
        """Whether a block of all its warpgroups has that much shared memory."""
        warpgroups = self.scan.warpgroups
        return warpgroups * scratch.bytes(warpgroups) + _OVERHEAD <= shared_memory()

    def pick(self, names: str) -> dict[str, Any]:
        """The arrays of these names."""
        return {stored(name): self.arrays[stored(name)] for name in names.split()}

    def ring(self, prefix: str, chunks: int, names: str, **others: Any) -> TokenTiles:
        arrays = {name: self.arrays[stored(name)] for name in names.split()} | others
        return TokenTiles(self.scan, prefix, chunks, arrays)


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)


# Steps of the recurrence


class Keep(NamedTuple):
    """Whether the sequence goes on at a step.

    Attributes:
      kept: (LANES,), 0 where a segment begins, else 1.
      crossed: a scalar where segments have states, see :func:`jaxkern.ops.segments.crossings`.
    """

    kept: jax.Array
    crossed: Any


def states_before(scan: ScanPlan, refs: Any, keep: Keep | None, h: Any) -> Any:
    """The states that a step begins from, given the previous step's states `h`."""
    if keep is None or refs.starts is None:
        return _where_kept(keep, h)
    return _of_segment(scan, refs.starts, keep, _entered(scan, keep), h)


def gradients_before(scan: ScanPlan, refs: Any, keep: Keep | None, dh: Any) -> Any:
    """The gradients of the previous step's states, from those of a step's initial states."""
    if keep is None:
        return dh
    _store_of_segment(scan, refs.dstarts, keep, _entered(scan, keep), dh)
    if refs.dends is None:
        return _where_kept(keep, dh)
    return _of_segment(scan, refs.dends, keep, _left(scan, keep), dh)


def write_final_states(scan: ScanPlan, refs: Any, keep: Keep | None, h: Any) -> None:
    """Writes the final states of a segment that ends before a step."""
    if keep is not None:
        _store_of_segment(scan, refs.ends, keep, _left(scan, keep), h)


def add_final_gradients(scan: ScanPlan, refs: Any, keep: Keep | None, add: Any, dh: Any) -> Any:
    """``add(dh, gradients)`` where a segment ends before a step, else `dh`."""
    if keep is None or refs.dends is None:
        return dh
    at, number = ScanBlock(scan), _left(scan, keep)
    read = lambda: scan.load_states(refs.dends.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, lambda: add(dh, read()), lambda: dh)


def _where_kept(keep: Keep | None, h: Any) -> Any:
    """The states, zero where the sequence starts anew."""
    return h if keep is None else jax.tree.map(lambda v: jnp.where(keep.kept > 0.5, v, 0.0), h)


def _store_of_segment(scan: ScanPlan, ref: Any, keep: Keep, number: Any, states: Any) -> None:
    """Stores states of the segment `number` where it ends, if it has any."""
    if ref is None:
        return
    at = ScanBlock(scan)

    @pl.when((keep.crossed >= 0) & (number < ref.shape[1]))
    def _():
        scan.store_states(ref.at[at.batch, number, at.channels], states)


def _of_segment(scan: ScanPlan, ref: Any, keep: Keep, number: Any, otherwise: Any) -> Any:
    """The states of a segment where it begins or ends, `otherwise` elsewhere."""
    at = ScanBlock(scan)
    read = lambda: scan.load_states(ref.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, read, lambda: otherwise)


def _entered(scan: ScanPlan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.rem(keep.crossed, _numbers(scan))


def _left(scan: ScanPlan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.div(keep.crossed, _numbers(scan))


def _numbers(scan: ScanPlan) -> Any:
    assert scan.options.num_segments is not None
    return jnp.int32(scan.options.num_segments + 1)


def shared_size(tile: ScanTile, steps: int) -> tuple[int]:
    return (steps * tile.row(2),)


def shared_chunk(smem: Any, tile: ScanTile, c: Any) -> Any:
    size = CHUNK * tile.row(2)
    return smem.shared.at[pl.ds(c * size, size)]


class Steps:
    """Some steps in shared memory, and the share of each lane in their values."""

    def __init__(self, scan: ScanPlan, tokens: Any, token: Any, count: int = CHUNK):
        self.scan = scan
        self.tokens = tokens
        self.token = token  # the first one's number in the sequence
        self.count = count
        self.rounds = range(count // scan.tile.steps)

    def owned(self, name: str, round: int) -> jax.Array:
        """The value of a token array that the lane owns."""
        t = self.scan.tile
        stride = self.scan.stage_stride
        start = round * t.steps * stride
        return load1(getattr(self.tokens, name), *t.owned(step=stride), start=start)

    def all_owned(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yields each round's number and owned values, None for arrays that are not there.

        All are read at once: a read of shared memory stays behind the writes before it, so that a
        round that writes at its end would have the next one wait for memory.
        """
        read = lambda name, r: None if getattr(self.tokens, name) is None else self.owned(name, r)
        return iter([(r, *(read(name, r) for name in names)) for r in self.rounds])

    def share(self, ref: Any, round: int, values: Registers) -> None:
        """Puts owned values into `ref`, (steps, row(len(values))), for :meth:`shared`."""
        t, n = self.scan.tile, len(values)
        start = round * t.steps * t.row(n)
        store(ref, values, *t.owned(step=t.row(n), channel=n), start=start)

    def shared(self, ref: Any, step: int, n: int, volatile: bool = False) -> list[Registers]:
        """[n][R]: the values of a step for the lane's channels."""
        start = step * self.scan.tile.row(n)
        rows = self.scan.load_per_channel(ref, n, start, volatile)
        return [[row[i] for row in rows] for i in range(n)]

    def weights(self, name: str, step: int) -> Registers:
        """[K] of B or C at a step."""
        t, ref = self.scan.tile, getattr(self.tokens, name)
        copies = 1 << len(t.state_swaps)
        start = step * t.all_states * copies
        return self.scan.load_pairs(ref, copies, *t.of_copy(), start=start)

    def keep(self, step: int, volatile: bool = False) -> Keep | None:
        """Whether the sequence goes on at a step; ``None`` where there are no segments.

        `volatile` has it read again, where it was read before.
        """
        if self.tokens.keep is None:
            return None
        crossed = None if self.tokens.crossed is None else self.tokens.crossed[step]
        return Keep(load1(self.tokens.keep, start=step, volatile=volatile), crossed)

    def crosses(self) -> jax.Array:
        """Whether a segment begins at one of the steps, a scalar."""
        tokens, steps = self.tokens, range(self.count)
        if tokens.crossed is not None:
            return functools.reduce(jnp.logical_or, (tokens.crossed[s] >= 0 for s in steps))
        return functools.reduce(jnp.logical_or, (tokens.keep[s] < 0.5 for s in steps))

    def within_a_segment(self) -> "Steps":
        """Returns these steps as a segment's own, at which none begins: :meth:`keep` is None."""
        tokens = types.SimpleNamespace(**vars(self.tokens) | {"keep": None, "crossed": None})
        return Steps(self.scan, tokens, self.token, self.count)

    def write(self, ref: Any, round: int, value: jax.Array) -> None:
        """Writes the owned values to (B, L, D) in global memory."""
        at, t, stride = ScanBlock(self.scan), self.scan.tile, self.scan.token_stride
        part = ref.at[at.batch, pl.ds(self.token, CHUNK), at.channels]
        store(part, [value], *t.owned(step=stride), start=round * t.steps * stride)

    def step_size(self, round: int, raw: jax.Array) -> tuple[jax.Array, Any]:
        return self.scan.step_size(raw, self.token + round * self.scan.tile.steps)

    def gate(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """z · sigmoid(z), and its derivative."""
        gate = sigmoid(z, self.scan.exact)
        return z * gate, gate * (1 + z * (1 - gate))

    def over_states(self, parts: Registers) -> jax.Array:
        """Sums a round's [J · R] values over states: to each lane the sum that it owns."""
        for shuffle in self.shuffles_over_states():
            parts = shuffle(parts)
        (own,) = parts
        return own

    def shuffles_over_states(self) -> list[Callable[[Registers], Registers]]:
        first, *others = self.scan.tile.over_states
        swapped = lambda parts: sum_lanes(parts[0::2] + parts[1::2], [first], swapped=1)
        return [swapped, *(functools.partial(sum_lanes, distances=[d]) for d in others)]


def over_chunks(
    span: TileSpan,
    per_tile: int,
    load: Callable[[Any, int], Any],
    body: Callable[..., Any],
    init: Any,
) -> Any:
    """``init = body(c, steps, init)`` over the chunks of a tile, `steps` (step, load(c, step)).

    Loaded ahead over the ends of chunks, too.
    """

    def run(c, state):
        carry, ahead = state

        def steps():
            nonlocal ahead
            for step in range(CHUNK):
                now = ahead
                following = jnp.minimum(c + 1, per_tile - 1)
                ahead = load(c, step + 1) if step + 1 < CHUNK else load(following, 0)
                yield step, now

        carry = body(c, steps(), carry)
        return carry, ahead

    return lax.fori_loop(span.first, span.stop, run, (init, load(span.first, 0)))[0]


def decays(dt: Registers, rate: list[Registers], by_polynomial: int = 0) -> list[Registers]:
    """exp(dt · A), of a lane's first states by polynomials: the exponential unit has the others."""
    exp2 = lambda k: exp2_by_polynomial if k < by_polynomial else jnp.exp2
    return [
        [exp2(r * len(row) + k)(d * a) for k, a in enumerate(row)]
        for r, (d, row) in enumerate(zip(dt, rate, strict=True))
    ]


def polynomials(tile: ScanTile) -> int:
    """Decays by polynomials where there is little else to do: an eighth evens out the two units."""
    return CHANNELS * tile.states // 8


def advance(
    decay: list[Registers], dtx: Registers, B: Registers, h: list[Registers]
) -> list[Registers]:
    """h = exp(dt · A) · h + dt · x · B."""
    return [
        [a * v + d * b for a, v, b in zip(decays, row, B, strict=True)]
        for decays, d, row in zip(decay, dtx, h, strict=True)
    ]


def share_step_sizes(steps: Steps, shared: Any, dt_bias: jax.Array) -> None:
    for round, x, raw in steps.all_owned("x", "dt"):
        dt, _ = steps.step_size(round, raw + dt_bias)
        steps.share(shared, round, [dt, dt * x])
    sync_warp()


def advance_chunks(
    scan: ScanPlan,
    refs: Any,
    span: TileSpan,
    per_tile: int,
    at: Callable[[Any], tuple[Steps, Any]],
    rate: list[Registers],
    h: list[Registers],
    total: Any = None,
    after: Callable[[Any, list[Registers]], None] = lambda c, h: None,
) -> tuple[list[Registers], Any]:
    """The states after the chunks, each given to `after`, and, where asked for, Σdt.

    ``at(c)`` are the chunk's steps and their shared sizes.
    """

    def load(c, step):
        chunk, shared = at(c)
        dt, dtx = chunk.shared(shared, step, 2)
        decay = decays(dt, rate, polynomials(scan.tile))
        return dt, dtx, decay, chunk.weights("B", step), chunk.keep(step)

    def body(c, steps, carry):
        h, total = carry
        for _, (dt, dtx, decay, B, keep) in steps:
            h = advance(decay, dtx, B, states_before(scan, refs, keep, h))
            if total is not None:
                total = add_reset(total, keep, dt)
        after(c, h)
        return h, total

    return over_chunks(span, per_tile, load, body, (h, total))


# Carries of parts


def device_carry(
    call: ScanCall, A: Any, name: str, kernel: Any, *rest: Any, reverse: bool, **others: Any
) -> Any:
    """The carry of a device's whole part, from the carries of subparts that fill the GPU."""
    grid = forward_grid(call.columns, call.scan.chunks, halves=False)
    call.cut(dataclasses.replace(grid, whole=0))
    got = launch_carry(call, name, kernel, *rest, every_part=True, **others)
    shape = got["total"].shape[0], call.batch, call.scan.channels
    total = call.cut_channels(got["total"].reshape(shape), 2)  # (subparts, B, G, P)
    passed = got["passed"].reshape(*shape, got["passed"].shape[-1])
    passed = call.cut_states(passed)  # (subparts, B, G, P, N)
    decay = decay_of(A.astype(jnp.float32), call.arrays["keep"] is not None, total)
    return jnp.sum(total, 0), state_after_all(decay, passed, reverse=reverse)


def launch_carry(
    call: ScanCall,
    name: str,
    kernel: Callable[..., None],
    tokens: str,
    of_segments: dict[str, Any],
    every_part: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """The carries of all subparts except the last part's, and the sums of their dt.

    It reads `tokens` and `others` along time, and states `of_segments`. With `every_part`
    it includes the last part, for a sequence that continues on another device.
    """
    grid = call.scan.grid.of_carries(every_part)
    scan = dataclasses.replace(call.scan, grid=grid)

    def of_chunks(chunks: int) -> Scratch:
        own = {"shared": shared_size(call.tile, chunks * CHUNK)}
        return Scratch([call.ring("", chunks, tokens, **others)], own)

    memory = call.scratch(min(grid.length * scan.per_unit, scan.chunks), of_chunks)
    subparts = grid.parts - grid.left_out
    ins = call.pick(tokens) | others | of_segments | call.pick("A D dt_bias")
    passed = call.per_block(subparts, grid.rest)
    outs = {"passed": passed, "total": fp32_array(subparts, grid.rest, call.width)}
    return call.run(name, kernel, scan, ins, outs, memory)


def store_carry(scan: ScanPlan, refs: Any, total: Registers, h: list[Registers]) -> None:
    at = ScanBlock(scan)
    scan.store_states(refs.passed.at[at.part, at.rest, at.local], h)
    ref = refs.total.at[at.part, at.rest, at.local]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        store(ref, [value], *digits, start=start)


def no_carry(scan: ScanPlan) -> tuple[list[Registers], Registers]:
    """The carry of no steps: states, and the sum of their step sizes."""
    return scan.zero_states(), [zeros() for _ in range(CHANNELS)]


def add_reset(total: Registers, keep: Any, dt: Registers) -> Registers:
    """total + dt, infinite once a segment began."""
    if keep is not None:
        total = [jnp.where(keep.kept > 0.5, t, float("inf")) for t in total]
    return [t + d for t, d in zip(total, dt, strict=True)]


def decayed(
    total: Registers, decay: list[Registers], h: list[Registers], resets: bool
) -> list[Registers]:
    """The states after steps of the sizes `total` in sum; an infinite sum stands for a reset."""
    held = lambda t, a, v: jnp.where(t < float("inf"), a * v, 0.0) if resets else a * v
    return [
        [held(t, a, v) for a, v in zip(*rows, strict=True)]
        for t, *rows in zip(total, decay, h, strict=True)
    ]


def fold(
    scan: ScanPlan, refs: Any, rate: list[Registers], count: Any, number: Callable[[Any], Any], h
) -> list[Registers]:
    """The state (or its gradient) on the other side of `count` subparts, ``number(i)`` the i-th."""
    at = ScanBlock(scan)

    def load(i):
        s = number(jnp.minimum(i, count - 1))
        total = scan.load_per_channel(refs.total.at[s, at.rest, at.local], 1)
        total = [row[0] for row in total]
        return total, scan.load_states(refs.passed.at[s, at.rest, at.local])

    def body(group, h):
        numbers = [group * _FOLD + i for i in range(_FOLD)]
        for i, (total, passed) in [(i, load(i)) for i in numbers]:
            held = decayed(total, decays(total, rate), h, refs.keep is not None)
            after = jax.tree.map(jnp.add, passed, held)
            counts = jnp.broadcast_to((i < count).astype(jnp.float32), (LANES,)) > 0.5
            h = jax.tree.map(lambda a, b, counts=counts: jnp.where(counts, a, b), after, h)
        return h

    return lax.fori_loop(0, lax.div(count + _FOLD - 1, _FOLD), body, h)
