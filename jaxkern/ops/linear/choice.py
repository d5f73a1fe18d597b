"""Which products the kernel computes, and in which tiles: a table of measured times.

A product is measured at some sizes, beside cuBLAS with XLA's fusion around it, on one H200. Sizes
within a factor of two of measured ones, each of them, are taken to behave as the nearest. Where the
kernel is slower, or nothing near was measured, ``implementation=None`` leaves the product to
cuBLAS; ``"mosaic"`` takes the kernel, in tiles that :func:`_unmeasured` gives where none are known.
"""

import dataclasses
import math

from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.launch import num_sms
from jaxkern.ops.linear.matmul import Tile


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product (m, k) · (k, n) of 16-bit floats.

    Attributes:
      m, n, k: its sizes.
      speed: of the kernel, relative to what runs in its place: cuBLAS and what XLA fuses.
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


_BANDS = Tile(128, 256, 64, 4, "rhs", 8)
_BROAD_BANDS = Tile(128, 256, 64, 4, "rhs", 16)
_ALONE = Tile(128, 256, 64, 4, None, 8)
_PAIR_BANDS = Tile(128, 128, 64, 4, "rhs", 8)
_PAIR_ALONE = Tile(128, 128, 64, 4, None, 8)

_WITHOUT_ACTIVATION = (
    Measured(16384, 11008, 4096, 0.980, _BANDS),
    Measured(16384, 14336, 4096, 0.958, _ALONE),
    Measured(16384, 4096, 4096, 0.957, Tile(128, 256, 64, 3, "rhs", 8)),
    Measured(8192, 4096, 4096, 0.957, _ALONE),
    Measured(8192, 8192, 8192, 0.978, _BANDS),
)

MEASURED: dict[str, tuple[Measured, ...]] = {
    "linear_fwd": _WITHOUT_ACTIVATION,
    "linear_activation_fwd": (
        *_WITHOUT_ACTIVATION,  # whose speed is the least: what is in its place has more to do
        Measured(16384, 3072, 768, 1.42, _BANDS),  # GELU
    ),
    "linear_dx": (
        Measured(16384, 4096, 11008, 0.969, _BROAD_BANDS),
        Measured(16384, 4096, 14336, 0.979, _BANDS),
        Measured(16384, 4096, 4096, 0.950, _BROAD_BANDS),
        Measured(8192, 4096, 4096, 0.984, Tile(128, 256, 64, 4, "lhs", 8)),
        Measured(8192, 8192, 8192, 0.959, Tile(128, 256, 64, 4, "lhs", 8)),
    ),
    "linear_dweight": (
        Measured(4096, 11008, 16384, 0.979, _BANDS),
        Measured(4096, 14336, 16384, 0.974, _BANDS),
        Measured(4096, 4096, 16384, 0.978, Tile(128, 256, 64, 3, "rhs", 8)),
        Measured(4096, 4096, 8192, 1.020, Tile(256, 128, 64, 4, "lhs", 8)),
        Measured(8192, 8192, 8192, 0.962, _ALONE),
    ),
    "linear_accumulate": (
        Measured(4096, 4096, 512, 1.094, Tile(128, 128, 64, 4, "rhs", 8, prefetch=True)),
        Measured(4096, 4096, 1024, 1.044, Tile(128, 128, 64, 4, "lhs", 16, prefetch=True)),
        Measured(4096, 4096, 2048, 1.003, _BROAD_BANDS),
        Measured(4096, 4096, 8192, 0.990, _BROAD_BANDS),
    ),
    "gated_fwd": (
        Measured(16384, 11008, 4096, 1.045, _PAIR_BANDS),
        Measured(8192, 14336, 4096, 1.042, _PAIR_BANDS),
    ),
    "gated_bwd": (
        Measured(16384, 11008, 4096, 0.929, _PAIR_BANDS),
        Measured(8192, 14336, 4096, 0.919, _PAIR_BANDS),
    ),
    "gated_dx": (
        Measured(16384, 4096, 11008, 1.015, _ALONE),
        Measured(8192, 4096, 14336, 1.019, _BANDS),
    ),
    "gated_dweights": (
        Measured(4096, 11008, 16384, 1.004, _PAIR_ALONE),
        Measured(4096, 14336, 8192, 0.973, _PAIR_ALONE),
    ),
    "gated_accumulate": (
        Measured(4096, 11008, 512, 1.026, _PAIR_BANDS),
        Measured(4096, 11008, 1024, 1.085, Tile(128, 128, 64, 4, "rhs", 16)),
        Measured(4096, 11008, 2048, 1.115, _PAIR_BANDS),
    ),
}
"""By kernel name."""


def faster(name: str, m: int, n: int, k: int) -> bool:
    """Whether the kernel `name` is what ``implementation=None`` takes for a product."""
    return tile_for(name, "auto", m, n, k) is not None


def tile_for(name: str, mode: Mode, m: int, n: int, k: int) -> Tile | None:
    """Tiles of the kernel `name` for a product of these sizes; None where plain JAX computes it."""
    if not m * n * k:
        return None
    if mode == "interpret":  # it has no reductions of the TMA
        return Tile(128, 64, 64, 2, None, prefetch=True)
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
