"""What the optimizers' kernels do with the registers of a lane, in MLIR and PTX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jaxkern.core.target import interpreted
from jaxkern.mosaic.instructions import one_instruction
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import element, fragmented, laid_out, row_type
from jaxkern.mosaic.units import ChosenRef


def fast_exp2(x: jax.Array) -> jax.Array:
    """2^x of (LANES · n,), fp32, in one instruction an element; 0 where it is denormal."""
    return one_instruction("ex2.approx.ftz.f32", jnp.exp2, x)


def fast_log2(x: jax.Array) -> jax.Array:
    """log2(x) of (LANES · n,), fp32, in one instruction an element; −inf of a denormal."""
    return one_instruction("lg2.approx.ftz.f32", jnp.log2, x)


def fast_sqrt(x: jax.Array) -> jax.Array:
    """√x of (LANES · n,), fp32, in one instruction an element; 0 where x is denormal."""
    return one_instruction("sqrt.approx.ftz.f32", jnp.sqrt, x)


def largest_of_warp(x: jax.Array) -> jax.Array:
    """The largest magnitude of all elements of a lane's warp, (LANES,); NaN if one is NaN.

    Args:
      x: (LANES · vec,), fp32.
    """
    if interpreted():
        return jnp.repeat(jnp.abs(x).reshape(LANES // 32, -1).max(axis=1), 32)
    return _of_warp(jnp.abs(x), arith.maximumf)


def sum_of_warp(x: jax.Array) -> jax.Array:
    """The sum of all elements of a lane's warp in a fixed order, (LANES,).

    Args:
      x: (LANES · vec,), fp32.
    """
    if interpreted():
        return jnp.repeat(x.reshape(LANES // 32, -1).sum(axis=1), 32)
    return _of_warp(x, arith.addf)


def _of_warp(x: jax.Array, combine: Callable[[Any, Any], Any]) -> jax.Array:
    """Combines all elements of each warp, those of a lane first."""
    vec = x.size // LANES

    @plgpu.inline_mgpu(arg_types=(row_type(vec).layout,), return_type=row_type(1))
    def reduce(ctx: Any, x: Any) -> Any:
        del ctx
        parts = [element(x.registers.item(), i) for i in range(vec)]
        result = functools.reduce(combine, parts)
        for distance in (1, 2, 4, 8, 16):
            result = combine(result, mgpu_utils.shfl_bfly(result, distance))
        return fragmented(result)

    return reduce(laid_out(x))  # pyright: ignore[reportCallIssue]


def with_chosen(
    body: Callable[..., None],
    block: jax.Array,
    rows: Sequence[Sequence[Any]],
    starts: Sequence[int],
    numbers: Sequence[Sequence[int]],
) -> None:
    """Runs ``body(refs, numbers)`` with the row of references that belongs to a block.

    A tree of branches, which all lanes of a block take alike, finds the row and loads only its
    addresses; `body` is compiled once.

    Args:
      body: takes references for :func:`load_units` and :func:`store_units`, and each number of the
        row as (LANES,), uint32.
      block: (), the index of the block.
      rows: references in global memory; the dtypes of each row are the same.
      starts: the first block of each row, increasing from 0.
      numbers: of each row, below 2^32.
    """
    if interpreted():
        lanes = lambda n: jnp.full((LANES,), n, jnp.uint32)
        branches = [
            lambda _, row=row, of_row=of_row: body(row, [lanes(n) for n in of_row])
            for row, of_row in zip(rows, numbers, strict=True)
        ]
        row = sum((block >= start).astype(jnp.int32) for start in starts[1:])
        lax.switch(row, branches, None) if len(rows) > 1 else branches[0](None)
        return
    width, count = len(rows[0]), len(numbers[0])
    uniform = plgpu.Layout.WG_SPLAT
    word = row_type(1, np.uint32)

    @plgpu.inline_mgpu(
        arg_types=(uniform, [[plgpu.RefType()] * width for _ in rows]),
        return_type=(word,) * (2 * width + count),
    )
    def choose(ctx: Any, block: Any, rows: Any) -> Any:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        index = block.registers.item()

        def values(first: int, last: int) -> list[Any]:
            if last == first + 1:
                addresses = [llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref)) for ref in rows[first]]
                # MLIR's constants are signed; the bits are the same.
                return addresses + [
                    arith.constant(i32, n - 2**32 if n >= 2**31 else n) for n in numbers[first]
                ]
            middle = (first + last) // 2
            before = arith.cmpi(arith.CmpIPredicate.ult, index, arith.constant(i32, starts[middle]))
            branch = scf.IfOp(before, [i64] * width + [i32] * count, has_else=True)
            parts = ((branch.then_block, first, middle), (branch.else_block, middle, last))
            for inside, *part in parts:
                with ir.InsertionPoint(inside):  # pyright: ignore
                    scf.yield_(values(*part))
            return list(branch.results)

        found = values(0, len(rows))
        words = []
        for address in found[:width]:
            upper = arith.shrui(address, arith.constant(i64, 32))
            words += [arith.trunci(i32, address), arith.trunci(i32, upper)]
        return tuple(fragmented(w, signed=False) for w in (*words, *found[width:]))

    words = choose(block, [list(row) for row in rows])  # pyright: ignore[reportCallIssue]
    chosen = [
        ChosenRef(ref.dtype, (words[2 * i], words[2 * i + 1])) for i, ref in enumerate(rows[0])
    ]
    body(chosen, list(words[2 * width :]))
