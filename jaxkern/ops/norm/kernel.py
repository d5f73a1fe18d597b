"""Kernels of the norms: a block's stream of tiles, the launch, forward, backward, dw and db.

Both kernels are written for windows of a tile in registers, of :mod:`~jaxkern.ops.norm.rows`. A
block takes several tiles, which a ring in shared memory brings, and keeps its parameters.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.target import interpreted
from jaxkern.mosaic.arithmetic import once_read, unknown_zero, widened
from jaxkern.mosaic.lanes import computed_here, store, sync_block, sync_warp, sync_warpgroup
from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel, launch_named, num_sms
from jaxkern.mosaic.ring import close_copies, copy_barriers, start_copy, wait_for_copy
from jaxkern.ops.curves import WITHOUT_EXPONENTIALS, Functions, kernel_functions
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.reference import (
    NormOptions,
    gated_input,
    gated_input_backward,
    output,
    output_backward,
    reference_bwd,
    reference_fwd,
    times,
)
from jaxkern.ops.norm.rows import LongRow, ShortRows
from jaxkern.ops.norm.tiles import TMA_BOX, NormBackwardTile, NormForwardTile

# A block, its stream of tiles and its parameters


@dataclasses.dataclass(frozen=True)
class NormBlock:
    """The arrays, registers and position of one block of a kernel.

    Attributes:
      options: of the pass.
      tile: of the pass, :class:`NormForwardTile` or :class:`NormBackwardTile`.
      regs: what loads, stores and sums the tile's windows: of short rows or of a long row.
      m: rows.
      cluster: index of this block's cluster among those that go through the group's rows; a block
        alone is a cluster of one.
      group: which group of each row.
      ref: arrays in global memory by name, (m, groups, group size) and of statistics (m, groups);
        None where absent.
      smem: arrays in shared memory by name.
    """

    options: NormOptions
    tile: Any
    regs: Any
    m: int
    cluster: Any
    group: Any
    ref: Any
    smem: Any

    @property
    def curve_functions(self) -> Functions:
        return kernel_functions(self.options.x_dtype == "float32", self.regs.layout)

    def fp32(self, x: Any) -> Any:
        """A window in fp32, None for None."""
        if x is None:
            return None
        if x.dtype == jnp.bfloat16:
            return widened(x, self.regs.layout)
        return x.astype(jnp.float32)


class TileStream:
    """The tiles of a block, from a ring in shared memory or from global memory.

    Each warpgroup has a ring of its own for its windows of a row. The warpgroups' copies into a
    stage arrive at one barrier.

    Attributes:
      steps: how many tiles the block goes through.
    """

    def __init__(self, block: NormBlock, names: list[str]):
        self.block, self.tile = block, block.tile
        self.names = [name for name in names if getattr(block.ref, name) is not None]
        tile = block.tile
        self.stride = tile.clusters or tile.num_clusters(block.m)
        self.first, longest = block.cluster, None
        if len(tile.waves) > 1:
            wave, first = lax.div(block.cluster, tile.clusters), 0
            self.first, longest = lax.rem(block.cluster, tile.clusters), tile.waves[0]
            for i, length in enumerate(tile.waves[1:], 1):
                first += tile.waves[i - 1]
                self.first += jnp.where(wave == i, first * tile.clusters, 0)
                longest = jnp.where(wave == i, length, longest)
        tiles = tile.rows.tiles(block.m)
        self.steps = lax.div(tiles - self.first + self.stride - 1, self.stride)
        if longest is not None:
            self.steps = jnp.clip(self.steps, 0, longest)

    def index(self, k: Any) -> Any:
        """Index in the group of the block's `k`-th tile."""
        return self.first + k * self.stride

    def row(self, k: Any) -> Any:
        """The first row of the `k`-th tile."""
        return self.block.regs.first_row(self.index(k), self.block.m)

    def _stage(self, k: Any) -> Any:
        return lax.rem(k, self.tile.stages)

    def start(self) -> None:
        """Fills the ring."""
        if self.tile.stages:
            pl.loop(0, self.tile.stages)(self._fetch)

    def wait(self, k: Any) -> None:
        """Waits until the `k`-th tile is in its stage."""
        if self.tile.stages:
            wait_for_copy(self._barrier(self._stage(k)), self.tile.stages - 1)

    def refill(self, k: Any) -> None:
        """Starts the copies into the stage of the `k`-th tile, which no lane reads any more."""
        if self.tile.stages and self.tile.clusters:
            sync_warpgroup()
            self._fetch(k + self.tile.stages)

    def _barrier(self, stage: Any) -> Any:
        arrived = getattr(self.block.smem, "arrived", None)
        return None if arrived is None else arrived.at[stage]

    def _fetch(self, k: Any) -> None:
        regs, smem = self.block.regs, self.block.smem

        @pl.when(k < self.steps)
        def _():
            row, stage = self.row(k), self._stage(k)
            for name in self.names:
                into = getattr(smem, name).at[regs.warpgroup, stage]
                source = getattr(self.block.ref, name)
                for part, target in regs.tma_copies(source, into, row, self.block.group):
                    start_copy(part, target, self._barrier(stage))

        close_copies()

    def read(self, name: str, k: Any, j: int, zero: Any = 0) -> Any:
        """Window `j` of the `k`-th tile in fp32, None of an array that is absent.

        Args:
          name, k, j: which.
          zero: added to an index.
        """
        if name not in self.names:
            return None
        block, regs = self.block, self.block.regs
        if self.tile.stages:
            stage = getattr(block.smem, name).at[regs.warpgroup, self._stage(k) + zero]
            return block.fp32(regs.load_stage(stage, j))
        ref = getattr(block.ref, name)
        return block.fp32(regs.load(ref, self.row(k) + zero, block.group, j))


def ring_scratch(
    tile: NormForwardTile | NormBackwardTile, inputs: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The rings' shared memory; reshapes the inputs that go through them into boxes of the TMA."""
    if not tile.stages:
        return {}
    rows = tile.rows
    names = [name for name in names if name in inputs]
    arrivals = len(names) * rows.warpgroups * rows.copies
    scratch = copy_barriers(arrivals, tile.stages)
    for name in names:
        m, groups, width = inputs[name].shape
        boxes = width // TMA_BOX
        stages = (rows.warpgroups, tile.stages, *rows.stage_shape(boxes))
        scratch[name] = plgpu.SMEM(stages, inputs[name].dtype)
        inputs[name] = inputs[name].reshape(m, groups, *rows.gmem_shape(boxes))
    return scratch


class Params:
    """w + o and b of a block's windows in fp32, from where the tile keeps them."""

    def __init__(self, block: NormBlock):
        self.block, regs = block, block.regs
        for name in ("weight", "bias"):
            kept = self._in_shared_memory(name)
            if kept is not None:
                for j in regs.windows:
                    param = regs.load_param(getattr(block.ref, name), block.group, j)
                    kept[regs.warpgroup, j] = param.astype(kept.dtype)
        self.kept = None
        if block.tile.params_in == "registers":
            self.kept = [once_read(self._read(j, 0)) for j in regs.windows]

    def window(self, j: int, zero: Any = 0) -> tuple[Any, Any]:
        """w + o and b of window `j`; None where there are none. `zero` is added to an index."""
        return self._read(j, zero) if self.kept is None else self.kept[j]

    def _read(self, j: int, zero: Any) -> tuple[Any, Any]:
        scale, bias = (self._param(name, j, zero) for name in ("weight", "bias"))
        if scale is not None and self.block.options.weight_offset:
            scale = scale + self.block.options.weight_offset
        return scale, bias

    def _param(self, name: str, j: int, zero: Any) -> Any:
        block, regs = self.block, self.block.regs
        ref, kept = getattr(block.ref, name), self._in_shared_memory(name)
        if ref is None:
            return None
        if kept is not None:
            return block.fp32(regs.load_window(kept.at[regs.warpgroup, j + zero]))
        return regs.load_param(ref, block.group + zero, j)

    def _in_shared_memory(self, name: str) -> Any:
        return getattr(self.block.smem, f"preloaded_{name}", None)


def param_scratch(
    tile: NormForwardTile | NormBackwardTile, inputs: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Shared memory in which each warpgroup keeps its windows of the parameters `names`."""
    rows = tile.rows
    if tile.params_in != "shared" or not isinstance(rows, LongRow):
        return {}
    shape = (rows.warpgroups, rows.windows_per_warpgroup, rows.windows.size)
    return {f"preloaded_{k}": plgpu.SMEM(shape, inputs[k].dtype) for k in names if k in inputs}


# The launch of both passes

(_CLUSTER,) = grid_axes("cluster")


def launch(
    kernel: Callable[[NormBlock], None],
    name: str,
    options: NormOptions,
    tile: NormForwardTile | NormBackwardTile,
    inputs: dict[str, Any],
    outs: dict[str, Any],
    *,
    streams: list[str],
    params: list[str],
    row_sums: int,
) -> dict[str, Any]:
    """Runs `kernel` in every block; its outputs by name, shaped as `outs`.

    Args:
      kernel: gets the :class:`NormBlock`.
      name: the kernel's.
      options, tile: of the pass.
      inputs: the pass's arrays by name, None where absent.
      outs: shape and dtype of each output, None where absent; rows are (m, groups, width) of
        :func:`by_groups`.
      streams: the inputs that may go through the ring.
      params: the inputs that may be kept in shared memory.
      row_sums: the most sums over a row that are exchanged at a time.
    """
    rows, width = tile.rows, inputs[streams[0]].shape[-1]
    groups = width // options.group_size
    m = inputs[streams[0]].size // width
    arrays = {k: by_groups(options, tile, k, v) for k, v in inputs.items() if v is not None}
    scratch = rows.scratch(row_sums, param_sums=isinstance(tile, NormBackwardTile))
    scratch |= param_scratch(tile, arrays, params)
    scratch |= ring_scratch(tile, arrays, streams)

    def body(refs: Any, smem: Any) -> None:
        regs, index = rows.registers(smem), lax.axis_index(_CLUSTER)
        kernel(
            NormBlock(
                options=options,
                tile=tile,
                regs=regs,
                m=m,
                cluster=lax.div(index, groups),
                group=lax.rem(index, groups),
                ref=refs,
                smem=smem,
            )
        )

    used = [options.activation, options.gate_activation if "gate" in arrays else None]
    return launch_named(
        body,
        dict.fromkeys(inputs) | arrays,
        outs,
        scratch,
        grid=(tile.num_clusters(m) * groups,),
        grid_names=(_CLUSTER,),
        kernel_name=name,
        # Exponentials, if any, use the fast units.
        approx_math=any(curve not in (None, *WITHOUT_EXPONENTIALS) for curve in used),
        **rows.launch,
    )


def by_groups(
    options: NormOptions, tile: NormForwardTile | NormBackwardTile, name: str, a: Any
) -> Any:
    """An input's rows as (M, G, N / G), a parameter as (G, N / G), a statistic as (M, G).

    Where a window of a long row is longer than a group, the group is padded.
    """
    if name in ("mean", "rstd"):
        return a.reshape(-1, a.shape[-1])
    groups = a.shape[-1] // options.group_size
    is_param = name in ("weight", "bias")
    a = a.reshape((groups, options.group_size) if is_param else (-1, groups, options.group_size))
    missing = LANES - options.group_size
    if isinstance(tile.rows, LongRow) and missing > 0:
        a = jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, missing),))
    return a


def without_groups(options: NormOptions, a: Any, shape: tuple[int, ...]) -> Any:
    """The inverse, None for None: `shape` of (M, G, N / G) or (G, N / G)."""
    return None if a is None else a[..., : options.group_size].reshape(shape)


def grouped_type(
    options: NormOptions, tile: NormForwardTile | NormBackwardTile, x: Any
) -> jax.ShapeDtypeStruct:
    """(M, G, N / G), the type of `x` as the kernel has it."""
    return jax.eval_shape(lambda x: by_groups(options, tile, "x", x), x)


# Forward

_FORWARD_STREAMS = ["x", "residual", "gate"]
_PARAMS = ["weight", "bias"]


def launch_fwd(
    options: NormOptions,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    gate: Any,
    tile: tiles.NormForwardTile | None = None,
):
    if x.size == 0:
        return reference_fwd(options, x, residual, weight, bias, gate)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias, "gate": gate}
    tile = tile or tiles.forward(tiles.NormSizes.of(options, inputs, _FORWARD_STREAMS, _PARAMS))
    full = grouped_type(options, tile, x)
    stat = jax.ShapeDtypeStruct(full.shape[:2], jnp.float32)
    out = full.update(dtype=jnp.dtype(options.result_dtype))
    outs: dict[str, Any] = {"out": out, "h": None, "mean": None, "rstd": stat}
    if residual is not None:
        outs["h"] = full.update(dtype=jnp.promote_types(x.dtype, residual.dtype))
    outs["rounded"] = full.update(dtype=jnp.dtype(jnp.bfloat16)) if options.rounds_sum else None
    if options.centered:
        outs["mean"] = stat
    results = launch(
        _fwd_kernel,
        f"{options.op}_fwd",
        options,
        tile,
        inputs,
        outs,
        streams=_FORWARD_STREAMS,
        params=_PARAMS,
        row_sums=1 + options.centered,
    )
    stats = (*x.shape[:-1], full.shape[1])  # (..., groups)
    return (
        without_groups(options, results["out"], x.shape),
        without_groups(options, results["h"], x.shape),
        results["mean"].reshape(stats) if options.centered else None,
        results["rstd"].reshape(stats),
        without_groups(options, results["rounded"], x.shape),
    )


class _ForwardWindow(NamedTuple):
    """A window in the forward's registers: (rows, size) of short rows, (size,) of a long one.

    Attributes:
      v: what is normalised, fp32.
      gate: fp32, or None.
      h: x + residual as it is returned, None without a residual.
    """

    v: Any
    gate: Any
    h: Any


def _fwd_kernel(block: NormBlock) -> None:
    run = _Forward(block)
    if not block.tile.clusters:
        run.one_tile()
    elif block.tile.sums_ahead:
        run.tiles_with_sums_ahead()
    else:
        run.tiles()


class _Forward:
    """The forward of a block; `k` is the number of a tile among the block's."""

    def __init__(self, block: NormBlock):
        self.block, self.options, self.regs = block, block.options, block.regs
        self.stream = TileStream(block, _FORWARD_STREAMS)
        self.curves = block.curve_functions
        self.params: Any = None

    def one_tile(self) -> None:
        """Loads the tile before the parameters: it takes longest."""
        self.stream.start()
        held = self._held(0)
        self._prepare()
        self._finish(0, held)

    def tiles(self) -> None:
        """Finishes each tile before it turns to the next."""
        self.stream.start()
        self._prepare()

        @pl.loop(0, self.stream.steps)
        def _(k):
            self._finish(k, self._held(k))

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

    def _held(self, k: Any) -> list[_ForwardWindow] | None:
        """A tile's windows, where they stay in registers."""
        if not self.block.tile.keep:
            return None
        self.stream.wait(k)
        held = self._load(k, self.regs.windows)
        self._store_h(k, self.regs.windows, held)
        return held

    def _load(self, k: Any, windows: Iterable[int]) -> list[_ForwardWindow]:
        read = self.stream.read
        x, residual, gate = ([read(name, k, j) for j in windows] for name in _FORWARD_STREAMS)
        h: list[Any] = [None for _ in windows]
        if self.block.ref.residual is not None:
            dtype = self.block.ref.h.dtype
            h = [(a + b).astype(dtype) for a, b in zip(x, residual, strict=True)]
            x = [self.block.fp32(v) for v in h]
        v = [gated_input(self.options, *pair, self.curves) for pair in zip(x, gate, strict=True)]
        return [_ForwardWindow(*parts) for parts in zip(v, gate, h, strict=True)]

    def _send_statistics(self, k: Any) -> None:
        self.stream.wait(k)
        held = [w.v for w in self._load(k, self.regs.windows)]
        self.regs.send_statistics(k, lambda: held, self.options.centered)

    def _finish(self, k: Any, held: list[_ForwardWindow] | None) -> None:
        """Computes a tile's output from its windows in registers, or reads them for each use."""

        def values() -> list[Any]:
            if held:
                return [w.v for w in held]
            sync_warp()  # or the compiler would keep what was read before
            return [w.v for w in self._load(k, self.regs.windows)]

        if not held:
            self.stream.wait(k)
        found = self.regs.statistics(k, values, self.options.centered)
        mean, rstd = self._store_statistics(k, *found)
        if held:
            self.stream.refill(k)
        for j in self.regs.windows:
            window = held[j] if held else self._load(k, [j])[0]
            if not held:
                self._store_h(k, [j], [window])
            self._store_out(k, j, window, mean, rstd)
        if not held:
            self.stream.refill(k)

    def _store_h(self, k: Any, windows: Iterable[int], held: list[_ForwardWindow]) -> None:
        for j, window in zip(windows, held, strict=True):
            for ref in (self.block.ref.h, self.block.ref.rounded):
                if ref is not None:
                    self._store(ref, k, j, window.h.astype(ref.dtype))

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

    def _store_out(self, k: Any, j: int, window: _ForwardWindow, mean: Any, rstd: Any) -> None:
        xhat = (window.v if mean is None else window.v - mean) * rstd
        scale, bias = self.params.window(j)
        out = output(self.options, xhat, scale, bias, window.gate, self.curves)
        self._store(self.block.ref.out, k, j, out)

    def _store(self, ref: Any, k: Any, j: int, value: Any) -> None:
        self.regs.store(ref, self.stream.row(k), self.block.group, j, value)


# Backward

_BACKWARD_STREAMS = ["h", "dout", "gate", "dh"]


def launch_bwd(
    options: NormOptions,
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
    # The bias is read only where what follows it has a slope, or is wanted.
    sloped = options.activation or (gate is not None and options.norm_before_gate)
    params = ["weight", "bias"] if sloped or options.output else ["weight"]
    tile = tiles.backward(
        tiles.NormSizes.of(options, inputs, _BACKWARD_STREAMS, params), len(gradients)
    )
    full = grouped_type(options, tile, h)
    of_cluster = jax.ShapeDtypeStruct((tile.clusters, *full.shape[1:]), jnp.float32)
    outs: dict[str, Any] = {"dx": full.update(dtype=jnp.dtype(options.x_dtype))}
    outs |= {"dresidual": None, "dgate": None, "dweight": None, "dbias": None}
    if options.separate_dresidual:
        outs["dresidual"] = full.update(dtype=jnp.dtype(options.residual_dtype))
    if gate is not None:
        outs["dgate"] = full.update(dtype=gate.dtype)
    outs["out"] = full.update(dtype=jnp.dtype(options.result_dtype)) if options.output else None
    results = launch(
        lambda block: _Backward(block).run(),
        f"{options.op}_bwd",
        options,
        tile,
        inputs,
        outs | dict.fromkeys(gradients, of_cluster),
        streams=_BACKWARD_STREAMS,
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
        without_groups(options, results["out"], h.shape),
    )


class _BackwardWindow(NamedTuple):
    """Values that the backward computes for a window, in fp32, None where absent.

    (rows, size) of short rows, (size,) of a long one; the names are from the equations in
    :mod:`jaxkern.ops.norm.op`, d = v − mean.
    """

    d: Any
    xhat: Any
    dy: Any
    g: Any
    dgate: Any
    h: Any
    gate: Any


class _TileStatistics(NamedTuple):
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

    def __init__(self, block: NormBlock):
        self.block, self.options, self.regs = block, block.options, block.regs
        self.stream = TileStream(block, _BACKWARD_STREAMS)
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
        tile = _TileStatistics(
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

    def _add(self, tile: _TileStatistics, dweight: list[Any], dbias: list[Any]) -> Any:
        """Adds to dw and db; the lanes' sums of g · x̂ and of g, and the windows, if kept."""
        regs, stream, m = self.regs, self.stream, self.block.m
        pinned = functools.partial(computed_here, layout=regs.layout)
        lane_sums, kept = [], []
        stream.wait(tile.k)
        for j in regs.windows:
            w = self._compute(tile, j)
            if w.dgate is not None:
                self._store(self.block.ref.dgate, tile, j, w.dgate)
            if self.block.ref.out is not None:
                scale, bias = self.params.window(j)
                out = output(self.options, w.xhat, scale, bias, w.gate, self.curves)
                self._store(self.block.ref.out, tile, j, out)
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

    def _store_dx(self, tile: _TileStatistics, row_sums: list[Any], kept: list[Any]) -> None:
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

    def _compute(self, tile: _TileStatistics, j: int) -> _BackwardWindow:
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
        return _BackwardWindow(d, xhat, dy, times(dy, scale), dgate, h, gate)

    def _load_statistics(self, k: Any) -> tuple[Any, ...]:
        """rstd, and the mean of a layer norm; beyond the last tile, the last one's."""
        ref, group = self.block.ref, self.block.group
        row = self.stream.row(jnp.minimum(k, self.stream.steps - 1))
        refs = (ref.rstd, ref.mean) if self.options.centered else (ref.rstd,)
        return tuple(self.regs.load_stat(r, row, group) for r in refs)

    def _store(self, ref: Any, tile: _TileStatistics, j: int, value: Any) -> None:
        self.regs.store(ref, tile.row, self.block.group, j, value)


# Sums of dw and db over the clusters

_COLUMNS, _WARPGROUP = grid_axes("columns", "warpgroup")
_MAX_WARPGROUPS = 8
_ROWS_PER_WARPGROUP = 16
"""Partial sums that make a warpgroup worthwhile."""


def sum_over_clusters(
    options: NormOptions, partials: list[jax.Array], dtypes: list[Any]
) -> list[jax.Array]:
    """Each of `partials`, (P, G, N) fp32, summed over its first axis in a fixed order: (G, N).

    A block takes 32 to 128 columns. Each of its warpgroups sums an interleaved share of
    the tiles of rows in registers, and the first adds up the sums through shared memory.
    """
    if not partials:
        return []
    count, *shape = partials[0].shape
    width = shape[0] * shape[1]
    fills = lambda blocks: blocks >= num_sms() * 3 // 4
    vec = next((v for v in (4, 2, 1) if width % (32 * v) == 0 and fills(width // (32 * v))), 1)
    columns = 32 * vec
    if count < 4 or width % columns:
        return [jnp.sum(p, axis=0).astype(t) for p, t in zip(partials, dtypes, strict=True)]
    warpgroups = min(2 if interpreted() else _MAX_WARPGROUPS, -(-count // _ROWS_PER_WARPGROUP))
    # All that a warpgroup reads is on its way at once.
    rows = ShortRows(4 * min(count // 4, -(-count // (4 * warpgroups))), columns, vec)
    in_block = (len(partials), warpgroups * rows.unit, columns)
    scratch: dict[str, Any] = {"shared": plgpu.SMEM(in_block, jnp.float32)}
    if interpreted():
        scratch["all_stored"] = plgpu.Barrier(num_arrivals=warpgroups)
    blocks = width // columns
    sums = launch_kernel(
        functools.partial(_sum_kernel, rows, count, warpgroups, len(partials)),
        out_type=tuple(jax.ShapeDtypeStruct((blocks, columns), t) for t in dtypes),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=(_COLUMNS,),
        num_threads=warpgroups,
        thread_name=_WARPGROUP,
        kernel_name=f"{options.op}_sum",
    )(*(p.reshape(count, blocks, columns) for p in partials))
    return [s.reshape(shape) for s in sums]


def _sum_kernel(
    rows: ShortRows, count: int, warpgroups: int, arrays: int, *refs: Any, **smem: Any
) -> None:
    warpgroup, column = lax.axis_index(_WARPGROUP), lax.axis_index(_COLUMNS)
    regs = rows.registers(types.SimpleNamespace(**smem))

    def step(k: Any, totals: Any) -> Any:
        tile = warpgroup + k * warpgroups
        load = lambda ref: regs.load(ref, regs.first_row(tile, count), column, 0)
        read = [load(ref) for ref in refs[:arrays]]  # (rows, columns)
        return tuple(
            regs.add_to_param_sum(total, regs.without_repeated(tile, count, value))
            for total, value in zip(totals, read, strict=True)
        )

    steps = lax.div(rows.tiles(count) - warpgroup + warpgroups - 1, warpgroups)
    totals = lax.fori_loop(0, steps, step, (regs.zero_param_sum(),) * arrays)  # (unit, columns)
    for i, total in enumerate(totals):
        store(smem["shared"].at[i, pl.ds(warpgroup * rows.unit, rows.unit)], total)
    if not interpreted():
        sync_block()
    else:
        plgpu.barrier_arrive(smem["all_stored"])
        plgpu.barrier_wait(smem["all_stored"])

    @pl.when(warpgroup == 0)
    def _():
        for i, out in enumerate(refs[arrays:]):
            every = range(warpgroups * rows.unit)
            held = [regs.load_columns(smem["shared"].at[i, r]) for r in every]
            store(out.at[column], sum(held[1:], start=held[0]).astype(out.dtype))
