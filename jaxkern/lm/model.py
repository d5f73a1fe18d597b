"""The Mamba language model (arXiv 2312.00752), in flax.nnx on jaxkern's ops::

    x = embedding[tokens]                                     (B, L, d_model)
    for each layer:
        u, z = in_proj(rms_norm(x))                           (B, L, d_inner) each
        u = silu(causal_conv1d(u))
        r, B, C = x_proj(u)                                   (B, L, dt_rank), 2 × (B, L, N)
        y = selective_scan(u, dt_proj(r), A, B, C, D, z)      dt there is softplus(dt + dt_bias)
        x = x + out_proj(y)
    logits = rms_norm(x) · embeddingᵀ                         (B, L, vocab_size)

The layers' parameters are stacked along a leading axis. The layers follow one another in the
program, or run in a loop, whose time to compile does not grow with depth: there, what a layer saves
for the backward is copied to and from arrays that hold it for all. The residual stream `x` is kept
in fp32, as in the paper's own code, and what a layer adds to it is added by the next one's norm;
matrix products run in the policy's compute dtype; A, D and dt_bias enter the scan in the
parameters' dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.lm.config import ModelConfig
from jaxkern.nn.flax import Mamba
from jaxkern.nn.mamba import Cache
from jaxkern.precision import Policy

DECAYED = frozenset(
    {"embedding", "in_proj", "conv_weight", "x_proj", "dt_proj", "out_proj"}
)  # weight decay leaves norms, biases, A_log and D alone

EPS = 1e-5  # of every norm


def decayed(params: Any) -> Any:
    """Which parameters decay: the mask of the optimizer, a boolean for each."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model runs, as opposed to what it is.

    Attributes:
      policy: dtypes.
      implementation: of the ops.
      remat: whether the backward computes each layer again from its input.
      scan_layers: whether the layers run in a loop.
    """

    policy: Policy = dataclasses.field(default_factory=Policy)
    implementation: Implementation | None = None
    remat: bool = False
    scan_layers: bool = False


class MambaBlock(Mamba):
    """One layer: norm, Mamba mixer, residual."""

    def __init__(self, config: ModelConfig, options: Options, *, rngs: nnx.Rngs):
        super().__init__(
            config.d_model,
            d_state=config.d_state,
            d_conv=config.d_conv,
            expand=config.expand,
            dt_rank=config.dt_rank,
            n_layers=config.n_layers,
            dtype=options.policy.compute,
            implementation=options.implementation,
            rngs=rngs,
        )
        self.norm = nnx.Param(jnp.ones(config.d_model))

    def layer(self, x: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The stream x (B, L, d_model) fp32 and what to add to it -> the sum, and what to add."""
        normalised, x = _add_and_normalise(x, out, self.norm, self.implementation)
        return x, self(normalised)

    def layer_step(
        self, x: jax.Array, out: jax.Array, cache: Cache
    ) -> tuple[tuple[jax.Array, jax.Array], Cache]:
        """The same for one token: x (B, d_model)."""
        normalised, x = _add_and_normalise(x, out, self.norm, self.implementation)
        out, cache = self.step(normalised, cache)
        return (x, out), cache


class MambaLM(nnx.Module):
    """The whole model; `blocks` holds all layers, stacked."""

    def __init__(self, config: ModelConfig, options: Options = Options(), *, rngs: nnx.Rngs):
        self.config = config
        self.options = options
        shape = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.norm = nnx.Param(jnp.ones(config.d_model))

        @nnx.split_rngs(splits=config.n_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs):
            return MambaBlock(config, options, rngs=rngs)

        self.blocks = stacked(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (B, L) of any integer dtype -> logits (B, L, vocab_size) in the output dtype."""
        graphdef, params = nnx.split(self.blocks)

        def layer(stream, params):
            return nnx.merge(graphdef, params).layer(*stream), None

        loop = self.options.scan_layers
        if self.options.remat:
            # In a loop nothing can be shared across the barrier that prevent_cse would add.
            layer = jax.checkpoint(layer, prevent_cse=not loop)
        stream, _ = jax.lax.scan(layer, self._embed(tokens), params, unroll=1 if loop else True)
        return self._head(*stream)

    def step(self, tokens: jax.Array, state: Cache) -> tuple[jax.Array, Cache]:
        """One token per row: tokens (B,) -> logits (B, vocab_size), next state."""
        graphdef, params = nnx.split(self.blocks)

        def layer(stream, params_and_cache):
            params, cache = params_and_cache
            x, out = stream
            return nnx.merge(graphdef, params).layer_step(x, out, cache)

        stream, state = jax.lax.scan(layer, self._embed(tokens), (params, state))
        return self._head(*stream), state

    def init_state(self, batch_size: int) -> Cache:
        """The state before the first token, that of all layers stacked."""
        cache = self.blocks.init_cache(batch_size)
        return jax.tree.map(lambda a: jnp.tile(a, (self.config.n_layers, *[1] * a.ndim)), cache)

    def _embed(self, tokens):
        """The stream, and nothing to add to it yet."""
        table = self.embedding[...].astype(jnp.float32)
        if self.config.vocab_size > _PRODUCT_UP_TO:
            x = rows_of(table, tokens)
        else:
            chosen = one_hot(tokens, self.config.vocab_size).astype(jnp.float32)
            x = jnp.matmul(chosen, table, precision="highest")
        return x, jnp.zeros(x.shape, self.options.policy.compute)

    def _head(self, x, out):
        policy = self.options.policy
        x, _ = _add_and_normalise(x, out, self.norm, self.options.implementation)
        logits = x @ policy.cast_to_compute(self.embedding[...]).T
        return policy.cast_to_output(logits)


def _add_and_normalise(
    x: jax.Array, out: jax.Array, norm: nnx.Param, implementation: Implementation | None
) -> tuple[jax.Array, jax.Array]:
    """The normalised sum, in the dtype of `out`, and the sum, in that of the stream `x`."""
    return jaxkern.rms_norm(out, norm[...], eps=EPS, residual=x, implementation=implementation)


# An indexed read's own gradient adds with atomics on a GPU, in another order on every run. For
# bytes a product does instead, exact here and its transpose one too; for large vocabularies
# `rows_of`.
_PRODUCT_UP_TO = 1024


@jax.custom_vjp
def rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table (V, D) fp32 for tokens (...): (..., D), with the same gradient on every run.

    The gradient's rows are sorted by token, added up by a scan that starts anew at each token's
    first, and each token's last sum is written to its row. A NaN or an infinity in one of them
    reaches the sums of the tokens sorted after it, in its column.
    """
    return table[tokens]


def _rows_fwd(table, tokens):
    return table[tokens], (table, tokens)


def _rows_bwd(res, dout):
    table, tokens = res
    size, dim = table.shape
    order = jnp.argsort(tokens.reshape(-1))
    token, rows = tokens.reshape(-1)[order], dout.reshape(-1, dim)[order]
    again = (token == jnp.roll(token, 1)).at[:1].set(False)
    sums = jaxkern.linear_scan(
        jnp.broadcast_to(again[:, None], rows.shape).astype(rows.dtype)[None], rows[None]
    )[0]
    last = jnp.roll(~again, -1)
    written = jnp.where(last, token, size)
    return jnp.zeros_like(table).at[written].set(sums, mode="drop"), None


rows_of.defvjp(_rows_fwd, _rows_bwd)


def one_hot(tokens: jax.Array, size: int) -> jax.Array:
    """Tokens (...) of any integer dtype -> (..., size) bool."""
    return tokens[..., None] == jnp.arange(size, dtype=tokens.dtype)


def count_params(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
