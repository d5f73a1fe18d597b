"""What the Mosaic GPU kernels share: the device's size, and rows laid over a warpgroup's lanes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128
"""Threads of a warpgroup. Kernels that sum across lanes run one warpgroup per block: Mosaic keeps
one scratch for such sums per block, and two warpgroups would race for it."""

_H200_SMS = 132
_MAX_VECTOR_BYTES = 16


def num_sms() -> int:
    """Streaming multiprocessors of this process's GPU; an H200's where there is none to ask."""
    for device in jax.local_devices():
        if device.platform == "gpu":
            return device.core_count
    return _H200_SMS


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

    def load(self, row_ref: Any, i: Any) -> jax.Array:
        """Window `i` of a row in global memory: (size,)."""
        window = row_ref.at[pl.ds(self.start(i), self.size)]
        return plgpu.load(window, layout=self.layout, optimized=False)

    def store(self, row_ref: Any, i: Any, value: jax.Array) -> None:
        row_ref[pl.ds(self.start(i), self.size)] = value.astype(row_ref.dtype)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def once(self, i: Any, value: jax.Array) -> jax.Array:
        """`value` with zeros where window `i` repeats elements of the one before."""
        if self.n % self.size == 0 or (isinstance(i, int) and i + 1 < self.count):
            return value
        column = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return jnp.where(column + self.start(i) >= i * self.size, value, self.full(0.0))


def lane_vector(size: int, itemsize: int) -> int:
    """Elements per load when the lanes share `size` elements evenly: up to 16 bytes."""
    vec = _MAX_VECTOR_BYTES // itemsize
    while size % (LANES * vec):
        vec //= 2
    return vec


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
    vec = _MAX_VECTOR_BYTES // itemsize
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
