"""The carry: the states alone of the SSD scan, or in reverse their gradients.

    h ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B            dh ← exp(c[Q−1]) · dh + (exp(c) ∘ dy)ᵀ C

Forward it finds the states with which parts of the sequence begin, and those that were not saved;
in reverse the gradient of the state after each chunk, for the backward.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.wgmma import start_fetch, swizzled
from jaxkern.ops.section_states import state_after_all
from jaxkern.ops.ssd.blocks import (
    BLOCK,
    COLUMNS,
    TILE,
    WARPGROUP,
    Unit,
    accumulated,
    first_state,
    multiply,
    of_step,
    over_columns,
    wide,
)
from jaxkern.ops.ssd.call import (
    Arrays,
    cut_decays,
    joined,
    of_range,
    state_ranges,
    unless_finite,
)
from jaxkern.ops.ssd.reference import Options, of_states, reference_bwd_carry, reference_carry
from jaxkern.ops.ssd.tiles import BOX, CARRY_WARPGROUPS, CHUNK, SLICE, STEP, STEPS, Scan


def launch_carry(
    scan: Scan, reverse: bool, tokens: Any, weights: Any, steps: Any, starts: Any
) -> tuple[Any, Any]:
    """States (B, chunks, H, P, N) before all chunks if they are saved, and (B, parts, H, P, N).

    In reverse the states are gradients, those before chunks the ones after them, and so on.

    Args:
      scan: its `every` is 1 or 0.
      reverse: whether it runs backward.
      tokens: x or dy, (B, L, H, P).
      weights: B or C, (B, L, G, N).
      steps: of :class:`jaxkern.ops.ssd.call.Arrays`.
      starts: with which each part begins, (B, parts, H, P, N), or ``None`` for zeros.

    Returns:
      The states that are saved, or ``None``, and the last one of each part in fp32. In reverse the
      zeros after the last chunk, where `starts` is ``None``, are not among several that are saved.
    """
    W, N, dtype = scan.warpgroups, scan.states, tokens.dtype
    stages = _stages(scan)
    scratch = {
        "tokens": swizzled(stages * W, STEP, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2 * W, 2, CHUNK), jnp.float32),
        "weights": swizzled(2, CHUNK, N, dtype=dtype),
        "tokens_full": plgpu.Barrier(num_arrivals=1, num_barriers=stages * W),
        "steps_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=2),
    }
    if scan.every:
        scratch["held"] = swizzled(W, N // BOX, SLICE, BOX, dtype=dtype)
    state = scan.heads, scan.channels, N
    like = lambda count, dtype: jax.ShapeDtypeStruct((scan.batch, count, *state), dtype)
    saved = max(1, scan.chunks - 1) if reverse and starts is None else scan.chunks
    results = launch_named(
        functools.partial(_kernel, scan, reverse),
        {"tokens": tokens, "weights": weights, "steps": steps, "initial": starts},
        {
            "states": like(saved, dtype) if scan.every else None,
            "final": like(scan.parts, jnp.float32),
        },
        scratch,
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=W,
        thread_name=WARPGROUP,
        kernel_name="ssd_carry_reverse" if reverse else "ssd_carry",
        approx_math=True,
    )
    return results["states"], results["final"]


def part_starts(
    scan: Scan, reverse: bool, tokens: Any, weights: Any, steps: Any, initial: Any
) -> Any:
    """The states with which parts begin, (B, parts, H, P, N), or ``None`` for zeros.

    The arguments are those of :func:`launch_carry`, `initial` (B, H, P, N) that of the first part,
    in reverse of the last one.
    """
    if scan.parts == 1:
        return None if initial is None else initial[:, None]
    finer, subparts = scan.without_last(reverse).finer(CARRY_WARPGROUPS[0])
    _, ends = launch_carry(finer, reverse, tokens, weights, steps, None)
    decay = _part_decays(finer, steps)[..., None, None]
    state = jnp.zeros_like(ends[:, 0]) if initial is None else initial.astype(jnp.float32)
    starts = [state]
    for n in range(finer.parts)[:: -1 if reverse else 1]:
        state = decay[:, :, n] * state + ends[:, n]
        if (n if reverse else n + 1) % subparts == 0:
            starts.append(state)
    return jnp.stack(starts[::-1] if reverse else starts, axis=1)


def _part_decays(scan: Scan, steps: Any) -> Any:
    """The decay over each part, (B, H, parts)."""
    chunks = slice(scan.first_chunk, scan.first_chunk + scan.chunks)
    totals = steps[:, :, chunks, 0, -1]  # (B, H, chunks)
    missing = scan.parts * scan.part_chunks - scan.chunks
    totals = jnp.pad(totals, ((0, 0), (0, 0), (0, missing)))
    return jnp.exp2(totals.reshape(*totals.shape[:2], scan.parts, -1).sum(-1))


def launch_device_carry(options: Options, x, dt, a, B, rank) -> tuple[Any, Any]:
    """The decay on this device, (B, G, R), 0 where a segment begins, and its last state."""

    def plain(x: Any, dt: Any, a: Any, B: Any, C: Any, D: Any, rank: Any) -> Any:
        del C, D
        return reference_carry(options, x, dt, a, B, rank)

    return _of_device(options, False, x, dt, a, B, rank, plain)


def launch_device_bwd_carry(options: Options, a, C, dy, rank) -> tuple[Any, Any]:
    """The decay over this device's part, and the gradient of the state before it."""

    def plain(dy: Any, a: Any, _: Any, C: Any, *rest: Any) -> Any:
        return reference_bwd_carry(options, a, C, dy, rest[-1])

    return _of_device(options, True, dy, a, a, C, rank, plain)


def _of_device(
    options: Options,
    reverse: bool,
    tokens: Any,
    dt: Any,
    a: Any,
    weights: Any,
    rank: Any,
    plain: Any,
) -> tuple[Any, Any]:
    """The carry of all that there is, from those of parts that fill the GPU."""
    args = tokens, dt, a, weights, None, None, rank
    if tokens.size == 0:
        return plain(*args)
    cut = a if rank is None else cut_decays(a, rank)
    found = []  # the tokens are cut into the same parts for each range of states
    for n in state_ranges(weights.shape[-1]):
        own = of_range(weights, n)
        arrays = Arrays(tokens, dt, cut, own, own, None, None, None)
        scan = arrays.scan(None).cut(*CARRY_WARPGROUPS)
        _, ends = launch_carry(scan, reverse, arrays.x, arrays.B, arrays.steps, None)
        found.append(arrays.cut_states(ends))
    ends = jnp.moveaxis(joined(found), 1, 0)  # (parts, B, G, R, P, N)
    decays = jnp.moveaxis(_part_decays(scan, arrays.steps), 2, 0)
    decays = decays.reshape(ends.shape[:4])  # (parts, B, G, R)
    state = state_after_all(of_states(decays), ends, reverse=reverse)
    carry = jnp.prod(decays, 0), state
    if rank is None or not options.isolate_nan:
        return carry
    return unless_finite([state], carry, plain, args)


def _stages(scan: Scan) -> int:
    """The stages of a warpgroup's tokens, 8 KiB each: a block holds 128 KiB of them at most.

    Beside the states that are to be saved 64 KiB fit.
    """
    return min(4, (8 if scan.every else 16) // scan.warpgroups)


def _kernel(scan: Scan, reverse: bool, refs: Any, smem: Any) -> None:
    """Each warpgroup goes through the chunks of its unit and part."""
    _Carry(scan, reverse, refs, smem, Unit(scan, lax.axis_index(WARPGROUP))).run()


class _Carry:
    """A warpgroup that holds the state of a unit; `n` counts its chunks, `k` steps of these.

    A chunk's steps are multiplied one after the other, each while the next one is weighted. The
    warpgroup has tokens and step sizes of its own, and the first one fetches B or C for all.

    Args:
      scan: the sizes of the launch.
      reverse: whether the last chunk is the first to come.
      refs: arrays in global memory.
      smem: rings of tokens, step sizes and weights; the barriers; `held`, if states are saved.
      at: the unit and the part of the sequence.
    """

    def __init__(self, scan: Scan, reverse: bool, refs: Any, smem: Any, at: Unit):
        self.scan, self.reverse, self.refs, self.smem, self.at = scan, reverse, refs, smem, at
        self.stages = _stages(scan)
        self.count, self.first = lax.div(at.count, STEPS), lax.div(at.first, STEPS)

    def run(self) -> None:
        at, refs = self.at, self.refs
        for k in range(self.stages):
            pl.when(k < at.count)(functools.partial(self.fetch_tokens, k))
        for n in range(2):
            pl.when(n < self.count)(functools.partial(self.fetch_steps, n))
            own = (at.warpgroup == 0) & (n < self.count)
            pl.when(own)(functools.partial(self.fetch_weights, n))
        h = lax.fori_loop(0, self.count, self.chunk, first_state(self.scan, refs, at))
        plgpu.wait_smem_to_gmem(0)
        refs.final.at[at.batch, at.part, at.head, at.channels][...] = h

    def number(self, n: Any) -> Any:
        """The number of the `n`-th chunk in the sequence."""
        return self.first + (self.count - 1 - n if self.reverse else n)

    def slot(self, n: Any) -> Any:
        """The stage of the step sizes of chunk `n`."""
        return self.at.warpgroup * 2 + lax.rem(n, 2)

    def slot_of_step(self, k: Any) -> Any:
        """The stage of the tokens of step `k`."""
        return self.at.warpgroup * self.stages + lax.rem(k, self.stages)

    def fetch_tokens(self, k: Any) -> None:
        """Starts to fetch the tokens of step `k`."""
        at, smem, slot = self.at, self.smem, self.slot_of_step(k)
        step = self.number(lax.div(k, STEPS)) * STEPS + lax.rem(k, STEPS)
        tokens = self.refs.tokens.at[at.batch, of_step(step), at.head, at.channels]
        start_fetch(tokens, smem.tokens.at[slot], smem.tokens_full.at[slot])

    def fetch_steps(self, n: Any) -> None:
        """Starts to fetch the step sizes of chunk `n`."""
        at, smem = self.at, self.smem
        steps = self.refs.steps.at[at.batch, at.head, self.number(n)]
        start_fetch(steps, smem.steps.at[self.slot(n)], smem.steps_full.at[self.slot(n)])

    def fetch_weights(self, n: Any) -> None:
        """Starts to fetch B or C of chunk `n`, for all warpgroups."""
        at, smem, slot = self.at, self.smem, lax.rem(n, 2)
        tokens = pl.ds(self.number(n) * CHUNK, CHUNK)
        start_fetch(
            self.refs.weights.at[at.batch, tokens, at.group],
            smem.weights.at[slot],
            smem.full.at[slot],
        )

    def chunk(self, n: Any, h: Any) -> Any:
        """The state after chunk `n`, (P, N), from that before."""
        at, refs, smem, slot = self.at, self.refs, self.smem, lax.rem(n, 2)
        if refs.states is not None:
            if (saved := refs.states.shape[1]) == self.scan.chunks:
                self.save(n, h)
            else:
                pl.when(self.number(n) < saved)(functools.partial(self.save, n, h))

        @pl.when((at.warpgroup == 0) & (n > 0) & (n + 1 < self.count))
        def _():
            plgpu.barrier_wait(smem.empty.at[1 - slot])
            self.fetch_weights(n + 1)

        plgpu.barrier_wait(smem.steps_full.at[self.slot(n)])

        def add(h: Any) -> None:
            for s in range(STEPS):
                tokens = self.weighted(n, s)
                if s == 0:
                    plgpu.barrier_wait(smem.full.at[slot])
                multiply(h, tokens, smem.weights.at[slot, pl.ds(s * STEP, STEP)])
            # All warps have read these step sizes.
            pl.when(n + 2 < self.count)(lambda: self.fetch_steps(n + 2))

        (h,) = accumulated(add, h * jnp.exp2(smem.steps[self.slot(n), 0, CHUNK - 1]))
        plgpu.barrier_arrive(smem.empty.at[slot])
        return h

    def weighted(self, n: Any, s: int) -> Any:
        """(P, 64): a step's tokens by their weights, transposed; refills their stage."""
        k, smem = n * STEPS + s, self.smem
        steps, part = smem.steps.at[self.slot(n)], pl.ds(s * STEP, STEP)
        plgpu.barrier_wait(smem.tokens_full.at[self.slot_of_step(k)])
        tokens = smem.tokens.at[self.slot_of_step(k)].transpose((1, 0))
        tokens = wide(plgpu.load(tokens, layout=TILE))
        c = plgpu.load(steps.at[0, part], layout=COLUMNS)
        if self.reverse:
            weight = jnp.exp2(c)
        else:
            sizes = plgpu.load(steps.at[1, part], layout=COLUMNS)
            weight = jnp.exp2(steps[0, CHUNK - 1] - c) * sizes
        tokens = (tokens * over_columns(weight, SLICE)).astype(smem.tokens.dtype)
        plgpu.commit_smem()  # all warps have read the tokens
        stages = self.stages
        pl.when(k + stages < self.count * STEPS)(lambda: self.fetch_tokens(k + stages))
        return tokens

    def save(self, n: Any, h: Any) -> None:
        """Saves `h`, the state before chunk `n`, in 16 bits."""
        at, held, states = self.at, self.smem.held.at[self.at.warpgroup], self.refs.states
        to = states.at[at.batch, self.number(n), at.head, at.channels]
        boxes = [*enumerate(range(0, self.scan.states, BOX))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k, start in boxes:
            held.at[k][...] = h[:, start : start + BOX].astype(held.dtype)
        plgpu.commit_smem()
        for k, start in boxes:
            plgpu.copy_smem_to_gmem(held.at[k], to.at[:, pl.ds(start, BOX)])
