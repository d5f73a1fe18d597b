"""The state that an optimizer keeps between steps, and the first one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkern.core.bound import standard_promotion, wide
from jaxkern.optim.arguments import Options, Tree, floating_leaves, is_floating, leaf_paths
from jaxkern.optim.quantise import BLOCK, Quantised, quantisable


class FusedAdamState(NamedTuple):
    """The state of :func:`fused_adam` and :func:`fused_adamw`.

    Attributes:
      count: () int32, steps done, without those skipped.
      mu: like the parameters, the average of the gradients.
      nu: like the parameters, the average of their squares.
      master: the weights of which the parameters are a rounded copy; ``optax.MaskedNode()`` for a
        parameter that is its own master, ``None`` without `master_dtype`.
      last_finite: () bool, whether the last step was done; ``None`` without `skip_nonfinite`.
      total_notfinite: () int32, steps skipped; ``None`` without `skip_nonfinite`.
    """

    count: jax.Array
    mu: Tree
    nu: Tree
    master: Tree = None
    last_finite: Any = None
    total_notfinite: Any = None


class FusedSgdState(NamedTuple):
    """The state of :func:`fused_sgd`; what is not here is as in :class:`FusedAdamState`.

    Attributes:
      trace: like the parameters, the sum of the gradients; ``None`` without momentum.
    """

    count: jax.Array
    trace: Tree
    master: Tree = None
    last_finite: Any = None
    total_notfinite: Any = None


@standard_promotion()
def initial_state(options: Options, params: Tree) -> FusedAdamState | FusedSgdState:
    """Returns the state before the first step.

    `params` is a tree of floating arrays, or without master copies of ``jax.ShapeDtypeStruct``.
    """
    leaves, treedef = floating_leaves("params", params, values=False)
    zeros = lambda dtype: treedef.unflatten([_zeros(p, dtype) for p in leaves])
    masters = None
    if options.master:
        copies = [optax.MaskedNode()] * len(leaves)
        for i, p in enumerate(leaves):
            if has_master(p):
                if isinstance(p, jax.ShapeDtypeStruct):
                    raise TypeError(
                        f"params{leaf_paths(params)[i]} must be an array, as its master copy begins"
                        " with its values; got a ShapeDtypeStruct. Use jax.eval_shape(tx.init, "
                        "params) for shapes alone"
                    )
                copies[i] = p.astype(jnp.float32)
        masters = treedef.unflatten(copies)
    common = {
        "master": masters,
        "last_finite": jnp.array(True) if options.skip_nonfinite else None,
        "total_notfinite": jnp.int32(0) if options.skip_nonfinite else None,
    }
    mu = zeros(options.mu_dtype) if options.has_mu else None
    if options.rule.kind == "sgd":
        return FusedSgdState(jnp.int32(0), mu, **common)
    return FusedAdamState(jnp.int32(0), mu, zeros(options.nu_dtype), **common)


def has_master(param: Any) -> bool:
    """Says whether a parameter is of a precision that has master copies."""
    return jnp.finfo(param.dtype).bits < 32


def _zeros(param: Any, dtype: Any) -> Any:
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        if quantisable(param.shape):
            scale = jnp.zeros(param.size // BLOCK, jnp.float32)
            return Quantised(jnp.zeros_like(param, dtype=dtype), scale)
        dtype = None
    return jnp.zeros_like(param, dtype=dtype or wide(param.dtype))


def wrong_dtype(what: str, node: Any) -> str | None:
    """Says what is wrong with the dtype of a gradient, an average, a master copy or codes."""
    if not isinstance(node, Quantised):
        right = node.dtype == jnp.float32 if what == "master" else is_floating(node)
        wanted = "float32" if what == "master" else "floating"
        return None if right else f"must be a {wanted} array, got {node.dtype}"
    code, scales = "uint8" if what == "nu" else "int8", (node.codes.size // BLOCK,)
    if (node.codes.dtype, node.scale.dtype, node.scale.shape) == (code, jnp.float32, scales):
        return None
    return (
        f"must be {code} codes with a float32 scale for each {BLOCK}, {scales}; got "
        f"{node.codes.dtype} and {node.scale.dtype}{list(node.scale.shape)}"
    )
