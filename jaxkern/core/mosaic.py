"""What the Mosaic GPU kernels share: the device's size, and rows laid over a warpgroup's lanes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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


_H200_SMS = 132
_MAX_VECTOR_BYTES = 16


def num_sms() -> int:
    """Streaming multiprocessors of this process's GPU; an H200's where there is none to ask."""
    for device in jax.local_devices():
        if device.platform == "gpu":
            return device.core_count
    return _H200_SMS


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

    def load(self, row_ref: Any, i: Any) -> jax.Array:
        """Window `i` of a row in global memory: (size,)."""
        window = row_ref.at[pl.ds(self.start(i), self.size)]
        return plgpu.load(window, layout=self.layout, optimized=False)

    def store(self, row_ref: Any, i: Any, value: jax.Array) -> None:
        row_ref[pl.ds(self.start(i), self.size)] = value.astype(row_ref.dtype)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def once(self, i: Any, value: jax.Array) -> jax.Array:
        """`value` with zeros where window `i` repeats elements of the one before."""
        if self.n % self.size == 0 or (isinstance(i, int) and i + 1 < self.count):
            return value
        column = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return jnp.where(column + self.start(i) >= i * self.size, value, self.full(0.0))


def lane_vector(size: int, itemsize: int) -> int:
    """Elements per load when the lanes share `size` elements evenly: up to 16 bytes."""
    vec = _MAX_VECTOR_BYTES // itemsize
    while size % (LANES * vec):
        vec //= 2
    return vec


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


def warp_sums(values: Sequence[jax.Array], *, interpret: bool) -> jax.Array:
    """The sums of each of `values` over the 32 lanes of each warp, side by side in the lanes.

    Every step halves the values that a lane holds: it keeps the one half, sends the other to a
    partner lane and adds what comes back, so that R values take R − 1 shuffles and not 5 · R. The
    order of the additions is fixed.

    Args:
      values: R = 1, 2, 4, 8, 16 or 32 arrays (LANES,), fp32, one element per lane.
      interpret: whether this runs in Pallas's interpreter, which has no shuffles.

    Returns:
      (LANES,): lane l of warp w holds the sum over that warp's lanes of value ⌊l · R / 32⌋.
    """
    count = len(values)
    assert count in (1, 2, 4, 8, 16, 32), count
    if interpret:
        sums = jnp.stack([v.reshape(-1, 32).sum(-1) for v in values], axis=1)
        return jnp.repeat(sums, 32 // count, axis=1).reshape(LANES)
    f32 = np.dtype(np.float32)
    row: Any = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(row,) * count,
        return_type=plgpu.ShapeDtypeStruct((LANES,), f32, layout=row),
    )
    def shuffled(ctx: Any, *arrays: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)

        def constant(k: int) -> Any:
            return arith.constant(i32, k)

        held = [_element(a.registers.item(), 0) for a in arrays]
        distance = 16
        while distance:
            upper = arith.cmpi(
                arith.CmpIPredicate.ne,
                arith.andi(mgpu_utils.thread_idx(), constant(distance)),
                constant(0),
            )
            if len(held) == 1:
                pairs = [(held[0], held[0])]
            else:
                half = len(held) // 2
                pairs = [
                    (arith.select(upper, b, a), arith.select(upper, a, b))
                    for a, b in zip(held[:half], held[half:], strict=True)
                ]
            held = [arith.addf(a, mgpu_utils.shfl_bfly(b, distance)) for a, b in pairs]
            distance //= 2
        register = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), held[0])
        registers = np.full(arrays[0].registers.shape, register, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    return shuffled(*values)


def shared_scalars(ref: Any, count: int, *, interpret: bool) -> list[jax.Array]:
    """The first `count` numbers of a row in shared memory as scalars, read four at a time.

    Args:
      ref: (n,), fp32, in shared memory, n a multiple of 4, at a multiple of 16 bytes.
      count: how many, at most n.
      interpret: whether this runs in Pallas's interpreter.
    """
    if interpret:
        return [ref[i] for i in range(count)]
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.float32), layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(scalar,) * count)
    def read(ctx: Any, row: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        four = ir.VectorType.get((4,), f32)
        pointer = mgpu_utils.memref_ptr(row)
        scalars = []
        for start in range(0, count, 4):
            loaded = llvm.load(four, mgpu_utils.getelementptr(pointer, [start], f32), alignment=16)
            scalars += [_element(loaded, k) for k in range(min(4, count - start))]
        return tuple(mgpu.FragmentedArray.splat(s, ()) for s in scalars)

    return list(read(ref))  # pyright: ignore[reportCallIssue]: its ctx is Mosaic's to pass


def _element(values: Any, k: int) -> Any:
    """Element `k` of an MLIR vector."""
    position = ir.DenseI64ArrayAttr.get([k])
    return vector.extract(values, dynamic_position=[], static_position=position)
