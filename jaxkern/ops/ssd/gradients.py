"""The kernel of the SSD scan's backward: the gradients of chunks, in parallel.

A block has a chunk of 128 tokens of a batch row and goes through the units of a group: two
warpgroups with half of the tokens each hold dB and dC in the accumulators of their tensor cores,
and a third one fetches, and adds up h ∘ dh. In halves of the tokens (rows i, earlier ones j ≤ i)
and with the equations of the op, E = exp(c[i] − c[j]) and dM = dy xᵀ:

    the rows' half            M = E ∘ S and dS = dM ∘ E ∘ s[j], for both halves in shared memory
                              dC += dS B + (exp(c) ∘ dy) h
    the earlier ones' half    dx = s ∘ u + D · dy,  u = Mᵀ dy + exp(c[Q−1] − c) ∘ (B dhᵀ)
                              dB += dSᵀ C + (w ∘ x) dh

Sums over columns follow from them: ds[j] = x · u, and what c[j] loses is s[j] · ds[j]; what c[i]
gains are the sums of the rows of dM ∘ M ∘ s and exp(c) ∘ dy · (C hᵀ).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import unknown_zero
from jaxkern.mosaic.lanes import LaneOffsets, store_lanes, sync_warpgroup
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.wgmma import swizzled
from jaxkern.ops.ssd.blocks import (
    BLOCK,
    COLUMNS,
    ROWS,
    TILE,
    WARPGROUP,
    accumulated,
    causal,
    locate,
    loop,
    multiply,
    over_columns,
    over_rows,
    product,
    read,
    warp_sums,
    wide,
    with_accumulators,
)
from jaxkern.ops.ssd.call import Arrays
from jaxkern.ops.ssd.steps import LAST_PARTS, SKIP_PARTS, WARPS
from jaxkern.ops.ssd.tiles import BOX, CHUNK, SLICE, STEP, STEPS, Chunks, Scan

BLOCKS = STEPS * (STEPS + 1) // 2
"""Blocks (64, 64) of a chunk's M on and below the diagonal."""
PARTS = 2
"""Of a block's columns, one after the other: registers would not hold dM and E of all."""
REGISTERS, FETCH_REGISTERS = 240, 24
"""Registers of a lane that computes, and of one that fetches: more for these would be fewer for
those, and twice the spills."""


def launch_grads(chunks: Chunks, arrays: Arrays, dy: Any, h: Any, dh: Any) -> dict[str, Any]:
    """dx; dB and dC of each split of a group; what :func:`chunk_sum_grads` takes, of each unit."""
    scan, dtype, f32 = chunks.scan, dy.dtype, jnp.float32
    N = scan.states
    like = jax.ShapeDtypeStruct
    weights = like(
        (chunks.splits, scan.batch, scan.chunks * CHUNK, scan.groups, N),
        dtype if chunks.splits == 1 else f32,
    )
    units = scan.batch, scan.heads * scan.slices, scan.chunks
    of_heads = arrays.D is not None and arrays.D.ndim == 1
    scratch = {
        "x": swizzled(2, CHUNK, SLICE, dtype=dtype),
        "dy": swizzled(2, CHUNK, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2, 2, CHUNK), f32),
        "h": swizzled(1, SLICE, N, dtype=dtype),
        "dh": swizzled(1, SLICE, N, dtype=dtype),
        "B": swizzled(1, CHUNK, N, dtype=dtype),
        "C": swizzled(1, CHUNK, N, dtype=dtype),
        "M": swizzled(BLOCKS, STEP, STEP, dtype=dtype),
        "dS": swizzled(BLOCKS, STEP, STEP, dtype=dtype),
        "scores": swizzled(1, STEP, STEP, dtype=dtype),
        "sums": plgpu.SMEM((STEPS, 2, STEP), f32),
        "weights_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=STEPS + 1, num_barriers=2),
        "h_full": plgpu.Barrier(num_arrivals=1),
        "h_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "dh_full": plgpu.Barrier(num_arrivals=1),
        "dh_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "given": plgpu.Barrier(num_arrivals=1),
        "taken": plgpu.Barrier(num_arrivals=1),
    }
    return launch_named(
        functools.partial(_kernel, chunks),
        {
            "x": arrays.x,
            "dy": dy,
            "steps": arrays.steps,
            "B": arrays.B,
            "C": arrays.C,
            "D": arrays.D,
            "h": h,
            "dh": dh,
        },
        {
            "dx": like(arrays.x.shape, dtype),
            "dB": weights,
            "dC": weights,
            "sums": like((*units, 2, CHUNK), f32),
            "parts": like((*units, LAST_PARTS + (SKIP_PARTS if of_heads else 0), WARPS), f32),
        },
        scratch,
        grid=(chunks.grid,),
        grid_names=(BLOCK,),
        num_threads=STEPS + 1,
        thread_name=WARPGROUP,
        kernel_name="ssd_bwd",
        approx_math=True,
    )


def _kernel(chunks: Chunks, refs: Any, smem: Any) -> None:
    """Two warpgroups compute, each with its half of the tokens; one fetches, and adds up h ∘ dh."""
    scan, warpgroup = chunks.scan, lax.axis_index(WARPGROUP)
    block = lax.axis_index(BLOCK)
    group, rest = lax.rem(block, scan.groups), lax.div(block, scan.groups)
    split, rest = lax.rem(rest, chunks.splits), lax.div(rest, chunks.splits)
    chunk, batch = lax.rem(rest, scan.chunks), lax.div(rest, scan.chunks)
    first = split * chunks.split_units
    count = jnp.minimum(chunks.split_units, scan.units - first)
    at = _At(scan, batch, chunk, group, split, first, count)

    @pl.when(warpgroup == STEPS)
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        _fetch(at, refs, smem)

    for half in range(STEPS):

        @pl.when(warpgroup == half)
        def _(half: int = half) -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            _compute(at, half, refs, smem)


@dataclasses.dataclass(frozen=True)
class _At:
    """Where a block is: `count` units of a group from `first` on, a split of them."""

    scan: Scan
    batch: Any
    chunk: Any
    group: Any
    split: Any
    first: Any
    count: Any

    def unit(self, n: Any) -> tuple[Any, Any]:
        """Head and channels of the `n`-th unit."""
        return locate(self.scan, self.group, self.first + n)

    def number(self, n: Any) -> Any:
        """The number of the `n`-th unit among all groups'."""
        return self.group * self.scan.units + self.first + n

    def tokens(self, ref: Any, n: Any, first: int = 0, count: int = CHUNK) -> Any:
        """(count, 64): the part of x, dy or dx for the `n`-th unit."""
        head, channels = self.unit(n)
        return ref.at[self.batch, pl.ds(self.chunk * CHUNK + first, count), head, channels]

    def store_part(self, refs: Any, n: Any, part: int, rows: Any) -> None:
        """Stores a part of what is added up for the `n`-th unit, of `rows` in their layout."""
        to = refs.parts.at[self.batch, self.number(n), self.chunk, part]
        store_lanes(to, LaneOffsets(((LANES // WARPS, WARPS, 1),)), [warp_sums(rows)])


def _fetch(at: _At, refs: Any, smem: Any) -> None:
    """Fetches B and C, and all that is read of each unit; stores parts of exp(c[Q−1]) · h · dh."""
    copy = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.ZEROS)
    for name in ("B", "C"):
        tokens = pl.ds(at.chunk * CHUNK, CHUNK)
        source = getattr(refs, name).at[at.batch, tokens, at.group]
        copy(source, getattr(smem, name).at[0], smem.weights_full)

    def fetch(n: Any, _: Any) -> None:
        slot = lax.rem(n, 2)
        head, channels = at.unit(n)
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(smem.empty.at[slot]))
        full = smem.full.at[slot]
        copy(at.tokens(refs.x, n), smem.x.at[slot], full)
        copy(at.tokens(refs.dy, n), smem.dy.at[slot], full)
        copy(refs.steps.at[at.batch, head, at.chunk], smem.steps.at[slot], full)
        for name in ("h", "dh"):
            done = getattr(smem, f"{name}_empty")
            pl.when(n >= 1)(functools.partial(plgpu.barrier_wait, done))
            source = getattr(refs, name).at[at.batch, at.chunk, head, channels]
            copy(source, getattr(smem, name).at[0], getattr(smem, f"{name}_full"))
        for barrier in (full, smem.h_full, smem.dh_full):
            plgpu.barrier_wait(barrier)
        sums = plgpu.layout_cast(jnp.zeros((SLICE,), jnp.float32), ROWS)
        for k in range(0, at.scan.states, BOX):
            load = lambda ref: wide(plgpu.load(ref.at[0, :, pl.ds(k, BOX)], layout=TILE))  # noqa: B023
            sums = sums + jnp.sum(load(smem.h) * load(smem.dh), axis=1)
        sums = sums * jnp.exp2(smem.steps[slot, 0, CHUNK - 1])
        for barrier in (smem.empty.at[slot], smem.h_empty, smem.dh_empty):
            plgpu.barrier_arrive(barrier)
        at.store_part(refs, n, STEPS, sums)

    lax.fori_loop(0, at.count, fetch, None)


def _compute(at: _At, half: int, refs: Any, smem: Any) -> None:
    """The gradients of a half of the tokens; stores those of B and C."""
    plgpu.barrier_wait(smem.weights_full)
    B, C = smem.B.at[0], smem.C.at[0]
    scores = lambda j: product(_half(C, half), _half(B, j).transpose((1, 0)), (STEP, STEP))
    own = scores(half).astype(smem.x.dtype)  # (i, j)
    if half:
        smem.scores.at[0][...] = scores(0).astype(smem.x.dtype)

    def run(dB: Any, dC: Any) -> tuple[Any, Any]:
        def step(n: Any, *accs: Any) -> None:
            _Unit(at, half, n, refs, smem, unknown_zero(), own, *accs).run()

        loop(at.count, step, dB, dC)
        return read(dB), read(dC)

    grads = with_accumulators(run, *[(STEP, at.scan.states)] * 2)
    tokens = pl.ds(at.chunk * CHUNK + half * STEP, STEP)
    slots = [getattr(smem, name).at[_number(half, half)] for name in ("M", "dS")]
    for ref, grad in zip((refs.dB, refs.dC), grads, strict=True):
        to = ref.at[at.split, at.batch, tokens, at.group]
        if ref.dtype == jnp.float32:
            to[...] = grad
            continue
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
        boxes = [pl.ds(k, BOX) for k in range(0, at.scan.states, BOX)]
        for k, slot in zip(range(len(boxes)), slots, strict=False):
            slot[...] = grad[:, k * BOX : (k + 1) * BOX].astype(slot.dtype)
        plgpu.commit_smem()
        for box, slot in zip(boxes, slots, strict=False):
            plgpu.copy_smem_to_gmem(slot, to.at[:, box])
    plgpu.wait_smem_to_gmem(0)


def _number(i: int, j: int) -> int:
    """That of the block of M or dS with rows i and earlier tokens j, numbers of halves."""
    return i * (i + 1) // 2 + j


def _half(ref: Any, half: int) -> Any:
    return ref.at[pl.ds(half * STEP, STEP)]


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A half of the tokens of the `n`-th unit.

    Attributes:
      zero: is added to the indices of shared memory. Else the compiler would compute the addresses
        of all operands before the loop, and spill them past the little L1 cache.
      own: S of the rows and tokens of this half, in 16 bits.
      dB, dC: accumulators.
    """

    at: _At
    half: int
    n: Any
    refs: Any
    smem: Any
    zero: Any
    own: Any
    dB: Any
    dC: Any

    def only(self, name: str) -> Any:
        """What shared memory holds one of."""
        return getattr(self.smem, name).at[self.zero]

    def staged(self, name: str) -> Any:
        """x, dy or steps."""
        return getattr(self.smem, name).at[lax.rem(self.n, 2)]

    def block(self, name: str, i: int, j: int) -> Any:
        """A block of M or dS."""
        return getattr(self.smem, name).at[self.zero + _number(i, j)]

    def tokens(self, name: str) -> Any:
        """This half of x or dy, (64, P), fp32."""
        return wide(plgpu.load(_half(self.staged(name), self.half), layout=TILE))

    def numbers(self, k: int) -> Any:
        """Of this half's tokens c (k = 0) or dt (k = 1), for rows."""
        tokens = pl.ds(self.half * STEP, STEP)
        return plgpu.load(self.staged("steps").at[k, tokens], layout=ROWS)

    def run(self) -> None:
        half, smem, slot = self.half, self.smem, lax.rem(self.n, 2)
        run = lambda f, *columns: with_accumulators(f, *((STEP, n) for n in columns))
        plgpu.barrier_wait(smem.full.at[slot])
        if half:  # the other one is done with the blocks of the unit before
            pl.when(self.n > 0)(lambda: plgpu.barrier_wait(smem.taken))
        dc, dS = 0.0, None
        for j in range(half + 1):
            scores = functools.partial(self.scores, j, dS)
            dS, sums = run(scores, *[STEP // PARTS] * PARTS)
            dc = dc + sums
        plgpu.commit_smem()
        if half:
            plgpu.barrier_arrive(smem.given)
        plgpu.barrier_wait(smem.h_full)
        dc = dc + run(functools.partial(self.from_before, dS), SLICE)
        plgpu.barrier_wait(smem.dh_full)
        dx = run(self.from_after, SLICE)
        plgpu.barrier_arrive(smem.h_empty)
        dt = self.numbers(1)
        left = jnp.exp2(self.staged("steps")[0, CHUNK - 1] - self.numbers(0))
        x = self.tokens("x")
        weighted = (x * over_rows(left * dt, SLICE)).astype(smem.x.dtype)
        self.at.store_part(self.refs, self.n, half, dt * jnp.sum(dx * x, axis=1))
        if not half:
            plgpu.barrier_wait(smem.given)
        accumulated(functools.partial(self.finish, weighted, dc), dx)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem.dh_empty)
        if not half:
            plgpu.barrier_arrive(smem.taken)
        plgpu.barrier_arrive(smem.empty.at[slot])

    def scores(self, j: int, before: Any, *parts: Any) -> tuple[Any, Any]:
        """Stores M and dS of this half's rows and the earlier tokens `j`.

        Args:
          j: number of a half.
          before: dS of the half before, which is still to be multiplied.
          *parts: accumulators for parts of the columns of dM.

        Returns:
          dS in 16 bits, and the sums of the rows of dM ∘ M ∘ s.
        """
        half, columns = self.half, STEP // len(parts)
        x, dy, steps = (self.staged(name) for name in ("x", "dy", "steps"))
        tokens = lambda k: pl.ds(j * STEP + k * columns, columns)
        for k, dM in enumerate(parts):
            multiply(dM, _half(dy, half), x.at[tokens(k)].transpose((1, 0)))
        if before is not None:
            multiply(self.dC, before, _half(self.only("B"), j - 1))
        if j == half:  # the barrier keeps the compiler from holding it in fp32
            S = lax.optimization_barrier(self.own)
        else:
            S = plgpu.load(self.only("scores"), layout=TILE)
        c, sums, wholes, grads = self.numbers(0), 0.0, [], []
        for k, dM in enumerate(parts):
            exponents = over_rows(c, columns) - over_columns(
                plgpu.load(steps.at[0, tokens(k)], layout=COLUMNS), STEP
            )
            if j == half:
                exponents = causal(exponents, first=k * columns)
            decay = jnp.exp2(exponents)
            M = (wide(S[:, k * columns : (k + 1) * columns]) * decay).astype(x.dtype)
            dt = plgpu.load(steps.at[1, tokens(k)], layout=COLUMNS)
            later = len(parts) - 1 - k + (before is not None)
            dM = read(dM, later) * over_columns(dt, STEP)
            # Of M as it is rounded for dx, so that what both gain and lose cancels.
            sums = sums + jnp.sum(dM * wide(M), axis=1)
            wholes.append(M)
            grads.append((dM * decay).astype(x.dtype))
        dS = jnp.concatenate(grads, axis=1)
        if j == half:  # from this block of M dx was stored, and the sums are
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.block("M", half, j)[...] = jnp.concatenate(wholes, axis=1)
        self.block("dS", half, j)[...] = dS
        return dS, sums

    def from_before(self, dS: Any, carried: Any) -> Any:
        """Adds to dC; returns exp(c) ∘ dy · (C hᵀ), summed over channels.

        `carried` is an accumulator, and `dS` that of this half, still to be multiplied.
        """
        h = self.only("h")
        multiply(carried, _half(self.only("C"), self.half), h.transpose((1, 0)))  # (i, p)
        multiply(self.dC, dS, _half(self.only("B"), self.half))
        dy, entered = self.tokens("dy"), jnp.exp2(self.numbers(0))
        scaled = (dy * over_rows(entered, SLICE)).astype(dS.dtype)
        carried = read(carried, 1)
        multiply(self.dC, scaled, h)
        return entered * jnp.sum(carried * dy, axis=1)

    def from_after(self, dx: Any) -> Any:
        """The part of u from `dh`; `dx` is an accumulator."""
        multiply(dx, _half(self.only("B"), self.half), self.only("dh").transpose((1, 0)))  # (j, p)
        left = jnp.exp2(self.staged("steps")[0, CHUNK - 1] - self.numbers(0))
        return read(dx) * over_rows(left, SLICE)

    def finish(self, weighted: Any, dc: Any, dx: Any) -> None:
        """Adds to dB, and stores dx and the sums.

        Args:
          weighted: w ∘ x in 16 bits.
          dc: for the sums.
          dx: an accumulator, with the part of u from `dh`.
        """
        half, refs, later = self.half, self.refs, range(self.half, STEPS)
        transposed = lambda name, i: self.block(name, i, half).transpose((1, 0))
        for i in later:
            multiply(dx, transposed("M", i), _half(self.staged("dy"), i))
        multiply(self.dB, weighted, self.only("dh"))
        for i in later:
            multiply(self.dB, transposed("dS", i), _half(self.only("C"), i))
        u, x = read(dx, 1 + len(later)), self.tokens("x")
        ds, dt, skip = jnp.sum(u * x, axis=1), self.numbers(1), None
        grad = u * over_rows(dt, SLICE)
        if refs.D is not None:
            head, channels = self.at.unit(self.n)
            dy = self.tokens("dy")
            if len(refs.D.shape) == 1:
                grad, skip = grad + refs.D[head] * dy, jnp.sum(x * dy, axis=1)
            else:
                D = plgpu.load(refs.D.at[head, channels], layout=COLUMNS, optimized=False)
                grad = grad + over_columns(D, STEP) * dy
        sync_warpgroup()  # all warps have read M
        out, sums = self.block("M", half, half), self.smem.sums.at[half]
        out[...] = grad.astype(weighted.dtype)
        sums.at[0][...] = dc - dt * ds
        sums.at[1][...] = ds
        if skip is not None:
            self.at.store_part(refs, self.n, LAST_PARTS + half, skip)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.at.tokens(refs.dx, self.n, half * STEP, STEP))
        to = refs.sums.at[self.at.batch, self.at.number(self.n), self.at.chunk]
        plgpu.copy_smem_to_gmem(sums, to.at[:, pl.ds(half * STEP, STEP)])
