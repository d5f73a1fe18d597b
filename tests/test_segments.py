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
from jaxkern.ops.linear_scan import api, tiling
from tests import check, test_linear_scan

BATCH, LENGTH, COUNT = 3, 21, 4

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
    """

    call: Callable[..., Any]
    arrays: Callable[..., tuple[Any, ...]]
    oracle: Callable[..., Any]
    along: tuple[bool, ...]
    reverse: bool = False


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


OPS = {
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


def value_and_grads(f, dfinal=1.0):
    """``run(*arrays)``: results of `f`, and the gradients for :func:`cotangents` of them."""

    @jax.jit
    def run(*arrays):
        results, vjp = jax.vjp(f, *arrays)
        given = cotangents(dfinal, *(v.shape for v in results))
        return results, vjp(
            tuple(jnp.asarray(d, v.dtype) for d, v in zip(given, results, strict=True))
        )

    return run


@functools.cache
def packed(name, implementation):
    """``run(*arrays)`` of the op with a state for every segment, compiled once."""

    def call(*arrays):
        return OPS[name].call(
            *arrays,
            segment_ids=jnp.asarray(IDS),
            num_segments=COUNT,
            return_final_state=True,
            implementation=implementation,
        )

    return value_and_grads(call)


EVERY = pytest.mark.parametrize("name", OPS)
BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), None, "xla"]
)


@EVERY
@BOTH
def test_segments_are_runs_of_their_own(name, implementation):
    op = OPS[name]
    arrays = op.arrays()
    with check.running(implementation):
        got = packed(name, implementation)(*arrays)
    check.assert_close(got, alone(op, IDS, arrays), 3e-6)


@EVERY
@BOTH
def test_segments_of_one_state(name, implementation):
    """Without num_segments the initial state is the first segment's, and the final the last's."""
    op = OPS[name]
    *args, states = op.arrays()
    order = (lambda v: v[:, ::-1]) if op.reverse else (lambda v: v)
    rank = np.cumsum(np.diff(order(IDS), axis=1, prepend=order(IDS)[:, :1]) != 0, axis=1)
    ids = order(np.where(rank == 0, 0, np.where(rank == rank[:, -1:], 1, COUNT + rank)))
    states = states.at[:, 1:].set(0.0)

    def run(*arrays):
        return op.call(
            *arrays,
            segment_ids=jnp.asarray(IDS),
            return_final_state=True,
            implementation=implementation,
        )

    with check.running(implementation):
        (out, final), grads = value_and_grads(run, dfinal=0.0)(*args, states[:, 0])
    (want, finals), want_grads = alone(op, ids, (*args, states), dfinal=0.0)
    check.assert_close(out, want, 3e-6)
    check.assert_close(final, finals[np.arange(BATCH), np.minimum(rank[:, -1], 1)], 3e-6)
    check.assert_close(grads, (*want_grads[:-1], want_grads[-1][:, 0]), 3e-6)


@EVERY
@BOTH
def test_nan_stays_in_its_segment(name, implementation):
    """Outputs, final states and gradients of all other segments have the bits they had."""
    op = OPS[name]
    args = op.arrays()
    run = packed(name, implementation)
    row, others = 0, IDS[0] != 3
    with check.running(implementation):
        want, want_grads = run(*args)
        for i, along in enumerate(op.along):
            if not along:
                continue
            bad = [v.at[row, 9].set(np.nan) if k == i else v for k, v in enumerate(args)]
            (out, final), grads = run(*bad)
            assert np.isnan(out[row, 9]).any()
            assert np.isnan(final[row, 3]).any()
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
    options = tiling.Options(reverse, mode, COUNT, tiling.Tiles(cut[0], parts=cut[1]))
    order = (lambda v: jnp.flip(v, 1)) if reverse else (lambda v: v)
    ids = order(jnp.asarray(IDS))
    entered = order(segments.entered(ids, COUNT))

    def run(a, b, states):
        out = api._linear_scan_jit(a, b, states, entered, options)
        return out, api._final_state(options, out, states, ids)

    arrays = op.arrays()
    check.assert_close(value_and_grads(run)(*arrays), alone(op, IDS, arrays), 3e-6)
