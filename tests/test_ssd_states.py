"""ssd: what the recurrence promises of its states, and of what is not a number."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from tests import check
from tests.ssd import (
    ALONG,
    EVERY,
    NAMES,
    cotangents,
    inputs_and_state,
    oracle,
    plain,
    scan,
)

SIZE = (2, 70, 4, 3, 5, 2)
"""One size for tests that differ in their numbers alone: more than a chunk, two groups."""

call = functools.partial(scan, return_final_state=True)


def run(implementation):
    """``run(arrays, cotangents) -> (out, final), gradients``, compiled once."""
    return check.program(call, implementation=implementation)


@EVERY
def test_ssd_bad_head_stays_alone(implementation):
    """A NaN in one head of one row leaves every other head and row with the bits it had."""
    arrays = dict(zip(NAMES, inputs_and_state(*SIZE), strict=True))
    given = cotangents(tuple(arrays.values()))
    same = np.testing.assert_array_equal
    others = np.ones((2, 4), bool)
    others[1, 2] = False
    (out, final), grads = run(implementation)(tuple(arrays.values()), given)
    for name in ("x", "dt", "z"):
        poisoned = arrays | {name: arrays[name].at[1, 4, 2].set(np.nan)}
        (bad, bad_final), bad_grads = run(implementation)(tuple(poisoned.values()), given)
        got = dict(zip(NAMES, bad_grads, strict=True), out=bad)
        want = dict(zip(NAMES, grads, strict=True), out=out)
        for n in ("out", "x", "dt", "z"):
            same(got[n].swapaxes(1, 2)[others], want[n].swapaxes(1, 2)[others])
        same(got["initial_state"][others], want["initial_state"][others])
        same(bad_final[others], final[others])
        assert np.isnan(bad[1, 4, 2]).any()
        for n in ("B", "C"):  # sums over heads: the other row's and group's stay
            same(got[n][0], want[n][0])
            same(got[n][:, :, 0], want[n][:, :, 0])
        for n in ("A", "D", "dt_bias"):  # sums over rows: the other heads' stay
            same(np.delete(got[n], 2, 0), np.delete(want[n], 2, 0))


@EVERY
@pytest.mark.parametrize("name", [*ALONG, "dout"])
def test_ssd_nan_stays_in_its_segment(name, implementation):
    """In the same chunk, behind it and before it, and in the gradients too."""
    if (name, implementation) == ("dout", "xla"):
        pytest.skip("JAX's own derivative of a product takes NaN to all of a chunk")
    arrays = dict(zip(NAMES, inputs_and_state(*SIZE), strict=True))
    dout, dfinal = cotangents(tuple(arrays.values()))
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1).repeat(2, 0)
    (row, time), own = (1, 25), slice(20, 40)
    args = tuple(arrays.values())
    (out, final), grads = run(implementation)(args, (dout, dfinal), segment_ids=ids)
    if name == "dout":
        dout = dout.at[row, time].set(np.nan)
    else:
        arrays[name] = arrays[name].at[row, time].set(np.nan)
    args = tuple(arrays.values())
    (bad, bad_final), bad_grads = run(implementation)(args, (dout, dfinal), segment_ids=ids)
    assert name == "dout" or np.isnan(bad[row, time]).all()
    assert any(
        np.isnan(g[row, own]).any() for g, n in zip(bad_grads, NAMES, strict=True) if n in ALONG
    )
    np.testing.assert_array_equal(bad_final, final)
    for n, got, want in zip(("out", *NAMES), (bad, *bad_grads), (out, *grads), strict=True):
        if n in ("out", *ALONG):
            np.testing.assert_array_equal(np.delete(got[row], own, 0), np.delete(want[row], own, 0))
            np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(bad_grads[-1], grads[-1])


@EVERY
def test_ssd_initial_state_of_nan_stays_in_the_first_segment(implementation):
    *args, state = inputs_and_state(*SIZE)
    given = cotangents((*args, state))
    ids = jnp.repeat(jnp.array([[0, 1]]), jnp.array([20, 50]), axis=1).repeat(2, 0)
    go = functools.partial(run(implementation), segment_ids=ids)
    (out, final), grads = go((*args, state), given)
    (bad, bad_final), bad_grads = go((*args, state.at[0, 1].set(np.nan)), given)
    assert np.isnan(bad[0, :20, 1]).all()
    np.testing.assert_array_equal(bad[:, 20:], out[:, 20:])
    np.testing.assert_array_equal(bad_final, final)
    for i, name in enumerate(NAMES):
        if name in ALONG:
            np.testing.assert_array_equal(bad_grads[i][:, 20:], grads[i][:, 20:])


@pytest.mark.newest
def test_ssd_is_its_steps():
    """ssd_step, token by token, gives the same outputs, final state and gradients."""
    arrays = inputs_and_state(*SIZE)
    options = {"dt_softplus": True, "dt_limit": (0.05, 0.6)}

    def stepped(x, dt, A, B, C, D, z, dt_bias, state):
        def step(state, token):
            x, dt, b, c, z = token
            return jaxkern.ssd_step(state, x, dt, A, b, c, D, z, dt_bias=dt_bias, **options)[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        state, outs = jax.lax.scan(step, state.astype(jnp.float32), tokens)
        return jnp.moveaxis(outs, 0, 1), state

    whole = functools.partial(call, implementation="xla", **options)
    given = cotangents(arrays)
    want = check.program(stepped)(arrays, given)
    check.assert_close(check.program(whole)(arrays, given), want, 2e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs, state = jax.jit(stepped)(*half)
    assert outs.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    check.assert_close((outs, state), jax.jit(whole)(*half), 4e-3)


@EVERY
def test_ssd_states_of_segments_of_several_chunks(implementation):
    """Segments longer than a chunk, with states and without, one after another and absent."""
    count = 4
    *args, _ = inputs_and_state(2, 300, 2, 3, 4)
    states = jnp.asarray(np.random.default_rng(1).normal(size=(2, count, 2, 3, 4)), jnp.float32)
    ids = np.stack(
        [
            np.repeat([2, 0, -1, 9, 3], [70, 64, 40, 90, 36]),
            np.repeat([-1, 1, 1, 0, 1], [10, 100, 60, 1, 129]),
        ]
    )

    packed = functools.partial(call, implementation=implementation, num_segments=count)
    dout = jnp.asarray(np.random.default_rng(2).normal(size=args[0].shape), jnp.float32)
    run = check.program(packed)
    (out, finals), grads = run((*args, states), (dout, jnp.cos(states)), segment_ids=ids)
    wide = [np.asarray(v, np.float64) for v in args]
    dtokens = {n: np.zeros_like(v) for n, v in zip(NAMES, wide, strict=False)}
    want, final = np.zeros(out.shape), np.asarray(states, np.float64).copy()
    dstates = np.cos(final)
    for row, of_row in enumerate(ids):
        ends = [0, *(np.flatnonzero(np.diff(of_row)) + 1), of_row.size]
        seen = set()
        for first, stop in itertools.pairwise(ends):
            at, number = (slice(row, row + 1), slice(first, stop)), of_row[first]
            own = number not in seen and 0 <= number < count
            seen.add(number)
            part = [v[at] if n in ALONG else v for n, v in zip(NAMES, wide, strict=False)]
            start = final[row, number][None] if own else np.zeros((1, 2, 3, 4))
            dlast = dstates[row, number][None] if own else 0 * start
            (want[at], last), partial = oracle(*part, start, np.asarray(dout[at], float), dlast)
            for n, d in zip(NAMES[:-1], partial, strict=False):
                dtokens[n][at if n in ALONG else ...] += d
            if own:
                final[row, number], dstates[row, number] = last[0], partial[-1][0]
    check.assert_close((out, finals), (want, final), 2e-6)
    check.assert_close(grads, (*dtokens.values(), dstates), 2e-6)


def test_ssd_step_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    one = jnp.ones((1, 1, 1), jnp.bfloat16)
    step = lambda state, _: jaxkern.ssd_step(state, 1e-3 * one, one[0], jnp.zeros(1), one, one)[
        ::-1
    ]
    state, _ = jax.lax.scan(step, jnp.zeros((1, 1, 1, 1)), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(1e-3 * one[0, 0, 0]), rtol=1e-3)


@EVERY
@pytest.mark.parametrize("absent", [("D", "z", "dt_bias"), ("z",)])
def test_ssd_optional_arguments(absent, implementation):
    """An absent argument is what zeros are (for the gate: one that is open)."""
    *values, state = inputs_and_state(1, 5, 4, 3, 2)
    arrays = dict(zip(NAMES, values, strict=False))
    given = {k: v for k, v in arrays.items() if k not in absent}

    def named(arrays, **options):
        return jaxkern.ssd(**arrays, dt_softplus=True, **options)

    dout = jnp.cos(arrays["x"])
    run = check.program(named, implementation=implementation)
    out, (grads,) = run((given,), dout)

    def full(kw):
        kw = {name: jnp.zeros_like(arrays[name]) for name in absent if name != "z"} | kw
        wanted = [kw.get(name, jnp.full_like(arrays["z"], 1e4)) for name in NAMES[:-1]]
        scale = 1e4 if "z" in absent else 1.0  # silu(1e4) = 1e4
        return plain(*wanted, jnp.zeros_like(state))[0] / scale

    want, want_vjp = jax.vjp(jax.jit(full), given)
    check.assert_close(out, want, 2e-6)
    (want_grads,) = want_vjp(dout)
    assert grads.keys() == given.keys()
    check.assert_close(grads, want_grads, 2e-6)


@EVERY
def test_ssd_without_tokens(implementation):
    """The final state is the initial one, and so are their gradients."""
    arrays = inputs_and_state(2, 0, 2, 3, 2, dtype="bfloat16")
    given = cotangents(arrays)
    (_, final), grads = run(implementation)(arrays, given)
    np.testing.assert_array_equal(final, arrays[-1].astype(jnp.float32))
    np.testing.assert_array_equal(grads[-1], given[1])


@EVERY
def test_ssd_dt_limit(implementation):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0])[None, None]
    one = jnp.ones((1, 1, 1, 1))

    def go(dt, **limits):
        x = jnp.ones((1, 1, raw.size, 1))
        A = jnp.zeros(raw.size)
        return jaxkern.ssd(x, dt, A, one, one, implementation=implementation, **limits)[..., 0]

    inf = float("inf")
    for limits, low, high in (
        ({"dt_limit": (0.125, 2.0)}, 0.125, 2.0),
        ({}, 0.0, inf),
        ({"dt_limit": (-inf, 1)}, -inf, 1.0),
    ):
        out, vjp = jax.vjp(functools.partial(go, **limits), raw)
        (ddt,) = vjp(jnp.ones_like(out))
        np.testing.assert_array_equal(out, np.clip(raw, low, high))
        np.testing.assert_array_equal(ddt, (raw >= low) & (raw <= high))


@pytest.mark.newest
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_ssd_memory(implementation):
    """Value and gradient hold far less than a (B, L, H, P, N) array, whatever states are saved."""
    size = batch, length, heads, channels, states = 1, 2048, 4, 32, 64

    def used(every):
        go = functools.partial(scan, implementation=implementation, checkpoint_every=every)
        loss = lambda *a: jnp.sum(go(*a) ** 2)
        arrays = jax.eval_shape(lambda: inputs_and_state(*size))
        compiled = jax.jit(jax.grad(loss, range(9))).lower(*arrays).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return temporary / (batch * length * heads * channels * states * 4)

    assert used(128) < 0.2
    assert used(None) < 0.2
