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
dout, write dx). A tile of the sequence also reads the W − 1 tokens before it and, in the backward,
after it, mostly from the L2 cache. Two tiles leave W + 1 fp32 sums per channel for dweight and
dbias, about 1% of the bytes for tiles of 256, which a small second kernel adds up. With SiLU the
forward takes about 15 instructions per element at W = 4 and 19 at W = 8, the backward 28 and 41:
up to W = 4 both passes wait for memory.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import dataclasses
import functools
import math
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
from jaxkern.core.arithmetic import sigmoid
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding, named
from jaxkern.core.mosaic import (
    LANES,
    LaneOffsets,
    grid_axes,
    join_lanes,
    launch_kernel,
    load_lanes,
    num_sms,
    once_read,
    store_lanes,
    sum_lanes,
)

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
        plain = _reference_fwd(options, x, weight, bias, initial_state, look_back)
        (out,) = named("causal_conv1d", plain)
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
    return None


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

_BLOCK, _WARPGROUP = grid_axes("block", "warpgroup")

# Barriers (commit_smem) come before a slot is copied to again; no lane reads what another writes.


_UNROLL = 8
"""Tokens unrolled in a loop."""

_LANE = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tokens and channels are spread over the GPU.

    A lane of a warpgroup owns `vec` channels next to each other and marches along a tile of the
    sequence, with the last W − 1 inputs in registers. A ring of slots in shared memory is filled
    ahead of it.

    Attributes:
      rows: tokens of a slot, copied to shared memory at once.
      slots: of a warpgroup's ring.
      chunks: slots' fills that a tile is long.
      vec: channels per lane, for as many channels as one TMA copy takes at most, 256.
      warpgroups: of a block of the backward, which adds up their parts of dweight.
      turns: tiles that each of them takes, one after the other.
    """

    rows: int
    slots: int
    chunks: int
    vec: int = 2
    warpgroups: int = 1
    turns: int = 1

    def __post_init__(self) -> None:
        assert self.rows >= 1, self
        assert self.rows * self.chunks >= 2 * MAX_WIDTH, self  # a tile looks back into one other
        assert self.slots >= 2, self
        assert self.vec in (1, 2), self
        assert self.warpgroups >= 1, self
        assert self.turns >= 1, self


def forward_tiles(batch: int, length: int, dim: int, width: int, itemsize: int) -> Tiles:
    """64 blocks for a multiprocessor, which holds 9 at a time, of at least 16 tokens each.

    Nothing is carried from block to block, so many short ones keep more copies on their way than
    four that stay: 92% of the copy bandwidth on an H200, where those reach 77%. They read W − 1
    tokens again, and so are of 4 · W tokens or more.
    """
    vec, columns = _columns(dim, 2)
    tiles = _tiles_per_row(64, batch * columns, length, shortest=max(2 * MAX_WIDTH, 4 * width))
    rows = 32 // itemsize
    return Tiles(rows=rows, slots=3, chunks=_chunks(length, tiles, rows), vec=vec)


def backward_tiles(batch: int, length: int, dim: int, width: int, itemsize: int) -> Tiles:
    """8 tiles of a channel per lane for a multiprocessor, which holds 4, of 32 to 256 tokens each.

    A block of two leaves 4 · (W + 1) bytes per channel of partial sums, which are read once more.
    Several short sequences take turns where there are tiles enough. A lane with one channel has
    more of its lines in flight, with two it has fewer instructions, which count where W > 4.
    """
    vec, columns = _columns(dim, 1 if width <= 4 else 2)
    per_sm = 8 // vec
    tiles = _tiles_per_row(per_sm, batch * columns, length, shortest=32)
    tiles = max(tiles, -(-length // 256))
    spare = batch * tiles * columns // (per_sm * num_sms())
    rows = 64 // (vec * itemsize)
    return Tiles(
        rows=rows,
        slots=4 - vec,
        chunks=_chunks(length, tiles, rows),
        vec=vec,
        warpgroups=min(2, batch * tiles),
        turns=max(1, min(128 * tiles // length, spare)),
    )


def _columns(dim: int, most: int) -> tuple[int, int]:
    """Channels per lane, up to `most`, and blocks side by side, for `dim` channels."""
    dim = max(dim, LANES)
    blocks = {vec: -(-dim // (LANES * vec)) for vec in range(1, most + 1) if LANES * vec <= dim}
    vec = min(blocks, key=lambda vec: (vec * blocks[vec], -vec))
    return vec, blocks[vec]


def _tiles_per_row(blocks: int, columns: int, length: int, *, shortest: int) -> int:
    """Tiles of a batch row, for `blocks` on each multiprocessor."""
    tiles = blocks * num_sms() // columns or length // 1024
    return max(1, min(tiles, length // shortest))


def _chunks(length: int, tiles: int, rows: int) -> int:
    return max(-(-length // (tiles * rows)), -(-2 * MAX_WIDTH // rows))


@dataclasses.dataclass(frozen=True)
class _Filter:
    """What the kernels know about a call while they are compiled.

    A tile is `chunks` · `rows` tokens, and the `after` tokens behind it are read as well, its halo.
    The last tile has none and ends with the sequence: its last `tail` tokens, where they fill no
    chunk, are the last of one that overlaps the chunk before.
    """

    activation: Activation | None
    width: int
    exact: bool  # fp32 tokens: no shortcut in the sigmoid
    interpret: bool
    length: int
    dim: int
    rows: int
    slots: int
    chunks: int
    vec: int
    warpgroups: int
    after: int
    names: tuple[str, ...]  # of the references

    def __post_init__(self) -> None:
        assert self.tiles == 1 or self.after <= self.rows, self  # a slot takes the halo

    @property
    def own(self) -> int:
        """Tokens of a tile, but for the last."""
        return self.chunks * self.rows

    @property
    def tiles(self) -> int:
        """So many that the last is longer than a halo."""
        return max(1, -(-(self.length - self.after) // self.own))

    @property
    def whole(self) -> int:
        """Whole chunks of the last tile."""
        return (self.length - (self.tiles - 1) * self.own) // self.rows

    @property
    def tail(self) -> int:
        return (self.length - (self.tiles - 1) * self.own) % self.rows

    @property
    def size(self) -> int:
        return LANES * self.vec

    @property
    def columns(self) -> int:
        return -(-self.dim // self.size)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)

    def block(self) -> tuple[Any, Any]:
        """This block's number along tiles and its channels, which may overlap the last block's."""
        block = lax.axis_index(_BLOCK)
        start = jnp.minimum(lax.rem(block, self.columns) * self.size, self.dim - self.size)
        return lax.div(block, self.columns), pl.ds(start, self.size)

    def warpgroup(self) -> Any:
        return lax.axis_index(_WARPGROUP) if self.warpgroups > 1 else jnp.int32(0)

    def place(self, index: Any) -> tuple[Any, Any, Any]:
        """Batch row and first token of tile `index`, and whether it is the last of the row."""
        tile = lax.rem(index, self.tiles)
        return lax.div(index, self.tiles), tile * self.own, tile == self.tiles - 1

    def load(self, ref: Any) -> jax.Array:
        """A (size,) row of shared or global memory in fp32."""
        return _wide(plgpu.load(ref, layout=self.layout, optimized=False))

    def full(self, value: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def taps(self, refs: Any, channels: Any) -> tuple[list[Any], Any]:
        """The weights, one (size,) array per tap, and the bias, in fp32."""
        count = self.vec * self.width
        of_lane = load_lanes(
            refs.weight.at[channels],
            LaneOffsets(((1, LANES, count),)),
            count,
            interpret=self.interpret,
        )
        weights = [
            join_lanes(of_lane[w :: self.width], interpret=self.interpret)
            for w in range(self.width)
        ]
        return weights, self.load(refs.bias.at[channels]) if "bias" in self.names else self.full(
            0.0
        )

    def history(self, refs: Any, batch: Any, first: Any, channels: Any) -> tuple[Any, ...]:
        """The W − 1 inputs before token `first`, oldest first."""
        inputs = []
        for k in range(self.width - 1):
            t = jnp.maximum(first + k - (self.width - 1), 0)
            x, start = self.load(refs.x.at[batch, t, channels]), self.full(0.0)
            if "state" in self.names:
                start = self.load(refs.state.at[batch, k, channels])
            inputs.append(self.where(first == 0, start, x))
        return tuple(inputs)

    def sees(self, look_back: Any, value: Any, w: int) -> Any:
        """`value`, or zeros where tap `w` looks into another segment."""
        if look_back is None or w == self.width - 1:
            return value
        return self.where(look_back >= self.width - 1 - w, value, self.full(0.0))

    def where(self, condition: Any, value: Any, otherwise: Any) -> Any:
        """A choice by a scalar, the same for all lanes; Mosaic has it for arrays only."""
        chosen = self.full(jnp.where(condition, 1.0, 0.0))
        return jnp.where(chosen > 0, value, otherwise)

    def sum(self, taps: list[Any], weights: list[Any], bias: Any) -> Any:
        for weight, tap in zip(weights, taps, strict=True):
            bias = bias + weight * tap
        return bias

    def look_backs(self, refs: Any, batch: Any, t: Any, count: int) -> list[Any]:
        """How far back the filters of `count` tokens see, from token `t` on."""
        if "look_back" not in self.names:
            return [None] * count
        return [refs.look_back[batch, t + u] for u in range(count)]

    def scratch(self, **arrays: Any) -> dict[str, Any]:
        """The slots of each array, and a barrier for each slot of all."""
        count = self.warpgroups * self.slots
        slots = {
            name: plgpu.SMEM((count, self.rows, self.size), a.dtype) for name, a in arrays.items()
        }
        arrived = plgpu.Barrier(num_arrivals=len(slots), num_barriers=count)
        return {**slots, "arrived": arrived}

    def march(
        self,
        refs: Any,
        smem: dict[str, Any],
        place: tuple[Any, Any, Any],
        channels: Any,
        begin: Callable[[], Any],
        run: Callable[..., Any],
    ) -> Any:
        """``carry = run(t, rows, in_halo, carry)`` along a tile, for a few tokens from `t` on.

        Args:
          refs: the arrays in global memory.
          smem: the slots of those that are read here, and their barriers.
          place: of the tile.
          channels: of the block.
          begin: the first carry, loaded while the first slots fill.
          run: its `rows` are the (size,) arrays of these tokens, by the names of `smem`; `in_halo`
            says whether the tokens are the next tile's.
        """
        batch, first, is_last = place
        arrived = smem["arrived"]
        slots = {name: slot for name, slot in smem.items() if name != "arrived"}
        whole = jnp.where(is_last, self.whole, self.chunks)
        total = whole + jnp.where(is_last, min(self.tail, 1), 0)
        halo = self.after if self.tiles > 1 else 0
        ring = self.warpgroup() * self.slots

        def slot_of(i):
            return ring + lax.rem(i, self.slots)

        def start(i):
            return jnp.minimum(first + i * self.rows, self.length - self.rows)

        def copy(i, start, count):
            slot = slot_of(i)
            for name, target in slots.items():
                source = getattr(refs, name).at[batch, pl.ds(start, count), channels]
                plgpu.copy_gmem_to_smem(source, target.at[slot, pl.ds(0, count)], arrived.at[slot])

        def fetch(i):
            @pl.when(i < total)
            def _():
                copy(i, start(i), self.rows)

            if halo:

                @pl.when((i == total) & ~is_last)
                def _():
                    copy(i, first + self.own, halo)

        def wait(i):
            plgpu.barrier_wait(arrived.at[slot_of(i)])

        def load(i, row, count):
            slot = slot_of(i)
            return {
                name: [self.load(ref.at[slot, row + u]) for u in range(count)]
                for name, ref in slots.items()
            }

        def chunk(valid, i, carry):
            if self.chunks + min(self.after, 1) >= self.slots:
                plgpu.commit_smem()  # all lanes are done with the slot before
                fetch(i + self.slots - 1)
            wait(i)
            unroll = math.gcd(_UNROLL, valid)

            def group(g, carry):
                row = self.rows - valid + g * unroll
                return run(start(i) + row, load(i, row, unroll), False, carry)

            return lax.fori_loop(0, valid // unroll, group, carry)

        for i in range(self.slots - 1):
            fetch(jnp.int32(i))
        carry = lax.fori_loop(0, whole, functools.partial(chunk, self.rows), begin())
        if self.tail:
            carry = lax.fori_loop(whole, total, functools.partial(chunk, self.tail), carry)
        if halo:

            def next_tile(i, carry):
                wait(i)
                return run(first + self.own, load(i, 0, halo), True, carry)

            carry = lax.fori_loop(total, jnp.where(is_last, total, total + 1), next_tile, carry)
        return carry


def _wide(v: jax.Array) -> jax.Array:
    # Under shard_map what a load returns is typed as varying over the mesh and what is computed is
    # not; a loop's carry needs one type.
    return 1.0 * v if v.dtype == jnp.float32 else v.astype(jnp.float32)


def _widened(name: str, v: jax.Array, dim: int) -> jax.Array:
    """`v` with zeros after its channels' end, `dim` in all."""
    if name == "look_back":
        return v
    axis = 0 if name == "weight" else v.ndim - 1
    missing = dim - v.shape[axis]
    return jnp.pad(v, [(0, missing * (i == axis)) for i in range(v.ndim)]) if missing else v


def _prepare(
    options: _Options, tile: Tiles, after: int, **arrays: Any
) -> tuple[_Filter, tuple[Any, ...]]:
    """The call as the kernels see it, and the arrays that are there."""
    (_, length, dim), width = arrays["x"].shape, arrays["weight"].shape[1]
    present = {name: a for name, a in arrays.items() if a is not None}
    itemsize = min(a.dtype.itemsize for name, a in present.items() if name != "look_back")
    align = 16 // itemsize  # of the rows that the TMA copies
    dim = -(-max(dim, LANES) // align) * align
    call = _Filter(
        activation=options.activation,
        width=width,
        exact=arrays["x"].dtype == jnp.float32,
        interpret=options.mode == "interpret",
        length=length,
        dim=dim,
        rows=min(tile.rows, length),
        slots=tile.slots,
        chunks=tile.chunks,
        vec=tile.vec if dim >= LANES * tile.vec else 1,
        warpgroups=tile.warpgroups,
        after=after,
        names=tuple(present),
    )
    return call, tuple(_widened(name, a, dim) for name, a in present.items())


def _refs(call: _Filter, outs: str, refs: tuple[Any, ...]) -> Any:
    return types.SimpleNamespace(**dict(zip([*call.names, *outs.split()], refs, strict=True)))


# Forward


def _launch_fwd(options: _Options, x, weight, bias, state, look_back, tile: Tiles | None = None):
    if x.size == 0:
        return _reference_fwd(options, x, weight, bias, state, look_back)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = tile or forward_tiles(batch, length, dim, width, x.dtype.itemsize)
    state = None if width == 1 else state
    call, arrays = _prepare(
        options, tile, 0, x=x, weight=weight, bias=bias, state=state, look_back=look_back
    )
    x = arrays[0]
    out = launch_kernel(
        functools.partial(_fwd_kernel, call),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={"smem": call.scratch(x=x)},
        grid=(call.columns * batch * call.tiles,),
        grid_names=(_BLOCK,),
        kernel_name="causal_conv1d_fwd",
        approx_math=True,
    )(*arrays)
    return (out[..., :dim],)


def _fwd_kernel(call: _Filter, *refs, smem):
    refs = _refs(call, "out", refs)  # x, out (B, L, D); weight (D, W); state (B, W − 1, D)
    index, channels = call.block()
    place = batch, first, _ = call.place(index)
    loaded = call.taps(refs, channels)

    def begin():
        return once_read((call.history(refs, batch, first, channels), loaded))

    def run(t, rows, in_halo, carry):
        del in_halo
        inputs, (weights, bias) = carry
        look_backs = call.look_backs(refs, batch, t, len(rows["x"]))
        for u, (x, look_back) in enumerate(zip(rows["x"], look_backs, strict=True)):
            taps = [*inputs, x]
            inputs = tuple(taps[1:])
            seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
            s = call.sum(seen, weights, bias)
            if call.activation == "silu":
                s = s * sigmoid(s, call.exact, call.interpret)
            refs.out[batch, t + u, channels] = s.astype(refs.out.dtype)
        return inputs, (weights, bias)

    call.march(refs, smem, place, channels, begin, run)


# Backward


def _launch_bwd(
    options: _Options, x, weight, bias, state, look_back, dout, tile: Tiles | None = None
):
    if x.size == 0:
        return _reference_bwd(options, x, weight, bias, state, look_back, dout)
    (batch, length, dim), width = x.shape, weight.shape[1]
    tile = tile or backward_tiles(batch, length, dim, width, x.dtype.itemsize)
    kept = None if width == 1 else state
    call, (x, *arrays) = _prepare(
        options,
        tile,
        width - 1,
        x=x,
        weight=weight,
        bias=bias,
        state=kept,
        look_back=look_back,
        dout=dout,
    )
    blocks = -(-batch * call.tiles // (tile.warpgroups * tile.turns))
    totals = width + (bias is not None)
    f32 = jnp.float32
    smem = call.scratch(x=x, dout=dout)
    threads: dict[str, Any] = {}
    if tile.warpgroups > 1:
        threads = {"num_threads": tile.warpgroups, "thread_name": _WARPGROUP}
        smem["sums"] = plgpu.SMEM((tile.warpgroups - 1, totals, call.size), f32)
        smem["summed"] = plgpu.Barrier(num_arrivals=tile.warpgroups - 1)
    dx, parts, *dstate = launch_kernel(
        functools.partial(_bwd_kernel, call, tile.turns),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((-(-blocks // _SHARES) * _SHARES, totals, call.dim), f32),
            *([] if kept is None else [jax.ShapeDtypeStruct((batch, width - 1, call.dim), f32)]),
        ),
        scratch_types={"smem": smem},
        grid=(call.columns * blocks,),
        grid_names=(_BLOCK,),
        **threads,
        kernel_name="causal_conv1d_bwd",
        approx_math=True,
    )(x, *arrays)
    dweight, *dbias = _sum_parts(call, parts, blocks, weight.dtype, bias)
    return (
        dx[..., :dim],
        dweight[:dim],
        dbias[0][:dim] if dbias else None,
        dstate[0][..., :dim].astype(state.dtype) if dstate else _none_or_zeros(state),
    )


def _none_or_zeros(v: Any) -> Any:
    return None if v is None else jnp.zeros_like(v)


def _bwd_kernel(call: _Filter, turns: int, *refs, smem):
    outs = "dx parts" + " dstate" * ("state" in call.names)
    refs = _refs(call, outs, refs)  # as forward; parts (blocks, W + 1, D) of dweight and dbias
    before = call.width - 1
    part, channels = call.block()
    warpgroup = call.warpgroup()
    zero = call.full(0.0)
    loaded = call.taps(refs, channels)
    rings = {name: smem[name] for name in ("x", "dout", "arrived")}

    def run_tile(index, sums):
        place = batch, first, is_last = call.place(index)

        def begin():
            taps = once_read((call.history(refs, batch, first, channels), loaded))
            return *taps, (zero,) * before, sums

        def run(t, rows, in_halo, carry):
            """Token t adds its ds to the dx of the tokens t − (W − 1) … t; the first is complete.

            Those of the tile before are not: they get theirs from that one's halo.
            """
            inputs, (weights, bias), dxs, (dweight, dbias) = carry
            count, early = len(rows["x"]), []
            look_backs = call.look_backs(refs, batch, t, count)
            tokens = zip(rows["x"], rows["dout"], look_backs, strict=True)
            for u, (x, dout, look_back) in enumerate(tokens):
                taps = [*inputs, x]
                inputs = tuple(taps[1:])
                seen = [call.sees(look_back, v, w) for w, v in enumerate(taps)]
                ds = dout
                if call.activation == "silu":
                    s = call.sum(seen, weights, bias)
                    gate = sigmoid(s, call.exact, call.interpret)
                    ds = ds * (gate + gate * (s - s * gate))
                if not in_halo:
                    dweight = tuple(d + ds * v for d, v in zip(dweight, seen, strict=True))
                    dbias = dbias + ds
                dxs = [
                    d + call.sees(look_back, ds, w) * weights[w] for w, d in enumerate((*dxs, zero))
                ]
                if in_halo or u >= before:
                    refs.dx[batch, t + u - before, channels] = dxs[0].astype(refs.dx.dtype)
                else:
                    early.append((t + u, dxs[0]))
                dxs = tuple(dxs[1:])
            groups = [early] if count >= before else [[token] for token in early]
            for group in filter(None, groups):
                last, _ = group[-1]  # a whole group is of the tile's first tokens, or none is

                @pl.when(last - before >= first)
                def _(group=group):
                    for at, dx in group:
                        refs.dx[batch, at - before, channels] = dx.astype(refs.dx.dtype)

                if "state" in call.names:

                    @pl.when(last < before)
                    def _(group=group):
                        for at, dx in group:
                            refs.dstate[batch, at, channels] = dx

            return inputs, (weights, bias), dxs, (dweight, dbias)

        if turns > 1:
            plgpu.commit_smem()  # all lanes are done with the tile before
        _, _, dxs, sums = call.march(refs, rings, place, channels, begin, run)

        @pl.when(is_last)
        def _():
            for k, dx in enumerate(dxs):
                t = call.length - before + k
                if t >= 0:
                    refs.dx[batch, t, channels] = dx.astype(refs.dx.dtype)
                elif "state" in call.names:
                    refs.dstate[batch, before + t, channels] = dx

        return sums

    tiles = refs.x.shape[0] * call.tiles
    per_block = call.warpgroups * turns
    start = part * per_block + warpgroup
    sums = (zero,) * call.width, zero
    if turns == 1 and tiles % per_block == 0:
        sums = run_tile(start, sums)
    else:
        stop = jnp.minimum(part * per_block + per_block, tiles)
        count = lax.div(stop - start + call.warpgroups - 1, call.warpgroups)
        turn = lambda i, sums: run_tile(start + i * call.warpgroups, sums)
        sums = lax.fori_loop(0, count, turn, sums)
    dweight, dbias = sums
    totals = [*dweight, *([dbias] if "bias" in call.names else [])]

    def write():
        others = () if call.warpgroups == 1 else range(call.warpgroups - 1)
        for i, total in enumerate(totals):
            for k in others:
                total = total + call.load(smem["sums"].at[k, i])
            refs.parts[part, i, channels] = total

    if call.warpgroups == 1:
        write()
        return

    @pl.when(warpgroup > 0)
    def _():
        for i, total in enumerate(totals):
            smem["sums"][warpgroup - 1, i] = total
        plgpu.barrier_arrive(smem["summed"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(smem["summed"])
        write()


_SHARES = 16
"""Groups of lanes that share the parts of dweight among them."""


def _sum_parts(call: _Filter, parts: jax.Array, count: int, dtype: Any, bias: Any) -> Any:
    """dweight (D, W) and, where there is a bias, dbias (D,): sums of the first `count` of `parts`.

    One small kernel. XLA takes two: a sum, and another for the order of dweight.
    """
    out_type = [jax.ShapeDtypeStruct((call.dim * call.width,), dtype)]
    if bias is not None:
        out_type.append(jax.ShapeDtypeStruct((call.dim,), bias.dtype))
    dweight, *dbias = launch_kernel(
        functools.partial(_sum_kernel, call, count, parts.shape[1]),
        out_type=tuple(out_type),
        scratch_types={"smem": plgpu.SMEM((parts.shape[1], LANES), jnp.float32)},
        grid=(-(-call.dim // (LANES // _SHARES)),),
        grid_names=(_BLOCK,),
        kernel_name="causal_conv1d_sum",
        approx_math=True,
    )(parts.reshape(-1))
    return dweight.reshape(call.dim, call.width), *dbias


def _sum_kernel(call: _Filter, count: int, totals: int, parts, *outs, smem):
    """A lane adds up every 16th part of one channel; then the sums of 16 lanes are added."""
    columns = LANES // _SHARES
    first = jnp.minimum(lax.axis_index(_BLOCK) * columns, call.dim - columns)
    of_part = totals * call.dim
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_LANE)
    zero = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), _LANE)

    def add(j, sums):
        """Adds the parts from `j` · 16 on."""
        offsets = LaneOffsets(((1, columns, 1), (columns, _SHARES, of_part)))
        span = (_SHARES - 1) * of_part + columns
        added = []
        for i, total in enumerate(sums):
            at = parts.at[pl.ds(j * _SHARES * of_part + i * call.dim + first, span)]
            (part,) = load_lanes(at, offsets, interpret=call.interpret)
            if isinstance(j, int) and (j + 1) * _SHARES > count:
                part = jnp.where(lane < (count - j * _SHARES) * columns, part, zero)
            added.append(total + part)
        return tuple(added)

    def group(g, sums):
        for u in range(_UNROLL):
            sums = add(g * _UNROLL + u, sums)
        return sums

    groups = count // (_SHARES * _UNROLL)
    sums = lax.fori_loop(0, groups, group, (zero,) * totals)
    for j in range(groups * _UNROLL, -(-count // _SHARES)):
        sums = add(j, sums)
    channel = LaneOffsets(((1, columns, 1),))
    within = [d for d in (1, 2, 4, 8, 16) if d >= columns]
    for i, total in enumerate(sums):
        (of_warp,) = sum_lanes([total], within, interpret=call.interpret)
        every = LaneOffsets(((1, LANES, 1),))
        store_lanes(smem.at[i], every, [of_warp], interpret=call.interpret)
    plgpu.commit_smem()
    for i in range(totals):
        of_warps = [
            load_lanes(
                smem.at[i], dataclasses.replace(channel, start=start), interpret=call.interpret
            )[0]
            for start in range(0, LANES, 32)
        ]
        total = functools.reduce(jnp.add, of_warps)
        if i < call.width:
            at = outs[0].at[pl.ds(first * call.width, columns * call.width)]
            to = LaneOffsets(((1, columns, call.width),), i)
        else:
            at, to = outs[1].at[pl.ds(first, columns)], channel
        store_lanes(at, to, [total], interpret=call.interpret)


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
