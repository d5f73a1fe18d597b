"""A block's share of a call: its chunks and channels, and the ring that they come through.

A block has 128 channels of a batch row, one for each lane, and a part of the sequence. No lane
reads what another writes, so the only barriers are those of the ring. Where there are fewer
channels, the lanes that are left over do the work of the last one again.

Rows that the TMA cannot copy, shorter than 128 channels or no multiple of 16 bytes, are copied by
lanes on every GPU.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import load_short_row, store_short_row
from jaxkern.mosaic.launch import LANES, grid_axes, interpreted
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.ring import (
    Ring,
    close_copies,
    copied_channels,
    lanes_row,
    lanes_start,
    release_stage,
    ring_scratch,
    tma,
)
from jaxkern.ops.linear_scan.tiles import Options, parts, tiles

BLOCK, PART = grid_axes("block", "part")

_UNROLL = 8
"""Steps unrolled in a loop."""

_TOKENS = 32
"""A copy of int32 is a multiple of so many: each of 128 lanes announces its share, whole bytes."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the kernels know about a call while they are compiled.

    Step k of chunk c is step c · steps + k in the order of the recurrence, which is that of memory
    unless `reverse`. The last `tail` steps, where they fill no chunk, are the last of a chunk that
    overlaps the one before.
    """

    batch: int
    length: int
    dim: int
    steps: int  # of a chunk
    stages: int  # of the ring
    reverse: bool
    per_part: int  # whole chunks
    packed: bool  # whether there are segments
    by_lanes: bool  # whether lanes copy

    @property
    def whole(self) -> int:
        """Whole chunks of the sequence."""
        return self.length // self.steps

    @property
    def tail(self) -> int:
        return self.length % self.steps

    @property
    def chunks(self) -> int:
        return self.whole + (self.tail > 0)

    @property
    def parts(self) -> int:
        return -(-self.whole // self.per_part)

    @property
    def columns(self) -> int:
        return -(-self.dim // LANES)

    @property
    def width(self) -> int:
        """Channels of a block."""
        return min(self.dim, LANES)

    def start(self, chunk: Any) -> Any:
        """The first row in memory of a chunk."""
        first = jnp.minimum(chunk * self.steps, self.length - self.steps)
        return self.length - self.steps - first if self.reverse else first

    def row(self, k: Any) -> Any:
        """The row of a chunk in which its step k is."""
        return self.steps - 1 - k if self.reverse else k

    def loop(
        self, valid: int, step: Callable[..., Any], carry: Any, backwards: bool = False
    ) -> Any:
        """Runs ``carry = step(row, carry)`` over the last `valid` steps of a chunk."""

        def body(i, carry):
            k = self.steps - 1 - i if backwards else self.steps - valid + i
            return step(self.row(k), carry)

        return lax.fori_loop(0, valid, body, carry, unroll=math.gcd(_UNROLL, valid))

    def range(self, part: Any) -> tuple[Any, Any, Any]:
        """The first chunk of a part, its number of whole chunks, and of chunks with the tail's."""
        first = part * self.per_part
        whole = jnp.minimum(self.per_part, self.whole - first)
        is_last = part == self.parts - 1
        return first, whole, whole + jnp.where(is_last, self.chunks - self.whole, 0)

    def block(self) -> tuple[Any, Any]:
        """This block's batch row and channels; the last block of a row overlaps the one before."""
        block = lax.axis_index(BLOCK)
        column = lax.rem(block, self.columns)
        start = jnp.minimum(column * LANES, self.dim - self.width)
        return lax.div(block, self.columns), pl.ds(start, self.width)

    def load(self, ref: Any) -> jax.Array:
        """Loads a row of shared or global memory as (LANES,), fp32."""
        if ref.shape == (LANES,):
            return plgpu.load(ref, layout=ROW, optimized=False).astype(jnp.float32)
        return load_short_row(ref)

    def load_copied(self, ref: Any, stage: Any, chunk: Any, row: Any = None) -> jax.Array:
        """Loads a row that came through the ring as (LANES,), fp32.

        Args:
          ref: the stages of an array.
          stage: the chunk's.
          chunk: its number.
          row: of the chunk; ``None`` for what is one row.
        """
        at = (stage,) if row is None else (stage, row)
        if ref.shape[-1] > self.width:
            batch, channels = self.block()
            if row is None:
                number = batch * self.chunks + chunk
            else:
                number = batch * self.length + self.start(chunk) + row
            offset = number * self.dim + channels.start
            at = *at, pl.ds(lanes_start(offset, ref.dtype), self.width)
        return self.load(ref.at[at])

    def store(self, ref: Any, value: jax.Array, at: tuple[Any, ...]) -> None:
        """Stores `value`, (LANES,), to a row ``ref[at]`` of global memory of the same dtype."""
        if self.width == LANES:
            ref[at] = value
        else:
            store_short_row(ref.at[at], value)

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)

    def multiply(self, product: jax.Array, state: jax.Array) -> jax.Array:
        """product · state, where a factor of 0 makes 0 of an infinite product."""
        return jnp.where(state == 0, self.zeros(), product * state)

    def where(self, condition: Any, value: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Chooses by a scalar; Mosaic can choose by arrays only."""
        return jnp.where(self.zeros() + jnp.where(condition, 1.0, 0.0) > 0, value, otherwise)

    def entered(self, smem: Any, stage: Any, row: Any) -> Any:
        """The state that a step begins from, see :func:`jaxkern.ops.segments.entered`."""
        return smem.entered[stage, row] if self.packed else None

    def begun(self, entered: Any, initial: Any, state: jax.Array) -> jax.Array:
        """The state before a step: where a segment begins, its initial state.

        Args:
          entered: its number, of those in `initial`.
          initial: (B, S + 1, D) in global memory, the last of zeros; ``None`` for zeros.
          state: after the step before.
        """
        if entered is None:
            return state
        if initial is None:
            return self.where(entered < 0, state, self.zeros())
        batch, channels = self.block()
        load = lambda: self.load(initial.at[batch, jnp.maximum(entered, 0), channels])
        return lax.cond(entered < 0, lambda: state, load)

    def scratch(self, ins: dict[str, Any]) -> dict[str, Any]:
        """The ring of the arrays that :meth:`stream` copies."""

        def shape(name: str, array: Any) -> tuple[int, ...]:
            if name == "entered":
                return array.shape[2:]
            row = lanes_row(self.width, self.dim, array.dtype) if self.by_lanes else self.width
            return (row,) if name == "before" else (self.steps, row)

        copied = {name: ins[name] for name in _COPIED if ins.get(name) is not None}
        ring = {name: (shape(name, array), array.dtype) for name, array in copied.items()}
        return ring_scratch(self.stages, ring, by_lanes=self.by_lanes)

    def stream(self, refs: Any, smem: Any, chunk: Callable[[Any], Any], ranges: Any, carry: Any):
        """Runs ``carry = body(c, stage, carry)`` over the chunks c = ``chunk(i)``.

        Args:
          refs: the arrays in global memory.
          smem: the shared memory.
          chunk: gives the number of the i-th chunk.
          ranges: (end, body) for consecutive ranges of i.
          carry: the first one.
        """
        batch, channels = self.block()
        total = ranges[-1][0]
        copied = {name: getattr(refs, name) for name in _COPIED if hasattr(smem, name)}
        stages = {name: getattr(smem, name) for name in copied}
        ring = Ring(stages, getattr(smem, "arrived", None), self.stages)

        def sources(i):
            c = chunk(i)
            for name, ref in copied.items():
                if name == "entered":
                    yield name, ref.at[batch, c]
                else:
                    rows = c if name == "before" else pl.ds(self.start(c), self.steps)
                    yield name, ref.at[batch, rows, channels]

        def fetch(i):
            pl.when(i < total)(lambda: ring.copy(i, sources(i)))
            close_copies(self.by_lanes)

        for i in range(self.stages - 1):
            fetch(jnp.int32(i))

        def run(body, i, carry):
            stage = ring.stage(i)
            release_stage(self.by_lanes)
            fetch(i + self.stages - 1)
            ring.wait(stage)
            return body(chunk(i), stage, carry)

        begin = 0
        for end, body in ranges:
            carry = lax.fori_loop(begin, end, functools.partial(run, body), carry)
            begin = end
        return carry

    def launch(
        self,
        name: str,
        kernel: Callable[..., None],
        parts: int,
        ins: dict[str, Any],
        outs: dict[str, Any],
        own: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Launches ``kernel(scan, refs, smem)`` on some parts of every column.

        Beside the ring it has its `own` shared memory.
        """
        return launch_named(
            lambda refs, smem: kernel(self, refs, smem),
            ins,
            outs,
            {**self.scratch(ins), **(own or {})},
            grid=(parts, self.batch * self.columns),
            grid_names=(PART, BLOCK),
            kernel_name=name,
        )


_COPIED = "a", "b", "x", "dout", "before", "entered"
"""The arrays that come through the ring: a chunk of (B, L, D), a row of (B, C, D) or (B, C, T)."""


def scan_of(options: Options, a: Any, b: Any, *, arrays: int, packed: bool) -> Scan:
    """The call as the forward (3 arrays) or the backward (5) sees it."""
    tile = options.tiles or tiles(a, b)
    batch, length, dim = a.shape
    scan = Scan(
        batch=batch,
        length=length,
        dim=dim,
        steps=options.steps(a, b),
        stages=tile.fwd_stages if arrays == 3 else tile.bwd_stages,
        reverse=options.reverse,
        per_part=1,
        packed=packed,
        by_lanes=not tma() or (copied_channels(dim, (a, b)) > dim and not interpreted()),
    )
    nbytes = a.size * max(a.dtype.itemsize, b.dtype.itemsize)
    columns, width = batch * scan.columns, scan.width
    count = tile.parts or parts(columns, scan.whole, scan.steps, arrays, nbytes, width)
    return dataclasses.replace(scan, per_part=-(-scan.whole // count))


def entered_by_chunk(scan: Scan, entered: jax.Array | None) -> jax.Array | None:
    """(B, L) as the rows that are copied with each chunk, (B, C, T).

    A chunk may start at any token, where the TMA cannot begin to copy.
    """
    if entered is None:
        return None
    starts = scan.start(jnp.arange(scan.chunks))
    rows = entered[:, starts[:, None] + jnp.arange(scan.steps)]  # (B, C, steps)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -scan.steps % _TOKENS)), constant_values=-1)
