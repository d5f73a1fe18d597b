"""The forward of the SSD scan."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxkern.mosaic.instructions import widened
from jaxkern.mosaic.launch import grid_axes, interpreted, num_sms
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.registers import elements, i32, inline_mlir
from jaxkern.ops.ssd.tiles import CHUNK, SLICE, STEP

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")

WGMMA: Any = plgpu.Layout.WGMMA
ROWS: Any = plgpu.Layout.WGMMA.reduce(1)
COLUMNS: Any = plgpu.Layout.WGMMA.reduce(0)
_accumulator: Any = plgpu.ACC
LOG2E = math.log2(math.e)
SWIZZLE = 128
STAGES = 3
BOX = 64


def tiles_of(*shape: int, dtype: Any) -> Any:
    """Shared memory whose rows of 64 elements are swizzled together."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, BOX)), swizzle(SWIZZLE)))


def over_rows(v: Any, shape: tuple[int, int]) -> Any:
    """(R,), one of each row, as (R, C)."""
    return lax.broadcast_in_dim(v, shape, [0])


def over_columns(v: Any, shape: tuple[int, int]) -> Any:
    """(C,), one of each column, as (R, C)."""
    return lax.broadcast_in_dim(v, shape, [1])


def product(a: Any, b: Any, shape: tuple[int, int]) -> Any:
    """a · b in fp32."""

    def run(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, _accumulator(shape, jnp.float32))


def add_product(value: Any, a: Any, b: Any) -> Any:
    """value + a · b in fp32."""
    return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(_accumulator.init(value))


def causal(v: Any, *, turned: bool = False, first: int = 0) -> Any:
    """(64, n), fp32, from column `first` on, with −∞ above the diagonal, or if `turned` below it.

    Comparisons with one number of the lane, and not of 16 columns' numbers in registers.
    """
    if interpreted():
        rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, a) for a in (0, 1))
        columns = columns + first
        keep = rows <= columns if turned else columns <= rows
        return jnp.where(keep, v, -jnp.inf)
    result = plgpu.ShapeDtypeStruct(v.shape, v.dtype, layout=WGMMA)

    @inline_mlir(WGMMA, returns=result)
    def select(v: Any) -> Any:
        lane = mgpu_utils.thread_idx()
        bits = lambda low, count: arith.andi(arith.shrui(lane, i32(low)), i32((1 << count) - 1))
        row = arith.addi(arith.muli(bits(5, 2), i32(16)), bits(2, 3))
        ahead = arith.subi(row, arith.muli(bits(0, 2), i32(2)))
        f32 = ir.F32Type.get()
        never = arith.constant(f32, -math.inf)
        chosen = np.empty_like(v.registers)
        for index, register in np.ndenumerate(v.registers):
            column = first + 8 * index[1] - 8 * index[4]
            parts = []
            for k, value in enumerate(elements(register)):
                order = arith.CmpIPredicate.sle if turned else arith.CmpIPredicate.sge
                keep = arith.cmpi(order, ahead, i32(column + k))
                parts.append(arith.select(keep, value, never))
            chosen[index] = vector.from_elements(ir.VectorType.get((len(parts),), f32), parts)
        return mgpu.FragmentedArray(_registers=chosen, _layout=v.layout, _is_signed=None)

    return select(v)


def wide(v: Any) -> Any:
    """`v`, in the layout of accumulators, in fp32."""
    if v.dtype != jnp.bfloat16:
        return v.astype(jnp.float32)
    return widened(v, WGMMA)


@dataclasses.dataclass(frozen=True)
class Scan:
    """The sizes of a launch."""

    batch: int
    heads: int
    groups: int
    channels: int
    states: int
    steps: int  # of STEP tokens in the sequence
    parts: int
    warpgroups: int
    save: bool

    @property
    def slices(self) -> int:
        return self.channels // SLICE

    @property
    def units(self) -> int:
        """Of a group: heads' slices."""
        return self.heads // self.groups * self.slices

    @property
    def columns(self) -> int:
        """Blocks of a group."""
        return -(-self.units // self.warpgroups)

    @property
    def grid(self) -> int:
        return self.parts * self.batch * self.groups * self.columns

    @property
    def part_steps(self) -> int:
        """Whole chunks."""
        each = CHUNK // STEP
        return -(-(self.steps // each) // self.parts) * each


def place(scan: Scan) -> tuple[Any, Any, Any, Any, Any]:
    """Of a warpgroup: batch row, part, group, head and channels."""
    wg, block = lax.axis_index(WARPGROUP), lax.axis_index(BLOCK)
    column, rest = lax.rem(block, scan.columns), lax.div(block, scan.columns)
    group, rest = lax.rem(rest, scan.groups), lax.div(rest, scan.groups)
    batch, part = lax.rem(rest, scan.batch), lax.div(rest, scan.batch)
    unit = jnp.minimum(column * scan.warpgroups + wg, scan.units - 1)
    head = group * (scan.units // scan.slices) + lax.div(unit, scan.slices)
    return batch, part, group, head, pl.ds(lax.rem(unit, scan.slices) * SLICE, SLICE)


def scan_kernel(scan: Scan, refs: Any, smem: Any) -> None:
    wg = lax.axis_index(WARPGROUP)
    batch, part, group, head, channels = place(scan)
    first = part * scan.part_steps
    count = jnp.minimum(scan.part_steps, scan.steps - first)
    P, N, Q = SLICE, scan.states, STEP

    copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)

    def fetch_tokens(n: Any) -> None:
        slot, rows = wg * 2 + lax.rem(n, 2), pl.ds((first + n) * Q, Q)
        full = smem.tokens_full.at[slot]
        copy(refs.x.at[batch, rows, head, channels], smem.x.at[slot], full)
        copy(refs.steps.at[batch, head, first + n], smem.steps.at[slot], full)
        if refs.z is not None:
            copy(refs.z.at[batch, rows, head, channels], smem.z.at[slot], full)

    def fetch_weights(n: Any) -> None:
        slot, rows = lax.rem(n, STAGES), pl.ds((first + n) * Q, Q)
        copy(refs.B.at[batch, rows, group], smem.B.at[slot], smem.full.at[slot])
        copy(refs.C.at[batch, rows, group], smem.C.at[slot], smem.full.at[slot])

    for n in range(2):
        pl.when(n < count)(functools.partial(fetch_tokens, n))

    @pl.when(wg == 0)
    def _():
        for n in range(STAGES):
            pl.when(n < count)(functools.partial(fetch_weights, n))

    skip = None
    if refs.D is not None:
        if len(refs.D.shape) > 1:
            skip = plgpu.load(refs.D.at[head, channels], layout=ROWS, optimized=False)
            skip = over_rows(skip, (P, Q))
        else:
            skip = refs.D[head]
    M, out = smem.M.at[wg], smem.out.at[wg]

    def step(n: Any, h: Any) -> Any:
        slot, own = lax.rem(n, STAGES), wg * 2 + lax.rem(n, 2)
        rows = pl.ds((first + n) * Q, Q)
        steps, B, C, x = smem.steps.at[own], smem.B.at[slot], smem.C.at[slot], smem.x.at[own]
        dtype = smem.x.dtype
        saves = lax.rem(n, CHUNK // STEP) == 0
        plgpu.barrier_wait(smem.full.at[slot])

        def within(scores: Any, y: Any) -> tuple[Any, Any, Any]:
            h_narrow = h.astype(dtype)
            plgpu.wgmma(scores, B, C.transpose((1, 0)))  # (j, i)
            plgpu.wgmma(y, h_narrow, C.transpose((1, 0)))  # (p, i)
            plgpu.barrier_wait(smem.tokens_full.at[own])
            cum = plgpu.load(steps.at[0], layout=COLUMNS)
            before = plgpu.load(steps.at[0], layout=ROWS)
            dt = plgpu.load(steps.at[1], layout=ROWS)
            apart = over_columns(cum, (Q, Q)) - over_rows(before, (Q, Q))
            decay = jnp.exp2(causal(apart, turned=True)) * over_rows(dt, (Q, Q))
            s = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            M[...] = (s * decay).astype(dtype)
            if refs.states is not None:

                @pl.when(saves)
                def _():
                    smem.held.at[wg][...] = h_narrow

            plgpu.commit_smem()
            if refs.states is not None:

                @pl.when(saves)
                def _():
                    chunk = lax.div(first + n, CHUNK // STEP)
                    plgpu.copy_smem_to_gmem(
                        smem.held.at[wg], refs.states.at[batch, chunk, head, channels]
                    )

            last = steps[0, Q - 1]
            weight = jnp.exp2(last - cum) * plgpu.load(steps.at[1], layout=COLUMNS)
            turned = plgpu.load(x.transpose((1, 0)), layout=WGMMA)  # (p, j)
            weighted = (wide(turned) * over_columns(weight, (P, Q))).astype(dtype)
            return y[...] * over_columns(jnp.exp2(cum), (P, Q)), turned, weighted

        accumulators = [_accumulator(shape, jnp.float32) for shape in ((Q, Q), (P, Q))]
        y, turned, weighted = pl.run_scoped(within, *accumulators)

        @pl.when((wg == 0) & (n > 0) & (n + STAGES - 1 < count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(n + STAGES - 1, STAGES)])
            fetch_weights(n + STAGES - 1)

        def end(accumulators: Any) -> None:
            y, h = accumulators
            plgpu.wgmma(y, turned, M)
            plgpu.wgmma(h, weighted, B)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
            y = plgpu.wgmma_accumulator_load(y, wait_n=1)
            if skip is not None:
                y = y + skip * wide(turned)
            if refs.z is not None:
                z = wide(plgpu.load(smem.z.at[own].transpose((1, 0)), layout=WGMMA))
                y = y * z / (1 + jnp.exp2(z * -LOG2E))
            out.transpose((1, 0))[...] = y.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, refs.out.at[batch, rows, head, channels])

        last = steps[0, Q - 1]
        begin = _accumulator.init(y), _accumulator.init(h * jnp.exp2(last))
        _, h = pl.run_state(end)(begin)
        plgpu.barrier_arrive(smem.empty.at[slot])

        @pl.when(n + 2 < count)
        def _():
            fetch_tokens(n + 2)

        return h

    if refs.initial is None:
        h = plgpu.layout_cast(jnp.zeros((P, N), jnp.float32), WGMMA)
    else:
        h = plgpu.load(refs.initial.at[batch, part, head, channels], layout=WGMMA, optimized=False)
    h = lax.fori_loop(0, count, step, h)
    plgpu.wait_smem_to_gmem(0)
    if refs.final is not None:
        refs.final.at[batch, part, head, channels][...] = h


def scan_steps(cum: Any, dt: Any) -> Any:
    """(B, H, S, 2, 64): cum and dt of steps of 64 tokens, of (B, H, L), L whole chunks."""
    b, h, tokens = cum.shape
    halves = (cum * LOG2E).reshape(b, h, tokens // CHUNK, 2, STEP)
    start = jnp.pad(halves[..., :1, -1:], ((0, 0),) * 3 + ((1, 0), (0, 0)))
    halves = (halves - start).reshape(b, h, tokens // STEP, STEP)
    return jnp.stack([halves, dt.reshape(halves.shape)], axis=3)


def launch_scan(scan: Scan, x, steps, B, C, D, z, initial, *, final: bool):
    N, W, Q, dtype = scan.states, scan.warpgroups, STEP, x.dtype
    b, tokens, heads, p = x.shape
    like = jax.ShapeDtypeStruct
    scratch = {
        "x": tiles_of(2 * W, Q, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2 * W, 2, Q), jnp.float32),
        "B": tiles_of(STAGES, Q, N, dtype=dtype),
        "C": tiles_of(STAGES, Q, N, dtype=dtype),
        "M": tiles_of(W, Q, Q, dtype=dtype),
        "out": tiles_of(W, Q, SLICE, dtype=dtype),
        "tokens_full": plgpu.Barrier(num_arrivals=2 + (z is not None), num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=STAGES),
    }
    if z is not None:
        scratch["z"] = tiles_of(2 * W, Q, SLICE, dtype=dtype)
    if scan.save:
        scratch["held"] = tiles_of(W, SLICE, N, dtype=dtype)
    chunks = scan.steps // (CHUNK // STEP)
    return launch_named(
        functools.partial(scan_kernel, scan),
        {"x": x, "steps": steps, "B": B, "C": C, "D": D, "z": z, "initial": initial},
        {
            "out": like(x.shape, dtype),
            "final": like((b, scan.parts, heads, p, N), jnp.float32) if final else None,
            "states": like((b, chunks, heads, p, N), dtype) if scan.save else None,
        },
        scratch,
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=W,
        thread_name=WARPGROUP,
        kernel_name="ssd_fwd",
        approx_math=True,
    )


def launch_fwd(options, x, dt, cum, B, C, D, z, initial_state, *, W=2, parts=None, save=None):
    from jaxkern.ops.ssd.carry import part_ends
    b, tokens, heads, p = x.shape
    G, N = B.shape[2:]
    scan = Scan(batch=b, heads=heads, groups=G, channels=p, states=N,
                steps=cum.shape[-1] // STEP, parts=1, warpgroups=W,
                save=options.save if save is None else save)
    chunks = scan.steps // (CHUNK // STEP)
    if parts is None:
        parts = max(1, min(num_sms() // scan.grid, chunks))
    parts = -(-chunks // -(-chunks // parts))
    scan = dataclasses.replace(scan, parts=parts)
    steps = scan_steps(cum, dt)
    if initial_state is not None or parts > 1:
        initial = part_ends(scan, False, x, B, steps, cum, initial_state)
    else:
        initial = None
    D = None if D is None else D.astype(jnp.float32)
    res = launch_scan(scan, x, steps, B, C, D, z, initial, final=True)
    return res["out"], res["final"][:, -1], res["states"]
