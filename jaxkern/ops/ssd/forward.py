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

The carry is the states alone, or in reverse their gradients:

    h ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B            dh ← exp(c[Q−1]) · dh + (exp(c) ∘ dy)ᵀ C

Forward it finds the states with which parts of the sequence begin, and those that were not saved;
in reverse the gradient of the state after each chunk, for the backward.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import sigmoid, unknown_zero
from jaxkern.mosaic.launch import launch_named
from jaxkern.mosaic.wgmma import (
    COLUMNS,
    ROWS,
    TILE,
    accumulated,
    causal,
    multiply,
    over_columns,
    over_rows,
    product,
    read,
    start_fetch,
    swizzled,
    to_fp32,
    with_accumulators,
)
from jaxkern.ops.chunks import cut_decays, unless_finite
from jaxkern.ops.sections import state_after_all
from jaxkern.ops.ssd import mma
from jaxkern.ops.ssd.inputs import (
    KernelInputs,
    added,
    joined,
    of_range,
    state_ranges,
)
from jaxkern.ops.ssd.reference import (
    SsdOptions,
    gated,
    of_heads,
    of_states,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
    saves_y,
    with_skip,
)
from jaxkern.ops.ssd.tiles import (
    BLOCK,
    BOX,
    CARRY_WARPGROUPS,
    CHUNK,
    FORWARD_WARPGROUPS,
    SCORES_REGISTERS,
    SCORES_WARPGROUPS,
    SLICE,
    STATE_REGISTERS,
    STEP,
    STEPS,
    WARPGROUP,
    SsdTile,
    SsdUnit,
    StepDecays,
    by_mma,
    first_state,
    of_step,
)


def launch_carry(
    scan: SsdTile, reverse: bool, tokens: Any, weights: Any, steps: Any, starts: Any
) -> tuple[Any, Any]:
    """States (B, chunks, H, P, N) before all chunks if they are saved, and (B, parts, H, P, N).

    In reverse the states are gradients, those before chunks the ones after them, and so on.

    Args:
      scan: its `every` is 1 or 0.
      reverse: whether it runs backward.
      tokens: x or dy, (B, L, H, P).
      weights: B or C, (B, L, G, N).
      steps: of :class:`jaxkern.ops.ssd.inputs.KernelInputs`.
      starts: with which each part begins, (B, parts, H, P, N), or ``None`` for zeros.

    Returns:
      The states that are saved, or ``None``, and the last one of each part in fp32. In reverse the
      zeros after the last chunk, where `starts` is ``None``, are not among several that are saved.
    """
    if by_mma():
        return mma.launch_carry(scan, reverse, tokens, weights, steps, starts)
    W, N, dtype = scan.warpgroups, scan.states, tokens.dtype
    stages = _stages(scan)
    scratch = {
        "tokens": swizzled(stages * W, STEP, SLICE, dtype=dtype),
        "steps": plgpu.SMEM((2 * W, 2, CHUNK), jnp.float32),
        "weights": swizzled(2, CHUNK, N, dtype=dtype),
        "tokens_full": plgpu.Barrier(num_arrivals=1, num_barriers=stages * W),
        "steps_full": plgpu.Barrier(num_arrivals=1, num_barriers=2 * W),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "empty": plgpu.Barrier(num_arrivals=W, num_barriers=2),
    }
    if scan.every:
        scratch["held"] = swizzled(W, N // BOX, SLICE, BOX, dtype=dtype)
    state = scan.heads, scan.channels, N
    like = lambda count, dtype: jax.ShapeDtypeStruct((scan.batch, count, *state), dtype)
    saved = max(1, scan.chunks - 1) if reverse and starts is None else scan.chunks
    results = launch_named(
        lambda refs, smem: _CarryKernel(scan, reverse, refs, smem).run(),
        {"tokens": tokens, "weights": weights, "steps": steps, "initial": starts},
        {
            "states": like(saved, dtype) if scan.every else None,
            "final": like(scan.parts, jnp.float32),
        },
        scratch,
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=W,
        thread_name=WARPGROUP,
        kernel_name="ssd_carry_reverse" if reverse else "ssd_carry",
        approx_math=True,
    )
    return results["states"], results["final"]


def part_starts(
    scan: SsdTile, reverse: bool, tokens: Any, weights: Any, steps: Any, initial: Any
) -> Any:
    """The states with which parts begin, (B, parts, H, P, N), or ``None`` for zeros.

    The arguments are as for :func:`launch_carry`; `initial` (B, H, P, N) belongs to the first part,
    in reverse to the last one.
    """
    if scan.parts == 1:
        return None if initial is None else initial[:, None]
    finer, subparts = scan.without_last(reverse).finer(CARRY_WARPGROUPS[0])
    _, ends = launch_carry(finer, reverse, tokens, weights, steps, None)
    decay = _part_decays(finer, steps)[..., None, None]
    state = jnp.zeros_like(ends[:, 0]) if initial is None else initial.astype(jnp.float32)
    starts = [state]
    for n in range(finer.parts)[:: -1 if reverse else 1]:
        state = decay[:, :, n] * state + ends[:, n]
        if (n if reverse else n + 1) % subparts == 0:
            starts.append(state)
    return jnp.stack(starts[::-1] if reverse else starts, axis=1)


def _part_decays(scan: SsdTile, steps: Any) -> Any:
    """The decay over each part, (B, H, parts)."""
    chunks = slice(scan.first_chunk, scan.first_chunk + scan.chunks)
    totals = steps[:, :, chunks, 0, -1]  # (B, H, chunks)
    missing = scan.parts * scan.part_chunks - scan.chunks
    totals = jnp.pad(totals, ((0, 0), (0, 0), (0, missing)))
    return jnp.exp2(totals.reshape(*totals.shape[:2], scan.parts, -1).sum(-1))


def launch_device_carry(options: SsdOptions, x, dt, a, B, rank) -> tuple[Any, Any]:
    """The decay on this device, (B, G, R), 0 where a segment begins, and its last state."""

    def plain(x: Any, dt: Any, a: Any, B: Any, C: Any, D: Any, rank: Any) -> Any:
        del C, D
        return reference_carry(options, x, dt, a, B, rank)

    return _of_device(options, False, x, dt, a, B, rank, plain)


def launch_device_bwd_carry(options: SsdOptions, a, C, dy, rank) -> tuple[Any, Any]:
    """The decay over this device's part, and the gradient of the state before it."""

    def plain(dy: Any, a: Any, _: Any, C: Any, *rest: Any) -> Any:
        return reference_bwd_carry(options, a, C, dy, rest[-1])

    return _of_device(options, True, dy, a, a, C, rank, plain)


def _of_device(
    options: SsdOptions,
    reverse: bool,
    tokens: Any,
    dt: Any,
    a: Any,
    weights: Any,
    rank: Any,
    plain: Any,
) -> tuple[Any, Any]:
    """The carry of the whole sequence, from the carries of parts that fill the GPU."""
    args = tokens, dt, a, weights, None, None, rank
    if tokens.size == 0:
        return plain(*args)
    cut = a if rank is None else cut_decays(a, rank)
    found = []  # the tokens are cut into the same parts for each range of states
    for n in state_ranges(weights.shape[-1]):
        own = of_range(weights, n)
        arrays = KernelInputs(tokens, dt, cut, own, own, None, None, None)
        scan = arrays.scan(None).cut(*CARRY_WARPGROUPS)
        _, ends = launch_carry(scan, reverse, arrays.x, arrays.B, arrays.steps, None)
        found.append(arrays.cut_states(ends))
    ends = jnp.moveaxis(joined(found), 1, 0)  # (parts, B, G, R, P, N)
    decays = jnp.moveaxis(_part_decays(scan, arrays.steps), 2, 0)
    decays = decays.reshape(ends.shape[:4])  # (parts, B, G, R)
    state = state_after_all(of_states(decays), ends, reverse=reverse)
    carry = jnp.prod(decays, 0), state
    if rank is None or not options.isolate_nan:
        return carry
    return unless_finite([state], carry, plain, args)


def _stages(scan: SsdTile) -> int:
    """The stages of a warpgroup's tokens, 8 KiB each: a block holds 128 KiB of them at most.

    Beside the states that are to be saved 64 KiB fit.
    """
    return min(4, (8 if scan.every else 16) // scan.warpgroups)


class _CarryKernel:
    """A warpgroup that holds the state of a unit; `n` counts its chunks, `k` steps of these.

    It goes through the chunks of its unit and part. A chunk's steps are multiplied one after the
    other, each while the next one is weighted. The warpgroup has tokens and step sizes of its own,
    and the first one fetches B or C for all.

    Args:
      scan: the sizes of the launch.
      reverse: whether the last chunk is the first to come.
      refs: arrays in global memory.
      smem: rings of tokens, step sizes and weights; the barriers; `held`, if states are saved.
    """

    def __init__(self, scan: SsdTile, reverse: bool, refs: Any, smem: Any):
        self.scan, self.reverse, self.refs, self.smem = scan, reverse, refs, smem
        self.at = at = SsdUnit(scan, lax.axis_index(WARPGROUP))
        self.stages = _stages(scan)
        self.count, self.first = lax.div(at.count, STEPS), lax.div(at.first, STEPS)

    def run(self) -> None:
        at, refs = self.at, self.refs
        for k in range(self.stages):
            pl.when(k < at.count)(functools.partial(self.fetch_tokens, k))
        for n in range(2):
            pl.when(n < self.count)(functools.partial(self.fetch_steps, n))
            own = (at.warpgroup == 0) & (n < self.count)
            pl.when(own)(functools.partial(self.fetch_weights, n))
        h = lax.fori_loop(0, self.count, self.chunk, first_state(self.scan, refs, at))
        plgpu.wait_smem_to_gmem(0)
        refs.final.at[at.batch, at.part, at.head, at.channels][...] = h

    def number(self, n: Any) -> Any:
        """The number of the `n`-th chunk in the sequence."""
        return self.first + (self.count - 1 - n if self.reverse else n)

    def slot(self, n: Any) -> Any:
        """The stage of the step sizes of chunk `n`."""
        return self.at.warpgroup * 2 + lax.rem(n, 2)

    def slot_of_step(self, k: Any) -> Any:
        """The stage of the tokens of step `k`."""
        return self.at.warpgroup * self.stages + lax.rem(k, self.stages)

    def fetch_tokens(self, k: Any) -> None:
        """Starts to fetch the tokens of step `k`."""
        at, smem, slot = self.at, self.smem, self.slot_of_step(k)
        step = self.number(lax.div(k, STEPS)) * STEPS + lax.rem(k, STEPS)
        tokens = self.refs.tokens.at[at.batch, of_step(step), at.head, at.channels]
        start_fetch(tokens, smem.tokens.at[slot], smem.tokens_full.at[slot])

    def fetch_steps(self, n: Any) -> None:
        """Starts to fetch the step sizes of chunk `n`."""
        at, smem = self.at, self.smem
        steps = self.refs.steps.at[at.batch, at.head, self.number(n)]
        start_fetch(steps, smem.steps.at[self.slot(n)], smem.steps_full.at[self.slot(n)])

    def fetch_weights(self, n: Any) -> None:
        """Starts to fetch B or C of chunk `n`, for all warpgroups."""
        at, smem, slot = self.at, self.smem, lax.rem(n, 2)
        tokens = pl.ds(self.number(n) * CHUNK, CHUNK)
        start_fetch(
            self.refs.weights.at[at.batch, tokens, at.group],
            smem.weights.at[slot],
            smem.full.at[slot],
        )

    def chunk(self, n: Any, h: Any) -> Any:
        """The state after chunk `n`, (P, N), from the state before."""
        at, refs, smem, slot = self.at, self.refs, self.smem, lax.rem(n, 2)
        if refs.states is not None:
            if (saved := refs.states.shape[1]) == self.scan.chunks:
                self.save(n, h)
            else:
                pl.when(self.number(n) < saved)(functools.partial(self.save, n, h))

        @pl.when((at.warpgroup == 0) & (n > 0) & (n + 1 < self.count))
        def _():
            plgpu.barrier_wait(smem.empty.at[1 - slot])
            self.fetch_weights(n + 1)

        plgpu.barrier_wait(smem.steps_full.at[self.slot(n)])

        def add(h: Any) -> None:
            for s in range(STEPS):
                tokens = self.weighted(n, s)
                if s == 0:
                    plgpu.barrier_wait(smem.full.at[slot])
                multiply(h, tokens, smem.weights.at[slot, pl.ds(s * STEP, STEP)])
            # All warps have read these step sizes.
            pl.when(n + 2 < self.count)(lambda: self.fetch_steps(n + 2))

        (h,) = accumulated(add, h * jnp.exp2(smem.steps[self.slot(n), 0, CHUNK - 1]))
        plgpu.barrier_arrive(smem.empty.at[slot])
        return h

    def weighted(self, n: Any, s: int) -> Any:
        """(P, 64): a step's tokens by their weights, transposed; refills their stage."""
        k, smem = n * STEPS + s, self.smem
        steps, part = smem.steps.at[self.slot(n)], pl.ds(s * STEP, STEP)
        plgpu.barrier_wait(smem.tokens_full.at[self.slot_of_step(k)])
        tokens = smem.tokens.at[self.slot_of_step(k)].transpose((1, 0))
        tokens = to_fp32(plgpu.load(tokens, layout=TILE))
        c = plgpu.load(steps.at[0, part], layout=COLUMNS)
        if self.reverse:
            weight = jnp.exp2(c)
        else:
            sizes = plgpu.load(steps.at[1, part], layout=COLUMNS)
            weight = jnp.exp2(steps[0, CHUNK - 1] - c) * sizes
        tokens = (tokens * over_columns(weight, SLICE)).astype(smem.tokens.dtype)
        plgpu.commit_smem()  # all warps have read the tokens
        stages = self.stages
        pl.when(k + stages < self.count * STEPS)(lambda: self.fetch_tokens(k + stages))
        return tokens

    def save(self, n: Any, h: Any) -> None:
        """Saves `h`, the state before chunk `n`, in 16 bits."""
        at, held, states = self.at, self.smem.held.at[self.at.warpgroup], self.refs.states
        to = states.at[at.batch, self.number(n), at.head, at.channels]
        boxes = [*enumerate(range(0, self.scan.states, BOX))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for k, start in boxes:
            held.at[k][...] = h[:, start : start + BOX].astype(held.dtype)
        plgpu.commit_smem()
        for k, start in boxes:
            plgpu.copy_smem_to_gmem(held.at[k], to.at[:, pl.ds(start, BOX)])


def launch_fwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank=None, crossed=None
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
    return unless_finite([final], results, plain, (*args, rank, None), whole=5)


def _launch(options: SsdOptions, x, dt, a, B, C, D, z, initial_state) -> tuple[Any, Any]:
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


def _launch_range(options: SsdOptions, x, dt, a, B, C, D, z, initial_state) -> tuple[Any, Any]:
    """Launches the forward for the states of one launch."""
    every = options.checkpoint_every if options.save else None
    arrays = KernelInputs(x, dt, a, B, C, D, z, initial_state)
    scan = arrays.scan(every).cut(FORWARD_WARPGROUPS)
    scan = scan if z is None else scan.with_gate()
    ins = {
        "x": arrays.x,
        "steps": arrays.steps,
        "B": arrays.B,
        "C": arrays.C,
        "D": arrays.D,
        "z": arrays.z,
        "initial": part_starts(scan, False, arrays.x, arrays.B, arrays.steps, arrays.initial),
    }
    outs = {
        "out": jax.ShapeDtypeStruct(arrays.x.shape, x.dtype),
        "final": arrays.states_like(scan.parts, jnp.float32),
        "states": arrays.states_like(scan.saved, x.dtype) if scan.every else None,
        "y": arrays.x if saves_y(options, z) else None,
    }
    results = (mma.launch_fwd if by_mma() else _launch_kernel)(scan, ins, outs)
    final = arrays.cut_states(results["final"][:, -1])
    out, y = (arrays.cut_tokens(results[name]) for name in ("out", "y"))
    states = arrays.cut_states(results["states"])
    return (out, final if options.final else None, states, y), final


def _launch_kernel(scan: SsdTile, ins: dict[str, Any], outs: dict[str, Any]) -> dict[str, Any]:
    gated, saves_y = ins["z"] is not None, outs["y"] is not None
    return launch_named(
        functools.partial(_kernel, scan),
        ins,
        outs,
        _scratch(scan, ins["x"].dtype, gated=gated, saves_y=saves_y),
        grid=(scan.grid,),
        grid_names=(BLOCK,),
        num_threads=scan.warpgroups + SCORES_WARPGROUPS,
        thread_name=WARPGROUP,
        kernel_name="ssd_fwd",
        approx_math=True,
    )


def _scratch(scan: SsdTile, dtype: Any, *, gated: bool, saves_y: bool) -> dict[str, Any]:
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


def _kernel(scan: SsdTile, refs: Any, smem: Any) -> None:
    """Goes through the steps of a part of the sequence, for the units of a block."""
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < scan.warpgroups)
    def _():
        plgpu.set_max_registers(STATE_REGISTERS, action="increase")
        _State(scan, refs, smem, SsdUnit(scan, warpgroup)).run()

    for first in range(SCORES_WARPGROUPS):

        @pl.when(warpgroup == scan.warpgroups + first)
        def _(first: int = first) -> None:
            plgpu.set_max_registers(SCORES_REGISTERS, action="decrease")
            _Scores(scan, refs, smem, [SsdUnit(scan, k) for k in range(scan.warpgroups)]).run(first)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """A warpgroup that computes M of all units in alternate steps, and fetches its inputs.

    Attributes:
      refs: arrays in global memory.
      smem: see :class:`_State`.
      units: of the block.
    """

    scan: SsdTile
    refs: Any
    smem: Any
    units: list[SsdUnit]

    def run(self, first: int) -> None:
        """Runs all steps from `first` on."""
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

    scan: SsdTile
    refs: Any
    smem: Any
    at: SsdUnit

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
        """The state after step `n`, (P, N), from the state before; stores the output."""
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
        """y from the previous state and from D · x; xᵀ and (w ∘ x)ᵀ, (P, 64) each.

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
        x32 = to_fp32(x)
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
            z = to_fp32(z)
            y = y * z * sigmoid(z, False, layout=TILE)
        out = smem.out.at[at.warpgroup + unknown_zero()]
        out.transpose((1, 0))[...] = y.astype(out.dtype)
        plgpu.commit_smem()  # and all warps have read z
        pl.when(n + 1 < at.count)(functools.partial(self.fetch, "z", n + 1))
        plgpu.copy_smem_to_gmem(out, self.tokens(refs.out, n))
        if refs.y is not None:
            plgpu.copy_smem_to_gmem(smem.y.at[at.warpgroup], self.tokens(refs.y, n))
