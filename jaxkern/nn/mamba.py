r"""The Mamba block: functions of arrays, shared by the layers and the language model::

    u, z = in_proj(x)                                        (B, L, E) each
    u    = silu(causal_conv1d(u))
    r, B, C = x_proj(u)                                      (B, L, R), 2 × (B, L, N)
    y    = selective_scan(u, dt_proj(r), A, B, C, D, z)      A = −exp(A_log), the step sizes
    out  = out_proj(y)                                       softplus(dt + dt_bias)

with E inner channels, R the rank of the step sizes, N states. Products, convolution and gate run in
the compute dtype; A, D and dt_bias enter the scan in their own.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752; the initial values are those of the paper's own code.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.nn import common
from jaxkern.nn.common import Block, Initializer


class Weights(NamedTuple):
    """A block's parameters; matrices multiply from the right, as in ``x @ in_proj``."""

    in_proj: jax.Array  # (D, 2 E)
    conv_weight: jax.Array  # (E, W)
    conv_bias: jax.Array | None  # (E,)
    x_proj: jax.Array  # (E, R + 2 N)
    dt_proj: jax.Array  # (R, E)
    dt_bias: jax.Array  # (E,)
    A_log: jax.Array  # (E, N)
    D: jax.Array  # (E,)
    out_proj: jax.Array  # (E, D)
    in_bias: jax.Array | None = None  # (2 E,)
    out_bias: jax.Array | None = None  # (D,)


class Cache(NamedTuple):
    """The state that a block carries from token to token: zeros before the first."""

    conv: jax.Array  # (B, W - 1, E), the convolution's last inputs
    scan: jax.Array  # (B, E, N), float32, the state


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A block's dimensions, in the names of the paper's own code.

    Attributes:
      d_model: D, the width of input and output.
      d_state: N, states a channel.
      d_conv: W, taps of the convolution.
      expand: inner channels, E = expand · D.
      dt_rank: R, the rank of the step sizes; ``None`` for D / 16, rounded up.
      use_bias: whether the input and output projections have biases.
      use_conv_bias: whether the convolution has one.
    """

    d_model: int
    _: dataclasses.KW_ONLY
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | None = None
    use_bias: bool = False
    use_conv_bias: bool = True

    @property
    def d_inner(self) -> int:
        """E, the inner channels."""
        return self.expand * self.d_model

    @property
    def rank(self) -> int:
        """R, the rank of the step sizes."""
        return math.ceil(self.d_model / 16) if self.dt_rank is None else self.dt_rank


def initializers(sizes: Sizes, n_layers: int = 1) -> dict[str, tuple[Initializer, tuple[int, ...]]]:
    """The initial values of each of :class:`Weights`, and its shape.

    Args:
      sizes: the block's dimensions.
      n_layers: how many blocks add to one residual stream; `out_proj` begins smaller by its root,
        so that the stream's variance does not grow with depth.
    """
    d, e, n, w, r = sizes.d_model, sizes.d_inner, sizes.d_state, sizes.d_conv, sizes.rank
    inits = {
        "in_proj": (_uniform(d**-0.5), (d, 2 * e)),
        "conv_weight": (_uniform(w**-0.5), (e, w)),
        "conv_bias": (_uniform(w**-0.5), (e,)),
        "x_proj": (_uniform(e**-0.5), (e, r + 2 * n)),
        "dt_proj": (_uniform(r**-0.5), (r, e)),
        "dt_bias": (_dt_bias, (e,)),
        "out_proj": (_uniform(e**-0.5 * n_layers**-0.5), (e, d)),
        "A_log": (_a_log, (e, n)),
        "D": (lambda key, shape, dtype: jnp.ones(shape, dtype), (e,)),
    }
    if not sizes.use_conv_bias:
        del inits["conv_bias"]
    if sizes.use_bias:
        inits |= {"in_bias": (_zeros, (2 * e,)), "out_bias": (_zeros, (d,))}
    return inits


def _uniform(bound: float) -> Initializer:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.zeros(shape, dtype)


def _dt_bias(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws dt_bias so that softplus(dt_bias) is log-uniform in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)


def _a_log(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.log(jnp.tile(jnp.arange(1.0, shape[1] + 1), (shape[0], 1))).astype(dtype)


def mamba(
    weights: Weights,
    x: jax.Array,
    cache: Cache | None = None,
    *,
    return_cache: bool = False,
    dtype: Any = None,
    segment_ids: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """A Mamba block over whole sequences.

    Args:
      weights: the parameters.
      x: (B, L, D).
      cache: what earlier tokens left; ``None`` for none.
      return_cache: whether to return the cache for the tokens that follow, too.
      dtype: of the products; by default what `x` and `in_proj` promote to.
      segment_ids: (B, L), integers, for packed sequences: where the number changes, convolution and
        state begin anew. `cache` is of the segment of the first token.
      implementation: of the ops: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.

    Returns:
      (B, L, D), in `dtype`; with `return_cache` a pair of it and the cache, in the dtypes of
      `cache` if one is given.

    Raises:
      TypeError: `x` is complex, or `cache` not a cache.
      ValueError: a shape does not fit.
    """
    x = check_call(weights, x, cache, segment_ids, ("B L D",))
    project, x = _projection(implementation), _cast(x, weights, dtype)
    # Two products, as the halves of one would be copied apart, and their gradients together; XLA
    # makes one of two that have an operand in common.
    to_u, to_z = jnp.split(weights.in_proj, 2, axis=-1)
    of_u, of_z = (None, None) if weights.in_bias is None else jnp.split(weights.in_bias, 2)
    u = project(x, to_u, of_u)  # (B, L, E)
    z = project(jax.lax.optimization_barrier(x), to_z, of_z)  # (B, L, E)
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "return_final_state": return_cache,
        "implementation": implementation,
    }
    conv: Any = None if cache is None else cache.conv
    u: Any = jaxkern.causal_conv1d(
        u, *_filter(weights, u.dtype), activation="silu", initial_state=conv, **options
    )
    if return_cache:
        u, conv = u
    state: Any = None if cache is None else cache.scan
    arrays: Any = u, *_parameters(weights, u, project), z
    step_sizes: Any = {"dt_bias": weights.dt_bias, "dt_softplus": True}
    y: Any = jaxkern.selective_scan(*arrays, initial_state=state, **step_sizes, **options)
    if not return_cache:
        return project(y, weights.out_proj, weights.out_bias)
    y, state = y
    if cache is not None:  # so that a loop can carry it
        conv, state = conv.astype(cache.conv.dtype), state.astype(cache.scan.dtype)
    return project(y, weights.out_proj, weights.out_bias), Cache(conv, state)


def mamba_step(
    weights: Weights,
    x: jax.Array,
    cache: Cache,
    *,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cache]:
    """A Mamba block for one token, x (B, D): its output (B, D) and the next cache.

    Args and errors are those of :func:`mamba`; convolution and scan are plain JAX, whatever the
    `implementation` of the products.
    """
    x = check_call(weights, x, cache, None, ("B D",))
    project = _projection(implementation)
    projected = project(_cast(x, weights, dtype), weights.in_proj, weights.in_bias)  # (B, 2 E)
    u, z = jnp.split(projected, 2, axis=-1)  # (B, E) each
    u, conv = jaxkern.causal_conv1d_step(
        cache.conv, u, *_filter(weights, u.dtype), activation="silu"
    )
    arrays: Any = u, *_parameters(weights, u, project), z
    step_sizes: Any = {"dt_bias": weights.dt_bias, "dt_softplus": True}
    y, state = jaxkern.selective_scan_step(cache.scan, *arrays, **step_sizes)
    state = state.astype(cache.scan.dtype)
    return project(y, weights.out_proj, weights.out_bias), Cache(conv, state)


def check_call(
    weights: Weights, x: Any, cache: Cache | None, segment_ids: Any, forms: tuple[str, ...]
) -> jax.Array:
    """Returns `x` as an array; args and errors are those of ``common.check_call``."""
    (inner, width), states = weights.conv_weight.shape, weights.A_log.shape[1]
    shapes = Cache._make(((width - 1, inner), (inner, states)))
    return common.check_call(x, weights.in_proj.shape[0], cache, shapes, segment_ids, forms)


def init_cache(sizes: Sizes, batch_size: int, dtype: Any) -> Cache:
    """The cache before the first token; `dtype` is that of the products."""
    return Cache(
        jnp.zeros((batch_size, sizes.d_conv - 1, sizes.d_inner), dtype),
        jnp.zeros((batch_size, sizes.d_inner, sizes.d_state), jnp.float32),
    )


def _cast(x: jax.Array, weights: Weights, dtype: Any) -> jax.Array:
    return x.astype(jnp.result_type(x, weights.in_proj) if dtype is None else dtype)


def _projection(implementation: Implementation | None) -> Callable[..., jax.Array]:
    """The product with a matrix, of a block made for `implementation`."""
    of_products = common.implementation_of_products(implementation)
    return lambda *args: jaxkern.linear(*args, implementation=of_products)


def _filter(weights: Weights, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """The convolution's weight (E, W) and bias (E,), in `dtype`."""
    bias = weights.conv_bias
    return weights.conv_weight.astype(dtype), None if bias is None else bias.astype(dtype)


def _parameters(
    weights: Weights, u: jax.Array, project: Callable[..., jax.Array]
) -> tuple[jax.Array, ...]:
    """dt (..., E), A (E, N), B and C (..., N) and D (E,) of the scan, from its input u (..., E)."""
    r, n = weights.dt_proj.shape[0], weights.A_log.shape[1]
    low_rank, B, C = jnp.split(project(u, weights.x_proj), [r, r + n], axis=-1)
    # In float32 at least: exp would lose digits in a narrow dtype.
    A = -jnp.exp(weights.A_log.astype(jnp.promote_types(weights.A_log.dtype, jnp.float32)))
    return project(low_rank, weights.dt_proj), A, B, C, weights.D


BLOCK = Block("mamba", Sizes, Weights, initializers, init_cache, check_call, mamba, mamba_step)
"""Mamba, as a kind of block."""
