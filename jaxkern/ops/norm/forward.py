"""The forward kernel of the norms."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.launch import grouped_type, launch, without_groups
from jaxkern.ops.norm.pointwise import Options, gated_input, output
from jaxkern.ops.norm.reference import reference_fwd
from jaxkern.ops.norm.stream import Block, Params, TileStream

_STREAMS = ["x", "residual", "gate"]
_PARAMS = ["weight", "bias"]


def launch_fwd(
    options: Options,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    tile: tiles.Forward | None = None,
):
    if x.size == 0:
        return reference_fwd(options, x, residual, weight, bias, gate)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias, "gate": gate}
    tile = tile or tiles.forward(tiles.Sizes.of(options, inputs, _STREAMS, _PARAMS))
    full = grouped_type(options, tile, x)
    stat = jax.ShapeDtypeStruct(full.shape[:2], jnp.float32)
    outs: dict[str, Any] = {"out": full, "h": None, "mean": None, "rstd": stat}
    if residual is not None:
        outs["h"] = full.update(dtype=jnp.promote_types(x.dtype, residual.dtype))
    if options.centered:
        outs["mean"] = stat
    results = launch(
        _fwd_kernel,
        f"{options.op}_fwd",
        options,
        tile,
        inputs,
        outs,
        streams=_STREAMS,
        params=_PARAMS,
        row_sums=1 + options.centered,
    )
    stats = (*x.shape[:-1], full.shape[1])  # (..., groups)
    return (
        without_groups(options, results["out"], x.shape),
        without_groups(options, results["h"], x.shape),
        results["mean"].reshape(stats) if options.centered else None,
        results["rstd"].reshape(stats),
    )


class _Window(NamedTuple):
    """What the forward holds of a window: (rows, size) of short rows, (size,) of a long one.

    Attributes:
      v: what is normalised, fp32.
      gate: fp32, or None.
      h: x + residual as it is returned, None without a residual.
    """

    v: Any
    gate: Any
    h: Any


def _fwd_kernel(block: Block) -> None:
    run = _Forward(block)
    if not block.tile.clusters:
        run.one_tile()
    elif block.tile.sums_ahead:
        run.tiles_with_sums_ahead()
    else:
        run.tiles()


class _Forward:
    """The forward of a block; `k` is the number of a tile among the block's."""

    def __init__(self, block: Block):
        self.block, self.options, self.regs = block, block.options, block.regs
        self.stream = TileStream(block, _STREAMS)
        self.curves = block.curve_functions
        self.params: Any = None

    def one_tile(self) -> None:
        """Loads the tile before the parameters: it takes longest."""
        held = self._load(0, self.regs.windows)
        self._store_h(0, self.regs.windows, held)
        self._prepare()
        self._finish(0, held)

    def tiles(self) -> None:
        """Holds each tile in registers from its statistics to its output."""
        self.stream.start()
        self._prepare()

        @pl.loop(0, self.stream.steps)
        def _(k):
            self.stream.wait(k)
            held = self._load(k, self.regs.windows)
            self._store_h(k, self.regs.windows, held)
            self._finish(k, held)

    def tiles_with_sums_ahead(self) -> None:
        """Sends the sums of the next tile before it finishes one, which it then loads again."""
        self.stream.start()
        self._prepare()
        pl.when(self.stream.steps > 0)(lambda: self._send_statistics(0))

        @pl.loop(0, self.stream.steps)
        def _(k):
            pl.when(k + 1 < self.stream.steps)(lambda: self._send_statistics(k + 1))
            received = self.regs.receive_statistics(k, self.options.centered)
            mean, rstd = self._store_statistics(k, *received)
            for j in self.regs.windows:
                held = self._load(k, [j])
                self._store_h(k, [j], held)
                self._store_out(k, j, held[0], mean, rstd)
            self.stream.refill(k)

    def _prepare(self) -> None:
        self.params = Params(self.block)
        self.regs.prepare()

    def _load(self, k: Any, windows: Iterable[int]) -> list[_Window]:
        read = self.stream.read
        x, residual, gate = ([read(name, k, j) for j in windows] for name in _STREAMS)
        h: list[Any] = [None for _ in windows]
        if self.block.ref.residual is not None:
            dtype = self.block.ref.h.dtype
            h = [(a + b).astype(dtype) for a, b in zip(x, residual, strict=True)]
            x = [self.block.wide(v) for v in h]
        v = [gated_input(self.options, *pair, self.curves) for pair in zip(x, gate, strict=True)]
        return [_Window(*parts) for parts in zip(v, gate, h, strict=True)]

    def _send_statistics(self, k: Any) -> None:
        self.stream.wait(k)
        held = self._load(k, self.regs.windows)
        self.regs.send_statistics(k, [w.v for w in held], self.options.centered)

    def _finish(self, k: Any, held: list[_Window]) -> None:
        """From the windows of a tile in registers to its output."""
        found = self.regs.statistics(k, [w.v for w in held], self.options.centered)
        mean, rstd = self._store_statistics(k, *found)
        self.stream.refill(k)
        for j, window in enumerate(held):
            self._store_out(k, j, window, mean, rstd)

    def _store_h(self, k: Any, windows: Iterable[int], held: list[_Window]) -> None:
        for j, window in zip(windows, held, strict=True):
            if window.h is not None:
                self._store(self.block.ref.h, k, j, window.h)

    def _store_statistics(self, k: Any, mean: Any, square: Any) -> tuple[Any, Any]:
        """Stores mean and rstd, and returns them as they are combined with windows."""
        ref, group = self.block.ref, self.block.group
        row = self.stream.row(k)
        rstd = lax.rsqrt(square + self.options.eps)
        if self.options.centered:
            self.regs.store_stat(ref.mean, row, group, mean)
            mean = self.regs.broadcast(mean)
        self.regs.store_stat(ref.rstd, row, group, rstd)
        return mean, self.regs.broadcast(rstd)

    def _store_out(self, k: Any, j: int, window: _Window, mean: Any, rstd: Any) -> None:
        xhat = (window.v if mean is None else window.v - mean) * rstd
        scale, bias = self.params.window(j)
        out = output(self.options, xhat, scale, bias, window.gate, self.curves)
        self._store(self.block.ref.out, k, j, out)

    def _store(self, ref: Any, k: Any, j: int, value: Any) -> None:
        self.regs.store(ref, self.stream.row(k), self.block.group, j, value)
