"""The share of each lane, warpgroup and block in states, channels and time.

A warpgroup works on some channels of one batch row. Its lanes share the states by a
:class:`ScanTile`: S lanes hold the N states of R channels in registers, K states of each channel,
the same for all R. So the lanes of a channel read B and C with few accesses, sums over states (y)
take S lanes and sums over channels (dB, dC) the other lanes of the warp. A value that there is one
of for a token and channel (step size, gate, output, their derivatives) is computed by one of the S
lanes: each owns one of the R · J values of a round of J = S / R steps, and passes to the others
through shared memory the values that they need.

A block of the :class:`ScanGrid` has a column, channels of a batch row, for the whole sequence, or
for a part of it where columns are too few to fill the GPU, or do not fill it evenly.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.mosaic.launch import LANES, num_sms
from jaxkern.ops.selective_scan.reference import CHUNK

WARPS = LANES // 32

CHANNELS = 2
"""R: channels of a lane, which share its reads of B and C."""

MAX_STATES = 384
"""32 lanes hold 12 states each; with more, the states of a group would not fit into registers."""


@dataclasses.dataclass(frozen=True)
class ScanTile:
    """The share of a warpgroup's lanes in channels and states.

    From the lowest digit, a lane's number consists of the last bit of its group of channels, its
    number among the S lanes of a channel, the rest of the group's number in the warp, and the warp.
    So neighbours read the same B and C, and shared memory serves an access of 8 bytes in one pass
    and not in two.
    """

    lanes: int  # S, which share a channel's states
    states: int  # K, of a lane and channel
    summed: bool = False  # over channels, too, for which lanes hold states in other orders

    def __post_init__(self) -> None:
        assert CHANNELS <= self.lanes <= 32, self

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
        return WARPS * self.groups * CHANNELS

    @property
    def steps(self) -> int:
        """J, the steps of a round."""
        return min(CHUNK, self.lanes // CHANNELS)

    @property
    def owners(self) -> int:
        """Lanes that own the same value; more than one if S > R · CHUNK."""
        return self.lanes // (CHANNELS * self.steps)

    @property
    def low(self) -> int:
        """Size of the lowest digit."""
        return min(2, self.groups)

    def of_channels(self, stride: int = 1) -> tuple[tuple[int, int, int], ...]:
        """Digits of a lane's first channel, `stride` elements from one channel to the next."""
        rest = self.low * self.lanes, self.groups // self.low, self.low * stride
        return (1, self.low, stride), rest, (32, WARPS, self.groups * CHANNELS * stride)

    @property
    def to_next(self) -> int:
        """Distance between a lane's channels.

        They are apart, and so are pairs of states: the compiler would read neighbours with one
        access of 16 bytes, for which shared memory always takes four passes.
        """
        return self.groups

    @property
    def pair(self) -> int:
        """Contiguous states per lane."""
        return min(2, self.states)

    def of_states(self) -> tuple[int, int, int]:
        """Digit of a lane's first pair of states; the others follow at a distance of pair · S."""
        return self.low, self.lanes, self.pair

    @property
    def state_swaps(self) -> list[tuple[int, int]]:
        """Pairs: a distance between lanes, and one between states that the upper lanes swap.

        Before the lanes at that distance add up their sums over channels, each hands over the sums
        of half its states: as they are swapped, the later half in every lane.
        """
        if not self.summed or self.states & (self.states - 1):
            return []
        halves = [self.states >> i for i in range(1, self.states.bit_length())]
        return list(zip(self.over_channels, halves, strict=False))

    def of_channel(self, r: int, stride: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Offset and digits of a lane's r-th channel.

        The two are swapped in lanes that are `owners` lanes apart, for the sums over states.
        """
        to_next = self.to_next * stride
        swap = self.low * self.owners, 2, (1 - 2 * r) * to_next
        return r * to_next, (*self.of_channels(stride), swap)

    def of_copy(self) -> list[tuple[int, int, int]]:
        """Digits of the copy of B or C in the lane's order, see `copies`."""
        size = self.lanes * self.pair
        return [(lane, 2, size << i) for i, (lane, _) in enumerate(self.state_swaps)]

    def copies(self, v: jax.Array) -> jax.Array:
        """Copies (…, S · K), its states in the order of each lane: (…, copies · S · K).

        The first pairs of every copy come first, so that all lanes together read neighbours.
        """
        if not self.state_swaps:
            return v
        size, index = self.lanes * self.pair, np.arange(v.shape[-1])
        for _, d in self.state_swaps:
            d = d if d < self.pair else d * self.lanes
            index = np.concatenate([index, index.reshape(-1, 2, d)[:, ::-1].reshape(-1)])
        index = index.reshape(1 << len(self.state_swaps), -1, size).swapaxes(0, 1).reshape(-1)
        return v.at[..., index].get(mode="promise_in_bounds")

    def owned(self, step: int, channel: int = 1) -> tuple[tuple[int, int, int], ...]:
        """Digits of the value that a lane owns, by the strides of steps and channels."""
        each = self.low * self.owners
        return (
            *self.of_channels(channel),
            (each, CHANNELS, self.to_next * channel),
            (each * CHANNELS, self.steps, step),
        )

    def row(self, n: int) -> int:
        """Elements from step to step of fp32 values, n a channel, written by their owners.

        Without a gap the steps of a round would fall on the same banks of shared memory.
        """
        return self.width * n + max(4, 32 * CHANNELS // (self.lanes * n))

    @property
    def over_states(self) -> list[int]:
        """Distances of the lanes of one channel: each is left with the sum it owns."""
        swapped, states = self.low * self.owners, _between(self.low, self.low * self.lanes)
        return [swapped, *(d for d in states if d != swapped)]

    @property
    def over_channels(self) -> list[int]:
        """Distances of a warp's lanes with the same states."""
        return _between(self.low * self.lanes, 32) + _between(1, self.low)

    @property
    def over_steps(self) -> list[int]:
        """Distances of the lanes that own values of the same channel."""
        each = self.low * self.owners * CHANNELS
        return _between(each, self.low * self.lanes)

    @property
    def group(self) -> int:
        """Steps of which a lane of the backward has states and decays in registers."""
        return CHUNK // 2 if self.states <= 4 else CHUNK // 4

    @property
    def sums(self) -> int:
        """Sums of dB and dC over channels that a lane is left with."""
        return max(1, 2 * self.states // self.groups)


def _between(first: int, stop: int) -> list[int]:
    """Distances of lanes, the largest first."""
    return [d for d in (16, 8, 4, 2, 1) if first <= d < stop]


def _tile(states: int, most: tuple[int, int, int], summed: bool) -> ScanTile:
    """4, 8 or 16 lanes a channel up to the states in `most`, 32 beyond."""
    lanes = next((s for s, n in zip((4, 8, 16), most, strict=True) if states <= n), 32)
    return ScanTile(lanes, next(k for k in (1, 2, 4, 8, 12) if k * lanes >= states), summed)


def forward_tile(states: int) -> ScanTile:
    """Picks 4 lanes a channel up to 16 states, 8 up to 64, 16 up to 128, 32 beyond."""
    return _tile(states, (16, 64, 128), summed=False)


def half(tile: ScanTile) -> ScanTile | None:
    """Half the channels, in twice the lanes with half the states each; None if that cannot be.

    Its blocks fill the multiprocessors that whole columns leave: (4, 4096, 5120, 16) takes 0.58 ms,
    in whole columns 0.68.
    """
    if tile.lanes == 32 or tile.states == 1:
        return None
    return dataclasses.replace(tile, lanes=2 * tile.lanes, states=tile.states // 2)


def backward_tile(states: int) -> ScanTile:
    """Picks at most 4 states a lane up to 128: registers hold each before every step of a group."""
    return _tile(states, (16, 32, 64), summed=True)


_ROOM = 96 << 10
"""Bytes of shared memory of a backward's block: two fit an H100's multiprocessor, one any GPU's."""


def apart(every: int, states: int, *tokens: Any) -> int:
    """Returns `every`, the steps between saved states, or fewer for which a block has room.

    A block keeps the state before each group of the steps in between, beside two stages of a chunk
    of `tokens`, arrays or ``None``, and of the gradient of the first.
    """
    tile = backward_tile(states)
    widths = [v.dtype.itemsize for v in (*tokens, tokens[0]) if v is not None]
    copies = 1 << len(tile.state_swaps)
    ring = 2 * CHUNK * (tile.width * sum(widths) + 4 * 2 * copies * tile.all_states)
    sums = tile.sums if tile.sums <= 8 else tile.sums // 2
    own = CHUNK * (tile.row(1) + tile.row(2) + LANES * sums)
    group = CHANNELS * tile.states * LANES
    while every > CHUNK and ring + 4 * (own + every // tile.group * group) > _ROOM:
        every = max(CHUNK, every // (2 * CHUNK) * CHUNK)
    return every


@dataclasses.dataclass(frozen=True)
class ScanGrid:
    """The blocks of a kernel: `columns` of channels and batch rows, each `units` of time long.

    A unit is a chunk or, in the backward, the steps between two saved states. The first `whole`
    columns have one block each, the others one for each of their parts.
    """

    columns: int
    units: int
    whole: int
    length: int  # of a part, in units; the last one may be shorter
    subparts: int = 1  # of a part, each with a block of its own in the pass that finds the carries
    head: int = 0  # units of a column's first part; 0 for `length`
    halved: int = 0  # whole columns, the last, with two blocks of half the channels each
    skipped: int = 0  # first blocks, which are not there
    start: int = 0  # of the first unit, which is not the sequence's

    @classmethod
    def cut(cls, columns: int, units: int, whole: int, parts: int, subparts: int = 1) -> "ScanGrid":
        """Cuts all but the first `whole` columns into `parts`, or fewer if that does as well."""
        if parts == 1:
            return cls(columns, units, columns, units)
        return cls(columns, units, whole, subparts * -(-units // (parts * subparts)), subparts)

    @property
    def rest(self) -> int:
        """Columns that are cut into parts."""
        return self.columns - self.whole

    @property
    def first(self) -> int:
        """Units of the first part of each of these columns."""
        return self.head or min(self.length, self.units)

    @property
    def parts(self) -> int:
        """Parts of each of these columns."""
        return 1 - (self.first - self.units) // self.length if self.rest else 1

    @property
    def count(self) -> int:
        """Blocks of the kernel."""
        return self.whole + self.halved + self.rest * self.parts - self.skipped

    def of_carries(self, left_out: Literal["first", "last"] | None) -> "ScanGrid":
        """Blocks that find carries: the subparts of all parts but one, or of all."""
        start = self.first if left_out == "first" else 0
        stop = self.first + (self.parts - 2) * self.length if left_out == "last" else self.units
        length = self.length // self.subparts
        return ScanGrid(
            self.columns, stop - start, self.whole, length, skipped=self.whole, start=start
        )

    def of_halves(self) -> "ScanGrid":
        """Blocks of the halved columns, in columns of half the channels."""
        columns = 2 * self.columns
        return ScanGrid(columns, self.units, columns, self.units, skipped=self.whole - self.halved)

    def sum(self, blocks: jax.Array) -> jax.Array:
        """Sums the blocks' values, (count, ...), over parts: (columns, ...)."""
        if not self.rest:
            return blocks
        others = blocks[self.whole :].reshape(self.parts, self.rest, *blocks.shape[1:]).sum(0)
        return jnp.concatenate([blocks[: self.whole], others])

    def with_subparts(self) -> "ScanGrid":
        """Cuts parts into subparts if these fill the multiprocessors more evenly."""

        def time(subparts: int) -> float:
            blocks = subparts * self.rest * (self.parts - 1)
            return -(-blocks // num_sms()) / subparts

        fits = [k for k in range(1, 5) if self.length >= 8 * k]
        best = min(fits, key=time, default=1)
        if best == 1 or time(best) > 0.9 * time(1):
            return self
        length = -(-self.length // best) * best
        head = self.head and self.units - (self.parts - 1) * length
        return dataclasses.replace(self, length=length, head=head, subparts=best)


def forward_grid(columns: int, chunks: int, halves: bool) -> ScanGrid:
    """Cuts a sequence of `chunks` for the forward, where columns can be halved or not.

    Parts cost a second pass of exponentials, so there are parts only where blocks are few, up to
    two a multiprocessor: more would not be faster. Where columns fill the multiprocessors and some
    are left over, halves of these fill them once more.
    """
    if 4 * columns < 3 * num_sms():
        parts = max(1, min(2 * num_sms() // columns, chunks // 2))
        return ScanGrid.cut(columns, chunks, 0, parts).with_subparts()
    left = columns % num_sms()
    whole = ScanGrid.cut(columns, chunks, columns, 1)
    if halves and num_sms() <= columns and 2 * left <= num_sms():
        return dataclasses.replace(whole, halved=left)
    return whole


def backward_grid(columns: int, units: int) -> ScanGrid:
    """Cuts a sequence for the backward, two of whose blocks share a multiprocessor.

    The time is modelled as waves of blocks, each as long as its part, plus a third for the pass
    that computes the parts' carries, and a twentieth of a wave for its launch and the longer sums.
    So columns that fill the GPU evenly stay whole.

    Where the columns are more than half of what the GPU holds at a time, all begin at once with a
    long first part, and the rest of the GPU takes the other parts one after another: carries are
    found over these alone. (8, 2048, 1536, 16) has 192 columns on an H200, which holds 264: of
    four equal parts carries were found over three quarters of the sequence, and now over one.
    """
    resident = 2 * num_sms()
    rest = columns % resident
    rounds = -(-rest // (resident - rest))  # of later parts, beside a first part

    def time(grid: ScanGrid) -> float:
        waves = -(-grid.whole // resident)
        if grid.head:
            parts = max(grid.head, rounds * grid.length)
        else:
            parts = -(-grid.rest * grid.parts // resident) * grid.length
        carried = grid.rest * (grid.units - grid.first)
        return waves + (parts + carried / resident / 3) / grid.units + (0.05 if grid.rest else 0.0)

    if not rest:
        return ScanGrid.cut(columns, units, columns, 1)
    counts = range(1, max(2, min(64, units // 2 + 1)))
    tried = [ScanGrid.cut(columns, units, w, n) for w in (columns - rest, 0) for n in counts]
    if rounds > 1 and (length := units // (rounds + 1)):
        tried.append(ScanGrid(columns, units, columns - rest, length, head=units - length))
    return min(tried, key=lambda grid: (time(grid), grid.count)).with_subparts()
