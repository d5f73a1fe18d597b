"""Where a block's rows and parameters come from: TMA rings, registers or global memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import once_read, widened
from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.mosaic.ring import close_copies, copy_barriers, start_copy, wait_for_copy
from jaxkern.ops.curves import Functions, kernel_functions
from jaxkern.ops.norm.long_row import LongRow
from jaxkern.ops.norm.pointwise import Options
from jaxkern.ops.norm.tiles import TMA_BOX, Backward, Forward


@dataclasses.dataclass(frozen=True)
class Block:
    """What the kernels' code works with.

    Attributes:
      options: of the pass.
      tile: of the pass, :class:`Forward` or :class:`Backward`.
      regs: what loads, stores and sums the tile's windows: of short rows or of a long row.
      m: rows.
      cluster: index of this block's cluster among those that go through the group's rows; a block
        alone is a cluster of one.
      group: which group of each row.
      ref: arrays in global memory by name, (m, groups, group size) and of statistics (m, groups);
        None where absent.
      smem: arrays in shared memory by name.
    """

    options: Options
    tile: Any
    regs: Any
    m: int
    cluster: Any
    group: Any
    ref: Any
    smem: Any

    @property
    def curve_functions(self) -> Functions:
        return kernel_functions(self.options.x_dtype == "float32", self.regs.layout)

    def wide(self, x: Any) -> Any:
        """A window in fp32, None for None."""
        if x is None:
            return None
        if x.dtype == jnp.bfloat16:
            return widened(x, self.regs.layout)
        return x.astype(jnp.float32)


class TileStream:
    """The tiles of a block, from a ring in shared memory or from global memory.

    Each warpgroup has a ring of its own for its windows of a row. The warpgroups' copies into a
    stage arrive at one barrier.

    Attributes:
      steps: how many tiles the block goes through.
    """

    def __init__(self, block: Block, names: list[str]):
        self.block, self.tile = block, block.tile
        self.names = [name for name in names if getattr(block.ref, name) is not None]
        tile = block.tile
        self.stride = tile.clusters or tile.num_clusters(block.m)
        self.first, longest = block.cluster, None
        if len(tile.waves) > 1:
            wave, first = lax.div(block.cluster, tile.clusters), 0
            self.first, longest = lax.rem(block.cluster, tile.clusters), tile.waves[0]
            for i, length in enumerate(tile.waves[1:], 1):
                first += tile.waves[i - 1]
                self.first += jnp.where(wave == i, first * tile.clusters, 0)
                longest = jnp.where(wave == i, length, longest)
        tiles = tile.rows.tiles(block.m)
        self.steps = lax.div(tiles - self.first + self.stride - 1, self.stride)
        if longest is not None:
            self.steps = jnp.clip(self.steps, 0, longest)

    def index(self, k: Any) -> Any:
        """Which tile of the group is the block's `k`-th."""
        return self.first + k * self.stride

    def row(self, k: Any) -> Any:
        """The first row of the `k`-th tile."""
        return self.block.regs.first_row(self.index(k), self.block.m)

    def _stage(self, k: Any) -> Any:
        return lax.rem(k, self.tile.stages)

    def start(self) -> None:
        """Fills the ring."""
        if self.tile.stages:
            pl.loop(0, self.tile.stages)(self._fetch)

    def wait(self, k: Any) -> None:
        """Until the `k`-th tile is in its stage."""
        if self.tile.stages:
            wait_for_copy(self._barrier(self._stage(k)), self.tile.stages - 1)

    def refill(self, k: Any) -> None:
        """Starts the copies into the stage of the `k`-th tile, which no lane reads any more."""
        if self.tile.stages:
            sync_warpgroup()
            self._fetch(k + self.tile.stages)

    def _barrier(self, stage: Any) -> Any:
        arrived = getattr(self.block.smem, "arrived", None)
        return None if arrived is None else arrived.at[stage]

    def _fetch(self, k: Any) -> None:
        regs, smem = self.block.regs, self.block.smem

        @pl.when(k < self.steps)
        def _():
            row, stage = self.row(k), self._stage(k)
            for name in self.names:
                into = getattr(smem, name).at[regs.warpgroup, stage]
                source = getattr(self.block.ref, name)
                for part, target in regs.tma_copies(source, into, row, self.block.group):
                    start_copy(part, target, self._barrier(stage))

        close_copies()

    def read(self, name: str, k: Any, j: int, zero: Any = 0) -> Any:
        """Window `j` of the `k`-th tile in fp32, None of an array that is absent.

        Args:
          name, k, j: which.
          zero: added to an index.
        """
        if name not in self.names:
            return None
        block, regs = self.block, self.block.regs
        if self.tile.stages:
            stage = getattr(block.smem, name).at[regs.warpgroup, self._stage(k) + zero]
            return block.wide(regs.load_stage(stage, j))
        ref = getattr(block.ref, name)
        return block.wide(regs.load(ref, self.row(k) + zero, block.group, j))


def ring_scratch(
    tile: Forward | Backward, inputs: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The rings' shared memory; reshapes the inputs that go through them into boxes of the TMA."""
    if not tile.stages:
        return {}
    rows = tile.rows
    names = [name for name in names if name in inputs]
    arrivals = len(names) * rows.warpgroups * rows.copies
    scratch = copy_barriers(arrivals, tile.stages)
    for name in names:
        m, groups, width = inputs[name].shape
        boxes = width // TMA_BOX
        stages = (rows.warpgroups, tile.stages, *rows.stage_shape(boxes))
        scratch[name] = plgpu.SMEM(stages, inputs[name].dtype)
        inputs[name] = inputs[name].reshape(m, groups, *rows.gmem_shape(boxes))
    return scratch


class Params:
    """w + o and b of a block's windows in fp32, from where the tile keeps them."""

    def __init__(self, block: Block):
        self.block, regs = block, block.regs
        for name in ("weight", "bias"):
            kept = self._in_shared_memory(name)
            if kept is not None:
                for j in regs.windows:
                    param = regs.load_param(getattr(block.ref, name), block.group, j)
                    kept[regs.warpgroup, j] = param.astype(kept.dtype)
        self.kept = None
        if block.tile.params_in == "registers":
            self.kept = [once_read(self._read(j, 0)) for j in regs.windows]

    def window(self, j: int, zero: Any = 0) -> tuple[Any, Any]:
        """w + o and b of window `j`; None where there are none. `zero` is added to an index."""
        return self._read(j, zero) if self.kept is None else self.kept[j]

    def _read(self, j: int, zero: Any) -> tuple[Any, Any]:
        scale, bias = (self._param(name, j, zero) for name in ("weight", "bias"))
        if scale is not None and self.block.options.weight_offset:
            scale = scale + self.block.options.weight_offset
        return scale, bias

    def _param(self, name: str, j: int, zero: Any) -> Any:
        block, regs = self.block, self.block.regs
        ref, kept = getattr(block.ref, name), self._in_shared_memory(name)
        if ref is None:
            return None
        if kept is not None:
            return block.wide(regs.load_window(kept.at[regs.warpgroup, j + zero]))
        return regs.load_param(ref, block.group + zero, j)

    def _in_shared_memory(self, name: str) -> Any:
        return getattr(self.block.smem, f"preloaded_{name}", None)


def param_scratch(
    tile: Forward | Backward, inputs: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Shared memory in which each warpgroup keeps its windows of the parameters `names`."""
    rows = tile.rows
    if tile.params_in != "shared" or not isinstance(rows, LongRow):
        return {}
    shape = (rows.warpgroups, rows.windows_per_warpgroup, rows.windows.size)
    return {f"preloaded_{k}": plgpu.SMEM(shape, inputs[k].dtype) for k in names if k in inputs}
