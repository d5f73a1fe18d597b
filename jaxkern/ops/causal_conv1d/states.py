"""Segments of packed sequences that begin after inputs of their own, and the last inputs of each.

The kernels know no states of segments: there, what is before a segment counts as zeros. Only the
first W − 1 outputs of a segment see its state, so these are computed again here, in plain JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.ops.causal_conv1d.reference import filtered
from jaxkern.ops.causal_conv1d.tiles import Options
from jaxkern.ops.segments import Spans


def from_states(
    options: Options, out: jax.Array, x: Any, weight: Any, bias: Any, state: Any, spans: Spans
) -> jax.Array:
    """`out` (B, L, D) where each segment begins after its state, (B, S, W − 1, D)."""
    if x.size == 0 or state.size == 0:
        return out
    return FROM_STATES(options.activation, out, x, weight, bias, state, *spans)[0]


def _from_states(activation, out, x, weight, bias, state, first, stop):
    length, width = x.shape[1], weight.shape[1]
    batch = jnp.arange(x.shape[0])[:, None, None]
    at = first[..., None] + jnp.arange(width - 1)  # (B, S, W − 1), the tokens that see the state
    own = at < stop[..., None]
    acc = jnp.result_type(jnp.float32, x, weight, state)
    tokens = x[batch, jnp.minimum(at, length - 1)].astype(acc)
    inputs = jnp.concatenate([state.astype(acc), jnp.where(own[..., None], tokens, 0)], axis=2)
    taps = [inputs[:, :, w : w + width - 1] for w in range(width)]
    seen = filtered(taps, weight, bias, activation).astype(out.dtype)
    return (out.at[batch, jnp.where(own, at, length)].set(seen, mode="drop"),)


FROM_STATES = KernelPass(
    "causal_conv1d_states",
    reference=_from_states,
    ins=("b l d", "b l d", "d w", "d", "b s k d", "b s", "b s"),
    outs=("b l d",),
    whole="l w k s",
)


def final_states(x: jax.Array, width: int, state: Any, spans: Spans) -> jax.Array:
    """The last W − 1 inputs of each segment, (B, S, W − 1, D), its initial state before them."""
    return FINAL_STATES(width, x, state, *spans)[0]


def _final_states(width, x, state, first, stop):
    (batch, length, dim), kept = x.shape, width - 1
    if state is None:
        state = jnp.zeros((*first.shape, kept, dim), x.dtype)
    state = state.astype(x.dtype)
    if length == 0 or kept == 0:
        return (state,)
    back = jnp.arange(kept) - kept
    at = stop[..., None] + back  # (B, S, W − 1)
    tokens = x[jnp.arange(batch)[:, None, None], jnp.maximum(at, 0)]
    # A segment of n tokens has pushed the first n inputs out of its state.
    shifted = jnp.minimum(jnp.arange(kept) + (stop - first)[..., None], kept - 1)
    before = jnp.take_along_axis(state, shifted[..., None], axis=2)
    return (jnp.where((at >= first[..., None])[..., None], tokens, before),)


FINAL_STATES = KernelPass(
    "causal_conv1d_final_states",
    reference=_final_states,
    ins=("b l d", "b s k d", "b s", "b s"),
    outs=("b s k d",),
    whole="l k s",
)
