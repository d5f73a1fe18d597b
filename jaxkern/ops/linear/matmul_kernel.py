"""The body of the matrix product's kernel: a warpgroup that fetches, and two that multiply."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import grid_axes
from jaxkern.mosaic.wgmma import ACCUMULATOR, SWIZZLE, start_fetch
from jaxkern.ops.linear.tiles import BOX, CONSUMERS, Tile

CLUSTERS, PAIR, WARPGROUP = grid_axes("clusters", "pair", "warpgroup")
BOX_F32 = SWIZZLE // 4
"""Columns of a slot in fp32."""
SLOTS_F32 = BOX // BOX_F32
"""Slots of a box in fp32."""

REGISTERS, FETCH_REGISTERS = 232, 40
"""Registers of a lane that multiplies, and of one that fetches: 2 · 232 + 40 of the 512 that a
multiprocessor has for a lane of each of a block's three warpgroups together."""

Epilogue = Callable[[list[Any], list[Any], list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Product:
    """Products a · b and their epilogue.

    One a with several b gives a product for each b; several a with as many b give their sum. Two b
    may be the halves of one array, whose columns are then (2, N).

    Attributes:
      lhs_transposed: whether the a are stored as (K, M).
      rhs_transposed: whether the b are stored as (N, K).
      out_dtypes: of the results.
      epilogue: ``epilogue(products, rows, tiles)`` gives boxes (64, 64) of the results in fp32 from
        boxes of the products, of arrays (N,) that are the same in every row, and of arrays (M, N).
      name: of the kernel.
      pair: whether the last two results are the halves of one array, (M, 2, N).
    """

    lhs_transposed: bool
    rhs_transposed: bool
    out_dtypes: tuple[str, ...]
    epilogue: Epilogue
    name: str
    pair: bool = False

    def __post_init__(self) -> None:
        assert not self.pair or self.out_dtypes[-1] == self.out_dtypes[-2], self


class Matrix(NamedTuple):
    """An operand or a result: an array, or one half of an array that holds two."""

    ref: Any
    half: int | None

    def at(self, rows: Any, columns: Any) -> Any:
        if self.half is None:
            return self.ref.at[rows, columns]
        return self.ref.at[rows, self.half, columns]


def matrices(refs: Sequence[Any]) -> list[Matrix]:
    """The matrices in arrays, of which one with three axes holds two."""
    halves = lambda ref: (0, 1) if len(ref.shape) == 3 else (None,)
    return [Matrix(ref, half) for ref in refs for half in halves(ref)]


@dataclasses.dataclass(frozen=True)
class Shared:
    """The shared memory of a block.

    Attributes:
      a_slots, b_slots: rings of operands' tiles, (stages, ...) and (products, stages, ...).
      full, empty: barriers, one a stage: its tiles have arrived, and have been multiplied.
      outs: two slots for each warpgroup through which results are stored, by dtype.
      in_slots: boxes of what the epilogue reads.
      held_slots: boxes of the accumulators, where they are fetched.
      loaded: barriers, one a box: what its epilogue reads has arrived.
    """

    a_slots: Any
    b_slots: Any
    full: Any
    empty: Any
    outs: dict[str, Any]
    in_slots: Any = None
    held_slots: Any = None
    loaded: Any = None


def kernel(
    product: Product,
    tile: Tile,
    sizes: tuple[int, int, int],
    counts: tuple[int, ...],
    *refs: Any,
    **scratch: Any,
) -> None:
    """Computes `product`, (m, n, k) being `sizes`.

    `refs` are operands, rows and tiles of the epilogue and accumulators, `counts` of each, and the
    other results; `scratch` is as in :class:`Shared`.
    """
    ends = list(itertools.accumulate(counts[:-1]))
    lhs, rhs, rows, tiles, outs = (
        refs[first:last] for first, last in zip([0, *ends], [*ends, None], strict=True)
    )
    m, n, k = sizes
    pair_m, pair_n = tile.pair
    grid = -(-m // (tile.m * pair_m)), -(-n // (tile.n * pair_n))
    warpgroup, clusters = lax.axis_index(WARPGROUP), lax.axis_size(CLUSTERS)
    first = lax.axis_index(CLUSTERS)
    mine = lax.div(grid[0] * grid[1] - first + clusters - 1, clusters)
    block = _Block(
        product=product,
        tile=tile,
        lhs=matrices(lhs),
        rhs=matrices(rhs),
        rows=rows,
        tiles=tiles,
        outs=matrices(outs),
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
class _Block:
    """A block's part of a product: every `clusters`-th tile of the result from `first` on.

    Attributes:
      lhs, rhs, rows, tiles, outs: the arrays, of which the first `held` results are accumulators.
      depth: steps of the contraction.
      grid: rows and columns of tiles, or of pairs of tiles where blocks are paired.
      in_pair: the block's index in its pair.
    """

    product: Product
    tile: Tile
    lhs: list[Matrix]
    rhs: list[Matrix]
    rows: Sequence[Any]
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
        """Operands that are multiplied one after the other: an a, and all b of it."""
        if len(self.lhs) == 1:
            return [(self.lhs[0], self.rhs)]
        return [(a, (b,)) for a, b in zip(self.lhs, self.rhs, strict=True)]

    @property
    def steps(self) -> int:
        """Stages of the ring for a tile of the result."""
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
        # What the epilogue reads arrives during the product. The last epilogue is done with the
        # slots, as its results passed a barrier.
        self.prefetch(row, column)
        accumulator = ACCUMULATOR((self.tile.own, self.tile.n), jnp.float32)
        accumulators = [accumulator] * len(self.terms[0][1])
        products = pl.run_scoped(functools.partial(self.multiply, i), *accumulators)
        self.finish(i, row, column, products)

    def prefetch(self, row: Any, column: Any) -> None:
        """Fetches what the epilogue reads of a tile, box by box."""
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
        """The barrier at which what the epilogue reads of a box arrives."""
        return self.shared.loaded.at[self.warpgroup * len(self.tile.boxes) + box]

    def multiply(self, i: Any, *accumulators: Any) -> list[Any]:
        """The products of the warpgroup's rows of the `i`-th tile, (own, n) each."""
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

    def stores(self, dtype: str) -> int:
        """The number of stores of a tile through the slots of `dtype`."""
        boxes = len(self.tile.boxes) * BOX // self.shared.outs[dtype].shape[-1]
        return boxes * sum(str(out.ref.dtype) == dtype for out in self.outs)

    def store(
        self, o: int, result: Any, box: int, corner: tuple[Any, Any], stored: dict[str, Any]
    ) -> None:
        """Stores a box of result `o`; `stored` counts the stores through slots of each dtype."""
        shared, out, n = self.shared, self.outs[o], self.outs[o].ref.shape[-1]
        (row, column), (r, c) = corner, self.tile.boxes[box]
        dtype = str(out.ref.dtype)
        wide = shared.outs[dtype].shape[-1]
        for b in range(0, BOX, wide):
            slot = shared.outs[dtype].at[self.warpgroup, lax.rem(stored[dtype], 2)]
            stored[dtype] = stored[dtype] + 1
            # Of a narrow result most is not stored: a slot's store may be the last one.
            plgpu.wait_smem_to_gmem(1 if n > wide else 0, wait_read_only=True)
            value = result[:, b : b + wide].astype(out.ref.dtype)  # (64, wide)
            adds = o < self.held
            if adds and shared.held_slots is not None:
                held = shared.held_slots.at[self.warpgroup, box, o * SLOTS_F32 + b // wide]
                value, adds = value + plgpu.load(held, layout=plgpu.Layout.WGMMA), False
            slot[...] = value
            plgpu.commit_smem()
            start = column + c + b
            store = functools.partial(
                plgpu.copy_smem_to_gmem,
                slot,
                out.at(pl.ds(row + r, BOX), pl.ds(start, wide)),
                reduction_op="add" if adds else None,
            )
            if n > wide:
                store()
            else:  # Mosaic drops the only box's index, and with it the TMA's clipping
                pl.when(start == 0)(store)


def columns(ref: Any, first: Any) -> Any:
    """(64, 64): 64 elements of a row from `first` on, the same in each row."""
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
