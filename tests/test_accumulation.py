"""jaxkern.accumulate_gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkern

PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (5, 3)),
    "b": jax.random.normal(jax.random.key(1), (3,)),
}
BATCH = {"x": jax.random.normal(jax.random.key(2), (24, 5)), "label": jnp.arange(24) % 3}


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs multiply fp32 as such and not as tf32."""
    with jax.default_matmul_precision("highest"):
        yield


def loss_fn(params, batch):
    logits = jnp.tanh(batch["x"].astype(params["w"].dtype)) @ params["w"] + params["b"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
    return -chosen.mean()


def parts(k, batch=BATCH):
    return jax.tree.map(lambda a: a.reshape(k, -1, *a.shape[1:]), batch)


def assert_close(got, want, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("k", [1, 4, 24])
def test_it_is_the_whole_batch(k):
    got = jax.jit(functools.partial(jaxkern.accumulate_gradients, loss_fn))(PARAMS, parts(k))
    assert_close(got, jax.value_and_grad(loss_fn)(PARAMS, BATCH))


def test_sums_are_in_float32():
    """Of a bfloat16 gradient 1 and a thousand of 1/512, which bfloat16 sums would lose."""
    slopes = jnp.array([1.0] + [2.0**-9] * 1023)
    loss = lambda p, slope: (p * slope.astype(p.dtype)).sum()
    _, grad = jaxkern.accumulate_gradients(loss, jnp.ones((), jnp.bfloat16), slopes)
    assert grad.dtype == jnp.bfloat16
    assert grad == jnp.bfloat16((1 + 1023 * 2.0**-9) / 1024)
    half = jax.tree.map(jnp.float16, PARAMS)
    value, grads = jaxkern.accumulate_gradients(loss_fn, half, parts(4))
    assert value.dtype == grads["w"].dtype == jnp.float16
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), PARAMS)
        got = jaxkern.accumulate_gradients(loss_fn, wide, parts(4))
        assert_close(got, jax.value_and_grad(loss_fn)(wide, BATCH), 1e-12)


def test_what_else_the_loss_returns_is_stacked():
    f = lambda params, batch: (loss_fn(params, batch), {"labels": batch["label"]})
    (value, aux), grads = jaxkern.accumulate_gradients(f, PARAMS, parts(3), has_aux=True)
    np.testing.assert_array_equal(aux["labels"], parts(3)["label"])
    assert_close((value, grads), jax.value_and_grad(loss_fn)(PARAMS, BATCH))


def test_nan_of_one_microbatch_is_not_lost():
    broken = BATCH | {"x": BATCH["x"].at[7, 0].set(jnp.nan)}
    value, grads = jaxkern.accumulate_gradients(loss_fn, PARAMS, parts(4, broken))
    assert np.isnan(value)
    assert np.isnan(grads["b"]).all()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_the_devices_exchange_their_sums_once(check_vma):
    """After the loop: one sum of each gradient and of the loss, in float32."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = jax.tree.map(jnp.bfloat16, PARAMS)
    accumulate = functools.partial(
        jaxkern.accumulate_gradients, loss_fn, axis_name=("data", "model")
    )
    step = jax.jit(
        jax.shard_map(
            accumulate,
            mesh=mesh,
            in_specs=(P(), P(None, ("data", "model"))),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    want = jax.value_and_grad(loss_fn)(jax.tree.map(jnp.float32, params), BATCH)
    got = step(params, parts(2))
    assert {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    got = jax.tree.map(jnp.float32, got)
    assert_close(got, want, 2e-2)
    text = step.lower(params, parts(2)).as_text()
    reductions = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((tensor<[^>]*>)', text, re.DOTALL)
    assert sorted(reductions) == ["tensor<3xf32>", "tensor<5x3xf32>", "tensor<f32>"]
    lines = [line for line in text.splitlines() if "all_reduce" in line or ".while" in line]
    indents = {len(line) - len(line.lstrip()) for line in lines}
    assert "while" in lines[0]
    assert len(indents) == 1, "none is inside the loop"


@pytest.mark.parametrize(
    ("microbatches", "words"),
    [
        ({}, "of no array"),
        ({"a": jnp.ones((0, 2))}, r"\(0,\)"),
        ({"a": jnp.ones(2), "b": jnp.ones(3)}, r"\(2,\), \(3,\)"),
        (jnp.float32(1), r"\(\)"),
    ],
)
def test_refuses_microbatches_of_no_or_different_number(microbatches, words):
    with pytest.raises(ValueError, match=f"microbatches must be arrays .*{words}"):
        jaxkern.accumulate_gradients(loss_fn, PARAMS, microbatches)


@pytest.mark.parametrize(
    ("params", "got"), [({"w": 1}, "int"), ({"w": "one"}, "str"), ({"w": jnp.arange(3)}, "int32")]
)
def test_refuses_parameters_that_are_no_floating_arrays(params, got):
    loss = lambda params, x: params["w"] * x.sum()
    with pytest.raises(TypeError, match=rf"^params\['w'\] must be a floating array, got {got}"):
        jaxkern.accumulate_gradients(loss, params, jnp.ones((2, 3)))


def test_takes_python_floats_and_complex_parameters():
    loss = lambda params, x: params["w"] * jnp.abs(params["c"]) * x.sum()
    params = {"w": 2.0, "c": jnp.complex64(1j)}
    value, grads = jaxkern.accumulate_gradients(loss, params, jnp.ones((2, 3)))
    assert (value, grads["w"], grads["c"].dtype) == (6, 3, jnp.complex64)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"has_aux": "no"}, TypeError, "has_aux must be True or False, got 'no'"),
        ({"axis_name": 3}, TypeError, "axis_name must be a mesh axis's name or .*, got 3"),
        ({"axis_name": "x"}, ValueError, "axis_name must name an axis of the mesh .* 'x' is none"),
    ],
)
def test_refuses_options(options, error, words):
    with pytest.raises(error, match=words):
        jaxkern.accumulate_gradients(loss_fn, PARAMS, jnp.ones((2, 3)), **options)
