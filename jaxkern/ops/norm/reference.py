"""The norms in plain JAX: the specification, the ``"xla"`` implementation and the kernels' twin."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxkern.ops.curves import PLAIN
from jaxkern.ops.norm.pointwise import (
    Options,
    gated_input,
    gated_input_backward,
    output,
    output_backward,
    times,
)


def reference_fwd(options: Options, x: Any, residual: Any, weight: Any, bias: Any, gate: Any):
    """(out, h, mean, rstd): h is x + residual, None without one; mean is None uncentred."""
    h = x
    if residual is not None:
        dtype = jnp.promote_types(x.dtype, residual.dtype)
        h = (_wide(x) + _wide(residual)).astype(dtype)
    gate = _wide(gate)
    v = _groups(options, gated_input(options, _wide(h), gate, PLAIN))
    mean = jnp.mean(v, axis=-1) if options.centered else None
    xhat = v if mean is None else v - mean[..., None]
    rstd = lax.rsqrt(jnp.mean(xhat * xhat, axis=-1) + options.eps)
    xhat = (xhat * rstd[..., None]).reshape(x.shape)
    scale = _scale(options, weight)
    out = output(options, xhat, scale, _wide(bias), gate, PLAIN).astype(x.dtype)
    return out, None if residual is None else h, mean, rstd


def reference_bwd(
    options: Options,
    h: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    mean: Any,
    rstd: Any,
    dout: Any,
    dh: Any,
):
    """(dx, dresidual, dweight, dbias, dgate); dresidual is None where it is dx."""
    shape, wide_gate, dout = h.shape, _wide(gate), _wide(dout)
    v = _groups(options, gated_input(options, _wide(h), wide_gate, PLAIN))
    d = v if mean is None else v - mean[..., None]
    xhat = d * rstd[..., None]
    scale = _scale(options, weight)
    flat = xhat.reshape(shape)
    dy, dgate = output_backward(options, flat, scale, _wide(bias), wide_gate, dout, PLAIN)
    g = _groups(options, times(dy, scale))
    dv = g - xhat * jnp.mean(g * xhat, axis=-1, keepdims=True)
    if options.centered:
        dv = dv - jnp.mean(g, axis=-1, keepdims=True)
    dv = (dv * rstd[..., None]).reshape(shape)
    dx, dgate_before = gated_input_backward(options, _wide(h), wide_gate, dv, PLAIN)
    dgate = dgate_before if dgate is None else dgate
    dx = dx if dh is None else dx + _wide(dh)
    rows = tuple(range(h.ndim - 1))
    return (
        dx.astype(options.x_dtype),
        dx.astype(options.residual_dtype) if options.separate_dresidual else None,
        None if weight is None else jnp.sum(dy * flat, rows).astype(weight.dtype),
        None if bias is None else jnp.sum(dy, rows).astype(bias.dtype),
        None if gate is None else dgate.astype(gate.dtype),
    )


def _scale(options: Options, weight: Any) -> Any:
    return None if weight is None else _wide(weight) + options.weight_offset


def _groups(options: Options, x: Any) -> Any:
    """(..., N) as (..., G, group size)."""
    groups = x.shape[-1] // options.group_size if options.group_size else 1
    sharding = jax.typeof(x).sharding
    if groups > 1 and AxisType.Explicit in sharding.mesh.axis_types:
        x = reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None)))
    return x.reshape(*x.shape[:-1], groups, options.group_size)


def _wide(x: Any) -> Any:
    return None if x is None else x.astype(jnp.promote_types(x.dtype, jnp.float32))
