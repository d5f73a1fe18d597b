"""Stores from one block of a cluster to others, and waits for them; not for the interpreter."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxkern.mosaic.lanes import LaneOffsets, pointer_of_lane
from jaxkern.mosaic.registers import REF, ROW, SCALAR, i32, inline_mlir, lane_value, ptx


def start_arrivals(refs: Sequence[Any]) -> None:
    """Makes `refs`, each (2,) int32 in shared memory, mbarriers of bytes that blocks send.

    At the start of a kernel; then in every round :func:`expect_arrivals`, :func:`send_in_cluster`
    of all that is expected, and :func:`wait_for_arrivals`. That neither fences nor waits for other
    writes, as a barrier of the cluster would.
    """

    @inline_mlir(*[REF] * len(refs))
    def start(*refs: Any) -> None:
        for ref in refs:
            nvvm.mbarrier_init(mgpu_utils.memref_ptr(ref), i32(1), predicate=_first_thread())

    start(*refs)
    ptx("fence.mbarrier_init.release.cluster;")
    ptx("barrier.cluster.arrive.aligned;")
    ptx("barrier.cluster.wait.aligned;")


def expect_arrivals(ref: Any, nbytes: int) -> None:
    """Sets how many bytes this block receives in this round."""

    @inline_mlir(REF)
    def expect(ref: Any) -> None:
        mgpu_utils.inline_ptx(
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};",
            _shared_address(mgpu_utils.memref_ptr(ref)),
            predicate=_first_thread(),
            has_side_effects=True,
        )

    expect(ref)


def send_in_cluster(
    ref: Any, arrivals: Any, offsets: LaneOffsets, value: jax.Array, *, parts: int, blocks: int
) -> None:
    """Stores `value` (LANES,), fp32, to the shared memory of all `blocks` of a cluster.

    Lane l of each warp stores 4 bytes to block ⌊l / parts⌋ while there is one, at its offset in
    that block's `ref`, which that block's `arrivals` counts.
    """

    @inline_mlir(REF, REF, ROW)
    def send(target: Any, arrivals: Any, value: Any) -> None:
        lane = arith.andi(mgpu_utils.thread_idx(), i32(31))
        block = arith.divui(lane, i32(parts))
        there = [
            _shared_address(nvvm.mapa(llvm.PointerType.get(7), pointer, block))
            for pointer in (pointer_of_lane(target, offsets), mgpu_utils.memref_ptr(arrivals))
        ]
        mgpu_utils.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $2, [$1];",
            *there,
            lane_value(value),
            predicate=arith.cmpi(arith.CmpIPredicate.ult, lane, i32(parts * blocks)),
            has_side_effects=True,
        )

    send(ref, arrivals, value)


def wait_for_arrivals(ref: Any, parity: jax.Array) -> None:
    """Waits until all bytes of a round are there; `parity` is 0 in the first round, then 1, 0 …"""

    @inline_mlir(REF, SCALAR)
    def wait(ref: Any, parity: Any) -> None:
        nvvm.mbarrier_try_wait_parity(
            mgpu_utils.memref_ptr(ref), parity.registers.item(), i32(10_000_000)
        )

    wait(ref, parity)


def _first_thread() -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), i32(0))


def _shared_address(pointer: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)
