"""The gated delta rule: the recurrence of DeltaNet, Gated DeltaNet and Kimi Delta Attention.

Forward, for a batch row and a value head with K × V states, S[−1] = initial_state, q and k of the
head's group, and a decay exp(g) that is one number of a token and head, or one a key channel:

    S'[t] = exp(g[t]) ∘ S[t−1]                                      (K, V)
    S[t]  = S'[t] + β[t] k[t] ⊗ (v[t] − k[t]ᵀ S'[t])
    o[t]  = scale · q[t]ᵀ S[t]                                      (V,)

In a chunk of Q tokens, G[i] = g[0] + … + g[i] in fp32, and S the state before it, the values that
enter, N[t] = β[t] (v[t] − k[t]ᵀ S'[t]), solve a triangular system:

    A[i,j] = β[i] Σ_k k[i]·k[j]·exp(G[i] − G[j])   for j < i        (Q, Q)
    N      = (I + A)⁻¹ β ∘ (v − (exp(G) ∘ k) S)                     (Q, V)
    M[i,j] = Σ_k q[i]·k[j]·exp(G[i] − G[j])        for j ≤ i        (Q, Q)
    o      = scale · ((exp(G) ∘ q) S + M N)                         (Q, V)
    S      ← exp(G[Q−1]) ∘ S + (exp(G[Q−1] − G) ∘ k)ᵀ N             (K, V)

The system is solved by substitution of blocks of 16 tokens, whose blocks on the diagonal are
inverted by doubling (`unit_lower_inverse`), not by powers of A: with keys that are nearly parallel
these grow beyond fp32's digits and cancel.

Every exponent is a sum over the tokens in between, ≤ 0 where g ≤ 0, and computed as such: nothing
overflows, and one token that forgets everything costs the others no digits. With one decay for a
head, exp(G[i] − G[j]) is a factor of k[i] · k[j]. With one for a channel it is inside of the
product: blocks of 16 tokens have all 16² · K exponentials; between two blocks i is decayed from the
start of its block, and j up to there. With segments A, M and what is read of S are zero between
tokens, and states, of different segments.

The backward is the derivative that JAX takes of a chunk, from the last chunk to the first. The
kernels and their backward: :mod:`jaxkern.ops.delta_rule.kernel`; that of one token, which works on
the recurrence itself: :mod:`jaxkern.ops.delta_rule.step`.

Saved for the backward: the arguments, and the state before every 256th token in fp32, K·V / 256
numbers a token and head; by kernels with one decay for a head also T, 64 numbers in 16 bits.

A chunk takes 2·Q·(2·Q·V + 3·K·V) operations of products for a head, and 2·Q·2·Q·K for a group, or
for a head where channels decay apart; backward, with what is computed again, 2·Q·(5·Q·V + 8·K·V)
and 2·Q·6·Q·K.

Sources: Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length,
2024, arXiv:2406.06484; Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, arXiv:2412.06464;
Kimi Linear, 2025, arXiv:2510.26692.
"""

import dataclasses
from typing import Any

import jax

from jaxkern.core.arguments import (
    check_array,
    check_floating,
    check_number,
    check_optional,
    check_sequence_axis,
    unfit,
)
from jaxkern.core.bound import wide
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, final_state_op, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import match_primals, match_sharding, on_all
from jaxkern.ops import segments
from jaxkern.ops.delta_rule import devices
from jaxkern.ops.delta_rule import step as step_kernel
from jaxkern.ops.delta_rule.kernel import launch_bwd, launch_bwd_of_slices, launch_fwd
from jaxkern.ops.delta_rule.reference import (
    DeltaRuleOptions,
    Tokens,
    delta_rule_reference,
    reference_bwd,
    reference_fwd,
    step,
    unsupported,
)
from jaxkern.ops.scan_options import check_layer, join_groups, put_layer, split_groups, take_layer


@final_state_op
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    qk_l2norm: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Run the gated delta rule along time, in products of chunks.

    .. math::
        S'_t = \exp(g_t) \circ S_{t-1}, \qquad
        S_t = S'_t + \beta_t \, k_t \otimes (v_t - k_t^\top S'_t), \qquad
        o_t = \text{scale} \cdot q_t^\top S_t

    for every batch row and value head, with a state of K times V, from :math:`S_{-1}` =
    `initial_state`: linear attention whose state forgets, and whose key replaces what the state has
    for it. With `g` of heads it is Gated DeltaNet, the linear attention of Qwen3-Next; with `g` of
    key channels Kimi Delta Attention (KDA); without, DeltaNet. Decays, sums and states are fp32,
    whatever the dtypes; the result is rounded once, to the dtype of `v`.

    It is the recurrence itself, at any decay from 0 on: nothing is left out because it decayed, and
    no exponent is above 0 where `g` is not. A token multiplies the state by I − β k ⊗ k, whose
    eigenvalues are 1 and :math:`1 - \beta \lVert k \rVert^2`: with keys of length 1 (`qk_l2norm`)
    and β from 0 to 2 nothing grows. With β to 1, errors are those of a loop over the tokens in
    fp32. With β near 2 each token nearly reflects the state, and the values of a chunk, found from
    products of its keys, lose up to nine of 24 bits where keys are nearly parallel and nothing
    decays; a loop loses five. The kernels find the chunk's inverse in fp32, and round it, the
    state and what is multiplied by them to 16 bits. Where
    :math:`\beta \lVert k \rVert^2` is above 2, the state and its errors may grow with every
    token.

    Every floating argument has a gradient, `initial_state` too, and the final state passes one on.
    For the backward, the arguments and the state before every 256th token are kept.

    A NaN in one head of one batch row stays there, but for the gradients that sum over the heads of
    a group (`q`, `k`); it does not get past the end of its segment, nor before its begin. The bits
    are the same on every run.

    On a mesh, batch, heads and L may be split between devices; a split K or V is gathered, and with
    `num_segments` L. For a backward, a device's part of L is a multiple of 256. Of several groups a
    part has whole ones; else heads are gathered, on Auto axes an error. Inside ``jax.shard_map``
    `sequence_axis` says over which axis L is split.

    Args:
      q: (B, L, G, K), bfloat16, float16 or float32, the queries of G key heads, or groups.
      k: the shape of `q`, the keys; any of those dtypes, as are all floating arguments below.
      v: (B, L, H, V), the values, H a multiple of G: value head h is in group h // (H / G).
      g: (B, L, H), the logarithms of decays, of a head, or (B, L, H, K), of its key channels;
        ``None`` for no decay.
      beta: (B, L, H), how far the state moves to the value; ``None`` for 1.
      scale: factor of the output; by default K^−½.
      initial_state: (B, H, K, V), or with `num_segments` (B, S, H, K, V), the state before the
        first token; ``None`` stands for zeros.
      return_final_state, segment_ids, num_segments, sequence_axis: as for
        :func:`jaxkern.selective_scan`.
      qk_l2norm: whether to divide q and k by their length, x · (Σ x² + 1e-6)^−½ in fp32.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, which take `q`, `k` and `v` in
        bfloat16, K up to 128 and no `num_segments`, with `g` of channels on GPUs with 227 KiB of
        shared memory a block, such as H100, H200 and B200; ``"xla"`` for plain JAX; ``None`` for
        the kernels where they take the call, else for plain JAX with a backward of its own.

    Returns:
      (B, L, H, V), the dtype of `v`; with `return_final_state` a pair of it and the final state,
      (B, H, K, V), float32; with `num_segments` (B, S, H, K, V), where a segment that is absent
      leaves its initial state as it is.

    Raises:
      TypeError: an argument is not an array of a real floating dtype (`segment_ids`: integer), or
        an option is not a Python number.
      ValueError: shapes do not fit, `num_segments` is without `segment_ids` or with
        `sequence_axis`, L cannot be split so, or an option has a value that it cannot have.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> q = k = jax.random.normal(jax.random.key(0), (2, 100, 2, 16))  # 2 key heads
      >>> v, g = jnp.ones((2, 100, 4, 32), jnp.bfloat16), -jnp.ones((2, 100, 4))  # 4 value heads
      >>> beta = jnp.full((2, 100, 4), 0.5)
      >>> run = lambda s, **how: jaxkern.gated_delta_rule(
      ...     q[:, s], k[:, s], v[:, s], g[:, s], beta[:, s], qk_l2norm=True, **how
      ... )
      >>> run(slice(0, 100)).shape
      (2, 100, 4, 32)
      >>> first, state = run(slice(0, 50), return_final_state=True)
      >>> second = run(slice(50, 100), initial_state=state)
      >>> state.shape
      (2, 4, 16, 32)

    References:
      Yang et al., `Gated Delta Networks <https://arxiv.org/abs/2412.06464>`_, 2024. Kimi Team,
      `Kimi Linear <https://arxiv.org/abs/2510.26692>`_, 2025. Yang et al., `Parallelizing Linear
      Transformers with the Delta Rule over Sequence Length <https://arxiv.org/abs/2406.06484>`_,
      2024.
    """
    args = q, k, v, _, _ = _check(("B", "L"), q, k, v, g, beta)
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    of_row = v.shape[2], q.shape[-1], v.shape[-1]
    initial_state = segments.check_states(initial_state, v.shape[0], count, of_row, _STATE_SHAPE)
    if initial_state is not None:
        initial_state = initial_state.astype(wide(initial_state.dtype))
    rank = crossed = None
    if segment_ids is not None:
        ids = segments.check_segment_ids(segment_ids, v.shape[:2], count, "v")
        rank = segments.numbers(ids, over)
        crossed = None if count is None else segments.crossings(ids, count)
    reason = unfit(**dict(zip(_FLOATING, (*args, initial_state), strict=True)))
    if reason is None and implementation == "mosaic":
        reason = unsupported(count, *args[:3])
    mode = resolve(implementation, reason, op="gated_delta_rule")
    options = DeltaRuleOptions(
        return_final_state,
        mode,
        _scale(scale, q),
        qk_l2norm,
        count,
        sequence_axis=over,
    )
    grouped = (*_by_group((*args, initial_state), 2), rank, crossed)
    if mode != "xla":
        out, final = _jitted(*grouped, options)
    else:
        out, final = named("gated_delta_rule", PLAIN(options, *grouped))
        out = match_sharding(out, grouped[2])
    out = join_groups(out, 2)
    if not options.final:
        return out
    return out, join_groups(on_all(sequence_axis, final), final.ndim - 4)


_FLOATING = ("q", "k", "v", "g", "beta", "initial_state")
_STATE_SHAPE = "(B, H, K, V) of q and v"


def _check(lead: tuple[str, ...], q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    """The arguments as arrays; `lead` names the dimensions before the heads."""
    tokens = ", ".join(lead)
    q, v = check_floating("q", q), check_floating("v", v)
    if q.ndim != len(lead) + 2 or q.shape[-1] == 0:
        raise ValueError(f"q must have shape ({tokens}, G, K), with K at least 1; got {q.shape}")
    k = check_array("k", k, q.shape, f"({tokens}, G, K), as q")
    if v.ndim != q.ndim or v.shape[:-2] != q.shape[:-2]:
        raise ValueError(
            f"v must have shape ({tokens}, H, V), with {q.shape[:-2]} of q; got {v.shape}"
        )
    if q.shape[-2] == 0 or v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"q must have a number of heads that divides the {v.shape[-2]} heads of v; "
            f"got {q.shape[-2]}, in shape {q.shape}"
        )
    heads = v.shape[:-1]
    if g is not None:
        g = check_floating("g", g)
        by_channel = ((*heads, q.shape[-1]), f"({tokens}, H, K) of v and q")
        by_head = (heads, f"({tokens}, H) of v, or ({tokens}, H, K)")
        g = check_array("g", g, *(by_channel if g.ndim == v.ndim else by_head))
    return q, k, v, g, check_optional("beta", beta, heads, f"({tokens}, H) of v")


def _scale(scale: float | None, q: jax.Array) -> float:
    return q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)


def _by_group(args: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """The arguments with value heads, at `axis` of v, as (G, R): R in each of the G groups."""
    q, k, v, g, beta, state = args
    groups = q.shape[axis]
    v, g, beta = (split_groups(x, axis, groups) for x in (v, g, beta))
    state = split_groups(state, 0 if state is None else state.ndim - 3, groups)
    return q, k, v, g, beta, state


def _delta_rule(q, k, v, g, beta, initial_state, rank, crossed, options):
    out, final, *_ = FORWARD(options, q, k, v, g, beta, initial_state, rank, crossed)
    return match_sharding(out, v), final


def _delta_rule_fwd(q, k, v, g, beta, initial_state, rank, crossed, options):
    args = q, k, v, g, beta, initial_state, rank, crossed
    out, final, *saved = FORWARD(dataclasses.replace(options, save=True), *args)
    return (match_sharding(out, v), final), (args, saved)


def _delta_rule_bwd(options, res, cotangents):
    args, saved = res
    return match_primals(BACKWARD(options, *args, *saved, *cotangents), args)


_jitted = Differentiable(_delta_rule_fwd, _delta_rule_bwd, _delta_rule)

_KEYS, _VALUES = "b l g k", "b l g r v"


def _ends(options: DeltaRuleOptions) -> str:
    """The factors of initial and final states."""
    return "b g r k v" if options.num_segments is None else "b s g r k v"


def _arguments(options: DeltaRuleOptions) -> tuple[str, ...]:
    steps = "b l g r ...", "b l g r"
    return _KEYS, _KEYS, _VALUES, *steps, _ends(options), "b l", "b l"


_SAVED = "b l g r k v", "b l g r t u"
"""The factors of states and of T."""


def _unfit(options: DeltaRuleOptions, q, k, v, *rest) -> str | None:
    return unsupported(options.num_segments, q, k, v)


FORWARD = KernelPass(
    "gated_delta_rule_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=_arguments,
    outs=lambda options: (_VALUES, _ends(options), *_SAVED),
    whole="l k v s t u .0",
    sequence=devices.forward,
    unfit=_unfit,
)
BACKWARD = KernelPass(
    "gated_delta_rule_bwd",
    kernel=launch_bwd,
    kernel_of_slices=launch_bwd_of_slices,
    reference=reference_bwd,
    ins=lambda options: (*_arguments(options), *_SAVED, _VALUES, _ends(options)),
    outs=_arguments,
    whole="l k v s t u .0",
    sequence=devices.backward,
    unfit=_unfit,
)
PLAIN = KernelPass(  # whose sums over heads and gathers an Explicit mesh cannot split
    "gated_delta_rule",
    reference=delta_rule_reference,
    ins=_arguments,
    outs=lambda options: (_VALUES, _ends(options)),
    whole="l k v s .0",
    sequence=devices.forward,
)


# One token, to decode


@public_op
def gated_delta_rule_step(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`gated_delta_rule` for one token, to decode step by step.

    .. math::
        S'_t = \exp(g_t) \circ S_{t-1}, \qquad
        S_t = S'_t + \beta_t \, k_t \otimes (v_t - k_t^\top S'_t), \qquad
        o_t = \text{scale} \cdot q_t^\top S_t

    Args:
      state: (B, H, K, V), float32, :math:`S_{t-1}`; zeros to begin with. With `layer` it holds
        several layers, (layers, B, H, K, V).
      q: (B, G, K), any floating dtype, as are all arguments below.
      k: the shape of `q`.
      v: (B, H, V), where head h is in group h // (H / G).
      g: (B, H) or (B, H, K), or ``None`` for no decay.
      beta: (B, H), or ``None`` for 1.
      scale, qk_l2norm: as for :func:`gated_delta_rule`.
      layer: as for :func:`jaxkern.selective_scan_step`.
      implementation: ``"mosaic"`` for the Pallas GPU kernel (K a multiple of 16 up to 256, V a
        multiple of 32), whose gradients are computed in plain JAX; ``"xla"`` for plain JAX;
        ``None`` for the kernel where it can take the call.

    Returns:
      The output, (B, H, V), the dtype of `v`; and :math:`S_t`, the shape of `state`, float32.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`gated_delta_rule` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, one, half = jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1)), jnp.full((1, 1), 0.5)
      >>> for _ in range(2):  # the state goes half the way to the value, and again
      ...     out, state = jaxkern.gated_delta_rule_step(state, one, one, one, None, half)
      >>> out
      Array([[[0.75]]], dtype=float32)
    """
    args = q, k, v, _, _ = _check(("B",), q, k, v, g, beta)
    number, state = check_layer(
        layer, state, (*v.shape[:2], q.shape[-1], v.shape[-1]), _STATE_SHAPE
    )
    *grouped, state = _by_group((*args, state), 1)
    mode = resolve(
        implementation, step_kernel.unsupported(state, *grouped), op="gated_delta_rule_step"
    )
    options = step_kernel.DeltaRuleStepOptions(mode, _scale(scale, q), qk_l2norm)
    out, state = STEP(options, state, number, *grouped)
    state = join_groups(state, 2)
    return join_groups(out, 1), state[0] if layer is None else state


def _step_reference(options, state, layer, *tokens) -> tuple[Any, Any]:
    out, after = step(options, Tokens.of(*tokens), take_layer(state, layer))
    return out, put_layer(state, layer, after)


STEP = KernelPass(
    "gated_delta_rule_step",
    kernel=step_kernel.launch,
    kernel_of_slices=step_kernel.launch_of_slices,
    reference=_step_reference,
    ins=("s b g r k v", "i", "b g k", "b g k", "b g r v", "b g r ...", "b g r"),
    outs=("b g r v", "s b g r k v"),
    whole="s i k v .0",
)
