"""causal_conv1d and its step: cases for the common suite, and what is their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.causal_conv1d import backward, causal_conv1d_reference, forward
from jaxkern.ops.causal_conv1d.tiles import Tiles
from tests import check


def oracle(x, weight, bias, state, dout, activation=None, segment_ids=None):
    """Output and gradients in float64, one tap of one token at a time."""
    (batch, length, _), width = x.shape, weight.shape[1]
    if segment_ids is None:
        segment_ids = np.zeros((batch, length))
    inputs = np.concatenate([state, x], axis=1)
    segments = np.cumsum(np.diff(np.asarray(segment_ids), axis=1, prepend=0) != 0, axis=1)
    segments -= segments[:, :1]
    segments = np.pad(segments, ((0, 0), (width - 1, 0)))
    seen = lambda t, w: (segments[:, t + w] == segments[:, t + width - 1])[:, None]
    s = np.zeros_like(x) + bias
    for t in range(length):
        for w in range(width):
            s[:, t] += weight[:, w] * np.where(seen(t, w), inputs[:, t + w], 0)
    gate = 1 / (1 + np.exp(-s))
    out = s * gate if activation else s
    ds = dout * (gate + s * gate * (1 - gate)) if activation else dout
    dinputs, dweight = np.zeros_like(inputs), np.zeros_like(weight)
    for t in range(length):
        for w in range(width):
            dinputs[:, t + w] += np.where(seen(t, w), weight[:, w] * ds[:, t], 0)
            dweight[:, w] += np.sum(np.where(seen(t, w), ds[:, t] * inputs[:, t + w], 0), axis=0)
    dstate, dx = dinputs[:, : width - 1], dinputs[:, width - 1 :]
    return out, (dx, dweight, ds.sum((0, 1)), dstate)


def plain(x, weight, bias, state, activation=None, segment_ids=None):
    """What a user would write, in the dtype of x: XLA's depthwise convolution.

    Of packed sequences it is a sum over taps, with a mask for the inputs of other segments.
    """
    weight, bias = weight.astype(x.dtype), bias.astype(x.dtype)
    inputs = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    if segment_ids is None:
        out = bias + jax.lax.conv_general_dilated(
            inputs,
            weight.T[:, None, :],
            window_strides=(1,),
            padding="VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=x.shape[-1],
        )
    else:
        length, width = x.shape[1], weight.shape[1]
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        segments = jnp.cumsum(jnp.pad(changes, ((0, 0), (width, 0))), axis=1)
        out = jnp.broadcast_to(bias, x.shape)
        for w in range(width):
            seen = segments[:, w : w + length] == segments[:, width - 1 :]
            out = out + weight[:, w] * jnp.where(seen[..., None], inputs[:, w : w + length], 0)
    return jax.nn.silu(out) if activation else out


def inputs(batch, length, dim, width, dtype="float32", weight_dtype=None, seed=0):
    """x, weight, bias and initial state."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (batch, length, dim), (dim, width), (dim,), (batch, width - 1, dim)
    dtypes = (dtype, *[weight_dtype or dtype] * 2, dtype)
    return tuple(
        jax.random.normal(k, s).astype(t) for k, s, t in zip(keys, shapes, dtypes, strict=True)
    )


def segments_of(batch, length, seed=0):
    """Segments of 1 to 7 tokens, with one that bears the number of an earlier one."""
    generator = np.random.default_rng(seed)
    ids = [
        np.repeat(np.arange(length) % 3, generator.integers(1, 8, length))[:length]
        for _ in range(batch)
    ]
    return jnp.asarray(np.stack(ids), jnp.int32)


def convolve(x, weight, bias=None, state=None, **options):
    return jaxkern.causal_conv1d(x, weight, bias, initial_state=state, **options)


def check_case(arrays, implementation, *, segment_ids=None, activation="silu", rounding=None):
    options = {"activation": activation, "segment_ids": segment_ids, "rounding": rounding}
    check.check_accuracy(convolve, plain, oracle, arrays, implementation, **options)


@check.BOTH
def test_causal_conv1d_accuracy(implementation):
    check_case(inputs(2, 9, 130, 4), implementation)


@check.WHOLE
@pytest.mark.parametrize(
    ("size", "activation"),
    [((1, 1, 3, 4), "silu"), ((2, 2, 5, 8), None), ((1, 5, 3, 1), "silu"), ((3, 17, 130, 2), None)],
)
def test_causal_conv1d_accuracy_at_the_ends(size, activation, implementation):
    check_case(inputs(*size), implementation, activation=activation)


@check.BOTH
def test_causal_conv1d_packed_accuracy(implementation, monkeypatch):
    """Over the ends of tiles too: in the backward two warpgroups take three of 16, 16 and 3."""
    tiles = Tiles(rows=4, stages=2, chunks=4)
    twice = Tiles(rows=8, stages=2, chunks=2, warpgroups=2, tiles_each=2)
    monkeypatch.setattr(forward, "forward_tiles", lambda *_: tiles)
    monkeypatch.setattr(backward, "backward_tiles", lambda *_: twice)
    check_case(inputs(1, 35, 3, 3), implementation, segment_ids=segments_of(1, 35))


@pytest.mark.compiled
@pytest.mark.parametrize("length", [1, 2, 63, 65, 1000])
@pytest.mark.parametrize("dim", [3, 130, 287, 768, 1024])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d_accuracy_compiled(length, dim, packed):
    segment_ids = segments_of(3, length) if packed else None
    check_case(inputs(3, length, dim, 4), "mosaic", segment_ids=segment_ids)


@pytest.mark.compiled
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv1d_widths_compiled(width, activation):
    arrays = inputs(2, 300, 260, width)
    check_case(arrays, "mosaic", activation=activation)
    segment_ids = segments_of(2, 300)
    check_case(arrays, "mosaic", activation=activation, segment_ids=segment_ids)


@pytest.mark.compiled
def test_causal_conv1d_many_short_sequences():
    """A block of the backward adds up several of them."""
    check_case(inputs(5003, 5, 130, 4), "mosaic")


@pytest.mark.compiled
def test_causal_conv1d_large_sums():
    """Where SiLU is flat and where it is steep, its slope is exact to fp32."""
    x, weight, bias, state = inputs(2, 200, 256, 4)
    check_case((30 * x, weight, bias, 30 * state), "mosaic")


@check.sizes((2, 60, 7, 4), gpu=[(2, 300, 7, 4), (2, 300, 1024, 4)])
@pytest.mark.parametrize("dtypes", [("float16", None), ("bfloat16", "float32")])
def test_causal_conv1d_half_precision(size, implementation, dtypes):
    """The error is that of one rounding of the result: products and sums are fp32."""
    check_case(inputs(*size, *dtypes), implementation, rounding=2e-6)


def test_causal_conv1d_width_one_and_no_bias():
    x, weight, _, state = inputs(2, 5, 3, 1)
    np.testing.assert_array_equal(jaxkern.causal_conv1d(x, weight), x * weight[:, 0])
    out, final = convolve(x, weight, state=state, return_final_state=True)
    np.testing.assert_array_equal(out, x * weight[:, 0])
    assert final.shape == (2, 0, 3)


@check.WHOLE
def test_causal_conv1d_without_bias_and_state(implementation):
    """Absent ones are zeros, and have no gradient."""
    x, weight, bias, state = inputs(1, 6, 3, 3)
    with check.running(implementation):
        f = functools.partial(convolve, activation="silu", implementation=implementation)
        out, vjp = jax.vjp(f, x, weight)
        want, want_vjp = jax.vjp(f, x, weight, 0 * bias, 0 * state)
        check.assert_close((out, vjp(x)), (want, want_vjp(x)[:2]), 1e-6)


@check.WHOLE
def test_causal_conv1d_looks_back_only(implementation):
    """An output does not change with a later input, nor a gradient with an earlier cotangent."""
    x, weight, bias, _ = inputs(1, 10, 2, 4)
    with check.running(implementation):
        run = functools.partial(convolve, activation="silu", implementation=implementation)
        out, later = run(x, weight, bias), run(x.at[:, 6:].set(np.nan), weight, bias)
        grad = jax.grad(lambda x: jnp.sum(run(x, weight, bias)[:, 4]))(x)
    np.testing.assert_array_equal(out[:, :6], later[:, :6])
    assert np.isnan(later[:, 6:]).all()
    assert np.all(grad[:, 1:5] != 0)
    np.testing.assert_array_equal(grad[:, :1], 0)
    np.testing.assert_array_equal(grad[:, 5:], 0)


@check.WHOLE
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_causal_conv1d_bad_input_stays_alone(bad, implementation):
    """In its channel, its batch row, its segment, and the W tokens that see it."""
    x, weight, _, _ = inputs(2, 9, 3, 3)
    ids = jnp.asarray([[0] * 5 + [1] * 4] * 2)
    with check.running(implementation):
        f = functools.partial(
            convolve, activation="silu", segment_ids=ids, implementation=implementation
        )
        out, vjp = jax.vjp(lambda x: f(x, weight), x)
        bad_out, bad_vjp = jax.vjp(lambda x: f(x, weight), x.at[1, 4, 2].set(bad))
        dx, bad_dx = vjp(x)[0], bad_vjp(x)[0]
    others = np.ones(x.shape, bool)
    others[1, 4, 2] = False
    np.testing.assert_array_equal(bad_out[others], out[others])
    assert not np.isfinite(bad_out[1, 4, 2]) or bad_out[1, 4, 2] == 0
    others[1, 2:5, 2] = False
    np.testing.assert_array_equal(bad_dx[others], dx[others])


@check.BOTH
@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2)])
def test_causal_conv1d_empty(shape, implementation):
    arrays = inputs(*shape)
    with check.running(implementation):
        out, vjp = jax.vjp(functools.partial(convolve, implementation=implementation), *arrays)
        grads = vjp(out)
    assert out.shape == shape[:3]
    for grad, array in zip(grads, arrays, strict=True):
        np.testing.assert_array_equal(grad, np.zeros(array.shape))
    final = convolve(*arrays, return_final_state=True)[1]
    want = np.concatenate([arrays[3], arrays[0]], axis=1)[:, shape[1] :]
    np.testing.assert_array_equal(final, want)


@pytest.mark.parametrize(("width", "dtype"), [(1, "float32"), (4, "float32"), (4, "bfloat16")])
def test_causal_conv1d_is_its_steps(width, dtype):
    x, weight, bias, state = inputs(2, 9, 3, width, dtype)
    after, outs = state, []
    for t in range(9):
        out, after = jaxkern.causal_conv1d_step(after, x[:, t], weight, bias, activation="silu")
        outs.append(out)
    want, final = convolve(x, weight, bias, state, activation="silu", return_final_state=True)
    assert out.dtype == after.dtype == final.dtype == x.dtype
    check.assert_close(jnp.stack(outs, 1), want, 1e-6 if dtype == "float32" else 4e-3)
    np.testing.assert_array_equal(after, final)
    np.testing.assert_array_equal(final, x[:, 9 - (width - 1) :])


def test_causal_conv1d_step_gradients():
    """Of every argument, through three steps."""
    arrays = inputs(2, 3, 4, 3)

    def stepped(x, weight, bias, state):
        outs = []
        for t in range(3):
            out, state = jaxkern.causal_conv1d_step(state, x[:, t], weight, bias)
            outs.append(out)
        return jnp.stack(outs, 1)

    _, vjp = jax.vjp(stepped, *arrays)
    _, want_vjp = jax.vjp(convolve, *arrays)
    check.assert_close(vjp(arrays[0]), want_vjp(arrays[0]), 1e-6)


def test_causal_conv1d_float64():
    with jax.enable_x64(True):
        arrays = [np.asarray(a, np.float64) for a in inputs(2, 9, 3, 4)]
        ids = segments_of(2, 9)
        f = functools.partial(convolve, activation="silu", segment_ids=ids)
        out, vjp = jax.vjp(f, *map(jnp.asarray, arrays))
        assert out.dtype == jnp.float64
        want = oracle(*arrays, arrays[0], "silu", ids)
        check.assert_close((out, vjp(jnp.asarray(arrays[0]))), want, 1e-14)
        with pytest.raises(NotImplementedError, match="x is float64"):
            f(*map(jnp.asarray, arrays), implementation="mosaic")


def test_causal_conv1d_errors():
    x, weight, bias, state = inputs(2, 6, 3, 4)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, D\), got \(6, 3\)"):
        jaxkern.causal_conv1d(x[0], weight)
    with pytest.raises(ValueError, match=r"weight must have shape \(D, W\).*3 ch.*got \(4, 3\)"):
        jaxkern.causal_conv1d(x, weight.T)
    with pytest.raises(ValueError, match=r"W at least 1; got \(3, 0\)"):
        jaxkern.causal_conv1d(x, weight[:, :0])
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\).*got \(2,\)"):
        jaxkern.causal_conv1d(x, weight, bias[:2])
    with pytest.raises(ValueError, match="activation must be \"silu\" or None, got 'relu'"):
        jaxkern.causal_conv1d(x, weight, activation="relu")  # pyright: ignore
    with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 3, 3\) = .*\(2, 2,"):
        convolve(x, weight, state=state[:, 1:])
    with pytest.raises(NotImplementedError, match=r"filter has 9 taps, and the kernels .* 8"):
        convolve(x, jnp.ones((3, 9)), implementation="mosaic")
    assert convolve(x, jnp.ones((3, 9))).shape == x.shape
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 3\) = \(B, W - 1, D\)"):
        jaxkern.causal_conv1d_step(x[:, :2], x[:, 0], weight)
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 6, 3\)"):
        jaxkern.causal_conv1d_step(x[:, :3], x, weight)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("size", "dtype"), [((1, 300, 287, 5), "bfloat16"), ((2, 300, 2048, 4), "float32")]
)
def test_causal_conv1d_lowers_for_cuda(size, dtype):
    """The kernels' layouts are accepted, with no GPU here."""
    ids = segments_of(*size[:2])
    f = functools.partial(convolve, activation="silu", segment_ids=ids)
    loss = lambda *a: f(*a).astype(jnp.float32).sum()
    run = jax.value_and_grad(loss, (0, 1, 2, 3))
    text = jax.jit(run).trace(*inputs(*size, dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert "causal_conv1d_fwd" in text
    assert "causal_conv1d_bwd" in text


@pytest.mark.parametrize(("dim", "kernels"), [(127, False), (128, True)])
def test_kernels_of_few_channels_are_not_chosen(dim, kernels):
    run = jax.jit(jax.grad(lambda *a: convolve(*a, implementation=None).sum()))
    text = run.trace(*inputs(1, 64, dim, 4)).lower(lowering_platforms=("cuda",)).as_text()
    assert bool(check.kernel_calls(text)) == kernels


@pytest.mark.compiled
@pytest.mark.parametrize("dim", [130, 2048])
def test_causal_conv1d_same_bits(dim):
    x, weight, bias, state = inputs(3, 2000, dim, 4, "bfloat16")
    f = functools.partial(convolve, activation="silu", segment_ids=segments_of(3, 2000))
    run = jax.jit(lambda d, *a: jax.vjp(f, *a)[1](d))
    check.assert_same_bits(lambda: run(x, x, weight, bias, state))


@pytest.mark.compiled
@pytest.mark.large
def test_causal_conv1d_beyond_int32():
    """More than 2³¹ elements: the first and the last batch rows are right."""
    batch, length, dim = 3, (1 << 18) + 5, 4096
    x = jax.random.normal(jax.random.key(0), (batch, length, dim), jnp.bfloat16)
    _, weight, bias, _ = inputs(1, 1, dim, 4)
    run = jax.jit(lambda x: jax.vjp(lambda x: convolve(x, weight, bias, activation="silu"), x))
    out, vjp = run(x)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, x)
    for b in range(batch):
        for rows in (slice(0, 64), slice(length - 64, length)):
            start = max(0, rows.start - 3)
            part = x[b : b + 1, start : rows.stop]
            f = lambda x: causal_conv1d_reference(x, weight, bias, activation="silu")
            want, want_vjp = jax.vjp(f, part)
            skip, whole = rows.start - start, rows.stop == length
            check.assert_close(out[b : b + 1, rows], want[:, skip:], 2.0**-8)
            # The gradient of a part misses what comes after it, and its first tokens' history.
            inner = slice(2 * skip, None if whole else -3)
            got = dx[b : b + 1, start : rows.stop][:, inner]
            check.assert_close(got, want_vjp(part)[0][:, inner], 2.0**-8)


CAUSAL_CONV1D = check.Op(
    name="causal_conv1d",
    call=functools.partial(convolve, activation="silu"),
    reference=lambda x, w, b, s: plain(x, w, b, s, "silu"),
    arrays=lambda key: inputs(4, 4, 128, 2, seed=3),
    kernels=("causal_conv1d_fwd", "causal_conv1d_bwd"),
    axes="bld dw d bwd -> bld",
    features="l",
    channels="d",
    all_reduces=1,
    vmaps=[(0, None, None, None), (1, 0, 1, 2)],
    runs_again=False,
)
test_causal_conv1d_transformations = check.transformations(CAUSAL_CONV1D)
