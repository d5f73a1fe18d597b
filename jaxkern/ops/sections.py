"""A scan whose sequence is split between devices: its passes, and the sections of a device's part.

A kernel that has too few rows and channels to fill a GPU cuts its sequence into parts, and goes
through them twice. The first time it finds carries from which the device's own would be found
again, by a third. So a device cuts its part of the sequence into sections, up to 64, which are rows
to the kernels: the carries of all sections give the device's, and from it follow the states that
the sections begin with:

    h[0] = first,  h[s + 1] = decay[s] · h[s] + own[s]        own (B, S, M), h in the same dtype

This loop is a pass of its own, over arrays that the L2 cache holds: of a layer of mamba-130m 32
sections of 24,576 states, 3 MB. In plain JAX it is either as many small kernels as there are
sections, or the rounds of a parallel scan: some hundred operations a layer, which took XLA longer
to compile than the rest of a training step. In the kernel a lane has one state, or four side by
side, and goes through the sections in order, with the carries of the next eight on their way. It
reads and writes each state once: an H200 takes 3.5 µs for that layer, and 13 for one of
mamba2-130m, with 196,608 states a section (JAX 0.11.2).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.arguments import unfit
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import (
    Axes,
    SplitSequence,
    carried,
    from_before,
    is_first,
    vary_over,
    varying,
)
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel, num_sms
from jaxkern.ops.segments import along

type OfOptions = Callable[[Any], SplitSequence | None]


def sequences(
    forward: Callable[..., Any], backward: Callable[..., Any], unfit: Callable[..., str | None]
) -> tuple[OfOptions, OfOptions]:
    """Makes the ``sequence`` of a scan's forward and backward pass, by their options.

    Where segments have states of their own (`num_segments`), a sequence is not split. A forward
    that saves no states takes parts of any length.

    Args:
      forward, backward: a device's work on its part, as in :class:`SplitSequence`.
      unfit: gives the reason why a pass that saves or reads states cannot be split into `parts`.
    """
    plain, saving, reading = (
        SplitSequence(forward),
        SplitSequence(forward, unfit),
        SplitSequence(backward, unfit),
    )

    def of_forward(options: Any) -> SplitSequence | None:
        if options.num_segments is not None:
            return None
        return saving if options.save else plain

    def of_backward(options: Any) -> SplitSequence | None:
        return None if options.num_segments is not None else reading

    return of_forward, of_backward


def unless_whole_steps(options: Any, parts: int, x: Any, *_: Any) -> str | None:
    """Says why `x`, (B, L, …), with states saved by `checkpoint_every`, cannot be in parts."""
    every = options.checkpoint_every
    return None if every is None else unless_multiple(x.shape[1], parts, every)


def unless_multiple(length: Any, parts: int, every: int) -> str | None:
    """Says why a sequence, with states saved `every` few tokens, cannot be in `parts`."""
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
"""Units from which on there are no sections. Up to about twice as many, the backward of
`selective_scan` and `ssd` still cuts the sequence itself at some sizes."""

_MOST, _LEAST = 64, 512
"""The most sections, and the fewest tokens of one: below, exchanging carries takes longer."""


@dataclasses.dataclass(frozen=True)
class Sections:
    """Sections of equal length, `count` of each row, of a device's part of a sequence."""

    count: int

    @staticmethod
    def of(batch: int, channels: int, length: int, step: int) -> "Sections":
        """Chooses the sections of arrays (B, L, channels), each of whole steps."""
        units = batch * channels // 64
        if units >= _WHOLE or batch * channels == 0:
            return Sections(1)
        count, most = 1, max(1, min(_MOST, length // _LEAST))
        while units * count < _UNITS and 2 * count <= most and length % (2 * count * step) == 0:
            count *= 2
        return Sections(count)

    def cut(self, v: Any) -> Any:
        """Cuts (B, L, …) into (B · count, L / count, …)."""
        if v is None or self.count == 1:
            return v
        return v.reshape(v.shape[0] * self.count, v.shape[1] // self.count, *v.shape[2:])

    def join(self, v: Any) -> Any:
        """Joins (B · count, L / count, …) to (B, L, …)."""
        if v is None or self.count == 1:
            return v
        return v.reshape(v.shape[0] // self.count, v.shape[1] * self.count, *v.shape[2:])

    def at(self, v: Any, section: int) -> Any:
        """Values of one section, (B, …), from (B · count, …)."""
        if v is None or self.count == 1:
            return v
        return v.reshape(-1, self.count, *v.shape[1:])[:, section]

    def states(
        self,
        run: Callable[..., Any],
        axes: Axes,
        of: "Decays",
        carry: Any,
        first: jax.Array | None,
        *,
        reverse: bool = False,
    ) -> jax.Array:
        """The state before each section, (B · count, …).

        Args:
          run, axes: as a :class:`SplitSequence` has them.
          of: the meaning of the first array of a carry.
          carry: a pair of arrays (B · count, …), the second the state after a section from zeros.
          first: the state before the sequence, (B, …), the same on all devices; ``None`` for zeros.
          reverse: whether states go from the end to the start: `first` is then the state after the
            sequence, and the result the states after the sections.
        """
        after = lambda carry, state: state_after(of.decay(carry[0]), carry[1], state)
        total, own = carry
        first = jnp.zeros_like(self.at(own, 0)) if first is None else first
        first = first.astype(jnp.result_type(own, first))
        if self.count == 1:
            return carried(axes, after, carry, first, reverse=reverse)
        rows = lambda v: v.reshape(-1, self.count, *v.shape[1:])
        flat = lambda v, lead: v.reshape(*v.shape[:lead], math.prod(v.shape[lead:]))
        arrays = flat(rows(of.decay(total)), 2), flat(rows(own), 2)

        def between(first: jax.Array) -> Any:
            return run(SectionOptions(reverse), *arrays, flat(first, 1), of=SECTION_STATES)

        _, last = between(jnp.zeros_like(first))
        device = of.over(rows(total), 1), last.reshape(first.shape)
        states, _ = between(carried(axes, after, device, first, reverse=reverse))
        return states.reshape(own.shape)


class Decays(NamedTuple):
    """The meaning of the first array of a carry, from which the decay of a state follows.

    Attributes:
      decay: gives for such an array, (…, units), the factor of the state before a section, that
        broadcasts to a state's shape; NaN where a segment begins in the section.
      over: gives for the arrays of sections in a row, and their axis, the array of them all.
    """

    decay: Callable[[Any], Any]
    over: Callable[[Any, int], Any]


def own_rank(axes: Axes, sections: Sections, rank: Any) -> tuple[Any, Any]:
    """`rank` counted from each section's first token, and whether that begins a segment, (B,)."""
    if rank is None:
        return None, None
    before = jnp.concatenate([from_before(axes, rank[:, -1:]), rank[:, :-1]], axis=1)
    before = before.at[:, 0].set(jnp.where(is_first(axes), rank[:, 0], before[:, 0]))
    rank, before = sections.cut(rank), sections.cut(before)
    return rank - rank[:, :1], rank[:, 0] != before[:, 0]


def unless(begins: Any, v: jax.Array) -> jax.Array:
    """`v`, (B, …), with zeros where a section begins a segment."""
    if begins is None:
        return v
    return jnp.where(along(begins, v), 0, v)


# The states between sections: a pass

BLOCK, ROW = grid_axes("block", "row")

_VECTOR = 4
"""States of a lane where there are enough: an access of 16 bytes."""

_TOGETHER = 8
"""Sections whose carries are loaded together, to wait for memory once."""


@dataclasses.dataclass(frozen=True)
class SectionOptions:
    """The static arguments of the pass: whether states go from the last section to the first."""

    reverse: bool = False


def state_after(decay: Any, own: Any, state: Any) -> Any:
    """The state after a section.

    Args:
      decay: the factor of `state`. NaN, of a section in which a segment begins, keeps nothing of
        it, whatever it is; and an infinite one makes 0 of 0, as its factors one by one do.
      own: the state after the section from zeros.
      state: the state before it.
    """
    none = (decay != decay) | (jnp.isinf(decay) & (state == 0))
    return own + jnp.where(none, 0, jnp.where(none, 0, decay) * state)


def reference_states(options: SectionOptions, decay: Any, own: Any, first: Any) -> tuple[Any, Any]:
    """The states before all sections, (B, S, M), and the state after them, (B, M)."""
    dtype = jnp.result_type(own, first)
    per_unit = own.shape[2] // max(1, decay.shape[2])

    def step(state: Any, carry: Any) -> tuple[Any, Any]:
        decay, own = carry
        return state_after(jnp.repeat(decay, per_unit, 1), own, state).astype(dtype), state

    first = vary_over(first.astype(dtype), varying(own))
    ordered = jnp.moveaxis(decay, 1, 0), jnp.moveaxis(own, 1, 0)
    last, states = lax.scan(step, first, ordered, reverse=options.reverse)
    return jnp.moveaxis(states, 0, 1), last


def unsupported_states(options: SectionOptions, decay: Any, own: Any, first: Any) -> str | None:
    """Why the kernel cannot run on these arrays."""
    del options
    if reason := unfit(decay=decay, own=own, first=first):
        return reason
    if any(v.dtype != jnp.float32 for v in (decay, own, first)):
        return f"its states are {own.dtype}, and the kernel takes float32"
    return None


def launch_states(options: SectionOptions, decay: Any, own: Any, first: Any) -> tuple[Any, Any]:
    """The states of :func:`reference_states`, by the kernel."""
    if own.size == 0:
        return reference_states(options, decay, own, first)
    size, per_unit = own.shape[2], own.shape[2] // decay.shape[2]
    if per_unit % LANES:  # a block would have states of several units
        decay, per_unit = jnp.repeat(decay, per_unit, 2), 1
    padded = lambda v: jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -size % LANES)])
    arrays = padded(decay) if per_unit == 1 else decay, padded(own), padded(first)
    tile = SectionTile.of(arrays[1].shape, per_unit)
    states, last = launch_kernel(
        functools.partial(_kernel, tile, options.reverse),
        out_type=tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in arrays[1:]),
        grid=(len(own), arrays[1].shape[2] // tile.width),
        grid_names=(ROW, BLOCK),
        kernel_name="section_states",
    )(*arrays)
    return states[..., :size], last[:, :size]


def state_after_all(decay: Any, own: Any, *, reverse: bool = False) -> jax.Array:
    """The state after sections in a row, from zeros, by the kernel.

    Args:
      decay: of the sections, (S, …), with axes of 1 at the end where states share one.
      own: (S, …), fp32.
      reverse: whether the last section comes first.
    """
    if len(own) == 1:
        return own[0]
    flat = lambda v: v.reshape(1, len(v), math.prod(v.shape[1:]))
    first = jnp.zeros_like(flat(own)[:, 0])
    options = SectionOptions(reverse)
    return launch_states(options, flat(decay), flat(own), first)[1].reshape(own.shape[1:])


@dataclasses.dataclass(frozen=True)
class SectionTile:
    """A block's share of a row's states.

    Attributes:
      sections: of the row, S.
      per_unit: neighbouring states of one decay.
      each: states of a lane.
    """

    sections: int
    per_unit: int
    each: int

    @classmethod
    def of(cls, own: tuple[int, ...], per_unit: int) -> "SectionTile":
        """Chooses vector accesses where two blocks are left for every multiprocessor.

        Args:
          own: the shape (B, S, M), M a multiple of LANES.
          per_unit: neighbouring states of one decay, 1 or a multiple of LANES.
        """
        batch, sections, size = own
        width = _VECTOR * LANES
        whole = size % width == 0 and (per_unit == 1 or per_unit % width == 0)
        vectors = whole and batch * size >= 2 * num_sms() * width
        return cls(sections, per_unit, _VECTOR if vectors else 1)

    @property
    def width(self) -> int:
        """States of a block."""
        return self.each * LANES


def _kernel(
    tile: SectionTile, reverse: bool, decay: Any, own: Any, first: Any, states: Any, last: Any
) -> None:
    row, start = lax.axis_index(ROW), lax.axis_index(BLOCK) * tile.width
    here, offsets = pl.ds(start, tile.width), LaneOffsets(((1, LANES, tile.each),))
    load = lambda ref, *at: load_lanes(ref.at[row, *at, here], offsets, tile.each)
    store = lambda ref, values, *at: store_lanes(ref.at[row, *at, here], offsets, values)
    together = math.gcd(tile.sections, _TOGETHER)

    def decays(section: Any) -> Any:
        if tile.per_unit == 1:
            return load(decay, section)
        unit = pl.ds(lax.div(start, tile.per_unit), 1)
        return load_lanes(decay.at[row, section, unit], LaneOffsets()) * tile.each

    def advance(group: Any, state: Any) -> Any:
        numbers = [group * together + i for i in range(together)]
        numbers = [tile.sections - 1 - s for s in numbers] if reverse else numbers
        for s, *carry in [(s, decays(s), load(own, s)) for s in numbers]:
            store(states, state, s)
            state = list(map(state_after, *carry, state))
        return state

    store(last, lax.fori_loop(0, tile.sections // together, advance, load(first)))


SECTION_STATES = KernelPass(
    "section_states",
    kernel=launch_states,
    reference=reference_states,
    ins=("b s k", "b s m", "b m"),
    outs=("b s m", "b m"),
    whole="s k m",
    unfit=unsupported_states,
)
