"""The backward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.instructions import computed_here, unknown_zero
from jaxkern.mosaic.launch import launch_kernel
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.forward import (
    approx_math,
    joined,
    place_functions,
    split,
)
from jaxkern.ops.norm.parts import sum_parts
from jaxkern.ops.norm.pointwise import (
    Options,
    gated_input,
    gated_input_backward,
    output_backward,
    times,
)
from jaxkern.ops.norm.reference import reference_bwd
from jaxkern.ops.norm.rows import BLOCK
from jaxkern.ops.norm.stream import Params, Rows, param_scratch, ring_scratch

_STREAMS = ["h", "dout", "gate", "dh"]
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
    sizes = {k: v.dtype.itemsize for k, v in inputs.items() if v is not None}
    tile = tiles.backward(
        h.size // h.shape[-1],
        options.group_size,
        h.shape[-1] // options.group_size,
        min(sizes.values()),
        tuple(sizes[k] for k in _STREAMS if k in sizes),
        tuple(sizes[k] for k in _params(options, gate) if k in sizes),
        (weight is not None) + (bias is not None),
        gate is None and options.activation is None,
    )
    return launch_bwd_tile(options, tile, inputs)


def launch_bwd_tile(options: Options, tile: tiles.Backward, inputs: dict[str, Any]):
    weight, bias, gate = inputs["weight"], inputs["bias"], inputs["gate"]
    shape, rows = inputs["h"].shape, tile.rows
    groups = shape[-1] // options.group_size
    inputs = {k: v for k, v in inputs.items() if v is not None}
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
    scratch = rows.scratch(2 if options.centered else 1)
    scratch |= param_scratch(tile, inputs, _params(options, gate))
    scratch |= ring_scratch(tile, inputs, _STREAMS)
    names = [*inputs, *outs]

    def body(*refs: Any, **space: Any) -> None:
        ref = types.SimpleNamespace(**dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True)))
        smem = types.SimpleNamespace(**space)
        place = rows.place(smem)
        _bwd_kernel(options, tile, place, m, groups, ref, smem)

    results = launch_kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=scratch,
        grid=(tile.parts * groups,),
        grid_names=(BLOCK,),
        kernel_name=f"{options.op}_bwd",
        approx_math=approx_math(options, gate is not None),
        **rows.launch,
    )(*inputs.values())
    results = dict(zip(outs, results, strict=True))

    params = {k: v for k, v in (("dweight", weight), ("dbias", bias)) if v is not None}
    sums = sum_parts(options, [results[k] for k in params], [v.dtype for v in params.values()])
    summed = dict(zip(params, sums, strict=True))

    def param(name: str) -> Any:
        return joined(options, summed[name], params[name].shape) if name in params else None

    def whole(name: str) -> Any:
        return joined(options, results[name], shape) if name in results else None

    return (
        whole("dx"),
        whole("dresidual"),
        param("dweight"),
        param("dbias"),
        whole("dgate"),
    )


def _params(options: Options, gate: Any) -> list[str]:
    """The parameters that the backward reads."""
    after = options.activation or (gate is not None and options.norm_before_gate)
    return ["weight", "bias"] if after else ["weight"]


def _bwd_kernel(
    options: Options,
    tile: tiles.Backward,
    place: Any,
    m: int,
    groups: int,
    ref: Any,
    smem: Any,
) -> None:
    block = lax.axis_index(BLOCK)
    part, group = lax.div(block, groups), lax.rem(block, groups)
    rows = Rows(tile, place, _STREAMS, m, part, group, ref, smem)
    each, steps = place.each, rows.steps
    of = place_functions(options, place)
    pinned = functools.partial(computed_here, layout=place.layout)

    def unknown() -> Any:
        """Added to an index, keeps reads where they are: hoisted, they would take registers."""
        return 0 if tile.keep else unknown_zero()

    def start(k: Any, j: int, mean: Any, rstd: Any) -> Any:
        """d = v − mean, x̂, dy, g and what else of a piece goes on."""
        zero = unknown()
        h, gate, dout = (rows.read(name, k, j, zero) for name in ("h", "gate", "dout"))
        v = gated_input(options, h, gate, of)
        d = v if mean is None else v - mean
        xhat = d * rstd
        scale, bias = params.piece(j, zero)
        dy, dgate = output_backward(options, xhat, scale, bias, gate, dout, of)
        return d, xhat, dy, times(dy, scale), dgate, h, gate

    def stats(k: Any) -> tuple[Any, ...]:
        row = place.row(rows.tile_of(jnp.minimum(k, steps - 1)), m)
        refs = (ref.rstd, ref.mean) if options.centered else (ref.rstd,)
        return tuple(place.load_stat(r, row, group) for r in refs)

    def step(k: Any, carry: Any) -> Any:
        read, *sums = carry
        row = place.row(rows.tile_of(k), m)
        if tile.paced:
            pl.when(k > 0)(lambda: rows.refill(k - 1))
            rstd_of_row, *mean = stats(k)
            next_stats = ()
        else:
            rstd_of_row, *mean = read
            next_stats = stats(k + 1)  # on their way during this row
        rstd = place.spread(rstd_of_row)
        mean = place.spread(mean[0]) if options.centered else None
        dweight, dbias = (list(s) for s in sums)
        kept, lane_sums = [], []
        rows.wait(k)
        for j in each:
            d, xhat, dy, g, dgate, h, gate = start(k, j, mean, rstd)
            if dgate is not None:
                place.store(ref.dgate, row, group, j, dgate)
            if dweight:
                added = place.new(rows.tile_of(k), m, dy * xhat)
                dweight[j] = pinned(place.add(dweight[j], added))
            if dbias:
                dbias[j] = pinned(place.add(dbias[j], place.new(rows.tile_of(k), m, dy)))
            products = [g * xhat, g] if options.centered else [g * xhat]
            here = [place.lane_sum(j, p) for p in products]
            lane_sums = [a + b for a, b in zip(lane_sums, here, strict=True)] if j else here
            kept.append((d, g, h, gate) if tile.keep else None)
        # dv = rstd · (g − mean(g) − x̂ · mean(g · x̂)) = rstd · g − (slope · d + offset)
        totals = place.totals(k, lane_sums)
        done = tile.keep and ref.dh is None
        if done and not tile.paced:
            rows.refill(k)
        slope = rstd_of_row * rstd_of_row * (totals[0] * (1 / options.group_size))
        offset = None
        if options.centered:
            offset = place.spread(totals[1] * (1 / options.group_size) * rstd_of_row)
        slope = place.spread(slope)
        for j in each:
            if tile.keep:
                d, g, h, gate = kept[j]
            else:
                d, _, _, g, _, h, gate = start(k, j, mean, rstd)
            dv = g * rstd - (d * slope if offset is None else d * slope + offset)
            dx, dgate = gated_input_backward(options, h, gate, dv, of)
            if dgate is not None:
                place.store(ref.dgate, row, group, j, dgate)
            dh = rows.read("dh", k, j)
            dx = dx if dh is None else dx + dh
            place.store(ref.dx, row, group, j, dx)
            if ref.dresidual is not None:
                place.store(ref.dresidual, row, group, j, dx)
        if not (done or tile.paced):
            rows.refill(k)
        return next_stats, tuple(dweight), tuple(dbias)

    rows.start()
    params = Params(options, tile.weight, place, group, ref, smem)
    place.begin()
    zeros = lambda target: tuple(place.zero_sum() for _ in each) if target is not None else ()
    carry = () if tile.paced else stats(0), zeros(ref.dweight), zeros(ref.dbias)
    _, dweight, dbias = lax.fori_loop(0, steps, step, carry)
    for target, sums in ((ref.dweight, dweight), (ref.dbias, dbias)):
        for j, value in enumerate(sums):
            place.store_sum(target, part, group, j, value)
