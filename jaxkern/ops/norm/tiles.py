"""How rows are spread over the GPU: the choice of tiles."""

import dataclasses
import functools
from typing import Any, Literal

from jaxkern.core.mosaic import LANES, num_sms, windows
from jaxkern.ops.norm.rows import Strip, Tile, tile_for

BOX = 256
"""Most elements along one dimension of a TMA copy."""

_SHORT = 1024
"""Longest row that one warp takes: 32 elements a lane."""

_MAX_BARRIERS = 32
_SHARED_BYTES = 224 << 10
_MAX_WARPGROUPS = 8
_MAX_CLUSTER = 8


@dataclasses.dataclass(frozen=True)
class Forward:
    """Tiles of the forward.

    Attributes:
      rows: how a block's rows lie on its lanes.
      parts: clusters for each group, which go through the rows and read the same strip of the
        weight again and again; 0 for a block for each row or tile.
      ahead: whether a part loads its next row before it works on one.
    """

    rows: Tile | Strip
    parts: int = 0
    ahead: bool = False


@dataclasses.dataclass(frozen=True)
class Backward:
    """Tiles of the backward.

    Attributes:
      rows: how a block's rows lie on its lanes.
      parts: blocks, or clusters, for each group; each sums its own part of dw and db.
      stages: pieces on their way through shared memory per warpgroup, 0 to read global memory.
      keep: whether g and x̂ stay in registers while the row's sums are taken, or are computed again.
      weight: where the weight stays from row to row, or whether it is read again.
    """

    rows: Tile | Strip
    parts: int
    stages: int
    keep: bool
    weight: Literal["registers", "shared", "again"]

    def __post_init__(self) -> None:
        assert self.parts >= 1, self
        assert self.weight != "shared" or isinstance(self.rows, Strip), self
        assert self.stages == 0 or self.stages >= self.rows.pieces, self


def strip(n: int, itemsize: int, per_lane: int, window: int, spread: int, interpret: bool) -> Strip:
    """A row of `n`, `per_lane` elements a lane where the cluster is not at its limit.

    Args:
      n: elements of the row.
      itemsize: bytes of an element of the narrowest array.
      per_lane: elements of a row in a lane's registers.
      window: elements of a lane's window.
      spread: warpgroups before the row is split over blocks.
      interpret: whether Pallas's interpreter runs it: it has no clusters, and few threads.
    """
    width = max(n, LANES)
    parts = 1
    while parts * per_lane * LANES < width and parts < _MAX_WARPGROUPS * _MAX_CLUSTER:
        parts *= 2
    warpgroups = min(parts, 2 if interpret else spread)
    blocks = 1 if interpret else min(parts // warpgroups, _MAX_CLUSTER)
    parts = warpgroups * blocks
    return Strip(_windows(width, itemsize, parts, window * LANES), n, warpgroups, blocks)


@functools.cache
def _windows(width: int, itemsize: int, parts: int, most: int) -> Any:
    """The windows that waste least on `parts` warpgroups."""
    choices = []
    for divide in (1, 2, 3, 4):
        w = windows(width, min(width, most) // divide // LANES * LANES or LANES, itemsize)
        work = -(-w.count // parts) * parts * w.size
        choices.append((work * (1 + 1 / (w.vec * itemsize)), divide, w))
    return min(choices, key=lambda c: c[:2])[2]


@functools.cache
def forward(
    m: int, n: int, groups: int, itemsize: int, arrays: int, centered: bool, interpret: bool
) -> Forward:
    """The tiles of the forward of (m, groups, n).

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      arrays: how many inputs have that size.
      centered: whether the mean is subtracted, which takes registers.
      interpret: whether Pallas's interpreter runs it.
    """
    if n <= _SHORT:
        tile = tile_for(n, 4096 // arrays, itemsize)
        if tile and m >= tile.rows:
            return Forward(tile)
    few = m * groups * max(1, n // 8192) < num_sms()
    per_lane = 8 if few else 32 if arrays == 1 else 16
    rows = strip(n, itemsize, per_lane, 8 if n > 8192 else 16, 8 if few else 4, interpret)
    if rows.blocks == 1:
        return Forward(rows)
    # Where one block fills a multiprocessor, nobody else reads while it writes.
    alone = centered or rows.pieces * rows.windows.size > 32 * LANES
    parts = max(1, min(m, clusters(1 if alone else 2, rows.blocks) // groups))
    return Forward(rows, parts, ahead=alone)


@functools.cache
def backward(
    m: int,
    n: int,
    groups: int,
    itemsize: int,
    row_bytes: int,
    weight_bytes: int,
    sums: int,
    plain: bool,
    interpret: bool,
) -> Backward:
    """The tiles of the backward of (m, groups, n).

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      row_bytes: bytes of an element of all inputs together.
      weight_bytes: bytes of an element of the weight, 0 without one.
      sums: parameters with a gradient, weight and bias.
      plain: whether there is neither activation nor gate.
    """
    sms = num_sms()
    boxed = n % BOX == 0
    if n <= _SHORT:
        tile = tile_for(n, 2048, itemsize)
        if tile and m >= tile.rows:
            per_sm = 4 if tile.rows * n <= 2048 else 3 if plain and sums < 2 else 2
            slot = tile.rows * n * row_bytes
            stages = max(2, min(3, _SHARED_BYTES // per_sm // slot)) if boxed else 0
            parts = max(1, min(tile.rows_of(m), per_sm * sms // groups))
            return Backward(tile, parts, stages, True, "registers" if n <= 256 else "again")
    rows = strip(n, itemsize, 32, 8 if n > 8192 else 32 if plain and sums < 2 else 16, 4, interpret)
    warpgroups, blocks = rows.warpgroups, rows.blocks
    long = rows.pieces * rows.windows.size * warpgroups > 8192
    per_sm = max(1, min(8, 2 * LANES * 32 // max(n, LANES))) if warpgroups == 1 else 1
    weight = "registers" if n <= 4096 else "again"
    stages = ring(rows, row_bytes, per_sm) if boxed else 0
    if long and boxed and (fewer := ring(rows, row_bytes, 1, weight_bytes)):
        stages, weight = fewer, "shared"
    parts = max(1, min(m, clusters(per_sm, blocks) // groups))
    return Backward(rows, parts, stages, not long, weight)


def clusters(per_sm: int, blocks: int) -> int:
    """Clusters that run at a time. Each is in one GPC, of 16 or 18 multiprocessors on an H200."""
    sms = num_sms()
    used = sms - sms % 16 if blocks > 2 * per_sm else sms
    return per_sm * used // blocks


def ring(rows: Strip, row_bytes: int, per_sm: int, weight_bytes: int = 0) -> int:
    """Pieces of a warpgroup that fit in shared memory beside its weight, 0 for too few."""
    slot = rows.windows.size * row_bytes
    room = _SHARED_BYTES // per_sm // rows.warpgroups - 1024
    stages = (room - rows.pieces * rows.windows.size * weight_bytes) // slot
    if stages <= rows.pieces:
        return 0
    stages = min(stages, 4 * rows.pieces, _MAX_BARRIERS)
    return stages - stages % rows.pieces if stages >= 2 * rows.pieces else stages
