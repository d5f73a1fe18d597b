"""Losses and gradients with the logits in parts of the vocabulary, which are computed twice.

All parts but the last are computed in a loop, which takes the memory of one. The logits of the last
may be saved, and the backward begins with them, so that they are computed once.

Where the vocabulary is split between devices, each has as many parts, of its own classes. For the
losses the devices exchange sums of rows, for the gradients nothing but their shares of dx.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.split import Axes, Partial, Sequence, is_first, only_if
from jaxkern.lowering.bound import wide
from jaxkern.ops.cross_entropy.passes import (
    gradient_of_logits,
    logits_of,
    over_devices,
    sums_of_rows,
)
from jaxkern.ops.cross_entropy.rows import LogSum, Rows, Sums


@dataclasses.dataclass(frozen=True)
class Parts:
    """The static arguments of the passes that compute logits in parts.

    Attributes:
      classes: of a part; the last one may have fewer.
      dtype: of the gradient of weight, that of the weight or that in which devices add.
      save: whether the forward returns the logits of the last part.
    """

    rows: Rows
    classes: int
    dtype: str = "float32"
    save: bool = False
    mode: Mode = "auto"

    @classmethod
    def of(cls, rows: Rows, classes: int) -> "Parts":
        """Parts of so many classes, for the options of passes over whole rows."""
        inside, mode = rows.inside()
        return cls(inside, classes, mode=mode)

    def last(self, weight: Any) -> tuple[int, int]:
        """The first class of the last part, and its classes."""
        first = (weight.shape[1] - 1) // self.classes * self.classes
        return first, weight.shape[1] - first

    def over_others(self, weight: Any, step: Any, carry: Any) -> Any:
        """``carry = step(first class, classes, carry)`` for each part but the last."""
        count = self.last(weight)[0] // self.classes
        return lax.fori_loop(
            0, count, lambda i, carry: step(i * self.classes, self.classes, carry), carry
        )


def classes_of_part(nbytes: int | None, x: jax.Array, weight: jax.Array) -> int | None:
    """The classes of a part whose logits take so many bytes; ``None`` for all of them.

    Parts are as few as that allows, and of nearly one size.
    """
    if nbytes is None:
        return None
    fitting = nbytes // (max(1, math.prod(x.shape[:-1])) * x.dtype.itemsize)
    part = max(_COLUMNS, fitting // _COLUMNS * _COLUMNS)
    if max(part, fitting) >= weight.shape[1]:
        return None
    parts = -(-weight.shape[1] // part)
    return -(-weight.shape[1] // (parts * _COLUMNS)) * _COLUMNS


_COLUMNS = 128
"""A part is a multiple of it, which products are fast at."""


def _weight_of_part(x, weight, first, size) -> jax.Array:
    """(K, size), in the dtype of x."""
    return lax.dynamic_slice_in_dim(weight, first, size, axis=1).astype(x.dtype)


def _logits_of_part(x, weight, bias, first, size) -> jax.Array:
    """The logits of a part, in the dtype of x; `weight` is that of the part."""
    return logits_of(
        x, weight, None if bias is None else lax.dynamic_slice_in_dim(bias, first, size)
    )


def _losses(options: Parts, x, weight, bias, labels) -> tuple[Any, ...]:
    """Losses, the two of lse and, if the options say so, the logits of the last part."""
    *sums, logits = _sums(options, x, weight, bias, labels, 0)
    losses, lse = options.rows.loss(Sums(*sums), labels)
    return losses, *lse, logits


def _sums(options: Parts, x, weight, bias, labels, before) -> tuple[Any, ...]:
    """The four of :class:`Sums` and, if the options say so, the logits of the last part.

    `before` counts the classes before those of `weight`.
    """
    rows = options.rows

    def part(first: Any, size: int) -> tuple[jax.Array, Sums]:
        logits = _logits_of_part(x, _weight_of_part(x, weight, first, size), bias, first, size)
        return logits, sums_of_rows(rows, logits, labels, before + first)

    def step(first: Any, size: int, sums: Sums) -> Sums:
        return part(first, size)[1].joined(sums)

    zeros = jnp.zeros_like(jnp.sum(x, axis=-1), wide(x.dtype))
    sums = Sums(jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)
    sums = options.over_others(weight, step, sums)
    # The last part begins after the others, which have had its memory.
    first, size = options.last(weight)
    after = lax.stop_gradient(sums.largest)
    first, _ = lax.optimization_barrier((jnp.int32(first), after))
    logits, last = part(first, size)
    return *last.joined(sums), logits if options.save else None


def _gradients(
    options: Parts, x, weight, bias, accumulator, labels, *rest, before=0
) -> tuple[Any, ...]:
    """The gradients of x, of weight, or what it and the accumulator add up to, and of bias.

    Those of x and bias have the dtype of sums.
    `rest` is the two of lse, the logits of the last part, or ``None``, and the cotangents of losses
    and lse. `before` counts the classes before those of `weight`.
    """
    *lse, logits, dloss, dlse = rest
    rows, of_sums = options.rows, wide(x.dtype)
    counted = rows.terms.without_ignored(x, labels)
    axes = tuple(range(x.ndim - 1))
    dtype = of_sums if accumulator is not None else jnp.dtype(options.dtype)

    def add(logits: Any, of_part: Any, first: Any, size: int, carry: Any) -> Any:
        dx, dweight, dbias = carry
        du = gradient_of_logits(rows, logits, labels, LogSum(*lse), (dloss, dlse), before + first)
        dx = dx + jnp.matmul(du, of_part.T, preferred_element_type=of_sums)
        # The gradient of the part's weight takes the memory of that weight.
        dx, after = lax.optimization_barrier((dx, counted))
        grad = lax.dot_general(after, du, ((axes, axes), ((), ())), preferred_element_type=dtype)
        if accumulator is not None:
            grad = grad + lax.dynamic_slice_in_dim(dweight, first, size, axis=1)
        dweight = lax.dynamic_update_slice_in_dim(dweight, grad, first, axis=1)
        if dbias is not None:
            sums = jnp.sum(du.astype(of_sums), axis=axes)
            dbias = lax.dynamic_update_slice_in_dim(dbias, sums, first, axis=0)
        return dx, dweight, dbias

    def step(first: Any, size: int, carry: Any) -> Any:
        of_part = _weight_of_part(x, weight, first, size)
        return add(_logits_of_part(x, of_part, bias, first, size), of_part, first, size, carry)

    carry = (
        jnp.zeros_like(x, of_sums),
        jnp.zeros_like(weight, dtype) if accumulator is None else accumulator,
        None if bias is None else jnp.zeros_like(bias, of_sums),
    )
    last = options.last(weight)
    if logits is None:
        carry = step(*last, carry)
    else:
        carry = add(logits, _weight_of_part(x, weight, *last), *last, carry)
    return options.over_others(weight, step, carry)


def _gradients_of_classes(options: Parts, *arrays: Any) -> tuple[Any, ...]:
    """What :func:`_gradients` gives; the last of `arrays` counts the classes before."""
    *given, before = arrays
    return _gradients(options, *given, before=before)


def _shares(options: Parts, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    """The gradients that devices add, in fp32, without the accumulator."""
    return _gradients(options, x, weight, bias, None, *rest)


def _in_wide(options: Parts) -> Parts:
    """The options of a device whose sums go into those of others."""
    return dataclasses.replace(options, dtype=str(wide(options.dtype)))


def _finished(options: Parts, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    *_, dx, dweight, dbias = rest
    if accumulator is not None:
        return dx, accumulator + dweight, dbias
    return dx, None if dweight is None else dweight.astype(options.dtype), dbias


# Where devices have classes of their own


def _of_device(options: Parts, axes: Axes, weight: Any) -> tuple[Parts, Any]:
    """A device's options, and how many classes there are before those of its `weight`."""
    classes = options.classes // lax.axis_size(axes)
    options = dataclasses.replace(_in_wide(options), classes=classes)
    return options, lax.axis_index(axes) * weight.shape[1]


def _losses_of_device(run: Any, axes: Axes, options: Parts, x, weight, bias, labels) -> Any:
    of_device, before = _of_device(options, axes, weight)
    *sums, logits = run(of_device, x, weight, bias, labels, before, of=_SUMS)
    losses, lse = options.rows.loss(over_devices(axes, Sums(*sums)), labels)
    return *(only_if(is_first(axes), v) for v in (losses, *lse)), logits


def _gradients_of_device(run: Any, axes: Axes, options: Parts, *arrays: Any) -> Any:
    x, weight, bias, _, *rest = arrays
    options, before = _of_device(options, axes, weight)
    return run(options, x, weight, bias, None, *rest, before, of=_SHARES)


def _unfit(options: Parts, devices: int, x: Any, weight: Any, *rest: Any) -> str | None:
    del x, rest
    if options.classes % devices:
        return (
            f"the logits' memory is for {options.classes} of {weight.shape[1]} classes at once, "
            f"which {devices} devices cannot share alike"
        )
    return None


_SUMS = KernelPass(
    "linear_cross_entropy_sums",
    reference=_sums,
    ins=("... k", "k v", "v", "...", ""),
    outs=(*("...",) * 4, "... v"),
)
_SHARES = KernelPass(
    "linear_cross_entropy_shares",
    reference=_gradients_of_classes,
    ins=("... k", "k v", "v", "k v", *("...",) * 3, "... v", "...", "...", ""),
    outs=("... k", "k v", "v"),
)
FORWARD_IN_PARTS = KernelPass(
    "linear_cross_entropy_fwd",
    reference=_losses,
    ins=("... k", "k v", "v", "..."),
    outs=("...", "...", "...", "... v"),
    whole="k",
    sequence=Sequence(_losses_of_device, _unfit, factor="v"),
)
BACKWARD_IN_PARTS = KernelPass(
    "linear_cross_entropy_bwd",
    reference=_gradients,
    ins=("... k", "k v", "v", "k v", *("...",) * 3, "... v", "...", "..."),
    outs=("... k", "k v", "v"),
    whole="k",
    sequence=Sequence(_gradients_of_device, _unfit, factor="v"),
    partial=Partial(
        reference=_shares,
        options=_in_wide,
        finish=_finished,
    ),
)
