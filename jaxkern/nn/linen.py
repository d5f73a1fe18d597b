"""Layers and a train state for flax.linen on jaxkern's ops.

`RMSNorm`, `LayerNorm`, `Dropout` and `Dense` are flax's own classes with another `__call__`: the
same attributes, parameters and initial values, and `implementation` besides. What the ops do not
compute falls to flax's own computation, as in :mod:`jaxkern.nn.flax`: dtypes other than bfloat16,
float16 and float32, other axes, masks, named axes, dropout masks that are broadcast, another
`dot_general` or `promote_dtype`. `dtype` and `param_dtype` mean what they mean in flax.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Self

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
    from flax import linen as nn
    from flax.linen.dtypes import canonicalize_dtype, promote_dtype
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ImportError as error:
    raise ImportError("jaxkern.nn.linen needs flax; run: pip install flax") from error

__all__ = [
    "Dense",
    "Dropout",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LayerNorm",
    "Mamba",
    "Mamba2",
    "RMSNorm",
    "SwiGLU",
    "TrainState",
]


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` on :func:`jaxkern.rms_norm`.

    With a mask, other axes than the last or an `axis_name`, flax computes the result.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are as
        in ``nn.RMSNorm``. Statistics are always summed in float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.linen import RMSNorm
      >>> x = jnp.ones((2, 8, 256))
      >>> RMSNorm().init(jax.random.key(0), x)["params"]["scale"].shape
      (256,)
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., N) -> the same shape."""
        return _normalised(self, jaxkern.rms_norm, super().__call__, x, mask, "scale")


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` on :func:`jaxkern.layer_norm`.

    With a mask, other axes than the last or an `axis_name`, flax computes the result.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are as
        in ``nn.LayerNorm``. The variance is always summed in float32 from the differences to the
        mean.
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., N) -> the same shape."""
        return _normalised(self, jaxkern.layer_norm, super().__call__, x, mask, "scale", "bias")


class Dropout(nn.Dropout):
    """``nn.Dropout`` on :func:`jaxkern.dropout`, which stores no mask.

    The mask is drawn by another generator than flax's, so that it is another one for the same key.
    With `broadcast_dims`, and for dtypes that the op does not take, it is flax's.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are as
        in ``nn.Dropout``.
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self, inputs: jax.Array, deterministic: bool | None = None, rng: Any = None
    ) -> jax.Array:
        """Any shape -> the same."""
        given = (self.deterministic, deterministic)
        draws = False in given and None in given and self.rate not in (0, 1)
        reason = common.dropout_reason(self, jnp.result_type(inputs)) if draws else None
        if not draws or left_to_parent(self, reason):
            return _plain(super().__call__)(self, inputs, deterministic=deterministic, rng=rng)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        return jaxkern.dropout(inputs, self.rate, key, implementation=self.implementation)


class Dense(nn.Dense):
    """``nn.Dense`` on :func:`jaxkern.linear`.

    With a `dot_general`, `dot_general_cls` or `promote_dtype`, flax computes the result.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are as
        in ``nn.Dense``.
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """inputs (..., K) -> (..., N)."""
        if left_to_parent(self, self._reason(inputs)):
            return _plain(super().__call__)(self, inputs)
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = _param(self, "bias", shape[1:])
        promoted: Any = promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return jaxkern.linear(
            promoted[0],
            kernel,
            bias,
            precision=self.precision,
            implementation=self.implementation,
        )

    @nn.nowrap
    def _reason(self, inputs: Any) -> str | None:
        """Why the op cannot compute this call."""
        if self.dot_general not in (None, jax.lax.dot_general) or self.dot_general_cls is not None:
            return "dot_general is not that of JAX"
        if self.promote_dtype is not promote_dtype:
            return "promote_dtype is not that of flax, which the kernels' own conversions follow"
        if jnp.ndim(inputs) == 0:
            return "inputs is a scalar, which has no axis to multiply"
        return _dtype_reason(self, inputs, "kernel", "bias")


class SwiGLU(nn.Module):
    """The gated unit of Llama's blocks, down(silu(gate(x)) · up(x)).

    Attributes:
      hidden_features: H, between the projections.
      use_bias: whether the projections have biases.
      dtype: of the computation, as in ``nn.Dense``.
      param_dtype: of the parameters.
      implementation: of :func:`jaxkern.swiglu`; ``"xla"`` also for the projections.
      precision, kernel_init, bias_init: of the projections, as in ``nn.Dense``.
    """

    hidden_features: int
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None
    precision: Any = None
    kernel_init: Any = nn.linear.default_kernel_init
    bias_init: Any = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., K) -> the same shape."""

        def dense(features: int, name: str) -> Dense:
            return Dense(
                features,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                implementation=common.implementation_of_products(self.implementation),
                name=name,
            )

        gate, up = (dense(self.hidden_features, name)(x) for name in ("gate_proj", "up_proj"))
        hidden = jaxkern.swiglu(gate, up, implementation=self.implementation)
        return dense(x.shape[-1], "down_proj")(hidden)


class _BlockLayer(common.BlockCalls, nn.Module):
    """A layer of a kind of block, `_block`.

    The attributes of its subclasses are the fields of the block's `Sizes`, `n_layers`, `dtype`,
    `param_dtype` and `implementation`.
    """

    # Its own, as linen looks after no inherited ones; init_cache needs no parameters.
    __call__ = common.BlockCalls.__call__
    step = common.BlockCalls.step

    def setup(self: Any):
        inits = self._block.initializers(self._sizes(), self.n_layers)
        params = {
            name: self.param(name, init, shape, self.param_dtype)
            for name, (init, shape) in inits.items()
        }
        self.weights = self._block.weights_from(params)

    @nn.nowrap
    def _weights(self: Any) -> Any:
        return self.weights

    @nn.nowrap
    def _sizes(self) -> Any:
        names = inspect.signature(self._block.sizes).parameters
        return self._block.sizes(**{name: getattr(self, name) for name in names})


class Mamba(_BlockLayer):
    """The Mamba block, for whole sequences and token by token.

    Attributes:
      d_model, d_state, d_conv, expand, dt_rank, use_bias, use_conv_bias: as
        :class:`jaxkern.nn.mamba.Sizes` has them.
      n_layers, dtype, param_dtype, implementation: as for :class:`jaxkern.nn.flax.Mamba`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.linen import Mamba
      >>> block, x = Mamba(32), jnp.ones((1, 5, 32))
      >>> params = block.init(jax.random.key(0), x)
      >>> out, cache = block.apply(params, x, return_cache=True)
      >>> out, cache = block.apply(params, x[:, 0], cache, method="step")  # the sixth token
      >>> out.shape
      (1, 32)
    """

    d_model: int
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | None = None
    n_layers: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None
    use_bias: bool = False
    use_conv_bias: bool = True

    _block = mamba.BLOCK


class Mamba2(_BlockLayer):
    """The Mamba-2 block, for whole sequences and token by token.

    Attributes:
      d_model, d_state, d_conv, expand, headdim, ngroups, norm_groups, norm_eps, dt_limit, use_bias,
        use_conv_bias: as :class:`jaxkern.nn.mamba2.Sizes` has them.
      n_layers, dtype, param_dtype, implementation: as for :class:`jaxkern.nn.flax.Mamba`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.linen import Mamba2
      >>> block, x = Mamba2(64, headdim=32), jnp.ones((1, 5, 64))  # 4 heads
      >>> params = block.init(jax.random.key(0), x)
      >>> out, cache = block.apply(params, x, return_cache=True)
      >>> out, cache = block.apply(params, x[:, 0], cache, method="step")  # the sixth token
      >>> out.shape
      (1, 64)
    """

    d_model: int
    d_state: int = 128
    d_conv: int = 4
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    norm_groups: int | None = None
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
    n_layers: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None
    use_bias: bool = False
    use_conv_bias: bool = True

    _block = mamba2.BLOCK


class GatedDeltaNet(_BlockLayer):
    """Gated DeltaNet, the linear attention of Qwen3-Next, on :func:`jaxkern.gated_delta_rule`.

    Attributes:
      d_model, num_heads, num_key_heads, d_key, d_value, d_conv: as
        :class:`jaxkern.nn.delta_net.GatedDeltaNetSizes` has them.
      norm_eps, use_bias, use_conv_bias: as that class has them.
      n_layers, dtype, param_dtype, implementation: as for :class:`jaxkern.nn.flax.Mamba`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.linen import GatedDeltaNet
      >>> x = jnp.ones((1, 5, 64))
      >>> block = GatedDeltaNet(64, num_heads=4, num_key_heads=2, d_key=16, d_value=32)
      >>> params = block.init(jax.random.key(0), x)
      >>> out, cache = block.apply(params, x, return_cache=True)
      >>> out, cache = block.apply(params, x[:, 0], cache, method="step")  # the sixth token
      >>> out.shape
      (1, 64)
    """

    d_model: int
    num_heads: int | None = None
    num_key_heads: int | None = None
    d_key: int = 128
    d_value: int = 128
    d_conv: int = 4
    norm_eps: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = False
    n_layers: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None

    _block = delta_net.GATED_DELTA_NET


class KimiDeltaAttention(_BlockLayer):
    """Kimi Delta Attention, of Kimi Linear, on :func:`jaxkern.gated_delta_rule`.

    Attributes:
      d_model, num_heads, d_key, d_value, d_conv, gate_rank, norm_eps, use_bias, use_conv_bias: as
        :class:`jaxkern.nn.delta_net.KimiDeltaAttentionSizes` has them.
      n_layers, dtype, param_dtype, implementation: as for :class:`jaxkern.nn.flax.Mamba`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.linen import KimiDeltaAttention
      >>> x = jnp.ones((1, 5, 64))
      >>> block = KimiDeltaAttention(64, num_heads=4, d_key=16, d_value=32)
      >>> params = block.init(jax.random.key(0), x)
      >>> out, cache = block.apply(params, x, return_cache=True)
      >>> out, cache = block.apply(params, x[:, 0], cache, method="step")  # the sixth token
      >>> out.shape
      (1, 64)
    """

    d_model: int
    num_heads: int | None = None
    d_key: int = 128
    d_value: int = 128
    d_conv: int = 4
    gate_rank: int | None = None
    norm_eps: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = False
    n_layers: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None

    _block = delta_net.KIMI_DELTA_ATTENTION


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


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """Unwraps a module's computation, (module, ...) -> result, so that it counts as no other call.

    Intermediates that are captured, and interceptors, would otherwise see two calls of the layer.
    """
    return inspect.unwrap(call)


def _normalised(
    layer: Any, op: Callable[..., Any], parent: Callable[..., Any], x: Any, mask: Any, *names: str
) -> jax.Array:
    """Normalises `x` by `op` over its last axis, or else by `parent`, with the named parameters."""
    reason = common.norm_reason(layer, jnp.ndim(x), mask) or _dtype_reason(layer, x, *names)
    if left_to_parent(layer, reason):
        return _plain(parent)(layer, x, mask=mask)
    params = [_param(layer, name, (jnp.shape(x)[-1],)) for name in names]
    dtype = canonicalize_dtype(x, *params, dtype=layer.dtype)
    return common.normalised(layer, op, x, params, dtype)


def _param(layer: Any, name: str, shape: tuple[int, ...]) -> jax.Array | None:
    """The parameter `name` of a layer of flax, or ``None`` if its `use_<name>` is false."""
    if not getattr(layer, f"use_{name}"):
        return None
    return layer.param(name, getattr(layer, f"{name}_init"), shape, layer.param_dtype)


def _dtype_reason(layer: Any, x: Any, *names: str) -> str | None:
    """Why the ops cannot compute with `x` and parameters, of whatever dtype they are stored in."""
    stored = jax.tree.leaves([layer.get_variable("params", name) for name in names])
    x = jnp.result_type(x)
    inexact = x if jnp.issubdtype(x, jnp.inexact) else None
    dtypes = layer.dtype, layer.param_dtype, *map(jnp.result_type, stored)
    return common.dtype_reason(inexact, *dtypes)
