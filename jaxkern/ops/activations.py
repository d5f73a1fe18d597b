r"""Elementwise activations: their curves, for every op that has one, and as ops of their own.

Forward, with σ the logistic function, Φ and φ the normal distribution and its density, and
z(x) = 2 √(2/π) (x + 0.044715 x³):

    relu(x) = max(x, 0)         relu_squared(x) = max(x, 0)²         silu(x) = x σ(x)
    gelu(x) = x Φ(x), or in its tanh form x σ(z(x))

Backward, dx = dout · f'(x):

    relu' = [x > 0]     relu_squared' = 2 max(x, 0)     silu' = σ (1 + x (1 − σ))
    gelu' = Φ + x φ, or σ(z) + x σ(z) (1 − σ(z)) z'

Saved for the backward: x alone; σ and Φ are recomputed. Bytes per element, in units of its size: 2
forward (read x, write out), 3 backward (read x and dout, write dx). At most about 25 operations
each, for which memory leaves time: the kernels run at the speed of a copy.

XLA takes longer alone, but fuses them with their neighbours, and an array that is neither written
nor read again decides the choice. Both passes over 16384 × 8192 in bf16 on one H200, JAX 0.11.2:

                            kernels    XLA alone    XLA fused (alone less 4 arrays' traffic)
    relu, relu_squared       311 µs       347 µs      97 µs
    silu                     310          371        121
    gelu                     311          421        171
    gelu, error function     345          876        626: here None picks the kernels

Sources: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415; Elfwing, Uchibe
and Doya, 2017, arXiv:1702.03118 (SiLU); So et al., Primer, 2021, arXiv:2109.08668 (squared ReLU).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.arguments import check_floating
from jaxkern.core.arithmetic import normal, sigmoid
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding, named
from jaxkern.ops.elementwise import Lanes, launch, too_large, unit


def relu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Rectified linear unit.

    .. math:: y = \max(x, 0)

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` or ``None`` for plain JAX,
        which takes longer alone but fuses with what is around it. Between two matrix products,
        where there is nothing to fuse with, the kernels are faster.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of a floating dtype.
      ValueError: `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.relu(jnp.array([-1.0, 2.0])))
      [0. 2.]
    """
    return _activation("relu", "relu", x, implementation)


def relu_squared(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Square of the rectified linear unit.

    .. math:: y = \max(x, 0)^2

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: as for :func:`jaxkern.relu`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.relu_squared(jnp.array([-1.0, 2.0])))
      [0. 4.]

    References:
      So et al., `Primer <https://arxiv.org/abs/2109.08668>`_, 2021.
    """
    return _activation("relu_squared", "relu_squared", x, implementation)


def silu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Sigmoid linear unit, also called swish.

    .. math:: y = \frac{x}{1 + e^{-x}}

    Computed in fp32, rounded once. Value and gradient are finite wherever the true ones are: 0 and
    0 at -∞, where x · sigmoid(x) would be NaN, and a gradient of 1 at ∞.

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: as for :func:`jaxkern.relu`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of a floating dtype.
      ValueError: `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.silu(jnp.array([-jnp.inf, 0.0, 100.0])))
      [ -0.   0. 100.]

    References:
      Elfwing, Uchibe and Doya, `Sigmoid-Weighted Linear Units
      <https://arxiv.org/abs/1702.03118>`_, 2017.
    """
    return _activation("silu", "silu", x, implementation)


def gelu(
    x: jax.Array, *, approximate: bool = True, implementation: Implementation | None = None
) -> jax.Array:
    r"""Gaussian error linear unit.

    .. math:: y = x \Phi(x) \approx
        \frac{x}{2} \left(1 + \tanh \sqrt{2/\pi} (x + 0.044715 x^3)\right)

    Computed in fp32, rounded once; finite at ±∞ where the true value is.

    Args:
      x: any shape, bfloat16, float16 or float32.
      approximate: whether to compute the form with tanh or that with the error function, as in
        :func:`jax.nn.gelu`.
      implementation: as for :func:`jaxkern.relu`; but of the form with the error function ``None``
        picks the kernels on an NVIDIA GPU of compute capability 9.0 or newer: XLA takes longer
        even where it fuses.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of a floating dtype.
      ValueError: `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.gelu(jnp.array([-jnp.inf, 0.0, 100.0]), approximate=False))
      [ -0.   0. 100.]

    References:
      Hendrycks and Gimpel, `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
    """
    return _activation("gelu", gelu_curve(approximate), x, implementation)


def _activation(op: str, curve: str, x: Any, implementation: Any) -> jax.Array:
    x = check_floating("x", x)
    slower = None if curve == "gelu_erf" else "XLA fuses it, which saves more than the kernels do"
    mode = resolve(implementation, unsupported(x=x), op=op, slower=slower)
    if mode == "xla":
        return named(op, recomputing(functools.partial(activation_reference, curve))(x))
    return _pointwise_jit(x, _Options(curve, mode))


def unsupported(*, columns: int = 0, **arrays: jax.Array) -> str | None:
    """Why kernels that work element by element, or on halves of rows, cannot take `arrays`."""
    for name, a in arrays.items():
        if a.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {a.dtype}, and the kernels take bfloat16, float16 and float32"
    present = arrays.values()
    return too_large(unit(*present, columns=columns), *present)


# Curves


@dataclasses.dataclass(frozen=True)
class Functions:
    """What the curves are made of, in a kernel or in plain JAX."""

    sigmoid: Callable[[Any], Any]
    normal: Callable[[Any], tuple[Any, Any]]  # distribution and density


def _plain_normal(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    density = jnp.exp(v * v * -0.5) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * lax.erfc(v * -math.sqrt(0.5)), density


PLAIN = Functions(jax.nn.sigmoid, _plain_normal)


def kernel_functions(exact: bool, interpret: bool, layout: Any = None) -> Functions:
    """Those of a kernel, `exact` ones to fp32 accuracy.

    `layout` is that of sigmoid's argument, as for :func:`jaxkern.core.arithmetic.sigmoid`.
    """
    return Functions(
        functools.partial(sigmoid, exact=exact, interpret=interpret, layout=layout),
        functools.partial(normal, exact=exact, interpret=interpret),
    )


def _clipped(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`v` from below, and from both sides, where a curve of it has long reached 0 or v.

    So that infinities meet no zero.
    """
    far = 800.0 if v.dtype == jnp.float64 else 128.0
    above = jnp.maximum(v, -far)
    return above, jnp.minimum(above, far)


Curve = tuple[jax.Array, Callable[[jax.Array], jax.Array]]
"""f(v), and d -> d · f'(v): 0 where f is constant, whatever d is."""


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


CURVES: dict[str, Callable[[jax.Array, Functions], Curve]] = {
    "relu": _relu,
    "relu_squared": _relu_squared,
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
}


ACTIVATION_CURVES = {
    "relu": "relu",
    "relu_squared": "relu_squared",
    "silu": "silu",
    "gelu": "gelu_tanh",
}
"""The curves by what other ops' ``activation`` argument calls them."""


def gelu_curve(approximate: bool) -> str:
    return "gelu_tanh" if approximate else "gelu_erf"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def curve(name: str, v: jax.Array) -> jax.Array:
    """The curve of `v` in plain JAX, whose derivative is finite too where the true one is."""
    return CURVES[name](v, PLAIN)[0]


@curve.defjvp
def _curve_jvp(name: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    value, times_slope = CURVES[name](primals[0], PLAIN)
    return value, times_slope(tangents[0])


def curve_value(name: str, v: Any, of: Functions) -> Any:
    """The curve of `v`, differentiable in plain JAX."""
    return curve(name, v) if of is PLAIN else CURVES[name](v, of)[0]


def wide(*arrays: jax.Array) -> Any:
    """The dtype that plain JAX computes in."""
    return functools.reduce(jnp.promote_types, [a.dtype for a in arrays], jnp.float32)


def recomputing(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, of which the backward saves nothing but the arguments."""
    return jax.checkpoint(f, prevent_cse=False)


# The op


@dataclasses.dataclass(frozen=True)
class _Options:
    curve: str
    mode: Mode

    @property
    def op(self) -> str:
        """The public function's name."""
        return "gelu" if self.curve in (gelu_curve(True), gelu_curve(False)) else self.curve


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pointwise(x: jax.Array, options: _Options) -> jax.Array:
    return _pointwise_fwd(x, options)[0]


def _pointwise_fwd(x, options):
    (out,) = _forward_pass(options, x.ndim)(x)
    return match_sharding(out, x), x


def _pointwise_bwd(options, x, dout):
    (dx,) = _backward_pass(options, x.ndim)(x, dout)
    return (match_primal(dx, x),)


_pointwise.defvjp(_pointwise_fwd, _pointwise_bwd)
_pointwise_jit = jax.jit(_pointwise, static_argnums=1)


def factors(ndim: int) -> str:
    """A factor of a :class:`KernelPass` for each dimension."""
    return " ".join("abcdefghijklmnop"[:ndim])


@functools.cache
def _forward_pass(options: _Options, ndim: int) -> KernelPass:
    return KernelPass(
        name=f"{options.curve}_fwd",
        saved_as=options.op,
        mode=options.mode,
        kernel=functools.partial(_launch_fwd, options),
        kernel_of_slices=functools.partial(_launch_fwd, options, sliced=True),
        reference=functools.partial(_reference_fwd, options.curve),
        ins=(factors(ndim),),
        outs=(factors(ndim),),
    )


@functools.cache
def _backward_pass(options: _Options, ndim: int) -> KernelPass:
    return KernelPass(
        name=f"{options.curve}_bwd",
        mode=options.mode,
        kernel=functools.partial(_launch_bwd, options),
        kernel_of_slices=functools.partial(_launch_bwd, options, sliced=True),
        reference=functools.partial(_reference_bwd, options.curve),
        ins=(factors(ndim),) * 2,
        outs=(factors(ndim),),
    )


def _launch_fwd(options: _Options, x: Any, *, sliced: bool = False):
    if x.size == 0:
        return (x,)

    def body(lanes: Lanes, x: jax.Array):
        of = kernel_functions(exact, lanes.interpret)
        return (CURVES[options.curve](x, of)[0],)

    exact = x.dtype == jnp.float32
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    interpret = options.mode == "interpret"
    return launch(f"{options.curve}_fwd", body, [x], [out], sliced=sliced, interpret=interpret)


def _launch_bwd(options: _Options, x: Any, dout: Any, *, sliced: bool = False):
    if x.size == 0:
        return (x,)

    def body(lanes: Lanes, x: jax.Array, dout: jax.Array):
        of = kernel_functions(exact, lanes.interpret)
        return (CURVES[options.curve](x, of)[1](dout),)

    exact = x.dtype == jnp.float32
    dx = jax.ShapeDtypeStruct(x.shape, x.dtype)
    interpret = options.mode == "interpret"
    return launch(f"{options.curve}_bwd", body, [x, dout], [dx], sliced=sliced, interpret=interpret)


# Reference


def activation_reference(name: str, x: jax.Array) -> jax.Array:
    """The curve `name` of `x` in plain JAX, computed in fp32 and rounded once."""
    return curve(name, x.astype(wide(x))).astype(x.dtype)


def _reference_fwd(name, x):
    return (activation_reference(name, x),)


def _reference_bwd(name, x, dout):
    f32 = wide(x, dout)
    times_slope = CURVES[name](x.astype(f32), PLAIN)[1]
    return (times_slope(dout.astype(f32)).astype(x.dtype),)
