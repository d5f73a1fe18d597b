r"""The arithmetic of an optimizer's step on a leaf, in the kernel and in plain JAX.

For a gradient g, a weight p (the master copy where there is one), and per-step numbers in device
memory, with s = unscale factor · clip factor:

    g  = s · grad
    Adam, AdamW
    mu = b1 · mu + (1 − b1) · g
    nu = b2 · nu + (1 − b2) · g²
    m  = mu / (1 − b1ᵗ), or b1 · mu / (1 − b1ᵗ⁺¹) + (1 − b1) · g / (1 − b1ᵗ) with Nesterov's
    p  = p − lr · (m / (√(nu / (1 − b2ᵗ) + eps_root) + eps) + weight_decay · p)
    SGD, whose `trace` is called mu here
    mu = momentum · mu + g
    p  = p − lr · (mu, or g + momentum · mu with Nesterov's)
    copy = p in the parameters' dtype

Where the flag `finite` is false everything stays as it is. All is computed in fp32 and rounded
once. The step takes mu and nu as they are before they are rounded.

**Stochastic rounding to bfloat16.** A bfloat16 is the upper half of a float32. For r uniform in
{0, …, 2¹⁶ − 1},

    round(x) = the upper half of (bits of x) + r

is one of the two bfloat16 around x, with probabilities that make x the expectation. What bfloat16
can hold stays as it is, NaN and infinities too. An average that moves by less than half a step of
its bfloat16 would stay where it is for ever if it were rounded to nearest.

The bits are Philox-4x32-7's: 7 are the fewest rounds that pass all tests of BigCrush, and their
time counts where an element has few bytes. Its key is the seed's two words, its counter (⌊i / 8⌋,
leaf, step, stream) for element i of a leaf's array: a step that is run again draws the same bits.
The four words of a counter serve eight elements, half a word each. For a second draw an element
takes its neighbour's half, which is independent of its own.

**Codes of 8 bits**, in blocks of 256 elements. With a block's largest magnitude a, in float32:

    mu   int8, linear:        m = a · c / 127                 c from −127 to 127
    nu   uint8, logarithmic:  v = a · 2^((c − 255) / 12)      c from 0 to 255

so that nu's codes are 6% apart from a down to a / 2^21, and smaller values have the last code. A
value is rounded to one of the two codes around it at random, too.

Sources, beside those of the optimizers: Gupta et al., Deep Learning with Limited Numerical
Precision, ICML 2015; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011; Dettmers
et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (blocks; their codes are others).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.elementwise import halves, philox, wide_product


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """Static choices of an optimizer, for which a step is compiled.

    Attributes:
      kind: the update.
      nesterov: whether the step looks ahead, by Nesterov's momentum.
      eps_root: whether Adam's root has an epsilon inside, too.
      stochastic: whether what is stored in bfloat16, but a copy, is rounded stochastically.
    """

    kind: Literal["adam", "sgd"]
    nesterov: bool = False
    eps_root: bool = False
    stochastic: bool = False


class StepNumbers(NamedTuple):
    """The numbers of a step, (): fp32, or fp64 for fp64 parameters."""

    finite: Any  # 1, or 0 to leave all as it is
    scale: Any  # of the gradients
    rate: Any  # the learning rate
    decay: Any  # the weight decay
    b1: Any  # or SGD's momentum
    one_minus_b1: Any
    b2: Any
    one_minus_b2: Any
    mu_factor: Any  # 1 / (1 − b1^t), or b1 / (1 − b1^(t + 1)) with Nesterov's
    nu_factor: Any  # 1 / √(1 − b2^t), or its square with `eps_root`
    eps: Any
    grad_factor: Any = None  # (1 − b1) / (1 − b1^t), of Adam with Nesterov's
    eps_root: Any = None


def number_names(rule: UpdateRule) -> tuple[str, ...]:
    """The fields of `StepNumbers` that a rule needs; the kernel loads no others."""
    needed = {"grad_factor": rule.kind == "adam" and rule.nesterov, "eps_root": rule.eps_root}
    return tuple(name for name in StepNumbers._fields if needed.get(name, True))


class Leaf(NamedTuple):
    """The arrays of a parameter, of one shape; absent ones are ``None``."""

    grad: Any
    weight: Any
    mu: Any
    nu: Any
    copy: Any  # the parameter, where weight is its master copy
    mu_scale: Any = None  # of each block, where mu is codes of 8 bits
    nu_scale: Any = None

    @property
    def has_codes(self) -> bool:
        """Says whether mu or nu is in 8 bits."""
        return self.mu_scale is not None or self.nu_scale is not None


# The step of some elements, in the kernel and outside


def step(rule, n, decays, g, p, mu, nu, sqrt=jnp.sqrt, divide=jnp.divide):
    """Returns the change of p and the new mu and nu; p may be ``None`` where nothing decays.

    `sqrt` and `divide` are the functions to use.
    """
    g = g * n.scale
    if rule.kind == "adam":
        mu = n.b1 * mu + n.one_minus_b1 * g
        nu = n.b2 * nu + n.one_minus_b2 * (g * g)
        root = sqrt(nu if n.eps_root is None else nu * n.nu_factor + n.eps_root)
        m = mu * n.mu_factor
        m = m if n.grad_factor is None else m + g * n.grad_factor
        root = root * n.nu_factor if n.eps_root is None else root
        change = divide(m, root + n.eps)
    else:
        change = g
        if mu is not None:
            mu = n.b1 * mu + g
            change = g + n.b1 * mu if rule.nesterov else mu
    if decays:
        change = change + n.decay * p
    return -n.rate * change, mu, nu


# Stochastic rounding to bfloat16

_ROUNDS = 7

GROUP = 8
"""Elements that one call of the generator serves."""


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds x, float32, to a bfloat16 beside it, in float32, by `bits`, uint32 below 2^16."""
    word = lax.bitcast_convert_type(x, jnp.uint32) + bits
    rounded = lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(x == x, rounded, x)


@jax.custom_jvp
def _round_with_slope(x: jax.Array, bits: jax.Array) -> jax.Array:
    """:func:`round_to_bfloat16` with the derivative of its expectation, which is 1.

    The bits that it works on have none, so that JAX would take the result for a constant.
    """
    return round_to_bfloat16(x, bits)


@_round_with_slope.defjvp
def _round_with_slope_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _round_with_slope(*primals), tangents[0]


def draws_needed(rule: UpdateRule, leaf: Leaf) -> tuple[bool, bool]:
    """Says whether a leaf needs random bits for mu and nu, and for its weight."""
    rounded = lambda a: (
        a is not None and (is_code(a) or (rule.stochastic and a.dtype == jnp.bfloat16))
    )
    return rounded(leaf.mu) or rounded(leaf.nu), rounded(leaf.weight)


def group_draws(group, leaf, seed, stream, product=wide_product) -> tuple[list[Any], list[Any]]:
    """Draws two uniform uint32 below 2^16 for each of a group of `GROUP` elements.

    `group` and the number of the `leaf` are uint32, and so are the two words of the key and the
    step that `seed` is. Returns the first draws and the second ones, an array for each element.
    """
    zero = group & jnp.uint32(0)
    key, step = seed[:2], seed[2]
    counter = (group, zero + leaf, zero + step, zero + jnp.uint32(stream))
    first = halves(philox(counter, key, product, rounds=_ROUNDS))
    return first, [half for low, high in itertools.batched(first, 2) for half in (high, low)]


def leaf_draws(shape: tuple[int, ...], leaf: Any, seed: Sequence[Any], stream: int) -> Any:
    """Draws two random numbers for all elements of a leaf: two arrays of its `shape`."""
    size = math.prod(shape)
    groups = jnp.arange(-(-size // GROUP), dtype=jnp.uint32)
    draws = group_draws(groups, jnp.asarray(leaf, jnp.uint32), seed, stream)
    return tuple(jnp.stack(d, axis=-1).reshape(-1)[:size].reshape(shape) for d in draws)


# Codes of 8 bits

CODE_BLOCK = 256
"""Elements that share a scale: a warp's, 8 to a lane."""

SMALLEST_IN_CODES = 4096
"""Elements of a leaf that is kept in 8 bits: smaller ones take little memory."""

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


def is_code(a: Any) -> bool:
    """Says whether an average is in 8 bits."""
    return jnp.issubdtype(a.dtype, jnp.integer)


def decoded(
    dtype: Any, code: Any, scale: jax.Array, exp2: Callable[..., jax.Array] = jnp.exp2
) -> jax.Array:
    """The number that a code stands for; code and scale in float32, of one shape."""
    if dtype == jnp.int8:
        return code * (scale * (1 / 127))
    return scale * exp2((code - 255.0) * (1 / _PER_OCTAVE))


def before_rounding(
    dtype: Any,
    x: jax.Array,
    scale: jax.Array,
    bits: jax.Array,
    log2: Callable[..., jax.Array] = jnp.log2,
    nearest: Callable[..., jax.Array] = jnp.round,
) -> jax.Array:
    """The number whose nearest whole number is the code of x, in float32: its random part added.

    `x` is of at most the magnitude of its `scale`, and for uint8 not negative; `bits` are uint32
    below 2^16; `log2` and `nearest`, of magnitudes below 2^22, are the functions to use.
    """
    # 1 + bits / 2^23, by its mantissa; (bits + 1/2) / 2^16 is uniform.
    above_one = lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32)
    small = above_one - (1 - 2.0**-24)
    inverse = jnp.where(scale > 0, 1 / scale, 0.0)
    if dtype == jnp.int8:
        return x * (inverse * 126.99996) + (small * 128.0 - 0.5)
    octaves = log2(jnp.maximum(x * inverse, 2.0 ** (-254.99 / _PER_OCTAVE)))
    twelfths = octaves * _PER_OCTAVE + 254.5
    below = nearest(twelfths)
    rest = twelfths - below
    # The probability of the code above, less _ABOVE[0]:
    # (2^((rest + 1/2) / 12) - 1) / (2^(1/12) - 1).
    above = rest * (_ABOVE[1] + rest * (_ABOVE[2] + rest * _ABOVE[3]))
    return jnp.minimum((below + (_ABOVE[0] + 0.5)) + above - small * 128.0, 255.4)


def largest_of_blocks(x: jax.Array) -> jax.Array:
    """The largest magnitude of each block, (elements / 256,)."""
    return jnp.abs(x).reshape(-1, CODE_BLOCK).max(axis=1)


def of_elements(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats each block's scale for its elements, in `shape`."""
    return jnp.repeat(scale, CODE_BLOCK).reshape(shape)


# In plain JAX


@functools.partial(jax.jit, static_argnums=(0, 1))
def changed(
    rule: UpdateRule, decays: bool, numbers: StepNumbers, seed: jax.Array, number: Any, leaf: Leaf
) -> tuple[Leaf, jax.Array]:
    """Returns the leaf after a step, and what the step adds to the parameter, in fp32.

    A leaf without a weight is left without one. What is added to a parameter that is rounded in a
    way of its own, as a copy or stochastically, leads to what it is rounded to.
    """
    some = [a for a in leaf if a is not None and not is_code(a)]
    f32 = functools.reduce(jnp.promote_types, (a.dtype for a in some), jnp.float32)
    numbers = StepNumbers(*(None if n is None else jnp.asarray(n).astype(f32) for n in numbers))
    g, p, *averages = (None if a is None else a.astype(f32) for a in leaf[:4])
    mu, nu = (
        a if scale is None else decoded(kept.dtype, a, of_elements(scale, kept.shape))
        for a, kept, scale in zip(averages, leaf[2:4], leaf[5:], strict=True)
    )
    of_state, of_weight = draws_needed(rule, leaf)
    draw = functools.partial(leaf_draws, leaf.grad.shape, number, list(seed))
    for_mu, for_nu = draw(0) if of_state else (None, None)
    kept = numbers.finite > 0
    # What a skipped step computes is finite, too, or it had no derivative.
    safe = lambda a, instead: None if a is None else jnp.where(kept, a, instead)
    usable = numbers._replace(scale=safe(numbers.scale, 1.0))
    delta, new_mu, new_nu = step(rule, usable, decays, safe(g, 0.0), p, mu, safe(nu, 1.0))

    def stored(old: Any, new: Any, like: Any, bits: Any) -> Any:
        if old is None:
            return None
        new = jnp.where(kept, new, old)
        if rule.stochastic and like.dtype == jnp.bfloat16:
            new = _round_with_slope(new.astype(jnp.float32), bits)
        return new.astype(like.dtype)

    def average(old: Any, new: Any, like: Any, scale: Any, bits: Any) -> tuple[Any, Any]:
        if scale is None:
            return stored(old, new, like, bits), None
        new_scale = largest_of_blocks(new)
        new = before_rounding(like.dtype, new, of_elements(new_scale, new.shape), bits)
        return (
            jnp.where(kept, jnp.round(new).astype(like.dtype), like),
            jnp.where(kept, new_scale.astype(scale.dtype), scale),
        )

    mu, mu_scale = average(mu, new_mu, leaf.mu, leaf.mu_scale, for_mu)
    nu, nu_scale = average(nu, new_nu, leaf.nu, leaf.nu_scale, for_nu)
    new_p = None if p is None else p + delta
    weight = stored(p, new_p, leaf.weight, draw(1)[0] if of_weight else None)
    copy = None if leaf.copy is None else weight.astype(leaf.copy.dtype)
    # Barriers, as XLA may leave out the rounding of what it widens again.
    if leaf.copy is not None:
        delta = lax.optimization_barrier(copy).astype(f32) - leaf.copy.astype(f32)
    elif of_weight:
        delta = lax.optimization_barrier(weight).astype(f32) - p
    else:
        delta = jnp.where(kept, delta, 0.0)
    return Leaf(None, weight, mu, nu, copy, mu_scale, nu_scale), delta
