"""linear_scan: cases for the common suite, and what is its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.core.dispatch import Mode
from jaxkern.ops.linear_scan import op, reference
from jaxkern.ops.linear_scan.tiles import Options, Tiles, parts
from tests import check

NAMES = ("a", "b", "initial_state")


def oracle(a, b, initial_state, dout, reverse=False):
    """Output and gradients in float64 NumPy: one step at a time, there and back."""
    order = range(a.shape[1])[:: -1 if reverse else 1]
    h, before, out = initial_state, np.empty_like(a), np.empty_like(b)
    for t in order:
        before[:, t] = h
        h = a[:, t] * h + b[:, t]
        out[:, t] = h
    da, db, dh = np.empty_like(a), np.empty_like(b), np.zeros_like(initial_state)
    for t in reversed(order):
        dh = dh + dout[:, t]
        da[:, t], db[:, t] = dh * before[:, t], dh
        dh = a[:, t] * dh
    return out, (da, db, dh)


def plain(a, b, initial_state, reverse=False):
    """What a user would write: a scan over time, in the dtype of b."""
    a, initial_state = a.astype(b.dtype), initial_state.astype(b.dtype)

    def step(h, ab):
        h = ab[0] * h + ab[1]
        return h, h

    by_time = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0))
    return jnp.moveaxis(jax.lax.scan(step, initial_state, by_time, reverse=reverse)[1], 0, 1)


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


def scan(a, b, initial_state=None, *, implementation=None, reverse=False, tiles=None):
    if tiles is None:
        return jaxkern.linear_scan(
            a, b, initial_state=initial_state, reverse=reverse, implementation=implementation
        )
    mode: Mode = "mosaic" if check.ON_GPU else "interpret"
    return op._linear_scan_jit(a, b, initial_state, None, Options(reverse, mode, tiles=tiles))[0]


def check_case(arrays, implementation=None, reverse=False, tiles=None):
    own, dtypes = {"tiles": tiles}, [str(arrays[1].dtype)]
    how = {"own": own, "dtypes": dtypes, "rounding": 1e-6, "reverse": reverse}
    check.check_accuracy(scan, plain, oracle, arrays, implementation, **how)


REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])


# Accuracy


@check.sizes(
    *[(1, 1, 1), (2, 63, 287)],
    gpu=[
        (2, 1000, 130),
        (3, 1000, 1),
        (1, 33, 128),
        (2, 65, 129),
        (2, 64, 512),
        (1, 5000, 256),
        (300, 40, 3),
    ],
    interpreted=[(2, 18, 130)],
)
@REVERSE
def test_linear_scan_accuracy(size, implementation, reverse):
    check_case(inputs(*size), implementation, reverse)


@check.sizes((2, 300, 130), gpu=[(2, 64, 512)], interpreted=[(1, 3, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_scan_half_precision(size, implementation, dtype):
    check_case(inputs(*size, dtype), implementation)


@check.sizes((2, 65, 130), gpu=[(1, 3, 2)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16")])
def test_linear_scan_mixed_dtypes(size, implementation, dtypes):
    check_case(inputs(*size, *dtypes), implementation)


TILES = [
    ((2, 7, 150), Tiles(3, bwd_stages=2, parts=2), True),
    ((1, 11, 1), Tiles(1, fwd_stages=2, parts=10), False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "tiles", "reverse"), TILES)
def test_linear_scan_tiles(size, tiles, reverse):
    """However the sequence is cut, with steps left over or none, the result is the same."""
    check_case(inputs(*size), reverse=reverse, tiles=tiles)


@pytest.mark.compiled
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 31])
@REVERSE
def test_linear_scan_parts(count, reverse):
    tiles = Tiles(32, parts=count)
    check_case(inputs(2, 1000, 296, "bfloat16"), reverse=reverse, tiles=tiles)
    check_case(inputs(2, 1024, 512), reverse=reverse, tiles=tiles)


@check.sizes((1, 1000, 8), gpu=[(2, 1000, 128)])
def test_linear_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    a, b, state = inputs(*size)
    check_case((1 - 1e-4 * jnp.abs(a), b, state), implementation)


@REVERSE
def test_linear_scan_reference_in_float64(reverse):
    """The specification itself, gradients included, far below fp32's rounding."""
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(np.asarray(v, np.float64)) for v in inputs(2, 13, 3))
        dout = np.random.default_rng(0).normal(size=arrays[0].shape)
        got = check.value_and_grads(scan, arrays, jnp.asarray(dout), reverse=reverse)
        assert got[0].dtype == jnp.float64
        want = oracle(*(np.asarray(v) for v in arrays), dout, reverse=reverse)
        check.assert_close(got, want, 1e-14)
        with pytest.raises(NotImplementedError, match="a is float64"):
            scan(*arrays, implementation="mosaic")


def test_linear_scan_complex():
    """S5's complex rates, from plain JAX: h as NumPy has it, slopes along real and imaginary a."""
    reverse = True
    real, imaginary = inputs(2, 13, 3, seed=1), inputs(2, 13, 3, seed=2)
    a, b, state = (x + 1j * y for x, y in zip(real, imaginary, strict=True))
    a = 0.7 * a
    out = scan(a, b, state, reverse=reverse)
    assert out.dtype == jnp.complex64
    wide = [np.asarray(v, np.complex128) for v in (a, b, state)]
    want, _ = oracle(*wide, wide[1], reverse)
    assert np.linalg.norm(out - want) <= 1e-6 * np.linalg.norm(want)

    def loss(a_real, a_imaginary):
        out = scan(a_real + 1j * a_imaginary, b, state, reverse=reverse)
        return jnp.sum(jnp.real(out * jnp.conj(b)))

    def slope(a, da, h=1e-6):
        ends = [oracle(a + s * h * da, *wide[1:], wide[1], reverse)[0] for s in (1, -1)]
        return np.sum(((ends[0] - ends[1]) * np.conj(wide[1])).real) / (2 * h)

    grads = jax.jit(jax.grad(loss, (0, 1)))(a.real, a.imag)
    for grad, unit in zip(grads, (1, 1j), strict=True):
        step = np.asarray(real[1], np.float64)
        np.testing.assert_allclose(np.sum(grad * step), slope(wide[0], unit * step), rtol=1e-4)
    with pytest.raises(NotImplementedError, match="a is complex64, and the kernels take"):
        scan(a, b, state, implementation="mosaic")


def test_linear_scan_passes_in_plain_jax():
    """The pair that stands in for the kernels where there is no GPU is the reference's gradient."""
    reverse = True
    arrays = inputs(2, 37, 5)
    dout = inputs(2, 37, 5, seed=1)[1]
    out, grads = check.value_and_grads(scan, arrays, dout, implementation="xla", reverse=reverse)
    options = Options(reverse, "xla")
    again, _, states = jax.jit(
        functools.partial(reference.reference_fwd, dataclasses.replace(options, save=True))
    )(*arrays, None)
    check.assert_close(again, out, 1e-7)
    steps = out[:, ::-1]
    check.assert_close(states, jnp.stack([arrays[2], steps[:, 15], steps[:, 31]], 1), 1e-7)
    backward = jax.jit(functools.partial(reference.reference_bwd, options))
    check.assert_close(backward(*arrays[:2], None, None, states, dout, None), grads, 1e-6)


@pytest.mark.parametrize(("kind", "reverse"), [(jnp.float32, False), (jnp.complex64, True)])
def test_linear_scan_associative(kind, reverse):
    """What plain JAX is on a GPU, in both modes and to second order, is what it is elsewhere."""
    arrays = tuple(v.astype(kind) for v in inputs(2, 37, 3))
    if kind == jnp.complex64:
        arrays = tuple(
            v * jnp.exp(1j * w) for v, w in zip(arrays, inputs(2, 37, 3, seed=1), strict=True)
        )
    tangents = tuple(jnp.flip(v, 0) for v in arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def results(f):
        def loss(*arrays):
            out = f(*arrays)
            return jnp.sum(jnp.real(out * out)), out

        return jax.jvp(jax.grad(loss, (0, 1, 2), has_aux=True), arrays, tangents)

    got = results(functools.partial(reference.associative, reverse))
    want = results(
        lambda a, b, state: reference.chunked(8, reverse, a, b, state, dtype=b.dtype)[0],
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        check.assert_close((x.real, x.imag), (y.real, y.imag), 1e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_linear_scan_reference_lowers_by_platform(platform):
    """A loop over the steps everywhere but on a GPU, the gradient's too."""
    arrays = inputs(2, 37, 3)
    grad = jax.grad(lambda *a: scan(*a, implementation="xla").sum(), (0, 1, 2))
    text = jax.jit(grad).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == (platform == "cpu")


@check.BOTH
def test_linear_scan_finite_differences(implementation):
    """Slopes of the float64 recurrence along a random direction of every argument."""
    arrays = inputs(1, 4, 2)
    wide = [np.asarray(v, np.float64) for v in arrays]
    rng = np.random.default_rng(0)
    dout = rng.normal(size=wide[0].shape)
    dout32 = jnp.asarray(dout, jnp.float32)
    with check.running(implementation):
        _, grads = check.value_and_grads(scan, arrays, dout32, implementation=implementation)
    for i, grad in enumerate(grads):
        step = rng.normal(size=wide[i].shape)

        def loss(size, i=i, step=step):
            moved = [v + size * step if k == i else v for k, v in enumerate(wide)]
            return np.sum(oracle(*moved, dout)[0] * dout)

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(np.asarray(grad) * step), slope, rtol=1e-5)


# What the recurrence promises


@check.sizes((2, 50, 3), gpu=[(2, 2000, 256)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_scan_is_its_steps(size, implementation, dtype):
    """A loop over single steps, with the state in fp32, rounded once."""
    a, b, state = inputs(*size, dtype)
    decays, terms, h = (np.asarray(v, np.float32) for v in (a, b, state))
    outs = []
    for t in range(size[1]):
        h = decays[:, t] * h + terms[:, t]
        outs.append(h)
    with check.running(implementation):
        out = jax.jit(functools.partial(scan, implementation=implementation))(a, b, state)
    # A multiply-add may round once and not twice, and a rounding to bf16 may then fall elsewhere.
    tolerance = 1e-6 if dtype == "float32" else 3e-4
    check.assert_close(out, jnp.asarray(np.stack(outs, 1)).astype(dtype), tolerance)


@check.sizes((2, 40, 3), gpu=[(2, 2000, 256)])
def test_linear_scan_reverse_is_flipped(size, implementation):
    arrays = inputs(*size)
    run = functools.partial(scan, implementation=implementation)
    flip = lambda v: jnp.flip(v, 1)
    flipped = lambda a, b, state: flip(run(flip(a), flip(b), state))
    with check.running(implementation):
        got = check.value_and_grads(run, arrays, arrays[0], reverse=True)
        want = check.value_and_grads(flipped, arrays, arrays[0])
    check.assert_close(got, want, 3e-7)


@check.BOTH
def test_linear_scan_without_initial_state(implementation):
    a, b, _ = inputs(1, 5, 3)
    run = functools.partial(scan, implementation=implementation)
    with check.running(implementation):
        got = check.value_and_grads(run, (a, b), a)
        out, grads = check.value_and_grads(run, (a, b, jnp.zeros((1, 3))), a)
    check.assert_close(got, (out, grads[:2]), 1e-7)


def scan_and_grads(arrays, dout, reverse=False, tiles=None):
    """By the program that :func:`check_case` has, so that the interpreter traces kernels once."""
    how = {"implementation": None, "reverse": reverse, "tiles": tiles}
    return check.value_and_grads(scan, arrays, dout, **how)


CUT = pytest.mark.parametrize("tiles", [None, Tiles(2, parts=3)], ids=["", "parts"])
"""The reference, and kernels that cut 6 steps into 3 parts. All cases have one shape, so that
the interpreter traces the kernels once."""


@pytest.mark.gpu
@CUT
def test_linear_scan_resets(tiles):
    """a = 0 forgets: what comes after a reset is a run of its own, even if growth came before."""
    a, b, state = inputs(2, 6, 3)
    a = a.at[:, 3].set(0.0)
    check_case((a, b, state), tiles=tiles)
    # Within the first part the product of a overflows and is forgotten.
    a, b = a.at[0, :2, 0].set(jnp.array([1e30, 0.0])), b.at[0, 0, 0].set(1e-30)
    a, b = a.at[0, 2:4, 1].set(jnp.array([1e38, 0.0])), b.at[0, 2, 1].set(0.0)
    check_case((a, b, state), tiles=tiles)


@pytest.mark.gpu
@CUT
def test_linear_scan_grows_from_nothing(tiles):
    """A product that overflows does not touch a state that is 0."""
    a, b = jnp.full((2, 6, 3), 1e25, "float32"), jnp.zeros((2, 6, 3)).at[:, 5].set(3.0)
    dout = b.at[:, 5].set(0.0).at[:, 0].set(2.0)
    out, (da, db, dstate) = scan_and_grads((a, b, jnp.zeros((2, 3))), dout, tiles=tiles)
    np.testing.assert_array_equal(out, b)
    np.testing.assert_array_equal(da, 0.0)
    np.testing.assert_array_equal(db[:, 0], 2.0)
    np.testing.assert_array_equal(db[:, 1:], 0.0)
    np.testing.assert_allclose(dstate, 2e25, rtol=1e-6)


@pytest.mark.gpu
@CUT
def test_linear_scan_underflows(tiles):
    """Decays whose product is below fp32's range hand on 0."""
    a, b, state = inputs(2, 6, 3)
    check_case((1e-25 * a, b, state), tiles=tiles)


@pytest.mark.gpu
@CUT
def test_linear_scan_infinite_state(tiles):
    """0 · inf is NaN, as in plain JAX: a reset does not forget an infinite state."""
    a, b = jnp.ones((2, 6, 3)).at[0, 4, 0].set(0.0), jnp.ones((2, 6, 3)).at[0, 1, 0].set(jnp.inf)
    arrays = a, b, jnp.zeros((2, 3))
    for out, _ in (scan_and_grads(arrays, b, tiles=tiles), check.value_and_grads(plain, arrays, b)):
        np.testing.assert_array_equal(out[0, :, 0], [1, np.inf, np.inf, np.inf, np.nan, np.nan])
        np.testing.assert_array_equal(out[0, :, 1], np.arange(1.0, 7))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tiles", "reverse"), [(None, True), (Tiles(2, parts=3), False)], ids=["", "parts"]
)
def test_linear_scan_bad_channel_stays_alone(tiles, reverse):
    """A NaN leaves every other channel, row and earlier step alone."""
    arrays = inputs(2, 6, 3)
    dout = jnp.ones_like(arrays[0])
    run = functools.partial(scan_and_grads, reverse=reverse, tiles=tiles)
    others = np.ones((2, 3), bool)
    others[1, 2] = False
    want = jax.tree.leaves(run(arrays, dout))
    for i in (0, 1):
        bad = list(arrays)
        bad[i] = bad[i].at[1, 3, 2].set(np.nan)
        got = jax.tree.leaves(run(tuple(bad), dout))
        for x, y in zip(got, want, strict=True):
            x, y = (np.moveaxis(v, 1, -1) if v.ndim == 3 else v for v in (x, y))
            np.testing.assert_array_equal(x[others], y[others])
        earlier = slice(4, None) if reverse else slice(None, 3)
        np.testing.assert_array_equal(got[0][1, earlier, 2], want[0][1, earlier, 2])
        assert np.isnan(np.delete(got[0][1, :, 2], earlier)).all()


def test_linear_scan_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    b = jnp.full((1, 10_000, 1), 1e-3, jnp.bfloat16)
    out = scan(jnp.ones_like(b), b)
    np.testing.assert_allclose(float(out[0, -1, 0]), 1e4 * float(b[0, 0, 0]), rtol=2.0**-8)


# Calls


def test_linear_scan_errors():
    a, b, state = inputs(2, 5, 3)
    run = jaxkern.linear_scan
    with pytest.raises(ValueError, match=r"a must have shape \(B, L, D\), got \(5, 3\)"):
        run(a[0], b)
    with pytest.raises(ValueError, match=r"b must have shape \(2, 5, 3\).*got \(2, 4, 3\)"):
        run(a, b[:, :4])
    with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 3\).*got \(3,\)"):
        run(a, b, initial_state=state[0])
    with pytest.raises(TypeError, match=r"b must be complex where a is.*float32.*astype\(complex"):
        run(a.astype(jnp.complex64), b)
    with pytest.raises(TypeError, match=r"b must be complex where initial_state is"):
        run(a, b, initial_state=state.astype(jnp.complex64))


# Kernels


@pytest.mark.parametrize(
    ("dtypes", "length", "reverse"),
    [
        (("bfloat16", None), 1000, True),
        (("float16", "float32"), 9, False),
    ],
)
def test_linear_scan_lowers_for_cuda(dtypes, length, reverse):
    """The kernels' layouts are accepted, with no GPU here: one part, and several."""
    arrays = inputs(1, length, 130, *dtypes)
    grad = jax.grad(lambda *a: scan(*a, reverse=reverse).astype(jnp.float32).sum(), (0, 1, 2))
    text = jax.jit(grad).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("linear_scan_fwd", "linear_scan_bwd"):
        assert name in text
        assert (f"{name}_carry" in text) == (length > 9)


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


LINEAR_SCAN = check.Op(
    name="linear_scan",
    call=scan,
    reference=lambda *a: jaxkern.ops.linear_scan.linear_scan_reference(*a),
    arrays=lambda key: inputs(4, 3, 4, seed=3),
    kernels=("linear_scan_fwd", "linear_scan_bwd"),
    axes="bld bld bd -> bld",
    features="d",
    vmaps=[(None, 1, None), (0, None, 1)],
)
test_linear_scan_transformations = check.transformations(LINEAR_SCAN)
