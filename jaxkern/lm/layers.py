"""Layers of a hybrid model beside the recurrent blocks: attention and MLPs::

    q, k, v = x W_q, x W_k, x W_v              (B, L, heads, P), of keys and values fewer heads
    q, k    = rotated by their positions       the first `rotary_dim` channels of a head, or none
    y       = softmax(q kᵀ / √P) v             over the tokens of the document up to its own
    out     = y W_o

    mlp     = relu(x W_up)² W_down                     as in Nemotron-H
    swiglu  = (silu(x W_gate) · (x W_up)) W_down       as in Bamba

Each is called as a block is (:class:`jaxkern.nn.flax.Mamba2`): on whole sequences, with a cache of
what came before, and token by token. A block's cache has one size; attention keeps the keys and
values of every token, up to as many as the cache is made for.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.lm.config import ModelConfig
from jaxkern.nn import common
from jaxkern.nn.collectives import whole_beside
from jaxkern.nn.flax import GatedDeltaNet, KimiDeltaAttention, Mamba, Mamba2

KEPT = ("attention_qkv", "mlp_up")
"""The names of products that rematerialisation keeps, as those that a block begins with."""


class _Layer(nnx.Module):
    """Matrices that multiply from the right, without biases, and how products run."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: dict[str, tuple[int, int]],
        *,
        dtype: Any,
        implementation: Implementation | None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = dtype
        self.implementation: Implementation | None = implementation
        *_, last = shapes
        for name, shape in shapes.items():
            bound = shape[0] ** -0.5
            if name == last:  # of what is added to the stream, whose variance is not to grow
                bound *= config.n_layers**-0.5
            init = common.uniform(bound)
            setattr(self, name, nnx.Param(init(rngs.params(), shape, jnp.float32)))

    def _times(self, x: jax.Array, name: str) -> jax.Array:
        weight = whole_beside(getattr(self, name)[...], x)
        return common.projection(self.implementation)(x.astype(self.dtype), weight)


class KeyValues(NamedTuple):
    """The keys and values of the tokens of each sequence so far, from the first on."""

    keys: jax.Array  # (B, T, heads, P), rotated
    values: jax.Array  # (B, T, heads, P)
    count: jax.Array  # (B,) int32, tokens so far


class Attention(_Layer):
    """Causal attention with grouped heads of keys and values."""

    def __init__(self, config: ModelConfig, **options: Any):
        (queries, keys), width = config.heads
        d = config.d_model
        shapes = {"q_proj": (d, queries * width), "k_proj": (d, keys * width)}
        shapes |= {"v_proj": (d, keys * width), "o_proj": (queries * width, d)}
        super().__init__(config, shapes, **options)

    def __call__(
        self,
        x: jax.Array,
        cache: KeyValues | None = None,
        *,
        return_cache: bool = False,
        segment_ids: jax.Array | None = None,
        isolate_nan: bool = True,
        **_: Any,
    ) -> Any:
        """x (B, L, D) -> the same shape; with `return_cache`, also the cache for what follows.

        A document ends where `segment_ids` (B, L), integers, change. With a cache 0 is padding.
        """
        if return_cache:
            assert cache is not None
            return self._with_cache(x, cache, None if segment_ids is None else segment_ids != 0)
        positions = jnp.arange(x.shape[1])
        seen = (positions <= positions[:, None])[None]  # (1, L, L), of a query's row
        if segment_ids is not None:
            ends = segment_ids[:, 1:] != segment_ids[:, :-1]
            document = jnp.cumsum(jnp.pad(ends, ((0, 0), (1, 0))), axis=1)  # numbers may come again
            seen &= document[:, :, None] == document[:, None]
        q, k, v = self._heads(x, positions[None])
        if not isolate_nan or segment_ids is None:
            return self._out(_attend(q, k, v, seen))
        # The weight of what is not seen is 0, and 0 times NaN is NaN.
        wrong = ~jnp.isfinite(jnp.concatenate([q, k, v], axis=2)).all((2, 3))  # (B, L)
        q, k, v = (jnp.where(wrong[..., None, None], 0, leaf) for leaf in (q, k, v))
        told = (seen & wrong[:, None]).any(-1)
        return self._out(jnp.where(told[..., None, None], jnp.nan, _attend(q, k, v, seen)))

    def step(self, x: jax.Array, cache: KeyValues, *, layer: Any) -> tuple[jax.Array, KeyValues]:
        """One token: x (B, D), of a cache of several layers -> the same shape, the next cache."""
        at, rows = cache.count[layer], jnp.arange(len(x))
        q, k, v = (leaf[:, 0] for leaf in self._heads(x[:, None], at[:, None]))
        keys = cache.keys.at[layer, rows, at].set(k.astype(cache.keys.dtype), mode="drop")
        values = cache.values.at[layer, rows, at].set(v.astype(cache.values.dtype), mode="drop")
        out = self._over_cache(q[:, None], keys[layer], values[layer], at[:, None])
        return out[:, 0], KeyValues(keys, values, cache.count.at[layer].add(1))

    def init_cache(self, batch_size: int, length: int) -> KeyValues:
        """The cache before the first token, for as many as `length`."""
        (_, heads), width = self.config.heads
        empty = jnp.zeros((batch_size, length, heads, width), self.dtype)
        return KeyValues(empty, empty, jnp.zeros(batch_size, jnp.int32))

    def _with_cache(
        self, x: jax.Array, cache: KeyValues, real: jax.Array | None
    ) -> tuple[jax.Array, KeyValues]:
        """Adds tokens (B, L) to the cache, those that are `real`; a row with others begins anew."""
        real = jnp.ones(x.shape[:2], bool) if real is None else real
        anew = ~real.all(1)
        before = jnp.where(anew, 0, cache.count)
        positions = before[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
        q, k, v = self._heads(x, positions)
        rows = jnp.arange(len(x))[:, None]
        at = jnp.where(real, positions, cache.keys.shape[1])  # past the end: not written

        def written(old: jax.Array, new: jax.Array) -> jax.Array:
            old = jnp.where(anew[:, None, None, None], 0, old)
            return old.at[rows, at].set(new.astype(old.dtype), mode="drop")

        keys, values = written(cache.keys, k), written(cache.values, v)
        out = self._over_cache(q, keys, values, positions)
        return out, KeyValues(keys, values, before + real.sum(1, dtype=jnp.int32))

    def _over_cache(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Attention of queries (B, L, heads, P) at `positions`; NaN where the cache has no more."""
        length = keys.shape[1]
        y = _attend(q, keys, values, jnp.arange(length) <= positions[..., None])
        return self._out(jnp.where((positions < length)[..., None, None], y, jnp.nan))

    def _heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        """q (B, L, heads, P), k and v (B, L, fewer heads, P) of tokens at positions (B, L)."""
        (queries, keys), width = self.config.heads
        of = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        q, k, v = (
            checkpoint_name(self._times(x, name), "attention_qkv").reshape(
                *x.shape[:-1], heads, width
            )
            for name, heads in of.items()
        )
        if not self.config.rotary_dim:
            return q, k, v
        rotate = lambda y: _rotated(y, positions, self.config.rotary_dim, self.config.rope_theta)
        return rotate(q), rotate(k), v

    def _out(self, y: jax.Array) -> jax.Array:
        return self._times(y.reshape(*y.shape[:-2], -1), "o_proj")


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of queries (B, L, heads, P) over keys (B, T, …) that each has `seen` (B, L, T)."""
    y = jax.nn.dot_product_attention(q, k.astype(q.dtype), v.astype(q.dtype), mask=seen[:, None])
    return checkpoint_name(y, "attention")


def _rotated(x: jax.Array, positions: jax.Array, size: int, theta: float) -> jax.Array:
    """Rotates pairs of the first `size` channels of heads (B, L, H, P), i and i + size / 2."""
    half = size // 2
    angles = positions[..., None] * theta ** (-jnp.arange(half) / half)  # (B, L, size / 2)
    cos, sin = (f(angles)[..., None, :] for f in (jnp.cos, jnp.sin))
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:size]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([leaf.astype(x.dtype) for leaf in turned] + [x[..., size:]], axis=-1)


class MLP(_Layer):
    """Two products with relu² in between, or where there is a `gate` a third and SiLU."""

    def __init__(self, config: ModelConfig, *, gate: bool = False, **options: Any):
        d, inner = config.d_model, config.mlp_width
        shapes = {"gate_proj": (d, inner)} if gate else {}
        shapes |= {"up_proj": (d, inner), "down_proj": (inner, d)}
        super().__init__(config, shapes, **options)
        self.gate = gate

    def __call__(self, x: jax.Array, cache: Any = (), **options: Any) -> Any:
        """x (..., D) -> the same shape; with `return_cache` also the cache, which holds nothing."""
        out = self._times(self._inner(x), "down_proj")
        return (out, cache) if options.get("return_cache") else out

    def step(self, x: jax.Array, cache: Any, **_: Any) -> tuple[jax.Array, Any]:
        return self(x), cache

    def init_cache(self, *_: int) -> Any:
        return ()

    def _inner(self, x: jax.Array) -> jax.Array:
        how: Any = {"implementation": self.implementation}
        up = checkpoint_name(self._times(x, "up_proj"), "mlp_up")
        if not self.gate:
            return jaxkern.relu_squared(up, **how)
        return jaxkern.swiglu(checkpoint_name(self._times(x, "gate_proj"), "mlp_up"), up, **how)


_BLOCKS: dict[str, Any] = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "gdn": GatedDeltaNet,
    "kda": KimiDeltaAttention,
}
OTHERS = {"attention": Attention, "mlp": MLP, "swiglu": functools.partial(MLP, gate=True)}


def make(kind: str, config: ModelConfig, **options: Any) -> Any:
    """The layer of a kind, of a model of this shape; the options are how it runs, and `rngs`."""
    if kind in OTHERS:
        return OTHERS[kind](config, **options)
    sizes = dataclasses.asdict(config.sizes)
    return _BLOCKS[kind](**sizes, n_layers=config.n_layers, **options)
