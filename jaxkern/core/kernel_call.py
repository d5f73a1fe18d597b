"""A pass on the arrays of one device: one operation, lowered to a kernel or to plain JAX.

:func:`kernel_call` binds a primitive. Tracing it costs nothing but the shapes of its results; what
it becomes is decided when the program is lowered, for the platform and the GPU of that program:

* for CUDA the kernel's launcher is traced and lowered alone, once a process and machine, to a
  module (``jax.export``) that the program calls; every layer, jit, device and mesh that needs the
  same kernel shares it, and it is kept on disk (:mod:`jaxkern.core.cache`);
* elsewhere, and on a GPU that the kernels do not run on, the reference is lowered.
"""

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.typing import DTypeLike

from jaxkern.core import cache, target
from jaxkern.core.bound import Arrays, Bound, identity, outlives_process, standard_promotion
from jaxkern.core.target import Gpu, UnfitError

Types = tuple[tuple[tuple[int, ...], DTypeLike], ...]
"""Shape and dtype of each of several arrays."""


def kernel_call(
    name: str,
    kernel: Bound,
    reference: Bound,
    unfit: Bound | None,
    required: bool,
    *arrays: Any,
) -> Arrays:
    """Computes a pass: by `kernel` where it runs, else by `reference`.

    Args:
      name: of the pass, e.g. ``"rms_norm_fwd"``.
      kernel: launches it.
      reference: the same in plain JAX.
      unfit: gives, by the types of `arrays`, why the kernel cannot run on the GPU of the
        lowering, :func:`jaxkern.core.target.current`.
      required: whether lowering fails where the kernel does not run.
      arrays: of one device.
    """
    results = (r for r in result_types(reference, *arrays) if r is not None)
    return tuple(
        _kernel_p.bind(
            *arrays,
            name=name,
            kernel=kernel,
            reference=reference,
            unfit=unfit,
            required=required,
            precision=jax.config.jax_default_matmul_precision,
            outs=tuple((r.shape, r.dtype) for r in results),
        )
    )


def result_types(f: Bound, *arrays: Any) -> tuple[Any, ...]:
    """Finds the shapes and dtypes of all results of `f`; shardings of arrays play no part."""
    plain = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    with _on_one_device():
        return jax.eval_shape(_jitted(f), *plain)


@functools.lru_cache(maxsize=4096)
def _jitted(f: Bound) -> Callable[..., Arrays]:
    """Jits `f.full`: one function for all equal `f`, so that JAX traces it once."""

    def reference(*arrays: Any) -> Arrays:
        return f.full(*arrays)

    return jax.jit(reference)


def _on_one_device() -> contextlib.AbstractContextManager[None]:
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


# The primitive: what it becomes for CUDA, and elsewhere

_kernel_p = Primitive("kernel_call")
_kernel_p.multiple_results = True
_kernel_p.def_impl(functools.partial(xla.apply_primitive, _kernel_p))


@_kernel_p.def_abstract_eval
def _result_avals(*arrays: Any, outs: Types, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(shape, dtype) for shape, dtype in outs]


def _lower_for_cuda(
    ctx: Any, *args: Any, name, kernel, reference, unfit, required, precision, outs
):
    gpu = target.of_program(ctx.module_context.axis_context)
    with target.fitting_to(gpu):
        reason = gpu.unsupported or (unfit and unfit.of_types(*ctx.avals_in))
    if reason is None and gpu.untried and not required:
        warn_once(f'{gpu.untried}: plain JAX runs. Use implementation="mosaic" to try them.')
    elif reason is None:
        types = tuple((a.shape, a.dtype) for a in ctx.avals_in)
        found = lowered(name, kernel, types, gpu, precision)
        if not isinstance(found, str):
            return _lowered_plainly(ctx, found, outs, args)
        reason = found
    refused[name] = reason or str(gpu.untried)
    if required:
        raise NotImplementedError(
            f'{name}: implementation="mosaic" cannot take this call: {reason}. '
            'Use implementation="xla", or None to have it chosen.'
        )
    return _lowered_plainly(ctx, _jitted(reference), outs, args)


_PACKAGE = str(Path(__file__).parents[1])


@functools.cache
def warn_once(message: str) -> None:
    """Warns at the line outside of the package that led here."""
    warnings.warn(f"jaxkern: {message}", skip_file_prefixes=(_PACKAGE,))


def _lower_elsewhere(ctx: Any, *args: Any, reference, required, outs, **_: Any):
    if required:
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        raise NotImplementedError(
            f'implementation="mosaic" is for NVIDIA GPUs, and this program is being lowered for '
            f'{platforms}. Use implementation="xla", or None to have it chosen.'
        )
    return _lowered_plainly(ctx, _jitted(reference), outs, args)


mlir.register_lowering(_kernel_p, _lower_elsewhere)
mlir.register_lowering(_kernel_p, _lower_for_cuda, platform="cuda")


def _lowered_plainly(ctx: Any, f: Callable[..., Any], outs: Types, args: Any) -> Any:
    """Lowers `f` for arrays of one device, whatever mesh the program is of."""
    module_context = ctx.module_context
    if ctx.platforms is not None:  # one branch of a program for several platforms
        module_context = module_context.replace(platforms=tuple(ctx.platforms))
    plain = ctx.replace(
        avals_in=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_in],
        avals_out=[ShapedArray(shape, dtype) for shape, dtype in outs],
        module_context=module_context,
    )
    present = lambda *arrays: [out for out in f(*arrays) if out is not None]
    with _on_one_device():
        return mlir.lower_fun(present, multiple_results=True)(plain, *args)


# Kernels lowered once

_lowered: dict[Any, Callable[..., Arrays] | str] = {}
_lock = threading.RLock()

lowerings: dict[str, int] = {}
"""Number of kernels that this process lowered, by pass name, without the ones found on disk."""
refused: dict[str, str] = {}
"""Why this process last lowered a pass as plain JAX for a GPU, by the name of the pass."""
found_on_disk = 0
"""Number of kernels that this process found on disk."""


def lowered(
    name: str, kernel: Bound, types: Types, gpu: Gpu, precision: str | None
) -> Callable[..., Arrays] | str:
    """Lowers `kernel` to a function that can be called anywhere, or says why it does not fit a GPU.

    Args:
      name: of the pass.
      kernel: what is lowered.
      types: of its arrays.
      gpu: that it is fitted to.
      precision: of matrix products in plain JAX around the kernel, as JAX's configuration has it.
    """
    what = name, kernel, types, gpu, precision
    with _lock:
        if what not in _lowered:
            try:
                _lowered[what] = jax.jit(_found_or_exported(*what).call)
            except UnfitError as error:
                _lowered[what] = str(error)
        return _lowered[what]


def _found_or_exported(
    name: str, kernel: Bound, types: Types, gpu: Gpu, precision: str | None
) -> export.Exported:
    global found_on_disk
    key = identity(kernel, name, types, gpu, precision)
    keep = outlives_process(key)
    if keep and (content := cache.load(key)) is not None:
        found_on_disk += 1
        return export.deserialize(bytearray(content))
    module = _export(name, kernel, types, gpu, precision)
    lowerings[name] = lowerings.get(name, 0) + 1
    if keep:
        cache.store(key, bytes(module.serialize()))
    return module


_KERNELS = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in ("mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi")
]


def _export(name: str, kernel: Bound, types: Types, gpu: Gpu, precision: Any) -> export.Exported:
    def launch(*arrays: Any) -> Arrays:
        return kernel.full(*arrays)

    launch.__name__ = name
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    with target.fitting_to(gpu), _configured(precision), _shared_memory_of(gpu):
        exporting = export.export(jax.jit(launch), platforms=["cuda"], disabled_checks=_KERNELS)
        return exporting(*arrays)


@contextlib.contextmanager
def _configured(precision: str | None) -> Iterator[None]:
    """Sets JAX as kernels are written for, however the user has configured it."""
    with (
        standard_promotion(),
        jax.enable_x64(False),
        jax.default_matmul_precision(precision),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.check_tracer_leaks(False),
    ):
        yield


@contextlib.contextmanager
def _shared_memory_of(gpu: Gpu) -> Iterator[None]:
    """Inside, Mosaic holds kernels to the shared memory of `gpu`, not of what GPU is here.

    Raises:
      UnfitError: a kernel that is lowered inside needs more.
    """
    try:
        with artificial_shared_memory_limit(gpu.shared_memory):
            yield
    except ValueError as error:
        if "exceeds available shared memory" not in str(error):
            raise
        needed = re.search(r"smem_bytes=(\d+)", str(error))
        raise UnfitError(
            f"it needs {needed[1] if needed else 'more'} bytes of shared memory a block, and "
            f"{gpu.name} has {gpu.shared_memory}"
        ) from error
