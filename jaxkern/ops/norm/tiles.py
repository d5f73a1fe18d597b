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

_STAGES = 4
"""Rows on their way to a multiprocessor, where they fit, and two to a block."""

_SHARED_BYTES = 224 << 10
_MAX_WARPGROUPS = 8
_MAX_CLUSTER = 16


@dataclasses.dataclass(frozen=True)
class Forward:
    """Tiles of the forward.

    Attributes:
      rows: how a block's rows lie on its lanes.
      parts: blocks, or clusters, for each group, which go through the rows; 0 for one for each row
        or tile.
      stages: rows or tiles on their way through shared memory, 0 to read global memory.
      weight: where weight and bias stay from row to row, or whether they are read again; without
        parts, whether they are read before the row's sums, into registers, or after.
    """

    rows: Tile | Strip
    parts: int = 0
    stages: int = 0
    weight: Literal["registers", "shared", "again"] = "registers"

    def __post_init__(self) -> None:
        assert self.weight != "shared" or isinstance(self.rows, Strip), self
        assert self.parts or not self.stages, self


@dataclasses.dataclass(frozen=True)
class Backward:
    """Tiles of the backward.

    Attributes:
      rows: how a block's rows lie on its lanes.
      parts: blocks, or clusters, for each group; each sums its own part of dw and db.
      stages: rows or tiles on their way through shared memory, 0 to read global memory.
      keep: whether v − mean and g stay in registers while the row's sums are taken, or are
        computed again.
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
    m: int,
    n: int,
    groups: int,
    itemsize: int,
    streams: tuple[int, ...],
    params: tuple[int, ...],
    interpret: bool,
) -> Forward:
    """The tiles of the forward of (m, groups, n).

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      streams: bytes of an element of each input of that size.
      params: bytes of an element of the weight and of the bias, where there are.
      interpret: whether Pallas's interpreter runs it.
    """
    per_lane = 32 // len(streams)
    rows = tile_for(n, per_lane * LANES, itemsize) if n <= _SHORT else None
    if rows is None or m < rows.rows:
        few = m * groups * max(1, n // 8192) < num_sms()
        rows = strip(n, itemsize, 8 if few else per_lane, 32, 8 if few else 4, interpret)
    per_sm = max(1, 4 * LANES // rows.threads)
    in_registers = rows.own <= 32 and (rows.threads == LANES or len(params) < 2)
    parts = max(1, min(rows.rows_of(m), clusters(per_sm, rows) // groups))
    if rows.rows_of(m) < 3 * parts and (isinstance(rows, Tile) or rows.blocks == 1):
        return Forward(rows, weight="registers" if rows.own <= 32 else "again")
    boxed, row_bytes = n % BOX == 0, sum(streams)
    if not in_registers and boxed and (stages := ring(rows, row_bytes, per_sm, sum(params))):
        return Forward(rows, parts, stages, "shared")
    stages = ring(rows, row_bytes, per_sm) if boxed else 0
    return Forward(rows, parts, stages, "registers" if in_registers else "again")


@functools.cache
def backward(
    m: int,
    n: int,
    groups: int,
    itemsize: int,
    streams: tuple[int, ...],
    params: tuple[int, ...],
    sums: int,
    plain: bool,
    interpret: bool,
) -> Backward:
    """The tiles of the backward of (m, groups, n).

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      streams: bytes of an element of each input of that size.
      params: bytes of an element of the parameters that are read.
      sums: parameters with a gradient, weight and bias.
      plain: whether there is neither activation nor gate.
      interpret: whether Pallas's interpreter runs it.
    """
    boxed, row_bytes = n % BOX == 0, sum(streams)
    simple = plain and sums < 2
    if n <= _SHORT:
        tile = tile_for(n, 4096 * 4 // max(4, row_bytes), itemsize)
        if tile and m >= tile.rows:
            stages = ring(tile, row_bytes, 2) if boxed else 0
            parts = max(1, min(tile.rows_of(m), clusters(2, tile) // groups))
            return Backward(tile, parts, stages, True, "registers")
    per_lane = 64 if simple and 4096 < n <= 8192 else 32
    long, window = n > 8192, 64 if simple and n <= 8192 else 8 if n > 8192 else 16
    rows = strip(n, itemsize, per_lane, window, 4, interpret)
    if long and boxed:
        # As many blocks as hold two rows and the weight in shared memory.
        while per_lane > 4 and not ring(rows, row_bytes, 1, sum(params)):
            per_lane //= 2
            rows = strip(n, itemsize, per_lane, window, 4, interpret)
    per_sm = 1
    if rows.threads == LANES and n <= 4096:
        per_sm = min(8, 8192 // n) if simple else max(2, min(4, 4096 // n))
    parts = max(1, min(m, clusters(per_sm, rows) // groups))
    if long and boxed and (stages := ring(rows, row_bytes, 1, sum(params))):
        return Backward(rows, parts, stages, simple, "shared")
    weight = "registers" if per_lane == 32 and not long else "again"
    stages = ring(rows, row_bytes, per_sm) if boxed else 0
    return Backward(rows, parts, stages, not long, weight)


def clusters(per_sm: int, rows: Tile | Strip) -> int:
    """How many of a block, or of a cluster, run at a time.

    A cluster is in one GPC. Which of an H200's 132 multiprocessors are in which differs from chip
    to chip: one ran 30 clusters of 4 blocks that fill a multiprocessor each, 15 of 8, 7 of 16.
    Counted here are 7 GPCs of 18 and a rest, which is less: one cluster too many
    would have a second wave to itself.
    """
    sms, blocks = num_sms(), getattr(rows, "blocks", 1)
    full, rest = divmod(sms, 18)
    return per_sm * max(1, full * (18 // blocks) + rest // blocks)


def ring(rows: Tile | Strip, row_bytes: int, per_sm: int, param_bytes: int = 0) -> int:
    """Rows that fit in shared memory beside a block's parameters, 0 for too few."""
    room = _SHARED_BYTES // per_sm - 2048 - rows.scratch_bytes
    room -= rows.threads * rows.own * param_bytes
    stages = room // (rows.threads * rows.held * row_bytes)
    return min(stages, max(2, _STAGES // per_sm)) if stages >= 2 else 0
