"""The kernel behind every op that works element by element: registers between loads and stores.

A block is one warpgroup. Each lane loads from every input a *unit* of neighbouring elements in one
access of up to 16 bytes, computes in fp32, and stores; lanes exchange nothing. One unit a lane is
enough to keep an H200's memory busy, and leaves registers for as many warps as an SM can hold; of
small units a lane takes several.

Lanes beyond the last whole unit repeat it. Where the size is no multiple of a unit, one more block
takes the remaining elements, one by one.

Then come loads and stores of units, of one array or of one that a block chooses among several, and
last the generator of random bits, Philox-4x32, in kernels and in plain JAX.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jaxkern.core.arguments import unfit
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
    lane_numbers,
    lane_value,
    load_elements,
    narrowed,
    row_type,
    store_elements,
    to_fp32,
)
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel

_BLOCK = grid_axes("block")[0]

_BYTES = 16
"""Bytes that a lane loads at a time: at least of all inputs, and at most of one array."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The elements that a kernel's body computes.

    Attributes:
      units: (LANES,), uint32, the index of each lane's unit; of the last unit, elements beyond the
        end of the arrays are zeros and are not stored.
      vec: elements of a unit.
      seeds: the 4 words of each of the launch's seeds, each word (LANES,).
    """

    units: jax.Array
    vec: int
    seeds: Sequence[Sequence[jax.Array]]


def launch(
    name: str,
    body: Callable[..., tuple[Any, ...]],
    ins: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    columns: int = 0,
    seeds: Sequence[jax.Array] = (),
    vec: int | None = None,
    sliced: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs `body` over arrays of equally many elements.

    Args:
      name: of the kernel.
      body: ``body(lanes, *ins) -> outs`` on fp32 arrays (LANES · vec,).
      ins: arrays. One with twice the elements holds two inputs whose rows, of `columns` elements,
        are side by side: (..., 2 · columns). One with fewer elements has one for each unit, which
        `body` has as (LANES,); then the others are whole units.
      outs: shapes and dtypes of the results, which may be such arrays, too.
      columns: elements of a row, where an array holds two.
      seeds: arrays (k,), uint32, of up to 4 words that every lane reads; zeros make up the rest.
      vec: elements of a unit; by default as many as make 16 bytes of the widest dtype.
      sliced: whether the arrays are slices of others, and aligned as their sizes are.

    Raises:
      NotImplementedError: an array has more than `MAX_UNITS` units.
    """
    arrays = [*ins, *outs]
    size = max(a.size for a in arrays) // (2 if columns else 1)
    if size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in outs)
    if vec is None:
        vec = unit(*arrays, columns=columns)
    if reason := too_large(vec, *(a.size for a in arrays)):
        raise NotImplementedError(f'{name}: {reason}. Use implementation="xla".')
    halves = tuple(max(1, a.size // size) for a in arrays)
    input_bytes = sum(a.size * a.dtype.itemsize for a in ins) // size  # of an element of each
    plan = _ElementwisePlan(
        size=size,
        vec=vec,
        step=math.gcd(vec, size) if sliced else vec,
        each=max(1, _BYTES // (vec * input_bytes)),
        row=columns // vec,
        halves=halves,
        inputs=sum(halves[: len(ins)]),
    )

    def kernel(*refs: Any) -> None:
        words = [load_words(ref, 4) for ref in refs[: len(seeds)]]
        block = lax.axis_index(_BLOCK)

        def compute(units_of_lanes: list[jax.Array], count: int, step: int) -> None:
            """Runs `body` on the first `count` elements of each of the units, `step` an access."""

            def access(ref: Any) -> tuple[int, int, int]:
                """Counts elements of a unit: all, those in the array, and those of an access."""
                if ref.shape[0] < size:
                    return 1, 1, 1
                return vec, count, min(step, VECTOR_BYTES // ref.dtype.itemsize)

            loaded = []
            for units in units_of_lanes:
                located = _locate(plan, refs[len(seeds) :], units)
                values = [load_units(ref, at, *access(ref)) for ref, at in located[: plan.inputs]]
                loaded.append((Lanes(units, vec, words), values, located[plan.inputs :]))
            for lanes, values, located in loaded:
                for (ref, at), value in zip(located, body(lanes, *values), strict=True):
                    store_units(ref, at, value, *access(ref))

        def whole_units() -> None:
            compute(_units_of_lanes(plan, block), vec, plan.step)

        def rest() -> None:
            compute([jnp.full((LANES,), plan.units, jnp.uint32)], plan.rest, 1)

        if plan.units and plan.rest:
            pl.when(block < plan.blocks)(whole_units)
            pl.when(block == plan.blocks)(rest)
        else:
            (whole_units if plan.units else rest)()

    results = launch_kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct((o.size,), o.dtype) for o in outs),
        grid=(plan.blocks + (plan.rest > 0),),
        grid_names=(_BLOCK,),
        kernel_name=name,
        approx_math=True,
    )(*seeds, *(a.reshape(-1) for a in ins))
    return tuple(r.reshape(o.shape) for r, o in zip(results, outs, strict=True))


def unit(*arrays: Any, columns: int = 0) -> int:
    """Counts the elements of a unit of `arrays`, which make 16 bytes and divide `columns`.

    The arguments are as for :func:`launch`.
    """
    return math.gcd(_BYTES // max(a.dtype.itemsize for a in arrays), columns)


def unsupported(*, columns: int = 0, **arrays: jax.Array) -> str | None:
    """Says why no kernel can take `arrays`, one of which may have rows of two times `columns`."""
    if reason := unfit(**arrays):
        return reason
    present = arrays.values()
    return too_large(unit(*present, columns=columns), *(a.size for a in present))


@dataclasses.dataclass(frozen=True)
class _ElementwisePlan:
    size: int  # elements of an input
    vec: int  # elements of a unit
    step: int  # elements of an access
    each: int  # units of a lane
    row: int  # units of a row, where an array is two inputs
    halves: tuple[int, ...]  # inputs or outputs in each array: 2 where it holds gate and up
    inputs: int

    @property
    def units(self) -> int:
        return self.size // self.vec

    @property
    def rest(self) -> int:
        """Elements after the last whole unit."""
        return self.size % self.vec

    @property
    def blocks(self) -> int:
        """Blocks that take whole units."""
        return -(-self.units // (LANES * self.each))


def _units_of_lanes(plan: _ElementwisePlan, block: jax.Array) -> list[jax.Array]:
    """The units that each lane of a block takes, (LANES,) each; past the last unit the last."""
    lane = lane_numbers(jnp.uint32)
    first = block.astype(jnp.uint32) * jnp.uint32(LANES * plan.each)
    units = [lane + (first + jnp.uint32(k * LANES)) for k in range(plan.each)]
    if plan.units % (LANES * plan.each):
        units = [jnp.minimum(u, jnp.uint32(plan.units - 1)) for u in units]
    return units


def _locate(
    plan: _ElementwisePlan, refs: Sequence[Any], units: jax.Array
) -> list[tuple[Any, jax.Array]]:
    """The array of every input and output, and the indices in it of `units`."""
    found = []
    for ref, halves in zip(refs, plan.halves, strict=True):
        if halves == 1:
            found.append((ref, units))
            continue
        row_start = lax.div(units, jnp.uint32(plan.row)) * jnp.uint32(plan.row)
        found += [(ref, units + row_start + jnp.uint32(i * plan.row)) for i in range(halves)]
    return found


# Units, neighbouring elements that a lane accesses at once

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
    # In the middle between 2^23 and 2^24 a sum that is just below still has the same exponent. A
    # byte of a sum that no integer operation follows, ptxas would convert as a number.
    shifted = arith.addf(value, arith.constant(ir.F32Type.get(), 1.5 * _INTEGERS + 128))
    word = arith.bitcast(ir.IntegerType.get_signless(32), shifted)
    return arith.trunci(kind, arith.xori(word, i32(128)))


# Random bits of a counter and a key

Product = Callable[[Any, int], tuple[Any, Any]]
"""(a, b) -> the upper and the lower 32 bits of a · b."""


def philox(
    counter: Sequence[Any],
    key: Sequence[Any],
    product: Product | None = None,
    *,
    rounds: int = 10,
    rolled: bool = False,
) -> list[Any]:
    """Returns four words of 32 random bits, of a counter of four words and a key of two.

    `product` is :func:`wide_product` unless a kernel has an instruction for it. With `rolled` the
    rounds are a loop, which compiles in half the time; all words then have one type.
    """
    product = product or wide_product

    def one_round(_: Any, state: Any) -> Any:
        a, b, c, d, k, l = state
        (high_a, low_a), (high_c, low_c) = product(a, 0xD2511F53), product(c, 0xCD9E8D57)
        k_next, l_next = k + jnp.uint32(0x9E3779B9), l + jnp.uint32(0xBB67AE85)
        return high_c ^ b ^ k, low_c, high_a ^ d ^ l, low_a, k_next, l_next

    state = (*counter, *key)
    if rolled:
        state = lax.fori_loop(0, rounds, one_round, state)
    else:
        for i in range(rounds):
            state = one_round(i, state)
    return list(state[:4])


def halves(words: Sequence[Any]) -> list[Any]:
    """The lower and the upper 16 bits of each word."""
    return [half for w in words for half in (w & jnp.uint32(0xFFFF), w >> 16)]


def wide_product(a: jax.Array, b: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a · b, of 16-bit halves: Shardy knows no ``lax.mulhi``."""
    low, high = a & jnp.uint32(0xFFFF), a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    cross = high * b_low + (low * b_low >> 16)
    other = low * b_high + (cross & jnp.uint32(0xFFFF))
    return high * b_high + (cross >> 16) + (other >> 16), a * jnp.uint32(b)
