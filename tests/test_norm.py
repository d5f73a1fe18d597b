"""rms_norm: cases for the common suite, and what is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.ops import norm
from tests import check


def oracle(x, weight, dout, eps=1e-6, weight_offset=0.0):
    """Output and gradients in float64 NumPy, by the formulas of the paper, row by row."""
    n = x.shape[-1]
    rows, douts = x.reshape(-1, n), dout.reshape(-1, n)
    scale = weight + weight_offset
    out, dx, dweight = np.empty_like(rows), np.empty_like(rows), np.zeros(n)
    for i, (row, d) in enumerate(zip(rows, douts, strict=True)):
        rms = np.sqrt(np.sum(row**2) / n + eps)
        out[i] = row / rms * scale
        # d(row_k / rms) / d row_j = δ_kj / rms − row_k row_j / (n rms³)
        dx[i] = d * scale / rms - row * np.sum(d * scale * row) / (n * rms**3)
        dweight += d * row / rms
    return out.reshape(x.shape), (dx.reshape(x.shape), dweight)


def plain(x, weight, eps=1e-6, weight_offset=0.0):
    """What a user would write, in the dtype of x."""
    rms = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.asarray(eps, x.dtype))
    return x / rms * (weight + jnp.asarray(weight_offset, weight.dtype)).astype(x.dtype)


def inputs(shape, dtype, weight_dtype=None, offset=0.0, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    x = (jax.random.normal(keys[0], shape) + offset).astype(dtype)
    weight = 1 + 0.1 * jax.random.normal(keys[1], shape[-1:])
    return x, weight.astype(weight_dtype or dtype)


def check_case(arrays, implementation, **options):
    x = arrays[0]
    dout_norm = np.sqrt(x.size)  # the suite's cotangents are standard normal
    rstd = 1 / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, -1) + options.get("eps", 1e-6))
    with check.running(implementation):
        check.check_accuracy(
            lambda x, w: jaxkern.rms_norm(x, w, implementation=implementation, **options),
            lambda x, w: plain(x, w, **options),
            lambda x, w, d: oracle(x, w, d, **options),
            arrays,
            magnitudes=(np.sqrt(x.size), dout_norm * float(rstd.max(initial=0)), dout_norm),
        )


BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
)
SIZES = [1, 2, 127, 128, 129, 256, 287, 760, 768, 1128, 4096, 5120, 8192]


@BOTH
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rms_norm_accuracy(n, dtype, implementation):
    check_case(inputs((2, 3, n), dtype), implementation)


@BOTH
@pytest.mark.parametrize("n", [11008, 16384, 20000, 65536])
def test_rms_norm_long_rows(n, implementation):
    check_case(inputs((3, n), "bfloat16"), implementation)


@BOTH
@pytest.mark.parametrize("m", [1, 3, 131, 133, 300])
def test_rms_norm_row_counts(m, implementation):
    """More rows than one wave of blocks, and counts that no block size divides."""
    check_case(inputs((m, 256), "bfloat16", seed=m), implementation)


@BOTH
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")],
)
def test_rms_norm_mixed_dtypes(dtype, weight_dtype, implementation):
    check_case(inputs((5, 768), dtype, weight_dtype), implementation)
    check_case(inputs((5, 300), dtype, weight_dtype), implementation)


@BOTH
def test_rms_norm_options(implementation):
    check_case(inputs((4, 512), "float32"), implementation, eps=0.1, weight_offset=1.0)
    check_case(inputs((4, 200), "float32"), implementation, eps=0.1, weight_offset=-0.5)


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm_large_offset(dtype, implementation):
    """x near 1e4: its mean square is far from its variance."""
    check_case(inputs((4, 760), dtype, offset=1e4), implementation)
    check_case(inputs((4, 1024), dtype, offset=1e4), implementation)


@BOTH
@pytest.mark.parametrize("n", [100, 256, 9000])
def test_rms_norm_without_weight(n, implementation):
    x, weight = inputs((3, n), "float32")
    ones = jnp.ones_like(weight)
    with check.running(implementation):
        norm_of = lambda *a: jaxkern.rms_norm(*a, implementation=implementation)
        out, vjp = jax.vjp(norm_of, x)
        want, want_vjp = jax.vjp(norm_of, x, ones)
        np.testing.assert_array_equal(out, want)
        np.testing.assert_allclose(vjp(x + 1)[0], want_vjp(x + 1)[0], rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 300), (3, 0), (0,), (0, 0)])
def test_rms_norm_empty(shape, implementation):
    x, weight = jnp.ones(shape, jnp.bfloat16), jnp.ones(shape[-1:])
    with check.running(implementation):
        out, vjp = jax.vjp(
            lambda *a: jaxkern.rms_norm(*a, implementation=implementation), x, weight
        )
        dx, dweight = vjp(out)
    assert out.shape == dx.shape == shape
    assert out.dtype == dx.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dweight, np.zeros(shape[-1:], np.float32))


@BOTH
@pytest.mark.parametrize("shape", [(256,), (1, 1, 2, 256)])
def test_rms_norm_rank(shape, implementation):
    x, weight = inputs(shape, "float32")
    with check.running(implementation):
        out = jaxkern.rms_norm(x, weight, implementation=implementation)
    rows = jaxkern.rms_norm(x.reshape(-1, 256), weight, implementation="xla")
    np.testing.assert_allclose(out, rows.reshape(shape), rtol=3e-7, atol=0)


@BOTH
@pytest.mark.parametrize("n", [127, 256, 700, 20000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rms_norm_bad_row_stays_alone(n, bad, implementation):
    x, weight = inputs((7, n), "float32")
    poisoned = x.at[3, n // 2].set(bad)
    others = np.arange(7) != 3
    with check.running(implementation):
        norm_of = lambda x: jaxkern.rms_norm(x, weight, implementation=implementation)
        out, vjp = jax.vjp(norm_of, x)
        bad_out, bad_vjp = jax.vjp(norm_of, poisoned)
        dx, bad_dx = vjp(x)[0], bad_vjp(x)[0]
    np.testing.assert_array_equal(bad_out[others], out[others])
    np.testing.assert_array_equal(bad_dx[others], dx[others])
    assert np.isnan(bad_out[3]).any()
    assert np.isnan(bad_dx[3]).any()


@BOTH
def test_rms_norm_constant_and_zero_rows(implementation):
    x = jnp.concatenate([jnp.zeros((1, 256)), jnp.full((1, 256), 3.0), jnp.full((1, 256), 1e-20)])
    weight = jnp.ones(256)
    with check.running(implementation):
        out, vjp = jax.vjp(
            lambda *a: jaxkern.rms_norm(*a, implementation=implementation), x, weight
        )
        dx, _ = vjp(jnp.ones_like(x))
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(out[1], 1, rtol=1e-6)
    np.testing.assert_allclose(dx[0], 1e3, rtol=1e-6)  # 1 / sqrt(eps)
    np.testing.assert_allclose(dx[1], 0, atol=1e-6)
    assert np.isfinite(dx).all()


@BOTH
def test_rms_norm_finite_differences(implementation):
    """dx couples the elements of a row; only a random cotangent sees it."""
    x, weight = inputs((2, 128), "float32")
    dout = np.asarray(jax.random.normal(jax.random.key(5), x.shape), np.float64)
    step = np.asarray(jax.random.normal(jax.random.key(6), x.shape), np.float64)
    with check.running(implementation):
        norm_of = lambda x: jaxkern.rms_norm(x, weight, implementation=implementation)
        dx = np.asarray(jax.vjp(norm_of, x)[1](jnp.asarray(dout, jnp.float32))[0], np.float64)
    wide, w = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    loss = lambda x: np.sum(oracle(x, w, dout)[0] * dout)
    h = 1e-5
    slope = (loss(wide + h * step) - loss(wide - h * step)) / (2 * h)
    np.testing.assert_allclose(np.sum(dx * step), slope, rtol=1e-5)


@pytest.mark.parametrize("n", [127, 256, 4096, 11008])
def test_rms_norm_reference_is_the_formula(n):
    """The specification itself, held to float64."""
    x, weight = inputs((3, n), "float32")
    want, _ = oracle(*(np.asarray(a, np.float64) for a in (x, weight, x)), weight_offset=0.5)
    got = norm.rms_norm_reference(x, weight, weight_offset=0.5)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_rms_norm_float64():
    """x64 users get float64 arithmetic, from plain JAX."""
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (3, 200), jnp.float64)
        weight = jnp.ones(200, jnp.float64)
        got = jaxkern.rms_norm(x, weight)
        assert got.dtype == jnp.float64
        want, _ = oracle(np.asarray(x), np.asarray(weight), np.asarray(x))
        np.testing.assert_allclose(got, want, rtol=1e-14)
        with pytest.raises(NotImplementedError, match="x is float64"):
            jaxkern.rms_norm(x, weight, implementation="mosaic")


def test_rms_norm_errors():
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"x must have a floating dtype.*got int32.*astype"):
        jaxkern.rms_norm(jnp.ones((2, 4), jnp.int32))
    with pytest.raises(TypeError, match="weight must be an array, got str"):
        jaxkern.rms_norm(x, "ones")
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\).*got \(2,\)"):
        jaxkern.rms_norm(x, jnp.ones(2))
    with pytest.raises(ValueError, match="at least one axis"):
        jaxkern.rms_norm(1.0)
    with pytest.raises(ValueError, match=r"eps must be at least 0, got -1e-06"):
        jaxkern.rms_norm(x, eps=-1e-6)
    with pytest.raises(ValueError, match="eps must be at least 0, got nan"):
        jaxkern.rms_norm(x, eps=float("nan"))
    with pytest.raises(TypeError, match=r"eps must be a Python number.*static"):
        jax.jit(lambda eps: jaxkern.rms_norm(x, eps=eps))(1e-6)
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'triton\''):
        jaxkern.rms_norm(x, implementation="triton")
    if not check.ON_GPU:
        with pytest.raises(NotImplementedError, match=r"lowered for cpu. Use implementation="):
            jaxkern.rms_norm(x, implementation="mosaic")


@pytest.mark.parametrize("n", [129, 4096, 65536])
def test_rms_norm_lowers_for_cuda(n):
    """The kernels' layouts are accepted for every dtype, with no GPU here."""
    for dtype in ("bfloat16", "float16", "float32"):
        x, weight = inputs((3, n), dtype)
        grad = jax.grad(lambda *a: jaxkern.rms_norm(*a).astype(jnp.float32).sum(), (0, 1))
        text = jax.jit(grad).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
        assert "rms_norm_fwd" in text
        assert "rms_norm_bwd" in text


@pytest.mark.compiled
@pytest.mark.parametrize("n", [1000, 4096, 8192, 16384])
def test_rms_norm_same_bits(n):
    x, weight = inputs((2000, n), "bfloat16")
    run = jax.jit(lambda x, w, d: jax.vjp(jaxkern.rms_norm, x, w)[1](d))
    first = run(x, weight, x)
    for _ in range(20):
        for a, b in zip(first, run(x, weight, x), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.compiled
def test_rms_norm_beyond_int32():
    """More than 2³¹ elements: the last rows are right."""
    m, n = (1 << 19) + 3, 4096 + 256
    x = jax.random.normal(jax.random.key(0), (m, n), jnp.bfloat16)
    weight = jnp.ones(n)
    run = jax.jit(lambda x: jax.vjp(lambda x: jaxkern.rms_norm(x, weight), x))
    out, vjp = run(x)
    dout = jnp.cos(x)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, dout)
    for rows in (slice(0, 5), slice(m // 2, m // 2 + 5), slice(m - 5, m)):
        want, want_vjp = jax.vjp(lambda x: norm.rms_norm_reference(x, weight), x[rows])
        check.assert_close(out[rows], want, 2.0**-9)
        check.assert_close(dx[rows], want_vjp(dout[rows])[0], 2.0**-9)


RMS_NORM = check.Op(
    name="rms_norm",
    call=lambda x, w, implementation: jaxkern.rms_norm(
        x, w, eps=1e-3, weight_offset=0.5, implementation=implementation
    ),
    reference=lambda x, w: norm.rms_norm_reference(x, w, eps=1e-3, weight_offset=0.5),
    arrays=lambda key: inputs((8, 2, 256), "float32", seed=3),
    kernels=("rms_norm_fwd", "rms_norm_bwd"),
    rows=(P("data"), P(), P("data")),
    features=(P(None, None, "data"), P("data"), P(None, None, "data")),
    all_reduces=1,
    vmaps=[(0, None), (None, 0), (1, 0)],
)


@check.matrix(RMS_NORM)
def test_rms_norm_transformations(cell, record_property):
    check.check_cell(cell, record_property)
