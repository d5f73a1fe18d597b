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
once, to nearest or, to bfloat16, stochastically (`jaxkern.optim.rounding`); mu and nu may be codes
of 8 bits (`jaxkern.optim.quantise`). The step takes mu and nu as they are before they are rounded.

Sources: Kingma and Ba, Adam, ICLR 2015; Dozat, Incorporating Nesterov Momentum into Adam, ICLR
workshop 2016; Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.optim import quantise
from jaxkern.optim.rounding import Draws, leaf_draws, round_to_bfloat16, round_with_slope


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a step is compiled for of the optimizer.

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


class Numbers(NamedTuple):
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


def number_names(rule: Rule) -> tuple[str, ...]:
    """The fields of `Numbers` that a rule needs; the kernel loads no others."""
    absent = set()
    if not (rule.kind == "adam" and rule.nesterov):
        absent.add("grad_factor")
    if not rule.eps_root:
        absent.add("eps_root")
    return tuple(name for name in Numbers._fields if name not in absent)


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


@dataclasses.dataclass(frozen=True)
class Static:
    """What a step is compiled for of a leaf: its number in the tree, and whether it decays."""

    number: int
    decays: bool


def is_code(a: Any) -> bool:
    """Says whether an average is in 8 bits."""
    return jnp.issubdtype(a.dtype, jnp.integer)


# The step of some elements, in the kernel and outside


def corrected(n: Numbers, g: Any, mu: Any) -> Any:
    """The average of the gradients without its bias to 0; with Nesterov's, one step ahead."""
    m = mu * n.mu_factor
    return m if n.grad_factor is None else m + g * n.grad_factor


def plain_ratio(n: Numbers, g: Any, mu: Any, nu: Any) -> Any:
    """Adam's step before the learning rate: the average over the root of that of the squares."""
    m = corrected(n, g, mu)
    if n.eps_root is not None:
        return m / (jnp.sqrt(nu * n.nu_factor + n.eps_root) + n.eps)
    return m / (jnp.sqrt(nu) * n.nu_factor + n.eps)


def step(
    rule: Rule,
    n: Numbers,
    decays: bool,
    g: Any,
    p: Any,
    mu: Any,
    nu: Any,
    ratio: Callable[[Numbers, Any, Any, Any], Any] = plain_ratio,
):
    """Returns the change of p and the new mu and nu; p may be ``None`` where nothing decays."""
    g = g * n.scale
    if rule.kind == "adam":
        mu = n.b1 * mu + n.one_minus_b1 * g
        nu = n.b2 * nu + n.one_minus_b2 * (g * g)
        change = ratio(n, g, mu, nu)
    else:
        change = g
        if mu is not None:
            mu = n.b1 * mu + g
            change = g + n.b1 * mu if rule.nesterov else mu
    if decays:
        change = change + n.decay * p
    return -n.rate * change, mu, nu


def streams(rule: Rule, leaf: Leaf) -> tuple[bool, bool]:
    """Says whether a leaf needs random bits for mu and nu, and for its weight."""
    rounded = lambda a: (
        a is not None and (is_code(a) or (rule.stochastic and a.dtype == jnp.bfloat16))
    )
    return rounded(leaf.mu) or rounded(leaf.nu), rounded(leaf.weight)


def rounded(
    rule: Rule,
    dtype: Any,
    x: jax.Array,
    bits: Any,
    to_bfloat16: Callable[[jax.Array, Any], jax.Array] = round_to_bfloat16,
) -> jax.Array:
    """Rounds x, fp32, to bfloat16 if that is done at random; else the cast to `dtype` rounds it."""
    return to_bfloat16(x, bits) if rule.stochastic and dtype == jnp.bfloat16 else x


# In plain JAX


@functools.partial(jax.jit, static_argnums=(0, 1))
def changed(
    rule: Rule, decays: bool, numbers: Numbers, seed: jax.Array, number: Any, leaf: Leaf
) -> tuple[Leaf, jax.Array]:
    """Returns the leaf after a step, and what the step adds to the parameter, in fp32.

    A leaf without a weight is left without one. What is added to a parameter that is rounded in a
    way of its own, as a copy or stochastically, leads to what it is rounded to.
    """
    some = [a for a in leaf if a is not None and not is_code(a)]
    f32 = functools.reduce(jnp.promote_types, (a.dtype for a in some), jnp.float32)
    numbers = Numbers(*(None if n is None else jnp.asarray(n).astype(f32) for n in numbers))
    g, p = (None if a is None else a.astype(f32) for a in leaf[:2])
    mu, nu = _average(leaf.mu, leaf.mu_scale, f32), _average(leaf.nu, leaf.nu_scale, f32)
    of_state, of_weight = streams(rule, leaf)

    def draws(stream: int, needed: bool) -> Draws:
        if not needed:
            return Draws(None, None)
        return leaf_draws(leaf.grad.shape, number, list(seed), stream)

    for_mu, for_nu = draws(0, of_state)
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
            new = new.astype(jnp.float32)  # whose bits are rounded
        return rounded(rule, like.dtype, new, bits, round_with_slope).astype(like.dtype)

    def average(old: Any, new: Any, like: Any, scale: Any, bits: Any) -> tuple[Any, Any]:
        if scale is None:
            return stored(old, new, like, bits), None
        new_scale = quantise.largest(new)
        new = quantise.code(like.dtype, new, quantise.spread(new_scale, new.shape), bits)
        return (
            jnp.where(kept, new.astype(like.dtype), like),
            jnp.where(kept, new_scale.astype(scale.dtype), scale),
        )

    after_mu = average(mu, new_mu, leaf.mu, leaf.mu_scale, for_mu)
    after_nu = average(nu, new_nu, leaf.nu, leaf.nu_scale, for_nu)
    new_p = None if p is None else p + delta
    weight = stored(p, new_p, leaf.weight, draws(1, of_weight).first)
    copy = None if leaf.copy is None else weight.astype(leaf.copy.dtype)
    after = Leaf(None, weight, after_mu[0], after_nu[0], copy, after_mu[1], after_nu[1])
    # Barriers, as XLA may leave out the rounding of what it widens again.
    if leaf.copy is not None:
        delta = lax.optimization_barrier(after.copy).astype(f32) - leaf.copy.astype(f32)
    elif of_weight:
        delta = lax.optimization_barrier(after.weight).astype(f32) - p
    else:
        delta = jnp.where(kept, delta, 0.0)
    return after, delta


def _average(a: Any, scale: Any, f32: Any) -> Any:
    """mu or nu as numbers, decoded where it is codes."""
    if a is None or scale is None:
        return None if a is None else a.astype(f32)
    return quantise.value(a.dtype, a.astype(f32), quantise.spread(scale, a.shape))
