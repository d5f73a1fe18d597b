"""jaxkern.fused_adamw, fused_adam, fused_sgd and apply."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxkern
from jaxkern.precision import DynamicLossScale, StaticLossScale

ON_GPU = jax.default_backend() == "gpu"
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def params_of(dtype=F32):
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, F32).astype(dtype)
    return {"w": normal(0, 6, 4), "b": [normal(1, 4), normal(2)], "none": None}


def grads_of(params, step=0, dtype=None):
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(9), step), len(leaves))
    draw = lambda k, p: jax.random.normal(k, p.shape).astype(dtype or p.dtype)
    return treedef.unflatten([draw(k, p) for k, p in zip(keys, leaves, strict=True)])


def run(tx, params, steps=3, *, step=None, grads=grads_of):
    """The parameters and the state after some steps."""
    step = step or jax.jit(functools.partial(jaxkern.apply, tx))
    state = tx.init(params)
    for i in range(steps):
        params, state = step(grads(params, i), state, params)
    return params, state


def optax_step(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def assert_close(got, want, rtol=3e-6, atol=1e-7):
    if jax.config.jax_enable_x64:
        rtol, atol = 1e-10, 1e-12
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(lambda a, b: close(np.float64(a), np.float64(b)), got, want)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


MASK = {"w": True, "b": False, "none": None}


def schedule(count):
    """A linear schedule in the widest floats: from an int32 count JAX makes float32, and whether a
    CPU's FMA rounds it alike differs from program to program."""
    return optax.linear_schedule(0.1, 0.01, 5)(jnp.asarray(count, float))


PAIRS = {
    "adamw": (
        jaxkern.fused_adamw(0.05, 0.8, 0.99, 1e-6, weight_decay=0.1, mask=MASK),
        optax.adamw(0.05, 0.8, 0.99, 1e-6, weight_decay=0.1, mask=MASK),
    ),
    "adamw-schedules": (
        jaxkern.fused_adamw(schedule, weight_decay=schedule),
        optax.adamw(schedule, weight_decay=schedule),
    ),
    "adamw-eps-root": (
        jaxkern.fused_adamw(0.05, 0.8, 0.99, 1e-6, 0.04, None, 0.1, MASK),
        optax.adamw(0.05, 0.8, 0.99, 1e-6, 0.04, None, 0.1, MASK),
    ),
    "adamw-nesterov": (
        jaxkern.fused_adamw(schedule, nesterov=True),
        optax.adamw(schedule, nesterov=True),
    ),
    "adam-nesterov-eps-root": (
        jaxkern.fused_adam(0.05, 0.8, 0.99, 1e-6, 0.04, nesterov=True),
        optax.adam(0.05, 0.8, 0.99, 1e-6, 0.04, nesterov=True),
    ),
    "adam": (jaxkern.fused_adam(schedule, b1=0.0), optax.adam(schedule, b1=0.0)),
    "sgd": (jaxkern.fused_sgd(0.05), optax.sgd(0.05)),
    "momentum": (jaxkern.fused_sgd(schedule, 0.9), optax.sgd(schedule, 0.9)),
    "nesterov": (jaxkern.fused_sgd(0.05, 0.9, True), optax.sgd(0.05, 0.9, True)),
    "clip": (
        jaxkern.fused_adamw(0.05, clip_norm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05)),
    ),
    "clip-loose": (
        jaxkern.fused_sgd(0.05, clip_norm=1e3),
        optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.05)),
    ),
}


# In Optax 0.2.6 a schedule of the decay stands still.
OF_NEWEST = {"adamw-schedules": pytest.mark.newest}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=OF_NEWEST.get(name, ())) for name in PAIRS]
)
def test_a_step_is_that_of_optax(name):
    """By `apply`, and by `update` as any transformation; in float64 to its rounding."""
    ours, theirs = PAIRS[name]
    with jax.enable_x64(True):
        compare_with_optax(ours, theirs, name)


def compare_with_optax(ours, theirs, name):
    params = params_of(jnp.float64)
    want, want_state = run(theirs, params, 7, step=optax_step(theirs))
    applied, state = run(ours, params, 7)
    updated, updated_state = run(ours, params, 7, step=optax_step(ours))
    assert_close(applied, want)
    assert_close(updated, want)
    assert_close(updated_state, state)
    assert state.count == 7
    for field in {"mu", "nu", "trace"} & set(type(state)._fields):
        if getattr(state, field) is not None:
            assert_close(optax.tree.get(state, field), optax.tree.get(want_state, field))


def test_trajectory_of_1000_steps_is_that_of_optax():
    """In float64 to its rounding, in float32 no further from it than Optax's."""
    target = jnp.linspace(-2.0, 2.0, 24).reshape(6, 4)

    def losses(tx, step, dtype):
        def body(carry, i):
            params, state = carry
            noise = jnp.sin(7.0 * i + jnp.arange(24.0)).reshape(6, 4).astype(dtype)
            grads = {"w": (params["w"] - target.astype(dtype)) ** 3 + 0.1 * noise}
            params, state = step(tx, grads, state, params)
            return (params, state), params["w"]

        params = {"w": jnp.zeros((6, 4), dtype)}
        steps = jnp.arange(1000, dtype=dtype)
        return np.float64(jax.lax.scan(body, (params, tx.init(params)), steps)[1])

    def plain(tx, grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    options = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.01}
    ours = jaxkern.fused_adamw(optax.cosine_decay_schedule(0.05, 1000), **options)
    theirs = optax.adamw(optax.cosine_decay_schedule(0.05, 1000), **options)
    with jax.enable_x64(True):
        oracle = losses(theirs, plain, jnp.float64)
        np.testing.assert_allclose(
            losses(ours, jaxkern.apply, jnp.float64), oracle, rtol=1e-9, atol=1e-9
        )
    error = np.abs(losses(ours, jaxkern.apply, F32) - oracle)
    optax_error = np.abs(losses(theirs, plain, F32) - oracle)
    assert optax_error.max() > 1e-7
    assert error.max() <= 2 * optax_error.max()
    assert error.mean() <= 2 * optax_error.mean()


# As an Optax transformation


def wrapped(tx_of):
    """Ways that Optax wraps a transformation."""
    labels = {"w": "a", "b": ["b", "b"], "none": None}
    return {
        "chain": optax.chain(optax.clip(0.5), tx_of(), optax.scale(0.5)),
        "masked": optax.masked(tx_of(), {"w": True, "b": [False, True], "none": None}),
        "multi_transform": optax.multi_transform({"a": tx_of(), "b": tx_of(0.01)}, labels),
        "MultiSteps": optax.MultiSteps(tx_of(), 2),
        "apply_if_finite": optax.apply_if_finite(tx_of(), 2),
        "flatten": optax.flatten(tx_of()),
    }


WRAPPERS = tuple(wrapped(lambda *a: optax.sgd(*a or (0.1,))))


@pytest.mark.parametrize("name", WRAPPERS)
def test_optax_wraps_it(name):
    """The same as with Optax's own; `apply` takes the long way."""
    make = lambda f: lambda lr=0.05: f(lr, weight_decay=0.1)
    with jax.enable_x64(True):
        ours, theirs = (wrapped(make(f))[name] for f in (jaxkern.fused_adamw, optax.adamw))
        params = params_of(jnp.float64)
        want = run(theirs, params, 4, step=optax_step(theirs))[0]
        assert_close(run(ours, params, 4)[0], want)


def test_inject_hyperparams():
    make = lambda f: optax.inject_hyperparams(f)(learning_rate=schedule, b2=0.99, weight_decay=0.1)
    ours, theirs = make(jaxkern.fused_adamw), make(optax.adamw)
    want, want_state = run(theirs, params_of(), 4, step=optax_step(theirs))
    got, state = run(ours, params_of(), 4, step=optax_step(ours))
    assert_close(got, want)
    assert state.hyperparams["learning_rate"] == want_state.hyperparams["learning_rate"]
    state.hyperparams["b2"] = jnp.float32(0.5)
    ours.update(grads_of(got), state, got)


def test_flax_train_state():
    params = {"w": jnp.ones((3, 2))}
    states = [
        TrainState.create(apply_fn=lambda: None, params=params, tx=tx)
        for tx in (jaxkern.fused_adamw(0.1), optax.adamw(0.1))
    ]
    step = jax.jit(lambda s: s.apply_gradients(grads={"w": s.params["w"] ** 2}))
    for _ in range(3):
        states = [step(s) for s in states]
    assert_close(states[0].params, states[1].params)


def test_it_is_a_pytree_as_any_transformation():
    """As when it is an argument of a function that Equinox jits."""
    tx = jaxkern.fused_sgd(0.1, implementation="mosaic")
    again = jax.tree.map(lambda leaf: leaf, tx)
    assert again == tx
    with pytest.raises(NotImplementedError) if not ON_GPU else contextlib.nullcontext():
        jaxkern.apply(again, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_flax_nnx_optimizer():
    models = [nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2)]
    for model, tx in zip(models, (jaxkern.fused_adamw(0.1), optax.adamw(0.1)), strict=True):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for _ in range(2):
            grads = nnx.grad(lambda m: (m(jnp.ones(3)) ** 2).sum())(model)
            optimizer.update(model, grads)
    assert_close(models[0].kernel[...], models[1].kernel[...], rtol=1e-4)


def test_low_precision_parameters_are_updated_alike_by_both_ways():
    """Bit for bit, under wrappers that want updates of the gradients' dtype too."""
    for options in ({}, {"master_dtype": F32}, {"stochastic_rounding": True}):
        tx = jaxkern.fused_adamw(2.0**-8, **options)
        params = params_of(BF16)
        grads = grads_of(params)
        state = tx.init(params)
        assert {m.dtype for m in jax.tree.leaves(state.mu)} == {jnp.dtype(F32)}
        updates, state_a = jax.jit(tx.update)(grads, state, params)
        applied, state_b = jax.jit(functools.partial(jaxkern.apply, tx))(grads, state, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(BF16)}
        assert_same(optax.apply_updates(params, updates), applied)
        assert_close(state_a, state_b)
        finite = optax.apply_if_finite(tx, 1)
        run(finite, params, 2, step=optax_step(finite))


# Folded in


def test_unscaling_is_folded_in():
    params = params_of()
    grads = grads_of(params)
    scale = StaticLossScale(1024.0)
    for tx in (jaxkern.fused_adamw(0.1, clip_norm=1.0, skip_nonfinite=True), optax.adamw(0.1)):
        state = tx.init(params)
        want = jaxkern.apply(tx, grads, state, params)
        assert_same(jaxkern.apply(tx, scale.scale(grads), state, params, loss_scale=scale), want)
    tx = jaxkern.fused_sgd(1.0, clip_norm=1.0)
    norm = optax.tree.norm(grads)
    known = jaxkern.apply(tx, grads, tx.init(params), params, grad_norm=norm)
    assert_same(known, jaxkern.apply(tx, grads, tx.init(params), params))
    other = jaxkern.apply(tx, grads, tx.init(params), params, grad_norm=2 * norm)
    moved = lambda p: optax.tree.norm(jax.tree.map(lambda a, b: a - b, p, params))
    np.testing.assert_allclose(moved(known[0]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(moved(other[0]), 0.5, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("make", [jaxkern.fused_adamw, jaxkern.fused_sgd])
def test_steps_that_are_not_finite_are_skipped_and_counted(make, bad):
    """On the device: under jit with nothing read back; the scale follows the state's flag."""
    tx = make(0.1, skip_nonfinite=True)
    params = params_of(F16)
    state, scale = tx.init(params), DynamicLossScale(4.0, period=2)

    @jax.jit
    def step(grads, state, params, scale):
        params, state = jaxkern.apply(tx, grads, state, params, loss_scale=scale)
        return params, state, scale.adjust(state.last_finite)

    good = grads_of(params)
    broken = good | {"b": [good["b"][0].at[2].set(bad), good["b"][1]]}
    for grads, count, skipped, value in (
        (good, 1, 0, 4.0),
        (broken, 1, 1, 2.0),
        (broken, 1, 2, 1.0),
        (good, 2, 2, 1.0),
    ):
        before, state_before = params, state
        params, state, scale = step(grads, state, params, scale)
        assert (state.count, state.total_notfinite) == (count, skipped)
        assert state.last_finite == (grads is good)
        assert scale.loss_scale == value
        fixed = {"last_finite": state.last_finite, "total_notfinite": state.total_notfinite}
        if grads is broken:
            assert_same(params, before)
            assert_same(state, state_before._replace(**fixed))
        else:
            assert not np.array_equal(params["w"], before["w"])


def test_without_skipping_nan_stays_where_it_is():
    tx = jaxkern.fused_adamw(0.1)
    params = params_of()
    grads = grads_of(params)
    grads["w"] = grads["w"].at[1, 2].set(jnp.nan)
    after, _ = jaxkern.apply(tx, grads, tx.init(params), params)
    assert np.isnan(after["w"]).sum() == np.isnan(after["w"][1, 2]) == 1
    assert np.isfinite(jax.tree.leaves(after["b"])[0]).all()


def test_master_copy():
    """bf16 parameters are the rounding of an fp32 run on the same gradients."""
    grads = lambda params, i: grads_of(params, i, BF16)
    tx = jaxkern.fused_adamw(1e-3, master_dtype=F32)
    start = params_of(BF16) | {"own": jnp.ones(3)}
    params, state = run(tx, start, 20, grads=grads)
    exact, _ = run(jaxkern.fused_adamw(1e-3), jax.tree.map(F32, start), 20, grads=grads)
    assert state.master["own"] == optax.MaskedNode()
    assert params["w"].dtype == BF16
    assert_close(state.master["w"], exact["w"])
    assert_same(params["w"], state.master["w"].astype(BF16))
    assert_close(params["own"], exact["own"])
    without = run(jaxkern.fused_adamw(1e-3), start, 20, grads=grads)[0]
    assert not np.array_equal(without["w"], params["w"])


# Wrong calls


def test_refuses_wrong_trees():
    tx = jaxkern.fused_adamw(0.1)
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}
    state = tx.init(params)
    go = functools.partial(jaxkern.apply, tx)
    with pytest.raises(ValueError, match="grads must have the structure of params"):
        go({"w": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match=r"grads\['b'\] must have shape \(3,\)"):
        go({"w": jnp.ones(2), "b": jnp.ones(2)}, state, params)
    with pytest.raises(TypeError, match=r"grads\['b'\] must be a floating array, got int32"):
        go({"w": jnp.ones(2), "b": jnp.ones(3, jnp.int32)}, state, params)
    with pytest.raises(TypeError, match=r"params\['n'\] must be a floating array, got int"):
        tx.init({"n": 3})
    with pytest.raises(TypeError, match=r"params\['n'\] must be a floating array, got complex64"):
        tx.init({"n": jnp.ones(2, jnp.complex64)})
    with pytest.raises(TypeError, match="state must be a FusedAdamState"):
        go(params, optax.adamw(0.1).init(params), params)
    with pytest.raises(ValueError, match="update needs params"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="params must be the parameters"):
        go(params, state, None)
    with pytest.raises(ValueError, match="mu must have the structure"):
        go(params, state._replace(mu={"w": jnp.ones(2)}), params)
    with pytest.raises(ValueError, match="another master_dtype or skip_nonfinite"):
        jaxkern.apply(jaxkern.fused_adamw(0.1, skip_nonfinite=True), params, state, params)
    mastered = jaxkern.fused_adamw(0.1, master_dtype=F32)
    with pytest.raises(ValueError, match="parameter is bfloat16 and the state has no master"):
        jaxkern.apply(mastered, params, mastered.init(params), jax.tree.map(BF16, params))


def test_refuses_a_state_of_wrong_arrays():
    """As one read from a checkpoint into a tree of something else may be."""
    params = {"w": jnp.ones((16, 256), BF16), "b": jnp.ones(3)}
    tx = jaxkern.fused_adamw(0.1, mu_dtype="int8", nu_dtype="uint8", master_dtype=F32)
    state = tx.init(params)
    mu, nu, master = state.mu, state.nu, state.master
    assert master["b"] == optax.MaskedNode()
    for wrong, error, words in (
        ({"nu": nu | {"b": jnp.ones(3, jnp.int32)}}, TypeError, "floating array, got int32"),
        ({"nu": mu}, TypeError, "must be uint8 codes with a float32 scale for each 256"),
        ({"mu": mu | {"w": mu["w"]._replace(scale=jnp.ones(15))}}, TypeError, "(16,); got int8"),
        ({"mu": mu | {"w": mu["w"].codes}}, TypeError, "floating array, got int8"),
        ({"master": master | {"w": params["w"]}}, TypeError, "float32 array, got bfloat16"),
        ({"master": master | {"w": jnp.ones(4096)}}, ValueError, "must have shape (16, 256)"),
        ({"mu": mu | {"b": jnp.ones(4)}}, ValueError, "mu['b'] must have shape (3,)"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            jaxkern.apply(tx, params, state._replace(**wrong), params)


def test_donated_buffers_are_used_once():
    """A second step from donated arrays is an error, and the first one's results stay."""
    tx = jaxkern.fused_adamw(0.1)
    step = jax.jit(functools.partial(jaxkern.apply, tx), donate_argnums=(1, 2))
    params, grads = {"w": jnp.ones((8, 4))}, {"w": jnp.full((8, 4), 2.0)}
    state = tx.init(params)
    want = jax.jit(functools.partial(jaxkern.apply, tx))(grads, state, params)
    got = step(grads, state, params)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(grads, state, params)
    with pytest.raises((RuntimeError, ValueError), match=r"donate|deleted"):
        step(got[0], got[1], got[0])
    assert_same(got, want)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"b1": 1.0}, ValueError, "b1 must be at least 0 and below 1, got 1.0"),
        ({"b2": -0.1}, ValueError, "b2 must be"),
        ({"eps": -1e-8}, ValueError, "eps must be"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm must be"),
        ({"eps": np.inf}, ValueError, "eps must be finite, got inf"),
        ({"weight_decay": np.float32("-inf")}, ValueError, "weight_decay must be finite, got -inf"),
        ({"mu_dtype": (None, None)}, TypeError, "mu_dtype must be a dtype, got (None, None)"),
        ({"master_dtype": jnp.ones(3)}, TypeError, "master_dtype must be float32 or None"),
        (
            {"mu_dtype": jnp.uint8},
            ValueError,
            "mu_dtype must be float32, bfloat16, float16 or int8",
        ),
        ({"nu_dtype": "half way"}, TypeError, "nu_dtype must be a dtype"),
        ({"master_dtype": BF16}, ValueError, "master_dtype must be float32 or None"),
        ({"implementation": "cuda"}, ValueError, "implementation must be"),
        (
            {"mu_dtype": F16, "stochastic_rounding": True},
            ValueError,
            "mu_dtype=float16 cannot be rounded stochastically",
        ),
    ],
)
def test_refuses_wrong_options(options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        jaxkern.fused_adamw(0.1, **options)


def test_zero_size_leaves_and_empty_trees():
    tx = jaxkern.fused_adamw(0.1, clip_norm=1.0)
    params = {"w": jnp.ones((0, 3)), "b": jnp.ones(2)}
    after, state = jaxkern.apply(tx, params, tx.init(params), params)
    assert after["w"].shape == state.mu["w"].shape == (0, 3)
    assert jaxkern.apply(tx, {}, tx.init({}), {})[0] == {}
