"""Elementwise functions of kernels: sigmoid, softplus and exp2, exact or faster."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.target import interpreted
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


_LOG1P = (
    (0.9999987, -0.49986964, 0.3310945, -0.23503861, 0.14922388, -0.0664018, 0.014141024),
    (
        *(0.99999994, -0.49999493, 0.33319098, -0.24842982, 0.19106007, -0.13663246),
        *(0.07822596, -0.02950524, 0.0052326941),
    ),
)
"""log(1 + e) / e on [0, 1], its minimax polynomials of relative error 1.3e-6 and 3e-8."""


def softplus(v: jax.Array, exact: bool) -> jax.Array:
    """max(v, 0) + log(1 + e), e = exp(−|v|), to fp32 accuracy or to 5e-6, of the result."""
    magnitude = jnp.abs(v)
    e = exp_of_minus(magnitude) if exact else jnp.exp2(-LOG2E * magnitude)
    return jnp.maximum(v, 0.0) + e * polynomial(_LOG1P[exact], e)


def softplus_slope(dt: jax.Array, exact: bool) -> jax.Array:
    """softplus'(v) = 1 − exp(−dt) from dt = softplus(v), by its series where that would cancel."""
    limit, divisors = (0.25, (720, 120, 24, 6, 2, 1)) if exact else (1 / 32, (6, 2, 1))
    first, *others = divisors
    series: Any = 1 / first
    for k in others:
        series = 1 / k - dt * series
    return jnp.where(dt < limit, dt * series, 1 - jnp.exp2(-LOG2E * dt))


def nearest(x: jax.Array) -> jax.Array:
    """The whole number nearest to x, of a magnitude below 2^22, by two additions."""
    if interpreted():
        return jnp.round(x)
    shift = 1.5 * 2**23
    return (x + shift) - shift


_EXP2 = (1.0000001, 0.69314694, 0.2402212, 0.05550713, 0.009675541, 0.0013276472)
"""2^f on [−1/2, 1/2], its minimax polynomial of relative error 8e-8."""


def exp2_by_polynomial(x: jax.Array) -> jax.Array:
    """2^x to 2 units in the last place, by multiplications and additions alone.

    As with ``exp2`` it is 0 below 2^−126, inf from 2^128 on, and NaN of a NaN.
    """
    x = jnp.minimum(jnp.maximum(x, -126.0), 129.0)
    # Adding `shift` rounds x to an integer in the lowest bits of the sum, which are shifted to the
    # exponent's. It is one less than the exponent, whose highest value stands for inf.
    shift = 1.5 * 2**23 + 126
    shifted = x + shift
    fraction = x - (jnp.abs(shifted) - shift)  # abs, for XLA may take x + shift − shift for x
    power = lax.shift_left(lax.bitcast_convert_type(shifted, jnp.int32), 23)
    twice = [2 * c for c in _EXP2]
    return lax.bitcast_convert_type(power, jnp.float32) * polynomial(twice, fraction)
