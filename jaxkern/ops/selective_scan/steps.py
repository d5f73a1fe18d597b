"""Steps of the recurrence, which both directions take."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.lanes import sync_warp
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.registers import ROW
from jaxkern.ops.selective_scan.blocks import Block, Rows, Scan, Span, map_states
from jaxkern.ops.selective_scan.reference import CHUNK
from jaxkern.ops.selective_scan.tiles import CHANNELS, Tile
from jaxkern.ops.softplus import exp2_by_polynomial


def zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), ROW)


def zero_states(scan: Scan) -> list[Rows]:
    return [[zeros() for _ in range(scan.tile.states)] for _ in range(CHANNELS)]


class Keep(NamedTuple):
    """Whether the sequence goes on at a step.

    Attributes:
      kept: (LANES,), 0 where a segment begins, else 1.
      crossed: where segments have states, see :func:`jaxkern.ops.segments.crossings`: a scalar.
    """

    kept: jax.Array
    crossed: Any


def where_kept(keep: Keep | None, h: list[Rows]) -> list[Rows]:
    """The states, zero where the sequence starts anew."""
    return h if keep is None else map_states(lambda v: jnp.where(keep.kept > 0.5, v, 0.0), h)


def states_before(scan: Scan, refs: Any, keep: Keep | None, h: list[Rows]) -> list[Rows]:
    """The states that a step begins from, those after the step before it being `h`."""
    if keep is None or refs.starts is None:
        return where_kept(keep, h)
    return _taken(scan, refs.starts, keep, _entered(scan, keep), h)


def gradients_before(scan: Scan, refs: Any, keep: Keep | None, dh: list[Rows]) -> list[Rows]:
    """The gradients of the states after the step before, of those that a step begins from."""
    if keep is None:
        return dh
    store_of_segment(scan, refs.dstarts, keep, _entered(scan, keep), dh)
    if refs.dends is None:
        return where_kept(keep, dh)
    return _taken(scan, refs.dends, keep, _left(scan, keep), dh)


def write_final_states(scan: Scan, refs: Any, keep: Keep | None, h: list[Rows]) -> None:
    """Where a segment ends before a step, its final states."""
    if keep is not None:
        store_of_segment(scan, refs.ends, keep, _left(scan, keep), h)


def add_final_gradients(scan: Scan, refs: Any, keep: Keep | None, add: Callable[..., Any], dh: Any):
    """``add(dh, gradients)`` where a segment ends before a step, else `dh`."""
    if keep is None or refs.dends is None:
        return dh
    at, number = Block(scan), _left(scan, keep)
    load = lambda: scan.load_states(refs.dends.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, lambda: add(dh, load()), lambda: dh)


def store_of_segment(scan: Scan, ref: Any, keep: Keep, number: Any, states: list[Rows]) -> None:
    """Stores states of the segment `number` where it ends, if it has any."""
    if ref is None:
        return
    at = Block(scan)

    @pl.when((keep.crossed >= 0) & (number < ref.shape[1]))
    def _():
        scan.store_states(ref.at[at.batch, number, at.channels], states)


def _taken(scan: Scan, ref: Any, keep: Keep, number: Any, otherwise: list[Rows]) -> list[Rows]:
    """The states of a segment where it begins or ends, `otherwise` elsewhere."""
    at = Block(scan)
    load = lambda: scan.load_states(ref.at[at.batch, number, at.channels])
    return lax.cond(keep.crossed >= 0, load, lambda: otherwise)


def _entered(scan: Scan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.rem(keep.crossed, _numbers(scan))


def _left(scan: Scan, keep: Keep) -> Any:
    return None if keep.crossed is None else lax.div(keep.crossed, _numbers(scan))


def _numbers(scan: Scan) -> Any:
    assert scan.options.num_segments is not None
    return jnp.int32(scan.options.num_segments + 1)


def decayed(total: Rows, decay: list[Rows], h: list[Rows], resets: bool) -> list[Rows]:
    """The states after steps of the sizes `total` in sum; an infinite sum stands for a reset."""

    def decayed(t, a, v):
        return jnp.where(t < float("inf"), a * v, 0.0) if resets else a * v

    return [
        [decayed(t, a, v) for a, v in zip(*rows, strict=True)]
        for t, *rows in zip(total, decay, h, strict=True)
    ]


def dot(a: Rows, b: Rows) -> jax.Array:
    return functools.reduce(jnp.add, (v * w for v, w in zip(a, b, strict=True)))


def shared_size(tile: Tile, steps: int) -> tuple[int]:
    return (steps * tile.row(2),)


def shared_chunk(smem: Any, tile: Tile, c: Any) -> Any:
    size = CHUNK * tile.row(2)
    return smem.shared.at[pl.ds(c * size, size)]


class Steps:
    """Some steps in shared memory, and how their values are dealt out to the lanes."""

    def __init__(self, scan: Scan, tokens: Any, token: Any, count: int = CHUNK):
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
        return self.scan.load1(getattr(self.tokens, name), *t.owned(step=stride), start=start)

    def share(self, ref: Any, round: int, values: Rows) -> None:
        """Puts owned values into `ref`, (steps, row(len(values))), for :meth:`shared`."""
        t, n = self.scan.tile, len(values)
        start = round * t.steps * t.row(n)
        self.scan.store(ref, values, *t.owned(step=t.row(n), channel=n), start=start)

    def shared(self, ref: Any, step: int, n: int, volatile: bool = False) -> list[Rows]:
        """[n][R]: the values of a step for the lane's channels."""
        start = step * self.scan.tile.row(n)
        rows = self.scan.load_per_channel(ref, n, start, volatile)
        return [[row[i] for row in rows] for i in range(n)]

    def weights(self, name: str, step: int) -> Rows:
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
        return Keep(self.scan.load1(self.tokens.keep, start=step, volatile=volatile), crossed)

    def crosses(self) -> jax.Array:
        """Whether a segment begins at one of the steps, a scalar."""
        tokens, steps = self.tokens, range(self.count)
        if tokens.crossed is not None:
            return functools.reduce(jnp.logical_or, (tokens.crossed[s] >= 0 for s in steps))
        return functools.reduce(jnp.logical_or, (tokens.keep[s] < 0.5 for s in steps))

    def within_a_segment(self) -> "Steps":
        """Return these steps as a segment's own, at which none begins: :meth:`keep` is None."""
        tokens = types.SimpleNamespace(**vars(self.tokens) | {"keep": None, "crossed": None})
        return Steps(self.scan, tokens, self.token, self.count)

    def write(self, ref: Any, round: int, value: jax.Array) -> None:
        """Writes the owned values to (B, L, D) in global memory."""
        at, t, stride = Block(self.scan), self.scan.tile, self.scan.token_stride
        part = ref.at[at.batch, pl.ds(self.token, CHUNK), at.channels]
        self.scan.store(part, [value], *t.owned(step=stride), start=round * t.steps * stride)

    def all_owned(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Of each round (its number, the values owned), None for arrays that are not there.

        All are read at once: a read of shared memory stays behind the writes before it, so that a
        round that writes at its end would have the next one wait for memory.
        """
        read = lambda name, r: None if getattr(self.tokens, name) is None else self.owned(name, r)
        return iter([(r, *(read(name, r) for name in names)) for r in self.rounds])

    def step_size(self, round: int, raw: jax.Array) -> tuple[jax.Array, Any]:
        return self.scan.step_size(raw, self.token + round * self.scan.tile.steps)

    def gate(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """z · sigmoid(z), and its derivative."""
        gate = sigmoid(z, self.scan.exact)
        return z * gate, gate * (1 + z * (1 - gate))

    def over_states(self, parts: Rows) -> jax.Array:
        """The sums over states of a round's [J · R] values: to each lane the one it owns."""
        for shuffle in self.shuffles_over_states():
            parts = shuffle(parts)
        (own,) = parts
        return own

    def shuffles_over_states(self) -> list[Callable[[Rows], Rows]]:
        first, *others = self.scan.tile.over_states
        swapped = lambda parts: self.scan.sum(parts[0::2] + parts[1::2], [first], swapped=1)
        return [swapped, *(functools.partial(self.scan.sum, distances=[d]) for d in others)]


def over_chunks(
    span: Span, per_tile: int, load: Callable[[Any, int], Any], body: Callable[..., Any], init: Any
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


def decays(dt: Rows, rate: list[Rows], by_polynomial: int = 0) -> list[Rows]:
    """exp(dt · A), of a lane's first states by polynomials: the exponential unit has the others."""
    exp2 = lambda k: exp2_by_polynomial if k < by_polynomial else jnp.exp2
    return [
        [exp2(r * len(row) + k)(d * a) for k, a in enumerate(row)]
        for r, (d, row) in enumerate(zip(dt, rate, strict=True))
    ]


def polynomials(tile: Tile) -> int:
    """Of a lane's decays, where there is little else to do: an eighth evens out the two units."""
    return CHANNELS * tile.states // 8


def advance(decay: list[Rows], dtx: Rows, B: Rows, h: list[Rows]) -> list[Rows]:
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
    scan: Scan,
    refs: Any,
    span: Span,
    per_tile: int,
    at: Callable[[Any], tuple[Steps, Any]],
    rate: list[Rows],
    h: list[Rows],
    total: Any = None,
    after: Callable[[Any, list[Rows]], None] = lambda c, h: None,
) -> tuple[list[Rows], Any]:
    """The states after the chunks, each given to `after`, and, where asked for, Σdt.

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
            if total is not None:
                total = add_reset(total, keep, dt)
        after(c, h)
        return h, total

    return over_chunks(span, per_tile, load, body, (h, total))


def add_reset(total: Rows, keep: Any, dt: Rows) -> Rows:
    if keep is not None:
        total = [jnp.where(keep.kept > 0.5, t, float("inf")) for t in total]
    return [t + d for t, d in zip(total, dt, strict=True)]
