"""The layers SwiGLU and of every kind of block: the same in every library, and the papers'."""

import functools
import inspect
import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import mamba, remat
from jaxkern.precision import Policy
from tests import check
from tests.layers import (
    BF16,
    FP32,
    KIND,
    KINDS,
    LIBRARY,
    MAMBA,
    MAMBA2,
    K,
    in_every_library,
    jit,
    normal,
)


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


def given(weights):
    return {name: leaf for name, leaf in weights._asdict().items() if leaf is not None}


def block_float64(kind, sizes, w, x, dout):
    """The block on x (B, L, D) in float64, and the gradients of x and weights for `dout`."""

    def block(w, x):
        return jax.lax.scan(functools.partial(kind.token, w, sizes), kind.carry(sizes), x)[1]

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        w, x = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), np.float64), (w, x))
        run = lambda x, w: jax.vmap(block, (None, 0))(w, x)
        out, vjp = jax.vjp(jax.jit(run), x, w)
        dx, dw = vjp(jnp.asarray(dout))
        return np.asarray(out), tuple(map(np.asarray, jax.tree.leaves((dx, dw))))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def blocks(request):
    """A block of a kind: the kind, sizes, weights, and its layer in each library."""
    kind, sizes = request.param, request.param.sizes()
    weights = {
        name: normal(*shape, seed=seed, scale=0.3)
        for seed, (name, shape) in enumerate(kind.shapes(sizes).items())
    }
    layers = in_every_library(kind.layer, 12, weights=weights, **kind.options)
    weights = kind.block.weights_from(weights)
    return types.SimpleNamespace(kind=kind, sizes=sizes, weights=weights, layers=layers)


def step_of(block, library):
    return functools.partial(block, method="step") if library == "linen" else block.step


def expected_of(blocks, x):
    return np.stack([blocks.kind.float64(blocks.weights, blocks.sizes, row) for row in x])


@LIBRARY
def test_block_is_the_papers(blocks, library):
    x = normal(2, 7, 12)
    block = blocks.layers[library]
    expected = expected_of(blocks, x)
    np.testing.assert_allclose(
        jit(block)(x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


@LIBRARY
def test_block_goes_on_from_its_cache(blocks, library):
    """In pieces, and token by token, as in one."""
    block, x = blocks.layers[library], normal(2, 8, 12)
    step = step_of(block, library)
    init_cache = functools.partial(blocks.kind.block.init_cache, blocks.sizes, dtype=FP32)
    expected = expected_of(blocks, x)
    run = jit(functools.partial(block, return_cache=True))
    first, cache = run(x[:, :4], init_cache(2))
    rest, last = run(x[:, 4:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), expected, rtol=1e-5, atol=1e-5)

    one = lambda cache, x: step(x, cache)[::-1]
    cache, outs = jit(lambda xs: jax.lax.scan(one, init_cache(2), xs))(x.swapaxes(0, 1))
    np.testing.assert_allclose(outs.swapaxes(0, 1), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(cache, last, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@LIBRARY
def test_block_of_packed_sequences(blocks, library):
    block, x = blocks.layers[library], normal(1, 7, 12)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    run = jit(functools.partial(block, return_cache=True))
    packed, cache = run(x, segment_ids=ids)
    apart = np.concatenate([expected_of(blocks, part)[0] for part in (x[:, :3], x[:, 3:])])
    np.testing.assert_allclose(packed[0], apart, rtol=1e-5, atol=1e-5)
    _, last = run(x[:, 3:], segment_ids=ids[:, 3:])
    for found, expected in zip(cache, last, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_do_not_touch_each_other(blocks):
    block, x = blocks.layers["nnx"], normal(1, 7, 12)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    dx = jit(jax.grad(lambda x: block(x, segment_ids=ids)[:, 3:].sum()))(x)
    np.testing.assert_array_equal(dx[:, :3], 0)
    assert (jnp.abs(dx[:, 3:]).max(-1) > 0).all()


@pytest.mark.parametrize("lengths", [(1, 5, 2), (2, 0, 6)])
def test_block_goes_on_in_unequal_parts(blocks, lengths):
    block, x = blocks.layers["nnx"], normal(2, 8, 12)
    run, outs, cache = jit(functools.partial(block, return_cache=True)), [], None
    for part in jnp.split(x, np.cumsum(lengths)[:-1], axis=1):
        out, cache = run(part, cache)
        outs.append(out)
    expected = expected_of(blocks, x)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, rtol=1e-5, atol=1e-5)


@LIBRARY
def test_block_names_what_does_not_fit(blocks, library):
    block, x, one = blocks.layers[library], jnp.ones((2, 7, 12)), library == "equinox"
    kind, step = blocks.kind, step_of(block, library)
    other = MAMBA if kind is MAMBA2 else MAMBA2
    cache, its = (each.block.init_cache(each.sizes(), 2, FP32) for each in (kind, other))
    conv = re.escape(str((1, *cache.conv.shape[1:])))
    named = re.escape(f"cache must be a jaxkern.nn.{kind.block.name}.Cache, ")
    sequences = r"\(L, D\) or \(B, L, D\)" if one else r"\(B, L, D\)"
    tokens = r"\(D\) or \(B, D\)" if one else r"\(B, D\)"
    flat = x[0, 0] if one else x[0]
    for wrong, call, error, message in (
        (flat, block, ValueError, rf"x must have shape {sequences} with D = 12.*One sequence goes"),
        (x[..., 1:], block, ValueError, r"D = 12, the d_model of the block; got \(2, 7, 11\)"),
        (1j * x, block, TypeError, "x must have a real dtype, got complex64"),
        (x, functools.partial(step, cache=cache), ValueError, rf"{tokens} with D = 12.*x\[:, t\]"),
        (x[:1], functools.partial(block, cache=cache), ValueError, f"cache.conv .*{conv}"),
        (x, functools.partial(block, cache=cache._replace(scan=x)), ValueError, "cache.scan must"),
        (x, functools.partial(block, cache=x), TypeError, named),
        (x, functools.partial(block, cache=its), TypeError, f"got jaxkern.nn.{other.block.name}.C"),
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


@KIND
def test_block_is_one_row_of_a_table(kind):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            block = getattr(jk_linen, kind.layer)(12, **kind.options)
            return block(x, block.init_cache(1))

    x = jnp.ones((1, 2, 12))
    rows = Model().tabulate(jax.random.key(0), x, console_kwargs={"width": 200, "no_color": True})
    assert rows.count(f"{kind.layer}_0") == 1
    assert f"{kind.layer} (" not in rows  # as methods beside __call__ would be


def test_block_of_one_sequence_in_equinox(blocks):
    block, x = blocks.layers["equinox"], normal(2, 7, 12)
    expected = expected_of(blocks, x)
    run = jit(jax.vmap(functools.partial(block, return_cache=True)))
    out, cache = run(x)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, block.init_cache(2))
    single = jax.eval_shape(block.step, x[0, 0], block.init_cache())
    assert jax.tree.map(jnp.shape, single) == ((12,), jax.tree.map(jnp.shape, block.init_cache()))


@LIBRARY
@KIND
def test_block_with_biases_of_the_projections_and_none_of_the_convolution(kind, library):
    options = kind.options | {"use_bias": True, "use_conv_bias": False}
    sizes, x = kind.sizes(**options), normal(2, 5, 12)
    shapes = kind.shapes(sizes)
    assert shapes.keys() == {*kind.block.weights._fields} - {"conv_bias"}
    weights = {name: normal(*shape, scale=0.3) for name, shape in shapes.items()}
    block = in_every_library(kind.layer, 12, weights=weights, **options)[library]
    expected = np.stack([kind.float64(kind.block.weights_from(weights), sizes, row) for row in x])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-5)
    close(jit(block)(x), expected)
    first, cache = block(x[:, :-1], return_cache=True)
    close(first, expected[:, :-1])
    close(step_of(block, library)(x[:, -1], cache)[0], expected[:, -1])


@KIND
def test_layers_have_the_parameters_and_options_of_the_block(kind):
    """Their names, shapes and defaults, and as many as there are by default."""
    inits = kind.block.initializers(kind.block.sizes(32), n_layers=4)
    assert inits.keys() == {*kind.block.weights._fields} - {"in_bias", "out_bias"}
    expected = {name: (shape, jnp.dtype(FP32)) for name, (_, shape) in inits.items()}
    key, x = jax.random.key(0), jnp.ones((1, 1, 32))
    in_nnx, in_linen, in_equinox = (
        getattr(module, kind.layer) for module in (jk_nnx, jk_linen, jk_equinox)
    )
    layer = nnx.eval_shape(lambda: in_nnx(32, n_layers=4, rngs=nnx.Rngs(0)))
    for made in (
        nnx.to_pure_dict(nnx.state(layer)),
        jax.eval_shape(in_linen(32, n_layers=4).init, key, x)["params"],
        given(eqx.filter_eval_shape(in_equinox, 32, n_layers=4, key=key).weights),
    ):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == expected
    sizes, attributes = (inspect.signature(f).parameters for f in (kind.block.sizes, in_linen))
    assert {name: attributes[name].default for name in sizes} == {
        name: option.default for name, option in sizes.items()
    }


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
    assert w.x_proj.shape == (64, 2 + 2 * 16)


@LIBRARY
def test_block_in_bfloat16(blocks, library):
    weights, kind = given(blocks.weights), blocks.kind
    if library == "equinox":
        weights = Policy.parse("bf16").cast_to_compute(weights)
    block = in_every_library(kind.layer, 12, weights=weights, dtype=BF16, **kind.options)[library]
    x = normal(2, 7, 12, dtype=BF16)
    out = jit(block)(x)
    assert out.dtype == BF16
    expected = expected_of(blocks, x)
    error = np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()
    assert 0 < error < 4 * 2**-8


@LIBRARY
@KIND
def test_a_loop_can_carry_a_cache(kind, library):
    """It keeps its dtypes, whatever those of parameters and tokens."""
    options, key = kind.options, jax.random.key(0)
    module = {"nnx": jk_nnx, "linen": jk_linen, "equinox": jk_equinox}[library]
    make = functools.partial(getattr(module, kind.layer), 12, **options)
    for dtype in (FP32, BF16):
        tokens = jnp.ones((2, 12), dtype)
        if library == "nnx":
            block = make(param_dtype=dtype, rngs=nnx.Rngs(0))
        elif library == "linen":
            unbound = make(param_dtype=dtype)
            block = unbound.bind(unbound.init(key, tokens[:, None]))
        else:
            block = make(dtype=dtype, key=key)
        cache = block.init_cache(2)
        for out, after in (
            jax.eval_shape(block.step, tokens, cache),
            jax.eval_shape(functools.partial(block, return_cache=True), tokens[:, None], cache),
        ):
            assert out.dtype == dtype
            assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, cache)


# Stacks of layers


def in_nnx(kind, x):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = jk_nnx.RMSNorm(8, rngs=rngs)
            self.block = getattr(jk_nnx, kind.layer)(8, **kind.options, rngs=rngs)

        def __call__(self, x):
            return x + self.block(self.norm(x))

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
                return nnx.remat(Block.__call__, policy=remat.CHEAP)(block, x)

            return (run(blocks, x) ** 2).sum()

        return nnx.value_and_grad(loss)(blocks, x)

    loss, grads = stacked(blocks, x)
    graphdef, params = nnx.split(blocks)
    return loss, grads, params, lambda params, x: nnx.merge(graphdef, params)(x)


def in_linen(kind, x):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _=None):
            block = getattr(jk_linen, kind.layer)(8, **kind.options)
            return x + block(jk_linen.RMSNorm()(x)), None

    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    stack = linen.scan(linen.remat(Block, policy=remat.SCAN), **over)()
    params = stack.init(jax.random.key(0), x)
    loss = lambda params: (stack.apply(params, x)[0] ** 2).sum()
    return *jit(jax.value_and_grad(loss))(params), params, lambda p, x: Block().apply(p, x)[0]


def in_equinox(kind, x):
    class Block(eqx.Module):
        norm: jk_equinox.RMSNorm
        block: eqx.Module

        def __call__(self, x):
            return x + self.block(self.norm(x))

    def make(key):
        block = getattr(jk_equinox, kind.layer)(8, **kind.options, key=key)
        return Block(jk_equinox.RMSNorm(8), block)

    blocks = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 2))
    params, static = eqx.partition(blocks, eqx.is_array)
    run = lambda params, x: eqx.combine(params, static)(x)

    def loss(params):
        body = jax.checkpoint(lambda x, params: (run(params, x), None))
        return (jax.lax.scan(body, x, params)[0] ** 2).sum()

    return *jit(jax.value_and_grad(loss))(params), params, run


@pytest.mark.parametrize("stacked", [in_nnx, in_linen, in_equinox])
@KIND
def test_stacks_are_scanned_and_rematerialised(kind, stacked):
    """As layer by layer, with `jax.vmap` over the batch."""
    x = normal(2, 5, 8)
    loss, grads, params, run = stacked(kind, x)

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
    ("kind", "library"),
    [
        (MAMBA, "nnx"),
        pytest.param(MAMBA, "linen", marks=pytest.mark.compiled),
        pytest.param(MAMBA, "equinox", marks=pytest.mark.compiled),
        pytest.param(MAMBA2, "nnx", marks=pytest.mark.compiled),
        pytest.param(MAMBA2, "linen", marks=pytest.mark.compiled),
    ],
    ids=lambda value: value if isinstance(value, str) else value.block.name,
)
def test_block_by_the_kernels_is_the_papers(kind, library):
    """Results and all gradients, and tokens fed one by one after a prompt."""
    width, batch, length = (128, 2, 100) if check.ON_GPU else (4, 1, 9)
    options = {} if check.ON_GPU else {"d_state": 2}
    # The kernels of ssd take no float32.
    dtype, how = (FP32, {}) if kind is MAMBA else (BF16, {"dtype": BF16})
    sizes = kind.block.sizes(width, **options)
    inits, as_weights = kind.block.initializers(sizes), kind.block.weights_from
    keys = jax.random.split(jax.random.key(0), len(inits))
    weights = {
        name: init(key, shape, FP32)
        for key, (name, (init, shape)) in zip(keys, inits.items(), strict=True)
    }
    # As the weights have them, which is the order of gradients.
    weights = given(as_weights(weights))
    x = normal(batch, length, width, dtype=dtype)

    def layer(implementation, weights):
        options_of = options | how | {"implementation": implementation}
        return in_every_library(kind.layer, width, weights=weights, **options_of)[library]

    def run(x, *arrays, implementation="xla"):
        return layer(implementation, dict(zip(weights, arrays, strict=True)))(x)

    def decoded(weights, x):
        block = layer("mosaic", weights)
        step = step_of(block, library)
        first, cache = block(x[:, :-2], return_cache=True)
        one = lambda cache, x: step(x, cache)[::-1]
        _, rest = jax.lax.scan(one, cache, x[:, -2:].swapaxes(0, 1))
        return jnp.concatenate([first, rest.swapaxes(0, 1)], 1)

    def oracle(x, *arrays):
        wide = as_weights(dict(zip(weights, arrays[:-1], strict=True)))
        return block_float64(kind, sizes, wide, x, arrays[-1])

    with jax.default_matmul_precision("highest"), check.running("mosaic"):
        check.check_accuracy(run, run, oracle, (x, *weights.values()), "mosaic")
        tokens, whole = jax.jit(decoded)(weights, x), jax.jit(run)(x, *weights.values())
    want = np.stack([kind.float64(as_weights(weights), sizes, row) for row in x])
    errors = [check.relative_error(y, want) for y in (tokens, whole)]
    assert errors[0] <= 2 * errors[1] + 2 * float(jnp.finfo(dtype).eps)
