"""Blocks of layers: the recurrent ones, and SwiGLU, are the papers' in every library."""

import functools
import importlib
import inspect
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern
import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import common, mamba2, remat
from tests import check
from tests.check import exhaustive
from tests.layers import (
    BF16,
    FP32,
    GDN,
    KDA,
    KIND,
    KINDS,
    LIBRARIES,
    MAMBA,
    MAMBA2,
    K,
    normal,
    ours,
)


def test_swiglu():
    shapes = {"gate_proj": (K, 24), "up_proj": (K, 24), "down_proj": (24, K)}
    kernels = [normal(*s, seed=seed, scale=0.25) for seed, s in enumerate(shapes.values())]
    weights = {name: {"kernel": kernel} for name, kernel in zip(shapes, kernels, strict=True)}
    x = normal(2, 3, K)
    rows, gate, up, down = (np.asarray(a, np.float64) for a in (x, *kernels))
    hidden = (rows @ gate) / (1 + np.exp(-rows @ gate)) * (rows @ up)
    transposed = [kernel.T for kernel in kernels]
    for library, params in zip(LIBRARIES, (weights, {"params": weights}, transposed), strict=True):
        found = jax.jit(ours(library, "SwiGLU", shapes=True)[1])(params, x)
        np.testing.assert_allclose(found, hidden @ down, rtol=1e-5, atol=1e-4)

    biased = functools.partial(ours, name="SwiGLU", shapes=True, use_bias=True)
    in_nnx, in_linen = biased("nnx")[0], biased("linen")[0]["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(in_nnx, in_linen)
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), in_nnx["down_proj"])
    assert found == {"bias": ((K,), FP32), "kernel": ((24, K), FP32)}


def given(weights):
    return {name: leaf for name, leaf in weights._asdict().items() if leaf is not None}


@functools.cache
def weights_of(kind, **options):
    inits = kind.block.initializers(kind.sizes(**options)).items()
    draw = lambda seed, shape: normal(*shape, seed=seed, scale=0.3)
    return kind.block.weights_from(
        {name: draw(seed, shape) for seed, (name, (_, shape)) in enumerate(inits)}
    )


def by_library(weights):
    """The parameters of a layer with these weights, in each library."""
    named = given(weights)
    return {"nnx": named, "linen": {"params": named}, "equinox": [*named.values()]}


def block_of(kind, library, weights, width=12, **options):
    """The layer with these weights: (x, ...) -> result, and with `method` its other methods."""
    _, run = ours(library, kind.layer, width, shapes=True, **options)
    return functools.partial(run, by_library(weights)[library])


def check_block(kind, library, options, **weights):
    """Checks a sequence in one; in parts of one token, of none, and packed; and token by token."""
    options = kind.options | options
    sizes, weights = kind.sizes(**options), weights_of(kind, **options)._replace(**weights)
    block = block_of(kind, library, weights, **options)
    tokens = functools.partial(kind.tokens, weights, sizes)
    ids, x = jnp.array([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]), normal(2, 9, 12)

    @jax.jit
    def run(x):
        # Equinox's take a sequence, too.
        whole = (jax.vmap(block) if library == "equinox" else block)(x)
        one, cache = block(x[:, :1], return_cache=True)
        none, before = block(x[:, 1:1], cache, return_cache=True)
        packed, after = block(x[:, 1:6], before, segment_ids=ids, return_cache=True)
        step = lambda cache, x: block(x, cache, method="step")[::-1]
        last, rest = jax.lax.scan(step, after, x[:, 6:].swapaxes(0, 1))
        parts = jnp.concatenate([one, none, packed, rest.swapaxes(0, 1)], 1)
        return whole, parts, (before, after, last)

    whole, parts, caches = run(x)
    want, carries = [], []
    for row, ends in zip(x, (5, 3), strict=True):
        first, before = tokens(row[:1])
        second, _ = tokens(row[1:ends], before)
        packed, after = tokens(row[ends:6])
        rest, last = tokens(row[6:], after)
        want.append(np.concatenate([first, second, packed, rest]))
        carries.append((before, after, last))
    check.assert_close(whole, [np.stack([tokens(row)[0] for row in x])], 1e-6)
    check.assert_close(parts, [np.stack(want)], 1e-6)
    for cache, of_rows in zip(caches, zip(*carries, strict=True), strict=True):
        windows, states = map(np.stack, zip(*of_rows, strict=True))
        check.assert_close(cache, (windows[:, :, 1:].swapaxes(1, 2), states), 1e-6)


OPTIONS = {"plain": {}, "biases": {"use_bias": True, "use_conv_bias": False}}


@check.combinations("kind library options", KINDS, ["nnx", "equinox", "linen"], OPTIONS, few=4)
def test_block_is_the_papers(kind, library, options):
    check_block(kind, library, options)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_groups": 1, "dt_limit": (0.6, 0.9), "norm_eps": 0.1},
        exhaustive({"headdim": 1, "ngroups": 24}),
        exhaustive({"norm_groups": 8, "ngroups": 1, "headdim": 24}),
    ],
    ids=str,
)
def test_mamba2_of_other_sizes(options):
    """Varies groups of norms, limits of step sizes and heads, with a D for each channel."""
    sizes = MAMBA2.sizes(**options)
    check_block(MAMBA2, "nnx", options, D=normal(sizes.heads, sizes.headdim, seed=9))


def of_qwen(torch, transformers):
    """The layer of Qwen3-Next, and its weights as ours: its columns are by key heads."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 4}
    sizes |= {"conv_kernel_dim": 3}
    config = transformers.Qwen3NextConfig(
        hidden_size=12, rms_norm_eps=1e-5, **{f"linear_{name}": n for name, n in sizes.items()}
    )
    layer = module.Qwen3NextGatedDeltaNet(config, 0)

    def taken(named):
        qkvz = named["in_proj_qkvz.weight"].reshape(2, -1, 12)  # (G, columns of a group, D)
        ba = named["in_proj_ba.weight"].reshape(2, -1, 12)
        parts = [*np.split(qkvz, [3, 6, 14], axis=1), *np.split(ba, 2, axis=1)]
        columns = np.concatenate([part.reshape(-1, 12) for part in parts])
        return {"in_proj": columns.T, "head_norm": named["norm.weight"]}

    return layer, taken


def of_kimi(torch, transformers):
    """The layer of Kimi Linear, and its weights as ours."""
    module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    sizes = {"head_dim": 4, "num_heads": 3, "conv_kernel_dim": 3}
    config = transformers.KimiLinearConfig(
        hidden_size=12, rms_norm_eps=1e-5, **{f"linear_{name}": n for name, n in sizes.items()}
    )
    layer = module.KimiLinearDeltaAttention(config, 0)

    def taken(named):
        gate = "forget_gate"
        names = "q_proj", "k_proj", "v_proj", "b_proj", f"{gate}.f_a_proj", "g_a_proj"
        return {
            "in_proj": np.concatenate([named[f"{name}.weight"] for name in names]).T,
            "head_norm": named["o_norm.weight"],
            "out_proj": named["o_proj.weight"].T,
            "f_proj": named[f"{gate}.f_b_proj.weight"].T,
            "g_proj": named["g_b_proj.weight"].T,
            "A_log": named[f"{gate}.A_log"].reshape(-1),
            "dt_bias": named[f"{gate}.dt_bias"],
        }

    return layer, taken


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize(
    ("kind", "theirs", "options"),
    [(GDN, of_qwen, {}), (KDA, of_kimi, {"d_key": 4, "gate_rank": None})],
    ids=["Qwen3-Next", "Kimi Linear"],
)
def test_blocks_are_those_of_transformers(kind, theirs, options):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    layer, taken = theirs(torch, transformers)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.copy_(torch.from_numpy(0.3 * rng.normal(size=leaf.shape) + 0.1))
    x = np.float32(rng.normal(size=(2, 70, 12)))  # more than one of their chunks
    with torch.no_grad():
        expected = layer(torch.from_numpy(x)).numpy()
    named = {name: leaf.detach().numpy() for name, leaf in layer.named_parameters()}
    weights = {"A_log": named.get("A_log"), "dt_bias": named.get("dt_bias")}
    weights |= {"conv_weight": named["conv1d.weight"][:, 0]}
    weights |= {"out_proj": named["out_proj.weight"].T} if "out_proj.weight" in named else {}
    weights = jax.tree.map(jnp.asarray, kind.block.weights_from(weights | taken(named)))
    sizes = kind.sizes(**options)
    found = jax.jit(lambda x: kind.block.apply(weights, sizes, x))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-6 * np.abs(expected).max())


@check.combinations("kind library", KINDS, LIBRARIES)
def test_block_names_what_does_not_fit(kind, library):
    block = block_of(kind, library, weights_of(kind), **kind.options)
    x, one = jnp.ones((2, 7, 12)), library == "equinox"
    step = functools.partial(block, method="step")
    other = MAMBA if kind is not MAMBA else MAMBA2
    cache, its = (each.block.init_cache(each.sizes(), 2, FP32) for each in (kind, other))
    conv = re.escape(str((1, *cache.conv.shape[1:])))
    named = re.escape(f"cache must be a {type(cache).__module__}.Cache, ")
    sequences = r"\(L, D\) or \(B, L, D\)" if one else r"\(B, L, D\)"
    of_x = f"x must have shape {sequences} with D = 12.*One sequence goes"
    tokens = r"\(D\) or \(B, D\)" if one else r"\(B, D\)"
    packed = lambda x, shape: block(x, segment_ids=jnp.zeros(shape, int))
    ids = "segment_ids must have shape "
    for call, args, error, message in (
        (block, (x[0, 0] if one else x[0],), ValueError, of_x),
        (block, (x[..., 1:],), ValueError, r"D = 12, the d_model of the block; got \(2, 7, 11\)"),
        (block, (1j * x,), TypeError, "x must have a real dtype, got complex64"),
        (step, (x, cache), ValueError, rf"{tokens} with D = 12.*x\[:, t\]"),
        (block, (x[:1], cache), ValueError, f"cache.conv .*{conv}"),
        (block, (x, cache._replace(scan=x)), ValueError, "cache.scan must"),
        (block, (x, x), TypeError, named),
        (block, (x, its), TypeError, f"got jaxkern.nn.{other.block.name}.C"),
        (step, (x[:, 0], None), TypeError, "cache must be .*got NoneType"),
        (
            packed,
            (x, (2, 6)),
            ValueError,
            rf"{ids}\(2, 7\), that of x without its last axis; got \(2, 6\)",
        ),
        *([(packed, (x[0], (1, 7)), ValueError, rf"{ids}\(7,\)")] if one else []),
    ):
        with pytest.raises(error, match=message):
            call(*args)


WRONG_OPTIONS = [
    ({"n_layers": 0}, ValueError, "n_layers must be at least 1, got 0"),
    ({"n_layers": "2"}, TypeError, "n_layers must be an int, got '2'"),
    ({"return_cache": "no"}, TypeError, "return_cache must be True or False, got 'no'"),
    ({"isolate_nan": 1}, TypeError, "isolate_nan must be True or False, got 1"),
    ({"axis_name": 1}, TypeError, "axis_name must be a mesh axis's name .*, got 1"),
    ({"axis_name": "x"}, ValueError, "axis_name must name an axis of the mesh .*'x' is none"),
    ({"dtype": "wide"}, TypeError, "dtype must be a dtype, got 'wide'"),
]


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
    block = block_of(kind, "equinox", weights_of(kind), **kind.options)
    x, caches = jnp.ones((2, 7, 12)), functools.partial(block, method="init_cache")
    run = jax.vmap(functools.partial(block, return_cache=True))
    chex.assert_trees_all_equal_shapes(jax.eval_shape(run, x), (x, caches(2)))
    single = jax.eval_shape(functools.partial(block, method="step"), x[0, 0], caches())
    chex.assert_trees_all_equal_shapes(single, (x[0, 0], caches()))


@KIND
def test_layers_have_the_parameters_and_options_of_the_block(kind):
    """Compares names, shapes and defaults, and how many there are by default."""
    inits = kind.block.initializers(kind.block.sizes(32), n_layers=4)
    every = {*kind.block.weights._fields} - kind.without - {"A"}  # which follows from A_log
    of_products = {"in_bias", "out_bias"}
    of_conv = set() if kind.block.sizes(32).use_conv_bias else {"conv_bias"}
    assert inits.keys() == every - of_products - of_conv
    for bias, absent in (True, set()), (False, {"conv_bias"}):
        sizes = kind.sizes(use_bias=True, use_conv_bias=bias)
        assert kind.block.initializers(sizes).keys() == every - absent
    expected = {name: jax.ShapeDtypeStruct(shape, FP32) for name, (_, shape) in inits.items()}
    chex.assert_trees_all_equal_shapes_and_dtypes(
        by_library(kind.block.weights_from(expected)),
        {name: ours(name, kind.layer, 32, shapes=True, n_layers=4)[0] for name in LIBRARIES},
    )
    attributes = inspect.signature(getattr(jk_linen, kind.layer)).parameters
    for name, option in inspect.signature(kind.block.sizes).parameters.items():
        assert attributes[name].default == option.default


BEGUN = {
    "mamba": {},
    "mamba2": {"headdim": 1, "d_state": 16},
    "gdn": {"d_key": 1, "d_value": 1},
    "kda": {"d_key": 1, "d_value": 1},
}
LEAST = {"mamba2": 1, "gdn": 0.01, "kda": 1}  # of exp(A_log)


@KIND
def test_blocks_begin_as_in_the_papers_code(kind):
    options = BEGUN[kind.block.name]
    inits = kind.block.initializers(kind.block.sizes(32, **options), n_layers=4)
    inits |= {"dt_bias": (inits["dt_bias"][0], (100_000,))}
    draw = lambda key: {name: init(key, shape, FP32) for name, (init, shape) in inits.items()}
    w = jax.tree.map(np.asarray, kind.block.weights_from(jax.jit(draw)(jax.random.key(0))))
    dt, A = np.log1p(np.exp(np.float64(w.dt_bias))), np.exp(w.A_log)
    np.testing.assert_allclose((dt.min(), np.median(dt), dt.max()), (1e-3, 1e-2, 1e-1), rtol=0.02)
    assert 0.0999 < dt.max() <= 0.1001
    for name in {"D", "norm_weight", "head_norm"} & {*w._fields}:
        np.testing.assert_array_equal(getattr(w, name), 1)
    if kind is MAMBA:
        np.testing.assert_allclose(A[5], np.arange(1, 17), rtol=1e-5)
        assert w.x_proj.shape == (64, 2 + 2 * 16)
    else:
        assert 0 < A.min() - LEAST[kind.block.name] < 1
        assert 15 < A.max() < 16
    bounds = {"in_proj": 32**-0.5, "conv_weight": 0.5, "out_proj": 64**-0.5 / 2}
    for name, bound in bounds.items():
        assert 0.95 * bound < np.abs(getattr(w, name)).max() <= bound


@check.combinations("kind library", KINDS, ["linen", "nnx", "equinox"])
def test_block_in_bfloat16(kind, library):
    weights, x = weights_of(kind), normal(2, 7, 12, dtype=BF16)
    out = jax.jit(block_of(kind, library, weights, **kind.options, dtype=BF16))(x)
    assert out.dtype == BF16
    want = np.stack([kind.float64(weights, kind.sizes(), row) for row in x])
    assert 0 < np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max() < 4 * 2**-8


@check.combinations("kind library", KINDS, LIBRARIES, few=12)
def test_a_loop_can_carry_a_cache(kind, library):
    """The cache keeps its dtypes, whatever those of parameters and tokens."""
    block = block_of(kind, library, jax.tree.map(BF16, weights_of(kind)), **kind.options)
    cache, tokens = kind.block.init_cache(kind.sizes(), 2, FP32), jnp.ones((2, 3, 12), BF16)
    for x, how in ((tokens, {"return_cache": True}), (tokens[:, 0], {"method": "step"})):
        run = functools.partial(block, **how)
        out, after = jax.eval_shape(run, x, cache)
        assert out.dtype == BF16
        chex.assert_trees_all_equal_dtypes(after, cache)


@check.combinations("kind library", KINDS, LIBRARIES, few=2)
def test_block_computes_the_norm_before_it(kind, library):
    block = block_of(kind, library, weights_of(kind, **kind.options), **kind.options)
    x, stream, weight = normal(2, 5, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)

    @jax.jit
    def run(x, stream, weight):
        alone = jaxkern.rms_norm(x, weight, eps=0.1)
        normalised, h = jaxkern.rms_norm(x, weight, residual=stream, eps=0.1)
        norms = common.Norm(weight, None, 0.1), common.Norm(weight, stream, 0.1)
        (of_sum, got), cache = block(x, norm=norms[1], return_cache=True)
        want = block(alone), (*block(normalised, return_cache=True), h)
        return (block(x, norm=norms[0]), (of_sum, cache, got)), want

    check.assert_close(*run(x, stream, weight), 1e-6)
    with pytest.raises(TypeError, match=r"norm must be a .*Norm or None, got one of type str"):
        block(x, norm="rms")


WRONG_SIZES = {
    "mamba": [({"dt_rank": 0}, ValueError, "dt_rank must be at least 1, got 0")],
    "gdn": [
        (
            {"num_heads": 6, "num_key_heads": 4},
            ValueError,
            "key_heads must divide num_heads = 6, .* 3",
        ),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps must be above 0"),
    ],
    "kda": [({"gate_rank": 0.5}, TypeError, "gate_rank must be an int or None, got 0.5")],
}
WRONG_SIZES["mamba2"] = [
    ({"d_state": 0}, ValueError, "d_state must be at least 1, got 0"),
    ({"d_conv": 4.0}, TypeError, r"d_conv must be an int, got 4\.0"),
    ({"norm_groups": "1"}, TypeError, "norm_groups must be an int or None, got '1'"),
    ({"use_bias": 1}, TypeError, "use_bias must be True or False, got 1"),
    ({"norm_eps": 0}, ValueError, "norm_eps must be above 0, got 0"),
    ({"headdim": 7}, ValueError, r"headdim must divide E = .* = 24, got 7; 6 divides it"),
    ({"headdim": 64}, ValueError, "got 64; 24 divides it"),
    ({"headdim": 4, "ngroups": 4}, ValueError, "ngroups must divide H = .* = 6, got 4; 3 div"),
    ({"headdim": 4, "norm_groups": 5}, ValueError, "norm_groups must divide E .*24, got 5; 4"),
    ({"headdim": 4, "dt_limit": (1, 0)}, ValueError, "dt_limit must be .* low <= high, got"),
    ({"headdim": 4, "dt_limit": 1}, TypeError, "dt_limit must be two numbers"),
]


@KIND
def test_block_names_options_that_it_refuses(kind):
    apply = functools.partial(kind.block.apply, weights_of(kind), kind.sizes())
    apply = functools.partial(apply, jnp.ones((1, 4, 12)))
    for options, error, message in WRONG_OPTIONS:
        init = functools.partial(kind.block.initializers, kind.sizes())
        with pytest.raises(error, match=message):
            (init if "n_layers" in options else apply)(**options)
    for options, error, message in WRONG_SIZES[kind.block.name]:
        with pytest.raises(error, match=message):
            kind.block.sizes(12, **options)
    for library in (jk_nnx, jk_equinox):
        layer, name = getattr(library, kind.layer), rf"{kind.layer}.__init__\(\)"
        with pytest.raises(TypeError, match=rf"{name} .*unexpected.*'d_sate'"):
            layer(8, d_sate=4)
        with pytest.raises(TypeError, match=rf"{name} missing.*'(rngs|key)'"):
            layer(8)


def test_sizes_from_a_file_are_those_given():
    """JSON has lists for tuples, and other libraries' numbers are whole numbers, too."""
    sizes = mamba2.Sizes(np.int64(12), headdim=np.int32(4), dt_limit=[0, 1])
    assert sizes == mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0))
    assert hash(sizes) == hash(mamba2.Sizes(12, headdim=4, dt_limit=(0.0, 1.0)))


# Stacks of two layers: the loss, its gradients by the norms' weights and the blocks', and these


def in_nnx(kind, x):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = jk_nnx.RMSNorm(8, rngs=rngs)
            self.block = getattr(jk_nnx, kind.layer)(8, **kind.options, rngs=rngs)

        def __call__(self, x):
            return x + self.block(self.norm(x))

    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs)))
    layer = nnx.remat(Block.__call__, policy=remat.CHEAP)
    stack = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)

    @nnx.jit
    def run(x):
        blocks, loss = make(nnx.Rngs(0)), lambda blocks, x: (stack(blocks, x) ** 2).sum()
        return *nnx.value_and_grad(loss)(blocks, x), nnx.state(blocks)

    loss, *trees = run(x)
    return loss, *map(nnx.to_pure_dict, trees)


def in_linen(kind, x):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _=None):
            block = getattr(jk_linen, kind.layer)(8, **kind.options, name="block")
            return x + block(jk_linen.RMSNorm(name="norm")(x)), None

    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    stack = linen.scan(linen.remat(Block, policy=remat.SCAN), **over)()

    @jax.jit
    def run(x):
        params = stack.init(jax.random.key(0), x)["params"]
        loss = lambda params: (stack.apply({"params": params}, x)[0] ** 2).sum()
        return *jax.value_and_grad(loss)(params), params

    return run(x)


def in_equinox(kind, x):
    class Block(eqx.Module):
        norm: jk_equinox.RMSNorm
        block: eqx.Module

        def __call__(self, x):
            return x + self.block(self.norm(x))

    @eqx.filter_vmap
    def make(key):
        block = getattr(jk_equinox, kind.layer)(8, **kind.options, key=key)
        return Block(jk_equinox.RMSNorm(8, 1e-6, use_bias=False), block)

    @eqx.filter_jit
    def run(x):
        params, static = eqx.partition(make(jax.random.split(jax.random.key(0), 2)), eqx.is_array)

        def loss(params):
            layer = lambda x, params: (eqx.combine(params, static)(x), None)
            return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).sum()

        return *jax.value_and_grad(loss)(params), params

    loss, *trees = run(x)
    named = lambda tree: {"norm": {"scale": tree.norm.weight}, "block": given(tree.block.weights)}
    return loss, *map(named, trees)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stacked", [in_nnx, in_linen, in_equinox])
@KIND
def test_stacks_are_scanned_and_rematerialised(kind, stacked):
    x = normal(2, 3, 8)

    def loss_of(weights):
        """Computes layer by layer, with no layers of a library and nothing rematerialised."""
        out = x
        for i in range(2):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], weights)
            rows = out / jnp.sqrt((out * out).mean(-1, keepdims=True) + 1e-6)
            block = kind.block.weights_from(layer["block"])
            out += kind.block.apply(block, kind.sizes(8), rows * layer["norm"]["scale"])
        return (out**2).sum()

    *found, weights = stacked(kind, x)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(weights)} == {2}
    expected = jax.jit(jax.value_and_grad(loss_of))(weights)
    chex.assert_trees_all_equal_structs(tuple(found), expected)
    check.assert_close(found, expected, 1e-5)


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
        exhaustive(MAMBA, "nnx"),
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
    drawn = zip(keys, inits.items(), strict=True)
    # As the weights have them, which is the order of gradients.
    weights = given(as_weights({name: init(key, s, FP32) for key, (name, (init, s)) in drawn}))
    x = normal(batch, length, width, dtype=dtype)

    def layer(implementation, weights):
        options_of = options | how | {"implementation": implementation}
        return block_of(kind, library, as_weights(weights), width, **options_of)

    def run(x, *arrays, implementation="xla"):
        return layer(implementation, dict(zip(weights, arrays, strict=True)))(x)

    def decoded(weights, x):
        block = layer("mosaic", weights)
        first, cache = block(x[:, :-2], return_cache=True)
        one = lambda cache, x: block(x, cache, method="step")[::-1]
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


@pytest.mark.parametrize("kind", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def test_a_token_of_a_block_is_not_cut_up(kind):
    """Its kernels read the rows that products and convolution give; one slice is of XLA's to fuse.

    It is the gate of mamba2's norm, or what mamba multiplies by dt_proj.
    """
    sizes = kind.block.sizes(64, d_state=64)
    zeros = {name: jnp.zeros(s, BF16) for name, (_, s) in kind.block.initializers(sizes).items()}
    weights, cache = kind.block.weights_from(zeros), kind.block.init_cache(sizes, 2, BF16)
    step = lambda *args: kind.block.step(args[0], sizes, *args[1:])
    text = check.lowered(step, weights, jnp.zeros((2, 64), BF16), cache)
    named = "\n".join(check.kernel_calls(text))
    assert all(name in named for name in ("causal_conv1d_step", "scan_step"))
    assert len(re.findall(r"stablehlo\.(?:dynamic_)?slice", text)) == 1
