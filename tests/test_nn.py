"""Layers: Flax's and Equinox's own parameters, results within rounding, the kernels underneath.

What the ops do not compute, the layers leave to the library's own, to the last bit.
"""

import functools
import importlib
import itertools
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
from jaxkern.nn import mamba, mamba2
from jaxkern.precision import Policy
from tests.layers import (
    BF16,
    FP16,
    FP32,
    LIBRARIES,
    LIBRARY,
    K,
    jit,
    moved,
    normal,
    ours,
    pair,
    same,
    sparsely,
)

FLAX = ("nnx", "linen")
NORMS = ("RMSNorm", "LayerNorm")
LAYERS = (*NORMS, "Linear")
BLOCKS = ("Mamba", "Mamba2")


CASES = (*LAYERS, "RMSNorm, bare", "LayerNorm, bare", "LayerNorm, scale")


@sparsely("library, case", LIBRARIES, CASES)
def test_layers_have_the_parameters_and_results_of_the_librarys_own(library, case):
    """And its gradients; of norms without some of their parameters, too."""
    name, _, some = case.partition(", ")
    scale, eps = ("use_weight", "eps") if library == "equinox" else ("use_scale", "epsilon")
    options = {eps: 0.1} if name in NORMS else {}
    options |= {scale: some == "scale"} if some else {}
    if some and (library == "equinox" or name == "LayerNorm"):
        options["use_bias"] = False
    (theirs, run_theirs), (params, run) = pair(library, name, **options)
    same(theirs, params)

    def both(f, params, x):
        loss = lambda params, x: jnp.sum(jnp.sin(f(params, x)))
        return f(params, x), jax.grad(loss, (0, 1))(params, x)

    of_each = jit(lambda *args: [both(f, *args) for f in (run_theirs, run)])
    expected, found = of_each(moved(theirs), normal(3, 5, K))
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


DTYPES = {
    "bf16": (BF16, {}),
    "fp16": (FP16, {"param_dtype": FP16}),
    "both": (FP32, {"dtype": BF16}),
}


@sparsely("library, name, dtypes", FLAX, NORMS, DTYPES)
def test_dtypes_are_those_of_flax(library, name, dtypes):
    dtype, options = DTYPES[dtypes]
    (theirs, run_theirs), (params, run) = pair(library, name, **options)
    same(theirs, params)
    x, params = normal(64, K, dtype=dtype), moved(theirs)
    expected, found = jit(lambda *args: (run_theirs(*args), run(*args)))(params, x)
    assert found.dtype == expected.dtype
    true = norm_float64(name, jax.tree.leaves_with_path(params), x)
    errors = [np.abs(np.asarray(y, np.float64) - true).max() for y in (expected, found)]
    assert errors[1] <= (2 if found.dtype == FP32 else 1.05) * errors[0]


@LIBRARY
def test_linear_in_low_precision(library):
    options = {} if library == "equinox" else {"dtype": BF16}
    (theirs, run_theirs), (_, run) = pair(library, "Linear", **options)
    params = moved(theirs)
    if library == "equinox":
        params = Policy.parse("bf16").cast_to_compute(params)
    x = normal(2, 3, K, dtype=BF16)
    expected, found = jit(lambda *args: (run_theirs(*args), run(*args)))(params, x)
    assert found.dtype == expected.dtype == BF16
    np.testing.assert_allclose(found.astype(FP32), expected.astype(FP32), rtol=2**-7, atol=0.05)


def test_a_policy_sets_the_dtypes():
    policy = Policy.parse("params=bfloat16,compute=float16,output=float32")
    options = {"dtype": policy.compute, "param_dtype": policy.params}
    params, run = ours("nnx", "Mamba", shapes=True, **options)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(BF16)}
    assert jax.eval_shape(run, params, jnp.ones((1, 2, K))).dtype == FP16
    mlp = eqx.filter_eval_shape(jk_equinox.SwiGLU, 16, 32, key=jax.random.key(0))
    run = lambda mlp, x: policy.cast_to_compute(mlp)(x)
    assert eqx.filter_eval_shape(run, mlp, jnp.ones((2, 16), FP16)).dtype == FP16


@sparsely("library, name", LIBRARIES, ["Linear", "Dropout", "SwiGLU", *NORMS, *BLOCKS], of=2)
def test_layers_hand_on_their_dtypes_and_their_implementation(library, name):
    """Results have the layer's dtype and gradients the parameters'; "xla" has forward mode."""
    options = {"headdim": 8} if name == "Mamba2" else {}
    how = {"key": jax.random.key(0)} if (library, name) == ("equinox", "Dropout") else {}
    how |= {"rngs": jax.random.key(0)} if (library, name) == ("nnx", "Dropout") else {}
    options |= {"deterministic": False} if (library, name) == ("linen", "Dropout") else {}
    dtypes = {} if library == "equinox" or name == "Dropout" else {"dtype": BF16}
    x = jax.ShapeDtypeStruct((2, 3, K), BF16)

    def made(**others):
        params, run = ours(library, name, shapes=True, **options, **others)
        if library == "equinox":  # which computes in its parameters' dtypes
            cast = Policy.parse("bf16").cast_to_compute
            return params, lambda params, x: run(cast(params), x, **how)
        return params, lambda params, x: run(params, x, **how)

    params, run = made(implementation="xla", **dtypes)
    tangent_of = lambda params, x, t: jax.jvp(lambda x: run(params, x), (x,), (t,))
    out, tangent = jax.eval_shape(tangent_of, params, x, x)
    assert out.dtype == BF16
    assert (tangent.shape, tangent.dtype) == (out.shape, out.dtype)
    if name != "Dropout":
        params, plain = made(**dtypes)
        loss = lambda params, x: plain(params, x).astype(FP32).sum()
        grads = jax.eval_shape(jax.grad(loss), params, x)
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(FP32)}
    params, wrong = made(implementation="cuda")
    with pytest.raises(ValueError, match="implementation must be"):
        jax.eval_shape(wrong, params, x)


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        (lambda: jk_nnx.RMSNorm(256, rngs=nnx.Rngs(0)), "rms_norm"),
        (lambda: jk_nnx.LayerNorm(256, rngs=nnx.Rngs(0)), "layer_norm"),
        (lambda: jk_nnx.SwiGLU(256, 512, rngs=nnx.Rngs(0)), "swiglu"),
        pytest.param(
            lambda: jk_nnx.Mamba2(256, dtype=BF16, implementation="mosaic", rngs=nnx.Rngs(0)),
            "ssd",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["RMSNorm", "LayerNorm", "SwiGLU", "Mamba2"],
)
def test_layers_run_the_kernels(make, kernel):
    """Those of Mamba are seen to in the language model's test."""
    graphdef, params = nnx.split(nnx.eval_shape(make))
    loss = lambda params, x: nnx.merge(graphdef, params)(x).sum()
    x = jax.ShapeDtypeStruct((2, 64, 256), FP32)
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(params, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"{kernel}_fwd" in text
    assert f"{kernel}_bwd" in text


# What is left to the library's own


def doubled(*args, **options):
    return 2 * jax.lax.dot_general(*args, **options)


def halved(arrays, dtype):
    inputs, kernel, bias = (None if a is None else jnp.asarray(a, dtype) for a in arrays)
    return inputs, 0.5 * kernel, bias


def to_float32(arrays, *, dtype):
    del dtype
    return tuple(None if a is None else jnp.asarray(a, FP32) for a in arrays)


X = normal(2, K, K)
INTEGERS = np.random.default_rng(0).integers(-999, 999, (2, 3, K))
PROMOTED = {
    ("nnx", "Linear"): {"promote_dtype": lambda arrays, *, dtype: halved(arrays, dtype)},
    ("linen", "Linear"): {"promote_dtype": lambda *arrays, dtype: halved(arrays, dtype)},
    ("nnx", "RMSNorm"): {"promote_dtype": to_float32, "dtype": FP16},
    ("nnx", "LayerNorm"): {"promote_dtype": to_float32, "dtype": FP16},
}
OF_NUMPY = {"reduction_axes": (1, 2), "feature_axes": np.int64(1)}
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
    "promotion": (*zip(*PROMOTED, strict=True), None, X, None),
}


def left_cases():
    """In the default suite one or two of each case, in turn those of every library and layer."""
    for at, (case, (libraries, names, *_)) in enumerate(LEFT.items()):
        among = [*PROMOTED] if case == "promotion" else [*itertools.product(libraries, names)]
        for i, (library, name) in enumerate(among):
            marks = [pytest.mark.exhaustive] if (i - at) % min(len(among), 5) else []
            yield pytest.param(case, library, name, marks=marks)


@pytest.mark.parametrize(("case", "library", "name"), [*left_cases()])
def test_what_the_ops_do_not_compute_the_librarys_own_does(case, library, name):
    """To the last bit; a layer made for kernels alone says what is amiss."""
    *_, options, x, dtype = LEFT[case]
    options = PROMOTED[library, name] if case == "promotion" else options
    dtype = dtype or options.get("dtype", FP32)
    with jax.enable_x64(case == "float64"):
        x = jnp.asarray(x)
        how = {"mask": jnp.arange(K) % 3 > 0} if case == "mask" else {}
        (theirs, run_theirs), (params, run) = pair(library, name, **options)
        same(theirs, params)
        run_both = lambda params, x: (run_theirs(params, x, **how), run(params, x, **how))
        expected, found = jit(run_both)(theirs, x)
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


@sparsely("library, name", LIBRARIES, LAYERS)
def test_integers_become_floats(library, name):
    if library == "equinox" and name != "Linear":
        name = "Linear"  # its norms round to them, so that they are its own
    for options in [{}] if library == "equinox" else [{}, {"dtype": BF16}]:
        (theirs, run_theirs), (_, run) = pair(library, name, **options)
        run_both = lambda params, x: (run_theirs(params, x), run(params, x))  # noqa: B023
        expected, found = jit(run_both)(theirs, jnp.asarray(INTEGERS))
        assert found.dtype == expected.dtype
        tolerance = 2e-5 if found.dtype == FP32 else 2**-7
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


def test_parameters_of_another_dtype_than_the_layers():
    """Flax takes the dtypes of what is stored, which `param_dtype` only says of initial values."""
    theirs, found = linen.Dense(4), jk_linen.Dense(4)
    params = {"params": {"kernel": normal(K, 4) * 1j, "bias": normal(4)}}
    same(found.apply(params, X), theirs.apply(params, X))


def test_axes_in_any_spelling_are_the_last():
    x = normal(3, K)
    for axes in (-1, 1, (-1,), [1]):
        layer = jk_nnx.RMSNorm(
            K, reduction_axes=axes, feature_axes=axes, implementation="xla", rngs=nnx.Rngs(0)
        )
        np.testing.assert_array_equal(layer(x), jaxkern.rms_norm(x, implementation="xla"))


def test_equinox_norms_of_several_axes_and_batches():
    x = normal(2, 3, 4, 10)
    for name in NORMS:
        theirs, layer = (moved(getattr(m, name)((4, 10))) for m in (eqx.nn, jk_equinox))
        each = lambda layer: jax.vmap(jax.vmap(layer))
        expected, found, (out, state) = jit(
            lambda theirs, layer, x: (each(theirs)(x), each(layer)(x), layer(x, 7))  # noqa: B023
        )(theirs, layer, x)
        np.testing.assert_allclose(found, expected, atol=3e-6)
        np.testing.assert_allclose(out, expected, atol=3e-6)
        assert state == 7
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4, 10\)"):
            layer(normal(4, 11))


def test_saved_equinox_leaves_load(tmp_path):
    theirs = moved(eqx.nn.LayerNorm(K))
    eqx.tree_serialise_leaves(tmp_path / "layer", theirs)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "layer", jk_equinox.LayerNorm(K))
    same(jax.tree.leaves(theirs), jax.tree.leaves(loaded))


def test_equinox_layers_of_no_rows_and_of_scalars():
    key, x = jax.random.key(0), normal(5)
    for layer in (jk_equinox.LayerNorm(K), jk_equinox.RMSNorm(K), jk_equinox.Linear(K, K, key=key)):
        for dtype in (FP32, jnp.complex64):
            assert jax.eval_shape(layer, jnp.zeros((0, K), dtype)).shape == (0, K)
    for name in NORMS:
        theirs, layer = (getattr(m, name)(()) for m in (eqx.nn, jk_equinox))
        np.testing.assert_allclose(jit(layer)(x), jit(jax.vmap(theirs))(x), rtol=1e-6)
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
    """By what captures intermediates and what tabulates them, whoever computes it."""
    x = normal(3, K)
    for module in (
        jk_linen.LayerNorm(reduction_axes=0),
        jk_linen.RMSNorm(reduction_axes=0),
        jk_linen.Dense(K, dot_general_cls=lambda: jax.lax.dot_general),
        jk_linen.Dropout(0.0, deterministic=False),
    ):
        options = {"capture_intermediates": True, "mutable": True}
        run = jit(functools.partial(module.init_with_output, jax.random.key(0), **options))
        out, variables = run(x)
        [only] = variables["intermediates"]["__call__"]
        same(only, out)


# Dropout


def test_dropout_drops_by_jaxkerns_mask():
    x, key = jnp.ones((32, 64)), jax.random.key(3)
    expected = jaxkern.dropout(x, 0.25, key)
    assert 0.2 < float((expected == 0).mean()) < 0.3
    same(jk_nnx.Dropout(0.25)(x, rngs=key), expected)
    same(jk_linen.Dropout(0.25, deterministic=False).apply({}, x, rng=key), expected)
    same(jk_equinox.Dropout(0.25)(x, key=key), expected)
    layer = eqx.tree_at(lambda d: d.p, jk_equinox.Dropout(0.25), jnp.float32(0.25))
    run = eqx.filter_jit(lambda layer: layer(x, key=key))
    same(run(layer), expected)
    same(eqx.filter_grad(lambda layer: run(layer).sum())(layer).p, jnp.float32(0))


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


def test_dropout_streams_of_another_name():
    x = jnp.ones((32, 64))
    rngs = lambda: nnx.Rngs(params=0, mine=1)
    drawn = jk_nnx.Dropout(0.5, rng_collection="mine", rngs=rngs())(x)
    same(jk_nnx.Dropout(0.5, rng_collection="mine")(x, rngs=rngs().fork()["mine"]), drawn)
    module = jk_linen.Dropout(0.5, rng_collection="mine", deterministic=False)
    assert (module.apply({}, x, rngs={"mine": jax.random.key(0)}) == 0).any()
    with pytest.raises(Exception, match="mine"):
        module.apply({}, x, rngs={"dropout": jax.random.key(0)})
    for layer in (nnx.Dropout(0.5), jk_nnx.Dropout(0.5)):
        with pytest.raises(TypeError, match="must be a Rngs, RngStream"):
            layer(x, rngs=lambda: jax.random.key(0))


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


@LIBRARY
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_dropout_of_other_dtypes(library, dtype):
    x, key = (3 * normal(32, 8)).astype(dtype), jax.random.key(0)

    def run(module, **options):
        if library == "equinox":
            return module.Dropout(0.5, **options)(x, key=key)
        if library == "nnx":
            return module.Dropout(0.5, **options)(x, rngs=key)
        return module.Dropout(0.5, deterministic=False, **options).apply({}, x, rng=key)

    _, theirs, module = LIBRARIES[library]
    if dtype == jnp.complex64 or library == "equinox":
        same(run(module), run(theirs))
    else:  # which flax refuses
        for each in (theirs, module):
            with pytest.raises(TypeError, match="select"):
                run(each)
    with pytest.raises(NotImplementedError, match=f"computes with {x.dtype}"):
        run(module, implementation="mosaic")


def test_dropout_of_everything_needs_no_key():
    x = normal(3, K)
    rngs = nnx.Rngs(dropout=0)
    layer = jk_nnx.Dropout(1.0, rngs=rngs)
    same(layer(x), jnp.zeros_like(x))
    assert int(layer.rngs.count[...]) == 0  # as flax: nothing is drawn
    same(jk_linen.Dropout(1.0, deterministic=False).apply({}, x), jnp.zeros_like(x))
    same(jk_equinox.Dropout(1.0)(x, key=jax.random.key(0)), jnp.zeros_like(x))


# Wrong calls


@pytest.mark.parametrize(
    ("layers", "missing", "extra"),
    [("flax", "flax", "flax"), ("linen", "flax", "flax"), ("equinox", "equinox", "equinox")],
)
def test_a_missing_library_is_named(monkeypatch, layers, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"jaxkern.nn.{layers}")
    with pytest.raises(ImportError, match=rf"pip install {extra}$"):
        importlib.import_module(f"jaxkern.nn.{layers}")


@pytest.mark.parametrize("module", [mamba, mamba2])
def test_blocks_name_options_that_they_refuse(module):
    sizes = mamba.Sizes(8) if module is mamba else mamba2.Sizes(8, headdim=4)
    run = {mamba: mamba.mamba, mamba2: mamba2.mamba2}[module]

    def call(n_layers=1, **options):
        inits = module.initializers(sizes, n_layers)
        params = {k: np.ones(shape, np.float32) for k, (_, shape) in inits.items()}
        return run(module.BLOCK.weights_from(params), sizes, jnp.ones((1, 4, 8)), **options)

    for options, error, words in (
        ({"n_layers": 0}, ValueError, "n_layers must be at least 1, got 0"),
        ({"n_layers": "2"}, TypeError, "n_layers must be an int, got '2'"),
        ({"return_cache": "no"}, TypeError, "return_cache must be True or False, got 'no'"),
        ({"isolate_nan": 1}, TypeError, "isolate_nan must be True or False, got 1"),
        ({"axis_name": 1}, TypeError, "axis_name must be a mesh axis's name .*, got 1"),
        ({"axis_name": "x"}, ValueError, "axis_name must name an axis of the mesh .*'x' is none"),
        ({"dtype": "wide"}, TypeError, "dtype must be a dtype, got 'wide'"),
    ):
        with pytest.raises(error, match=words):
            call(**options)
