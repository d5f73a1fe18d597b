"""Collectives with gradients for a model that is split between devices.

They are for the inside of ``jax.shard_map(check_vma=False)``, where a loss is one number on every
device of the axis, and its gradient is with respect to the device's own arrays. A pair of
them surrounds what is split: between `enter` and `leave` each device has a part of the channels,
heads or classes (the f and g of Megatron, arXiv:1909.08053). With an axis of ``None``, of what is
not split, they give what they are given. Under ``jax.jit`` the compiler exchanges, or, on a mesh of
explicit axes, `whole_beside`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Axis = str | tuple[str, ...] | None
"""Names of mesh axes; ``None`` where nothing is split."""


def enter(x: Any, axis: Axis) -> Any:
    """Begins what is split over `axis`: `x` itself, its gradient the sum of the devices'."""
    return x if axis is None else _enter(x, axis)


def leave(x: Any, axis: Axis) -> Any:
    """Ends what is split over `axis`: the sum of the devices' `x`, whose gradient each one has."""
    return x if axis is None else _leave(x, axis)


def add_parts(x: Any, axis: Axis) -> Any:
    """The sum of the devices' `x`, for what is split, too: its gradient is the sum of theirs."""
    return enter(leave(x, axis), axis)


_enter = jax.custom_vjp(lambda x, _: x, nondiff_argnums=(1,))
_enter.defvjp(lambda x, axis: (x, None), lambda axis, _, dout: (lax.psum(dout, axis),))


_leave = jax.custom_vjp(lax.psum, nondiff_argnums=(1,))
_leave.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, dout: (dout,))


def whole_beside(weights: Any, x: Any) -> Any:
    """Gathers, on an Explicit mesh, what is split over axes that split `x`, too.

    That is how FSDP splits weights: over the axis of the batch. The gradients are scattered.

    Args:
      weights: a tree of arrays, which are left as they are on other meshes.
      x: an array that they are used with.
    """
    sharding = jax.typeof(x).sharding
    taken = set(jax.tree.leaves(tuple(sharding.spec)))
    if AxisType.Explicit not in sharding.mesh.axis_types or not taken:
        return weights

    def whole(weight):
        spec = jax.typeof(weight).sharding.spec
        kept = [tuple(a for a in jax.tree.leaves(e) if a not in taken) or None for e in spec]
        return jax.sharding.reshard(weight, NamedSharding(sharding.mesh, PartitionSpec(*kept)))

    return jax.tree.map(whole, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(weight: Any, axis: str, dimension: int, dtype: Any) -> Any:
    """Joins the parts that devices have of a weight, converted to `dtype`.

    The gradient is summed over the devices in the weight's own dtype, and each has its part of it.

    Args:
      weight: a device's part.
      axis: the mesh axis over which `dimension` is split.
      dimension: of `weight`, at least 0.
      dtype: of the result.
    """
    return lax.all_gather(weight.astype(dtype), axis, axis=dimension, tiled=True)


def _gather_fwd(weight, axis, dimension, dtype):
    return gather(weight, axis, dimension, dtype), jnp.zeros((), weight.dtype)


def _gather_bwd(axis, dimension, dtype, like, dout):
    del dtype
    unrounded = dout.astype(like.dtype)
    return (lax.psum_scatter(unrounded, axis, scatter_dimension=dimension, tiled=True),)


gather.defvjp(_gather_fwd, _gather_bwd)
