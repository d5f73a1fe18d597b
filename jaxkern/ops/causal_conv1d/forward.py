"""The forward kernel and its launch."""

from typing import Any

import jax

from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.instructions import once_read
from jaxkern.mosaic.named import launch_named
from jaxkern.ops.causal_conv1d.blocks import BLOCK, Filter, prepare
from jaxkern.ops.causal_conv1d.reference import last_inputs, reference_fwd
from jaxkern.ops.causal_conv1d.tiles import Options, forward_tiles


def launch_fwd(options: Options, x, weight, bias, state, look_back) -> tuple[jax.Array, Any]:
    """out, (B, L, D), and the last inputs, (B, W − 1, D)."""
    if x.size == 0:
        return reference_fwd(options, x, weight, bias, state, look_back)
    (batch, length, dim), width = x.shape, weight.shape[1]
    final = last_inputs(options, x, width, state, look_back)
    tile = forward_tiles(batch, length, dim, width, x.dtype.itemsize)
    state = None if width == 1 else state
    arrays = {"x": x, "weight": weight, "bias": bias, "state": state, "look_back": look_back}
    call, ins = prepare(options, tile, 0, **arrays)
    got = launch_named(
        lambda refs, smem: _fwd_kernel(call, refs, smem),
        ins,
        {"out": jax.ShapeDtypeStruct((batch, length, call.dim), x.dtype)},
        call.scratch(x=x),
        grid=(call.columns * batch * call.tiles,),
        grid_names=(BLOCK,),
        kernel_name="causal_conv1d_fwd",
        approx_math=True,
    )
    return got["out"][..., :dim], final


def _fwd_kernel(call: Filter, refs: Any, smem: Any) -> None:
    index, channels = call.block()
    tile = batch, first, _ = call.tile(index)
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
                s = s * sigmoid(s, call.exact)
            refs.out[batch, t + u, channels] = s.astype(refs.out.dtype)
        return inputs, (weights, bias)

    call.stream(refs, smem, ("x",), tile, channels, begin, run)
