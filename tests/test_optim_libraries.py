"""The fused step where people train: nnx.Optimizer, linen's TrainState, Equinox modules."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import jaxkern
from jaxkern.nn.equinox import apply_gradients
from jaxkern.nn.flax import Optimizer
from jaxkern.nn.linen import TrainState
from jaxkern.optim import update
from jaxkern.precision import DynamicLossScale

BF16, F32 = jnp.bfloat16, jnp.float32
OPTIONS = {
    "plain": {},
    "folded": {"clip_norm": 0.5, "skip_nonfinite": True},
    "master": {"master_dtype": F32},
    "8-bit": {"mu_dtype": "int8", "nu_dtype": "uint8"},
}
INPUTS = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)


def options_of(*default, others):
    """Parametrizes by the name of the options."""
    marked = [pytest.param(name, marks=pytest.mark.exhaustive) for name in others]
    return pytest.mark.parametrize("name", [*default, *marked])


def adamw(name):
    return jaxkern.fused_adamw(1e-2, **OPTIONS[name])


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


def nnx_loss(model):
    return ((model(INPUTS) - 1.0) ** 2).mean()


nnx_grad = nnx.jit(nnx.grad(nnx_loss))


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(model, optimizer):
    loss, grads = nnx.value_and_grad(nnx_loss)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def nnx_update(model, optimizer, grads, **how):
    optimizer.update(model, grads, **how)


def gradients(params, step):
    draw = lambda p: np.random.default_rng([step, p.size]).standard_normal(p.shape)
    return jax.tree.map(lambda p: jnp.asarray(draw(p), p.dtype), params)


def assert_close(got, want, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=1e-7)


# nnx


@options_of("master", others=["plain", "folded"])
def test_nnx_steps_are_those_of_the_unfused_optimizer(name):
    """In the same places, so that one's checkpoint is the other's."""
    dtype = BF16 if name == "master" else F32
    trained = []
    for make in (Optimizer, nnx.Optimizer):
        model = Net(dtype)
        optimizer = make(model, adamw(name), wrt=nnx.Param)
        for i in range(3):
            nnx_update(model, optimizer, gradients(nnx.state(model, nnx.Param), i))
        trained.append((nnx.state(model), nnx.state(optimizer)))
    ours, theirs = trained
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert_close(ours[1], theirs[1])
    if name == "master":  # which updates in bfloat16 do not add up to
        theirs[0].update(jax.tree.map(BF16, nnx.as_pure(ours[1]["opt_state"]["master"])))
    assert_close(ours[0], theirs[0])
    assert ours[1]["step"][...] == 3


@options_of("8-bit", others=["plain", "folded", "master"])
def test_nnx_state_keeps_its_structure(name):
    """Averages in 8 bits and absent master copies stay what they are."""
    model = Net(BF16)
    optimizer = Optimizer(model, adamw(name), wrt=nnx.Param)
    before = jax.tree.structure(nnx.state(optimizer))
    first, *_, last = [nnx_step(model, optimizer) for _ in range(4)]
    assert jax.tree.structure(nnx.state(optimizer)) == before
    assert last < first
    assert model.calls[...] == 4
    if name == "8-bit":
        assert optimizer.opt_state.mu["first"]["kernel"].get_value().codes.dtype == jnp.int8
    restored = Optimizer(Net(BF16), optimizer.tx, wrt=nnx.Param)
    nnx.update(restored, nnx.state(optimizer))
    assert_close(nnx.state(restored), nnx.state(optimizer))


def kernel_text(step, *arguments, donate):
    program = jax.jit(step, donate_argnums=donate).trace(*arguments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r'module = "[^"]*"', "", text)


def assert_in_place(text):
    """One kernel, which overwrites the weights and the momentum of four leaves."""
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("output_operand_alias<") == 2 * 4


def test_nnx_optimizer_works_in_place(monkeypatch):
    """All that is donated is used again, by the kernel too."""
    monkeypatch.setattr(update, "may_be_split", lambda leaves: False)
    model = Net()
    optimizer = Optimizer(model, jaxkern.fused_sgd(1e-2, 0.9, True), wrt=nnx.Param)
    donated = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    assert nnx_step.lower(model, optimizer).as_text().count("tf.aliasing_output") == len(donated)
    nnx_step(model, optimizer)
    assert all(a.is_deleted() for a in donated)

    def step(split_model, split_optimizer):
        model, optimizer = nnx.merge(*split_model), nnx.merge(*split_optimizer)
        nnx_step.__wrapped__(model, optimizer)
        return nnx.state(model), nnx.state(optimizer)

    assert_in_place(kernel_text(step, nnx.split(model), nnx.split(optimizer), donate=(0, 1)))


def test_nnx_loss_scale_and_norm():
    """Unscaled in the pass; a step of no finite gradients is left out and the scale halved."""
    model, scale = Net(), DynamicLossScale(1024.0)
    params = lambda: jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))
    tx = jaxkern.fused_sgd(0.5, skip_nonfinite=True)
    optimizer, before = Optimizer(model, tx, wrt=nnx.Param), params()
    grads = gradients(nnx.state(model, nnx.Param), 0)
    nnx_update(model, optimizer, jax.tree.map(lambda g: 1024 * g, grads), loss_scale=scale)
    after = params()
    want = jax.tree.map(lambda p, g: p - 0.5 * np.asarray(g), before, nnx.as_pure(grads))
    assert_close(after, want, rtol=1e-5)
    nnx_update(model, optimizer, jax.tree.map(lambda g: np.inf * g, grads), loss_scale=scale)
    assert_close(params(), after)
    assert scale.adjust(optimizer.opt_state.last_finite[...]).loss_scale == 512.0
    assert optimizer.opt_state.total_notfinite[...] == 1
    known = Optimizer(model, jaxkern.fused_sgd(1.0, clip_norm=1.0), wrt=nnx.Param)
    nnx_update(model, known, grads, grad_norm=4 * optax.tree.norm(nnx.as_pure(grads)))
    moved = jax.tree.map(np.subtract, params(), after)
    np.testing.assert_allclose(optax.tree.norm(moved), 0.25, rtol=1e-5)


def test_nnx_refuses_wrong_calls():
    model, tx = Net(), jaxkern.fused_adam(1e-2)
    for other in (optax.adam(1e-2), optax.chain(tx), optax.MultiSteps(tx, 2), None):
        with pytest.raises(TypeError, match=r"Optimizer: tx must be jaxkern.fused_adamw.* itself"):
            Optimizer(model, other, wrt=nnx.Param)
    with pytest.raises(TypeError, match="wrt"):
        Optimizer(model, tx)
    optimizer, grads = Optimizer(model, tx, wrt=nnx.Param), nnx_grad(model)
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
    params = nnx.state(model, nnx.Param)
    with pytest.raises(TypeError, match=r"pass nnx.as_pure\(optimizer.opt_state\)") as error:
        jaxkern.apply(tx, grads, optimizer.opt_state, params)
    assert len(str(error.value)) < 250
    pure = nnx.as_pure(optimizer.opt_state)
    with pytest.raises(ValueError, match=r"holds nnx\.Variables"):
        jaxkern.apply(tx, grads, pure, params)
    step = functools.partial(jaxkern.apply, tx)
    jax.eval_shape(step, nnx.as_pure(grads), pure, nnx.as_pure(params))
    coded = nnx.Optimizer(model, jaxkern.fused_adam(1e-2, mu_dtype="int8"), wrt=nnx.Param)
    nnx_update(model, coded, grads)
    with pytest.raises(ValueError, match=r"use jaxkern.nn.flax.Optimizer"):
        coded.update(model, grads)


# linen


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(jnp.tanh(linen.Dense(64)(x)))


def linen_state(make, tx, **fields):
    shapes = jax.eval_shape(Mlp().init, jax.random.key(1), INPUTS)["params"]
    return make.create(apply_fn=Mlp().apply, params=gradients(shapes, 9), tx=tx, **fields)


@options_of("8-bit", others=["plain", "folded"])
def test_linen_steps_are_those_of_the_unfused_state(name):
    states = [linen_state(make, adamw(name)) for make in (TrainState, train_state.TrainState)]
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for i in range(3):
        states = [step(state, gradients(state.params, i)) for state in states]
    ours, theirs = states
    assert_close(ours.params, theirs.params)
    assert ours.step == 3
    assert jax.tree.structure(ours.opt_state) == jax.tree.structure(theirs.opt_state)


def test_linen_state_works_in_place(monkeypatch):
    monkeypatch.setattr(update, "may_be_split", lambda leaves: False)
    state = linen_state(TrainState, jaxkern.fused_sgd(1e-2, 0.9, True)).replace(step=jnp.int32(0))

    def step(state):
        loss = lambda p: ((state.apply_fn({"params": p}, INPUTS) - 1.0) ** 2).mean()
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    text, donated = kernel_text(step, state, donate=0), jax.tree.leaves(state)
    assert_in_place(text)
    assert text.count("tf.aliasing_output") == len(donated)
    jax.jit(step, donate_argnums=0)(state)
    assert all(a.is_deleted() for a in donated)


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
    for other in (optax.adam(1e-2), optax.chain(tx)):
        with pytest.raises(TypeError, match=r"TrainState: tx must be jaxkern.fused_adamw"):
            linen_state(TrainState, other)
    with pytest.raises(ValueError, match=r"grads\['Dense_1'\]\['bias'\] is missing"):
        state.apply_gradients(grads={"Dense_0": grads["Dense_0"]})


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


def test_equinox_steps_are_those_of_two_passes():
    tx = jaxkern.fused_adamw(1e-2, clip_norm=0.5)
    make = lambda: eqx.nn.MLP(64, 3, 64, 1, key=jax.random.key(0))

    @eqx.filter_jit
    def two_passes(model, state, grads):
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    one_pass = eqx.filter_jit(
        lambda grads, both: apply_gradients(tx, grads, both[1], both[0]), donate="all-except-first"
    )
    ours, theirs = (
        (model := make(), tx.init(eqx.filter(model, eqx.is_inexact_array))) for _ in range(2)
    )
    for i in range(3):
        grads = gradients(eqx.filter(theirs[0], eqx.is_inexact_array), i)
        donated = jax.tree.leaves(eqx.filter(ours, eqx.is_array))
        ours, theirs = one_pass(grads, ours), two_passes(*theirs, grads)
        assert all(a.is_deleted() for a in donated)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    of = functools.partial(eqx.filter, filter_spec=eqx.is_array)
    assert_close(of(ours), of(theirs), rtol=1e-5)


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
