"""The sums of dB and dC over channels, in a fixed order: of warps, of warpgroups, of blocks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.ring import release_stage
from jaxkern.ops.selective_scan.blocks import Block, Rows, Scan
from jaxkern.ops.selective_scan.call import Call
from jaxkern.ops.selective_scan.reference import CHUNK
from jaxkern.ops.selective_scan.tiles import WARPS

SUM_BUFFERS = 3
"""One that a warpgroup fills, one that it adds up, and one that the other may still add up."""


class ChannelSums:
    """Sums of dB and dC over a block's channels, of the steps of a tile.

    Every warp stores its own sums in shared memory, where its block adds them up, in order of the
    warps. A block of several warpgroups does so a tile later, so that none waits for the others.
    """

    def __init__(self, scan: Scan, refs: Any, smem: Any, at: Block, chunks: int):
        self.scan, self.refs, self.smem, self.at = scan, refs, smem, at
        self.chunks = chunks  # of a tile
        self.steps = smem.sums.shape[1]  # in shared memory at a time
        size = LANES * scan.tile.sums
        self.mine = pl.ds(at.warpgroup * LANES * scan.tile.sums, size)

    def _buffer(self, n: Any) -> Any:
        return 0 if self.scan.warpgroups == 1 else lax.rem(n, SUM_BUFFERS)

    def store(self, n: Any, from_end: Any, token: Any, step: int, dB: Rows, dC: Rows) -> None:
        """Stores this warp's sums of a step of the n-th tile.

        Of the step's chunk, which begins at `token`, there are `from_end` behind it in the tile.
        """
        scan, tile = self.scan, self.scan.tile
        pairs = [v for pair in zip(dB, dC, strict=True) for v in pair]
        sums = scan.sum(pairs, tile.over_channels, swapped=len(tile.state_swaps))
        row = from_end * CHUNK + step if self.steps >= CHUNK else step % self.steps
        ref = self.smem.sums.at[self._buffer(n), row, self.mine]
        scan.store(ref, sums, (1, LANES, tile.sums))
        if self.steps < CHUNK and row == 0:
            release_stage()
            self._write(token + step, self._of_warps(0, 0, self.steps))
            release_stage()

    def finish_tile(self, end: Any, chunks: Any, n: Any, flushing: Any) -> None:
        """Adds up the sums of the n-th tile, of `chunks` up to `end`.

        With several warpgroups, those of the `flushing` chunks of the tile before instead.
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

    def finish(self, end: Any, flushing: Any, n: Any) -> None:
        """Adds up the sums of the last tile, the n-th, where that was put off."""
        if self.scan.warpgroups > 1:
            self._wait_and_add_up(end() + flushing, flushing, n - 1)

    def _wait_and_add_up(self, end: Any, chunks: Any, n: Any) -> None:
        plgpu.barrier_wait(self.smem.summed.at[self._buffer(n)])
        self._add_up(end, chunks, self._buffer(n))

    def _add_up(self, end: Any, chunks: Any, buffer: Any) -> None:
        """Each warpgroup adds up some steps of every chunk."""
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


def sum_of_blocks(call: Call, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, G, N), from the sums of each block: fixed order, fp32."""
    t, n = call.tile, call.states
    sums = sums.reshape(call.groups, call.scan.blocks_per_group, *sums.shape[1:])
    # (G, B, L, 32 · sums), lanes as in sum_lanes. XLA would add up all again for dB and for dC.
    total = lax.optimization_barrier(_over_blocks(sums))
    lanes = t.groups // t.low, t.lanes, t.low
    total = total.reshape(call.groups, call.batch, -1, *lanes, t.sums)[:, :, : call.length]
    total = jnp.moveaxis(total, 0, 2).swapaxes(3, 4)  # (B, L, G, S, …): of each state lane
    copies = t.groups * t.sums // (2 * t.states)
    total = total.reshape(*total.shape[:4], t.groups, t.sums)[:, :, :, :, ::copies]
    total = total.reshape(*total.shape[:4], t.states // t.pair, t.pair, 2).swapaxes(3, 4)
    total = total.reshape(*total.shape[:3], t.all_states, 2)
    return total[..., :n, 0], total[..., :n, 1]


def _over_blocks(sums: jax.Array) -> jax.Array:
    """The sums over axis 1, in parts of less than 32 terms.

    XLA shares out one of 32 or more to several threads, which takes three times as long here as a
    thread for each sum does.
    """
    count = sums.shape[1]
    size = -(-count // -(-count // 31))
    parts = [sums[:, i : i + size].sum(1) for i in range(0, count, size)]
    return functools.reduce(jnp.add, parts)
