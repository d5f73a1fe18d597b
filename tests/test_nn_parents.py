"""What the ops do not compute, the layers leave to Flax's and Equinox's own, to the last bit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from tests.layers import BF16, FP16, FP32, LIBRARIES, LIBRARY, K, normal, pair, same

FLAX = pytest.mark.parametrize("library", ["nnx", "linen"])
NORM = pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
LAYER = pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])


def check_same(library, name, x, **options):
    """Ours and the library's give the same bits; made for kernels alone, it says what is amiss."""
    (theirs, run_theirs), (ours, run_ours) = pair(library, name, **options)
    same(theirs, ours)
    expected = run_theirs(theirs, x)
    same(run_ours(theirs, x), expected)
    make, _, module = LIBRARIES[library]
    params, mosaic = make(module, name, **options, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=r'\(implementation="mosaic"\) cannot take'):
        mosaic(params, x)
    return expected


@FLAX
@NORM
@pytest.mark.parametrize(
    "axes",
    [
        {"reduction_axes": 1},
        {"reduction_axes": -1, "feature_axes": 1},
        {"reduction_axes": (1, 2), "feature_axes": np.int64(1)},
    ],
)
def test_norms_over_axes_that_are_integers(library, name, axes):
    x = normal(2, K, K)
    if library == "nnx":
        theirs, ours = (getattr(m, name)(K, **axes, rngs=nnx.Rngs(0)) for m in (nnx, jk_nnx))
        same(ours(x), theirs(x))
    else:
        theirs, ours = (getattr(m, name)(**axes) for m in (linen, jk_linen))
        runs = [module.init_with_output(jax.random.key(0), x) for module in (ours, theirs)]
        same(*runs)


@NORM
def test_a_norm_keeps_the_dtype_beside_a_promotion_of_its_own(name):
    def promote(arrays, *, dtype):
        del dtype
        return tuple(None if a is None else jnp.asarray(a, FP32) for a in arrays)

    options = {"promote_dtype": promote, "dtype": FP16}
    assert check_same("nnx", name, normal(3, 5, K), **options).dtype == FP16


def test_linear_layers_multiply_what_their_promotion_gives():
    def halved(arrays, dtype):
        inputs, kernel, bias = (None if a is None else jnp.asarray(a, dtype) for a in arrays)
        return inputs, 0.5 * kernel, bias

    x = normal(3, 5, K)
    check_same("nnx", "Linear", x, promote_dtype=lambda args, *, dtype: halved(args, dtype))
    check_same("linen", "Linear", x, promote_dtype=lambda *args, dtype: halved(args, dtype))


@LIBRARY
@LAYER
def test_complex_numbers(library, name):
    x = normal(3, 5, K) + 1j * normal(3, 5, K, seed=1)
    assert check_same(library, name, x).dtype == jnp.complex64


@FLAX
@LAYER
def test_complex_parameters(library, name):
    assert check_same(library, name, normal(3, 5, K), param_dtype=jnp.complex64).dtype == "c8"


def test_parameters_of_another_dtype_than_the_layers():
    """Flax takes the dtypes of what is stored, which `param_dtype` only says of initial values."""
    theirs, ours = linen.Dense(4), jk_linen.Dense(4)
    params = {"params": {"kernel": normal(K, 4) * 1j, "bias": normal(4)}}
    same(ours.apply(params, normal(3, K)), theirs.apply(params, normal(3, K)))


@LIBRARY
@LAYER
def test_integers(library, name):
    """Equinox's norms round to them, so that they are its own; elsewhere they become floats."""
    x = jnp.asarray(np.random.default_rng(0).integers(-999, 999, (3, 5, K)))
    if library == "equinox" and name != "Linear":
        assert check_same(library, name, x).dtype == jnp.int32
        return
    for options in [{}] if library == "equinox" else [{}, {"dtype": BF16}]:
        (theirs, run_theirs), (_, run_ours) = pair(library, name, **options)
        expected, found = run_theirs(theirs, x), run_ours(theirs, x)
        assert found.dtype == expected.dtype
        tolerance = 2e-5 if found.dtype == FP32 else 2**-7
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


@LIBRARY
@LAYER
def test_float64(library, name):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, K)))
        assert check_same(library, name, x).dtype == "f8"
        as_numpy = np.asarray(x)
    _, (params, run) = pair(library, name)  # which JAX makes float32
    assert run(params, as_numpy).dtype == FP32


@FLAX
def test_linear_layers_in_fp8(library):
    options = {"dtype": jnp.float8_e4m3fn}
    assert check_same(library, "Linear", normal(3, 5, K), **options).dtype == "float8_e4m3fn"


def test_scalars_are_refused_as_the_library_refuses_them():
    for layer in (jk_nnx.RMSNorm(1, rngs=nnx.Rngs(0)), jk_nnx.Linear(1, 2, rngs=nnx.Rngs(0))):
        with pytest.raises((TypeError, ValueError, IndexError, AssertionError)):
            layer(jnp.float32(1))
    for module in (jk_linen.LayerNorm(), jk_linen.Dense(2)):
        with pytest.raises((TypeError, ValueError, IndexError)):
            module.init(jax.random.key(0), jnp.float32(1))


def test_equinox_layers_of_no_rows_and_of_scalars():
    key = jax.random.key(0)
    for layer in (jk_equinox.LayerNorm(K), jk_equinox.RMSNorm(K), jk_equinox.Linear(K, K, key=key)):
        for dtype in (FP32, jnp.complex64):
            assert layer(jnp.zeros((0, K), dtype)).shape == (0, K)
    x = normal(5)
    for name in ("RMSNorm", "LayerNorm"):
        theirs, ours = (getattr(m, name)(()) for m in (eqx.nn, jk_equinox))
        np.testing.assert_allclose(ours(x), jax.vmap(theirs)(x), rtol=1e-6)


def test_a_layer_is_called_once():
    """By what captures intermediates and what tabulates them, whoever computes it."""
    x = normal(3, K)
    for module in (
        jk_linen.LayerNorm(reduction_axes=0),
        jk_linen.RMSNorm(reduction_axes=0),
        jk_linen.Dense(K, dot_general_cls=lambda: jax.lax.dot_general),
        jk_linen.Dropout(0.0, deterministic=False),
    ):
        out, variables = module.init_with_output(
            jax.random.key(0), x, capture_intermediates=True, mutable=True
        )
        [only] = variables["intermediates"]["__call__"]
        same(only, out)


# Dropout


@LIBRARY
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_dropout_of_other_dtypes(library, dtype):
    x, key = (3 * normal(32, 8)).astype(dtype), jax.random.key(0)
    if library == "equinox":
        theirs, ours = (m.Dropout(0.5) for m in (eqx.nn, jk_equinox))
        same(ours(x, key=key), theirs(x, key=key))
        mosaic = jk_equinox.Dropout(0.5, implementation="mosaic")
        with pytest.raises(NotImplementedError, match=f"computes with {x.dtype}"):
            mosaic(x, key=key)
        return

    def run(module, **options):
        if library == "nnx":
            return module.Dropout(0.5, **options)(x, rngs=key)
        return module.Dropout(0.5, deterministic=False, **options).apply({}, x, rng=key)

    _, theirs, ours = LIBRARIES[library]
    if dtype == jnp.complex64:
        same(run(ours), run(theirs))
    else:  # which flax refuses
        for module in (theirs, ours):
            with pytest.raises(TypeError, match="select"):
                run(module)
    with pytest.raises(NotImplementedError, match=f"computes with {x.dtype}"):
        run(ours, implementation="mosaic")


def test_dropout_of_everything_needs_no_key():
    x = normal(3, K)
    rngs = nnx.Rngs(dropout=0)
    layer = jk_nnx.Dropout(1.0, rngs=rngs)
    same(layer(x), jnp.zeros_like(x))
    assert int(layer.rngs.count[...]) == 0  # as flax: nothing is drawn
    same(jk_linen.Dropout(1.0, deterministic=False).apply({}, x), jnp.zeros_like(x))
    same(jk_equinox.Dropout(1.0)(x, key=jax.random.key(0)), jnp.zeros_like(x))


def test_dropout_streams_of_another_name():
    x = normal(32, K)
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


def test_equinox_dropout_with_a_probability_that_is_an_array():
    x, key = jnp.ones((32, 8)), jax.random.key(0)
    layer = eqx.tree_at(lambda d: d.p, jk_equinox.Dropout(0.5), jnp.float32(0.5))
    run = eqx.filter_jit(lambda layer: layer(x, key=key))
    same(run(layer), jk_equinox.Dropout(0.5)(x, key=key))
    same(eqx.filter_grad(lambda layer: run(layer).sum())(layer).p, jnp.float32(0))


def test_layers_refuse_an_unknown_implementation_whoever_computes():
    for dtype in (FP32, jnp.complex64):
        with pytest.raises(ValueError, match='implementation must be "mosaic", "xla" or None'):
            jk_nnx.RMSNorm(K, implementation="cuda", rngs=nnx.Rngs(0))(jnp.ones((3, K), dtype))
