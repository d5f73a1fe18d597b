"""A sequence that is split between devices: what each does with its part.

A part makes P S + R of the state S before it, with a matrix P of K × K for each head, as each token
makes (I − β k ⊗ k) exp(g) S + β k ⊗ v. A device finds P and R; one all-gather collects these from
all devices, K·(K + V) numbers a head, and each computes the state before its part. The backward
does the same from the end to the start, with Pᵀ.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import carried, is_first, is_last, only_if
from jaxkern.ops.delta_rule.kernel import launch_bwd_carry, launch_carry
from jaxkern.ops.delta_rule.reference import (
    DeltaRuleOptions,
    reference_bwd_carry,
    reference_carry,
    unsupported,
)
from jaxkern.ops.sections import Sections, own_rank, sequences, unless, unless_whole_steps
from jaxkern.ops.segments import along

_KEYS, _VALUES, _STEPS = "b l g k", "b l g r v", ("b l g r ...", "b l g r")
_CARRY = ("b g r k j", "b g r k v", "b")

CARRY = KernelPass(
    "gated_delta_rule_carry",
    kernel=launch_carry,
    reference=reference_carry,
    ins=(_KEYS, _VALUES, *_STEPS, "b l"),
    outs=_CARRY,
    whole="l k v .0",
    unfit=lambda options, k, v, *_: unsupported(options.num_segments, k, k, v),
)
BWD_CARRY = KernelPass(
    "gated_delta_rule_bwd_carry",
    kernel=launch_bwd_carry,
    reference=reference_bwd_carry,
    ins=(_KEYS, _KEYS, *_STEPS, _VALUES, "b l"),
    outs=_CARRY,
    whole="l k v .0",
    unfit=lambda options, q, k, g, b, v, rank: unsupported(options.num_segments, q, k, v),
)


def _after(carry: tuple[jax.Array, ...], state: jax.Array) -> jax.Array:
    """The state on the other side of a part."""
    transition, own, whole = carry
    passed = jnp.einsum("bgrkj,bgrjv->bgrkv", transition, state, precision="highest")
    return own + jnp.where(along(whole > 0, own), passed, 0)


def _carried(axes: Any, begins: Any, carry: Any, first: Any, *, reverse: bool = False) -> jax.Array:
    """The state before this part or, in reverse, after it; `begins`: it begins a segment, (B,)."""
    transition, own, whole = carry
    own = unless(begins, own) if reverse else own
    first = jnp.zeros_like(own) if first is None else first.astype(own.dtype)
    carry = transition, own, unless(begins, whole)
    return carried(axes, _after, carry, first, reverse=reverse)


def _before(run: Any, axes: Any, options: DeltaRuleOptions, begins: Any, *args: Any) -> jax.Array:
    """The state before this part."""
    _, k, v, g, beta, first, rank, _ = args
    carry = run(options, k, v, g, beta, rank, of=CARRY)
    return unless(begins, _carried(axes, begins, carry, first))


def _forward(run: Any, axes: Any, options: DeltaRuleOptions, *args: Any) -> Any:
    *floats, first, rank, crossed = args
    rank, begins = own_rank(axes, Sections(1), rank)
    before = _before(run, axes, options, begins, *floats, first, rank, crossed)
    out, final, *saved = run(options, *floats, before, rank, crossed)
    return out, only_if(is_last(axes), final), *saved


def _backward(run: Any, axes: Any, options: DeltaRuleOptions, *args: Any) -> Any:
    *floats, first, rank, crossed, states, inverses, dout, dfinal = args
    q, k, _, g, beta = floats
    rank, begins = own_rank(axes, Sections(1), rank)
    carry = run(options, q, k, g, beta, dout, rank, of=BWD_CARRY)
    after = _carried(axes, begins, carry, dfinal, reverse=True)
    before = states[:, 0].astype(after.dtype)
    saved = states, inverses
    *dfloats, dfirst, _, _ = run(options, *floats, before, rank, crossed, *saved, dout, after)
    dfirst = None if first is None else only_if(is_first(axes), dfirst)
    return *dfloats, dfirst, None, None


forward, backward = sequences(_forward, _backward, unless_whole_steps)
