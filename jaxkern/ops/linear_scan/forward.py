"""The forward kernel and its launch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops.linear_scan.blocks import PART, Scan, entered_by_chunk, scan_of
from jaxkern.ops.linear_scan.carry import fold, launch_carry
from jaxkern.ops.linear_scan.reference import last_state, reference_fwd
from jaxkern.ops.linear_scan.tiles import Options
from jaxkern.ops.segments import with_zeros


def launch_fwd(options: Options, a: Any, b: Any, initial_state: Any, entered: Any):
    """h (B, L, D), its last state, and to save the state before every chunk, (B, C, D), fp32."""
    if a.size == 0:
        return reference_fwd(options, a, b, initial_state, entered)
    start, initial = initial_state, None
    if options.num_segments is not None:  # states of segments, and one of zeros: (B, S + 1, D)
        start, initial = None, None if start is None else with_zeros(start)
    scan = scan_of(options, a, b, arrays=3, packed=entered is not None)
    entered = entered_by_chunk(scan, entered)
    carry = launch_carry(scan, "linear_scan_fwd_carry", a, b, initial, entered, transposed=False)
    states = jax.ShapeDtypeStruct((scan.batch, scan.chunks, scan.dim), jnp.float32)
    got = scan.launch(
        "linear_scan_fwd",
        _fwd_kernel,
        scan.parts,
        {"a": a, "b": b, "start": start, "initial": initial, "entered": entered, **carry},
        {
            "out": jax.ShapeDtypeStruct(b.shape, b.dtype),
            "states": states if options.save else None,
        },
    )
    out = got["out"]
    return out, last_state(options, out, initial_state), got["states"]


def _fwd_kernel(scan: Scan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)

    def steps(valid):
        def body(c, stage, h):
            if refs.states is not None:
                scan.store(refs.states, h, (batch, c, channels))
            start = scan.start(c)

            def step(row, h):
                h = scan.begun(scan.entered(smem, stage, row), refs.initial, h)
                h = scan.load_copied(smem.a, stage, c, row) * h
                h = h + scan.load_copied(smem.b, stage, c, row)
                scan.store(refs.out, h.astype(refs.out.dtype), (batch, start + row, channels))
                return h

            return scan.loop(valid, step, h)

        return body

    h = scan.zeros()
    if refs.start is not None:
        h = h + scan.load(refs.start.at[batch, channels])
    if refs.product is not None:
        h = fold(scan, refs, part, lambda i: i, h)
    ranges = [(whole, steps(scan.steps))]
    if scan.tail:
        ranges.append((count, steps(scan.tail)))
    scan.stream(refs, smem, lambda i: first + i, ranges, h)
