r"""Root-mean-square and layer normalisation: the ops.

Forward, for a row of N elements (or each group of `group_size` of it), with h = x + residual:

    v    = h,   or   h · s(gate)   where the gate comes first
    mean = Σv / N  (layer norm; 0 for RMS norm)          rstd = 1 / sqrt(Σ(v − mean)² / N + eps)
    x̂    = (v − mean) · rstd          y = x̂ · (w + o) + b
    out  = f(y),   or   f(y) · s(gate)   where the gate comes last

with weight w, its offset o, bias b and activations f and s, the latter by default SiLU. Backward,
for the cotangents dout and dh:

    dy = dout · s(gate) · f'(y)             dgate = dout · f(y) · s'(gate)
    g  = dy · (w + o)                       dw = Σ_rows dy · x̂          db = Σ_rows dy
    dv = rstd · (g − mean(g) − x̂ · mean(g · x̂))        (RMS norm: without mean(g))
    dx = dresidual = dv + dh

and where the gate comes first, dy = dout · f'(y), dx = dv · s(gate) + dh, dgate = dv · h ·
s'(gate).

Saved for the backward: the arguments (with a residual, h in place of x and residual: it is returned
anyway), mean and rstd (fp32, one each per row or group); the rest is recomputed. A product that
takes the result keeps it as well, but for :func:`norm_then`: there the backward writes it again,
and a sum h of a bf16 x and an fp32 residual is kept in bf16 (not for a layer norm).

Bytes per element of x, in units of its size: 2 forward (read x, write out), 3 backward (read x and
dout, write dx). A residual adds 2 and 1, a gate 1 and 2. With some 5 operations per element forward
and 15 backward, both passes wait for memory alone.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467; Ba, Kiros
and Hinton, Layer Normalization, 2016, arXiv:1607.06450; for the gate and the groups Dao and Gu,
Transformers are SSMs, 2024, arXiv:2405.21060.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import (
    FLOATS,
    check_dtype,
    check_floating,
    check_integer,
    check_number,
    check_optional,
    unfit,
)
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, residual_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import TypeOf, match_primal, match_sharding
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.curves import Activation, check_activation, named_curve
from jaxkern.ops.norm.kernel import launch_bwd, launch_fwd
from jaxkern.ops.norm.reference import (
    BACKWARD_PARTS,
    FORWARD_PARTS,
    NormOptions,
    reference_bwd,
    reference_fwd,
)


class Settings(NamedTuple):
    """The arguments of a norm that are no arrays, as for :func:`rms_norm`."""

    eps: float
    weight_offset: float = 0.0
    activation: Activation | None = None
    gate_activation: Activation = "silu"
    norm_before_gate: bool = True
    group_size: int | None = None
    dtype: Any = None


@residual_op
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: jax.Array | None = None,
    activation: Activation | None = None,
    gate: jax.Array | None = None,
    gate_activation: Activation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Normalise the last axis of `x` by its root mean square.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + o) + b

    With `residual`, x + residual takes the place of x and is returned, too; with `activation`, the
    result is f(y); with `gate`, it is multiplied by s(gate), or the input is, s being
    `gate_activation`.

    Squares, their mean and the products are computed in fp32, whatever the dtypes; the result is
    rounded once, to `dtype`. For the backward, the arguments and one fp32 number per row are kept.
    A row with a NaN or an infinity does not touch the others' results or gradients,
    except the gradients of `weight` and `bias`, which sum over rows. Squares overflow beyond 1e19,
    which bf16 and float32 hold: such a row becomes 0, or `bias`. The bits are the same on every
    run.

    On a mesh, the rows may be split between devices in any way. So may the last axis: devices then
    add up the sums of each row, in plain JAX. For ``"mosaic"`` it is gathered.

    Args:
      x: (..., N), bfloat16, float16 or float32.
      weight: (N,), any of those dtypes; ``None`` stands for ones, without `weight_offset`.
      bias: (N,), any of those dtypes; ``None`` stands for zeros.
      eps: added to the mean square.
      weight_offset: o, added to `weight` in fp32; 1.0 for models that store ``weight - 1``.
      residual: the shape of `x`, any of those dtypes. The sum is rounded to the dtype that ``x +
        residual`` has in JAX before it is normalised, so that it is what it is returned as: a
        float32 residual keeps a stream of bfloat16 blocks exact.
      activation: f: ``"silu"``, ``"gelu"`` (by tanh, as ``jax.nn.gelu``; also ``"gelu_tanh"``),
        ``"gelu_erf"``, ``"quick_gelu"``, ``"relu"``, ``"relu_squared"``, ``"sigmoid"``, ``"tanh"``
        or ``None``.
      gate: the shape of `x`, any of those dtypes.
      gate_activation: s, one of these; ``"sigmoid"`` in Kimi's linear attention, ``"silu"`` in
        Mamba-2.
      norm_before_gate: whether the gate multiplies the result or, if false, the input.
      group_size: elements that are normalised together, a divisor of N; ``None`` for all N.
      dtype: of the result, one of those dtypes; ``None`` for that of `x`.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or newer, plain JAX
        elsewhere.

    Returns:
      (..., N), in `dtype`. With `residual`, also the sum x + residual.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or not a Python number.
      ValueError: a shape or `group_size` does not fit, or `activation` or `implementation` is
        unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, weight = jnp.ones((2, 8, 256), jnp.bfloat16), jnp.ones(256)
      >>> jaxkern.rms_norm(x, weight).shape
      (2, 8, 256)
      >>> dweight = jax.grad(lambda w: jaxkern.rms_norm(x, w).sum())(weight)
      >>> out, x = jaxkern.rms_norm(x, weight, residual=x)

    References:
      Zhang and Sennrich, `Root Mean Square Layer Normalization
      <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    arrays = x, weight, bias, residual, gate
    gated = gate_activation, norm_before_gate
    settings = Settings(eps, weight_offset, activation, *gated, group_size, dtype)
    return _norm("rms_norm", arrays, settings, implementation)


@residual_op
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: jax.Array | None = None,
    activation: Activation | None = None,
    gate: jax.Array | None = None,
    gate_activation: Activation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Normalise the last axis of `x` to mean 0 and variance 1.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}}
        \cdot (w + o) + b

    Mean, variance and the products are computed in fp32, whatever the dtypes, the variance from
    the differences to the mean, so that a large mean does it no harm. For the backward, the
    arguments and two fp32 numbers per row are kept. Where squares of the differences overflow,
    beyond 1e19, which bf16 and float32 hold, a row becomes `bias`. The rest is as for
    :func:`rms_norm`: rounding, `residual`, `gate`, a NaN in a row, meshes.

    Args:
      x: (..., N), bfloat16, float16 or float32.
      weight, bias: (N,), any of those dtypes, or ``None``.
      eps: added to the variance.
      weight_offset, activation, gate_activation, norm_before_gate, group_size, dtype: as for
        :func:`rms_norm`.
      residual, gate: the shape of `x`, any of those dtypes; as for :func:`rms_norm`.
      implementation: ``"mosaic"``, ``"xla"`` or ``None`` for the fastest.

    Returns:
      (..., N), in `dtype`. With `residual`, also the sum x + residual.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`rms_norm` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, weight, bias = jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.array([0.0, 10.0])
      >>> jaxkern.layer_norm(x, weight, bias).round()
      Array([[-1., 11.]], dtype=float32)

    References:
      Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
    """
    arrays = x, weight, bias, residual, gate
    gated = gate_activation, norm_before_gate
    settings = Settings(eps, weight_offset, activation, *gated, group_size, dtype)
    return _norm("layer_norm", arrays, settings, implementation)


def _norm(op: str, arrays: Any, settings: Settings, implementation: Any) -> Any:
    arrays, options = _checked(op, arrays, settings, implementation)
    out, h = _pair(arrays, options)
    return out if h is None else (out, h)


def _pair(arrays: Any, options: NormOptions) -> tuple[Any, Any]:
    if options.mode == "xla":
        return named(options.op, reference_fwd(options, *arrays))[:2]
    return _pair_jit(*arrays, options)


def _checked(
    op: str, arrays: Any, settings: Settings, implementation: Any
) -> tuple[Any, NormOptions]:
    """The arrays of the passes, and their options."""
    x, weight, bias, residual, gate = arrays
    eps, weight_offset, activation, gate_activation, norm_before_gate, group_size, dtype = settings
    x = check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis to normalise, got a scalar")
    n = x.shape[-1]
    weight = check_optional("weight", weight, (n,), "(N,), N the last axis of x")
    if isinstance(bias, float):
        raise TypeError(
            f"bias must be an array of shape {(n,)} = (N,), N the last axis of x, got the number "
            f"{bias}; eps is given by name, eps={bias}"
        )
    bias = check_optional("bias", bias, (n,), "(N,), N the last axis of x")
    residual = check_optional("residual", residual, x.shape, "the shape of x")
    gate = check_optional("gate", gate, x.shape, "the shape of x")
    group_size = n if group_size is None else _check_group_size(group_size, n)
    result = jax.ShapeDtypeStruct((), x.dtype if dtype is None else _check_dtype(dtype))
    options = NormOptions(
        op=op,
        centered=op == "layer_norm",
        eps=check_number("eps", eps, minimum=0.0),
        weight_offset=check_number("weight_offset", weight_offset),
        activation=check_activation(activation),
        gate_activation=named_curve(gate_activation, "gate_activation"),
        norm_before_gate=norm_before_gate,
        group_size=group_size,
        x_dtype=str(x.dtype),
        residual_dtype=None if residual is None else str(residual.dtype),
        mode=resolve(
            implementation,
            unfit(x=x, weight=weight, bias=bias, residual=residual, gate=gate, dtype=result),
            op=op,
            slower=_slower(group_size),
        ),
        out_dtype=None if dtype is None else str(result.dtype),
    )
    return (x, residual, weight, bias, gate), options


def _check_dtype(dtype: Any) -> Any:
    found = check_dtype("dtype", dtype)
    if found not in FLOATS:
        raise TypeError(
            f"dtype must be bfloat16, float16 or float32 (float64 in plain JAX), got {found}"
        )
    return found


def _check_group_size(group_size: Any, n: int) -> int:
    size = check_integer("group_size", group_size, optional=True)
    if size < 1 or n % size:
        raise ValueError(
            f"group_size must be a positive divisor of the last axis of x, {n}; got {size}"
        )
    return size


def _slower(n: int) -> str | None:
    """Says why XLA is faster than the kernels for rows or groups of `n`."""
    if n < LANES:
        return f"rows of {n} elements, fewer than {LANES}, are not measured faster in the kernel"
    return None


def _pair_fwd(x, residual, weight, bias, gate, options):
    out, h, mean, rstd, rounded = FORWARD(options, x, residual, weight, bias, gate)
    out = match_sharding(out, x)
    if h is None:
        return (out, None), (x, None, weight, bias, gate, mean, rstd)
    h = match_sharding(h, x)
    kept = h if rounded is None else match_sharding(rounded, x)
    summands = TypeOf(jax.typeof(x)), TypeOf(jax.typeof(residual))
    return (out, h), (kept, summands, weight, bias, gate, mean, rstd)


def _pair_bwd(options, res, cotangents):
    h, summands, weight, bias, gate, mean, rstd = res
    x, residual = (h, None) if summands is None else summands
    dout, dh = cotangents
    arrays = (h, weight, bias, gate, mean, rstd, dout, dh)
    dx, dresidual, *others, out = BACKWARD(options, *arrays)
    if residual is not None and dresidual is None:
        dresidual = dx
    args = (x, residual, weight, bias, gate)
    grads = tuple(map(match_primal, (dx, dresidual, *others), args))
    return (*grads, out) if options.output else grads


_pair_jit = Differentiable(_pair_fwd, _pair_bwd)


# A norm and what takes its result, whose gradients have it from the norm's backward


def norm_then(
    op: str,
    norm: str,
    arrays: Any,
    settings: Settings,
    implementation: Any,
    then: Callable[..., Any],
    operands: Any,
    *,
    again: bool = False,
) -> tuple[Any, Any]:
    """``then(out, *operands)`` of the result of a norm, which is not kept, and x + residual.

    Args:
      op, norm: the names of the public function, and of the norm.
      arrays: x, weight, bias, residual and gate of the norm.
      settings, implementation: of the norm.
      then: a hashable function without arrays of its own, whose derivative by its first argument
        does not depend on this argument: a product.
      operands: of `then`, trees of arrays.
      again: whether the backward computes norm and `then` again, as it does in plain JAX. The
        derivative of `then` may be any.
    """
    arrays, options = _checked(norm, arrays, settings, implementation)

    def call(arrays: Any, operands: Any) -> Any:
        out, h = _pair(arrays, options)
        return then(out, *operands), h

    if again or options.mode == "xla":
        return named(op, jax.checkpoint(call)(arrays, operands))
    return _then_jit(*arrays, operands, op, options, then)


def _then(x, residual, weight, bias, gate, operands, op, options, then):
    out, h = _pair_jit(x, residual, weight, bias, gate, options)
    return named(op, (then(out, *operands), h))


def _then_fwd(x, residual, weight, bias, gate, operands, op, options, then):
    options = dataclasses.replace(options, rounds_sum=_rounds_sum(options))
    (out, h), (kept, *others) = _pair_fwd(x, residual, weight, bias, gate, options)
    *others, mean, rstd = others
    outs, of_residual, *statistics = named(op, (then(out, *operands), h, mean, rstd))
    if h is not None:
        kept = named(op, kept)
    return (outs, of_residual), ((kept, *others, *statistics), operands)


def _rounds_sum(options: NormOptions) -> bool:
    """Whether the backward has x + residual in bf16, rounded by the forward's kernel.

    Rounding changes an element by at most 2⁻⁹ of itself, as it does the result's. In a layer norm
    it would be 2⁻⁹ of a mean that may be much larger than what is left without it.
    """
    to_bf16 = options.x_dtype == "bfloat16" and options.residual_dtype == "float32"
    return to_bf16 and not options.centered


def _then_bwd(op, options, then, res, cotangents):
    of_norm, operands = res
    douts, dh = cotangents
    unread = match_sharding(jnp.zeros_like(of_norm[0], options.result_dtype), of_norm[0])
    [dout] = jax.vjp(lambda out: then(out, *operands), unread)[1](douts)
    with_output = dataclasses.replace(options, output=True)
    *grads, out = _pair_bwd(with_output, of_norm, (dout, dh))
    out = match_sharding(out, of_norm[0])
    return *grads, jax.vjp(lambda *given: then(out, *given), *operands)[1](douts)


_then_jit = Differentiable(_then_fwd, _then_bwd, _then, options=3)


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=("... n", "... n", "n", "n", "... n"),
    outs=("... n", "... n", "... s", "... s", "... n"),
    whole="n s",
    sequence=lambda options: None if options.mode == "mosaic" else FORWARD_PARTS,
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    ins=("... n", "n", "n", "... n", "... s", "... s", "... n", "... n"),
    outs=("... n", "... n", "n", "n", "... n", "... n"),
    whole="n s",
    sequence=lambda options: None if options.mode == "mosaic" else BACKWARD_PARTS,
)
