"""Single instructions that the compiler would not choose by itself."""

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

from jaxkern.mosaic.launch import LANES, interpreted
from jaxkern.mosaic.registers import ROW, element, fragmented, laid_out, row_type, to_fp32


def fast_reciprocal(x: jax.Array, *, layout: Any = None) -> jax.Array:
    """1 / x, fp32, to 1 unit in the last place, in one instruction an element.

    `layout` is that of `x`, by default that of (LANES · n,) with n neighbours a lane. The division
    that ``approx_math`` makes of 1 / x takes five, as it cares for denormals; of an x above 2¹²⁶
    this is 0.
    """
    if interpreted():
        return 1 / x
    layout = row_type(x.size // LANES).layout if layout is None else layout
    return _one_instruction("rcp.approx.ftz.f32", x, layout)


def fast_exp2(x: jax.Array) -> jax.Array:
    """2^x of (LANES · n,), fp32, in one instruction an element; 0 where it is denormal."""
    if interpreted():
        return jnp.exp2(x)
    return _one_instruction("ex2.approx.ftz.f32", x, row_type(x.size // LANES).layout)


def fast_log2(x: jax.Array) -> jax.Array:
    """log2(x) of (LANES · n,), fp32, in one instruction an element; −inf of a denormal."""
    if interpreted():
        return jnp.log2(x)
    return _one_instruction("lg2.approx.ftz.f32", x, row_type(x.size // LANES).layout)


def fast_sqrt(x: jax.Array) -> jax.Array:
    """√x of (LANES · n,), fp32, in one instruction an element; 0 where x is denormal."""
    if interpreted():
        return jnp.sqrt(x)
    return _one_instruction("sqrt.approx.ftz.f32", x, row_type(x.size // LANES).layout)


def _one_instruction(name: str, x: jax.Array, layout: Any) -> jax.Array:
    result = plgpu.ShapeDtypeStruct(x.shape, np.dtype(np.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def run(ctx: Any, value: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        results = np.empty_like(value.registers)
        for index, register in np.ndenumerate(value.registers):
            count = ir.VectorType(register.type).shape[0]
            parts = [
                llvm.inline_asm(f32, [element(register, k)], f"{name} $0, $1;", "=f,f")
                for k in range(count)
            ]
            results[index] = vector.from_elements(register.type, parts)
        return mgpu.FragmentedArray(_registers=results, _layout=value.layout, _is_signed=None)

    return run(plgpu.layout_cast(x, layout))  # pyright: ignore[reportCallIssue]


def multiply_wide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a · b, of an array (LANES,), uint32."""
    if interpreted():
        return lax.mulhi(a, jnp.full_like(a, b)), a * jnp.uint32(b)
    row = row_type(1, np.uint32)

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=(row, row))
    def multiply(ctx: Any, a: Any) -> Any:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        factor = arith.extui(i64, element(a.registers.item(), 0))
        product = arith.muli(factor, arith.constant(i64, b))
        upper = arith.trunci(i32, arith.shrui(product, arith.constant(i64, 32)))
        lower = arith.trunci(i32, product)
        return fragmented(upper, signed=False), fragmented(lower, signed=False)

    return multiply(laid_out(a))  # pyright: ignore[reportCallIssue]


def widened(values: jax.Array, layout: Any) -> jax.Array:
    """`values`, bf16 in `layout`, as fp32: an instruction an element, not one and a half."""
    if interpreted():
        return values.astype(jnp.float32)
    result = plgpu.ShapeDtypeStruct(values.shape, np.dtype(np.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def widen(ctx: Any, values: Any) -> Any:
        del ctx
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        wide = np.empty_like(values.registers)
        for index, register in np.ndenumerate(values.registers):
            count = ir.VectorType(register.type).shape[0]
            if count % 2:
                parts = [to_fp32(element(register, k)) for k in range(count)]
            else:
                pairs = vector.bitcast(ir.VectorType.get((count // 2,), i32), register)
                parts = []
                for pair in (element(pairs, k) for k in range(count // 2)):
                    low = arith.shli(pair, arith.constant(i32, 16))
                    high = arith.andi(pair, arith.constant(i32, -(1 << 16)))
                    parts += [arith.bitcast(f32, low), arith.bitcast(f32, high)]
            wide[index] = vector.from_elements(ir.VectorType.get((count,), f32), parts)
        return mgpu.FragmentedArray(_registers=wide, _layout=values.layout, _is_signed=None)

    return widen(values)  # pyright: ignore[reportCallIssue]


def computed_here(values: jax.Array, layout: Any) -> jax.Array:
    """`values`, fp32 in `layout`, computed before the barriers that follow.

    The compiler would put off what is first used after them, and keep what it is computed from.
    """
    if interpreted():
        return values
    result = plgpu.ShapeDtypeStruct(values.shape, np.dtype(np.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def pin(ctx: Any, values: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        pinned = np.empty_like(values.registers)
        for index, register in np.ndenumerate(values.registers):
            count = ir.VectorType(register.type).shape[0]
            parts = [
                mgpu_utils.inline_ptx(
                    "mov.b32 $0, $1;",
                    element(register, k),
                    result_types=f32,
                    has_side_effects=True,
                )
                for k in range(count)
            ]
            pinned[index] = vector.from_elements(register.type, parts)
        return mgpu.FragmentedArray(_registers=pinned, _layout=values.layout, _is_signed=None)

    return pin(values)  # pyright: ignore[reportCallIssue]


def unknown_zero() -> jax.Array:
    """0, which the compiler does not know: what is read at an index plus it is read again."""
    if interpreted():
        return jnp.zeros((), jnp.int32)
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(return_type=scalar)
    def zero(ctx: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu_utils.inline_ptx("mov.b32 $0, 0;", result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)

    return zero()  # pyright: ignore[reportCallIssue]


def once_read(values: Any) -> Any:
    """`values` once they are there.

    A value that is loaded before a loop and used in it would be waited for in every round, together
    with the round's own loads.
    """
    return jax.tree.map(lambda v: v + 0.0, values)
