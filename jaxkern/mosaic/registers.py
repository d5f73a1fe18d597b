"""What code written in MLIR reads of a lane's registers, and gives back."""

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxkern.mosaic.launch import LANES

VECTOR_BYTES = 16


ROW: Any = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


def row_type(count: int, dtype: Any = np.float32) -> Any:
    """(LANES · count,), with `count` neighbours a lane."""
    size = LANES * count
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=count)
    return plgpu.ShapeDtypeStruct((size,), np.dtype(dtype), layout=layout)


def laid_out(row: jax.Array) -> jax.Array:
    """`row` with its layout: an ``inline_mgpu`` takes no constant, which has another.

    A size of one is enough for the compiler to find out that an index is a constant.
    """
    return plgpu.layout_cast(row, row_type(row.size // LANES).layout)


def fragmented(*scalars: Any, signed: bool | None = None) -> Any:
    """Scalars of each lane as a row; of integers, whether they are signed."""
    count = len(scalars)
    register = vector.from_elements(ir.VectorType.get((count,), scalars[0].type), list(scalars))
    return mgpu.FragmentedArray(
        _registers=np.full((1,), register, dtype=object),
        _layout=mgpu.WGStridedFragLayout((LANES * count,), count),
        _is_signed=signed,
    )


def element(values: Any, k: int) -> Any:
    """Element `k` of an MLIR vector."""
    position = ir.DenseI64ArrayAttr.get([k])
    return vector.extract(values, dynamic_position=[], static_position=position)


def to_fp32(value: Any) -> Any:
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def narrowed(value: Any, dtype: Any) -> Any:
    return value if value.type == dtype else arith.truncf(dtype, value)


def ptx(instruction: str) -> None:
    @plgpu.inline_mgpu()
    def run(ctx: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx(instruction, has_side_effects=True)

    run()  # pyright: ignore[reportCallIssue]
