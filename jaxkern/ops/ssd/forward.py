"""The forward of the SSD scan: one kernel that goes through the tokens, 64 at once.

With x (j, p), S = C Bᵀ and M of a step as in the op's equations, everything is computed transposed,
so that the state's accumulators (p, n) are operands without leaving the registers:

    Sᵀ = B Cᵀ,  Mᵀ from it in registers, to shared memory
    yᵀ = exp(c) ∘ (h Cᵀ) + xᵀ Mᵀ
    h  ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B

Sᵀ and h Cᵀ are in flight together, and the last product runs beside the epilogue.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E
from jaxkern.mosaic.named import launch_named
from jaxkern.mosaic.wgmma import swizzled
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
    SLICE,
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
        num_threads=scan.warpgroups,
        thread_name=WARPGROUP,
        kernel_name="ssd_fwd",
        approx_math=True,
    )
    final = arrays.cut_states(results["final"][:, -1])
    out, y = (arrays.cut_tokens(results[name]) for name in ("out", "y"))
    states = arrays.cut_states(results["states"])
    return (out, final if options.final else None, states, y), final


def _scratch(scan: Scan, dtype: Any, *, gated: bool, saves_y: bool) -> dict[str, Any]:
    W, N = scan.warpgroups, scan.states
    tokens = {name: swizzled(2 * W, STEP, SLICE, dtype=dtype) for name in ("x", "z")[: 1 + gated]}
    scratch = tokens | {
        "steps": plgpu.SMEM((2 * W, 2, CHUNK), jnp.float32),
        "B": swizzled(scan.stages, STEP, N, dtype=dtype),
        "C": swizzled(scan.stages, STEP, N, dtype=dtype),
        "M": swizzled(W, STEP, STEP, dtype=dtype),
        "out": swizzled(W, STEP, SLICE, dtype=dtype),
        **({"y": swizzled(W, STEP, SLICE, dtype=dtype)} if saves_y else {}),
        "tokens_full": plgpu.Barrier(num_arrivals=2 + gated, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=scan.stages),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=scan.stages),
    }
    if scan.every:
        scratch["held"] = swizzled(W, SLICE, N, dtype=dtype)
    return scratch


def _kernel(scan: Scan, refs: Any, smem: Any) -> None:
    """Goes through the steps of a warpgroup's unit and part."""
    block = _Block(scan, refs, smem, Unit(scan))
    block.begin()
    at = block.at
    h = lax.fori_loop(0, at.count, block.step, first_state(scan, refs, at))
    plgpu.wait_smem_to_gmem(0)
    refs.final.at[at.batch, at.part, at.head, at.channels][...] = h


@dataclasses.dataclass(frozen=True)
class _Block:
    """A warpgroup's part of the forward; `n` counts its steps.

    Attributes:
      refs: arrays in global memory.
      smem: x, z and steps in two stages of each warpgroup; B and C in a ring that all share, and
        that the first one fills; M, out and held of each warpgroup; the barriers.
    """

    scan: Scan
    refs: Any
    smem: Any
    at: Unit

    def begin(self) -> None:
        """Starts the first copies."""
        for n in range(2):
            pl.when(n < self.at.count)(functools.partial(self.fetch_tokens, n))

        @pl.when(self.at.warpgroup == 0)
        def _():
            for n in range(self.scan.stages):
                pl.when(n < self.at.count)(functools.partial(self.fetch_weights, n))

    def tokens(self, ref: Any, n: Any) -> Any:
        """(64, 64): the unit's part of x, z or out in step `n`."""
        at = self.at
        return ref.at[at.batch, of_step(at.first + n), at.head, at.channels]

    def fetch_tokens(self, n: Any) -> None:
        at, smem, refs = self.at, self.smem, self.refs
        slot = at.warpgroup * 2 + lax.rem(n, 2)
        steps = refs.steps.at[at.batch, at.head, lax.div(at.first + n, STEPS)]
        plgpu.copy_gmem_to_smem(steps, smem.steps.at[slot], smem.tokens_full.at[slot])
        for name in ("x", "z"):
            if getattr(refs, name) is not None:
                plgpu.copy_gmem_to_smem(
                    self.tokens(getattr(refs, name), n),
                    getattr(smem, name).at[slot],
                    smem.tokens_full.at[slot],
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    def fetch_weights(self, n: Any) -> None:
        at, slot = self.at, lax.rem(n, self.scan.stages)
        for name in ("B", "C"):
            plgpu.copy_gmem_to_smem(
                getattr(self.refs, name).at[at.batch, of_step(at.first + n), at.group],
                getattr(self.smem, name).at[slot],
                self.smem.full.at[slot],
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )

    def step(self, n: Any, h: Any) -> Any:
        """The state after step `n`, (P, N), from that before; stores the output."""
        at, smem, stages = self.at, self.smem, self.scan.stages
        slot, own = lax.rem(n, stages), at.warpgroup * 2 + lax.rem(n, 2)
        ahead = n + stages - 1
        steps, B = StepDecays(smem.steps.at[own], at.first + n), smem.B.at[slot]
        plgpu.barrier_wait(smem.full.at[slot])
        within = functools.partial(self.within, n, h, B, smem.C.at[slot], steps)
        y, x, weighted = with_accumulators(within, (STEP, STEP), (SLICE, STEP))

        @pl.when((at.warpgroup == 0) & (n > 0) & (ahead < at.count))
        def _():
            plgpu.barrier_wait(smem.empty.at[lax.rem(ahead, stages)])
            self.fetch_weights(ahead)

        def finish(y: Any, h: Any) -> None:
            multiply(y, x, smem.M.at[at.warpgroup])
            multiply(h, weighted, B)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for all warps
            self.store(n, read(y, 1), x)

        _, h = accumulated(finish, y, h * jnp.exp2(steps.total()))
        plgpu.barrier_arrive(smem.empty.at[slot])
        pl.when(n + 2 < at.count)(lambda: self.fetch_tokens(n + 2))
        return h

    def within(
        self, n: Any, h: Any, B: Any, C: Any, steps: Any, scores: Any, y: Any
    ) -> tuple[Any, Any, Any]:
        """Stores Mᵀ; returns what y has from the state before, xᵀ and (w ∘ x)ᵀ, (P, 64) each."""
        at, smem = self.at, self.smem
        own = at.warpgroup * 2 + lax.rem(n, 2)
        narrow = h.astype(smem.x.dtype)
        multiply(scores, B, C.transpose((1, 0)))  # (j, i)
        multiply(y, narrow, C.transpose((1, 0)))  # (p, i)
        plgpu.barrier_wait(smem.tokens_full.at[own])
        c = steps.sums(COLUMNS)
        exponents = over_columns(c, STEP) - over_rows(steps.sums(ROWS), STEP)
        decay = jnp.exp2(causal(exponents, transposed=True)) * over_rows(steps.sizes(ROWS), STEP)
        M = read(scores, 1) * decay
        smem.M.at[at.warpgroup][...] = M.astype(smem.x.dtype)
        if self.scan.every:
            self.save(n, narrow)
        else:
            plgpu.commit_smem()
        weight = jnp.exp2(steps.last() - c) * steps.sizes(COLUMNS)
        x = plgpu.load(smem.x.at[own].transpose((1, 0)), layout=TILE)  # (p, j)
        weighted = (wide(x) * over_columns(weight, SLICE)).astype(x.dtype)
        return read(y) * over_columns(jnp.exp2(c - steps.before()), SLICE), x, weighted

    def save(self, n: Any, h: Any) -> None:
        """Commits M, and saves the state before step `n` if it is one to be saved."""
        at, held = self.at, self.smem.held.at[self.at.warpgroup]
        every = STEPS * self.scan.every
        saves = lax.rem(at.first + n, every) == 0

        @pl.when(saves)
        def _():
            held[...] = h

        plgpu.commit_smem()

        @pl.when(saves)
        def _():
            to = self.refs.states.at[at.batch, lax.div(at.first + n, every), at.head, at.channels]
            plgpu.copy_smem_to_gmem(held, to)

    def store(self, n: Any, y: Any, x: Any) -> None:
        """Stores the output of step `n` from y without D · x, transposed, (P, 64)."""
        at, smem, refs = self.at, self.smem, self.refs
        if refs.D is not None:
            if len(refs.D.shape) == 1:
                D = refs.D[at.head]
            else:
                D = refs.D.at[at.head, at.channels]
                D = over_rows(plgpu.load(D, layout=ROWS, optimized=False), STEP)
            y = y + D * wide(x)
        if refs.z is not None:
            z = smem.z.at[at.warpgroup * 2 + lax.rem(n, 2)]
            z = wide(plgpu.load(z.transpose((1, 0)), layout=TILE))
            if refs.y is not None:
                smem.y.at[at.warpgroup].transpose((1, 0))[...] = y.astype(x.dtype)
            y = y * z / (1 + jnp.exp2(z * -LOG2E))
        out = smem.out.at[at.warpgroup]
        out.transpose((1, 0))[...] = y.astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.tokens(refs.out, n))
        if refs.y is not None:
            plgpu.copy_smem_to_gmem(smem.y.at[at.warpgroup], self.tokens(refs.y, n))
