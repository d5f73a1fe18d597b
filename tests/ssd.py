"""What tests of ssd share: a float64 oracle, plain JAX, inputs, a check of accuracy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.ssd.op import FORWARD
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
ALONG = ("x", "dt", "B", "C", "z")
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
    """Output, final state and gradients in float64 NumPy, one token at a time, up and back."""
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
    weight = D if D.ndim == 2 else D[:, None]
    gate = 1 / (1 + np.exp(-z))
    before = np.empty((length, *h.shape))
    y = np.empty_like(x)
    for t in range(length):
        before[t] = keep[:, t] * h
        enters = (step[:, t, :, None] * x[:, t])[..., None] * of_head(B[:, t])
        h = np.exp(step[:, t] * A)[..., None, None] * before[t] + enters
        y[:, t] = np.sum(of_head(C[:, t]) * h, axis=-1) + weight * x[:, t]
    final = h
    out = y * z * gate
    dy = dout * z * gate
    dz = dout * y * (gate + z * gate * (1 - gate))
    dx, dstep = dy * weight, np.zeros_like(dt)
    dA, dB, dC = np.zeros_like(A), np.zeros_like(B), np.zeros_like(C)
    dh = dfinal.copy()
    for t in reversed(range(length)):
        decay = np.exp(step[:, t] * A)[..., None, None]
        entered = (step[:, t, :, None] * x[:, t])[..., None]
        after = decay * before[t] + entered * of_head(B[:, t])
        dh += dy[:, t, :, :, None] * of_head(C[:, t])
        dC[:, t] = of_group(dy[:, t, :, :, None] * after)
        dB[:, t] = of_group(dh * entered)
        into = np.sum(dh * of_head(B[:, t]), axis=-1)
        ddecay = np.sum(dh * before[t] * decay, axis=(-2, -1))
        dx[:, t] += into * step[:, t, :, None]
        dstep[:, t] = np.sum(into * x[:, t], axis=-1) + ddecay * A
        dA += np.sum(ddecay * step[:, t], axis=0)
        dh = keep[:, t] * dh * decay
    ddt = dstep * slope
    dD = (dy * x).sum((0, 1))
    dD = dD if D.ndim == 2 else dD.sum(-1)
    return (out, final), (dx, ddt, dA, dB, dC, dD, dz, ddt.sum((0, 1)), dh)


def plain(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    initial_state,
    *,
    dt_softplus=True,
    dt_limit=(0.0, INF),
    segment_ids=None,
):
    """What a user would write: a scan over time, in the dtype of x."""
    A, B, C, D, dt, dt_bias, h = (
        v.astype(x.dtype) for v in (A, B, C, D, dt, dt_bias, initial_state)
    )
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
    return (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z.astype(x.dtype)), h


def inputs_and_state(
    batch,
    length,
    heads,
    size,
    states,
    groups=1,
    dtype="float32",
    weight_dtype=None,
    of_channels=False,
    seed=0,
):
    """Like a Mamba-2 block's: step sizes from 0.01 to 1, rates from 1 to 16."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    arrays = (
        normal(batch, length, heads, size),
        normal(batch, length, heads) - 2,
        -rng.uniform(1.0, 16.0, heads),
        normal(batch, length, groups, states),
        normal(batch, length, groups, states),
        1 + 0.1 * normal(heads, *([size] if of_channels else [])),
        normal(batch, length, heads, size),
        0.5 * normal(heads),
        normal(batch, heads, size, states),
    )
    weights = {"A", "D", "dt_bias", "initial_state"}
    return tuple(
        jnp.asarray(v.astype(jnp.dtype((weight_dtype or dtype) if name in weights else dtype)))
        for name, v in zip(NAMES, arrays, strict=True)
    )


def scan(*arrays, implementation, dt_softplus=True, **options):
    """ssd of arrays in the order of NAMES."""
    return jaxkern.ssd(
        *arrays[:7],
        **dict(zip(NAMES[7:], arrays[7:], strict=False)),
        dt_softplus=dt_softplus,
        implementation=implementation,
        **options,
    )


@functools.cache
def value_and_grads(f, **options):
    """``run(arrays, cotangents) -> (out, gradients)``, compiled once for all tests that share it.

    `run` takes `f`'s segment_ids too. XLA rounds where the code does.
    """

    def run(arrays, cotangents, **ids):
        out, vjp = jax.vjp(functools.partial(f, **options, **ids), *arrays)
        return out, vjp(jax.tree.map(lambda d, o: d.astype(o.dtype), cotangents, out))

    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def cotangents(arrays):
    """Of the output and of the final state."""
    x, state = arrays[0], arrays[-1]
    rng = np.random.default_rng(17)
    dout = jnp.asarray(rng.normal(size=x.shape).astype(x.dtype))
    return dout, jnp.asarray(rng.normal(size=state.shape), jnp.float32)


def check_case(arrays, implementation, **options):
    """At most twice plain JAX's error, and no more than rounding the result once costs.

    In bf16 plain JAX keeps its states in bf16 and is far off, so that twice its error would let
    much pass; the second bound sees a sum or a step size that is not fp32. Kernels may round what
    their products take to 16 bits, and so may the states that are saved.
    """
    dout, dfinal = cotangents(arrays)
    ids = {name: options.pop(name) for name in ("segment_ids",) if name in options}
    run = value_and_grads(scan, implementation=implementation, return_final_state=True, **options)
    with check.running(implementation):
        got = run(arrays, (dout, dfinal), **ids)
    options.pop("checkpoint_every", None)
    by_plain = value_and_grads(plain, **options)(arrays, (dout, dfinal), **ids)
    wide = (np.asarray(a, np.float64) for a in (*arrays, dout, dfinal))
    want = oracle(*wide, **options, **ids)
    rows = zip(("out", "final", *NAMES), *map(flat, (got, by_plain, want)), strict=True)
    for name, got, other, truth in rows:
        given = dict(zip(NAMES, arrays, strict=True))
        like = {"out": arrays[0], "final": dfinal}.get(name, given.get(name))
        assert got.dtype == like.dtype, name
        terms = cancellation(arrays, dout, truth) if name == "D" else 1.0
        check.at_most_twice(name, got, other, truth, terms * float(np.linalg.norm(truth)))
        if implementation != "mosaic":
            ours = check.relative_error(got, truth)
            rounding = float(jnp.finfo(got.dtype).eps) / 2
            saved = 2.0**-9 if arrays[0].dtype == jnp.bfloat16 and implementation is None else 0.0
            sums = 3e-6 * max(1, arrays[0].shape[1] / 1024) ** 0.5
            assert ours <= rounding + saved + sums, f"{name}: relative error {ours:.1e}"


def cancellation(arrays, dout, dD):
    """How much larger the terms of dD = Σ dout · silu(z) · x are than their sum."""
    x, z, dout = (np.asarray(v, np.float64) for v in (arrays[0], arrays[6], dout))
    terms = np.abs(dout * z / (1 + np.exp(-z)) * x).sum((0, 1))
    return np.linalg.norm(terms) / np.linalg.norm(dD)


def flat(value_and_grads):
    return *value_and_grads[0], *value_and_grads[1]


HAS_KERNELS = FORWARD.kernel is not None
_WITHOUT = pytest.mark.skipif(not HAS_KERNELS, reason="there are no kernels yet")
MOSAIC = pytest.param("mosaic", marks=[pytest.mark.gpu, _WITHOUT])

EVERY = pytest.mark.parametrize("implementation", [MOSAIC, None, "xla"])
"""Kernels, the pair of passes in plain JAX, and plain JAX that JAX differentiates."""


def packed_ids(batch, length, every=4):
    """Segments of `every` tokens in the mean, with other ends in each row."""
    new = np.random.default_rng(0).integers(0, every, (batch, length)) == 0
    return jnp.asarray(np.cumsum(new, axis=1), jnp.int32)
