"""How the passes of a scan are split between devices along the sequence, by their options."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.split import Axes, Sequence, carried

type OfOptions = Callable[[Any], Sequence | None]


def sequences(
    forward: Callable[..., Any], backward: Callable[..., Any], unfit: Callable[..., str | None]
) -> tuple[OfOptions, OfOptions]:
    """Makes what the passes of a scan have as their ``sequence``, the forward's and the backward's.

    Where segments have states of their own (`num_segments`), a sequence is not split. A forward
    that saves no states takes parts of any length.

    Args:
      forward, backward: what a device does with its part, as in :class:`Sequence`.
      unfit: tells of a pass that saves or reads states why a sequence cannot be in so many parts.
    """
    plain, saving, reading = Sequence(forward), Sequence(forward, unfit), Sequence(backward, unfit)

    def of_forward(options: Any) -> Sequence | None:
        if options.num_segments is not None:
            return None
        return saving if options.save else plain

    def of_backward(options: Any) -> Sequence | None:
        return None if options.num_segments is not None else reading

    return of_forward, of_backward


def unless_whole_steps(options: Any, parts: int, x: Any, *_: Any) -> str | None:
    """Says why `x`, (B, L, …), with states saved by `checkpoint_every`, cannot be in parts."""
    every = options.checkpoint_every
    return None if every is None else unless_multiple(x.shape[1], parts, every)


def unless_multiple(length: Any, parts: int, every: int) -> str | None:
    """Says why a sequence, with states saved `every` so many tokens, cannot be in so many parts."""
    if length % (parts * every) == 0:
        return None
    return (
        f"a part of its {length} tokens must be a multiple of {every}, the tokens from one saved "
        "state to the next"
    )


_UNITS = 768
"""Units, of 64 channels of a row, that sections make: some six waves of blocks on an H200, so that
a last wave that is not full costs little."""

_WHOLE = 128
"""Units from which on there are no sections. Fewer than about twice as many, the backward of
`selective_scan` and `ssd` at some sizes still cut the sequence themselves."""

_MOST, _LEAST = 64, 512
"""The most sections, and the fewest tokens of one: below, exchanging carries takes longer."""


@dataclasses.dataclass(frozen=True)
class Sections:
    """What a device cuts its part of a sequence into: `count` rows of equal length for each.

    A kernel that has too few rows and channels to fill a GPU cuts its sequence in parts of its own,
    and goes through them twice. What the first time tells, the device's own carry would be found
    from again, by a third. So here the sections are rows to the kernels: the carries of all of them
    give the device's, by which the states come that they begin with.

    Attributes:
      count: how many.
    """

    count: int

    @staticmethod
    def of(batch: int, channels: int, length: int, step: int) -> "Sections":
        """Chooses how many there are of arrays (B, L, channels), each of whole steps."""
        units = batch * channels // 64
        if units >= _WHOLE:
            return Sections(1)
        count, most = 1, max(1, min(_MOST, length // _LEAST))
        while units * count < _UNITS and 2 * count <= most and length % (2 * count * step) == 0:
            count *= 2
        return Sections(count)

    def cut(self, v: Any) -> Any:
        """(B · count, L / count, …) of (B, L, …), or ``None``."""
        if v is None or self.count == 1:
            return v
        return v.reshape(v.shape[0] * self.count, v.shape[1] // self.count, *v.shape[2:])

    def join(self, v: Any) -> Any:
        """(B, L, …) again."""
        if v is None or self.count == 1:
            return v
        return v.reshape(v.shape[0] // self.count, v.shape[1] * self.count, *v.shape[2:])

    def at(self, v: Any, section: int) -> Any:
        """One section's values, (B, …), of those of all, (B · count, …)."""
        if v is None or self.count == 1:
            return v
        return self._apart(v)[section]

    def _apart(self, v: jax.Array) -> jax.Array:
        """(count, B, …) of (B · count, …)."""
        return jnp.moveaxis(v.reshape(-1, self.count, *v.shape[1:]), 1, 0)

    def states(
        self,
        axes: Axes,
        after: Callable[[Any, Any], Any],
        product: Callable[[Any, Any], Any],
        carry: Any,
        first: jax.Array,
        *,
        reverse: bool = False,
    ) -> jax.Array:
        """The state before each section, (B · count, …), by :func:`jaxkern.core.split.carried`.

        Args:
          axes, after, first, reverse: as there; `first` is (B, …).
          product: of the first arrays of the carries of two sections, that of both.
          carry: a pair of arrays (B · count, …), the second a state.
        """
        if self.count == 1:
            return carried(axes, after, carry, first, reverse=reverse)
        in_time = (lambda v: jnp.flip(v, 0)) if reverse else lambda v: v
        ordered = jax.tree.map(lambda v: in_time(self._apart(v)), tuple(carry))
        join = lambda one, then: (product(one[0], then[0]), after(then, one[1]))
        upto = _joined_upto(join, ordered, self.count)  # (count, B, …) each
        state = carried(axes, after, tuple(v[-1] for v in upto), first, reverse=reverse)[None]
        rest = after(tuple(v[:-1] for v in upto), state).astype(state.dtype)
        states = jnp.moveaxis(in_time(jnp.concatenate([state, rest])), 0, 1)
        return states.reshape(-1, *states.shape[2:])


def _joined_upto(join: Callable[[Any, Any], Any], carries: Any, count: int) -> Any:
    """What each of `count` carries in a row, (count, …), gives with all before it.

    In rounds over twice as many each (Hillis and Steele, 1986): XLA takes two thirds of the time to
    compile a training step with them that it takes with ``jax.lax.associative_scan``. A barrier
    after each round would take another sixth off; but XLA's scheduler then puts off the products
    that give the weights' gradients, and a step takes 1.6 times the memory.
    """
    span = 1
    while span < count:
        of = lambda part, carries=carries: jax.tree.map(lambda v: v[part], carries)
        joined = join(of(slice(-span)), of(slice(span, None)))
        together = lambda *parts: jnp.concatenate(parts)
        carries = jax.tree.map(together, of(slice(span)), joined)
        span *= 2
    return carries
