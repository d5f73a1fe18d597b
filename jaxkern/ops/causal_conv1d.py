"""Causal depthwise convolution along time, the short filter in front of a Mamba scan.

Forward, for a batch row and a channel, where tap w looks back by j = W − 1 − w tokens, and x before
the start of the sequence is the initial state, or 0:

    s[t]   = bias + Σ_w weight[w] · x[t − j]                                      w = 0 … W−1
    out[t] = s[t],   or   s[t] · sigmoid(s[t])   for activation="silu"

Backward, for the cotangent dout, with f the activation:

    ds[t]      = dout[t] · f'(s[t])          dx[t] = Σ_w weight[w] · ds[t + j]
    dweight[w] = Σ_bt ds[t] · x[t − j]       dbias = Σ_bt ds[t]

In packed sequences, the terms whose x lies in another segment than t are left out of all sums.

Saved for the backward: the arguments; s is recomputed.

Bytes per element of x, in units of its size: 2 forward (read x, write out), 3 backward (read x and
dout, write dx). At W = 4 with SiLU the forward takes about 12 operations per element and the
backward 30: both passes wait for memory.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, Mode, device_unsupported, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding
from jaxkern.core.mosaic import LANES, grid_axes, num_sms, windows

Activation = Literal["silu"]


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: Literal[False] = False,
    implementation: Implementation | None = None,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_final_state: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    r"""Convolve every channel with its own short filter, looking back in time only.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    for every batch row and channel, where f is the identity or SiLU; ``weight[:, W-1]`` meets the
    current input. Products and sums are computed in fp32, whatever the dtypes; the result is
    rounded once, to the dtype of `x`. For the backward only the arguments are kept. A NaN in one
    channel of one batch row stays there, but for the gradients of `weight` and `bias`, which sum
    over batch rows. The bits are the same on every run.

    The forward moves 2 bytes per byte of `x`, the backward 3: both wait for memory.

    On a mesh, batch and channels may be split between devices; a split length is gathered.

    Args:
      x: (B, L, D), bfloat16, float16 or float32.
      weight: (D, W), any of those dtypes, W at least 1; the kernels take W up to 8.
      bias: (D,), any of those dtypes; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.
      initial_state: (B, W - 1, D), any of those dtypes, the inputs before the first, oldest first,
        in the segment of the first token; ``None`` stands for zeros.
      segment_ids: (B, L), integers, for packed sequences: a segment ends where the number changes,
        and inputs before the start of a token's segment count as zeros.
      return_final_state: whether to return the initial state for the tokens that follow, too.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest: the kernels on an
        NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      (B, L, D), the dtype of `x`. With `return_final_state`, also the last W - 1 inputs,
      (B, W - 1, D), the dtype of `x`, with zeros for those before the last token's segment.

    Raises:
      TypeError: an argument is not an array of a real floating dtype, or `segment_ids` not one of
        integers.
      ValueError: a shape does not fit, or `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, weight = jnp.arange(4.0).reshape(1, 4, 1), jnp.array([[1.0, 10.0]])
      >>> jaxkern.causal_conv1d(x, weight)[0, :, 0]
      Array([ 0., 10., 21., 32.], dtype=float32)
      >>> out, state = jaxkern.causal_conv1d(x[:, :2], weight, return_final_state=True)
      >>> jaxkern.causal_conv1d(x[:, 2:], weight, initial_state=state)[0, :, 0]
      Array([21., 32.], dtype=float32)

    References:
      Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
      <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.4.
    """
    x, weight, bias = _check(("B", "L"), x, weight, bias, activation)
    (batch, length, dim), width = x.shape, weight.shape[1]
    if initial_state is not None:
        before = (batch, width - 1, dim)
        initial_state = check_array(
            "initial_state", initial_state, before, "(B, W - 1, D) of x and weight"
        )
    if segment_ids is not None:
        segment_ids = _check_segments(segment_ids, (batch, length))
    given = x
    x, initial_state, segment_ids = map(_whole_length, (x, initial_state, segment_ids))
    look_back = None if segment_ids is None else _look_back(segment_ids, width)
    options = _Options(
        activation=activation,
        mode=resolve(
            implementation,
            _unsupported(x, weight, bias, initial_state),
            op="causal_conv1d",
            slower=_slower(dim),
        ),
    )
    if options.mode == "xla":
        (out,) = _reference_fwd(options, x, weight, bias, initial_state, look_back)
    else:
        out = _causal_conv1d_jit(x, weight, bias, initial_state, look_back, options)
    out = match_sharding(out, given)
    if return_final_state:
        return out, _final_state(x, width, initial_state, look_back)
    return out


def causal_conv1d_step(
    state: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`causal_conv1d` for one token, to decode step by step.

    .. math:: \text{out}_t = f\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \, x_{t-(W-1)+w}\Bigr)

    Args:
      state: (B, W - 1, D), any floating dtype, the inputs before this one, oldest first: zeros to
        begin with, or what ``causal_conv1d(..., return_final_state=True)`` returns.
      x: (B, D), any floating dtype.
      weight: (D, W), any floating dtype.
      bias: (D,), any floating dtype; ``None`` stands for zeros.
      activation: ``"silu"`` or ``None``.

    Returns:
      The output, (B, D), the dtype of `x`; and the next state, (B, W - 1, D), the dtype of `state`.

    Raises:
      TypeError: an argument is not an array of a real floating dtype.
      ValueError: a shape does not fit, or `activation` is unknown.

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
    x, weight, bias = _check(("B",), x, weight, bias, activation)
    (batch, dim), width = x.shape, weight.shape[1]
    before = (batch, width - 1, dim)
    state = check_array("state", state, before, "(B, W - 1, D) of x and weight")
    taps = [*jnp.unstack(state, axis=1), x]
    out = _filter(taps, weight, bias, activation).astype(x.dtype)
    following = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)[:, 1:]
    return out, following


def _check(lead: tuple[str, ...], x, weight, bias, activation) -> tuple[Any, Any, Any]:
    """The arguments as arrays; `lead` names the dimensions of x before the channels."""
    x, weight = check_floating("x", x), check_floating("weight", weight)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({', '.join(lead)}, D), got {x.shape}")
    channels = x.shape[-1:]
    if weight.ndim != 2 or weight.shape[:1] != channels or weight.shape[1] == 0:
        raise ValueError(
            f"weight must have shape (D, W), D the {channels[0]} channels of x and W at least 1; "
            f"got {weight.shape}"
        )
    if bias is not None:
        bias = check_array("bias", bias, channels, "(D,) of x")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be "silu" or None, got {activation!r}')
    return x, weight, bias


def _check_segments(segment_ids: Any, shape: tuple[int, int]) -> jax.Array:
    try:
        segment_ids = jnp.asarray(segment_ids)
    except TypeError as e:
        name = type(segment_ids).__name__
        raise TypeError(f"segment_ids must be an array, got {name}") from e
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(
            f"segment_ids must have an integer dtype, got {segment_ids.dtype}; "
            "convert them first, e.g. segment_ids.astype(jnp.int32)"
        )
    if segment_ids.shape != shape:
        raise ValueError(
            f"segment_ids must have shape {shape} = (B, L) of x; got {segment_ids.shape}"
        )
    return segment_ids


def _whole_length(v: Any) -> Any:
    """`v` (B, L, ...) with its length gathered, where an Explicit mesh splits it."""
    if v is None:
        return None
    sharding = jax.typeof(v).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or sharding.spec[1] is None:
        return v
    spec = PartitionSpec(sharding.spec[0], None, *sharding.spec[2:])
    return jax.sharding.reshard(v, NamedSharding(sharding.mesh, spec))


def _look_back(segment_ids: jax.Array, width: int) -> jax.Array:
    """How many inputs before each token its filter may see, at most W − 1: (B, L), fp32.

    The tokens of the first segment may see all of the initial state.
    """
    length, unbroken = segment_ids.shape[1], True
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    same = jnp.pad(same, ((0, 0), (width, 0)), constant_values=True)
    count = jnp.zeros(segment_ids.shape, jnp.float32)
    for j in range(width - 1):
        unbroken = unbroken & same[:, width - 1 - j : width - 1 - j + length]
        count = count + unbroken
    return count


def _final_state(x: jax.Array, width: int, state: Any, look_back: Any) -> jax.Array:
    """The last W − 1 inputs; zeros for those before the last token's segment."""
    length, kept = x.shape[1], width - 1
    if length < kept:
        if state is None:
            x = jnp.pad(x, ((0, 0), (kept, 0), (0, 0)))
        else:
            x = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    final = x[:, x.shape[1] - kept :]
    if look_back is None or length == 0:
        return final
    ages = jnp.arange(kept)[::-1]
    seen = look_back[:, -1:] >= ages
    return jnp.where(seen[..., None], final, jnp.zeros((), x.dtype))


MAX_WIDTH = 8
"""The backward holds about 4 · W registers per channel of a lane."""


def _unsupported(x: Any, weight: Any, bias: Any, state: Any) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    for name, array in arrays.items():
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {array.dtype}, and the kernels take bfloat16, float16 and float32"
    if weight.shape[1] > MAX_WIDTH:
        return f"the filter has {weight.shape[1]} taps, and the kernels take up to {MAX_WIDTH}"
    return device_unsupported()


def _slower(dim: int) -> str | None:
    """Why XLA is faster than the kernels for `dim` channels."""
    if dim < LANES:
        return f"{dim} channels are padded to {LANES} for the kernel"
    return None


@dataclasses.dataclass(frozen=True)
class _Options:
    activation: Activation | None
    mode: Mode


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _causal_conv1d(x, weight, bias, state, look_back, options: _Options) -> jax.Array:
    return _causal_conv1d_fwd(x, weight, bias, state, look_back, options)[0]


def _causal_conv1d_fwd(x, weight, bias, state, look_back, options):
    (out,) = _forward_pass(options)(x, weight, bias, state, look_back)
    return match_sharding(out, x), (x, weight, bias, state, look_back)


def _causal_conv1d_bwd(options, res, dout):
    *primals, look_back = res
    grads = _backward_pass(options)(*res, dout)
    grads = [match_primal(g, p) for g, p in zip(grads, primals, strict=True)]
    return *grads, None if look_back is None else jnp.zeros_like(look_back)


_causal_conv1d.defvjp(_causal_conv1d_fwd, _causal_conv1d_bwd)
_causal_conv1d_jit = jax.jit(_causal_conv1d, static_argnums=5)


@functools.cache
def _forward_pass(options: _Options) -> KernelPass:
    return KernelPass(
        name="causal_conv1d_fwd",
        mode=options.mode,
        kernel=functools.partial(_launch_fwd, options),
        reference=functools.partial(_reference_fwd, options),
        ins=("b l d", "d w", "d", "b k d", "b l"),
        outs=("b l d",),
        whole="l w k",
    )


@functools.cache
def _backward_pass(options: _Options) -> KernelPass:
    return KernelPass(
        name="causal_conv1d_bwd",
        mode=options.mode,
        kernel=functools.partial(_launch_bwd, options),
        reference=functools.partial(_reference_bwd, options),
        ins=("b l d", "d w", "d", "b k d", "b l", "b l d"),
        outs=("b l d", "d w", "d", "b k d"),
        whole="l w k",
    )


# Tiles

(_BLOCK,) = grid_axes("block")
_LOG2E = 1.4426950408889634

# A lane reads from memory what others wrote before the kernel began and writes what none reads, so
# no barriers are needed.
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tokens and channels are spread over the GPU.

    A block is one warpgroup: a lane owns a few channels next to each other and marches along a tile
    of the sequence, with the last W − 1 inputs in registers.

    Attributes:
      channels: most channels of a block.
      rows: tokens of a tile; a tile reads W − 1 more before its first, and the backward W − 1 more
        after its last.
      unroll: tokens that are loaded together, ahead of the arithmetic.
      tiles_per_block: tiles whose part of dweight a block of the backward adds up.
    """

    channels: int
    rows: int
    unroll: int
    tiles_per_block: int = 1

    def __post_init__(self) -> None:
        assert self.channels >= LANES, self
        assert self.rows >= MAX_WIDTH, self
        assert self.unroll >= 1, self
        assert self.tiles_per_block >= 1, self


def forward_tiles(batch: int, length: int, dim: int, width: int) -> Tiles:
    """At least eight blocks on a multiprocessor, of up to 64 tokens each."""
    channels, unroll = _channels(width), min(8, length)
    rows = batch * length * -(-dim // channels) // (8 * num_sms())
    rows = max(16, min(64, -(-rows // unroll) * unroll))
    return Tiles(channels, rows, unroll)


def backward_tiles(batch: int, length: int, dim: int, width: int) -> Tiles:
    """About four blocks on a multiprocessor, of 32 to 512 tokens each.

    A block leaves 4 · (W + 1) bytes per channel of partial sums, which are read once more. Several
    short sequences share one where there are blocks enough.
    """
    channels, sms = _channels(width), num_sms()
    columns = -(-dim // channels)
    rows = batch * length * columns // (4 * sms)
    tiles = max(1, length // max(32, min(512, rows)))
    rows = -(-length // tiles)
    spare = batch * tiles * columns // (8 * sms)
    per_block = max(1, min(64 // rows, spare))
    return Tiles(channels, max(MAX_WIDTH, rows), min(4, length), per_block)


def _channels(width: int) -> int:
    """Most channels of a block: four of a lane, or two where the filter needs the registers."""
    return 512 if width <= 4 else 256


def _widened(v: jax.Array) -> jax.Array:
    """`v` with zeros after its last axis' end, to LANES channels at least."""
    missing = max(0, LANES - v.shape[-1])
    return jnp.pad(v, ((0, 0),) * (v.ndim - 1) + ((0, missing),)) if missing else v


@dataclasses.dataclass(frozen=True)
class _Filter:
    """What the kernels know about a call while they are compiled."""

    activation: Activation | None
    width: int
    exact: bool  # fp32 tokens: no shortcut in the sigmoid
    tile: Tiles
    row: Any  # the Windows of the channels
    names: tuple[str, ...]  # of the references

    def place(self, index: Any, x_ref: Any) -> tuple[Any, Any, Any]:
        """Batch row, first token and number of tokens of tile `index`."""
        length = x_ref.shape[1]
        count = -(-length // self.tile.rows)
        first = lax.rem(index, count) * self.tile.rows
        return lax.div(index, count), first, jnp.minimum(self.tile.rows, length - first)

    def taps(self, refs: Any, window: Any) -> tuple[list[Any], Any]:
        """The weights, one (window,) array per tap, and the bias, in fp32."""
        weights = [_wide(self.row.load(refs.weight.at[w], window)) for w in range(self.width)]
        bias = self.row.full(0.0)
        return weights, _wide(self.row.load(refs.bias, window)) if "bias" in self.names else bias

    def history(self, refs: Any, batch: Any, first: Any, window: Any) -> tuple[Any, ...]:
        """The W − 1 inputs before token `first`, oldest first."""
        inputs = []
        for k in range(self.width - 1):
            t = jnp.maximum(first + k - (self.width - 1), 0)
            x = _wide(self.row.load(refs.x.at[batch, t], window))
            start = self.row.full(0.0)
            if "state" in self.names:
                start = _wide(self.row.load(refs.state.at[batch, k], window))
            inputs.append(self.where(first == 0, start, x))
        return tuple(inputs)

    def sees(self, look_back: Any, value: Any, w: int) -> Any:
        """`value`, or zeros where tap `w` looks into another segment."""
        if look_back is None or w == self.width - 1:
            return value
        return self.where(look_back >= self.width - 1 - w, value, self.row.full(0.0))

    def where(self, condition: Any, value: Any, otherwise: Any) -> Any:
        """A choice by a scalar, the same for all lanes; Mosaic has it for arrays only."""
        chosen = self.row.full(jnp.where(condition, 1.0, 0.0))
        return jnp.where(chosen > 0, value, otherwise)

    def sum(self, taps: list[Any], weights: list[Any], bias: Any) -> Any:
        for weight, tap in zip(weights, taps, strict=True):
            bias = bias + weight * tap
        return bias

    def march(self, groups: Any, inner: tuple[Any, Any], fetch: Callable, run: Callable, carry):
        """``carry = run(g, fetched, carry, edge)`` for the groups of tokens, g below `groups`.

        The next group's tokens are fetched before a group's arithmetic. Those of `inner` have no
        token beyond the tile: they run with ``edge=False``.
        """

        def loop(start, stop, edge, carry):
            def body(g, carry):
                carry, fetched = carry
                following = fetch(g + 1)
                return run(g, fetched, carry, edge), following

            return lax.fori_loop(start, stop, body, carry)

        start, stop = inner
        carry = carry, fetch(0)
        if not (isinstance(start, int) and start == 0):
            carry = loop(0, start, True, carry)
        carry = loop(start, stop, False, carry)
        return loop(stop, groups, True, carry)[0]


def _wide(v: jax.Array) -> jax.Array:
    # Under shard_map what a load returns is typed as varying over the mesh and what is computed is
    # not; a loop's carry needs one type.
    return 1.0 * v if v.dtype == jnp.float32 else v.astype(jnp.float32)


def _prepare(options: _Options, tile: Tiles, **arrays: Any) -> tuple[_Filter, tuple[Any, ...]]:
    """The call as the kernels see it, and the arrays that are there."""
    x, weight = arrays["x"], arrays["weight"]
    arrays["weight"] = weight.T
    present = {
        name: a if name == "look_back" else _widened(a)
        for name, a in arrays.items()
        if a is not None
    }
    dim = present["x"].shape[-1]
    itemsize = min(a.dtype.itemsize for name, a in present.items() if name != "look_back")
    call = _Filter(
        activation=options.activation,
        width=weight.shape[1],
        exact=x.dtype == jnp.float32,
        tile=tile,
        row=windows(dim, tile.channels, itemsize),
        names=tuple(present),
    )
    return call, tuple(present.values())


def _refs(call: _Filter, outs: str, refs: tuple[Any, ...]) -> Any:
    return types.SimpleNamespace(**dict(zip([*call.names, *outs.split()], refs, strict=True)))


def _sigmoid(v: jax.Array, exact: bool) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division."""
    if not exact:
        return 1 / (1 + jnp.exp2(-_LOG2E * v))
    # exp(−a) by exp2 in two parts, the first product exact: rounding a · log2(e) as a whole would
    # cost up to 1e-6 of the result.
    a = jnp.minimum(jnp.abs(v), 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (_LOG2E - log2e_head) + (a - head) * _LOG2E
    e = jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)
    inverse = 1 / (1 + e)
    inverse = inverse * (2 - (1 + e) * inverse)  # a Newton step: the division is 2 units off
    return jnp.where(v < 0, e * inverse, inverse)


# Forward


def _launch_fwd(options: _Options, x, weight, bias, state, look_back, tile: Tiles | None = None):
    if x.size == 0:
        return _reference_fwd(options, x, weight, bias, state, look_back)
    dim, width = weight.shape
    tile = tile or forward_tiles(x.shape[0], x.shape[1], dim, width)
    state = None if width == 1 else state
    call, arrays = _prepare(
        options, tile, x=x, weight=weight, bias=bias, state=state, look_back=look_back
    )
    batch, length, padded = arrays[0].shape
    out = plgpu.kernel(
        functools.partial(_fwd_kernel, call),
        out_type=jax.ShapeDtypeStruct((batch, length, padded), x.dtype),
        grid=(call.row.count * batch * -(-length // tile.rows),),
        grid_names=(_BLOCK,),
        kernel_name="causal_conv1d_fwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays)
    return (out[..., :dim],)


def _fwd_kernel(call: _Filter, *refs):
    refs = _refs(call, "out", refs)  # x, out (B, L, D); weight (W, D); state (B, W − 1, D)
    row, unroll = call.row, call.tile.unroll
    block = lax.axis_index(_BLOCK)
    window = lax.rem(block, row.count)
    batch, first, rows = call.place(lax.div(block, row.count), refs.x)
    weights, bias = call.taps(refs, window)

    def fetch(g):
        """The inputs of group `g`, and how far back their filters see."""
        times = [first + jnp.minimum(g * unroll + u, rows - 1) for u in range(unroll)]
        xs = tuple(row.load(refs.x.at[batch, t], window) for t in times)
        if "look_back" not in call.names:
            return xs, ()
        return xs, tuple(refs.look_back[batch, t] for t in times)

    def run(g, fetched, inputs, edge):
        xs, look_backs = fetched
        for u in range(unroll):
            look_back = look_backs[u] if look_backs else None
            taps = [*inputs, _wide(xs[u])]
            inputs = tuple(taps[1:])
            seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
            s = call.sum(seen, weights, bias)
            if call.activation == "silu":
                s = s * _sigmoid(s, call.exact)
            r = g * unroll + u

            def store(r=r, s=s):
                row.store(refs.out.at[batch, first + r], window, s)

            pl.when(r < rows)(store) if edge else store()
        return inputs

    inner = lax.div(rows, unroll)
    groups = lax.div(rows + unroll - 1, unroll)
    call.march(groups, (0, inner), fetch, run, call.history(refs, batch, first, window))


# Backward


def _launch_bwd(
    options: _Options, x, weight, bias, state, look_back, dout, tile: Tiles | None = None
):
    if x.size == 0:
        return _reference_bwd(options, x, weight, bias, state, look_back, dout)
    dim, width = weight.shape
    tile = tile or backward_tiles(x.shape[0], x.shape[1], dim, width)
    kept = None if width == 1 else state
    call, arrays = _prepare(
        options, tile, x=x, weight=weight, bias=bias, state=kept, look_back=look_back, dout=dout
    )
    batch, length, padded = arrays[0].shape
    tiles = batch * -(-length // tile.rows)
    blocks = -(-tiles // tile.tiles_per_block)
    f32 = jnp.float32
    dx, dweight, dbias, *dstate = plgpu.kernel(
        functools.partial(_bwd_kernel, call),
        out_type=(
            jax.ShapeDtypeStruct((batch, length, padded), x.dtype),
            jax.ShapeDtypeStruct((blocks, width, padded), f32),
            jax.ShapeDtypeStruct((blocks, padded), f32),
            *([] if kept is None else [jax.ShapeDtypeStruct((batch, width - 1, padded), f32)]),
        ),
        grid=(call.row.count * blocks,),
        grid_names=(_BLOCK,),
        kernel_name="causal_conv1d_bwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays)
    return (
        dx[..., :dim],
        dweight.sum(0)[:, :dim].T.astype(weight.dtype),
        None if bias is None else dbias.sum(0)[:dim].astype(bias.dtype),
        dstate[0][..., :dim].astype(state.dtype) if dstate else _none_or_zeros(state),
    )


def _none_or_zeros(v: Any) -> Any:
    return None if v is None else jnp.zeros_like(v)


def _bwd_kernel(call: _Filter, *refs):
    outs = "dx dweight dbias" + " dstate" * ("state" in call.names)
    refs = _refs(call, outs, refs)  # as forward; dweight (blocks, W, D); dbias (blocks, D)
    row, unroll, before = call.row, call.tile.unroll, call.width - 1
    block = lax.axis_index(_BLOCK)
    window, part = lax.rem(block, row.count), lax.div(block, row.count)
    weights, bias = call.taps(refs, window)
    length = refs.x.shape[1]
    tiles = refs.x.shape[0] * -(-length // call.tile.rows)
    zero = row.full(0.0)

    def run_tile(index, sums):
        batch, first, rows = call.place(index, refs.x)
        last = jnp.minimum(rows - 1 + before, length - 1 - first)

        def fetch(g):
            times = [first + jnp.minimum(g * unroll + u, last) for u in range(unroll)]
            xs = tuple(row.load(refs.x.at[batch, t], window) for t in times)
            douts = tuple(row.load(refs.dout.at[batch, t], window) for t in times)
            if "look_back" not in call.names:
                return xs, douts, ()
            return xs, douts, tuple(refs.look_back[batch, t] for t in times)

        def run(g, fetched, carry, edge):
            """Token r adds its ds to the dx of the tokens r − (W − 1) … r; the first is complete.

            The W − 1 tokens after the tile are run through for the dx of its last ones alone.
            """
            xs, douts, look_backs = fetched
            inputs, dxs, (dweight, dbias) = carry
            for u in range(unroll):
                r = g * unroll + u
                look_back = look_backs[u] if look_backs else None
                taps = [*inputs, _wide(xs[u])]
                inputs = tuple(taps[1:])
                seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
                ds = _wide(douts[u])
                if call.activation == "silu":
                    s = call.sum(seen, weights, bias)
                    gate = _sigmoid(s, call.exact)
                    ds = ds * (gate * (1 + s * (1 - gate)))
                own = ds
                if edge:
                    ds = call.where(first + r < length, ds, zero)
                    own = call.where(r < rows, ds, zero)
                dweight = tuple(d + own * v for d, v in zip(dweight, seen, strict=True))
                dbias = dbias + own
                dxs = [
                    d + call.sees(look_back, ds, w) * weights[w] for w, d in enumerate((*dxs, zero))
                ]

                def store(r=r, dx=dxs[0]):
                    row.store(refs.dx.at[batch, first + r - before], window, dx)

                def store_before(r=r, dx=dxs[0]):
                    row.store(refs.dstate.at[batch, r], window, dx)

                if edge:
                    pl.when((r >= before) & (r - before < rows))(store)
                    if "state" in call.names:
                        pl.when((r < before) & (first == 0))(store_before)
                else:
                    store()
                dxs = tuple(dxs[1:])
            return inputs, dxs, (dweight, dbias)

        start = -(-before // unroll)
        groups = lax.div(rows + before + unroll - 1, unroll)
        stop = jnp.maximum(lax.div(rows, unroll), start)
        carry = call.history(refs, batch, first, window), (zero,) * before, sums
        carry = call.march(jnp.maximum(groups, start), (start, stop), fetch, run, carry)
        return carry[2]

    per_block = call.tile.tiles_per_block
    sums = (zero,) * call.width, zero
    if per_block == 1:
        dweight, dbias = run_tile(part, sums)
    else:
        start = part * per_block
        stop = jnp.minimum(start + per_block, tiles)
        dweight, dbias = lax.fori_loop(start, stop, run_tile, sums)
    for w, d in enumerate(dweight):
        row.store(refs.dweight.at[part, w], window, d)
    row.store(refs.dbias.at[part], window, dbias)


# Reference


def causal_conv1d_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """:func:`causal_conv1d` in plain JAX, with every step in fp32 and one rounding at the end."""
    look_back = None if segment_ids is None else _look_back(segment_ids, weight.shape[1])
    options = _Options(activation, "xla")
    return _reference_fwd(options, x, weight, bias, initial_state, look_back)[0]


def _reference_fwd(options, x, weight, bias, state, look_back):
    length, width = x.shape[1], weight.shape[1]
    wide = x.astype(_accumulator(x, weight))
    if state is None:
        padded = jnp.pad(wide, ((0, 0), (width - 1, 0), (0, 0)))  # (B, W − 1 + L, D)
    else:
        padded = jnp.concatenate([state.astype(wide.dtype), wide], axis=1)
    taps = [padded[:, w : w + length] for w in range(width)]
    if look_back is not None:
        seen = [look_back[..., None] >= width - 1 - w for w in range(width)]
        zero = jnp.zeros((), wide.dtype)
        taps = [jnp.where(s, tap, zero) for s, tap in zip(seen, taps, strict=True)]
    return (_filter(taps, weight, bias, options.activation).astype(x.dtype),)


def _reference_bwd(options, x, weight, bias, state, look_back, dout):
    def forward(x, weight, bias, state):
        return _reference_fwd(options, x, weight, bias, state, look_back)[0]

    return jax.vjp(forward, x, weight, bias, state)[1](dout)


def _filter(taps: list[jax.Array], weight: jax.Array, bias: Any, activation: Any) -> jax.Array:
    """f(bias + Σ_w weight[:, w] · taps[w]), in fp32, or float64 where an argument is."""
    acc = _accumulator(weight, *taps)
    total = jnp.zeros((), acc) if bias is None else bias.astype(acc)
    for weights, tap in zip(weight.astype(acc).T, taps, strict=True):
        total = total + weights * tap.astype(acc)
    return jax.nn.silu(total) if activation == "silu" else total


def _accumulator(*arrays: Any) -> Any:
    return jnp.result_type(jnp.float32, *arrays)
