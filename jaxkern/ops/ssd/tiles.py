"""Tiles of the SSD scan: heads, channels and tokens over warpgroups and blocks.

A *unit* is SLICE channels of a head; all products are linear in them. A warpgroup of the forward
and of the carry holds the state of a unit, (SLICE, N) in fp32, in the accumulators of its tensor
cores, and goes through the tokens STEP by STEP; the warpgroups of a block have units of one group
and share its B and C in shared memory. Where units are too few to fill the GPU, the sequence is cut
into parts of whole chunks, and the carry finds the states that they begin with.

A block of the backward has a chunk of a batch row, and goes through the units of a group.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import grid_axes, num_sms
from jaxkern.mosaic.wgmma import TILE, without_wgmma

CHUNK = 128
"""Tokens of a chunk: states are saved at the starts of chunks."""
STEP = 64
"""Tokens that the forward takes at once, the least that makes a tensor core's instruction."""
STEPS = CHUNK // STEP
SLICE = 64
"""Channels of a unit, the rows of a tensor core's instruction."""
BOX = 64
"""Elements that are swizzled together: 128 bytes of 16-bit elements."""
TILE_ROWS = 8
"""Rows of shared memory that make one of its tiles."""
HELD_STATES = 128
"""States per launch; more take several launches. With 256, the backward's gradients of B and C
alone would take all registers of a lane."""
MAX_STATES = 256
LEAST_CHANNELS = 16
"""Least channels of a head: with fewer, more than three quarters of a unit would be padding."""

STAGES = 3
"""Stages of the forward's ring of B and C."""
FORWARD_WARPGROUPS = 2
"""Units of a block of the forward, each with a warpgroup that holds its state."""
SCORES_WARPGROUPS = 2
"""Further warpgroups, which alternate in computing M for all units; shared memory has M for one
step of each."""
STATE_REGISTERS, SCORES_REGISTERS = 176, 80
"""Registers of a lane that holds a state, and of one that computes M. With 8 more for either, the
other spills. Where there are too few, ptxas may also serialize products, without spills: it then
waits for each of their instructions, and says so (C7512). On an H100 the kernel takes 0.252 ms at
(8, 4096, 64, 64, 128, 1); where each of two warpgroups did everything, 0.282 (JAX 0.11.2).
"""
CARRY_WARPGROUPS = 4, 2
"""Warpgroups of a block of the carry: with more, it reads B or C for more units."""
SAVING_WARPGROUPS = 2
"""Warpgroups of a block of the carry that saves the states of all chunks. It takes the time of its
stores, and twice as many blocks begin and end at different times. At (8, 4096, 64, 64, 128, 1) that
takes an H200 0.149 ms, and with four warpgroups 0.159 (JAX 0.11.2).
"""
FULL = 0.7
"""The share of the multiprocessors from which the sequence is not cut for more blocks. A cut costs
a pass that reads x once more, a third of the forward's time."""


@dataclasses.dataclass(frozen=True)
class SsdTile:
    """The sizes of a call, and how a launch of the forward or the carry is cut.

    Attributes:
      chunks: of the sequence, the last one perhaps not full, or those that a launch goes through.
      first_chunk: of these.
      warpgroups: of a block that hold states.
      part_chunks: chunks of a part of the sequence.
      every: of how many chunks the first one's state is saved; 0 saves none.
      stages: of the ring of B and C.
    """

    batch: int
    heads: int
    groups: int
    channels: int
    states: int
    chunks: int
    first_chunk: int = 0
    warpgroups: int = FORWARD_WARPGROUPS
    part_chunks: int = 0
    every: int = 0
    stages: int = STAGES

    @property
    def slices(self) -> int:
        return self.channels // SLICE

    @property
    def units(self) -> int:
        """Units per group."""
        return self.heads // self.groups * self.slices

    @property
    def columns(self) -> int:
        """Blocks for the units of a group."""
        return -(-self.units // self.warpgroups)

    @property
    def parts(self) -> int:
        return -(-self.chunks // self.part_chunks)

    @property
    def grid(self) -> int:
        return self.parts * self.batch * self.groups * self.columns

    @property
    def saved(self) -> int:
        """States that are saved of a unit."""
        return -(-self.chunks // self.every)

    def with_gate(self) -> "SsdTile":
        """Tile with the stages that fit shared memory where z is staged, too."""
        return dataclasses.replace(self, stages=2) if self.every else self

    def cut(self, *warpgroups: int) -> "SsdTile":
        """Cut so that it fills the GPU, with the first of these numbers of warpgroups that does.

        Where none does without cutting the sequence, the first is taken. Without wgmma a block has
        one warpgroup.
        """
        sms, warpgroups = num_sms(), (1,) if by_mma() else warpgroups
        for count in warpgroups:
            whole = dataclasses.replace(self, warpgroups=count, part_chunks=self.chunks)
            if whole.grid >= FULL * sms:
                return whole
        whole = dataclasses.replace(self, warpgroups=warpgroups[0], part_chunks=self.chunks)
        parts = max(1, min(sms // whole.grid, self.chunks))
        return dataclasses.replace(whole, part_chunks=-(-self.chunks // parts))

    def without_last(self, reverse: bool) -> "SsdTile":
        """Tile without the last of several parts, in reverse without the first one."""
        if reverse:
            first, chunks = self.part_chunks, self.chunks - self.part_chunks
        else:
            first, chunks = 0, (self.parts - 1) * self.part_chunks
        return dataclasses.replace(self, first_chunk=first, chunks=chunks)

    def finer(self, warpgroups: int) -> tuple["SsdTile", int]:
        """Tile with `warpgroups`, nothing saved, and parts cut if that fills the GPU.

        Also returns the number of subparts of a part.
        """
        warpgroups = 1 if by_mma() else warpgroups
        whole = dataclasses.replace(self, warpgroups=warpgroups, every=0)
        subparts = max(1, min(num_sms() // whole.grid, self.part_chunks))
        while self.part_chunks % subparts:
            subparts -= 1
        return dataclasses.replace(whole, part_chunks=self.part_chunks // subparts), subparts


@dataclasses.dataclass(frozen=True)
class SsdBackwardTile:
    """Grid of a launch of the backward: a group's units may be split over blocks."""

    scan: SsdTile
    splits: int

    @classmethod
    def of(cls, scan: SsdTile) -> "SsdBackwardTile":
        """Tile with enough splits to fill the GPU; each gives partial sums of dB and dC in fp32."""
        blocks = scan.batch * scan.groups * scan.chunks
        return cls(scan, max(1, min(num_sms() // blocks, scan.units)))

    @property
    def split_units(self) -> int:
        return -(-self.scan.units // self.splits)

    @property
    def grid(self) -> int:
        return self.splits * self.scan.batch * self.scan.groups * self.scan.chunks


def unsupported(x: Any, B: Any, C: Any, z: Any, num_segments: int | None) -> str | None:
    """Why the kernels, forward and backward, cannot take such arrays, or ``None``."""
    if num_segments is not None:
        return "it has num_segments, and the kernels keep one state of a row, not its segments'"
    for name, v in (("x", x), ("B", B), ("C", C), ("z", z)):
        if v is not None and v.dtype != jnp.bfloat16:
            return f"{name} is {v.dtype}, and the kernels take bfloat16, in which they keep states"
    if 0 < x.shape[-1] < LEAST_CHANNELS:
        return f"x has {x.shape[-1]} channels a head, and the kernels take {LEAST_CHANNELS} or more"
    if B.shape[-1] > MAX_STATES:
        return f"B has {B.shape[-1]} states, and the kernels take at most {MAX_STATES}"
    return None


def unfit_for_gpu(options: Any, x: Any, B: Any, C: Any, z: Any = None) -> str | None:
    """Why the kernels cannot take a pass."""
    return unsupported(x, B, C, z, options.num_segments)


def by_mma() -> bool:
    """Whether the kernels multiply by mma.sync: where there is no wgmma."""
    return without_wgmma() is not None


BLOCK, WARPGROUP = grid_axes("block", "warpgroup")


class SsdUnit:
    """A unit and the part of the sequence of this block.

    Attributes:
      warpgroup: index of the unit's warpgroup among the block's that hold states.
      batch, group, head: indices; `channels` is a slice of the head's.
      part: of the sequence, `count` steps from `first` on.
    """

    def __init__(self, scan: SsdTile, warpgroup: Any):
        self.warpgroup, block = warpgroup, lax.axis_index(BLOCK)
        column, rest = lax.rem(block, scan.columns), lax.div(block, scan.columns)
        self.group, rest = lax.rem(rest, scan.groups), lax.div(rest, scan.groups)
        self.batch, self.part = lax.rem(rest, scan.batch), lax.div(rest, scan.batch)
        # What is left over of a block does the last unit again, with the same results.
        unit = jnp.minimum(column * scan.warpgroups + self.warpgroup, scan.units - 1)
        self.head, self.channels = locate(scan, self.group, unit)
        self.first = (scan.first_chunk + self.part * scan.part_chunks) * STEPS
        self.count = (
            jnp.minimum(scan.part_chunks, scan.chunks - self.part * scan.part_chunks) * STEPS
        )


def locate(scan: SsdTile, group: Any, unit: Any) -> tuple[Any, Any]:
    """Head and channels of a group's unit."""
    head = group * (scan.heads // scan.groups) + lax.div(unit, scan.slices)
    return head, pl.ds(lax.rem(unit, scan.slices) * SLICE, SLICE)


def first_state(scan: SsdTile, refs: Any, at: SsdUnit) -> Any:
    """(P, N): what the part begins with."""
    if refs.initial is None:
        return plgpu.layout_cast(jnp.zeros((SLICE, scan.states), jnp.float32), TILE)
    initial = refs.initial.at[at.batch, at.part, at.head, at.channels]
    return plgpu.load(initial, layout=TILE, optimized=False).astype(jnp.float32)


def of_step(n: Any) -> Any:
    """The tokens of a step."""
    return pl.ds(n * STEP, STEP)


class StepDecays:
    """Sums of log-decays and step sizes of the `n`-th step's tokens.

    Args:
      ref: the sums of its chunk, (2, CHUNK) in shared memory.
      n: the number of the step, in the sequence.
    """

    def __init__(self, ref: Any, n: Any):
        self._ref = ref
        self._first = lax.rem(n, STEPS) * STEP

    def _load(self, k: int, layout: Any) -> Any:
        return plgpu.load(self._ref.at[k, pl.ds(self._first, STEP)], layout=layout)

    def sums(self, layout: Any) -> Any:
        """(64,): of each token, from the chunk's first token on."""
        return self._load(0, layout)

    def sizes(self, layout: Any) -> Any:
        """(64,): step sizes."""
        return self._load(1, layout)

    def before(self) -> Any:
        """The sum before the step."""
        return jnp.where(self._first > 0, self._ref[0, STEP - 1], 0.0)

    def last(self) -> Any:
        """The sum at the step's last token."""
        return self._ref[0, self._first + STEP - 1]

    def total(self) -> Any:
        """The sum over the step."""
        return self.last() - self.before()
