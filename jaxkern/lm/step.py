"""One optimizer step and one evaluation, as pure functions of arrays.

loss    mean cross-entropy of the next byte, in nats
grads   of the loss, clipped to global norm 1
AdamW   b1 0.9, b2 0.95, weight decay 0.1 on matrices only
lr      linear warm-up, then a cosine from lr down to lr / 10 at the last step
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxkern.lm.config import ModelConfig, TrainConfig
from jaxkern.lm.model import DECAYED, MambaLM, Options, one_hot
from jaxkern.optim.accumulation import accumulate_gradients
from jaxkern.precision import DynamicLossScale, Policy, all_finite, select_tree

Params = Any  # nested dict of arrays


class TrainState(NamedTuple):
    """All that a step reads and writes."""

    params: Params
    opt_state: optax.OptState
    loss_scale: DynamicLossScale | None  # fp16 only
    step: jax.Array  # () int32, steps done, those left out included
    skipped: jax.Array  # () int32, steps left out because a gradient was not finite


def make_model(model: ModelConfig, options: Options) -> nnx.GraphDef:
    """The model's structure, to be merged with parameters; computes nothing."""
    return nnx.split(nnx.eval_shape(lambda: MambaLM(model, options, rngs=nnx.Rngs(0))))[0]


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    def decayed(params: Params) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The schedule; a positive rate from the first step on."""

    def schedule(count):
        warm = jnp.minimum(1.0, (count + 1) / config.warmup)
        progress = (count - config.warmup) / max(1, config.steps - config.warmup)
        cosine = (1 + jnp.cos(math.pi * jnp.clip(progress, 0.0, 1.0))) / 2
        return config.lr * warm * (0.1 + 0.9 * cosine)

    return schedule


def init_state(config: TrainConfig, policy: Policy) -> TrainState:
    """The state before the first step, from the seed alone. Run it under jit."""
    model = MambaLM(config.model, rngs=nnx.Rngs(config.seed))
    params = policy.cast_to_params(nnx.to_pure_dict(nnx.state(model)))
    return TrainState(
        params=params,
        opt_state=make_optimizer(config).init(params),
        loss_scale=DynamicLossScale() if policy.compute == jnp.float16 else None,
        step=jnp.int32(0),
        skipped=jnp.int32(0),
    )


def loss_fn(graphdef: nnx.GraphDef, params: Params, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of bytes 1…L of each window (B, L + 1), given those before."""
    logits = nnx.merge(graphdef, params)(windows[:, :-1]).astype(jnp.float32)
    labels = one_hot(windows[:, 1:], logits.shape[-1])
    return -jnp.sum(jax.nn.log_softmax(logits), axis=-1, where=labels).mean()


def make_train_step(config: TrainConfig, graphdef: nnx.GraphDef):
    """The function (state, windows (K, B/K, L + 1)) -> (state, metrics), K = grad_accum."""
    optimizer = make_optimizer(config)
    schedule = learning_rate(config)

    def train_step(state: TrainState, windows: jax.Array):
        def scaled_loss(params, windows):
            loss = loss_fn(graphdef, params, windows)
            return (state.loss_scale.scale(loss) if state.loss_scale else loss), loss

        (_, losses), grads = accumulate_gradients(scaled_loss, state.params, windows, has_aux=True)
        if state.loss_scale:
            grads = state.loss_scale.unscale(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        after = state._replace(
            params=optax.apply_updates(state.params, updates), opt_state=opt_state
        )
        if state.loss_scale:
            finite = all_finite(grads)
            after = select_tree(finite, after, state)
            after = after._replace(
                loss_scale=state.loss_scale.adjust(finite),
                skipped=state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
            )
        after = after._replace(step=state.step + 1)
        metrics = {
            "loss": losses.mean(),
            "grad_norm": _global_norm(grads),
            "learning_rate": schedule(state.step - state.skipped),
        }
        if state.loss_scale:
            metrics |= {"skipped": after.skipped, "loss_scale": state.loss_scale.loss_scale}
        return after, metrics

    return train_step


def _global_norm(tree: Any) -> jax.Array:
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
