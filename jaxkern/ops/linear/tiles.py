"""Tiles of the products, and the products that the kernels compute by default.

``implementation="mosaic"`` always takes the kernel, with the fastest tile measured at the nearest
size; sizes are near if each is within a factor of two. ``None`` takes it only where the nearest
size is marked :attr:`Measured.faster`, and leaves every other product to cuBLAS.
"""

import dataclasses
import itertools
import math

from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.launch import num_sms

CONSUMERS = 2
"""Multiplying warpgroups of a block."""

BOX = 64
"""Rows and columns of a box: a tile is finished and stored box by box."""


@dataclasses.dataclass(frozen=True)
class ProductTile:
    """Tile of a product.

    Attributes:
      m, n: rows and columns of the result per block.
      k: depth of a step of the contraction.
      stages: most stages of the ring; fewer if shared memory has no room.
      share: operand that both blocks of a pair read: ``"lhs"`` where their tiles are neighbours in
        a row, ``"rhs"`` in a column; None for single blocks.
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
        """Rows of the result per warpgroup."""
        return self.m // CONSUMERS

    @property
    def boxes(self) -> list[tuple[int, int]]:
        """Rows and columns at which the boxes of a warpgroup begin."""
        return list(itertools.product(range(0, self.own, BOX), range(0, self.n, BOX)))

    @property
    def pair(self) -> tuple[int, int]:
        """Blocks of a cluster along the rows and the columns of the result."""
        return (1 + (self.share == "rhs"), 1 + (self.share == "lhs"))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurement of a product (m, k) · (k, n) of 16-bit floats on one H200.

    Attributes:
      m, n, k: sizes.
      tile: the fastest tile tried.
      faster: whether the kernel beat cuBLAS with XLA's fusion around it by more than the 7% by
        which runs of one program differ.
    """

    m: int
    n: int
    k: int
    tile: ProductTile
    faster: bool = False

    def distance(self, m: int, n: int, k: int) -> float:
        """Binary logarithm of the largest factor between sizes."""
        return max(abs(math.log2(a / b)) for a, b in ((m, self.m), (n, self.n), (k, self.k)))


_BANDS = ProductTile(128, 256, 64, 4, "rhs", 8)
_BROAD_BANDS = ProductTile(128, 256, 64, 4, "rhs", 16)
_ALONE = ProductTile(128, 256, 64, 4, None, 8)
_LEFT_SHARED = ProductTile(128, 256, 64, 4, "lhs", 8)
_THREE_STAGES = ProductTile(128, 256, 64, 3, "rhs", 8)
_TWO_PRODUCTS = ProductTile(128, 128, 64, 4, "rhs", 8)
_TWO_PRODUCTS_ALONE = ProductTile(128, 128, 64, 4, None, 8)

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
        Measured(4096, 4096, 8192, ProductTile(256, 128, 64, 4, "lhs", 8)),
        Measured(8192, 8192, 8192, _ALONE),
    ),
    # Alone 512 is 1.09 times as fast; within a scan over micro-batches it is not.
    "linear_accumulate": (
        Measured(4096, 4096, 512, ProductTile(128, 128, 64, 4, "rhs", 8, prefetch=True)),
        Measured(4096, 4096, 1024, ProductTile(128, 128, 64, 4, "lhs", 16, prefetch=True)),
        Measured(4096, 4096, 2048, _BROAD_BANDS),
        Measured(4096, 4096, 8192, _BROAD_BANDS),
    ),
    "gated_fwd": (),  # the fastest tile is the default one
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
        Measured(4096, 11008, 1024, ProductTile(128, 128, 64, 4, "rhs", 16), faster=True),
        Measured(4096, 11008, 2048, _TWO_PRODUCTS, faster=True),
    ),
}
"""Measurements by kernel name."""


def faster(name: str, m: int, n: int, k: int) -> bool:
    """Whether ``implementation=None`` takes the kernel `name` for a product."""
    return tile_for(name, "auto", m, n, k) is not None


def tile_for(name: str, mode: Mode, m: int, n: int, k: int) -> ProductTile | None:
    """Tile of the kernel `name` for a product of these sizes; None for plain JAX."""
    if not m * n * k:
        return None
    if mode == "interpret":  # the interpreter does not know the TMA's reductions
        return ProductTile(128, 64, 64, 2, None, prefetch=True)
    near = [row for row in MEASURED[name] if row.distance(m, n, k) <= 1]
    if not near:
        return None if mode == "auto" else _unmeasured(name, m, n)
    nearest = min(near, key=lambda row: row.distance(m, n, k))
    return None if mode == "auto" and not nearest.faster else nearest.tile


def _unmeasured(name: str, m: int, n: int) -> ProductTile:
    """Largest tile that leaves work for all multiprocessors."""
    two_products = name in ("gated_fwd", "gated_bwd", "gated_dweights", "gated_accumulate")
    columns = 128 if two_products else 256
    if two_products or -(-m // 128) * -(-n // columns) >= num_sms():
        return ProductTile(128, columns, 64, 4, "rhs" if m > 128 else None)
    return ProductTile(128, 128, 64, 4, None)
