"""Random bits of a counter and a key, Philox-4x32, in kernels and in plain JAX.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
