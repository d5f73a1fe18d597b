"""Selective scan: the recurrence of Mamba (S6), a diagonal linear system with per-token weights.

Forward, for a batch row b and a channel d, n running over the N states and h[−1] = initial_state:

    raw[t] = dt[t] + dt_bias                    or softplus(dt[t] + dt_bias), if asked for
    s[t]   = min(max(raw[t], low), high)        (low, high) = dt_limit
    h[t,n] = a[t,n] · k[t] · h[t−1,n] + s[t] · x[t] · B[t,n]        a[t,n] = exp(s[t] · A[n])
    y[t]   = Σ_n C[t,n] · h[t,n] + D · x[t]
    out[t] = y[t] · silu(z[t])

where k[t] = 0 if the segment id of token t differs from the previous token's, else 1. With groups,
B and C belong to the group of channel d.

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
(B, L/k, D, N), in bf16 where x, dt, B, C and z are, else in fp32: 2·N/k bytes per element of a bf16
x, 1 at N = 16 and the default, k = 32. The states in between are recomputed from these in fp32; an
error of 2⁻⁹ of a saved state is of the size of those of x, B and C. While the backward runs, it
also holds the sums of dB and dC over each block of channels (64 at N = 16), 8·N/64 bytes per
element of x.

Per element of x the forward takes N exponentials and 3 operations of the same unit for softplus and
gate, the backward 2·N and 7, for it runs the steps between two saved states up, and then those of
each group once more. At N = 16 a warp takes 74 instructions of the forward for a step of 16
channels, and so many more of the backward that instructions are the limit, not memory: on an H200
ncu sees 68% of the issue slots used at k = 8, and a quarter of the memory's rate.
Where batch rows and channels are too few to fill the GPU, or do not fill it evenly, sequences are
cut into parts, at N exponentials more, an eighth of which are polynomials.

Where a sequence is split between devices, each finds the sum of its step sizes and its last state
from zeros; one all-gather collects them from all devices, and each computes the state before its
part. The backward does the same from the end to the start. A pass that finds carries
takes N exponentials for an element of x and reads 4 of its bytes in bf16, the forward N and the
backward 2·N: at L = 262,144 a device and D = 1536, 6.4 · 10⁹ exponentials for each N. A kernel that
cuts its part takes N more, in either direction, to find the same carries again: 7·N in all, and
5·N, as on one device, where the part is cut into :class:`jaxkern.ops.sections.Sections` instead. To
scan from zeros and correct the output, by exp(A · Σs) and C, takes N exponentials and 6 bytes more.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import (
    check_array,
    check_floating,
    check_optional,
    check_sequence_axis,
    unfit,
)
from jaxkern.core.bound import wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, final_state_op, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import (
    is_first,
    is_last,
    match_primals,
    match_sharding,
    on_all,
    only_if,
    parts_of,
)
from jaxkern.ops import scan_step, segments
from jaxkern.ops.columns import StepPass, check_columns
from jaxkern.ops.linear import linear
from jaxkern.ops.linear.products import check_operands
from jaxkern.ops.scan_options import (
    StepSizes,
    by_group,
    check_checkpoint_every,
    check_layer,
    join_groups,
    put_layer,
    take_layer,
)
from jaxkern.ops.sections import Decays, Sections, sequences, unless_whole_steps
from jaxkern.ops.selective_scan.backward import launch_bwd, launch_device_bwd_carry
from jaxkern.ops.selective_scan.forward import launch_device_carry, launch_fwd
from jaxkern.ops.selective_scan.reference import (
    CHUNK,
    DEFAULT_CHECKPOINT_EVERY,
    RECOMPUTED_EVERY,
    SelectiveScanOptions,
    decay_of,
    reference_bwd,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
    reference_step,
    selective_scan_reference,
)
from jaxkern.ops.selective_scan.tiles import MAX_STATES, apart


@final_state_op
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
    out_weight: jax.Array | None = None,
    checkpoint_every: int | None = DEFAULT_CHECKPOINT_EVERY,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
    ``2 * N / checkpoint_every`` bytes per element of `x` where `x`, `dt`, `B`, `C` and `z` are
    bfloat16 and so are these states, else ``4 * N / checkpoint_every``, in float32. Unless it is 1,
    nothing of size B·L·D·N is ever held. The result does not depend on it, but for rounding.

    A NaN in one channel of one batch row stays there, but for the gradients that sum over channels
    (`B`, `C`) or over batch rows (`A`, `D`, `dt_bias`); it does not get past the end of its
    segment. The bits are the same on every run.

    On a mesh, batch, channels and L may be split between devices; a split N is gathered, and with
    `num_segments` a split L. Each device scans its part of L, and one all-gather carries states
    over. If there is a backward, a part must be a multiple of 8 steps, and more states are saved
    where `checkpoint_every` does not divide it; on a mesh with Auto axes, where the parts are not
    known in time, it must be a multiple of `checkpoint_every`, and is gathered if it is not. With
    several groups, channels are split in parts of whole groups; others are gathered on a mesh with
    Explicit axes, and not possible with Auto ones. Inside ``jax.shard_map``, `sequence_axis` says
    over which axis L is split, and gradients of what has no L are a device's share of a sum, as
    JAX has them there.

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
        before a token whose id differs from the previous token's. `initial_state` is for the first.
      num_segments: S, for segments that each have an initial and a final state: of the segment with
        id s, s from 0 to S - 1, they are ``[:, s]``. A segment with another id (padding, say)
        begins from zeros, and so does one whose id comes back after another.
      out_weight: (D, M), of the linear layer that follows, which is then a part of the call: it
        returns ``linear(out, out_weight)``, (B, L, M), and `out` is not kept for that layer's
        gradient, as the backward's kernel gives it again. ``None`` for no such layer.
      checkpoint_every: how many steps apart states are saved for the backward: 1 for all states, a
        multiple of 8, or ``None`` for none at all, where the backward runs the forward again. The
        backward runs the steps in between once more, with their states in shared memory: 8 is the
        fastest, 64 the most, and what has no room there is saved more often: beyond 32 states (in
        float32 beyond 16, or 8 with a gate) every 32nd step at the most, beyond 128 every 8th.
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
    args = _check(("B", "L"), x, dt, A, B, C, D, z, dt_bias)
    x, A = args[0], args[2]
    if out_weight is not None:
        _, out_weight = check_operands(x, out_weight, "out_weight")
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    initial_state = segments.check_states(initial_state, x.shape[0], count, A.shape, _STATE_SHAPE)
    if initial_state is not None:
        initial_state = initial_state.astype(wide(initial_state.dtype))
    keep = crossed = None
    if segment_ids is not None:
        ids = segments.check_segment_ids(segment_ids, x.shape[:2], count)
        keep = 1 - segments.new_segments(ids, sequence_axis=over).astype(jnp.float32)
        crossed = None if count is None else segments.crossings(ids, count)
    every = check_checkpoint_every(checkpoint_every, CHUNK, one=True)
    sizes = StepSizes.checked(dt_softplus, dt_limit)
    unsupported = _unsupported((*args, initial_state))
    mode = resolve(implementation, unsupported, op="selective_scan")
    if every is not None and unsupported is None:
        every = apart(min(every, RECOMPUTED_EVERY), A.shape[-1], x, args[1], args[6])
    parts = parts_of(x, 1)
    while (over or parts > 1) and every and every > CHUNK and x.shape[1] % (parts * every):
        every = max(CHUNK, every // (2 * CHUNK) * CHUNK)  # which divides a device's part
    options = SelectiveScanOptions(
        sizes, return_final_state, every, mode, count, sequence_axis=over
    )
    grouped = (*by_group((*args, initial_state), 2), keep, crossed)
    if mode != "xla" and out_weight is not None:
        out, final = _projected_jit(*grouped, out_weight, options)
    elif mode != "xla":
        out, final = _jitted(*grouped, options)
        out = join_groups(out, 2)
    else:
        out, final = named("selective_scan", PLAIN(options, *grouped))
        out = join_groups(match_sharding(out, grouped[0]), 2)
        out = out if out_weight is None else linear(out, out_weight, implementation="xla")
    if not options.final:
        return out
    return out, join_groups(on_all(sequence_axis, final), final.ndim - 3)


_STATE_SHAPE = "(B, D, N) of x and A"


def _check(lead, x, dt, A, B, C, D, z, dt_bias) -> Any:
    """The arguments as arrays; `lead` names the dimensions before the last of those with tokens."""
    x, A, B = check_floating("x", x), check_floating("A", A), check_floating("B", B)
    tokens = ", ".join(lead)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({tokens}, D), got {x.shape}")
    channels = x.shape[-1:]
    if A.ndim != 2 or A.shape[:1] != channels or A.shape[1] == 0:
        raise ValueError(
            f"A must have shape (D, N), D the {channels[0]} channels of x and N at least 1; "
            f"got {A.shape}"
        )
    states, meaning = (*x.shape[:-1], A.shape[1]), f"({tokens}, N) of x and A"
    if B.ndim == x.ndim + 1:
        groups = B.shape[-2]
        if groups == 0 or channels[0] % groups:
            raise ValueError(
                f"B must have a number of groups that divides the {channels[0]} channels of x; "
                f"got {groups}, in shape {B.shape}"
            )
        states = (*x.shape[:-1], groups, A.shape[1])
        meaning = f"({tokens}, G, N) of x, B and A"

    dt = check_array("dt", dt, x.shape, f"({tokens}, D) of x")
    B = check_array("B", B, states, meaning)
    C = check_array("C", C, states, f"{meaning}, as B")
    D = check_optional("D", D, channels, "(D,) of x")
    z = check_optional("z", z, x.shape, f"({tokens}, D) of x")
    return x, dt, A, B, C, D, z, check_optional("dt_bias", dt_bias, channels, "(D,) of x")


def _unsupported(args: tuple[Any, ...]) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    if reason := unfit(**dict(zip(_FLOATING, args, strict=True))):
        return reason
    states = args[2].shape[1]
    if states > MAX_STATES:
        return f"A has {states} states per channel, and the kernels hold at most {MAX_STATES}"
    return None


_FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")


def _selective_scan(x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed, options):
    args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed)
    out, final, _ = FORWARD(options, *args)
    return match_sharding(out, x), final


def _selective_scan_fwd(x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed, options):
    args = (x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed)
    out, final, states = FORWARD(dataclasses.replace(options, save=True), *args)
    return (match_sharding(out, x), final), (args, states)


def _selective_scan_bwd(options, res, cotangents):
    args, states = res
    *grads, _ = BACKWARD(options, *args, states, *cotangents)
    return match_primals(grads, args)


_jitted = Differentiable(_selective_scan_fwd, _selective_scan_bwd, _selective_scan)


# The scan and the product after it: the backward has the output of the scan from its kernel


def _projected(x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed, weight, options):
    args = x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed
    out, final = _selective_scan(*args, options)
    return linear(join_groups(out, 2), weight), final


def _projected_fwd(x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed, weight, options):
    args = x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed
    (out, final), res = _selective_scan_fwd(*args, options)
    return (linear(join_groups(out, 2), weight), final), (*res, weight)


def _projected_bwd(options, res, cotangents):
    args, states, weight = res
    dproduct, dfinal = cotangents
    unread = join_groups(match_sharding(jnp.zeros_like(args[0]), args[0]), 2)
    of_out = jax.vjp(lambda out: linear(out, weight), unread)[1]
    dout = of_out(dproduct)[0].reshape(args[0].shape)
    with_output = dataclasses.replace(options, output=True)
    *grads, out = BACKWARD(with_output, *args, states, dout, dfinal)
    out = join_groups(match_sharding(out, args[0]), 2)
    return *match_primals(grads, args), jax.vjp(lambda w: linear(out, w), weight)[1](dproduct)[0]


_projected_jit = Differentiable(_projected_fwd, _projected_bwd, _projected)

_STATES = "b l g p n"


def _ends(options: SelectiveScanOptions) -> str:
    """The factors of initial and final states."""
    return "b g p n" if options.num_segments is None else "b s g p n"


def _arguments(options: SelectiveScanOptions) -> tuple[str, ...]:
    tokens, weights = "b l g p", "b l g n"
    args = tokens, tokens, "g p n", weights, weights, "g p", tokens, "g p"
    return *args, _ends(options), "b l", "b l"


# A sequence split between devices

CARRY = KernelPass(
    "selective_scan_carry",
    kernel=launch_device_carry,
    reference=reference_carry,
    ins=("b l g p", "b l g p", "g p n", "b l g n", "g p", "b l"),
    outs=("b g p", "b g p n"),
    whole="l n",
)
BWD_CARRY = KernelPass(
    "selective_scan_bwd_carry",
    kernel=launch_device_bwd_carry,
    reference=reference_bwd_carry,
    ins=("b l g p", "g p n", "b l g n", "b l g p", "g p", "b l", "b l g p"),
    outs=("b g p", "b g p n"),
    whole="l n",
)


def _sections(options: SelectiveScanOptions, x: Any) -> Sections:
    batch, length, groups, channels = x.shape
    step = options.checkpoint_every or CHUNK
    return Sections.of(batch, groups * channels, length, step)


def _cut(sections: Sections, args: Any) -> Any:
    """The arguments of the forward, those along the sequence in sections."""
    x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed = args
    x, dt, B, C, z, keep = map(sections.cut, (x, dt, B, C, z, keep))
    return x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed


def _section_states(
    run: Any, axes: Any, sections: Sections, A: Any, keep: Any, carry: Any, first: Any, **to: bool
) -> Any:
    decay = functools.partial(decay_of, A.astype(carry[1].dtype), keep is not None)
    return sections.states(run, axes, Decays(decay, over=jnp.sum), carry, first, **to)


def _states_before(
    run: Any, axes: Any, sections: Sections, options: SelectiveScanOptions, *args: Any
) -> Any:
    x, dt, A, B, _, _, _, dt_bias, initial_state, keep, _ = args
    carry = run(options, x, dt, A, B, dt_bias, keep, of=CARRY)
    return _section_states(run, axes, sections, A, keep, carry, initial_state)


def _split_forward(run: Any, axes: Any, options: SelectiveScanOptions, *args: Any) -> Any:
    sections = _sections(options, args[0])
    args = _cut(sections, args)
    *floats, _, keep, crossed = args
    before = _states_before(run, axes, sections, options, *args)
    out, final, *states = run(options, *floats, before, keep, crossed)
    final = only_if(is_last(axes), sections.at(final, -1))
    return sections.join(out), final, *map(sections.join, states)


def _split_backward(run: Any, axes: Any, options: SelectiveScanOptions, *args: Any) -> Any:
    *given, states, dout, dfinal = args
    sections = _sections(options, args[0])
    given, states, dout = _cut(sections, given), sections.cut(states), sections.cut(dout)
    _, dt, A, _, C, _, z, dt_bias, initial_state, keep, crossed = given
    carry = run(options, dt, A, C, z, dt_bias, keep, dout, of=BWD_CARRY)
    dfinal = _section_states(run, axes, sections, A, keep, carry, dfinal, reverse=True)
    before = None
    if states is None:
        before = _states_before(run, axes, sections, options, *given)
    elif initial_state is not None:
        before = states[:, 0].astype(initial_state.dtype)
    args = *given[:8], before, keep, crossed
    *grads, dinitial, _, _, out = run(options, *args, states, dout, dfinal)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias = grads
    dx, ddt, dB, dC, dz = map(sections.join, (dx, ddt, dB, dC, dz))
    if initial_state is not None:
        dinitial = only_if(is_first(axes), sections.at(dinitial, 0))
    else:
        dinitial = None
    return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial, None, None, sections.join(out)


_SPLIT_FORWARD, _SPLIT_BACKWARD = sequences(_split_forward, _split_backward, unless_whole_steps)


# The passes

FORWARD = KernelPass(
    "selective_scan_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=_arguments,
    outs=lambda options: ("b l g p", _ends(options), _STATES),
    whole="l n s",
    sequence=_SPLIT_FORWARD,
)
BACKWARD = KernelPass(
    "selective_scan_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    ins=lambda options: (*_arguments(options), _STATES, "b l g p", _ends(options)),
    outs=lambda options: (*_arguments(options), "b l g p"),
    whole="l n s",
    sequence=_SPLIT_BACKWARD,
)
PLAIN = KernelPass(  # whose loops and gathers a mesh with Explicit axes cannot split
    "selective_scan",
    reference=selective_scan_reference,
    ins=_arguments,
    outs=lambda options: ("b l g p", _ends(options)),
    whole="l n s",
    sequence=_SPLIT_FORWARD,
)


# One token, to decode


@public_op
def selective_scan_step(
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
    dt_limit: tuple[float, float] = (-math.inf, math.inf),
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`selective_scan` for one token, to decode step by step.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t x_t B_t, \qquad
        \text{out}_t = (C_t \cdot h_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    Args:
      state: (B, D, N), float32, :math:`h_{t-1}`; zeros to begin with. With `layer` it holds
        several layers, (layers, B, D, N).
      x: (B, D), any floating dtype, as are all arguments below.
      dt: (B, D).
      A: (D, N).
      B: (B, N), or (B, G, N) where channel d is in group d // (D / G).
      C: the shape of `B`.
      D: (D,) or ``None``.
      z: (B, D) or ``None``.
      dt_bias: (D,) or ``None``.
      dt_softplus: whether the step size is ``softplus(dt + dt_bias)``.
      dt_limit: the least and the largest step size; one outside is set to the limit.
      layer: index of the layer of `state` to update; the others stay as they are. In a loop over
        layers that carries `state` the kernel then updates it in place, without a copy. A traced
        index out of range is clipped.
      implementation: ``"mosaic"`` for the Pallas GPU kernel (N a power of two from 8 to 512), whose
        gradients are computed in plain JAX; ``"xla"`` for plain JAX; ``None`` for the kernel where
        it can take the call.

    Returns:
      The output, (B, D), the dtype of `x`; and :math:`h_t`, the shape of `state`, float32.

    Raises:
      TypeError: an argument is not an array of a real floating dtype, `dt_limit` not two Python
        numbers, or `layer` no integer.
      ValueError: shapes do not fit, `dt_limit` is no range, or there is no such `layer`.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1))
      >>> for _ in range(2):  # A = 0: the state adds up what enters
      ...     out, state = jaxkern.selective_scan_step(state, one, one, 0 * one, one, one)
      >>> out
      Array([[2.]], dtype=float32)

    References:
      Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.
    """
    check = functools.partial(_check, ("B",))
    args = check_columns(check, x, dt, A, B, C, D, z, dt_bias)
    of_layer = args[0].shape[0], *args[2].shape
    number, state = check_layer(layer, state, of_layer, _STATE_SHAPE)
    *grouped, state = by_group((*args, state), 1)
    reason = scan_step.unsupported(state, *grouped)
    mode = resolve(implementation, reason, op="selective_scan_step")
    options = scan_step.ScanStepOptions(StepSizes.checked(dt_softplus, dt_limit), mode)
    out, state = STEP(options, state, number, *grouped)
    state = join_groups(state, 2)
    return join_groups(out, 1), state[0] if layer is None else state


def _step_reference(options, state, layer, x, dt, A, B, C, D, z, dt_bias) -> tuple[Any, Any]:
    of_scan = SelectiveScanOptions(options.sizes, True, None, options.mode)
    args = x, dt, A, B, C, D, z, dt_bias, take_layer(state, layer)
    out, after = reference_step(of_scan, *args)
    return out, put_layer(state, layer, after)


STEP = StepPass(
    "selective_scan_step",
    kernel=scan_step.launch,
    kernel_of_slices=scan_step.launch_of_slices,
    reference=_step_reference,
    ins=(
        *("s b g p n", "i", "b g p", "b g p", "g p n"),
        *("b g n", "b g n", "g p", "b g p", "g p"),
    ),
    outs=("b g p", "s b g p n"),
    whole="s i n",
    split=("g", "p"),
)
