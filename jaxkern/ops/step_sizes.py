"""The step sizes of a discretised recurrence: a bias, softplus and limits."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_number


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What makes step sizes of the numbers that a layer computes.

    Attributes:
      softplus: whether they are the softplus of those numbers.
      low, high: the least and the largest step size.
    """

    softplus: bool
    low: float
    high: float

    @classmethod
    def checked(cls, dt_softplus: bool, dt_limit: Any) -> "StepSizes":
        """The options of a public function, or its errors."""
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
