"""The scans of the gated delta rule, from chunk to chunk of a sequence or of its parts.

With the names of :mod:`jaxkern.ops.delta_rule.kernel`. A warpgroup has Sᵀ of SLICE value channels
in registers. What it multiplies is transposed, (SLICE, …), so that each product leaves the next
one's left operand in the registers of its lane:

    ((E ∘ K) S)ᵀ = Sᵀ (E ∘ K)ᵀ → (V − (E ∘ K) S)ᵀ → Nᵀ = (…)ᵀ Tᵀ → Sᵀ += Nᵀ (β ∘ left ∘ K)

A second warpgroup makes O, for which it gets S and N through shared memory.

Backward, for dO, by then times scale, and dS of the state after a chunk:

    dN = β ∘ (Pᵀ dO + (left ∘ K) dS),  dV = Tᵀ dN
    dS ← exp(c[last]) ∘ dS + (E ∘ Q)ᵀ dO − (E ∘ K)ᵀ dV

in the same way, from the end to the start; the second warpgroup makes Pᵀ dO and, with decays of
heads, E ∘ dO.

Where sequences and heads are too few for all multiprocessors, a sequence is cut into parts that are
scanned at once. A part makes M S + R of the state S before it: R is what becomes of no state, and M
of the identity where V is 0. Scans of both come first, with the columns of R and M as channels;
then the states before the parts are products one after the other. The backward does the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkern.mosaic.mma import accumulator, finish, multiply, start
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
from jaxkern.mosaic.wgmma import causal, over_columns, to_fp32
from jaxkern.ops.chunks import padded
from jaxkern.ops.delta_rule.call import (
    BETA,
    BF16,
    CHUNK,
    F32,
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
)


class _Block:
    """A block of two warpgroups that goes through chunks of SLICE columns of a head.

    Attributes:
      handoffs: between them.
      carry: whether the columns are those of R and M.
    """

    handoffs: Handoffs

    def __init__(
        self, call: Call, rings: tuple[TileRing, ...], refs: Any, smem: Any, carry: bool = False
    ):
        self.call, self.rings, self.refs, self.smem, self.carry = call, rings, refs, smem, carry
        self.at = Place(call, call.columns if carry else call.slices)
        (self.part,) = self.at.own
        self.last = call.chunks - 1

    def run(self) -> None:
        by_role(self.run_scan, self.run_other)

    def run_scan(self) -> None:
        raise NotImplementedError

    def run_other(self) -> None:
        raise NotImplementedError

    def number(self, n: Any) -> Any:
        """The chunk that is the `n`-th one."""
        return n

    def loop(self, ring: TileRing, step: Any, state: Any) -> Any:
        """Runs ``state = step(chunk, stage, state, fetch)`` for all chunks."""
        part = jnp.minimum(self.part, self.call.slices - 1) if self.carry else self.part
        return ring.loop(
            self.smem,
            self.call.chunks,
            lambda n: self.at.sources(self.refs, ring.tiles, self.number(n), part),
            lambda n, stage, state, fetch: step(self.number(n), stage, state, fetch),
            state,
            early=False,
        )

    def give(self, name: str) -> None:
        self.handoffs.give(self.smem, name)

    def take(self, name: str) -> None:
        self.handoffs.take(self.smem, name)


class _Forward(_Block):
    """One warpgroup scans, and hands Sᵀ and N to the other, which makes the output."""

    handoffs = Handoffs(("state", "state read", "new", "new read"))

    def run_scan(self) -> None:
        S = first_state(self.refs.initial, self.at, 0, self.part, self.call.keys)
        S = self.loop(self.rings[0], self.scan, S)
        store_matrix(self.at.state(self.refs.final, 0, self.part), S, transposed=True)

    def scan(self, chunk: Any, stage: dict[str, Any], S: Any, fetch: Any) -> Any:
        smem = self.smem
        if self.refs.states is not None:
            to = self.at.state(self.refs.states, lax.div(chunk, SAVED), self.part)
            pl.when(lax.rem(chunk, SAVED) == 0)(lambda: store_matrix(to, S, transposed=True))
        narrow = S.astype(BF16)
        read = stage["kd" if self.call.by_channel else "k"]
        reading = start([accumulator(CHUNK)], [narrow], read, transposed=True)
        pl.when(chunk > 0)(lambda: self.take("state read"))
        store_tile(smem.S, narrow)
        fetch()
        making = new_values(stage, reading)
        fence_tiles()
        self.give("state")
        adding, new = next_state(stage, S, making)
        pl.when(chunk > 0)(lambda: self.take("new read"))
        store_tile(smem.N, new.astype(BF16), transposed=True)
        fence_tiles()
        self.give("new")
        return finish(adding)[0]

    def run_other(self) -> None:
        self.loop(self.rings[1], self.make, None)
        sync_tiles()
        self.write(self.last)
        finish_writes()

    def make(self, chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
        smem, more, (q, P, E) = self.smem, chunk < self.last, self.weights(stage)
        fence_tiles()
        self.take("state")
        reading = start([accumulator(SLICE)], [q], smem.S, transposed=True)
        fetch()
        finish_writes()
        pl.when(chunk > 0)(lambda: self.write(chunk - 1))
        (out,) = finish(reading)
        pl.when(more)(lambda: self.give("state read"))
        out = out if E is None else out * E
        self.take("new")
        (out,) = multiply([out], [P], smem.N)
        pl.when(more)(lambda: self.give("new read"))
        store_tile(self.out_of(chunk), out.astype(BF16))
        return _

    def weights(self, stage: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Q, P with its weights, and E; in Q if it is of channels."""
        call = self.call
        if call.by_channel:
            return load_left(stage["qd"]), stage["P"], None
        steps, q = stage["steps"], load_left(stage["q"])
        pairs = start([accumulator(CHUNK)], [q], stage["k"], transposed=True)
        D = decays_of(steps) * by_column(steps, BETA, call.scale)
        E = by_row(steps, START, SLICE, call.scale)
        return q, (finish(pairs)[0] * D).astype(BF16), E

    def out_of(self, chunk: Any) -> Any:
        return self.smem.out.at[lax.rem(chunk, self.smem.out.shape[0])]

    def write(self, chunk: Any) -> None:
        write_tile(self.out_of(chunk), self.at.values(self.refs.out, chunk, self.part))


def _launch_scan(call: Call, initial: Any, found: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """The output, the final state and, to save, the states before every SAVED-th chunk."""
    grid = call.batch * call.heads * call.slices
    slots = 2 if by_wgmma() else 1  # the TMA still reads the chunk's before
    other = 2 * SLICE * call.keys + (1 + slots) * SQUARE
    names = ("kd kt v T", "qd P") if call.by_channel else ("k v T", "q k")
    rings = TileRing.of(other, grid, *(tiles_of(call, x) for x in names), fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        _Forward(call, rings, refs, smem).run()

    ins = found | {"v": call.v, "initial": initial}
    outs = {
        "out": jax.ShapeDtypeStruct(call.v.shape, BF16),
        "final": call.states_like(1),
        "states": call.states_like(-(-call.chunks // SAVED)) if save else None,
    }
    scratch = rings[0].scratch() | rings[1].scratch() | _Forward.handoffs.scratch()
    scratch |= {"S": tile(SLICE, call.keys, BF16), "N": tile(CHUNK, SLICE, BF16)}
    scratch |= {"out": tile(CHUNK, SLICE, BF16, stages=slots)}
    return launch(kernel, "fwd", ins, outs, scratch, grid, warpgroups=2)


class _Reverse(_Block):
    """One warpgroup scans, and gets Pᵀ dO and E ∘ dO from the other."""

    handoffs = Handoffs(("pairs", "done"))

    def number(self, n: Any) -> Any:
        return self.last - n

    def run_scan(self) -> None:
        at, refs, part = self.at, self.refs, self.part
        if self.carry:
            dS = columns_of(refs.first, part)
        else:
            dS = first_state(refs.dfinal, at, 0, part, self.call.keys)
        dS = self.loop(self.rings[0], self.scan, dS)
        if not self.carry:
            sync_tiles()
            self.write(0)
            finish_writes()
        store_matrix(at.state(refs.dinitial, 0, part), dS, transposed=True)

    def scan(self, chunk: Any, stage: dict[str, Any], dS: Any, fetch: Any) -> Any:
        smem, steps, narrow = self.smem, stage.get("steps"), dS.astype(BF16)
        q, k, kt = (stage[x] for x in (("qd", "kd", "kt") if steps is None else "qkk"))
        numbers = lambda row: [] if steps is None else [column_numbers(steps, row)]
        times = lambda v, row: v * over_columns(row[0], SLICE) if row else v
        reading = start([accumulator(CHUNK)], [narrow], kt, transposed=True)
        fetch()
        decayed, to_end = decayed_state(stage, dS), numbers(TO_END)
        finish_writes()
        fence_tiles()
        self.take("pairs")
        dN = to_fp32(load_left(smem.X))
        read, dN, *to_end = finish(reading, ready=[dN, *to_end])
        adding = start([decayed], [smem.weighted], q)
        dN = dN + times(read, to_end)
        making = start([accumulator(CHUNK)], [dN], stage["T"])
        if not self.carry:
            pl.when(chunk < self.last)(lambda: self.write(chunk + 1))
            store_tile(smem.dS.at[lax.rem(chunk, 2)], narrow)
        E = numbers(START)
        (dS,) = finish(adding, later=1)
        dV, *E = finish(making, ready=E)
        adding = start([dS], [times(-dV, E)], k)
        if not self.carry:
            store_tile(smem.dV.at[lax.rem(chunk, 2)], dV.astype(BF16), transposed=True)
        (dS,) = finish(adding)
        pl.when(chunk > 0)(lambda: self.give("done"))
        return dS

    def write(self, chunk: Any) -> None:
        at, smem, slot = self.at, self.smem, lax.rem(chunk, 2)
        write_tile(smem.dV.at[slot], at.values(self.refs.dV, chunk, self.part))
        for part in range(self.call.slices):
            to = at.all_values(getattr(self.refs, f"after_{part}"), chunk)
            pl.when(self.part == part)(lambda to=to: write_tile(smem.dS.at[slot], to))

    def run_other(self) -> None:
        self.loop(self.rings[1], self.make, None)

    def make(self, chunk: Any, stage: dict[str, Any], _: Any, fetch: Any) -> Any:
        left, dout = self.weights(stage)
        making = start([accumulator(SLICE)], [left], stage["dout"])
        (X,) = finish(making)
        pl.when(chunk < self.last)(lambda: self.take("done"))
        store_tile(self.smem.X, self.of_values(X).astype(BF16), transposed=True)
        store_tile(self.smem.weighted, self.of_values(dout).astype(BF16))
        fence_tiles()
        self.give("pairs")
        fetch()
        return _

    def weights(self, stage: dict[str, Any]) -> tuple[Any, Any]:
        """Pᵀ with its weights, and (E ∘ dO)ᵀ, or dOᵀ if E is of channels."""
        call, dout = self.call, load_left(stage["dout"], transposed=True)
        if call.by_channel:
            return load_left(stage["P"], transposed=True), dout
        steps = stage["steps"]
        pairs = start([accumulator(CHUNK)], [stage["k"]], stage["q"], transposed=True)
        c = by_column(steps, SUM) - by_row(steps, SUM, CHUNK)
        D = jnp.exp2(causal(c, transposed=True)) * by_row(steps, BETA, CHUNK, call.scale)
        (P,) = finish(pairs)
        return P * D, to_fp32(dout) * by_column(steps, START, call.scale)

    def of_values(self, v: Any) -> Any:
        """Zeros if the columns are M's, which have no dO."""
        return jnp.where(self.part < self.call.slices, v, 0.0) if self.carry else v


def _launch_reverse(
    call: Call, dfinal: Any, found: dict[str, Any], *, carry: bool = False
) -> dict[str, Any]:
    """dS of each slice after each chunk, transposed in 16 bits, dV, and dS before the first chunk.

    dS, (SLICE, K), has the place of a chunk's tokens in arrays (B, L, H, K).

    Args:
      call: of the pass.
      dfinal: the gradient of the final state, or ``None``.
      found: beside what scans multiply by, dO.
      carry: whether to find R and M, as the last result, alone.
    """
    columns = call.columns if carry else call.slices
    grid = call.batch * call.heads * columns
    other = 4 * SLICE * call.keys + 4 * SQUARE
    names = ("kd kt qd T", "P dout") if call.by_channel else ("q k T", "q k dout")
    rings = TileRing.of(other, grid, *(tiles_of(call, x) for x in names), fetcher=1)

    def kernel(refs: Any, smem: Any) -> None:
        _Reverse(call, rings, refs, smem, carry).run()

    ins = found | {"dfinal": dfinal, "first": first_columns(call) if carry else None}
    outs = {
        "dV": None if carry else jax.ShapeDtypeStruct(call.v.shape, BF16),
        "dinitial": call.states_like(1, columns * SLICE),
    }
    shape = call.batch, call.tokens, call.heads, call.keys
    for part in range(0 if carry else call.slices):
        outs[f"after_{part}"] = jax.ShapeDtypeStruct(shape, BF16)
    scratch = rings[0].scratch() | rings[1].scratch() | _Reverse.handoffs.scratch()
    scratch |= dict.fromkeys(("X", "weighted"), tile(SLICE, CHUNK, BF16))
    if not carry:
        scratch |= {"dV": tile(CHUNK, SLICE, BF16, stages=2)}
        scratch |= {"dS": tile(SLICE, call.keys, BF16, stages=2)}
    name = "reverse_carries" if carry else "reverse"
    return launch(kernel, name, ins, outs, scratch, grid, warpgroups=2)


def launch_carries(call: Call, found: dict[str, Any]) -> Any:
    """R and M of each sequence side by side, (B, 1, H, K, V + K)."""
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
    ins |= {"v": call.v, "first": first_columns(call)}
    outs = {"carries": call.states_like(1, call.columns * SLICE)}
    return launch(kernel, "carries", ins, outs, ring.scratch(), grid)["carries"]


def first_columns(call: Call) -> Any:
    """(K, V + K): zeros and the identity, the first states of R and M."""
    return jnp.eye(call.keys, call.columns * SLICE, call.values, dtype=F32)


def states_of_parts(call: Call, first: Any, carries: Any, *, reverse: bool = False) -> list[Any]:
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
    *states, _ = states_of_parts(call, state[:, 0], carries, reverse=reverse)
    states = jnp.stack(states[::-1] if reverse else states, axis=1)
    return states.reshape(-1, 1, *states.shape[2:])


def scan(call: Call, initial: Any, found: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """The results of `_launch_scan`, of all parts of sequences at once."""
    if call.parts == 1:
        return _launch_scan(call, initial, found, save=save)
    part, found = call.split(), call.split_arrays(found)
    before = _of_parts(call, initial, launch_carries(part, found))
    results = _launch_scan(part, before, found, save=save)
    found = {name: v for name, v in results.items() if v is not None}
    results |= call.whole_arrays(found)
    return results | {"final": results["final"][:, -1:]}


def scan_back(call: Call, dfinal: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The results of `_launch_reverse`, of all parts of sequences at once."""
    if call.parts == 1:
        return _launch_reverse(call, dfinal, found)
    part, found = call.split(), call.split_arrays(found)
    after = _of_parts(call, dfinal, launch_carries_back(part, found), reverse=True)
    return call.whole_arrays(_launch_reverse(part, after, found))


def launch_carries_back(call: Call, found: dict[str, Any]) -> Any:
    """R and M of the gradient, as :func:`launch_carries` has them."""
    return _launch_reverse(call, None, found, carry=True)["dinitial"]
