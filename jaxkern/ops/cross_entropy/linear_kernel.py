"""The kernel of a loss without gradient: the sums of logits, in the epilogue of their product.

The logits of a tile, 128 rows of 256 classes, are not stored: of each row a tile gives the largest
logit, the sum of exponentials relative to it, the label's logit and, with smoothing, the sum of
all, 12 or 16 bytes in place of 512. XLA joins the tiles. The logits stay in fp32, where those that
a gradient needs are rounded to 16 bits.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.wgmma import TILE, over_rows
from jaxkern.ops.cross_entropy.reference import LossOptions, Sums, position_of
from jaxkern.ops.linear import products
from jaxkern.ops.linear.kernel import Product
from jaxkern.ops.linear.tiles import BOX, ProductTile

_TILE = ProductTile(128, 256, 64, 4, "rhs", 8)
_INTERPRETED = ProductTile(128, 128, 64, 2, None)

LEAST = 2**26
"""Logits from which on the kernel is taken. Of 2^27 and more an H100 was faster at every shape
tried, by 3 to 16% beside all logits in memory, and by 13 to 47% beside parts of 160 MiB."""

_MOST_COPIED = 2**27
"""Bytes of a weight that is padded for the kernel: a larger copy would take the memory that the
logits do not."""


def fits(x: Any, weight: Any) -> bool:
    """Whether the kernel multiplies these types, (..., K) and (K, V), without a cast."""
    return x.size > 0 and products.unsupported(x=x) is None and weight.dtype == x.dtype


def is_faster(x: Any, weight: Any) -> bool:
    """Whether the kernel takes less time than XLA's product and the kernel of logits."""
    copied = any(size % BOX for size in weight.shape)  # the TMA takes whole boxes
    small = weight.size * weight.dtype.itemsize <= _MOST_COPIED or not copied
    return fits(x, weight) and small and products.row_count(x) * weight.shape[1] >= LEAST


def sums_of_product(
    options: LossOptions, x: Any, weight: Any, bias: Any, labels: Any, before: Any
) -> Sums:
    """Sums of the rows of ``x @ weight + bias``, (..., K) and (K, V).

    `before` is the number of classes before the first of `weight`. Sums of ignored rows are of no
    use.
    """
    tile = _INTERPRETED if options.mode == "interpret" else _TILE
    classes = weight.shape[1]
    position = position_of(labels, options.terms.ignored, before, classes)
    count = 4 if options.terms.smoothing else 3
    partly = classes if classes % tile.n else None
    epilogue = functools.partial(_sums_of_tile, options, partly)
    rows = [] if bias is None else [jnp.pad(bias.astype(jnp.float32), (0, -classes % tile.n))]
    product = Product(False, False, ("float32",), epilogue, "linear_cross_entropy_fwd", sums=count)
    operands = [products.flat(x)], [weight]
    columns = [position.reshape(-1)]
    outs = products.launch(product, options.mode, *operands, rows, columns=columns, tile=tile)
    assert outs is not None
    each = outs[0][:, :, : position.size].reshape(-1, count, *position.shape)
    tiles = Sums(*(each[:, i] for i in range(count)), *[jnp.zeros_like(each[:, 0])] * (4 - count))
    largest = jnp.max(tiles.largest, axis=0)
    return Sums(largest, *(jnp.sum(v, axis=0) for v in tiles.relative_to(largest)[1:]))


def _sums_of_tile(
    options: LossOptions,
    classes: int | None,
    boxes: Sequence[Any],
    rows: Sequence[Sequence[Any]],
    columns: Sequence[Any],
    first: Any,
) -> list[Any]:
    """Numbers (64,) of the rows of `boxes`, (64, 64) each, which begin at class `first`.

    `rows` have the bias, `columns` the labels' places; `classes` is how many there are, if the last
    tile has more.
    """
    terms, (position,) = options.terms, columns
    tanh = products.in_epilogue().tanh
    number = plgpu.broadcasted_iota(jnp.int32, (BOX, BOX), 1, layout=TILE)
    add = functools.partial(functools.reduce, jnp.add)
    known, chosen, all_logits = [], [], []
    for c, (box, row) in enumerate(zip(boxes, rows, strict=True)):
        v = terms.capped(box + row[0] if row else box, tanh)
        before = first + c * BOX
        chosen.append(jnp.where(number == over_rows(position - before, BOX), v, 0.0))
        there = lambda v, other: (
            v if classes is None else jnp.where(number < classes - before, v, other)  # noqa: B023
        )
        known.append(there(v, -jnp.inf))
        all_logits += [there(v, 0.0)] if terms.smoothing else []
    largest = jnp.max(functools.reduce(jnp.maximum, known), axis=1)
    base = over_rows(jnp.where(jnp.abs(largest) < jnp.inf, largest, 0.0) * LOG2E, BOX)
    sums = [(jnp.exp2(v * LOG2E - base) for v in known), chosen]
    sums += [all_logits] if terms.smoothing else []
    return [largest, *(jnp.sum(add(v), axis=1) for v in sums)]
