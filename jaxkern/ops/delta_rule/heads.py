"""Kernels of the gated delta rule that only decays of heads need: T, and the gradients.

With the names of :mod:`jaxkern.ops.delta_rule.kernel`, and D[i,j] = exp(c[i] − c[j]) for j ≤ i:

    a = strict(K Kᵀ ∘ D),  T = (I + a[i,j] · β[j])⁻¹,  P = Q Kᵀ ∘ D

The first kernel finds T. The last one has a block from each state that the forward saved to the
next. It finds the states between them and N once more, and chunk by chunk the gradients, with dO
times scale and the products

    dP = tril(dO Nᵀ),  M = dV Nᵀ,  W = E ∘ (dV Sᵀ),  Z = left ∘ (N dSᵀ)
    h = strict(dP ∘ P − M ∘ a),  F = −strict(M ∘ D)[i,j] · β[j],  G = (dP ∘ D)[i,j] · β[j]

    dQ = E ∘ (dO Sᵀ) + G K
    dK = β ∘ Z − W + Gᵀ Q + (F + Fᵀ) K
    dβ[j] = (dP ∘ P)[j,j] + Σ_i h[i,j] + K[j] · Z[j]
    dc = Q · (E ∘ dO Sᵀ) − K · W + Σ_j h[i,j] · β[j] − β[i] · Σ_j h[j,i]
    dg[t] = Σ_{i ≥ t} dc[i] + Σ_{i < t} (β · (K · Z))[i] + exp(c[last]) · S · dS
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.lanes import zeros as lane_zeros
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.mma import (
    PADDED,
    accumulator,
    finish,
    invert_unit_lower,
    multiply,
    start,
)
from jaxkern.mosaic.tiles import (
    Meetings,
    barrier_of,
    by_wgmma,
    copies_barrier,
    finish_writes,
    load_left,
    rows_of,
    start_copies,
    store_matrix,
    store_tile,
    sync_tiles,
    tile,
    wait_for_copies,
    write_tile,
)
from jaxkern.mosaic.wgmma import (
    ROWS,
    WARPS,
    causal,
    lane_sums,
    store_column_sums,
    to_fp32,
)
from jaxkern.ops.chunks import cut_decays
from jaxkern.ops.delta_rule.call import (
    BETA,
    BF16,
    CHUNK,
    F32,
    KEYS,
    PAIR,
    SAVED,
    SLICE,
    START,
    SUM,
    TO_END,
    WARPGROUP,
    Call,
    Place,
    by_column,
    by_role,
    by_row,
    decays_of,
    first_state,
    launch,
    new_values,
    next_state,
    of_end,
    tiles_of,
    tokens_of,
)
from jaxkern.ops.delta_rule.reference import clipped_decays


def inverses(call: Call) -> Any:
    """T of all chunks, (B, chunks, H, CHUNK, CHUNK)."""

    def kernel(refs: Any, smem: Any) -> None:
        at = Place(call, call.chunks // PAIR)
        first = at.own[0] * PAIR
        copies = []
        for n in range(PAIR):
            copies.append((at.keys(refs.k, first + n), smem.k.at[n]))
            copies.append((at.of_chunk(refs.steps, first + n), smem.steps.at[n]))
        arrived = barrier_of(smem, "arrived")
        start_copies(copies, arrived)
        wait_for_copies(arrived)
        for n in range(PAIR):
            k, steps = smem.k.at[n], smem.steps.at[n]
            (A,) = multiply([accumulator(CHUNK)], [k], k, transposed=True)
            A = A * decays_of(steps) * by_column(steps, BETA)
            store_matrix(smem.A.at[n, :, pl.ds(0, CHUNK)], A)
        sync_tiles()
        invert_unit_lower(smem.A, refs.T.at[at.batch, pl.ds(first, PAIR), at.head])

    scratch = copies_barrier("arrived", [*tiles_of(call, "k").values()] * PAIR) | {
        "k": tile(CHUNK, call.keys, BF16, stages=PAIR),
        "steps": plgpu.SMEM((PAIR, 4, CHUNK), F32),
        "A": plgpu.SMEM((PAIR, CHUNK, PADDED), F32),
    }
    shape = call.batch, call.chunks, call.heads, CHUNK, CHUNK
    outs = {"T": jax.ShapeDtypeStruct(shape, BF16)}
    grid = call.batch * call.heads * call.chunks // PAIR
    ins = {"k": call.k, "steps": call.steps}
    return launch(kernel, "inverse", ins, outs, scratch, grid)["T"]


GRAD_SUM, GRAD_BETA, GRAD_END = range(3)
"""Rows of what each warpgroup adds to numbers of a token: dc, dβ and β · (K · Z)."""

_PIECE = 16
"""Columns that are multiplied at once where no product is: registers are short."""


def _row_sums(v: Any, ref: Any, first: int) -> Any:
    """(CHUNK,): sums over the columns of `v` times those of a tile from `first` on."""
    total = accumulator(_PIECE)
    for column in range(0, v.shape[1], _PIECE):
        weights = load_left(ref, columns=(first + column, _PIECE))
        total = total + v[:, column : column + _PIECE] * to_fp32(weights)
    return jnp.sum(total, axis=1)


_MEETINGS = Meetings(WARPGROUP)
_SLOTS = 2
"""Chunks whose q, k, v and T there is shared memory for."""


def _grads_scratch(call: Call) -> dict[str, Any]:
    """Shared memory of the last kernel: N takes the place of v, and F that of T."""
    early = tiles_of(call, "q k v T") | {"v": ((CHUNK, call.values), BF16)}
    late: dict[str, Any] = dict.fromkeys(("dout", "dV"), early["v"])
    scratch: dict[str, Any] = {
        name: tile(rows, columns, dtype, stages=_SLOTS)
        for name, ((rows, columns), dtype) in early.items()
        if name != "steps"
    }
    scratch |= {"steps": plgpu.SMEM((_SLOTS, *early["steps"][0]), F32)}
    scratch |= {name: tile(rows, columns, BF16) for name, ((rows, columns), _) in late.items()}
    scratch |= dict.fromkeys(("S", "dS"), tile(call.values, call.keys, BF16))
    scratch |= {"G": tile(CHUNK, CHUNK, BF16)}
    scratch |= {"columns": plgpu.SMEM((2, WARPS, CHUNK), F32)} | _MEETINGS.scratch()
    scratch |= copies_barrier("early", early.values(), _SLOTS)
    slices = [((SLICE, call.keys), BF16)] * call.slices
    return scratch | copies_barrier("late", [*late.values(), *slices])


class _Grads:
    """One of two warpgroups of a block that finds gradients between two saved states.

    Chunk by chunk the first ones find the state and N again, each of SLICE value channels. Then
    the first has dP and G, and the second M and F; and each dQ and dK of KEYS key channels.
    """

    def __init__(self, call: Call, refs: Any, smem: Any, own: int):
        self.call, self.refs, self.smem, self.own = call, refs, smem, own
        self.slices, self.halves = call.slices, call.keys // KEYS
        self.at = Place(call, refs.states.shape[1])
        (self.index,) = self.at.own
        self.first = self.index * SAVED

    def run(self) -> None:
        count = jnp.minimum(SAVED, self.call.chunks - self.first)
        self.fetch(0, count)
        self.fetch_late(0, count)
        S = ()
        if self.own < self.slices:
            S = first_state(self.refs.states, self.at, self.index, self.own, self.call.keys)
        lax.fori_loop(0, count, lambda n, S: self.step(n, count, S), S)
        finish_writes()

    def fetch(self, n: Any, count: Any) -> None:
        """The second warpgroup, which has less to do, starts to fetch what is needed to find N."""
        if not self.own:
            return
        at, smem, refs, chunk, slot = self.at, self.smem, self.refs, self.first + n, lax.rem(n, 2)
        copies = [(at.keys(getattr(refs, name), chunk), getattr(smem, name)) for name in "qk"]
        copies.append((at.of_chunk(refs.T, chunk), smem.T))
        copies.append((at.of_chunk(refs.steps, chunk), smem.steps))
        copies.append((at.all_values(refs.v, chunk), smem.v))
        pairs = [(source, to.at[slot]) for source, to in copies]
        start_copies(pairs, barrier_of(smem, "early", slot), n < count)

    def fetch_late(self, n: Any, count: Any) -> None:
        """It starts to fetch what N is needed for."""
        if not self.own:
            return
        at, smem, refs, chunk = self.at, self.smem, self.refs, self.first + n
        pairs = [(at.all_values(getattr(refs, x), chunk), getattr(smem, x)) for x in ("dout", "dV")]
        for part, name in enumerate(self.call.after_names()):
            source = at.all_values(getattr(refs, name), chunk)
            pairs.append((source, rows_of(smem.dS, part * SLICE, SLICE)))
        start_copies(pairs, barrier_of(smem, "late"), n < count)

    def wait(self, barrier: Any, later: int) -> None:
        if self.own or by_wgmma():
            wait_for_copies(barrier, later)

    def meet(self) -> None:
        _MEETINGS.meet(self.smem)

    def step(self, n: Any, count: Any, S: Any) -> Any:
        slot, smem, own = lax.rem(n, 2), self.smem, self.own
        self.wait(barrier_of(smem, "early", slot), 1)
        if not by_wgmma():
            self.meet()
        stage = {name: getattr(smem, name).at[slot] for name in ("q", "k", "v", "T", "steps")}
        if own < self.slices:
            S = self.find_new(stage, S)
        self.wait(barrier_of(smem, "late"), 0)
        finish_writes()
        self.meet()
        self.fetch(n + 1, count)
        dc, dbeta = self.of_dout(stage) if own == 0 else self.of_new(stage)
        self.meet()
        kz, products = dc * 0, lane_zeros()
        states = self.read_states(stage) if own < self.halves else None
        self.meet()
        self.fetch_late(n + 1, count)
        if states is not None:
            sums, products = self.finish(stage, self.first + n, *states)
            dc, dbeta, kz = dc + sums[0], dbeta + sums[1], sums[2]
        to = self.at.of_chunk(self.refs.numbers, self.first + n).at[own]
        for row, v in ((GRAD_SUM, dc), (GRAD_BETA, dbeta), (GRAD_END, kz)):
            to.at[row][...] = v
        self.at.of_chunk(self.refs.of_states, self.first + n).at[own][...] = products
        return S

    def find_new(self, stage: dict[str, Any], S: Any) -> Any:
        """Finds the own channels of S and N, and stores them; the next S."""
        k, narrow = stage["k"], S.astype(BF16)
        v = stage["v"].at[pl.ds(self.own, 1)]
        reading = start([accumulator(CHUNK)], [narrow], k, transposed=True)
        store_tile(rows_of(self.smem.S, self.own * SLICE, SLICE), narrow)
        making = new_values(stage | {"v": v}, reading)
        sync_tiles()  # all warps have read v
        adding, new = next_state(stage, S, making)
        store_tile(v, new.astype(BF16), transposed=True)
        return finish(adding)[0]

    def sums(self, steps: Any, h: Any) -> tuple[Any, Any]:
        """The part of dc from h, and Σ_i h[i,j], (CHUNK,) each."""
        columns = self.smem.columns.at[self.own]
        for first in range(0, CHUNK, 32):
            store_column_sums(columns, first, h[:, first : first + 32])
        dc = jnp.sum(h * by_column(steps, BETA), axis=1)
        sync_tiles()
        of_later = sum(plgpu.load(columns.at[n], layout=ROWS) for n in range(WARPS))
        return dc - plgpu.load(steps.at[BETA], layout=ROWS) * of_later, of_later

    def of_dout(self, stage: dict[str, Any]) -> tuple[Any, Any]:
        """Stores G; returns what dP ∘ P adds to dc and dβ."""
        steps = stage["steps"]
        dout, new = self.smem.dout, stage["v"]
        (dP,) = multiply([accumulator(CHUNK)], [dout], new, transposed=True)
        dP = dP * (decays_of(steps) * self.call.scale)
        store_tile(self.smem.G, (dP * by_column(steps, BETA)).astype(BF16))
        (P,) = multiply([accumulator(CHUNK)], [stage["q"]], stage["k"], transposed=True)
        of_all = dP * P
        # The diagonal would enter both sums of dc, and cancel but for its rounding.
        h = of_all * jnp.exp2(causal(accumulator(CHUNK), first=1))
        diagonal = jnp.sum(of_all - h, axis=1)
        dc, of_later = self.sums(steps, h)
        return dc, of_later + diagonal

    def of_new(self, stage: dict[str, Any]) -> tuple[Any, Any]:
        """Stores F; returns what −M ∘ a adds to dc and dβ."""
        steps, k = stage["steps"], stage["k"]
        (M,) = multiply([accumulator(CHUNK)], [self.smem.dV], stage["v"], transposed=True)
        M = M * -decays_of(steps, strict=True)
        store_tile(stage["T"], (M * by_column(steps, BETA)).astype(BF16))
        (a,) = multiply([accumulator(CHUNK)], [k], k, transposed=True)
        return self.sums(steps, M * a)

    def read_states(self, stage: dict[str, Any]) -> tuple[Any, ...]:
        """dO Sᵀ, dV Sᵀ and N dSᵀ, (CHUNK, KEYS) each, and lanes' parts of S · dS."""
        smem, first = self.smem, self.own * KEYS
        first_two = start([accumulator(KEYS)] * 2, [smem.dout, smem.dV], smem.S, first=first)
        third = start([accumulator(KEYS)], [stage["v"]], smem.dS, first=first)
        products = lane_zeros()
        for part in range(self.slices):
            of_part = [rows_of(v, part * SLICE, SLICE) for v in (smem.S, smem.dS)]
            for column in range(first, first + KEYS, _PIECE):
                S, dS = (to_fp32(load_left(v, columns=(column, _PIECE))) for v in of_part)
                products = products + lane_sums(S * dS)
        return *finish(first_two, later=1), *finish(third), products

    def finish(
        self, stage: dict[str, Any], chunk: Any, dq: Any, w: Any, z: Any, products: Any
    ) -> tuple[tuple[Any, Any, Any], Any]:
        """Writes dQ and dK; what is added to dc, dβ and β · (K · Z), and lanes' parts of dg."""
        smem, q, k, steps, first = (
            self.smem,
            stage["q"],
            stage["k"],
            stage["steps"],
            self.own * KEYS,
        )
        number = lambda row: plgpu.load(steps.at[row], layout=ROWS)
        left = jnp.exp2(steps[SUM, CHUNK - 1] - number(SUM))
        dq = dq * by_row(steps, START, KEYS, self.call.scale)
        dc = _row_sums(dq, q, first) - number(START) * _row_sums(w, k, first)
        dbeta = left * _row_sums(z, k, first)
        dk = z * by_row(steps, TO_END, KEYS) - w * by_row(steps, START, KEYS)
        both = load_left(stage["T"]) + load_left(stage["T"], transposed=True)
        dq, dk = multiply([dq, dk], [smem.G, both], k, first=first)
        (dk,) = multiply([dk], [load_left(smem.G, transposed=True)], q, first=first)
        tokens = self.at.batch, tokens_of(chunk), self.at.head, pl.ds(first, KEYS)
        results = (self.refs.dq, q, dq), (self.refs.dk, k, dk)
        sync_tiles()  # these channels of q and k are no longer needed
        own = pl.ds(self.own, 1)
        for _, of, v in results:
            store_tile(of.at[own], v.astype(BF16))
        sync_tiles()
        for ref, of, _ in results:
            write_tile(of.at[own], ref.at[tokens])
        return (dc, dbeta, number(BETA) * dbeta), products * of_end(steps)


def launch_grads(
    call: Call, dout: Any, states: Any, after: tuple[Any, ...], dV: Any, T: Any
) -> dict[str, Any]:
    """dQ and dK of each head, numbers of tokens, and parts of exp(c[last]) · S · dS."""

    def kernel(refs: Any, smem: Any) -> None:
        by_role(*(lambda n=n: _Grads(call, refs, smem, n).run() for n in range(2)))

    of_chunks, like = (call.batch, call.chunks, call.heads, 2), jax.ShapeDtypeStruct
    more = call.key_gradients(after)
    outs = more.pop("outs") | {
        "numbers": like((*of_chunks, 3, CHUNK), F32),
        "of_states": like((*of_chunks, LANES), F32),
    }
    ins = {"q": call.q, "k": call.k, "v": call.v, "T": T, "steps": call.steps}
    ins |= {"states": states, "dout": dout, "dV": dV} | more.pop("ins", {})
    grid = call.batch * call.heads * states.shape[1]
    return launch(kernel, "bwd", ins, outs, _grads_scratch(call), grid, warpgroups=2, **more)


def of_tokens(call: Call, g: Any, rank: Any, grads: dict[str, Any]) -> tuple[Any, Any]:
    """dg, or ``None``, and dβ, (B, chunks, H, CHUNK), from what `launch_grads` found."""
    numbers = grads["numbers"].sum(3)
    if g is None:
        return None, numbers[..., GRAD_BETA, :]
    dg = jnp.cumsum(numbers[..., GRAD_SUM, ::-1], axis=-1)[..., ::-1]
    dg = dg + grads["of_states"].sum((-2, -1))[..., None]
    dg = dg.at[..., 1:].add(jnp.cumsum(numbers[..., GRAD_END, :-1], axis=-1))
    used = clipped_decays(g) if rank is None else cut_decays(clipped_decays(g), rank)
    dg = jnp.where(used == g, call.cut_steps(dg), 0).astype(g.dtype)
    return dg, numbers[..., GRAD_BETA, :]
