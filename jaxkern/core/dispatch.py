"""Which implementation of an op runs, and the words for why another one does not."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

from jaxkern.core.arguments import check_flag
from jaxkern.lowering.bound import standard_promotion

Implementation = Literal["mosaic", "xla"]
Mode = Literal["auto", "mosaic", "interpret", "xla"]

_interpreting = False


def public_op[F: Callable[..., Any]](f: F) -> F:
    """`f` as users call it: under JAX's standard promotion, and with a remedy for forward mode.

    Options whose default is a bool are checked to be one, which `f` is given. A program that is
    differentiated in forward mode inside of ``jit`` fails later, in JAX's words.
    """
    parameters = inspect.signature(f).parameters.items()
    flags = [name for name, parameter in parameters if isinstance(parameter.default, bool)]

    @functools.wraps(f)
    def call(*args: Any, **keywords: Any) -> Any:
        checked = {name: check_flag(name, keywords[name]) for name in flags if name in keywords}
        try:
            with standard_promotion():
                return f(*args, **(keywords | checked))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                f"{f.__name__} has no forward-mode derivative (jvp, jacfwd) where it may run "
                'kernels; use implementation="xla", which has'
            ) from error

    return cast(F, call)


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
