"""What a block is given: its part of a call, its shared memory, and what other parts hand on.

Barriers (commit_smem) come before a slot is copied to again; no lane reads what another writes.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel
from jaxkern.ops.linear_scan.tiling import Options, parts, tiles

BLOCK, PART = grid_axes("block", "part")

_UNROLL = 8
"""Steps unrolled in a loop."""

_FOLD = 8
"""Parts whose carries are loaded together, to wait for memory once."""

_TOKENS = 32
"""A copy of int32 is a multiple of so many: each of 128 lanes announces its share, whole bytes."""

_ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the kernels know about a call while they are compiled.

    Step k of chunk c is step c · steps + k in the order of the recurrence, which is that of memory
    unless `reverse`. The last `tail` steps, where they fill no chunk, are the last of a chunk that
    overlaps the one before.
    """

    length: int
    dim: int
    steps: int
    slots: int
    reverse: bool
    per_part: int  # whole chunks
    packed: bool  # segments, each from a state of its own

    @property
    def whole(self) -> int:
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
        """Where a chunk starts in memory."""
        first = jnp.minimum(chunk * self.steps, self.length - self.steps)
        return self.length - self.steps - first if self.reverse else first

    def row(self, k: Any) -> Any:
        """Where step k of a chunk is in it."""
        return self.steps - 1 - k if self.reverse else k

    def loop(
        self, valid: int, step: Callable[..., Any], carry: Any, backwards: bool = False
    ) -> Any:
        """``carry = step(row, carry)`` for the last `valid` steps of a chunk."""

        def body(i, carry):
            k = self.steps - 1 - i if backwards else self.steps - valid + i
            return step(self.row(k), carry)

        return lax.fori_loop(0, valid, body, carry, unroll=math.gcd(_UNROLL, valid))

    def range(self, part: Any) -> tuple[Any, Any, Any]:
        """First chunk of a part, its number of whole ones, and of chunks with a tail's."""
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
        """A (LANES,) row of shared or global memory in fp32."""
        return plgpu.load(ref, layout=_ROW, optimized=False).astype(jnp.float32)

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), _ROW)

    def multiply(self, product: jax.Array, state: jax.Array) -> jax.Array:
        """product · state, where a factor of 0 makes 0 of an infinite product."""
        return jnp.where(state == 0, self.zeros(), product * state)

    def where(self, condition: Any, value: jax.Array, otherwise: jax.Array) -> jax.Array:
        """A choice by a scalar; Mosaic has it for arrays only."""
        return jnp.where(self.zeros() + jnp.where(condition, 1.0, 0.0) > 0, value, otherwise)

    def entered(self, smem: Any, slot: Any, row: Any) -> Any:
        """The state that a step begins from, see :func:`jaxkern.ops.segments.entered`."""
        return smem.entered[slot, row] if self.packed else None

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

    def forgotten(self, entered: Any, product: jax.Array) -> jax.Array:
        """The product of a over some steps: NaN, and so to the end, where a segment began.

        It hides no product that is NaN: what is passed on is NaN then, too.
        """
        if entered is None:
            return product
        return self.where(entered < 0, product, self.zeros() + float("nan"))

    def decayed(self, product: jax.Array, state: jax.Array) -> jax.Array:
        """product · state; 0 where a segment began in between, whatever the state is."""
        after = self.multiply(product, state)
        return jnp.where(product != product, self.zeros(), after) if self.packed else after


def scan_of(options: Options, a: Any, b: Any, *, arrays: int, packed: bool) -> Scan:
    """The call as the forward (3 arrays) or the backward (5) sees it."""
    tile = options.tiles or tiles(a, b)
    batch, length, dim = a.shape
    scan = Scan(
        length=length,
        dim=dim,
        steps=options.steps(a, b),
        slots=tile.fwd_slots if arrays == 3 else tile.bwd_slots,
        reverse=options.reverse,
        per_part=1,
        packed=packed,
    )
    nbytes = a.size * max(a.dtype.itemsize, b.dtype.itemsize)
    count = tile.parts or parts(batch * scan.columns, scan.whole, scan.steps, arrays, nbytes)
    return dataclasses.replace(scan, per_part=-(-scan.whole // count))


def padded(*arrays: Any) -> list[Any]:
    """`arrays` with channels added up to a number that the TMA can copy; None stays."""
    dim = arrays[0].shape[-1]
    itemsize = min(v.dtype.itemsize for v in arrays if v is not None)
    missing = max(LANES - dim, -dim % (16 // itemsize))
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


def scratch_of(scan: Scan, **arrays: Any) -> dict[str, Any]:
    """Slots for a chunk of each array (B, L, D), for one state of (B, C, D) named before, and for
    one row of (B, C, T) named entered; None is left out."""

    def slot(name: str, array: Any) -> tuple[int, ...]:
        match name:
            case "before":
                return (LANES,)
            case "entered":
                return array.shape[2:]
            case _:
                return scan.steps, LANES

    slots = {
        name: plgpu.SMEM((scan.slots, *slot(name, array)), array.dtype)
        for name, array in arrays.items()
        if array is not None
    }
    return {**slots, "arrived": plgpu.Barrier(num_arrivals=len(slots), num_barriers=scan.slots)}


def stream(scan: Scan, smem: Any, refs: dict[str, Any], chunk: Any, ranges: Any, carry: Any):
    """``carry = body(c, slot, carry)`` for the chunks c = ``chunk(i)``.

    Args:
      scan: the call.
      smem: the slots, by the names of `refs`.
      refs: the arrays in global memory, or None.
      chunk: the number of the i-th chunk.
      ranges: (end, body) for consecutive ranges of i.
      carry: what is handed from chunk to chunk.
    """
    batch, channels = scan.block()
    total = ranges[-1][0]
    given = {name: ref for name, ref in refs.items() if ref is not None}

    def fetch(i):
        @pl.when(i < total)
        def _():
            slot, c = lax.rem(i, scan.slots), chunk(i)
            for name, ref in given.items():
                target = getattr(smem, name).at[slot]
                if name == "entered":
                    source = ref.at[batch, c]
                else:
                    time = c if name == "before" else pl.ds(scan.start(c), scan.steps)
                    source = ref.at[batch, time, channels]
                plgpu.copy_gmem_to_smem(source, target, smem.arrived.at[slot])

    for i in range(scan.slots - 1):
        fetch(jnp.int32(i))

    def run(body, i, carry):
        slot = lax.rem(i, scan.slots)
        plgpu.commit_smem()  # all lanes are done with the slot before
        fetch(i + scan.slots - 1)
        plgpu.barrier_wait(smem.arrived.at[slot])
        return body(chunk(i), slot, carry)

    begin = 0
    for end, body in ranges:
        carry = lax.fori_loop(begin, end, functools.partial(run, body), carry)
        begin = end
    return carry


def launch_carry(
    scan: Scan, name: str, a: Any, x: Any, initial: Any, entered: Any, *, transposed: bool
) -> Any:
    """What every part hands on if nothing comes in, and the product of its a: (S−1, B, D), fp32.

    Forward, all parts but the last hand on; transposed, all but the first.
    """
    handed = jax.ShapeDtypeStruct((scan.parts - 1, a.shape[0], scan.dim), jnp.float32)
    given, names = present(a=a, x=x, entered=entered, initial=initial)
    return launch_kernel(
        functools.partial(_carry_kernel, scan, transposed, names),
        out_type=(handed, handed),
        scratch_types=scratch_of(scan, a=a, x=x, entered=entered),
        grid=(scan.parts - 1, a.shape[0] * scan.columns),
        grid_names=(PART, BLOCK),
        kernel_name=name,
    )(*given)


def present(**arrays: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Those that are not None, and their names, for :func:`by_name`."""
    given = {name: array for name, array in arrays.items() if array is not None}
    return tuple(given.values()), tuple(given)


def by_name(names: tuple[str, ...], refs: tuple[Any, ...]) -> Any:
    """A kernel's references by name; None for one that is not there."""
    return types.SimpleNamespace(**{**_ABSENT, **dict(zip(names, refs, strict=True))})


_ABSENT = dict.fromkeys(("start", "initial", "entered", "handed_product", "handed_state", "states"))


def _carry_kernel(scan, transposed, names, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    refs = by_name((*names, "product", "state"), refs)
    batch, channels = scan.block()
    between = lax.axis_index(PART)
    first, _, count = scan.range(between + transposed)

    def steps(valid):
        def body(c, slot, carry):
            del c

            def step(row, carry):
                product, state = carry
                a, x = (scan.load(ref.at[slot, row]) for ref in (smem.a, smem.x))
                entered = scan.entered(smem, slot, row)
                if transposed:
                    state = scan.begun(entered, None, a * (state + x))
                else:
                    state = a * scan.begun(entered, refs.initial, state) + x
                after = scan.multiply(product, a)
                if scan.packed:
                    after = jnp.where(product != product, product, after)
                return scan.forgotten(entered, after), state

            return scan.loop(valid, step, carry, backwards=transposed)

        return body

    whole, tail = steps(scan.steps), steps(scan.tail)
    if transposed:
        tails = count - scan.range(between + 1)[1]
        ranges = [(tails, tail), (count, whole)] if scan.tail else [(count, whole)]
        chunk = lambda i: first + count - 1 - i
    else:
        ranges = [(count, whole)]
        chunk = lambda i: first + i
    init = (scan.zeros() + 1.0, scan.zeros())
    copied = {"a": refs.a, "x": refs.x, "entered": refs.entered}
    product, state = stream(scan, smem, copied, chunk, ranges, init)
    refs.product[between, batch, channels] = product
    refs.state[between, batch, channels] = state


def fold(scan: Scan, handed: Any, count: Any, index: Callable[[Any], Any], state: Any) -> Any:
    """`state` after the parts ``index(0)`` … ``index(count − 1)``, in that order."""
    batch, channels = scan.block()

    def group(g, state):
        order = [g * _FOLD + k for k in range(_FOLD)]
        loaded = []
        for i in order:
            s = index(jnp.minimum(i, count - 1))
            loaded.append([scan.load(ref.at[s, batch, channels]) for ref in handed])
        for i, (product, passed) in zip(order, loaded, strict=True):
            valid = scan.zeros() + jnp.where(i < count, 1.0, 0.0)
            state = jnp.where(valid > 0, passed + scan.decayed(product, state), state)
        return state

    return lax.fori_loop(0, (count + _FOLD - 1) // _FOLD, group, state)
