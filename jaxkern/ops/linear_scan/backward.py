"""The backward kernel and its launch.

A block runs every chunk up, from the saved state to those before each step, which it keeps in
shared memory, and down with their gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES
from jaxkern.ops.linear_scan.blocks import PART, Scan, entered_by_chunk, scan_of
from jaxkern.ops.linear_scan.carry import fold, launch_carry
from jaxkern.ops.linear_scan.reference import reference_bwd
from jaxkern.ops.linear_scan.tiles import Options
from jaxkern.ops.segments import with_zeros


def launch_bwd(
    options: Options,
    a: Any,
    b: Any,
    initial_state: Any,
    entered: Any,
    states: Any,
    dout: Any,
    dfinal: Any,
):
    """da and db (B, L, D), and the gradient of the initial states, fp32.

    `initial_state` is given where segments have their own, and `dfinal` where rows have one.
    """
    if a.size == 0:
        return reference_bwd(options, a, b, initial_state, entered, states, dout, dfinal)
    count = options.num_segments
    seen = None
    if count is not None:  # which segments a row has, (B, S)
        seen = jnp.any(entered[:, :, None] == jnp.arange(count), axis=1)
    initial = None if count is None or initial_state is None else with_zeros(initial_state)
    scan = scan_of(options, a, b, arrays=5, packed=entered is not None)
    entered = entered_by_chunk(scan, entered)
    carry = launch_carry(scan, "linear_scan_bwd_carry", a, dout, None, entered, transposed=True)
    lead = (scan.batch,) if count is None else (scan.batch, count)
    ins = {"a": a, "b": b, "before": states, "dout": dout, "initial": initial, "entered": entered}
    ins["dfinal"] = dfinal
    got = scan.launch(
        "linear_scan_bwd",
        _bwd_kernel,
        scan.parts,
        {**ins, **carry},
        {
            "da": jax.ShapeDtypeStruct(a.shape, a.dtype),
            "db": jax.ShapeDtypeStruct(b.shape, b.dtype),
            "dstate": jax.ShapeDtypeStruct((*lead, scan.dim), jnp.float32),
        },
        {"h": plgpu.SMEM((scan.steps, LANES), jnp.float32)},  # before every step
    )
    da, db, dstate = (got[name] for name in ("da", "db", "dstate"))
    if seen is not None:  # the kernel writes nothing for a segment that is absent
        dstate = jnp.where(seen[..., None], dstate, 0.0)
    return da, db, dstate


def _bwd_kernel(scan: Scan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)
    of_segments = len(refs.dstate.shape) == 3

    def steps(valid):
        def body(c, stage, passed):  # passed = a[t+1] · dh[t+1]
            start = scan.start(c)

            def up(row, h):
                h = scan.begun(scan.entered(smem, stage, row), refs.initial, h)
                smem.h[row] = h
                h = scan.load_copied(smem.a, stage, c, row) * h
                return h + scan.load_copied(smem.b, stage, c, row)

            def down(row, passed):
                dh = scan.load_copied(smem.dout, stage, c, row) + passed
                da = dh * scan.load(smem.h.at[row])
                scan.store(refs.db, dh.astype(refs.db.dtype), (batch, start + row, channels))
                scan.store(refs.da, da.astype(refs.da.dtype), (batch, start + row, channels))
                passed = scan.load_copied(smem.a, stage, c, row) * dh
                entered = scan.entered(smem, stage, row)
                if of_segments:

                    @pl.when((entered >= 0) & (entered < refs.dstate.shape[1]))
                    def _():
                        scan.store(refs.dstate, passed, (batch, entered, channels))

                return scan.begun(entered, None, passed)

            before = 1.0 * scan.load_copied(smem.before, stage, c)
            scan.loop(valid, up, before)
            return scan.loop(valid, down, passed, backwards=True)

        return body

    passed = scan.zeros()
    if refs.dfinal is not None:
        passed = passed + scan.load(refs.dfinal.at[batch, channels])
    if refs.product is not None:
        last = scan.parts - 2
        passed = fold(scan, refs, last + 1 - part, lambda i: last - i, passed)
    ranges = [(count, steps(scan.steps))]
    if scan.tail:
        ranges.insert(0, (count - whole, steps(scan.tail)))
    passed = scan.stream(refs, smem, lambda i: first + count - 1 - i, ranges, passed)
    if not of_segments:

        @pl.when(part == 0)
        def _():
            scan.store(refs.dstate, passed, (batch, channels))
