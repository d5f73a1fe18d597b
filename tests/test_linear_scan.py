"""linear_scan: cases for the common suite, and what is its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.mosaic import ring
from jaxkern.ops.linear_scan import op, reference
from jaxkern.ops.linear_scan.tiles import LinearScanOptions, LinearScanTiles, parts
from tests import check, sequences
from tests.check import exhaustive


def inputs(batch, length, dim, dtype="float32", b_dtype=None, seed=0):
    """Decays near 1, as in a trained recurrence, of either sign; no program is compiled."""
    rng = np.random.default_rng(seed)
    a = 1 / (1 + np.exp(-2 - rng.normal(size=(batch, length, dim))))
    a = np.where(rng.random(a.shape) < 0.2, -a, a)
    b, state = rng.normal(size=a.shape), rng.normal(size=(batch, dim))
    dtypes = (dtype, b_dtype or dtype, b_dtype or dtype)
    return tuple(
        jnp.asarray(v.astype(jnp.dtype(to))) for v, to in zip((a, b, state), dtypes, strict=True)
    )


def scan(a, b, state=None, *, tiles=None, **options):
    """linear_scan, and where `tiles` are given, its kernels with these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "LinearScanOptions", functools.partial(LinearScanOptions, tiles=tiles))
        return jaxkern.linear_scan(a, b, initial_state=state, **options)


def check_case(arrays, implementation=None, *, tiles=None, **options):
    options |= {"own": {"tiles": tiles}, "rounding": 1e-6}
    got, want = sequences.check_case(scan, sequences.linear_scan, arrays, implementation, **options)
    if got.dtype == jnp.bfloat16:  # fp32's errors change the rounding of few elements
        check.assert_close(got, want.astype(got.dtype), 3e-4)


REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])


@check.sizes(
    *[(1, 1, 1), (2, 19, 5)],
    gpu=[
        *[(2, 63, 287), (2, 1000, 130), (3, 1000, 1), (1, 33, 128)],
        *[(2, 65, 129), (2, 64, 512), (1, 5000, 256), (300, 40, 3)],
    ],
    interpreted=[(2, 18, 130)],
)
@REVERSE
def test_linear_scan_accuracy(size, implementation, reverse):
    check_case(inputs(*size), implementation, reverse=reverse)


@check.sizes((2, 21, 5), gpu=[(2, 65, 130), (2, 300, 130), (2, 64, 512)], interpreted=[(1, 3, 2)])
@pytest.mark.parametrize(
    ("dtype", "b_dtype"),
    [
        *[("bfloat16", None), ("bfloat16", "float32")],
        *[exhaustive("float16", None), exhaustive("float32", "float16")],
    ],
)
def test_linear_scan_half_precision(size, implementation, dtype, b_dtype):
    """States are fp32, and rounded once."""
    final = b_dtype != "float16"  # plain JAX adds its cotangent to the output's in 16 bits
    check_case(inputs(*size, dtype, b_dtype), implementation, final=final)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [exhaustive(False), True])
def test_linear_scan_tiles(reverse):
    """However the sequence is cut, with steps left over; without an initial state."""
    tiles = LinearScanTiles(3, bwd_stages=2, parts=2)
    check_case(inputs(2, 7, 150), "mosaic", reverse=reverse, tiles=tiles, absent=1)


@pytest.mark.compiled
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 31])
@REVERSE
def test_linear_scan_parts(count, reverse):
    tiles = LinearScanTiles(32, parts=count)
    for arrays in (inputs(2, 1000, 296, "bfloat16"), inputs(2, 1024, 512)):
        check_case(arrays, "mosaic", reverse=reverse, tiles=tiles)


@check.sizes((1, 1000, 8), gpu=[(2, 1000, 128)])
def test_linear_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    a, b, state = inputs(*size)
    check_case((1 - 1e-4 * jnp.abs(a), b, state), implementation, final=False)


def test_linear_scan_complex():
    """S5's complex rates, from plain JAX: h, and slopes along real and imaginary a."""
    real, imaginary = inputs(2, 13, 3, seed=1), inputs(2, 13, 3, seed=2)
    a, b, state = (x + 1j * y for x, y in zip(real, imaginary, strict=True))
    a = 0.7 * a

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def run(a_real, a_imaginary):
        out = scan(a_real + 1j * a_imaginary, b, state, reverse=True)
        return jnp.sum(jnp.real(out * jnp.conj(b))), out

    grads, out = run(a.real, a.imag)
    assert out.dtype == jnp.complex64
    wide = [np.asarray(v, np.complex128) for v in (a, b, state)]
    (want, _), (da, *_) = sequences.linear_scan(*wide, np.conj(wide[1]), reverse=True)
    truth = want.real, want.imag, da.real, -da.imag
    check.assert_close((out.real, out.imag, *grads), truth, 1e-6)
    with pytest.raises(NotImplementedError, match="a is complex64, and the kernels take"):
        scan(a, b, state, implementation="mosaic")


def test_linear_scan_passes_in_plain_jax():
    """The plain JAX that stands in for the kernels without a GPU, with the states that it saves."""
    arrays = inputs(2, 37, 5)
    check_case(arrays, reverse=True)
    run = jax.jit(
        functools.partial(reference.reference_fwd, LinearScanOptions(True, "xla", save=True))
    )
    out, _, states = run(*arrays, None)
    steps = out[:, ::-1]
    check.assert_close(states, jnp.stack([arrays[2], steps[:, 15], steps[:, 31]], 1), 1e-7)


@pytest.mark.parametrize(
    ("kind", "reverse"), [(jnp.float32, True), exhaustive(jnp.complex64, False)]
)
def test_linear_scan_associative(kind, reverse):
    """Plain JAX's results on a GPU, in both modes and to second order, are those elsewhere."""
    arrays = tuple(v.astype(kind) for v in inputs(2, 37, 3))
    if kind == jnp.complex64:
        arrays = tuple(v * jnp.exp(1j * jnp.sin(9 * v.real)) for v in arrays)
    tangents = tuple(jnp.flip(v, 0) for v in arrays)
    serial = lambda a, b, state: reference.chunked(8, reverse, a, b, state, dtype=b.dtype)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def results(f):
        squares = lambda *arrays: (jnp.sum(jnp.real(f(*arrays) ** 2)), f(*arrays))
        found = jax.jvp(jax.grad(squares, (0, 1, 2), has_aux=True), arrays, tangents)
        return jax.tree.map(lambda v: (v.real, v.imag), found)

    got = results(functools.partial(reference.associative, reverse))
    check.assert_close(got, results(serial), 1e-5)


def test_linear_scan_reference_lowers_by_platform():
    """A loop over the steps everywhere but on a GPU, the gradient's too."""
    grad = jax.grad(lambda *a: scan(*a, implementation="xla").sum(), (0, 1, 2))
    traced = jax.jit(grad).trace(*inputs(2, 37, 3))
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) == (platform == "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "tiles"),
    [(None, None), exhaustive("mosaic", LinearScanTiles(2, fwd_stages=2, parts=9))],
    ids=["", "parts"],
)
def test_linear_scan_of_extremes(implementation, tiles):
    """By one program; the kernels' parts, of 2 steps, are more than are folded at once."""
    a, b, state = inputs(2, 18, 3)
    ones, zeros = jnp.ones_like(a), jnp.zeros_like(a)
    how = {"implementation": implementation, "return_final_state": True, "tiles": tiles}

    def run(arrays, dout):
        with check.running(implementation):
            (out, _), grads = check.value_and_grads(scan, arrays, (dout, 0 * state), **how)
        return out, grads

    # a = 0 forgets, even if growth came before, in one part: the product overflows.
    grows, small = a.at[:, 3].set(0.0), b.at[0, 0, 0].set(1e-30).at[0, 2, 1].set(0.0)
    grows = grows.at[0, :2, 0].set(jnp.array([1e30, 0.0]))
    grows = grows.at[0, 2:4, 1].set(jnp.array([1e38, 0.0]))
    check_case((grows, small, state), implementation, tiles=tiles)
    # Decays whose product is below fp32's range hand on 0.
    check_case((1e-25 * a, b, state), implementation, tiles=tiles)
    # A product that overflows does not touch a state that is 0.
    last, dout = zeros.at[:, -1].set(3.0), zeros.at[:, 0].set(2.0)
    out, (da, db, dstate) = run((1e25 * ones, last, 0 * state), dout)
    np.testing.assert_array_equal(out, last)
    np.testing.assert_array_equal(da, 0.0)
    np.testing.assert_array_equal(db, dout)
    np.testing.assert_allclose(dstate, 2e25, rtol=1e-6)
    # 0 · inf is NaN: a reset does not forget an infinite state.
    out, _ = run((ones.at[0, 4, 0].set(0.0), ones.at[0, 1, 0].set(jnp.inf), 0 * state), ones)
    np.testing.assert_array_equal(out[0, :6, 0], [1, np.inf, np.inf, np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(out[0, :, 1], np.arange(1.0, 19))
    # A NaN leaves every other channel, row and earlier step alone.
    others = np.ones((2, 3), bool)
    others[1, 2] = False
    want = jax.tree.leaves(run((a, b, state), ones))
    for bad in ((a.at[1, 3, 2].set(np.nan), b, state), (a, b.at[1, 3, 2].set(np.nan), state)):
        got = jax.tree.leaves(run(bad, ones))
        for x, y in zip(got, want, strict=True):
            x, y = (np.moveaxis(v, 1, -1) if v.ndim == 3 else v for v in (x, y))
            np.testing.assert_array_equal(x[others], y[others])
        np.testing.assert_array_equal(got[0][1, :3, 2], want[0][1, :3, 2])
        assert np.isnan(got[0][1, 3:, 2]).all()


def test_linear_scan_parts_fit():
    """The parts are as many as were asked for or fewer, and hold every chunk."""
    for chunks in (1, 2, 3, 7, 64, 2048):
        for columns in (1, 2, 8, 64, 128, 1000):
            for nbytes in (1 << 10, 1 << 24, 1 << 28):
                for arrays in (3, 5):
                    count = parts(columns, chunks, 32, arrays, nbytes)
                    assert 1 <= count <= chunks
                    assert count == 1 or columns <= 132
    assert parts(128, 64, 32, 3, 1 << 26) == 1
    assert parts(64, 64, 32, 3, 1 << 24) < parts(64, 64, 32, 3, 1 << 24, width=64) == 8
    assert parts(8, 2048, 32, 3, 1 << 27) > 8


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(4, 1000, 640), (1, 16384, 256)])
def test_linear_scan_same_bits(shape):
    arrays = inputs(*shape, "bfloat16")
    run = check.program(scan, implementation="mosaic")
    check.assert_same_bits(lambda: run(arrays, arrays[0]))


@pytest.mark.compiled
@pytest.mark.large
@pytest.mark.parametrize("shape", [((1 << 12) + 3, 64, 8192), (1, (1 << 21) + 40, 1024)])
def test_linear_scan_beyond_int32(shape):
    """More than 2³¹ elements: the last rows and the last steps are right."""
    batch, length, dim = shape
    few = inputs(min(batch, 2), min(length, 128), dim, "bfloat16")
    tile = lambda v: jnp.tile(v, (-(-batch // v.shape[0]), -(-length // v.shape[1]), 1))
    a, b = (tile(v)[:batch, :length] for v in few[:2])
    run = jax.jit(lambda a, b: jax.vjp(functools.partial(scan, implementation="mosaic"), a, b))
    out, vjp = run(a, b)
    da, db = jax.jit(lambda vjp, dout: vjp(dout))(vjp, out)
    # Over 1000 steps nothing is left of an earlier state or a later gradient.
    steps = slice(max(0, length - 2000), None)
    last = tuple(v[-2:, steps] for v in (a, b))
    want, want_vjp = jax.vjp(functools.partial(scan, implementation="xla"), *last)
    tail = slice(-min(length, 1000), None)
    check.assert_close(out[-2:, tail], want[:, tail], 4e-3)
    dout = out[-2:, steps]
    for got, expected in zip((da, db), want_vjp(dout), strict=True):
        check.assert_close(got[-2:, tail], expected[:, tail], 4e-3)


# Rows that are shorter than a block's channels, or no multiple of 16 bytes


def packed_scan(a, b, state, entered=None, *, options):
    return op._linear_scan_jit(a, b, state, entered, options)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_lanes_hold_what_is_copied(dtype):
    """Wherever a row begins, its elements fit; where every row is aligned, nothing is added."""
    unit = 16 // np.dtype(dtype).itemsize
    for dim in range(1, 300):
        width = min(dim, 128)
        row = ring.lanes_row(width, dim, dtype)
        starts = [ring.lanes_start(k * dim + c, dtype) for k in range(9) for c in (0, dim - width)]
        assert row % unit == 0
        assert max(starts) + width <= row < width + 2 * unit - 1
        assert (row == width) == (dim % unit == 0)


@pytest.mark.parametrize(
    ("length", "dim", "dtypes", "reverse", "by_lanes"),
    [
        (16, 100, ("bfloat16", None), False, True),
        (1000, 130, ("bfloat16", None), True, True),
        exhaustive(16, 129, ("bfloat16", None), False, True),
        exhaustive(16, 136, ("bfloat16", None), False, False),
        exhaustive(9, 130, ("float16", "float32"), False, True),
    ],
)
def test_linear_scan_lowers_for_cuda(length, dim, dtypes, reverse, by_lanes):
    """One part and several; lanes copy rows that the TMA cannot, and nothing is padded for it."""
    arrays = inputs(1, length, dim, *dtypes)
    run = check.program(packed_scan, options=LinearScanOptions(reverse, "mosaic"))
    with jaxkern.lowering_for("h200"):
        text = run.trace(arrays, arrays[1]).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("linear_scan_fwd", "linear_scan_bwd"):
        assert name in text
        assert (f"{name}_carry" in text) == (length > 16)
    assert ("cp.async.commit_group" in text) == by_lanes
    assert "stablehlo.pad" not in text


@pytest.mark.compiled
@pytest.mark.parametrize("dim", [1, 3, 64, 100, 127, 129, 1023])
@pytest.mark.parametrize(
    ("length", "dtypes", "segments", "reverse"),
    [
        (300, ("bfloat16", "bfloat16"), None, False),
        (300, ("float32", "float16"), None, True),
        (68, ("bfloat16", "float32"), 3, False),
        (4, ("float32", "float32"), 3, True),
    ],
    ids=str,
)
def test_linear_scan_copied_by_lanes(dim, length, dtypes, segments, reverse):
    """Rows that the TMA cannot copy give the bits that they give beside zeros, where it can.

    Chunks have 8 steps and the last one 4, all unrolled: a product is rounded before it is added to
    in the next iteration of a loop, and how the compiler cuts a loop follows from all of its code.
    """
    a, b, state = inputs(2, length, dim, *dtypes)
    dout = inputs(2, length, dim, *dtypes, seed=1)[1]
    entered = None
    if segments is not None:  # begin at step 2 with the state 1, and at step 40 with zeros
        state = jnp.stack([state, 2 * state, 3 * state], axis=1)
        entered = jnp.full((2, length), -1, jnp.int32).at[:, 2].set(1).at[:, 40:41].set(segments)
    options = LinearScanOptions(reverse, "mosaic", segments, LinearScanTiles(8, parts=3))
    run = functools.partial(check.program(packed_scan, options=options), entered=entered)
    more = -(-max(dim, 128) // 8) * 8 - dim
    wide = [jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, more)]) for v in (a, b, state, dout)]
    results = run((a, b, state), dout), run(tuple(wide[:3]), wide[3])
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(got, want[..., :dim])


LINEAR_SCAN = check.Op(
    name="linear_scan",
    call=scan,
    reference=reference.linear_scan_reference,
    arrays=lambda key: inputs(4, 3, 4, seed=3),
    kernels=("linear_scan_fwd", "linear_scan_bwd"),
    axes="bld bld bd -> bld",
    features="d",
    vmaps=[(None, 1, None), (0, None, 1)],
)
test_linear_scan_transformations = check.transformations(LINEAR_SCAN)
