"""The kernel of one token of a scan, for decoding: the state is updated where it lies.

    h   ← exp(s · A) · h + s · x · B          (rows, N)     s = step size, of dt and dt_bias
    out = (h · C + D · x) · silu(z)           (rows,)

A row is a channel: of Mamba one with a step size and N rates of its own, of Mamba-2 one of the P of
a head, which share a step size and one rate. A token reads and writes 8 bytes of every state, and
little else: for 64 sequences of a layer of mamba2-130m, 50 MB of states, an H200 takes 29.5 µs, at
79% of its copy's rate, and an H100 35.9, at 94%, where XLA, which writes the new states to a
temporary and copies them, takes 55.6 and 76.6 (JAX 0.11.2; bench/results).

A block is a warpgroup, which has some rows of one sequence and group. A row's states lie in up to
32 neighbouring lanes, four in each access; the products with C are summed over them by shuffles. A
lane loads all its states, computes, and stores them, so that a block needs no shared memory.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.core.arguments import unfit
from jaxkern.core.dispatch import Mode
from jaxkern.mosaic.arithmetic import sigmoid, softplus
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sum_lanes
from jaxkern.mosaic.launch import LANES, grid_axes, launch_in_place, launch_kernel, num_sms
from jaxkern.ops.columns import Columns
from jaxkern.ops.scan_options import StepSizes, clipped, put_layer, take_layer

BLOCK = grid_axes("block")[0]

_VECTOR = 4
"""States of an access, 16 bytes."""

_MOST_ROWS = 4
"""The most rows of a lane: its accesses, all at a time, keep an H100's memory busy."""

_MAX_STATES = 512


@dataclasses.dataclass(frozen=True)
class ScanStepOptions:
    """The static arguments of a step.

    Attributes:
      sizes: makes step sizes from dt.
      mode: the implementation that runs.
      places: of arguments that are columns, see :class:`StepPass`.
    """

    sizes: StepSizes
    mode: Mode
    places: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepTile:
    """The rows of a block, and the lanes that share a row.

    Attributes:
      lanes: lanes of a row.
      states: states of a row, N.
      rows: rows of a lane.
    """

    lanes: int
    states: int
    rows: int

    @classmethod
    def of(cls, states: int, together: int, count: int) -> "StepTile":
        """Chooses the most rows of a lane whose blocks still fill the GPU four times.

        Args:
          states: states of a row, a power of two.
          together: rows that share a step size, or all of a sequence and group, into which a
            block must fit.
          count: all rows.
        """
        lanes = min(32, states // _VECTOR)
        fits = [
            rows
            for rows in (1, 2, _MOST_ROWS)
            if rows <= lanes and together % (rows * LANES // lanes) == 0
        ]
        enough = [rows for rows in fits if count * lanes >= 4 * num_sms() * rows * LANES]
        return cls(lanes, states, max(enough, default=min(fits)))

    @property
    def side_by_side(self) -> int:
        """Rows of the warpgroup at a time, one a lane."""
        return LANES // self.lanes

    @property
    def all_rows(self) -> int:
        """Rows of a block."""
        return self.rows * self.side_by_side

    @property
    def accesses(self) -> range:
        """First state of each access of a row's lanes."""
        return range(0, self.states, _VECTOR * self.lanes)

    def of_states(self, row: int, first: int) -> LaneOffsets:
        """Offsets of a lane's states of its `row`, in the access that begins at state `first`."""
        apart = (self.lanes, self.side_by_side, self.states)
        start = row * self.side_by_side * self.states + first
        return LaneOffsets(((1, self.lanes, _VECTOR), apart), start)

    def of_weights(self, first: int) -> LaneOffsets:
        """Offsets of the same states of B and C, which all rows share."""
        return LaneOffsets(((1, self.lanes, _VECTOR),), first)

    def of_row(self, row: int) -> LaneOffsets:
        """Offset of the value of a lane's `row`, one for each row."""
        return LaneOffsets(((self.lanes, self.side_by_side, 1),), row * self.side_by_side)

    @property
    def distances(self) -> list[int]:
        """Distances of the lanes of a row."""
        return [d for d in (16, 8, 4, 2, 1) if d < self.lanes]

    def summed_row(self) -> LaneOffsets:
        """Offset of the row whose sum this lane holds."""
        halvings, apart = self.rows.bit_length() - 1, self.side_by_side
        digits = [
            (distance, 2, apart * (self.rows >> (i + 1)))
            for i, distance in enumerate(self.distances[:halvings])
        ]
        return LaneOffsets((*digits, (self.lanes, apart, 1)))


def unsupported(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, *rest: Any) -> str | None:
    """Why the kernel cannot take a step.

    The arrays are those of :func:`launch`, but `state` is of one layer, (B, G, …, N).
    """
    named = zip(("D", "z", "dt_bias"), rest, strict=True)
    if reason := unfit_token(state, x=x, dt=dt, A=A, B=B, C=C, **dict(named)):
        return reason
    states = state.shape[-1]
    if states & (states - 1) or not 2 * _VECTOR <= states <= _MAX_STATES:
        return (
            f"it has {states} states, and the kernel takes a power of two from {2 * _VECTOR} to "
            f"{_MAX_STATES}"
        )
    rows, together = _together(x.shape, dt.shape)
    least = LANES // min(32, states // _VECTOR)
    if x.size and together % least:
        what = "a head" if together < rows else "a group"
        return f"{what} has {together} channels, and the kernel takes multiples of {least}"
    return None


def _together(x: tuple[int, ...], dt: tuple[int, ...]) -> tuple[int, int]:
    """Rows of a sequence and group, and rows into which a block must fit."""
    rows, step_sizes = math.prod(x[2:]), math.prod(dt[2:])
    return rows, rows // step_sizes if step_sizes < rows else rows


def launch(options: ScanStepOptions, state: Any, layer: Any, *arrays: Any) -> tuple[Any, ...]:
    """The output and the state, by a kernel that updates it where it lies.

    Args:
      options: the static arguments.
      state: (layers, B, G, …, N), fp32.
      layer: number of the layer, (1,), int32; ``None`` where there is one.
      *arrays: x (B, G, …), dt (B, G, …), A (G, …) or (G, …, N), B and C (B, G, N), D (G, …),
        z (B, G, …) and dt_bias (G, …), the last three or ``None``; those with B may be columns.
    """
    return _launch(update_in_place, options, state, layer, *arrays)


def launch_of_slices(
    options: ScanStepOptions, state: Any, layer: Any, *arrays: Any
) -> tuple[Any, ...]:
    """Does as :func:`launch` under ``vmap``."""
    return _launch(update_slices, options, state, layer, *arrays)


def _launch(
    update: Any, options: ScanStepOptions, state: Any, layer: Any, x: Any, *others: Any
) -> tuple[Any, ...]:
    if x.size == 0:
        return Columns.of(x).copied(), state
    step = _Step.of(options.sizes, state.shape, x, *others)
    flat = state.reshape(state.shape[0], *step.of_state)
    out_type = jax.ShapeDtypeStruct((step.columns, step.rows), x.dtype)
    launch = {"grid": (step.blocks,), "grid_names": (BLOCK,), "kernel_name": "scan_step"}
    out, after = update(step.run, out_type, step.arrays, flat, layer, **launch)
    return out.reshape(x.shape), after.reshape(state.shape)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One token of a scan, with flat arrays.

    Attributes:
      sizes: makes step sizes from dt.
      tile: tile of a block.
      columns: sequences and groups, B · G.
      groups: G.
      rows: rows of a sequence and group, M.
      arrays: arrays by their names, ``None`` for absent ones. Those of a token are rows (B, width),
        the others (G, …): dt_bias a divisor of M, A that or M · N, D a divisor of M.
      of_token: first column of each of a token's arrays in its row, and columns of a group: of x
        and z M, of dt a divisor of M, of B and C N.
    """

    sizes: StepSizes
    tile: StepTile
    columns: int
    groups: int
    rows: int
    arrays: dict[str, Any]
    of_token: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, sizes: StepSizes, state: Any, x, dt, A, B, C, D, z, dt_bias) -> "_Step":
        (batch, groups), states = x.shape[:2], state[-1]
        rows, together = _together(x.shape, dt.shape)
        named = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
        tokens = {name: Columns.of(v) for name, v in named.items() if v is not None}
        of_token = {name: (v.first, math.prod(v.rest) // groups) for name, v in tokens.items()}
        params = {"A": A, "D": D, "dt_bias": dt_bias}
        arrays = {name: v if v is None else v.reshape(groups, -1) for name, v in params.items()}
        arrays |= {"z": None} | {name: v.row for name, v in tokens.items()}
        tile = StepTile.of(states, together, batch * groups * rows)
        return cls(sizes, tile, batch * groups, groups, rows, arrays, of_token)

    @property
    def of_state(self) -> tuple[int, int]:
        """(B · G, M · N)."""
        return self.columns, self.rows * self.tile.states

    @property
    def parts(self) -> int:
        """Blocks of a sequence and group."""
        return self.rows // self.tile.all_rows

    @property
    def blocks(self) -> int:
        """All blocks."""
        return self.columns * self.parts

    def run(self, refs: Any) -> None:
        """Runs the kernel."""
        tile, block = self.tile, lax.axis_index(BLOCK)
        column = lax.div(block, self.parts)
        sequence, group = lax.div(column, self.groups), lax.rem(column, self.groups)
        first_row = lax.rem(block, self.parts) * tile.all_rows

        def of_param(ref: Any) -> _StepRows:
            return _StepRows(tile, ref if ref is None else ref.at[group], first_row, self.rows)

        def of_group(name: str) -> Any:
            if getattr(refs, name) is None:
                return None
            first, count = self.of_token[name]
            return getattr(refs, name).at[sequence, pl.ds(first + group * count, count)]

        of_token = lambda name: _StepRows(tile, of_group(name), first_row, self.rows)
        lanes = [*range(tile.rows)]
        x, dt, bias = of_token("x"), of_token("dt"), of_param(refs.dt_bias)
        x_summed, D, z = (v.summed() for v in (x, of_param(refs.D), of_token("z")))
        steps = dt.each(lambda row: self._step_size(dt.of(row), bias.of(row)))
        entering = [steps[row] * x.of(row) for row in lanes]
        own = pl.ds(first_row * tile.states, tile.all_rows * tile.states)
        before, after = (ref.at[refs.layer, column, own] for ref in (refs.before, refs.after))
        rated = refs.A.shape[1] == self.rows * tile.states
        if rated:
            rates = refs.A.at[group, own]
        else:
            rate = of_param(refs.A)
            decays = rate.each(lambda row: jnp.exp(steps[row] * rate.of(row)))
        products: list[Any] = [0.0] * tile.rows
        for start in tile.accesses:
            weights = tile.of_weights(start)
            B, C = (
                load_lanes(of_group(name), weights, _VECTOR, aligned=self.aligned(name))
                for name in ("B", "C")
            )
            where = [tile.of_states(row, start) for row in lanes]
            loaded = [load_lanes(before, at, _VECTOR) for at in where]
            for row in lanes:
                h = loaded[row]
                if rated:
                    a = [jnp.exp(steps[row] * v) for v in load_lanes(rates, where[row], _VECTOR)]
                else:
                    a = [decays[row]] * _VECTOR
                h = [d * v + entering[row] * b for d, v, b in zip(a, h, B, strict=True)]
                store_lanes(after, where[row], h)
                products[row] += sum(v * c for v, c in zip(h, C, strict=True))
        (y,) = sum_lanes(products, tile.distances)
        if D is not None:
            y = y + D * x_summed
        if z is not None:
            y = y * (z * sigmoid(z, exact=True))
        store_lanes(refs.out.at[column, pl.ds(first_row, tile.all_rows)], tile.summed_row(), [y])

    def aligned(self, name: str) -> int:
        """Columns to a multiple of which a group's begin, for any group and sequence."""
        return math.gcd(self.arrays[name].shape[1], *self.of_token[name])

    def _step_size(self, dt: jax.Array, bias: jax.Array | None) -> jax.Array:
        dt = dt if bias is None else dt + bias
        limits = dataclasses.replace(self.sizes, softplus=False)
        return limits(softplus(dt, exact=True) if self.sizes.softplus else dt)


@dataclasses.dataclass(frozen=True)
class _StepRows:
    """An array's values for a block's rows; neighbours may share one.

    Attributes:
      tile: the block's tile.
      ref: (a divisor of `count`,), or ``None``.
      first: first row of the block.
      count: number of all rows.
    """

    tile: StepTile
    ref: Any
    first: Any
    count: int

    @property
    def shared(self) -> int:
        """Rows that share a value: 1, or a multiple of a block's."""
        return self.count // self.ref.shape[0]

    def each(self, value: Callable[[int], Any]) -> list[Any]:
        """Computes `value` for each row of a lane, once if all share it."""
        if self.shared > 1:
            return [value(0)] * self.tile.rows
        return [*map(value, range(self.tile.rows))]

    def of(self, row: int) -> Any:
        """Loads the value of a lane's `row`; ``None`` from an absent array."""
        return self._load(self.tile.of_row(row))

    def summed(self) -> Any:
        """Loads the value of the row whose sum this lane holds."""
        return self._load(self.tile.summed_row())

    def _load(self, offsets: LaneOffsets) -> Any:
        if self.ref is None:
            return None
        own = pl.ds(self.first, self.tile.all_rows)
        if self.shared > 1:
            own, offsets = pl.ds(lax.div(self.first, self.shared), 1), LaneOffsets()
        return load_lanes(self.ref.at[own], offsets)[0]


# For the kernel of any recurrence: one layer's state is updated


def unfit_token(state: Any, **arrays: Any) -> str | None:
    """Why no kernel takes such arrays of a token, ``None`` for absent ones, or such a state."""
    if reason := unfit(**arrays):
        return reason
    if state.dtype != jnp.float32:
        return f"state is {state.dtype}, and the kernel updates float32"
    return None


def update_in_place(
    run: Callable[[Any], None],
    out_type: Any,
    arrays: dict[str, Any],
    state: Any,
    layer: Any,
    **launch: Any,
) -> tuple[Any, Any]:
    """The output and the state, by a kernel that updates one layer's where it lies.

    Args:
      run: the kernel. It takes the references of `arrays` by their names, ``None`` for absent ones;
        the states of all layers as ``before`` and as ``after``, and the number ``layer``; and
        ``out``.
      out_type: shape and dtype of the output.
      arrays: what the kernel reads, by name.
      state: (layers, …).
      layer: number of the layer, (1,), int32; ``None`` where there is one.
      **launch: the arguments of :func:`launch_kernel`.
    """
    fixed = {n: v for n, v in ({"layer": layer} | arrays).items() if v is not None}

    def kernel(*references: Any) -> None:
        *given, states, out = references
        given = dict(zip(fixed, given, strict=True))
        run(_refs(arrays, given, before=states, after=states, out=out))

    after, out = launch_in_place(kernel, fixed.values(), [state], [out_type], **launch)
    return out, after


def update_slices(
    run: Callable[[Any], None],
    out_type: Any,
    arrays: dict[str, Any],
    state: Any,
    layer: Any,
    **launch: Any,
) -> tuple[Any, Any]:
    """Does as :func:`update_in_place` under ``vmap``, but copies the state."""
    before = take_layer(state, layer)[None]
    fixed = {n: v for n, v in (arrays | {"before": before}).items() if v is not None}

    def kernel(*references: Any) -> None:
        *given, after, out = references
        run(_refs(arrays, dict(zip(fixed, given, strict=True)), after=after, out=out))

    outs = jax.ShapeDtypeStruct(before.shape, before.dtype), out_type
    after, out = launch_kernel(kernel, out_type=outs, **launch)(*fixed.values())
    return out, put_layer(state, layer, after[0])


def _refs(arrays: dict[str, Any], given: dict[str, Any], **others: Any) -> Any:
    """The references by their names, ``None`` for absent arrays, and the layer's number."""
    refs = types.SimpleNamespace(**dict.fromkeys(arrays) | {"layer": None} | given | others)
    refs.layer = 0 if refs.layer is None else clipped(refs.layer[0], refs.before.shape[0])
    return refs
