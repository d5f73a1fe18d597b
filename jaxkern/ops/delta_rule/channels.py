"""Kernels of the gated delta rule that only decays of channels need.

With g of key channels, c and E of :mod:`jaxkern.ops.delta_rule.kernel` are (CHUNK, K), and

    P[i,j] = scale · Σ_k q[i,k] · k[j,k] · exp(c[i,k] − c[j,k]) · β[j]

is no product times a matrix. Pairs i > j are taken by size: the half, 32, 16, …, 1, of the smallest
block of a power of 2 of tokens that has both. i is in the second half of that block, j in the
first, whose last token is their anchor m:

    exp(c[i] − c[j]) = f[i] · f[j],  f[i] = exp(c[i] − c[m]),  f[j] = exp(c[m] − c[j])

No exponent is above 0 where g is not, and all pairs of a size are in one product of f ∘ Q, or of
f ∘ K, with f ∘ K. Others in that product are dropped. Where decays in a block of 16 tokens are mild
enough for exponents of both signs, all of its pairs are in one product, with the eighth token as
the anchor, instead of in four: each token then has an f as the later one and one as the earlier.

The first kernel finds T, P, E ∘ K, scale · E ∘ Q and β ∘ left ∘ K, with which the scans multiply.
Backward, the gradient of each f ∘ Q and f ∘ K is a product with the gradients of those pairs. What
c[i] has from pairs is q · dQ and the part of k · dK from pairs with i as the later one, less that
from pairs with i as the earlier one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import LOG2E, unknown_zero
from jaxkern.mosaic.lanes import ROW, lane_numbers, sync_warpgroup
from jaxkern.mosaic.lanes import zeros as lane_zeros
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.mma import (
    PADDED,
    accumulator,
    anew,
    finish,
    invert_unit_lower,
    multiply,
    start,
)
from jaxkern.mosaic.tiles import (
    Meetings,
    TileRing,
    barrier_of,
    by_wgmma,
    copies_barrier,
    finish_writes,
    load_left,
    load_rows,
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
    keep_pairs,
    over_columns,
    over_rows,
    store_column_sums,
    to_fp32,
)
from jaxkern.ops.chunks import least_log_decay
from jaxkern.ops.delta_rule.call import (
    BETA,
    BF16,
    CHUNK,
    F32,
    KEYS,
    MOST,
    PAIR,
    SAVED,
    SLICE,
    SQUARE,
    WARPGROUP,
    Call,
    Place,
    by_column,
    by_row,
    first_state,
    launch,
    new_values,
    next_state,
    tiles_of,
    tokens_of,
)

FAR, NEAR = (32, 16), (8, 4, 2, 1)
"""Sizes of pairs: of two blocks of BLOCK tokens, and of one."""
BLOCK = 16
"""Tokens whose pairs may be in one product."""
MILD = 100.0
"""The most, in powers of 2, that half of a block may decay by for that: squares are finite."""
PART = 32
"""Key channels whose gradients are found at once: for more there are no registers."""
_HALF = CHUNK // 2
"""Tokens of a chunk that a warpgroup sums."""
_WIDE = LANES + 8
"""Elements of a row of c, such that lanes of a warp read parts of 8 rows without conflicts."""
_MEETINGS = Meetings(WARPGROUP)
_K, _Q = range(2)
"""Tiles of a chunk's tokens."""


class _Half:
    """A warpgroup of two: it has KEYS of the key channels, and half of a chunk's tokens.

    If key channels are narrow, a block has two heads: their channels lie next to each other, so
    that each warpgroup has those of a head. It then has all products of its head, and not one of
    two for both halves of the channels.
    """

    def __init__(self, call: Call, refs: Any, smem: Any, *counts: int):
        self.call, self.refs, self.smem, self.counts = call, refs, smem, counts
        # Anew: else a loop would hold the addresses of all that is found from it.
        self.own = lax.axis_index(WARPGROUP) + unknown_zero()
        self.joined = call.joined > 1
        self.number = self.own if self.joined else 0
        place = lambda n: Place(call, *counts, joined=call.joined, number=n)
        self.at, self.of_heads = place(self.number), [place(n) for n in range(call.joined)]
        self.steps = smem.steps.at[self.number]
        self.channels = pl.ds(self.own * KEYS, KEYS)
        self.c = smem.c.at[:, self.channels]
        self.k, self.q = (self.part_of(smem.tokens.at[n]) for n in (_K, _Q))
        self.earlier = self.part_of(smem.earlier)

    def run(self) -> None:
        """Goes through the chunks from one saved state to the next."""
        (index,) = self.at.own
        first = index * SAVED
        count = jnp.minimum(SAVED, self.call.chunks - first)
        self.fetch(first, True)
        self.fetch_late(first, True)

        def step(n: Any, gates: Any) -> Any:
            of_chunk = type(self)(self.call, self.refs, self.smem, *self.counts)
            return of_chunk.step(first + n, n + 1 < count, gates)

        lax.fori_loop(0, count, step, self.log_decays(first))
        finish_writes()

    def fetch(self, chunk: Any, when: Any) -> None:
        """The second warpgroup starts to fetch a chunk's tokens."""
        start_copies(self.tokens(chunk), barrier_of(self.smem, "early"), (self.own == 1) & when)

    def fetch_late(self, chunk: Any, when: Any) -> None:
        """It starts to fetch what else there is."""

    def step(self, chunk: Any, more: Any, gates: list[Any]) -> list[Any]:
        """Runs a chunk, of which `gates` are g; that of the next one, if there are `more`."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits for the tokens."""
        wait_for_copies(barrier_of(self.smem, "early"))
        if not by_wgmma():
            self.meet()

    def later_gates(self, chunk: Any) -> list[Any]:
        """g of the next chunk."""
        return self.log_decays(jnp.minimum(chunk + 1, self.call.chunks - 1))

    def part_of(self, tile: Any) -> Any:
        """The own channels of a tile."""
        return tile.at[pl.ds(self.own, 1)]

    def operand(self, tile: Any) -> Any:
        """The own head's part of a tile."""
        return self.part_of(tile) if self.joined else tile

    def copies(self, part: Any, ref: Any, chunk: Any, tile: Any) -> list[tuple[Any, Any]]:
        """Pairs of a source and shared memory: what `part` of a place finds, of each head."""
        width = tile.shape[0] // self.call.joined
        return [
            (part(at, ref, chunk), tile.at[pl.ds(n * width, width)])
            for n, at in enumerate(self.of_heads)
        ]

    def meet(self) -> None:
        _MEETINGS.meet(self.smem)

    def written(self, ref: Any, chunk: Any) -> Any:
        """(CHUNK, KEYS) of an array of key channels."""
        return ref.at[self.at.batch, tokens_of(chunk), self.at.joint, self.channels]

    def tokens(self, chunk: Any) -> list[tuple[Any, Any]]:
        """Pairs of a source and shared memory: a chunk's tokens."""
        refs, smem = self.refs, self.smem
        found = [
            (at.of_chunk(refs.steps, chunk), smem.steps.at[n]) for n, at in enumerate(self.of_heads)
        ]
        for n, ref in enumerate((refs.k, refs.q)):
            found += self.copies(Place.keys, ref, chunk, smem.tokens.at[n])
        return found

    def log_decays(self, chunk: Any) -> list[Any]:
        """(LANES,) of each of the own tokens: g."""
        first = chunk * CHUNK + self.own * _HALF
        of_token = lambda n: self.refs.g.at[self.at.batch, first + n, self.at.joint]
        return [plgpu.load(of_token(n), layout=ROW) for n in range(_HALF)]

    def used(self, g: Any, number: int) -> Any:
        """The logarithm of the decay that a token has by g, of which sums are finite."""
        least, g = least_log_decay(F32), g.astype(F32)
        if self.call.packed:
            most = self.smem.steps[0, MOST, self.own * _HALF + number]  # segments are all heads'
            g = jnp.where(g > most, least, g)
        return jnp.maximum(g, least)

    def row(self, number: int) -> Any:
        """(K,) of c, of one of the own tokens."""
        return self.smem.c.at[self.own * _HALF + number, pl.ds(0, LANES)]

    def of_other(self, total: Any, other: int) -> Any:
        """The `total` of warpgroup `other`, (LANES,), in the other one; zeros in itself."""
        self.smem.totals.at[self.own][...] = total
        self.meet()
        found = plgpu.load(self.smem.totals.at[other], layout=ROW)
        return found * jnp.where(self.own == other, 0.0, 1.0)

    def kept(self, gates: list[Any]) -> Any:
        """Bits of (LANES,) integers: whether the decay of a token is that of its g."""
        bits = lane_numbers() * 0
        for number, g in enumerate(gates):
            own = g.astype(F32) == self.used(g, number)
            bits = bits | jnp.where(own, jnp.int32(1 << number if number < 31 else -(1 << 31)), 0)
        return bits

    def store_sums(self, gates: list[Any]) -> Any:
        """Stores c, the sums of g · log2(e) from the chunk's first token on, (CHUNK, K).

        Returns whether a half of a block of 16 tokens has more than `MILD` of them, 0 or 1.
        """
        total, sums, most, run = lane_zeros(), [], lane_zeros(), lane_zeros()
        for number, g in enumerate(gates):
            own = self.used(g, number) * LOG2E
            total = total + own
            sums.append(total)
            run = run + jnp.abs(own)
            if number % (BLOCK // 2) == BLOCK // 2 - 1:
                most, run = jnp.maximum(most, run), lane_zeros()
        before = self.of_other(total, 0)
        for number, v in enumerate(sums):
            self.row(number)[...] = v + before
        return _MEETINGS.any_above(self.smem, most, MILD)

    def sums(self, first: int) -> Any:
        """c of PART of the own channels, from `first` on, as below."""
        return load_rows(self.c, first, PART)

    def exponents(self, anchor: int, first: int) -> Any:
        """c less that of the anchor of each token."""
        return self.sums(first) - load_rows(self.c, first, PART, anchor=anchor)

    def factors(self, size: int, first: int) -> Any:
        """f of pairs of a size."""
        sign = over_rows(jnp.where(is_later(size), 1.0, -1.0), PART)
        return jnp.exp2(self.exponents(size, first) * sign)

    def end(self, first: int) -> Any:
        """(PART,): c of the last token."""
        channels = pl.ds(self.own * KEYS + first, PART)
        return plgpu.load(self.smem.c.at[CHUNK - 1, channels], layout=COLUMNS)

    def to_end(self, first: int) -> Any:
        """left, (CHUNK, PART)."""
        return jnp.exp2(over_columns(self.end(first), CHUNK) - self.sums(first))


def is_later(size: int) -> Any:
    """(CHUNK,): whether tokens are the later ones of pairs of a size."""
    number = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)
    return (number & size) != 0


def _scratch_of_tokens(call: Call, **more: Any) -> dict[str, Any]:
    """Shared memory for a chunk: tiles, or (n, …) of them, and rows of fp32."""
    tokens = (CHUNK, LANES), BF16
    of = {"tokens": ((2, *tokens[0]), BF16), "earlier": tokens} | more
    steps, dtype = tiles_of(call, "q")["steps"]
    of |= {"steps": ((call.joined, *steps), dtype)}
    of |= {"c": ((CHUNK, _WIDE), F32), "totals": ((2, LANES), F32)}

    def memory(shape: tuple[int, ...], dtype: Any) -> Any:
        if dtype == F32:
            return plgpu.SMEM(shape, F32)
        return tile(shape[-2], shape[-1], BF16, shape[:-2])

    scratch = {name: memory(*like) for name, like in of.items()} | _MEETINGS.scratch()
    copied = [tokens] * 2 + [(steps, dtype)] * call.joined
    return scratch | copies_barrier("early", copied)


def pairs(call: Call) -> dict[str, Any]:
    """Finds T, P with its weights, the decayed tiles and exp(c[last]), for the scans."""

    def kernel(refs: Any, smem: Any) -> None:
        _Pairs(call, refs, smem, per_head).run()

    per_head = -(-call.chunks // SAVED)
    more = {"later": ((len(FAR) + 1, 2, CHUNK, LANES), BF16), "A": ((PAIR, CHUNK, PADDED), F32)}
    of_keys = dict.fromkeys(("kd", "kt", "qd"), call.joined_like(BF16))
    of_keys |= {"ends": call.joined_like(F32, call.chunks)}
    outs = of_keys | dict.fromkeys(("T", "P"), call.matrices_like())
    ins = {"q": call.q, "k": call.k, "g": call.g, "steps": call.steps}
    grid = call.batch * call.heads // call.joined * per_head
    scratch = _scratch_of_tokens(call, **more)
    found = launch(kernel, "pairs", ins, outs, scratch, grid, warpgroups=2)
    return found | {name: call.apart(found[name]) for name in of_keys}


class _Pairs(_Half):
    """The first warpgroup finds the products K Kᵀ of pairs, and T, the second Q Kᵀ, and P.

    With two heads each finds both products; the first inverts for both.
    """

    def step(self, chunk: Any, more: Any, gates: list[Any]) -> list[Any]:
        late = by_wgmma() and not self.call.packed  # sums then need nothing that is copied
        if not late:
            self.wait()
        strong = self.store_sums(gates)
        if late:
            self.wait()
        finish_writes()
        sync_warpgroup()  # the tiles of the chunk before have been written
        self.each_part(self.store_factors)
        self.meet()
        if self.joined:
            self.store_lower(chunk, self.pairs_of(_K, strong))
        total = self.pairs_of(_Q if self.joined else self.own, strong)
        self.meet()  # all products are done
        self.each_part(self.store_decayed)
        if not self.joined:
            pl.when(self.own == _K)(lambda: self.store_lower(chunk, total))
        self.when_weighing(lambda: self.store_weights(total))
        later = self.later_gates(chunk)
        self.meet()
        self.fetch(chunk + 1, more)
        self.write(chunk)
        return later

    def each_part(self, f: Any) -> None:
        """Calls `f` with columns of tiles, and what is of K and of Q there."""
        for first in range(0, KEYS, PART):
            k, q = (to_fp32(load_left(v, columns=(first, PART))) for v in (self.k, self.q))
            f(first, k, q)

    def store(self, ref: Any, first: int, v: Any) -> None:
        store_tile(self.part_of(ref), v.astype(BF16), first=first)

    def store_factors(self, first: int, k: Any, q: Any) -> None:
        """Stores f ∘ K and f ∘ Q of all sizes; within blocks f is infinite if decays are strong."""
        later = self.smem.later
        for n, size in enumerate(FAR):
            self.store_size(n, size, first, k, q)
        e = self.exponents(BLOCK // 2, first)
        f = jnp.exp2(e)
        self.store(later.at[len(FAR), _K], first, f * k)
        self.store(later.at[len(FAR), _Q], first, f * q)
        self.store(self.smem.earlier, first, jnp.exp2(-e) * k)

    def store_size(self, n: int, size: int, first: int, k: Any, q: Any) -> None:
        f = self.factors(size, first)
        self.store(self.smem.later.at[n, _K], first, f * k)
        self.store(self.smem.later.at[n, _Q], first, f * q)

    def pairs_of(self, role: Any, strong: Any) -> Any:
        """Products of all pairs, of K or of Q with K, times β."""
        total = accumulator(CHUNK)
        for n, size in enumerate(FAR):
            total = self.with_pairs(total, role, n, size)
        total = lax.fori_loop(0, 1 - strong, lambda _, v: self.of_block(v, role), total)
        total = lax.fori_loop(0, strong, lambda _, v: self.of_near(v, role), total)
        return total * by_column(self.steps, BETA)

    def with_products(self, total: Any, left: Any, right: Any, *kept: int) -> Any:
        """The sum with what is kept of a product."""
        left, right = self.operand(left), self.operand(right)
        (found,) = multiply([accumulator(CHUNK)], [left], right, transposed=True)
        return total + keep_pairs(found, *kept)

    def with_pairs(self, total: Any, role: Any, n: int, size: int) -> Any:
        later = self.smem.later.at[n]
        return self.with_products(total, later.at[role], later.at[_K], size)

    def of_block(self, total: Any, role: Any) -> Any:
        """The sum with pairs in blocks of 16 tokens, if these decay mildly."""
        later, earlier = self.smem.later.at[len(FAR)], self.smem.earlier
        return self.with_products(total, later.at[role], earlier, BLOCK, 0)

    def of_near(self, total: Any, role: Any) -> Any:
        """The sum with all pairs in such blocks, by their size."""
        tokens, slot = self.smem.tokens, len(FAR)  # of the factors of blocks, which are infinite
        total = self.with_products(total, tokens.at[role], tokens.at[_K], 0)
        for size in NEAR:
            self.meet()  # all products are done
            self.each_part(lambda *of, size=size: self.store_size(slot, size, *of))
            self.meet()
            total = self.with_pairs(total, role, slot, size)
        return total

    def when_weighing(self, f: Any) -> None:
        """Calls `f` in the warpgroups that find P."""
        if self.joined:
            f()
        else:
            pl.when(self.own == _Q)(f)

    def store_decayed(self, first: int, k: Any, q: Any) -> None:
        """Stores E ∘ K, scale · E ∘ Q and β ∘ left ∘ K."""
        decay, beta = jnp.exp2(self.sums(first)), by_row(self.steps, BETA, PART)
        kd, qd, kt = self.decayed()
        self.store(kd, first, k * decay)
        self.store(qd, first, q * (decay * self.call.scale))
        self.store(kt, first, k * (self.to_end(first) * beta))

    def decayed(self) -> tuple[Any, Any, Any]:
        later = self.smem.later
        return later.at[0, _K], later.at[0, _Q], later.at[1, _K]

    def weights(self) -> Any:
        """P, in the place of factors, as are the decayed tiles."""
        return self.part_of(self.smem.later.at[1, _Q])

    def store_lower(self, chunk: Any, total: Any) -> None:
        """Stores what is inverted: two heads' matrices, or those of two chunks."""
        slot = self.own if self.joined else lax.rem(chunk, PAIR)
        store_matrix(self.smem.A.at[slot, :, pl.ds(0, CHUNK)], total)

    def store_weights(self, total: Any) -> None:
        in_order = jnp.exp2(causal(accumulator(CHUNK))) * self.call.scale
        store_tile(self.weights(), (total * in_order).astype(BF16))

    def write(self, chunk: Any) -> None:
        smem, refs, at = self.smem, self.refs, self.at
        for ref, to in zip(self.decayed(), (refs.kd, refs.qd, refs.kt), strict=True):
            write_tile(self.part_of(ref), self.written(to, chunk))

        self.when_weighing(lambda: write_tile(self.weights(), at.of_chunk(refs.P, chunk)))

        @pl.when((self.own == 0) & (self.joined | (lax.rem(chunk, PAIR) == PAIR - 1)))
        def _() -> None:
            of = chunk, pl.ds(at.head, PAIR)
            if not self.joined:
                of = pl.ds(chunk - PAIR + 1, PAIR), at.head
            invert_unit_lower(smem.A, refs.T.at[at.batch, *of])

        @pl.when(self.own == 1)
        def _() -> None:
            last = plgpu.load(smem.c.at[CHUNK - 1, pl.ds(0, LANES)], layout=ROW)
            refs.ends.at[at.batch, chunk, at.joint][...] = jnp.exp2(last)


def launch_states(call: Call, found: dict[str, Any], states: Any) -> dict[str, Any]:
    """S before each chunk, transposed in 16 bits, and N, from the states that were saved."""
    grid = call.batch * call.heads * states.shape[1] * call.slices
    other = 2 * SLICE * call.keys + SQUARE
    (ring,) = TileRing.of(other, grid, tiles_of(call, "kd kt v T"))

    def kernel(refs: Any, smem: Any) -> None:
        at = Place(call, call.slices, states.shape[1])
        part, index = at.own
        first = index * SAVED

        sources = lambda n: at.sources(refs, ring.tiles, first + n, part)

        def step(n: Any, stage: dict[str, Any], S: Any) -> Any:
            narrow = S.astype(BF16)
            reading = start([accumulator(CHUNK)], [narrow], stage["kd"], transposed=True)
            finish_writes()
            sync_tiles()
            store_tile(smem.S, narrow)
            making = new_values(stage, reading)
            adding, new = next_state(stage, S, making)
            store_tile(smem.N, new.astype(BF16), transposed=True)
            sync_tiles()
            write_tile(smem.S, at.turned(refs.S, first + n, part))
            write_tile(smem.N, at.values(refs.N, first + n, part))
            return finish(adding)[0]

        S = first_state(refs.states, at, index, part, call.keys)
        ring.loop(smem, jnp.minimum(SAVED, call.chunks - first), sources, step, S)
        finish_writes()

    ins = {x: found[x] for x in ("kd", "kt", "T", "ends")} | {"v": call.v, "states": states}
    outs = {"S": call.turned_like(), "N": jax.ShapeDtypeStruct(call.v.shape, BF16)}
    scratch = ring.scratch()
    scratch |= {"S": tile(SLICE, call.keys, BF16), "N": tile(CHUNK, SLICE, BF16)}
    return launch(kernel, "states", ins, outs, scratch, grid)


def launch_grads(call: Call, arrays: dict[str, Any], after: tuple[Any, ...]) -> dict[str, Any]:
    """dQ and dK of each head, dg, and parts of dβ, (B, chunks, H, 2, CHUNK).

    Args:
      call: of the pass.
      arrays: N, dO and dV, (B, L, H, V), and S before each chunk, transposed.
      after: dS after each chunk, of each slice of its value channels.
    """
    like, chunks = jax.ShapeDtypeStruct, call.chunks

    def kernel(refs: Any, smem: Any) -> None:
        _Grads(call, refs, smem, per_head).run()

    per_head = -(-chunks // SAVED)
    joined, more = call.joined, call.key_gradients(after)
    outs = more.pop("outs") | {"dg": like(call.g.shape, call.g.dtype)}
    outs["dbeta"] = like((call.batch, chunks, call.heads, 2 // joined, CHUNK), F32)
    ins = {"q": call.q, "k": call.k, "g": call.g, "steps": call.steps}
    ins |= arrays | more.pop("ins", {})
    of_values, states = ((CHUNK, joined * call.values), BF16), ((call.values, LANES), BF16)
    tiles = {"N": of_values, "grads": ((2, *of_values[0]), BF16), "S": states, "dS": states}
    tiles |= {"pairs": ((joined, 2, CHUNK, CHUNK), BF16), "diagonal": ((joined, CHUNK), F32)}
    scratch = _scratch_of_tokens(call, **tiles, columns=((2, WARPS, LANES), F32))
    slices = [((SLICE, LANES), BF16)] * call.slices
    scratch |= copies_barrier("late", [of_values] * 3 + [states, *slices])
    grid = call.batch * call.heads // joined * per_head
    return launch(kernel, "channels_bwd", ins, outs, scratch, grid, warpgroups=2, **more)


class _Grads(_Half):
    """Chunk by chunk, one warpgroup has the gradients of P, the other those of K Kᵀ.

    With two heads each has both of a head. Then each has those of its key channels, and at last
    those of g of its tokens.
    """

    def fetch_late(self, chunk: Any, when: Any) -> None:
        """It starts to fetch what is multiplied with values and states."""
        refs, smem = self.refs, self.smem
        values = (refs.N, smem.N), (refs.dout, smem.grads.at[0]), (refs.dV, smem.grads.at[1])
        copies = [x for ref, to in values for x in self.copies(Place.all_values, ref, chunk, to)]
        copies += self.copies(Place.of_chunk, refs.S, chunk, smem.S)
        for part, name in enumerate(self.call.after_names()):
            of_part = rows_of(smem.dS, part * SLICE, SLICE)
            copies.append((self.at.joint_keys(getattr(refs, name), chunk), of_part))
        start_copies(copies, barrier_of(smem, "late"), (self.own == 1) & when)

    def step(self, chunk: Any, more: Any, gates: list[Any]) -> list[Any]:
        self.chunk, smem, at, refs = chunk, self.smem, self.at, self.refs
        wait_for_copies(barrier_of(smem, "late"))
        self.wait()
        strong, kept = self.store_sums(gates), self.kept(gates)
        self.store_pairs()
        self.meet()
        dbeta = 0
        for first in range(0, KEYS, PART):
            q, k = (load_left(v, columns=(first, PART)) for v in (self.q, self.k))
            grads = self.of_states(first)
            if first + PART == KEYS:
                self.meet()  # all that is late has been read
                self.fetch_late(chunk + 1, more)
            grads = self.of_keys(first, k, *grads)
            for size in FAR:
                grads = self.of_size(first, q, k, size, grads)
            grads = lax.fori_loop(
                0, 1 - strong, lambda _, v, f=first, q=q, k=k: self.of_block(f, q, k, v), grads
            )
            grads = lax.fori_loop(
                0, strong, lambda _, v, f=first, q=q, k=k: self.of_near(f, q, k, v), grads
            )
            dq, dk, dc, of_part = self.of_roles(q, k, *grads)
            dbeta = dbeta + of_part
            sync_warpgroup()  # all warps have read c
            store_matrix(self.c.at[:, pl.ds(first, PART)], dc)
            for to, v in (self.q, dq), (self.k, dk):
                store_tile(to, v.astype(BF16), first=first)
        part = 0 if self.joined else self.own
        at.of_chunk(refs.dbeta, chunk).at[part][...] = dbeta
        sync_tiles()
        write_tile(self.q, self.written(refs.dq, chunk))
        write_tile(self.k, self.written(refs.dk, chunk))
        later = self.later_gates(chunk)
        self.write_log_decays(chunk, kept)
        finish_writes()
        self.meet()
        self.fetch(chunk + 1, more)
        return later

    def store_pairs(self) -> None:
        """Stores the gradients of pairs of Q and K, times the scale, or of K and K, in 16 bits.

        That is of pairs times β of the earlier one. Those of a token with itself are kept apart.
        """
        smem = self.smem
        for role in (0, 1) if self.joined else (self.own,):
            left = self.operand(smem.grads.at[role])
            (v,) = multiply([accumulator(CHUNK)], [left], self.operand(smem.N), transposed=True)
            v = v * jnp.where(role == 1, -1.0, self.call.scale)

            @pl.when(role == 0)
            def _(v: Any = v) -> None:
                smem.diagonal.at[self.number][...] = jnp.sum(keep_pairs(v, 0), axis=1)

            v = v * jnp.exp2(causal(accumulator(CHUNK), first=1))
            store_tile(smem.pairs.at[self.number, role], v.astype(BF16))

    def of_states(self, first: int) -> tuple[Any, Any, Any]:
        """dO Sᵀ, dV Sᵀ and N dSᵀ, (CHUNK, PART); stores parts of exp(c[last]) · S · dS."""
        smem = self.smem
        S, dS = self.part_of(smem.S), self.part_of(smem.dS)
        lefts = [self.operand(smem.grads.at[n]) for n in range(2)]
        two = start([accumulator(PART)] * 2, lefts, S, first=first)
        third = start([accumulator(PART)], [self.operand(smem.N)], dS, first=first)
        total = accumulator(PART)
        for part in range(self.call.slices):
            of_part = [rows_of(v, part * SLICE, SLICE) for v in (S, dS)]
            a, b = (to_fp32(load_left(v, columns=(first, PART))) for v in of_part)
            total = total + a * b
        self.store_columns(0, first, total * over_columns(jnp.exp2(self.end(first)), SLICE))
        (read, write), (last,) = finish(two, later=1), finish(third)
        return read, write, last

    def store_columns(self, which: int, first: int, v: Any) -> None:
        """Stores each warp's sums of columns of (64, PART)."""
        columns = self.smem.columns.at[which, :, self.channels]
        store_column_sums(columns, first, v, row=LANES)

    def of_keys(self, first: int, k: Any, dq: Any, w: Any, z: Any) -> tuple[Any, Any, Any]:
        """dQ, and dK of later and of earlier ones, from states.

        Here as below, that of earlier ones is still to be multiplied by β.
        """
        decay, z = jnp.exp2(self.sums(first)), z * self.to_end(first)
        self.store_columns(1, first, to_fp32(k) * z * over_rows(self.before_last(), PART))
        return dq * decay * self.call.scale, -w * decay, z

    def before_last(self) -> Any:
        """(CHUNK,): β of tokens, but 0 for the last one of the chunk, or of the row.

        No decay of the chunk weakens what that leaves in the state. It would be added to dg and
        taken away, and cancel but for rounding.
        """
        number = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)
        beta = plgpu.load(self.steps.at[BETA], layout=ROWS)
        last = jnp.minimum(CHUNK - 1, self.call.length - 1 - self.chunk * CHUNK)
        return jnp.where(number >= last, 0.0, beta)

    def of_near(self, first: int, q: Any, k: Any, grads: Any) -> Any:
        for size in NEAR:
            grads = self.of_size(first, q, k, size, grads)
        return grads

    def of_size(self, first: int, q: Any, k: Any, size: int, grads: Any) -> Any:
        """The gradients with those of pairs of a size."""
        dq, later, earlier = grads
        q, k, f = anew(q), anew(k), self.factors(size, first)
        beta = plgpu.load(self.steps.at[BETA], layout=ROWS)
        weight = over_rows(jnp.where(is_later(size), 1.0, beta), PART)
        self.store(first, (self.q, f * to_fp32(q)), (self.k, f * to_fp32(k) * weight))
        of_q, of_k, of_earlier = self.multiplied(first, self.k, lambda v: keep_pairs(v, size))
        return dq + f * of_q, later + f * of_k, earlier + f * of_earlier

    def of_block(self, first: int, q: Any, k: Any, grads: Any) -> Any:
        """The gradients with those of pairs in blocks of 16 tokens, if these decay mildly."""
        dq, later, earlier = grads
        q, k = anew(q), anew(k)
        e = self.exponents(BLOCK // 2, first)
        f, of_earlier = jnp.exp2(e), jnp.exp2(-e)
        v = of_earlier * to_fp32(k) * by_row(self.steps, BETA, PART)
        self.store(first, (self.q, f * to_fp32(q)), (self.k, f * to_fp32(k)), (self.earlier, v))
        keep = lambda v: keep_pairs(v, BLOCK, apart=0)
        dof_q, dof_k, dof_earlier = self.multiplied(first, self.earlier, keep)
        return dq + f * dof_q, later + f * dof_k, earlier + of_earlier * dof_earlier

    def store(self, first: int, *pairs: tuple[Any, Any]) -> None:
        """Stores parts of tiles that only this warpgroup reads."""
        sync_warpgroup()  # all warps have multiplied by those before
        for ref, v in pairs:
            store_tile(ref, v.astype(BF16), first=first)
        sync_tiles()

    def multiplied(self, first: int, right: Any, keep: Any) -> list[Any]:
        """Gradients of f ∘ Q and of f ∘ K of later ones, and of f ∘ K of earlier ones."""
        of_q, of_k = (self.smem.pairs.at[self.number, n] for n in range(2))
        read = lambda v, **how: keep(load_left(v, **how))
        product = lambda acc, left, right: multiply([acc], [left], right, first=first)[0]
        later = [product(accumulator(PART), read(v), right) for v in (of_q, of_k)]
        earlier = product(accumulator(PART), read(of_k, transposed=True), self.k)
        return [*later, product(earlier, read(of_q, transposed=True), self.q)]

    def of_roles(
        self, q: Any, k: Any, dq: Any, later: Any, earlier: Any
    ) -> tuple[Any, Any, Any, Any]:
        """dQ, dK, dc and dβ."""
        q, k = to_fp32(q), to_fp32(k)
        beta = plgpu.load(self.steps.at[BETA], layout=ROWS)
        own = plgpu.load(self.smem.diagonal.at[self.number], layout=ROWS)
        dbeta = jnp.sum(k * earlier, axis=1) + own * jnp.sum(q * k, axis=1)
        dc = q * dq + k * (later - earlier * over_rows(self.before_last(), PART))
        later, weight = later + earlier * over_rows(beta, PART), over_rows(own * beta, PART)
        return dq + weight * k, later + weight * q, dc, dbeta

    def write_log_decays(self, chunk: Any, kept: Any) -> None:
        """Writes dg of the own tokens: sums of dc from each one to the chunk's end, and more."""
        at, total, sums = self.at, lane_zeros(), []
        self.meet()  # dc of all channels is there
        for number in reversed(range(_HALF)):
            total = total + plgpu.load(self.row(number), layout=ROW)
            sums.append(total)
        more = self.of_other(total, 1)
        for which in range(2):
            for warp in range(WARPS):
                more = more + plgpu.load(self.smem.columns.at[which, warp], layout=ROW)
        first = chunk * CHUNK + self.own * _HALF
        for number, v in enumerate(reversed(sums)):
            to = self.refs.dg.at[at.batch, first + number, at.joint]
            own = (kept & jnp.int32(1 << number if number < 31 else -(1 << 31))) != 0
            to[...] = jnp.where(own, v + more, 0.0).astype(to.dtype)
