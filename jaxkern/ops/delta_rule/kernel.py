"""The kernels of the gated delta rule: the scans, and the passes of all that a call needs.

They multiply by wgmma or mma.sync (:mod:`jaxkern.mosaic.mma`), on every GPU from Ampere on whose
shared memory is enough. In a chunk of CHUNK tokens, with c[i] = g[0] + … + g[i], E = exp(c),
left = exp(c[last] − c), and S, (K, V), the state before it:

    a[i,j] = Σ_k K[i,k] · K[j,k] · exp(c[i] − c[j])  for j < i,  T = (I + a[i,j] · β[j])⁻¹
    P[i,j] = Σ_k Q[i,k] · K[j,k] · exp(c[i] − c[j])  for j ≤ i
    N = T (V − (E ∘ K) S)
    O = scale · ((E ∘ Q) S + (P[i,j] · β[j]) N)
    S ← exp(c[last]) ∘ S + (β ∘ left ∘ K)ᵀ N

With decays of heads c, E and left are numbers of tokens: the scans multiply by K and Q, and by
these afterwards, and make P. With decays of channels c, E and left are (CHUNK, K), and
:mod:`jaxkern.ops.delta_rule.channels` finds P and the decayed K and Q first, for them to multiply
by. T of each chunk is found first in both: by :mod:`jaxkern.ops.delta_rule.heads`, and then kept
for the backward, or with P, in the backward once more.

The scan then goes through the chunks with Sᵀ of SLICE value channels in the registers of a
warpgroup. What it multiplies is transposed, (SLICE, …), so that each product leaves the next one's
left operand in the registers of its lane:

    ((E ∘ K) S)ᵀ = Sᵀ (E ∘ K)ᵀ → (V − (E ∘ K) S)ᵀ → Nᵀ = (…)ᵀ Tᵀ → Sᵀ += Nᵀ (β ∘ left ∘ K)

A second warpgroup makes O, for which it gets S and N through shared memory.

Where sequences and heads are too few for all multiprocessors, a sequence is cut into parts that are
scanned at once. A part makes M S + R of the state S before it: R is what becomes of no state, and M
of the identity where V is 0. Scans of both come first, with the columns of R and M as channels;
then the states before the parts are products one after the other. The backward does the same.

Backward, for dO, by then times scale, and dS of the state after a chunk:

    dN = β ∘ (Pᵀ dO + (left ∘ K) dS),  dV = Tᵀ dN
    dS ← exp(c[last]) ∘ dS + (E ∘ Q)ᵀ dO − (E ∘ K)ᵀ dV

in the same way, from the end to the start; the second warpgroup makes Pᵀ dO and, with decays of
heads, E ∘ dO. With dS of all chunks, the last kernel has a block from each state that the forward
saved to the next, and finds the gradients chunk by chunk: of heads in
:mod:`jaxkern.ops.delta_rule.heads`, of channels in :mod:`jaxkern.ops.delta_rule.channels`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.launch import shared_memory
from jaxkern.mosaic.mma import (
    accumulator,
    finish,
    multiply,
    start,
)
from jaxkern.mosaic.tiles import (
    Handoffs,
    TileRing,
    by_wgmma,
    fence_tiles,
    finish_writes,
    load_left,
    store_matrix,
    store_tile,
    sync_tiles,
    tile,
    write_tile,
)
from jaxkern.mosaic.wgmma import (
    causal,
    over_columns,
    to_fp32,
)
from jaxkern.ops.chunks import padded, unless_finite
from jaxkern.ops.delta_rule import channels, heads
from jaxkern.ops.delta_rule.call import (
    BETA,
    BF16,
    CHUNK,
    F32,
    MOST_VALUES,
    PAIR,
    SAVED,
    SLICE,
    SQUARE,
    START,
    SUM,
    TO_END,
    Call,
    Place,
    by_column,
    by_role,
    by_row,
    column_numbers,
    columns_of,
    decayed_state,
    decays_of,
    first_state,
    launch,
    new_values,
    next_state,
    tiles_of,
    up,
)
from jaxkern.ops.delta_rule.reference import (
    DeltaRuleOptions,
    reference_bwd,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
    unit_length,
    whole,
)


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A warpgroup that goes through chunks of SLICE value channels of a head."""

    call: Call
    ring: TileRing
    refs: Any
    smem: Any
    at: Place

    def loop(self, count: Any, number: Any, part: Any, step: Any, state: Any) -> Any:
        """Runs ``state = step(chunk, stage, state, fetch)`` for the chunks ``number(n)``."""
        return self.ring.loop(
            self.smem,
            count,
            lambda n: self.at.sources(self.refs, self.ring.tiles, number(n), part),
            lambda n, stage, state, fetch: step(number(n), stage, state, fetch),
            state,
            early=False,
        )


_SCANNED = Handoffs(("state", "state read", "new", "new read"))
"""From the warpgroup that scans to the one that makes outputs, and back."""


def _launch_scan(call: Call, initial: Any, found: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """The output, the final state and, to save, the states before every SAVED-th chunk.

    Two warpgroups: one scans, and hands Sᵀ and N to the other, which makes the output.
    """
    grid = call.batch * call.heads * call.slices
    slots = 2 if by_wgmma() else 1  # the TMA still reads the chunk's before
    other = 2 * SLICE * call.keys + (1 + slots) * SQUARE
    names = ("kd kt v T", "qd P") if call.by_channel else ("k v T", "q k")
    of_both = [tiles_of(call, x) for x in names]
    scanned, made = TileRing.of(other, grid, *of_both, fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        at = Place(call, call.slices)
        (part,), hand = at.own, _SCANNED

        def scan(chunk: Any, stage: dict[str, Any], S: Any, fetch: Any) -> Any:
            if save:
                to = at.state(refs.states, lax.div(chunk, SAVED), part)
                pl.when(lax.rem(chunk, SAVED) == 0)(lambda: store_matrix(to, S, transposed=True))
            narrow = S.astype(BF16)
            read = stage["kd" if call.by_channel else "k"]
            reading = start([accumulator(CHUNK)], [narrow], read, transposed=True)
            pl.when(chunk > 0)(lambda: hand.take(smem, "state read"))
            store_tile(smem.S, narrow)
            fetch()
            making = new_values(stage, reading)
            fence_tiles()
            hand.give(smem, "state")
            adding, new = next_state(stage, S, making)
            pl.when(chunk > 0)(lambda: hand.take(smem, "new read"))
            store_tile(smem.N, new.astype(BF16), transposed=True)
            fence_tiles()
            hand.give(smem, "new")
            return finish(adding)[0]

        def outputs(stage: dict[str, Any]) -> tuple[Any, Any, Any]:
            """Q, P with its weights, and E; in Q if it is of channels."""
            if call.by_channel:
                return load_left(stage["qd"]), stage["P"], None
            steps, q = stage["steps"], load_left(stage["q"])
            pairs = start([accumulator(CHUNK)], [q], stage["k"], transposed=True)
            D = decays_of(steps) * by_column(steps, BETA, call.scale)
            E = by_row(steps, START, SLICE, call.scale)
            return q, (finish(pairs)[0] * D).astype(BF16), E

        def write(chunk: Any) -> None:
            write_tile(smem.out.at[lax.rem(chunk, slots)], at.values(refs.out, chunk, part))

        def make(chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
            more, q, P, E = chunk < call.chunks - 1, *outputs(stage)
            fence_tiles()
            hand.take(smem, "state")
            reading = start([accumulator(SLICE)], [q], smem.S, transposed=True)
            fetch()
            finish_writes()
            pl.when(chunk > 0)(lambda: write(chunk - 1))
            (out,) = finish(reading)
            pl.when(more)(lambda: hand.give(smem, "state read"))
            out = out if E is None else out * E
            hand.take(smem, "new")
            (out,) = multiply([out], [P], smem.N)
            pl.when(more)(lambda: hand.give(smem, "new read"))
            store_tile(smem.out.at[lax.rem(chunk, slots)], out.astype(BF16))
            return _

        def run_scan() -> None:
            S = first_state(refs.initial, at, 0, part, call.keys)
            of = _Scan(call, scanned, refs, smem, at)
            S = of.loop(call.chunks, lambda n: n, part, scan, S)
            store_matrix(at.state(refs.final, 0, part), S, transposed=True)

        def run_outputs() -> None:
            _Scan(call, made, refs, smem, at).loop(call.chunks, lambda n: n, part, make, None)
            sync_tiles()
            write(call.chunks - 1)
            finish_writes()

        by_role(run_scan, run_outputs)

    ins = found | {"v": call.v, "initial": initial}
    outs = {
        "out": jax.ShapeDtypeStruct(call.v.shape, BF16),
        "final": call.states_like(1),
        "states": call.states_like(-(-call.chunks // SAVED)) if save else None,
    }
    scratch = scanned.scratch() | made.scratch() | _SCANNED.scratch()
    scratch |= {"S": tile(SLICE, call.keys, BF16), "N": tile(CHUNK, SLICE, BF16)}
    scratch |= {"out": tile(CHUNK, SLICE, BF16, stages=slots)}
    return launch(kernel, "fwd", ins, outs, scratch, grid, warpgroups=2)


def _launch_carries(call: Call, found: dict[str, Any]) -> Any:
    """R and M of each sequence, (B, H, K, V + K), side by side."""
    grid = call.batch * call.heads * call.columns
    (ring,) = TileRing.of(0, grid, tiles_of(call, "kd kt v T" if call.by_channel else "k v T"))

    def kernel(refs: Any, smem: Any) -> None:
        at = Place(call, call.columns)
        (part,) = at.own
        sources = lambda n: at.sources(refs, ring.tiles, n, jnp.minimum(part, call.slices - 1))

        def step(n: Any, stage: dict[str, Any], S: Any) -> Any:
            read = stage["kd" if call.by_channel else "k"]
            reading = start([accumulator(CHUNK)], [S.astype(BF16)], read, transposed=True)
            making = new_values(stage, reading, part < call.slices)
            return finish(next_state(stage, S, making)[0])[0]

        S = ring.loop(smem, call.chunks, sources, step, columns_of(refs.first, part))
        store_matrix(at.state(refs.carries, 0, part), S, transposed=True)

    ins = {name: found[name] for name in ring.tiles if name != "v"}
    ins |= {"v": call.v, "first": _first_columns(call)}
    outs = {"carries": call.states_like(1, call.columns * SLICE)}
    return launch(kernel, "carries", ins, outs, ring.scratch(), grid)["carries"]


def _first_columns(call: Call) -> Any:
    """(K, V + K): zeros and the identity, the first states of R and M."""
    return jnp.eye(call.keys, call.columns * SLICE, call.values, dtype=F32)


def _states(call: Call, first: Any, carries: Any, *, reverse: bool = False) -> list[Any]:
    """The state before each part, and after all: in reverse after each one, the last one first."""
    carries = carries.reshape(call.batch, call.parts, *carries.shape[2:])
    states = [first]
    for n in reversed(range(call.parts)) if reverse else range(call.parts):
        own, matrix = jnp.split(carries[:, n], [call.values], axis=-1)
        own = padded(own, 3, first.shape[-1])
        states.append(own + jnp.matmul(matrix, states[-1], precision="highest"))
    return states


def _of_parts(call: Call, state: Any, carries: Any, *, reverse: bool = False) -> Any:
    """The state before each part, (B · parts, 1, H, K, V), or after it in reverse."""
    if state is None:
        state = jnp.zeros_like(carries, shape=call.states_like(1).shape)
    *states, _ = _states(call, state[:, 0], carries, reverse=reverse)
    states = jnp.stack(states[::-1] if reverse else states, axis=1)
    return states.reshape(-1, 1, *states.shape[2:])


def _scan(call: Call, initial: Any, found: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """As `_launch_scan`, of all parts at once."""
    if call.parts == 1:
        return _launch_scan(call, initial, found, save=save)
    part, found = call.split(), call.split_arrays(found)
    before = _of_parts(call, initial, _launch_carries(part, found))
    results = _launch_scan(part, before, found, save=save)
    joined = {name: v for name, v in results.items() if v is not None}
    results |= call.joined_arrays(joined)
    return results | {"final": results["final"][:, -1:]}


_REVERSED = Handoffs(("pairs", "done"))
"""From the warpgroup that makes Pᵀ dO to the one that scans, and back."""


def _reverse(call: Call, dfinal: Any, found: dict[str, Any]) -> dict[str, Any]:
    """As `_launch_reverse`, of all parts at once."""
    if call.parts == 1:
        return _launch_reverse(call, dfinal, found)
    part, found = call.split(), call.split_arrays(found)
    carries = _launch_reverse(part, None, found, carry=True)["dinitial"]
    after = _of_parts(call, dfinal, carries, reverse=True)
    return call.joined_arrays(_launch_reverse(part, after, found))


def _launch_reverse(
    call: Call, dfinal: Any, found: dict[str, Any], *, carry: bool = False
) -> dict[str, Any]:
    """dS after each chunk, transposed in 16 bits, dV, and dS before the first chunk.

    Two warpgroups: one scans, and gets Pᵀ dO and E ∘ dO from the other.

    Args:
      call: of the pass.
      dfinal: the gradient of the final state, or ``None``.
      found: beside what scans multiply by, dO.
      carry: whether to find R and M alone, as `_launch_carries` does.
    """
    columns = call.columns if carry else call.slices
    grid = call.batch * call.heads * columns
    other = 4 * SLICE * call.keys + 4 * SQUARE
    names = ("kd kt qd T", "P dout") if call.by_channel else ("q k T", "q k dout")
    of_both = [tiles_of(call, x) for x in names]
    scanned, made = TileRing.of(other, grid, *of_both, fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        at = Place(call, columns)
        (part,), hand, last = at.own, _REVERSED, call.chunks - 1
        read = jnp.minimum(part, call.slices - 1)
        # The identity's columns have no dO.
        of_values = lambda v: jnp.where(part < call.slices, v, 0.0) if carry else v

        def scan(chunk: Any, stage: dict[str, Any], dS: Any, fetch: Any) -> Any:
            steps, narrow = stage.get("steps"), dS.astype(BF16)
            q, k, kt = (stage[x] for x in (("qd", "kd", "kt") if steps is None else "qkk"))
            numbers = lambda row: [] if steps is None else [column_numbers(steps, row)]
            times = lambda v, row: v * over_columns(row[0], SLICE) if row else v
            reading = start([accumulator(CHUNK)], [narrow], kt, transposed=True)
            fetch()
            decayed, to_end = decayed_state(stage, dS), numbers(TO_END)
            finish_writes()
            fence_tiles()
            hand.take(smem, "pairs")
            dN = to_fp32(load_left(smem.X))
            read, dN, *to_end = finish(reading, ready=[dN, *to_end])
            adding = start([decayed], [smem.weighted], q)
            dN = dN + times(read, to_end)
            making = start([accumulator(CHUNK)], [dN], stage["T"])
            if not carry:
                pl.when(chunk < last)(lambda: write(chunk + 1))
                store_tile(smem.dS.at[lax.rem(chunk, 2)], narrow)
            E = numbers(START)
            (dS,) = finish(adding, later=1)
            dV, *E = finish(making, ready=E)
            adding = start([dS], [times(-dV, E)], k)
            if not carry:
                store_tile(smem.dV.at[lax.rem(chunk, 2)], dV.astype(BF16), transposed=True)
            (dS,) = finish(adding)
            pl.when(chunk > 0)(lambda: hand.give(smem, "done"))
            return dS

        def write(chunk: Any) -> None:
            slot = lax.rem(chunk, 2)
            write_tile(smem.dV.at[slot], at.values(refs.dV, chunk, part))
            write_tile(smem.dS.at[slot], at.turned(refs.after, chunk, part))

        def weights(stage: dict[str, Any]) -> tuple[Any, Any]:
            """Pᵀ with its weights, and (E ∘ dO)ᵀ, or dOᵀ if E is of channels."""
            dout = load_left(stage["dout"], transposed=True)
            if call.by_channel:
                return load_left(stage["P"], transposed=True), dout
            steps = stage["steps"]
            pairs = start([accumulator(CHUNK)], [stage["k"]], stage["q"], transposed=True)
            c = by_column(steps, SUM) - by_row(steps, SUM, CHUNK)
            D = jnp.exp2(causal(c, transposed=True)) * by_row(steps, BETA, CHUNK, call.scale)
            (P,) = finish(pairs)
            return P * D, to_fp32(dout) * by_column(steps, START, call.scale)

        def make(chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
            left, dout = weights(stage)
            making = start([accumulator(SLICE)], [left], stage["dout"])
            (X,) = finish(making)
            pl.when(chunk < last)(lambda: hand.take(smem, "done"))
            store_tile(smem.X, of_values(X).astype(BF16), transposed=True)
            store_tile(smem.weighted, of_values(dout).astype(BF16))
            fence_tiles()
            hand.give(smem, "pairs")
            fetch()
            return _

        def run_scan() -> None:
            if carry:
                dS = columns_of(refs.first, part)
            else:
                dS = first_state(refs.dfinal, at, 0, part, call.keys)
            of = _Scan(call, scanned, refs, smem, at)
            dS = of.loop(call.chunks, lambda n: last - n, read, scan, dS)
            if not carry:
                sync_tiles()
                write(0)
                finish_writes()
            store_matrix(at.state(refs.dinitial, 0, part), dS, transposed=True)

        def run_pairs() -> None:
            _Scan(call, made, refs, smem, at).loop(
                call.chunks, lambda n: last - n, read, make, None
            )

        by_role(run_scan, run_pairs)

    ins = found | {"dfinal": dfinal, "first": _first_columns(call) if carry else None}
    outs = {
        "after": None if carry else call.turned_like(),
        "dV": None if carry else jax.ShapeDtypeStruct(call.v.shape, BF16),
        "dinitial": call.states_like(1, columns * SLICE),
    }
    scratch = scanned.scratch() | made.scratch() | _REVERSED.scratch()
    scratch |= dict.fromkeys(("X", "weighted"), tile(SLICE, CHUNK, BF16))
    if not carry:
        scratch |= {"dV": tile(CHUNK, SLICE, BF16, stages=2)}
        scratch |= {"dS": tile(SLICE, call.keys, BF16, stages=2)}
    name = "reverse_carries" if carry else "reverse"
    return launch(kernel, name, ins, outs, scratch, grid, warpgroups=2)


def launch_fwd(
    options: DeltaRuleOptions, q, k, v, g, beta, initial_state, rank, crossed
) -> tuple[Any, ...]:
    """Output, final state and, to save, states and T; as the reference."""
    args = q, k, v, g, beta, initial_state, rank, crossed
    if v.size == 0:
        return reference_fwd(options, *args)
    call = Call(options, q, k, v, g, beta, rank)
    found = _found(call)
    results = _scan(call, _one(call, initial_state), found, save=options.save)
    out, final = call.cut_values(results["out"]), call.cut_states(results["final"][:, 0])
    states, T = None, None
    if options.save:
        count = -(-call.length // (SAVED * CHUNK))
        states = call.cut_states(results["states"][:, :count])
        if not call.by_channel:
            T = found["T"][:, : up(-(-call.length // CHUNK), PAIR)]
            T = T.reshape(*T.shape[:2], call.groups, call.rank, CHUNK, CHUNK)
    found = out, final if options.final else None, states
    if rank is not None:
        plain = lambda *args: reference_fwd(options, *args)[:3]
        found = unless_finite([final], found, plain, (*args[:7], None))
    return *found, T


def launch_carry(options: DeltaRuleOptions, k, v, g, beta, rank) -> tuple[Any, ...]:
    """What a device's part does to a state, as the reference."""
    args = k, v, g, beta, rank
    if v.size == 0:
        return reference_carry(options, *args)
    call = Call(options, k, k, v, g, beta, rank)
    carries = _launch_carries(call.split(), call.split_arrays(_found(call)))
    return _carry(call, carries, functools.partial(reference_carry, options), args)


def launch_bwd_carry(options: DeltaRuleOptions, q, k, g, beta, dout, rank) -> tuple[Any, ...]:
    """What a device's part does to the gradient of a state, as the reference."""
    args = q, k, g, beta, dout, rank
    if dout.size == 0:
        return reference_bwd_carry(options, *args)
    call = Call(options, q, k, dout, g, beta, rank)
    found = call.split_arrays(_found(call) | {"dout": call.v})
    carries = _launch_reverse(call.split(), None, found, carry=True)["dinitial"]
    plain = functools.partial(reference_bwd_carry, options)
    return _carry(call, carries, plain, args, reverse=True)


def _carry(
    call: Call, carries: Any, plain: Any, args: tuple[Any, ...], *, reverse: bool = False
) -> tuple[Any, ...]:
    """M, R and whether M counts, of all parts together."""
    first = jnp.broadcast_to(_first_columns(call), carries[:: call.parts, 0].shape)
    state = _states(call, first, carries, reverse=reverse)[-1]
    own, matrix = jnp.split(state, [call.values], axis=-1)
    matrix = matrix[..., : call.key_channels, : call.key_channels]
    matrix = matrix.reshape(call.batch, call.groups, call.rank, *matrix.shape[2:])
    found = matrix, call.cut_states(own), whole(args[-1], matrix)
    return found if args[-1] is None else unless_finite([own], found, plain, args)


def _one(call: Call, state: Any) -> Any:
    """A state as those of one part."""
    return None if state is None else call.states(state)[:, None]


def _found(call: Call, T: Any = None) -> dict[str, Any]:
    """Arrays of the scans beside values; T, (B, chunks, G, R, CHUNK, CHUNK), may be known."""
    if call.by_channel:
        return channels.pairs(call)
    if T is not None:
        T = padded(T.reshape(*T.shape[:2], call.heads, CHUNK, CHUNK), 1, call.chunks)
    T = heads.inverses(call) if T is None else T
    return {"q": call.q, "k": call.k, "steps": call.steps, "T": T}


def launch_bwd(options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients, as the reference."""
    q, k, v, g, beta, initial_state, rank, _, states, T, dout, dfinal = args
    if v.size == 0:
        return reference_bwd(options, *args)
    # With 128 key channels the last kernel takes 220 KiB for both slices, 156 for one.
    most = MOST_VALUES if shared_memory() > 220 * 1024 else SLICE
    if v.shape[-1] > most:
        return _bwd_of_parts(most, options, *args)
    call = Call(options, q, k, v, g, beta, rank)
    of_values, found = call.of_values(dout), _found(call, T)
    ends = _reverse(call, _one(call, dfinal), found | {"dout": of_values})
    states = padded(call.states(states), 1, -(-call.chunks // SAVED))
    if call.by_channel:
        chunks = channels.launch_states(call, found, states)
        chunks |= {"dout": of_values, "dV": ends["dV"], "dS": ends["after"]}
        grads = channels.launch_grads(call, chunks)
        dg, dbeta = call.cut_channels(grads["dg"]), grads["dbeta"].sum(3)
    else:
        of_chunks = ends["after"], ends["dV"], found["T"]
        grads = heads.launch_grads(call, of_values, states, *of_chunks)
        dg, dbeta = heads.of_tokens(call, g, rank, grads)
    dq, dk = (call.cut_keys(grads[name], F32) for name in ("dq", "dk"))
    if options.qk_l2norm:
        wide = tuple(x.astype(F32) for x in (q, k))
        _, vjp = jax.vjp(lambda q, k: (unit_length(q), unit_length(k)), *wide)
        dq, dk = (x.astype(dq.dtype) for x in vjp((dq.astype(F32), dk.astype(F32))))
    dbeta = None if beta is None else call.cut_steps(dbeta).astype(beta.dtype)
    dinitial = call.cut_states(ends["dinitial"][:, 0])
    found = (
        *(dq, dk, call.cut_values(ends["dV"]), dg, dbeta),
        *(None if initial_state is None else dinitial, None, None),
    )
    if rank is None:
        return found
    plain = functools.partial(reference_bwd, options)
    given = *args[:7], None, args[8], None, dout, dfinal
    checked = [x for x in (dg, dbeta, dinitial) if x is not None]
    return unless_finite(checked, found, plain, given)


def _bwd_of_parts(most: int, options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients where a head has more than the `most` value channels that a kernel takes.

    Channels do not meet: parts of them are heads with the same q, k, g and β.
    """
    q, k, v, g, beta, first, rank, crossed, states, T, dout, dfinal = args
    channels, rank_of_v = v.shape[-1], v.shape[-2]
    parts = -(-channels // most)
    width = up(-(-channels // parts), SLICE)

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
    total = lambda x: (
        None if x is None else x.reshape(*x.shape[:3], rank_of_v, parts, *x.shape[4:]).sum(4)
    )
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
