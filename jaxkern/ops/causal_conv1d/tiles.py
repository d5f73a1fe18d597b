"""How tokens and channels are spread over the GPU."""

import dataclasses
from typing import Literal

from jaxkern.core.dispatch import Mode
from jaxkern.core.split import Axes
from jaxkern.mosaic.launch import LANES, num_sms, shared_memory

Activation = Literal["silu"]

MAX_WIDTH = 8
"""The backward holds about 4 · W registers per channel of a lane."""


@dataclasses.dataclass(frozen=True)
class Options:
    activation: Activation | None
    mode: Mode
    final: bool = False  # whether the forward gives the last inputs of each row
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tokens and channels are spread over the GPU.

    A lane of a warpgroup owns `vec` channels next to each other and goes along a tile of the
    sequence, with the last W − 1 inputs in registers. A ring in shared memory is filled ahead of
    it.

    Attributes:
      rows: tokens of a chunk, copied to a stage of the ring at once.
      stages: of a warpgroup's ring.
      chunks: of a tile.
      vec: channels per lane, for as many channels as one TMA copy takes at most, 256.
      warpgroups: of a block of the backward, which adds up their partial sums of dweight.
      tiles_each: tiles that each of them takes, one after the other.
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


def forward_tiles(batch: int, length: int, dim: int, width: int, itemsize: int) -> Tiles:
    """64 blocks for a multiprocessor, which holds 9 at a time, of at least 16 tokens each.

    Nothing is carried from block to block, so many short ones keep more copies on their way than
    four that stay: 92% of the copy bandwidth on an H200, where those reach 77%. They read W − 1
    tokens again, and so are of 4 · W tokens or more.
    """
    vec, columns = _columns(dim, 2)
    tiles = _tiles_per_row(64, batch * columns, length, shortest=max(2 * MAX_WIDTH, 4 * width))
    rows = 32 // itemsize
    return Tiles(rows=rows, stages=3, chunks=_chunks(length, tiles, rows), vec=vec)


def backward_tiles(batch: int, length: int, dim: int, width: int, itemsize: int) -> Tiles:
    """8 tiles of a channel per lane for a multiprocessor, which holds 4, of 32 to 256 tokens each.

    A block of two leaves 4 · (W + 1) bytes per channel of partial sums, which are read once more.
    Where there are tiles enough, a warpgroup takes several short sequences one after the other. A
    lane with one channel has more of its lines in flight, with two it has fewer instructions, which
    count where W > 4.
    """
    vec, columns = _columns(dim, 1 if width <= 4 else 2)
    per_sm = 8 // vec
    tiles = _tiles_per_row(per_sm, batch * columns, length, shortest=32)
    tiles = max(tiles, -(-length // 256))
    spare = batch * tiles * columns // (per_sm * num_sms())
    rows, stages, warpgroups = 64 // (vec * itemsize), 4 - vec, min(2, batch * tiles)
    # Stages hold x and dout; the first warpgroup adds the other's partial sums, in fp32.
    sums = (warpgroups - 1) * (width + 1) * LANES * vec * 4
    per_row = 2 * warpgroups * stages * LANES * vec * itemsize
    while rows > 1 and rows * per_row + sums + 1024 > shared_memory():
        rows //= 2
    return Tiles(
        rows=rows,
        stages=stages,
        chunks=_chunks(length, tiles, rows),
        vec=vec,
        warpgroups=warpgroups,
        tiles_each=max(1, min(128 * tiles // length, spare)),
    )


def _columns(dim: int, most: int) -> tuple[int, int]:
    """Channels per lane, up to `most`, and blocks side by side, for `dim` channels."""
    dim = max(dim, LANES)
    blocks = {vec: -(-dim // (LANES * vec)) for vec in range(1, most + 1) if LANES * vec <= dim}
    vec = min(blocks, key=lambda vec: (vec * blocks[vec], -vec))
    return vec, blocks[vec]


def _tiles_per_row(blocks: int, columns: int, length: int, *, shortest: int) -> int:
    """Tiles of a batch row, for `blocks` on each multiprocessor."""
    tiles = blocks * num_sms() // columns or length // 1024
    return max(1, min(tiles, length // shortest))


def _chunks(length: int, tiles: int, rows: int) -> int:
    return max(-(-length // (tiles * rows)), -(-2 * MAX_WIDTH // rows))
