"""One token of the convolution, for decoding: its inputs so far are updated where they lie.

A lane has neighbouring channels of one sequence: it loads their last W − 1 inputs and the new one,
and stores these a place earlier, and the sum. XLA takes four kernels for that: it copies the
layer's inputs before it overwrites them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.arguments import unfit
from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes
from jaxkern.mosaic.launch import LANES, grid_axes
from jaxkern.ops.causal_conv1d.reference import filtered
from jaxkern.ops.causal_conv1d.tiles import MAX_WIDTH, Activation
from jaxkern.ops.columns import Columns, StepPass
from jaxkern.ops.scan_options import put_layer, take_layer
from jaxkern.ops.scan_step import update_in_place, update_slices

SEQUENCE, PART = grid_axes("sequence", "part")

_MOST = 4
"""The most channels of a lane."""


@dataclasses.dataclass(frozen=True)
class ConvStepOptions:
    """Static arguments of a step; `places` are those of its columns, see :class:`StepPass`."""

    activation: Activation | None
    mode: Mode
    places: tuple[Any, ...] = ()


def unsupported(states: Any, x: Any, weight: Any, bias: Any) -> str | None:
    """Why the kernel cannot take a step of these arrays, as of :func:`launch`."""
    if reason := unfit(state=states, x=x, weight=weight, bias=bias):
        return reason
    channels, width = weight.shape
    if not 2 <= width <= MAX_WIDTH:
        return f"the filter has {width} taps, and the kernel takes 2 to {MAX_WIDTH}"
    if channels % LANES:
        return f"x has {channels} channels, and the kernel takes multiples of {LANES}"
    return None


def launch(
    options: ConvStepOptions, states: Any, layer: Any, x: Any, weight: Any, bias: Any
) -> tuple[Any, Any]:
    """The output and the inputs so far, by a kernel that updates them where they lie.

    Args:
      options: the activation.
      states: (layers, B, W - 1, D), the last inputs, oldest first.
      layer: number of the layer, (1,), int32; ``None`` where there is one.
      x: (B, D), or columns.
      weight: (D, W).
      bias: (D,) or ``None``.
    """
    return _launch(update_in_place, options, states, layer, x, weight, bias)


def launch_of_slices(options: ConvStepOptions, *arrays: Any) -> tuple[Any, Any]:
    """Does as :func:`launch` under ``vmap``."""
    return _launch(update_slices, options, *arrays)


def _launch(update: Any, options: ConvStepOptions, states, layer, x, weight, bias) -> Any:
    if x.size == 0 or unsupported(states, x, weight, bias):  # a device's part
        return reference(options, states, layer, Columns.of(x).copied(), weight, bias)
    (batch, channels), width, x = x.shape, weight.shape[1], Columns.of(x)
    aligned = math.gcd(x.row.shape[1], x.first)
    each = next(n for n in (_MOST, 2, 1) if channels % (n * LANES) == 0)
    size = each * LANES

    def run(refs: Any) -> None:
        sequence, first = lax.axis_index(SEQUENCE), lax.axis_index(PART) * size
        own = pl.ds(first, size)
        lanes = LaneOffsets(((1, LANES, each),))
        before, after = (ref.at[refs.layer, sequence] for ref in (refs.before, refs.after))
        taps = [load_lanes(before.at[w, own], lanes, each) for w in range(width - 1)]
        entering = refs.x.at[sequence, pl.ds(x.first + first, size)]
        taps.append(load_lanes(entering, lanes, each, aligned=aligned))
        of_channels = LaneOffsets(((1, LANES, each * width),))
        filters = load_lanes(refs.weight.at[own], of_channels, each * width)
        start: list[Any] = (
            [0.0] * each if refs.bias is None else load_lanes(refs.bias.at[own], lanes, each)
        )

        def filtered_channel(c: int) -> Any:
            products = (filters[c * width + w] * taps[w][c] for w in range(width))
            total = functools.reduce(jnp.add, products, start[c])
            return total * sigmoid(total, exact=True) if options.activation else total

        for w in range(width - 1):
            store_lanes(after.at[w, own], lanes, taps[w + 1])
        store_lanes(refs.out.at[sequence, own], lanes, [*map(filtered_channel, range(each))])

    arrays = {"x": x.row, "weight": weight, "bias": bias}
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = {"grid": (batch, channels // size), "grid_names": (SEQUENCE, PART)}
    return update(run, out_type, arrays, states, layer, **grid, kernel_name="causal_conv1d_step")


def reference(options: ConvStepOptions, states, layer, x, weight, bias) -> tuple[Any, Any]:
    """The step in plain JAX; arguments and results as of :func:`launch`."""
    own = take_layer(states, layer)
    taps = [*jnp.unstack(own, axis=1), x]
    out = filtered(taps, weight, bias, options.activation).astype(x.dtype)
    following = jnp.concatenate([own, x[:, None].astype(own.dtype)], axis=1)[:, 1:]
    return out, put_layer(states, layer, following)


STEP = StepPass(
    "causal_conv1d_step",
    kernel=launch,
    kernel_of_slices=launch_of_slices,
    reference=reference,
    ins=("s b w d", "i", "b d", "d v", "d"),
    outs=("b d", "s b w d"),
    whole="s i w v",
    split=("d", "d"),
)
