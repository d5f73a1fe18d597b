"""Dropout in plain JAX, computed in fp32 and rounded once, its mask by the definition."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.bound import wide
from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import vary_over, varying
from jaxkern.elementwise.philox import halves, philox, wide_product
from jaxkern.ops.curves import CURVES, PLAIN, curve

GROUP = 8
"""Elements that one call of the generator serves."""

Pair = tuple[Any, Any]
"""The lower and the upper 32 bits of an integer."""


@dataclasses.dataclass(frozen=True)
class DropoutOptions:
    """Static arguments of the passes.

    Attributes:
      op: the name of the public function.
      curve: of the activation, or None.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      shape: of the whole array, of which a device may have a part.
      dtype: of x, in the backward.
    """

    op: str
    curve: str | None
    mode: Mode
    shape: tuple[int, ...] = ()
    dtype: Any = None


def reference_forward(
    options: DropoutOptions, x: Any, residual: Any, key: Any, rate: Any, *positions: Any
) -> tuple[Any]:
    f32 = wide(*(a.dtype for a in (x, residual) if a is not None))
    v = x.astype(f32)
    out = _drop(options, key, rate, positions, curve(options.curve, v) if options.curve else v)
    if residual is None:
        return (out.astype(x.dtype),)
    return ((residual.astype(f32) + out).astype(residual.dtype),)


def reference_backward(
    options: DropoutOptions, x: Any, dout: Any, key: Any, rate: Any, *positions: Any
) -> tuple[Any]:
    f32 = wide(*(a.dtype for a in (x, dout) if a is not None))
    dropped = _drop(options, key, rate, positions, dout.astype(f32))
    if x is not None:
        assert options.curve
        dropped = CURVES[options.curve](x.astype(f32), PLAIN)[1](dropped)
    return (dropped.astype(options.dtype),)


def _drop(options: DropoutOptions, key: Any, rate: Any, positions: Any, v: jax.Array) -> jax.Array:
    """m · v / (1 − p)."""
    kept = random_bits(options.shape, key, positions) >= rate[0]
    return jnp.where(kept, v * scale_of(rate[0], v.dtype), 0.0)


def scale_of(threshold: jax.Array, dtype: Any) -> jax.Array:
    """1 / (1 − p), and 0 where nothing is kept."""
    kept = 65536 - threshold.astype(jnp.int32)
    return jnp.where(kept > 0, 65536.0 / jnp.maximum(kept, 1).astype(dtype), 0.0)


def positions_of(shape: tuple[int, ...]) -> list[jax.Array]:
    """The indices along each axis, split between devices as the axis is."""
    return [jnp.arange(n, dtype=jnp.uint32) for n in shape]


def random_bits(shape: tuple[int, ...], key: Any, positions: Sequence[Any]) -> jax.Array:
    """16 random bits for each element of the part, at `positions`, of an array of `shape`."""
    part = tuple(p.size for p in positions)
    grouped = shape[-1] % GROUP == part[-1] % GROUP == 0
    *others, last = positions
    along = [*others, last[::GROUP] if grouped else last]
    axes = range(len(shape))
    index = flat_index(
        shape, [jnp.expand_dims(p, [e for e in axes if e != d]) for d, p in enumerate(along)]
    )
    group = shift_right(index, GROUP.bit_length() - 1)
    bits = halves(_plain_words(group, [*key, *[jnp.uint32(0)] * (4 - key.size)]))
    if grouped:
        return jnp.stack(bits, axis=-1).reshape(part)
    which = index[0] & (GROUP - 1)
    return functools.reduce(lambda a, k: jnp.where(which == k, bits[k], a), range(1, 8), bits[0])


def flat_index(shape: tuple[int, ...], positions: Sequence[Any]) -> Pair:
    """The index, counted through all axes of an array of `shape`, of what is at `positions`."""
    index: Pair = jnp.uint32(0), jnp.uint32(0)
    for position, size in zip(positions, shape, strict=True):
        index = add(times(index, size), (position, jnp.uint32(0)))
    return index


def _plain_words(group: Pair, key: Sequence[Any]) -> Any:
    """The words of groups; XLA would compute them again for each element but for the barrier."""
    if jax.default_backend() == "gpu":  # where each round of a loop would go through memory
        return lax.optimization_barrier(random_words(group, key))
    axes = frozenset[str]().union(*map(varying, (*group, *key)))
    word = lambda w: vary_over(jnp.broadcast_to(w, group[0].shape), axes)
    counter = map(word, (*group, *key[2:]))
    return lax.optimization_barrier(philox((*counter,), [*map(word, key[:2])], rolled=True))


def random_words(group: Pair, key: Sequence[Any], product: Any = None) -> list[Any]:
    """The random bits of a group of 8 elements, two of them in each word."""
    return philox((*group, *key[2:]), key[:2], product)


def times(a: Pair, size: Any) -> Pair:
    """`a` times the size of an axis, which may be symbolic."""
    factor = jnp.uint32(size) if isinstance(size, int) else jnp.asarray(size).astype(jnp.uint32)
    high, low = wide_product(a[0], factor)
    return low, high + a[1] * factor


def add(a: Pair, b: Pair) -> Pair:
    low = a[0] + b[0]
    return low, a[1] + b[1] + jnp.where(low < b[0], jnp.uint32(1), jnp.uint32(0))


def shift_right(a: Pair, bits: int) -> Pair:
    if not bits:
        return a
    return (a[0] >> bits) | (a[1] << (32 - bits)), a[1] >> bits
