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
        """The first element of window `i`."""
        if isinstance(i, int):
            return min(i * self.size, self.n - self.size)
        return jnp.minimum(i * self.size, self.n - self.size)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)


@functools.cache
def windows(n: int, itemsize: int, warpgroups: int, max_size: int, max_vec: int) -> Windows:
    """The windows of a row of `n` >= 128 that cost `warpgroups` warpgroups least.

    They differ in size: the largest, a half, a third or a quarter of `max_size`. Warpgroups that
    get no window of their own repeat the last, so that fewer elements may not be less work.

    Args:
      n: length of the row.
      itemsize: bytes of an element of the narrowest array, which decides the widest load.
      warpgroups: that share the windows evenly.
      max_size: most elements of one window.
      max_vec: most neighbouring elements that a lane loads at a time.
    """

    def cost(w: Windows) -> float:
        elements = -(-w.count // warpgroups) * warpgroups * w.size
        return elements * _cost_of_element(w.vec, itemsize)

    sizes = (min(n, max_size) // divide // LANES * LANES or LANES for divide in (1, 2, 3, 4))
    return min((_windows(n, size, max(itemsize, 16 // max_vec)) for size in sizes), key=cost)


def _windows(n: int, max_size: int, itemsize: int) -> Windows:
    """The windows of at most `max_size` elements that cover the row the cheapest.

    A load of `vec` elements needs every row to start at a multiple of `vec`, so an odd `n` is read
    element by element.
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
                choices.append(Windows(n, size, vec, count))
        vec //= 2
    cost = lambda w: (w.size * w.count * _cost_of_element(w.vec, itemsize), w.count)
    return min(choices, key=cost)


def _cost_of_element(vec: int, itemsize: int) -> float:
    """Grows with the number of loads that bring an element, of `vec` elements each."""
    return 1 + 1 / (vec * itemsize)
