"""The layers beside the recurrent blocks: attention and MLPs, embedding and loss::

    q, k, v = x W_q, x W_k, x W_v              (B, L, heads, P), of keys and values fewer heads
    q, k    = rotated by their positions       the first `rotary_dim` channels of a head, or none
    y       = softmax(q kᵀ / √P) v             over the tokens of the document up to its own
    out     = y W_o

    mlp     = relu(x W_up)² W_down                     as in Nemotron-H
    swiglu  = (silu(x W_gate) · (x W_up)) W_down       as in Bamba

Each is called as a block is (:class:`jaxkern.nn.flax.Mamba2`): on whole sequences, with a cache of
what came before, and token by token. A block's cache has one size; attention keeps the keys and
values of every token, up to as many as the cache is made for.

Of a vocabulary that is split a device has the rows of its classes of the embedding, and their
columns of the output layer. Of the loss, log Σ_v exp(l_v) − l_y, the devices add up their sums of
exp(l_v), relative to the largest of their logarithms, and l_y, which one of them has: three numbers
of a token, and no logits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxkern
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import TypeOf, match_primal
from jaxkern.lm.config import ModelConfig
from jaxkern.nn import common
from jaxkern.nn.collectives import enter, leave, whole_beside
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
    dtype = q.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":  # where JAX has no such products
        q = q.astype(jnp.float32)
    y = jax.nn.dot_product_attention(q, k.astype(q.dtype), v.astype(q.dtype), mask=seen[:, None])
    return checkpoint_name(y.astype(dtype), "attention")


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
        how: Any = {"implementation": self.implementation}
        inner = checkpoint_name(self._times(x, "up_proj"), "mlp_up")
        if self.gate:
            gate = checkpoint_name(self._times(x, "gate_proj"), "mlp_up")
            inner = jaxkern.swiglu(gate, inner, **how)
        else:
            inner = jaxkern.relu_squared(inner, **how)
        out = self._times(inner, "down_proj")
        return (out, cache) if options.get("return_cache") else out

    def step(self, x: jax.Array, cache: Any, **_: Any) -> tuple[jax.Array, Any]:
        return self(x), cache

    def init_cache(self, *_: int) -> Any:
        return ()


_BLOCKS: Any = {"mamba": Mamba, "mamba2": Mamba2, "gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
OTHERS = {"attention": Attention, "mlp": MLP, "swiglu": functools.partial(MLP, gate=True)}


def make(kind: str, config: ModelConfig, **options: Any) -> Any:
    """The layer of a kind, of a model of this shape; the options are how it runs, and `rngs`."""
    if kind in OTHERS:
        return OTHERS[kind](config, **options)
    sizes = dataclasses.asdict(config.sizes)
    return _BLOCKS[kind](**sizes, n_layers=config.n_layers, **options)


# Embedding and loss, of whose vocabulary inside shard_map each device may have a part

_PRODUCT_UP_TO = 1024
"""Tokens whose gradients are added up by a product; those of more are sorted first."""


def embed(table: jax.Array, tokens: jax.Array, size: int, axis_name: str | None) -> jax.Array:
    """Reads rows of a table for tokens (...): (..., D), NaN for one outside the vocabulary.

    The table (size, D) is fp32; with a mesh axis, over which it is split, it is the device's rows.
    Tokens are of any integer dtype.
    """
    given, tokens = tokens, _counting_to(tokens, size + 1)
    if axis_name is None:
        rows = rows_of(table, tokens)
    else:
        own, mine = _of_device(tokens, len(table), axis_name)
        rows = jnp.where(mine[..., None], rows_of(table, jnp.where(mine, own, 0)), 0)
        rows = leave(rows, axis_name)
    limits = jnp.iinfo(given.dtype)
    if limits.min >= 0 and limits.max < size:
        return rows
    given = _counting_to(given, size)[..., None]
    return jnp.where((given >= 0) & (given <= size - 1), rows, jnp.nan)


def rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Reads rows of a table (V, D) fp32 for tokens (...): (..., D), its gradient deterministic.

    An indexed read's own gradient adds with atomics on a GPU, in another order on every run. Here a
    product with ones and zeros adds up the rows of each token in fp32. Of a table of more than
    1,024 rows they are sorted by token and added up by a scan that starts anew at each token's
    first, and each token's last sum is written to its row. A NaN or an infinity in one of them
    reaches the sums of all tokens in its column, or of those sorted after it.
    """
    return _rows(table, tokens, len(table))


def _rows_fwd(table, tokens, size):
    return READ(size, table, tokens)[0], (TypeOf(jax.typeof(table)), tokens)


def _rows_bwd(size, res, dout):
    table, tokens = res
    return match_primal(ADD(size, tokens, dout)[0], table), None


_rows = Differentiable(_rows_fwd, _rows_bwd)


def _added(size: int, tokens: jax.Array, dout: jax.Array) -> tuple[jax.Array]:
    """Adds rows (..., D) up for each token: (V, D)."""
    tokens = tokens.reshape(-1).astype(jnp.promote_types(tokens.dtype, jnp.int32))
    tokens = jnp.where(tokens < 0, tokens + size, tokens)
    rows = dout.reshape(-1, dout.shape[-1])
    if size <= _PRODUCT_UP_TO:
        of_token = jnp.arange(size, dtype=tokens.dtype)[:, None] == tokens
        return (jnp.matmul(of_token.astype(rows.dtype), rows, precision="highest"),)
    order = jnp.argsort(tokens)
    token, rows = tokens[order], rows[order]
    again = (token == jnp.roll(token, 1)).at[:1].set(False)
    decay = jnp.broadcast_to(again[:, None], rows.shape).astype(rows.dtype)
    sums = jaxkern.linear_scan(decay[None], rows[None])[0]
    last = jnp.roll(~again, -1)
    # The others have rows of their own past the end: if two rows might be one, XLA would first
    # sort all elements by where they go, so that it is certain which of them stays.
    row = jnp.where(last, token, size + jnp.arange(len(token), dtype=token.dtype))
    dtable = jnp.zeros((size, rows.shape[-1]), rows.dtype)
    return (dtable.at[row].set(sums, mode="drop", unique_indices=True),)


READ = KernelPass(
    "rows_of",
    reference=lambda _, table, tokens: (table[tokens],),
    ins=("v d", "..."),
    outs=("... d",),
    whole="v",
)
ADD = KernelPass("rows_of_bwd", reference=_added, ins=("...", "... d"), outs=("v d",))


def _counting_to(tokens: jax.Array, size: int) -> jax.Array:
    """The tokens in a dtype that holds all of `size`."""
    return tokens if jnp.iinfo(tokens.dtype).max >= size - 1 else tokens.astype(jnp.int32)


def linear_cross_entropy(
    x: jax.Array, weight: jax.Array, labels: jax.Array, axis_name: str | None, **options: Any
) -> Any:
    """:func:`jaxkern.linear_cross_entropy`, the mean, where each device has some of the classes.

    Every device has all of x (..., K), its own columns of the weight (K, V/n), and the labels (...)
    of all V classes, with a negative `ignore_index`. With no `axis_name` the weight is whole.
    """
    ignore_index = options["ignore_index"]
    if axis_name is None:
        return jaxkern.linear_cross_entropy(x, weight, labels, **options)
    size = weight.shape[1]
    classes, mine = _of_device(labels, size, axis_name)
    unknown = (labels < 0) | (labels >= size * lax.axis_size(axis_name))
    counted = labels != ignore_index
    own = jnp.where(counted, jnp.where(mine, classes, 0), ignore_index)
    options |= {"reduction": "none", "return_lse": True}
    losses, lse = jaxkern.linear_cross_entropy(enter(x, axis_name), weight, own, **options)
    largest = lax.pmax(lax.stop_gradient(lse), axis_name)
    sums = jnp.stack([jnp.exp(lse - largest), jnp.where(mine, lse - losses, 0)])
    exps, of_label = leave(sums, axis_name)
    losses = jnp.where(counted, largest + jnp.log(exps) - of_label, 0)
    losses = jnp.where(unknown & counted, jnp.nan, losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1)


def _of_device(classes: jax.Array, size: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Numbers classes from the first of the device's `size`, and whether each is among them."""
    wide = classes.astype(jnp.promote_types(classes.dtype, jnp.int32))
    classes = wide - lax.axis_index(axis_name) * size
    return classes, (classes >= 0) & (classes < size)
