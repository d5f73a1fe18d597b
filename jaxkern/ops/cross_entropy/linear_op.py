"""The cross-entropy of a linear layer's results; equations in :mod:`jaxkern.ops.cross_entropy.op`.

Three rules compute it. :func:`_all_logits` here saves the logits. The other two,
in :mod:`jaxkern.ops.cross_entropy.memory`, hold chunks of rows or parts of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating, check_integer
from jaxkern.core.bound import wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, lse_op, resolve
from jaxkern.core.kernel_pass import named
from jaxkern.ops.cross_entropy.memory import (
    ChunkOptions,
    PartOptions,
    classes_of_part,
    in_chunks,
    in_parts,
    rows_of_chunk,
)
from jaxkern.ops.cross_entropy.op import (
    Reduction,
    check_labels,
    check_reduction,
    gradient_of_logits,
    reduced,
    sums_of_rows,
    unsupported,
)
from jaxkern.ops.cross_entropy.reference import LossOptions, Terms, losses_of_rows
from jaxkern.ops.linear import op as linear_op
from jaxkern.ops.linear import products
from jaxkern.ops.linear.products import check_accumulator


@lse_op
def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    memory: int | None = None,
    accumulator: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The cross-entropy of a language model's last layer: of ``x @ weight + bias`` and labels.

    .. math:: \text{loss} = \operatorname{cross\_entropy}(x w + b, \; y)

    with the options of :func:`cross_entropy`. Products take the dtype of `x` and are summed in
    fp32. By default the logits are kept for the backward in the dtype of `x`, and their gradient
    takes their memory: three products. With `memory` they take no more than that at once:

    - in up to six chunks of 512 rows or more, if these are enough: the forward computes the
      gradients, three products again. The gradient of `weight` is added up in its dtype: in
      bfloat16 its error grows with the number of chunks, to less than twice the error of one
      product;
    - or else in parts of the vocabulary, all but one of which the backward computes again: nearly
      four products. Losses of rows, `return_lse`, an `accumulator`, float16, and a `weight` of
      another dtype than `x` always take this way.

    A row whose label is `ignore_index` has no part in any gradient, and may hold NaN.

    On a mesh, rows and V may be split between devices, and without `memory` K, too: neither logits
    nor `weight` are gathered, but where the number of devices does not divide V, or, with a
    warning, the classes of a part, a multiple of 128.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight: (K, V), any of those dtypes. A tied embedding (V, K) goes in as ``embedding.T``, which
        is no copy in a compiled program.
      labels: (...), integers from 0 to V - 1, or `ignore_index`.
      bias: (V,), any of those dtypes, or ``None``.
      ignore_index, label_smoothing, z_loss, logit_softcap, reduction, return_lse: as for
        :func:`cross_entropy`.
      memory: bytes that logits may take, at least the logits of 128 classes; ``None`` for no limit.
        In parts, a part's weight and the gradient of `x` in float32 take memory besides. With
        ``implementation="xla"`` there is no limit.
      accumulator: (K, V), float32, the gradient of `weight` so far, or ``None``: as for
        :func:`linear`, its gradient is what `weight`'s adds up to.
      implementation: as for :func:`cross_entropy`; :func:`linear` chooses for the products.

    Returns:
      The loss, float32, () or with ``reduction="none"`` (...); with `return_lse` a pair of it and
      lse, (...), float32, 0 in the rows that are ignored.

    Raises:
      TypeError: an argument is not an array of a real floating dtype (`labels`: integer), or an
        option is no Python number.
      ValueError: shapes do not fit, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` where the kernels cannot take the call, or
        `memory` and a symbolic shape.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, embedding = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.zeros((1024, 64))
      >>> labels = jnp.zeros((2, 8), jnp.int32)
      >>> loss = jaxkern.linear_cross_entropy(x, embedding.T, labels)
      >>> in_parts = jaxkern.linear_cross_entropy(x, embedding.T, labels, memory=2**14)
      >>> print(f"{loss:.4f}, {in_parts:.4f} = log 1024")
      6.9315, 6.9315 = log 1024

    References:
      Wijmans et al., `Cut Your Losses in Large-Vocabulary Language Models
      <https://arxiv.org/abs/2411.09009>`_, 2024.
    """
    x, weight = check_floating("x", x), check_floating("weight", weight)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, the one that weight multiplies; got ()")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] == 0:
        raise ValueError(
            f"weight must have shape (K, V), K = {x.shape[-1]} the last axis of x and V at least "
            f"1; got {weight.shape}. A weight stored as (V, K) goes in as weight.T"
        )
    if bias is not None:
        bias = check_array("bias", bias, weight.shape[1:], "(V,), V the last axis of weight")
    if accumulator is not None:
        accumulator = check_accumulator(
            "accumulator", accumulator, weight.shape, "the shape of weight"
        )
    terms = Terms.checked(ignore_index, label_smoothing, z_loss, logit_softcap)
    labels = check_labels(labels, x.shape[:-1], "(...) of x", terms)
    check_reduction(reduction)
    nbytes = _check_memory(memory, x, weight)
    if implementation == "xla":
        nbytes = None
    chunk = part = None
    if reduction != "none" and not return_lse and accumulator is None:
        chunk = rows_of_chunk(nbytes, x, weight)
    if chunk is None:
        part = classes_of_part(nbytes, x, weight)
    logits = jax.ShapeDtypeStruct((*x.shape[:-1], part or weight.shape[1]), x.dtype)
    mode = resolve(implementation, unsupported(logits), op="linear_cross_entropy")
    options = LossOptions(terms, weight.shape[1], mode)
    of_product = None if implementation == "mosaic" else implementation
    mode = resolve(of_product, products.unsupported(x=x, weight=weight), op="linear")
    product = products.LinearOptions(None, False, None, "float32", mode)
    match chunk, part:
        case int(), _:
            count = terms.count(labels) if reduction == "mean" else jnp.float32(1)
            chunks = ChunkOptions.of(options, chunk, weight.dtype)
            return in_chunks(x, weight, bias, labels, count.astype(wide(x.dtype)), chunks)
        case _, int():
            parts = PartOptions.of(options, part)
            losses, lse = in_parts(x, weight, bias, accumulator, labels, parts)
        case _ if implementation == "xla" and accumulator is None:
            x = terms.without_ignored(x, labels)
            logits = products.reference_forward(product, x, weight, bias)[0]
            losses, lse = named("linear_cross_entropy", losses_of_rows(logits, labels, terms))
        case _:
            losses, lse = _all_logits_jit(x, weight, bias, accumulator, labels, options, product)
    return reduced(reduction, return_lse, losses, lse, labels, terms)


def _check_memory(memory: Any, x: jax.Array, weight: jax.Array) -> int | None:
    if memory is None:
        return None
    nbytes = check_integer("memory", memory, minimum=1, optional=True)
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        raise NotImplementedError(
            f"memory needs sizes, and x is {x.shape}, weight {weight.shape}; use memory=None"
        )
    return nbytes


@functools.partial(Differentiable, options=2)
def _all_logits(x, weight, bias, accumulator, labels, options, product):
    return _all_logits_fwd(x, weight, bias, accumulator, labels, options, product)[0]


def _all_logits_fwd(x, weight, bias, accumulator, labels, options, product):
    logits = named("linear_cross_entropy", linear_op.FORWARD(product, x, weight, bias)[0])
    losses = options.loss(sums_of_rows(options, logits, labels), labels)
    losses, lse = named("linear_cross_entropy", losses)
    return (losses, lse.value), (x, weight, bias, accumulator, labels, logits, lse)


def _all_logits_bwd(options, product, res, cotangents):
    x, weight, bias, accumulator, labels, logits, lse = res
    du = gradient_of_logits(options, logits, labels, lse, cotangents)
    x = options.terms.without_ignored(x, labels)
    accumulators = None if accumulator is None else (accumulator,)
    grads = linear_op.gradients(product, x, (du,), (weight,), (bias,), accumulators)
    dx, [dweight], [dbias], totals = grads
    return dx, dweight, dbias, None if totals is None else totals[0], None


_all_logits.defvjp(_all_logits_fwd, _all_logits_bwd)
_all_logits_jit = jax.jit(_all_logits, static_argnums=(5, 6))
