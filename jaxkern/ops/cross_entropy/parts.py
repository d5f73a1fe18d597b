"""Losses and gradients with the logits in parts of the vocabulary, which are computed twice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.ops.cross_entropy.rows import Terms


@dataclasses.dataclass(frozen=True)
class Parts:
    """The static arguments of the passes that compute logits in parts.

    Attributes:
      classes: of a part; the last one may have fewer.
      dtype: of the gradients of weight and bias, that of the weight or that in which devices add.
    """

    terms: Terms
    classes: int
    dtype: str = "float32"
    mode: Mode = "auto"


def _over_parts(options: Parts, count: int, step: Any, carry: Any) -> Any:
    """``carry = step(first class, classes, carry)`` for each part of `count` classes."""
    size = options.classes
    whole, rest = divmod(count, size)
    carry = lax.fori_loop(0, whole, lambda n, carry: step(n * size, size, carry), carry)
    return step(whole * size, rest, carry) if rest else carry


def _logits_of_part(x, weight, bias, first, size) -> tuple[jax.Array, jax.Array]:
    """The logits of a part, in the dtype of x, and its weight in that dtype, (K, size)."""
    part = lax.dynamic_slice_in_dim(weight, first, size, axis=1).astype(x.dtype)
    logits = jnp.matmul(x, part, preferred_element_type=_wide(x.dtype))
    if bias is not None:
        logits = logits + lax.dynamic_slice_in_dim(bias, first, size).astype(logits.dtype)
    return logits.astype(x.dtype), part


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _here_in_part(labels: jax.Array, first: Any, size: int) -> jax.Array:
    return (labels.astype(jnp.int32) - first)[..., None] == jnp.arange(size, dtype=jnp.int32)


def losses_of_parts(options: Parts, x, weight, bias, labels) -> tuple[jax.Array, jax.Array]:
    """Losses and lse; a part adds to the sum of exponentials, relative to the largest logit yet."""
    terms, count = options.terms, weight.shape[1]
    finite = lambda v: jnp.where(jnp.isfinite(v), v, 0)

    def step(first: Any, size: int, carry: Any) -> Any:
        largest, exponentials, chosen, total = carry
        logits, _ = _logits_of_part(x, weight, bias, first, size)
        capped = terms.capped(logits)  # (..., size)
        now = jnp.maximum(largest, jnp.max(capped, axis=-1))
        shrink = jnp.where(largest == -jnp.inf, 0, jnp.exp(finite(largest) - finite(now)))
        added = jnp.sum(jnp.exp(capped - finite(now)[..., None]), axis=-1)
        here = _here_in_part(labels, first, size)
        return (
            now,
            exponentials * shrink + added,
            chosen + jnp.sum(jnp.where(here, capped, 0), axis=-1),
            total + jnp.sum(capped, axis=-1),
        )

    zeros = jnp.zeros_like(jnp.sum(x, axis=-1), _wide(x.dtype))
    begin = (jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)
    largest, exponentials, chosen, total = _over_parts(options, count, step, begin)
    lse = finite(largest) + jnp.log(exponentials)
    return terms.loss(lse, chosen, total, labels, count)


def gradients_of_parts(
    options: Parts, x, weight, bias, accumulator, labels, lse, dloss, dlse
) -> tuple[Any, ...]:
    """The gradients of x, of weight, or what it and the accumulator add up to, and of bias."""
    terms, count = options.terms, weight.shape[1]
    counted = terms.without_ignored(x, labels)
    rows = tuple(range(x.ndim - 1))
    dtype = _wide(x.dtype) if accumulator is not None else jnp.dtype(options.dtype)

    def step(first: Any, size: int, carry: Any) -> Any:
        dx, dweight, dbias = carry
        logits, part = _logits_of_part(x, weight, bias, first, size)
        here = _here_in_part(labels, first, size)
        du = terms.gradient(logits, here, lse, labels, (dloss, dlse), count)
        dx = dx + jnp.matmul(du, part.T, preferred_element_type=dx.dtype)
        of_part = lax.dot_general(
            counted, du, ((rows, rows), ((), ())), preferred_element_type=_wide(x.dtype)
        )
        if accumulator is not None:
            of_part = of_part + lax.dynamic_slice_in_dim(dweight, first, size, axis=1)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=first)
        dweight = put(dweight, of_part.astype(dweight.dtype), axis=1)
        if dbias is not None:
            sums = jnp.sum(du.astype(_wide(du.dtype)), axis=rows)
            dbias = put(dbias, sums.astype(dbias.dtype), axis=0)
        return dx, dweight, dbias

    begin = (
        jnp.zeros_like(x, _wide(x.dtype)),
        jnp.zeros_like(weight, dtype) if accumulator is None else accumulator,
        None if bias is None else jnp.zeros_like(bias, options.dtype),
    )
    return _over_parts(options, count, step, begin)


def added_up(options: Parts, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    """The gradients that devices add, in fp32, without the accumulator."""
    return gradients_of_parts(options, x, weight, bias, None, *rest)


def finished(options: Parts, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    *_, dx, dweight, dbias = rest
    if accumulator is not None:
        return dx, accumulator + dweight, dbias
    cast = lambda v: None if v is None else v.astype(options.dtype)
    return dx, cast(dweight), cast(dbias)
