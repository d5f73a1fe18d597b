"""The forward and the backward kernel, and how they are launched."""

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
from jaxkern.mosaic.launch import LANES, launch_kernel
from jaxkern.ops.causal_conv1d.blocks import (
    BLOCK,
    LANE,
    UNROLL,
    WARPGROUP,
    Filter,
    by_name,
    prepare,
)
from jaxkern.ops.causal_conv1d.reference import reference_bwd, reference_fwd
from jaxkern.ops.causal_conv1d.tiling import Options, Tiles, backward_tiles, forward_tiles

# Forward


def launch_fwd(options: Options, x, weight, bias, state, look_back, tile: Tiles | None = None):
    if x.size == 0:
        return reference_fwd(options, x, weight, bias, state, look_back)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = tile or forward_tiles(batch, length, dim, width, x.dtype.itemsize)
    state = None if width == 1 else state
    call, arrays = prepare(
        options, tile, 0, x=x, weight=weight, bias=bias, state=state, look_back=look_back
    )
    x = arrays[0]
    out = launch_kernel(
        functools.partial(_fwd_kernel, call),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={"smem": call.scratch(x=x)},
        grid=(call.columns * batch * call.tiles,),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_fwd",
        approx_math=True,
    )(*arrays)
    return (out[..., :dim],)


def _fwd_kernel(call: Filter, *refs, smem):
    refs = by_name(call, "out", refs)  # x, out (B, L, D); weight (D, W); state (B, W − 1, D)
    index, channels = call.block()
    place = batch, first, _ = call.place(index)
    loaded = call.taps(refs, channels)

    def begin():
        return once_read((call.history(refs, batch, first, channels), loaded))

    def run(t, rows, in_halo, carry):
        del in_halo
        inputs, (weights, bias) = carry
        look_backs = call.look_backs(refs, batch, t, len(rows["x"]))
        for u, (x, look_back) in enumerate(zip(rows["x"], look_backs, strict=True)):
            taps = [*inputs, x]
            inputs = tuple(taps[1:])
            seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
            s = call.sum(seen, weights, bias)
            if call.activation == "silu":
                s = s * sigmoid(s, call.exact)
            refs.out[batch, t + u, channels] = s.astype(refs.out.dtype)
        return inputs, (weights, bias)

    call.march(refs, smem, place, channels, begin, run)


# Backward


def launch_bwd(
    options: Options, x, weight, bias, state, look_back, dout, tile: Tiles | None = None
):
    if x.size == 0:
        return reference_bwd(options, x, weight, bias, state, look_back, dout)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = tile or backward_tiles(batch, length, dim, width, x.dtype.itemsize)
    kept = None if width == 1 else state
    call, (x, *arrays) = prepare(
        options,
        tile,
        width - 1,
        x=x,
        weight=weight,
        bias=bias,
        state=kept,
        look_back=look_back,
        dout=dout,
    )
    blocks = -(-batch * call.tiles // (tile.warpgroups * tile.turns))
    totals = width + (bias is not None)
    f32 = jnp.float32
    smem = call.scratch(x=x, dout=dout)
    threads: dict[str, Any] = {}
    if tile.warpgroups > 1:
        threads = {"num_threads": tile.warpgroups, "thread_name": WARPGROUP}
        smem["sums"] = plgpu.SMEM((tile.warpgroups - 1, totals, call.size), f32)
        smem["summed"] = plgpu.Barrier(num_arrivals=tile.warpgroups - 1)
    dx, parts, *dstate = launch_kernel(
        functools.partial(_bwd_kernel, call, tile.turns),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((-(-blocks // _SHARES) * _SHARES, totals, call.dim), f32),
            *([] if kept is None else [jax.ShapeDtypeStruct((batch, width - 1, call.dim), f32)]),
        ),
        scratch_types={"smem": smem},
        grid=(call.columns * blocks,),
        grid_names=(BLOCK,),
        **threads,
        kernel_name="causal_conv1d_bwd",
        approx_math=True,
    )(x, *arrays)
    dweight, *dbias = _sum_parts(call, parts, blocks, weight.dtype, bias)
    return (
        dx[..., :dim],
        dweight[:dim],
        dbias[0][:dim] if dbias else None,
        dstate[0][..., :dim].astype(state.dtype) if dstate else _none_or_zeros(state),
    )


def _none_or_zeros(v: Any) -> Any:
    return None if v is None else jnp.zeros_like(v)


def _bwd_kernel(call: Filter, turns: int, *refs, smem):
    outs = "dx parts" + " dstate" * ("state" in call.names)
    refs = by_name(call, outs, refs)  # as forward; parts (blocks, W + 1, D) of dweight and dbias
    before = call.width - 1
    part, channels = call.block()
    warpgroup = call.warpgroup()
    zero = call.full(0.0)
    loaded = call.taps(refs, channels)
    rings = {name: smem[name] for name in ("x", "dout", "arrived")}

    def run_tile(index, sums):
        place = batch, first, is_last = call.place(index)

        def begin():
            taps = once_read((call.history(refs, batch, first, channels), loaded))
            return *taps, (zero,) * before, sums

        def run(t, rows, in_halo, carry):
            """Token t adds its ds to the dx of the tokens t − (W − 1) … t; the first is complete.

            Those of the tile before are not: they get theirs from that one's halo.
            """
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
                dxs = [
                    d + call.sees(look_back, ds, w) * weights[w] for w, d in enumerate((*dxs, zero))
                ]
                if in_halo or u >= before:
                    refs.dx[batch, t + u - before, channels] = dxs[0].astype(refs.dx.dtype)
                else:
                    early.append((t + u, dxs[0]))
                dxs = tuple(dxs[1:])
            groups = [early] if count >= before else [[token] for token in early]
            for group in filter(None, groups):
                last, _ = group[-1]  # a whole group is of the tile's first tokens, or none is

                @pl.when(last - before >= first)
                def _(group=group):
                    for at, dx in group:
                        refs.dx[batch, at - before, channels] = dx.astype(refs.dx.dtype)

                if "state" in call.names:

                    @pl.when(last < before)
                    def _(group=group):
                        for at, dx in group:
                            refs.dstate[batch, at, channels] = dx

            return inputs, (weights, bias), dxs, (dweight, dbias)

        if turns > 1:
            plgpu.commit_smem()  # all lanes are done with the tile before
        _, _, dxs, sums = call.march(refs, rings, place, channels, begin, run)

        @pl.when(is_last)
        def _():
            for k, dx in enumerate(dxs):
                t = call.length - before + k
                if t >= 0:
                    refs.dx[batch, t, channels] = dx.astype(refs.dx.dtype)
                elif "state" in call.names:
                    refs.dstate[batch, before + t, channels] = dx

        return sums

    tiles = refs.x.shape[0] * call.tiles
    per_block = call.warpgroups * turns
    start = part * per_block + warpgroup
    sums = (zero,) * call.width, zero
    if turns == 1 and tiles % per_block == 0:
        sums = run_tile(start, sums)
    else:
        stop = jnp.minimum(part * per_block + per_block, tiles)
        count = lax.div(stop - start + call.warpgroups - 1, call.warpgroups)
        turn = lambda i, sums: run_tile(start + i * call.warpgroups, sums)
        sums = lax.fori_loop(0, count, turn, sums)
    dweight, dbias = sums
    totals = [*dweight, *([dbias] if "bias" in call.names else [])]

    def write():
        others = () if call.warpgroups == 1 else range(call.warpgroups - 1)
        for i, total in enumerate(totals):
            for k in others:
                total = total + call.load(smem["sums"].at[k, i])
            refs.parts[part, i, channels] = total

    if call.warpgroups == 1:
        write()
        return

    @pl.when(warpgroup > 0)
    def _():
        for i, total in enumerate(totals):
            smem["sums"][warpgroup - 1, i] = total
        plgpu.barrier_arrive(smem["summed"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(smem["summed"])
        write()


_SHARES = 16
"""Groups of lanes that share the parts of dweight among them."""


def _sum_parts(call: Filter, parts: jax.Array, count: int, dtype: Any, bias: Any) -> Any:
    """dweight (D, W) and, where there is a bias, dbias (D,): sums of the first `count` of `parts`.

    One small kernel. XLA takes two: a sum, and another for the order of dweight.
    """
    out_type = [jax.ShapeDtypeStruct((call.dim * call.width,), dtype)]
    if bias is not None:
        out_type.append(jax.ShapeDtypeStruct((call.dim,), bias.dtype))
    dweight, *dbias = launch_kernel(
        functools.partial(_sum_kernel, call, count, parts.shape[1]),
        out_type=tuple(out_type),
        scratch_types={"smem": plgpu.SMEM((parts.shape[1], LANES), jnp.float32)},
        grid=(-(-call.dim // (LANES // _SHARES)),),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_sum",
        approx_math=True,
    )(parts.reshape(-1))
    return dweight.reshape(call.dim, call.width), *dbias


def _sum_kernel(call: Filter, count: int, totals: int, parts, *outs, smem):
    """A lane adds up every 16th part of one channel; then the sums of 16 lanes are added."""
    columns = LANES // _SHARES
    first = jnp.minimum(lax.axis_index(BLOCK) * columns, call.dim - columns)
    of_part = totals * call.dim
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=LANE)
    zero = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), LANE)

    def add(j, sums):
        """Adds the parts from `j` · 16 on."""
        offsets = LaneOffsets(((1, columns, 1), (columns, _SHARES, of_part)))
        span = (_SHARES - 1) * of_part + columns
        added = []
        for i, total in enumerate(sums):
            at = parts.at[pl.ds(j * _SHARES * of_part + i * call.dim + first, span)]
            (part,) = load_lanes(at, offsets)
            if isinstance(j, int) and (j + 1) * _SHARES > count:
                part = jnp.where(lane < (count - j * _SHARES) * columns, part, zero)
            added.append(total + part)
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
        store_lanes(smem.at[i], every, [of_warp])
    plgpu.commit_smem()
    for i in range(totals):
        of_warps = [
            load_lanes(smem.at[i], dataclasses.replace(channel, start=start))[0]
            for start in range(0, LANES, 32)
        ]
        total = functools.reduce(jnp.add, of_warps)
        if i < call.width:
            at = outs[0].at[pl.ds(first * call.width, columns * call.width)]
            to = LaneOffsets(((1, columns, call.width),), i)
        else:
            at, to = outs[1].at[pl.ds(first, columns)], channel
        store_lanes(at, to, [total])
