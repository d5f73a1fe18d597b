"""A ring of stages in shared memory, which are filled ahead of the work.

The TMA copies where a GPU has one (Hopper and newer), and a copy arrives at the stage's barrier. On
older GPUs the lanes copy with cp.async, and on all of them where rows begin at any element: what
they start between two calls of :func:`close_copies` is a group, and they wait until all groups but
the newest are there.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from jaxkern.core import target
from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import REF, VECTOR_BYTES, i32, inline_mlir, ptx, sync_warpgroup
from jaxkern.mosaic.launch import LANES


@dataclasses.dataclass(frozen=True)
class Ring:
    """The stages of a warpgroup: each holds a tile of every array.

    The i-th copy goes to stage i mod `stages`. Before a stage is copied to again, all lanes must be
    done with it (:func:`release_stage`). Whether or not a copy is left to start,
    :func:`close_copies` follows; it is called `stages` − 1 more times before the i-th copy is
    waited for.

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

        What the TMA copies begins and ends at multiples of 16 bytes along the innermost axis; on an
        H200, the rest ends in CUDA_ERROR_ILLEGAL_INSTRUCTION.

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


def copy_barriers(arrivals: int, count: int, by_lanes: bool = False) -> dict[str, Any]:
    """Scratch memory ``arrived``, `count` barriers of `arrivals` copies each; none without TMA."""
    if by_lanes or not tma():
        return {}
    return {"arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)}


def start_copy(source: Any, into: Any, barrier: Any) -> None:
    """Starts a copy from global to shared memory.

    Args:
      source: the tile in global memory, its rows whole multiples of 16 bytes.
      into: as much shared memory. Where lanes copy, it may have the rows of :func:`lanes_row`, and
        the rows of `source` then begin at any element.
      barrier: at which the copy arrives; ``None`` where lanes copy.
    """
    if barrier is not None:
        plgpu.copy_gmem_to_smem(source, into, barrier)
    elif interpreted():
        into[...] = source[...]
    else:
        inline_mlir(REF, REF)(_copy_by_lanes)(source, into)


def close_copies(by_lanes: bool = False) -> None:
    """Ends a group of copies, of any number of them.

    Here as below, `by_lanes` says that lanes copy, which they do anyway where there is no TMA.
    """
    if (by_lanes or not tma()) and not interpreted():
        ptx("cp.async.commit_group;")


def wait_for_copy(barrier: Any, later: int) -> None:
    """Waits for the copy at `barrier` or, where lanes copy, for all groups but `later` of them."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)
    elif not interpreted():
        ptx(f"cp.async.wait_group {later};")
        sync_warpgroup()


def release_stage(by_lanes: bool = False) -> None:
    """Waits until the warpgroup's lanes have read and written what was theirs in shared memory.

    What the TMA copies to shared memory afterwards does not overtake them.
    """
    if by_lanes or not tma():
        sync_warpgroup()
    else:
        plgpu.commit_smem()


def lanes_row(width: int, stride: int, dtype: Any) -> int:
    """The elements of a stage's row into which lanes copy `width` elements.

    They copy whole units of 16 bytes, from the one that holds the first element to the one that
    holds the last; the first element is then at :func:`lanes_start`. XLA's buffers begin and end at
    units, so that none reaches outside.

    Args:
      width: of the row.
      stride: elements from one row in memory to the next; a row begins at a multiple of its
        greatest common divisor with a unit's elements.
      dtype: of the array.
    """
    unit = VECTOR_BYTES // np.dtype(dtype).itemsize
    most = unit - math.gcd(unit, stride)  # elements before the first
    return -(-(width + most) // unit) * unit


def lanes_start(offset: Any, dtype: Any) -> Any:
    """Index in a row of :func:`lanes_row` of the element at `offset` in the array.

    It is right for an `offset` that overflowed, too.
    """
    return offset & (VECTOR_BYTES // np.dtype(dtype).itemsize - 1)


def _copy_by_lanes(source: Any, into: Any) -> None:
    """Has each lane start its share of a copy, 16 bytes at a time."""
    from_type, to_type = ir.MemRefType(source.type), ir.MemRefType(into.type)
    (*rows, width), dtype = tuple(from_type.shape), to_type.element_type
    assert (*rows, to_type.shape[-1]) == tuple(to_type.shape), (from_type, to_type)
    from_strides, to_strides = (t.get_strides_and_offset()[0] for t in (from_type, to_type))
    vector = VECTOR_BYTES * 8 // mgpu_utils.bitwidth(dtype)
    assert to_type.shape[-1] % vector == 0, (from_type, to_type)
    assert from_strides[-1] == to_strides[-1] == 1, (from_type, to_type)
    aligned = width == to_type.shape[-1]
    lane = arith.remui(mgpu_utils.thread_idx(), i32(LANES))
    outside, i64 = llvm.PointerType.get(address_space=1), ir.IntegerType.get_signless(64)
    source = llvm.addrspacecast(outside, mgpu_utils.memref_ptr(source))
    into = mgpu_utils.memref_ptr(into)

    def copy(unit: Any, first: int, units: int) -> None:
        column = arith.muli(arith.remui(unit, i32(units)), i32(vector))
        column = arith.addi(column, i32(first * vector))
        unit, start, end = arith.divui(unit, i32(units)), i32(0), column
        for axis in reversed(range(len(rows))):
            index = arith.remui(unit, i32(rows[axis]))
            unit = arith.divui(unit, i32(rows[axis]))
            start = arith.addi(start, arith.muli(index, i32(from_strides[axis])))
            end = arith.addi(end, arith.muli(index, i32(to_strides[axis])))
        row, before = mgpu_utils.getelementptr(source, [arith.extui(i64, start)], dtype), None
        if not aligned:
            begin = llvm.ptrtoint(i64, row)
            before = arith.andi(begin, arith.constant(i64, VECTOR_BYTES - 1))  # bytes
            row = llvm.inttoptr(outside, arith.subi(begin, before))
        some = contextlib.nullcontext()
        if first:
            room = (first * vector - width) * VECTOR_BYTES // vector  # for the bytes before a row
            some = _where(arith.cmpi(arith.CmpIPredicate.ugt, before, arith.constant(i64, room)))
        with some:
            nvvm.cp_async_shared_global(
                mgpu_utils.getelementptr(into, [end], dtype),
                mgpu_utils.getelementptr(row, [column], dtype),
                VECTOR_BYTES,
                nvvm.LoadCacheModifierKind.CG,
            )

    # Units of a row that always hold an element; one more does where the row begins late in a unit.
    always = -(-width // vector)
    for first, units in ((0, always), (always, to_type.shape[-1] // vector - always)):
        count = math.prod(rows) * units
        for start in range(0, count, LANES):
            unit = arith.addi(lane, i32(start))
            some = contextlib.nullcontext()
            if start + LANES > count:
                some = _where(arith.cmpi(arith.CmpIPredicate.ult, unit, i32(count)))
            with some:
                copy(unit, first, units)


@contextlib.contextmanager
def _where(condition: Any) -> Iterator[None]:
    """Emits code that runs only in the lanes whose `condition` is true."""
    some = scf.IfOp(condition)
    with ir.InsertionPoint(some.then_block):
        yield
        scf.yield_([])


def ring_scratch(
    stages: int,
    tiles: dict[str, tuple[tuple[int, ...], Any]],
    by_lanes: bool = False,
) -> dict[str, Any]:
    """The shared memory of a ring, or of several that divide `stages` between them.

    Args:
      stages: of all rings together.
      tiles: shape and dtype of each array's tile.
      by_lanes: whether lanes copy.
    """
    scratch = {name: plgpu.SMEM((stages, *shape), dtype) for name, (shape, dtype) in tiles.items()}
    barriers = copy_barriers(len(tiles), stages, by_lanes)
    return scratch | barriers


def copied_channels(channels: int, arrays: Iterable[jax.Array]) -> int:
    """The least number of channels, from `channels` on, of which the TMA can copy LANES.

    The rows of `arrays` are then whole multiples of 16 bytes.
    """
    align = 16 // min(array.dtype.itemsize for array in arrays)
    return -(-max(channels, LANES) // align) * align
