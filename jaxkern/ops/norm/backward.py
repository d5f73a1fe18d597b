"""The backward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.mosaic import computed_here, once_read, unknown_zero
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.forward import (
    compiler_params,
    joined,
    narrowest,
    place_sigmoid,
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
        0 if weight is None else weight.dtype.itemsize,
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
        for k in streams:
            slots = (warpgroups, tile.stages, *rows.buffer(boxes))
            scratch[k] = plgpu.SMEM(slots, inputs[k].dtype)
            inputs[k] = inputs[k].reshape(m, groups, boxes, tiles.BOX)
        scratch["arrived"] = plgpu.Barrier(
            num_arrivals=len(streams) * warpgroups, num_barriers=tile.stages
        )
    if tile.weight == "shared" and weight is not None and isinstance(rows, Strip):
        shape_of_own = (rows.warpgroups, rows.pieces, rows.windows.size)
        scratch["weight"] = plgpu.SMEM(shape_of_own, weight.dtype)
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
    warpgroup = getattr(place, "warpgroup", 0)
    sigma = place_sigmoid(options, place)

    def slot_of(k: Any, j: int) -> Any:
        if stages % pieces == 0:  # cheaper to compute, once a row
            return lax.rem(k, stages // pieces) * pieces + j
        return lax.rem(k * pieces + j, stages)

    def unknown() -> Any:
        """Added to an index, keeps reads where they are: hoisted, they would take registers."""
        return 0 if tile.keep else unknown_zero(interpret=place.interpret)

    def fetch(k: Any, j: int) -> None:
        """Piece `j` of the block's row `k` on its way to shared memory."""

        @pl.when(k < steps)
        def _():
            row, slot = place.row(part + k * tile.parts, m), slot_of(k, j)
            for name in streams:
                source = place.source(getattr(ref, name), row, group, j)
                target = getattr(smem, name).at[warpgroup, slot]
                plgpu.copy_gmem_to_smem(source, target, smem.arrived.at[slot])

    def read(name: str, k: Any, row: Any, j: int, zero: Any = 0) -> Any:
        if name not in streams:
            return None
        if stages:
            slot = slot_of(k, j) + zero
            return wide(place.load_shared(getattr(smem, name).at[warpgroup, slot]))
        return wide(place.load(getattr(ref, name), row + zero, group, j))

    def params(j: int, zero: Any = 0) -> Any:
        if tile.weight == "shared" and ref.weight is not None:
            scale = wide(place.load_own(smem.weight.at[warpgroup, j + zero]))
            scale = scale + options.weight_offset if options.weight_offset else scale
            bias = None if ref.bias is None else place.load_param(ref.bias, group + zero, j)
            return scale, bias
        return scale_and_bias(options, place, ref, group + zero, j)

    pinned = functools.partial(computed_here, layout=place.layout, interpret=place.interpret)
    kept_params = [once_read(params(j)) for j in each] if tile.weight == "registers" else None
    if tile.weight == "shared" and ref.weight is not None:
        for j in each:
            smem.weight[warpgroup, j] = place.load_param(ref.weight, group, j).astype(
                ref.weight.dtype
            )

    def start(k: Any, row: Any, j: int, mean: Any, rstd: Any, zero: Any = 0) -> Any:
        """v − mean, dy, g and what else of a piece goes on."""
        h, gate, dout = (read(name, k, row, j, zero) for name in ("h", "gate", "dout"))
        v = gated_input(options, h, gate, sigma)
        d = v if mean is None else v - mean
        scale, bias = params(j, zero) if kept_params is None else kept_params[j]
        dy, dgate = output_backward(options, d, rstd, scale, bias, gate, dout, sigma)
        return d, dy, times(dy, scale), dgate, h, gate

    def stats(k: Any) -> tuple[Any, ...]:
        row = place.row(part + jnp.minimum(k, steps - 1) * tile.parts, m)
        refs = (ref.rstd, ref.mean) if options.centered else (ref.rstd,)
        return tuple(place.load_stat(r, row, group) for r in refs)

    def step(k: Any, carry: Any) -> Any:
        (rstd_of_row, *mean), *sums = carry
        tile_index = part + k * tile.parts
        row = place.row(tile_index, m)
        next_stats = stats(k + 1)  # on their way during this row
        rstd = place.spread(rstd_of_row)
        mean = place.spread(mean[0]) if options.centered else None
        dweight, dbias = (list(s) for s in sums)
        kept, lane_sums = [], []
        for j in each:
            if stages:
                plgpu.barrier_wait(smem.arrived.at[slot_of(k, j)])
            d, dy, g, dgate, h, gate = start(k, row, j, mean, rstd, unknown())
            if dgate is not None:
                place.store(ref.dgate, row, group, j, dgate)
            if dweight:
                dweight[j] = pinned(place.add(dweight[j], place.new(tile_index, m, dy * rstd * d)))
            if dbias:
                dbias[j] = pinned(place.add(dbias[j], place.new(tile_index, m, dy)))
            here = [place.lane_sum(j, v) for v in ([g * d, g] if options.centered else [g * d])]
            lane_sums = [a + b for a, b in zip(lane_sums, here, strict=True)] if j else here
            kept.append((d, g, h, gate) if tile.keep else None)
        # dv = rstd · (g − mean(g) − d · rstd² · mean(g · d))
        totals = place.totals(k, lane_sums)
        slope = place.spread(totals[0] * (1 / options.group_size) * rstd_of_row * rstd_of_row)
        g_mean = place.spread(totals[1] * (1 / options.group_size)) if options.centered else None
        for j in each:
            if tile.keep:
                d, g, h, gate = kept[j]
            else:
                d, _, g, _, h, gate = start(k, row, j, mean, rstd, unknown())
            dv = g - d * slope
            dv = (dv if g_mean is None else dv - g_mean) * rstd
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
        return next_stats, tuple(dweight), tuple(dbias)

    if stages:

        @pl.loop(0, -(-stages // pieces))
        def _(k):
            for j in each:
                pl.when(k * pieces + j < stages)(functools.partial(fetch, k, j))

    place.begin()
    zeros = lambda target: tuple(place.zero_sum() for _ in each) if target is not None else ()
    carry = stats(0), zeros(ref.dweight), zeros(ref.dbias)
    _, dweight, dbias = lax.fori_loop(0, steps, step, carry)
    for target, sums in ((ref.dweight, dweight), (ref.dbias, dbias)):
        for j, value in enumerate(sums):
            place.store_sum(target, part, group, j, value)
