"""Dropout's kernels; the backward draws the forward's mask again.

A lane draws the bits of the group that its unit of elements lies in; units never cross groups. On a
mesh a device has a part of an array, of which each lane finds its unit's index in the whole.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.elementwise.launch import Lanes, launch, unit
from jaxkern.elementwise.philox import halves
from jaxkern.mosaic.instructions import multiply_wide
from jaxkern.mosaic.lanes import join_lanes
from jaxkern.ops.curves import CURVES, NOT_THROUGH_ZERO, kernel_functions
from jaxkern.ops.dropout.reference import (
    GROUP,
    DropoutOptions,
    Pair,
    add,
    flat_index,
    random_words,
    reference_backward,
    reference_forward,
    shift_right,
)


def launch_forward(
    options: DropoutOptions, x: Any, residual: Any, *seeds: Any, sliced: bool = False
) -> tuple[Any, ...]:
    if x.size == 0:
        return reference_forward(options, x, residual, *seeds)
    of = kernel_functions(exact=x.dtype == jnp.float32)
    ins = [x] if residual is None else [x, residual]
    out = jax.ShapeDtypeStruct(x.shape, ins[-1].dtype)
    part = part_of(options.shape, *ins, out)

    def body(lanes: Lanes, x: jax.Array, *residual: jax.Array) -> tuple[jax.Array]:
        early = options.curve in NOT_THROUGH_ZERO
        if options.curve and early:
            x = CURVES[options.curve](x, of)[0]
        x, scale = drop(lanes, part, x)
        if options.curve and not early:  # of 0 it is 0
            x = CURVES[options.curve](x, of)[0]
        return (residual[0] + x * scale if residual else x * scale,)

    words = part.seeds(*seeds)
    return launch(f"{options.op}_fwd", body, ins, [out], seeds=words, vec=part.vec, sliced=sliced)


@dataclasses.dataclass(frozen=True)
class DropoutPart:
    """A device's part of an array, and the way from a lane's unit to its index in the whole array.

    Attributes:
      of: the shape of the whole array.
      digits: (size, stride) from the last axis on; element e of the part lies at Σ digit · stride,
        with the digits of e in these sizes. Axes that are contiguous in the whole are one.
      vec: elements of a unit, which never crosses a group of the generator.
      whole: whether the part is all of the array.
    """

    of: tuple[int, ...]
    digits: tuple[tuple[int, int], ...]
    vec: int
    whole: bool

    def seeds(self, key: jax.Array, rate: jax.Array, *positions: jax.Array) -> list[jax.Array]:
        """Returns key and rate, and for a part the index of its first unit in the whole array."""
        if self.whole:
            return [key, rate]
        begin = flat_index(self.of, [p[0] for p in positions])
        return [key, rate, jnp.stack(shift_right(begin, self.vec.bit_length() - 1))]


def part_of(whole: tuple[int, ...], *arrays: Any) -> DropoutPart:
    """The part of an array of shape `whole` that `arrays` are."""
    shape, vec = arrays[0].shape, unit(*arrays)
    digits: list[tuple[int, int]] = []
    begins = []
    stride = 1
    for size, full in zip(reversed(shape), reversed(whole), strict=True):
        if digits and digits[-1][0] * digits[-1][1] == stride:
            digits[-1] = (digits[-1][0] * size, digits[-1][1])
        elif size > 1 or not digits:
            digits.append((size, stride))
        if size != full:
            begins.append(size * stride)
        stride *= full
    if begins:
        vec = math.gcd(vec, digits[0][0], *(stride for _, stride in digits[1:]), *begins)
    return DropoutPart(whole, tuple(digits), vec, shape == whole)


def drop(lanes: Lanes, part: DropoutPart, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns m · v and 1 / (1 − p), (LANES · vec,)."""
    key, (threshold, scale, *_) = lanes.seeds[:2]
    units = _units_in_whole(lanes, part)
    group = shift_right(units, (GROUP // lanes.vec).bit_length() - 1)
    bits = _bits_of_unit(random_words(group, key, multiply_wide), units[0], lanes.vec)
    keep = join_lanes(bits) >= join_lanes([threshold] * lanes.vec)
    scales = join_lanes([lax.bitcast_convert_type(scale, jnp.float32)] * lanes.vec)
    return jnp.where(keep, v, 0.0), scales


def _units_in_whole(lanes: Lanes, part: DropoutPart) -> Pair:
    """The indices of the lanes' units in the whole array."""
    if part.whole:
        return lanes.units, lanes.units & jnp.uint32(0)
    (low, high, *_), rest = lanes.seeds[2], lanes.units
    total = low, high
    for i, (size, stride) in enumerate(part.digits):
        size, stride = (size // lanes.vec, 1) if i == 0 else (size, stride // lanes.vec)
        digit = rest if i + 1 == len(part.digits) else lax.rem(rest, jnp.uint32(size))
        rest = lax.div(rest, jnp.uint32(size))
        high, low = multiply_wide(digit, stride % 2**32)
        total = add(total, (low, high + digit * jnp.uint32(stride >> 32)))
    return total


def _bits_of_unit(words: list[Any], units: Any, vec: int) -> list[Any]:
    """The 16 bits of each of a unit's elements, of the words of the group that it lies in."""
    half = 4
    while half >= vec:
        upper = units & jnp.uint32(half // vec) != 0
        if half == 1:
            return [jnp.where(upper, words[0] >> 16, words[0] & jnp.uint32(0xFFFF))]
        a, b = words[: half // 2], words[half // 2 :]
        words = [jnp.where(upper, y, x) for x, y in zip(a, b, strict=True)]
        half //= 2
    return halves(words)


def launch_backward(
    options: DropoutOptions, x: Any, dout: Any, *seeds: Any, sliced: bool = False
) -> tuple[Any, ...]:
    if dout.size == 0:
        return reference_backward(options, x, dout, *seeds)
    of = kernel_functions(exact=options.dtype == jnp.float32)
    ins = [dout] if x is None else [dout, x]
    dx = jax.ShapeDtypeStruct(dout.shape, options.dtype)
    part = part_of(options.shape, *ins, dx)

    def body(lanes: Lanes, dout: jax.Array, *x: jax.Array) -> tuple[jax.Array]:
        dout, scale = drop(lanes, part, dout)
        if options.curve:
            dout = CURVES[options.curve](x[0], of)[1](dout)
        return (dout * scale,)

    words = part.seeds(*seeds)
    return launch(f"{options.op}_bwd", body, ins, [dx], seeds=words, vec=part.vec, sliced=sliced)
