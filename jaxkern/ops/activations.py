r"""Elementwise activations.

Forward, with f a curve of :mod:`jaxkern.ops.curves`, and backward:

    out = f(x)          dx = dout · f'(x)

Saved for the backward: x alone; f is recomputed. Bytes per element, in units of its size: 2
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
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_floating, unfit
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding, named
from jaxkern.ops.curves import (
    CURVES,
    PLAIN,
    curve,
    gelu_curve,
    kernel_functions,
    recomputing,
    wide,
)
from jaxkern.ops.elementwise import Lanes, launch, too_large, unit


@public_op
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


@public_op
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


@public_op
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


@public_op
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


@public_op
def quick_gelu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Gaussian error linear unit, approximated by the logistic function as in CLIP.

    .. math:: y = \frac{x}{1 + e^{-1.702 x}}

    Computed in fp32, rounded once; finite at ±∞ where the true value is.

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: as for :func:`jaxkern.relu`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.quick_gelu(jnp.array([-jnp.inf, 0.0, 100.0])))
      [ -0.   0. 100.]

    References:
      Hendrycks and Gimpel, `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
    """
    return _activation("quick_gelu", "quick_gelu", x, implementation)


@public_op
def sigmoid(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Logistic function.

    .. math:: y = \frac{1}{1 + e^{-x}}

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: as for :func:`jaxkern.relu`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.sigmoid(jnp.array([-jnp.inf, 0.0, 100.0])))
      [0.  0.5 1. ]
    """
    return _activation("sigmoid", "sigmoid", x, implementation)


@public_op
def tanh(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Hyperbolic tangent.

    .. math:: y = \frac{e^x - e^{-x}}{e^x + e^{-x}}

    Args:
      x: any shape, bfloat16, float16 or float32.
      implementation: as for :func:`jaxkern.relu`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.tanh(jnp.array([-jnp.inf, 0.0, 100.0])))
      [-1.  0.  1.]
    """
    return _activation("tanh", "tanh", x, implementation)


def _activation(op: str, curve: str, x: Any, implementation: Any) -> jax.Array:
    x = check_floating("x", x)
    slower = None if curve == "gelu_erf" else "XLA fuses it, which saves more than the kernels do"
    mode = resolve(implementation, unsupported(x=x), op=op, slower=slower)
    if mode == "xla":
        return named(op, recomputing(functools.partial(activation_reference, curve))(x))
    return _pointwise_jit(x, _Options(curve, mode))


def unsupported(*, columns: int = 0, **arrays: jax.Array) -> str | None:
    """Why kernels that work element by element, or on halves of rows, cannot take `arrays`."""
    if reason := unfit(**arrays):
        return reason
    present = arrays.values()
    return too_large(unit(*present, columns=columns), *present)


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
    (out,) = FORWARD(options, x)
    return match_sharding(out, x), x


def _pointwise_bwd(options, x, dout):
    (dx,) = BACKWARD(options, x, dout)
    return (match_primal(dx, x),)


_pointwise.defvjp(_pointwise_fwd, _pointwise_bwd)
_pointwise_jit = jax.jit(_pointwise, static_argnums=1)


def _launch_fwd(options: _Options, x: Any, *, sliced: bool = False):
    if x.size == 0:
        return (x,)

    def body(lanes: Lanes, x: jax.Array):
        of = kernel_functions(exact)
        return (CURVES[options.curve](x, of)[0],)

    exact = x.dtype == jnp.float32
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(f"{options.curve}_fwd", body, [x], [out], sliced=sliced)


def _launch_bwd(options: _Options, x: Any, dout: Any, *, sliced: bool = False):
    if x.size == 0:
        return (x,)

    def body(lanes: Lanes, x: jax.Array, dout: jax.Array):
        of = kernel_functions(exact)
        return (CURVES[options.curve](x, of)[1](dout),)

    exact = x.dtype == jnp.float32
    dx = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(f"{options.curve}_bwd", body, [x, dout], [dx], sliced=sliced)


# Reference


def activation_reference(name: str, x: jax.Array) -> jax.Array:
    """The curve `name` of `x` in plain JAX, computed in fp32 and rounded once."""
    return curve(name, x.astype(wide(x))).astype(x.dtype)


def _reference_fwd(options, x):
    return (activation_reference(options.curve, x),)


def _reference_bwd(options, x, dout):
    f32 = wide(x, dout)
    times_slope = CURVES[options.curve](x.astype(f32), PLAIN)[1]
    return (times_slope(dout.astype(f32)).astype(x.dtype),)


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=_launch_fwd,
    kernel_of_slices=functools.partial(_launch_fwd, sliced=True),
    reference=_reference_fwd,
    ins=("...",),
    outs=("...",),
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=_launch_bwd,
    kernel_of_slices=functools.partial(_launch_bwd, sliced=True),
    reference=_reference_bwd,
    ins=("...", "..."),
    outs=("...",),
)
