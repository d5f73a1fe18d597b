"""One optimizer step and one evaluation, as pure functions of arrays.

loss    mean cross-entropy of the next token, in nats
grads   of the loss, clipped by their global norm
AdamW   of a run's OptimizerConfig, weight decay on matrices only
lr      linear warm-up, then a cosine, a constant with a line at the end, or a constant
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxkern
from jaxkern.lm.config import ModelConfig, RunError, TrainConfig
from jaxkern.lm.data import Packed
from jaxkern.lm.layers import linear_cross_entropy
from jaxkern.lm.model import MambaLM, Options, decayed, initial_params
from jaxkern.lm.parallel import TOKENS, Split
from jaxkern.nn.collectives import whole_beside
from jaxkern.nn.common import implementation_of_products
from jaxkern.optim.gradients import sums_of_gradients
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
    """Compiler options of what trains, for the same arithmetic in every process.

    On a GPU it else times matrix products and takes the fastest, and a resumed run would drift.
    Without Triton's products two additions a layer become part of cuBLAS's. On a CPU LLVM's least
    optimisation halves the time to compile, and a step of tiny takes as long (0.46 s on 2 cores).
    """
    if platform == "cpu":
        return {"xla_backend_optimization_level": 1}
    if platform != "gpu":
        return None
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def precision_policy(config: TrainConfig) -> Policy:
    """The dtypes of a run."""
    try:
        return Policy.parse(config.mixed_precision)
    except ValueError as error:
        raise RunError(f"--mixed-precision {config.mixed_precision}: {error}") from None


def make_model(model: ModelConfig, options: Options) -> nnx.GraphDef:
    """The model's structure, to be merged with parameters; computes nothing."""
    return nnx.split(nnx.eval_shape(lambda: MambaLM(model, options, rngs=nnx.Rngs(0))))[0]


class Schedule(NamedTuple):
    """The numbers of a run that its compiled programs take, so that others need no new ones."""

    lr: Any  # () float32, the peak of the learning rate
    final: Any  # () float32, the rate of the last step, in lr
    weight_decay: Any  # () float32
    warmup: Any  # () int32, steps
    decay: Any  # () int32, steps at the end
    steps: Any  # () int32
    seed: Any  # () int32


def schedule_of(config: TrainConfig) -> Schedule:
    """Returns the numbers of `config`."""
    of = config.optimizer
    whole = map(np.int32, (config.warmup, config.decay, config.steps, config.seed))
    return Schedule(*map(np.float32, (of.lr, of.final, of.weight_decay)), *whole)


def make_optimizer(config: TrainConfig, schedule: Schedule) -> optax.GradientTransformation:
    implementation: Any = None if config.implementation == "auto" else config.implementation
    return jaxkern.fused_adamw(
        learning_rate(schedule, config.optimizer.schedule),
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        weight_decay=schedule.weight_decay,
        mask=decayed,
        clip_norm=config.optimizer.clip_norm,
        skip_nonfinite=True,
        implementation=implementation,
    )


def learning_rate(schedule: Schedule, kind: str = "cosine") -> optax.Schedule:
    """Makes the rate of a step's count; it is positive from the first step on."""
    lr, final, _, warmup, decay, steps, _ = schedule

    def rate(count):
        warm = jnp.minimum(1.0, (count + 1) / warmup)
        match kind:
            case "constant":
                return lr * warm
            case "wsd":
                left = jnp.clip((steps - count) / decay, 0.0, 1.0)
            case _:
                progress = (count - warmup) / jnp.maximum(1, steps - warmup)
                left = (1 + jnp.cos(math.pi * jnp.clip(progress, 0.0, 1.0))) / 2
        return lr * warm * (final + (1 - final) * left)

    return rate


def init_state(config: TrainConfig, policy: Policy, params: Params = None) -> TrainState:
    """The state before the first step, from the seed alone or from `params`. Run it under jit."""
    if params is None:
        params = initial_params(config.model, config.seed)
    params = policy.cast_to_params(params)
    opt_state: Any = make_optimizer(config, schedule_of(config)).init(params)
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
    dropout_key: jax.Array | None = None,
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
      dropout_key: of the model's dropout, which is left out without one.

    Returns:
      (), float32, over the tokens that are predicted: 0 if there are none, NaN if one of them is
      outside the vocabulary, and perhaps if another of their window is.
    """
    before = lambda leaf: None if leaf is None else leaf[:, :-1]
    model = nnx.merge(graphdef, params)
    model.gather_outer()
    hidden = model.hidden(
        windows[:, :-1],
        segment_ids=before(segment_ids),
        mask=before(mask),
        isolate_nan=False,  # one NaN makes the mean NaN, wherever it is
        dropout_key=dropout_key,
    )
    return linear_cross_entropy(
        hidden,
        whole_beside(model.output_layer, hidden),
        _labels(windows[:, 1:], segment_ids, mask),
        model.axis_name,
        ignore_index=_IGNORED,
        memory=_LOGITS.get(model.options.remat),
        implementation=implementation_of_products(model.options.implementation),
    )


_IGNORED = -100

_LOGITS = {"scan": 320 * 2**20, "layer": 320 * 2**20}
"""Bytes of logits at once, where products are computed again; else all are kept. Of 16,384 tokens
and 50,280 classes they are in five chunks, whose gradients the forward forms."""


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


def batch_loss(
    graphdef: nnx.GraphDef, params: Params, batch: Packed, weight: Any, dropout_key: Any = None
) -> jax.Array:
    """`loss_fn` of windows (B, L + 1), times their weight if they have one."""
    tokens, segment_ids = batch
    loss = loss_fn(graphdef, params, tokens, segment_ids=segment_ids, dropout_key=dropout_key)
    return loss if weight is None else loss * weight


def token_weights(batch: Packed, mean_of_batch: Callable[[Any], Any]) -> jax.Array | None:
    """Weights of parts (..., B, L + 1) of a device's batch, by which all of its tokens count alike.

    The mean of the parts' losses by these weights (...) is then the mean over all tokens that are
    predicted, of every device; `mean_of_batch` is that over devices. ``None`` without segments:
    each part has as many tokens.
    """
    if (segments := batch.segment_ids) is None:
        return None
    same = segments[..., 1:] == segments[..., :-1]
    counts = jnp.sum(same, axis=(-2, -1), dtype=jnp.float32)
    return counts / jnp.maximum(mean_of_batch(counts.mean()), jnp.finfo(jnp.float32).tiny)


def _dropout_keys(
    config: TrainConfig, split: Split, seed: Any, step: jax.Array
) -> jax.Array | None:
    """A key for each part of a step's batch, its own on every device that has other tokens."""
    if not config.model.dropout:
        return None
    key = jax.random.fold_in(jax.random.key(seed), step)
    for axis in filter(split.axis, TOKENS):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return jax.random.split(key, config.grad_accum)


def gathers_in_layers(config: TrainConfig, split: Split) -> bool:
    """Whether a step exchanges each layer's matrices and gradients in the layer, or all together.

    In the layer it does so where `fsdp` splits the matrices, so that none stands whole but for its
    layer. Of a batch in parts all are gathered before the first, and gradients scattered after the
    last. Where every device has all matrices, gradients are added up as they are kept, all layers'
    stacked: by layers XLA would copy them together for the exchange, and apart again.
    """
    return split.fsdp > 1 and config.grad_accum == 1


def make_train_step(
    config: TrainConfig, graphdef: nnx.GraphDef, split: Split | None = None
) -> Callable[[TrainState, Any, Schedule], tuple[TrainState, dict[str, jax.Array]]]:
    """Makes (state, windows (K, B/K, L + 1), schedule) -> (state, metrics), K = grad_accum.

    Windows are a `Packed`; every token of packed documents counts alike.
    With a `split` it is the program of one device inside ``shard_map``: state and windows are its
    parts of them (:meth:`Split.windows`), losses and gradients are means over the whole batch.
    `graphdef` is then of a model that gathers matrices itself if :func:`gathers_in_layers` says so.
    """
    mode: Any = config.implementation
    split = Split(config.model) if split is None else split
    each_layer = gathers_in_layers(config, split)
    compute = precision_policy(config).compute

    def train_step(state: TrainState, windows: Any, schedule: Schedule):
        scale = state.loss_scale

        def scaled_loss(params, part):
            loss = batch_loss(graphdef, params, *part)
            return scale.scale(loss), loss

        weights, keys = (
            token_weights(windows, split.mean_of_batch),
            _dropout_keys(config, split, schedule.seed, state.step),
        )
        params, parts = state.params, (windows, weights, keys)
        if not each_layer:
            params = split.gathered(params, compute)
        (_, losses), sums = sums_of_gradients(scaled_loss, params, parts, has_aux=True)
        sums = split.added_up(sums, exchanged=each_layer)
        count = len(losses) * split.of_tokens
        grads = jax.tree.map(lambda s, p: (s / count).astype(p.dtype), sums, state.params)
        grad_norm = jnp.sqrt(split.sum_of_squares(mode, grads))
        params, opt_state = jaxkern.apply(
            make_optimizer(config, schedule),
            grads,
            state.opt_state,
            state.params,
            loss_scale=scale,
            grad_norm=grad_norm,
        )
        next_scale = scale.adjust(opt_state.last_finite)
        after = TrainState(params, opt_state, next_scale, state.step + 1)
        metrics = {
            "loss": split.mean_of_batch(losses.mean()),
            "grad_norm": scale.unscale(grad_norm),
            "learning_rate": learning_rate(schedule, config.optimizer.schedule)(
                state.opt_state.count
            ),
        }
        if isinstance(scale, DynamicLossScale):
            skipped = opt_state.total_notfinite
            metrics |= {"skipped": skipped, "loss_scale": scale.loss_scale}
        return after, metrics

    return train_step
