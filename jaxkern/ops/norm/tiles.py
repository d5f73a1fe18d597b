"""Tiles of the norms: the distribution of rows over the GPU.

The figures beside the branches are percentages of the copy bandwidth of an H200 in bf16, over 16384
rows, and over 2²⁷ elements for rows longer than 8192. Where there are two, the first is of one
parameter, the second of two.
"""

import dataclasses
from typing import Any, Literal

from jaxkern.mosaic.launch import LANES, num_sms, shared_memory
from jaxkern.ops.norm.reference import NormOptions
from jaxkern.ops.norm.rows import LongRow, ShortRows, long_row, short_rows

TMA_BOX = 256
"""Most elements along one dimension of a TMA copy."""

_SHORT = 1024
"""Longest row that one warp takes: 32 elements a lane."""

_STAGES = 4
"""Tiles on their way to a multiprocessor, where they fit, and two to a block."""

ParamsIn = Literal["registers", "shared", "global"]


@dataclasses.dataclass(frozen=True)
class NormForwardTile:
    """Tiles of the forward.

    Attributes:
      rows: how a tile lies in registers.
      clusters: how many go through each group's rows, a block alone being a cluster of one; 0 for
        one for each tile.
      stages: tiles on their way through shared memory, 0 to read global memory.
      params_in: where weight and bias stay from tile to tile; "global" if they are read again.
        Without `clusters`, whether they are read before the row's sums, into registers, or after.
      waves: tiles of each cluster, of the first `clusters`, of the next as many, and so on; empty
        where the first ones share all tiles.
      sums_ahead: whether a row's sums are sent before the row before is finished, which is then
        read from shared memory once more.
      keep: whether a tile stays in registers from its statistics to its output, or is read for each
        of its sums and for its output, from shared memory if `stages`. That takes 26 to 40
        registers whatever the row, where a row in registers takes up to 255, and few blocks fit.
    """

    rows: ShortRows | LongRow
    clusters: int = 0
    stages: int = 0
    params_in: ParamsIn = "registers"
    waves: tuple[int, ...] = ()
    sums_ahead: bool = False
    keep: bool = True

    def __post_init__(self) -> None:
        assert self.params_in != "shared" or isinstance(self.rows, LongRow), self
        assert self.clusters or not (self.waves or self.sums_ahead), self
        assert self.stages or not self.sums_ahead, self

    def num_clusters(self, m: int) -> int:
        """Number of blocks or clusters that are launched for a group's `m` rows."""
        return self.clusters * max(1, len(self.waves)) or self.rows.tiles(m)


@dataclasses.dataclass(frozen=True)
class NormBackwardTile:
    """Tiles of the backward.

    Attributes:
      rows: how a tile lies in registers.
      clusters: how many go through each group's rows; each sums dw and db of its own.
      stages: tiles on their way through shared memory, 0 to read global memory.
      keep: whether v − mean and g stay in registers while the row's sums are taken, or are
        computed again.
      params_in: where the parameters stay from tile to tile; "global" if they are read again.
      throttled: whether a tile's statistics are read when it begins, and its stage is refilled when
        the next one begins, not earlier. Blocks that wait for nothing but their rows get unequal
        shares of the bandwidth, and the last one is waited for.
    """

    rows: ShortRows | LongRow
    clusters: int
    stages: int
    keep: bool
    params_in: ParamsIn
    throttled: bool = False
    waves = ()

    def num_clusters(self, m: int) -> int:
        """Number of blocks or clusters that are launched for a group's `m` rows."""
        del m
        return self.clusters

    def __post_init__(self) -> None:
        assert self.clusters >= 1, self
        assert self.params_in != "shared" or isinstance(self.rows, LongRow), self


@dataclasses.dataclass(frozen=True)
class NormSizes:
    """Sizes that determine the tiles.

    Attributes:
      m, groups, n: rows, groups of a row, elements of a group.
      itemsize: bytes of an element of the narrowest array.
      streams: bytes of an element of each input of the size of x.
      params: bytes of an element of each parameter that is read.
      plain: whether there is neither activation nor gate.
    """

    m: int
    groups: int
    n: int
    itemsize: int
    streams: tuple[int, ...]
    params: tuple[int, ...]
    plain: bool

    @classmethod
    def of(
        cls, options: NormOptions, inputs: dict[str, Any], streams: list[str], params: list[str]
    ) -> "NormSizes":
        """Sizes of a pass, from its `inputs` by name, None where absent."""
        sizes = {k: v.dtype.itemsize for k, v in inputs.items() if v is not None}
        shape = inputs[streams[0]].shape
        return cls(
            inputs[streams[0]].size // shape[-1],
            shape[-1] // options.group_size,
            options.group_size,
            min(sizes.values()),
            tuple(sizes[k] for k in streams if k in sizes),
            tuple(sizes[k] for k in params if k in sizes),
            options.activation is None and inputs["gate"] is None,
        )

    @property
    def boxed(self) -> bool:
        """Whether the TMA can copy a row in boxes."""
        return self.n % TMA_BOX == 0

    @property
    def row_bytes(self) -> int:
        """Bytes per element, summed over the streams."""
        return sum(self.streams)

    def long_row(self, per_lane: int, window: int, spread: int, widest: int = 8) -> LongRow:
        return long_row(self.n, self.itemsize, per_lane, window, spread, widest)


# Forward


def forward(s: NormSizes) -> NormForwardTile:
    per_lane = 32 // len(s.streams)  # registers hold the windows of every stream
    rows = short_rows(s.n, per_lane * LANES, s.itemsize) if s.n <= _SHORT else None
    if rows and s.m >= rows.rows:
        return _forward_short(s, rows)
    if s.m * s.groups * max(1, s.n // 8192) < num_sms():
        # Too few rows for all multiprocessors: each goes to as many warpgroups as 8 elements a lane
        # make, of up to 8 to a block.
        return _forward_clusters(s, s.long_row(8, 32, 8))
    if again := _read_again(s):
        return again
    if s.long_row(per_lane, 32, 4).blocks > 1:
        return _forward_longest(s, per_lane)
    one, alone = len(s.params) < 2, not s.plain and len(s.streams) == 1
    rows, waves = s.long_row(per_lane, 32, 4), None
    # An activation alone needs registers: a block a row, weight and bias read again.
    if s.n > 8192:
        # 11008: 90, 82 in waves by two warpgroups; 59 by a block a row.
        # 16384: 92 with two parameters. With one a block a row: 96.
        if not (one and s.n % (per_lane * LANES) == 0):
            waves = _in_waves(s, s.long_row(2 * per_lane, 32, 2), 2, 0.9)
    elif not s.plain:
        waves = None if alone else _in_waves(s, rows, 2, 0.8)
    elif one and s.n < 4096:
        return NormForwardTile(rows)  # 2048: 95
    elif 4096 < s.n <= 6144:
        # 5120: 96, 93 by 40 elements a lane; 81, 79 by two warpgroups.
        waves = _rows_per_block(s, s.long_row(2 * per_lane, 32, 4), 2 if one else 3)
    elif one or s.n <= 4096:
        # 2048: 90 with two parameters, which a block a row would read again; 4096: 94, 94, and 86
        # in equal shares for all blocks; 8192: 96 with one parameter.
        waves = _rows_per_block(s, rows, 2)
    # 8192: 96 with two parameters.
    return waves or NormForwardTile(_rereading(s, per_lane), params_in="global")


def _forward_short(s: NormSizes, rows: ShortRows) -> NormForwardTile:
    one, alone = len(s.params) < 2, not s.plain and len(s.streams) == 1
    # 1024: 89, 86 through the ring, in waves; 87, 84 in equal shares.
    if not alone and (waves := _in_waves(s, rows, 4, 0.8)):
        return waves
    few = rows.tiles(s.m) < 3 * resident_clusters(4, rows)
    if s.n > _SHORT // 2:
        blocks = _rows_per_block(s, s.long_row(8, 32, 4), 2 if one and few else 4)
        if blocks:
            return blocks
    # 256: 82, 73 by a block for 16 rows, all in one wave; 12 less where a second one is needed.
    return NormForwardTile(rows, params_in="registers" if one else "global")


def _forward_longest(s: NormSizes, per_lane: int) -> NormForwardTile:
    """Rows that a block of four warpgroups does not hold by `per_lane` elements a lane."""
    one, several = len(s.params) < 2, len(s.streams) > 1
    rereading = _rereading(s, 2 * per_lane)
    if one and s.plain and not several and rereading.blocks == 1:
        # 20480, 24576, 28672: 94, 94, 86 by two rows a block, 64 elements a lane; clusters give 82
        # to 90, and with two parameters 95, 74, 76.
        blocks = _rows_per_block(s, s.long_row(2 * per_lane, 32, 4), 2) if s.n < 32768 else None
        # 32768: 89 by a block a row; clusters give 72, and with two parameters 89.
        return blocks or NormForwardTile(rereading, params_in="global")
    return _forward_clusters(s, s.long_row(per_lane, 32, 4), several)


def _forward_clusters(s: NormSizes, rows: LongRow, several: bool = False) -> NormForwardTile:
    """The forward of few rows, or of rows of several blocks each; `several` arrays are read."""
    if rows.blocks == 1:
        return NormForwardTile(rows)
    clusters = max(1, min(s.m, resident_clusters(1, rows) // s.groups))
    stages = ring_stages(rows, s.row_bytes, 1) if s.boxed else 0
    if not stages:
        return NormForwardTile(rows, clusters, params_in="global")
    # 131072: 82 with two parameters by sums ahead, 76 otherwise; 89 with one, without.
    # 262144: 87, 79 by sums ahead; 84, 62 otherwise.
    large = rows.blocks >= (16 if len(s.params) < 2 else 8)
    if rows.disjoint and stages > 2 and (several or large):
        return NormForwardTile(rows, clusters, stages if several else 3, sums_ahead=True)
    # 65536: 90, 87 by two rows on their way; 87 with one parameter by more.
    return NormForwardTile(rows, clusters, 2)


def _read_again(s: NormSizes) -> NormForwardTile | None:
    """A block a row, which is copied to shared memory and read there for each use.

    From 8192 to 16384 elements, of which four blocks fit a multiprocessor and leave the L1 cache
    room for the parameters, which every row reads. On an H100 rms_norm of 12192 × 11008 takes
    181 µs, where a copy takes 184.
    """
    rows = s.long_row(32, 8, 4)
    if not (s.plain and len(s.streams) == 1 and s.n > 8192 and s.boxed and rows.blocks == 1):
        return None
    return NormForwardTile(rows, stages=1, params_in="global", keep=False)


def _rereading(s: NormSizes, per_lane: int) -> LongRow:
    """Rows for weight and bias that are read again from global memory.

    Lanes of 8 bf16 would read half of every sector of an fp32 weight at a time.
    """
    return s.long_row(per_lane, 8, 4, widest=4)


def _rows_per_block(s: NormSizes, rows: LongRow, each: int) -> NormForwardTile | None:
    """`each` rows a block, two of them on their way at a time."""
    fits = s.boxed and ring_stages(rows, s.row_bytes, 2)
    return NormForwardTile(rows, -(-s.m // each), 2) if fits else None


def _in_waves(
    s: NormSizes, rows: ShortRows | LongRow, per_sm: int, first: float
) -> NormForwardTile | None:
    """`per_sm` blocks a multiprocessor at a time; the part `first` of all tiles in one wave.

    Multiprocessors get unequal shares of the bandwidth, so equal shares of the rows take unequal
    times, up to 30% on an H200. The blocks of later waves start wherever others have ended.
    """
    clusters = max(1, resident_clusters(per_sm, rows) // s.groups)
    count, stages = rows.tiles(s.m), ring_stages(rows, s.row_bytes, per_sm)
    if not s.boxed or not stages or count < 3 * clusters:
        return None
    each = -(-count // clusters)
    waves = [max(1, round(first * each))]
    while sum(waves) < each:
        waves.append((each - sum(waves) + 1) // 2)
    return NormForwardTile(rows, clusters, stages, waves=tuple(waves))


# Backward


def backward(s: NormSizes, sums: int) -> NormBackwardTile:
    """The tiles of the backward; `sums` parameters have a gradient, and decide like parameters."""
    if s.n <= _SHORT:
        rows = short_rows(s.n, 4096 * 4 // max(4, s.row_bytes), s.itemsize)
        if rows and s.m >= rows.rows:
            # 256: 62, 55; 1024: 83, 78. More than two blocks a multiprocessor cost more to add up
            # than they gain.
            stages = ring_stages(rows, s.row_bytes, 2) if s.boxed else 0
            clusters = max(1, min(rows.tiles(s.m), resident_clusters(2, rows) // s.groups))
            return NormBackwardTile(rows, clusters, stages, True, "registers")
    if s.n <= 4096 and s.plain:
        if sums < 2:
            # 2048: 89 by four blocks a multiprocessor; 4096: 95 by two. Throttled, 6 more.
            per_sm = min(8, 8192 // s.n)
            return _backward(s, 32, 32, 4, per_sm=per_sm, most=2, throttled=True)
        # 2048: 81; 4096: 92, and 4 less if throttled.
        return _backward(s, 32, 16, 4, per_sm=max(2, min(4, 4096 // s.n)))
    if s.n <= 8192 and not s.plain and len(s.streams) > 2:
        # Three streams or more: half as many elements a lane.
        return _backward(s, 16, 8, 2, per_sm=max(1, min(4, 4096 // s.n)))
    if s.n <= 4096:
        if sums == 2 and s.n <= 2048:
            return _backward(s, 32, 16, 4, per_sm=max(2, min(4, 4096 // s.n)))  # SiLU, 2048: 78
        # SiLU, 2048: 89; 4096: 85 to 88, 91, with GELU 90 of two sums. Wider windows leave too few
        # registers: 85, 80 of SiLU, 75 of GELU.
        return _backward(s, 32, 8, 4, per_sm=min(4, 8192 // s.n))
    if s.n <= 8192 and s.plain:
        # 8192: 95, 96 by one block of two warpgroups.
        return _backward(s, 32, 8, 2, throttled=sums < 2)
    if s.n <= 8192 and sums == 2:
        return _backward(s, 32, 8, 4)  # SiLU, 8192: 94, and 88 by half a row a lane
    return _backward_longest(s, sums)


def _backward_longest(s: NormSizes, sums: int) -> NormBackwardTile:
    simple = s.plain and sums < 2
    if not s.boxed:
        return _backward(s, 32, 8, 4, "global", simple)
    tried = []
    if s.plain:
        # dw, db, the weight and the row in registers take clusters; longer rows, shared memory.
        if simple and s.n <= 16384:
            tried.append(_backward(s, 64, 8, 2, "shared", False, throttled=True))  # 16384: 95
        elif s.n <= (131072 if simple else 65536):
            # 16384: 93 of two; 32768 to 131072: 91 to 97; of two 95 to 87, until 65536 like this.
            tried.append(_backward(s, 32, 8, 2))
        elif not simple:
            tried.append(_backward(s, 64, 8, 2, "shared", False))  # 262144: 78
    # An activation takes more registers and more warps: half a row a lane, but computed once.
    halved = not s.plain and len(s.streams) == 2
    if halved and 8192 < s.n <= 131072:
        tried.append(_backward(s, 16, 8, 4))  # SiLU, 16384: 97, 92
    # SiLU, 8192: 99. Without an activation, 262144: 92, by the largest clusters.
    per_lane = 16 if halved else 32
    while per_lane >= 4:
        tried.append(_backward(s, per_lane, 8, 4, "shared", simple or halved))
        per_lane //= 2
    return next((t for t in tried if t.stages), tried[-1])


def _backward(
    s: NormSizes,
    per_lane: int,
    window: int,
    spread: int,
    params_in: ParamsIn = "registers",
    keep: bool = True,
    *,
    per_sm: int = 1,
    most: int = _STAGES,
    throttled: bool = False,
) -> NormBackwardTile:
    """Tile of long rows, with the stages that fit shared memory, at most `most`."""
    rows = s.long_row(per_lane, window, spread)
    clusters = max(1, min(s.m, resident_clusters(per_sm, rows) // s.groups))
    if params_in == "shared" and rows.warpgroups * LANES * rows.params_per_lane * sum(s.params) > (
        shared_memory() - 3072 - rows.scratch_bytes
    ):
        params_in = "global"
    kept = sum(s.params) if params_in == "shared" else 0
    stages = min(most, ring_stages(rows, s.row_bytes, per_sm, kept, most)) if s.boxed else 0
    if not s.boxed and params_in == "shared":
        params_in = "global"
    return NormBackwardTile(rows, clusters, stages, keep, params_in, throttled)


# What fits


def resident_clusters(per_sm: int, rows: ShortRows | LongRow) -> int:
    """Number of blocks, or clusters, that run at a time, with `per_sm` blocks per SM.

    A cluster is in one GPC. Which of an H200's 132 multiprocessors are in which differs from chip
    to chip: one ran 30 clusters of 4 blocks that fill a multiprocessor each, 15 of 8, 7 of 16.
    Counted here are 7 GPCs of 18 and a rest, which is less: one cluster too many
    would have a second wave to itself.
    """
    full, rest = divmod(num_sms(), 18)
    return per_sm * max(1, full * (18 // rows.blocks) + rest // rows.blocks)


def ring_stages(
    rows: ShortRows | LongRow, row_bytes: int, per_sm: int, param_bytes: int = 0, most: int = 0
) -> int:
    """Tiles that fit in shared memory beside a block's parameters, 0 for too few."""
    threads = rows.warpgroups * LANES
    room = (shared_memory() - 3072) // per_sm - 2048 - rows.scratch_bytes
    room -= threads * rows.params_per_lane * param_bytes
    stages = room // (threads * rows.elements_per_lane * row_bytes)
    return min(stages, most or max(2, _STAGES // per_sm)) if stages >= 2 else 0
