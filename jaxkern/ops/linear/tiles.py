"""Tiles of the products, and which products the kernels compute by default.

``implementation="mosaic"`` always takes the kernel, in the tile that was the fastest of those tried
at the nearest size; sizes are near where each is within a factor of two. ``None`` takes it only
where the nearest size is marked :attr:`Measured.faster`, and leaves every other product to cuBLAS.
"""

import dataclasses
import itertools
import math

from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.launch import num_sms

CONSUMERS = 2
"""Warpgroups of a block that multiply."""

BOX = 64
"""Rows and columns of the parts in which a tile is finished and stored."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tiles of the product.

    Attributes:
      m, n: of the result, for a block.
      k: of the contraction, for a step.
      stages: most stages of the ring; fewer where shared memory has no room for them.
      share: the operand that both blocks of a pair read: ``"lhs"`` where their tiles are neighbours
        in a row, ``"rhs"`` in a column; None for blocks alone.
      width: columns of tiles in a band; blocks compute one band after the other.
      prefetch: whether accumulators are fetched during the product, for short contractions, where
        product and memory take as long; otherwise the L2 cache adds to them.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    share: str | None = "rhs"
    width: int = 8
    prefetch: bool = False

    def __post_init__(self) -> None:
        assert self.m % (64 * CONSUMERS) == 0, self
        assert self.n % BOX == 0, self
        assert self.k % BOX == 0, self

    @property
    def own(self) -> int:
        """Rows of the result for a warpgroup."""
        return self.m // CONSUMERS

    @property
    def boxes(self) -> list[tuple[int, int]]:
        """Rows and columns at which the boxes of a warpgroup begin."""
        return list(itertools.product(range(0, self.own, BOX), range(0, self.n, BOX)))

    @property
    def pair(self) -> tuple[int, int]:
        """Blocks of a cluster, along the rows and the columns of the result."""
        return (1 + (self.share == "rhs"), 1 + (self.share == "lhs"))


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product (m, k) · (k, n) of 16-bit floats that was timed on one H200.

    Attributes:
      m, n, k: its sizes.
      tile: the fastest one of those tried.
      faster: whether the kernel took less time than cuBLAS with XLA's fusion around it, by more
        than the 7% by which runs of one program differ.
    """

    m: int
    n: int
    k: int
    tile: Tile
    faster: bool = False

    def distance(self, m: int, n: int, k: int) -> float:
        """The largest factor between sizes, as a power of two."""
        return max(abs(math.log2(a / b)) for a, b in ((m, self.m), (n, self.n), (k, self.k)))


_BANDS = Tile(128, 256, 64, 4, "rhs", 8)
_BROAD_BANDS = Tile(128, 256, 64, 4, "rhs", 16)
_ALONE = Tile(128, 256, 64, 4, None, 8)
_LEFT_SHARED = Tile(128, 256, 64, 4, "lhs", 8)
_THREE_STAGES = Tile(128, 256, 64, 3, "rhs", 8)
_TWO_PRODUCTS = Tile(128, 128, 64, 4, "rhs", 8)
_TWO_PRODUCTS_ALONE = Tile(128, 128, 64, 4, None, 8)

_WITHOUT_ACTIVATION = (
    Measured(16384, 11008, 4096, _BANDS),
    Measured(16384, 14336, 4096, _ALONE),
    Measured(16384, 4096, 4096, _THREE_STAGES),
    Measured(8192, 4096, 4096, _ALONE),
    Measured(8192, 8192, 8192, _BANDS),
)

MEASURED: dict[str, tuple[Measured, ...]] = {
    "linear_fwd": _WITHOUT_ACTIVATION,
    "linear_activation_fwd": (
        *_WITHOUT_ACTIVATION,
        # GELU, 1.42 times as fast.
        Measured(16384, 3072, 768, _BANDS, faster=True),
    ),
    "linear_dx": (
        Measured(16384, 4096, 11008, _BROAD_BANDS),
        Measured(16384, 4096, 14336, _BANDS),
        Measured(16384, 4096, 4096, _BROAD_BANDS),
        Measured(8192, 4096, 4096, _LEFT_SHARED),
        Measured(8192, 8192, 8192, _LEFT_SHARED),
    ),
    "linear_dweight": (
        Measured(4096, 11008, 16384, _BANDS),
        Measured(4096, 14336, 16384, _BANDS),
        Measured(4096, 4096, 16384, _THREE_STAGES),
        Measured(4096, 4096, 8192, Tile(256, 128, 64, 4, "lhs", 8)),
        Measured(8192, 8192, 8192, _ALONE),
    ),
    # Alone 512 is 1.09 times as fast; within a scan over micro-batches it is not.
    "linear_accumulate": (
        Measured(4096, 4096, 512, Tile(128, 128, 64, 4, "rhs", 8, prefetch=True)),
        Measured(4096, 4096, 1024, Tile(128, 128, 64, 4, "lhs", 16, prefetch=True)),
        Measured(4096, 4096, 2048, _BROAD_BANDS),
        Measured(4096, 4096, 8192, _BROAD_BANDS),
    ),
    "gated_fwd": (),  # the fastest tile is that of sizes that were not measured
    "gated_bwd": (),
    "gated_dx": (
        Measured(16384, 4096, 11008, _ALONE),
        Measured(8192, 4096, 14336, _BANDS),
    ),
    "gated_dweights": (
        Measured(4096, 11008, 16384, _TWO_PRODUCTS_ALONE),
        Measured(4096, 14336, 8192, _TWO_PRODUCTS_ALONE),
    ),
    "gated_accumulate": (
        Measured(4096, 11008, 512, _TWO_PRODUCTS),
        # 1.09 and 1.12 times as fast.
        Measured(4096, 11008, 1024, Tile(128, 128, 64, 4, "rhs", 16), faster=True),
        Measured(4096, 11008, 2048, _TWO_PRODUCTS, faster=True),
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
    if mode == "interpret":  # the interpreter does not know the TMA's reductions
        return Tile(128, 64, 64, 2, None, prefetch=True)
    near = [row for row in MEASURED[name] if row.distance(m, n, k) <= 1]
    if not near:
        return None if mode == "auto" else _unmeasured(name, m, n)
    nearest = min(near, key=lambda row: row.distance(m, n, k))
    return None if mode == "auto" and not nearest.faster else nearest.tile


def _unmeasured(name: str, m: int, n: int) -> Tile:
    """The largest tile of which there are enough for all multiprocessors."""
    two_products = name in ("gated_fwd", "gated_bwd", "gated_dweights", "gated_accumulate")
    wide = 128 if two_products else 256
    if two_products or -(-m // 128) * -(-n // wide) >= num_sms():
        return Tile(128, wide, 64, 4, "rhs" if m > 128 else None)
    return Tile(128, 128, 64, 4, None)
