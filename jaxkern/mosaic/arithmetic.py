"""The logistic function in kernels, exact or faster, and what other functions are made of."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.mosaic.instructions import fast_reciprocal

LOG2E = 1.4426950408889634


def sigmoid(v: jax.Array, exact: bool, layout: Any = None) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division.

    `layout` is the layout of `v`, as for :func:`jaxkern.mosaic.instructions.fast_reciprocal`.
    """
    if not exact:
        return fast_reciprocal(1 + jnp.exp2(-LOG2E * v), layout=layout)
    e = exp_of_minus(jnp.abs(v))
    inverse = reciprocal(1 + e)
    return jnp.where(v < 0, e * inverse, inverse)


def exp_of_minus(a: jax.Array) -> jax.Array:
    """exp(−a), a >= 0, by exp2 in two parts, the first product exact.

    Rounding a · log2(e) as a whole would cost up to 1e-6 of the result.
    """
    a = jnp.minimum(a, 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (LOG2E - log2e_head) + (a - head) * LOG2E
    return jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)


def reciprocal(d: jax.Array) -> jax.Array:
    """1 / d after a Newton step: with approx_math the division alone is 2 units off."""
    r = 1 / d
    return r * (2 - d * r)


def polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    """Σ c[k] · x^k."""
    total: Any = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total
