"""Layers and an optimizer for flax.nnx on jaxkern's ops.

`RMSNorm`, `LayerNorm`, `Dropout` and `Linear` are flax's own classes with another `__call__`: the
same arguments, parameters and initial values, and `implementation` besides. What the ops do not
compute falls to flax's own computation: dtypes other than bfloat16, float16 and float32 (complex
numbers, float64, fp8), statistics over other axes than the last, masks, means over a named axis,
dropout masks that are broadcast, another `dot_general`, `preferred_element_type` or `out_sharding`,
and a `promote_dtype` other than flax's. Only ``implementation="mosaic"`` raises there, a
NotImplementedError with the reason.

`dtype` and `param_dtype` mean what they mean in flax, and so do the fields of a
:class:`jaxkern.precision.Policy`: ``dtype=policy.compute, param_dtype=policy.params``.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.nn import common, delta_net, mamba, mamba2
from jaxkern.nn.common import left_to_parent
from jaxkern.optim.transforms import apply, check_transformation
from jaxkern.precision import LossScale

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
except ImportError as error:
    raise ImportError("jaxkern.nn.flax needs flax; run: pip install flax") from error

__all__ = [
    "Dropout",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LayerNorm",
    "Linear",
    "Mamba",
    "Mamba2",
    "Optimizer",
    "RMSNorm",
    "SwiGLU",
]


class _OnOps:
    """A layer of flax's with an `implementation` besides flax's own arguments."""

    def __init__(self, *args: Any, implementation: Implementation | None = None, **options: Any):
        super().__init__(*args, **options)
        self.implementation: Implementation | None = implementation


class RMSNorm(_OnOps, nnx.RMSNorm):
    """``nnx.RMSNorm`` on :func:`jaxkern.rms_norm`.

    Args:
      num_features: N, the last axis of the input.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      **options: as for ``nnx.RMSNorm``, `rngs` among them. With a mask, other axes than the last,
        an `axis_name` or a `promote_dtype`, flax computes the result.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import RMSNorm
      >>> layer = RMSNorm(256, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 256), jnp.bfloat16)).dtype  # as flax: x and float32 parameters
      dtype('float32')
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """x (..., N) -> the same shape."""
        return _normalised(self, jaxkern.rms_norm, super().__call__, x, mask, self.scale)


class LayerNorm(_OnOps, nnx.LayerNorm):
    """``nnx.LayerNorm`` on :func:`jaxkern.layer_norm`.

    Args:
      num_features: N, the last axis of the input.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      **options: as for ``nnx.LayerNorm``, `rngs` among them; the variance is always summed from
        the differences to the mean, whatever `use_fast_variance` says. With a mask, other axes than
        the last, an `axis_name` or a `promote_dtype`, flax computes the result.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., N) -> the same shape."""
        params = self.scale, self.bias
        return _normalised(self, jaxkern.layer_norm, super().__call__, x, mask, *params)


class Dropout(_OnOps, nnx.Dropout):
    """``nnx.Dropout`` on :func:`jaxkern.dropout`, which stores no mask.

    The mask is drawn by another generator than flax's, so that it is another one for the same key.
    With `broadcast_dims`, and for dtypes that the op does not take, it is flax's.

    Args:
      rate: probability of a zero.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      **options: as for ``nnx.Dropout``.
    """

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        """Any shape -> the same."""
        stream: Any = self.rngs if rngs is None else rngs
        keeping = self.deterministic if deterministic is None else deterministic
        drawable = isinstance(stream, nnx.Rngs | nnx.RngStream | jax.Array)
        draws = drawable and not (keeping is None or keeping or self.rate in (0, 1))
        reason = common.dropout_reason(self, jnp.result_type(inputs)) if draws else None
        if not draws or left_to_parent(self, reason):
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(stream, nnx.Rngs):
            stream = stream[self.rng_collection]
        key = stream if isinstance(stream, jax.Array) else stream()
        return jaxkern.dropout(inputs, self.rate, key, implementation=self.implementation)


class Linear(_OnOps, nnx.Linear):
    """``nnx.Linear`` on :func:`jaxkern.linear`.

    Args:
      in_features: K, the last axis of the input.
      out_features: N, the last axis of the result.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      **options: as for ``nnx.Linear``, `rngs` among them. With a `dot_general`,
        `preferred_element_type` or `promote_dtype`, flax computes the result.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """inputs (..., K) -> (..., N)."""
        kernel, bias = _value(self.kernel), _value(self.bias)
        reason = self._product_reason(out_sharding) or _dtype_reason(self, inputs, kernel, bias)
        if left_to_parent(self, reason):
            return super().__call__(inputs, out_sharding=out_sharding)
        inputs, *_ = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        return jaxkern.linear(
            inputs, kernel, bias, precision=self.precision, implementation=self.implementation
        )

    def _product_reason(self, out_sharding: Any) -> str | None:
        if self.dot_general is not jax.lax.dot_general:
            return "dot_general is not that of JAX"
        for name, value in (
            ("preferred_element_type", self.preferred_element_type),
            ("out_sharding", out_sharding),
        ):
            if value is not None:
                return f"{name} is {value}, and the kernels' results are as their arguments"
        return None


class SwiGLU(nnx.Module):
    """The gated unit of Llama's blocks, down(silu(gate(x)) · up(x)).

    Its three :class:`Linear` layers have the names of Llama's weights.

    Args:
      features: K, the last axis of input and output.
      hidden_features: H, between the projections.
      use_bias: whether the projections have biases.
      dtype: of the computation, as in ``nnx.Linear``.
      param_dtype: of the parameters.
      implementation: of :func:`jaxkern.swiglu`; ``"xla"`` also for the projections.
      rngs: where the initial values are drawn from.
      **options: others of ``nnx.Linear``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import SwiGLU
      >>> mlp = SwiGLU(64, 256, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
      >>> mlp(jnp.ones((2, 8, 64))).dtype
      dtype(bfloat16)

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        options |= {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype}
        options["implementation"] = common.implementation_of_products(implementation)
        self.gate_proj = Linear(features, hidden_features, **options, rngs=rngs)
        self.up_proj = Linear(features, hidden_features, **options, rngs=rngs)
        self.down_proj = Linear(hidden_features, features, **options, rngs=rngs)
        self.implementation: Implementation | None = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., K) -> the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(jaxkern.swiglu(gate, up, implementation=self.implementation))


class _BlockLayer(common.BlockCalls, nnx.Module):
    """A layer of a kind of block, `_block`, that holds its parameters by their names."""

    def __init__(
        self,
        d_model: int,
        *,
        n_layers: int = 1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
        **sizes: Unpack[common.SizeOptions],
    ):
        self.sizes = self._block.sizes(d_model, **sizes)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.implementation: Implementation | None = implementation
        for name, (init, shape) in self._block.initializers(self.sizes, n_layers).items():
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))

    def prepare(self) -> None:
        """Computes once, for a loop over tokens, what each step would of the parameters alone.

        The layer is then one for steps with `dtype`, and no longer to be trained.
        """
        for name, value in common.prepared(self._weights(), self.dtype)._asdict().items():
            setattr(self, name, None if value is None else nnx.Param(value))

    def _weights(self) -> Any:
        names = self._block.weights._fields
        return self._block.weights(*(_value(getattr(self, name, None)) for name in names))

    def _sizes(self) -> Any:
        return self.sizes


class Mamba(_BlockLayer):
    """The Mamba block, for whole sequences and token by token.

    Its parameters are the fields of :class:`jaxkern.nn.mamba.Weights`.

    Args:
      d_model, d_state, d_conv, expand, dt_rank, use_bias, use_conv_bias: as
        :class:`jaxkern.nn.mamba.Sizes` has them.
      n_layers: blocks that add to one residual stream; the output projection begins smaller by its
        root.
      dtype: of the products; by default what input and parameters promote to.
      param_dtype: of the parameters.
      implementation: of the ops: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      rngs: where the initial values are drawn from.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import Mamba
      >>> block, x = Mamba(32, rngs=nnx.Rngs(0)), jnp.ones((1, 5, 32))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[:, 0], cache)  # the sixth token
      >>> out.shape
      (1, 32)

    References:
      Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """

    _block = mamba.BLOCK
    __init__ = common.takes_sizes(_BlockLayer.__init__, _block)


class Mamba2(_BlockLayer):
    """The Mamba-2 block, for whole sequences and token by token.

    Its parameters are the fields of :class:`jaxkern.nn.mamba2.Weights`.

    Args:
      d_model, d_state, d_conv, expand, headdim, ngroups: as :class:`jaxkern.nn.mamba2.Sizes` has
        them.
      norm_groups, norm_eps, dt_limit, use_bias, use_conv_bias: likewise.
      n_layers, dtype, param_dtype, implementation, rngs: as for :class:`Mamba`;
        :func:`jaxkern.ssd` says what its kernels take.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import Mamba2
      >>> block = Mamba2(64, headdim=32, rngs=nnx.Rngs(0))  # 4 heads
      >>> x = jnp.ones((1, 5, 64))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[:, 0], cache)  # the sixth token
      >>> out.shape
      (1, 64)

    References:
      Dao and Gu, `Transformers are SSMs <https://arxiv.org/abs/2405.21060>`_, 2024, section 7.
    """

    _block = mamba2.BLOCK
    __init__ = common.takes_sizes(_BlockLayer.__init__, _block)


class GatedDeltaNet(_BlockLayer):
    """Gated DeltaNet, the linear attention of Qwen3-Next, on :func:`jaxkern.gated_delta_rule`.

    Its parameters are the fields of :class:`jaxkern.nn.delta_net.Weights`, and its equations in
    :mod:`jaxkern.nn.delta_net`.

    Args:
      d_model, num_heads, num_key_heads, d_key, d_value, d_conv: as
        :class:`jaxkern.nn.delta_net.GatedDeltaNetSizes` has them.
      norm_eps, use_bias, use_conv_bias: as that class has them.
      n_layers, dtype, param_dtype, implementation, rngs: as for :class:`Mamba`;
        :func:`jaxkern.gated_delta_rule` says what its kernels take.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import GatedDeltaNet
      >>> sizes = {"num_heads": 4, "num_key_heads": 2, "d_key": 16, "d_value": 32}
      >>> block, x = GatedDeltaNet(64, **sizes, rngs=nnx.Rngs(0)), jnp.ones((1, 5, 64))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[:, 0], cache)  # the sixth token
      >>> out.shape
      (1, 64)

    References:
      Yang, Kautz and Hatamizadeh, `Gated Delta Networks <https://arxiv.org/abs/2412.06464>`_, 2024.
    """

    _block = delta_net.GATED_DELTA_NET
    __init__ = common.takes_sizes(_BlockLayer.__init__, _block)


class KimiDeltaAttention(_BlockLayer):
    """Kimi Delta Attention, of Kimi Linear, on :func:`jaxkern.gated_delta_rule`.

    Its parameters are the fields of :class:`jaxkern.nn.delta_net.Weights`, and its equations in
    :mod:`jaxkern.nn.delta_net`.

    Args:
      d_model, num_heads, d_key, d_value, d_conv, gate_rank, norm_eps, use_bias, use_conv_bias: as
        :class:`jaxkern.nn.delta_net.KimiDeltaAttentionSizes` has them.
      n_layers, dtype, param_dtype, implementation, rngs: as for :class:`Mamba`;
        :func:`jaxkern.gated_delta_rule` says what its kernels take.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxkern.nn.flax import KimiDeltaAttention
      >>> block = KimiDeltaAttention(64, num_heads=4, d_key=16, d_value=32, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 5, 64))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[:, 0], cache)  # the sixth token
      >>> out.shape
      (1, 64)

    References:
      Kimi Team, `Kimi Linear <https://arxiv.org/abs/2510.26692>`_, 2025.
    """

    _block = delta_net.KIMI_DELTA_ATTENTION
    __init__ = common.takes_sizes(_BlockLayer.__init__, _block)


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


def _normalised(
    layer: Any, op: Callable[..., Any], parent: Callable[..., Any], x: Any, mask: Any, *params: Any
) -> jax.Array:
    """Normalises `x` by `op` over its last axis, or else by `parent`."""
    values = [_value(param) for param in params]
    reason = common.norm_reason(layer, jnp.ndim(x), mask) or _dtype_reason(layer, x, *values)
    if left_to_parent(layer, reason):
        return parent(x, mask=mask)
    dtype = dtypes.canonicalize_dtype(x, *values, dtype=layer.dtype)
    return common.normalised(layer, op, x, values, dtype)


def _value(param: nnx.Param | None) -> Any:
    return None if param is None else param[...]


def _dtype_reason(layer: Any, x: Any, *params: Any) -> str | None:
    """Why the ops cannot compute in the dtypes of a call."""
    if layer.promote_dtype is not dtypes.promote_dtype:
        return "promote_dtype is not that of flax, which the kernels' own conversions follow"
    dtype = dtypes.canonicalize_dtype(x, *params, dtype=layer.dtype)
    return common.dtype_reason(dtype, *(param.dtype for param in params if param is not None))
