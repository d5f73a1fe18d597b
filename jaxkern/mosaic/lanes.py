"""A lane's registers in inline MLIR, and what lanes load, store, sum and wait for.

The last section is between the blocks of a cluster.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jaxkern.core.target import interpreted
from jaxkern.mosaic.launch import LANES

VECTOR_BYTES = 16
"""The most that a lane loads or stores in one access."""

ROW: Any = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
"""The layout of (LANES,), an element a lane."""

REF: Any = plgpu.RefType()
SCALAR: Any = plgpu.Layout.WG_SPLAT(())


def row_type(count: int, dtype: Any = np.float32) -> Any:
    """(LANES · count,), with `count` neighbours a lane."""
    size = LANES * count
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=count)
    return plgpu.ShapeDtypeStruct((size,), np.dtype(dtype), layout=layout)


def scalar_type(dtype: Any) -> Any:
    """(), which all lanes hold."""
    return plgpu.ShapeDtypeStruct((), np.dtype(dtype), layout=SCALAR)


def zeros() -> jax.Array:
    """(LANES,): an fp32 zero in each lane."""
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)


def lane_numbers(dtype: Any = jnp.int32) -> jax.Array:
    """(LANES,): the number of each lane."""
    return plgpu.broadcasted_iota(dtype, (LANES,), 0, layout=ROW)


def laid_out(row: jax.Array) -> jax.Array:
    """`row` with its layout: inline MLIR takes no constant, which has another.

    A size of one is enough for the compiler to find out that an index is a constant.
    """
    return plgpu.layout_cast(row, row_type(row.size // LANES).layout)


def inline_mlir(*arg_types: Any, returns: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that emits MLIR, for a kernel to call; not for Pallas's interpreter.

    Args:
      *arg_types: of each argument: :data:`REF`, or the layout of an array or a scalar.
      returns: the type of the result, a tuple of such, or ``None``.
    """

    def decorate(code: Callable[..., Any]) -> Any:
        @plgpu.inline_mgpu(arg_types=arg_types, return_type=returns)
        def run(ctx: Any, *args: Any) -> Any:
            del ctx
            return code(*args)

        return run

    return decorate


def map_registers(
    convert: Callable[[Any], Sequence[Any]], values: jax.Array, layout: Any
) -> jax.Array:
    """Converts each register of `values` to fp32.

    Args:
      convert: takes a register, an MLIR vector, and gives an fp32 value for each element.
      values: in `layout`, which the result has, too.
      layout: of Mosaic.
    """
    result = plgpu.ShapeDtypeStruct(values.shape, np.dtype(np.float32), layout=layout)

    @inline_mlir(layout, returns=result)
    def run(values: Any) -> Any:
        converted = np.empty_like(values.registers)
        for index, register in np.ndenumerate(values.registers):
            scalars = list(convert(register))
            kind = ir.VectorType.get((len(scalars),), ir.F32Type.get())
            converted[index] = vector.from_elements(kind, scalars)
        return mgpu.FragmentedArray(_registers=converted, _layout=values.layout, _is_signed=None)

    return run(values)


def fragmented(*scalars: Any, signed: bool | None = None) -> Any:
    """Makes a row of each lane's scalars; `signed` says it of integers."""
    count = len(scalars)
    register = vector.from_elements(ir.VectorType.get((count,), scalars[0].type), list(scalars))
    return mgpu.FragmentedArray(
        _registers=np.full((1,), register, dtype=object),
        _layout=mgpu.WGStridedFragLayout((LANES * count,), count),
        _is_signed=signed,
    )


def i32(value: int) -> Any:
    """A constant."""
    return arith.constant(ir.IntegerType.get_signless(32), value)


def lane_value(row: Any) -> Any:
    """This lane's element of a row (LANES,)."""
    return element(row.registers.item(), 0)


def element(values: Any, k: int) -> Any:
    """Element `k` of an MLIR vector."""
    position = ir.DenseI64ArrayAttr.get([k])
    return vector.extract(values, dynamic_position=[], static_position=position)


def elements(values: Any) -> Iterator[Any]:
    """The elements of an MLIR vector, each extracted when it is asked for."""
    return (element(values, k) for k in range(ir.VectorType(values.type).shape[0]))


def load_elements(
    pointer: Any,
    dtype: Any,
    count: int,
    step: int,
    convert: Callable[[Any], Any],
    *,
    volatile: bool = False,
) -> list[Any]:
    """Loads and converts `count` neighbours, `step` in each access, to which they are aligned."""
    kind, alignment = ir.VectorType.get((step,), dtype), step * mgpu_utils.bytewidth(dtype)
    loaded = []
    for start in range(0, count, step):
        address = mgpu_utils.getelementptr(pointer, [start], dtype)
        values = llvm.load(kind, address, alignment=alignment, volatile_=volatile)
        loaded += map(convert, elements(values))
    return loaded


def store_elements(pointer: Any, values: list[Any], step: int) -> None:
    """Stores neighbours as :func:`load_elements` loads them."""
    dtype = values[0].type
    kind, alignment = ir.VectorType.get((step,), dtype), step * mgpu_utils.bytewidth(dtype)
    for start in range(0, len(values), step):
        address = mgpu_utils.getelementptr(pointer, [start], dtype)
        packed = vector.from_elements(kind, values[start : start + step])
        llvm.store(packed, address, alignment=alignment)


def dtype_of(ref: Any) -> Any:
    return ir.MemRefType(ref.type).element_type


def to_fp32(value: Any) -> Any:
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def narrowed(value: Any, dtype: Any) -> Any:
    return value if value.type == dtype else arith.truncf(dtype, value)


def ptx(instruction: str) -> None:
    """One PTX instruction without operands."""

    @inline_mlir()
    def run() -> None:
        mgpu_utils.inline_ptx(instruction, has_side_effects=True)

    run()


# Loads and stores of lanes, and barriers


@dataclasses.dataclass(frozen=True)
class LaneOffsets:
    """The offset, in elements, at which each lane of a warpgroup loads or stores.

    Lane l has the offset `start` plus the sum over `digits`, (divisor, size, stride), of (⌊l /
    divisor⌋ mod size) · stride; divisor and size are powers of two.
    """

    digits: tuple[tuple[int, int, int], ...] = ()
    start: int = 0

    def of_lanes(self) -> jax.Array:
        """(LANES,): the offsets of all lanes, for the interpreter."""
        lanes = jnp.arange(LANES)
        digits = (
            ((lanes >> (d.bit_length() - 1)) & (size - 1)) * stride
            for d, size, stride in self.digits
        )
        return sum(digits, jnp.full_like(lanes, self.start))

    def of_this_lane(self) -> Any:
        """Offset of this lane, an i32 in a kernel's MLIR."""
        total, lane = i32(self.start), mgpu_utils.thread_idx()
        for divisor, size, stride in self.digits:
            digit = arith.shrui(lane, i32(divisor.bit_length() - 1))
            digit = arith.andi(digit, i32(size - 1))
            total = arith.addi(total, arith.muli(digit, i32(stride)))
        return total

    def vector(self, count: int, itemsize: int) -> int:
        """Number of elements per access, of `count` neighbours, if the reference is aligned."""
        strides = [stride for _, size, stride in self.digits if size > 1]
        return math.gcd(VECTOR_BYTES // itemsize, count, self.start, *strides)


def load_lanes(
    ref: Any,
    offsets: LaneOffsets,
    count: int = 1,
    *,
    aligned: int = VECTOR_BYTES,
    volatile: bool = False,
) -> list[jax.Array]:
    """Loads `count` neighbouring elements into each lane, from its offset on.

    Args:
      ref: contiguous, in shared or global memory, fp32, bf16 or fp16; it and the offsets are
        aligned for the widest access that `count` and the strides allow.
      offsets: of each lane.
      count: elements of a lane.
      aligned: a number of elements, to whose largest power of two as a divisor `ref` is aligned,
        where it is not for that access.
      volatile: whether to read again what was read before, and compute again what follows from it.

    Returns:
      `count` arrays (LANES,), fp32.
    """
    if interpreted():
        flat = ref[...].reshape(-1).astype(jnp.float32)
        return [flat[offsets.of_lanes() + i] for i in range(count)]
    vec = math.gcd(offsets.vector(count, ref.dtype.itemsize), aligned)

    @inline_mlir(REF, returns=(row_type(1),) * count)
    def load(source: Any) -> Any:
        pointer = pointer_of_lane(source, offsets)
        loaded = load_elements(pointer, dtype_of(source), count, vec, to_fp32, volatile=volatile)
        return tuple(map(fragmented, loaded))

    return list(load(ref))


def store_lanes(ref: Any, offsets: LaneOffsets, values: Sequence[jax.Array]) -> None:
    """Stores what :func:`load_lanes` would load; lanes with equal offsets have equal values."""
    if interpreted():
        flat = ref[...].reshape(-1)
        for i, value in enumerate(values):
            flat = flat.at[offsets.of_lanes() + i].set(value.astype(ref.dtype))
        ref[...] = flat.reshape(ref[...].shape)
        return
    vec = offsets.vector(len(values), ref.dtype.itemsize)

    @inline_mlir(REF, *[ROW] * len(values))
    def store(target: Any, *arrays: Any) -> None:
        pointer = pointer_of_lane(target, offsets)
        scalars = [narrowed(lane_value(a), dtype_of(target)) for a in arrays]
        store_elements(pointer, scalars, vec)

    store(ref, *map(laid_out, values))


def load_short_row(ref: Any) -> jax.Array:
    """Loads a row of less than LANES elements, as (LANES,) in fp32: the last one fills the rest."""
    if interpreted():
        row = ref[...].astype(jnp.float32)
        return jnp.pad(row, (0, LANES - row.size), mode="edge")

    @inline_mlir(REF, returns=row_type(1))
    def load(source: Any) -> Any:
        where = _in_short_row(source)
        return fragmented(to_fp32(llvm.load(dtype_of(source), where, alignment=ref.dtype.itemsize)))

    return load(ref)


def store_short_row(ref: Any, value: jax.Array) -> None:
    """Stores what :func:`load_short_row` loads, in the dtype of `ref`.

    Lanes past the end store the last element again, which takes less time than a branch.
    """
    if interpreted():
        ref[...] = value[: ref.size].astype(ref.dtype)
        return

    @inline_mlir(REF, ROW)
    def store(target: Any, value: Any) -> None:
        scalar = narrowed(lane_value(value), dtype_of(target))
        llvm.store(scalar, _in_short_row(target), alignment=ref.dtype.itemsize)

    store(ref, laid_out(value))


def _in_short_row(ref: Any) -> Any:
    """This lane's pointer into a row, the last element's in lanes past the end."""
    kind = ir.MemRefType(ref.type)
    lane = arith.minui(mgpu_utils.thread_idx(), i32(kind.shape[0] - 1))
    pointer = mgpu_utils.memref_ptr(ref)
    if mgpu_utils.get_memref_llvm_address_space(kind) is None:
        # LLVM then knows that it is not shared memory, and moves loads from there past stores.
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
    return mgpu_utils.getelementptr(pointer, [lane], kind.element_type)


def sync_warp() -> None:
    """Waits for the warp's other lanes, whose stores to shared memory are then visible."""
    if not interpreted():
        inline_mlir()(mgpu_utils.warp_barrier)()


def sync_warpgroup() -> None:
    """Waits for the warpgroup's other lanes."""
    if not interpreted():
        inline_mlir()(mgpu_utils.warpgroup_barrier)()


def sync_block() -> None:
    """Waits for the block's other warpgroups. Not for Pallas's interpreter."""
    ptx("bar.sync 0;")


def sum_lanes(
    values: Sequence[jax.Array], distances: Sequence[int], *, swapped: int = 0
) -> list[jax.Array]:
    """Sums each of `values` over lanes at `distances`, powers of two, by butterfly shuffles.

    With several values a step halves those that a lane holds: it keeps one half, sends the other to
    its partner and adds what it gets, so that 8 values over 8 lanes take 7 shuffles and not 24. A
    single value is exchanged and added. The order of the additions is fixed.

    To choose what it keeps takes a lane two selections a value. It takes none at the first
    `swapped` distances, where the lanes with that bit set have the halves of `values` swapped.

    Returns:
      The sums that a lane holds in the end, V / 2^len(distances) of V values but at least one. At
      each distance the lanes with that bit set keep the later half.
    """
    if not distances:
        return list(values)
    if interpreted():
        held, lanes = list(values), jnp.arange(LANES)
        for i, distance in enumerate(distances):
            upper = (lanes & distance != 0) & (i >= swapped)
            half = len(held) // 2
            pairs = list(zip(held[:half], held[half:])) or [(held[0], held[0])]  # noqa: B905
            from_partner = lambda v: v.reshape(-1, 2, distance)[:, ::-1].reshape(LANES)  # noqa: B023
            held = [jnp.where(upper, b, a) + from_partner(jnp.where(upper, a, b)) for a, b in pairs]
        return held
    left = max(1, len(values) >> len(distances))

    @inline_mlir(*[ROW] * len(values), returns=(row_type(1),) * left)
    def shuffled(*arrays: Any) -> Any:
        held = [lane_value(a) for a in arrays]
        for i, distance in enumerate(distances):
            half = len(held) // 2
            if len(held) == 1:
                pairs = [(held[0], held[0])]
            elif i < swapped:
                pairs = list(zip(held[:half], held[half:], strict=True))
            else:
                bit = arith.andi(mgpu_utils.thread_idx(), i32(distance))
                upper = arith.cmpi(arith.CmpIPredicate.ne, bit, i32(0))
                pairs = [
                    (arith.select(upper, b, a), arith.select(upper, a, b))
                    for a, b in zip(held[:half], held[half:], strict=True)
                ]
            held = [arith.addf(a, mgpu_utils.shfl_bfly(b, distance)) for a, b in pairs]
        return tuple(fragmented(value) for value in held)

    return list(shuffled(*map(laid_out, values)))


def join_lanes(parts: Sequence[jax.Array]) -> jax.Array:
    """Joins n arrays (LANES,), fp32 or uint32, to (LANES · n,): a lane's values side by side."""
    if interpreted():
        return jnp.stack(parts, axis=1).reshape(-1)
    dtype = parts[0].dtype
    signed = False if dtype == jnp.uint32 else None

    @inline_mlir(*[ROW] * len(parts), returns=row_type(len(parts), dtype))
    def join(*parts: Any) -> Any:
        return fragmented(*map(lane_value, parts), signed=signed)

    return join(*map(laid_out, parts))


def pointer_of_lane(ref: Any, offsets: LaneOffsets) -> Any:
    """This lane's pointer into `ref`, in a kernel's MLIR."""
    pointer = mgpu_utils.memref_ptr(ref)
    return mgpu_utils.getelementptr(pointer, [offsets.of_this_lane()], dtype_of(ref))


# Sums within a lane and within a warp, and other arithmetic on a lane's registers, in MLIR


def sum_in_lanes(values: Sequence[jax.Array], vec: int) -> jax.Array:
    """(LANES,): sums the elements of `values` that each lane holds.

    Every second element is added up apart from the others, one after the other: products among
    them are then fused with the additions.

    Args:
      values: fp32, in ``WG_STRIDED`` by `vec`.
      vec: neighbouring elements of a lane.
    """
    return _sum_in_lanes(values, vec)


def squares_in_lanes(values: Sequence[jax.Array], center: jax.Array, vec: int) -> jax.Array:
    """(LANES,): sums the squares of each lane's differences to its `center` (LANES,).

    `values` are as for :func:`sum_in_lanes`.
    """
    return _sum_in_lanes(values, vec, center)


def _sum_in_lanes(values: Sequence[jax.Array], vec: int, *center: jax.Array) -> jax.Array:
    if interpreted():
        held = jnp.concatenate([v.reshape(-1, LANES, vec) for v in values])
        return (held if not center else (held - center[0][:, None]) ** 2).sum((0, 2))
    layouts = [plgpu.Layout.WG_STRIDED(v.shape, vec_size=vec) for v in values]
    contract = arith.FastMathFlags.contract

    @inline_mlir([ROW] * len(center), *layouts, returns=row_type(1))
    def add(center: Any, *arrays: Any) -> Any:
        middle = [lane_value(row) for row in center]
        found = [v for a in arrays for register in a.registers.flat for v in elements(register)]
        if middle:
            apart = [arith.subf(v, *middle) for v in found]
            found = [arith.mulf(d, d, fastmath=contract) for d in apart]
        plus = functools.partial(arith.addf, fastmath=contract)
        strands = [functools.reduce(plus, found[i::2]) for i in range(min(2, len(found)))]
        return fragmented(functools.reduce(arith.addf, strands))

    return add(list(center), *values)


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


# From one block of a cluster to others; not for the interpreter


def start_arrivals(refs: Sequence[Any]) -> None:
    """Makes `refs`, each (2,) int32 in shared memory, mbarriers of bytes that blocks send.

    At the start of a kernel; then in every round :func:`expect_arrivals`, :func:`send_in_cluster`
    of all that is expected, and :func:`wait_for_arrivals`. That neither fences nor waits for other
    writes, as a barrier of the cluster would.
    """

    @inline_mlir(*[REF] * len(refs))
    def start(*refs: Any) -> None:
        for ref in refs:
            nvvm.mbarrier_init(mgpu_utils.memref_ptr(ref), i32(1), predicate=_first_thread())

    start(*refs)
    ptx("fence.mbarrier_init.release.cluster;")
    ptx("barrier.cluster.arrive.aligned;")
    ptx("barrier.cluster.wait.aligned;")


def expect_arrivals(ref: Any, nbytes: int) -> None:
    """Sets how many bytes this block receives in this round."""

    @inline_mlir(REF)
    def expect(ref: Any) -> None:
        mgpu_utils.inline_ptx(
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};",
            _shared_address(mgpu_utils.memref_ptr(ref)),
            predicate=_first_thread(),
            has_side_effects=True,
        )

    expect(ref)


def send_in_cluster(
    ref: Any, arrivals: Any, offsets: LaneOffsets, value: jax.Array, *, parts: int, blocks: int
) -> None:
    """Stores `value` (LANES,), fp32, to the shared memory of all `blocks` of a cluster.

    Lane l of each warp stores 4 bytes to block ⌊l / parts⌋ while there is one, at its offset in
    that block's `ref`, which that block's `arrivals` counts.
    """

    @inline_mlir(REF, REF, ROW)
    def send(target: Any, arrivals: Any, value: Any) -> None:
        lane = arith.andi(mgpu_utils.thread_idx(), i32(31))
        block = arith.divui(lane, i32(parts))
        there = [
            _shared_address(nvvm.mapa(llvm.PointerType.get(7), pointer, block))
            for pointer in (pointer_of_lane(target, offsets), mgpu_utils.memref_ptr(arrivals))
        ]
        mgpu_utils.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $2, [$1];",
            *there,
            lane_value(value),
            predicate=arith.cmpi(arith.CmpIPredicate.ult, lane, i32(parts * blocks)),
            has_side_effects=True,
        )

    send(ref, arrivals, value)


def wait_for_arrivals(ref: Any, parity: jax.Array) -> None:
    """Waits until all bytes of a round are there; `parity` is 0 in the first round, then 1, 0 …"""

    @inline_mlir(REF, SCALAR)
    def wait(ref: Any, parity: Any) -> None:
        nvvm.mbarrier_try_wait_parity(
            mgpu_utils.memref_ptr(ref), parity.registers.item(), i32(10_000_000)
        )

    wait(ref, parity)


def _first_thread() -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), i32(0))


def _shared_address(pointer: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)
