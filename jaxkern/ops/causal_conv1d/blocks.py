"""What a block is given: its tokens and channels of a call, and its shared memory.

Barriers (commit_smem) come before a slot is copied to again; no lane reads what another writes.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import LaneOffsets, join_lanes, load_lanes
from jaxkern.mosaic.launch import LANES, grid_axes
from jaxkern.ops.causal_conv1d.tiling import Activation, Options, Tiles

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

UNROLL = 8
"""Tokens unrolled in a loop."""

LANE = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


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
    rows: int
    slots: int
    chunks: int
    vec: int
    warpgroups: int
    after: int
    names: tuple[str, ...]  # of the references

    def __post_init__(self) -> None:
        assert self.tiles == 1 or self.after <= self.rows, self  # a slot takes the halo

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

    def place(self, index: Any) -> tuple[Any, Any, Any]:
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
        return weights, self.load(refs.bias.at[channels]) if "bias" in self.names else self.full(
            0.0
        )

    def history(self, refs: Any, batch: Any, first: Any, channels: Any) -> tuple[Any, ...]:
        """The W − 1 inputs before token `first`, oldest first."""
        inputs = []
        for k in range(self.width - 1):
            t = jnp.maximum(first + k - (self.width - 1), 0)
            x, start = self.load(refs.x.at[batch, t, channels]), self.full(0.0)
            if "state" in self.names:
                start = self.load(refs.state.at[batch, k, channels])
            inputs.append(self.where(first == 0, start, x))
        return tuple(inputs)

    def sees(self, look_back: Any, value: Any, w: int) -> Any:
        """`value`, or zeros where tap `w` looks into another segment."""
        if look_back is None or w == self.width - 1:
            return value
        return self.where(look_back >= self.width - 1 - w, value, self.full(0.0))

    def where(self, condition: Any, value: Any, otherwise: Any) -> Any:
        """A choice by a scalar, the same for all lanes; Mosaic has it for arrays only."""
        chosen = self.full(jnp.where(condition, 1.0, 0.0))
        return jnp.where(chosen > 0, value, otherwise)

    def sum(self, taps: list[Any], weights: list[Any], bias: Any) -> Any:
        for weight, tap in zip(weights, taps, strict=True):
            bias = bias + weight * tap
        return bias

    def look_backs(self, refs: Any, batch: Any, t: Any, count: int) -> list[Any]:
        """How far back the filters of `count` tokens see, from token `t` on."""
        if "look_back" not in self.names:
            return [None] * count
        return [refs.look_back[batch, t + u] for u in range(count)]

    def scratch(self, **arrays: Any) -> dict[str, Any]:
        """The slots of each array, and a barrier for each slot of all."""
        count = self.warpgroups * self.slots
        slots = {
            name: plgpu.SMEM((count, self.rows, self.size), a.dtype) for name, a in arrays.items()
        }
        arrived = plgpu.Barrier(num_arrivals=len(slots), num_barriers=count)
        return {**slots, "arrived": arrived}

    def march(
        self,
        refs: Any,
        smem: dict[str, Any],
        place: tuple[Any, Any, Any],
        channels: Any,
        begin: Callable[[], Any],
        run: Callable[..., Any],
    ) -> Any:
        """``carry = run(t, rows, in_halo, carry)`` along a tile, for a few tokens from `t` on.

        Args:
          refs: the arrays in global memory.
          smem: the slots of those that are read here, and their barriers.
          place: of the tile.
          channels: of the block.
          begin: the first carry, loaded while the first slots fill.
          run: its `rows` are the (size,) arrays of these tokens, by the names of `smem`; `in_halo`
            says whether the tokens are the next tile's.
        """
        batch, first, is_last = place
        arrived = smem["arrived"]
        slots = {name: slot for name, slot in smem.items() if name != "arrived"}
        whole = jnp.where(is_last, self.whole, self.chunks)
        total = whole + jnp.where(is_last, min(self.tail, 1), 0)
        halo = self.after if self.tiles > 1 else 0
        ring = self.warpgroup() * self.slots

        def slot_of(i):
            return ring + lax.rem(i, self.slots)

        def start(i):
            return jnp.minimum(first + i * self.rows, self.length - self.rows)

        def copy(i, start, count):
            slot = slot_of(i)
            for name, target in slots.items():
                source = getattr(refs, name).at[batch, pl.ds(start, count), channels]
                plgpu.copy_gmem_to_smem(source, target.at[slot, pl.ds(0, count)], arrived.at[slot])

        def fetch(i):
            @pl.when(i < total)
            def _():
                copy(i, start(i), self.rows)

            if halo:

                @pl.when((i == total) & ~is_last)
                def _():
                    copy(i, first + self.own, halo)

        def wait(i):
            plgpu.barrier_wait(arrived.at[slot_of(i)])

        def load(i, row, count):
            slot = slot_of(i)
            return {
                name: [self.load(ref.at[slot, row + u]) for u in range(count)]
                for name, ref in slots.items()
            }

        def chunk(valid, i, carry):
            if self.chunks + min(self.after, 1) >= self.slots:
                plgpu.commit_smem()  # all lanes are done with the slot before
                fetch(i + self.slots - 1)
            wait(i)
            unroll = math.gcd(UNROLL, valid)

            def group(g, carry):
                row = self.rows - valid + g * unroll
                return run(start(i) + row, load(i, row, unroll), False, carry)

            return lax.fori_loop(0, valid // unroll, group, carry)

        for i in range(self.slots - 1):
            fetch(jnp.int32(i))
        carry = lax.fori_loop(0, whole, functools.partial(chunk, self.rows), begin())
        if self.tail:
            carry = lax.fori_loop(whole, total, functools.partial(chunk, self.tail), carry)
        if halo:

            def next_tile(i, carry):
                wait(i)
                return run(first + self.own, load(i, 0, halo), True, carry)

            carry = lax.fori_loop(total, jnp.where(is_last, total, total + 1), next_tile, carry)
        return carry


def _wide(v: jax.Array) -> jax.Array:
    # Under shard_map what a load returns is typed as varying over the mesh and what is computed is
    # not; a loop's carry needs one type.
    return 1.0 * v if v.dtype == jnp.float32 else v.astype(jnp.float32)


def _widened(name: str, v: jax.Array, dim: int) -> jax.Array:
    """`v` with zeros after its channels' end, `dim` in all."""
    if name == "look_back":
        return v
    axis = 0 if name == "weight" else v.ndim - 1
    missing = dim - v.shape[axis]
    return jnp.pad(v, [(0, missing * (i == axis)) for i in range(v.ndim)]) if missing else v


def prepare(
    options: Options, tile: Tiles, after: int, **arrays: Any
) -> tuple[Filter, tuple[Any, ...]]:
    """The call as the kernels see it, and the arrays that are there."""
    (_, length, dim), width = arrays["x"].shape, arrays["weight"].shape[1]
    present = {name: a for name, a in arrays.items() if a is not None}
    itemsize = min(a.dtype.itemsize for name, a in present.items() if name != "look_back")
    align = 16 // itemsize  # of the rows that the TMA copies
    dim = -(-max(dim, LANES) // align) * align
    call = Filter(
        activation=options.activation,
        width=width,
        exact=arrays["x"].dtype == jnp.float32,
        length=length,
        dim=dim,
        rows=min(tile.rows, length),
        slots=tile.slots,
        chunks=tile.chunks,
        vec=tile.vec if dim >= LANES * tile.vec else 1,
        warpgroups=tile.warpgroups,
        after=after,
        names=tuple(present),
    )
    return call, tuple(_widened(name, a, dim) for name, a in present.items())


def by_name(call: Filter, outs: str, refs: tuple[Any, ...]) -> Any:
    return types.SimpleNamespace(**dict(zip([*call.names, *outs.split()], refs, strict=True)))
