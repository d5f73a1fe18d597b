"""The SSD scan in plain JAX, in chunks: the specification and the ``"xla"`` implementation.

A scan over chunks, each of which is the products of :mod:`jaxkern.ops.ssd.op`. For the backward the
state before every block of `checkpoint_every` tokens is kept; a block runs once more to find the
states before its chunks, and a chunk once more to find the rest.

Arrays here have heads in groups: H = G·R, R heads of a group with the same B and C. Everything is
computed in fp32 (float64 if an argument is); products of 16-bit arguments are in JAX's default
precision, which on a GPU is TF32, as exact as they are.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import gather, vary_over, varying
from jaxkern.core.split import Axes
from jaxkern.ops.segments import Seen, along, with_zeros
from jaxkern.ops.ssd.packed import Aligned, Contained

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
class Options:
    """The static arguments of the passes."""

    final: bool
    checkpoint_every: int | None
    mode: Mode
    num_segments: int | None = None
    isolate_nan: bool = True  # in its segment, on the kernels, too
    save: bool = False  # states, for the backward
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


def saves_y(options: Options, z: Any) -> bool:
    """Whether a forward saves what its gate multiplies, which the gradient of `z` needs."""
    return z is not None and options.save and options.checkpoint_every is not None


def least_log_decay(dtype: Any) -> float:
    """What every lesser logarithm counts as, so that sums of them are finite: its decay is 0."""
    return float(jnp.finfo(dtype).minexp)


def saved_dtype(x: Any) -> Any:
    """The dtype of the states that are saved: fp16 could not hold one that grows."""
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.promote_types(x.dtype, jnp.float32)


def by_group(args: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """The arguments with heads, at `axis` of x, as (G, R): R in each of the G groups."""
    x, dt, A, B, C, D, z, dt_bias, state = args
    groups = B.shape[-2]
    x, dt, z = (split_heads(v, axis, groups) for v in (x, dt, z))
    A, D, dt_bias = (split_heads(v, 0, groups) for v in (A, D, dt_bias))
    state = split_heads(state, 0 if state is None else state.ndim - 3, groups)
    return x, dt, A, B, C, D, z, dt_bias, state


def split_heads(v: Any, axis: int, groups: int) -> Any:
    """`v` with H at `axis` as (G, R)."""
    if v is None or groups == 1:  # a new axis leaves heads split as they are on a mesh
        return None if v is None else jnp.expand_dims(v, axis)
    v = gather(v, axis, unless_parts_of=groups)
    return v.reshape(*v.shape[:axis], groups, v.shape[axis] // groups, *v.shape[axis + 1 :])


def join_heads(v: Any, axis: int) -> Any:
    """Undoes :func:`split_heads`, `axis` that of G."""
    if v is None or v.shape[axis] == 1:
        return None if v is None else jnp.squeeze(v, axis)
    return v.reshape(*v.shape[:axis], v.shape[axis] * v.shape[axis + 1], *v.shape[axis + 2 :])


class Tokens(NamedTuple):
    """The floating arrays with a time axis; `dt` are step sizes, `a` logarithms of decays."""

    x: Any  # (B, L, G, R, P)
    dt: Any  # (B, L, G, R)
    a: Any  # (B, L, G, R)
    B: Any  # (B, L, G, N)
    C: Any  # (B, L, G, N)
    z: Any  # (B, L, G, R, P)


class _Marks(NamedTuple):
    """Of packed sequences: the number of each token's segment, and what is at a chunk's ends.

    `before` is the number of the segment that a chunk's first state belongs to. Where segments have
    states, `enter` says whose state a chunk begins from, and `leave` whose it ends with; −1 for
    that of the chunk before, and for none.
    """

    rank: Any  # (B, L)
    before: Any  # (B, chunks)
    enter: Any
    leave: Any


class _Params(NamedTuple):
    """D, (G, R, 1 or P), and the initial states of segments, (B, S, G, R, P, N)."""

    D: Any
    starts: Any


class _States(NamedTuple):
    """What is handed from chunk to chunk: the state, and the final ones of segments that ended."""

    h: Any
    ends: Any


def ssd_reference(options: Options, *args: Any) -> tuple[Any, Any]:
    """:func:`ssd` in plain JAX: out (B, L, G, R, P), and the final state if wanted.

    Differentiable in both modes and to any order.
    """
    run = functools.partial(reference_fwd, dataclasses.replace(options, save=False))
    if options.checkpoint_every is None:
        run = jax.checkpoint(run)
    return run(*args)[:2]


def reference_fwd(
    options: Options, x, dt, a, B, C, D, z, initial_state, rank, crossed
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states and y; ``None`` for what is not asked for.

    Of states the final one is (B, G, R, P, N), with `num_segments` (B, S, G, R, P, N), and those to
    save (B, c, G, R, P, N). y is what the gate multiplies, as the output (B, L, G, R, P).
    """
    tokens = Tokens(x, dt, a, B, C, z)
    contained = Contained.of(options.num_segments, tokens, initial_state, rank, crossed)
    tokens, D, initial_state = contained.clean(tokens, D, initial_state)
    call = _Call(options, tokens, D, initial_state, rank, crossed)
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
    options: Options, x, dt, a, B, C, D, z, initial_state, rank, crossed, states, y, dout, dfinal
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
    call = _Call(options, tokens, D, initial_state, rank, crossed)
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


def reference_carry(options: Options, x, dt, a, B, rank) -> tuple[jax.Array, jax.Array]:
    """The decay over a part, (B, G, R), 0 where a segment begins in it, and its last state."""
    last = dataclasses.replace(options, final=True, save=False)
    _, state, *_ = reference_fwd(last, x, dt, a, B, B, None, None, None, rank, None)
    return _decay(a, rank), state


def reference_bwd_carry(options: Options, a, C, dy, rank) -> tuple[jax.Array, jax.Array]:
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


class _Call:
    """The arrays of a call, cut into blocks of chunks of tokens.

    Attributes:
      blocks: tokens and marks, (blocks, chunks, B, Q, …) and (blocks, chunks, B).
      params: D and the initial states of segments, in the dtype of the arithmetic.
    """

    def __init__(self, options, tokens: Tokens, D, initial_state, rank, crossed):
        batch, length, groups, heads, size = tokens.x.shape
        self.options, self.length = options, length
        self.acc = _accumulator(tokens, D, initial_state)
        every = options.checkpoint_every or RECOMPUTED_EVERY
        if isinstance(length, int):  # else it is symbolic
            every = min(every, max(length, 1))
        self.chunk = min(CHUNK, every)
        self.chunks = -(-every // self.chunk)  # of a block
        # In 16 bits nothing is lost by the products that tensor cores are fast at.
        wide = any(v.dtype.itemsize > 2 for v in (tokens.x, tokens.B, tokens.C))
        self.precision = "highest" if wide else None
        states = jnp.zeros((batch, groups, heads, size, tokens.B.shape[-1]), self.acc)
        self.h = vary_over(states, varying(tokens.x))
        count = options.num_segments
        self.aligned = None if count is None else Aligned.of(crossed, rank, count, self.chunk)
        starts = None
        if initial_state is not None and count is None:
            self.h = initial_state.astype(self.acc)
        elif initial_state is not None:
            starts = with_zeros(initial_state.astype(self.acc))
        D = None if D is None else of_heads(D).astype(self.acc)
        self.params = _Params(D, starts)
        self.blocks = self.to_blocks(tokens), self._marks(rank)

    @property
    def count(self) -> Any:
        """The number of blocks."""
        length = self.length if self.aligned is None else self.aligned.length
        return -(-length // (self.chunk * self.chunks))

    @property
    def total(self) -> Any:
        """The tokens of all chunks, of which some may be padding."""
        return self.count * self.chunks * self.chunk

    def to_blocks(self, tree: Any) -> Any:
        """(B, L, …) as (blocks, chunks, B, Q, …), with zeros for what is no token."""
        if self.aligned is not None:
            tree = jax.tree.map(self.aligned.spread, tree)
        return jax.tree.map(self._cut, tree)

    def _cut(self, v: jax.Array) -> jax.Array:
        v = jnp.pad(v, ((0, 0), (0, self.total - v.shape[1]), *[(0, 0)] * (v.ndim - 2)))
        v = v.reshape(v.shape[0], self.count, self.chunks, self.chunk, *v.shape[2:])
        return jnp.moveaxis(v, 0, 2)

    def of_tokens(self, v: jax.Array) -> jax.Array:
        """(blocks, chunks, B, Q, …) as (B, L, …)."""
        v = jnp.moveaxis(v, 2, 0)  # (B, blocks, chunks, Q, …)
        v = v.reshape(v.shape[0], self.total, *v.shape[4:])
        return v[:, : self.length] if self.aligned is None else self.aligned.collect(v)

    def _marks(self, rank: Any) -> _Marks:
        if rank is None:
            return _Marks(None, None, None, None)
        enter = leave = None
        if self.aligned is not None:
            rank = self.aligned.rank
        missing = self.total - rank.shape[1]
        rank = jnp.pad(rank, ((0, 0), (0, missing)), constant_values=-1)
        rank = lax.cummax(rank, axis=1)  # what follows the last token is of its segment
        firsts = rank[:, :: self.chunk]  # (B, chunks)
        lasts = rank[:, self.chunk - 1 :: self.chunk]
        before = jnp.concatenate([jnp.zeros_like(rank[:, :1]), lasts], axis=1)[:, :-1]
        if self.aligned is not None:
            none = ((0, 0), (0, firsts.shape[1] - self.aligned.enter.shape[1]))
            enter, leave = (
                jnp.pad(v, none, constant_values=-1)
                for v in (self.aligned.enter, self.aligned.leave)
            )
            before = jnp.where(enter >= 0, firsts, before)
        of_chunks = lambda v: jnp.moveaxis(v.reshape(v.shape[0], self.count, self.chunks), 0, 2)
        before, enter, leave = jax.tree.map(of_chunks, (before, enter, leave))
        return _Marks(self._cut(rank), before, enter, leave)

    def no_ends(self) -> Any:
        """Final states of no segment yet, (B, S, G, R, P, N)."""
        if not self.options.final or self.options.num_segments is None:
            return None
        zeros, count = jnp.zeros_like(self.h)[:, None], self.options.num_segments
        return jnp.broadcast_to(zeros, (zeros.shape[0], count, *zeros.shape[2:]))

    def start(self) -> _States:
        return _States(self.h, self.no_ends())


def _run_block(call: _Call, before: _States, block: Any, params: _Params) -> Any:
    """The chunks of a block; only the states before them are kept for the backward."""

    @_checkpoint
    def body(before, chunk):
        tokens, marks = chunk
        return _run_chunk(call, before, tokens, marks, params)

    return lax.scan(body, before, block)


def _run_chunk(
    call: _Call, before: _States, tokens: Tokens, marks: _Marks, params: _Params
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
