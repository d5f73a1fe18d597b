"""The forward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.arithmetic import sigmoid
from jaxkern.core.mosaic import LANES
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.pointwise import Options, gated_input, output
from jaxkern.ops.norm.reference import reference_fwd
from jaxkern.ops.norm.rows import BLOCK, Strip, Tile


def launch_fwd(options: Options, x: Any, residual: Any, weight: Any, bias: Any, gate: Any):
    if x.size == 0:
        return reference_fwd(options, x, residual, weight, bias, gate)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias, "gate": gate}
    groups = x.shape[-1] // options.group_size
    m = x.size // x.shape[-1]
    arrays = sum(a is not None for a in (x, residual, gate))
    tile = tiles.forward(
        m,
        options.group_size,
        groups,
        narrowest(inputs),
        arrays,
        options.centered,
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
    names = [*inputs, *outs]
    interpret = options.mode == "interpret"

    def body(*refs: Any, **space: Any) -> None:
        every = dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True))
        place = rows.place(types.SimpleNamespace(**space), interpret)
        _fwd_kernel(options, tile, place, m, groups, types.SimpleNamespace(**every))

    results = plgpu.kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=rows.scratch(0 if isinstance(rows, Tile) else 1, interpret),
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


_NAMES = ("x", "residual", "weight", "bias", "gate", "out", "h", "mean", "rstd")


def _fwd_kernel(
    options: Options, tile: tiles.Forward, place: Any, m: int, groups: int, ref: Any
) -> None:
    block = lax.axis_index(BLOCK)
    part, group = lax.div(block, groups), lax.rem(block, groups)
    count, rounds = tile.rows.rows_of(m), 1 + options.centered

    def read(step: Any) -> list[Any]:
        """The pieces of x, residual and gate."""
        row = place.row(step, m)
        return [
            [None if source is None else place.load(source, row, group, j) for j in place.each]
            for source in (ref.x, ref.residual, ref.gate)
        ]

    rows = functools.partial(_fwd_rows, options, place, m, group, ref)
    if not tile.parts:
        read_before_waiting = read(part)
        place.begin()
        rows(read_before_waiting, part, 0)
        return
    place.begin()
    steps = lax.div(count - part + tile.parts - 1, tile.parts)
    row_of = lambda k: part + jnp.minimum(k, steps - 1) * tile.parts

    def step(k: Any, held: Any) -> Any:
        following = read(row_of(k + 1)) if tile.ahead else ()
        rows(held if tile.ahead else read(row_of(k)), row_of(k), k * rounds)
        return following

    lax.fori_loop(0, steps, step, read(row_of(0)) if tile.ahead else ())


def _fwd_rows(
    options: Options,
    place: Any,
    m: int,
    group: Any,
    ref: Any,
    held: list[Any],
    step: Any,
    rounds: Any,
) -> None:
    row, each = place.row(step, m), place.each
    h, residual, gate = held
    sigma = place_sigmoid(options, place)
    if ref.residual is not None:
        h = [(wide(a) + wide(b)).astype(ref.h.dtype) for a, b in zip(h, residual, strict=True)]
        for j in each:
            place.store(ref.h, row, group, j, h[j])
    v = [gated_input(options, wide(h[j]), wide(gate[j]), sigma) for j in each]

    def mean_of(rounds: Any, values: list[jax.Array]) -> jax.Array:
        sums = [place.lane_sum(j, value) for j, value in zip(each, values, strict=True)]
        [total] = place.totals(rounds, [sum(sums[1:], start=sums[0])])
        return total * (1 / options.group_size)

    if options.centered:
        mean = mean_of(rounds, v)
        place.store_stat(ref.mean, row, group, mean)
        mean = place.spread(mean)
        v = [value - mean for value in v]
    square = mean_of(rounds + options.centered, [value * value for value in v])
    rstd = lax.rsqrt(square + options.eps)
    place.store_stat(ref.rstd, row, group, rstd)
    rstd = place.spread(rstd)
    for j in each:
        scale, bias = scale_and_bias(options, place, ref, group, j)
        out = output(options, v[j] * rstd, scale, bias, wide(gate[j]), sigma)
        place.store(ref.out, row, group, j, out)


# What both directions share


def place_sigmoid(options: Options, place: Any) -> Any:
    exact = options.x_dtype == "float32"
    return functools.partial(sigmoid, exact=exact, interpret=place.interpret, layout=place.layout)


def wide(x: Any) -> Any:
    return None if x is None else x.astype(jnp.float32)


def scale_and_bias(options: Options, place: Any, ref: Any, group: Any, j: int) -> Any:
    """w + o and b of a piece in fp32, None where there are none."""
    scale = bias = None
    if ref.weight is not None:
        scale = place.load_param(ref.weight, group, j)
        scale = scale + options.weight_offset if options.weight_offset else scale
    if ref.bias is not None:
        bias = place.load_param(ref.bias, group, j)
    return scale, bias


def narrowest(arrays: dict[str, Any]) -> int:
    """Bytes of an element of the narrowest array."""
    return min(a.dtype.itemsize for a in arrays.values() if a is not None)


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
        approx_math=gated or options.activation in ("silu", "gelu"),
    )
