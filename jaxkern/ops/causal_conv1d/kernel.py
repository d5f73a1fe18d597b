"""The kernels of the causal convolution: forward, backward, and the sum of partial sums.

A warpgroup owns some channels, `vec` neighbouring ones per lane, and walks along a tile of the
sequence with the last W − 1 inputs in registers; a ring in shared memory is filled ahead of it. No
lane reads what another writes, so only the ring has barriers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import once_read, sigmoid
from jaxkern.mosaic.lanes import (
    LaneOffsets,
    join_lanes,
    lane_numbers,
    load_lanes,
    store_lanes,
    sum_lanes,
    zeros,
)
from jaxkern.mosaic.launch import LANES, grid_axes, launch_named
from jaxkern.mosaic.ring import Ring, close_copies, copied_channels, release_stage, ring_scratch
from jaxkern.ops.causal_conv1d.reference import (
    in_last_segment,
    last_inputs,
    reference_bwd,
    reference_fwd,
)
from jaxkern.ops.causal_conv1d.tiles import (
    Activation,
    ConvOptions,
    ConvTile,
    backward_tile,
    forward_tile,
)

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

UNROLL = 8
"""Tokens unrolled in a loop."""

_GROUPS = 16
"""Groups of lanes between which the sum kernel divides the blocks' partial sums."""


# The tokens and channels of a block, and its ring


@dataclasses.dataclass(frozen=True)
class Filter:
    """Static description of a call: sizes, tiles and the steps that both kernels share.

    A tile is `chunks` · `rows` tokens; its halo, the `after` tokens behind it, is read as well.
    The last tile has no halo and ends with the sequence: its last `tail` tokens, fewer than a
    chunk, are the end of a chunk that overlaps the one before.
    """

    activation: Activation | None
    width: int
    exact: bool  # fp32 tokens: no shortcut in the sigmoid
    length: int
    dim: int
    rows: int  # of a chunk
    stages: int  # of the ring
    chunks: int  # of a tile
    vec: int  # channels of a lane
    warpgroups: int
    after: int

    def __post_init__(self) -> None:
        assert self.tiles == 1 or self.after <= self.rows, self  # a stage takes the halo

    @property
    def own(self) -> int:
        """Tokens of a tile, but for the last."""
        return self.chunks * self.rows

    @property
    def tiles(self) -> int:
        """Number of tiles of a batch row; the last one is longer than a halo."""
        return max(1, -(-(self.length - self.after) // self.own))

    @property
    def whole(self) -> int:
        """Whole chunks of the last tile."""
        return (self.length - (self.tiles - 1) * self.own) // self.rows

    @property
    def tail(self) -> int:
        return (self.length - (self.tiles - 1) * self.own) % self.rows

    @property
    def size(self) -> int:
        return LANES * self.vec

    @property
    def columns(self) -> int:
        return -(-self.dim // self.size)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)

    def block(self) -> tuple[Any, Any]:
        """Index of this block along tiles, and its channels, which may overlap another block's."""
        block = lax.axis_index(BLOCK)
        start = jnp.minimum(lax.rem(block, self.columns) * self.size, self.dim - self.size)
        return lax.div(block, self.columns), pl.ds(start, self.size)

    def warpgroup(self) -> Any:
        return lax.axis_index(WARPGROUP) if self.warpgroups > 1 else jnp.int32(0)

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        """Batch row and first token of tile `index`, and whether it is the last of the row."""
        tile = lax.rem(index, self.tiles)
        return lax.div(index, self.tiles), tile * self.own, tile == self.tiles - 1

    def load(self, ref: Any) -> jax.Array:
        """A (size,) row of shared or global memory in fp32."""
        return _to_fp32(plgpu.load(ref, layout=self.layout, optimized=False))

    def full(self, value: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def taps(self, refs: Any, channels: Any) -> tuple[list[Any], Any]:
        """Loads the weights, one (size,) array per tap, and the bias, in fp32."""
        count = self.vec * self.width
        loaded = load_lanes(refs.weight.at[channels], LaneOffsets(((1, LANES, count),)), count)
        weights = [join_lanes(loaded[w :: self.width]) for w in range(self.width)]
        bias = self.full(0.0) if refs.bias is None else self.load(refs.bias.at[channels])
        return weights, bias

    def history(self, refs: Any, batch: Any, first: Any, channels: Any) -> tuple[Any, ...]:
        """Loads the W − 1 inputs before token `first`, oldest first."""
        inputs = []
        for k in range(self.width - 1):
            t = jnp.maximum(first + k - (self.width - 1), 0)
            x, start = self.load(refs.x.at[batch, t, channels]), self.full(0.0)
            if refs.state is not None:
                start = self.load(refs.state.at[batch, k, channels])
            inputs.append(self.where(first == 0, start, x))
        return tuple(inputs)

    def sees(self, look_back: Any, value: Any, w: int) -> Any:
        """`value`, or zeros where tap `w` looks into another segment."""
        if look_back is None or w == self.width - 1:
            return value
        return self.where(look_back >= self.width - 1 - w, value, self.full(0.0))

    def where(self, condition: Any, value: Any, otherwise: Any) -> Any:
        """Chooses by a scalar, the same for all lanes; Mosaic can choose by arrays only."""
        chosen = self.full(jnp.where(condition, 1.0, 0.0))
        return jnp.where(chosen > 0, value, otherwise)

    def sum(self, taps: list[Any], weights: list[Any], bias: Any) -> Any:
        for weight, tap in zip(weights, taps, strict=True):
            bias = bias + weight * tap
        return bias

    def look_backs(self, refs: Any, batch: Any, t: Any, count: int) -> list[Any]:
        """Loads how many inputs the filters of tokens t to t + `count` − 1 may look back."""
        if refs.look_back is None:
            return [None] * count
        return [refs.look_back[batch, t + u] for u in range(count)]

    def scratch(self, **arrays: Any) -> dict[str, Any]:
        """Shared memory: each warpgroup's ring for the arrays that :meth:`stream` copies."""
        tiles = {name: ((self.rows, self.size), array.dtype) for name, array in arrays.items()}
        return ring_scratch(self.warpgroups * self.stages, tiles)

    def stream(
        self,
        refs: Any,
        smem: Any,
        names: tuple[str, ...],
        tile: tuple[Any, Any, Any],
        channels: Any,
        begin: Callable[[], Any],
        run: Callable[..., Any],
    ) -> Any:
        """Runs ``carry = run(t, rows, in_halo, carry)`` along a tile, a few tokens at a time.

        `names` are the arrays that come through the ring. `begin` loads the first carry while the
        first stages fill. `rows` has the (size,) arrays of the tokens from t on, by name;
        `in_halo` says whether they belong to the next tile.
        """
        batch, first, is_last = tile
        whole = jnp.where(is_last, self.whole, self.chunks)
        total = whole + jnp.where(is_last, min(self.tail, 1), 0)
        halo = self.after if self.tiles > 1 else 0
        stages = {name: getattr(smem, name) for name in names}
        arrived = getattr(smem, "arrived", None)
        ring = Ring(stages, arrived, self.stages, self.warpgroup() * self.stages)

        def start(i):
            return jnp.minimum(first + i * self.rows, self.length - self.rows)

        def sources(start, count):
            for name in names:
                yield name, getattr(refs, name).at[batch, pl.ds(start, count), channels]

        def fetch(i):
            pl.when(i < total)(lambda: ring.copy(i, sources(start(i), self.rows)))
            if halo:
                at = (pl.ds(0, halo),)
                copy = lambda: ring.copy(i, sources(first + self.own, halo), at)
                pl.when((i == total) & ~is_last)(copy)
            close_copies()

        def load(i, row, count):
            stage = ring.stage(i)
            return {
                name: [self.load(rows.at[stage, row + u]) for u in range(count)]
                for name, rows in stages.items()
            }

        def chunk(valid, i, carry):
            if self.chunks + min(self.after, 1) >= self.stages:
                release_stage()
                fetch(i + self.stages - 1)
            else:
                close_copies()
            ring.wait(ring.stage(i))
            unroll = math.gcd(UNROLL, valid)

            def group(g, carry):
                row = self.rows - valid + g * unroll
                return run(start(i) + row, load(i, row, unroll), False, carry)

            return lax.fori_loop(0, valid // unroll, group, carry)

        for i in range(self.stages - 1):
            fetch(jnp.int32(i))
        carry = lax.fori_loop(0, whole, functools.partial(chunk, self.rows), begin())
        if self.tail:
            carry = lax.fori_loop(whole, total, functools.partial(chunk, self.tail), carry)
        if halo:

            def next_tile(i, carry):
                close_copies()
                ring.wait(ring.stage(i))
                return run(first + self.own, load(i, 0, halo), True, carry)

            carry = lax.fori_loop(total, jnp.where(is_last, total, total + 1), next_tile, carry)
        return carry


def _to_fp32(v: jax.Array) -> jax.Array:
    # Under shard_map a loaded array is typed as varying over the mesh, a computed one is not; a
    # loop's carry needs one type.
    return 1.0 * v if v.dtype == jnp.float32 else v.astype(jnp.float32)


def prepare(
    options: ConvOptions, tile: ConvTile, after: int, **arrays: Any
) -> tuple[Filter, dict[str, Any]]:
    """The static description, and the arrays padded to a number of channels that TMA can copy."""
    (_, length, dim), width = arrays["x"].shape, arrays["weight"].shape[1]
    floating = {name: a for name, a in arrays.items() if a is not None and name != "look_back"}
    padded = copied_channels(dim, floating.values())
    call = Filter(
        activation=options.activation,
        width=width,
        exact=arrays["x"].dtype == jnp.float32,
        length=length,
        dim=padded,
        rows=min(tile.rows, length),
        stages=tile.stages,
        chunks=tile.chunks,
        vec=tile.vec if padded >= LANES * tile.vec else 1,
        warpgroups=tile.warpgroups,
        after=after,
    )

    def pad(name: str, v: jax.Array) -> jax.Array:
        axis = 0 if name == "weight" else v.ndim - 1
        widths = [(0, (padded - dim) * (i == axis)) for i in range(v.ndim)]
        return jnp.pad(v, widths) if padded > dim else v

    return call, arrays | {name: pad(name, v) for name, v in floating.items()}


# Forward


def launch_fwd(options: ConvOptions, x, weight, bias, state, look_back) -> tuple[jax.Array, Any]:
    """Launches the forward kernel: out (B, L, D) and the last inputs (B, W − 1, D)."""
    if x.size == 0:
        return reference_fwd(options, x, weight, bias, state, look_back)
    (batch, length, dim), width = x.shape, weight.shape[1]
    final = last_inputs(options, x, width, state, look_back)
    tile = forward_tile(width, x.dtype.itemsize)
    state = None if width == 1 else state
    arrays = {"x": x, "weight": weight, "bias": bias, "state": state, "look_back": look_back}
    call, ins = prepare(options, tile, 0, **arrays)
    outs = launch_named(
        functools.partial(_fwd_kernel, call),
        ins,
        {"out": jax.ShapeDtypeStruct((batch, length, call.dim), x.dtype)},
        call.scratch(x=x),
        grid=(call.columns * batch * call.tiles,),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_fwd",
        approx_math=True,
    )
    return outs["out"][..., :dim], final


def _fwd_kernel(call: Filter, refs: Any, smem: Any) -> None:
    index, channels = call.block()
    tile = batch, first, _ = call.tile(index)
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

    call.stream(refs, smem, ("x",), tile, channels, begin, run)


# Backward


def launch_bwd(options: ConvOptions, x, weight, bias, state, look_back, dout, dfinal) -> Any:
    """Launches both kernels: dx (B, L, D), dweight (D, W), dbias (D,), dstate (B, W − 1, D)."""
    if x.size == 0:
        return reference_bwd(options, x, weight, bias, state, look_back, dout, dfinal)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = backward_tile(batch, length, dim, width, x.dtype.itemsize)
    read = None if width == 1 else state
    arrays = {"x": x, "weight": weight, "bias": bias, "state": read, "look_back": look_back}
    dlast = None
    if dfinal is not None and 0 < width - 1 <= length:
        dlast = in_last_segment(dfinal, look_back, length)
    call, ins = prepare(options, tile, width - 1, **arrays, dout=dout, dfinal=dlast)
    blocks = -(-batch * call.tiles // (tile.warpgroups * tile.tiles_each))
    totals = width + (bias is not None)
    fp32 = lambda *shape: jax.ShapeDtypeStruct((*shape, call.dim), jnp.float32)
    smem = call.scratch(x=x, dout=dout)
    threads: dict[str, Any] = {}
    if tile.warpgroups > 1:
        threads = {"num_threads": tile.warpgroups, "thread_name": WARPGROUP}
        smem["sums"] = plgpu.SMEM((tile.warpgroups - 1, totals, call.size), jnp.float32)
        smem["summed"] = plgpu.Barrier(num_arrivals=tile.warpgroups - 1)
    outs = launch_named(
        functools.partial(_bwd_kernel, call, tile.tiles_each),
        ins,
        {
            "dx": jax.ShapeDtypeStruct((batch, length, call.dim), x.dtype),
            "sums": fp32(-(-blocks // _GROUPS) * _GROUPS, totals),
            "dstate": None if read is None else fp32(batch, width - 1),
        },
        smem,
        grid=(call.columns * blocks,),
        grid_names=(BLOCK,),
        **threads,
        kernel_name="causal_conv1d_bwd",
        approx_math=True,
    )
    dweight, dbias = _sum_blocks(call, outs["sums"], blocks, weight.dtype, bias)
    dstate = None if state is None else jnp.zeros_like(state)
    if read is not None:
        dstate = outs["dstate"][..., :dim].astype(read.dtype)
    dx = outs["dx"][..., :dim]
    if dfinal is not None and length < width - 1:
        last = lambda x, state: last_inputs(options, x, width, state, look_back)
        added = jax.vjp(last, x, state)[1](dfinal)
        dx, dstate = jax.tree.map(lambda a, b: a + b.astype(a.dtype), (dx, dstate), added)
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
    """Adds token t's ds to dx of the tokens t − (W − 1) … t, the first of which it completes.

    A token of the tile before is completed by that tile, which reads the ds of its halo.
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
    """Writes the completed dx of `tokens`, (t, dx) each, to this tile or to the initial state.

    Either all of `tokens` are the tile's first tokens, and then nothing is written here unless
    there is an initial state, or none is.
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
    """Writes the block's partial sums of dweight and dbias, warpgroups added in fixed order."""

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


def _sum_blocks(call: Filter, sums: jax.Array, count: int, dtype: Any, bias: Any) -> Any:
    """Launches the sum of the first `count` blocks: dweight (D, W) and, with a bias, dbias (D,).

    One small kernel, where XLA needs a sum and a transpose of dweight.
    """
    totals = sums.shape[1]
    outs = launch_named(
        functools.partial(_sum_kernel, call, count, totals),
        {"sums": sums.reshape(-1)},
        {
            "dweight": jax.ShapeDtypeStruct((call.dim * call.width,), dtype),
            "dbias": None if bias is None else jax.ShapeDtypeStruct((call.dim,), bias.dtype),
        },
        {"totals": plgpu.SMEM((totals, LANES), jnp.float32)},
        grid=(-(-call.dim // (LANES // _GROUPS)),),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_sum",
        approx_math=True,
    )
    return outs["dweight"].reshape(call.dim, call.width), outs["dbias"]


def _sum_kernel(call: Filter, count: int, totals: int, refs: Any, smem: Any) -> None:
    """Adds every 16th block's sum of a channel in one lane, then the sums of the 16 lanes."""
    columns = LANES // _GROUPS
    first = jnp.minimum(lax.axis_index(BLOCK) * columns, call.dim - columns)
    block_size = totals * call.dim
    lane, zero = lane_numbers(), zeros()

    def add(j, sums):
        """Adds the sums of blocks 16 · j to 16 · j + 15."""
        offsets = LaneOffsets(((1, columns, 1), (columns, _GROUPS, block_size)))
        span = (_GROUPS - 1) * block_size + columns
        added = []
        for i, total in enumerate(sums):
            at = refs.sums.at[pl.ds(j * _GROUPS * block_size + i * call.dim + first, span)]
            (value,) = load_lanes(at, offsets)
            if isinstance(j, int) and (j + 1) * _GROUPS > count:
                value = jnp.where(lane < (count - j * _GROUPS) * columns, value, zero)
            added.append(total + value)
        return tuple(added)

    def group(g, sums):
        for u in range(UNROLL):
            sums = add(g * UNROLL + u, sums)
        return sums

    groups = count // (_GROUPS * UNROLL)
    sums = lax.fori_loop(0, groups, group, (zero,) * totals)
    for j in range(groups * UNROLL, -(-count // _GROUPS)):
        sums = add(j, sums)
    channel = LaneOffsets(((1, columns, 1),))
    within = [d for d in (1, 2, 4, 8, 16) if d >= columns]
    for i, total in enumerate(sums):
        every = LaneOffsets(((1, LANES, 1),))
        store_lanes(smem.totals.at[i], every, sum_lanes([total], within))
    release_stage()
    for i in range(totals):
        warps = [
            load_lanes(smem.totals.at[i], dataclasses.replace(channel, start=start))[0]
            for start in range(0, LANES, 32)
        ]
        total = functools.reduce(jnp.add, warps)
        if i < call.width:
            at = refs.dweight.at[pl.ds(first * call.width, columns * call.width)]
            to = LaneOffsets(((1, columns, call.width),), i)
        else:
            at, to = refs.dbias.at[pl.ds(first, columns)], channel
        store_lanes(at, to, [total])
