"""The kernel behind every op that works element by element: registers between loads and stores.

A block is one warpgroup. Each lane loads from every input a *unit* of neighbouring elements in one
access of up to 16 bytes, computes in fp32, and stores; lanes exchange nothing. One unit a lane is
enough to keep an H200's memory busy, and leaves registers for as many warps as an SM can hold; of
small units a lane takes several.

Lanes beyond the last whole unit repeat it. Where the size is no multiple of a unit, one more block
takes the remaining elements, one by one.

The last section is the generator of random bits, Philox-4x32, in kernels and in plain JAX.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.arguments import unfit
from jaxkern.mosaic.lanes import lane_numbers
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel
from jaxkern.mosaic.units import load_units, load_words, store_units, too_large

_BLOCK = grid_axes("block")[0]

_BYTES = 16
"""Bytes that a lane loads at a time: at least of all inputs, and at most of one array."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The elements that a kernel's body computes.

    Attributes:
      units: (LANES,), uint32, the index of each lane's unit; of the last unit, elements beyond the
        end of the arrays are zeros and are not stored.
      vec: elements of a unit.
      seeds: the 4 words of each of the launch's seeds, each word (LANES,).
    """

    units: jax.Array
    vec: int
    seeds: Sequence[Sequence[jax.Array]]


def launch(
    name: str,
    body: Callable[..., tuple[Any, ...]],
    ins: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    columns: int = 0,
    seeds: Sequence[jax.Array] = (),
    vec: int | None = None,
    sliced: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs `body` over arrays of equally many elements.

    Args:
      name: of the kernel.
      body: ``body(lanes, *ins) -> outs`` on fp32 arrays (LANES · vec,).
      ins: arrays. One with twice the elements holds two inputs whose rows, of `columns` elements,
        are side by side: (..., 2 · columns).
      outs: shapes and dtypes of the results, of which an array may hold two in the same way.
      columns: elements of a row, where an array holds two.
      seeds: arrays (k,), uint32, of up to 4 words that every lane reads; zeros make up the rest.
      vec: elements of a unit; by default as many as make 16 bytes of the widest dtype.
      sliced: whether the arrays are slices of others, and aligned as their sizes are.

    Raises:
      NotImplementedError: an array has more than `MAX_UNITS` units.
    """
    arrays = [*ins, *outs]
    size = min(a.size for a in arrays)
    if size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in outs)
    if vec is None:
        vec = unit(*arrays, columns=columns)
    if reason := too_large(vec, *(a.size for a in arrays)):
        raise NotImplementedError(f'{name}: {reason}. Use implementation="xla".')
    halves = tuple(a.size // size for a in arrays)
    input_bytes = sum(a.size * a.dtype.itemsize for a in ins) // size  # of an element of each
    plan = _ElementwisePlan(
        size=size,
        vec=vec,
        step=math.gcd(vec, *(a.size for a in arrays)) if sliced else vec,
        each=max(1, _BYTES // (vec * input_bytes)),
        row=columns // vec,
        halves=halves,
        inputs=sum(halves[: len(ins)]),
    )

    def kernel(*refs: Any) -> None:
        words = [load_words(ref, 4) for ref in refs[: len(seeds)]]
        compute = functools.partial(_compute, plan, body, words, refs[len(seeds) :])
        block = lax.axis_index(_BLOCK)

        def whole_units() -> None:
            compute(_units_of_lanes(plan, block), plan.vec, plan.step)

        def rest() -> None:
            compute([jnp.full((LANES,), plan.units, jnp.uint32)], plan.rest, 1)

        if plan.units and plan.rest:
            pl.when(block < plan.blocks)(whole_units)
            pl.when(block == plan.blocks)(rest)
        else:
            (whole_units if plan.units else rest)()

    results = launch_kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct((o.size,), o.dtype) for o in outs),
        grid=(plan.blocks + (plan.rest > 0),),
        grid_names=(_BLOCK,),
        kernel_name=name,
        approx_math=True,
    )(*seeds, *(a.reshape(-1) for a in ins))
    return tuple(r.reshape(o.shape) for r, o in zip(results, outs, strict=True))


def unit(*arrays: Any, columns: int = 0) -> int:
    """Counts the elements of a unit of `arrays`, which make 16 bytes and divide `columns`.

    The arguments are as for :func:`launch`.
    """
    return math.gcd(_BYTES // max(a.dtype.itemsize for a in arrays), columns)


def unsupported(*, columns: int = 0, **arrays: jax.Array) -> str | None:
    """Says why no kernel can take `arrays`, one of which may have rows of two times `columns`."""
    if reason := unfit(**arrays):
        return reason
    present = arrays.values()
    return too_large(unit(*present, columns=columns), *(a.size for a in present))


@dataclasses.dataclass(frozen=True)
class _ElementwisePlan:
    size: int  # elements of an input
    vec: int  # elements of a unit
    step: int  # elements of an access
    each: int  # units of a lane
    row: int  # units of a row, where an array is two inputs
    halves: tuple[int, ...]  # inputs or outputs in each array: 2 where it holds gate and up
    inputs: int

    @property
    def units(self) -> int:
        return self.size // self.vec

    @property
    def rest(self) -> int:
        """Elements after the last whole unit."""
        return self.size % self.vec

    @property
    def blocks(self) -> int:
        """Blocks that take whole units."""
        return -(-self.units // (LANES * self.each))


def _units_of_lanes(plan: _ElementwisePlan, block: jax.Array) -> list[jax.Array]:
    """The units that each lane of a block takes, (LANES,) each; past the last unit the last."""
    lane = lane_numbers(jnp.uint32)
    first = block.astype(jnp.uint32) * jnp.uint32(LANES * plan.each)
    units = [lane + (first + jnp.uint32(k * LANES)) for k in range(plan.each)]
    if plan.units % (LANES * plan.each):
        units = [jnp.minimum(u, jnp.uint32(plan.units - 1)) for u in units]
    return units


def _compute(
    plan: _ElementwisePlan,
    body: Callable[..., tuple[Any, ...]],
    seeds: Sequence[Sequence[jax.Array]],
    refs: Sequence[Any],
    units_of_lanes: Sequence[jax.Array],
    count: int,
    step: int,
) -> None:
    """Runs `body` on the first `count` elements of each of the units, `step` an access."""
    access = plan.vec, count, step
    loaded = []
    for units in units_of_lanes:
        located = _locate(plan, refs, units)
        values = [load_units(ref, at, *access) for ref, at in located[: plan.inputs]]
        loaded.append((Lanes(units, plan.vec, seeds), values, located[plan.inputs :]))
    for lanes, values, located in loaded:
        for (ref, at), value in zip(located, body(lanes, *values), strict=True):
            store_units(ref, at, value, *access)


def _locate(
    plan: _ElementwisePlan, refs: Sequence[Any], units: jax.Array
) -> list[tuple[Any, jax.Array]]:
    """The array of every input and output, and the indices in it of `units`."""
    found = []
    for ref, halves in zip(refs, plan.halves, strict=True):
        if halves == 1:
            found.append((ref, units))
            continue
        row_start = lax.div(units, jnp.uint32(plan.row)) * jnp.uint32(plan.row)
        found += [(ref, units + row_start + jnp.uint32(i * plan.row)) for i in range(halves)]
    return found


# Random bits of a counter and a key

Product = Callable[[Any, int], tuple[Any, Any]]
"""(a, b) -> the upper and the lower 32 bits of a · b."""


def philox(
    counter: Sequence[Any],
    key: Sequence[Any],
    product: Product | None = None,
    *,
    rounds: int = 10,
    rolled: bool = False,
) -> list[Any]:
    """Returns four words of 32 random bits, of a counter of four words and a key of two.

    `product` is :func:`wide_product` unless a kernel has an instruction for it. With `rolled` the
    rounds are a loop, which compiles in half the time; all words then have one type.
    """
    product = product or wide_product

    def one_round(_: Any, state: Any) -> Any:
        a, b, c, d, k, l = state
        (high_a, low_a), (high_c, low_c) = product(a, 0xD2511F53), product(c, 0xCD9E8D57)
        k_next, l_next = k + jnp.uint32(0x9E3779B9), l + jnp.uint32(0xBB67AE85)
        return high_c ^ b ^ k, low_c, high_a ^ d ^ l, low_a, k_next, l_next

    state = (*counter, *key)
    if rolled:
        state = lax.fori_loop(0, rounds, one_round, state)
    else:
        for i in range(rounds):
            state = one_round(i, state)
    return list(state[:4])


def halves(words: Sequence[Any]) -> list[Any]:
    """The lower and the upper 16 bits of each word."""
    return [half for w in words for half in (w & jnp.uint32(0xFFFF), w >> 16)]


def wide_product(a: jax.Array, b: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of a · b, of 16-bit halves: Shardy knows no ``lax.mulhi``."""
    low, high = a & jnp.uint32(0xFFFF), a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    cross = high * b_low + (low * b_low >> 16)
    other = low * b_high + (cross & jnp.uint32(0xFFFF))
    return high * b_high + (cross >> 16) + (other >> 16), a * jnp.uint32(b)
