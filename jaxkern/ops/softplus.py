"""Softplus, its slope and exp2 in the scans' kernels, exact or faster."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.arithmetic import LOG2E, exp_of_minus, polynomial

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
