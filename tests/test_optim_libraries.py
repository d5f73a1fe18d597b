"""The fused step where people train: nnx.Optimizer, linen's TrainState, Equinox modules."""

import contextlib
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import FrozenDict
from flax.training import train_state

import jaxkern
from jaxkern.core import kernel_call
from jaxkern.nn.equinox import apply_gradients
from jaxkern.nn.flax import Optimizer
from jaxkern.nn.linen import TrainState
from jaxkern.optim import kernel
from jaxkern.precision import DynamicLossScale
from tests import test_optim
from tests.check import exhaustive
from tests.test_optim import BF16, F32
from tests.test_optim_kernel import lowered

OPTIONS = {
    "plain": {},
    "folded": {"clip_norm": 0.5, "skip_nonfinite": True},
    "master": {"master_dtype": F32},
    "8-bit": {"mu_dtype": "int8", "nu_dtype": "uint8"},
    "chain": {"nesterov": True},
    "two passes": {},
}
AROUND = {  # what stands in a chain before a fused transformation, and behind it
    "chain": ([optax.clip_by_global_norm(0.5)], [optax.scale_by_schedule(lambda count: 0.5)]),
    "two passes": ([], [optax.clip(0.01)]),
}


def adamw(name):
    tx = jaxkern.fused_adamw(1e-2, **OPTIONS[name])
    before, behind = AROUND.get(name, ([], []))
    return optax.chain(*before, tx, *behind) if name in AROUND else tx


INPUTS = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)


def assert_close(got, want, rtol=1e-6):
    test_optim.assert_close(jax.tree.leaves(got), jax.tree.leaves(want), rtol)


class Net(nnx.Module):
    """Two layers, with a statistic that is not trained."""

    def __init__(self, dtype=F32):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(64, 64, rngs=rngs, param_dtype=dtype)
        self.second = nnx.Linear(64, 4, rngs=rngs, param_dtype=dtype)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.second(jnp.tanh(self.first(x)))


MLP = linen.Sequential([linen.Dense(64), jnp.tanh, linen.Dense(4)])


def gradients(params, step):
    draw = lambda p: np.random.default_rng([step, p.size]).standard_normal(p.shape)
    return jax.tree.map(lambda p: jnp.asarray(draw(p), p.dtype), params)


def linen_state(make, tx, **fields):
    shapes = jax.eval_shape(MLP.init, jax.random.key(1), INPUTS)["params"]
    return make.create(apply_fn=MLP.apply, params=gradients(shapes, 9), tx=tx, **fields)


@nnx.jit(donate_argnums=(0, 1))
def nnx_train(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda model: ((model(INPUTS) - 1.0) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def nnx_update(model, optimizer, grads, **how):
    optimizer.update(model, grads, **how)


# Steps are those of what each library has itself


def nnx_steps(tx, fused, dtype=F32):
    model = Net(dtype)
    optimizer = (Optimizer if fused else nnx.Optimizer)(model, tx, wrt=nnx.Param)
    for i in range(3):
        nnx_update(model, optimizer, gradients(nnx.state(model, nnx.Param), i))
    assert optimizer.step[...] == 3
    return nnx.state(model), nnx.state(optimizer)


def linen_steps(tx, fused):
    state = linen_state(TrainState if fused else train_state.TrainState, tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    for i in range(3):
        grads, donated = gradients(state.params, i), jax.tree.leaves(state.params)
        state = step(state, grads)
        assert all(a.is_deleted() for a in donated)
    assert state.step == 3
    return state.params, state.opt_state


def equinox_steps(tx, fused):
    trained = functools.partial(eqx.filter, filter_spec=eqx.is_inexact_array)

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(grads, model, state):
        if fused:
            return apply_gradients(tx, grads, state, model)
        updates, state = tx.update(grads, state, trained(model))
        return eqx.apply_updates(model, updates), state

    model = eqx.nn.MLP(64, 3, 64, 1, key=jax.random.key(0))
    state = tx.init(trained(model))
    for i in range(3):
        donated = jax.tree.leaves(eqx.filter((model, optax.tree.get(state, "mu")), eqx.is_array))
        model, state = step(gradients(trained(model), i), model, state)
        assert all(a.is_deleted() for a in donated) or not fused
    return trained(model), state


STEPS = (nnx_steps, linen_steps, equinox_steps)
DEFAULT = [(nnx_steps, "master"), (linen_steps, "8-bit"), (equinox_steps, "folded")]
DEFAULT += itertools.product(STEPS, AROUND)
MORE = itertools.product((nnx_steps, linen_steps), ("plain", "folded"))


@pytest.mark.parametrize(
    ("steps", "name"),
    [*DEFAULT, *(exhaustive(*case) for case in MORE)],
)
def test_steps_are_those_of_the_unfused_optimizer(steps, name):
    """In the same places, so that one's checkpoint is the other's; in two passes with a warning."""
    tx, dtype = adamw(name), [BF16] if name == "master" else []
    kernel_call.warn_once.cache_clear()
    told = pytest.warns(UserWarning, match="two passes: clip ")
    with told if name == "two passes" else contextlib.nullcontext():
        ours = steps(tx, True, *dtype)
    theirs = steps(tx, False, *dtype)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    if name == "master":  # which updates in bfloat16 do not add up to
        theirs[0].update(jax.tree.map(BF16, nnx.as_pure(ours[1]["opt_state"]["master"])))
    close = functools.partial(assert_close, rtol=1e-5 if steps is equinox_steps else 1e-6)
    close(ours[0], theirs[0])
    if name != "8-bit":
        close(ours[1], theirs[1])


def nnx_in_place(tx):
    model = Net()

    def step(*parts):
        model, optimizer = (nnx.merge(*part) for part in parts)
        nnx_train.__wrapped__(model, optimizer)
        return nnx.state(model), nnx.state(optimizer)

    return step, nnx.split(model), nnx.split(Optimizer(model, tx, wrt=nnx.Param))


def linen_in_place(tx):
    def step(state):
        loss = lambda p: ((state.apply_fn({"params": p}, INPUTS) - 1.0) ** 2).mean()
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    return step, linen_state(TrainState, tx).replace(step=jnp.int32(0))


@pytest.mark.parametrize("of_library", [nnx_in_place, linen_in_place])
def test_steps_are_in_place(of_library, monkeypatch):
    """All that is donated is used again, and one kernel overwrites weights and momentum."""
    monkeypatch.setattr(kernel, "may_be_split", lambda leaves: False)
    step, *parts = of_library(jaxkern.fused_sgd(1e-2, 0.9, True))
    donate, donated = range(len(parts)), jax.tree.leaves(parts)
    text = lowered(step, *parts, donate=donate)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("output_operand_alias<") == 2 * 4
    assert text.count("tf.aliasing_output") == len(donated)
    jax.jit(step, donate_argnums=donate)(*parts)
    assert all(a.is_deleted() for a in donated)


# nnx


def test_nnx_state_keeps_its_structure():
    """Averages in 8 bits and absent master copies stay what they are."""
    model = Net(BF16)
    optimizer = Optimizer(model, adamw("8-bit"), wrt=nnx.Param)
    before, donated = jax.tree.structure(nnx.state(optimizer)), jax.tree.leaves(nnx.state(model))
    first, *_, last = [nnx_train(model, optimizer) for _ in range(4)]
    assert all(a.is_deleted() for a in donated)
    assert jax.tree.structure(nnx.state(optimizer)) == before
    assert last < first
    assert model.calls[...] == 4
    assert optimizer.opt_state.mu["first"]["kernel"].get_value().codes.dtype == jnp.int8
    restored = Optimizer(Net(BF16), optimizer.tx, wrt=nnx.Param)
    nnx.update(restored, nnx.state(optimizer))
    assert_close(nnx.state(restored), nnx.state(optimizer))


def test_nnx_loss_scale_and_norm():
    """Gradients are unscaled in the pass, skipped where not finite, and clipped, as by `apply`."""
    model, scaled = Net(), {"loss_scale": DynamicLossScale(1024.0)}
    tx = jaxkern.fused_sgd(0.5, clip_norm=1.0, skip_nonfinite=True)
    step, optimizer = functools.partial(jaxkern.apply, tx), Optimizer(model, tx, wrt=nnx.Param)
    for factor, how in ((1024.0, scaled), (np.inf, scaled), (1.0, {"grad_norm": 4.0})):
        params, state = nnx.state(model, nnx.Param), optimizer.opt_state
        grads = jax.tree.map(functools.partial(jnp.multiply, factor), gradients(params, 0))
        want = jax.jit(step)(*map(nnx.as_pure, (grads, state, params)), **how)
        nnx_update(model, optimizer, grads, **how)
        assert_close((nnx.state(model, nnx.Param), optimizer.opt_state), want)
    assert optimizer.opt_state.total_notfinite[...] == 1


def test_nnx_refuses_wrong_calls():
    model, tx = Net(), jaxkern.fused_adam(1e-2)
    with pytest.raises(TypeError, match="tx must be an Optax transformation, got NoneType"):
        Optimizer(model, None, wrt=nnx.Param)
    with pytest.raises(TypeError, match="wrt"):
        Optimizer(model, tx)
    optimizer, params = Optimizer(model, tx, wrt=nnx.Param), nnx.state(model, nnx.Param)
    grads = gradients(params, 0)
    of_first, part = Optimizer(model.first, tx, wrt=nnx.Param), nnx.state({"first": grads["first"]})
    for error, words, update_by, *call in (
        (TypeError, "grads", optimizer, grads),
        (TypeError, r"call update\(model, grads\)", optimizer, grads, model),
        (ValueError, r"^.{,100}grads\['second'\].{,40} is missing$", optimizer, model, part),
        (ValueError, "must have the structure of params", of_first, model, grads),
    ):
        with pytest.raises(error, match=words):
            update_by.update(*call)
    # What nnx.Optimizer holds is Variables, and with 8 bits no longer what was put in.
    with pytest.raises(TypeError, match=r"nnx\.Variables; use .* nnx\.as_pure") as error:
        jaxkern.apply(tx, grads, optimizer.opt_state, params)
    assert len(str(error.value)) < 250
    pure = nnx.as_pure(optimizer.opt_state)
    with pytest.raises(ValueError, match=r"made nnx\.Variables of arrays"):
        jaxkern.apply(tx, grads, pure, params)
    step = functools.partial(jaxkern.apply, tx)
    jax.eval_shape(step, nnx.as_pure(grads), pure, nnx.as_pure(params))
    coded = nnx.Optimizer(model, jaxkern.fused_adam(1e-2, mu_dtype="int8"), wrt=nnx.Param)
    nnx_update(model, coded, grads)
    with pytest.raises(ValueError, match=r"use jaxkern.nn.flax.Optimizer"):
        coded.update(model, grads)


# linen


def test_linen_options_and_fields():
    """The loss scale is of a call, and a subclass's fields are replaced as in Flax."""

    class WithScale(TrainState):
        scale: DynamicLossScale

    tx = jaxkern.fused_adamw(1e-2, skip_nonfinite=True)
    state = linen_state(WithScale, tx, scale=DynamicLossScale(8.0))
    grads = jax.tree.map(jnp.ones_like, state.params)

    @jax.jit
    def both(state, grads):
        scaled = jax.tree.map(lambda g: 8.0 * g, grads)
        how = {"loss_scale": state.scale, "scale": state.scale.adjust(jnp.array(False))}
        return state.apply_gradients(grads=scaled, **how), state.apply_gradients(grads=grads)

    scaled, plain = both(state, grads)
    assert_close(scaled.params, plain.params)
    assert scaled.scale.loss_scale == 4.0
    with pytest.raises(TypeError, match="tx must be an Optax transformation, got NoneType"):
        linen_state(TrainState, None)
    with pytest.raises(ValueError, match=r"grads\['layers_2'\]\['bias'\] is missing"):
        state.apply_gradients(grads={"layers_0": grads["layers_0"]})


def test_linen_parameters_that_gradients_overwrite():
    """Scales of 8-bit products, which Flax keeps beside the parameters."""
    name = "_overwrite_with_gradient"
    params = {"params": {"w": jnp.ones(3)}, name: {"scale": jnp.ones(2)}}
    grads = {"params": {"w": jnp.ones(3)}, name: {"scale": jnp.full(2, 7.0)}}
    states = [
        make.create(apply_fn=None, params=params, tx=jaxkern.fused_sgd(0.5))
        for make in (TrainState, train_state.TrainState)
    ]
    ours, theirs = (state.apply_gradients(grads=grads) for state in states)
    assert_close(ours, theirs)
    np.testing.assert_array_equal(ours.params[name]["scale"], 7.0)


# Equinox


def test_equinox_trains_a_part():
    """Where gradients are ``None`` the model stays as it is."""
    model, tx = eqx.nn.MLP(4, 3, 4, 1, key=jax.random.key(0)), jaxkern.fused_sgd(0.1)
    frozen = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1].bias, frozen, True)
    grads = gradients(eqx.filter(model, spec), 0)
    state = tx.init(eqx.filter(model, spec))
    after, state = apply_gradients(tx, grads, state, model)
    assert eqx.tree_equal(after.layers[0], model.layers[0])
    assert not np.array_equal(after.layers[-1].bias, model.layers[-1].bias)
    with pytest.raises(ValueError, match="structure of the model, with None for what is not"):
        apply_gradients(tx, [jnp.ones(2)], state, model)
    adam = jaxkern.fused_adam(0.1)
    whole = adam.init(eqx.filter(model, eqx.is_inexact_array))
    with pytest.raises(ValueError, match=r"mu\..* is not in params"):
        apply_gradients(adam, grads, whole, model)


def test_masks_of_modules_and_of_frozen_parameters():
    """A module of booleans that can be called is a tree, and containers need not be of one type."""
    net = eqx.filter(eqx.nn.Linear(4, 2, key=jax.random.key(0)), eqx.is_inexact_array)
    tree = {"w": jnp.ones((4, 2)), "b": {"scale": jnp.ones(2), "none": None}}
    of_net = jax.tree.map(lambda p: p.ndim > 1, net)
    frozen, plain = FrozenDict(tree), {"w": True, "b": False}
    for params, ours, theirs in (
        (net, of_net, of_net),
        (net, lambda _: of_net, of_net),
        (frozen, plain, FrozenDict(plain)),
        (tree, FrozenDict(plain), plain),
    ):
        pair = jaxkern.fused_adamw(0.1, mask=ours), optax.adamw(0.1, mask=theirs)
        grads = jax.tree.map(jnp.zeros_like, params)
        assert_close(*(jaxkern.apply(tx, grads, tx.init(params), params)[0] for tx in pair))
