"""States of several layers in one array; a step of a scan or a convolution updates one layer's."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxkern.core.arguments import as_array, check_array, check_floating


def check_layer(layer: Any, state: Any, shape: tuple[int, ...], meaning: str) -> Any:
    """Returns `layer` as (1,), int32, and the state with an axis of layers.

    Args:
      layer: a whole number or an integer scalar; ``None`` where `state` has no axis of layers.
      state: the state.
      shape: shape of a layer's state.
      meaning: that shape in words.

    Raises:
      TypeError: `layer` is no integer, or `state` no floating array.
      ValueError: a shape does not fit, or `layer` is out of range.
    """
    if layer is None:
        return None, check_array("state", state, shape, meaning)[None]
    number, state = as_array("layer", layer), check_floating("state", state)
    if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"layer must be a whole number or an integer scalar, got {layer!r}")
    if state.shape[1:] != shape or not state.shape[0]:
        raise ValueError(
            f"with layer, state must have shape (layers, {', '.join(map(str, shape))}) = (layers, "
            f"{meaning[1:]}; got {state.shape}"
        )
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < state.shape[0]:
        last = state.shape[0] - 1
        raise ValueError(f"layer must be from 0 to {last}, as state has them; got {layer}")
    return number.astype(jnp.int32).reshape(1), state


def take_layer(state: Any, layer: Any) -> Any:
    """State of `layer`, both from :func:`check_layer`; an index out of range is clipped."""
    if layer is None:
        return state[0]
    return lax.dynamic_index_in_dim(state, clipped(layer[0], state.shape[0]), keepdims=False)


def put_layer(state: Any, layer: Any, new: Any) -> Any:
    """`state` with `new` for `layer`."""
    if layer is None:
        return new[None]
    stacked = state.astype(new.dtype)
    return lax.dynamic_update_index_in_dim(stacked, new, clipped(layer[0], state.shape[0]), 0)


def clipped(layer: jax.Array, count: int) -> jax.Array:
    """`layer`, limited to the range of `count` layers."""
    return jnp.minimum(jnp.maximum(layer, 0), count - 1)
