"""The Mosaic kernels of the selective scan.

A block is one warpgroup and works on some channels of one batch row through one segment of the
sequence. A :class:`Tile` says how its lanes share the states: S lanes hold the N states of R
channels, K states each, in registers, and each of them holds the same states of those channels. So
the lanes of a channel read B and C with one access each, sums over states (y) take S lanes and sums
over channels (dB, dC) the other lanes of the warp, and what is computed once per token and channel
(step size, gate, output, their derivatives) is dealt out to the S lanes: each owns one of the R · J
values of a round of J = S / R steps, and what the others need of it passes through shared memory.

The arrays of the tokens come through a ring of two slots, copied by the TMA while the block works
on the other slot.

Where batch rows and channels are too few to fill the GPU, the sequence is cut into segments. A
first kernel finds, for every segment at once, what it passes on if nothing comes in, and the sum of
its step sizes, for the decay over a segment is exp(Σdt · A). Every block of the main kernel folds
the segments before it (in the backward: after it) into the state that it starts from.

The backward runs every chunk of CHUNK steps up, from the state before it to those before each step,
and down with their gradients. Where states were saved further apart than that, it first runs from
one saved state to the next and puts down the state before every chunk.

Pallas would put a barrier around every store. The kernels place their own instead: commit_smem
where a slot is copied to again and where warps exchange sums, sync_warp where lanes of a warp do.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.mosaic import (
    LANES,
    LaneOffsets,
    fast_reciprocal,
    grid_axes,
    load_lanes,
    num_sms,
    store_lanes,
    sum_lanes,
    sync_warp,
)
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    RECOMPUTED_EVERY,
    Options,
    reference_bwd,
    reference_fwd,
)

MAX_STATES = 384
"""32 lanes hold 12 states each; more would not fit into shared memory in the backward."""

_BLOCK, _BATCH, _SEGMENT = grid_axes("block", "batch", "segment")
_LOG2E = 1.4426950408889634
_WARPS = LANES // 32
_ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)

Rows = list[jax.Array]
"""Arrays (LANES,), fp32: registers."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a warpgroup's lanes share channels and states.

    From the lowest digit, a lane's number is its place among the S lanes of a channel, the number
    of its channels among the warp's, and its warp.
    """

    lanes: int  # S, that share a channel's states
    states: int  # K, of a lane and channel
    channels: int  # R, of a lane

    def __post_init__(self) -> None:
        assert self.channels <= self.lanes <= 32, self

    @property
    def all_states(self) -> int:
        return self.lanes * self.states

    @property
    def groups(self) -> int:
        """Groups of R channels in a warp."""
        return 32 // self.lanes

    @property
    def width(self) -> int:
        """Channels of the warpgroup."""
        return _WARPS * self.groups * self.channels

    @property
    def steps(self) -> int:
        """J, the steps of a round."""
        return min(CHUNK, self.lanes // self.channels)

    @property
    def owners(self) -> int:
        """Lanes that own the same value; more than one where S > R · CHUNK."""
        return self.lanes // (self.channels * self.steps)

    def of_channels(self, stride: int = 1) -> tuple[tuple[int, int, int], ...]:
        """Where a lane's first channel is, `stride` elements from one channel to the next."""
        group = self.channels * stride
        return (self.lanes, self.groups, group), (32, _WARPS, self.groups * group)

    def of_states(self) -> tuple[int, int, int]:
        return 1, self.lanes, self.states

    def owned(self, step: int, channel: int = 1) -> tuple[tuple[int, int, int], ...]:
        """Where the value that a lane owns is, by the strides of steps and channels."""
        return (
            *self.of_channels(channel),
            (self.owners, self.channels, channel),
            (self.owners * self.channels, self.steps, step),
        )

    @property
    def over_states(self) -> list[int]:
        """The distances of the lanes of one channel: each is left with the value it owns."""
        return [d for d in (16, 8, 4, 2, 1) if d < self.lanes]

    @property
    def over_channels(self) -> list[int]:
        """The distances of a warp's lanes with the same states."""
        return [d for d in (16, 8, 4, 2, 1) if d >= self.lanes]

    @property
    def over_steps(self) -> list[int]:
        """The distances of the lanes that own values of the same channel."""
        return [d for d in self.over_states if d >= self.owners * self.channels]

    @property
    def sums(self) -> int:
        """Sums over channels, of dB and dC, that a lane is left with."""
        return max(1, 2 * self.states // self.groups)


def _tile(states: int, most: tuple[int, int, int]) -> Tile:
    """Two channels a lane; 4, 8 or 16 lanes up to the states that `most` says, 32 beyond."""
    lanes = next((s for s, n in zip((4, 8, 16), most, strict=True) if states <= n), 32)
    return Tile(lanes, next(k for k in (1, 2, 4, 8, 12) if k * lanes >= states), 2)


def forward_tile(batch: int, channels: int, states: int) -> Tile:
    """Two channels a lane, which halve the reads of B and C, if the blocks fill the GPU evenly.

    On an H200 with N = 16, S · K · R = 4 · 4 · 2 takes 0.239 ms at (8, 2048, 2048), two blocks a
    multiprocessor, and 8 · 2 · 2, twice the blocks, 0.276; at (4, 4096, 5120), where some have
    three blocks and some two, 0.686 and 0.665.
    """
    wide = _tile(states, (16, 64, 128))
    if wide.lanes > 8 or wide.states == 1:
        return wide
    even = Tile(2 * wide.lanes, wide.states // 2, wide.channels)

    def time(tile: Tile) -> float:
        blocks = batch * -(-channels // tile.width)
        return -(-blocks // num_sms()) * tile.width

    if batch * -(-channels // wide.width) < num_sms():
        return wide
    return wide if time(wide) <= 1.12 * time(even) else even


def backward_tile(states: int) -> Tile:
    """8 states a lane, if that will do: of each there are 4 values and a chunk's decays to keep.

    On an H200 at (8, 2048, 2048, 64), S · K · R = 16 · 4 · 2 takes 2.9 ms, 8 · 8 · 2 3.0 and
    8 · 8 · 1 4.2; with N = 128, 32 · 4 · 2 takes 7.8 and 16 · 8 · 1 9.5.
    """
    return _tile(states, (16, 32, 64))


@dataclasses.dataclass(frozen=True)
class Segments:
    """`units` of the sequence in `count` segments of `length`, the last one perhaps shorter."""

    units: int
    length: int

    @property
    def count(self) -> int:
        return -(-self.units // self.length)

    def first(self, segment: Any) -> Any:
        return segment * self.length

    def size(self, segment: Any) -> Any:
        return jnp.minimum(self.length, self.units - segment * self.length)


def forward_segments(columns: int, chunks: int) -> Segments:
    """How the forward cuts a sequence of `chunks`, for `columns` blocks of channels and batch rows.

    Segments cost a second pass of exponentials, so it does only where blocks are few: with 16
    segments (1, 16384, 2048, 16) takes 0.43 ms on an H200, with one 2.5.
    """
    if 4 * columns >= 3 * num_sms():
        return Segments(chunks, chunks)
    count = max(1, min(4 * num_sms() // columns, chunks // 2))
    return Segments(chunks, -(-chunks // count))


def backward_segments(columns: int, units: int) -> Segments:
    """The same for the backward, of which two blocks are resident on a multiprocessor.

    The time is that of the waves of blocks, each as long as its segment; the pass that finds what
    the segments hand on adds a fifth. Fewer segments win where the waves are within 3%.
    """
    resident = 2 * num_sms()

    def cost(count: int) -> float:
        return -(-columns * count // resident) / count * (1.0 if count == 1 else 1.2)

    counts = range(1, max(2, min(64, units // 2 + 1)))
    best = min(cost(count) for count in counts)
    count = next(count for count in counts if cost(count) <= 1.03 * best)
    return Segments(units, -(-units // count))


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the kernels know about a call while they are compiled."""

    options: Options
    tile: Tile
    length: int  # of the sequence, before padding
    padded: int
    channels: int  # D, padded
    blocks_per_group: int  # of channels, that share B and C
    exact: bool  # fp32 tokens: no shortcut in softplus and sigmoid
    every: int  # steps from one saved state to the next
    segments: Segments
    interpret: bool

    def load(
        self, ref: Any, *digits: Any, start: int = 0, count: int = 1, volatile: bool = False
    ) -> Rows:
        offsets = LaneOffsets(digits, start)
        return load_lanes(ref, offsets, count, interpret=self.interpret, volatile=volatile)

    def load1(self, ref: Any, *digits: Any, start: int = 0) -> jax.Array:
        return self.load(ref, *digits, start=start)[0]

    def store(self, ref: Any, values: Sequence[jax.Array], *digits: Any, start: int = 0) -> None:
        store_lanes(ref, LaneOffsets(digits, start), values, interpret=self.interpret)

    def sum(self, values: Sequence[jax.Array], distances: Sequence[int]) -> Rows:
        return sum_lanes(values, distances, interpret=self.interpret)

    @property
    def token_stride(self) -> int:
        """From token to token in a block's part of (B, L, D); the interpreter's copy is compact."""
        return self.tile.width if self.interpret else self.channels

    def load_states(self, ref: Any) -> list[Rows]:
        """[R][K] from a block's part of states, (width, S · K)."""
        t, n = self.tile, self.tile.all_states
        digits = (*t.of_channels(n), t.of_states())
        return [self.load(ref, *digits, start=r * n, count=t.states) for r in range(t.channels)]

    def store_states(self, ref: Any, h: Sequence[Rows]) -> None:
        t, n = self.tile, self.tile.all_states
        for r, row in enumerate(h):
            self.store(ref, row, *t.of_channels(n), t.of_states(), start=r * n)

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
        channels = _Place(self).channels
        owned = self.tile.owned(step=0)
        D, dt_bias = (self.load1(ref.at[channels], *owned) for ref in (refs.D, refs.dt_bias))
        return _map(lambda a: a * _LOG2E, self.load_states(refs.A.at[channels])), *_read(
            [D, dt_bias]
        )

    def load_channels(self, ref: Any) -> Rows:
        """[R] from a block's part of (D,)."""
        return self.load(ref, *self.tile.of_channels(), count=self.tile.channels)

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
            lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_ROW)
            each = self.tile.owners * self.tile.channels
            valid = token + (lane % self.tile.lanes) // each < self.length
            inside = valid if inside is None else inside & valid
            dt = jnp.where(valid, dt, 0.0)
        return dt, inside


# Launching


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)


class _Call:
    """The arrays of a call as the kernels take them: whole chunks and blocks, groups in a row."""

    def __init__(
        self, options: Options, tile: Tile, every: int, x, dt, A, B, C, D, z, dt_bias, keep
    ):
        f32 = jnp.float32
        self.tile = tile
        self.batch, self.length, self.groups, self.dim = x.shape
        self.states = A.shape[-1]
        exact = any(v is not None and v.dtype == f32 for v in (x, dt, z))
        none = jnp.zeros((self.groups, self.dim), f32)
        self.arrays = {
            "x": self.pad_tokens(x),
            "dt": self.pad_tokens(dt),
            "z": None if z is None else self.pad_tokens(z),
            "B": self.pad_weights(B),
            "C": self.pad_weights(C),
            "A": self.pad_states(A.astype(f32)),
            "D": self.pad_channels((none if D is None else D).astype(f32), 1),
            "dt_bias": self.pad_channels((none if dt_bias is None else dt_bias).astype(f32), 1),
            "keep": None if keep is None else 1 - _pad(1 - keep.astype(f32), (1, CHUNK)),
        }
        padded, channels = self.arrays["x"].shape[1:]
        self.blocks = channels // tile.width
        self.scan = Scan(
            options=options,
            tile=tile,
            length=self.length,
            padded=padded,
            channels=channels,
            blocks_per_group=self.blocks // self.groups,
            exact=exact,
            every=every,
            segments=Segments(1, 1),
            interpret=options.mode == "interpret",
        )

    def pad_channels(self, v: Any, axis: int) -> Any:
        """(…, G, P, …) with P at `axis` as (…, D, …), every group in whole blocks."""
        v = _pad(v, (axis, self.tile.width))
        return v.reshape(
            *v.shape[: axis - 1], v.shape[axis - 1] * v.shape[axis], *v.shape[axis + 1 :]
        )

    def pad_tokens(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (1, CHUNK)), 3)

    def pad_states(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (v.ndim - 1, self.tile.all_states)), v.ndim - 2)

    def pad_weights(self, v: Any) -> Any:
        """(B, L, G, N) in fp32, N in parts of at most 256: the most that the TMA takes."""
        v = _pad(v.astype(jnp.float32), (1, CHUNK), (3, self.tile.all_states))
        parts = -(-self.tile.all_states // 256)
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

    def states_like(self, *lead: int) -> Any:
        return _f32(*lead, self.scan.channels, self.tile.all_states)

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        segments: Segments,
        ins: dict[str, Any],
        outs: dict[str, Any],
        scratch: dict[str, Any],
        count: int | None = None,
    ) -> dict[str, Any]:
        """Launches `kernel` for `count` segments, on arrays by name; those absent are None."""
        scan = dataclasses.replace(self.scan, segments=segments)
        ins = {k: v for k, v in ins.items() if v is not None}
        names = [*ins, *outs]

        def body(*refs: Any, **smem: Any) -> None:
            every = dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True))
            kernel(scan, types.SimpleNamespace(**every), types.SimpleNamespace(**smem))

        results = plgpu.kernel(
            body,
            out_type=tuple(outs.values()),
            scratch_types=scratch,
            grid=(self.blocks, self.batch, segments.count if count is None else count),
            grid_names=(_BLOCK, _BATCH, _SEGMENT),
            kernel_name=name,
            compiler_params=_COMPILER_PARAMS,
        )(*ins.values())
        return dict(zip(outs, results, strict=True))

    def pick(self, names: str) -> dict[str, Any]:
        return {name: self.arrays[name] for name in names.split()}


_NAMES = (
    *("x", "dt", "z", "B", "C", "A", "D", "dt_bias", "keep", "initial", "passed", "total"),
    *("states", "dout", "dfinal", "out", "final", "dx", "ddt", "dz", "dA", "sums", "dD"),
    *("ddt_bias_sum", "dinitial", "chunk_states"),
)


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Ring:
    """Two slots in shared memory for `steps` of some token arrays, filled by the TMA."""

    def __init__(self, scan: Scan, prefix: str, steps: int, arrays: dict[str, Any]):
        self.scan = scan
        self.prefix = prefix
        self.steps = steps
        self.arrays = {k: v for k, v in arrays.items() if v is not None}

    def scratch(self) -> dict[str, Any]:
        slots = {
            self.prefix + name: plgpu.SMEM((2, *self._tile(name)), array.dtype)
            for name, array in self.arrays.items()
        }
        arrived = plgpu.Barrier(num_arrivals=len(slots), num_barriers=2)
        return {**slots, f"{self.prefix}arrived": arrived}

    def _tile(self, name: str) -> tuple[int, ...]:
        if name in ("B", "C"):
            return self.steps, *self.arrays[name].shape[3:]
        if name == "keep":
            return (max(self.steps, 32),)  # the TMA writes at multiples of 128 bytes
        return self.steps, self.scan.tile.width

    def fetch(self, refs: Any, smem: Any, tile: Any, turn: Any) -> None:
        """Starts copying tile number `tile` of the sequence; `turn` counts this ring's copies."""
        at, slot = _Place(self.scan), lax.rem(turn, 2)
        time = pl.ds(tile * self.steps, self.steps)
        arrived = getattr(smem, f"{self.prefix}arrived").at[slot]
        for name in self.arrays:
            ref = getattr(refs, name)
            if name in ("B", "C"):
                source = ref.at[at.batch, time, at.group]
            elif name == "keep":
                source = ref.at[at.batch, time]
            else:
                source = ref.at[at.batch, time, at.channels]
            target = getattr(smem, self.prefix + name).at[slot, pl.ds(0, self.steps)]
            plgpu.copy_gmem_to_smem(source, target, arrived)

    def wait(self, smem: Any, turn: Any) -> None:
        plgpu.barrier_wait(getattr(smem, f"{self.prefix}arrived").at[lax.rem(turn, 2)])

    def tile(self, smem: Any, turn: Any) -> Any:
        return self._views(smem, turn, 0, self.steps)

    def chunk(self, smem: Any, turn: Any, chunk: Any) -> Any:
        return self._views(smem, turn, chunk * CHUNK, CHUNK)

    def _views(self, smem: Any, turn: Any, start: Any, steps: int) -> Any:
        at = lax.rem(turn, 2), pl.ds(start, steps)
        views = {name: getattr(smem, self.prefix + name).at[at] for name in self.arrays}
        return types.SimpleNamespace(**(dict.fromkeys(_NAMES) | views))

    def stream(self, refs: Any, smem: Any, first: Any, count: Any, body: Any, init: Any) -> Any:
        """``init = body(i, init)`` for tile ``first + i``, i below `count`, as it arrives."""
        self.fetch(refs, smem, first, 0)

        def run(i, carry):
            plgpu.commit_smem()  # all lanes are done with the other slot

            @pl.when(i + 1 < count)
            def _():
                self.fetch(refs, smem, first + i + 1, i + 1)

            self.wait(smem, i)
            return body(i, carry)

        return lax.fori_loop(0, count, run, init)


class _Place:
    """Where in the arrays a block is."""

    def __init__(self, scan: Scan):
        self.block = lax.axis_index(_BLOCK)
        self.batch = lax.axis_index(_BATCH)
        self.segment = lax.axis_index(_SEGMENT)
        self.channels = pl.ds(self.block * scan.tile.width, scan.tile.width)
        self.group = self.block // scan.blocks_per_group


# Arithmetic


def softplus(v: jax.Array, exact: bool) -> jax.Array:
    """max(v, 0) + log1p(e), e = exp(−|v|), to fp32 accuracy relative to the result, or to 1e-5."""
    if not exact:
        e = jnp.exp2(-_LOG2E * jnp.abs(v))
        # The logarithm is exact to 1e-7, not relative to a small result.
        small = e * (1 - e * (1 / 2 - e * (1 / 3)))
        return jnp.maximum(v, 0.0) + jnp.where(e < 1 / 64, small, jnp.log(1 + e))
    e = _exp_of_minus(jnp.abs(v))
    # log1p(e) = 2 · artanh(s), s = e / (2 + e) <= 1/3, by its series up to s^15.
    s = e * _reciprocal(2 + e)
    square = s * s
    series = 1 / 15
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(v, 0.0) + 2 * s * series


def softplus_slope(dt: jax.Array, exact: bool) -> jax.Array:
    """softplus'(v) = 1 − exp(−dt) from dt = softplus(v), by its series where that would cancel."""
    limit, divisors = (0.25, (720, 120, 24, 6, 2, 1)) if exact else (1 / 32, (6, 2, 1))
    first, *others = divisors
    series: Any = 1 / first
    for k in others:
        series = 1 / k - dt * series
    return jnp.where(dt < limit, dt * series, 1 - jnp.exp2(-_LOG2E * dt))


def sigmoid(v: jax.Array, exact: bool, interpret: bool) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division."""
    if not exact:
        return fast_reciprocal(1 + jnp.exp2(-_LOG2E * v), interpret=interpret)
    e = _exp_of_minus(jnp.abs(v))
    inverse = _reciprocal(1 + e)
    return jnp.where(v < 0, e * inverse, inverse)


def _exp_of_minus(a: jax.Array) -> jax.Array:
    """exp(−a), a >= 0, by exp2 in two parts, the first product exact.

    Rounding a · log2(e) as a whole would cost up to 1e-6 of the result.
    """
    a = jnp.minimum(a, 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (_LOG2E - log2e_head) + (a - head) * _LOG2E
    return jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)


def _reciprocal(d: jax.Array) -> jax.Array:
    """1 / d after a Newton step: with approx_math the division alone is 2 units off."""
    r = 1 / d
    return r * (2 - d * r)


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), _ROW)


def _read(values: Any) -> Any:
    """`values` once they are there.

    A value that is loaded before a loop and used in it would be waited for in every round, together
    with the round's own loads.
    """
    return _map(lambda v: v + 0.0, values)


def _map(f: Callable[..., Any], *states: Any) -> Any:
    """`f` over each state of each channel."""
    return jax.tree.map(f, *states)


def _zero_states(scan: Scan) -> list[Rows]:
    return [[_zeros() for _ in range(scan.tile.states)] for _ in range(scan.tile.channels)]


def _where_kept(keep: Any, h: list[Rows]) -> list[Rows]:
    """The states, zero where the sequence starts anew."""
    return h if keep is None else _map(lambda v: jnp.where(keep > 0.5, v, 0.0), h)


def _decayed(total: Rows, rate: list[Rows], h: list[Rows], resets: bool) -> list[Rows]:
    """The states after steps of the sizes `total` in sum; an infinite sum stands for a reset."""

    def decayed(t, a, v):
        v = jnp.exp2(t * a) * v
        return jnp.where(t < float("inf"), v, 0.0) if resets else v

    return [
        [decayed(t, a, v) for a, v in zip(*rows, strict=True)]
        for t, *rows in zip(total, rate, h, strict=True)
    ]


def _dot(a: Rows, b: Rows) -> jax.Array:
    return functools.reduce(jnp.add, (v * w for v, w in zip(a, b, strict=True)))


def _nones(count: int) -> list[Any]:
    """Sums of nothing yet, for :func:`_plus`."""
    return [None] * count


def _plus(total: Any, value: jax.Array) -> jax.Array:
    return value if total is None else total + value


# Steps


class _Steps:
    """Some steps in shared memory, and how their values are dealt out to the lanes."""

    def __init__(self, scan: Scan, tokens: Any, token: Any, count: int = CHUNK):
        self.scan = scan
        self.tokens = tokens
        self.token = token  # the first one's number in the sequence
        self.rounds = range(count // scan.tile.steps)

    def steps(self, round: int) -> range:
        return range(round * self.scan.tile.steps, (round + 1) * self.scan.tile.steps)

    def owned(self, name: str, round: int) -> jax.Array:
        """The value of a token array that the lane owns."""
        t = self.scan.tile
        start = round * t.steps * t.width
        return self.scan.load1(getattr(self.tokens, name), *t.owned(step=t.width), start=start)

    def share(self, ref: Any, round: int, values: Rows) -> None:
        """Puts owned values into `ref`, (steps, width, len(values)), for :meth:`shared`."""
        t, n = self.scan.tile, len(values)
        start = round * t.steps * t.width * n
        self.scan.store(ref, values, *t.owned(step=t.width * n, channel=n), start=start)

    def shared(self, ref: Any, step: int, n: int, volatile: bool = False) -> list[Rows]:
        """[n][R]: the values of a step for the lane's channels."""
        t = self.scan.tile
        start = step * t.width * n
        flat = self.scan.load(
            ref, *t.of_channels(n), start=start, count=t.channels * n, volatile=volatile
        )
        return [flat[i::n] for i in range(n)]

    def weights(self, name: str, step: int) -> Rows:
        """[K] of B or C at a step."""
        t, ref = self.scan.tile, getattr(self.tokens, name)
        return self.scan.load(ref, t.of_states(), start=step * t.all_states, count=t.states)

    def keep(self, step: int) -> Any:
        return None if self.tokens.keep is None else self.scan.load1(self.tokens.keep, start=step)

    def write(self, ref: Any, round: int, value: jax.Array) -> None:
        """Writes the owned values to (B, L, D) in global memory."""
        at, t, stride = _Place(self.scan), self.scan.tile, self.scan.token_stride
        part = ref.at[at.batch, pl.ds(self.token, CHUNK), at.channels]
        self.scan.store(part, [value], *t.owned(step=stride), start=round * t.steps * stride)

    def all_owned(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Of each round (its number, the values owned), None for arrays that are not there.

        All are read at once: a read of shared memory stays behind the writes before it, so that a
        round that writes at its end would have the next one wait for memory.
        """
        read = lambda name, r: None if getattr(self.tokens, name) is None else self.owned(name, r)
        return iter([(r, *(read(name, r) for name in names)) for r in self.rounds])

    def step_size(self, round: int, raw: jax.Array) -> tuple[jax.Array, Any]:
        return self.scan.step_size(raw, self.token + round * self.scan.tile.steps)

    def gate(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """z · sigmoid(z), and its derivative."""
        gate = sigmoid(z, self.scan.exact, self.scan.interpret)
        return z * gate, gate * (1 + z * (1 - gate))

    def over_states(self, parts: list[jax.Array]) -> jax.Array:
        """The sums over states of a round's [J · R] values: to each lane the one it owns."""
        (own,) = self.scan.sum(parts, self.scan.tile.over_states)
        return own


def _loaded_ahead(steps: Sequence[int], load: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """(step, load(step)), each loaded before the step before it is worked on, and writes."""
    ahead = load(steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        now, ahead = ahead, None if following is None else load(following)
        yield step, now


class _Later:
    """Work in stages, one after each step to come, so that no shuffle's result is waited for."""

    def __init__(self):
        self.stages: list[Iterator[None]] = []

    def add(self, stages: Iterator[None]) -> None:
        self.stages.append(stages)

    def advance(self) -> None:
        done = object()
        self.stages = [s for s in self.stages if next(s, done) is not done]

    def finish(self) -> None:
        while self.stages:
            self.advance()


def _decays(dt: Rows, rate: list[Rows]) -> list[Rows]:
    """exp(dt · A)."""
    return [[jnp.exp2(d * a) for a in row] for d, row in zip(dt, rate, strict=True)]


def _advance(decay: list[Rows], dtx: Rows, B: Rows, h: list[Rows]) -> list[Rows]:
    """h = exp(dt · A) · h + dt · x · B."""
    return [
        [a * v + d * b for a, v, b in zip(decays, row, B, strict=True)]
        for decays, d, row in zip(decay, dtx, h, strict=True)
    ]


def _share_step_sizes(steps: _Steps, shared: Any, dt_bias: jax.Array) -> None:
    for round, x, raw in steps.all_owned("x", "dt"):
        dt, _ = steps.step_size(round, raw + dt_bias)
        steps.share(shared, round, [dt, dt * x])
    sync_warp(interpret=steps.scan.interpret)


def _advance_chunk(chunk: _Steps, shared: Any, rate: Any, h: Any, total: Any = None):
    """The states after a chunk and, where asked for, Σdt; no outputs."""

    def load(step):
        dt, dtx = chunk.shared(shared, step, 2)
        return dt, dtx, _decays(dt, rate), chunk.weights("B", step), chunk.keep(step)

    for _, (dt, dtx, decay, B, keep) in _loaded_ahead(range(CHUNK), load):
        h = _advance(decay, dtx, B, _where_kept(keep, h))
        if total is not None:
            total = _add_reset(total, keep, dt)
    return h, total


def _add_reset(total: Rows, keep: Any, dt: Rows) -> Rows:
    if keep is not None:
        total = [jnp.where(keep > 0.5, t, float("inf")) for t in total]
    return [t + d for t, d in zip(total, dt, strict=True)]


# Forward


def _chunks_per_tile(segments: Segments) -> int:
    """Chunks that the forward has in shared memory at a time."""
    return next(k for k in (4, 2, 1) if segments.length % k == 0 and segments.units % k == 0)


def launch_fwd(
    options: Options, save: bool, x, dt, A, B, C, D, z, dt_bias, initial_state, keep
) -> tuple[Any, Any, Any]:
    """Output, final state and, with `save`, the states before every k-th step."""
    if x.size == 0:
        return reference_fwd(options, save, x, dt, A, B, C, D, z, dt_bias, initial_state, keep)
    every = options.checkpoint_every if save else None
    tile = forward_tile(x.shape[0], x.shape[2] * x.shape[3], A.shape[-1])
    call = _Call(options, tile, every or 0, x, dt, A, B, C, D, z, dt_bias, keep)
    chunks = call.scan.padded // CHUNK
    segments = forward_segments(call.batch * call.blocks, chunks)
    steps = _chunks_per_tile(segments) * CHUNK
    ring = Ring(call.scan, "", steps, call.pick("x dt z B C keep"))
    initial = None if initial_state is None else call.pad_states(initial_state.astype(jnp.float32))
    ins = call.pick("x dt z B C A D dt_bias keep") | {"initial": initial}
    if segments.count > 1:
        ins |= _launch_fwd_carry(call, segments, steps)
    outs = {"out": jax.ShapeDtypeStruct(call.arrays["x"].shape, x.dtype)}
    if options.final:
        outs["final"] = call.states_like(call.batch)
    if every:
        outs["states"] = call.states_like(call.batch, -(-call.length // every))
    scratch = ring.scratch() | {
        "shared": _shared(call.tile, steps),
        "own": plgpu.SMEM((steps // call.tile.steps * 2 * LANES,), jnp.float32),
    }
    kernel = functools.partial(_fwd_kernel, ring)
    got = call.run("selective_scan_fwd", kernel, segments, ins, outs, scratch)
    return (
        call.cut_tokens(got["out"]),
        call.cut_states(got["final"]) if options.final else None,
        call.cut_states(got["states"]) if every else None,
    )


def _shared(tile: Tile, steps: int) -> Any:
    return plgpu.SMEM((steps * tile.width * 2,), jnp.float32)


def _shared_chunk(smem: Any, tile: Tile, c: Any) -> Any:
    size = CHUNK * tile.width * 2
    return smem.shared.at[pl.ds(c * size, size)]


def _fwd_kernel(ring: Ring, scan: Scan, refs: Any, smem: Any) -> None:
    at, tile = _Place(scan), scan.tile
    per_tile = ring.steps // CHUNK
    first = scan.segments.first(at.segment) // per_tile
    rate, D, dt_bias = scan.constants(refs)

    def save(token, h):
        plane = (at.batch, token // scan.every, at.channels)
        scan.store_states(refs.states.at[plane], h)

    def prepare(steps):
        """What is computed once per token and channel: for the steps, and for the output."""
        for round, x, raw, z in steps.all_owned("x", "dt", "z"):
            dt, _ = steps.step_size(round, raw + dt_bias)
            steps.share(smem.shared, round, [dt, dt * x])
            own = [D * x] if z is None else [D * x, steps.gate(z)[0]]
            scan.store_lane(smem.own, len(own) * round, own)
        sync_warp(interpret=scan.interpret)

    def run_chunk(c, chunk, h):
        shared = _shared_chunk(smem, tile, c)
        each = 1 if refs.z is None else 2
        size = len(chunk.rounds) * each * LANES
        own_ref = smem.own.at[pl.ds(c * size, size)]

        def load(step):
            dt, dtx = chunk.shared(shared, step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, _decays(dt, rate), *weights, chunk.keep(step)

        def finish(round, parts):
            for distance in tile.over_states:
                yield
                parts = scan.sum(parts, [distance])
            yield
            dx, *gate = scan.load_lane(own_ref, each * round, each)
            y = parts[0] + dx
            chunk.write(refs.out, round, y * gate[0] if gate else y)

        parts, later = [], _Later()
        for step, (dtx, decay, B, C, keep) in _loaded_ahead(range(CHUNK), load):
            if 0 < scan.every < CHUNK:
                save_step(chunk.token + step, h)
            h = _advance(decay, dtx, B, _where_kept(keep, h))
            parts += [_dot(row, C) for row in h]
            later.advance()
            if (step + 1) % tile.steps == 0:
                later.add(finish(step // tile.steps, parts))
                parts = []
        later.finish()
        return h

    def save_step(token, h):
        @pl.when(token < scan.length)
        def _():
            save(token, h)

    def run_tile(i, h):
        def run(c, h):
            token = ((first + i) * per_tile + c) * CHUNK
            if scan.every >= CHUNK:

                @pl.when(lax.rem(token, scan.every) == 0)
                def _():
                    save(token, h)

            return run_chunk(c, _Steps(scan, ring.chunk(smem, i, c), token), h)

        prepare(_Steps(scan, ring.tile(smem, i), (first + i) * ring.steps, ring.steps))
        return lax.fori_loop(0, per_tile, run, h)

    h = _zero_states(scan)
    if refs.initial is not None:
        h = _read(scan.load_states(refs.initial.at[at.batch, at.channels]))
    if refs.passed is not None:
        h = lax.fori_loop(0, at.segment, functools.partial(_fold, scan, refs, rate), h)
    count = scan.segments.size(at.segment) // per_tile
    h = ring.stream(refs, smem, first, count, run_tile, h)
    if refs.final is not None:

        @pl.when(at.segment == scan.segments.count - 1)
        def _():
            scan.store_states(refs.final.at[at.batch, at.channels], h)


def _fold(scan: Scan, refs: Any, rate: list[Rows], s: Any, h: list[Rows]) -> list[Rows]:
    """The state (or its gradient) on the other side of segment `s`."""
    at = _Place(scan)
    total = scan.load_channels(refs.total.at[s, at.batch, at.channels])
    passed = scan.load_states(refs.passed.at[s, at.batch, at.channels])
    return _map(jnp.add, passed, _decayed(total, rate, h, refs.keep is not None))


def _launch_fwd_carry(call: _Call, segments: Segments, steps: int) -> dict[str, Any]:
    """The last state of every segment but the last, from zeros, and the sum of its dt."""
    ring = Ring(call.scan, "", steps, call.pick("x dt B keep"))
    return _launch_carry(
        call, "selective_scan_fwd_carry", _fwd_carry_kernel, segments, ring, "x dt B", {}
    )


def _launch_carry(call, name, kernel, segments, ring, names, more) -> dict[str, Any]:
    between = segments.count - 1
    return call.run(
        name,
        functools.partial(kernel, ring),
        segments,
        call.pick(f"{names} A D dt_bias keep") | more,
        {
            "passed": call.states_like(between, call.batch),
            "total": _f32(between, call.batch, call.scan.channels),
        },
        ring.scratch() | {"shared": _shared(call.tile, ring.steps)},
        count=between,
    )


def _store_carry(scan: Scan, refs: Any, total: Rows, h: list[Rows]) -> None:
    at = _Place(scan)
    scan.store_states(refs.passed.at[at.segment, at.batch, at.channels], h)
    scan.store(refs.total.at[at.segment, at.batch, at.channels], total, *scan.tile.of_channels())


def _fwd_carry_kernel(ring: Ring, scan: Scan, refs: Any, smem: Any) -> None:
    at, tile = _Place(scan), scan.tile
    per_tile = ring.steps // CHUNK
    first = scan.segments.first(at.segment) // per_tile
    rate, _, dt_bias = scan.constants(refs)

    def run_tile(i, carry):
        def run(c, carry):
            h, total = carry
            shared = _shared_chunk(smem, tile, c)
            chunk = _Steps(scan, ring.chunk(smem, i, c), ((first + i) * per_tile + c) * CHUNK)
            return _advance_chunk(chunk, shared, rate, h, total)

        tokens = _Steps(scan, ring.tile(smem, i), (first + i) * ring.steps, ring.steps)
        _share_step_sizes(tokens, smem.shared, dt_bias)
        return lax.fori_loop(0, per_tile, run, carry)

    init = _zero_states(scan), [_zeros() for _ in range(scan.tile.channels)]
    count = scan.segments.length // per_tile
    h, total = ring.stream(refs, smem, first, count, run_tile, init)
    _store_carry(scan, refs, total, h)


# Backward


def launch_bwd(
    options: Options, x, dt, A, B, C, D, z, dt_bias, initial_state, keep, states, dout, dfinal
) -> tuple[Any, ...]:
    """The gradients in the order of the arguments; those that are sums in fp32."""
    args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep)
    if x.size == 0:
        return reference_bwd(options, *args, states, dout, dfinal)
    f32 = jnp.float32
    if states is None:
        options = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY)
        _, _, states = launch_fwd(dataclasses.replace(options, final=False), True, *args)
    every = options.checkpoint_every
    assert every is not None
    call = _Call(options, backward_tile(A.shape[-1]), every, x, dt, A, B, C, D, z, dt_bias, keep)
    tile, batch, padded, channels = call.tile, call.batch, call.scan.padded, call.scan.channels
    chunks = padded // CHUNK
    per_unit = max(1, every // CHUNK)
    segments = backward_segments(batch * call.blocks, -(-chunks // per_unit))
    dout = call.pad_tokens(dout)
    ins = call.pick("x dt z B C A D dt_bias keep") | {
        "dout": dout,
        "states": call.pad_states(states),
        "dfinal": None if dfinal is None else call.pad_states(dfinal.astype(f32)),
    }
    if segments.count > 1:
        ins |= _launch_bwd_carry(call, segments, dout)
    ring = Ring(call.scan, "", CHUNK, call.pick("x dt z B C keep") | {"dout": dout})
    # Longer tiles where shared memory has room for B, and no tile crosses a unit or the end.
    whole = chunks % 4 == 0 and per_unit % 4 == 0 and tile.all_states <= 64
    before = Ring(call.scan, "before_", (4 if whole else 1) * CHUNK, call.pick("x dt B keep"))
    scratch = ring.scratch() | {
        "h": plgpu.SMEM((CHUNK * tile.channels * tile.states * LANES,), f32),
        "shared": _shared(tile, before.steps if per_unit > 1 else CHUNK),
        "dy": plgpu.SMEM((CHUNK * tile.width,), f32),
        "sums": plgpu.SMEM((_sum_steps(tile), LANES * tile.sums), f32),
    }
    if per_unit > 1:
        scratch |= before.scratch()
    like = lambda v: jax.ShapeDtypeStruct(call.arrays["x"].shape, v.dtype)
    outs = {
        "dx": like(x),
        "ddt": like(dt),
        "dA": call.states_like(segments.count, batch),
        "sums": _f32(call.blocks, batch, chunks, CHUNK, 32 * tile.sums),
        "dD": _f32(segments.count, batch, channels),
        "ddt_bias_sum": _f32(segments.count, batch, channels),
    }
    if z is not None:
        outs["dz"] = like(z)
    if initial_state is not None:
        outs["dinitial"] = call.states_like(batch)
    if per_unit > 1:
        outs["chunk_states"] = call.states_like(segments.count, batch, per_unit)
    kernel = functools.partial(_bwd_kernel, ring, before)
    g = call.run("selective_scan_bwd", kernel, segments, ins, outs, scratch)
    dB, dC = _sums(call, g["sums"])
    return (
        call.cut_tokens(g["dx"]),
        call.cut_tokens(g["ddt"]),
        call.cut_states(g["dA"].sum((0, 1))),
        dB,
        dC,
        None if D is None else call.cut_channels(g["dD"].sum((0, 1)), 0),
        None if z is None else call.cut_tokens(g["dz"]),
        None if dt_bias is None else call.cut_channels(g["ddt_bias_sum"].sum((0, 1)), 0),
        None if initial_state is None else call.cut_states(g["dinitial"]),
        None,
    )


def _sum_steps(tile: Tile) -> int:
    """Steps whose sums over channels are in shared memory at a time."""
    return CHUNK if tile.sums <= 8 else CHUNK // 2


def _sums(call: _Call, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, G, N), from the sums of each block: fixed order, fp32."""
    t, n = call.tile, call.states
    parts = parts.reshape(call.groups, call.scan.blocks_per_group, *parts.shape[1:])
    total = parts.sum(1)  # (G, B, L / CHUNK, CHUNK, 32 · sums), lanes as in sum_lanes
    total = total.reshape(call.groups, call.batch, -1, t.groups, t.lanes, t.sums)
    total = total[:, :, : call.length]
    copies = t.groups * t.sums // (2 * t.states)
    total = total[:, :, :, ::copies]  # (G, B, L, groups, S, sums): value groups · sums of lane S
    total = jnp.moveaxis(total, 0, 2).swapaxes(3, 4)  # (B, L, G, S, groups, sums)
    total = total.reshape(*total.shape[:4], 2, t.states)
    dB, dC = (total[..., i, :].reshape(*total.shape[:3], -1)[..., :n] for i in (0, 1))
    return dB, dC


def _launch_bwd_carry(call: _Call, segments: Segments, dout: jax.Array) -> dict[str, Any]:
    """What every segment but the first passes to the one before, and the sum of its dt."""
    ring = Ring(call.scan, "", CHUNK, call.pick("dt z C keep") | {"dout": dout})
    name = "selective_scan_bwd_carry"
    return _launch_carry(call, name, _bwd_carry_kernel, segments, ring, "dt z C", {"dout": dout})


def _segment_chunks(scan: Scan, segment: Any) -> tuple[Any, Any]:
    """The first chunk of a segment of the backward, and how many there are."""
    per_unit = max(1, scan.every // CHUNK)
    first = scan.segments.first(segment) * per_unit
    return first, jnp.minimum(scan.segments.length * per_unit, scan.padded // CHUNK - first)


def _bwd_carry_kernel(ring: Ring, scan: Scan, refs: Any, smem: Any) -> None:
    """Σ_t C[t] · dy[t] · Π a over the segment's steps up to t = Σ_t C[t] · dy[t] · exp(A · Σdt)."""
    at = _Place(scan)
    first, count = _segment_chunks(scan, at.segment + 1)
    rate, _, dt_bias = scan.constants(refs)

    def run_chunk(i, carry):
        dh, total = carry
        chunk = _Steps(scan, ring.chunk(smem, i, 0), (first + i) * CHUNK)
        for round, raw, dout, z in chunk.all_owned("dt", "dout", "z"):
            dt, _ = chunk.step_size(round, raw + dt_bias)
            dy = dout if z is None else dout * chunk.gate(z)[0]
            chunk.share(smem.shared, round, [dt, dy])
        sync_warp(interpret=scan.interpret)

        def load(step):
            shared = chunk.shared(smem.shared, step, 2)
            return *shared, chunk.weights("C", step), chunk.keep(step)

        for _, (dt, dy, C, keep) in _loaded_ahead(range(CHUNK), load):
            total = _add_reset(total, keep, dt)
            enters = [[d * c for c in C] for d in dy]
            dh = _map(jnp.add, dh, _decayed(total, rate, enters, refs.keep is not None))
        return dh, total

    init = _zero_states(scan), [_zeros() for _ in range(scan.tile.channels)]
    dh, total = ring.stream(refs, smem, first, count, run_chunk, init)
    _store_carry(scan, refs, total, dh)


def _bwd_kernel(ring: Ring, before: Ring, scan: Scan, refs: Any, smem: Any) -> None:
    at, tile = _Place(scan), scan.tile
    per_unit, sum_steps = max(1, scan.every // CHUNK), _sum_steps(tile)
    rate, D, dt_bias = scan.constants(refs)
    if per_unit > 1:
        units = scan.segments.size(at.segment)
    else:  # the state before every chunk was saved, and the whole segment is one unit
        units = 1
    # The state after the last step is not among those saved, nor any beyond the end.
    read_all = scan.every < CHUNK and scan.length == scan.padded

    def unit(i):
        """First chunk and number of chunks of the i-th unit from the segment's end."""
        if per_unit == 1:
            return _segment_chunks(scan, at.segment)
        first = (scan.segments.first(at.segment) + units - 1 - i) * per_unit
        return first, jnp.minimum(per_unit, scan.padded // CHUNK - first)

    def fetch_unit(i, up, down):
        first, count = unit(i)
        if per_unit > 1:

            @pl.when(count > 1)
            def _():
                before.fetch(refs, smem, first // (before.steps // CHUNK), up)

        ring.fetch(refs, smem, first + count - 1, down)

    def run_unit(i, carry):
        up, down, *carry = carry
        first, count = unit(i)
        if per_unit > 1:
            up = put_down_states(first, count, up)

        def state_before(c):
            if per_unit == 1:
                return saved((first + c) * CHUNK)
            return scan.load_states(refs.chunk_states.at[at.segment, at.batch, c, at.channels])

        def run(j, carry):
            h, *carry = carry
            plgpu.commit_smem()  # all lanes are done with the other slot
            c = count - 1 - j

            @pl.when(c > 0)
            def _():
                ring.fetch(refs, smem, first + c - 1, down + j + 1)

            @pl.when((c == 0) & (i + 1 < units))
            def _():
                fetch_unit(i + 1, up, down + j + 1)

            ring.wait(smem, down + j)
            chunk = _Steps(scan, ring.tile(smem, down + j), (first + c) * CHUNK)
            return run_chunk(chunk, h, lambda: state_before(jnp.maximum(c - 1, 0)), carry)

        carry = lax.fori_loop(0, count, run, (state_before(count - 1), *carry))
        return up, down + count, *carry[1:]

    def put_down_states(first, count, up):
        """The state before every chunk of the unit, from the saved one."""
        h = _read(saved(first * CHUNK))
        put = lambda c, h: scan.store_states(
            refs.chunk_states.at[at.segment, at.batch, c, at.channels], h
        )
        put(0, h)

        per_tile = before.steps // CHUNK
        tiles = (count - 1 + per_tile - 1) // per_tile

        def run_tile(i, h):
            plgpu.commit_smem()
            start = i * per_tile

            @pl.when(i + 1 < tiles)
            def _():
                before.fetch(refs, smem, first // per_tile + i + 1, up + i + 1)

            before.wait(smem, up + i)
            token = (first + start) * CHUNK
            steps = _Steps(scan, before.tile(smem, up + i), token, before.steps)
            _share_step_sizes(steps, smem.shared, dt_bias)

            def run(c, h):
                chunk = _Steps(scan, before.chunk(smem, up + i, c), token + c * CHUNK)
                h, _ = _advance_chunk(chunk, _shared_chunk(smem, tile, c), rate, h)
                put(start + c + 1, h)
                return h

            return lax.fori_loop(0, jnp.minimum(per_tile, count - 1 - start), run, h)

        lax.fori_loop(0, tiles, run_tile, h)
        return up + tiles

    def run_chunk(chunk, h, load_following, carry):
        """Up, to the states before each step, and down with their gradients."""
        dh, dA, dD, ddt_bias = carry
        gated = refs.z is not None
        each = [(r, k) for r in range(tile.channels) for k in range(tile.states)]
        own = []
        for round, x, raw, dout, z in chunk.all_owned("x", "dt", "dout", "z"):
            dt, inside = chunk.step_size(round, raw + dt_bias)
            silu, slope = chunk.gate(z) if gated else (1.0, 0.0)
            dy = dout * silu
            chunk.share(smem.shared, round, [dt, dt * x])
            chunk.share(smem.dy, round, [dy])
            own.append((x, dt, inside, dy, dout * slope))
        sync_warp(interpret=scan.interpret)

        def load_up(step):
            C = chunk.weights("C", step) if gated else None
            following = saved(chunk.token + step + 1) if read_all and step < CHUNK - 1 else None
            dt, dtx = chunk.shared(smem.shared, step, 2)
            B, keep = chunk.weights("B", step), chunk.keep(step)
            return dtx, _decays(dt, rate), B, C, keep, following

        parts = []
        for step, (dtx, decay, B, C, keep, following) in _loaded_ahead(range(CHUNK), load_up):
            scan.store_lane(smem.h, step * len(each), [v for row in h for v in row])
            h = following or _advance(decay, dtx, B, _where_kept(keep, h))
            if gated:
                parts += [_dot(row, C) for row in h]
                if (step + 1) % tile.steps == 0:
                    round = step // tile.steps
                    x, *_, dsilu = own[round]
                    chunk.write(refs.dz, round, dsilu * (chunk.over_states(parts) + D * x))
                    parts = []

        # In time for the next round, and not waited for together with this one's.
        following_h = load_following()

        def load_down(step):
            flat = scan.load_lane(smem.h, step * len(each), len(each))
            before = [flat[r * tile.states :][: tile.states] for r in range(tile.channels)]
            # Up to 8 states a lane the compiler keeps the decays of the way up in registers; of
            # more it would spill them, unless dt might have changed.
            dt, dtx = chunk.shared(smem.shared, step, 2, volatile=len(each) > 8)
            shared = dt, dtx, *chunk.shared(smem.dy, step, 1)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return before, *shared, _decays(shared[0], rate), *weights, chunk.keep(step)

        after = h
        dh, dA = _map(lambda v: v, (dh, dA))
        into, ddecay = [], []  # Σ_n dh · B and Σ_n v · A · log2(e), [J · R]
        for step, loaded in _loaded_ahead(range(CHUNK)[::-1], load_down):
            before, dt, dtx, dy, decay, B, C, keep = loaded
            reached = _where_kept(keep, before)
            dB, dC = _nones(tile.states), _nones(tile.states)
            into_step, ddecay_step = _nones(tile.channels), _nones(tile.channels)
            for r, k in each:
                g = dh[r][k] + dy[r] * C[k]
                dB[k] = _plus(dB[k], g * dtx[r])
                dC[k] = _plus(dC[k], dy[r] * after[r][k])
                into_step[r] = _plus(into_step[r], g * B[k])
                g = g * decay[r][k]
                v = g * reached[r][k]
                ddecay_step[r] = _plus(ddecay_step[r], v * rate[r][k])
                dA[r][k] = dA[r][k] + v * dt[r]
                dh[r][k] = g
            dh, after = _where_kept(keep, dh), before
            sums = scan.sum(dB + dC, tile.over_channels)
            slot = step % sum_steps
            scan.store(smem.sums.at[slot], sums, (1, LANES, tile.sums))
            if slot == 0:
                write_sums(chunk.token, step)
            into, ddecay = into_step + into, ddecay_step + ddecay
            if step % tile.steps == 0:
                round = step // tile.steps
                x, dt, inside, dy, _ = own[round]
                into, ddecay = chunk.over_states(into), chunk.over_states(ddecay)
                chunk.write(refs.dx, round, dt * into + D * dy)
                ddt = ddecay * (1 / _LOG2E) + x * into
                if scan.options.dt_softplus:
                    ddt = ddt * softplus_slope(dt, scan.exact)
                if inside is not None:
                    ddt = jnp.where(inside, ddt, 0.0)
                chunk.write(refs.ddt, round, ddt)
                dD, ddt_bias = dD + dy * x, ddt_bias + ddt
                into, ddecay = [], []
        return following_h, dh, dA, dD, ddt_bias

    def saved(token):
        return scan.load_states(refs.states.at[at.batch, token // scan.every, at.channels])

    def write_sums(token, step):
        """Adds the sums over each warp's channels, in order of the warps, from `step` on."""
        plgpu.commit_smem()
        size = 32 * tile.sums
        layout = plgpu.Layout.WG_STRIDED((sum_steps, size), vec_size=2)
        warps = [
            plgpu.load(smem.sums.at[:, pl.ds(size * w, size)], layout=layout, optimized=False)
            for w in range(_WARPS)
        ]
        part = pl.ds(step, sum_steps)
        refs.sums[at.block, at.batch, token // CHUNK, part] = functools.reduce(jnp.add, warps)
        if step:
            plgpu.commit_smem()

    dh = _zero_states(scan)
    if refs.dfinal is not None:
        dh = _read(scan.load_states(refs.dfinal.at[at.batch, at.channels]))
    if refs.passed is not None:
        later = scan.segments.count - 1 - at.segment
        back = lambda i, dh: _fold(scan, refs, rate, scan.segments.count - 2 - i, dh)
        dh = lax.fori_loop(0, later, back, dh)
    fetch_unit(0, 0, 0)
    init = 0, 0, dh, _zero_states(scan), _zeros(), _zeros()
    _, _, dh, dA, dD, ddt_bias = lax.fori_loop(0, units, run_unit, init)
    scan.store_states(refs.dA.at[at.segment, at.batch, at.channels], dA)
    for ref, value in ((refs.dD, dD), (refs.ddt_bias_sum, ddt_bias)):
        (total,) = scan.sum([value], tile.over_steps)
        scan.store(ref.at[at.segment, at.batch, at.channels], [total], *tile.owned(step=0))
    if refs.dinitial is not None:

        @pl.when(at.segment == 0)
        def _():
            scan.store_states(refs.dinitial.at[at.batch, at.channels], dh)
