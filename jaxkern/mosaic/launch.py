"""Launch of kernels: grid axes, compiler parameters, arrays by name, the interpreter."""

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf

from jaxkern.core import target

LANES = 128
"""Threads of a warpgroup. Kernels that sum across lanes run one warpgroup per block: Mosaic keeps
one scratch for such sums per block, and two warpgroups would race for it."""


@dataclasses.dataclass(eq=False)
class GridAxis:
    """The name of a grid axis, equal to itself alone.

    Inside a kernel an axis of the user's device mesh hides a grid axis of an equal name, and
    ``lax.axis_index`` then silently gives the device's index: a string is never safe.
    """

    label: str


def grid_axes(*labels: str) -> tuple[Any, ...]:
    """A new :class:`GridAxis` for each label, for ``plgpu.kernel`` and ``lax.axis_index``."""
    return tuple(GridAxis(label) for label in labels)


def launch_kernel(
    body: Callable[..., None],
    *,
    approx_math: bool = False,
    sums_across_warps: bool = True,
    **launch: Any,
) -> Any:
    """``plgpu.kernel`` with what all kernels have in common.

    Lane semantics take the layouts as the kernels state them. Mosaic's other semantics infer them,
    and for the gradient of a selective scan that takes JAX 0.11 half a minute, to the same code.
    Pallas puts no barrier around accesses of memory: the kernels place their own.

    Args:
      body: the kernel.
      approx_math: whether exponentials, logarithms and divisions use the fast units.
      sums_across_warps: whether a ``jnp.sum`` is of several warps' elements, for which Pallas
        reserves 2 KiB of shared memory wherever there is one.
      **launch: the other arguments of ``plgpu.kernel``.
    """

    def guarded(*refs: Any, **scratch: Any) -> None:
        gpu = target.current()
        if gpu is not None:
            _refuse_others(gpu, launch["kernel_name"])
        body(*refs, **scratch)

    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,
        approx_math=approx_math,
    )
    if not sums_across_warps:
        params = dataclasses.replace(params, reduction_scratch_bytes=0)
    return plgpu.kernel(guarded, compiler_params=params, **launch)


def launch_in_place(
    body: Callable[..., None],
    fixed: Iterable[jax.Array],
    written: Iterable[jax.Array],
    out_type: Sequence[Any] = (),
    **launch: Any,
) -> list[jax.Array]:
    """Runs a kernel that reads and writes arrays where they lie; XLA copies what is still needed.

    Args:
      body: takes references to `fixed`, to `written` and to other outputs.
      fixed: arrays that are read.
      written: arrays that are read and written.
      out_type: shape and dtype of the other outputs.
      **launch: the arguments of :func:`launch_kernel`.

    Returns:
      `written` after the kernel, and the other outputs.
    """
    fixed, written = away_from_slices(fixed), away_from_slices(written)
    others = [jnp.zeros(like.shape, like.dtype) for like in out_type]  # of which nothing is read

    @pl.run_state
    def in_place(refs: Any) -> None:
        written, others = refs
        found = launch_kernel(body, out_type=tuple(out_type), **launch)(*fixed, *written)
        for ref, array in zip(others, found or (), strict=True):
            ref[...] = array

    written, others = in_place((written, others))
    return away_from_slices([*written, *others])


def away_from_slices(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    """`arrays` behind barriers: what a kernel takes that works in place, and what it gives.

    XLA fuses a kernel with slices: of other arrays that it takes, and of another array that its
    results become. Of that fusion it does not know which results
    lie where arguments did (JAX 0.11.2 and 0.12): the kernel would write to the arguments, and the
    results be whatever was in their memory; where two slices are of one array it is refused for a
    cycle. With a barrier for each array, not one for all, it does not warn that it leaves them.
    """
    return [*map(jax.lax.optimization_barrier, arrays)]


_ONLY_ON = {9: nvvm.wgmma_fence_aligned, 10: nvvm.tcgen05_relinquish_alloc_permit}
"""Operations that a generation has alone, by the major number of the compute capability."""


def _refuse_others(gpu: target.Gpu, name: str) -> None:
    """Have the compiler stop with an error where a kernel meets a GPU that it was not made for.

    Else LLVM would find no instruction for parts of it, and abort the process. An operation that
    only this generation has stands on a path that no lane takes, and that LLVM removes: MLIR looks
    at it before, and says its location. JAX 0.12 looks no more, and aborts.
    """
    emit = _ONLY_ON.get(gpu.capability[0])
    if emit is None:
        return
    message = f"jaxkern: {name} was lowered for {gpu}; lower the program for this GPU"

    @plgpu.inline_mgpu()
    def check(ctx: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        with ir.Location.name(message):
            impossible = arith.cmpi(
                arith.CmpIPredicate.ugt, mgpu_utils.thread_idx(), arith.constant(i32, 2**20)
            )
            branch = scf.IfOp(impossible)
            with ir.InsertionPoint(branch.then_block):
                emit()
                scf.yield_([])

    check()  # pyright: ignore[reportCallIssue]


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that a kernel is lowered for."""
    return _gpu().multiprocessors


def shared_memory() -> int:
    """Bytes of shared memory that a block may have on the GPU that a kernel is lowered for."""
    return _gpu().shared_memory


def clusters() -> bool:
    """Whether blocks can form clusters on the GPU that a kernel is lowered for."""
    return _gpu().tma  # Hopper brought both


def _gpu() -> target.Gpu:
    return target.current() or target.DEFAULT


def launch_named(
    kernel: Callable[[Any, Any], None],
    ins: dict[str, Any],
    outs: dict[str, Any],
    scratch: dict[str, Any],
    updated: dict[str, Any] | None = None,
    **launch: Any,
) -> dict[str, Any]:
    """Launches ``kernel(refs, smem)``, which has optional arrays, and returns its outputs by name.

    Args:
      kernel: takes the arrays' references and the shared memory as attributes. An array that is
        ``None`` here is ``None`` there.
      ins: the arrays that the kernel reads.
      outs: shape and dtype of those that it writes.
      scratch: its shared memory.
      updated: arrays that it reads and writes where they lie; outputs, too.
      **launch: the other arguments of :func:`launch_kernel`.
    """
    updated = updated or {}
    given = {name: array for name, array in ins.items() if array is not None}
    written = {name: like for name, like in outs.items() if like is not None}
    absent = dict.fromkeys([*ins, *outs])

    def body(*refs: Any, **smem: Any) -> None:
        names = *given, *updated, *written
        present = absent | dict(zip(names, refs, strict=True))
        kernel(types.SimpleNamespace(**present), types.SimpleNamespace(**smem))

    launch |= {"out_type": tuple(written.values()), "scratch_types": scratch}
    if updated:
        results = launch_in_place(body, given.values(), updated.values(), **launch)
    else:
        results = launch_kernel(body, **launch)(*given.values())
    found: dict[str, Any] = dict(zip([*updated, *written], results, strict=True))
    return dict.fromkeys(outs) | found
