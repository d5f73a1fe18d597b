"""Layers for tests: each library's own and ours, made and run in the same way."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxkern.nn.equinox as jk_equinox
import jaxkern.nn.flax as jk_nnx
import jaxkern.nn.linen as jk_linen
from jaxkern.nn import delta_net, mamba, mamba2
from jaxkern.nn.common import Block
from jaxkern.precision import Policy

K = 40  # features
BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
NORMS = ("RMSNorm", "LayerNorm")


def normal(*shape, seed=0, dtype=FP32, scale=1.0):
    values = scale * (np.random.default_rng(seed).normal(size=shape) + 0.3)
    return jnp.asarray(values.astype(dtype))


# How a library's own layer or ours is made from a name and its options, and run: its initial
# parameters, and (parameters, x) -> result. With `shapes` the parameters are of jax.eval_shape.


def size_of(name, width):
    return {"Linear": (width, 24), "SwiGLU": (width, 24), "Dropout": (0.5,)}.get(name, (width,))


def of_nnx(module, name, width, shapes=False, **options):
    make = lambda: getattr(module, name)(*size_of(name, width), **options, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(nnx.eval_shape(make) if shapes else make())

    def run(params, *args, method="__call__", **how):
        return getattr(nnx.merge(graphdef, params), method)(*args, **how)

    return nnx.to_pure_dict(params), run


def of_linen(module, name, width, shapes=False, **options):
    size = () if name in NORMS else size_of(name, width)[-1:]
    layer = getattr(module, "Dense" if name == "Linear" else name)(*size, **options)
    # A module computes where its parameters are made, too, which "mosaic" does on a GPU alone.
    made = layer.clone(implementation="xla") if "implementation" in options else layer
    init = functools.partial(jax.eval_shape, made.init) if shapes else made.init
    rngs = {"dropout": jax.random.key(0)}
    params = init(rngs | {"params": jax.random.key(0)}, jnp.ones((1, K, width)))
    return params, functools.partial(layer.apply, rngs=rngs)


def of_equinox(module, name, width, shapes=False, dtype=None, **options):
    """A layer that computes in its parameters' dtypes, which are cast to `dtype` for that."""
    if name not in (*NORMS, "Dropout"):
        options["key"] = jax.random.key(0)
    make = functools.partial(getattr(module, name), *size_of(name, width), **options)
    layer = eqx.filter_eval_shape(make) if shapes else make()
    like, rest = eqx.partition(layer, lambda a: isinstance(a, jax.Array | jax.ShapeDtypeStruct))

    def run(params, *args, method="__call__", **how):
        params = params if dtype is None else Policy(compute=dtype).cast_to_compute(params)
        layer = eqx.combine(jax.tree.unflatten(jax.tree.structure(like), params), rest)
        call = getattr(layer, method)
        return (call if module is jk_equinox else jax.vmap(jax.vmap(call)))(*args, **how)

    return jax.tree.leaves(like), run


MODULES = {
    "nnx": (of_nnx, nnx, jk_nnx),
    "linen": (of_linen, linen, jk_linen),
    "equinox": (of_equinox, eqx.nn, jk_equinox),
}
LIBRARIES = [*MODULES]


def ours(library, name, width=K, **options):
    make, _, module = MODULES[library]
    return make(module, name, width, **options)


def mamba_token(w, sizes, carry, row, xp=jnp):
    """The block on one token (D,), as the paper writes it: the next carry, and the output."""
    window, state = carry
    u, z = xp.split(row @ w.in_proj + _or_zero(w.in_bias), 2)
    window = xp.column_stack([window[:, 1:], u])
    u = _silu((window * w.conv_weight).sum(1) + _or_zero(w.conv_bias), xp)
    low, B, C = xp.split(u @ w.x_proj, [sizes.rank, sizes.rank + sizes.d_state])
    dt = xp.logaddexp(0, low @ w.dt_proj + w.dt_bias)[:, None]
    state = xp.exp(-dt * xp.exp(w.A_log)) * state + dt * u[:, None] * B
    out = (state @ C + w.D * u) * _silu(z, xp) @ w.out_proj
    return (window, state), out + _or_zero(w.out_bias)


def mamba2_token(w, sizes, carry, row, xp=jnp):
    """The Mamba-2 block on one token (D,): the next carry, and the output."""
    window, state = carry
    e, g, n, heads = sizes.d_inner, sizes.ngroups, sizes.d_state, sizes.heads
    z, u, dt = xp.split(row @ w.in_proj + _or_zero(w.in_bias), [e, e + sizes.d_convolved])
    window = xp.column_stack([window[:, 1:], u])
    u = _silu((window * w.conv_weight).sum(1) + _or_zero(w.conv_bias), xp)
    v, B, C = xp.split(u, [e, e + g * n])
    v = v.reshape(heads, -1)  # (H, P)
    B, C = (xp.repeat(a.reshape(g, n), heads // g, axis=0)[:, None] for a in (B, C))  # (H, 1, N)
    dt = xp.clip(xp.logaddexp(0, dt + w.dt_bias), *sizes.dt_limit)[:, None, None]
    state = xp.exp(-dt * xp.exp(w.A_log)[:, None, None]) * state + dt * v[..., None] * B
    y = ((state * C).sum(-1) + w.D.reshape(heads, -1) * v).reshape(-1) * _silu(z, xp)
    y = y.reshape(g if sizes.norm_groups is None else sizes.norm_groups, -1)
    y = y / xp.sqrt((y * y).mean(-1, keepdims=True) + sizes.norm_eps)
    return (window, state), y.reshape(-1) * w.norm_weight @ w.out_proj + _or_zero(w.out_bias)


def gdn_token(w, sizes, carry, row, xp=jnp):
    """The Gated DeltaNet block on one token (D,): the next carry, and the output."""
    g, k, h, v = sizes.num_key_heads, sizes.d_key, sizes.num_heads, sizes.d_value
    at = np.cumsum([2 * g * k + h * v, h * v, h])
    u, z, b, a = xp.split(row @ w.in_proj + _or_zero(w.in_bias), at)
    decay = xp.exp(-xp.exp(w.A_log) * xp.logaddexp(0, a + w.dt_bias))[:, None, None]
    window, state, y = _delta_rule(w, sizes, carry, u, decay, b, g, xp)
    y = (y * _silu(z.reshape(h, v), xp)).reshape(-1)
    return (window, state), y @ w.out_proj + _or_zero(w.out_bias)


def kda_token(w, sizes, carry, row, xp=jnp):
    """The block of Kimi Delta Attention on one token (D,): the next carry, and the output."""
    k, h, v = sizes.d_key, sizes.num_heads, sizes.d_value
    at = np.cumsum([h * (2 * k + v), h, sizes.rank])
    u, b, f, z = xp.split(row @ w.in_proj + _or_zero(w.in_bias), at)
    steps = xp.logaddexp(0, f @ w.f_proj + w.dt_bias).reshape(h, k, 1)
    decay = xp.exp(-xp.exp(w.A_log)[:, None, None] * steps)
    window, state, y = _delta_rule(w, sizes, carry, u, decay, b, h, xp)
    y = (y / (1 + xp.exp(-(z @ w.g_proj).reshape(h, v)))).reshape(-1)
    return (window, state), y @ w.out_proj + _or_zero(w.out_bias)


def _delta_rule(w, sizes, carry, u, decay, b, groups, xp):
    """Convolution, delta rule and norm of heads: the next window and state, and y (H, V)."""
    window, state = carry  # the state (H, K, V)
    window = xp.column_stack([window[:, 1:], u])
    u = _silu((window * w.conv_weight).sum(1) + _or_zero(w.conv_bias), xp)
    q, k, v = xp.split(u, [groups * sizes.d_key, 2 * groups * sizes.d_key])
    q, k = (a.reshape(groups, -1) for a in (q, k))
    q, k = (a / xp.sqrt((a * a).sum(1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (xp.repeat(a, sizes.heads // groups, axis=0)[..., None] for a in (q, k))  # (H, K, 1)
    state = decay * state
    change = (v.reshape(sizes.heads, -1) - (k * state).sum(1)) / (1 + xp.exp(-b))[:, None]
    state = state + k * change[:, None]
    y = (q * state).sum(1) / sizes.d_key**0.5
    return window, state, rms(y, w.head_norm, sizes.norm_eps, xp)


def _silu(x, xp):
    return x / (1 + xp.exp(-x))


def rms(x, weight, eps, xp):
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _or_zero(bias):
    return 0 if bias is None else bias


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A kind of block: its layer's name, small sizes, and what it computes, token by token."""

    layer: str
    block: Block
    options: dict[str, Any]
    token: Callable[..., Any]
    without: frozenset[str] = frozenset()  # weights that only another kind has

    def sizes(self, d_model=12, **options):
        return self.block.sizes(d_model, **self.options | options)

    def carry(self, sizes, xp=jnp):
        """Before the first token of a sequence: the convolution's window and the state."""
        conv, scan = (leaf.shape[1:] for leaf in self.block.init_cache(sizes, 1, FP32))
        return xp.zeros((conv[1], conv[0] + 1)), xp.zeros(scan)

    def float64(self, weights, sizes, x):
        """The block on one sequence (L, D) in NumPy."""
        return self.tokens(weights, sizes, x)[0]

    def tokens(self, weights, sizes, x, carry=None):
        """The block on tokens (L, D) after `carry` in NumPy, and the next carry."""
        weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
        carry, outs = self.carry(sizes, np) if carry is None else carry, []
        for row in np.asarray(x, np.float64):
            carry, out = self.token(weights, sizes, carry, row, np)
            outs.append(out)
        return np.stack(outs), carry


MAMBA = Kind(
    "Mamba", mamba.BLOCK, {"d_state": 3, "d_conv": 3, "expand": 2, "dt_rank": 2}, mamba_token
)
MAMBA2 = Kind(
    "Mamba2", mamba2.BLOCK, {"d_state": 3, "d_conv": 3, "headdim": 4, "ngroups": 2}, mamba2_token
)
OF_HEADS = {"d_key": 3, "d_value": 4, "d_conv": 3, "use_conv_bias": True}
GDN = Kind(
    *("GatedDeltaNet", delta_net.GATED_DELTA_NET),
    {"num_heads": 4, "num_key_heads": 2} | OF_HEADS,
    gdn_token,
    frozenset({"f_proj", "g_proj"}),
)
KDA = Kind(
    *("KimiDeltaAttention", delta_net.KIMI_DELTA_ATTENTION),
    {"num_heads": 3, "gate_rank": 2} | OF_HEADS,
    kda_token,
)
KINDS = {kind.block.name: kind for kind in (MAMBA, MAMBA2, GDN, KDA)}
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def rms_float64(x, weight, eps):
    return rms(x, weight, eps, np)
