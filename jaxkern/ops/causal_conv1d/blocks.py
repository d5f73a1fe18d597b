"""A block's share of a call: its tiles and channels, and the ring that they come through.

No lane reads what another writes, so the only barriers are those of the ring.
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

from jaxkern.mosaic.lanes import LaneOffsets, join_lanes, load_lanes
from jaxkern.mosaic.launch import LANES, grid_axes
from jaxkern.mosaic.ring import (
    Ring,
    close_copies,
    copied_channels,
    release_stage,
    ring_scratch,
)
from jaxkern.ops.causal_conv1d.tiles import Activation, Options, Tiles

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

UNROLL = 8
"""Tokens unrolled in a loop."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """What the kernels know about a call while they are compiled.

    A tile is `chunks` · `rows` tokens, and the `after` tokens behind it are read as well, its halo.
    The last tile has none and ends with the sequence: its last `tail` tokens, where they fill no
    chunk, are the last of one that overlaps the chunk before.
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
        """How many tiles there are: so many that the last is longer than a halo."""
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
        """This block's number along tiles and its channels, which may overlap the last block's."""
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
        return _wide(plgpu.load(ref, layout=self.layout, optimized=False))

    def full(self, value: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def taps(self, refs: Any, channels: Any) -> tuple[list[Any], Any]:
        """The weights, one (size,) array per tap, and the bias, in fp32."""
        count = self.vec * self.width
        of_lane = load_lanes(
            refs.weight.at[channels],
            LaneOffsets(((1, LANES, count),)),
            count,
        )
        weights = [join_lanes(of_lane[w :: self.width]) for w in range(self.width)]
        bias = self.full(0.0) if refs.bias is None else self.load(refs.bias.at[channels])
        return weights, bias

    def history(self, refs: Any, batch: Any, first: Any, channels: Any) -> tuple[Any, ...]:
        """The W − 1 inputs before token `first`, oldest first."""
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
        """How far back the filters of `count` tokens see, from token `t` on."""
        if refs.look_back is None:
            return [None] * count
        return [refs.look_back[batch, t + u] for u in range(count)]

    def scratch(self, **arrays: Any) -> dict[str, Any]:
        """The rings of all warpgroups, for the arrays that :meth:`stream` copies."""
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
        """Runs ``carry = run(t, rows, in_halo, carry)`` along a tile, for a few tokens from t on.

        Args:
          refs: the arrays in global memory.
          smem: the shared memory.
          names: of the arrays that come through the ring.
          tile: of :meth:`tile`.
          channels: of the block.
          begin: the first carry, loaded while the first stages fill.
          run: its `rows` are the (size,) arrays of these tokens by name; `in_halo` says whether the
            tokens are the next tile's.
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


def _wide(v: jax.Array) -> jax.Array:
    # Under shard_map what a load returns is typed as varying over the mesh and what is computed is
    # not; a loop's carry needs one type.
    return 1.0 * v if v.dtype == jnp.float32 else v.astype(jnp.float32)


def prepare(
    options: Options, tile: Tiles, after: int, **arrays: Any
) -> tuple[Filter, dict[str, Any]]:
    """The call as the kernels see it, and its arrays with as many channels as the TMA can copy."""
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
