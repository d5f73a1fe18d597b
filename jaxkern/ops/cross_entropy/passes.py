"""The passes over logits, and what is done with their rows before and after.

A row is seen as segments of equal length, which devices may share: what a pass computes of a
segment needs no other one, and what is left to add up over them are numbers of each row.
"""

import functools
import math
from typing import Any

import jax
from jax.sharding import AxisType

from jaxkern.core.arguments import unfit
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.elementwise.units import too_large
from jaxkern.lowering.bound import standard_promotion
from jaxkern.mosaic.registers import VECTOR_BYTES
from jaxkern.ops.cross_entropy.backward import launch_backward, launch_of_slices
from jaxkern.ops.cross_entropy.forward import launch_forward
from jaxkern.ops.cross_entropy.rows import (
    Rows,
    Sums,
    position_of,
    reference_backward,
    reference_forward,
)
from jaxkern.ops.cross_entropy.tiles import SHORTEST, segments_of


def _faster(options: Rows, logits: Any, *rest: Any) -> bool:
    del options, rest
    return logits.shape[-1] >= SHORTEST


FORWARD = KernelPass(
    "cross_entropy_fwd",
    reference=reference_forward,
    kernel=launch_forward,
    ins=("... s v", "... s"),
    outs=("... s",) * 4,
    whole="v",
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    faster=_faster,
)
BACKWARD = KernelPass(
    "cross_entropy_bwd",
    reference=reference_backward,
    kernel=launch_backward,
    ins=("... s v", "... s", "...", "...", "..."),
    outs=("... s v",),
    whole="v",
    kernel_of_slices=launch_of_slices,
    faster=_faster,
)


def sums_of_rows(options: Rows, logits: Any, position: Any) -> Sums:
    """The sums of each row's segments, (..., segments)."""
    return Sums(*FORWARD(options, _segmented(logits, position.shape[-1]), position))


def losses_of_logits(options: Rows, logits: Any, labels: Any) -> tuple[Any, Any]:
    """The losses of rows, and lse."""
    position = positions(options, logits, labels)
    combined = sums_of_rows(options, logits, position).combined()
    return options.terms.loss(*combined, labels, options.classes)


@standard_promotion()  # in the backward's rule, too
def gradient_of_logits(
    options: Rows, logits: Any, labels: Any, lse: Any, cotangents: Any, first: Any = None
) -> Any:
    """The gradient of the logits, for the cotangents of losses and lse.

    With `first` they are those of a part of the classes.
    """
    position = positions(options, logits, labels, first)
    of_softmax = options.terms.of_softmax(lse, labels, cotangents, options.classes)
    segmented = _segmented(logits, position.shape[-1])
    [du] = BACKWARD(options, segmented, position, lse, of_softmax, cotangents[0])
    return du.reshape(logits.shape)


def positions(options: Rows, logits: Any, labels: Any, first: Any = None) -> jax.Array:
    """Where the labels are in the segments of logits; with `first` of a part of the classes."""
    classes = logits.shape[-1]
    count = segments_of(classes, _devices(logits), whole=first is not None)
    first = 0 if first is None else first
    return position_of(labels, options.terms.ignored, first, count, classes // count)


def unsupported(logits: Any, part: bool = False) -> str | None:
    """Why the kernels cannot take logits of this type, or of a part of the classes."""
    if reason := unfit(logits=logits):
        return reason
    size = logits.shape[-1] // segments_of(logits.shape[-1], _devices(logits), part)
    return too_large(math.gcd(size, VECTOR_BYTES // logits.dtype.itemsize), logits.size)


def _segmented(logits: Any, count: int) -> Any:
    return logits.reshape(*logits.shape[:-1], count, logits.shape[-1] // count)


def _devices(logits: Any) -> int:
    """How many devices of an Explicit mesh share the classes."""
    sharding = getattr(jax.typeof(logits), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return 1
    names = sharding.spec[-1] if len(sharding.spec) == logits.ndim else None
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in names)
