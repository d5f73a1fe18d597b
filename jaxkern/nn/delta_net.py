r"""Blocks on the gated delta rule: functions of arrays, for the layers and the language model.

Gated DeltaNet, the linear attention of Qwen3-Next::

    q, k, v, z, b, a = in_proj(x)              2 × (B, L, G K), 2 × (B, L, E), 2 × (B, L, H)
    q, k, v = silu(causal_conv1d(q, k, v))
    g       = −exp(A_log) · softplus(a + dt_bias)          the log decays, (B, L, H)
    y       = gated_delta_rule(q, k, v, g, sigmoid(b))     q and k divided by their length
    out     = out_proj(rms_norm(y) · silu(z))              the norm of each head, (B, L, H, V)

Kimi Delta Attention (KDA), of Kimi Linear, has a decay for each key channel of a head; decays and
output gate come from projections of rank R::

    q, k, v, b, f, z = in_proj(x)              2 × (B, L, H K), (B, L, E), (B, L, H), 2 × (B, L, R)
    q, k, v = silu(causal_conv1d(q, k, v))
    g       = −exp(A_log) · softplus(f_proj(f) + dt_bias)  (B, L, H, K)
    y       = gated_delta_rule(q, k, v, g, sigmoid(b))
    out     = out_proj(rms_norm(y) · sigmoid(g_proj(z)))

with E = H · V value channels in H heads, and K key channels in each of G heads of q and k, of which
each belongs to H / G heads of v. Products, convolution and norm run in the compute dtype; decays
and sigmoid(b) are computed in fp32.

Sources: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, arXiv:2412.06464, and the layer of
Qwen3-Next; Kimi Team, Kimi Linear, 2025, arXiv:2510.26692. The initial values are as in their code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern.core.arguments import check_integer
from jaxkern.core.dispatch import Implementation
from jaxkern.core.kernel_pass import named
from jaxkern.nn import common
from jaxkern.nn.collectives import enter, whole_beside
from jaxkern.nn.common import Block, Initial
from jaxkern.ops.columns import Columns
from jaxkern.ops.curves import recomputing
from jaxkern.ops.delta_rule.reference import SAVED_EVERY
from jaxkern.ops.norm.op import Settings


class Weights(NamedTuple):
    """A block's parameters; matrices multiply from the right, as in ``x @ in_proj``."""

    in_proj: jax.Array  # (D, the sum of Sizes.columns)
    conv_weight: jax.Array  # (2 G K + E, W), of q, k and v
    conv_bias: jax.Array | None  # (2 G K + E,)
    dt_bias: jax.Array  # (H,), of KDA (H K,)
    A_log: jax.Array  # (H,)
    head_norm: jax.Array  # (V,)
    out_proj: jax.Array  # (E, D)
    f_proj: jax.Array | None = None  # (R, H K), of KDA
    g_proj: jax.Array | None = None  # (R, E), of KDA
    in_bias: jax.Array | None = None  # (the sum of Sizes.columns,)
    out_bias: jax.Array | None = None  # (D,)


class Cache(NamedTuple):
    """The state that a block carries from token to token: zeros before the first."""

    conv: jax.Array  # (B, W - 1, 2 G K + E), the convolution's last inputs
    scan: jax.Array  # (B, H, K, V), float32, the state


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The dimensions that both blocks have.

    Attributes:
      d_model: D, the width of input and output.
      num_heads: H, the heads of v; ``None`` for 2 · D / V, rounded down, or 1.
      d_key: K, channels of q and k a head.
      d_value: V, channels of v a head.
      d_conv: W, taps of the convolution.
      norm_eps: added to the mean square of a head.
      use_bias: whether the input and output projections have biases.
      use_conv_bias: whether the convolution has one.

    Raises:
      TypeError: a value is of another type.
      ValueError: a number is less than 1, does not divide what it must, or `norm_eps` is not above
        0.
    """

    d_model: int
    _: dataclasses.KW_ONLY
    num_heads: int | None = None
    d_key: int = 128
    d_value: int = 128
    d_conv: int = 4
    norm_eps: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = False

    gate: ClassVar[Literal["silu", "sigmoid"]]
    """The activation of the output gate."""

    def __post_init__(self):
        common.check_sizes(self)

    @property
    def heads(self) -> int:
        """H, the heads of v."""
        return self.num_heads or max(1, 2 * self.d_model // self.d_value)

    @property
    def key_heads(self) -> int:
        """G, the heads of q and k."""
        return self.heads

    @property
    def d_inner(self) -> int:
        """E, the channels of v."""
        return self.heads * self.d_value

    @property
    def d_keys(self) -> int:
        """G · K, the channels of q, and of k."""
        return self.key_heads * self.d_key

    @property
    def d_convolved(self) -> int:
        """2 G K + E, the channels of the convolution: q, k and v."""
        return 2 * self.d_keys + self.d_inner

    @property
    def columns(self) -> dict[str, int]:
        """The columns of `in_proj`, in their order."""
        return {"q": self.d_keys, "k": self.d_keys, "v": self.d_inner}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSizes(Sizes):
    """The dimensions of a Gated DeltaNet block: the attributes of :class:`Sizes`, and one more.

    Attributes:
      num_key_heads: G, the heads of q and k, a divisor of H; ``None`` for H.
    """

    num_key_heads: int | None = None
    gate: ClassVar[Literal["silu", "sigmoid"]] = "silu"

    def __post_init__(self):
        super().__post_init__()
        common.check_divides("num_key_heads", self.key_heads, "num_heads", self.heads)

    @property
    def key_heads(self) -> int:
        """G, the heads of q and k."""
        return self.num_key_heads or self.heads

    @property
    def columns(self) -> dict[str, int]:
        """The columns of `in_proj`, in their order."""
        return super().columns | {"z": self.d_inner, "b": self.heads, "a": self.heads}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDeltaAttentionSizes(Sizes):
    """The dimensions of a KDA block: the attributes of :class:`Sizes`, and one more.

    Attributes:
      gate_rank: R, the rank of the projections to decays and output gate; ``None`` for V.
    """

    gate_rank: int | None = None
    gate: ClassVar[Literal["silu", "sigmoid"]] = "sigmoid"

    @property
    def rank(self) -> int:
        """R, the rank of the projections to decays and output gate."""
        return self.gate_rank or self.d_value

    @property
    def columns(self) -> dict[str, int]:
        """The columns of `in_proj`, in their order."""
        return super().columns | {"b": self.heads, "f": self.rank, "z": self.rank}


def initializers(sizes: Sizes, n_layers: int = 1) -> dict[str, Initial]:
    """Initial values and shapes of :class:`Weights`; `n_layers` as in :mod:`jaxkern.nn.mamba`."""
    n_layers = check_integer("n_layers", n_layers, minimum=1)
    d, e, h, u, w = sizes.d_model, sizes.d_inner, sizes.heads, sizes.d_convolved, sizes.d_conv
    columns = sum(sizes.columns.values())
    low_rank = isinstance(sizes, KimiDeltaAttentionSizes)
    inits: dict[str, Initial] = {
        "in_proj": (common.uniform(d**-0.5), (d, columns)),
        "conv_weight": (common.uniform(w**-0.5), (u, w)),
        "dt_bias": (common.dt_bias, (sizes.d_keys if low_rank else h,)),
        # Qwen3-Next's begin near 0, at a distance from log(0), and Kimi Linear's at 1.
        "A_log": (common.a_log(1 if low_rank else 0.01), (h,)),
        "head_norm": (common.ones, (sizes.d_value,)),
        "out_proj": (common.uniform(e**-0.5 * n_layers**-0.5), (e, d)),
    }
    if sizes.use_conv_bias:
        inits["conv_bias"] = common.uniform(w**-0.5), (u,)
    if isinstance(sizes, KimiDeltaAttentionSizes):
        init = common.uniform(sizes.rank**-0.5)
        inits |= {"f_proj": (init, (sizes.rank, sizes.d_keys)), "g_proj": (init, (sizes.rank, e))}
    if sizes.use_bias:
        inits |= {"in_bias": (common.zeros, (columns,)), "out_bias": (common.zeros, (d,))}
    return inits


def init_cache(sizes: Sizes, batch_size: int, dtype: Any) -> Cache:
    """The cache before the first token; `dtype` is the dtype of the products."""
    return Cache(
        jnp.zeros((batch_size, sizes.d_conv - 1, sizes.d_convolved), dtype),
        jnp.zeros((batch_size, sizes.heads, sizes.d_key, sizes.d_value), jnp.float32),
    )


def delta_net(
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
    """A Gated DeltaNet or KDA block over whole sequences, by the class of `sizes`.

    Arguments, results and errors are as for :func:`jaxkern.nn.mamba.mamba`, but for

    Args:
      axis_name: inside ``jax.shard_map(check_vma=False)``, the mesh axis over which the heads are
        split, of v as those of q and k: `weights` are a device's part of them, of `in_proj` its
        columns of each of `Sizes.columns` but f and z of KDA, which every device has, as it has
        `head_norm`; and `x` and the result are the same on every device. A block then adds up over
        the axis, forward and backward, what `out_proj` gives.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkern.nn import delta_net
      >>> sizes = delta_net.GatedDeltaNetSizes(32, num_heads=4, d_key=8, d_value=16)
      >>> inits = delta_net.initializers(sizes).items()
      >>> key = jax.random.key(0)
      >>> weights = delta_net.GATED_DELTA_NET.weights_from(
      ...     {name: init(key, shape, jnp.float32) for name, (init, shape) in inits}
      ... )
      >>> delta_net.delta_net(weights, sizes, jnp.ones((1, 5, 32))).shape
      (1, 5, 32)
    """
    common.check_options(axis_name, return_cache=return_cache, isolate_nan=isolate_nan)
    x = _block_of(sizes).check_call(sizes, x, cache, segment_ids, ("B L D",))
    weights = whole_beside(weights, x)
    project = common.projection(implementation)
    part = sizes if axis_name is None else _of_device(weights, sizes)
    x = common.cast(x, weights, dtype)
    (q, k, v, z, small), h = _project_in(weights, part, x, norm, axis_name, implementation)
    z, g, beta = _gates(weights, part, z, small, project)
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "return_final_state": return_cache,
        "sequence_axis": sequence_axis,
        "implementation": implementation,
    }
    at = [part.d_keys, 2 * part.d_keys]
    qkv, conv = common.convolved(weights, cache, [q, k, v], at, options)
    state: Any = None if cache is None else cache.scan
    y: Any = jaxkern.gated_delta_rule(
        *_in_heads(part, *qkv), g, beta, initial_state=state, qk_l2norm=True, **options
    )
    if return_cache:
        y, state = y
    out = _project_out(weights, sizes, y, z, axis_name, implementation)
    return common.results(out, h, Cache(conv, state) if return_cache else None, cache)


def delta_net_step(
    weights: Weights,
    sizes: Sizes,
    x: jax.Array,
    cache: Cache,
    *,
    dtype: Any = None,
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cache]:
    """A Gated DeltaNet or KDA block for one token, x (B, D): its output (B, D) and the next cache.

    Args and errors are as for :func:`delta_net`, and `layer` for
    :func:`jaxkern.gated_delta_rule_step`: which of the layers of `cache` is this block's, where its
    arrays have an axis of layers in front. Convolution and scan run as their steps do by default.
    """
    x = _block_of(sizes).check_call(sizes, x, cache, None, ("B D",), layer)
    project, x = common.projection(implementation), common.cast(x, weights, dtype)
    projected = project(x, weights.in_proj, weights.in_bias)  # (B, columns)
    wide_gate = isinstance(sizes, GatedDeltaNetSizes)
    at = np.cumsum([sizes.d_convolved, sizes.d_inner if wide_gate else 0])
    _, z, small = jnp.split(projected, at, axis=-1)
    u = Columns(projected, 0, (sizes.d_convolved,))
    convolved, conv = common.convolved_step(weights, cache, u, layer, implementation)
    q, k, v = jnp.split(convolved, [sizes.d_keys, 2 * sizes.d_keys], axis=-1)
    z, g, beta = _gates(weights, sizes, z, small, project)
    y, state = jaxkern.gated_delta_rule_step(
        cache.scan,
        *_in_heads(sizes, q, k, v),
        *(g, beta),
        qk_l2norm=True,
        layer=layer,
        implementation=common.implementation_of_products(implementation),
    )
    out = _project_out(weights, sizes, y, z, None, implementation)
    return out, Cache(conv, state.astype(cache.scan.dtype))


def _block_of(sizes: Sizes) -> Block:
    return KIMI_DELTA_ATTENTION if isinstance(sizes, KimiDeltaAttentionSizes) else GATED_DELTA_NET


def _of_device(weights: Weights, sizes: Sizes) -> Sizes:
    """The dimensions of the part of a block that `weights` are, by their shapes."""
    heads = weights.A_log.shape[-1]
    part: dict[str, int] = {"num_heads": heads}
    if isinstance(sizes, GatedDeltaNetSizes):
        keys = weights.conv_weight.shape[0] - heads * sizes.d_value
        part["num_key_heads"] = keys // (2 * sizes.d_key)
    return dataclasses.replace(sizes, **part)


def _project_in(
    weights: Weights,
    sizes: Sizes,
    x: jax.Array,
    *of_in: Any,
) -> tuple[list[Any], jax.Array | None]:
    """q and k (…, G K), v and z (…, E), of KDA no z but ``None``, and the small columns as one."""
    large = 4 if isinstance(sizes, GatedDeltaNetSizes) else 3
    at = np.cumsum([*sizes.columns.values()])[:large]
    outs, h = common.project_in(weights, x, at, *of_in)
    *inner, small = named("delta_in_proj", outs)
    return [*inner, *[None] * (4 - large), small], h


def _gates(
    weights: Weights,
    sizes: Sizes,
    z: Any,
    small: jax.Array,
    project: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """z (…, E), the log decays g (…, H) or (…, H, K), and beta (…, H); the latter two in fp32."""
    if isinstance(sizes, KimiDeltaAttentionSizes):
        beta, f, z = jnp.split(small, [sizes.heads, sizes.heads + sizes.rank], axis=-1)
        decay, z = project(f, weights.f_proj), project(z, weights.g_proj)
        decay = decay.reshape(*decay.shape[:-1], sizes.heads, sizes.d_key)
    else:
        beta, decay = jnp.split(small, 2, axis=-1)

    def log_decays(weights: Weights, decay: jax.Array) -> jax.Array:
        rates = common.decay_rates(weights)
        rates = rates.reshape(sizes.heads, *[1] * (decay.ndim - beta.ndim))
        bias = weights.dt_bias.astype(rates.dtype).reshape(decay.shape[beta.ndim - 1 :])
        return rates * jax.nn.softplus(decay.astype(rates.dtype) + bias)

    # Recomputed in the backward: with KDA softplus would keep several fp32 numbers a channel.
    g = recomputing(log_decays)(weights, decay)
    return z, g, jax.nn.sigmoid(beta.astype(g.dtype))


def _in_heads(sizes: Sizes, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q and k (…, G, K) and v (…, H, V)."""
    q, k = (a.reshape(*a.shape[:-1], sizes.key_heads, sizes.d_key) for a in (q, k))
    return q, k, v.reshape(*v.shape[:-1], sizes.heads, sizes.d_value)


def _project_out(
    weights: Weights,
    sizes: Sizes,
    y: jax.Array,
    z: jax.Array,
    axis_name: str | None,
    implementation: Implementation | None,
) -> jax.Array:
    """out_proj of the norm of heads y (…, H, V) times the gate."""
    arrays = y, enter(weights.head_norm, axis_name), None, None, z.reshape(y.shape)
    settings = Settings(sizes.norm_eps, gate_activation=sizes.gate)
    return common.project_out(weights, arrays, settings, axis_name, implementation, of_heads=True)


def _block(name: str, sizes: type[Sizes]) -> Block:
    return Block(
        *(name, sizes, Weights, initializers, init_cache, delta_net, delta_net_step),
        chunk=SAVED_EVERY,
    )


GATED_DELTA_NET = _block("gdn", GatedDeltaNetSizes)
"""Gated DeltaNet, as a kind of block."""

KIMI_DELTA_ATTENTION = _block("kda", KimiDeltaAttentionSizes)
"""Kimi Delta Attention, as a kind of block."""
