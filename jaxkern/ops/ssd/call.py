"""The arrays of a call as the kernels take them, and what they do about segments."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops import segments
from jaxkern.ops.ssd.reference import least_log_decay
from jaxkern.ops.ssd.steps import HEADS, chunk_sums, sum_of
from jaxkern.ops.ssd.tiles import BOX, CHUNK, HELD_STATES, SLICE, STEP, TILE_ROWS, Scan


def _pad(v: Any, axis: int, size: int) -> Any:
    """`v`, or ``None``, with zeros up to `size` along an axis."""
    if v is None or v.shape[axis] >= size:
        return v
    widths = [(0, 0)] * v.ndim
    widths[axis] = (0, size - v.shape[axis])
    return jnp.pad(v, widths)


class Arrays:
    """A call's arrays as the kernels take them: heads in one axis, others in whole blocks.

    The arguments are as the passes have them: x, z (B, L, G, R, P); dt, a (B, L, G, R); B, C
    (B, L, G, N); D (G, R) or (G, R, P); states (B, G, R, P, N).
    """

    def __init__(self, x: Any, dt: Any, a: Any, B: Any, C: Any, D: Any, z: Any, initial: Any):
        self.batch, self.length, self.groups, self.rank, self.channels = x.shape
        self.heads, self.states = self.groups * self.rank, B.shape[-1]
        self.padded_states = -(-self.states // BOX) * BOX
        self.padded_channels = -(-self.channels // SLICE) * SLICE
        self.chunks = -(-self.length // CHUNK)
        self.x, self.z = self.tokens(x), self.tokens(z)
        self.B, self.C = (self._pad_length(_pad(v, 3, self.padded_states)) for v in (B, C))
        self.D = None
        if D is not None:
            D = D.astype(jnp.float32)
            D = D.reshape(self.heads, *D.shape[2:])
            self.D = _pad(D, 1, self.padded_channels) if D.ndim == 2 else D
        self.initial = self.whole_states(initial)
        # (B, H, chunks, 2, CHUNK): sums of log-decays, and dt.
        self.steps = chunk_sums(*(self._by_token(v) for v in (a, dt)))[:, : self.heads]

    def _pad_length(self, v: Any) -> Any:
        """Pads L to whole rows of tiles, and to a chunk if it is a step or less.

        Mosaic drops the index of an axis with a single box of a copy, which then is not clipped.
        """
        return _pad(
            v, 1, CHUNK if self.length <= STEP else -(-self.length // TILE_ROWS) * TILE_ROWS
        )

    def _by_token(self, v: Any) -> Any:
        """(B, L, H), fp32, of (B, L, G, R), H in whole blocks."""
        v = v.astype(jnp.float32).reshape(self.batch, self.length, self.heads)
        return _pad(_pad(v, 1, CHUNK), 2, -(-self.heads // HEADS) * HEADS)

    def tokens(self, v: Any) -> Any:
        """(B, L, H, P) of (B, L, G, R, P), P in whole units."""
        if v is None:
            return None
        v = v.reshape(*v.shape[:2], self.heads, self.channels)
        return self._pad_length(_pad(v, 3, self.padded_channels))

    def cut_tokens(self, v: Any) -> Any:
        """Undoes `tokens`."""
        if v is None:
            return None
        return v[:, : self.length, :, : self.channels].reshape(
            self.batch, self.length, self.groups, self.rank, self.channels
        )

    def cut_steps(self, v: Any) -> Any:
        """(B, L, G, R) of (B, L, H)."""
        v = v[:, : self.length, : self.heads]
        return v.reshape(self.batch, self.length, self.groups, self.rank)

    def whole_states(self, v: Any) -> Any:
        """(..., H, P, N) of (..., G, R, P, N), P in whole units and N in whole boxes."""
        if v is None:
            return None
        v = v.reshape(*v.shape[:-4], self.heads, *v.shape[-2:])
        v = _pad(v, v.ndim - 2, self.padded_channels)
        return _pad(v, v.ndim - 1, self.padded_states)

    def cut_states(self, v: Any) -> Any:
        """Undoes `whole_states`."""
        if v is None:
            return None
        v = v[..., : self.channels, : self.states]
        return v.reshape(*v.shape[:-3], self.groups, self.rank, *v.shape[-2:])

    def states_like(self, count: int, dtype: Any) -> Any:
        """The type of `count` states of every unit."""
        shape = self.batch, count, self.heads, self.padded_channels, self.padded_states
        return jax.ShapeDtypeStruct(shape, dtype)

    def scan(self, every: int | None) -> Scan:
        """The sizes of the call; `every` counts tokens from one saved state to the next."""
        return Scan(
            batch=self.batch,
            heads=self.heads,
            groups=self.groups,
            channels=self.padded_channels,
            states=self.padded_states,
            chunks=self.chunks,
            every=0 if every is None else every // CHUNK,
        )


def state_ranges(states: int) -> list[slice]:
    """The ranges of states that launches take one after the other.

    Outputs and gradients are sums over states, so that those of the ranges are added up; B, C and
    states themselves are joined.
    """
    return [slice(n, min(n + HELD_STATES, states)) for n in range(0, states, HELD_STATES)]


def of_range(v: Any, n: slice) -> Any:
    """A range of the states of `v`, or ``None``, whose last axis is theirs."""
    return None if v is None else v[..., n]


def added(of_ranges: Iterable[Any]) -> Any:
    """The sum over ranges of states, in fp32."""
    return sum_of(v.astype(jnp.float32) for v in of_ranges)


def joined(of_ranges: Iterable[Any]) -> Any:
    """All states of their ranges."""
    return jnp.concatenate([*of_ranges], axis=-1)


def where_segments_begin(rank: jax.Array, value: float, a: jax.Array) -> jax.Array:
    """`a`, (B, L, G, R), with `value` at the first token of each segment but the row's first."""
    return jnp.where(segments.begins(rank)[..., None, None], jnp.asarray(value, a.dtype), a)


def cut_decays(a: jax.Array, rank: jax.Array) -> jax.Array:
    """`a`, with decays of 0 between segments: to the kernels all tokens are of one segment."""
    return where_segments_begin(rank, least_log_decay(a.dtype), a)


def unless_finite(told: Any, results: Any, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`results`, or if one of the arrays `told` has NaN or ∞, those of ``plain(*args)``.

    A decay of 0 keeps numbers from the segments after, but not NaN. The kernels' states and their
    gradients tell of it, as it stays in them. `plain` takes a batch row at a time: its memory is
    reserved even where it never runs. A loop that runs at most once hands `results` on where they
    lie, which a conditional would copy. What goes into it is flat: arrays of more axes XLA would
    transpose for `plain`, where it does not run, too.

    Args:
      told: a list of arrays.
      results: a tuple of arrays or ``None``.
      plain: gives what `results` holds, if wider; but for `D`, its arguments have a batch.
      args: x, dt, a, B, C, D and what follows; of the results, too, the sixth has no batch.
    """
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(v)) for v in told]))
    flat = lambda tree: jax.tree.map(jnp.ravel, tree)
    shaped = lambda tree, like: jax.tree.map(lambda v, of: v.reshape(of.shape), tree, like)
    given = flat(args)

    def run(_: Any) -> Any:
        whole = shaped(lax.optimization_barrier(given), args)
        (*before, D), after = whole[:6], whole[6:]

        def of_row(row: Any) -> Any:
            before, after = jax.tree.map(lambda v: v[None], row)
            outs = plain(*before, D, *after)
            return tuple(v if v is None or i == 5 else v[0] for i, v in enumerate(outs))

        outs = lax.map(of_row, (before, after))
        outs = (v if v is None or i != 5 else v.sum(0) for i, v in enumerate(outs))
        rounded = jax.tree.map(lambda v, like: v.astype(like.dtype), tuple(outs), results)
        return jnp.bool_(True), flat(rounded)

    return shaped(lax.while_loop(lambda state: ~state[0], run, (finite, flat(results)))[1], results)
