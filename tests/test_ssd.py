"""ssd: accuracy, errors, and cases for the common suite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.ssd import reference
from tests import check
from tests.ssd import (
    EVERY,
    check_case,
    inputs_and_state,
    oracle,
    packed_ids,
    scan,
)

# Accuracy


@EVERY
@pytest.mark.parametrize(
    ("size", "groups"),
    [((1, 1, 1, 1, 1), 1), ((2, 63, 4, 3, 5), 2), ((2, 200, 2, 16, 32), 1)],
)
def test_ssd_accuracy(size, groups, implementation):
    check_case(inputs_and_state(*size, groups), implementation)


@EVERY
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_ssd_half_precision(dtypes, implementation):
    check_case(inputs_and_state(2, 150, 4, 16, 16, 2, *dtypes), implementation)


@EVERY
def test_ssd_accuracy_of_everything(implementation):
    """Groups, D of channels, limits that a part of the steps pass, segments, several blocks."""
    arrays = inputs_and_state(2, 300, 6, 4, 3, 3, of_channels=True)
    ids = packed_ids(2, 300, every=40)
    options = {"dt_limit": (0.05, 0.3), "segment_ids": ids, "checkpoint_every": 128}
    check_case(arrays, implementation, **options)


@EVERY
def test_ssd_without_softplus(implementation):
    x, dt, A, B, C, D, z, dt_bias, state = inputs_and_state(2, 70, 2, 4, 3)
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    arrays = x, dt, A, B, C, D, z, 0.01 * dt_bias, state
    check_case(arrays, implementation, dt_softplus=False)


@EVERY
def test_ssd_long_memory(implementation):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, *rest = inputs_and_state(1, 1000, 2, 4, 2)
    check_case((x, dt, 1e-3 * A, *rest), implementation, checkpoint_every=None)


@EVERY
def test_ssd_forgets_all_at_once(implementation):
    """Decays of exactly 0 amid others of one chunk: these keep all their digits, none is NaN."""
    x, dt, A, *rest = inputs_and_state(2, 100, 3, 4, 2)
    A = A.at[0].set(-1e6).at[1].set(-1e30)
    dt = dt.at[0, 4].set(80.0).at[1, ::9, 2].set(300.0)
    check_case((x, dt, A, *rest), implementation)


@EVERY
def test_ssd_grows(implementation):
    """A rate above 0 is legal: the state grows, and so do the gradients.

    By a little: of a number n, exp has n times the error of the number.
    """
    x, dt, A, *rest = inputs_and_state(1, 20, 2, 2, 3)
    check_case((x, dt, -0.01 * A, *rest), implementation)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("every", "dt_softplus", "implementation"),
    [(128, True, "xla"), (128, True, None), (256, False, None), (None, True, None)],
)
def test_ssd_reference_in_float64(every, dt_softplus, implementation):
    """The specification itself, gradients included, far below fp32's rounding."""
    options = {
        "dt_softplus": dt_softplus,
        "dt_limit": (0.05, 0.6) if dt_softplus else (-0.02, 0.1),
        "segment_ids": packed_ids(2, 300, every=60),
    }
    with jax.enable_x64(True):
        arrays = inputs_and_state(2, 300, 4, 3, 5, groups=2)
        arrays = tuple(np.asarray(a, np.float64) for a in arrays)
        rng = np.random.default_rng(0)
        cotangents = rng.normal(size=arrays[0].shape), rng.normal(size=arrays[-1].shape)
        run = functools.partial(scan, return_final_state=True, checkpoint_every=every, **options)
        given = tuple(map(jnp.asarray, cotangents))
        got = check.value_and_grads(run, arrays, given, implementation=implementation)
        assert got[0][0].dtype == got[0][1].dtype == jnp.float64
        check.assert_close(got, oracle(*arrays, *cotangents, **options), 1e-13)
        with pytest.raises(NotImplementedError, match="x is float64"):
            run(*map(jnp.asarray, arrays), implementation="mosaic")


def test_ssd_by_finite_differences():
    with jax.enable_x64(True):
        arrays = inputs_and_state(1, 6, 2, 2, 2, groups=2)
        arrays = tuple(jnp.asarray(a, jnp.float64) for a in arrays)
        ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        run = functools.partial(
            scan,
            implementation="xla",
            return_final_state=True,
            segment_ids=ids,
            dt_limit=(0.06, 0.3),
        )
        check_grads(
            jax.jit(run), arrays, order=1, modes=["fwd", "rev"], eps=1e-6, atol=1e-7, rtol=1e-7
        )


@pytest.mark.parametrize(("every", "count"), [(128, 2), (256, 1), (None, None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ssd_saved_states(every, count, dtype):
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states, and y if it is gated."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.dtype(dtype))
    tokens, steps = shape(2, 200, 1, 5, 3), shape(2, 200, 1, 5)
    args = tokens, steps, steps, shape(2, 200, 1, 4), shape(2, 200, 1, 4)
    run = lambda save, gate=None: jax.eval_shape(
        lambda *a: reference.reference_fwd(
            reference.Options(False, every, "auto", save=save), *a, None, gate, *[None] * 3
        ),
        *args,
    )
    out, final, states, y = run(True)
    assert out.shape == (2, 200, 1, 5, 3)
    assert final is None
    assert y is None
    gate = np.zeros(tokens.shape, dtype)
    *_, y = run(True, gate)
    assert (None if y is None else (y.shape, y.dtype)) == (
        None if count is None else (tokens.shape, tokens.dtype)
    )
    assert run(False, gate)[3] is None
    saved = {"float16": "float32"}.get(dtype, dtype)
    want = None if count is None else ((2, count, 1, 5, 3, 4), saved)
    assert (None if states is None else (states.shape, states.dtype)) == want
    assert run(False)[2] is None


# Calls


def test_ssd_errors():
    x, dt, A, B, C, D, z, dt_bias, state = inputs_and_state(2, 5, 4, 3, 6, groups=2)
    run = jaxkern.ssd
    with pytest.raises(TypeError, match=r"A must have a floating dtype.*got complex64"):
        run(x, dt, A.astype(jnp.complex64), B, C)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, H, P\), got \(5, 4, 3\)"):
        run(x[0], dt, A, B, C)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 5, 4\) = \(B, L, H\) of x"):
        run(x, dt[:, :4], A, B, C)
    with pytest.raises(ValueError, match=r"A must have shape \(4,\) = \(H,\) of x; got \(4, 1\)"):
        run(x, dt, A[:, None], B, C)
    with pytest.raises(ValueError, match=r"B must have shape \(B, L, G, N\).*B\[\.\.\., None, :\]"):
        run(x, dt, A, B[:, :, 0], C)
    with pytest.raises(ValueError, match=r"B must have a number of groups that divides the 4.*3"):
        run(x, dt, A, jnp.ones((2, 5, 3, 6)), jnp.ones((2, 5, 3, 6)))
    with pytest.raises(ValueError, match=r"C must have shape \(2, 5, 2, 6\).*as B"):
        run(x, dt, A, B, C[:1])
    with pytest.raises(ValueError, match=r"D must have shape \(4,\) = \(H,\) of x, or \(H, P\)"):
        run(x, dt, A, B, C, jnp.ones(3))
    with pytest.raises(ValueError, match=r"D must have shape \(4, 3\) = \(H, P\) of x; got"):
        run(x, dt, A, B, C, jnp.ones((4, 4)))
    with pytest.raises(ValueError, match=r"z must have shape"):
        run(x, dt, A, B, C, D, z[..., :1])
    with pytest.raises(ValueError, match=r"dt_bias must have shape"):
        run(x, dt, A, B, C, D, z, dt_bias=dt_bias[:1])
    with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 4, 3, 6\) = \(B, H,"):
        run(x, dt, A, B, C, initial_state=state[:1])
    step = jaxkern.ssd_step
    with pytest.raises(ValueError, match=r"state must have shape \(2, 4, 3, 6\) = \(B, H, P, N\)"):
        step(state[:, :3], x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, H, P\), got \(2, 5, 4, 3\)"):
        step(state, x, dt, A, B, C)


def test_ssd_option_errors():
    x, dt, A, B, C, *_ = inputs_and_state(2, 5, 4, 3, 6)
    run = functools.partial(jaxkern.ssd, x, dt, A, B, C)
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 5\) = \(B, L\) of x"):
        run(segment_ids=jnp.zeros(5, int))
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        run(dt_limit=1)
    with pytest.raises(ValueError, match=r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no"):
        run(dt_limit=(1, 0))
    for every in (0, -128, 64, 200):
        with pytest.raises(ValueError, match=f"a multiple of 128 or None, got {every}; try 128"):
            run(checkpoint_every=every)
    with pytest.raises(TypeError, match=r"checkpoint_every must be an int or None, got 'all'"):
        run(checkpoint_every="all")


# Transformations and meshes


def scan_of_both_results(*arrays, implementation="xla"):
    """One array that depends on the output and on the final state."""
    *arrays, last = arrays  # ids, where there are any
    packed = jnp.issubdtype(last.dtype, jnp.integer)
    options = {"segment_ids": last} if packed else {}
    arrays = arrays if packed else (*arrays, last)
    options |= {"implementation": implementation, "return_final_state": True}
    out, final = scan(*arrays, **options)
    return out + jnp.sum(final, axis=-1)[:, None]


SSD = check.Op(
    name="ssd",
    call=scan_of_both_results,
    reference=scan_of_both_results,
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, 3, seed=3),
    kernels=("ssd_fwd", "ssd_bwd"),
    axes="blhp blh h blgn blgn h blhp h bhpn -> blhp",
    features="h",
    channels="h",
    all_reduces=1,
    vmaps=[(0,) + (None,) * 8, (None, None, 0, None, 1, 0, None, None, 0)],
    cells=[
        *((name, None) for name in check.TRANSFORMATIONS if name not in check.ALONE),
        *((name, "xla") for name in ("jvp", "explicit mesh", "features split")),
    ],
)
GROUPS = dataclasses.replace(
    SSD,
    name="ssd, groups",
    arrays=lambda key: (*inputs_and_state(4, 5, 8, 2, 3, groups=4), packed_ids(4, 5)),
    axes="blhp blh h blgn blgn h blhp h bhpn bl -> blhp",
    channels="hg",
    vmaps=[(0,) * 10],
    cells=[
        *(("auto mesh", None), ("vmap(grad)", None)),
        *(("rows and channels split", i) for i in (None, "xla")),
    ],
)
test_ssd_transformations = check.transformations(SSD, GROUPS)


def test_ssd_groups_of_parts_on_mesh():
    """Fewer groups than devices: gathered on a mesh with Explicit axes."""
    arrays = inputs_and_state(1, 5, 8, 2, 3, groups=2)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    placed = [place(a, s) for a, s in zip(arrays, SSD.specs(data="h")[:-1], strict=True)]
    run = jax.jit(functools.partial(scan, implementation=None))
    check.assert_close(run(*placed), run(*arrays))
