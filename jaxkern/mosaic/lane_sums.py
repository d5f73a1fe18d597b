"""Sums within a lane and within a warp, and other arithmetic on a lane's registers, in MLIR."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxkern.core.target import interpreted
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import (
    ROW,
    elements,
    fragmented,
    inline_mlir,
    laid_out,
    lane_value,
    map_registers,
    row_type,
    scalar_type,
)


def sum_in_lanes(values: Sequence[jax.Array], vec: int) -> jax.Array:
    """(LANES,): sums the elements of `values` that each lane holds.

    Every second element is added up apart from the others, one after the other: products among
    them are then fused with the additions.

    Args:
      values: fp32, in ``WG_STRIDED`` by `vec`.
      vec: neighbouring elements of a lane.
    """
    if interpreted():
        return sum((v.reshape(-1, LANES, vec).sum((0, 2)) for v in values), jnp.zeros(LANES))
    layouts = [plgpu.Layout.WG_STRIDED(v.shape, vec_size=vec) for v in values]

    @inline_mlir(*layouts, returns=row_type(1))
    def add(*arrays: Any) -> Any:
        return _sum_in_two_strands(_all_elements(arrays))

    return add(*values)


def squares_in_lanes(values: Sequence[jax.Array], center: jax.Array, vec: int) -> jax.Array:
    """(LANES,): sums the squares of each lane's differences to its `center` (LANES,).

    `values` are as for :func:`sum_in_lanes`.
    """
    if interpreted():
        held = jnp.concatenate([v.reshape(-1, LANES, vec) for v in values])
        return ((held - center[:, None]) ** 2).sum((0, 2))
    layouts = [plgpu.Layout.WG_STRIDED(v.shape, vec_size=vec) for v in values]

    @inline_mlir(ROW, *layouts, returns=row_type(1))
    def add(center: Any, *arrays: Any) -> Any:
        middle = lane_value(center)
        apart = [arith.subf(v, middle) for v in _all_elements(arrays)]
        contract = arith.FastMathFlags.contract
        return _sum_in_two_strands([arith.mulf(d, d, fastmath=contract) for d in apart])

    return add(center, *values)


def _all_elements(arrays: Sequence[Any]) -> list[Any]:
    return [v for a in arrays for register in a.registers.flat for v in elements(register)]


def _sum_in_two_strands(values: list[Any]) -> Any:
    """Sums every second value, and the others, and adds the two; as a row of the lanes' sums."""
    add = functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract)
    strands = [functools.reduce(add, values[i::2]) for i in range(min(2, len(values)))]
    return fragmented(functools.reduce(arith.addf, strands))


def largest_of_warp(x: jax.Array) -> jax.Array:
    """(LANES,): the largest magnitude of all elements of a lane's warp; NaN if one is NaN.

    `x` is (LANES · n,), fp32.
    """
    if interpreted():
        return jnp.repeat(jnp.abs(x).reshape(LANES // 32, -1).max(axis=1), 32)
    return _of_warp(jnp.abs(x), arith.maximumf)


def sum_of_warp(x: jax.Array) -> jax.Array:
    """(LANES,): the sum of all elements of a lane's warp in a fixed order.

    `x` is (LANES · n,), fp32.
    """
    if interpreted():
        return jnp.repeat(x.reshape(LANES // 32, -1).sum(axis=1), 32)
    return _of_warp(x, arith.addf)


def _of_warp(x: jax.Array, combine: Callable[[Any, Any], Any]) -> jax.Array:
    """Combines all elements of each warp, those of a lane first."""

    @inline_mlir(row_type(x.size // LANES).layout, returns=row_type(1))
    def reduce(x: Any) -> Any:
        result = functools.reduce(combine, list(elements(x.registers.item())))
        for distance in (1, 2, 4, 8, 16):
            result = combine(result, mgpu_utils.shfl_bfly(result, distance))
        return fragmented(result)

    return reduce(laid_out(x))


def alternate_lanes(even: jax.Array, odd: jax.Array) -> jax.Array:
    """`even` in lanes of even number, `odd` in the others; all (LANES,), fp32."""
    if interpreted():
        return jnp.where(jnp.arange(LANES) % 2 == 0, even, odd)

    @inline_mlir(ROW, ROW, returns=row_type(1))
    def choose(even: Any, odd: Any) -> Any:
        is_odd = arith.trunci(ir.IntegerType.get_signless(1), mgpu_utils.thread_idx())
        return fragmented(arith.select(is_odd, lane_value(odd), lane_value(even)))

    return choose(even, odd)


def uniform(value: jax.Array) -> jax.Array:
    """The scalar that all lanes hold in `value` (LANES,), fp32."""
    if interpreted():
        return value[0]

    @inline_mlir(ROW, returns=scalar_type(np.float32))
    def splat(value: Any) -> Any:
        return mgpu.FragmentedArray.splat(lane_value(value), shape=())

    return splat(value)


def computed_here(values: jax.Array, layout: Any) -> jax.Array:
    """Has `values`, fp32 in `layout`, computed before the barriers that follow.

    The compiler would delay what is first used after them, and keep its operands in registers.
    """
    if interpreted():
        return values

    def convert(register: Any) -> list[Any]:
        f32 = ir.F32Type.get()
        move = lambda v: mgpu_utils.inline_ptx(
            "mov.b32 $0, $1;", v, result_types=f32, has_side_effects=True
        )
        return [move(v) for v in elements(register)]

    return map_registers(convert, values, layout)


def store(ref: Any, value: jax.Array) -> None:
    """Stores an array of any layout, however few bytes a lane has (JAX 0.12: `optimized`)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
