"""What happens to an element before and after its row's statistics, forward and backward.

Functions of fp32 arrays, for the kernels and for plain JAX; an absent array is None. `sigmoid` is
the one to compute with.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from jaxkern.core.dispatch import Mode

Activation = Literal["silu", "gelu", "relu"]
ACTIVATIONS = ("silu", "gelu", "relu")
Sigmoid = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is computed, and by whom.

    Attributes:
      op: the public function, for the kernels' names.
      centered: whether the mean is subtracted: ``layer_norm``.
      eps: added to the variance or the mean square.
      weight_offset: added to the weight.
      activation: after the affine part, or None.
      norm_before_gate: whether the gate multiplies the result or the input.
      group_size: elements that are normalised together.
      x_dtype: of `x` and its gradient.
      residual_dtype: of `residual` and its gradient; None without one.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
    """

    op: str
    centered: bool
    eps: float
    weight_offset: float
    activation: Activation | None
    norm_before_gate: bool
    group_size: int
    x_dtype: str
    residual_dtype: str | None
    mode: Mode

    @property
    def separate_dresidual(self) -> bool:
        return self.residual_dtype not in (None, self.x_dtype)


def gated_input(options: Options, h: Any, gate: Any, sigmoid: Sigmoid) -> Any:
    """v, what is normalised."""
    if gate is None or options.norm_before_gate:
        return h
    return h * (gate * sigmoid(gate))


def gated_input_backward(options: Options, h: Any, gate: Any, dv: Any, sigmoid: Sigmoid) -> Any:
    """(dh, dgate) from dv; dgate is None where the gate comes after."""
    if gate is None or options.norm_before_gate:
        return dv, None
    s = sigmoid(gate)
    return dv * (gate * s), dv * h * _silu_slope(gate, s)


def output(options: Options, xhat: Any, scale: Any, bias: Any, gate: Any, sigmoid: Sigmoid) -> Any:
    """From x̂ to the result."""
    out = affine(xhat, scale, bias)
    out = _activated(options.activation, out, sigmoid)[0]
    if gate is None or not options.norm_before_gate:
        return out
    return out * (gate * sigmoid(gate))


def output_backward(
    options: Options,
    xhat: Any,
    scale: Any,
    bias: Any,
    gate: Any,
    dout: Any,
    sigmoid: Sigmoid,
) -> Any:
    """(dy, dgate) from dout, y the affine part; dgate is None where the gate comes before."""
    gated = gate is not None and options.norm_before_gate
    if options.activation is None and not gated:
        return dout, None
    out, slope = _activated(options.activation, affine(xhat, scale, bias), sigmoid)
    dgate = None
    if gated:
        s = sigmoid(gate)
        dgate = dout * out * _silu_slope(gate, s)
        dout = dout * (gate * s)
    return (dout if slope is None else dout * slope), dgate


def affine(xhat: Any, scale: Any, bias: Any) -> Any:
    y = xhat if scale is None else xhat * scale
    return y if bias is None else y + bias


def times(x: Any, scale: Any) -> Any:
    return x if scale is None else x * scale


def _silu_slope(v: Any, s: Any) -> Any:
    return s * (1 + v * (1 - s))


def _activated(activation: str | None, y: Any, sigmoid: Sigmoid) -> tuple[Any, Any]:
    """The activation of y and its slope there (None for 1)."""
    match activation:
        case None:
            return y, None
        case "relu":
            return jnp.where(y <= 0, 0.0, y), jnp.where(y > 0, 1.0, 0.0)  # a NaN stays one
        case "silu":
            s = sigmoid(y)
            return y * s, _silu_slope(y, s)
        case "gelu":
            # y · sigmoid(2u) = y / 2 · (1 + tanh(u)), u = √(2/π) (y + 0.044715 y³). Beyond 16 the
            # sigmoid is 0 or 1, and the limit of y² keeps the slope's last term finite.
            square = jnp.minimum(y * y, 256.0)
            c = 2 * math.sqrt(2 / math.pi)
            s = sigmoid(c * y * (1 + 0.044715 * square))
            return y * s, s + y * s * (1 - s) * (c * (1 + 0.134145 * square))
        case _:
            raise ValueError(activation)
