"""Kernels whose arrays have names, for ops with many optional ones."""

import types
from collections.abc import Callable
from typing import Any

from jaxkern.mosaic.launch import launch_kernel


def launch_named(
    kernel: Callable[[Any, Any], None],
    ins: dict[str, Any],
    outs: dict[str, Any],
    scratch: dict[str, Any],
    **launch: Any,
) -> dict[str, Any]:
    """Launches ``kernel(refs, smem)`` and returns its outputs by name.

    Args:
      kernel: takes the arrays' references and the shared memory as attributes. An array that is
        ``None`` here is ``None`` there.
      ins: the arrays that the kernel reads.
      outs: shape and dtype of those that it writes.
      scratch: its shared memory.
      **launch: the other arguments of :func:`jaxkern.mosaic.launch.launch_kernel`.
    """
    given = {name: array for name, array in ins.items() if array is not None}
    written = {name: like for name, like in outs.items() if like is not None}
    absent = dict.fromkeys([*ins, *outs])

    def body(*refs: Any, **smem: Any) -> None:
        present = dict(zip([*given, *written], refs, strict=True))
        kernel(types.SimpleNamespace(**absent | present), types.SimpleNamespace(**smem))

    results = launch_kernel(
        body, out_type=tuple(written.values()), scratch_types=scratch, **launch
    )(*given.values())
    return dict.fromkeys(outs) | dict(zip(written, results, strict=True))
