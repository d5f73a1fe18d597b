"""The convolution in plain JAX: the specification and the ``"xla"`` implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.ops.causal_conv1d.tiles import Activation, ConvOptions
from jaxkern.ops.segments import Spans


def causal_conv1d_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """:func:`causal_conv1d` in plain JAX, with every step in fp32 and one rounding at the end."""
    look_back = None if segment_ids is None else looks_back(segment_ids, weight.shape[1])
    options = ConvOptions(activation, "xla")
    return reference_fwd(options, x, weight, bias, initial_state, look_back)[0]


def last_inputs(options: ConvOptions, x: jax.Array, width: int, state: Any, look_back: Any) -> Any:
    """Last W − 1 inputs, (B, W − 1, D), zeros before the start of the last token's segment."""
    if not options.final:
        return None
    length, kept = x.shape[1], width - 1
    if length < kept:
        if state is None:
            x = jnp.pad(x, ((0, 0), (kept, 0), (0, 0)))
        else:
            x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    final = x[:, x.shape[1] - kept :]
    seen = _seen(look_back, length, kept)
    return final if seen is None else jnp.where(seen, final, jnp.zeros((), x.dtype))


def _seen(look_back: Any, length: int, kept: int) -> Any:
    """Mask (B, W − 1, 1) of the last inputs in the last token's segment; ``None`` for all."""
    if look_back is None or length == 0:
        return None
    return (look_back[:, -1:] >= jnp.arange(kept)[::-1])[..., None]


def in_last_segment(dfinal: jax.Array, look_back: Any, length: int) -> jax.Array:
    """`dfinal` with zeros for inputs before the start of the last token's segment."""
    seen = _seen(look_back, length, dfinal.shape[1])
    return dfinal if seen is None else jnp.where(seen, dfinal, jnp.zeros((), dfinal.dtype))


def reference_fwd(options, x, weight, bias, state, look_back):
    final = last_inputs(options, x, weight.shape[1], state, look_back)
    length, width = x.shape[1], weight.shape[1]
    x32 = x.astype(_accumulator(x, weight))
    if state is None:
        padded = jnp.pad(x32, ((0, 0), (width - 1, 0), (0, 0)))  # (B, W − 1 + L, D)
    else:
        padded = jnp.concatenate([state.astype(x32.dtype), x32], axis=1)
    taps = [padded[:, w : w + length] for w in range(width)]
    if look_back is not None:
        seen = [look_back[..., None] >= width - 1 - w for w in range(width)]
        zero = jnp.zeros((), x32.dtype)
        taps = [jnp.where(s, tap, zero) for s, tap in zip(seen, taps, strict=True)]
    return filtered(taps, weight, bias, options.activation).astype(x.dtype), final


def reference_bwd(options, x, weight, bias, state, look_back, dout, dfinal):
    options = dataclasses.replace(options, final=dfinal is not None)
    acc = _accumulator(*(v for v in (x, weight, dfinal) if v is not None))

    def forward(x, weight, bias, state):
        return reference_fwd(options, x, weight, bias, state, look_back)

    results = dout.astype(acc), None if dfinal is None else dfinal.astype(acc)
    dx, *others = jax.vjp(forward, x.astype(acc), weight, bias, state)[1](results)
    return dx.astype(x.dtype), *others


def filtered(taps: list[jax.Array], weight: jax.Array, bias: Any, activation: Any) -> jax.Array:
    """f(bias + Σ_w weight[:, w] · taps[w]) in fp32, or in float64 where an argument is."""
    acc = _accumulator(weight, *taps)
    total = jnp.zeros((), acc) if bias is None else bias.astype(acc)
    for weights, tap in zip(weight.astype(acc).T, taps, strict=True):
        total = total + weights * tap.astype(acc)
    return jax.nn.silu(total) if activation == "silu" else total


def _accumulator(*arrays: Any) -> Any:
    return jnp.result_type(jnp.float32, *arrays)


def looks_back(segment_ids: jax.Array, width: int) -> jax.Array:
    """Number of inputs before each token that its filter may use, at most W − 1: (B, L), fp32.

    Tokens of the first segment may use all of the initial state.
    """
    length, unbroken = segment_ids.shape[1], True
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    same = jnp.pad(same, ((0, 0), (width, 0)), constant_values=True)
    count = jnp.zeros(segment_ids.shape, jnp.float32)
    for j in range(width - 1):
        unbroken = unbroken & same[:, width - 1 - j : width - 1 - j + length]
        count = count + unbroken
    return count


# States of packed segments. In the kernels every segment begins after zeros. Only the first W − 1
# outputs of a segment depend on its state, so these are computed again here.


def from_states(
    options: ConvOptions, out: jax.Array, x: Any, weight: Any, bias: Any, state: Any, spans: Spans
) -> jax.Array:
    """`out` (B, L, D) with each segment begun after its own state, (B, S, W − 1, D)."""
    if x.size == 0 or state.size == 0:
        return out
    return FROM_STATES(options.activation, out, x, weight, bias, state, *spans)[0]


def _from_states(activation, out, x, weight, bias, state, first, stop):
    length, width = x.shape[1], weight.shape[1]
    batch = jnp.arange(x.shape[0])[:, None, None]
    at = first[..., None] + jnp.arange(width - 1)  # (B, S, W − 1), tokens that see the state
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


def _final_states(width, x, state, first, stop):
    """Last W − 1 inputs of each segment and, before them, its state: (B, S, W − 1, D)."""
    (batch, length, dim), kept = x.shape, width - 1
    if state is None:
        state = jnp.zeros((*first.shape, kept, dim), x.dtype)
    state = state.astype(x.dtype)
    if length == 0 or kept == 0:
        return (state,)
    back = jnp.arange(kept) - kept
    at = stop[..., None] + back  # (B, S, W − 1)
    tokens = x[jnp.arange(batch)[:, None, None], jnp.maximum(at, 0)]
    # A segment of n tokens has shifted the first n inputs out of its state.
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
