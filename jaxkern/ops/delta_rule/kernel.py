"""The kernels of the gated delta rule with decays of heads.

They multiply by wgmma or mma.sync (:mod:`jaxkern.mosaic.mma`), on every GPU from Ampere on. In a
chunk of CHUNK tokens, with c[i] = g[0] + … + g[i], E = exp(c), D[i,j] = exp(c[i] − c[j]) for j ≤ i,
and S, (K, V), the state before it:

    a = strict(K Kᵀ ∘ D),  T = (I + a[i,j] · β[j])⁻¹,  P = Q Kᵀ ∘ D
    N = T (V − E ∘ (K S))
    O = scale · (E ∘ (Q S) + (P[i,j] · β[j]) N)
    S ← exp(c[last]) · S + (β ∘ left ∘ K)ᵀ N,  left = exp(c[last] − c)

T of each chunk is found first, and kept for the backward. The scan then goes through the chunks
with Sᵀ of SLICE value channels in the registers of a warpgroup. What it multiplies is transposed,
(SLICE, …), so that each product leaves the next one's left operand in the registers of its lane:

    (K S)ᵀ = Sᵀ Kᵀ → (V − E ∘ K S)ᵀ → Nᵀ = (…)ᵀ Tᵀ → Sᵀ += Nᵀ (β ∘ left ∘ K)

A second warpgroup makes P and O, for which it gets S and N through shared memory.

Backward, for dO, by then times scale, and dS of the state after a chunk:

    dN = β ∘ (Pᵀ dO + left ∘ (K dS)),  dV = Tᵀ dN
    dS ← exp(c[last]) · dS + (E ∘ Q)ᵀ dO − (E ∘ K)ᵀ dV

in the same way, from the end to the start; the second warpgroup makes Pᵀ dO and E ∘ dO. With dS of
all chunks, the last kernel has a block from each state that the forward saved to the next. It finds
the states between them and N once more, and chunk by chunk the gradients, with the products

    dP = tril(dO Nᵀ),  M = dV Nᵀ,  W = E ∘ (dV Sᵀ),  Z = left ∘ (N dSᵀ)
    h = strict(dP ∘ P − M ∘ a),  F = −strict(M ∘ D)[i,j] · β[j],  G = (dP ∘ D)[i,j] · β[j]

    dQ = E ∘ (dO Sᵀ) + G K
    dK = β ∘ Z − W + Gᵀ Q + (F + Fᵀ) K
    dβ[j] = (dP ∘ P)[j,j] + Σ_i h[i,j] + K[j] · Z[j]
    dc = Q · (E ∘ dO Sᵀ) − K · W + Σ_j h[i,j] · β[j] − β[i] · Σ_j h[j,i]
    dg[t] = Σ_{i ≥ t} dc[i] + Σ_{i < t} (β · (K · Z))[i] + exp(c[last]) · S · dS
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import LANES, grid_axes, shared_memory
from jaxkern.mosaic.mma import (
    PADDED,
    accumulator,
    finish,
    invert_unit_lower,
    multiply,
    start,
)
from jaxkern.mosaic.registers import zeros as lane_zeros
from jaxkern.mosaic.tiles import (
    Handoffs,
    TileRing,
    barrier_of,
    by_wgmma,
    copies_barrier,
    fence_tiles,
    finish_writes,
    launch_tiles,
    load_left,
    load_transposed,
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
    COLUMNS,
    ROWS,
    WARPS,
    causal,
    lane_sums,
    over_columns,
    over_rows,
    store_column_sums,
    to_fp32,
)
from jaxkern.ops.chunks import chunk_sums_of, cut_decays, padded, unless_finite
from jaxkern.ops.delta_rule.reference import (
    KERNEL_CHUNK,
    SAVED_EVERY,
    DeltaRuleOptions,
    clipped_decays,
    reference_bwd,
    reference_fwd,
    unit_length,
)

CHUNK = KERNEL_CHUNK
"""Tokens of a chunk: the rows of an accumulator."""
SLICE = 64
"""Value channels of a block that scans."""
KEYS = 64
"""Key channels that are padded to, and whose gradients are found at once."""
MOST_VALUES = 2 * SLICE
"""The most value channels of a head in the last kernel: SLICE of each warpgroup."""
PAIR = 2
"""Chunks of a block that inverts: it has a lane for each column of both."""
SAVED = SAVED_EVERY // CHUNK
"""Chunks from one saved state to the next."""
_SQUARE = 2 * CHUNK * CHUNK
"""Bytes of a tile (CHUNK, CHUNK)."""

BLOCK, WARPGROUP = grid_axes("block", "warpgroup")
_BF16, _F32 = jnp.bfloat16, jnp.float32


def _launch(
    kernel: Any, name: str, ins: Any, outs: Any, scratch: Any, grid: int, warpgroups: int = 1
) -> dict[str, Any]:
    name = f"gated_delta_rule_{name}"
    return launch_tiles(kernel, name, ins, outs, scratch, (BLOCK, WARPGROUP), grid, warpgroups)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_C, _BETA, _E, _TO_END = range(4)
"""Rows of a chunk's steps: c · log2(e), β, E and β ∘ left."""


class _Call:
    """A call's arrays as the kernels take them: in whole chunks and tiles.

    Attributes:
      q, k: (B, L, G, K); v: (B, L, H, V).
      steps: (B, H, chunks, 4, CHUNK), fp32, numbers of each token: `_C`, `_BETA`, `_E`, `_TO_END`.
    """

    def __init__(self, options: DeltaRuleOptions, q: Any, k: Any, v: Any, g: Any, beta: Any):
        self.batch, self.length, self.groups, self.rank, self.channels = v.shape
        self.key_channels = q.shape[-1]
        self.heads = self.groups * self.rank
        self.keys, self.values = _up(self.key_channels, KEYS), _up(self.channels, SLICE)
        self.tokens = _up(self.length, PAIR * CHUNK)
        self.chunks, self.slices = self.tokens // CHUNK, self.values // SLICE
        if options.qk_l2norm:
            q, k = (unit_length(x.astype(jnp.float32)).astype(x.dtype) for x in (q, k))
        self.q, self.k = (padded(padded(x, 1, self.tokens), 3, self.keys) for x in (q, k))
        self.v, self.scale = self.of_values(v), options.scale
        of_tokens = v.shape[:-1]
        g = jnp.zeros(of_tokens, jnp.float32) if g is None else g.astype(jnp.float32)
        beta = jnp.ones(of_tokens, jnp.float32) if beta is None else beta.astype(jnp.float32)
        by_head = (x.reshape(*v.shape[:2], self.heads) for x in (g, beta))
        g, beta = (padded(x, 1, self.tokens) for x in by_head)
        c, beta = jnp.moveaxis(chunk_sums_of(g, beta, CHUNK), 3, 0)
        to_end = beta * jnp.exp2(c[..., -1:] - c)
        self.steps = jnp.stack([c, beta, jnp.exp2(c), to_end], axis=3)

    def of_values(self, v: Any) -> Any:
        """(B, L, H, V) of (B, L, G, R, V)."""
        v = v.reshape(*v.shape[:2], self.heads, self.channels)
        return padded(padded(v, 1, self.tokens), 3, self.values)

    def states(self, v: Any) -> Any:
        """(…, H, K, V), fp32, of (…, G, R, K, V)."""
        if v is None:
            return None
        v = v.astype(jnp.float32).reshape(*v.shape[:-4], self.heads, *v.shape[-2:])
        return padded(padded(v, v.ndim - 2, self.keys), v.ndim - 1, self.values)

    def cut_states(self, v: Any) -> Any:
        """Undoes `states`."""
        v = v[..., : self.key_channels, : self.channels]
        return v.reshape(*v.shape[:-3], self.groups, self.rank, *v.shape[-2:])

    def cut_values(self, v: Any) -> Any:
        """Undoes `of_values`."""
        v = v[:, : self.length, :, : self.channels]
        return v.reshape(*v.shape[:2], self.groups, self.rank, self.channels)

    def cut_steps(self, v: Any) -> Any:
        """(B, L, G, R) of (B, H, chunks, CHUNK)."""
        v = v.transpose(0, 2, 3, 1).reshape(self.batch, self.tokens, self.heads)
        return v[:, : self.length].reshape(self.batch, self.length, self.groups, self.rank)

    def cut_keys(self, v: Any, dtype: Any) -> Any:
        """(B, L, G, K) of what each head has, (B, L, H, K)."""
        v = v[:, : self.length, :, : self.key_channels]
        v = v.reshape(*v.shape[:2], self.groups, self.rank, v.shape[-1])
        return v[:, :, :, 0] if self.rank == 1 else v.astype(dtype).sum(3)

    def states_like(self, count: int) -> Any:
        shape = self.batch, count, self.heads, self.keys, self.values
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def turned_like(self) -> Any:
        """The type of transposed states of all chunks, in 16 bits."""
        shape = self.batch, self.chunks, self.heads, self.values, self.keys
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


class _At:
    """The coordinates of a block, of `counts` of something beside heads and batch rows.

    What comes first in `counts` has consecutive blocks.
    """

    def __init__(self, call: _Call, *counts: int):
        rest, self.own = lax.axis_index(BLOCK), []
        for count in counts:
            self.own.append(lax.rem(rest, count))
            rest = lax.div(rest, count)
        self.head, self.batch = lax.rem(rest, call.heads), lax.div(rest, call.heads)
        self.group = lax.div(self.head, call.rank)

    def keys(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, K) of q or k."""
        return ref.at[self.batch, _tokens(chunk), self.group]

    def values(self, ref: Any, chunk: Any, part: Any) -> Any:
        """(CHUNK, SLICE) of v and what has its shape."""
        return ref.at[self.batch, _tokens(chunk), self.head, pl.ds(part * SLICE, SLICE)]

    def all_values(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, V)."""
        return ref.at[self.batch, _tokens(chunk), self.head]

    def numbers(self, ref: Any, chunk: Any) -> Any:
        """Steps or numbers of a chunk."""
        return ref.at[self.batch, self.head, chunk]

    def matrix(self, ref: Any, chunk: Any) -> Any:
        """T, or all of a transposed state."""
        return ref.at[self.batch, chunk, self.head]

    def turned(self, ref: Any, chunk: Any, part: Any) -> Any:
        """(SLICE, K) of transposed states."""
        return ref.at[self.batch, chunk, self.head, pl.ds(part * SLICE, SLICE)]

    def state(self, ref: Any, index: Any, part: Any) -> Any:
        """(K, SLICE) of states."""
        return ref.at[self.batch, index, self.head, :, pl.ds(part * SLICE, SLICE)]


def _tokens(chunk: Any) -> Any:
    return pl.ds(chunk * CHUNK, CHUNK)


def _rows(steps: Any, row: int, columns: int, times: float = 1) -> Any:
    """(CHUNK, columns): numbers of the tokens that are the rows."""
    number = plgpu.load(steps.at[row], layout=ROWS)
    return over_rows(number if times == 1 else number * times, columns)


def _of_columns(steps: Any, row: int) -> Any:
    """(CHUNK,): numbers of the tokens that are columns."""
    return plgpu.load(steps.at[row], layout=COLUMNS)


def _columns(steps: Any, row: int, times: float = 1) -> Any:
    """(64, CHUNK): numbers of the tokens that are the columns."""
    number = _of_columns(steps, row)
    return over_columns(number if times == 1 else number * times, CHUNK)


def _decays(steps: Any, *, strict: bool = False) -> Any:
    """D, (CHUNK, CHUNK), or without its diagonal."""
    c = _rows(steps, _C, CHUNK) - _columns(steps, _C)
    return jnp.exp2(causal(c, first=1 if strict else 0))


def _of_end(steps: Any) -> Any:
    """exp(c[last])."""
    return steps[_E, CHUNK - 1]


def _tiles(call: _Call, names: str) -> dict[str, Any]:
    """Shapes and dtypes of the arrays' parts in a chunk, of these names and of the steps."""
    of: dict[str, Any] = dict.fromkeys(("q", "k"), ((CHUNK, call.keys), _BF16))
    of["steps"] = (4, CHUNK), _F32
    return {name: of.get(name, ((CHUNK, CHUNK), _BF16)) for name in (*names.split(), "steps")}


def _inverses(call: _Call) -> Any:
    """T of all chunks, (B, chunks, H, CHUNK, CHUNK)."""

    def kernel(refs: Any, smem: Any) -> None:
        at = _At(call, call.chunks // PAIR)
        first = at.own[0] * PAIR
        copies = []
        for n in range(PAIR):
            copies.append((at.keys(refs.k, first + n), smem.k.at[n]))
            copies.append((at.numbers(refs.steps, first + n), smem.steps.at[n]))
        arrived = barrier_of(smem, "arrived")
        start_copies(copies, arrived)
        wait_for_copies(arrived)
        for n in range(PAIR):
            k, steps = smem.k.at[n], smem.steps.at[n]
            (A,) = multiply([accumulator(CHUNK)], [k], k, transposed=True)
            A = A * _decays(steps) * _columns(steps, _BETA)
            store_matrix(smem.A.at[n, :, pl.ds(0, CHUNK)], A)
        sync_tiles()
        invert_unit_lower(smem.A, refs.T.at[at.batch, pl.ds(first, PAIR), at.head])

    scratch = copies_barrier("arrived", [*_tiles(call, "k").values()] * PAIR) | {
        "k": tile(CHUNK, call.keys, _BF16, stages=PAIR),
        "steps": plgpu.SMEM((PAIR, 4, CHUNK), _F32),
        "A": plgpu.SMEM((PAIR, CHUNK, PADDED), _F32),
    }
    shape = call.batch, call.chunks, call.heads, CHUNK, CHUNK
    outs = {"T": jax.ShapeDtypeStruct(shape, _BF16)}
    grid = call.batch * call.heads * call.chunks // PAIR
    ins = {"k": call.k, "steps": call.steps}
    return _launch(kernel, "inverse", ins, outs, scratch, grid)["T"]


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A warpgroup that goes through chunks of SLICE value channels of a head."""

    call: _Call
    ring: TileRing
    refs: Any
    smem: Any
    at: _At

    def sources(self, chunk: Any, part: Any) -> dict[str, Any]:
        """Parts of arrays that the ring fetches for a chunk."""
        of = {"q": self.at.keys, "k": self.at.keys}
        of |= {"steps": self.at.numbers, "T": self.at.matrix}
        values = lambda ref, chunk: self.at.values(ref, chunk, part)
        return {
            name: of.get(name, values)(getattr(self.refs, name), chunk) for name in self.ring.tiles
        }

    def loop(self, count: Any, number: Any, part: Any, step: Any, state: Any) -> Any:
        """Runs ``state = step(chunk, stage, state, fetch)`` for the chunks ``number(n)``."""
        return self.ring.loop(
            self.smem,
            count,
            lambda n: self.sources(number(n), part),
            lambda n, stage, state, fetch: step(number(n), stage, state, fetch),
            state,
            early=False,
        )


def _first(ref: Any, at: _At, index: Any, part: Any, keys: int) -> Any:
    """A transposed state, (SLICE, K), or zeros."""
    return accumulator(keys) if ref is None else load_transposed(at.state(ref, index, part))


def _by_role(*roles: Any) -> None:
    """Runs one of `roles` in each warpgroup."""
    for number, role in enumerate(roles):
        pl.when(lax.axis_index(WARPGROUP) == number)(role)


def _new_values(stage: dict[str, Any], reading: Any) -> Any:
    """Starts Nᵀ = (V − E ∘ (K S))ᵀ Tᵀ, (SLICE, CHUNK), from (K S)ᵀ."""
    v = to_fp32(load_left(stage["v"], transposed=True))
    read, v, E = finish(reading, ready=[v, _of_columns(stage["steps"], _E)])
    left = v - read * over_columns(E, SLICE)
    return start([accumulator(CHUNK)], [left], stage["T"], transposed=True)


def _next_state(stage: dict[str, Any], S: Any, making: Any) -> tuple[Any, Any]:
    """Starts the next Sᵀ, from that before and Nᵀ, which it returns, too."""
    ready = [S * _of_end(stage["steps"]), _of_columns(stage["steps"], _TO_END)]
    new, decayed, to_end = finish(making, ready=ready)
    return start([decayed], [new * over_columns(to_end, SLICE)], stage["k"]), new


_SCANNED = Handoffs(("state", "state read", "new", "new read"))
"""From the warpgroup that scans to the one that makes outputs, and back."""


def _launch_scan(call: _Call, initial: Any, T: Any, *, save: bool) -> dict[str, Any]:
    """The output, the final state and, to save, the states before every SAVED-th chunk.

    Two warpgroups: one scans, and hands Sᵀ and N to the other, which makes the output.
    """
    grid = call.batch * call.heads * call.slices
    slots = 2 if by_wgmma() else 1  # the TMA still reads the chunk's before
    other = 2 * SLICE * call.keys + (1 + slots) * _SQUARE
    of_both = _tiles(call, "k v T"), _tiles(call, "q k")
    scanned, made = TileRing.of(other, grid, *of_both, fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        at = _At(call, call.slices)
        (part,), hand = at.own, _SCANNED

        def scan(chunk: Any, stage: dict[str, Any], S: Any, fetch: Any) -> Any:
            if save:
                to = at.state(refs.states, lax.div(chunk, SAVED), part)
                pl.when(lax.rem(chunk, SAVED) == 0)(lambda: store_matrix(to, S, transposed=True))
            narrow = S.astype(_BF16)
            reading = start([accumulator(CHUNK)], [narrow], stage["k"], transposed=True)
            pl.when(chunk > 0)(lambda: hand.take(smem, "state read"))
            store_tile(smem.S, narrow)
            fetch()
            making = _new_values(stage, reading)
            fence_tiles()
            hand.give(smem, "state")
            adding, new = _next_state(stage, S, making)
            pl.when(chunk > 0)(lambda: hand.take(smem, "new read"))
            store_tile(smem.N, new.astype(_BF16), transposed=True)
            fence_tiles()
            hand.give(smem, "new")
            return finish(adding)[0]

        def write(chunk: Any) -> None:
            write_tile(smem.out.at[lax.rem(chunk, slots)], at.values(refs.out, chunk, part))

        def make(chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
            steps, more, q = stage["steps"], chunk < call.chunks - 1, load_left(stage["q"])
            pairs = start([accumulator(CHUNK)], [q], stage["k"], transposed=True)
            D = _decays(steps) * _columns(steps, _BETA, call.scale)
            E = _rows(steps, _E, SLICE, call.scale)
            P = (finish(pairs)[0] * D).astype(_BF16)
            fence_tiles()
            hand.take(smem, "state")
            reading = start([accumulator(SLICE)], [q], smem.S, transposed=True)
            fetch()
            finish_writes()
            pl.when(chunk > 0)(lambda: write(chunk - 1))
            (out,) = finish(reading)
            pl.when(more)(lambda: hand.give(smem, "state read"))
            out = out * E
            hand.take(smem, "new")
            (out,) = multiply([out], [P], smem.N)
            pl.when(more)(lambda: hand.give(smem, "new read"))
            store_tile(smem.out.at[lax.rem(chunk, slots)], out.astype(_BF16))
            return _

        def run_scan() -> None:
            S = _first(refs.initial, at, 0, part, call.keys)
            of = _Scan(call, scanned, refs, smem, at)
            S = of.loop(call.chunks, lambda n: n, part, scan, S)
            store_matrix(at.state(refs.final, 0, part), S, transposed=True)

        def run_outputs() -> None:
            _Scan(call, made, refs, smem, at).loop(call.chunks, lambda n: n, part, make, None)
            sync_tiles()
            write(call.chunks - 1)
            finish_writes()

        _by_role(run_scan, run_outputs)

    ins = {"q": call.q, "k": call.k, "v": call.v, "steps": call.steps, "T": T}
    outs = {
        "out": jax.ShapeDtypeStruct(call.v.shape, _BF16),
        "final": call.states_like(1),
        "states": call.states_like(-(-call.chunks // SAVED)) if save else None,
    }
    scratch = scanned.scratch() | made.scratch() | _SCANNED.scratch()
    scratch |= {"S": tile(SLICE, call.keys, _BF16), "N": tile(CHUNK, SLICE, _BF16)}
    scratch |= {"out": tile(CHUNK, SLICE, _BF16, stages=slots)}
    return _launch(kernel, "fwd", ins | {"initial": initial}, outs, scratch, grid, warpgroups=2)


_REVERSED = Handoffs(("pairs", "done"))
"""From the warpgroup that makes Pᵀ dO to the one that scans, and back."""


def _launch_reverse(call: _Call, dout: Any, dfinal: Any, T: Any) -> dict[str, Any]:
    """dS after each chunk, transposed in 16 bits, dV, and dS before the first chunk.

    Two warpgroups: one scans, and gets Pᵀ dO and E ∘ dO from the other.
    """
    grid = call.batch * call.heads * call.slices
    other = 4 * SLICE * call.keys + 4 * _SQUARE
    of_both = _tiles(call, "q k T"), _tiles(call, "q k dout")
    scanned, made = TileRing.of(other, grid, *of_both, fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        at = _At(call, call.slices)
        (part,), hand, last = at.own, _REVERSED, call.chunks - 1

        def scan(chunk: Any, stage: dict[str, Any], dS: Any, fetch: Any) -> Any:
            steps, narrow = stage["steps"], dS.astype(_BF16)
            reading = start([accumulator(CHUNK)], [narrow], stage["k"], transposed=True)
            fetch()
            decayed, to_end = dS * _of_end(steps), _of_columns(steps, _TO_END)
            finish_writes()
            fence_tiles()
            hand.take(smem, "pairs")
            dN = to_fp32(load_left(smem.X))
            read, dN, to_end = finish(reading, ready=[dN, to_end])
            adding = start([decayed], [smem.weighted], stage["q"])
            dN = dN + read * over_columns(to_end, SLICE)
            making = start([accumulator(CHUNK)], [dN], stage["T"])
            pl.when(chunk < last)(lambda: write(chunk + 1))
            store_tile(smem.dS.at[lax.rem(chunk, 2)], narrow)
            E = _of_columns(steps, _E)
            (dS,) = finish(adding, later=1)
            dV, E = finish(making, ready=[E])
            adding = start([dS], [-dV * over_columns(E, SLICE)], stage["k"])
            store_tile(smem.dV.at[lax.rem(chunk, 2)], dV.astype(_BF16), transposed=True)
            (dS,) = finish(adding)
            pl.when(chunk > 0)(lambda: hand.give(smem, "done"))
            return dS

        def write(chunk: Any) -> None:
            slot = lax.rem(chunk, 2)
            write_tile(smem.dV.at[slot], at.values(refs.dV, chunk, part))
            write_tile(smem.dS.at[slot], at.turned(refs.after, chunk, part))

        def make(chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
            steps = stage["steps"]
            pairs = start([accumulator(CHUNK)], [stage["k"]], stage["q"], transposed=True)
            c = _columns(steps, _C) - _rows(steps, _C, CHUNK)
            D = jnp.exp2(causal(c, transposed=True)) * _rows(steps, _BETA, CHUNK, call.scale)
            (P,) = finish(pairs)
            making = start([accumulator(SLICE)], [P * D], stage["dout"])
            dout = to_fp32(load_left(stage["dout"], transposed=True))
            dout = dout * _columns(steps, _E, call.scale)
            (X,) = finish(making)
            pl.when(chunk < last)(lambda: hand.take(smem, "done"))
            store_tile(smem.X, X.astype(_BF16), transposed=True)
            store_tile(smem.weighted, dout.astype(_BF16))
            fence_tiles()
            hand.give(smem, "pairs")
            fetch()
            return _

        def run_scan() -> None:
            dS = _first(refs.dfinal, at, 0, part, call.keys)
            of = _Scan(call, scanned, refs, smem, at)
            dS = of.loop(call.chunks, lambda n: last - n, part, scan, dS)
            sync_tiles()
            write(0)
            finish_writes()
            store_matrix(at.state(refs.dinitial, 0, part), dS, transposed=True)

        def run_pairs() -> None:
            _Scan(call, made, refs, smem, at).loop(
                call.chunks, lambda n: last - n, part, make, None
            )

        _by_role(run_scan, run_pairs)

    ins = {"q": call.q, "k": call.k, "dout": dout, "steps": call.steps, "T": T}
    of_values = jax.ShapeDtypeStruct(call.v.shape, _BF16)
    outs = {
        "after": call.turned_like(),
        "dV": of_values,
        "dinitial": call.states_like(1),
    }
    scratch = scanned.scratch() | made.scratch() | _REVERSED.scratch()
    scratch |= dict.fromkeys(("X", "weighted"), tile(SLICE, CHUNK, _BF16))
    scratch |= {"dV": tile(CHUNK, SLICE, _BF16, stages=2)}
    scratch |= {"dS": tile(SLICE, call.keys, _BF16, stages=2)}
    return _launch(kernel, "reverse", ins | {"dfinal": dfinal}, outs, scratch, grid, warpgroups=2)


_DC, _DBETA, _KZ = range(3)
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


_MEETINGS = Handoffs(("fetched", "new", "pairs", "read"), warpgroups=2)
_SLOTS = 2
"""Chunks whose q, k, v and T there is shared memory for."""


def _grads_scratch(call: _Call) -> dict[str, Any]:
    """Shared memory of the last kernel: N takes the place of v, and F that of T."""
    early = _tiles(call, "q k v T") | {"v": ((CHUNK, call.values), _BF16)}
    late: dict[str, Any] = dict.fromkeys(("dout", "dV"), early["v"])
    late["dS"] = (call.values, call.keys), _BF16
    scratch: dict[str, Any] = {
        name: tile(rows, columns, dtype, stages=_SLOTS)
        for name, ((rows, columns), dtype) in early.items()
        if name != "steps"
    }
    scratch |= {"steps": plgpu.SMEM((_SLOTS, *early["steps"][0]), _F32)}
    scratch |= {name: tile(rows, columns, _BF16) for name, ((rows, columns), _) in late.items()}
    scratch |= {"S": tile(call.values, call.keys, _BF16), "G": tile(CHUNK, CHUNK, _BF16)}
    scratch |= {"columns": plgpu.SMEM((2, WARPS, CHUNK), _F32)} | _MEETINGS.scratch()
    scratch |= copies_barrier("early", early.values(), _SLOTS)
    return scratch | copies_barrier("late", late.values())


class _Grads:
    """One of two warpgroups of a block that finds gradients between two saved states.

    Chunk by chunk the first ones find the state and N again, each of SLICE value channels. Then
    the first has dP and G, and the second M and F; and each dQ and dK of KEYS key channels.
    """

    def __init__(self, call: _Call, refs: Any, smem: Any, own: int):
        self.call, self.refs, self.smem, self.own = call, refs, smem, own
        self.slices, self.halves = call.slices, call.keys // KEYS
        self.at = _At(call, refs.states.shape[1])
        (self.index,) = self.at.own
        self.first = self.index * SAVED

    def run(self) -> None:
        count = jnp.minimum(SAVED, self.call.chunks - self.first)
        self.fetch(0, count)
        self.fetch_late(0, count)
        S = ()
        if self.own < self.slices:
            S = _first(self.refs.states, self.at, self.index, self.own, self.call.keys)
        lax.fori_loop(0, count, lambda n, S: self.step(n, count, S), S)
        finish_writes()

    def fetch(self, n: Any, count: Any) -> None:
        """The second warpgroup, which has less to do, starts to fetch what is needed to find N."""
        if not self.own:
            return
        at, smem, refs, chunk, slot = self.at, self.smem, self.refs, self.first + n, lax.rem(n, 2)
        copies = [(at.keys(getattr(refs, name), chunk), getattr(smem, name)) for name in "qk"]
        copies.append((at.matrix(refs.T, chunk), smem.T))
        copies.append((at.numbers(refs.steps, chunk), smem.steps))
        copies.append((at.all_values(refs.v, chunk), smem.v))
        pairs = [(source, to.at[slot]) for source, to in copies]
        start_copies(pairs, barrier_of(smem, "early", slot), n < count)

    def fetch_late(self, n: Any, count: Any) -> None:
        """It starts to fetch what N is needed for."""
        if not self.own:
            return
        at, smem, refs, chunk = self.at, self.smem, self.refs, self.first + n
        pairs = [(at.all_values(getattr(refs, x), chunk), getattr(smem, x)) for x in ("dout", "dV")]
        pairs.append((at.matrix(refs.after, chunk), smem.dS))
        start_copies(pairs, barrier_of(smem, "late"), n < count)

    def wait(self, barrier: Any, later: int) -> None:
        if self.own or by_wgmma():
            wait_for_copies(barrier, later)

    def meet(self, name: str) -> None:
        _MEETINGS.meet(self.smem, name)

    def step(self, n: Any, count: Any, S: Any) -> Any:
        slot, smem, own = lax.rem(n, 2), self.smem, self.own
        self.wait(barrier_of(smem, "early", slot), 1)
        if not by_wgmma():
            self.meet("fetched")
        stage = {name: getattr(smem, name).at[slot] for name in ("q", "k", "v", "T", "steps")}
        if own < self.slices:
            S = self.find_new(stage, S)
        self.wait(barrier_of(smem, "late"), 0)
        finish_writes()
        self.meet("new")
        self.fetch(n + 1, count)
        dc, dbeta = self.of_dout(stage) if own == 0 else self.of_new(stage)
        self.meet("pairs")
        kz, products = dc * 0, lane_zeros()
        states = self.read_states(stage) if own < self.halves else None
        self.meet("read")
        self.fetch_late(n + 1, count)
        if states is not None:
            sums, products = self.finish(stage, self.first + n, *states)
            dc, dbeta, kz = dc + sums[0], dbeta + sums[1], sums[2]
        to = self.at.numbers(self.refs.numbers, self.first + n).at[own]
        for row, v in ((_DC, dc), (_DBETA, dbeta), (_KZ, kz)):
            to.at[row][...] = v
        self.at.numbers(self.refs.of_states, self.first + n).at[own][...] = products
        return S

    def find_new(self, stage: dict[str, Any], S: Any) -> Any:
        """Finds the own channels of S and N, and stores them; the next S."""
        k, narrow = stage["k"], S.astype(_BF16)
        v = stage["v"].at[pl.ds(self.own, 1)]
        reading = start([accumulator(CHUNK)], [narrow], k, transposed=True)
        store_tile(rows_of(self.smem.S, self.own * SLICE, SLICE), narrow)
        making = _new_values(stage | {"v": v}, reading)
        sync_tiles()  # all warps have read v
        adding, new = _next_state(stage, S, making)
        store_tile(v, new.astype(_BF16), transposed=True)
        return finish(adding)[0]

    def sums(self, steps: Any, h: Any) -> tuple[Any, Any]:
        """The part of dc from h, and Σ_i h[i,j], (CHUNK,) each."""
        columns = self.smem.columns.at[self.own]
        for first in range(0, CHUNK, 32):
            store_column_sums(columns, first, h[:, first : first + 32])
        dc = jnp.sum(h * _columns(steps, _BETA), axis=1)
        sync_tiles()
        of_later = sum(plgpu.load(columns.at[n], layout=ROWS) for n in range(WARPS))
        return dc - plgpu.load(steps.at[_BETA], layout=ROWS) * of_later, of_later

    def of_dout(self, stage: dict[str, Any]) -> tuple[Any, Any]:
        """Stores G; returns what dP ∘ P adds to dc and dβ."""
        steps = stage["steps"]
        dout, new = self.smem.dout, stage["v"]
        (dP,) = multiply([accumulator(CHUNK)], [dout], new, transposed=True)
        dP = dP * (_decays(steps) * self.call.scale)
        store_tile(self.smem.G, (dP * _columns(steps, _BETA)).astype(_BF16))
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
        M = M * -_decays(steps, strict=True)
        store_tile(stage["T"], (M * _columns(steps, _BETA)).astype(_BF16))
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
        left = jnp.exp2(steps[_C, CHUNK - 1] - number(_C))
        dq = dq * _rows(steps, _E, KEYS, self.call.scale)
        dc = _row_sums(dq, q, first) - number(_E) * _row_sums(w, k, first)
        dbeta = left * _row_sums(z, k, first)
        dk = z * _rows(steps, _TO_END, KEYS) - w * _rows(steps, _E, KEYS)
        both = load_left(stage["T"]) + load_left(stage["T"], transposed=True)
        dq, dk = multiply([dq, dk], [smem.G, both], k, first=first)
        (dk,) = multiply([dk], [load_left(smem.G, transposed=True)], q, first=first)
        tokens = self.at.batch, _tokens(chunk), self.at.head, pl.ds(first, KEYS)
        results = (self.refs.dq, q, dq), (self.refs.dk, k, dk)
        if self.call.rank > 1:
            for ref, _, v in results:
                store_matrix(ref.at[tokens], v)
        else:  # these channels of q and k are no longer needed
            sync_tiles()
            own = pl.ds(self.own, 1)
            for _, of, v in results:
                store_tile(of.at[own], v.astype(_BF16))
            sync_tiles()
            for ref, of, _ in results:
                write_tile(of.at[own], ref.at[tokens])
        return (dc, dbeta, number(_BETA) * dbeta), products * _of_end(steps)


def _launch_grads(call: _Call, dout: Any, states: Any, after: Any, dV: Any, T: Any) -> Any:
    """dQ and dK of each head, numbers of tokens, and parts of exp(c[last]) · S · dS."""

    def kernel(refs: Any, smem: Any) -> None:
        _by_role(*(lambda n=n: _Grads(call, refs, smem, n).run() for n in range(2)))

    of_chunks, like = (call.batch, call.heads, call.chunks, 2), jax.ShapeDtypeStruct
    of_heads = like(
        (call.batch, call.tokens, call.heads, call.keys), _BF16 if call.rank == 1 else _F32
    )
    outs = {
        "dq": of_heads,
        "dk": of_heads,
        "numbers": like((*of_chunks, 3, CHUNK), _F32),
        "of_states": like((*of_chunks, LANES), _F32),
    }
    ins = {"q": call.q, "k": call.k, "v": call.v, "T": T, "steps": call.steps}
    ins |= {"states": states, "dout": dout, "after": after, "dV": dV}
    grid = call.batch * call.heads * states.shape[1]
    return _launch(kernel, "bwd", ins, outs, _grads_scratch(call), grid, warpgroups=2)


def launch_fwd(
    options: DeltaRuleOptions, q, k, v, g, beta, initial_state, rank, crossed
) -> tuple[Any, ...]:
    """Output, final state and, to save, states and T; as the reference."""
    args = q, k, v, g, beta, initial_state, rank, crossed
    if v.size == 0:
        return reference_fwd(options, *args)
    call = _Call(options, q, k, v, _cut(g, v, rank), beta)
    T = _inverses(call)
    results = _launch_scan(call, _one(call, initial_state), T, save=options.save)
    out, final = call.cut_values(results["out"]), call.cut_states(results["final"][:, 0])
    states, inverses = None, None
    if options.save:
        states = call.cut_states(results["states"])
        inverses = T.reshape(*T.shape[:2], call.groups, call.rank, CHUNK, CHUNK)
    found = out, final if options.final else None, states
    if rank is not None:
        plain = lambda *args: reference_fwd(options, *args)[:3]
        found = unless_finite([final], found, plain, (*args[:7], None))
    return *found, inverses


def _one(call: _Call, state: Any) -> Any:
    """A state as those of one part."""
    return None if state is None else call.states(state)[:, None]


def _cut(g: Any, v: Any, rank: Any) -> Any:
    """The logarithms of decays, those of 0 with finite sums; 0 between segments."""
    g = clipped_decays(g)
    if rank is None:
        return g
    return cut_decays(jnp.zeros(v.shape[:-1], jnp.float32) if g is None else g, rank)


def launch_bwd(options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients, as the reference."""
    q, k, v, g, beta, initial_state, rank, _, states, T, dout, dfinal = args
    if v.size == 0:
        return reference_bwd(options, *args)
    # With 128 key channels the last kernel takes 220 KiB for both slices, 156 for one.
    most = MOST_VALUES if shared_memory() > 220 * 1024 else SLICE
    if v.shape[-1] > most:
        return _bwd_of_parts(most, options, *args)
    cut = _cut(g, v, rank)
    call = _Call(options, q, k, v, cut, beta)
    T = T.reshape(*T.shape[:2], call.heads, CHUNK, CHUNK)
    of_values = call.of_values(dout)
    ends = _launch_reverse(call, of_values, _one(call, dfinal), T)
    of_chunks = ends["after"], ends["dV"], T
    grads = _launch_grads(call, of_values, call.states(states), *of_chunks)
    dq, dk = (call.cut_keys(grads[name], _F32) for name in ("dq", "dk"))
    if options.qk_l2norm:
        wide = tuple(x.astype(_F32) for x in (q, k))
        _, vjp = jax.vjp(lambda q, k: (unit_length(q), unit_length(k)), *wide)
        dq, dk = (x.astype(dq.dtype) for x in vjp((dq.astype(_F32), dk.astype(_F32))))
    numbers = grads["numbers"].sum(3)
    dg = jnp.cumsum(numbers[..., _DC, ::-1], axis=-1)[..., ::-1]
    dg = dg + grads["of_states"].sum((-2, -1))[..., None]
    dg = dg.at[..., 1:].add(jnp.cumsum(numbers[..., _KZ, :-1], axis=-1))
    dg, dbeta = call.cut_steps(dg), call.cut_steps(numbers[..., _DBETA, :])
    if g is not None:
        dg = jnp.where(cut == g, dg, 0).astype(g.dtype)
    if beta is not None:
        dbeta = dbeta.astype(beta.dtype)
    dinitial = call.cut_states(ends["dinitial"][:, 0])
    found = (
        *(dq, dk, call.cut_values(ends["dV"]), None if g is None else dg),
        *(None if beta is None else dbeta, None if initial_state is None else dinitial),
        *(None, None),
    )
    if rank is None:
        return found
    plain = functools.partial(reference_bwd, options)
    given = *args[:7], None, states, None, dout, dfinal
    return unless_finite([dg, dbeta, dinitial], found, plain, given)


def _bwd_of_parts(most: int, options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients where a head has more than the `most` value channels that a kernel takes.

    Channels do not meet: parts of them are heads with the same q, k, g and β.
    """
    q, k, v, g, beta, first, rank, crossed, states, T, dout, dfinal = args
    channels, rank_of_v = v.shape[-1], v.shape[-2]
    parts = -(-channels // most)
    width = _up(-(-channels // parts), SLICE)

    def cut(x: Any) -> Any:
        if x is None:
            return None
        x = padded(x, x.ndim - 1, parts * width).reshape(*x.shape[:-1], parts, width)
        return x.reshape(*x.shape[:-3], rank_of_v * parts, width)

    def cut_state(x: Any) -> Any:
        return None if x is None else jnp.swapaxes(cut(jnp.swapaxes(x, -3, -2)), -3, -2)

    def join(x: Any) -> Any:
        x = x.reshape(*x.shape[:-2], rank_of_v, parts * width)
        return x[..., :channels]

    repeat = lambda x: None if x is None else jnp.repeat(x, parts, axis=3)
    total = lambda x: None if x is None else x.reshape(*x.shape[:-1], rank_of_v, parts).sum(-1)
    dq, dk, dv, dg, dbeta, dfirst, *_ = launch_bwd(
        options,
        *(q, k, cut(v), repeat(g), repeat(beta), cut_state(first), rank, crossed),
        *(cut_state(states), repeat(T), cut(dout), cut_state(dfinal)),
    )
    if rank_of_v == 1:
        dq, dk = dq.astype(q.dtype), dk.astype(k.dtype)
    if dfirst is not None:
        dfirst = jnp.swapaxes(join(jnp.swapaxes(dfirst, -3, -2)), -3, -2)
    return dq, dk, join(dv), total(dg), total(dbeta), dfirst, None, None
