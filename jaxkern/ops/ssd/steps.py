"""The kernels of the SSD scan's step sizes: sums of log-decays, and the way back from gradients.

Arrays of tokens have their heads side by side, (B, L, H), and the scan takes a head's tokens side
by side. A block transposes a chunk of 128 tokens of 8 heads: a lane has a run of 8 tokens of one
head. What it adds of other runs comes through shared memory, in a fixed order. Both kernels take
the time of their bytes: 16 for a token and head each way.
"""

import dataclasses
import functools
import itertools
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
from jaxkern.ops.ssd.blocks import BLOCK, WARPGROUP
from jaxkern.ops.ssd.tiles import CHUNK, STEPS

HEADS = 8
"""Heads of a block: 32 bytes of a token, a sector of memory."""
LAST_PARTS, SKIP_PARTS, WARPS = STEPS + 1, STEPS, 4
"""The parts that are added up for a chunk's last sum, one of each half of its tokens and one of its
states, and those for D, of the halves alone. A part is the sums of a warpgroup's four warps."""
_RUNS = LANES // HEADS
_RUN = CHUNK // _RUNS
"""Tokens of a lane."""


def chunk_sums(a: jax.Array, dt: jax.Array) -> jax.Array:
    """(B, H, chunks, 2, CHUNK): sums of a · log2(e) from a chunk's first token on, and dt.

    Args:
      a, dt: (B, L, H) in fp32, L at least CHUNK and H whole HEADS. What a last chunk lacks has
        steps of size 0, and no decay.
    """
    batch, length, heads = a.shape
    chunks = -(-length // CHUNK)
    tokens = plgpu.SMEM((CHUNK, HEADS), jnp.float32)
    return _launch(
        "ssd_steps",
        _sum_chunk,
        {"a": a, "dt": dt},
        {"steps": jax.ShapeDtypeStruct((batch, heads, chunks, 2, CHUNK), jnp.float32)},
        {"a": tokens, "dt": tokens, "steps": plgpu.SMEM((HEADS, 2, CHUNK), jnp.float32)},
        batch * chunks * (heads // HEADS),
    )["steps"]


def chunk_sum_grads(
    sums: jax.Array, parts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The gradients of the arguments of :func:`chunk_sums`, and parts of that of D.

    Args:
      sums: (B, H, chunks, 2, CHUNK), fp32, H at least HEADS: the gradients of the sums of
        log-decays, in units of a, and those of dt.
      parts: (B, H, chunks, LAST_PARTS, WARPS), fp32, what adds up to more of the gradient of a
        chunk's last sum; with SKIP_PARTS after them what adds up to that of D.

    Returns:
      da and ddt, (B, L, H) with L in whole chunks and H in whole HEADS; and the gradient of D for
      each chunk, (B, chunks, H), or ``None``.
    """
    batch, heads, chunks = sums.shape[:3]
    heads = -(-heads // HEADS) * HEADS
    # Past the end of L, Mosaic would store what is contiguous of a tile into the next row.
    length = chunks * CHUNK
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens = plgpu.SMEM((CHUNK, HEADS), jnp.float32)
    grads = _launch(
        "ssd_steps_bwd",
        _sum_chunk_grads,
        {"sums": sums, "parts": parts},
        {
            "da": like((batch, length, heads)),
            "ddt": like((batch, length, heads)),
            "dD": like((batch, chunks, heads)) if parts.shape[3] > LAST_PARTS else None,
        },
        {
            "da": tokens,
            "ddt": tokens,
            "sums": plgpu.SMEM((HEADS, 2, CHUNK), jnp.float32),
            "parts": plgpu.SMEM((HEADS, *parts.shape[3:]), jnp.float32),
        },
        batch * chunks * (heads // HEADS),
    )
    return grads["da"], grads["ddt"], grads["dD"]


def _launch(
    name: str, kernel: Any, ins: Any, outs: Any, scratch: dict[str, Any], blocks: int
) -> dict[str, Any]:
    """Launches a kernel that fetches two tiles, and adds up what its runs share in `totals`."""
    shared = {
        "totals": plgpu.SMEM((2 * _RUNS, HEADS), jnp.float32),
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
class _At:
    """The chunk of a block, and its heads."""

    batch: Any
    chunk: Any
    heads: Any

    @classmethod
    def of(cls, tokens: Any) -> "_At":
        """The chunk and heads of this block; `tokens` is (B, L, H)."""
        _, length, heads = tokens.shape
        chunks, columns = -(-length // CHUNK), heads // HEADS
        block = lax.axis_index(BLOCK)
        column, rest = lax.rem(block, columns), lax.div(block, columns)
        return cls(lax.div(rest, chunks), lax.rem(rest, chunks), pl.ds(column * HEADS, HEADS))

    def tokens(self, ref: Any) -> Any:
        """(CHUNK, HEADS) of (B, L, H)."""
        return ref.at[self.batch, pl.ds(self.chunk * CHUNK, CHUNK), self.heads]

    def by_head(self, ref: Any) -> Any:
        """(HEADS, …) of (B, H, chunks, …)."""
        return ref.at[self.batch, self.heads, self.chunk]


_fetch = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)


def _sum_chunk(refs: Any, smem: Any) -> None:
    at = _At.of(refs.a)
    for name in ("a", "dt"):
        _fetch(at.tokens(getattr(refs, name)), getattr(smem, name), smem.full)
    plgpu.barrier_wait(smem.full)
    sums = [*itertools.accumulate(v * LOG2E for v in _load_tokens(smem.a))]
    before = _of_others(smem.totals, sums[-1], after=False)
    store_lanes(smem.steps, _run_of_head(2 * CHUNK), [v + before for v in sums])
    store_lanes(smem.steps, _run_of_head(2 * CHUNK, CHUNK), _load_tokens(smem.dt))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.steps, at.by_head(refs.steps))
    plgpu.wait_smem_to_gmem(0)


def _sum_chunk_grads(refs: Any, smem: Any) -> None:
    at = _At.of(refs.da)
    for name in ("sums", "parts"):
        _fetch(at.by_head(getattr(refs, name)), getattr(smem, name), smem.full)
    plgpu.barrier_wait(smem.full)
    load = lambda k: load_lanes(smem.sums, _run_of_head(2 * CHUNK, k * CHUNK), _RUN)
    grads = [*itertools.accumulate(reversed(load(0)))][::-1]
    after = _of_others(smem.totals, grads[0], after=True) + _of_parts(smem.parts, 0, LAST_PARTS)
    for n, (da, ddt) in enumerate(zip(grads, load(1), strict=True)):
        store_lanes(smem.da, _token(n), [da + after])
        store_lanes(smem.ddt, _token(n), [ddt])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.da, at.tokens(refs.da))
    plgpu.copy_smem_to_gmem(smem.ddt, at.tokens(refs.ddt))
    if refs.dD is not None:
        to = refs.dD.at[at.batch, at.chunk, at.heads]
        skipped = _of_parts(smem.parts, LAST_PARTS, SKIP_PARTS)
        store_lanes(to, LaneOffsets(((1, HEADS, 1),)), [skipped])
    plgpu.wait_smem_to_gmem(0)


def _added(values: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, values)


# A lane's head is its number modulo HEADS, its run the rest.


def _run_of_head(row: int, start: int = 0) -> LaneOffsets:
    """A lane's run where a head's tokens are side by side, heads `row` elements apart."""
    return LaneOffsets(((1, HEADS, row), (HEADS, _RUNS, _RUN)), start)


def _token(n: int) -> LaneOffsets:
    """The n-th token of a lane's run in (CHUNK, HEADS)."""
    return LaneOffsets(((1, HEADS, 1), (HEADS, _RUNS, _RUN * HEADS)), n * HEADS)


def _load_tokens(ref: Any) -> list[Any]:
    return [load_lanes(ref, _token(n))[0] for n in range(_RUN)]


def _of_run(n: int) -> LaneOffsets:
    """The row `n` after that of a lane's run, in rows of HEADS."""
    return LaneOffsets(((1, HEADS, 1), (HEADS, _RUNS, HEADS)), n * HEADS)


def _of_others(totals: Any, own: jax.Array, *, after: bool) -> jax.Array:
    """The sum of the runs of a lane's head before its own, or after it, of which each has `own`.

    `totals` is shared memory, (2 · runs, HEADS): beyond the first or the last run are zeros.
    """
    first, sign = (0, 1) if after else (_RUNS, -1)
    store_lanes(totals, _of_run(first), [own])
    store_lanes(totals, _of_run(_RUNS - first), [jnp.zeros_like(own)])
    sync_warpgroup()
    return _added(load_lanes(totals, _of_run(first + sign * n))[0] for n in range(1, _RUNS))


def _of_parts(parts: Any, first: int, count: int) -> jax.Array:
    """The sum of so many parts of a lane's head."""
    offsets = LaneOffsets(((1, HEADS, parts.shape[1] * WARPS),), first * WARPS)
    return _added(load_lanes(parts, offsets, count * WARPS))
