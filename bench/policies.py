"""Sequence policies with one of five backbones, and the task that they are trained on.

An observation of `embed` numbers a step, a backbone of `hidden` channels, logits over actions:

    x = observation · W_in;   x = x + backbone(rms_norm(x));   logits = rms_norm(x) · W_out

with an MLP (SwiGLU), an LSTM, a GRU, causal attention or a Mamba block as the backbone. The task:
say which of 8 fixed directions the exponential average of the observations so far points along
most; it needs a memory, so that an MLP learns less of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench import timing
from jaxkern.nn import mamba
from jaxkern.precision import Policy

Params = dict[str, jax.Array]

_WIDE = ("A_log", "D", "dt_bias")  # the scan takes them in fp32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The policy's shape."""

    batch: int = 32
    embed: int = 287
    hidden: int = 256
    state: int = 16
    heads: int = 4
    actions: int = 8


@dataclasses.dataclass(frozen=True)
class Backbone:
    """``init(key, sizes)`` and ``apply(params, x, sizes, implementation)``, (B, L, hidden)."""

    init: Callable[[Any, Sizes], Params]
    apply: Callable[[Params, jax.Array, Sizes, str], jax.Array]


def _dense(key: Any, **shapes: tuple[int, int]) -> Params:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _mlp_init(key: Any, s: Sizes) -> Params:
    wide = (s.hidden, 4 * s.hidden)
    return _dense(key, gate=wide, up=wide, down=(4 * s.hidden, s.hidden))


def _mlp(p: Params, x: jax.Array, s: Sizes, implementation: Any) -> jax.Array:
    del s
    return jaxkern.swiglu(x @ p["gate"], x @ p["up"], implementation=implementation) @ p["down"]


def _lstm_init(key: Any, s: Sizes) -> Params:
    wide = (s.hidden, 4 * s.hidden)
    return _dense(key, of_x=wide, of_h=wide) | {"bias": jnp.zeros(wide[1])}


def _lstm(p: Params, x: jax.Array, s: Sizes, implementation: Any) -> jax.Array:
    del implementation

    def step(state: Any, now: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(now + h @ p["of_h"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], s.hidden), x.dtype)
    return _along(step, (start, start), x @ p["of_x"] + p["bias"])


def _gru_init(key: Any, s: Sizes) -> Params:
    gates, new = (s.hidden, 2 * s.hidden), (s.hidden, s.hidden)
    params = _dense(key, of_x=(s.hidden, 3 * s.hidden), of_h=gates, of_reset=new)
    return params | {"bias": jnp.zeros(3 * s.hidden)}


def _gru(p: Params, x: jax.Array, s: Sizes, implementation: Any) -> jax.Array:
    del implementation

    def step(h: jax.Array, now: jax.Array) -> Any:
        r, z, n = jnp.split(now, 3, axis=-1)
        of_r, of_z = jnp.split(h @ p["of_h"], 2, axis=-1)
        new = jnp.tanh(n + (jax.nn.sigmoid(r + of_r) * h) @ p["of_reset"])
        z = jax.nn.sigmoid(z + of_z)
        h = (1 - z) * new + z * h
        return h, h

    start = jnp.zeros((x.shape[0], s.hidden), x.dtype)
    return _along(step, start, x @ p["of_x"] + p["bias"])


def _along(step: Callable[..., Any], start: Any, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(jax.lax.scan(step, start, jnp.moveaxis(x, 1, 0))[1], 0, 1)


def _attention_init(key: Any, s: Sizes) -> Params:
    return _dense(key, qkv=(s.hidden, 3 * s.hidden), out=(s.hidden, s.hidden))


def _attention(p: Params, x: jax.Array, s: Sizes, implementation: Any) -> jax.Array:
    """Attention by cuDNN where it applies, in half precision on a GPU, whoever runs the rest."""
    del implementation
    heads = (*x.shape[:2], s.heads, -1)
    q, k, v = (a.reshape(heads) for a in jnp.split(x @ p["qkv"], 3, axis=-1))
    cudnn = timing.on_gpu() and x.dtype != jnp.float32
    y = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if cudnn else None
    )
    return y.reshape(x.shape) @ p["out"]


def _mamba_init(key: Any, s: Sizes) -> Params:
    inits = mamba.initializers(_mamba_sizes(s))
    keys = jax.random.split(key, len(inits))
    return {
        name: start(k, shape, jnp.float32)
        for k, (name, (start, shape)) in zip(keys, inits.items(), strict=True)
    }


def _mamba(p: Params, x: jax.Array, s: Sizes, implementation: Any) -> jax.Array:
    weights = mamba.BLOCK.weights_from(p)
    return mamba.mamba(weights, _mamba_sizes(s), x, implementation=implementation)


def _mamba_sizes(s: Sizes) -> mamba.Sizes:
    return mamba.Sizes(s.hidden, d_state=s.state)


BACKBONES = {
    "mlp": Backbone(_mlp_init, _mlp),
    "lstm": Backbone(_lstm_init, _lstm),
    "gru": Backbone(_gru_init, _gru),
    "attention": Backbone(_attention_init, _attention),
    "mamba": Backbone(_mamba_init, _mamba),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def init(key: Any, backbone: str, s: Sizes) -> Params:
    """The policy's parameters, fp32."""
    ends, middle = jax.random.split(key)
    params = BACKBONES[backbone].init(middle, s)
    params |= _dense(ends, w_in=(s.embed, s.hidden), w_out=(s.hidden, s.actions))
    return params | {"norm_in": jnp.ones(s.hidden), "norm_out": jnp.ones(s.hidden)}


def logits(
    backbone: str, policy: Policy, implementation: Any, s: Sizes, params: Params, x: jax.Array
) -> jax.Array:
    """(B, L, embed) -> (B, L, actions)."""
    p = {k: v if k in _WIDE else policy.cast_to_compute(v) for k, v in params.items()}
    norm = functools.partial(jaxkern.rms_norm, implementation=implementation)
    x = policy.cast_to_compute(x) @ p["w_in"]
    x = x + BACKBONES[backbone].apply(p, norm(x, p["norm_in"]), s, implementation)
    return policy.cast_to_output(norm(x, p["norm_out"]) @ p["w_out"])


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(key: Any, length: int, s: Sizes) -> tuple[jax.Array, jax.Array]:
    """A batch of the task: observations (B, L, embed) and actions (B, L)."""
    x = jax.random.normal(key, (s.batch, length, s.embed))
    directions = jax.random.normal(jax.random.key(99), (s.embed, s.actions))
    average = _along(
        lambda m, now: (0.9 * m + now, 0.9 * m + now),
        jnp.zeros((s.batch, s.actions)),
        x @ directions,
    )
    return x, jnp.argmax(average, -1)
