"""linear_scan where rows are shorter than a block's channels, or no multiple of 16 bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.mosaic import ring
from jaxkern.ops.linear_scan import op
from jaxkern.ops.linear_scan.tiles import Options, Tiles
from tests import test_linear_scan


@functools.cache
def value_and_gradients(options):
    @jax.jit
    def run(a, b, state, dout, entered):
        scan = lambda *args: op._linear_scan_jit(*args, entered, options)[0]
        out, vjp = jax.vjp(scan, a, b, state)
        return out, *vjp(dout)

    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_lanes_hold_what_is_copied(dtype):
    """Wherever a row begins, its elements fit; where every row is aligned, nothing is added."""
    unit = 16 // np.dtype(dtype).itemsize
    for dim in range(1, 300):
        width = min(dim, 128)
        row = ring.lanes_row(width, dim, dtype)
        starts = [ring.lanes_start(k * dim + c, dtype) for k in range(9) for c in (0, dim - width)]
        assert row % unit == 0
        assert max(starts) + width <= row < width + 2 * unit - 1
        assert (row == width) == (dim % unit == 0)


@pytest.mark.newest
@pytest.mark.parametrize(("dim", "by_lanes"), [(100, True), (129, True), (136, False)])
def test_lanes_copy_rows_that_the_tma_cannot(dim, by_lanes):
    a, b, state = test_linear_scan.inputs(1, 16, dim, "bfloat16")
    run = value_and_gradients(Options(False, "mosaic"))
    with jaxkern.lowering_for("h200"):
        traced = run.trace(a, b, state, b, None)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("cp.async.commit_group" in text) == by_lanes
    assert "stablehlo.pad" not in text


@pytest.mark.compiled
@pytest.mark.parametrize("dim", [1, 3, 64, 100, 127, 129, 1023])
@pytest.mark.parametrize(
    ("length", "dtypes", "segments", "reverse"),
    [
        (300, ("bfloat16", "bfloat16"), None, False),
        (300, ("float32", "float16"), None, True),
        (68, ("bfloat16", "float32"), 3, False),
        (4, ("float32", "float32"), 3, True),
    ],
    ids=str,
)
def test_linear_scan_copied_by_lanes(dim, length, dtypes, segments, reverse):
    """Rows that the TMA cannot copy give the bits that they give beside zeros, where it can.

    Chunks have 8 steps and the last one 4, all unrolled: a product is rounded before it is added to
    in the next iteration of a loop, and how the compiler cuts a loop follows from all of its code.
    """
    a, b, state = test_linear_scan.inputs(2, length, dim, *dtypes)
    dout = test_linear_scan.inputs(2, length, dim, *dtypes, seed=1)[1]
    entered = None
    if segments is not None:  # begin at step 2 with the state 1, and at step 40 with zeros
        state = jnp.stack([state, 2 * state, 3 * state], axis=1)
        entered = jnp.full((2, length), -1, jnp.int32).at[:, 2].set(1).at[:, 40:41].set(segments)
    options = Options(reverse, "mosaic", segments, Tiles(8, parts=3))
    run = value_and_gradients(options)
    more = -(-max(dim, 128) // 8) * 8 - dim
    wide = [jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, more)]) for v in (a, b, state, dout)]
    for got, want in zip(run(a, b, state, dout, entered), run(*wide, entered), strict=True):
        np.testing.assert_array_equal(got, want[..., :dim])
