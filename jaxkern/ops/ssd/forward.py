"""The forward of the SSD scan: one kernel that goes through the tokens, 64 at once.

With x (j, p), S = C Bᵀ and M of a step as in the op's equations, everything is computed transposed,
so that the state's accumulators (p, n) are operands without leaving the registers:

    Sᵀ = B Cᵀ,  Mᵀ from it in registers, to shared memory
    yᵀ = exp(c) ∘ (h Cᵀ) + D · xᵀ + xᵀ Mᵀ
    h  ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B

A block has two units of a group, and four warpgroups. Two hold the states: they multiply h Cᵀ, and
then xᵀ Mᵀ and (w ∘ x)ᵀ B, the last of which runs beside the epilogue. The other two fetch, and
compute Mᵀ of both units, one of them for the even steps and one for the odd, up to two steps ahead:
so S is multiplied once for both units, and exponentials wait for no state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.instructions import unknown_zero
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.wgmma import start_fetch, swizzled
from jaxkern.ops.ssd.blocks import (
    BLOCK,
    COLUMNS,
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
    wide,
    with_accumulators,
)
from jaxkern.ops.ssd.call import (
    Arrays,
    added,
    cut_decays,
    joined,
    of_range,
    state_ranges,
    unless_finite,
)
from jaxkern.ops.ssd.carry import part_starts
from jaxkern.ops.ssd.reference import (
    Options,
    gated,
    of_heads,
    reference_fwd,
    saves_y,
    with_skip,
)
from jaxkern.ops.ssd.tiles import (
    CHUNK,
    FORWARD_WARPGROUPS,
    SCORES_REGISTERS,
    SCORES_WARPGROUPS,
    SLICE,
    STATE_REGISTERS,
    STEP,
    STEPS,
    Scan,
)


def launch_fwd(
    options: Options, x, dt, a, B, C, D, z, initial_state, rank=None, crossed=None
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states before every `checkpoint_every`-th token and y."""
    args = x, dt, a, B, C, D, z, initial_state
    if x.size == 0:
        return reference_fwd(options, *args, rank, crossed)
    if rank is None:
        return _launch(options, *args)[0]
    results, final = _launch(options, *args[:2], cut_decays(a, rank), *args[3:])
    if not options.isolate_nan:
        return results
    plain = functools.partial(reference_fwd, options)
    return unless_finite([final], results, plain, (*args, rank, None))


def _launch(options: Options, x, dt, a, B, C, D, z, initial_state) -> tuple[Any, Any]:
    """The results of :func:`launch_fwd`, without segments, and the final state."""
    ranges = state_ranges(B.shape[-1])
    if len(ranges) == 1:
        return _launch_range(options, x, dt, a, B, C, D, z, initial_state)
    found = [
        _launch_range(
            options,
            *(x, dt, a, of_range(B, n), of_range(C, n), None, None, of_range(initial_state, n)),
        )
        for n in ranges
    ]
    results, finals = zip(*found, strict=True)
    outs, _, saved, _ = zip(*results, strict=True)
    y = with_skip(added(outs), x, None if D is None else of_heads(D))
    out = gated(y, z).astype(x.dtype)
    final, states = joined(finals), None if saved[0] is None else joined(saved)
    y = y.astype(x.dtype) if saves_y(options, z) else None
    return (out, final if options.final else None, states, y), final


def _launch_range(options: Options, x, dt, a, B, C, D, z, initial_state) -> tuple[Any, Any]:
    """The same, of as many states as a launch takes."""
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
            "y": arrays.x if saves_y(options, z) else None,
        },
        _scratch(scan, x.dtype, gated=z is not None, saves_y=saves_y(options, z)),
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=scan.warpgroups + SCORES_WARPGROUPS,
        thread_name=WARPGROUP,
        kernel_name="ssd_fwd",
        approx_math=True,
    )
    final = arrays.cut_states(results["final"][:, -1])
    out, y = (arrays.cut_tokens(results[name]) for name in ("out", "y"))
    states = arrays.cut_states(results["states"])
    return (out, final if options.final else None, states, y), final


def _scratch(scan: Scan, dtype: Any, *, gated: bool, saves_y: bool) -> dict[str, Any]:
    W, N, stages = scan.warpgroups, scan.states, scan.stages
    slots = {"x": 2 * W} | ({"z": W} if gated else {})
    scratch = {
        **{name: swizzled(count, STEP, SLICE, dtype=dtype) for name, count in slots.items()},
        "steps": plgpu.SMEM((stages, W, 2, CHUNK), jnp.float32),
        "B": swizzled(stages, STEP, N, dtype=dtype),
        "C": swizzled(stages, STEP, N, dtype=dtype),
        "M": swizzled(2 * W, STEP, STEP, dtype=dtype),
        "out": swizzled(W, STEP, SLICE, dtype=dtype),
        **({"y": swizzled(W, STEP, SLICE, dtype=dtype)} if saves_y else {}),
        **{
            f"{name}_full": plgpu.Barrier(num_arrivals=1, num_barriers=count)
            for name, count in slots.items()
        },
        # Even and odd steps have barriers of their own: a warpgroup that computes M waits for its
        # steps alone, and would miss every other phase of a barrier that they shared.
        "full": plgpu.Barrier(num_arrivals=2 + W, num_barriers=2 * stages),
        "M_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "done": plgpu.Barrier(num_arrivals=W, num_barriers=2),
    }
    if scan.every:
        scratch["held"] = swizzled(W, SLICE, N, dtype=dtype)
    return scratch


def _kernel(scan: Scan, refs: Any, smem: Any) -> None:
    """Goes through the steps of a part of the sequence, for the units of a block."""
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < scan.warpgroups)
    def _():
        plgpu.set_max_registers(STATE_REGISTERS, action="increase")
        _State(scan, refs, smem, Unit(scan, warpgroup)).run()

    for first in range(SCORES_WARPGROUPS):

        @pl.when(warpgroup == scan.warpgroups + first)
        def _(first: int = first) -> None:
            plgpu.set_max_registers(SCORES_REGISTERS, action="decrease")
            _Scores(scan, refs, smem, [Unit(scan, k) for k in range(scan.warpgroups)]).run(first)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """A warpgroup that computes M of all units in every other step, and fetches what that takes.

    Attributes:
      refs: arrays in global memory.
      smem: see :class:`_State`.
      units: of the block.
    """

    scan: Scan
    refs: Any
    smem: Any
    units: list[Unit]

    def run(self, first: int) -> None:
        """All steps from `first` on."""
        count = self.units[0].count
        if first == 0:
            for n in range(self.scan.stages):
                pl.when(n < count)(functools.partial(self.fetch, n))
        lax.fori_loop(0, lax.div(count - first + 1, 2), lambda k, _: self.step(2 * k + first), None)

    def fetch(self, n: Any) -> None:
        """Starts to fetch B, C and step sizes of step `n`."""
        at, stages = self.units[0], self.scan.stages
        slot, full = lax.rem(n, stages), self.smem.full.at[lax.rem(n, 2 * stages)]
        for name in ("B", "C"):
            start_fetch(
                getattr(self.refs, name).at[at.batch, of_step(at.first + n), at.group],
                getattr(self.smem, name).at[slot],
                full,
            )
        for k, unit in enumerate(self.units):
            steps = self.refs.steps.at[at.batch, unit.head, lax.div(at.first + n, STEPS)]
            start_fetch(steps, self.smem.steps.at[slot, k], full)

    def refill(self, n: Any) -> None:
        """Waits until step `n` − 2 is done, which frees its M and its stage; fills the stage."""
        ahead = n + self.scan.stages - 2

        @pl.when(n >= 2)
        def _():
            plgpu.barrier_wait(self.smem.done.at[lax.rem(n, 2)])
            pl.when(ahead < self.units[0].count)(functools.partial(self.fetch, ahead))

    def step(self, n: Any) -> None:
        """Stores Mᵀ of step `n`."""
        smem, stages = self.smem, self.scan.stages
        slot, buffer = lax.rem(n, stages), lax.rem(n, 2)
        if stages == 2:  # this step is what is to be fetched
            self.refill(n)
        plgpu.barrier_wait(smem.full.at[lax.rem(n, 2 * stages)])
        S = product(smem.B.at[slot], smem.C.at[slot].transpose((1, 0)), (STEP, STEP))  # (j, i)
        if stages > 2:
            self.refill(n)
        for k, unit in enumerate(self.units):
            steps = StepDecays(smem.steps.at[slot, k], unit.first + n)
            exponents = over_columns(steps.sums(COLUMNS), STEP) - over_rows(steps.sums(ROWS), STEP)
            decay = jnp.exp2(causal(exponents, transposed=True))
            M = S * (decay * over_rows(steps.sizes(ROWS), STEP))
            smem.M.at[2 * k + buffer][...] = M.astype(smem.x.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.M_full.at[2 * k + buffer])


@dataclasses.dataclass(frozen=True)
class _State:
    """A warpgroup that holds the state of a unit; `n` counts its steps.

    Attributes:
      refs: arrays in global memory.
      smem: x in two stages of each unit, and z in one; B, C and step sizes in a ring that all
        share; M of each unit for two steps; out, y and held of each; the barriers.
    """

    scan: Scan
    refs: Any
    smem: Any
    at: Unit

    def run(self) -> None:
        at, refs = self.at, self.refs
        for name, n in (("x", 0), ("x", 1), ("z", 0)):
            pl.when(n < at.count)(functools.partial(self.fetch, name, n))
        h = lax.fori_loop(0, at.count, self.step, first_state(self.scan, refs, at))
        plgpu.wait_smem_to_gmem(0)
        refs.final.at[at.batch, at.part, at.head, at.channels][...] = h

    def tokens(self, ref: Any, n: Any) -> Any:
        """(64, 64): the unit's part of x, z or out in step `n`."""
        at = self.at
        return ref.at[at.batch, of_step(at.first + n), at.head, at.channels]

    def slot(self, n: Any) -> Any:
        """The stage of x, and of M, in step `n`."""
        return self.at.warpgroup * 2 + lax.rem(n, 2)

    def fetch(self, name: str, n: Any) -> None:
        """Starts to fetch x or z, if there is one, of step `n`."""
        if (ref := getattr(self.refs, name)) is None:
            return
        slot = self.slot(n) if name == "x" else self.at.warpgroup
        start_fetch(
            self.tokens(ref, n),
            getattr(self.smem, name).at[slot],
            getattr(self.smem, f"{name}_full").at[slot],
        )

    def step(self, n: Any, h: Any) -> Any:
        """The state after step `n`, (P, N), from that before; stores the output."""
        at, smem, slot = self.at, self.smem, lax.rem(n, self.scan.stages)
        steps = StepDecays(smem.steps.at[slot, at.warpgroup], at.first + n)
        plgpu.barrier_wait(smem.full.at[lax.rem(n, 2 * self.scan.stages)])
        before = functools.partial(self.before, n, h, smem.C.at[slot], steps)
        y, x, weighted = with_accumulators(before, (SLICE, STEP))

        def finish(y: Any, h: Any) -> None:
            plgpu.barrier_wait(smem.M_full.at[self.slot(n)])
            multiply(y, x, smem.M.at[self.slot(n)])
            multiply(h, weighted, smem.B.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
            self.store(n, read(y, 1))

        _, h = accumulated(finish, y, h * jnp.exp2(steps.total()))
        plgpu.barrier_arrive(smem.done.at[lax.rem(n, 2)])
        return h

    def before(self, n: Any, h: Any, C: Any, steps: Any, y: Any) -> tuple[Any, Any, Any]:
        """What y has from the state before and from D · x; xᵀ and (w ∘ x)ᵀ, (P, 64) each.

        `y` is an accumulator. What needs x comes after its product: then there are registers.
        """
        at, smem, refs = self.at, self.smem, self.refs
        narrow = h.astype(smem.x.dtype)
        multiply(y, narrow, C.transpose((1, 0)))  # (p, i)
        if self.scan.every:
            self.save(n, narrow)
        c = steps.sums(COLUMNS)
        entered = over_columns(jnp.exp2(c - steps.before()), SLICE)
        weight = over_columns(jnp.exp2(steps.last() - c) * steps.sizes(COLUMNS), SLICE)
        plgpu.barrier_wait(smem.x_full.at[self.slot(n)])
        y = read(y) * entered
        x = plgpu.load(smem.x.at[self.slot(n)].transpose((1, 0)), layout=TILE)  # (p, j)
        x32 = wide(x)
        weighted = (x32 * weight).astype(x.dtype)
        if refs.D is not None:
            if len(refs.D.shape) == 1:
                D = refs.D[at.head]
            else:
                D = plgpu.load(refs.D.at[at.head, at.channels], layout=ROWS, optimized=False)
                D = over_rows(D, STEP)
            y = y + D * x32
        plgpu.commit_smem()  # all warps have read x
        pl.when(n + 2 < at.count)(functools.partial(self.fetch, "x", n + 2))
        return y, x, weighted

    def save(self, n: Any, h: Any) -> None:
        """Saves `h`, the state before step `n` in 16 bits, if it is one to be saved."""
        at, held = self.at, self.smem.held.at[self.at.warpgroup]
        every = STEPS * self.scan.every

        @pl.when(lax.rem(at.first + n, every) == 0)
        def _():
            held[...] = h
            plgpu.commit_smem()
            to = self.refs.states.at[at.batch, lax.div(at.first + n, every), at.head, at.channels]
            plgpu.copy_smem_to_gmem(held, to)

    def store(self, n: Any, y: Any) -> None:
        """Stores the output of step `n` from y, transposed, (P, 64)."""
        at, smem, refs = self.at, self.smem, self.refs
        if refs.z is not None:
            plgpu.barrier_wait(smem.z_full.at[at.warpgroup])
            z = plgpu.load(smem.z.at[at.warpgroup].transpose((1, 0)), layout=TILE)
            if refs.y is not None:
                saved = smem.y.at[at.warpgroup + unknown_zero()]
                saved.transpose((1, 0))[...] = y.astype(saved.dtype)
            z = wide(z)
            y = y * z * sigmoid(z, False, layout=TILE)
        out = smem.out.at[at.warpgroup + unknown_zero()]
        out.transpose((1, 0))[...] = y.astype(out.dtype)
        plgpu.commit_smem()  # and all warps have read z
        pl.when(n + 1 < at.count)(functools.partial(self.fetch, "z", n + 1))
        plgpu.copy_smem_to_gmem(out, self.tokens(refs.out, n))
        if refs.y is not None:
            plgpu.copy_smem_to_gmem(smem.y.at[at.warpgroup], self.tokens(refs.y, n))
