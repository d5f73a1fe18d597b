"""Layers: Flax's and Equinox's own parameters, results within rounding, the kernels underneath.

What the ops do not compute, the layers leave to the library's own, to the last bit.
"""

import functools
import importlib
import itertools
import sys

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
from tests import layers
from tests.check import combinations, lowered
from tests.layers import (
    BF16,
    FP16,
    FP32,
    LIBRARIES,
    NORMS,
    K,
    normal,
    ours,
)

FLAX = ("nnx", "linen")
LAYERS = (*NORMS, "Linear")
BLOCKS = ("Mamba", "Mamba2", "GatedDeltaNet", "KimiDeltaAttention")

same = functools.partial(chex.assert_trees_all_equal, strict=True)


def moved(tree, seed=1):
    """Adds noise to parameters, so that none are ones or zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    noise = [normal(*leaf.shape, seed=seed + i, dtype=leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, map(jnp.add, leaves, noise))


def of_both(library, name, x, *, how=None, transform=lambda run: run, **options):
    """Runs the library's own layer and ours with the same parameters, which it returns first."""
    make, *modules = layers.MODULES[library]
    (theirs, run_theirs), (params, run) = (make(m, name, K, **options) for m in modules)
    same(theirs, params)
    params, how = moved(theirs), how or {}
    runs = [transform(functools.partial(f, **how)) for f in (run_theirs, run)]
    return params, *jax.jit(lambda *args: [f(*args) for f in runs])(params, x)


CASES = (*LAYERS, "RMSNorm, bare", "LayerNorm, bare", "LayerNorm, scale")


@combinations("library case", LIBRARIES, CASES)
def test_layers_have_the_parameters_and_results_of_the_librarys_own(library, case):
    """Compares gradients, too, and norms without some of their parameters."""
    name, _, some = case.partition(", ")
    scale, eps = ("use_weight", "eps") if library == "equinox" else ("use_scale", "epsilon")
    options = {eps: 0.1} if name in NORMS else {}
    options |= {scale: some == "scale"} if some else {}
    if some and (library == "equinox" or name == "LayerNorm"):
        options["use_bias"] = False

    def with_gradients(f):
        loss = lambda params, x: jnp.sum(jnp.sin(f(params, x)))
        return lambda params, x: (f(params, x), jax.grad(loss, (0, 1))(params, x))

    how = {"transform": with_gradients}
    _, expected, found = of_both(library, name, normal(3, 5, K), **how, **options)
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-5)


KEY = jax.random.key(3)
ONES = jnp.ones((32, 64))
X = normal(2, K, K)
INTEGERS = np.random.default_rng(0).integers(-999, 999, (2, 3, K))
DTYPES = {
    "bf16": (BF16, {}),
    "fp16": (FP16, {"param_dtype": FP16}),
    "both": (FP32, {"dtype": BF16}),
}


@combinations("library dtypes", FLAX, DTYPES)
def test_dtypes_of_norms_are_those_of_flax(library, dtypes):
    dtype, options = dtypes
    x = normal(64, K, dtype=dtype)
    for name in NORMS:
        params, expected, found = of_both(library, name, x, **options)
        assert found.dtype == expected.dtype
        leaves = jax.tree.leaves_with_path(jax.tree.map(np.float64, params))
        weights, rows = {path[-1].key: leaf for path, leaf in leaves}, np.asarray(x, np.float64)
        rows = rows - rows.mean(-1, keepdims=True) if name == "LayerNorm" else rows
        true = layers.rms_float64(rows, weights["scale"], 1e-6) + weights.get("bias", 0)
        errors = [np.abs(np.asarray(y, np.float64) - true).max() for y in (expected, found)]
        assert errors[1] <= (2 if found.dtype == FP32 else 1.05) * errors[0]


INPUTS = {
    "bf16": (normal(2, 3, K, dtype=BF16), {"dtype": BF16}),
    "integers": (INTEGERS, {}),
    "integers in bf16": (INTEGERS, {"dtype": BF16}),
}


LINEAR_AND_NORMS = [f"{library} {name}" for library in FLAX for name in LAYERS]


@combinations("layer inputs", [*LINEAR_AND_NORMS, "equinox Linear"], INPUTS)
def test_inputs_of_other_dtypes(layer, inputs):
    x, options = inputs
    _, expected, found = of_both(*layer.split(), x, **options)
    assert found.dtype == expected.dtype == options.get("dtype", FP32)
    rtol = 2e-5 if found.dtype == FP32 else 2**-7
    atol = rtol / 4 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(found.astype(FP32), expected.astype(FP32), rtol=rtol, atol=atol)


@combinations("library name", LIBRARIES, ["Linear", "Dropout", "SwiGLU", *NORMS, *BLOCKS])
def test_layers_hand_on_their_dtypes_and_their_implementation(library, name):
    """Results have the layer's dtype and gradients the parameters'; "xla" has forward mode."""
    param_dtype, how = FP32 if library == "equinox" else FP16, {}
    if name == "Dropout":
        options = {"deterministic": False} if library == "linen" else {}
        how = {"nnx": {"rngs": KEY}, "equinox": {"key": KEY}}.get(library, {})
    else:
        options = {"headdim": 8} if name == "Mamba2" else {}
        options |= {"dtype": BF16} | ({"param_dtype": FP16} if library in FLAX else {})
    x = jax.ShapeDtypeStruct((2, 3, K), BF16)

    def made(**others):
        params, run = ours(library, name, shapes=True, **options, **others)
        return params, functools.partial(run, **how)

    params, run = made(implementation="xla")
    tangent_of = lambda params, x, t: jax.jvp(lambda x: run(params, x), (x,), (t,))
    out, tangent = jax.eval_shape(tangent_of, params, x, x)
    assert out.dtype == BF16
    chex.assert_trees_all_equal_shapes_and_dtypes(tangent, out)
    if name != "Dropout":
        params, plain = made()
        loss = lambda params, x: plain(params, x).astype(FP32).sum()
        grads = jax.eval_shape(jax.grad(loss), params, x)
        chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}
    params, wrong = made(implementation="cuda")
    with pytest.raises(ValueError, match="implementation must be"):
        jax.eval_shape(wrong, params, x)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("RMSNorm", "rms_norm"), ("LayerNorm", "layer_norm"), ("SwiGLU", "swiglu")],
)
def test_layers_run_the_kernels(name, kernel):
    """The language model's test sees to the blocks' kernels."""
    params, run = ours("nnx", name, 256, shapes=True)
    gradients = jax.grad(lambda params, x: run(params, x).sum(), (0, 1))
    text = lowered(gradients, params, jax.ShapeDtypeStruct((2, 64, 256), FP32))
    assert f"{kernel}_fwd" in text
    assert f"{kernel}_bwd" in text


# What is left to the library's own


def doubled(*args, **options):
    return 2 * jax.lax.dot_general(*args, **options)


def halved(*arrays, dtype):
    """Promotes to float32, whatever the layer's dtype."""
    return tuple(None if a is None else 0.5 * jnp.asarray(a, FP32) for a in arrays)


OF_NUMPY = {"reduction_axes": (1, 2), "feature_axes": np.int64(1)}
HALVED = {"promote_dtype": lambda arrays, *, dtype: halved(*arrays, dtype=dtype)}
LEFT = {
    "complex": (LIBRARIES, LAYERS, {}, X + 1j * X[::-1], "complex64"),
    "complex parameters": (FLAX, LAYERS, {"param_dtype": jnp.complex64}, X, "complex64"),
    "float64": (LIBRARIES, LAYERS, {}, np.float64(X), "float64"),
    "integers": (["equinox"], NORMS, {}, INTEGERS, "int32"),  # which it rounds to
    "fp8": (FLAX, ["Linear"], {"dtype": jnp.float8_e4m3fn}, X, "float8_e4m3fn"),
    "products": (FLAX, ["Linear"], {"dot_general": doubled}, X, "float32"),
    "axis 1": (FLAX, NORMS, {"reduction_axes": 1}, X, "float32"),
    "feature axis": (FLAX, NORMS, {"reduction_axes": -1, "feature_axes": 1}, X, "float32"),
    "axes 1 and -1": (FLAX, NORMS, {"reduction_axes": (1, -1)}, X, "float32"),
    "axes of NumPy": (FLAX, NORMS, OF_NUMPY, X, "float32"),
    "mask": (FLAX, NORMS, {}, X, "float32"),
    "promotion": (["nnx"], ["Linear"], HALVED, X, "float32"),
    "promotion in linen": (["linen"], ["Linear"], {"promote_dtype": halved}, X, "float32"),
    "promotion of norms": (["nnx"], NORMS, HALVED | {"dtype": FP16}, X, "float16"),
}


def left_cases():
    """Leaves one or two of each case in the default suite, in turn of every library and layer."""
    for at, (case, (libraries, names, *_)) in enumerate(LEFT.items()):
        among = [*itertools.product(libraries, names)]
        for i, (library, name) in enumerate(among):
            marks = [pytest.mark.exhaustive] if (i - at) % min(len(among), 5) else []
            yield pytest.param(case, library, name, marks=marks)


@pytest.mark.parametrize(("case", "library", "name"), [*left_cases()])
def test_what_the_ops_do_not_compute_the_librarys_own_does(case, library, name):
    """Compares to the last bit; a layer made for kernels alone says what is amiss."""
    *_, options, x, dtype = LEFT[case]
    with jax.enable_x64(case == "float64"):
        x = jnp.asarray(x)
        how = {"mask": jnp.arange(K) % 3 > 0} if case == "mask" else {}
        _, expected, found = of_both(library, name, x, how=how, **options)
        same(found, expected)
        assert found.dtype == dtype
        for implementation, error, words in (
            ("mosaic", NotImplementedError, r'\(implementation="mosaic"\) cannot take'),
            ("cuda", ValueError, 'implementation must be "mosaic", "xla" or None'),
        ):
            params, wrong = ours(library, name, **options, implementation=implementation)
            with pytest.raises(error, match=words):
                jax.eval_shape(functools.partial(wrong, **how), params, x)
    if case == "float64":  # which JAX makes float32
        params, run = ours(library, name)
        assert jax.eval_shape(run, params, np.float64(X)).dtype == FP32


def test_parameters_of_another_dtype_than_the_layers():
    """Flax takes the dtypes of what is stored, which `param_dtype` only says of initial values."""
    params = {"params": {"kernel": normal(K, 4) * 1j, "bias": normal(4)}}
    same(jk_linen.Dense(4).apply(params, X), linen.Dense(4).apply(params, X))


def test_axes_in_any_spelling_are_the_last():
    for axes in (-1, 2, (-1,), [2]):
        axes_of = {"reduction_axes": axes, "feature_axes": axes}
        params, run = ours("nnx", "RMSNorm", implementation="xla", **axes_of)
        same(run(params, X), jaxkern.rms_norm(X, implementation="xla"))


@pytest.mark.parametrize("name", NORMS)
def test_equinox_norms_of_several_axes_and_batches(name):
    theirs, layer = (moved(getattr(m, name)((4, 10))) for m in (eqx.nn, jk_equinox))
    each = lambda layer: jax.vmap(jax.vmap(layer))
    run = lambda theirs, layer, x: (each(theirs)(x), each(layer)(x), layer(x, 7))
    expected, found, (out, state) = jax.jit(run)(theirs, layer, normal(2, 3, 4, 10))
    np.testing.assert_allclose(found, expected, atol=3e-6)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert state == 7
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4, 10\)"):
        layer(normal(4, 11))


def test_equinox_layers_of_no_rows_and_of_scalars():
    key, x = jax.random.key(0), normal(5)
    for layer in (jk_equinox.LayerNorm(K), jk_equinox.RMSNorm(K), jk_equinox.Linear(K, K, key=key)):
        for dtype in (FP32, jnp.complex64):
            assert jax.eval_shape(layer, jnp.zeros((0, K), dtype)).shape == (0, K)
    for name in NORMS:
        theirs, layer = (getattr(m, name)(()) for m in (eqx.nn, jk_equinox))
        found, expected = eqx.filter_jit(layer)(x), jax.jit(jax.vmap(theirs))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    theirs, layer = (m.Linear("scalar", 3, key=key) for m in (eqx.nn, jk_equinox))
    same(layer(x[0]), theirs(x[0]))
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4\)"):
        jk_equinox.Linear(4, 3, key=key)(jnp.ones((4, 5)))


def test_scalars_are_refused_as_the_library_refuses_them():
    for layer in (jk_nnx.RMSNorm(1, rngs=nnx.Rngs(0)), jk_nnx.Linear(1, 2, rngs=nnx.Rngs(0))):
        with pytest.raises((TypeError, ValueError, IndexError, AssertionError)):
            layer(jnp.float32(1))
    for module in (jk_linen.LayerNorm(), jk_linen.Dense(2)):
        with pytest.raises((TypeError, ValueError, IndexError)):
            module.init(jax.random.key(0), jnp.float32(1))


def test_a_layer_is_called_once():
    """Flax's tables and captured intermediates have one call, whoever computes it."""
    for module in (
        jk_linen.LayerNorm(reduction_axes=0),
        jk_linen.RMSNorm(reduction_axes=0),
        jk_linen.Dense(K, dot_general_cls=lambda: jax.lax.dot_general),
        jk_linen.Dropout(0.0, deterministic=False),
    ):
        options = {"capture_intermediates": True, "mutable": True}
        run = jax.jit(functools.partial(module.init_with_output, jax.random.key(0), **options))
        out, variables = run(X[0])
        [only] = variables["intermediates"]["__call__"]
        same(only, out)


# Dropout


def dropout(library, x=ONES, rate=0.5, module=None, **options):
    """Applies our Dropout, or that of another module, always with the same key."""
    module = module or layers.MODULES[library][2]
    if library == "linen":
        return module.Dropout(rate, deterministic=False, **options).apply({}, x, rng=KEY)
    layer = module.Dropout(rate, **options)
    return layer(x, key=KEY) if library == "equinox" else layer(x, rngs=KEY)


def test_dropout_drops_by_jaxkerns_mask():
    expected = jaxkern.dropout(ONES, 0.25, KEY)
    assert 0.2 < float((expected == 0).mean()) < 0.3
    for library in LIBRARIES:
        same(dropout(library, rate=0.25), expected)
    layer = eqx.tree_at(lambda d: d.p, jk_equinox.Dropout(0.25), jnp.float32(0.25))
    run = eqx.filter_jit(lambda layer: layer(ONES, key=KEY))
    same(run(layer), expected)
    same(eqx.filter_grad(lambda layer: run(layer).sum())(layer).p, jnp.float32(0))


def test_dropout_draws_from_the_librarys_streams():
    layer = jk_nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    first, second = layer(ONES), layer(ONES)
    assert 0.3 < float((first != second).mean()) < 0.7
    same(jk_nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))(ONES), first)
    same(jk_nnx.Dropout(0.5)(ONES, rngs=nnx.Rngs(dropout=0).fork()), first)
    layer.eval()
    same(layer(ONES), ONES)

    run = functools.partial(jk_linen.Dropout(0.5).apply, {}, ONES, rngs={"dropout": KEY})
    assert set(np.unique(run(deterministic=False))) == {0, 2}
    same(run(deterministic=True), ONES)
    off = functools.partial(eqx.nn.inference_mode(jk_equinox.Dropout(0.5)), ONES, key=KEY)
    same(off(), ONES)
    assert set(np.unique(off(inference=False))) == {0, 2}


def test_dropout_streams_of_another_name():
    rngs = lambda: nnx.Rngs(params=0, mine=1)
    drawn = jk_nnx.Dropout(0.5, rng_collection="mine", rngs=rngs())(ONES)
    same(jk_nnx.Dropout(0.5, rng_collection="mine")(ONES, rngs=rngs().fork()["mine"]), drawn)
    module = jk_linen.Dropout(0.5, rng_collection="mine", deterministic=False)
    assert (module.apply({}, ONES, rngs={"mine": KEY}) == 0).any()
    with pytest.raises(Exception, match="mine"):
        module.apply({}, ONES, rngs={"dropout": KEY})
    for layer in (nnx.Dropout(0.5), jk_nnx.Dropout(0.5)):
        with pytest.raises(TypeError, match="must be a Rngs, RngStream"):
            layer(ONES, rngs=lambda: KEY)


def test_dropout_refuses_and_leaves_what_the_library_does():
    for run, error, words in (
        (jk_nnx.Dropout(0.5), ValueError, "no `rngs` argument was provided"),
        (functools.partial(jk_linen.Dropout(0.5).apply, {}), Exception, "deterministic"),
        (jk_equinox.Dropout(0.5), RuntimeError, "requires a key"),
    ):
        with pytest.raises(error, match=words):
            run(ONES)
    for layer in (jk_nnx.Dropout(0.0), jk_equinox.Dropout(0.0)):
        same(layer(ONES), ONES)
    for library, theirs in (("nnx", nnx), ("linen", linen)):
        run = functools.partial(dropout, library, broadcast_dims=(0,))
        same(run(), run(module=theirs))
        with pytest.raises(NotImplementedError, match="broadcast_dims"):
            run(implementation="mosaic")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_dropout_of_other_dtypes(library, dtype):
    run = functools.partial(dropout, library, (3 * normal(32, 8)).astype(dtype))
    theirs = functools.partial(run, module=layers.MODULES[library][1])
    if dtype == jnp.complex64 or library == "equinox":
        same(run(), theirs())
    else:  # which flax refuses
        for each in (theirs, run):
            with pytest.raises(TypeError, match="select"):
                each()
    with pytest.raises(NotImplementedError, match=f"computes with {jnp.dtype(dtype)}"):
        run(implementation="mosaic")


def test_dropout_of_everything_needs_no_key():
    layer = jk_nnx.Dropout(1.0, rngs=nnx.Rngs(dropout=0))
    for run in (
        layer,
        functools.partial(jk_linen.Dropout(1.0, deterministic=False).apply, {}),
        functools.partial(jk_equinox.Dropout(1.0), key=KEY),
    ):
        same(run(ONES), jnp.zeros_like(ONES))
    assert int(layer.rngs.count[...]) == 0  # as flax: nothing is drawn


@pytest.mark.parametrize(
    ("layers", "missing"), [("flax", "flax"), ("linen", "flax"), ("equinox", "equinox")]
)
def test_a_missing_library_is_named(monkeypatch, layers, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"jaxkern.nn.{layers}")
    with pytest.raises(ImportError, match=f"pip install {missing}$"):
        importlib.import_module(f"jaxkern.nn.{layers}")
