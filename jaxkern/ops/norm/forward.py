"""The forward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.arithmetic import sigmoid
from jaxkern.core.mosaic import LANES
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.pointwise import Options, gated_input, output
from jaxkern.ops.norm.reference import reference_fwd
from jaxkern.ops.norm.rows import BLOCK, Strip, Tile
from jaxkern.ops.norm.stream import Params, Rows, param_scratch, ring_scratch, wide


def launch_fwd(options: Options, x: Any, residual: Any, weight: Any, bias: Any, gate: Any):
    if x.size == 0:
        return reference_fwd(options, x, residual, weight, bias, gate)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias, "gate": gate}
    groups = x.shape[-1] // options.group_size
    m = x.size // x.shape[-1]
    sizes = {k: v.dtype.itemsize for k, v in inputs.items() if v is not None}
    tile = tiles.forward(
        m,
        options.group_size,
        groups,
        min(sizes.values()),
        tuple(sizes[k] for k in _STREAMS if k in sizes),
        tuple(sizes[k] for k in _PARAMS if k in sizes),
        options.mode == "interpret",
    )
    return launch_fwd_tile(options, tile, inputs)


def launch_fwd_tile(options: Options, tile: tiles.Forward, inputs: dict[str, Any]):
    x, residual = inputs["x"], inputs["residual"]
    shape, rows = x.shape, tile.rows
    stats = (*shape[:-1], shape[-1] // options.group_size)
    inputs = {
        k: split(options, rows, v, k in ("weight", "bias"))
        for k, v in inputs.items()
        if v is not None
    }
    m, groups, width = inputs["x"].shape
    full = functools.partial(jax.ShapeDtypeStruct, (m, groups, width))
    outs = {"out": full(x.dtype)}
    if residual is not None:
        outs["h"] = full(jnp.promote_types(x.dtype, residual.dtype))
    if options.centered:
        outs["mean"] = jax.ShapeDtypeStruct((m, groups), jnp.float32)
    outs["rstd"] = jax.ShapeDtypeStruct((m, groups), jnp.float32)
    interpret = options.mode == "interpret"
    sums = 0 if isinstance(rows, Tile) else 1 + options.centered
    scratch = rows.scratch(sums, interpret) | param_scratch(tile, inputs, _PARAMS)
    scratch |= ring_scratch(tile, inputs, _STREAMS)
    names = [*inputs, *outs]

    def body(*refs: Any, **space: Any) -> None:
        every = dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True))
        smem = types.SimpleNamespace(**space)
        place = rows.place(smem, interpret)
        _fwd_kernel(options, tile, place, m, groups, types.SimpleNamespace(**every), smem)

    results = plgpu.kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=scratch,
        grid=((tile.parts or rows.rows_of(m)) * groups,),
        grid_names=(BLOCK,),
        kernel_name=f"{options.op}_fwd",
        compiler_params=compiler_params(options, "gate" in inputs),
        **rows.launch,
    )(*inputs.values())
    results = dict(zip(outs, results, strict=True))
    h = results.get("h")
    return (
        joined(options, results["out"], shape),
        None if h is None else joined(options, h, shape),
        results["mean"].reshape(stats) if options.centered else None,
        results["rstd"].reshape(stats),
    )


_STREAMS = ["x", "residual", "gate"]
_PARAMS = ["weight", "bias"]
_NAMES = (*_STREAMS, *_PARAMS, "out", "h", "mean", "rstd")


def _fwd_kernel(
    options: Options, tile: tiles.Forward, place: Any, m: int, groups: int, ref: Any, smem: Any
) -> None:
    block = lax.axis_index(BLOCK)
    part, group = lax.div(block, groups), lax.rem(block, groups)
    rows = Rows(tile, place, _STREAMS, m, part, group, ref, smem)
    sigma = place_sigmoid(options, place)

    def load(k: Any) -> list[Any]:
        """v and the gate by pieces; the sum, where there is one, is on its way."""
        row = place.row(rows.tile_of(k), m)
        h, residual, gate = ([rows.read(name, k, j) for j in place.each] for name in _STREAMS)
        if ref.residual is not None:
            h = [(a + b).astype(ref.h.dtype) for a, b in zip(h, residual, strict=True)]
            for j in place.each:
                place.store(ref.h, row, group, j, h[j])
            h = [wide(place, v) for v in h]
        return [(gated_input(options, *both, sigma), both[1]) for both in zip(h, gate, strict=True)]

    def finish(k: Any, held: list[Any], rounds: Any) -> None:
        row, v = place.row(rows.tile_of(k), m), [v for v, _ in held]
        mean = None
        if options.centered:
            mean, square = place.moments(rounds, v)
            place.store_stat(ref.mean, row, group, mean)
            mean = place.spread(mean)
        else:
            square = place.total(rounds, [a * a for a in v]) * (1 / options.group_size)
        rstd = lax.rsqrt(square + options.eps)
        place.store_stat(ref.rstd, row, group, rstd)
        rstd = place.spread(rstd)
        rows.refill(k)
        for j, (value, gate) in enumerate(held):
            scale, bias = params.piece(j)
            xhat = (value if mean is None else value - mean) * rstd
            place.store(ref.out, row, group, j, output(options, xhat, scale, bias, gate, sigma))

    if not tile.parts:
        held = load(0)
        params = Params(options, tile.weight, place, group, ref, smem)
        place.begin()
        finish(0, held, 0)
        return
    rows.start()
    params = Params(options, tile.weight, place, group, ref, smem)
    place.begin()
    rounds = place.rounds(options.centered)

    @pl.loop(0, rows.steps)
    def _(k):
        rows.wait(k)
        finish(k, load(k), k * rounds)


# What both directions share


def place_sigmoid(options: Options, place: Any) -> Any:
    exact = options.x_dtype == "float32"
    return functools.partial(sigmoid, exact=exact, interpret=place.interpret, layout=place.layout)


def split(options: Options, rows: Any, a: Any, param: bool) -> Any:
    """(M, G, N / G), or (G, N / G) of a parameter, padded to what a strip can hold."""
    groups = a.shape[-1] // options.group_size
    a = a.reshape((groups, options.group_size) if param else (-1, groups, options.group_size))
    missing = LANES - options.group_size
    if isinstance(rows, Strip) and missing > 0:
        a = jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, missing),))
    return a


def joined(options: Options, a: Any, shape: tuple[int, ...]) -> Any:
    return a[..., : options.group_size].reshape(shape)


def compiler_params(options: Options, gated: bool) -> Any:
    """Fast exponentials where there are any."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,  # a ring's slots and the mailboxes are guarded by hand
        approx_math=gated or options.activation in ("silu", "gelu"),
    )
