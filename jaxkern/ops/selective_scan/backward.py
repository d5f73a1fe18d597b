"""The backward kernel and its launch.

Where states were saved further apart than a chunk, a block first runs from one saved state to the
next and writes the state before every chunk. Then it goes through the chunks from the end
(:mod:`jaxkern.ops.selective_scan.gradients`).

dA, dD and the gradient of dt_bias are sums of each block, dB and dC of each block's channels, added
up after the kernel in a fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.ring import close_copies, release_stage
from jaxkern.ops.segments import Seen
from jaxkern.ops.selective_scan.blocks import Block, Rows, Scan, TokenRing, fp32_array
from jaxkern.ops.selective_scan.call import Call, Scratch
from jaxkern.ops.selective_scan.carry import bwd_carry_kernel, fold_after, launch_carry
from jaxkern.ops.selective_scan.forward import launch_fwd
from jaxkern.ops.selective_scan.gradients import ChunkGradients
from jaxkern.ops.selective_scan.reference import CHUNK, RECOMPUTED_EVERY, Options, reference_bwd
from jaxkern.ops.selective_scan.steps import (
    Steps,
    advance_chunks,
    share_step_sizes,
    shared_chunk,
    shared_size,
    zero_states,
    zeros,
)
from jaxkern.ops.selective_scan.sums import SUM_BUFFERS, sum_of_blocks
from jaxkern.ops.selective_scan.tiles import (
    CHANNELS,
    backward_grid,
    backward_tile,
    backward_warpgroups,
)


def launch_bwd(
    options: Options,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    initial_state,
    keep,
    crossed,
    states,
    dout,
    dfinal,
) -> tuple[Any, ...]:
    """The gradients in the order of the arguments; those that are sums in fp32."""
    args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed)
    if x.size == 0:
        return reference_bwd(options, *args, states, dout, dfinal)
    f32 = jnp.float32
    if states is None:
        options = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY)
        _, _, states = launch_fwd(dataclasses.replace(options, final=False, save=True), *args)
    every = options.checkpoint_every
    assert every is not None
    tile = backward_tile(A.shape[-1])
    arrays = (x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    warpgroups = backward_warpgroups(tile, x.shape[-1], every)
    call = Call(options, tile, warpgroups, every, *arrays)
    if warpgroups > 1 and not call.fits(_bwd_scratch(call, dout)[0]):
        warpgroups = 1
        call = Call(options, tile, warpgroups, every, *arrays)
    batch, per_unit = call.batch, call.scan.per_unit
    grid = backward_grid(call.columns, -(-call.scan.chunks // per_unit), warpgroups)
    count, dlast = options.num_segments, dfinal
    of_segments = {"starts": None, "dends": None}
    if count is not None:
        seen = Seen.of(crossed, count)
        dlast = None if dfinal is None else seen.of_row(dfinal)
        starts, dends = call.of_segments(initial_state), call.of_segments(dfinal)
        of_segments = {"starts": starts, "dends": dends}
    dout = call.pad_tokens(dout)
    ins = call.pick("x dt z B C A D dt_bias keep crossed") | {
        "dout": dout,
        "states": call.pad_states(states),
        "dfinal": None if dlast is None else call.pad_states(dlast.astype(f32)),
        **of_segments,
    }
    scan = call.cut(grid)
    if grid.rest:
        name = "selective_scan_bwd_carry"
        tokens = "dt z C keep crossed"
        ins |= launch_carry(call, name, bwd_carry_kernel, tokens, of_segments, dout=dout)
    else:
        ins |= {"passed": None, "total": None}
    memory, barriers = _bwd_scratch(call, dout)
    like = lambda v: jax.ShapeDtypeStruct(call.arrays["x"].shape, v.dtype)
    outs = {
        "dx": like(x),
        "ddt": like(dt),
        "dA": call.per_block(grid.count),
        "sums": fp32_array(call.blocks, batch, call.scan.padded, 32 * tile.sums),
        "dD": fp32_array(grid.count, call.width),
        "ddt_bias_sum": fp32_array(grid.count, call.width),
        "dz": None if z is None else like(z),
        **_dinitial(call, initial_state),
        "chunk_states": None,
    }
    if per_unit > 1:
        size = CHANNELS * tile.states * LANES
        outs["chunk_states"] = fp32_array(grid.count, per_unit, warpgroups, size)
    name = "selective_scan_bwd"
    g = call.run(name, _bwd_kernel, scan, ins, outs, memory, barriers)
    dinitial = None
    if g["dstarts"] is not None:
        dinitial = seen.initial(call.cut_states(g["dstarts"]), dfinal)
    elif g["dinitial"] is not None:
        dinitial = call.cut_states(g["dinitial"])
    return *_gradients(call, g, D, z, dt_bias), dinitial, None, None


def _gradients(call: Call, g: dict[str, Any], D: Any, z: Any, dt_bias: Any) -> tuple[Any, ...]:
    """The gradients of x to dt_bias, of what the kernel gave, its blocks' sums added up."""
    dB, dC = sum_of_blocks(call, g["sums"])
    dA, dD, ddt_bias = (call.sum_over_parts(g[name]) for name in ("dA", "dD", "ddt_bias_sum"))
    return (
        call.cut_tokens(g["dx"]),
        call.cut_tokens(g["ddt"]),
        call.cut_states(dA),
        dB,
        dC,
        None if D is None else call.cut_channels(dD, 0),
        None if z is None else call.cut_tokens(g["dz"]),
        None if dt_bias is None else call.cut_channels(ddt_bias, 0),
    )


def _dinitial(call: Call, initial_state: Any) -> dict[str, Any]:
    """The gradients of initial states, of rows or of segments."""
    dinitial = dstarts = None
    if initial_state is not None:
        count = call.scan.options.num_segments
        if count is None:
            dinitial = call.states_like(call.batch)
        else:
            dstarts = call.states_like(call.batch, count)
    return {"dinitial": dinitial, "dstarts": dstarts}


def _bwd_scratch(call: Call, dout: jax.Array) -> tuple[Scratch, dict[str, Any]]:
    """The shared memory, of which a multiprocessor has enough for two warpgroups, and barriers."""
    tile, scan = call.tile, call.scan
    recomputed = scan.per_unit > 1
    buffers = 1 if scan.warpgroups == 1 else SUM_BUFFERS

    def of_chunks(chunks: int) -> Scratch:
        steps = chunks * CHUNK
        rings = [call.ring("", chunks, "x dt z B C keep crossed", dout=dout)]
        if recomputed:
            rings.append(call.ring("before_", chunks, "x dt B keep crossed"))
        own = {
            "shared": shared_size(tile, steps if recomputed else CHUNK),
            "dy": (CHUNK * tile.row(1),),
        }
        sum_steps = steps if chunks > 1 or tile.sums <= 8 else CHUNK // 2
        return Scratch(rings, own, (buffers, sum_steps, scan.warpgroups * LANES * tile.sums))

    most = min(scan.chunks, scan.per_unit if recomputed else scan.grid.length)
    _, memory = call.scratch(most, of_chunks, resident=2)
    if scan.warpgroups == 1:
        return memory, {}
    return memory, {"summed": plgpu.Barrier(num_arrivals=scan.warpgroups, num_barriers=buffers)}


def _bwd_kernel(
    scan: Scan, refs: Any, smem: Any, ring: TokenRing, before: TokenRing | None = None
) -> None:
    block = _Backward(scan, refs, smem, ring, before)
    at, tile = block.at, scan.tile
    dh = zero_states(scan)
    if refs.dfinal is not None:
        dh = once_read(scan.load_states(refs.dfinal.at[at.batch, at.channels]))
    if refs.passed is not None:
        dh = fold_after(scan, refs, block.gradients.rate, dh)
    block.fetch_unit(0, 0, 0)
    close_copies()
    init = 0, 0, 0, dh, zero_states(scan), (zeros(), zeros()), (zeros(), zeros())
    carry = lax.fori_loop(0, block.units, block.run_unit, init)
    _, tiles, flushing, dh, dA, dD, ddt_bias = carry
    block.gradients.sums.finish(lambda: block.unit(block.units - 1)[0], flushing, tiles)
    scan.store_states(refs.dA.at[at.index, at.local], dA)
    for ref, (value, _) in ((refs.dD, dD), (refs.ddt_bias_sum, ddt_bias)):
        (total,) = scan.sum([value], tile.over_steps)
        scan.store(ref.at[at.index, at.local], [total], *tile.owned(step=0))
    if refs.dinitial is not None:

        @pl.when(at.part == 0)
        def _():
            scan.store_states(refs.dinitial.at[at.batch, at.channels], dh)


class _Backward:
    """A block's work, unit by unit, tile by tile and chunk by chunk, all from the end.

    From unit to unit it carries the numbers of copies that its two rings have had, how many chunks
    have sums that are still to be added up, and dh, dA and the sums for dD and ddt_bias.
    """

    def __init__(self, scan: Scan, refs: Any, smem: Any, ring: TokenRing, before: TokenRing | None):
        self.scan, self.refs, self.smem, self.tile = scan, refs, smem, scan.tile
        self.ring, self.before = ring, before
        self.at = Block(scan)
        self.gradients = ChunkGradients(scan, refs, smem, self.at, ring.chunks)
        # Where the state before every chunk was saved, the whole part is one unit.
        self.units = self.at.units if scan.per_unit > 1 else 1

    def unit(self, i: Any) -> tuple[Any, Any]:
        """First chunk and number of chunks of the i-th unit from the part's end."""
        scan, at = self.scan, self.at
        if scan.per_unit == 1:
            return scan.chunks_of_units(at.first, at.units)
        first = (at.first + self.units - 1 - i) * scan.per_unit
        return first, jnp.minimum(scan.per_unit, scan.chunks - first)

    def fetch_unit(self, i: Any, up: Any, down: Any) -> None:
        """Starts copying the first tiles of the i-th unit, upwards and downwards."""
        first, count = self.unit(i)
        if self.before is not None:
            start = self.before.upward(first, count - 1, 0).start
            pl.when(count > 1)(functools.partial(self.before.fetch, start, up))
        self.fetch_below(first + count, down)

    def fetch_below(self, end: Any, n: Any) -> None:
        self.ring.fetch(self.start_below(end), n)

    def start_below(self, end: Any) -> Any:
        """The first chunk of the tile that ends before chunk `end`, or of the sequence's first."""
        return jnp.maximum(end - self.ring.chunks, 0)

    def run_unit(self, i: Any, carry: Any) -> Any:
        up, down, flushing, *carry = carry
        first, count = self.unit(i)
        if self.before is not None:
            up = self.save_chunk_states(self.before, first, count, up)
        tiles = self.ring.tiles(count)

        def run_tile(j, carry):
            flushing, carry = carry[0], carry[1:]
            release_stage()
            end, n = first + count - j * self.ring.chunks, down + j

            @pl.when(j + 1 < tiles)
            def _():
                self.fetch_below(end - self.ring.chunks, n + 1)

            @pl.when((j + 1 == tiles) & (i + 1 < self.units))
            def _():
                self.fetch_unit(i + 1, up, n + 1)

            close_copies()
            return self.run_tile(first, end, n, flushing, carry)

        init = (flushing, self.state_before(first, first + count - 1), *carry)
        flushing, _, *carry = lax.fori_loop(0, tiles, run_tile, init)
        return up, down + tiles, flushing, *carry

    def run_tile(self, first: Any, end: Any, n: Any, flushing: Any, carry: Any) -> Any:
        """Runs the chunks before `end` that the n-th copy brings, none before chunk `first`."""
        scan, ring = self.scan, self.ring
        ring.wait(n)
        start, chunks = self.start_below(end), jnp.minimum(ring.chunks, end - first)

        def run(k, carry):
            h, *carry = carry
            h = scan.swapped(h) if scan.per_unit == 1 else h
            c = end - 1 - k
            chunk = Steps(scan, ring.chunk(n, c - start), c * CHUNK)
            following = lambda: self.state_before(first, jnp.maximum(c - 1, first))
            run_chunk = lambda chunk: self.gradients.run_chunk(chunk, k, n, h, following, carry)
            if chunk.tokens.keep is None:
                return run_chunk(chunk)
            # Few chunks have a segment's first token; the others need not ask for it at each.
            within = chunk.within_a_segment()
            return lax.cond(chunk.crosses(), lambda: run_chunk(chunk), lambda: run_chunk(within))

        carry = lax.fori_loop(0, chunks, run, carry)
        self.gradients.sums.finish_tile(end, chunks, n, flushing)
        return chunks, *carry

    def state_before(self, first: Any, c: Any) -> list[Rows]:
        """The state before chunk c, of the unit that begins with chunk `first`.

        As it was saved it is in the order of memory, for the sum to come later.
        """
        if self.scan.per_unit == 1:
            return self.gradients.saved(c * CHUNK)
        ref = self.refs.chunk_states.at[self.at.index, c - first, self.at.warpgroup]
        flat = self.scan.load_lane(ref, 0, CHANNELS * self.tile.states)
        states = self.tile.states
        return [flat[r * states :][:states] for r in range(CHANNELS)]

    def save_chunk_states(self, before: TokenRing, first: Any, count: Any, up: Any) -> Any:
        """Writes the state before every chunk of a unit, from the saved one before the unit."""
        scan, at = self.scan, self.at

        def save(c, h):
            ref = self.refs.chunk_states.at[at.index, c, at.warpgroup]
            scan.store_lane(ref, 0, [v for row in h for v in row])

        h = once_read(scan.swapped(self.gradients.saved(first * CHUNK)))
        save(0, h)
        tiles = before.tiles(count - 1)

        def run_tile(i, h):
            release_stage()

            @pl.when(i + 1 < tiles)
            def _():
                before.fetch(before.upward(first, count - 1, i + 1).start, up + i + 1)

            close_copies()
            before.wait(up + i)
            span = before.upward(first, count - 1, i)
            token = span.start * CHUNK
            steps = Steps(scan, before.tile(up + i), token, before.steps)
            share_step_sizes(steps, self.smem.shared, self.gradients.dt_bias)

            def at_chunk(c):
                chunk = Steps(scan, before.chunk(up + i, c), token + c * CHUNK)
                return chunk, shared_chunk(self.smem, self.tile, c)

            after = lambda c, h: save(span.start + c + 1 - first, h)
            h, _ = advance_chunks(
                scan, self.refs, span, before.chunks, at_chunk, self.gradients.rate, h, after=after
            )
            return h

        lax.fori_loop(0, tiles, run_tile, h)
        return up + tiles
