"""What the kernels of the SSD scan have in common: their blocks, layouts and products."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxkern.mosaic.instructions import widened
from jaxkern.mosaic.launch import grid_axes, interpreted
from jaxkern.mosaic.registers import elements, i32, inline_mlir
from jaxkern.mosaic.wgmma import ACCUMULATOR
from jaxkern.ops.ssd.tiles import SLICE, STEP, STEPS, Scan

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

TILE: Any = plgpu.Layout.WGMMA
"""The layout of accumulators, and of what is multiplied from registers."""
ROWS: Any = plgpu.Layout.WGMMA.reduce(1)
"""The layout of one number for each row of an accumulator."""
COLUMNS: Any = plgpu.Layout.WGMMA.reduce(0)


def over_rows(v: Any, columns: int) -> Any:
    """(R,), a number for each row, as (R, columns)."""
    return lax.broadcast_in_dim(v, (v.shape[0], columns), [0])


def over_columns(v: Any, rows: int) -> Any:
    """(C,), a number for each column, as (rows, C)."""
    return lax.broadcast_in_dim(v, (rows, v.shape[0]), [1])


@dataclasses.dataclass
class _Held:
    """An accumulator in Pallas's interpreter, which multiplies from shared memory alone."""

    value: Any


def with_accumulators(f: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """Runs `f` with an accumulator of the tensor cores, zero, of each shape."""
    if interpreted():
        return f(*(_Held(jnp.zeros(shape, jnp.float32)) for shape in shapes))
    return pl.run_scoped(f, *(ACCUMULATOR(shape, jnp.float32) for shape in shapes))


def accumulated(f: Callable[..., None], *begin: Any) -> list[Any]:
    """What `f` makes of accumulators that begin as these values."""
    if interpreted():
        held = [_Held(value) for value in begin]
        f(*held)
        return [acc.value for acc in held]
    return list(pl.run_state(lambda accs: f(*accs))(tuple(map(ACCUMULATOR.init, begin))))


def loop(count: Any, step: Callable[..., None], *accs: Any) -> None:
    """Runs ``step(n, *accs)`` on accumulators for each n below `count`."""
    if not interpreted():
        lax.fori_loop(0, count, lambda n, _: step(n, *accs), None)
        return

    def run(n: Any, values: list[Any]) -> list[Any]:
        return accumulated(functools.partial(step, n), *values)

    ended = lax.fori_loop(0, count, run, [acc.value for acc in accs])
    for acc, value in zip(accs, ended, strict=True):
        acc.value = value


def multiply(acc: Any, a: Any, b: Any) -> None:
    """Starts adding a · b to an accumulator; `a` may be in registers."""
    if interpreted():
        values = (v[...].astype(jnp.float32) for v in (a, b))
        acc.value = acc.value + jnp.dot(*values, precision=lax.Precision.HIGHEST)
    else:
        plgpu.wgmma(acc, a, b)


def read(acc: Any, running: int = 0) -> Any:
    """Waits until so many of the last products alone are running, and returns an accumulator."""
    return acc.value if interpreted() else plgpu.wgmma_accumulator_load(acc, wait_n=running)


def product(a: Any, b: Any, shape: tuple[int, int]) -> Any:
    """a · b in fp32."""

    def run(acc: Any) -> Any:
        multiply(acc, a, b)
        return read(acc)

    return with_accumulators(run, shape)


def wide(v: Any) -> Any:
    """`v`, in the layout of accumulators, in fp32."""
    return widened(v, TILE) if v.dtype == jnp.bfloat16 else v.astype(jnp.float32)


def causal(v: Any, *, transposed: bool = False, first: int = 0) -> Any:
    """(64, n), fp32, with −∞ above the diagonal, or if `transposed` below it.

    A lane compares one number with constants: with the columns' numbers in registers, there would
    not be enough of these.

    Args:
      v: in the layout of accumulators.
      transposed: whether rows are the earlier tokens.
      first: the number of the first column.
    """
    if interpreted():
        rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, a) for a in (0, 1))
        columns = columns + first
        return jnp.where(rows <= columns if transposed else columns <= rows, v, -jnp.inf)
    order = arith.CmpIPredicate.sle if transposed else arith.CmpIPredicate.sge

    @inline_mlir(TILE, returns=plgpu.ShapeDtypeStruct(v.shape, v.dtype, layout=TILE))
    def select(v: Any) -> Any:
        lane, f32 = mgpu_utils.thread_idx(), ir.F32Type.get()
        bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
        row = arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3))
        ahead = arith.subi(row, arith.muli(bits(0, 2), i32(2)))  # of the lane's first column
        never = arith.constant(f32, -math.inf)
        chosen = np.empty_like(v.registers)
        for index, register in np.ndenumerate(v.registers):
            column = first + 8 * index[1] - 8 * index[4]  # less the row's distance to the first
            parts = []
            for k, value in enumerate(elements(register)):
                keep = arith.cmpi(order, ahead, i32(column + k))
                parts.append(arith.select(keep, value, never))
            chosen[index] = vector.from_elements(ir.VectorType.get((len(parts),), f32), parts)
        return mgpu.FragmentedArray(_registers=chosen, _layout=v.layout, _is_signed=None)

    return select(v)


class Unit:
    """A unit and the part of the sequence of this block.

    Attributes:
      warpgroup: that of the unit, of those of the block that hold states.
      batch, group, head: indices; `channels` is a slice of the head's.
      part: of the sequence, `count` steps from `first` on.
    """

    def __init__(self, scan: Scan, warpgroup: Any):
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


def locate(scan: Scan, group: Any, unit: Any) -> tuple[Any, Any]:
    """Head and channels of a group's unit."""
    head = group * (scan.heads // scan.groups) + lax.div(unit, scan.slices)
    return head, pl.ds(lax.rem(unit, scan.slices) * SLICE, SLICE)


def first_state(scan: Scan, refs: Any, at: Unit) -> Any:
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
      ref: those of its chunk, (2, CHUNK) in shared memory.
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
