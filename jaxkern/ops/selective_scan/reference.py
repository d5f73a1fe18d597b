"""The selective scan in plain JAX: the specification and the ``"xla"`` implementation.

A scan over chunks of CHUNK steps that never holds an array of size B·L·D·N; the backward recomputes
the states of a chunk from the one before it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode

CHUNK = 8
"""Steps from one saved state to the next. In plain JAX on 2 CPU cores, forward + backward took 37
and 540 ms at (B, L, D, N) = (8, 256, 256, 16) and (8, 512, 1536, 16); with 4 steps 35 and 590, with
16 steps 44 and 630; a scan of single steps 87 and 890, an associative scan of 16 157 and 1840. In
the kernels, 16 would leave a multiprocessor no room for the states of a second block's chunk."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a call."""

    dt_softplus: bool
    mode: Mode


class _Tokens(NamedTuple):
    """The arrays with a time axis."""

    x: Any
    dt: Any
    B: Any
    C: Any
    z: Any


class _Params(NamedTuple):
    """The arrays without one, in the dtype of the arithmetic."""

    A: Any
    D: Any
    dt_bias: Any


def _split(x, dt, A, B, C, D, z, dt_bias) -> tuple[_Tokens, _Params]:
    # Cast before the scan over chunks, whose backward adds these arrays' gradients up.
    acc = jnp.result_type(jnp.float32, x, dt, A, B, C)
    params = jax.tree.map(lambda v: v.astype(acc), _Params(A, D, dt_bias))
    return _Tokens(x, dt, B, C, z), params


def selective_scan_reference(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    *,
    dt_softplus: bool = False,
) -> jax.Array:
    """:func:`selective_scan` in plain JAX: a scan over chunks of 8 steps.

    Differentiable in both modes and to any order. The backward keeps the state before each chunk
    and runs the chunk again, so that it holds no more than the kernels do.
    """
    if x.shape[1] == 0:
        return jnp.zeros_like(x)
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)

    @jax.checkpoint
    def body(h, chunk):
        return _run_chunk(h, chunk[0], params, dt_softplus, chunk[1])

    _, out = lax.scan(body, _initial_state(tokens, params), _to_chunks(tokens))
    return _from_chunks(out, x.shape[1])


def step(state, x, dt, A, B, C, D, z, dt_bias, *, dt_softplus: bool) -> tuple[Any, Any]:
    """One token, x (B, D): its output and the next state, (B, D, N)."""
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)
    h = jnp.swapaxes(state.astype(params.A.dtype), 1, 2)  # (B, N, D)
    h, out = _run_chunk(h, jax.tree.map(lambda v: v[:, None], tokens), params, dt_softplus)
    return out[:, 0], jnp.swapaxes(h, 1, 2)


def reference_fwd(options: Options, save: bool, x, dt, A, B, C, D, z, dt_bias):
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)
    if x.shape[1] == 0:
        empty = jnp.zeros((x.shape[0], 0, A.shape[1], A.shape[0]), jnp.float32)
        return jnp.zeros_like(x), empty if save else None

    @jax.checkpoint
    def body(h, chunk):
        after, out = _run_chunk(h, chunk[0], params, options.dt_softplus, chunk[1])
        return after, (out, h if save else None)

    _, (out, states) = lax.scan(body, _initial_state(tokens, params), _to_chunks(tokens))
    return _from_chunks(out, x.shape[1]), jnp.moveaxis(states, 0, 1) if save else None


def reference_bwd(options: Options, x, dt, A, B, C, D, z, dt_bias, states, dout):
    """The gradients; those that sum over channels, batch rows or time are left in fp32."""
    f32 = states.dtype
    tokens, params = _split(x, dt, A, B.astype(f32), C.astype(f32), D, z, dt_bias)
    if x.shape[1] == 0:
        zeros = jax.tree.map(jnp.zeros_like, (tokens, params))
        return _as_arguments(*zeros)

    @jax.checkpoint
    def body(carry, chunk):
        dh, dparams = carry
        tokens, valid, before, dout = chunk

        def run(h, tokens, params):
            return _run_chunk(h, tokens, params, options.dt_softplus, valid)

        _, vjp = jax.vjp(run, before, tokens, params)
        dh, dtokens, more = vjp((dh, dout))
        return (dh, jax.tree.map(jnp.add, dparams, more)), dtokens

    (chunks, valid), (douts, _) = _to_chunks(tokens), _to_chunks(dout)
    zeros = jax.tree.map(jnp.zeros_like, (states[:, 0], params))
    xs = (chunks, valid, jnp.moveaxis(states, 1, 0), douts)
    (_, dparams), dtokens = lax.scan(body, zeros, xs, reverse=True)
    return _as_arguments(jax.tree.map(lambda v: _from_chunks(v, x.shape[1]), dtokens), dparams)


def _as_arguments(tokens: _Tokens, params: _Params) -> tuple[Any, ...]:
    x, dt, B, C, z = tokens
    A, D, dt_bias = params
    return x, dt, A, B, C, D, z, dt_bias


def _run_chunk(h, tokens: _Tokens, params: _Params, dt_softplus: bool, valid: Any = None):
    """k steps from the state h, (B, N, D), to the state after them and out, (B, k, D).

    Steps that are not `valid`, (k,), leave the state as it is.
    """
    acc = h.dtype
    x, dt, B, C = (v.astype(acc) for v in tokens[:4])
    if params.dt_bias is not None:
        dt = dt + params.dt_bias
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    if valid is not None:
        dt = jnp.where(valid[:, None], dt, 0)
    A = params.A.T  # (N, D): channels last, so that loops run along them
    dtx = dt * x
    ys = []
    for t in range(x.shape[1]):
        decay = jnp.exp(dt[:, t, None, :] * A)
        h = decay * h + jnp.einsum("bd,bn->bnd", dtx[:, t], B[:, t])
        # As a dot, for its transpose is a sum over channels, which is slow as a sum on a CPU.
        ys.append(jnp.einsum("bnd,bn->bd", h, C[:, t], precision="highest"))
    y = jnp.stack(ys, axis=1)
    if params.D is not None:
        y = y + params.D * x
    if tokens.z is not None:
        y = y * jax.nn.silu(tokens.z.astype(acc))
    return h, y.astype(tokens.x.dtype)


def _initial_state(tokens: _Tokens, params: _Params) -> jax.Array:
    """Zeros (B, N, D), distributed over devices as the states will be."""
    x, dt, B, C, _ = tokens
    like = (x * dt)[:, 0, None, :] * (B * C)[:, 0, :, None] * params.A.T
    return jnp.where(True, jnp.zeros((), params.A.dtype), like.astype(params.A.dtype))


def _to_chunks(tokens: Any) -> tuple[Any, jax.Array | None]:
    """(B, L, ·) as (⌈L/k⌉, B, k, ·) with zeros after the end; and which steps are no such zeros."""
    length = jax.tree.leaves(tokens)[0].shape[1]
    k = min(CHUNK, length)
    pad = -length % k

    def split(v):
        v = jnp.pad(v, ((0, 0), (0, pad), (0, 0)))
        return jnp.moveaxis(v.reshape(v.shape[0], v.shape[1] // k, k, v.shape[2]), 1, 0)

    valid = (jnp.arange(length + pad) < length).reshape(-1, k) if pad else None
    return jax.tree.map(split, tokens), valid


def _from_chunks(v: jax.Array, length: int) -> jax.Array:
    """(c, B, k, ·) as (B, L, ·)."""
    v = jnp.moveaxis(v, 0, 1)
    return v.reshape(v.shape[0], v.shape[1] * v.shape[2], v.shape[3])[:, :length]
