"""The forward's kernel: reads logits once for the sums of which the losses are made.

Each lane keeps the largest element, the sum of exponentials relative to it and, with smoothing, the
sum of what it has read, apart for each element of its unit. They become those of the share at its
end. A share of a row that is ignored is not read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import exp_of_minus
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel
from jaxkern.mosaic.registers import VECTOR_BYTES, row_type
from jaxkern.mosaic.units import load_units
from jaxkern.ops.cross_entropy.rows import IGNORED, Rows, Sums, position_in
from jaxkern.ops.cross_entropy.tiles import NONE, Tile, shares_of
from jaxkern.ops.curves import kernel_functions

(SHARE,) = grid_axes("share")


def launch_forward(
    options: Rows, logits: Any, position: Any, *, sliced: bool = False
) -> tuple[Any, ...]:
    """The four of :class:`Sums`; arguments as of :func:`reference_forward`."""
    chosen = _chosen(options, logits, position)
    if logits.size == 0:
        zeros = jnp.zeros(position.shape, jnp.float32)
        return zeros, zeros, chosen, zeros
    of_rows, position = position, positions_in_shares(logits, position)
    size = logits.shape[-1] // position.shape[-1]
    tile = Tile.of(position.size, size, logits.dtype.itemsize, sliced)
    with_total = options.terms.smoothing > 0

    def kernel(logits: Any, position: Any, *outs: Any) -> None:
        share = lax.axis_index(SHARE)
        counted = position[share] != IGNORED

        def store(*values: Any) -> None:
            for out, value in zip(outs, values, strict=True):
                out[share] = value

        @pl.when(counted)
        def _():
            store(*_sums(options, tile, logits, share.astype(jnp.uint32), with_total))

        @pl.when(jnp.logical_not(counted))
        def _():
            store(*[jnp.float32(0)] * len(outs))

    of_share = jax.ShapeDtypeStruct((position.size,), jnp.float32)
    outs = launch_kernel(
        kernel,
        out_type=(of_share,) * (2 + with_total),
        grid=(position.size,),
        grid_names=(SHARE,),
        kernel_name="cross_entropy_fwd",
        approx_math=True,
    )(logits.reshape(-1), position.reshape(-1))
    largest, exponentials, *total = (out.reshape(position.shape) for out in outs)
    total = jnp.sum(total[0], axis=-1) if total else jnp.zeros(of_rows.shape, jnp.float32)
    of_row = jnp.max(largest, axis=-1)
    of_shares = Sums(largest, exponentials, None, None).beside(of_row[..., None])
    return of_row, jnp.sum(of_shares.exponentials, axis=-1), chosen, total


def positions_in_shares(logits: Any, position: Any) -> Any:
    """(..., shares): where labels are in the shares of rows."""
    classes = logits.shape[-1]
    count = shares_of(position.size, classes, VECTOR_BYTES // logits.dtype.itemsize)
    size = classes // count
    return position_in(position[..., None], jnp.arange(count, dtype=jnp.int32) * size, size)


def _chosen(options: Rows, logits: Any, position: Any) -> Any:
    """The logit of the label; 0 where the classes do not have it."""
    index = jnp.maximum(position, 0)[..., None]
    found = jnp.take_along_axis(logits, index, axis=-1, mode="promise_in_bounds")[..., 0]
    return jnp.where(position >= 0, options.terms.capped(found), 0)


def exponential(exact: bool, v: jax.Array) -> jax.Array:
    """exp(v) of v <= 0, to fp32 accuracy or by the fast unit."""
    return exp_of_minus(-v) if exact else jnp.exp(v)


def _sums(options: Rows, tile: Tile, ref: Any, share: Any, with_total: bool) -> list[Any]:
    """The largest logit of a share, the sum of exponentials relative to it, and that of all."""
    exact = ref.dtype == jnp.float32

    def added(values: list[Any], carry: Any) -> Any:
        largest, exponentials, total = carry
        now = largest
        for value, _ in values:
            now = jnp.maximum(now, value)
        base = _finite(now)
        exponentials = exponentials * exponential(exact, largest - base)
        for value, kept in values:
            exponentials = exponentials + exponential(exact, value - base)
            total = total + kept if with_total else total
        return now, exponentials, total

    def capped(values: jax.Array, layout: Any) -> jax.Array:
        return options.terms.capped(values, kernel_functions(exact, layout).tanh)

    def step(units: list[Any], carry: Any) -> Any:
        values = []
        for of_lanes in units:
            loaded = load_units(ref, of_lanes.clamped(), tile.vec, step=tile.access)
            value = capped(loaded, tile.layout)  # (LANES · vec,)
            values.append((of_lanes.kept(value, -jnp.inf), of_lanes.kept(value, 0.0)))
        return added(values, carry)

    zeros = tile.full(0.0)
    begin = (tile.full(-jnp.inf), zeros, zeros)
    of_lanes = [tile.over_units(share, step, begin)]
    if not tile.aligned:
        row = row_type(1).layout
        index, _, inside = tile.edges(share)
        some = jnp.where(index == jnp.uint32(NONE), jnp.uint32(0), index)
        value = capped(load_units(ref, some, 1), row)  # (LANES,)
        full = lambda v: plgpu.layout_cast(jnp.full((LANES,), v, jnp.float32), row)
        largest = jnp.where(inside, value, full(-jnp.inf))
        none = full(0.0)
        exponentials = jnp.where(inside, exponential(exact, largest - _finite(largest)), none)
        of_lanes.append((largest, exponentials, jnp.where(inside, value, none)))
    largest = jnp.max(of_lanes[0][0])
    for edge, *_ in of_lanes[1:]:
        largest = jnp.maximum(largest, jnp.max(edge))
    base = _finite(largest)
    scaled = lambda of: jnp.sum(of[1] * exponential(exact, of[0] - base))
    found = [largest, sum(map(scaled, of_lanes))]
    return [*found, sum(jnp.sum(of[2]) for of in of_lanes)] if with_total else found


def _finite(v: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(v) < jnp.inf, v, 0.0)
