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

from jaxkern.core.split import in_order
from jaxkern.mosaic.named import launch_named
from jaxkern.ops.ssd.blocks import (
    BLOCK,
    COLUMNS,
    TILE,
    WARPGROUP,
    StepDecays,
    Unit,
    accumulated,
    first_state,
    multiply,
    of_step,
    over_columns,
    tiles_of,
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
from jaxkern.ops.ssd.reference import Options, passed_on, reference_bwd_carry, reference_carry
from jaxkern.ops.ssd.tiles import BOX, CARRY_WARPGROUPS, CHUNK, SLICE, STAGES, STEP, STEPS, Scan


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
      The states that are saved, or ``None``, and the last one of each part in fp32.
    """
    W, N, dtype = scan.warpgroups, scan.states, tokens.dtype
    scratch = {
        "tokens": tiles_of(STAGES * W, STEP, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((STAGES * W, 2, CHUNK), jnp.float32),
        "weights": tiles_of(STAGES, STEP, N, dtype=dtype),
        "tokens_full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES * W),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=STAGES),
    }
    if scan.every:
        scratch["held"] = tiles_of(W, N // BOX, SLICE, BOX, dtype=dtype)
    state = scan.heads, scan.channels, N
    like = lambda count, dtype: jax.ShapeDtypeStruct((scan.batch, count, *state), dtype)
    results = launch_named(
        functools.partial(_kernel, scan, reverse),
        {"tokens": tokens, "weights": weights, "steps": steps, "initial": starts},
        {
            "states": like(scan.chunks, dtype) if scan.every else None,
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
    finer, pieces = scan.finer(CARRY_WARPGROUPS[0])
    _, ends = launch_carry(finer, reverse, tokens, weights, steps, None)
    decay = _part_decays(finer, steps)[..., None, None]
    state = jnp.zeros_like(ends[:, 0]) if initial is None else initial.astype(jnp.float32)
    starts: dict[int, Any] = {}
    for n in range(finer.parts)[:: -1 if reverse else 1]:
        starts.setdefault(n // pieces, state)
        state = decay[:, :, n] * state + ends[:, n]
    return jnp.stack([starts[part] for part in range(scan.parts)], axis=1)


def _part_decays(scan: Scan, steps: Any) -> Any:
    """The decay over each part, (B, H, parts)."""
    totals = steps[:, :, :, 0, -1]  # (B, H, chunks)
    missing = scan.parts * scan.part_chunks - scan.chunks
    totals = jnp.pad(totals, ((0, 0), (0, 0), (0, missing)))
    return jnp.exp2(totals.reshape(*totals.shape[:2], scan.parts, -1).sum(-1))


def launch_device_carry(options: Options, x, dt, a, B, rank) -> tuple[Any, Any]:
    """The decay on this device, (B, G, R), 0 where a segment begins, and its last state."""

    def plain(x: Any, dt: Any, a: Any, B: Any, C: Any, D: Any, rank: Any) -> Any:
        del C, D
        return reference_carry(options, x, dt, a, B, rank)

    return _of_device(False, x, dt, a, B, rank, plain)


def launch_device_bwd_carry(options: Options, a, C, dy, rank) -> tuple[Any, Any]:
    """The decay over this device's part, and the gradient of the state before it."""

    def plain(dy: Any, a: Any, _: Any, C: Any, *rest: Any) -> Any:
        return reference_bwd_carry(options, a, C, dy, rest[-1])

    return _of_device(True, dy, a, a, C, rank, plain)


def _of_device(
    reverse: bool, tokens: Any, dt: Any, a: Any, weights: Any, rank: Any, plain: Any
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
    if reverse:
        decays, ends = decays[::-1], ends[::-1]
    combine = lambda one, then: (one[0] * then[0], passed_on(then, one[1]))
    carry = in_order(combine, (decays, ends))
    return carry if rank is None else unless_finite([carry[1]], carry, plain, args)


def _kernel(scan: Scan, reverse: bool, refs: Any, smem: Any) -> None:
    """Goes through the steps of a warpgroup's unit and part, in reverse from the last one on."""
    at = Unit(scan)
    copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)
    where = lambda n: at.first + (at.count - 1 - n if reverse else n)

    def fetch_tokens(n: Any) -> None:
        slot, step = at.warpgroup * STAGES + lax.rem(n, STAGES), where(n)
        tokens = refs.tokens.at[at.batch, of_step(step), at.head, at.channels]
        copy(tokens, smem.tokens.at[slot], smem.tokens_full.at[slot])
        steps = refs.steps.at[at.batch, at.head, lax.div(step, STEPS)]
        copy(steps, smem.steps.at[slot], smem.tokens_full.at[slot])

    def fetch_weights(n: Any) -> None:
        slot, weights = lax.rem(n, STAGES), refs.weights.at[at.batch, of_step(where(n)), at.group]
        copy(weights, smem.weights.at[slot], smem.full.at[slot])

    def save(n: Any, h: Any) -> None:
        held = smem.held.at[at.warpgroup]
        to = refs.states.at[at.batch, lax.div(where(n), STEPS), at.head, at.channels]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k in range(scan.states // BOX):
            held.at[k][...] = h[:, k * BOX : (k + 1) * BOX].astype(held.dtype)
        plgpu.commit_smem()
        for k in range(scan.states // BOX):
            plgpu.copy_smem_to_gmem(held.at[k], to.at[:, pl.ds(k * BOX, BOX)])

    def step(n: Any, h: Any) -> Any:
        slot, own = lax.rem(n, STAGES), at.warpgroup * STAGES + lax.rem(n, STAGES)
        if refs.states is not None:
            pl.when(lax.rem(n, STEPS) == 0)(lambda: save(n, h))

        @pl.when((at.warpgroup == 0) & (n > 0) & (n + STAGES - 1 < at.count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(n + STAGES - 1, STAGES)])
            fetch_weights(n + STAGES - 1)

        plgpu.barrier_wait(smem.tokens_full.at[own])
        steps = StepDecays(smem.steps.at[own], where(n))
        tokens = wide(plgpu.load(smem.tokens.at[own].transpose((1, 0)), layout=TILE))  # (p, j)
        c = steps.sums(COLUMNS)
        if reverse:
            weight = jnp.exp2(c - steps.before())
        else:
            weight = jnp.exp2(steps.last() - c) * steps.sizes(COLUMNS)
        weighted = (tokens * over_columns(weight, SLICE)).astype(smem.tokens.dtype)
        h = h * jnp.exp2(steps.total())
        plgpu.barrier_wait(smem.full.at[slot])
        (h,) = accumulated(lambda h: multiply(h, weighted, smem.weights.at[slot]), h)
        plgpu.barrier_arrive(smem.empty.at[slot])
        plgpu.commit_smem()  # all warps have read the tokens
        pl.when(n + STAGES < at.count)(lambda: fetch_tokens(n + STAGES))
        return h

    for n in range(STAGES):
        pl.when(n < at.count)(functools.partial(fetch_tokens, n))
        pl.when((at.warpgroup == 0) & (n < at.count))(functools.partial(fetch_weights, n))
    h = lax.fori_loop(0, at.count, step, first_state(scan, refs, at))
    plgpu.wait_smem_to_gmem(0)
    refs.final.at[at.batch, at.part, at.head, at.channels][...] = h
