"""The matrix product on Hopper's tensor cores, with what follows it in the epilogue.

A warpgroup fetches tiles of both operands by TMA into a ring in shared memory; two others multiply
them, 64 or 128 rows of the result each, from shared memory with ``wgmma``, and write the result
while the next tile's operands are on their way. Blocks stay on their multiprocessors and go through
the result's tiles in an order that keeps operands in the L2 cache; pairs of blocks share what they
fetch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import grid_axes, launch_kernel, num_sms

_CLUSTERS, _PAIR, _WARPGROUP = grid_axes("clusters", "pair", "warpgroup")
_CONSUMERS = 2
_SWIZZLE = 128
_BYTES = 2
_BOX = _SWIZZLE // _BYTES
_SLOT = 64 * _SWIZZLE
_SHARED = 226 << 10
"""Bytes of an epilogue's slot, and of shared memory for all slots."""
_BOX_F32 = _SWIZZLE // 4
_PIECES = _BOX // _BOX_F32
"""Columns of a slot in fp32, and slots of a box."""
_accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tiles of the product.

    Attributes:
      m, n: of the result, for a block.
      k: of the contraction, for a step.
      stages: most steps on their way through shared memory; fewer where it has no room for them.
      share: which of a pair's blocks' operands they share: ``"lhs"`` where they lie side by side in
        a row, ``"rhs"`` in a column; None for blocks alone.
      width: tiles in a band; bands are gone through one after the other.
      prefetch: whether accumulators are fetched during the product, for short contractions, where
        product and memory take as long; otherwise the L2 cache adds to them.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    share: str | None = "rhs"
    width: int = 8
    prefetch: bool = False

    def __post_init__(self) -> None:
        assert self.m % (64 * _CONSUMERS) == 0, self
        assert self.n % _BOX == 0, self
        assert self.k % _BOX == 0, self

    @property
    def own(self) -> int:
        """Rows of the result for a warpgroup."""
        return self.m // _CONSUMERS

    @property
    def boxes(self) -> list[tuple[int, int]]:
        """Corners of the parts that a warpgroup finishes at a time."""
        return list(itertools.product(range(0, self.own, 64), range(0, self.n, _BOX)))

    @property
    def pair(self) -> tuple[int, int]:
        """Blocks of a cluster, along the rows and the columns of the result."""
        return (1 + (self.share == "rhs"), 1 + (self.share == "lhs"))


Epilogue = Callable[[list[Any], list[Any], list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Product:
    """Products a · b, and what becomes of them.

    Of one a with several b, each for itself; of several a with as many b, their sum. Two b may be
    one array, side by side: its columns are then (2, N).

    Attributes:
      lhs_transposed: whether the a are stored as (K, M).
      rhs_transposed: whether the b are stored as (N, K).
      out_dtypes: of the results.
      epilogue: takes tiles in fp32, of the products, of what is the same in every row, and of what
        is not; gives the tiles of the results.
      name: of the kernel.
      pair: whether the last two results are one array (M, 2, N), side by side.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    out_dtypes: tuple[str, ...]
    epilogue: Epilogue
    name: str
    pair: bool = False

    def __post_init__(self) -> None:
        assert not self.pair or self.out_dtypes[-1] == self.out_dtypes[-2], self


class _Matrix(NamedTuple):
    """An operand or a result: an array, or one half of an array that holds two side by side."""

    ref: Any
    half: int | None

    def at(self, rows: Any, columns: Any) -> Any:
        if self.half is None:
            return self.ref.at[rows, columns]
        return self.ref.at[rows, self.half, columns]


def _matrices(refs: Sequence[Any]) -> list[_Matrix]:
    halves = lambda ref: (0, 1) if len(ref.shape) == 3 else (None,)
    return [_Matrix(ref, half) for ref in refs for half in halves(ref)]


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

    The TMA takes them as they lie if the first size of each array is below 8 or a multiple of 8,
    and the last one 8, 16, 24, 32 or a multiple of 64.

    Args:
      product: what is computed.
      tile: how.
      lhs, rhs: operands, as they are stored.
      rows: (N,) each, or padded to a multiple of 64, for the epilogue.
      tiles: (M, N) each, 16-bit floats, for the epilogue.
      accumulators: (M, N) float32 each, for as many results, which are added to them in their
        memory, where XLA can give it away.
    """
    k, m = lhs[0].shape if product.lhs_transposed else lhs[0].shape[::-1]
    n = rhs[0].shape[0 if product.rhs_transposed else -1]
    summed, second = len(lhs) > 1, len(_matrices(rhs))
    assert not summed or len(lhs) == second
    products = 1 if summed else second
    pair_m, pair_n = tile.pair
    pair = pair_m * pair_n
    swizzled = _swizzled(_BOX)
    a_tile = (tile.k, tile.m) if product.lhs_transposed else (tile.m, tile.k)
    b_tile = (tile.n, tile.k) if product.rhs_transposed else (tile.k, tile.n)
    outs_slots = 2 * len(set(product.out_dtypes))
    boxes = len(tile.boxes)
    fetched = len(accumulators) * _PIECES if tile.prefetch else 0
    room = _SHARED - _CONSUMERS * ((len(tiles) + fetched) * boxes + outs_slots) * _SLOT
    fitting = room // (_BYTES * tile.k * (tile.m + products * tile.n))
    tile = dataclasses.replace(tile, stages=min(tile.stages, fitting))
    slots = functools.partial(plgpu.SMEM, transforms=swizzled)
    scratch: dict[str, Any] = {
        "a_slots": slots((tile.stages, *a_tile), lhs[0].dtype),
        "b_slots": slots((products, tile.stages, *b_tile), rhs[0].dtype),
        "full": plgpu.Barrier(num_arrivals=1 + products, num_barriers=tile.stages),
    }
    if tiles:
        scratch["in_slots"] = slots((_CONSUMERS, boxes, len(tiles), 64, _BOX), tiles[0].dtype)
    if fetched:
        held_box = (_CONSUMERS, boxes, fetched, 64, _BOX_F32)
        swizzled_f32 = _swizzled(_BOX_F32)
        scratch["held_slots"] = plgpu.SMEM(held_box, jnp.float32, transforms=swizzled_f32)
    if arrivals := len(tiles) + fetched:
        scratch["loaded"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=_CONSUMERS * boxes)
    for t in set(product.out_dtypes):
        box = _SWIZZLE // jnp.dtype(t).itemsize
        scratch[f"out_{t}"] = plgpu.SMEM(
            (_CONSUMERS, 2, 64, box), jnp.dtype(t), transforms=_swizzled(box)
        )
    launch: dict[str, Any] = {}
    barrier: Any = plgpu.Barrier
    if pair > 1:
        launch = {"cluster": (pair,), "cluster_names": (_PAIR,)}
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=(_PAIR,))
    scratch["empty"] = barrier(num_arrivals=_CONSUMERS, num_barriers=tile.stages)
    count = -(-m // (tile.m * pair_m)) * -(-n // (tile.n * pair_n))
    held = [jax.new_ref(a) for a in accumulators]
    shapes: list[tuple[int, ...]] = [(m, n) for _ in product.out_dtypes[len(held) :]]
    if product.pair:
        assert not held, "accumulators of results that are one array"
        shapes[-2:] = [(m, 2, n)]
    outs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(t))
        for shape, t in zip(shapes, product.out_dtypes[len(held) :], strict=False)
    ]
    counts = tuple(len(v) for v in (lhs, rhs, rows, tiles, held))
    results = launch_kernel(
        functools.partial(_kernel, product, tile, (m, n, k), counts),
        out_type=tuple(outs),
        scratch_types=scratch,
        grid=(min(num_sms() // pair, count),),
        grid_names=(_CLUSTERS,),
        num_threads=_CONSUMERS + 1,
        thread_name=_WARPGROUP,
        kernel_name=product.name,
        approx_math=True,  # results have 16 bits
        **launch,
    )(*lhs, *rhs, *rows, *tiles, *held)
    return [*(jax.freeze(r) for r in held), *results]


def _kernel(
    product: Product,
    tile: Tile,
    sizes: tuple[int, int, int],
    counts: tuple[int, ...],
    *refs: Any,
    a_slots: Any,
    b_slots: Any,
    full: Any,
    empty: Any,
    in_slots: Any = None,
    held_slots: Any = None,
    loaded: Any = None,
    **out_slots: Any,
) -> None:
    ends = list(itertools.accumulate(counts[:-1]))
    lhs, rhs, row_refs, tile_refs, outs = (
        refs[first:last] for first, last in zip([0, *ends], [*ends, None], strict=True)
    )
    held_count = counts[-1]  # accumulators are the first results
    lhs, rhs, outs = (_matrices(v) for v in (lhs, rhs, outs))
    terms: list[Any] = [(lhs[0], rhs)]
    if len(lhs) > 1:
        terms = [(a, (b,)) for a, b in zip(lhs, rhs, strict=True)]
    m, n, k = sizes
    pair_m, pair_n = tile.pair
    paired = pair_m * pair_n > 1
    rows, columns = -(-m // (tile.m * pair_m)), -(-n // (tile.n * pair_n))
    depth = -(-k // tile.k)
    steps = depth * len(terms)
    warpgroup, clusters = lax.axis_index(_WARPGROUP), lax.axis_size(_CLUSTERS)
    first = lax.axis_index(_CLUSTERS)
    mine = lax.div(rows * columns - first + clusters - 1, clusters)
    in_pair = lax.axis_index(_PAIR) if paired else 0

    def corner(i: Any) -> tuple[Any, Any]:
        """Row and column of the block's `i`-th tile of the result."""
        row, column = _banded(first + i * clusters, rows, columns, tile.width)
        row = row * pair_m + (in_pair if pair_m > 1 else 0)
        column = column * pair_n + (in_pair if pair_n > 1 else 0)
        return row * tile.m, column * tile.n

    def fetch() -> None:
        def one(step: Any, _: Any) -> None:
            i, part = lax.div(step, steps), lax.rem(step, steps)
            slot = lax.rem(step, tile.stages)
            row, column = corner(i)

            @pl.when(step >= tile.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            within = pl.ds(lax.rem(part, depth) * tile.k, tile.k)
            a_index, b_index = (pl.ds(row, tile.m), within), (within, pl.ds(column, tile.n))
            copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)

            def fetch_term(a: Any, bs: Any) -> None:
                copy(
                    a.at(*(a_index[::-1] if product.lhs_transposed else a_index)),
                    a_slots.at[slot],
                    full.at[slot],
                    collective_axes=(_PAIR,) if tile.share == "lhs" else None,
                )
                for which, b in enumerate(bs):
                    copy(
                        b.at(*(b_index[::-1] if product.rhs_transposed else b_index)),
                        b_slots.at[which, slot],
                        full.at[slot],
                        collective_axes=(_PAIR,) if tile.share == "rhs" else None,
                    )

            for t, term in enumerate(terms):
                if len(terms) == 1:
                    fetch_term(*term)
                else:
                    pl.when(lax.div(part, depth) == t)(functools.partial(fetch_term, *term))

        def drain(step: Any, _: Any) -> None:
            plgpu.barrier_wait(empty.at[lax.rem(step, tile.stages)])

        total = mine * steps
        lax.fori_loop(0, total, one, None)
        # Consumers still arrive, the other block's among them.
        lax.fori_loop(jnp.maximum(total - tile.stages, 0), total, drain, None)

    own = tile.own

    def multiply(i: Any, *accumulators: Any) -> list[Any]:
        def step(j: Any, _: Any) -> None:
            index = i * steps + j
            slot = lax.rem(index, tile.stages)
            plgpu.barrier_wait(full.at[slot])
            part = pl.ds(warpgroup * own, own)
            if product.lhs_transposed:
                lhs = a_slots.at[slot, :, part].transpose((1, 0))
            else:
                lhs = a_slots.at[slot, part]
            for b, accumulator in enumerate(accumulators):
                rhs = b_slots.at[b, slot]
                if product.rhs_transposed:
                    rhs = rhs.transpose((1, 0))
                plgpu.wgmma(accumulator, lhs, rhs)
            plgpu.wgmma_wait(len(accumulators))

            @pl.when(j > 0)
            def _():
                plgpu.barrier_arrive(empty.at[lax.rem(index - 1, tile.stages)])

        lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[lax.rem((i + 1) * steps - 1, tile.stages)])
        return [accumulator[...] for accumulator in accumulators]

    def arrival(box: int) -> Any:
        return loaded.at[warpgroup * len(tile.boxes) + box]

    def stores(name: str) -> int:
        """Of a tile, through the slots `name`."""
        boxes = len(tile.boxes) * _BOX // out_slots[name].shape[-1]
        return boxes * sum(f"out_{out.ref.dtype}" == name for out in outs)

    def finish(i: Any, _: Any) -> None:
        row, column = corner(i)
        row = row + warpgroup * own
        # What the epilogue reads arrives during the product. The last epilogue is done with the
        # slots, as its results passed a barrier.
        for (box, (r, c)), (t, ref) in itertools.product(
            enumerate(tile.boxes), enumerate(tile_refs)
        ):
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(row + r, 64), pl.ds(column + c, _BOX)],
                in_slots.at[warpgroup, box, t],
                arrival(box),
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )
        if held_slots is not None:
            for (box, (r, c)), o, b in itertools.product(
                enumerate(tile.boxes), range(held_count), range(_PIECES)
            ):
                plgpu.copy_gmem_to_smem(
                    outs[o].at(pl.ds(row + r, 64), pl.ds(column + c + b * _BOX_F32, _BOX_F32)),
                    held_slots.at[warpgroup, box, o * _PIECES + b],
                    arrival(box),
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )
        types = [_accumulator((own, tile.n), jnp.float32)] * len(terms[0][1])
        products = pl.run_scoped(functools.partial(multiply, i), *types)
        turns = {name: i * stores(name) for name in out_slots}
        for box, (r, c) in enumerate(tile.boxes):
            parts = [p[r : r + 64, c : c + _BOX] for p in products]
            same = [_columns(ref, jnp.minimum(column + c, ref.shape[0] - _BOX)) for ref in row_refs]
            if loaded is not None:
                plgpu.barrier_wait(arrival(box))
            tiles = [
                plgpu.load(in_slots.at[warpgroup, box, t], layout=plgpu.Layout.WGMMA).astype(
                    jnp.float32
                )
                for t in range(len(tile_refs))
            ]
            results = product.epilogue(parts, same, tiles)
            for o, (out, result) in enumerate(zip(outs, results, strict=True)):
                name = f"out_{out.ref.dtype}"
                wide = out_slots[name].shape[-1]
                for b in range(0, _BOX, wide):
                    slot = out_slots[name].at[warpgroup, lax.rem(turns[name], 2)]
                    turns[name] = turns[name] + 1
                    # Of a narrow result most is not stored: a slot's store may be the last one.
                    plgpu.wait_smem_to_gmem(1 if n > wide else 0, wait_read_only=True)
                    value = result[:, b : b + wide].astype(out.ref.dtype)
                    adds = o < held_count
                    if adds and held_slots is not None:
                        held = held_slots.at[warpgroup, box, o * _PIECES + b // wide]
                        value, adds = value + plgpu.load(held, layout=plgpu.Layout.WGMMA), False
                    slot[...] = value
                    plgpu.commit_smem()
                    start = column + c + b
                    store = functools.partial(
                        plgpu.copy_smem_to_gmem,
                        slot,
                        out.at(pl.ds(row + r, 64), pl.ds(start, wide)),
                        reduction_op="add" if adds else None,
                    )
                    if n > wide:
                        store()
                    else:  # Mosaic drops the only box's index, and with it the TMA's clipping
                        pl.when(start == 0)(store)

    @pl.when(warpgroup == _CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fetch()

    @pl.when(warpgroup < _CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, mine, finish, None)
        plgpu.wait_smem_to_gmem(0)


def _swizzled(box: int) -> Any:
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, box)), swizzle(_SWIZZLE)


def _columns(ref: Any, first: Any) -> Any:
    """(64, _BOX): `_BOX` elements of a row, the same in each row."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    row = plgpu.load(ref.at[pl.ds(first, _BOX)], layout=layout, optimized=False)
    return plgpu.layout_cast(
        lax.broadcast_in_dim(row.astype(jnp.float32), (64, _BOX), (1,)), plgpu.Layout.WGMMA
    )


def _banded(index: Any, rows: int, columns: int, width: int) -> tuple[Any, Any]:
    """Row and column of the `index`-th tile, in bands of `width` columns, row by row in a band."""
    width = min(width, columns)
    band = lax.div(index, rows * width)
    within = index - band * rows * width
    here = jnp.minimum(columns - band * width, width)
    return lax.div(within, here), band * width + lax.rem(within, here)
