"""The passes of the gated delta rule by kernels.

They multiply by wgmma or mma.sync (:mod:`jaxkern.mosaic.mma`), on every GPU from Ampere on whose
shared memory is enough. In a chunk of CHUNK tokens, with c[i] = g[0] + … + g[i], E = exp(c),
left = exp(c[last] − c), and S, (K, V), the state before it:

    a[i,j] = Σ_k K[i,k] · K[j,k] · exp(c[i] − c[j])  for j < i,  T = (I + a[i,j] · β[j])⁻¹
    P[i,j] = Σ_k Q[i,k] · K[j,k] · exp(c[i] − c[j])  for j ≤ i
    N = T (V − (E ∘ K) S)
    O = scale · ((E ∘ Q) S + (P[i,j] · β[j]) N)
    S ← exp(c[last]) ∘ S + (β ∘ left ∘ K)ᵀ N

With decays of heads c, E and left are numbers of tokens: the scans multiply by K and Q, and by
these afterwards, and make P. With decays of channels c, E and left are (CHUNK, K), and
:mod:`jaxkern.ops.delta_rule.channels` finds P and the decayed K and Q first, for them to multiply
by. T of each chunk is found first in both: by :mod:`jaxkern.ops.delta_rule.heads`, and then kept
for the backward, or with P, in the backward once more.

The scans go through the chunks (:mod:`jaxkern.ops.delta_rule.scan`), the backward's from the end to
the start. With dS of all chunks, the last kernel has a block from each state that the forward
saved to the next, and finds the gradients chunk by chunk: of heads in
:mod:`jaxkern.ops.delta_rule.heads`, of channels in :mod:`jaxkern.ops.delta_rule.channels`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.mosaic.launch import shared_memory
from jaxkern.ops.chunks import padded, unless_finite
from jaxkern.ops.delta_rule import channels, heads
from jaxkern.ops.delta_rule.call import CHUNK, F32, MOST_VALUES, PAIR, SAVED, SLICE, Call, up
from jaxkern.ops.delta_rule.reference import (
    DeltaRuleOptions,
    reference_bwd,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
    unit_length,
    whole,
)
from jaxkern.ops.delta_rule.scan import (
    first_columns,
    launch_carries,
    launch_carries_back,
    scan,
    scan_back,
    states_of_parts,
)


def launch_fwd(
    options: DeltaRuleOptions, q, k, v, g, beta, initial_state, rank, crossed
) -> tuple[Any, ...]:
    """Output, final state and, to save, states and T; as the reference."""
    args = q, k, v, g, beta, initial_state, rank, crossed
    if v.size == 0:
        return reference_fwd(options, *args)
    call = Call(options, q, k, v, g, beta, rank)
    found = _found(call)
    results = scan(call, _one(call, initial_state), found, save=options.save)
    out, final = call.cut_values(results["out"]), call.cut_states(results["final"][:, 0])
    states, T = None, None
    if options.save:
        count = -(-call.length // (SAVED * CHUNK))
        states = call.cut_states(results["states"][:, :count])
        if not call.by_channel:
            T = found["T"][:, : up(-(-call.length // CHUNK), PAIR)]
            T = T.reshape(*T.shape[:2], call.groups, call.rank, CHUNK, CHUNK)
    found = out, final if options.final else None, states
    if rank is not None:
        plain = lambda *args: reference_fwd(options, *args)[:3]
        found = unless_finite([final], found, plain, (*args[:7], None))
    return *found, T


def launch_carry(options: DeltaRuleOptions, k, v, g, beta, rank) -> tuple[Any, ...]:
    """M and R of a device's part of a sequence, as the reference."""
    args = k, v, g, beta, rank
    if v.size == 0:
        return reference_carry(options, *args)
    call = Call(options, k, k, v, g, beta, rank)
    carries = launch_carries(call.split(), call.split_arrays(_found(call)))
    return _carry(call, carries, functools.partial(reference_carry, options), args)


def launch_bwd_carry(options: DeltaRuleOptions, q, k, g, beta, dout, rank) -> tuple[Any, ...]:
    """M and R of the gradient of a state, as the reference."""
    args = q, k, g, beta, dout, rank
    if dout.size == 0:
        return reference_bwd_carry(options, *args)
    call = Call(options, q, k, dout, g, beta, rank)
    found = call.split_arrays(_found(call) | {"dout": call.v})
    carries = launch_carries_back(call.split(), found)
    plain = functools.partial(reference_bwd_carry, options)
    return _carry(call, carries, plain, args, reverse=True)


def _carry(
    call: Call, carries: Any, plain: Any, args: tuple[Any, ...], *, reverse: bool = False
) -> tuple[Any, ...]:
    """M, R and whether M counts, of all parts together."""
    first = jnp.broadcast_to(first_columns(call), carries[:: call.parts, 0].shape)
    state = states_of_parts(call, first, carries, reverse=reverse)[-1]
    own, matrix = jnp.split(state, [call.values], axis=-1)
    matrix = matrix[..., : call.key_channels, : call.key_channels]
    matrix = matrix.reshape(call.batch, call.groups, call.rank, *matrix.shape[2:])
    found = matrix, call.cut_states(own), whole(args[-1], matrix)
    return found if args[-1] is None else unless_finite([own], found, plain, args)


def _one(call: Call, state: Any) -> Any:
    """A state as those of one part."""
    return None if state is None else call.states(state)[:, None]


def _found(call: Call, T: Any = None) -> dict[str, Any]:
    """Arrays of the scans beside values; T, (B, chunks, G, R, CHUNK, CHUNK), may be known."""
    if call.by_channel:
        return channels.pairs(call)
    if T is not None:
        T = padded(T.reshape(*T.shape[:2], call.heads, CHUNK, CHUNK), 1, call.chunks)
    T = heads.inverses(call) if T is None else T
    return {"q": call.q, "k": call.k, "steps": call.steps, "T": T}


def launch_bwd_of_slices(options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients under ``vmap``."""
    return launch_bwd(options, *args, in_place=False)


def launch_bwd(options: DeltaRuleOptions, *args: Any, in_place: bool = True) -> tuple[Any, ...]:
    """The gradients, as the reference."""
    q, k, v, g, beta, initial_state, rank, _, states, T, dout, dfinal = args
    if v.size == 0:
        return reference_bwd(options, *args)
    # With 128 key channels the last kernel takes 220 KiB for both slices, 156 for one.
    most = MOST_VALUES if shared_memory() > 220 * 1024 else SLICE
    if v.shape[-1] > most:
        return _bwd_of_parts(most, options, *args, in_place=in_place)
    call = Call(options, q, k, v, g, beta, rank, in_place=in_place)
    of_values, found = call.of_values(dout), _found(call, T)
    ends = scan_back(call, _one(call, dfinal), found | {"dout": of_values})
    states = padded(call.states(states), 1, -(-call.chunks // SAVED))
    after = tuple(ends[f"after_{part}"] for part in range(call.slices))
    if call.by_channel:
        chunks = channels.launch_states(call, found, states)
        chunks |= {"dout": of_values, "dV": ends["dV"]}
        grads = channels.launch_grads(call, chunks, after)
        dg, dbeta = call.cut_channels(grads["dg"]), grads["dbeta"].sum(3)
    else:
        of_chunks = after, ends["dV"], found["T"]
        grads = heads.launch_grads(call, of_values, states, *of_chunks)
        dg, dbeta = heads.of_tokens(call, g, rank, grads)
    dq, dk = (call.cut_keys(grads[name], F32) for name in ("dq", "dk"))
    if options.qk_l2norm:
        wide = tuple(x.astype(F32) for x in (q, k))
        _, vjp = jax.vjp(lambda q, k: (unit_length(q), unit_length(k)), *wide)
        dq, dk = (x.astype(dq.dtype) for x in vjp((dq.astype(F32), dk.astype(F32))))
    dbeta = None if beta is None else call.cut_steps(dbeta).astype(beta.dtype)
    dinitial = call.cut_states(ends["dinitial"][:, 0])
    found = (
        *(dq, dk, call.cut_values(ends["dV"]), dg, dbeta),
        *(None if initial_state is None else dinitial, None, None),
    )
    if rank is None:
        return found
    plain = functools.partial(reference_bwd, options)
    given = *args[:7], None, args[8], None, dout, dfinal
    checked = [x for x in (dg, dbeta, dinitial) if x is not None]
    return unless_finite(checked, found, plain, given)


def _bwd_of_parts(
    most: int, options: DeltaRuleOptions, *args: Any, in_place: bool
) -> tuple[Any, ...]:
    """The gradients where a head has more than the `most` value channels that a kernel takes.

    Channels do not meet: parts of them are heads with the same q, k, g and β.
    """
    q, k, v, g, beta, first, rank, crossed, states, T, dout, dfinal = args
    channels, rank_of_v = v.shape[-1], v.shape[-2]
    parts = -(-channels // most)
    width = up(-(-channels // parts), SLICE)

    def cut(x: Any) -> Any:
        if x is None:
            return None
        x = padded(x, x.ndim - 1, parts * width).reshape(*x.shape[:-1], parts, width)
        return x.reshape(*x.shape[:-3], rank_of_v * parts, width)

    def cut_state(x: Any) -> Any:
        return None if x is None else jnp.swapaxes(cut(jnp.swapaxes(x, -3, -2)), -3, -2)

    def join(x: Any) -> Any:
        x = x.reshape(*x.shape[:-2], rank_of_v, parts * width)
        return x[..., :channels]

    repeat = lambda x: None if x is None else jnp.repeat(x, parts, axis=3)
    total = lambda x: (
        None if x is None else x.reshape(*x.shape[:3], rank_of_v, parts, *x.shape[4:]).sum(4)
    )
    dq, dk, dv, dg, dbeta, dfirst, *_ = launch_bwd(
        options,
        *(q, k, cut(v), repeat(g), repeat(beta), cut_state(first), rank, crossed),
        *(cut_state(states), repeat(T), cut(dout), cut_state(dfinal)),
        in_place=in_place,
    )
    if rank_of_v == 1:
        dq, dk = dq.astype(q.dtype), dk.astype(k.dtype)
    if dfirst is not None:
        dfirst = jnp.swapaxes(join(jnp.swapaxes(dfirst, -3, -2)), -3, -2)
    return dq, dk, join(dv), total(dg), total(dbeta), dfirst, None, None
