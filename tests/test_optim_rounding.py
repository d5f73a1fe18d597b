"""What the optimizers keep in 16 and in 8 bits: random rounding, codes, and training with them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.optim import arithmetic
from tests.pairs import combinations
from tests.test_optim import BF16, F16, F32, MASTER, RANDOM, assert_close, assert_same, two_passes


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
