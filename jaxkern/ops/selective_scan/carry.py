"""The carries of the parts of a sequence, so that all parts can be worked on at once.

A first kernel finds, for every subpart of a part, the state after it if nothing comes in (in the
backward: the gradient before it), and the sum of its step sizes, as it decays by exp(Σdt · A).
Every block of the main kernel folds the subparts before its part (in the backward: after it) into
the state that it starts from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.lanes import sync_warp
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.sections import state_after_all
from jaxkern.ops.selective_scan.blocks import Block, Rows, Scan, TokenRing, fp32_array, map_states
from jaxkern.ops.selective_scan.call import Call, Scratch
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    Options,
    decay_of,
    reference_bwd_carry,
    reference_carry,
)
from jaxkern.ops.selective_scan.steps import (
    Steps,
    add_final_gradients,
    add_reset,
    advance_chunks,
    decayed,
    decays,
    over_chunks,
    polynomials,
    share_step_sizes,
    shared_chunk,
    shared_size,
    zero_states,
    zeros,
)
from jaxkern.ops.selective_scan.tiles import CHANNELS, backward_tile, forward_grid, forward_tile


def launch_device_carry(options: Options, x, dt, A, B, dt_bias, keep) -> tuple[Any, Any]:
    """Σdt on this device, (B, G, P), ∞ where a segment begins, and its last state from zeros."""
    if x.size == 0:
        return reference_carry(options, x, dt, A, B, dt_bias, keep)
    tile = forward_tile(A.shape[-1])
    call = Call(options, tile, 1, 0, x, dt, A, B, B, None, None, dt_bias, keep, None)
    name, tokens = "selective_scan_fwd_carry", "x dt B keep crossed"
    segments = {"starts": None}
    return _of_device(call, A, name, fwd_carry_kernel, tokens, segments, reverse=False)


def launch_device_bwd_carry(options: Options, dt, A, C, z, dt_bias, keep, dout) -> tuple[Any, Any]:
    """The sum of this device's steps, and the gradient of the state before its part."""
    if dout.size == 0:
        return reference_bwd_carry(options, dt, A, C, z, dt_bias, keep, dout)
    tile = backward_tile(A.shape[-1])
    call = Call(options, tile, 1, 0, dt, dt, A, C, C, None, z, dt_bias, keep, None)
    name, tokens = "selective_scan_bwd_carry", "dt z C keep crossed"
    segments = {"starts": None, "dends": None}
    dout = call.pad_tokens(dout)
    return _of_device(call, A, name, bwd_carry_kernel, tokens, segments, reverse=True, dout=dout)


def _of_device(
    call: Call, A: Any, name: str, kernel: Any, *rest: Any, reverse: bool, **others: Any
) -> Any:
    """The carry of all that there is, from those of subparts that fill the GPU."""
    grid = forward_grid(call.columns, call.scan.chunks, halves=False)
    call.cut(dataclasses.replace(grid, whole=0))
    got = launch_carry(call, name, kernel, *rest, every_part=True, **others)
    shape = got["total"].shape[0], call.batch, call.scan.channels
    total = call.cut_channels(got["total"].reshape(shape), 2)  # (subparts, B, G, P)
    passed = got["passed"].reshape(*shape, got["passed"].shape[-1])
    passed = call.cut_states(passed)  # (subparts, B, G, P, N)
    decay = decay_of(A.astype(jnp.float32), call.arrays["keep"] is not None, total)
    return jnp.sum(total, 0), state_after_all(decay, passed, reverse=reverse)


def launch_carry(
    call: Call,
    name: str,
    kernel: Callable[..., None],
    tokens: str,
    of_segments: dict[str, Any],
    every_part: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """The carries of all subparts but those of the last part, and the sums of their dt.

    It reads `tokens` and `others` along time, and states `of_segments`. Those of `every_part` are
    found for what a sequence's part on one device hands to the next.
    """
    grid = call.scan.grid.of_carries(every_part)
    scan = dataclasses.replace(call.scan, grid=grid)

    def of_chunks(chunks: int) -> Scratch:
        own = {"shared": shared_size(call.tile, chunks * CHUNK)}
        return Scratch([call.ring("", chunks, tokens, **others)], own)

    _, memory = call.scratch(min(grid.length * scan.per_unit, scan.chunks), of_chunks)
    subparts = grid.parts - grid.left_out
    return call.run(
        name,
        kernel,
        scan,
        call.pick(tokens) | others | of_segments | call.pick("A D dt_bias"),
        {
            "passed": call.per_block(subparts, grid.rest),
            "total": fp32_array(subparts, grid.rest, call.width),
        },
        memory,
    )


def store_carry(scan: Scan, refs: Any, total: Rows, h: list[Rows]) -> None:
    at = Block(scan)
    scan.store_states(refs.passed.at[at.part, at.rest, at.local], h)
    ref = refs.total.at[at.part, at.rest, at.local]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        scan.store(ref, [value], *digits, start=start)


def fold_before(scan: Scan, refs: Any, rate: list[Rows], h: list[Rows]) -> list[Rows]:
    """The state before a block's part, from that before the sequence."""
    return _fold(scan, refs, rate, Block(scan).part * scan.grid.subparts, lambda i: i, h)


def fold_after(scan: Scan, refs: Any, rate: list[Rows], dh: list[Rows]) -> list[Rows]:
    """The gradient of the state after a block's part, from that after the sequence."""
    at, subparts = Block(scan), refs.total.shape[0]
    count = jnp.where(at.later > 0, subparts - at.part * scan.grid.subparts, 0)
    return _fold(scan, refs, rate, count, lambda i: subparts - 1 - i, dh)


_AT_ONCE = 4
"""Subparts that are loaded together, for each would be waited for."""


def _fold(
    scan: Scan, refs: Any, rate: list[Rows], count: Any, number: Callable[[Any], Any], h: list[Rows]
) -> list[Rows]:
    """The state (or its gradient) on the other side of `count` subparts, ``number(i)`` the i-th."""
    at = Block(scan)

    def load(i):
        s = number(jnp.minimum(i, count - 1))
        total = scan.load_channels(refs.total.at[s, at.rest, at.local])
        return total, scan.load_states(refs.passed.at[s, at.rest, at.local])

    def body(group, h):
        numbers = [group * _AT_ONCE + i for i in range(_AT_ONCE)]
        for i, (total, passed) in [(i, load(i)) for i in numbers]:
            held = decayed(total, decays(total, rate), h, refs.keep is not None)
            after = map_states(jnp.add, passed, held)
            counts = jnp.broadcast_to((i < count).astype(jnp.float32), (LANES,)) > 0.5
            h = map_states(lambda a, b, counts=counts: jnp.where(counts, a, b), after, h)
        return h

    return lax.fori_loop(0, lax.div(count + _AT_ONCE - 1, _AT_ONCE), body, h)


def fwd_carry_kernel(scan: Scan, refs: Any, smem: Any, ring: TokenRing) -> None:
    """The last state of a subpart, from zeros."""
    at, tile = Block(scan), scan.tile
    rate, _, dt_bias = scan.constants(refs)

    def run_tile(n, span, carry):
        def at_chunk(c):
            steps = Steps(scan, ring.chunk(n, c), (span.start + c) * CHUNK)
            return steps, shared_chunk(smem, tile, c)

        tokens = Steps(scan, ring.tile(n), span.start * CHUNK, ring.steps)
        share_step_sizes(tokens, smem.shared, dt_bias)
        return advance_chunks(scan, refs, span, ring.chunks, at_chunk, rate, *carry)

    init = zero_states(scan), [zeros() for _ in range(CHANNELS)]
    length = scan.grid.length if scan.grid.left_out else at.units
    h, total = ring.stream(at.first, length, run_tile, init)
    store_carry(scan, refs, total, h)


def bwd_carry_kernel(scan: Scan, refs: Any, smem: Any, ring: TokenRing) -> None:
    """The gradient before a subpart, from zeros after it.

    Σ_t C[t] · dy[t] · Π a over its steps up to t = Σ_t C[t] · dy[t] · exp(A · Σdt).
    """
    at, tile, grid = Block(scan), scan.tile, scan.grid
    first, count = scan.chunks_of_units(at.first + grid.left_out * grid.length, grid.length)
    rate, _, dt_bias = scan.constants(refs)

    def run_tile(n, span, carry):
        steps = Steps(scan, ring.tile(n), span.start * CHUNK, ring.steps)
        for round, raw, dout, z in steps.all_owned("dt", "dout", "z"):
            dt, _ = steps.step_size(round, raw + dt_bias)
            dy = dout if z is None else dout * steps.gate(z)[0]
            steps.share(smem.shared, round, [dt, dy])
        sync_warp()

        def load(c, step):
            chunk = Steps(scan, ring.chunk(n, c), (span.start + c) * CHUNK)
            dt, dy = chunk.shared(shared_chunk(smem, tile, c), step, 2)
            return dt, dy, chunk.weights("C", step), chunk.keep(step)

        return over_chunks(span, ring.chunks, load, run_chunk, carry)

    def add_decayed(total, dh, enters):
        held = decayed(total, decays(total, rate, polynomials(tile)), enters, refs.keep is not None)
        return map_states(jnp.add, dh, held)

    def run_chunk(c, steps, carry):
        dh, total = carry
        for _, (dt, dy, C, keep) in steps:
            add = functools.partial(add_decayed, total)
            dh = add_final_gradients(scan, refs, keep, add, dh)
            total = add_reset(total, keep, dt)
            dh = add_decayed(total, dh, [[d * c for c in C] for d in dy])
        return dh, total

    init = zero_states(scan), [zeros() for _ in range(CHANNELS)]
    dh, total = ring.stream(first, count, run_tile, init)
    store_carry(scan, refs, total, dh)
