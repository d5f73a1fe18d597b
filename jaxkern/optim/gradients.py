r"""Gradients of a whole tree: unscaled and checked, their norm, and sums over microbatches.

    scale    g = s · g                 and whether all of it is finite
    norm     Σ g²                      over all leaves

are passes computed in fp32 and rounded once to g's dtype. Bytes per element, of a gradient of G
bytes: 2G and G; operations: 3 and 2. Leaves of one dtype share a launch, `MAX_LEAVES` of them at
most; leaves that the compiler may split over devices have their own.

A block is one warpgroup. Each lane loads `_BYTES` of a leaf at a time. `scale` works in place, and
a warp that has found a result that is not finite writes so into the launch's one flag, which
otherwise stays 0. `norm` writes a sum for each warp, that XLA adds up; the order is fixed.

Gradients of a batch in parts have the activations of one part alone in memory. Their sums are kept
in fp32 and rounded once, to the dtype that ``jax.grad`` gives. Devices that have microbatches each
exchange their sums once, at the end.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import check_axis_names, check_flag, floating_leaves, unfit
from jaxkern.core.bound import standard_promotion, wide
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import vary_over, varying
from jaxkern.mosaic.elementwise import load_units, load_words, store_units, too_large
from jaxkern.mosaic.lanes import lane_numbers, largest_of_warp, sum_of_warp
from jaxkern.mosaic.launch import LANES, launch_in_place, launch_kernel
from jaxkern.optim.kernel import Blocks, flattened, grouped, leaf_factors, may_be_split, reshaped
from jaxkern.precision import LossScale, check_loss_scale

Tree = Any

_BYTES = 128
"""Bytes that a lane loads before it computes."""

MAX_LEAVES = 384
"""A launch takes at most so many leaves: its arguments are at most 512 pointers."""


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
        options = GradientOptions(mode_here, tuple(a.ndim for a in flat), f32)
        total += SQUARES(options, *flat)[0].astype(f32)
    return total


def _unsupported(a: jax.Array) -> str | None:
    """Says why the kernels cannot take a leaf."""
    return unfit(**{"a leaf": a}) or too_large(_vector(a), a.size)


def _vector(a: Any) -> int:
    """Counts the elements of a unit: as many as make 16 bytes, if they divide the size."""
    return math.gcd(16 // a.dtype.itemsize, a.size)


@functools.partial(jax.jit, static_argnums=0)
def _scale(mode, factor, leaves) -> tuple[list[jax.Array], jax.Array]:
    done, finite = list(leaves), jnp.array(True)
    for mode_here, group in _groups(mode, leaves):
        members = [leaves[i] for i in group]
        flat = flattened(members)
        options = GradientOptions(mode_here, tuple(a.ndim for a in flat))
        *scaled, bad = SCALE(options, factor.reshape(1), *flat)
        finite &= bad == 0
        for i, a in zip(group, reshaped(scaled, members), strict=True):
            done[i] = a
    return done, finite


def _groups(mode: Mode, leaves: Sequence[jax.Array]) -> list[tuple[Mode, tuple[int, ...]]]:
    """Assigns leaves, by their index, to passes, each with what it runs.

    In ``"auto"`` plain JAX takes those that the kernels cannot; empty leaves are in no pass.
    """
    alone = may_be_split(leaves)
    kinds: dict[int, Hashable] = {}
    for i, a in enumerate(leaves):
        if a.size:
            by_xla = mode == "xla" or (mode == "auto" and _unsupported(a) is not None)
            kinds[i] = "xla" if by_xla else i if alone else (a.dtype, _vector(a), varying(a))
    groups = grouped(kinds, lambda _: MAX_LEAVES)
    return [("xla" if kinds[group[0]] == "xla" else mode, group) for group in groups]


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """Static arguments of a pass over gradients."""

    mode: Mode
    ranks: tuple[int, ...]  # of the leaves
    sums: Any = None  # the dtype of sums of squares in plain JAX


def _scale_plain(options, factor, *leaves) -> tuple[jax.Array, ...]:
    """Returns the scaled leaves, and a number that is 0 if they are finite."""
    del options
    scaled = [(a.astype(factor.dtype) * factor[0]).astype(a.dtype) for a in leaves]
    bad = [jnp.where(jnp.isfinite(a).all(), 0.0, 1.0).astype(jnp.float32) for a in scaled]
    return *scaled, sum(bad[1:], bad[0])


def _squares_plain(options: GradientOptions, *leaves: jax.Array) -> tuple[jax.Array]:
    squares = [jnp.sum(jnp.square(a.astype(options.sums))) for a in leaves]
    return (sum(squares[1:], squares[0]),)


def _launch_scale(options, factor, *leaves) -> tuple[jax.Array, ...]:
    del options
    blocks = _blocks(leaves)

    def kernel(header: Any, *refs: Any) -> None:
        *leaves, flag = refs

        def scale(block: jax.Array, refs: Any, leaf: Any) -> None:
            (ref,), (start, units) = refs, leaf
            _, of_lane, values = _loaded(blocks, block, ref, start, units)
            (word,) = load_words(header, 1)
            factor = blocks.spread(lax.bitcast_convert_type(word, jnp.float32))
            scaled = [v * factor for v in values]  # (LANES · vec,) each
            for unit, value in zip(of_lane, scaled, strict=True):
                store_units(ref, unit, value, blocks.vec, below=units)
            largest = largest_of_warp(functools.reduce(jnp.maximum, map(jnp.abs, scaled)))
            bad = jnp.where(largest < _overflow(ref.dtype), jnp.uint32(0), jnp.uint32(1))
            first_of_all, one = jnp.zeros((LANES,), jnp.uint32), jnp.ones((LANES,), jnp.float32)
            store_units(flag, first_of_all, one, 1, below=bad)

        blocks.run(scale, [(ref,) for ref in leaves])

    words = lax.bitcast_convert_type(factor.astype(jnp.float32), jnp.uint32)
    written = [*(a.reshape(-1) for a in leaves), jnp.zeros(1, jnp.float32)]
    *scaled, bad = launch_in_place(kernel, [words], written, **blocks.launch("scale_gradients"))
    return *reshaped(scaled, list(leaves)), bad[0]


def _launch_squares(options: GradientOptions, *leaves: jax.Array) -> tuple[jax.Array]:
    del options
    blocks = _blocks(leaves)
    warps = LANES // 32

    def kernel(*refs: Any) -> None:
        *leaves, sums = refs

        def square(block: jax.Array, refs: Any, leaf: Any) -> None:
            (ref,), (start, units) = refs, leaf
            lane, of_lane, values = _loaded(blocks, block, ref, start, units)
            inside = [blocks.spread(jnp.where(u < units, 1.0, 0.0)) > 0 for u in of_lane]
            squares = [jnp.where(i, v * v, 0.0) for i, v in zip(inside, values, strict=True)]
            total = sum_of_warp(functools.reduce(jnp.add, squares))  # (LANES,)
            warp = block.astype(jnp.uint32) * jnp.uint32(warps) + (lane >> 5)
            store_units(sums, warp, total, 1)

        blocks.run(square, [(ref,) for ref in leaves])

    out = jax.ShapeDtypeStruct((blocks.starts[-1] * warps,), jnp.float32)
    sums = launch_kernel(kernel, out_type=out, **blocks.launch("norm_gradients"))
    return (sums(*(a.reshape(-1) for a in leaves)).sum(),)


def _blocks(leaves: Sequence[jax.Array]) -> Blocks:
    """The blocks of a launch over leaves of one dtype."""
    vec = _vector(leaves[0])
    per_lane = min(8, _BYTES // (vec * leaves[0].dtype.itemsize))
    return Blocks([a.size for a in leaves], vec, per_lane)


def _loaded(blocks, block, ref, start, units) -> tuple[jax.Array, list[Any], list[Any]]:
    """Loads a block's part of a leaf: lane, the lanes' units, their elements (LANES · vec,).

    Units past the leaf's end repeat the last.
    """
    lane = lane_numbers(jnp.uint32)
    of_lane = list(blocks.units_of_lanes(block, start, lane))
    last = units - jnp.uint32(1)
    return lane, of_lane, [load_units(ref, jnp.minimum(u, last), blocks.vec) for u in of_lane]


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


# Gradients of a batch in parts


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    params: Tree,
    microbatches: Tree,
    *,
    has_aux: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Any, Tree]:
    r"""The loss of several microbatches and its gradient, as ``jax.value_and_grad`` of all at once.

    .. math:: \frac{1}{K} \sum_k L(p, x_k), \qquad \frac{1}{K} \sum_k \partial L(p, x_k)/\partial p

    One microbatch after the other, by ``lax.scan``, with sums in float32 (float64 for parameters of
    that dtype).

    Args:
      loss_fn: ``loss_fn(params, microbatch)``, a scalar, the mean over the microbatch; with
        `has_aux` a pair of it and anything else.
      params: a tree of floating arrays.
      microbatches: a tree of arrays (K, ...), any dtypes.
      has_aux: whether `loss_fn` returns a pair.
      axis_name: inside ``jax.shard_map``, the mesh axes over which the microbatches are split. The
        results are then means over all devices, exchanged once after the last microbatch.

    Returns:
      The loss, in the dtype that `loss_fn` gives it, and the gradients, in the dtypes of `params`;
      with `has_aux` ((loss, aux), gradients), aux stacked along a new first axis (K, ...).

    Raises:
      TypeError: a leaf of `params` is no floating array, or an option of another type.
      ValueError: `microbatches` has no leaf, no microbatch, or leaves of different K, or there is
        no such `axis_name`.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
      >>> batch = jnp.arange(24.0).reshape(6, 4)
      >>> params = {"w": jnp.ones(4)}
      >>> value, grads = jaxkern.accumulate_gradients(loss, params, batch.reshape(3, 2, 4))
      >>> bool(jnp.allclose(grads["w"], jax.grad(loss)(params, batch)["w"]))
      True
    """
    has_aux = check_flag("has_aux", has_aux)
    axes = check_axis_names("axis_name", axis_name)
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(microbatches)}
    if len(shapes) != 1 or () in shapes or (0,) in shapes:
        raise ValueError(
            "microbatches must be arrays (K, ...) with one K of at least 1 for all; got first axes "
            f"{sorted(shapes) or 'of no array'}"
        )
    ((count,),) = shapes
    leaves, treedef = floating_leaves("params", params, kind=jnp.inexact)
    params = treedef.unflatten(leaves)
    if axes:
        # Else every gradient of what the devices share would be a sum over them at once.
        params = jax.tree.map(lambda p: vary_over(p, frozenset(axes)), params)
    values, totals = sums_of_gradients(loss_fn, params, microbatches, has_aux=has_aux)
    losses, aux = values if has_aux else (values, None)
    total = losses.astype(wide(losses.dtype)).sum()
    if axes:
        total, totals = lax.pmean((total, totals), axes)
    loss = (total / count).astype(losses.dtype)
    grads = jax.tree.map(lambda t, p: (t / count).astype(p.dtype), totals, params)
    return ((loss, aux) if has_aux else loss), grads


def sums_of_gradients(
    loss_fn: Callable[..., Any], params: Tree, microbatches: Tree, *, has_aux: bool = False
) -> tuple[Any, Tree]:
    """The results of `loss_fn` for each microbatch, stacked, and the sums of its gradients.

    The sums are in float32 at least; arguments are those of :func:`accumulate_gradients`.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)
    axes = varying(*jax.tree.leaves((params, microbatches)))
    zeros = lambda p: vary_over(jnp.zeros_like(p, dtype=wide(p.dtype)), axes)

    def add(totals: Tree, microbatch: Tree) -> tuple[Tree, Any]:
        value, grads = value_and_grad(params, microbatch)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, grads), value

    totals, values = lax.scan(add, jax.tree.map(zeros, params), microbatches)
    return values, totals
