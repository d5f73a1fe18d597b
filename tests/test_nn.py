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
from jaxkern.nn import mamba, mamba2
from jaxkern.precision import Policy
from tests.layers import BF16, FP16, FP32, LIBRARIES, K, jit, moved, normal, pair, same


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


# Every layer of a library, as (layer, x) -> result, made for an implementation and with dtypes.

NAMES = ("RMSNorm", "LayerNorm", "Linear", "Dropout", "SwiGLU", "Mamba", "Mamba2")
SIZES = {"Mamba2": {"headdim": 8}}
"""The options without which a layer of 8 features is none."""


def every_nnx(name, key, implementation=None, **dtypes):
    size = {"Linear": (8, 4), "Dropout": (0.5,), "SwiGLU": (8, 16)}.get(name, (8,))
    options = SIZES.get(name, {}) | dtypes | {"implementation": implementation}
    graphdef, params = nnx.split(getattr(jk_nnx, name)(*size, **options, rngs=nnx.Rngs(0)))
    keys = {"rngs": key} if name == "Dropout" else {}
    return params, lambda params, x: nnx.merge(graphdef, params)(x, **keys)


def every_linen(name, key, implementation=None, **dtypes):
    mamba = {"Mamba": (8,), "Mamba2": (8,)}
    size = (mamba | {"Linear": (4,), "Dropout": (0.5,), "SwiGLU": (16,)}).get(name, ())
    options = SIZES.get(name, {}) | dtypes
    options |= {"deterministic": False} if name == "Dropout" else {}
    made = getattr(jk_linen, "Dense" if name == "Linear" else name)
    layer = made(*size, **options, implementation=implementation)
    rngs = {"params": key, "dropout": key}
    params = jax.eval_shape(layer.init, rngs, jnp.ones((2, 3, 8)))
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    return params, functools.partial(layer.apply, rngs={"dropout": key})


def every_equinox(name, key, implementation=None, dtype=None, param_dtype=FP32):
    size = {"Linear": (8, 4), "Dropout": (0.5,), "SwiGLU": (8, 16)}.get(name, (8,))
    options = SIZES.get(name, {}) | ({} if name == "Dropout" else {"dtype": param_dtype})
    options |= {} if name in ("RMSNorm", "LayerNorm", "Dropout") else {"key": key}
    layer = getattr(jk_equinox, name)(*size, **options, implementation=implementation)
    params, rest = eqx.partition(layer, eqx.is_inexact_array)
    policy = Policy(param_dtype, dtype or FP32, FP32)

    def run(params, x):
        params, x = policy.cast_to_compute((params, x))
        return eqx.combine(params, rest)(x, key=key)

    return params, run


EVERY = {"nnx": every_nnx, "linen": every_linen, "equinox": every_equinox}


@pytest.mark.parametrize("name", sorted({*NAMES} - {"Dropout"}))
@pytest.mark.parametrize("library", EVERY)
def test_arithmetic_in_bfloat16_with_parameters_in_float32(library, name):
    """The parameters and their gradients stay what they are; results have the layer's dtype."""
    params, run = EVERY[library](name, jax.random.key(0), dtype=BF16, param_dtype=FP32)
    x = jnp.ones((2, 3, 8), BF16)
    assert jax.eval_shape(run, params, x).dtype == BF16
    grads = jax.eval_shape(jax.grad(lambda params: run(params, x).astype(FP32).sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} <= {jnp.dtype(FP32)}
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", EVERY)
def test_plain_layers_have_forward_mode_derivatives(library, name):
    params, run = EVERY[library](name, jax.random.key(0), implementation="xla")
    x = normal(2, 3, 8)
    out, tangent = jax.eval_shape(lambda x, t: jax.jvp(lambda x: run(params, x), (x,), (t,)), x, x)
    assert (tangent.shape, tangent.dtype) == (out.shape, out.dtype)


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


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Dropout", "SwiGLU", "Mamba", "Mamba2"])
def test_layers_hand_on_the_implementation(name):
    x, key = jnp.ones((1, 2, 8)), jax.random.key(0)
    options = SIZES.get(name, {}) | {"implementation": "cuda"}
    size = {"Dropout": (0.5,), "SwiGLU": (8, 8)}.get(name, (8,))
    off = {"deterministic": False} if name == "Dropout" else {}
    sizes = () if name in ("RMSNorm", "LayerNorm") else size[:1]
    in_linen = getattr(jk_linen, name)(*sizes, **options, **off)
    rngs = {"params": key, "dropout": key}
    made = {"key": key} if name in ("SwiGLU", "Mamba", "Mamba2") else {}
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


# What runs on a GPU


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        (lambda: jk_nnx.RMSNorm(256, rngs=nnx.Rngs(0)), "rms_norm"),
        (lambda: jk_nnx.LayerNorm(256, rngs=nnx.Rngs(0)), "layer_norm"),
        (lambda: jk_nnx.SwiGLU(256, 512, rngs=nnx.Rngs(0)), "swiglu"),
        (
            lambda: jk_nnx.Mamba2(256, dtype=BF16, implementation="mosaic", rngs=nnx.Rngs(0)),
            "ssd",
        ),
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


@pytest.mark.parametrize("module", [mamba, mamba2])
def test_blocks_name_options_that_they_refuse(module):
    sizes = mamba.Sizes(8) if module is mamba else mamba2.Sizes(8, headdim=4)
    run = {mamba: mamba.mamba, mamba2: mamba2.mamba2}[module]

    def call(n_layers=1, **options):
        inits = module.initializers(sizes, n_layers)
        params = {k: f(jax.random.key(0), shape, jnp.float32) for k, (f, shape) in inits.items()}
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
