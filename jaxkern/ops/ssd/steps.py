"""The kernels of the SSD scan's step sizes: sums of log-decays, and the way back from gradients.

Arrays of tokens have their heads side by side, (B, L, H), and the scan takes a head's tokens side
by side. A block transposes a chunk of 128 tokens of 8 or 16 heads: a lane has a run of tokens of
one head. What it adds of other runs comes through shared memory, in a fixed order. Each moves 16
bytes for a token and head; at (8, 4096, 64) that takes an H200 18.5 and 10.7 µs, where a copy of as
many bytes takes 8 (JAX 0.11.2).
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
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.wgmma import start_fetch
from jaxkern.ops.ssd.blocks import BLOCK, WARPGROUP
from jaxkern.ops.ssd.tiles import CHUNK, WARPS

HEADS = 8
"""A block has a multiple of so many heads: 32 bytes of a token, a sector of memory."""
MOST_HEADS = 16
"""The most heads of a block, 64 bytes of a token."""
LAST, SKIP = 0, 1
KINDS = 2
"""Kinds of gradients that a chunk has one number of, that of its last sum and that of D, and how
many there are. Of each the backward stores the sums of a warpgroup's four warps."""


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
    """The gradients of the arguments of :func:`chunk_sums`, and parts of that of D.

    Args:
      sums: (B, H, chunks, 2, CHUNK), fp32, H in whole HEADS: the gradients of the sums of
        log-decays, in units of a, and those of dt.
      parts: (B, H, chunks, 1, WARPS), fp32, what adds up to more of the gradient of a chunk's last
        sum; or of KINDS, the second of which adds up to that of D.

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
    """Which tokens a lane has: its head is its number modulo `heads`, and its run the rest.

    Attributes:
      heads: of a block.
    """

    heads: int

    @classmethod
    def of(cls, heads: int) -> "_Lanes":
        """For so many heads in all."""
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
