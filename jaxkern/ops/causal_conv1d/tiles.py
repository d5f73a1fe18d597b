"""Tiles of the causal convolution, and the static options of its passes."""

import dataclasses
from typing import Literal

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes
from jaxkern.mosaic.launch import LANES, num_sms, shared_memory

Activation = Literal["silu"]

MAX_WIDTH = 8
"""The backward holds about 4 · W registers per channel of a lane."""


@dataclasses.dataclass(frozen=True)
class ConvOptions:
    """Static arguments of the passes."""

    activation: Activation | None
    mode: Mode
    final: bool = False  # whether the forward gives the last inputs of each row
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


@dataclasses.dataclass(frozen=True)
class ConvTile:
    """Tile sizes of a warpgroup.

    Attributes:
      rows: tokens of a chunk, one copy to a stage of the ring.
      stages: stages of a warpgroup's ring.
      chunks: chunks of a tile.
      vec: channels per lane; one TMA copy takes at most 256 channels.
      warpgroups: warpgroups of a backward block, which adds up their partial sums of dweight.
      tiles_each: tiles that a warpgroup computes one after the other.
    """

    rows: int
    stages: int
    chunks: int
    vec: int = 2
    warpgroups: int = 1
    tiles_each: int = 1

    def __post_init__(self) -> None:
        assert self.rows >= 1, self
        assert self.rows * self.chunks >= 2 * MAX_WIDTH, self  # a tile looks back into one other
        assert self.stages >= 2, self
        assert self.vec in (1, 2), self
        assert self.warpgroups >= 1, self
        assert self.tiles_each >= 1, self


def forward_tile(width: int, itemsize: int) -> ConvTile:
    """Tiles of 16 tokens or more and 128 channels: 91 to 97% of the copy bandwidth on an H200.

    Blocks carry nothing to each other, so that many short ones keep more copies in flight than
    longer ones. A tile reads W − 1 tokens again, and so has 24 of them for W = 4 in 16 bits:
    (8, 2048, 1536) takes 25.5 µs, and by 16 tokens × 256 channels 28.8. Of fp32, and of fewer taps,
    16 tokens in two copies are 1 to 3% faster.
    """
    if width < 4 or (width == 4 and itemsize == 4):
        return ConvTile(rows=8, stages=3, chunks=2, vec=1)
    return ConvTile(rows=max(24, 4 * width), stages=2, chunks=1, vec=1)


def backward_tile(batch: int, length: int, dim: int, width: int, itemsize: int) -> ConvTile:
    """Aims at 8 tiles per multiprocessor, which holds 4 at one channel per lane, of 32–256 tokens.

    A block of two warpgroups writes 4 · (W + 1) bytes of partial sums per channel, which are read
    once more. Where there are enough tiles, a warpgroup takes several short sequences in turn. One
    channel per lane keeps more loads in flight; two take fewer instructions, which matters where
    W > 4.
    """
    vec, columns = _columns(dim, 1 if width <= 4 else 2)
    per_sm = 8 // vec
    tiles = per_sm * num_sms() // (batch * columns) or length // 1024
    tiles = max(1, min(tiles, length // 32), -(-length // 256))
    spare = batch * tiles * columns // (per_sm * num_sms())
    rows, stages, warpgroups = 64 // (vec * itemsize), 4 - vec, min(2, batch * tiles)
    # Stages hold x and dout; the first warpgroup adds the other's fp32 partial sums.
    sums = (warpgroups - 1) * (width + 1) * LANES * vec * 4
    per_row = 2 * warpgroups * stages * LANES * vec * itemsize
    while rows > 1 and rows * per_row + sums + 1024 > shared_memory():
        rows //= 2
    return ConvTile(
        rows=rows,
        stages=stages,
        chunks=_chunks(length, tiles, rows),
        vec=vec,
        warpgroups=warpgroups,
        tiles_each=max(1, min(128 * tiles // length, spare)),
    )


def _columns(dim: int, most: int) -> tuple[int, int]:
    """Channels per lane, up to `most`, and blocks across `dim` channels."""
    dim = max(dim, LANES)
    blocks = {vec: -(-dim // (LANES * vec)) for vec in range(1, most + 1) if LANES * vec <= dim}
    vec = min(blocks, key=lambda vec: (vec * blocks[vec], -vec))
    return vec, blocks[vec]


def _chunks(length: int, tiles: int, rows: int) -> int:
    return max(-(-length // (tiles * rows)), -(-2 * MAX_WIDTH // rows))
