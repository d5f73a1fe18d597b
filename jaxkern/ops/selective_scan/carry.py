"""What the segments of a sequence hand on, so that all can be worked on at once.

A first kernel finds, for every piece of a segment, what it passes on if nothing comes in, and the
sum of its step sizes, for the decay over a piece is exp(Σdt · A). Every block of the main kernel
folds the pieces before its segment (in the backward: after it) into the state that it starts from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.launch import LANES
from jaxkern.ops.selective_scan.blocks import Call, Place, Rows, Scan, fp32_array, map_states
from jaxkern.ops.selective_scan.reference import CHUNK
from jaxkern.ops.selective_scan.steps import decayed, decays, shared_size
from jaxkern.ops.selective_scan.tiling import tile_chunks


def launch_carry(
    call: Call,
    name: str,
    kernel: Callable[..., None],
    tokens: str,
    of_segments: dict[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """What the pieces of parts that others follow pass on, and the sums of their dt.

    It reads `tokens` and `others` along time, and states `of_segments`.
    """
    parts = call.scan.parts.that_pass_on()
    scan = dataclasses.replace(call.scan, parts=parts)
    chunks = tile_chunks(min(parts.length * scan.per_unit, scan.chunks))
    pieces = parts.segments - parts.left_out
    return call.run(
        name,
        kernel,
        scan,
        call.pick(tokens) | others | of_segments | call.pick("A D dt_bias"),
        {
            "passed": call.of_parts(pieces, parts.rest),
            "total": fp32_array(pieces, parts.rest, call.width),
        },
        [call.ring("", chunks, tokens, **others)],
        {"shared": shared_size(call.tile, chunks * CHUNK)},
    )


def store_carry(scan: Scan, refs: Any, total: Rows, h: list[Rows]) -> None:
    at = Place(scan)
    scan.store_states(refs.passed.at[at.segment, at.rest, at.local], h)
    ref = refs.total.at[at.segment, at.rest, at.local]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        scan.store(ref, [value], *digits, start=start)


def fold_before(scan: Scan, refs: Any, rate: list[Rows], h: list[Rows]) -> list[Rows]:
    """The state before a block's segment, from that before the sequence."""
    return _fold(scan, refs, rate, Place(scan).segment * scan.parts.pieces, lambda i: i, h)


def fold_after(scan: Scan, refs: Any, rate: list[Rows], dh: list[Rows]) -> list[Rows]:
    """The gradient of the state after a block's segment, from that after the sequence."""
    at, pieces = Place(scan), refs.total.shape[0]
    count = jnp.where(at.later > 0, pieces - at.segment * scan.parts.pieces, 0)
    return _fold(scan, refs, rate, count, lambda i: pieces - 1 - i, dh)


_AT_ONCE = 4
"""Pieces that are loaded together, for each would be waited for."""


def _fold(
    scan: Scan, refs: Any, rate: list[Rows], count: Any, piece: Callable[[Any], Any], h: list[Rows]
) -> list[Rows]:
    """The state (or its gradient) on the other side of `count` pieces, ``piece(i)`` the i-th."""
    at = Place(scan)

    def load(i):
        s = piece(jnp.minimum(i, count - 1))
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
