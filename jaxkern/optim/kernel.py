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

The last section, launches over leaves, serves the passes over gradients, too.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxkern.core.arguments import unfit
from jaxkern.core.dispatch import Mode
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import varying
from jaxkern.mosaic.arithmetic import (
    fast_exp2,
    fast_log2,
    fast_reciprocal,
    fast_sqrt,
    multiply_wide,
    nearest,
)
from jaxkern.mosaic.elementwise import load_units, load_words, store_units, too_large, with_chosen
from jaxkern.mosaic.lanes import join_lanes, lane_numbers, largest_of_warp
from jaxkern.mosaic.launch import LANES, grid_axes, launch_in_place
from jaxkern.optim.arithmetic import (
    CODE_BLOCK,
    GROUP,
    Leaf,
    StepNumbers,
    UpdateRule,
    before_rounding,
    changed,
    decoded,
    draws_needed,
    group_draws,
    is_code,
    number_names,
    round_to_bfloat16,
    step,
)

ELEMENTS = 8
"""A lane loads so many elements of each array before it computes, in one unit or several."""

LARGE = 2**24
"""A leaf of so many elements has a launch of its own: it takes 100 µs, of which 2 are its ends."""

MAX_REFS = 128
"""A launch takes at most so many arrays: from 256 on the choice among them takes registers."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def update_leaves(
    rule: UpdateRule,
    mode: Mode,
    decays: tuple[bool, ...],
    numbers: StepNumbers,
    seed: jax.Array,
    leaves: Sequence[Leaf],
) -> list[Leaf]:
    """Does a step, and returns the new leaves, their gradients ``None``.

    `decays` says whether each leaf does; `seed` (3,), uint32, is the seed's two words and the step.
    """
    done: list[Any] = [None] * len(leaves)
    by_kernel: list[int] = []
    for i, leaf in enumerate(leaves):
        by_xla = mode == "xla" or (mode == "auto" and leaf_unsupported(rule, leaf) is not None)
        if by_xla or leaf.weight.size == 0:
            done[i], _ = changed(rule, decays[i], numbers, seed, i, leaf)
        else:
            by_kernel.append(i)
    if not by_kernel:
        return done
    values = jnp.stack([getattr(numbers, name) for name in number_names(rule)]).astype(jnp.float32)
    header = jnp.concatenate([lax.bitcast_convert_type(values, jnp.uint32), seed])
    alone = may_be_split([leaf.weight for leaf in leaves])
    kinds: dict[int, Hashable] = {}
    for i in by_kernel:
        dtypes = tuple(None if a is None else a.dtype for a in leaves[i])
        # Leaves of one launch vary alike: its results vary over all axes of its operands.
        alike = dtypes, _vector(rule, leaves[i]), decays[i], varying(*leaves[i])
        kinds[i] = i if alone or leaves[i].weight.size >= LARGE else alike
    for group in grouped(kinds, lambda i: MAX_REFS // sum(a is not None for a in leaves[i])):
        offsets = tuple(i - group[0] for i in group)
        number = jnp.array([group[0]], jnp.uint32)
        members = [leaves[i] for i in group]
        results = _run(rule, mode, offsets, decays[group[0]], header, values, number, members)
        for i, leaf in zip(group, results, strict=True):
            done[i] = leaf
    return done


def leaf_unsupported(rule: UpdateRule, leaf: Leaf) -> str | None:
    """Says why the kernel cannot take a leaf."""
    arrays = leaf._asdict().items()
    if reason := unfit(**{name: a for name, a in arrays if a is not None and not is_code(a)}):
        return reason
    if leaf.has_codes and may_be_split([leaf.weight]):
        return "blocks of 8-bit codes may be split over devices; use jax.shard_map"
    return too_large(_vector(rule, leaf), leaf.weight.size)


def _vector(rule: UpdateRule, leaf: Leaf) -> int:
    """Counts the elements of a unit: as many as make 16 bytes of the widest array, if they divide.

    With 8-bit codes 8, so that a warp has a block, and where random bits are drawn as many as one
    call of the generator serves.
    """
    if leaf.has_codes:
        return CODE_BLOCK // 32
    if any(draws_needed(rule, leaf)):
        return math.gcd(GROUP, leaf.weight.size)
    widest = max(a.dtype.itemsize for a in leaf if a is not None)
    return math.gcd(16 // widest, leaf.weight.size)


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """Static arguments of the pass over the leaves of a launch."""

    rule: UpdateRule
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
    options = UpdateOptions(rule, mode, offsets, decays, tuple(leaf.weight.ndim for leaf in flat))
    outs = UPDATE(options, header, values, number, *itertools.chain(*flat))
    done = [Leaf(None, *arrays) for arrays in itertools.batched(outs, len(Leaf._fields) - 1)]
    return reshaped(done, [leaf._replace(grad=None) for leaf in leaves])


def _leaves(arrays: Sequence[Any]) -> list[Leaf]:
    return [Leaf(*part) for part in itertools.batched(arrays, len(Leaf._fields))]


def _reference(options, header, values, number, *arrays) -> tuple[Any, ...]:
    """Returns the leaves' arrays after the step, without gradients, in plain JAX."""
    rule = options.rule
    names = number_names(rule)
    numbers, seed = StepNumbers(**dict(zip(names, values, strict=True))), header[len(names) :]
    done = [
        changed(rule, options.decays, numbers, seed, number[0] + jnp.uint32(offset), leaf)[0]
        for leaf, offset in zip(_leaves(arrays), options.offsets, strict=True)
    ]
    return tuple(a for leaf in done for a in leaf[1:])


# The kernel


def _launch(options, header, values, number, *arrays) -> tuple[Any, ...]:
    """Returns the leaves' arrays after the step, without gradients."""
    del values
    rule, leaves = options.rule, _leaves(arrays)
    vec = _vector(rule, leaves[0])
    # Twice as many elements where averages are 8-bit codes.
    per_lane = min(4, (2 if leaves[0].has_codes else 1) * ELEMENTS // vec)
    blocks = Blocks([leaf.weight.size for leaf in leaves], vec, per_lane)
    grads = [leaf.grad.reshape(-1) for leaf in leaves]
    written = [a.reshape(-1) for leaf in leaves for a in leaf[1:] if a is not None]
    width = len(written) // len(leaves)

    def kernel(header: Any, number: Any, *refs: Any) -> None:
        rows = zip(refs[: len(grads)], itertools.batched(refs[len(grads) :], width), strict=True)
        body = functools.partial(_update_block, options, leaves[0], blocks, header, number)
        blocks.run(body, [(g, *row) for g, row in rows], options.offsets)

    fixed = [header, number, *grads]
    done = iter(launch_in_place(kernel, fixed, written, **blocks.launch(f"fused_{rule.kind}")))
    return tuple(
        None if a is None else next(done).reshape(a.shape) for leaf in leaves for a in leaf[1:]
    )


def _update_block(options, like, blocks, header, number, block, refs, of_leaf) -> None:
    """Does the step on a block's units of a leaf, which has the arrays that `like` has."""
    rule, vec = options.rule, blocks.vec
    names = number_names(rule)
    words = load_words(header, len(names) + 3)  # (LANES,) each
    of_lanes = [lax.bitcast_convert_type(word, jnp.float32) for word in words[: len(names)]]
    numbers = StepNumbers(**dict(zip(names, map(blocks.spread, of_lanes), strict=True)))
    seed = words[len(names) :]
    (first_leaf,) = load_words(number, 1)
    start, units, offset = of_leaf
    present = iter(refs)
    leaf = Leaf(*(None if a is None else next(present) for a in like))
    random_state, random_weight = draws_needed(rule, leaf)
    lane = lane_numbers(jnp.uint32)
    # A step that is skipped stores nothing.
    below = jnp.where(of_lanes[0] > 0, units, jnp.uint32(0))
    store = functools.partial(store_units, below=below)

    def rounded(dtype: Any, x: jax.Array, bits: Any) -> jax.Array:
        return round_to_bfloat16(x, bits) if rule.stochastic and dtype == jnp.bfloat16 else x

    loaded = []
    for unit in blocks.units_of_lanes(block, start, lane):
        inside = jnp.minimum(unit, units - jnp.uint32(1))
        values = [None if r is None else load_units(r, inside, vec) for r in leaf[:4]]
        scales = [None if r is None else load_units(r, inside >> 5, 1) for r in leaf[5:]]
        loaded.append((unit, values, scales))
    for unit, (g, p, *averages), scales in loaded:
        draws = functools.partial(_draws, vec, unit, first_leaf + offset, seed)
        of_state = draws(0) if random_state else (None, None)
        mu, nu = (
            a if scale is None else decoded(ref.dtype, a, blocks.spread(scale), fast_exp2)
            for a, scale, ref in zip(averages, scales, leaf[2:4], strict=True)
        )
        divide = lambda m, root: m * fast_reciprocal(root)
        delta, mu, nu = step(rule, numbers, options.decays, g, p, mu, nu, _sqrt, divide)
        weight = p + delta
        bits = draws(1)[0] if random_weight else None
        store(leaf.weight, unit, rounded(leaf.weight.dtype, weight, bits), vec)
        if leaf.copy is not None:
            store(leaf.copy, unit, weight, vec)
        for ref, scale_ref, new, bits in zip(leaf[2:4], leaf[5:], (mu, nu), of_state, strict=True):
            if new is None:
                continue
            if scale_ref is None or bits is None:
                out = rounded(ref.dtype, new, bits)
            else:
                largest = largest_of_warp(new)  # (LANES,), of the warp's block of codes
                scale = blocks.spread(largest)
                out = before_rounding(ref.dtype, new, scale, bits, fast_log2, nearest)
                store_units(scale_ref, unit >> 5, largest, 1, below=below >> 5)
            store(ref, unit, out, vec)


def _sqrt(nu: jax.Array) -> jax.Array:
    """√nu by an instruction that takes denormals for 0: nu is kept normal, as eps may be 0."""
    return fast_sqrt(jnp.maximum(nu, 2.0**-126))


def _draws(vec: int, unit: jax.Array, leaf: jax.Array, seed: Any, stream: int) -> list[jax.Array]:
    """Two draws for the elements of the lanes' units, (LANES · vec,) each."""
    per_group = GROUP // vec
    group = unit >> jnp.uint32(per_group.bit_length() - 1)
    which = unit & jnp.uint32(per_group - 1)

    def of_unit(draws: list[jax.Array]) -> jax.Array:
        units = list(itertools.batched(draws, vec))
        mine = list(units[0])
        for k, others in enumerate(units[1:], 1):
            mine = [jnp.where(which == k, b, a) for a, b in zip(mine, others, strict=True)]
        return join_lanes(mine)

    return [of_unit(draws) for draws in group_draws(group, leaf, seed, stream, multiply_wide)]


UPDATE = KernelPass(
    "fused_{op}",
    kernel=_launch,
    reference=_reference,
    ins=lambda options: ("h", "v", "n", *itertools.chain(*options.factors())),
    outs=lambda options: tuple(itertools.chain(*(leaf[1:] for leaf in options.factors()))),
    whole="h v n",
    batched=False,
)


# Launches over leaves

BLOCK = grid_axes("block")[0]


def may_be_split(arrays: Sequence[jax.Array]) -> bool:
    """Says whether the compiler, or an Explicit mesh, may split the arrays over devices.

    Without a mesh in their types any array may be, where there are several devices: those that
    only ``in_shardings`` splits have the types of arrays on one device.
    """
    meshes = {jax.typeof(a).sharding.mesh for a in arrays}
    meshes = [m for m in meshes if m.axis_types]
    if any(AxisType.Manual in m.axis_types for m in meshes):
        return False
    return max((m.size for m in meshes), default=jax.device_count()) > 1


def grouped(kinds: Mapping[int, Hashable], most: Callable[[int], int]) -> list[tuple[int, ...]]:
    """Groups leaves, by their index, whose kinds are equal, `most` of such a leaf in a launch."""
    groups: dict[Hashable, list[int]] = {}
    for i, kind in kinds.items():
        groups.setdefault(kind, []).append(i)
    return [part for of in groups.values() for part in itertools.batched(of, most(of[0]))]


def flattened(leaves: Sequence[Any]) -> Any:
    """Makes vectors of several leaves, each an array or a tuple of arrays, for one pass.

    A leaf on its own keeps its axes, between which devices may split it, but for a scalar.
    """
    if len(leaves) == 1 and jax.tree.leaves(leaves)[0].shape:
        return leaves
    return jax.tree.map(lambda a: a.reshape(-1), leaves)


def reshaped(arrays: Any, like: Any) -> Any:
    """Gives arrays the shapes of `like` back, which they had before :func:`flattened`."""
    return jax.tree.map(lambda a, b: a.reshape(b.shape), arrays, like)


def leaf_factors(ranks: Sequence[int]) -> list[str]:
    """Names the dimensions of each leaf for a KernelPass: no two leaves share a factor."""
    return [" ".join(f"l{i}d{d}" for d in range(rank)) for i, rank in enumerate(ranks)]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a launch, each a warpgroup that works on one leaf.

    Attributes:
      sizes: the elements of each leaf.
      vec: those of a unit, by which they divide.
      per_lane: how many units a lane takes.
    """

    sizes: Sequence[int]
    vec: int
    per_lane: int

    @property
    def starts(self) -> list[int]:
        """The first block of each leaf, and last the number of blocks."""
        of_block = LANES * self.per_lane * self.vec
        return list(itertools.accumulate((-(-n // of_block) for n in self.sizes), initial=0))

    def launch(self, name: str) -> dict[str, Any]:
        """The arguments of :func:`launch_kernel` for a kernel of so many blocks."""
        grid = {"grid": tuple(self.starts[-1:]), "grid_names": (BLOCK,)}
        return {"kernel_name": name, "approx_math": True, **grid}

    def run(
        self, body: Callable[..., None], rows: Sequence[Sequence[Any]], *numbers: Sequence[int]
    ) -> None:
        """Runs ``body(block, refs, (start, units, *numbers))`` for the leaf that a block works on.

        It takes the block's index, the leaf's of `rows`, references, as :func:`load_units` takes
        them, and as (LANES,), uint32, the leaf's first block, its units and its of `numbers`.
        """
        block = lax.axis_index(BLOCK)
        starts = self.starts[:-1]
        units = [size // self.vec for size in self.sizes]
        of_leaves = list(zip(starts, units, *numbers, strict=True))
        with_chosen(lambda *leaf: body(block, *leaf), block, rows, starts, of_leaves)

    def units_of_lanes(
        self, block: jax.Array, start: jax.Array, lane: jax.Array
    ) -> Iterator[jax.Array]:
        """The units that each lane takes, (LANES,) each, of the leaf from block `start` on."""
        first = (block.astype(jnp.uint32) - start) * jnp.uint32(LANES * self.per_lane) + lane
        for k in range(self.per_lane):
            yield first + jnp.uint32(k * LANES)

    def spread(self, of_lanes: jax.Array) -> jax.Array:
        """Gives each lane's number to all elements of its unit: (LANES,) -> (LANES · vec,)."""
        return join_lanes([of_lanes] * self.vec)
