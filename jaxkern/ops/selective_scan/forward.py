"""The forward kernel, and the kernel of a part's carry.

A tile of up to 32 steps is prepared at once: step sizes, their products with x, gates. Then the
states advance step by step; a step's values are loaded, and its decays computed, while the step
before it is worked on, and the sums over states are shuffled during later steps.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.arithmetic import once_read
from jaxkern.mosaic.lanes import sync_warp
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.segments import Seen
from jaxkern.ops.selective_scan.blocks import (
    BLOCK,
    ScanBlock,
    ScanCall,
    ScanPlan,
    Scratch,
    TokenRing,
    dot,
    load_own,
    store_own,
)
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    SelectiveScanOptions,
    reference_carry,
    reference_fwd,
    saved_dtype,
)
from jaxkern.ops.selective_scan.steps import (
    Steps,
    advance,
    advance_chunks,
    decays,
    device_carry,
    fold,
    launch_carry,
    no_carry,
    over_chunks,
    share_step_sizes,
    shared_chunk,
    shared_size,
    states_before,
    store_carry,
    write_final_states,
)
from jaxkern.ops.selective_scan.tiles import forward_grid, forward_tile, half

_CARRY, _CARRY_TOKENS = "selective_scan_fwd_carry", "x dt B keep crossed"


def launch_fwd(options: SelectiveScanOptions, *args: Any) -> tuple[Any, Any, Any]:
    """Output, final state and, to save, the states before every k-th step."""
    x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed = args
    if x.size == 0:
        return reference_fwd(options, *args)
    every = options.checkpoint_every if options.save else None
    tile = forward_tile(A.shape[-1])
    call = ScanCall(options, tile, every or 0, x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    grid = forward_grid(call.columns, call.scan.chunks, half(tile) is not None)
    scan = call.cut(grid)

    def of_chunks(chunks: int) -> Scratch:
        steps = chunks * CHUNK
        # Values of a step that all lanes of a channel read, and those a lane keeps for itself.
        own = {"shared": shared_size(tile, steps), "own": (steps // tile.steps * 2 * LANES,)}
        return Scratch([call.ring(chunks, "x dt z B C keep crossed")], own)

    memory = call.scratch(min(grid.length, grid.units), of_chunks)
    count, initial, starts = options.num_segments, None, None
    if count is not None:
        starts = call.of_segments(initial_state)
    elif initial_state is not None:
        initial = call.pad_states(initial_state.astype(jnp.float32))
    ins = call.pick("x dt z B C A D dt_bias keep crossed") | {"initial": initial, "starts": starts}
    if grid.rest:
        rest = _carry_kernel, _CARRY_TOKENS, {"starts": starts}
        ins |= launch_carry(call, _CARRY, *rest, left_out="last")
    else:
        ins |= {"passed": None, "total": None}
    saved = saved_dtype(jnp.float32, x, dt, B, C, z)
    like = functools.partial(call.states_like, call.batch)
    outs = {
        "out": jax.ShapeDtypeStruct(call.arrays["x"].shape, x.dtype),
        "final": like() if options.final else None,
        "ends": like(count) if options.final and count else None,
        "states": None if not every else like(-(-call.length // every)).update(dtype=saved),
    }
    kernel = _halved_fwd_kernel if grid.halved else _fwd_kernel
    got = call.run("selective_scan_fwd", kernel, scan, ins, outs, memory)
    final = call.cut_states(got["final"]) if options.final else None
    if final is not None and count is not None:
        final = Seen.of(crossed, count).final(call.cut_states(got["ends"]), final, initial_state)
    return call.cut_tokens(got["out"]), final, call.cut_states(got["states"]) if every else None


def _halved_fwd_kernel(scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing) -> None:
    """Runs the last columns in halves, of twice as many lanes a channel."""
    tile = half(scan.tile)
    assert tile is not None
    halves = dataclasses.replace(
        scan,
        tile=tile,
        blocks=2 * scan.blocks,
        blocks_per_group=2 * scan.blocks_per_group,
        grid=scan.grid.of_halves(),
    )
    is_half = lax.axis_index(BLOCK) >= scan.grid.whole - scan.grid.halved
    pl.when(~is_half)(lambda: _fwd_kernel(scan, refs, smem, ring))
    pl.when(is_half)(lambda: _fwd_kernel(halves, refs, smem, ring.of_blocks(halves)))


def _fwd_kernel(scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing) -> None:
    at, tile = ScanBlock(scan), scan.tile
    rate, D, dt_bias = scan.constants(refs)

    def save(token: Any, h: Any) -> None:
        """Saves the states before a token."""
        scan.store_states(refs.states.at[at.batch, token // scan.every, at.channels], h)

    def prepare(steps: Steps) -> None:
        """Computes the values of a token and channel, for the steps and for the output."""
        for round, x, raw, z in steps.all_owned("x", "dt", "z"):
            dt, _ = steps.step_size(round, raw + dt_bias)
            steps.share(smem.shared, round, [dt, dt * x])
            own = [D * x] if z is None else [D * x, steps.gate(z)[0]]
            store_own(smem.own, len(own) * round, own)
        sync_warp()

    def run_tile(n, span, h):
        at_chunk = lambda c: Steps(scan, ring.chunk(n, c), (span.start + c) * CHUNK)

        def load(c, step):
            chunk = at_chunk(c)
            dt, dtx = chunk.shared(shared_chunk(smem, tile, c), step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, decays(dt, rate), *weights, chunk.keep(step)

        def run(c, steps, h):
            chunk = at_chunk(c)
            if scan.every >= CHUNK:

                @pl.when(lax.rem(chunk.token, scan.every) == 0)
                def _():
                    save(chunk.token, h)

            return _run_chunk(scan, refs, smem, save, c, chunk, steps, h)

        prepare(Steps(scan, ring.tile(n), span.start * CHUNK, ring.steps))
        return over_chunks(span, ring.chunks, load, run, h)

    h = scan.zero_states()
    if refs.initial is not None:
        h = once_read(scan.load_states(refs.initial.at[at.batch, at.channels]))
    if refs.passed is not None:  # the parts before this one
        h = fold(scan, refs, rate, ScanBlock(scan).part * scan.grid.subparts, lambda i: i, h)
    h = ring.stream(at.first, at.units, run_tile, h)
    if refs.final is not None:

        @pl.when(at.later == 0)
        def _():
            scan.store_states(refs.final.at[at.batch, at.channels], h)


def _run_chunk(
    scan: ScanPlan, refs: Any, smem: Any, save: Any, c: Any, chunk: Steps, steps: Any, h: Any
) -> Any:
    """The states after the `c`-th chunk of a tile; writes its output.

    `steps` gives of each step its number, and the values loaded for it.
    """
    each = 1 if refs.z is None else 2
    size = len(chunk.rounds) * each * LANES
    own = smem.own.at[pl.ds(c * size, size)]

    def finish(round: int, parts: Any) -> Iterator[None]:
        for shuffle in chunk.shuffles_over_states():
            yield
            parts = shuffle(parts)
        yield
        dx, *gate = load_own(own, each * round, each)
        y = parts[0] + dx
        chunk.write(refs.out, round, y * gate[0] if gate else y)

    parts, later = [], _Later()
    for step, (dtx, decay, B, C, keep) in steps:
        if 0 < scan.every < CHUNK:
            token = chunk.token + step

            @pl.when(token < scan.length)
            def _(token=token, h=h):
                save(token, h)

        write_final_states(scan, refs, keep, h)
        h = advance(decay, dtx, B, states_before(scan, refs, keep, h))
        parts += [dot(row, C) for row in h]
        later.advance()
        if (step + 1) % scan.tile.steps == 0:
            later.add(finish(step // scan.tile.steps, parts))
            parts = []
    later.finish()
    return h


class _Later:
    """Work cut into stages, interleaved with the next steps so that no lane waits for a shuffle."""

    def __init__(self):
        self.stages: list[Iterator[None]] = []

    def add(self, stages: Iterator[None]) -> None:
        self.stages.append(stages)

    def advance(self) -> None:
        done = object()
        self.stages = [s for s in self.stages if next(s, done) is not done]

    def finish(self) -> None:
        while self.stages:
            self.advance()


# The carry of a part


def launch_device_carry(options: SelectiveScanOptions, x, dt, A, B, dt_bias, keep) -> Any:
    """Σdt on this device, (B, G, P), ∞ where a segment begins, and its last state from zeros."""
    if x.size == 0:
        return reference_carry(options, x, dt, A, B, dt_bias, keep)
    tile = forward_tile(A.shape[-1])
    call = ScanCall(options, tile, 0, x, dt, A, B, B, None, None, dt_bias, keep, None)
    segments = {"starts": None}
    return device_carry(call, A, _CARRY, _carry_kernel, _CARRY_TOKENS, segments, reverse=False)


def _carry_kernel(scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing) -> None:
    """The last state of a subpart, from zeros."""
    at, tile = ScanBlock(scan), scan.tile
    rate, _, dt_bias = scan.constants(refs)

    def run_tile(n, span, carry):
        def at_chunk(c):
            steps = Steps(scan, ring.chunk(n, c), (span.start + c) * CHUNK)
            return steps, shared_chunk(smem, tile, c)

        tokens = Steps(scan, ring.tile(n), span.start * CHUNK, ring.steps)
        share_step_sizes(tokens, smem.shared, dt_bias)
        return advance_chunks(scan, refs, span, ring.chunks, at_chunk, rate, *carry)

    equal = scan.grid.units % scan.grid.length == 0
    length = scan.grid.length if equal else at.units
    h, total = ring.stream(at.first, length, run_tile, no_carry(scan))
    store_carry(scan, refs, total, h)
