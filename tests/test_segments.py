"""Packed sequences in the ops that carry a state along time: each segment is a run of its own.

What a packed row must give is what the op gives for every segment alone, without segment ids:
outputs, final states and the gradients of everything, initial states too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.core.dispatch import Mode
from jaxkern.ops import segments
from jaxkern.ops.linear_scan import op as linear_op
from jaxkern.ops.linear_scan.tiles import Options, Tiles
from jaxkern.ops.selective_scan import backward, forward
from jaxkern.ops.selective_scan import tiles as tiles_of
from tests import check, ssd, test_causal_conv1d, test_linear_scan

BATCH, LENGTH, COUNT = 3, 21, 4
CHANNELS = 8  # where they are split over devices

IDS = np.array(
    [
        # Ids need not be in order; segments of one token, and one that spans chunks; −1 is padding.
        [*[2] * 3, *[0] * 1, *[3] * 12, *[1] * 1, *[-1] * 4],
        # All of one segment; the others are absent.
        [1] * LENGTH,
        # An id beyond the last state's, side by side with one that comes back without a state.
        [*[9] * 5, *[0] * 8, *[2] * 1, *[0] * 7],
    ]
)
LONG_IDS = np.stack(
    [
        np.repeat([2, 0, -1, 9, 3], [20, 34, 70, 66, 10]),
        np.repeat([-1, 1, 1, 0, 1], [10, 30, 60, 1, 99]),
        np.repeat(IDS[2], [10] * 20 + [0]),
    ]
)
"""Of ssd: segments longer than its chunks, with states and without, one after another."""

exhaustive = pytest.mark.exhaustive


@dataclasses.dataclass(frozen=True, eq=False)
class Packable:
    """An op with segments.

    Attributes:
      call: the op, of its arrays (the initial states last) and keywords.
      arrays: for a length and channels; the initial states are (B, S, ...).
      oracle: ``oracle(*arrays, dout, dfinal) -> (out, final), gradients`` of one sequence, float64.
      along: whether each array but the states is along time.
      ids: (B, L), of segments with states.
    """

    call: Callable[..., Any]
    arrays: Callable[..., tuple[Any, ...]]
    oracle: Callable[..., Any]
    along: tuple[bool, ...]
    ids: Any
    reverse: bool = False


def of_shapes(*shapes):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=v), jnp.float32) for v in shapes)


def linear(a, b, states, **options):
    return jaxkern.linear_scan(a, b, initial_state=states, **options)


def linear_arrays(length=LENGTH, dim=5):
    a, b, states = of_shapes(*[(BATCH, length, dim)] * 2, (BATCH, COUNT, dim))
    return jnp.sin(a), b, states


def linear_oracle(a, b, state, dout, dfinal, reverse=False, **options):
    last = 0 if reverse else -1
    dout = dout.copy()
    dout[:, last] += dfinal
    out, grads = test_linear_scan.oracle(a, b, state, dout, reverse, **options)
    return (out, out[:, last]), grads


def conv_arrays(length=LENGTH, dim=5, width=3):
    return of_shapes((BATCH, length, dim), (dim, width), (dim,), (BATCH, COUNT, width - 1, dim))


def conv(x, weight, bias, states, **options):
    options |= {"activation": "silu", "initial_state": states}
    return jaxkern.causal_conv1d(x, weight, bias, **options)


def conv_oracle(*arrays):
    return test_causal_conv1d.oracle(*arrays[:-1], activation="silu", dfinal=arrays[-1])


def of_ssd(call):
    def run(*arrays, **options):
        *arrays, dt_bias, states = arrays
        options = {"dt_softplus": True, "dt_bias": dt_bias, "initial_state": states} | options
        return call(*arrays, **options)

    return run


def ssd_arrays(length=LENGTH, dim=8):
    x, dt, A, *rest, _ = ssd.inputs_and_state(BATCH, length, dim, 2, 3, groups=dim // 2)
    return x, dt, A / 32, *rest, *of_shapes((BATCH, COUNT, dim, 2, 3))  # a chunk is remembered


def selective_arrays(length=LENGTH, dim=5, states=3):
    x, dt, A, B, C, D, z, dt_bias, _ = ssd.inputs_and_state(BATCH, length, dim, 1, states)
    A = A[:, None] * jnp.linspace(0.5, 1.5, states)
    tokens = x[..., 0], dt, A, B[:, :, 0], C[:, :, 0], D, z[..., 0], dt_bias
    return *tokens, *of_shapes((BATCH, COUNT, dim, states))


def selective_oracle(x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal, **options):
    """ssd's, of heads of one channel with a rate for each state."""
    one, head = (lambda v: v[..., None]), (lambda v: v[:, :, None])
    given = one(x), dt, A, head(B), head(C), D, one(z), dt_bias, head(h), one(dout), head(dfinal)
    (out, final), (dx, ddt, dA, *weights, dD, dz, dbias, dh) = ssd.oracle(*given, **options)
    dB, dC, dh = (v[:, :, 0] for v in (*weights, dh))
    return (out[..., 0], final[:, :, 0]), (dx[..., 0], ddt, dA, dB, dC, dD, dz[..., 0], dbias, dh)


OF_SSD = (True, True, False, True, True, False, True, False)
OPS = {
    "ssd": Packable(of_ssd(jaxkern.ssd), ssd_arrays, ssd.oracle, OF_SSD, LONG_IDS),
    "selective_scan": Packable(
        of_ssd(jaxkern.selective_scan), selective_arrays, selective_oracle, OF_SSD, IDS
    ),
    "causal_conv1d": Packable(conv, conv_arrays, conv_oracle, (True, False, False), IDS),
    "linear_scan": Packable(linear, linear_arrays, linear_oracle, (True, True), IDS),
}
OPS["linear_scan reverse"] = dataclasses.replace(
    OPS["linear_scan"],
    call=functools.partial(linear, reverse=True),
    oracle=functools.partial(linear_oracle, reverse=True),
    reverse=True,
)


def runs(ids, reverse=False):
    """(row, id, first, stop, whether it has a state) of every segment, in the order of time."""
    found = []
    for row, of_row in enumerate(np.asarray(ids)):
        ends = np.flatnonzero(np.diff(of_row)) + 1
        spans = list(zip([0, *ends], [*ends, len(of_row)], strict=True))
        seen = set()
        for first, stop in spans[::-1] if reverse else spans:
            number = int(of_row[first])
            found.append((row, number, first, stop, number not in seen and 0 <= number < COUNT))
            seen.add(number)
    return found


def alone(op, ids, arrays):
    """Outputs, final states and gradients of every segment by itself, in float64."""
    *args, states = (np.asarray(v, np.float64) for v in arrays)
    out, finals = np.zeros_like(args[0]), states.copy()
    dout, dfinals = cotangents(arrays)
    grads, dstates = [np.zeros_like(v) for v in args], dfinals.copy()  # of states handed through
    for row, number, first, stop, has_state in runs(ids, op.reverse):
        at = slice(row, row + 1), slice(first, stop)
        part = [v[at] if along else v for v, along in zip(args, op.along, strict=True)]
        state, dlast = np.zeros_like(states[:1, 0]), np.zeros_like(states[:1, 0])
        if has_state:
            state, dlast = states[row, number][None], dfinals[row, number][None]
        (out[at], final), (*dargs, dstate) = op.oracle(*part, state, dout[at], dlast)
        for grad, d, along in zip(grads, dargs, op.along, strict=True):
            grad[at if along else ...] += d
        if has_state:
            finals[row, number], dstates[row, number] = final[0], dstate[0]
    return (out, finals), (*grads, dstates)


def cotangents(arrays):
    """Of the results, which are like the first and the last array."""
    like = arrays[0], arrays[-1]
    return tuple(np.random.default_rng(i).normal(size=v.shape) for i, v in enumerate(like))


def value_and_grads(f, arrays, **options):
    return check.value_and_grads(f, arrays, cotangents(arrays), **options)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, i, marks=[*marks, *([pytest.mark.gpu] if i == "mosaic" else [])])
        for i, by_default in [
            ("mosaic", ["linear_scan", "linear_scan reverse"]),
            (None, [name for name in OPS if name not in ("selective_scan", "ssd")]),
            ("xla", []),
        ]
        for name in OPS
        if (name, i) != ("ssd", "mosaic")  # whose kernels take one state
        for marks in [[] if name in by_default else [exhaustive]]
    ],
)
def test_segments_are_runs_of_their_own(name, implementation, monkeypatch):
    """And NaN stays in one: others have the outputs, states and gradients, to the bit.

    Where selective_scan is interpreted, its sequence is cut in two: 16 tokens in pieces of 8, from
    one saved state to the next, of which the backward writes the states in between; and the rest,
    of which the last are padding.
    """
    op, options = OPS[name], {}
    if name == "selective_scan" and check.interpreted(implementation):
        cut = lambda columns, units, _: tiles_of.Grid.cut(columns, units, 0, 2)
        monkeypatch.setattr(forward, "forward_grid", cut)
        monkeypatch.setattr(backward, "backward_grid", cut)
        options["checkpoint_every"] = 16
    arrays, ids = op.arrays(length=op.ids.shape[1]), jnp.asarray(op.ids)
    options |= {"num_segments": COUNT, "return_final_state": True, "implementation": implementation}

    def run(arrays):
        with check.running(implementation):
            return value_and_grads(op.call, arrays, segment_ids=ids, **options)

    want, want_grads = run(arrays)
    check.assert_close((want, want_grads), alone(op, op.ids, arrays), 3e-6)

    number = 0 if name == "ssd" else 3
    others, time = op.ids[0] != number, int(np.flatnonzero(op.ids[0] == number)[-2])
    for i, along in enumerate(op.along):
        if not along or (i and check.interpreted(implementation)):
            continue
        bad = [np.array(v) for v in arrays]
        bad[i][0, time] = np.nan
        (out, final), grads = run(tuple(bad))
        assert np.isnan(out[0, time]).any()
        assert i or np.isnan(final[0, number]).any()
        same = [(out, want[0]), *zip(grads[:-1], want_grads[:-1], strict=True)]
        for got, before in [v for v, a in zip(same, (True, *op.along), strict=True) if a]:
            np.testing.assert_array_equal(got[0, others], before[0, others])
            np.testing.assert_array_equal(got[1:], before[1:])
        for got, before in ((final, want[1]), (grads[-1], want_grads[-1])):
            np.testing.assert_array_equal(*(np.delete(v[0], number, 0) for v in (got, before)))
            np.testing.assert_array_equal(got[1:], before[1:])


@pytest.mark.parametrize("name", ["linear_scan", "linear_scan reverse"])
@check.BOTH
def test_linear_scan_segments_of_one_state(name, implementation):
    """Without num_segments the initial state is the first segment's, and the final the last's."""
    op = OPS[name]
    a, b, states = op.arrays()
    arrays = a, b, states[:, 0]
    options = {"return_final_state": True, "implementation": implementation}
    with check.running(implementation):
        got = value_and_grads(op.call, arrays, segment_ids=jnp.asarray(IDS), **options)
    want = check.in_float64(op.oracle, *arrays, *cotangents(arrays), segment_ids=IDS)
    check.assert_close(got, want, 3e-6)


@pytest.mark.gpu
@exhaustive
@pytest.mark.parametrize(("cut", "reverse"), [((2, 5), False), ((4, 4), True)])
def test_linear_scan_segments_across_parts(cut, reverse):
    """However the sequence is cut into chunks and parts, where segments begin or in between."""
    op = OPS["linear_scan reverse" if reverse else "linear_scan"]
    mode: Mode = "mosaic" if check.ON_GPU else "interpret"
    options = Options(reverse, mode, COUNT, Tiles(cut[0], parts=cut[1]))
    order = (lambda v: jnp.flip(v, 1)) if reverse else (lambda v: v)
    ids = order(jnp.asarray(IDS))
    entered = order(segments.entered(ids, COUNT))

    def run(a, b, states):
        out, _ = linear_op._linear_scan_jit(a, b, states, entered, options)
        return out, linear_op._final_states(options, COUNT, out, states, ids)

    arrays = op.arrays()
    check.assert_close(value_and_grads(run, arrays), alone(op, IDS, arrays), 3e-6)


def two_runs(name, *cases, mark=()):
    return [pytest.param(name, cut, ends, marks=mark) for cut, ends in cases]


@pytest.mark.parametrize(
    ("name", "cut", "ends"),
    [
        *two_runs("causal_conv1d", (1, (LENGTH,)), (9, (10, LENGTH)), (11, (10, LENGTH))),
        *two_runs("causal_conv1d", (0, (LENGTH,)), (LENGTH, (LENGTH,)), mark=exhaustive),
        *two_runs("causal_conv1d", (7, (5, LENGTH)), (7, (10, LENGTH)), mark=exhaustive),
        *(two_runs(name, (9, (LENGTH,)), mark=exhaustive)[0] for name in OPS if "scan" in name),
    ],
)
@check.WHOLE
def test_two_runs_are_one(name, cut, ends, implementation):
    """The second from the state of the first; gradients included, and in the midst of a segment."""
    op, arrays = OPS[name], OPS[name].arrays()
    if implementation == "mosaic" and "linear" in name:
        cut, ends, arrays = 667, (2000,), linear_arrays(2000, 256)
    *args, states = arrays
    ids = jnp.asarray([np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))] * BATCH)
    call = functools.partial(op.call, return_final_state=True, implementation=implementation)
    whole = functools.partial(call, segment_ids=ids if len(ends) > 1 else None)

    def halves(*arrays):
        *args, state = arrays
        outs, spans = [], [slice(0, cut), slice(cut, None)]
        for span in spans[::-1] if op.reverse else spans:
            own = (v[:, span] if a else v for v, a in zip(args, op.along, strict=True))
            of = None if len(ends) == 1 else ids[:, span]
            out, state = call(*own, state, segment_ids=of)
            outs.append(out)
        return jnp.concatenate(outs[::-1] if op.reverse else outs, axis=1), state

    arrays = (*args, states[:, 0])
    with check.running(implementation):
        check.assert_close(value_and_grads(halves, arrays), value_and_grads(whole, arrays), 1e-6)


def test_states_are_handed_from_chunk_to_chunk():
    """Sequences in a row, all cut in two: the final states of one call start the next one."""
    op = OPS["selective_scan"]
    *args, states = op.arrays()

    run = functools.partial(op.call, num_segments=COUNT, return_final_state=True)

    @jax.jit
    def parts(states):
        outs = []
        for span in slice(0, 9), slice(9, None):
            own = (v[:, span] if along else v for v, along in zip(args, op.along, strict=True))
            out, states = run(*own, states, segment_ids=jnp.asarray(IDS[:, span]))
            outs.append(out)
        return jnp.concatenate(outs, axis=1), states

    # What comes back after another id would begin anew in one call, but not in the next.
    out, final = parts(states)
    (want, finals), _ = alone(op, IDS, (*args, states))
    check.assert_close(out[:2], want[:2], 1e-6)
    check.assert_close(final[:2], finals[:2], 1e-6)


# Meshes and calls

AXES = {  # and those over which final states are summed to (B, D)
    "ssd": ("blhp blh h blgn blgn h blhp h bshpn bl -> blhp", (1, 4)),
    "selective_scan": ("bld bld dn bln bln d bld d bsdn bl -> bld", (1, 3)),
    "causal_conv1d": ("bld dw d bswd bl -> bld", (1, 2)),
    "linear_scan": ("bld bld bsd bl -> bld", (1,)),
}


def packed_op(name):
    """The op of arrays and ids, whose one result depends on the output and the final states."""
    axes, summed = AXES[name]
    four = lambda v: jnp.concatenate([v, v[:1]]) if v.shape[0] == BATCH else v

    def call(*arrays, implementation="xla"):
        *arrays, ids = arrays
        out, final = OPS[name].call(
            *arrays,
            segment_ids=ids,
            num_segments=COUNT,
            return_final_state=True,
            implementation=implementation,
        )
        return out + jnp.sin(final).sum(summed)[:, None]

    return check.Op(
        name=f"{name}, packed",
        call=call,
        reference=call,
        arrays=lambda key: tuple(map(four, (*OPS[name].arrays(dim=CHANNELS), jnp.asarray(IDS)))),
        kernels=("", ""),
        axes=axes,
        features="d",
        channels="hg" if name == "ssd" else "d",
        # GSPMD gathers the convolution's inputs where both are split.
        cells=[(("features" if name == "causal_conv1d" else "rows and channels") + " split", None)],
    )


test_segments_transformations = check.transformations(*map(packed_op, AXES))


@pytest.mark.parametrize("name", OPS)
def test_segments_errors(name):
    op = OPS[name]
    *args, states = op.arrays()
    run = functools.partial(op.call, *args)
    ids = jnp.asarray(IDS)
    with pytest.raises(ValueError, match="num_segments=4 needs segment_ids"):
        run(states, num_segments=COUNT)
    with pytest.raises(ValueError, match="num_segments must be from 1 to"):
        run(None, num_segments=0, segment_ids=ids)
    with pytest.raises(TypeError, match=r"num_segments must be an int.*got a traced array"):
        jax.jit(lambda n: run(None, num_segments=n, segment_ids=ids))(2)
    with pytest.raises(ValueError, match=r"initial_state must have shape.*give num_segments"):
        run(states, segment_ids=ids)
    with pytest.raises(ValueError, match=r"initial_state must have shape.*leave num_segments out"):
        run(states[:, 0], segment_ids=ids, num_segments=COUNT)
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(3, 21\) = \(B, L\)"):
        run(states, segment_ids=ids[0], num_segments=COUNT)
    with pytest.raises(TypeError, match="segment_ids must have an integer dtype"):
        run(states, segment_ids=ids * 1.0, num_segments=COUNT)
