"""Options of the selective scans: how step sizes are made, and how far apart states are saved."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Makes step sizes from the numbers that a layer computes.

    Attributes:
      softplus: whether to take the softplus of those numbers.
      low, high: the least and the largest step size.
    """

    softplus: bool
    low: float
    high: float

    @classmethod
    def checked(cls, dt_softplus: bool, dt_limit: Any) -> "StepSizes":
        """Checks the options of a public function."""
        try:
            low, high = dt_limit
        except (TypeError, ValueError) as e:
            raise TypeError(f"dt_limit must be two numbers, (low, high); got {dt_limit!r}") from e
        low = check_number("dt_limit[0]", low, finite=False)
        high = check_number("dt_limit[1]", high, finite=False)
        if not low <= high:
            raise ValueError(
                f"dt_limit must be (low, high) with low <= high, got {dt_limit!r}; "
                "(-inf, inf) stands for no limit"
            )
        return cls(dt_softplus, low, high)

    @property
    def least(self) -> bool:
        """Whether a step size can be below the least one."""
        return self.low > (0 if self.softplus else -math.inf)

    @property
    def most(self) -> bool:
        """Whether a step size can be above the largest one."""
        return self.high < math.inf

    def __call__(self, dt: jax.Array) -> jax.Array:
        """The step sizes of `dt`, the bias added; one outside the limits has no gradient."""
        if self.softplus:
            dt = jax.nn.softplus(dt)
        # Not jnp.clip, which halves the gradient of a value at a limit.
        if self.least:
            dt = jnp.where(dt < self.low, self.low, dt)
        if self.most:
            dt = jnp.where(dt > self.high, self.high, dt)
        return dt


def check_checkpoint_every(every: Any, chunk: int, *, one: bool = False) -> int | None:
    """`every` as an int, a multiple of `chunk` or, if `one` is allowed, 1; or ``None``."""
    if every is None:
        return None
    tokens = check_integer("checkpoint_every", every, optional=True)
    if (tokens <= 0 or tokens % chunk) and not (one and tokens == 1):
        either = f"1, a multiple of {chunk}" if one else f"a multiple of {chunk}"
        raise ValueError(
            f"checkpoint_every must be {either} or None, got {tokens}; "
            f"try {max(chunk, tokens // chunk * chunk)}"
        )
    return tokens
