"""The last addition of dw and db: what the blocks of the backward have summed, in one kernel."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import store, sync_block
from jaxkern.mosaic.launch import grid_axes, interpreted, launch_kernel, num_sms
from jaxkern.ops.norm.pointwise import Options
from jaxkern.ops.norm.rows import Tile

_COLUMNS, _SHARE = grid_axes("columns", "share")
_MOST_SHARES = 8
_SHARE_ROWS = 16
"""Parts that make a warpgroup worthwhile."""


def sum_parts(options: Options, parts: list[jax.Array], dtypes: list[Any]) -> list[jax.Array]:
    """Each of `parts`, (P, G, N) fp32, summed over its first axis in a fixed order: (G, N)."""
    if not parts:
        return []
    count, *shape = parts[0].shape
    width = shape[0] * shape[1]
    vec = next((v for v in (4, 2, 1) if width % (32 * v) == 0 and _enough(width // (32 * v))), 1)
    columns = 32 * vec
    if count < 4 or width % columns:
        return [jnp.sum(p, axis=0).astype(t) for p, t in zip(parts, dtypes, strict=True)]
    shares = min(2 if interpreted() else _MOST_SHARES, -(-count // _SHARE_ROWS))
    # All of a warpgroup's parts are on their way at once.
    tile = Tile(4 * min(count // 4, -(-count // (4 * shares))), columns, vec)
    scratch: dict[str, Any] = {
        "shared": plgpu.SMEM((len(parts), shares * tile.unit, columns), jnp.float32)
    }
    if interpreted():
        scratch["met"] = plgpu.Barrier(num_arrivals=shares)
    blocks = width // columns
    sums = launch_kernel(
        functools.partial(_sum_kernel, tile, count, shares, len(parts)),
        out_type=tuple(jax.ShapeDtypeStruct((blocks, columns), t) for t in dtypes),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=(_COLUMNS,),
        num_threads=shares,
        thread_name=_SHARE,
        kernel_name=f"{options.op}_sum",
    )(*(p.reshape(count, blocks, columns) for p in parts))
    return [s.reshape(shape) for s in sums]


def _enough(blocks: int) -> bool:
    return blocks >= num_sms() * 3 // 4


def _sum_kernel(tile: Tile, count: int, shares: int, sums: int, *refs: Any, **smem: Any) -> None:
    share, column = lax.axis_index(_SHARE), lax.axis_index(_COLUMNS)
    place = tile.place(types.SimpleNamespace(**smem))

    def step(k: Any, totals: Any) -> Any:
        index = share + k * shares
        read = [place.load(r, place.row(index, count), column, 0) for r in refs[:sums]]
        return tuple(
            place.add(total, place.new(index, count, v))
            for total, v in zip(totals, read, strict=True)
        )

    steps = lax.div(tile.rows_of(count) - share + shares - 1, shares)
    totals = lax.fori_loop(0, steps, step, (place.zero_sum(),) * sums)
    for i, total in enumerate(totals):
        store(smem["shared"].at[i, pl.ds(share * tile.unit, tile.unit)], total)
    if not interpreted():
        sync_block()
    else:
        plgpu.barrier_arrive(smem["met"])
        plgpu.barrier_wait(smem["met"])

    @pl.when(share == 0)
    def _():
        for i, out in enumerate(refs[sums:]):
            held = [place.load_row(smem["shared"].at[i, r]) for r in range(shares * tile.unit)]
            store(out.at[column], sum(held[1:], start=held[0]).astype(out.dtype))
