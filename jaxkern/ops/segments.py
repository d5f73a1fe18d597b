"""Segments of packed sequences, as the ops that carry a state along time see them.

Of a row's segment ids only the changes count: a segment begins where the id differs from the
previous token's, and runs from its own initial state. ``num_segments=S`` numbers these states:
an id from 0 to S − 1 is the number of its segment's state, and any other id (of padding, say) has
none. An id that comes back after another has its state in its first segment; later ones have none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import as_array, check_floating, check_integer
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import Axes, SplitSequence, carried, from_before, gather, is_first, is_last


def check_segment_ids(
    segment_ids: Any, shape: tuple[int, ...], num_segments: int | None, like: str = "x"
) -> jax.Array:
    """`segment_ids` as an array of integers, (B, L); whole where segments have states."""
    segment_ids = as_array("segment_ids", segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(
            f"segment_ids must have an integer dtype, got {segment_ids.dtype}; "
            "convert them first, e.g. segment_ids.astype(jnp.int32)"
        )
    if segment_ids.shape != shape:
        raise ValueError(
            f"segment_ids must have shape {shape} = (B, L) of {like}; got {segment_ids.shape}"
        )
    return segment_ids if num_segments is None else gather(segment_ids, 1)


def check_num_segments(num_segments: Any, segment_ids: Any, sequence_axis: Axes = ()) -> int | None:
    """`num_segments` as an int of at least 1, or ``None``."""
    if num_segments is None:
        return None
    count = check_integer("num_segments", num_segments, optional=True)
    if not 1 <= count <= _MAX_SEGMENTS:
        raise ValueError(f"num_segments must be from 1 to {_MAX_SEGMENTS}, got {count}")
    if segment_ids is None:
        raise ValueError(
            f"num_segments={count} needs segment_ids, which say whose the states are; got None. "
            "Without them a row has one state: leave num_segments out"
        )
    if sequence_axis:
        raise ValueError(
            f"num_segments={count} needs whole sequences, and sequence_axis splits them over "
            f"{', '.join(sequence_axis)}; leave num_segments out, or gather the arrays first, by "
            "jax.lax.all_gather(..., axis=1, tiled=True), and leave sequence_axis out"
        )
    return count


_MAX_SEGMENTS = 1 << 15
"""The numbers of two states fit into one int32."""


def check_states(
    states: Any,
    batch: int,
    num_segments: int | None,
    state: tuple[int, ...],
    meaning: str,
    check: Callable[[str, Any], jax.Array] = check_floating,
) -> Any:
    """Checks initial states, if any: one of shape `state` for a row, or for each segment.

    `meaning` puts the shape of a row's in words, ``"(B, D) of a"``, and `check` checks the dtype.
    """
    if states is None:
        return None
    states = check("initial_state", states)
    lead = (batch,) if num_segments is None else (batch, num_segments)
    if num_segments is not None:
        meaning = meaning.replace("(B,", "(B, S,", 1)
    shape, remedy = (*lead, *state), ""
    if states.ndim == len(shape) + 1:
        remedy = ". For a state of every segment, give num_segments and segment_ids"
    elif states.ndim == len(shape) - 1:
        remedy = ". For one state of a row, leave num_segments out"
    if states.shape != shape:
        raise ValueError(
            f"initial_state must have shape {shape} = {meaning}; got {states.shape}{remedy}"
        )
    return states


def begins(ids: jax.Array) -> jax.Array:
    """(B, L): whether a token's id differs from the previous token's; never for the first."""
    before = jnp.concatenate([ids[:, :1], ids], axis=1)[:, :-1]
    return ids != before


@dataclasses.dataclass(frozen=True)
class LookBack:
    """The options of a pass of segment ids that looks back by `tokens`.

    Attributes:
      tokens: from each token.
      reverse: whether time runs from the end to the start.
      sequence_axis: over which a caller's ``shard_map`` splits the ids.
    """

    tokens: int = 1
    reverse: bool = False
    sequence_axis: Axes = ()


def _looking_back(run: Any, axes: Axes, options: LookBack, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Each device hands its last ids to the next one; before the first token is its own id."""
    count, length = options.tokens, ids.shape[1]
    if options.reverse:
        after = from_before(axes, ids[:, :count], reverse=True)
        after = jnp.where(is_last(axes), ids[:, -1:], after)
        (out,) = run(options, jnp.concatenate([ids, after], axis=1))
        return (out[:, :length],)
    before = from_before(axes, ids[:, length - count :])
    before = jnp.where(is_first(axes), ids[:, :1], before)
    (out,) = run(options, jnp.concatenate([before, ids], axis=1))
    return (out[:, count:],)


def _too_short(options: LookBack, parts: int, ids: Any) -> str | None:
    if ids.shape[1] >= parts * options.tokens:
        return None
    return f"a part of its {ids.shape[1]} tokens is shorter than {options.tokens}"


LOOKING_BACK = SplitSequence(_looking_back, _too_short)
"""Split rule of a pass with a :class:`LookBack`."""


def _new(options: LookBack, ids: jax.Array) -> tuple[jax.Array]:
    return (jnp.flip(begins(jnp.flip(ids, 1)), 1) if options.reverse else begins(ids),)


_NEW = KernelPass(
    "new_segments",
    reference=_new,
    ins=("b l",),
    outs=("b l",),
    sequence=LOOKING_BACK,
)


def new_segments(ids: jax.Array, *, reverse: bool = False, sequence_axis: Axes = ()) -> jax.Array:
    """:func:`begins` of ids that may be split between devices; in reverse time runs backward."""
    return _NEW(LookBack(1, reverse, sequence_axis), ids)[0]


def _numbers(options: LookBack, new: jax.Array) -> tuple[jax.Array]:
    del options
    return (jnp.cumsum(new.astype(jnp.int32), axis=1),)


def _numbers_of_part(run: Any, axes: Axes, options: LookBack, new: jax.Array) -> tuple[jax.Array]:
    (own,) = run(options, new)
    before = carried(axes, jnp.add, own[:, -1], jnp.zeros_like(own[:, 0]))
    return (own + before[:, None],)


_NUMBERS = KernelPass(
    "segment_numbers",
    reference=_numbers,
    ins=("b l",),
    outs=("b l",),
    sequence=SplitSequence(_numbers_of_part),
)


def numbers(ids: jax.Array, sequence_axis: Axes = ()) -> jax.Array:
    """(B, L), int32: the number of each token's segment, 0 for a row's first."""
    options = LookBack(sequence_axis=sequence_axis)
    return _NUMBERS(options, _NEW(options, ids)[0])[0]


class Spans(NamedTuple):
    """The tokens of the segments that have a state, from `first` to before `stop`: (B, S), int32.

    A segment that is absent is empty, at the end of the row.
    """

    first: jax.Array
    stop: jax.Array


def spans(ids: jax.Array, num_segments: int) -> Spans:
    length = ids.shape[1]
    # An id beyond int32 becomes one that is no state's, as is any below 0.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))[:, :, None]
    has_id = ids == jnp.arange(num_segments, dtype=ids.dtype)  # (B, L, S)
    time = jnp.arange(length, dtype=jnp.int32)[None, :, None]
    earliest = functools.partial(jnp.min, axis=1, initial=length)
    first = earliest(jnp.where(has_id, time, length))
    stop = earliest(jnp.where(~has_id & (time > first[:, None]), time, length))
    return Spans(first, stop)


def entered(ids: jax.Array, num_segments: int) -> jax.Array:
    """Index of the state a token begins from, (B, L), int32: −1 for the previous token's state.

    Where a segment begins, the number of its initial state, or S if it has none and begins from
    zeros.
    """
    time = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return jnp.where(begins(ids) | (time == 0), _at(spans(ids, num_segments).first, time), -1)


def left(ids: jax.Array, num_segments: int) -> jax.Array:
    """Index of the segment that ends before a token, (B, L), int32: S for none, or no state."""
    time = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return _at(spans(ids, num_segments).stop, time)


def _at(positions: jax.Array, time: jax.Array) -> jax.Array:
    """(B, L): the s of ``positions[:, s] == time``, or S."""
    count = positions.shape[1]
    here = positions[:, None] == time[:, None]
    numbers = jnp.where(here, jnp.arange(count, dtype=jnp.int32), count)
    return jnp.min(numbers, axis=2, initial=count)


def crossings(ids: jax.Array, num_segments: int) -> jax.Array:
    """Encodes a change of segments before a token, (B, L), int32: −1 for none.

    Else ``left * (S + 1) + entered``: the numbers of the segment that ends and of that which
    begins, S for one without a state, and for none before the first token.
    """
    new, ended = entered(ids, num_segments), left(ids, num_segments)
    return jnp.where(new < 0, -1, ended * (num_segments + 1) + new)


class Seen(NamedTuple):
    """Masks of the segments in a row, and of the segments that end before the row: (B, S)."""

    entered: jax.Array
    left: jax.Array

    @classmethod
    def of(cls, crossed: jax.Array, num_segments: int) -> "Seen":
        numbers = jnp.arange(num_segments, dtype=jnp.int32)
        new, ended = crossed % (num_segments + 1), crossed // (num_segments + 1)
        has = lambda v: jnp.any((crossed >= 0)[..., None] & (v[..., None] == numbers), axis=1)
        return cls(has(new), has(ended))

    def final(self, ends: Any, last: Any, initial: Any) -> jax.Array:
        """Final states, (B, S, ...): from segment `ends`, from the row's `last`, or `initial`."""
        initial = jnp.zeros((), ends.dtype) if initial is None else initial.astype(ends.dtype)
        own = jnp.where(along(self.left, ends), ends, jnp.expand_dims(last, 1))
        return jnp.where(along(self.entered, ends), own, initial)

    def of_row(self, dfinal: jax.Array) -> jax.Array:
        """The cotangent of a row's final state, (B, ...), from its segments' cotangents."""
        is_last = self.entered & ~self.left
        return jnp.sum(jnp.where(along(is_last, dfinal), dfinal, 0), axis=1)

    def initial(self, dstarts: jax.Array, dfinal: Any) -> jax.Array:
        """The cotangents of initial states; an absent segment's is its final state's."""
        dfinal = jnp.zeros((), dstarts.dtype) if dfinal is None else dfinal.astype(dstarts.dtype)
        return jnp.where(along(self.entered, dstarts), dstarts, dfinal)


def along(mask: jax.Array, like: jax.Array) -> jax.Array:
    """`mask` with axes of one behind its own, so that it has as many as `like`."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


def with_zeros(states: jax.Array) -> jax.Array:
    """States (B, S, …) with one of zeros behind them, number S."""
    return jnp.pad(states, [(0, int(i == 1)) for i in range(states.ndim)])


def _last_tokens(options: None, v: jax.Array, last: jax.Array, absent: Any) -> tuple[jax.Array]:
    del options
    shape = *last.shape, v.shape[2]
    absent = jnp.zeros(shape, v.dtype) if absent is None else absent.astype(v.dtype)
    if v.shape[1] == 0:
        return (absent,)
    last = last[..., None]
    return (jnp.where(last >= 0, jnp.take_along_axis(v, jnp.maximum(last, 0), 1), absent),)


_LAST_TOKENS = KernelPass(
    "last_tokens",
    reference=_last_tokens,
    ins=("b l d", "b s", "b s d"),
    outs=("b s d",),
    whole="l s",
)


def last_tokens(v: jax.Array, last: jax.Array, absent: Any) -> jax.Array:
    """(B, S, D): tokens `last` (B, S) of `v` (B, L, D); where −1, `absent` or zeros."""
    return _LAST_TOKENS(None, v, last, absent)[0]
