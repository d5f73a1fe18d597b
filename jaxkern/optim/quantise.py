r"""Eight-bit codes for the averages of Adam and SGD, in blocks of 256 elements with a scale each.

With the block's largest magnitude a, in float32:

    mu   int8, linear:        m = a · c / 127                 c from −127 to 127
    nu   uint8, logarithmic:  v = a · 2^((c − 255) / 12)      c from 0 to 255

so that nu's codes are 6% apart from a down to a / 2^21, and smaller values have the last code. A
value is rounded to one of the two codes around it at random, with probabilities that make it the
expectation: rounded to nearest, an average that moves by 0.1% a step would keep its code for ever.

Sources: Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization,
ICLR 2022 (blocks and their scale; their codes are other ones).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 256
"""Elements of a block: a warp's, 8 to a lane."""

SMALLEST = 4096
"""Elements from which a leaf is quantised: smaller leaves take little memory."""

_PER_OCTAVE = 12
_ABOVE = (0.49278013254, 0.99986099001, 0.028879469519, 0.000556039346)
"""The coefficients of a polynomial that is 0 at −1/2, 1 at 1/2, and off by at most 9e-8 between."""


class Quantised(NamedTuple):
    """An average in 8 bits.

    Attributes:
      codes: the shape of the parameter, int8 (linear) or uint8 (logarithmic).
      scale: (elements / 256,), float32, the largest magnitude of each block.
    """

    codes: Any
    scale: Any


def quantisable(shape: tuple[int, ...]) -> bool:
    """Says whether an array of `shape` is kept in 8 bits: if it is large and of whole blocks."""
    size = math.prod(shape)
    return size >= SMALLEST and size % BLOCK == 0


class Functions(NamedTuple):
    """Functions that a kernel computes by instructions of its own."""

    exp2: Callable[[jax.Array], jax.Array]
    log2: Callable[[jax.Array], jax.Array]
    nearest: Callable[[jax.Array], jax.Array]  # whole number, of magnitudes below 2^22


PLAIN = Functions(jnp.exp2, jnp.log2, jnp.round)


def value(dtype: Any, code: jax.Array, scale: jax.Array, of: Functions = PLAIN) -> jax.Array:
    """The number that a code stands for; code and scale in float32, of one shape."""
    if dtype == jnp.int8:
        return code * (scale * (1 / 127))
    return scale * of.exp2((code - 255.0) * (1 / _PER_OCTAVE))


def code(
    dtype: Any, x: jax.Array, scale: jax.Array, bits: jax.Array, of: Functions = PLAIN
) -> jax.Array:
    """Rounds x, of at most the magnitude of scale, to a code, in float32.

    Args:
      dtype: int8 or uint8.
      x: float32, for uint8 not negative.
      scale: of each element.
      bits: uint32 below 2^16.
      of: the functions to use.
    """
    return jnp.round(before_rounding(dtype, x, scale, bits, of))


def before_rounding(
    dtype: Any, x: jax.Array, scale: jax.Array, bits: jax.Array, of: Functions = PLAIN
) -> jax.Array:
    """The number that is rounded to the code, its random part added and its limits the codes'."""
    # 1 + bits / 2^23, by its mantissa; (bits + 1/2) / 2^16 is uniform.
    above_one = lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32)
    small = above_one - (1 - 2.0**-24)
    inverse = jnp.where(scale > 0, 1 / scale, 0.0)
    if dtype == jnp.int8:
        return x * (inverse * 126.99996) + (small * 128.0 - 0.5)
    octaves = of.log2(jnp.maximum(x * inverse, 2.0 ** (-254.99 / _PER_OCTAVE)))
    twelfths = octaves * _PER_OCTAVE + 254.5
    below = of.nearest(twelfths)
    rest = twelfths - below
    # The probability of the code above, less _ABOVE[0]:
    # (2^((rest + 1/2) / 12) - 1) / (2^(1/12) - 1).
    above = rest * (_ABOVE[1] + rest * (_ABOVE[2] + rest * _ABOVE[3]))
    return jnp.minimum((below + (_ABOVE[0] + 0.5)) + above - small * 128.0, 255.4)


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats each block's scale for its elements, in `shape`."""
    return jnp.repeat(scale, BLOCK).reshape(shape)


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude of each block, (elements / 256,)."""
    return jnp.abs(x).reshape(-1, BLOCK).max(axis=1)
