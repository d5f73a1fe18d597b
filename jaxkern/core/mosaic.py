"""What the Mosaic GPU kernels share: the device's size, and rows laid over a warpgroup's lanes."""

import dataclasses
import functools
import math
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
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from jaxkern.core import target

LANES = 128
"""Threads of a warpgroup. Kernels that sum across lanes run one warpgroup per block: Mosaic keeps
one scratch for such sums per block, and two warpgroups would race for it."""


class GridAxis:
    """The name of a grid axis, equal to itself alone.

    Inside a kernel an axis of the user's device mesh hides a grid axis of an equal name, and
    ``lax.axis_index`` then silently gives the device's index: a string is never safe.
    """

    def __init__(self, label: str):
        self.label = label

    def __repr__(self) -> str:
        return f"GridAxis({self.label!r})"


def grid_axes(*labels: str) -> tuple[Any, ...]:
    """A new :class:`GridAxis` for each label, for ``plgpu.kernel`` and ``lax.axis_index``."""
    return tuple(GridAxis(label) for label in labels)


def launch_kernel(body: Callable[..., None], *, approx_math: bool = False, **launch: Any) -> Any:
    """``plgpu.kernel`` with what all kernels have in common.

    Lane semantics take the layouts as the kernels state them. Mosaic's other semantics infer them,
    and for the gradient of a selective scan that takes JAX 0.11 half a minute, to the same code.
    Pallas puts no barrier around accesses of memory: the kernels place their own.

    Args:
      body: the kernel.
      approx_math: whether exponentials, logarithms and divisions are those of the fast units.
      **launch: the other arguments of ``plgpu.kernel``.
    """

    def guarded(*refs: Any, **scratch: Any) -> None:
        gpu = target.current()
        if gpu is not None:
            _refuse_others(gpu, launch["kernel_name"])
        body(*refs, **scratch)

    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,
        approx_math=approx_math,
    )
    return plgpu.kernel(guarded, compiler_params=params, **launch)


_ONLY_ON = {9: nvvm.wgmma_fence_aligned, 10: nvvm.tcgen05_relinquish_alloc_permit}
"""Operations that a generation has alone, by the major number of the compute capability."""


def _refuse_others(gpu: target.Gpu, name: str) -> None:
    """Have the compiler stop with an error where a kernel meets a GPU that it was not made for.

    Else LLVM would find no instruction for parts of it, and abort the process. An operation that
    only this generation has stands on a path that no lane takes, and that LLVM removes: MLIR looks
    at it before, and says its location. JAX 0.12 looks no more, and aborts.
    """
    emit = _ONLY_ON.get(gpu.capability[0])
    if emit is None:
        return
    told = f"jaxkern: {name} was lowered for {gpu}; lower the program for this GPU"

    @plgpu.inline_mgpu()
    def check(ctx: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        with ir.Location.name(told):
            impossible = arith.cmpi(
                arith.CmpIPredicate.ugt, mgpu_utils.thread_idx(), arith.constant(i32, 2**20)
            )
            branch = scf.IfOp(impossible)
            with ir.InsertionPoint(branch.then_block):
                emit()
                scf.yield_([])

    check()  # pyright: ignore[reportCallIssue]


_H200_SMS = 132
_MAX_VECTOR_BYTES = 16
_GLOBAL_MEMORY = 1  # the address space of NVPTX


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that a kernel is lowered for."""
    gpu = target.current()
    return _H200_SMS if gpu is None else gpu.multiprocessors


@dataclasses.dataclass(frozen=True)
class Windows:
    """A row of `n` elements as `count` windows of `size`, each spread over a warpgroup's lanes.

    The last window ends at the row's end, so where `n` is no multiple of `size` it overlaps the one
    before: its first elements are read and written twice, with equal values, and masked in sums.
    Every window has the same layout, so their registers can be added before one sum over lanes.
    """

    n: int
    size: int
    vec: int
    count: int

    def __post_init__(self) -> None:
        assert self.size % (LANES * self.vec) == 0, self
        assert self.n % self.vec == 0, self
        assert (self.count - 1) * self.size < self.n <= self.count * self.size, self

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)

    def start(self, i: Any) -> Any:
        if isinstance(i, int):
            return min(i * self.size, self.n - self.size)
        return jnp.minimum(i * self.size, self.n - self.size)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)


@functools.cache
def windows(n: int, max_size: int, itemsize: int) -> Windows:
    """The windows of at most `max_size` elements that cover a row of `n` >= 128 the cheapest.

    A load of `vec` elements needs every row to start at a multiple of `vec`, so an odd `n` is read
    element by element; the cost of a window grows with the number of such loads.

    Args:
      n: length of the row.
      max_size: most elements of one window.
      itemsize: bytes of an element of the narrowest array, which decides the widest load.
    """
    choices = []
    vec = _MAX_VECTOR_BYTES // itemsize
    while vec:
        unit = LANES * vec
        fewest = -(-n // max_size)
        for count in range(fewest, fewest + 8):
            size = -(-n // (count * unit)) * unit
            covers = (count - 1) * size < n <= count * size
            if n % vec == 0 and size <= min(n, max_size) and covers:
                cost = size * count * (1 + 1 / (vec * itemsize))
                choices.append((cost, count, Windows(n, size, vec, count)))
        vec //= 2
    return min(choices, key=lambda c: c[:2])[2]


_ROW: Any = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class LaneOffsets:
    """Where each lane of a warpgroup reads or writes, as a number whose digits are the lane's.

    Lane l is `start` elements, and the sum over `digits`, (divisor, size, stride), of (⌊l /
    divisor⌋ mod size) · stride, from the beginning; divisor and size are powers of two.
    """

    digits: tuple[tuple[int, int, int], ...] = ()
    start: int = 0

    def of_lanes(self) -> jax.Array:
        lanes = jnp.arange(LANES)
        digits = (
            ((lanes >> (d.bit_length() - 1)) & (size - 1)) * stride
            for d, size, stride in self.digits
        )
        return sum(digits, jnp.full_like(lanes, self.start))

    def of_this_lane(self) -> Any:
        """The same in a kernel's MLIR, as an i32."""
        i32 = ir.IntegerType.get_signless(32)

        def constant(k: int) -> Any:
            return arith.constant(i32, k)

        total, lane = constant(self.start), mgpu_utils.thread_idx()
        for divisor, size, stride in self.digits:
            digit = arith.shrui(lane, constant(divisor.bit_length() - 1))
            digit = arith.andi(digit, constant(size - 1))
            total = arith.addi(total, arith.muli(digit, constant(stride)))
        return total

    def vector(self, count: int, itemsize: int) -> int:
        """Elements that one access may take of `count` in a row, if the reference is aligned."""
        strides = [stride for _, size, stride in self.digits if size > 1]
        return math.gcd(_MAX_VECTOR_BYTES // itemsize, count, self.start, *strides)


def load_lanes(
    ref: Any,
    offsets: LaneOffsets,
    count: int = 1,
    *,
    interpret: bool,
    volatile: bool = False,
) -> list[jax.Array]:
    """What each lane reads: `count` neighbouring elements, from its offset on.

    Args:
      ref: contiguous, in shared or global memory, fp32, bf16 or fp16; it and the offsets are
        aligned for the widest access that `count` and the strides allow.
      offsets: of each lane, in elements.
      count: elements of a lane.
      interpret: whether this runs in Pallas's interpreter.
      volatile: read again even what was read before, and what follows from it is computed again.

    Returns:
      `count` arrays (LANES,), fp32.
    """
    if interpret:
        flat = ref[...].reshape(-1).astype(jnp.float32)
        return [flat[offsets.of_lanes() + i] for i in range(count)]
    vec = offsets.vector(count, ref.dtype.itemsize)
    row = _row(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(row,) * count)
    def load(ctx: Any, source: Any) -> Any:
        del ctx
        dtype = ir.MemRefType(source.type).element_type
        pointer = _pointer(source, offsets)
        loaded = []
        for start in range(0, count, vec):
            address = mgpu_utils.getelementptr(pointer, [start], dtype)
            values = llvm.load(
                ir.VectorType.get((vec,), dtype),
                address,
                alignment=vec * ref.dtype.itemsize,
                volatile_=volatile,
            )
            loaded += [_widened(_element(values, k)) for k in range(vec)]
        return tuple(_fragmented(value) for value in loaded)

    return list(load(ref))  # pyright: ignore[reportCallIssue]: its ctx is Mosaic's to pass


def store_lanes(
    ref: Any, offsets: LaneOffsets, values: Sequence[jax.Array], *, interpret: bool
) -> None:
    """Writes what :func:`load_lanes` would read; lanes with equal offsets have equal values."""
    if interpret:
        flat = ref[...].reshape(-1)
        for i, value in enumerate(values):
            flat = flat.at[offsets.of_lanes() + i].set(value.astype(ref.dtype))
        ref[...] = flat.reshape(ref[...].shape)
        return
    vec = offsets.vector(len(values), ref.dtype.itemsize)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_ROW] * len(values)))
    def store(ctx: Any, target: Any, *arrays: Any) -> None:
        del ctx
        dtype = ir.MemRefType(target.type).element_type
        pointer = _pointer(target, offsets)
        scalars = [_narrowed(_element(a.registers.item(), 0), dtype) for a in arrays]
        for start in range(0, len(scalars), vec):
            address = mgpu_utils.getelementptr(pointer, [start], dtype)
            packed = vector.from_elements(
                ir.VectorType.get((vec,), dtype), scalars[start : start + vec]
            )
            llvm.store(packed, address, alignment=vec * ref.dtype.itemsize)

    store(ref, *map(_laid_out, values))  # pyright: ignore[reportCallIssue]


def sync_warp(*, interpret: bool) -> None:
    """Lanes of a warp see what the others wrote to shared memory before."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        del ctx
        mgpu_utils.warp_barrier()

    barrier()  # pyright: ignore[reportCallIssue]


def sum_lanes(
    values: Sequence[jax.Array], distances: Sequence[int], *, swapped: int = 0, interpret: bool
) -> list[jax.Array]:
    """The sums of each of `values` over lanes at `distances`, powers of two, in their order.

    With several values a step halves those that a lane holds: it keeps the one half, sends the
    other to its partner and adds what comes back, so that 8 values over 8 lanes take 7 shuffles and
    not 24. The last value goes to and fro. The order of the additions is fixed.

    The choice of what to keep takes two selections a value. It takes none at the first `swapped`
    distances, where the lanes with that bit set have the halves of their values swapped.

    Returns:
      The values left, V / 2^len(distances) of V but at least one. Of the first distance the lanes
      with that bit set hold the later half, and so on.
    """
    if not distances:
        return list(values)
    if interpret:
        held, lanes = list(values), jnp.arange(LANES)
        for i, distance in enumerate(distances):
            upper = (lanes & distance != 0) & (i >= swapped)
            half = len(held) // 2
            pairs = list(zip(held[:half], held[half:])) or [(held[0], held[0])]  # noqa: B905
            from_partner = lambda v: v.reshape(-1, 2, distance)[:, ::-1].reshape(LANES)  # noqa: B023
            held = [jnp.where(upper, b, a) + from_partner(jnp.where(upper, a, b)) for a, b in pairs]
        return held
    left = max(1, len(values) >> len(distances))
    row = _row(1)

    @plgpu.inline_mgpu(arg_types=(_ROW,) * len(values), return_type=(row,) * left)
    def shuffled(ctx: Any, *arrays: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)

        def constant(k: int) -> Any:
            return arith.constant(i32, k)

        held = [_element(a.registers.item(), 0) for a in arrays]
        for i, distance in enumerate(distances):
            half = len(held) // 2
            if len(held) == 1:
                pairs = [(held[0], held[0])]
            elif i < swapped:
                pairs = list(zip(held[:half], held[half:], strict=True))
            else:
                upper = arith.cmpi(
                    arith.CmpIPredicate.ne,
                    arith.andi(mgpu_utils.thread_idx(), constant(distance)),
                    constant(0),
                )
                pairs = [
                    (arith.select(upper, b, a), arith.select(upper, a, b))
                    for a, b in zip(held[:half], held[half:], strict=True)
                ]
            held = [arith.addf(a, mgpu_utils.shfl_bfly(b, distance)) for a, b in pairs]
        return tuple(_fragmented(value) for value in held)

    return list(shuffled(*map(_laid_out, values)))


def sum_in_lanes(values: Sequence[jax.Array], vec: int, *, interpret: bool) -> jax.Array:
    """(LANES,): the sum of what each lane holds of `values`, fp32, in ``WG_STRIDED`` by `vec`.

    Elements are added one after the other, in two strands, as products among them then are fused
    with their additions.
    """
    if interpret:
        return sum((v.reshape(-1, LANES, vec).sum((0, 2)) for v in values), jnp.zeros(LANES))
    layouts = [plgpu.Layout.WG_STRIDED(v.shape, vec_size=vec) for v in values]

    @plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=_row(1))
    def add(ctx: Any, *arrays: Any) -> Any:
        del ctx
        fused = functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract)
        held = [_element(r, k) for a in arrays for r in a.registers.flat for k in range(vec)]
        strands = [functools.reduce(fused, held[i::2]) for i in range(min(2, len(held)))]
        return _fragmented(functools.reduce(arith.addf, strands))

    return add(*values)  # pyright: ignore[reportCallIssue]


def squares_in_lanes(
    values: Sequence[jax.Array], center: jax.Array, vec: int, *, interpret: bool
) -> jax.Array:
    """(LANES,): the sum of squares of what differs from the lane's `center` (LANES,).

    Of `values` as for :func:`sum_in_lanes`.
    """
    if interpret:
        held = jnp.concatenate([v.reshape(-1, LANES, vec) for v in values])
        return ((held - center[:, None]) ** 2).sum((0, 2))
    layouts = [plgpu.Layout.WG_STRIDED(v.shape, vec_size=vec) for v in values]

    @plgpu.inline_mgpu(arg_types=(_ROW, *layouts), return_type=_row(1))
    def add(ctx: Any, center: Any, *arrays: Any) -> Any:
        del ctx
        fused = functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract)
        times = functools.partial(arith.mulf, fastmath=arith.FastMathFlags.contract)
        middle = _element(center.registers.item(), 0)
        held = [_element(r, k) for a in arrays for r in a.registers.flat for k in range(vec)]
        apart = [arith.subf(v, middle) for v in held]
        squares = [times(d, d) for d in apart]
        strands = [functools.reduce(fused, squares[i::2]) for i in range(min(2, len(squares)))]
        return _fragmented(functools.reduce(arith.addf, strands))

    return add(center, *values)  # pyright: ignore[reportCallIssue]


def alternate_lanes(even: jax.Array, odd: jax.Array, *, interpret: bool) -> jax.Array:
    """`even` in lanes of even number, `odd` in the others; all (LANES,), fp32."""
    if interpret:
        return jnp.where(jnp.arange(LANES) % 2 == 0, even, odd)

    @plgpu.inline_mgpu(arg_types=(_ROW, _ROW), return_type=_row(1))
    def choose(ctx: Any, even: Any, odd: Any) -> Any:
        del ctx
        i1 = ir.IntegerType.get_signless(1)
        is_odd = arith.trunci(i1, mgpu_utils.thread_idx())
        of_odd, of_even = (_element(a.registers.item(), 0) for a in (odd, even))
        return _fragmented(arith.select(is_odd, of_odd, of_even))

    return choose(even, odd)  # pyright: ignore[reportCallIssue]


def uniform(value: jax.Array, *, interpret: bool) -> jax.Array:
    """The scalar that all lanes hold in `value` (LANES,), fp32."""
    if interpret:
        return value[0]
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.float32), layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(_ROW,), return_type=scalar)
    def splat(ctx: Any, value: Any) -> Any:
        del ctx
        return mgpu.FragmentedArray.splat(_element(value.registers.item(), 0), shape=())

    return splat(value)  # pyright: ignore[reportCallIssue]


def store(ref: Any, value: jax.Array) -> None:
    """Writes an array of any layout, however few bytes a lane has; JAX 0.12 wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def sync_block() -> None:
    """All warpgroups of a block wait for each other. Not for Pallas's interpreter."""
    _ptx("bar.sync 0;")


def sync_warpgroup(*, interpret: bool) -> None:
    """Lanes of a warpgroup wait for each other."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        del ctx
        mgpu_utils.warpgroup_barrier()

    barrier()  # pyright: ignore[reportCallIssue]


def start_arrivals(refs: Sequence[Any]) -> None:
    """Makes `refs`, each (2,) int32 in shared memory, count bytes that blocks of a cluster send.

    At the start of a kernel; then in every round :func:`expect_arrivals`, :func:`send_in_cluster`
    of all that is expected, and :func:`wait_for_arrivals`. That neither fences nor waits for other
    writes, as a barrier of the cluster would. None is for Pallas's interpreter.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def start(ctx: Any, *refs: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        for ref in refs:
            nvvm.mbarrier_init(
                mgpu_utils.memref_ptr(ref), arith.constant(i32, 1), predicate=_first_thread()
            )

    start(*refs)  # pyright: ignore[reportCallIssue]
    _ptx("fence.mbarrier_init.release.cluster;")
    _ptx("barrier.cluster.arrive.aligned;")
    _ptx("barrier.cluster.wait.aligned;")


def expect_arrivals(ref: Any, nbytes: int) -> None:
    """Says how many bytes this block gets in this round."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def expect(ctx: Any, ref: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx(
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};",
            _shared_address(mgpu_utils.memref_ptr(ref)),
            predicate=_first_thread(),
            has_side_effects=True,
        )

    expect(ref)  # pyright: ignore[reportCallIssue]


def send_in_cluster(
    ref: Any, arrivals: Any, offsets: LaneOffsets, value: jax.Array, *, parts: int, blocks: int
) -> None:
    """Writes `value` (LANES,), fp32, to the shared memory of all `blocks` of a cluster.

    Lane l of each warp writes 4 bytes to block ⌊l / parts⌋ while there is one, at its offset in
    that block's `ref`, and they count in that block's `arrivals`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _ROW))
    def send(ctx: Any, target: Any, arrivals: Any, value: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.andi(mgpu_utils.thread_idx(), arith.constant(i32, 31))
        block = arith.divui(lane, arith.constant(i32, parts))
        there = [
            _shared_address(nvvm.mapa(llvm.PointerType.get(7), pointer, block))
            for pointer in (_pointer(target, offsets), mgpu_utils.memref_ptr(arrivals))
        ]
        mgpu_utils.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $2, [$1];",
            *there,
            _element(value.registers.item(), 0),
            predicate=arith.cmpi(
                arith.CmpIPredicate.ult, lane, arith.constant(i32, parts * blocks)
            ),
            has_side_effects=True,
        )

    send(ref, arrivals, value)  # pyright: ignore[reportCallIssue]


def wait_for_arrivals(ref: Any, parity: jax.Array) -> None:
    """Until all bytes of a round are there; `parity` is 0 in the first round, 1, 0, 1 ..."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(ctx: Any, ref: Any, parity: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        nvvm.mbarrier_try_wait_parity(
            mgpu_utils.memref_ptr(ref), parity.registers.item(), arith.constant(i32, 10_000_000)
        )

    wait(ref, parity)  # pyright: ignore[reportCallIssue]


def _first_thread() -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), arith.constant(i32, 0))


def _shared_address(pointer: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def _ptx(instruction: str) -> None:
    @plgpu.inline_mgpu()
    def run(ctx: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx(instruction, has_side_effects=True)

    run()  # pyright: ignore[reportCallIssue]


def join_lanes(parts: Sequence[jax.Array], *, interpret: bool) -> jax.Array:
    """(LANES · n,) of n arrays (LANES,), fp32 or uint32: those of a lane next to each other."""
    if interpret:
        return jnp.stack(parts, axis=1).reshape(-1)
    dtype = parts[0].dtype
    signed = False if dtype == jnp.uint32 else None

    @plgpu.inline_mgpu(arg_types=(_ROW,) * len(parts), return_type=_row(len(parts), dtype))
    def join(ctx: Any, *parts: Any) -> Any:
        del ctx
        return _fragmented(*(_element(p.registers.item(), 0) for p in parts), signed=signed)

    return join(*map(_laid_out, parts))  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True)
class ChosenRef:
    """An array in global memory that a block chose among several of the same dtype.

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
    *,
    interpret: bool,
) -> None:
    """Runs ``body(refs, numbers)`` with the row of references that a block is to work on.

    The row is found by a tree of branches that all lanes take alike, of which each loads only its
    own addresses, and `body` is compiled once.

    Args:
      body: takes what :func:`load_units` and :func:`store_units` take as references, and each
        number of the row as (LANES,), uint32.
      block: (), the index of the block.
      rows: references in global memory; the dtypes of each row are the same.
      starts: the first block of each row, increasing from 0.
      numbers: of each row, below 2^32.
      interpret: whether this runs in Pallas's interpreter.
    """
    if interpret:
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
    word = _row(1, np.uint32)

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
                # Signed as MLIR reads it; the bits are those of the number.
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
        return tuple(_fragmented(w, signed=False) for w in (*words, *found[width:]))

    words = choose(block, [list(row) for row in rows])  # pyright: ignore[reportCallIssue]
    chosen = [
        ChosenRef(ref.dtype, (words[2 * i], words[2 * i + 1])) for i, ref in enumerate(rows[0])
    ]
    body(chosen, list(words[2 * width :]))


def load_units(
    ref: Any,
    units: jax.Array,
    vec: int,
    count: int | None = None,
    step: int | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    """What each lane reads of an array in global memory: its unit, `vec` neighbouring elements.

    Args:
      ref: contiguous, fp32, bf16, fp16, int8 or uint8; or a :class:`ChosenRef`.
      units: (LANES,), uint32; unit u begins at element u · vec.
      vec: a power of two.
      count: elements of a unit that are there, by default all; the others are zeros.
      step: elements of one access, a divisor of `vec` and `count` to which `ref` is aligned; by
        default of up to 16 bytes.
      interpret: whether this runs in Pallas's interpreter.

    Returns:
      (LANES · vec,), fp32.
    """
    count = vec if count is None else count
    step = min(count, _MAX_VECTOR_BYTES // ref.dtype.itemsize) if step is None else step
    if interpret:
        elements = ref[...].astype(jnp.float32)[_elements(units, vec)[:, :count]]
        return jnp.pad(elements, ((0, 0), (0, vec - count))).reshape(-1)
    where, types = _place(ref)

    @plgpu.inline_mgpu(arg_types=(types, _ROW), return_type=_row(vec))
    def load(ctx: Any, where: Any, units: Any) -> Any:
        del ctx
        pointer, dtype = _unit_pointer(where, ref.dtype, units, vec)
        values = []
        for start in range(0, count, step):
            address = mgpu_utils.getelementptr(pointer, [start], dtype)
            shape = ir.VectorType.get((step,), dtype)
            loaded = llvm.load(shape, address, alignment=step * ref.dtype.itemsize)
            values += [_from_memory(_element(loaded, i), ref.dtype) for i in range(step)]
        values += [arith.constant(ir.F32Type.get(), 0.0)] * (vec - count)
        return _fragmented(*values)

    return load(where, _laid_out(units))  # pyright: ignore[reportCallIssue]: its ctx is Mosaic's


def store_units(
    ref: Any,
    units: jax.Array,
    values: jax.Array,
    vec: int,
    count: int | None = None,
    step: int | None = None,
    *,
    below: jax.Array | None = None,
    interpret: bool,
) -> None:
    """Writes what :func:`load_units` would read; lanes with equal units have equal values.

    To integers the values are rounded, to numbers that they can hold.

    With `below`, (LANES,) and uint32, a lane whose unit is not below its number writes nothing.
    """
    count = vec if count is None else count
    step = min(count, _MAX_VECTOR_BYTES // ref.dtype.itemsize) if step is None else step
    if interpret:
        elements = _elements(units, vec)[:, :count]
        if below is not None:
            elements = jnp.where((units < below)[:, None], elements, ref.shape[0])
        if jnp.issubdtype(ref.dtype, jnp.integer):
            values = jnp.round(values)
        values = values.reshape(-1, vec)[:, :count].astype(ref.dtype)
        ref[...] = ref[...].at[elements].set(values, mode="drop")
        return
    where, types = _place(ref)
    limit = () if below is None else (_laid_out(below),)

    @plgpu.inline_mgpu(arg_types=(types, _ROW, _row(vec).layout, (_ROW,) * len(limit)))
    def store(ctx: Any, where: Any, units: Any, values: Any, limit: Any) -> None:
        del ctx

        def write() -> None:
            pointer, dtype = _unit_pointer(where, ref.dtype, units, vec)
            parts = [_element(values.registers.item(), i) for i in range(count)]
            narrow = [_to_memory(part, ref.dtype) for part in parts]
            for start in range(0, count, step):
                address = mgpu_utils.getelementptr(pointer, [start], dtype)
                packed = vector.from_elements(
                    ir.VectorType.get((step,), dtype), narrow[start : start + step]
                )
                llvm.store(packed, address, alignment=step * ref.dtype.itemsize)

        if not limit:
            write()
            return
        unit, end = (_element(a.registers.item(), 0) for a in (units, *limit))
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, unit, end))
        with ir.InsertionPoint(branch.then_block):
            write()
            scf.yield_([])

    store(where, _laid_out(units), _laid_out(values), limit)  # pyright: ignore[reportCallIssue]


def largest_of_warp(x: jax.Array, *, interpret: bool) -> jax.Array:
    """(LANES,): the largest magnitude among all elements of a lane's warp; NaN if there is one.

    Args:
      x: (LANES · vec,), fp32.
      interpret: whether this runs in Pallas's interpreter.
    """
    if interpret:
        return jnp.repeat(jnp.abs(x).reshape(LANES // 32, -1).max(axis=1), 32)
    return _of_warp(jnp.abs(x), arith.maximumf)


def sum_of_warp(x: jax.Array, *, interpret: bool) -> jax.Array:
    """(LANES,): the sum of all elements of a lane's warp, in a fixed order.

    Args:
      x: (LANES · vec,), fp32.
      interpret: whether this runs in Pallas's interpreter.
    """
    if interpret:
        return jnp.repeat(x.reshape(LANES // 32, -1).sum(axis=1), 32)
    return _of_warp(x, arith.addf)


def _of_warp(x: jax.Array, combine: Callable[[Any, Any], Any]) -> jax.Array:
    vec = x.size // LANES

    @plgpu.inline_mgpu(arg_types=(_row(vec).layout,), return_type=_row(1))
    def reduce(ctx: Any, x: Any) -> Any:
        del ctx
        parts = [_element(x.registers.item(), i) for i in range(vec)]
        result = functools.reduce(combine, parts)
        for distance in (1, 2, 4, 8, 16):
            result = combine(result, mgpu_utils.shfl_bfly(result, distance))
        return _fragmented(result)

    return reduce(_laid_out(x))  # pyright: ignore[reportCallIssue]


def _elements(units: jax.Array, vec: int) -> jax.Array:
    """(LANES, vec): the indices of the units' elements."""
    return units[:, None] * vec + jnp.arange(vec, dtype=units.dtype)


def load_words(ref: Any, count: int, *, interpret: bool) -> list[jax.Array]:
    """The words of an array in global memory, uint32, each as (LANES,), and zeros up to `count`."""
    size = ref.shape[0]
    zeros = [jnp.zeros((LANES,), jnp.uint32)] * (count - size)
    if interpret:
        return [*(jnp.broadcast_to(ref[i], (LANES,)) for i in range(size)), *zeros]
    row = _row(1, np.uint32)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(row,) * size)
    def load(ctx: Any, source: Any) -> Any:
        del ctx
        dtype = ir.MemRefType(source.type).element_type
        pointer = mgpu_utils.memref_ptr(source)
        addresses = [mgpu_utils.getelementptr(pointer, [i], dtype) for i in range(size)]
        return tuple(_fragmented(llvm.load(dtype, a), signed=False) for a in addresses)

    return [*load(ref), *zeros]  # pyright: ignore[reportCallIssue]


def multiply_wide(a: jax.Array, b: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a · b, of an array (LANES,), uint32."""
    if interpret:
        return lax.mulhi(a, jnp.full_like(a, b)), a * jnp.uint32(b)
    row = _row(1, np.uint32)

    @plgpu.inline_mgpu(arg_types=(_ROW,), return_type=(row, row))
    def multiply(ctx: Any, a: Any) -> Any:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        factor = arith.extui(i64, _element(a.registers.item(), 0))
        product = arith.muli(factor, arith.constant(i64, b))
        upper = arith.trunci(i32, arith.shrui(product, arith.constant(i64, 32)))
        lower = arith.trunci(i32, product)
        return _fragmented(upper, signed=False), _fragmented(lower, signed=False)

    return multiply(_laid_out(a))  # pyright: ignore[reportCallIssue]


def _place(ref: Any) -> tuple[Any, Any]:
    """What an ``inline_mgpu`` is given of a reference, and its types."""
    if isinstance(ref, ChosenRef):
        return ref.address, (_ROW, _ROW)
    return (ref,), (plgpu.RefType(),)


def _unit_pointer(where: Any, dtype: Any, units: Any, vec: int) -> tuple[Any, Any]:
    """To the unit of each lane, and the type of an element."""
    i64 = ir.IntegerType.get_signless(64)
    wide = lambda a: arith.extui(i64, _element(a.registers.item(), 0))
    element = mgpu_utils.dtype_to_ir_type(dtype)
    if len(where) == 1:
        pointer = mgpu_utils.memref_ptr(where[0])
    else:
        low, high = map(wide, where)
        address = arith.ori(low, arith.shli(high, arith.constant(i64, 32)))
        pointer = llvm.inttoptr(llvm.PointerType.get(_GLOBAL_MEMORY), address)
    offset = arith.muli(wide(units), arith.constant(i64, vec))
    return mgpu_utils.getelementptr(pointer, [offset], element), element


def fast_reciprocal(x: jax.Array, *, layout: Any = None, interpret: bool) -> jax.Array:
    """1 / x, fp32, to 1 unit in the last place, in one instruction an element.

    `layout` is that of `x`, by default that of (LANES · n,) with n neighbours a lane. The division
    that ``approx_math`` makes of 1 / x takes five, as it cares for denormals; of an x above 2¹²⁶
    this is 0.
    """
    if interpret:
        return 1 / x
    layout = _row(x.size // LANES).layout if layout is None else layout
    return _one_instruction("rcp.approx.ftz.f32", x, layout)


def fast_exp2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """2^x of (LANES · n,), fp32, in one instruction an element; 0 where it is denormal."""
    if interpret:
        return jnp.exp2(x)
    return _one_instruction("ex2.approx.ftz.f32", x, _row(x.size // LANES).layout)


def fast_log2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """log2(x) of (LANES · n,), fp32, in one instruction an element; −inf of a denormal."""
    if interpret:
        return jnp.log2(x)
    return _one_instruction("lg2.approx.ftz.f32", x, _row(x.size // LANES).layout)


def fast_sqrt(x: jax.Array, *, interpret: bool) -> jax.Array:
    """√x of (LANES · n,), fp32, in one instruction an element; 0 where x is denormal."""
    if interpret:
        return jnp.sqrt(x)
    return _one_instruction("sqrt.approx.ftz.f32", x, _row(x.size // LANES).layout)


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
                llvm.inline_asm(f32, [_element(register, k)], f"{name} $0, $1;", "=f,f")
                for k in range(count)
            ]
            results[index] = vector.from_elements(register.type, parts)
        return mgpu.FragmentedArray(_registers=results, _layout=value.layout, _is_signed=None)

    return run(plgpu.layout_cast(x, layout))  # pyright: ignore[reportCallIssue]


def widened(values: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """`values`, bf16 in `layout`, as fp32: an instruction an element, not one and a half."""
    if interpret:
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
                parts = [_widened(_element(register, k)) for k in range(count)]
            else:
                pairs = vector.bitcast(ir.VectorType.get((count // 2,), i32), register)
                parts = []
                for pair in (_element(pairs, k) for k in range(count // 2)):
                    low = arith.shli(pair, arith.constant(i32, 16))
                    high = arith.andi(pair, arith.constant(i32, -(1 << 16)))
                    parts += [arith.bitcast(f32, low), arith.bitcast(f32, high)]
            wide[index] = vector.from_elements(ir.VectorType.get((count,), f32), parts)
        return mgpu.FragmentedArray(_registers=wide, _layout=values.layout, _is_signed=None)

    return widen(values)  # pyright: ignore[reportCallIssue]


def computed_here(values: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """`values`, fp32 in `layout`, computed before the barriers that follow.

    The compiler would put off what is first used after them, and keep what it is computed from.
    """
    if interpret:
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
                    _element(register, k),
                    result_types=f32,
                    has_side_effects=True,
                )
                for k in range(count)
            ]
            pinned[index] = vector.from_elements(register.type, parts)
        return mgpu.FragmentedArray(_registers=pinned, _layout=values.layout, _is_signed=None)

    return pin(values)  # pyright: ignore[reportCallIssue]


def unknown_zero(*, interpret: bool) -> jax.Array:
    """0, which the compiler does not know: what is read at an index plus it is read again."""
    if interpret:
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


def _pointer(ref: Any, offsets: LaneOffsets) -> Any:
    dtype = ir.MemRefType(ref.type).element_type
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [offsets.of_this_lane()], dtype)


def _widened(value: Any) -> Any:
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def _narrowed(value: Any, dtype: Any) -> Any:
    return value if value.type == dtype else arith.truncf(dtype, value)


_INTEGERS = 2.0**23
"""From here on the lowest bits of an fp32's mantissa are those of a whole number."""


def _from_memory(value: Any, dtype: Any) -> Any:
    if not jnp.issubdtype(dtype, jnp.integer):
        return _widened(value)
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    word, offset = arith.extui(i32, value), _INTEGERS
    if dtype == jnp.int8:
        word, offset = arith.xori(word, arith.constant(i32, 128)), offset + 128
    bits = arith.constant(i32, int(np.float32(_INTEGERS).view(np.int32)))
    return arith.subf(arith.bitcast(f32, arith.ori(word, bits)), arith.constant(f32, offset))


def _to_memory(value: Any, dtype: Any) -> Any:
    element = mgpu_utils.dtype_to_ir_type(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return _narrowed(value, element)
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    # In the middle between 2^23 and 2^24 a number that is rounded to 0 from below comes to 0 too.
    offset = 1.5 * _INTEGERS + (128 if dtype == jnp.int8 else 0)
    word = arith.bitcast(i32, arith.addf(value, arith.constant(f32, offset)))
    if dtype == jnp.int8:
        word = arith.xori(word, arith.constant(i32, 128))
    return arith.trunci(element, word)


def _row(count: int, dtype: Any = np.float32) -> Any:
    """(LANES · count,), with `count` neighbours a lane."""
    size = LANES * count
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=count)
    return plgpu.ShapeDtypeStruct((size,), np.dtype(dtype), layout=layout)


def _laid_out(row: jax.Array) -> jax.Array:
    """`row` with its layout: an ``inline_mgpu`` takes no constant, which has another.

    A size of one is enough for the compiler to find out that an index is a constant.
    """
    return plgpu.layout_cast(row, _row(row.size // LANES).layout)


def _fragmented(*scalars: Any, signed: bool | None = None) -> Any:
    """Scalars of each lane as a row; of integers, whether they are signed."""
    count = len(scalars)
    register = vector.from_elements(ir.VectorType.get((count,), scalars[0].type), list(scalars))
    return mgpu.FragmentedArray(
        _registers=np.full((1,), register, dtype=object),
        _layout=mgpu.WGStridedFragLayout((LANES * count,), count),
        _is_signed=signed,
    )


def _element(values: Any, k: int) -> Any:
    """Element `k` of an MLIR vector."""
    position = ir.DenseI64ArrayAttr.get([k])
    return vector.extract(values, dynamic_position=[], static_position=position)
