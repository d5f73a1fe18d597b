"""What the loss of a row of logits is made of, and its gradient: options, sums, plain JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxkern.core.arguments import check_integer, check_number
from jaxkern.core.dispatch import Mode
from jaxkern.lowering.bound import wide


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the loss of a row is made of.

    Attributes:
      ignored: the label of rows without a loss.
      smoothing: ε.
      z: ζ.
      cap: of the logits, or ``None``.
    """

    ignored: int
    smoothing: float
    z: float
    cap: float | None

    @classmethod
    def checked(cls, ignore_index: Any, smoothing: Any, z_loss: Any, cap: Any) -> "Terms":
        """The options of a public function, or its errors."""
        ignored = check_integer("ignore_index", ignore_index)
        if not -(2**31) <= ignored < 2**31:
            raise ValueError(f"ignore_index must be an int of 32 bits, got {ignored}")
        smoothing = check_number("label_smoothing", smoothing, minimum=0, maximum=1)
        z = check_number("z_loss", z_loss, minimum=0)
        if cap is not None:
            cap = check_number("logit_softcap", cap, above=0, none="no cap")
        return cls(ignored, smoothing, z, cap)

    def counted(self, labels: jax.Array) -> jax.Array:
        """Whether a row has a loss."""
        return labels != self.ignored

    def count(self, labels: jax.Array) -> jax.Array:
        """What the sum of losses is divided by for their mean: how many there are, at least 1."""
        counted = jnp.sum(self.counted(labels), dtype=jnp.int32)
        return jnp.maximum(counted, 1).astype(jnp.float32)

    def without_ignored(self, rows: jax.Array, labels: jax.Array) -> jax.Array:
        """(..., n) with zeros for rows that are ignored: a gradient of 0 times NaN is NaN."""
        return jnp.where(self.counted(labels)[..., None], rows, 0)

    def capped(self, logits: jax.Array, tanh: Callable[[Any], Any] = jnp.tanh) -> jax.Array:
        """The logits at least in float32, capped."""
        logits = logits.astype(wide(logits.dtype))
        return logits if self.cap is None else self.cap * tanh(logits * (1 / self.cap))

    def loss(self, lse: Any, chosen: Any, total: Any, labels: Any, count: int) -> Any:
        """The losses of rows, of l[y] and Σ l, and lse, both 0 in rows that are ignored.

        A label that is none of the `count` classes has the loss NaN.
        """
        loss = lse - (1 - self.smoothing) * chosen + self.z * lse * lse
        if self.smoothing:
            loss = loss - self.smoothing / count * total
        counted = self.counted(labels)
        loss = loss * jnp.where(_known(labels, count) | ~counted, 1, jnp.nan)
        return jnp.where(counted, loss, 0), jnp.where(counted, lse, 0)

    def of_softmax(self, lse: "LogSum", labels: Any, cotangents: Any, count: int) -> Any:
        """What exp(l − lse.value) is multiplied by in a row's gradient; NaN of an unknown label."""
        dloss, dlse = cotangents
        factor = (dloss * (1 + 2 * self.z * lse.value) + dlse) * jnp.exp(-lse.rest)
        return jnp.where(_known(labels, count) | ~self.counted(labels), factor, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The static arguments of the passes over logits.

    Attributes:
      terms: of the loss.
      classes: of all of a row, of which the logits may be those of a part.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      alone: whether the passes are parts of another one, which is split between devices.
    """

    terms: Terms
    classes: Any
    mode: Mode
    alone: bool = False

    def inside(self) -> tuple["Rows", Mode]:
        """The options of passes over rows inside of another pass, and that one's mode.

        It is split between devices as a whole, but for the interpreter.
        """
        outer = "interpret" if self.mode == "interpret" else "auto"
        return dataclasses.replace(self, alone=True), outer

    def loss(self, sums: "Sums", labels: Any) -> tuple[Any, "LogSum"]:
        """The losses of rows and lse, of the sums of all classes."""
        lse = sums.lse()
        losses, value = self.terms.loss(lse.value, sums.chosen, sums.total, labels, self.classes)
        return losses, lse._replace(value=value)


class LogSum(NamedTuple):
    """lse = log Σ exp(l) of rows, (...) each, as `value` + `rest`.

    Rounded to fp32 alone, a value near 19, of 50,280 classes, makes the softmax of a whole row
    wrong by up to 10⁻⁶.
    """

    value: Any
    rest: Any


class Sums(NamedTuple):
    """What the losses of rows are made of, (...) each: of some classes of each row.

    Attributes:
      largest: logit.
      exponentials: Σ exp(l − the largest), or of l itself where the largest is not finite.
      chosen: the label's logit, 0 where the classes do not have it.
      total: Σ l.
    """

    largest: Any
    exponentials: Any
    chosen: Any
    total: Any

    def joined(self, other: "Sums") -> "Sums":
        """The sums of the classes of both."""
        largest = jnp.maximum(self.largest, other.largest)
        pairs = zip(self.beside(largest), other.beside(largest), strict=True)
        _, *sums = (one + two for one, two in pairs)
        return Sums(largest, *sums)

    def beside(self, largest: Any) -> "Sums":
        """These sums with exponentials relative to the largest logit of more classes."""
        shrink = jnp.exp(finite(self.largest) - finite(largest))
        # The classes may be all −∞, and then exp(0 − largest) be infinite.
        shrink = jnp.where(self.largest == -jnp.inf, 0, shrink)
        return self._replace(largest=largest, exponentials=self.exponentials * shrink)

    def lse(self) -> LogSum:
        """lse of rows, of which these are the sums of all classes."""
        one, other = finite(self.largest), jnp.log(self.exponentials)
        value = one + other
        of_other = value - one
        rest = (one - (value - of_other)) + (other - of_other)
        return LogSum(value, jnp.where(jnp.isfinite(value), rest, 0))


def finite(v: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(v), v, 0)


ABSENT, IGNORED = -1, -2
"""Positions: the label is none of the classes; the row is ignored."""


def position_of(labels: Any, ignored: int, first: Any, size: Any) -> jax.Array:
    """(...), int32: where labels are in `size` classes from `first` on."""
    position = labels - first
    # Of a label near the least integer the difference may overflow.
    inside = (labels >= 0) & (position >= 0) & (position < size)
    position = jnp.where(inside, position, ABSENT)
    return jnp.where(labels == ignored, IGNORED, position).astype(jnp.int32)


def position_in(position: jax.Array, first: Any, size: Any) -> jax.Array:
    """Where labels are in `size` of the classes from `first` on, of where they are in all."""
    inside = (position >= first) & (position - first < size)
    return jnp.where(inside, position - first, jnp.minimum(position, ABSENT))


def reference_forward(options: Rows, logits: Any, position: Any) -> tuple[Any, ...]:
    """The four of :class:`Sums`, in plain JAX.

    Args:
      options: of the pass.
      logits: (..., V).
      position: (...), of :func:`position_of`.
    """
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
    options: Rows, logits: Any, position: Any, lse: Any, of_softmax: Any, dloss: Any
) -> tuple[Any]:
    """The gradient of the logits, in their dtype, in plain JAX.

    Args:
      options: of the pass.
      logits: (..., V).
      position: (...), of :func:`position_of`.
      lse: (...), of rows.
      of_softmax: (...), of :meth:`Terms.of_softmax`.
      dloss: (...), the cotangents of the losses.
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
    """(..., V): whether a class is that of the label."""
    sharding = jax.typeof(logits).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    columns = lax.broadcasted_iota(
        labels.dtype, logits.shape, logits.ndim - 1, out_sharding=sharding if explicit else None
    )
    return columns == labels[..., None]


def losses_of_rows(
    logits: jax.Array, labels: jax.Array, terms: Terms
) -> tuple[jax.Array, jax.Array]:
    """Losses and lse of rows, in plain JAX."""
    capped = terms.capped(terms.without_ignored(logits, labels))  # (..., V)
    chosen = jnp.sum(jnp.where(_here(logits, labels), capped, 0), axis=-1)
    lse = jax.nn.logsumexp(capped, axis=-1)
    return terms.loss(lse, chosen, jnp.sum(capped, axis=-1), labels, logits.shape[-1])
