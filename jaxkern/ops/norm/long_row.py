"""A long row: in the registers of several warpgroups of a block, or of a cluster of blocks.

A row is covered by windows, (size,), each spread over the lanes of a warpgroup. A warpgroup holds
`windows_per_warpgroup` windows in a row. Sums over a row are taken in each lane, then over the
lanes of a warp by shuffles, then over all warps of the cluster (:mod:`jaxkern.ops.norm.exchange`).
Sums over rows stay in registers, as every element of a row has one lane.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.lowering.target import UnfitError
from jaxkern.mosaic.lanes import sum_lanes
from jaxkern.mosaic.launch import LANES, clusters, grid_axes, interpreted
from jaxkern.ops.norm.exchange import WARPS, Exchange
from jaxkern.ops.norm.registers import alternate_lanes, squares_in_lanes, sum_in_lanes, uniform
from jaxkern.ops.norm.windows import Windows, windows

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

    windows: Windows
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
        """What ``plgpu.kernel`` is told of warpgroups and clusters."""
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
        """Of the warpgroup in the cluster."""
        if row.blocks > 1:
            self.rank = self.rank + lax.axis_index(_BLOCK) * row.warpgroups

    def prepare(self) -> None:
        """Before the first sum over a row, once a block."""
        self.exchange.prepare(self.smem)

    def _index(self, j: int) -> Any:
        """Of window `j` in the row."""
        return self.rank * self.row.windows_per_warpgroup + j

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
        """What the TMA copies for this warpgroup: from where to where."""
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
        if not row.disjoint or row.n < w.n:
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

    def statistics(self, k: Any, values: list[jax.Array], centered: bool) -> tuple[Any, jax.Array]:
        """The row's mean, None if not `centered`, and the mean square of what differs from it."""
        if centered and not self._equal_lanes:
            mean = self.row_sums(2 * k, [self._lane_total(values)])[0] * (1 / self.row.n)
            apart = [v - mean for v in values]
            squares = self._lane_total([v * v for v in apart])
            return mean, self.row_sums(2 * k + 1, [squares])[0] * (1 / self.row.n)
        self.send_statistics(k, values, centered)
        return self.receive_statistics(k, centered)

    def send_statistics(self, k: Any, values: list[jax.Array], centered: bool) -> None:
        """Sends what the other warps need for :meth:`receive_statistics`."""
        if not centered:
            self._send_sums(k, [self._lane_total([v * v for v in values])])
            return
        # Each warp sends the mean of its elements and the squares around that. However far it is
        # from the row's mean, nothing is lost: the difference is added when they are received.
        assert self._equal_lanes
        vec = self.cover.vec
        [mean] = sum_lanes([sum_in_lanes(values, vec)], _LANES_OF_A_WARP)
        mean = mean * (1 / self._per_warp)
        [squares] = sum_lanes([squares_in_lanes(values, mean, vec)], _LANES_OF_A_WARP)
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
