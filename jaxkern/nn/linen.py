"""Layers for flax.linen on jaxkern's ops.

`RMSNorm`, `LayerNorm`, `Dropout` and `Dense` are flax's own classes with another `__call__`: the
same attributes, parameters and initial values, and `implementation` besides. What the ops do not
compute, flax does, as in :mod:`jaxkern.nn.flax`; so do `dtype` and `param_dtype` mean the same.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.nn import mamba
from jaxkern.nn.common import dropout_reason, left_to_flax, norm_reason

try:
    from flax import linen as nn
    from flax.linen.dtypes import canonicalize_dtype
except ImportError as error:
    raise ImportError('jaxkern.nn.linen needs flax; run: pip install "jaxkern[flax]"') from error


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` on :func:`jaxkern.rms_norm`.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are those of
        ``nn.RMSNorm``.

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
        if left_to_flax(self, norm_reason(self, x, mask)):
            return super().__call__(x, mask=mask)
        scale = _scale(self, x)
        x, dtype = _promoted(self.dtype, x, scale)
        out = jaxkern.rms_norm(x, scale, eps=self.epsilon, implementation=self.implementation)
        return out.astype(dtype)


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` on :func:`jaxkern.layer_norm`.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are those of
        ``nn.LayerNorm``. The variance is always summed in float32 from the differences to the mean.
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., N) -> the same shape."""
        if left_to_flax(self, norm_reason(self, x, mask)):
            return super().__call__(x, mask=mask)
        scale = _scale(self, x)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (x.shape[-1],), self.param_dtype)
        x, dtype = _promoted(self.dtype, x, scale, bias)
        out = jaxkern.layer_norm(
            x, scale, bias, eps=self.epsilon, implementation=self.implementation
        )
        return out.astype(dtype)


class Dropout(nn.Dropout):
    """``nn.Dropout`` on :func:`jaxkern.dropout`, which stores no mask.

    The mask is drawn by another generator than flax's, so that it is another one for the same key.

    Attributes:
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest; the others are those of
        ``nn.Dropout``.
    """

    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self, inputs: jax.Array, deterministic: bool | None = None, rng: Any = None
    ) -> jax.Array:
        """Any shape -> the same."""
        left = left_to_flax(self, dropout_reason(self))
        given = (self.deterministic, deterministic)
        if left or self.rate == 0 or not (False in given and None in given):
            return super().__call__(inputs, deterministic=deterministic, rng=rng)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        return jaxkern.dropout(inputs, self.rate, key, implementation=self.implementation)


class Dense(nn.Dense):
    """``nn.Dense`` on jaxkern's linear layer, with its attributes."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """inputs (..., K) -> (..., N)."""
        if self.dot_general is not None or self.dot_general_cls is not None:
            return super().__call__(inputs)
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return jaxkern.linear(promoted[0], kernel, bias, precision=self.precision)


class SwiGLU(nn.Module):
    """The gated unit of Llama's blocks, down(silu(gate(x)) · up(x)).

    Attributes:
      hidden_features: H, between the projections.
      use_bias: whether the projections have biases.
      dtype: of the computation, as in ``nn.Dense``.
      param_dtype: of the parameters.
      implementation: of :func:`jaxkern.swiglu`.
    """

    hidden_features: int
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., K) -> the same shape."""

        def dense(features: int, name: str) -> Dense:
            return Dense(features, self.use_bias, self.dtype, self.param_dtype, name=name)

        gate, up = (dense(self.hidden_features, name)(x) for name in ("gate_proj", "up_proj"))
        hidden = jaxkern.swiglu(gate, up, implementation=self.implementation)
        return dense(x.shape[-1], "down_proj")(hidden)


class Mamba(nn.Module):
    """The Mamba block, for whole sequences and token by token.

    Attributes:
      d_model, d_state, d_conv, expand, dt_rank, n_layers, dtype, param_dtype, implementation: as
        for :class:`jaxkern.nn.flax.Mamba`.

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

    def setup(self):
        inits = mamba.initializers(self._sizes(), self.n_layers)
        for name, (init, shape) in inits.items():
            setattr(self, name, self.param(name, init, shape, self.param_dtype))

    def __call__(
        self,
        x: jax.Array,
        cache: mamba.Cache | None = None,
        *,
        return_cache: bool = False,
        segment_ids: jax.Array | None = None,
    ) -> Any:
        """x (B, L, D) -> the same shape; with `return_cache`, also the cache for what follows."""
        return mamba.mamba(
            self._weights(),
            x,
            cache,
            return_cache=return_cache,
            dtype=self.dtype,
            segment_ids=segment_ids,
            implementation=self.implementation,
        )

    def step(self, x: jax.Array, cache: mamba.Cache) -> tuple[jax.Array, mamba.Cache]:
        """One token: x (B, D) -> the same shape, and the next cache."""
        return mamba.mamba_step(self._weights(), x, cache, dtype=self.dtype)

    def init_cache(self, batch_size: int) -> mamba.Cache:
        """The cache before the first token."""
        dtype = jnp.float32 if self.dtype is None else self.dtype
        return mamba.init_cache(self._sizes(), batch_size, dtype)

    def _sizes(self) -> mamba.Sizes:
        sizes = self.d_model, self.d_state, self.d_conv, self.expand, self.dt_rank
        return mamba.Sizes(*sizes, self.use_bias, self.use_conv_bias)

    def _weights(self) -> mamba.Weights:
        weights: Any = {name: getattr(self, name, None) for name in mamba.Weights._fields}
        return mamba.Weights(**weights)


def _scale(layer: Any, x: jax.Array) -> jax.Array | None:
    if not layer.use_scale:
        return None
    return layer.param("scale", layer.scale_init, (x.shape[-1],), layer.param_dtype)


def _promoted(dtype: Any, x: jax.Array, *params: Any) -> tuple[jax.Array, Any]:
    """`x` so that the result is rounded once, and the dtype that flax's result has."""
    dtype = canonicalize_dtype(x, *params, dtype=dtype)
    return x.astype(jnp.promote_types(x.dtype, dtype)), dtype
