"""The kernels of the linear scan: the forward, the backward, and the carries of a cut sequence.

A block has 128 channels of a batch row, one a lane, and a part of the sequence, whose chunks come
through a ring of shared memory. No lane reads what another writes, so the only barriers are those
of the ring. Lanes beyond the last channel repeat the work of its lane.

The lanes copy, on every GPU, rows that the TMA cannot: shorter than 128 channels, or no multiple of
16 bytes.

Where the sequence is cut into parts, a first kernel finds the carry of each part: the product of
its a, and the state after it from zeros. Every block of the main kernel folds the carries of the
parts before its own (in the backward: after it) into the state that it starts from.
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

from jaxkern.core.target import interpreted
from jaxkern.mosaic.lanes import ROW, load_short_row, store_short_row, zeros
from jaxkern.mosaic.launch import LANES, grid_axes, launch_named
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
from jaxkern.ops.linear_scan.reference import (
    last_state,
    reference_bwd,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
)
from jaxkern.ops.linear_scan.tiles import LinearScanOptions, parts, tiles
from jaxkern.ops.sections import state_after_all
from jaxkern.ops.segments import with_zeros

BLOCK, PART = grid_axes("block", "part")

_UNROLL = 8
"""Steps unrolled in a loop."""

_TOKENS = 32
"""The least int32 tokens of a copy: each of 128 lanes announces its share, in whole bytes."""

_FOLD = 8
"""Carries that are loaded together, to wait for memory once."""

_COPIED = "a", "b", "x", "dout", "before", "entered"
"""Arrays that come through the ring."""


@dataclasses.dataclass(frozen=True)
class LinearScanPlan:
    """The static sizes of a call, and a block's accesses to its arrays.

    Step k of chunk c is step c · steps + k in the order of the recurrence, which is memory order
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
        """First row of a chunk in memory."""
        first = jnp.minimum(chunk * self.steps, self.length - self.steps)
        return self.length - self.steps - first if self.reverse else first

    def loop(
        self, valid: int, step: Callable[..., Any], carry: Any, backwards: bool = False
    ) -> Any:
        """Runs ``carry = step(row, carry)`` over the last `valid` steps of a chunk."""

        def body(i, carry):
            k = self.steps - 1 - i if backwards else self.steps - valid + i
            return step(self.steps - 1 - k if self.reverse else k, carry)

        return lax.fori_loop(0, valid, body, carry, unroll=math.gcd(_UNROLL, valid))

    def range(self, part: Any) -> tuple[Any, Any, Any]:
        """First chunk of a part, number of its whole chunks, and number with the tail's."""
        first = part * self.per_part
        whole = jnp.minimum(self.per_part, self.whole - first)
        is_last = part == self.parts - 1
        return first, whole, whole + jnp.where(is_last, self.chunks - self.whole, 0)

    def block(self) -> tuple[Any, Any]:
        """Batch row and channels of this block; a row's last block overlaps the one before."""
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
        """Loads a row of a chunk in the ring as (LANES,), fp32; without `row`, its only one."""
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

    def multiply(self, product: jax.Array, state: jax.Array) -> jax.Array:
        """product · state, but 0 for a factor of 0 and an infinite product."""
        return jnp.where(state == 0, zeros(), product * state)

    def where(self, condition: Any, value: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Chooses by a scalar; Mosaic can choose by arrays only."""
        return jnp.where(zeros() + jnp.where(condition, 1.0, 0.0) > 0, value, otherwise)

    def entered(self, smem: Any, stage: Any, row: Any) -> Any:
        """Number of the state that a step begins from (:func:`jaxkern.ops.segments.entered`)."""
        return smem.entered[stage, row] if self.packed else None

    def begun(self, entered: Any, initial: Any, state: jax.Array) -> jax.Array:
        """The state before a step: where a segment begins, its initial state.

        Args:
          entered: number of that state in `initial`; negative within a segment.
          initial: (B, S + 1, D) in global memory, the last of zeros; ``None`` for zeros.
          state: the state after the step before.
        """
        if entered is None:
            return state
        if initial is None:
            return self.where(entered < 0, state, zeros())
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
          refs: arrays in global memory.
          smem: shared memory.
          chunk: gives the number of the i-th chunk.
          ranges: (end, body) of consecutive ranges of i.
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
        """Launches ``kernel(scan, refs, smem)`` on the first `parts` of every column.

        Its shared memory is the ring and its `own`.
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


def _plan(options: LinearScanOptions, a: Any, b: Any, arrays: int, packed: bool) -> LinearScanPlan:
    """Chooses the parts for a pass that reads and writes `arrays` arrays."""
    tile = options.tiles or tiles(a, b)
    batch, length, dim = a.shape
    scan = LinearScanPlan(
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


def _entered_by_chunk(scan: LinearScanPlan, entered: jax.Array | None) -> jax.Array | None:
    """Copies (B, L) to a row for each chunk, (B, C, T).

    A chunk may start at any token, and the TMA cannot.
    """
    if entered is None:
        return None
    starts = scan.start(jnp.arange(scan.chunks))
    rows = entered[:, starts[:, None] + jnp.arange(scan.steps)]  # (B, C, steps)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -scan.steps % _TOKENS)), constant_values=-1)


# Forward


def launch_fwd(options: LinearScanOptions, a: Any, b: Any, initial_state: Any, entered: Any):
    """h (B, L, D), its last state, and to save the state before every chunk, (B, C, D), fp32."""
    if a.size == 0:
        return reference_fwd(options, a, b, initial_state, entered)
    start, initial = initial_state, None
    if options.num_segments is not None:  # of segments, and zeros behind them: (B, S + 1, D)
        start, initial = None, None if start is None else with_zeros(start)
    scan = _plan(options, a, b, arrays=3, packed=entered is not None)
    entered = _entered_by_chunk(scan, entered)
    carry = _launch_carry(scan, a, b, initial, entered)
    states = jax.ShapeDtypeStruct((scan.batch, scan.chunks, scan.dim), jnp.float32)
    got = scan.launch(
        "linear_scan_fwd",
        _fwd_kernel,
        scan.parts,
        {"a": a, "b": b, "start": start, "initial": initial, "entered": entered, **carry},
        {
            "out": jax.ShapeDtypeStruct(b.shape, b.dtype),
            "states": states if options.save else None,
        },
    )
    out = got["out"]
    return out, last_state(options, out, initial_state), got["states"]


def _fwd_kernel(scan: LinearScanPlan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)

    def steps(valid):
        def body(c, stage, h):
            if refs.states is not None:
                scan.store(refs.states, h, (batch, c, channels))
            start = scan.start(c)

            def step(row, h):
                h = scan.begun(scan.entered(smem, stage, row), refs.initial, h)
                h = scan.load_copied(smem.a, stage, c, row) * h
                h = h + scan.load_copied(smem.b, stage, c, row)
                scan.store(refs.out, h.astype(refs.out.dtype), (batch, start + row, channels))
                return h

            return scan.loop(valid, step, h)

        return body

    h = zeros()
    if refs.start is not None:
        h = h + scan.load(refs.start.at[batch, channels])
    if refs.product is not None:
        h = _fold(scan, refs, part, lambda i: i, h)
    ranges = [(whole, steps(scan.steps))]
    if scan.tail:
        ranges.append((count, steps(scan.tail)))
    scan.stream(refs, smem, lambda i: first + i, ranges, h)


# Backward


def launch_bwd(options: LinearScanOptions, *args: Any) -> tuple[Any, Any, Any]:
    """da and db (B, L, D), and the gradient of the initial states, fp32.

    `initial_state` is given where segments have their own, and `dfinal` where rows have one.
    """
    a, b, initial_state, entered, states, dout, dfinal = args
    if a.size == 0:
        return reference_bwd(options, *args)
    count = options.num_segments
    seen = None
    if count is not None:  # whether a row has a segment, (B, S)
        seen = jnp.any(entered[:, :, None] == jnp.arange(count), axis=1)
    initial = None if count is None or initial_state is None else with_zeros(initial_state)
    scan = _plan(options, a, b, arrays=5, packed=entered is not None)
    entered = _entered_by_chunk(scan, entered)
    carry = _launch_carry(scan, a, dout, None, entered, transposed=True)
    lead = (scan.batch,) if count is None else (scan.batch, count)
    ins = {"a": a, "b": b, "before": states, "dout": dout, "initial": initial, "entered": entered}
    ins["dfinal"] = dfinal
    got = scan.launch(
        "linear_scan_bwd",
        _bwd_kernel,
        scan.parts,
        {**ins, **carry},
        {
            "da": jax.ShapeDtypeStruct(a.shape, a.dtype),
            "db": jax.ShapeDtypeStruct(b.shape, b.dtype),
            "dstate": jax.ShapeDtypeStruct((*lead, scan.dim), jnp.float32),
        },
        {"h": plgpu.SMEM((scan.steps, LANES), jnp.float32)},  # before every step
    )
    da, db, dstate = (got[name] for name in ("da", "db", "dstate"))
    if seen is not None:  # the kernel writes nothing for a segment that is absent
        dstate = jnp.where(seen[..., None], dstate, 0.0)
    return da, db, dstate


def _bwd_kernel(scan: LinearScanPlan, refs: Any, smem: Any) -> None:
    """Runs every chunk up, from its saved state to those before each step, and down again."""
    batch, channels = scan.block()
    part = lax.axis_index(PART)
    first, whole, count = scan.range(part)
    of_segments = len(refs.dstate.shape) == 3

    def steps(valid):
        def body(c, stage, passed):  # passed = a[t+1] · dh[t+1]
            start = scan.start(c)

            def up(row, h):
                h = scan.begun(scan.entered(smem, stage, row), refs.initial, h)
                smem.h[row] = h
                h = scan.load_copied(smem.a, stage, c, row) * h
                return h + scan.load_copied(smem.b, stage, c, row)

            def down(row, passed):
                dh = scan.load_copied(smem.dout, stage, c, row) + passed
                da = dh * scan.load(smem.h.at[row])
                scan.store(refs.db, dh.astype(refs.db.dtype), (batch, start + row, channels))
                scan.store(refs.da, da.astype(refs.da.dtype), (batch, start + row, channels))
                passed = scan.load_copied(smem.a, stage, c, row) * dh
                entered = scan.entered(smem, stage, row)
                if of_segments:

                    @pl.when((entered >= 0) & (entered < refs.dstate.shape[1]))
                    def _():
                        scan.store(refs.dstate, passed, (batch, entered, channels))

                return scan.begun(entered, None, passed)

            before = 1.0 * scan.load_copied(smem.before, stage, c)
            scan.loop(valid, up, before)
            return scan.loop(valid, down, passed, backwards=True)

        return body

    passed = zeros()
    if refs.dfinal is not None:
        passed = passed + scan.load(refs.dfinal.at[batch, channels])
    if refs.product is not None:
        last = scan.parts - 2
        passed = _fold(scan, refs, last + 1 - part, lambda i: last - i, passed)
    ranges = [(count, steps(scan.steps))]
    if scan.tail:
        ranges.insert(0, (count - whole, steps(scan.tail)))
    passed = scan.stream(refs, smem, lambda i: first + count - 1 - i, ranges, passed)
    if not of_segments:

        @pl.when(part == 0)
        def _():
            scan.store(refs.dstate, passed, (batch, channels))


# Carries of parts


def launch_device_carry(
    options: LinearScanOptions, a: Any, x: Any, entered: Any, *, transposed: bool = False
) -> tuple[Any, Any]:
    """The carry of the part of a sequence on this device, a product and a state, both (B, D).

    The product of a is NaN where a segment begins. The state is the last one from zeros, where `x`
    is b; `transposed`, the gradient of the state before the part, where `x` is dout.
    """
    if a.size == 0:
        return (reference_bwd_carry if transposed else reference_carry)(options, a, x, entered)
    scan = _plan(options, a, x, arrays=3, packed=entered is not None)
    entered = _entered_by_chunk(scan, entered)
    got = _launch_carry(scan, a, x, None, entered, transposed=transposed, every_part=True)
    product, state = got["product"], got["state"]
    return jnp.prod(product, 0), state_after_all(product, state, reverse=transposed)


def _launch_carry(
    scan: LinearScanPlan,
    a: Any,
    x: Any,
    initial: Any,
    entered: Any,
    *,
    transposed: bool = False,
    every_part: bool = False,
) -> dict[str, Any]:
    """The carry of every part, (parts − 1, B, D) in fp32; ``None`` for a single part.

    Forward, of all parts but the last; transposed, of all but the first; or of `every_part`.
    """
    if scan.parts == 1 and not every_part:
        return {"product": None, "state": None}
    count = scan.parts - (not every_part)
    carry = jax.ShapeDtypeStruct((count, scan.batch, scan.dim), jnp.float32)
    return scan.launch(
        f"linear_scan_{'bwd' if transposed else 'fwd'}_carry",
        functools.partial(_carry_kernel, transposed),
        count,
        {"a": a, "x": x, "entered": entered, "initial": initial},
        {"product": carry, "state": carry},
    )


def _carry_kernel(transposed: bool, scan: LinearScanPlan, refs: Any, smem: Any) -> None:
    batch, channels = scan.block()
    number, count = lax.axis_index(PART), refs.product.shape[0]
    skipped = scan.parts - count if transposed else 0  # the first parts
    first, whole, chunks = scan.range(number + skipped)

    def steps(valid):
        def body(c, stage, carry):
            def step(row, carry):
                product, state = carry
                a, x = (scan.load_copied(ref, stage, c, row) for ref in (smem.a, smem.x))
                entered = scan.entered(smem, stage, row)
                if transposed:
                    state = scan.begun(entered, None, a * (state + x))
                else:
                    state = a * scan.begun(entered, refs.initial, state) + x
                after = scan.multiply(product, a)
                if scan.packed:  # NaN, to the end, once a segment begins
                    after = jnp.where(product != product, product, after)
                    after = scan.where(entered < 0, after, zeros() + float("nan"))
                return after, state

            return scan.loop(valid, step, carry, backwards=transposed)

        return body

    if transposed:
        chunk, ranges = lambda i: first + chunks - 1 - i, [(chunks, steps(scan.steps))]
        if scan.tail:
            ranges.insert(0, (chunks - whole, steps(scan.tail)))
    else:
        chunk, ranges = lambda i: first + i, [(chunks, steps(scan.steps))]
        if scan.tail and count == scan.parts:
            ranges = [(whole, steps(scan.steps)), (chunks, steps(scan.tail))]
    carry = scan.stream(refs, smem, chunk, ranges, (zeros() + 1.0, zeros()))
    for ref, value in zip((refs.product, refs.state), carry, strict=True):
        scan.store(ref, value, (number, batch, channels))


def _fold(
    scan: LinearScanPlan, refs: Any, count: Any, index: Callable[[Any], Any], state: Any
) -> Any:
    """`state` after the parts ``index(0)`` … ``index(count − 1)``, in that order."""
    batch, channels = scan.block()
    carries = refs.product, refs.state

    def group(g, state):
        order = [g * _FOLD + k for k in range(_FOLD)]
        loaded = []
        for i in order:
            s = index(jnp.minimum(i, count - 1))
            loaded.append([scan.load(ref.at[s, batch, channels]) for ref in carries])
        for i, (product, passed) in zip(order, loaded, strict=True):
            counts = zeros() + jnp.where(i < count, 1.0, 0.0)
            held = scan.multiply(product, state)
            if scan.packed:  # 0 where a segment began in between, whatever the state is
                held = jnp.where(product != product, zeros(), held)
            state = jnp.where(counts > 0, passed + held, state)
        return state

    return lax.fori_loop(0, (count + _FOLD - 1) // _FOLD, group, state)
