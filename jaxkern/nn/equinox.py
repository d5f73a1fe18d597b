"""Layers and an optimizer's step for equinox on jaxkern's ops.

`RMSNorm`, `LayerNorm`, `Dropout` and `Linear` are Equinox's own classes with another `__call__`:
the same arguments, leaves and initial values, and `implementation` besides. Where Equinox's take a
single example, these take leading axes, too: ``layer(x)`` for x (B, L, N) is one launch of all
rows, and adds up the gradients of its parameters in the kernel; ``jax.vmap(layer)(x)`` works, but
writes those gradients for every row before it adds them up.

What the ops do not compute falls to Equinox's own computation, example by example: dtypes other
than bfloat16, float16 and float32 (complex numbers, integers, float64, fp8) and linear layers of
scalars. Only ``implementation="mosaic"`` raises there, a NotImplementedError with the reason.

Parameters have the dtype given to the constructor, and results that of the input, as in Equinox.
For parameters in float32 and arithmetic in bfloat16, :class:`jaxkern.precision.Policy` casts a
module as it does any pytree: ``policy.cast_to_compute(layer)(x)``.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import optax

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.nn import delta_net, mamba, mamba2
from jaxkern.nn.common import (
    Block,
    SizeOptions,
    dtype_reason,
    implementation_of_products,
    left_to_parent,
    takes_sizes,
)
from jaxkern.optim.transforms import apply
from jaxkern.precision import LossScale

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("jaxkern.nn.equinox needs equinox; run: pip install equinox") from error

__all__ = [
    "Dropout",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LayerNorm",
    "Linear",
    "Mamba",
    "Mamba2",
    "RMSNorm",
    "SwiGLU",
    "apply_gradients",
]

_ABSENT: Any = object()


class _OnOps(eqx.Module):
    """A layer of Equinox's with an `implementation` besides Equinox's own arguments."""

    implementation: Implementation | None = eqx.field(static=True)

    def __init__(self, *args: Any, implementation: Implementation | None = None, **options: Any):
        super().__init__(*args, **options)
        self.implementation = implementation


class RMSNorm(_OnOps, eqx.nn.RMSNorm):
    """``eqx.nn.RMSNorm`` on :func:`jaxkern.rms_norm`.

    Args:
      shape: of what is normalised together: the last axis or the last axes of the input.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      *args: as ``eqx.nn.RMSNorm`` takes them.
      **options: likewise.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkern.nn.equinox import RMSNorm
      >>> layer = RMSNorm(256, use_bias=False)
      >>> layer(jnp.ones((2, 8, 256), jnp.bfloat16)).dtype
      dtype(bfloat16)
    """

    __init__ = _OnOps.__init__

    def __call__(self, x: jax.Array, state: Any = _ABSENT, *, key: Any = None) -> Any:
        """x, any axes and those of `shape` -> the same shape; a `state` is handed through."""
        return _normalised(self, jaxkern.rms_norm, super().__call__, x, state)


class LayerNorm(_OnOps, eqx.nn.LayerNorm):
    """``eqx.nn.LayerNorm`` on :func:`jaxkern.layer_norm`.

    Args:
      shape: of what is normalised together: the last axis or the last axes of the input.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      *args: as ``eqx.nn.LayerNorm`` takes them.
      **options: likewise.
    """

    __init__ = _OnOps.__init__

    def __call__(self, x: jax.Array, state: Any = _ABSENT, *, key: Any = None) -> Any:
        """x, any axes and those of `shape` -> the same shape; a `state` is handed through."""
        return _normalised(self, jaxkern.layer_norm, super().__call__, x, state)


class Dropout(_OnOps, eqx.nn.Dropout):
    """``eqx.nn.Dropout`` on :func:`jaxkern.dropout`, which stores no mask.

    The mask is drawn by another generator than Equinox's, so that it is another one for the same
    key. For dtypes that the op does not take, and with the deprecated `deterministic` in a call, it
    is Equinox's.

    Args:
      p: probability of a zero.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      *args: as ``eqx.nn.Dropout`` takes them.
      **options: likewise.
    """

    __init__ = _OnOps.__init__

    def __call__(
        self, x: jax.Array, *, key: Any = None, inference: bool | None = None, **deprecated: Any
    ) -> jax.Array:
        """Any shape -> the same."""
        off = self.inference if inference is None else inference
        never = isinstance(self.p, int | float) and self.p == 0
        if key is None or off or never or deprecated:
            return super().__call__(x, key=key, inference=inference, **deprecated)
        if left_to_parent(self, dtype_reason(jnp.result_type(x))):
            return super().__call__(x, key=key, inference=inference)
        # An array of a module is a leaf that Equinox differentiates by, and here gives it zero.
        rate = jax.lax.stop_gradient(self.p) if isinstance(self.p, jax.Array) else self.p
        return jaxkern.dropout(x, rate, key, implementation=self.implementation)


class Linear(_OnOps, eqx.nn.Linear):
    """``eqx.nn.Linear`` on :func:`jaxkern.linear`.

    Args:
      in_features: K, the last axis of the input, or ``"scalar"``.
      out_features: N, the last axis of the result, or ``"scalar"``.
      use_bias: whether there is a bias.
      dtype: of the parameters; by default Equinox's.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.
      key: from which the initial values are drawn.
    """

    __init__ = _OnOps.__init__

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """x (..., in_features) -> (..., out_features)."""
        if "scalar" in (self.in_features, self.out_features):
            return super().__call__(x)
        x = jnp.asarray(x)
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"x must have shape (..., {self.in_features}), its last axis that of in_features; "
                f"got {x.shape}"
            )
        dtype = jnp.result_type(x, self.weight)
        if left_to_parent(self, dtype_reason(dtype, *_dtypes(self))):
            return _each(super().__call__, x, 1)
        return jaxkern.linear(
            x.astype(dtype), self.weight.T, self.bias, implementation=self.implementation
        )


class SwiGLU(eqx.Module):
    """The gated unit of Llama's blocks, down(silu(gate(x)) · up(x)).

    Args:
      features: K, the last axis of input and output.
      hidden_features: H, between the projections.
      use_bias: whether the projections have biases.
      dtype: of the parameters; by default Equinox's.
      implementation: of :func:`jaxkern.swiglu`; ``"xla"`` also for the projections.
      key: from which the initial values are drawn.
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    implementation: Implementation | None = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        hidden_features: int,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        implementation: Implementation | None = None,
        key: jax.Array,
    ):
        gate, up, down = jax.random.split(key, 3)
        options: Any = {"implementation": implementation_of_products(implementation)}
        self.gate_proj = Linear(features, hidden_features, use_bias, dtype, **options, key=gate)
        self.up_proj = Linear(features, hidden_features, use_bias, dtype, **options, key=up)
        self.down_proj = Linear(hidden_features, features, use_bias, dtype, **options, key=down)
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """x (..., K) -> the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(jaxkern.swiglu(gate, up, implementation=self.implementation))


class _BlockLayer(eqx.Module):
    """A layer of a kind of block, `_block`."""

    weights: Any
    sizes: Any = eqx.field(static=True)
    implementation: Implementation | None = eqx.field(static=True)
    _block: ClassVar[Block]

    def __init__(
        self,
        d_model: int,
        *,
        n_layers: int = 1,
        dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        key: jax.Array,
        **sizes: Unpack[SizeOptions],
    ):
        self.sizes = self._block.sizes(d_model, **sizes)
        inits = self._block.initializers(self.sizes, n_layers)
        keys = dict(zip(inits, jax.random.split(key, len(inits)), strict=True))
        weights = {name: init(keys[name], shape, dtype) for name, (init, shape) in inits.items()}
        self.weights = self._block.weights_from(weights)
        self.implementation = implementation

    @overload
    def __call__(
        self, x: jax.Array, cache: Any = None, *, return_cache: Literal[True], **options: Any
    ) -> tuple[jax.Array, Any]: ...

    @overload
    def __call__(self, x: jax.Array, cache: Any = None, **options: Any) -> jax.Array: ...

    def __call__(
        self,
        x: jax.Array,
        cache: Any = None,
        *,
        segment_ids: jax.Array | None = None,
        key: Any = None,
        **options: Any,
    ) -> Any:
        """x (L, D) or (B, L, D) -> the same shape; with `return_cache`, also the cache.

        Packed sequences end where `segment_ids` (L,) or (B, L), integers, change. Other options are
        those of :func:`jaxkern.nn.mamba.mamba`, :func:`jaxkern.nn.mamba2.mamba2` and
        :func:`jaxkern.nn.delta_net.delta_net`.
        """
        segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
        x = self._block.check_call(self.sizes, x, cache, segment_ids, ("L D", "B L D"))
        single = x.ndim == 2
        if single:
            x, cache, segment_ids = jax.tree.map(lambda a: a[None], (x, cache, segment_ids))
        options |= {"segment_ids": segment_ids, "implementation": self.implementation}
        out = self._block.apply(self.weights, self.sizes, x, cache, **options)
        return jax.tree.map(lambda a: a[0], out) if single else out

    def step(self, x: jax.Array, cache: Any, *, layer: Any = None) -> tuple[jax.Array, Any]:
        """One token: x (D,) or (B, D) -> the same shape, and the next cache.

        Of a `cache` with an axis of layers in front, `layer` says which is this block's.
        """
        x = self._block.check_call(self.sizes, x, cache, None, ("D", "B D"), layer)
        single, batch = x.ndim == 1, 0 if layer is None else 1
        if single:
            x, cache = x[None], jax.tree.map(lambda a: jnp.expand_dims(a, batch), cache)
        options: Any = {"layer": layer, "implementation": self.implementation}
        out, cache = self._block.step(self.weights, self.sizes, x, cache, **options)
        if single:
            out, cache = out[0], jax.tree.map(lambda a: jnp.squeeze(a, batch), cache)
        return out, cache

    def init_cache(self, batch_size: int | None = None) -> Any:
        """The cache before the first token; without `batch_size` that of a single sequence."""
        sequences = 1 if batch_size is None else batch_size
        cache = self._block.init_cache(self.sizes, sequences, jnp.float32)
        return jax.tree.map(lambda a: a[0], cache) if batch_size is None else cache


class Mamba(_BlockLayer):
    """The Mamba block, for whole sequences and token by token.

    Its leaves are those of :class:`jaxkern.nn.mamba.Weights`.

    Args:
      d_model, n_layers, implementation: as for :class:`jaxkern.nn.flax.Mamba`, and so are the
        others of :class:`jaxkern.nn.mamba.Sizes`.
      dtype: of the parameters.
      key: from which the initial values are drawn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.equinox import Mamba
      >>> block, x = Mamba(32, key=jax.random.key(0)), jnp.ones((5, 32))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[0], cache)  # the sixth token
      >>> out.shape
      (32,)
    """

    _block = mamba.BLOCK
    __init__ = takes_sizes(_BlockLayer.__init__, _block)


class Mamba2(_BlockLayer):
    """The Mamba-2 block, for whole sequences and token by token.

    Its leaves are those of :class:`jaxkern.nn.mamba2.Weights`.

    Args:
      d_model, n_layers, implementation: as for :class:`jaxkern.nn.flax.Mamba2`, and so are the
        others of :class:`jaxkern.nn.mamba2.Sizes`.
      dtype: of the parameters.
      key: from which the initial values are drawn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.equinox import Mamba2
      >>> block = Mamba2(64, headdim=32, key=jax.random.key(0))  # 4 heads
      >>> x = jnp.ones((5, 64))
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[0], cache)  # the sixth token
      >>> out.shape
      (64,)
    """

    _block = mamba2.BLOCK
    __init__ = takes_sizes(_BlockLayer.__init__, _block)


class GatedDeltaNet(_BlockLayer):
    """Gated DeltaNet, the linear attention of Qwen3-Next, on :func:`jaxkern.gated_delta_rule`.

    Its leaves are those of :class:`jaxkern.nn.delta_net.Weights`.

    Args:
      d_model, num_heads, num_key_heads, d_key, d_value, d_conv: as
        :class:`jaxkern.nn.delta_net.GatedDeltaNetSizes` has them.
      norm_eps, use_bias, use_conv_bias: as that class has them.
      n_layers, implementation: as for :class:`jaxkern.nn.flax.Mamba`.
      dtype: of the parameters.
      key: from which the initial values are drawn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.equinox import GatedDeltaNet
      >>> key, x = jax.random.key(0), jnp.ones((5, 64))
      >>> block = GatedDeltaNet(64, num_heads=4, num_key_heads=2, d_key=16, d_value=32, key=key)
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[0], cache)  # the sixth token
      >>> out.shape
      (64,)
    """

    _block = delta_net.GATED_DELTA_NET
    __init__ = takes_sizes(_BlockLayer.__init__, _block)


class KimiDeltaAttention(_BlockLayer):
    """Kimi Delta Attention, of Kimi Linear, on :func:`jaxkern.gated_delta_rule`.

    Its leaves are those of :class:`jaxkern.nn.delta_net.Weights`.

    Args:
      d_model, num_heads, d_key, d_value, d_conv, gate_rank, norm_eps, use_bias, use_conv_bias: as
        :class:`jaxkern.nn.delta_net.KimiDeltaAttentionSizes` has them.
      n_layers, implementation: as for :class:`jaxkern.nn.flax.Mamba`.
      dtype: of the parameters.
      key: from which the initial values are drawn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn.equinox import KimiDeltaAttention
      >>> key, x = jax.random.key(0), jnp.ones((5, 64))
      >>> block = KimiDeltaAttention(64, num_heads=4, d_key=16, d_value=32, key=key)
      >>> out, cache = block(x, return_cache=True)
      >>> out, cache = block.step(x[0], cache)  # the sixth token
      >>> out.shape
      (64,)
    """

    _block = delta_net.KIMI_DELTA_ATTENTION
    __init__ = takes_sizes(_BlockLayer.__init__, _block)


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


def _normalised(
    layer: Any, op: Callable[..., Any], parent: Callable[..., Any], x: Any, state: Any
) -> Any:
    """Normalises `x` by `op` over the axes of the layer's shape, or else by `parent`.

    As Equinox's norms do, it returns a `state` that is given, too.
    """
    x = jnp.asarray(x)
    lead = x.ndim - len(layer.shape)
    if lead < 0 or x.shape[lead:] != layer.shape:
        raise ValueError(
            f"x must have shape (..., {', '.join(map(str, layer.shape))}), its last axes those of "
            f"the layer; got {x.shape}"
        )
    if left_to_parent(layer, dtype_reason(x.dtype, *_dtypes(layer))):
        out = _each(parent, x, len(layer.shape))
    else:
        rows = x.reshape(*x.shape[:lead], math.prod(layer.shape))
        params = (None if p is None else p.reshape(-1) for p in (layer.weight, layer.bias))
        out = op(rows, *params, eps=layer.eps, implementation=layer.implementation)
        out = out.reshape(x.shape)
    return out if state is _ABSENT else (out, state)


def _each(parent: Callable[..., Any], x: jax.Array, ndim: int) -> jax.Array:
    """Applies Equinox's own computation to every example, the last `ndim` axes of `x`."""
    for _ in range(x.ndim - ndim):
        parent = jax.vmap(parent)
    return parent(x)


def _dtypes(layer: Any) -> list[Any]:
    return [param.dtype for param in (layer.weight, layer.bias) if param is not None]
