"""What the kernels that multiply by wgmma, Hopper's tensor cores, have in common."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.lowering import target

SWIZZLE = 128
"""Bytes of a row of shared memory that are swizzled together."""

ACCUMULATOR: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""An accumulator of some shape and dtype, in registers."""


def swizzled(*shape: int, dtype: Any) -> Any:
    """Shared memory of tiles that the tensor cores and the TMA read, in rows of `SWIZZLE` bytes."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(SWIZZLE)))


def start_fetch(source: Any, to: Any, full: Any, collective_axes: Any = None) -> None:
    """Starts a copy by the TMA to shared memory; what is past the end of an array is zero there.

    Args:
      source: a part of an array in global memory.
      to: shared memory of its shape.
      full: the barrier at which the copy arrives.
      collective_axes: of the cluster whose blocks share the copy, or ``None``.
    """
    plgpu.copy_gmem_to_smem(
        source, to, full, collective_axes=collective_axes, oob_mode=plgpu.OOBFillMode.ZEROS
    )


def without_wgmma() -> str | None:
    """Why the kernels cannot run on the GPU that is lowered for, if that is no Hopper."""
    gpu = target.current()
    if gpu is None or gpu.capability == (9, 0):
        return None
    return f"its kernels multiply by wgmma, which Hopper alone has, and this is for {gpu}"
