"""Short rows: several in the registers of a block of one warpgroup, each row within one warp.

Sums over a row are shuffles between the lanes of a warp, and no warp waits for another. Only sums
over rows, the gradients of the parameters, are added up over the four warps, once a block, in
shared memory.
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

from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.mosaic.launch import LANES, interpreted
from jaxkern.ops.norm.registers import store

_WARP = 32
_WARPS = LANES // _WARP


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
        return _WARPS * (_WARP // self.lanes)

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
        """How many tiles cover `m` rows; the last one ends at the last row."""
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
            unit = _WARPS * (_WARP // lanes)
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

    A tile is one window, (rows, size), and a row's statistic (rows,). The methods are those of
    :class:`jaxkern.ops.norm.long_row.LongRowRegisters`.
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

    def statistics(self, k: Any, values: list[jax.Array], centered: bool) -> tuple[Any, jax.Array]:
        [value], mean = values, None
        if centered:
            mean = self.row_sums(k, [value])[0] * (1 / self.rows.size)
            value = value - self.broadcast(mean)
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
