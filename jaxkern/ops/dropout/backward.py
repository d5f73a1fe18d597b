"""Dropout's backward kernel, which draws the forward's mask again."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.elementwise.launch import Lanes, launch
from jaxkern.ops.curves import CURVES, kernel_functions
from jaxkern.ops.dropout.forward import drop, part_of
from jaxkern.ops.dropout.reference import Options, reference_backward


def launch_backward(
    options: Options, x: Any, dout: Any, *seeds: Any, sliced: bool = False
) -> tuple[Any, ...]:
    if dout.size == 0:
        return reference_backward(options, x, dout, *seeds)
    of = kernel_functions(exact=options.dtype == jnp.float32)
    ins = [dout] if x is None else [dout, x]
    dx = jax.ShapeDtypeStruct(dout.shape, options.dtype)
    part = part_of(options.shape, *ins, dx)

    def body(lanes: Lanes, dout: jax.Array, *x: jax.Array) -> tuple[jax.Array]:
        dout, scale = drop(lanes, part, dout)
        if options.curve:
            dout = CURVES[options.curve](x[0], of)[1](dout)
        return (dout * scale,)

    words = part.seeds(*seeds)
    return launch(f"{options.op}_bwd", body, ins, [dx], seeds=words, vec=part.vec, sliced=sliced)
