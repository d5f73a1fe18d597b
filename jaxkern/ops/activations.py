r"""Elementwise activations; and the rule and the passes that gated units share with them.

Forward, with f a curve of :mod:`jaxkern.ops.curves`, and backward:

    out = f(x)          dx = dout · f'(x)

Saved for the backward: x alone; f is recomputed. Bytes per element, in units of its size: 2
forward (read x, write out), 3 backward (read x and dout, write dx). At most about 25 operations
each, which take less time than the memory's traffic: the kernels run at the speed of a copy.

XLA takes longer alone, but it fuses an activation with its neighbours, and an array that is neither
written nor read again saves more time. So ``None`` picks the kernels only for GELU's form with the
error function, of which XLA is slower even where it fuses.

Sources: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415; Elfwing, Uchibe
and Doya, 2017, arXiv:1702.03118 (SiLU); So et al., Primer, 2021, arXiv:2109.08668 (squared ReLU).
"""

import functools
import math
from typing import Any

import jax

from jaxkern.core.arguments import check_floating
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import match_primal, match_sharding
from jaxkern.ops.curves import Alone, Unit, gelu_curve, recomputing
from jaxkern.ops.elementwise import unsupported
from jaxkern.ops.pointwise import (
    Options,
    launch_backward,
    launch_forward,
    pointwise_reference,
    reference_backward,
    reference_forward,
)


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
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

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
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

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
    # XLA computes the error function in so many operations that it loses even where it fuses.
    slower = None if curve == "gelu_erf" else "XLA fuses it, which saves more than the kernels do"
    arrays = {"x": check_floating("x", x)}
    return run(op, Alone(curve), arrays, implementation, name=curve, slower=slower)


def run(
    op: str,
    function: Alone | Unit,
    arrays: dict[str, jax.Array],
    implementation: Any,
    *,
    name: str | None = None,
    columns: int | None = None,
    slower: str | None = None,
) -> jax.Array:
    """Computes `function` of each element of `arrays`.

    Args:
      op: the name of the public function.
      function: of an activation or of a gated unit.
      arrays: by their names in the public function.
      implementation: the argument of the public function.
      name: of the kernels, by default `op`.
      columns: elements of a half, where rows of one array hold gate and up; else ``None``.
      slower: why plain JAX is the faster choice, or ``None`` where the kernels are.
    """
    reason = unsupported(columns=columns or 0, **arrays)
    mode = resolve(implementation, reason, op=op, slower=slower)
    ins = tuple(arrays.values())
    if mode == "xla":
        f = functools.partial(pointwise_reference, function)
        return named(op, recomputing(f)(*ins))
    return _pointwise_jit(ins, Options(op, name or op, function, mode, joined=columns is not None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pointwise(ins: tuple[jax.Array, ...], options: Options) -> jax.Array:
    return _pointwise_fwd(ins, options)[0]


def _pointwise_fwd(ins, options):
    (out,) = FORWARD(options, *ins)
    return _match_split(out, ins[0]), ins


def _pointwise_bwd(options, ins, dout):
    grads = BACKWARD(options, *ins, dout)
    return (tuple(match_primal(g, a) for g, a in zip(grads, ins, strict=True)),)


_pointwise.defvjp(_pointwise_fwd, _pointwise_bwd)
_pointwise_jit = jax.jit(_pointwise, static_argnums=1)


def _match_split(out: jax.Array, like: jax.Array) -> jax.Array:
    """`out` split as `like`, where its last axis, perhaps half as long, can be."""
    sharding = jax.typeof(like).sharding
    split = sharding.spec[-1] if out.ndim == len(sharding.spec) > 0 else None
    names = split if isinstance(split, tuple) else (split,)
    parts = math.prod(sharding.mesh.shape[name] for name in names if name)
    return out if parts > 1 and out.shape[-1] % parts else match_sharding(out, like)


def _ins(options: Options) -> tuple[str, ...]:
    """The factors of the arguments: rows that hold gate and up, y, have a result's row, z."""
    if options.joined:
        return ("... y",)
    return ("...",) * (2 if isinstance(options.function, Unit) else 1)


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=launch_forward,
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    reference=reference_forward,
    ins=_ins,
    outs=lambda options: ("... z",) if options.joined else ("...",),
    whole="y z",
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=launch_backward,
    kernel_of_slices=functools.partial(launch_backward, sliced=True),
    reference=reference_backward,
    ins=lambda options: (*_ins(options), "... z" if options.joined else "..."),
    outs=_ins,
    whole="y z",
)
