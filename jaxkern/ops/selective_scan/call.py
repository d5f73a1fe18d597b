"""The arrays of a call as the kernels take them, and the launch of a kernel on them."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import shared_memory
from jaxkern.mosaic.named import launch_named
from jaxkern.ops.segments import with_zeros
from jaxkern.ops.selective_scan.blocks import (
    BLOCK,
    KEEP_STEPS,
    WARPGROUP,
    Block,
    Scan,
    TokenRing,
    TokenTiles,
    fp32_array,
    stored,
)
from jaxkern.ops.selective_scan.reference import CHUNK, Options
from jaxkern.ops.selective_scan.tiles import Grid, Tile


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)


_OVERHEAD = 3584
"""Bytes of shared memory for barriers and what a block takes for itself."""


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The shared memory of a kernel that works on some chunks at a time.

    Attributes:
      rings: of token arrays.
      own: sizes of each warpgroup's fp32 arrays, by name.
      sums: the shape of an fp32 array that a block's warpgroups share; ``None`` for none.
    """

    rings: list[TokenTiles]
    own: dict[str, tuple[int, ...]]
    sums: tuple[int, ...] | None = None

    def bytes(self, warpgroups: int) -> int:
        """What one of a block's `warpgroups` takes."""
        own = sum(map(math.prod, self.own.values()))
        shared = math.prod(self.sums) // warpgroups if self.sums else 0
        return sum(ring.bytes() for ring in self.rings) + 4 * (own + shared)


class Call:
    """The arrays of a call as the kernels take them: whole chunks and blocks, groups in a row."""

    def __init__(
        self,
        options: Options,
        tile: Tile,
        warpgroups: int,
        every: int,
        *arrays: Any,
    ):
        x, dt, A, B, C, D, z, dt_bias, keep, crossed = arrays
        f32 = jnp.float32
        self.tile = tile
        self.width = tile.width * warpgroups  # of a block
        self.batch, self.length, self.groups, self.dim = x.shape
        self.states = A.shape[-1]
        exact = any(v is not None and v.dtype == f32 for v in (x, dt, z))
        none = jnp.zeros((self.groups, self.dim), f32)
        self.arrays = {
            "x": self.pad_tokens(x),
            "dt": self.pad_tokens(dt),
            "z": None if z is None else self.pad_tokens(z),
            "weights": self.pad_weights(jnp.concatenate([B, C])),
            "A": self.pad_states(A.astype(f32)),
            "D": self.pad_channels((none if D is None else D).astype(f32), 1),
            "dt_bias": self.pad_channels((none if dt_bias is None else dt_bias).astype(f32), 1),
            "keep": None if keep is None else self.pad_keep(keep.astype(f32), 1),
            "crossed": None if crossed is None else self.pad_keep(crossed, -1),
        }
        padded, channels = self.arrays["x"].shape[1:]
        self.blocks = channels // self.width
        self.scan = Scan(
            options=options,
            tile=tile,
            length=self.length,
            padded=padded,
            channels=channels,
            blocks=self.blocks,
            blocks_per_group=self.blocks // self.groups,
            warpgroups=warpgroups,
            exact=exact,
            every=every,
            grid=Grid(1, 1, 1, 1),
            stage_width=tile.width,
        )

    def pad_channels(self, v: Any, axis: int) -> Any:
        """(…, G, P, …) with P at `axis` as (…, D, …), every group in whole blocks."""
        v = _pad(v, (axis, self.width))
        return v.reshape(
            *v.shape[: axis - 1], v.shape[axis - 1] * v.shape[axis], *v.shape[axis + 1 :]
        )

    def pad_tokens(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (1, CHUNK)), 3)

    def pad_keep(self, v: Any, value: int) -> Any:
        """(B, L) with `value` after its end, as far as the copy of the last chunk reads."""
        missing = -v.shape[1] % CHUNK + KEEP_STEPS - CHUNK
        return jnp.pad(v, ((0, 0), (0, missing)), constant_values=value)

    def pad_states(self, v: Any) -> Any:
        return self.pad_channels(_pad(v, (v.ndim - 1, self.tile.all_states)), v.ndim - 2)

    def pad_weights(self, v: Any) -> Any:
        """(2B, L, G, N) in fp32, N in parts of at most 256: the most that the TMA takes."""
        v = self.tile.copies(_pad(v.astype(jnp.float32), (1, CHUNK), (3, self.tile.all_states)))
        parts = -(-v.shape[3] // 256)
        return v.reshape(*v.shape[:3], parts, v.shape[3] // parts)

    def cut_channels(self, v: Any, axis: int) -> Any:
        """Undoes pad_channels, `axis` that of D."""
        v = v.reshape(
            *v.shape[:axis], self.groups, v.shape[axis] // self.groups, *v.shape[axis + 1 :]
        )
        return lax.slice_in_dim(v, 0, self.dim, axis=axis + 1)

    def cut_tokens(self, v: Any) -> Any:
        return self.cut_channels(v[:, : self.length], 2)

    def cut_states(self, v: Any) -> Any:
        return self.cut_channels(v[..., : self.states], v.ndim - 2)

    @property
    def columns(self) -> int:
        return self.batch * self.blocks

    def cut(self, grid: Grid) -> Scan:
        self.scan = dataclasses.replace(self.scan, grid=grid)
        return self.scan

    def of_segments(self, states: Any) -> Any:
        """Initial states of segments, or gradients of final ones, and one of zeros behind them."""
        return None if states is None else with_zeros(self.pad_states(states.astype(jnp.float32)))

    def states_like(self, *lead: int) -> Any:
        return fp32_array(*lead, self.scan.channels, self.tile.all_states)

    def per_block(self, *lead: int) -> Any:
        return fp32_array(*lead, self.width, self.tile.all_states)

    def sum_over_parts(self, v: jax.Array) -> jax.Array:
        """(D, ...) from (blocks, width, ...): the sums over batch rows and parts."""
        v = self.scan.grid.sum(v)
        return v.reshape(self.batch, self.scan.channels, *v.shape[2:]).sum(0)

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        scan: Scan,
        ins: dict[str, Any],
        outs: dict[str, Any],
        memory: Scratch,
        barriers: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Launches `kernel` on the grid of `scan` and on arrays by name.

        Beside `memory` there are `barriers`.
        """

        def body(refs: Any, smem: Any) -> None:
            of_warpgroup = {
                name: getattr(smem, name).at[Block(scan).warpgroup] for name in memory.own
            }
            smem = types.SimpleNamespace(**vars(smem) | of_warpgroup)
            kernel(scan, refs, smem, *(TokenRing(r, refs, smem, scan) for r in memory.rings))

        fp32 = lambda *shape: plgpu.SMEM(shape, jnp.float32)
        scratch = {k: fp32(scan.warpgroups, *v) for k, v in memory.own.items()}
        for ring in memory.rings:
            scratch |= ring.scratch()
        if memory.sums:
            scratch["sums"] = fp32(*memory.sums)
        threads: dict[str, Any] = {}
        if scan.warpgroups > 1:
            threads = {"num_threads": scan.warpgroups, "thread_name": WARPGROUP}
        return launch_named(
            body,
            ins,
            outs,
            scratch | (barriers or {}),
            **threads,
            grid=(scan.grid.count,),
            grid_names=(BLOCK,),
            kernel_name=name,
            approx_math=True,
        )

    def scratch(
        self, most: int, of_chunks: Callable[[int], Scratch], resident: int = 1
    ) -> tuple[int, Scratch]:
        """As many chunks at a time as there is shared memory for, and the scratch memory of these.

        Args:
          most: chunks; more are of no use.
          of_chunks: the scratch memory for a number of chunks.
          resident: warpgroups that share a multiprocessor.
        """
        room = shared_memory() // max(resident, self.scan.warpgroups) - _OVERHEAD
        for chunks in (4, 2):
            scratch = of_chunks(chunks)
            if chunks <= most and scratch.bytes(self.scan.warpgroups) <= room:
                return chunks, scratch
        return 1, of_chunks(1)

    def fits(self, scratch: Scratch) -> bool:
        """Whether a block of all its warpgroups has that much shared memory."""
        warpgroups = self.scan.warpgroups
        return warpgroups * scratch.bytes(warpgroups) + _OVERHEAD <= shared_memory()

    def pick(self, names: str) -> dict[str, Any]:
        """The arrays of these names; B and C are the two halves of one."""
        return {stored(name): self.arrays[stored(name)] for name in names.split()}

    def ring(self, prefix: str, chunks: int, names: str, **others: Any) -> TokenTiles:
        arrays = {name: self.arrays[stored(name)] for name in names.split()} | others
        return TokenTiles(self.scan, prefix, chunks, arrays)
