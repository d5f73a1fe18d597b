"""Where a block's rows and parameters come from: TMA rings, registers or global memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import once_read, widened
from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.ops.norm.pointwise import Options
from jaxkern.ops.norm.rows import Strip
from jaxkern.ops.norm.tiles import BOX, Backward, Forward


class Rows:
    """The rows of a block's part, from a ring in shared memory or from global memory.

    Attributes:
      steps: how many rows, or tiles of rows, the part has.
    """

    def __init__(
        self,
        tile: Forward | Backward,
        place: Any,
        names: list[str],
        m: int,
        part: Any,
        group: Any,
        ref: Any,
        smem: Any,
    ):
        self.tile, self.place, self.m = tile, place, m
        self.part, self.group, self.ref, self.smem = part, group, ref, smem
        self.names = [name for name in names if getattr(ref, name) is not None]
        self.warpgroup = getattr(place, "warpgroup", 0)
        self.parts = tile.parts or tile.blocks(m)
        self.first, longest = part, None
        if len(tile.waves) > 1:
            wave, first = lax.div(part, tile.parts), 0
            self.first, longest = lax.rem(part, tile.parts), tile.waves[0]
            for i, length in enumerate(tile.waves[1:], 1):
                first += tile.waves[i - 1]
                self.first += jnp.where(wave == i, first * tile.parts, 0)
                longest = jnp.where(wave == i, length, longest)
        self.steps = lax.div(tile.rows.rows_of(m) - self.first + self.parts - 1, self.parts)
        if longest is not None:
            self.steps = jnp.clip(self.steps, 0, longest)

    def tile_of(self, k: Any) -> Any:
        """Which tile is the `k`-th of the part."""
        return self.first + k * self.parts

    def _slot(self, k: Any) -> Any:
        return lax.rem(k, self.tile.stages)

    def fetch(self, k: Any) -> None:
        """The `k`-th on its way to shared memory."""
        if not self.tile.stages:
            return

        @pl.when(k < self.steps)
        def _():
            row, slot = self.place.row(self.tile_of(k), self.m), self._slot(k)
            for name in self.names:
                into = getattr(self.smem, name).at[self.warpgroup, slot]
                copies = self.place.copies(getattr(self.ref, name), into, row, self.group)
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target, self.smem.arrived.at[slot])

    def refill(self, k: Any) -> None:
        """The slot of the `k`-th, which no lane reads any more, for one to come."""
        if self.tile.stages:
            sync_warpgroup()
            self.fetch(k + self.tile.stages)

    def start(self) -> None:
        if self.tile.stages:
            pl.loop(0, self.tile.stages)(self.fetch)

    def wait(self, k: Any) -> None:
        if self.tile.stages:
            plgpu.barrier_wait(self.smem.arrived.at[self._slot(k)])

    def read(self, name: str, k: Any, j: int, zero: Any = 0) -> Any:
        """Piece `j` of the `k`-th in fp32, None of an array that is absent."""
        if name not in self.names:
            return None
        if self.tile.stages:
            slot = getattr(self.smem, name).at[self.warpgroup, self._slot(k) + zero]
            return wide(self.place, self.place.load_shared(slot, j))
        row = self.place.row(self.tile_of(k), self.m) + zero
        return wide(self.place, self.place.load(getattr(self.ref, name), row, self.group, j))


def ring_scratch(
    tile: Forward | Backward, inputs: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The ring's shared memory; the inputs that go through it become arrays of boxes."""
    if not tile.stages:
        return {}
    rows = tile.rows
    warpgroups = rows.warpgroups if isinstance(rows, Strip) else 1
    names = [name for name in names if name in inputs]
    scratch: dict[str, Any] = {
        "arrived": plgpu.Barrier(
            num_arrivals=len(names) * warpgroups * rows.copies, num_barriers=tile.stages
        )
    }
    for name in names:
        m, groups, width = inputs[name].shape
        slots = (warpgroups, tile.stages, *rows.slot(width // BOX))
        scratch[name] = plgpu.SMEM(slots, inputs[name].dtype)
        inputs[name] = inputs[name].reshape(m, groups, *rows.boxes(width // BOX))
    return scratch


class Params:
    """w + o and b of a block's pieces in fp32, from where the tile keeps them."""

    def __init__(self, options: Options, keep: str, place: Any, group: Any, ref: Any, smem: Any):
        self.options, self.keep, self.place = options, keep, place
        self.group, self.ref, self.smem = group, ref, smem
        self.warpgroup = getattr(place, "warpgroup", 0)
        for name in ("weight", "bias"):
            own = getattr(smem, f"own_{name}", None)
            if own is not None:
                for j in place.each:
                    param = place.load_param(getattr(ref, name), group, j)
                    own[self.warpgroup, j] = param.astype(own.dtype)
        self.kept = None
        if keep == "registers":
            self.kept = [once_read(self._read(j, 0)) for j in place.each]

    def piece(self, j: int, zero: Any = 0) -> tuple[Any, Any]:
        """Of piece `j`; None where there are none."""
        return self._read(j, zero) if self.kept is None else self.kept[j]

    def _read(self, j: int, zero: Any) -> tuple[Any, Any]:
        scale, bias = (self._param(name, j, zero) for name in ("weight", "bias"))
        if scale is not None and self.options.weight_offset:
            scale = scale + self.options.weight_offset
        return scale, bias

    def _param(self, name: str, j: int, zero: Any) -> Any:
        if getattr(self.ref, name) is None:
            return None
        own = getattr(self.smem, f"own_{name}", None)
        if own is not None:
            return wide(self.place, self.place.load_own(own.at[self.warpgroup, j + zero]))
        return self.place.load_param(getattr(self.ref, name), self.group + zero, j)


def param_scratch(tile: Forward | Backward, inputs: dict[str, Any], names: list[str]) -> Any:
    """Where a block keeps its part of the parameters `names`."""
    rows = tile.rows
    if tile.weight != "shared" or not isinstance(rows, Strip):
        return {}
    shape = (rows.warpgroups, rows.pieces, rows.windows.size)
    return {f"own_{k}": plgpu.SMEM(shape, inputs[k].dtype) for k in names if k in inputs}


def wide(place: Any, x: Any) -> Any:
    """`x` in fp32, None for None."""
    if x is None:
        return None
    if x.dtype == jnp.bfloat16:
        return widened(x, place.layout)
    return x.astype(jnp.float32)
