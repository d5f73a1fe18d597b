"""Elementwise arithmetic of kernels: instructions that the compiler would not choose by itself, and
functions, exact or faster.
"""

from collections.abc import Callable, Sequence
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
from jaxkern.mosaic.lanes import (
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
from jaxkern.mosaic.launch import LANES


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


# Functions, exact or faster

LOG2E = 1.4426950408889634


def sigmoid(v: jax.Array, exact: bool, layout: Any = None) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division.

    `layout` is the layout of `v`, as for :func:`fast_reciprocal`.
    """
    if not exact:
        return fast_reciprocal(1 + jnp.exp2(-LOG2E * v), layout=layout)
    e = exp_of_minus(jnp.abs(v))
    inverse = reciprocal(1 + e)
    return jnp.where(v < 0, e * inverse, inverse)


def exp_of_minus(a: jax.Array) -> jax.Array:
    """exp(−a), a >= 0, by exp2 in two parts, the first product exact.

    Rounding a · log2(e) as a whole would cost up to 1e-6 of the result.
    """
    a = jnp.minimum(a, 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (LOG2E - log2e_head) + (a - head) * LOG2E
    return jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)


def reciprocal(d: jax.Array) -> jax.Array:
    """1 / d after a Newton step: with approx_math the division alone is 2 units off."""
    r = 1 / d
    return r * (2 - d * r)


def polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    """Σ c[k] · x^k."""
    total: Any = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


_LOG1P = (
    (0.9999987, -0.49986964, 0.3310945, -0.23503861, 0.14922388, -0.0664018, 0.014141024),
    (
        *(0.99999994, -0.49999493, 0.33319098, -0.24842982, 0.19106007, -0.13663246),
        *(0.07822596, -0.02950524, 0.0052326941),
    ),
)
"""log(1 + e) / e on [0, 1], its minimax polynomials of relative error 1.3e-6 and 3e-8."""


def softplus(v: jax.Array, exact: bool) -> jax.Array:
    """max(v, 0) + log(1 + e), e = exp(−|v|), to fp32 accuracy or to 5e-6, of the result."""
    magnitude = jnp.abs(v)
    e = exp_of_minus(magnitude) if exact else jnp.exp2(-LOG2E * magnitude)
    return jnp.maximum(v, 0.0) + e * polynomial(_LOG1P[exact], e)


def softplus_slope(dt: jax.Array, exact: bool) -> jax.Array:
    """softplus'(v) = 1 − exp(−dt) from dt = softplus(v), by its series where that would cancel."""
    limit, divisors = (0.25, (720, 120, 24, 6, 2, 1)) if exact else (1 / 32, (6, 2, 1))
    first, *others = divisors
    series: Any = 1 / first
    for k in others:
        series = 1 / k - dt * series
    return jnp.where(dt < limit, dt * series, 1 - jnp.exp2(-LOG2E * dt))


def nearest(x: jax.Array) -> jax.Array:
    """The whole number nearest to x, of a magnitude below 2^22, by two additions."""
    if interpreted():
        return jnp.round(x)
    shift = 1.5 * 2**23
    return (x + shift) - shift


_EXP2 = (1.0000001, 0.69314694, 0.2402212, 0.05550713, 0.009675541, 0.0013276472)
"""2^f on [−1/2, 1/2], its minimax polynomial of relative error 8e-8."""


def exp2_by_polynomial(x: jax.Array) -> jax.Array:
    """2^x to 2 units in the last place, by multiplications and additions alone.

    As with ``exp2`` it is 0 below 2^−126, inf from 2^128 on, and NaN of a NaN.
    """
    x = jnp.minimum(jnp.maximum(x, -126.0), 129.0)
    # Adding `shift` rounds x to an integer in the lowest bits of the sum, which are shifted to the
    # exponent's. It is one less than the exponent, whose highest value stands for inf.
    shift = 1.5 * 2**23 + 126
    shifted = x + shift
    fraction = x - (jnp.abs(shifted) - shift)  # abs, for XLA may take x + shift − shift for x
    power = lax.shift_left(lax.bitcast_convert_type(shifted, jnp.int32), 23)
    twice = [2 * c for c in _EXP2]
    return lax.bitcast_convert_type(power, jnp.float32) * polynomial(twice, fraction)
