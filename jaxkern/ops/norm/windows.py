"""A long row as windows of equal size, each spread over a warpgroup's lanes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import VECTOR_BYTES


@dataclasses.dataclass(frozen=True)
class Windows:
    """A row of `n` elements as `count` windows of `size`, each spread over a warpgroup's lanes.

    The last window ends at the row's end, so where `n` is no multiple of `size` it overlaps the one
    before: its first elements are read and written twice, with equal values, and masked in sums.
    Every window has the same layout, so their registers can be added before one sum over lanes.
    """

    n: int
    size: int
    vec: int
    count: int

    def __post_init__(self) -> None:
        assert self.size % (LANES * self.vec) == 0, self
        assert self.n % self.vec == 0, self
        assert (self.count - 1) * self.size < self.n <= self.count * self.size, self

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)

    def start(self, i: Any) -> Any:
        if isinstance(i, int):
            return min(i * self.size, self.n - self.size)
        return jnp.minimum(i * self.size, self.n - self.size)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)


@functools.cache
def windows(n: int, max_size: int, itemsize: int) -> Windows:
    """The windows of at most `max_size` elements that cover a row of `n` >= 128 the cheapest.

    A load of `vec` elements needs every row to start at a multiple of `vec`, so an odd `n` is read
    element by element; the cost of a window grows with the number of such loads.

    Args:
      n: length of the row.
      max_size: most elements of one window.
      itemsize: bytes of an element of the narrowest array, which decides the widest load.
    """
    choices = []
    vec = VECTOR_BYTES // itemsize
    while vec:
        unit = LANES * vec
        fewest = -(-n // max_size)
        for count in range(fewest, fewest + 8):
            size = -(-n // (count * unit)) * unit
            covers = (count - 1) * size < n <= count * size
            if n % vec == 0 and size <= min(n, max_size) and covers:
                cost = size * count * (1 + 1 / (vec * itemsize))
                choices.append((cost, count, Windows(n, size, vec, count)))
        vec //= 2
    return min(choices, key=lambda c: c[:2])[2]
