"""The exchange of a row's partial sums between the warps of a block, or of a cluster of blocks.

Every warp has one or two partial sums of a row, and every warp needs their totals. Each block keeps
all of them in its shared memory, (buffers, warpgroups of the cluster, sums, warps), and every warp
adds them up in the same order, so that all get the same bits.

* In one block a warp writes its sums there, and the block's warps wait for each other.
* In a cluster, lanes of each warp write them to all blocks, one block each, with stores that an
  mbarrier of the receiving block counts; its warps wait for that. No block waits for the others'
  reads: rounds use the buffers in rotation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import (
    LaneOffsets,
    load_lanes,
    store_lanes,
    sum_lanes,
    sync_block,
)
from jaxkern.mosaic.launch import LANES, interpreted
from jaxkern.ops.norm.cluster import (
    expect_arrivals,
    send_in_cluster,
    start_arrivals,
    wait_for_arrivals,
)
from jaxkern.ops.norm.registers import uniform

_WARP = 32
WARPS = LANES // _WARP
_BUFFERS = 4
"""A block may have sent a row's sums, and the next row's, while another still reads those of the
row before; three would do where no row's sums are sent ahead."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Between the warps of `warpgroups` warpgroups in each of `blocks` blocks of a cluster."""

    warpgroups: int
    blocks: int

    @property
    def participants(self) -> int:
        """Warpgroups of the cluster."""
        return self.warpgroups * self.blocks

    @property
    def scratch_bytes(self) -> int:
        """What :meth:`scratch` takes for two sums."""
        return 4 * _BUFFERS * self.participants * 2 * WARPS

    def scratch(self, sums: int) -> dict[str, Any]:
        """Shared memory for up to `sums` sums a round."""
        shape = (_BUFFERS, self.participants, sums, WARPS)
        scratch: dict[str, Any] = {"partials": plgpu.SMEM(shape, jnp.float32)}
        if interpreted() and self.warpgroups > 1:
            scratch["all_stored"] = plgpu.Barrier(num_arrivals=self.warpgroups)
        if self.blocks > 1:
            scratch["arrivals"] = plgpu.SMEM((_BUFFERS, 2), jnp.int32)
        return scratch

    def prepare(self, smem: Any) -> None:
        """Makes the mbarriers of a cluster ready, once."""
        if self.blocks > 1:
            start_arrivals([smem.arrivals.at[i] for i in range(_BUFFERS)])

    def send(self, smem: Any, rank: Any, k: Any, held: jax.Array, count: int) -> None:
        """Gives `count` sums of each warp to all warps in round `k`.

        Args:
          smem: the arrays of :meth:`scratch`.
          rank: of the warpgroup in the cluster.
          k: the rounds before.
          held: (LANES,); lane l has the warp's sum number l mod `count`.
          count: 1 or 2.
        """
        buffer = lax.rem(jnp.int32(k), _BUFFERS)
        target = smem.partials.at[buffer, rank]  # (sums, warps)
        offsets = LaneOffsets(((_WARP, WARPS, 1), (1, count, WARPS)))
        if self.blocks > 1:
            arrivals = smem.arrivals.at[buffer]
            expect_arrivals(arrivals, 4 * self.participants * count * WARPS)
            send_in_cluster(target, arrivals, offsets, held, parts=count, blocks=self.blocks)
            return
        store_lanes(target, offsets, [held])
        if not interpreted():
            sync_block()
        elif self.warpgroups > 1:
            plgpu.barrier_arrive(smem.all_stored)
            plgpu.barrier_wait(smem.all_stored)

    def receive(self, smem: Any, k: Any, i: int) -> list[jax.Array]:
        """The `i`-th sums of all warps in round `k`, for :meth:`total`; first of all the 0-th.

        A lane reads those of one warp, of up to 8 warpgroups at a time: (LANES,) each.
        """
        buffer = lax.rem(jnp.int32(k), _BUFFERS)
        if self.blocks > 1 and i == 0:
            parity = lax.rem(lax.div(jnp.int32(k), _BUFFERS), 2)
            wait_for_arrivals(smem.arrivals.at[buffer], parity)
        partials = smem.partials.at[buffer]
        participants, sums, _ = partials.shape
        reads = []
        for first in range(0, participants, self._at_a_time):
            offsets = LaneOffsets(
                ((1, WARPS, 1), (WARPS, self._at_a_time, sums * WARPS)),
                start=(first * sums + i) * WARPS,
            )
            reads += load_lanes(partials, offsets, volatile=True)
        return reads

    def total(self, reads: list[jax.Array]) -> jax.Array:
        """The sum over all warps of what was received, as a scalar."""
        return uniform(self.totals(reads))

    def totals(self, reads: list[jax.Array]) -> jax.Array:
        """The same as (LANES,), equal in all lanes."""
        total = sum(reads[1:], start=reads[0])
        distances = (1 << b for b in range((WARPS * self._at_a_time).bit_length() - 1))
        return sum_lanes([total], tuple(distances))[0]

    @property
    def _at_a_time(self) -> int:
        """Warpgroups whose sums the lanes of a warp read at a time, one each."""
        return min(self.participants, _WARP // WARPS)
