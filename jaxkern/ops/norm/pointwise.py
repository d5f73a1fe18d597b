"""The arithmetic of an element before and after its row's statistics, forward and backward.

Functions of fp32 arrays, for the kernels and for plain JAX; an absent array is None. `of` is the
:class:`~jaxkern.ops.curves.Functions` that curves are made of.
"""

import dataclasses
from typing import Any

from jaxkern.core.dispatch import Mode
from jaxkern.ops.curves import CURVES, Functions, curve_value


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of both passes.

    Attributes:
      op: the public function, for the kernels' names.
      centered: whether the mean is subtracted: ``layer_norm``.
      eps: added to the variance or the mean square.
      weight_offset: added to the weight.
      activation: after the affine part, a name in :data:`jaxkern.ops.curves.CURVES`, or None.
      gate_activation: of the gate, such a name.
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
    activation: str | None
    gate_activation: str
    norm_before_gate: bool
    group_size: int
    x_dtype: str
    residual_dtype: str | None
    mode: Mode

    @property
    def separate_dresidual(self) -> bool:
        return self.residual_dtype not in (None, self.x_dtype)


def gated_input(options: Options, h: Any, gate: Any, of: Functions) -> Any:
    """v, which is normalised."""
    if gate is None or options.norm_before_gate:
        return h
    return h * curve_value(options.gate_activation, gate, of)


def gated_input_backward(options: Options, h: Any, gate: Any, dv: Any, of: Functions) -> Any:
    """(dh, dgate) from dv; dgate is None where the gate comes after."""
    if gate is None or options.norm_before_gate:
        return dv, None
    value, times_slope = CURVES[options.gate_activation](gate, of)
    return dv * value, times_slope(dv * h)


def output(options: Options, xhat: Any, scale: Any, bias: Any, gate: Any, of: Functions) -> Any:
    """The result from x̂."""
    out = affine(xhat, scale, bias)
    if options.activation is not None:
        out = curve_value(options.activation, out, of)
    if gate is None or not options.norm_before_gate:
        return out
    return out * curve_value(options.gate_activation, gate, of)


def output_backward(
    options: Options,
    xhat: Any,
    scale: Any,
    bias: Any,
    gate: Any,
    dout: Any,
    of: Functions,
) -> Any:
    """(dy, dgate) from dout, y the affine part; dgate is None where the gate comes before."""
    if options.activation is None and (gate is None or not options.norm_before_gate):
        return dout, None
    out: Any = affine(xhat, scale, bias)
    dgate = None
    times_slope = lambda d: d
    if options.activation is not None:
        out, times_slope = CURVES[options.activation](out, of)
    if gate is not None and options.norm_before_gate:
        value, gate_times_slope = CURVES[options.gate_activation](gate, of)
        dgate = gate_times_slope(dout * out)
        dout = dout * value
    return times_slope(dout), dgate


def affine(xhat: Any, scale: Any, bias: Any) -> Any:
    y = xhat if scale is None else xhat * scale
    return y if bias is None else y + bias


def times(x: Any, scale: Any) -> Any:
    return x if scale is None else x * scale
