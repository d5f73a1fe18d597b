"""The Mosaic kernels of the selective scan.

A block is one warpgroup and works on LANES channels of one batch row, one channel per lane, through
one segment of the sequence: a (LANES,) array in the _ROW layout is one register, and what a lane
writes to shared memory in that layout only the same lane reads. The arrays of the tokens come
through a ring of two slots, copied by the TMA while the block works on the other slot; B and C are
read as scalars, the same for all lanes.

Where batch rows and channels are too few to fill the GPU, the sequence is cut into segments. A
first kernel finds, for every segment at once, what it passes on if nothing comes in, and the sum of
its step sizes, for the decay over a segment is exp(Σdt · A). Every block of the main kernel folds
the segments before it (in the backward: after it) into the state that it starts from.

Sums over channels (dB, dC) are shuffled within the warps, 32 values at a time, so that lane l is
left with the sum of value l; the four warps are added through shared memory, the blocks outside.

Pallas would put a barrier around every store. The kernels place their own instead (commit_smem),
where one lane reads what another, or the TMA, writes: before a slot is copied to again, and around
the sums over warps.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.mosaic import LANES, grid_axes, num_sms, shared_scalars, warp_sums
from jaxkern.ops.selective_scan.reference import CHUNK, Options, reference_bwd, reference_fwd

GROUP = 16
"""States that the backward works on at a time, in registers."""

MAX_STATES = 64
"""The forward holds two registers per state, the backward two rows in shared memory."""

_BLOCK, _BATCH, _SEGMENT = grid_axes("block", "batch", "segment")
_LOG2E = 1.4426950408889634
_ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class Segments:
    """`chunks` of the sequence in `count` segments of `length`, the last one perhaps shorter."""

    chunks: int
    length: int

    @property
    def count(self) -> int:
        return -(-self.chunks // self.length)

    def first(self, segment: Any) -> Any:
        return segment * self.length

    def size(self, segment: Any) -> Any:
        return jnp.minimum(self.length, self.chunks - segment * self.length)


def forward_segments(columns: int, chunks: int) -> Segments:
    """How the forward cuts a sequence of `chunks`, for `columns` blocks of channels and batch rows.

    Segments cost a second pass of exponentials. With 128 columns on an H200's 132 multiprocessors
    one segment takes 0.30 ms at (8, 2048, 2048, 16) and four 0.41; with 16 columns at (1, 16384,
    2048, 16) one takes 2.5, 16 segments 0.47.
    """
    if 4 * columns >= 3 * num_sms():
        return Segments(chunks, chunks)
    wanted = min(2 * num_sms() // columns, chunks // 2)
    return Segments(chunks, -(-chunks // max(1, wanted)))


def backward_segments(columns: int, chunks: int) -> Segments:
    """The same for the backward, of which two blocks are resident on a multiprocessor.

    The time is that of the waves of blocks, each as long as its segment; the pass that finds what
    the segments hand on adds a fifth. Fewer segments win where the waves are within 3%.
    """
    resident = 2 * num_sms()

    def cost(count: int) -> float:
        return -(-columns * count // resident) / count * (1.0 if count == 1 else 1.2)

    counts = range(1, max(2, min(64, chunks // 4 + 1)))
    best = min(cost(count) for count in counts)
    count = next(count for count in counts if cost(count) <= 1.03 * best)
    return Segments(chunks, -(-chunks // count))


class Arrays(NamedTuple):
    """The arguments padded to whole chunks and blocks; D and dt_bias are always there."""

    x: Any  # (B, L, D)
    dt: Any  # (B, L, D)
    rate: Any  # (N, D), fp32: A · log2(e), so that a decay is one exp2
    B: Any  # (B, L, N), fp32
    C: Any  # (B, L, N), fp32
    D: Any  # (D,), fp32
    dt_bias: Any  # (D,), fp32
    z: Any  # (B, L, D); without a gate x stands in, unread


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the kernels know about a call while they are compiled."""

    length: int  # of the sequence, before padding
    padded: int
    states: int
    gated: bool
    softplus: bool
    exact: bool  # fp32 tokens: no shortcut in softplus and sigmoid
    segments: Segments
    interpret: bool

    def step_size(self, raw: jax.Array, t: Any) -> jax.Array:
        """dt after the softplus; 0 beyond the end of the sequence, where it keeps the state."""
        dt = softplus(raw, self.exact) if self.softplus else raw
        return dt if self.length == self.padded else dt * jnp.where(t < self.length, 1.0, 0.0)

    def scalars(self, ref: Any, count: int) -> list[Any]:
        return shared_scalars(ref, count, interpret=self.interpret)


def _prepare(options, segments, x, dt, A, B, C, D, z, dt_bias) -> tuple[Scan, Arrays]:
    f32 = jnp.float32
    channels = jnp.zeros(x.shape[-1:], f32)

    def tokens(v):
        return _pad(v, (1, CHUNK), (2, LANES))

    def weights(v):
        # Scalars are read four at a time.
        return _pad(v.astype(f32), (1, CHUNK), (2, 4))

    def per_channel(v):
        return _pad(channels if v is None else v.astype(f32), (0, LANES))

    length, states = x.shape[1], A.shape[1]
    exact = any(v is not None and v.dtype == jnp.float32 for v in (x, dt, z))
    x = tokens(x)
    arrays = Arrays(
        x=x,
        dt=tokens(dt),
        rate=_pad(A.astype(f32).T * _LOG2E, (0, 4), (1, LANES)),
        B=weights(B),
        C=weights(C),
        D=per_channel(D),
        dt_bias=per_channel(dt_bias),
        z=x if z is None else tokens(z),
    )
    columns = x.shape[0] * (x.shape[2] // LANES)
    scan = Scan(
        length=length,
        padded=x.shape[1],
        states=states,
        gated=z is not None,
        softplus=options.dt_softplus,
        exact=exact,
        segments=segments(columns, x.shape[1] // CHUNK),
        interpret=options.mode == "interpret",
    )
    return scan, arrays


def _pad(v: Any, *multiples: tuple[int, int]) -> Any:
    """`v` with zeros after its end along each (axis, multiple)."""
    widths = [(0, 0)] * v.ndim
    for axis, multiple in multiples:
        widths[axis] = (0, -v.shape[axis] % multiple)
    return jnp.pad(v, widths)


def _load(ref: Any) -> jax.Array:
    """A (LANES,) row of shared or global memory, one element per lane, in fp32."""
    return plgpu.load(ref, layout=_ROW, optimized=False).astype(jnp.float32)


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), _ROW)


def _block() -> tuple[Any, Any, Any]:
    """This block's batch row, its number among the blocks of channels, and its channels."""
    block = lax.axis_index(_BLOCK)
    return lax.axis_index(_BATCH), block, pl.ds(block * LANES, LANES)


def softplus(v: jax.Array, exact: bool) -> jax.Array:
    """max(v, 0) + log1p(e), e = exp(−|v|), to fp32 accuracy relative to the result, or to 1e-5."""
    if not exact:
        e = jnp.exp2(-_LOG2E * jnp.abs(v))
        # The logarithm is exact to 1e-7, not relative to a small result.
        small = e * (1 - e * (1 / 2 - e * (1 / 3)))
        return jnp.maximum(v, 0.0) + jnp.where(e < 1 / 64, small, jnp.log(1 + e))
    e = _exp_of_minus(jnp.abs(v))
    # log1p(e) = 2 · artanh(s), s = e / (2 + e) <= 1/3, by its series up to s^15.
    s = e * _reciprocal(2 + e)
    square = s * s
    series = 1 / 15
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(v, 0.0) + 2 * s * series


def softplus_slope(dt: jax.Array) -> jax.Array:
    """softplus'(v) = 1 − exp(−dt) from dt = softplus(v), by its series where that would cancel."""
    series = 1 / 720
    for k in (120, 24, 6, 2, 1):
        series = 1 / k - dt * series
    return jnp.where(dt < 0.25, dt * series, 1 - jnp.exp2(-_LOG2E * dt))


def sigmoid(v: jax.Array, exact: bool) -> jax.Array:
    """1 / (1 + exp(−v)), to fp32 accuracy relative to the result, or with fast division."""
    if not exact:
        return jax.nn.sigmoid(v)
    e = _exp_of_minus(jnp.abs(v))
    inverse = _reciprocal(1 + e)
    return jnp.where(v < 0, e * inverse, inverse)


def _exp_of_minus(a: jax.Array) -> jax.Array:
    """exp(−a), a >= 0, by exp2 in two parts, the first product exact.

    Rounding a · log2(e) as a whole would cost up to 1e-6 of the result.
    """
    a = jnp.minimum(a, 120.0)  # beyond, the result is 0 in fp32
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (_LOG2E - log2e_head) + (a - head) * _LOG2E
    return jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)


def _reciprocal(d: jax.Array) -> jax.Array:
    """1 / d after a Newton step: with approx_math the division alone is 2 units off."""
    r = 1 / d
    return r * (2 - d * r)


def _unroll(states: int) -> int:
    """Steps unrolled in a loop: at N = 16 four make the forward 10% faster; code grows with N."""
    return 4 if states <= 16 else 2 if states <= 32 else 1


class Ring:
    """Two slots in shared memory for `steps` of some token arrays, filled by the TMA."""

    def __init__(self, steps: int, **arrays: Any):
        self.steps = steps
        self.arrays = arrays

    def scratch(self) -> dict[str, Any]:
        slots = {
            name: plgpu.SMEM((2, *self._tile(array)), array.dtype)
            for name, array in self.arrays.items()
        }
        arrived = plgpu.Barrier(num_arrivals=len(slots), num_barriers=2)
        return {**slots, "arrived": arrived}

    def _tile(self, array: Any) -> tuple[int, int]:
        """(steps, channels or states) of tokens; (states, channels) of saved states."""
        if array.ndim == 4:
            return array.shape[2], LANES
        return self.steps, min(array.shape[2], LANES)

    def stream(self, smem: Any, refs: dict[str, Any], where: Any, count: Any, body: Any, init: Any):
        """``init = body(i, slot, init)`` for i below `count`, with tile ``where(i)`` in `slot`."""
        batch, _, channels = _block()

        def fetch(i, slot):
            tile = where(i)
            time = pl.ds(tile * self.steps, self.steps)
            for name, ref in refs.items():
                if len(ref.shape) == 4:
                    source = ref.at[batch, tile, :, channels]
                elif name in ("B", "C"):
                    source = ref.at[batch, time]
                else:
                    source = ref.at[batch, time, channels]
                target = getattr(smem, name)
                plgpu.copy_gmem_to_smem(source, target.at[slot], smem.arrived.at[slot])

        fetch(0, 0)

        def run(i, carry):
            slot = lax.rem(i, 2)
            plgpu.commit_smem()  # all lanes are done with the other slot

            @pl.when(i + 1 < count)
            def _():
                fetch(i + 1, 1 - slot)

            plgpu.barrier_wait(smem.arrived.at[slot])
            return body(i, slot, carry)

        return lax.fori_loop(0, count, run, init)


def _ring(scan: Scan, steps: int, arrays: Arrays, names: str, **more: Any) -> Ring:
    chosen = {n: getattr(arrays, n) for n in names.split() if n != "z" or scan.gated}
    return Ring(steps, **chosen, **more)


def _chunks_per_tile(segments: Segments) -> int:
    """Chunks that the forward has in shared memory at a time."""
    return next(k for k in (4, 2, 1) if segments.length % k == 0 and segments.chunks % k == 0)


# Forward


def launch_fwd(options: Options, save: bool, x, dt, A, B, C, D, z, dt_bias) -> tuple[Any, Any]:
    """Output (B, L, D), and with `save` the states before every chunk, (B, L / CHUNK, N, D)."""
    if x.size == 0:
        return reference_fwd(options, save, x, dt, A, B, C, D, z, dt_bias)
    scan, arrays = _prepare(options, forward_segments, x, dt, A, B, C, D, z, dt_bias)
    batch, padded, channels = arrays.x.shape
    passed = _launch_fwd_carry(scan, arrays) if scan.segments.count > 1 else ()
    out_type = [jax.ShapeDtypeStruct(arrays.x.shape, x.dtype)]
    if save:
        shape = (batch, padded // CHUNK, scan.states, channels)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    ring = _ring(scan, _chunks_per_tile(scan.segments) * CHUNK, arrays, "x dt B C z")
    out, *saved = plgpu.kernel(
        functools.partial(_fwd_kernel, scan, ring),
        out_type=tuple(out_type),
        scratch_types=ring.scratch(),
        grid=(channels // LANES, batch, scan.segments.count),
        grid_names=(_BLOCK, _BATCH, _SEGMENT),
        kernel_name="selective_scan_fwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays, *passed)
    length, dim = x.shape[1:]
    return out[:, :length, :dim], saved[0][..., :dim] if save else None


def _fwd_kernel(scan, ring, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    arrays, refs = Arrays(*refs[:8]), refs[8:]
    passed, (out_ref, *states_ref) = _split_passed(scan, refs)
    batch, _, channels = _block()
    segment = lax.axis_index(_SEGMENT)
    per_tile = ring.steps // CHUNK
    first = scan.segments.first(segment) // per_tile
    rate = [_load(arrays.rate.at[n, channels]) for n in range(scan.states)]
    D, dt_bias = _load(arrays.D.at[channels]), _load(arrays.dt_bias.at[channels])

    def run_tile(i, slot, h):
        def run_chunk(c, h):
            chunk = (first + i) * per_tile + c
            for n in range(scan.states if states_ref else 0):
                states_ref[0][batch, chunk, n, channels] = h[n]

            def step(k, h):
                t = c * CHUNK + k
                token = chunk * CHUNK + k
                x = _load(smem.x.at[slot, t])
                dt = scan.step_size(_load(smem.dt.at[slot, t]) + dt_bias, token)
                B = scan.scalars(smem.B.at[slot, t], scan.states)
                C = scan.scalars(smem.C.at[slot, t], scan.states)
                dtx, y = dt * x, D * x
                h = list(h)
                for n in range(scan.states):
                    h[n] = jnp.exp2(dt * rate[n]) * h[n] + dtx * B[n]
                    y = y + h[n] * C[n]
                if scan.gated:
                    z = _load(smem.z.at[slot, t])
                    y = y * z * sigmoid(z, scan.exact)
                out_ref[batch, token, channels] = y.astype(out_ref.dtype)
                return tuple(h)

            return lax.fori_loop(0, CHUNK, step, h, unroll=_unroll(scan.states))

        return lax.fori_loop(0, per_tile, run_chunk, h)

    def fold(s, h):
        total = _load(passed[1].at[s, batch, channels])
        return tuple(
            _load(passed[0].at[s, batch, n, channels]) + jnp.exp2(total * rate[n]) * h[n]
            for n in range(scan.states)
        )

    h = tuple(_zeros() for _ in range(scan.states))
    if passed:
        h = lax.fori_loop(0, segment, fold, h)
    refs = {name: getattr(arrays, name) for name in ring.arrays}
    count = scan.segments.size(segment) // per_tile
    ring.stream(smem, refs, lambda i: first + i, count, run_tile, h)


def _split_passed(scan: Scan, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """References to what segments pass on, (S − 1, B, N, D) and (S − 1, B, D), and the others."""
    return (refs[:2], refs[2:]) if scan.segments.count > 1 else ((), refs)


def _launch_carry(scan: Scan, arrays: Arrays, ring: Ring, kernel: Any, name: str, *more: Any):
    batch, _, channels = arrays.x.shape
    between = scan.segments.count - 1
    return plgpu.kernel(
        functools.partial(kernel, scan, ring),
        out_type=(
            jax.ShapeDtypeStruct((between, batch, scan.states, channels), jnp.float32),
            jax.ShapeDtypeStruct((between, batch, channels), jnp.float32),
        ),
        scratch_types=ring.scratch(),
        grid=(channels // LANES, batch, between),
        grid_names=(_BLOCK, _BATCH, _SEGMENT),
        kernel_name=name,
        compiler_params=_COMPILER_PARAMS,
    )(*arrays, *more)


def _launch_fwd_carry(scan: Scan, arrays: Arrays):
    """The last state of every segment but the last, from zeros, and the sum of its dt."""
    ring = _ring(scan, _chunks_per_tile(scan.segments) * CHUNK, arrays, "x dt B")
    return _launch_carry(scan, arrays, ring, _fwd_carry_kernel, "selective_scan_fwd_carry")


def _fwd_carry_kernel(scan, ring, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    arrays, (h_ref, total_ref) = Arrays(*refs[:8]), refs[8:]
    batch, _, channels = _block()
    segment = lax.axis_index(_SEGMENT)
    per_tile = ring.steps // CHUNK
    first = scan.segments.first(segment) // per_tile
    rate = [_load(arrays.rate.at[n, channels]) for n in range(scan.states)]
    dt_bias = _load(arrays.dt_bias.at[channels])

    def run_tile(i, slot, carry):
        del i  # a segment that passes on holds no padding

        def step(t, carry):
            total, h = carry
            dt = scan.step_size(_load(smem.dt.at[slot, t]) + dt_bias, 0)
            dtx = dt * _load(smem.x.at[slot, t])
            B = scan.scalars(smem.B.at[slot, t], scan.states)
            h = tuple(jnp.exp2(dt * rate[n]) * h[n] + dtx * B[n] for n in range(scan.states))
            return total + dt, h

        return lax.fori_loop(0, ring.steps, step, carry, unroll=_unroll(scan.states))

    refs = {name: getattr(arrays, name) for name in ring.arrays}
    init = _zeros(), tuple(_zeros() for _ in range(scan.states))
    count = scan.segments.length // per_tile
    total, h = ring.stream(smem, refs, lambda i: first + i, count, run_tile, init)
    total_ref[segment, batch, channels] = total
    for n in range(scan.states):
        h_ref[segment, batch, n, channels] = h[n]


# Backward


class Gradients(NamedTuple):
    """What the backward kernel writes; sums over channels, batch or time as one part per block."""

    dx: Any  # (B, L, D)
    ddt: Any  # (B, L, D)
    dA: Any  # (S, B, N, D), fp32
    sums: Any  # (D / LANES, B, L / CHUNK, N / GROUP, CHUNK, 32), fp32: see _sums
    dD: Any  # (S, B, D), fp32
    ddt_bias: Any  # (S, B, D), fp32
    dz: Any = None  # (B, L, D)


def launch_bwd(options: Options, x, dt, A, B, C, D, z, dt_bias, states, dout) -> tuple[Any, ...]:
    """The gradients in the order of the arguments; those that are sums in fp32."""
    if x.size == 0:
        return reference_bwd(options, x, dt, A, B, C, D, z, dt_bias, states, dout)
    f32 = jnp.float32
    scan, arrays = _prepare(options, backward_segments, x, dt, A, B, C, D, z, dt_bias)
    batch, padded, channels = arrays.x.shape
    blocks, chunks, n = channels // LANES, padded // CHUNK, scan.states
    segments = scan.segments.count
    groups = -(-n // GROUP)
    states = _pad(states, (3, LANES))
    dout = _pad(dout, (1, CHUNK), (2, LANES))
    passed = _launch_bwd_carry(scan, arrays, dout) if segments > 1 else ()
    shape = jax.ShapeDtypeStruct
    # Shared memory has no room for two slots of the saved states of several groups.
    more = {"before": states} if groups == 1 else {}
    ring = _ring(scan, CHUNK, arrays, "x dt B C z", dout=dout, **more)
    rows = plgpu.SMEM((CHUNK, LANES), f32)
    scratch = ring.scratch() | {
        "h": plgpu.SMEM((CHUNK - (groups == 1), min(n, GROUP), LANES), f32),
        **dict.fromkeys(("step", "dy", "sums"), rows),
    }
    if groups > 1:
        scratch |= dict.fromkeys(("y", "dh_b", "v_a"), rows)
        scratch |= dict.fromkeys(("dh", "dA"), plgpu.SMEM((n, LANES), f32))
    grads = plgpu.kernel(
        functools.partial(_bwd_kernel, scan, ring),
        out_type=(
            shape(arrays.x.shape, x.dtype),
            shape(arrays.x.shape, dt.dtype),
            shape((segments, batch, n, channels), f32),
            shape((blocks, batch, chunks, groups, CHUNK, 32), f32),
            shape((segments, batch, channels), f32),
            shape((segments, batch, channels), f32),
            *([shape(arrays.x.shape, z.dtype)] if scan.gated else []),
        ),
        scratch_types=scratch,
        grid=(blocks, batch, segments),
        grid_names=(_BLOCK, _BATCH, _SEGMENT),
        kernel_name="selective_scan_bwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays, *passed, states, dout)
    g = Gradients(*grads)
    length, dim = x.shape[1:]
    dB, dC = _sums(scan, g.sums)
    return (
        g.dx[:, :length, :dim],
        g.ddt[:, :length, :dim],
        g.dA.sum((0, 1)).T[:dim],
        dB,
        dC,
        None if D is None else g.dD.sum((0, 1))[:dim],
        g.dz[:, :length, :dim] if scan.gated else None,
        None if dt_bias is None else g.ddt_bias.sum((0, 1))[:dim],
    )


def _group(scan: Scan, g: int) -> range:
    return range(g * GROUP, min(scan.states, (g + 1) * GROUP))


def _width(group: range) -> int:
    """States of a group, up to a power of two: what warp_sums takes."""
    return 1 << (len(group) - 1).bit_length()


def _sums(scan: Scan, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dB and dC, (B, L, N), from the sums of each block: fixed order, fp32."""
    total = parts.sum(0)  # (B, L / CHUNK, groups, CHUNK, 32)
    dB, dC = [], []
    for g in range(total.shape[2]):
        group = _group(scan, g)
        width = _width(group)
        values = total[:, :, g].reshape(total.shape[0], scan.padded, 2 * width, -1)[..., 0]
        dB.append(values[..., : len(group)])
        dC.append(values[..., width : width + len(group)])
    return tuple(jnp.concatenate(v, -1)[:, : scan.length] for v in (dB, dC))  # type: ignore


def _launch_bwd_carry(scan: Scan, arrays: Arrays, dout: jax.Array):
    """What every segment but the first passes to the one before, and the sum of its dt."""
    ring = _ring(scan, CHUNK, arrays, "dt C z", dout=dout)
    return _launch_carry(scan, arrays, ring, _bwd_carry_kernel, "selective_scan_bwd_carry", dout)


def _bwd_carry_kernel(scan, ring, *refs, **scratch):
    """Σ_t C[t] · dy[t] · Π a over the segment's steps up to t = Σ_t C[t] · dy[t] · exp(A · Σdt)."""
    smem = types.SimpleNamespace(**scratch)
    arrays, (dout_ref, dh_ref, total_ref) = Arrays(*refs[:8]), refs[8:]
    batch, _, channels = _block()
    between = lax.axis_index(_SEGMENT)
    first = scan.segments.first(between + 1)
    rate = [_load(arrays.rate.at[n, channels]) for n in range(scan.states)]
    dt_bias = _load(arrays.dt_bias.at[channels])

    def run_chunk(i, slot, carry):
        def step(t, carry):
            total, dh = carry
            token = (first + i) * CHUNK + t
            total = total + scan.step_size(_load(smem.dt.at[slot, t]) + dt_bias, token)
            dy, _ = _gated(scan, smem, slot, t)
            C = scan.scalars(smem.C.at[slot, t], scan.states)
            dh = tuple(dh[n] + jnp.exp2(total * rate[n]) * (dy * C[n]) for n in range(scan.states))
            return total, dh

        return lax.fori_loop(0, CHUNK, step, carry, unroll=_unroll(scan.states))

    refs = {name: getattr(arrays, name, dout_ref) for name in ring.arrays}
    init = _zeros(), tuple(_zeros() for _ in range(scan.states))
    count = scan.segments.size(between + 1)
    total, dh = ring.stream(smem, refs, lambda i: first + i, count, run_chunk, init)
    total_ref[between, batch, channels] = total
    for n in range(scan.states):
        dh_ref[between, batch, n, channels] = dh[n]


def _gated(scan: Scan, smem: Any, slot: Any, t: Any) -> tuple[jax.Array, Any]:
    """dy = dout · silu(z), and of z what dz = dout · y · silu'(z) needs: dout · silu'(z)."""
    dout = _load(smem.dout.at[slot, t])
    if not scan.gated:
        return dout, None
    z = _load(smem.z.at[slot, t])
    gate = sigmoid(z, scan.exact)
    return dout * z * gate, dout * (gate * (1 + z * (1 - gate)))


def _bwd_kernel(scan, ring, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    arrays, refs = Arrays(*refs[:8]), refs[8:]
    passed, (states_ref, dout_ref, *refs) = _split_passed(scan, refs)
    grads = Gradients(*refs)
    groups = -(-scan.states // GROUP)
    batch, block, channels = _block()
    segment = lax.axis_index(_SEGMENT)
    first, count = scan.segments.first(segment), scan.segments.size(segment)
    D, dt_bias = _load(arrays.D.at[channels]), _load(arrays.dt_bias.at[channels])

    def rates(group):
        return [_load(arrays.rate.at[n, channels]) for n in group]

    # dh and dA of a single group stay in registers from chunk to chunk; of several, they wait their
    # turn in shared memory.
    def put(group, dh, dA):
        if groups == 1:
            return dh, dA
        for k, n in enumerate(group):
            smem.dh[n] = dh[k]
            smem.dA[n] = dA[k]
        return ()

    def get(group, kept):
        if groups == 1:
            return kept
        return tuple(tuple(_load(rows.at[n]) for n in group) for rows in (smem.dh, smem.dA))

    def incoming(group):
        """dh as the segments after this one pass it on."""

        def fold(i, dh):
            s = scan.segments.count - 2 - i
            total = _load(passed[1].at[s, batch, channels])
            return tuple(
                _load(passed[0].at[s, batch, n, channels]) + jnp.exp2(total * r) * dh[k]
                for k, (n, r) in enumerate(zip(group, rates(group), strict=True))
            )

        dh = tuple(_zeros() for _ in group)
        if passed:
            dh = lax.fori_loop(0, scan.segments.count - 1 - segment, fold, dh)
        return dh

    def run_chunk(i, slot, carry):
        kept, sums = carry
        for g in range(groups):
            kept, sums = run_group(first + count - 1 - i, slot, g, kept, sums)
        return kept, sums

    def run_group(c, slot, g, kept, sums):
        """A group of states through the chunk: up, to recompute them, and down with their dh."""
        group = _group(scan, g)
        each = range(len(group))
        is_first, is_last = g == 0, g == groups - 1
        rate = rates(group)

        def weights(ref, t):
            aligned = -(-len(group) // 4) * 4
            return scan.scalars(ref.at[slot, t, pl.ds(g * GROUP, aligned)], aligned)

        def before():
            if groups == 1:
                return tuple(_load(smem.before.at[slot, n]) for n in group)
            # Under shard_map a value read from an argument is typed as varying over the mesh and a
            # computed one is not; a loop's carry needs one type.
            return tuple(1.0 * _load(states_ref.at[batch, c, n, channels]) for n in group)

        def up(t, h, row):
            x = _load(smem.x.at[slot, t])
            dy, dsilu = None, None
            if is_first or is_last:
                dy, dsilu = _gated(scan, smem, slot, t)
            if is_first:
                raw = _load(smem.dt.at[slot, t]) + dt_bias
                dt = scan.step_size(raw, c * CHUNK + t)
                smem.step[t] = dt
                smem.dy[t] = dy
                y = D * x
            else:
                dt = _load(smem.step.at[t])
                y = _load(smem.y.at[t])
            B = weights(smem.B, t)
            C = weights(smem.C, t) if scan.gated else []
            dtx = dt * x
            h = list(h)
            for k in each:
                if row is not None:
                    smem.h[row, k] = h[k]
                h[k] = jnp.exp2(dt * rate[k]) * h[k] + dtx * B[k]
                if scan.gated:
                    y = y + h[k] * C[k]
            if not is_last:
                smem.y[t] = y
            elif dsilu is not None:
                token = (batch, c * CHUNK + t, channels)
                grads.dz[token] = (dsilu * y).astype(grads.dz.dtype)
            return tuple(h)

        # The states before each step go to smem.h. That before the first is in the ring already;
        # with one group, shared memory limits a multiprocessor's blocks, and it stays there.
        if groups == 1:
            h = up(0, before(), None)
            after = lax.fori_loop(1, CHUNK, lambda t, h: up(t, h, t - 1), h)
        else:
            after = lax.fori_loop(0, CHUNK, lambda t, h: up(t, h, t), before())

        def down(t, carry, h):
            dh, dA, after, sums = (list(v) for v in carry)
            dt, dy = _load(smem.step.at[t]), _load(smem.dy.at[t])
            x = _load(smem.x.at[slot, t])
            dh_b, v_a = 0.0, 0.0
            if not is_first:
                dh_b, v_a = _load(smem.dh_b.at[t]), _load(smem.v_a.at[t])
            B, C = weights(smem.B, t), weights(smem.C, t)
            dtx = dt * x
            dB, dC = ([_zeros()] * _width(group) for _ in range(2))
            for k in each:
                dh[k] = dh[k] + dy * C[k]
                dB[k] = dh[k] * dtx
                dC[k] = dy * after[k]
                dh_b = dh_b + dh[k] * B[k]
                dh[k] = dh[k] * jnp.exp2(dt * rate[k])
                v = dh[k] * h[k]
                v_a = v_a + v * rate[k]
                dA[k] = dA[k] + v * dt
            smem.sums[t] = warp_sums([*dB, *dC], interpret=scan.interpret)
            if not is_last:
                smem.dh_b[t] = dh_b
                smem.v_a[t] = v_a
            else:
                token = (batch, c * CHUNK + t, channels)
                grads.dx[token] = (dt * dh_b + D * dy).astype(grads.dx.dtype)
                ddt = v_a * (1 / _LOG2E) + x * dh_b
                if scan.softplus:
                    ddt = ddt * softplus_slope(dt)
                grads.ddt[token] = ddt.astype(grads.ddt.dtype)
                sums = [sums[0] + dy * x, sums[1] + ddt]
            return tuple(dh), tuple(dA), tuple(h), tuple(sums)

        def from_smem(i, carry):
            t = CHUNK - 1 - i
            row = t - (groups == 1)
            return down(t, carry, [_load(smem.h.at[row, k]) for k in each])

        carry = (*get(group, kept), after, sums)
        carry = lax.fori_loop(0, CHUNK - (groups == 1), from_smem, carry)
        if groups == 1:
            carry = down(0, carry, before())
        dh, dA, _, sums = carry
        plgpu.commit_smem()
        layout = plgpu.Layout.WG_STRIDED((CHUNK, 32), vec_size=2)
        warps = [
            plgpu.load(smem.sums.at[:, pl.ds(32 * w, 32)], layout=layout, optimized=False)
            for w in range(LANES // 32)
        ]
        grads.sums[block, batch, c, g] = sum(warps)
        if not is_last:
            plgpu.commit_smem()
        return put(group, dh, dA), sums

    init: Any = ()
    for g in range(groups):
        group = _group(scan, g)
        init = put(group, incoming(group), tuple(_zeros() for _ in group))
    refs = {"dout": dout_ref, "before": states_ref} | arrays._asdict()
    kept, (dD, ddt_bias) = ring.stream(
        smem,
        {name: refs[name] for name in ring.arrays},
        lambda i: first + count - 1 - i,
        count,
        run_chunk,
        (init, (_zeros(), _zeros())),
    )
    grads.dD[segment, batch, channels] = dD
    grads.ddt_bias[segment, batch, channels] = ddt_bias
    for g in range(groups):
        group = _group(scan, g)
        for n, dA in zip(group, get(group, kept)[1], strict=True):
            grads.dA[segment, batch, n, channels] = dA
