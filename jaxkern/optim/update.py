r"""An optimizer's step over many leaves: a kernel and its plain-JAX twin.

The arithmetic is in `jaxkern.optim.arithmetic`. Bytes per element, of a gradient, weight, mu and nu
of G, P, M and V bytes: G + 2P + 2M + 2V, 28 in fp32, and those of the copy, which is not read.
Instructions per element: 20 in fp32, 41 to 52 with stochastic rounding, 77 with codes of 8 bits; an
H200's memory leaves time for 200 at 28 bytes, 100 at 14 and 72 at the 10 of bf16 with codes.

The kernel works in place: weight, mu and nu are references (`pl.run_state`), which XLA aliases
from input to output, copying only what the caller has not donated. A block is one warpgroup. Each
lane loads `ELEMENTS` elements of every array, in accesses of up to 16 bytes, computes and stores;
lanes past a leaf's end store nothing, nor does any in a step that is skipped. Leaves of equal
dtypes share a launch, whose blocks find their leaf in a tree of branches; large leaves, and all
leaves of a program that the compiler may split over devices, have their own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.dispatch import Mode
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.target import interpreted
from jaxkern.mosaic.instructions import (
    fast_exp2,
    fast_log2,
    fast_reciprocal,
    fast_sqrt,
    multiply_wide,
)
from jaxkern.mosaic.lane_sums import largest_of_warp
from jaxkern.mosaic.lanes import join_lanes
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.units import load_units, load_words, store_units, too_large
from jaxkern.optim import quantise
from jaxkern.optim.arithmetic import (
    Leaf,
    Numbers,
    Rule,
    Static,
    changed,
    corrected,
    is_code,
    number_names,
    plain_ratio,
    rounded,
    step,
    streams,
)
from jaxkern.optim.leaves import (
    DTYPES,
    MAX_REFS,
    Blocks,
    flattened,
    grouped,
    launch_blocks,
    leaf_factors,
    may_be_split,
    reshaped,
    varying,
)
from jaxkern.optim.rounding import GROUP, Draws, group_draws

ELEMENTS = 8
"""A lane loads so many elements of each array before it computes, in one unit or several."""

LARGE = 2**24
"""A leaf of so many elements has a launch of its own: it takes 100 µs, of which 2 are its ends."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def update_leaves(
    rule: Rule,
    mode: Mode,
    statics: tuple[Static, ...],
    numbers: Numbers,
    seed: jax.Array,
    leaves: Sequence[Leaf],
) -> list[Leaf]:
    """Does a step, and returns the new leaves, their gradients ``None``.

    Args:
      rule: the optimizer.
      mode: what runs, from :func:`jaxkern.core.dispatch.resolve`.
      statics: of each leaf.
      numbers: of the step.
      seed: (3,), uint32, the seed's two words and the step, for the stochastic rounding.
      leaves: floating arrays.
    """
    done: list[Any] = [None] * len(leaves)
    by_kernel = []
    for i, (leaf, static) in enumerate(zip(leaves, statics, strict=True)):
        by_xla = mode == "xla" or (mode == "auto" and leaf_unsupported(rule, leaf) is not None)
        if by_xla or leaf.weight.size == 0:
            done[i], _ = changed(rule, static.decays, numbers, seed, static.number, leaf)
        else:
            by_kernel.append(i)
    if not by_kernel:
        return done
    values = jnp.stack([getattr(numbers, name) for name in number_names(rule)]).astype(jnp.float32)
    header = jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint32), seed])
    alone = may_be_split([leaf.weight for leaf in leaves])
    for group in _groups(rule, leaves, by_kernel, statics, alone):
        first = statics[group[0]]
        offsets = tuple(statics[i].number - first.number for i in group)
        number = jnp.array([first.number], jnp.uint32)
        members = [leaves[i] for i in group]
        results = _run(rule, mode, offsets, first.decays, header, values, number, members)
        for i, leaf in zip(group, results, strict=True):
            done[i] = leaf
    return done


def leaf_unsupported(rule: Rule, leaf: Leaf) -> str | None:
    """Says why the kernel cannot take a leaf."""
    for a in leaf:
        if a is not None and not is_code(a) and a.dtype.name not in DTYPES:
            return f"it has dtype {a.dtype}, and the kernel takes {', '.join(DTYPES)}"
    if leaf.has_codes and may_be_split([leaf.weight]):
        return "blocks of 8-bit codes may be split over devices; use jax.shard_map"
    reason = too_large(_vector(rule, leaf), leaf.weight.size)
    return reason and f"its {reason}"


def _vector(rule: Rule, leaf: Leaf) -> int:
    """Counts the elements of a unit: as many as make 16 bytes of the widest array, if they divide.

    With 8-bit codes 8, so that a warp has a block, and where random bits are drawn as many as one
    call of the generator serves.
    """
    if leaf.has_codes:
        return quantise.BLOCK // 32
    if any(streams(rule, leaf)):
        return math.gcd(GROUP, leaf.weight.size)
    widest = max(a.dtype.itemsize for a in leaf if a is not None)
    return math.gcd(16 // widest, leaf.weight.size)


def _groups(
    rule: Rule, leaves: Sequence[Leaf], which: Sequence[int], statics: Sequence[Static], alone: bool
) -> list[list[int]]:
    """Assigns leaves, by their index, to launches."""
    kinds: dict[int, Any] = {}
    for i in which:
        leaf = leaves[i]
        dtypes = tuple(None if a is None else a.dtype for a in leaf)
        alike = (dtypes, _vector(rule, leaf), statics[i].decays, varying(*leaf))
        kinds[i] = (i,) if alone or leaf.weight.size >= LARGE else alike
    groups: list[list[int]] = []
    for members in grouped(kinds):
        arrays = sum(a is not None for a in leaves[members[0]])
        groups += map(list, itertools.batched(members, MAX_REFS // arrays))
    return groups


@dataclasses.dataclass(frozen=True)
class _Options:
    rule: Rule
    mode: Mode
    offsets: tuple[int, ...]  # of the leaves, from the number that a launch is given
    decays: bool
    ranks: tuple[int, ...]  # of the leaves

    @property
    def op(self) -> str:
        return self.rule.kind

    def factors(self) -> list[list[str]]:
        """The factors of each leaf's arrays: its own dimensions, and one of its scales."""
        dims = enumerate(leaf_factors(self.ranks))
        return [[of_leaf] * (len(Leaf._fields) - 2) + [f"l{i}s"] * 2 for i, of_leaf in dims]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(rule, mode, offsets, decays, header, values, number, leaves) -> list[Leaf]:
    """Runs the kernel over leaves of equal dtypes, or its twin where it cannot run.

    A program traces and lowers it once for all leaves that have a launch of their own and are
    alike, as their number is an argument. The kernel takes the step's numbers from `header`, words
    that have no derivatives; the twin, which is what is differentiated, from `values`.
    """
    flat = flattened(leaves)
    options = _Options(rule, mode, offsets, decays, tuple(leaf.weight.ndim for leaf in flat))
    outs = UPDATE(options, header, values, number, *itertools.chain(*flat))
    done = [Leaf(None, *arrays) for arrays in itertools.batched(outs, len(Leaf._fields) - 1)]
    return reshaped(done, [leaf._replace(grad=None) for leaf in leaves])


def _leaves(arrays: Sequence[Any]) -> list[Leaf]:
    return [Leaf(*part) for part in itertools.batched(arrays, len(Leaf._fields))]


# Reference


def _reference(options, header, values, number, *arrays) -> tuple[Any, ...]:
    """Returns the leaves' arrays after the step, without gradients, in plain JAX."""
    rule = options.rule
    names = number_names(rule)
    numbers, seed = Numbers(**dict(zip(names, values, strict=True))), header[len(names) :]
    done = [
        changed(rule, options.decays, numbers, seed, number[0] + jnp.uint32(offset), leaf)[0]
        for leaf, offset in zip(_leaves(arrays), options.offsets, strict=True)
    ]
    return tuple(a for leaf in done for a in leaf[1:])


# Kernel


@dataclasses.dataclass(frozen=True)
class _Plan:
    rule: Rule
    leaf: Leaf  # any of the launch's, for the dtypes of all
    decays: bool
    vec: int  # elements of a unit

    @property
    def per_lane(self) -> int:
        """The units of a lane: twice as many elements where averages are 8-bit codes."""
        return min(4, (2 if self.leaf.has_codes else 1) * ELEMENTS // self.vec)


def _launch(options, header, values, number, *arrays) -> tuple[Any, ...]:
    """Returns the leaves' arrays after the step, without gradients."""
    del values
    rule, leaves = options.rule, _leaves(arrays)
    vec = _vector(rule, leaves[0])
    plan = _Plan(rule, leaves[0], options.decays, vec)
    blocks = Blocks([leaf.weight.size // vec for leaf in leaves], plan.per_lane)
    grads = [leaf.grad.reshape(-1) for leaf in leaves]
    written = [a.reshape(-1) for leaf in leaves for a in leaf[1:] if a is not None]
    width = len(written) // len(leaves)

    def kernel(header: Any, number: Any, *refs: Any) -> None:
        rows = zip(refs[: len(grads)], itertools.batched(refs[len(grads) :], width), strict=True)
        body = functools.partial(_block, plan, header, number)
        blocks.run(body, [(g, *row) for g, row in rows], options.offsets)

    fixed = [header, number, *grads]
    done = iter(launch_blocks(f"fused_{rule.kind}", kernel, blocks.number, fixed, written))
    return tuple(
        None if a is None else next(done).reshape(a.shape) for leaf in leaves for a in leaf[1:]
    )


def _block(
    plan: _Plan,
    header: Any,
    number: Any,
    block: jax.Array,
    refs: Sequence[Any],
    leaf_numbers: Sequence[jax.Array],
) -> None:
    """Does the step on the units of a leaf that are a block's."""
    names = number_names(plan.rule)
    words = load_words(header, len(names) + 3)  # (LANES,) each
    of_lanes = [lax.bitcast_convert_type(word, jnp.float32) for word in words[: len(names)]]
    spread = [_spread(plan, value) for value in of_lanes]  # (LANES · vec,) each
    numbers = Numbers(**dict(zip(names, spread, strict=True)))
    seed = words[len(names) :]
    (first_leaf,) = load_words(number, 1)
    start, units, offset = leaf_numbers
    present = iter(refs)
    leaf = Leaf(*(None if a is None else next(present) for a in plan.leaf))
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    lane = plgpu.broadcasted_iota(jnp.uint32, (LANES,), 0, layout=layout)
    # A step that is skipped stores nothing.
    below = jnp.where(of_lanes[0] > 0, units, jnp.uint32(0))
    first = (block.astype(jnp.uint32) - start) * jnp.uint32(LANES * plan.per_lane) + lane
    loaded = []
    for k in range(plan.per_lane):
        unit = first + jnp.uint32(k * LANES)
        inside = jnp.minimum(unit, units - jnp.uint32(1))
        values = [None if r is None else load_units(r, inside, plan.vec) for r in leaf[:4]]
        scales = [None if r is None else load_units(r, inside >> 5, 1) for r in leaf[5:]]
        loaded.append((unit, values, scales))
    for unit, values, scales in loaded:
        draw = functools.partial(_draws, plan, unit, first_leaf + offset, seed)
        _update_unit(plan, leaf, numbers, draw, unit, below, values, scales)


def _update_unit(
    plan: _Plan,
    leaf: Leaf,
    numbers: Numbers,
    draw: Callable[[int], Draws],
    unit: jax.Array,
    below: jax.Array,
    values: Sequence[Any],
    scales: Sequence[Any],
) -> None:
    """Does the step on a unit of each lane, and stores the results.

    Args:
      plan: what the kernel is compiled for.
      leaf: references to the leaf's arrays.
      numbers: of the step, (LANES · vec,) each.
      draw: gives the random bits of a stream.
      unit: (LANES,), uint32, which unit of the leaf each lane has.
      below: (LANES,), uint32; a lane stores a unit that is below it.
      values: of grad, weight, mu and nu, (LANES · vec,) each.
      scales: of mu and nu where they are codes, (LANES,) each.
    """
    g, p, *averages = values
    of_state, of_weight = streams(plan.rule, plan.leaf)
    draws = draw(0) if of_state else Draws(None, None)
    of = quantise.PLAIN if interpreted() else _FAST
    mu, nu = (
        a if scale is None else quantise.value(like.dtype, a, _spread(plan, scale), of)
        for a, scale, like in zip(averages, scales, plan.leaf[2:4], strict=True)
    )
    ratio = plain_ratio if interpreted() else _fast_ratio
    delta, mu, nu = step(plan.rule, numbers, plan.decays, g, p, mu, nu, ratio)
    weight = p + delta
    bits = draw(1).first if of_weight else None
    store = functools.partial(store_units, below=below)
    store(leaf.weight, unit, rounded(plan.rule, leaf.weight.dtype, weight, bits), plan.vec)
    if leaf.copy is not None:
        store(leaf.copy, unit, weight, plan.vec)
    for ref, scale_ref, new, bits in zip(leaf[2:4], leaf[5:], (mu, nu), draws, strict=True):
        if new is None:
            continue
        if scale_ref is None or bits is None:
            out = rounded(plan.rule, ref.dtype, new, bits)
        else:
            largest = largest_of_warp(new)  # (LANES,), of the warp's block of codes
            every = _spread(plan, largest)
            out = quantise.before_rounding(ref.dtype, new, every, bits, of)
            store_units(scale_ref, unit >> 5, largest, 1, below=below >> 5)
        store(ref, unit, out, plan.vec)


def _nearest(x: jax.Array) -> jax.Array:
    shift = 1.5 * 2**23
    return (x + shift) - shift


_SMALLEST_NORMAL = 2.0**-126

_FAST = quantise.Functions(fast_exp2, fast_log2, _nearest)


def _fast_ratio(n: Numbers, g: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
    """Adam's step by instructions that take denormals for 0: nu is kept normal, as eps may be 0."""
    if n.eps_root is not None:
        nu = nu * n.nu_factor + n.eps_root
    root = fast_sqrt(jnp.maximum(nu, _SMALLEST_NORMAL))
    m = corrected(n, g, mu)
    scaled = root if n.eps_root is not None else root * n.nu_factor
    return m * fast_reciprocal(scaled + n.eps)


def _spread(plan: _Plan, of_lanes: jax.Array) -> jax.Array:
    """Gives each lane's number to all elements of its unit: (LANES,) -> (LANES · vec,)."""
    return join_lanes([of_lanes] * plan.vec)


def _draws(plan: _Plan, unit: jax.Array, leaf: jax.Array, seed: Any, stream: int) -> Draws:
    """The random bits of the elements of the lanes' units, (LANES · vec,) each."""
    per_group = GROUP // plan.vec
    group = unit >> jnp.uint32(per_group.bit_length() - 1)
    which = unit & jnp.uint32(per_group - 1)

    def of_unit(draws: list[jax.Array]) -> jax.Array:
        units = list(itertools.batched(draws, plan.vec))
        mine = list(units[0])
        for k, others in enumerate(units[1:], 1):
            mine = [jnp.where(which == k, b, a) for a, b in zip(mine, others, strict=True)]
        return join_lanes(mine)

    return Draws(*map(of_unit, group_draws(group, leaf, seed, stream, multiply_wide)))


UPDATE = KernelPass(
    "fused_{op}",
    kernel=_launch,
    reference=_reference,
    ins=lambda options: ("h", "v", "n", *itertools.chain(*options.factors())),
    outs=lambda options: tuple(itertools.chain(*(leaf[1:] for leaf in options.factors()))),
    whole="h v n",
    batched=False,
)
