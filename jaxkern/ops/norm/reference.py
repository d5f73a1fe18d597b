"""The norms in plain JAX: the specification, the ``"xla"`` implementation and the kernels' twin.

With `NormParts`, devices that each have a part of every row add up the sums of the rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxkern.core.bound import wide
from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes, SplitSequence, is_first, only_if, vary_over, varying
from jaxkern.ops.curves import CURVES, PLAIN, Functions, curve_value

# Arithmetic of an element outside of its row's sums, for kernels and plain JAX


@dataclasses.dataclass(frozen=True)
class NormOptions:
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
      out_dtype: of the result; None for that of `x`.
      output: whether the backward gives the result again.
      rounds_sum: whether the forward gives x + residual, float32, in bfloat16, too.
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
    out_dtype: str | None = None
    output: bool = False
    rounds_sum: bool = False

    @property
    def result_dtype(self) -> str:
        return self.out_dtype or self.x_dtype

    @property
    def separate_dresidual(self) -> bool:
        return self.residual_dtype not in (None, self.x_dtype)


def gated_input(options: NormOptions, h: Any, gate: Any, of: Functions) -> Any:
    """v, which is normalised."""
    if gate is None or options.norm_before_gate:
        return h
    return h * curve_value(options.gate_activation, gate, of)


def gated_input_backward(options: NormOptions, h: Any, gate: Any, dv: Any, of: Functions) -> Any:
    """(dh, dgate) from dv; dgate is None where the gate comes after."""
    if gate is None or options.norm_before_gate:
        return dv, None
    value, times_slope = CURVES[options.gate_activation](gate, of)
    return dv * value, times_slope(dv * h)


def output(options: NormOptions, xhat: Any, scale: Any, bias: Any, gate: Any, of: Functions) -> Any:
    """The result from x̂."""
    out = affine(xhat, scale, bias)
    if options.activation is not None:
        out = curve_value(options.activation, out, of)
    if gate is None or not options.norm_before_gate:
        return out
    return out * curve_value(options.gate_activation, gate, of)


def output_backward(
    options: NormOptions,
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


# The passes in plain JAX


@dataclasses.dataclass(frozen=True)
class NormRows:
    """Statistics of rows that lie whole on this device."""

    def grouped(self, options: NormOptions, x: Any) -> Any:
        """(..., N) as (..., G, group size)."""
        groups = x.shape[-1] // options.group_size if options.group_size else 1
        sharding = jax.typeof(x).sharding
        if groups > 1 and AxisType.Explicit in sharding.mesh.axis_types:
            x = reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None)))
        return x.reshape(*x.shape[:-1], groups, options.group_size)

    def mean(self, options: NormOptions, v: Any) -> Any:
        """The mean of each group, (..., G), of what :meth:`grouped` gives."""
        del options
        return jnp.mean(v, axis=-1)

    def own(self, options: NormOptions, statistic: Any, v: Any) -> Any:
        """The part of a statistic (..., G) that belongs to the groups in `v`."""
        del options, v
        return statistic


@dataclasses.dataclass(frozen=True)
class NormParts(NormRows):
    """Statistics of rows of which each device has an equal, contiguous part.

    A part has several whole groups, or several parts share one.

    Attributes:
      axes: of the mesh, between whose devices rows are split.
    """

    axes: Axes

    def grouped(self, options: NormOptions, x: Any) -> Any:
        """A device's part (..., N / parts) as (..., groups here, elements of each here)."""
        size = min(x.shape[-1], options.group_size)
        return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)

    def mean(self, options: NormOptions, v: Any) -> Any:
        own = jnp.sum(v, axis=-1) / options.group_size  # (..., groups here)
        groups = own.shape[-1] * v.shape[-1] * lax.axis_size(self.axes) // options.group_size
        if own.shape[-1] == groups:
            return lax.psum(own, self.axes)
        every = jnp.zeros((*own.shape[:-1], groups), own.dtype)
        every = vary_over(every, varying(own))
        start = self._first_group(options, v)
        return lax.psum(lax.dynamic_update_slice_in_dim(every, own, start, -1), self.axes)

    def own(self, options: NormOptions, statistic: Any, v: Any) -> Any:
        count = v.shape[-2]
        if statistic.shape[-1] == count:
            return statistic
        return lax.dynamic_slice_in_dim(statistic, self._first_group(options, v), count, -1)

    def _first_group(self, options: NormOptions, v: Any) -> Any:
        return lax.axis_index(self.axes) * (v.shape[-2] * v.shape[-1]) // options.group_size


def reference_fwd(
    options: NormOptions,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    rows: NormRows = NormRows(),
):
    """(out, h, mean, rstd, rounded): h is x + residual, None without one; mean is None uncentred.

    `rounded` is h in bf16, None unless the options ask for it.
    """
    h = x
    if residual is not None:
        dtype = jnp.promote_types(x.dtype, residual.dtype)
        h = (_wide(x) + _wide(residual)).astype(dtype)
    gate = _wide(gate)
    v = rows.grouped(options, gated_input(options, _wide(h), gate, PLAIN))
    mean = rows.mean(options, v) if options.centered else None
    xhat = v if mean is None else v - rows.own(options, mean, v)[..., None]
    rstd = lax.rsqrt(rows.mean(options, xhat * xhat) + options.eps)
    xhat = (xhat * rows.own(options, rstd, v)[..., None]).reshape(x.shape)
    scale = _scale(options, weight)
    out = output(options, xhat, scale, _wide(bias), gate, PLAIN).astype(options.result_dtype)
    rounded = h.astype(jnp.bfloat16) if options.rounds_sum else None
    return out, None if residual is None else h, mean, rstd, rounded


def reference_bwd(
    options: NormOptions,
    h: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    mean: Any,
    rstd: Any,
    dout: Any,
    dh: Any,
    rows: NormRows = NormRows(),
):
    """(dx, dresidual, dweight, dbias, dgate, out); dresidual is None where it is dx."""
    shape, wide_gate, dout = h.shape, _wide(gate), _wide(dout)
    v = rows.grouped(options, gated_input(options, _wide(h), wide_gate, PLAIN))
    d = v if mean is None else v - rows.own(options, mean, v)[..., None]
    rstd = rows.own(options, rstd, v)[..., None]
    xhat = d * rstd
    scale = _scale(options, weight)
    flat = xhat.reshape(shape)
    dy, dgate = output_backward(options, flat, scale, _wide(bias), wide_gate, dout, PLAIN)
    g = rows.grouped(options, times(dy, scale))
    mean_of = lambda v: rows.own(options, rows.mean(options, v), v)[..., None]
    dv = g - xhat * mean_of(g * xhat)
    if options.centered:
        dv = dv - mean_of(g)
    dv = (dv * rstd).reshape(shape)
    dx, dgate_before = gated_input_backward(options, _wide(h), wide_gate, dv, PLAIN)
    dgate = dgate_before if dgate is None else dgate
    dx = dx if dh is None else dx + _wide(dh)
    over_rows = tuple(range(h.ndim - 1))
    out = None
    if options.output:
        out = output(options, flat, scale, _wide(bias), wide_gate, PLAIN)
        out = out.astype(options.result_dtype)
    return (
        dx.astype(options.x_dtype),
        dx.astype(options.residual_dtype) if options.separate_dresidual else None,
        None if weight is None else jnp.sum(dy * flat, over_rows).astype(weight.dtype),
        None if bias is None else jnp.sum(dy, over_rows).astype(bias.dtype),
        None if gate is None else dgate.astype(gate.dtype),
        out,
    )


def _scale(options: NormOptions, weight: Any) -> Any:
    return None if weight is None else _wide(weight) + options.weight_offset


def _wide(x: Any) -> Any:
    return None if x is None else x.astype(wide(x.dtype))


# Rows that are split between devices


def _unfit(options: NormOptions, parts: int, x: Any, *_: Any) -> str | None:
    size, group = x.shape[-1] // parts, options.group_size
    if size % group == 0 or group % size == 0:
        return None
    return f"{size} elements a device are neither groups of {group} nor an equal part of one"


def _forward_part(run: Any, axes: Axes, options: NormOptions, *arrays: Any) -> Any:
    del run
    out, h, mean, rstd, rounded = reference_fwd(options, *arrays, rows=NormParts(axes))
    first = is_first(axes)  # every device has all statistics, and they are added up
    return out, h, only_if(first, mean), only_if(first, rstd), rounded


def _backward_part(run: Any, axes: Axes, options: NormOptions, *arrays: Any) -> Any:
    del run
    return reference_bwd(options, *arrays, rows=NormParts(axes))


FORWARD_PARTS = SplitSequence(_forward_part, _unfit, factor="n")
BACKWARD_PARTS = SplitSequence(_backward_part, _unfit, factor="n")
