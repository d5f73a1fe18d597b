"""ssd in plain JAX: its accuracy, what it does with states and with NaN, errors, the matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.ssd import reference
from tests import check
from tests.ssd import (
    ALONG,
    INF,
    NAMES,
    check_case,
    cotangents,
    inputs_and_state,
    oracle,
    packed_ids,
    results_by_name,
    scan,
)

SIZE = (2, 70, 4, 3, 5)
"""One size for tests that differ in their numbers alone: more than a chunk; with two groups."""

call = functools.partial(scan, return_final_state=True)
exhaustive = pytest.mark.exhaustive
EVERY = pytest.mark.parametrize("implementation", [None, pytest.param("xla", marks=exhaustive)])
"""The pair of passes in plain JAX, and plain JAX that JAX differentiates."""

# Accuracy


def long_memory():
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, *rest = inputs_and_state(1, 1000, 2, 4, 2)
    return x, dt, 1e-3 * A, *rest


def forgets_all_at_once():
    """Decays of exactly 0 amid others of one chunk: these keep all their digits, none is NaN."""
    x, dt, A, *rest = inputs_and_state(2, 100, 3, 4, 2)
    A = A.at[0].set(-1e6).at[1].set(-1e30)
    dt = dt.at[0, 4].set(80.0).at[1, ::9, 2].set(300.0)
    return x, dt, A, *rest


def grows():
    """A rate above 0 is legal: the state grows, and so do the gradients.

    By a little: of a number n, exp has n times the error of the number.
    """
    x, dt, A, *rest = inputs_and_state(1, 20, 2, 2, 3)
    return x, dt, -0.01 * A, *rest


def without_softplus():
    x, dt, A, B, C, D, z, dt_bias, state = inputs_and_state(2, 70, 2, 4, 3)
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    return x, dt, A, B, C, D, z, 0.01 * dt_bias, state


EVERYTHING = {"dt_limit": (0.05, 0.3), "checkpoint_every": 128}
EVERYTHING["segment_ids"] = packed_ids(2, 300, every=40)
sized = lambda *size, **options: functools.partial(inputs_and_state, *size, **options)
CASES = {
    "groups": (sized(2, 63, 4, 3, 5, groups=2), {}),
    "bfloat16": (sized(2, 150, 4, 16, 16, groups=2, dtype="bfloat16", weight_dtype="float32"), {}),
    "long memory": (long_memory, {"checkpoint_every": None}),
    "forgets all at once": (forgets_all_at_once, {}),
    "grows": (grows, {}),
    "one token": (sized(1, 1, 1, 1, 1), {}),
    "chunks": (sized(2, 200, 2, 16, 32), {}),
    "float16": (sized(2, 150, 4, 16, 16, groups=2, dtype="float16", weight_dtype="bfloat16"), {}),
    "everything": (sized(2, 300, 6, 4, 3, groups=3, of_channels=True), EVERYTHING),
    "without softplus": (without_softplus, {"dt_softplus": False}),
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
    ("every", "dt_softplus", "implementation"),
    [
        (128, True, None),
        (256, False, "xla"),
        pytest.param(256, False, None, marks=exhaustive),
        pytest.param(None, True, None, marks=exhaustive),
        pytest.param(128, True, "xla", marks=exhaustive),
    ],
)
def test_ssd_reference_in_float64(every, dt_softplus, implementation):
    """The specification itself, gradients included, far below fp32's rounding."""
    options = {
        "dt_softplus": dt_softplus,
        "dt_limit": (0.05, 0.6) if dt_softplus else (-0.02, 0.1),
        "segment_ids": packed_ids(2, 300, every=60),
    }
    with jax.enable_x64(True):
        arrays = inputs_and_state(2, 300, 4, 3, 5, groups=2, of_channels=not dt_softplus)
        arrays = [np.asarray(a, np.float64) for a in arrays]
        arrays[2] /= 32  # so that a state outlasts a chunk
        rng = np.random.default_rng(0)
        given = rng.normal(size=arrays[0].shape), rng.normal(size=arrays[-1].shape)
        run = functools.partial(call, checkpoint_every=every, **options)
        got = check.value_and_grads(
            run, arrays, tuple(map(jnp.asarray, given)), implementation=implementation
        )
        assert got[0][0].dtype == got[0][1].dtype == jnp.float64
        check.assert_close(got, oracle(*arrays, *given, **options), 1e-13)


@exhaustive
def test_ssd_by_finite_differences():
    """In forward mode, too."""
    with jax.enable_x64(True):
        arrays = inputs_and_state(1, 6, 2, 2, 2, groups=2)
        arrays = tuple(jnp.asarray(a, jnp.float64) for a in arrays)
        ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        options = {"segment_ids": ids, "dt_limit": (0.06, 0.3)}
        run = jax.jit(functools.partial(call, implementation="xla", **options))
        check_grads(run, arrays, order=1, modes=["fwd", "rev"], eps=1e-6, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize(("every", "count"), [(128, 2), (256, 1), (None, None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ssd_saved_states(every, count, dtype):
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states, and y if it is gated."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.dtype(dtype))
    tokens, steps, weights = shape(2, 200, 1, 5, 3), shape(2, 200, 1, 5), shape(2, 200, 1, 4)

    def run(save, gate=None):
        options = reference.Options(False, every, "auto", save=save)
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


@pytest.mark.parametrize(
    ("implementation", "every"),
    [
        (None, 128),
        *(
            pytest.param(*case, marks=exhaustive)
            for case in [(None, None), ("xla", 128), ("xla", None)]
        ),
    ],
)
def test_ssd_memory(implementation, every):
    """Value and gradient hold far less than a (B, L, H, P, N) array, whatever states are saved."""
    size = 1, 2048, 4, 32, 64
    loss = lambda *a: jnp.sum(scan(*a, implementation=implementation, checkpoint_every=every) ** 2)
    arrays = jax.eval_shape(sized(*size))
    compiled = jax.jit(jax.grad(loss, range(9))).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 4 * np.prod(size)


# States, and what is not a number


@EVERY
def test_ssd_bad_head_stays_alone(implementation):
    """A NaN in one head of one row leaves every other head and row with the bits it had."""
    run = results_by_name(inputs_and_state(*SIZE, groups=2), implementation=implementation)
    others = np.ones((2, 4), bool)
    others[1, 2] = False
    of_kinds = [
        (("out", "x", "dt", "z"), lambda v: v.swapaxes(1, 2)[others]),
        (("final", "initial_state"), lambda v: v[others]),
        (("B", "C"), lambda v: v[0]),  # sums over heads: the other row's and group's stay
        (("B", "C"), lambda v: v[:, :, 0]),
        (("A", "D", "dt_bias"), lambda v: np.delete(v, 2, 0)),  # over rows: the other heads'
    ]
    want = run()
    for name in ("x", "dt", "z"):
        got = run(name, 1, 4, 2)
        assert np.isnan(got["out"][1, 4, 2]).any()
        for names, kept in of_kinds:
            for n in names:
                np.testing.assert_array_equal(kept(got[n]), kept(want[n]))


@pytest.mark.exhaustive
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


def test_ssd_step_by_step():
    """ssd_step, token by token, gives the oracle's outputs, final state and gradients."""
    arrays = inputs_and_state(*SIZE, groups=2)
    options = {"dt_softplus": True, "dt_limit": (0.05, 0.6)}

    def stepped(x, dt, A, B, C, D, z, dt_bias, state):
        def step(state, token):
            x, dt, b, c, z = token
            return jaxkern.ssd_step(state, x, dt, A, b, c, D, z, dt_bias=dt_bias, **options)[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        state, outs = jax.lax.scan(step, state.astype(jnp.float32), tokens)
        return jnp.moveaxis(outs, 0, 1), state

    given = cotangents(arrays)
    want = check.in_float64(oracle, *arrays, *given, **options)
    check.assert_close(check.program(stepped)(arrays, given), want, 2e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs, state = jax.jit(stepped)(*half)
    assert (outs.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    want, _ = check.in_float64(oracle, *half, *given, **options)
    check.assert_close((outs, state), want, 4e-3)


def test_ssd_step_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    one = jnp.ones((1, 1, 1), jnp.bfloat16)
    step = lambda h, _: jaxkern.ssd_step(h, 1e-3 * one, one[0], jnp.zeros(1), one, one)[::-1]
    state, _ = jax.lax.scan(step, jnp.zeros((1, 1, 1, 1)), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(1e-3 * one[0, 0, 0]), rtol=1e-3)


@EVERY
def test_ssd_optional_arguments(implementation):
    """An absent argument is what zeros are (for the gate: one that is open)."""
    arrays = dict(zip(NAMES, inputs_and_state(1, 5, 4, 3, 2), strict=True))
    dout = jnp.cos(arrays["x"])
    for absent in (("initial_state", "D", "z", "dt_bias"), ("initial_state", "z")):
        given = {k: v for k, v in arrays.items() if k not in absent}
        named = functools.partial(jaxkern.ssd, dt_softplus=True, implementation=implementation)
        out, (grads,) = check.program(lambda kw, f=named: f(**kw))((given,), dout)
        full = {k: v if k in given else jnp.zeros_like(v) for k, v in arrays.items()}
        full["z"] = jnp.full_like(full["z"], 1e4)  # silu(1e4) = 1e4
        (want, _), want_grads = check.in_float64(
            oracle, *full.values(), 1e-4 * dout, full["initial_state"]
        )
        check.assert_close(out, 1e-4 * want, 2e-6)
        assert grads.keys() == given.keys()
        wanted = dict(zip(NAMES, want_grads, strict=True))
        check.assert_close(grads, {k: wanted[k] for k in given}, 2e-6)


@EVERY
def test_ssd_without_tokens(implementation):
    """The final state is the initial one, and so are their gradients."""
    arrays = inputs_and_state(2, 0, 2, 3, 2, dtype="bfloat16")
    given = cotangents(arrays)
    (_, final), grads = check.program(call, implementation=implementation)(arrays, given)
    np.testing.assert_array_equal(final, arrays[-1].astype(jnp.float32))
    np.testing.assert_array_equal(grads[-1], given[1])


@EVERY
@pytest.mark.parametrize("limits", [(0.125, 2.0), None, (-INF, 1.0)])
def test_ssd_dt_limit(limits, implementation):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0])[None, None]
    one, A = jnp.ones((1, 1, 1, 1)), jnp.zeros(raw.size)
    x = jnp.ones((1, 1, raw.size, 1))
    options = {"implementation": implementation} | ({"dt_limit": limits} if limits else {})
    run = lambda dt: jaxkern.ssd(x, dt, A, one, one, **options)[..., 0]
    out, (ddt,) = check.program(run)((raw,), jnp.ones_like(raw))
    low, high = limits or (0.0, INF)
    np.testing.assert_array_equal(out, np.clip(raw, low, high))
    np.testing.assert_array_equal(ddt, (raw >= low) & (raw <= high))


# Calls


def test_ssd_errors():
    arrays = dict(zip(NAMES, inputs_and_state(2, 5, 4, 3, 6, groups=2), strict=True))
    three = jnp.ones((2, 5, 3, 6))
    wrong = {
        r"x must have shape \(B, L, H, P\), got \(5, 4, 3\)": {"x": arrays["x"][0]},
        r"dt must have shape \(2, 5, 4\) = \(B, L, H\) of x": {"dt": arrays["dt"][:, :4]},
        r"A must have shape \(4,\) = \(H,\) of x; got \(4, 1\)": {"A": arrays["A"][:, None]},
        r"B must have shape \(B, L, G, N\).*B\[\.\.\., None, :\]": {"B": arrays["B"][:, :, 0]},
        r"B must have a number of groups that divides the 4.*3": {"B": three, "C": three},
        r"C must have shape \(2, 5, 2, 6\).*as B": {"C": arrays["C"][:1]},
        r"D must have shape \(4,\) = \(H,\) of x, or \(H, P\)": {"D": jnp.ones(3)},
        r"D must have shape \(4, 3\) = \(H, P\) of x; got": {"D": jnp.ones((4, 4))},
        r"z must have shape": {"z": arrays["z"][..., :1]},
        r"dt_bias must have shape": {"dt_bias": arrays["dt_bias"][:1]},
        r"initial_state must have shape \(2, 4, 3, 6\) = \(B, H,": {
            "initial_state": arrays["initial_state"][:1]
        },
        r"segment_ids must have shape \(2, 5\) = \(B, L\) of x": {"segment_ids": jnp.zeros(5, int)},
        r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no": {"dt_limit": (1, 0)},
    }
    for every in (0, -128, 64, 200):
        wrong[f"a multiple of 128 or None, got {every}; try 128"] = {"checkpoint_every": every}
    for message, values in wrong.items():
        with pytest.raises(ValueError, match=message):
            jaxkern.ssd(**(arrays | values))
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        jaxkern.ssd(**arrays, dt_limit=1)
    with pytest.raises(TypeError, match=r"checkpoint_every must be an int or None, got 'all'"):
        jaxkern.ssd(**arrays, checkpoint_every="all")
    x, dt, A, B, C, *_, state = arrays.values()
    step = jaxkern.ssd_step
    with pytest.raises(ValueError, match=r"state must have shape \(2, 4, 3, 6\) = \(B, H, P, N\)"):
        step(state[:, :3], x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, H, P\), got \(2, 5, 4, 3\)"):
        step(state, x, dt, A, B, C)


# Transformations and meshes


def scan_of_both_results(*arrays, implementation="xla"):
    """One array that depends on the output and on the final state."""
    *arrays, last = arrays  # ids, where there are any
    packed = jnp.issubdtype(last.dtype, jnp.integer)
    options = {"segment_ids": last} if packed else {}
    arrays = arrays if packed else (*arrays, last)
    out, final = call(*arrays, implementation=implementation, **options)
    return out + jnp.sum(final, axis=-1)[:, None]


OF_RULES = ("jit", "vmap", "vmap(vmap)", "scan", "shard_map unchecked")
"""What JAX does around a rule, which other ops show, and the kernels on a GPU."""

SSD = check.Op(
    name="ssd",
    call=scan_of_both_results,
    reference=scan_of_both_results,
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
GROUPS = dataclasses.replace(
    SSD,
    name="ssd, groups",
    arrays=lambda key: (*inputs_and_state(4, 5, 8, 2, 3, groups=4), packed_ids(4, 5)),
    axes="blhp blh h blgn blgn h blhp h bhpn bl -> blhp",
    channels="hg",
    vmaps=[(0,) * 10],
    slow=[("auto mesh", None)],
    cells=[
        *(("auto mesh", None), ("vmap(grad)", None)),
        *(("rows and channels split", i) for i in (None, "xla")),
    ],
)
test_ssd_transformations = check.transformations(SSD, GROUPS)


def test_ssd_groups_of_parts_on_mesh():
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = inputs_and_state(1, 5, 8, 2, 3, groups=2)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    placed = [place(a, s) for a, s in zip(arrays, SSD.specs(data="h")[:-1], strict=True)]
    run = jax.jit(functools.partial(scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))
