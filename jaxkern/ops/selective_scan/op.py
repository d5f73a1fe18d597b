"""Selective scan: the recurrence of Mamba (S6), a diagonal linear system with per-token weights.

Forward, for a batch row b and a channel d, n running over the N states and h[−1] = initial_state:

    raw[t] = dt[t] + dt_bias                    or softplus(dt[t] + dt_bias), if asked for
    s[t]   = min(max(raw[t], low), high)        (low, high) = dt_limit
    h[t,n] = a[t,n] · k[t] · h[t−1,n] + s[t] · x[t] · B[t,n]        a[t,n] = exp(s[t] · A[n])
    y[t]   = Σ_n C[t,n] · h[t,n] + D · x[t]
    out[t] = y[t] · silu(z[t])

where k[t] = 0 if the segment id of token t is not that of the token before, else 1. With groups, B
and C are those of the group that d is in.

Backward, for the cotangents dout and dfinal, time running down from dh[L] = dfinal (a[L] = 1):

    dy[t]   = dout[t] · silu(z[t])                  dz[t] = dout[t] · y[t] · silu'(z[t])
    dh[t,n] = k[t+1] · a[t+1,n] · dh[t+1,n] + C[t,n] · dy[t]
    v[t,n]  = dh[t,n] · a[t,n] · k[t] · h[t−1,n]
    dx[t]   = s[t] · Σ_n dh[t,n] · B[t,n] + D · dy[t]
    ds[t]   = Σ_n v[t,n] · A[n] + x[t] · Σ_n dh[t,n] · B[t,n]
    ddt[t]  = ds[t] · softplus'  where low ≤ raw[t] ≤ high, else 0
    dB[t,n] = Σ_d dh[t,n] · s[t] · x[t]             dC[t,n] = Σ_d dy[t] · h[t,n]
    dA[n]   = Σ_bt v[t,n] · s[t]       dD = Σ_bt dy[t] · x[t]       ddt_bias = Σ_bt ddt[t]
    dinitial_state[n] = k[0] · a[0,n] · dh[0,n]     (k[0] = 1)

Saved for the backward: the arguments, and the state before every k-th step, k = checkpoint_every,
(B, L/k, D, N) in fp32: 4·N/k bytes per element of x, 8 at N = 16 and the default, k = 8. The
states in between are recomputed. While the backward runs, it also holds the sums of dB and dC over
each block of channels (64 at N = 16, or 128 where k is 64 or more), 8·N/64 bytes per element of x.

Per element of x the forward takes N exponentials and 3 operations of the same unit for softplus and
gate, the backward 2·N and 4, for it computes the decays of a chunk twice. At N = 16 a warp takes 74
and 205 instructions for a step of 16 channels, so that the instructions are the limit, not memory.
Where batch rows and channels are too few to fill the GPU, or do not fill it evenly, sequences are
cut into parts, at N exponentials more, an eighth of which are polynomials.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import dataclasses
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_floating, check_sequence_axis, unfit
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import match_primal, match_sharding
from jaxkern.core.split import on_all
from jaxkern.lowering.bound import wide
from jaxkern.ops import segments
from jaxkern.ops.checkpoints import check_checkpoint_every
from jaxkern.ops.selective_scan import devices
from jaxkern.ops.selective_scan.arguments import STATE_SHAPE, check
from jaxkern.ops.selective_scan.backward import launch_bwd
from jaxkern.ops.selective_scan.forward import launch_fwd
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    DEFAULT_CHECKPOINT_EVERY,
    Options,
    by_group,
    join_channels,
    reference_bwd,
    reference_fwd,
    selective_scan_reference,
)
from jaxkern.ops.selective_scan.tiles import MAX_STATES
from jaxkern.ops.step_sizes import StepSizes


@overload
def selective_scan(
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
    dt_limit: tuple[float, float] = (-math.inf, math.inf),
    initial_state: jax.Array | None = None,
    return_final_state: Literal[False] = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    checkpoint_every: int | None = DEFAULT_CHECKPOINT_EVERY,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array: ...


@overload
def selective_scan(
    *args: Any, return_final_state: Literal[True], **options: Any
) -> tuple[jax.Array, jax.Array]: ...


@public_op
def selective_scan(
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
    dt_limit: tuple[float, float] = (-math.inf, math.inf),
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    checkpoint_every: int | None = DEFAULT_CHECKPOINT_EVERY,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    r"""Run Mamba's selective state space recurrence along time.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t x_t B_t, \qquad
        \text{out}_t = (C_t \cdot h_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    for every batch row and channel, with N states each, from :math:`h_{-1}` = `initial_state`,
    where :math:`\Delta` is ``softplus(dt + dt_bias)`` or ``dt + dt_bias``, limited to `dt_limit`.
    All of it is computed in fp32, whatever the dtypes; the result is rounded once, to the dtype of
    `x`. Any real `A` is taken; a positive one makes the state grow.

    Every floating argument has a gradient, `initial_state` too, and the final state passes one on.
    For the backward, the arguments and the state before every `checkpoint_every`-th step are kept:
    ``4 * N / checkpoint_every`` bytes per element of `x`. Unless it is 1, nothing of size B·L·D·N
    is ever held. The result does not depend on it, but for rounding.

    A NaN in one channel of one batch row stays there, but for the gradients that sum over channels
    (`B`, `C`) or over batch rows (`A`, `D`, `dt_bias`); it does not get past the end of its
    segment. The bits are the same on every run.

    On a mesh, batch, channels and L may be split between devices; a split N is gathered, and with
    `num_segments` a split L. Each device scans its part of L, which is a multiple of
    `checkpoint_every` steps if there is a backward, and one all-gather carries states over. With
    several groups, channels are split in parts of whole groups; others are gathered on a mesh with
    Explicit axes, and not possible with Auto ones. Inside ``jax.shard_map``, where `sequence_axis`
    says over which axis L is split, it is the same; gradients of what has no L are then a device's
    share of a sum, as JAX has them there.

    Args:
      x: (B, L, D), bfloat16, float16 or float32.
      dt: (B, L, D), the step sizes before `dt_bias` and softplus; any of those dtypes, as are
        all floating arguments below.
      A: (D, N), the states' rates, negative in Mamba.
      B: (B, L, N), how x enters the states; or (B, L, G, N), where channel d is in group
        d // (D / G).
      C: the shape of `B`, how the states are read.
      D: (D,), the weight of `x` in the output; ``None`` stands for zeros.
      z: (B, L, D), the gate; ``None`` for no gate.
      dt_bias: (D,), added to `dt`; ``None`` stands for zeros.
      dt_softplus: whether the step size is the softplus of that sum.
      dt_limit: the least and the largest step size. One outside is set to the limit and has no
        gradient. By default there is no limit, as in mamba_ssm: without softplus a negative step
        size stays negative.
      initial_state: (B, D, N), or with `num_segments` (B, S, D, N), the state before the first
        token; ``None`` stands for zeros.
      return_final_state: whether to return the state after the last token, too.
      segment_ids: (B, L), integers, for several sequences packed in a row: the state is set to zero
        before a token whose id is not that of the token before. `initial_state` is for the first.
      num_segments: S, for segments that each have an initial and a final state: of the segment with
        id s, s from 0 to S - 1, they are ``[:, s]``. A segment with another id (padding, say)
        begins from zeros, and so does one whose id comes back after another.
      checkpoint_every: how many steps apart states are saved for the backward: 1 for all states, a
        multiple of 8, or ``None`` for none at all, where the backward runs the forward again. With
        more than 8 the backward runs the steps in between once more, and needs less memory.
      sequence_axis: inside ``jax.shard_map``, the mesh axis, or axes, over which L is split: the
        arrays are then a device's part of L, and the final state is the same on all devices.
      implementation: ``"mosaic"`` for the Pallas GPU kernels (N up to 384), ``"xla"`` for plain
        JAX, ``None`` for the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or
        newer, plain JAX elsewhere.

    Returns:
      (B, L, D), the dtype of `x`; with `return_final_state` a pair of it and the final state,
      (B, D, N), float32; with `num_segments` (B, S, D, N), where a segment that is absent leaves
      its initial state as it is.

    Raises:
      TypeError: an argument is not an array of a real floating dtype (`segment_ids`: integer), or
        an option is not a Python number.
      ValueError: shapes do not fit, `num_segments` is without `segment_ids` or with
        `sequence_axis`, L cannot be split so, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, dt, z = (jnp.ones((2, 64, 256), jnp.bfloat16) for _ in range(3))
      >>> A, B, C = -jnp.ones((256, 16)), jnp.ones((2, 64, 16)), jnp.ones((2, 64, 16))
      >>> jaxkern.selective_scan(x, dt, A, B, C, z=z, dt_softplus=True).shape
      (2, 64, 256)
      >>> dA = jax.grad(lambda a: jaxkern.selective_scan(x, dt, a, B, C).sum())(A)
      >>> half = lambda s, **kw: jaxkern.selective_scan(
      ...     x[:, s], dt[:, s], A, B[:, s], C[:, s], return_final_state=True, **kw
      ... )
      >>> first, state = half(slice(0, 32))
      >>> second, state = half(slice(32, 64), initial_state=state)

      Prompts of 20, 30 and 10 tokens packed in a row, with padding behind them, and the state that
      each is decoded from:

      >>> ids = jnp.repeat(jnp.array([0, 1, 2, -1]), jnp.array([20, 30, 10, 4]))
      >>> out, states = jaxkern.selective_scan(
      ...     x, dt, A, B, C, segment_ids=jnp.stack([ids, ids]), num_segments=3,
      ...     return_final_state=True,
      ... )
      >>> states.shape
      (2, 3, 256, 16)

    References:
      Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
      <https://arxiv.org/abs/2312.00752>`_, 2023.
    """
    args = check(("B", "L"), x, dt, A, B, C, D, z, dt_bias)
    x, A = args[0], args[2]
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    initial_state = _check_initial_state(initial_state, x, A, count)
    keep = crossed = None
    if segment_ids is not None:
        ids = segments.check_segment_ids(segment_ids, x.shape[:2], count)
        keep = 1 - segments.new_segments(ids, sequence_axis=over).astype(jnp.float32)
        crossed = None if count is None else segments.crossings(ids, count)
    every = check_checkpoint_every(checkpoint_every, CHUNK, one=True)
    sizes = StepSizes.checked(dt_softplus, dt_limit)
    mode = resolve(implementation, _unsupported((*args, initial_state)), op="selective_scan")
    options = Options(sizes, return_final_state, every, mode, count, sequence_axis=over)
    grouped = (*by_group((*args, initial_state)), keep, crossed)
    if mode != "xla":
        out, final = _jitted(*grouped, options)
    else:
        out, final = named("selective_scan", PLAIN(options, *grouped))
        out = match_sharding(out, grouped[0])
    out = join_channels(out, 2)
    return (
        (out, join_channels(on_all(sequence_axis, final), final.ndim - 3)) if options.final else out
    )


def _check_initial_state(state: Any, x: jax.Array, A: jax.Array, count: int | None) -> Any:
    if state is None:
        return None
    state = check_floating("initial_state", state)
    meaning = STATE_SHAPE if count is None else "(B, S, D, N) of x, num_segments and A"
    segments.check_states(state, x.shape[0], count, A.shape, meaning)
    return state.astype(wide(state.dtype))


def _unsupported(args: tuple[Any, ...]) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    if reason := unfit(**dict(zip(_FLOATING, args, strict=True))):
        return reason
    states = args[2].shape[1]
    if states > MAX_STATES:
        return f"A has {states} states per channel, and the kernels hold at most {MAX_STATES}"
    return None


_FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


@Differentiable
def _selective_scan(x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed, options):
    args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed)
    out, final, _ = FORWARD(options, *args)
    return match_sharding(out, x), final


def _selective_scan_fwd(*args_and_options):
    *args, options = args_and_options
    out, final, states = FORWARD(dataclasses.replace(options, save=True), *args)
    return (match_sharding(out, args[0]), final), (args, states)


def _selective_scan_bwd(options, res, cotangents):
    args, states = res
    grads = BACKWARD(options, *args, states, *cotangents)
    return tuple(
        None if grad is None else match_primal(grad, arg).astype(arg.dtype)
        for grad, arg in zip(grads, args, strict=True)
    )


_selective_scan.defvjp(_selective_scan_fwd, _selective_scan_bwd)
_jitted = jax.jit(_selective_scan, static_argnums=11)

_STATES = "b l g p n"


def _ends(options: Options) -> str:
    """The factors of initial and final states."""
    return "b g p n" if options.num_segments is None else "b s g p n"


def _arguments(options: Options) -> tuple[str, ...]:
    tokens, weights = "b l g p", "b l g n"
    args = tokens, tokens, "g p n", weights, weights, "g p", tokens, "g p"
    return *args, _ends(options), "b l", "b l"


FORWARD = KernelPass(
    "selective_scan_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=_arguments,
    outs=lambda options: ("b l g p", _ends(options), _STATES),
    whole="l n s",
    sequence=devices.forward,
)
BACKWARD = KernelPass(
    "selective_scan_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    ins=lambda options: (*_arguments(options), _STATES, "b l g p", _ends(options)),
    outs=_arguments,
    whole="l n s",
    sequence=devices.backward,
)
PLAIN = KernelPass(  # whose loops and gathers a mesh with Explicit axes cannot split
    "selective_scan",
    reference=selective_scan_reference,
    ins=_arguments,
    outs=lambda options: ("b l g p", _ends(options)),
    whole="l n s",
    sequence=devices.forward,
)
