"""Derivatives of every public function of jaxkern.optim by every floating argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.optim.arithmetic import Quantised, decoded, largest_of_blocks, of_elements
from jaxkern.precision import StaticLossScale
from tests.pairs import combinations
from tests.test_optim import BF16, CASES, F32, WAYS, averages, fused, of_optax, tree_of, two_passes


def arguments_of(numbers):
    """Whatever a step may be differentiated by."""
    grads, nu = jax.tree.map(lambda g: 4 * g, tree_of(1)), jax.tree.map(jnp.square, tree_of(3))
    trees = {"params": tree_of(0), "grads": grads, "mu": tree_of(2), "nu": nu}
    return {"numbers": numbers, "loss_scale": 4.0} | trees


# Schedules are functions, and b1 of 0 has a derivative to one side alone.
SMOOTH = [case for case, (_, numbers, _) in CASES.items() if "clip_norm" in numbers]


def summed(tree):
    """A sum in which every element counts, and no two of them alike."""
    leaves = jax.tree.leaves(tree)
    return sum((jnp.cos(jnp.arange(a.size) + i) * a.ravel()).sum() for i, a in enumerate(leaves))


def with_averages(state, given):
    """A state of `given` averages, after three steps."""
    count = {"count": jnp.int32(3)} if "count" in state._fields else {}
    given = given | {"trace": given["mu"]}
    return state._replace(**{name: given[name] for name in averages(state)}, **count)


def summed_step(params, state):
    return summed((params, [optax.tree.get(state, name, None) for name in ("mu", "trace", "nu")]))


def of_jaxkern(case, step, given, **options):
    name, _, of_case = CASES[case]
    tx = fused(name)(**given["numbers"], **of_case, **options)
    state = with_averages(tx.init(given["params"]), given)
    scale = StaticLossScale(jnp.asarray(given["loss_scale"], F32))
    return summed_step(*step(tx, given["grads"], state, given["params"], loss_scale=scale))


@functools.lru_cache
def oracle(case):
    """Optax's derivatives, in float64."""
    name, numbers, options = CASES[case]

    def step(given):
        grads = jax.tree.map(lambda g: g / given["loss_scale"], given["grads"])
        tx = of_optax(name, **given["numbers"], **options)
        clip, (inner, *rest) = tx.init(given["params"])
        inner = with_averages(inner, given) if hasattr(inner, "_replace") else inner
        return summed_step(*two_passes(tx, grads, (clip, (inner, *rest)), given["params"]))

    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arguments_of(numbers))
        return jax.tree.map(np.float64, jax.jit(jax.grad(step))(given))


def assert_close(got, want, rtol=2e-5):
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        bound = rtol * max(np.abs(b).max(initial=0.0), 0.1)
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol, bound, err_msg=str(path))


@combinations("case step", SMOOTH, WAYS, few=1)
def test_a_step_by_all_that_it_depends_on(case, step):
    """Hyperparameters too, whose values the kernel takes as words."""
    numbers, want = CASES[case][1], oracle(case)
    got = jax.jit(jax.grad(functools.partial(of_jaxkern, case, step)))(arguments_of(numbers))
    assert_close(got, want)
    for name in numbers.keys() - ({"clip_norm"} if case == "momentum, loose clip" else set()):
        assert abs(want["numbers"][name]) > 1e-3, name


@combinations("implementation", ["mosaic", None, "xla"], few=1)
def test_in_forward_mode(implementation):
    """Of the kernels plain JAX's."""
    case = "adam, nesterov, eps_root"
    given = arguments_of(CASES[case][1])
    direction = jax.tree.map(jnp.ones_like, given)
    f = functools.partial(of_jaxkern, case, jaxkern.apply, implementation=implementation)
    with interpret_kernels():
        slope = jax.jit(lambda d: jax.jvp(f, (given,), (d,))[1])(direction)
    want = sum(np.sum(a) for a in jax.tree.leaves(oracle(case)))
    np.testing.assert_allclose(slope, want, rtol=2e-5)


def test_by_a_known_norm_and_a_schedule():
    params, grads = tree_of(0), tree_of(1)

    def moved(rate, norm):
        tx = jaxkern.fused_sgd(lambda count: rate * (count + 1.0), clip_norm=0.5)
        after, _ = jaxkern.apply(tx, grads, tx.init(params), params, grad_norm=norm)
        return summed(after)

    by_rate, by_norm = jax.jit(jax.grad(moved, argnums=(0, 1)))(0.1, 3.0)
    total = float(summed(grads))
    np.testing.assert_allclose(by_rate, -0.5 / 3 * total, rtol=1e-4)
    np.testing.assert_allclose(by_norm, 0.1 * 0.5 / 9 * total, rtol=1e-4)


RANDOM, MASTER = {"stochastic_rounding": True}, {"master_dtype": F32}
ROUNDINGS = {"nearest": {}, "stochastic": RANDOM, "master": MASTER}


@combinations("options step", ROUNDINGS, [two_passes, jaxkern.apply])
def test_rounding_counts_as_its_expectation(options, step):
    """Parameters in bfloat16 move with the learning rate as those in fp32: by the gradient."""
    params = jax.tree.map(BF16, tree_of(0))

    def moved(rate):
        tx = jaxkern.fused_sgd(rate, 0.9, **options)
        return step(tx, tree_of(1), tx.init(params), params)[0]

    slope = jax.jit(jax.jacfwd(moved))(0.1)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(tree_of(1)), strict=True):
        np.testing.assert_allclose(np.float64(a), -b, rtol=2.0**-7)


def test_averages_in_8_bits_have_derivatives_within_a_step_alone():
    """Their codes are integers, through which a tangent would be lost from one step to the next."""
    rng = np.random.default_rng(0)
    params, grads = (F32(0.1 * rng.standard_normal((16, 256))) for _ in range(2))
    coded = functools.partial(jaxkern.fused_adam, mu_dtype="int8", nu_dtype="uint8")
    mu = Quantised(jnp.round(params * 300).astype(jnp.int8), largest_of_blocks(params))
    nu = Quantised(jnp.full((16, 256), 200, jnp.uint8), largest_of_blocks(grads))
    state = coded(0.1).init(params)._replace(mu=mu, nu=nu)
    value = lambda a: decoded(
        a.codes.dtype, a.codes.astype(F32), of_elements(a.scale, a.codes.shape)
    )
    plain = jaxkern.fused_adam(0.1).init(params)._replace(mu=value(mu), nu=value(nu))

    @jax.jit
    def slopes(grads):
        moved = lambda make, state, rate: summed(jaxkern.apply(make(rate), grads, state, params)[0])
        scale = lambda g: summed(jaxkern.apply(coded(0.1), g, state, params)[1].mu.scale)
        by_rate = lambda make, state: jax.grad(functools.partial(moved, make, state))(0.1)
        return by_rate(coded, state), by_rate(jaxkern.fused_adam, plain), jax.grad(scale)(grads)

    of_codes, of_values, of_scale = slopes(grads)
    np.testing.assert_allclose(of_codes, of_values, rtol=1e-5)
    assert np.abs(of_scale).max() > 0

    def twice(g):
        _, after = jaxkern.apply(coded(0.1), g, state, params)
        return summed(jaxkern.apply(coded(0.1), grads, after, params)[0])

    with pytest.raises(NotImplementedError, match="average in 8 bits"):
        jax.eval_shape(jax.grad(twice), grads)


def test_where_a_root_is_of_zero():
    """Gradients of zeros have a norm without a slope, and Adam with `eps_root` a smooth step."""
    zeros = jnp.zeros(3)

    def moved(make, g):
        tx = make(0.1, clip_norm=1.0)
        return jaxkern.apply(tx, g, tx.init(zeros), jnp.ones(3))[0].sum()

    @jax.jit
    def slopes(zeros):
        adam = functools.partial(jaxkern.fused_adam, eps_root=0.25)
        by_b1 = lambda b1: moved(functools.partial(adam, b1=b1), jnp.ones(3))
        by_grads = lambda make: jax.grad(functools.partial(moved, make))(zeros)
        smooth = functools.partial(adam, eps=0.0)
        return by_grads(jaxkern.fused_sgd), by_grads(smooth), jax.grad(by_b1)(zeros[0])

    by_sgd, by_adam, by_b1 = slopes(zeros)
    np.testing.assert_allclose(by_sgd, -0.1, rtol=1e-6)
    np.testing.assert_allclose(by_adam, -0.2, rtol=1e-6)
    np.testing.assert_allclose(by_b1, 0.0, atol=1e-6)


@combinations("step", WAYS, few=1)
def test_a_skipped_step_stands_still(step):
    """By the parameters the identity, and by all else nothing."""
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}

    def moved(params, rate, limit, scale, bad):
        grads = {"w": jnp.array([1.0, bad]), "b": jnp.ones(3)}
        tx = jaxkern.fused_adamw(rate, clip_norm=limit, skip_nonfinite=True)
        scale = StaticLossScale(scale)
        return summed(step(tx, grads, tx.init(params), params, loss_scale=scale)[0])

    slopes = jax.jit(jax.grad(moved, argnums=(0, 1, 2, 3)))
    for bad in (np.inf, np.nan):
        by_params, *others = slopes(params, *map(jnp.float32, (0.1, 1.0, 2.0, bad)))
        assert_close(by_params, jax.grad(summed)(params))
        assert others == [0.0, 0.0, 0.0]


def by_both_modes(f, *arguments):
    """Gradients by all arguments, and the derivative along ones."""
    tangents = jax.tree.map(jnp.ones_like, arguments)
    both = lambda *a: (jax.grad(f, argnums=(0, 1))(*a), jax.jvp(f, a, tangents)[1])
    return jax.jit(both)(*arguments)


@combinations("implementation", ["mosaic", "xla"], few=1)
def test_scaled_gradients_by_gradients_and_scale(implementation):
    def scaled(grads, scale):
        scale = StaticLossScale(scale)
        with interpret_kernels():
            return summed(jaxkern.scale_gradients(grads, scale, implementation=implementation)[0])

    grads = tree_of(1)
    got, slope = by_both_modes(scaled, grads, jnp.float32(4.0))
    by_scale = -summed(grads) / 4**2
    assert_close(got, (jax.tree.map(lambda c: c / 4, jax.grad(summed)(grads)), by_scale))
    want = summed(jax.tree.map(jnp.ones_like, grads)) / 4 + by_scale
    np.testing.assert_allclose(slope, want, rtol=1e-5)


def test_accumulated_gradients_by_parameters_and_data():
    """As of the whole batch, in either mode, the loss and what else it gives too."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"])
        return jnp.mean(hidden**2), hidden.sum()

    def whole(params, x):
        (mean, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return summed(grads) + mean + aux

    def parts(params, x):
        x = x.reshape(3, 2, 6)
        (mean, aux), grads = jaxkern.accumulate_gradients(loss, params, x, has_aux=True)
        return summed(grads) + mean + aux.sum()

    arguments = {"w": tree_of(0)["w"]}, F32(np.random.default_rng(1).standard_normal((6, 6)))
    (got, along), (want, wanted) = (by_both_modes(f, *arguments) for f in (parts, whole))
    assert_close(got, want)
    np.testing.assert_allclose(along, wanted, rtol=1e-4)
