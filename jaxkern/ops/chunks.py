"""Scans in chunks of tokens: what ssd and the gated delta rule have in common.

In plain JAX they are all here; the last section is about arrays that go into kernels.

A scan over chunks, each of which is a few products, that an op's tokens describe (:class:`Tokens`).
For the backward the state before every block of `checkpoint_every` tokens is kept; a block runs
once more to find the states before its chunks, and a chunk once more to find the rest.

Arrays here have heads in groups: H = G·R, R heads of a group. Everything is computed in fp32
(float64 if an argument is); products of 16-bit arguments are in JAX's default precision, which on a
GPU is TF32, as exact as they are.

Products take all tokens of a chunk, of whatever segment: of packed sequences NaN is kept in its
segment (`Contained`), and segments with states of their own are moved to chunks' ends (`Aligned`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.mesh import vary_over, varying
from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.ops import segments
from jaxkern.ops.scan_options import SequenceBlocks
from jaxkern.ops.segments import Seen, along, with_zeros

CHUNK = 64
"""Tokens of a chunk. On 2 CPU cores, forward + backward of ssd at (B, L, H, P, N, G) = (2, 1024, 8,
64, 128, 1) took 89, 83 and 107 ms of CPU time with 16, 32 and 64, and a scan of tokens 1139; on a
GPU fewer and larger products are better."""

RECOMPUTED_EVERY = 512
"""Tokens from one state to the next that a backward computes first where none were saved."""

_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)


def _scan(body: Callable[..., Any], init: Any, xs: Any, **options: Any) -> Any:
    """``lax.scan``, without a loop of one step: in some programs XLA never ends to inline one."""
    if jax.tree.leaves(xs)[0].shape[0] != 1:
        return lax.scan(body, init, xs, **options)
    carry, outs = body(init, jax.tree.map(lambda v: v[0], xs))
    return carry, jax.tree.map(lambda v: v[None], outs)


class Tokens(Protocol):
    """The floating arrays of an op with a time axis, (B, L, …): a ``NamedTuple`` of them."""

    @property
    def out(self) -> Any:
        """The array whose shape and dtype the output has, (B, L, G, R, P)."""
        ...

    @property
    def multiplied(self) -> tuple[Any, ...]:
        """The arrays that are multiplied with each other."""
        ...

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a row's state, (G, R, …)."""
        ...

    @property
    def saved(self) -> Any:
        """The dtype of the states that are saved."""
        ...

    def widened(self, acc: Any) -> Self:
        """The tokens with those arrays in `acc` whose gradients sum over heads."""
        ...

    def not_finite(self, dout: Any) -> tuple[Any, Any, Any]:
        """Masks of tokens, (B, L, G, R), that make states NaN and that make their output NaN.

        With the cotangent of the output; and of the weights whose gradient is NaN.
        """
        ...

    def masks(self, bad: Any) -> tuple[Any, ...]:
        """Masks of the gradient of each array from the mask of its tokens, (B, L, G, R)."""
        ...

    def run_chunk(self, scan: "ChunkedScan", h: Any, marks: "Marks", D: Any) -> Any:
        """The state after Q tokens from `h`, and their output and what is saved of it."""
        ...


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
        enter, own, skips = tokens.not_finite(dout)
        states = None if initial_state is None else bad_of(initial_state, (-2, -1))
        dstates = None if dfinal is None else bad_of(dfinal, (-2, -1))
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
        masks = zip(tokens, tokens.masks(self.dtokens), strict=True)
        cleaned = [v if v is None else _clean(v, m) for v, m in masks]
        if initial_state is not None:
            initial_state = _clean(initial_state, self.initials[..., None, None])
        if D is not None:
            D = _with_gradient(jnp.asarray, D, self._of_weight(D))
        return type(tokens)(*cleaned), D, initial_state

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
            for v, m in zip(dtokens, dtokens.masks(self.dtokens), strict=True)
        ]
        if dinitial is not None:
            dinitial = jnp.where(self.initials[..., None, None], jnp.nan, dinitial)
        if dD is not None:
            dD = jnp.where(self._of_weight(dD), jnp.nan, dD)
        return dtokens, dD, dinitial


def bad_of(v: jax.Array, axis: Any = ()) -> jax.Array:
    """Whether any value along `axis` is NaN or infinite."""
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


def least_log_decay(dtype: Any) -> float:
    """Lower bound of logarithms, so that sums of them are finite: its decay is 0."""
    return float(jnp.finfo(dtype).minexp)


class Marks(NamedTuple):
    """Segment number of each token of packed sequences, and segments at a chunk's ends.

    `before` is the number of the segment that a chunk's first state belongs to. Where segments have
    states, `enter` says whose state a chunk begins from, and `leave` whose it ends with; −1 for
    the previous chunk's, and for none.
    """

    rank: Any  # (B, L)
    before: Any  # (B, chunks)
    enter: Any
    leave: Any


class Params(NamedTuple):
    """D, (G, R, 1 or P), and the initial states of segments, (B, S, G, R, …)."""

    D: Any
    starts: Any


class States(NamedTuple):
    """Carry from chunk to chunk: the state, and the final states of segments that ended."""

    h: Any
    ends: Any


def scan_fwd(
    options: Any, tokens: Any, D: Any, initial_state: Any, rank: Any, crossed: Any
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states and what a chunk saves; ``None`` where not asked.

    Of states the final one is (B, G, R, …), with `num_segments` (B, S, G, R, …), and those to save
    (B, c, G, R, …).
    """
    contained = Contained.of(options.num_segments, tokens, initial_state, rank, crossed)
    dtype = tokens.saved
    tokens, D, initial_state = contained.clean(tokens, D, initial_state)
    scan = ChunkedScan(options, tokens, D, initial_state, rank, crossed)
    save = options.save and options.checkpoint_every is not None

    @_checkpoint
    def body(before, block):
        after, outs = _run_block(scan, before, block, scan.params)
        return after, (*outs, before.h.astype(dtype) if save else None)

    after, (out, y, states) = _scan(body, scan.start(), scan.blocks)
    out, y = (None if v is None else contained.out(scan.of_tokens(v)) for v in (out, y))
    final = None
    if options.final:
        final = after.h
        if options.num_segments is not None:
            final = Seen.of(crossed, options.num_segments).final(after.ends, final, initial_state)
        final = contained.final(final)
    return out, final, jnp.moveaxis(states, 0, 1) if save else None, y


def scan_bwd(
    options: Any, tokens: Any, D: Any, initial_state, rank, crossed, states, dout, dfinal
) -> tuple[Any, Any, Any]:
    """The gradients of tokens, D and initial state; those of `D` and of the state in fp32."""
    given = initial_state
    if states is None:
        options = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY)
        saving = dataclasses.replace(options, save=True)
        _, _, states, _ = scan_fwd(saving, tokens, D, initial_state, rank, crossed)
    contained = Contained.of(
        options.num_segments, tokens, initial_state, rank, crossed, dout, dfinal
    )
    tokens, D, initial_state = contained.clean(tokens, D, initial_state)
    dout, dfinal = contained.clean_cotangents(dout, dfinal)
    acc = accumulator(tokens, D, initial_state)
    scan = ChunkedScan(options, tokens.widened(acc), D, initial_state, rank, crossed)
    seen = None if options.num_segments is None else Seen.of(crossed, options.num_segments)

    @_checkpoint
    def body(carry, block):
        dstates, dparams = carry
        (tokens, marks), before, dout = block
        run = lambda before, tokens, params: _run_block(scan, before, (tokens, marks), params)
        before = States(before.astype(acc), scan.no_ends())
        _, vjp = jax.vjp(run, before, tokens, scan.params)
        dstates, dtokens, more = vjp((dstates, (dout, None)))
        return (dstates, jax.tree.map(jnp.add, dparams, more)), dtokens

    dh, dends = jnp.zeros_like(scan.start().h), scan.no_ends()
    if dfinal is not None:
        dh = (dfinal if seen is None else seen.of_row(dfinal)).astype(acc)
        dends = None if seen is None else dfinal.astype(acc)
    init = States(dh, dends), jax.tree.map(jnp.zeros_like, scan.params)
    blocks = scan.blocks, jnp.moveaxis(states, 1, 0), scan.to_blocks(dout)
    ((dh, _), dparams), dtokens = _scan(body, init, blocks, reverse=True)
    dtokens = type(tokens)(*(None if v is None else scan.of_tokens(v) for v in dtokens))
    dD = None if D is None else dparams.D.reshape(D.shape)
    dinitial = None if given is None else dh
    if given is not None and seen is not None:
        dinitial = seen.initial(dparams.starts[:, :-1], dfinal)
    return contained.gradients(dtokens, dD, dinitial)


def accumulator(tokens: Any, D: Any, initial_state: Any) -> Any:
    """The dtype of the arithmetic: at least float32."""
    floats = [v for v in (*tokens, D, initial_state) if v is not None]
    return jnp.result_type(jnp.float32, *floats)


class ChunkedScan:
    """The arrays of a call, cut into blocks of chunks of tokens.

    Attributes:
      cuts: how the sequence is cut.
      aligned: where segments have states, how tokens are spread over chunks; else ``None``.
      blocks: tokens and marks, (blocks, chunks, B, Q, …) and (blocks, chunks, B).
      params: D and the initial states of segments, in the dtype of the arithmetic.
      h: the state before the first token.
      acc, precision: the dtype of the arithmetic, and the precision of products.
    """

    def __init__(self, options, tokens: Any, D, initial_state, rank, crossed):
        batch, length = tokens.out.shape[:2]
        self.options = options
        self.acc = accumulator(tokens, D, initial_state)
        # In 16 bits nothing is lost by the products that tensor cores are fast at.
        any_fp32 = any(v.dtype.itemsize > 2 for v in tokens.multiplied)
        self.precision = "highest" if any_fp32 else None
        states = jnp.zeros((batch, *tokens.state), self.acc)
        self.h = vary_over(states, varying(tokens.out))
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
        D = None if D is None else (D[..., None] if D.ndim == 2 else D).astype(self.acc)
        self.params = Params(D, starts)
        self.blocks = self.to_blocks(tokens), self._marks(rank)

    def product(self, axes: str, *arrays: Any) -> jax.Array:
        """``jnp.einsum`` in the precision of the arrays."""
        return jnp.einsum(axes, *arrays, precision=self.precision)

    def to_blocks(self, tree: Any) -> Any:
        """(B, L, …) as (blocks, chunks, B, Q, …), with zeros for what is no token."""
        if self.aligned is not None:
            tree = jax.tree.map(self.aligned.spread, tree)
        return jax.tree.map(self.cuts.cut, tree)

    def of_tokens(self, v: jax.Array) -> jax.Array:
        """(blocks, chunks, B, Q, …) as (B, L, …)."""
        v = self.cuts.join(v)
        return v if self.aligned is None else self.aligned.collect(v)

    def _marks(self, rank: Any) -> Marks:
        if rank is None:
            return Marks(None, None, None, None)
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
        return Marks(cuts.cut(rank), before, enter, leave)

    def no_ends(self) -> Any:
        """Final states of no segment yet, (B, S, G, R, …)."""
        if not self.options.final or self.options.num_segments is None:
            return None
        zeros, count = jnp.zeros_like(self.h)[:, None], self.options.num_segments
        return jnp.broadcast_to(zeros, (zeros.shape[0], count, *zeros.shape[2:]))

    def start(self) -> States:
        return States(self.h, self.no_ends())


def _run_block(scan: ChunkedScan, before: States, block: Any, params: Params) -> Any:
    """The chunks of a block; only the states before them are kept for the backward."""

    @_checkpoint
    def body(before, chunk):
        (h, ends), (tokens, marks) = before, chunk
        if params.starts is not None:
            number = jnp.where(marks.enter < 0, 0, marks.enter)
            begin = jax.vmap(lambda v, i: v[i])(params.starts, number)
            h = jnp.where(along(marks.enter >= 0, h), begin, h)
        elif marks.enter is not None:
            h = jnp.where(along(marks.enter >= 0, h), 0, h)
        h, outs = tokens.run_chunk(scan, h, marks, params.D)
        if ends is not None:
            number = jnp.where(marks.leave < 0, ends.shape[1], marks.leave)
            ends = jax.vmap(lambda v, i, h: v.at[i].set(h, mode="drop"))(ends, number, h)
        return States(h, ends), outs

    return _scan(body, before, block)


def decay_sums(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Σ a over the tokens up to i, (…, Q), and Σ a over those after j up to i, (…, Q, Q).

    Each of the latter is a sum of its own: differences of the former lose the digits that the sums
    before j take, and so do their gradients.
    """
    times = jnp.arange(a.shape[-1])
    upto = (times[:, None] >= times).astype(a.dtype)
    add = functools.partial(jnp.einsum, precision="highest")
    after = jnp.where(times[:, None] > times, a[..., None], 0)
    return add("ij,...j->...i", upto, a), add("it,...tj->...ij", upto, after)


# Around kernels


def padded(v: Any, axis: int, size: int) -> Any:
    """`v`, or ``None``, with zeros up to `size` along an axis."""
    if v is None or v.shape[axis] >= size:
        return v
    widths = [(0, 0)] * v.ndim
    widths[axis] = (0, size - v.shape[axis])
    return jnp.pad(v, widths)


def chunk_sums_of(a: jax.Array, numbers: jax.Array, chunk: int) -> jax.Array:
    """(B, H, chunks, 2, chunk): sums of a · log2(e) from a chunk's first token on, and `numbers`.

    Args:
      a, numbers: (B, L, H), fp32. A last chunk is filled up with zeros of both.
      chunk: tokens of a chunk.
    """
    batch, length, heads = a.shape
    chunks = -(-length // chunk)
    both = padded(jnp.stack([a * LOG2E, numbers], axis=-1), 1, chunks * chunk)
    both = both.reshape(batch, chunks, chunk, heads, 2).transpose(0, 3, 1, 4, 2)
    return both.at[..., 0, :].set(jnp.cumsum(both[..., 0, :], axis=-1))


def where_segments_begin(rank: jax.Array, value: float, a: jax.Array) -> jax.Array:
    """`a`, (B, L, G, R), with `value` at the first token of each segment but the row's first."""
    return jnp.where(segments.begins(rank)[..., None, None], jnp.asarray(value, a.dtype), a)


def cut_decays(a: jax.Array, rank: jax.Array) -> jax.Array:
    """`a`, with decays of 0 between segments: to the kernels all tokens are of one segment."""
    return where_segments_begin(rank, least_log_decay(a.dtype), a)


def unless_finite(
    checked: Any,
    results: Any,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    whole: int | None = None,
) -> Any:
    """`results`, or ``plain(*args)`` if one of the arrays `checked` has NaN or ∞.

    A decay of 0 keeps numbers from the segments after, but not NaN. The kernels' states and their
    gradients show it, as it stays in them. `plain` takes a batch row at a time: its memory is
    reserved even where it never runs. A loop that runs at most once hands `results` on where they
    lie, which a conditional would copy. What goes into it is flat: arrays of more axes XLA would
    transpose for `plain`, where it does not run, too.

    Args:
      checked: a list of arrays.
      results: a tuple of arrays or ``None``.
      plain: gives what `results` holds, if wider.
      args: arrays or ``None``, with a batch.
      whole: the number of the argument, and of its gradient among results, that has no batch.
    """
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(v)) for v in checked]))
    flat = lambda tree: jax.tree.map(jnp.ravel, tree)
    shaped = lambda tree, like: jax.tree.map(lambda v, of: v.reshape(of.shape), tree, like)
    given = flat(args)

    def run(_: Any) -> Any:
        rows = list(shaped(lax.optimization_barrier(given), args))
        own = None
        if whole is not None and whole < len(rows):
            own, rows[whole] = rows[whole], None

        def of_row(row: Any) -> Any:
            row = jax.tree.map(lambda v: v[None], row)
            outs = plain(*(own if i == whole else v for i, v in enumerate(row)))
            return tuple(v if v is None or i == whole else v[0] for i, v in enumerate(outs))

        outs = _scan(lambda _, row: (None, of_row(row)), None, rows)[1]
        outs = (v.sum(0) if i == whole and v is not None else v for i, v in enumerate(outs))
        rounded = jax.tree.map(lambda v, like: v.astype(like.dtype), tuple(outs), results)
        return jnp.bool_(True), flat(rounded)

    return shaped(lax.while_loop(lambda state: ~state[0], run, (finite, flat(results)))[1], results)
