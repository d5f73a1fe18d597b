"""The inputs of the SSD scan's kernels: arrays in whole blocks, and sums of log-decays.

Two kernels make and undo the sums. Arrays of tokens have their heads side by side, (B, L, H), and
the scan takes a head's tokens side by side: a block transposes a chunk of 128 tokens of 8 or 16
heads, and a lane has a run of tokens of one head. What it adds of other runs comes through shared
memory, in a fixed order. Each moves 16 bytes for a token and head; at (8, 4096, 64) that takes an
H200 18.5 and 10.7 µs, where a copy of the same size takes 8 (JAX 0.11.2).
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.lanes import LaneOffsets, load_lanes, store_lanes, sync_warpgroup
from jaxkern.mosaic.launch import LANES, launch_named
from jaxkern.mosaic.wgmma import WARPS, start_fetch
from jaxkern.ops.chunks import chunk_sums_of, padded
from jaxkern.ops.ssd.tiles import (
    BLOCK,
    BOX,
    CHUNK,
    HELD_STATES,
    SLICE,
    STEP,
    TILE_ROWS,
    WARPGROUP,
    SsdTile,
    by_mma,
)

HEADS = 8
"""Heads per block are a multiple of this: 32 bytes of a token, a sector of memory."""
MOST_HEADS = 16
"""The most heads of a block, 64 bytes of a token."""
LAST, SKIP = 0, 1
KINDS = 2
"""Gradients with one number per chunk, of its last sum and of D, and their count. Of each the
backward stores the sums of a warpgroup's four warps."""


def sum_of(values: Iterable[jax.Array]) -> jax.Array:
    """The sum of arrays, from the first one on."""
    return functools.reduce(operator.add, values)


def chunk_sums(a: jax.Array, dt: jax.Array) -> jax.Array:
    """(B, H, chunks, 2, CHUNK): sums of a · log2(e) from a chunk's first token on, and dt.

    Args:
      a, dt: (B, L, H) in fp32, L at least CHUNK and H whole HEADS. What a last chunk lacks has
        steps of size 0, and no decay.
    """
    batch, length, heads = a.shape
    chunks = -(-length // CHUNK)
    if by_mma():
        return chunk_sums_of(a, dt, CHUNK)
    lanes = _Lanes.of(heads)
    return _launch(
        "ssd_steps",
        functools.partial(_sum_chunk, lanes),
        {"a": a, "dt": dt},
        {"steps": jax.ShapeDtypeStruct((batch, heads, chunks, 2, CHUNK), jnp.float32)},
        {"a": lanes.tokens, "dt": lanes.tokens, "steps": lanes.by_head},
        lanes,
        batch * chunks * (heads // lanes.heads),
    )["steps"]


def chunk_sum_grads(
    sums: jax.Array, parts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The gradients of the arguments of :func:`chunk_sums`, and partial sums of dD.

    Args:
      sums: (B, H, chunks, 2, CHUNK), fp32, H in whole HEADS: the gradients of the sums of
        log-decays, in units of a, and of dt.
      parts: (B, H, chunks, 1, WARPS), fp32, what adds up to more of the gradient of a chunk's last
        sum; or of KINDS, the second of which adds up to dD.

    Returns:
      da and ddt, (B, L, H) with L in whole chunks; and the gradient of D for each chunk,
      (B, chunks, H), or ``None``.
    """
    batch, heads, chunks = sums.shape[:3]
    # Past the end of L, Mosaic would store what is contiguous of a tile into the next row.
    length = chunks * CHUNK
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    lanes = _Lanes.of(heads)
    grads = _launch(
        "ssd_steps_bwd",
        functools.partial(_sum_chunk_grads, lanes),
        {"sums": sums, "parts": parts},
        {
            "da": like((batch, length, heads)),
            "ddt": like((batch, length, heads)),
            "dD": like((batch, chunks, heads)) if parts.shape[3] == KINDS else None,
        },
        {
            "da": lanes.tokens,
            "ddt": lanes.tokens,
            "sums": lanes.by_head,
            "parts": plgpu.SMEM((lanes.heads, *parts.shape[3:]), jnp.float32),
        },
        lanes,
        batch * chunks * (heads // lanes.heads),
    )
    return grads["da"], grads["ddt"], grads["dD"]


def plain_step_grads(dc: jax.Array, ds: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """da and ds, (B, L, H) with L in whole steps, in plain JAX.

    Args:
      dc: (B, H, steps, STEP), gradients of the sums of log-decays, in units of a, of each step.
      ds: those of step sizes.
      last: (B, H, steps), what each token of a step gains beside.
    """
    da = jnp.cumsum(dc[..., ::-1], axis=-1)[..., ::-1] + last[..., None]
    by_token = lambda v: v.transpose(0, 2, 3, 1).reshape(v.shape[0], -1, v.shape[1])
    return by_token(da), by_token(ds)


def _launch(
    name: str,
    kernel: Any,
    ins: Any,
    outs: Any,
    scratch: dict[str, Any],
    lanes: "_Lanes",
    blocks: int,
) -> dict[str, Any]:
    """Launches a kernel that fetches two tiles, and adds up what its runs share in `totals`."""
    shared = {
        "totals": plgpu.SMEM((2 * lanes.runs, lanes.heads), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2),
    }
    return launch_named(
        kernel,
        ins,
        outs,
        scratch | shared,
        grid=(blocks,),
        grid_names=(BLOCK,),
        num_threads=1,
        thread_name=WARPGROUP,
        kernel_name=name,
    )


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """Tokens of a lane: its head is its number modulo `heads`, and its run the rest.

    Attributes:
      heads: of a block.
    """

    heads: int

    @classmethod
    def of(cls, heads: int) -> "_Lanes":
        """Lanes for `heads` heads in all."""
        return cls(math.gcd(heads, MOST_HEADS))

    @property
    def runs(self) -> int:
        return LANES // self.heads

    @property
    def run(self) -> int:
        """Tokens of a lane."""
        return CHUNK // self.runs

    @property
    def tokens(self) -> Any:
        """Shared memory for a tile of (B, L, H)."""
        return plgpu.SMEM((CHUNK, self.heads), jnp.float32)

    @property
    def by_head(self) -> Any:
        """Shared memory for the two numbers of each token of a head."""
        return plgpu.SMEM((self.heads, 2, CHUNK), jnp.float32)

    def offsets(self, head: int, run: int, start: int = 0) -> LaneOffsets:
        """The offsets of lanes whose heads are `head` elements apart, and their runs `run`."""
        return LaneOffsets(((1, self.heads, head), (self.heads, self.runs, run)), start)

    def token(self, n: int) -> LaneOffsets:
        """The n-th token of a lane's run in `tokens`."""
        return self.offsets(1, self.run * self.heads, n * self.heads)

    def run_of_head(self, k: int) -> LaneOffsets:
        """A lane's run of the k-th number in `by_head`."""
        return self.offsets(2 * CHUNK, self.run, k * CHUNK)

    def load_tokens(self, ref: Any) -> list[Any]:
        return [load_lanes(ref, self.token(n))[0] for n in range(self.run)]

    def sum_of_others(self, totals: Any, own: jax.Array, *, after: bool) -> jax.Array:
        """The sum of the runs of a lane's head before its own, or after it; each has `own`.

        `totals` is shared memory, (2 · runs, heads): beyond the first or the last run are zeros.
        """
        row = lambda n: self.offsets(1, self.heads, n * self.heads)
        first, sign = (0, 1) if after else (self.runs, -1)
        store_lanes(totals, row(first), [own])
        store_lanes(totals, row(self.runs - first), [jnp.zeros_like(own)])
        sync_warpgroup()
        return sum_of(load_lanes(totals, row(first + sign * n))[0] for n in range(1, self.runs))

    def sum_of_parts(self, parts: Any, kind: int) -> jax.Array:
        """The sum of the parts of a kind for a lane's head."""
        offsets = self.offsets(parts.shape[1] * WARPS, 0, kind * WARPS)
        return sum_of(load_lanes(parts, offsets, WARPS))


@dataclasses.dataclass(frozen=True)
class _At:
    """The chunk of a block, and its heads."""

    batch: Any
    chunk: Any
    heads: Any

    @classmethod
    def of(cls, lanes: _Lanes, tokens: Any) -> "_At":
        """The chunk and heads of this block; `tokens` is (B, L, H)."""
        _, length, heads = tokens.shape
        chunks, columns = -(-length // CHUNK), heads // lanes.heads
        block = lax.axis_index(BLOCK)
        column, rest = lax.rem(block, columns), lax.div(block, columns)
        own = pl.ds(column * lanes.heads, lanes.heads)
        return cls(lax.div(rest, chunks), lax.rem(rest, chunks), own)

    def tokens(self, ref: Any) -> Any:
        """(CHUNK, heads) of (B, L, H)."""
        return ref.at[self.batch, pl.ds(self.chunk * CHUNK, CHUNK), self.heads]

    def by_head(self, ref: Any) -> Any:
        """(heads, …) of (B, H, chunks, …)."""
        return ref.at[self.batch, self.heads, self.chunk]


def _sum_chunk(lanes: _Lanes, refs: Any, smem: Any) -> None:
    at = _At.of(lanes, refs.a)
    for name in ("a", "dt"):
        start_fetch(at.tokens(getattr(refs, name)), getattr(smem, name), smem.full)
    plgpu.barrier_wait(smem.full)
    sums = [*itertools.accumulate(v * LOG2E for v in lanes.load_tokens(smem.a))]
    before = lanes.sum_of_others(smem.totals, sums[-1], after=False)
    store_lanes(smem.steps, lanes.run_of_head(0), [v + before for v in sums])
    store_lanes(smem.steps, lanes.run_of_head(1), lanes.load_tokens(smem.dt))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.steps, at.by_head(refs.steps))
    plgpu.wait_smem_to_gmem(0)


def _sum_chunk_grads(lanes: _Lanes, refs: Any, smem: Any) -> None:
    at = _At.of(lanes, refs.da)
    for name in ("sums", "parts"):
        start_fetch(at.by_head(getattr(refs, name)), getattr(smem, name), smem.full)
    plgpu.barrier_wait(smem.full)
    load = lambda k: load_lanes(smem.sums, lanes.run_of_head(k), lanes.run)
    grads = [*itertools.accumulate(reversed(load(0)))][::-1]
    after = lanes.sum_of_others(smem.totals, grads[0], after=True)
    after = after + lanes.sum_of_parts(smem.parts, LAST)
    for n, (da, ddt) in enumerate(zip(grads, load(1), strict=True)):
        store_lanes(smem.da, lanes.token(n), [da + after])
        store_lanes(smem.ddt, lanes.token(n), [ddt])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.da, at.tokens(refs.da))
    plgpu.copy_smem_to_gmem(smem.ddt, at.tokens(refs.ddt))
    if refs.dD is not None:
        to = refs.dD.at[at.batch, at.chunk, at.heads]
        store_lanes(to, lanes.offsets(1, 0), [lanes.sum_of_parts(smem.parts, SKIP)])
    plgpu.wait_smem_to_gmem(0)


class KernelInputs:
    """A call's arrays as the kernels take them: heads in one axis, others in whole blocks.

    The arguments are as the passes have them: x, z (B, L, G, R, P); dt, a (B, L, G, R); B, C
    (B, L, G, N); D (G, R) or (G, R, P); states (B, G, R, P, N).
    """

    def __init__(self, x: Any, dt: Any, a: Any, B: Any, C: Any, D: Any, z: Any, initial: Any):
        self.batch, self.length, self.groups, self.rank, self.channels = x.shape
        self.heads, self.states = self.groups * self.rank, B.shape[-1]
        self.padded_states = -(-self.states // BOX) * BOX
        self.padded_channels = -(-self.channels // SLICE) * SLICE
        self.chunks = -(-self.length // CHUNK)
        self.x, self.z = self.tokens(x), self.tokens(z)
        self.B, self.C = (self._pad_length(padded(v, 3, self.padded_states)) for v in (B, C))
        self.D = None
        if D is not None:
            D = D.astype(jnp.float32)
            D = D.reshape(self.heads, *D.shape[2:])
            self.D = padded(D, 1, self.padded_channels) if D.ndim == 2 else D
        self.initial = self.whole_states(initial)
        # (B, H, chunks, 2, CHUNK): sums of log-decays, and dt.
        self.steps = chunk_sums(*(self._by_token(v) for v in (a, dt)))[:, : self.heads]

    def _pad_length(self, v: Any) -> Any:
        """Pads L to whole rows of tiles, and to a chunk if it is a step or less.

        Mosaic drops the index of an axis with a single box of a copy, which then is not clipped.
        Lanes copy whole chunks.
        """
        if by_mma():
            return padded(v, 1, self.chunks * CHUNK)
        return padded(
            v, 1, CHUNK if self.length <= STEP else -(-self.length // TILE_ROWS) * TILE_ROWS
        )

    def _by_token(self, v: Any) -> Any:
        """(B, L, H), fp32, of (B, L, G, R), H in whole blocks."""
        v = v.astype(jnp.float32).reshape(self.batch, self.length, self.heads)
        return padded(padded(v, 1, CHUNK), 2, -(-self.heads // HEADS) * HEADS)

    def tokens(self, v: Any) -> Any:
        """(B, L, H, P) of (B, L, G, R, P), P in whole units."""
        if v is None:
            return None
        v = v.reshape(*v.shape[:2], self.heads, self.channels)
        return self._pad_length(padded(v, 3, self.padded_channels))

    def cut_tokens(self, v: Any) -> Any:
        """Undoes `tokens`."""
        if v is None:
            return None
        return v[:, : self.length, :, : self.channels].reshape(
            self.batch, self.length, self.groups, self.rank, self.channels
        )

    def cut_steps(self, v: Any) -> Any:
        """(B, L, G, R) of (B, L, H)."""
        v = v[:, : self.length, : self.heads]
        return v.reshape(self.batch, self.length, self.groups, self.rank)

    def whole_states(self, v: Any) -> Any:
        """(..., H, P, N) of (..., G, R, P, N), P in whole units and N in whole boxes."""
        if v is None:
            return None
        v = v.reshape(*v.shape[:-4], self.heads, *v.shape[-2:])
        v = padded(v, v.ndim - 2, self.padded_channels)
        return padded(v, v.ndim - 1, self.padded_states)

    def cut_states(self, v: Any) -> Any:
        """Undoes `whole_states`."""
        if v is None:
            return None
        v = v[..., : self.channels, : self.states]
        return v.reshape(*v.shape[:-3], self.groups, self.rank, *v.shape[-2:])

    def states_like(self, count: int, dtype: Any) -> Any:
        """The type of `count` states of every unit."""
        shape = self.batch, count, self.heads, self.padded_channels, self.padded_states
        return jax.ShapeDtypeStruct(shape, dtype)

    def scan(self, every: int | None) -> SsdTile:
        """The sizes of the call; `every` counts tokens from one saved state to the next."""
        return SsdTile(
            batch=self.batch,
            heads=self.heads,
            groups=self.groups,
            channels=self.padded_channels,
            states=self.padded_states,
            chunks=self.chunks,
            every=0 if every is None else every // CHUNK,
        )


def state_ranges(states: int) -> list[slice]:
    """The ranges of states that launches take one after the other.

    Outputs and gradients are sums over states, and are added up over the ranges; B, C and
    states themselves are joined.
    """
    return [slice(n, min(n + HELD_STATES, states)) for n in range(0, states, HELD_STATES)]


def of_range(v: Any, n: slice) -> Any:
    """A range of the states of `v`, or ``None``, whose last axis is theirs."""
    return None if v is None else v[..., n]


def added(of_ranges: Iterable[Any]) -> Any:
    """The sum over ranges of states, in fp32."""
    return sum_of(v.astype(jnp.float32) for v in of_ranges)


def joined(of_ranges: Iterable[Any]) -> Any:
    """Joins the states of all ranges."""
    return jnp.concatenate([*of_ranges], axis=-1)
