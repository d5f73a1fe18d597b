"""An ``nnx.Optimizer`` that steps by :func:`jaxkern.apply`."""

from typing import Any

import jax
import optax
from flax import nnx

from jaxkern.optim.transforms import apply, check_transformation
from jaxkern.precision import LossScale


class Optimizer[Model](nnx.Optimizer[Model]):
    """``nnx.Optimizer`` that updates the model in one pass, in place, by :func:`jaxkern.apply`.

    It is constructed as ``nnx.Optimizer`` is and holds what that holds, in the same places: a
    checkpoint of one loads into the other, but for the class. Donate model and optimizer, in this
    order, or XLA copies them first.

    Args:
      model: an ``nnx.Module``.
      tx: :func:`jaxkern.fused_adamw`, :func:`jaxkern.fused_adam` or :func:`jaxkern.fused_sgd`, or
        what :func:`jaxkern.apply` takes otherwise, an ``optax.chain`` around one of them.
      **options: as for ``nnx.Optimizer``, `wrt` among them.

    Raises:
      TypeError: `tx` is no transformation.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import Optimizer
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, jaxkern.fused_adamw(1e-3, clip_norm=1.0), wrt=nnx.Param)
      >>> @nnx.jit(donate_argnums=(0, 1))
      ... def train_step(model, optimizer, x):
      ...     loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> loss = train_step(model, optimizer, jnp.ones((8, 4)))
      >>> int(optimizer.step[...])
      1
    """

    def __init__(self, model: Model, tx: optax.GradientTransformation, **options: Any):
        super().__init__(model, check_transformation(tx), **options)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: Model,
        grads: Any,
        /,
        *,
        loss_scale: LossScale | None = None,
        grad_norm: jax.Array | None = None,
        **extra_args: Any,
    ) -> None:
        """Update the model's parameters and the optimizer's state.

        Args:
          model: the one that the optimizer was made for.
          grads: from ``nnx.grad``, by what the optimizer is `wrt`.
          loss_scale: by which the gradients are to be divided. The next one is
            ``loss_scale.adjust(optimizer.opt_state.last_finite[...])``, with `skip_nonfinite`.
          grad_norm: the global norm of `grads` as they are, if it is known.
          **extra_args: for the parts of a chain, and other transformations.

        Returns:
          Nothing, where ``nnx.Optimizer`` returns updates: there are none in memory.

        Raises:
          TypeError: `model` and `grads` are exchanged.
          ValueError: `grads` do not belong to the parameters.
        """
        if isinstance(model, nnx.State) and not isinstance(grads, nnx.State):
            raise TypeError(
                f"update takes the model and then the gradients, got {type(model).__name__} and "
                f"{type(grads).__name__}; call update(model, grads)"
            )
        pure = lambda tree: nnx.as_pure(nnx.state(tree, self.wrt, graph=self.graph))
        params, state = apply(
            self.tx,
            pure(grads),
            nnx.as_pure(self.opt_state),
            pure(model),
            loss_scale=loss_scale,
            grad_norm=grad_norm,
            **nnx.as_pure(extra_args),
        )
        # An average in 8 bits is a Variable of two arrays, an absent master copy one of none.
        as_variables = lambda variable, value: (
            value if isinstance(value, jax.Array) else variable.copy(value)
        )
        state = jax.tree.map(
            as_variables, self.opt_state, state, is_leaf=lambda a: isinstance(a, nnx.Variable)
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state, graph=self.graph))
        self.step[...] += 1
