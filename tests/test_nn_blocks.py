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
from jaxkern.nn import mamba2, remat
from jaxkern.precision import Policy
from tests import check
from tests.layers import (
    BF16,
    FP32,
    KIND,
    KINDS,
    LIBRARIES,
    LIBRARY,
    MAMBA,
    MAMBA2,
    K,
    in_every_library,
    jit,
    normal,
    sparsely,
)

TWO_KINDS = KINDS.values()


def test_swiglu():
    shapes = {"gate_proj": (K, 24), "up_proj": (K, 24), "down_proj": (24, K)}
    draw = lambda seed, shape: {"kernel": normal(*shape, seed=seed, scale=0.25)}
    weights = {name: draw(seed, shape) for seed, (name, shape) in enumerate(shapes.items())}
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


@functools.cache
def blocks_of(kind, **options):
    """A block of a kind: its sizes, its weights, and its layer in each library."""
    options = kind.options | options
    sizes = kind.sizes(**options)
    weights = {
        name: normal(*shape, seed=seed, scale=0.3)
        for seed, (name, shape) in enumerate(kind.shapes(sizes).items())
    }
    layers = in_every_library(kind.layer, 12, weights=weights, **options)
    weights = kind.block.weights_from(weights)
    tokens = functools.partial(kind.tokens, weights, sizes)
    return types.SimpleNamespace(sizes=sizes, weights=weights, layers=layers, tokens=tokens)


def step_of(block, library):
    return functools.partial(block, method="step") if library == "linen" else block.step


def expected_of(blocks, x):
    return np.stack([blocks.tokens(row)[0] for row in x])


def cache_of(kind, carries):
    """What is carried from token to token, a carry for each sequence."""
    windows, states = (np.stack(arrays).astype(np.float32) for arrays in zip(*carries, strict=True))
    cache = type(kind.block.init_cache(kind.sizes(), 1, FP32))
    return cache(windows[:, :, 1:].swapaxes(1, 2), states)


BIASES = {"plain": {}, "biases": {"use_bias": True, "use_conv_bias": False}}


@sparsely("kind, library, biases", TWO_KINDS, LIBRARIES, BIASES, of=4)
def test_block_is_the_papers(kind, library, biases):
    """In one; packed, after a cache; and token by token after that."""
    blocks, x = blocks_of(kind, **BIASES[biases]), normal(2, 9, 12)
    block, step = blocks.layers[library], step_of(blocks.layers[library], library)
    ids = jnp.array([[0, 0, 0, 1], [0, 1, 1, 1]])

    @jit
    def run(x, cache):
        # Equinox's take a sequence, too.
        whole = (jax.vmap(block) if library == "equinox" else block)(x)
        packed, after = block(x[:, 2:6], cache, segment_ids=ids, return_cache=True)
        one = lambda cache, x: step(x, cache)[::-1]
        last, rest = jax.lax.scan(one, after, x[:, 6:].swapaxes(0, 1))
        return whole, jnp.concatenate([packed, rest.swapaxes(0, 1)], 1), after, last

    before = [blocks.tokens(row[:2])[1] for row in x]
    whole, parts, *caches = run(x, cache_of(kind, before))
    want, carries = [], []
    for row, carry, ends in zip(x, before, (5, 3), strict=True):
        first, _ = blocks.tokens(row[2:ends], carry)
        second, after = blocks.tokens(row[ends:6])
        rest, last = blocks.tokens(row[6:], after)
        want.append(np.concatenate([first, second, rest]))
        carries.append((after, last))
    expected = expected_of(blocks, x)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    atol = {"plain": 1e-5, "biases": 3e-5}[biases]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol)
    close(parts, np.stack(want))
    for cache, of_rows in zip(caches, zip(*carries, strict=True), strict=True):
        jax.tree.map(close, cache, cache_of(kind, of_rows))


@pytest.mark.parametrize("kind", [MAMBA, pytest.param(MAMBA2, marks=pytest.mark.exhaustive)])
def test_block_goes_on_in_unequal_parts(kind):
    """Of one token, of none and of several."""
    blocks, x = blocks_of(kind), normal(2, 6, 12)
    block = blocks.layers["nnx"]

    @jit
    def run(x):
        outs, cache = [], None
        for part in jnp.split(x, (1, 1, 4), axis=1):
            out, cache = block(part, cache, return_cache=True)
            outs.append(out)
        return jnp.concatenate(outs, 1)

    np.testing.assert_allclose(run(x), expected_of(blocks, x), rtol=1e-5, atol=1e-5)


@sparsely("kind, library", TWO_KINDS, LIBRARIES)
def test_block_names_what_does_not_fit(kind, library):
    block, x, one = blocks_of(kind).layers[library], jnp.ones((2, 7, 12)), library == "equinox"
    step = step_of(block, library)
    other = MAMBA if kind is MAMBA2 else MAMBA2
    cache, its = (each.block.init_cache(each.sizes(), 2, FP32) for each in (kind, other))
    conv = re.escape(str((1, *cache.conv.shape[1:])))
    named = re.escape(f"cache must be a jaxkern.nn.{kind.block.name}.Cache, ")
    sequences = r"\(L, D\) or \(B, L, D\)" if one else r"\(B, L, D\)"
    tokens = r"\(D\) or \(B, D\)" if one else r"\(B, D\)"
    flat = x[0, 0] if one else x[0]
    ids = jnp.zeros((2, 6), int)
    with_cache = lambda cache: functools.partial(block, cache=cache)
    for wrong, call, error, message in (
        (flat, block, ValueError, rf"x must have shape {sequences} with D = 12.*One sequence goes"),
        (x[..., 1:], block, ValueError, r"D = 12, the d_model of the block; got \(2, 7, 11\)"),
        (1j * x, block, TypeError, "x must have a real dtype, got complex64"),
        (x, functools.partial(step, cache=cache), ValueError, rf"{tokens} with D = 12.*x\[:, t\]"),
        (x[:1], with_cache(cache), ValueError, f"cache.conv .*{conv}"),
        (x, with_cache(cache._replace(scan=x)), ValueError, "cache.scan must"),
        (x, with_cache(x), TypeError, named),
        (x, with_cache(its), TypeError, f"got jaxkern.nn.{other.block.name}.C"),
        (x[:, 0], functools.partial(step, cache=None), TypeError, "cache must be .*got NoneType"),
        (
            *(x, functools.partial(block, segment_ids=ids), ValueError),
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


@KIND
def test_block_of_one_sequence_in_equinox(kind):
    block, x = blocks_of(kind).layers["equinox"], jnp.ones((2, 7, 12))
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    run = jax.vmap(functools.partial(block, return_cache=True))
    assert shapes(jax.eval_shape(run, x)) == shapes((x, block.init_cache(2)))
    single = jax.eval_shape(block.step, x[0, 0], block.init_cache())
    assert shapes(single) == shapes((x[0, 0], block.init_cache()))


@KIND
def test_layers_have_the_parameters_and_options_of_the_block(kind):
    """Their names, shapes and defaults, and as many as there are by default."""
    inits = kind.block.initializers(kind.block.sizes(32), n_layers=4)
    assert inits.keys() == {*kind.block.weights._fields} - {"in_bias", "out_bias"}
    biased = kind.sizes(use_bias=True, use_conv_bias=False)
    assert kind.shapes(biased).keys() == {*kind.block.weights._fields} - {"conv_bias"}
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


@KIND
def test_blocks_begin_as_in_the_papers_code(kind):
    options = {"headdim": 1, "d_state": 16} if kind is MAMBA2 else {}
    inits = kind.block.initializers(kind.block.sizes(32, **options), n_layers=4)
    inits |= {"dt_bias": (inits["dt_bias"][0], (100_000,))}
    draw = lambda key: {name: init(key, shape, FP32) for name, (init, shape) in inits.items()}
    w = jax.tree.map(np.asarray, kind.block.weights(**jit(draw)(jax.random.key(0))))
    dt, A = np.log1p(np.exp(np.float64(w.dt_bias))), np.exp(w.A_log)
    np.testing.assert_allclose((dt.min(), np.median(dt), dt.max()), (1e-3, 1e-2, 1e-1), rtol=0.02)
    assert 0.0999 < dt.max() <= 0.1001
    np.testing.assert_array_equal(w.D, 1)
    if kind is MAMBA:
        np.testing.assert_allclose(A[5], np.arange(1, 17), rtol=1e-5)
        assert w.x_proj.shape == (64, 2 + 2 * 16)
    else:
        assert 1 < A.min() < 2
        assert 15 < A.max() < 16
        np.testing.assert_array_equal(w.norm_weight, 1)
    bounds = {"in_proj": 32**-0.5, "conv_weight": 0.5, "out_proj": 64**-0.5 / 2}
    for name, bound in bounds.items():
        assert 0.95 * bound < np.abs(getattr(w, name)).max() <= bound


@sparsely("kind, library", TWO_KINDS, ("linen", "nnx", "equinox"), of=4)
def test_block_in_bfloat16(kind, library):
    blocks, x = blocks_of(kind), normal(2, 7, 12, dtype=BF16)
    weights, options = given(blocks.weights), kind.options | {"dtype": BF16}
    if library == "equinox":
        weights = Policy.parse("bf16").cast_to_compute(weights)
    out = jit(in_every_library(kind.layer, 12, weights=weights, **options)[library])(x)
    assert out.dtype == BF16
    want = expected_of(blocks, x)
    assert 0 < np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max() < 4 * 2**-8


@LIBRARY
@KIND
def test_a_loop_can_carry_a_cache(kind, library):
    """It keeps its dtypes, whatever those of parameters and tokens."""
    weights = jax.tree.map(BF16, given(blocks_of(kind).weights))
    block = in_every_library(kind.layer, 12, weights=weights, **kind.options)[library]
    cache, tokens = kind.block.init_cache(kind.sizes(), 2, FP32), jnp.ones((2, 3, 12), BF16)
    for x, run in (
        (tokens, functools.partial(block, return_cache=True)),
        (tokens[:, 0], step_of(block, library)),
    ):
        out, after = jax.eval_shape(lambda x, cache: run(x, cache=cache), x, cache)  # noqa: B023
        assert out.dtype == BF16
        assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, cache)


# What the Mamba-2 block has of its own


@pytest.mark.parametrize(
    "options",
    [
        {"norm_groups": 1, "dt_limit": (0.04, 0.06), "norm_eps": 0.1},
        pytest.param({"headdim": 1, "ngroups": 16}, marks=pytest.mark.exhaustive),
        pytest.param({"norm_groups": 8, "ngroups": 1, "headdim": 16}, marks=pytest.mark.exhaustive),
        pytest.param({"D": (4, 4)}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_mamba2_of_other_sizes(options):
    """Norms of other groups than the scan's, limits of step sizes, one head, heads of a channel,
    weights of the input for each channel; and a last token by the step."""
    options = {"d_state": 3, "d_conv": 3, "headdim": 4, "ngroups": 2} | options
    D = options.pop("D", None)
    sizes = mamba2.Sizes(8, **options)
    weights, x = mamba2_weights(sizes), normal(2, 9, 8, seed=1)
    weights = weights if D is None else weights._replace(D=normal(*D, seed=2))

    @jax.jit
    def run(weights, x):
        out, cache = mamba2.mamba2(weights, sizes, x[:, :-1], return_cache=True)
        last, _ = mamba2.mamba2_step(weights, sizes, x[:, -1], cache)
        return jnp.concatenate([out, last[:, None]], 1)

    want = np.stack([MAMBA2.float64(weights, sizes, row) for row in x])
    check.assert_close(run(weights, x), want, 1e-6)


def mamba2_weights(sizes):
    """Random parameters, with the rates and step sizes of a block at the start of its training."""
    rng = np.random.default_rng(0)
    biased = mamba2.initializers(mamba2.Sizes(**vars(sizes) | {"use_bias": True}))
    values = {name: 0.5 * rng.normal(size=shape) for name, (_, shape) in biased.items()}
    values |= {"A_log": np.log(rng.uniform(1, 16, sizes.heads)), "dt_bias": values["dt_bias"] - 3}
    return mamba2.Weights(**{n: jnp.asarray(v, jnp.float32) for n, v in values.items()})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_state": 0}, ValueError, "d_state must be at least 1, got 0"),
        ({"d_conv": 4.0}, TypeError, r"d_conv must be a whole number, got 4\.0"),
        ({"norm_groups": "1"}, TypeError, "norm_groups must be a whole number or None, got '1'"),
        ({"use_bias": 1}, TypeError, "use_bias must be True or False, got 1"),
        ({"norm_eps": 0}, ValueError, "norm_eps must be above 0 and finite, got 0"),
        ({"headdim": 7}, ValueError, r"headdim must divide E = .* = 24, got 7; 6 divides it"),
        ({"headdim": 64}, ValueError, "got 64; 24 divides it"),
        ({"headdim": 4, "ngroups": 4}, ValueError, "ngroups must divide H = .* = 6, got 4; 3 div"),
        ({"headdim": 4, "norm_groups": 5}, ValueError, "norm_groups must divide E .*24, got 5; 4"),
        ({"headdim": 4, "dt_limit": (1, 0)}, ValueError, "dt_limit must be .* low <= high, got"),
        ({"headdim": 4, "dt_limit": 1}, TypeError, "dt_limit must be two numbers"),
    ],
)
def test_mamba2_names_sizes_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        mamba2.Sizes(12, **options)


def test_sizes_from_a_file_are_those_given():
    """JSON has lists for tuples, and other libraries' numbers are whole numbers, too."""
    sizes = mamba2.Sizes(np.int64(12), headdim=np.int32(4), dt_limit=[0, 1])
    assert sizes == mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0))
    assert hash(sizes) == hash(mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0)))


# Stacks of layers: the loss and its gradients by the norms' weights and the blocks'


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

    @nnx.jit
    def stacked(x):
        def loss(blocks, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(block, x):
                return nnx.remat(Block.__call__, policy=remat.CHEAP)(block, x)

            return (run(blocks, x) ** 2).sum()

        blocks = make(nnx.Rngs(0))
        return *nnx.value_and_grad(loss)(blocks, x), nnx.state(blocks)

    loss, *trees = stacked(x)
    trees = map(nnx.to_pure_dict, trees)
    return loss, *((tree["norm"]["scale"], tree["block"]) for tree in trees)


def in_linen(kind, x):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _=None):
            block = getattr(jk_linen, kind.layer)(8, **kind.options, name="block")
            return x + block(jk_linen.RMSNorm(name="norm")(x)), None

    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    stack = linen.scan(linen.remat(Block, policy=remat.SCAN), **over)()

    @jit
    def run(x):
        params = stack.init(jax.random.key(0), x)
        loss = lambda params: (stack.apply(params, x)[0] ** 2).sum()
        return *jax.value_and_grad(loss)(params), params

    loss, *trees = run(x)
    trees = [tree["params"] for tree in trees]
    return loss, *((tree["norm"]["scale"], tree["block"]) for tree in trees)


def in_equinox(kind, x):
    class Block(eqx.Module):
        norm: jk_equinox.RMSNorm
        block: eqx.Module

        def __call__(self, x):
            return x + self.block(self.norm(x))

    def make(key):
        block = getattr(jk_equinox, kind.layer)(8, **kind.options, key=key)
        return Block(jk_equinox.RMSNorm(8, 1e-6, use_bias=False), block)

    @eqx.filter_jit
    def run(x):
        blocks = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 2))
        params, static = eqx.partition(blocks, eqx.is_array)

        def loss(params):
            layer = lambda x, params: (eqx.combine(params, static)(x), None)
            return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).sum()

        return *jax.value_and_grad(loss)(params), params

    loss, *trees = run(x)
    return loss, *((tree.norm.weight, given(tree.block.weights)) for tree in trees)


@functools.cache
def stack_reference(kind):
    """Layer by layer, with no layers of a library and nothing rematerialised."""
    sizes = kind.sizes(8)

    def loss(weights, x):
        for i in range(2):
            scale, block = jax.tree.map(lambda leaf, i=i: leaf[i], weights)
            rows = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
            x = x + kind.block.apply(kind.block.weights_from(block), sizes, rows)
        return (x**2).sum()

    return jit(jax.value_and_grad(loss))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stacked", [in_nnx, in_linen, in_equinox])
@KIND
def test_stacks_are_scanned_and_rematerialised(kind, stacked):
    x = normal(2, 3, 8)
    loss, grads, weights = stacked(kind, x)
    expected, wanted = stack_reference(kind)(weights, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    for found, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert found.shape[0] == 2
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-4 * float(jnp.abs(leaf).max()))


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "library"),
    [
        pytest.param(MAMBA, "nnx", marks=pytest.mark.exhaustive),
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
