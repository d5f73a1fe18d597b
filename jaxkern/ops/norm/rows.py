"""Tiles of rows in registers: short rows within a warp, a long row over warps or a cluster.

A long row is cut into windows, each spread over a warpgroup's lanes; its sums go through an
exchange in shared memory. Short rows are several to a block, each within one warp. `ShortRows` and
`LongRow` have the same methods, and so have their registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.target import UnfitError, interpreted
from jaxkern.mosaic.lanes import (
    VECTOR_BYTES,
    LaneOffsets,
    alternate_lanes,
    expect_arrivals,
    load_lanes,
    send_in_cluster,
    squares_in_lanes,
    start_arrivals,
    store,
    store_lanes,
    sum_in_lanes,
    sum_lanes,
    sync_block,
    sync_warpgroup,
    uniform,
    wait_for_arrivals,
)
from jaxkern.mosaic.launch import LANES, clusters, grid_axes

Values = Callable[[], list[jax.Array]]
"""Gives what is normalised, by windows in fp32: held in registers, or read by every call."""

# Windows of a long row


@dataclasses.dataclass(frozen=True)
class RowWindows:
    """A row of `n` elements as `count` windows of `size`, each spread over a warpgroup's lanes.

    The last window ends at the row's end, so where `n` is no multiple of `size` it overlaps the one
    before: its first elements are read and written twice, with equal values, and masked in sums.
    Every window has the same layout, so their registers can be added before one sum over lanes.
    """

    n: int
    size: int
    vec: int
    count: int

    def __post_init__(self) -> None:
        assert self.size % (LANES * self.vec) == 0, self
        assert self.n % self.vec == 0, self
        assert (self.count - 1) * self.size < self.n <= self.count * self.size, self

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)

    def start(self, i: Any) -> Any:
        """The first element of window `i`."""
        if isinstance(i, int):
            return min(i * self.size, self.n - self.size)
        return jnp.minimum(i * self.size, self.n - self.size)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)


@functools.cache
def windows(n: int, itemsize: int, warpgroups: int, max_size: int, max_vec: int) -> RowWindows:
    """The windows of a row of `n` >= 128 that cost `warpgroups` warpgroups least.

    They differ in size: the largest, a half, a third or a quarter of `max_size`. Warpgroups that
    get no window of their own repeat the last, so that fewer elements may not be less work.

    Args:
      n: length of the row.
      itemsize: bytes of an element of the narrowest array, which decides the widest load.
      warpgroups: that share the windows evenly.
      max_size: most elements of one window.
      max_vec: most neighbouring elements that a lane loads at a time.
    """

    def cost(w: RowWindows) -> float:
        elements = -(-w.count // warpgroups) * warpgroups * w.size
        return elements * _cost_of_element(w.vec, itemsize)

    sizes = (min(n, max_size) // divide // LANES * LANES or LANES for divide in (1, 2, 3, 4))
    return min((_windows(n, size, max(itemsize, 16 // max_vec)) for size in sizes), key=cost)


def _windows(n: int, max_size: int, itemsize: int) -> RowWindows:
    """The windows of at most `max_size` elements that cover the row the cheapest.

    A load of `vec` elements needs every row to start at a multiple of `vec`, so an odd `n` is read
    element by element.
    """
    choices = []
    vec = VECTOR_BYTES // itemsize
    while vec:
        unit = LANES * vec
        fewest = -(-n // max_size)
        for count in range(fewest, fewest + 8):
            size = -(-n // (count * unit)) * unit
            covers = (count - 1) * size < n <= count * size
            if n % vec == 0 and size <= min(n, max_size) and covers:
                choices.append(RowWindows(n, size, vec, count))
        vec //= 2
    cost = lambda w: (w.size * w.count * _cost_of_element(w.vec, itemsize), w.count)
    return min(choices, key=cost)


def _cost_of_element(vec: int, itemsize: int) -> float:
    """Grows with the number of loads that bring an element, of `vec` elements each."""
    return 1 + 1 / (vec * itemsize)


# Sums over the warps that share a row

_WARP = 32
WARPS = LANES // _WARP
_BUFFERS = 4
"""A block may have sent the sums of two rows while another still reads the previous row's; three
would do where no row's sums are sent ahead."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges sums between all warps of a cluster: `warpgroups` in each of `blocks` blocks."""

    warpgroups: int
    blocks: int

    @property
    def participants(self) -> int:
        """Warpgroups of the cluster."""
        return self.warpgroups * self.blocks

    @property
    def scratch_bytes(self) -> int:
        """Bytes of :meth:`scratch` for two sums."""
        return 4 * _BUFFERS * self.participants * 2 * WARPS

    def scratch(self, sums: int) -> dict[str, Any]:
        """Shared memory for up to `sums` sums a round."""
        shape = (_BUFFERS, self.participants, sums, WARPS)
        scratch: dict[str, Any] = {"partials": plgpu.SMEM(shape, jnp.float32)}
        if interpreted() and self.warpgroups > 1:
            scratch["all_stored"] = plgpu.Barrier(num_arrivals=self.warpgroups)
        if self.blocks > 1:
            scratch["arrivals"] = plgpu.SMEM((_BUFFERS, 2), jnp.int32)
        return scratch

    def prepare(self, smem: Any) -> None:
        """Makes the mbarriers of a cluster ready, once."""
        if self.blocks > 1:
            start_arrivals([smem.arrivals.at[i] for i in range(_BUFFERS)])

    def send(self, smem: Any, rank: Any, k: Any, held: jax.Array, count: int) -> None:
        """Gives `count` sums of each warp to all warps in round `k`.

        Args:
          smem: the arrays of :meth:`scratch`.
          rank: of the warpgroup in the cluster.
          k: the rounds before.
          held: (LANES,); lane l has the warp's sum number l mod `count`.
          count: 1 or 2.
        """
        buffer = lax.rem(jnp.int32(k), _BUFFERS)
        target = smem.partials.at[buffer, rank]  # (sums, warps)
        offsets = LaneOffsets(((_WARP, WARPS, 1), (1, count, WARPS)))
        if self.blocks > 1:
            arrivals = smem.arrivals.at[buffer]
            expect_arrivals(arrivals, 4 * self.participants * count * WARPS)
            send_in_cluster(target, arrivals, offsets, held, parts=count, blocks=self.blocks)
            return
        store_lanes(target, offsets, [held])
        if not interpreted():
            sync_block()
        elif self.warpgroups > 1:
            plgpu.barrier_arrive(smem.all_stored)
            plgpu.barrier_wait(smem.all_stored)

    def receive(self, smem: Any, k: Any, i: int) -> list[jax.Array]:
        """The `i`-th sums of all warps in round `k`, for :meth:`total`; first of all the 0-th.

        A lane reads one warp's sums, for up to 8 warpgroups at a time: (LANES,) each.
        """
        buffer = lax.rem(jnp.int32(k), _BUFFERS)
        if self.blocks > 1 and i == 0:
            parity = lax.rem(lax.div(jnp.int32(k), _BUFFERS), 2)
            wait_for_arrivals(smem.arrivals.at[buffer], parity)
        partials = smem.partials.at[buffer]
        participants, sums, _ = partials.shape
        reads = []
        for first in range(0, participants, self._at_a_time):
            offsets = LaneOffsets(
                ((1, WARPS, 1), (WARPS, self._at_a_time, sums * WARPS)),
                start=(first * sums + i) * WARPS,
            )
            reads += load_lanes(partials, offsets, volatile=True)
        return reads

    def total(self, reads: list[jax.Array]) -> jax.Array:
        """The sum over all warps of what was received, as a scalar."""
        return uniform(self.totals(reads))

    def totals(self, reads: list[jax.Array]) -> jax.Array:
        """The same as (LANES,), equal in all lanes."""
        total = sum(reads[1:], start=reads[0])
        distances = (1 << b for b in range((WARPS * self._at_a_time).bit_length() - 1))
        return sum_lanes([total], tuple(distances))[0]

    @property
    def _at_a_time(self) -> int:
        """Warpgroups whose sums the lanes of a warp read at a time, one each."""
        return min(self.participants, _WARP // WARPS)


# A long row, over the warps of a block or of a cluster

_BLOCK, _WARPGROUP = grid_axes("block of the cluster", "warpgroup")
_MAX_WARPGROUPS = 8
_MAX_CLUSTER = 16
_MOST_PER_LANE = 16
"""Elements of a row in a lane of eight warpgroups, whose lanes have 64 registers each.

By 32, a backward of 4096 rows of 32768 took 1.1 ms on an H200, and by a cluster 0.34.
"""
_LANES_OF_A_WARP = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class LongRow:
    """A tile of one row, over `warpgroups` warpgroups in each of `blocks` blocks of a cluster.

    Windows beyond the row's last repeat it, masked in sums.

    Attributes:
      windows: of the row, padded where it is shorter than a window.
      n: elements of the row without padding.
    """

    windows: RowWindows
    n: int
    warpgroups: int
    blocks: int

    def __post_init__(self) -> None:
        parts = self.exchange.participants
        assert parts & (parts - 1) == 0, self

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.warpgroups, self.blocks)

    @property
    def windows_per_warpgroup(self) -> int:
        return -(-self.windows.count // (self.warpgroups * self.blocks))

    @property
    def elements_per_lane(self) -> int:
        return self.windows_per_warpgroup * self.windows.size // LANES

    params_per_lane = elements_per_lane

    @property
    def disjoint(self) -> bool:
        """Whether no window overlaps another."""
        w = self.windows
        return self.windows_per_warpgroup * self.warpgroups * self.blocks * w.size == w.n

    @property
    def launch(self) -> dict[str, Any]:
        """Arguments of ``plgpu.kernel`` for warpgroups and clusters."""
        options: dict[str, Any] = {}
        if self.warpgroups > 1:
            options |= {"num_threads": self.warpgroups, "thread_name": _WARPGROUP}
        if self.blocks > 1:
            options |= {"cluster": (self.blocks,), "cluster_names": (_BLOCK,)}
        return options

    @property
    def scratch_bytes(self) -> int:
        """The most that :meth:`scratch` takes."""
        return self.exchange.scratch_bytes

    def scratch(self, row_sums: int, param_sums: bool) -> dict[str, Any]:
        """Shared memory for up to `row_sums` sums over a row at a time."""
        del param_sums
        return self.exchange.scratch(row_sums)

    def registers(self, smem: Any) -> "LongRowRegisters":
        return LongRowRegisters(self, smem)

    def tiles(self, m: int) -> int:
        return m

    @property
    def copies(self) -> int:
        """TMA copies that bring a warpgroup its windows."""
        return 1 if self.disjoint else self.windows_per_warpgroup

    def gmem_shape(self, boxes: int) -> tuple[int, ...]:
        """Shape of a row in global memory for TMA copies, whose boxes are `boxes` to a row."""
        w, box = self.windows, self.windows.n // boxes
        return (w.count, w.size // box, box) if self.disjoint else (boxes, box)

    def stage_shape(self, boxes: int) -> tuple[int, ...]:
        """Shape of a warpgroup's windows in a stage of the ring."""
        box = self.windows.n // boxes
        assert self.windows.size % box == 0, self
        return (self.windows_per_warpgroup, self.windows.size // box, box)


def long_row(
    n: int, itemsize: int, per_lane: int, window: int, spread: int, widest: int = 8
) -> LongRow:
    """A row of `n`, `per_lane` elements a lane where the cluster is not at its limit.

    Args:
      n: elements of the row.
      itemsize: bytes of an element of the narrowest array.
      per_lane: elements of a row in a lane's registers.
      window: elements of a lane's window.
      spread: warpgroups before the row is spread over blocks.
      widest: most neighbouring elements that a lane reads at a time.
    """
    width = max(n, LANES)
    parts = 1
    while parts * per_lane * LANES < width and parts < _MAX_WARPGROUPS * _MAX_CLUSTER:
        parts *= 2
    if interpreted():
        warpgroups, blocks = min(parts, 2), 1
    elif clusters():
        warpgroups = min(parts, spread)
        blocks = min(parts // warpgroups, _MAX_CLUSTER)
    else:
        warpgroups, blocks = min(parts, _MAX_WARPGROUPS), 1
        if parts > warpgroups and width > warpgroups * LANES * _MOST_PER_LANE:
            raise UnfitError(f"rows of {n} elements take clusters of blocks, which Hopper brought")
    cover = windows(width, itemsize, warpgroups * blocks, window * LANES, widest)
    return LongRow(cover, n, warpgroups, blocks)


class LongRowRegisters:
    """Loads, stores and sums a warpgroup's windows of a long row in registers.

    A window `j` of :attr:`windows` is (size,), a sum in each lane (LANES,), a row's statistic a
    scalar.
    """

    def __init__(self, row: LongRow, smem: Any):
        self.row, self.smem, self.exchange = row, smem, row.exchange
        self.cover, self.layout = row.windows, row.windows.layout
        self.windows = range(row.windows_per_warpgroup)
        self.warpgroup = lax.axis_index(_WARPGROUP) if row.warpgroups > 1 else 0
        self.rank = self.warpgroup
        """Rank of the warpgroup in the cluster."""
        if row.blocks > 1:
            self.rank = self.rank + lax.axis_index(_BLOCK) * row.warpgroups

    def prepare(self) -> None:
        """Initialises the exchange; called once per block, before the first sum over a row."""
        self.exchange.prepare(self.smem)

    def _index(self, j: int) -> Any:
        """Index of window `j` in the row; those that may overlap another are each rank's last."""
        if self.row.disjoint:
            return self.rank * self.row.windows_per_warpgroup + j
        return j * self.exchange.participants + self.rank

    def _start(self, j: int) -> Any:
        size = self.cover.size
        return self._index(j) * size if self.row.disjoint else self.cover.start(self._index(j))

    def _window(self, ref: Any, j: int) -> Any:
        return ref.at[pl.ds(self._start(j), self.cover.size)]

    def first_row(self, tile: Any, m: int) -> Any:
        """The first row of a tile."""
        del m
        return tile

    def load(self, ref: Any, row: Any, group: Any, j: int) -> jax.Array:
        """Window `j` of a row, or of the rows of a tile, in global memory."""
        return self.load_window(self._window(ref.at[row, group], j))

    def load_window(self, ref: Any) -> jax.Array:
        """A window from memory that holds it alone."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_stage(self, stage: Any, j: int) -> jax.Array:
        """Window `j` from a stage of the ring."""
        if interpreted():
            return stage[j].reshape(-1)
        return self.load_window(stage.at[j].reshape(self.cover.size))

    def tma_copies(self, ref: Any, stage: Any, row: Any, group: Any) -> list[tuple[Any, Any]]:
        """Sources and destinations of this warpgroup's TMA copies."""
        if self.row.disjoint:
            own = pl.ds(self._index(0), self.row.windows_per_warpgroup)
            return [(ref.at[row, group, own], stage)]
        *_, count, box = stage.shape
        start = lambda j: self._start(j) // box
        return [(ref.at[row, group, pl.ds(start(j), count)], stage.at[j]) for j in self.windows]

    def load_param(self, ref: Any, group: Any, j: int) -> jax.Array:
        """Window `j` of a parameter, in fp32."""
        return self.load_window(self._window(ref.at[group], j)).astype(jnp.float32)

    def load_stat(self, ref: Any, row: Any, group: Any) -> jax.Array:
        """A row's statistic."""
        return ref[row, group]

    def store(self, ref: Any, row: Any, group: Any, j: int, value: jax.Array) -> None:
        self._window(ref.at[row, group], j)[...] = value.astype(ref.dtype)

    def store_stat(self, ref: Any, row: Any, group: Any, value: jax.Array) -> None:
        ref[row, group] = value

    # Sums over a row

    def lane_sum(self, j: int, value: jax.Array) -> jax.Array:
        """(LANES,): each lane's sum of window `j`, without what another window has or padding.

        May be added up over windows before :meth:`row_sums`.
        """
        w, row = self.cover, self.row
        if (j + 1) * self.exchange.participants * w.size > row.n:  # some rank's is not its own
            column = plgpu.broadcasted_iota(jnp.int32, (w.size,), 0, layout=w.layout)
            column = column + w.start(self._index(j))
            kept = column >= self._index(j) * w.size
            if row.n < w.n:
                kept = kept & (column < row.n)
            value = jnp.where(kept, value, w.full(0.0))
        return sum_in_lanes([value], w.vec)

    def row_sums(self, k: Any, values: list[jax.Array]) -> list[jax.Array]:
        """The sums over the row of one or two lane sums; `k` exchanges were before."""
        self._send_sums(k, values)
        return [self._received_sum(k, i) for i in range(len(values))]

    def statistics(self, k: Any, values: Values, centered: bool) -> tuple[Any, jax.Array]:
        """The row's mean, None if not `centered`, and the mean square of what differs from it."""
        if centered and not self._equal_lanes:
            mean = self.row_sums(2 * k, [self._lane_total(values())])[0] * (1 / self.row.n)
            apart = [v - mean for v in values()]
            squares = self._lane_total([v * v for v in apart])
            return mean, self.row_sums(2 * k + 1, [squares])[0] * (1 / self.row.n)
        self.send_statistics(k, values, centered)
        return self.receive_statistics(k, centered)

    def send_statistics(self, k: Any, values: Values, centered: bool) -> None:
        """Sends what the other warps need for :meth:`receive_statistics`."""
        if not centered:
            self._send_sums(k, [self._lane_total([v * v for v in values()])])
            return
        # Each warp sends the mean of its elements and the squares around that. However far it is
        # from the row's mean, nothing is lost: the difference is added when they are received.
        assert self._equal_lanes
        vec = self.cover.vec
        [mean] = sum_lanes([sum_in_lanes(values(), vec)], _LANES_OF_A_WARP)
        mean = mean * (1 / self._per_warp)
        [squares] = sum_lanes([squares_in_lanes(values(), mean, vec)], _LANES_OF_A_WARP)
        self.exchange.send(self.smem, self.rank, k, alternate_lanes(mean, squares), 2)

    def receive_statistics(self, k: Any, centered: bool) -> tuple[Any, jax.Array]:
        """:meth:`statistics` of what was sent."""
        if not centered:
            return None, self._received_sum(k, 0) * (1 / self.row.n)
        means, squares = (self.exchange.receive(self.smem, k, i) for i in range(2))
        mean = self.exchange.totals(means) * (self._per_warp / self.row.n)
        apart = [m - mean for m in means]
        square = self.exchange.totals(
            [s + d * d * self._per_warp for s, d in zip(squares, apart, strict=True)]
        )
        square = square * (1 / self.row.n)
        return uniform(mean), uniform(square)

    def broadcast(self, value: jax.Array) -> jax.Array:
        """A statistic as it is combined with a window: the scalar itself."""
        return value

    @property
    def _equal_lanes(self) -> bool:
        """Whether all lanes hold the same number of the row's elements, each once."""
        return self.row.disjoint and self.row.n == self.cover.n

    @property
    def _per_warp(self) -> int:
        return self.row.windows_per_warpgroup * self.cover.size // WARPS

    def _lane_total(self, values: list[jax.Array]) -> jax.Array:
        sums = [self.lane_sum(j, v) for j, v in zip(self.windows, values, strict=True)]
        return sum(sums[1:], start=sums[0])

    def _send_sums(self, k: Any, values: list[jax.Array]) -> None:
        [held] = sum_lanes(values, _LANES_OF_A_WARP)  # of two, odd lanes hold the second
        self.exchange.send(self.smem, self.rank, k, held, len(values))

    def _received_sum(self, k: Any, i: int) -> jax.Array:
        return self.exchange.total(self.exchange.receive(self.smem, k, i))

    # Sums over rows: (size,) of each window

    def zero_param_sum(self) -> jax.Array:
        return self.cover.full(0.0)

    def add_to_param_sum(self, total: jax.Array, value: jax.Array) -> jax.Array:
        return total + value

    def without_repeated(self, tile: Any, m: int, value: jax.Array) -> jax.Array:
        """`value` with zeros in rows that the tile before has, too: a row has but one tile."""
        del tile, m
        return value

    def store_param_sum(self, ref: Any, cluster: Any, group: Any, j: int, value: jax.Array) -> None:
        """Stores a cluster's sum over its rows."""
        self.store(ref, cluster, group, j, value)


# Short rows, each within one warp


@dataclasses.dataclass(frozen=True)
class ShortRows:
    """A tile of `rows` rows of `size` elements.

    A lane holds `vec` neighbouring elements at a time, and `lanes` lanes side by side a row.
    """

    rows: int
    size: int
    vec: int

    blocks = 1
    warpgroups = 1
    windows_per_warpgroup = 1
    copies = 1

    def __post_init__(self) -> None:
        assert self.size % (self.lanes * self.vec) == 0, self
        assert self.rows % self.unit == 0, self

    @property
    def lanes(self) -> int:
        """Lanes that hold a row."""
        return min(_WARP, self.size // self.vec)

    @property
    def unit(self) -> int:
        """Rows that the warps hold side by side."""
        return WARPS * (_WARP // self.lanes)

    @property
    def launch(self) -> dict[str, Any]:
        """Nothing: ``plgpu.kernel`` takes one warpgroup and no cluster by default."""
        return {}

    @property
    def elements_per_lane(self) -> int:
        return self.rows * self.size // LANES

    @property
    def params_per_lane(self) -> int:
        """Elements of a parameter that a lane reads."""
        return self.size // self.lanes

    @property
    def scratch_bytes(self) -> int:
        """The most that :meth:`scratch` takes."""
        return 4 * self.unit * self.size

    def scratch(self, row_sums: int, param_sums: bool) -> dict[str, Any]:
        """Shared memory in which the warps add up sums over rows."""
        del row_sums
        columns = plgpu.SMEM((self.unit, self.size), jnp.float32)
        return {"columns": columns} if param_sums else {}

    def registers(self, smem: Any) -> "ShortRowRegisters":
        return ShortRowRegisters(self, smem)

    def tiles(self, m: int) -> int:
        """Number of tiles that cover `m` rows; the last one ends at the last row."""
        return -(-m // self.rows)

    def gmem_shape(self, boxes: int) -> tuple[int, ...]:
        """Shape of a row in global memory for TMA copies, whose boxes are `boxes` to a row."""
        return (boxes, self.size // boxes)

    def stage_shape(self, boxes: int) -> tuple[int, ...]:
        """Shape of a tile in a stage of the ring."""
        return (self.rows, boxes, self.size // boxes)


def short_rows(size: int, elements: int, itemsize: int) -> ShortRows | None:
    """A tile of about `elements` elements, or None if `size` does not fit a warp's lanes."""
    vec = 16 // itemsize
    while vec:
        lanes = min(_WARP, size // vec)
        if lanes and _WARP % lanes == 0 and size % (lanes * vec) == 0:
            unit = WARPS * (_WARP // lanes)
            return ShortRows(max(1, elements // (unit * size)) * unit, size, vec)
        vec //= 2
    return None


@functools.cache
def _layout(rows: ShortRows) -> Any:
    lanes, deep = rows.lanes, _WARP // rows.lanes
    width = lanes * rows.vec
    layout = mgpu.TiledLayout(
        fragmented_array.Tiling(((rows.unit, width), (deep, width), (1, rows.vec))),
        (-6,),
        (-4, -3),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


class ShortRowRegisters:
    """Loads, stores and sums a tile of short rows in a warpgroup's registers.

    A tile is one window, (rows, size), and a row's statistic (rows,). It has the methods of
    :class:`LongRowRegisters`.
    """

    warpgroup = 0
    windows = range(1)

    def __init__(self, rows: ShortRows, smem: Any):
        self.rows, self.smem, self.layout = rows, smem, _layout(rows)
        self.shape = (rows.rows, rows.size)

    def prepare(self) -> None:
        """Nothing: no sum goes through another warp."""

    def first_row(self, tile: Any, m: int) -> Any:
        return jnp.minimum(tile * self.rows.rows, m - self.rows.rows)

    def _rows(self, ref: Any, row: Any, group: Any) -> Any:
        return ref.at[pl.ds(row, self.rows.rows), group]

    def load(self, ref: Any, row: Any, group: Any, j: int) -> jax.Array:
        del j
        return plgpu.load(self._rows(ref, row, group), layout=self.layout, optimized=False)

    def load_stage(self, stage: Any, j: int) -> jax.Array:
        del j
        if interpreted():
            return stage[...].reshape(self.shape)
        return plgpu.load(stage.reshape(*self.shape), layout=self.layout, optimized=False)

    def tma_copies(self, ref: Any, stage: Any, row: Any, group: Any) -> list[tuple[Any, Any]]:
        return [(self._rows(ref, row, group), stage)]

    def load_param(self, ref: Any, group: Any, j: int) -> jax.Array:
        del j
        return self._broadcast(self.load_columns(ref.at[group]).astype(jnp.float32), 1)

    def load_columns(self, ref: Any) -> jax.Array:
        """(size,), of which every warp holds all."""
        return plgpu.load(ref, layout=self.layout.reduce((0,)), optimized=False)

    def load_stat(self, ref: Any, row: Any, group: Any) -> jax.Array:
        stat = self._rows(ref, row, group)
        return plgpu.load(stat, layout=self.layout.reduce((1,)), optimized=False)

    def store(self, ref: Any, row: Any, group: Any, j: int, value: jax.Array) -> None:
        del j
        store(self._rows(ref, row, group), value.astype(ref.dtype))

    def store_stat(self, ref: Any, row: Any, group: Any, value: jax.Array) -> None:
        store(self._rows(ref, row, group), value)

    # Sums over a row

    def lane_sum(self, j: int, value: jax.Array) -> jax.Array:
        """`value` itself, as there is one window."""
        del j
        return value

    def row_sums(self, k: Any, values: list[jax.Array]) -> list[jax.Array]:
        """(rows,) of each (rows, size)."""
        del k
        return [jnp.sum(v, axis=1) for v in values]

    def statistics(self, k: Any, values: Values, centered: bool) -> tuple[Any, jax.Array]:
        [value], mean = values(), None
        if centered:
            mean = self.row_sums(k, [value])[0] * (1 / self.rows.size)
            value = values()[0] - self.broadcast(mean)
        return mean, self.row_sums(k, [value * value])[0] * (1 / self.rows.size)

    def broadcast(self, value: jax.Array) -> jax.Array:
        """(rows, size) of a statistic (rows,)."""
        return self._broadcast(value, 0)

    def _broadcast(self, value: jax.Array, axis: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.shape, (axis,)), self.layout)

    # Sums over rows: (unit, size), a lane's part of it the sum of its own rows

    def zero_param_sum(self) -> jax.Array:
        return self._zeros(self.rows.unit)

    def add_to_param_sum(self, total: jax.Array, value: jax.Array) -> jax.Array:
        for first in range(0, self.rows.rows, self.rows.unit):
            part = value[first : first + self.rows.unit]  # (unit, size)
            total = plgpu.layout_cast(total + plgpu.layout_cast(part, self.layout), self.layout)
        return total

    def without_repeated(self, tile: Any, m: int, value: jax.Array) -> jax.Array:
        if m % self.rows.rows == 0:
            return value
        index = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        index = index + self.first_row(tile, m)
        return jnp.where(index >= tile * self.rows.rows, value, self._zeros(self.rows.rows))

    def store_param_sum(self, ref: Any, cluster: Any, group: Any, j: int, value: jax.Array) -> None:
        """Adds up the `unit` rows of `value` through shared memory."""
        del j
        columns = self.smem.columns
        store(columns, value)
        sync_warpgroup()
        rows = [self.load_columns(columns.at[r]) for r in range(self.rows.unit)]
        sync_warpgroup()
        store(ref.at[cluster, group], sum(rows[1:], start=rows[0]))

    def _zeros(self, rows: int) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((rows, self.rows.size), jnp.float32), self.layout)
