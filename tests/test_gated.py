"""Gated units: cases for the common suite, and what is their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops import activations, curves
from tests import check
from tests.test_activations import ELEMENTWISE, normal

GATED = {
    "silu": (jaxkern.swiglu, jaxkern.silu_and_mul),
    "gelu_tanh": (jaxkern.geglu, jaxkern.gelu_and_mul),
    "gelu_erf": (
        functools.partial(jaxkern.geglu, approximate=False),
        functools.partial(jaxkern.gelu_and_mul, approximate=False),
    ),
    "relu": (jaxkern.reglu, None),
    **{
        name: (functools.partial(jaxkern.glu, activation=name), None)
        for name in ("sigmoid", "tanh", "quick_gelu", "relu_squared")
    },
}
CLAMPED = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # as gpt-oss's, of smaller numbers


def gated_oracle(name, gate, up, dout):
    value, slope = check.activated(name, gate)
    return value * up, (dout * up * slope, dout * value)


def clamped_oracle(gate, up, dout):
    near, shifted = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5) + 1
    value, slope = check.activated("quick_gelu", near)
    return value * shifted, (
        dout * shifted * slope * (gate <= 1.5),
        dout * value * (np.abs(up) <= 1.5),
    )


def clamped_plain(gate, up):
    limit = jnp.asarray(1.5, gate.dtype)
    near = jnp.where(gate > limit, limit, gate)  # whose slope at the limit is 1, as PyTorch's
    up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    return near * jax.nn.sigmoid(1.702 * near) * (up + 1)


def halves_oracle(name, gate_up, dout):
    out, grads = gated_oracle(name, *np.split(gate_up, 2, -1), dout)
    return out, (np.concatenate(grads, -1),)


@check.BOTH
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("silu", dtype) for dtype in ("bfloat16", "float16", "float32")),
        *((n, "bfloat16") for n in ("gelu_tanh", "relu")),
        ("gelu_erf", "float32"),
        *(("tanh", "float16"), ("sigmoid", "bfloat16"), ("quick_gelu", "bfloat16")),
    ],
)
def test_gated_accuracy(name, dtype, implementation):
    pair, _ = GATED[name]
    plain = lambda g, u: ELEMENTWISE[name][1](g) * u
    arrays = normal((3, 704), dtype), normal((3, 704), dtype, seed=1)
    oracle = functools.partial(gated_oracle, name)
    check.check_accuracy(pair, plain, oracle, arrays, implementation)


@check.BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_clamped_accuracy(dtype, implementation):
    """Of gate and up apart, and side by side."""
    gate, up = normal((3, 704), dtype), normal((3, 704), dtype, seed=1)
    pair = functools.partial(jaxkern.swiglu, **CLAMPED)
    check.check_accuracy(pair, clamped_plain, clamped_oracle, (gate, up), implementation)
    halves = functools.partial(jaxkern.silu_and_mul, **CLAMPED)

    def oracle(x, dout):
        out, grads = clamped_oracle(*np.split(x, 2, -1), dout)
        return out, (np.concatenate(grads, -1),)

    plain = lambda x: clamped_plain(*jnp.split(x, 2, -1))
    side_by_side = jnp.concatenate([gate, up], -1)
    check.check_accuracy(halves, plain, oracle, (side_by_side,), implementation)


def clamped_by_transformers(gate_up, alpha, limit):
    """As GptOssExperts has it: gate and up interleaved."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def test_clamped_is_that_of_gpt_oss():
    """And what the docstrings say of interleaved projections is so."""
    x, w = np.asarray(normal((4, 8), "float32")), np.asarray(normal((8, 12), "float32", seed=1))
    want = clamped_by_transformers(np.float64(x) @ np.float64(w), 1.702, 7.0)
    assert (np.abs(x @ w) > 7).any()
    ours = jnp.concatenate([w[:, 0::2], w[:, 1::2]], axis=1)
    options = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    with jax.default_matmul_precision("highest"):
        for got in (
            jaxkern.silu_and_mul(x @ ours, **options),
            jaxkern.swiglu(*jnp.split(x @ ours, 2, -1), **options),
            jaxkern.gated_linear_unit(x, ours, **options),
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@check.BOTH
def test_clamped_extremes(implementation):
    """At the limit the gradient passes, as PyTorch's clamp has it; a NaN stays one."""
    gate = jnp.asarray([1.5, 1.6, -1.6, np.inf, -np.inf, np.nan, 1.0, 1.0, 1.0, 1.0])
    up = jnp.asarray([1.5, 1.0, -1.5, 1.0, 1.0, 1.0, np.inf, -np.inf, np.nan, -1.6])
    with check.running(implementation):
        run = functools.partial(jaxkern.swiglu, **CLAMPED, implementation=implementation)
        out, vjp = jax.vjp(run, gate, up)
        dgate, dup = vjp(jnp.ones_like(out))
    nan = np.isnan(gate) | np.isnan(up)
    np.testing.assert_array_equal(np.isnan(out), nan)
    assert np.isfinite(dup[~nan]).all()
    np.testing.assert_array_equal((dgate == 0)[~nan], [0, 1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal((dup == 0)[~nan], [0, 0, 0, 0, 1, 1, 1, 1])


def plain_halves(name, x):
    gate, up = jnp.split(x, 2, -1)
    return ELEMENTWISE[name][1](gate) * up


@check.BOTH
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        # Rows of which an access takes two elements, and one.
        *(("silu", (5, 2 * h), "bfloat16") for h in (6, 1375)),
        *((name, (2, 3, 144), "float32") for name in ("gelu_tanh", "gelu_erf")),
    ],
)
def test_halves_accuracy(name, shape, dtype, implementation):
    plain, oracle = (functools.partial(f, name) for f in (plain_halves, halves_oracle))
    arrays = (normal(shape, dtype, seed=shape[-1] // 2),)
    check.check_accuracy(GATED[name][1], plain, oracle, arrays, implementation)


@check.BOTH
@pytest.mark.parametrize("shape", [(), (7,), (257, 3)])
def test_gated_shapes(shape, implementation):
    """Sizes that no access width divides: below one access, below one block, above."""
    plain = lambda g, u: jax.nn.silu(g) * u
    arrays = normal(shape, "float32"), normal(shape, "float32", seed=1)
    oracle = functools.partial(gated_oracle, "silu")
    check.check_accuracy(jaxkern.swiglu, plain, oracle, arrays, implementation)


@check.BOTH
def test_gated_mixed_dtypes(implementation):
    gate, up = normal((4, 40), "bfloat16"), normal((4, 40), "float32", seed=1)
    with check.running(implementation):
        run = functools.partial(jaxkern.swiglu, implementation=implementation)
        out, vjp = jax.vjp(run, gate, up)
        dgate, dup = vjp(jnp.ones_like(out))
    assert (out.dtype, dgate.dtype, dup.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wide = gate.astype(jnp.float32)
    np.testing.assert_allclose(dup, jax.nn.silu(wide), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out, (jax.nn.silu(wide) * up).astype(jnp.bfloat16))


@check.BOTH
def test_reglu_lets_nothing_past_its_corner(implementation):
    gate = jnp.asarray([-1.0, 0.0, 2.0, -1.0, 2.0])
    up = jnp.asarray([np.inf, np.nan, 3.0, 1.0, np.inf])
    dout = jnp.asarray([1.0, 1.0, 1.0, np.inf, 1.0])
    with check.running(implementation):
        run = functools.partial(jaxkern.reglu, implementation=implementation)
        grads = jax.vjp(run, gate, up)[1](dout)
    want = jax.vjp(lambda g, u: jax.nn.relu(g) * u, gate, up)[1](dout)
    np.testing.assert_array_equal(grads[0], want[0])
    np.testing.assert_array_equal(grads[1], want[1])


@check.BOTH
def test_swiglu_extremes(implementation):
    gate = jnp.asarray([1e4, -1e4, np.inf, -np.inf, np.nan, 1.0], jnp.float16)
    up = jnp.asarray([2.0, 2.0, 2.0, 2.0, 2.0, np.inf], jnp.float16)
    with check.running(implementation):
        run = functools.partial(jaxkern.swiglu, implementation=implementation)
        out, vjp = jax.vjp(run, gate, up)
        dgate, dup = vjp(jnp.ones_like(out))
    np.testing.assert_array_equal(out, [20000, 0, np.inf, 0, np.nan, np.inf])
    np.testing.assert_array_equal(dgate, [2, 0, 2, 0, np.nan, np.inf])
    np.testing.assert_array_equal(dup[:5], [1e4, 0, np.inf, 0, np.nan])


@pytest.mark.parametrize("name", GATED)
def test_gated_finite_differences(name):
    gate, up = (np.asarray(normal((50,), "float32", seed), np.float64) for seed in (3, 4))
    gate[np.abs(gate) < 1e-3] = 1.0  # relu has a corner
    dout, h = np.asarray(normal((50,), "float32", 5), np.float64), 1e-5
    slopes = gated_oracle(name, gate, up, dout)[1]
    value = lambda g, u: gated_oracle(name, g, u, dout)[0]
    numeric = [value(gate + h, up) - value(gate - h, up), value(gate, up + h) - value(gate, up - h)]
    grads = jax.vjp(GATED[name][0], jnp.float32(gate), jnp.float32(up))[1](jnp.float32(dout))
    for slope, difference, grad in zip(slopes, numeric, grads, strict=True):
        np.testing.assert_allclose(slope, dout * difference / (2 * h), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(grad, slope, rtol=2e-6, atol=2e-6)


def test_what_is_chosen():
    """XLA for what it fuses at little cost; a gated unit has kernels both ways."""
    x = jnp.ones((64, 256), jnp.bfloat16)
    lowered = lambda f, *a: jax.jit(f).trace(*a).lower(lowering_platforms=("cuda",)).as_text()
    for name, (call, _) in ELEMENTWISE.items():
        by_itself = lowered(jax.grad(lambda x: call(x).sum()), x)  # noqa: B023
        assert ("mosaic_gpu" in by_itself) is (name == "gelu_erf")
        grad = jax.grad(lambda x: call(x, implementation="mosaic").sum())  # noqa: B023
        assert "_bwd" in lowered(grad, x)
    for pair, halves in GATED.values():
        for function in filter(None, (lambda x, f=pair: f(x, x), halves)):
            text = lowered(jax.value_and_grad(lambda x: function(x).sum()), x)  # noqa: B023
            assert len(check.kernel_calls(text)) == 2
            assert "stablehlo.concatenate" not in text.replace("custom_partitioning", "")


def test_kernels_refuse_float64():
    with jax.enable_x64(True):
        x = jnp.linspace(-700.0, 700.0, 11, dtype=jnp.float64)
        np.testing.assert_allclose(
            jaxkern.swiglu(x, x), x * check.activated("silu", np.asarray(x))[0], 1e-13
        )
        with pytest.raises(NotImplementedError, match="gate is float64"):
            jaxkern.swiglu(x, x, implementation="mosaic")


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(1000, 4096), (1001, 1001)])
def test_gated_same_bits(shape):
    gate, up, dout = (normal(shape, "bfloat16", seed) for seed in range(3))
    run = jax.jit(lambda g, u, d: jax.vjp(jaxkern.swiglu, g, u)[1](d))
    check.assert_same_bits(lambda: run(gate, up, dout))


@pytest.mark.compiled
@pytest.mark.large
def test_gated_beyond_int32():
    """More than 2³¹ elements in one array: the last rows are right."""
    m, h = (1 << 17) + 3, 8192 + 256
    x = jax.random.normal(jax.random.key(0), (m, 2 * h), jnp.bfloat16)
    assert x.size > 2**31
    out, vjp = jax.jit(lambda x: jax.vjp(jaxkern.silu_and_mul, x))(x)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, out)
    for rows in (slice(0, 5), slice(m // 2, m // 2 + 5), slice(m - 5, m)):
        want, want_vjp = jax.vjp(
            functools.partial(activations.pointwise_reference, curves.Unit("silu")), x[rows]
        )
        check.assert_close(out[rows], want, 2.0**-9)
        check.assert_close(dx[rows], want_vjp(out[rows])[0], 2.0**-9)


@pytest.mark.parametrize(("h", "fits"), [(2**16, True), (2**16 + 1, False)])
def test_halves_beyond_32_bits_of_units(h, fits):
    """The rows of the one begin at multiples of 16 bytes; the other's elements are too many."""
    x = jax.ShapeDtypeStruct((2**16, 2 * h), jnp.bfloat16)
    lowered = jax.jit(jaxkern.silu_and_mul).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in lowered) is fits
    if not fits:
        with pytest.raises(NotImplementedError, match="1 at a time"):
            jax.eval_shape(functools.partial(jaxkern.silu_and_mul, implementation="mosaic"), x)


SWIGLU = check.Op(
    name="swiglu",
    call=jaxkern.swiglu,
    reference=lambda g, u: jax.nn.silu(g) * u,
    arrays=lambda key: tuple(jax.random.normal(k, (8, 2, 40)) for k in jax.random.split(key)),
    kernels=("swiglu_fwd", "swiglu_bwd"),
    axes="mtd mtd -> mtd",
    features="d",
    vmaps=[(0, None), (None, 0), (1, 0)],
    runs_again=False,
    once=True,
)


def beside(name, cells, **changes):
    """An op beside swiglu's matrix: what its other shapes or curve could break."""
    cells = [(cell, implementation) for cell in cells for implementation in ("mosaic", None)]
    return dataclasses.replace(SWIGLU, name=name, cells=cells, **changes)


OF_ONE = {"axes": "mtd -> mtd", "vmaps": [(0,), (1,)]}
SILU_AND_MUL = beside(
    "silu_and_mul",
    ["vmap", "vmap(grad)", "auto mesh", "explicit mesh", "features split", "kernels lowered"],
    call=jaxkern.silu_and_mul,
    reference=lambda x: jax.nn.silu(x[..., :40]) * x[..., 40:],
    arrays=lambda key: (jax.random.normal(key, (8, 2, 80)),),
    kernels=("silu_and_mul_fwd", "silu_and_mul_bwd"),
    **OF_ONE,
)
GELU = beside(
    "gelu",
    ["grad(grad)", "explicit mesh", "kernels lowered"],
    call=functools.partial(jaxkern.gelu, approximate=False),
    reference=functools.partial(jax.nn.gelu, approximate=False),
    arrays=lambda key: (jax.random.normal(key, (8, 2, 40)),),
    kernels=("gelu_erf_fwd", "gelu_erf_bwd"),
    **OF_ONE,
)
CLAMPED_SWIGLU = beside(
    "swiglu, clamped",
    ["value", "grad(grad)", "kernels lowered", "jvp"],
    call=functools.partial(jaxkern.swiglu, **CLAMPED),
    reference=clamped_plain,
)
test_gated_transformations = check.transformations(SWIGLU, SILU_AND_MUL, GELU, CLAMPED_SWIGLU)
