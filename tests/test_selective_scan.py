"""selective_scan: cases for the common suite, and what is its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.ops.selective_scan import reference
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def oracle(x, dt, A, B, C, D, z, dt_bias, dout, dt_softplus=True):
    """Output and gradients in float64 NumPy: the recurrence, one step at a time, up and back."""
    batch, length, dim = x.shape
    raw = dt + dt_bias
    step = np.logaddexp(raw, 0) if dt_softplus else raw
    slope = 1 / (1 + np.exp(-raw)) if dt_softplus else np.ones_like(raw)
    gate = 1 / (1 + np.exp(-z))
    states = np.zeros((length + 1, batch, dim, A.shape[1]))
    y = np.empty_like(x)
    for t in range(length):
        decay = np.exp(step[:, t, :, None] * A)
        enters = (step[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        states[t + 1] = decay * states[t] + enters
        y[:, t] = np.sum(C[:, t, None, :] * states[t + 1], axis=-1) + D * x[:, t]
    out = y * z * gate
    dy = dout * z * gate
    dz = dout * y * (gate + z * gate * (1 - gate))
    dx, dstep = dy * D, np.zeros_like(x)
    dA, dB, dC = np.zeros_like(A), np.zeros_like(B), np.zeros_like(C)
    dh = np.zeros((batch, dim, A.shape[1]))
    for t in reversed(range(length)):
        decay = np.exp(step[:, t, :, None] * A)
        dh += dy[:, t, :, None] * C[:, t, None, :]
        dC[:, t] = np.einsum("bd,bdn->bn", dy[:, t], states[t + 1])
        dB[:, t] = np.einsum("bdn,bd->bn", dh, step[:, t] * x[:, t])
        into = np.einsum("bdn,bn->bd", dh, B[:, t])
        ddecay = dh * states[t] * decay
        dx[:, t] += into * step[:, t]
        dstep[:, t] = into * x[:, t] + np.sum(ddecay * A, axis=-1)
        dA += np.einsum("bdn,bd->dn", ddecay, step[:, t])
        dh = dh * decay
    ddt = dstep * slope
    sums = ((dy * x).sum((0, 1)), ddt.sum((0, 1)))
    return out, (dx, ddt, dA, dB, dC, sums[0], dz, sums[1])


def plain(x, dt, A, B, C, D, z, dt_bias, dt_softplus=True):
    """What a user would write: a scan over time, in the dtype of x."""
    A, B, C, D, dt, dt_bias = (v.astype(x.dtype) for v in (A, B, C, D, dt, dt_bias))
    dt = dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt

    def step(h, token):
        x, dt, b, c = token
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.sum(h * c[:, None, :], axis=-1)

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C))
    _, y = jax.lax.scan(step, jnp.zeros((*x[:, 0].shape, A.shape[1]), x.dtype), tokens)
    return (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z.astype(x.dtype))


def inputs(batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0):
    """Like a Mamba block's: step sizes from 0.01 to 1, rates from 1 to N."""
    keys = jax.random.split(jax.random.key(seed), 8)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape)
    arrays = (
        normal(0, batch, length, dim),
        normal(1, batch, length, dim) - 2,
        -jnp.arange(1.0, states + 1) * jnp.exp(0.1 * normal(2, dim, states)),
        normal(3, batch, length, states),
        normal(4, batch, length, states),
        1 + 0.1 * normal(5, dim),
        normal(6, batch, length, dim),
        0.5 * normal(7, dim),
    )
    weights = {"A", "D", "dt_bias"}
    return tuple(
        v.astype((weight_dtype or dtype) if name in weights else dtype)
        for name, v in zip(NAMES, arrays, strict=True)
    )


def scan(*arrays, implementation, dt_softplus=True):
    *first, dt_bias = arrays
    return jaxkern.selective_scan(
        *first, dt_bias=dt_bias, dt_softplus=dt_softplus, implementation=implementation
    )


def value_and_grads(f):
    """``run(arrays, dout) -> (out, gradients)``, compiled once."""

    @jax.jit
    def run(arrays, dout):
        out, vjp = jax.vjp(f, *arrays)
        return out, vjp(dout.astype(out.dtype))

    return run


def check_case(arrays, implementation, dt_softplus=True):
    """At most twice plain JAX's error, and no more than rounding the result once costs.

    In bf16 plain JAX keeps its states in bf16 and is far off, so that twice its error would let
    much pass; the second bound sees a state, a sum or a step size that is not fp32.
    """
    dout = jax.random.normal(jax.random.key(17), arrays[0].shape).astype(arrays[0].dtype)
    options = {"dt_softplus": dt_softplus}
    call = functools.partial(scan, implementation=implementation, **options)
    with check.running(implementation):
        out, grads = value_and_grads(call)(arrays, dout)
    by_plain = value_and_grads(functools.partial(plain, **options))(arrays, dout)
    want = oracle(*(np.asarray(a, np.float64) for a in (*arrays, dout)), **options)
    rows = zip(
        ("out", *NAMES),
        (arrays[0], *arrays),
        (out, *grads),
        *map(flat, (by_plain, want)),
        strict=True,
    )
    for name, like, got, other, truth in rows:
        assert got.dtype == like.dtype, name
        ours, theirs = check.relative_error(got, truth), check.relative_error(other, truth)
        assert np.isfinite(theirs), f"{name}: plain JAX is not finite and bounds nothing"
        roundings = 4 * 2.0**-24
        if name == "D":
            roundings *= cancellation(arrays, dout, truth)
        assert ours <= 2 * theirs + roundings, f"{name}: {ours:.1e}, plain JAX {theirs:.1e}"
        rounding = float(jnp.finfo(got.dtype).eps) / 2
        assert ours <= rounding + 3e-6, f"{name}: relative error {ours:.1e}"


def cancellation(arrays, dout, dD):
    """How much larger the terms of dD = Σ dout · silu(z) · x are than their sum.

    Rounding a term in fp32 is no error of the kernel's, and with few tokens the sum can be small.
    """
    x, z, dout = (np.asarray(v, np.float64) for v in (arrays[0], arrays[6], dout))
    terms = np.abs(dout * z / (1 + np.exp(-z)) * x).sum((0, 1))
    return np.linalg.norm(terms) / np.linalg.norm(dD)


def flat(value_and_grads):
    return value_and_grads[0], *value_and_grads[1]


BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
)


def sizes(*both, gpu=(), interpreted=()):
    """Cases (size, implementation): `both` for plain JAX and for kernels on a GPU, `gpu` for the
    kernels on a GPU alone, `interpreted` for the kernels anywhere."""
    marks = [(*both, *gpu), [pytest.mark.compiled]], [interpreted, [pytest.mark.gpu]]
    name = lambda size: "x".join(map(str, size))
    cases = [pytest.param(size, "xla", id=f"{name(size)}-xla") for size in both] + [
        pytest.param(size, "mosaic", marks=mark, id=f"{name(size)}-mosaic")
        for group, mark in marks
        for size in group
    ]
    return pytest.mark.parametrize(("size", "implementation"), cases)


# Accuracy


@sizes(
    *[(1, 1, 1, 1), (2, 2, 3, 4), (2, 63, 287, 4), (2, 257, 130, 17)],
    gpu=[(2, 7, 1, 64), (2, 8, 128, 16), (2, 64, 127, 1), (2, 65, 512, 16), (3, 1000, 256, 33)],
    interpreted=[(2, 9, 3, 4), (1, 3, 130, 9)],
)
def test_selective_scan_accuracy(size, implementation):
    check_case(inputs(*size), implementation)


@sizes((2, 65, 130, 5), interpreted=[(1, 10, 2, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_selective_scan_half_precision(size, implementation, dtype):
    check_case(inputs(*size, dtype), implementation)


@sizes(gpu=[(2, 65, 130, 5)], interpreted=[(1, 3, 2, 2)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_selective_scan_mixed_dtypes(size, implementation, dtypes):
    check_case(inputs(*size, *dtypes), implementation)


@sizes((2, 12, 128, 16), interpreted=[(1, 2, 2, 2)])
def test_selective_scan_without_softplus(size, implementation):
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    arrays = (x, jnp.exp(dt), A, B, C, D, z, 0.01 * jnp.exp(dt_bias))
    check_case(arrays, implementation, dt_softplus=False)


@sizes((1, 1000, 8, 2), gpu=[(2, 130, 128, 16)])
def test_selective_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, 1e-3 * A, B, C, D, z, dt_bias), implementation)


@pytest.mark.parametrize("dt_softplus", [True, False])
def test_selective_scan_reference_in_float64(dt_softplus):
    """The specification itself, gradients included, far below fp32's rounding."""
    with jax.enable_x64(True):
        arrays = tuple(np.asarray(a, np.float64) for a in inputs(2, 13, 3, 4))
        dout = np.random.default_rng(0).normal(size=arrays[0].shape)
        call = functools.partial(scan, implementation=None, dt_softplus=dt_softplus)
        got = value_and_grads(call)(arrays, jnp.asarray(dout))
        assert got[0].dtype == jnp.float64
        check.assert_close(got, oracle(*arrays, dout, dt_softplus=dt_softplus), 1e-14)
        with pytest.raises(NotImplementedError, match="x is float64"):
            scan(*map(jnp.asarray, arrays), implementation="mosaic")


def test_selective_scan_passes_in_plain_jax():
    """The pair that stands in for the kernels where there is no GPU is the reference's gradient."""
    arrays = inputs(2, 21, 5, 3)
    dout = jax.random.normal(jax.random.key(1), arrays[0].shape)
    out, grads = value_and_grads(functools.partial(scan, implementation="xla"))(arrays, dout)
    options = reference.Options(dt_softplus=True, mode="xla")
    again, states = reference.reference_fwd(options, True, *arrays)
    check.assert_close(again, out, 2e-7)
    assert states.shape == (2, 3, 3, 5)
    backward = jax.jit(functools.partial(reference.reference_bwd, options))
    check.assert_close(backward(*arrays, states, dout), grads, 1e-6)


# What the recurrence promises


def test_selective_scan_is_its_steps():
    """selective_scan_step, token by token, gives the same outputs and gradients."""
    arrays = inputs(2, 21, 5, 3)

    def stepped(x, dt, A, B, C, D, z, dt_bias):
        def step(state, token):
            x, dt, b, c, z = token
            return jaxkern.selective_scan_step(
                state, x, dt, A, b, c, D, z, dt_bias=dt_bias, dt_softplus=True
            )[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        _, outs = jax.lax.scan(step, jnp.zeros((*x[:, 0].shape, A.shape[1])), tokens)
        return jnp.moveaxis(outs, 0, 1)

    got = value_and_grads(functools.partial(scan, implementation="xla"))(arrays, arrays[0])
    check.assert_close(got, value_and_grads(stepped)(arrays, arrays[0]), 1e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs = stepped(*half)
    assert outs.dtype == jnp.bfloat16
    check.assert_close(outs, scan(*half, implementation="xla"), 4e-3)


def test_selective_scan_step_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    one = jnp.ones((1, 1), jnp.bfloat16)
    step = lambda state, _: jaxkern.selective_scan_step(
        state, 1e-3 * one, one, jnp.zeros((1, 1)), one, one
    )[::-1]
    state, _ = jax.lax.scan(step, jnp.zeros((1, 1, 1)), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(1e-3 * one[0, 0]), rtol=1e-3)


@BOTH
@pytest.mark.parametrize("absent", [("D", "z", "dt_bias"), ("z",)])
def test_selective_scan_optional_arguments(absent, implementation):
    """An absent argument is what zeros are (for the gate: one that is open)."""
    arrays = dict(zip(NAMES, inputs(1, 5, 3, 2), strict=True))
    given = {k: v for k, v in arrays.items() if k not in absent}
    run = lambda kw: jaxkern.selective_scan(dt_softplus=True, implementation=implementation, **kw)
    with check.running(implementation):
        out, vjp = jax.vjp(run, given)
        (grads,) = vjp(jnp.cos(out))

    def full(kw):
        kw = {name: jnp.zeros_like(arrays[name]) for name in absent if name != "z"} | kw
        wanted = [kw.get(name, jnp.full_like(arrays["z"], 1e4)) for name in NAMES]
        scale = 1e4 if "z" in absent else 1.0  # silu(1e4) = 1e4
        return plain(*wanted) / scale

    want, want_vjp = jax.vjp(full, given)
    check.assert_close(out, want, 2e-6)
    (want_grads,) = want_vjp(jnp.cos(out))
    assert grads.keys() == given.keys()
    check.assert_close(grads, want_grads, 2e-6)


@BOTH
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 0, 2)])
def test_selective_scan_empty(shape, implementation):
    arrays = inputs(*shape, "bfloat16")
    with check.running(implementation):
        out, vjp = jax.vjp(lambda *a: scan(*a, implementation=implementation), *arrays)
        grads = vjp(out)
    assert out.shape == shape[:3]
    assert out.dtype == jnp.bfloat16
    for grad, array in zip(grads, arrays, strict=True):
        assert grad.dtype == array.dtype
        np.testing.assert_array_equal(grad, np.zeros(array.shape))


@BOTH
def test_selective_scan_forgets_all_at_once(implementation):
    """dt · A → −∞: a decay of exactly 0, with no NaN in any gradient."""
    x, dt, A, B, C, D, z, dt_bias = inputs(1, 7, 3, 2)
    A = A.at[:, 0].set(-1e6).at[0, 1].set(-1e30)
    dt = dt.at[0, 4].set(80.0)
    check_case((x, dt, A, B, C, D, z, dt_bias), implementation)


@BOTH
def test_selective_scan_keeps_a_state(implementation):
    """dt = 0 keeps the state to the last bit; a dt that underflows does too."""
    length = 20
    x = jnp.ones((1, length, 2))
    dt = jnp.zeros((1, length, 2)).at[:, 0].set(1.0)
    ones = jnp.ones((1, length, 1))
    A = jnp.full((2, 1), -3.0)
    run = functools.partial(jaxkern.selective_scan, implementation=implementation)
    with check.running(implementation):
        kept = run(x, dt, A, ones, ones)
        softly = run(x, jnp.where(dt > 0, 1.0, -200.0), A, ones, ones, dt_softplus=True)
    np.testing.assert_array_equal(kept, 1.0)
    np.testing.assert_array_equal(softly, softly[0, 0, 0])


@BOTH
def test_selective_scan_softplus(implementation):
    """The step size and its slope, relative to themselves, over their whole range."""
    raw = np.array([-80.0, -60.0, -15.0, -4.0, -0.1, 0.0, 0.3, 3.0, 40.0, 1000.0], np.float32)
    one = jnp.ones((1, 1, 1))
    run = lambda dt: jaxkern.selective_scan(
        jnp.ones_like(dt),
        dt,
        jnp.zeros((raw.size, 1)),
        one,
        one,
        dt_softplus=True,
        implementation=implementation,
    )
    with check.running(implementation):
        out, vjp = jax.vjp(run, jnp.asarray(raw[None, None]))
        (slope,) = vjp(jnp.ones_like(out))
    wide = raw.astype(np.float64)
    error = np.abs(out[0, 0] / np.logaddexp(wide, 0) - 1)
    assert np.all(error <= 5e-7 + 2e-8 * np.abs(wide)), error
    np.testing.assert_allclose(slope[0, 0], 1 / (1 + np.exp(-wide)), rtol=2e-6)


@sizes((1, 12, 2, 2))
def test_selective_scan_grows(size, implementation):
    """A rate above 0 is legal: the state grows, and so do the gradients."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, -0.5 * A, B, C, D, z, dt_bias), implementation)


@BOTH
def test_selective_scan_bad_channel_stays_alone(implementation):
    """A NaN in one channel of one row leaves every other channel, row and earlier step alone."""
    arrays = dict(zip(NAMES, inputs(2, 9, 3, 2), strict=True))
    dout = jnp.ones_like(arrays["x"])
    run = value_and_grads(functools.partial(scan, implementation=implementation))
    same = np.testing.assert_array_equal
    others = np.ones((2, 3), bool)
    others[1, 2] = False
    with check.running(implementation):
        out, grads = run(tuple(arrays.values()), dout)
        slow = implementation == "mosaic" and not check.ON_GPU
        for names in [("x", "dt", "z")] if slow else [("x",), ("dt",), ("z",)]:
            poisoned = arrays | {name: arrays[name].at[1, 4, 2].set(np.nan) for name in names}
            bad, bad_grads = run(tuple(poisoned.values()), dout)
            got = dict(zip(NAMES, bad_grads, strict=True), out=bad)
            want = dict(zip(NAMES, grads, strict=True), out=out)
            for n in ("out", "x", "dt", "z"):
                same(got[n].swapaxes(1, 2)[others], want[n].swapaxes(1, 2)[others])
            same(bad[1, :4, 2], out[1, :4, 2])
            assert np.isnan(bad[1, 4, 2])
            for n in ("B", "C"):  # sums over channels: the other row's stay
                same(got[n][0], want[n][0])
            for n in ("A", "D", "dt_bias"):  # sums over rows: the other channels' stay
                same(got[n][:2], want[n][:2])


def test_selective_scan_holds_no_state_of_every_step():
    """The memory of value and gradient is far below one (B, L, D, N) array."""
    size = batch, length, dim, states = 1, 512, 64, 64
    for implementation in (None, "xla"):
        loss = lambda *a: jnp.sum(scan(*a, implementation=implementation) ** 2)  # noqa: B023
        compiled = jax.jit(jax.grad(loss, range(8))).lower(*inputs(*size)).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        assert used < 0.35 * batch * length * dim * states * 4, implementation


# Calls


def test_selective_scan_errors():
    x, dt, A, B, C, D, z, dt_bias = inputs(2, 5, 3, 4)
    run = jaxkern.selective_scan
    with pytest.raises(TypeError, match=r"A must have a floating dtype.*got complex64"):
        run(x, dt, A.astype(jnp.complex64), B, C)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, D\), got \(5, 3\)"):
        run(x[0], dt, A, B, C)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 5, 3\) = \(B, L, D\) of x"):
        run(x, dt[:, :4], A, B, C)
    with pytest.raises(ValueError, match=r"A must have shape \(D, N\), D the 3 chan.*\(4, 3\)"):
        run(x, dt, A.T, B, C)
    with pytest.raises(ValueError, match=r"B must have shape \(2, 5, 4\).*got \(2, 4, 5\)"):
        run(x, dt, A, B.swapaxes(1, 2), C)
    with pytest.raises(ValueError, match=r"C must have shape"):
        run(x, dt, A, B, C[:1])
    with pytest.raises(ValueError, match=r"D must have shape \(3,\) = \(D,\) of x; got \(4,\)"):
        run(x, dt, A, B, C, jnp.ones(4))
    with pytest.raises(ValueError, match=r"z must have shape"):
        run(x, dt, A, B, C, D, z[..., :1])
    with pytest.raises(ValueError, match=r"dt_bias must have shape"):
        run(x, dt, A, B, C, D, z, dt_bias=dt_bias[:1])
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'cuda\''):
        run(x, dt, A, B, C, implementation="cuda")
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 4\) = \(B, D, N\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 4, 3)), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 5, 3\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 3, 4)), x, dt, A, B, C)


def test_selective_scan_of_many_states():
    """More states than the kernels hold: plain JAX unless the kernels were asked for."""
    arrays = inputs(1, 9, 2, 65)
    with pytest.raises(NotImplementedError, match=r"A has 65 states.*at most 64"):
        scan(*arrays, implementation="mosaic")
    check_case(arrays, None)
    text = (
        jax.jit(lambda *a: scan(*a, implementation=None))
        .trace(*arrays)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "selective_scan_fwd" not in text


# Kernels


@pytest.mark.parametrize(
    ("dtype", "states", "gated"),
    [("bfloat16", 16, True), ("float16", 1, False), ("float32", 64, True)],
)
def test_selective_scan_lowers_for_cuda(dtype, states, gated):
    """The kernels' layouts are accepted, with no GPU here."""
    x, dt, A, B, C, D, z, _ = inputs(2, 70, 130, states, dtype, weight_dtype="float32")

    def loss(*args):
        out = jaxkern.selective_scan(*args, D, z if gated else None, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss, range(5)))
    text = program.trace(x, dt, A, B, C).lower(lowering_platforms=("cuda",)).as_text()
    assert "selective_scan_fwd" in text
    assert "selective_scan_bwd" in text


@pytest.mark.compiled
def test_selective_scan_same_bits():
    arrays = inputs(4, 1000, 640, 16, "bfloat16", "float32")
    run = jax.jit(lambda a, d: jax.vjp(lambda *a: scan(*a, implementation="mosaic"), *a)[1](d))
    first = run(arrays, arrays[0])
    for _ in range(20):
        for a, b in zip(first, run(arrays, arrays[0]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.compiled
def test_selective_scan_beyond_int32():
    """More than 2³¹ elements: the last rows are right."""
    batch, length, dim, states = (1 << 12) + 3, 64, 8192, 8
    few = inputs(2, length, dim, states, "bfloat16", "float32")
    tile = lambda v: jnp.tile(v, ((batch + 1) // 2, *(1,) * (v.ndim - 1)))[:batch]
    arrays = tuple(tile(v) if v.ndim == 3 else v for v in few)
    run = jax.jit(lambda *a: jax.vjp(lambda x: scan(x, *a[1:], implementation="mosaic"), a[0]))
    out, vjp = run(*arrays)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, out)
    last = tuple(v[-2:] if v.ndim == 3 else v for v in arrays)
    want, want_vjp = jax.vjp(lambda x: scan(x, *last[1:], implementation="mosaic"), last[0])
    # Two rows alone are cut into segments, which rounds differently.
    check.assert_close(out[-2:], want, 2.0**-9)
    check.assert_close(dx[-2:], want_vjp(want)[0], 2.0**-9)
    check.assert_close(want, scan(*last, implementation="xla"), 4e-3)


ROWS = tuple(P("data") if name in ("x", "dt", "B", "C", "z") else P() for name in NAMES)
CHANNELS = {
    **dict.fromkeys(("x", "dt", "z"), P(None, None, "data")),
    **dict.fromkeys(("A", "D", "dt_bias"), P("data")),
    **dict.fromkeys(("B", "C"), P()),
}

SELECTIVE_SCAN = check.Op(
    name="selective_scan",
    call=scan,
    reference=lambda *a: reference.selective_scan_reference(*a, dt_softplus=True),
    arrays=lambda key: inputs(4, 3, 4, 2, seed=3),
    kernels=("selective_scan_fwd", "selective_scan_bwd"),
    rows=(*ROWS, P("data")),
    features=(*(CHANNELS[name] for name in NAMES), P(None, None, "data")),
    all_reduces=1,
    vmaps=[(0,) + (None,) * 7, (None, None, 0, None, 1, 0, None, None)],
)


@check.matrix(SELECTIVE_SCAN)
def test_selective_scan_transformations(cell, record_property):
    check.check_cell(cell, record_property)
