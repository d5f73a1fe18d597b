"""Inline MLIR: how a kernel calls it, and how it reads and makes a lane's registers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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
