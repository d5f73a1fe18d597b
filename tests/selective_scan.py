"""What tests of selective_scan share: what those of ssd do, and its kernels each by itself."""

import functools

import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern.ops.selective_scan.reference import saved_dtype
from tests import ssd
from tests.ssd import INF


def in_heads(x, dt, A, B, C, D, z, dt_bias, *states_and_dout):
    """Arguments of ssd's oracle: channels are heads of one, with a rate for each state."""
    h, dout, dfinal = (*states_and_dout, None, None, None)[:3]
    x, z, dout = (v if v is None else v[..., None] for v in (x, z, dout))
    h, dfinal = (v if v is None else v[:, :, None] for v in (h, dfinal))
    B, C = (v if v.ndim == 4 else v[:, :, None] for v in (B, C))
    return x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal


NO_LIMIT = {"dt_limit": (-INF, INF)}
"""The default of selective_scan alone."""


def oracle(*arrays, **options):
    """Output, final state and gradients in float64 NumPy; what is absent is None."""
    (out, final), grads = ssd.oracle(*in_heads(*arrays), **NO_LIMIT | options)
    flat = (g if a is None else g.reshape(a.shape) for g, a in zip(grads, arrays, strict=False))
    return (out[..., 0], final[:, :, 0]), tuple(flat)


def plain(*arrays, **options):
    """What a user would write: a scan over time, in the dtype of x."""
    state = arrays[8:] or [jnp.zeros((len(arrays[0]), *arrays[2].shape))]
    out, final = ssd.plain(*in_heads(*arrays[:8], *state)[:9], **NO_LIMIT | options)
    return (out[..., 0], final[:, :, 0]) if arrays[8:] else out[..., 0]


def inputs(*size_and_dtypes, **options):
    """Like a Mamba block's, with rates from 1 to N. No initial state."""
    return inputs_and_state(*size_and_dtypes, **options)[:-1]


def inputs_and_state(
    batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None
):
    x, weights = (batch, length, dim), (*(() if groups is None else (groups,)), states)
    rates = lambda rng: -np.arange(1.0, states + 1) * np.exp(0.1 * rng.normal(size=(dim, states)))
    of_tokens = x, x, rates, (batch, length, *weights)
    return ssd.drawn(*of_tokens, (dim,), (batch, dim, states), dtype, weight_dtype, seed)


scan = functools.partial(ssd.scan, op=jaxkern.selective_scan)
STEP = jaxkern.selective_scan_step


def check_case(arrays, implementation, **options):
    """States may be rounded to bf16 where they are saved, as what is computed of them is."""
    x, dt, _, B, C, _, z, *_ = arrays
    in_bf16 = saved_dtype("float32", x, dt, B, C, z) == jnp.bfloat16
    rounding = 2.0**-9 if in_bf16 and implementation != "xla" else 0.0
    ssd.check_scan(scan, plain, oracle, arrays, implementation, rounding, **options)
