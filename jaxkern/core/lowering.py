"""A pass on the arrays of one device: one operation, lowered to a kernel or to plain JAX.

:func:`kernel_call` binds a primitive. Tracing it costs nothing but the shapes of its results; what
it becomes is decided when the program is lowered, for the platform and the GPU of that program:

* for CUDA the kernel's launcher is traced and lowered alone, once a process and machine, to a
  module (``jax.export``) that the program calls; every layer, jit, device and mesh that needs the
  same kernel shares it, and it is kept on disk (:mod:`jaxkern.core.cache`);
* elsewhere, and on a GPU that the kernels do not run on, the reference is lowered.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax import export
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.typing import DTypeLike

import jaxkern
from jaxkern.core import cache, target
from jaxkern.core.target import Gpu
from jaxkern.mosaic.launch import UnfitError, shared_memory_of

Arrays = tuple[Any, ...]
Type = tuple[tuple[int, ...], DTypeLike]
"""Shape and dtype of an array."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function with its first and its keyword arguments, equal to another of the same ones."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(f: Callable[..., Any]) -> "Bound":
        if isinstance(f, functools.partial):
            return Bound(f.func, f.args, tuple(sorted(f.keywords.items())))
        return Bound(f)

    def __call__(self, *args: Any) -> Any:
        return self.function(*self.args, *args, **dict(self.keywords))


@dataclasses.dataclass(frozen=True)
class Local:
    """A pass's kernel or reference as a function of those of its arrays that are present.

    Attributes:
      function: takes `arguments` arrays or ``None``, gives a tuple of arrays and ``None``.
      arguments: how many `function` takes.
      present: which of them are arrays.
      in_axes: of the ``vmap``s around it, from the inside out: 0 or ``None``.
    """

    function: Bound
    arguments: int
    present: tuple[int, ...]
    in_axes: tuple[tuple[int | None, ...], ...] = ()

    def full(self, *arrays: Any) -> Arrays:
        """All results, ``None`` for absent ones."""
        call = lambda *arrays: self.function(*placed(arrays, self.present, self.arguments))
        for axes in self.in_axes:
            call = jax.vmap(call, axes)
        with standard_promotion():
            return call(*arrays)

    def __call__(self, *arrays: Any) -> Arrays:
        """The results that are present."""
        return tuple(out for out in self.full(*arrays) if out is not None)

    def of_types(self, *arrays: Any) -> Any:
        """What `function` tells of the types of arrays alone, within the ``vmap``s."""
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        for axes in reversed(self.in_axes):
            types = [
                t if axis is None else jax.ShapeDtypeStruct(t.shape[1:], t.dtype)
                for t, axis in zip(types, axes, strict=True)
            ]
        return self.function(*placed(types, self.present, self.arguments))

    def batched(self, in_axes: tuple[int | None, ...]) -> "Local":
        return dataclasses.replace(self, in_axes=(*self.in_axes, in_axes))


def placed(values: Any, places: tuple[int, ...], count: int) -> list[Any]:
    """`count` entries: the values at their places, ``None`` elsewhere."""
    full: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        full[place] = value
    return full


def kernel_call(
    name: str,
    kernel: Local,
    reference: Local,
    unfit: Local | None,
    required: bool,
    *arrays: Any,
) -> Arrays:
    """The results of a pass: of `kernel` where it runs, else of `reference`.

    Args:
      name: of the pass, e.g. ``"rms_norm_fwd"``.
      kernel: launches it; all it depends on beside the arrays is in its description.
      reference: the same in plain JAX.
      unfit: tells of the types of `arrays` why the kernel cannot run on the GPU that it is lowered
        for, :func:`jaxkern.core.target.current`.
      required: whether lowering fails where the kernel does not run.
      arrays: of one device.
    """
    return tuple(
        _kernel_p.bind(
            *arrays,
            name=name,
            kernel=kernel,
            reference=reference,
            unfit=unfit,
            required=required,
            precision=jax.config.jax_default_matmul_precision,
            outs=types_of([o for o in result_types(reference, *arrays) if o is not None]),
        )
    )


def types_of(arrays: Sequence[Any]) -> tuple[Type, ...]:
    return tuple((a.shape, a.dtype) for a in arrays)


def result_types(f: Local, *arrays: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of all results of `f` for such arrays; their shardings play no part."""
    plain = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    with _on_one_device():
        return jax.eval_shape(_jitted(f), *plain)


@functools.lru_cache(maxsize=4096)
def _jitted(f: Local) -> Callable[..., Arrays]:
    """`f.full` under ``jit``, the same function for an equal one, so that JAX traces it once."""

    def reference(*arrays: Any) -> Arrays:
        return f.full(*arrays)

    return jax.jit(reference)


def _on_one_device() -> contextlib.AbstractContextManager[None]:
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


_kernel_p = Primitive("kernel_call")
_kernel_p.multiple_results = True
_kernel_p.def_impl(functools.partial(xla.apply_primitive, _kernel_p))


@_kernel_p.def_abstract_eval
def _result_avals(*arrays: Any, outs: tuple[Type, ...], **_: Any) -> list[ShapedArray]:
    return [ShapedArray(shape, dtype) for shape, dtype in outs]


def _lower_for_cuda(
    ctx: Any, *args: Any, name, kernel, reference, unfit, required, precision, outs
):
    gpu = target.of_program(ctx.module_context.axis_context)
    types = types_of(ctx.avals_in)
    reason = gpu.unsupported or _unfit(unfit, types, gpu)
    if reason is None and gpu.untried and not required:
        _warn_once(f'{gpu.untried}: plain JAX runs. Use implementation="mosaic" to try them.')
    elif reason is None:
        try:
            return _lowered_plainly(ctx, lowered(name, kernel, types, gpu, precision), outs, args)
        except UnfitError as error:
            reason = str(error)
    refused[name] = reason or str(gpu.untried)
    if required:
        raise NotImplementedError(
            f'{name}: implementation="mosaic" cannot take this call: {reason}. '
            'Use implementation="xla", or None to have it chosen.'
        )
    return _lowered_plainly(ctx, _jitted(reference), outs, args)


def _unfit(unfit: Local | None, types: tuple[Type, ...], gpu: Gpu) -> str | None:
    if unfit is None:
        return None
    with target.fitting_to(gpu):
        return unfit.of_types(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"jaxkern: {message}", stacklevel=2)


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


def _lowered_plainly(ctx: Any, f: Callable[..., Any], outs: Any, args: Any) -> Any:
    """`f` lowered for arrays of one device, whatever mesh the program is of."""
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

_lowered: dict[str, Callable[..., Arrays] | UnfitError] = {}
_lock = threading.RLock()

lowerings: dict[str, int] = {}
"""How often this process lowered a kernel, by the name of its pass; not those found on disk."""
refused: dict[str, str] = {}
"""Why this process last lowered a pass as plain JAX for a GPU, by the name of the pass."""
found_on_disk = 0
"""How many kernels this process found there."""


def lowered(
    name: str, kernel: Local, types: tuple[Type, ...], gpu: Gpu, precision: str | None
) -> Callable[..., Arrays]:
    """`kernel` lowered for arrays of `types` and `gpu`, as a function that can be called anywhere.

    Args:
      name: of the pass.
      kernel: what is lowered.
      types: of its arrays.
      gpu: that it is fitted to.
      precision: of matrix products in plain JAX around the kernel, as JAX's configuration has it.

    Raises:
      UnfitError: the kernel does not fit the GPU.
    """
    arrays = " ".join(f"{np.dtype(dtype).name}{list(shape)}" for shape, dtype in types)
    what = f"{name} {describe(kernel)}({arrays}) for {describe(gpu)} precision={precision}"
    global found_on_disk
    with _lock:
        if what not in _lowered:
            key = f"{what}\n{surroundings(kernel)}"
            module = _from_disk(key)
            if module is None:
                try:
                    module = _export(name, kernel, types, gpu, precision)
                except UnfitError as error:
                    _lowered[what] = error
                    raise
                lowerings[name] = lowerings.get(name, 0) + 1
                cache.store(key, bytes(module.serialize()))
            else:
                found_on_disk += 1
            _lowered[what] = jax.jit(module.call)
        found = _lowered[what]
    if isinstance(found, UnfitError):
        raise UnfitError(*found.args)
    return found


def _from_disk(key: str) -> export.Exported | None:
    content = cache.load(key)
    return None if content is None else export.deserialize(bytearray(content))


_MOSAIC = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def _export(name: str, kernel: Local, types: Any, gpu: Gpu, precision: Any) -> export.Exported:
    def launch(*arrays: Any) -> Arrays:
        return kernel.full(*arrays)

    launch.__name__ = name
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    with target.fitting_to(gpu), _configured(precision), shared_memory_of(gpu):
        exporting = export.export(jax.jit(launch), platforms=["cuda"], disabled_checks=[_MOSAIC])
        return exporting(*arrays)


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """JAX's promotion of dtypes and ranks, which the package's own code relies on.

    A user who has JAX refuse them means expressions of their own.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def _configured(precision: str | None) -> Iterator[None]:
    """JAX as kernels are written for, however the user has configured it."""
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


def describe(value: Any) -> str:
    """A text that is equal for equal static arguments, in every process.

    Raises:
      TypeError: `value` holds something whose text would not tell all of it, such as a function
        made inside another one.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, tuple | list):
        kind = "" if type(value) in (tuple, list) else _named(type(value))
        return f"{kind}({', '.join(map(describe, value))})"
    if isinstance(value, functools.partial):
        return describe(Bound.of(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return f"{_named(type(value))}({', '.join(f'{n}={describe(v)}' for n, v in fields)})"
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return np.dtype(value).name
    if isinstance(value, FunctionType) and "<" not in value.__qualname__:
        return _named(value)
    raise TypeError(
        f"a kernel's static arguments must tell what they are, got {value!r}; use numbers, texts, "
        "dtypes, functions of a module, and tuples and dataclasses of those"
    )


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def surroundings(kernel: Local) -> str:
    """What a kernel depends on beside its description: versions, source, flags."""
    flags = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MOSAIC_GPU_")}
    versions = (
        f"jaxkern {jaxkern.__version__} jax {jax.__version__} jaxlib {jaxlib.version.__version__}"
    )
    source = _source(inspect.getsourcefile(kernel.function.function))
    return f"{versions} source {source} flags {flags}"


@functools.cache
def _source(file: str | None) -> str:
    """A digest of the package's source that kernels are made of, and of `file`."""
    package = Path(jaxkern.__file__).parent
    files = [f for room in ("core", "ops", "optim") for f in sorted((package / room).rglob("*.py"))]
    if file is not None and not Path(file).is_relative_to(package):
        files.append(Path(file))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
