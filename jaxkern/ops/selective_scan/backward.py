"""The backward kernel.

It runs every chunk of CHUNK steps up, from the state before it to those before each step, which
stay in registers, and down with their gradients. The decays are computed again on the way down:
keeping them, and the states in shared memory, would cost more time there than the exponentials do.
Where states were saved further apart than a chunk, the kernel first runs from one saved state to
the next and puts down the state before every chunk.

dA, dD and the gradient of dt_bias are sums of each part, dB and dC of each block, added up after
the kernel in a fixed order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E, softplus_slope
from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.lanes import sync_warp
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.segments import Seen
from jaxkern.ops.selective_scan.blocks import (
    Block,
    Call,
    FilledRing,
    Scan,
    fp32_array,
    map_states,
)
from jaxkern.ops.selective_scan.carry import fold_after, launch_carry, store_carry
from jaxkern.ops.selective_scan.forward import launch_fwd
from jaxkern.ops.selective_scan.reference import CHUNK, RECOMPUTED_EVERY, Options, reference_bwd
from jaxkern.ops.selective_scan.steps import (
    Steps,
    add_final_gradients,
    add_reset,
    advance,
    advance_chunks,
    decayed,
    decays,
    dot,
    gradients_before,
    over_chunks,
    polynomials,
    share_step_sizes,
    shared_chunk,
    shared_size,
    states_before,
    zero_states,
    zeros,
)
from jaxkern.ops.selective_scan.tiles import (
    WARPS,
    backward_grid,
    backward_tile,
    backward_warpgroups,
    tile_chunks,
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
    warpgroups = backward_warpgroups(tile, x.shape[-1], every)
    call = Call(options, tile, warpgroups, every, x, dt, A, B, C, D, z, dt_bias, keep, crossed)
    batch, per_unit = call.batch, call.scan.per_unit
    grid = backward_grid(call.columns, -(-call.scan.chunks // per_unit), warpgroups)
    count, dlast, of_segments = options.num_segments, dfinal, {}
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
        ins |= launch_carry(call, name, _bwd_carry_kernel, tokens, of_segments, dout=dout)
    rings, own, common = _bwd_scratch(call, dout)
    like = lambda v: jax.ShapeDtypeStruct(call.arrays["x"].shape, v.dtype)
    outs = {
        "dx": like(x),
        "ddt": like(dt),
        "dA": call.per_block(grid.count),
        "sums": fp32_array(call.blocks, batch, call.scan.padded, 32 * tile.sums),
        "dD": fp32_array(grid.count, call.width),
        "ddt_bias_sum": fp32_array(grid.count, call.width),
    }
    if z is not None:
        outs["dz"] = like(z)
    if initial_state is not None:
        name = "dinitial" if count is None else "dstarts"
        outs[name] = call.states_like(*initial_state.shape[: 1 if count is None else 2])
    if per_unit > 1:
        size = tile.channels * tile.states * LANES
        outs["chunk_states"] = fp32_array(grid.count, per_unit, warpgroups, size)
    name = "selective_scan_bwd"
    g = call.run(name, _bwd_kernel, scan, ins, outs, rings, own, common)
    dB, dC = _sums(call, g["sums"])
    dA, dD, ddt_bias = (call.sum_over_parts(g[name]) for name in ("dA", "dD", "ddt_bias_sum"))
    dinitial = None
    if "dstarts" in g:
        dinitial = seen.initial(call.cut_states(g["dstarts"]), dfinal)
    elif "dinitial" in g:
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


def _bwd_scratch(call: Call, dout: jax.Array) -> tuple[Any, Any, Any]:
    """The rings, the shared memory of a warpgroup, and that of the block.

    As many chunks at a time as there is room for, two warpgroups on a multiprocessor.
    """
    tile, scan = call.tile, call.scan
    per_unit = scan.per_unit
    chunks = tile_chunks(min(scan.chunks, per_unit if per_unit > 1 else scan.grid.length))
    buffers = 1 if scan.warpgroups == 1 else _SUM_BUFFERS
    while True:
        steps = chunks * CHUNK
        rings = [call.ring("", chunks, "x dt z B C keep crossed", dout=dout)]
        if per_unit > 1:
            rings.append(call.ring("before_", chunks, "x dt B keep crossed"))
        own = {
            "shared": shared_size(tile, steps if per_unit > 1 else CHUNK),
            "dy": (CHUNK * tile.row(1),),
        }
        sum_steps = steps if chunks > 1 or tile.sums <= 8 else CHUNK // 2
        sums = buffers, sum_steps, scan.warpgroups * LANES * tile.sums
        size = sum(ring.bytes() for ring in rings) + 4 * math.prod(sums) // scan.warpgroups
        size += 4 * sum(math.prod(shape) for shape in own.values())
        if chunks == 1 or size <= _ROOM:
            break
        chunks //= 2
    common: dict[str, Any] = {"sums": plgpu.SMEM(sums, jnp.float32)}
    if scan.warpgroups > 1:
        common["summed"] = plgpu.Barrier(num_arrivals=scan.warpgroups, num_barriers=buffers)
    return rings, own, common


_ROOM = 110 * 1024
"""Bytes of shared memory for a warpgroup of two."""

_SUM_BUFFERS = 3
"""One that a warpgroup fills, one that it adds up, and one that the other may still add up."""


def _sums(call: Call, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, G, N), from the sums of each block: fixed order, fp32."""
    t, n = call.tile, call.states
    sums = sums.reshape(call.groups, call.scan.blocks_per_group, *sums.shape[1:])
    # (G, B, L, 32 · sums), lanes as in sum_lanes. XLA would add up all again for dB and for dC.
    total = lax.optimization_barrier(sums.sum(1))
    lanes = t.groups // t.low, t.lanes, t.low
    total = total.reshape(call.groups, call.batch, -1, *lanes, t.sums)[:, :, : call.length]
    total = jnp.moveaxis(total, 0, 2).swapaxes(3, 4)  # (B, L, G, S, …): of each state lane
    copies = t.groups * t.sums // (2 * t.states)
    total = total.reshape(*total.shape[:4], t.groups, t.sums)[:, :, :, :, ::copies]
    total = total.reshape(*total.shape[:4], t.states // t.pair, t.pair, 2).swapaxes(3, 4)
    total = total.reshape(*total.shape[:3], t.all_states, 2)
    return total[..., :n, 0], total[..., :n, 1]


def _chunks_of_part(scan: Scan, first: Any, units: Any) -> tuple[Any, Any]:
    """The first chunk of `units` of the backward, and how many there are."""
    first = first * scan.per_unit
    return first, jnp.minimum(units * scan.per_unit, scan.chunks - first)


def _bwd_carry_kernel(scan: Scan, refs: Any, smem: Any, ring: FilledRing) -> None:
    """The gradient before a subpart, from zeros after it.

    Σ_t C[t] · dy[t] · Π a over its steps up to t = Σ_t C[t] · dy[t] · exp(A · Σdt).
    """
    at, tile, grid = Block(scan), scan.tile, scan.grid
    first, count = _chunks_of_part(scan, at.first + grid.left_out * grid.length, grid.length)
    rate, _, dt_bias = scan.constants(refs)

    def run_tile(turn, span, carry):
        steps = Steps(scan, ring.tile(turn), span.start * CHUNK, ring.steps)
        for round, raw, dout, z in steps.all_owned("dt", "dout", "z"):
            dt, _ = steps.step_size(round, raw + dt_bias)
            dy = dout if z is None else dout * steps.gate(z)[0]
            steps.share(smem.shared, round, [dt, dy])
        sync_warp()

        def load(c, step):
            chunk = Steps(scan, ring.chunk(turn, c), (span.start + c) * CHUNK)
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

    init = zero_states(scan), [zeros() for _ in range(tile.channels)]
    dh, total = ring.stream(first, count, run_tile, init)
    store_carry(scan, refs, total, dh)


def _loaded_ahead(steps: Sequence[int], load: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """(step, load(step)), each loaded before the step before it is worked on, and writes."""
    ahead = load(steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        now, ahead = ahead, None if following is None else load(following)
        yield step, now


def _nones(count: int) -> list[Any]:
    """Sums of nothing yet, for :func:`_plus`."""
    return [None] * count


def _plus(total: Any, value: jax.Array) -> jax.Array:
    return value if total is None else total + value


def _add(total: tuple[jax.Array, jax.Array], value: Any) -> tuple[jax.Array, jax.Array]:
    """Kahan's sum: the total, and what rounding it has added too much."""
    before, excess = total
    value = value - excess
    after = before + value
    return after, (after - before) - value


def _bwd_kernel(
    scan: Scan, refs: Any, smem: Any, ring: FilledRing, before: FilledRing | None = None
) -> None:
    at, tile = Block(scan), scan.tile
    per_unit, per_tile = scan.per_unit, ring.chunks
    sum_steps = smem.sums.shape[1]
    each = [(r, k) for r in range(tile.channels) for k in range(tile.states)]
    keeps_weights = tile.states <= 4  # of a chunk, in registers; more would spill
    rate, D, dt_bias = scan.constants(refs)
    if per_unit > 1:
        units = at.units
    else:  # the state before every chunk was saved, and the whole segment is one unit
        units = 1
    # The state after the last step is not among those saved, nor any beyond the end.
    read_all = scan.every < CHUNK and scan.length == scan.padded

    def unit(i):
        """First chunk and number of chunks of the i-th unit from the segment's end."""
        if per_unit == 1:
            return _chunks_of_part(scan, at.first, at.units)
        first = (at.first + units - 1 - i) * per_unit
        return first, jnp.minimum(per_unit, scan.chunks - first)

    def fetch_unit(i, up, down):
        first, count = unit(i)
        if before is not None:
            start = before.upward(first, count - 1, 0).start
            pl.when(count > 1)(functools.partial(before.fetch, start, up))

        fetch_below(first + count, down)

    def fetch_below(end, turn):
        ring.fetch(start_below(end), turn)

    def start_below(end):
        """Of the tile that ends before chunk `end`, or with the sequence's first tile."""
        return jnp.maximum(end - per_tile, 0)

    def run_unit(i, carry):
        up, down, flushing, *carry = carry
        first, count = unit(i)
        if before is not None:
            up = save_chunk_states(before, first, count, up)

        def state_before(c):
            if per_unit == 1:
                return unswapped(c * CHUNK)
            of_unit = refs.chunk_states.at[at.index, c - first, at.warpgroup]
            flat = scan.load_lane(of_unit, 0, len(each))
            return [flat[r * tile.states :][: tile.states] for r in range(tile.channels)]

        tiles = ring.tiles(count)

        def run_tile(j, carry):
            flushing, carry = carry[0], carry[1:]
            plgpu.commit_smem()  # all lanes are done with the other slot
            end, turn = first + count - j * per_tile, down + j

            @pl.when(j + 1 < tiles)
            def _():
                fetch_below(end - per_tile, turn + 1)

            @pl.when((j + 1 == tiles) & (i + 1 < units))
            def _():
                fetch_unit(i + 1, up, turn + 1)

            ring.wait(turn)
            start, chunks = start_below(end), jnp.minimum(per_tile, end - first)

            def run(k, carry):
                h, *carry = carry
                h = scan.swapped(h) if per_unit == 1 else h
                c = end - 1 - k
                chunk = Steps(scan, ring.chunk(turn, c - start), c * CHUNK)
                following = lambda: state_before(jnp.maximum(c - 1, first))
                return run_chunk(chunk, k, turn, h, following, carry)

            carry = lax.fori_loop(0, chunks, run, carry)
            if sum_steps >= CHUNK:
                write_sums(end, chunks, turn, flushing)
            return chunks, *carry

        init = (flushing, state_before(first + count - 1), *carry)
        flushing, _, *carry = lax.fori_loop(0, tiles, run_tile, init)
        return up, down + tiles, flushing, *carry

    def save_chunk_states(before, first, count, up):
        """The state before every chunk of the unit, from the saved one."""
        h = once_read(saved(first * CHUNK))
        put = lambda c, h: scan.store_lane(
            refs.chunk_states.at[at.index, c, at.warpgroup], 0, [v for row in h for v in row]
        )
        put(0, h)

        tiles = before.tiles(count - 1)

        def run_tile(i, h):
            plgpu.commit_smem()

            @pl.when(i + 1 < tiles)
            def _():
                before.fetch(before.upward(first, count - 1, i + 1).start, up + i + 1)

            before.wait(up + i)
            span = before.upward(first, count - 1, i)
            token = span.start * CHUNK
            steps = Steps(scan, before.tile(up + i), token, before.steps)
            share_step_sizes(steps, smem.shared, dt_bias)

            def at_chunk(c):
                chunk = Steps(scan, before.chunk(up + i, c), token + c * CHUNK)
                return chunk, shared_chunk(smem, tile, c)

            after = lambda c, h: put(span.start + c + 1 - first, h)
            h, _ = advance_chunks(scan, refs, span, before.chunks, at_chunk, rate, h, after=after)
            return h

        lax.fori_loop(0, tiles, run_tile, h)
        return up + tiles

    def run_chunk(chunk, from_end, turn, h, load_following, carry):
        """Up, to the states before each step, and down with their gradients.

        Before the end of its tile there are `from_end` other chunks.
        """
        dh, dA, dD, ddt_bias = carry
        gated = refs.z is not None
        own = []
        sync_warp()  # all lanes are done with the chunk before
        for round, x, raw, dout, z in chunk.all_owned("x", "dt", "dout", "z"):
            dt, inside = chunk.step_size(round, raw + dt_bias)
            silu, slope = chunk.gate(z) if gated else (1.0, 0.0)
            dy = dout * silu
            chunk.share(smem.shared, round, [dt, dt * x])
            chunk.share(smem.dy, round, [dy])
            own.append((x, dt, inside, dy, dout * slope))
        sync_warp()

        def load(step):
            following = saved(chunk.token + step + 1) if read_all and step < CHUNK - 1 else None
            dt, dtx = chunk.shared(smem.shared, step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, *weights, chunk.keep(step), decays(dt, rate), following

        parts, before, passed = [], [], []
        for step, loaded in _loaded_ahead(range(CHUNK), load):
            dtx, B, C, keep, decay, following = loaded
            before.append(h)
            passed.append((dtx, B, C, keep))
            h = following or advance(decay, dtx, B, states_before(scan, refs, keep, h))
            if gated:
                parts += [dot(row, C) for row in h]
                if (step + 1) % tile.steps == 0:
                    round = step // tile.steps
                    x, *_, dsilu = own[round]
                    chunk.write(refs.dz, round, dsilu * (chunk.over_states(parts) + D * x))
                    parts = []

        # In time for the next round, and not waited for together with this one's.
        following_h = load_following()

        def load_down(step):
            # Another read of dt keeps the compiler from keeping the decays of the way up, for
            # which there are no registers.
            dt, dtx = chunk.shared(smem.shared, step, 2, volatile=True)
            _, B, C, keep = passed[step] if keeps_weights else load(step)[:4]
            return chunk.shared(smem.dy, step, 1)[0], dt, dtx, decays(dt, rate), B, C, keep

        after = h
        dh, dA = map_states(lambda v: v, (dh, dA))
        into, ddecay = [], []  # Σ_n dh · B and Σ_n v · A · log2(e), [J · R]
        of_chunk = _nones(2)  # the sums for dD and ddt_bias
        for step, loaded in _loaded_ahead(range(CHUNK)[::-1], load_down):
            dy, dt, dtx, decay, B, C, keep = loaded
            reached = states_before(scan, refs, keep, before[step])
            dB, dC = _nones(tile.states), _nones(tile.states)
            into_step, ddecay_step = _nones(tile.channels), _nones(tile.channels)
            for r, k in each:
                g = dh[r][k] + dy[r] * C[k]
                dB[k] = _plus(dB[k], g * dtx[r])
                dC[k] = _plus(dC[k], dy[r] * after[r][k])
                into_step[r] = _plus(into_step[r], g * B[k])
                g = g * decay[r][k]
                v = g * reached[r][k]
                ddecay_step[r] = _plus(ddecay_step[r], v * rate[r][k])
                dA[r][k] = dA[r][k] + v * dt[r]
                dh[r][k] = g
            dh, after = gradients_before(scan, refs, keep, dh), before[step]
            pairs = [v for pair in zip(dB, dC, strict=True) for v in pair]
            sums = scan.sum(pairs, tile.over_channels, swapped=len(tile.state_swaps))
            row = from_end * CHUNK + step if sum_steps >= CHUNK else step % sum_steps
            scan.store(smem.sums.at[sum_buffer(turn), row, my_sums], sums, (1, LANES, tile.sums))
            if sum_steps < CHUNK and row == 0:
                plgpu.commit_smem()
                write_rows(chunk.token + step, sums_of_warps(0, 0, sum_steps))
                plgpu.commit_smem()
            into, ddecay = into_step + into, ddecay_step + ddecay
            if step % tile.steps == 0:
                round = step // tile.steps
                x, dt, inside, dy, _ = own[round]
                into, ddecay = chunk.over_states(into), chunk.over_states(ddecay)
                chunk.write(refs.dx, round, dt * into + D * dy)
                ddt = ddecay * (1 / LOG2E) + x * into
                if scan.options.dt_softplus:
                    ddt = ddt * softplus_slope(dt, scan.exact)
                if inside is not None:
                    ddt = jnp.where(inside, ddt, 0.0)
                chunk.write(refs.ddt, round, ddt)
                of_chunk = [_plus(of_chunk[0], dy * x), _plus(of_chunk[1], ddt)]
                into, ddecay = [], []
        return following_h, dh, dA, _add(dD, of_chunk[0]), _add(ddt_bias, of_chunk[1])

    def unswapped(token):
        return scan.load_unswapped(refs.states.at[at.batch, token // scan.every, at.channels])

    def saved(token):
        return scan.swapped(unswapped(token))

    my_sums = pl.ds(at.warpgroup * LANES * tile.sums, LANES * tile.sums)

    def sum_buffer(turn):
        return 0 if scan.warpgroups == 1 else lax.rem(turn, _SUM_BUFFERS)

    def write_sums(end, chunks, turn, flushing):
        """Adds the sums over each warp's channels, in order of the warps: of `chunks` up to `end`.

        A block of several warpgroups does so a tile later, for the `flushing` chunks of that one:
        none has to wait for the others.
        """
        if scan.warpgroups == 1:
            plgpu.commit_smem()
            add_sums(end, chunks, 0)
            return

        @pl.when(turn > 0)
        def _():
            add_others_sums(end + flushing, flushing, turn - 1)

        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.summed.at[sum_buffer(turn)])

    def add_others_sums(end, chunks, turn):
        plgpu.barrier_wait(smem.summed.at[sum_buffer(turn)])
        add_sums(end, chunks, sum_buffer(turn))

    def add_sums(end, chunks, buffer):
        rows = CHUNK // scan.warpgroups
        mine = at.warpgroup * rows
        sums = [sums_of_warps(buffer, k * CHUNK + mine, rows) for k in range(per_tile)]
        for k, rows in enumerate(sums):
            token = (end - 1 - k) * CHUNK + mine
            pl.when(k < chunks)(functools.partial(write_rows, token, rows))

    def sums_of_warps(buffer, start, rows):
        size = 32 * tile.sums
        layout = plgpu.Layout.WG_STRIDED((rows, size), vec_size=min(2, rows * size // LANES))
        part = smem.sums.at[buffer, pl.ds(start, rows)]
        warps = [
            plgpu.load(part.at[:, pl.ds(size * w, size)], layout=layout, optimized=False)
            for w in range(scan.warpgroups * WARPS)
        ]
        return functools.reduce(jnp.add, warps)

    def write_rows(token, rows):
        refs.sums[at.block, at.batch, pl.ds(token, rows.shape[0])] = rows

    dh = zero_states(scan)
    if refs.dfinal is not None:
        dh = once_read(scan.load_states(refs.dfinal.at[at.batch, at.channels]))
    if refs.passed is not None:
        dh = fold_after(scan, refs, rate, dh)
    fetch_unit(0, 0, 0)
    init = 0, 0, 0, dh, zero_states(scan), (zeros(), zeros()), (zeros(), zeros())
    _, turns, flushing, dh, dA, dD, ddt_bias = lax.fori_loop(0, units, run_unit, init)
    if scan.warpgroups > 1:
        add_others_sums(unit(units - 1)[0] + flushing, flushing, turns - 1)
    scan.store_states(refs.dA.at[at.index, at.local], dA)
    for ref, (value, _) in ((refs.dD, dD), (refs.ddt_bias_sum, ddt_bias)):
        (total,) = scan.sum([value], tile.over_steps)
        scan.store(ref.at[at.index, at.local], [total], *tile.owned(step=0))
    if refs.dinitial is not None:

        @pl.when(at.part == 0)
        def _():
            scan.store_states(refs.dinitial.at[at.batch, at.channels], dh)
