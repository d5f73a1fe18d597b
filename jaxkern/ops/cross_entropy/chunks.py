"""A loss and its gradients with the logits in chunks of rows, which are computed once.

Where one number is the cotangent of all losses, as that of their sum or mean is, the gradients of
the sum can be formed in the forward, while a chunk's logits are there: three products, and the
memory of one chunk. The backward multiplies them by the cotangent. It is not multiplied into the
gradient of the logits: there the elements of labels, nearly -cotangent each where softmaxes are
small, would all be rounded alike, and such errors add up.

The gradient of the weight is read and written once a chunk, 4·K·V bytes of bfloat16, which is less
time than the fourth product of :mod:`~jaxkern.ops.cross_entropy.parts` where a chunk has some 400
rows or more.

Where the vocabulary is split between devices, these exchange the sums of rows of every chunk.
"""

import dataclasses
import functools
import math
import operator
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
from jaxkern.ops.cross_entropy.rows import Rows

_MOST = 6
"""Chunks of 16-bit arrays: their gradient of the weight is rounded once a chunk, by 6 to some 1.9
times the error of one product. More memory than so many leave is saved by parts of the classes."""

_LEAST_ROWS = 512
"""Rows of a chunk, of fewer of which a fourth product costs less than the gradient's traffic."""

_ALIGNED = 8
"""A chunk is a multiple of so many rows, or products copy their arguments."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The static arguments of the pass that computes logits in chunks of rows.

    Attributes:
      size: rows of a chunk; a device's first one may have fewer.
      dtype: of the gradients of x and weight, or that in which devices add.
      gradients: whether the pass gives them, beside losses.
      axes: of a mesh, over which the classes are split.
    """

    rows: Rows
    size: int
    dtype: str
    gradients: bool = False
    axes: Axes = ()
    mode: Mode = "auto"

    @classmethod
    def of(cls, rows: Rows, size: int, dtype: Any) -> "Chunks":
        """Chunks of so many rows, for the options of passes over whole rows."""
        inside, mode = rows.inside()
        return cls(inside, size, str(dtype), mode=mode)


def rows_of_chunk(nbytes: int | None, x: jax.Array, weight: jax.Array) -> int | None:
    """The rows of a chunk whose logits take at most `nbytes`, in as few chunks as that allows.

    ``None`` where there is one alone, or where parts of the classes are better: for fewer rows a
    chunk, for more chunks than a 16-bit gradient may be rounded, for float16, which is scaled in
    the backward alone, and for a weight of another dtype than x, which would be cast as a whole.
    """
    if nbytes is None or weight.dtype != x.dtype or x.dtype == jnp.float16:
        return None
    rows = math.prod(x.shape[:-1])
    most = nbytes // (weight.shape[1] * x.dtype.itemsize) // _ALIGNED * _ALIGNED
    if most >= rows or most < _LEAST_ROWS:
        return None
    count = -(-rows // most)
    if x.dtype.itemsize == 2 and count > _MOST:
        return None
    return -(-rows // (count * _ALIGNED)) * _ALIGNED


def _losses(options: Chunks, x, weight, bias, labels) -> tuple[Any, ...]:
    """The losses of rows and, if the options say so, the gradients of their sum.

    Those of x, weight and bias, the last in the dtype of sums.
    """
    rows, shape = options.rows, x.shape
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    before = lax.axis_index(options.axes) * weight.shape[1] if options.axes else 0
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.dtype(options.dtype))

    def chunk(first: Any, size: int) -> tuple[Any, ...]:
        """What `_losses` gives, of the rows of a chunk."""
        of_x, of_labels = (lax.dynamic_slice_in_dim(v, first, size) for v in (x, labels))
        logits = logits_of(of_x, weight, bias)
        sums = sums_of_rows(rows, logits, of_labels, before)
        if options.axes:
            sums = over_devices(options.axes, sums)
        losses, lse = rows.loss(sums, of_labels)
        if not options.gradients:
            return losses, None, None, None
        # The losses, which read logits, come before the gradient, which takes their memory.
        losses, lse = lax.optimization_barrier((losses, lse))
        cotangents = jnp.ones_like(losses), jnp.zeros_like(losses)
        du = gradient_of_logits(rows, logits, of_labels, lse, cotangents, before)
        counted = rows.terms.without_ignored(of_x, of_labels)
        dbias = None if bias is None else jnp.sum(du.astype(wide(du.dtype)), axis=0)
        return losses, product(du, weight.T), product(counted.T, du), dbias

    def step(first: Any, size: int, carry: Any) -> tuple[Any, ...]:
        """Puts a chunk's losses and dx beside the others', and adds its dweight and dbias."""
        put = lambda all_of, new: lax.dynamic_update_slice_in_dim(all_of, new, first, axis=0)
        join = put, put, operator.add, operator.add  # cuBLAS adds dweight where it lies
        pairs = zip(join, carry, chunk(first, size), strict=True)
        return tuple(None if old is None else f(old, new) for f, old, new in pairs)

    others = max(0, x.shape[0] - 1) // options.size
    first = x.shape[0] - others * options.size
    losses, dx, *sums = chunk(0, first)
    grow = lambda v: jnp.pad(v, ((0, others * options.size), *((0, 0),) * (v.ndim - 1)))
    carry = grow(losses), None if dx is None else grow(dx), *sums
    if others:
        # The others begin after the first, whose memory they take.
        carry = lax.optimization_barrier(carry)
        next_one = lambda i, carry: step(first + i * options.size, options.size, carry)
        carry = lax.fori_loop(0, others, next_one, carry)
    losses, dx, dweight, dbias = carry
    return (
        losses.reshape(shape[:-1]),
        None if dx is None else dx.reshape(shape),
        dweight,
        dbias,
    )


def _in_wide(options: Chunks) -> Chunks:
    """The options of a device whose sums go into those of others."""
    return dataclasses.replace(options, dtype=str(wide(options.dtype)))


def _finished(options: Chunks, x, weight, bias, labels, losses, *grads) -> tuple[Any, ...]:
    dx, dweight, dbias = grads
    cast = lambda v: None if v is None else v.astype(options.dtype)
    return losses, cast(dx), cast(dweight), dbias


def _losses_of_device(run: Any, axes: Axes, options: Chunks, *arrays: Any) -> tuple[Any, ...]:
    del run  # devices meet within the pass
    losses, *grads = _losses(dataclasses.replace(_in_wide(options), axes=axes), *arrays)
    return only_if(is_first(axes), losses), *grads


IN_CHUNKS = KernelPass(
    "linear_cross_entropy_chunks",
    reference=_losses,
    ins=("... k", "k v", "v", "..."),
    outs=("...", "... k", "k v", "v"),
    whole="k",
    sequence=Sequence(_losses_of_device, factor="v"),
    partial=Partial(reference=_losses, options=_in_wide, finish=_finished),
    saved_as="linear_cross_entropy",
)
