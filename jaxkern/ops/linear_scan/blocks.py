"""A block's share of a call: its chunks and channels, and the ring that they come through.

A block has 128 channels of a batch row, one for each lane, and a part of the sequence. No lane
reads what another writes, so the only barriers are those of the ring.
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

from jaxkern.mosaic.launch import LANES, grid_axes
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.registers import ROW
from jaxkern.mosaic.ring import (
    Ring,
    close_copies,
    copied_channels,
    release_stage,
    ring_scratch,
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
        start = jnp.minimum(column * LANES, self.dim - LANES)
        return lax.div(block, self.columns), pl.ds(start, LANES)

    def load(self, ref: Any) -> jax.Array:
        """Loads a (LANES,) row of shared or global memory as fp32."""
        return plgpu.load(ref, layout=ROW, optimized=False).astype(jnp.float32)

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
        shapes = {
            **dict.fromkeys(("a", "b", "x", "dout"), (self.steps, LANES)),
            "before": (LANES,),
        }
        ring = {
            name: (shapes.get(name, ins[name].shape[2:]), ins[name].dtype)
            for name in _COPIED
            if ins.get(name) is not None
        }
        return ring_scratch(self.stages, ring)

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
            close_copies()

        for i in range(self.stages - 1):
            fetch(jnp.int32(i))

        def run(body, i, carry):
            stage = ring.stage(i)
            release_stage()
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
    )
    nbytes = a.size * max(a.dtype.itemsize, b.dtype.itemsize)
    count = tile.parts or parts(batch * scan.columns, scan.whole, scan.steps, arrays, nbytes)
    return dataclasses.replace(scan, per_part=-(-scan.whole // count))


def padded(*arrays: Any) -> list[Any]:
    """`arrays` with as many channels as the TMA can copy; None stays."""
    dim = arrays[0].shape[-1]
    missing = copied_channels(dim, [v for v in arrays if v is not None]) - dim
    return [
        v if v is None or not missing else jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
        for v in arrays
    ]


def entered_by_chunk(scan: Scan, entered: jax.Array | None) -> jax.Array | None:
    """(B, L) as the rows that are copied with each chunk, (B, C, T).

    A chunk may start at any token, where the TMA cannot begin to copy.
    """
    if entered is None:
        return None
    starts = scan.start(jnp.arange(scan.chunks))
    rows = entered[:, starts[:, None] + jnp.arange(scan.steps)]  # (B, C, steps)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -scan.steps % _TOKENS)), constant_values=-1)
