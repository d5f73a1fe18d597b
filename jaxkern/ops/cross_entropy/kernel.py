"""The kernels of the cross-entropy's rows: the sums of logits, and their gradient in place.

A block, of one warpgroup, takes a share of a row: the whole row where there are many rows, or one
of up to 16 equal shares. A lane loads units, neighbouring elements that begin at multiples of 16
bytes of the whole array, so that rows may begin at any element: the elements of a share before its
first whole unit and after its last, at most two units' less two, are loaded and stored one by one.
The first lane begins with the first unit of a line of memory; the units before it come last.

The forward reads logits once. Each lane keeps the largest element, the sum of exponentials relative
to it and, with smoothing, the sum of elements, separately for each element of its unit; the block
reduces them at the end of its share. The backward overwrites logits by their gradient, one read and
one write. A share of an ignored row is not read.
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

from jaxkern.mosaic.arithmetic import exp_of_minus
from jaxkern.mosaic.elementwise import load_units, store_units
from jaxkern.mosaic.lanes import VECTOR_BYTES, lane_numbers, row_type
from jaxkern.mosaic.launch import LANES, grid_axes, launch_in_place, launch_kernel
from jaxkern.ops.cross_entropy.reference import IGNORED, LossOptions, Sums, position_in
from jaxkern.ops.curves import kernel_functions

(SHARE,) = grid_axes("share")

SHARES = 16
"""Most shares of a row."""

BLOCKS = 1024
"""Fewer rows are cut into this number of shares, some eight per multiprocessor. More shares add the
fixed cost of a block: on an H200 the forward of 16384 rows of 16384 elements takes 143 µs by whole
rows, and 313 by shares of 1024."""

LONGEST = 2**16
"""A share has fewer elements: on an H200 both passes over 1024 rows of 65536 take 124 µs by whole
rows, and 119 by halves."""

LEAST = 8192
"""Elements that a share of few rows has at least: to join shares takes 3 µs."""

SHORTEST = 2048
"""Least number of classes for the kernels. On an H200 both passes over 16384 rows of 2048 take
68 µs, XLA's 84; of 1024, 41 and 44, and of fewer rows XLA is faster."""

UNITS = 4
"""Units that a lane loads before it computes: 8 KiB of a block, of which an SM holds 4 or more."""

LINE = 8
"""Units of a line of 128 bytes. On an H200 the backward of 8192 rows of 50257 elements takes 441 µs
where warps store whole lines, and 550 where they begin with a row and store parts of two."""

NONE = 2**32 - 1
"""The index of a lane that has no element."""


# Forward


def launch_forward(
    options: LossOptions, logits: Any, position: Any, *, sliced: bool = False
) -> tuple[Any, ...]:
    """Launches the forward kernel; arguments and results as in :func:`reference_forward`."""
    index = jnp.maximum(position, 0)[..., None]
    label_logit = jnp.take_along_axis(logits, index, axis=-1, mode="promise_in_bounds")[..., 0]
    chosen = jnp.where(position >= 0, options.terms.capped(label_logit), 0)
    zeros = jnp.zeros(position.shape, jnp.float32)
    if logits.size == 0:
        return zeros, zeros, chosen, zeros
    positions = _positions_in_shares(logits, position)
    tile = ShareTile.of(logits, positions, sliced)
    with_total = options.terms.smoothing > 0

    def kernel(logits: Any, position: Any, *outs: Any) -> None:
        share = lax.axis_index(SHARE)
        counted = position[share] != IGNORED

        def store(*values: Any) -> None:
            for out, value in zip(outs, values, strict=True):
                out[share] = value

        @pl.when(counted)
        def _():
            store(*_sums(options, tile, logits, share.astype(jnp.uint32), with_total))

        @pl.when(jnp.logical_not(counted))
        def _():
            store(*[jnp.float32(0)] * len(outs))

    outs = launch_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((positions.size,), jnp.float32),) * (2 + with_total),
        grid=(positions.size,),
        grid_names=(SHARE,),
        kernel_name="cross_entropy_fwd",
        approx_math=True,
    )(logits.reshape(-1), positions.reshape(-1))
    largest, exponentials, *total = (out.reshape(positions.shape) for out in outs)
    of_row = jnp.max(largest, axis=-1)
    joined = Sums(largest, exponentials, None, None).relative_to(of_row[..., None])
    total = jnp.sum(total[0], axis=-1) if total else zeros
    return of_row, jnp.sum(joined.exponentials, axis=-1), chosen, total


def _sums(options: LossOptions, tile: "ShareTile", ref: Any, share: Any, with_total: bool) -> Any:
    """Sums of a share: largest logit, exponentials relative to it and, on request, all logits."""
    exact = ref.dtype == jnp.float32
    cap = lambda v, layout: options.terms.capped(v, kernel_functions(exact, layout).tanh)

    def step(units: list["Units"], carry: Any) -> Any:
        largest, exponentials, total = carry  # (LANES · vec,)
        values = []
        for unit in units:
            loaded = load_units(ref, unit.clamped(), tile.vec, step=tile.access)
            value = cap(loaded, tile.layout)
            values.append((unit.kept(value, -jnp.inf), unit.kept(value, 0.0)))
        now = largest
        for value, _ in values:
            now = jnp.maximum(now, value)
        base = _finite(now)
        exponentials = exponentials * _exp(exact, largest - base)
        for value, kept in values:
            exponentials = exponentials + _exp(exact, value - base)
            total = total + kept if with_total else total
        return now, exponentials, total

    zeros = tile.full(0.0)
    lanes = [tile.over_units(share, step, (tile.full(-jnp.inf), zeros, zeros))]
    if not tile.aligned:
        row = row_type(1).layout
        index, _, inside = tile.edges(share)
        some = jnp.where(index == jnp.uint32(NONE), jnp.uint32(0), index)
        value = cap(load_units(ref, some, 1), row)  # (LANES,)
        full = lambda v: plgpu.layout_cast(jnp.full((LANES,), v, jnp.float32), row)
        largest = jnp.where(inside, value, full(-jnp.inf))
        none = full(0.0)
        exponentials = jnp.where(inside, _exp(exact, largest - _finite(largest)), none)
        lanes.append((largest, exponentials, jnp.where(inside, value, none)))
    largest = jnp.max(lanes[0][0])
    for edge, *_ in lanes[1:]:
        largest = jnp.maximum(largest, jnp.max(edge))
    base = _finite(largest)
    sums = [largest, sum(jnp.sum(e * _exp(exact, m - base)) for m, e, _ in lanes)]
    return [*sums, sum(jnp.sum(total) for *_, total in lanes)] if with_total else sums


def _finite(v: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(v) < jnp.inf, v, 0.0)


def _exp(exact: bool, v: jax.Array) -> jax.Array:
    """exp(v) of v <= 0, to fp32 accuracy or by the fast unit."""
    return exp_of_minus(-v) if exact else jnp.exp(v)


# Backward


def launch_backward(
    options: LossOptions,
    logits: Any,
    position: Any,
    lse: Any,
    of_softmax: Any,
    dloss: Any,
    *,
    sliced: bool = False,
) -> tuple[Any]:
    """Launches the backward kernel: du in the memory of `logits`, or of its own for slices."""
    if logits.size == 0:
        return (logits,)
    position = _positions_in_shares(logits, position)
    tile, shares = ShareTile.of(logits, position, sliced), position.shape[-1]

    def kernel(*refs: Any) -> None:
        position, lse, of_softmax, dloss, logits = refs[:5]
        du = refs[5] if sliced else logits
        share = lax.axis_index(SHARE)
        row = lax.div(share, shares)
        label = position[share]
        counted = label != IGNORED
        begin = share.astype(jnp.uint32)

        @pl.when(counted)
        def _():
            numbers = lse[row], of_softmax[row], dloss[row]
            _write_gradient(options, tile, begin, label, numbers, logits, du)

        @pl.when(jnp.logical_not(counted))
        def _():
            _write_zeros(tile, begin, du)

    numbers = [v.reshape(-1) for v in (position, lse, of_softmax, dloss)]
    flat = logits.reshape(-1)
    launch: dict[str, Any] = {
        "grid": (position.size,),
        "grid_names": (SHARE,),
        "kernel_name": "cross_entropy_bwd",
        "approx_math": True,
    }
    if sliced:
        out_type = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        du = launch_kernel(kernel, out_type=out_type, **launch)(*numbers, flat)
    else:
        (du,) = launch_in_place(kernel, numbers, [flat], **launch)
    return (du.reshape(logits.shape),)


def _write_gradient(
    options: LossOptions, tile: "ShareTile", share: Any, label: Any, numbers: Any, ref: Any, du: Any
) -> None:
    """Writes du of a share; `label` is its index there, `numbers` are lse, of_softmax and dloss."""
    exact, terms = ref.dtype == jnp.float32, options.terms
    lse, of_softmax, dloss = numbers

    def gradient(logits: Any, is_label: Any, layout: Any) -> jax.Array:
        capped = terms.capped(logits, kernel_functions(exact, layout).tanh)
        du = of_softmax * _exp(exact, capped - lse)
        if terms.smoothing:
            du = du - dloss * (terms.smoothing / options.classes)
        du = jnp.where(is_label, du - dloss * (1 - terms.smoothing), du)
        if terms.cap is not None:
            slope = capped * (1 / terms.cap)
            du = du * (1 - slope * slope)
        return du

    def step(units: list["Units"], carry: Any) -> Any:
        loaded = [load_units(ref, u.clamped(), tile.vec, step=tile.access) for u in units]
        for unit, logits in zip(units, loaded, strict=True):
            unit.store(du, gradient(logits, unit.is_at(label), tile.layout))
        return carry

    tile.over_units(share, step, jnp.int32(0))
    if not tile.aligned:
        index, column, _ = tile.edges(share)
        some = jnp.where(index == jnp.uint32(NONE), jnp.uint32(0), index)
        logits = load_units(ref, some, 1)
        _store_edges(du, index, gradient(logits, column == label, row_type(1).layout))


def _write_zeros(tile: "ShareTile", share: Any, du: Any) -> None:
    def step(units: list["Units"], carry: Any) -> Any:
        for unit in units:
            unit.store(du, tile.full(0.0))
        return carry

    tile.over_units(share, step, jnp.int32(0))
    if not tile.aligned:
        zeros = jnp.zeros((LANES,), jnp.float32)
        _store_edges(du, tile.edges(share)[0], zeros)


def _store_edges(ref: Any, index: jax.Array, values: jax.Array) -> None:
    store_units(ref, index, values, 1, below=jnp.full((LANES,), NONE, jnp.uint32))


# Shares of rows


def shares_of(rows: int, classes: int, vec: int) -> int:
    """Number of equal shares of each row, of whole units of `vec` elements where rows have them."""
    wanted = max(-(-BLOCKS // rows), classes // LONGEST + 1)
    wanted = min(wanted, max(1, classes // LEAST))
    whole = 1 if classes % vec else vec
    counts = [n for n in range(1, SHARES + 1) if classes % (n * whole) == 0]
    return next((n for n in counts if n >= wanted), counts[-1])


def _positions_in_shares(logits: Any, position: Any) -> Any:
    """The label's index within each share of its row, (..., shares)."""
    classes = logits.shape[-1]
    count = shares_of(position.size, classes, VECTOR_BYTES // logits.dtype.itemsize)
    size = classes // count
    return position_in(position[..., None], jnp.arange(count, dtype=jnp.int32) * size, size)


@dataclasses.dataclass(frozen=True)
class ShareTile:
    """A block's share of a row.

    Attributes:
      size: elements of the share.
      vec: elements of a unit.
      access: elements per load or store of a lane.
    """

    size: int
    vec: int
    access: int

    @classmethod
    def of(cls, logits: Any, positions: Any, sliced: bool) -> "ShareTile":
        """The tile for shares like `positions`; a `sliced` array is aligned only as its size is."""
        size = logits.shape[-1] // positions.shape[-1]
        vec = VECTOR_BYTES // logits.dtype.itemsize
        if size < 2 * vec and size % vec:
            vec = 1
        return cls(size, vec, math.gcd(vec, positions.size * size) if sliced else vec)

    @property
    def aligned(self) -> bool:
        """Whether a share consists of whole units."""
        return self.size % self.vec == 0

    @property
    def layout(self) -> Any:
        """Layout of (LANES · vec,), one unit per lane."""
        return row_type(self.vec).layout

    def full(self, value: float) -> jax.Array:
        """(LANES · vec,), fp32."""
        return plgpu.layout_cast(jnp.full((LANES * self.vec,), value, jnp.float32), self.layout)

    def iota(self) -> jax.Array:
        """(LANES · vec,), int32."""
        return plgpu.broadcasted_iota(jnp.int32, (LANES * self.vec,), 0, layout=self.layout)

    def _before(self, share: Any) -> tuple[Any, Any]:
        """Units that end before a share begins, and the elements after these, uint32.

        The product of share and size may take more than 32 bits.
        """
        units, over = divmod(self.size, self.vec)
        begin = share * jnp.uint32(units)
        if not over:
            return begin, jnp.uint32(0)
        over = share * jnp.uint32(over)
        return begin + lax.div(over, jnp.uint32(self.vec)), lax.rem(over, jnp.uint32(self.vec))

    def over_units(self, share: Any, step: Callable[[list["Units"], Any], Any], carry: Any) -> Any:
        """Runs ``carry = step(units, carry)`` over the whole units of a share.

        Lanes begin with the unit after `turn` others, at a line of memory, and take those last.
        """
        before, odd = self._before(share)
        end = self._before(share + jnp.uint32(1))[0]
        first = before if self.aligned else before + (odd > 0).astype(jnp.uint32)
        column = jnp.int32(0)
        if not self.aligned:
            column = lax.rem(jnp.int32(self.vec) - odd.astype(jnp.int32), jnp.int32(self.vec))
        most = self.size // self.vec
        turns = most >= 2 * LINE and (most % LINE > 0 or not self.aligned)
        turn = (jnp.uint32(0) - first) & jnp.uint32(LINE - 1) if turns else jnp.uint32(0)
        not_in_place = (not self.aligned) + turns * (LINE - 1)  # units, at most
        whole = max(0, most - not_in_place) // (LANES * UNITS)
        share_of = functools.partial(
            Units, self, first, column, (end - first).astype(jnp.int32), turn.astype(jnp.int32)
        )

        def units(start: Any, count: int, masked: bool) -> list[Units]:
            return [share_of(start + j * LANES, masked) for j in range(count)]

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
        """Index, column and mask, (LANES,) each, of the elements outside of whole units.

        One element per lane; the index, uint32, is NONE in a lane without one.
        """
        vec = jnp.uint32(self.vec)
        before, odd = self._before(share)
        end, tail = self._before(share + jnp.uint32(1))
        head = lax.rem(vec - odd, vec)
        lane = lane_numbers(jnp.uint32)
        begin = before * vec + odd
        in_head = lane < vec
        index = jnp.where(in_head, lane + begin, lane + (end * vec - vec))
        inside = (lane < head) | ((lane >= vec) & (lane < vec + tail))
        column = (index - begin).astype(jnp.int32)
        return jnp.where(inside, index, jnp.uint32(NONE)), column, inside


@dataclasses.dataclass(frozen=True)
class Units:
    """One unit per lane.

    Attributes:
      tile: the block's tile.
      begin: index in the whole array of the share's first unit, uint32.
      column: index in the share of that unit's first element, int32.
      count: units of the share, int32.
      turn: how many of them come last, see :meth:`ShareTile.over_units`, int32.
      start: how many come before the first lane's, int32.
      masked: whether some of them may be among those that come last, and lanes have none.
    """

    tile: ShareTile
    begin: Any
    column: Any
    count: Any
    turn: Any
    start: Any
    masked: bool

    @property
    def _end(self) -> Any:
        return self.begin + self.count.astype(jnp.uint32)

    @property
    def indices(self) -> jax.Array:
        """(LANES,), uint32; in a lane without a unit the index after the share's last."""
        number = lane_numbers() + (self.turn + self.start)
        if self.masked:
            again = jnp.where(number < self.count + self.turn, number - self.count, self.count)
            number = jnp.where(number < self.count, number, again)
        return number.astype(jnp.uint32) + self.begin

    def clamped(self) -> jax.Array:
        """The indices, with the last unit's for lanes without one."""
        return jnp.minimum(self.indices, self._end - 1) if self.masked else self.indices

    def is_at(self, index: Any) -> jax.Array:
        """Finds the share's element of this index, (LANES · vec,), if its unit is here."""
        number, vec, iota = self.turn + self.start, self.tile.vec, self.tile.iota()
        place = index - self.column - number * vec
        if not self.masked:
            return iota == place
        again = iota >= (self.count - number) * vec
        return iota == jnp.where(again, place + self.count * vec, place)

    def kept(self, values: jax.Array, other: float) -> jax.Array:
        """`values`, (LANES · vec,), with `other` in lanes without a unit."""
        if not self.masked:
            return values
        left = (self.count - self.start) * self.tile.vec
        return jnp.where(self.tile.iota() < left, values, self.tile.full(other))

    def store(self, ref: Any, values: jax.Array) -> None:
        """Stores `values` of lanes with a unit: another block has not read yet what follows."""
        below = jnp.full((LANES,), self._end, jnp.uint32) if self.masked else None
        tile = self.tile
        store_units(ref, self.indices, values, tile.vec, step=tile.access, below=below)
