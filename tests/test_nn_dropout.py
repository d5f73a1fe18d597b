"""Dropout layers: jaxkern's masks, from the keys and streams of Flax and Equinox."""

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
from tests.layers import same


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
