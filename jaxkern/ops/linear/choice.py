"""Which products the kernel computes, and in which tiles: a table of measured times.

A product is measured at some sizes, beside cuBLAS with XLA's fusion around it, on one H200. Sizes
within a factor of two of measured ones, each of them, are taken to behave as the nearest. Where the
kernel is slower, or nothing near was measured, ``implementation=None`` leaves the product to
cuBLAS; ``"mosaic"`` takes the kernel, in tiles that :func:`_unmeasured` gives where none are known.
"""

import dataclasses
import math

from jaxkern.core.dispatch import Mode
from jaxkern.core.mosaic import num_sms
from jaxkern.ops.linear.matmul import Tile


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product (m, k) · (k, n) of 16-bit floats.

    Attributes:
      m, n, k: its sizes.
      speed: of the kernel, relative to cuBLAS and what XLA fuses.
      tile: the fastest one of those tried.
    """

    m: int
    n: int
    k: int
    speed: float
    tile: Tile

    def distance(self, m: int, n: int, k: int) -> float:
        """The largest factor between sizes, as a power of two."""
        return max(abs(math.log2(a / b)) for a, b in ((m, self.m), (n, self.n), (k, self.k)))


MEASURED: dict[str, tuple[Measured, ...]] = {
    "linear_fwd": (),
    "linear_dx": (),
    "linear_dweight": (),
    "linear_accumulate": (),
    "gated_fwd": (),
    "gated_bwd": (),
    "gated_dx": (),
    "gated_dweights": (),
    "gated_accumulate": (),
}
"""By kernel name."""


def tile_for(name: str, mode: Mode, m: int, n: int, k: int) -> Tile | None:
    """Tiles of the kernel `name` for a product of these sizes; None where plain JAX computes it."""
    if not m * n * k:
        return None
    if mode == "interpret":
        return Tile(128, 64, 64, 2, None)
    near = [row for row in MEASURED[name] if row.distance(m, n, k) <= 1]
    if near:
        best = min(near, key=lambda row: row.distance(m, n, k))
        return None if mode == "auto" and best.speed < 1 else best.tile
    return None if mode == "auto" else _unmeasured(name, m, n)


def _unmeasured(name: str, m: int, n: int) -> Tile:
    """The largest tiles of which there are enough for all multiprocessors."""
    two_sides = name in ("gated_fwd", "gated_bwd", "gated_dweights", "gated_accumulate")
    wide = 128 if two_sides else 256
    if wide == 128 or -(-m // 128) * -(-n // wide) >= num_sms():
        return Tile(128, wide, 64, 4, "rhs" if m > 128 else None)
    return Tile(128, 128, 64, 4, None)
