"""The static arguments of a linear scan, the steps of a chunk, and the parts of a sequence."""

import dataclasses
from typing import Any

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes
from jaxkern.mosaic.launch import LANES, num_sms


@dataclasses.dataclass(frozen=True)
class LinearScanTiles:
    """Distribution of a sequence over the GPU.

    Attributes:
      steps: of a chunk, which is copied at once, and from one saved state to the next.
      fwd_stages, bwd_stages: stages of the ring in the forward and the backward, a chunk each.
      parts: parts of the sequence; ``None`` for as many as the cost model finds.
    """

    steps: int
    fwd_stages: int = 3
    bwd_stages: int = 3
    parts: int | None = None

    def __post_init__(self) -> None:
        assert self.steps >= 1, self
        assert min(self.fwd_stages, self.bwd_stages) >= 2, self


def tiles(a: Any, b: Any) -> LinearScanTiles:
    """64 bytes per channel and array in each stage.

    On an H200 at (8, 2048, 2048) in bf16, 3 stages of 32 steps took 48.6 µs forward, 4 stages 50.4
    and 4 of 16 steps 54.3; backward, 3 stages of 16, 32 and 64 steps took 107, 97 and 95.
    """
    return LinearScanTiles(steps=64 // max(a.dtype.itemsize, b.dtype.itemsize))


@dataclasses.dataclass(frozen=True)
class LinearScanOptions:
    """The static arguments of a call.

    Attributes:
      reverse: whether time runs down.
      mode: the implementation that runs.
      num_segments: segments with states of their own; ``None`` where a row has one state.
      tiles: given by tests; ``None`` for the heuristic's.
      final: whether the forward returns a row's last state.
      save: whether the forward saves states for the backward.
      sequence_axis: mesh axes over which a caller's ``shard_map`` splits L.
    """

    reverse: bool
    mode: Mode
    num_segments: int | None = None
    tiles: LinearScanTiles | None = None
    final: bool = False
    save: bool = False
    sequence_axis: Axes = ()

    def steps(self, a: Any, b: Any) -> int:
        """Steps from one saved state to the next."""
        return max(1, min((self.tiles or tiles(a, b)).steps, a.shape[1]))


def parts(
    columns: int, chunks: int, steps: int, arrays: int, nbytes: int, width: int = LANES
) -> int:
    """Chooses the number of parts of a sequence by a model of the time.

    A pass waits for memory, at 4.2 TB/s, or for the chain of steps in a block, 13 ns each forward
    and 43 backward; where these are about equal, for a part of both. More than one part costs a
    pass that reads 2 arrays at 13 ns a step, 1 µs to launch it, and 50 ns per part to fold what
    was handed on. No multiprocessor gets more than 2 blocks, the most that were measured of 128
    channels, or 4 of at most 64: there (64, 2048, 64) took 24.6 µs forward and 64.4 with the
    gradient in 4 parts, 22.8 and 57.9 in 8; (256, 2048, 1) 42.1 forward in 1 part, 55.3 in 4.

    On an H200 in bf16 these took, in µs, and the model is within 15%:

    ================  =====  =======  ========
    (B, L, D)         parts  forward  backward
    ================  =====  =======  ========
    (1, 65536, 1024)         8      212       491
    (1, 65536, 1024)        17      173       274
    (1, 65536, 1024)        33      168       241
    (1, 16384, 256)         16     27.8      64.4
    (1, 16384, 256)         64     15.2      24.1
    (1, 16384, 256)        128     17.6      22.0
    (2, 512, 512)            1      9.2      24.0
    (2, 512, 512)           16      4.7       5.9
    ================  =====  =======  ========

    Args:
      columns: blocks of channels in all batch rows.
      chunks: whole chunks of the sequence.
      steps: steps of a chunk.
      arrays: arrays that the pass reads and writes: 3 forward, 5 backward.
      nbytes: bytes of one such array.
      width: channels of a block.
    """

    def wait(length: int, arrays: int) -> float:
        memory, chain = arrays * nbytes / 4.2e6, length * (0.043 if arrays == 5 else 0.013)
        return (memory**4 + chain**4) ** 0.25

    def cost(count: int) -> float:
        length = steps * -(-chunks // count)
        return wait(length, arrays) + (count > 1) * (wait(length, 2) + 1.0 + 0.05 * count)

    narrow = width <= LANES // 2
    most = max(1, min(chunks, (4 if narrow else 2) * num_sms() // columns))
    # Where the model sees little difference few parts win, or many narrow ones.
    order = -1 if narrow else 1
    return min(range(1, most + 1), key=lambda count: (round(cost(count), 1), order * count))
