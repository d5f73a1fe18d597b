r"""Elementwise activations, and the rule, passes and launches that gated units share with them.

Forward, with f a curve of :mod:`jaxkern.ops.curves`, and backward:

    out = f(x)          dx = dout · f'(x)

Saved for the backward: x alone; f is recomputed. Bytes per element, in units of its size: 2
forward (read x, write out), 3 backward (read x and dout, write dx). At most about 25 operations
each, which take less time than the memory's traffic: the kernels run at the speed of a copy.

The kernels of ReLU save a mask in x's place where a row's length is a multiple of 8: bit i of byte
j is x > 0 of element 8 j + i. A forward that is differentiated writes 1/8 byte per element more,
and the backward has 2 units and 1/8 byte (read dout and mask, write dx).

XLA takes longer alone, but it fuses an activation with its neighbours, and an array that is neither
written nor read again saves more time. So ``None`` picks the kernels only for GELU's form with the
error function, of which XLA is slower even where it fuses.

Sources: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415; Elfwing, Uchibe
and Doya, 2017, arXiv:1702.03118 (SiLU); So et al., Primer, 2021, arXiv:2109.08668 (squared ReLU).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_floating
from jaxkern.core.bound import wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import TypeOf, match_primal, match_sharding, parts_of
from jaxkern.mosaic.elementwise import Lanes, launch, unsupported
from jaxkern.mosaic.lanes import join_lanes, sum_in_lanes
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.curves import (
    PLAIN,
    GatedUnit,
    Pointwise,
    gelu_curve,
    kernel_functions,
    recomputing,
)

_BYTE = 8
"""Neighbouring elements whose bits are a byte of a mask."""


@public_op
def relu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Rectified linear unit.

    .. math:: y = \max(x, 0)

    As every activation it is computed in fp32 and rounded once; value and gradient are finite
    wherever the true ones are.

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
    return run("relu", Pointwise("relu"), {"x": x}, implementation)


@public_op
def relu_squared(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Square of the rectified linear unit.

    .. math:: y = \max(x, 0)^2

    Args:
      x, implementation: as for :func:`jaxkern.relu`.

    Returns:
      At least 0, in the shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.relu_squared(jnp.array([-1.0, 2.0])))
      [0. 4.]

    References:
      So et al., `Primer <https://arxiv.org/abs/2109.08668>`_, 2021.
    """
    return run("relu_squared", Pointwise("relu_squared"), {"x": x}, implementation)


@public_op
def silu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Sigmoid linear unit, also called swish.

    .. math:: y = \frac{x}{1 + e^{-x}}

    Value and gradient are 0 at −∞, where x · sigmoid(x) would be NaN; the gradient is 1 at ∞.

    Args:
      x, implementation: as for :func:`jaxkern.relu`.

    Returns:
      At least −0.279, in the shape and dtype of `x`.

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
    return run("silu", Pointwise("silu"), {"x": x}, implementation)


@public_op
def gelu(
    x: jax.Array, *, approximate: bool = True, implementation: Implementation | None = None
) -> jax.Array:
    r"""Gaussian error linear unit.

    .. math:: y = x \Phi(x) \approx
        \frac{x}{2} \left(1 + \tanh \sqrt{2/\pi} (x + 0.044715 x^3)\right)

    Args:
      x: as for :func:`jaxkern.relu`.
      approximate: whether to compute the form with tanh or that with the error function, as in
        :func:`jax.nn.gelu`.
      implementation: as for :func:`jaxkern.relu`; but of the form with the error function ``None``
        picks the kernels on an NVIDIA GPU of compute capability 8.0 or newer: XLA takes longer
        even where it fuses.

    Returns:
      At least −0.171, in the shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.gelu(jnp.array([-jnp.inf, 0.0, 100.0]), approximate=False))
      [ -0.   0. 100.]

    References:
      Hendrycks and Gimpel, `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
    """
    return run("gelu", Pointwise(gelu_curve(approximate)), {"x": x}, implementation)


@public_op
def quick_gelu(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Gaussian error linear unit, approximated by the logistic function as in CLIP.

    .. math:: y = \frac{x}{1 + e^{-1.702 x}}

    Args:
      x, implementation: as for :func:`jaxkern.relu`.

    Returns:
      At least −0.164, in the shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.quick_gelu(jnp.array([-jnp.inf, 0.0, 100.0])))
      [ -0.   0. 100.]

    References:
      Hendrycks and Gimpel, `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, 2016.
    """
    return run("quick_gelu", Pointwise("quick_gelu"), {"x": x}, implementation)


@public_op
def sigmoid(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Logistic function.

    .. math:: y = \frac{1}{1 + e^{-x}}

    Args:
      x, implementation: as for :func:`jaxkern.relu`.

    Returns:
      From 0 to 1, in the shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.sigmoid(jnp.array([-jnp.inf, 0.0, 100.0])))
      [0.  0.5 1. ]
    """
    return run("sigmoid", Pointwise("sigmoid"), {"x": x}, implementation)


@public_op
def tanh(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    r"""Hyperbolic tangent.

    .. math:: y = \frac{e^x - e^{-x}}{e^x + e^{-x}}

    Args:
      x, implementation: as for :func:`jaxkern.relu`.

    Returns:
      From −1 to 1, in the shape and dtype of `x`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.relu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.tanh(jnp.array([-jnp.inf, 0.0, 100.0])))
      [-1.  0.  1.]
    """
    return run("tanh", Pointwise("tanh"), {"x": x}, implementation)


def run(
    op: str, function: Pointwise | GatedUnit, arrays: dict[str, Any], implementation: Any
) -> jax.Array:
    """Computes `function` of each element of `arrays`.

    Args:
      op: the name of the public function.
      function: the activation or the gated unit. Of one array a unit takes the halves
        of its rows as gate and up.
      arrays: the arrays by their names in the public function.
      implementation: the argument of the public function.
    """
    arrays = {name: check_floating(name, a) for name, a in arrays.items()}
    ins = tuple(arrays.values())
    joined = isinstance(function, GatedUnit) and len(ins) == 1
    reason = unsupported(columns=ins[0].shape[-1] // 2 if joined else 0, **arrays)
    # XLA's error function takes more operations than the kernels', and loses even where fused.
    fused = isinstance(function, Pointwise) and function.curve != "gelu_erf"
    slower = "XLA fuses it, which saves more than the kernels do" if fused else None
    mode = resolve(implementation, reason, op=op, slower=slower)
    if mode == "xla":
        f = functools.partial(pointwise_reference, function)
        return named(op, recomputing(f)(*ins))
    x, options = ins[0], ActivationOptions(op, function, mode, joined)
    if function != Pointwise("relu") or x.ndim == 0 or x.shape[-1] % (_BYTE * parts_of(x, -1)):
        return _pointwise_jit(ins, options)
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // _BYTE, _BYTE)
    options = dataclasses.replace(options, masked=True)
    return _pointwise_jit((grouped,), options).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class ActivationOptions:
    """Static arguments of the passes.

    Attributes:
      op: the name of the public function.
      function: an ``Pointwise`` or a ``GatedUnit``, computed of each element.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      joined: whether one array holds gate and up side by side.
      masked: whether a mask of bits (..., D / 8), uint8, is saved in place of x, (..., D / 8, 8),
        for which 0 and 1 then stand.
    """

    op: str
    function: Any
    mode: Mode
    joined: bool = False
    masked: bool = False

    @property
    def kernel(self) -> str:
        """The name of the kernels, without ``_fwd`` or ``_bwd``."""
        return self.function.curve if isinstance(self.function, Pointwise) else self.op


def _pointwise(ins, options):
    return _pointwise_fwd(ins, dataclasses.replace(options, masked=False))[0]


def _pointwise_fwd(ins, options):
    out, *mask = FORWARD(options, *ins)
    types = tuple(TypeOf(jax.typeof(a)) for a in ins)
    return _match_split(out, ins[0]), (mask or ins, types)


def _pointwise_bwd(options, res, dout):
    saved, types = res
    return (tuple(map(match_primal, BACKWARD(options, *saved, dout), types)),)


_pointwise_jit = Differentiable(_pointwise_fwd, _pointwise_bwd, _pointwise)


def _match_split(out: jax.Array, like: jax.Array) -> jax.Array:
    """`out` split as `like`, where its last axis, perhaps half as long, can be."""
    parts = parts_of(like, -1) if like.ndim else 1
    return out if parts > 1 and out.shape[-1] % parts else match_sharding(out, like)


def launch_forward(options: ActivationOptions, *ins: Any, sliced: bool = False) -> tuple[Any, ...]:
    x = ins[0]  # (..., D), or (..., 2H) where it holds gate and up
    columns = x.shape[-1] // 2 if options.joined else 0
    shape = (*x.shape[:-1], columns) if options.joined else x.shape
    of = kernel_functions(exact=x.dtype == jnp.float32)

    def body(lanes: Lanes, *ins: jax.Array) -> tuple[jax.Array, ...]:
        del lanes
        out = options.function.value(*ins, of)
        return (out, _packed(ins[0] > 0)) if options.masked else (out,)

    outs = [jax.ShapeDtypeStruct(shape, x.dtype)]
    if options.masked:
        outs.append(jax.ShapeDtypeStruct(shape[:-1], jnp.uint8))
    name, vec = f"{options.kernel}_fwd", _BYTE if options.masked else None
    return launch(name, body, ins, outs, columns=columns, vec=vec, sliced=sliced)


def launch_backward(
    options: ActivationOptions, *ins_and_dout: Any, sliced: bool = False
) -> tuple[Any, ...]:
    *ins, dout = ins_and_dout
    of = kernel_functions(exact=dout.dtype == jnp.float32)

    def body(lanes: Lanes, *ins_and_dout: jax.Array) -> tuple[jax.Array, ...]:
        del lanes
        *ins, dout = ins_and_dout
        ins = map(_unpacked, ins) if options.masked else ins
        return options.function.slopes(*ins, dout, of)

    like = [dout] if options.masked else ins
    grads = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like]
    columns = dout.shape[-1] if options.joined else 0
    name, vec = f"{options.kernel}_bwd", _BYTE if options.masked else None
    return launch(name, body, ins_and_dout, grads, columns=columns, vec=vec, sliced=sliced)


def _packed(bits: jax.Array) -> jax.Array:
    """(LANES,), fp32: the byte of each lane's `bits`, (LANES · 8,)."""
    values = join_lanes([jnp.full((LANES,), 2.0**i, jnp.float32) for i in range(_BYTE)])
    return sum_in_lanes([jnp.where(bits, values, 0.0)], _BYTE)


def _unpacked(byte: jax.Array) -> jax.Array:
    """(LANES · 8,), fp32: the bits of each lane's `byte`, zeros and ones."""
    word = byte.astype(jnp.uint32)
    bits = join_lanes([word & jnp.uint32(1 << i) for i in range(_BYTE)])
    return jnp.where(bits != 0, 1.0, 0.0)


def reference_forward(options: ActivationOptions, *ins: Any) -> tuple[Any, ...]:
    out = pointwise_reference(options.function, *ins)
    if not options.masked:
        return (out,)
    return out, jnp.packbits(ins[0] > 0, axis=-1, bitorder="little")[..., 0]


def reference_backward(options: ActivationOptions, *ins_and_dout: Any) -> tuple[Any, ...]:
    *ins, dout = ins_and_dout
    if options.masked:
        bits = ins[0][..., None] >> jnp.arange(_BYTE, dtype=jnp.uint8) & 1
        ins = [bits.astype(dout.dtype)]
    parts = _parts(options.function, ins)
    f32 = wide(*(a.dtype for a in (*parts, dout)))
    slopes = options.function.slopes(*(a.astype(f32) for a in (*parts, dout)), PLAIN)
    grads = tuple(d.astype(a.dtype) for d, a in zip(slopes, parts, strict=True))
    return (jnp.concatenate(grads, axis=-1),) if options.joined else grads


def pointwise_reference(function: Any, *ins: jax.Array) -> jax.Array:
    """`function` in plain JAX, computed in fp32 and rounded once."""
    parts = _parts(function, ins)
    f32 = wide(*(a.dtype for a in parts))
    return function.value(*(a.astype(f32) for a in parts), PLAIN).astype(ins[0].dtype)


def _parts(function: Any, ins: Any) -> Any:
    """The arguments of `function`: gate and up, too, where one array holds both."""
    joined = isinstance(function, GatedUnit) and len(ins) == 1
    return jnp.split(ins[0], 2, axis=-1) if joined else ins


def _ins(options: ActivationOptions) -> tuple[str, ...]:
    """The factors of the arguments: y is a row of gate and up, or the elements of a byte."""
    if options.joined or options.masked:
        return ("... y",)
    return ("...",) * (2 if isinstance(options.function, GatedUnit) else 1)


def _out(options: ActivationOptions) -> str:
    """The factors of the result, whose row z is half of one of gate and up."""
    return "... z" if options.joined else _ins(options)[0]


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=launch_forward,
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    reference=reference_forward,
    ins=_ins,
    outs=lambda options: (_out(options), *["..."] * options.masked),
    whole="y z",
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=launch_backward,
    kernel_of_slices=functools.partial(launch_backward, sliced=True),
    reference=reference_backward,
    ins=lambda options: (*(["..."] if options.masked else _ins(options)), _out(options)),
    outs=_ins,
    whole="y z",
)
