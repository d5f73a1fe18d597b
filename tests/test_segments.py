"""Packed sequences in the ops that carry a state along time: each segment is a run of its own.

What a packed row must give is what the op gives for every segment alone, without segment ids:
outputs, final states and the gradients of everything, initial states too.
"""

import contextlib
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
from tests import check, selective_scan, ssd, test_causal_conv1d, test_linear_scan

pytestmark = pytest.mark.newest

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


@dataclasses.dataclass(frozen=True)
class Packable:
    """An op with segments.

    Attributes:
      call: the op, of its arrays (the initial states last) and keywords.
      arrays: for a length, channels and a dtype; the initial states are (B, S, ...).
      oracle: ``oracle(*arrays, dout, dfinal) -> (out, final), gradients`` of one sequence, float64.
      along: whether each array but the states is along time.
      kernels: whether there are some for segments.
    """

    call: Callable[..., Any]
    arrays: Callable[..., tuple[Any, ...]]
    oracle: Callable[..., Any]
    along: tuple[bool, ...]
    reverse: bool = False
    kernels: bool = True


def linear(a, b, states, **options):
    return jaxkern.linear_scan(a, b, initial_state=states, **options)


def linear_arrays(length=LENGTH, dim=5, dtype="float32"):
    rng = np.random.default_rng(0)
    a = rng.uniform(-1.0, 1.0, (BATCH, length, dim))
    b, states = rng.normal(size=a.shape), rng.normal(size=(BATCH, COUNT, dim))
    return tuple(jnp.asarray(v.astype(jnp.dtype(dtype))) for v in (a, b, states))


def linear_oracle(a, b, state, dout, dfinal, reverse=False):
    last = 0 if reverse else -1
    dout = dout.copy()
    dout[:, last] += dfinal
    out, grads = test_linear_scan.oracle(a, b, state, dout, reverse)
    return (out, out[:, last]), grads


def conv_arrays(length=LENGTH, dim=5, dtype="float32", width=4):
    rng = np.random.default_rng(0)
    shapes = (BATCH, length, dim), (dim, width), (dim,), (BATCH, COUNT, width - 1, dim)
    return tuple(jnp.asarray(rng.normal(size=v).astype(jnp.dtype(dtype))) for v in shapes)


def conv(x, weight, bias, states, **options):
    return jaxkern.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=states, **options
    )


def conv_oracle(x, weight, bias, state, dout, dfinal):
    out, (*grads, dstate) = test_causal_conv1d.oracle(x, weight, bias, state, dout, "silu")
    dinputs = np.concatenate([dstate, grads[0]], axis=1)
    dinputs[:, x.shape[1] :] += dfinal
    grads[0], dstate = dinputs[:, state.shape[1] :], dinputs[:, : state.shape[1]]
    final = np.concatenate([state, x], axis=1)[:, x.shape[1] :]
    return (out, final), (*grads, dstate)


def selective_arrays(length=LENGTH, dim=5, dtype="float32", states=3, batch=BATCH):
    *arrays, _ = selective_scan.inputs_and_state(batch, length, dim, states, dtype)
    own = np.random.default_rng(1).normal(size=(batch, COUNT, dim, states))
    return (*arrays, jnp.asarray(own.astype("float32")))


def selective(*arrays, dt_softplus=True, **options):
    *arrays, dt_bias, states = arrays
    return jaxkern.selective_scan(
        *arrays, dt_bias=dt_bias, initial_state=states, dt_softplus=dt_softplus, **options
    )


def ssd_arrays(length=LENGTH, dim=8, dtype="float32"):
    *arrays, _ = ssd.inputs_and_state(BATCH, length, dim, 2, 3, groups=dim // 2, dtype=dtype)
    own = np.random.default_rng(1).normal(size=(BATCH, COUNT, dim, 2, 3))
    return (*arrays, jnp.asarray(own.astype("float32")))


def of_heads(*arrays, **options):
    *arrays, dt_bias, states = arrays
    return jaxkern.ssd(*arrays, dt_bias=dt_bias, initial_state=states, dt_softplus=True, **options)


OPS = {
    "ssd": Packable(
        of_heads,
        ssd_arrays,
        ssd.oracle,
        (True, True, False, True, True, False, True, False),
        kernels=False,
    ),
    "selective_scan": Packable(
        selective,
        selective_arrays,
        selective_scan.oracle,
        (True, True, False, True, True, False, True, False),
    ),
    "causal_conv1d": Packable(conv, conv_arrays, conv_oracle, (True, False, False)),
    "linear_scan": Packable(linear, linear_arrays, linear_oracle, (True, True)),
    "linear_scan reverse": Packable(
        functools.partial(linear, reverse=True),
        linear_arrays,
        functools.partial(linear_oracle, reverse=True),
        (True, True),
        reverse=True,
    ),
}


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


def alone(op, ids, arrays, dfinal=1.0):
    """Outputs, final states and gradients of every segment by itself, in float64."""
    *args, states = (np.asarray(v, np.float64) for v in arrays)
    out, finals = np.zeros_like(args[0]), states.copy()
    dout, dfinals = cotangents(dfinal, out.shape, finals.shape)
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


def cotangents(dfinal, out, final):
    """Of an output and of final states, the latter times `dfinal`."""
    dout, dfinals = (np.random.default_rng(i).normal(size=v) for i, v in enumerate((out, final)))
    return dout, dfinal * dfinals


def value_and_grads(f, arrays, dfinal=1.0, **options):
    """Results of `f`, and the gradients for :func:`cotangents` of them."""
    like = jax.eval_shape(functools.partial(f, **options), *arrays)
    given = map(jnp.asarray, cotangents(dfinal, *(v.shape for v in like)))
    return check.value_and_grads(f, arrays, tuple(given), **options)


@contextlib.contextmanager
def running(op, implementation):
    """:func:`check.running`, where the op has such an implementation."""
    if implementation == "mosaic" and not op.kernels:
        pytest.skip("the kernels take no segments")
    with check.running(implementation):
        yield


def packed(name, implementation, arrays):
    """By one program for all tests of the op with a state for every segment."""
    options = {"num_segments": COUNT, "return_final_state": True, "implementation": implementation}
    return value_and_grads(OPS[name].call, arrays, segment_ids=jnp.asarray(IDS), **options)


EVERY = pytest.mark.parametrize("name", OPS)


@EVERY
@pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), None, "xla"]
)
def test_segments_are_runs_of_their_own(name, implementation):
    op = OPS[name]
    arrays = op.arrays()
    with running(op, implementation):
        got = packed(name, implementation, arrays)
    check.assert_close(got, alone(op, IDS, arrays), 3e-6)


@EVERY
@check.BOTH
def test_segments_of_one_state(name, implementation):
    """Without num_segments the initial state is the first segment's, and the final the last's."""
    op = OPS[name]
    options = {"return_final_state": True, "implementation": implementation}
    if name == "selective_scan":  # and what no other test of packed sequences has
        options |= {"dt_softplus": False, "checkpoint_every": 1}
        op = dataclasses.replace(
            op,
            oracle=functools.partial(op.oracle, dt_softplus=False),
            arrays=lambda: selective_scan.below_zero(*selective_arrays()),
        )
    *args, states = op.arrays()
    order = (lambda v: v[:, ::-1]) if op.reverse else (lambda v: v)
    rank = np.cumsum(np.diff(order(IDS), axis=1, prepend=order(IDS)[:, :1]) != 0, axis=1)
    ids = order(np.where(rank == 0, 0, np.where(rank == rank[:, -1:], 1, COUNT + rank)))
    states = states.at[:, 1:].set(0.0)
    given = (*args, states[:, 0])
    with running(op, implementation):
        (out, final), grads = value_and_grads(
            op.call, given, 0.0, segment_ids=jnp.asarray(IDS), **options
        )
    (want, finals), want_grads = alone(op, ids, (*args, states), dfinal=0.0)
    check.assert_close(out, want, 3e-6)
    check.assert_close(final, finals[np.arange(BATCH), np.minimum(rank[:, -1], 1)], 3e-6)
    check.assert_close(grads, (*want_grads[:-1], want_grads[-1][:, 0]), 3e-6)


@EVERY
@check.BOTH
def test_nan_stays_in_its_segment(name, implementation):
    """Outputs, final states and gradients of all other segments have the bits they had.

    In the interpreter, of one array; of the others it is plain JAX that shows it.
    """
    op = OPS[name]
    args = op.arrays()
    run = functools.partial(packed, name, implementation)
    row, others = 0, IDS[0] != 3
    with running(op, implementation):
        want, want_grads = run(args)
        for i, along in enumerate(op.along):
            if not along or (i and implementation == "mosaic" and not check.ON_GPU):
                continue
            bad = [v.at[row, 14].set(np.nan) if k == i else v for k, v in enumerate(args)]
            (out, final), grads = run(tuple(bad))
            assert np.isnan(out[row, 14]).any()
            assert i or np.isnan(final[row, 3]).any()
            same = [(out, want[0]), *zip(grads[:-1], want_grads[:-1], strict=True)]
            for got, before in [v for v, a in zip(same, (True, *op.along), strict=True) if a]:
                np.testing.assert_array_equal(got[row, others], before[row, others])
                np.testing.assert_array_equal(got[1:], before[1:])
            for got, before in ((final, want[1]), (grads[-1], want_grads[-1])):
                np.testing.assert_array_equal(got[row, :3], before[row, :3])
                np.testing.assert_array_equal(got[1:], before[1:])


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_selective_scan_segments_across_parts(monkeypatch):
    """Grid of 24 tokens in pieces of 8, states saved 16 tokens apart, where segments begin or not.

    The backward writes the states in between, and the last of them are padding.
    """
    cut = lambda columns, units, _: tiles_of.Grid.cut(columns, units, 0, 2)
    monkeypatch.setattr(forward, "forward_grid", cut)
    monkeypatch.setattr(backward, "backward_grid", cut)
    ids = np.repeat([[0, 2, 3, -1, 1]], [9, 15, 2, 5, 8], axis=1)
    op = OPS["selective_scan"]
    arrays = op.arrays(length=ids.shape[1], batch=1)
    options = {"return_final_state": True, "checkpoint_every": 16, "implementation": "mosaic"}
    options |= {"segment_ids": jnp.asarray(ids), "num_segments": COUNT}
    with check.running("mosaic"):
        got = value_and_grads(op.call, arrays, **options)
    check.assert_close(got, alone(op, ids, arrays), 3e-6)


@pytest.mark.parametrize(
    ("name", "cut", "ends"),
    [
        *(("causal_conv1d", cut, (LENGTH,)) for cut in (0, 2, LENGTH)),
        *(("causal_conv1d", cut, (10, LENGTH)) for cut in (7, 9, 11)),
        ("causal_conv1d", 7, (5, LENGTH)),
        *((name, 9, (LENGTH,)) for name in OPS if name != "causal_conv1d"),
    ],
)
@check.WHOLE
def test_two_runs_are_one(name, cut, ends, implementation):
    """The second from the state of the first; gradients included, and in the midst of a segment."""
    op = OPS[name]
    if implementation == "mosaic" and "linear" in name:
        cut, ends = 667, (2000,)
        op = dataclasses.replace(op, arrays=lambda: linear_arrays(2000, 256))
    *args, states = op.arrays()
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
    with running(op, implementation):
        check.assert_close(value_and_grads(halves, arrays), value_and_grads(whole, arrays), 1e-6)


def test_states_are_handed_from_chunk_to_chunk():
    """Sequences in a row, all cut in two: the final states of one call start the next one."""
    op = OPS["selective_scan"]
    *args, states = op.arrays()
    run = functools.partial(op.call, num_segments=COUNT, return_final_state=True)

    def part(states, *at):
        own = (v[at] if along else v for v, along in zip(args, op.along, strict=True))
        return run(*own, states, segment_ids=jnp.asarray(IDS)[at])

    rows = slice(None)
    whole, want = part(states, rows)
    first, between = part(states, rows, slice(0, 9))
    # What comes back after another id would begin anew in one call, but not in the next.
    second, final = part(between, rows, slice(9, None))
    check.assert_close(jnp.concatenate([first, second], 1)[:2], whole[:2], 1e-6)
    check.assert_close(final[:2], want[:2], 1e-6)


def test_a_padded_batch_is_packed_and_unpacked():
    """Prompts of unequal lengths: packed in a row, each has the state it has alone."""
    x, dt, A, B, C, D, z, dt_bias, states = selective_arrays()
    lengths = np.array([7, 21, 4])
    ids = np.repeat(np.arange(BATCH), lengths)[None]
    pack = lambda v: v[np.arange(LENGTH) < lengths[:, None]][None]
    out, final = selective(
        *(pack(x), pack(dt), A, pack(B), pack(C), D, pack(z), dt_bias, states[None, :, 0]),
        segment_ids=jnp.asarray(ids),
        num_segments=BATCH,
        return_final_state=True,
    )
    for row, (length, at) in enumerate(zip(lengths, np.cumsum(lengths) - lengths, strict=True)):
        one = lambda v: v[row : row + 1, :length]  # noqa: B023
        want, last = selective(
            *(one(x), one(dt), A, one(B), one(C), D, one(z), dt_bias, states[row, :1]),
            return_final_state=True,
        )
        check.assert_close(out[:, at : at + length], want, 1e-6)
        check.assert_close(final[:, row], last, 1e-6)


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
    # GSPMD gathers the convolution's inputs where both are split.
    split = "features split" if name == "causal_conv1d" else "rows and channels split"
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
        all_reduces=name != "linear_scan",
        cells=[("explicit mesh", None), (split, None), (split, "xla")],
    )


test_segments_transformations = check.transformations(*map(packed_op, AXES))


@EVERY
def test_segments_errors(name):
    op = OPS[name]
    *args, states = op.arrays()
    run = functools.partial(op.call, *args)
    ids = jnp.asarray(IDS)
    with pytest.raises(ValueError, match="num_segments=4 needs segment_ids"):
        run(states, num_segments=COUNT)
    with pytest.raises(ValueError, match="num_segments must be from 1 to"):
        run(None, num_segments=0, segment_ids=ids)
    with pytest.raises(TypeError, match=r"num_segments must be an int or None, got 2\.0"):
        run(None, num_segments=2.0, segment_ids=ids)
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
