"""A norm and the linear layer after it, without the norm's result among the residuals.

Saved for the backward: the arguments. It normalises again, which reads x and writes the result
once more, for the weight's gradient. The norm and the products are those of their own ops.
"""

from typing import Any

import jax

from jaxkern.core.arguments import check_floating
from jaxkern.core.dispatch import Implementation, public_op
from jaxkern.core.kernel_pass import named
from jaxkern.ops.curves import Activation
from jaxkern.ops.linear.op import linear
from jaxkern.ops.norm import layer_norm, rms_norm


@public_op
def rms_norm_linear(
    x: jax.Array,
    weight: jax.Array | None,
    w: jax.Array,
    b: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    activation: Activation | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""RMS norm and a linear layer: ``linear(rms_norm(x, weight), w, b)``.

    The normalised x is not kept for the backward: 2·M·K bytes less in 16 bits.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight: (K,), of the norm, or ``None``.
      w: (K, N), of the linear layer.
      b: (N,) or ``None``.
      bias: (K,), of the norm, or ``None``.
      eps, weight_offset: as for :func:`jaxkern.rms_norm`.
      activation, precision: as for :func:`jaxkern.linear`.
      implementation: of both, as for each.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as both.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.rms_norm_linear(x, jnp.ones(64), w).shape
      (2, 8, 128)
    """
    arrays = _arrays(x=x, weight=weight, bias=bias, w=w, b=b)

    def call(x: Any, weight: Any, bias: Any, w: Any, b: Any) -> Any:
        y = rms_norm(
            x, weight, bias, eps=eps, weight_offset=weight_offset, implementation=implementation
        )
        return linear(
            y, w, b, activation=activation, precision=precision, implementation=implementation
        )

    return named("rms_norm_linear", jax.checkpoint(call)(*arrays))


@public_op
def layer_norm_linear(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    w: jax.Array,
    b: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    activation: Activation | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Layer norm and a linear layer: ``linear(layer_norm(x, weight, bias), w, b)``.

    The normalised x is not kept for the backward: 2·M·K bytes less in 16 bits.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight, bias: (K,), of the norm, or ``None``.
      w: (K, N), of the linear layer.
      b: (N,) or ``None``.
      eps, weight_offset: as for :func:`jaxkern.layer_norm`.
      activation, precision: as for :func:`jaxkern.linear`.
      implementation: of both, as for each.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as both.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.layer_norm_linear(x, jnp.ones(64), jnp.zeros(64), w).shape
      (2, 8, 128)
    """
    arrays = _arrays(x=x, weight=weight, bias=bias, w=w, b=b)

    def call(x: Any, weight: Any, bias: Any, w: Any, b: Any) -> Any:
        y = layer_norm(
            x, weight, bias, eps=eps, weight_offset=weight_offset, implementation=implementation
        )
        return linear(
            y, w, b, activation=activation, precision=precision, implementation=implementation
        )

    return named("layer_norm_linear", jax.checkpoint(call)(*arrays))


def _arrays(**given: Any) -> tuple[Any, ...]:
    """The arguments as arrays, as ``jax.checkpoint`` takes no others and names none of them."""
    return tuple(None if a is None else check_floating(name, a) for name, a in given.items())
