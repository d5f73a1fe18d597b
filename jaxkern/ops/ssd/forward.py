"""The forward of the SSD scan."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import grid_axes, num_sms
from jaxkern.mosaic.named import launch_named
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
        slot, step = wg * 2 + lax.rem(n, 2), first + n
        rows = pl.ds(step * Q, Q)
        copy(refs.x.at[batch, rows, head, channels], smem.x.at[slot], smem.x_full.at[slot])
        # The last warp may still read the steps two before when x is free already.
        target = smem.steps.at[wg * 3 + lax.rem(n, 3)]
        copy(refs.steps.at[batch, head, step], target, smem.x_full.at[slot])

    def fetch_weights(n: Any) -> None:
        slot, rows = lax.rem(n, 2), pl.ds((first + n) * Q, Q)
        copy(refs.B.at[batch, rows, group], smem.B.at[slot], smem.full.at[slot])
        copy(refs.C.at[batch, rows, group], smem.C.at[slot], smem.full.at[slot])

    for n in range(2):

        @pl.when(n < count)
        def _():
            fetch_x(n)

            @pl.when(wg == 0)
            def _():
                fetch_weights(n)

    skip = None if refs.D is None else plgpu.load(
        refs.D.at[head, channels], layout=ROWS, optimized=False
    )
    j = plgpu.broadcasted_iota(jnp.int32, (Q, Q), 0, layout=WGMMA)
    i = plgpu.broadcasted_iota(jnp.int32, (Q, Q), 1, layout=WGMMA)
    later = j <= i
    middle, out = smem.middle.at[wg], smem.out.at[wg]

    def save(step: Any, h: Any) -> None:
        at = batch, lax.div(step, CHUNK // STEP), head, channels
        for n in range(0, N, 2 * BOX):
            if n:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            slots = [middle, out][: (N - n) // BOX]
            for k, slot in enumerate(slots):
                slot[...] = h[:, n + k * BOX : n + (k + 1) * BOX].astype(slot.dtype)
            plgpu.commit_smem()
            for k, slot in enumerate(slots):
                plgpu.copy_smem_to_gmem(slot, refs.states.at[(*at, pl.ds(n + k * BOX, BOX))])

    def step(n: Any, h: Any) -> Any:
        slot, own = lax.rem(n, 2), wg * 2 + lax.rem(n, 2)
        dtype = smem.x.dtype
        plgpu.barrier_wait(smem.full.at[slot])
        plgpu.barrier_wait(smem.x_full.at[own])
        steps = smem.steps.at[wg * 3 + lax.rem(n, 3)]
        B, C = smem.B.at[slot], smem.C.at[slot]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if refs.states is not None:

            @pl.when(lax.rem(n, CHUNK // STEP) == 0)
            def _():
                save(first + n, h)

        s = product(B, C.transpose((1, 0)), (Q, Q))  # (j, i)
        at_rows = plgpu.load(steps.at[0], layout=ROWS)
        at_columns = plgpu.load(steps.at[0], layout=COLUMNS)
        dt = plgpu.load(steps.at[1], layout=ROWS)
        apart = over_columns(at_columns, (Q, Q)) - over_rows(at_rows, (Q, Q))
        decay = jnp.exp2(jnp.where(later, apart, -jnp.inf))
        m = (s * over_rows(dt, (Q, Q)) * decay).astype(dtype)
        if refs.states is not None:

            @pl.when(lax.rem(n, CHUNK // STEP) == 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        middle[...] = m
        if refs.z is not None:
            rows = pl.ds((first + n) * Q, Q)
            copy(refs.z.at[batch, rows, head, channels], out, smem.z_full.at[wg])
        plgpu.commit_smem()

        @pl.when((wg == 0) & (n > 0) & (n + 1 < count))
        def _():
            before = lax.rem(n + 1, 2)
            plgpu.barrier_wait(smem.empty.at[before])
            fetch_weights(n + 1)

        def carried(acc: Any) -> Any:
            # In halves: h in 16 bits takes half as many registers again.
            for n in range(0, N, BOX):
                box = pl.ds(n, BOX)
                plgpu.wgmma(acc, h[:, n : n + BOX].astype(dtype), C.at[:, box].transpose((1, 0)))
                plgpu.wgmma_wait(0)
            return acc[...]

        y = pl.run_scoped(carried, _accumulator((P, Q), jnp.float32))  # (p, i)
        at_columns = plgpu.load(steps.at[0], layout=COLUMNS)
        y = y * over_columns(jnp.exp2(at_columns), (P, Q))
        x = plgpu.load(smem.x.at[own].transpose((1, 0)), layout=WGMMA)  # (p, j)
        y = add_product(y, x, middle)
        if skip is not None:
            y = y + over_rows(skip, (P, Q)) * x.astype(jnp.float32)
        if refs.z is not None:
            plgpu.barrier_wait(smem.z_full.at[wg])
            z = plgpu.load(out.transpose((1, 0)), layout=WGMMA).astype(jnp.float32)
            y = y * z / (1 + jnp.exp2(z * -LOG2E))
        out.transpose((1, 0))[...] = y.astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds((first + n) * Q, Q)
        plgpu.copy_smem_to_gmem(out, refs.out.at[batch, rows, head, channels])
        # All warps have read x.
        last = steps[0, Q - 1]
        at_columns = plgpu.load(steps.at[0], layout=COLUMNS)
        dt = plgpu.load(steps.at[1], layout=COLUMNS)
        weight = jnp.exp2(last - at_columns) * dt
        x = (x.astype(jnp.float32) * over_columns(weight, (P, Q))).astype(dtype)
        h = add_product(h * jnp.exp2(last), x, B)
        plgpu.barrier_arrive(smem.empty.at[slot])

        @pl.when(n + 2 < count)
        def _():
            fetch_x(n + 2)

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
        "steps": plgpu.SMEM((3 * W, 2, Q), jnp.float32),
        "B": tiles_of(2, Q, N, dtype=dtype),
        "C": tiles_of(2, Q, N, dtype=dtype),
        "middle": tiles_of(W, Q, Q, dtype=dtype),
        "out": tiles_of(W, Q, SLICE, dtype=dtype),
        "x_full": plgpu.Barrier(num_arrivals=2, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=2),
        "z_full": plgpu.Barrier(num_arrivals=1, num_barriers=W),
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
    if D is not None:
        D = jnp.broadcast_to(D.astype(jnp.float32).reshape(heads, -1), (heads, p))
    res = launch_scan(scan, x, steps, B, C, D, z, initial, final=True)
    return res["out"], res["final"][:, -1], res["states"]
