"""The forward and the backward kernel, and how they are launched."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES, launch_kernel
from jaxkern.ops.linear_scan.blocks import (
    BLOCK,
    PART,
    by_name,
    entered_by_chunk,
    fold,
    launch_carry,
    padded,
    present,
    scan_of,
    scratch_of,
    stream,
)
from jaxkern.ops.linear_scan.reference import reference_bwd, reference_fwd
from jaxkern.ops.linear_scan.tiling import Options
from jaxkern.ops.segments import with_zeros

# Forward


def launch_fwd(options: Options, a: Any, b: Any, initial_state: Any, entered: Any):
    """h (B, L, D), and to save the state before every chunk, (B, C, D), fp32."""
    if a.size == 0:
        return reference_fwd(options, a, b, initial_state, entered)
    batch, _, dim = a.shape
    a, b, initial = padded(a, b, initial_state)
    own = _own_states(options, initial)
    scan = scan_of(options, a, b, arrays=3, packed=entered is not None)
    entered = entered_by_chunk(scan, entered)
    handed = ()
    if scan.parts > 1:
        name = "linear_scan_fwd_carry"
        handed = launch_carry(scan, name, a, b, own, entered, transposed=False)
    start = initial if options.num_segments is None else None
    out_type = [jax.ShapeDtypeStruct(b.shape, b.dtype)]
    if options.save:
        out_type.append(jax.ShapeDtypeStruct((batch, scan.chunks, scan.dim), jnp.float32))
    given, names = present(a=a, b=b, start=start, initial=own, entered=entered)
    names = (*names, *_HANDED[: len(handed)], *("out", "states")[: len(out_type)])
    out, *states = launch_kernel(
        functools.partial(_fwd_kernel, scan, names),
        out_type=tuple(out_type),
        scratch_types=scratch_of(scan, a=a, b=b, entered=entered),
        grid=(scan.parts, batch * scan.columns),
        grid_names=(PART, BLOCK),
        kernel_name="linear_scan_fwd",
    )(*given, *handed)
    return out[..., :dim], states[0][..., :dim] if options.save else None


_HANDED = "handed_product", "handed_state"


def _own_states(options: Options, initial: Any) -> Any:
    """The initial states of segments, and one of zeros; None where there are none."""
    if options.num_segments is None or initial is None:
        return None
    return with_zeros(initial)


def _fwd_kernel(scan, names, *refs, **scratch):
    smem, refs = types.SimpleNamespace(**scratch), by_name(names, refs)
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)

    def steps(valid):
        def body(c, slot, h):
            if refs.states is not None:
                refs.states[batch, c, channels] = h
            start = scan.start(c)

            def step(row, h):
                h = scan.begun(scan.entered(smem, slot, row), refs.initial, h)
                h = scan.load(smem.a.at[slot, row]) * h + scan.load(smem.b.at[slot, row])
                refs.out[batch, start + row, channels] = h.astype(refs.out.dtype)
                return h

            return scan.loop(valid, step, h)

        return body

    h = scan.zeros()
    if refs.start is not None:
        h = h + scan.load(refs.start.at[batch, channels])
    if refs.handed_product is not None:
        h = fold(scan, (refs.handed_product, refs.handed_state), part, lambda i: i, h)
    ranges = [(whole, steps(scan.steps))]
    if scan.tail:
        ranges.append((count, steps(scan.tail)))
    copied = {"a": refs.a, "b": refs.b, "entered": refs.entered}
    stream(scan, smem, copied, lambda i: first + i, ranges, h)


# Backward


def launch_bwd(
    options: Options, a: Any, b: Any, initial_state: Any, entered: Any, states: Any, dout: Any
):
    """da and db (B, L, D), and the gradient of the initial states, fp32.

    `initial_state` is given where segments have their own.
    """
    if a.size == 0:
        return reference_bwd(options, a, b, initial_state, entered, states, dout)
    (batch, _, dim), count = a.shape, options.num_segments
    a, b, initial, states, dout = padded(a, b, initial_state, states, dout)
    own = _own_states(options, initial)
    lead = (batch,) if count is None else (batch, count)
    seen = None if count is None else _seen(entered, count)
    scan = scan_of(options, a, b, arrays=5, packed=entered is not None)
    entered = entered_by_chunk(scan, entered)
    handed = ()
    if scan.parts > 1:
        name = "linear_scan_bwd_carry"
        handed = launch_carry(scan, name, a, dout, None, entered, transposed=True)
    given, names = present(a=a, b=b, states=states, dout=dout, initial=own, entered=entered)
    names = (*names, *_HANDED[: len(handed)], "da", "db", "dstate")
    da, db, dstate = launch_kernel(
        functools.partial(_bwd_kernel, scan, names),
        out_type=(
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(b.shape, b.dtype),
            jax.ShapeDtypeStruct((*lead, scan.dim), jnp.float32),
        ),
        scratch_types={
            **scratch_of(scan, a=a, b=b, dout=dout, before=states, entered=entered),
            "h": plgpu.SMEM((scan.steps, LANES), jnp.float32),  # before every step
        },
        grid=(scan.parts, batch * scan.columns),
        grid_names=(PART, BLOCK),
        kernel_name="linear_scan_bwd",
    )(*given, *handed)
    dstate = dstate[..., :dim]
    if seen is not None:  # the kernel writes nothing for a segment that is absent
        dstate = jnp.where(seen[..., None], dstate, 0.0)
    return da[..., :dim], db[..., :dim], dstate


def _seen(entered: jax.Array, count: int) -> jax.Array:
    """Which segments a row has, (B, S)."""
    return jnp.any(entered[:, :, None] == jnp.arange(count), axis=1)


def _bwd_kernel(scan, names, *refs, **scratch):
    smem, refs = types.SimpleNamespace(**scratch), by_name(names, refs)
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)
    of_segments = len(refs.dstate.shape) == 3

    def steps(valid):
        def body(c, slot, passed):  # passed = a[t+1] · dh[t+1]
            start = scan.start(c)

            def up(row, h):
                h = scan.begun(scan.entered(smem, slot, row), refs.initial, h)
                smem.h[row] = h
                return scan.load(smem.a.at[slot, row]) * h + scan.load(smem.b.at[slot, row])

            def down(row, passed):
                dh = scan.load(smem.dout.at[slot, row]) + passed
                da = dh * scan.load(smem.h.at[row])
                refs.db[batch, start + row, channels] = dh.astype(refs.db.dtype)
                refs.da[batch, start + row, channels] = da.astype(refs.da.dtype)
                passed = scan.load(smem.a.at[slot, row]) * dh
                entered = scan.entered(smem, slot, row)
                if of_segments:

                    @pl.when((entered >= 0) & (entered < refs.dstate.shape[1]))
                    def _():
                        refs.dstate[batch, entered, channels] = passed

                return scan.begun(entered, None, passed)

            before = 1.0 * scan.load(smem.before.at[slot])
            scan.loop(valid, up, before)
            return scan.loop(valid, down, passed, backwards=True)

        return body

    passed = scan.zeros()
    if refs.handed_product is not None:
        last = scan.parts - 2
        handed = refs.handed_product, refs.handed_state
        passed = fold(scan, handed, last + 1 - part, lambda i: last - i, passed)
    ranges = [(count, steps(scan.steps))]
    if scan.tail:
        ranges.insert(0, (count - whole, steps(scan.tail)))
    copied = {
        "a": refs.a,
        "b": refs.b,
        "dout": refs.dout,
        "before": refs.states,
        "entered": refs.entered,
    }
    passed = stream(scan, smem, copied, lambda i: first + count - 1 - i, ranges, passed)
    if not of_segments:

        @pl.when(part == 0)
        def _():
            refs.dstate[batch, channels] = passed
