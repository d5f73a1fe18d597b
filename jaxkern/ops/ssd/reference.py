"""The SSD scan in plain JAX, in chunks: the specification and the ``"xla"`` implementation.

A scan over chunks, each of which is the products of :mod:`jaxkern.ops.ssd.op`. For the backward the
state before every block of `checkpoint_every` tokens is kept; a block runs once more to find the
states before its chunks, and a chunk once more to find the rest.

Arrays here have heads in groups: H = G·R, R heads of a group with the same B and C. Everything is
computed in fp32 (float64 if an argument is); products of 16-bit arguments are in JAX's default
precision, which on a GPU is TF32, as exact as they are.

Products take all tokens of a chunk, of whatever segment: of packed sequences NaN is kept in its
segment (`Contained`), and segments with states of their own are moved to chunks' ends (`Aligned`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes, vary_over, varying
from jaxkern.ops.scan_options import SequenceBlocks, split_groups
from jaxkern.ops.segments import Seen, along, with_zeros


class Contained(NamedTuple):
    """Masks of tokens with values that are not finite, which products keep in their segment.

    A product with a mask of zeros is NaN where the other operand is. So the products take zeros
    instead, and the results that depend on such a token become NaN. Without segments, where NaN may
    stay in the products, all is ``None``.
    """

    outs: Any = None  # (B, L, G, R): whether the output of a token is NaN
    skips: Any = None  # (G, R, P): whether the gradient of D is
    dtokens: Any = None  # (B, L, G, R): whether the gradients of a token are
    finals: Any = None  # (B, G, R) or (B, S, G, R): whether a final state is
    initials: Any = None  # the same of the gradient of an initial state

    @classmethod
    def of(
        cls,
        num_segments: int | None,
        tokens: Any,
        initial_state: Any,
        rank: Any,
        crossed: Any,
        dout: Any = None,
        dfinal: Any = None,
    ) -> "Contained":
        if rank is None:
            return cls()
        enter = _bad(tokens.x, -1) | _bad(tokens.B, -1)[..., None] | _bad(tokens.dt)
        enter = enter | jnp.isnan(tokens.a) | (tokens.a == jnp.inf)  # (B, L, G, R)
        own, skips = _bad(tokens.C, -1)[..., None], _bad(tokens.x, (0, 1))
        for v in (tokens.z, dout):
            own = own if v is None else own | _bad(v, -1)
            skips = skips if v is None else skips | _bad(v, (0, 1))
        states = None if initial_state is None else _bad(initial_state, (-2, -1))
        dstates = None if dfinal is None else _bad(dfinal, (-2, -1))
        if num_segments is None:
            first, last = (along(rank == of, enter) for of in (0, rank[:, -1:]))
            if states is not None:
                enter = enter | (first & states[:, None])
            ends = own if dstates is None else own | (last & dstates[:, None])
            whole = _anywhere(enter | ends, rank)
            finals, initials = jnp.any(enter & last, axis=1), jnp.any(whole & first, axis=1)
            return cls(_so_far(enter, rank) | own, skips, whole, finals, initials)
        of_state = _numbers(crossed, num_segments)[..., None] == jnp.arange(num_segments)
        of_state = of_state[..., None, None]  # (B, L, S, 1, 1)
        any_of = lambda bad: jnp.any(bad[:, :, None] & of_state, axis=1)  # (B, S, G, R)
        to_tokens = lambda bad: jnp.any(bad[:, None] & of_state, axis=2)  # (B, L, G, R)
        if states is not None:
            enter = enter | to_tokens(states)
        ends = own if dstates is None else own | to_tokens(dstates)
        whole = _anywhere(enter | ends, rank)
        finals, initials = any_of(enter), any_of(whole)
        if states is not None:  # of an absent segment, the state passes through
            finals = finals | states
        if dstates is not None:
            initials = initials | dstates
        return cls(_so_far(enter, rank) | own, skips, whole, finals, initials)

    def clean(self, tokens: Any, D: Any, initial_state: Any) -> tuple[Any, Any, Any]:
        """The arguments with zeros for what is not finite, and NaN for its gradients.

        `D` stays as it is: what it gives no sum takes to another token.
        """
        if self.outs is None:
            return tokens, D, initial_state
        masks = zip(tokens, self._masks(), strict=True)
        cleaned = [v if v is None else _clean(v, m) for v, m in masks]
        if initial_state is not None:
            initial_state = _clean(initial_state, self.initials[..., None, None])
        if D is not None:
            D = _with_gradient(jnp.asarray, D, self._of_weight(D))
        return type(tokens)(*cleaned), D, initial_state

    def _masks(self) -> tuple[jax.Array, ...]:
        """Masks of what is not finite in the gradient of each of :class:`Tokens`."""
        bad = self.dtokens
        of_heads, of_group = bad[..., None], jnp.any(bad, axis=-1, keepdims=True)
        return of_heads, bad, bad, of_group, of_group, of_heads

    def _of_weight(self, D: jax.Array) -> jax.Array:
        return self.skips if D.ndim == 3 else jnp.any(self.skips, axis=-1)

    def clean_cotangents(self, *cotangents: Any) -> Any:
        if self.outs is None:
            return cotangents
        return tuple(v if v is None else _finite(v) for v in cotangents)

    def out(self, out: jax.Array) -> jax.Array:
        return out if self.outs is None else _nan_where(out, self.outs[..., None])

    def final(self, final: jax.Array) -> jax.Array:
        if self.outs is None:
            return final
        return _nan_where(final, self.finals[..., None, None])

    def gradients(self, dtokens: Any, dD: Any, dinitial: Any) -> tuple[Any, Any, Any]:
        if self.outs is None:
            return dtokens, dD, dinitial
        dtokens = [
            v if v is None else jnp.where(m, jnp.nan, v)
            for v, m in zip(dtokens, self._masks(), strict=True)
        ]
        if dinitial is not None:
            dinitial = jnp.where(self.initials[..., None, None], jnp.nan, dinitial)
        if dD is not None:
            dD = jnp.where(self._of_weight(dD), jnp.nan, dD)
        return dtokens, dD, dinitial


def _bad(v: jax.Array, axis: Any = ()) -> jax.Array:
    return jnp.any(~jnp.isfinite(v), axis=axis)


def _finite(v: jax.Array) -> jax.Array:
    """`v` with zeros for NaN and ∞."""
    return jnp.where(jnp.isfinite(v), v, jnp.zeros((), v.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradient(value: Callable[[jax.Array], jax.Array], v: jax.Array, bad: jax.Array) -> Any:
    """`value(v)` with the gradient of `v`, and NaN where `bad`."""
    del bad
    return value(v)


@_with_gradient.defjvp
def _with_gradient_jvp(value: Any, primals: Any, tangents: Any) -> Any:
    (v, bad), (dv, _) = primals, tangents
    return value(v), dv * jnp.where(bad, jnp.nan, 1).astype(dv.dtype)


_clean = functools.partial(_with_gradient, _finite)


@jax.custom_jvp
def _nan_where(v: jax.Array, bad: jax.Array) -> jax.Array:
    """NaN where `bad`, but a gradient as of `v`: D's holds what the other weights' does not."""
    return jnp.where(bad, jnp.nan, v)


@_nan_where.defjvp
def _nan_where_jvp(primals: Any, tangents: Any) -> Any:
    (v, bad), (dv, _) = primals, tangents
    return _nan_where(v, bad), dv


def _so_far(bad: jax.Array, rank: jax.Array) -> jax.Array:
    """Whether a token of (B, L, G, R) or one before it in its segment is `bad`."""
    time = jnp.arange(rank.shape[1], dtype=jnp.int32)[None]
    before = jnp.concatenate([rank[:, :1], rank], axis=1)[:, :-1]
    first = lax.cummax(jnp.where(rank != before, time, 0), axis=1)
    last = lax.cummax(jnp.where(bad, along(time, bad), -1), axis=1)
    return last >= along(first, bad)


def _anywhere(bad: jax.Array, rank: jax.Array) -> jax.Array:
    """Whether any token of a token's segment is `bad`."""
    flip = lambda v: jnp.flip(v, axis=1)
    return _so_far(bad, rank) | flip(_so_far(flip(bad), flip(rank)))


def _numbers(crossed: jax.Array, num_segments: int) -> jax.Array:
    """(B, L): whose state the segment of a token begins from, S for nobody's."""
    time = jnp.arange(crossed.shape[1], dtype=jnp.int32)[None]
    first = lax.cummax(jnp.where(crossed >= 0, time, 0), axis=1)
    return jnp.take_along_axis(crossed, first, axis=1) % (num_segments + 1)


class Aligned(NamedTuple):
    """Tokens spread so that a segment with a state begins with a chunk, and ends with one.

    Attributes:
      position: of each token, (B, L).
      source: the token at each position, (B, L'), L for none.
      rank: the number of the segment there, (B, L'); −1 where there is no token.
      enter, leave: whose state a chunk begins from, and whose it ends with, (B, chunks): −1 for
        the previous chunk's, and for none.
    """

    position: Any
    source: Any
    rank: Any
    enter: Any
    leave: Any

    @classmethod
    def of(cls, crossed: jax.Array, rank: jax.Array, num_segments: int, chunk: int) -> "Aligned":
        batch, length = crossed.shape
        none = num_segments
        ended, new = crossed // (none + 1), crossed % (none + 1)
        cut = (crossed >= 0) & ((ended < none) | (new < none))  # (B, L): a chunk begins here
        time = jnp.arange(length, dtype=jnp.int32)[None]
        first = lax.cummax(jnp.where(cut, time, 0), axis=1)
        before = jnp.concatenate([jnp.zeros_like(first[:, :1]), first], axis=1)[:, :-1]
        chunks_before = jnp.where(cut, (time - before + chunk - 1) // chunk, 0)
        position = jnp.cumsum(chunks_before, axis=1) * chunk + time - first
        # Each of S states is entered once and left once, and each time less than a chunk is lost.
        chunks = (length + (2 * none + 1) * (chunk - 1)) // chunk
        put = jax.vmap(lambda v, i, new: v.at[i].set(new, mode="drop"))
        spread = lambda fill, v: put(
            jnp.full((batch, chunks * chunk), fill, jnp.int32), position, v.astype(jnp.int32)
        )
        at = position // chunk
        of_chunk = lambda where, i, v: put(
            jnp.full((batch, chunks), -1, jnp.int32), jnp.where(where, i, chunks), v
        )
        return cls(
            position=position,
            source=spread(length, jnp.broadcast_to(time, crossed.shape)),
            rank=spread(-1, rank),
            enter=of_chunk(cut & (new < none), at, new),
            leave=of_chunk(cut & (ended < none), at - 1, ended),
        )

    @property
    def length(self) -> Any:
        return self.source.shape[1]

    def spread(self, v: jax.Array) -> jax.Array:
        """(B, L, …) as (B, L', …), with zeros where there is no token."""
        pick = lambda v, i: v.at[i].get(mode="fill", fill_value=0)
        return jax.vmap(pick)(v, self.source)

    def collect(self, v: jax.Array) -> jax.Array:
        """(B, L', …) as (B, L, …)."""
        return jax.vmap(lambda v, i: v[i])(v, self.position)


CHUNK = 64
"""Tokens of a chunk. On 2 CPU cores, forward + backward at (B, L, H, P, N, G) = (2, 1024, 8, 64,
128, 1) took 89, 83 and 107 ms of CPU time with 16, 32 and 64, and a scan of tokens 1139; on a GPU
fewer and larger products are better."""

SAVED_CHUNK = 128
"""Tokens of which `checkpoint_every` is a multiple: a chunk of the kernels."""

DEFAULT_CHECKPOINT_EVERY = SAVED_CHUNK
"""Tokens from one saved state to the next where the caller does not say."""

RECOMPUTED_EVERY = 512
"""The same for the states that a backward computes first where none were saved."""

_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)


@dataclasses.dataclass(frozen=True)
class SsdOptions:
    """The static arguments of the passes."""

    final: bool
    checkpoint_every: int | None
    mode: Mode
    num_segments: int | None = None
    isolate_nan: bool = True  # in its segment, on the kernels, too
    save: bool = False  # states, for the backward
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


def saves_y(options: SsdOptions, z: Any) -> bool:
    """Whether a forward saves what its gate multiplies, which the gradient of `z` needs."""
    return z is not None and options.save and options.checkpoint_every is not None


def least_log_decay(dtype: Any) -> float:
    """Lower bound of logarithms, so that sums of them are finite: its decay is 0."""
    return float(jnp.finfo(dtype).minexp)


def saved_dtype(x: Any) -> Any:
    """The dtype of the states that are saved: fp16 could not hold one that grows."""
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.promote_types(x.dtype, jnp.float32)


def by_group(args: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """The arguments with heads, at `axis` of x, as (G, R): R in each of the G groups."""
    x, dt, A, B, C, D, z, dt_bias, state = args
    groups = B.shape[-2]
    x, dt, z = (split_groups(v, axis, groups) for v in (x, dt, z))
    A, D, dt_bias = (split_groups(v, 0, groups) for v in (A, D, dt_bias))
    state = split_groups(state, 0 if state is None else state.ndim - 3, groups)
    return x, dt, A, B, C, D, z, dt_bias, state


class Tokens(NamedTuple):
    """The floating arrays with a time axis; `dt` are step sizes, `a` logarithms of decays."""

    x: Any  # (B, L, G, R, P)
    dt: Any  # (B, L, G, R)
    a: Any  # (B, L, G, R)
    B: Any  # (B, L, G, N)
    C: Any  # (B, L, G, N)
    z: Any  # (B, L, G, R, P)


class _Marks(NamedTuple):
    """Segment number of each token of packed sequences, and segments at a chunk's ends.

    `before` is the number of the segment that a chunk's first state belongs to. Where segments have
    states, `enter` says whose state a chunk begins from, and `leave` whose it ends with; −1 for
    the previous chunk's, and for none.
    """

    rank: Any  # (B, L)
    before: Any  # (B, chunks)
    enter: Any
    leave: Any


class _SsdParams(NamedTuple):
    """D, (G, R, 1 or P), and the initial states of segments, (B, S, G, R, P, N)."""

    D: Any
    starts: Any


class _States(NamedTuple):
    """Carry from chunk to chunk: the state, and the final states of segments that ended."""

    h: Any
    ends: Any


def ssd_reference(options: SsdOptions, *args: Any) -> tuple[Any, Any]:
    """:func:`ssd` in plain JAX: out (B, L, G, R, P), and the final state if wanted.

    Differentiable in both modes and to any order.
    """
    run = functools.partial(reference_fwd, dataclasses.replace(options, save=False))
    if options.checkpoint_every is None:
        run = jax.checkpoint(run)
    return run(*args)[:2]


def reference_fwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank, crossed
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states and y; ``None`` for what is not asked for.

    Of states the final one is (B, G, R, P, N), with `num_segments` (B, S, G, R, P, N), and those to
    save (B, c, G, R, P, N). y is what the gate multiplies, as the output (B, L, G, R, P).
    """
    tokens = Tokens(x, dt, a, B, C, z)
    contained = Contained.of(options.num_segments, tokens, initial_state, rank, crossed)
    tokens, D, initial_state = contained.clean(tokens, D, initial_state)
    call = _SsdCall(options, tokens, D, initial_state, rank, crossed)
    save = options.save and options.checkpoint_every is not None

    @_checkpoint
    def body(before, block):
        after, outs = _run_block(call, before, block, call.params)
        return after, (*outs, before.h.astype(saved_dtype(x)) if save else None)

    after, (out, y, states) = lax.scan(body, call.start(), call.blocks)
    out, y = (None if v is None else contained.out(call.of_tokens(v)) for v in (out, y))
    final = None
    if options.final:
        final = after.h
        if options.num_segments is not None:
            final = Seen.of(crossed, options.num_segments).final(after.ends, final, initial_state)
        final = contained.final(final)
    return out, final, jnp.moveaxis(states, 0, 1) if save else None, y


def reference_bwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank, crossed, states, y, dout, dfinal
) -> tuple[Any, ...]:
    """The gradients; those that sum over heads, batch rows or time are left in fp32."""
    del y  # found again with the rest of a chunk
    given = initial_state
    if states is None:
        options = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY)
        saving = dataclasses.replace(options, save=True)
        args = x, dt, a, B, C, D, z, initial_state, rank, crossed
        _, _, states, _ = reference_fwd(saving, *args)
    tokens = Tokens(x, dt, a, B, C, z)
    contained = Contained.of(
        options.num_segments, tokens, initial_state, rank, crossed, dout, dfinal
    )
    tokens, D, initial_state = contained.clean(tokens, D, initial_state)
    dout, dfinal = contained.clean_cotangents(dout, dfinal)
    acc = _accumulator(tokens, D, initial_state)
    tokens = tokens._replace(B=tokens.B.astype(acc), C=tokens.C.astype(acc))
    call = _SsdCall(options, tokens, D, initial_state, rank, crossed)
    seen = None if options.num_segments is None else Seen.of(crossed, options.num_segments)

    @_checkpoint
    def body(carry, block):
        dstates, dparams = carry
        (tokens, marks), before, dout = block
        run = lambda before, tokens, params: _run_block(call, before, (tokens, marks), params)
        before = _States(before.astype(acc), call.no_ends())
        _, vjp = jax.vjp(run, before, tokens, call.params)
        dstates, dtokens, more = vjp((dstates, (dout, None)))
        return (dstates, jax.tree.map(jnp.add, dparams, more)), dtokens

    dh, dends = jnp.zeros_like(call.start().h), call.no_ends()
    if dfinal is not None:
        dh = (dfinal if seen is None else seen.of_row(dfinal)).astype(acc)
        dends = None if seen is None else dfinal.astype(acc)
    init = _States(dh, dends), jax.tree.map(jnp.zeros_like, call.params)
    blocks = call.blocks, jnp.moveaxis(states, 1, 0), call.to_blocks(dout)
    ((dh, _), dparams), dtokens = lax.scan(body, init, blocks, reverse=True)
    dtokens = Tokens(*(None if v is None else call.of_tokens(v) for v in dtokens))
    dD = None if D is None else dparams.D.reshape(D.shape)
    dinitial = None if given is None else dh
    if given is not None and seen is not None:
        dinitial = seen.initial(dparams.starts[:, :-1], dfinal)
    dtokens, dD, dinitial = contained.gradients(dtokens, dD, dinitial)
    dx, ddt, da, dB, dC, dz = dtokens
    return dx, ddt, da, dB, dC, dD, dz, dinitial, None, None


def reference_carry(options: SsdOptions, x, dt, a, B, rank) -> tuple[jax.Array, jax.Array]:
    """The decay over a part, (B, G, R), 0 where a segment begins in it, and its last state."""
    last = dataclasses.replace(options, final=True, save=False)
    _, state, *_ = reference_fwd(last, x, dt, a, B, B, None, None, None, rank, None)
    return _decay(a, rank), state


def reference_bwd_carry(options: SsdOptions, a, C, dy, rank) -> tuple[jax.Array, jax.Array]:
    """The decay over a part, and the gradient of the state before it, from zero after it.

    dh ← exp(a) · (dh + dy ⊗ C) is the forward's recurrence, from the end, with steps exp(a).
    """
    back = lambda v: jnp.flip(v, axis=1)
    from_end = None if rank is None else back(rank[:, -1:] - rank)
    _, dh = reference_carry(options, back(dy), back(jnp.exp(a)), back(a), back(C), from_end)
    return _decay(a, rank), dh


def _decay(a: jax.Array, rank: Any) -> jax.Array:
    total = jnp.sum(a, axis=1)
    if rank is not None:  # masked before the exponential, which may overflow over several segments
        total = jnp.where(along(rank[:, 0] == rank[:, -1], total), total, -jnp.inf)
    return jnp.exp(total)


def of_states(decay: jax.Array) -> jax.Array:
    """The decays of parts, (…, R), as factors of states, NaN for a 0, which keeps nothing."""
    return jnp.where(decay == 0, jnp.nan, decay)[..., None, None]


def step(tokens: Tokens, D: Any, h: jax.Array) -> tuple[Any, Any]:
    """One token, x (B, G, R, P): its output and the next state, (B, G, R, P, N)."""
    acc = _accumulator(tokens, D, h)
    x, dt, a, B, C = (v.astype(acc) for v in tokens[:5])
    entered = jnp.einsum("bgrp,bgn->bgrpn", dt[..., None] * x, B)
    h = jnp.exp(a)[..., None, None] * h.astype(acc) + entered
    y = jnp.einsum("bgrpn,bgn->bgrp", h, C, precision="highest")
    y = with_skip(y, x, None if D is None else of_heads(D).astype(acc))
    return gated(y, tokens.z).astype(tokens.x.dtype), h


def of_heads(D: jax.Array) -> jax.Array:
    """D as (G, R, 1 or P)."""
    return D[..., None] if D.ndim == 2 else D


def _accumulator(tokens: Tokens, D: Any, initial_state: Any) -> Any:
    floats = [v for v in (*tokens, D, initial_state) if v is not None]
    return jnp.result_type(jnp.float32, *floats)


class _SsdCall:
    """The arrays of a call, cut into blocks of chunks of tokens.

    Attributes:
      cuts: how the sequence is cut.
      aligned: where segments have states, how tokens are spread over chunks; else ``None``.
      blocks: tokens and marks, (blocks, chunks, B, Q, …) and (blocks, chunks, B).
      params: D and the initial states of segments, in the dtype of the arithmetic.
    """

    def __init__(self, options, tokens: Tokens, D, initial_state, rank, crossed):
        batch, length, groups, heads, size = tokens.x.shape
        self.options = options
        self.acc = _accumulator(tokens, D, initial_state)
        # In 16 bits nothing is lost by the products that tensor cores are fast at.
        any_fp32 = any(v.dtype.itemsize > 2 for v in (tokens.x, tokens.B, tokens.C))
        self.precision = "highest" if any_fp32 else None
        states = jnp.zeros((batch, groups, heads, size, tokens.B.shape[-1]), self.acc)
        self.h = vary_over(states, varying(tokens.x))
        count = options.num_segments
        every = options.checkpoint_every or RECOMPUTED_EVERY
        self.cuts = SequenceBlocks.of(length, every, CHUNK)
        self.aligned = None
        if count is not None:
            self.aligned = Aligned.of(crossed, rank, count, self.cuts.chunk)
            self.cuts = dataclasses.replace(self.cuts, length=self.aligned.length)
        starts = None
        if initial_state is not None and count is None:
            self.h = initial_state.astype(self.acc)
        elif initial_state is not None:
            starts = with_zeros(initial_state.astype(self.acc))
        D = None if D is None else of_heads(D).astype(self.acc)
        self.params = _SsdParams(D, starts)
        self.blocks = self.to_blocks(tokens), self._marks(rank)

    def to_blocks(self, tree: Any) -> Any:
        """(B, L, …) as (blocks, chunks, B, Q, …), with zeros for what is no token."""
        if self.aligned is not None:
            tree = jax.tree.map(self.aligned.spread, tree)
        return jax.tree.map(self.cuts.cut, tree)

    def of_tokens(self, v: jax.Array) -> jax.Array:
        """(blocks, chunks, B, Q, …) as (B, L, …)."""
        v = self.cuts.join(v)
        return v if self.aligned is None else self.aligned.collect(v)

    def _marks(self, rank: Any) -> _Marks:
        if rank is None:
            return _Marks(None, None, None, None)
        cuts, enter, leave = self.cuts, None, None
        if self.aligned is not None:
            rank = self.aligned.rank
        missing = cuts.total - rank.shape[1]
        rank = jnp.pad(rank, ((0, 0), (0, missing)), constant_values=-1)
        rank = lax.cummax(rank, axis=1)  # what follows the last token is of its segment
        firsts = rank[:, :: cuts.chunk]  # (B, chunks)
        lasts = rank[:, cuts.chunk - 1 :: cuts.chunk]
        before = jnp.concatenate([jnp.zeros_like(rank[:, :1]), lasts], axis=1)[:, :-1]
        if self.aligned is not None:
            none = ((0, 0), (0, firsts.shape[1] - self.aligned.enter.shape[1]))
            enter, leave = (
                jnp.pad(v, none, constant_values=-1)
                for v in (self.aligned.enter, self.aligned.leave)
            )
            before = jnp.where(enter >= 0, firsts, before)
        of_chunks = lambda v: jnp.moveaxis(v.reshape(v.shape[0], cuts.count, cuts.chunks), 0, 2)
        before, enter, leave = jax.tree.map(of_chunks, (before, enter, leave))
        return _Marks(cuts.cut(rank), before, enter, leave)

    def no_ends(self) -> Any:
        """Final states of no segment yet, (B, S, G, R, P, N)."""
        if not self.options.final or self.options.num_segments is None:
            return None
        zeros, count = jnp.zeros_like(self.h)[:, None], self.options.num_segments
        return jnp.broadcast_to(zeros, (zeros.shape[0], count, *zeros.shape[2:]))

    def start(self) -> _States:
        return _States(self.h, self.no_ends())


def _run_block(call: _SsdCall, before: _States, block: Any, params: _SsdParams) -> Any:
    """The chunks of a block; only the states before them are kept for the backward."""

    @_checkpoint
    def body(before, chunk):
        tokens, marks = chunk
        return _run_chunk(call, before, tokens, marks, params)

    return lax.scan(body, before, block)


def _run_chunk(
    call: _SsdCall, before: _States, tokens: Tokens, marks: _Marks, params: _SsdParams
) -> tuple[_States, tuple[jax.Array, Any]]:
    """Q tokens from the state, (B, G, R, P, N), to that after them; out and y, (B, Q, G, R, P)."""
    h, ends = before
    if params.starts is not None:
        number = jnp.where(marks.enter < 0, 0, marks.enter)
        begin = jax.vmap(lambda v, i: v[i])(params.starts, number)
        h = jnp.where(along(marks.enter >= 0, h), begin, h)
    elif marks.enter is not None:
        h = jnp.where(along(marks.enter >= 0, h), 0, h)
    product = functools.partial(jnp.einsum, precision=call.precision)
    x, dt, a, B, C = (v.astype(call.acc) for v in tokens[:5])
    dt = jnp.moveaxis(dt, 1, -1)  # (B, G, R, Q)
    cum, between = _decay_sums(jnp.moveaxis(a, 1, -1))  # (B, G, R, Q), (B, G, R, Q, Q)
    times = jnp.arange(x.shape[1])
    same = times[:, None] >= times  # (Q, Q)
    if marks.rank is not None:
        same = same & (marks.rank[:, :, None] == marks.rank[:, None])  # (B, Q, Q)
        same = same[:, None, None]
    # Masked before the exponentials: what is above the diagonal, or of another segment, may be that
    # of large numbers, whose gradient would be 0 · ∞.
    decays = jnp.exp(jnp.where(same, between, -jnp.inf))
    scores = product("bign,bjgn->bgij", C, B)
    weights = decays * scores[:, :, None] * dt[..., None, :]
    y = product("bgrij,bjgrp->bigrp", weights, x)
    of_start = product("bign,bgrpn->bigrp", C, h)
    if marks.rank is not None:
        first = marks.rank == marks.before[:, None]  # (B, Q): of the segment that h belongs to
        cum = jnp.where(first[:, None, None], cum, -jnp.inf)
        of_start = jnp.where(along(first, of_start), of_start, 0)
        h = jnp.where(along(first[:, -1], h), h, 0)
    from_start, to_end = jnp.exp(cum), decays[..., -1, :] * dt  # (B, G, R, Q)
    of_start = of_start * jnp.moveaxis(from_start, -1, 1)[..., None]
    entered = product("bjgrp,bjgn->bgrpn", jnp.moveaxis(to_end, -1, 1)[..., None] * x, B)
    h = from_start[..., -1, None, None] * h + entered
    if ends is not None:
        number = jnp.where(marks.leave < 0, ends.shape[1], marks.leave)
        ends = jax.vmap(lambda v, i, h: v.at[i].set(h, mode="drop"))(ends, number, h)
    y, dtype = with_skip(y + of_start, x, params.D), tokens.x.dtype
    saved = y.astype(dtype) if saves_y(call.options, tokens.z) else None
    return _States(h, ends), (gated(y, tokens.z).astype(dtype), saved)


def with_skip(y: jax.Array, x: jax.Array, D: Any) -> jax.Array:
    """h · C + D · x; `D` is (G, R, 1) or (G, R, P)."""
    return y if D is None else y + D * x


def gated(y: jax.Array, z: Any) -> jax.Array:
    """The output of y."""
    return y if z is None else y * jax.nn.silu(z.astype(y.dtype))


def _decay_sums(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Σ a over the tokens up to i, (…, Q), and Σ a over those after j up to i, (…, Q, Q).

    Each of the latter is a sum of its own: differences of the former lose the digits that the sums
    before j take, and so do their gradients.
    """
    times = jnp.arange(a.shape[-1])
    upto = (times[:, None] >= times).astype(a.dtype)
    add = functools.partial(jnp.einsum, precision="highest")
    after = jnp.where(times[:, None] > times, a[..., None], 0)
    return add("ij,...j->...i", upto, a), add("it,...tj->...ij", upto, after)
