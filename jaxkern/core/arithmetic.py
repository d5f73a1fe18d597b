"""Softplus, its slope and the sigmoid in a kernel, to fp32 accuracy or with fewer instructions."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.mosaic import fast_reciprocal

LOG2E = 1.4426950408889634


def softplus(v: jax.Array, exact: bool) -> jax.Array:
    """max(v, 0) + log1p(e), e = exp(−|v|), to fp32 accuracy relative to the result, or to 1e-5."""
    if not exact:
        e = jnp.exp2(-LOG2E * jnp.abs(v))
        # The logarithm is exact to 1e-7, not relative to a small result.
        small = e * (1 - e * (1 / 2 - e * (1 / 3)))
        return jnp.maximum(v, 0.0) + jnp.where(e < 1 / 64, small, jnp.log(1 + e))
    e = _exp_of_minus(jnp.abs(v))
    # log1p(e) = 2 · artanh(s), s = e / (2 + e) <= 1/3, by its series up to s^15.
    s = e * _reciprocal(2 + e)
    square = s * s
    series = 1 / 15
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(v, 0.0) + 2 * s * series


def softplus_slope(dt: jax.Array, exact: bool) -> jax.Array:
    """softplus'(v) = 1 − exp(−dt) from dt = softplus(v), by its series where that would cancel."""
    limit, divisors = (0.25, (720, 120, 24, 6, 2, 1)) if exact else (1 / 32, (6, 2, 1))
    first, *others = divisors
    series: Any = 1 / first
    for k in others:
        series = 1 / k - dt * series
    return jnp.where(dt < limit, dt * series, 1 - jnp.exp2(-LOG2E * dt))


def sigmoid(v: jax.Array, exact: bool, interpret: bool, layout: Any = None) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division.

    `layout` is that of `v`, as for :func:`jaxkern.core.mosaic.fast_reciprocal`.
    """
    if not exact:
        return fast_reciprocal(1 + jnp.exp2(-LOG2E * v), layout=layout, interpret=interpret)
    e = _exp_of_minus(jnp.abs(v))
    inverse = _reciprocal(1 + e)
    return jnp.where(v < 0, e * inverse, inverse)


def _exp_of_minus(a: jax.Array) -> jax.Array:
    """exp(−a), a >= 0, by exp2 in two parts, the first product exact.

    Rounding a · log2(e) as a whole would cost up to 1e-6 of the result.
    """
    a = jnp.minimum(a, 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (LOG2E - log2e_head) + (a - head) * LOG2E
    return jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)


def _reciprocal(d: jax.Array) -> jax.Array:
    """1 / d after a Newton step: with approx_math the division alone is 2 units off."""
    r = 1 / d
    return r * (2 - d * r)
