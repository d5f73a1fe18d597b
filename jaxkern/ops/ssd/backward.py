"""The backward of the SSD scan: two carries, and between them the gradients of each chunk.

The states before chunks, which the forward saved or the carry finds, and the gradients of those
after, which the reverse carry finds, make chunks independent (:mod:`jaxkern.ops.ssd.gradients`).
A gate is undone before the kernels, from the y that the forward saved, or that it finds once more.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.ops.ssd.call import (
    Arrays,
    added,
    cut_decays,
    joined,
    of_range,
    state_ranges,
    unless_finite,
    where_segments_begin,
)
from jaxkern.ops.ssd.carry import launch_carry, part_starts
from jaxkern.ops.ssd.forward import launch_fwd
from jaxkern.ops.ssd.gradients import launch_grads
from jaxkern.ops.ssd.reference import Options, reference_bwd
from jaxkern.ops.ssd.steps import HEADS, chunk_sum_grads
from jaxkern.ops.ssd.tiles import CHUNK, SAVING_WARPGROUPS, Chunks, Scan


def launch_bwd(
    options: Options, x, dt, a, B, C, D, z, initial_state, rank, crossed, states, y, dout, dfinal
) -> tuple[Any, ...]:
    """The gradients of the arguments before `states`; but for those of x and z in fp32."""
    args = x, dt, a, B, C, D, z, initial_state
    rest = states, y, dout, dfinal
    if x.size == 0:
        return reference_bwd(options, *args, rank, crossed, *rest)
    if rank is None:
        grads, _ = _launch(options, *args, *rest)
    else:
        grads, dinitial = _launch(options, *args[:2], cut_decays(a, rank), *args[3:], *rest)
        ds, da = grads[1], where_segments_begin(rank, 0.0, grads[2])
        grads = *grads[:2], da, *grads[3:]
        if options.isolate_nan:
            plain = functools.partial(reference_bwd, options)
            grads = unless_finite([ds, da, dinitial], grads, plain, (*args, rank, None, *rest))
    dx, ds, da, dB, dC, *others = grads
    return dx, ds, da, dB.astype(jnp.float32), dC.astype(jnp.float32), *others


def _launch(
    options: Options, x, dt, a, B, C, D, z, initial_state, states, y, dout, dfinal
) -> tuple[Any, Any]:
    """The results of :func:`launch_bwd`, without segments, and the initial state's gradient.

    The gradients of B and C are as a kernel stores them, in 16 bits or in fp32.
    """
    dy, dz = dout, None
    if z is not None:
        if y is None:
            plain = dataclasses.replace(options, save=False)
            y, *_ = launch_fwd(plain, x, dt, a, B, C, D, None, initial_state)
        dy, dz = _through_gate(y, z, dout)
    ranges = state_ranges(B.shape[-1])
    # D · dy is in one range alone; a kernel with zeros for it is that range's, too.
    skips = [D] + [None if D is None else jnp.zeros_like(D)] * (len(ranges) - 1)
    found = [
        _launch_range(
            options,
            *(x, dt, a, of_range(B, n), of_range(C, n), D, of_range(initial_state, n)),
            *(of_range(states, n), dy, of_range(dfinal, n)),
        )
        for n, D in zip(ranges, skips, strict=True)
    ]
    dx, ds, da, dB, dC, dD, dinitial = found[0]
    if len(ranges) > 1:
        of_each = [*zip(*found, strict=True)]
        dx, ds, da = map(added, of_each[:3])
        dx = dx.astype(x.dtype)
        dB, dC, dinitial = map(joined, (*of_each[3:5], of_each[-1]))
    own = None if initial_state is None else dinitial
    return (dx, ds, da, dB, dC, dD, dz, own, None, None), dinitial


def _launch_range(
    options: Options, x, dt, a, B, C, D, initial_state, states, dy, dfinal
) -> tuple[Any, ...]:
    """The gradients of all but z, of as many states as a launch takes."""
    arrays = Arrays(x, dt, a, B, C, D, None, initial_state)
    dy = arrays.tokens(dy)
    scan = arrays.scan(CHUNK).cut(SAVING_WARPGROUPS)
    before = _states(options, arrays, scan, arrays.whole_states(states))
    ends = part_starts(scan, True, dy, arrays.C, arrays.steps, arrays.whole_states(dfinal))
    after, dinitial = launch_carry(scan, True, dy, arrays.C, arrays.steps, ends)
    grads = launch_grads(Chunks.of(scan), arrays, dy, before, after)

    sums, parts = (_of_heads(scan, grads[name]) for name in ("sums", "parts"))
    da, ds, dD = chunk_sum_grads(sums, parts)
    ds, da = map(arrays.cut_steps, (ds, da))
    splits = grads["dB"], grads["dC"]  # each (splits, B, L, G, N)
    dB, dC = (v[0] if len(v) == 1 else v.sum(0) for v in splits)
    dB, dC = (v[:, : arrays.length, :, : arrays.states] for v in (dB, dC))
    if D is not None:
        if dD is not None:
            dD = dD[..., : scan.heads].sum((0, 1))
        else:  # of channels
            dD = jnp.einsum("blhp,blhp->hp", arrays.x, dy, preferred_element_type=jnp.float32)
            dD = dD[:, : arrays.channels]
        dD = dD.reshape(D.shape)
    dx, dinitial = arrays.cut_tokens(grads["dx"]), arrays.cut_states(dinitial[:, 0])
    return dx, ds, da, dB, dC, dD, dinitial


def _of_heads(scan: Scan, v: Any) -> Any:
    """(B, H, …) of (B, H · slices, …), H in whole blocks of the step sizes' kernels."""
    if scan.slices > 1:
        v = v[:, : scan.heads * scan.slices]
        v = v.reshape(scan.batch, scan.heads, scan.slices, *v.shape[2:]).sum(2)
    return jnp.pad(v, ((0, 0), (0, -v.shape[1] % HEADS), *[(0, 0)] * (v.ndim - 2)))


def _through_gate(y: Any, z: Any, dout: Any) -> tuple[Any, Any]:
    """The gradients of y and z in y · silu(z)."""
    y, z32, dout = (v.astype(jnp.float32) for v in (y, z, dout))
    gate = jax.nn.sigmoid(z32)
    dz = dout * y * gate * (1 + z32 * (1 - gate))
    return (dout * z32 * gate).astype(z.dtype), dz.astype(z.dtype)


def _states(options: Any, arrays: Arrays, scan: Scan, saved: Any) -> Any:
    """The states before all chunks, (B, chunks, H, P, N), of those that were saved."""
    every = options.checkpoint_every
    if every == CHUNK:
        return saved
    if every is None:
        saved = part_starts(scan, False, arrays.x, arrays.B, arrays.steps, arrays.initial)
    else:
        scan = dataclasses.replace(scan, part_chunks=every // CHUNK)
    return launch_carry(scan, False, arrays.x, arrays.B, arrays.steps, saved)[0]
