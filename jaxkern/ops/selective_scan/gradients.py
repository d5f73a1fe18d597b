"""The backward of a chunk.

It runs a chunk of CHUNK steps up, from the state before it to those before each step, which stay in
registers, and down with their gradients. The decays are computed again on the way down: keeping
them, and the states in shared memory, would cost more time there than the exponentials do.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.lanes import sync_warp
from jaxkern.ops.selective_scan.blocks import Block, Rows, Scan, map_states
from jaxkern.ops.selective_scan.reference import CHUNK
from jaxkern.ops.selective_scan.steps import (
    Steps,
    advance,
    decays,
    dot,
    gradients_before,
    states_before,
)
from jaxkern.ops.selective_scan.sums import ChannelSums
from jaxkern.ops.selective_scan.tiles import CHANNELS
from jaxkern.ops.softplus import softplus_slope


class ChunkGradients:
    """The gradients of a chunk's steps, and what they read: a block's constants and memory."""

    def __init__(self, scan: Scan, refs: Any, smem: Any, at: Block, chunks: int):
        self.scan, self.refs, self.smem, self.at, self.tile = scan, refs, smem, at, scan.tile
        self.rate, self.D, self.dt_bias = scan.constants(refs)
        # The state after the last step is not among those saved, nor any beyond the end.
        self.reads_all = scan.every < CHUNK and scan.length == scan.padded
        self.sums = ChannelSums(scan, refs, smem, at, chunks)

    def saved(self, token: Any) -> list[Rows]:
        """The saved state before a token, in the order of memory."""
        at = self.at
        return self.scan.load_unswapped(
            self.refs.states.at[at.batch, token // self.scan.every, at.channels]
        )

    def run_chunk(
        self, chunk: Steps, from_end: Any, n: Any, h: list[Rows], load_following: Any, carry: Any
    ) -> Any:
        """Runs a chunk up, to the states before each step, and down with their gradients.

        Of the chunks of the n-th tile, `from_end` are behind this one.
        """
        dh, dA, dD, ddt_bias = carry
        own = self.share_chunk(chunk)
        load_up = self.load_up(chunk)
        before, weights, after = self.run_up(chunk, own, load_up, h)
        # In time for the next round, and not waited for together with this one's.
        following_h = load_following()
        dh, dA = map_states(lambda v: v, (dh, dA))
        into, ddecay = [], []  # Σ_n dh · B and Σ_n v · A · log2(e), [J · R]
        of_chunk = _nones(2)  # the sums for dD and ddt_bias
        load = self.load_down(chunk, load_up, weights)
        for step, loaded in _loaded_ahead(range(CHUNK)[::-1], load):
            reached = states_before(self.scan, self.refs, loaded[-1], before[step])
            dh, *sums = self.step_gradients(dh, dA, reached, after, loaded)
            dh = gradients_before(self.scan, self.refs, loaded[-1], dh)
            dB, dC, into_step, ddecay_step = sums
            after = before[step]
            self.sums.store(n, from_end, chunk.token, step, dB, dC)
            into, ddecay = into_step + into, ddecay_step + ddecay
            if step % self.tile.steps == 0:
                round = step // self.tile.steps
                x, _, _, dy, _ = own[round]
                ddt = self.write_round(chunk, round, own[round], into, ddecay)
                of_chunk = [_plus(of_chunk[0], dy * x), _plus(of_chunk[1], ddt)]
                into, ddecay = [], []
        return following_h, dh, dA, _add(dD, of_chunk[0]), _add(ddt_bias, of_chunk[1])

    def share_chunk(self, chunk: Steps) -> list[tuple[Any, ...]]:
        """Computes what a lane owns of each round, and shares what the others need of it.

        Of each round (x, dt, where dt has a slope, dy, dout · y's share of dz).
        """
        own = []
        sync_warp()  # all lanes are done with the chunk before
        for round, x, raw, dout, z in chunk.all_owned("x", "dt", "dout", "z"):
            dt, inside = chunk.step_size(round, raw + self.dt_bias)
            silu, slope = (1.0, 0.0) if z is None else chunk.gate(z)
            dy = dout * silu
            chunk.share(self.smem.shared, round, [dt, dt * x])
            chunk.share(self.smem.dy, round, [dy])
            own.append((x, dt, inside, dy, dout * slope))
        sync_warp()
        return own

    def load_up(self, chunk: Steps) -> Callable[[int], Any]:
        """``load(step)`` for the way up: dt · x, B, C, keep, decays, and the state if saved."""

        def load(step):
            following = None
            if self.reads_all and step < CHUNK - 1:
                following = self.scan.swapped(self.saved(chunk.token + step + 1))
            dt, dtx = chunk.shared(self.smem.shared, step, 2)
            weights = chunk.weights("B", step), chunk.weights("C", step)
            return dtx, *weights, chunk.keep(step), decays(dt, self.rate), following

        return load

    def run_up(
        self, chunk: Steps, own: list[Any], load: Callable[[int], Any], h: list[Rows]
    ) -> tuple[list[Any], list[Any], list[Rows]]:
        """The states before each step, B and C of each, and the state after the chunk.

        Writes dz on the way, which needs y.
        """
        scan, refs, tile = self.scan, self.refs, self.tile
        ys, before, weights = [], [], []
        for step, (dtx, B, C, keep, decay, following) in _loaded_ahead(range(CHUNK), load):
            before.append(h)
            weights.append((B, C))
            h = following or advance(decay, dtx, B, states_before(scan, refs, keep, h))
            if refs.z is not None:
                ys += [dot(row, C) for row in h]
                if (step + 1) % tile.steps == 0:
                    round = step // tile.steps
                    x, *_, dsilu = own[round]
                    chunk.write(refs.dz, round, dsilu * (chunk.over_states(ys) + self.D * x))
                    ys = []
        return before, weights, h

    def load_down(self, chunk: Steps, load_up: Any, weights: list[Any]) -> Callable[[int], Any]:
        """``load(step)`` for the way down: dy, dt, dt · x, decays, B, C and keep."""
        keeps_weights = self.tile.states <= 4  # of a chunk, in registers; more would spill

        def load(step):
            # Further reads of dt and keep have the compiler not hold the decays of the way up, nor
            # where segments begin: there are no registers for them.
            dt, dtx = chunk.shared(self.smem.shared, step, 2, volatile=True)
            B, C = weights[step] if keeps_weights else load_up(step)[1:3]
            keep = chunk.keep(step, volatile=True)
            dy = chunk.shared(self.smem.dy, step, 1)[0]
            return dy, dt, dtx, decays(dt, self.rate), B, C, keep

        return load

    def step_gradients(
        self, dh: list[Rows], dA: list[Rows], reached: Any, after: list[Rows], loaded: Any
    ) -> tuple[Any, ...]:
        """dh before a step, and its dB, dC, Σ_n dh · B and Σ_n v · A · log2(e); adds to dA."""
        dy, dt, dtx, decay, B, C, _ = loaded
        dB, dC = _nones(self.tile.states), _nones(self.tile.states)
        into, ddecay = _nones(CHANNELS), _nones(CHANNELS)
        each = [(r, k) for r in range(CHANNELS) for k in range(self.tile.states)]
        for r, k in each:
            g = dh[r][k] + dy[r] * C[k]
            dB[k] = _plus(dB[k], g * dtx[r])
            dC[k] = _plus(dC[k], dy[r] * after[r][k])
            into[r] = _plus(into[r], g * B[k])
            g = g * decay[r][k]
            v = g * reached[r][k]
            ddecay[r] = _plus(ddecay[r], v * self.rate[r][k])
            dA[r][k] = dA[r][k] + v * dt[r]
            dh[r][k] = g
        return dh, dB, dC, into, ddecay

    def write_round(
        self, chunk: Steps, round: int, own: tuple[Any, ...], into: Rows, ddecay: Rows
    ) -> jax.Array:
        """Writes dx and ddt of a round, and returns ddt."""
        x, dt, inside, dy, _ = own
        into_own, ddecay_own = chunk.over_states(into), chunk.over_states(ddecay)
        chunk.write(self.refs.dx, round, dt * into_own + self.D * dy)
        ddt = ddecay_own * (1 / LOG2E) + x * into_own
        if self.scan.options.sizes.softplus:
            ddt = ddt * softplus_slope(dt, self.scan.exact)
        if inside is not None:
            ddt = jnp.where(inside, ddt, 0.0)
        chunk.write(self.refs.ddt, round, ddt)
        return ddt


def _loaded_ahead(steps: Sequence[int], load: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """(step, load(step)), each loaded before the step before it is worked on, and writes."""
    ahead = load(steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        now, ahead = ahead, None if following is None else load(following)
        yield step, now


def _nones(count: int) -> list[Any]:
    """Sums of nothing yet, for :func:`_plus`."""
    return [None] * count


def _plus(total: Any, value: jax.Array) -> jax.Array:
    return value if total is None else total + value


def _add(total: tuple[jax.Array, jax.Array], value: Any) -> tuple[jax.Array, jax.Array]:
    """Kahan's sum: the total, and what rounding it has added too much."""
    before, excess = total
    value = value - excess
    after = before + value
    return after, (after - before) - value
