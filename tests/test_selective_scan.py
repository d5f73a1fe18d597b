"""selective_scan: accuracy, errors, kernels, and cases for the common suite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.selective_scan import reference
from jaxkern.ops.selective_scan.tiles import MAX_STATES
from tests import check
from tests.selective_scan import (
    BOTH,
    INF,
    NAMES,
    ONE_PROGRAM,
    below_zero,
    check_case,
    inputs,
    inputs_and_state,
    interpreted,
    oracle,
    packed_ids,
    scan,
    sizes,
    value_and_grads,
)

# Accuracy


@sizes(gpu=[(2, 65, 130, 5), (1, 3, 2, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_selective_scan_half_precision(size, implementation, dtype):
    check_case(inputs(*size, dtype), implementation)


@sizes(gpu=[(2, 65, 130, 5)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_selective_scan_mixed_dtypes(size, implementation, dtypes):
    check_case(inputs(*size, *dtypes), implementation)


@sizes((2, 65, 130, 5), interpreted=[(1, 3, 2, 3)])
def test_selective_scan_two_half_precisions(size, implementation):
    """bf16 and fp16 among the arrays that are read, and among those that are written."""
    first = inputs_and_state(*size, "bfloat16", "float16")
    second = inputs_and_state(*size, "float16", "bfloat16")
    pick = lambda *names: tuple(
        a if name in names else b for name, a, b in zip(NAMES, first, second, strict=True)
    )
    every = {"checkpoint_every": None} if interpreted(implementation) else {}
    check_case(pick("x", "B", "z"), implementation, **every)


@sizes(gpu=[(2, 12, 128, 16)])
def test_selective_scan_without_softplus(size, implementation):
    arrays = below_zero(*inputs(*size))
    check_case(arrays, implementation, dt_softplus=False)


@sizes((1, 1000, 8, 2), gpu=[(2, 130, 128, 16)])
def test_selective_scan_long_memory(size, implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, B, C, D, z, dt_bias = inputs(*size)
    check_case((x, dt, 1e-3 * A, B, C, D, z, dt_bias), implementation)


@sizes(
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
    every = {"checkpoint_every": 16} if interpreted(implementation) else {}
    check_case(arrays, implementation, dt_limit=(0.05, 0.3), segment_ids=ids, **every)


@sizes((4, 9, 64, 300), gpu=[(1, 9, 3, 256), (1, 100, 130, 384)])
def test_selective_scan_accuracy_of_many_states(size, implementation):
    check_case(inputs_and_state(*size), implementation)


@sizes(gpu=[(1, 65537, 4, 2)])
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
        got = value_and_grads(call)(arrays, tuple(map(jnp.asarray, cotangents)))
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
        run = value_and_grads(call, implementation=None, checkpoint_every=every)
        got = run(arrays, cotangents, segment_ids=ids)
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
    options = reference.Options(True, (0.0, INF), False, every, "auto")
    run = lambda save: jax.eval_shape(
        lambda: reference.reference_fwd(dataclasses.replace(options, save=save), *args)
    )
    out, final, states = run(True)
    assert out.shape == (2, 21, 1, 5)
    assert final is None
    assert (None if states is None else states.shape) == shape
    assert run(False)[2] is None


@sizes(
    *[(1, 1, 1, 1), (2, 2, 3, 4), (2, 63, 287, 4)],
    gpu=[
        (2, 7, 1, 64),
        (2, 8, 128, 16),
        (2, 64, 127, 1),
        (2, 65, 512, 16),
        (2, 257, 130, 17),
        (3, 1000, 256, 33),
    ],
    interpreted=[ONE_PROGRAM],
)
def test_selective_scan_accuracy(size, implementation):
    check_case(inputs(*size), implementation)


@BOTH
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
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'cuda\''):
        run(x, dt, A, B, C, implementation="cuda")
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 4\) = \(B, D, N\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 4, 3)), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, D\), got \(2, 5, 3\)"):
        jaxkern.selective_scan_step(jnp.zeros((2, 3, 4)), x, dt, A, B, C)


def test_selective_scan_option_errors():
    x, dt, A, B, C, *_ = inputs(2, 5, 3, 4)
    run = functools.partial(jaxkern.selective_scan, x, dt, A, B, C)
    with pytest.raises(TypeError, match=r"segment_ids must have an integer dtype, got float32"):
        run(segment_ids=x[..., 0])
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 5\) = \(B, L\) of x"):
        run(segment_ids=jnp.zeros(5, int))
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        run(dt_limit=1)
    with pytest.raises(ValueError, match=r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no"):
        run(dt_limit=(1, 0))
    with pytest.raises(ValueError, match=r"low <= high, got \(nan, 1\)"):
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
    run = jax.jit(lambda a, d: jax.vjp(lambda *a: scan(*a, implementation="mosaic"), *a)[1](d))
    first = run(arrays, arrays[0])
    for _ in range(20):
        for a, b in zip(first, run(arrays, arrays[0]), strict=True):
            np.testing.assert_array_equal(a, b)


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


TOKENS = ("x", "dt", "B", "C", "z", "initial_state")
ROWS = tuple(P("data") if name in TOKENS else P() for name in NAMES)
CHANNELS = {
    **dict.fromkeys(("x", "dt", "z"), P(None, None, "data")),
    **dict.fromkeys(("A", "D", "dt_bias"), P("data")),
    **dict.fromkeys(("B", "C"), P()),
    "initial_state": P(None, "data"),
}


def scan_of_both_results(*arrays, implementation):
    """One array that depends on the output and on the final state."""
    out, final = scan(*arrays, implementation=implementation, return_final_state=True)
    return out + jnp.sum(final, axis=-1)[:, None]


SELECTIVE_SCAN = check.Op(
    name="selective_scan",
    call=scan_of_both_results,
    reference=lambda *a: scan_of_both_results(*a, implementation="xla"),
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, seed=3),
    kernels=("selective_scan_fwd", "selective_scan_bwd"),
    rows=(*ROWS, P("data")),
    features=(*(CHANNELS[name] for name in NAMES), P(None, None, "data")),
    all_reduces=1,
    vmaps=[(0,) + (None,) * 8, (None, None, 0, None, 1, 0, None, None, 0)],
)


@functools.cache
def groups_grad(implementation):
    def loss(*arrays):
        *arrays, ids = arrays
        out, final = scan(
            *arrays, implementation=implementation, segment_ids=ids, return_final_state=True
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

    return jax.jit(jax.value_and_grad(loss, range(9)))


@pytest.mark.parametrize(
    ("split", "kind", "implementation"),
    [
        ("rows", AxisType.Auto, None),
        ("channels", AxisType.Auto, None),
        ("channels", AxisType.Explicit, None),
        ("channels", AxisType.Explicit, "xla"),
    ],
)
def test_selective_scan_groups_on_mesh(split, kind, implementation):
    """Split in whole groups, or by rows, packed sequences too: no device asks for another's."""
    arrays = (*inputs_and_state(4, 5, 8, 2, groups=4), packed_ids(4, 5))
    by_channel = CHANNELS | dict.fromkeys(("B", "C"), P(None, None, "data"))
    specs = {
        "channels": (*(by_channel[name] for name in NAMES), P()),
        "rows": (*ROWS, P("data")),
    }[split]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)
    ]

    compiled = groups_grad(implementation).lower(*placed).compile()
    check.assert_close(compiled(*placed), groups_grad("xla")(*arrays))
    text = compiled.as_text()
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


def test_selective_scan_groups_of_parts_on_mesh():
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = inputs(1, 5, 8, 2, groups=2)
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    placed = [
        jax.device_put(a, NamedSharding(mesh, CHANNELS[name]))
        for name, a in zip(NAMES[:-1], arrays, strict=True)
    ]
    run = jax.jit(functools.partial(scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))


@pytest.mark.newest
def test_selective_scan_packed_under_vmap():
    """Per-example gradients of groups and of segments that differ between the examples."""
    arrays = inputs_and_state(2, 7, 4, 2, groups=2)
    stacked = [jnp.stack([a, 0.9 * a]) for a in arrays]
    ids = jnp.stack([packed_ids(2, 7), packed_ids(2, 7)[::-1]])

    def grad(implementation):
        def loss(ids, *arrays):
            return jnp.sum(jnp.sin(scan(*arrays, implementation=implementation, segment_ids=ids)))

        return jax.jit(jax.vmap(jax.grad(loss, range(1, 10))))

    one = grad("xla")
    loop = [one(ids[i : i + 1], *(a[i : i + 1] for a in stacked)) for i in range(2)]
    want = jax.tree.map(lambda *v: jnp.concatenate(v), *loop)
    check.assert_close(grad(None)(ids, *stacked), want)


@check.matrix(SELECTIVE_SCAN)
def test_selective_scan_transformations(cell, record_property):
    check.check_cell(cell, record_property)
