"""The layers SwiGLU and Mamba: the same in every library, and the papers'."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import mamba
from jaxkern.precision import Policy
from tests import check
from tests.layers import BF16, FP32, LIBRARY, K, in_every_library, jit, normal


def test_swiglu():
    weights = {
        name: {"kernel": normal(*shape, seed=seed, scale=0.25)}
        for seed, (name, shape) in enumerate(
            {"gate_proj": (K, 24), "up_proj": (K, 24), "down_proj": (24, K)}.items()
        )
    }
    x = normal(2, 3, K)
    gate, up, down = (np.asarray(weights[name]["kernel"], np.float64) for name in weights)
    rows = np.asarray(x, np.float64)
    hidden = (rows @ gate) / (1 + np.exp(-rows @ gate)) * (rows @ up)
    for layer in in_every_library("SwiGLU", K, 24, weights=weights).values():
        np.testing.assert_allclose(jit(layer)(x), hidden @ down, rtol=1e-5, atol=1e-4)

    module = jk_linen.SwiGLU(24, use_bias=True)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    biased = nnx.eval_shape(lambda: jk_nnx.SwiGLU(K, 24, use_bias=True, rngs=nnx.Rngs(0)))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(nnx.state(biased)))
    assert shapes["down_proj"] == {"bias": (K,), "kernel": (24, K)}


OPTIONS = {"d_state": 3, "d_conv": 3, "expand": 2, "dt_rank": 2}
SIZES = mamba.Sizes(12, **OPTIONS)


def _block(w, x):
    """The block on one sequence (L, D), one token after another."""
    rank, n = w.dt_proj.shape[0], w.A_log.shape[1]

    def token(carry, row):
        window, state = carry
        u, z = jnp.split(row @ w.in_proj + (0 if w.in_bias is None else w.in_bias), 2)
        window = jnp.column_stack([window[:, 1:], u])
        u = (window * w.conv_weight).sum(1) + (0 if w.conv_bias is None else w.conv_bias)
        u = u / (1 + jnp.exp(-u))
        low, B, C = jnp.split(u @ w.x_proj, [rank, rank + n])
        dt = jnp.logaddexp(0, low @ w.dt_proj + w.dt_bias)[:, None]
        state = jnp.exp(-dt * jnp.exp(w.A_log)) * state + dt * u[:, None] * B
        out = (state @ C + w.D * u) * z / (1 + jnp.exp(-z)) @ w.out_proj
        return (window, state), out + (0 if w.out_bias is None else w.out_bias)

    start = jnp.zeros(w.conv_weight.shape), jnp.zeros(w.A_log.shape)
    return jax.lax.scan(token, start, x)[1]


def given(weights):
    return {name: leaf for name, leaf in weights._asdict().items() if leaf is not None}


def block_float64(w, x, dout=None):
    """The block in float64; given `dout`, of x (B, L, D), also the gradients of x and weights."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        w, x = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), np.float64), (w, x))
        if dout is None:
            return np.asarray(jax.jit(_block)(w, x))
        run = lambda x, w: jax.vmap(_block, (None, 0))(w, x)
        out, vjp = jax.vjp(jax.jit(run), x, w)
        dx, dw = vjp(jnp.asarray(dout))
        return np.asarray(out), tuple(map(np.asarray, jax.tree.leaves((dx, dw))))


@pytest.fixture(scope="module")
def blocks():
    shapes = {name: shape for name, (_, shape) in mamba.initializers(SIZES).items()}
    weights = {
        name: normal(*shape, seed=seed, scale=0.3)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return in_every_library("Mamba", 12, weights=weights, **OPTIONS), mamba.Weights(**weights)


@LIBRARY
def test_mamba_is_the_papers(blocks, library):
    x = normal(2, 7, 12)
    block, weights = blocks[0][library], blocks[1]
    expected = np.stack([block_float64(weights, row) for row in x])
    np.testing.assert_allclose(
        jit(block)(x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


@LIBRARY
def test_mamba_goes_on_from_its_cache(blocks, library):
    """In pieces, and token by token, as in one."""
    block, x = blocks[0][library], normal(2, 8, 12)
    step = functools.partial(block, method="step") if library == "linen" else block.step
    init = jk_linen.Mamba(12, **OPTIONS) if library == "linen" else block
    expected = np.stack([block_float64(blocks[1], row) for row in x])
    run = jit(functools.partial(block, return_cache=True))
    first, cache = run(x[:, :4], init.init_cache(2))
    rest, last = run(x[:, 4:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), expected, rtol=1e-5, atol=1e-5)

    one = lambda cache, x: step(x, cache)[::-1]
    cache, outs = jit(lambda xs: jax.lax.scan(one, init.init_cache(2), xs))(x.swapaxes(0, 1))
    np.testing.assert_allclose(outs.swapaxes(0, 1), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(cache, last, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_mamba_of_packed_sequences(blocks):
    block, x = blocks[0]["nnx"], normal(1, 7, 12)
    packed = jit(block)(x, segment_ids=jnp.array([[0, 0, 0, 1, 1, 1, 1]]))
    apart = np.concatenate([block_float64(blocks[1], row) for row in (x[0, :3], x[0, 3:])])
    np.testing.assert_allclose(packed[0], apart, rtol=1e-5, atol=1e-5)
    for block in blocks[0].values():
        with pytest.raises(ValueError, match="segment_ids"):
            block(x, segment_ids=jnp.zeros((1, 6), int))


def test_mamba_of_one_sequence_in_equinox(blocks):
    block, x = blocks[0]["equinox"], normal(2, 7, 12)
    expected = np.stack([block_float64(blocks[1], row) for row in x])
    run = jit(jax.vmap(functools.partial(block, return_cache=True)))
    out, cache = run(x)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, block.init_cache(2))
    single = jax.eval_shape(block.step, x[0, 0], block.init_cache())
    assert jax.tree.map(jnp.shape, single) == ((12,), jax.tree.map(jnp.shape, block.init_cache()))


@LIBRARY
def test_mamba_with_biases_of_the_projections_and_none_of_the_convolution(library):
    options = OPTIONS | {"use_bias": True, "use_conv_bias": False}
    inits = mamba.initializers(mamba.Sizes(12, **options))
    assert inits.keys() == {*mamba.Weights._fields} - {"conv_bias"}
    weights = {name: normal(*shape, scale=0.3) for name, (_, shape) in inits.items()}
    block, x = in_every_library("Mamba", 12, weights=weights, **options)[library], normal(2, 5, 12)
    wanted = mamba.Weights(**{"conv_bias": None, **weights})
    expected = np.stack([block_float64(wanted, row) for row in x])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-5)
    close(jit(block)(x), expected)
    step = functools.partial(block, method="step") if library == "linen" else block.step
    first, cache = block(x[:, :-1], return_cache=True)
    close(first, expected[:, :-1])
    close(step(x[:, -1], cache)[0], expected[:, -1])


def test_mamba_begins_as_in_the_papers_code():
    inits = mamba.initializers(mamba.Sizes(32), n_layers=4)
    key = jax.random.key(0)
    draw = lambda key: {name: init(key, shape, FP32) for name, (init, shape) in inits.items()}
    w = mamba.Weights(**jit(draw)(key))
    dt = jax.nn.softplus(w.dt_bias)
    assert 1e-3 < float(dt.min()) < 4e-3
    assert 3e-2 < float(dt.max()) < 0.1
    np.testing.assert_allclose(jnp.exp(w.A_log[5]), np.arange(1, 17), rtol=1e-5)
    np.testing.assert_array_equal(w.D, 1)
    for leaf, bound in ((w.in_proj, 32**-0.5), (w.out_proj, 64**-0.5 / 2)):
        assert 0.97 * bound < float(jnp.abs(leaf).max()) <= bound

    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), given(w))
    assert expected["x_proj"][0] == (64, 2 + 2 * 16)
    x = jnp.ones((1, 1, 32))
    layer = nnx.eval_shape(lambda: jk_nnx.Mamba(32, n_layers=4, rngs=nnx.Rngs(0)))
    for made in (
        nnx.to_pure_dict(nnx.state(layer)),
        jax.eval_shape(jk_linen.Mamba(32, n_layers=4).init, key, x)["params"],
        given(eqx.filter_eval_shape(jk_equinox.Mamba, 32, n_layers=4, key=key).weights),
    ):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == expected


@LIBRARY
def test_mamba_in_bfloat16(blocks, library):
    weights = given(blocks[1])
    if library == "equinox":
        weights = Policy.parse("bf16").cast_to_compute(weights)
    block = in_every_library("Mamba", 12, weights=weights, dtype=BF16, **OPTIONS)[library]
    x = normal(2, 7, 12, dtype=BF16)
    out = jit(block)(x)
    assert out.dtype == BF16
    expected = np.stack([block_float64(blocks[1], row) for row in x])
    error = np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()
    assert 0 < error < 4 * 2**-8


@pytest.mark.gpu
@pytest.mark.newest
@pytest.mark.parametrize(
    "library",
    ["nnx", *(pytest.param(name, marks=pytest.mark.compiled) for name in ("linen", "equinox"))],
)
def test_mamba_by_the_kernels_is_the_papers(library):
    """Results and all gradients, and tokens fed one by one after a prompt."""
    width, batch, length = (128, 2, 100) if check.ON_GPU else (4, 1, 9)
    options = {} if check.ON_GPU else {"d_state": 2}
    inits = mamba.initializers(mamba.Sizes(width, **options))
    keys = jax.random.split(jax.random.key(0), len(inits))
    weights = mamba.Weights(
        **{
            name: init(key, shape, FP32)
            for key, (name, (init, shape)) in zip(keys, inits.items(), strict=True)
        }
    )
    x = normal(batch, length, width)

    def layer(implementation, weights):
        options_of = options | {"implementation": implementation}
        return in_every_library("Mamba", width, weights=given(weights), **options_of)[library]

    def run(implementation, x, *weights):
        return layer(implementation, mamba.Weights(*weights))(x)

    def decoded(weights, x):
        block = layer("mosaic", weights)
        step = functools.partial(block, method="step") if library == "linen" else block.step
        first, cache = block(x[:, :-2], return_cache=True)
        one = lambda cache, x: step(x, cache)[::-1]
        _, rest = jax.lax.scan(one, cache, x[:, -2:].swapaxes(0, 1))
        return jnp.concatenate([first, rest.swapaxes(0, 1)], 1)

    kernels, plain = (jax.jit(functools.partial(run, name)) for name in ("mosaic", "xla"))
    oracle = lambda x, *rest: block_float64(mamba.Weights(*rest[:-1]), x, rest[-1])
    with jax.default_matmul_precision("highest"), check.running("mosaic"):
        check.check_accuracy(kernels, plain, oracle, (x, *given(weights).values()))
        tokens, whole = jax.jit(decoded)(weights, x), plain(x, *given(weights).values())
    want = np.stack([block_float64(weights, row) for row in x])
    errors = [check.relative_error(y, want) for y in (tokens, whole)]
    assert errors[0] <= 2 * errors[1] + 4 * 2.0**-24
