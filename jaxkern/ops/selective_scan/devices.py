"""A sequence that is split between devices: what each does with its part.

A device finds the sum of its step sizes and its last state from zeros; one all-gather brings those
of all devices, of which each has the state that its part begins with. The backward does the same
from the end to the start.

A pass that finds carries takes N exponentials for an element of x and reads 4 of its bytes in bf16,
the forward N and the backward 2·N: at L = 262,144 a device and D = 1536, 6.4 · 10⁹ exponentials for
each N. A kernel that cuts its part takes N more, in either direction, to find carries that this has
found: 7·N in all, and 5·N where the part is cut into sections instead
(:class:`jaxkern.ops.sections.Sections`), which is what one device alone takes. To scan from zeros
and correct the output, by exp(A · Σs) and C, is N exponentials, too, and 6 bytes more.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.split import is_first, is_last, only_if
from jaxkern.ops.sections import Decays, Sections, sequences, unless_whole_steps
from jaxkern.ops.selective_scan.carry import launch_device_bwd_carry, launch_device_carry
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    Options,
    decay_of,
    reference_bwd_carry,
    reference_carry,
)

CARRY = KernelPass(
    "selective_scan_carry",
    kernel=launch_device_carry,
    reference=reference_carry,
    ins=("b l g p", "b l g p", "g p n", "b l g n", "g p", "b l"),
    outs=("b g p", "b g p n"),
    whole="l n",
)
BWD_CARRY = KernelPass(
    "selective_scan_bwd_carry",
    kernel=launch_device_bwd_carry,
    reference=reference_bwd_carry,
    ins=("b l g p", "g p n", "b l g n", "b l g p", "g p", "b l", "b l g p"),
    outs=("b g p", "b g p n"),
    whole="l n",
)


def _sections(options: Options, x: Any) -> Sections:
    batch, length, groups, channels = x.shape
    step = options.checkpoint_every or CHUNK
    return Sections.of(batch, groups * channels, length, step)


def _cut(sections: Sections, args: Any) -> Any:
    """The arguments of the forward, those along the sequence in sections."""
    x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed = args
    x, dt, B, C, z, keep = map(sections.cut, (x, dt, B, C, z, keep))
    return x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed


def _states(
    run: Any, axes: Any, sections: Sections, A: Any, keep: Any, carry: Any, first: Any, **to: bool
) -> Any:
    state = carry[1]
    first = jnp.zeros_like(sections.at(state, 0)) if first is None else first.astype(state.dtype)
    decay = functools.partial(decay_of, A.astype(state.dtype), keep is not None)
    return sections.states(run, axes, Decays(decay, over=jnp.sum), carry, first, **to)


def _states_before(run: Any, axes: Any, sections: Sections, options: Options, *args: Any) -> Any:
    x, dt, A, B, _, _, _, dt_bias, initial_state, keep, _ = args
    carry = run(options, x, dt, A, B, dt_bias, keep, of=CARRY)
    return _states(run, axes, sections, A, keep, carry, initial_state)


def _forward(run: Any, axes: Any, options: Options, *args: Any) -> Any:
    sections = _sections(options, args[0])
    args = _cut(sections, args)
    *floats, _, keep, crossed = args
    before = _states_before(run, axes, sections, options, *args)
    out, final, *states = run(options, *floats, before, keep, crossed)
    final = only_if(is_last(axes), sections.at(final, -1))
    return sections.join(out), final, *map(sections.join, states)


def _backward(run: Any, axes: Any, options: Options, *args: Any) -> Any:
    *given, states, dout, dfinal = args
    sections = _sections(options, args[0])
    given, states, dout = _cut(sections, given), sections.cut(states), sections.cut(dout)
    _, dt, A, _, C, _, z, dt_bias, initial_state, keep, crossed = given
    carry = run(options, dt, A, C, z, dt_bias, keep, dout, of=BWD_CARRY)
    dfinal = _states(run, axes, sections, A, keep, carry, dfinal, reverse=True)
    before = None
    if states is None:
        before = _states_before(run, axes, sections, options, *given)
    elif initial_state is not None:
        before = states[:, 0]
    *grads, dinitial, _, _ = run(options, *given[:8], before, keep, crossed, states, dout, dfinal)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias = grads
    dx, ddt, dB, dC, dz = map(sections.join, (dx, ddt, dB, dC, dz))
    if initial_state is not None:
        dinitial = only_if(is_first(axes), sections.at(dinitial, 0))
    else:
        dinitial = None
    return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial, None, None


forward, backward = sequences(_forward, _backward, unless_whole_steps)
