"""jaxkern.fused_adamw, fused_adam, fused_sgd and apply, beside Optax and inside of it."""

import contextlib
import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern
from jaxkern.core import kernel_call
from jaxkern.precision import DynamicLossScale, StaticLossScale
from tests.check import combinations

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
NAMES = ("adam", "adamw", "sgd")
OPTIONS = {"adam": {}, "adamw": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9}}


def fused(name):
    return getattr(jaxkern, f"fused_{name}")


def made(name, **options):
    return fused(name)(**({"learning_rate": 0.1} | OPTIONS[name] | options))


def tree_of(seed, dtype=F32, steps=()):
    """Arrays of each shape; with `steps` behind a first axis of those."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((*steps, *shape)), dtype)
    return {"w": draw(6, 4), "b": [draw(4), draw()], "none": None}


@functools.partial(jax.jit, static_argnums=0)
def run(step, start, grads):
    """The result of steps ``step(g, *state)`` from `start`, one for each of `grads`."""
    return jax.lax.scan(lambda after, g: (step(g, *after), None), start, grads)[0]


def stepping(tx, params, grads):
    """Parameters and state after a step of `tx` for each of the gradients."""
    step = lambda grads, params, state: jaxkern.apply(tx, grads, state, params)
    return run(step, (params, tx.init(params)), grads)


def two_passes(tx, grads, state, params, **known):
    updates, state = tx.update(grads, state, params, **known)
    return optax.apply_updates(params, updates), state


WAYS = (jaxkern.apply, two_passes)


def assert_close(got, want, rtol=3e-6, atol=1e-7):
    if jax.config.jax_enable_x64:
        rtol, atol = 1e-10, 1e-12
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(lambda a, b: close(np.float64(a), np.float64(b)), got, want)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def averages(state):
    """Names of the averages that a state has."""
    return [name for name in ("mu", "nu", "trace") if getattr(state, name, None) is not None]


# A step is that of Optax

MASK = {"w": True, "b": False, "none": None}


def schedule(count):
    """A linear schedule in the widest floats: from an int32 count JAX makes float32, and whether a
    CPU's FMA rounds it alike differs from program to program."""
    return optax.linear_schedule(0.1, 0.01, 5)(jnp.asarray(count, float))


NUMBERS = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.97, "eps": 1e-2}
DECAY, AHEAD, MASKED = {"weight_decay": 0.1}, {"nesterov": True}, {"mask": MASK}
SCHEDULE, RATE = {"learning_rate": schedule}, {"learning_rate": 0.05}
CASES = {  # name, numbers and options of an optimizer
    "adamw": ("adamw", NUMBERS | DECAY | {"clip_norm": 2.0}, MASKED),
    "adamw, schedules": ("adamw", SCHEDULE | {"weight_decay": schedule}, {}),
    "adamw, eps_root": ("adamw", NUMBERS | DECAY | {"eps_root": 0.04, "clip_norm": 0.5}, MASKED),
    "adamw, nesterov": ("adamw", SCHEDULE, AHEAD),
    "adam, nesterov, eps_root": ("adam", NUMBERS | {"eps_root": 0.04, "clip_norm": 2.0}, AHEAD),
    "adam, b1=0": ("adam", SCHEDULE | {"b1": 0.0}, {}),
    "sgd": ("sgd", RATE | {"clip_norm": 2.0}, {}),
    "sgd, schedule": ("sgd", SCHEDULE, {}),
    "momentum, loose clip": ("sgd", RATE | {"momentum": 0.9, "clip_norm": 1e3}, {}),
    "nesterov": ("sgd", RATE | {"momentum": 0.9, "clip_norm": 2.0}, AHEAD),
}


def of_optax(name, clip_norm=None, **options):
    tx = getattr(optax, name)(**options)
    return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)


PAIRS = {
    case: (fused(name)(**numbers, **options), of_optax(name, **numbers, **options))
    for case, (name, numbers, options) in CASES.items()
}


def half(count):
    return 0.5 * schedule(count)


NORM, DECAY_OF, UP = optax.clip_by_global_norm, optax.add_decayed_weights, optax.scale(-2.0)
LABELLED = {"w": True, "b": [False, True], "none": None}


def wrapped(adamw, sgd):
    """Ways that Optax wraps a transformation."""
    make = lambda rate=0.05: adamw(rate, weight_decay=0.1)
    labels = {"w": "a", "b": ["b", "b"], "none": None}
    return {
        "chain": optax.chain(optax.clip(0.5), make(), optax.scale(0.5)),
        "chain, norms": optax.chain(NORM(2.0), optax.trace(0.9), NORM(9.0), NORM(3.0), make()),
        "chain, scales": optax.chain(make(schedule), optax.scale_by_schedule(half), UP),
        "chain, names": optax.named_chain(("a", NORM(2.0)), ("b", optax.chain(make(), UP))),
        "chain, coupled": optax.chain(DECAY_OF(0.1, LABELLED), make()),
        "chain, sgd": optax.chain(NORM(2.0), DECAY_OF(schedule, LABELLED), sgd(0.05), UP),
        "chain, sgd, function": optax.chain(
            DECAY_OF(0.1, lambda p: LABELLED), NORM(2.0), sgd(0.05)
        ),
        "chain, momentum": optax.chain(DECAY_OF(0.1), sgd(schedule, 0.9)),
        "clip": optax.chain(NORM(2.0), make(), optax.clip(0.02), UP),
        "add_decayed_weights": optax.chain(make(), DECAY_OF(0.1, LABELLED)),
        "masked": optax.masked(make(), LABELLED),
        "partition": optax.multi_transform({"a": make(), "b": make(0.01)}, labels),
        "MultiSteps": optax.MultiSteps(make(), 2),
        "apply_if_finite": optax.apply_if_finite(make(), 2),
        "flatten": optax.flatten(make()),
        "inject_hyperparams": optax.inject_hyperparams(adamw)(schedule, b2=0.99, weight_decay=0.1),
        "inject_hyperparams, sgd": optax.inject_hyperparams(sgd)(schedule, 0.9),
    }


OURS, THEIRS = wrapped(jaxkern.fused_adamw, jaxkern.fused_sgd), wrapped(optax.adamw, optax.sgd)
PAIRS |= {name: (OURS[name], THEIRS[name]) for name in OURS}

# In Optax 0.2.6 a schedule of the decay stands still.
OLD = tuple(int(part) for part in optax.__version__.split(".")[:3]) < (0, 2, 7)
MARKS = {"adamw, schedules": pytest.mark.skipif(OLD, reason="of another Optax")}
RARE = ("add_decayed_weights", "masked", "flatten", "inject_hyperparams, sgd")
MARKS |= dict.fromkeys(RARE, pytest.mark.exhaustive)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in PAIRS])
def test_a_step_is_that_of_optax(name):
    """By `apply`, and by `update` as any transformation; in float64 to its rounding.

    Arguments of other optimizers are let pass, and states keep their types from step to step. A
    chain takes one pass where that can do all behind it; else it is told once what does not.
    """
    ours, theirs = PAIRS[name]
    kernel_call.warn_once.cache_clear()
    two = name in THEIRS and not name.startswith("chain")
    words = rf"takes two passes: {name.split(',')[0]} .*Instead write "
    told = pytest.warns(UserWarning, match=words) if two else contextlib.nullcontext()
    apply = functools.partial(jaxkern.apply, value=1.0)
    ways = [(theirs, two_passes), (ours, apply), (ours, two_passes)]
    with jax.enable_x64(True):
        params, grads = tree_of(0, float), tree_of(1, float, (7,))

        def all_ways(grads, *pairs):
            return tuple(f(tx, grads, s, p) for (tx, f), (p, s) in zip(ways, pairs, strict=True))

        start = tuple((params, tx.init(params)) for tx, _ in ways)
        with told:
            (want, want_state), *results = run(all_ways, start, grads)
        jaxkern.apply(ours, params, ours.init(params), params, value=1.0)
        assert_close(results[0][1], results[1][1])
        for got, state in results:
            assert_close(got, want)
            if name not in THEIRS:
                assert state.count == 7
                for field in averages(state):
                    assert_close(getattr(state, field), optax.tree.get(want_state, field))


def test_trajectory_of_1000_steps_is_that_of_optax():
    """In float64 to its rounding, in float32 no further from it than Optax's."""
    rate, target = optax.cosine_decay_schedule(0.05, 1000), np.linspace(-2.0, 2.0, 24)
    ours = jaxkern.fused_adamw(rate, weight_decay=0.01), jaxkern.apply
    theirs = optax.adamw(rate, weight_decay=0.01), two_passes

    def trajectory(tx, step, dtype):
        def body(carry, i):
            params, state = carry
            noise = jnp.sin(7.0 * i + jnp.arange(24.0)).astype(dtype)
            grads = (params - target.astype(dtype)) ** 3 + 0.1 * noise
            params, state = step(tx, grads, state, params)
            return (params, state), params

        params, steps = jnp.zeros(24, dtype), jnp.arange(1000, dtype=dtype)
        return np.float64(jax.lax.scan(body, (params, tx.init(params)), steps)[1])

    with jax.enable_x64(True):
        oracle = trajectory(*theirs, jnp.float64)
        np.testing.assert_allclose(trajectory(*ours, jnp.float64), oracle, rtol=1e-9, atol=1e-9)
    error, optax_error = (np.abs(trajectory(*way, F32) - oracle) for way in (ours, theirs))
    assert optax_error.max() > 1e-7
    assert error.max() <= 2 * optax_error.max()
    assert error.mean() <= 2 * optax_error.mean()


def test_a_clip_of_nothing_to_nothing_is_nan_as_in_optax():
    zeros = jnp.zeros(4)
    for adamw in (jaxkern.fused_adamw, optax.adamw):
        tx = optax.chain(NORM(0.0), adamw(0.1))
        assert np.isnan(jaxkern.apply(tx, zeros, tx.init(zeros), zeros)[0]).all()


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_optax(name):
    """By position and by name, with the same defaults; those beyond Optax's are by name alone."""
    ours = inspect.signature(fused(name)).parameters
    theirs = inspect.signature(getattr(optax, name)).parameters
    by_position = lambda f: [p for p in f.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    told = lambda parameters: [(p.name, p.kind, p.default) for p in parameters]
    assert told(by_position(ours)) == told(by_position(theirs))
    assert told(ours[name] for name in theirs) == told(theirs.values())


# As any transformation


def test_it_is_a_pytree():
    """It can be an argument of a function that Equinox jits."""
    tx = jaxkern.fused_sgd(0.1, implementation="mosaic")
    assert jax.tree.map(lambda leaf: leaf, tx) == tx


def test_init_takes_shapes_as_optax_does():
    tree = {"w": jnp.ones((16, 256), BF16), "b": jnp.ones(3), "none": None}
    shapes = jax.eval_shape(lambda: tree)
    types = lambda state: jax.tree.map(lambda a: (a.shape, a.dtype), state)
    for name in NAMES:
        assert_same(made(name).init(shapes), made(name).init(tree))
    tx = made("adamw", master_dtype=F32, mu_dtype="int8", nu_dtype="uint8", skip_nonfinite=True)
    assert types(jax.eval_shape(tx.init, shapes)) == types(tx.init(tree))
    with pytest.raises(TypeError, match=r"params\['b'\] must be .*jax.eval_shape"):
        tx.init(shapes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"master_dtype": F32, "skip_nonfinite": True}])
def test_states_can_be_mapped_over_as_parameters(name, options):
    """By ``optax.tree.map_params``, which inits with a placeholder."""
    tx = made(name, **options)
    params = {"w": jnp.ones((2, 3), BF16 if options else F32), "b": jnp.ones(3)}
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda a: a + 1, state)
    assert mapped.count == 0
    for field in averages(state):
        assert_close(getattr(mapped, field), jax.tree.map(jnp.ones_like, getattr(state, field)))


DTYPES = {"bf16": (BF16, BF16), "f16": (F16, F16), "mixed": (F32, BF16), "f32": (F32, F32)}
OF_STATE = {"adam": "mu_dtype", "adamw": "mu_dtype", "sgd": "accumulator_dtype"}


@combinations(
    "dtypes case kept",
    DTYPES,
    {name: CASES[name] for name in CASES if not (OLD and name in MARKS)},
    [None, BF16],
    few=6,
)
def test_updates_are_those_of_optax(dtypes, case, kept):
    """In any dtypes of gradients and parameters: not rounded to the parameters' grid, and no more
    than twice as far from those in float64 as Optax's are."""
    name, numbers, options = case
    kept = {OF_STATE[name]: kept} if kept and ("momentum" in numbers or name != "sgd") else {}
    ours = fused(name)(**numbers, **options, **kept)
    theirs, exactly = (of_optax(name, **numbers, **options, **kept) for kept in (kept, {}))
    params, grads = tree_of(0, dtypes[1]), tree_of(1, dtypes[0], (5,))

    def updates(tx, params, grads):
        def body(state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.tree.cast_like(state, start), updates

        start = tx.init(params)
        return jax.tree.leaves(jax.lax.scan(body, start, grads)[1])

    got, other = (jax.jit(functools.partial(updates, tx))(params, grads) for tx in (ours, theirs))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, grads))
        want = jax.jit(functools.partial(updates, exactly))(*wide)
    assert {a.dtype for a in got} == {jnp.promote_types(*dtypes)}
    off = lambda updates: np.concatenate(
        [abs(np.float64(a) - np.float64(b)).ravel() for a, b in zip(updates, want, strict=True)]
    )
    assert off(got).max() <= 2 * off(other).max()
    assert off(got).mean() <= 2 * off(other).mean()


def test_updates_lead_to_what_parameters_are_rounded_to():
    """Bit for bit, under wrappers that want updates of the gradients' dtype too."""
    params, grads = tree_of(0, BF16), tree_of(1, BF16)
    options = {"master_dtype": F32}, {"stochastic_rounding": True}
    several = [(tx := jaxkern.fused_adamw(2.0**-8, **o), tx.init(params)) for o in options]

    def both(tx, state, grads, params):
        finite = optax.apply_if_finite(tx, 1)
        jax.eval_shape(functools.partial(two_passes, finite), grads, finite.init(params), params)
        by_update = tx.update(grads, state, params, value=1.0)
        return by_update, jaxkern.apply(tx, grads, state, params)

    all_of_them = jax.jit(lambda *args: [both(tx, s, *args) for tx, s in several])
    for (updates, by_update), (applied, by_apply) in all_of_them(grads, params):
        assert {m.dtype for m in jax.tree.leaves(by_apply.mu)} == {jnp.dtype(F32)}
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(BF16)}
        assert_same(optax.apply_updates(params, updates), applied)
        assert_close(by_update, by_apply)


def test_numbers_may_be_of_any_kind():
    """Python's, NumPy's and JAX's, traced or whole, as parameters too, as in Optax; an
    infinite norm clips nothing."""
    params = {"w": jnp.ones(3)}
    step_of = lambda tx: jaxkern.apply(tx, params, tx.init(params), params)[0]
    step = jax.jit(step_of, static_argnums=0)
    want = step(made("adamw"))
    for kind in (np.float64, np.float32, jnp.float32, lambda n: jnp.asarray(n)[...]):
        tx = made("adamw", learning_rate=kind(0.1), weight_decay=kind(0.1), b1=kind(0.9))
        assert_close(step(tx), want)
    of = lambda rate, b2: step(made("adamw", learning_rate=rate, b2=b2, eps_root=0 * rate))
    assert_close(jax.jit(of)(0.1, 0.999), want)
    assert_close(step(made("adamw", clip_norm=float("inf"), eps=0)), want)
    params, grads = {"a": 0.1, "b": np.float32(0.05)}, {"a": 0.5, "b": np.float32(0.25)}
    ours, theirs = made("sgd"), optax.sgd(0.1, 0.9)
    want, _ = two_passes(theirs, grads, theirs.init(params), params)
    for way in WAYS:
        assert_close(way(ours, grads, ours.init(params), params)[0], want)


def test_dtypes_of_averages():
    """By Optax's names, as strings too; by default float32 at least."""
    for dtype in (BF16, "bfloat16", np.float32, None):
        wanted = jnp.dtype(dtype or F32)
        for of in (BF16, F32):
            params = jnp.zeros(2, of)
            assert made("adamw", mu_dtype=dtype).init(params).mu.dtype == wanted
            assert made("sgd", accumulator_dtype=dtype).init(params).trace.dtype == wanted


def test_nothing_to_train():
    for tree in ({}, (), {"a": None, "b": {}}):
        for name, step in itertools.product(NAMES, WAYS):
            tx = made(name, clip_norm=1.0, skip_nonfinite=True)
            assert step(tx, tree, tx.init(tree), tree)[0] == tree
    tx = made("adamw", clip_norm=1.0)
    params = {"w": jnp.ones((0, 3)), "b": jnp.ones(2)}
    after, state = jaxkern.apply(tx, params, tx.init(params), params)
    assert after["w"].shape == state.mu["w"].shape == (0, 3)


# What is folded in


def test_unscaling_is_folded_in():
    params, grads, scale = tree_of(0), tree_of(1), StaticLossScale(1024.0)
    several = (jaxkern.fused_adamw(0.1, clip_norm=1.0, skip_nonfinite=True), optax.adamw(0.1))
    several += (optax.chain(optax.clip(0.1), several[0]),)
    clipping = optax.chain(NORM(1.0), jaxkern.fused_sgd(1.0), optax.scale(1.0))

    @jax.jit
    def step(params, grads):
        norm = optax.tree.norm(grads)
        apply = lambda tx, g, **known: jaxkern.apply(tx, g, tx.init(params), params, **known)
        unscaled = [apply(tx, grads) for tx in several]
        scaled = [apply(tx, scale.scale(grads), loss_scale=scale) for tx in several]
        norms = [apply(clipping, grads, **({"grad_norm": n * norm} if n else {})) for n in range(3)]
        return unscaled, scaled, norms

    unscaled, scaled, (alone, known, other) = step(params, grads)
    assert_same(scaled, unscaled)
    assert_same(known, alone)
    moved = lambda p: optax.tree.norm(jax.tree.map(lambda a, b: a - b, p, params))
    np.testing.assert_allclose(moved(known[0]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(moved(other[0]), 0.5, rtol=1e-6)


@pytest.mark.parametrize("make", [jaxkern.fused_adamw, jaxkern.fused_sgd])
def test_steps_that_are_not_finite_are_skipped_and_counted(make):
    """On the device: under jit with nothing read back; the scale follows the state's flag."""
    tx = make(0.1, skip_nonfinite=True)
    params = tree_of(0, F16)
    state, scale = tx.init(params), DynamicLossScale(4.0, period=2)

    @jax.jit
    def step(grads, state, params, scale):
        params, state = jaxkern.apply(tx, grads, state, params, loss_scale=scale)
        return params, state, scale.adjust(state.last_finite)

    good = tree_of(1, F16)
    broken = lambda bad: good | {"b": [good["b"][0].at[2].set(bad), good["b"][1]]}
    for grads, count, skipped, value in (
        (good, 1, 0, 4.0),
        (broken(np.nan), 1, 1, 2.0),
        (broken(np.inf), 1, 2, 1.0),
        (good, 2, 2, 1.0),
    ):
        before = params, state
        params, state, scale = step(grads, state, params, scale)
        assert (state.count, state.total_notfinite) == (count, skipped)
        assert state.last_finite == (grads is good)
        assert scale.loss_scale == value
        if grads is good:
            assert not np.array_equal(params["w"], before[0]["w"])
        else:
            told = {"last_finite": state.last_finite, "total_notfinite": state.total_notfinite}
            assert_same((params, state), (before[0], before[1]._replace(**told)))


def test_without_skipping_nan_stays_where_it_is():
    grads = tree_of(1, F32, (1,))
    grads["w"] = grads["w"].at[0, 1, 2].set(jnp.nan)
    after, _ = stepping(made("adamw"), tree_of(0), grads)
    assert np.isnan(after["w"]).sum() == np.isnan(after["w"][1, 2]) == 1
    assert all(np.isfinite(a).all() for a in after["b"])


def test_master_copy():
    """bf16 parameters are the rounding of an fp32 run on the same gradients."""
    start = tree_of(0, BF16) | {"own": jnp.ones(3)}
    grads = tree_of(1, BF16, (20,)) | {"own": tree_of(2, F32, (20, 3))["b"][1]}
    params, state = stepping(jaxkern.fused_adamw(1e-3, master_dtype=F32), start, grads)
    exact, _ = stepping(jaxkern.fused_adamw(1e-3), jax.tree.map(F32, start), grads)
    without, _ = stepping(jaxkern.fused_adamw(1e-3), start, grads)
    assert state.master["own"] == optax.MaskedNode()
    assert params["w"].dtype == BF16
    assert_close(state.master["w"], exact["w"])
    assert_same(params["w"], state.master["w"].astype(BF16))
    assert_close(params["own"], exact["own"])
    assert not np.array_equal(without["w"], params["w"])


# Wrong calls

RANDOM = {"stochastic_rounding": True}
REAL = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "clip_norm")
FLAGS = ("nesterov", "skip_nonfinite", "stochastic_rounding")
NO_NUMBERS = [(TypeError, "1"), (TypeError, True), (TypeError, [0.1]), (TypeError, 1j)]
NO_NUMBERS += [(ValueError, np.nan), (ValueError, np.float32("-inf")), (ValueError, jnp.ones(2))]
WRONG = [
    ("adamw", {"learning_rate": "1e-3"}, TypeError, "'1e-3' (str); pass float('1e-3')"),
    ("sgd", {"learning_rate": None}, TypeError, "learning_rate must be a number"),
    ("adam", {"learning_rate": [1e-3]}, TypeError, "got [0.001] (list)"),
    ("adamw", {"b1": 1.0}, ValueError, "b1 must be at least 0 and below 1, got 1.0"),
    ("adamw", {"b1": lambda count: 0.9}, TypeError, "optax.inject_hyperparams"),
    ("adamw", {"b1": jnp.complex64(1)}, TypeError, "array of dtype complex64"),
    ("adamw", {"b2": -0.1}, ValueError, "b2 must be"),
    ("adamw", {"eps": np.inf}, ValueError, "eps must be finite, got inf"),
    ("adamw", {"weight_decay": None}, TypeError, "weight_decay must be"),
    ("adamw", {"mask": {"w": "no"}}, TypeError, "mask['w'] must be True or False, got 'no'"),
    ("adamw", {"mask": "biases"}, TypeError, "mask must be True or False"),
    ("adamw", {"mu_dtype": (None, None)}, TypeError, "mu_dtype must be a dtype, got (None, None)"),
    ("adamw", {"mu_dtype": jnp.uint8}, ValueError, "be float32, bfloat16, float16 or int8"),
    ("adamw", RANDOM | {"mu_dtype": F16}, ValueError, "float16 cannot be rounded stochastically"),
    ("adamw", {"nu_dtype": "half way"}, TypeError, "nu_dtype must be a dtype"),
    ("adamw", {"master_dtype": "wide"}, TypeError, "master_dtype must be a dtype, got 'wide'"),
    ("adamw", {"master_dtype": BF16}, ValueError, "master_dtype must be float32 or None"),
    ("adamw", {"seed": 0.5}, TypeError, "seed must be an integer"),
    ("adamw", {"seed": jax.random.key(0)}, TypeError, "jax.random.bits(key)"),
    ("adamw", {"implementation": "cuda"}, ValueError, "implementation must be"),
    ("sgd", {"momentum": True}, TypeError, "momentum must be a number"),
    *(("adamw", {n: wrong}, e, f"{n} must be ") for n in REAL for e, wrong in NO_NUMBERS),
    *((of, {n: 0.9}, TypeError, f"{n} must be True") for n in FLAGS for of in ("adamw", "sgd")),
]


ones, MASTER = jnp.ones, {"master_dtype": F32}
CODED = MASTER | {"mu_dtype": "int8", "nu_dtype": "uint8"}
PARAMS, INTEGERS = {"w": ones((16, 256), BF16), "b": ones(3)}, ones(3, int)
MANY = {f"layer{i}": {"w": ones(2), "b": ones(2)} for i in range(40)}
CUT = {name: layer for name, layer in MANY.items() if name != "layer7"}
TX, OTHER = made("adamw"), optax.chain(optax.clip(1.0), made("sgd"))
STATE, CODES = TX.init(PARAMS), made("adamw", **CODED).init(PARAMS)
WIDE = made("adamw", **MASTER).init(jax.tree.map(F32, PARAMS))
BY_OTHER = functools.partial(jaxkern.apply, OTHER, PARAMS, OTHER.init(PARAMS), PARAMS)


def coded(**leaves):
    """A state in 8 bits, as read from a checkpoint into a tree of something else."""
    return {"state": CODES._replace(**{n: getattr(CODES, n) | new for n, new in leaves.items()})}


WRONG_STEPS = [  # options, arguments instead of right ones, error, words
    ({}, {"grads": {"w": ones(2)}}, ValueError, "grads must have the structure of params"),
    ({}, {"grads": PARAMS | {"b": ones(2)}}, ValueError, "grads['b'] must have shape (3,)"),
    ({}, {"grads": PARAMS | {"b": INTEGERS}}, TypeError, "grads['b'] must be a floating array"),
    ({}, {"grads": jax.eval_shape(lambda: PARAMS)}, TypeError, "array, got ShapeDtypeStruct"),
    ({}, {"params": MANY, "grads": CUT}, ValueError, "grads['layer7']['b'] is missing"),
    ({}, {"params": CUT, "grads": MANY}, ValueError, "grads['layer7']['b'] is not in params"),
    ({}, {"params": MANY, "grads": [MANY]}, ValueError, "grads['layer0']['b'] is missing"),
    ({}, {"params": MANY, "grads": None}, ValueError, "grads['layer0']['b'] is missing"),
    ({}, {"state": optax.adamw(0.1).init(PARAMS)}, TypeError, "state must be a FusedAdamState"),
    ({}, {"state": STATE._replace(mu={})}, ValueError, "mu must have the structure of params"),
    ({"skip_nonfinite": True}, {"state": STATE}, ValueError, "master_dtype or skip_nonfinite"),
    (MASTER, {"state": WIDE}, ValueError, "parameter is bfloat16 and the state has no master"),
    (CODED, coded(nu={"b": INTEGERS}), TypeError, "nu['b'] must be a floating array, got int32"),
    (CODED, coded(nu=CODES.mu), TypeError, "must be uint8 codes with a float32 scale for each 256"),
    (CODED, coded(mu={"w": CODES.mu["w"]._replace(scale=ones(15))}), TypeError, "(16,); got int8"),
    (CODED, coded(mu={"w": CODES.mu["w"].codes}), TypeError, "floating array, got int8"),
    (CODED, coded(mu={"b": ones(4)}), ValueError, "mu['b'] must have shape (3,)"),
    (CODED, coded(master={"w": PARAMS["w"]}), TypeError, "float32 array, got bfloat16"),
    (CODED, coded(master={"w": ones(4096)}), ValueError, "must have shape (16, 256)"),
    ({"mask": {"w": True}}, {}, ValueError, "mask must have the structure of params"),
    ({"mask": {"w": True, "b": True, "c": True}}, {}, ValueError, "mask['c'] is not in params"),
    ({"mask": [True, False]}, {}, ValueError, "mask['b'] is missing"),
    ({"mask": lambda params: 1}, {}, TypeError, "mask must be True or False, got 1"),
    ({"learning_rate": lambda count: None}, {}, TypeError, "the schedule learning_rate must be"),
    ({"learning_rate": lambda count: ones(3)}, {}, ValueError, "scalar array, got shape (3,)"),
    ({}, {"grad_norm": "a"}, TypeError, "grad_norm must be a number or a scalar array, got 'a'"),
    ({}, {"grad_norm": ones(2)}, ValueError, "a scalar array, got shape (2,)"),
    ({}, {"loss_scale": 8.0}, TypeError, "loss_scale must be one of jaxkern.precision, got 8"),
]


@pytest.mark.parametrize("step", WAYS)
def test_refuses_wrong_steps(step):
    """In few words, whatever the trees hold: no dump of them."""
    for options, wrong, error, words in WRONG_STEPS:
        tx = made("adamw", **options)
        right = {"grads": PARAMS, "params": PARAMS} | wrong
        with pytest.raises(error, match=re.escape(words)) as refused:
            step(tx, **{"state": tx.init(right["params"])} | right)
        assert len(str(refused.value)) < 160


WRONG_CALLS = [
    (lambda: jaxkern.apply(None, PARAMS, STATE, PARAMS), TypeError, "transformation, got NoneType"),
    (lambda: jaxkern.apply(TX, PARAMS, STATE, None), ValueError, "params must be the parameters"),
    (lambda: TX.update(PARAMS, STATE), ValueError, "update needs params"),
    (lambda: TX.init({"n": 3}), TypeError, "params['n'] must be a floating array, got int"),
    (lambda: TX.init({"w": ones(2, jnp.float8_e5m2)}), TypeError, "16 bits are the fewest"),
    (lambda: TX.init({"c": ones(2, complex)}), TypeError, "split_real_and_imaginary"),
    (lambda: BY_OTHER(loss_scale=8.0), TypeError, "loss_scale must be one of jaxkern.precision"),
    (lambda: BY_OTHER(grad_norm=1.0), ValueError, "grad_norm must be None for a transformation"),
    (lambda: jaxkern.scale_gradients(PARAMS, 8.0), TypeError, "one of jaxkern.precision"),
    (lambda: jaxkern.scale_gradients([INTEGERS], None), TypeError, "grads[0] must be a floating"),
]


def test_refuses_wrong_calls():
    """Wrong arguments when it is made, too."""
    makings = ((functools.partial(made, n, **wrong), *told) for n, wrong, *told in WRONG)
    for call, error, words in (*makings, *WRONG_CALLS):
        with pytest.raises(error, match=re.escape(words)):
            call()


def test_complex_parameters_are_those_of_a_wrapper():
    tx = optax.contrib.split_real_and_imaginary(made("adam"))
    updates, _ = tx.update(c := ones(2, complex), tx.init(c), c)
    assert updates.dtype == jnp.complex64


def test_a_mask_may_be_of_subtrees():
    params = {"w": jnp.ones(3), "b": [jnp.ones(2), jnp.ones(2)]}

    def step(mask):
        tx = made("adamw", mask=mask)
        return jax.jit(jaxkern.apply, static_argnums=0)(tx, params, tx.init(params), params)[0]

    whole = step({"w": True, "b": [False, False]})
    assert_close(step({"w": np.True_, "b": False}), whole)
    assert_close(step(lambda params: {"w": np.array(True), "b": False}), whole)
