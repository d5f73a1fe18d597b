r"""Gated linear units: an activation of one half of the channels times the other half.

Forward, for gate g, up u and an activation f (a curve of :mod:`jaxkern.ops.curves`):

    out = f(g) · u

Backward:

    dg = dout · u · f'(g)          du = dout · f(g)

With a limit, min(g, limit) and min(max(u, −limit), limit) take the place of g and u, and dg and du
are 0 where that changes them; at the limit itself they are not. With an offset o, u + o takes the
place of u, or of what the limit makes of it.

Saved for the backward: g and u alone; f(g) is recomputed. dg and du come from one kernel; where g
and u are the halves of one array, they are written into the halves of one, and nothing is
concatenated.

Bytes per element of out, in units of its size: 3 forward (read g and u, write out), 5 backward
(read g, u and dout, write dg and du). With about 10 operations forward and 20 backward, both passes
wait for memory alone.

Sources: Dauphin, Fan, Auli and Grangier, Language Modeling with Gated Convolutional Networks, 2016,
arXiv:1612.08083; Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202; for limit and
offset OpenAI, gpt-oss-120b and gpt-oss-20b Model Card, 2025, arXiv:2508.10925.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_floating
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding, named
from jaxkern.ops.activations import unsupported
from jaxkern.ops.curves import (
    PLAIN,
    Activation,
    Unit,
    check_unit,
    gelu_curve,
    kernel_functions,
    recomputing,
    wide,
)
from jaxkern.ops.elementwise import Lanes, launch


@public_op
def glu(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: Activation = "sigmoid",
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Gated linear unit: an activation of `gate`, by default the sigmoid, times `up`.

    .. math:: y = f(g) \, u

    ``jax.nn.glu`` and PyTorch's take one array with the gate in its second half:
    ``jax.nn.glu(x)`` is ``glu(gate, up)`` of ``up, gate = jnp.split(x, 2, axis=-1)``.

    Args:
      gate: any shape, bfloat16, float16 or float32.
      up: the shape of `gate`, any of those dtypes.
      activation: f: ``"sigmoid"``, ``"tanh"``, ``"relu"``, ``"relu_squared"``, ``"silu"``,
        ``"gelu"`` (by tanh, as ``jax.nn.gelu``; also ``"gelu_tanh"``), ``"gelu_erf"`` or
        ``"quick_gelu"``.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      The shape and dtype of `gate`.

    Raises:
      TypeError: an argument is not an array of a floating dtype.
      ValueError: the shapes differ, or `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.glu(jnp.array([0.0, 100.0]), jnp.array([2.0, 3.0])))
      [1. 3.]

    References:
      Dauphin et al., `Language Modeling with Gated Convolutional Networks
      <https://arxiv.org/abs/1612.08083>`_, 2016.
    """
    return _gated("glu", check_unit(activation, 1.0, None, 0.0), gate, up, implementation)


@public_op
def swiglu(
    gate: jax.Array,
    up: jax.Array,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""SiLU of `gate` times `up`.

    .. math:: y = \frac{g}{1 + e^{-\alpha g}} \, (u + o)

    With `limit`, :math:`\min(g, l)` and :math:`\min(\max(u, -l), l)` take the place of g and u; the
    gradient of what is beyond the limit is 0. The clamped unit of gpt-oss is ``swiglu(gate, up,
    alpha=1.702, limit=7.0, up_offset=1.0)``; its checkpoints store both projections interleaved
    (see :func:`jaxkern.silu_and_mul`).

    Computed in fp32, rounded once. For the backward `gate` and `up` are kept. On a mesh any axis
    may be split between devices.

    Args:
      gate: any shape, bfloat16, float16 or float32.
      up: the shape of `gate`, any of those dtypes.
      alpha: the slope within the sigmoid, positive.
      limit: positive, or ``None`` for no limit.
      up_offset: o, added to `up`, after the limit.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest: the kernels on an
        NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      The shape and dtype of `gate`.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or not a Python number.
      ValueError: the shapes differ, `alpha`, `limit` or `up_offset` is out of range, or
        `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> gate, up = jnp.array([0.0, 100.0]), jnp.array([2.0, 3.0])
      >>> print(jaxkern.swiglu(gate, up))
      [  0. 300.]
      >>> print(jaxkern.swiglu(gate, up, alpha=1.702, limit=7.0, up_offset=1.0).round(2))
      [ 0. 28.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020; OpenAI,
      `gpt-oss-120b and gpt-oss-20b Model Card <https://arxiv.org/abs/2508.10925>`_, 2025.
    """
    unit = check_unit("silu", alpha, limit, up_offset)
    return _gated("swiglu", unit, gate, up, implementation)


@public_op
def geglu(
    gate: jax.Array,
    up: jax.Array,
    *,
    approximate: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""GELU of `gate` times `up`.

    .. math:: y = \operatorname{gelu}(g) \, u

    Args:
      gate: any shape, bfloat16, float16 or float32.
      up: the shape of `gate`, any of those dtypes.
      approximate: the form of GELU, as for :func:`jaxkern.gelu`.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      The shape and dtype of `gate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.swiglu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.geglu(jnp.array([0.0, 100.0]), jnp.array([2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    return _gated("geglu", Unit(gelu_curve(approximate)), gate, up, implementation)


@public_op
def reglu(
    gate: jax.Array, up: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    r"""ReLU of `gate` times `up`.

    .. math:: y = \max(g, 0) \, u

    Args:
      gate: any shape, bfloat16, float16 or float32.
      up: the shape of `gate`, any of those dtypes.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      The shape and dtype of `gate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.swiglu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.reglu(jnp.array([-1.0, 100.0]), jnp.array([2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    return _gated("reglu", Unit("relu"), gate, up, implementation)


@public_op
def silu_and_mul(
    gate_up: jax.Array,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""SiLU of the first half of the last axis times the second half.

    .. math:: y = \frac{g}{1 + e^{-\alpha g}} \, (u + o), \qquad [g, u] = x

    It is :func:`jaxkern.swiglu` for a gate and an up projection that are one matrix product. The
    gradient is written into one array of the shape of `gate_up`. On a mesh all axes but the last
    may be split between devices; a split last axis is gathered, as its halves belong together.

    Gate and up lie side by side. Where they are interleaved, g, u, g, u, ..., as in the checkpoints
    of gpt-oss, reorder the weight (K, 2H) that makes them, once, and its bias likewise:
    ``jnp.concatenate([w[:, 0::2], w[:, 1::2]], axis=1)``.

    Args:
      gate_up: (..., 2H), bfloat16, float16 or float32.
      alpha, limit, up_offset: as for :func:`jaxkern.swiglu`.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      (..., H), the dtype of `gate_up`.

    Raises:
      TypeError: `gate_up` is not an array of a floating dtype, or an option not a Python number.
      ValueError: its last axis has no halves, `alpha`, `limit` or `up_offset` is out of range, or
        `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.silu_and_mul(jnp.array([0.0, 100.0, 2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    unit = check_unit("silu", alpha, limit, up_offset)
    return _halves("silu_and_mul", unit, gate_up, implementation)


@public_op
def gelu_and_mul(
    gate_up: jax.Array,
    *,
    approximate: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""GELU of the first half of the last axis times the second half.

    .. math:: y = \operatorname{gelu}(g) \, u, \qquad [g, u] = x

    Args:
      gate_up: (..., 2H), bfloat16, float16 or float32.
      approximate: the form of GELU, as for :func:`jaxkern.gelu`.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      (..., H), the dtype of `gate_up`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.silu_and_mul` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.gelu_and_mul(jnp.array([0.0, 100.0, 2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    return _halves("gelu_and_mul", Unit(gelu_curve(approximate)), gate_up, implementation)


def _gated(op: str, unit: Unit, gate: Any, up: Any, implementation: Any) -> jax.Array:
    gate, up = check_floating("gate", gate), check_floating("up", up)
    if up.shape != gate.shape:
        raise ValueError(f"up must have the shape of gate, {gate.shape}; got {up.shape}")
    mode = resolve(implementation, unsupported(gate=gate, up=up), op=op)
    if mode == "xla":
        return named(op, recomputing(functools.partial(gated_reference, unit))(gate, up))
    return _unit_jit((gate, up), _Options(op, unit, mode, joined=False))


def _halves(op: str, unit: Unit, gate_up: Any, implementation: Any) -> jax.Array:
    gate_up = check_floating("gate_up", gate_up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            "gate_up must have a last axis of even size, gate and up side by side; got shape "
            f"{gate_up.shape}"
        )
    reason = unsupported(columns=gate_up.shape[-1] // 2, gate_up=gate_up)
    mode = resolve(implementation, reason, op=op)
    if mode == "xla":
        return named(op, recomputing(functools.partial(gated_reference, unit))(gate_up))
    return _unit_jit((gate_up,), _Options(op, unit, mode, joined=True))


@dataclasses.dataclass(frozen=True)
class _Options:
    op: str
    unit: Unit
    mode: Mode
    joined: bool  # whether one array holds gate and up side by side


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unit(ins: tuple[jax.Array, ...], options: _Options) -> jax.Array:
    return _unit_fwd(ins, options)[0]


def _unit_fwd(ins, options):
    (out,) = FORWARD(options, *ins)
    return _match_split(out, ins[0]), ins


def _match_split(out: jax.Array, like: jax.Array) -> jax.Array:
    """`out` split as `like`, where half of its last axis can be."""
    sharding = jax.typeof(like).sharding
    split = sharding.spec[-1] if out.ndim == len(sharding.spec) > 0 else None
    names = split if isinstance(split, tuple) else (split,)
    parts = math.prod(sharding.mesh.shape[name] for name in names if name)
    return out if parts > 1 and out.shape[-1] % parts else match_sharding(out, like)


def _unit_bwd(options, ins, dout):
    grads = BACKWARD(options, *ins, dout)
    return (tuple(match_primal(g, a) for g, a in zip(grads, ins, strict=True)),)


def gated_backward(
    unit: Unit, mode: Mode, ins: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array, ...]:
    """Of gate and up, or of one array of both, the gradients, for other ops' rules."""
    options = _Options(f"gated_{unit.curve}", unit, mode, joined=len(ins) == 1)
    return BACKWARD(options, *ins, dout)


_unit.defvjp(_unit_fwd, _unit_bwd)
_unit_jit = jax.jit(_unit, static_argnums=1)


# Kernels


def _launch_fwd(options: _Options, *ins: Any, sliced: bool = False):
    out = jax.eval_shape(functools.partial(gated_reference, options.unit), *ins)
    if out.size == 0:
        return (jnp.zeros(out.shape, out.dtype),)
    exact = out.dtype == jnp.float32

    def body(lanes: Lanes, gate: jax.Array, up: jax.Array):
        of = kernel_functions(exact)
        return (options.unit.value(gate, up, of),)

    return launch(
        f"{options.op}_fwd",
        body,
        ins,
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        columns=out.shape[-1] if len(ins) == 1 else 0,
        sliced=sliced,
    )


def _launch_bwd(options: _Options, *args: Any, sliced: bool = False):
    *ins, dout = args
    grads = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ins]
    if dout.size == 0:
        return tuple(jnp.zeros(g.shape, g.dtype) for g in grads)
    exact = dout.dtype == jnp.float32

    def body(lanes: Lanes, gate: jax.Array, up: jax.Array, dout: jax.Array):
        of = kernel_functions(exact)
        return options.unit.slopes(gate, up, dout, of)

    return launch(
        f"{options.op}_bwd",
        body,
        [*ins, dout],
        grads,
        columns=dout.shape[-1] if len(ins) == 1 else 0,
        sliced=sliced,
    )


# Reference


def gated_reference(unit: Unit, *ins: jax.Array) -> jax.Array:
    """`unit` in plain JAX, of two arrays or of one with both side by side."""
    gate, up = ins if len(ins) == 2 else jnp.split(ins[0], 2, axis=-1)
    f32 = wide(gate, up)
    return unit.value(gate.astype(f32), up.astype(f32), PLAIN).astype(gate.dtype)


def _reference_fwd(options, *ins):
    return (gated_reference(options.unit, *ins),)


def _reference_bwd(options, *args):
    *ins, dout = args
    gate, up = ins if len(ins) == 2 else jnp.split(ins[0], 2, axis=-1)
    f32 = wide(gate, up)
    dgate, dup = options.unit.slopes(gate.astype(f32), up.astype(f32), dout.astype(f32), PLAIN)
    grads = dgate.astype(gate.dtype), dup.astype(up.dtype)
    return grads if len(ins) == 2 else (jnp.concatenate(grads, axis=-1),)


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=_launch_fwd,
    kernel_of_slices=functools.partial(_launch_fwd, sliced=True),
    reference=_reference_fwd,
    ins=lambda options: ("... y",) if options.joined else ("...", "..."),
    outs=lambda options: ("... z",) if options.joined else ("...",),
    whole="y z",
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=_launch_bwd,
    kernel_of_slices=functools.partial(_launch_bwd, sliced=True),
    reference=_reference_bwd,
    ins=lambda options: ("... y", "... z") if options.joined else ("...", "...", "..."),
    outs=lambda options: ("... y",) if options.joined else ("...", "..."),
    whole="y z",
)
