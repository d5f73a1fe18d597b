"""The states alone, of parts of the sequence: forward the scan's, in reverse their gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.named import launch_named
from jaxkern.ops.ssd.forward import (
    BLOCK,
    BOX,
    COLUMNS,
    WARPGROUP,
    WGMMA,
    Scan,
    add_product,
    over_columns,
    place,
    tiles_of,
)
from jaxkern.ops.ssd.tiles import CHUNK, SLICE, STEP

STAGES = 3


def carry_kernel(scan: Scan, reverse: bool, refs: Any, smem: Any) -> None:
    """With decay: state = decay · state + Σ weight · v ⊗ w over the tokens of a step."""
    wg = lax.axis_index(WARPGROUP)
    batch, part, group, head, channels = place(scan)
    first = part * scan.part_steps
    count = jnp.minimum(scan.part_steps, scan.steps - first)
    P, N, Q = SLICE, scan.states, STEP
    copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)

    def at(n: Any) -> Any:
        return first + (count - 1 - n if reverse else n)

    def fetch_v(n: Any) -> None:
        slot, step = wg * STAGES + lax.rem(n, STAGES), at(n)
        rows = pl.ds(step * Q, Q)
        copy(refs.v.at[batch, rows, head, channels], smem.v.at[slot], smem.v_full.at[slot])
        copy(refs.steps.at[batch, head, step], smem.steps.at[slot], smem.v_full.at[slot])

    def fetch_w(n: Any) -> None:
        slot, rows = lax.rem(n, STAGES), pl.ds(at(n) * Q, Q)
        copy(refs.w.at[batch, rows, group], smem.w.at[slot], smem.full.at[slot])

    for n in range(STAGES):

        @pl.when(n < count)
        def _():
            fetch_v(n)

            @pl.when(wg == 0)
            def _():
                fetch_w(n)

    def save(n: Any, h: Any) -> None:
        chunk = lax.div(at(n), CHUNK // STEP)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k in range(N // BOX):
            smem.saved.at[wg, k][...] = h[:, k * BOX : (k + 1) * BOX].astype(smem.v.dtype)
        plgpu.commit_smem()
        for k in range(N // BOX):
            box = pl.ds(k * BOX, BOX)
            plgpu.copy_smem_to_gmem(
                smem.saved.at[wg, k], refs.states.at[batch, chunk, head, channels, box]
            )

    def step(n: Any, h: Any) -> Any:
        slot, own = lax.rem(n, STAGES), wg * STAGES + lax.rem(n, STAGES)
        dtype = smem.v.dtype
        if refs.states is not None:

            @pl.when(lax.rem(n, CHUNK // STEP) == 0)
            def _():
                save(n, h)

        @pl.when((wg == 0) & (n > 0) & (n + STAGES - 1 < count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(n + STAGES - 1, STAGES)])
            fetch_w(n + STAGES - 1)

        plgpu.barrier_wait(smem.v_full.at[own])
        steps = smem.steps.at[own]
        v = plgpu.load(smem.v.at[own].transpose((1, 0)), layout=WGMMA).astype(jnp.float32)
        last, cum = steps[0, Q - 1], plgpu.load(steps.at[0], layout=COLUMNS)
        if reverse:
            weight = jnp.exp2(cum)
        else:
            weight = jnp.exp2(last - cum) * plgpu.load(steps.at[1], layout=COLUMNS)
        v = (v * over_columns(weight, (P, Q))).astype(dtype)
        h = h * jnp.exp2(last)
        plgpu.barrier_wait(smem.full.at[slot])
        h = add_product(h, v, smem.w.at[slot])
        plgpu.barrier_arrive(smem.empty.at[slot])
        plgpu.commit_smem()  # all warps have read v

        @pl.when(n + STAGES < count)
        def _():
            fetch_v(n + STAGES)

        return h

    if refs.initial is None:
        h = plgpu.layout_cast(jnp.zeros((P, N), jnp.float32), WGMMA)
    else:
        h = plgpu.load(refs.initial.at[batch, part, head, channels], layout=WGMMA, optimized=False)
        h = h.astype(jnp.float32)
    h = lax.fori_loop(0, count, step, h)
    plgpu.wait_smem_to_gmem(0)
    if refs.final is not None:
        refs.final.at[batch, part, head, channels][...] = h


def launch_carry(
    scan: Scan, reverse: bool, v: Any, w: Any, steps: Any, initial: Any, *, final: bool
) -> tuple[Any, Any]:
    """(states at the start of each chunk, in reverse at its end; of each part the last one)."""
    N, W = scan.states, scan.warpgroups
    b, _, heads, p = v.shape
    like = jax.ShapeDtypeStruct
    scratch = {
        "v": tiles_of(STAGES * W, STEP, SLICE, dtype=v.dtype),
        "steps": plgpu.SMEM((STAGES * W, 2, STEP), jnp.float32),
        "w": tiles_of(STAGES, STEP, N, dtype=v.dtype),
        "v_full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES * W),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=STAGES),
    }
    if scan.save:
        scratch["saved"] = tiles_of(W, N // BOX, SLICE, BOX, dtype=v.dtype)
    chunks = scan.steps // (CHUNK // STEP)
    results = launch_named(
        functools.partial(carry_kernel, scan, reverse),
        {"v": v, "w": w, "steps": steps, "initial": initial},
        {
            "states": like((b, chunks, heads, p, N), v.dtype) if scan.save else None,
            "final": like((b, scan.parts, heads, p, N), jnp.float32) if final else None,
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


def part_ends(
    scan: Scan, reverse: bool, v: Any, w: Any, steps: Any, cum: Any, initial: Any
) -> Any:
    """(B, parts, H, P, N): the state with which each part begins.

    Args:
      cum: (B, H, L), as the contract has it.
      initial: (B, H, P, N), with which the first part begins, in reverse the last one.
    """
    b, _, heads, p = v.shape
    N = scan.states
    if initial is None:
        initial = jnp.zeros((b, heads, p, N), jnp.float32)
    if scan.parts == 1:
        return initial[:, None]
    _, ends = launch_carry(
        dataclasses.replace(scan, save=False), reverse, v, w, steps, None, final=True
    )
    chunks = -(-scan.part_steps // (CHUNK // STEP))
    totals = cum[..., CHUNK - 1 :: CHUNK]  # (B, H, chunks)
    missing = chunks * scan.parts - totals.shape[-1]
    totals = jnp.pad(totals, ((0, 0), (0, 0), (0, missing)))
    decay = jnp.exp(totals.reshape(b, heads, scan.parts, chunks).sum(-1))[..., None, None]
    order = range(scan.parts)
    state, begins = initial, [None] * scan.parts
    for part in reversed(order) if reverse else order:
        begins[part] = state
        state = decay[:, :, part] * state + ends[:, part]
    return jnp.stack(begins, axis=1)
