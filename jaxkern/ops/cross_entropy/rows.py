"""What the loss of a row of logits is made of, and its gradient."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxkern.core.arguments import check_number
from jaxkern.lowering.bound import standard_promotion


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
        try:
            ignored = operator.index(ignore_index)
        except TypeError as e:
            raise TypeError(f"ignore_index must be an int, got {ignore_index!r}") from e
        if not -(2**31) <= ignored < 2**31:
            raise ValueError(f"ignore_index must be an int of 32 bits, got {ignored}")
        smoothing = check_number("label_smoothing", smoothing, minimum=0)
        if smoothing > 1:
            raise ValueError(f"label_smoothing must be at most 1, got {smoothing!r}")
        z = check_number("z_loss", z_loss, minimum=0)
        if cap is not None:
            cap = check_number("logit_softcap", cap)
            if not cap > 0:
                raise ValueError(f"logit_softcap must be above 0 or None, got {cap!r}")
        return cls(ignored, smoothing, z, cap)

    def counted(self, labels: jax.Array) -> jax.Array:
        """Whether a row has a loss."""
        return labels != self.ignored

    def without_ignored(self, rows: jax.Array, labels: jax.Array) -> jax.Array:
        """(..., n) with zeros for rows that are ignored: a gradient of 0 times NaN is NaN."""
        return jnp.where(self.counted(labels)[..., None], rows, 0)

    def capped(self, logits: jax.Array) -> jax.Array:
        """The logits at least in float32, capped."""
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return wide if self.cap is None else self.cap * jnp.tanh(wide / self.cap)

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

    def gradient(
        self, logits: Any, here: Any, lse: Any, labels: Any, cotangents: Any, count: int
    ) -> Any:
        """du, in the dtype of the logits; `here` is whether a column is that of the label."""
        capped, over = self.capped(logits), lambda v: v[..., None]
        dloss, dlse = cotangents
        of_softmax = dloss * (1 + 2 * self.z * lse) + dlse
        wanted = (1 - self.smoothing) * here.astype(capped.dtype) + self.smoothing / count
        du = over(of_softmax) * jnp.exp(capped - over(lse)) - over(dloss) * wanted
        if self.cap is not None:
            du = du * (1 - (capped / self.cap) ** 2)
        du = jnp.where(over(_known(labels, count)), du, jnp.nan)
        return jnp.where(over(self.counted(labels)), du, 0).astype(logits.dtype)


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


@standard_promotion()  # in the backward's rule, too
def gradient_of_rows(terms: Terms, logits: Any, labels: Any, lse: Any, cotangents: Any) -> Any:
    """The gradient of the logits, for the cotangents of losses and lse."""
    here = _here(logits, labels)
    return terms.gradient(logits, here, lse, labels, cotangents, logits.shape[-1])
