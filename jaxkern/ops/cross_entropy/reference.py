"""The cross-entropy of rows of logits in plain JAX, and the options and sums of its passes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxkern.core.arguments import check_integer, check_number
from jaxkern.core.bound import wide
from jaxkern.core.dispatch import Mode


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms of the loss: the label of rows without one, ε, ζ and the logits' cap or ``None``."""

    ignored: int
    smoothing: float
    z: float
    cap: float | None

    @classmethod
    def checked(cls, ignore_index: Any, smoothing: Any, z_loss: Any, cap: Any) -> "Terms":
        """Checks the options of a public function."""
        ignored = check_integer("ignore_index", ignore_index)
        if not -(2**31) <= ignored < 2**31:
            raise ValueError(f"ignore_index must be an int of 32 bits, got {ignored}")
        smoothing = check_number("label_smoothing", smoothing, minimum=0, maximum=1)
        z = check_number("z_loss", z_loss, minimum=0)
        if cap is not None:
            cap = check_number("logit_softcap", cap, above=0, none="no cap")
        return cls(ignored, smoothing, z, cap)

    def counted(self, labels: jax.Array) -> jax.Array:
        """Mask of the rows that have a loss."""
        return labels != self.ignored

    def count(self, labels: jax.Array) -> jax.Array:
        """Number of rows with a loss, at least 1, by which a mean divides."""
        counted = jnp.sum(self.counted(labels), dtype=jnp.int32)
        return jnp.maximum(counted, 1).astype(jnp.float32)

    def without_ignored(self, rows: jax.Array, labels: jax.Array) -> jax.Array:
        """`rows`, (..., n), with zeros where ignored: a gradient of 0 times NaN would be NaN."""
        return jnp.where(self.counted(labels)[..., None], rows, 0)

    def capped(self, logits: jax.Array, tanh: Callable[[Any], Any] = jnp.tanh) -> jax.Array:
        """Caps the logits, in float32 or wider."""
        logits = logits.astype(wide(logits.dtype))
        return logits if self.cap is None else self.cap * tanh(logits * (1 / self.cap))

    def loss(self, lse: Any, chosen: Any, total: Any, labels: Any, count: int) -> Any:
        """Losses and lse of rows from lse, l[y] and Σ l: 0 if ignored, NaN for unknown labels."""
        loss = lse - (1 - self.smoothing) * chosen + self.z * lse * lse
        if self.smoothing:
            loss = loss - self.smoothing / count * total
        counted = self.counted(labels)
        loss = loss * jnp.where(_known(labels, count) | ~counted, 1, jnp.nan)
        return jnp.where(counted, loss, 0), jnp.where(counted, lse, 0)

    def of_softmax(self, lse: "LogSum", labels: Any, cotangents: Any, count: int) -> Any:
        """Factor of exp(l − lse.value) in a row's gradient; NaN for an unknown label."""
        dloss, dlse = cotangents
        factor = (dloss * (1 + 2 * self.z * lse.value) + dlse) * jnp.exp(-lse.rest)
        return jnp.where(_known(labels, count) | ~self.counted(labels), factor, jnp.nan)


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """Static arguments of the passes over logits.

    Attributes:
      terms: terms of the loss.
      classes: V, where the logits may be a part of the vocabulary.
      mode: mode from :func:`jaxkern.core.dispatch.resolve`.
      alone: whether the pass runs inside another pass, which is split between devices.
    """

    terms: Terms
    classes: Any
    mode: Mode
    alone: bool = False

    def inside(self) -> tuple["LossOptions", Mode]:
        """Options of a pass over logits inside another pass, and the mode of that other pass."""
        outer = "interpret" if self.mode == "interpret" else "auto"
        return dataclasses.replace(self, alone=True), outer

    def loss(self, sums: "Sums", labels: Any) -> tuple[Any, "LogSum"]:
        """Losses of rows, and lse, from the sums over all classes."""
        lse = sums.lse()
        losses, value = self.terms.loss(lse.value, sums.chosen, sums.total, labels, self.classes)
        return losses, lse._replace(value=value)


class LogSum(NamedTuple):
    """lse = log Σ exp(l) of rows, (...) each, as `value` + `rest`.

    Without the rest, which fp32 rounds off, an lse near 19, of 50,280 classes, makes the softmax of
    a row wrong by up to 10⁻⁶.
    """

    value: Any
    rest: Any


class Sums(NamedTuple):
    """Sums over some classes of each row, (...) each.

    Attributes:
      largest: max l.
      exponentials: Σ exp(l − largest), or Σ exp(l) where the largest is not finite.
      chosen: the label's logit, 0 if the label is another class.
      total: Σ l.
    """

    largest: Any
    exponentials: Any
    chosen: Any
    total: Any

    def joined(self, other: "Sums") -> "Sums":
        """Sums over the classes of both."""
        largest = jnp.maximum(self.largest, other.largest)
        pairs = zip(self.relative_to(largest), other.relative_to(largest), strict=True)
        _, *sums = (one + two for one, two in pairs)
        return Sums(largest, *sums)

    def relative_to(self, largest: Any) -> "Sums":
        """Sums with exponentials relative to the largest logit of more classes."""
        shrink = jnp.exp(finite(self.largest) - finite(largest))
        # If all logits are −∞, exp(0 − largest) may be infinite.
        shrink = jnp.where(self.largest == -jnp.inf, 0, shrink)
        return self._replace(largest=largest, exponentials=self.exponentials * shrink)

    def lse(self) -> LogSum:
        """lse of rows, from their sums over all classes."""
        a, b = finite(self.largest), jnp.log(self.exponentials)
        value = a + b
        rounded_b = value - a
        rest = (a - (value - rounded_b)) + (b - rounded_b)
        return LogSum(value, jnp.where(jnp.isfinite(value), rest, 0))


def finite(v: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(v), v, 0)


ABSENT, IGNORED = -1, -2
"""Label indices: the label is another class; the row is ignored."""


def position_of(labels: Any, ignored: int, first: Any, size: Any) -> jax.Array:
    """Index of the labels, (...) int32, within `size` classes from `first` on."""
    position = labels - first  # may overflow for a label near the least integer
    inside = (labels >= 0) & (position >= 0) & (position < size)
    position = jnp.where(inside, position, ABSENT)
    return jnp.where(labels == ignored, IGNORED, position).astype(jnp.int32)


def position_in(position: jax.Array, first: Any, size: Any) -> jax.Array:
    """Index of the labels within `size` classes from `first` on, from their index in all."""
    inside = (position >= first) & (position - first < size)
    return jnp.where(inside, position - first, jnp.minimum(position, ABSENT))


def reference_forward(options: LossOptions, logits: Any, position: Any) -> tuple[Any, ...]:
    """The four :class:`Sums` of logits (..., V); `position`, (...), from :func:`position_of`."""
    counted = (position != IGNORED)[..., None]
    capped = options.terms.capped(jnp.where(counted, logits, 0))
    largest = lax.stop_gradient(jnp.max(capped, axis=-1))  # (...)
    return (
        largest,
        jnp.sum(jnp.exp(capped - finite(largest)[..., None]), axis=-1),
        jnp.sum(jnp.where(_here(logits, position), capped, 0), axis=-1),
        jnp.sum(capped, axis=-1),
    )


def reference_backward(
    options: LossOptions, logits: Any, position: Any, lse: Any, of_softmax: Any, dloss: Any
) -> tuple[Any]:
    """Gradient of logits (..., V), in their dtype, in plain JAX.

    The other arrays are (...): `position` from :func:`position_of`, lse, `of_softmax` from
    :meth:`Terms.of_softmax`, and the cotangents of the losses.
    """
    terms, over = options.terms, lambda v: v[..., None]
    capped = terms.capped(logits)
    here = _here(logits, position).astype(capped.dtype)
    wanted = (1 - terms.smoothing) * here + terms.smoothing / options.classes
    du = over(of_softmax) * jnp.exp(capped - over(lse)) - over(dloss) * wanted
    if terms.cap is not None:
        du = du * (1 - (capped / terms.cap) ** 2)
    return (jnp.where((position == IGNORED)[..., None], 0, du).astype(logits.dtype),)


def _known(labels: jax.Array, count: int) -> jax.Array:
    return (labels >= 0) & (labels < count)


def _here(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mask (..., V) of the label's class."""
    sharding = jax.typeof(logits).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    columns = lax.broadcasted_iota(
        labels.dtype, logits.shape, logits.ndim - 1, out_sharding=sharding if explicit else None
    )
    return columns == labels[..., None]


def losses_of_rows(
    logits: jax.Array, labels: jax.Array, terms: Terms
) -> tuple[jax.Array, jax.Array]:
    """Losses and lse of rows, in plain JAX: the ``"xla"`` implementation."""
    capped = terms.capped(terms.without_ignored(logits, labels))  # (..., V)
    chosen = jnp.sum(jnp.where(_here(logits, labels), capped, 0), axis=-1)
    lse = jax.nn.logsumexp(capped, axis=-1)
    return terms.loss(lse, chosen, jnp.sum(capped, axis=-1), labels, logits.shape[-1])
