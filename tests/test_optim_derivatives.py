"""Derivatives of all of jaxkern.optim, and what it keeps in 16 and in 8 bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.optim import arithmetic
from jaxkern.optim.arithmetic import Quantised, decoded, largest_of_blocks, of_elements
from jaxkern.precision import StaticLossScale
from tests.check import combinations
from tests.test_optim import (
    BF16,
    CASES,
    F16,
    F32,
    MASTER,
    RANDOM,
    WAYS,
    assert_close,
    assert_same,
    averages,
    fused,
    of_optax,
    tree_of,
    two_passes,
)


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


def assert_slopes(got, want, rtol=2e-5):
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        bound = rtol * max(np.abs(b).max(initial=0.0), 0.1)
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol, bound, err_msg=str(path))


@combinations("case step", SMOOTH, WAYS, few=1)
def test_a_step_by_all_that_it_depends_on(case, step):
    """Hyperparameters too, whose values the kernel takes as words."""
    numbers, want = CASES[case][1], oracle(case)
    got = jax.jit(jax.grad(functools.partial(of_jaxkern, case, step)))(arguments_of(numbers))
    assert_slopes(got, want)
    for name in numbers.keys() - ({"clip_norm"} if case == "momentum, loose clip" else set()):
        assert abs(want["numbers"][name]) > 1e-3, name


@combinations("implementation", ["mosaic", None, "xla"], few=1)
def test_in_forward_mode(implementation):
    """The kernels' derivatives are those of plain JAX."""
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
        assert_slopes(by_params, jax.grad(summed)(params))
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
    assert_slopes(got, (jax.tree.map(lambda c: c / 4, jax.grad(summed)(grads)), by_scale))
    want = summed(jax.tree.map(jnp.ones_like, grads)) / 4 + by_scale
    np.testing.assert_allclose(slope, want, rtol=1e-5)


def test_accumulated_gradients_by_parameters_and_data():
    """They, the loss and its other results are those of the whole batch, in either mode."""

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
    assert_slopes(got, want)
    np.testing.assert_allclose(along, wanted, rtol=1e-4)


# What is kept in 16 and in 8 bits: random rounding, codes, and training with them


def test_rounding_is_unbiased():
    """Over all 2^16 bits exactly: the mean is x, and each result a neighbour of x."""
    bits = jnp.arange(2**16, dtype=jnp.uint32)
    for x in (1.0, 1.00390625, -3.14159, 1e-20, 6.1e-39, -0.0, 0.99999994):
        out = np.float64(arithmetic.round_to_bfloat16(jnp.full(2**16, x, F32), bits))
        np.testing.assert_allclose(out.mean(), np.float64(np.float32(x)), rtol=1e-12)
        low = np.float64(jnp.float32(x).view(jnp.uint32) >> 16 << 16).astype(np.uint32)
        assert set(np.unique(out)) <= {
            np.float64((low + np.uint32(k << 16)).view(np.float32)) for k in (0, 1)
        }
    odd_nan = jnp.uint32(0x7FFFFFFF).view(F32)
    special = jnp.stack([jnp.inf, -jnp.inf, jnp.nan, odd_nan])
    out = arithmetic.round_to_bfloat16(special, jnp.full(4, 2**16 - 1, jnp.uint32))
    np.testing.assert_array_equal(out, special)


def test_random_bits_are_uniform_and_independent():
    """An element's draws, streams, leaves and steps; an odd size has the bits of a longer leaf."""
    n = 2**14
    draw = lambda leaf, seed, stream: arithmetic.leaf_draws((n,), leaf, seed, stream)
    seed = [jnp.uint32(s) for s in (1, 2, 3)]
    later = [*seed[:2], jnp.uint32(4)]
    draws = [draw(0, seed, 0), draw(1, seed, 0), draw(0, seed, 1), draw(0, later, 0)]
    sets = [np.float64(bits) / 2**16 - 0.5 for pair in draws for bits in pair]
    for i, a in enumerate(sets):
        assert abs(a.mean()) < 5 / np.sqrt(12 * n)
        assert abs(a.var() - 1 / 12) < 0.005
        for b in sets[:i]:
            assert abs((a * b).mean()) < 5 / 12 / np.sqrt(n)
    few = tuple(bits[:7] for bits in draws[0])
    assert_same(arithmetic.leaf_draws((7,), 0, seed, 0), few)


def test_every_dtype_takes_every_option():
    """What is kept has the dtype that was asked for, and is what it is in float64 but rounded."""
    floats, codes = (F16, BF16, F32, jnp.float64), ("int8", "uint8")
    types = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    made = lambda **options: jaxkern.fused_adamw(0.1, **options)
    cases = itertools.product(floats, (None, F32), (False, True), (None, *floats, codes))
    with jax.enable_x64(True):
        for dtype, master, stochastic, kept in cases:
            if stochastic and kept is F16:
                continue  # refused by name
            mu, nu = kept if kept is codes else (kept, kept)
            known = {"master_dtype": master, "stochastic_rounding": stochastic}
            tx = made(mu_dtype=mu, nu_dtype=nu, **known)
            params = jax.ShapeDtypeStruct((arithmetic.SMALLEST_IN_CODES,), dtype)
            state = jax.eval_shape(tx.init, params)
            after = jax.eval_shape(functools.partial(jaxkern.apply, tx), params, state, params)
            assert types(after) == types((params, state))
        grads = jnp.linspace(-1.0, 1.0, 100)
        step = jax.jit(lambda tx: jaxkern.apply(tx, grads, tx.init(grads), grads), static_argnums=0)
        (got, state), (want, exact) = step(made(**OF_BF16)), step(made())
        assert_same(got, want)
        for kept, average in ((state.mu, exact.mu), (state.nu, exact.nu)):
            np.testing.assert_allclose(np.float64(kept), average, rtol=2**-7)


def after_500_steps(tx, grads, params, **averages):
    """Parameters and state after steps of equal gradients."""
    step = lambda both, _: (jaxkern.apply(tx, grads, both[1], both[0]), None)
    run = jax.jit(lambda both: jax.lax.scan(step, both, length=500)[0])
    return run((params, tx.init(params)._replace(**averages)))


def test_what_moves_slowly_in_bfloat16_moves_only_if_rounded_stochastically():
    """nu of gradients of zero should shrink by 0.999 a step, and parameters by a low rate."""
    zeros, ones = jnp.zeros(512), jnp.ones(512, BF16)
    for stochastic, decayed, moved in ((False, 1.0, 1.0), (True, 0.999**500, 0.95)):
        random, rtol = {"stochastic_rounding": stochastic}, 0.01 if stochastic else 0
        adamw, sgd = jaxkern.fused_adamw(0.0, nu_dtype=BF16, **random), jaxkern.fused_sgd
        _, state = after_500_steps(adamw, zeros, zeros, nu=ones)
        np.testing.assert_allclose(np.float64(state.nu).mean(), decayed, rtol=rtol)
        params, _ = after_500_steps(sgd(1e-4, **random), ones, ones)
        np.testing.assert_allclose(np.float64(params).mean(), moved, rtol=rtol)


CODED = {"mu_dtype": "int8", "nu_dtype": "uint8"}
OF_BF16 = {"mu_dtype": BF16, "nu_dtype": BF16, "stochastic_rounding": True}


@functools.cache
def curve(dtype, size=32, **options):
    """The logarithm of the loss of a noisy regression, averaged over 100 steps."""
    key = jax.random.key(0)
    true = jax.random.normal(key, (size,))
    tx = jaxkern.fused_adamw(3e-3, b2=0.99, weight_decay=0.0, **options)

    def body(carry, i):
        params, state = carry
        x = jax.random.normal(jax.random.fold_in(key, i), (max(512 // size, 1), size))
        loss = lambda w: jnp.mean((x @ (w.astype(F32) - true)) ** 2)
        value, grad = jax.value_and_grad(loss)(params)
        return jaxkern.apply(tx, grad, state, params), value

    params = jnp.full(size, 4.0, dtype)
    steps = jnp.arange(1500)
    losses = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), steps)[1])(params)
    return np.log(np.convolve(losses, np.ones(100) / 100, "valid")[::100])


TRAINED = {
    "all-bf16": (BF16, OF_BF16),
    "bf16-state": (F32, OF_BF16),
    "master": (BF16, MASTER),
    "stochastic": (BF16, RANDOM),
    "8-bit": (F32, CODED),
}


@combinations("kept", TRAINED, few=1)
def test_low_precision_trains_like_fp32(kept):
    """The loss curve stays with fp32's, where plain bf16's does not."""
    dtype, options = kept
    size = arithmetic.SMALLEST_IN_CODES if options is CODED else 32
    exact, got, plain = curve(F32, size), curve(dtype, size, **options), curve(BF16)
    assert np.abs(got[:10] - exact[:10]).max() < 0.1
    assert np.abs(plain - curve(F32)).max() > 1


# Codes of 8 bits


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes_are_unbiased(dtype):
    """Over all 2^16 bits exactly; each result is one of the two codes around the value."""
    scale = jnp.float32(0.7)
    bits = jnp.arange(2**16, dtype=jnp.uint32)
    levels = np.float64(
        arithmetic.decoded(dtype, jnp.arange(-127.0 if dtype == jnp.int8 else 0.0, 256.0), scale)
    )
    assert (np.diff(levels) > 0).all()
    draw = jax.jit(lambda *x: jnp.round(arithmetic.before_rounding(dtype, *x)))
    for x in (0.7, 0.699, 0.35, 0.0123, 1e-6, 0.7 * 2 ** (-100 / 12), 0.7 / 127):
        codes = draw(jnp.full(2**16, x, F32), jnp.full(2**16, scale), bits)
        got = np.float64(arithmetic.decoded(dtype, codes, scale))
        np.testing.assert_allclose(got.mean(), x, rtol=2e-6, atol=2e-8)
        i = np.searchsorted(levels, x * (1 - 1e-6))
        step = 1.06 * (levels[i] - levels[i - 1])  # to the code above too, of an x that is a code
        np.testing.assert_array_less(np.abs(got - x), step)
        assert codes.min() >= -127
        assert codes.max() <= 255
    exact = jnp.arange(0.0, 128.0) + (0 if dtype == jnp.int8 else 128)
    some = arithmetic.decoded(dtype, exact, scale)
    back = draw(some, jnp.full(128, scale), jnp.full(128, 2**15, jnp.uint32))
    assert np.abs(np.float64(back - exact)).max() <= (dtype == jnp.uint8)


def test_state_in_8_bits():
    """Large leaves of whole blocks; zeros stay zeros; what is skipped stays as it is."""
    tx = jaxkern.fused_adamw(0.1, skip_nonfinite=True, **CODED)
    params = {"w": jnp.ones((64, 128)), "small": jnp.ones((8, 256)), "odd": jnp.ones((64, 65))}
    state = tx.init(params)
    assert (state.mu["w"].codes.dtype, state.nu["w"].codes.dtype) == (jnp.int8, jnp.uint8)
    assert state.mu["w"].codes.shape == (64, 128)
    assert state.nu["w"].scale.shape == (32,)
    assert state.mu["small"].dtype == state.nu["odd"].dtype == F32
    zeros = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(functools.partial(jaxkern.apply, tx))
    after, state = step(zeros, state, params)
    assert state.mu["w"].scale.max() == state.nu["w"].scale.max() == 0
    assert_close(after["w"], params["w"] * (1 - 0.1 * 1e-4))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: F32(rng.standard_normal(p.shape)), params)
    grads["w"] = grads["w"].at[:2].set(0)
    after, state = step(grads, state, after)
    np.testing.assert_allclose(after["w"][:2], (1 - 1e-5) ** 2, rtol=1e-7)
    again, skipped = step(grads | {"odd": np.nan * grads["odd"]}, state, after)
    assert_same((again, skipped.mu, skipped.nu), (after, state.mu, state.nu))
    by_update, _ = jax.jit(functools.partial(two_passes, tx))(grads, state, after)
    assert_close(by_update, step(grads, state, after)[0])


def test_nu_in_8_bits_decays():
    """Gradients of zero but for one in each block, which keeps its scale."""
    start = arithmetic.Quantised(jnp.full(4096, 255, jnp.uint8), jnp.ones(16, F32))
    grads = jnp.zeros(4096).at[::256].set(1.0)
    tx = jaxkern.fused_adam(0.0, nu_dtype="uint8")
    nu = after_500_steps(tx, grads, jnp.zeros_like(grads), nu=start)[1].nu
    got = np.float64(arithmetic.decoded(jnp.uint8, nu.codes.astype(F32), nu.scale.repeat(256)))
    np.testing.assert_allclose(got.reshape(16, 256)[:, 1:].mean(), 0.999**500, rtol=0.02)
    np.testing.assert_allclose(got[::256], 1.0, rtol=1e-4)
