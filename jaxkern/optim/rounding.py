"""Stochastic rounding from float32 to bfloat16.

A bfloat16 is the upper half of a float32. For r uniform in {0, …, 2¹⁶ − 1},

    round(x) = the upper half of (bits of x) + r

is one of the two bfloat16 around x: the one further from zero with a probability equal to the
fraction of the step between them that x is past the other, so that the expectation of round(x) is
x. What bfloat16 can hold stays as it is, NaN and infinities too. An average that moves by less than
half a step of its bfloat16 would stay where it is for ever if it were rounded to nearest; rounded
so, it moves on average as it should.

The bits are Philox-4x32-7's: 7 are the fewest rounds that pass all tests of BigCrush, and their
time counts where an element has few bytes. Its key is the seed's two words, its counter (⌊i / 8⌋,
leaf, step, stream) for element i of a leaf's array: a step that is run again draws the same bits.
The four words of a counter serve eight elements, half a word each. For a second draw an element
takes its neighbour's half, which is independent of its own.

Sources: Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015; Salmon et al.,
Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.elementwise.philox import Product, halves, philox, wide_product

_ROUNDS = 7

GROUP = 8
"""Elements that one call of the generator serves."""


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds x to one of the two bfloat16 around it, and returns that in float32.

    Args:
      x: float32.
      bits: the shape of x, uint32, below 2^16.
    """
    word = lax.bitcast_convert_type(x, jnp.uint32) + bits
    rounded = lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(x == x, rounded, x)


@jax.custom_jvp
def round_with_slope(x: jax.Array, bits: jax.Array) -> jax.Array:
    """:func:`round_to_bfloat16` with the derivative of its expectation, which is 1.

    The bits that it works on have none, so that JAX would take the result for a constant.
    """
    return round_to_bfloat16(x, bits)


@round_with_slope.defjvp
def _round_with_slope_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_with_slope(*primals), tangents[0]


class Draws(NamedTuple):
    """Two uniform uint32 below 2^16 for each element, independent of each other."""

    first: Any
    second: Any


def group_draws(
    group: jax.Array,
    leaf: Any,
    seed: Sequence[Any],
    stream: int,
    product: Product = wide_product,
) -> Draws:
    """Draws the random bits of a group of elements: two lists, an array for each element.

    Args:
      group: uint32, which group of `GROUP` elements.
      leaf: uint32, the leaf's number.
      seed: the two words of the key and the step, each uint32.
      stream: which of the independent streams.
      product: (a, b) -> the upper and the lower half of a · b.
    """
    zero = group & jnp.uint32(0)
    key, step = seed[:2], seed[2]
    counter = (group, zero + leaf, zero + step, zero + jnp.uint32(stream))
    first = halves(philox(counter, key, product, rounds=_ROUNDS))
    swapped = [half for low, high in itertools.batched(first, 2) for half in (high, low)]
    return Draws(first, swapped)


def leaf_draws(shape: tuple[int, ...], leaf: Any, seed: Sequence[Any], stream: int) -> Draws:
    """Draws the random bits of all elements of a leaf, arrays of its `shape`."""
    size = math.prod(shape)
    groups = jnp.arange(-(-size // GROUP), dtype=jnp.uint32)
    draws = group_draws(groups, jnp.asarray(leaf, jnp.uint32), seed, stream)
    return Draws(*(jnp.stack(d, axis=-1).reshape(-1)[:size].reshape(shape) for d in draws))
