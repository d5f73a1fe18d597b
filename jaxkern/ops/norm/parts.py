"""The last addition of dw and db: what the blocks of the backward have summed, in one kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.mosaic import LANES, grid_axes, sync_block
from jaxkern.ops.norm.pointwise import Options

_COLUMNS, _SHARE = grid_axes("columns", "share")
_SHARES = 8
"""Warpgroups that share the parts of a column among them."""
_AHEAD = 8
"""Parts that a warpgroup reads before it adds them."""
_ROW: Any = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


def sum_parts(options: Options, parts: list[jax.Array], dtypes: list[Any]) -> list[jax.Array]:
    """Each of `parts`, (P, G, N) fp32, summed over its first axis in a fixed order: (G, N)."""
    if not parts:
        return []
    count, *shape = parts[0].shape
    width = shape[0] * shape[1]
    if count == 1 or width % LANES:
        return [jnp.sum(p, axis=0).astype(t) for p, t in zip(parts, dtypes, strict=True)]
    interpret = options.mode == "interpret"
    shares = min(2 if interpret else _SHARES, count)
    scratch: dict[str, Any] = {"shared": plgpu.SMEM((len(parts), shares, LANES), jnp.float32)}
    if interpret:
        scratch["met"] = plgpu.Barrier(num_arrivals=shares)
    sums = plgpu.kernel(
        functools.partial(_sum_kernel, count, shares, len(parts), interpret),
        out_type=tuple(jax.ShapeDtypeStruct((width,), t) for t in dtypes),
        scratch_types=scratch,
        grid=(width // LANES,),
        grid_names=(_COLUMNS,),
        num_threads=shares,
        thread_name=_SHARE,
        kernel_name=f"{options.op}_sum",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*(p.reshape(-1) for p in parts))
    return [s.reshape(shape) for s in sums]


def _sum_kernel(count: int, shares: int, sums: int, interpret: bool, *refs: Any, **smem: Any):
    share, first = lax.axis_index(_SHARE), lax.axis_index(_COLUMNS) * LANES
    columns = pl.ds(first, LANES)
    width, group = refs[sums].size, shares * _AHEAD
    full, rest = divmod(count, group)
    own = first + share * width

    def add(start: Any, ahead: int, totals: Any) -> Any:
        """Adds `ahead` parts, every `shares`-th from element `start` on."""
        read = [
            [
                plgpu.load(
                    parts.at[pl.ds(start + a * shares * width, LANES)],
                    layout=_ROW,
                    optimized=False,
                )
                for a in range(ahead)
            ]
            for parts in refs[:sums]
        ]
        return tuple(sum(r, start=total) for r, total in zip(read, totals, strict=True))

    zeros = (plgpu.layout_cast(jnp.zeros(LANES, jnp.float32), _ROW),) * sums
    totals = lax.fori_loop(
        0, full, lambda k, totals: add(own + k * (group * width), _AHEAD, totals), zeros
    )
    totals = lax.fori_loop(
        0,
        lax.div(rest - share + shares - 1, shares),
        lambda k, totals: add(own + (full * group + k * shares) * width, 1, totals),
        totals,
    )
    for i, total in enumerate(totals):
        smem["shared"][i, share] = total
    if not interpret:
        sync_block()
    else:
        plgpu.barrier_arrive(smem["met"])
        plgpu.barrier_wait(smem["met"])

    @pl.when(share == 0)
    def _():
        for i, out in enumerate(refs[sums:]):
            rows = [
                plgpu.load(smem["shared"].at[i, s], layout=_ROW, optimized=False)
                for s in range(shares)
            ]
            out[columns] = sum(rows[1:], start=rows[0]).astype(out.dtype)
