"""A sequence that is split between devices: what each does with its part.

A device finds the decay over its part and its last state from zeros; one all-gather collects them
from all devices, and each computes the state before its part. The backward does the same from the
end to the start.

A pass that finds carries takes 2·P·N operations for a token and head, at P = 64, N = 128 and chunks
of 64 tokens two fifths of the forward's products and a sixth of the backward's, and reads x and B:
at L = 262,144 a device and 24 heads, 10¹¹ operations and 0.9 GB in bf16. A kernel that cuts its
part does the same once more in either direction, so that the part is cut into sections instead
(:class:`jaxkern.ops.sections.Sections`). To scan from zeros and correct the output, by C · hᵀ, is
2·P·N operations, too, and reads and writes the output once more.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import is_first, is_last, only_if
from jaxkern.ops.sections import (
    Decays,
    Sections,
    own_rank,
    sequences,
    unless,
    unless_whole_steps,
)
from jaxkern.ops.ssd.forward import launch_device_bwd_carry, launch_device_carry
from jaxkern.ops.ssd.reference import (
    SAVED_CHUNK,
    SsdOptions,
    of_states,
    reference_bwd_carry,
    reference_carry,
)
from jaxkern.ops.ssd.tiles import unfit_for_gpu

CARRY = KernelPass(
    "ssd_carry",
    kernel=launch_device_carry,
    reference=reference_carry,
    ins=("b l g r p", "b l g r", "b l g r", "b l g n", "b l"),
    outs=("b g r", "b g r p n"),
    whole="l p n",
    unfit=lambda options, x, dt, a, B, rank: unfit_for_gpu(options, x, B, B),
)
BWD_CARRY = KernelPass(
    "ssd_bwd_carry",
    kernel=launch_device_bwd_carry,
    reference=reference_bwd_carry,
    ins=("b l g r", "b l g n", "b l g r p", "b l"),
    outs=("b g r", "b g r p n"),
    whole="l p n",
    unfit=lambda options, a, C, dy, rank: unfit_for_gpu(options, dy, C, C),
)


_DECAYS = Decays(of_states, over=jnp.prod)


def _sections(options: SsdOptions, x: Any) -> Sections:
    batch, length, groups, heads, channels = x.shape
    step = options.checkpoint_every or SAVED_CHUNK
    return Sections.of(batch, groups * heads * channels, length, step)


def _cut(axes: Any, sections: Sections, args: Any) -> tuple[Any, Any]:
    """The arguments of the forward, those along the sequence in sections; which begin segments."""
    x, dt, a, B, C, D, z, initial_state, rank, crossed = args
    x, dt, a, B, C, z = map(sections.cut, (x, dt, a, B, C, z))
    rank, begins = own_rank(axes, sections, rank)
    return (x, dt, a, B, C, D, z, initial_state, rank, crossed), begins


def _states_before(
    run: Any, axes: Any, sections: Sections, options: SsdOptions, begins: Any, *args: Any
) -> jax.Array:
    x, dt, a, B, _, _, _, first, rank, _ = args
    decay, state = run(options, x, dt, a, B, rank, of=CARRY)
    carry = unless(begins, decay), state
    return unless(begins, sections.states(run, axes, _DECAYS, carry, first))


def _forward(run: Any, axes: Any, options: SsdOptions, *args: Any) -> Any:
    sections = _sections(options, args[0])
    given, begins = _cut(axes, sections, args)
    *floats, _, rank, crossed = given
    before = _states_before(run, axes, sections, options, begins, *given)
    out, final, *saved = run(options, *floats, before, rank, crossed)
    final = only_if(is_last(axes), sections.at(final, -1))
    return sections.join(out), final, *map(sections.join, saved)


def _backward(run: Any, axes: Any, options: SsdOptions, *args: Any) -> Any:
    *given, states, y, dout, dfinal = args
    sections = _sections(options, args[0])
    given, begins = _cut(axes, sections, given)
    *floats, initial_state, rank, crossed = given
    _, _, a, _, C, _, z = floats
    states, y, dout = map(sections.cut, (states, y, dout))
    decay, dh = run(options, a, C, _before_gate(z, dout), rank, of=BWD_CARRY)
    carry = unless(begins, decay), unless(begins, dh)
    dfinal = sections.states(run, axes, _DECAYS, carry, dfinal, reverse=True)
    if states is None:
        before = _states_before(run, axes, sections, options, begins, *given)
    else:
        before = states[:, 0].astype(dh.dtype)
    rest = before, rank, crossed, states, y, dout, dfinal
    dx, ds, da, dB, dC, dD, dz, dinitial, _, _ = run(options, *floats, *rest)
    dx, ds, da, dB, dC, dz = map(sections.join, (dx, ds, da, dB, dC, dz))
    if initial_state is not None:
        dinitial = only_if(is_first(axes), sections.at(dinitial, 0))
    else:
        dinitial = None
    return dx, ds, da, dB, dC, dD, dz, dinitial, None, None


def _before_gate(z: Any, dout: jax.Array) -> jax.Array:
    """The gradient of y in out = y · silu(z)."""
    if z is None:
        return dout
    acc = jnp.result_type(jnp.float32, z, dout)
    return (dout.astype(acc) * jax.nn.silu(z.astype(acc))).astype(dout.dtype)


forward, backward = sequences(_forward, _backward, unless_whole_steps)
