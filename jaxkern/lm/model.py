"""The Mamba language model (arXiv 2312.00752) over bytes, in flax.nnx on jaxkern's ops.

    x = embedding[tokens]                                     (B, L, d_model)
    for each layer:
        u, z = in_proj(rms_norm(x))                           (B, L, d_inner) each
        u = silu(causal_conv1d(u))
        r, B, C = x_proj(u)                                   (B, L, dt_rank), 2 × (B, L, N)
        y = selective_scan(u, dt_proj(r), A, B, C, D, z)      dt there is softplus(dt + dt_bias)
        x = x + out_proj(y)
    logits = rms_norm(x) · embeddingᵀ                         (B, L, vocab_size)

The layers' parameters are stacked along a leading axis and the layers run under `lax.scan`, so the
program, and the time to compile it, do not grow with depth. The residual stream `x` is kept in
fp32, as in the paper's own code; matrix products run in the policy's compute dtype; A, D and
dt_bias enter the scan in the parameters' dtype.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkern
from jaxkern.core.dispatch import Implementation
from jaxkern.lm.config import ModelConfig
from jaxkern.precision import Policy

DECAYED = frozenset(
    {"embedding", "in_proj", "conv_weight", "x_proj", "dt_proj", "out_proj"}
)  # weight decay leaves norms, biases, A_log and D alone


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model runs, as opposed to what it is."""

    policy: Policy = dataclasses.field(default_factory=Policy)
    implementation: Implementation | None = None
    remat: bool = False


class MambaBlock(nnx.Module):
    """One layer: norm, Mamba mixer, residual."""

    def __init__(self, config: ModelConfig, options: Options, *, rngs: nnx.Rngs):
        d, di, n, r = config.d_model, config.d_inner, config.d_state, config.dt_rank
        self.config = config
        self.options = options

        def uniform(shape: tuple[int, ...], bound: float) -> nnx.Param:
            value = jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
            return nnx.Param(value)

        self.norm = nnx.Param(jnp.ones(d))
        self.in_proj = uniform((d, 2 * di), d**-0.5)
        self.conv_weight = uniform((di, config.d_conv), config.d_conv**-0.5)
        self.conv_bias = uniform((di,), config.d_conv**-0.5)
        self.x_proj = uniform((di, r + 2 * n), di**-0.5)
        self.dt_proj = uniform((r, di), r**-0.5)
        # softplus(dt_bias) is log-uniform in [1e-3, 1e-1].
        low, high = math.log(1e-3), math.log(1e-1)
        dt = jnp.exp(jax.random.uniform(rngs.params(), (di,), minval=low, maxval=high))
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, n + 1), (di, 1))))
        self.D = nnx.Param(jnp.ones(di))
        # Each layer adds to the residual stream once: keep its variance independent of depth.
        self.out_proj = uniform((di, d), di**-0.5 * config.n_layers**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, L, d_model) fp32 -> the same."""
        u, z = self._inputs(x)
        u = jaxkern.causal_conv1d(
            u, self._compute(self.conv_weight), self._compute(self.conv_bias), activation="silu"
        )
        dt, b, c = self._parameters(u)
        y = jaxkern.selective_scan(
            u,
            dt,
            -jnp.exp(self.A_log[...]),
            b,
            c,
            self.D[...],
            z,
            dt_bias=self.dt_bias[...],
            dt_softplus=True,
            implementation=self.options.implementation,
        )
        return self._add(x, y)

    def step(
        self, x: jax.Array, conv_state: jax.Array, scan_state: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One token: x (B, d_model), states (B, d_conv - 1, d_inner), (B, d_inner, d_state)."""
        u, z = self._inputs(x)
        u, conv_state = jaxkern.causal_conv1d_step(
            conv_state,
            u,
            self._compute(self.conv_weight),
            self._compute(self.conv_bias),
            activation="silu",
        )
        dt, b, c = self._parameters(u)
        y, scan_state = jaxkern.selective_scan_step(
            scan_state,
            u,
            dt,
            -jnp.exp(self.A_log[...]),
            b,
            c,
            self.D[...],
            z,
            dt_bias=self.dt_bias[...],
            dt_softplus=True,
        )
        return self._add(x, y), conv_state, scan_state

    def _compute(self, param: nnx.Param) -> jax.Array:
        return param[...].astype(self.options.policy.compute)

    def _inputs(self, x):
        x = jaxkern.rms_norm(
            x, self.norm[...], eps=1e-5, implementation=self.options.implementation
        )
        xz = self.options.policy.cast_to_compute(x) @ self._compute(self.in_proj)
        return jnp.split(xz, 2, axis=-1)

    def _parameters(self, u):
        r, n = self.config.dt_rank, self.config.d_state
        low_rank, b, c = jnp.split(u @ self._compute(self.x_proj), [r, r + n], axis=-1)
        return low_rank @ self._compute(self.dt_proj), b, c

    def _add(self, x, y):
        return x + (y @ self._compute(self.out_proj)).astype(x.dtype)


class DecodeState(NamedTuple):
    """What decoding carries from token to token."""

    conv: jax.Array  # (n_layers, B, d_conv - 1, d_inner)
    scan: jax.Array  # (n_layers, B, d_inner, d_state) fp32


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

        def layer(x, params):
            return nnx.merge(graphdef, params)(x), None

        if self.options.remat:
            # Under scan nothing can be shared across the barrier that prevent_cse would add.
            layer = jax.checkpoint(layer, prevent_cse=False)
        x, _ = jax.lax.scan(layer, self._embed(tokens), params)
        return self._head(x)

    def step(self, tokens: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
        """One token per row: tokens (B,) -> logits (B, vocab_size), next state."""
        graphdef, params = nnx.split(self.blocks)

        def layer(x, params_and_state):
            params, conv, scan = params_and_state
            x, conv, scan = nnx.merge(graphdef, params).step(x, conv, scan)
            return x, (conv, scan)

        x, states = jax.lax.scan(layer, self._embed(tokens), (params, *state))
        return self._head(x), DecodeState(*states)

    def init_state(self, batch_size: int) -> DecodeState:
        """The state before the first token."""
        c = self.config
        return DecodeState(
            jnp.zeros(
                (c.n_layers, batch_size, c.d_conv - 1, c.d_inner), self.options.policy.compute
            ),
            jnp.zeros((c.n_layers, batch_size, c.d_inner, c.d_state), jnp.float32),
        )

    def _embed(self, tokens):
        # A product, exact here, because its transpose is one too: that of an indexed read adds with
        # atomics on a GPU, in another order on every run.
        chosen = one_hot(tokens, self.config.vocab_size).astype(jnp.float32)
        return jnp.matmul(chosen, self.embedding[...].astype(jnp.float32), precision="highest")

    def _head(self, x):
        policy = self.options.policy
        x = jaxkern.rms_norm(
            x, self.norm[...], eps=1e-5, implementation=self.options.implementation
        )
        logits = policy.cast_to_compute(x) @ policy.cast_to_compute(self.embedding[...]).T
        return policy.cast_to_output(logits)


def one_hot(tokens: jax.Array, size: int) -> jax.Array:
    """Tokens (...) of any integer dtype -> (..., size) bool."""
    return tokens[..., None] == jnp.arange(size, dtype=tokens.dtype)


def count_params(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
