"""A ring of stages in shared memory, which the TMA fills ahead of the work."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES


@dataclasses.dataclass(frozen=True)
class Ring:
    """The stages of a warpgroup: each holds a tile of every array, and has one barrier.

    The i-th copy goes to stage i mod `stages`. Before a stage is copied to again, all lanes must be
    done with it (``plgpu.commit_smem``).

    Attributes:
      tiles: the stages of each array, (warpgroups · stages, ...), in shared memory.
      arrived: the barriers, on which the arrays' copies arrive.
      stages: of the ring.
      first: the warpgroup's first stage; ``None`` where a block has one warpgroup.
    """

    tiles: dict[str, Any]
    arrived: Any
    stages: int
    first: Any = None

    def stage(self, i: Any) -> Any:
        """The stage of the i-th copy."""
        stage = lax.rem(i, self.stages)
        return stage if self.first is None else self.first + stage

    def copy(self, i: Any, sources: Iterable[tuple[str, Any]], at: tuple[Any, ...] = ()) -> None:
        """Starts the i-th copy.

        On an H200 a copy whose start along the innermost axis is not a multiple of 16 bytes ends in
        CUDA_ERROR_ILLEGAL_INSTRUCTION.

        Args:
          i: counts the copies.
          sources: the name of each array, and its tile in global memory.
          at: where in the stage the tiles go, by default from its beginning to its end.
        """
        stage = self.stage(i)
        for name, source in sources:
            target = self.tiles[name].at[(stage, *at)]
            plgpu.copy_gmem_to_smem(source, target, self.arrived.at[stage])

    def wait(self, stage: Any) -> None:
        """Waits until the copy to `stage` has arrived."""
        plgpu.barrier_wait(self.arrived.at[stage])


def ring_scratch(
    stages: int, tiles: dict[str, tuple[tuple[int, ...], Any]], prefix: str = ""
) -> dict[str, Any]:
    """The shared memory of a ring, or of as many rings as `stages` are enough for.

    Args:
      stages: of all rings together.
      tiles: shape and dtype of each array's tile.
      prefix: of the names.
    """
    scratch = {
        prefix + name: plgpu.SMEM((stages, *shape), dtype) for name, (shape, dtype) in tiles.items()
    }
    arrived = plgpu.Barrier(num_arrivals=len(tiles), num_barriers=stages)
    return {**scratch, f"{prefix}arrived": arrived}


def copied_channels(channels: int, arrays: Iterable[jax.Array]) -> int:
    """The least number of channels, from `channels` on, of which the TMA can copy LANES.

    The rows of `arrays` are then whole multiples of 16 bytes.
    """
    align = 16 // min(array.dtype.itemsize for array in arrays)
    return -(-max(channels, LANES) // align) * align
