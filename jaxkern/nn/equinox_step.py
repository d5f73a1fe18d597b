"""A step of a fused optimizer on an Equinox module."""

from typing import Any

import equinox as eqx
import jax
import optax

from jaxkern.optim.transforms import apply
from jaxkern.precision import LossScale


def apply_gradients[Model](
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    model: Model,
    *,
    loss_scale: LossScale | None = None,
    grad_norm: jax.Array | None = None,
    **extra_args: Any,
) -> tuple[Model, Any]:
    """Do a step of `tx` on a module, in one pass and in place, by :func:`jaxkern.apply`.

    It takes the place of ``tx.update`` and ``eqx.apply_updates``. Donate `model` and `state`, in
    this order, or XLA copies them first.

    Args:
      tx: :func:`jaxkern.fused_adamw`, :func:`jaxkern.fused_adam` or :func:`jaxkern.fused_sgd`, or
        what :func:`jaxkern.apply` takes otherwise, an ``optax.chain`` around one of them.
      grads: from ``eqx.filter_grad``; ``None`` for what is not trained.
      state: of `tx`, from ``tx.init(eqx.filter(model, eqx.is_inexact_array))``, or another filter
        that leaves what has gradients.
      model: an Equinox module, or any tree.
      loss_scale: by which the gradients are to be divided.
      grad_norm: the global norm of `grads` as they are, if it is known.
      **extra_args: for the parts of a chain, and other transformations.

    Returns:
      The new model and the new state.

    Raises:
      ValueError: `grads` or `state` do not belong to the model.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp, jaxkern
      >>> from jaxkern.nn.equinox import apply_gradients
      >>> model, tx = eqx.nn.Linear(4, 2, key=jax.random.key(0)), jaxkern.fused_adamw(1e-3)
      >>> state = tx.init(eqx.filter(model, eqx.is_inexact_array))
      >>> @eqx.filter_jit(donate="all-except-first")
      ... def train_step(x, model, state):
      ...     loss = lambda model: (jax.vmap(model)(x) ** 2).mean()
      ...     return apply_gradients(tx, eqx.filter_grad(loss)(model), state, model)
      >>> model, state = train_step(jnp.ones((8, 4)), model, state)
      >>> int(state.count)
      1
    """
    trained = jax.tree.map(lambda g: g is not None, grads, is_leaf=lambda g: g is None)
    try:
        params, rest = eqx.partition(model, trained)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "grads must have the structure of the model, with None for what is not trained; they "
            f"are a {type(grads).__name__} and the model a {type(model).__name__}. Take them from "
            "eqx.filter_grad"
        ) from error
    known = {"loss_scale": loss_scale, "grad_norm": grad_norm}
    params, state = apply(tx, grads, state, params, **known, **extra_args)
    return eqx.combine(params, rest), state
