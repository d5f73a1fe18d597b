"""Loads and stores of units, neighbouring elements that a lane accesses at once."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import (
    REF,
    ROW,
    SCALAR,
    VECTOR_BYTES,
    dtype_of,
    element,
    fragmented,
    i32,
    inline_mlir,
    laid_out,
    lane_value,
    load_elements,
    narrowed,
    row_type,
    store_elements,
    to_fp32,
)
from jaxkern.mosaic.launch import LANES

MAX_UNITS = 2**32 - 2**16
"""Most units of an array: a lane counts them in 32 bits."""


def too_large(vec: int, *sizes: int) -> str | None:
    """Says why a kernel cannot count the units, of `vec` elements, of arrays of such sizes."""
    if max(sizes) <= vec * MAX_UNITS:
        return None
    return (
        f"its {max(sizes)} elements can be accessed {vec} at a time, and the kernels count to 2^32"
    )


_GLOBAL_MEMORY = 1  # the address space of NVPTX


@dataclasses.dataclass(frozen=True)
class ChosenRef:
    """The array in global memory that a block chose among several of one dtype.

    Attributes:
      dtype: of its elements.
      address: the lower and the upper word of its address, (LANES,), uint32.
    """

    dtype: Any
    address: tuple[jax.Array, jax.Array]


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
    word = row_type(1, np.uint32)

    @inline_mlir(SCALAR, [[REF] * width for _ in rows], returns=(word,) * (2 * width + count))
    def choose(block: Any, rows: Any) -> Any:
        narrow, address = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        index = block.registers.item()

        def values(first: int, last: int) -> list[Any]:
            if last == first + 1:
                addresses = [
                    llvm.ptrtoint(address, mgpu_utils.memref_ptr(ref)) for ref in rows[first]
                ]
                # MLIR's constants are signed; the bits are the same.
                return addresses + [i32(n - 2**32 if n >= 2**31 else n) for n in numbers[first]]
            middle = (first + last) // 2
            before = arith.cmpi(arith.CmpIPredicate.ult, index, i32(starts[middle]))
            branch = scf.IfOp(before, [address] * width + [narrow] * count, has_else=True)
            parts = ((branch.then_block, first, middle), (branch.else_block, middle, last))
            for inside, *part in parts:
                with ir.InsertionPoint(inside):  # pyright: ignore
                    scf.yield_(values(*part))
            return list(branch.results)

        found = values(0, len(rows))
        words = []
        for pointer in found[:width]:
            upper = arith.shrui(pointer, arith.constant(address, 32))
            words += [arith.trunci(narrow, pointer), arith.trunci(narrow, upper)]
        return tuple(fragmented(w, signed=False) for w in (*words, *found[width:]))

    words = choose(block, [list(row) for row in rows])
    addresses = itertools.batched(words[: 2 * width], 2)
    chosen = [ChosenRef(ref.dtype, of) for ref, of in zip(rows[0], addresses, strict=True)]
    body(chosen, list(words[2 * width :]))


def load_units(
    ref: Any,
    units: jax.Array,
    vec: int,
    count: int | None = None,
    step: int | None = None,
) -> jax.Array:
    """Loads each lane's unit, `vec` neighbouring elements of an array in global memory.

    Args:
      ref: contiguous, fp32, bf16, fp16, int8 or uint8; or a :class:`ChosenRef`.
      units: (LANES,), uint32; unit u begins at element u · vec.
      vec: a power of two.
      count: elements of a unit that the array has, by default all; the others are zeros.
      step: elements of one access, a divisor of `vec` and `count` to which `ref` is aligned; by
        default of up to 16 bytes.

    Returns:
      (LANES · vec,), fp32.
    """
    count = vec if count is None else count
    step = min(count, VECTOR_BYTES // ref.dtype.itemsize) if step is None else step
    if interpreted():
        elements = ref[...].astype(jnp.float32)[_elements(units, vec)[:, :count]]
        return jnp.pad(elements, ((0, 0), (0, vec - count))).reshape(-1)
    where, types = _argument(ref)

    @inline_mlir(types, ROW, returns=row_type(vec))
    def load(where: Any, units: Any) -> Any:
        pointer = _unit_pointer(where, ref.dtype, units, vec)
        dtype = mgpu_utils.dtype_to_ir_type(ref.dtype)
        convert = lambda value: _from_memory(value, ref.dtype)
        values = load_elements(pointer, dtype, count, step, convert)
        values += [arith.constant(ir.F32Type.get(), 0.0)] * (vec - count)
        return fragmented(*values)

    return load(where, laid_out(units))


def store_units(
    ref: Any,
    units: jax.Array,
    values: jax.Array,
    vec: int,
    count: int | None = None,
    step: int | None = None,
    *,
    below: jax.Array | None = None,
) -> None:
    """Stores each lane's unit, with arguments as for :func:`load_units`.

    Lanes with equal units must have equal values. For integers the values are rounded, and must be
    within their range. With `below`, (LANES,) and uint32, a lane whose unit is not below its number
    stores nothing.
    """
    count = vec if count is None else count
    step = min(count, VECTOR_BYTES // ref.dtype.itemsize) if step is None else step
    if interpreted():
        elements = _elements(units, vec)[:, :count]
        if below is not None:
            elements = jnp.where((units < below)[:, None], elements, ref.shape[0])
        if jnp.issubdtype(ref.dtype, jnp.integer):
            values = jnp.round(values)
        values = values.reshape(-1, vec)[:, :count].astype(ref.dtype)
        ref[...] = ref[...].at[elements].set(values, mode="drop")
        return
    where, types = _argument(ref)
    limit = () if below is None else (laid_out(below),)

    @inline_mlir(types, ROW, row_type(vec).layout, (ROW,) * len(limit))
    def store(where: Any, units: Any, values: Any, limit: Any) -> None:
        def write() -> None:
            pointer = _unit_pointer(where, ref.dtype, units, vec)
            parts = [element(values.registers.item(), i) for i in range(count)]
            store_elements(pointer, [_to_memory(part, ref.dtype) for part in parts], step)

        if not limit:
            write()
            return
        inside = arith.cmpi(arith.CmpIPredicate.ult, lane_value(units), lane_value(*limit))
        branch = scf.IfOp(inside)
        with ir.InsertionPoint(branch.then_block):
            write()
            scf.yield_([])

    store(where, laid_out(units), laid_out(values), limit)


def load_words(ref: Any, count: int) -> list[jax.Array]:
    """Loads the words of an array, uint32, each as (LANES,), and adds zeros up to `count`."""
    size = ref.shape[0]
    zeros = [jnp.zeros((LANES,), jnp.uint32)] * (count - size)
    if interpreted():
        return [*(jnp.broadcast_to(ref[i], (LANES,)) for i in range(size)), *zeros]

    @inline_mlir(REF, returns=(row_type(1, np.uint32),) * size)
    def load(source: Any) -> Any:
        dtype, pointer = dtype_of(source), mgpu_utils.memref_ptr(source)
        addresses = [mgpu_utils.getelementptr(pointer, [i], dtype) for i in range(size)]
        return tuple(fragmented(llvm.load(dtype, a), signed=False) for a in addresses)

    return [*load(ref), *zeros]


def _elements(units: jax.Array, vec: int) -> jax.Array:
    """(LANES, vec): the indices of the units' elements."""
    return units[:, None] * vec + jnp.arange(vec, dtype=units.dtype)


def _argument(ref: Any) -> tuple[Any, Any]:
    """A reference as inline MLIR takes it, and its types."""
    if isinstance(ref, ChosenRef):
        return ref.address, (ROW, ROW)
    return (ref,), (REF,)


def _unit_pointer(where: Any, dtype: Any, units: Any, vec: int) -> Any:
    """The pointer to each lane's unit."""
    i64 = ir.IntegerType.get_signless(64)
    extended = lambda row: arith.extui(i64, lane_value(row))
    if len(where) == 1:
        pointer = mgpu_utils.memref_ptr(where[0])
    else:
        low, high = map(extended, where)
        address = arith.ori(low, arith.shli(high, arith.constant(i64, 32)))
        pointer = llvm.inttoptr(llvm.PointerType.get(_GLOBAL_MEMORY), address)
    offset = arith.muli(extended(units), arith.constant(i64, vec))
    return mgpu_utils.getelementptr(pointer, [offset], mgpu_utils.dtype_to_ir_type(dtype))


_INTEGERS = 2.0**23
"""2²³: above it, the lowest bits of an fp32's mantissa are the bits of an integer."""


def _from_memory(value: Any, dtype: Any) -> Any:
    if not jnp.issubdtype(dtype, jnp.integer):
        return to_fp32(value)
    f32 = ir.F32Type.get()
    word, offset = arith.extui(ir.IntegerType.get_signless(32), value), _INTEGERS
    if dtype == jnp.int8:
        word, offset = arith.xori(word, i32(128)), offset + 128
    bits = i32(int(np.float32(_INTEGERS).view(np.int32)))
    return arith.subf(arith.bitcast(f32, arith.ori(word, bits)), arith.constant(f32, offset))


def _to_memory(value: Any, dtype: Any) -> Any:
    kind = mgpu_utils.dtype_to_ir_type(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return narrowed(value, kind)
    # In the middle between 2^23 and 2^24 a sum that is just below still has the same exponent.
    offset = 1.5 * _INTEGERS + (128 if dtype == jnp.int8 else 0)
    shifted = arith.addf(value, arith.constant(ir.F32Type.get(), offset))
    word = arith.bitcast(ir.IntegerType.get_signless(32), shifted)
    if dtype == jnp.int8:
        word = arith.xori(word, i32(128))
    return arith.trunci(kind, word)
