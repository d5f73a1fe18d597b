"""rms_norm and layer_norm: what is their own beside accuracy at many sizes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.mosaic.launch import LANES, interpreter
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.forward import launch_fwd
from jaxkern.ops.norm.long_row import long_row
from jaxkern.ops.norm.pointwise import Options
from tests import check
from tests.norms import EACH, OPS, VARIANTS, check_case, inputs, oracle, run, run_vjp


@check.BOTH
@pytest.mark.parametrize(
    ("op", "dtype", "other"),
    [
        *(("layer_norm", "bfloat16", "float32"), ("rms_norm", "float32", "bfloat16")),
        *(("layer_norm", "float16", "float32"), ("rms_norm", "bfloat16", "float32")),
    ],
)
def test_norm_mixed_dtypes(op, dtype, other, implementation):
    check_case(op, inputs(op, (5, 768), dtype, "bias", weight_dtype=other), implementation)
    arrays = inputs(op, (5, 300), dtype, "residual gate", weight_dtype=other)
    arrays["residual"] = arrays["residual"].astype(other)
    outs, grads = run_vjp(op, arrays, implementation)
    # As in JAX: the sum has the dtype of x + residual, every gradient that of its array.
    assert outs[1].dtype == jnp.promote_types(dtype, other)
    np.testing.assert_array_equal(
        outs[1],
        (arrays["x"].astype("float32") + arrays["residual"].astype("float32")).astype(
            outs[1].dtype
        ),
    )
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
    narrow = min(dtype, other, key=lambda d: jnp.dtype(d).itemsize)
    np.testing.assert_array_equal(grads["x"].astype(narrow), grads["residual"].astype(narrow))


@check.BOTH
@EACH
def test_norm_of_the_sum_it_returns(op, implementation):
    """out, h = norm(x, residual=r) is norm(h), to the bit."""
    arrays = inputs(op, (6, 256), "bfloat16", "residual")
    with check.running(implementation):
        out, h = OPS[op](**arrays, implementation=implementation)
        rest = {k: arrays[k] for k in arrays if k not in ("x", "residual")}
        again = OPS[op](h, **rest, implementation=implementation)
    np.testing.assert_array_equal(out, again)


@check.BOTH
def test_norm_options(implementation):
    arrays = inputs("rms_norm", (4, 512), "float32")
    check_case("rms_norm", arrays, implementation, eps=0.1, weight_offset=1.0)
    arrays = inputs("layer_norm", (4, 200), "float32")
    check_case("layer_norm", arrays, implementation, eps=0.1, weight_offset=1.0)


@check.BOTH
@pytest.mark.parametrize(("op", "dtype"), [("layer_norm", "float32"), ("rms_norm", "bfloat16")])
def test_norm_large_mean(op, dtype, implementation):
    """x near 1e4: its mean square is far from its variance."""
    n = 760 if dtype == "float32" else 1024
    check_case(op, inputs(op, (8, n), dtype, offset=1e4), implementation)


@check.BOTH
@pytest.mark.parametrize(("op", "n"), [("rms_norm", 256), ("layer_norm", 300)])
def test_norm_without_parameters(op, n, implementation):
    arrays = inputs(op, (4, n), "float32")
    x = arrays["x"]
    trivial = {"x": x, "weight": jnp.ones(n)}
    if op == "layer_norm":
        trivial["bias"] = jnp.zeros(n)
    (out, _), grads = run_vjp(op, {"x": x}, implementation)
    (want, _), want_grads = run_vjp(op, trivial, implementation)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(grads["x"], want_grads["x"], rtol=0, atol=1e-6)
    if op == "layer_norm":
        (out, _), grads = run_vjp(op, {"x": x, "bias": arrays["bias"]}, implementation)
        np.testing.assert_allclose(out, want + arrays["bias"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(grads["bias"], want_grads["bias"], rtol=1e-6, atol=1e-6)


@check.BOTH
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 300), (3, 0), (0,), (0, 0)])
def test_norm_empty(shape, implementation):
    arrays = {k: jnp.ones(shape, jnp.bfloat16) for k in ("x", "residual", "gate")}
    arrays |= {k: jnp.ones(shape[-1:]) for k in ("weight", "bias")}
    (out, h), grads = run_vjp("layer_norm", arrays, implementation)
    assert out.shape == h.shape == grads["x"].shape == grads["gate"].shape == shape
    assert out.dtype == grads["residual"].dtype == jnp.bfloat16
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(grads[name], np.zeros(shape[-1:], np.float32))


@check.BOTH
@pytest.mark.parametrize("shape", [(256,), (1, 1, 8, 256)])
def test_norm_rank(shape, implementation):
    arrays = inputs("rms_norm", shape, "float32")
    with check.running(implementation):
        out = jaxkern.rms_norm(**arrays, implementation=implementation)
    rows = jaxkern.rms_norm(arrays["x"].reshape(-1, 256), arrays["weight"], implementation="xla")
    np.testing.assert_allclose(out, rows.reshape(shape), rtol=3e-7, atol=0)


@check.BOTH
@pytest.mark.parametrize(
    ("op", "n", "bad"),
    [("layer_norm", 127, np.nan), ("rms_norm", 256, np.inf), ("layer_norm", 256, np.nan)],
)
def test_norm_bad_row_stays_alone(op, n, bad, implementation):
    arrays = inputs(op, (9, n), "float32", "gate")
    poisoned = arrays | {"x": arrays["x"].at[3, n // 2].set(bad)}
    others = np.arange(9) != 3
    (out, _), grads = run_vjp(op, arrays, implementation, activation="relu")
    (bad_out, _), bad_grads = run_vjp(op, poisoned, implementation, activation="relu")
    np.testing.assert_array_equal(bad_out[others], out[others])
    for name in ("x", "gate"):
        np.testing.assert_array_equal(bad_grads[name][others], grads[name][others])
        assert np.isnan(bad_grads[name][3]).any()
    assert np.isnan(bad_out[3]).any()


@check.BOTH
@EACH
def test_norm_extreme_rows(op, implementation):
    """Zero, constant, denormal and large rows."""
    rng = np.random.default_rng(0).standard_normal(256)
    rows = [0 * rng, 0 * rng + 3, 1e-20 * rng, 1e-40 * rng, 1e18 * rng]
    x = jnp.asarray(np.stack(rows * 2), jnp.float32)
    (out, _), grads = run_vjp(op, {"x": x, "weight": jnp.ones(256)}, implementation)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(out[1], 0 if op == "layer_norm" else 1, rtol=1e-6, atol=1e-6)
    tiny = x[2] - x[2].mean() if op == "layer_norm" else x[2]
    eps = 1e-5 if op == "layer_norm" else 1e-6
    np.testing.assert_allclose(out[2], tiny / math.sqrt(eps), rtol=1e-5, atol=1e-24)
    assert abs(float(jnp.mean(out[4] ** 2)) - 1) < 1e-4
    assert np.isfinite(grads["x"]).all()
    assert np.isfinite(grads["weight"]).all()


@check.BOTH
@pytest.mark.parametrize(
    ("op", "variant"), [("rms_norm", "gate before"), ("layer_norm", "all, gate after")]
)
def test_norm_finite_differences(op, variant, implementation):
    """dx couples the elements of a row; only a random cotangent sees it."""
    v = VARIANTS[variant]
    options = {k: 64 if k == "group_size" else o for k, o in dict(v.options).items()}
    arrays = inputs(op, (2, 128), "float32", v.extra)
    outs, grads = run_vjp(op, arrays, implementation, **options)
    rng = np.random.default_rng(3)  # the cotangents of run_vjp
    cotangents = [rng.standard_normal(o.shape) for o in outs if o is not None]
    wide = {k: np.asarray(a, np.float64) for k, a in arrays.items()}
    zero = np.zeros_like(wide["x"])

    def loss(arrays):
        outs = oracle(op, arrays, zero, **options)[0]
        return sum(np.sum(o * c) for o, c in zip(outs, cotangents, strict=False))

    rng = np.random.default_rng(6)
    h = 1e-5
    for name, a in wide.items():
        step = rng.standard_normal(a.shape)
        slope = loss(wide | {name: a + h * step}) - loss(wide | {name: a - h * step})
        slope /= 2 * h
        got = float(np.sum(np.asarray(grads[name], np.float64) * step))
        np.testing.assert_allclose(got, slope, rtol=1e-5, atol=1e-5)


@EACH
def test_norm_float64(op):
    """x64 users get float64 arithmetic, from plain JAX."""
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (3, 200), jnp.float64)
        weight = jnp.ones(200, jnp.float64)
        got = OPS[op](x, weight, activation="gelu")
        assert got.dtype == jnp.float64
        wide = {"x": np.asarray(x), "weight": np.asarray(weight)}
        want = oracle(op, wide, wide["x"], activation="gelu")[0][0]
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)
        with pytest.raises(NotImplementedError, match="x is float64"):
            OPS[op](x, weight, implementation="mosaic")


@EACH
def test_norm_errors(op):
    f = OPS[op]
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\).*got \(2,\)"):
        f(x, jnp.ones(2))
    for name in ("residual", "gate"):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(2, 4\).*got \(4,\)"):
            f(x, **{name: jnp.ones(4)})
    with pytest.raises(ValueError, match="at least one axis"):
        f(1.0)
    with pytest.raises(ValueError, match=r"eps must be at least 0, got -1e-06"):
        f(x, eps=-1e-6)
    with pytest.raises(ValueError, match="eps must be at least 0, got nan"):
        f(x, eps=float("nan"))
    with pytest.raises(TypeError, match=r"eps must be a Python number.*static"):
        jax.jit(lambda eps: f(x, eps=eps))(1e-6)
    with pytest.raises(
        ValueError, match=r'activation must be one of "relu".* or None; got \'mish\''
    ):
        f(x, activation="mish")
    with pytest.raises(ValueError, match=r'gate_activation must be one of "relu".*; got \'mish\''):
        f(x, gate=x, gate_activation="mish")
    with pytest.raises(ValueError, match=r'gate_activation must be one of.*"tanh"; got None'):
        f(x, gate=x, gate_activation=None)
    with pytest.raises(ValueError, match="positive divisor of the last axis of x, 4; got 3"):
        f(x, group_size=3)
    with pytest.raises(TypeError, match=r"group_size must be an int or None, got 2\.0"):
        f(x, group_size=2.0)


@EACH
def test_norm_bias_error(op):
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\).*got \(2,\)"):
        OPS[op](jnp.ones((2, 4)), None, jnp.ones(2))


@pytest.mark.parametrize("n", [64, 129, 1024, 4096, 65536, 262144])
@EACH
def test_norm_lowers_for_cuda(op, n):
    """The kernels' layouts are accepted, with no GPU here, and so are clusters."""
    for dtype, extra in (("bfloat16", "residual gate"), ("float32", "")):
        arrays = inputs(op, (40, n), dtype, extra) if n < 2**17 else {"x": jnp.ones((40, n), dtype)}

        def loss(arrays):
            out = run(op, arrays, "mosaic")[0]
            return out.astype(jnp.float32).sum()

        text = jax.jit(jax.grad(loss)).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert f"{op}_fwd" in text
        assert f"{op}_bwd" in text


@pytest.mark.parametrize("m", [1, 100, 1 << 20])
def test_norm_sums_of_bounded_size(m):
    """The parts of dw and db do not grow with the rows."""
    for n in (64, 256, 1000, 1024, 4096, 16384, 262144):
        tile = tiles.backward(tiles.Sizes(m, 1, n, 2, (2, 2), (4,), plain=True), 1)
        assert tile.clusters <= 8 * 132
        assert tile.clusters * n <= max(132 * 4096 * 2, 132 * n)


def test_norm_saves_no_more_than_its_arguments():
    """For the backward, beside the arguments and the sum that is returned: two numbers per row."""
    a = inputs("layer_norm", (6, 512), "bfloat16", "residual gate")

    def saved(*arrays):
        f = lambda *v: run("layer_norm", dict(zip(a, v, strict=True)), None)
        return jax.vjp(f, *arrays)[1]

    held = jax.tree.leaves(jax.eval_shape(saved, *a.values()))
    full = [v for v in held if v.size == 6 * 512]
    assert len(full) == 2  # the sum and the gate
    assert sum(v.size for v in held if v.size < 6 * 512) <= 2 * 512 + 2 * 6


@pytest.mark.compiled
@pytest.mark.parametrize("n", [256, 1000, 1024, 4096, 8192, 16384, 65536, 262144])
@EACH
def test_norm_same_bits(op, n):
    arrays = inputs(op, (400, n), "bfloat16", "gate")
    step = jax.jit(lambda a: jax.vjp(lambda a: run(op, a, "mosaic")[0], a)[1](a["x"]))
    check.assert_same_bits(lambda: step(arrays))


@pytest.mark.compiled
@pytest.mark.large
def test_norm_beyond_int32():
    """More than 2³¹ elements: the last rows are right."""
    m, n = (1 << 19) + 3, 4096 + 256
    x = jax.random.normal(jax.random.key(0), (m, n), jnp.bfloat16)
    weight = jnp.ones(n)
    out, vjp = jax.jit(lambda x: jax.vjp(lambda x: jaxkern.layer_norm(x, weight), x))(x)
    dout = jnp.cos(x)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, dout)
    plain = functools.partial(jaxkern.layer_norm, weight=weight, implementation="xla")
    for rows in (slice(0, 5), slice(m // 2, m // 2 + 5), slice(m - 5, m)):
        want, want_vjp = jax.vjp(plain, x[rows])
        check.assert_close(out[rows], want, 2.0**-9)
        check.assert_close(dx[rows], want_vjp(dout[rows])[0], 2.0**-9)


def test_windows_cover_every_element_once():
    """Over warpgroups and blocks, windows cover a row, and their masks count every element once."""
    for n in (128, 287, 1128, 8192, 11008, 20000, 100000, 200003, 262144):
        for few in (False, True):
            row = long_row(n, 2, 8 if few else 32, 8, 8 if few else 4)
            w, seen = row.windows, np.zeros(max(n, LANES), int)
            for i in range(row.windows_per_warpgroup * row.warpgroups * row.blocks):
                start = int(w.start(min(i, 10**6)))
                column = np.arange(start, start + w.size)
                seen[column[column >= i * w.size]] += 1
            np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize(
    ("stages", "params_in", "waves", "sums_ahead"),
    [
        (2, "shared", (), False),
        (3, "registers", (2, 1), False),
        (0, "global", (1, 1, 1), False),
        (3, "registers", (), True),
    ],
)
def test_forward_in_clusters(stages, params_in, waves, sums_ahead):
    """What clusters do, by blocks of two warpgroups, each of which goes through several rows."""
    arrays = inputs("layer_norm", (5, 1024), "float32", "residual gate")
    dtype = "float32"
    options = Options(
        "layer_norm", True, 1e-5, 0.0, None, "silu", True, 1024, dtype, dtype, "interpret"
    )
    with interpreter():
        row = long_row(1024, 4, 4, 2, 2)
        assert (row.warpgroups, row.windows_per_warpgroup) == (2, 2)
        tile = tiles.Forward(row, 2, stages, params_in, waves, sums_ahead)
        got = launch_fwd(options, **arrays, tile=tile)[:2]
    want = jaxkern.layer_norm(**arrays, implementation="xla")
    for a, b in zip(got, want, strict=True):
        check.assert_close(a, b, 1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_norm_of_any_rank(implementation):
    x = jnp.linspace(-1, 1, 3 * 256).reshape(3, *[1] * 28, 256)
    norm = functools.partial(jaxkern.rms_norm, implementation=implementation)
    got, (dx,) = check.value_and_grads(norm, (x,), x)
    want, (dwant,) = check.value_and_grads(norm, (x.reshape(3, 256),), x.reshape(3, 256))
    np.testing.assert_array_equal(got.reshape(want.shape), want)
    np.testing.assert_array_equal(dx.reshape(want.shape), dwant)
