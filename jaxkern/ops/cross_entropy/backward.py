"""The backward's kernel: overwrites logits by their gradient, one read and one write.

A share of a row that is ignored is only written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.launch import LANES, grid_axes, launch_in_place, launch_kernel
from jaxkern.mosaic.registers import row_type
from jaxkern.mosaic.units import load_units, store_units
from jaxkern.ops.cross_entropy.forward import exponential, positions_in_shares
from jaxkern.ops.cross_entropy.rows import IGNORED, Rows
from jaxkern.ops.cross_entropy.tiles import NONE, Tile
from jaxkern.ops.curves import kernel_functions

(SHARE,) = grid_axes("share")


def launch_backward(
    options: Rows,
    logits: Any,
    position: Any,
    lse: Any,
    of_softmax: Any,
    dloss: Any,
    *,
    sliced: bool = False,
) -> tuple[Any]:
    """du, in the memory of `logits` if nothing else needs them; that of slices, in its own."""
    if logits.size == 0:
        return (logits,)
    position = positions_in_shares(logits, position)
    kernel = _kernel(options, logits, position, sliced=sliced)
    numbers = [v.reshape(-1) for v in (position, lse, of_softmax, dloss)]
    flat, launch = logits.reshape(-1), _launch(position.size)
    if sliced:
        out_type = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        du = launch_kernel(kernel, out_type=out_type, **launch)(*numbers, flat)
    else:
        (du,) = launch_in_place(lambda *refs: kernel(*refs, refs[-1]), numbers, [flat], **launch)
    return (du.reshape(logits.shape),)


def _launch(shares: int) -> dict[str, Any]:
    """How the kernel is launched."""
    return {
        "grid": (shares,),
        "grid_names": (SHARE,),
        "kernel_name": "cross_entropy_bwd",
        "approx_math": True,
    }


def _kernel(options: Rows, logits: Any, position: Any, *, sliced: bool) -> Any:
    in_row = position.shape[-1]
    size = logits.shape[-1] // in_row
    tile = Tile.of(position.size, size, logits.dtype.itemsize, sliced)

    def kernel(position: Any, lse: Any, of_softmax: Any, dloss: Any, source: Any, du: Any) -> None:
        share = lax.axis_index(SHARE)
        row = lax.div(share, in_row)
        label = position[share]
        counted = label != IGNORED
        block = _Block(options, tile, share.astype(jnp.uint32), source, du)

        @pl.when(counted)
        def _():
            block.write(label, (lse[row], of_softmax[row], dloss[row]))

        @pl.when(jnp.logical_not(counted))
        def _():
            block.clear()

    return kernel


class _Block:
    """A share of the logits, and of their gradient, which may be the same memory."""

    def __init__(self, options: Rows, tile: Tile, share: Any, logits: Any, du: Any):
        self.options, self.tile, self.share = options, tile, share
        self.logits, self.du = logits, du
        self.exact = logits.dtype == jnp.float32

    def write(self, label: Any, numbers: tuple[Any, Any, Any]) -> None:
        """Writes du; `label` is its element, `numbers` are lse and two cotangents."""
        tile = self.tile

        def step(units: list[Any], carry: Any) -> Any:
            loaded = [
                load_units(self.logits, u.clamped(), tile.vec, step=tile.access) for u in units
            ]
            for of_lanes, logits in zip(units, loaded, strict=True):
                here = tile.iota() == label - of_lanes.column
                self._store(of_lanes, self._gradient(logits, here, numbers, tile.layout))
            return carry

        tile.over_units(self.share, step, jnp.int32(0))
        if not tile.aligned:
            index, column, _ = tile.edges(self.share)
            some = jnp.where(index == jnp.uint32(NONE), jnp.uint32(0), index)
            logits = load_units(self.logits, some, 1)
            du = self._gradient(logits, column == label, numbers, row_type(1).layout)
            self._store_edges(index, du)

    def clear(self) -> None:
        """Writes zeros."""

        def step(units: list[Any], carry: Any) -> Any:
            for of_lanes in units:
                self._store(of_lanes, self.tile.full(0.0))
            return carry

        self.tile.over_units(self.share, step, jnp.int32(0))
        if not self.tile.aligned:
            zeros = jnp.zeros((LANES,), jnp.float32)
            self._store_edges(self.tile.edges(self.share)[0], zeros)

    def _gradient(self, logits: Any, here: Any, numbers: Any, layout: Any) -> jax.Array:
        lse, of_softmax, dloss = numbers
        terms = self.options.terms
        capped = terms.capped(logits, kernel_functions(self.exact, layout).tanh)
        du = of_softmax * exponential(self.exact, capped - lse)
        if terms.smoothing:
            du = du - dloss * (terms.smoothing / self.options.classes)
        du = jnp.where(here, du - dloss * (1 - terms.smoothing), du)
        if terms.cap is not None:
            slope = capped * (1 / terms.cap)
            du = du * (1 - slope * slope)
        return du

    def _store(self, units: Any, du: jax.Array) -> None:
        # Past the end nothing is stored: another block has not read it yet.
        end = units.end if units.masked else None
        below = None if end is None else jnp.full((LANES,), end, jnp.uint32)
        tile = self.tile
        store_units(self.du, units.of_lanes, du, tile.vec, step=tile.access, below=below)

    def _store_edges(self, index: jax.Array, du: jax.Array) -> None:
        store_units(self.du, index, du, 1, below=jnp.full((LANES,), NONE, jnp.uint32))
