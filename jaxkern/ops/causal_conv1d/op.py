"""Causal depthwise convolution along time, the short filter in front of a Mamba scan.

Forward, for a batch row and a channel, where tap w looks back by j = W − 1 − w tokens, and x before
the start of the sequence is the initial state, or 0:

    s[t]   = bias + Σ_w weight[w] · x[t − j]                                      w = 0 … W−1
    out[t] = s[t],   or   s[t] · sigmoid(s[t])   for activation="silu"

Backward, for the cotangent dout, with f the activation:

    ds[t]      = dout[t] · f'(s[t])          dx[t] = Σ_w weight[w] · ds[t + j]
    dweight[w] = Σ_bt ds[t] · x[t − j]       dbias = Σ_bt ds[t]

In packed sequences, the terms whose x lies in another segment than t are left out of all sums.

Saved for the backward: the arguments. s is recomputed.

Bytes per element of x, in units of its size: 2 forward (read x, write out), 3 backward (read x and
dout, write dx). A tile of the sequence also reads the W − 1 tokens before it and, in the backward,
after it, mostly from the L2 cache. Two tiles leave W + 1 fp32 sums per channel for dweight and
dbias, about 1% of the bytes for tiles of 256, which a small second kernel adds up. With SiLU the
forward takes about 15 instructions per element at W = 4 and 19 at W = 8, the backward 28 and 41:
up to W = 4 both passes wait for memory.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import (
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
    SplitSequence,
    from_before,
    is_first,
    is_last,
    match_primal,
    match_sharding,
    on_all,
    only_if,
)
from jaxkern.mosaic.launch import LANES
from jaxkern.ops import segments
from jaxkern.ops.causal_conv1d import step
from jaxkern.ops.causal_conv1d.kernel import launch_bwd, launch_fwd
from jaxkern.ops.causal_conv1d.reference import (
    FINAL_STATES,
    from_states,
    looks_back,
    reference_bwd,
    reference_fwd,
)
from jaxkern.ops.causal_conv1d.tiles import MAX_WIDTH, Activation, ConvOptions
from jaxkern.ops.columns import check_columns
from jaxkern.ops.scan_options import check_layer


@final_state_op
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    return_final_state: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Convolve every channel with its own short filter, looking back in time only.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    for every batch row and channel, where f is the identity or SiLU; ``weight[:, W-1]`` meets the
    current input. Products and sums are computed in fp32, whatever the dtypes; the result is
    rounded once, to the dtype of `x`. For the backward only the arguments are kept. A NaN in one
    channel of one batch row stays there, but for the gradients of `weight` and `bias`, which sum
    over batch rows. The bits are the same on every run.

    The forward moves 2 bytes per byte of `x`, the backward 3: both wait for memory.

    On a mesh, batch, channels and L may be split between devices; with `num_segments` a split L is
    gathered. Each device hands its last W - 1 inputs to the next one. Inside ``jax.shard_map`` the
    same happens along `sequence_axis`; gradients of arguments without L are then a device's share
    of a sum, as is usual there.

    Args:
      x: (B, L, D), bfloat16, float16 or float32.
      weight: (D, W), any of those dtypes, W at least 1; the kernels take W up to 8.
      bias: (D,), any of those dtypes; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.
      initial_state: (B, W - 1, D), or with `num_segments` (B, S, W - 1, D), any of those dtypes,
        the inputs before the first, oldest first, in the segment of the first token; ``None``
        stands for zeros.
      segment_ids: (B, L), integers, for packed sequences: a segment ends where the number changes,
        and inputs before the start of a token's segment count as zeros.
      num_segments: S, for segments that each have an initial and a final state: of the segment with
        id s, s from 0 to S - 1, they are ``[:, s]``. A segment with another id (padding, say)
        begins after zeros, and so does one whose id comes back after another.
      return_final_state: whether to return the initial state for the tokens that follow, too.
      sequence_axis: inside ``jax.shard_map``, the mesh axis, or axes, over which L is split: the
        arrays are then a device's part of L, and the final state is the same on all devices.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or newer, plain JAX
        elsewhere.

    Returns:
      (B, L, D), the dtype of `x`. With `return_final_state`, also the last W - 1 inputs,
      (B, W - 1, D), the dtype of `x`, with zeros for those before the last token's segment; with
      `num_segments` (B, S, W - 1, D), the last inputs of every segment after its initial state.

    Raises:
      TypeError: an argument is not an array of a real floating dtype, or `segment_ids` not one of
        integers, or `num_segments` no int.
      ValueError: a shape does not fit, `num_segments` is less than 1, without `segment_ids` or with
        `sequence_axis`, L cannot be split so, or `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, weight = jnp.arange(4.0).reshape(1, 4, 1), jnp.array([[1.0, 10.0]])
      >>> jaxkern.causal_conv1d(x, weight)[0, :, 0]
      Array([ 0., 10., 21., 32.], dtype=float32)
      >>> out, state = jaxkern.causal_conv1d(x[:, :2], weight, return_final_state=True)
      >>> jaxkern.causal_conv1d(x[:, 2:], weight, initial_state=state)[0, :, 0]
      Array([21., 32.], dtype=float32)

      Two sequences of 3 and 1 tokens in a row, each with its own states:

      >>> ids, states = jnp.array([[0, 0, 0, 1]]), jnp.array([5.0, 7.0]).reshape(1, 2, 1, 1)
      >>> out, states = jaxkern.causal_conv1d(
      ...     x, weight, segment_ids=ids, num_segments=2,
      ...     initial_state=states, return_final_state=True,
      ... )
      >>> out[0, :, 0], states[0, :, 0, 0]
      (Array([ 5., 10., 21., 37.], dtype=float32), Array([2., 3.], dtype=float32))

    References:
      Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
      <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    x, weight, bias = _check(("B", "L"), x, weight, bias, activation)
    (batch, length, dim), width = x.shape, weight.shape[1]
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    initial_state = segments.check_states(
        initial_state, batch, count, (width - 1, dim), "(B, W - 1, D) of x and weight"
    )
    if segment_ids is not None:
        segment_ids = segments.check_segment_ids(segment_ids, (batch, length), count)
    options = ConvOptions(
        activation=activation,
        mode=resolve(
            implementation, _unsupported(x, weight, bias, initial_state), op="causal_conv1d"
        ),
        final=return_final_state and count is None,
        sequence_axis=over,
    )
    look_back = None
    if segment_ids is not None:
        look_back = LOOKS_BACK(segments.LookBack(width - 1, sequence_axis=over), segment_ids)[0]
    state = initial_state if count is None else None
    if options.mode == "xla":
        out, final = FORWARD(options, x, weight, bias, state, look_back)
    else:
        out, final = _causal_conv1d_jit(x, weight, bias, state, look_back, options)
    if segment_ids is not None and count is not None:
        spans = segments.spans(segment_ids, count)
        if initial_state is not None:
            out = from_states(options, out, x, weight, bias, initial_state, spans)
            out = named("causal_conv1d", out)
        if return_final_state:
            (final,) = FINAL_STATES(width, x, initial_state, *spans)
    out = match_sharding(out, x)
    return (out, on_all(sequence_axis, final)) if return_final_state else out


@public_op
def causal_conv1d_step(
    state: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    layer: int | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`causal_conv1d` for one token, to decode step by step.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    Args:
      state: (B, W - 1, D), any floating dtype, the inputs before this one, oldest first: zeros to
        begin with, or what ``causal_conv1d(..., return_final_state=True)`` returns. With `layer`
        it holds several layers, (layers, B, W - 1, D).
      x: (B, D), any floating dtype.
      weight: (D, W), any floating dtype.
      bias: (D,), any floating dtype; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.
      layer: index of the layer of `state` to update; the others stay as they are. In a loop over
        layers that carries `state` the kernel then updates it in place, without a copy. A traced
        index out of range is clipped.
      implementation: ``"mosaic"`` for the Pallas GPU kernel (D a multiple of 128, W from 2 to 8),
        whose gradients are computed in plain JAX; ``"xla"`` for plain JAX; ``None`` for the kernel
        where it can take the call.

    Returns:
      The output, (B, D), the dtype of `x`; and the next state, the shape and dtype of `state`.

    Raises:
      TypeError: an argument is not an array of a real floating dtype, or `layer` no integer.
      ValueError: a shape does not fit, `activation` is unknown, or there is no such `layer`.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, weight = jnp.zeros((1, 1, 1)), jnp.array([[1.0, 10.0]])
      >>> for token in (1.0, 2.0):
      ...     out, state = jaxkern.causal_conv1d_step(state, jnp.full((1, 1), token), weight)
      >>> out
      Array([[21.]], dtype=float32)

    References:
      Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    check = functools.partial(_check, ("B",), activation=activation)
    x, weight, bias = check_columns(check, x, weight, bias)
    (batch, dim), width = x.shape, weight.shape[1]
    before = (batch, width - 1, dim)
    number, states = check_layer(layer, state, before, "(B, W - 1, D) of x and weight")
    mode = resolve(
        implementation, step.unsupported(states, x, weight, bias), op="causal_conv1d_step"
    )
    options = step.ConvStepOptions(activation, mode)
    out, states = step.STEP(options, states, number, x, weight, bias)
    return out, states[0] if layer is None else states


def _check(lead: tuple[str, ...], x, weight, bias, activation) -> tuple[Any, Any, Any]:
    """Checks the arguments and makes them arrays; `lead` names the dimensions of x before D."""
    x, weight = check_floating("x", x), check_floating("weight", weight)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({', '.join(lead)}, D), got {x.shape}")
    channels = x.shape[-1:]
    if weight.ndim != 2 or weight.shape[:1] != channels or weight.shape[1] == 0:
        raise ValueError(
            f"weight must have shape (D, W), D the {channels[0]} channels of x and W at least 1; "
            f"got {weight.shape}"
        )
    bias = check_optional("bias", bias, channels, "(D,) of x")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be "silu" or None, got {activation!r}')
    return x, weight, bias


def _unsupported(x: Any, weight: Any, bias: Any, state: Any) -> str | None:
    """Reason why the kernels, forward and backward, cannot take this call."""
    if reason := unfit(x=x, weight=weight, bias=bias, initial_state=state):
        return reason
    if weight.shape[1] > MAX_WIDTH:
        return f"the filter has {weight.shape[1]} taps, and the kernels take up to {MAX_WIDTH}"
    return None


def _faster(options: ConvOptions, x: Any, *rest: Any) -> bool:
    """Whether a kernel beats XLA, which depends on the channels: it pads them to 128."""
    del options, rest
    return x.shape[-1] >= LANES


def _causal_conv1d_fwd(x, weight, bias, state, look_back, options):
    out, final = FORWARD(options, x, weight, bias, state, look_back)
    return (match_sharding(out, x), final), (x, weight, bias, state, look_back)


def _causal_conv1d_bwd(options, res, cotangents):
    *primals, look_back = res
    grads = BACKWARD(options, *res, *cotangents)
    grads = [match_primal(g, p) for g, p in zip(grads, primals, strict=True)]
    return *grads, None if look_back is None else jnp.zeros_like(look_back)


_causal_conv1d_jit = Differentiable(_causal_conv1d_fwd, _causal_conv1d_bwd)


def _looks_back(options: segments.LookBack, ids: jax.Array) -> tuple[jax.Array]:
    return (looks_back(ids, options.tokens + 1),)


# A sequence split between devices. A device hands its last W − 1 inputs to the next one, where they
# are the initial state; in the backward it gets their gradient back, as for a final state. That
# gradient depends on a part's first W − 1 tokens alone, so a device computes it before the rest.


def _inputs_before(axes: Any, x: jax.Array, width: int, state: Any) -> jax.Array:
    """The W − 1 inputs before this device's first, (B, W − 1, D)."""
    before = from_before(axes, x[:, x.shape[1] - (width - 1) :])
    if state is None:
        return before
    dtype = jnp.result_type(x, state)
    return jnp.where(is_first(axes), state.astype(dtype), before.astype(dtype))


def _forward_of_part(
    run: Any, axes: Any, options: ConvOptions, x, weight, bias, state, look_back
) -> Any:
    before = _inputs_before(axes, x, weight.shape[1], state)
    out, final = run(options, x, weight, bias, before, look_back)
    return out, only_if(is_last(axes), final)


def _backward_of_part(
    run: Any, axes: Any, options: ConvOptions, x, weight, bias, state, look_back, dout, dfinal
) -> Any:
    before = _inputs_before(axes, x, weight.shape[1], state)
    before = before.astype(wide(before.dtype))  # so that its gradient is rounded once, with dx
    first = lambda v: None if v is None else v[:, : weight.shape[1] - 1]
    *_, dbefore = run(options, first(x), weight, bias, before, first(look_back), first(dout), None)
    passed = from_before(axes, dbefore, reverse=True)
    if dfinal is not None:
        passed = jnp.where(is_last(axes), dfinal.astype(passed.dtype), passed)
    dx, dweight, dbias, dbefore = run(options, x, weight, bias, before, look_back, dout, passed)
    dstate = None if state is None else only_if(is_first(axes), dbefore).astype(state.dtype)
    return dx, dweight, dbias, dstate


def _too_short(options: ConvOptions, parts: int, x: Any, weight: Any, *_: Any) -> str | None:
    length, before = x.shape[1], weight.shape[1] - 1
    if length >= parts * before:
        return None
    return f"a part of its {length} tokens is shorter than the {before} that a filter looks back"


FORWARD = KernelPass(
    "causal_conv1d_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    faster=_faster,
    ins=("b l d", "d w", "d", "b k d", "b l"),
    outs=("b l d", "b k d"),
    whole="w k",
    sequence=SplitSequence(_forward_of_part, _too_short),
)
BACKWARD = KernelPass(
    "causal_conv1d_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    faster=_faster,
    ins=("b l d", "d w", "d", "b k d", "b l", "b l d", "b k d"),
    outs=("b l d", "d w", "d", "b k d"),
    whole="w k",
    sequence=SplitSequence(_backward_of_part, _too_short),
)
LOOKS_BACK = KernelPass(
    "causal_conv1d_looks_back",
    reference=_looks_back,
    ins=("b l",),
    outs=("b l",),
    sequence=segments.LOOKING_BACK,
)
