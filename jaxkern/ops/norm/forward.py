"""The forward kernel of the norms."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.launch import LANES, launch_kernel
from jaxkern.ops.curves import WITHOUT_EXPONENTIALS, Functions, kernel_functions
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
        options.activation is not None or gate is not None,
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
    sums = 0 if isinstance(rows, Tile) else 1 + options.centered
    scratch = rows.scratch(sums) | param_scratch(tile, inputs, _PARAMS)
    scratch |= ring_scratch(tile, inputs, _STREAMS)
    names = [*inputs, *outs]

    def body(*refs: Any, **space: Any) -> None:
        every = dict.fromkeys(_NAMES) | dict(zip(names, refs, strict=True))
        smem = types.SimpleNamespace(**space)
        place = rows.place(smem)
        _fwd_kernel(options, tile, place, m, groups, types.SimpleNamespace(**every), smem)

    results = launch_kernel(
        body,
        out_type=tuple(outs.values()),
        scratch_types=scratch,
        grid=(tile.blocks(m) * groups,),
        grid_names=(BLOCK,),
        kernel_name=f"{options.op}_fwd",
        approx_math=approx_math(options, "gate" in inputs),
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
    of, centered = place_functions(options, place), options.centered

    def load(k: Any, pieces: Any = place.each) -> list[tuple[Any, Any, Any]]:
        """v, the gate and the sum with the residual, by pieces."""
        h, residual, gate = ([rows.read(name, k, j) for j in pieces] for name in _STREAMS)
        sums = [None for _ in pieces]
        if ref.residual is not None:
            sums = [(a + b).astype(ref.h.dtype) for a, b in zip(h, residual, strict=True)]
            h = [wide(place, v) for v in sums]
        v = [gated_input(options, *both, of) for both in zip(h, gate, strict=True)]
        return list(zip(v, gate, sums, strict=True))

    def store_sums(k: Any, held: list[tuple[Any, Any, Any]], pieces: Any = place.each) -> None:
        for j, (_, _, total) in zip(pieces, held, strict=True):
            if total is not None:
                place.store(ref.h, place.row(rows.tile_of(k), m), group, j, total)

    def scales(k: Any, mean: Any, square: Any) -> tuple[Any, Any]:
        """Mean and rstd, stored and ready to be used."""
        row = place.row(rows.tile_of(k), m)
        rstd = lax.rsqrt(square + options.eps)
        if centered:
            place.store_stat(ref.mean, row, group, mean)
            mean = place.spread(mean)
        place.store_stat(ref.rstd, row, group, rstd)
        return mean, place.spread(rstd)

    def store(k: Any, j: int, held: tuple[Any, Any, Any], mean: Any, rstd: Any) -> None:
        v, gate, _ = held
        xhat = (v if mean is None else v - mean) * rstd
        out = output(options, xhat, *params.piece(j), gate, of)
        place.store(ref.out, place.row(rows.tile_of(k), m), group, j, out)

    def whole(k: Any, held: list[tuple[Any, Any, Any]]) -> None:
        """A row that is in registers."""
        mean, rstd = scales(k, *place.statistics(k, [v for v, _, _ in held], centered))
        rows.refill(k)
        for j, piece in enumerate(held):
            store(k, j, piece, mean, rstd)

    if not tile.parts:
        held = load(0)
        store_sums(0, held)
        params = Params(options, tile.weight, place, group, ref, smem)
        place.begin()
        whole(0, held)
        return
    rows.start()
    params = Params(options, tile.weight, place, group, ref, smem)
    place.begin()

    def send(k: Any) -> None:
        rows.wait(k)
        place.send(k, [v for v, _, _ in load(k)], centered)

    if tile.ahead:
        pl.when(rows.steps > 0)(lambda: send(0))

    @pl.loop(0, rows.steps)
    def _(k):
        if not tile.ahead:
            rows.wait(k)
            held = load(k)
            store_sums(k, held)
            whole(k, held)
            return
        # The sums of the next row are on their way while this one is finished.
        pl.when(k + 1 < rows.steps)(lambda: send(k + 1))
        mean, rstd = scales(k, *place.receive(k, centered))
        for j in place.each:
            held = load(k, [j])
            store_sums(k, held, [j])
            store(k, j, held[0], mean, rstd)
        rows.refill(k)


# What both directions share


def place_functions(options: Options, place: Any) -> Functions:
    exact = options.x_dtype == "float32"
    return kernel_functions(exact, place.layout)


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


def approx_math(options: Options, gated: bool) -> bool:
    """Whether a kernel has exponentials, which then are the fast ones."""
    used = [options.activation, options.gate_activation if gated else None]
    return any(name not in (None, *WITHOUT_EXPONENTIALS) for name in used)
