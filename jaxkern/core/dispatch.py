"""Which implementation of an op runs, and the words for why another one does not."""

import contextlib
from collections.abc import Iterator
from typing import Literal

Implementation = Literal["mosaic", "xla"]
Mode = Literal["auto", "mosaic", "interpret", "xla"]

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
