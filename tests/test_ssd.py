"""ssd: its accuracy, where NaN goes, absent arguments, its kernels, the matrix."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import target
from jaxkern.ops.scan_options import by_group
from jaxkern.ops.ssd import backward, forward, inputs, reference, tiles
from jaxkern.ops.ssd.reference import SsdOptions
from tests import check
from tests.check import exhaustive
from tests.ssd import (
    ALONG,
    NAMES,
    below_zero,
    both_results,
    check_case,
    check_other_segments,
    check_others,
    check_reference,
    cotangents,
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

EVERY = pytest.mark.parametrize("implementation", [None, exhaustive("xla")])
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
        *(pytest.param(n, None) if n in BY_DEFAULT else exhaustive(n, None) for n in CASES),
        *(exhaustive(n, "xla") for n in BY_JAX),
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
        exhaustive(256, (-0.02, 0.1), None),
        exhaustive(None, (0.05, 0.6), None),
        exhaustive(128, (0.05, 0.6), "xla"),
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
    """The backward keeps ⌈L/k⌉ states besides the arguments, and y if it is gated."""
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


@pytest.mark.exhaustive
@EVERY
def test_ssd_nan_stays_in_its_segment(implementation):
    """In the same chunk, behind it and before it, in the gradients too, and in a row's first."""
    run = results_by_name(inputs_and_state(*SIZE, groups=2), implementation=implementation)
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1).repeat(2, 0)
    run = functools.partial(run, segment_ids=ids)
    check_other_segments(run, ALONG, implementation, 25, slice(20, 40))
    want, same = run(), np.testing.assert_array_equal
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
    [("xla", 1), *(exhaustive(i, 2) for i in (None, "xla"))],
)
def test_ssd_of_growing_states_in_short_segments(implementation, order):
    """The decay over a device's part is e^128, and that over a segment of four tokens e^4."""
    length = 256
    ones, ids = jnp.ones((1, length, 1, 1)), jnp.arange(length)[None] // 4
    split = NamedSharding(check.mesh_of(AxisType.Explicit, 2), P(None, "x"))

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

OF_RULES = ("vmap", "vmap(vmap)", "scan", "shard_map unchecked")
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


# The kernels

HALF = functools.partial(inputs_and_state, dtype="bfloat16", weight_dtype="float32")
ONE_STEP = (1, 70, 2, 64, 16)
"""More than a step of 64 tokens, states that are padded."""

# Each pass by itself: both take the interpreter more than the CPU seconds of a default test.


@pytest.fixture(scope="module")
def passes():
    """Arguments of both passes, and what the oracle makes of them: of two chunks, without a gate.

    The segments of one of the two rows end within the first chunk. `between` is the state after
    that, `dbetween` its gradient.
    """
    x, dt, A, B, C, D, _, _, state = HALF(2, 130, 2, 16, 16)
    dt, dout = jax.nn.softplus(dt.astype(jnp.float32)), jnp.sin(3 * x)
    A = A / 64  # so that a state outlasts a chunk
    ids = np.stack([np.zeros(130, int), np.repeat([0, 1, 2], [50, 40, 40])])
    wide = [np.asarray(v, np.float64) for v in (x, dt, A, B, C, D, dout, state)]

    def run(span, state):
        x, dt, A, B, C, D, dout, _ = (v[:, span] if v.ndim > 2 else v for v in wide)
        given = x, dt, A, B, C, D, None, None, state, dout, None
        return oracle(*given, dt_softplus=False, segment_ids=ids[:, span])

    whole = run(slice(None), wide[-1])
    (_, between), _ = run(slice(0, tiles.CHUNK), wide[-1])
    _, (*_, dbetween) = run(slice(tiles.CHUNK, None), between)
    x, dt, A, B, C, D, z, _, h = by_group((x, dt, A, B, C, D, None, None, state), 2)
    args = x, dt, dt * A, B, C, D, z, h, jnp.asarray(ids), None
    return types.SimpleNamespace(
        args=args, dout=dout[:, :, None], want=whole, between=between, dbetween=dbetween
    )


OPTIONS = SsdOptions(True, tiles.CHUNK, "interpret", isolate_nan=False, save=True)


def interpreted(f, *args):
    """``f(*args)``, in one part: else the sequence is cut to fill the GPU."""
    with target.interpreter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "num_sms", lambda: 1)
        return jax.jit(f)(*args)


def test_ssd_forward_kernel(passes):
    """Outputs, the final state, and the states that are saved."""
    run = functools.partial(forward.launch_fwd, OPTIONS)
    out, final, states, _ = interpreted(run, *passes.args)
    (want, want_final), _ = passes.want
    check.assert_close(out[:, :, 0], want, 2.0**-8)
    check.assert_close((final[:, 0], states[:, 1, 0]), (want_final, passes.between), 2.0**-8)
    np.testing.assert_array_equal(states[:, 0], passes.args[7].astype(jnp.bfloat16))


def check_backward(passes):
    states = np.stack([passes.args[7][:, 0], passes.between], axis=1)[:, :, None]
    states = states.astype(jnp.bfloat16)
    run = functools.partial(backward.launch_bwd, OPTIONS)
    grads = interpreted(run, *passes.args, states, None, passes.dout, None)
    grads = [np.asarray(v, np.float64) for v in grads if v is not None]
    dx, ds, da, dB, dC, dD, dstate = grads
    dt, a = (np.asarray(v, np.float64) for v in passes.args[1:3])
    ddt, dA = ds + da * a / dt, np.sum(da * dt, (0, 1))
    *want, skipped = passes.want[1][:6]
    check.assert_close((dx[:, :, 0], ddt[:, :, 0], dA[0], dB, dC), want, 2.0**-8)
    check.assert_close(dD[0], skipped, 2e-6)
    return dstate[:, 0], passes.want[1][-1]


def test_ssd_backward_kernel(passes, monkeypatch):
    """Gradients, of states and their gradients between the chunks that the oracle gives.

    After the last chunk none are stored: they count as zeros. The sums of log-decays, which the
    forward tests, are not its own.
    """

    def chunk_sums(*arrays):
        whole = [jnp.pad(v, [(0, 0), (0, -v.shape[1] % tiles.CHUNK), (0, 0)]) for v in arrays]
        a, dt = (jnp.moveaxis(v.reshape(2, -1, tiles.CHUNK, 8), 3, 1) for v in whole)
        return jnp.stack([a.cumsum(-1) / np.log(2), dt], axis=3)

    def launch_carry(scan, reverse, tokens, weights, steps, starts):
        assert (reverse, starts) == (True, None)
        widths = [(0, scan.channels - 16), (0, scan.states - 16)]
        after = jnp.pad(passes.dbetween, [(0, 0)] * 2 + widths)[:, None]
        return after.astype(tokens.dtype), after

    monkeypatch.setattr(inputs, "chunk_sums", chunk_sums)
    monkeypatch.setattr(backward, "launch_carry", launch_carry)
    check_backward(passes)


@pytest.mark.exhaustive
def test_ssd_backward_kernels(passes):
    """With the carry, whose last state is the gradient of the initial one."""
    check.assert_close(*check_backward(passes), 2.0**-8)


INTERPRETED = {
    "packed": ((1, 130, 2, 64, 16), 1, {"segment_ids": packed_ids(1, 130, 30)}),
    "channels and states between": ((1, 70, 2, 80, 144), 2, {"checkpoint_every": None}),
}
COMPILED = {
    "few states": (ONE_STEP, 1, {}),
    "short segments": (ONE_STEP, 1, {"segment_ids": packed_ids(1, 70)}),
    "several chunks": ((1, 200, 2, 128, 80), 2, {"checkpoint_every": None}),
    "one token": ((4, 1, 3, 64, 20), 1, {}),
    "whole chunks": ((2, 512, 6, 64, 128), 2, {"checkpoint_every": 256}),
    "more heads than a block": ((3, 300, 7, 64, 64), 1, {}),
    "more heads than whole blocks": ((2, 300, 12, 64, 64), 1, {}),
    "wide heads": ((1, 1000, 4, 256, 128), 4, {"checkpoint_every": 128}),
    "narrow heads": ((2, 1000, 4, 16, 128), 2, {"checkpoint_every": 256}),
    "many states": ((2, 1000, 4, 64, 256), 1, {"segment_ids": packed_ids(2, 1000)}),
    "many states in parts": ((1, 5000, 2, 128, 256), 1, {"checkpoint_every": None}),
    "parts": ((1, 5000, 2, 64, 128), 1, {"dt_limit": (0.05, 0.3)}),
    "parts of several chunks": ((1, 1000, 64, 64, 64), 1, {"checkpoint_every": None}),
    "no parts": ((8, 1030, 32, 64, 128), 1, {"checkpoint_every": None}),
    "packed chunks": ((2, 1000, 4, 64, 128), 2, {"segment_ids": packed_ids(2, 1000)}),
}


@pytest.mark.gpu
@check.PRODUCTS
@pytest.mark.parametrize(
    ("size", "groups", "options"),
    [exhaustive(*case, id=name) for name, case in INTERPRETED.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.compiled) for name, case in COMPILED.items()],
)
def test_ssd_kernels_accuracy(size, groups, options, products):
    """With everything: a gate, D of heads or, of several groups, of channels, both states.

    With rates at which some heads remember their first token to the end.
    """
    arrays = HALF(*size, groups=groups, of_channels=groups > 1)
    with products():
        check_case(with_rates(min(1, 16 / size[1]), arrays), "mosaic", **options)


def test_ssd_kernels_without_wgmma():
    """Two parts of the sequence, the second with less than a step."""
    with check.without_wgmma():
        check_case(HALF(1, 130, 2, 16, 16), "mosaic")


@pytest.mark.compiled
@check.PRODUCTS
def test_ssd_kernels_forget_and_grow(products):
    """Decays of exactly 0 amid others, and a rate above 0."""
    x, dt, A, *rest = HALF(2, 300, 4, 64, 64)
    A = A.at[0].set(-1e6).at[1].set(-1e30).at[2].set(0.01)
    dt = dt.at[0, 4].set(80.0)
    with products():
        check_case((x, dt, A, *rest), "mosaic")


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_ssd_kernels_keep_nan_where_it_is():
    """A NaN leaves other heads the bits they had; with `isolate_nan` other segments, too.

    In the same chunk, and in the states that the segments behind it and before it begin from.
    Finite arguments give the same bits with `isolate_nan` and without.
    """
    arrays = HALF(*ONE_STEP)
    ids = jnp.repeat(jnp.array([[3, 1, 2]]), jnp.array([20, 20, 30]), axis=1)
    run = functools.partial(results_by_name, arrays, implementation="mosaic")
    isolated, free = (
        functools.partial(run(isolate_nan=flag), segment_ids=ids) for flag in (True, False)
    )
    same = np.testing.assert_array_equal
    close = functools.partial(check.assert_close, tolerance=2.0**-6)
    with check.running("mosaic"):
        want = isolated()
        jax.tree.map(same, free(), want)
        got = free("x", 0, 4, 1)
        assert np.isnan(got["out"][0, 4, 1]).all()
        same(got["final"][:, 0], want["final"][:, 0])
        for name in ("out", "x", "dt", "z"):
            same(got[name][:, :, 0], want[name][:, :, 0])
        for name in ("A", "D", "dt_bias"):
            same(got[name][0], want[name][0])
        for name in ("x", "dt", "B", "C", "out") if check.ON_GPU else ("x", "out"):
            got = isolated(name, 0, 25)
            assert name == "out" or np.isnan(got["out"][0, 25].astype(np.float32)).all()
            for n in ("final", "initial_state"):
                close(got[n], want[n])
            for n in ("out", *ALONG):
                close(*(np.delete(v[n][0], slice(20, 40), 0) for v in (got, want)))


@pytest.mark.parametrize(
    ("chunks", "part", "sms", "reverse"),
    [
        (6, 4, 8, True),
        exhaustive(5, 2, 1, False),
        exhaustive(7, 4, 4, False),
        exhaustive(7, 4, 4, True),
    ],
)
def test_parts_begin_where_the_sequence_is(chunks, part, sms, reverse, monkeypatch):
    """`part_starts` gives the recurrence's states, from one finer part or several, one short."""
    keys = jax.random.split(jax.random.key(0), 4)
    bf16 = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    tokens = bf16(keys[0], (1, chunks * tiles.CHUNK, 2, 64))
    weights = bf16(keys[1], (1, chunks * tiles.CHUNK, 1, 64))
    decays = -jax.random.uniform(keys[2], (1, 2, chunks, tiles.CHUNK)).cumsum(-1) / tiles.CHUNK
    steps = jnp.stack([decays, jnp.ones_like(decays)], axis=3)
    initial = jax.random.normal(keys[3], (1, 2, 64, 64))

    own = decays if reverse else decays[..., -1:] - decays
    own = own.reshape(1, 2, chunks * tiles.CHUNK).swapaxes(1, 2)[..., None]
    own = (jnp.exp2(own) * tokens).astype(jnp.bfloat16)  # as the tensor cores take them
    own = own.astype(jnp.float32).reshape(1, chunks, tiles.CHUNK, 2, 64)
    own = jnp.einsum("bcthp,bctn->cbhpn", own, weights.reshape(1, chunks, tiles.CHUNK, 64))
    state, want = initial, {}
    for n in range(chunks)[:: -1 if reverse else 1]:
        ends = n in (chunks - 1, n // part * part + part - 1)
        if ends if reverse else n % part == 0:
            want[n // part] = state
        state = jnp.exp2(decays[:, :, n, -1])[..., None, None] * state + own[n]

    monkeypatch.setattr(tiles, "num_sms", lambda: sms)
    sizes = tiles.SsdTile(1, 2, 1, 64, 64, chunks, warpgroups=2, part_chunks=part)
    with target.interpreter():
        starts = forward.part_starts(sizes, reverse, tokens, weights, steps, initial)
    want = jnp.stack([want[n] for n in range(sizes.parts)], axis=1)
    np.testing.assert_allclose(starts, want, atol=2**-12 * float(jnp.abs(want).max()))


@pytest.mark.compiled
def test_ssd_kernels_end_in_zeros():
    """Gradients have the bits without a final state that they have with zeros for its gradient."""
    arrays = HALF(8, 1030, 32, 64, 128)
    dout, dfinal = cotangents(arrays)
    run = lambda final: check.program(scan, implementation="mosaic", return_final_state=final)
    out, grads = run(False)(arrays, dout)
    (want_out, _), want = run(True)(arrays, (dout, jnp.zeros_like(dfinal)))
    jax.tree.map(np.testing.assert_array_equal, (out, grads), (want_out, want))


@pytest.mark.compiled
@pytest.mark.large
def test_ssd_kernels_beyond_int32():
    """More than 2³¹ elements of x, and of its states: the last rows are right."""
    batch = (1 << 12) + 3
    few = HALF(2, 128, 64, 64, 128)
    tile = lambda v: jnp.tile(v, ((batch + 1) // 2, *(1,) * (v.ndim - 1)))[:batch]
    x, dt, A, B, C, *_ = few
    arrays = tile(x), tile(dt), A / 8, tile(B), tile(C)
    last = tuple(v[-2:] if v.ndim > 1 else v for v in arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, *others):
        ssd = functools.partial(jaxkern.ssd, dt_softplus=True, implementation=implementation)
        out, vjp = jax.vjp(lambda x: ssd(x, *others), x)
        return out, vjp(out)[0]

    got = [v[-2:] for v in run("mosaic", *arrays)]
    check.assert_close(got, run("mosaic", *last), 2.0**-9)
    check.assert_close(got, run("xla", *last), 2.0**-8)


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        (inputs_and_state(*ONE_STEP), {}, "x is float32, and the kernels take bfloat16"),
        (
            HALF(*ONE_STEP[:3], 15, 16),
            {},
            "x has 15 channels a head, and the kernels take 16 or more",
        ),
        (HALF(*ONE_STEP[:4], 257), {}, "B has 257 states, and the kernels take at most 256"),
        (
            (*HALF(*ONE_STEP)[:-1], None),
            {"segment_ids": packed_ids(1, 70), "num_segments": 3},
            "it has num_segments, and the kernels keep one state of a row",
        ),
    ],
)
def test_ssd_kernels_refuse(arrays, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        scan(*arrays, implementation="mosaic", **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("isolate_nan", [True, False])
def test_ssd_kernels_wait_to_isolate_nan(isolate_nan):
    """The host waits for the condition of a loop, once a pass."""
    options = {"segment_ids": packed_ids(1, 70), "isolate_nan": isolate_nan}
    loss = lambda *arrays: jnp.sum(scan(*arrays, implementation="mosaic", **options))
    text = check.lowered(jax.value_and_grad(loss), *HALF(*ONE_STEP))
    assert "mosaic_gpu" in text
    assert ("stablehlo.while" in text) == isolate_nan


def test_ssd_kernels_run_where_they_take_the_call():
    """Plain JAX computes the calls that they do not take."""
    for make, taken in (HALF, True), (inputs_and_state, False):
        text = check.lowered(functools.partial(scan, implementation=None), *make(*ONE_STEP))
        assert bool(check.kernel_calls(text)) == taken


def scan_of_both_results(*arrays, implementation="xla"):
    """In bf16, with results and gradients in fp32, so small that no sine of them turns round."""
    x, dt, A, B, C, D, dt_bias, state = arrays
    x, B, C = (v.astype(jnp.bfloat16) for v in (x, B, C))
    out, final = scan(
        *(x, dt, A, B, C, D, None, dt_bias, state),
        implementation=implementation,
        return_final_state=True,
    )
    return (out.astype(jnp.float32) + jnp.sum(final, axis=-1)[:, None]) / 32


def without_gate(key):
    arrays = inputs_and_state(4, 3, 4, 64, 16)
    return arrays[:6] + arrays[7:]


test_ssd_kernels_transformations = check.transformations(
    check.Op(
        name="ssd, kernels",
        call=scan_of_both_results,
        reference=scan_of_both_results,
        arrays=without_gate,
        kernels=("ssd_fwd", "ssd_bwd"),
        axes="blhp blh h blgn blgn h h bhpn -> blhp",
        slow=[("kernels lowered", "mosaic")],
        features="h",
        channels="h",
        all_reduces=1,
        vmaps=[(0,) + (None,) * 7, (None, None, 0, None, 1, 0, None, 0)],
        tolerance=2.0**-6,  # of what kernels round to 16 bits, where terms of A's gradient cancel
        cells=[
            (name, check.ALONE.get(name, "mosaic"))
            for name in check.TRANSFORMATIONS
            # Those with gradients show three of them, and by default plain JAX is exported.
            if name not in ("value", "vmap", "vmap(vmap)", "export")
            # The interpreter takes 10 s for a gradient, and other tests show what this is.
            and (check.ON_GPU or name not in ("grad", "grad(grad)", "vmap(grad)"))
        ],
    )
)
