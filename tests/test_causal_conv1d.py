"""causal_conv1d and its step, held to float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from tests import check


def oracle(x, weight, bias, dout, activation):
    """Output and gradients in float64, one tap at a time."""
    length, width = x.shape[1], weight.shape[1]
    s = np.zeros_like(x) + bias
    for t in range(length):
        for w in range(width):
            if t - (width - 1) + w >= 0:
                s[:, t] += weight[:, w] * x[:, t - (width - 1) + w]
    gate = 1 / (1 + np.exp(-s))
    out = s * gate if activation else s
    ds = dout * (gate + s * gate * (1 - gate)) if activation else dout
    dx, dweight = np.zeros_like(x), np.zeros_like(weight)
    for t in range(length):
        for w in range(width):
            if t - (width - 1) + w >= 0:
                dx[:, t - (width - 1) + w] += weight[:, w] * ds[:, t]
                dweight[:, w] += np.sum(ds[:, t] * x[:, t - (width - 1) + w], axis=0)
    return out, (dx, dweight, ds.sum((0, 1)))


def plain(x, weight, bias, activation):
    """What a user would write: XLA's depthwise convolution, in the dtype of x."""
    width = weight.shape[1]
    out = jax.lax.conv_general_dilated(
        x,
        weight.T[:, None, :].astype(x.dtype),
        window_strides=(1,),
        padding=[(width - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )
    out = out + bias.astype(x.dtype)
    return jax.nn.silu(out) if activation else out


def inputs(batch, length, dim, width, dtype="float32", weight_dtype=None):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (batch, length, dim), (dim, width), (dim,)
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    dtypes = (dtype, *[weight_dtype or dtype] * 2)
    return tuple(a.astype(t) for a, t in zip(arrays, dtypes, strict=True))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("size", [(2, 33, 5, 4), (1, 1, 3, 4), (2, 2, 3, 8), (3, 17, 130, 2)])
def test_causal_conv1d_accuracy(size, activation):
    check.check_accuracy(
        functools.partial(jaxkern.causal_conv1d, activation=activation),
        functools.partial(plain, activation=activation),
        functools.partial(oracle, activation=activation),
        inputs(*size),
    )


@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float16", None), ("bfloat16", "float32")])
def test_causal_conv1d_half_precision(dtypes):
    """The error of one rounding of the result: products and sums are fp32."""
    arrays = inputs(2, 300, 7, 4, *dtypes)
    out, vjp = jax.vjp(functools.partial(jaxkern.causal_conv1d, activation="silu"), *arrays)
    wide = [np.asarray(a, np.float64) for a in (*arrays, out)]
    want_out, want_grads = oracle(*wide, "silu")
    for got, want, like in zip(
        (out, *vjp(out)), (want_out, *want_grads), (arrays[0], *arrays), strict=True
    ):
        assert got.dtype == like.dtype
        rounding = float(jnp.finfo(got.dtype).eps) / 2
        assert check.relative_error(got, want) <= rounding + 1e-6


def test_causal_conv1d_width_one_and_no_bias():
    x, weight, _ = inputs(2, 5, 3, 1)
    np.testing.assert_array_equal(jaxkern.causal_conv1d(x, weight), x * weight[:, 0])


def test_causal_conv1d_looks_back_only():
    """An output does not change with a later input, nor a gradient with an earlier cotangent."""
    x, weight, bias = inputs(1, 10, 2, 4)
    run = jax.jit(functools.partial(jaxkern.causal_conv1d, activation="silu"))
    out, later = run(x, weight, bias), run(x.at[:, 6:].set(np.nan), weight, bias)
    np.testing.assert_array_equal(out[:, :6], later[:, :6])
    assert np.isnan(later[:, 6:]).all()
    grad = jax.grad(lambda x: jnp.sum(run(x, weight, bias)[:, 4]))(x)
    assert np.all(grad[:, 1:5] != 0)
    np.testing.assert_array_equal(grad[:, :1], 0)
    np.testing.assert_array_equal(grad[:, 5:], 0)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2)])
def test_causal_conv1d_empty(shape):
    arrays = inputs(*shape)
    out, vjp = jax.vjp(jaxkern.causal_conv1d, *arrays)
    assert out.shape == shape[:3]
    for grad, array in zip(vjp(out), arrays, strict=True):
        np.testing.assert_array_equal(grad, np.zeros(array.shape))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_causal_conv1d_is_its_steps(width, dtype):
    x, weight, bias = inputs(2, 9, 3, width, dtype)
    state, outs = jnp.zeros((2, width - 1, 3), dtype), []
    for t in range(9):
        out, state = jaxkern.causal_conv1d_step(state, x[:, t], weight, bias, activation="silu")
        outs.append(out)
    want = jaxkern.causal_conv1d(x, weight, bias, activation="silu")
    assert out.dtype == state.dtype == x.dtype
    check.assert_close(jnp.stack(outs, 1), want, 1e-6 if dtype == "float32" else 4e-3)
    np.testing.assert_array_equal(state, x[:, 9 - (width - 1) :])


def test_causal_conv1d_step_gradients():
    """Of every argument, through three steps."""
    x, weight, bias = inputs(2, 3, 4, 3)

    def stepped(x, weight, bias):
        state, outs = jnp.zeros((2, 2, 4)), []
        for t in range(3):
            out, state = jaxkern.causal_conv1d_step(state, x[:, t], weight, bias)
            outs.append(out)
        return jnp.stack(outs, 1)

    _, vjp = jax.vjp(stepped, x, weight, bias)
    _, want_vjp = jax.vjp(jaxkern.causal_conv1d, x, weight, bias)
    check.assert_close(vjp(x), want_vjp(x), 1e-6)


def test_causal_conv1d_transformations():
    """Plain JAX, so one look at each kind: vmap, jvp, grad of grad, scan, checkpoint."""
    x, weight, bias = inputs(2, 6, 3, 3)
    f = functools.partial(jaxkern.causal_conv1d, activation="silu")
    mapped = jax.vmap(f, (0, None, None))(jnp.stack([x, 2 * x]), weight, bias)
    check.assert_close(mapped[1], f(2 * x, weight, bias), 1e-6)
    plain_f = functools.partial(plain, activation="silu")
    args = (x, weight, bias)
    check.assert_close(jax.jvp(f, args, args), jax.jvp(plain_f, args, args), 1e-5)
    second = lambda f: jax.grad(
        lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(f(x, w, bias)))(w) ** 2)
    )
    check.assert_close(second(f)(weight), second(plain_f)(weight), 1e-5)
    again = lambda f: jax.lax.scan(lambda x, _: (f(x, weight, bias), None), x, length=3)[0]
    check.assert_close(again(jax.checkpoint(f)), again(plain_f), 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_causal_conv1d_on_a_mesh(kind):
    """Batch and channels split: the same numbers, and nothing gathered."""
    devices = jax.devices()
    parts = 2 if len(devices) >= 4 else 1
    mesh = jax.make_mesh(
        (parts, parts), ("data", "model"), (kind,) * 2, devices=devices[: parts**2]
    )
    arrays = inputs(4, 6, 4, 3)
    specs = (P("data", None, "model"), P("model"), P("model"))
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]

    def run(x, weight, bias):
        out, vjp = jax.vjp(
            functools.partial(jaxkern.causal_conv1d, activation="silu"), x, weight, bias
        )
        return out, vjp(x)

    compiled = jax.jit(run).lower(*placed).compile()
    check.assert_close(compiled(*placed), run(*arrays), 1e-6)
    assert "all-gather" not in compiled.as_text()


def test_causal_conv1d_float64():
    with jax.enable_x64(True):
        arrays = [np.asarray(a, np.float64) for a in inputs(2, 9, 3, 4)]
        out, vjp = jax.vjp(
            functools.partial(jaxkern.causal_conv1d, activation="silu"), *map(jnp.asarray, arrays)
        )
        assert out.dtype == jnp.float64
        want = oracle(*arrays, arrays[0], "silu")
        check.assert_close((out, vjp(jnp.asarray(arrays[0]))), want, 1e-14)


def test_causal_conv1d_errors():
    x, weight, bias = inputs(2, 6, 3, 4)
    with pytest.raises(TypeError, match=r"x must have a floating dtype.*got int32"):
        jaxkern.causal_conv1d(x.astype(jnp.int32), weight)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, D\), got \(6, 3\)"):
        jaxkern.causal_conv1d(x[0], weight)
    with pytest.raises(ValueError, match=r"weight must have shape \(D, W\).*3 ch.*got \(4, 3\)"):
        jaxkern.causal_conv1d(x, weight.T)
    with pytest.raises(ValueError, match=r"W at least 1; got \(3, 0\)"):
        jaxkern.causal_conv1d(x, weight[:, :0])
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\).*got \(2,\)"):
        jaxkern.causal_conv1d(x, weight, bias[:2])
    with pytest.raises(ValueError, match="activation must be \"silu\" or None, got 'relu'"):
        jaxkern.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 3\) = \(B, W - 1, D\)"):
        jaxkern.causal_conv1d_step(x[:, :2], x[:, 0], weight)
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 6, 3\)"):
        jaxkern.causal_conv1d_step(x[:, :3], x, weight)
