"""The passes over logits, and what is done with their rows before and after.

What a pass computes of some classes needs no others, but for numbers of each row: so classes may be
split between devices, which exchange these.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import unfit
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.split import Axes, Sequence, is_first, only_if
from jaxkern.lowering.bound import standard_promotion, wide
from jaxkern.mosaic.registers import VECTOR_BYTES
from jaxkern.mosaic.units import too_large
from jaxkern.ops.cross_entropy.backward import launch_backward
from jaxkern.ops.cross_entropy.forward import launch_forward
from jaxkern.ops.cross_entropy.rows import (
    LogSum,
    Rows,
    Sums,
    position_in,
    position_of,
    reference_backward,
    reference_forward,
)
from jaxkern.ops.cross_entropy.tiles import SHORTEST


def _faster(options: Rows, logits: Any, *rest: Any) -> bool:
    del options, rest
    return logits.shape[-1] >= SHORTEST


def _too_large(options: Rows, logits: Any, *rest: Any) -> str | None:
    """Why a kernel cannot count the logits that one device has."""
    del options, rest
    return _uncountable(logits)


def _uncountable(logits: Any) -> str | None:
    vec = VECTOR_BYTES // logits.dtype.itemsize
    # Where rows have more than whole units, their other elements are counted one by one.
    return too_large(1 if logits.shape[-1] % vec else vec, logits.size)


def _own(axes: Axes, position: Any, logits: Any) -> Any:
    """Where labels are in the classes of this device."""
    classes = logits.shape[-1]
    return position_in(position, lax.axis_index(axes) * classes, classes)


def _forward_of_device(run: Any, axes: Axes, options: Rows, logits: Any, position: Any) -> Any:
    sums = Sums(*run(options, logits, _own(axes, position, logits)))
    largest = lax.stop_gradient(lax.pmax(lax.stop_gradient(sums.largest), axes))
    largest, *rest = sums.beside(largest)
    return only_if(is_first(axes), largest), *rest


def _backward_of_device(
    run: Any, axes: Axes, options: Rows, logits: Any, position: Any, *numbers: Any
) -> Any:
    return run(options, logits, _own(axes, position, logits), *numbers)


FORWARD = KernelPass(
    "cross_entropy_fwd",
    reference=reference_forward,
    kernel=launch_forward,
    ins=("... v", "..."),
    outs=("...",) * 4,
    sequence=Sequence(_forward_of_device, factor="v"),
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    unfit=_too_large,
    faster=_faster,
)
BACKWARD = KernelPass(
    "cross_entropy_bwd",
    reference=reference_backward,
    kernel=launch_backward,
    ins=("... v", "...", "...", "...", "..."),
    outs=("... v",),
    sequence=Sequence(_backward_of_device, factor="v"),
    kernel_of_slices=functools.partial(launch_backward, sliced=True),
    unfit=_too_large,
    faster=_faster,
)


def logits_of(x: Any, weight: Any, bias: Any) -> Any:
    """The logits ``x @ weight + bias``, in the dtype of x; `bias` may be ``None``."""
    if bias is None:
        return jnp.matmul(x, weight)
    logits = jnp.matmul(x, weight, preferred_element_type=wide(x.dtype))
    return (logits + bias.astype(logits.dtype)).astype(x.dtype)


def sums_of_rows(options: Rows, logits: Any, labels: Any, first: Any = 0) -> Sums:
    """The sums of rows, of the classes from `first` on that `logits` are of."""
    position = position_of(labels, options.terms.ignored, first, logits.shape[-1])
    return Sums(*FORWARD(options, logits, position))


def over_devices(axes: Axes, sums: Sums) -> Sums:
    """The sums of all classes, of those of the classes that each device along `axes` has."""
    largest = lax.pmax(lax.stop_gradient(sums.largest), axes)
    return Sums(largest, *lax.psum(jnp.stack(sums.beside(largest)[1:]), axes))


def losses_of_logits(options: Rows, logits: Any, labels: Any) -> tuple[Any, LogSum]:
    """The losses of rows, and lse."""
    return options.loss(sums_of_rows(options, logits, labels), labels)


@standard_promotion()  # in the backward's rule, too
def gradient_of_logits(
    options: Rows, logits: Any, labels: Any, lse: LogSum, cotangents: Any, first: Any = 0
) -> Any:
    """The gradient of the logits, of classes from `first` on, for cotangents of losses and lse."""
    position = position_of(labels, options.terms.ignored, first, logits.shape[-1])
    of_softmax = options.terms.of_softmax(lse, labels, cotangents, options.classes)
    return BACKWARD(options, logits, position, lse.value, of_softmax, cotangents[0])[0]


def unsupported(logits: Any) -> str | None:
    """Why the kernels cannot take logits of this type."""
    return unfit(logits=logits) or _uncountable(logits)
