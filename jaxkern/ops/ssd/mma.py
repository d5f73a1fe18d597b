"""The SSD scan by mma.sync, for GPUs without wgmma: blocks of one warpgroup, loads by cp.async.

Forward, and the gradients of what a head has of its own, each block goes through the tokens of a
unit, STEP at once, with the state or its gradient in registers. With the equations of the op,
transposed as there is most left to read from registers:

    Sᵀ = B Cᵀ,  yᵀ = exp(c) ∘ (h Cᵀ) + xᵀ Mᵀ + D · xᵀ
    h  ← exp(c[Q−1]) · h + (w ∘ x)ᵀ B

    S = C Bᵀ,   uᵀ = exp(c[Q−1] − c) ∘ (dh Bᵀ) + dyᵀ M
    dxᵀ = s ∘ uᵀ + D · dyᵀ,  ds[j] = x[j] · u[j]
    dh ← exp(c[Q−1]) · dh + (exp(c) ∘ dy)ᵀ C

The two products with C, and with B, are of one right operand, which is read once for both.

The gradients of B and C are sums over heads. A block has a chunk of a group, and goes through its
units:

    dC += (exp(c) ∘ dy) h,  dB += (w ∘ x) dh         one launch each, of the same kernel
    dS += dM ∘ exp(c[i] − c[j]) · s[j]               a block for each 64 × 64 of a chunk's

What one unit adds to a row of dC, times that row of C, is what c[i] gains by the state before the
chunk. The products dS B and dSᵀ C are XLA's.

A pair of tokens j ≤ i adds the same to what c[i] gains and to what c[j] loses, and only if it is
rounded the same do they cancel in the sums over tokens from t on, da[t]. That holds within a step,
so the sums end with the step: what is carried past it is added as one number.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.arithmetic import sigmoid
from jaxkern.mosaic.lanes import zeros as lane_zeros
from jaxkern.mosaic.launch import LANES
from jaxkern.mosaic.mma import (
    accumulator,
    multiply,
)
from jaxkern.mosaic.tiles import (
    TileRing,
    launch_tiles,
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
    COLUMNS,
    ROWS,
    TILE,
    WARPS,
    causal,
    lane_sums,
    over_columns,
    over_rows,
    store_column_sums,
    to_fp32,
)
from jaxkern.ops.ssd.tiles import (
    BLOCK,
    CHUNK,
    SLICE,
    STEP,
    STEPS,
    WARPGROUP,
    SsdBackwardTile,
    SsdTile,
    SsdUnit,
    StepDecays,
    first_state,
    locate,
    of_step,
)

HALVES = ((0, 0), (1, 0), (1, 1))
"""The halves i and j of a chunk in each block of dS, those on and below the diagonal."""
PART = 16
"""States whose products are added to dB and dC at once."""


def _ring(grid: int, other: int, dtype: Any, **tiles: tuple[int, ...]) -> TileRing:
    """A ring of tiles, and of the step sizes of a chunk, beside `other` bytes of shared memory."""
    of_tiles = {name: (shape, dtype) for name, shape in tiles.items()}
    (ring,) = TileRing.of(other, grid, of_tiles | {"steps": ((2, CHUNK), jnp.float32)})
    return ring


def _launch(kernel: Any, name: str, ins: Any, outs: Any, scratch: Any, grid: int) -> dict[str, Any]:
    return launch_tiles(kernel, name, ins, outs, scratch, (BLOCK, WARPGROUP), grid)


def launch_fwd(scan: SsdTile, ins: dict[str, Any], outs: dict[str, Any]) -> dict[str, Any]:
    """The forward; arrays as :mod:`jaxkern.ops.ssd.forward` has them."""
    dtype, N = ins["x"].dtype, scan.states
    tiles = {"x": (STEP, SLICE), "B": (STEP, N), "C": (STEP, N)}
    if ins["z"] is not None:
        tiles["z"] = STEP, SLICE
    ring = _ring(scan.grid, 2 * STEP * STEP, dtype, **tiles)
    scratch = ring.scratch() | {"M": tile(STEP, STEP, dtype)}
    return _launch(
        lambda refs, smem: _Forward(scan, ring, refs, smem, SsdUnit(scan, 0)).run(),
        *("ssd_mma_fwd", ins, outs, scratch, scan.grid),
    )


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A block that goes through the tokens of a unit."""

    scan: SsdTile
    ring: TileRing
    refs: Any
    smem: Any
    at: SsdUnit

    def tokens(self, ref: Any, t: Any) -> Any:
        """(64, 64): the unit's part of x, z, dy or a result in step `t` of the sequence."""
        at = self.at
        return ref.at[at.batch, of_step(t), at.head, at.channels]

    def weights(self, ref: Any, t: Any) -> Any:
        """(64, N) of B or C."""
        return ref.at[self.at.batch, of_step(t), self.at.group]

    def steps(self, t: Any) -> Any:
        """(2, 128): sums of log-decays and step sizes of a step's chunk."""
        return self.refs.steps.at[self.at.batch, self.at.head, lax.div(t, STEPS)]

    def skip(self) -> Any:
        """D as it multiplies (P, 64)."""
        D, at = self.refs.D, self.at
        if len(D.shape) == 1:
            return D[at.head]
        return over_rows(plgpu.load(D.at[at.head, at.channels], layout=ROWS, optimized=False), STEP)

    def save(self, ref: Any, index: Any, h: Any) -> None:
        """Saves a state in 16 bits."""
        store_matrix(ref.at[self.at.batch, index, self.at.head, self.at.channels], h)

    def end(self, h: Any) -> None:
        at = self.at
        self.refs.final.at[at.batch, at.part, at.head, at.channels][...] = h


class _Forward(_Sequence):
    def run(self) -> None:
        at, refs = self.at, self.refs

        def sources(n: Any) -> dict[str, Any]:
            t = at.first + n
            found = {
                name: self.tokens(getattr(refs, name), t)
                for name in ("x", "z")
                if getattr(refs, name) is not None
            }
            found |= {name: self.weights(getattr(refs, name), t) for name in ("B", "C")}
            return found | {"steps": self.steps(t)}

        h = first_state(self.scan, refs, at)
        self.end(self.ring.loop(self.smem, at.count, sources, self.step, h))

    def step(self, n: Any, stage: dict[str, Any], h: Any) -> Any:
        """The state after step `n`, (P, N), from the state before; stores the output."""
        t, dtype, M = self.at.first + n, stage["x"].dtype, self.smem.M
        decays = StepDecays(stage["steps"], t)
        if self.scan.every:
            every = STEPS * self.scan.every
            pl.when(lax.rem(t, every) == 0)(
                lambda: self.save(self.refs.states, lax.div(t, every), h)
            )
        S, y = multiply(  # (j, i) and (p, i)
            [accumulator(STEP)] * 2, [stage["B"], h], stage["C"], transposed=True
        )
        c, s = decays.sums(COLUMNS), decays.sizes(COLUMNS)
        exponents = over_columns(c, STEP) - over_rows(decays.sums(ROWS), STEP)
        S = S * jnp.exp2(causal(exponents, transposed=True))
        store_tile(M, (S * over_rows(decays.sizes(ROWS), STEP)).astype(dtype))
        x = load_left(stage["x"], transposed=True)  # (p, j)
        x32 = to_fp32(x)
        y = y * over_columns(jnp.exp2(c - decays.before()), STEP)
        if self.refs.D is not None:
            y = y + self.skip() * x32
        sync_tiles()
        (y,) = multiply([y], [x], M)
        if self.refs.z is not None:
            z = to_fp32(load_left(stage["z"], transposed=True))
            if self.refs.y is not None:
                sync_tiles()  # all warps have read z
                store_tile(stage["z"], y.astype(dtype), transposed=True)
            y = y * z * sigmoid(z, False, layout=TILE)
        store_tile(stage["x"], y.astype(dtype), transposed=True)
        weight = jnp.exp2(decays.last() - c) * s
        weighted = (x32 * over_columns(weight, STEP)).astype(dtype)
        (h,) = multiply([h * jnp.exp2(decays.total())], [weighted], stage["B"])
        sync_tiles()
        write_tile(stage["x"], self.tokens(self.refs.out, t))
        if self.refs.y is not None:
            write_tile(stage["z"], self.tokens(self.refs.y, t))
        return h


def launch_carry(
    scan: SsdTile, reverse: bool, tokens: Any, weights: Any, steps: Any, starts: Any
) -> tuple[Any, Any]:
    """:func:`.forward.launch_carry` by mma.sync; states of all chunks are saved or none."""
    ring = _ring(scan.grid, 0, tokens.dtype, tokens=(STEP, SLICE), weights=(STEP, scan.states))
    state = scan.heads, scan.channels, scan.states
    like = lambda count, dtype: jax.ShapeDtypeStruct((scan.batch, count, *state), dtype)
    results = _launch(
        lambda refs, smem: _Carry(scan, ring, refs, smem, SsdUnit(scan, 0)).run(reverse),
        "ssd_mma_carry_reverse" if reverse else "ssd_mma_carry",
        {"tokens": tokens, "weights": weights, "steps": steps, "initial": starts},
        {
            "states": like(scan.chunks, tokens.dtype) if scan.every else None,
            "final": like(scan.parts, jnp.float32),
        },
        ring.scratch(),
        scan.grid,
    )
    return results["states"], results["final"]


class _Carry(_Sequence):
    def run(self, reverse: bool) -> None:
        at, refs = self.at, self.refs
        number = lambda n: at.first + (at.count - 1 - n if reverse else n)

        def sources(n: Any) -> dict[str, Any]:
            t = number(n)
            own = {"tokens": self.tokens(refs.tokens, t), "weights": self.weights(refs.weights, t)}
            return own | {"steps": self.steps(t)}

        def step(n: Any, stage: dict[str, Any], h: Any) -> Any:
            t = number(n)
            decays = StepDecays(stage["steps"], t)
            if refs.states is not None:
                begins = lax.rem(t, STEPS) == (STEPS - 1 if reverse else 0)
                save = lambda: self.save(
                    refs.states, lax.div(t, STEPS), h.astype(refs.states.dtype)
                )
                pl.when(begins)(save)
            c = decays.sums(COLUMNS)
            if reverse:
                weight = jnp.exp2(c - decays.before())
            else:
                weight = jnp.exp2(decays.last() - c) * decays.sizes(COLUMNS)
            tokens = to_fp32(load_left(stage["tokens"], transposed=True))
            weighted = (tokens * over_columns(weight, STEP)).astype(stage["tokens"].dtype)
            return multiply([h * jnp.exp2(decays.total())], [weighted], stage["weights"])[0]

        h = first_state(self.scan, refs, at)
        self.end(self.ring.loop(self.smem, at.count, sources, step, h))


def launch_grads(scan: SsdTile, arrays: Any, dy: Any, before: Any, ends: Any) -> dict[str, Any]:
    """The gradients of a call.

    Args:
      scan: of one warpgroup, cut as the launch of the tokens is.
      arrays: :class:`jaxkern.ops.ssd.inputs.KernelInputs` of the call.
      dy: (B, L, H, P).
      before: the states before chunks, (B, chunks, H, P, N).
      ends: the gradient of the state after each part, (B, parts, H, P, N), or ``None``.

    Returns:
      `dx`; `dinitial` (B, H, P, N); `dB` and `dC`, (B, L, G, N), fp32; of each unit what
      :func:`jaxkern.ops.ssd.inputs.plain_step_grads` takes, `dc`, `ds` and `last`; `dD`, of each
      head, where D is.
    """
    own = _launch_own(scan, arrays, dy, ends)
    cut = SsdBackwardTile.of(scan)
    dC, gains = _launch_outer(cut, "C", arrays.C, dy, before, arrays.steps)
    dB, losses = _launch_outer(cut, "B", arrays.B, arrays.x, own["after"], arrays.steps)
    dS, within = _launch_scores(cut, arrays, dy)
    add = lambda f, dS, v: jnp.einsum(f, dS, v, preferred_element_type=jnp.float32)
    chunked = lambda v: v.reshape(scan.batch, scan.chunks, CHUNK, *v.shape[2:])
    dC = dC + add("bcgij,bcjgn->bcign", dS, chunked(arrays.B)).reshape(dC.shape)
    dB = dB + add("bcgij,bcign->bcjgn", dS, chunked(arrays.C)).reshape(dB.shape)
    units = scan.batch, scan.heads * scan.slices, scan.chunks * STEPS
    product = own["after"].astype(jnp.float32) * before.astype(jnp.float32)
    of_states = product.reshape(scan.batch, scan.chunks, units[1], SLICE, scan.states)
    of_states = of_states.sum((-2, -1)).swapaxes(1, 2)
    of_states = of_states * jnp.repeat(jnp.exp2(arrays.steps[:, :, :, 0, -1]), scan.slices, axis=1)
    # Sums that a step carries past its end: of its own tokens, and of the state before it.
    halves = lambda v: v.reshape(*v.shape[:3], STEPS, STEP).sum(-1)
    carried = own.pop("carried").sum(-1).reshape(*of_states.shape, STEPS)
    last = carried + of_states[..., None]
    last = last + jnp.stack([halves(gains)[..., 1], halves(losses)[..., 0]], axis=-1)
    within = jnp.stack([within[..., 0, :], within[..., 1, :] + within[..., 2, :]], axis=-2)
    by_step = lambda v: v.reshape(*units, STEP)
    dc, ds = by_step(own["sums"][:, :, :, 0]), by_step(own["sums"][:, :, :, 1])
    dc = dc + by_step(gains) + by_step(within)
    return own | {"dB": dB, "dC": dC, "dc": dc, "ds": ds, "last": last.reshape(units)}


def _launch_own(scan: SsdTile, arrays: Any, dy: Any, ends: Any) -> dict[str, Any]:
    """dx, the sums of a unit's tokens, dh after each chunk, dh before the first, and dD."""
    dtype, N, f32 = dy.dtype, scan.states, jnp.float32
    like = jax.ShapeDtypeStruct
    tiles = {"x": (STEP, SLICE), "dy": (STEP, SLICE), "B": (STEP, N), "C": (STEP, N)}
    ring = _ring(scan.grid, 2 * STEP * STEP + 4 * WARPS * STEP, dtype, **tiles)
    of_heads = arrays.D is not None and arrays.D.ndim == 1
    units = scan.heads * scan.slices
    results = _launch(
        lambda refs, smem: _Backward(scan, ring, refs, smem, SsdUnit(scan, 0)).run(),
        "ssd_mma_bwd",
        {
            "x": arrays.x,
            "dy": dy,
            "steps": arrays.steps,
            "B": arrays.B,
            "C": arrays.C,
            "D": arrays.D,
            "initial": ends,
        },
        {
            "dx": like(arrays.x.shape, dtype),
            "sums": like((scan.batch, units, scan.chunks, 2, CHUNK), f32),
            "after": like((scan.batch, scan.chunks, scan.heads, scan.channels, N), dtype),
            "final": like((scan.batch, scan.parts, scan.heads, scan.channels, N), f32),
            "carried": like((scan.batch, units, scan.chunks * STEPS, LANES), f32),
            "skip": like((scan.batch, scan.parts, units, LANES), f32) if of_heads else None,
        },
        ring.scratch() | {"M": tile(STEP, STEP, dtype), "columns": plgpu.SMEM((WARPS, STEP), f32)},
        scan.grid,
    )
    results["dinitial"] = results.pop("final")[:, 0]
    skip = results.pop("skip")
    results["dD"] = None if skip is None else skip.sum((0, 1, 3)).reshape(scan.heads, -1).sum(-1)
    return results


class _Backward(_Sequence):
    def run(self) -> None:
        at, refs = self.at, self.refs

        def sources(n: Any) -> dict[str, Any]:
            t = self.number(n)
            found = {name: self.tokens(getattr(refs, name), t) for name in ("x", "dy")}
            found |= {name: self.weights(getattr(refs, name), t) for name in ("B", "C")}
            return found | {"steps": self.steps(t)}

        dh = first_state(self.scan, refs, at)
        dh, skip = self.ring.loop(self.smem, at.count, sources, self.step, (dh, lane_zeros()))
        self.end(dh)
        if refs.skip is not None:
            refs.skip.at[at.batch, at.part, self.unit()][...] = skip

    def number(self, n: Any) -> Any:
        """The step of the sequence that comes as the `n`-th."""
        return self.at.first + self.at.count - 1 - n

    def unit(self) -> Any:
        """The number of the unit among all groups'."""
        return self.at.head * self.scan.slices + lax.div(self.at.channels.start, SLICE)

    def step(self, n: Any, stage: dict[str, Any], carry: Any) -> Any:
        """Stores a step's dx and sums; returns dh, (P, N), before it, and what adds up to dD."""
        (dh, skip), refs, smem = carry, self.refs, self.smem
        t, dtype = self.number(n), stage["x"].dtype
        decays = StepDecays(stage["steps"], t)
        chunk = lax.div(t, STEPS)
        save = lambda: self.save(refs.after, chunk, dh)
        pl.when(lax.rem(t, STEPS) == STEPS - 1)(save)
        S, u = multiply(  # (i, j) and (p, j)
            [accumulator(STEP)] * 2, [stage["C"], dh], stage["B"], transposed=True
        )
        c, s = decays.sums(COLUMNS), decays.sizes(COLUMNS)
        exponents = over_rows(decays.sums(ROWS), STEP) - over_columns(c, STEP)
        store_tile(smem.M, (S * jnp.exp2(causal(exponents))).astype(dtype))
        x, dy = (load_left(stage[name], transposed=True) for name in ("x", "dy"))  # (p, j)
        u = u * over_columns(jnp.exp2(decays.last() - c), STEP)
        dy32, x32 = to_fp32(dy), to_fp32(x)
        carried = refs.carried.at[self.at.batch, self.unit(), t]
        carried[...] = lane_sums(x32 * u * over_columns(s, STEP))
        sync_tiles()
        (u,) = multiply([u], [dy], smem.M)
        dx = u * over_columns(s, STEP)
        if refs.D is not None:
            dx = dx + self.skip() * dy32
        store_tile(stage["x"], dx.astype(dtype), transposed=True)
        if refs.skip is not None:
            skip = skip + lane_sums(x32 * dy32)
        ds = x32 * u
        for first in range(0, STEP, 32):
            store_column_sums(smem.columns, first, ds[:, first : first + 32])
        entered = jnp.exp2(c - decays.before())
        weighted = (dy32 * over_columns(entered, STEP)).astype(dtype)
        (dh,) = multiply([dh * jnp.exp2(decays.total())], [weighted], stage["C"])
        sync_tiles()
        write_tile(stage["x"], self.tokens(refs.dx, t))
        ds = sum(plgpu.load(smem.columns.at[k], layout=ROWS) for k in range(WARPS))
        to = refs.sums.at[self.at.batch, self.unit(), chunk]
        own = pl.ds(lax.rem(t, STEPS) * STEP, STEP)
        to.at[0, own][...] = -ds * decays.sizes(ROWS)
        to.at[1, own][...] = ds
        return dh, skip


class _Chunk:
    """The chunk of a block, and its units of a group.

    Args:
      cut: of the launch.
      kinds: blocks of each chunk and split; `kind` says which one this is.
    """

    def __init__(self, cut: SsdBackwardTile, kinds: int = 1):
        scan, block = cut.scan, lax.axis_index(BLOCK)
        self._scan = scan
        self.kind, block = lax.rem(block, kinds), lax.div(block, kinds)
        self.group, rest = lax.rem(block, scan.groups), lax.div(block, scan.groups)
        self.split, rest = lax.rem(rest, cut.splits), lax.div(rest, cut.splits)
        self.chunk, self.batch = lax.rem(rest, scan.chunks), lax.div(rest, scan.chunks)
        self._first = self.split * cut.split_units
        self.count = jnp.minimum(cut.split_units, scan.units - self._first)

    def number(self, n: Any) -> Any:
        """The number of the `n`-th unit among all groups'."""
        return self.group * self._scan.units + self._first + n

    def tokens(self, ref: Any, n: Any, first: Any = 0, count: int = CHUNK) -> Any:
        """(count, 64) of the `n`-th unit's tokens in the chunk."""
        head, channels = locate(self._scan, self.group, self._first + n)
        return ref.at[self.batch, pl.ds(self.chunk * CHUNK + first, count), head, channels]

    def state(self, ref: Any, n: Any) -> Any:
        head, channels = locate(self._scan, self.group, self._first + n)
        return ref.at[self.batch, self.chunk, head, channels]

    def steps(self, ref: Any, n: Any) -> Any:
        head, _ = locate(self._scan, self.group, self._first + n)
        return ref.at[self.batch, head, self.chunk]

    def weights(self, ref: Any, first: Any = 0, count: int = CHUNK) -> Any:
        """(count, N) of B or C."""
        return ref.at[self.batch, pl.ds(self.chunk * CHUNK + first, count), self.group]


def _half(half: Any) -> Any:
    return pl.ds(half * STEP, STEP)


def _launch_outer(
    cut: SsdBackwardTile, role: str, weights: Any, tokens: Any, states: Any, steps: Any
) -> tuple[Any, Any]:
    """The sum over units of weighted tokens times states, and each unit's share times `weights`.

    Args:
      cut: of the launch.
      role: "C" for tokens weighted by exp(c), "B" by w.
      weights: C or B, (B, L, G, N).
      tokens: dy or x, (B, L, H, P).
      states: before or after each chunk, (B, chunks, H, P, N).
      steps: of the call.

    Returns:
      (B, L, G, N) and (B, units, chunks, CHUNK), in fp32.
    """
    scan, dtype, N = cut.scan, tokens.dtype, cut.scan.states
    ring = _ring(cut.grid, 2 * CHUNK * N, dtype, tokens=(CHUNK, SLICE), states=(SLICE, N))
    like, f32 = jax.ShapeDtypeStruct, jnp.float32
    parts = range(0, N, PART)

    def kernel(refs: Any, smem: Any) -> None:
        at = _Chunk(cut)
        start_copies([(at.weights(refs.weights), smem.weights)])

        def sources(n: Any) -> dict[str, Any]:
            own = {"tokens": at.tokens(refs.tokens, n), "states": at.state(refs.states, n)}
            return own | {"steps": at.steps(refs.steps, n)}

        def step(n: Any, stage: dict[str, Any], sums: Any) -> Any:
            lefts = []
            for half in range(STEPS):
                c = plgpu.load(stage["steps"].at[0, _half(half)], layout=ROWS)
                if role == "C":
                    weight = jnp.exp2(c)
                else:
                    sizes = plgpu.load(stage["steps"].at[1, _half(half)], layout=ROWS)
                    weight = jnp.exp2(stage["steps"][0, CHUNK - 1] - c) * sizes
                own = to_fp32(load_left(rows_of(stage["tokens"], half * STEP, STEP)))
                lefts.append((own * over_rows(weight, SLICE)).astype(dtype))
            shares = [accumulator(PART)] * STEPS
            ended = []
            for k, first in enumerate(parts):
                found = multiply([accumulator(PART)] * STEPS, lefts, stage["states"], first=first)
                for half, v in enumerate(found):
                    weight = load_left(
                        rows_of(smem.weights, half * STEP, STEP), columns=(first, PART)
                    )
                    shares[half] = shares[half] + v * to_fp32(weight)
                ended.append([a + v for a, v in zip(sums[k], found, strict=True)])
            to = refs.shares.at[at.batch, at.number(n), at.chunk]
            for half, share in enumerate(shares):
                to.at[_half(half)][...] = jnp.sum(share, axis=1)
            return ended

        begin = [[accumulator(PART)] * STEPS for _ in parts]
        ended = ring.loop(smem, at.count, sources, step, begin)
        for first, halves in zip(parts, ended, strict=True):
            for half, v in enumerate(halves):
                to = at.weights(refs.sums.at[at.split], half * STEP, STEP)
                store_matrix(to.at[:, pl.ds(first, PART)], v)

    results = _launch(
        kernel,
        f"ssd_mma_bwd_{role}",
        {"weights": weights, "tokens": tokens, "states": states, "steps": steps},
        {
            "sums": like((cut.splits, *weights.shape), f32),
            "shares": like((scan.batch, scan.heads * scan.slices, scan.chunks, CHUNK), f32),
        },
        ring.scratch() | {"weights": tile(CHUNK, N, dtype)},
        cut.grid,
    )
    return results["sums"].sum(0), results["shares"]


def _launch_scores(cut: SsdBackwardTile, arrays: Any, dy: Any) -> tuple[Any, Any]:
    """dS, (B, chunks, G, CHUNK, CHUNK) in 16 bits, and what tokens gain of M.

    The latter is (B, units, chunks, blocks, STEP), for the rows of each block in `HALVES`.
    """
    scan, dtype, N = cut.scan, dy.dtype, cut.scan.states
    ring = _ring(cut.grid * len(HALVES), 4 * STEP * N, dtype, x=(STEP, SLICE), dy=(STEP, SLICE))
    like, f32 = jax.ShapeDtypeStruct, jnp.float32

    def kernel(refs: Any, smem: Any) -> None:
        at = _Chunk(cut, len(HALVES))
        later, earlier = jnp.minimum(at.kind, 1), lax.div(at.kind, 2)
        start_copies(
            [
                (at.weights(refs.C, later * STEP, STEP), smem.C),
                (at.weights(refs.B, earlier * STEP, STEP), smem.B),
            ]
        )
        wait_for_copies()
        (S,) = multiply([accumulator(STEP)], [smem.C], smem.B, transposed=True)  # (i, j)
        diagonal = later == earlier

        def sources(n: Any) -> dict[str, Any]:
            return {
                "x": at.tokens(refs.x, n, earlier * STEP, STEP),
                "dy": at.tokens(refs.dy, n, later * STEP, STEP),
                "steps": at.steps(refs.steps, n),
            }

        def step(n: Any, stage: dict[str, Any], dS: Any) -> Any:
            load = lambda k, half, layout: plgpu.load(
                stage["steps"].at[k, _half(half)], layout=layout
            )
            (dM,) = multiply([accumulator(STEP)], [stage["dy"]], stage["x"], transposed=True)
            exponents = over_rows(load(0, later, ROWS), STEP)
            exponents = exponents - over_columns(load(0, earlier, COLUMNS), STEP)
            decay = jnp.exp2(jnp.where(diagonal, causal(exponents), exponents))
            dM = dM * over_columns(load(1, earlier, COLUMNS), STEP)
            M = (S * decay).astype(dtype)  # as it is rounded for dx
            to = refs.gains.at[at.batch, at.number(n), at.chunk, at.kind]
            to[...] = jnp.sum(dM * to_fp32(M), axis=1)
            return dS + dM * decay

        dS = ring.loop(smem, at.count, sources, step, accumulator(STEP))
        refs.dS.at[at.split, at.batch, at.chunk, at.group, at.kind][...] = dS

    results = _launch(
        kernel,
        "ssd_mma_bwd_scores",
        {"x": arrays.x, "dy": dy, "steps": arrays.steps, "B": arrays.B, "C": arrays.C},
        {
            "dS": like(
                (cut.splits, scan.batch, scan.chunks, scan.groups, len(HALVES), STEP, STEP), f32
            ),
            "gains": like(
                (scan.batch, scan.heads * scan.slices, scan.chunks, len(HALVES), STEP), f32
            ),
        },
        ring.scratch() | {name: tile(STEP, N, dtype) for name in ("B", "C")},
        cut.grid * len(HALVES),
    )
    dS = results["dS"].sum(0).astype(dtype)
    blocks = {at: dS[..., k, :, :] for k, at in enumerate(HALVES)}
    row = lambda i: [blocks.get((i, j), jnp.zeros_like(dS[..., 0, :, :])) for j in range(STEPS)]
    dS = jnp.concatenate([jnp.concatenate(row(i), axis=-1) for i in range(STEPS)], axis=-2)
    return dS, results["gains"]
