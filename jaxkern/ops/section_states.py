"""The states between the sections of a sequence, from the carry of each: a pass of its own.

    h[0] = first,  h[s + 1] = decay[s] · h[s] + own[s]        own (B, S, M), h in the same dtype

A device that has a part of a sequence cuts it into sections, up to 64, whose carries it finds at
once (:class:`jaxkern.ops.split_scan.Sections`). What follows is this loop, over arrays that the L2
cache holds: of a layer of mamba-130m 32 sections of 24,576 states, 3 MB. In JAX's terms it is
either as many small kernels as there are sections, or the rounds of a parallel scan: some hundred
operations a layer, which took XLA longer to compile than the rest of a training step.

Here a lane has one state, or four side by side, and goes through the sections in order, with the
carries of the next eight on their way. It reads and writes each state once: an H200 takes 3.5 µs
for that layer, and 13 for one of mamba2-130m, with 196,608 states a section (JAX 0.11.2).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.arguments import unfit
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import vary_over, varying
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel, num_sms

BLOCK, ROW = grid_axes("block", "row")

_VECTOR = 4
"""States of a lane where there are enough: an access of 16 bytes."""

_TOGETHER = 8
"""Sections whose carries are loaded together, to wait for memory once."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of the pass.

    Attributes:
      reverse: whether states go from the last section to the first.
    """

    reverse: bool = False


def state_after(decay: Any, own: Any, state: Any) -> Any:
    """The state after a section, of that before it.

    Args:
      decay: the factor of `state`. NaN, of a section in which a segment begins, keeps nothing of
        it, whatever it is; and an infinite one makes 0 of 0, as its factors one by one do.
      own: the state after the section from zeros.
      state: the state before it.
    """
    none = (decay != decay) | (jnp.isinf(decay) & (state == 0))
    return own + jnp.where(none, 0, jnp.where(none, 0, decay) * state)


def reference(options: Options, decay: Any, own: Any, first: Any) -> tuple[Any, Any]:
    """The states before all sections, (B, S, M), and that after them, (B, M)."""
    dtype = jnp.result_type(own, first)
    per_unit = own.shape[2] // max(1, decay.shape[2])

    def step(state: Any, carry: Any) -> tuple[Any, Any]:
        decay, own = carry
        return state_after(jnp.repeat(decay, per_unit, 1), own, state).astype(dtype), state

    first = vary_over(first.astype(dtype), varying(own))
    ordered = jnp.moveaxis(decay, 1, 0), jnp.moveaxis(own, 1, 0)
    last, states = lax.scan(step, first, ordered, reverse=options.reverse)
    return jnp.moveaxis(states, 0, 1), last


def unsupported(options: Options, decay: Any, own: Any, first: Any) -> str | None:
    """Why the kernel cannot run on these arrays."""
    del options
    if reason := unfit(decay=decay, own=own, first=first):
        return reason
    if any(v.dtype != jnp.float32 for v in (decay, own, first)):
        return f"its states are {own.dtype}, and the kernel takes float32"
    return None


def launch(options: Options, decay: Any, own: Any, first: Any) -> tuple[Any, Any]:
    """What :func:`reference` gives, by the kernel."""
    if own.size == 0:
        return reference(options, decay, own, first)
    size, per_unit = own.shape[2], own.shape[2] // decay.shape[2]
    if per_unit % LANES:  # a block would have states of several units
        decay, per_unit = jnp.repeat(decay, per_unit, 2), 1
    padded = lambda v: jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -size % LANES)])
    arrays = padded(decay) if per_unit == 1 else decay, padded(own), padded(first)
    tile = Tile.of(arrays[1].shape, per_unit)
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
    return launch(Options(reverse), flat(decay), flat(own), first)[1].reshape(own.shape[1:])


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block has of a row's states.

    Attributes:
      sections: of the row, S.
      per_unit: neighbouring states of one decay.
      each: states of a lane.
    """

    sections: int
    per_unit: int
    each: int

    @classmethod
    def of(cls, own: tuple[int, ...], per_unit: int) -> "Tile":
        """Wide accesses, where two blocks are left for every multiprocessor.

        Args:
          own: the shape (B, S, M), M a multiple of LANES.
          per_unit: neighbouring states of one decay, 1 or a multiple of LANES.
        """
        batch, sections, size = own
        width = _VECTOR * LANES
        whole = size % width == 0 and (per_unit == 1 or per_unit % width == 0)
        wide = whole and batch * size >= 2 * num_sms() * width
        return cls(sections, per_unit, _VECTOR if wide else 1)

    @property
    def width(self) -> int:
        """States of a block."""
        return self.each * LANES

    @property
    def together(self) -> int:
        """Sections whose carries are loaded together."""
        return math.gcd(self.sections, _TOGETHER)


def _kernel(
    tile: Tile, reverse: bool, decay: Any, own: Any, first: Any, states: Any, last: Any
) -> None:
    row, start = lax.axis_index(ROW), lax.axis_index(BLOCK) * tile.width
    here, offsets = pl.ds(start, tile.width), LaneOffsets(((1, LANES, tile.each),))
    load = lambda ref, *at: load_lanes(ref.at[row, *at, here], offsets, tile.each)
    store = lambda ref, values, *at: store_lanes(ref.at[row, *at, here], offsets, values)

    def decays(section: Any) -> Any:
        if tile.per_unit == 1:
            return load(decay, section)
        unit = pl.ds(lax.div(start, tile.per_unit), 1)
        return load_lanes(decay.at[row, section, unit], LaneOffsets()) * tile.each

    def advance(group: Any, state: Any) -> Any:
        numbers = [group * tile.together + i for i in range(tile.together)]
        numbers = [tile.sections - 1 - s for s in numbers] if reverse else numbers
        for s, *carry in [(s, decays(s), load(own, s)) for s in numbers]:
            store(states, state, s)
            state = list(map(state_after, *carry, state))
        return state

    groups = tile.sections // tile.together
    store(last, lax.fori_loop(0, groups, advance, load(first)))


SECTION_STATES = KernelPass(
    "section_states",
    kernel=launch,
    reference=reference,
    ins=("b s k", "b s m", "b m"),
    outs=("b s m", "b m"),
    whole="s k m",
    unfit=unsupported,
)
