"""A ``flax.training.train_state.TrainState`` that steps by :func:`jaxkern.apply`."""

from typing import Any, Self

import jax
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jaxkern.optim.transforms import apply, check_transformation
from jaxkern.precision import LossScale


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` that does its step in one pass, in place, by :func:`jaxkern.apply`.

    Fields and methods are Flax's, and subclasses add fields as there. Donate the state, or XLA
    copies it first.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxkern
      >>> from flax import linen as nn
      >>> from jaxkern.nn.linen import TrainState
      >>> model, x = nn.Dense(2), jnp.ones((8, 4))
      >>> state = TrainState.create(
      ...     apply_fn=model.apply,
      ...     params=model.init(jax.random.key(0), x)["params"],
      ...     tx=jaxkern.fused_adamw(1e-3, clip_norm=1.0),
      ... )
      >>> @functools.partial(jax.jit, donate_argnums=0)
      ... def train_step(state, x):
      ...     loss = lambda params: (state.apply_fn({"params": params}, x) ** 2).mean()
      ...     return state.apply_gradients(grads=jax.grad(loss)(state.params))
      >>> int(train_step(state, x).step)
      1
    """

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: Any, tx: optax.GradientTransformation, **kwargs: Any
    ) -> Self:
        """The state before the first step.

        Args:
          apply_fn: the model's ``apply``.
          params: a tree of parameters.
          tx: :func:`jaxkern.fused_adamw`, :func:`jaxkern.fused_adam` or :func:`jaxkern.fused_sgd`,
            or what :func:`jaxkern.apply` takes otherwise, an ``optax.chain`` around one of them.
          **kwargs: fields of a subclass.

        Raises:
          TypeError: `tx` is no transformation.
        """
        tx = check_transformation(tx)
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

    def apply_gradients(
        self,
        *,
        grads: Any,
        loss_scale: LossScale | None = None,
        grad_norm: jax.Array | None = None,
        **kwargs: Any,
    ) -> Self:
        """The state after a step.

        Args:
          grads: the gradients, of the structure of ``params``.
          loss_scale: by which the gradients are to be divided. The next one is
            ``loss_scale.adjust(state.opt_state.last_finite)``, with `skip_nonfinite`.
          grad_norm: the global norm of `grads` as they are, if it is known.
          **kwargs: fields to replace.

        Raises:
          ValueError: `grads` do not belong to the parameters.
        """
        overwriting = OVERWRITE_WITH_GRADIENT in grads
        params, opt_state = apply(
            self.tx,
            grads["params"] if overwriting else grads,
            self.opt_state,
            self.params["params"] if overwriting else self.params,
            loss_scale=loss_scale,
            grad_norm=grad_norm,
        )
        if overwriting:  # what 8-bit products scale by, which is no parameter
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
