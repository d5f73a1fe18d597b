"""The backward kernel, the sum of its partial sums, and their launches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.ring import release_stage
from jaxkern.ops.causal_conv1d.blocks import BLOCK, UNROLL, WARPGROUP, Filter, prepare
from jaxkern.ops.causal_conv1d.reference import last_inputs, of_last_segment, reference_bwd
from jaxkern.ops.causal_conv1d.tiles import Options, backward_tiles


def launch_bwd(options: Options, x, weight, bias, state, look_back, dout, dfinal) -> Any:
    """dx (B, L, D), dweight (D, W), dbias (D,) and dstate (B, W − 1, D)."""
    if x.size == 0:
        return reference_bwd(options, x, weight, bias, state, look_back, dout, dfinal)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = backward_tiles(batch, length, dim, width, x.dtype.itemsize)
    read = None if width == 1 else state
    arrays = {"x": x, "weight": weight, "bias": bias, "state": read, "look_back": look_back}
    of_tokens = None
    if dfinal is not None and 0 < width - 1 <= length:
        of_tokens = of_last_segment(dfinal, look_back, length)
    call, ins = prepare(options, tile, width - 1, **arrays, dout=dout, dfinal=of_tokens)
    blocks = -(-batch * call.tiles // (tile.warpgroups * tile.tiles_each))
    totals = width + (bias is not None)
    fp32 = lambda *shape: jax.ShapeDtypeStruct((*shape, call.dim), jnp.float32)
    smem = call.scratch(x=x, dout=dout)
    threads: dict[str, Any] = {}
    if tile.warpgroups > 1:
        threads = {"num_threads": tile.warpgroups, "thread_name": WARPGROUP}
        smem["sums"] = plgpu.SMEM((tile.warpgroups - 1, totals, call.size), jnp.float32)
        smem["summed"] = plgpu.Barrier(num_arrivals=tile.warpgroups - 1)
    got = launch_named(
        lambda refs, smem: _bwd_kernel(call, tile.tiles_each, refs, smem),
        ins,
        {
            "dx": jax.ShapeDtypeStruct((batch, length, call.dim), x.dtype),
            "sums": fp32(-(-blocks // _SHARES) * _SHARES, totals),
            "dstate": None if read is None else fp32(batch, width - 1),
        },
        smem,
        grid=(call.columns * blocks,),
        grid_names=(BLOCK,),
        **threads,
        kernel_name="causal_conv1d_bwd",
        approx_math=True,
    )
    dweight, dbias = _sum_blocks(call, got["sums"], blocks, weight.dtype, bias)
    dstate = None if state is None else jnp.zeros_like(state)
    if read is not None:
        dstate = got["dstate"][..., :dim].astype(read.dtype)
    dx = got["dx"][..., :dim]
    if dfinal is not None and length < width - 1:
        last = lambda x, state: last_inputs(options, x, width, state, look_back)
        of_last = jax.vjp(last, x, state)[1](dfinal)
        dx, dstate = jax.tree.map(lambda a, b: a + b.astype(a.dtype), (dx, dstate), of_last)
    return dx, dweight[:dim], None if dbias is None else dbias[:dim], dstate


def _bwd_kernel(call: Filter, tiles_each: int, refs: Any, smem: Any) -> None:
    before = call.width - 1
    block, channels = call.block()
    warpgroup = call.warpgroup()
    zero = call.full(0.0)
    loaded = call.taps(refs, channels)

    def run_tile(index, sums):
        tile = batch, first, is_last = call.tile(index)

        def begin():
            taps = once_read((call.history(refs, batch, first, channels), loaded))
            return *taps, (zero,) * before, sums

        if tiles_each > 1:
            release_stage()
        run = functools.partial(_run_tokens, call, refs, zero, batch, first, channels)
        _, _, dxs, sums = call.stream(refs, smem, ("x", "dout"), tile, channels, begin, run)

        @pl.when(is_last)
        def _():
            for k, dx in enumerate(dxs):
                t = call.length - before + k
                if t >= 0:
                    if refs.dfinal is not None:
                        dx = dx + call.load(refs.dfinal.at[batch, k, channels])
                    refs.dx[batch, t, channels] = dx.astype(refs.dx.dtype)
                elif refs.state is not None:
                    refs.dstate[batch, before + t, channels] = dx

        return sums

    tiles = refs.x.shape[0] * call.tiles
    per_block = call.warpgroups * tiles_each
    start = block * per_block + warpgroup
    sums = (zero,) * call.width, zero
    if tiles_each == 1 and tiles % per_block == 0:
        sums = run_tile(start, sums)
    else:
        stop = jnp.minimum(block * per_block + per_block, tiles)
        count = lax.div(stop - start + call.warpgroups - 1, call.warpgroups)
        next_tile = lambda i, sums: run_tile(start + i * call.warpgroups, sums)
        sums = lax.fori_loop(0, count, next_tile, sums)
    dweight, dbias = sums
    totals = [*dweight, *([] if refs.bias is None else [dbias])]
    _write_sums(call, refs, smem, block, channels, warpgroup, totals)


def _run_tokens(
    call: Filter, refs: Any, zero, batch, first, channels, t, rows, in_halo, carry
) -> Any:
    """Token t adds its ds to the dx of the tokens t − (W − 1) … t; the first is complete.

    Those of the tile before are not: they get theirs from that one's halo.
    """
    before = call.width - 1
    inputs, (weights, bias), dxs, (dweight, dbias) = carry
    count, early = len(rows["x"]), []
    look_backs = call.look_backs(refs, batch, t, count)
    tokens = zip(rows["x"], rows["dout"], look_backs, strict=True)
    for u, (x, dout, look_back) in enumerate(tokens):
        taps = [*inputs, x]
        inputs = tuple(taps[1:])
        seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
        ds = dout
        if call.activation == "silu":
            s = call.sum(seen, weights, bias)
            gate = sigmoid(s, call.exact)
            ds = ds * (gate + gate * (s - s * gate))
        if not in_halo:
            dweight = tuple(d + ds * v for d, v in zip(dweight, seen, strict=True))
            dbias = dbias + ds
        dxs = [d + call.sees(look_back, ds, w) * weights[w] for w, d in enumerate((*dxs, zero))]
        if in_halo or u >= before:
            refs.dx[batch, t + u - before, channels] = dxs[0].astype(refs.dx.dtype)
        else:
            early.append((t + u, dxs[0]))
        dxs = tuple(dxs[1:])
    for group in [early] if count >= before else [[token] for token in early]:
        if group:
            _write_early(call, refs, batch, first, channels, group)
    return inputs, (weights, bias), dxs, (dweight, dbias)


def _write_early(call: Filter, refs: Any, batch, first, channels, tokens) -> None:
    """Writes the dx that `tokens` complete: all of this tile, or of the initial state, or of none.

    All of them, (t, dx), are a tile's first tokens, or none is.
    """
    before = call.width - 1
    last, _ = tokens[-1]

    @pl.when(last - before >= first)
    def _():
        for t, dx in tokens:
            refs.dx[batch, t - before, channels] = dx.astype(refs.dx.dtype)

    if refs.state is not None:

        @pl.when(last < before)
        def _():
            for t, dx in tokens:
                refs.dstate[batch, t, channels] = dx


def _write_sums(call: Filter, refs: Any, smem: Any, block, channels, warpgroup, totals) -> None:
    """Writes the block's sums for dweight and dbias, its warpgroups' added up in their order."""

    def write():
        others = () if call.warpgroups == 1 else range(call.warpgroups - 1)
        for i, total in enumerate(totals):
            for k in others:
                total = total + call.load(smem.sums.at[k, i])
            refs.sums[block, i, channels] = total

    if call.warpgroups == 1:
        write()
        return

    @pl.when(warpgroup > 0)
    def _():
        for i, total in enumerate(totals):
            smem.sums[warpgroup - 1, i] = total
        plgpu.barrier_arrive(smem.summed)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(smem.summed)
        write()


_SHARES = 16
"""Groups of lanes that share the blocks' partial sums among them."""


def _sum_blocks(call: Filter, sums: jax.Array, count: int, dtype: Any, bias: Any) -> Any:
    """dweight (D, W) and, where there is a bias, dbias (D,): the sums of the first `count` blocks.

    One small kernel. XLA takes two: a sum, and another for the order of dweight.
    """
    totals = sums.shape[1]
    got = launch_named(
        lambda refs, smem: _sum_kernel(call, count, totals, refs, smem),
        {"sums": sums.reshape(-1)},
        {
            "dweight": jax.ShapeDtypeStruct((call.dim * call.width,), dtype),
            "dbias": None if bias is None else jax.ShapeDtypeStruct((call.dim,), bias.dtype),
        },
        {"totals": plgpu.SMEM((totals, LANES), jnp.float32)},
        grid=(-(-call.dim // (LANES // _SHARES)),),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_sum",
        approx_math=True,
    )
    return got["dweight"].reshape(call.dim, call.width), got["dbias"]


def _sum_kernel(call: Filter, count: int, totals: int, refs: Any, smem: Any) -> None:
    """A lane adds up every 16th block's sum of one channel; then the sums of 16 lanes are added."""
    columns = LANES // _SHARES
    first = jnp.minimum(lax.axis_index(BLOCK) * columns, call.dim - columns)
    of_block = totals * call.dim
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=ROW)
    zero = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)

    def add(j, sums):
        """Adds the sums of the blocks from 16 · j on."""
        offsets = LaneOffsets(((1, columns, 1), (columns, _SHARES, of_block)))
        span = (_SHARES - 1) * of_block + columns
        added = []
        for i, total in enumerate(sums):
            at = refs.sums.at[pl.ds(j * _SHARES * of_block + i * call.dim + first, span)]
            (value,) = load_lanes(at, offsets)
            if isinstance(j, int) and (j + 1) * _SHARES > count:
                value = jnp.where(lane < (count - j * _SHARES) * columns, value, zero)
            added.append(total + value)
        return tuple(added)

    def group(g, sums):
        for u in range(UNROLL):
            sums = add(g * UNROLL + u, sums)
        return sums

    groups = count // (_SHARES * UNROLL)
    sums = lax.fori_loop(0, groups, group, (zero,) * totals)
    for j in range(groups * UNROLL, -(-count // _SHARES)):
        sums = add(j, sums)
    channel = LaneOffsets(((1, columns, 1),))
    within = [d for d in (1, 2, 4, 8, 16) if d >= columns]
    for i, total in enumerate(sums):
        (of_warp,) = sum_lanes([total], within)
        every = LaneOffsets(((1, LANES, 1),))
        store_lanes(smem.totals.at[i], every, [of_warp])
    release_stage()
    for i in range(totals):
        of_warps = [
            load_lanes(smem.totals.at[i], dataclasses.replace(channel, start=start))[0]
            for start in range(0, LANES, 32)
        ]
        total = functools.reduce(jnp.add, of_warps)
        if i < call.width:
            at = refs.dweight.at[pl.ds(first * call.width, columns * call.width)]
            to = LaneOffsets(((1, columns, call.width),), i)
        else:
            at, to = refs.dbias.at[pl.ds(first, columns)], channel
        store_lanes(at, to, [total])
