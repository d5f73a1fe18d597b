"""The backward of the SSD scan: two carries, and between them the gradients of each chunk.

The states before chunks, which the forward saved or the carry finds, and the gradients of those
after, which the reverse carry finds, make chunks independent. A gate is undone before the kernels,
from the y that the forward saved, or that it finds once more.

A block of the kernel has a chunk of 128 tokens of a batch row and goes through the units of a
group. Two warpgroups compute, each for half of the tokens, and a third one fetches, and adds up
what a unit has one number of: the gradients of a chunk's last sum and D. A computing warpgroup
holds dB and dC in the accumulators of its tensor cores. With the equations of the op,
E = exp(c[i] − c[j]) and dM = dy xᵀ, it adds for its tokens as rows i

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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import unknown_zero
from jaxkern.mosaic.lanes import (
    LaneOffsets,
    load_lanes,
    store_lanes,
    sum_lanes,
    sync_warpgroup,
    zeros,
)
from jaxkern.mosaic.launch import LANES, launch_named
from jaxkern.mosaic.wgmma import (
    COLUMNS,
    ROWS,
    TILE,
    WARPS,
    accumulated,
    causal,
    lane_sums,
    load_own,
    loop,
    multiply,
    over_columns,
    over_rows,
    own_shape,
    product,
    read,
    start_fetch,
    store_column_sums,
    store_own,
    swizzled,
    to_fp32,
    with_accumulators,
)
from jaxkern.ops.chunks import cut_decays, unless_finite, where_segments_begin
from jaxkern.ops.ssd import mma
from jaxkern.ops.ssd.forward import launch_carry, launch_fwd, part_starts
from jaxkern.ops.ssd.inputs import (
    HEADS,
    KINDS,
    LAST,
    SKIP,
    KernelInputs,
    added,
    chunk_sum_grads,
    joined,
    of_range,
    plain_step_grads,
    state_ranges,
    sum_of,
)
from jaxkern.ops.ssd.reference import SsdOptions, reference_bwd
from jaxkern.ops.ssd.tiles import (
    BLOCK,
    BOX,
    CHUNK,
    SAVING_WARPGROUPS,
    SLICE,
    STEP,
    STEPS,
    WARPGROUP,
    SsdBackwardTile,
    SsdTile,
    by_mma,
    locate,
)

PART = 32
"""Rows i of a part of Mᵀ and dSᵀ, (64, 32): registers would not hold dM and E of more."""
HALF_PARTS = STEP // PART
"""Parts with the rows of one half."""
PARTS_OF_HALVES = [range(j * HALF_PARTS, STEPS * HALF_PARTS) for j in range(STEPS)]
"""The numbers of the parts of each half of the tokens j, those on and after the diagonal."""
OF_LANE = LaneOffsets(((1, LANES, 1),))
"""The offset of a lane's element of (LANES,)."""


@dataclasses.dataclass(frozen=True)
class SsdBlock:
    """Coordinates of a block: `count` units of a group from `first` on."""

    scan: SsdTile
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


def compute(at: SsdBlock, half: int, refs: Any, smem: Any) -> None:
    """Computes the gradients of a half of the tokens, and stores dB and dC."""
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
            _HalfUnit(at, half, n, refs, smem, unknown_zero(), own, *accs).run()

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
    """Index of a part of the half j among the parts of both halves."""
    return sum(map(len, PARTS_OF_HALVES[:j])) + part - PARTS_OF_HALVES[j].start


def _half(ref: Any, half: int) -> Any:
    return ref.at[pl.ds(half * STEP, STEP)]


@dataclasses.dataclass(frozen=True)
class _HalfUnit:
    """A half of the tokens of the `n`-th unit.

    Attributes:
      zero: is added to the indices of shared memory. Else the compiler would compute the addresses
        of all operands before the loop, and spill them past the little L1 cache.
      own: Sᵀ of the tokens of this half, (j, i), in 16 bits.
      dB, dC: accumulators.
    """

    at: SsdBlock
    half: int
    n: Any
    refs: Any
    smem: Any
    zero: Any
    own: Any
    dB: Any
    dC: Any

    def only(self, name: str) -> Any:
        """Array of shared memory that has one stage."""
        return getattr(self.smem, name).at[self.zero]

    def staged(self, name: str) -> Any:
        """x, dy or steps."""
        return getattr(self.smem, name).at[lax.rem(self.n, 2)]

    def tokens(self, name: str) -> Any:
        """This half of x or dy, (64, P), fp32."""
        return to_fp32(plgpu.load(_half(self.staged(name), self.half), layout=TILE))

    def numbers(self, k: int) -> Any:
        """Row vector of this half's c (k = 0) or dt (k = 1)."""
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
        M = (to_fp32(S) * decay).astype(x.dtype)
        grad = read(dM) * over_rows(dt, PART)
        # What c gains is of M as it is rounded for dx, as what it loses is: both cancel.
        store_column_sums(self.gains(half, i), k * PART, grad * to_fp32(M))
        dS = self.smem.dS.at[self.zero + _number(half, part)]
        store_own(dS, load_own(dS) + grad * decay)
        return M

    def gains(self, j: int, i: int) -> Any:
        """(WARPS, 64), in shared memory: each warp's share, of its tokens j, in the rows of a half.

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
        """Hands partial sums of the unit to the fetching warpgroup."""
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


REGISTERS, FETCH_REGISTERS = 240, 24
"""Registers of a lane that computes, and of one that fetches. What is spilled in each unit goes to
the L2 cache: three registers of each lane cost a fifth of the time."""


def launch_grads(
    chunks: SsdBackwardTile, arrays: KernelInputs, dy: Any, h: Any, dh: Any
) -> dict[str, Any]:
    """dx; dB and dC of each split of a group; what :func:`chunk_sum_grads` takes, of each unit.

    Args:
      chunks: how the launch is cut.
      arrays: of the call.
      dy: (B, L, H, P).
      h: the states before chunks, (B, chunks, H, P, N).
      dh: the gradients of those after chunks; of the last one they are zeros where it has none.
    """
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
        "dS": plgpu.SMEM((sum(map(len, PARTS_OF_HALVES)), *own_shape(PART, f32)), f32),
        "S": plgpu.SMEM((HALF_PARTS, *own_shape(PART, dtype)), dtype),
        "gains": plgpu.SMEM((STEPS + 2, WARPS, STEP), f32),
        "sums": plgpu.SMEM((STEPS, 2, STEP), f32),
        "lanes": plgpu.SMEM((KINDS, STEPS, LANES), f32),
        "weights_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=STEPS + 1, num_barriers=2),
        "h_full": plgpu.Barrier(num_arrivals=1),
        "h_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "dh_full": plgpu.Barrier(num_arrivals=1),
        "dh_empty": plgpu.Barrier(num_arrivals=STEPS + 1),
        "gained": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "ended": plgpu.Barrier(num_arrivals=STEPS),
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
            "parts": like((*units, KINDS if of_heads else 1, WARPS), f32),
        },
        scratch,
        grid=(chunks.grid,),
        grid_names=(BLOCK,),
        num_threads=STEPS + 1,
        thread_name=WARPGROUP,
        kernel_name="ssd_bwd",
        approx_math=True,
        sums_across_warps=False,
    )


def _kernel(chunks: SsdBackwardTile, refs: Any, smem: Any) -> None:
    """Two warpgroups compute, each with its half of the tokens; one fetches and sums."""
    scan, warpgroup = chunks.scan, lax.axis_index(WARPGROUP)
    block = lax.axis_index(BLOCK)
    group, rest = lax.rem(block, scan.groups), lax.div(block, scan.groups)
    split, rest = lax.rem(rest, chunks.splits), lax.div(rest, chunks.splits)
    chunk, batch = lax.rem(rest, scan.chunks), lax.div(rest, scan.chunks)
    first = split * chunks.split_units
    count = jnp.minimum(chunks.split_units, scan.units - first)
    at = SsdBlock(scan, batch, chunk, group, split, first, count)

    @pl.when(warpgroup == STEPS)
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        _Fetch(at, refs, smem).run()

    for half in range(STEPS):

        @pl.when(warpgroup == half)
        def _(half: int = half) -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            compute(at, half, refs, smem)


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The warpgroup that fetches, and computes a unit's scalar sums; `n` counts units."""

    at: SsdBlock
    refs: Any
    smem: Any

    def run(self) -> None:
        """Fetches B and C, and all that is read of each unit."""
        at, smem = self.at, self.smem
        for name in ("B", "C"):
            tokens = pl.ds(at.chunk * CHUNK, CHUNK)
            source = getattr(self.refs, name).at[at.batch, tokens, at.group]
            start_fetch(source, getattr(smem, name).at[0], smem.weights_full)
        if self.ends_in_zeros:

            @pl.when(self.is_last())
            def _():
                zeros = jnp.zeros((SLICE, at.scan.states), smem.dh.dtype)
                smem.dh.at[0][...] = plgpu.layout_cast(zeros, TILE)
                plgpu.commit_smem()

        of_states = lax.fori_loop(0, at.count, self.unit, zeros())
        pl.when(at.count > 0)(lambda: self.sum_parts(at.count - 1, of_states))

    @property
    def ends_in_zeros(self) -> bool:
        """Whether `dh` leaves out the last chunk, after which it is zero."""
        return self.refs.dh.shape[1] < self.at.scan.chunks

    def is_last(self) -> Any:
        return self.at.chunk == self.at.scan.chunks - 1

    def unit(self, n: Any, of_states: Any) -> Any:
        """Fetches a unit, and when the one before is done, stores its sums.

        `of_states` is of this warpgroup's lanes, of exp(c[Q−1]) · h · dh of the unit before;
        returns the sum for this unit.
        """
        at, refs, smem, slot = self.at, self.refs, self.smem, lax.rem(n, 2)
        head, channels = at.unit(n)
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(smem.empty.at[slot]))
        state = lambda ref: ref.at[at.batch, at.chunk, head, channels]
        full = smem.full.at[slot]
        start_fetch(at.tokens(refs.x, n), smem.x.at[slot], full)
        start_fetch(at.tokens(refs.dy, n), smem.dy.at[slot], full)
        start_fetch(refs.steps.at[at.batch, head, at.chunk], smem.steps.at[slot], full)
        pl.when(n >= 1)(lambda: plgpu.barrier_wait(smem.h_empty))
        start_fetch(state(refs.h), smem.h.at[0], smem.h_full)
        pl.when(n >= 1)(lambda: self.sum_parts(n - 1, of_states))  # and waits until dh is free
        self.fetch_dh(state(refs.dh))
        for barrier in (full, smem.h_full, smem.dh_full):
            plgpu.barrier_wait(barrier)
        box = lambda ref, k: to_fp32(plgpu.load(ref.at[0, :, pl.ds(k, BOX)], layout=TILE))
        boxes = range(0, at.scan.states, BOX)
        of_states = sum_of(lane_sums(box(smem.h, k) * box(smem.dh, k)) for k in boxes)
        of_states = of_states * jnp.exp2(smem.steps[slot, 0, CHUNK - 1])
        for barrier in (smem.empty.at[slot], smem.h_empty, smem.dh_empty):
            plgpu.barrier_arrive(barrier)
        return of_states

    def fetch_dh(self, source: Any) -> None:
        """Starts to fetch dh, or signals that it is zero."""
        smem = self.smem
        start = lambda: start_fetch(source, smem.dh.at[0], smem.dh_full)
        if self.ends_in_zeros:
            last = self.is_last()
            pl.when(last)(lambda: plgpu.barrier_arrive(smem.dh_full))
            pl.when(~last)(start)
        else:
            start()

    def sum_parts(self, n: Any, of_states: Any) -> None:
        """Stores the sums over lanes once a unit is done."""
        at, parts, smem = self.at, self.refs.parts, self.smem
        plgpu.barrier_wait(smem.dh_empty)
        kinds = [LAST] if parts.shape[-2] == 1 else [LAST, SKIP]
        sums = [
            sum_of(load_lanes(smem.lanes.at[k, half], OF_LANE)[0] for half in range(STEPS))
            for k in kinds
        ]
        sums[LAST] = sums[LAST] + of_states
        (total,) = sum_lanes(sums, (16, 8, 4, 2, 1))
        sync_warpgroup()  # all warps have read: the next unit's may be stored, once dh is fetched
        # With two kinds, the upper 16 lanes of each warp have the second.
        offsets = LaneOffsets(((16, len(kinds), WARPS), (LANES // WARPS, WARPS, 1)))
        store_lanes(parts.at[at.batch, at.number(n), at.chunk], offsets, [total])


def launch_bwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank, crossed, states, y, dout, dfinal
) -> tuple[Any, ...]:
    """The gradients of the arguments before `states`, in fp32 except dx and dz."""
    args = x, dt, a, B, C, D, z, initial_state
    rest = states, y, dout, dfinal
    if x.size == 0:
        return reference_bwd(options, *args, rank, crossed, *rest)
    if rank is None:
        grads, _ = _launch(options, *args, *rest)
    else:
        grads, dinitial = _launch(options, *args[:2], cut_decays(a, rank), *args[3:], *rest)
        ds, da = grads[1], where_segments_begin(rank, 0.0, grads[2])
        grads = *grads[:2], da, *grads[3:]
        if options.isolate_nan:
            plain = functools.partial(reference_bwd, options)
            given = *args, rank, None, *rest
            grads = unless_finite([ds, da, dinitial], grads, plain, given, whole=5)
    dx, ds, da, dB, dC, *others = grads
    return dx, ds, da, dB.astype(jnp.float32), dC.astype(jnp.float32), *others


def _launch(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, states, y, dout, dfinal
) -> tuple[Any, Any]:
    """The results of :func:`launch_bwd`, without segments, and the initial state's gradient.

    The gradients of B and C are as a kernel stores them, in 16 bits or in fp32.
    """
    dy, dz = dout, None
    if z is not None:
        if y is None:
            plain = dataclasses.replace(options, save=False)
            y, *_ = launch_fwd(plain, x, dt, a, B, C, D, None, initial_state)
        dy, dz = _through_gate(y, z, dout)
    ranges = state_ranges(B.shape[-1])
    # D · dy is in one range alone; a kernel with zeros for it is that range's, too.
    skips = [D] + [None if D is None else jnp.zeros_like(D)] * (len(ranges) - 1)
    found = [
        _launch_range(
            options,
            *(x, dt, a, of_range(B, n), of_range(C, n), D, of_range(initial_state, n)),
            *(of_range(states, n), dy, of_range(dfinal, n)),
        )
        for n, D in zip(ranges, skips, strict=True)
    ]
    dx, ds, da, dB, dC, dD, dinitial = found[0]
    if len(ranges) > 1:
        of_each = [*zip(*found, strict=True)]
        dx, ds, da = map(added, of_each[:3])
        dx = dx.astype(x.dtype)
        dB, dC, dinitial = map(joined, (*of_each[3:5], of_each[-1]))
    own = None if initial_state is None else dinitial
    return (dx, ds, da, dB, dC, dD, dz, own, None, None), dinitial


def _launch_range(
    options: SsdOptions, x, dt, a, B, C, D, initial_state, states, dy, dfinal
) -> tuple[Any, ...]:
    """The gradients of all arguments except z, for the states of one launch."""
    arrays = KernelInputs(x, dt, a, B, C, D, None, initial_state)
    dy = arrays.tokens(dy)
    scan = arrays.scan(CHUNK).cut(SAVING_WARPGROUPS)
    before = _states(options, arrays, scan, arrays.whole_states(states))
    ends = part_starts(scan, True, dy, arrays.C, arrays.steps, arrays.whole_states(dfinal))
    if by_mma():
        grads = mma.launch_grads(scan, arrays, dy, before, ends)
        dB, dC, dinitial, dD = (grads[name] for name in ("dB", "dC", "dinitial", "dD"))
        of_heads = (_of_heads(scan, grads[name]) for name in ("dc", "ds", "last"))
        da, ds = plain_step_grads(*of_heads)
    else:
        after, dinitial = launch_carry(scan, True, dy, arrays.C, arrays.steps, ends)
        dinitial = dinitial[:, 0]
        grads = launch_grads(SsdBackwardTile.of(scan), arrays, dy, before, after)
        sums, parts = (_of_heads(scan, grads[name]) for name in ("sums", "parts"))
        da, ds, dD = chunk_sum_grads(sums, parts)
        dD = None if dD is None else dD[..., : scan.heads].sum((0, 1))
        splits = grads["dB"], grads["dC"]  # each (splits, B, L, G, N)
        dB, dC = (v[0] if len(v) == 1 else v.sum(0) for v in splits)
    ds, da = map(arrays.cut_steps, (ds, da))
    dB, dC = (v[:, : arrays.length, :, : arrays.states] for v in (dB, dC))
    if D is not None:
        if dD is None:  # of channels
            dD = jnp.einsum("blhp,blhp->hp", arrays.x, dy, preferred_element_type=jnp.float32)
            dD = dD[:, : arrays.channels]
        dD = dD.reshape(D.shape)
    dx, dinitial = arrays.cut_tokens(grads["dx"]), arrays.cut_states(dinitial)
    return dx, ds, da, dB, dC, dD, dinitial


def _of_heads(scan: SsdTile, v: Any) -> Any:
    """(B, H, …) of (B, H · slices, …), H in whole blocks of the step sizes' kernels."""
    if scan.slices > 1:
        v = v[:, : scan.heads * scan.slices]
        v = v.reshape(scan.batch, scan.heads, scan.slices, *v.shape[2:]).sum(2)
    return jnp.pad(v, ((0, 0), (0, -v.shape[1] % HEADS), *[(0, 0)] * (v.ndim - 2)))


def _through_gate(y: Any, z: Any, dout: Any) -> tuple[Any, Any]:
    """The gradients of y and z in y · silu(z)."""
    y, z32, dout = (v.astype(jnp.float32) for v in (y, z, dout))
    gate = jax.nn.sigmoid(z32)
    dz = dout * y * gate * (1 + z32 * (1 - gate))
    return (dout * z32 * gate).astype(z.dtype), dz.astype(z.dtype)


def _states(options: Any, arrays: KernelInputs, scan: SsdTile, saved: Any) -> Any:
    """The states before all chunks, (B, chunks, H, P, N), of those that were saved."""
    every = options.checkpoint_every
    if every == CHUNK:
        return saved
    if every is None:
        saved = part_starts(scan, False, arrays.x, arrays.B, arrays.steps, arrays.initial)
    else:
        scan = dataclasses.replace(scan, part_chunks=every // CHUNK)
    return launch_carry(scan, False, arrays.x, arrays.B, arrays.steps, saved)[0]
