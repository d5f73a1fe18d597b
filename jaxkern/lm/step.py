"""One optimizer step and one evaluation, as pure functions of arrays.

loss    mean cross-entropy of the next byte, in nats
grads   of the loss, clipped to global norm 1
AdamW   b1 0.9, b2 0.95, weight decay 0.1 on matrices only
lr      linear warm-up, then a cosine from lr down to lr / 10 at the last step
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import jaxkern
from jaxkern.lm.config import ModelConfig, TrainConfig
from jaxkern.lm.model import MambaLM, Options, decayed, initial_params
from jaxkern.nn.common import implementation_of_products
from jaxkern.optim.gradients import sum_of_squares
from jaxkern.optim.transforms import FusedAdamState
from jaxkern.precision import DynamicLossScale, LossScale, NoOpLossScale, Policy

Params = Any  # nested dict of arrays


class TrainState(NamedTuple):
    """All that a step reads and writes."""

    params: Params
    opt_state: FusedAdamState  # its total_notfinite is the number of steps left out
    loss_scale: LossScale  # dynamic for fp16, else none
    step: jax.Array  # () int32, steps done, those left out included


def compiler_options(platform: str) -> dict[str, Any] | None:
    """How XLA compiles what trains, to the same arithmetic in every process.

    Else it times matrix products on the GPU and takes the fastest, and a resumed run would drift.
    Without Triton's products two additions a layer become part of cuBLAS's.
    """
    if platform != "gpu":
        return None
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def make_model(model: ModelConfig, options: Options) -> nnx.GraphDef:
    """The model's structure, to be merged with parameters; computes nothing."""
    return nnx.split(nnx.eval_shape(lambda: MambaLM(model, options, rngs=nnx.Rngs(0))))[0]


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    implementation: Any = None if config.implementation == "auto" else config.implementation
    return jaxkern.fused_adamw(
        learning_rate(config),
        b1=0.9,
        b2=0.95,
        weight_decay=0.1,
        mask=decayed,
        clip_norm=1.0,
        skip_nonfinite=True,
        implementation=implementation,
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
    params = policy.cast_to_params(initial_params(config.model, config.seed))
    opt_state: Any = make_optimizer(config).init(params)
    return TrainState(
        params=params,
        opt_state=opt_state,
        loss_scale=DynamicLossScale() if policy.compute == jnp.float16 else NoOpLossScale(),
        step=jnp.int32(0),
    )


def loss_fn(
    graphdef: nnx.GraphDef,
    params: Params,
    windows: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy in nats of tokens 1…L of each window (B, L + 1), given those before.

    Args:
      graphdef: the model's structure, from `make_model`.
      params: its parameters.
      windows: (B, L + 1), any integer dtype.
      segment_ids: (B, L + 1), integers, for packed documents: one ends where the number changes.
        None sees another, and the first token of each is not predicted.
      mask: (B, L + 1), booleans or integers, false or 0 for padding: neither it nor the first token
        after it is predicted.

    Returns:
      (), float32, over the tokens that are predicted: 0 if there are none, NaN if one of them is
      outside the vocabulary.
    """
    before = lambda leaf: None if leaf is None else leaf[:, :-1]
    model = nnx.merge(graphdef, params)
    hidden = model.hidden(windows[:, :-1], segment_ids=before(segment_ids), mask=before(mask))
    return jaxkern.linear_cross_entropy(
        hidden,
        model.output_layer,
        _labels(windows[:, 1:], segment_ids, mask),
        ignore_index=_IGNORED,
        memory=_LOGITS.get(model.options.remat),
        implementation=implementation_of_products(model.options.implementation),
    )


_IGNORED = -100

_LOGITS = {"scan": 2**28, "layer": 2**28}
"""Bytes of logits at once, where products are computed again; else all are kept."""


def _labels(targets: jax.Array, segment_ids: Any, mask: Any) -> jax.Array:
    """The labels of tokens (B, L): `_IGNORED` for what is not predicted, and else no such number.

    A negative token, which is outside the vocabulary, is -1.
    """
    targets = jnp.asarray(targets)
    wide = jnp.int64 if targets.dtype.itemsize == 8 else jnp.int32
    labels = jnp.maximum(targets.astype(wide), -1)
    if segment_ids is not None:
        labels = jnp.where(segment_ids[:, 1:] == segment_ids[:, :-1], labels, _IGNORED)
    if mask is not None:
        labels = jnp.where((mask[:, 1:] != 0) & (mask[:, :-1] != 0), labels, _IGNORED)
    return labels


def make_train_step(
    config: TrainConfig, graphdef: nnx.GraphDef, axis_name: str | None = None
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """The function (state, windows (K, B/K, L + 1)) -> (state, metrics), K = grad_accum.

    Inside ``shard_map`` over the mesh axis `axis_name` the windows are one device's; losses and
    gradients are means over all devices, and so are the same on each.
    """
    optimizer = make_optimizer(config)
    schedule = learning_rate(config)
    mode: Any = config.implementation

    def train_step(state: TrainState, windows: jax.Array):
        scale = state.loss_scale

        def scaled_loss(params, windows):
            loss = loss_fn(graphdef, params, windows)
            return scale.scale(loss), loss

        (_, losses), grads = jaxkern.accumulate_gradients(
            scaled_loss, state.params, windows, has_aux=True, axis_name=axis_name
        )
        if axis_name is not None:
            losses = lax.pmean(losses, axis_name)
        grad_norm = jnp.sqrt(sum_of_squares(mode, jax.tree.leaves(grads)))
        params, opt_state = jaxkern.apply(
            optimizer,
            grads,
            state.opt_state,
            state.params,
            loss_scale=scale,
            grad_norm=grad_norm,
        )
        next_scale = scale.adjust(opt_state.last_finite)
        after = TrainState(params, opt_state, next_scale, state.step + 1)
        metrics = {
            "loss": losses.mean(),
            "grad_norm": scale.unscale(grad_norm),
            "learning_rate": schedule(state.opt_state.count),
        }
        if isinstance(scale, DynamicLossScale):
            skipped = opt_state.total_notfinite
            metrics |= {"skipped": skipped, "loss_scale": scale.loss_scale}
        return after, metrics

    return train_step
