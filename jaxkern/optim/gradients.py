r"""Passes over the gradients of a whole tree: unscaling with the check for finite ones, their norm.

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
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.mosaic.lanes import join_lanes
from jaxkern.mosaic.launch import LANES, launch_kernel
from jaxkern.mosaic.units import (
    largest_of_warp,
    load_units,
    load_words,
    store_units,
    sum_of_warp,
    with_chosen,
)
from jaxkern.ops.elementwise import MAX_UNITS
from jaxkern.optim.arguments import check_loss_scale
from jaxkern.optim.launch import (
    BLOCK,
    DTYPES,
    launch_in_place,
    may_be_split,
    varying,
)
from jaxkern.precision import LossScale

_BYTES = 128
"""What a lane has on its way."""

MAX_LEAVES = 384
"""Most leaves of one launch: 512 pointers are a launch's arguments at most."""

_WARPS = LANES // 32


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
    mode = resolve_gradients(implementation, leaves, op="scale_gradients")
    f32 = functools.reduce(jnp.promote_types, (a.dtype for a in leaves), jnp.dtype(jnp.float32))
    scaled, finite = _scale(mode, 1 / jnp.asarray(loss_scale.loss_scale, f32), leaves)
    return treedef.unflatten(scaled), finite


def sum_of_squares(mode: Mode, leaves: Sequence[jax.Array], f32: Any = jnp.float32) -> jax.Array:
    """() of dtype `f32`, of all elements of `leaves`."""
    return _sum_of_squares(mode, f32, list(leaves))


def floating_leaves(name: str, tree: Any, *, values: bool = True) -> tuple[list[Any], Any]:
    """The leaves of a tree, all floating arrays, and its structure.

    Args:
      name: of the tree, for messages.
      tree: arrays and Python floats; `values` says whether a ``jax.ShapeDtypeStruct`` will not do.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, float) and not isinstance(leaf, np.floating):
            leaves[i] = jnp.asarray(leaf, float)
            continue
        struct = isinstance(leaf, jax.ShapeDtypeStruct)
        if not is_floating(leaf) or (struct and values):
            dtype = getattr(leaf, "dtype", None)
            what = type(leaf).__name__ if dtype is None or struct else dtype
            raise TypeError(
                f"{name}{leaf_paths(tree)[i]} must be a floating array, got {what}; "
                f"{_instead(dtype, struct)}"
            )
        leaves[i] = leaf if struct else jnp.asarray(leaf)
    return leaves, treedef


def _instead(dtype: Any, struct: bool) -> str:
    if struct:
        return "this needs values, and jax.eval_shape gives shapes alone"
    if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
        return "keep real and imaginary parts apart, as optax.contrib.split_real_and_imaginary does"
    return "keep what is not trained out of the tree, or wrap the transformation in optax.masked"


def is_floating(leaf: Any) -> bool:
    """Whether it is an array of real floating numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def leaf_paths(tree: Any) -> list[str]:
    """Where each leaf is, as Python would write it."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def resolve_gradients(
    implementation: Implementation | None, leaves: Sequence[jax.Array], *, op: str
) -> Mode:
    """What runs; in ``"auto"`` leaves that the kernel cannot take go through plain JAX."""
    reasons = map(_unsupported, leaves) if implementation == "mosaic" else ()
    unsupported = next((reason for reason in reasons if reason), None)
    return resolve(implementation, unsupported, op=op)


def _unsupported(a: jax.Array) -> str | None:
    """Why the kernels cannot take a leaf."""
    if a.dtype.name not in DTYPES:
        return f"a leaf has dtype {a.dtype}, and the kernel takes {', '.join(DTYPES)}"
    if a.size > _vector(a) * MAX_UNITS:
        return (
            f"a leaf's {a.size} elements can be accessed {_vector(a)} at a time, and the kernel "
            "counts to 2^32"
        )
    return None


def _vector(a: Any) -> int:
    """Elements of a unit: as many as make 16 bytes, if they divide the size."""
    return math.gcd(16 // a.dtype.itemsize, a.size)


@functools.partial(jax.jit, static_argnums=0)
def _scale(mode, factor, leaves) -> tuple[list[jax.Array], jax.Array]:
    done, finite = list(leaves), jnp.array(True)
    for group in _groups(mode, leaves):
        members = [leaves[i] for i in group]
        *scaled, bad = _run(SCALE, mode, members, factor)
        finite &= bad == 0
        for i, a in zip(group, scaled, strict=True):
            done[i] = a
    return done, finite


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sum_of_squares(mode, f32, leaves) -> jax.Array:
    total = jnp.zeros((), f32)
    for group in _groups(mode, leaves):
        (part,) = _run(SQUARES, mode, [leaves[i] for i in group], None, f32)
        total += part.astype(f32)
    return total


def _groups(mode: Mode, leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The leaves of each pass, by their index; those of no elements are in none."""
    alike: dict[Any, list[int]] = {}
    alone = may_be_split(leaves)
    for i, a in enumerate(leaves):
        if a.size:
            by_xla = mode == "xla" or (mode == "auto" and _unsupported(a) is not None)
            kind = "xla" if by_xla else (i,) if alone else (a.dtype, _vector(a), varying(a))
            alike.setdefault(kind, []).append(i)
    return [list(p) for m in alike.values() for p in itertools.batched(m, MAX_LEAVES)]


@dataclasses.dataclass(frozen=True)
class _Options:
    mode: Mode
    ranks: tuple[int, ...]  # of the leaves
    sums: Any  # their dtype, of squares in plain JAX

    def factors(self) -> tuple[str, ...]:
        """Of each leaf its own."""
        ranks = enumerate(self.ranks)
        return tuple(" ".join(f"l{i}d{d}" for d in range(rank)) for i, rank in ranks)


def _run(
    of_leaves: KernelPass, mode: Mode, leaves: Any, factor: Any, sums: Any = None
) -> tuple[jax.Array, ...]:
    """A pass over leaves that are alike, or that plain JAX takes."""
    if mode == "auto" and any(_unsupported(a) for a in leaves):
        mode = "xla"
    shapes = [a.shape for a in leaves]
    if len(leaves) > 1 or not leaves[0].shape:
        leaves = [a.reshape(-1) for a in leaves]
    header = None if factor is None else factor.reshape(1)
    options = _Options(mode, tuple(a.ndim for a in leaves), sums)
    *done, number = of_leaves(options, header, *leaves)
    return *(a.reshape(shape) for a, shape in zip(done, shapes, strict=False)), number


# Reference


def _scale_plain(options: _Options, factor: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """The scaled leaves, and a number that is 0 if they are finite."""
    del options
    scaled = [(a.astype(factor.dtype) * factor[0]).astype(a.dtype) for a in leaves]
    bad = [jnp.where(jnp.isfinite(a).all(), 0.0, 1.0).astype(jnp.float32) for a in scaled]
    return *scaled, sum(bad[1:], bad[0])


def _squares_plain(options: _Options, header: None, *leaves: jax.Array) -> tuple[jax.Array]:
    del header
    squares = [jnp.sum(jnp.square(a.astype(options.sums))) for a in leaves]
    return (sum(squares[1:], squares[0]),)


# Kernel


@dataclasses.dataclass(frozen=True)
class _Plan:
    kind: Literal["scale", "norm"]
    dtype: Any
    vec: int  # elements of a unit

    @property
    def per_lane(self) -> int:
        """Units of a lane."""
        return min(8, _BYTES // (self.vec * self.dtype.itemsize))


def _launch_scale(
    options: _Options, factor: jax.Array, *leaves: jax.Array
) -> tuple[jax.Array, ...]:
    del options
    total, kernel, flat = _work("scale", leaves)
    words = lax.bitcast_convert_type(factor.astype(jnp.float32), jnp.uint32)
    *scaled, bad = launch_in_place(
        "scale_gradients",
        lambda header, *refs: kernel(header, refs[-1], refs[:-1]),
        total,
        [words],
        [*flat, jnp.zeros(1, jnp.float32)],
    )
    return *(a.reshape(b.shape) for a, b in zip(scaled, leaves, strict=True)), bad[0]


def _launch_squares(options: _Options, header: None, *leaves: jax.Array) -> tuple[jax.Array]:
    del options, header
    total, kernel, flat = _work("norm", leaves)
    sums = launch_kernel(
        lambda *refs: kernel(None, refs[-1], refs[:-1]),
        out_type=jax.ShapeDtypeStruct((total * _WARPS,), jnp.float32),
        grid=(total,),
        grid_names=(BLOCK,),
        kernel_name="norm_gradients",
        approx_math=True,
    )(*flat)
    return (sums.sum(),)


def _work(kind: Literal["scale", "norm"], leaves: Sequence[jax.Array]) -> tuple[int, Any, Any]:
    """The blocks of a launch, its kernel, and the leaves as it takes them."""
    plan = _Plan(kind, leaves[0].dtype, _vector(leaves[0]))
    units = [a.size // plan.vec for a in leaves]
    blocks = [-(-n // (LANES * plan.per_lane)) for n in units]
    *starts, total = itertools.accumulate(blocks, initial=0)
    numbers = list(zip(starts, units, strict=True))
    kernel = functools.partial(_kernel, plan, starts, numbers)
    return total, kernel, [a.reshape(-1) for a in leaves]


def _kernel(
    plan: _Plan, starts: Sequence[int], numbers: Any, header: Any, number: Any, refs: Sequence[Any]
) -> None:
    block = lax.axis_index(BLOCK)
    body: Callable[..., None] = functools.partial(_block, plan, header, number, block)
    rows = [(ref,) for ref in refs]
    with_chosen(body, block, rows, starts, numbers)


def _block(
    plan: _Plan, header: Any, number: Any, block: jax.Array, refs: Sequence[Any], row: Any
) -> None:
    """`number` is the flag of the launch, or where its warps' sums are."""
    (ref,), (start, units) = refs, row
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    lane = plgpu.broadcasted_iota(jnp.uint32, (LANES,), 0, layout=layout)
    of_grid = block.astype(jnp.uint32)
    first = (of_grid - start) * jnp.uint32(LANES * plan.per_lane) + lane
    of_lane = [first + jnp.uint32(k * LANES) for k in range(plan.per_lane)]
    last = units - jnp.uint32(1)
    values = [load_units(ref, jnp.minimum(u, last), plan.vec) for u in of_lane]
    spread = lambda a: join_lanes([a] * plan.vec)
    if plan.kind == "norm":
        inside = [spread(jnp.where(u < units, 1.0, 0.0)) > 0 for u in of_lane]
        squares = [jnp.where(i, v * v, 0.0) for i, v in zip(inside, values, strict=True)]
        total = sum_of_warp(functools.reduce(jnp.add, squares))
        store_units(number, of_grid * jnp.uint32(_WARPS) + (lane >> 5), total, 1)
        return
    (word,) = load_words(header, 1)
    factor = spread(lax.bitcast_convert_type(word, jnp.float32))
    scaled = [v * factor for v in values]
    for unit, value in zip(of_lane, scaled, strict=True):
        store_units(ref, unit, value, plan.vec, below=units)
    largest = largest_of_warp(functools.reduce(jnp.maximum, map(jnp.abs, scaled)))
    bad = jnp.where(largest < _overflow(plan.dtype), jnp.uint32(0), jnp.uint32(1))
    first_of_all, one = jnp.zeros((LANES,), jnp.uint32), jnp.ones((LANES,), jnp.float32)
    store_units(number, first_of_all, one, 1, below=bad)


def _overflow(dtype: Any) -> float:
    """The least number that is rounded to infinity: half a step above the largest one."""
    if dtype == jnp.float32:
        return math.inf
    info = jnp.finfo(dtype)
    return float(info.max) * (1 + 2.0 ** -(info.nmant + 2))


SCALE = KernelPass(
    "scale_gradients",
    kernel=_launch_scale,
    reference=_scale_plain,
    ins=lambda options: ("h", *options.factors()),
    outs=lambda options: (*options.factors(), ""),
    whole="h",
    batched=False,
)
SQUARES = KernelPass(
    "norm_gradients",
    kernel=_launch_squares,
    reference=_squares_plain,
    ins=lambda options: ("h", *options.factors()),
    outs=("",),
    whole="h",
    batched=False,
)
