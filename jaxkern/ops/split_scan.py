"""How the passes of a scan are split between devices along the sequence, by their options."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.split import Axes, Sequence, carried
from jaxkern.ops.section_states import SECTION_STATES, Options, state_after

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
        if units >= _WHOLE or batch * channels == 0:
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
        return v.reshape(-1, self.count, *v.shape[1:])[:, section]

    def states(
        self,
        run: Callable[..., Any],
        axes: Axes,
        of: "Decays",
        carry: Any,
        first: jax.Array,
        *,
        reverse: bool = False,
    ) -> jax.Array:
        """The state before each section, (B · count, …), that of the sequence being `first`.

        Args:
          run, axes: as a :class:`Sequence` has them.
          of: what the first arrays of carries mean.
          carry: a pair of arrays (B · count, …), the second the state after a section from zeros.
          first: (B, …), the same on all devices.
          reverse: whether states go from the end to the start: `first` is the one after it, and
            so are those that are found.
        """
        after = lambda carry, state: state_after(of.decay(carry[0]), carry[1], state)
        if self.count == 1:
            return carried(axes, after, carry, first, reverse=reverse)
        total, own = carry
        rows = lambda v: v.reshape(-1, self.count, *v.shape[1:])
        flat = lambda v, lead: v.reshape(*v.shape[:lead], math.prod(v.shape[lead:]))
        arrays = flat(rows(of.decay(total)), 2), flat(rows(own), 2)

        def between(first: jax.Array) -> Any:
            return run(Options(reverse), *arrays, flat(first, 1), of=SECTION_STATES)

        _, last = between(jnp.zeros_like(first))
        device = of.over(rows(total), 1), last.reshape(first.shape)
        states, _ = between(carried(axes, after, device, first, reverse=reverse))
        return states.reshape(own.shape)


class Decays(NamedTuple):
    """What the first arrays of carries mean, from which the decays of states follow.

    Attributes:
      decay: gives of such an array, (…, units), the factor of the state before a section, that
        broadcasts to a state's shape; NaN where a segment begins in it.
      over: gives of the arrays of sections in a row, and their axis, that of all of them.
    """

    decay: Callable[[Any], Any]
    over: Callable[[Any, int], Any]
