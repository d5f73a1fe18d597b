"""SSD: the recurrence of Mamba-2, with one decay for all states of a head, in products of chunks.

Forward, for a batch row and a head with P channels and N states each, h[−1] = initial_state:

    s[t]   = min(max(softplus(dt[t] + dt_bias), low), high)     softplus only if asked for
    a[t]   = s[t] · A                                           ≤ 0 where A < 0
    h[t]   = k[t] · exp(a[t]) · h[t−1] + s[t] · x[t] ⊗ B[t]     (P, N)
    y[t]   = h[t] · C[t] + D · x[t]                             (P,)
    out[t] = y[t] · silu(z[t])

where k[t] = 0 if the segment id of token t differs from the previous token's, else 1. B and C
belong to the head's group.

In a chunk of Q tokens, c[i] = a[0] + … + a[i] in fp32, and h the state before it:

    S      = C Bᵀ                                               (Q, Q), once for a group
    M[i,j] = exp(c[i] − c[j]) · S[i,j] · s[j]   for j ≤ i       (Q, Q), a head
    y      = M x + exp(c) ∘ (C hᵀ) + D · x                      (Q, P)
    w[j]   = exp(c[Q−1] − c[j]) · s[j]
    h      ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B                       (P, N)

With segments M, exp(c) and w are zero between tokens, and states, of different segments. Exponents
are masked before the exponential, whose argument is therefore never positive if A ≤ 0.

Backward, for the cotangents dout and, of the state after a chunk, dh, with dy = dout ∘ silu(z):

    dM = dy xᵀ   masked                     dS = Σ_heads dM ∘ exp(c[i] − c[j]) · s[j]
    dC = dS B + Σ_heads exp(c) ∘ (dy h)     dB = dSᵀ C + Σ_heads (w ∘ x) dh
    dx = Mᵀ dy + w ∘ (B dhᵀ) + D · dy       dD = Σ dy · x        dz = dout ∘ y ∘ silu'(z)
    ds[j] = Σ_i dM[i,j] · M[i,j] / s[j] + exp(c[Q−1] − c[j]) · x[j] · (B dhᵀ)[j]
    dc[i] = Σ_j (dM ∘ M)[i,j] − Σ_j (dM ∘ M)[j,i] + exp(c[i]) · dy[i] · (C hᵀ)[i] − u[i]
            u[j] = w[j] · x[j] · (B dhᵀ)[j];  dc[Q−1] also has Σ_j u[j] + exp(c[Q−1]) · h · dh
    da[t] = Σ_{i ≥ t} dc[i]                 within the chunk
    dh ← exp(c[Q−1]) · dh + (exp(c) ∘ dy)ᵀ C

and of a and s, small arrays (B, L, H): ds += da · A, dA = Σ da · s, ddt = ds · softplus' within the
limits, ddt_bias = Σ ddt. These are plain JAX around the passes.

Saved for the backward: the arguments, and the state before every k-th token, k = checkpoint_every,
in bf16 if x is, else fp32: 2·N/k bytes per element of x, 2 at N = 128 and the default, k = 128.
With z also y in the dtype of x, as only a forward could find it again.

A chunk takes 2·Q·(Q·P + 2·P·N) operations of products forward and Q² exponentials for each head,
2·Q²·N for a group; backward, with what is computed again, 2·Q·(3·Q·P + 5·P·N) and 6·Q²·N.

Source: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality, 2024, arXiv:2405.21060.
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
from jaxkern.core.bound import standard_promotion, wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, final_state_op, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import match_primals, match_sharding, on_all
from jaxkern.ops import scan_step, segments
from jaxkern.ops.chunks import least_log_decay
from jaxkern.ops.columns import StepPass, check_columns
from jaxkern.ops.scan_options import (
    StepSizes,
    by_group,
    check_checkpoint_every,
    check_layer,
    join_groups,
    put_layer,
    take_layer,
)
from jaxkern.ops.ssd import devices
from jaxkern.ops.ssd.backward import launch_bwd
from jaxkern.ops.ssd.forward import launch_fwd
from jaxkern.ops.ssd.reference import (
    DEFAULT_CHECKPOINT_EVERY,
    SAVED_CHUNK,
    SsdOptions,
    Tokens,
    reference_bwd,
    reference_fwd,
    ssd_reference,
    step,
)
from jaxkern.ops.ssd.tiles import unfit_for_gpu, unsupported


@final_state_op
def ssd(
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
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    isolate_nan: bool = True,
    checkpoint_every: int | None = DEFAULT_CHECKPOINT_EVERY,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Run Mamba-2's recurrence (state space duality, SSD) along time, in products of chunks.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t \, x_t \otimes B_t, \qquad
        \text{out}_t = (h_t C_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    for every batch row and head, with a state of P times N, from :math:`h_{-1}` = `initial_state`,
    where :math:`\Delta` is ``softplus(dt + dt_bias)`` or ``dt + dt_bias``, limited to `dt_limit`,
    one number for a token and head. Decays, sums and states are fp32, whatever the dtypes; the
    result is rounded once, to the dtype of `x`. Any real `A` is taken; a positive one makes the
    state grow.

    Every floating argument has a gradient, `initial_state` too, and the final state passes one on.
    For the backward, the arguments and the state before every `checkpoint_every`-th token are kept,
    N / `checkpoint_every` numbers per element of `x`: bf16 if `x` is, else fp32; with `z` also what
    it multiplies.

    A NaN in one head of one batch row stays there, but for the gradients that sum over heads (`B`,
    `C`) or over batch rows (`A`, `D`, `dt_bias`); with `isolate_nan` it does not get past the end
    of its segment, nor before its begin. The bits are the same on every run.

    On a mesh, batch, heads and L may be split between devices; a split P or N is gathered, and with
    `num_segments` L. For a backward, a device's part of L is a multiple of `checkpoint_every`. Of
    several groups a part has whole ones; else heads are gathered, on Auto axes an error. Inside
    ``jax.shard_map`` `sequence_axis` says over which axis L is split; gradients of what has no L
    are then a device's share of a sum, as JAX has them there.

    Args:
      x: (B, L, H, P), bfloat16, float16 or float32.
      dt: (B, L, H), the step sizes before `dt_bias` and softplus; any of those dtypes, as are all
        floating arguments below.
      A: (H,), the rates of decay, negative in Mamba-2.
      B: (B, L, G, N), how x enters the states, where head h is in group h // (H / G); or (B, L, N),
        one group.
      C: the shape of `B`, how the states are read.
      D: (H,) or (H, P), the weight of `x` in the output; ``None`` stands for zeros.
      z: (B, L, H, P), the gate; ``None`` for no gate.
      dt_bias: (H,), added to `dt`; ``None`` stands for zeros.
      dt_softplus: whether the step size is the softplus of that sum.
      dt_limit: the least and the largest step size. One outside is set to the limit and has no
        gradient; so by default, without softplus, a negative step size counts as 0.
      initial_state: (B, H, P, N), or with `num_segments` (B, S, H, P, N), the state before the
        first token; ``None`` stands for zeros.
      return_final_state, segment_ids, num_segments, sequence_axis: as for
        :func:`jaxkern.selective_scan`.
      isolate_nan: with `segment_ids`, whether the kernels, too, keep NaN and infinities in their
        segment; their products may carry them to others of the row and head. The host then waits
        after each pass to know of any: in vain for a mean loss, which one NaN makes NaN anyway.
      checkpoint_every: how many tokens apart states are saved for the backward, a multiple of 128,
        or ``None`` for none at all, where the backward runs the forward again.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, which take `x`, `B`, `C` and `z` in
        bfloat16, P of 16 or more, N up to 256 and no `num_segments`: on Hopper GPUs those of
        wgmma, on others those of mma.sync;
        ``"xla"`` for plain JAX; ``None`` for the kernels where they take the call, else for plain
        JAX with a backward of its own.

    Returns:
      (B, L, H, P), the dtype of `x`; with `return_final_state` a pair of it and the final state,
      (B, H, P, N), float32; with `num_segments` (B, S, H, P, N), where a segment that is absent
      leaves its initial state as it is.

    Raises:
      TypeError: an argument is not an array of a real floating dtype (`segment_ids`: integer), or
        an option is not a Python number.
      ValueError: shapes do not fit, `num_segments` is without `segment_ids` or with
        `sequence_axis`, L cannot be split so, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, dt = jnp.ones((2, 100, 4, 16), jnp.bfloat16), jnp.ones((2, 100, 4))
      >>> A, B, C = -jnp.ones(4), jnp.ones((2, 100, 1, 32)), jnp.ones((2, 100, 1, 32))
      >>> jaxkern.ssd(x, dt, A, B, C, D=jnp.ones(4), dt_softplus=True).shape
      (2, 100, 4, 16)
      >>> dA = jax.grad(lambda a: jaxkern.ssd(x, dt, a, B, C).sum())(A)
      >>> half = lambda s, **kw: jaxkern.ssd(
      ...     x[:, s], dt[:, s], A, B[:, s], C[:, s], return_final_state=True, **kw
      ... )
      >>> first, state = half(slice(0, 50))
      >>> second, state = half(slice(50, 100), initial_state=state)
      >>> state.shape
      (2, 4, 16, 32)

    References:
      Dao and Gu, `Transformers are SSMs <https://arxiv.org/abs/2405.21060>`_, 2024.
    """
    args = _check(("B", "L"), x, dt, A, B, C, D, z, dt_bias)
    x, _, _, B, *_ = args
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    of_row = *x.shape[2:], B.shape[-1]
    initial_state = segments.check_states(initial_state, x.shape[0], count, of_row, _STATE_SHAPE)
    if initial_state is not None:
        initial_state = initial_state.astype(wide(initial_state.dtype))
    rank = crossed = None
    if segment_ids is not None:
        ids = segments.check_segment_ids(segment_ids, x.shape[:2], count)
        rank = segments.numbers(ids, over)
        crossed = None if count is None else segments.crossings(ids, count)
    every = check_checkpoint_every(checkpoint_every, SAVED_CHUNK)
    sizes = StepSizes.checked(dt_softplus, dt_limit)
    reason = unfit(**dict(zip(_FLOATING, (*args, initial_state), strict=True)))
    if reason is None and implementation == "mosaic":
        reason = unsupported(x, B, args[4], args[6], count)
    mode = resolve(implementation, reason, op="ssd")
    how: Any = {"isolate_nan": isolate_nan, "sequence_axis": over}
    options = SsdOptions(return_final_state, every, mode, count, **how)
    grouped = (*by_group((*args, initial_state), 2), rank, crossed)
    if mode != "xla":
        out, final = _jitted(*grouped, sizes, options)
    else:
        x, dt, A, B, C, D, z, dt_bias, *states = grouped
        dt, a = _log_decays(sizes, dt, A, dt_bias)
        out, final = named("ssd", PLAIN(options, x, dt, a, B, C, D, z, *states))
        out = match_sharding(out, x)
    out = join_groups(out, 2)
    if not options.final:
        return out
    return out, join_groups(on_all(sequence_axis, final), final.ndim - 4)


_FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
_STATE_SHAPE = "(B, H, P, N) of x and B"


def _check(lead, x, dt, A, B, C, D, z, dt_bias) -> Any:
    """The arguments as arrays; `lead` names the dimensions before the heads.

    B and C of one group may be without its axis.
    """
    x, B, C = check_floating("x", x), check_floating("B", B), check_floating("C", C)
    tokens = ", ".join(lead)
    if B.ndim == C.ndim == len(lead) + 1:
        B, C = B[..., None, :], C[..., None, :]
    if x.ndim != len(lead) + 2:
        raise ValueError(f"x must have shape ({tokens}, H, P), got {x.shape}")
    heads = x.shape[-2]
    if B.ndim != x.ndim or B.shape[:-2] != x.shape[:-2] or B.shape[-1] == 0:
        raise ValueError(
            f"B must have shape ({tokens}, G, N), or ({tokens}, N) for one group, with "
            f"{x.shape[:-2]} of x and N at least 1; got {B.shape}"
        )
    if B.shape[-2] == 0 or heads % B.shape[-2]:
        raise ValueError(
            f"B must have a number of groups that divides the {heads} heads of x; "
            f"got {B.shape[-2]}, in shape {B.shape}"
        )

    dt = check_array("dt", dt, x.shape[:-1], f"({tokens}, H) of x")
    A = check_array("A", A, (heads,), "(H,) of x")
    C = check_array("C", C, B.shape, f"({tokens}, G, N), as B")
    if D is not None:
        D = check_floating("D", D)
        either = (
            (x.shape[-2:], "(H, P) of x") if D.ndim == 2 else ((heads,), "(H,) of x, or (H, P)")
        )
        D = check_array("D", D, *either)
    z = check_optional("z", z, x.shape, f"({tokens}, H, P) of x")
    return x, dt, A, B, C, D, z, check_optional("dt_bias", dt_bias, (heads,), "(H,) of x")


@standard_promotion()  # in the backward's rule too
def _log_decays(sizes: StepSizes, dt: Any, A: Any, dt_bias: Any) -> tuple[jax.Array, jax.Array]:
    """Step sizes and logarithms of decays, (…, G, R), at least float32."""
    acc = jnp.result_type(jnp.float32, *(v for v in (dt, A, dt_bias) if v is not None))
    lead = (None,) * (dt.ndim - 2)
    dt = dt.astype(acc)
    dt = sizes(dt if dt_bias is None else dt + dt_bias.astype(acc)[lead])
    a, least = dt * A.astype(acc)[lead], least_log_decay(acc)
    return dt, jnp.where(a < least, least, a)


def _ssd(x, dt, A, B, C, D, z, dt_bias, initial_state, rank, crossed, sizes, options):
    dt, a = _log_decays(sizes, dt, A, dt_bias)
    out, final, *_ = FORWARD(options, x, dt, a, B, C, D, z, initial_state, rank, crossed)
    return match_sharding(out, x), final


def _ssd_fwd(x, dt, A, B, C, D, z, dt_bias, initial_state, rank, crossed, sizes, options):
    args = x, dt, A, B, C, D, z, dt_bias, initial_state, rank, crossed
    dt, a = _log_decays(sizes, dt, A, dt_bias)
    save = dataclasses.replace(options, save=True)
    out, final, *saved = FORWARD(save, x, dt, a, B, C, D, z, initial_state, rank, crossed)
    return (match_sharding(out, x), final), (args, saved)


def _ssd_bwd(sizes, options, res, cotangents):
    args, saved = res
    x, dt, A, B, C, D, z, dt_bias, initial_state, rank, crossed = args
    # Kept until their gradients are there, step sizes would lie beside all that the kernels need.
    found_again = jax.checkpoint(functools.partial(_log_decays, sizes))
    (step_size, a), of_steps = jax.vjp(found_again, dt, A, dt_bias)
    given = x, step_size, a, B, C, D, z, initial_state, rank, crossed
    grads = BACKWARD(options, *given, *saved, *cotangents)
    dx, ds, da, dB, dC, dD, dz, dinitial, _, _ = match_primals(grads, given)
    ddt, dA, ddt_bias = of_steps((ds, da))
    return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial, None, None


_jitted = Differentiable(_ssd_fwd, _ssd_bwd, _ssd, options=2)


def _ends(options: SsdOptions) -> str:
    """The factors of initial and final states."""
    return "b g r p n" if options.num_segments is None else "b s g r p n"


def _arguments(options: SsdOptions) -> tuple[str, ...]:
    tokens, steps, weights = "b l g r p", "b l g r", "b l g n"
    args = tokens, steps, steps, weights, weights, "g r ...", tokens
    return *args, _ends(options), "b l", "b l"


def _unfit(options: SsdOptions, x, dt, a, B, C, D, z, *rest) -> str | None:
    del dt, a, D, rest
    return unfit_for_gpu(options, x, B, C, z)


_STATES = "b l g r p n"

FORWARD = KernelPass(
    "ssd_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=_arguments,
    outs=lambda options: ("b l g r p", _ends(options), _STATES, "b l g r p"),
    whole="l p n s .0",
    sequence=devices.forward,
    unfit=_unfit,
)
BACKWARD = KernelPass(
    "ssd_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    ins=lambda options: (
        *(*_arguments(options), _STATES),
        *("b l g r p", "b l g r p", _ends(options)),
    ),
    outs=_arguments,
    whole="l p n s .0",
    sequence=devices.backward,
    unfit=_unfit,
)
PLAIN = KernelPass(  # whose sums over heads and gathers an Explicit mesh cannot split
    "ssd",
    reference=ssd_reference,
    ins=_arguments,
    outs=lambda options: ("b l g r p", _ends(options)),
    whole="l p n s .0",
    sequence=devices.forward,
)


# One token, to decode


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
    check = functools.partial(_check, ("B",))
    args = check_columns(check, x, dt, A, B, C, D, z, dt_bias)
    x, B = args[0], args[3]
    number, state = check_layer(layer, state, (*x.shape, B.shape[-1]), _STATE_SHAPE)
    *grouped, state = by_group((*args, state), 1)
    reason = scan_step.unsupported(state, *grouped)
    mode = resolve(implementation, reason, op="ssd_step")
    options = scan_step.ScanStepOptions(StepSizes.checked(dt_softplus, dt_limit), mode)
    out, state = STEP(options, state, number, *grouped)
    state = join_groups(state, 2)
    return join_groups(out, 1), state[0] if layer is None else state


def _step_reference(options, state, layer, x, dt, A, B, C, D, z, dt_bias) -> tuple[Any, Any]:
    dt, a = _log_decays(options.sizes, dt, A, dt_bias)
    out, after = step(Tokens(x, dt, a, B, C, z), D, take_layer(state, layer))
    return out, put_layer(state, layer, after)


STEP = StepPass(
    "ssd_step",
    kernel=scan_step.launch,
    kernel_of_slices=scan_step.launch_of_slices,
    reference=_step_reference,
    ins=(
        *("s b g r p n", "i", "b g r p", "b g r", "g r"),
        *("b g n", "b g n", "g r ...", "b g r p", "g r"),
    ),
    outs=("b g r p", "s b g r p n"),
    whole="s i p n .0",
    split=("g", "r"),
)
