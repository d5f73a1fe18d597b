"""The matrix product on Hopper's tensor cores, with an epilogue: its launch.

One warpgroup of a block fetches tiles of both operands by TMA into a ring in shared memory; two
others multiply them from there with ``wgmma``, 64 or 128 rows of the result each, and store the
result while the next tile's operands arrive. There is a block for each multiprocessor, which
computes one tile of the result after the other, in an order that keeps operands in the L2 cache;
pairs of blocks share the operand that both read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import away_from_slices, launch_kernel, num_sms, shared_memory
from jaxkern.mosaic.wgmma import SWIZZLE, swizzled
from jaxkern.ops.linear.matmul_kernel import (
    BOX_F32,
    CLUSTERS,
    PAIR,
    SLOTS_F32,
    WARPGROUP,
    Product,
    kernel,
    matrices,
)
from jaxkern.ops.linear.tiles import BOX, CONSUMERS, Tile

_BYTES = 2
"""Of an operand's element."""
_SLOT = 64 * SWIZZLE
"""Bytes of a slot of the epilogue."""
_BARRIERS = 1024
"""Bytes of shared memory that are left to barriers."""


def matmul(
    product: Product,
    tile: Tile,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    rows: Sequence[jax.Array] = (),
    tiles: Sequence[jax.Array] = (),
    accumulators: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """The results, (M, N) each, of operands (M, K) and (K, N) or (K, 2, N), 16-bit floats.

    The TMA takes an array if its first size is below 8 or a multiple of 8, and its last one 8, 16,
    24, 32 or a multiple of 64.

    Args:
      product: what is computed.
      tile: in which tiles.
      lhs, rhs: operands, as they are stored.
      rows: (N,) each, or padded to a multiple of 64, for the epilogue.
      tiles: (M, N) each, 16-bit floats, for the epilogue.
      accumulators: (M, N) float32 each, for as many results, which are added to them in their
        memory, where XLA can give it away.
    """
    k, m = lhs[0].shape if product.lhs_transposed else lhs[0].shape[::-1]
    n = rhs[0].shape[0 if product.rhs_transposed else -1]
    summed, second = len(lhs) > 1, len(matrices(rhs))
    assert not summed or len(lhs) == second
    products = 1 if summed else second
    pair_m, pair_n = tile.pair
    pair = pair_m * pair_n
    if accumulators:
        kept = lhs, rhs, rows, tiles, accumulators
        lhs, rhs, rows, tiles, accumulators = map(away_from_slices, kept)
    held = [jax.new_ref(a) for a in accumulators]
    shapes: list[tuple[int, ...]] = [(m, n) for _ in product.out_dtypes[len(held) :]]
    if product.pair:
        assert not held, "accumulators of results that are one array"
        shapes[-2:] = [(m, 2, n)]
    outs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(t))
        for shape, t in zip(shapes, product.out_dtypes[len(held) :], strict=False)
    ]
    tile, scratch = _shared_memory(product, tile, products, lhs[0].dtype, tiles, len(held))
    count = -(-m // (tile.m * pair_m)) * -(-n // (tile.n * pair_n))
    counts = tuple(len(v) for v in (lhs, rhs, rows, tiles, held))
    results = launch_kernel(
        functools.partial(kernel, product, tile, (m, n, k), counts),
        out_type=tuple(outs),
        scratch_types=scratch,
        grid=(min(num_sms() // pair, count),),
        grid_names=(CLUSTERS,),
        num_threads=CONSUMERS + 1,
        thread_name=WARPGROUP,
        kernel_name=product.name,
        approx_math=True,  # results have 16 bits
        **({"cluster": (pair,), "cluster_names": (PAIR,)} if pair > 1 else {}),
    )(*lhs, *rhs, *rows, *tiles, *held)
    results = [*(jax.freeze(r) for r in held), *results]
    return away_from_slices(results) if held else results


def _shared_memory(
    product: Product,
    tile: Tile,
    products: int,
    dtype: Any,
    tiles: Sequence[jax.Array],
    accumulators: int,
) -> tuple[Tile, dict[str, Any]]:
    """The tile with as many stages as there is room for, and what a block allocates for it."""
    out_dtypes = tuple(dict.fromkeys(product.out_dtypes))
    boxes = len(tile.boxes)
    fetched = accumulators * SLOTS_F32 if tile.prefetch else 0
    epilogue = (len(tiles) + fetched) * boxes + 2 * len(out_dtypes)  # slots of a warpgroup
    fitting = (shared_memory() - _BARRIERS - CONSUMERS * epilogue * _SLOT) // (
        _BYTES * tile.k * (tile.m + products * tile.n)
    )
    tile = dataclasses.replace(tile, stages=min(tile.stages, fitting))
    a_tile = (tile.k, tile.m) if product.lhs_transposed else (tile.m, tile.k)
    b_tile = (tile.n, tile.k) if product.rhs_transposed else (tile.k, tile.n)
    scratch: dict[str, Any] = {
        "a_slots": swizzled(tile.stages, *a_tile, dtype=dtype),
        "b_slots": swizzled(products, tile.stages, *b_tile, dtype=dtype),
        "full": plgpu.Barrier(num_arrivals=1 + products, num_barriers=tile.stages),
    }
    if tiles:
        held_by = (CONSUMERS, boxes, len(tiles), 64, BOX)
        scratch["in_slots"] = swizzled(*held_by, dtype=tiles[0].dtype)
    if fetched:
        held_by = (CONSUMERS, boxes, fetched, 64, BOX_F32)
        scratch["held_slots"] = swizzled(*held_by, dtype=jnp.float32)
    if arrivals := len(tiles) + fetched:
        scratch["loaded"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=CONSUMERS * boxes)
    scratch["outs"] = {
        t: swizzled(CONSUMERS, 2, 64, box, dtype=jnp.dtype(t))
        for t, box in ((t, SWIZZLE // jnp.dtype(t).itemsize) for t in out_dtypes)
    }
    barrier: Any = plgpu.Barrier
    if tile.share is not None:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=(PAIR,))
    scratch["empty"] = barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages)
    return tile, scratch
