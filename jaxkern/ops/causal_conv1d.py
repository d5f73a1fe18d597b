"""Causal depthwise convolution along time, the short filter in front of a Mamba scan.

Forward, for every batch row b and channel d, with zeros before the start of the sequence::

    s[t]   = bias + Σ_w weight[w] · x[t − (W−1) + w]        w = 0 … W−1
    out[t] = s[t]            or            s[t] · sigmoid(s[t])   (activation="silu")

Plain JAX: W shifted multiply-adds that XLA fuses into one pass over x, accumulated in float32.
Only the inputs are saved for the backward.  Memory is the limit: 2 tensors forward, 3 backward.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

__all__ = ["causal_conv1d", "causal_conv1d_step"]

Activation = Literal["silu"]


def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
) -> Array:
    """Convolves each channel with its own causal filter along time.

    ``out[b, t, d] = f(bias[d] + Σ_w weight[d, w] · x[b, t − (W−1) + w, d])``, where x is 0 before
    the start of the sequence and f is the identity or SiLU.  ``weight[:, W−1]`` meets the current
    input.  Sums are kept in float32 whatever the dtype of x.

    Args:
        x: Inputs ``(B, L, D)``, floating point.
        weight: Filters ``(D, W)``, floating point, W ≥ 1.
        bias: ``(D,)``, or None for no bias.
        activation: ``"silu"`` or None.

    Returns:
        Array ``(B, L, D)`` in the dtype of x.

    Raises:
        TypeError: If an argument is not floating point.
        ValueError: If shapes do not fit together or the activation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(4.0).reshape(1, 4, 1)
        >>> causal_conv1d(x, jnp.array([[1.0, 10.0]]))[0, :, 0]
        Array([ 0., 10., 21., 32.], dtype=float32)

    References:
        Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
        <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    x, weight, bias = _check("causal_conv1d", x, weight, bias, activation, ndim=3)
    length, width = x.shape[1], weight.shape[1]
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0))).astype(acc_dtype)  # (B, W-1+L, D)
    taps = weight.astype(acc_dtype)
    acc = jnp.zeros((), acc_dtype) if bias is None else bias.astype(acc_dtype)
    for w in range(width):
        acc = acc + taps[:, w] * padded[:, w : w + length]
    return _activate(acc, activation).astype(x.dtype)


def causal_conv1d_step(
    state: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
) -> tuple[Array, Array]:
    """Runs :func:`causal_conv1d` for one token, for step-by-step decoding.

    The state holds the last W−1 inputs, oldest first; start with zeros.  Stepping over a sequence
    gives the outputs of :func:`causal_conv1d` on it.

    Args:
        state: The last inputs ``(B, W−1, D)``, floating point.
        x: Current inputs ``(B, D)``, floating point.
        weight: Filters ``(D, W)``, floating point.
        bias: ``(D,)``, or None for no bias.
        activation: ``"silu"`` or None.

    Returns:
        Outputs ``(B, D)`` in the dtype of x, and the next state ``(B, W−1, D)`` in its own dtype.

    Raises:
        TypeError: If an argument is not floating point.
        ValueError: If shapes do not fit together or the activation is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> state, weight = jnp.zeros((1, 1, 1)), jnp.array([[1.0, 10.0]])
        >>> for token in (1.0, 2.0):
        ...     out, state = causal_conv1d_step(state, jnp.full((1, 1), token), weight)
        >>> out
        Array([[21.]], dtype=float32)

    References:
        Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023.
    """
    x, weight, bias = _check("causal_conv1d_step", x, weight, bias, activation, ndim=2)
    state = jnp.asarray(state)
    (batch, dim), width = x.shape, weight.shape[1]
    if not jnp.issubdtype(state.dtype, jnp.floating):
        raise TypeError(f"causal_conv1d_step: state must be floating point, got {state.dtype}.")
    if state.shape != (batch, width - 1, dim):
        raise ValueError(
            f"causal_conv1d_step: state must hold the last W-1 inputs, shape (B, W-1, D) = "
            f"{(batch, width - 1, dim)}, got {state.shape}. Start from zeros of that shape."
        )
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    window = jnp.concatenate(
        [state.astype(acc_dtype), x[:, None].astype(acc_dtype)], axis=1
    )  # (B, W, D)
    taps = weight.astype(acc_dtype)
    acc = jnp.zeros((), acc_dtype) if bias is None else bias.astype(acc_dtype)
    for w in range(width):
        acc = acc + taps[:, w] * window[:, w]
    next_state = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)[:, 1:]
    return _activate(acc, activation).astype(x.dtype), next_state


def _activate(s: Array, activation: Activation | None) -> Array:
    return jax.nn.silu(s) if activation == "silu" else s


def _check(
    name: str,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    activation: Activation | None,
    *,
    ndim: int,
) -> tuple[Array, Array, Array | None]:
    """Returns the arguments as arrays, or says which one breaks which rule."""
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    bias = None if bias is None else jnp.asarray(bias)
    for label, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is not None and not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name}: {label} must be floating point, got {value.dtype}. "
                f"Cast it, e.g. {label}.astype(jnp.float32)."
            )
    if x.ndim != ndim:
        want = "(B, L, D)" if ndim == 3 else "(B, D)"
        raise ValueError(f"{name}: x must have shape {want}, got {x.shape}.")
    dim = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != dim or weight.shape[1] < 1:
        raise ValueError(
            f"{name}: weight must have shape (D, W) with D = {dim} channels of x and W >= 1, "
            f"got {weight.shape}. A (W, D) filter needs weight.T."
        )
    if bias is not None and bias.shape != (dim,):
        raise ValueError(f"{name}: bias must have shape (D,) = ({dim},), got {bias.shape}.")
    if activation not in (None, "silu"):
        raise ValueError(f'{name}: activation must be None or "silu", got {activation!r}.')
    return x, weight, bias
