"""Causal depthwise convolution along time, the short filter in front of a Mamba scan.

Forward, for a batch row b and a channel d, with x = 0 before the start of the sequence:

    s[t]   = bias + Σ_w weight[w] · x[t − (W−1) + w]                              w = 0 … W−1
    out[t] = s[t],   or   s[t] · sigmoid(s[t])   for activation="silu"

Plain JAX: W shifted multiply-adds, which XLA fuses into one pass over x, in fp32. Only the
arguments are kept for the backward. At W = 4 both passes wait for memory: 2 arrays forward (read x,
write out), 3 backward (read x and dout, write dx).

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Literal["silu"] | None = None,
) -> jax.Array:
    r"""Convolve every channel with its own short filter, looking back in time only.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    for every batch row and channel, where x is 0 before the start and f is the identity or SiLU;
    ``weight[:, W-1]`` meets the current input. Products and sums are computed in fp32, whatever the
    dtypes; the result is rounded once, to the dtype of `x`. Differentiable in both modes and to any
    order.

    On a mesh, batch and channels may be split between devices.

    Args:
      x: (B, L, D), any floating dtype.
      weight: (D, W), any floating dtype, W at least 1.
      bias: (D,), any floating dtype; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.

    Returns:
      (B, L, D), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a real floating dtype.
      ValueError: a shape does not fit, or `activation` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x = jnp.arange(4.0).reshape(1, 4, 1)
      >>> jaxkern.causal_conv1d(x, jnp.array([[1.0, 10.0]]))[0, :, 0]
      Array([ 0., 10., 21., 32.], dtype=float32)

    References:
      Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
      <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    x, weight, bias = _check(("B", "L"), x, weight, bias, activation)
    length, width = x.shape[1], weight.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))  # (B, W − 1 + L, D)
    windows = [padded[:, w : w + length] for w in range(width)]
    return _filter(windows, weight, bias, activation).astype(x.dtype)


def causal_conv1d_step(
    state: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Literal["silu"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`causal_conv1d` for one token, to decode step by step.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    Args:
      state: (B, W − 1, D), any floating dtype, the inputs before this one, oldest first; zeros to
        begin with.
      x: (B, D), any floating dtype.
      weight: (D, W), any floating dtype.
      bias: (D,), any floating dtype; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.

    Returns:
      The output, (B, D), the dtype of `x`; and the next state, (B, W − 1, D), the dtype of `state`.

    Raises:
      TypeError: an argument is not an array of a real floating dtype.
      ValueError: a shape does not fit, or `activation` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, weight = jnp.zeros((1, 1, 1)), jnp.array([[1.0, 10.0]])
      >>> for token in (1.0, 2.0):
      ...     out, state = jaxkern.causal_conv1d_step(state, jnp.full((1, 1), token), weight)
      >>> out
      Array([[21.]], dtype=float32)

    References:
      Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    x, weight, bias = _check(("B",), x, weight, bias, activation)
    (batch, dim), width = x.shape, weight.shape[1]
    before = (batch, width - 1, dim)
    state = check_array("state", state, before, "(B, W - 1, D) of x and weight")
    windows = [*jnp.unstack(state, axis=1), x]
    out = _filter(windows, weight, bias, activation).astype(x.dtype)
    following = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)[:, 1:]
    return out, following


def _filter(windows: list[jax.Array], weight: jax.Array, bias: Any, activation: Any) -> jax.Array:
    """f(bias + Σ_w weight[:, w] · windows[w]), in fp32, or float64 where an argument is."""
    acc = jnp.result_type(jnp.float32, weight, *windows)
    total = jnp.zeros((), acc) if bias is None else bias.astype(acc)
    for tap, window in zip(weight.astype(acc).T, windows, strict=True):
        total = total + tap * window.astype(acc)
    return jax.nn.silu(total) if activation == "silu" else total


def _check(lead: tuple[str, ...], x, weight, bias, activation) -> tuple[Any, Any, Any]:
    """The arguments as arrays; `lead` names the dimensions of x before the channels."""
    x, weight = check_floating("x", x), check_floating("weight", weight)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({', '.join(lead)}, D), got {x.shape}")
    channels = x.shape[-1:]
    if weight.ndim != 2 or weight.shape[:1] != channels or weight.shape[1] == 0:
        raise ValueError(
            f"weight must have shape (D, W), D the {channels[0]} channels of x and W at least 1; "
            f"got {weight.shape}"
        )
    if bias is not None:
        bias = check_array("bias", bias, channels, "(D,) of x")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be "silu" or None, got {activation!r}')
    return x, weight, bias
