"""selective_scan: what the recurrence promises of its states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.selective_scan import backward, forward, tiles
from tests import check
from tests.selective_scan import (
    INF,
    NAMES,
    ONE_PROGRAM,
    check_case,
    inputs,
    inputs_and_state,
    plain,
    scan,
)

# What the recurrence promises


@check.BOTH
def test_selective_scan_bad_channel_stays_alone(implementation):
    """A NaN in one channel of one row leaves every other channel, row and earlier step alone."""
    arrays = dict(zip(NAMES[:-1], inputs(*ONE_PROGRAM), strict=True))
    dout = jnp.ones_like(arrays["x"])
    run = check.program(scan, implementation=implementation, return_final_state=False)
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
    want = check.value_and_grads(stepped, arrays, cotangents)
    check.assert_close(check.value_and_grads(call, arrays, cotangents), want, 1e-6)
    half = tuple(v.astype(jnp.bfloat16) for v in arrays)
    outs, state = jax.jit(stepped)(*half)
    assert outs.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    check.assert_close((outs, state), jax.jit(call)(*half), 4e-3)


@check.sizes(gpu=[(2, 200, 130, 16)])
def test_selective_scan_of_any_checkpoint_every(size, implementation):
    """The states that are saved make no difference.

    For plain JAX this is test_..._in_float64. In the interpreter test_segments_of_one_state saves
    all, test_..._accuracy_of_everything some, and test_..._two_half_precisions none.
    """
    arrays = inputs_and_state(*size)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    call = functools.partial(scan, return_final_state=True)
    want = check.value_and_grads(call, arrays, cotangents, implementation="xla")
    for every in (1, 8, 16, 64, None):
        run = check.program(call, implementation=implementation, checkpoint_every=every)
        check.assert_close(run(arrays, cotangents), want, 2e-6)


@pytest.mark.newest
@pytest.mark.gpu
def test_selective_scan_in_uneven_parts(monkeypatch):
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
    check_case(inputs_and_state(2, 40, 128, states), "mosaic", checkpoint_every=16)


@pytest.mark.newest
@pytest.mark.gpu
def test_selective_scan_in_subparts(monkeypatch):
    """Parts whose carries are found in subparts, the last of which is short."""
    cut = lambda columns, units, _: tiles.Grid.cut(columns, units, 0, 2, 3)
    monkeypatch.setattr(forward, "forward_grid", cut)
    monkeypatch.setattr(backward, "backward_grid", cut)
    grid = cut(1, 11, None)
    assert (grid.length, grid.parts, grid.of_carries().count) == (6, 2, 3)
    # The backward's last subpart of two chunks has one.
    assert grid.of_carries().parts == 6
    assert 11 % grid.of_carries().length == 1
    check_case(inputs_and_state(1, 88, 34, 9 if check.ON_GPU else 3), "mosaic")


@check.sizes(gpu=[(2, 70, 270, 16)])
def test_selective_scan_groups(size, implementation):
    """Groups with the same B and C are one group, whose gradients are the sums of theirs."""
    x, dt, A, B, C, *rest = inputs_and_state(*size)
    cotangents = jnp.sin(x), jnp.cos(rest[-1])
    call = functools.partial(scan, return_final_state=True)
    one = check.program(call, implementation="xla")
    two = check.program(call, implementation=implementation)
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
        out, (grads,) = check.value_and_grads(named, (given,), dout, implementation=implementation)

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


@check.BOTH
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
        run = check.program(named, implementation=implementation)
        out, (grads,) = run((arrays,), first)
    out, slope = out[:, 0], grads["dt"][:, 0]
    wide = raw.astype(np.float64)
    error = np.abs(out[0] / np.logaddexp(wide, 0) - 1)
    assert np.all(error <= 5e-7 + 2e-8 * np.abs(wide)), error
    np.testing.assert_allclose(slope[0], 1 / (1 + np.exp(-wide)), rtol=2e-6)


@check.BOTH
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


@check.BOTH
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


@check.BOTH
def test_selective_scan_dt_limit(implementation):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0, np.nan])[None, None]
    A, one = jnp.zeros((raw.size, 1)), jnp.ones((1, 1, 1))

    def run(dt, **limits):
        return jaxkern.selective_scan(
            jnp.ones_like(dt), dt, A, one, one, implementation=implementation, **limits
        )

    cases = [({"dt_limit": (0.125, 2.0)}, 0.125, 2.0)]
    if not check.interpreted(implementation):  # test_..._packed has 0 and no limit
        cases += [({}, 0.0, INF), ({"dt_limit": (-INF, 1)}, -INF, 1.0)]
    for limits, low, high in cases:
        with check.running(implementation):
            out, vjp = jax.vjp(functools.partial(run, **limits), raw)
            (ddt,) = vjp(jnp.ones_like(out))
        np.testing.assert_array_equal(out, np.clip(raw, low, high))  # NaN where raw is
        np.testing.assert_array_equal(ddt[..., :-1], ((raw >= low) & (raw <= high))[..., :-1])


@check.sizes((1, 12, 2, 2))
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
