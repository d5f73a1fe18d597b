"""What a block is given: the call's arrays, its place in them, and its shared memory.

The arrays of the tokens come through rings of two slots, copied by the TMA while the block works on
the other slot.

Pallas would put a barrier around every store. The kernels place their own instead: commit_smem
where a slot is copied to again and where warps exchange sums, sync_warp where lanes of a warp do.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E, softplus
from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes
from jaxkern.mosaic.launch import LANES, grid_axes, interpreted, launch_kernel
from jaxkern.ops.segments import with_zeros
from jaxkern.ops.selective_scan.reference import CHUNK, Options
from jaxkern.ops.selective_scan.tiles import Grid, Tile

BLOCK, _WARPGROUP = grid_axes("block", "warpgroup")
ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

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
    stage_width: int  # channels of a ring's slots: those of the tile, or more

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

    def load1(self, ref: Any, *digits: Any, start: int = 0) -> jax.Array:
        return self.load(ref, *digits, start=start)[0]

    def store(self, ref: Any, values: Sequence[jax.Array], *digits: Any, start: int = 0) -> None:
        store_lanes(ref, LaneOffsets(digits, start), values)

    def sum(self, values: Sequence[jax.Array], distances: Sequence[int], swapped: int = 0) -> Rows:
        return sum_lanes(values, distances, swapped=swapped)

    @property
    def token_stride(self) -> int:
        """From token to token in a tile's part of (B, L, D); the interpreter's copy is compact."""
        return self.tile.width if interpreted() else self.channels

    @property
    def stage_stride(self) -> int:
        """The same in a ring's slot."""
        return self.tile.width if interpreted() else self.stage_width

    @property
    def chunks(self) -> int:
        return self.padded // CHUNK

    def load_states(self, ref: Any) -> list[Rows]:
        """[R][K] from a block's part of states, (width, S · K)."""
        return self.swapped(self.load_unswapped(ref))

    def load_unswapped(self, ref: Any) -> list[Rows]:
        """The same, for :meth:`swapped` when they are needed: it waits for them."""
        t = self.tile
        rows = [t.of_channel(r, t.all_states) for r in range(t.channels)]
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
        """`count` values of a lane's own, put there by :meth:`store_lane`."""
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
        """[R] from a block's part of (D,)."""
        return [row[0] for row in self.load_per_channel(ref, 1)]

    def load_per_channel(self, ref: Any, n: int, start: int = 0, volatile: bool = False) -> Any:
        """[R][n] from (width, n)."""
        rows = [self.tile.of_channel(r, n) for r in range(self.tile.channels)]
        return [
            self.load(ref, *digits, start=start + at, count=n, volatile=volatile)
            for at, digits in rows
        ]

    def step_size(self, raw: jax.Array, token: Any) -> tuple[jax.Array, Any]:
        """dt after softplus and clamp, and where its slope counts (None: everywhere).

        `token` is the first of a round. Beyond the end of the sequence dt is 0 and keeps the state.
        """
        lo, hi = self.options.dt_limit
        dt, inside = raw, None
        if self.options.dt_softplus:
            dt = softplus(raw, self.exact)
        if lo > (0 if self.options.dt_softplus else -float("inf")):
            inside = dt >= lo
            dt = jnp.where(dt < lo, lo, dt)
        if hi < float("inf"):
            below = dt <= hi
            inside = below if inside is None else inside & below
            dt = jnp.where(dt > hi, hi, dt)
        if self.length != self.padded:
            each = self.tile.owners * self.tile.channels
            valid = token + (self.lane() // self.tile.low % self.tile.lanes) // each < self.length
            inside = valid if inside is None else inside & valid
            dt = jnp.where(valid, dt, 0.0)
        return dt, inside


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)


class Call:
    """The arrays of a call as the kernels take them: whole chunks and blocks, groups in a row."""

    def __init__(
        self,
        options: Options,
        tile: Tile,
        warpgroups: int,
        every: int,
        *arrays: Any,
    ):
        x, dt, A, B, C, D, z, dt_bias, keep, crossed = arrays
        f32 = jnp.float32
        self.tile = tile
        self.width = tile.width * warpgroups  # of a block
        self.batch, self.length, self.groups, self.dim = x.shape
        self.states = A.shape[-1]
        exact = any(v is not None and v.dtype == f32 for v in (x, dt, z))
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
        self.scan = Scan(
            options=options,
            tile=tile,
            length=self.length,
            padded=padded,
            channels=channels,
            blocks=self.blocks,
            blocks_per_group=self.blocks // self.groups,
            warpgroups=warpgroups,
            exact=exact,
            every=every,
            grid=Grid(1, 1, 1, 1),
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
        """(B, L) with `value` after its end, as far as a copy into the last chunk's slot reads."""
        missing = -v.shape[1] % CHUNK + _KEEP_STEPS - CHUNK
        return jnp.pad(v, ((0, 0), (0, missing)), constant_values=value)

    def pad_states(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (v.ndim - 1, self.tile.all_states)), v.ndim - 2)

    def pad_weights(self, v: Any) -> Any:
        """(2B, L, G, N) in fp32, N in parts of at most 256: the most that the TMA takes."""
        v = self.tile.copies(_pad(v.astype(jnp.float32), (1, CHUNK), (3, self.tile.all_states)))
        parts = -(-v.shape[3] // 256)
        return v.reshape(*v.shape[:3], parts, v.shape[3] // parts)

    def cut_channels(self, v: Any, axis: int) -> Any:
        """Undoes pad_channels, `axis` that of D."""
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

    def cut(self, grid: Grid) -> Scan:
        self.scan = dataclasses.replace(self.scan, grid=grid)
        return self.scan

    def of_segments(self, states: Any) -> Any:
        """Initial states of segments, or gradients of final ones, and one of zeros behind them."""
        return None if states is None else with_zeros(self.pad_states(states.astype(jnp.float32)))

    def states_like(self, *lead: int) -> Any:
        return fp32_array(*lead, self.scan.channels, self.tile.all_states)

    def per_block(self, *lead: int) -> Any:
        return fp32_array(*lead, self.width, self.tile.all_states)

    def sum_over_parts(self, v: jax.Array) -> jax.Array:
        """(D, ...) from (blocks, width, ...): the sums over batch rows and parts."""
        v = self.scan.grid.sum(v)
        return v.reshape(self.batch, self.scan.channels, *v.shape[2:]).sum(0)

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        scan: Scan,
        ins: dict[str, Any],
        outs: dict[str, Any],
        rings: Sequence["Ring"],
        own: dict[str, tuple[int, ...]],
        common: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Launches `kernel` on the grid of `scan` and on arrays by name; those absent are None.

        In shared memory there are the rings, fp32 arrays of each warpgroup's `own`, and what they
        have in `common`.
        """
        ins = {k: v for k, v in ins.items() if v is not None}
        names = [*ins, *outs]

        def body(*refs: Any, **smem: Any) -> None:
            every = dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True))
            smem |= {name: smem[name].at[Block(scan).warpgroup] for name in own}
            named = types.SimpleNamespace(**every)
            space = types.SimpleNamespace(**smem)
            kernel(scan, named, space, *(FilledRing(r, named, space, scan) for r in rings))

        scratch = {k: plgpu.SMEM((scan.warpgroups, *v), jnp.float32) for k, v in own.items()}
        for ring in rings:
            scratch |= ring.scratch()
        threads: dict[str, Any] = {}
        if scan.warpgroups > 1:
            threads = {"num_threads": scan.warpgroups, "thread_name": _WARPGROUP}
        results = launch_kernel(
            body,
            out_type=tuple(outs.values()),
            scratch_types=scratch | (common or {}),
            **threads,
            grid=(scan.grid.count,),
            grid_names=(BLOCK,),
            kernel_name=name,
            approx_math=True,
        )(*ins.values())
        return dict(zip(outs, results, strict=True))

    def pick(self, names: str) -> dict[str, Any]:
        """The arrays of these names; B and C are the two halves of one."""
        return {_stored(name): self.arrays[_stored(name)] for name in names.split()}

    def ring(self, prefix: str, chunks: int, names: str, **others: Any) -> "Ring":
        arrays = {name: self.arrays[_stored(name)] for name in names.split()} | others
        return Ring(self.scan, prefix, chunks, arrays)


def _stored(name: str) -> str:
    return "weights" if name in ("B", "C") else name


_NAMES = (
    *("x", "dt", "z", "B", "C", "weights", "A", "D", "dt_bias", "keep", "initial", "passed"),
    *("total", "states", "dout", "dfinal", "out", "final", "dx", "ddt", "dz", "dA", "sums", "dD"),
    *("ddt_bias_sum", "dinitial", "chunk_states", "crossed", "starts", "ends", "dstarts", "dends"),
)


def fp32_array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_PER_TOKEN = "keep", "crossed"
"""Arrays (B, L)."""

_KEEP_STEPS = 32
"""Tokens of these in a slot, and the most of a tile: each lane of a warpgroup announces its share
of a copy, which makes 128 bytes the least of one."""


class Ring:
    """Two slots in shared memory for some chunks of token arrays, filled by the TMA.

    Each warpgroup has its own.
    """

    def __init__(self, scan: Scan, prefix: str, chunks: int, arrays: dict[str, Any]):
        self.scan = scan
        self.prefix = prefix
        self.chunks = chunks
        self.steps = chunks * CHUNK
        self.arrays = {k: v for k, v in arrays.items() if v is not None}

    def scratch(self) -> dict[str, Any]:
        count = 2 * self.scan.warpgroups
        slots = {
            self.prefix + name: plgpu.SMEM((count, *self._tile(name)), array.dtype)
            for name, array in self.arrays.items()
        }
        arrived = plgpu.Barrier(num_arrivals=len(slots), num_barriers=count)
        return {**slots, f"{self.prefix}arrived": arrived}

    def bytes(self) -> int:
        """Of shared memory, for one warpgroup."""
        sizes = [math.prod(self._tile(k)) * v.dtype.itemsize for k, v in self.arrays.items()]
        return 2 * sum(sizes)

    def _tile(self, name: str) -> tuple[int, ...]:
        if name in ("B", "C"):
            return self.steps, *self.arrays[name].shape[3:]
        if name in _PER_TOKEN:
            return (_KEEP_STEPS,)
        return self.steps, self.scan.stage_width


class FilledRing:
    """A ring in a kernel, for the blocks of `scan`."""

    def __init__(self, ring: Ring, refs: Any, smem: Any, scan: Scan):
        self.ring, self.refs, self.smem, self.scan = ring, refs, smem, scan
        self.chunks, self.steps = ring.chunks, ring.steps
        self.at = Block(scan)
        self.slots = {name: getattr(smem, ring.prefix + name) for name in ring.arrays}
        self.arrived = getattr(smem, f"{ring.prefix}arrived")

    def of_blocks(self, scan: Scan) -> "FilledRing":
        return FilledRing(self.ring, self.refs, self.smem, scan)

    def _slot(self, turn: Any) -> Any:
        return 2 * self.at.warpgroup + lax.rem(turn, 2)

    def fetch(self, chunk: Any, turn: Any) -> None:
        """Starts copying the tile from `chunk` on; `turn` counts this ring's copies."""
        at, slot, width = self.at, self._slot(turn), self.scan.stage_width
        channels = at.channels
        if width > self.scan.tile.width:
            channels = pl.ds(lax.div(channels.start, width) * width, width)
        for name, slots in self.slots.items():
            ref = getattr(self.refs, _stored(name))
            time = pl.ds(chunk * CHUNK, slots.shape[1])
            if name in ("B", "C"):
                row = at.batch + (ref.shape[0] // 2 if name == "C" else 0)
                source = ref.at[row, time, at.group]
            elif name in _PER_TOKEN:
                source = ref.at[at.batch, time]
            else:
                source = ref.at[at.batch, time, channels]
            plgpu.copy_gmem_to_smem(source, slots.at[slot], self.arrived.at[slot])

    def wait(self, turn: Any) -> None:
        plgpu.barrier_wait(self.arrived.at[self._slot(turn)])

    def tile(self, turn: Any) -> Any:
        return self._views(turn, 0, self.steps)

    def chunk(self, turn: Any, chunk: Any) -> Any:
        return self._views(turn, chunk * CHUNK, CHUNK)

    def _views(self, turn: Any, start: Any, steps: int) -> Any:
        at, width = (self._slot(turn), pl.ds(start, steps)), self.scan.tile.width
        views = {name: slots.at[at] for name, slots in self.slots.items()}
        if width < self.scan.stage_width:
            mine = pl.ds(lax.rem(self.at.channels.start, self.scan.stage_width), width)
            for name in views.keys() - {"B", "C", *_PER_TOKEN}:
                views[name] = self.slots[name].at[(*at, mine)]
        return types.SimpleNamespace(**(dict.fromkeys(_NAMES) | views))

    def upward(self, first: Any, count: Any, i: Any) -> "Span":
        """The i-th tile of `count` chunks from `first` on."""
        chunk = first + i * self.chunks
        start = jnp.minimum(chunk, self.scan.chunks - self.chunks)
        return Span(start, chunk - start, jnp.minimum(self.chunks, first + count - start))

    def tiles(self, count: Any) -> Any:
        """How many cover `count` chunks."""
        return lax.div(count + self.chunks - 1, self.chunks)

    def stream(self, first: Any, count: Any, body: Any, init: Any) -> Any:
        """``init = body(turn, span, init)`` for the tiles of those chunks, as they arrive."""
        tiles = self.tiles(count)
        self.fetch(self.upward(first, count, 0).start, 0)

        def run(i, carry):
            plgpu.commit_smem()  # all lanes are done with the other slot

            @pl.when(i + 1 < tiles)
            def _():
                self.fetch(self.upward(first, count, i + 1).start, i + 1)

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
        self.warpgroup = lax.axis_index(_WARPGROUP) if scan.warpgroups > 1 else 0
        start = self.warpgroup * width
        self.local = pl.ds(start, width)  # among the block's channels
        self.channels = pl.ds(block * scan.warpgroups * width + start, width)
