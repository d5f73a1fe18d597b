"""Packed sequences in the ops that carry a state along time: each segment is a run of its own.

What a packed row must give is what the op gives for every segment alone, without segment ids:
outputs, final states and the gradients of everything, initial states too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.ops.linear_scan import op as linear_op
from jaxkern.ops.linear_scan.tiles import LinearScanOptions, LinearScanTiles
from jaxkern.ops.selective_scan import backward, forward
from jaxkern.ops.selective_scan import tiles as tiles_of
from tests import check, sequences
from tests.check import exhaustive
from tests.sequences import OPS

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
LONG_IDS = np.stack(
    [
        np.repeat([2, 0, -1, 9, 3], [20, 34, 70, 66, 10]),
        np.repeat([-1, 1, 1, 0, 1], [10, 30, 60, 1, 99]),
        np.repeat(IDS[2], [10] * 20 + [0]),
    ]
)
"""Segments longer than a chunk, with states and without, one after another."""

LONG = ("ssd", "gated_delta_rule", "KDA")
"""Ops of chunks, whose segments these are."""

kernels = functools.partial(pytest.param, marks=[pytest.mark.exhaustive, pytest.mark.gpu])


def ids_of(name):
    return LONG_IDS if name in LONG else IDS


def arrays_of(name, **sizes):
    """The op's arrays, with initial states of every segment."""
    of_all = {"b": BATCH, "l": ids_of(name).shape[1], "d": 8 if name in LONG else 5, "g": 4}
    return OPS[name].arrays(COUNT, **of_all | {"n": 3, "p": 2, "w": 3, "k": 2} | sizes)


def alone(op, ids, arrays):
    """Outputs, final states and gradients of every segment by itself, in float64."""
    *args, states = (np.asarray(v, np.float64) for v in arrays)
    dout, dfinals = cotangents(arrays)
    # Segments without a state have the one beyond the last, of zeros.
    states, dfinals = (np.concatenate([v, 0 * v[:, :1]], axis=1) for v in (states, dfinals))
    out, finals = np.zeros_like(args[0]), states.copy()
    grads, dstates = [np.zeros_like(v) for v in args], dfinals.copy()  # of states handed through
    for row, of_row in enumerate(ids):
        ends, seen = np.flatnonzero(np.diff(of_row)) + 1, set()
        spans = list(zip([0, *ends], [*ends, len(of_row)], strict=True))
        for first, stop in spans[::-1] if op.reverse else spans:
            at, number = (slice(row, row + 1), slice(first, stop)), of_row[first]
            own = at[0], number if 0 <= number < COUNT and number not in seen else COUNT
            seen.add(number)
            part = [v[at] if along else v for v, along in zip(args, op.along, strict=True)]
            results, (*dargs, dstates[own]) = op.oracle(*part, states[own], dout[at], dfinals[own])
            out[at], finals[own] = results
            for grad, d, along in zip(grads, dargs, op.along, strict=True):
                grad[at if along else ...] += d
    return (out, finals[:, :COUNT]), (*grads, dstates[:, :COUNT])


def cotangents(arrays):
    """Cotangents of the results, which are like the first and the last array."""
    like = arrays[0], arrays[-1]
    return tuple(np.random.default_rng(i).normal(size=v.shape) for i, v in enumerate(like))


def value_and_grads(f, arrays, **options):
    return check.value_and_grads(f, arrays, cotangents(arrays), **options)


@pytest.mark.parametrize(
    ("name", "implementation", "tiles"),
    [
        *(pytest.param(n, "mosaic", None, marks=pytest.mark.gpu) for n in OPS if "linear" in n),
        kernels("causal_conv1d", "mosaic", None),
        kernels("selective_scan", "mosaic", None),  # those of ssd take one state
        kernels("linear_scan", "mosaic", LinearScanTiles(2, parts=5)),
        kernels("linear_scan reverse", "mosaic", LinearScanTiles(4, parts=4)),
        *((name, None, None) for name in OPS if name not in LONG),
        *(exhaustive(name, None, None) for name in LONG),
        *(exhaustive(name, "xla", None) for name in OPS),
    ],
)
def test_segments_are_runs_of_their_own(name, implementation, tiles, monkeypatch):
    """NaN stays in one: others have the outputs, states and gradients, to the bit.

    Segments begin where `tiles` cut the sequence or in between. Where selective_scan is
    interpreted, it is cut in two: 16 tokens in pieces of 8, from one saved state to the next, of
    which the backward writes the states in between; and the rest, of which the last are padding.
    """
    op, arrays, ids = OPS[name], arrays_of(name), ids_of(name)
    options = {"num_segments": COUNT, "return_final_state": True, "implementation": implementation}
    if tiles is not None:
        monkeypatch.setattr(
            linear_op, "LinearScanOptions", functools.partial(LinearScanOptions, tiles=tiles)
        )
    if name == "selective_scan" and check.interpreted(implementation):
        cut = lambda columns, units, _=None: tiles_of.ScanGrid.cut(columns, units, 0, 2)
        monkeypatch.setattr(forward, "forward_grid", cut)
        monkeypatch.setattr(backward, "backward_grid", cut)
        options["checkpoint_every"] = 16
    call = functools.partial(op.call, **options)  # programs of its own, of these tiles

    def run(arrays):
        with check.running(implementation):
            return value_and_grads(call, arrays, segment_ids=jnp.asarray(ids))

    want, want_grads = run(arrays)
    check.assert_close((want, want_grads), alone(op, ids, arrays), 3e-6)

    number = 0 if name in LONG else 3
    others, time = ids[0] != number, int(np.flatnonzero(ids[0] == number)[-2])
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
    op, (*args, states) = OPS[name], arrays_of(name)
    how = {"rounding": 3e-6, "segment_ids": jnp.asarray(IDS)}
    sequences.check_case(op.call, op.oracle, (*args, states[:, 0]), implementation, **how)


@pytest.mark.parametrize(
    ("name", "ids"), [("linear_scan", None), ("linear_scan reverse", None), ("causal_conv1d", IDS)]
)
def test_specifications_in_float64(name, ids):
    """With gradients, far below fp32's rounding."""
    *args, states = arrays_of(name)
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(np.asarray(v, np.float64)) for v in (*args, states[:, 0]))
        options = {
            "return_final_state": True,
            "segment_ids": ids if ids is None else jnp.asarray(ids),
        }
        got = value_and_grads(OPS[name].call, arrays, **options)
    assert {v.dtype for v in jax.tree.leaves(got)} == {jnp.dtype("float64")}
    wide = map(np.asarray, (*arrays, *cotangents(arrays)))
    check.assert_close(got, OPS[name].oracle(*wide, segment_ids=ids), 1e-14)


# Meshes and calls


def packed_op(name):
    """The op of arrays and ids, whose one result depends on the output and the final states."""
    op = OPS[name]
    out, *_, state = op.axes.split()
    state = f"bs{state[1:]}"
    summed = tuple(i for i, axis in enumerate(state) if axis not in out)

    def call(*arrays, implementation="xla"):
        *arrays, ids = arrays
        options = {"segment_ids": ids, "num_segments": COUNT, "implementation": implementation}
        results, final = op.call(*arrays, return_final_state=True, **options)
        return results + jnp.sin(final).sum(summed)[:, None]

    return check.Op(
        name=f"{name}, packed",
        call=call,
        reference=call,
        arrays=lambda key: (*arrays_of(name, b=4, d=8, l=LENGTH), jnp.asarray(IDS[[0, 1, 2, 0]])),
        kernels=("", ""),
        axes=" ".join([*op.axes.split()[:-1], state, "bl", "->", out]),
        features="d",
        channels="dg",
        # GSPMD gathers the convolution's inputs where both are split.
        cells=[(("features" if name == "causal_conv1d" else "rows and channels") + " split", None)],
    )


test_segments_transformations = check.transformations(
    *(packed_op(name) for name in OPS if "reverse" not in name)
)


@pytest.mark.parametrize("name", OPS)
def test_segments_errors(name):
    *args, states = arrays_of(name, l=LENGTH)
    ids, one, call = jnp.asarray(IDS), states[:, 0], functools.partial(OPS[name].call, *args)
    for error, message, state, of_tokens, count in [
        (ValueError, "num_segments=4 needs segment_ids", states, None, COUNT),
        (ValueError, "num_segments must be from 1 to", None, ids, 0),
        (ValueError, "initial_state must have shape.*give num_segments", states, ids, None),
        (ValueError, "initial_state must have shape.*leave num_segments out", one, ids, COUNT),
        (ValueError, r"segment_ids must have shape \(3, 21\) = \(B, L\)", states, ids[0], COUNT),
        (TypeError, "segment_ids must have an integer dtype", states, ids * 1.0, COUNT),
    ]:
        with pytest.raises(error, match=message):
            call(state, segment_ids=of_tokens, num_segments=count)
    with pytest.raises(TypeError, match=r"num_segments must be an int.*got a traced array"):
        jax.jit(lambda n: call(None, num_segments=n, segment_ids=ids))(2)
