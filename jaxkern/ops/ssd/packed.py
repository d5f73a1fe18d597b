"""Packed sequences in chunks: NaN stays in its segment, and segments' states are at chunks' ends.

Both are of plain JAX alone, whose products take all tokens of a chunk, of whatever segment.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops.segments import along


class Contained(NamedTuple):
    """Which tokens hold what is not finite, so that no product takes it to another segment.

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
        bad = self.dtokens
        of_heads, of_group = bad[..., None], jnp.any(bad, axis=-1, keepdims=True)
        masks = of_heads, bad, bad, of_group, of_group, of_heads
        cleaned = [v if v is None else _clean(v, m) for v, m in zip(tokens, masks, strict=True)]
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
        bad = self.dtokens
        of_heads, of_group = bad[..., None], jnp.any(bad, axis=-1, keepdims=True)
        masks = of_heads, bad, bad, of_group, of_group, of_heads
        dtokens = [
            v if v is None else jnp.where(m, jnp.nan, v)
            for v, m in zip(dtokens, masks, strict=True)
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
    """`value(v)`, whose gradient is that of `v`, and NaN where `bad`."""
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
        that of the chunk before it, and for none.
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
