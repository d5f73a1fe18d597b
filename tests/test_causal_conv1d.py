"""causal_conv1d and its step: cases for the common suite, and what is their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.causal_conv1d import backward, causal_conv1d_reference, forward
from jaxkern.ops.causal_conv1d.tiles import Tiles
from tests import check, sequences

KERNELS = "causal_conv1d_fwd", "causal_conv1d_bwd"


def oracle(x, weight, bias, state, dout, activation=None, segment_ids=None, dfinal=None):
    """Output and gradients in NumPy, one tap at a time; with `dfinal` the last inputs, too."""
    (batch, length, dim), width = x.shape, weight.shape[1]
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    inputs = np.concatenate([state, x], axis=1)
    segments = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    segments = np.pad(segments, ((0, 0), (width - 1, 0)))[..., None]
    seen = [segments[:, w : w + length] == segments[:, width - 1 :] for w in range(width)]
    taps = [np.where(s, inputs[:, w : w + length], 0) for w, s in enumerate(seen)]
    s = bias + sum(weight[:, w] * tap for w, tap in enumerate(taps))
    with np.errstate(over="ignore"):
        gate = 1 / (1 + np.exp(-s))
    out = s * gate if activation else s
    ds = dout * (gate + s * gate * (1 - gate)) if activation else dout
    dinputs = np.zeros_like(inputs)
    for w in range(width):
        dinputs[:, w : w + length] += np.where(seen[w], weight[:, w] * ds, 0)
    if dfinal is not None:
        kept = segments[:, length:] == segments[:, -1:]
        out = out, np.where(kept, inputs[:, length:], 0)
        dinputs[:, length:] += np.where(kept, dfinal, 0)
    total = lambda v: np.moveaxis(v, -1, 0).reshape(dim, -1).sum(1)  # pairwise
    dweight = np.stack([total(ds * tap) for tap in taps], 1)
    return out, (dinputs[:, width - 1 :], dweight, total(ds), dinputs[:, : width - 1])


def inputs(batch, length, dim, width, dtype="float32", weight_dtype=None, seed=0):
    """x, weight, bias and initial state."""
    rng = np.random.default_rng(seed)
    shapes = (batch, length, dim), (dim, width), (dim,), (batch, width - 1, dim)
    dtypes = (dtype, *[weight_dtype or dtype] * 2, dtype)
    return tuple(
        jnp.asarray(rng.normal(size=s).astype(jnp.dtype(t)))
        for s, t in zip(shapes, dtypes, strict=True)
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


def check_case(arrays, implementation, *, ids=None, activation="silu", rounding=None):
    """Checks the output, the last inputs and all gradients."""
    x, _, _, state = arrays
    rng = np.random.default_rng(17)
    cotangents = tuple(jnp.asarray(rng.normal(size=v.shape).astype(x.dtype)) for v in (x, state))
    options = {"activation": activation, "segment_ids": ids}
    how = {"implementation": implementation, "return_final_state": True}
    with check.running(implementation):
        got = check.value_and_grads(convolve, arrays, cotangents, **options, **how)
    of = lambda *args, **options: oracle(*args[:-1], **options, dfinal=args[-1])
    sequences.check_results(got, of, arrays, cotangents, rounding, **options)


@check.sizes(
    *[(2, 9, 130, 4), (1, 1, 3, 4), (2, 2, 5, 8), (1, 5, 3, 1), (3, 17, 130, 2)],
    interpreted=[(2, 9, 130, 4)],
)
def test_causal_conv1d_accuracy(size, implementation):
    """The last inputs and their gradient, too, of sequences as short as one token."""
    activation = None if size[-1] in (2, 8) else "silu"
    check_case(inputs(*size), implementation, activation=activation)


@check.BOTH
def test_causal_conv1d_packed_accuracy(implementation, monkeypatch):
    """Over the ends of tiles too: in the backward two warpgroups take three of 16, 16 and 3."""
    tiles = Tiles(rows=4, stages=2, chunks=4)
    twice = Tiles(rows=4, stages=2, chunks=4, warpgroups=2, tiles_each=2)
    monkeypatch.setattr(forward, "forward_tiles", lambda *_: tiles)
    monkeypatch.setattr(backward, "backward_tiles", lambda *_: twice)
    check_case(inputs(1, 35, 3, 3), implementation, ids=segments_of(1, 35))


@pytest.mark.compiled
@pytest.mark.parametrize("length", [1, 2, 63, 65, 1000])
@pytest.mark.parametrize("dim", [3, 130, 287, 768, 1024])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d_accuracy_compiled(length, dim, packed):
    ids = segments_of(3, length) if packed else None
    check_case(inputs(3, length, dim, 4), "mosaic", ids=ids)


@pytest.mark.compiled
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d_widths_compiled(width, activation, packed):
    ids = segments_of(2, 300) if packed else None
    check_case(inputs(2, 300, 260, width), "mosaic", activation=activation, ids=ids)


@pytest.mark.compiled
@pytest.mark.parametrize(("size", "scale"), [((5003, 5, 130, 4), 1), ((2, 200, 256, 4), 30)])
def test_causal_conv1d_many_sequences_and_large_sums(size, scale):
    """A block adds up several sequences; SiLU's slope is exact where it is flat and steep."""
    x, weight, bias, state = inputs(*size)
    check_case((scale * x, weight, bias, scale * state), "mosaic")


@check.sizes((2, 20, 7, 4), gpu=[(2, 300, 7, 4), (2, 300, 1024, 4)])
@pytest.mark.parametrize("dtypes", [("float16", None), ("bfloat16", "float32")])
def test_causal_conv1d_half_precision(size, implementation, dtypes):
    """The error is that of one rounding of the result: products and sums are fp32."""
    check_case(inputs(*size, *dtypes), implementation, rounding=2e-6)


@check.WHOLE
def test_causal_conv1d_without_bias_and_state(implementation):
    """Absent ones are zeros, and have no gradient."""
    x, weight, bias, state = inputs(1, 6, 3, 3)
    run = lambda *arrays: check.value_and_grads(
        convolve, arrays, x, activation="silu", implementation=implementation
    )
    out, grads = run(x, weight, 0 * bias, 0 * state)
    check.assert_close(run(x, weight), (out, grads[:2]), 1e-6)


@check.WHOLE
def test_causal_conv1d_looks_back_only(implementation):
    """An output does not change with a later input, nor a gradient with an earlier cotangent."""
    x, weight, bias, _ = inputs(1, 10, 2, 4)
    run = lambda x, dout: check.value_and_grads(
        convolve, (x, weight, bias), dout, activation="silu", implementation=implementation
    )
    out, (grad, *_) = run(x, jnp.zeros_like(x).at[:, 4].set(1.0))
    later, _ = run(x.at[:, 6:].set(np.nan), x)
    np.testing.assert_array_equal(out[:, :6], later[:, :6])
    assert np.isnan(later[:, 6:]).all()
    assert np.all(grad[:, 1:5] != 0)
    np.testing.assert_array_equal(grad[:, :1], 0)
    np.testing.assert_array_equal(grad[:, 5:], 0)


@check.WHOLE
def test_causal_conv1d_bad_input_stays_alone(implementation):
    """In its channel, its batch row, its segment, and the W tokens that see it."""
    x, weight, _, _ = inputs(2, 9, 3, 3)
    ids = jnp.asarray([[0] * 5 + [1] * 4] * 2)
    options = {"activation": "silu", "segment_ids": ids, "implementation": implementation}
    run = lambda x, dout: check.value_and_grads(convolve, (x, weight), dout, **options)
    out, (dx, _) = run(x, x)
    for bad in (np.nan, np.inf):
        bad_out, (bad_dx, _) = run(x.at[1, 4, 2].set(bad), x)
        others = np.ones(x.shape, bool)
        others[1, 4, 2] = False
        np.testing.assert_array_equal(bad_out[others], out[others])
        assert not np.isfinite(bad_out[1, 4, 2]) or bad_out[1, 4, 2] == 0
        others[1, 2:5, 2] = False
        np.testing.assert_array_equal(bad_dx[others], dx[others])


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        pytest.param(1, "float32", marks=pytest.mark.exhaustive),
        (3, "float32"),
        (4, "bfloat16"),
    ],
)
def test_causal_conv1d_is_its_steps(width, dtype):
    """Outputs, the last inputs and, in fp32, the gradients of every argument."""
    arrays = inputs(2, 5, 3, width, dtype)

    def stepped(x, weight, bias, state):
        outs = []
        for t in range(x.shape[1]):
            out, state = jaxkern.causal_conv1d_step(state, x[:, t], weight, bias, activation="silu")
            outs.append(out)
        return jnp.stack(outs, 1), state

    whole = functools.partial(convolve, activation="silu", return_final_state=True)
    (out, after), (want, final) = (jax.jit(f)(*arrays) for f in (stepped, whole))
    assert out.dtype == after.dtype == final.dtype == arrays[0].dtype
    check.assert_close(out, want, 1e-6 if dtype == "float32" else 4e-3)
    np.testing.assert_array_equal(after, final)
    np.testing.assert_array_equal(final, arrays[0][:, 5 - (width - 1) :])
    if dtype == "float32":
        grads = lambda f: check.value_and_grads(f, arrays, (arrays[0], arrays[3]))[1]
        check.assert_close(grads(stepped), grads(whole), 1e-6)


def test_causal_conv1d_float64():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(a, np.float64)) for a in inputs(2, 9, 3, 4)]
        options = {"activation": "silu", "segment_ids": segments_of(2, 9)}
        got = check.value_and_grads(convolve, arrays, arrays[0], **options)
        assert got[0].dtype == jnp.float64
        check.assert_close(got, oracle(*map(np.asarray, (*arrays, arrays[0])), **options), 1e-14)


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
    assert jax.eval_shape(convolve, x, jnp.ones((3, 9))).shape == x.shape
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 3\) = \(B, W - 1, D\)"):
        jaxkern.causal_conv1d_step(x[:, :2], x[:, 0], weight)
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 6, 3\)"):
        jaxkern.causal_conv1d_step(x[:, :3], x, weight)


@pytest.mark.parametrize(
    ("size", "dtype", "names"),
    [
        ((1, 64, 127, 4), "float32", []),  # too few channels
        pytest.param((1, 300, 287, 5), "bfloat16", KERNELS, marks=pytest.mark.exhaustive),
        pytest.param((2, 300, 2048, 4), "float32", KERNELS, marks=pytest.mark.exhaustive),
    ],
)
def test_causal_conv1d_lowers_for_cuda(size, dtype, names):
    """The kernels' layouts are accepted, with no GPU here."""
    f = functools.partial(convolve, activation="silu", segment_ids=segments_of(*size[:2]))
    loss = lambda *a: f(*a).astype(jnp.float32).sum()
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    text = run.trace(*inputs(*size, dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert bool(check.kernel_calls(text)) == bool(names)
    assert all(name in text for name in names)


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
    reference=lambda x, w, b, s: causal_conv1d_reference(
        x, w, b, initial_state=s, activation="silu"
    ),
    arrays=lambda key: inputs(4, 4, 128, 2, seed=3),
    kernels=KERNELS,
    axes="bld dw d bwd -> bld",
    features="l",
    channels="d",
    all_reduces=1,
    vmaps=[(0, None, None, None), (1, 0, 1, 2)],
    runs_again=False,
)
test_causal_conv1d_transformations = check.transformations(CAUSAL_CONV1D)
