"""A ring of stages in shared memory, which are filled ahead of the work.

The TMA copies where a GPU has one (Hopper and newer), and a copy arrives at the stage's barrier. On
older GPUs the lanes copy with cp.async: what they start between two calls of :func:`close_copies`
is a group, and they wait until all groups but the newest are there.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from jaxkern.lowering import target
from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import REF, VECTOR_BYTES, i32, inline_mlir, ptx


@dataclasses.dataclass(frozen=True)
class Ring:
    """The stages of a warpgroup: each holds a tile of every array.

    The i-th copy goes to stage i mod `stages`. Before a stage is copied to again, all lanes must be
    done with it (:func:`release_stage`). Whether or not a copy is left to start,
    :func:`close_copies` follows; when the i-th copy is waited for, there were `stages` − 1 of its
    calls after that of the i-th.

    Attributes:
      tiles: the stages of each array, (warpgroups · stages, ...), in shared memory.
      arrived: the barriers, on which the arrays' copies arrive; ``None`` where lanes copy.
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

        Sources begin and end at multiples of 16 bytes along the innermost axis; on an H200, others
        end in CUDA_ERROR_ILLEGAL_INSTRUCTION.

        Args:
          i: counts the copies.
          sources: the name of each array, and its tile in global memory.
          at: where in the stage the tiles go, by default from its beginning to its end.
        """
        stage = self.stage(i)
        for name, source in sources:
            into = self.tiles[name].at[(stage, *at)]
            start_copy(source, into, self._barrier(stage))

    def wait(self, stage: Any) -> None:
        """Waits until the copy to `stage` has arrived."""
        wait_for_copy(self._barrier(stage), self.stages - 1)

    def _barrier(self, stage: Any) -> Any:
        return None if self.arrived is None else self.arrived.at[stage]


def tma() -> bool:
    """Whether the TMA copies; where kernels are interpreted, its copies are."""
    gpu = target.current()
    return gpu is None or gpu.tma


def copy_barriers(arrivals: int, count: int) -> dict[str, Any]:
    """Scratch memory ``arrived``, `count` barriers of `arrivals` copies each; none without TMA."""
    if not tma():
        return {}
    return {"arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)}


def start_copy(source: Any, into: Any, barrier: Any) -> None:
    """Starts a copy from global to shared memory.

    Args:
      source: the tile in global memory, its rows whole multiples of 16 bytes.
      into: as much shared memory.
      barrier: at which the copy arrives; ``None`` where lanes copy.
    """
    if barrier is not None:
        plgpu.copy_gmem_to_smem(source, into, barrier)
    else:
        inline_mlir(REF, REF)(_copy_by_lanes)(source, into)


def close_copies() -> None:
    """Ends a group of copies, of any number of them."""
    if not tma():
        ptx("cp.async.commit_group;")


def wait_for_copy(barrier: Any, later: int) -> None:
    """Waits for the copy at `barrier` or, where lanes copy, for all groups but `later` of them."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)
    else:
        ptx(f"cp.async.wait_group {later};")
        sync_warpgroup()


def release_stage() -> None:
    """Waits until the warpgroup's lanes have read and written what was theirs in shared memory.

    What the TMA copies to shared memory afterwards does not overtake them.
    """
    if tma():
        plgpu.commit_smem()
    else:
        sync_warpgroup()


def _copy_by_lanes(source: Any, into: Any) -> None:
    """Has each lane start its share of a copy, 16 bytes at a time."""
    from_type, to_type = ir.MemRefType(source.type), ir.MemRefType(into.type)
    shape, dtype = tuple(to_type.shape), to_type.element_type
    assert tuple(from_type.shape) == shape, (from_type, to_type)
    from_strides, to_strides = (t.get_strides_and_offset()[0] for t in (from_type, to_type))
    vector = VECTOR_BYTES * 8 // mgpu_utils.bitwidth(dtype)
    assert shape[-1] % vector == 0, (from_type, to_type)
    assert from_strides[-1] == to_strides[-1] == 1, (from_type, to_type)
    units = (*shape[:-1], shape[-1] // vector)
    lane = arith.remui(mgpu_utils.thread_idx(), i32(LANES))
    outside = llvm.PointerType.get(address_space=1)
    source = llvm.addrspacecast(outside, mgpu_utils.memref_ptr(source))
    into = mgpu_utils.memref_ptr(into)

    def copy(unit: Any) -> None:
        start, end = i32(0), i32(0)
        for axis in reversed(range(len(units))):
            size = vector if axis == len(units) - 1 else 1
            index = arith.remui(unit, i32(units[axis]))
            unit = arith.divui(unit, i32(units[axis]))
            start = arith.addi(start, arith.muli(index, i32(size * from_strides[axis])))
            end = arith.addi(end, arith.muli(index, i32(size * to_strides[axis])))
        start = arith.extui(ir.IntegerType.get_signless(64), start)
        nvvm.cp_async_shared_global(
            mgpu_utils.getelementptr(into, [end], dtype),
            mgpu_utils.getelementptr(source, [start], dtype),
            VECTOR_BYTES,
            nvvm.LoadCacheModifierKind.CG,
        )

    count = math.prod(units)
    for first in range(0, count, LANES):
        unit = arith.addi(lane, i32(first))
        if first + LANES <= count:
            copy(unit)
        else:
            some = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, unit, i32(count)))
            with ir.InsertionPoint(some.then_block):
                copy(unit)
                scf.yield_([])


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
    barriers = copy_barriers(len(tiles), stages)
    return scratch | {prefix + name: barrier for name, barrier in barriers.items()}


def copied_channels(channels: int, arrays: Iterable[jax.Array]) -> int:
    """The least number of channels, from `channels` on, of which the TMA can copy LANES.

    The rows of `arrays` are then whole multiples of 16 bytes.
    """
    align = 16 // min(array.dtype.itemsize for array in arrays)
    return -(-max(channels, LANES) // align) * align
