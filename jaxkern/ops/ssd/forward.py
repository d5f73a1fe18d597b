"""The forward of the SSD scan: one kernel that goes through the tokens, 64 at once.

With x (j, p), S = C Bᵀ and M of a step as in the op's equations, everything is computed turned, so
that the state's accumulators (p, n) are operands without leaving the registers:

    Sᵀ = B Cᵀ,  Mᵀ from it in registers, to shared memory
    yᵀ = exp(c) ∘ (h Cᵀ) + xᵀ Mᵀ
    h  ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B

A warpgroup of its own computes Mᵀ, of Sᵀ once for all units of a block, a step or two ahead of the
warpgroups that hold their states; the last product runs beside the epilogue.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.named import launch_named
from jaxkern.ops.ssd.blocks import (
    BLOCK,
    COLUMNS,
    LOG2E,
    ROWS,
    TILE,
    WARPGROUP,
    StepDecays,
    Unit,
    accumulated,
    causal,
    first_state,
    multiply,
    of_step,
    over_columns,
    over_rows,
    product,
    read,
    tiles_of,
    wide,
    with_accumulators,
)
from jaxkern.ops.ssd.call import Arrays, cut_decays, unless_finite
from jaxkern.ops.ssd.carry import part_starts
from jaxkern.ops.ssd.reference import Options, reference_fwd
from jaxkern.ops.ssd.tiles import (
    CHUNK,
    FORWARD_WARPGROUPS,
    SLICE,
    STATE_REGISTERS,
    STEP,
    STEPS,
    WEIGHT_REGISTERS,
    Scan,
)


def launch_fwd(
    options: Options, x, dt, a, B, C, D, z, initial_state, rank=None, crossed=None
) -> tuple[Any, Any, Any]:
    """Output, final state and, to save, the states before every `checkpoint_every`-th token."""
    args = x, dt, a, B, C, D, z, initial_state
    if x.size == 0:
        return reference_fwd(options, *args, rank, crossed)
    if rank is None:
        return _launch(options, *args)[0]
    results, final = _launch(options, *args[:2], cut_decays(a, rank), *args[3:])
    plain = functools.partial(reference_fwd, options)
    return unless_finite([final], results, plain, (*args, rank, None))


def _launch(options: Options, x, dt, a, B, C, D, z, initial_state) -> tuple[Any, Any]:
    """The results of :func:`launch_fwd`, without segments, and the final state."""
    every = options.checkpoint_every if options.save else None
    arrays = Arrays(x, dt, a, B, C, D, z, initial_state)
    scan = arrays.scan(every).cut(FORWARD_WARPGROUPS)
    scan = scan if z is None else scan.with_gate()
    starts = part_starts(scan, False, arrays.x, arrays.B, arrays.steps, arrays.initial)
    results = launch_named(
        functools.partial(_kernel, scan),
        {
            "x": arrays.x,
            "steps": arrays.steps,
            "B": arrays.B,
            "C": arrays.C,
            "D": arrays.D,
            "z": arrays.z,
            "initial": starts,
        },
        {
            "out": jax.ShapeDtypeStruct(arrays.x.shape, x.dtype),
            "final": arrays.states_like(scan.parts, jnp.float32),
            "states": arrays.states_like(scan.saved, x.dtype) if scan.every else None,
        },
        _scratch(scan, x.dtype, gated=z is not None),
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=scan.warpgroups + 1,
        thread_name=WARPGROUP,
        kernel_name="ssd_fwd",
        approx_math=True,
    )
    final = arrays.cut_states(results["final"][:, -1])
    out, states = arrays.cut_tokens(results["out"]), arrays.cut_states(results["states"])
    return (out, final if options.final else None, states), final


def _scratch(scan: Scan, dtype: Any, *, gated: bool) -> dict[str, Any]:
    W, N = scan.warpgroups, scan.states
    tokens = {name: tiles_of(2 * W, STEP, SLICE, dtype=dtype) for name in ("x", "z")[: 1 + gated]}
    scratch = tokens | {
        "steps": plgpu.SMEM((2 * W, 2, CHUNK), jnp.float32),
        "B": tiles_of(scan.stages, STEP, N, dtype=dtype),
        "C": tiles_of(scan.stages, STEP, N, dtype=dtype),
        "M": tiles_of(2 * W, STEP, STEP, dtype=dtype),
        "out": tiles_of(W, STEP, SLICE, dtype=dtype),
        "tokens_full": plgpu.Barrier(num_arrivals=1 + gated, num_barriers=2 * W),
        "steps_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=scan.stages),
        "empty": plgpu.Barrier(num_arrivals=W + 1, num_barriers=scan.stages),
        "M_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "M_empty": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
    }
    if scan.every:
        scratch["held"] = tiles_of(W, SLICE, N, dtype=dtype)
    return scratch


def _kernel(scan: Scan, refs: Any, smem: Any) -> None:
    """The steps of a part: some warpgroups hold the state of a unit, the last one weighs tokens."""
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup == scan.warpgroups)
    def _():
        plgpu.set_max_registers(WEIGHT_REGISTERS, action="decrease")
        _Weights(scan, refs, smem, Unit(scan, 0)).run()

    @pl.when(warpgroup < scan.warpgroups)
    def _():
        plgpu.set_max_registers(STATE_REGISTERS, action="increase")
        _State(scan, refs, smem, Unit(scan, warpgroup)).run()


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The warpgroup that computes M, and fetches B and C.

    Attributes:
      refs: arrays in global memory.
      smem: x, z, steps and M in two stages of each unit; B and C in a ring that all warpgroups
        share; out and held of each unit; the barriers.
      at: the block's first unit, whose steps are all units'.
    """

    scan: Scan
    refs: Any
    smem: Any
    at: Unit

    def run(self) -> None:
        for n in range(self.scan.stages):
            pl.when(n < self.at.count)(functools.partial(self.fetch, n))
        lax.fori_loop(0, self.at.count, lambda n, _: self.step(n), None)

    def fetch(self, n: Any) -> None:
        """Starts the copies of B and C of step `n`."""
        at, slot = self.at, lax.rem(n, self.scan.stages)
        for name in ("B", "C"):
            plgpu.copy_gmem_to_smem(
                getattr(self.refs, name).at[at.batch, of_step(at.first + n), at.group],
                getattr(self.smem, name).at[slot],
                self.smem.full.at[slot],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )

    def step(self, n: Any) -> None:
        """Stores Mᵀ of step `n` of every unit."""
        at, smem, stages = self.at, self.smem, self.scan.stages
        slot, ahead = lax.rem(n, stages), n + stages - 1

        @pl.when((n > 0) & (ahead < at.count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(ahead, stages)])
            self.fetch(ahead)

        plgpu.barrier_wait(smem.full.at[slot])
        scores = product(smem.B.at[slot], smem.C.at[slot].transpose((1, 0)), (STEP, STEP))  # (j, i)
        plgpu.barrier_arrive(smem.empty.at[slot])
        for unit in range(self.scan.warpgroups):
            own = unit * 2 + lax.rem(n, 2)
            plgpu.barrier_wait(smem.steps_full.at[own])
            steps = StepDecays(smem.steps.at[own], at.first + n)
            exponents = over_columns(steps.sums(COLUMNS), STEP) - over_rows(steps.sums(ROWS), STEP)
            decay = jnp.exp2(causal(exponents, turned=True)) * over_rows(steps.sizes(ROWS), STEP)
            pl.when(n >= 2)(functools.partial(plgpu.barrier_wait, smem.M_empty.at[own]))
            smem.M.at[own][...] = (scores * decay).astype(smem.x.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.M_full.at[own])


@dataclasses.dataclass(frozen=True)
class _State:
    """A warpgroup that holds the state of a unit; `n` counts its steps.

    The attributes are those of :class:`_Weights`, but that `at` is its own unit.
    """

    scan: Scan
    refs: Any
    smem: Any
    at: Unit

    def run(self) -> None:
        at = self.at
        for n in range(2):
            pl.when(n < at.count)(functools.partial(self.fetch, n))
        h = lax.fori_loop(0, at.count, self.step, first_state(self.scan, self.refs, at))
        plgpu.wait_smem_to_gmem(0)
        self.refs.final.at[at.batch, at.part, at.head, at.channels][...] = h

    def tokens(self, ref: Any, n: Any) -> Any:
        """(64, 64): the unit's part of x, z or out in step `n`."""
        at = self.at
        return ref.at[at.batch, of_step(at.first + n), at.head, at.channels]

    def own(self, n: Any) -> Any:
        """The number of this unit's stage for step `n`."""
        return self.at.warpgroup * 2 + lax.rem(n, 2)

    def fetch(self, n: Any) -> None:
        """Starts the copies of steps, x and z of step `n`."""
        at, smem, refs, slot = self.at, self.smem, self.refs, self.own(n)
        steps = refs.steps.at[at.batch, at.head, lax.div(at.first + n, STEPS)]
        plgpu.copy_gmem_to_smem(steps, smem.steps.at[slot], smem.steps_full.at[slot])
        for name in ("x", "z"):
            if getattr(refs, name) is not None:
                plgpu.copy_gmem_to_smem(
                    self.tokens(getattr(refs, name), n),
                    getattr(smem, name).at[slot],
                    smem.tokens_full.at[slot],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    def step(self, n: Any, h: Any) -> Any:
        """The state after step `n`, (P, N), from that before; stores the output."""
        smem, slot, own = self.smem, lax.rem(n, self.scan.stages), self.own(n)
        plgpu.barrier_wait(smem.full.at[slot])
        before = functools.partial(self.before, n, h, smem.C.at[slot])
        y, x, weighted, total = with_accumulators(before, (SLICE, STEP))

        def finish(y: Any, h: Any) -> None:
            plgpu.barrier_wait(smem.M_full.at[own])
            multiply(y, x, smem.M.at[own])
            multiply(h, weighted, smem.B.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
            self.store(n, read(y, 1), x)

        _, h = accumulated(finish, y, h * jnp.exp2(total))
        plgpu.barrier_arrive(smem.empty.at[slot])
        plgpu.barrier_arrive(smem.M_empty.at[own])
        pl.when(n + 2 < self.at.count)(lambda: self.fetch(n + 2))
        return h

    def before(self, n: Any, h: Any, C: Any, y: Any) -> tuple[Any, Any, Any, Any]:
        """What y has from the state before, xᵀ and (w ∘ x)ᵀ, (P, 64) each, and the step's decay.

        `y` is an accumulator. Saves the state.
        """
        smem, own = self.smem, self.own(n)
        narrow = h.astype(smem.x.dtype)
        multiply(y, narrow, C.transpose((1, 0)))  # (p, i)
        if self.scan.every:
            self.save(n, narrow)
        plgpu.barrier_wait(smem.steps_full.at[own])
        steps = StepDecays(smem.steps.at[own], self.at.first + n)
        c = steps.sums(COLUMNS)
        weight = jnp.exp2(steps.last() - c) * steps.sizes(COLUMNS)
        plgpu.barrier_wait(smem.tokens_full.at[own])
        x = plgpu.load(smem.x.at[own].transpose((1, 0)), layout=TILE)  # (p, j)
        weighted = (wide(x) * over_columns(weight, SLICE)).astype(x.dtype)
        entered = over_columns(jnp.exp2(c - steps.before()), SLICE)
        return read(y) * entered, x, weighted, steps.total()

    def save(self, n: Any, h: Any) -> None:
        """Saves the state before step `n` if it is one to be saved."""
        at, held = self.at, self.smem.held.at[self.at.warpgroup]
        every = STEPS * self.scan.every

        @pl.when(lax.rem(at.first + n, every) == 0)
        def _():
            held[...] = h
            plgpu.commit_smem()
            to = self.refs.states.at[at.batch, lax.div(at.first + n, every), at.head, at.channels]
            plgpu.copy_smem_to_gmem(held, to)

    def store(self, n: Any, y: Any, x: Any) -> None:
        """Stores the output of step `n` from y without D · x, turned, (P, 64)."""
        at, smem, refs = self.at, self.smem, self.refs
        if refs.D is not None:
            if len(refs.D.shape) == 1:
                D = refs.D[at.head]
            else:
                D = refs.D.at[at.head, at.channels]
                D = over_rows(plgpu.load(D, layout=ROWS, optimized=False), STEP)
            y = y + D * wide(x)
        if refs.z is not None:
            z = wide(plgpu.load(smem.z.at[self.own(n)].transpose((1, 0)), layout=TILE))
            y = y * z / (1 + jnp.exp2(z * -LOG2E))
        out = smem.out.at[at.warpgroup]
        out.transpose((1, 0))[...] = y.astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.tokens(refs.out, n))
