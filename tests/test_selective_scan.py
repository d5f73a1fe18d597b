"""selective_scan: cases for the common suite, and what is its own."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.selective_scan import backward, forward, reference, tiles
from jaxkern.ops.selective_scan.tiles import MAX_STATES
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
    return (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z.astype(x.dtype)), h


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


@functools.cache
def value_and_grads(f, **options):
    """``run(arrays, cotangents) -> (out, gradients)``, compiled once for all tests that share it.

    `run` takes `f`'s segment_ids too.
    """

    @jax.jit
    def run(arrays, cotangents, **ids):
        out, vjp = jax.vjp(functools.partial(f, **options, **ids), *arrays)
        return out, vjp(jax.tree.map(lambda d, o: d.astype(o.dtype), cotangents, out))

    return run


def check_case(arrays, implementation, **options):
    """At most twice plain JAX's error, and no more than rounding the result once costs.

    In bf16 plain JAX keeps its states in bf16 and is far off, so that twice its error would let
    much pass; the second bound sees a state, a sum or a step size that is not fp32. With an initial
    state among the arrays, the final state and its cotangent are checked too.
    """
    full = len(arrays) == len(NAMES)
    x, A = arrays[0], arrays[2]
    shape = (x.shape[0], *A.shape)
    rng = np.random.default_rng(17)
    dout = jnp.asarray(rng.normal(size=x.shape).astype(x.dtype))
    dfinal = jnp.asarray(rng.normal(size=shape) * full, jnp.float32)
    ids = {name: options.pop(name) for name in ("segment_ids",) if name in options}
    run = value_and_grads(scan, implementation=implementation, return_final_state=full, **options)
    with check.running(implementation):
        out, grads = run(arrays, (dout, dfinal) if full else dout, **ids)
    options.pop("checkpoint_every", None)
    arrays = arrays if full else (*arrays, jnp.zeros(shape))
    by_plain = value_and_grads(plain, **options)(arrays, (dout, dfinal), **ids)
    wide = (np.asarray(a, np.float64) for a in (*arrays, dout, dfinal))
    want = oracle(*wide, **options, **ids)
    got = (out, grads) if full else ((out, want[0][1]), (*grads, want[1][-1]))
    rows = zip(("out", "final", *NAMES), *map(flat, (got, by_plain, want)), strict=True)
    for name, got, other, truth in rows:
        if not full and name in ("final", "initial_state"):
            continue
        like = {"out": x, "final": dfinal}.get(
            name, dict(zip(NAMES, arrays, strict=True)).get(name)
        )
        assert got.dtype == like.dtype, name
        ours, theirs = check.relative_error(got, truth), check.relative_error(other, truth)
        assert np.isfinite(theirs), f"{name}: plain JAX is not finite and bounds nothing"
        roundings = 4 * 2.0**-24
        if name == "D":
            roundings *= cancellation(arrays, dout, truth)
        assert ours <= 2 * theirs + roundings, f"{name}: {ours:.1e}, plain JAX {theirs:.1e}"
        rounding = float(jnp.finfo(got.dtype).eps) / 2
        sums = 3e-6 * max(1, x.shape[1] / 1024) ** 0.5
        assert ours <= rounding + sums, f"{name}: relative error {ours:.1e}"


def cancellation(arrays, dout, dD):
    """How much larger the terms of dD = Σ dout · silu(z) · x are than their sum.

    Rounding a term in fp32 is no error of the kernel's, and with few tokens the sum can be small.
    """
    x, z, dout = (np.asarray(v, np.float64) for v in (arrays[0], arrays[6], dout))
    terms = np.abs(dout * z / (1 + np.exp(-z)) * x).sum((0, 1))
    return np.linalg.norm(terms) / np.linalg.norm(dD)


def flat(value_and_grads):
    return *value_and_grads[0], *value_and_grads[1]


ONE_PROGRAM = (2, 9, 66, 5)
"""A size for tests that differ in their numbers alone: the interpreter compiles for long."""

BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
)
KERNELS = pytest.mark.parametrize("implementation", [pytest.param("mosaic", marks=pytest.mark.gpu)])


def interpreted(implementation):
    return implementation == "mosaic" and not check.ON_GPU


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


@sizes(gpu=[(2, 65, 130, 5), (1, 3, 2, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_selective_scan_half_precision(size, implementation, dtype):
    check_case(inputs(*size, dtype), implementation)


@sizes(gpu=[(2, 65, 130, 5)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_selective_scan_mixed_dtypes(size, implementation, dtypes):
    check_case(inputs(*size, *dtypes), implementation)


@sizes((2, 65, 130, 5), interpreted=[(1, 3, 2, 3)])
def test_selective_scan_two_half_precisions(size, implementation):
    """bf16 and fp16 among the arrays that are read, and among those that are written."""
    first = inputs_and_state(*size, "bfloat16", "float16")
    second = inputs_and_state(*size, "float16", "bfloat16")
    pick = lambda *names: tuple(
        a if name in names else b for name, a, b in zip(NAMES, first, second, strict=True)
    )
    every = {"checkpoint_every": None} if interpreted(implementation) else {}
    check_case(pick("x", "B", "z"), implementation, **every)


@sizes(gpu=[(2, 12, 128, 16)])
def test_selective_scan_without_softplus(size, implementation):
    arrays = below_zero(*inputs(*size))
    check_case(arrays, implementation, dt_softplus=False)


def below_zero(x, dt, A, B, C, D, z, dt_bias, *initial_state):
    """Step sizes for no softplus, some below 0, which is the lowest by default."""
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    return x, dt, A, B, C, D, z, 0.01 * dt_bias, *initial_state


@sizes((1, 1000, 8, 2), gpu=[(2, 130, 128, 16)])
def test_selective_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, 1e-3 * A, B, C, D, z, dt_bias), implementation)


@sizes(
    (2, 21, 6, 3, 2),
    gpu=[(2, 130, 96, 16, 3), (3, 200, 287, 5, None)],
    interpreted=[(1, 50, 2, 2, 2)],
)
def test_selective_scan_accuracy_of_everything(size, implementation):
    """Groups, an initial state, a final state, limits that a part of the steps pass, segments."""
    *size, groups = size
    arrays = inputs_and_state(*size, groups=groups)
    ids = packed_ids(*size[:2])
    # Two chunks from one saved state to the next, and both kernels in several parts.
    every = {"checkpoint_every": 16} if interpreted(implementation) else {}
    check_case(arrays, implementation, dt_limit=(0.05, 0.3), segment_ids=ids, **every)


def packed_ids(batch, length):
    """Segments of 1 to 6 tokens, with other ends in each row."""
    ids = np.cumsum(np.random.default_rng(0).integers(0, 4, (batch, length)) == 0, axis=1)
    return jnp.asarray(ids, jnp.int32)


@sizes((4, 9, 64, 300), gpu=[(1, 9, 3, 256), (1, 100, 130, 384)])
def test_selective_scan_accuracy_of_many_states(size, implementation):
    check_case(inputs_and_state(*size), implementation)


@sizes(gpu=[(1, 65537, 4, 2)])
def test_selective_scan_accuracy_of_a_long_sequence(size, implementation):
    check_case(inputs_and_state(*size), implementation)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("every", "dt_softplus"), [(1, True), (8, False), (16, True), (None, True)]
)
def test_selective_scan_reference_in_float64(every, dt_softplus):
    """The specification itself, gradients included, far below fp32's rounding."""
    options = {
        "dt_softplus": dt_softplus,
        "dt_limit": (0.05, 0.6) if dt_softplus else (-2.5, 0.1),
        "segment_ids": packed_ids(2, 21),
    }
    with jax.enable_x64(True):
        arrays = inputs_and_state(2, 21, 6, 4, groups=2)
        arrays = tuple(np.asarray(a, np.float64) for a in arrays)
        rng = np.random.default_rng(0)
        cotangents = rng.normal(size=arrays[0].shape), rng.normal(size=arrays[-1].shape)
        call = functools.partial(
            scan, implementation=None, return_final_state=True, checkpoint_every=every, **options
        )
        got = value_and_grads(call)(arrays, tuple(map(jnp.asarray, cotangents)))
        assert got[0][0].dtype == got[0][1].dtype == jnp.float64
        check.assert_close(got, oracle(*arrays, *cotangents, **options), 1e-14)
        with pytest.raises(NotImplementedError, match="x is float64"):
            scan(*map(jnp.asarray, arrays), implementation="mosaic")


def test_selective_scan_by_finite_differences():
    with jax.enable_x64(True):
        arrays = inputs_and_state(1, 5, 2, 2, groups=2)
        arrays = tuple(jnp.asarray(a, jnp.float64) for a in arrays)
        ids = jnp.array([[0, 0, 0, 1, 1]])
        call = functools.partial(
            scan,
            implementation="xla",
            return_final_state=True,
            segment_ids=ids,
            dt_limit=(0.06, 0.3),
        )
        check_grads(
            jax.jit(call), arrays, order=1, modes=["fwd", "rev"], eps=1e-6, atol=1e-7, rtol=1e-7
        )


@pytest.mark.newest
def test_selective_scan_passes_in_plain_jax():
    """The pair of passes that stands in for the kernels where there is no GPU."""
    arrays = inputs_and_state(2, 21, 4, 3, groups=2)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    ids = packed_ids(2, 21)
    call = functools.partial(scan, return_final_state=True, dt_limit=(0.05, 0.6))
    wide = (np.asarray(a, np.float64) for a in (*arrays, *cotangents))
    want = oracle(*wide, dt_limit=(0.05, 0.6), segment_ids=ids)
    for every in (16, None):
        run = value_and_grads(call, implementation=None, checkpoint_every=every)
        got = run(arrays, cotangents, segment_ids=ids)
        check.assert_close(got[0], want[0], 2e-7)
        check.assert_close(got[1], want[1], 1e-6)


@pytest.mark.parametrize(
    ("every", "shape"),
    [(1, (2, 21, 1, 5, 3)), (8, (2, 3, 1, 5, 3)), (64, (2, 1, 1, 5, 3)), (None, None)],
)
def test_selective_scan_saved_states(every, shape):
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states."""
    x, dt, A, B, C, *_ = inputs(2, 21, 5, 3)
    args = (x[:, :, None], dt[:, :, None], A[None], B[:, :, None], C[:, :, None], *[None] * 6)
    options = reference.Options(True, (0.0, INF), False, every, "auto")
    run = lambda save: jax.eval_shape(
        lambda: reference.reference_fwd(dataclasses.replace(options, save=save), *args)
    )
    out, final, states = run(True)
    assert out.shape == (2, 21, 1, 5)
    assert final is None
    assert (None if states is None else states.shape) == shape
    assert run(False)[2] is None


@sizes(
    *[(1, 1, 1, 1), (2, 2, 3, 4), (2, 63, 287, 4)],
    gpu=[
        (2, 7, 1, 64),
        (2, 8, 128, 16),
        (2, 64, 127, 1),
        (2, 65, 512, 16),
        (2, 257, 130, 17),
        (3, 1000, 256, 33),
    ],
    interpreted=[ONE_PROGRAM],
)
def test_selective_scan_accuracy(size, implementation):
    check_case(inputs(*size), implementation)


@BOTH
def test_selective_scan_forgets_all_at_once(implementation):
    """dt · A → −∞: a decay of exactly 0, with no NaN in any gradient."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*ONE_PROGRAM)
    A = A.at[:, 0].set(-1e6).at[0, 1].set(-1e30)
    dt = dt.at[0, 4].set(80.0)
    check_case((x, dt, A, B, C, D, z, dt_bias), implementation)


# What the recurrence promises


@BOTH
def test_selective_scan_bad_channel_stays_alone(implementation):
    """A NaN in one channel of one row leaves every other channel, row and earlier step alone."""
    arrays = dict(zip(NAMES[:-1], inputs(*ONE_PROGRAM), strict=True))
    dout = jnp.ones_like(arrays["x"])
    run = value_and_grads(scan, implementation=implementation, return_final_state=False)
    same = np.testing.assert_array_equal
    others = np.ones((2, 66), bool)
    others[1, 2] = False
    with check.running(implementation):
        out, grads = run(tuple(arrays.values()), dout)
        for name in ("x", "dt", "z"):
            poisoned = arrays | {name: arrays[name].at[1, 4, 2].set(np.nan)}
            bad, bad_grads = run(tuple(poisoned.values()), dout)
            got = dict(zip(NAMES[:-1], bad_grads, strict=True), out=bad)
            want = dict(zip(NAMES[:-1], grads, strict=True), out=out)
            for n in ("out", "x", "dt", "z"):
                same(got[n].swapaxes(1, 2)[others], want[n].swapaxes(1, 2)[others])
            same(bad[1, :4, 2], out[1, :4, 2])
            assert np.isnan(bad[1, 4, 2])
            for n in ("B", "C"):  # sums over channels: the other row's stay
                same(got[n][0], want[n][0])
            for n in ("A", "D", "dt_bias"):  # sums over rows: the other channels' stay
                same(np.delete(got[n], 2, 0), np.delete(want[n], 2, 0))


@pytest.mark.newest
def test_selective_scan_is_its_steps():
    """selective_scan_step, token by token, gives the same outputs, final state and gradients."""
    arrays = inputs_and_state(2, 21, 6, 3, groups=2)
    options = {"dt_softplus": True, "dt_limit": (0.05, 0.6)}

    def stepped(x, dt, A, B, C, D, z, dt_bias, state):
        def step(state, token):
            x, dt, b, c, z = token
            return jaxkern.selective_scan_step(
                state, x, dt, A, b, c, D, z, dt_bias=dt_bias, **options
            )[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        state, outs = jax.lax.scan(step, state.astype(jnp.float32), tokens)
        return jnp.moveaxis(outs, 0, 1), state

    call = functools.partial(scan, implementation="xla", return_final_state=True, **options)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    want = value_and_grads(stepped)(arrays, cotangents)
    check.assert_close(value_and_grads(call)(arrays, cotangents), want, 1e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs, state = jax.jit(stepped)(*half)
    assert outs.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    check.assert_close((outs, state), jax.jit(call)(*half), 4e-3)


@sizes((2, 21, 3, 4))
def test_selective_scan_in_two_halves(size, implementation):
    """The second half, from the state that the first returns, goes on as one run would."""
    arrays = inputs_and_state(*size)
    call = functools.partial(scan, implementation=implementation, return_final_state=True)

    def halves(*arrays):
        cut = size[1] // 2 - 1
        tokens = {"x", "dt", "B", "C", "z"}
        part = lambda where: [
            v[:, where] if name in tokens else v
            for name, v in zip(NAMES[:-1], arrays[:-1], strict=True)
        ]
        first, state = call(*part(slice(None, cut)), arrays[-1])
        second, state = call(*part(slice(cut, None)), state)
        return jnp.concatenate([first, second], 1), state

    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    with check.running(implementation):
        got = value_and_grads(halves)(arrays, cotangents)
        check.assert_close(got, value_and_grads(call)(arrays, cotangents), 1e-6)


@sizes((2, 21, 3, 4), interpreted=[(1, 10, 2, 2)])
def test_selective_scan_packed(size, implementation):
    """Packed sequences are separate ones; the initial state is for the first. Without softplus."""
    arrays = dict(zip(NAMES, below_zero(*inputs_and_state(*size)), strict=True))
    options = {"dt_softplus": False, "return_final_state": True}
    length = size[1]
    ends = [0, 1, length // 2, length]  # one token alone, and within a chunk
    ids = jnp.repeat(jnp.array([7, 3, 7]), jnp.diff(jnp.array(ends)), total_repeat_length=length)
    every = {"checkpoint_every": 1} if interpreted(implementation) else {}
    ids = jnp.tile(ids, (size[0], 1))

    def separate(*arrays):
        outs, state = [], arrays[-1]
        for first, last in itertools.pairwise(ends):
            own = (
                v[:, first:last] if name in ("x", "dt", "B", "C", "z") else v
                for name, v in zip(NAMES[:-1], arrays[:-1], strict=True)
            )
            own = (*own, state) if first == 0 else own
            out, state = scan(*own, implementation="xla", **options)
            outs.append(out)
        return jnp.concatenate(outs, 1), state

    cotangents = jnp.sin(arrays["x"]), jnp.cos(arrays["initial_state"])
    run = functools.partial(
        value_and_grads(scan, implementation=implementation, **options, **every),
        segment_ids=ids,
    )
    with check.running(implementation):
        got = run(tuple(arrays.values()), cotangents)
        bad = arrays | {name: arrays[name].at[0, ends[1]].set(np.nan) for name in ("x", "dt")}
        (out, final), grads = run(tuple(bad.values()), cotangents)
    want = value_and_grads(separate)(tuple(arrays.values()), cotangents)
    check.assert_close(got, want, 2e-6)
    # A NaN in the second sequence stays there, in the gradients of the tokens too.
    same = np.testing.assert_array_equal
    assert np.isnan(out[0, ends[1] : ends[2]]).all()
    same(final, got[0][1])
    for part in (slice(0, ends[1]), slice(ends[2], None)):
        same(out[:, part], got[0][0][:, part])
        for i in (0, 1, 3, 4, 6):
            same(grads[i][:, part], got[1][i][:, part])
    same(grads[8], got[1][8])


@sizes(gpu=[(2, 200, 130, 16)])
def test_selective_scan_of_any_checkpoint_every(size, implementation):
    """The states that are saved make no difference.

    For plain JAX this is test_..._in_float64. In the interpreter test_..._packed saves all,
    test_..._accuracy_of_everything some, and test_..._two_half_precisions none.
    """
    arrays = inputs_and_state(*size)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    call = functools.partial(scan, return_final_state=True)
    want = value_and_grads(call, implementation="xla")(arrays, cotangents)
    for every in (1, 8, 16, 64, None):
        run = value_and_grads(call, implementation=implementation, checkpoint_every=every)
        check.assert_close(run(arrays, cotangents), want, 2e-6)


@KERNELS
def test_selective_scan_in_uneven_parts(monkeypatch, implementation):
    """Columns of blocks halved, in parts and whole side by side, and of two warpgroups.

    Tiles of four chunks, of which there are five, so that the last tile overlaps another.
    """
    monkeypatch.setattr(tiles, "num_sms", lambda: 3)
    monkeypatch.setattr(backward, "backward_warpgroups", lambda *_: 2)
    cut = lambda columns, units, warpgroups: tiles.Grid.cut(columns, units, 1, 2)
    monkeypatch.setattr(backward, "backward_grid", cut)
    halved = tiles.forward_grid(columns=4, chunks=5, halves=True)
    assert (halved.whole, halved.halved, halved.count) == (4, 1, 5)
    split = cut(2, 3, 2)
    assert (split.whole, split.rest, split.parts, split.count) == (1, 1, 2, 3)
    states = 16 if check.ON_GPU else 4
    check_case(inputs_and_state(2, 40, 128, states), implementation, checkpoint_every=16)


@KERNELS
def test_selective_scan_in_pieces(monkeypatch, implementation):
    """Parts whose carries are found in subparts, the last of which is short."""
    cut = lambda columns, units, _: tiles.Grid.cut(columns, units, 0, 2, 3)
    monkeypatch.setattr(forward, "forward_grid", cut)
    monkeypatch.setattr(backward, "backward_grid", cut)
    grid = cut(1, 11, None)
    assert (grid.length, grid.parts, grid.of_carries().count) == (6, 2, 3)
    # The backward's last subpart of two chunks has one.
    assert grid.of_carries().parts == 6
    assert 11 % grid.of_carries().length == 1
    check_case(inputs_and_state(1, 88, 34, 9 if check.ON_GPU else 3), implementation)


@sizes(gpu=[(2, 70, 270, 16)])
def test_selective_scan_groups(size, implementation):
    """Groups with the same B and C are one group, whose gradients are the sums of theirs."""
    x, dt, A, B, C, *rest = inputs_and_state(*size)
    cotangents = jnp.sin(x), jnp.cos(rest[-1])
    call = functools.partial(scan, return_final_state=True)
    one = value_and_grads(call, implementation="xla")
    two = value_and_grads(call, implementation=implementation)
    want, want_grads = one((x, dt, A, B, C, *rest), cotangents)
    twice = lambda v: jnp.stack([v, v], axis=2)
    with check.running(implementation):
        got, grads = two((x, dt, A, twice(B), twice(C), *rest), cotangents)
    check.assert_close(got, want, 2e-6)
    summed = [v.sum(2) if i in (3, 4) else v for i, v in enumerate(grads)]
    check.assert_close(summed, want_grads, 2e-6)


def test_selective_scan_step_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    one = jnp.ones((1, 1), jnp.bfloat16)
    step = lambda state, _: jaxkern.selective_scan_step(
        state, 1e-3 * one, one, jnp.zeros((1, 1)), one, one
    )[::-1]
    state, _ = jax.lax.scan(step, jnp.zeros((1, 1, 1)), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(1e-3 * one[0, 0]), rtol=1e-3)


def named(arrays, **options):
    return jaxkern.selective_scan(**arrays, dt_softplus=True, **options)


@pytest.mark.parametrize(
    ("absent", "implementation"),
    [
        (("D", "z", "dt_bias"), "xla"),
        (("z",), "xla"),
        # To the kernels D and dt_bias are zeros; test_..._dt_limit has them absent.
        pytest.param(("D", "z", "dt_bias"), "mosaic", marks=pytest.mark.compiled),
        pytest.param(("z",), "mosaic", marks=pytest.mark.gpu),
    ],
)
def test_selective_scan_optional_arguments(absent, implementation):
    """An absent argument is what zeros are (for the gate: one that is open)."""
    arrays = dict(zip(NAMES, inputs(1, 5, 10, 2), strict=False))
    given = {k: v for k, v in arrays.items() if k not in absent}
    dout = jnp.cos(arrays["x"])
    with check.running(implementation):
        out, (grads,) = value_and_grads(named, implementation=implementation)((given,), dout)

    def full(kw):
        kw = {name: jnp.zeros_like(arrays[name]) for name in absent if name != "z"} | kw
        wanted = [kw.get(name, jnp.full_like(arrays["z"], 1e4)) for name in NAMES[:-1]]
        scale = 1e4 if "z" in absent else 1.0  # silu(1e4) = 1e4
        return plain(*wanted, jnp.zeros((1, 10, 2)))[0] / scale

    want, want_vjp = jax.vjp(jax.jit(full), given)
    check.assert_close(out, want, 2e-6)
    (want_grads,) = want_vjp(dout)
    assert grads.keys() == given.keys()
    check.assert_close(grads, want_grads, 2e-6)


@BOTH
def test_selective_scan_softplus(implementation):
    """The step size and its slope, relative to themselves, over their whole range."""
    raw = np.array([-80.0, -60.0, -15.0, -4.0, -0.1, 0.0, 0.3, 3.0, 40.0, 1000.0], np.float32)
    first = jnp.zeros((1, 5, raw.size)).at[:, 0].set(1.0)
    one = jnp.ones((1, 5, 2)).at[..., 1].set(0.0)
    zero = jnp.zeros(raw.size)
    arrays = {
        "x": first,
        "dt": first * raw,
        "A": jnp.zeros((raw.size, 2)),
        "B": one,
        "C": one,
        "D": zero,
        "dt_bias": zero,
    }
    with check.running(implementation):
        run = value_and_grads(named, implementation=implementation)
        out, (grads,) = run((arrays,), first)
    out, slope = out[:, 0], grads["dt"][:, 0]
    wide = raw.astype(np.float64)
    error = np.abs(out[0] / np.logaddexp(wide, 0) - 1)
    assert np.all(error <= 5e-7 + 2e-8 * np.abs(wide)), error
    np.testing.assert_allclose(slope[0], 1 / (1 + np.exp(-wide)), rtol=2e-6)


@BOTH
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 0, 2)])
def test_selective_scan_empty(shape, implementation):
    arrays = inputs_and_state(*shape, "bfloat16")
    call = functools.partial(scan, implementation=implementation, return_final_state=True)
    with check.running(implementation):
        (out, final), vjp = jax.vjp(call, *arrays)
        grads = vjp((out, final))
    assert out.shape == shape[:3]
    assert out.dtype == jnp.bfloat16
    assert final.dtype == jnp.float32
    np.testing.assert_array_equal(final, arrays[-1])  # no step was made
    for grad, array in zip(grads[:-1], arrays[:-1], strict=True):
        assert grad.dtype == array.dtype
        np.testing.assert_array_equal(grad, np.zeros(array.shape))
    np.testing.assert_array_equal(grads[-1], arrays[-1])


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
def test_selective_scan_dt_limit(implementation):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0, np.nan])[None, None]
    A, one = jnp.zeros((raw.size, 1)), jnp.ones((1, 1, 1))

    def run(dt, **limits):
        return jaxkern.selective_scan(
            jnp.ones_like(dt), dt, A, one, one, implementation=implementation, **limits
        )

    cases = [({"dt_limit": (0.125, 2.0)}, 0.125, 2.0)]
    if not interpreted(implementation):  # test_..._packed has 0 and no limit
        cases += [({}, 0.0, INF), ({"dt_limit": (-INF, 1)}, -INF, 1.0)]
    for limits, low, high in cases:
        with check.running(implementation):
            out, vjp = jax.vjp(functools.partial(run, **limits), raw)
            (ddt,) = vjp(jnp.ones_like(out))
        np.testing.assert_array_equal(out, np.clip(raw, low, high))  # NaN where raw is
        np.testing.assert_array_equal(ddt[..., :-1], ((raw >= low) & (raw <= high))[..., :-1])


@sizes((1, 12, 2, 2))
def test_selective_scan_grows(size, implementation):
    """A rate above 0 is legal: the state grows, and so do the gradients."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, -0.5 * A, B, C, D, z, dt_bias), implementation)


@pytest.mark.newest
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_selective_scan_memory(implementation):
    """The memory of value and gradient is far below one (B, L, D, N) array, unless asked for."""
    size = batch, length, dim, states = 1, 512, 64, 64

    def used(every):
        call = functools.partial(scan, implementation=implementation, checkpoint_every=every)
        loss = lambda *a: jnp.sum(call(*a) ** 2)
        arrays = jax.eval_shape(lambda: inputs(*size))
        compiled = jax.jit(jax.grad(loss, range(8))).lower(*arrays).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return temporary / (batch * length * dim * states * 4)

    if implementation is None:
        assert used(64) < 0.25
        assert used(None) < 0.25
    else:
        assert used(1) > 1
        assert used(8) < 0.35


# Calls


def test_selective_scan_errors():
    x, dt, A, B, C, D, z, dt_bias, state = inputs_and_state(2, 5, 3, 4)
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
    with pytest.raises(ValueError, match=r"C must have shape \(2, 5, 4\).*got \(2, 5, 1, 4\)"):
        run(x, dt, A, B, C[:, :, None])
    with pytest.raises(
        ValueError, match=r"B must have a number of groups that divides the 3.*got 2"
    ):
        run(x, dt, A, jnp.ones((2, 5, 2, 4)), jnp.ones((2, 5, 2, 4)))
    with pytest.raises(ValueError, match=r"D must have shape \(3,\) = \(D,\) of x; got \(4,\)"):
        run(x, dt, A, B, C, jnp.ones(4))
    with pytest.raises(ValueError, match=r"z must have shape"):
        run(x, dt, A, B, C, D, z[..., :1])
    with pytest.raises(ValueError, match=r"dt_bias must have shape"):
        run(x, dt, A, B, C, D, z, dt_bias=dt_bias[:1])
    with pytest.raises(
        ValueError, match=r"initial_state must have shape \(2, 3, 4\) = \(B, D, N\)"
    ):
        run(x, dt, A, B, C, initial_state=state[:1])
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'cuda\''):
        run(x, dt, A, B, C, implementation="cuda")
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 4\) = \(B, D, N\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 4, 3)), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 5, 3\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 3, 4)), x, dt, A, B, C)


def test_selective_scan_option_errors():
    x, dt, A, B, C, *_ = inputs(2, 5, 3, 4)
    run = functools.partial(jaxkern.selective_scan, x, dt, A, B, C)
    with pytest.raises(TypeError, match=r"segment_ids must have an integer dtype, got float32"):
        run(segment_ids=x[..., 0])
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 5\) = \(B, L\) of x"):
        run(segment_ids=jnp.zeros(5, int))
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        run(dt_limit=1)
    with pytest.raises(ValueError, match=r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no"):
        run(dt_limit=(1, 0))
    with pytest.raises(ValueError, match=r"low <= high, got \(nan, 1\)"):
        run(dt_limit=(float("nan"), 1))
    with pytest.raises(
        TypeError, match=r"dt_limit\[1\] must be a Python number, as it is compiled"
    ):
        jax.jit(lambda high: run(dt_limit=(0, high)))(1.0)
    for every in (0, -8, 2, 20):
        with pytest.raises(ValueError, match=f"1, a multiple of 8 or None, got {every}; try"):
            run(checkpoint_every=every)
    with pytest.raises(TypeError, match=r"checkpoint_every must be an int or None, got 'all'"):
        run(checkpoint_every="all")


def test_selective_scan_of_too_many_states():
    """More states than the kernels hold: plain JAX unless the kernels were asked for."""
    arrays = inputs(1, 9, 2, MAX_STATES + 1)
    with pytest.raises(NotImplementedError, match=rf"A has {MAX_STATES + 1} states.*{MAX_STATES}"):
        scan(*arrays, implementation="mosaic")
    chosen, plain = (scan(*arrays, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen, plain)
    text = (
        jax.jit(lambda *a: scan(*a, implementation=None))
        .trace(*arrays)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "selective_scan_fwd" not in text


# Kernels


@pytest.mark.newest  # the transformations lower it by every version of JAX
@pytest.mark.parametrize(
    ("dtype", "states", "gated", "packed"),
    [
        ("bfloat16", 16, True, False),
        ("float16", 1, False, True),
        ("float32", 64, True, False),
    ],
)
def test_selective_scan_lowers_for_cuda(dtype, states, gated, packed):
    """The kernels' layouts are accepted, with no GPU here."""
    x, dt, A, B, C, D, z, _ = inputs(2, 70, 130, states, dtype, weight_dtype="float32")

    def loss(*args):
        optional = {"z": z if gated else None, "segment_ids": segment_ids if packed else None}
        out = jaxkern.selective_scan(*args, D, **optional, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    segment_ids = jnp.broadcast_to(jnp.arange(70) // 9, (2, 70))
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
@pytest.mark.large
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
    # Two rows alone are cut into parts, which rounds differently.
    check.assert_close(out[-2:], want, 2.0**-9)
    check.assert_close(dx[-2:], want_vjp(want)[0], 2.0**-9)
    check.assert_close(want, scan(*last, implementation="xla"), 4e-3)


TOKENS = ("x", "dt", "B", "C", "z", "initial_state")
ROWS = tuple(P("data") if name in TOKENS else P() for name in NAMES)
CHANNELS = {
    **dict.fromkeys(("x", "dt", "z"), P(None, None, "data")),
    **dict.fromkeys(("A", "D", "dt_bias"), P("data")),
    **dict.fromkeys(("B", "C"), P()),
    "initial_state": P(None, "data"),
}


def scan_of_both_results(*arrays, implementation):
    """One array that depends on the output and on the final state."""
    out, final = scan(*arrays, implementation=implementation, return_final_state=True)
    return out + jnp.sum(final, axis=-1)[:, None]


SELECTIVE_SCAN = check.Op(
    name="selective_scan",
    call=scan_of_both_results,
    reference=lambda *a: scan_of_both_results(*a, implementation="xla"),
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, seed=3),
    kernels=("selective_scan_fwd", "selective_scan_bwd"),
    rows=(*ROWS, P("data")),
    features=(*(CHANNELS[name] for name in NAMES), P(None, None, "data")),
    all_reduces=1,
    vmaps=[(0,) + (None,) * 8, (None, None, 0, None, 1, 0, None, None, 0)],
)


@functools.cache
def groups_grad(implementation):
    def loss(*arrays):
        *arrays, ids = arrays
        out, final = scan(
            *arrays, implementation=implementation, segment_ids=ids, return_final_state=True
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

    return jax.jit(jax.value_and_grad(loss, range(9)))


@pytest.mark.parametrize(
    ("split", "kind", "implementation"),
    [
        ("rows", AxisType.Auto, None),
        ("channels", AxisType.Auto, None),
        ("channels", AxisType.Explicit, None),
        ("channels", AxisType.Explicit, "xla"),
    ],
)
def test_selective_scan_groups_on_mesh(split, kind, implementation):
    """Split in whole groups, or by rows, packed sequences too: no device asks for another's."""
    arrays = (*inputs_and_state(4, 5, 8, 2, groups=4), packed_ids(4, 5))
    by_channel = CHANNELS | dict.fromkeys(("B", "C"), P(None, None, "data"))
    specs = {
        "channels": (*(by_channel[name] for name in NAMES), P()),
        "rows": (*ROWS, P("data")),
    }[split]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)
    ]

    compiled = groups_grad(implementation).lower(*placed).compile()
    check.assert_close(compiled(*placed), groups_grad("xla")(*arrays))
    text = compiled.as_text()
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


def test_selective_scan_groups_of_parts_on_mesh():
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = inputs(1, 5, 8, 2, groups=2)
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    placed = [
        jax.device_put(a, NamedSharding(mesh, CHANNELS[name]))
        for name, a in zip(NAMES[:-1], arrays, strict=True)
    ]
    run = jax.jit(functools.partial(scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))


@pytest.mark.newest
def test_selective_scan_packed_under_vmap():
    """Per-example gradients of groups and of segments that differ between the examples."""
    arrays = inputs_and_state(2, 7, 4, 2, groups=2)
    stacked = [jnp.stack([a, 0.9 * a]) for a in arrays]
    ids = jnp.stack([packed_ids(2, 7), packed_ids(2, 7)[::-1]])

    def grad(implementation):
        def loss(ids, *arrays):
            return jnp.sum(jnp.sin(scan(*arrays, implementation=implementation, segment_ids=ids)))

        return jax.jit(jax.vmap(jax.grad(loss, range(1, 10))))

    one = grad("xla")
    loop = [one(ids[i : i + 1], *(a[i : i + 1] for a in stacked)) for i in range(2)]
    want = jax.tree.map(lambda *v: jnp.concatenate(v), *loop)
    check.assert_close(grad(None)(ids, *stacked), want)


@check.matrix(SELECTIVE_SCAN)
def test_selective_scan_transformations(cell, record_property):
    check.check_cell(cell, record_property)
