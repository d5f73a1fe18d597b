"""selective_scan: accuracy, errors, kernels, and cases for the common suite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.selective_scan import reference
from jaxkern.ops.selective_scan.tiles import MAX_STATES
from jaxkern.ops.step_sizes import StepSizes
from tests import check
from tests.selective_scan import (
    INF,
    NAMES,
    ONE_PROGRAM,
    below_zero,
    check_case,
    inputs,
    inputs_and_state,
    oracle,
    packed_ids,
    scan,
)

# Accuracy


@check.sizes(gpu=[(2, 65, 130, 5), (1, 3, 2, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_selective_scan_half_precision(size, implementation, dtype):
    check_case(inputs(*size, dtype), implementation)


@check.sizes(gpu=[(2, 65, 130, 5)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_selective_scan_mixed_dtypes(size, implementation, dtypes):
    check_case(inputs(*size, *dtypes), implementation)


@check.sizes((2, 65, 130, 5), interpreted=[(1, 3, 2, 3)])
def test_selective_scan_two_half_precisions(size, implementation):
    """bf16 and fp16 among the arrays that are read, and among those that are written."""
    first = inputs_and_state(*size, "bfloat16", "float16")
    second = inputs_and_state(*size, "float16", "bfloat16")
    pick = lambda *names: tuple(
        a if name in names else b for name, a, b in zip(NAMES, first, second, strict=True)
    )
    every = {"checkpoint_every": None} if check.interpreted(implementation) else {}
    check_case(pick("x", "B", "z"), implementation, **every)


@check.sizes(gpu=[(2, 12, 128, 16)])
def test_selective_scan_without_softplus(size, implementation):
    arrays = below_zero(*inputs(*size))
    check_case(arrays, implementation, dt_softplus=False)


@check.sizes((1, 1000, 8, 2), gpu=[(2, 130, 128, 16)])
def test_selective_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, 1e-3 * A, B, C, D, z, dt_bias), implementation)


@check.sizes(
    (2, 21, 6, 3, 2),
    gpu=[(2, 130, 96, 16, 3), (3, 200, 287, 5, None)],
    interpreted=[(1, 50, 2, 2, 2)],
)
def test_selective_scan_accuracy_of_everything(size, implementation):
    """Groups, an initial state, a final state, limits that a part of the steps pass, segments."""
    *size, groups = size
    arrays = inputs_and_state(*size, groups=groups)
    ids = packed_ids(*size[:2])
    # Two chunks from one saved state to the next, and both kernels in several parts.
    every = {"checkpoint_every": 16} if check.interpreted(implementation) else {}
    check_case(arrays, implementation, dt_limit=(0.05, 0.3), segment_ids=ids, **every)


@check.sizes((4, 9, 64, 300), gpu=[(1, 9, 3, 256), (1, 100, 130, 384)])
def test_selective_scan_accuracy_of_many_states(size, implementation):
    check_case(inputs_and_state(*size), implementation)


@check.sizes(gpu=[(1, 65537, 4, 2)])
def test_selective_scan_accuracy_of_a_long_sequence(size, implementation):
    check_case(inputs_and_state(*size), implementation)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("every", "dt_softplus"), [(1, True), (8, False), (16, True), (None, True)]
)
def test_selective_scan_reference_in_float64(every, dt_softplus):
    """The specification itself, gradients included, far below fp32's rounding."""
    options = {
        "dt_softplus": dt_softplus,
        "dt_limit": (0.05, 0.6) if dt_softplus else (-2.5, 0.1),
        "segment_ids": packed_ids(2, 21),
    }
    with jax.enable_x64(True):
        arrays = inputs_and_state(2, 21, 6, 4, groups=2)
        arrays = tuple(np.asarray(a, np.float64) for a in arrays)
        rng = np.random.default_rng(0)
        cotangents = rng.normal(size=arrays[0].shape), rng.normal(size=arrays[-1].shape)
        call = functools.partial(
            scan, implementation=None, return_final_state=True, checkpoint_every=every, **options
        )
        got = check.value_and_grads(call, arrays, tuple(map(jnp.asarray, cotangents)))
        assert got[0][0].dtype == got[0][1].dtype == jnp.float64
        check.assert_close(got, oracle(*arrays, *cotangents, **options), 1e-14)
        with pytest.raises(NotImplementedError, match="x is float64"):
            scan(*map(jnp.asarray, arrays), implementation="mosaic")


def test_selective_scan_by_finite_differences():
    with jax.enable_x64(True):
        arrays = inputs_and_state(1, 5, 2, 2, groups=2)
        arrays = tuple(jnp.asarray(a, jnp.float64) for a in arrays)
        ids = jnp.array([[0, 0, 0, 1, 1]])
        call = functools.partial(
            scan,
            implementation="xla",
            return_final_state=True,
            segment_ids=ids,
            dt_limit=(0.06, 0.3),
        )
        check_grads(
            jax.jit(call), arrays, order=1, modes=["fwd", "rev"], eps=1e-6, atol=1e-7, rtol=1e-7
        )


@pytest.mark.newest
def test_selective_scan_passes_in_plain_jax():
    """The pair of passes that stands in for the kernels where there is no GPU."""
    arrays = inputs_and_state(2, 21, 4, 3, groups=2)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    ids = packed_ids(2, 21)
    call = functools.partial(scan, return_final_state=True, dt_limit=(0.05, 0.6))
    wide = (np.asarray(a, np.float64) for a in (*arrays, *cotangents))
    want = oracle(*wide, dt_limit=(0.05, 0.6), segment_ids=ids)
    for every in (16, None):
        options = {"implementation": None, "checkpoint_every": every, "segment_ids": ids}
        got = check.value_and_grads(call, arrays, cotangents, **options)
        check.assert_close(got[0], want[0], 2e-7)
        check.assert_close(got[1], want[1], 1e-6)


@pytest.mark.parametrize(
    ("every", "shape"),
    [(1, (2, 21, 1, 5, 3)), (8, (2, 3, 1, 5, 3)), (64, (2, 1, 1, 5, 3)), (None, None)],
)
def test_selective_scan_saved_states(every, shape):
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states."""
    x, dt, A, B, C, *_ = inputs(2, 21, 5, 3)
    args = (x[:, :, None], dt[:, :, None], A[None], B[:, :, None], C[:, :, None], *[None] * 6)
    options = reference.Options(StepSizes(True, 0.0, INF), False, every, "auto")
    run = lambda save: jax.eval_shape(
        lambda: reference.reference_fwd(dataclasses.replace(options, save=save), *args)
    )
    out, final, states = run(True)
    assert out.shape == (2, 21, 1, 5)
    assert final is None
    assert (None if states is None else states.shape) == shape
    assert run(False)[2] is None


@check.sizes(
    *[(1, 1, 1, 1), (2, 2, 3, 4), (2, 63, 287, 4)],
    gpu=[
        (2, 7, 1, 64),
        (2, 8, 128, 16),
        (2, 64, 127, 1),
        (2, 65, 512, 16),
        (1, 9, 2100, 16),  # more blocks of channels than are summed at once
        (2, 257, 130, 17),
        (3, 1000, 256, 33),
    ],
    interpreted=[ONE_PROGRAM],
)
def test_selective_scan_accuracy(size, implementation):
    check_case(inputs(*size), implementation)


@check.BOTH
def test_selective_scan_forgets_all_at_once(implementation):
    """dt · A → −∞: a decay of exactly 0, with no NaN in any gradient."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*ONE_PROGRAM)
    A = A.at[:, 0].set(-1e6).at[0, 1].set(-1e30)
    dt = dt.at[0, 4].set(80.0)
    check_case((x, dt, A, B, C, D, z, dt_bias), implementation)


# Calls


def test_selective_scan_errors():
    x, dt, A, B, C, D, z, dt_bias, state = inputs_and_state(2, 5, 3, 4)
    run = jaxkern.selective_scan
    with pytest.raises(TypeError, match=r"A must have a floating dtype.*got complex64"):
        run(x, dt, A.astype(jnp.complex64), B, C)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, D\), got \(5, 3\)"):
        run(x[0], dt, A, B, C)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 5, 3\) = \(B, L, D\) of x"):
        run(x, dt[:, :4], A, B, C)
    with pytest.raises(ValueError, match=r"A must have shape \(D, N\), D the 3 chan.*\(4, 3\)"):
        run(x, dt, A.T, B, C)
    with pytest.raises(ValueError, match=r"B must have shape \(2, 5, 4\).*got \(2, 4, 5\)"):
        run(x, dt, A, B.swapaxes(1, 2), C)
    with pytest.raises(ValueError, match=r"C must have shape"):
        run(x, dt, A, B, C[:1])
    with pytest.raises(ValueError, match=r"C must have shape \(2, 5, 4\).*got \(2, 5, 1, 4\)"):
        run(x, dt, A, B, C[:, :, None])
    with pytest.raises(
        ValueError, match=r"B must have a number of groups that divides the 3.*got 2"
    ):
        run(x, dt, A, jnp.ones((2, 5, 2, 4)), jnp.ones((2, 5, 2, 4)))
    with pytest.raises(ValueError, match=r"D must have shape \(3,\) = \(D,\) of x; got \(4,\)"):
        run(x, dt, A, B, C, jnp.ones(4))
    with pytest.raises(ValueError, match=r"z must have shape"):
        run(x, dt, A, B, C, D, z[..., :1])
    with pytest.raises(ValueError, match=r"dt_bias must have shape"):
        run(x, dt, A, B, C, D, z, dt_bias=dt_bias[:1])
    with pytest.raises(
        ValueError, match=r"initial_state must have shape \(2, 3, 4\) = \(B, D, N\)"
    ):
        run(x, dt, A, B, C, initial_state=state[:1])
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 4\) = \(B, D, N\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 4, 3)), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 5, 3\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 3, 4)), x, dt, A, B, C)


def test_selective_scan_option_errors():
    x, dt, A, B, C, *_ = inputs(2, 5, 3, 4)
    run = functools.partial(jaxkern.selective_scan, x, dt, A, B, C)
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        run(dt_limit=1)
    with pytest.raises(ValueError, match=r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no"):
        run(dt_limit=(1, 0))
    with pytest.raises(ValueError, match=r"dt_limit\[0\] must be a number, got nan"):
        run(dt_limit=(float("nan"), 1))
    with pytest.raises(
        TypeError, match=r"dt_limit\[1\] must be a Python number, as it is compiled"
    ):
        jax.jit(lambda high: run(dt_limit=(0, high)))(1.0)
    for every in (0, -8, 2, 20):
        with pytest.raises(ValueError, match=f"1, a multiple of 8 or None, got {every}; try"):
            run(checkpoint_every=every)
    with pytest.raises(TypeError, match=r"checkpoint_every must be an int or None, got 'all'"):
        run(checkpoint_every="all")


def test_selective_scan_of_too_many_states():
    """More states than the kernels hold: plain JAX unless the kernels were asked for."""
    arrays = inputs(1, 9, 2, MAX_STATES + 1)
    with pytest.raises(NotImplementedError, match=rf"A has {MAX_STATES + 1} states.*{MAX_STATES}"):
        scan(*arrays, implementation="mosaic")
    chosen, plain = (scan(*arrays, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen, plain)
    text = (
        jax.jit(lambda *a: scan(*a, implementation=None))
        .trace(*arrays)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "selective_scan_fwd" not in text


# Kernels


@pytest.mark.newest  # the transformations lower it by every version of JAX
@pytest.mark.parametrize(
    ("dtype", "states", "gated", "packed"),
    [
        ("bfloat16", 16, True, False),
        ("float16", 1, False, True),
        ("float32", 64, True, False),
    ],
)
def test_selective_scan_lowers_for_cuda(dtype, states, gated, packed):
    """The kernels' layouts are accepted, with no GPU here."""
    x, dt, A, B, C, D, z, _ = inputs(2, 70, 130, states, dtype, weight_dtype="float32")

    def loss(*args):
        optional = {"z": z if gated else None, "segment_ids": segment_ids if packed else None}
        out = jaxkern.selective_scan(*args, D, **optional, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    segment_ids = jnp.broadcast_to(jnp.arange(70) // 9, (2, 70))
    program = jax.jit(jax.grad(loss, range(5)))
    text = program.trace(x, dt, A, B, C).lower(lowering_platforms=("cuda",)).as_text()
    assert "selective_scan_fwd" in text
    assert "selective_scan_bwd" in text


@pytest.mark.compiled
def test_selective_scan_same_bits():
    arrays = inputs(4, 1000, 640, 16, "bfloat16", "float32")
    run = check.program(scan, implementation="mosaic")
    check.assert_same_bits(lambda: run(arrays, arrays[0]))


@pytest.mark.compiled
@pytest.mark.large
def test_selective_scan_beyond_int32():
    """More than 2³¹ elements: the last rows are right."""
    batch, length, dim, states = (1 << 12) + 3, 64, 8192, 8
    few = inputs(2, length, dim, states, "bfloat16", "float32")
    tile = lambda v: jnp.tile(v, ((batch + 1) // 2, *(1,) * (v.ndim - 1)))[:batch]
    arrays = tuple(tile(v) if v.ndim == 3 else v for v in few)
    run = jax.jit(lambda *a: jax.vjp(lambda x: scan(x, *a[1:], implementation="mosaic"), a[0]))
    out, vjp = run(*arrays)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, out)
    last = tuple(v[-2:] if v.ndim == 3 else v for v in arrays)
    want, want_vjp = jax.vjp(lambda x: scan(x, *last[1:], implementation="mosaic"), last[0])
    # Two rows alone are cut into parts, which rounds differently.
    check.assert_close(out[-2:], want, 2.0**-9)
    check.assert_close(dx[-2:], want_vjp(want)[0], 2.0**-9)
    check.assert_close(want, scan(*last, implementation="xla"), 4e-3)


def scan_of_both_results(*arrays, implementation="xla"):
    """One array that depends on the output and on the final state."""
    *arrays, last = arrays  # ids, where there are any
    packed = jnp.issubdtype(last.dtype, jnp.integer)
    options = {"segment_ids": last} if packed else {}
    arrays = arrays if packed else (*arrays, last)
    options |= {"implementation": implementation, "return_final_state": True}
    out, final = scan(*arrays, **options)
    return out + jnp.sum(final, axis=-1)[:, None]


SELECTIVE_SCAN = check.Op(
    name="selective_scan",
    call=scan_of_both_results,
    reference=scan_of_both_results,
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, seed=3),
    kernels=("selective_scan_fwd", "selective_scan_bwd"),
    axes="bld bld dn bln bln d bld d bdn -> bld",
    features="d",
    all_reduces=1,
    vmaps=[(0,) + (None,) * 8, (None, None, 0, None, 1, 0, None, None, 0)],
)
GROUPS = dataclasses.replace(
    SELECTIVE_SCAN,
    name="selective_scan, groups",
    arrays=lambda key: (*inputs_and_state(4, 5, 8, 2, groups=4), packed_ids(4, 5)),
    axes="bld bld dn blgn blgn d bld d bdn bl -> bld",
    channels="dg",
    vmaps=[(0,) * 10],
    cells=[
        *(("auto mesh", None), ("vmap(grad)", None)),
        *(("rows and channels split", i) for i in (None, "xla")),
    ],
)
test_selective_scan_transformations = check.transformations(SELECTIVE_SCAN, GROUPS)


def test_selective_scan_groups_of_parts_on_mesh():
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = inputs(1, 5, 8, 2, groups=2)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    specs = SELECTIVE_SCAN.specs(data="d")
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    placed = [place(a, spec) for a, spec in zip(arrays, specs[:8], strict=True)]
    run = jax.jit(functools.partial(scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))
