"""Which implementation of an op runs, and the words for why another one does not."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

Implementation = Literal["mosaic", "xla"]
Mode = Literal["auto", "mosaic", "interpret", "xla"]

_MIN_COMPUTE_CAPABILITY = 9.0
_interpreting = False


def resolve(
    implementation: str | None,
    unsupported: str | None,
    *,
    op: str,
    slower: str | None = None,
) -> Mode:
    """What an op runs for the `implementation` its user asked for.

    Args:
      implementation: the user's word; ``None`` means the fastest.
      unsupported: why the kernels cannot take this call, or ``None`` if they can.
      op: the op's name, for the message.
      slower: why the kernels, able to, are not the fastest here, or ``None``.

    Returns:
      ``"xla"`` for the reference; ``"mosaic"`` for kernels or an error at lowering; ``"auto"`` for
      kernels where the program is lowered for CUDA and the reference elsewhere; ``"interpret"``
      for kernels in Pallas's interpreter, under :func:`interpret_kernels`.

    Raises:
      ValueError: `implementation` is no implementation.
      NotImplementedError: the kernels were asked for and cannot take this call.
    """
    match implementation:
        case "xla":
            return "xla"
        case "mosaic":
            if unsupported:
                raise NotImplementedError(
                    f'{op}(implementation="mosaic") cannot take this call: {unsupported}. '
                    'Use implementation="xla", or None to have it chosen.'
                )
            return "interpret" if _interpreting else "mosaic"
        case None:
            return "xla" if unsupported or slower else "auto"
        case _:
            raise ValueError(
                f'implementation must be "mosaic", "xla" or None, got {implementation!r}'
            )


def device_unsupported() -> str | None:
    """Why the GPUs of this process cannot run the kernels; ``None`` if they can or there are none.

    Without a GPU here the program may still be lowered for one elsewhere, so nothing is refused.
    """
    for device in jax.local_devices():
        capability = compute_capability(device)
        if capability is not None and capability < _MIN_COMPUTE_CAPABILITY:
            return (
                f"{device.device_kind} has compute capability {capability}, and the kernels need "
                f"{_MIN_COMPUTE_CAPABILITY} (Hopper) or newer"
            )
    return None


def compute_capability(device: Any) -> float | None:
    """The CUDA compute capability of `device`, or ``None`` if it is no NVIDIA GPU."""
    if device.platform != "gpu":
        return None
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # ROCm says "gfx90a"
        return None


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Inside, ``implementation="mosaic"`` runs kernels in Pallas's interpreter, on any device.

    For tests where there is no GPU: it shows a kernel's logic, not its races, layouts or speed.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def output_types(f: Callable[..., Any], *args: Any) -> Any:
    """Shapes and dtypes of `f`'s outputs; the arguments' shardings play no part. May hold None."""
    plain = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    return jax.eval_shape(f, *plain)


def refuse(reference: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Outputs shaped like `reference`'s, of an operation that fails when it is lowered."""
    outs = output_types(reference, *args)
    return tuple(_no_kernel_p.bind(shape=o.shape, dtype=o.dtype) for o in outs)


_no_kernel_p = Primitive("no_kernel_for_this_platform")
_no_kernel_p.def_abstract_eval(lambda *, shape, dtype: ShapedArray(shape, dtype))


def _no_kernel_lowering(ctx: Any, **_: Any) -> Any:
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    raise NotImplementedError(
        f'implementation="mosaic" is for NVIDIA GPUs, and this program is being lowered for '
        f'{platforms}. Use implementation="xla", or None to have it chosen.'
    )


mlir.register_lowering(_no_kernel_p, _no_kernel_lowering)
