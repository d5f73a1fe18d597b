"""The cross-entropy of a linear layer's results: all logits at once, in chunks of rows, in parts.

The equations, and what each of the three saves, are in :mod:`jaxkern.ops.cross_entropy.op`.
"""

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating, check_integer
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import named
from jaxkern.core.mesh import TypeOf, match_primal
from jaxkern.lowering.bound import standard_promotion, wide
from jaxkern.ops.cross_entropy.chunks import IN_CHUNKS, Chunks, rows_of_chunk
from jaxkern.ops.cross_entropy.op import Reduction, check_labels, check_reduction, reduced
from jaxkern.ops.cross_entropy.parts import (
    BACKWARD_IN_PARTS,
    FORWARD_IN_PARTS,
    Parts,
    classes_of_part,
)
from jaxkern.ops.cross_entropy.passes import gradient_of_logits, losses_of_logits, unsupported
from jaxkern.ops.cross_entropy.rows import Rows, Terms, losses_of_rows
from jaxkern.ops.linear import op as linear_op
from jaxkern.ops.linear import products
from jaxkern.ops.linear.products import check_accumulator


@overload
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
    return_lse: Literal[False] = False,
    memory: int | None = None,
    accumulator: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    *args: Any, return_lse: Literal[True], **options: Any
) -> tuple[jax.Array, jax.Array]: ...


@public_op
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
) -> Any:
    r"""The cross-entropy of a language model's last layer: of ``x @ weight + bias`` and labels.

    .. math:: \text{loss} = \operatorname{cross\_entropy}(x w + b, \; y)

    with the options of :func:`cross_entropy`. Products take the dtype of `x` and are summed in
    fp32. By default the logits are kept for the backward in the dtype of `x`, and their gradient
    takes their memory: three products. With `memory` they take no more than that at once:

    - in up to six chunks of 512 rows or more, if so few are enough: the gradients are formed in the
      forward, three products again. That of `weight` is added up in its dtype: in bfloat16 its
      error grows with the number of chunks, to less than twice that of one product;
    - or else in parts of the vocabulary, all but one of which are computed again in the backward:
      nearly four products. So are losses of rows, `return_lse`, an `accumulator`, float16, and a
      `weight` of another dtype than `x`.

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
      ignore_index: as for :func:`cross_entropy`, and so are the next five.
      label_smoothing: likewise.
      z_loss: likewise.
      logit_softcap: likewise.
      reduction: likewise.
      return_lse: likewise.
      memory: bytes that logits may take, at least those of 128 classes; ``None`` for all that they
        need. In parts, a part's weight and the gradient of `x` in float32 take memory beside them.
        With ``implementation="xla"`` logits always take all.
      accumulator: (K, V), float32, the gradient of `weight` so far, or ``None``: as for
        :func:`linear`, its gradient is what `weight`'s adds up to.
      implementation: as for :func:`cross_entropy`; the products are those of :func:`linear`,
        which chooses theirs.

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
    chunk = None
    if reduction != "none" and not return_lse and accumulator is None:
        chunk = rows_of_chunk(nbytes, x, weight)
    part = None if chunk else classes_of_part(nbytes, x, weight)
    logits = jax.ShapeDtypeStruct((*x.shape[:-1], part or weight.shape[1]), x.dtype)
    rows = Rows(
        terms,
        weight.shape[1],
        resolve(implementation, unsupported(logits), op="linear_cross_entropy"),
    )
    by_product = None if implementation == "mosaic" else implementation
    mode = resolve(by_product, products.unsupported(x=x, weight=weight), op="linear")
    of_product = products.Options(None, False, None, "float32", mode)
    if implementation == "xla" and accumulator is None:
        x = terms.without_ignored(x, labels)
        logits = products.reference_forward(of_product, x, weight, bias)[0]
        losses, lse = named("linear_cross_entropy", losses_of_rows(logits, labels, terms))
    elif chunk and implementation != "xla":
        count = terms.count(labels) if reduction == "mean" else jnp.float32(1)
        count = count.astype(wide(x.dtype))
        of_chunks = Chunks.of(rows, chunk, weight.dtype)
        return _in_chunks_jit(x, weight, bias, labels, count, of_chunks)
    elif part is None or implementation == "xla":
        losses, lse = _linear_rows_jit(x, weight, bias, accumulator, labels, rows, of_product)
    else:
        parts = Parts.of(rows, part)
        losses, lse = _in_parts_jit(x, weight, bias, accumulator, labels, parts)
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
def _linear_rows(x, weight, bias, accumulator, labels, rows, options):
    del accumulator
    _, losses, lse = _linear_forward(x, weight, bias, labels, rows, options)
    return losses, lse.value


def _linear_forward(x, weight, bias, labels, rows, options):
    """The logits, losses and lse."""
    logits = named("linear_cross_entropy", linear_op.FORWARD(options, x, weight, bias)[0])
    losses = losses_of_logits(rows, logits, labels)
    return logits, *named("linear_cross_entropy", losses)


def _linear_rows_fwd(x, weight, bias, accumulator, labels, rows, options):
    logits, losses, lse = _linear_forward(x, weight, bias, labels, rows, options)
    return (losses, lse.value), (x, weight, bias, accumulator, labels, logits, lse)


def _linear_rows_bwd(rows, options, res, cotangents):
    x, weight, bias, accumulator, labels, logits, lse = res
    du = gradient_of_logits(rows, logits, labels, lse, cotangents)
    of_type = lambda v: dataclasses.replace(options, dtype=str(v.dtype))
    [dx] = linear_op.DX(of_type(du), du, weight)
    x = rows.terms.without_ignored(x, labels)
    dweight = total = None
    if accumulator is None:
        [dweight] = linear_op.DWEIGHT(of_type(weight), x, du)
    else:
        passes = linear_op.DWEIGHT, linear_op.ACCUMULATE
        [total] = linear_op.accumulated(*passes, options, (accumulator,), x, du)
    return (
        match_primal(dx, x),
        match_primal(dweight, weight),
        match_primal(products.bias_gradient(du, bias), bias),
        match_primal(total, accumulator),
        None,
    )


_linear_rows.defvjp(_linear_rows_fwd, _linear_rows_bwd)
_linear_rows_jit = jax.jit(_linear_rows, static_argnums=(5, 6))


@Differentiable
def _in_parts(x, weight, bias, accumulator, labels, options):
    del accumulator
    return FORWARD_IN_PARTS(options, x, weight, bias, labels)[:2]


def _in_parts_fwd(x, weight, bias, accumulator, labels, options):
    options = dataclasses.replace(options, save=True)
    losses, *lse, logits = FORWARD_IN_PARTS(options, x, weight, bias, labels)
    return (losses, lse[0]), (x, weight, bias, accumulator, labels, lse, logits)


def _in_parts_bwd(options, res, cotangents):
    x, weight, bias, accumulator, labels, lse, logits = res
    options = dataclasses.replace(options, dtype=str(weight.dtype))
    apart = accumulator is not None and products.varies_more(x, accumulator)
    given = None if apart else accumulator
    dx, dweight, dbias = BACKWARD_IN_PARTS(
        options, x, weight, bias, given, labels, *lse, logits, *cotangents
    )
    total = None
    if accumulator is not None:
        total, dweight = dweight, None
        if apart:
            total = accumulator + match_primal(total, accumulator)
    grads = (dx, x), (dweight, weight), (dbias, bias), (total, accumulator)
    cast = lambda grad, like: match_primal(grad, like).astype(like.dtype)
    return *(None if grad is None else cast(grad, like) for grad, like in grads), None


_in_parts.defvjp(_in_parts_fwd, _in_parts_bwd)
_in_parts_jit = jax.jit(_in_parts, static_argnums=5)


@Differentiable
def _in_chunks(x, weight, bias, labels, count, options):
    losses = IN_CHUNKS(options, x, weight, bias, labels)[0]
    return jnp.sum(losses) / count


@standard_promotion()  # JAX traces the rules outside of the public function
def _in_chunks_fwd(x, weight, bias, labels, count, options):
    options = dataclasses.replace(options, gradients=True)
    losses, *grads = IN_CHUNKS(options, x, weight, bias, labels)
    types = tuple(None if v is None else TypeOf(jax.typeof(v)) for v in (x, weight, bias))
    return jnp.sum(losses) / count, (tuple(grads), types, count)


@standard_promotion()
def _in_chunks_bwd(options, res, cotangent):
    del options
    grads, types, count = res
    of_sum = cotangent / count
    scaled = lambda grad, like: match_primal((of_sum * grad).astype(like.aval.dtype), like)
    pairs = zip(grads, types, strict=True)
    return *(None if like is None else scaled(grad, like) for grad, like in pairs), None, None


_in_chunks.defvjp(_in_chunks_fwd, _in_chunks_bwd)
_in_chunks_jit = jax.jit(_in_chunks, static_argnums=5)
