"""selective_scan: accuracy, what the recurrence promises of its states, errors, transformations."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads

import jaxkern
from jaxkern.ops.selective_scan import op, reference
from jaxkern.ops.selective_scan.tiles import MAX_STATES
from jaxkern.ops.step_sizes import StepSizes
from tests import check
from tests.selective_scan import (
    INF,
    KERNELS,
    NAMES,
    SIZE,
    below_zero,
    check_case,
    inputs,
    inputs_and_state,
    oracle,
    packed_ids,
    scan,
    short_chunks,
)

EXHAUSTIVE = pytest.mark.exhaustive
ONE_PROGRAM = (2, 9, 66, 5)
"""A size for cases that differ in their numbers alone."""

# Accuracy


def cases(name, make, *, xla=(), passes=(), exhaustive=(), compiled=(), interpreted=(), **options):
    """A case of each size, ``make(*size)`` its arrays and perhaps further options.

    Plain JAX has the sizes `xla`, `passes` by the pair that stands in for the kernels, and in the
    exhaustive suite `exhaustive`. On a GPU kernels have those of plain JAX too, and those
    `compiled`; there and in the interpreter they have those `interpreted`.
    """
    for implementation, sizes, marks in (
        ("xla", xla, []),
        (None, passes, []),
        ("xla", exhaustive, [EXHAUSTIVE]),
        ("mosaic", (*xla, *exhaustive, *compiled), [pytest.mark.compiled]),
        ("mosaic", interpreted, [pytest.mark.gpu, EXHAUSTIVE]),
    ):
        for size in sizes:
            shape = "x".join(map(str, size))
            args = functools.partial(make, *size), implementation, options
            yield pytest.param(*args, marks=marks, id=f"{name}-{shape}-{implementation}")


def two_half_precisions(*size):
    """bf16 and fp16 among the arrays that are read, and among those that are written."""
    first = inputs_and_state(*size, "bfloat16", "float16")
    second = inputs_and_state(*size, "float16", "bfloat16")
    named = zip(NAMES, first, second, strict=True)
    return tuple(a if name in ("x", "B", "z") else b for name, a, b in named)


def long_memory(*size):
    """States that forget nothing: rounding errors add up over the whole sequence."""
    x, dt, A, *others = inputs(*size)
    return x, dt, 1e-3 * A, *others


def forgetful(*size):
    """dt · A → −∞: a decay of exactly 0, with no NaN in any gradient."""
    x, dt, A, *others = inputs(*size)
    return x, dt.at[0, 4].set(80.0), A.at[:, 0].set(-1e6).at[0, 1].set(-1e30), *others


def growing(*size):
    """A rate above 0 is legal: the state grows, and so do the gradients."""
    x, dt, A, *others = inputs(*size)
    return x, dt, -0.5 * A, *others


def everything(batch, length, dim, states, groups):
    """Groups, an initial and a final state, limits that a part of the steps pass, segments."""
    arrays = inputs_and_state(batch, length, dim, states, groups=groups)
    return arrays, {"segment_ids": packed_ids(batch, length)}


LIMITS = {"dt_limit": (0.05, 0.3)}
HALF, MIXED = [(2, 65, 130, 5, d) for d in ("bfloat16", "float16")], ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("make", "implementation", "options"),
    [
        *cases(
            "all sizes",
            inputs,
            xla=[(1, 1, 1, 1), ONE_PROGRAM],
            exhaustive=[(2, 2, 3, 4), (2, 63, 287, 4)],
            compiled=[
                *((2, 7, 1, 64), (2, 8, 128, 16), (2, 64, 127, 1), (2, 65, 512, 16)),
                (1, 9, 2100, 16),  # more blocks of channels than are summed at once
                *((2, 257, 130, 17), (3, 1000, 256, 33)),
            ],
            interpreted=[ONE_PROGRAM],
        ),
        *cases("half", inputs, compiled=[*HALF, *((1, 3, 2, 3, d) for *_, d in HALF)]),
        *cases("mixed", inputs, compiled=[(2, 65, 130, 5, *m) for m in (MIXED, MIXED[::-1])]),
        *cases("two halves", two_half_precisions, xla=[(1, 3, 2, 3)], compiled=[(2, 65, 130, 5)]),
        *cases(
            "none saved", two_half_precisions, interpreted=[(1, 3, 2, 3)], checkpoint_every=None
        ),
        *cases(
            "no softplus",
            lambda *size: below_zero(*inputs(*size)),
            compiled=[(2, 12, 128, 16)],
            dt_softplus=False,
        ),
        *cases(
            "long memory", long_memory, exhaustive=[(1, 1000, 8, 2)], compiled=[(2, 130, 128, 16)]
        ),
        *cases("forgetful", forgetful, xla=[ONE_PROGRAM]),
        *cases("growing", growing, xla=[(1, 12, 2, 2)]),
        *cases(
            "everything",
            everything,
            passes=[(2, 21, 4, 3, 2)],
            exhaustive=[(2, 21, 6, 3, 2)],
            compiled=[(2, 130, 96, 16, 3), (3, 200, 287, 5, None)],
            **LIMITS,
        ),
        # Two chunks from one saved state to the next, and both kernels in several parts.
        *cases("parts", everything, interpreted=[(1, 50, 2, 2, 2)], checkpoint_every=16, **LIMITS),
        *cases(
            "many states",
            inputs_and_state,
            exhaustive=[(4, 9, 64, 300)],
            compiled=[(1, 9, 3, 256), (1, 100, 130, 384)],
        ),
        *cases("long sequence", inputs_and_state, compiled=[(1, 65537, 4, 2)]),
        *(
            case
            for every in (1, 8, 16, 64, None)
            for case in cases(
                f"every {every}",
                inputs_and_state,
                compiled=[(2, 200, 130, 16)],
                checkpoint_every=every,
            )
        ),
    ],
)
def test_selective_scan_accuracy(make, implementation, options):
    arrays, of_arrays = made if isinstance((made := make())[-1], dict) else (made, {})
    check_case(arrays, implementation, **options, **of_arrays)


@pytest.mark.parametrize(
    ("every", "dt_softplus"),
    [
        (8, False),
        *(pytest.param(every, True, marks=EXHAUSTIVE) for every in (1, 16, None)),
    ],
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


@pytest.mark.exhaustive
def test_selective_scan_by_finite_differences():
    with jax.enable_x64(True):
        arrays = (jnp.asarray(a, jnp.float64) for a in inputs_and_state(1, 3, 2, 2, groups=2))
        options = {"segment_ids": jnp.array([[0, 0, 1]]), "dt_limit": (0.06, 0.3)}
        call = functools.partial(scan, implementation="xla", return_final_state=True, **options)
        tolerances = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-7}
        check_grads(jax.jit(call), tuple(arrays), order=1, modes=["fwd", "rev"], **tolerances)


def test_selective_scan_saved_states():
    """What is kept for the backward, besides the arguments: ⌈L/k⌉ states."""
    x, dt, A, B, C, *_ = inputs(2, 21, 5, 3)
    args = (x[:, :, None], dt[:, :, None], A[None], B[:, :, None], C[:, :, None], *[None] * 6)
    for every, count in ((1, 21), (8, 3), (64, 1), (None, None)):
        for save in True, False:
            options = reference.Options(StepSizes(True, 0.0, INF), False, every, "auto", save=save)
            run = functools.partial(reference.reference_fwd, options)
            out, final, states = jax.eval_shape(run, *args)
            assert out.shape == (2, 21, 1, 5)
            assert final is None
            saved = (2, count, 1, 5, 3) if save and count else None
            assert (None if states is None else states.shape) == saved


# What the recurrence promises

RUNS = pytest.mark.parametrize(
    "implementation",
    ["forward", "backward", pytest.param("mosaic", marks=pytest.mark.compiled), "xla"],
)
"""Each kernel by itself in short chunks, and both passes."""


def run(implementation, dout=None, dfinal=None, **changed):
    """Results and gradients by their names, of :data:`SIZE` and with some arrays changed."""
    of = dict(zip(NAMES, inputs_and_state(*SIZE), strict=True))
    arrays = tuple((of | {name: change(of[name]) for name, change in changed.items()}).values())
    dout = jnp.ones_like(arrays[0]) if dout is None else dout
    dfinal = jnp.ones_like(arrays[-1]) if dfinal is None else dfinal
    results, grads = (), ()
    if implementation == "forward":
        results = KERNELS.forward(arrays)[:2]
    elif implementation == "backward":
        with np.errstate(invalid="ignore"):
            grads = KERNELS.backward(arrays, dout, dfinal)
    else:
        both = check.program(scan, implementation=implementation, return_final_state=True)
        results, grads = both(arrays, (dout, dfinal))
    names = [f"d{name}" for name in NAMES]
    pairs = *zip(("out", "final"), results, strict=False), *zip(names, grads, strict=False)
    return dict(pairs)


@pytest.mark.exhaustive
@RUNS
def test_selective_scan_bad_channel_stays_alone(implementation):
    """A NaN in one channel of one row leaves every other channel, row and earlier step alone."""
    others = np.ones((2, 66), bool)
    others[1, 2] = False
    rest = {  # of sums over channels the other row's, of sums over rows the other channels'
        **dict.fromkeys(("out", "dx", "ddt", "dz"), lambda v: v.swapaxes(1, 2)[others]),
        **dict.fromkeys(("final", "dinitial_state"), lambda v: v[others]),
        **dict.fromkeys(("dB", "dC"), lambda v: v[0]),
        **dict.fromkeys(("dA", "dD", "ddt_bias"), lambda v: np.delete(v, 2, 0)),
    }
    want = run(implementation)
    for name in ("x", "dt", "z"):
        got = run(implementation, **{name: lambda v: v.at[1, 3, 2].set(np.nan)})
        for n, v in got.items():
            np.testing.assert_array_equal(rest[n](v), rest[n](want[n]))
        if "out" in got:
            np.testing.assert_array_equal(got["out"][1, :3, 2], want["out"][1, :3, 2])
            assert np.isnan(got["out"][1, 3, 2])


@RUNS
def test_selective_scan_softplus(implementation):
    """The step size and its slope, relative to themselves, over their whole range."""
    raw = np.array([-80.0, -60.0, -15.0, -4.0, -0.1, 0.0, 0.3, 3.0, 40.0, 1000.0], np.float32)
    first = lambda v: jnp.zeros_like(v).at[:, 0, : raw.size].set(1.0)
    zeros, ones = dict.fromkeys(("A", "dt_bias", "initial_state"), jnp.zeros_like), jnp.ones_like
    dt = lambda v: jnp.zeros_like(v).at[:, :, : raw.size].set(raw)
    dfinal = jnp.zeros((SIZE[0], *SIZE[2:])).at[..., 0].set(1.0)
    got = run(implementation, jnp.zeros(SIZE[:3]), dfinal, x=first, dt=dt, B=ones, **zeros)
    wide = raw.astype(np.float64)
    if "final" in got:
        error = np.abs(got["final"][0, : raw.size, 0] / np.logaddexp(wide, 0) - 1)
        assert np.all(error <= 5e-7 + 2e-8 * np.abs(wide)), error
    if "ddt" in got:
        slope = 1 / (1 + np.exp(-wide))
        np.testing.assert_allclose(got["ddt"][0, 0, : raw.size], slope, rtol=2e-6)


@RUNS
def test_selective_scan_keeps_a_state(implementation):
    """To the last bit, over steps that underflow."""
    *_, state = inputs_and_state(*SIZE)
    dt = lambda v: jnp.full_like(v, -200.0)
    got = run(implementation, jnp.zeros(SIZE[:3]), state, dt=dt, dt_bias=jnp.zeros_like)
    for name in {"final", "dinitial_state"} & got.keys():
        np.testing.assert_array_equal(got[name], state)


def test_selective_scan_is_its_steps():
    """selective_scan_step, token by token, gives the same outputs, final state and gradients."""
    arrays = inputs_and_state(2, 9, 6, 3, groups=2)
    options = {"dt_softplus": True, "dt_limit": (0.05, 0.6)}

    def stepped(x, dt, A, B, C, D, z, dt_bias, state):
        def step(state, token):
            x, dt, b, c, z = token
            return jaxkern.selective_scan_step(
                state, x, dt, A, b, c, D, z, dt_bias=dt_bias, **options
            )[::-1]

        tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, z))
        state, outs = jax.lax.scan(step, state.astype(jnp.float32), tokens)
        return jnp.moveaxis(outs, 0, 1), state

    call = functools.partial(scan, implementation="xla", return_final_state=True, **options)
    cotangents = jnp.sin(arrays[0]), jnp.cos(arrays[-1])
    want = check.value_and_grads(stepped, arrays, cotangents)
    check.assert_close(check.value_and_grads(call, arrays, cotangents), want, 1e-6)


def test_selective_scan_step_keeps_its_state_in_float32():
    """Ten thousand additions of 1e-3, each lost if the state were bf16."""
    one = jnp.ones((1, 1), jnp.bfloat16)
    step = lambda state, _: jaxkern.selective_scan_step(
        state, 1e-3 * one, one, jnp.zeros((1, 1)), one, one
    )[::-1]
    state, _ = jax.lax.scan(step, jnp.zeros((1, 1, 1)), length=10_000)
    np.testing.assert_allclose(state, 1e4 * float(1e-3 * one[0, 0]), rtol=1e-3)


@check.BOTH
def test_selective_scan_of_no_step(implementation):
    """The final state is the initial one, and so are their gradients."""
    arrays = inputs_and_state(2, 0, 3, 2, "bfloat16")
    call = functools.partial(scan, implementation=implementation, return_final_state=True)
    with check.running(implementation):
        (out, final), vjp = jax.vjp(call, *arrays)
        grads = vjp((out, final))
    np.testing.assert_array_equal(final, arrays[-1])
    np.testing.assert_array_equal(grads[-1], arrays[-1])


@check.WHOLE
def test_selective_scan_dt_limit(implementation):
    """A step outside the limits is the limit, with no gradient; one at a limit has its own."""
    raw = jnp.array([-3.0, 0.0, 0.125, 0.25, 1.0, 2.0, 5.0, np.nan])[None, None]
    A, one = jnp.zeros((raw.size, 1)), jnp.ones((1, 1, 1))

    def run(dt, **limits):
        return jaxkern.selective_scan(
            jnp.ones_like(dt), dt, A, one, one, implementation=implementation, **limits
        )

    limits = {"dt_limit": (0.125, 2.0)}, {}, {"dt_limit": (-INF, 1)}
    for given, low, high in zip(limits, (0.125, 0.0, -INF), (2.0, INF, 1.0), strict=True):
        out, (ddt,) = check.value_and_grads(run, (raw,), jnp.ones_like(raw), **given)
        np.testing.assert_array_equal(out, np.clip(raw, low, high))  # NaN where raw is
        np.testing.assert_array_equal(ddt[..., :-1], ((raw >= low) & (raw <= high))[..., :-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("implementation", "every", "least", "most"),
    [
        *(("xla", 8, 0, 0.35), ("xla", 1, 1, INF)),
        *((None, every, 0, 0.25) for every in (64, None)),
    ],
)
def test_selective_scan_memory(implementation, every, least, most):
    """Value and gradient take far less than one (B, L, D, N) array, unless asked for."""
    size = batch, length, dim, states = 1, 512, 64, 64
    call = functools.partial(scan, implementation=implementation, checkpoint_every=every)
    loss = lambda *a: jnp.sum(call(*a) ** 2)
    arrays = jax.eval_shape(lambda: inputs(*size))
    compiled = jax.jit(jax.grad(loss, range(8))).lower(*arrays).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert least < temporary / (batch * length * dim * states * 4) < most


# Calls


def test_selective_scan_errors():
    names = ("x", "dt", "A", "B", "C")
    good = {n: v for n, v in zip(NAMES, inputs(2, 5, 3, 4), strict=False) if n in names}
    x, dt, A, B, C = good.values()
    run = lambda **changed: jaxkern.selective_scan(**good | changed)
    step = lambda state, *arrays: jaxkern.selective_scan_step(jnp.zeros(state), *arrays)
    token, two = (x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0]), jnp.ones((2, 5, 2, 4))
    few = lambda: run(initial_state=jnp.ones((1, 3, 4)))
    for words, call in (
        (r"x must have shape \(B, L, D\), got \(5, 3\)", lambda: run(x=x[0])),
        (r"dt must have shape \(2, 5, 3\) = \(B, L, D\) of x", lambda: run(dt=dt[:, :4])),
        (r"A must have shape \(D, N\), D the 3 chan.*\(4, 3\)", lambda: run(A=A.T)),
        (r"B must have shape \(2, 5, 4\).*got \(2, 4, 5\)", lambda: run(B=B.swapaxes(1, 2))),
        (r"C must have shape", lambda: run(C=C[:1])),
        (r"C must have shape \(2, 5, 4\).*got \(2, 5, 1, 4\)", lambda: run(C=C[:, :, None])),
        (r"B must have a number of groups that divides the 3.*got 2", lambda: run(B=two, C=two)),
        (r"D must have shape \(3,\) = \(D,\) of x; got \(4,\)", lambda: run(D=jnp.ones(4))),
        (r"z must have shape", lambda: run(z=x[..., :1])),
        (r"dt_bias must have shape", lambda: run(dt_bias=jnp.ones(1))),
        (r"initial_state must have shape \(2, 3, 4\) = \(B, D, N\)", few),
        (r"^state must have shape \(2, 3, 4\) = \(B, D, N\)", lambda: step((2, 4, 3), *token)),
        (r"x must have shape \(B, D\), got \(2, 5, 3\)", lambda: step((2, 3, 4), *good.values())),
        (r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no", lambda: run(dt_limit=(1, 0))),
        (r"dt_limit\[0\] must be a number, got nan", lambda: run(dt_limit=(np.nan, 1))),
        *(
            (f"1, a multiple of 8 or None, got {k}; try", lambda k=k: run(checkpoint_every=k))
            for k in (0, -8, 2, 20)
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"dt_limit must be two numbers, \(low, high\); got 1"):
        run(dt_limit=1)
    with pytest.raises(TypeError, match=r"dt_limit\[1\] must be a Python number, as it is comp"):
        jax.jit(lambda high: run(dt_limit=(0, high)))(1.0)


def test_selective_scan_of_too_many_states():
    """More states than the kernels hold: plain JAX unless the kernels were asked for."""
    arrays = inputs(1, 2, 2, MAX_STATES + 1)
    with pytest.raises(NotImplementedError, match=rf"A has {MAX_STATES + 1} states.*{MAX_STATES}"):
        scan(*arrays, implementation="mosaic")
    chosen, in_plain_jax = (scan(*arrays, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen, in_plain_jax)
    run = jax.jit(functools.partial(scan, implementation=None))
    text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "selective_scan_fwd" not in text


# Kernels


@EXHAUSTIVE
@pytest.mark.parametrize(("dtype", "states"), [("bfloat16", 16), ("float16", 1), ("float32", 64)])
def test_selective_scan_lowers_for_cuda(dtype, states):
    """The kernels' layouts are accepted, with no GPU here."""
    *arrays, D, z, _ = inputs(2, 70, 130, states, dtype, weight_dtype="float32")
    of = {"segment_ids": packed_ids(2, 70)} if dtype == "float16" else {"z": z}
    scan = functools.partial(jaxkern.selective_scan, D=D, **of, implementation="mosaic")
    program = jax.jit(jax.grad(lambda *a: scan(*a).astype(jnp.float32).sum(), range(5)))
    text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
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
    every = op.CHUNK if implementation == "mosaic" else 1
    options |= {"implementation": implementation, "checkpoint_every": every}
    options["return_final_state"] = True
    out, final = scan(*arrays, **options)
    return out + jnp.sum(final, axis=-1)[:, None]


SELECTIVE_SCAN = check.Op(
    name="selective_scan",
    call=scan_of_both_results,
    reference=scan_of_both_results,
    arrays=lambda key: inputs_and_state(4, 3, 4, 2, seed=3),
    kernels=("selective_scan_fwd", "selective_scan_bwd"),
    axes="bld bld dn bln bln d bld d bdn -> bld",
    slow=[
        *((name, "mosaic") for name in ("grad", "vmap(vmap)", "vmap(grad)", "grad(grad)")),
        *((name, "xla") for name in ("grad", "grad(grad)", "jvp", "vmap(grad) on explicit mesh")),
    ],
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
INTERPRETED = {"value", "grad", "vmap", "vmap(vmap)", "vmap(grad)", "grad(grad)"}


@pytest.fixture(autouse=True)
def _interpreted_in_short_chunks(request):
    """Three tokens are two chunks where cells of the matrix run the interpreter."""
    of = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    cell = of.get("name") in INTERPRETED and check.interpreted(of["implementation"])
    with short_chunks(2) if cell else contextlib.nullcontext():
        yield


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
