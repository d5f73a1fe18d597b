"""What the segments of a sequence hand on, so that all can be worked on at once.

A first kernel finds, for every segment, what it passes on if nothing comes in, and the sum of its
step sizes, for the decay over a segment is exp(Σdt · A). Every block of the main kernel folds the
segments before it (in the backward: after it) into the state that it starts from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxkern.ops.selective_scan.blocks import Call, Place, Ring, Rows, Scan, fp32_array, map_states
from jaxkern.ops.selective_scan.steps import decayed, shared_size


def launch_carry(
    call: Call, name: str, kernel: Callable[..., None], steps: int, tokens: dict[str, Any]
) -> dict[str, Any]:
    """What the segments that others follow pass on, and the sums of their dt."""
    parts = call.scan.parts.that_pass_on()
    scan = dataclasses.replace(call.scan, parts=parts)
    between = parts.segments - 1
    return call.run(
        name,
        kernel,
        scan,
        tokens | call.pick("A D dt_bias"),
        {
            "passed": call.of_parts(between, parts.rest),
            "total": fp32_array(between, parts.rest, call.width),
        },
        [Ring(scan, "", steps, tokens)],
        {"shared": shared_size(call.tile, steps)},
    )


def store_carry(scan: Scan, refs: Any, total: Rows, h: list[Rows]) -> None:
    at = Place(scan)
    scan.store_states(refs.passed.at[at.segment, at.rest, at.local], h)
    ref = refs.total.at[at.segment, at.rest, at.local]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        scan.store(ref, [value], *digits, start=start)


def fold(scan: Scan, refs: Any, rate: list[Rows], s: Any, h: list[Rows]) -> list[Rows]:
    """The state (or its gradient) on the other side of segment `s`."""
    at = Place(scan)
    total = scan.load_channels(refs.total.at[s, at.rest, at.local])
    passed = scan.load_states(refs.passed.at[s, at.rest, at.local])
    return map_states(jnp.add, passed, decayed(total, rate, h, refs.keep is not None))
