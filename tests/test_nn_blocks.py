"""The layers SwiGLU and Mamba: the same in every library, and the papers'."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import mamba
from jaxkern.precision import Policy
from tests import check
from tests.layers import BF16, FP32, LIBRARY, K, in_every_library, jit, mamba_token, normal


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
    start = jnp.zeros(w.conv_weight.shape), jnp.zeros(w.A_log.shape)
    return jax.lax.scan(functools.partial(mamba_token, w), start, x)[1]


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


@LIBRARY
def test_mamba_of_packed_sequences(blocks, library):
    block, x = blocks[0][library], normal(1, 7, 12)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    run = jit(functools.partial(block, return_cache=True))
    packed, cache = run(x, segment_ids=ids)
    apart = np.concatenate([block_float64(blocks[1], row) for row in (x[0, :3], x[0, 3:])])
    np.testing.assert_allclose(packed[0], apart, rtol=1e-5, atol=1e-5)
    _, last = run(x[:, 3:], segment_ids=ids[:, 3:])
    for found, expected in zip(cache, last, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_do_not_touch_each_other(blocks):
    block, x = blocks[0]["nnx"], normal(1, 7, 12)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    dx = jit(jax.grad(lambda x: block(x, segment_ids=ids)[:, 3:].sum()))(x)
    np.testing.assert_array_equal(dx[:, :3], 0)
    assert (jnp.abs(dx[:, 3:]).max(-1) > 0).all()


@pytest.mark.parametrize("lengths", [(1, 5, 2), (2, 0, 6)])
def test_mamba_goes_on_in_unequal_parts(blocks, lengths):
    block, x = blocks[0]["nnx"], normal(2, 8, 12)
    run, outs, cache = jit(functools.partial(block, return_cache=True)), [], None
    for part in jnp.split(x, np.cumsum(lengths)[:-1], axis=1):
        out, cache = run(part, cache)
        outs.append(out)
    expected = np.stack([block_float64(blocks[1], row) for row in x])
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, rtol=1e-5, atol=1e-5)


def step_of(block, library):
    return functools.partial(block, method="step") if library == "linen" else block.step


@LIBRARY
def test_mamba_names_what_does_not_fit(blocks, library):
    block, x, one = blocks[0][library], jnp.ones((2, 7, 12)), library == "equinox"
    step, cache = step_of(block, library), mamba.init_cache(SIZES, 2, FP32)
    sequences = r"\(L, D\) or \(B, L, D\)" if one else r"\(B, L, D\)"
    tokens = r"\(D\) or \(B, D\)" if one else r"\(B, D\)"
    flat = x[0, 0] if one else x[0]
    for wrong, call, error, message in (
        (flat, block, ValueError, rf"x must have shape {sequences} with D = 12.*One sequence goes"),
        (x[..., 1:], block, ValueError, r"D = 12, the d_model of the block; got \(2, 7, 11\)"),
        (1j * x, block, TypeError, "x must have a real dtype, got complex64"),
        (x, functools.partial(step, cache=cache), ValueError, rf"{tokens} with D = 12.*x\[:, t\]"),
        (x[:1], functools.partial(block, cache=cache), ValueError, r"cache.conv .*\(1, 2, 24\)"),
        (x, functools.partial(block, cache=cache._replace(scan=x)), ValueError, "cache.scan must"),
        (x, functools.partial(block, cache=x), TypeError, "cache must be a jaxkern.nn.mamba.Cache"),
        (x[:, 0], functools.partial(step, cache=None), TypeError, "cache must be .*got NoneType"),
        (
            x,
            functools.partial(block, segment_ids=jnp.zeros((2, 6), int)),
            ValueError,
            r"segment_ids must have shape \(2, 7\), that of x without its last axis; got \(2, 6\)",
        ),
    ):
        with pytest.raises(error, match=message):
            call(wrong)
    if one:
        with pytest.raises(ValueError, match=r"segment_ids must have shape \(7,\)"):
            block(x[0], segment_ids=jnp.zeros((1, 7), int))


def test_mamba_is_one_row_of_a_table():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            block = jk_linen.Mamba(12, **OPTIONS)
            return block(x, block.init_cache(1))

    x = jnp.ones((1, 2, 12))
    rows = Model().tabulate(jax.random.key(0), x, console_kwargs={"width": 200, "no_color": True})
    assert rows.count("Mamba_0") == 1
    assert "Mamba (" not in rows  # as methods beside __call__ would be
    block = nnx.eval_shape(lambda: jk_nnx.Mamba(12, rngs=nnx.Rngs(0)))
    assert set(nnx.to_pure_dict(nnx.state(block))) == {*mamba.Weights._fields} - {
        "in_bias",
        "out_bias",
    }


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


@LIBRARY
def test_a_loop_can_carry_a_cache(library):
    """It keeps its dtypes, whatever those of parameters and tokens."""
    options, key = OPTIONS, jax.random.key(0)
    for dtype in (FP32, BF16):
        tokens = jnp.ones((2, 12), dtype)
        if library == "nnx":
            block = jk_nnx.Mamba(12, **options, param_dtype=dtype, rngs=nnx.Rngs(0))
        elif library == "linen":
            module = jk_linen.Mamba(12, **options, param_dtype=dtype)
            params = module.init(key, tokens[:, None])
            block = module.bind(params)
        else:
            block = jk_equinox.Mamba(12, **options, dtype=dtype, key=key)
        cache = block.init_cache(2)
        for out, after in (
            jax.eval_shape(block.step, tokens, cache),
            jax.eval_shape(functools.partial(block, return_cache=True), tokens[:, None], cache),
        ):
            assert out.dtype == dtype
            assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, cache)


# Stacks of layers


def in_nnx(x):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = jk_nnx.RMSNorm(8, rngs=rngs)
            self.mamba = jk_nnx.Mamba(8, d_state=2, rngs=rngs)

        def __call__(self, x):
            return x + self.mamba(self.norm(x))

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Block(rngs)

    blocks = make(nnx.Rngs(0))

    @nnx.jit
    def stacked(blocks, x):
        def loss(blocks, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(block, x):
                return nnx.remat(Block.__call__)(block, x)

            return (run(blocks, x) ** 2).sum()

        return nnx.value_and_grad(loss)(blocks, x)

    loss, grads = stacked(blocks, x)
    graphdef, params = nnx.split(blocks)
    return loss, grads, params, lambda params, x: nnx.merge(graphdef, params)(x)


def in_linen(x):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _=None):
            return x + jk_linen.Mamba(8, d_state=2)(jk_linen.RMSNorm()(x)), None

    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    stack = linen.scan(linen.remat(Block), **over)()
    params = stack.init(jax.random.key(0), x)
    loss = lambda params: (stack.apply(params, x)[0] ** 2).sum()
    return *jit(jax.value_and_grad(loss))(params), params, lambda p, x: Block().apply(p, x)[0]


def in_equinox(x):
    class Block(eqx.Module):
        norm: jk_equinox.RMSNorm
        mamba: jk_equinox.Mamba

        def __call__(self, x):
            return x + self.mamba(self.norm(x))

    def make(key):
        return Block(jk_equinox.RMSNorm(8), jk_equinox.Mamba(8, d_state=2, key=key))

    blocks = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 2))
    params, static = eqx.partition(blocks, eqx.is_array)
    run = lambda params, x: eqx.combine(params, static)(x)

    def loss(params):
        body = jax.checkpoint(lambda x, params: (run(params, x), None))
        return (jax.lax.scan(body, x, params)[0] ** 2).sum()

    return *jit(jax.value_and_grad(loss))(params), params, run


@pytest.mark.parametrize("stacked", [in_nnx, in_linen, in_equinox])
def test_stacks_are_scanned_and_rematerialised(stacked):
    """As layer by layer, with `jax.vmap` over the batch."""
    x = normal(2, 5, 8)
    loss, grads, params, run = stacked(x)

    def in_turn(params, x):
        for i in range(2):
            row = jax.tree.map(lambda leaf, i=i: leaf[i], params)
            x = jax.vmap(lambda x, row=row: run(row, x[None])[0])(x)
        return (x**2).sum()

    expected, wanted = jit(jax.value_and_grad(in_turn))(params, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert found.shape[0] == 2
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-4 * float(jnp.abs(leaf).max()))


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

    def run(x, *weights, implementation="xla"):
        return layer(implementation, mamba.Weights(*weights))(x)

    def decoded(weights, x):
        block = layer("mosaic", weights)
        step = functools.partial(block, method="step") if library == "linen" else block.step
        first, cache = block(x[:, :-2], return_cache=True)
        one = lambda cache, x: step(x, cache)[::-1]
        _, rest = jax.lax.scan(one, cache, x[:, -2:].swapaxes(0, 1))
        return jnp.concatenate([first, rest.swapaxes(0, 1)], 1)

    oracle = lambda x, *rest: block_float64(mamba.Weights(*rest[:-1]), x, rest[-1])
    with jax.default_matmul_precision("highest"), check.running("mosaic"):
        check.check_accuracy(run, run, oracle, (x, *given(weights).values()), "mosaic")
        tokens, whole = jax.jit(decoded)(weights, x), jax.jit(run)(x, *given(weights).values())
    want = np.stack([block_float64(weights, row) for row in x])
    errors = [check.relative_error(y, want) for y in (tokens, whole)]
    assert errors[0] <= 2 * errors[1] + 4 * 2.0**-24
