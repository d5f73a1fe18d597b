"""How the rows' kernels share out the logits: a block, of one warpgroup, takes a share of a row.

The share is the whole row where there are many rows, or else one of up to 16 parts of it.
A lane loads units, neighbouring elements that begin at multiples of 16 bytes of the whole array, so
that rows may begin at any element: those of a share before its first whole unit and after its
last, at most two units' less two, are loaded and stored one by one.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import VECTOR_BYTES, row_type

SHARES = 16
"""Most shares of a row."""

BLOCKS = 1024
"""Shares of all rows, of fewer of which rows are cut: some eight for each multiprocessor. More add
what a block does at its begin and end: on an H200 the forward of 16384 rows of 16384 elements takes
143 µs by whole rows, and 313 by shares of 1024."""

LONGEST = 2**16
"""A share has fewer elements: on an H200 both passes over 1024 rows of 65536 take 124 µs by whole
rows, and 119 by halves."""

LEAST = 8192
"""Elements that a share has where few rows are cut: to join shares takes 3 µs."""

SHORTEST = 2048
"""Classes from which on the kernels are taken. On an H200 both passes over 16384 rows of 2048 take
68 µs, XLA's 84; of 1024, 41 and 44, and of fewer rows XLA is faster."""

UNITS = 4
"""Units that a lane loads before it computes: 8 KiB of a block, of which an SM holds 4 or more."""


def shares_of(rows: int, classes: int, vec: int) -> int:
    """Counts the shares, all of one length, of each of so many rows.

    They have whole units, of `vec` elements, where the rows have.
    """
    wanted = max(-(-BLOCKS // rows), classes // LONGEST + 1)
    wanted = min(wanted, max(1, classes // LEAST))
    whole = 1 if classes % vec else vec
    counts = [n for n in range(1, SHARES + 1) if classes % (n * whole) == 0]
    return next((n for n in counts if n >= wanted), counts[-1])


@dataclasses.dataclass(frozen=True)
class Tile:
    """The share of a block.

    Attributes:
      size: elements of a share.
      vec: elements of a unit.
      access: elements that a lane loads or stores at once.
    """

    size: int
    vec: int
    access: int

    @classmethod
    def of(cls, rows: int, size: int, itemsize: int, sliced: bool) -> "Tile":
        """The tile for `rows` shares; `sliced` is whether the array is aligned as its size is."""
        vec = VECTOR_BYTES // itemsize
        if size < 2 * vec and size % vec:
            vec = 1
        return cls(size, vec, math.gcd(vec, rows * size) if sliced else vec)

    @property
    def aligned(self) -> bool:
        """Whether a share has whole units alone."""
        return self.size % self.vec == 0

    @property
    def layout(self) -> Any:
        """The layout of (LANES · vec,), a unit of each lane."""
        return row_type(self.vec).layout

    def full(self, value: float) -> jax.Array:
        """(LANES · vec,), fp32."""
        return plgpu.layout_cast(jnp.full((LANES * self.vec,), value, jnp.float32), self.layout)

    def iota(self) -> jax.Array:
        """(LANES · vec,), int32: the elements of units side by side."""
        return plgpu.broadcasted_iota(jnp.int32, (LANES * self.vec,), 0, layout=self.layout)

    def _before(self, share: Any) -> tuple[Any, Any]:
        """The units that end before a share begins, and the elements that follow these, uint32.

        The product of share and size may take more than 32 bits.
        """
        units, over = divmod(self.size, self.vec)
        begin = share * jnp.uint32(units)
        if not over:
            return begin, jnp.uint32(0)
        over = share * jnp.uint32(over)
        return begin + lax.div(over, jnp.uint32(self.vec)), lax.rem(over, jnp.uint32(self.vec))

    def over_units(self, share: Any, step: Callable[[list["Units"], Any], Any], carry: Any) -> Any:
        """``carry = step(units, carry)`` over a share, the units those of the lanes at a time."""
        before, odd = self._before(share)
        end = self._before(share + jnp.uint32(1))[0]
        first = before if self.aligned else before + (odd > 0).astype(jnp.uint32)
        column = jnp.int32(0)
        if not self.aligned:
            column = lax.rem(jnp.int32(self.vec) - odd.astype(jnp.int32), jnp.int32(self.vec))
        most = self.size // self.vec
        whole = (most - (not self.aligned)) // (LANES * UNITS)

        def units(start: Any, count: int, masked: bool) -> list[Units]:
            starts = [start + j * LANES for j in range(count)]
            return [
                Units(self, first + s.astype(jnp.uint32), column + s * self.vec, end, masked)
                for s in starts
            ]

        def full_step(i: Any, carry: Any) -> Any:
            return step(units(i * (LANES * UNITS), UNITS, False), carry)

        if whole == 1:
            carry = full_step(jnp.int32(0), carry)
        elif whole:
            carry = lax.fori_loop(0, whole, full_step, carry)
        rest = -(-(most - whole * LANES * UNITS) // LANES)
        if rest:
            carry = step(units(jnp.int32(whole * LANES * UNITS), rest, True), carry)
        return carry

    def edges(self, share: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The elements outside of whole units, one a lane: their index, column, and whether any.

        The index, (LANES,) and uint32, is the greatest number in lanes without an element.
        """
        vec = jnp.uint32(self.vec)
        before, odd = self._before(share)
        end, tail = self._before(share + jnp.uint32(1))
        head = lax.rem(vec - odd, vec)
        lane = plgpu.broadcasted_iota(
            jnp.uint32, (LANES,), 0, layout=plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        )
        begin = before * vec + odd
        in_head = lane < vec
        index = jnp.where(in_head, lane + begin, lane + (end * vec - vec))
        inside = (lane < head) | ((lane >= vec) & (lane < vec + tail))
        column = (index - begin).astype(jnp.int32)
        return jnp.where(inside, index, jnp.uint32(NONE)), column, inside


NONE = 2**32 - 1
"""The index of no element."""


@dataclasses.dataclass(frozen=True)
class Units:
    """A unit of each lane.

    Attributes:
      tile: of the block.
      first: the unit of the first lane, counted from the array's begin, uint32.
      column: of its first element in the share, int32.
      end: the unit after the share's last, uint32.
      masked: whether lanes may be past the end.
    """

    tile: Tile
    first: Any
    column: Any
    end: Any
    masked: bool

    @property
    def of_lanes(self) -> jax.Array:
        """(LANES,), uint32."""
        lane = plgpu.broadcasted_iota(
            jnp.uint32, (LANES,), 0, layout=plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        )
        return lane + self.first

    def clamped(self) -> jax.Array:
        """The same, past the end the last one."""
        return jnp.minimum(self.of_lanes, self.end - 1) if self.masked else self.of_lanes

    def kept(self, values: jax.Array, other: float) -> jax.Array:
        """`values`, (LANES · vec,), and `other` past the end."""
        if not self.masked:
            return values
        left = (self.end - self.first).astype(jnp.int32) * self.tile.vec
        return jnp.where(self.tile.iota() < left, values, self.tile.full(other))
