"""The matrix product on Hopper's tensor cores, with an epilogue.

One warpgroup of a block fetches tiles of both operands by TMA into a ring in shared memory; two
others multiply them from there with ``wgmma``, 64 or 128 rows of the result each, and store the
result while the next tile's operands arrive. There is one block per multiprocessor, which computes
one tile of the result after the other, in an order that keeps operands in the L2 cache; pairs of
blocks share the operand that both read.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import (
    away_from_slices,
    grid_axes,
    launch_kernel,
    num_sms,
    shared_memory,
)
from jaxkern.mosaic.wgmma import ACCUMULATOR, ROWS, SWIZZLE, start_fetch, swizzled
from jaxkern.ops.linear.tiles import BOX, CONSUMERS, ProductTile

CLUSTERS, PAIR, WARPGROUP = grid_axes("clusters", "pair", "warpgroup")
BOX_F32 = SWIZZLE // 4
"""Columns of a slot in fp32."""
SLOTS_F32 = BOX // BOX_F32
"""Slots of a box in fp32."""

REGISTERS, FETCH_REGISTERS = 232, 40
"""Registers of a multiplying lane and of a fetching one: a multiprocessor has 512 for one lane of
each of the block's three warpgroups, and 2 · 232 + 40 fit."""

_BYTES = 2
"""Bytes of an operand's element."""
_SLOT = 64 * SWIZZLE
"""Bytes of a slot of the epilogue."""
_BARRIERS = 1024
"""Bytes of shared memory that are left for barriers."""


@dataclasses.dataclass(frozen=True)
class Product:
    """Products a · b and their epilogue.

    One a with several b gives a product for each b; several a with as many b give their sum. Two b
    may be the halves of one array, whose columns are then (2, N).

    Attributes:
      lhs_transposed: whether the a are stored as (K, M).
      rhs_transposed: whether the b are stored as (N, K).
      out_dtypes: dtypes of the results.
      epilogue: ``epilogue(products, rows, tiles)`` gives boxes (64, 64) of the results in fp32 from
        boxes of the products, of arrays (N,) that are the same in every row, and of arrays (M, N).
      name: name of the kernel.
      pair: whether the last two results are the halves of one array, (M, 2, N).
      sums: instead, how many numbers of each row and each tile's columns are the result, one array
        (tiles, sums, M), M padded to whole tiles: ``epilogue(boxes, rows, columns, first)`` gives
        them, (64,) each, from all boxes of a tile from left to right, for each of these what
        `rows` have there, arrays (M,) that are the same in every column, (64,), and the number of
        the tile's first column. Where N is no multiple of the tile's, it masks what is beyond.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    out_dtypes: tuple[str, ...]
    epilogue: Callable[..., list[Any]]
    name: str
    pair: bool = False
    sums: int = 0

    def __post_init__(self) -> None:
        assert not self.pair or self.out_dtypes[-1] == self.out_dtypes[-2], self


def matmul(
    product: Product,
    tile: ProductTile,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    rows: Sequence[jax.Array] = (),
    tiles: Sequence[jax.Array] = (),
    accumulators: Sequence[jax.Array] = (),
    columns: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Computes results (M, N) of operands (M, K) and (K, N) or (K, 2, N), 16-bit floats.

    TMA takes an array if its first size is below 8 or a multiple of 8, and its last one 8, 16, 24,
    32 or a multiple of 64.

    Args:
      product: the product and its epilogue.
      tile: its tile.
      lhs, rhs: operands, as they are stored.
      rows: (N,) each, or padded to a multiple of 64, for the epilogue.
      tiles: (M, N) each, 16-bit floats, for the epilogue.
      accumulators: (M, N) float32 each. The first results are added to them, in their memory if
        nothing else needs it.
      columns: (M,) each, for the epilogue of sums.
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
    grid = -(-m // (tile.m * pair_m)), -(-n // (tile.n * pair_n))
    if product.sums:
        shape = grid[1] * pair_n, product.sums, grid[0] * pair_m * tile.m
        outs = [jax.ShapeDtypeStruct(shape, jnp.float32)]
        columns = [jnp.pad(v, (0, shape[-1] - v.shape[0])) for v in columns]
    tile, scratch = _shared_memory(product, tile, products, lhs[0].dtype, tiles, len(held))
    count = math.prod(grid)
    counts = tuple(len(v) for v in (lhs, rhs, rows, columns, tiles, held))
    results = launch_kernel(
        functools.partial(_kernel, product, tile, (m, n, k), counts),
        out_type=tuple(outs),
        scratch_types=scratch,
        grid=(min(num_sms() // pair, count),),
        grid_names=(CLUSTERS,),
        num_threads=CONSUMERS + 1,
        thread_name=WARPGROUP,
        kernel_name=product.name,
        approx_math=True,  # results have 16 bits
        **({"cluster": (pair,), "cluster_names": (PAIR,)} if pair > 1 else {}),
    )(*lhs, *rhs, *rows, *columns, *tiles, *held)
    results = [*(jax.freeze(r) for r in held), *results]
    return away_from_slices(results) if held else results


def _shared_memory(
    product: Product,
    tile: ProductTile,
    products: int,
    dtype: Any,
    tiles: Sequence[jax.Array],
    accumulators: int,
) -> tuple[ProductTile, dict[str, Any]]:
    """Limits the tile's stages to those that fit shared memory, and lists a block's allocations."""
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
    if product.sums:
        scratch["outs"] = plgpu.SMEM((CONSUMERS, 2, product.sums, BOX), jnp.float32)
    else:
        scratch["outs"] = {
            t: swizzled(CONSUMERS, 2, 64, box, dtype=jnp.dtype(t))
            for t, box in ((t, SWIZZLE // jnp.dtype(t).itemsize) for t in out_dtypes)
        }
    barrier: Any = plgpu.Barrier
    if tile.share is not None:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=(PAIR,))
    scratch["empty"] = barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages)
    return tile, scratch


class Matrix(NamedTuple):
    """Operand or result: an array, or one half of an array that holds two."""

    ref: Any
    half: int | None

    def at(self, rows: Any, columns: Any) -> Any:
        if self.half is None:
            return self.ref.at[rows, columns]
        return self.ref.at[rows, self.half, columns]


def matrices(refs: Sequence[Any]) -> list[Matrix]:
    """Matrices in arrays; an array with three axes holds two."""
    halves = lambda ref: (0, 1) if len(ref.shape) == 3 else (None,)
    return [Matrix(ref, half) for ref in refs for half in halves(ref)]


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory of a block.

    Attributes:
      a_slots, b_slots: rings of operands' tiles, (stages, ...) and (products, stages, ...).
      full, empty: barriers per stage: its tiles have arrived, and have been multiplied.
      outs: two slots per warpgroup and dtype, or of sums, through which results are stored.
      in_slots: boxes of the epilogue's tiles.
      held_slots: boxes of the accumulators, where they are fetched.
      loaded: barriers per box: its epilogue's inputs have arrived.
    """

    a_slots: Any
    b_slots: Any
    full: Any
    empty: Any
    outs: Any
    in_slots: Any = None
    held_slots: Any = None
    loaded: Any = None


def _kernel(
    product: Product,
    tile: ProductTile,
    sizes: tuple[int, int, int],
    counts: tuple[int, ...],
    *refs: Any,
    **scratch: Any,
) -> None:
    """Computes `product` for sizes (m, n, k).

    `refs` are a, b, rows, columns, tiles and accumulators, `counts` of each, and then the other
    results; `scratch` is as in :class:`Shared`.
    """
    ends = list(itertools.accumulate(counts[:-1]))
    lhs, rhs, rows, of_rows, tiles, outs = (
        refs[first:last] for first, last in zip([0, *ends], [*ends, None], strict=True)
    )
    m, n, k = sizes
    pair_m, pair_n = tile.pair
    grid = -(-m // (tile.m * pair_m)), -(-n // (tile.n * pair_n))
    warpgroup, clusters = lax.axis_index(WARPGROUP), lax.axis_size(CLUSTERS)
    first = lax.axis_index(CLUSTERS)
    mine = lax.div(grid[0] * grid[1] - first + clusters - 1, clusters)
    block = _ProductBlock(
        product=product,
        tile=tile,
        lhs=matrices(lhs),
        rhs=matrices(rhs),
        rows=rows,
        columns=of_rows,
        tiles=tiles,
        outs=[Matrix(outs[0], None)] if product.sums else matrices(outs),
        held=counts[-1],
        shared=Shared(**scratch),
        depth=-(-k // tile.k),
        grid=grid,
        warpgroup=warpgroup,
        clusters=clusters,
        first=first,
        in_pair=lax.axis_index(PAIR) if pair_m * pair_n > 1 else 0,
    )

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        block.fetch(mine)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        lax.fori_loop(0, mine, lambda i, _: block.compute(i), None)
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _ProductBlock:
    """A block's share of a product: every `clusters`-th tile of the result from `first` on.

    Attributes:
      lhs, rhs, rows, columns, tiles, outs: arrays; the first `held` results are accumulators.
      depth: steps of the contraction.
      grid: rows and columns of tiles, or of pairs of tiles where blocks are paired.
      in_pair: the block's index in its pair.
    """

    product: Product
    tile: ProductTile
    lhs: list[Matrix]
    rhs: list[Matrix]
    rows: Sequence[Any]
    columns: Sequence[Any]
    tiles: Sequence[Any]
    outs: list[Matrix]
    held: int
    shared: Shared
    depth: int
    grid: tuple[int, int]
    warpgroup: Any
    clusters: Any
    first: Any
    in_pair: Any

    @property
    def terms(self) -> list[tuple[Matrix, Sequence[Matrix]]]:
        """Operands that are multiplied one after the other: an a with all its b."""
        if len(self.lhs) == 1:
            return [(self.lhs[0], self.rhs)]
        return [(a, (b,)) for a, b in zip(self.lhs, self.rhs, strict=True)]

    @property
    def steps(self) -> int:
        """Stages of the ring per tile of the result."""
        return self.depth * len(self.terms)

    def corner(self, i: Any) -> tuple[Any, Any]:
        """Row and column of the block's `i`-th tile of the result."""
        tile, (pair_m, pair_n) = self.tile, self.tile.pair
        row, column = banded(self.first + i * self.clusters, *self.grid, tile.width)
        row = row * pair_m + (self.in_pair if pair_m > 1 else 0)
        column = column * pair_n + (self.in_pair if pair_n > 1 else 0)
        return row * tile.m, column * tile.n

    def fetch(self, mine: Any) -> None:
        """Fetches the operands of all `mine` tiles into the ring."""
        stages, empty = self.tile.stages, self.shared.empty

        def fetch_step(step: Any, _: Any) -> None:
            i, part = lax.div(step, self.steps), lax.rem(step, self.steps)
            slot = lax.rem(step, stages)
            row, column = self.corner(i)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            within = pl.ds(lax.rem(part, self.depth) * self.tile.k, self.tile.k)
            a_index = pl.ds(row, self.tile.m), within
            b_index = within, pl.ds(column, self.tile.n)
            for t, term in enumerate(self.terms):
                if len(self.terms) == 1:
                    self.fetch_term(*term, slot, a_index, b_index)
                else:
                    fetch = functools.partial(self.fetch_term, *term, slot, a_index, b_index)
                    pl.when(lax.div(part, self.depth) == t)(fetch)

        def drain(step: Any, _: Any) -> None:
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

        total = mine * self.steps
        lax.fori_loop(0, total, fetch_step, None)
        # Consumers still arrive, the other block's among them.
        lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)

    def fetch_term(
        self, a: Matrix, bs: Sequence[Matrix], slot: Any, a_index: Any, b_index: Any
    ) -> None:
        """Fetches one step's tiles of an a and its b into a slot of the ring."""
        shared, share = self.shared, self.tile.share
        start_fetch(
            a.at(*(a_index[::-1] if self.product.lhs_transposed else a_index)),
            shared.a_slots.at[slot],
            shared.full.at[slot],
            collective_axes=(PAIR,) if share == "lhs" else None,
        )
        for which, b in enumerate(bs):
            start_fetch(
                b.at(*(b_index[::-1] if self.product.rhs_transposed else b_index)),
                shared.b_slots.at[which, slot],
                shared.full.at[slot],
                collective_axes=(PAIR,) if share == "rhs" else None,
            )

    def compute(self, i: Any) -> None:
        """Computes the warpgroup's rows of the block's `i`-th tile of the result."""
        row, column = self.corner(i)
        row = row + self.warpgroup * self.tile.own
        # The epilogue's inputs arrive during the product. The last epilogue is done with the slots,
        # as its results passed a barrier.
        self.prefetch(row, column)
        accumulator = ACCUMULATOR((self.tile.own, self.tile.n), jnp.float32)
        accumulators = [accumulator] * len(self.terms[0][1])
        products = pl.run_scoped(functools.partial(self.multiply, i), *accumulators)
        finish = self.finish_sums if self.product.sums else self.finish
        finish(i, row, column, products)

    def prefetch(self, row: Any, column: Any) -> None:
        """Fetches the epilogue's inputs for a tile, box by box."""
        shared, boxes = self.shared, list(enumerate(self.tile.boxes))
        for (box, (r, c)), (t, ref) in itertools.product(boxes, enumerate(self.tiles)):
            start_fetch(
                ref.at[pl.ds(row + r, BOX), pl.ds(column + c, BOX)],
                shared.in_slots.at[self.warpgroup, box, t],
                self.arrival(box),
            )
        if shared.held_slots is None:
            return
        for (box, (r, c)), o, b in itertools.product(boxes, range(self.held), range(SLOTS_F32)):
            start_fetch(
                self.outs[o].at(pl.ds(row + r, BOX), pl.ds(column + c + b * BOX_F32, BOX_F32)),
                shared.held_slots.at[self.warpgroup, box, o * SLOTS_F32 + b],
                self.arrival(box),
            )

    def arrival(self, box: int) -> Any:
        """Barrier at which the epilogue's inputs for a box arrive."""
        return self.shared.loaded.at[self.warpgroup * len(self.tile.boxes) + box]

    def multiply(self, i: Any, *accumulators: Any) -> list[Any]:
        """Multiplies the warpgroup's rows of the `i`-th tile: (own, n) for each b."""
        shared, tile = self.shared, self.tile

        def step(j: Any, _: Any) -> None:
            index = i * self.steps + j
            slot = lax.rem(index, tile.stages)
            plgpu.barrier_wait(shared.full.at[slot])
            part = pl.ds(self.warpgroup * tile.own, tile.own)
            if self.product.lhs_transposed:
                lhs = shared.a_slots.at[slot, :, part].transpose((1, 0))
            else:
                lhs = shared.a_slots.at[slot, part]
            for b, accumulator in enumerate(accumulators):
                rhs = shared.b_slots.at[b, slot]
                if self.product.rhs_transposed:
                    rhs = rhs.transpose((1, 0))
                plgpu.wgmma(accumulator, lhs, rhs)
            plgpu.wgmma_wait(len(accumulators))

            @pl.when(j > 0)
            def _():
                plgpu.barrier_arrive(shared.empty.at[lax.rem(index - 1, tile.stages)])

        lax.fori_loop(0, self.steps, step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.empty.at[lax.rem((i + 1) * self.steps - 1, tile.stages)])
        return [accumulator[...] for accumulator in accumulators]

    def finish(self, i: Any, row: Any, column: Any, products: Sequence[Any]) -> None:
        """Runs the epilogue on the products of a tile, and stores the results, box by box."""
        stored = {dtype: i * self.stores(dtype) for dtype in self.shared.outs}
        for box, (r, c) in enumerate(self.tile.boxes):
            parts = [p[r : r + BOX, c : c + BOX] for p in products]  # (64, 64)
            rows = [columns(ref, jnp.minimum(column + c, ref.shape[0] - BOX)) for ref in self.rows]
            if self.shared.loaded is not None:
                plgpu.barrier_wait(self.arrival(box))
            tiles = [
                plgpu.load(
                    self.shared.in_slots.at[self.warpgroup, box, t], layout=plgpu.Layout.WGMMA
                ).astype(jnp.float32)
                for t in range(len(self.tiles))
            ]
            results = self.product.epilogue(parts, rows, tiles)
            for o, result in enumerate(results):
                self.store(o, result, box, (row, column), stored)

    def finish_sums(self, i: Any, row: Any, column: Any, products: Sequence[Any]) -> None:
        """Runs the epilogue on the rows of a tile, 64 at a time, and stores their sums."""
        shared, tile, out = self.shared, self.tile, self.outs[0].ref
        boxes = range(0, tile.n, BOX)
        halves = range(0, tile.own, BOX)
        for number, r in enumerate(halves):
            of_rows = [
                plgpu.load(ref.at[pl.ds(row + r, BOX)], layout=ROWS, optimized=False)
                for ref in self.columns
            ]
            sums = self.product.epilogue(
                [products[0][r : r + BOX, c : c + BOX] for c in boxes],
                [[columns(ref, column + c) for ref in self.rows] for c in boxes],
                of_rows,
                column,
            )
            slot = shared.outs.at[self.warpgroup, lax.rem(i * len(halves) + number, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for s, value in enumerate(sums):
                slot[s] = value
            plgpu.commit_smem()
            to = out.at[lax.div(column, tile.n), :, pl.ds(row + r, BOX)]
            plgpu.copy_smem_to_gmem(slot, to)

    def stores(self, dtype: str) -> int:
        """Number of stores per tile through the slots of `dtype`."""
        boxes = len(self.tile.boxes) * BOX // self.shared.outs[dtype].shape[-1]
        return boxes * sum(str(out.ref.dtype) == dtype for out in self.outs)

    def store(
        self, o: int, result: Any, box: int, corner: tuple[Any, Any], stored: dict[str, Any]
    ) -> None:
        """Stores a box of result `o`; `stored` counts the stores through slots of each dtype."""
        shared, out, n = self.shared, self.outs[o], self.outs[o].ref.shape[-1]
        (row, column), (r, c) = corner, self.tile.boxes[box]
        dtype = str(out.ref.dtype)
        columns = shared.outs[dtype].shape[-1]
        for b in range(0, BOX, columns):
            slot = shared.outs[dtype].at[self.warpgroup, lax.rem(stored[dtype], 2)]
            stored[dtype] = stored[dtype] + 1
            # A narrow result skips most stores, so that a slot's store may be the last one.
            plgpu.wait_smem_to_gmem(1 if n > columns else 0, wait_read_only=True)
            value = result[:, b : b + columns].astype(out.ref.dtype)  # (64, columns)
            adds = o < self.held
            if adds and shared.held_slots is not None:
                held = shared.held_slots.at[self.warpgroup, box, o * SLOTS_F32 + b // columns]
                value, adds = value + plgpu.load(held, layout=plgpu.Layout.WGMMA), False
            slot[...] = value
            plgpu.commit_smem()
            start = column + c + b
            store = functools.partial(
                plgpu.copy_smem_to_gmem,
                slot,
                out.at(pl.ds(row + r, BOX), pl.ds(start, columns)),
                reduction_op="add" if adds else None,
            )
            if n > columns:
                store()
            else:  # Mosaic drops the only box's index, and with it the TMA's clipping
                pl.when(start == 0)(store)


def columns(ref: Any, first: Any) -> Any:
    """Broadcasts 64 elements of a row, from `first` on, to (64, 64)."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    row = plgpu.load(ref.at[pl.ds(first, BOX)], layout=layout, optimized=False)  # (64,)
    return plgpu.layout_cast(
        lax.broadcast_in_dim(row.astype(jnp.float32), (BOX, BOX), (1,)), plgpu.Layout.WGMMA
    )


def banded(index: Any, rows: int, columns: int, width: int) -> tuple[Any, Any]:
    """Row and column of the `index`-th tile, in bands of `width` columns, row by row in a band."""
    width = min(width, columns)
    band = lax.div(index, rows * width)
    within = index - band * rows * width
    here = jnp.minimum(columns - band * width, width)
    return lax.div(within, here), band * width + lax.rem(within, here)
