"""A sequence that is split between devices: what each does with its part.

A device hands its last W − 1 inputs to the next one, where they are the initial state; in the
backward it gets their gradient back, as that of a final state. That follows from a part's first
W − 1 tokens alone, so a device finds it before the rest. These are B · (W − 1) · D numbers whatever
L is, and so few are read twice: of L = 262,144 a device and W = 4, a hundred-thousandth.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.split import Sequence, from_before, is_first, is_last, only_if
from jaxkern.lowering.bound import wide
from jaxkern.ops.causal_conv1d.tiles import Options


def _inputs_before(axes: Any, x: jax.Array, width: int, state: Any) -> jax.Array:
    """The W − 1 inputs before this device's first, (B, W − 1, D)."""
    before = from_before(axes, x[:, x.shape[1] - (width - 1) :])
    if state is None:
        return before
    dtype = jnp.result_type(x, state)
    return jnp.where(is_first(axes), state.astype(dtype), before.astype(dtype))


def _forward(run: Any, axes: Any, options: Options, x, weight, bias, state, look_back) -> Any:
    before = _inputs_before(axes, x, weight.shape[1], state)
    out, final = run(options, x, weight, bias, before, look_back)
    return out, only_if(is_last(axes), final)


def _backward(
    run: Any, axes: Any, options: Options, x, weight, bias, state, look_back, dout, dfinal
) -> Any:
    before = _inputs_before(axes, x, weight.shape[1], state)
    # In fp32, for so its gradient is rounded once, with dx.
    before = before.astype(wide(before.dtype))
    first = lambda v: None if v is None else v[:, : weight.shape[1] - 1]
    *_, dbefore = run(options, first(x), weight, bias, before, first(look_back), first(dout), None)
    passed = from_before(axes, dbefore, reverse=True)
    if dfinal is not None:
        passed = jnp.where(is_last(axes), dfinal.astype(passed.dtype), passed)
    dx, dweight, dbias, dbefore = run(options, x, weight, bias, before, look_back, dout, passed)
    dstate = None if state is None else only_if(is_first(axes), dbefore).astype(state.dtype)
    return dx, dweight, dbias, dstate


def _unfit(options: Options, parts: int, x: Any, weight: Any, *_: Any) -> str | None:
    length, before = x.shape[1], weight.shape[1] - 1
    if length >= parts * before:
        return None
    return f"a part of its {length} tokens is shorter than the {before} that a filter looks back"


FORWARD, BACKWARD = Sequence(_forward, _unfit), Sequence(_backward, _unfit)
