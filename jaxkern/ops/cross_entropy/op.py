r"""The cross-entropy of a classifier's logits, alone and with the linear layer that gives them.

Forward, for a row of logits u (V,), or x · w + b of them, with the label y:

    l    = cap · tanh(u / cap)                      or u, without a cap
    lse  = log Σ_v exp(l[v])
    loss = lse − (1 − ε) · l[y] − (ε / V) · Σ_v l[v] + ζ · lse²

with ε = label_smoothing and ζ = z_loss. Backward, for the cotangents g of the loss and h of lse:

    dl   = (g · (1 + 2 ζ · lse) + h) · exp(l − lse) − g · ((1 − ε) · onehot(y) + ε / V)
    du   = dl · (1 − (l / cap)²)
    dx   = du · wᵀ          dw = xᵀ · du          db = Σ_rows du

A row whose label is `ignore_index` has the loss 0 and the gradient 0, whatever it holds.

Saved for the backward: the logits in the dtype of x, and lse. With M rows these are M·V elements:
the forward kernel reads them once, the backward kernel reads them and writes du into their memory
if nothing else needs them; 3 products of 2·M·D·V operations. With a limit on the logits' memory,
:mod:`jaxkern.ops.cross_entropy.linear_op` computes them in chunks of rows or parts of the
vocabulary.

Sources: Szegedy et al., Rethinking the Inception Architecture, 2015, arXiv:1512.00567 (label
smoothing); Chowdhery et al., PaLM, 2022, arXiv:2204.02311 (z-loss); Gemma Team, Gemma 2, 2024,
arXiv:2408.00118 (the cap); Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models,
2024, arXiv:2411.09009 (parts of the vocabulary); Hsu et al., Liger Kernel, 2024, arXiv:2410.10989
(chunks of rows, and gradients formed in the forward).
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import as_array, check_floating, unfit
from jaxkern.core.bound import standard_promotion
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, lse_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import Axes, SplitSequence, is_first, match_sharding, only_if
from jaxkern.mosaic.elementwise import too_large
from jaxkern.mosaic.lanes import VECTOR_BYTES
from jaxkern.ops.cross_entropy.kernel import SHORTEST, launch_backward, launch_forward
from jaxkern.ops.cross_entropy.reference import (
    LogSum,
    LossOptions,
    Sums,
    Terms,
    losses_of_rows,
    position_in,
    position_of,
    reference_backward,
    reference_forward,
)

Reduction = Literal["mean", "sum", "none"]


@lse_op
def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The cross-entropy of logits and labels.

    .. math::
        \text{loss} = \mathrm{lse} - (1 - \varepsilon) \, l_y - \frac{\varepsilon}{V} \sum_v l_v
        + \zeta \, \mathrm{lse}^2, \qquad \mathrm{lse} = \log \sum_v e^{l_v}

    where :math:`l` are the logits, or :math:`c \tanh(l / c)` with :math:`c` = `logit_softcap`,
    :math:`\varepsilon` = `label_smoothing` and :math:`\zeta` = `z_loss`. Sums are fp32, whatever
    the dtype. For the backward the logits and one number of each row are kept, and the gradient
    takes the memory of the logits where nothing else needs them.

    A row whose label is `ignore_index` has no loss and no gradient, and may hold NaN. A label that
    is neither that nor one of the V classes makes the loss NaN.

    On a mesh, rows and classes may be split between devices; logits are gathered only where the
    number of devices does not divide the classes.

    Args:
      logits: (..., V), bfloat16, float16 or float32.
      labels: (...), integers from 0 to V - 1, or `ignore_index`.
      ignore_index: the label of rows without a loss.
      label_smoothing: the share of the target that is spread over all classes, from 0 to 1.
      z_loss: the weight of the square of lse, 1e-4 in PaLM.
      logit_softcap: the bound of the logits, 30 in Gemma 2; ``None`` for none.
      reduction: ``"mean"`` over the rows that are not ignored, 0 if there are none; ``"sum"``; or
        ``"none"`` for the losses of the rows.
      return_lse: whether to return lse, too; its gradient counts.
      implementation: ``"mosaic"`` for GPU kernels; ``"xla"`` for plain JAX; ``None`` for the faster
        one.

    Returns:
      The loss, float32, () or with ``reduction="none"`` (...); with `return_lse` a pair of it and
      lse, (...), float32, 0 in the rows that are ignored.

    Raises:
      TypeError: `logits` is not an array of a real floating dtype, `labels` are not integers, or
        an option is no Python number.
      ValueError: shapes do not fit, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` where the kernels cannot take the call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
      >>> jaxkern.cross_entropy(logits, jnp.array([0, 2]), reduction="none").round(3)
      Array([0.693, 0.223], dtype=float32)
      >>> jaxkern.cross_entropy(logits, jnp.array([0, -100])).round(3)
      Array(0.693, dtype=float32)
    """
    logits = check_floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape (..., V), V at least 1; got {logits.shape}")
    terms = Terms.checked(ignore_index, label_smoothing, z_loss, logit_softcap)
    labels = check_labels(labels, logits.shape[:-1], "(...) of logits", terms)
    check_reduction(reduction)
    mode = resolve(implementation, unsupported(logits), op="cross_entropy")
    if implementation == "xla":
        losses, lse = named("cross_entropy", losses_of_rows(logits, labels, terms))
    else:
        losses, lse = _rows_jit(logits, labels, LossOptions(terms, logits.shape[-1], mode))
    return reduced(reduction, return_lse, losses, lse, labels, terms)


def check_labels(labels: Any, shape: tuple[int, ...], meaning: str, terms: Terms) -> jax.Array:
    """Checks labels of `shape`, described by `meaning`, and makes them int32 or int64."""
    labels = as_array("labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must be integers, got {labels.dtype}; the loss of probabilities is "
            "optax.softmax_cross_entropy"
        )
    if labels.shape != shape:
        raise ValueError(f"labels must have shape {shape} = {meaning}; got {labels.shape}")
    # A narrow dtype could not count all classes.
    signed = jnp.dtype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    if not jnp.issubdtype(labels.dtype, jnp.unsignedinteger) or labels.dtype.itemsize < 4:
        return labels.astype(signed)
    beyond = -1 if terms.ignored != -1 else -2  # no class, and not the label of ignored rows
    most = jnp.array(jnp.iinfo(signed).max, labels.dtype)
    return jnp.where(labels > most, jnp.array(beyond, signed), labels.astype(signed))


def check_reduction(reduction: Any) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')


def reduced(
    reduction: Reduction, return_lse: bool, losses: Any, lse: Any, labels: Any, terms: Terms
) -> Any:
    """Reduces the losses of rows, and adds lse if that is to be returned."""
    loss = losses if reduction == "none" else jnp.sum(losses)
    if reduction == "mean":
        loss = loss / terms.count(labels)
    return (loss, lse) if return_lse else loss


def _of_rows_fwd(logits, labels, options):
    losses, lse = options.loss(sums_of_rows(options, logits, labels), labels)
    return (losses, lse.value), (logits, labels, lse)


def _of_rows_bwd(options, res, cotangents):
    logits, labels, lse = res
    du = gradient_of_logits(options, logits, labels, lse, cotangents)
    return match_sharding(du, logits), None


_rows_jit = Differentiable(_of_rows_fwd, _of_rows_bwd)


# Passes over logits. Classes may be split between devices, or into parts: apart from a few numbers
# of each row, which devices exchange, a pass needs no other classes than its own.


def sums_of_rows(options: LossOptions, logits: Any, labels: Any, first: Any = 0) -> Sums:
    """Sums of rows over the classes of `logits`, which begin at class `first`."""
    position = position_of(labels, options.terms.ignored, first, logits.shape[-1])
    return Sums(*FORWARD(options, logits, position))


@standard_promotion()  # in the backward's rule, too
def gradient_of_logits(
    options: LossOptions, logits: Any, labels: Any, lse: LogSum, cotangents: Any, first: Any = 0
) -> Any:
    """Gradient of `logits`, which begin at class `first`, for cotangents of losses and lse."""
    position = position_of(labels, options.terms.ignored, first, logits.shape[-1])
    of_softmax = options.terms.of_softmax(lse, labels, cotangents, options.classes)
    return BACKWARD(options, logits, position, lse.value, of_softmax, cotangents[0])[0]


def unsupported(logits: Any) -> str | None:
    """Reason why the kernels cannot take logits of this type."""
    return unfit(logits=logits) or _too_large(None, logits)


def _too_large(options: Any, logits: Any, *rest: Any) -> str | None:
    """Reason why a kernel cannot count one device's logits."""
    del options, rest
    vec = VECTOR_BYTES // logits.dtype.itemsize
    # Elements outside of whole units are counted one by one.
    return too_large(1 if logits.shape[-1] % vec else vec, logits.size)


def _faster(options: LossOptions, logits: Any, *rest: Any) -> bool:
    del options, rest
    return logits.shape[-1] >= SHORTEST


def _own(axes: Axes, position: Any, logits: Any) -> Any:
    """Index of the labels within the classes of this device."""
    classes = logits.shape[-1]
    return position_in(position, lax.axis_index(axes) * classes, classes)


def _forward_of_device(
    run: Any, axes: Axes, options: LossOptions, logits: Any, position: Any
) -> Any:
    sums = Sums(*run(options, logits, _own(axes, position, logits)))
    largest = lax.stop_gradient(lax.pmax(lax.stop_gradient(sums.largest), axes))
    largest, *rest = sums.relative_to(largest)
    return only_if(is_first(axes), largest), *rest


def _backward_of_device(
    run: Any, axes: Axes, options: LossOptions, logits: Any, position: Any, *numbers: Any
) -> Any:
    return run(options, logits, _own(axes, position, logits), *numbers)


FORWARD = KernelPass(
    "cross_entropy_fwd",
    reference=reference_forward,
    kernel=launch_forward,
    ins=("... v", "..."),
    outs=("...",) * 4,
    sequence=SplitSequence(_forward_of_device, factor="v"),
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    unfit=_too_large,
    faster=_faster,
)
BACKWARD = KernelPass(
    "cross_entropy_bwd",
    reference=reference_backward,
    kernel=launch_backward,
    ins=("... v", "...", "...", "...", "..."),
    outs=("... v",),
    sequence=SplitSequence(_backward_of_device, factor="v"),
    kernel_of_slices=functools.partial(launch_backward, sliced=True),
    unfit=_too_large,
    faster=_faster,
)
