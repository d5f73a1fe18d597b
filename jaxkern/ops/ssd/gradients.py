"""The kernel of the SSD scan's backward: the gradients of chunks, in parallel.

A block has a chunk of 128 tokens of a batch row and goes through the units of a group. Two
warpgroups compute, each for half of the tokens (:mod:`jaxkern.ops.ssd.half_gradients`), and a third
one fetches, and adds up what a unit has one number of: the gradients of a chunk's last sum and D.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes, sync_warpgroup
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.wgmma import start_fetch, swizzled
from jaxkern.ops.ssd.blocks import BLOCK, TILE, WARPGROUP, wide
from jaxkern.ops.ssd.call import Arrays
from jaxkern.ops.ssd.fragments import lane_sums, own_shape
from jaxkern.ops.ssd.half_gradients import (
    HALF_PARTS,
    OF_LANE,
    PART,
    PARTS_OF_HALVES,
    Block,
    compute,
)
from jaxkern.ops.ssd.steps import KINDS, LAST, SKIP, sum_of
from jaxkern.ops.ssd.tiles import BOX, CHUNK, SLICE, STEP, STEPS, WARPS, Chunks

REGISTERS, FETCH_REGISTERS = 240, 24
"""Registers of a lane that computes, and of one that fetches. What is spilled in each unit goes to
the L2 cache: three registers of each lane cost a fifth of the time."""


def launch_grads(chunks: Chunks, arrays: Arrays, dy: Any, h: Any, dh: Any) -> dict[str, Any]:
    """dx; dB and dC of each split of a group; what :func:`chunk_sum_grads` takes, of each unit.

    Args:
      chunks: how the launch is cut.
      arrays: of the call.
      dy: (B, L, H, P).
      h: the states before chunks, (B, chunks, H, P, N).
      dh: the gradients of those after chunks; of the last one they are zeros where it has none.
    """
    scan, dtype, f32 = chunks.scan, dy.dtype, jnp.float32
    N = scan.states
    like = jax.ShapeDtypeStruct
    weights = like(
        (chunks.splits, scan.batch, scan.chunks * CHUNK, scan.groups, N),
        dtype if chunks.splits == 1 else f32,
    )
    units = scan.batch, scan.heads * scan.slices, scan.chunks
    of_heads = arrays.D is not None and arrays.D.ndim == 1
    scratch = {
        "x": swizzled(2, CHUNK, SLICE, dtype=dtype),
        "dy": swizzled(2, CHUNK, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2, 2, CHUNK), f32),
        "h": swizzled(1, SLICE, N, dtype=dtype),
        "dh": swizzled(1, SLICE, N, dtype=dtype),
        "B": swizzled(1, CHUNK, N, dtype=dtype),
        "C": swizzled(1, CHUNK, N, dtype=dtype),
        "dS": plgpu.SMEM((sum(map(len, PARTS_OF_HALVES)), *own_shape(PART, f32)), f32),
        "S": plgpu.SMEM((HALF_PARTS, *own_shape(PART, dtype)), dtype),
        "gains": plgpu.SMEM((STEPS + 2, WARPS, STEP), f32),
        "sums": plgpu.SMEM((STEPS, 2, STEP), f32),
        "lanes": plgpu.SMEM((KINDS, STEPS, LANES), f32),
        "weights_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=STEPS + 1, num_barriers=2),
        "h_full": plgpu.Barrier(num_arrivals=1),
        "h_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "dh_full": plgpu.Barrier(num_arrivals=1),
        "dh_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "gained": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "ended": plgpu.Barrier(num_arrivals=STEPS),
    }
    return launch_named(
        functools.partial(_kernel, chunks),
        {
            "x": arrays.x,
            "dy": dy,
            "steps": arrays.steps,
            "B": arrays.B,
            "C": arrays.C,
            "D": arrays.D,
            "h": h,
            "dh": dh,
        },
        {
            "dx": like(arrays.x.shape, dtype),
            "dB": weights,
            "dC": weights,
            "sums": like((*units, 2, CHUNK), f32),
            "parts": like((*units, KINDS if of_heads else 1, WARPS), f32),
        },
        scratch,
        grid=(chunks.grid,),
        grid_names=(BLOCK,),
        num_threads=STEPS + 1,
        thread_name=WARPGROUP,
        kernel_name="ssd_bwd",
        approx_math=True,
        sums_across_warps=False,
    )


def _kernel(chunks: Chunks, refs: Any, smem: Any) -> None:
    """Two warpgroups compute, each with its half of the tokens; one fetches and sums."""
    scan, warpgroup = chunks.scan, lax.axis_index(WARPGROUP)
    block = lax.axis_index(BLOCK)
    group, rest = lax.rem(block, scan.groups), lax.div(block, scan.groups)
    split, rest = lax.rem(rest, chunks.splits), lax.div(rest, chunks.splits)
    chunk, batch = lax.rem(rest, scan.chunks), lax.div(rest, scan.chunks)
    first = split * chunks.split_units
    count = jnp.minimum(chunks.split_units, scan.units - first)
    at = Block(scan, batch, chunk, group, split, first, count)

    @pl.when(warpgroup == STEPS)
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        _Fetch(at, refs, smem).run()

    for half in range(STEPS):

        @pl.when(warpgroup == half)
        def _(half: int = half) -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            compute(at, half, refs, smem)


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The warpgroup that fetches, and sums what a unit has one number of; `n` counts units."""

    at: Block
    refs: Any
    smem: Any

    def run(self) -> None:
        """Fetches B and C, and all that is read of each unit."""
        at, smem = self.at, self.smem
        for name in ("B", "C"):
            tokens = pl.ds(at.chunk * CHUNK, CHUNK)
            source = getattr(self.refs, name).at[at.batch, tokens, at.group]
            start_fetch(source, getattr(smem, name).at[0], smem.weights_full)
        if self.ends_in_zeros:

            @pl.when(self.is_last())
            def _():
                zeros = jnp.zeros((SLICE, at.scan.states), smem.dh.dtype)
                smem.dh.at[0][...] = plgpu.layout_cast(zeros, TILE)
                plgpu.commit_smem()

        nothing = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)
        of_states = lax.fori_loop(0, at.count, self.unit, nothing)
        pl.when(at.count > 0)(lambda: self.sum_parts(at.count - 1, of_states))

    @property
    def ends_in_zeros(self) -> bool:
        """Whether `dh` leaves out the last chunk, after which it is zero."""
        return self.refs.dh.shape[1] < self.at.scan.chunks

    def is_last(self) -> Any:
        return self.at.chunk == self.at.scan.chunks - 1

    def unit(self, n: Any, of_states: Any) -> Any:
        """Fetches a unit, and when the one before is done, stores its sums.

        `of_states` is of this warpgroup's lanes, of exp(c[Q−1]) · h · dh of the unit before;
        returns that of this one.
        """
        at, refs, smem, slot = self.at, self.refs, self.smem, lax.rem(n, 2)
        head, channels = at.unit(n)
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(smem.empty.at[slot]))
        state = lambda ref: ref.at[at.batch, at.chunk, head, channels]
        full = smem.full.at[slot]
        start_fetch(at.tokens(refs.x, n), smem.x.at[slot], full)
        start_fetch(at.tokens(refs.dy, n), smem.dy.at[slot], full)
        start_fetch(refs.steps.at[at.batch, head, at.chunk], smem.steps.at[slot], full)
        pl.when(n >= 1)(lambda: plgpu.barrier_wait(smem.h_empty))
        start_fetch(state(refs.h), smem.h.at[0], smem.h_full)
        pl.when(n >= 1)(lambda: self.sum_parts(n - 1, of_states))  # and waits until dh is free
        self.fetch_dh(state(refs.dh))
        for barrier in (full, smem.h_full, smem.dh_full):
            plgpu.barrier_wait(barrier)
        box = lambda ref, k: wide(plgpu.load(ref.at[0, :, pl.ds(k, BOX)], layout=TILE))
        boxes = range(0, at.scan.states, BOX)
        of_states = sum_of(lane_sums(box(smem.h, k) * box(smem.dh, k)) for k in boxes)
        of_states = of_states * jnp.exp2(smem.steps[slot, 0, CHUNK - 1])
        for barrier in (smem.empty.at[slot], smem.h_empty, smem.dh_empty):
            plgpu.barrier_arrive(barrier)
        return of_states

    def fetch_dh(self, source: Any) -> None:
        """Starts to fetch dh, or says that its zeros are there."""
        smem = self.smem
        start = lambda: start_fetch(source, smem.dh.at[0], smem.dh_full)
        if self.ends_in_zeros:
            last = self.is_last()
            pl.when(last)(lambda: plgpu.barrier_arrive(smem.dh_full))
            pl.when(~last)(start)
        else:
            start()

    def sum_parts(self, n: Any, of_states: Any) -> None:
        """When a unit is done, stores the sums of what lanes have of it."""
        at, parts, smem = self.at, self.refs.parts, self.smem
        plgpu.barrier_wait(smem.dh_empty)
        kinds = [LAST] if parts.shape[-2] == 1 else [LAST, SKIP]
        sums = [
            sum_of(load_lanes(smem.lanes.at[k, half], OF_LANE)[0] for half in range(STEPS))
            for k in kinds
        ]
        sums[LAST] = sums[LAST] + of_states
        (total,) = sum_lanes(sums, (16, 8, 4, 2, 1))
        sync_warpgroup()  # all warps have read: the next unit's may be stored, once dh is fetched
        # With two kinds, the upper 16 lanes of each warp have the second.
        offsets = LaneOffsets(((16, len(kinds), WARPS), (LANES // WARPS, WARPS, 1)))
        store_lanes(parts.at[at.batch, at.number(n), at.chunk], offsets, [total])
