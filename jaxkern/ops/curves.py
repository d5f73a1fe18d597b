r"""The table of activations, for every op that has one, and gated units as functions of them.

With σ the logistic function, Φ and φ the normal distribution and its density, and
z(x) = 2 √(2/π) (x + 0.044715 x³):

    relu(x) = max(x, 0)         relu_squared(x) = max(x, 0)²     silu(x) = x σ(x)
    gelu_erf(x) = x Φ(x)        gelu_tanh(x) = x σ(z(x))         quick_gelu(x) = x σ(1.702 x)
    sigmoid(x) = σ(x)           tanh(x) = 2 σ(2x) − 1

and their derivatives

    relu' = [x > 0]             relu_squared' = 2 max(x, 0)      silu' = σ (1 + x (1 − σ))
    gelu_erf' = Φ + x φ         gelu_tanh' = σ(z) + x σ(z) (1 − σ(z)) z'
    sigmoid' = σ (1 − σ)        tanh' = 1 − tanh²

An entry serves kernels and plain JAX, which differ in the functions that it calls
(:class:`Functions`). A new activation is an entry of :data:`CURVES`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import check_number
from jaxkern.mosaic.arithmetic import (
    LOG2E,
    exp_of_minus,
    fast_reciprocal,
    polynomial,
    reciprocal,
    sigmoid,
)

Activation = Literal[
    "relu",
    "relu_squared",
    "silu",
    "gelu",
    "gelu_tanh",
    "gelu_erf",
    "quick_gelu",
    "sigmoid",
    "tanh",
]
"""The values of ``activation``: the names of :data:`CURVES`, and "gelu" for "gelu_tanh"."""

_QUICK_GELU = 1.702
"""The slope within quick-GELU, with which x σ(1.702 x) is nearest to x Φ(x)."""


@dataclasses.dataclass(frozen=True)
class Functions:
    """The functions that curves call, of a kernel or of plain JAX."""

    sigmoid: Callable[[Any], Any]
    normal: Callable[[Any], tuple[Any, Any]]  # distribution and density
    tanh: Callable[[Any], Any]


def _plain_normal(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    density = jnp.exp(v * v * -0.5) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * lax.erfc(v * -math.sqrt(0.5)), density


PLAIN = Functions(jax.nn.sigmoid, _plain_normal, jnp.tanh)


def kernel_functions(exact: bool, layout: Any = None) -> Functions:
    """The functions of a kernel, to fp32 accuracy if `exact`.

    `layout` is the layout of their argument, as for :func:`jaxkern.mosaic.arithmetic.sigmoid`.
    """
    options = {"exact": exact, "layout": layout}
    return Functions(
        functools.partial(sigmoid, **options),
        functools.partial(_kernel_normal, **options),
        functools.partial(_kernel_tanh, **options),
    )


Curve = tuple[jax.Array, Callable[[jax.Array], jax.Array]]
"""f(v), and d -> d · f'(v): 0 where f is constant, whatever d is."""


def _clipped(v: jax.Array, alpha: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Bounds `v` from below, and from both sides, where a curve of alpha · v equals 0 or v.

    Then no infinity is multiplied by zero.
    """
    far = (800.0 if v.dtype == jnp.float64 else 128.0) / alpha
    above = jnp.maximum(v, -far)
    return above, jnp.minimum(above, far)


def _relu(v: jax.Array, of: Functions) -> Curve:
    del of
    return jnp.maximum(v, 0.0), lambda d: jnp.where(v > 0.0, d, 0.0)


def _relu_squared(v: jax.Array, of: Functions) -> Curve:
    del of
    positive = jnp.maximum(v, 0.0)
    slope = jnp.where(v > 0.0, 2.0 * v, 0.0)
    return positive * positive, lambda d: jnp.where(v > 0.0, d * slope, 0.0)


def _silu(v: jax.Array, of: Functions) -> Curve:
    above, near = _clipped(v)
    s = of.sigmoid(v)
    return above * s, lambda d: d * (s * (1.0 + near * (1.0 - s)))


def _steeper_silu(alpha: float, v: jax.Array, of: Functions) -> Curve:
    """v σ(alpha · v)."""
    above, near = _clipped(v, alpha)
    s = of.sigmoid(alpha * v)
    return above * s, lambda d: d * (s * (1.0 + (alpha * near) * (1.0 - s)))


def _gelu_tanh(v: jax.Array, of: Functions) -> Curve:
    a = 2 * math.sqrt(2 / math.pi)
    b = 0.044715 * a
    above, near = _clipped(v)
    s = of.sigmoid(v * (a + b * (v * v)))
    slope = a + 3 * b * (near * near)
    return above * s, lambda d: d * (s * (1.0 + near * slope * (1.0 - s)))


def _gelu_erf(v: jax.Array, of: Functions) -> Curve:
    above, near = _clipped(v)
    cdf, density = of.normal(v)
    return above * cdf, lambda d: d * (cdf + near * density)


def _sigmoid(v: jax.Array, of: Functions) -> Curve:
    s = of.sigmoid(v)
    return s, lambda d: d * (s * (1.0 - s))


def _tanh(v: jax.Array, of: Functions) -> Curve:
    t = of.tanh(v)
    return t, lambda d: d * (1.0 - t * t)


CURVES: dict[str, Callable[[jax.Array, Functions], Curve]] = {
    "relu": _relu,
    "relu_squared": _relu_squared,
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
    "quick_gelu": functools.partial(_steeper_silu, _QUICK_GELU),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
}
"""The activations by name."""

WITHOUT_EXPONENTIALS = ("relu", "relu_squared")
"""The curves for which a kernel needs no fast instructions."""

NOT_THROUGH_ZERO = ("sigmoid",)
"""The curves that are not 0 at 0."""


def gelu_curve(approximate: bool) -> str:
    return "gelu_tanh" if approximate else "gelu_erf"


def check_activation(activation: Any) -> str | None:
    """Returns the curve that the argument `activation` of an op names; None for None."""
    return None if activation is None else named_curve(activation, other=" or None")


def named_curve(activation: Any, name: str = "activation", other: str = "") -> str:
    """Returns the curve that the argument `name` of an op names; `other` is what else it may be."""
    if activation == "gelu":
        return gelu_curve(approximate=True)
    if not isinstance(activation, str) or activation not in CURVES:
        known = ", ".join(f'"{known}"' for known in get_args(Activation))
        raise ValueError(f"{name} must be one of {known}{other}; got {activation!r}")
    return activation


def evaluate(name: str, v: jax.Array, of: Functions, alpha: float = 1.0) -> Curve:
    """The curve `name` of `v`; for "silu", v σ(alpha · v)."""
    if alpha == 1.0:
        return CURVES[name](v, of)
    assert name == "silu", name
    return _steeper_silu(alpha, v, of)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def curve(name: str, v: jax.Array, alpha: float = 1.0) -> jax.Array:
    """The curve of `v` in plain JAX, whose derivative is finite too where the true one is."""
    return evaluate(name, v, PLAIN, alpha)[0]


@curve.defjvp
def _curve_jvp(name: str, alpha: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    value, times_slope = evaluate(name, primals[0], PLAIN, alpha)
    return value, times_slope(tangents[0])


def curve_value(name: str, v: Any, of: Functions, alpha: float = 1.0) -> Any:
    """The curve of `v`, differentiable in plain JAX."""
    return curve(name, v, alpha) if of is PLAIN else evaluate(name, v, of, alpha)[0]


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """An activation as a function of one array, in a kernel and in plain JAX.

    Attributes:
      curve: a name in :data:`jaxkern.ops.curves.CURVES`.
    """

    curve: str

    def value(self, x: Any, of: Functions) -> Any:
        return curve_value(self.curve, x, of)

    def slopes(self, x: Any, dout: Any, of: Functions) -> tuple[Any]:
        """dx."""
        return (evaluate(self.curve, x, of)[1](dout),)


@dataclasses.dataclass(frozen=True)
class GatedUnit:
    """A gated unit as a function of gate and up, in a kernel and in plain JAX.

    Attributes:
      curve: f, a name in :data:`jaxkern.ops.curves.CURVES`.
      alpha: of "silu", which is g σ(alpha · g).
      limit: the largest gate, and the largest up of either sign; None for no limit.
      up_offset: added to up.
    """

    curve: str
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def value(self, gate: Any, up: Any, of: Functions) -> Any:
        gate, up = self._limited(gate, up)
        return curve_value(self.curve, gate, of, self.alpha) * up

    def slopes(self, gate: Any, up: Any, dout: Any, of: Functions) -> tuple[Any, Any]:
        """dg and du."""
        near, shifted = self._limited(gate, up)
        value, times_slope = evaluate(self.curve, near, of, self.alpha)
        dgate, dup = times_slope(dout * shifted), dout * value
        if self.limit is None:
            return dgate, dup
        beyond = jnp.abs(up) > self.limit
        return jnp.where(gate > self.limit, 0.0, dgate), jnp.where(beyond, 0.0, dup)

    def _limited(self, gate: Any, up: Any) -> tuple[Any, Any]:
        """Gate and up within the limit, and the offset added to up. A NaN stays a NaN."""
        if self.limit is not None:
            gate = jnp.where(gate > self.limit, self.limit, gate)
            up = jnp.where(up > self.limit, self.limit, up)
            up = jnp.where(up < -self.limit, -self.limit, up)
        return gate, up + self.up_offset if self.up_offset else up


def check_unit(activation: Any, alpha: Any, limit: Any, up_offset: Any) -> GatedUnit:
    """Returns the unit of an op's arguments."""
    name = named_curve(activation)
    alpha = check_number("alpha", alpha, above=0)
    up_offset = check_number("up_offset", up_offset)
    if alpha != 1 and name != "silu":
        raise ValueError(
            f'alpha is the slope within "silu", g · sigmoid(alpha · g); got alpha={alpha!r} with '
            f"activation={activation!r}"
        )
    if limit is not None:
        limit = check_number("limit", limit, above=0, none="no limit")
    return GatedUnit(name, alpha, limit, up_offset)


def recomputing(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with a backward that saves only the arguments."""
    return jax.checkpoint(f, prevent_cse=False)


# Kernels' tanh and normal distribution

_TANH = (
    (0.5, (0.99999946, -0.3332632, 0.13190296, -0.044402227)),
    (
        1.0,
        (
            *(1.0, -0.33333278, 0.1333216, -0.053870913, 0.021464821, -0.007917445),
            *(0.0022822297, -0.0003533455),
        ),
    ),
)
"""Ranges of |v|, and tanh(v) / v there by polynomials of v², to relative errors 6e-7 and 5e-9."""


def _kernel_tanh(v: jax.Array, exact: bool, layout: Any = None) -> jax.Array:
    """tanh(v), to fp32 accuracy or to 1e-6, of the result.

    By a polynomial where 1 − 2 e / (1 + e), e = exp(−2 |v|), would cancel. `layout` is as for
    :func:`sigmoid`.
    """
    near, coefficients = _TANH[exact]
    magnitude = jnp.abs(v)
    if exact:
        e = exp_of_minus(2 * magnitude)
        inverse = reciprocal(1 + e)
    else:
        e = jnp.exp2(-2 * LOG2E * magnitude)
        inverse = fast_reciprocal(1 + e, layout=layout)
    far = 1 - 2 * e * inverse
    far = jnp.where(v < 0, -far, far)
    return jnp.where(magnitude < near, v * polynomial(coefficients, v * v), far)


_TAIL = (
    (
        0.4,
        *(0.159575745, 0.15963404, 0.13395938, 0.0772035219, 0.0594416128, -0.139633331),
        0.0498226896,
    ),
    (
        0.25,
        *(0.0997355667, 0.0997364316, 0.0934663553, 0.0816031101, 0.0589751357, 0.0636991728),
        *(-0.0317176606, 0.0955972489, -0.0808774109, 0.0197820333),
    ),
)
"""Φ(−v) exp(v²/2) / k of v >= 0, k = 1 / (1 + a v): a, and a polynomial of k of relative error 7e-6
or 3e-8."""


def _kernel_normal(v: jax.Array, exact: bool, layout: Any = None) -> tuple[jax.Array, jax.Array]:
    """Φ(v) and φ(v), the normal distribution and its density, to fp32 accuracy or to 1e-5.

    `layout` is as for :func:`sigmoid`.
    """
    a, *coefficients = _TAIL[exact]
    e = jnp.exp2(v * v * (-0.5 * LOG2E))
    d = 1 + a * jnp.minimum(jnp.abs(v), 128.0)
    k = reciprocal(d) if exact else fast_reciprocal(d, layout=layout)
    tail = e * (k * polynomial(coefficients, k))
    return jnp.where(v < 0, tail, 1 - tail), e * 0.3989422804014327
