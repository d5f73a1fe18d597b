r"""The Mamba block: functions of arrays, shared by the layers and the language model::

    u, z = in_proj(x)                                        (B, L, E) each
    u    = silu(causal_conv1d(u))
    r, B, C = x_proj(u)                                      (B, L, R), 2 × (B, L, N)
    y    = selective_scan(u, dt_proj(r), A, B, C, D, z)      A = −exp(A_log), the step sizes
    out  = out_proj(y)                                       softplus(dt + dt_bias)

with E inner channels, R the rank of the step sizes, N states. Products, convolution and gate run in
the compute dtype; A, D and dt_bias enter the scan in their own.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752; the initial values are as in the paper's own code.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.core.arguments import check_integer
from jaxkern.core.dispatch import Implementation
from jaxkern.core.kernel_pass import named
from jaxkern.nn import common
from jaxkern.nn.collectives import add_parts, whole_beside
from jaxkern.nn.common import Block, Initial
from jaxkern.ops.columns import Columns
from jaxkern.ops.selective_scan.reference import CHUNK, DEFAULT_CHECKPOINT_EVERY


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
    A: jax.Array | None = None  # (E, N), −exp(A_log) where it is already computed


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

    Raises:
      TypeError: a value is of another type.
      ValueError: a number is less than 1.
    """

    d_model: int
    _: dataclasses.KW_ONLY
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int | None = None
    use_bias: bool = False
    use_conv_bias: bool = True

    def __post_init__(self):
        common.check_sizes(self)

    @property
    def d_inner(self) -> int:
        """E, the inner channels."""
        return self.expand * self.d_model

    @property
    def rank(self) -> int:
        """R, the rank of the step sizes."""
        return math.ceil(self.d_model / 16) if self.dt_rank is None else self.dt_rank


def initializers(sizes: Sizes, n_layers: int = 1) -> dict[str, Initial]:
    """The initial values of each of :class:`Weights`, and its shape.

    Args:
      sizes: the block's dimensions.
      n_layers: how many blocks add to one residual stream; `out_proj` begins smaller by its root,
        so that the stream's variance does not grow with depth.
    """
    n_layers = check_integer("n_layers", n_layers, minimum=1)
    d, e, n, w, r = sizes.d_model, sizes.d_inner, sizes.d_state, sizes.d_conv, sizes.rank
    inits = {
        "in_proj": (common.uniform(d**-0.5), (d, 2 * e)),
        "conv_weight": (common.uniform(w**-0.5), (e, w)),
        "conv_bias": (common.uniform(w**-0.5), (e,)),
        "x_proj": (common.uniform(e**-0.5), (e, r + 2 * n)),
        "dt_proj": (common.uniform(r**-0.5), (r, e)),
        "dt_bias": (common.dt_bias, (e,)),
        "out_proj": (common.uniform(e**-0.5 * n_layers**-0.5), (e, d)),
        "A_log": (_a_log, (e, n)),
        "D": (common.ones, (e,)),
    }
    if not sizes.use_conv_bias:
        del inits["conv_bias"]
    if sizes.use_bias:
        inits |= {"in_bias": (common.zeros, (2 * e,)), "out_bias": (common.zeros, (d,))}
    return inits


def _a_log(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.log(jnp.tile(jnp.arange(1.0, shape[1] + 1), (shape[0], 1))).astype(dtype)


def mamba(
    weights: Weights,
    sizes: Sizes,
    x: jax.Array,
    cache: Cache | None = None,
    *,
    return_cache: bool = False,
    dtype: Any = None,
    segment_ids: jax.Array | None = None,
    isolate_nan: bool = True,
    axis_name: str | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    norm: common.Norm | None = None,
    checkpoint_every: int | None = DEFAULT_CHECKPOINT_EVERY,
    implementation: Implementation | None = None,
) -> Any:
    """A Mamba block over whole sequences.

    Args:
      weights: the parameters.
      sizes: the block's dimensions.
      x: (B, L, D).
      cache: what earlier tokens left; ``None`` for none.
      return_cache: whether to return the cache for the tokens that follow, too.
      dtype: of the products; by default what `x` and `in_proj` promote to.
      segment_ids: (B, L), integers, for packed sequences: where the number changes, convolution and
        state begin anew. `cache` is of the segment of the first token.
      isolate_nan: as of :func:`jaxkern.nn.mamba2.mamba2`; here a NaN stays in its segment without.
      axis_name: inside ``jax.shard_map(check_vma=False)``, the mesh axis over which the channels E
        are split: `weights` are a device's part of them, of `in_proj` its columns of u and of z,
        and `x` and the result are the same on every device. A block then adds up twice over the
        axis, forward and backward: what `x_proj` gives, and what `out_proj` gives.
      sequence_axis: inside ``jax.shard_map``, the mesh axis, or axes, over which L is split: `x`
        and `segment_ids` are a device's part of L, `weights` and `cache` the same on every device,
        as is the cache that is returned. See :func:`jaxkern.selective_scan`.
      norm: the norm before the block, for the block to compute, so that its result is not kept for
        the backward: `x` is added to ``norm.residual``, if any, and normalised first, as by
        :func:`jaxkern.rms_norm`.
      checkpoint_every: of the scan, see :func:`jaxkern.selective_scan`.
      implementation: of the ops: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.

    Returns:
      (B, L, D), in `dtype`; with ``norm.residual`` a pair of it and the sum of x and that. With
      `return_cache` a pair of that and the cache, in the dtypes of `cache` if one is given.

    Raises:
      TypeError: `x` is complex, `cache` not a cache, or an option of another type.
      ValueError: a shape does not fit, L cannot be split so, or there is no such axis.
    """
    common.check_options(axis_name, return_cache=return_cache, isolate_nan=isolate_nan)
    x = BLOCK.check_call(sizes, x, cache, segment_ids, ("B L D",))
    weights = whole_beside(weights, x)
    project = common.projection(implementation)
    x, at = common.cast(x, weights, dtype), [weights.in_proj.shape[-1] // 2]
    (u, z), h = common.project_in(weights, x, at, norm, axis_name, implementation)
    u, z = named("mamba_in_proj", (u, z))  # (B, L, E) each
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "return_final_state": return_cache,
        "sequence_axis": sequence_axis,
        "implementation": implementation,
    }
    (u,), conv = common.convolved(weights, cache, [u], [], options)
    u = named("mamba_conv", u)
    state: Any = None if cache is None else cache.scan
    arrays: Any = u, *_parameters(weights, sizes, u, project, axis_name), z
    options |= {"dt_bias": weights.dt_bias, "dt_softplus": True, "out_weight": weights.out_proj}
    options |= {"checkpoint_every": checkpoint_every}
    out: Any = jaxkern.selective_scan(*arrays, initial_state=state, **options)
    if return_cache:
        out, state = out
    out = common.projected_out(out, weights, axis_name)
    return common.results(out, h, Cache(conv, state) if return_cache else None, cache)


def mamba_step(
    weights: Weights,
    sizes: Sizes,
    x: jax.Array,
    cache: Cache,
    *,
    dtype: Any = None,
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cache]:
    """A Mamba block for one token, x (B, D): its output (B, D) and the next cache.

    Args and errors are as for :func:`mamba`, and `layer` for :func:`jaxkern.selective_scan_step`:
    which of the layers of `cache` is this block's, where its arrays have an axis of layers in
    front. Convolution and scan run as their steps do by default.
    """
    x = BLOCK.check_call(sizes, x, cache, None, ("B D",), layer)
    project, x = common.projection(implementation), common.cast(x, weights, dtype)
    projected = project(x, weights.in_proj, weights.in_bias)  # (B, 2 E)
    u, z = (Columns(projected, at, (sizes.d_inner,)) for at in (0, sizes.d_inner))
    u, conv = common.convolved_step(weights, cache, u, layer, implementation)
    arrays: Any = u, *_parameters(weights, sizes, u, project, columns=True), z
    options: Any = {"dt_bias": weights.dt_bias, "dt_softplus": True, "layer": layer}
    options |= {"implementation": common.implementation_of_products(implementation)}
    y, state = jaxkern.selective_scan_step(cache.scan, *arrays, **options)
    state = state.astype(cache.scan.dtype)
    return project(y, weights.out_proj, weights.out_bias), Cache(conv, state)


def init_cache(sizes: Sizes, batch_size: int, dtype: Any) -> Cache:
    """The cache before the first token; `dtype` is the dtype of the products."""
    return Cache(
        jnp.zeros((batch_size, sizes.d_conv - 1, sizes.d_inner), dtype),
        jnp.zeros((batch_size, sizes.d_inner, sizes.d_state), jnp.float32),
    )


def _parameters(
    weights: Weights,
    sizes: Sizes,
    u: jax.Array,
    project: Callable[..., jax.Array],
    axis_name: str | None = None,
    columns: bool = False,
) -> tuple[Any, ...]:
    """dt (..., E), A (E, N), B and C (..., N) and D (E,) of the scan, from its input u (..., E).

    With `columns` B and C (B, 1, N) are columns of one row, for a step.
    """
    at = [sizes.rank, sizes.rank + sizes.d_state]
    projected = add_parts(project(u, weights.x_proj), axis_name)  # (..., R + 2 N)
    projected = named("mamba_x_proj", projected)
    if columns:
        low_rank = projected[:, : sizes.rank]
        B, C = (Columns(projected, first, (1, sizes.d_state)) for first in at)
    else:
        low_rank, B, C = jnp.split(projected, at, axis=-1)
    return project(low_rank, weights.dt_proj), common.decay_rates(weights), B, C, weights.D


BLOCK = Block(
    *("mamba", Sizes, Weights, initializers, init_cache, mamba, mamba_step),
    chunk=CHUNK,
)
"""Mamba, as a kind of block."""
