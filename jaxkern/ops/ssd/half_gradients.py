"""What a warpgroup of the SSD scan's backward computes: the gradients of half of a chunk's tokens.

It goes through the units of a group, and holds dB and dC in the accumulators of its tensor cores.
With the equations of the op, E = exp(c[i] − c[j]) and dM = dy xᵀ, it adds for its tokens as rows i

    dC += (exp(c) ∘ dy) h

and for them as earlier tokens j ≤ i, in parts of 32 rows i,

    Mᵀ = Eᵀ ∘ Sᵀ,  dSᵀ += dMᵀ ∘ Eᵀ ∘ s
    dx = s ∘ u + D · dy,  u = Mᵀ dy + exp(c[Q−1] − c) ∘ (B dhᵀ)
    dB += (w ∘ x) dh

Mᵀ is an operand without leaving the registers. dS is summed over all units first, in fp32 in shared
memory, and multiplied once: at the end dB += dSᵀ C and dC += dS B.

Sums over channels and tokens follow: ds[j] = x · u, and what c[j] loses is s[j] · ds[j]; what c[i]
gains are the sums of the columns of dMᵀ ∘ Mᵀ ∘ s, and exp(c) ∘ dy · (C hᵀ).

The first warpgroup has four of the six parts. That the second one waits for it costs less than to
have it compute one of them and hand it over: 0.601 ms and 0.614 at (8, 4096, 64, 64, 128, 1) on an
H200 (JAX 0.11.2).
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.instructions import unknown_zero
from jaxkern.mosaic.lanes import LaneOffsets, store_lanes, sync_warpgroup
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.ssd.blocks import (
    COLUMNS,
    ROWS,
    TILE,
    accumulated,
    causal,
    locate,
    loop,
    multiply,
    over_columns,
    over_rows,
    product,
    read,
    wide,
    with_accumulators,
)
from jaxkern.ops.ssd.fragments import lane_sums, load_own, store_column_sums, store_own
from jaxkern.ops.ssd.steps import LAST, SKIP, sum_of
from jaxkern.ops.ssd.tiles import BOX, CHUNK, SLICE, STEP, STEPS, WARPS, Scan

PART = 32
"""Rows i of a part of Mᵀ and dSᵀ, (64, 32): registers would not hold dM and E of more."""
HALF_PARTS = STEP // PART
"""Parts with the rows of one half."""
PARTS_OF_HALVES = [range(j * HALF_PARTS, STEPS * HALF_PARTS) for j in range(STEPS)]
"""The numbers of the parts of each half of the tokens j, those on and after the diagonal."""
OF_LANE = LaneOffsets(((1, LANES, 1),))
"""The offset of a lane's element of (LANES,)."""


@dataclasses.dataclass(frozen=True)
class Block:
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


def compute(at: Block, half: int, refs: Any, smem: Any) -> None:
    """The gradients of a half of the tokens; stores those of B and C."""
    plgpu.barrier_wait(smem.weights_full)
    B, C, dtype = smem.B.at[0], smem.C.at[0], smem.x.dtype

    def scores(rows: Any) -> Any:
        """Sᵀ of this half's tokens j and some rows i, in 16 bits."""
        columns = C.at[rows].transpose((1, 0))
        return product(_half(B, half), columns, (STEP, rows.size)).astype(dtype)

    own = scores(pl.ds(half * STEP, STEP))
    if not half:
        for k in range(HALF_PARTS):
            store_own(smem.S.at[k], scores(_rows(HALF_PARTS + k)))
    zeros = plgpu.layout_cast(jnp.zeros((STEP, PART), jnp.float32), TILE)
    for part in PARTS_OF_HALVES[half]:
        store_own(smem.dS.at[_number(half, part)], zeros)

    def run(dB: Any, dC: Any) -> tuple[Any, Any]:
        def step(n: Any, *accs: Any) -> None:
            _Unit(at, half, n, refs, smem, unknown_zero(), own, *accs).run()

        loop(at.count, step, dB, dC)
        plgpu.wait_smem_to_gmem(0)
        # Nobody waits for it, but the interpreter refuses a barrier that some have arrived at.
        last = smem.empty.at[lax.rem(at.count + 1, 2)]
        pl.when(at.count > 0)(lambda: plgpu.barrier_arrive(last))
        narrow = lambda j, i: _half(smem.x.at[i - j], j)  # of x its own half is free
        for i in range(half, STEPS):
            parts = range(i * HALF_PARTS, (i + 1) * HALF_PARTS)
            parts = [load_own(smem.dS.at[_number(half, part)]) for part in parts]
            dS = jnp.concatenate(parts, axis=1).astype(dtype)
            multiply(dB, dS, _half(C, i))
            narrow(half, i)[...] = dS
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.ended)
        plgpu.barrier_wait(smem.ended)
        for j in range(half + 1):
            multiply(dC, narrow(j, half).transpose((1, 0)), _half(B, j))
        return read(dB), read(dC)

    grads = with_accumulators(run, *[(STEP, at.scan.states)] * 2)
    tokens = pl.ds(at.chunk * CHUNK + half * STEP, STEP)
    slots = [_half(smem.dy.at[k], half) for k in range(2)]  # free when both have ended
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


def _rows(part: int) -> Any:
    """The rows i of a part."""
    return pl.ds(part * PART, PART)


def _number(j: int, part: int) -> int:
    """The number of a part of the half j among those of all."""
    return sum(map(len, PARTS_OF_HALVES[:j])) + part - PARTS_OF_HALVES[j].start


def _half(ref: Any, half: int) -> Any:
    return ref.at[pl.ds(half * STEP, STEP)]


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A half of the tokens of the `n`-th unit.

    Attributes:
      zero: is added to the indices of shared memory. Else the compiler would compute the addresses
        of all operands before the loop, and spill them past the little L1 cache.
      own: Sᵀ of the tokens of this half, (j, i), in 16 bits.
      dB, dC: accumulators.
    """

    at: Block
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

    def tokens(self, name: str) -> Any:
        """This half of x or dy, (64, P), fp32."""
        return wide(plgpu.load(_half(self.staged(name), self.half), layout=TILE))

    def numbers(self, k: int) -> Any:
        """Of this half's tokens c (k = 0) or dt (k = 1), for rows."""
        tokens = pl.ds(self.half * STEP, STEP)
        return plgpu.load(self.staged("steps").at[k, tokens], layout=ROWS)

    def run(self) -> None:
        smem, slot = self.smem, lax.rem(self.n, 2)
        run = lambda f, *columns: with_accumulators(f, *((STEP, n) for n in columns))
        plgpu.barrier_wait(smem.full.at[slot])
        c, dt = self.numbers(0), self.numbers(1)
        plgpu.barrier_wait(smem.h_full)
        dc = run(functools.partial(self.from_before, c), SLICE)
        # The gradients of the unit before are stored, from the stage of its x.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.sums.at[self.half, 0][...] = dc  # registers are short until the end
        pl.when(self.n > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[1 - slot]))
        scores = lambda part: run(functools.partial(self.scores, part, c, dt), PART)
        parts = [scores(part) for part in PARTS_OF_HALVES[self.half]]
        if not self.half:
            plgpu.barrier_arrive(smem.gained.at[slot])
        plgpu.barrier_arrive(smem.h_empty)
        left = jnp.exp2(self.staged("steps")[0, CHUNK - 1] - c)
        plgpu.barrier_wait(smem.dh_full)
        dx = run(functools.partial(self.from_after, left, dt), SLICE)
        accumulated(functools.partial(self.finish, parts, left, dt), dx)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem.dh_empty)

    def from_before(self, c: Any, carried: Any) -> Any:
        """Adds to dC; returns exp(c) ∘ dy · (C hᵀ), summed over channels.

        `carried` is an accumulator.
        """
        h = self.only("h")
        multiply(carried, _half(self.only("C"), self.half), h.transpose((1, 0)))  # (i, p)
        entered = jnp.exp2(c)
        scaled = (self.tokens("dy") * over_rows(entered, SLICE)).astype(self.smem.dy.dtype)
        carried = read(carried)
        multiply(self.dC, scaled, h)
        return entered * jnp.sum(carried * self.tokens("dy"), axis=1)

    def scores(self, part: int, c: Any, dt: Any, dM: Any) -> Any:
        """A part of Mᵀ, (64, 32) in 16 bits; adds to dS.

        Leaves the sums over this half's tokens of dM ∘ M ∘ s in shared memory.

        Args:
          part: one of PARTS_OF_HALVES.
          c, dt: for this half's tokens.
          dM: an accumulator, for a part of dMᵀ.
        """
        x, dy, steps = (self.staged(name) for name in ("x", "dy", "steps"))
        half, rows, (i, k) = self.half, _rows(part), divmod(part, HALF_PARTS)
        multiply(dM, _half(x, half), dy.at[rows].transpose((1, 0)))
        if i == half:  # the barrier keeps the compiler from holding it in fp32
            S = lax.optimization_barrier(self.own)[:, k * PART : (k + 1) * PART]
        else:
            S = load_own(self.smem.S.at[self.zero + k])
        of_rows = plgpu.load(steps.at[0, rows], layout=COLUMNS)
        exponents = over_columns(of_rows, STEP) - over_rows(c, PART)
        if i == half:
            exponents = causal(exponents, transposed=True, first=k * PART)
        decay = jnp.exp2(exponents)
        M = (wide(S) * decay).astype(x.dtype)
        grad = read(dM) * over_rows(dt, PART)
        # What c gains is of M as it is rounded for dx, as what it loses is: both cancel.
        store_column_sums(self.gains(half, i), k * PART, grad * wide(M))
        dS = self.smem.dS.at[self.zero + _number(half, part)]
        store_own(dS, load_own(dS) + grad * decay)
        return M

    def gains(self, j: int, i: int) -> Any:
        """(WARPS, 64), in shared memory: what the rows of a half gain from each warp's tokens j.

        What the later half gains from the earlier one the first warpgroup stores, and the second
        one reads: there are two, as the first may be a unit ahead.
        """
        return self.smem.gains.at[i if i == j else STEPS + lax.rem(self.n, 2)]

    def from_after(self, left: Any, dt: Any, dx: Any) -> Any:
        """The part of u from `dh`; `dx` is an accumulator."""
        multiply(dx, _half(self.only("B"), self.half), self.only("dh").transpose((1, 0)))  # (j, p)
        dx = read(dx) * over_rows(left, SLICE)
        self.keep(LAST, lane_sums(dx * self.tokens("x"), dt))
        return dx

    def keep(self, kind: int, of_lanes: Any) -> None:
        """Leaves a part of what is added up for the unit to the warpgroup that fetches."""
        store_lanes(self.smem.lanes.at[kind, self.half], OF_LANE, [of_lanes])

    def finish(self, parts: list[Any], left: Any, dt: Any, dx: Any) -> None:
        """Adds to dB, and stores dx and the sums.

        Args:
          parts: of :meth:`scores`, of this half's tokens.
          left, dt: for these.
          dx: an accumulator, with the part of u from `dh`.
        """
        half, refs, smem = self.half, self.refs, self.smem
        for i in range(half, STEPS):
            M = jnp.concatenate(parts[(i - half) * HALF_PARTS :][:HALF_PARTS], axis=1)
            multiply(dx, M, _half(self.staged("dy"), i))
        x, u = self.tokens("x"), read(dx)
        weighted = (x * over_rows(left * dt, SLICE)).astype(smem.x.dtype)
        multiply(self.dB, weighted, self.only("dh"))
        ds = jnp.sum(u * x, axis=1)
        grad = u * over_rows(dt, SLICE)
        if refs.D is not None:
            head, channels = self.at.unit(self.n)
            dy = self.tokens("dy")
            if len(refs.D.shape) == 1:
                grad = grad + refs.D[head] * dy
                self.keep(SKIP, lane_sums(self.tokens("x") * dy))
            else:
                D = plgpu.load(refs.D.at[head, channels], layout=COLUMNS, optimized=False)
                grad = grad + over_columns(D, STEP) * dy
        if half:
            plgpu.barrier_wait(smem.gained.at[lax.rem(self.n, 2)])
        sync_warpgroup()  # all warps have read x, and stored what rows gain
        out, sums = _half(self.staged("x"), half), smem.sums.at[half]
        out[...] = grad.astype(weighted.dtype)
        gained = [self.gains(j, half).at[k] for j in range(half + 1) for k in range(WARPS)]
        dc = sum_of(plgpu.load(v, layout=ROWS) for v in [sums.at[0], *gained])
        sums.at[0][...] = dc - dt * ds
        sums.at[1][...] = ds
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.at.tokens(refs.dx, self.n, half * STEP, STEP))
        to = refs.sums.at[self.at.batch, self.at.number(self.n), self.at.chunk]
        plgpu.copy_smem_to_gmem(sums, to.at[:, pl.ds(half * STEP, STEP)])
