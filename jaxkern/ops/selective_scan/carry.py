"""The carries of the parts of a sequence, so that all parts can be worked on at once.

A first kernel finds, for every subpart of a part, the state after it if nothing comes in (in the
backward: the gradient before it), and the sum of its step sizes, as it decays by exp(Σdt · A).
Every block of the main kernel folds the subparts before its part (in the backward: after it) into
the state that it starts from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.launch import LANES
from jaxkern.ops.selective_scan.blocks import Block, Call, Rows, Scan, fp32_array, map_states
from jaxkern.ops.selective_scan.reference import CHUNK
from jaxkern.ops.selective_scan.steps import decayed, decays, shared_size
from jaxkern.ops.selective_scan.tiles import tile_chunks


def launch_carry(
    call: Call,
    name: str,
    kernel: Callable[..., None],
    tokens: str,
    of_segments: dict[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """The carries of all subparts but those of the last part, and the sums of their dt.

    It reads `tokens` and `others` along time, and states `of_segments`.
    """
    grid = call.scan.grid.of_carries()
    scan = dataclasses.replace(call.scan, grid=grid)
    chunks = tile_chunks(min(grid.length * scan.per_unit, scan.chunks))
    subparts = grid.parts - grid.left_out
    return call.run(
        name,
        kernel,
        scan,
        call.pick(tokens) | others | of_segments | call.pick("A D dt_bias"),
        {
            "passed": call.per_block(subparts, grid.rest),
            "total": fp32_array(subparts, grid.rest, call.width),
        },
        [call.ring("", chunks, tokens, **others)],
        {"shared": shared_size(call.tile, chunks * CHUNK)},
    )


def store_carry(scan: Scan, refs: Any, total: Rows, h: list[Rows]) -> None:
    at = Block(scan)
    scan.store_states(refs.passed.at[at.part, at.rest, at.local], h)
    ref = refs.total.at[at.part, at.rest, at.local]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        scan.store(ref, [value], *digits, start=start)


def fold_before(scan: Scan, refs: Any, rate: list[Rows], h: list[Rows]) -> list[Rows]:
    """The state before a block's part, from that before the sequence."""
    return _fold(scan, refs, rate, Block(scan).part * scan.grid.subparts, lambda i: i, h)


def fold_after(scan: Scan, refs: Any, rate: list[Rows], dh: list[Rows]) -> list[Rows]:
    """The gradient of the state after a block's part, from that after the sequence."""
    at, subparts = Block(scan), refs.total.shape[0]
    count = jnp.where(at.later > 0, subparts - at.part * scan.grid.subparts, 0)
    return _fold(scan, refs, rate, count, lambda i: subparts - 1 - i, dh)


_AT_ONCE = 4
"""Subparts that are loaded together, for each would be waited for."""


def _fold(
    scan: Scan, refs: Any, rate: list[Rows], count: Any, number: Callable[[Any], Any], h: list[Rows]
) -> list[Rows]:
    """The state (or its gradient) on the other side of `count` subparts, ``number(i)`` the i-th."""
    at = Block(scan)

    def load(i):
        s = number(jnp.minimum(i, count - 1))
        total = scan.load_channels(refs.total.at[s, at.rest, at.local])
        return total, scan.load_states(refs.passed.at[s, at.rest, at.local])

    def body(group, h):
        numbers = [group * _AT_ONCE + i for i in range(_AT_ONCE)]
        for i, (total, passed) in [(i, load(i)) for i in numbers]:
            held = decayed(total, decays(total, rate), h, refs.keep is not None)
            after = map_states(jnp.add, passed, held)
            counts = jnp.broadcast_to((i < count).astype(jnp.float32), (LANES,)) > 0.5
            h = map_states(lambda a, b, counts=counts: jnp.where(counts, a, b), after, h)
        return h

    return lax.fori_loop(0, lax.div(count + _AT_ONCE - 1, _AT_ONCE), body, h)
