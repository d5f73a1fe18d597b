"""selective_scan: its kernels, accuracy, what the recurrence promises of its states, the matrix."""

import contextlib
import dataclasses
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.scan_options import StepSizes, by_group, join_groups
from jaxkern.ops.selective_scan import backward, forward, op, reference, steps, tiles
from jaxkern.ops.selective_scan.tiles import MAX_STATES
from tests import check
from tests.selective_scan import check_case, inputs, inputs_and_state, oracle, scan
from tests.ssd import (
    INF,
    NAMES,
    below_zero,
    both_results,
    check_others,
    check_reference,
    packed_ids,
    with_groups,
    with_rates,
)

EXHAUSTIVE = pytest.mark.exhaustive
ONE_PROGRAM = (2, 9, 66, 5)
"""A size for cases that differ in their numbers alone."""

# Each kernel by itself


@contextlib.contextmanager
def short_chunks(count):
    """Chunks of `count` steps: the interpreter compiles each step of a chunk, 8 for half a minute.

    What is traced inside must have options or shapes that nothing traced outside has.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("jaxkern.ops.selective_scan.") and hasattr(module, "CHUNK"):
                patch.setattr(module, "CHUNK", count)
        patch.setattr(steps.Steps.__init__, "__defaults__", (count,))
        yield


class Kernels(NamedTuple):
    """The kernels of both passes in the interpreter, each by itself.

    A chunk has `chunk` steps, and states are saved `every` steps.
    """

    chunk: int
    every: int
    of_steps: StepSizes = StepSizes(True, 0.0, INF)

    def forward(self, arrays, segment_ids=None, mode="interpret"):
        """Output, final state and saved states."""
        results = self._run(mode, op.FORWARD, arrays, segment_ids)
        return [join_groups(v, n) for v, n in zip(results, (2, 1, 2), strict=True)]

    def backward(self, arrays, dout, dfinal, segment_ids=None):
        """The gradients, from the states that plain JAX saves, and the output again."""
        x, *_, state = by_group(arrays, 2)
        *_, saved = self._run("xla", op.FORWARD, arrays, segment_ids)
        given = saved, dout.reshape(x.shape), dfinal.reshape(state.shape)
        *grads, out = self._run("interpret", op.BACKWARD, arrays, segment_ids, *given, output=True)
        grads = zip(grads, arrays, strict=False)
        return [*(g if g is None else g.reshape(a.shape) for g, a in grads), join_groups(out, 2)]

    def _run(self, mode, kernel_pass, arrays, segment_ids, *more, **others):
        keep = None
        if segment_ids is not None:
            new = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            keep = 1 - new.astype(jnp.float32)
        others["save"] = True
        options = reference.SelectiveScanOptions(self.of_steps, True, self.every, mode, **others)
        with short_chunks(self.chunk):
            run = _jitted(kernel_pass, options, self.chunk)
            return run(*by_group(arrays, 2), keep, None, *more)

    def check(self, name, arrays, segment_ids=None):
        """One pass, ``"forward"`` or ``"backward"``, to a rounding of its float64 results.

        The backward has states rounded to the dtype that they are saved in.
        """
        rng = np.random.default_rng(17)
        given = [jnp.asarray(rng.normal(size=v.shape), v.dtype) for v in (arrays[0], arrays[8])]
        softplus, *limits = dataclasses.astuple(self.of_steps)
        options = {"dt_softplus": softplus, "dt_limit": limits, "segment_ids": segment_ids}
        results, want = check.in_float64(oracle, *arrays, *given, **options)
        saved = self.forward(arrays, segment_ids, "xla")[2]
        if name == "forward":
            got, want = self.forward(arrays, segment_ids), (*results, saved)
            assert got[2].dtype == saved.dtype
        else:
            got, want = self.backward(arrays, *given, segment_ids), (*want, results[0])
        for i, (ours, truth) in enumerate(zip(got, want, strict=True)):
            if ours is not None:
                of = [ours.dtype, saved.dtype] if name == "backward" else [ours.dtype]
                error, eps = check.relative_error(ours, truth), max(jnp.finfo(t).eps for t in of)
                assert error <= float(eps) / 2 + 3e-6, f"{name} {i}: {error:.1e}"


@functools.cache
def _jitted(kernel_pass, options, chunk):
    del chunk  # of which there is a program each
    return jax.jit(functools.partial(kernel_pass, options))


KERNELS, SIZE = Kernels(chunk=2, every=2), (2, 5, 66, 5)
"""Three chunks, the last with padding, of two blocks of channels: one program for many tests."""


CUT = tiles.ScanGrid.cut


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_every_argument(name):
    KERNELS.check(name, inputs_and_state(*SIZE))


@pytest.mark.parametrize("wide", [None, "x", "dt", "B", "C", "z"])
def test_states_are_saved_in_bf16_where_all_tokens_are(wide):
    """The rates, D and dt_bias may have more digits."""
    arrays = dict(zip(NAMES, inputs(1, 64, 6, 4, "bfloat16", "float32"), strict=False))
    for name in ("x", "dt", "B", "C", "z"):
        arrays[name] = arrays[name].astype("float32" if name == wide else "bfloat16")
    kept = jax.eval_shape(lambda a: jax.vjp(lambda a: jaxkern.selective_scan(**a), a)[1], arrays)
    states = [str(v.dtype) for v in jax.tree.leaves(kept) if v.shape == (1, 2, 1, 6, 4)]
    assert states == ["float32" if wide else "bfloat16"]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_states_saved_in_bf16(name):
    """By both kernels."""
    *arrays, state = inputs_and_state(1, 5, 6, 4, "bfloat16")
    arrays = *arrays, state.astype("float32")  # as the op has it
    assert KERNELS.forward(arrays, mode="xla")[2].dtype == jnp.bfloat16
    KERNELS.check(name, arrays)


def without_optional(arrays):
    """Neither D nor a gate nor a bias."""
    return tuple(
        None if name in ("D", "z", "dt_bias") else v for name, v in zip(NAMES, arrays, strict=True)
    )


def packed_arrays(length):
    """Groups, and both half precisions."""
    first, second = (
        inputs_and_state(1, length, 6, 2, dtype, "float32", groups=2)
        for dtype in ("bfloat16", "float16")
    )
    of = dict(zip(NAMES, first, strict=True)) | {"dt": jnp.exp(second[1]), "C": second[4]}
    return without_optional(of.values()), packed_ids(1, length)


PACKED = Kernels(2, 2, StepSizes(False, 0.05, 0.3))


def cut_grid(monkeypatch, module, cut):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(module, f"{name}_grid", lambda columns, units, *_: cut(columns, units))


def test_forward_of_segments_in_subparts(monkeypatch):
    """Two parts of two chunks, each a subpart."""
    cut_grid(monkeypatch, forward, lambda columns, units: CUT(columns, units, 0, 2, 2))
    PACKED.check("forward", *packed_arrays(7))


WHOLE = lambda columns, units: CUT(columns, units, columns, 1)


@pytest.mark.exhaustive
def test_backward_of_segments(monkeypatch):
    cut_grid(monkeypatch, backward, WHOLE)
    PACKED.check("backward", *packed_arrays(5))


def test_backward_between_saved_states(monkeypatch):
    """Six chunks from one saved state to the next, in tiles of four, and then three."""
    cut_grid(monkeypatch, backward, WHOLE)
    Kernels(chunk=2, every=12).check("backward", without_optional(inputs_and_state(1, 17, 2, 2)))


def test_backward_in_parts(monkeypatch):
    """Three parts, the first of two chunks and the others of one."""
    cut_grid(
        monkeypatch, backward, lambda *sizes: tiles.ScanGrid(*sizes, whole=0, length=1, head=2)
    )
    Kernels(chunk=2, every=2).check("backward", without_optional(inputs_and_state(1, 7, 2, 2)))


def test_backward_grid(monkeypatch):
    """A GPU that holds eight blocks: columns that fill it stay whole, of six all begin at once."""
    monkeypatch.setattr(tiles, "num_sms", lambda: 4)
    grid = functools.partial(tiles.backward_grid, units=16)
    assert (grid(16).count, grid(16).rest) == (16, 0)
    assert (grid(6).count, grid(6).first, grid(6).of_carries("first").units) == (12, 12, 4)
    assert (grid(14).whole, grid(14).first) == (8, 12)
    assert (grid(2).parts, grid(2).first) == (4, 4)


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_uneven_parts(monkeypatch):
    """Columns of blocks halved, in parts and whole side by side.

    Tiles of four chunks, of which there are five, so that the last tile overlaps another.
    """
    monkeypatch.setattr(tiles, "num_sms", lambda: 3)
    cut = lambda columns, units: tiles.ScanGrid(columns, units, 1, length=1, head=units - 1)
    cut_grid(monkeypatch, backward, cut)
    halved, split = tiles.forward_grid(columns=4, chunks=5, halves=True), cut(2, 3)
    assert (halved.whole, halved.halved, halved.count) == (4, 1, 5)
    assert (split.whole, split.rest, split.parts, split.count) == (1, 1, 2, 3)
    states = 16 if check.ON_GPU else 4
    check_case(inputs_and_state(2, 40, 128, states), "mosaic", checkpoint_every=16)


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_subparts(monkeypatch):
    """Parts whose carries are found in subparts, the last of which is short."""
    cut = lambda columns, units: CUT(columns, units, 0, 2, 3)
    cut_grid(monkeypatch, forward, cut)
    cut_grid(monkeypatch, backward, cut)
    grid = cut(1, 11)
    assert (grid.length, grid.parts, grid.of_carries("last").count) == (6, 2, 3)
    # The backward's last subpart of two chunks has one.
    carries = grid.of_carries("first")
    assert (carries.units, carries.length, carries.parts) == (5, 2, 3)
    check_case(inputs_and_state(1, 88, 34, 9 if check.ON_GPU else 3), "mosaic")


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_product_after_it(implementation):
    """The output times a weight, which is as the two calls are, differentiated in both modes."""
    *arrays, _ = inputs(2, 40, 6, 3)
    weight = jnp.asarray(np.random.default_rng(5).normal(size=(6, 4)), jnp.float32)
    options = {"dt_softplus": True, "implementation": implementation}
    scan = functools.partial(jaxkern.selective_scan, **options)
    one = lambda w, *a: jnp.sin(scan(*a, out_weight=w))
    two = lambda w, *a: jnp.sin(jaxkern.linear(scan(*a), w, implementation=implementation))
    args = weight, *arrays
    for of in (
        lambda f: f(*args),
        lambda f: jax.grad(lambda *a: f(*a).sum(), range(len(args)))(*args),
        lambda f: jax.jvp(f, args, args)[1],
    ):
        check.assert_close(jax.jit(lambda of=of: of(one))(), of(two), 2e-6)
    with pytest.raises(ValueError, match=r"out_weight must have shape \(K, N\), K = 6"):
        scan(*arrays, out_weight=weight.T)


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


def forgetful(*size):
    """dt · A → −∞: a decay of exactly 0, with no NaN in any gradient."""
    x, dt, A, *others = inputs(*size)
    return x, dt.at[0, 4].set(80.0), A.at[:, 0].set(-1e6).at[0, 1].set(-1e30), *others


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
            "long memory",
            lambda *size: with_rates(1e-3, inputs(*size)),
            exhaustive=[(1, 1000, 8, 2)],
            compiled=[(2, 130, 128, 16)],
        ),
        *cases("forgetful", forgetful, xla=[ONE_PROGRAM]),
        *cases("growing", lambda *size: with_rates(-0.5, inputs(*size)), xla=[(1, 12, 2, 2)]),
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
    ("every", "limits"),
    [
        (8, (-2.5, 0.1)),
        *(pytest.param(every, (0.05, 0.6), marks=EXHAUSTIVE) for every in (1, 16, None)),
    ],
)
def test_selective_scan_reference_in_float64(every, limits):
    make = functools.partial(inputs_and_state, 2, 21, 6, 4, groups=2)
    options = {"segment_ids": packed_ids(2, 21), "checkpoint_every": every}
    check_reference(scan, oracle, make, limits, 1e-14, **options)


def test_selective_scan_saved_states():
    """The backward keeps ⌈L/k⌉ states besides the arguments."""
    x, dt, A, B, C, *_ = inputs(2, 21, 5, 3)
    args = (x[:, :, None], dt[:, :, None], A[None], B[:, :, None], C[:, :, None], *[None] * 6)
    for every, count in ((1, 21), (8, 3), (64, 1), (None, None)):
        for save in True, False:
            options = reference.SelectiveScanOptions(
                StepSizes(True, 0.0, INF), False, every, "auto", save=save
            )
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
    found = *zip(("out", "final"), results, strict=False), *zip(NAMES, grads, strict=False)
    return dict(found)


@pytest.mark.exhaustive
@RUNS
def test_selective_scan_bad_channel_stays_alone(implementation):
    """A NaN in one channel of one row leaves every other channel, row and earlier step alone."""
    want = run(implementation)
    for name in ("x", "dt", "z"):
        got = run(implementation, **{name: lambda v: v.at[1, 3, 2].set(np.nan)})
        check_others(got, want)
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
    if "dt" in got:
        slope = 1 / (1 + np.exp(-wide))
        np.testing.assert_allclose(got["dt"][0, 0, : raw.size], slope, rtol=2e-6)


@RUNS
def test_selective_scan_keeps_a_state(implementation):
    """To the last bit, over steps that underflow."""
    *_, state = inputs_and_state(*SIZE)
    dt = lambda v: jnp.full_like(v, -200.0)
    got = run(implementation, jnp.zeros(SIZE[:3]), state, dt=dt, dt_bias=jnp.zeros_like)
    for name in {"final", "initial_state"} & got.keys():
        np.testing.assert_array_equal(got[name], state)


# Calls


def test_selective_scan_of_too_many_states():
    """More states than the kernels hold: plain JAX unless the kernels were asked for."""
    arrays = inputs(1, 2, 2, MAX_STATES + 1)
    with pytest.raises(NotImplementedError, match=rf"A has {MAX_STATES + 1} states.*{MAX_STATES}"):
        scan(*arrays, implementation="mosaic")
    chosen, in_plain_jax = (scan(*arrays, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen, in_plain_jax)
    text = check.lowered(functools.partial(scan, implementation=None), *arrays)
    assert "selective_scan_fwd" not in text


# Kernels


@EXHAUSTIVE
@pytest.mark.parametrize(("dtype", "states"), [("bfloat16", 16), ("float16", 1), ("float32", 64)])
def test_selective_scan_lowers_for_cuda(dtype, states):
    """The kernels' layouts are accepted, with no GPU here."""
    *arrays, D, z, _ = inputs(2, 70, 130, states, dtype, weight_dtype="float32")
    of = {"segment_ids": packed_ids(2, 70)} if dtype == "float16" else {"z": z}
    scan = functools.partial(jaxkern.selective_scan, D=D, **of, implementation="mosaic")
    grad = jax.grad(lambda *a: scan(*a).astype(jnp.float32).sum(), range(5))
    text = check.lowered(grad, *arrays)
    assert "selective_scan_fwd" in text
    assert "selective_scan_bwd" in text


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
    every = op.CHUNK if implementation == "mosaic" else 1
    return both_results(scan, *arrays, implementation=implementation, checkpoint_every=every)


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
GROUPS = with_groups(
    SELECTIVE_SCAN,
    lambda: inputs_and_state(4, 5, 8, 2, groups=4),
    "bld bld dn blgn blgn d bld d bdn bl -> bld",
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
