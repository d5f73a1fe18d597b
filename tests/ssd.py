"""What tests of ssd share: a float64 oracle, plain JAX, inputs, a check of accuracy."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
ALONG = ("x", "dt", "B", "C", "z")
INF = float("inf")


def oracle(*arrays, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None):
    """Output, final state and gradients in NumPy, one token at a time, up and back.

    `arrays` are those of NAMES and the cotangents of both results. With A (H, N), a rate for each
    state, heads of one channel are those of selective_scan.
    """
    x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal = arrays
    batch, length, heads, _ = x.shape
    groups = B.shape[2]
    of_head = lambda v: np.repeat(v, heads // groups, axis=1)[:, :, None]  # (B, H, 1, N)
    of_group = lambda v: v.reshape(batch, groups, -1, *v.shape[2:]).sum((2, 3))
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    keep = np.ones((batch, length, 1, 1, 1))
    keep[:, 1:, 0, 0, 0] = ids[:, 1:] == ids[:, :-1]
    raw = dt + dt_bias
    smooth = np.logaddexp(raw, 0) if dt_softplus else raw
    slope = 1 / (1 + np.exp(-raw)) if dt_softplus else np.ones_like(raw)
    slope = slope * (smooth >= dt_limit[0]) * (smooth <= dt_limit[1])
    step = np.minimum(np.maximum(smooth, dt_limit[0]), dt_limit[1])
    rates, weight = A.reshape(heads, 1, -1), D.reshape(heads, -1)
    decays = np.exp(step[..., None, None] * rates)  # (B, L, H, 1, 1 or N)
    gate, dgate = check.activated("silu", z)
    before = np.empty((length, *h.shape))
    y = np.empty_like(x)
    for t in range(length):
        before[t] = keep[:, t] * h
        enters = (step[:, t, :, None] * x[:, t])[..., None] * of_head(B[:, t])
        h = decays[:, t] * before[t] + enters
        y[:, t] = np.sum(of_head(C[:, t]) * h, axis=-1) + weight * x[:, t]
    final, out = h, y * gate
    dy, dz = dout * gate, dout * y * dgate
    dx, dstep = dy * weight, np.zeros_like(dt)
    dA, dB, dC = np.zeros((heads, rates.shape[2])), np.zeros_like(B), np.zeros_like(C)
    dh = dfinal.copy()
    for t in reversed(range(length)):
        entered = (step[:, t, :, None] * x[:, t])[..., None]
        after = decays[:, t] * before[t] + entered * of_head(B[:, t])
        dh += dy[:, t, :, :, None] * of_head(C[:, t])
        dC[:, t] = of_group(dy[:, t, :, :, None] * after)
        dB[:, t] = of_group(dh * entered)
        into = np.sum(dh * of_head(B[:, t]), axis=-1)
        ddecay = dh * before[t] * decays[:, t]
        dx[:, t] += into * step[:, t, :, None]
        dstep[:, t] = np.sum(into * x[:, t], axis=-1) + np.sum(ddecay * rates, axis=(-2, -1))
        by_rate = np.sum(ddecay * step[:, t, :, None, None], axis=(0, 2))  # (H, N)
        dA += by_rate if A.ndim == 2 else by_rate.sum(-1, keepdims=True)
        dh = keep[:, t] * dh * decays[:, t]
    ddt, dD = dstep * slope, (dy * x).sum((0, 1))
    dD = dD if D.ndim == 2 else dD.sum(-1)
    return (out, final), (dx, ddt, dA.reshape(A.shape), dB, dC, dD, dz, ddt.sum((0, 1)), dh)


def plain(*arrays, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None):
    """What a user would write: a scan over time, in the dtype of x."""
    x, dt, A, B, C, D, z, dt_bias, h = (v.astype(arrays[0].dtype) for v in arrays)
    dt = dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    dt = jnp.where(dt < dt_limit[0], dt_limit[0], jnp.where(dt > dt_limit[1], dt_limit[1], dt))
    B, C = (jnp.repeat(v, x.shape[2] // v.shape[2], axis=2) for v in (B, C))
    ids = jnp.zeros(x.shape[:2], int) if segment_ids is None else segment_ids
    keep = (ids == jnp.concatenate([ids[:, :1], ids[:, :-1]], 1)).astype(x.dtype)

    def step(h, token):
        x, dt, b, c, keep = token
        decay = jnp.exp(dt * A) * keep[:, None]
        h = decay[..., None, None] * h + (dt[..., None] * x)[..., None] * b[:, :, None]
        return h, jnp.sum(h * c[:, :, None], axis=-1)

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, keep))
    h, y = jax.lax.scan(step, h, tokens)
    D = D if D.ndim == 2 else D[:, None]
    return (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z), h


def inputs_and_state(
    *size, groups=1, dtype="float32", weight_dtype=None, of_channels=False, seed=0
):
    """Like a Mamba-2 block's: step sizes from 0.01 to 1, rates from 1 to 16.

    `size` is (B, L, H, P, N).
    """
    batch, length, heads, channels, states = size
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    arrays = (
        normal(batch, length, heads, channels),
        normal(batch, length, heads) - 2,
        -rng.uniform(1.0, 16.0, heads),
        normal(batch, length, groups, states),
        normal(batch, length, groups, states),
        1 + 0.1 * normal(heads, *([channels] if of_channels else [])),
        normal(batch, length, heads, channels),
        0.5 * normal(heads),
        normal(batch, heads, channels, states),
    )
    weights = {"A", "D", "dt_bias", "initial_state"}
    return tuple(
        jnp.asarray(v.astype(jnp.dtype((weight_dtype or dtype) if name in weights else dtype)))
        for name, v in zip(NAMES, arrays, strict=True)
    )


def scan(*arrays, implementation, dt_softplus=True, **options):
    """ssd of arrays in the order of NAMES."""
    options |= {"dt_softplus": dt_softplus, "implementation": implementation}
    return jaxkern.ssd(*arrays[:7], **dict(zip(NAMES[7:], arrays[7:], strict=False)), **options)


def cotangents(arrays):
    """Of the output and of the final state."""
    return jnp.sin(3 * arrays[0]), jnp.cos(arrays[-1])


def results_by_name(arrays, **how):
    """``run(name, *at)``: results and gradients by name, where an array has NaN at an index.

    Without a name none has. Those of ``out`` and ``final`` are of the cotangents.
    """
    names = (*NAMES, "out", "final")
    given = dict(zip(names, (*arrays, *cotangents(arrays)), strict=True))

    def run(name=None, *at, **options):
        values = {n: np.array(v) if n == name else v for n, v in given.items()}
        if name is not None:
            values[name][at] = np.nan
        *values, dout, dfinal = values.values()
        program = check.program(scan, return_final_state=True, **how)
        results, grads = program(tuple(values), (dout, dfinal), **options)
        return dict(zip(names, (*grads, *results), strict=True))

    return run


def check_case(arrays, implementation, **options):
    """Kernels may round what their products take to 16 bits, and so may the states that are saved.

    So the second bound, on the error alone, is plain JAX's.
    """
    own = {name: options.pop(name) for name in ("checkpoint_every",) if name in options}
    rounding = 3e-6 * max(1, arrays[0].shape[1] / 1024) ** 0.5
    if arrays[0].dtype == jnp.bfloat16 and implementation is None:
        rounding += 2.0**-9
    check.check_accuracy(
        scan,
        plain,
        oracle_of_case,
        arrays,
        implementation,
        own=own | {"return_final_state": True},
        dtypes=[str(arrays[0].dtype), "float32"],
        rounding=None if implementation == "mosaic" else rounding,
        **options,
    )


def oracle_of_case(*arrays, **options):
    """:func:`oracle`, and the size of the terms of dD, dout · silu(z) · x, which may cancel."""
    results, grads = oracle(*arrays, **options)
    x, z, dout = arrays[0], arrays[6], arrays[9]
    terms = np.abs(dout * z / (1 + np.exp(-z)) * x).sum((0, 1))
    return results, grads, {7: np.linalg.norm(terms)}


def packed_ids(batch, length, every=4):
    """Segments of `every` tokens in the mean, with other ends in each row."""
    new = np.random.default_rng(0).integers(0, every, (batch, length)) == 0
    return jnp.asarray(np.cumsum(new, axis=1), jnp.int32)
