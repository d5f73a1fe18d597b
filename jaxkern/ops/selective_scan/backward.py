"""The backward kernel, and the kernel of the carry of a part's gradient.

A block goes from the end through units of the sequence, each from one saved state to the next. It
runs a unit up, and keeps the state before every group of a few steps in shared memory. Then it goes
through the groups from the end: up, with the states before the steps and the decays in registers,
and down with the gradients. So every decay is computed twice, and the saved states may lie up to
64 steps apart: keeping the decays of a unit in shared memory, or the state before its every step,
would cost more time there than the exponentials do.

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
    TileSpan,
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
from jaxkern.ops.selective_scan.tiles import CHANNELS, WARPS, apart, backward_grid, backward_tile

_CARRY, _CARRY_TOKENS = "selective_scan_bwd_carry", "dt z C keep crossed"


def launch_bwd(options: SelectiveScanOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients in the order of the arguments, sums in fp32, and perhaps the output."""
    *given, states, dout, dfinal = args
    x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed = given
    if x.size == 0:
        return reference_bwd(options, *args)
    f32 = jnp.float32
    if states is None:
        every = apart(RECOMPUTED_EVERY, A.shape[-1], x, dt, z)
        options = dataclasses.replace(options, checkpoint_every=every)
        _, _, states = launch_fwd(dataclasses.replace(options, final=False, save=True), *given)
    every = options.checkpoint_every
    assert every is not None
    tile = backward_tile(A.shape[-1])
    arrays = (x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    call = ScanCall(options, tile, every, *arrays)
    batch = call.batch
    grid = backward_grid(call.columns, -(-call.scan.chunks // call.scan.per_unit))
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
        "out": like(x) if options.output else None,
        "dinitial": call.states_like(batch) if starts and count is None else None,
        "dstarts": call.states_like(batch, count) if starts and count is not None else None,
    }
    g = call.run("selective_scan_bwd", _bwd_kernel, scan, ins, outs, _scratch(call, dout))
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
        call.cut_tokens(g["out"]) if options.output else None,
    )


def _scratch(call: ScanCall, dout: jax.Array) -> Scratch:
    """Shared memory, of which a multiprocessor has enough for two blocks."""
    tile, scan = call.tile, call.scan
    groups = scan.per_unit * CHUNK // tile.group

    def of_chunks(chunks: int) -> Scratch:
        added = CHUNK // 2 if tile.sums > 8 else CHUNK * min(chunks, 2)
        own = {
            "shared": shared_size(tile, CHUNK),
            "dy": (CHUNK * tile.row(1),),
            "before": (groups * CHANNELS * tile.states * LANES,),
            "sums": (added, LANES * tile.sums),
        }
        return Scratch([call.ring(chunks, "x dt z B C keep crossed", dout=dout)], own)

    most = scan.per_unit if scan.per_unit > 1 else scan.grid.length
    return call.scratch(min(scan.chunks, most), of_chunks, resident=2)


def _bwd_kernel(scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing) -> None:
    block = BackwardBlock(scan, refs, smem, ring)
    at, tile = block.at, scan.tile
    dh = scan.zero_states()
    if refs.dfinal is not None:
        dh = once_read(scan.load_states(refs.dfinal.at[at.batch, at.channels]))
    if refs.passed is not None:  # the parts after this one, from the last to the first
        own, subparts = ScanBlock(scan), refs.total.shape[0]
        count = jnp.where(own.later > 0, subparts - own.part * scan.grid.subparts, 0)
        dh = fold(scan, refs, block.gradients.rate, count, lambda i: subparts - 1 - i, dh)
    dh, dA, dD, ddt_bias = block.run(dh)
    scan.store_states(refs.dA.at[at.index], dA)
    for ref, (value, _) in ((refs.dD, dD), (refs.ddt_bias_sum, ddt_bias)):
        (total,) = sum_lanes([value], tile.over_steps)
        store(ref.at[at.index], [total], *tile.owned(step=0))
    if refs.dinitial is not None:

        @pl.when(at.part == 0)
        def _():
            scan.store_states(refs.dinitial.at[at.batch, at.channels], dh)


class BackwardBlock:
    """A block's work: stretches of its part from the end, tile by tile and chunk by chunk.

    A stretch is a unit or, where a unit is a chunk, a tile of them. The tiles of a unit come once
    for the way up, and once for the way down but for the last, which is there.
    """

    def __init__(self, scan: ScanPlan, refs: Any, smem: Any, ring: TokenRing):
        self.scan, self.refs, self.smem, self.ring = scan, refs, smem, ring
        self.at = ScanBlock(scan)
        self.gradients = ChunkGradients(scan, refs, smem, self.at)
        self.first, self.count = scan.chunks_of_units(self.at.first, self.at.units)
        self.of_units = scan.per_unit > 1
        self.length = scan.per_unit if self.of_units else ring.chunks  # of a stretch, in chunks
        self.stretches = lax.div(self.count + self.length - 1, self.length)

    def chunks(self, i: Any) -> tuple[Any, Any]:
        """First chunk and number of chunks of the i-th stretch from the end."""
        first = self.first + (self.stretches - 1 - i) * self.length
        return first, jnp.minimum(self.length, self.first + self.count - first)

    def span(self, i: Any, j: Any) -> TileSpan:
        """The j-th tile that the i-th stretch from the end takes: upwards, and down again."""
        first, count = self.chunks(i)
        from_end = 2 * self.ring.tiles(count) - 2 - j
        return self.ring.upward(first, count, jnp.minimum(j, from_end))

    def saved(self, chunk: Any) -> list[Registers]:
        """The saved state before a chunk, in the order of memory; at least the part's first."""
        token, at = jnp.maximum(chunk, self.first) * CHUNK, self.at
        states = self.refs.states.at[at.batch, token // self.scan.every, at.channels]
        return self.scan.load_unswapped(states)

    def run(self, dh: Any) -> Any:
        """Returns dh before the part, dA, and the sums for dD and ddt_bias."""
        self.ring.fetch(self.span(0, 0).start, 0)
        close_copies()
        first, count = self.chunks(0)
        saved = self.saved(first if self.of_units else first + count - 1)
        init = 0, saved, dh, self.scan.zero_states(), (zeros(), zeros()), (zeros(), zeros())
        return lax.fori_loop(0, self.stretches, self.run_stretch, init)[2:]

    def run_stretch(self, i: Any, carry: Any) -> Any:
        """Runs the i-th stretch from the end.

        It carries the number of copies before it, the saved state before the unit that comes next,
        dh, dA and the sums for dD and ddt_bias.
        """
        copies, saved, *carry = carry
        chunks = self.chunks(i)
        tiles = self.ring.tiles(chunks[1])
        taken = 2 * tiles - 1

        def run_tile(j, carry):
            release_stage()
            last = j + 1 == taken
            following = self.span(i + last, jnp.where(last, 0, j + 1))

            @pl.when(~last | (i + 1 < self.stretches))
            def _():
                self.ring.fetch(following.start, copies + j + 1)

            close_copies()
            self.ring.wait(copies + j)
            span = self.span(i, j)
            if not self.of_units:
                return self.run_down(span, copies + j, chunks, carry)
            down = lambda: self.run_down(span, copies + j, chunks, carry)
            if self.ring.chunks >= self.length:
                self.run_up(span, copies + j, chunks)
                return down()
            pl.when(j < tiles)(lambda: self.run_up(span, copies + j, chunks))
            return lax.cond(j + 1 >= tiles, down, lambda: carry)

        if not self.of_units:
            saved, *carry = lax.fori_loop(0, taken, run_tile, (saved, *carry))
            return copies + taken, saved, *carry
        self.gradients.keep(0, once_read(self.scan.swapped(saved)))
        following = self.saved(chunks[0] - self.length)  # on its way while this unit is worked on
        return copies + taken, following, *lax.fori_loop(0, taken, run_tile, tuple(carry))

    def run_up(self, span: TileSpan, n: Any, chunks: tuple[Any, Any]) -> None:
        """Runs the n-th copy's chunks up, but for the unit's last; keeps states before groups."""
        first, count = chunks

        def run(c, _):
            chunk = Steps(self.scan, self.ring.chunk(n, c), (span.start + c) * CHUNK)
            sync_warp()  # all lanes are done with the chunk before
            share_step_sizes(chunk, self.smem.shared, self.gradients.dt_bias)
            self.gradients.run_up(chunk, span.start + c - first, CHUNK)

        last = first + count - 1 - span.start
        lax.fori_loop(span.first, jnp.minimum(span.stop, last), run, None)

    def run_down(self, span: TileSpan, n: Any, chunks: tuple[Any, Any], carry: Any) -> Any:
        """Runs the n-th copy's chunks from the end."""
        gradients, (first, count) = self.gradients, chunks

        def run(k, carry):
            c = span.stop - 1 - k
            number, last, following = span.start + c - first, None, []
            chunk = Steps(self.scan, self.ring.chunk(n, c), (span.start + c) * CHUNK)
            if self.of_units:
                last = number == count - 1
            else:
                saved, *carry = carry
                gradients.keep(0, self.scan.swapped(saved))
                number, following = 0, [self.saved(span.start + c - 1)]
            run_chunk = lambda chunk: gradients.run_chunk(chunk, k, number, last, tuple(carry))
            if chunk.tokens.keep is None:
                carry = run_chunk(chunk)
            else:
                # Few chunks have a segment's first token; the others need not ask for it at each.
                within = chunk.within_a_segment()
                carry = lax.cond(
                    chunk.crosses(), lambda: run_chunk(chunk), lambda: run_chunk(within)
                )
            gradients.sums.finish_chunk(k, chunk.token, c == span.first)
            return *following, *carry

        return lax.fori_loop(0, span.stop - span.first, run, tuple(carry))


# A chunk


class ChunkGradients:
    """The gradients of a chunk's steps, with the block's constants and memory."""

    def __init__(self, scan: ScanPlan, refs: Any, smem: Any, at: ScanBlock):
        self.scan, self.refs, self.smem, self.at, self.tile = scan, refs, smem, at, scan.tile
        self.rate, self.D, self.dt_bias = scan.constants(refs)
        self.groups = CHUNK // self.tile.group
        self.needs_y = refs.z is not None or refs.out is not None
        self.sums = ChannelSums(scan, refs, smem, at)

    def _kept(self, group: Any) -> Any:
        size = CHANNELS * self.tile.states * LANES
        return self.smem.before.at[pl.ds(group * size, size)]

    def keep(self, group: Any, h: list[Registers]) -> None:
        """Keeps the state before a group of a unit."""
        store_own(self._kept(group), 0, [v for row in h for v in row])

    def kept(self, group: Any) -> list[Registers]:
        states = self.tile.states
        flat = load_own(self._kept(group), 0, CHANNELS * states)
        return [flat[r * states :][:states] for r in range(CHANNELS)]

    def run_up(self, chunk: Steps, number: Any, steps: int) -> None:
        """Runs the first steps of a unit's `number`-th chunk up; keeps the state after each group.

        The state before the chunk was kept.
        """
        first, group = number * self.groups, self.tile.group
        h, load = self.kept(first), self.load_up(chunk, "B", polynomials(self.tile))
        for step, (_, dtx, decay, (B,), keep) in _loaded_ahead(range(steps), load):
            h = advance(decay, dtx, B, states_before(self.scan, self.refs, keep, h))
            if (step + 1) % group == 0:
                self.keep(first + (step + 1) // group, h)

    def run_chunk(self, chunk: Steps, from_end: Any, number: Any, last: Any, carry: Any) -> Any:
        """Runs a unit's `number`-th chunk: each group from the last up, and down with gradients.

        It is number `from_end` from the end of its tile, and `last` says whether it is the unit's
        last, before whose groups states are still to be found; ``None`` where it surely is.
        """
        dh, dA, dD, ddt_bias = carry
        own, tile = self.share_chunk(chunk), self.tile
        up = lambda: self.run_up(chunk, number, CHUNK - tile.group)
        up() if last is None else pl.when(last)(up)
        dh, dA = jax.tree.map(lambda v: v, (dh, dA))
        ys, into, ddecay = [], [], []  # h · C, Σ_n dh · B and Σ_n v · A · log2(e), [J · R]
        sum_dd = sum_ddt = None  # of the chunk
        for group in reversed(range(self.groups)):
            steps = range(group * tile.group, (group + 1) * tile.group)
            h = self.kept(number * self.groups + group)
            before, held, after = self.run_group_up(chunk, steps, h)
            load = self.load_down(chunk)
            for step, (dy, keep) in _loaded_ahead(steps[::-1], load):
                *sizes, weights, y = held.pop()
                weights = weights or self.weights(chunk, "BC", step)
                reached = states_before(self.scan, self.refs, keep, before[-1])
                dh, *sums = self.step_gradients(dh, dA, reached, after, (dy, *sizes, weights))
                dh = gradients_before(self.scan, self.refs, keep, dh)
                dB, dC, into_step, ddecay_step = sums
                after = before.pop()
                self.sums.store(from_end, chunk.token, step, dB, dC)
                ys, into, ddecay = y + ys, into_step + into, ddecay_step + ddecay
                if step % tile.steps == 0:
                    round = step // tile.steps
                    x, _, _, dy, *_ = own[round]
                    ddt = self.write_round(chunk, round, own[round], ys, into, ddecay)
                    sum_dd, sum_ddt = _plus(sum_dd, dy * x), _plus(sum_ddt, ddt)
                    ys, into, ddecay = [], [], []
        return dh, dA, _add(dD, sum_dd), _add(ddt_bias, sum_ddt)

    def share_chunk(self, chunk: Steps) -> list[tuple[Any, ...]]:
        """Computes the values that a lane owns in each round, and shares what other lanes need.

        Returns of each round (x, dt, mask of dt's slope, dy, dout · y's share of dz, silu(z)).
        """
        own = []
        sync_warp()  # all lanes are done with the chunk before
        for round, x, raw, dout, z in chunk.all_owned("x", "dt", "dout", "z"):
            dt, inside = chunk.step_size(round, raw + self.dt_bias)
            silu, slope = (1.0, 0.0) if z is None else chunk.gate(z)
            dy = dout * silu
            chunk.share(self.smem.shared, round, [dt, dt * x])
            chunk.share(self.smem.dy, round, [dy])
            own.append((x, dt, inside, dy, dout * slope, silu))
        sync_warp()
        return own

    def weights(self, chunk: Steps, names: str, step: int) -> list[Registers]:
        return [chunk.weights(name, step) for name in names]

    def load_up(self, chunk: Steps, names: str, by_polynomial: int = 0) -> Callable[[int], Any]:
        """``load(step)`` for the way up: dt, dt · x, decays, B and perhaps C, and keep."""

        def load(step):
            dt, dtx = chunk.shared(self.smem.shared, step, 2)
            weights = self.weights(chunk, names, step)
            decay = decays(dt, self.rate, by_polynomial)
            return dt, dtx, decay, weights, chunk.keep(step)

        return load

    def run_group_up(self, chunk: Steps, steps: range, h: Any) -> tuple[list[Any], list[Any], Any]:
        """The states before each step of a group, what the way down needs of it, and the last.

        That is dt, dt · x, the decays, B and C or ``None``, and h · C where it is needed.
        """
        before, held = [], []
        holds_weights = self.tile.states <= 4  # in registers; more would spill
        for _, (dt, dtx, decay, weights, keep) in _loaded_ahead(steps, self.load_up(chunk, "BC")):
            before.append(h)
            B, C = weights
            h = advance(decay, dtx, B, states_before(self.scan, self.refs, keep, h))
            y = [dot(row, C) for row in h] if self.needs_y else []
            held.append((dt, dtx, decay, weights if holds_weights else None, y))
        return before, held, h

    def load_down(self, chunk: Steps) -> Callable[[int], Any]:
        """``load(step)`` for the way down: dy, and keep, which is read again.

        The compiler would hold whether segments begin: there are no registers for that.
        """
        return lambda step: (
            chunk.shared(self.smem.dy, step, 1)[0],
            chunk.keep(step, volatile=True),
        )

    def step_gradients(
        self, dh: Any, dA: Any, reached: Any, after: Any, loaded: Any
    ) -> tuple[Any, ...]:
        """dh before a step, and its dB, dC, Σ_n dh · B and Σ_n v · A · log2(e); adds to dA."""
        dy, dt, dtx, decay, (B, C) = loaded
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
        self, chunk: Steps, round: int, own: tuple[Any, ...], ys: Any, into: Any, ddecay: Any
    ) -> jax.Array:
        """Writes dz, perhaps the output, dx and ddt of a round, and returns ddt."""
        x, dt, inside, dy, dsilu, silu = own
        y = chunk.over_states(ys) + self.D * x if self.needs_y else None
        if self.refs.z is not None:
            chunk.write(self.refs.dz, round, dsilu * y)
        if self.refs.out is not None:
            chunk.write(self.refs.out, round, silu * y)
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


# The sums of dB and dC over channels, in a fixed order: of warps, of blocks


class ChannelSums:
    """Sums of dB and dC over a block's channels.

    Every warp stores its own sums of some steps in shared memory, and the block adds them up in
    order of the warps.
    """

    def __init__(self, scan: ScanPlan, refs: Any, smem: Any, at: ScanBlock):
        self.scan, self.refs, self.smem, self.at = scan, refs, smem, at
        self.steps = smem.sums.shape[0]  # in shared memory at a time
        self.chunks = max(1, self.steps // CHUNK)

    def store(self, from_end: Any, token: Any, step: int, dB: Any, dC: Any) -> None:
        """Stores this warp's sums of a step.

        The step's chunk begins at `token` and is number `from_end` from the end of the tile.
        """
        tile = self.scan.tile
        pairs = [v for pair in zip(dB, dC, strict=True) for v in pair]
        sums = sum_lanes(pairs, tile.over_channels, swapped=len(tile.state_swaps))
        row = lax.rem(from_end, self.chunks) * CHUNK + step
        if self.steps < CHUNK:
            row = step % self.steps
        store(self.smem.sums.at[row], sums, (1, LANES, tile.sums))
        if self.steps < CHUNK and row == 0:
            release_stage()
            self._write(token + step, self._of_warps(0, self.steps))
            release_stage()

    def finish_chunk(self, from_end: Any, token: Any, last: Any) -> None:
        """Adds up the sums that are there, where the next chunk has no room, or is of another tile.

        The chunk begins at `token`, and is the `last` of the tile, or not.
        """
        if self.steps < CHUNK:
            return
        number = lax.rem(from_end, self.chunks)

        @pl.when((number == self.chunks - 1) | last)
        def _():
            release_stage()
            sums = [self._of_warps(k * CHUNK, CHUNK) for k in range(self.chunks)]
            for k, of_chunk in enumerate(sums):
                first = token + (number - k) * CHUNK
                pl.when(k <= number)(functools.partial(self._write, first, of_chunk))
            release_stage()

    def _of_warps(self, start: int, rows: int) -> jax.Array:
        """The sums over all warps of some steps, (rows, 32 · sums)."""
        size = 32 * self.scan.tile.sums
        layout = plgpu.Layout.WG_STRIDED((rows, size), vec_size=min(2, rows * size // LANES))
        steps = self.smem.sums.at[pl.ds(start, rows)]
        warps = [
            plgpu.load(steps.at[:, pl.ds(size * w, size)], layout=layout, optimized=False)
            for w in range(WARPS)
        ]
        return functools.reduce(jnp.add, warps)

    def _write(self, token: Any, sums: jax.Array) -> None:
        at = self.at
        self.refs.sums[at.block, at.batch, pl.ds(token, sums.shape[0])] = sums


def _sum_of_blocks(call: ScanCall, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, G, N), from the sums of each block: fixed order, fp32."""
    t, n = call.tile, call.states
    sums = sums.reshape(call.groups, call.scan.blocks_per_group, *sums.shape[1:])
    # As additions: XLA shares out a reduction of 32 or more terms to several threads, which takes
    # three times as long here. And it would add up all again for dB and for dC.
    of_blocks = (sums[:, i] for i in range(sums.shape[1]))  # (G, B, L, 32 · sums) each
    total = lax.optimization_barrier(functools.reduce(jnp.add, of_blocks))  # lanes as in sum_lanes
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
    call = ScanCall(options, tile, 0, dt, dt, A, C, C, None, z, dt_bias, keep, None)
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
