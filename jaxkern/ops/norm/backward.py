"""The backward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.arithmetic import sigmoid
from jaxkern.core.mosaic import once_read
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.forward import (
    compiler_params,
    joined,
    narrowest,
    scale_and_bias,
    split,
    wide,
)
from jaxkern.ops.norm.pointwise import (
    Options,
    gated_input,
    gated_input_backward,
    output_backward,
    times,
)
from jaxkern.ops.norm.reference import reference_bwd
from jaxkern.ops.norm.rows import BLOCK, Strip

_STREAMS = ("h", "dout", "gate", "dh")
_NAMES = (
    *("h", "weight", "bias", "gate", "mean", "rstd", "dout", "dh"),
    *("dx", "dresidual", "dgate", "dweight", "dbias"),
)


def launch_bwd(
    options: Options,
    h: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    mean: Any,
    rstd: Any,
    dout: Any,
    dh: Any,
):
    if h.size == 0:
        return reference_bwd(options, h, weight, bias, gate, mean, rstd, dout, dh)
    inputs = {"h": h, "weight": weight, "bias": bias, "gate": gate, "mean": mean, "rstd": rstd}
    inputs |= {"dout": dout, "dh": dh}
    tile = tiles.backward(
        h.size // h.shape[-1],
        options.group_size,
        h.shape[-1] // options.group_size,
        narrowest({k: v for k, v in inputs.items() if k not in ("mean", "rstd")}),
        sum(inputs[k].dtype.itemsize for k in _STREAMS if inputs[k] is not None),
        (weight is not None) + (bias is not None),
        gate is None and options.activation is None,
        options.mode == "interpret",
    )
    return launch_bwd_tile(options, tile, inputs)


def launch_bwd_tile(options: Options, tile: tiles.Backward, inputs: dict[str, Any]):
    weight, bias, gate = inputs["weight"], inputs["bias"], inputs["gate"]
    shape, rows = inputs["h"].shape, tile.rows
    groups = shape[-1] // options.group_size
    inputs = {k: v for k, v in inputs.items() if v is not None}
    streams = [k for k in _STREAMS if k in inputs]
    for k, v in inputs.items():
        if k in ("mean", "rstd"):
            inputs[k] = v.reshape(-1, groups)
        else:
            inputs[k] = split(options, rows, v, k in ("weight", "bias"))
    m, groups, width = inputs["h"].shape
    full = functools.partial(jax.ShapeDtypeStruct, (m, groups, width))
    outs = {"dx": full(jnp.dtype(options.x_dtype))}
    if options.separate_dresidual:
        outs["dresidual"] = full(jnp.dtype(options.residual_dtype))
    if gate is not None:
        outs["dgate"] = full(gate.dtype)
    for k in ("weight", "bias"):
        if k in inputs:
            outs[f"d{k}"] = jax.ShapeDtypeStruct((tile.parts, groups, width), jnp.float32)
    scratch = rows.scratch(2 if options.centered else 1, options.mode == "interpret")
    if tile.stages:
        boxes = width // tiles.BOX
        warpgroups = rows.warpgroups if isinstance(rows, Strip) else 1
        count = warpgroups * tile.stages
        for k in streams:
            scratch[k] = plgpu.SMEM((count, *rows.buffer(boxes)), inputs[k].dtype)
            inputs[k] = inputs[k].reshape(m, groups, boxes, tiles.BOX)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(streams), num_barriers=count)
    names = [*inputs, *outs]

    def body(*refs: Any, **space: Any) -> None:
        ref = types.SimpleNamespace(**dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True)))
        smem = types.SimpleNamespace(**space)
        place = rows.place(smem, options.mode == "interpret")
        _bwd_kernel(options, tile, place, streams, m, groups, ref, smem)

    results = plgpu.kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=scratch,
        grid=(tile.parts * groups,),
        grid_names=(BLOCK,),
        kernel_name=f"{options.op}_bwd",
        compiler_params=compiler_params(options, gate is not None),
        **rows.launch,
    )(*inputs.values())
    results = dict(zip(outs, results, strict=True))

    def summed(name: str, param: Any) -> Any:
        if param is None:
            return None
        total = jnp.sum(results[name], axis=0)  # (G, N / G)
        return joined(options, total, param.shape).astype(param.dtype)

    def whole(name: str) -> Any:
        return joined(options, results[name], shape) if name in results else None

    return (
        whole("dx"),
        whole("dresidual"),
        summed("dweight", weight),
        summed("dbias", bias),
        whole("dgate"),
    )


def _bwd_kernel(
    options: Options,
    tile: tiles.Backward,
    place: Any,
    streams: list[str],
    m: int,
    groups: int,
    ref: Any,
    smem: Any,
) -> None:
    block = lax.axis_index(BLOCK)
    part, group = lax.div(block, groups), lax.rem(block, groups)
    count = tile.rows.rows_of(m)
    steps = lax.div(count - part + tile.parts - 1, tile.parts)
    each, pieces, stages = place.each, tile.rows.pieces, tile.stages
    first_slot = getattr(place, "warpgroup", 0) * stages
    sigma = functools.partial(
        sigmoid, exact=options.x_dtype == "float32", interpret=place.interpret
    )

    def slot_of(k: Any, j: int) -> Any:
        return first_slot + lax.rem(k * pieces + j, stages)

    def fetch(k: Any, j: int) -> None:
        """Piece `j` of the block's row `k` on its way to shared memory."""

        @pl.when(k < steps)
        def _():
            row, slot = place.row(part + k * tile.parts, m), slot_of(k, j)
            for name in streams:
                source = place.source(getattr(ref, name), row, group, j)
                target = getattr(smem, name).at[slot]
                plgpu.copy_gmem_to_smem(source, target, smem.arrived.at[slot])

    def read(name: str, k: Any, row: Any, j: int) -> Any:
        if name not in streams:
            return None
        if stages:
            return wide(place.load_shared(getattr(smem, name).at[slot_of(k, j)]))
        return wide(place.load(getattr(ref, name), row, group, j))

    params = functools.partial(scale_and_bias, options, place, ref, group)
    kept_params = [once_read(params(j)) for j in each] if tile.keep_weight else None
    scales = lambda j: params(j) if kept_params is None else kept_params[j]

    def start(k: Any, row: Any, j: int, mean: Any, rstd: Any) -> Any:
        """x̂, dy, g and what else of a piece goes on."""
        h, gate = read("h", k, row, j), read("gate", k, row, j)
        dout = read("dout", k, row, j)
        v = gated_input(options, h, gate, sigma)
        xhat = (v if mean is None else v - mean) * rstd
        scale, bias = scales(j)
        dy, dgate = output_backward(options, xhat, scale, bias, gate, dout, sigma)
        return xhat, dy, times(dy, scale), dgate, h, gate

    def step(k: Any, sums: Any) -> Any:
        row = place.row(part + k * tile.parts, m)
        rstd = place.spread(place.load_stat(ref.rstd, row, group))
        mean = None
        if options.centered:
            mean = place.spread(place.load_stat(ref.mean, row, group))
        dweight, dbias = (list(s) for s in sums)
        kept, products, gs = [], [], []
        for j in each:
            if stages:
                plgpu.barrier_wait(smem.arrived.at[slot_of(k, j)])
            xhat, dy, g, dgate, h, gate = start(k, row, j, mean, rstd)
            if dgate is not None:
                place.store(ref.dgate, row, group, j, dgate)
            new = place.new(part + k * tile.parts, m, dy)
            if dweight:
                dweight[j] = dweight[j] + new * xhat
            if dbias:
                dbias[j] = dbias[j] + new
            products.append(place.once(j, g * xhat))
            gs.append(place.once(j, g))
            kept.append((xhat, g, h, gate) if tile.keep else None)
        wanted = [sum(products), sum(gs)] if options.centered else [sum(products)]
        means = [
            place.spread(total * (1 / options.group_size))
            for total in place.totals(lax.rem(k, 2), wanted)
        ]
        for j in each:
            if tile.keep:
                xhat, g, h, gate = kept[j]
            else:
                xhat, _, g, _, h, gate = start(k, row, j, mean, rstd)
            dv = g - xhat * means[0]
            dv = (dv - means[1] if options.centered else dv) * rstd
            dx, dgate = gated_input_backward(options, h, gate, dv, sigma)
            if dgate is not None:
                place.store(ref.dgate, row, group, j, dgate)
            dh = read("dh", k, row, j)
            dx = dx if dh is None else dx + dh
            place.store(ref.dx, row, group, j, dx)
            if ref.dresidual is not None:
                place.store(ref.dresidual, row, group, j, dx)
            if stages:
                fetch(k + (j + stages) // pieces, (j + stages) % pieces)
        return tuple(dweight), tuple(dbias)

    for s in range(stages):
        fetch(s // pieces, s % pieces)
    place.begin()
    zeros = lambda target: tuple(place.zeros() for _ in each) if target is not None else ()
    dweight, dbias = lax.fori_loop(0, steps, step, (zeros(ref.dweight), zeros(ref.dbias)))
    for target, sums in ((ref.dweight, dweight), (ref.dbias, dbias)):
        for j, value in enumerate(sums):
            place.store_sum(target, part, group, j, value)
