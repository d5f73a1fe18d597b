"""The cross-entropy of a linear layer's results; equations in :mod:`jaxkern.ops.cross_entropy.op`.

Three rules compute it. :func:`_all_logits` saves the logits. With a limit on their memory there are
two ways.

Chunks of rows serve a loss whose cotangent is one number, such as a mean or a sum. The forward
computes a chunk's logits once and, while they are there, the gradients for the cotangent 1: three
products, and the memory of one chunk. The backward scales these gradients. It does not scale the
gradient of the logits instead: there the elements of labels, nearly -cotangent each where softmaxes
are small, would all be rounded alike, and such errors add up. dw is read and written once a chunk,
4·K·V bytes of bfloat16, which takes less time than a fourth product if a chunk has some 400 rows.

Parts of the vocabulary serve all else: the forward computes lse part by part and saves the logits
of the last one, the backward begins with these and computes the others again. Up to four products,
the memory of a part's logits and weight, and dx in fp32. Without a gradient a Hopper GPU needs no
part of the logits in memory (:mod:`jaxkern.ops.cross_entropy.linear_kernel`).

Where the vocabulary is split between devices, they exchange the sums of rows, of each chunk or of
all parts, and add their shares of dx.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import (
    check_integer,
    check_optional,
)
from jaxkern.core.bound import standard_promotion, wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, Mode, lse_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import (
    Axes,
    Partial,
    SplitSequence,
    TypeOf,
    is_first,
    match_primal,
    match_primals,
    only_if,
)
from jaxkern.ops.cross_entropy import linear_kernel
from jaxkern.ops.cross_entropy.op import (
    Reduction,
    check_labels,
    check_reduction,
    gradient_of_logits,
    reduced,
    sums_of_rows,
    unsupported,
)
from jaxkern.ops.cross_entropy.reference import LogSum, LossOptions, Sums, Terms, losses_of_rows
from jaxkern.ops.linear import op as linear_op
from jaxkern.ops.linear import products
from jaxkern.ops.linear.products import check_accumulator, check_operands, varies_more


@lse_op
def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    memory: int | None = None,
    accumulator: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The cross-entropy of a language model's last layer: of ``x @ weight + bias`` and labels.

    .. math:: \text{loss} = \operatorname{cross\_entropy}(x w + b, \; y)

    with the options of :func:`cross_entropy`. Products take the dtype of `x` and are summed in
    fp32. By default the logits are kept for the backward in the dtype of `x`, and their gradient
    takes their memory: three products. With `memory` they take no more than that at once:

    - in up to six chunks of 512 rows or more, if these are enough: the forward computes the
      gradients, three products again. The gradient of `weight` is added up in its dtype: in
      bfloat16 its error grows with the number of chunks, to less than twice the error of one
      product;
    - or else in parts of the vocabulary, all but one of which the backward computes again: nearly
      four products. Losses of rows, `return_lse`, an `accumulator`, float16, and a `weight` of
      another dtype than `x` always take this way.

    Where nothing is differentiated, a Hopper GPU stores no logits at all, of 16-bit `x` and
    `weight` and 2^26 logits or more: their sums are formed in the product's epilogue, in float32.

    A row whose label is `ignore_index` has no part in any gradient, and may hold NaN.

    On a mesh, rows and V may be split between devices: neither logits nor `weight` are gathered,
    but where the number of devices does not divide V, or, with a warning, the classes of a part, a
    multiple of 128. A split K stays so for a gradient without `memory`, whose logits are added;
    else `x` and `weight` are gathered along it, fewer bytes than logits are.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight: (K, V), any of those dtypes. A tied embedding (V, K) goes in as ``embedding.T``, which
        is no copy in a compiled program.
      labels: (...), integers from 0 to V - 1, or `ignore_index`.
      bias: (V,), any of those dtypes, or ``None``.
      ignore_index, label_smoothing, z_loss, logit_softcap, reduction, return_lse: as for
        :func:`cross_entropy`.
      memory: bytes that logits may take, at least the logits of 128 classes; ``None`` for no limit.
        In parts, a part's weight and the gradient of `x` in float32 take memory besides. With
        ``implementation="xla"`` there is no limit.
      accumulator: (K, V), float32, the gradient of `weight` so far, or ``None``: as for
        :func:`linear`, its gradient is what `weight`'s adds up to.
      implementation: as for :func:`cross_entropy`; :func:`linear` chooses for the products.

    Returns:
      The loss, float32, () or with ``reduction="none"`` (...); with `return_lse` a pair of it and
      lse, (...), float32, 0 in the rows that are ignored.

    Raises:
      TypeError: an argument is not an array of a real floating dtype (`labels`: integer), or an
        option is no Python number.
      ValueError: shapes do not fit, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` where the kernels cannot take the call, or
        `memory` and a symbolic shape.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, embedding = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.zeros((1024, 64))
      >>> labels = jnp.zeros((2, 8), jnp.int32)
      >>> loss = jaxkern.linear_cross_entropy(x, embedding.T, labels)
      >>> in_parts = jaxkern.linear_cross_entropy(x, embedding.T, labels, memory=2**14)
      >>> print(f"{loss:.4f}, {in_parts:.4f} = log 1024")
      6.9315, 6.9315 = log 1024

    References:
      Wijmans et al., `Cut Your Losses in Large-Vocabulary Language Models
      <https://arxiv.org/abs/2411.09009>`_, 2024.
    """
    x, weight = check_operands(x, weight, columns="V")
    if weight.shape[1] == 0:
        raise ValueError(f"weight must have shape (K, V), V at least 1; got {weight.shape}")
    bias = check_optional("bias", bias, weight.shape[1:], "(V,), V the last axis of weight")
    if accumulator is not None:
        accumulator = check_accumulator(
            "accumulator", accumulator, weight.shape, "the shape of weight"
        )
    terms = Terms.checked(ignore_index, label_smoothing, z_loss, logit_softcap)
    labels = check_labels(labels, x.shape[:-1], "(...) of x", terms)
    check_reduction(reduction)
    nbytes = _check_memory(memory, x, weight)
    if implementation == "xla":
        nbytes = None
    chunk = part = None
    if reduction != "none" and not return_lse and accumulator is None:
        chunk = rows_of_chunk(nbytes, x, weight)
    if chunk is None:
        part = classes_of_part(nbytes, x, weight)
    logits = jax.ShapeDtypeStruct((*x.shape[:-1], part or weight.shape[1]), x.dtype)
    mode = resolve(implementation, unsupported(logits), op="linear_cross_entropy")
    options = LossOptions(terms, weight.shape[1], mode)
    of_product = None if implementation == "mosaic" else implementation
    mode = resolve(of_product, products.unsupported(x=x, weight=weight), op="linear")
    product = products.LinearOptions(None, False, None, "float32", mode)
    match chunk, part:
        case int(), _:
            count = terms.count(labels) if reduction == "mean" else jnp.float32(1)
            classes = classes_of_part(nbytes, x, weight) or weight.shape[1]
            chunks = ChunkOptions.of(options, chunk, classes, weight.dtype)
            return in_chunks(x, weight, bias, labels, count.astype(wide(x.dtype)), chunks)
        case _, int():
            parts = PartOptions.of(options, part)
            losses, lse = in_parts(x, weight, bias, accumulator, labels, parts)
        case _ if implementation == "xla" and accumulator is None:
            x = terms.without_ignored(x, labels)
            logits = products.reference_forward(product, x, weight, bias)[0]
            losses, lse = named("linear_cross_entropy", losses_of_rows(logits, labels, terms))
        case _:
            losses, lse = _all_logits_jit(x, weight, bias, accumulator, labels, options, product)
    return reduced(reduction, return_lse, losses, lse, labels, terms)


def _check_memory(memory: Any, x: jax.Array, weight: jax.Array) -> int | None:
    if memory is None:
        return None
    nbytes = check_integer("memory", memory, minimum=1, optional=True)
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        raise NotImplementedError(
            f"memory needs sizes, and x is {x.shape}, weight {weight.shape}; use memory=None"
        )
    return nbytes


def _all_logits_fwd(x, weight, bias, accumulator, labels, options, product):
    logits = named("linear_cross_entropy", linear_op.FORWARD(product, x, weight, bias)[0])
    losses = options.loss(sums_of_rows(options, logits, labels), labels)
    losses, lse = named("linear_cross_entropy", losses)
    return (losses, lse.value), (x, weight, bias, accumulator, labels, logits, lse)


def _all_logits_bwd(options, product, res, cotangents):
    x, weight, bias, accumulator, labels, logits, lse = res
    du = gradient_of_logits(options, logits, labels, lse, cotangents)
    x = options.terms.without_ignored(x, labels)
    grads = linear_op.gradients(product, x, (du,), (weight,), (bias,), (accumulator,))
    dx, [dweight], [dbias], [total] = grads
    return dx, dweight, dbias, total, None


def _all_logits(x, weight, bias, accumulator, labels, options, product):
    del accumulator, product
    options = PartOptions.of(options, weight.shape[1])
    return PARTS_FORWARD(options, x, weight, bias, labels)[:2]


_all_logits_jit = Differentiable(_all_logits_fwd, _all_logits_bwd, _all_logits, options=2)


# A limit on the memory of the logits

_MOST_CHUNKS = 6
"""Most chunks: a 16-bit dweight is rounded once a chunk, 6 give 1.9 times one product's error."""

_LEAST_ROWS = 512
"""Rows of a chunk; of fewer, dweight's traffic costs more than a fourth product."""

_ALIGNED_ROWS = 8
"""Rows of a chunk are a multiple of it, or products copy their arguments."""

_ALIGNED_CLASSES = 128
"""Classes of a part are a multiple of it, for fast products."""


def _logits(x: Any, weight: Any, bias: Any) -> Any:
    """``x @ weight + bias`` in the dtype of x."""
    if bias is None:
        return jnp.matmul(x, weight)
    logits = jnp.matmul(x, weight, preferred_element_type=wide(x.dtype))
    return (logits + bias.astype(logits.dtype)).astype(x.dtype)


def _over_devices(axes: Axes, sums: Sums) -> Sums:
    """Sums over all classes, from the sums over each device's classes."""
    largest = lax.pmax(lax.stop_gradient(sums.largest), axes)
    return Sums(largest, *lax.psum(jnp.stack(sums.relative_to(largest)[1:]), axes))


def _wider(options: Any) -> Any:
    """Options of a device whose gradients are added to other devices' ones."""
    return dataclasses.replace(options, dtype=str(wide(options.dtype)))


# Chunks of rows


@dataclasses.dataclass(frozen=True)
class ChunkOptions:
    """Static arguments of the pass over chunks of rows.

    Attributes:
      of_logits: options of the passes over a chunk's logits.
      size: rows of a chunk; a device's first one may have fewer.
      classes: of a part of the vocabulary, where no gradient is asked for.
      dtype: dtype of the gradients of x and weight.
      axes: mesh axes over which the classes are split.
    """

    of_logits: LossOptions
    size: int
    classes: int
    dtype: str
    axes: Axes = ()
    mode: Mode = "auto"

    @classmethod
    def of(cls, options: LossOptions, size: int, classes: int, dtype: Any) -> "ChunkOptions":
        inside, mode = options.inside()
        return cls(inside, size, classes, str(dtype), mode=mode)


def rows_of_chunk(nbytes: int | None, x: jax.Array, weight: jax.Array) -> int | None:
    """Rows per chunk for the fewest chunks whose logits take at most `nbytes` each.

    ``None`` if all rows fit, or where parts of the vocabulary are better: for fewer rows a chunk,
    for more chunks than a 16-bit gradient may be rounded, for float16, which only the backward can
    scale, and for a weight of another dtype than x, which would be cast as a whole.
    """
    if nbytes is None or weight.dtype != x.dtype or x.dtype == jnp.float16:
        return None
    rows = math.prod(x.shape[:-1])
    most = nbytes // (weight.shape[1] * x.dtype.itemsize) // _ALIGNED_ROWS * _ALIGNED_ROWS
    if most >= rows or most < _LEAST_ROWS:
        return None
    count = -(-rows // most)
    if x.dtype.itemsize == 2 and count > _MOST_CHUNKS:
        return None
    return -(-rows // (count * _ALIGNED_ROWS)) * _ALIGNED_ROWS


def _in_chunks(x, weight, bias, labels, count, options):
    parts = PartOptions(options.of_logits, options.classes, mode=options.mode)
    losses = PARTS_FORWARD(parts, x, weight, bias, labels)[0]
    return jnp.sum(losses) / count


@standard_promotion()  # JAX traces the rules outside of the public function
def _in_chunks_fwd(x, weight, bias, labels, count, options):
    losses, *grads = IN_CHUNKS(options, x, weight, bias, labels)
    types = tuple(None if v is None else TypeOf(jax.typeof(v)) for v in (x, weight, bias))
    return jnp.sum(losses) / count, (tuple(grads), types, count)


@standard_promotion()
def _in_chunks_bwd(options, res, cotangent):
    del options
    grads, types, count = res
    scale = cotangent / count
    scaled = lambda grad, like: match_primal((scale * grad).astype(like.aval.dtype), like)
    pairs = zip(grads, types, strict=True)
    return *(None if like is None else scaled(grad, like) for grad, like in pairs), None, None


in_chunks = Differentiable(_in_chunks_fwd, _in_chunks_bwd, _in_chunks)


def _chunk_losses(options: ChunkOptions, x, weight, bias, labels) -> tuple[Any, ...]:
    """Losses of rows and the gradients of their sum; dbias in the dtype of sums."""
    of_logits, shape = options.of_logits, x.shape
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    before = lax.axis_index(options.axes) * weight.shape[1] if options.axes else 0
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.dtype(options.dtype))

    def chunk(first: Any, size: int) -> tuple[Any, ...]:
        """Losses, dx, dweight and dbias of `size` rows."""
        rows, y = (lax.dynamic_slice_in_dim(v, first, size) for v in (x, labels))
        logits = _logits(rows, weight, bias)  # (size, V)
        sums = sums_of_rows(of_logits, logits, y, before)
        if options.axes:
            sums = _over_devices(options.axes, sums)
        losses, lse = of_logits.loss(sums, y)
        # The losses, which read logits, come before the gradient, which takes their memory.
        losses, lse = lax.optimization_barrier((losses, lse))
        cotangents = jnp.ones_like(losses), jnp.zeros_like(losses)
        du = gradient_of_logits(of_logits, logits, y, lse, cotangents, before)
        counted = of_logits.terms.without_ignored(rows, y)
        dbias = None if bias is None else jnp.sum(du.astype(wide(du.dtype)), axis=0)
        return losses, product(du, weight.T), product(counted.T, du), dbias

    def step(first: Any, size: int, carry: Any) -> tuple[Any, ...]:
        """Writes a chunk's losses and dx, and adds its dweight and dbias."""
        put = lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, first, axis=0)
        join = put, put, operator.add, operator.add  # cuBLAS adds dweight in its memory
        pairs = zip(join, carry, chunk(first, size), strict=True)
        return tuple(None if old is None else f(old, new) for f, old, new in pairs)

    others = max(0, x.shape[0] - 1) // options.size
    first = x.shape[0] - others * options.size
    losses, dx, *sums = chunk(0, first)
    grow = lambda v: jnp.pad(v, ((0, others * options.size), *((0, 0),) * (v.ndim - 1)))
    carry = grow(losses), grow(dx), *sums
    if others:
        # The others begin after the first, whose memory they take.
        carry = lax.optimization_barrier(carry)
        next_one = lambda i, carry: step(first + i * options.size, options.size, carry)
        carry = lax.fori_loop(0, others, next_one, carry)
    losses, dx, dweight, dbias = carry
    return losses.reshape(shape[:-1]), dx.reshape(shape), dweight, dbias


def _chunks_of_device(run: Any, axes: Axes, options: ChunkOptions, *arrays: Any) -> tuple[Any, ...]:
    del run  # devices exchange sums within the pass
    losses, *grads = _chunk_losses(dataclasses.replace(_wider(options), axes=axes), *arrays)
    return only_if(is_first(axes), losses), *grads


def _finish_chunks(options: ChunkOptions, x, weight, bias, labels, losses, dx, dweight, db) -> Any:
    return losses, dx.astype(options.dtype), dweight.astype(options.dtype), db


IN_CHUNKS = KernelPass(
    "linear_cross_entropy_chunks",
    reference=_chunk_losses,
    ins=("... k", "k v", "v", "..."),
    outs=("...", "... k", "k v", "v"),
    whole="k",
    sequence=SplitSequence(_chunks_of_device, factor="v"),
    partial=Partial(reference=_chunk_losses, options=_wider, finish=_finish_chunks),
    saved_as="linear_cross_entropy",
)


# Parts of the vocabulary


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """Static arguments of the passes over parts of the vocabulary.

    Attributes:
      of_logits: options of the passes over a part's logits.
      classes: classes of a part; the last one may have fewer.
      dtype: dtype of dweight.
      save: whether the forward returns the logits of the last part.
    """

    of_logits: LossOptions
    classes: int
    dtype: str = "float32"
    save: bool = False
    mode: Mode = "auto"

    @classmethod
    def of(cls, options: LossOptions, classes: int) -> "PartOptions":
        inside, mode = options.inside()
        return cls(inside, classes, mode=mode)

    def last(self, weight: Any) -> tuple[int, int]:
        """First class of the last part, and its number of classes."""
        first = (weight.shape[1] - 1) // self.classes * self.classes
        return first, weight.shape[1] - first

    def over_others(self, weight: Any, step: Any, carry: Any) -> Any:
        """Runs ``carry = step(first class, classes, carry)`` for each part but the last."""
        count = self.last(weight)[0] // self.classes
        return lax.fori_loop(
            0, count, lambda i, carry: step(i * self.classes, self.classes, carry), carry
        )


def classes_of_part(nbytes: int | None, x: jax.Array, weight: jax.Array) -> int | None:
    """Classes per part for the fewest, nearly equal parts of at most `nbytes`; ``None`` for all."""
    if nbytes is None:
        return None
    fitting = nbytes // (max(1, math.prod(x.shape[:-1])) * x.dtype.itemsize)
    part = max(_ALIGNED_CLASSES, fitting // _ALIGNED_CLASSES * _ALIGNED_CLASSES)
    if max(part, fitting) >= weight.shape[1]:
        return None
    parts = -(-weight.shape[1] // part)
    return -(-weight.shape[1] // (parts * _ALIGNED_CLASSES)) * _ALIGNED_CLASSES


def _in_parts(x, weight, bias, accumulator, labels, options):
    del accumulator
    return PARTS_FORWARD(options, x, weight, bias, labels)[:2]


def _in_parts_fwd(x, weight, bias, accumulator, labels, options):
    options = dataclasses.replace(options, save=True)
    losses, *lse, logits = PARTS_FORWARD(options, x, weight, bias, labels)
    return (losses, lse[0]), (x, weight, bias, accumulator, labels, lse, logits)


def _in_parts_bwd(options, res, cotangents):
    x, weight, bias, accumulator, labels, lse, logits = res
    options = dataclasses.replace(options, dtype=str(weight.dtype))
    apart = accumulator is not None and varies_more(x, accumulator)
    given = None if apart else accumulator
    dx, dweight, dbias = PARTS_BACKWARD(
        options, x, weight, bias, given, labels, *lse, logits, *cotangents
    )
    total = None
    if accumulator is not None:
        total, dweight = dweight, None
        if apart:
            total = accumulator + match_primal(total, accumulator)
    given = x, weight, bias, accumulator
    return *match_primals((dx, dweight, dbias, total), given), None


in_parts = Differentiable(_in_parts_fwd, _in_parts_bwd, _in_parts)


def _part_weight(x, weight, first, size) -> jax.Array:
    """Columns of `weight` for a part, (K, size), in the dtype of x."""
    return lax.dynamic_slice_in_dim(weight, first, size, axis=1).astype(x.dtype)


def _part_logits(x, part_weight, bias, first, size) -> jax.Array:
    part_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, size)
    return _logits(x, part_weight, part_bias)


def _part_losses(options: PartOptions, x, weight, bias, labels, sums_of=None) -> tuple[Any, ...]:
    """Losses, the two numbers of lse and, on request, the logits of the last part."""
    *sums, logits = (sums_of or _part_sums)(options, x, weight, bias, labels, 0)
    losses, lse = options.of_logits.loss(Sums(*sums), labels)
    return losses, *lse, logits


def _part_sums(options: PartOptions, x, weight, bias, labels, before) -> tuple[Any, ...]:
    """The four :class:`Sums` and, on request, the logits of the last part.

    `before` is the number of classes before the first of `weight`.
    """

    def part(first: Any, size: int) -> tuple[jax.Array, Sums]:
        logits = _part_logits(x, _part_weight(x, weight, first, size), bias, first, size)
        return logits, sums_of_rows(options.of_logits, logits, labels, before + first)

    def step(first: Any, size: int, sums: Sums) -> Sums:
        return part(first, size)[1].joined(sums)

    zeros = jnp.zeros_like(jnp.sum(x, axis=-1), wide(x.dtype))
    sums = Sums(jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)
    sums = options.over_others(weight, step, sums)
    # The last part begins after the others and takes their memory.
    first, size = options.last(weight)
    after = lax.stop_gradient(sums.largest)
    first, _ = lax.optimization_barrier((jnp.int32(first), after))
    logits, last = part(first, size)
    return *last.joined(sums), logits if options.save else None


def _kernel_sums(options: PartOptions, x, weight, bias, labels, before) -> tuple[Any, ...]:
    """:func:`_part_sums` without storing any logits, if none are asked for."""
    if options.save or not linear_kernel.fits(x, weight):
        return _part_sums(options, x, weight, bias, labels, before)
    args = x, weight, bias, labels, before
    return *linear_kernel.sums_of_product(options.of_logits, *args), None


def _kernel_losses(options: PartOptions, *arrays: Any) -> tuple[Any, ...]:
    return _part_losses(options, *arrays, sums_of=_kernel_sums)


def _faster(options: PartOptions, x: Any, weight: Any, *rest: Any) -> bool:
    del rest
    return not options.save and linear_kernel.is_faster(x, weight)


def _part_gradients(
    options: PartOptions, x, weight, bias, accumulator, labels, *rest, before=0
) -> tuple[Any, ...]:
    """dx and dbias in the dtype of sums, and dweight or its sum with the accumulator.

    `rest` has the two numbers of lse, the logits of the last part or ``None``, and the cotangents
    of losses and lse. `before` is the number of classes before the first of `weight`.
    """
    *lse, logits, dloss, dlse = rest
    of_logits, of_sums = options.of_logits, wide(x.dtype)
    counted = of_logits.terms.without_ignored(x, labels)
    axes = tuple(range(x.ndim - 1))
    dtype = of_sums if accumulator is not None else jnp.dtype(options.dtype)

    def add(logits: Any, part_weight: Any, first: Any, size: int, carry: Any) -> Any:
        dx, dweight, dbias = carry
        cotangents = dloss, dlse
        du = gradient_of_logits(of_logits, logits, labels, LogSum(*lse), cotangents, before + first)
        dx = dx + jnp.matmul(du, part_weight.T, preferred_element_type=of_sums)
        # The gradient of the part's weight takes the memory of that weight.
        dx, after = lax.optimization_barrier((dx, counted))
        grad = lax.dot_general(after, du, ((axes, axes), ((), ())), preferred_element_type=dtype)
        if accumulator is not None:
            grad = grad + lax.dynamic_slice_in_dim(dweight, first, size, axis=1)
        dweight = lax.dynamic_update_slice_in_dim(dweight, grad, first, axis=1)
        if dbias is not None:
            sums = jnp.sum(du.astype(of_sums), axis=axes)
            dbias = lax.dynamic_update_slice_in_dim(dbias, sums, first, axis=0)
        return dx, dweight, dbias

    def step(first: Any, size: int, carry: Any) -> Any:
        part_weight = _part_weight(x, weight, first, size)
        part_logits = _part_logits(x, part_weight, bias, first, size)
        return add(part_logits, part_weight, first, size, carry)

    carry = (
        jnp.zeros_like(x, of_sums),
        jnp.zeros_like(weight, dtype) if accumulator is None else accumulator,
        None if bias is None else jnp.zeros_like(bias, of_sums),
    )
    last = options.last(weight)
    if logits is None:
        carry = step(*last, carry)
    else:
        carry = add(logits, _part_weight(x, weight, *last), *last, carry)
    return options.over_others(weight, step, carry)


# Parts, where devices have rows or classes of their own


def _shares_of_rows(options: PartOptions, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    """Gradients that devices add, in fp32, without the accumulator."""
    return _part_gradients(options, x, weight, bias, None, *rest)


def _finish_shares(options: PartOptions, x, weight, bias, accumulator, *rest) -> tuple[Any, ...]:
    *_, dx, dweight, dbias = rest
    if accumulator is not None:
        return dx, accumulator + dweight, dbias
    return dx, None if dweight is None else dweight.astype(options.dtype), dbias


def _shares_of_classes(options: PartOptions, *arrays: Any) -> tuple[Any, ...]:
    """Gradients for a device's classes; the last of `arrays` is the number of classes before."""
    *given, before = arrays
    return _part_gradients(options, *given, before=before)


def _of_device(options: PartOptions, axes: Axes, weight: Any) -> tuple[PartOptions, Any]:
    """Options of a device, and the number of classes before the first of its `weight`."""
    classes = options.classes // lax.axis_size(axes)
    options = dataclasses.replace(_wider(options), classes=classes)
    return options, lax.axis_index(axes) * weight.shape[1]


def _losses_of_device(run: Any, axes: Axes, options: PartOptions, x, weight, bias, labels) -> Any:
    of_device, before = _of_device(options, axes, weight)
    *sums, logits = run(of_device, x, weight, bias, labels, before, of=_SUMS)
    losses, lse = options.of_logits.loss(_over_devices(axes, Sums(*sums)), labels)
    return *(only_if(is_first(axes), v) for v in (losses, *lse)), logits


def _gradients_of_device(run: Any, axes: Axes, options: PartOptions, *arrays: Any) -> Any:
    x, weight, bias, _, *rest = arrays
    options, before = _of_device(options, axes, weight)
    return run(options, x, weight, bias, None, *rest, before, of=_SHARES)


def _unfit(options: PartOptions, devices: int, x: Any, weight: Any, *rest: Any) -> str | None:
    del x, rest
    if options.classes % devices:
        return (
            f"the logits' memory is for {options.classes} of {weight.shape[1]} classes at once, "
            f"which {devices} devices cannot share alike"
        )
    return None


_SUMS = KernelPass(
    "linear_cross_entropy_sums",
    reference=_part_sums,
    kernel=_kernel_sums,
    faster=_faster,
    unfit=products.unfit_for_gpu,
    ins=("... k", "k v", "v", "...", ""),
    outs=(*("...",) * 4, "... v"),
)
_SHARES = KernelPass(
    "linear_cross_entropy_shares",
    reference=_shares_of_classes,
    ins=("... k", "k v", "v", "k v", *("...",) * 3, "... v", "...", "...", ""),
    outs=("... k", "k v", "v"),
)
PARTS_FORWARD = KernelPass(
    "linear_cross_entropy_fwd",
    reference=_part_losses,
    kernel=_kernel_losses,
    faster=_faster,
    unfit=products.unfit_for_gpu,
    ins=("... k", "k v", "v", "..."),
    outs=("...", "...", "...", "... v"),
    whole="k",
    sequence=SplitSequence(_losses_of_device, _unfit, factor="v"),
)
PARTS_BACKWARD = KernelPass(
    "linear_cross_entropy_bwd",
    reference=_part_gradients,
    ins=("... k", "k v", "v", "k v", *("...",) * 3, "... v", "...", "..."),
    outs=("... k", "k v", "v"),
    whole="k",
    sequence=SplitSequence(_gradients_of_device, _unfit, factor="v"),
    partial=Partial(reference=_shares_of_rows, options=_wider, finish=_finish_shares),
)
