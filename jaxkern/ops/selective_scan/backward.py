"""The backward kernel, and the kernel of the carry of a part's gradient.

If states were saved further apart than a chunk, a block first runs from one saved state to the next
and writes the state before every chunk. Then it goes through the chunks from the end. It runs each
up, from the state before it to those before each step, which stay in registers, and down with their
gradients. The decays are computed again on the way down: keeping them, and the states in shared
memory, would cost more time there than the exponentials do.

dA, dD and the gradient of dt_bias are sums of each block, dB and dC of each block's channels, added
up after the kernel in a fixed order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E, once_read, softplus_slope
from jaxkern.mosaic.lanes import sum_lanes, sync_warp, zeros
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.ring import close_copies, release_stage
from jaxkern.ops.segments import Seen
from jaxkern.ops.selective_scan.blocks import (
    Registers,
    ScanBlock,
    ScanCall,
    ScanPlan,
    Scratch,
    TokenRing,
    dot,
    fp32_array,
    load_own,
    store,
    store_own,
)
from jaxkern.ops.selective_scan.forward import launch_fwd
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    RECOMPUTED_EVERY,
    SelectiveScanOptions,
    reference_bwd,
    reference_bwd_carry,
)
from jaxkern.ops.selective_scan.steps import (
    Steps,
    add_final_gradients,
    add_reset,
    advance,
    advance_chunks,
    decayed,
    decays,
    device_carry,
    fold,
    gradients_before,
    launch_carry,
    no_carry,
    over_chunks,
    polynomials,
    share_step_sizes,
    shared_chunk,
    shared_size,
    states_before,
    store_carry,
)
from jaxkern.ops.selective_scan.tiles import (
    CHANNELS,
    WARPS,
    backward_grid,
    backward_tile,
    backward_warpgroups,
)

_CARRY, _CARRY_TOKENS = "selective_scan_bwd_carry", "dt z C keep crossed"

_SUM_BUFFERS = 3
"""Buffers of sums: one is filled, one added up, one that the other warpgroup may still add up."""


def launch_bwd(options: SelectiveScanOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients in the order of the arguments; sums are in fp32."""
    *given, states, dout, dfinal = args
    x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed = given
    if x.size == 0:
        return reference_bwd(options, *args)
    f32 = jnp.float32
    if states is None:
        options = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY)
        _, _, states = launch_fwd(dataclasses.replace(options, final=False, save=True), *given)
    every = options.checkpoint_every
    assert every is not None
    tile = backward_tile(A.shape[-1])
    arrays = (x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    warpgroups = backward_warpgroups(tile, x.shape[-1], every)
    call = ScanCall(options, tile, warpgroups, every, *arrays)
    if warpgroups > 1 and not call.fits(_scratch(call, dout)[0]):
        warpgroups = 1
        call = ScanCall(options, tile, warpgroups, every, *arrays)
    batch, per_unit = call.batch, call.scan.per_unit
    grid = backward_grid(call.columns, -(-call.scan.chunks // per_unit), warpgroups)
    count, dlast, seen = options.num_segments, dfinal, None
    of_segments: dict[str, Any] = {"starts": None, "dends": None}
    if count is not None:
        seen = Seen.of(crossed, count)
        dlast = None if dfinal is None else seen.of_row(dfinal)
        of_segments["starts"] = call.of_segments(initial_state)
        of_segments["dends"] = call.of_segments(dfinal)
    dout = call.pad_tokens(dout)
    ins = call.pick("x dt z B C A D dt_bias keep crossed") | {
        "dout": dout,
        "states": call.pad_states(states),
        "dfinal": None if dlast is None else call.pad_states(dlast.astype(f32)),
        **of_segments,
    }
    scan = call.cut(grid)
    if grid.rest:
        rest = _carry_kernel, _CARRY_TOKENS, of_segments
        ins |= launch_carry(call, _CARRY, *rest, left_out="first", dout=dout)
    else:
        ins |= {"passed": None, "total": None}
    memory, barriers = _scratch(call, dout)
    like = lambda v: jax.ShapeDtypeStruct(call.arrays["x"].shape, v.dtype)
    starts = initial_state is not None
    outs = {
        "dx": like(x),
        "ddt": like(dt),
        "dA": call.per_block(grid.count),
        "sums": fp32_array(call.blocks, batch, call.scan.padded, 32 * tile.sums),
        "dD": fp32_array(grid.count, call.width),
        "ddt_bias_sum": fp32_array(grid.count, call.width),
        "dz": None if z is None else like(z),
        "dinitial": call.states_like(batch) if starts and count is None else None,
        "dstarts": call.states_like(batch, count) if starts and count is not None else None,
        "chunk_states": None,
    }
    if per_unit > 1:
        size = CHANNELS * tile.states * LANES
        outs["chunk_states"] = fp32_array(grid.count, per_unit, warpgroups, size)
    g = call.run("selective_scan_bwd", _bwd_kernel, scan, ins, outs, memory, barriers)
    dB, dC = _sum_of_blocks(call, g["sums"])
    dA, dD, ddt_bias = (call.sum_over_parts(g[name]) for name in ("dA", "dD", "ddt_bias_sum"))
    dinitial = None
    if g["dstarts"] is not None and seen is not None:
        dinitial = seen.initial(call.cut_states(g["dstarts"]), dfinal)
    elif g["dinitial"] is not None:
        dinitial = call.cut_states(g["dinitial"])
    return (
        call.cut_tokens(g["dx"]),
        call.cut_tokens(g["ddt"]),
        call.cut_states(dA),
        dB,
        dC,
        None if D is None else call.cut_channels(dD, 0),
        None if z is None else call.cut_tokens(g["dz"]),
        None if dt_bias is None else call.cut_channels(ddt_bias, 0),
        dinitial,
        None,
        None,
    )


def _scratch(call: ScanCall, dout: jax.Array) -> tuple[Scratch, dict[str, Any]]:
    """Shared memory, of which a multiprocessor has enough for two warpgroups, and barriers."""
    tile, scan = call.tile, call.scan
    recomputed = scan.per_unit > 1
    buffers = 1 if scan.warpgroups == 1 else _SUM_BUFFERS

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
    memory = call.scratch(most, of_chunks, resident=2)
    if scan.warpgroups == 1:
        return memory, {}
    return memory, {"summed": plgpu.Barrier(num_arrivals=scan.warpgroups, num_barriers=buffers)}


def _bwd_kernel(
    scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing, before: TokenRing | None = None
) -> None:
    block = BackwardBlock(scan, refs, smem, ring, before)
    at, tile = block.at, scan.tile
    dh = scan.zero_states()
    if refs.dfinal is not None:
        dh = once_read(scan.load_states(refs.dfinal.at[at.batch, at.channels]))
    if refs.passed is not None:  # the parts after this one, from the last to the first
        own, subparts = ScanBlock(scan), refs.total.shape[0]
        count = jnp.where(own.later > 0, subparts - own.part * scan.grid.subparts, 0)
        dh = fold(scan, refs, block.gradients.rate, count, lambda i: subparts - 1 - i, dh)
    block.fetch_unit(0, 0, 0)
    close_copies()
    init = 0, 0, 0, dh, scan.zero_states(), (zeros(), zeros()), (zeros(), zeros())
    carry = lax.fori_loop(0, block.units, block.run_unit, init)
    _, tiles, flushing, dh, dA, dD, ddt_bias = carry
    block.gradients.sums.finish(lambda: block.unit(block.units - 1)[0], flushing, tiles)
    scan.store_states(refs.dA.at[at.index, at.local], dA)
    for ref, (value, _) in ((refs.dD, dD), (refs.ddt_bias_sum, ddt_bias)):
        (total,) = sum_lanes([value], tile.over_steps)
        store(ref.at[at.index, at.local], [total], *tile.owned(step=0))
    if refs.dinitial is not None:

        @pl.when(at.part == 0)
        def _():
            scan.store_states(refs.dinitial.at[at.batch, at.channels], dh)


class BackwardBlock:
    """A block's work, unit by unit, tile by tile and chunk by chunk, all from the end.

    From unit to unit it carries the numbers of copies that its two rings have had, the number of
    chunks whose sums are still to be added up, and dh, dA and the sums for dD and ddt_bias.
    """

    def __init__(
        self, scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing, before: TokenRing | None
    ):
        self.scan, self.refs, self.smem, self.tile = scan, refs, smem, scan.tile
        self.ring, self.before = ring, before
        self.at = ScanBlock(scan)
        self.gradients = ChunkGradients(scan, refs, smem, self.at, ring.chunks)
        # With the state before every chunk saved, the whole part is one unit.
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

    def state_before(self, first: Any, c: Any) -> list[Registers]:
        """The state before chunk c, of the unit that begins with chunk `first`.

        A state saved by the forward is in the order of memory; the swap comes later.
        """
        if self.scan.per_unit == 1:
            return self.gradients.saved(c * CHUNK)
        ref = self.refs.chunk_states.at[self.at.index, c - first, self.at.warpgroup]
        states = self.tile.states
        flat = load_own(ref, 0, CHANNELS * states)
        return [flat[r * states :][:states] for r in range(CHANNELS)]

    def save_chunk_states(self, before: TokenRing, first: Any, count: Any, up: Any) -> Any:
        """Writes the state before every chunk of a unit, from the saved one before the unit."""
        scan, at = self.scan, self.at

        def save(c, h):
            ref = self.refs.chunk_states.at[at.index, c, at.warpgroup]
            store_own(ref, 0, [v for row in h for v in row])

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


# A chunk


class ChunkGradients:
    """The gradients of a chunk's steps, with the block's constants and memory."""

    def __init__(self, scan: ScanPlan, refs: Any, smem: Any, at: ScanBlock, chunks: int):
        self.scan, self.refs, self.smem, self.at, self.tile = scan, refs, smem, at, scan.tile
        self.rate, self.D, self.dt_bias = scan.constants(refs)
        # The state after the last step is not among those saved, nor any beyond the end.
        self.reads_all = scan.every < CHUNK and scan.length == scan.padded
        self.sums = ChannelSums(scan, refs, smem, at, chunks)

    def saved(self, token: Any) -> list[Registers]:
        """The saved state before a token, in the order of memory."""
        at = self.at
        return self.scan.load_unswapped(
            self.refs.states.at[at.batch, token // self.scan.every, at.channels]
        )

    def run_chunk(
        self, chunk: Steps, from_end: Any, n: Any, h: Any, load_following: Any, carry: Any
    ) -> Any:
        """Runs a chunk up, to the states before each step, and down with their gradients.

        It is number `from_end` from the end of the n-th tile.
        """
        dh, dA, dD, ddt_bias = carry
        own = self.share_chunk(chunk)
        load_up = self.load_up(chunk)
        before, weights, after = self.run_up(chunk, own, load_up, h)
        # In time for the next round, and not waited for together with this one's.
        following_h = load_following()
        dh, dA = jax.tree.map(lambda v: v, (dh, dA))
        into, ddecay = [], []  # Σ_n dh · B and Σ_n v · A · log2(e), [J · R]
        sum_dd = sum_ddt = None  # of the chunk
        load = self.load_down(chunk, load_up, weights)
        for step, loaded in _loaded_ahead(range(CHUNK)[::-1], load):
            reached = states_before(self.scan, self.refs, loaded[-1], before[step])
            dh, *sums = self.step_gradients(dh, dA, reached, after, loaded)
            dh = gradients_before(self.scan, self.refs, loaded[-1], dh)
            dB, dC, into_step, ddecay_step = sums
            after = before[step]
            self.sums.store(n, from_end, chunk.token, step, dB, dC)
            into, ddecay = into_step + into, ddecay_step + ddecay
            if step % self.tile.steps == 0:
                round = step // self.tile.steps
                x, _, _, dy, _ = own[round]
                ddt = self.write_round(chunk, round, own[round], into, ddecay)
                sum_dd, sum_ddt = _plus(sum_dd, dy * x), _plus(sum_ddt, ddt)
                into, ddecay = [], []
        return following_h, dh, dA, _add(dD, sum_dd), _add(ddt_bias, sum_ddt)

    def share_chunk(self, chunk: Steps) -> list[tuple[Any, ...]]:
        """Computes the values that a lane owns in each round, and shares what other lanes need.

        Returns of each round (x, dt, mask of dt's slope, dy, dout · y's share of dz).
        """
        own = []
        sync_warp()  # all lanes are done with the chunk before
        for round, x, raw, dout, z in chunk.all_owned("x", "dt", "dout", "z"):
            dt, inside = chunk.step_size(round, raw + self.dt_bias)
            silu, slope = (1.0, 0.0) if z is None else chunk.gate(z)
            dy = dout * silu
            chunk.share(self.smem.shared, round, [dt, dt * x])
            chunk.share(self.smem.dy, round, [dy])
            own.append((x, dt, inside, dy, dout * slope))
        sync_warp()
        return own

    def load_up(self, chunk: Steps) -> Callable[[int], Any]:
        """``load(step)`` for the way up: dt · x, B, C, keep, decays, and the state if saved."""

        def load(step):
            following = None
            if self.reads_all and step < CHUNK - 1:
                following = self.scan.swapped(self.saved(chunk.token + step + 1))
            dt, dtx = chunk.shared(self.smem.shared, step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, *weights, chunk.keep(step), decays(dt, self.rate), following

        return load

    def run_up(
        self, chunk: Steps, own: list[Any], load: Callable[[int], Any], h: Any
    ) -> tuple[list[Any], list[Any], list[Registers]]:
        """The states before each step, B and C of each, and the state after the chunk.

        Writes dz on the way, which needs y.
        """
        scan, refs, tile = self.scan, self.refs, self.tile
        ys, before, weights = [], [], []
        for step, (dtx, B, C, keep, decay, following) in _loaded_ahead(range(CHUNK), load):
            before.append(h)
            weights.append((B, C))
            h = following or advance(decay, dtx, B, states_before(scan, refs, keep, h))
            if refs.z is not None:
                ys += [dot(row, C) for row in h]
                if (step + 1) % tile.steps == 0:
                    round = step // tile.steps
                    x, *_, dsilu = own[round]
                    chunk.write(refs.dz, round, dsilu * (chunk.over_states(ys) + self.D * x))
                    ys = []
        return before, weights, h

    def load_down(self, chunk: Steps, load_up: Any, weights: list[Any]) -> Callable[[int], Any]:
        """``load(step)`` for the way down: dy, dt, dt · x, decays, B, C and keep."""
        keeps_weights = self.tile.states <= 4  # of a chunk, in registers; more would spill

        def load(step):
            # Further reads of dt and keep have the compiler not hold the decays of the way up, nor
            # whether segments begin: there are no registers for them.
            dt, dtx = chunk.shared(self.smem.shared, step, 2, volatile=True)
            B, C = weights[step] if keeps_weights else load_up(step)[1:3]
            keep = chunk.keep(step, volatile=True)
            dy = chunk.shared(self.smem.dy, step, 1)[0]
            return dy, dt, dtx, decays(dt, self.rate), B, C, keep

        return load

    def step_gradients(
        self, dh: Any, dA: Any, reached: Any, after: Any, loaded: Any
    ) -> tuple[Any, ...]:
        """dh before a step, and its dB, dC, Σ_n dh · B and Σ_n v · A · log2(e); adds to dA."""
        dy, dt, dtx, decay, B, C, _ = loaded
        dB, dC = [None] * self.tile.states, [None] * self.tile.states
        into, ddecay = [None] * CHANNELS, [None] * CHANNELS
        each = [(r, k) for r in range(CHANNELS) for k in range(self.tile.states)]
        for r, k in each:
            g = dh[r][k] + dy[r] * C[k]
            dB[k] = _plus(dB[k], g * dtx[r])
            dC[k] = _plus(dC[k], dy[r] * after[r][k])
            into[r] = _plus(into[r], g * B[k])
            g = g * decay[r][k]
            v = g * reached[r][k]
            ddecay[r] = _plus(ddecay[r], v * self.rate[r][k])
            dA[r][k] = dA[r][k] + v * dt[r]
            dh[r][k] = g
        return dh, dB, dC, into, ddecay

    def write_round(
        self, chunk: Steps, round: int, own: tuple[Any, ...], into: Any, ddecay: Any
    ) -> jax.Array:
        """Writes dx and ddt of a round, and returns ddt."""
        x, dt, inside, dy, _ = own
        into_own, ddecay_own = chunk.over_states(into), chunk.over_states(ddecay)
        chunk.write(self.refs.dx, round, dt * into_own + self.D * dy)
        ddt = ddecay_own * (1 / LOG2E) + x * into_own
        if self.scan.options.sizes.softplus:
            ddt = ddt * softplus_slope(dt, self.scan.exact)
        if inside is not None:
            ddt = jnp.where(inside, ddt, 0.0)
        chunk.write(self.refs.ddt, round, ddt)
        return ddt


def _loaded_ahead(steps: Sequence[int], load: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Yields (step, load(step)), each loaded before the step before it is worked on, and writes."""
    ahead = load(steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        now, ahead = ahead, None if following is None else load(following)
        yield step, now


def _plus(total: Any, value: jax.Array) -> Any:
    """total + value, where ``None`` is the sum of nothing yet."""
    return value if total is None else total + value


def _add(total: tuple[jax.Array, jax.Array], value: Any) -> tuple[jax.Array, jax.Array]:
    """Kahan's sum: the total, and the excess that rounding has added."""
    before, excess = total
    value = value - excess
    after = before + value
    return after, (after - before) - value


# The sums of dB and dC over channels, in a fixed order: of warps, of warpgroups, of blocks


class ChannelSums:
    """Sums of dB and dC over a block's channels, of the steps of a tile.

    Every warp stores its own sums in shared memory, and its block adds them up in order of the
    warps. A block of several warpgroups does so a tile later, so that none waits for the others.
    """

    def __init__(self, scan: ScanPlan, refs: Any, smem: Any, at: ScanBlock, chunks: int):
        self.scan, self.refs, self.smem, self.at = scan, refs, smem, at
        self.chunks = chunks  # of a tile
        self.steps = smem.sums.shape[1]  # in shared memory at a time
        size = LANES * scan.tile.sums
        self.mine = pl.ds(at.warpgroup * LANES * scan.tile.sums, size)

    def _buffer(self, n: Any) -> Any:
        return 0 if self.scan.warpgroups == 1 else lax.rem(n, _SUM_BUFFERS)

    def store(self, n: Any, from_end: Any, token: Any, step: int, dB: Any, dC: Any) -> None:
        """Stores this warp's sums of a step of the n-th tile.

        The step's chunk begins at `token` and is number `from_end` from the end of the tile.
        """
        tile = self.scan.tile
        pairs = [v for pair in zip(dB, dC, strict=True) for v in pair]
        sums = sum_lanes(pairs, tile.over_channels, swapped=len(tile.state_swaps))
        row = from_end * CHUNK + step if self.steps >= CHUNK else step % self.steps
        ref = self.smem.sums.at[self._buffer(n), row, self.mine]
        store(ref, sums, (1, LANES, tile.sums))
        if self.steps < CHUNK and row == 0:
            release_stage()
            self._write(token + step, self._of_warps(0, 0, self.steps))
            release_stage()

    def finish_tile(self, end: Any, chunks: Any, n: Any, flushing: Any) -> None:
        """Adds up the sums of the n-th tile, of `chunks` up to `end`.

        With several warpgroups, the sums of the `flushing` chunks of the previous tile instead.
        """
        if self.steps < CHUNK:
            return
        if self.scan.warpgroups == 1:
            release_stage()
            self._add_up(end, chunks, 0)
            return

        @pl.when(n > 0)
        def _():
            self._wait_and_add_up(end + flushing, flushing, n - 1)

        release_stage()
        plgpu.barrier_arrive(self.smem.summed.at[self._buffer(n)])

    def finish(self, end: Callable[[], Any], flushing: Any, n: Any) -> None:
        """Adds up the sums of the last tile, the n-th, if that was deferred."""
        if self.scan.warpgroups > 1:
            self._wait_and_add_up(end() + flushing, flushing, n - 1)

    def _wait_and_add_up(self, end: Any, chunks: Any, n: Any) -> None:
        plgpu.barrier_wait(self.smem.summed.at[self._buffer(n)])
        self._add_up(end, chunks, self._buffer(n))

    def _add_up(self, end: Any, chunks: Any, buffer: Any) -> None:
        """Adds up this warpgroup's steps of every chunk."""
        rows = CHUNK // self.scan.warpgroups
        mine = self.at.warpgroup * rows
        sums = [self._of_warps(buffer, k * CHUNK + mine, rows) for k in range(self.chunks)]
        for k, of_chunk in enumerate(sums):
            token = (end - 1 - k) * CHUNK + mine
            pl.when(k < chunks)(functools.partial(self._write, token, of_chunk))

    def _of_warps(self, buffer: Any, start: Any, rows: int) -> jax.Array:
        """The sums over all warps of some steps, (rows, 32 · sums)."""
        size = 32 * self.scan.tile.sums
        layout = plgpu.Layout.WG_STRIDED((rows, size), vec_size=min(2, rows * size // LANES))
        steps = self.smem.sums.at[buffer, pl.ds(start, rows)]
        warps = [
            plgpu.load(steps.at[:, pl.ds(size * w, size)], layout=layout, optimized=False)
            for w in range(self.scan.warpgroups * WARPS)
        ]
        return functools.reduce(jnp.add, warps)

    def _write(self, token: Any, sums: jax.Array) -> None:
        at = self.at
        self.refs.sums[at.block, at.batch, pl.ds(token, sums.shape[0])] = sums


def _sum_of_blocks(call: ScanCall, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, G, N), from the sums of each block: fixed order, fp32."""
    t, n = call.tile, call.states
    sums = sums.reshape(call.groups, call.scan.blocks_per_group, *sums.shape[1:])
    # In parts of less than 32 blocks: XLA shares out a sum of 32 or more terms to several threads,
    # which takes three times as long here as a thread for each sum does.
    size = -(-sums.shape[1] // -(-sums.shape[1] // 31))
    parts = [sums[:, i : i + size].sum(1) for i in range(0, sums.shape[1], size)]
    # (G, B, L, 32 · sums), lanes as in sum_lanes. XLA would add up all again for dB and for dC.
    total = lax.optimization_barrier(functools.reduce(jnp.add, parts))
    lanes = t.groups // t.low, t.lanes, t.low
    total = total.reshape(call.groups, call.batch, -1, *lanes, t.sums)[:, :, : call.length]
    total = jnp.moveaxis(total, 0, 2).swapaxes(3, 4)  # (B, L, G, S, …): of each state lane
    copies = t.groups * t.sums // (2 * t.states)
    total = total.reshape(*total.shape[:4], t.groups, t.sums)[:, :, :, :, ::copies]
    total = total.reshape(*total.shape[:4], t.states // t.pair, t.pair, 2).swapaxes(3, 4)
    total = total.reshape(*total.shape[:3], t.all_states, 2)
    return total[..., :n, 0], total[..., :n, 1]


# The carry of a part


def launch_device_bwd_carry(options: SelectiveScanOptions, dt, A, C, z, dt_bias, keep, dout) -> Any:
    """The sum of this device's steps, and the gradient of the state before its part."""
    if dout.size == 0:
        return reference_bwd_carry(options, dt, A, C, z, dt_bias, keep, dout)
    tile = backward_tile(A.shape[-1])
    call = ScanCall(options, tile, 1, 0, dt, dt, A, C, C, None, z, dt_bias, keep, None)
    rest = _carry_kernel, _CARRY_TOKENS, {"starts": None, "dends": None}
    return device_carry(call, A, _CARRY, *rest, reverse=True, dout=call.pad_tokens(dout))


def _carry_kernel(scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing) -> None:
    """The gradient before a subpart, from zeros after it.

    Σ_t C[t] · dy[t] · Π a over its steps up to t = Σ_t C[t] · dy[t] · exp(A · Σdt).
    """
    at, tile, grid = ScanBlock(scan), scan.tile, scan.grid
    first, count = scan.chunks_of_units(grid.start + at.first, grid.length)
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
        return jax.tree.map(jnp.add, dh, held)

    def run_chunk(c, steps, carry):
        dh, total = carry
        for _, (dt, dy, C, keep) in steps:
            add = functools.partial(add_decayed, total)
            dh = add_final_gradients(scan, refs, keep, add, dh)
            total = add_reset(total, keep, dt)
            dh = add_decayed(total, dh, [[d * c for c in C] for d in dy])
        return dh, total

    dh, total = ring.stream(first, count, run_tile, no_carry(scan))
    store_carry(scan, refs, total, dh)
