"""The backward of the SSD scan, of chunks in parallel."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import unknown_zero
from jaxkern.mosaic.lanes import sync_warpgroup
from jaxkern.mosaic.launch import num_sms
from jaxkern.mosaic.named import launch_named
from jaxkern.ops.ssd.carry import launch_carry, part_ends
from jaxkern.ops.ssd.forward import (
    BLOCK,
    BOX,
    COLUMNS,
    LOG2E,
    ROWS,
    WARPGROUP,
    WGMMA,
    Scan,
    causal,
    over_columns,
    over_rows,
    product,
    scan_steps,
    tiles_of,
    wide,
    _accumulator,
)
from jaxkern.ops.ssd.tiles import CHUNK, SLICE, STEP

HALVES = CHUNK // STEP
PARTS = 2
SUMS = ("cum", "dt", "last", "skip")
"""Of each token; those of `last` and `skip` are added up."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    batch: int
    heads: int
    groups: int
    channels: int
    states: int
    chunks: int
    splits: int  # of a group's units

    @property
    def slices(self) -> int:
        return self.channels // SLICE

    @property
    def units(self) -> int:
        return self.heads // self.groups * self.slices

    @property
    def split_units(self) -> int:
        return -(-self.units // self.splits)

    @property
    def grid(self) -> int:
        return self.splits * self.batch * self.groups * self.chunks


def grads_kernel(sizes: Chunks, refs: Any, smem: Any) -> None:
    wg, block = lax.axis_index(WARPGROUP), lax.axis_index(BLOCK)
    group, rest = lax.rem(block, sizes.groups), lax.div(block, sizes.groups)
    split, rest = lax.rem(rest, sizes.splits), lax.div(rest, sizes.splits)
    chunk, batch = lax.rem(rest, sizes.chunks), lax.div(rest, sizes.chunks)
    first = split * sizes.split_units
    count = jnp.minimum(sizes.split_units, sizes.units - first)
    token = chunk * CHUNK
    N, P, Q = sizes.states, SLICE, STEP

    def unit(n: Any) -> tuple[Any, Any]:
        u = first + n
        head = group * (sizes.units // sizes.slices) + lax.div(u, sizes.slices)
        return head, pl.ds(lax.rem(u, sizes.slices) * SLICE, SLICE)

    @pl.when(wg == HALVES)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)
        tokens = pl.ds(token, CHUNK)
        copy(refs.B.at[batch, tokens, group], smem.B.at[0], smem.weights_full)
        copy(refs.C.at[batch, tokens, group], smem.C.at[0], smem.weights_full)

        def fetch(n: Any, _: Any) -> None:
            slot = lax.rem(n, 2)
            head, channels = unit(n)

            @pl.when(n >= 2)
            def _():
                plgpu.barrier_wait(smem.empty.at[slot])

            full = smem.full.at[slot]
            copy(refs.x.at[batch, tokens, head, channels], smem.x.at[slot], full)
            copy(refs.dy.at[batch, tokens, head, channels], smem.dy.at[slot], full)
            copy(refs.steps.at[batch, head, chunk], smem.steps.at[slot], full)
            for name in ("h", "dh"):
                done = getattr(smem, f"{name}_empty")
                pl.when(n >= 1)(functools.partial(plgpu.barrier_wait, done))
                source = getattr(refs, name).at[batch, chunk, head, channels]
                copy(source, getattr(smem, name).at[0], getattr(smem, f"{name}_full"))

        lax.fori_loop(0, count, fetch, None)

    def compute(w: int) -> None:
        own = pl.ds(w * Q, Q)
        dtype = smem.x.dtype
        blocks = list(range(w + 1))  # of earlier tokens, that these rows read
        later = list(range(w, HALVES))  # of rows that read these tokens
        slot_of = lambda i, j: i * (i + 1) // 2 + j
        rows_of = lambda ref, k: ref.at[pl.ds(k * Q, Q)]
        plgpu.barrier_wait(smem.weights_full)
        score_of = lambda j: product(rows_of(smem.C.at[0], w), rows_of(smem.B.at[0], j).transpose((1, 0)), (Q, Q))
        own_score = score_of(w).astype(dtype)  # (i, j)
        for j in blocks[:-1]:
            smem.score.at[0][...] = score_of(j).astype(dtype)

        def step(n: Any, dB: Any, dC: Any) -> None:
            slot = lax.rem(n, 2)
            head, channels = unit(n)
            # Else the compiler would keep the addresses of all operands in registers.
            zero = unknown_zero()
            B, C, h, dh, early_score = (
                ref.at[zero] for ref in (smem.B, smem.C, smem.h, smem.dh, smem.score)
            )
            M, dS_slots = ((lambda k, ref=ref: ref.at[zero + k]) for ref in (smem.M, smem.dS))
            x, dy, steps = smem.x.at[slot], smem.dy.at[slot], smem.steps.at[slot]
            out = refs.sums.at[batch, head * sizes.slices + lax.rem(first + n, sizes.slices), chunk]
            turned = lambda slots, i: slots(slot_of(i, w)).transpose((1, 0))
            accumulator = lambda columns: _accumulator((Q, columns), jnp.float32)

            def score_grads(j: int, before: Any, *parts: Any) -> tuple[Any, Any]:
                """Stores M and dS of the rows and the tokens of block `j`."""
                wide_part = Q // len(parts)
                at = lambda k: pl.ds(j * Q + k * wide_part, wide_part)
                shape = Q, wide_part
                for k, part in enumerate(parts):
                    plgpu.wgmma(part, rows_of(dy, w), x.at[at(k)].transpose((1, 0)))
                if before is not None:
                    plgpu.wgmma(dC, before, rows_of(B, j - 1))
                if j == w:  # it stays in 16 bits
                    score = lax.optimization_barrier(own_score)
                else:
                    score = plgpu.load(early_score, layout=WGMMA)
                row, ms, dSs = 0.0, [], []
                for k, part in enumerate(parts):
                    of_columns = plgpu.load(steps.at[0, at(k)], layout=COLUMNS)
                    apart = over_rows(cum, shape) - over_columns(of_columns, shape)
                    if j == w:
                        apart = causal(apart, first=k * wide_part)
                    decay = jnp.exp2(apart)
                    score_part = wide(score[:, k * wide_part : (k + 1) * wide_part])
                    ms.append((score_part * decay).astype(dtype))
                    dt = plgpu.load(steps.at[1, at(k)], layout=COLUMNS)
                    left = len(parts) - 1 - k + (before is not None)
                    decay = decay * over_columns(dt, shape)
                    dS = plgpu.wgmma_accumulator_load(part, wait_n=left) * decay
                    row = row + jnp.sum(dS * score_part, axis=1)
                    dSs.append(dS.astype(dtype))
                dS = jnp.concatenate(dSs, axis=1)
                if j == w:  # through this slot the dx before was stored
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                M(slot_of(w, j))[...] = jnp.concatenate(ms, axis=1)
                dS_slots(slot_of(w, j))[...] = dS
                return dS, row

            plgpu.barrier_wait(smem.full.at[slot])
            if w == 1:

                @pl.when(n > 0)
                def _():
                    plgpu.barrier_wait(smem.taken)

            cum = plgpu.load(steps.at[0, own], layout=ROWS)
            row, dS = 0.0, None
            for j in blocks:
                body = functools.partial(score_grads, j, dS)
                dS, row_part = pl.run_scoped(body, *[accumulator(Q // PARTS)] * PARTS)
                row = row + row_part
            plgpu.commit_smem()
            if w == 1:
                plgpu.barrier_arrive(smem.given)
            plgpu.barrier_wait(smem.h_full)

            def from_before(carried: Any) -> Any:
                plgpu.wgmma(carried, rows_of(C, w), h.transpose((1, 0)))  # (i, p)
                plgpu.wgmma(dC, dS, rows_of(B, w))
                dy32 = wide(plgpu.load(rows_of(dy, w), layout=WGMMA))
                entered = jnp.exp2(cum)
                scaled = (dy32 * over_rows(entered, (Q, P))).astype(dtype)
                carried = plgpu.wgmma_accumulator_load(carried, wait_n=1)
                plgpu.wgmma(dC, scaled, h)
                return entered * jnp.sum(carried * dy32, axis=1)

            row = row + pl.run_scoped(from_before, accumulator(P))
            last = steps[0, CHUNK - 1]
            left = jnp.exp2(last - cum)
            plgpu.barrier_wait(smem.dh_full)

            def from_after(dx: Any) -> tuple[Any, Any]:
                plgpu.wgmma(dx, rows_of(B, w), dh.transpose((1, 0)))  # (j, p)
                inner = plgpu.layout_cast(jnp.zeros((P,), jnp.float32), ROWS)
                for k in range(w, N // BOX, HALVES):
                    box = pl.ds(k * BOX, BOX)
                    load = lambda ref: wide(plgpu.load(ref.at[:, box], layout=WGMMA))  # noqa: B023
                    inner = inner + jnp.sum(load(h) * load(dh), axis=1)
                return dx[...] * over_rows(left, (Q, P)), inner * jnp.exp2(last)

            dx, ends = pl.run_scoped(from_after, accumulator(P))
            plgpu.barrier_arrive(smem.h_empty)
            dt = plgpu.load(steps.at[1, own], layout=ROWS)
            x32 = wide(plgpu.load(rows_of(x, w), layout=WGMMA))
            scaled = (x32 * over_rows(left * dt, (Q, P))).astype(dtype)
            ends = ends + dt * jnp.sum(dx * x32, axis=1)
            if w == 0:
                plgpu.barrier_wait(smem.given)

            def finish(dx: Any) -> None:
                for i in later:
                    plgpu.wgmma(dx, turned(M, i), rows_of(dy, i))
                plgpu.wgmma(dB, scaled, dh)
                for i in later:
                    plgpu.wgmma(dB, turned(dS_slots, i), rows_of(C, i))
                dx = plgpu.wgmma_accumulator_load(dx, wait_n=1 + len(later))
                x32 = wide(plgpu.load(rows_of(x, w), layout=WGMMA))
                ddt = jnp.sum(dx * x32, axis=1)
                dt = plgpu.load(steps.at[1, own], layout=ROWS)
                dx = dx * over_rows(dt, (Q, P))
                skipped = None
                if refs.D is not None:
                    dy32 = wide(plgpu.load(rows_of(dy, w), layout=WGMMA))
                    if len(refs.D.shape) > 1:
                        D = plgpu.load(refs.D.at[head, channels], layout=COLUMNS, optimized=False)
                        dx = dx + over_columns(D, (Q, P)) * dy32
                    else:
                        skipped = jnp.sum(x32 * dy32, axis=1)
                        dx = dx + refs.D[head] * dy32
                sync_warpgroup()
                mine = M(slot_of(w, w))
                mine[...] = dx.astype(dtype)
                plgpu.commit_smem()
                tokens = pl.ds(token + w * Q, Q)
                plgpu.copy_smem_to_gmem(mine, refs.dx.at[batch, tokens, head, channels])
                # Last, as the barriers before would wait for these stores.
                for name, sums in zip(SUMS, (row - dt * ddt, ddt, ends, skipped), strict=True):
                    if sums is not None:
                        out.at[SUMS.index(name), own][...] = sums

            pl.run_state(finish)(_accumulator.init(dx))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(smem.dh_empty)
            if w == 0:
                plgpu.barrier_arrive(smem.taken)
            plgpu.barrier_arrive(smem.empty.at[slot])

        def run(dB: Any, dC: Any) -> tuple[Any, Any]:
            lax.fori_loop(0, count, lambda n, _: step(n, dB, dC), None)
            return dB[...], dC[...]

        sums = pl.run_scoped(run, *[_accumulator((Q, N), jnp.float32)] * 2)
        tokens = pl.ds(token + w * Q, Q)
        for ref, value in zip((refs.dB, refs.dC), sums, strict=True):
            ref.at[split, batch, tokens, group][...] = value.astype(ref.dtype)
        plgpu.wait_smem_to_gmem(0)

    for half in range(HALVES):

        @pl.when(wg == half)
        def _(half: int = half) -> None:
            plgpu.set_max_registers(240, action="increase")
            compute(half)


def launch_grads(sizes: Chunks, x, dy, steps, B, C, D, h, dh) -> dict[str, Any]:
    """Gradients from the states before chunks and the gradients of those after them."""
    N, dtype = sizes.states, x.dtype
    like = jax.ShapeDtypeStruct
    f32 = jnp.float32
    blocks = HALVES * (HALVES + 1) // 2
    wgs: dict[str, Any] = {"num_arrivals": HALVES}
    scratch = {
        "x": tiles_of(2, CHUNK, SLICE, dtype=dtype),
        "dy": tiles_of(2, CHUNK, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2, 2, CHUNK), f32),
        "h": tiles_of(1, SLICE, N, dtype=dtype),
        "dh": tiles_of(1, SLICE, N, dtype=dtype),
        "B": tiles_of(1, CHUNK, N, dtype=dtype),
        "C": tiles_of(1, CHUNK, N, dtype=dtype),
        "M": tiles_of(blocks, STEP, STEP, dtype=dtype),
        "dS": tiles_of(blocks, STEP, STEP, dtype=dtype),
        "score": tiles_of(1, STEP, STEP, dtype=dtype),
        "weights_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=HALVES, num_barriers=2),
        "h_full": plgpu.Barrier(num_arrivals=1),
        "dh_full": plgpu.Barrier(num_arrivals=1),
        "h_empty": plgpu.Barrier(num_arrivals=HALVES),
        "dh_empty": plgpu.Barrier(num_arrivals=HALVES),
        "given": plgpu.Barrier(num_arrivals=1),
        "taken": plgpu.Barrier(num_arrivals=1),
    }
    tokens = sizes.chunks * CHUNK
    weights = like(
        (sizes.splits, sizes.batch, tokens, sizes.groups, N), dtype if sizes.splits == 1 else f32
    )
    units = sizes.heads * sizes.slices
    return launch_named(
        functools.partial(grads_kernel, sizes),
        {"x": x, "dy": dy, "steps": steps, "B": B, "C": C, "D": D, "h": h, "dh": dh},
        {
            "dx": like(x.shape, dtype),
            "dB": weights,
            "dC": weights,
            "sums": like((sizes.batch, units, sizes.chunks, len(SUMS), CHUNK), f32),
        },
        scratch,
        grid=(sizes.grid,),
        grid_names=(BLOCK,),
        num_threads=HALVES + 1,
        thread_name=WARPGROUP,
        kernel_name="ssd_bwd",
        approx_math=True,
    )


def launch_bwd(options, x, dt, cum, B, C, D, z, initial_state, states, dout, dfinal, *, W=4):
    del options
    b, tokens, heads, p = x.shape
    G, N = B.shape[2:]
    chunks = cum.shape[-1] // CHUNK
    scan = Scan(
        batch=b, heads=heads, groups=G, channels=p, states=N, steps=chunks * HALVES,
        parts=1, warpgroups=W, save=True,
    )
    D = None if D is None else D.astype(jnp.float32)
    steps = scan_steps(cum, dt)
    dy, dz = dout, None
    if z is not None:
        from jaxkern.ops.ssd.forward import launch_fwd
        y = launch_fwd(None, x, dt, cum, B, C, D, None, initial_state, save=False)[0]
        y, z32, d32 = (v.astype(jnp.float32) for v in (y, z, dout))
        gate = jax.nn.sigmoid(z32)
        dz = (d32 * y * gate * (1 + z32 * (1 - gate))).astype(z.dtype)
        dy = (d32 * z32 * gate).astype(x.dtype)
    if states.shape[1] < chunks:
        parts = dataclasses.replace(scan, parts=states.shape[1])
        states, _ = launch_carry(parts, False, x, B, steps, states, final=False)
    parts = max(1, min(num_sms() // scan.grid, chunks))
    scan = dataclasses.replace(scan, parts=-(-chunks // -(-chunks // parts)))
    ends = None
    if scan.parts > 1 or dfinal is not None:
        ends = part_ends(scan, True, dy, C, steps, cum, dfinal)
    dstates, dinitial = launch_carry(scan, True, dy, C, steps, ends, final=True)
    whole = jnp.stack([(cum * LOG2E), dt], axis=2).reshape(b, heads, 2, chunks, CHUNK)
    whole = whole.swapaxes(2, 3)  # (B, H, chunks, 2, 128)
    sizes = Chunks(batch=b, heads=heads, groups=G, channels=p, states=N, chunks=chunks, splits=1)
    grads = launch_grads(sizes, x, dy, whole, B, C, D, states, dstates)
    sums = grads["sums"].reshape(b, heads, sizes.slices, chunks, len(SUMS), CHUNK).sum(2)
    dcum, ddt, last, skip = (sums[..., k, :] for k in range(len(SUMS)))
    dcum = dcum.at[..., -1].add(last.sum(-1))
    ddt, dcum = (v.reshape(b, heads, chunks * CHUNK) for v in (ddt, dcum))
    weights = [grads[name].sum(0)[:, :tokens].astype(B.dtype) for name in ("dB", "dC")]
    dD = None
    if D is not None:
        if D.ndim == 1:
            dD = skip.sum((0, 2, 3))
        else:
            dD = jnp.einsum("blhp,blhp->hp", x, dy, preferred_element_type=jnp.float32)
    return grads["dx"], ddt, dcum, *weights, dD, dz, dinitial[:, 0]
