r"""The Mamba-2 block: functions of arrays, for the layers and the language model::

    z, u, v, dt = in_proj(x)                         2 × (B, L, E), (B, L, 2 G N), (B, L, H)
    u           = silu(causal_conv1d(u))
    B, C        = silu(causal_conv1d(v))             2 × (B, L, G N)
    y           = ssd(u, dt, A, B, C, D)             A = −exp(A_log), the step sizes
    y           = rms_norm(y · silu(z)) by groups    softplus(dt + dt_bias)
    out         = out_proj(y)

with E = H · P inner channels in H heads, G groups of heads that share B and C, N states. Products,
convolution and norm run in the compute dtype; A, D and dt_bias enter the scan in their own. The
columns of `in_proj` are as in the paper's own code: z, x, B, C, dt. That convolves x, B and C as
one array; of two convolutions x need not be copied out for the scan, nor its gradient back.

Source: Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060; the initial values are as in
the paper's own code.
"""

import dataclasses
import math
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
from jaxkern.ops.norm.op import Settings
from jaxkern.ops.scan_options import StepSizes
from jaxkern.ops.ssd.reference import DEFAULT_CHECKPOINT_EVERY


class Weights(NamedTuple):
    """A block's parameters; matrices multiply from the right, as in ``x @ in_proj``."""

    in_proj: jax.Array  # (D, 2 E + 2 G N + H)
    conv_weight: jax.Array  # (E + 2 G N, W)
    conv_bias: jax.Array | None  # (E + 2 G N,)
    dt_bias: jax.Array  # (H,)
    A_log: jax.Array  # (H,)
    D: jax.Array  # (H,) or (H, P)
    norm_weight: jax.Array  # (E,)
    out_proj: jax.Array  # (E, D)
    in_bias: jax.Array | None = None  # (2 E + 2 G N + H,)
    out_bias: jax.Array | None = None  # (D,)
    A: jax.Array | None = None  # (H,), −exp(A_log) where it is already computed


class Cache(NamedTuple):
    """The state that a block carries from token to token: zeros before the first."""

    conv: jax.Array  # (B, W - 1, E + 2 G N), the convolution's last inputs
    scan: jax.Array  # (B, H, P, N), float32, the state


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A block's dimensions, in the names of the paper's own code.

    Attributes:
      d_model: D, the width of input and output.
      d_state: N, states a channel.
      d_conv: W, taps of the convolution.
      expand: inner channels, E = expand · D.
      headdim: P, channels a head, a divisor of E.
      ngroups: G, groups of heads that share B and C, a divisor of H = E / P.
      norm_groups: groups of channels that are normalised together, a divisor of E; ``None`` for G.
      norm_eps: added to the mean square of such a group.
      dt_limit: the least and the largest step size.
      use_bias: whether the input and output projections have biases.
      use_conv_bias: whether the convolution has one.

    Raises:
      TypeError: a value is of another type.
      ValueError: a number is less than 1, does not divide what it must, `norm_eps` is not above 0,
        or `dt_limit` not in order.
    """

    d_model: int
    _: dataclasses.KW_ONLY
    d_state: int = 128
    d_conv: int = 4
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    norm_groups: int | None = None
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
    use_bias: bool = False
    use_conv_bias: bool = True

    def __post_init__(self):
        common.check_sizes(self)
        common.check_divides("headdim", self.headdim, "E = expand · d_model", self.d_inner)
        common.check_divides("ngroups", self.ngroups, "H = E / headdim", self.heads)
        if self.norm_groups is not None:
            common.check_divides(
                "norm_groups", self.norm_groups, "E = expand · d_model", self.d_inner
            )
        limits = StepSizes.checked(True, self.dt_limit)
        object.__setattr__(self, "dt_limit", (limits.low, limits.high))  # of a list, say

    @property
    def d_inner(self) -> int:
        """E, the inner channels."""
        return self.expand * self.d_model

    @property
    def heads(self) -> int:
        """H, the heads."""
        return self.d_inner // self.headdim

    @property
    def d_bc(self) -> int:
        """G · N, the width of B, and of C."""
        return self.ngroups * self.d_state

    @property
    def d_convolved(self) -> int:
        """E + 2 G N, the channels of the convolution: x, B and C."""
        return self.d_inner + 2 * self.d_bc


def _of_device(weights: Weights, sizes: Sizes) -> Sizes:
    """The dimensions of the part of a block that `weights` are, by their shapes: as if D were E."""
    inner = weights.norm_weight.shape[-1]
    groups = (weights.conv_weight.shape[0] - inner) // (2 * sizes.d_state)
    of_part: dict[str, Any] = {"d_model": inner, "expand": 1, "ngroups": groups}
    return dataclasses.replace(sizes, **of_part, norm_groups=None)


def initializers(sizes: Sizes, n_layers: int = 1) -> dict[str, Initial]:
    """Initial values and shapes of :class:`Weights`; `n_layers` as in :mod:`jaxkern.nn.mamba`."""
    n_layers = check_integer("n_layers", n_layers, minimum=1)
    d, e, h, u, w = sizes.d_model, sizes.d_inner, sizes.heads, sizes.d_convolved, sizes.d_conv
    inits = {
        "in_proj": (common.uniform(d**-0.5), (d, e + u + h)),
        "conv_weight": (common.uniform(w**-0.5), (u, w)),
        "conv_bias": (common.uniform(w**-0.5), (u,)),
        "dt_bias": (common.dt_bias, (h,)),
        "A_log": (common.a_log(1), (h,)),
        "D": (common.ones, (h,)),
        "norm_weight": (common.ones, (e,)),
        "out_proj": (common.uniform(e**-0.5 * n_layers**-0.5), (e, d)),
    }
    if not sizes.use_conv_bias:
        del inits["conv_bias"]
    if sizes.use_bias:
        inits |= {"in_bias": (common.zeros, (e + u + h,)), "out_bias": (common.zeros, (d,))}
    return inits


def init_cache(sizes: Sizes, batch_size: int, dtype: Any) -> Cache:
    """The cache before the first token; `dtype` is the dtype of the products."""
    return Cache(
        jnp.zeros((batch_size, sizes.d_conv - 1, sizes.d_convolved), dtype),
        jnp.zeros((batch_size, sizes.heads, sizes.headdim, sizes.d_state), jnp.float32),
    )


def mamba2(
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
    implementation: Implementation | None = None,
) -> Any:
    """A Mamba-2 block over whole sequences.

    Arguments, results and errors are as for :func:`jaxkern.nn.mamba.mamba`, but for

    Args:
      isolate_nan: whether a NaN surely stays in its segment, for which the host waits on a GPU: see
        :func:`jaxkern.ssd`.
      axis_name: inside ``jax.shard_map(check_vma=False)``, the mesh axis over which the heads are
        split: `weights` are a device's part of them, of `in_proj` its columns of z, x and dt and
        the columns of B and C that its heads need, and `x` and the result are the same on every
        device. A block then adds up over the axis, forward and backward, what `out_proj` gives;
        and the mean squares of the norm, where a group of channels is on several devices.
    """
    common.check_options(axis_name, return_cache=return_cache, isolate_nan=isolate_nan)
    x = BLOCK.check_call(sizes, x, cache, segment_ids, ("B L D",))
    weights = whole_beside(weights, x)
    part = sizes if axis_name is None else _of_device(weights, sizes)
    x, at = common.cast(x, weights, dtype), [part.d_inner, 2 * part.d_inner]
    (z, u, small), h = common.project_in(weights, x, at, norm, axis_name, implementation)
    v, dt = jnp.split(small, [2 * part.d_bc], axis=-1)
    # A policy saves these: z and u (B, L, E), v (B, L, 2 G N), dt (B, L, H).
    z, u, v, dt = named("mamba_in_proj", (z, u, v, dt))
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "return_final_state": return_cache,
        "sequence_axis": sequence_axis,
        "implementation": implementation,
    }
    (u, v), conv = common.convolved(weights, cache, [u, v], [part.d_inner], options)
    v = named("mamba_conv", v)
    state: Any = None if cache is None else cache.scan
    y: Any = jaxkern.ssd(
        *_scanned(weights, part, u, v, dt),
        initial_state=state,
        isolate_nan=isolate_nan,
        **_step_sizes(weights, sizes),
        **options,
    )
    if return_cache:
        y, state = y
    out = _project_out(weights, sizes, y, z, axis_name, implementation)
    return common.results(out, h, Cache(conv, state) if return_cache else None, cache)


def mamba2_step(
    weights: Weights,
    sizes: Sizes,
    x: jax.Array,
    cache: Cache,
    *,
    dtype: Any = None,
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cache]:
    """A Mamba-2 block for one token, x (B, D): its output (B, D) and the next cache.

    Args and errors are as for :func:`mamba2`, and `layer` for :func:`jaxkern.ssd_step`: which of
    the layers of `cache` is this block's, where its arrays have an axis of layers in front.
    Convolution and scan run as their steps do by default.
    """
    x = BLOCK.check_call(sizes, x, cache, None, ("B D",), layer)
    project, x = common.projection(implementation), common.cast(x, weights, dtype)
    projected = project(x, weights.in_proj, weights.in_bias)  # (B, 2 E + 2 G N + H)
    inner, z = sizes.d_inner, projected[:, : sizes.d_inner]
    u = Columns(projected, inner, (sizes.d_convolved,))
    convolved, conv = common.convolved_step(weights, cache, u, layer, implementation)
    dt = Columns(projected, inner + sizes.d_convolved, (sizes.heads,))
    of_groups = sizes.ngroups, sizes.d_state
    B, C = (Columns(convolved, first, of_groups) for first in (inner, inner + sizes.d_bc))
    u = Columns(convolved, 0, (sizes.heads, sizes.headdim))
    scanned: Any = u, dt, common.decay_rates(weights), B, C, weights.D
    y, state = jaxkern.ssd_step(
        cache.scan,
        *scanned,
        **_step_sizes(weights, sizes),
        layer=layer,
        implementation=common.implementation_of_products(implementation),
    )
    out = _project_out(weights, sizes, y, z, None, implementation)
    return out, Cache(conv, state.astype(cache.scan.dtype))


def _scanned(
    weights: Weights, sizes: Sizes, u: jax.Array, v: jax.Array, dt: jax.Array
) -> tuple[Any, ...]:
    """x (…, H, P), dt, A, B (…, G, N), C and D of the scan, from what was convolved."""
    x = u.reshape(*u.shape[:-1], sizes.heads, sizes.headdim)
    v = v.reshape(*v.shape[:-1], 2, sizes.ngroups, sizes.d_state)
    B, C = v[..., 0, :, :], v[..., 1, :, :]
    return x, dt, common.decay_rates(weights), B, C, weights.D


def _step_sizes(weights: Weights, sizes: Sizes) -> dict[str, Any]:
    return {"dt_bias": weights.dt_bias, "dt_softplus": True, "dt_limit": sizes.dt_limit}


def _project_out(
    weights: Weights,
    sizes: Sizes,
    y: Any,
    z: Any,
    axis_name: str | None,
    implementation: Any,
) -> jax.Array:
    """out_proj of the norm of y · silu(z), y (…, H, P)."""
    y = y.reshape(z.shape)
    groups = sizes.ngroups if sizes.norm_groups is None else sizes.norm_groups
    group_size = sizes.d_inner // groups
    if axis_name is not None and group_size > z.shape[-1]:
        y = _norm_over_devices(y, z, weights.norm_weight, sizes, axis_name)
        out = common.projection(implementation)(y, weights.out_proj)
        return common.projected_out(out, weights, axis_name)
    arrays = y, weights.norm_weight, None, None, z
    settings = Settings(sizes.norm_eps, norm_before_gate=False, group_size=group_size)
    return common.project_out(weights, arrays, settings, axis_name, implementation)


def _norm_over_devices(
    y: jax.Array, z: jax.Array, weight: jax.Array, sizes: Sizes, axis_name: str | None
) -> jax.Array:
    """rms_norm of y · silu(z) over the channels of all devices, of which each has a part."""
    gated = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    squares = add_parts(jnp.sum(gated * gated, -1, keepdims=True), axis_name)  # (…, 1)
    rstd = jax.lax.rsqrt(squares / sizes.d_inner + sizes.norm_eps)
    return (gated * rstd * weight.astype(jnp.float32)).astype(y.dtype)


BLOCK = Block(
    *("mamba2", Sizes, Weights, initializers, init_cache, mamba2, mamba2_step),
    chunk=DEFAULT_CHECKPOINT_EVERY,
)
"""Mamba-2, as a kind of block."""
