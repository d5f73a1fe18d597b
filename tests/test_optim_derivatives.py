"""Derivatives of every public function of jaxkern.optim by every floating argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.optim.quantise import Quantised, largest, spread, value
from jaxkern.precision import StaticLossScale

pytestmark = pytest.mark.newest

F32, BF16 = jnp.float32, jnp.bfloat16
SHAPES = {"w": (6, 4), "b": (5,), "s": ()}
ADAM = {"b1": 0.8, "b2": 0.97, "eps": 1e-2}


def tree_of(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {n: F32(scale * rng.standard_normal(shape)) for n, shape in SHAPES.items()}


def arguments_of(numbers):
    """Whatever a step may be differentiated by."""
    return {
        "numbers": {"learning_rate": 0.1, **numbers, "clip_norm": 2.0},
        "loss_scale": 4.0,
        "params": tree_of(0),
        "grads": tree_of(1, 4.0),
        "mu": tree_of(2),
        "nu": jax.tree.map(jnp.square, tree_of(3)),
    }


CASES = {
    "adamw": (jaxkern.fused_adamw, optax.adamw, ADAM | {"weight_decay": 0.1}, {}),
    "adamw-eps-root-nesterov": (
        jaxkern.fused_adamw,
        optax.adamw,
        ADAM | {"weight_decay": 0.1, "eps_root": 0.03},
        {"nesterov": True},
    ),
    "adam": (jaxkern.fused_adam, optax.adam, ADAM, {}),
    "sgd": (jaxkern.fused_sgd, optax.sgd, {}, {}),
    "momentum": (jaxkern.fused_sgd, optax.sgd, {"momentum": 0.9}, {}),
    "nesterov": (jaxkern.fused_sgd, optax.sgd, {"momentum": 0.9}, {"nesterov": True}),
}


def summed(tree):
    """A sum in which every element counts, and no two of them alike."""
    leaves = jax.tree.leaves(tree)
    return sum((jnp.cos(jnp.arange(a.size) + i) * a.ravel()).sum() for i, a in enumerate(leaves))


def with_averages(state, given):
    """A state of `given` averages, after three steps."""
    fields = {
        name: given[of]
        for name, of in (("mu", "mu"), ("nu", "nu"), ("trace", "mu"))
        if getattr(state, name, None) is not None
    }
    if "count" in state._fields:
        fields["count"] = jnp.int32(3)
    return state._replace(**fields)


def of_jaxkern(make, options, how, given):
    tx = make(**given["numbers"], **options)
    params, grads = given["params"], given["grads"]
    state = with_averages(tx.init(params), given)
    scale = StaticLossScale(jnp.asarray(given["loss_scale"], F32))
    if how == "apply":
        params, state = jaxkern.apply(tx, grads, state, params, loss_scale=scale)
    else:
        updates, state = tx.update(grads, state, params, loss_scale=scale)
        params = optax.apply_updates(params, updates)
    averages = [getattr(state, n, None) for n in ("mu", "trace", "nu")]
    return summed((params, averages))


def of_optax(make, options, given):
    numbers = dict(given["numbers"])
    clip = numbers.pop("clip_norm")
    params = given["params"]
    grads = jax.tree.map(lambda g: g / given["loss_scale"], given["grads"])
    grads, _ = optax.clip_by_global_norm(clip).update(grads, optax.EmptyState())
    tx = make(**numbers, **options)
    inner, *rest = tx.init(params)
    inner = with_averages(inner, given) if hasattr(inner, "_replace") else inner
    updates, state = tx.update(grads, (inner, *rest), params)
    averages = [optax.tree.get(state, n, None) for n in ("mu", "trace", "nu")]
    return summed((optax.apply_updates(params, updates), averages))


@functools.lru_cache
def oracle(case):
    """Optax's derivatives, in float64."""
    _, theirs, numbers, options = CASES[case]
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arguments_of(numbers))
        slopes = jax.jit(jax.grad(functools.partial(of_optax, theirs, options)))(given)
        return jax.tree.map(np.float64, slopes)


def assert_close(got, want, rtol=2e-5):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        b = np.float64(b)
        bound = rtol * max(np.abs(b).max(initial=0.0), 0.1)
        np.testing.assert_allclose(
            np.float64(a), b, rtol, bound, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_by_all_that_it_depends_on(case, how):
    """Hyperparameters too, whose values the kernel takes as words."""
    ours, _, numbers, options = CASES[case]
    f = functools.partial(of_jaxkern, ours, options, how)
    got = jax.jit(jax.grad(f))(arguments_of(numbers))
    want = oracle(case)
    assert_close(got, want)
    used = set(numbers) - ({"b2", "eps", "weight_decay"} if "sgd" in case else set())
    for name in ("learning_rate", "clip_norm", *used):
        assert abs(want["numbers"][name]) > 1e-3, name


@pytest.mark.parametrize("implementation", [None, "xla", "mosaic"])
def test_in_forward_mode(implementation):
    """Of the kernels plain JAX's."""
    ours, _, numbers, options = CASES["adamw-eps-root-nesterov"]
    f = functools.partial(of_jaxkern, ours, options | {"implementation": implementation}, "apply")
    given = arguments_of(numbers)
    direction = jax.tree.map(jnp.ones_like, given)
    with interpret_kernels():
        slope = jax.jit(lambda d: jax.jvp(f, (given,), (d,))[1])(direction)
    want = sum(np.sum(a) for a in jax.tree.leaves(oracle("adamw-eps-root-nesterov")))
    np.testing.assert_allclose(slope, want, rtol=2e-5)


def test_by_a_known_norm_and_a_schedule():
    params, grads = tree_of(0), tree_of(1)

    def moved(rate, norm):
        schedule = lambda count: rate * (count + 1.0)
        tx = jaxkern.fused_sgd(schedule, clip_norm=0.5)
        after, _ = jaxkern.apply(tx, grads, tx.init(params), params, grad_norm=norm)
        return summed(after)

    by_rate, by_norm = jax.grad(moved, argnums=(0, 1))(0.1, 3.0)
    total = float(summed(grads))
    np.testing.assert_allclose(by_rate, -0.5 / 3 * total, rtol=1e-4)
    np.testing.assert_allclose(by_norm, 0.1 * 0.5 / 9 * total, rtol=1e-4)


@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stochastic_rounding": True}, {"master_dtype": F32}],
    ids=["nearest", "stochastic", "master"],
)
def test_rounding_counts_as_its_expectation(options, how):
    """Parameters in bfloat16 move with the learning rate as those in fp32 do."""

    def moved(dtype, options, rate):
        params = jax.tree.map(lambda a: a.astype(dtype), tree_of(0))
        tx = jaxkern.fused_sgd(rate, 0.9, **options)
        state = tx.init(params)
        if how == "apply":
            return jaxkern.apply(tx, tree_of(1), state, params)[0]
        return optax.apply_updates(params, tx.update(tree_of(1), state, params)[0])

    slope = lambda dtype, options: jax.jacfwd(functools.partial(moved, dtype, options))(0.1)
    got, want = slope(BF16, options), slope(F32, {})
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float64(a), b, rtol=2.0**-7)
        assert np.abs(b).min() > 0


def test_averages_in_8_bits_have_derivatives_within_a_step_alone():
    """Their codes are integers, through which a tangent would be lost from one step to the next."""
    params, grads = (0.1 * jax.random.normal(jax.random.key(i), (16, 256)) for i in range(2))
    coded = functools.partial(jaxkern.fused_adam, mu_dtype="int8", nu_dtype="uint8")
    mu = Quantised(jnp.round(params * 300).astype(jnp.int8), largest(params))
    nu = Quantised(jnp.full((16, 256), 200, jnp.uint8), largest(grads))

    def moved(make, state, steps, rate):
        tx, after = make(rate), params
        for _ in range(steps):
            after, state = jaxkern.apply(tx, grads, state, after)
        return summed(after)

    state = coded(0.1).init(params)._replace(mu=mu, nu=nu)
    plain = jaxkern.fused_adam(0.1).init(params)
    decoded = [
        value(a.codes.dtype, a.codes.astype(F32), spread(a.scale, a.codes.shape)) for a in (mu, nu)
    ]
    plain = plain._replace(mu=decoded[0], nu=decoded[1])
    slope = lambda make, state, steps=1: jax.grad(functools.partial(moved, make, state, steps))(0.1)
    np.testing.assert_allclose(slope(coded, state), slope(jaxkern.fused_adam, plain), rtol=1e-5)
    by_grads = lambda g: summed(jaxkern.apply(coded(0.1), g, state, params)[1].mu.scale)
    assert np.abs(jax.grad(by_grads)(grads)).max() > 0

    def twice(g):
        _, after = jaxkern.apply(coded(0.1), g, state, params)
        return summed(jaxkern.apply(coded(0.1), grads, after, params)[0])

    with pytest.raises(NotImplementedError, match="average in 8 bits"):
        jax.grad(twice)(grads)


def test_where_a_root_is_of_zero():
    """Gradients of zeros have a norm without a slope, and Adam with `eps_root` a smooth step."""
    zeros = jnp.zeros(3)

    def moved(make, g):
        tx = make(0.1, clip_norm=1.0)
        return jaxkern.apply(tx, g, tx.init(zeros), jnp.ones(3))[0].sum()

    by_sgd = jax.grad(functools.partial(moved, jaxkern.fused_sgd))(zeros)
    np.testing.assert_allclose(by_sgd, -0.1, rtol=1e-6)
    adam = functools.partial(jaxkern.fused_adam, eps=0.0, eps_root=0.25)
    np.testing.assert_allclose(jax.grad(functools.partial(moved, adam))(zeros), -0.2, rtol=1e-6)
    by_b1 = lambda b1: moved(
        functools.partial(jaxkern.fused_adam, b1=b1, eps_root=0.25), jnp.ones(3)
    )
    np.testing.assert_allclose(jax.grad(by_b1)(0.0), 0.0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("how", ["apply", "update"])
def test_a_skipped_step_stands_still(how, bad):
    """By the parameters the identity, and by all else nothing."""
    grads = {"w": jnp.array([1.0, bad]), "b": jnp.ones(3)}
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}

    def moved(params, rate, limit, scale):
        tx = jaxkern.fused_adamw(rate, clip_norm=limit, skip_nonfinite=True)
        scale, state = StaticLossScale(scale), tx.init(params)
        if how == "apply":
            return summed(jaxkern.apply(tx, grads, state, params, loss_scale=scale)[0])
        updates, _ = tx.update(grads, state, params, loss_scale=scale)
        return summed(optax.apply_updates(params, updates))

    arguments = (params, *map(jnp.float32, (0.1, 1.0, 2.0)))
    by_params, *others = jax.grad(moved, argnums=(0, 1, 2, 3))(*arguments)
    assert_close(by_params, jax.grad(summed)(params))
    assert others == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_scaled_gradients_by_gradients_and_scale(implementation):
    def scaled(grads, scale):
        with interpret_kernels():
            return summed(
                jaxkern.scale_gradients(
                    grads, StaticLossScale(scale), implementation=implementation
                )[0]
            )

    plain = lambda grads, scale: summed(jax.tree.map(lambda g: g / scale, grads))
    arguments = (tree_of(0), jnp.float32(4.0))
    got = jax.grad(scaled, argnums=(0, 1))(*arguments)
    assert_close(got, jax.grad(plain, argnums=(0, 1))(*arguments))
    tangents = jax.tree.map(jnp.ones_like, arguments)
    got, want = (jax.jvp(f, arguments, tangents)[1] for f in (scaled, plain))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_accumulated_gradients_by_parameters_and_data():
    """As of the whole batch, in either mode, the loss and what else it gives too."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"])
        return jnp.mean(hidden**2), hidden.sum()

    def whole(params, x):
        (mean, _), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return summed(grads) + mean + loss(params, x)[1]

    def parts(params, x):
        (mean, aux), grads = jaxkern.accumulate_gradients(
            loss, params, x.reshape(3, 2, 6), has_aux=True
        )
        return summed(grads) + mean + aux.sum()

    arguments = ({"w": tree_of(0)["w"]}, jax.random.normal(jax.random.key(1), (6, 6)))
    got, want = (jax.grad(f, argnums=(0, 1))(*arguments) for f in (parts, whole))
    assert_close(got, want)
    tangents = jax.tree.map(jnp.ones_like, arguments)
    got, want = (jax.jvp(f, arguments, tangents)[1] for f in (parts, whole))
    np.testing.assert_allclose(got, want, rtol=1e-4)
