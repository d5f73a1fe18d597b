"""The last addition of dw and db: what the clusters of the backward have summed, in one kernel."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import sync_block
from jaxkern.mosaic.launch import grid_axes, interpreted, launch_kernel, num_sms
from jaxkern.ops.norm.pointwise import Options
from jaxkern.ops.norm.registers import store
from jaxkern.ops.norm.short_rows import ShortRows

_COLUMNS, _WARPGROUP = grid_axes("columns", "warpgroup")
_MAX_WARPGROUPS = 8
_ROWS_PER_WARPGROUP = 16
"""Partial sums that make a warpgroup worthwhile."""


def sum_over_clusters(
    options: Options, partials: list[jax.Array], dtypes: list[Any]
) -> list[jax.Array]:
    """Each of `partials`, (P, G, N) fp32, summed over its first axis in a fixed order: (G, N).

    A block takes 32 to 128 columns. Each of its warpgroups sums every so many tiles of rows, in
    registers, and the first adds up what all have put into shared memory.
    """
    if not partials:
        return []
    count, *shape = partials[0].shape
    width = shape[0] * shape[1]
    fills = lambda blocks: blocks >= num_sms() * 3 // 4
    vec = next((v for v in (4, 2, 1) if width % (32 * v) == 0 and fills(width // (32 * v))), 1)
    columns = 32 * vec
    if count < 4 or width % columns:
        return [jnp.sum(p, axis=0).astype(t) for p, t in zip(partials, dtypes, strict=True)]
    warpgroups = min(2 if interpreted() else _MAX_WARPGROUPS, -(-count // _ROWS_PER_WARPGROUP))
    # All that a warpgroup reads is on its way at once.
    rows = ShortRows(4 * min(count // 4, -(-count // (4 * warpgroups))), columns, vec)
    in_block = (len(partials), warpgroups * rows.unit, columns)
    scratch: dict[str, Any] = {"shared": plgpu.SMEM(in_block, jnp.float32)}
    if interpreted():
        scratch["all_stored"] = plgpu.Barrier(num_arrivals=warpgroups)
    blocks = width // columns
    sums = launch_kernel(
        functools.partial(_sum_kernel, rows, count, warpgroups, len(partials)),
        out_type=tuple(jax.ShapeDtypeStruct((blocks, columns), t) for t in dtypes),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=(_COLUMNS,),
        num_threads=warpgroups,
        thread_name=_WARPGROUP,
        kernel_name=f"{options.op}_sum",
    )(*(p.reshape(count, blocks, columns) for p in partials))
    return [s.reshape(shape) for s in sums]


def _sum_kernel(
    rows: ShortRows, count: int, warpgroups: int, arrays: int, *refs: Any, **smem: Any
) -> None:
    warpgroup, column = lax.axis_index(_WARPGROUP), lax.axis_index(_COLUMNS)
    regs = rows.registers(types.SimpleNamespace(**smem))

    def step(k: Any, totals: Any) -> Any:
        tile = warpgroup + k * warpgroups
        load = lambda ref: regs.load(ref, regs.first_row(tile, count), column, 0)
        read = [load(ref) for ref in refs[:arrays]]  # (rows, columns)
        return tuple(
            regs.add_to_param_sum(total, regs.without_repeated(tile, count, value))
            for total, value in zip(totals, read, strict=True)
        )

    steps = lax.div(rows.tiles(count) - warpgroup + warpgroups - 1, warpgroups)
    totals = lax.fori_loop(0, steps, step, (regs.zero_param_sum(),) * arrays)  # (unit, columns)
    for i, total in enumerate(totals):
        store(smem["shared"].at[i, pl.ds(warpgroup * rows.unit, rows.unit)], total)
    if not interpreted():
        sync_block()
    else:
        plgpu.barrier_arrive(smem["all_stored"])
        plgpu.barrier_wait(smem["all_stored"])

    @pl.when(warpgroup == 0)
    def _():
        for i, out in enumerate(refs[arrays:]):
            every = range(warpgroups * rows.unit)
            held = [regs.load_columns(smem["shared"].at[i, r]) for r in every]
            store(out.at[column], sum(held[1:], start=held[0]).astype(out.dtype))
