"""The backward kernel of the norms.

A block goes through its tiles and adds up dw and db of its rows; :mod:`jaxkern.ops.norm.param_sums`
adds the blocks' sums.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.instructions import unknown_zero
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.launch import grouped_type, launch, without_groups
from jaxkern.ops.norm.param_sums import sum_over_clusters
from jaxkern.ops.norm.pointwise import (
    Options,
    gated_input,
    gated_input_backward,
    output_backward,
    times,
)
from jaxkern.ops.norm.reference import reference_bwd
from jaxkern.ops.norm.registers import computed_here
from jaxkern.ops.norm.stream import Block, Params, TileStream

_STREAMS = ["h", "dout", "gate", "dh"]


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
    gradients = {f"d{k}": inputs[k] for k in ("weight", "bias") if inputs[k] is not None}
    # The bias is read only where what follows it has a slope.
    sloped = options.activation or (gate is not None and options.norm_before_gate)
    params = ["weight", "bias"] if sloped else ["weight"]
    tile = tiles.backward(tiles.Sizes.of(options, inputs, _STREAMS, params), len(gradients))
    full = grouped_type(options, tile, h)
    of_cluster = jax.ShapeDtypeStruct((tile.clusters, *full.shape[1:]), jnp.float32)
    outs: dict[str, Any] = {"dx": full.update(dtype=jnp.dtype(options.x_dtype))}
    outs |= {"dresidual": None, "dgate": None, "dweight": None, "dbias": None}
    if options.separate_dresidual:
        outs["dresidual"] = full.update(dtype=jnp.dtype(options.residual_dtype))
    if gate is not None:
        outs["dgate"] = full.update(dtype=gate.dtype)
    results = launch(
        _bwd_kernel,
        f"{options.op}_bwd",
        options,
        tile,
        inputs,
        outs | dict.fromkeys(gradients, of_cluster),
        streams=_STREAMS,
        params=params,
        row_sums=1 + options.centered,
    )
    partials = [results[k] for k in gradients]  # (clusters, groups, width)
    sums = sum_over_clusters(options, partials, [v.dtype for v in gradients.values()])
    totals = dict(zip(gradients, sums, strict=True))
    n = h.shape[-1:]
    return (
        without_groups(options, results["dx"], h.shape),
        without_groups(options, results["dresidual"], h.shape),
        without_groups(options, totals.get("dweight"), n),
        without_groups(options, totals.get("dbias"), n),
        without_groups(options, results["dgate"], h.shape),
    )


class _Window(NamedTuple):
    """What the backward computes of a window, in fp32, None where absent.

    (rows, size) of short rows, (size,) of a long one; the names are those of the equations in
    :mod:`jaxkern.ops.norm.op`, d = v − mean.
    """

    d: Any
    xhat: Any
    dy: Any
    g: Any
    dgate: Any
    h: Any
    gate: Any


def _bwd_kernel(block: Block) -> None:
    _Backward(block).run()


class _Tile(NamedTuple):
    """A tile and its statistics, which are (rows,) of short rows and scalars of a long one.

    Attributes:
      k: its number among the block's tiles.
      row: its first row.
      rstd_of_row: as loaded.
      rstd, mean: as they are combined with windows; the mean of an RMS norm is None.
    """

    k: Any
    row: Any
    rstd_of_row: Any
    rstd: Any
    mean: Any


class _Backward:
    """The backward of a block."""

    def __init__(self, block: Block):
        self.block, self.options, self.regs = block, block.options, block.regs
        self.stream = TileStream(block, _STREAMS)
        self.curves = block.curve_functions
        self.params: Any = None

    def run(self) -> None:
        """Goes through the tiles, then stores the sums dw and db."""
        regs, ref = self.regs, self.block.ref
        self.stream.start()
        self.params = Params(self.block)
        regs.prepare()
        targets = ref.dweight, ref.dbias
        statistics = () if self.block.tile.throttled else self._load_statistics(0)
        zeros = (
            tuple(regs.zero_param_sum() for _ in regs.windows if t is not None) for t in targets
        )
        _, *sums = lax.fori_loop(0, self.stream.steps, self._step, (statistics, *zeros))
        for target, of_target in zip(targets, sums, strict=True):
            for j, value in enumerate(of_target):
                regs.store_param_sum(target, self.block.cluster, self.block.group, j, value)

    def _step(self, k: Any, carry: Any) -> Any:
        """One tile: its row sums and what it adds to dw and db, then dx.

        The carry is the tile's statistics, unless they are loaded now, and the sums dw and db, each
        a tuple of windows.
        """
        statistics, *sums = carry
        row, following = self.stream.row(k), ()
        if self.block.tile.throttled:
            pl.when(k > 0)(lambda: self.stream.refill(k - 1))
            statistics = self._load_statistics(k)
        else:
            following = self._load_statistics(k + 1)  # on their way during this tile
        rstd, *mean = statistics
        tile = _Tile(
            k,
            row,
            rstd_of_row=rstd,
            rstd=self.regs.broadcast(rstd),
            mean=self.regs.broadcast(mean[0]) if self.options.centered else None,
        )
        dweight, dbias = map(list, sums)
        lane_sums, kept = self._add(tile, dweight, dbias)
        row_sums = self.regs.row_sums(k, lane_sums)
        # Nothing is read from the stage any more where dh is absent and the windows are kept.
        done = self.block.tile.keep and self.block.ref.dh is None
        if done and not self.block.tile.throttled:
            self.stream.refill(k)
        self._store_dx(tile, row_sums, kept)
        if not (done or self.block.tile.throttled):
            self.stream.refill(k)
        return following, tuple(dweight), tuple(dbias)

    def _add(self, tile: _Tile, dweight: list[Any], dbias: list[Any]) -> Any:
        """Adds to dw and db; the lanes' sums of g · x̂ and of g, and the windows, if kept."""
        regs, stream, m = self.regs, self.stream, self.block.m
        pinned = functools.partial(computed_here, layout=regs.layout)
        lane_sums, kept = [], []
        stream.wait(tile.k)
        for j in regs.windows:
            w = self._compute(tile, j)
            if w.dgate is not None:
                self._store(self.block.ref.dgate, tile, j, w.dgate)
            if dweight:
                added = regs.without_repeated(stream.index(tile.k), m, w.dy * w.xhat)
                dweight[j] = pinned(regs.add_to_param_sum(dweight[j], added))
            if dbias:
                added = regs.without_repeated(stream.index(tile.k), m, w.dy)
                dbias[j] = pinned(regs.add_to_param_sum(dbias[j], added))
            products = [w.g * w.xhat, w.g] if self.options.centered else [w.g * w.xhat]
            here = [regs.lane_sum(j, p) for p in products]
            lane_sums = [a + b for a, b in zip(lane_sums, here, strict=True)] if j else here
            kept.append(w if self.block.tile.keep else None)
        return lane_sums, kept

    def _store_dx(self, tile: _Tile, row_sums: list[Any], kept: list[Any]) -> None:
        """Stores dx, dresidual and the gradient of a gate that comes first.

        dv = rstd · (g − mean(g) − x̂ · mean(g · x̂)) = rstd · g − (slope · d + offset)
        """
        regs, ref, size = self.regs, self.block.ref, self.options.group_size
        slope = tile.rstd_of_row * tile.rstd_of_row * (row_sums[0] * (1 / size))
        offset = None
        if self.options.centered:
            offset = regs.broadcast(row_sums[1] * (1 / size) * tile.rstd_of_row)
        slope = regs.broadcast(slope)
        for j in regs.windows:
            w = kept[j] if self.block.tile.keep else self._compute(tile, j)
            dv = w.g * tile.rstd - (w.d * slope if offset is None else w.d * slope + offset)
            dx, dgate = gated_input_backward(self.options, w.h, w.gate, dv, self.curves)
            if dgate is not None:
                self._store(ref.dgate, tile, j, dgate)
            dh = self.stream.read("dh", tile.k, j)
            dx = dx if dh is None else dx + dh
            self._store(ref.dx, tile, j, dx)
            if ref.dresidual is not None:
                self._store(ref.dresidual, tile, j, dx)

    def _compute(self, tile: _Tile, j: int) -> _Window:
        # Added to an index, a zero that the compiler does not know keeps reads where they are:
        # hoisted, they would take registers.
        zero = 0 if self.block.tile.keep else unknown_zero()
        read = lambda name: self.stream.read(name, tile.k, j, zero)
        h, gate, dout = read("h"), read("gate"), read("dout")
        v = gated_input(self.options, h, gate, self.curves)
        d = v if tile.mean is None else v - tile.mean
        xhat = d * tile.rstd
        scale, bias = self.params.window(j, zero)
        dy, dgate = output_backward(self.options, xhat, scale, bias, gate, dout, self.curves)
        return _Window(d, xhat, dy, times(dy, scale), dgate, h, gate)

    def _load_statistics(self, k: Any) -> tuple[Any, ...]:
        """rstd, and the mean of a layer norm; beyond the last tile, the last one's."""
        ref, group = self.block.ref, self.block.group
        row = self.stream.row(jnp.minimum(k, self.stream.steps - 1))
        refs = (ref.rstd, ref.mean) if self.options.centered else (ref.rstd,)
        return tuple(self.regs.load_stat(r, row, group) for r in refs)

    def _store(self, ref: Any, tile: _Tile, j: int, value: Any) -> None:
        self.regs.store(ref, tile.row, self.block.group, j, value)
