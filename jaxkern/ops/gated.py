r"""Gated linear units: an activation of one half of the channels times the other half.

Forward, for gate g, up u and an activation f (a curve of :mod:`jaxkern.ops.curves`):

    out = f(g) · u

Backward:

    dg = dout · u · f'(g)          du = dout · f(g)

With a limit, g and u are replaced by min(g, limit) and min(max(u, −limit), limit), and dg and du
are 0 where that changes them; at the limit itself they are not. With an offset o, u + o replaces u,
after the limit.

Saved for the backward: g and u alone; f(g) is recomputed. One kernel computes dg and du; where g
and u are the halves of one array, it writes them into the halves of one, and nothing is
concatenated. Rule and passes are defined in :mod:`jaxkern.ops.activations`.

Bytes per element of out, in units of its size: 3 forward (read g and u, write out), 5 backward
(read g, u and dout, write dg and du). With about 10 operations forward and 20 backward, both passes
wait for memory alone.

Sources: Dauphin, Fan, Auli and Grangier, Language Modeling with Gated Convolutional Networks, 2016,
arXiv:1612.08083; Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202; for limit and
offset OpenAI, gpt-oss-120b and gpt-oss-20b Model Card, 2025, arXiv:2508.10925.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_floating
from jaxkern.core.dispatch import Implementation, Mode, public_op
from jaxkern.ops.activations import BACKWARD, ActivationOptions, run
from jaxkern.ops.curves import Activation, GatedUnit, check_unit, gelu_curve


@public_op
def glu(
    gate: jax.Array,
    up: jax.Array | None = None,
    *,
    activation: Activation = "sigmoid",
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Gated linear unit: an activation of `gate`, by default the sigmoid, times `up`.

    .. math:: y = f(g) \, u

    With one array it is ``jax.nn.glu``, whose gate is the second half of the last axis:
    ``up, gate = jnp.split(x, 2, axis=-1)``, two copies. :func:`jaxkern.silu_and_mul`, whose gate is
    the first half, reads both from where they lie.

    Args:
      gate: any shape, bfloat16, float16 or float32; without `up`, (..., 2H).
      up: the shape of `gate`, any of those dtypes.
      activation: f: ``"sigmoid"``, ``"tanh"``, ``"relu"``, ``"relu_squared"``, ``"silu"``,
        ``"gelu"`` (by tanh, as ``jax.nn.gelu``; also ``"gelu_tanh"``), ``"gelu_erf"`` or
        ``"quick_gelu"``.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      The shape and dtype of `gate`; without `up`, (..., H).

    Raises:
      TypeError: an argument is not an array of a floating dtype.
      ValueError: the shapes differ, the last axis has no halves, or `activation` or
        `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.glu(jnp.array([0.0, 100.0]), jnp.array([2.0, 3.0])))
      [1. 3.]

    References:
      Dauphin et al., `Language Modeling with Gated Convolutional Networks
      <https://arxiv.org/abs/1612.08083>`_, 2016.
    """
    if up is None:
        up, gate = jnp.split(_halves(gate, "gate without up")["gate_up"], 2, axis=-1)
    return run("glu", check_unit(activation, 1.0, None, 0.0), _pair(gate, up), implementation)


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

    With `limit`, :math:`\min(g, l)` and :math:`\min(\max(u, -l), l)` replace g and u; the gradient
    of what is beyond the limit is 0. The clamped unit of gpt-oss is ``swiglu(gate, up,
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
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or newer, plain JAX
        elsewhere.

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
    return run("swiglu", unit, _pair(gate, up), implementation)


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
      gate, up: as for :func:`jaxkern.swiglu`.
      approximate: the form of GELU, as for :func:`jaxkern.gelu`.
      implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      gelu(g) · u, in the shape and dtype of `gate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.swiglu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.geglu(jnp.array([0.0, 100.0]), jnp.array([2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    return run("geglu", GatedUnit(gelu_curve(approximate)), _pair(gate, up), implementation)


@public_op
def reglu(
    gate: jax.Array, up: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    r"""ReLU of `gate` times `up`.

    .. math:: y = \max(g, 0) \, u

    Args:
      gate, up, implementation: as for :func:`jaxkern.swiglu`.

    Returns:
      max(g, 0) · u, in the shape and dtype of `gate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.swiglu` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> print(jaxkern.reglu(jnp.array([-1.0, 100.0]), jnp.array([2.0, 3.0])))
      [  0. 300.]

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    return run("reglu", GatedUnit("relu"), _pair(gate, up), implementation)


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
      alpha, limit, up_offset, implementation: as for :func:`jaxkern.swiglu`.

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
    return run("silu_and_mul", unit, _halves(gate_up), implementation)


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
    return run("gelu_and_mul", GatedUnit(gelu_curve(approximate)), _halves(gate_up), implementation)


def _pair(gate: Any, up: Any) -> dict[str, jax.Array]:
    gate, up = check_floating("gate", gate), check_floating("up", up)
    if up.shape != gate.shape:
        raise ValueError(f"up must have the shape of gate, {gate.shape}; got {up.shape}")
    return {"gate": gate, "up": up}


def _halves(gate_up: Any, name: str = "gate_up") -> dict[str, jax.Array]:
    gate_up = check_floating(name, gate_up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{name} must have a last axis of even size, whose halves lie side by side; got shape "
            f"{gate_up.shape}"
        )
    return {"gate_up": gate_up}


def gated_backward(
    unit: GatedUnit, mode: Mode, ins: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of gate and up, or of one array of both, for other ops' rules."""
    return BACKWARD(
        ActivationOptions(f"gated_{unit.curve}", unit, mode, joined=len(ins) == 1), *ins, dout
    )
