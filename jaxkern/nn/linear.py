"""The linear layer and the SwiGLU unit as functions of arrays, shared by the layers."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.core.dispatch import Implementation


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, precision: Any = None
) -> jax.Array:
    """x · weight + bias, in the dtype of `x`.

    Args:
      x: (..., K).
      weight: (K, N), converted to the dtype of `x`.
      bias: (N,), converted likewise, or ``None``.
      precision: as for ``jax.lax.dot_general``.

    Returns:
      (..., N), the dtype of `x`.
    """
    out = jnp.matmul(x, weight.astype(x.dtype), precision=precision)
    return out if bias is None else out + bias.astype(x.dtype)


def swiglu(
    x: jax.Array,
    gate_proj: Any,
    up_proj: Any,
    down_proj: Any,
    implementation: Implementation | None,
) -> jax.Array:
    """down(silu(gate(x)) · up(x)), given the three linear layers."""
    hidden = jaxkern.swiglu(gate_proj(x), up_proj(x), implementation=implementation)
    return down_proj(hidden)
