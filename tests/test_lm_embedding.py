"""The language model's embedding: how tokens are read, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkern.lm.config import ModelConfig
from jaxkern.lm.model import MambaLM, rows_of
from jaxkern.nn import mamba


@pytest.mark.parametrize("count", [0, 1, 60])
def test_gradient_of_the_embedding(count):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(11, 4)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 11, (count // 2, 2) if count > 1 else (count,)))
    dout = rng.normal(size=(*tokens.shape, 4)).astype(np.float32)
    out, vjp = jax.vjp(lambda table: rows_of(table, tokens), table)
    np.testing.assert_array_equal(out, np.asarray(table)[np.asarray(tokens)])
    expected = np.zeros((11, 4))
    np.add.at(expected, np.asarray(tokens), dout)
    _, plain = jax.vjp(lambda table: table[tokens], table)
    error, of_plain = (np.max(np.abs(f(jnp.asarray(dout))[0] - expected)) for f in (vjp, plain))
    assert error <= 2 * of_plain


def test_gradient_of_an_embedding_as_large_as_its_tokens_count():
    size = np.iinfo(np.int16).max
    tokens = jnp.asarray([3, size - 1, 3, 0, -1, 3], jnp.int16)
    of = lambda tokens: jax.vjp(lambda table: rows_of(table, tokens), jnp.ones((size, 2)))[1]
    (dtable,) = of(tokens)(jnp.ones((6, 2)))
    expected = np.zeros((size, 2))
    expected[[0, 3, size - 1]] = [[1], [3], [2]]
    np.testing.assert_array_equal(dtable, expected)


def test_gradient_of_the_embedding_is_written_without_a_sort():
    """XLA sorts what it writes to rows of which two may be one, so as to keep an order."""
    grad = jax.grad(lambda table: rows_of(table, jnp.array([1, 0, 1])).sum())
    into_table = [
        e.params["unique_indices"]
        for e in jax.make_jaxpr(grad)(jnp.ones((2000, 4))).eqns
        if e.primitive.name == "scatter" and e.invars[0].aval.shape == (2000, 4)
    ]
    assert into_table == [True]


@pytest.mark.parametrize("size", [300, 1030])  # a product, and rows that are read
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16"])
def test_tokens_of_any_integer_dtype_are_the_same(size, dtype):
    model = MambaLM(ModelConfig(mamba.Sizes(8, d_state=2), 1, vocab_size=size), rngs=nnx.Rngs(0))
    tokens = np.array([[1, 44, 100, 127]])
    np.testing.assert_array_equal(
        model._embed(jnp.asarray(tokens, dtype))[0], model.embedding[...][tokens]
    )
    graphdef, params = nnx.split(model)
    loss = jax.grad(lambda p, t: nnx.merge(graphdef, p)._embed(t)[0].sum())
    grads = [loss(params, jnp.asarray(tokens, d))["embedding"][...] for d in (dtype, "int32")]
    np.testing.assert_array_equal(*grads)
