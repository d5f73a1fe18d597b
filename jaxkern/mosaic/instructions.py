"""Single instructions that the compiler would not choose by itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxkern.core.target import interpreted
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import (
    ROW,
    elements,
    fragmented,
    i32,
    inline_mlir,
    laid_out,
    lane_value,
    map_registers,
    row_type,
    scalar_type,
    to_fp32,
)


def fast_reciprocal(x: jax.Array, *, layout: Any = None) -> jax.Array:
    """1 / x, fp32, to 1 unit in the last place, in one instruction an element.

    `layout` is as for :func:`one_instruction`. The division that ``approx_math`` makes of 1 / x
    takes five, as it cares for denormals; of an x above 2¹²⁶ this is 0.
    """
    return one_instruction("rcp.approx.ftz.f32", lambda x: 1 / x, x, layout)


def fast_exp2(x: jax.Array) -> jax.Array:
    """2^x of (LANES · n,), fp32, in one instruction an element; 0 where it is denormal."""
    return one_instruction("ex2.approx.ftz.f32", jnp.exp2, x)


def fast_log2(x: jax.Array) -> jax.Array:
    """log2(x) of (LANES · n,), fp32, in one instruction an element; −inf of a denormal."""
    return one_instruction("lg2.approx.ftz.f32", jnp.log2, x)


def fast_sqrt(x: jax.Array) -> jax.Array:
    """√x of (LANES · n,), fp32, in one instruction an element; 0 where x is denormal."""
    return one_instruction("sqrt.approx.ftz.f32", jnp.sqrt, x)


def one_instruction(
    name: str, plain: Callable[[Any], Any], x: jax.Array, layout: Any = None
) -> jax.Array:
    """Applies a PTX instruction to each element of `x`, fp32; `plain` in the interpreter.

    `layout` is the layout of `x`, by default (LANES · n,) with n neighbours per lane.
    """
    if interpreted():
        return plain(x)
    layout = row_type(x.size // LANES).layout if layout is None else layout

    def convert(register: Any) -> list[Any]:
        run = lambda v: llvm.inline_asm(ir.F32Type.get(), [v], f"{name} $0, $1;", "=f,f")
        return [run(v) for v in elements(register)]

    return map_registers(convert, plgpu.layout_cast(x, layout), layout)


def multiply_wide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Multiplies an array (LANES,), uint32, by `b`: the upper and the lower 32 bits."""
    if interpreted():
        return lax.mulhi(a, jnp.full_like(a, b)), a * jnp.uint32(b)
    row = row_type(1, np.uint32)

    @inline_mlir(ROW, returns=(row, row))
    def multiply(a: Any) -> Any:
        word, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        factor = arith.extui(i64, lane_value(a))
        product = arith.muli(factor, arith.constant(i64, b))
        upper = arith.trunci(word, arith.shrui(product, arith.constant(i64, 32)))
        lower = arith.trunci(word, product)
        return fragmented(upper, signed=False), fragmented(lower, signed=False)

    return multiply(laid_out(a))


def once_read(values: Any) -> Any:
    """Waits for `values` that are being loaded.

    A value that is loaded before a loop and used in it would be waited for in every step, together
    with the step's own loads.
    """
    return jax.tree.map(lambda v: v + 0.0, values)


def widened(values: jax.Array, layout: Any) -> jax.Array:
    """Converts `values`, bf16 in `layout`, to fp32 by one instruction an element, not 1.5."""
    if interpreted():
        return values.astype(jnp.float32)

    def convert(register: Any) -> list[Any]:
        count = ir.VectorType(register.type).shape[0]
        if count % 2:
            return [to_fp32(v) for v in elements(register)]
        word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        parts = []
        for pair in elements(vector.bitcast(ir.VectorType.get((count // 2,), word), register)):
            low = arith.shli(pair, i32(16))
            high = arith.andi(pair, i32(-(1 << 16)))
            parts += [arith.bitcast(f32, low), arith.bitcast(f32, high)]
        return parts

    return map_registers(convert, values, layout)


def unknown_zero() -> jax.Array:
    """A zero that the compiler cannot know: what is loaded at an index plus it is loaded again."""
    if interpreted():
        return jnp.zeros((), jnp.int32)

    @inline_mlir(returns=scalar_type(np.int32))
    def zero() -> Any:
        word = ir.IntegerType.get_signless(32)
        value = mgpu_utils.inline_ptx("mov.b32 $0, 0;", result_types=word, has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)

    return zero()
