"""What tests of selective_scan share: a float64 oracle, plain JAX, inputs, a check of accuracy."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
INF = float("inf")


def oracle(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    h,
    dout,
    dfinal,
    *,
    dt_softplus=True,
    dt_limit=(0.0, INF),
    segment_ids=None,
):
    """Output, final state and gradients in float64 NumPy, one step at a time, up and back."""
    batch, length, dim = x.shape
    groups = B.shape[2] if B.ndim == 4 else 1
    of_channel = lambda v: np.repeat(v.reshape(batch, groups, -1), dim // groups, axis=1)
    of_group = lambda v: v.reshape(batch, groups, dim // groups, -1).sum(2).reshape(B[:, 0].shape)
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    keep = np.ones((batch, length, 1, 1))
    keep[:, 1:, 0, 0] = ids[:, 1:] == ids[:, :-1]
    raw = dt + dt_bias
    smooth = np.logaddexp(raw, 0) if dt_softplus else raw
    slope = 1 / (1 + np.exp(-raw)) if dt_softplus else np.ones_like(raw)
    slope = slope * (smooth >= dt_limit[0]) * (smooth <= dt_limit[1])
    step = np.minimum(np.maximum(smooth, dt_limit[0]), dt_limit[1])
    gate = 1 / (1 + np.exp(-z))
    before = np.empty((length, *h.shape))
    y = np.empty_like(x)
    for t in range(length):
        before[t] = keep[:, t] * h
        enters = (step[:, t] * x[:, t])[:, :, None] * of_channel(B[:, t])
        h = np.exp(step[:, t, :, None] * A) * before[t] + enters
        y[:, t] = np.sum(of_channel(C[:, t]) * h, axis=-1) + D * x[:, t]
    final = h
    out = y * z * gate
    dy = dout * z * gate
    dz = dout * y * (gate + z * gate * (1 - gate))
    dx, dstep = dy * D, np.zeros_like(x)
    dA, dB, dC = np.zeros_like(A), np.zeros_like(B), np.zeros_like(C)
    dh = dfinal.copy()
    for t in reversed(range(length)):
        decay = np.exp(step[:, t, :, None] * A)
        entered = (step[:, t] * x[:, t])[:, :, None]
        after = decay * before[t] + entered * of_channel(B[:, t])
        dh += dy[:, t, :, None] * of_channel(C[:, t])
        dC[:, t] = of_group(dy[:, t, :, None] * after)
        dB[:, t] = of_group(dh * entered)
        into = np.sum(dh * of_channel(B[:, t]), axis=-1)
        ddecay = dh * before[t] * decay
        dx[:, t] += into * step[:, t]
        dstep[:, t] = into * x[:, t] + np.sum(ddecay * A, axis=-1)
        dA += np.einsum("bdn,bd->dn", ddecay, step[:, t])
        dh = keep[:, t] * dh * decay
    ddt = dstep * slope
    sums = ((dy * x).sum((0, 1)), ddt.sum((0, 1)))
    return (out, final), (dx, ddt, dA, dB, dC, sums[0], dz, sums[1], dh)


def plain(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    initial_state=None,
    *,
    dt_softplus=True,
    dt_limit=(0.0, INF),
    segment_ids=None,
):
    """What a user would write: a scan over time, in the dtype of x."""
    if absent := initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *A.shape))
    A, B, C, D, dt, dt_bias, h = (
        v.astype(x.dtype) for v in (A, B, C, D, dt, dt_bias, initial_state)
    )
    dt = dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    dt = jnp.where(dt < dt_limit[0], dt_limit[0], jnp.where(dt > dt_limit[1], dt_limit[1], dt))
    of_channel = lambda v: jnp.repeat(v, A.shape[0] // v.shape[2], axis=2)
    B, C = (of_channel(v if v.ndim == 4 else v[:, :, None]) for v in (B, C))
    ids = jnp.zeros(x.shape[:2], int) if segment_ids is None else segment_ids
    keep = (ids == jnp.concatenate([ids[:, :1], ids[:, :-1]], 1)).astype(x.dtype)

    def step(h, token):
        x, dt, b, c, keep = token
        h = jnp.exp(dt[..., None] * A) * keep[:, None, None] * h + (dt * x)[..., None] * b
        return h, jnp.sum(h * c, axis=-1)

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, keep))
    h, y = jax.lax.scan(step, h, tokens)
    out = (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z.astype(x.dtype))
    return out if absent else (out, h)


def inputs(batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None):
    """Like a Mamba block's: step sizes from 0.01 to 1, rates from 1 to N. No initial state."""
    return inputs_and_state(batch, length, dim, states, dtype, weight_dtype, seed, groups)[:-1]


def inputs_and_state(
    batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None
):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    grouped = () if groups is None else (groups,)
    arrays = (
        normal(batch, length, dim),
        normal(batch, length, dim) - 2,
        -np.arange(1.0, states + 1) * np.exp(0.1 * normal(dim, states)),
        normal(batch, length, *grouped, states),
        normal(batch, length, *grouped, states),
        1 + 0.1 * normal(dim),
        normal(batch, length, dim),
        0.5 * normal(dim),
        normal(batch, dim, states),
    )
    weights = {"A", "D", "dt_bias", "initial_state"}
    return tuple(
        jnp.asarray(v.astype(jnp.dtype((weight_dtype or dtype) if name in weights else dtype)))
        for name, v in zip(NAMES, arrays, strict=True)
    )


def scan(*arrays, implementation, dt_softplus=True, **options):
    """selective_scan of arrays in the order of NAMES."""
    return jaxkern.selective_scan(
        *arrays[:7],
        **dict(zip(NAMES[7:], arrays[7:], strict=False)),
        dt_softplus=dt_softplus,
        implementation=implementation,
        **options,
    )


def check_case(arrays, implementation, **options):
    """With an initial state among the arrays, the final state and its cotangent are checked too."""
    full, length = len(arrays) == len(NAMES), arrays[0].shape[1]
    own = {name: options.pop(name) for name in ("checkpoint_every",) if name in options}
    check.check_accuracy(
        scan,
        plain,
        oracle_of_case,
        arrays,
        implementation,
        own=own | {"return_final_state": full},
        dtypes=[str(arrays[0].dtype), "float32"][: 1 + full],
        rounding=3e-6 * max(1, length / 1024) ** 0.5,
        **options,
    )


def oracle_of_case(*arrays, **options):
    """:func:`oracle`, of zeros for an absent state, and the size of the terms of dD.

    They are dout · silu(z) · x; with few tokens their sum can be small, and rounding one in fp32
    is no error of the kernel's.
    """
    full, (x, _, A, _, _, _, z) = len(arrays) == len(NAMES) + 2, arrays[:7]
    zeros = np.zeros((x.shape[0], *A.shape))
    of_op = arrays if full else (*arrays[:-1], zeros, arrays[-1], zeros)
    (out, final), grads = oracle(*of_op, **options)
    terms = np.abs(of_op[9] * z / (1 + np.exp(-z)) * x).sum((0, 1))
    if full:
        return (out, final), grads, {7: np.linalg.norm(terms)}
    return out, grads[:-1], {6: np.linalg.norm(terms)}


ONE_PROGRAM = (2, 9, 66, 5)
"""A size for tests that differ in their numbers alone: the interpreter compiles for long."""


def packed_ids(batch, length):
    """Segments of 1 to 6 tokens, with other ends in each row."""
    ids = np.cumsum(np.random.default_rng(0).integers(0, 4, (batch, length)) == 0, axis=1)
    return jnp.asarray(ids, jnp.int32)


def below_zero(x, dt, A, B, C, D, z, dt_bias, *initial_state):
    """Step sizes for no softplus, some below 0, which is the lowest by default."""
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    return x, dt, A, B, C, D, z, 0.01 * dt_bias, *initial_state
