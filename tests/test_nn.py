"""Layers: Flax's and Equinox's own parameters, results within rounding, the kernels underneath."""

import functools
import importlib
import sys

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
from jaxkern.nn import mamba
from jaxkern.precision import Policy
from tests import check

K = 40  # features
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32


def jit(f):
    """Unoptimised code of the same program is made much sooner."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda *args, **kwargs: f(*args, **kwargs), compiler_options=options)


def normal(*shape, seed=0, dtype=FP32, scale=1.0):
    values = scale * (np.random.default_rng(seed).normal(size=shape) + 0.3)
    return jnp.asarray(values.astype(dtype))


def moved(tree, seed=1):
    """Parameters away from ones and zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    noise = [normal(*leaf.shape, seed=seed + i, dtype=leaf.dtype) for i, leaf in enumerate(leaves)]
    sums = [jnp.asarray(np.asarray(a) + np.asarray(b)) for a, b in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(treedef, sums)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# Each library's own module of layers and ours; how one is made from a name and its options, and
# run: (layer, its initial parameters, (parameters, x) -> result).


def of_nnx(module, name, **options):
    size = (K, 24) if name == "Linear" else (K,)
    layer = getattr(module, name)(*size, **options, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    return nnx.to_pure_dict(params), lambda params, x: nnx.merge(graphdef, params)(x)


def of_linen(module, name, **options):
    name, size = ("Dense", (24,)) if name == "Linear" else (name, ())
    layer = getattr(module, name)(*size, **options)
    return layer.init(jax.random.key(0), jnp.ones((1, K))), layer.apply


def of_equinox(module, name, **options):
    options.pop("param_dtype", None)
    size = (K,)
    if name == "Linear":
        size, options["key"] = (K, 24), jax.random.key(0)
    layer = getattr(module, name)(*size, **options)
    params, rest = eqx.partition(layer, eqx.is_array)

    def run(params, x):
        layer = eqx.combine(jax.tree.unflatten(jax.tree.structure(params_of), params), rest)
        return jax.vmap(jax.vmap(layer))(x)

    params_of = params
    return jax.tree.leaves(params), run


LIBRARIES = {
    "nnx": (of_nnx, nnx, jk_nnx),
    "linen": (of_linen, linen, jk_linen),
    "equinox": (of_equinox, eqx.nn, jk_equinox),
}


def pair(library, name, **options):
    make, theirs, ours = LIBRARIES[library]
    return make(theirs, name, **options), make(ours, name, **options)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_have_the_parameters_and_results_of_the_librarys_own(library, name):
    options = {"eps" if library == "equinox" else "epsilon": 0.1} if name != "Linear" else {}
    (theirs, run_theirs), (ours, run_ours) = pair(library, name, **options)
    same(theirs, ours)
    x, params = normal(3, 5, K), moved(theirs)

    def loss(run, params, x):
        return jnp.sum(jnp.sin(run(params, x)))

    def both(run, params, x):
        return run(params, x), jax.grad(functools.partial(loss, run), (0, 1))(params, x)

    expected, found = (
        jit(functools.partial(both, run))(params, x) for run in (run_theirs, run_ours)
    )
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)


def norm_float64(name, params, x):
    params = {path[-1].key: np.asarray(leaf, float) for path, leaf in params}
    x = np.asarray(x, np.float64)
    if name == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params.get("bias", 0)


@pytest.mark.parametrize(
    ("x_dtype", "options"),
    [
        (BF16, {}),
        (FP16, {"param_dtype": FP16}),
        (FP32, {"dtype": BF16}),
    ],
)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_dtypes_are_those_of_flax(library, name, x_dtype, options):
    (theirs, run_theirs), (ours, run_ours) = pair(library, name, **options)
    same(theirs, ours)
    x, params = normal(64, K, dtype=x_dtype), moved(theirs)
    expected, found = jit(run_theirs)(params, x), jit(run_ours)(params, x)
    assert found.dtype == expected.dtype
    true = norm_float64(name, jax.tree.leaves_with_path(params), x)
    errors = [np.abs(np.asarray(y, np.float64) - true).max() for y in (expected, found)]
    assert errors[1] <= (2 if found.dtype == FP32 else 1.05) * errors[0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_linear_in_low_precision(library):
    options = {} if library == "equinox" else {"dtype": BF16}
    (theirs, run_theirs), (_, run_ours) = pair(library, "Linear", **options)
    params = moved(theirs)
    if library == "equinox":
        params = Policy.parse("bf16").cast_to_compute(params)
    x = normal(2, 3, K, dtype=BF16)
    expected, found = jit(run_theirs)(params, x), jit(run_ours)(params, x)
    assert found.dtype == expected.dtype == BF16
    np.testing.assert_allclose(found.astype(FP32), expected.astype(FP32), rtol=2**-7, atol=0.05)


def test_a_policy_sets_the_dtypes():
    policy = Policy.parse("params=bfloat16,compute=float16,output=float32")
    options = {"dtype": policy.compute, "param_dtype": policy.params}
    layer = nnx.eval_shape(lambda: jk_nnx.Mamba(16, **options, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(layer)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(BF16)}
    run = lambda params: nnx.merge(graphdef, params)(jnp.ones((1, 2, 16)))
    assert jax.eval_shape(run, params).dtype == FP16
    mlp = jk_equinox.SwiGLU(16, 32, key=jax.random.key(0))
    assert jax.eval_shape(policy.cast_to_compute(mlp), jnp.ones((2, 16), FP16)).dtype == FP16


@pytest.mark.parametrize("use", ["scale", "nothing"])
def test_norms_without_some_parameters(use):
    x = normal(3, K)
    options = {"use_scale": use == "scale", "use_bias": False}
    for library in ("nnx", "linen"):
        (theirs, run_theirs), (ours, run_ours) = pair(library, "LayerNorm", **options)
        same(theirs, ours)
        np.testing.assert_allclose(jit(run_ours)(ours, x), jit(run_theirs)(theirs, x), atol=2e-6)
    options["use_weight"] = options.pop("use_scale")
    for name in ("RMSNorm", "LayerNorm"):
        theirs, ours = (getattr(m, name)(K, **options) for m in (eqx.nn, jk_equinox))
        np.testing.assert_allclose(jit(ours)(x), jit(jax.vmap(theirs))(x), atol=2e-6)


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_what_the_ops_do_not_compute_flax_does(library, name):
    x, mask = normal(3, 5, K), jnp.arange(K) % 3 > 0
    (params, run_theirs), (ours, run_ours) = pair(library, name, reduction_axes=(1, -1))
    same(params, ours)
    np.testing.assert_array_equal(jit(run_ours)(params, x), jit(run_theirs)(params, x))

    _, _, module = LIBRARIES[library]
    if library == "nnx":
        theirs, found = (getattr(m, name)(K, rngs=nnx.Rngs(0)) for m in (nnx, module))
        mosaic = getattr(module, name)(K, implementation="mosaic", rngs=nnx.Rngs(0))
    else:
        made = getattr(linen, name)(), getattr(module, name)()
        mosaic = getattr(module, name)(implementation="mosaic")
        theirs, found, mosaic = (functools.partial(m.apply, params) for m in (*made, mosaic))
    np.testing.assert_array_equal(found(x, mask=mask), theirs(x, mask=mask))
    with pytest.raises(NotImplementedError, match="the kernels take no mask"):
        mosaic(x, mask=mask)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Dropout", "SwiGLU", "Mamba"])
def test_layers_hand_on_the_implementation(name):
    x, key, options = jnp.ones((1, 2, 8)), jax.random.key(0), {"implementation": "cuda"}
    size = {"Dropout": (0.5,), "SwiGLU": (8, 8)}.get(name, (8,))
    off = {"deterministic": False} if name == "Dropout" else {}
    sizes = {"Dropout": (0.5,), "SwiGLU": (8,), "Mamba": (8,)}.get(name, ())
    in_linen = getattr(jk_linen, name)(*sizes, **options, **off)
    rngs = {"params": key, "dropout": key}
    made = {"key": key} if name in ("SwiGLU", "Mamba") else {}
    for make in (
        lambda: getattr(jk_nnx, name)(*size, **options, rngs=nnx.Rngs(0))(x),
        lambda: in_linen.init(rngs, x),
        lambda: getattr(jk_equinox, name)(*size, **options, **made)(x, key=key),
    ):
        with pytest.raises(ValueError, match="implementation must be"):
            jax.eval_shape(make)


def test_axes_in_any_spelling_are_the_last():
    x = normal(3, K)
    for axes in (-1, 1, (-1,), [1]):
        layer = jk_nnx.RMSNorm(
            K, reduction_axes=axes, feature_axes=axes, implementation="xla", rngs=nnx.Rngs(0)
        )
        np.testing.assert_array_equal(layer(x), jaxkern.rms_norm(x, implementation="xla"))


def test_equinox_norms_of_several_axes_and_batches():
    x = normal(2, 3, 4, 10)
    for name in ("RMSNorm", "LayerNorm"):
        theirs, ours = (moved(getattr(m, name)((4, 10))) for m in (eqx.nn, jk_equinox))
        expected = jit(jax.vmap(jax.vmap(theirs)))(x)
        found = jit(jax.vmap(jax.vmap(ours)))(x)
        np.testing.assert_allclose(found, expected, atol=3e-6)
        out, state = jit(ours)(x, 7)
        np.testing.assert_allclose(out, expected, atol=3e-6)
        assert state == 7
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4, 10\)"):
            ours(normal(4, 11))


def test_saved_equinox_leaves_load(tmp_path):
    theirs = moved(eqx.nn.LayerNorm(K))
    eqx.tree_serialise_leaves(tmp_path / "layer", theirs)
    ours = eqx.tree_deserialise_leaves(tmp_path / "layer", jk_equinox.LayerNorm(K))
    same(jax.tree.leaves(theirs), jax.tree.leaves(ours))


def test_equinox_linear_scalars_and_mistakes():
    key = jax.random.key(0)
    scalar = jk_equinox.Linear("scalar", 3, key=key)
    np.testing.assert_array_equal(
        scalar(jnp.float32(2)), eqx.nn.Linear("scalar", 3, key=key)(jnp.float32(2))
    )
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4\)"):
        jk_equinox.Linear(4, 3, key=key)(jnp.ones((4, 5)))


def test_linear_with_options_of_its_own_is_flaxs():
    def doubled(*args, **options):
        return 2 * jax.lax.dot_general(*args, **options)

    x = normal(3, K)
    for library in ("nnx", "linen"):
        (params, run_theirs), (_, run_ours) = pair(library, "Linear", dot_general=doubled)
        np.testing.assert_array_equal(jit(run_ours)(params, x), jit(run_theirs)(params, x))


# Dropout


def test_dropout_drops_by_jaxkerns_mask():
    x, key = jnp.ones((32, 64)), jax.random.key(3)
    expected = jaxkern.dropout(x, 0.25, key)
    assert 0.2 < float((expected == 0).mean()) < 0.3
    same(jk_nnx.Dropout(0.25)(x, rngs=key), expected)
    same(jk_linen.Dropout(0.25, deterministic=False).apply({}, x, rng=key), expected)
    same(jk_equinox.Dropout(0.25)(x, key=key), expected)


def test_dropout_draws_from_the_librarys_streams():
    x = jnp.ones((32, 64))
    layer = jk_nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    first, second = layer(x), layer(x)
    assert 0.3 < float((first != second).mean()) < 0.7
    same(jk_nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))(x), first)
    same(jk_nnx.Dropout(0.5)(x, rngs=nnx.Rngs(dropout=0).fork()), first)
    layer.eval()
    same(layer(x), x)

    layer, rngs = jk_linen.Dropout(0.5), {"dropout": jax.random.key(0)}
    drawn = layer.apply({}, x, deterministic=False, rngs=rngs)
    assert set(np.unique(drawn)) == {0, 2}
    same(layer.apply({}, x, deterministic=True), x)
    off = eqx.nn.inference_mode(jk_equinox.Dropout(0.5))
    same(off(x, key=jax.random.key(0)), x)
    assert set(np.unique(off(x, key=jax.random.key(0), inference=False))) == {0, 2}


def test_dropout_refuses_and_leaves_what_the_library_does():
    x, key = jnp.ones((32, 64)), jax.random.key(0)
    with pytest.raises(ValueError, match="no `rngs` argument was provided"):
        jk_nnx.Dropout(0.5)(x)
    with pytest.raises(Exception, match="deterministic"):
        jk_linen.Dropout(0.5).apply({}, x)
    with pytest.raises(RuntimeError, match="requires a key"):
        jk_equinox.Dropout(0.5)(x)
    for layer in (jk_nnx.Dropout(0.0), jk_equinox.Dropout(0.0)):
        same(layer(x), x)
    options = {"broadcast_dims": (0,), "deterministic": False}
    same(jk_nnx.Dropout(0.5, **options)(x, rngs=key), nnx.Dropout(0.5, **options)(x, rngs=key))
    drawn = jk_linen.Dropout(0.5, **options).apply({}, x, rng=key)
    same(drawn, linen.Dropout(0.5, **options).apply({}, x, rng=key))
    with pytest.raises(NotImplementedError, match="broadcast_dims"):
        jk_nnx.Dropout(0.5, **options, implementation="mosaic")(x, rngs=key)


# SwiGLU and Mamba, the same in every library


def in_every_library(name, *size, weights, **options):
    """The layer in each library as a function of x, from one dict of weights by nnx's names."""
    make = functools.partial(getattr(jk_nnx, name), *size, **options)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    layer = nnx.merge(graphdef, weights)
    sizes = size[1:] if name == "SwiGLU" else size
    module = getattr(jk_linen, name)(*sizes, **options)
    if name == "SwiGLU":
        make = functools.partial(jk_equinox.SwiGLU, *size)
        ours = [weights[part]["kernel"].T for part in ("gate_proj", "up_proj", "down_proj")]
    else:
        options.pop("dtype", None)
        make = functools.partial(jk_equinox.Mamba, *size, **options)
        ours = [weights[part] for part in mamba.Weights._fields if part in weights]
    ours = jax.tree.unflatten(
        jax.tree.structure(eqx.filter_eval_shape(make, key=jax.random.key(0))), ours
    )
    return {
        "nnx": layer,
        "linen": functools.partial(module.apply, {"params": weights}),
        "equinox": ours,
    }


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


LIBRARY = pytest.mark.parametrize("library", LIBRARIES)


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


# What runs on a GPU


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        (lambda: jk_nnx.RMSNorm(256, rngs=nnx.Rngs(0)), "rms_norm"),
        (lambda: jk_nnx.LayerNorm(256, rngs=nnx.Rngs(0)), "layer_norm"),
        (lambda: jk_nnx.SwiGLU(256, 512, rngs=nnx.Rngs(0)), "swiglu"),
    ],
)
def test_layers_run_the_kernels(make, kernel):
    """Those of Mamba are seen to in the language model's test."""
    graphdef, params = nnx.split(make())

    def loss(params, x):
        return nnx.merge(graphdef, params)(x).sum()

    x = jax.ShapeDtypeStruct((2, 64, 256), FP32)
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(params, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"{kernel}_fwd" in text
    assert f"{kernel}_bwd" in text


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


# Missing libraries


@pytest.mark.parametrize(
    ("layers", "missing", "extra"),
    [("flax", "flax", "flax"), ("linen", "flax", "flax"), ("equinox", "equinox", "equinox")],
)
def test_a_missing_library_is_named(monkeypatch, layers, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"jaxkern.nn.{layers}")
    with pytest.raises(ImportError, match=rf'pip install "jaxkern\[{extra}\]"'):
        importlib.import_module(f"jaxkern.nn.{layers}")
