"""Passes whose devices need each other: sums over devices, and sequences that are split.

What a pass carries along a sequence goes from one device's part to the next one's by JAX's
collectives, in the ``part`` of its :class:`SplitSequence`. The devices' order along `axes` is the
order of the parts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxkern.core.mesh import vary_over, varying

type Arrays = tuple[Any, ...]
Axes = tuple[str, ...]
"""Names of mesh axes, the first of which changes slowest along the sequence."""

_UNROLLED = 16
"""Parts up to which a loop over all of them is unrolled: one small kernel on a GPU."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A pass in two steps around the sum over devices.

    Attributes:
      finish: ``finish(options, *arrays, *sums)`` gives the pass's results from its arrays.
      kernel, reference: give what is summed, as many arrays as the pass and shaped like them; by
        default the pass's own.
      options: gives the options of `kernel` and `reference` from the pass's.
    """

    finish: Callable[..., Arrays]
    kernel: Callable[..., Arrays] | None = None
    reference: Callable[..., Arrays] | None = None
    options: Callable[[Any], Any] = lambda options: options


@dataclasses.dataclass(frozen=True, eq=False)
class SplitSequence:
    """Computation of a pass where a factor, along which it carries something, is split.

    Attributes:
      part: ``part(run, axes, options, *arrays)`` gives one device's results, `arrays` being its
        parts. ``run(options, *arrays)`` computes the pass on this device alone, and
        ``run(options, *arrays, of=other)`` another pass. A result that lacks the factor is the
        device's share of a sum over the devices.
      unfit: ``unfit(options, parts, *types)`` says why a sequence cannot be split into `parts`,
        with the types of the whole arrays; ``None`` where it can.
      factor: its name.
    """

    part: Callable[..., Arrays]
    unfit: Callable[..., str | None] = lambda *_: None
    factor: str = "l"


def is_first(axes: Axes) -> Any:
    """Whether this device has the first part."""
    return lax.axis_index(axes) == 0


def is_last(axes: Axes) -> Any:
    return lax.axis_index(axes) == lax.axis_size(axes) - 1


def only_if(condition: Any, value: Any) -> Any:
    """`value` or, for a sum over devices, zeros."""
    return None if value is None else jnp.where(condition, value, jnp.zeros((), value.dtype))


def on_all(axes: str | Axes | None, last: Any) -> Any:
    """Broadcasts the last part's value, for which other devices have zeros, to all devices.

    An axis of one device counts, too, where the type of `last` says that it varies over it.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    over = tuple(n for n in names if last is not None and _differs(n, last))
    return lax.psum(last, over) if over else last


def _differs(axis: str, value: jax.Array) -> bool:
    return lax.axis_size(axis) > 1 or axis in varying(value)


def from_before(axes: Axes, value: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Hands each device's `value` to the device with the next part; the first one has zeros.

    In reverse it goes to the device with the previous part, and the last one has zeros.
    """
    if value.size == 0:
        return value
    count = lax.axis_size(axes)
    if len(axes) > 1:  # ppermute takes them in the mesh's order alone
        own = lax.axis_index(axes) + (1 if reverse else -1)
        value = lax.all_gather(value, axes)[own % count]
        return jnp.where((own < 0) | (own == count), jnp.zeros((), value.dtype), value)
    pairs = [(i, i + 1) for i in range(count - 1)]
    pairs = [(to, source) for source, to in pairs] if reverse else pairs
    return lax.ppermute(value, axes, pairs)


def carried(
    axes: Axes,
    after: Callable[[Any, Any], Any],
    carry: Any,
    first: jax.Array,
    *,
    reverse: bool = False,
) -> jax.Array:
    """The state before this device's part, from the state before the sequence.

    In reverse it is the state after the part, from the state after the sequence. One all-gather
    brings the carries of all parts.

    Args:
      axes: over which the sequence is split.
      after: ``after(carry, state)`` is the state on the other side of a part.
      carry: arrays of this device's part, of one dtype.
      first: the state before the sequence, the same on all devices.
      reverse: whether states go from the end to the start.
    """
    flat, unravel = ravel_pytree(carry)
    own, count = lax.axis_index(axes), lax.axis_size(axes)
    others = slice(1, None) if reverse else slice(count - 1)  # none follows the last part
    carries = jax.vmap(unravel)(lax.all_gather(flat, axes)[others])  # (parts - 1, ...)

    def step(state: Any, part: Any) -> tuple[Any, None]:
        number, carry = part
        is_before = number > own if reverse else number < own
        return jnp.where(is_before, after(carry, state), state).astype(state.dtype), None

    first = vary_over(first, varying(flat))
    numbers = jnp.arange(count)[others]
    unroll = max(1, count - 1) if count <= _UNROLLED else 1
    return lax.scan(step, first, (numbers, carries), reverse=reverse, unroll=unroll)[0]
