r"""Passes over the gradients of a whole tree, which unscale and check them or sum their squares.

    scale    g = s · g                 and whether all of it is finite
    norm     Σ g²                      over all leaves

computed in fp32 and rounded once to g's dtype. Bytes per element, of a gradient of G bytes: 2G and
G; operations: 3 and 2. Leaves of one dtype share a launch, `MAX_LEAVES` of them at most; leaves
that the compiler may split over devices have their own.

A block is one warpgroup. Each lane loads `_BYTES` of a leaf at a time. `scale` works in place, and
a warp that has found a result that is not finite writes so into the launch's one flag, which
otherwise stays 0. `norm` writes a sum for each warp, that XLA adds up; the order is fixed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.bound import standard_promotion
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.mosaic.lane_sums import largest_of_warp, sum_of_warp
from jaxkern.mosaic.lanes import join_lanes
from jaxkern.mosaic.launch import LANES, launch_kernel
from jaxkern.mosaic.units import load_units, load_words, store_units, too_large
from jaxkern.optim.arguments import check_loss_scale, floating_leaves
from jaxkern.optim.leaves import (
    BLOCK,
    DTYPES,
    Blocks,
    flattened,
    grouped,
    launch_blocks,
    leaf_factors,
    may_be_split,
    reshaped,
    varying,
)
from jaxkern.precision import LossScale

_BYTES = 128
"""Bytes that a lane loads before it computes."""

MAX_LEAVES = 384
"""A launch takes at most so many leaves: its arguments are at most 512 pointers."""

_WARPS = LANES // 32


@standard_promotion()
def scale_gradients(
    grads: Any, loss_scale: LossScale, *, implementation: Implementation | None = None
) -> tuple[Any, jax.Array]:
    r"""Divide a tree of gradients by the loss scale, and tell whether all are finite, in one pass.

    .. math:: g = g / s

    It is ``loss_scale.unscale`` and :func:`jaxkern.precision.all_finite` for what comes between
    gradients and an optimizer. :func:`jaxkern.apply` with a fused optimizer needs neither: they are
    parts of its pass.

    Args:
      grads: a tree of floating arrays. Under ``jax.jit`` they are overwritten unless they are
        needed otherwise.
      loss_scale: by which they are divided, exactly if it is a power of two.
      implementation: ``"mosaic"`` for the Pallas GPU kernel, ``"xla"`` for plain JAX, ``None`` for
        the fastest. Derivatives are those of plain JAX.

    Returns:
      The gradients in their dtypes, and () bool, whether every element of the result is finite.
      Inside ``jax.shard_map`` it is of each device's part.

    Raises:
      TypeError: a leaf is not a floating array, or `loss_scale` no loss scale.
      ValueError: `implementation` is none.
      NotImplementedError: ``"mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> from jaxkern.precision import StaticLossScale
      >>> grads, finite = jaxkern.scale_gradients({"w": jnp.ones(2)}, StaticLossScale(4.0))
      >>> grads["w"], bool(finite)
      (Array([0.25, 0.25], dtype=float32), True)

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2017.
    """
    check_loss_scale(loss_scale)
    leaves, treedef = floating_leaves("grads", grads)
    reasons = map(_unsupported, leaves) if implementation == "mosaic" else ()
    mode = resolve(implementation, next(filter(None, reasons), None), op="scale_gradients")
    f32 = functools.reduce(jnp.promote_types, (a.dtype for a in leaves), jnp.dtype(jnp.float32))
    scaled, finite = _scale(mode, 1 / jnp.asarray(loss_scale.loss_scale, f32), leaves)
    return treedef.unflatten(scaled), finite


@functools.partial(jax.jit, static_argnums=(0, 2))
def sum_of_squares(mode: Mode, leaves: Sequence[jax.Array], f32: Any = jnp.float32) -> jax.Array:
    """The sum of the squares of all elements of `leaves`, () of dtype `f32`."""
    total = jnp.zeros((), f32)
    for mode_here, group in _groups(mode, leaves):
        flat = flattened([leaves[i] for i in group])
        (part,) = SQUARES(_Options(mode_here, tuple(a.ndim for a in flat), f32), *flat)
        total += part.astype(f32)
    return total


def _unsupported(a: jax.Array) -> str | None:
    """Says why the kernels cannot take a leaf."""
    if a.dtype.name not in DTYPES:
        return f"a leaf has dtype {a.dtype}, and the kernel takes {', '.join(DTYPES)}"
    reason = too_large(_vector(a), a.size)
    return reason and f"a leaf's {reason}"


def _vector(a: Any) -> int:
    """Counts the elements of a unit: as many as make 16 bytes, if they divide the size."""
    return math.gcd(16 // a.dtype.itemsize, a.size)


@functools.partial(jax.jit, static_argnums=0)
def _scale(mode, factor, leaves) -> tuple[list[jax.Array], jax.Array]:
    done, finite = list(leaves), jnp.array(True)
    for mode_here, group in _groups(mode, leaves):
        members = [leaves[i] for i in group]
        flat = flattened(members)
        options = _Options(mode_here, tuple(a.ndim for a in flat))
        *scaled, bad = SCALE(options, factor.reshape(1), *flat)
        finite &= bad == 0
        for i, a in zip(group, reshaped(scaled, members), strict=True):
            done[i] = a
    return done, finite


def _groups(mode: Mode, leaves: Sequence[jax.Array]) -> list[tuple[Mode, list[int]]]:
    """Assigns leaves, by their index, to passes, each with what it runs.

    In ``"auto"`` plain JAX takes those that the kernels cannot; empty leaves are in no pass.
    """
    alone = may_be_split(leaves)
    kinds: dict[int, Any] = {}
    for i, a in enumerate(leaves):
        if a.size:
            by_xla = mode == "xla" or (mode == "auto" and _unsupported(a) is not None)
            kinds[i] = "xla" if by_xla else (i,) if alone else (a.dtype, _vector(a), varying(a))
    return [
        ("xla" if kinds[members[0]] == "xla" else mode, list(part))
        for members in grouped(kinds)
        for part in itertools.batched(members, MAX_LEAVES)
    ]


@dataclasses.dataclass(frozen=True)
class _Options:
    mode: Mode
    ranks: tuple[int, ...]  # of the leaves
    sums: Any = None  # the dtype of sums of squares in plain JAX


# Reference


def _scale_plain(options: _Options, factor: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the scaled leaves, and a number that is 0 if they are finite."""
    del options
    scaled = [(a.astype(factor.dtype) * factor[0]).astype(a.dtype) for a in leaves]
    bad = [jnp.where(jnp.isfinite(a).all(), 0.0, 1.0).astype(jnp.float32) for a in scaled]
    return *scaled, sum(bad[1:], bad[0])


def _squares_plain(options: _Options, *leaves: jax.Array) -> tuple[jax.Array]:
    squares = [jnp.sum(jnp.square(a.astype(options.sums))) for a in leaves]
    return (sum(squares[1:], squares[0]),)


# Kernels


def _launch_scale(
    options: _Options, factor: jax.Array, *leaves: jax.Array
) -> tuple[jax.Array, ...]:
    del options
    blocks, vec = _blocks(leaves)
    words = lax.bitcast_convert_type(factor.astype(jnp.float32), jnp.uint32)

    def kernel(header: Any, *refs: Any) -> None:
        *leaves, flag = refs
        body = functools.partial(_scale_block, blocks.per_lane, vec, header, flag)
        blocks.run(body, [(ref,) for ref in leaves])

    *scaled, bad = launch_blocks(
        "scale_gradients",
        kernel,
        blocks.number,
        [words],
        [*(a.reshape(-1) for a in leaves), jnp.zeros(1, jnp.float32)],
    )
    return *reshaped(scaled, list(leaves)), bad[0]


def _launch_squares(options: _Options, *leaves: jax.Array) -> tuple[jax.Array]:
    del options
    blocks, vec = _blocks(leaves)

    def kernel(*refs: Any) -> None:
        *leaves, sums = refs
        body = functools.partial(_squares_block, blocks.per_lane, vec, sums)
        blocks.run(body, [(ref,) for ref in leaves])

    sums = launch_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((blocks.number * _WARPS,), jnp.float32),
        grid=(blocks.number,),
        grid_names=(BLOCK,),
        kernel_name="norm_gradients",
        approx_math=True,
    )(*(a.reshape(-1) for a in leaves))
    return (sums.sum(),)


def _blocks(leaves: Sequence[jax.Array]) -> tuple[Blocks, int]:
    """The blocks of a launch over leaves of one dtype, and the elements of a unit."""
    vec = _vector(leaves[0])
    per_lane = min(8, _BYTES // (vec * leaves[0].dtype.itemsize))
    return Blocks([a.size // vec for a in leaves], per_lane), vec


def _scale_block(
    per_lane: int, vec: int, header: Any, flag: Any, block: jax.Array, refs: Any, leaf: Any
) -> None:
    (ref,), (start, units) = refs, leaf
    _, _, of_lane, values = _loaded(per_lane, vec, block, ref, start, units)
    (word,) = load_words(header, 1)
    factor = join_lanes([lax.bitcast_convert_type(word, jnp.float32)] * vec)  # (LANES · vec,)
    scaled = [v * factor for v in values]
    for unit, value in zip(of_lane, scaled, strict=True):
        store_units(ref, unit, value, vec, below=units)
    largest = largest_of_warp(functools.reduce(jnp.maximum, map(jnp.abs, scaled)))  # (LANES,)
    bad = jnp.where(largest < _overflow(ref.dtype), jnp.uint32(0), jnp.uint32(1))
    first_of_all, one = jnp.zeros((LANES,), jnp.uint32), jnp.ones((LANES,), jnp.float32)
    store_units(flag, first_of_all, one, 1, below=bad)


def _squares_block(
    per_lane: int, vec: int, sums: Any, block: jax.Array, refs: Any, leaf: Any
) -> None:
    (ref,), (start, units) = refs, leaf
    block, lane, of_lane, values = _loaded(per_lane, vec, block, ref, start, units)
    inside = [join_lanes([jnp.where(u < units, 1.0, 0.0)] * vec) > 0 for u in of_lane]
    squares = [jnp.where(i, v * v, 0.0) for i, v in zip(inside, values, strict=True)]
    total = sum_of_warp(functools.reduce(jnp.add, squares))  # (LANES,)
    store_units(sums, block * jnp.uint32(_WARPS) + (lane >> 5), total, 1)


def _loaded(
    per_lane: int, vec: int, block: jax.Array, ref: Any, start: jax.Array, units: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
    """Loads a block's part of a leaf: block, lane, the lanes' units, their elements (LANES · vec,).

    Units past the leaf's end repeat the last.
    """
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    lane = plgpu.broadcasted_iota(jnp.uint32, (LANES,), 0, layout=layout)
    block = block.astype(jnp.uint32)
    first = (block - start) * jnp.uint32(LANES * per_lane) + lane
    of_lane = [first + jnp.uint32(k * LANES) for k in range(per_lane)]
    last = units - jnp.uint32(1)
    return block, lane, of_lane, [load_units(ref, jnp.minimum(u, last), vec) for u in of_lane]


def _overflow(dtype: Any) -> float:
    """Returns the least number that rounds to infinity, half a step past the largest finite one."""
    if dtype == jnp.float32:
        return math.inf
    info = jnp.finfo(dtype)
    return float(info.max) * (1 + 2.0 ** -(info.nmant + 2))


SCALE = KernelPass(
    "scale_gradients",
    kernel=_launch_scale,
    reference=_scale_plain,
    ins=lambda options: ("h", *leaf_factors(options.ranks)),
    outs=lambda options: (*leaf_factors(options.ranks), ""),
    whole="h",
    batched=False,
)
SQUARES = KernelPass(
    "norm_gradients",
    kernel=_launch_squares,
    reference=_squares_plain,
    ins=lambda options: tuple(leaf_factors(options.ranks)),
    outs=("",),
    batched=False,
)
