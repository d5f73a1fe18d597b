"""The recurrence in both directions: steps, the states of segments, and carries of parts.

Where sequences are cut into parts, a first kernel finds, for every subpart of a part, the state
after it from zeros (in the backward: the gradient before it) and the sum of its step sizes, as a
state decays by exp(Σdt · A). Every block of the main kernel folds the subparts before its part (in
the backward: after it) into the state that it starts from.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.arithmetic import exp2_by_polynomial, sigmoid
from jaxkern.mosaic.lanes import sum_lanes, sync_warp, zeros
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.sections import state_after_all
from jaxkern.ops.selective_scan.blocks import (
    Registers,
    ScanBlock,
    ScanCall,
    ScanPlan,
    Scratch,
    TileSpan,
    fp32_array,
    load1,
    store,
)
from jaxkern.ops.selective_scan.reference import CHUNK, decay_of
from jaxkern.ops.selective_scan.tiles import CHANNELS, ScanTile, forward_grid

_FOLD = 4
"""Subparts whose carries are loaded together, to wait for memory once."""


class Keep(NamedTuple):
    """Whether the sequence goes on at a step.

    Attributes:
      kept: (LANES,), 0 where a segment begins, else 1.
      crossed: a scalar where segments have states, see :func:`jaxkern.ops.segments.crossings`.
    """

    kept: jax.Array
    crossed: Any


def states_before(scan: ScanPlan, refs: Any, keep: Keep | None, h: Any) -> Any:
    """The states that a step begins from, given the previous step's states `h`."""
    if keep is None or refs.starts is None:
        return _where_kept(keep, h)
    return _of_segment(scan, refs.starts, keep, _entered(scan, keep), h)


def gradients_before(scan: ScanPlan, refs: Any, keep: Keep | None, dh: Any) -> Any:
    """The gradients of the previous step's states, from those of a step's initial states."""
    if keep is None:
        return dh
    _store_of_segment(scan, refs.dstarts, keep, _entered(scan, keep), dh)
    if refs.dends is None:
        return _where_kept(keep, dh)
    return _of_segment(scan, refs.dends, keep, _left(scan, keep), dh)


def write_final_states(scan: ScanPlan, refs: Any, keep: Keep | None, h: Any) -> None:
    """Writes the final states of a segment that ends before a step."""
    if keep is not None:
        _store_of_segment(scan, refs.ends, keep, _left(scan, keep), h)


def add_final_gradients(scan: ScanPlan, refs: Any, keep: Keep | None, add: Any, dh: Any) -> Any:
    """``add(dh, gradients)`` where a segment ends before a step, else `dh`."""
    if keep is None or refs.dends is None:
        return dh
    at, number = ScanBlock(scan), _left(scan, keep)
    read = lambda: scan.load_states(refs.dends.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, lambda: add(dh, read()), lambda: dh)


def _where_kept(keep: Keep | None, h: Any) -> Any:
    """The states, zero where the sequence starts anew."""
    return h if keep is None else jax.tree.map(lambda v: jnp.where(keep.kept > 0.5, v, 0.0), h)


def _store_of_segment(scan: ScanPlan, ref: Any, keep: Keep, number: Any, states: Any) -> None:
    """Stores states of the segment `number` where it ends, if it has any."""
    if ref is None:
        return
    at = ScanBlock(scan)

    @pl.when((keep.crossed >= 0) & (number < ref.shape[1]))
    def _():
        scan.store_states(ref.at[at.batch, number, at.channels], states)


def _of_segment(scan: ScanPlan, ref: Any, keep: Keep, number: Any, otherwise: Any) -> Any:
    """The states of a segment where it begins or ends, `otherwise` elsewhere."""
    at = ScanBlock(scan)
    read = lambda: scan.load_states(ref.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, read, lambda: otherwise)


def _entered(scan: ScanPlan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.rem(keep.crossed, _numbers(scan))


def _left(scan: ScanPlan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.div(keep.crossed, _numbers(scan))


def _numbers(scan: ScanPlan) -> Any:
    assert scan.options.num_segments is not None
    return jnp.int32(scan.options.num_segments + 1)


def shared_size(tile: ScanTile, steps: int) -> tuple[int]:
    return (steps * tile.row(2),)


def shared_chunk(smem: Any, tile: ScanTile, c: Any) -> Any:
    size = CHUNK * tile.row(2)
    return smem.shared.at[pl.ds(c * size, size)]


class Steps:
    """Some steps in shared memory, and the share of each lane in their values."""

    def __init__(self, scan: ScanPlan, tokens: Any, token: Any, count: int = CHUNK):
        self.scan = scan
        self.tokens = tokens
        self.token = token  # the first one's number in the sequence
        self.count = count
        self.rounds = range(count // scan.tile.steps)

    def owned(self, name: str, round: int) -> jax.Array:
        """The value of a token array that the lane owns."""
        t = self.scan.tile
        stride = self.scan.stage_stride
        start = round * t.steps * stride
        return load1(getattr(self.tokens, name), *t.owned(step=stride), start=start)

    def all_owned(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yields each round's number and owned values, None for arrays that are not there.

        All are read at once: a read of shared memory stays behind the writes before it, so that a
        round that writes at its end would have the next one wait for memory.
        """
        read = lambda name, r: None if getattr(self.tokens, name) is None else self.owned(name, r)
        return iter([(r, *(read(name, r) for name in names)) for r in self.rounds])

    def share(self, ref: Any, round: int, values: Registers) -> None:
        """Puts owned values into `ref`, (steps, row(len(values))), for :meth:`shared`."""
        t, n = self.scan.tile, len(values)
        start = round * t.steps * t.row(n)
        store(ref, values, *t.owned(step=t.row(n), channel=n), start=start)

    def shared(self, ref: Any, step: int, n: int, volatile: bool = False) -> list[Registers]:
        """[n][R]: the values of a step for the lane's channels."""
        start = step * self.scan.tile.row(n)
        rows = self.scan.load_per_channel(ref, n, start, volatile)
        return [[row[i] for row in rows] for i in range(n)]

    def weights(self, name: str, step: int) -> Registers:
        """[K] of B or C at a step."""
        t, ref = self.scan.tile, getattr(self.tokens, name)
        copies = 1 << len(t.state_swaps)
        start = step * t.all_states * copies
        return self.scan.load_pairs(ref, copies, *t.of_copy(), start=start)

    def keep(self, step: int, volatile: bool = False) -> Keep | None:
        """Whether the sequence goes on at a step; ``None`` where there are no segments.

        `volatile` has it read again, where it was read before.
        """
        if self.tokens.keep is None:
            return None
        crossed = None if self.tokens.crossed is None else self.tokens.crossed[step]
        return Keep(load1(self.tokens.keep, start=step, volatile=volatile), crossed)

    def crosses(self) -> jax.Array:
        """Whether a segment begins at one of the steps, a scalar."""
        tokens, steps = self.tokens, range(self.count)
        if tokens.crossed is not None:
            return functools.reduce(jnp.logical_or, (tokens.crossed[s] >= 0 for s in steps))
        return functools.reduce(jnp.logical_or, (tokens.keep[s] < 0.5 for s in steps))

    def within_a_segment(self) -> "Steps":
        """Returns these steps as a segment's own, at which none begins: :meth:`keep` is None."""
        tokens = types.SimpleNamespace(**vars(self.tokens) | {"keep": None, "crossed": None})
        return Steps(self.scan, tokens, self.token, self.count)

    def write(self, ref: Any, round: int, value: jax.Array) -> None:
        """Writes the owned values to (B, L, D) in global memory."""
        at, t, stride = ScanBlock(self.scan), self.scan.tile, self.scan.token_stride
        part = ref.at[at.batch, pl.ds(self.token, CHUNK), at.channels]
        store(part, [value], *t.owned(step=stride), start=round * t.steps * stride)

    def step_size(self, round: int, raw: jax.Array) -> tuple[jax.Array, Any]:
        return self.scan.step_size(raw, self.token + round * self.scan.tile.steps)

    def gate(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """z · sigmoid(z), and its derivative."""
        gate = sigmoid(z, self.scan.exact)
        return z * gate, gate * (1 + z * (1 - gate))

    def over_states(self, parts: Registers) -> jax.Array:
        """Sums a round's [J · R] values over states: to each lane the sum that it owns."""
        for shuffle in self.shuffles_over_states():
            parts = shuffle(parts)
        (own,) = parts
        return own

    def shuffles_over_states(self) -> list[Callable[[Registers], Registers]]:
        first, *others = self.scan.tile.over_states
        swapped = lambda parts: sum_lanes(parts[0::2] + parts[1::2], [first], swapped=1)
        return [swapped, *(functools.partial(sum_lanes, distances=[d]) for d in others)]


def over_chunks(
    span: TileSpan,
    per_tile: int,
    load: Callable[[Any, int], Any],
    body: Callable[..., Any],
    init: Any,
) -> Any:
    """``init = body(c, steps, init)`` over the chunks of a tile, `steps` (step, load(c, step)).

    Loaded ahead over the ends of chunks, too.
    """

    def run(c, state):
        carry, ahead = state

        def steps():
            nonlocal ahead
            for step in range(CHUNK):
                now = ahead
                following = jnp.minimum(c + 1, per_tile - 1)
                ahead = load(c, step + 1) if step + 1 < CHUNK else load(following, 0)
                yield step, now

        carry = body(c, steps(), carry)
        return carry, ahead

    return lax.fori_loop(span.first, span.stop, run, (init, load(span.first, 0)))[0]


def decays(dt: Registers, rate: list[Registers], by_polynomial: int = 0) -> list[Registers]:
    """exp(dt · A), of a lane's first states by polynomials: the exponential unit has the others."""
    exp2 = lambda k: exp2_by_polynomial if k < by_polynomial else jnp.exp2
    return [
        [exp2(r * len(row) + k)(d * a) for k, a in enumerate(row)]
        for r, (d, row) in enumerate(zip(dt, rate, strict=True))
    ]


def polynomials(tile: ScanTile) -> int:
    """Decays by polynomials where there is little else to do: an eighth evens out the two units."""
    return CHANNELS * tile.states // 8


def advance(
    decay: list[Registers], dtx: Registers, B: Registers, h: list[Registers]
) -> list[Registers]:
    """h = exp(dt · A) · h + dt · x · B."""
    return [
        [a * v + d * b for a, v, b in zip(decays, row, B, strict=True)]
        for decays, d, row in zip(decay, dtx, h, strict=True)
    ]


def share_step_sizes(steps: Steps, shared: Any, dt_bias: jax.Array) -> None:
    for round, x, raw in steps.all_owned("x", "dt"):
        dt, _ = steps.step_size(round, raw + dt_bias)
        steps.share(shared, round, [dt, dt * x])
    sync_warp()


def advance_chunks(
    scan: ScanPlan,
    refs: Any,
    span: TileSpan,
    per_tile: int,
    at: Callable[[Any], tuple[Steps, Any]],
    rate: list[Registers],
    h: list[Registers],
    total: Registers,
) -> tuple[list[Registers], Registers]:
    """The states after the chunks, and Σdt, from those before.

    ``at(c)`` are the chunk's steps and their shared sizes.
    """

    def load(c, step):
        chunk, shared = at(c)
        dt, dtx = chunk.shared(shared, step, 2)
        decay = decays(dt, rate, polynomials(scan.tile))
        return dt, dtx, decay, chunk.weights("B", step), chunk.keep(step)

    def body(c, steps, carry):
        h, total = carry
        for _, (dt, dtx, decay, B, keep) in steps:
            h = advance(decay, dtx, B, states_before(scan, refs, keep, h))
            total = add_reset(total, keep, dt)
        return h, total

    return over_chunks(span, per_tile, load, body, (h, total))


# Carries of parts


def device_carry(
    call: ScanCall, A: Any, name: str, kernel: Any, *rest: Any, reverse: bool, **others: Any
) -> Any:
    """The carry of a device's whole part, from the carries of subparts that fill the GPU."""
    grid = forward_grid(call.columns, call.scan.chunks, halves=False)
    call.cut(dataclasses.replace(grid, whole=0))
    got = launch_carry(call, name, kernel, *rest, left_out=None, **others)
    shape = got["total"].shape[0], call.batch, call.scan.channels
    total = call.cut_channels(got["total"].reshape(shape), 2)  # (subparts, B, G, P)
    passed = got["passed"].reshape(*shape, got["passed"].shape[-1])
    passed = call.cut_states(passed)  # (subparts, B, G, P, N)
    decay = decay_of(A.astype(jnp.float32), call.arrays["keep"] is not None, total)
    return jnp.sum(total, 0), state_after_all(decay, passed, reverse=reverse)


def launch_carry(
    call: ScanCall,
    name: str,
    kernel: Callable[..., None],
    tokens: str,
    of_segments: dict[str, Any],
    left_out: Literal["first", "last"] | None,
    **others: Any,
) -> dict[str, Any]:
    """The carries of all subparts except those of one part, and the sums of their dt.

    It reads `tokens` and `others` along time, and states `of_segments`. No part is left out of a
    sequence that continues on another device.
    """
    grid = call.scan.grid.of_carries(left_out)
    scan = dataclasses.replace(call.scan, grid=grid)

    def of_chunks(chunks: int) -> Scratch:
        own = {"shared": shared_size(call.tile, chunks * CHUNK)}
        return Scratch([call.ring(chunks, tokens, **others)], own)

    memory = call.scratch(min(grid.length * scan.per_unit, scan.chunks), of_chunks)
    subparts = grid.parts
    ins = call.pick(tokens) | others | of_segments | call.pick("A D dt_bias")
    passed = call.per_block(subparts, grid.rest)
    outs = {"passed": passed, "total": fp32_array(subparts, grid.rest, call.width)}
    return call.run(name, kernel, scan, ins, outs, memory)


def store_carry(scan: ScanPlan, refs: Any, total: Registers, h: list[Registers]) -> None:
    at = ScanBlock(scan)
    scan.store_states(refs.passed.at[at.part, at.rest], h)
    ref = refs.total.at[at.part, at.rest]
    for r, value in enumerate(total):
        start, digits = scan.tile.of_channel(r, 1)
        store(ref, [value], *digits, start=start)


def no_carry(scan: ScanPlan) -> tuple[list[Registers], Registers]:
    """The carry of no steps: states, and the sum of their step sizes."""
    return scan.zero_states(), [zeros() for _ in range(CHANNELS)]


def add_reset(total: Registers, keep: Any, dt: Registers) -> Registers:
    """total + dt, infinite once a segment began."""
    if keep is not None:
        total = [jnp.where(keep.kept > 0.5, t, float("inf")) for t in total]
    return [t + d for t, d in zip(total, dt, strict=True)]


def decayed(
    total: Registers, decay: list[Registers], h: list[Registers], resets: bool
) -> list[Registers]:
    """The states after steps of the sizes `total` in sum; an infinite sum stands for a reset."""
    held = lambda t, a, v: jnp.where(t < float("inf"), a * v, 0.0) if resets else a * v
    return [
        [held(t, a, v) for a, v in zip(*rows, strict=True)]
        for t, *rows in zip(total, decay, h, strict=True)
    ]


def fold(
    scan: ScanPlan, refs: Any, rate: list[Registers], count: Any, number: Callable[[Any], Any], h
) -> list[Registers]:
    """The state (or its gradient) on the other side of `count` subparts, ``number(i)`` the i-th."""
    at = ScanBlock(scan)

    def load(i):
        s = number(jnp.minimum(i, count - 1))
        total = scan.load_per_channel(refs.total.at[s, at.rest], 1)
        total = [row[0] for row in total]
        return total, scan.load_states(refs.passed.at[s, at.rest])

    def body(group, h):
        numbers = [group * _FOLD + i for i in range(_FOLD)]
        for i, (total, passed) in [(i, load(i)) for i in numbers]:
            held = decayed(total, decays(total, rate), h, refs.keep is not None)
            after = jax.tree.map(jnp.add, passed, held)
            counts = jnp.broadcast_to((i < count).astype(jnp.float32), (LANES,)) > 0.5
            h = jax.tree.map(lambda a, b, counts=counts: jnp.where(counts, a, b), after, h)
        return h

    return lax.fori_loop(0, lax.div(count + _FOLD - 1, _FOLD), body, h)
