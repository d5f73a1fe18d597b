"""Arguments that scans share: step sizes, saved states, heads in groups, states of layers."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxkern.core.arguments import (
    as_array,
    check_array,
    check_floating,
    check_integer,
    check_number,
)
from jaxkern.core.mesh import gather
from jaxkern.ops.columns import Columns


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Makes step sizes from the numbers that a layer computes.

    Attributes:
      softplus: whether to take the softplus of those numbers.
      low, high: the least and the largest step size.
    """

    softplus: bool
    low: float
    high: float

    @classmethod
    def checked(cls, dt_softplus: bool, dt_limit: Any) -> "StepSizes":
        """Checks the options of a public function."""
        try:
            low, high = dt_limit
        except (TypeError, ValueError) as e:
            raise TypeError(f"dt_limit must be two numbers, (low, high); got {dt_limit!r}") from e
        low = check_number("dt_limit[0]", low, finite=False)
        high = check_number("dt_limit[1]", high, finite=False)
        if not low <= high:
            raise ValueError(
                f"dt_limit must be (low, high) with low <= high, got {dt_limit!r}; "
                "(-inf, inf) stands for no limit"
            )
        return cls(dt_softplus, low, high)

    @property
    def least(self) -> bool:
        """Whether a step size can be below the least one."""
        return self.low > (0 if self.softplus else -math.inf)

    @property
    def most(self) -> bool:
        """Whether a step size can be above the largest one."""
        return self.high < math.inf

    def __call__(self, dt: jax.Array) -> jax.Array:
        """The step sizes of `dt`, the bias added; one outside the limits has no gradient."""
        if self.softplus:
            dt = jax.nn.softplus(dt)
        # Not jnp.clip, which halves the gradient of a value at a limit.
        if self.least:
            dt = jnp.where(dt < self.low, self.low, dt)
        if self.most:
            dt = jnp.where(dt > self.high, self.high, dt)
        return dt


def check_checkpoint_every(every: Any, chunk: int, *, one: bool = False) -> int | None:
    """`every` as an int, a multiple of `chunk` or, if `one` is allowed, 1; or ``None``."""
    if every is None:
        return None
    tokens = check_integer("checkpoint_every", every, optional=True)
    if (tokens <= 0 or tokens % chunk) and not (one and tokens == 1):
        either = f"1, a multiple of {chunk}" if one else f"a multiple of {chunk}"
        raise ValueError(
            f"checkpoint_every must be {either} or None, got {tokens}; "
            f"try {max(chunk, tokens // chunk * chunk)}"
        )
    return tokens


@dataclasses.dataclass(frozen=True)
class SequenceBlocks:
    """A sequence cut into blocks, from one saved state to the next, of chunks of tokens.

    Attributes:
      length: of the sequence.
      chunk: tokens of a chunk.
      chunks: of a block.
    """

    length: Any
    chunk: int
    chunks: int

    @classmethod
    def of(cls, length: Any, every: int, chunk: int) -> "SequenceBlocks":
        """Blocks of `every` tokens, but at most `length`, in chunks of at most `chunk`."""
        if isinstance(length, int):  # else it is symbolic
            every = min(every, max(length, 1))
        chunk = min(chunk, every)
        return cls(length, chunk, -(-every // chunk))

    @property
    def count(self) -> Any:
        """The number of blocks."""
        return -(-self.length // (self.chunk * self.chunks))

    @property
    def total(self) -> Any:
        """The tokens of all chunks, of which some may be padding."""
        return self.count * self.chunks * self.chunk

    def cut(self, v: jax.Array) -> jax.Array:
        """(B, L, …) as (blocks, chunks, B, tokens, …), with zeros after the end."""
        v = jnp.pad(v, ((0, 0), (0, self.total - v.shape[1]), *[(0, 0)] * (v.ndim - 2)))
        v = v.reshape(v.shape[0], self.count, self.chunks, self.chunk, *v.shape[2:])
        return jnp.moveaxis(v, 0, 2)

    def join(self, v: jax.Array) -> jax.Array:
        """(blocks, chunks, B, tokens, …) as (B, L, …)."""
        v = jnp.moveaxis(v, 2, 0)  # (B, blocks, chunks, tokens, …)
        return v.reshape(v.shape[0], self.total, *v.shape[4:])[:, : self.length]


def split_groups(v: Any, axis: int, groups: int) -> Any:
    """`v`, or ``None``, with heads or channels at `axis` in groups, which have an axis in front."""
    if v is None:
        return None
    shape = *v.shape[:axis], groups, v.shape[axis] // groups, *v.shape[axis + 1 :]
    if isinstance(v, Columns):
        return v.reshape(shape)
    if groups == 1:  # a new axis leaves heads split as they are on a mesh
        return jnp.expand_dims(v, axis)
    return gather(v, axis, unless_parts_of=groups).reshape(shape)


def by_group(args: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """A Mamba scan's arguments with channels or heads, at `axis` of x, in the groups of B and C."""
    x, dt, A, B, C, D, z, dt_bias, state = args
    if B.ndim == axis + 1:
        B, C = jnp.expand_dims(B, -2), jnp.expand_dims(C, -2)
    groups, of_state = B.shape[-2], axis - x.ndim - 1
    x, dt, z = (split_groups(v, axis, groups) for v in (x, dt, z))
    A, D, dt_bias = (split_groups(v, 0, groups) for v in (A, D, dt_bias))
    state = split_groups(state, 0 if state is None else state.ndim + of_state, groups)
    return x, dt, A, B, C, D, z, dt_bias, state


def join_groups(v: Any, axis: int) -> Any:
    """Undoes :func:`split_groups` along `axis`, the axis of the groups."""
    if v is None or v.shape[axis] == 1:
        return None if v is None else jnp.squeeze(v, axis)
    return v.reshape(*v.shape[:axis], v.shape[axis] * v.shape[axis + 1], *v.shape[axis + 2 :])


# States of several layers in one array: a step of a scan or a convolution updates one layer's


def check_layer(layer: Any, state: Any, shape: tuple[int, ...], meaning: str) -> Any:
    """Returns `layer` as (1,), int32, and the state with an axis of layers.

    Args:
      layer: a whole number or an integer scalar; ``None`` where `state` has no axis of layers.
      state: the state.
      shape: shape of a layer's state.
      meaning: that shape in words.

    Raises:
      TypeError: `layer` is no integer, or `state` no floating array.
      ValueError: a shape does not fit, or `layer` is out of range.
    """
    if layer is None:
        return None, check_array("state", state, shape, meaning)[None]
    number, state = as_array("layer", layer), check_floating("state", state)
    if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"layer must be a whole number or an integer scalar, got {layer!r}")
    if state.shape[1:] != shape or not state.shape[0]:
        raise ValueError(
            f"with layer, state must have shape (layers, {', '.join(map(str, shape))}) = (layers, "
            f"{meaning[1:]}; got {state.shape}"
        )
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < state.shape[0]:
        last = state.shape[0] - 1
        raise ValueError(f"layer must be from 0 to {last}, as state has them; got {layer}")
    return number.astype(jnp.int32).reshape(1), state


def take_layer(state: Any, layer: Any) -> Any:
    """State of `layer`, both from :func:`check_layer`; an index out of range is clipped."""
    if layer is None:
        return state[0]
    return lax.dynamic_index_in_dim(state, clipped(layer[0], state.shape[0]), keepdims=False)


def put_layer(state: Any, layer: Any, new: Any) -> Any:
    """`state` with `new` for `layer`."""
    if layer is None:
        return new[None]
    stacked = state.astype(new.dtype)
    return lax.dynamic_update_index_in_dim(stacked, new, clipped(layer[0], state.shape[0]), 0)


def clipped(layer: jax.Array, count: int) -> jax.Array:
    """`layer`, limited to the range of `count` layers."""
    return jnp.minimum(jnp.maximum(layer, 0), count - 1)
