"""One token of the SSD scan, to decode."""

import math
from typing import Any

import jax

from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.ops.layers import check_layer, put_layer, take_layer
from jaxkern.ops.scan_options import StepSizes
from jaxkern.ops.scan_step import ScanStepOptions, launch, launch_of_slices, unsupported
from jaxkern.ops.ssd.op import STATE_SHAPE, check, log_decays
from jaxkern.ops.ssd.reference import Tokens, by_group, join_heads, step


@public_op
def ssd_step(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`ssd` for one token, to decode step by step.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t \, x_t \otimes B_t, \qquad
        \text{out}_t = (h_t C_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    Args:
      state: (B, H, P, N), float32, :math:`h_{t-1}`; zeros to begin with. With `layer` it holds
        several layers, (layers, B, H, P, N).
      x: (B, H, P), any floating dtype, as are all arguments below.
      dt: (B, H).
      A: (H,).
      B: (B, G, N), where head h is in group h // (H / G); or (B, N), one group.
      C: the shape of `B`.
      D: (H,) or (H, P), or ``None``.
      z: (B, H, P) or ``None``.
      dt_bias: (H,) or ``None``.
      dt_softplus, dt_limit, layer, implementation: as for :func:`jaxkern.selective_scan_step`.

    Returns:
      The output, (B, H, P), the dtype of `x`; and :math:`h_t`, the shape of `state`, float32.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.selective_scan_step` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, one = jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1))
      >>> for _ in range(2):  # A = 0: the state adds up what enters
      ...     out, state = jaxkern.ssd_step(state, one, one[0], 0 * one[0, 0], one, one)
      >>> out
      Array([[[2.]]], dtype=float32)
    """
    args = check(("B",), x, dt, A, B, C, D, z, dt_bias)
    x, B = args[0], args[3]
    number, state = check_layer(layer, state, (*x.shape, B.shape[-1]), STATE_SHAPE)
    *grouped, state = by_group((*args, state), 1)
    reason = _unsupported(state, *grouped)
    mode = resolve(implementation, reason, op="ssd_step")
    options = ScanStepOptions(StepSizes.checked(dt_softplus, dt_limit), mode)
    out, state = STEP(options, state, number, *grouped)
    state = join_heads(state, 2)
    return join_heads(out, 1), state[0] if layer is None else state


def _unsupported(state, x, dt, A, B, C, D, z, dt_bias) -> str | None:
    return unsupported(state, A, x, dt, B=B, C=C, D=D, z=z, dt_bias=dt_bias)


def _reference(options, state, layer, x, dt, A, B, C, D, z, dt_bias) -> tuple[Any, Any]:
    dt, a = log_decays(options.sizes, dt, A, dt_bias)
    out, after = step(Tokens(x, dt, a, B, C, z), D, take_layer(state, layer))
    return out, put_layer(state, layer, after)


STEP = KernelPass(
    "ssd_step",
    kernel=launch,
    kernel_of_slices=launch_of_slices,
    reference=_reference,
    ins=(
        *("s b g r p n", "i", "b g r p", "b g r", "g r"),
        *("b g n", "b g n", "g r ...", "b g r p", "g r"),
    ),
    outs=("b g r p", "s b g r p n"),
    whole="s i p n .0",
)
