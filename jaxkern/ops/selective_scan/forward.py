"""The forward kernel.

A tile of up to 32 steps is prepared at once: step sizes, their products with x, gates. Then the
states advance step by step; what a step reads is loaded, and its decays are computed, while the
step before it is worked on, and the sums over states are shuffled while later steps are.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.lanes import sync_warp
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.segments import Seen
from jaxkern.ops.selective_scan.blocks import BLOCK, Block, Scan, TokenRing
from jaxkern.ops.selective_scan.call import Call, Scratch
from jaxkern.ops.selective_scan.carry import fold_before, fwd_carry_kernel, launch_carry
from jaxkern.ops.selective_scan.reference import CHUNK, Options, reference_fwd
from jaxkern.ops.selective_scan.steps import (
    Steps,
    advance,
    decays,
    dot,
    over_chunks,
    shared_chunk,
    shared_size,
    states_before,
    write_final_states,
    zero_states,
)
from jaxkern.ops.selective_scan.tiles import forward_grid, forward_tile, half


def launch_fwd(
    options: Options, x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed
) -> tuple[Any, Any, Any]:
    """Output, final state and, to save, the states before every k-th step."""
    if x.size == 0:
        args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed)
        return reference_fwd(options, *args)
    every = options.checkpoint_every if options.save else None
    tile = forward_tile(A.shape[-1])
    call = Call(options, tile, 1, every or 0, x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    grid = forward_grid(call.columns, call.scan.chunks, half(tile) is not None)
    scan = call.cut(grid)

    def of_chunks(chunks: int) -> Scratch:
        steps = chunks * CHUNK
        own = {"shared": shared_size(tile, steps), "own": (steps // tile.steps * 2 * LANES,)}
        return Scratch([call.ring("", chunks, "x dt z B C keep crossed")], own)

    _, memory = call.scratch(min(grid.length, grid.units), of_chunks)
    count, initial, starts = options.num_segments, None, None
    if count is not None:
        starts = call.of_segments(initial_state)
    elif initial_state is not None:
        initial = call.pad_states(initial_state.astype(jnp.float32))
    ins = call.pick("x dt z B C A D dt_bias keep crossed") | {"initial": initial, "starts": starts}
    if grid.rest:
        name, tokens = "selective_scan_fwd_carry", "x dt B keep crossed"
        ins |= launch_carry(call, name, fwd_carry_kernel, tokens, {"starts": starts})
    else:
        ins |= {"passed": None, "total": None}
    outs = {
        "out": jax.ShapeDtypeStruct(call.arrays["x"].shape, x.dtype),
        "final": call.states_like(call.batch) if options.final else None,
        "ends": None,
        "states": call.states_like(call.batch, -(-call.length // every)) if every else None,
    }
    if options.final and count is not None:
        outs["ends"] = call.states_like(call.batch, count)
    kernel = _halved_fwd_kernel if grid.halved else _fwd_kernel
    got = call.run("selective_scan_fwd", kernel, scan, ins, outs, memory)
    final = call.cut_states(got["final"]) if options.final else None
    if final is not None and count is not None:
        final = Seen.of(crossed, count).final(call.cut_states(got["ends"]), final, initial_state)
    return (
        call.cut_tokens(got["out"]),
        final,
        call.cut_states(got["states"]) if every else None,
    )


def _halved(scan: Scan) -> Scan:
    """For the halved columns."""
    tile = half(scan.tile)
    assert tile is not None
    return dataclasses.replace(
        scan,
        tile=tile,
        blocks=2 * scan.blocks,
        blocks_per_group=2 * scan.blocks_per_group,
        grid=scan.grid.of_halves(),
    )


def _halved_fwd_kernel(scan: Scan, refs: Any, smem: Any, ring: TokenRing) -> None:
    halves = _halved(scan)
    is_half = lax.axis_index(BLOCK) >= scan.grid.whole - scan.grid.halved
    pl.when(~is_half)(lambda: _fwd_kernel(scan, refs, smem, ring))
    pl.when(is_half)(lambda: _fwd_kernel(halves, refs, smem, ring.of_blocks(halves)))


class _Later:
    """Work in stages, one after each step to come, so that no shuffle's result is waited for."""

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


def _fwd_kernel(scan: Scan, refs: Any, smem: Any, ring: TokenRing) -> None:
    _Forward(scan, refs, smem, ring).run()


class _Forward:
    """A block, which takes the states of its channels through its steps.

    Args:
      scan: the sizes of the launch.
      refs: arrays in global memory.
      smem: `shared`, what all lanes of a channel read of a step, and `own`, what a lane stores for
        itself.
      ring: of what is read of tokens.
    """

    def __init__(self, scan: Scan, refs: Any, smem: Any, ring: TokenRing):
        self.scan, self.refs, self.smem, self.ring = scan, refs, smem, ring
        self.at = Block(scan)
        self.rate, self.D, self.dt_bias = scan.constants(refs)

    def run(self) -> None:
        scan, refs, at = self.scan, self.refs, self.at
        h = zero_states(scan)
        if refs.initial is not None:
            h = once_read(scan.load_states(refs.initial.at[at.batch, at.channels]))
        if refs.passed is not None:
            h = fold_before(scan, refs, self.rate, h)
        h = self.ring.stream(at.first, at.units, self.tile, h)
        if refs.final is not None:

            @pl.when(at.later == 0)
            def _():
                scan.store_states(refs.final.at[at.batch, at.channels], h)

    def tile(self, n: Any, span: Any, h: Any) -> Any:
        """The states after the `n`-th tile, those before it being `h`."""
        scan, ring = self.scan, self.ring

        def at_chunk(c: Any) -> Steps:
            return Steps(scan, ring.chunk(n, c), (span.start + c) * CHUNK)

        def load(c: Any, step: Any) -> Any:
            chunk = at_chunk(c)
            dt, dtx = chunk.shared(shared_chunk(self.smem, scan.tile, c), step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, decays(dt, self.rate), *weights, chunk.keep(step)

        def run(c: Any, steps: Any, h: Any) -> Any:
            chunk = at_chunk(c)
            if scan.every >= CHUNK:

                @pl.when(lax.rem(chunk.token, scan.every) == 0)
                def _():
                    self.save(chunk.token, h)

            return self.chunk(c, chunk, steps, h)

        self.prepare(Steps(scan, ring.tile(n), span.start * CHUNK, ring.steps))
        return over_chunks(span, ring.chunks, load, run, h)

    def prepare(self, steps: Steps) -> None:
        """Computes what there is one of for a token and channel: for the steps, and the output."""
        for round, x, raw, z in steps.all_owned("x", "dt", "z"):
            dt, _ = steps.step_size(round, raw + self.dt_bias)
            steps.share(self.smem.shared, round, [dt, dt * x])
            own = [self.D * x] if z is None else [self.D * x, steps.gate(z)[0]]
            self.scan.store_lane(self.smem.own, len(own) * round, own)
        sync_warp()

    def chunk(self, c: Any, chunk: Steps, steps: Any, h: Any) -> Any:
        """The states after the `c`-th chunk of a tile; writes its output.

        Args:
          c: its number in the tile.
          chunk: its tokens.
          steps: of each step its number, and what was loaded for it.
          h: the states before it.
        """
        scan, refs = self.scan, self.refs
        each = 1 if refs.z is None else 2
        size = len(chunk.rounds) * each * LANES
        own = self.smem.own.at[pl.ds(c * size, size)]

        def finish(round: int, parts: Any) -> Iterator[None]:
            for shuffle in chunk.shuffles_over_states():
                yield
                parts = shuffle(parts)
            yield
            dx, *gate = scan.load_lane(own, each * round, each)
            y = parts[0] + dx
            chunk.write(refs.out, round, y * gate[0] if gate else y)

        parts, later = [], _Later()
        for step, (dtx, decay, B, C, keep) in steps:
            if 0 < scan.every < CHUNK:
                self.save_step(chunk.token + step, h)
            write_final_states(scan, refs, keep, h)
            h = advance(decay, dtx, B, states_before(scan, refs, keep, h))
            parts += [dot(row, C) for row in h]
            later.advance()
            if (step + 1) % scan.tile.steps == 0:
                later.add(finish(step // scan.tile.steps, parts))
                parts = []
        later.finish()
        return h

    def save(self, token: Any, h: Any) -> None:
        """Saves the states before a token."""
        plane = (self.at.batch, token // self.scan.every, self.at.channels)
        self.scan.store_states(self.refs.states.at[plane], h)

    def save_step(self, token: Any, h: Any) -> None:
        """Saves the states before a token, unless that is past the end."""

        @pl.when(token < self.scan.length)
        def _():
            self.save(token, h)
