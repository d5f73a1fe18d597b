"""How rows are spread over the GPU: the choice of tiles."""

import dataclasses
import functools
from typing import Any, Literal

from jaxkern.mosaic.launch import LANES, interpreted, num_sms
from jaxkern.ops.norm.rows import Strip, Tile, tile_for
from jaxkern.ops.norm.windows import windows

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
      waves: rows of each block, of the first `parts` blocks, of the next as many, and so on; empty
        where the first ones share all rows.
      ahead: whether a row's sums are sent before the row before is finished, which is then read
        from shared memory once more.
    """

    rows: Tile | Strip
    parts: int = 0
    stages: int = 0
    weight: Literal["registers", "shared", "again"] = "registers"
    waves: tuple[int, ...] = ()
    ahead: bool = False

    def __post_init__(self) -> None:
        assert self.weight != "shared" or isinstance(self.rows, Strip), self
        assert self.parts or not (self.stages or self.waves or self.ahead), self
        assert self.stages or not self.ahead, self

    def blocks(self, m: int) -> int:
        """How many go through a group's `m` rows."""
        return self.parts * max(1, len(self.waves)) or self.rows.rows_of(m)


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
      paced: whether a row's statistics are read when it is its turn, and its slot is filled again
        when it is the next one's. Blocks that wait for nothing but their rows get unequal shares
        of the bandwidth, and the last one is waited for.
    """

    rows: Tile | Strip
    parts: int
    stages: int
    keep: bool
    weight: Literal["registers", "shared", "again"]
    paced: bool = False
    waves = ()

    def blocks(self, m: int) -> int:
        """How many go through a group's `m` rows."""
        del m
        return self.parts

    def __post_init__(self) -> None:
        assert self.parts >= 1, self
        assert self.weight != "shared" or isinstance(self.rows, Strip), self


def strip(
    n: int,
    itemsize: int,
    per_lane: int,
    window: int,
    spread: int,
    widest: int = 8,
) -> Strip:
    """A row of `n`, `per_lane` elements a lane where the cluster is not at its limit.

    Args:
      n: elements of the row.
      itemsize: bytes of an element of the narrowest array.
      per_lane: elements of a row in a lane's registers.
      window: elements of a lane's window.
      spread: warpgroups before the row is split over blocks.
      widest: most neighbouring elements that a lane reads at a time.
    """
    width = max(n, LANES)
    parts = 1
    while parts * per_lane * LANES < width and parts < _MAX_WARPGROUPS * _MAX_CLUSTER:
        parts *= 2
    warpgroups = min(parts, 2 if interpreted() else spread)
    blocks = 1 if interpreted() else min(parts // warpgroups, _MAX_CLUSTER)
    parts = warpgroups * blocks
    return Strip(_windows(width, itemsize, parts, window * LANES, widest), n, warpgroups, blocks)


@functools.cache
def _windows(width: int, itemsize: int, parts: int, most: int, widest: int) -> Any:
    """The windows that waste least on `parts` warpgroups."""
    choices = []
    for divide in (1, 2, 3, 4):
        size = min(width, most) // divide // LANES * LANES or LANES
        w = windows(width, size, max(itemsize, 16 // widest))
        work = -(-w.count // parts) * parts * w.size
        choices.append((work * (1 + 1 / (w.vec * itemsize)), divide, w))
    return min(choices, key=lambda c: c[:2])[2]


def forward(
    m: int,
    n: int,
    groups: int,
    itemsize: int,
    streams: tuple[int, ...],
    params: tuple[int, ...],
    costly: bool,
) -> Forward:
    """The tiles of the forward of (m, groups, n).

    The fastest on an H200 in bf16 over 16384 rows, and 2²⁷ elements beyond 8192; in percent of the
    copy bandwidth, with one parameter and with two:

    * 256: 82, 73. A block for 16 rows, all in one wave: what needs a second one loses 12.
    * 1024: 89, 86. Rows through the ring, in waves; 87, 84 in equal shares.
    * 2048: 95, 90. A block a row; two rows a block with a bias, as it would be read again.
    * 4096: 94, 94. Two rows a block; 86 in equal shares.
    * 5120: 96, 93. The same by 40 elements a lane, three rows with a bias; 81, 79 by two
      warpgroups.
    * 8192: 96, 96. Two rows a block; a row, reading weight and bias again, with a bias.
    * 11008: 90, 82. Two warpgroups, in waves; 59 reading the weight again.
    * 16384: 96, 92. A block a row, reading the weight again; in waves with a bias.
    * 20480, 24576, 28672: 94, 95 and 94, 74, 86 and 76. Two rows a block, 64 elements a lane, where
      clusters give 82 to 90; clusters with a bias.
    * 32768: 89, 89. A block a row by 64 elements a lane; clusters with a bias, 72 otherwise.
    * 65536: 90, 87. Clusters with two rows on their way each; 87 with more.
    * 131072: 89, 82. The next row's sums sent ahead with a bias; 76 otherwise.
    * 262144: 87, 79. Sums sent ahead; 84, 62 otherwise.

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      streams: bytes of an element of each input of that size.
      params: bytes of an element of the weight and of the bias, where there are.
      costly: whether there is an activation or a gate.
    """
    boxed, row_bytes, per_lane = n % BOX == 0, sum(streams), 32 // len(streams)
    one, activated = len(params) < 2, costly and len(streams) == 1

    def strips(per_lane: int, window: int = 32, spread: int = 4) -> Strip:
        return strip(n, itemsize, per_lane, window, spread)

    def rereading(per_lane: int) -> Strip:
        """Lanes of 8 bf16 would read half of every sector of an fp32 weight at a time."""
        return strip(n, itemsize, per_lane, 8, 4, widest=4)

    def in_blocks(rows: Strip, each: int) -> Forward | None:
        """`each` rows a block, two of them on their way at a time."""
        fits = boxed and ring(rows, row_bytes, 2)
        return Forward(rows, -(-m // each), 2) if fits else None

    def in_waves(rows: Tile | Strip, per_sm: int, first: float) -> Forward | None:
        parts = max(1, clusters(per_sm, rows) // groups)
        count, stages = rows.rows_of(m), ring(rows, row_bytes, per_sm)
        if not boxed or not stages or count < 3 * parts:
            return None
        return Forward(rows, parts, stages, waves=_waves(count, parts, first))

    tile = tile_for(n, per_lane * LANES, itemsize) if n <= _SHORT else None
    if tile and m >= tile.rows:
        if not activated and (waves := in_waves(tile, 4, 0.8)):
            return waves
        few = tile.rows_of(m) < 3 * clusters(4, tile)
        if n > _SHORT // 2 and (blocks := in_blocks(strips(8), 2 if one and few else 4)):
            return blocks
        return Forward(tile, weight="registers" if one else "again")
    if m * groups * max(1, n // 8192) < num_sms():
        return _forward_clusters(strips(8, spread=8), m, groups, row_bytes, one)
    if strips(per_lane).blocks > 1:
        several = len(streams) > 1
        wide = rereading(2 * per_lane)
        if one and not costly and not several and wide.blocks == 1:
            blocks = in_blocks(strips(2 * per_lane), 2) if n < 32768 else None
            return blocks or Forward(wide, weight="again")
        return _forward_clusters(strips(per_lane), m, groups, row_bytes, one, several)
    best = None
    if n > 8192:
        even = one and n % (per_lane * LANES) == 0
        best = None if even else in_waves(strips(2 * per_lane, spread=2), 2, 0.9)
    elif costly:
        best = None if activated else in_waves(strips(per_lane), 2, 0.8)
    elif one and n < 4096:
        best = Forward(strips(per_lane))
    elif 4096 < n <= 6144:
        best = in_blocks(strips(2 * per_lane), 2 if one else 3)
    elif one or n <= 4096:
        best = in_blocks(strips(per_lane), 2)
    return best or Forward(rereading(per_lane), weight="again")


def _forward_clusters(
    rows: Strip, m: int, groups: int, row_bytes: int, one: bool, several: bool = False
) -> Forward:
    """The forward of few rows, or of rows of several blocks each.

    Args:
      rows, m, groups, row_bytes: of one group.
      one: whether there is a weight alone.
      several: whether several arrays are read.
    """
    if rows.blocks == 1:
        return Forward(rows)
    parts = max(1, min(m, clusters(1, rows) // groups))
    stages = ring(rows, row_bytes, 1) if rows.n % BOX == 0 else 0
    if not stages:
        return Forward(rows, parts, weight="again")
    if rows.even and stages > 2 and (several or rows.blocks >= (16 if one else 8)):
        return Forward(rows, parts, stages if several else 3, ahead=True)
    return Forward(rows, parts, 2)


def _waves(count: int, parts: int, first: float) -> tuple[int, ...]:
    """Shares of `count` rows for `parts` blocks at a time, the part `first` in the first wave.

    Multiprocessors get unequal shares of the bandwidth, so equal shares of the rows take unequal
    times, up to 30% on an H200. The blocks of later waves start wherever others have ended.
    """
    each = -(-count // parts)
    waves = [max(1, round(first * each))]
    while sum(waves) < each:
        waves.append((each - sum(waves) + 1) // 2)
    return tuple(waves)


def backward(
    m: int,
    n: int,
    groups: int,
    itemsize: int,
    streams: tuple[int, ...],
    params: tuple[int, ...],
    sums: int,
    plain: bool,
) -> Backward:
    """The tiles of the backward of (m, groups, n).

    The fastest on an H200 in bf16 over 16384 rows, and 2²⁷ elements beyond 8192; in percent of the
    copy bandwidth, with one sum and with two:

    * 256: 62, 55. Two blocks a multiprocessor; more cost more to add up than they gain.
    * 1024: 83, 78. The same.
    * 2048: 89, 81. Four blocks, two with two sums.
    * 4096: 95, 92. Two blocks; paced, which with two sums loses 4 and with one gains 6.
    * 8192: 95, 96. One block of two warpgroups; paced with one sum.
    * 16384: 95, 93. 64 elements a lane, paced; with two sums clusters and 32 elements.
    * 32768 to 131072: 91 to 97, 95 to 87. Clusters, 32 elements a lane; from 131072 on 64 with
      two sums.
    * 262144: 92, 78. The largest clusters, the weight in shared memory.

    With SiLU:

    * 2048: 89, 78. Four blocks a multiprocessor, two with two sums.
    * 4096: 85 to 88, 91; with GELU 90 by two sums. Windows of 8: wider ones, 85, 80 and 75, leave
      registers too few.
    * 8192: 99, 94. Half a row a lane, in shared memory; two warpgroups with two sums, 88 otherwise.
    * 16384: 97, 92. Half a row a lane.

    Args:
      m, n, groups: sizes.
      itemsize: bytes of an element of the narrowest array.
      streams: bytes of an element of each input of that size.
      params: bytes of an element of the parameters that are read.
      sums: parameters with a gradient, weight and bias.
      plain: whether there is neither activation nor gate.
    """
    boxed, row_bytes = n % BOX == 0, sum(streams)
    simple = plain and sums < 2
    if n <= _SHORT:
        tile = tile_for(n, 4096 * 4 // max(4, row_bytes), itemsize)
        if tile and m >= tile.rows:
            stages = ring(tile, row_bytes, 2) if boxed else 0
            parts = max(1, min(tile.rows_of(m), clusters(2, tile) // groups))
            return Backward(tile, parts, stages, True, "registers")

    def choice(per_lane: int, window: int, spread: int, weight: Any, keep: bool, **k: Any) -> Any:
        """With as many stages as fit, of at most so many."""
        rows = strip(n, itemsize, per_lane, window, spread)
        per_sm, most = k.pop("per_sm", 1), k.pop("most", _STAGES)
        parts = max(1, min(m, clusters(per_sm, rows) // groups))
        kept = sum(params) if weight == "shared" else 0
        stages = min(most, ring(rows, row_bytes, per_sm, kept, most)) if boxed else 0
        if not boxed and weight == "shared":
            weight = "again"
        return Backward(rows, parts, stages, keep, weight, **k)

    if n <= 4096 and simple:
        return choice(32, 32, 4, "registers", True, per_sm=min(8, 8192 // n), most=2, paced=True)
    if n <= 8192 and not plain and len(streams) > 2:
        return choice(16, 8, 2, "registers", True, per_sm=max(1, min(4, 4096 // n)))
    if n <= 4096 and (plain or (sums == 2 and n <= 2048)):
        return choice(32, 16, 4, "registers", True, per_sm=max(2, min(4, 4096 // n)))
    if n <= 4096:
        return choice(32, 8, 4, "registers", True, per_sm=min(4, 8192 // n))
    if n <= 8192 and (plain or sums == 2):
        return choice(32, 8, 2 if plain else 4, "registers", True, paced=simple)
    if not boxed:
        return choice(32, 8, 4, "again", simple)
    tried = []
    if plain:
        # dw, db, the weight and the row in registers take clusters; longer rows, shared memory.
        if simple and n <= 16384:
            tried.append(choice(64, 8, 2, "shared", False, paced=True))
        elif n <= (131072 if simple else 65536):
            tried.append(choice(32, 8, 2, "registers", True))
        elif not simple:
            tried.append(choice(64, 8, 2, "shared", False))
    # An activation takes more registers and more warps: half a row a lane, but computed once.
    halved = not plain and len(streams) == 2
    if halved and 8192 < n <= 131072:
        tried.append(choice(16, 8, 4, "registers", True))
    per_lane = 16 if halved else 32
    while per_lane >= 4:
        tried.append(choice(per_lane, 8, 4, "shared", simple or halved))
        per_lane //= 2
    return next((t for t in tried if t.stages), tried[-1])


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


def ring(
    rows: Tile | Strip, row_bytes: int, per_sm: int, param_bytes: int = 0, most: int = 0
) -> int:
    """Rows that fit in shared memory beside a block's parameters, 0 for too few."""
    room = _SHARED_BYTES // per_sm - 2048 - rows.scratch_bytes
    room -= rows.threads * rows.own * param_bytes
    stages = room // (rows.threads * rows.held * row_bytes)
    return min(stages, most or max(2, _STAGES // per_sm)) if stages >= 2 else 0
