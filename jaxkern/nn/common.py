"""What the layers for flax.nnx and flax.linen share: the calls that they leave to flax."""

from typing import Any

import jax


def left_to_flax(layer: Any, reason: str | None) -> bool:
    """Whether flax computes this call, as the ops cannot for `reason`.

    Raises:
      NotImplementedError: the layer was made for the kernels alone.
    """
    if reason is None:
        return False
    if layer.implementation == "mosaic":
        raise NotImplementedError(
            f'{type(layer).__name__}(implementation="mosaic") cannot take this call: {reason}. '
            'Use implementation="xla", or None to have it chosen.'
        )
    return True


def norm_reason(layer: Any, x: jax.Array, mask: Any) -> str | None:
    """Why the ops cannot compute this call of a norm."""
    last = (-1, x.ndim - 1)
    for name in ("reduction_axes", "feature_axes"):
        axes = getattr(layer, name)
        if axes not in last and tuple(axes) not in [(axis,) for axis in last]:
            return f"{name} is {axes}, and the kernels normalise the last axis"
    if mask is not None:
        return "the kernels take no mask"
    if layer.axis_name is not None:
        return "axis_name asks for statistics over devices"
    return None


def dropout_reason(layer: Any) -> str | None:
    """Why the op cannot compute this dropout."""
    if layer.broadcast_dims:
        return "the kernels draw a mask of their own for every element, without broadcast_dims"
    return None
