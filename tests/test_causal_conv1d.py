"""causal_conv1d and its step: cases for the common suite, and what is their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.causal_conv1d import causal_conv1d_reference, kernel
from jaxkern.ops.causal_conv1d.tiles import ConvTile
from tests import check, sequences
from tests.check import exhaustive

KERNELS = "causal_conv1d_fwd", "causal_conv1d_bwd"
OP = sequences.OPS["causal_conv1d"]
convolve, check_case = OP.call, functools.partial(sequences.check_case, OP.call, OP.oracle)


def inputs(batch, length, dim, width, dtype="float32", weight_dtype=None):
    """x, weight, bias and initial state."""
    arrays = OP.arrays(b=batch, l=length, d=dim, w=width, k=width - 1)
    dtypes = dtype, *[weight_dtype or dtype] * 2, dtype
    return tuple(v.astype(to) for v, to in zip(arrays, dtypes, strict=True))


def segments_of(batch, length):
    """Segments of 1 to 7 tokens, with one that bears the number of an earlier one."""
    sizes = np.random.default_rng(0).integers(1, 8, (batch, length))
    ids = [np.repeat(np.arange(length) % 3, of_row)[:length] for of_row in sizes]
    return jnp.asarray(np.stack(ids), jnp.int32)


@check.sizes(
    *[(2, 9, 130, 4), (1, 0, 3, 4), (1, 1, 3, 4), (2, 2, 5, 8), (1, 5, 3, 1), (3, 17, 130, 2)],
    interpreted=[(2, 9, 130, 4)],
)
def test_causal_conv1d_accuracy(size, implementation):
    """The last inputs and their gradient, too, of sequences as short as none and one token."""
    activation = None if size[-1] in (2, 8) else "silu"
    check_case(inputs(*size), implementation, activation=activation)


@check.BOTH
def test_causal_conv1d_packed_accuracy(implementation, monkeypatch):
    """Over the ends of tiles too: in the backward two warpgroups take three of 16, 16 and 3.

    The first and the last segment have one token: few see the state, and fewer inputs are kept.
    """
    tiles = ConvTile(rows=4, stages=2, chunks=4)
    twice = ConvTile(rows=4, stages=2, chunks=4, warpgroups=2, tiles_each=2)
    monkeypatch.setattr(kernel, "forward_tile", lambda *_: tiles)
    monkeypatch.setattr(kernel, "backward_tile", lambda *_: twice)
    ids = segments_of(1, 35).at[:, jnp.array([0, -1])].set(9)
    check_case(inputs(1, 35, 3, 3), implementation, segment_ids=ids)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("size", "activation", "scale"),
    [
        *(
            ((3, l, d, 4), "silu", 1)
            for l in (1, 2, 63, 65, 1000)
            for d in (3, 130, 287, 768, 1024)
        ),
        *(((2, 300, 260, w), f, 1) for w in range(1, 9) for f in (None, "silu")),
        ((5003, 5, 130, 4), "silu", 1),
        ((2, 200, 256, 4), "silu", 30),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d_accuracy_compiled(size, activation, scale, packed):
    """A block adds up several sequences; SiLU's slope is exact where it is flat and steep."""
    x, weight, bias, state = inputs(*size)
    ids = segments_of(*size[:2]) if packed else None
    arrays = scale * x, weight, bias, scale * state
    check_case(arrays, "mosaic", activation=activation, segment_ids=ids)


@check.sizes((2, 20, 7, 4), gpu=[(2, 300, 7, 4), (2, 300, 1024, 4)])
@pytest.mark.parametrize("dtypes", [("float16", None), ("bfloat16", "float32")])
def test_causal_conv1d_half_precision(size, implementation, dtypes):
    """The error is that of one rounding of the result: products and sums are fp32."""
    check_case(inputs(*size, *dtypes), implementation, rounding=2e-6)


@check.WHOLE
def test_causal_conv1d_without_bias_and_state(implementation):
    """Absent ones are zeros, and have no gradient."""
    check_case(inputs(1, 6, 3, 3), implementation, absent=2)


@check.WHOLE
@pytest.mark.parametrize("end", [None, 5])
def test_causal_conv1d_reaches_a_window(implementation, end):
    """A bad token stays in its channel, row and segment, and the W outputs that see it."""
    x, weight, *_ = inputs(2, 9, 3, 3)
    options = {"implementation": implementation}
    if end is not None:
        options["segment_ids"] = jnp.asarray([[0] * end + [1] * (9 - end)] * 2)
    run = lambda x, dout: check.value_and_grads(convolve, (x, weight), dout, **options)
    seeing, seen, window = np.zeros((3, *x.shape), bool)
    seeing[1, 4 : end or 7, 2] = seen[1, 2 : end or 7, 2] = window[1, 2:5, 2] = True
    out, (dx, _) = run(x, x)
    for bad, shows in ((np.nan, np.isnan), (np.inf, lambda v: ~np.isfinite(v) | (v == 0))):
        bad_out, (bad_dx, _) = run(x.at[1, 4, 2].set(bad), x)
        assert shows(bad_out[seeing]).all()
        np.testing.assert_array_equal(bad_out[~seeing], out[~seeing])
        np.testing.assert_array_equal(bad_dx[~seen], dx[~seen])
    _, (dx, _) = run(x, jnp.zeros_like(x).at[1, 4, 2].set(1.0))
    np.testing.assert_array_equal(dx != 0, window)


@pytest.mark.parametrize(
    ("size", "dtype", "implementation"),
    [
        ((2, 5, 3, 3), "float32", None),
        ((2, 5, 3, 4), "bfloat16", None),
        ((2, 5, 384, 4), "bfloat16", "mosaic"),
        exhaustive((2, 5, 3, 1), "float32", None),
        exhaustive((2, 5, 128, 2), "float32", "mosaic"),
        exhaustive((3, 9, 1024, 8), "float16", "mosaic"),
    ],
)
@pytest.mark.gpu
def test_causal_conv1d_is_its_steps(size, dtype, implementation):
    """Outputs, the last inputs and, in fp32, the gradients of every argument."""
    arrays, width = inputs(*size, dtype), size[-1]
    options = {"activation": "silu", "implementation": implementation}

    def stepped(x, weight, bias, state):
        outs, states = [], jnp.stack([state, state])  # of two layers
        for t in range(x.shape[1]):
            token = x[:, t], weight, bias
            out, states = jaxkern.causal_conv1d_step(states, *token, layer=1, **options)
            outs.append(out)
        return jnp.stack(outs, 1), states

    whole = functools.partial(convolve, return_final_state=True)
    want, final = jax.jit(whole)(*arrays)
    with check.running(implementation):
        out, (untouched, after) = jax.jit(stepped)(*arrays)
        x, weight, bias, state = arrays
        many = jax.vmap(lambda x, state: stepped(x, weight, bias, state))(x[None], state[None])
    assert out.dtype == after.dtype == final.dtype == arrays[0].dtype
    check.assert_close(out, want, {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype])
    np.testing.assert_array_equal(after, final)
    np.testing.assert_array_equal(final, arrays[0][:, size[1] - (width - 1) :])
    np.testing.assert_array_equal(untouched, arrays[3])
    check.assert_close(many, (out[None], jnp.stack([untouched, after])[None]), 1e-6)
    if dtype == "float32":
        of_last = lambda *a: (lambda out, states: (out, states[1]))(*stepped(*a))
        grads = lambda f: check.value_and_grads(f, arrays, arrays[::3])[1]
        with check.running(implementation):
            got = grads(of_last)
        check.assert_close(got, grads(whole), 1e-6)


def test_causal_conv1d_of_too_many_taps():
    x, wide = inputs(2, 6, 3, 4)[0], jnp.ones((3, 9))
    with pytest.raises(NotImplementedError, match=r"filter has 9 taps, and the kernels .* 8"):
        convolve(x, wide, implementation="mosaic")
    assert jax.eval_shape(convolve, x, wide).shape == x.shape


@pytest.mark.parametrize(
    ("size", "dtype", "names"),
    [
        ((1, 64, 127, 4), "float32", []),  # too few channels
        exhaustive((1, 300, 287, 5), "bfloat16", KERNELS),
        exhaustive((2, 300, 2048, 4), "float32", KERNELS),
    ],
)
def test_causal_conv1d_lowers_for_cuda(size, dtype, names):
    """The kernels' layouts are accepted, with no GPU here."""
    arrays, ids = inputs(*size, dtype), segments_of(*size[:2])
    traced = check.program(convolve).trace(arrays, arrays[0], segment_ids=ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert bool(check.kernel_calls(text)) == bool(names)
    assert all(name in text for name in names)


@pytest.mark.compiled
@pytest.mark.parametrize("dim", [130, 2048])
def test_causal_conv1d_same_bits(dim):
    arrays, ids = inputs(3, 2000, dim, 4, "bfloat16"), segments_of(3, 2000)
    run = check.program(convolve)
    check.assert_same_bits(lambda: run(arrays, arrays[0], segment_ids=ids))


@pytest.mark.compiled
@pytest.mark.large
def test_causal_conv1d_beyond_int32():
    """More than 2³¹ elements: the first and the last tokens of every row are right."""
    batch, length, dim = 3, (1 << 18) + 5, 4096
    x = jax.random.normal(jax.random.key(0), (batch, length, dim), jnp.bfloat16)
    _, weight, bias, _ = inputs(1, 1, dim, 4)
    run = jax.jit(lambda x: jax.vjp(lambda x: convolve(x, weight, bias), x))
    out, vjp = run(x)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, x)
    reference = lambda x: causal_conv1d_reference(x, weight, bias, activation="silu")
    # The gradient of a part misses what comes after it, and its first tokens' history.
    for start, stop, skip, inner in (
        (0, 64, 0, slice(0, -3)),
        (length - 67, length, 3, slice(6, None)),
    ):
        part = x[:, start:stop]
        want, want_vjp = jax.vjp(reference, part)
        (want_dx,) = want_vjp(part)
        for b in range(batch):
            check.assert_close(out[b, start + skip : stop], want[b, skip:], 2.0**-8)
            check.assert_close(dx[b, start:stop][inner], want_dx[b, inner], 2.0**-8)


CAUSAL_CONV1D = check.Op(
    name="causal_conv1d",
    call=convolve,
    reference=lambda *arrays: causal_conv1d_reference(
        *arrays[:3], initial_state=arrays[3], activation="silu"
    ),
    arrays=lambda key: inputs(4, 4, 128, 2),
    kernels=KERNELS,
    axes="bld dw d bwd -> bld",
    features="l",
    channels="d",
    all_reduces=1,
    vmaps=[(0, None, None, None), (1, 0, 1, 2)],
    runs_again=False,
)
test_causal_conv1d_transformations = check.transformations(CAUSAL_CONV1D)
