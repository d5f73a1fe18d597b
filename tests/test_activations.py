"""Activations: what the elementwise kernels do, and every op that has an activation."""

import functools
import re
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir.ir import WalkResult

import jaxkern
from bench.modules import kernel_modules
from jaxkern.elementwise import launch as elementwise
from jaxkern.ops import curves
from tests import check

ELEMENTWISE = {
    "relu": (jaxkern.relu, jax.nn.relu),
    "relu_squared": (jaxkern.relu_squared, lambda x: jnp.square(jax.nn.relu(x))),
    "silu": (jaxkern.silu, jax.nn.silu),
    "gelu_tanh": (jaxkern.gelu, jax.nn.gelu),
    "gelu_erf": (
        functools.partial(jaxkern.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
    ),
    "quick_gelu": (jaxkern.quick_gelu, lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "sigmoid": (jaxkern.sigmoid, jax.nn.sigmoid),
    "tanh": (jaxkern.tanh, jnp.tanh),
}


def pointwise_oracle(name, x, dout):
    value, slope = check.activated(name, x)
    return value, (dout * slope,)


def normal(shape, dtype, seed=0, scale=2.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


@check.BOTH
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((n, "bfloat16") for n in ELEMENTWISE),
        *((n, "float32") for n in ("silu", "gelu_tanh", "gelu_erf", "sigmoid", "tanh")),
        *((n, "float16") for n in ("quick_gelu", "sigmoid", "tanh")),
    ],
)
def test_activation_accuracy(name, dtype, implementation):
    call, plain = ELEMENTWISE[name]
    oracle = functools.partial(pointwise_oracle, name)
    check.check_accuracy(call, plain, oracle, (normal((3, 704), dtype),), implementation)


EXTREMES = {
    "float16": [1e4, 65504.0, 1e-6, np.inf],
    "bfloat16": [1e4, 3e38, 1e-40, np.inf],
    "float32": [1e4, 3e38, 1e-40, 88.0, 104.0, np.inf],
}


@check.BOTH
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("silu", dtype) for dtype in EXTREMES),
        *((n, d) for n in ("gelu_tanh", "gelu_erf") for d in ("float16", "float32")),
        *(("relu", "bfloat16"), ("quick_gelu", "bfloat16"), ("quick_gelu", "float32")),
    ],
)
def test_activation_extremes(name, dtype, implementation):
    """Where the curve is 0 or x, it and its slope are so, at infinity too; a NaN stays one."""
    far = np.asarray(EXTREMES[dtype])
    x = jnp.asarray(np.concatenate([far, -far, [0.0, np.nan]]), dtype)
    with check.running(implementation):
        call = ELEMENTWISE[name][0]
        out, vjp = jax.vjp(functools.partial(call, implementation=implementation), x)
        (dx,) = vjp(jnp.ones_like(out))
    x, out, dx = (np.asarray(a, np.float64) for a in (x, out, dx))
    assert np.isnan(out[-1])
    assert np.isfinite(dx[:-1]).all()
    large, small = np.abs(x) > 80, np.abs(x) < 1e-5
    np.testing.assert_array_equal(out[large & (x > 0)], x[large & (x > 0)])
    np.testing.assert_array_equal(dx[large & (x > 0)], 1)
    np.testing.assert_allclose(out[large & (x < 0)], 0, atol=1e-35)
    np.testing.assert_allclose(dx[large & (x < 0)], 0, atol=1e-35)
    if name != "relu":
        # Half of fp16's 17 smallest steps is 8 or 9 of them; denormal numbers of fp32 may be 0.
        np.testing.assert_allclose(out[small], x[small] / 2, atol=1.2e-38, rtol=0.06)
        np.testing.assert_allclose(dx[small], 0.5, rtol=1e-6)


@check.BOTH
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_bounded_extremes(name, dtype, implementation):
    """Far out they are constant, infinities included; near 0 they are as exact as elsewhere."""
    x = jnp.asarray([1e4, np.inf, 1e-4, 1e-7, 0.0], dtype)
    x = jnp.concatenate([x, -x, jnp.asarray([np.nan], dtype)])
    with check.running(implementation):
        call = functools.partial(ELEMENTWISE[name][0], implementation=implementation)
        out, vjp = jax.vjp(call, x)
        (dx,) = vjp(jnp.ones_like(out))
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        want, slope = check.activated(name, wide)
    np.testing.assert_allclose(out, want, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-45)
    np.testing.assert_allclose(dx, slope, rtol=2e-3, atol=1e-7)


@check.BOTH
@pytest.mark.parametrize("name", ["relu", "relu_squared"])
def test_relu_lets_nothing_past_its_corner(name, implementation):
    """Where the slope is 0 the gradient is, of an infinite cotangent too, as in JAX."""
    x = jnp.asarray([-1.0, 0.0, 2.0, -np.inf, np.inf, np.nan] * 2)
    dout = jnp.asarray([np.inf] * 6 + [np.nan] * 6)
    ours, plain = ELEMENTWISE[name]
    with check.running(implementation):
        (dx,) = jax.vjp(functools.partial(ours, implementation=implementation), x)[1](dout)
    np.testing.assert_array_equal(dx, jax.vjp(plain, x)[1](dout)[0])


@pytest.mark.parametrize("function", [jaxkern.silu, functools.partial(jaxkern.swiglu, up=1.5)])
def test_plain_backward_keeps_only_the_arguments(function):
    """No sigmoid is saved, at any precision."""
    x = normal((4, 32), "bfloat16")
    if isinstance(function, functools.partial):
        function = functools.partial(jaxkern.swiglu, up=x)
    _, vjp = jax.vjp(lambda x: function(x, implementation="xla"), x)
    assert {(a.shape, a.dtype) for a in jax.tree.leaves(vjp)} <= {(x.shape, x.dtype)}


def test_activation_errors():
    x = jnp.ones((2, 5))
    with pytest.raises(ValueError, match=r"up must have the shape of gate, \(2, 5\); got \(5,\)"):
        jaxkern.swiglu(x, x[0])
    with pytest.raises(ValueError, match=r"last axis of even size.*got shape \(2, 5\)"):
        jaxkern.silu_and_mul(x)
    with pytest.raises(ValueError, match=r"last axis of even size.*got shape \(\)"):
        jaxkern.gelu_and_mul(1.0)
    with pytest.raises(ValueError, match=r'activation must be one of "relu".*; got \'mish\''):
        jaxkern.glu(x, x, activation="mish")
    with pytest.raises(ValueError, match=r'activation must be one of.*"tanh"; got None'):
        jaxkern.glu(x, x, activation=None)
    with pytest.raises(ValueError, match=r"alpha must be above 0, got 0"):
        jaxkern.swiglu(x, x, alpha=0.0)
    with pytest.raises(ValueError, match=r"limit must be above 0 or None, got -7; None is"):
        jaxkern.silu_and_mul(x[:, :4], limit=-7)
    with pytest.raises(ValueError, match=r"up_offset must be finite, got nan"):
        jaxkern.swiglu(x, x, up_offset=float("nan"))
    with pytest.raises(TypeError, match=r"limit must be a Python number.*static"):
        jax.jit(lambda limit: jaxkern.swiglu(x, x, limit=limit))(7.0)
    with pytest.raises(ValueError, match=r'alpha is the slope within "silu".*activation=\'gelu\''):
        jaxkern.gated_linear_unit(x, jnp.ones((5, 4)), activation="gelu", alpha=1.702)


OF_FEW = {
    "silu": lambda x, i: jaxkern.silu(x, implementation=i),
    "swiglu": lambda x, i: jaxkern.swiglu(x, x + 1, implementation=i),
    "silu_and_mul": lambda x, i: jaxkern.silu_and_mul(jnp.stack([x, x, x, x]), implementation=i),
    "dropout": lambda x, i: jaxkern.dropout(x, 0.5, jax.random.key(0), implementation=i),
    "dropout_add": lambda x, i: jaxkern.dropout_add(
        x, x.astype(jnp.float32), 0.5, jax.random.key(0), implementation=i
    ),
}


def of_few(name, implementation):
    """Value and gradient, where the elements are so few that an index may be a constant."""

    def run(x):
        x = jnp.tile(x, 2) if name == "silu_and_mul" else x
        out, vjp = jax.vjp(lambda x: OF_FEW[name](x, implementation), x)
        return out, vjp(jnp.ones_like(out))

    return run


@pytest.mark.parametrize("name", OF_FEW)
def test_few_elements_lower(name):
    for n in (1, 9):  # of one element, and of one access and an element
        x = jax.ShapeDtypeStruct((n,), jnp.bfloat16)
        assert len(kernel_modules(of_few(name, "mosaic"), x)) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", OF_FEW)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 31, 127, 129])
def test_few_elements(n, name, dtype):
    x = normal((n,), dtype, seed=n)
    got, want = (jax.jit(of_few(name, i))(x) for i in ("mosaic", "xla"))
    ulp = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2e-5}[dtype]  # a tie either way
    check.assert_close(got, want, ulp)


@pytest.mark.parametrize(
    ("shape", "dtype", "accesses"),
    [
        ((1024,), "bfloat16", {"8xbf16": 1}),
        ((1027,), "bfloat16", {"8xbf16": 1, "1xbf16": 3}),
        ((1027,), "float32", {"4xf32": 1, "1xf32": 3}),
        ((3,), "float16", {"1xf16": 3}),
        ((2, 1024), "bfloat16", {"8xbf16": 1}),
        ((2, 1028), "bfloat16", {"4xbf16": 2, "1xbf16": 4}),
        ((2, 1027), "float32", {"1xf32": 4 + 3}),
    ],
)
def test_accesses_are_as_wide_as_they_may_be(shape, dtype, accesses):
    """Whatever the size; of slices, which ``vmap`` makes of rows, as wide as those are aligned."""
    run = functools.partial(jaxkern.silu, implementation="mosaic")
    run = jax.vmap(run) if len(shape) > 1 else run
    (module,) = kernel_modules(run, jax.ShapeDtypeStruct(shape, dtype))
    loads = Counter()

    def visit(op):
        found = re.fullmatch(r"vector<(\w+)>", str(op.results[0].type)) if op.results else None
        if op.name.endswith("llvm.load") and found:
            loads[found[1]] += 1
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    assert loads == accesses


def test_unit_divides_the_columns():
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    assert elementwise.unit(array(24), array(24, dtype=jnp.float32)) == 4
    assert [elementwise.unit(array(16, 2 * h), columns=h) for h in (24, 12, 5)] == [8, 4, 1]


@pytest.mark.parametrize("name", get_args(curves.Activation))
def test_every_op_with_an_activation_takes_every_one(name):
    """From the one table, and each computes what it says."""
    x, w = normal((4, 256), "float32"), jnp.eye(256)
    curve = "gelu_tanh" if name == "gelu" else name
    value = check.activated(curve, np.asarray(x, np.float64))[0]
    key = jax.random.key(0)
    kept = jaxkern.dropout(jnp.ones_like(x), 0.25, key) != 0
    with jax.default_matmul_precision("highest"):
        for got, want in (
            (jaxkern.glu(x, x, activation=name), value * x),
            (jaxkern.linear(x, w, activation=name), value),
            (jaxkern.gated_linear_unit(x, w, w, activation=name), value * x),
            (jaxkern.dropout(x, 0.25, key, activation=name), kept * value / 0.75),
            (jaxkern.rms_norm(x, activation=name), None),
            (jaxkern.rms_norm(x, gate=x, gate_activation=name), jaxkern.rms_norm(x) * value),
        ):
            if want is None:
                y = np.asarray(jaxkern.rms_norm(x), np.float64)
                want = check.activated(curve, y)[0]
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu_erf", "quick_gelu", "sigmoid", "tanh"])
def test_activations_lower_for_cuda(name):
    """In the layouts of rows of both kinds, and of a product's tiles."""
    options = {"implementation": "mosaic"}

    def loss(x, gate, w):
        out = jaxkern.rms_norm(x, w[0], activation=name, gate=gate, gate_activation=name, **options)
        if len(w) > 1:
            out = jaxkern.linear(out, w, activation=name, **options)
            out = jaxkern.gated_linear_unit(out, w, w, activation=name, recompute=True, **options)
        return jnp.sum(out.astype(jnp.float32))

    of_norm, of_products = ("rms_norm_fwd", "rms_norm_bwd"), ("linear_activation_fwd", "linear_dx")
    for rows, n, kernels in (
        (1, 2048, of_norm),
        (128, 128, (*of_norm, *of_products, "gated_fwd", "gated_bwd")),
    ):
        x, w = jnp.ones((128, n), jnp.bfloat16), jnp.ones((rows, n), jnp.bfloat16)
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, x, w)
        calls = check.kernel_calls(traced.lower(lowering_platforms=("cuda",)).as_text())
        for kernel in kernels:
            assert any(kernel in line for line in calls), kernel
