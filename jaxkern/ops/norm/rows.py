"""How rows lie on a warpgroup's lanes: several short ones, or a strip of one long one.

Both offer the same to the kernels: a row comes in pieces, `each` of which is loaded into registers,
worked on and stored; `totals` are sums over rows, `spread` makes them fit a piece again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.cluster import (
    expect_arrivals,
    send_in_cluster,
    start_arrivals,
    wait_for_arrivals,
)
from jaxkern.mosaic.lanes import (
    LaneOffsets,
    alternate_lanes,
    load_lanes,
    squares_in_lanes,
    store,
    store_lanes,
    sum_in_lanes,
    sum_lanes,
    sync_block,
    sync_warpgroup,
    uniform,
)
from jaxkern.mosaic.launch import LANES, grid_axes, interpreted
from jaxkern.ops.norm.windows import Windows

BLOCK, _CLUSTER, _WARPGROUP = grid_axes("block", "cluster", "warpgroup")
_WARP = 32
_WARPS = LANES // _WARP
_BOXES = 4
"""Mailboxes, used in turns. A block may have sent a row's sums, and the next row's, while another
still reads those of the row before; three would do where no row is sent ahead."""


# Short rows


@dataclasses.dataclass(frozen=True)
class Tile:
    """`rows` rows of `size` elements in the registers of a warpgroup; a row is in one warp."""

    rows: int
    size: int
    vec: int

    def __post_init__(self) -> None:
        assert self.size % (self.lanes * self.vec) == 0, self
        assert self.rows % self.unit == 0, self

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return min(_WARP, self.size // self.vec)

    @property
    def unit(self) -> int:
        """Rows that the warps hold side by side."""
        return _WARPS * (_WARP // self.lanes)

    @property
    def pieces(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES

    @property
    def held(self) -> int:
        """Elements of a lane."""
        return self.rows * self.size // LANES

    @property
    def own(self) -> int:
        """Elements of a parameter that a lane reads."""
        return self.size // self.lanes

    @property
    def launch(self) -> dict[str, Any]:
        return {}

    @property
    def scratch_bytes(self) -> int:
        """The most that :meth:`scratch` takes."""
        return 4 * self.unit * self.size

    def scratch(self, sums: int) -> dict[str, Any]:
        """Where the warps add up what they have of the sums over rows."""
        return {"columns": plgpu.SMEM((self.unit, self.size), jnp.float32)} if sums else {}

    def place(self, space: Any) -> "TilePlace":
        return TilePlace(self, space)

    def rows_of(self, m: int) -> int:
        """How many tiles cover `m` rows; the last one ends at the last row."""
        return -(-m // self.rows)

    @property
    def copies(self) -> int:
        """TMA copies that a warpgroup's part of a row takes."""
        return 1

    def boxes(self, boxes: int) -> tuple[int, ...]:
        """Shape of a row in global memory, `boxes` boxes, for TMA copies."""
        return (boxes, self.size // boxes)

    def slot(self, boxes: int) -> tuple[int, ...]:
        """Shape of what a warpgroup has of a row, in shared memory."""
        return (self.rows, boxes, self.size // boxes)


@functools.cache
def _tiled_layout(tile: Tile) -> Any:
    lanes, deep = tile.lanes, _WARP // tile.lanes
    width = lanes * tile.vec
    layout = mgpu.TiledLayout(
        fragmented_array.Tiling(((tile.unit, width), (deep, width), (1, tile.vec))),
        (-6,),
        (-4, -3),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def tile_for(size: int, elements: int, itemsize: int) -> Tile | None:
    """A tile of about `elements` elements, or None if `size` does not fit a warp's lanes."""
    vec = 16 // itemsize
    while vec:
        lanes = min(_WARP, size // vec)
        if lanes and _WARP % lanes == 0 and size % (lanes * vec) == 0:
            unit = _WARPS * (_WARP // lanes)
            return Tile(max(1, elements // (unit * size)) * unit, size, vec)
        vec //= 2
    return None


class TilePlace:
    """A tile in a kernel."""

    def __init__(self, tile: Tile, space: Any):
        self.tile, self.layout = tile, _tiled_layout(tile)
        self.space, self.each = space, range(1)

    def begin(self) -> None:
        pass

    def row(self, step: Any, m: int) -> Any:
        return jnp.minimum(step * self.tile.rows, m - self.tile.rows)

    def _rows(self, ref: Any, row: Any, group: Any) -> Any:
        return ref.at[pl.ds(row, self.tile.rows), group]

    def load(self, ref: Any, row: Any, group: Any, j: int) -> jax.Array:
        del j
        return plgpu.load(self._rows(ref, row, group), layout=self.layout, optimized=False)

    def load_shared(self, slot: Any, j: int) -> jax.Array:
        del j
        shape = (self.tile.rows, self.tile.size)
        if interpreted():
            return slot[...].reshape(shape)
        return plgpu.load(slot.reshape(*shape), layout=self.layout, optimized=False)

    def copies(self, ref: Any, slot: Any, row: Any, group: Any) -> list[tuple[Any, Any]]:
        """What the TMA copies, from where to where."""
        return [(self._rows(ref, row, group), slot)]

    def load_param(self, ref: Any, group: Any, j: int) -> jax.Array:
        del j
        return self._broadcast(self.load_row(ref.at[group]).astype(jnp.float32), 1)

    def load_row(self, ref: Any) -> jax.Array:
        """(size,), every warp all of it."""
        return plgpu.load(ref, layout=self.layout.reduce((0,)), optimized=False)

    def load_stat(self, ref: Any, row: Any, group: Any) -> jax.Array:
        stat = self._rows(ref, row, group)
        return plgpu.load(stat, layout=self.layout.reduce((1,)), optimized=False)

    def store(self, ref: Any, row: Any, group: Any, j: int, value: jax.Array) -> None:
        del j
        store(self._rows(ref, row, group), value.astype(ref.dtype))

    def store_stat(self, ref: Any, row: Any, group: Any, value: jax.Array) -> None:
        store(self._rows(ref, row, group), value)

    def store_sum(self, ref: Any, part: Any, group: Any, j: int, value: jax.Array) -> None:
        del j
        columns = self.space.columns
        store(columns, value)
        sync_warpgroup()
        rows = [self.load_row(columns.at[r]) for r in range(self.tile.unit)]
        sync_warpgroup()
        store(ref.at[part, group], sum(rows[1:], start=rows[0]))

    def new(self, step: Any, m: int, value: jax.Array) -> jax.Array:
        """`value` with zeros in rows that the tile before had."""
        if m % self.tile.rows == 0:
            return value
        shape = (self.tile.rows, self.tile.size)
        index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.layout)
        index = index + self.row(step, m)
        return jnp.where(index >= step * self.tile.rows, value, self.zeros())

    def zeros(self, rows: int | None = None) -> jax.Array:
        shape = (rows or self.tile.rows, self.tile.size)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.layout)

    def zero_sum(self) -> jax.Array:
        return self.zeros(self.tile.unit)

    def add(self, total: jax.Array, value: jax.Array) -> jax.Array:
        """`total` and the rows of `value` that the same lanes hold."""
        for first in range(0, self.tile.rows, self.tile.unit):
            part = value[first : first + self.tile.unit]
            total = plgpu.layout_cast(total + plgpu.layout_cast(part, self.layout), self.layout)
        return total

    def lane_sum(self, j: int, value: jax.Array) -> jax.Array:
        """What may be added up over pieces before :meth:`totals`."""
        del j
        return value

    def totals(self, k: Any, values: list[jax.Array]) -> list[jax.Array]:
        """(rows,), the sums of each of `values` over a row."""
        del k
        return [jnp.sum(v, axis=1) for v in values]

    def statistics(self, k: Any, values: list[jax.Array], centered: bool) -> tuple[Any, jax.Array]:
        """(rows,), a row's mean, None if not `centered`, and the mean square apart from it."""
        [value], mean = values, None
        if centered:
            mean = self.totals(k, [value])[0] * (1 / self.tile.size)
            value = value - self.spread(mean)
        return mean, self.totals(k, [value * value])[0] * (1 / self.tile.size)

    def spread(self, value: jax.Array) -> jax.Array:
        return self._broadcast(value, 0)

    def _broadcast(self, value: jax.Array, axis: int) -> jax.Array:
        shape = (self.tile.rows, self.tile.size)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, (axis,)), self.layout)


# Long rows


@dataclasses.dataclass(frozen=True)
class Strip:
    """One row, spread over `warpgroups` of each of `blocks` of a cluster.

    Each has `pieces` of its windows. Windows beyond the row's last repeat it, masked in sums.

    Attributes:
      windows: of the row, padded where it is shorter than a window.
      n: elements of the row without padding.
    """

    windows: Windows
    n: int
    warpgroups: int
    blocks: int

    def __post_init__(self) -> None:
        parts = self.warpgroups * self.blocks
        assert parts & (parts - 1) == 0, self

    @property
    def pieces(self) -> int:
        return -(-self.windows.count // (self.warpgroups * self.blocks))

    @property
    def threads(self) -> int:
        return self.warpgroups * LANES

    @property
    def held(self) -> int:
        return self.pieces * self.windows.size // LANES

    own = held

    @property
    def even(self) -> bool:
        """Whether no window meets another."""
        w = self.windows
        return self.pieces * self.warpgroups * self.blocks * w.size == w.n

    @property
    def launch(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.warpgroups > 1:
            options |= {"num_threads": self.warpgroups, "thread_name": _WARPGROUP}
        if self.blocks > 1:
            options |= {"cluster": (self.blocks,), "cluster_names": (_CLUSTER,)}
        return options

    @property
    def scratch_bytes(self) -> int:
        return 4 * _BOXES * self.warpgroups * self.blocks * 2 * _WARPS

    def scratch(self, sums: int) -> dict[str, Any]:
        """The mailboxes for up to `sums` sums."""
        parts = self.warpgroups * self.blocks
        scratch: dict[str, Any] = {"mail": plgpu.SMEM((_BOXES, parts, sums, _WARPS), jnp.float32)}
        if interpreted() and self.warpgroups > 1:
            scratch["met"] = plgpu.Barrier(num_arrivals=self.warpgroups)
        if self.blocks > 1:
            scratch["arrivals"] = plgpu.SMEM((_BOXES, 2), jnp.int32)
        return scratch

    def place(self, space: Any) -> "StripPlace":
        return StripPlace(self, space)

    def rows_of(self, m: int) -> int:
        return m

    @property
    def copies(self) -> int:
        return 1 if self.even else self.pieces

    def boxes(self, boxes: int) -> tuple[int, ...]:
        box = self.windows.n // boxes
        return (self.windows.count, self.windows.size // box, box) if self.even else (boxes, box)

    def slot(self, boxes: int) -> tuple[int, ...]:
        box = self.windows.n // boxes
        assert self.windows.size % box == 0, self
        return (self.pieces, self.windows.size // box, box)


class StripPlace:
    """A strip in a kernel."""

    def __init__(self, strip: Strip, space: Any):
        self.strip, self.space = strip, space
        self.windows, self.layout = strip.windows, strip.windows.layout
        self.each = range(strip.pieces)
        self.warpgroup = lax.axis_index(_WARPGROUP) if strip.warpgroups > 1 else 0
        self.rank = self.warpgroup
        if strip.blocks > 1:
            self.rank = self.rank + lax.axis_index(_CLUSTER) * strip.warpgroups

    def begin(self) -> None:
        if self.strip.blocks > 1:
            start_arrivals([self.space.arrivals.at[i] for i in range(_BOXES)])

    def _index(self, j: int) -> Any:
        return self.rank * self.strip.pieces + j

    def _window(self, ref: Any, j: int) -> Any:
        return ref.at[pl.ds(self._start(j), self.windows.size)]

    def _start(self, j: int) -> Any:
        size = self.windows.size
        return self._index(j) * size if self.strip.even else self.windows.start(self._index(j))

    def row(self, step: Any, m: int) -> Any:
        del m
        return step

    def load(self, ref: Any, row: Any, group: Any, j: int) -> jax.Array:
        window = self._window(ref.at[row, group], j)
        return plgpu.load(window, layout=self.layout, optimized=False)

    def load_shared(self, slot: Any, j: int) -> jax.Array:
        if interpreted():
            return slot[j].reshape(-1)
        flat = slot.at[j].reshape(self.windows.size)
        return plgpu.load(flat, layout=self.layout, optimized=False)

    def copies(self, ref: Any, slot: Any, row: Any, group: Any) -> list[tuple[Any, Any]]:
        if self.strip.even:
            own = pl.ds(self._index(0), self.strip.pieces)
            return [(ref.at[row, group, own], slot)]
        *_, count, box = slot.shape
        return [
            (ref.at[row, group, pl.ds(self._start(j) // box, count)], slot.at[j]) for j in self.each
        ]

    def load_param(self, ref: Any, group: Any, j: int) -> jax.Array:
        window = self._window(ref.at[group], j)
        return plgpu.load(window, layout=self.layout, optimized=False).astype(jnp.float32)

    def load_own(self, ref: Any) -> jax.Array:
        """A piece (size,) in this warpgroup's shared memory."""
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_stat(self, ref: Any, row: Any, group: Any) -> jax.Array:
        return ref[row, group]

    def store(self, ref: Any, row: Any, group: Any, j: int, value: jax.Array) -> None:
        self._window(ref.at[row, group], j)[...] = value.astype(ref.dtype)

    def store_stat(self, ref: Any, row: Any, group: Any, value: jax.Array) -> None:
        ref[row, group] = value

    def store_sum(self, ref: Any, part: Any, group: Any, j: int, value: jax.Array) -> None:
        self.store(ref, part, group, j, value)

    def lane_sum(self, j: int, value: jax.Array) -> jax.Array:
        """(LANES,): sums of what is in no other window and not beyond the row's end."""
        w, strip = self.windows, self.strip
        if not strip.even or strip.n < w.n:
            column = plgpu.broadcasted_iota(jnp.int32, (w.size,), 0, layout=w.layout)
            column = column + w.start(self._index(j))
            kept = column >= self._index(j) * w.size
            if strip.n < w.n:
                kept = kept & (column < strip.n)
            value = jnp.where(kept, value, self.zeros())
        return sum_in_lanes([value], w.vec)

    def new(self, step: Any, m: int, value: jax.Array) -> jax.Array:
        del step, m
        return value

    def zeros(self) -> jax.Array:
        return self.windows.full(0.0)

    zero_sum = zeros

    def add(self, total: jax.Array, value: jax.Array) -> jax.Array:
        return total + value

    @property
    def _whole(self) -> bool:
        """Whether all lanes hold the same number of the row's elements, each once."""
        return self.strip.even and self.strip.n == self.windows.n

    def totals(self, k: Any, values: list[jax.Array]) -> list[jax.Array]:
        """The sums of one or two `values` (LANES,) over the row; `k` exchanges were before."""
        self._send_sums(k, values)
        return [self._received_sum(k, i) for i in range(len(values))]

    def statistics(self, k: Any, values: list[jax.Array], centered: bool) -> tuple[Any, jax.Array]:
        """The row's mean, None if not `centered`, and its mean square apart from it."""
        if centered and not self._whole:
            mean = self.totals(2 * k, [self._lane_total(values)])[0] * (1 / self.strip.n)
            apart = [v - mean for v in values]
            squares = self._lane_total([v * v for v in apart])
            return mean, self.totals(2 * k + 1, [squares])[0] * (1 / self.strip.n)
        self.send(k, values, centered)
        return self.receive(k, centered)

    def send(self, k: Any, values: list[jax.Array], centered: bool) -> None:
        """Sends what the other warps need for :meth:`receive`."""
        if not centered:
            self._send_sums(k, [self._lane_total([v * v for v in values])])
            return
        # Of a warp's elements, the mean and the squares around it: sums around a mean that is far
        # from the row's lose nothing, as the difference is made up for in the end.
        assert self._whole
        over_warp = functools.partial(sum_lanes, distances=(1, 2, 4, 8, 16))
        vec = self.windows.vec
        [mean] = over_warp([sum_in_lanes(values, vec)])
        mean = mean * (1 / self._per_warp)
        [squares] = over_warp([squares_in_lanes(values, mean, vec)])
        self._post(k, alternate_lanes(mean, squares), 2)

    def receive(self, k: Any, centered: bool) -> tuple[Any, jax.Array]:
        """:meth:`statistics` of what was sent."""
        if not centered:
            return None, self._received_sum(k, 0) * (1 / self.strip.n)
        means, squares = (self._posted(k, i) for i in range(2))
        mean = self._over_parts(means) * (self._per_warp / self.strip.n)
        apart = [m - mean for m in means]
        square = self._over_parts(
            [s + d * d * self._per_warp for s, d in zip(squares, apart, strict=True)]
        )
        square = square * (1 / self.strip.n)
        return uniform(mean), uniform(square)

    def _lane_total(self, values: list[jax.Array]) -> jax.Array:
        sums = [self.lane_sum(j, v) for j, v in zip(self.each, values, strict=True)]
        return sum(sums[1:], start=sums[0])

    @property
    def _per_warp(self) -> int:
        return self.strip.pieces * self.windows.size // _WARPS

    def _send_sums(self, k: Any, values: list[jax.Array]) -> None:
        # Of two, odd lanes hold the second.
        [held] = sum_lanes(values, (1, 2, 4, 8, 16))
        self._post(k, held, len(values))

    def _received_sum(self, k: Any, i: int) -> jax.Array:
        return uniform(self._over_parts(self._posted(k, i)))

    def _over_parts(self, reads: list[jax.Array]) -> jax.Array:
        """(LANES,), the same everywhere: the sum over what the warps posted."""
        total = sum(reads[1:], start=reads[0])
        return sum_lanes([total], self._distances)[0]

    def _post(self, k: Any, held: jax.Array, count: int) -> None:
        """Each warp posts its `count` sums to all blocks; lane l holds number l mod count."""
        strip = self.strip
        parts = strip.warpgroups * strip.blocks
        slot = lax.rem(jnp.int32(k), _BOXES)
        box = self.space.mail.at[slot, self.rank]  # (count, warps)
        offsets = LaneOffsets(((_WARP, _WARPS, 1), (1, count, _WARPS)))
        if strip.blocks > 1:
            arrivals = self.space.arrivals.at[slot]
            expect_arrivals(arrivals, 4 * parts * count * _WARPS)
            send_in_cluster(box, arrivals, offsets, held, parts=count, blocks=strip.blocks)
        else:
            store_lanes(box, offsets, [held])
            self._meet()

    @property
    def _side(self) -> int:
        """Parts whose sums the lanes of a warp read at a time, one each."""
        return min(self.strip.warpgroups * self.strip.blocks, _WARP // _WARPS)

    @property
    def _distances(self) -> tuple[int, ...]:
        return tuple(1 << b for b in range((_WARPS * self._side).bit_length() - 1))

    def _posted(self, k: Any, i: int) -> list[jax.Array]:
        """The `i`-th sums of all warps, by groups of parts."""
        slot = lax.rem(jnp.int32(k), _BOXES)
        if self.strip.blocks > 1 and i == 0:
            parity = lax.rem(lax.div(jnp.int32(k), _BOXES), 2)
            wait_for_arrivals(self.space.arrivals.at[slot], parity)
        mail = self.space.mail.at[slot]
        parts, sums, _ = mail.shape
        reads = []
        for first in range(0, parts, self._side):
            offsets = LaneOffsets(
                ((1, _WARPS, 1), (_WARPS, self._side, sums * _WARPS)),
                start=(first * sums + i) * _WARPS,
            )
            reads += load_lanes(mail, offsets, volatile=True)
        return reads

    def _meet(self) -> None:
        if not interpreted():
            sync_block()
        elif self.strip.warpgroups > 1:
            plgpu.barrier_arrive(self.space.met)
            plgpu.barrier_wait(self.space.met)

    def spread(self, value: jax.Array) -> jax.Array:
        return value
