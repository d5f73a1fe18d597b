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

from jaxkern.mosaic.lanes import sync_warpgroup
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


def causal(v: Any) -> Any:
    """(64, 64), fp32, with −∞ above the diagonal.

    Comparisons with one number of the lane, and not of 16 columns' numbers in registers.
    """
    if interpreted():
        rows, columns = (lax.broadcasted_iota(jnp.int32, v.shape, a) for a in (0, 1))
        return jnp.where(columns <= rows, v, -jnp.inf)
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
            column = 8 * index[1] - 8 * index[4]
            parts = []
            for k, value in enumerate(elements(register)):
                keep = arith.cmpi(arith.CmpIPredicate.sge, ahead, i32(column + k))
                parts.append(arith.select(keep, value, never))
            chosen[index] = vector.from_elements(ir.VectorType.get((len(parts),), f32), parts)
        return mgpu.FragmentedArray(_registers=chosen, _layout=v.layout, _is_signed=None)

    return select(v)


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

    def fetch_x(n: Any) -> None:
        rows = pl.ds((first + n) * Q, Q)
        copy(refs.x.at[batch, rows, head, channels], smem.x.at[wg], smem.x_full.at[wg])

    def fetch_steps(n: Any) -> None:
        slot = wg * 2 + lax.rem(n, 2)
        copy(refs.steps.at[batch, head, first + n], smem.steps.at[slot], smem.steps_full.at[slot])

    def fetch_weights(n: Any) -> None:
        slot, rows = lax.rem(n, 2), pl.ds((first + n) * Q, Q)
        copy(refs.B.at[batch, rows, group], smem.B.at[slot], smem.full.at[slot])
        copy(refs.C.at[batch, rows, group], smem.C.at[slot], smem.full.at[slot])

    fetch_steps(0)
    fetch_x(0)

    @pl.when(wg == 0)
    def _():
        for n in range(2):
            pl.when(n < count)(functools.partial(fetch_weights, n))

    held, out = smem.held.at[wg], smem.out.at[wg]
    skip = None if refs.D is None or len(refs.D.shape) > 1 else refs.D[head]

    def step(n: Any, h: Any) -> Any:
        slot, own = lax.rem(n, 2), wg * 2 + lax.rem(n, 2)
        rows = pl.ds((first + n) * Q, Q)
        steps, B, C = smem.steps.at[own], smem.B.at[slot], smem.C.at[slot]
        x = smem.x.at[wg]
        dtype = smem.x.dtype
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
        held[...] = h.astype(dtype)

        @pl.when(n + 1 < count)
        def _():
            fetch_steps(n + 1)

        plgpu.barrier_wait(smem.full.at[slot])
        s = product(C, B.transpose((1, 0)), (Q, Q))  # (i, j)
        plgpu.barrier_wait(smem.steps_full.at[own])
        cum = plgpu.load(steps.at[0], layout=ROWS)
        before = plgpu.load(steps.at[0], layout=COLUMNS)
        dt = plgpu.load(steps.at[1], layout=COLUMNS)
        apart = over_rows(cum, (Q, Q)) - over_columns(before, (Q, Q))
        decay = jnp.exp2(causal(apart))
        out[...] = (s * over_columns(dt, (Q, Q)) * decay).astype(dtype)
        plgpu.commit_smem()
        if refs.states is not None:

            @pl.when(lax.rem(n, CHUNK // STEP) == 0)
            def _():
                chunk = lax.div(first + n, CHUNK // STEP)
                plgpu.copy_smem_to_gmem(held, refs.states.at[batch, chunk, head, channels])


        @pl.when((wg == 0) & (n > 0) & (n + 1 < count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(n + 1, 2)])
            fetch_weights(n + 1)

        y = product(C, held.transpose((1, 0)), (Q, P))  # (i, p)
        cum = plgpu.load(steps.at[0], layout=ROWS)
        y = y * over_rows(jnp.exp2(cum), (Q, P))
        plgpu.barrier_wait(smem.x_full.at[wg])
        y = add_product(y, out, x)
        if refs.D is not None:
            if skip is None:
                D = plgpu.load(refs.D.at[head, channels], layout=COLUMNS, optimized=False)
                D = over_columns(D, (Q, P))
            else:
                D = skip
            y = y + D * plgpu.load(x, layout=WGMMA).astype(jnp.float32)
        if refs.z is not None:
            z = refs.z.at[batch, rows, head, channels]
            z = plgpu.load(z, layout=WGMMA, optimized=False).astype(jnp.float32)
            y = y * z / (1 + jnp.exp2(z * -LOG2E))
        sync_warpgroup()
        out[...] = y.astype(dtype)
        last = steps[0, Q - 1]
        before = plgpu.load(steps.at[0], layout=COLUMNS)
        dt = plgpu.load(steps.at[1], layout=COLUMNS)
        weight = over_columns(jnp.exp2(last - before) * dt, (P, Q))
        turned = plgpu.load(x.transpose((1, 0)), layout=WGMMA).astype(jnp.float32)  # (p, j)
        turned = (turned * weight).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, refs.out.at[batch, rows, head, channels])

        @pl.when(n + 1 < count)  # all warps have read x
        def _():
            fetch_x(n + 1)

        h = add_product(h * jnp.exp2(last), turned, B)
        plgpu.barrier_arrive(smem.empty.at[slot])
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
        "x": tiles_of(W, Q, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2 * W, 2, Q), jnp.float32),
        "B": tiles_of(2, Q, N, dtype=dtype),
        "C": tiles_of(2, Q, N, dtype=dtype),
        "held": tiles_of(W, SLICE, N, dtype=dtype),
        "out": tiles_of(W, Q, SLICE, dtype=dtype),
        "x_full": plgpu.Barrier(num_arrivals=1, num_barriers=W),
        "steps_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=2),
    }
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


def launch_fwd(options, x, dt, cum, B, C, D, z, initial_state, *, W=4, parts=None, save=None):
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
