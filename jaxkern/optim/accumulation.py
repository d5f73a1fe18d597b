r"""Gradients of a batch in parts, so that the activations of one part alone are in memory.

For microbatches x₁ … x_K and a loss L that is a mean over its batch,

    loss  = 1/K Σ L(p, x_k)
    grads = 1/K Σ ∂L(p, x_k)/∂p

which are those of the whole batch where the parts are equally large. The sums are kept in fp32 and
rounded once, to the dtype that ``jax.grad`` gives. On D devices that have K microbatches each the
means are over all K · D, and the devices exchange their sums once, at the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import check_axis_names, check_flag
from jaxkern.core.bound import wide
from jaxkern.core.mesh import vary_over
from jaxkern.optim.arguments import floating_leaves
from jaxkern.optim.leaves import varying

Tree = Any


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    params: Tree,
    microbatches: Tree,
    *,
    has_aux: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Any, Tree]:
    r"""The loss of several microbatches and its gradient, as ``jax.value_and_grad`` of all at once.

    .. math:: \frac{1}{K} \sum_k L(p, x_k), \qquad \frac{1}{K} \sum_k \partial L(p, x_k)/\partial p

    One microbatch after the other, by ``lax.scan``, with sums in float32 (float64 for parameters of
    that dtype).

    Args:
      loss_fn: ``loss_fn(params, microbatch)``, a scalar, the mean over the microbatch; with
        `has_aux` a pair of it and anything else.
      params: a tree of floating arrays.
      microbatches: a tree of arrays (K, ...), any dtypes.
      has_aux: whether `loss_fn` returns a pair.
      axis_name: inside ``jax.shard_map``, the mesh axes over which the microbatches are split. The
        results are then means over all devices, exchanged once after the last microbatch.

    Returns:
      The loss, in the dtype that `loss_fn` gives it, and the gradients, in the dtypes of `params`;
      with `has_aux` ((loss, aux), gradients), aux stacked along a new first axis (K, ...).

    Raises:
      TypeError: a leaf of `params` is no floating array, or an option of another type.
      ValueError: `microbatches` has no leaf, no microbatch, or leaves of different K, or there is
        no such `axis_name`.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
      >>> batch = jnp.arange(24.0).reshape(6, 4)
      >>> params = {"w": jnp.ones(4)}
      >>> value, grads = jaxkern.accumulate_gradients(loss, params, batch.reshape(3, 2, 4))
      >>> bool(jnp.allclose(grads["w"], jax.grad(loss)(params, batch)["w"]))
      True
    """
    has_aux = check_flag("has_aux", has_aux)
    axes = check_axis_names("axis_name", axis_name)
    count = _count(microbatches)
    leaves, treedef = floating_leaves("params", params, kind=jnp.inexact)
    params = treedef.unflatten(leaves)
    if axes:
        # Else every gradient of what the devices share would be a sum over them at once.
        params = jax.tree.map(lambda p: vary_over(p, frozenset(axes)), params)
    values, totals = sums_of_gradients(loss_fn, params, microbatches, has_aux=has_aux)
    losses, aux = values if has_aux else (values, None)
    total = losses.astype(wide(losses.dtype)).sum()
    if axes:
        total, totals = lax.pmean((total, totals), axes)
    loss = (total / count).astype(losses.dtype)
    grads = jax.tree.map(lambda t, p: (t / count).astype(p.dtype), totals, params)
    return ((loss, aux) if has_aux else loss), grads


def sums_of_gradients(
    loss_fn: Callable[..., Any], params: Tree, microbatches: Tree, *, has_aux: bool = False
) -> tuple[Any, Tree]:
    """What `loss_fn` gives for each microbatch, stacked, and the sums of its gradients.

    The sums are in float32 at least; arguments are those of :func:`accumulate_gradients`.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)
    axes = varying(*jax.tree.leaves((params, microbatches)))

    def zeros(p: Any) -> jax.Array:
        total = jnp.zeros_like(p, dtype=wide(p.dtype))
        return vary_over(total, axes)

    def add(totals: Tree, microbatch: Tree) -> tuple[Tree, Any]:
        value, grads = value_and_grad(params, microbatch)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, grads), value

    totals, values = lax.scan(add, jax.tree.map(zeros, params), microbatches)
    return values, totals


def _count(microbatches: Tree) -> int:
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(microbatches)}
    if len(shapes) != 1 or () in shapes or (0,) in shapes:
        raise ValueError(
            "microbatches must be arrays (K, ...) with one K of at least 1 for all; got first axes "
            f"{sorted(shapes) or 'of no array'}"
        )
    return shapes.pop()[0]
