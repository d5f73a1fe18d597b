"""ssd in plain JAX: its accuracy, where NaN goes, absent arguments, the matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.ops.ssd import reference
from tests import check
from tests.ssd import (
    ALONG,
    NAMES,
    below_zero,
    both_results,
    check_case,
    check_others,
    check_reference,
    inputs_and_state,
    oracle,
    packed_ids,
    results_by_name,
    scan,
    with_groups,
    with_rates,
)

SIZE = (2, 70, 4, 3, 5)
"""One size for tests that differ in their numbers alone: more than a chunk; with two groups."""

exhaustive = pytest.mark.exhaustive
EVERY = pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=exhaustive)])
"""The pair of passes in plain JAX, and plain JAX that JAX differentiates."""

# Accuracy


def forgets_all_at_once():
    """Decays of exactly 0 amid others of one chunk: these keep all their digits, none is NaN."""
    x, dt, A, *rest = inputs_and_state(2, 100, 3, 4, 2)
    A = A.at[0].set(-1e6).at[1].set(-1e30)
    dt = dt.at[0, 4].set(80.0).at[1, ::9, 2].set(300.0)
    return x, dt, A, *rest


EVERYTHING = {"dt_limit": (0.05, 0.3), "checkpoint_every": 128}
EVERYTHING["segment_ids"] = packed_ids(2, 300, every=40)
sized = lambda *size, **options: functools.partial(inputs_and_state, *size, **options)
CASES = {
    "groups": (sized(2, 63, 4, 3, 5, groups=2), {}),
    "bfloat16": (sized(2, 150, 4, 16, 16, groups=2, dtype="bfloat16", weight_dtype="float32"), {}),
    "long memory": (
        lambda: with_rates(1e-3, inputs_and_state(1, 1000, 2, 4, 2)),
        {"checkpoint_every": None},
    ),
    "forgets all at once": (forgets_all_at_once, {}),
    # By a little: of a number n, exp has n times the error of the number.
    "grows": (lambda: with_rates(-0.01, inputs_and_state(1, 20, 2, 2, 3)), {}),
    "one token": (sized(1, 1, 1, 1, 1), {}),
    "chunks": (sized(2, 200, 2, 16, 32), {}),
    "float16": (sized(2, 150, 4, 16, 16, groups=2, dtype="float16", weight_dtype="bfloat16"), {}),
    "everything": (sized(2, 300, 6, 4, 3, groups=3, of_channels=True), EVERYTHING),
    "without softplus": (
        lambda: below_zero(*inputs_and_state(2, 70, 2, 4, 3)),
        {"dt_softplus": False},
    ),
}
BY_DEFAULT = ("groups", "bfloat16", "long memory", "forgets all at once", "grows")
BY_JAX = ("groups", "long memory", "forgets all at once", "chunks", "everything")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *(pytest.param(n, None, marks=() if n in BY_DEFAULT else exhaustive) for n in CASES),
        *(pytest.param(n, "xla", marks=exhaustive) for n in BY_JAX),
    ],
)
def test_ssd_accuracy(name, implementation):
    arrays, options = CASES[name]
    check_case(arrays(), implementation, **options)


@pytest.mark.parametrize(
    ("every", "limits", "implementation"),
    [
        (128, (0.05, 0.6), None),
        (256, (-0.02, 0.1), "xla"),
        pytest.param(256, (-0.02, 0.1), None, marks=exhaustive),
        pytest.param(None, (0.05, 0.6), None, marks=exhaustive),
        pytest.param(128, (0.05, 0.6), "xla", marks=exhaustive),
    ],
)
def test_ssd_reference_in_float64(every, limits, implementation):
    """With rates at which a state outlasts a chunk."""
    make = sized(2, 300, 4, 3, 5, groups=2, of_channels=limits[0] < 0)
    slow = lambda dtype: with_rates(1 / 32, make(dtype=dtype))
    options = {"segment_ids": packed_ids(2, 300, every=60), "checkpoint_every": every}
    check_reference(scan, oracle, slow, limits, 1e-13, implementation, **options)


@pytest.mark.parametrize(("every", "count"), [(128, 2), (256, 1), (None, None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ssd_saved_states(every, count, dtype):
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states, and y if it is gated."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.dtype(dtype))
    tokens, steps, weights = shape(2, 200, 1, 5, 3), shape(2, 200, 1, 5), shape(2, 200, 1, 4)

    def run(save, gate=None):
        options = reference.SsdOptions(False, every, "auto", save=save)
        args = lambda *a: reference.reference_fwd(options, *a, None, gate, None, None, None)
        return jax.eval_shape(args, tokens, steps, steps, weights, weights)

    described = lambda v: None if v is None else (v.shape, v.dtype)
    out, final, states, y = run(True)
    assert out.shape == tokens.shape
    assert (final, y) == (None, None)
    saved = {"float16": "float32"}.get(dtype, dtype)
    assert described(states) == (None if count is None else ((2, count, 1, 5, 3, 4), saved))
    gate = np.zeros(tokens.shape, dtype)
    assert described(run(True, gate)[3]) == (None if count is None else described(tokens))
    assert run(False, gate)[2:] == (None, None)


# States, and what is not a number


@EVERY
def test_ssd_bad_head_stays_alone(implementation):
    """A NaN in one head of one row leaves every other head and row with the bits it had."""
    run = results_by_name(inputs_and_state(*SIZE, groups=2), implementation=implementation)
    want = run()
    for name in ("x", "dt", "z"):
        got = run(name, 1, 4, 2)
        assert np.isnan(got["out"][1, 4, 2]).any()
        check_others(got, want)


@exhaustive
@EVERY
def test_ssd_nan_stays_in_its_segment(implementation):
    """In the same chunk, behind it and before it, in the gradients too, and in a row's first."""
    run = results_by_name(inputs_and_state(*SIZE, groups=2), implementation=implementation)
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1).repeat(2, 0)
    run = functools.partial(run, segment_ids=ids)
    want, (row, time) = run(), (1, 25)
    same = np.testing.assert_array_equal
    # JAX's own derivative of a product takes NaN of a cotangent to all of a chunk.
    for name in (*ALONG, *(["out"] if implementation is None else [])):
        got = run(name, row, time)
        assert name == "out" or np.isnan(got["out"][row, time]).all()
        assert any(np.isnan(got[n][row, 20:40]).any() for n in ALONG)
        for n in ("final", "initial_state"):
            same(got[n], want[n])
        for n in ("out", *ALONG):
            same(
                np.delete(got[n][row], slice(20, 40), 0), np.delete(want[n][row], slice(20, 40), 0)
            )
            same(got[n][0], want[n][0])
    got = run("initial_state", 0, 1)
    assert np.isnan(got["out"][0, :20, 1]).all()
    same(got["final"], want["final"])
    for n in ("out", *ALONG):
        same(got[n][:, 20:], want[n][:, 20:])


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", ["C", "x"])
def test_ssd_gradient_of_the_skip(name, implementation):
    """D's is Σ x · dout, whatever C is: a NaN in x of one head reaches that of this head alone."""
    x, dt, A, B, C, D, *_ = inputs_and_state(1, 16, 2, 3, 2)
    given = {"x": x, "C": C}
    given[name] = given[name].at[(0, 5) + (0,) * (given[name].ndim - 2)].set(np.nan)
    dout = jnp.asarray(np.random.default_rng(0).normal(size=x.shape).astype("float32"))
    ids = jnp.arange(16)[None] // 4
    options = {"segment_ids": ids, "implementation": implementation}
    run = lambda D: jaxkern.ssd(given["x"], dt, A, B, given["C"], D, **options)
    got = jax.jit(lambda D: jax.vjp(run, D)[1](dout)[0])(D)
    want = np.sum(np.asarray(given["x"] * dout, float), (0, 1, 3) if D.ndim == 1 else (0, 1))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "order"),
    [("xla", 1), *(pytest.param(i, 2, marks=exhaustive) for i in (None, "xla"))],
)
def test_ssd_of_growing_states_in_short_segments(implementation, order):
    """The decay over a device's part is e^128, and that over a segment of four tokens e^4."""
    length = 256
    ones, ids = jnp.ones((1, length, 1, 1)), jnp.arange(length)[None] // 4
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2])
    split = NamedSharding(mesh, P(None, "data"))

    def gradient(put, dt):
        x, segment_ids = put(ones), put(ids)
        run = functools.partial(jaxkern.ssd, x, A=jnp.ones(1), B=x, C=x)
        run = functools.partial(run, segment_ids=segment_ids, implementation=implementation)
        f = lambda dt: jnp.sum(run(dt=dt))
        if order == 2:
            f = lambda dt, f=f: jnp.sum(jax.grad(f)(dt) ** 2)
        return jax.jit(jax.grad(f))(put(dt))

    whole = gradient(lambda v: v, ones[..., 0])
    assert np.isfinite(whole).all()
    parts = gradient(functools.partial(jax.device_put, device=split), ones[..., 0])
    check.assert_close(parts, whole)


def test_ssd_of_one_group_without_its_axis():
    x, dt, A, B, C, *_, state = inputs_and_state(1, 5, 2, 3, 4)
    of = lambda B, C: jaxkern.ssd(x, dt, A, B, C)
    np.testing.assert_array_equal(of(B[:, :, 0], C[:, :, 0]), of(B, C))
    of = lambda B, C: jaxkern.ssd_step(state, x[:, 0], dt[:, 0], A, B, C)[0]
    np.testing.assert_array_equal(of(B[:, 0, 0], C[:, 0, 0]), of(B[:, 0], C[:, 0]))


@EVERY
def test_ssd_optional_arguments(implementation):
    """Results and gradients of a call that lacks some."""
    arrays = dict(zip(NAMES, inputs_and_state(1, 5, 4, 3, 2), strict=True))
    dout = jnp.cos(arrays["x"])
    named = functools.partial(jaxkern.ssd, dt_softplus=True, implementation=implementation)
    run = check.program(lambda kw: named(**kw))
    for absent in (("initial_state", "D", "z", "dt_bias"), ("initial_state", "z")):
        given = {k: v for k, v in arrays.items() if k not in absent}
        out, (grads,) = run((given,), dout)
        (want, _), want_grads = check.in_float64(oracle, *map(given.get, NAMES), dout, None)
        check.assert_close(out, want, 2e-6)
        assert grads.keys() == given.keys()
        wanted = dict(zip(NAMES, want_grads, strict=True))
        check.assert_close(grads, {k: wanted[k] for k in given}, 2e-6)


# Transformations and meshes

OF_RULES = ("jit", "vmap", "vmap(vmap)", "scan", "shard_map unchecked")
"""What JAX does around a rule, which other ops show, and the kernels on a GPU."""

SSD = check.Op(
    name="ssd",
    call=functools.partial(both_results, scan),
    reference=functools.partial(both_results, scan),
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, 3, seed=3),
    kernels=("ssd_fwd", "ssd_bwd"),
    axes="blhp blh h blgn blgn h blhp h bhpn -> blhp",
    slow=[("grad(grad)", None)],
    features="h",
    channels="h",
    all_reduces=1,
    vmaps=[(0,) + (None,) * 8, (None, None, 0, None, 1, 0, None, None, 0)],
    cells=[
        *((name, None) for name in check.TRANSFORMATIONS if name not in (*check.ALONE, *OF_RULES)),
        *(("jvp", "xla"), ("explicit mesh", "xla")),
    ],
)
GROUPS = with_groups(
    SSD,
    lambda: inputs_and_state(4, 5, 8, 2, 3, groups=4),
    "blhp blh h blgn blgn h blhp h bhpn bl -> blhp",
    slow=[("auto mesh", None)],
)
test_ssd_transformations = check.transformations(SSD, GROUPS)
