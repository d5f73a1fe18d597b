"""Linear scan: the first-order recurrence at the heart of S5, the RG-LRU and minGRU.

Forward, for a batch row and a channel, h[−1] the initial state or 0:

    h[t] = a[t] · h[t−1] + b[t]

Backward, for the cotangent dout, time running down from dh[L] = 0:

    dh[t] = dout[t] + a[t+1] · dh[t+1]          db[t] = dh[t]          da[t] = dh[t] · h[t−1]
    dh[−1] = a[0] · dh[0]

With ``reverse`` time runs the other way, in both.

Saved for the backward: a, b and the state before every 32nd step in fp32 (every 16th if a or b is
fp32), 1/16 of the bytes of b. The states in between are recomputed from a and b, so that no
gradient sees h rounded to 16 bits.

Bytes per element, in units of its size: 3 forward (read a and b, write h), 5 backward (read a, b
and dout, write da and db), and 1/16 for the states. With 2 operations per element forward and 5
backward, both passes wait for memory alone. Where batch rows and channels are too few to fill the
GPU, the sequence is cut into segments, at 2 more: at most 60% and 71% of the copy bandwidth are of
use then.

On an H200 (bf16, JAX 0.11.2) the forward runs at 96% of the copy bandwidth at (8, 2048, 2048) and
94% at (4, 4096, 5120), the backward at 81%. A Triton kernel with ``tl.associative_scan``
(jax-triton 0.3.1, Triton 3.6) reached 46% and 42% forward, in fp32 87% where this one has 93%, and
11% at (1, 65536, 1024) where this one has 56%; it was ahead where this one has to pad: 38 against
94 µs at (64, 2048, 64), 61 against 103 at (8, 2048, 1023). So there is no Triton implementation.

Sources: Blelloch, Prefix Sums and Their Applications, 1990; Smith, Warrington and Linderman,
Simplified State Space Layers for Sequence Modeling, 2022, arXiv:2208.04933.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.arguments import check_floating
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding, named
from jaxkern.core.mosaic import LANES, grid_axes, launch_kernel, num_sms


def linear_scan(
    a: jax.Array,
    b: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Run a diagonal linear recurrence along time.

    .. math:: h_t = a_t \, h_{t-1} + b_t

    for every batch row and channel, from :math:`h_{-1}` = `initial_state`; with `reverse`,
    :math:`h_t = a_t \, h_{t+1} + b_t` from :math:`h_L` = `initial_state`. The state is fp32,
    whatever the dtypes; the result is rounded once, to the dtype of `b`, which it adds up.

    For the backward, `a`, `b` and a few fp32 states are kept; the others are recomputed, so that no
    gradient is taken at a rounded state. A NaN stays in its channel of its batch row, and reaches
    only later steps (with `reverse`, earlier ones). ``a[t] = 0`` forgets a finite state;
    :math:`0 \cdot \infty` is NaN, as everywhere in JAX. The bits are the same on every run.

    The kernels may cut a long sequence into segments and multiply `a` over each: a product that
    underflows is 0, and one that overflows, with some \|a\| > 1, is infinite, and can make a state
    infinite or NaN that a loop over the steps would keep finite. It cannot where that state is 0 or
    is forgotten within the segment. Plain JAX on an NVIDIA GPU multiplies `a` over any range of
    steps, and there a state of 0 and a reset are no exception.

    On a mesh, batch and channels may be split between devices; a split L is gathered.

    Args:
      a: (B, L, D), bfloat16, float16 or float32; complex with a complex `b`, in plain JAX only.
      b: (B, L, D), any of those dtypes.
      initial_state: (B, D), any of those dtypes; ``None`` stands for zeros.
      reverse: whether time runs from the end to the start.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest: the kernels on an
        NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      (B, L, D), the dtype of `b`: all states but the initial one.

    Raises:
      TypeError: an argument is not an array of a floating or complex dtype, or `b` is real and
        another argument complex.
      ValueError: shapes do not fit, or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> a, b = jnp.full((1, 4, 1), 0.5), jnp.ones((1, 4, 1))
      >>> jaxkern.linear_scan(a, b)[0, :, 0]
      Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32)

    References:
      Smith, Warrington and Linderman, `Simplified State Space Layers for Sequence Modeling
      <https://arxiv.org/abs/2208.04933>`_, 2022. De et al., `Griffin
      <https://arxiv.org/abs/2402.19427>`_, 2024. Feng et al., `Were RNNs All We Needed?
      <https://arxiv.org/abs/2410.01201>`_, 2024.
    """
    a, b, initial_state = _check(a, b, initial_state)
    mode = resolve(implementation, _unsupported(a, b, initial_state), op="linear_scan")
    if mode == "xla":
        plain = linear_scan_reference(a, b, initial_state, reverse=bool(reverse))
        return named("linear_scan", plain)
    return _linear_scan_jit(a, b, initial_state, _Options(bool(reverse), mode))


def _check(a: Any, b: Any, initial_state: Any) -> tuple[Any, Any, Any]:
    a, b = _check_inexact("a", a), _check_inexact("b", b)
    if a.ndim != 3:
        raise ValueError(f"a must have shape (B, L, D), got {a.shape}")
    if b.shape != a.shape:
        raise ValueError(f"b must have shape {a.shape} = (B, L, D) of a; got {b.shape}")
    if initial_state is not None:
        initial_state = _check_inexact("initial_state", initial_state)
        state = (a.shape[0], a.shape[2])
        if initial_state.shape != state:
            raise ValueError(
                f"initial_state must have shape {state} = (B, D) of a; got {initial_state.shape}"
            )
    for name, array in (("a", a), ("initial_state", initial_state)):
        if array is not None and jnp.iscomplexobj(array) and not jnp.iscomplexobj(b):
            raise TypeError(
                f"b must be complex where {name} is ({array.dtype}), as the result has the dtype "
                f"of b; got {b.dtype}. Convert it first: b.astype({array.dtype})"
            )
    return a, b, initial_state


def _check_inexact(name: str, x: Any) -> jax.Array:
    """`x` as an array of a floating or complex dtype."""
    if isinstance(x, jax.Array | np.ndarray) and jnp.iscomplexobj(x):
        return jnp.asarray(x)
    return check_floating(name, x)


def _unsupported(a: Any, b: Any, initial_state: Any) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    for name, array in (("a", a), ("b", b), ("initial_state", initial_state)):
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {array.dtype}, and the kernels take bfloat16, float16 and float32"
    return None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a sequence is spread over the GPU.

    Attributes:
      steps: of time that are copied to shared memory at once, and from one saved state to the next.
      fwd_slots: of `steps` steps on their way through shared memory, per block of the forward.
      bwd_slots: the same for the backward.
      segments: that the sequence is cut into; ``None`` for what the cost model finds.
    """

    steps: int
    fwd_slots: int = 3
    bwd_slots: int = 3
    segments: int | None = None

    def __post_init__(self) -> None:
        assert self.steps >= 1, self
        assert min(self.fwd_slots, self.bwd_slots) >= 2, self


def tiles(a: Any, b: Any) -> Tiles:
    """64 bytes per channel and array in each slot.

    On an H200 at (8, 2048, 2048) in bf16, 3 slots of 32 steps took 48.6 µs forward, 4 slots 50.4
    and 4 of 16 steps 54.3; backward, 3 slots of 16, 32 and 64 steps took 107, 97 and 95.
    """
    return Tiles(steps=64 // max(a.dtype.itemsize, b.dtype.itemsize))


@dataclasses.dataclass(frozen=True)
class _Options:
    reverse: bool
    mode: Mode
    tiles: Tiles | None = None

    def steps(self, a: Any, b: Any) -> int:
        """Steps from one saved state to the next."""
        return max(1, min((self.tiles or tiles(a, b)).steps, a.shape[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear_scan(a, b, initial_state, options):
    out, _ = _forward_pass(options, save=False)(a, b, initial_state)
    return match_sharding(out, b)


def _linear_scan_fwd(a, b, initial_state, options):
    out, states = _forward_pass(options, save=True)(a, b, initial_state)
    return match_sharding(out, b), (a, b, initial_state, states)


def _linear_scan_bwd(options, res, dout):
    a, b, initial_state, states = res
    da, db, dstate = _backward_pass(options)(a, b, states, dout)
    if initial_state is not None:
        dstate = match_primal(dstate, initial_state).astype(initial_state.dtype)
    else:
        dstate = None
    return match_primal(da, a), match_primal(db, b), dstate


_linear_scan.defvjp(_linear_scan_fwd, _linear_scan_bwd)
_linear_scan_jit = jax.jit(_linear_scan, static_argnums=3)


@functools.cache
def _forward_pass(options: _Options, *, save: bool) -> KernelPass:
    return KernelPass(
        name="linear_scan_fwd",
        mode=options.mode,
        kernel=functools.partial(_launch_fwd, options, save),
        reference=functools.partial(_reference_fwd, options, save),
        ins=("b l d", "b l d", "b d"),
        outs=("b l d", "b c d"),
        whole="l c",
    )


@functools.cache
def _backward_pass(options: _Options) -> KernelPass:
    return KernelPass(
        name="linear_scan_bwd",
        mode=options.mode,
        kernel=functools.partial(_launch_bwd, options),
        reference=functools.partial(_reference_bwd, options),
        ins=("b l d", "b l d", "b c d", "b l d"),
        outs=("b l d", "b l d", "b d"),
        whole="l c",
    )


# Tiles and segments

_BLOCK, _SEGMENT = grid_axes("block", "segment")

# Barriers (commit_smem) come before a slot is copied to again; no lane reads what another writes.


_UNROLL = 8
"""Steps unrolled in a loop."""

_FOLD = 8
"""Segments whose carries are loaded together, to wait for memory once."""


def segments(columns: int, chunks: int, steps: int, arrays: int, nbytes: int) -> int:
    """How many segments of a sequence are the fastest, by a model of the time.

    A pass waits for memory, at 4.2 TB/s, or for the chain of steps in a block, 13 ns each forward
    and 43 backward; where these are about equal, for a part of both. More than one segment costs a
    pass that reads 2 arrays at 13 ns a step, 1 µs to launch it, and 50 ns per segment to fold what
    was handed on. No multiprocessor gets more than 2 blocks, the most that were measured.

    On an H200 in bf16 these took, in µs, and the model is within 15%:

    ================  ========  =======  ========
    (B, L, D)         segments  forward  backward
    ================  ========  =======  ========
    (1, 65536, 1024)         8      212       491
    (1, 65536, 1024)        17      173       274
    (1, 65536, 1024)        33      168       241
    (1, 16384, 256)         16     27.8      64.4
    (1, 16384, 256)         64     15.2      24.1
    (1, 16384, 256)        128     17.6      22.0
    (2, 512, 512)            1      9.2      24.0
    (2, 512, 512)           16      4.7       5.9
    ================  ========  =======  ========

    Args:
      columns: blocks of channels, in all batch rows.
      chunks: whole tiles of the sequence.
      steps: of a chunk.
      arrays: that the pass reads and writes with one segment: 3 forward, 5 backward.
      nbytes: of one such array.
    """

    def wait(length: int, arrays: int) -> float:
        memory, chain = arrays * nbytes / 4.2e6, length * (0.043 if arrays == 5 else 0.013)
        return (memory**4 + chain**4) ** 0.25

    def cost(count: int) -> float:
        length = steps * -(-chunks // count)
        return wait(length, arrays) + (count > 1) * (wait(length, 2) + 1.0 + 0.05 * count)

    most = max(1, min(chunks, 2 * num_sms() // columns))
    # Few segments win where the model sees little difference.
    return min(range(1, most + 1), key=lambda count: (round(cost(count), 1), count))


_ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class _Scan:
    """What the kernels know about a call while they are compiled.

    Step k of chunk c is step c · steps + k in the order of the recurrence, which is that of memory
    unless `reverse`. The last `tail` steps, where they fill no chunk, are the last of a chunk that
    overlaps the one before.
    """

    length: int
    dim: int
    steps: int
    slots: int
    reverse: bool
    per_segment: int  # whole chunks

    @property
    def whole(self) -> int:
        return self.length // self.steps

    @property
    def tail(self) -> int:
        return self.length % self.steps

    @property
    def chunks(self) -> int:
        return self.whole + (self.tail > 0)

    @property
    def segments(self) -> int:
        return -(-self.whole // self.per_segment)

    @property
    def columns(self) -> int:
        return -(-self.dim // LANES)

    def start(self, chunk: Any) -> Any:
        """Where a chunk starts in memory."""
        first = jnp.minimum(chunk * self.steps, self.length - self.steps)
        return self.length - self.steps - first if self.reverse else first

    def row(self, k: Any) -> Any:
        """Where step k of a chunk is in it."""
        return self.steps - 1 - k if self.reverse else k

    def loop(
        self, valid: int, step: Callable[..., Any], carry: Any, backwards: bool = False
    ) -> Any:
        """``carry = step(row, carry)`` for the last `valid` steps of a chunk."""

        def body(i, carry):
            k = self.steps - 1 - i if backwards else self.steps - valid + i
            return step(self.row(k), carry)

        return lax.fori_loop(0, valid, body, carry, unroll=math.gcd(_UNROLL, valid))

    def range(self, segment: Any) -> tuple[Any, Any, Any]:
        """First chunk of a segment, its number of whole ones, and of chunks with a tail's."""
        first = segment * self.per_segment
        whole = jnp.minimum(self.per_segment, self.whole - first)
        is_last = segment == self.segments - 1
        return first, whole, whole + jnp.where(is_last, self.chunks - self.whole, 0)

    def block(self) -> tuple[Any, Any]:
        """This block's batch row and channels; the last block of a row overlaps the one before."""
        block = lax.axis_index(_BLOCK)
        column = lax.rem(block, self.columns)
        start = jnp.minimum(column * LANES, self.dim - LANES)
        return lax.div(block, self.columns), pl.ds(start, LANES)

    def load(self, ref: Any) -> jax.Array:
        """A (LANES,) row of shared or global memory in fp32."""
        return plgpu.load(ref, layout=_ROW, optimized=False).astype(jnp.float32)

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), _ROW)

    def multiply(self, product: jax.Array, state: jax.Array) -> jax.Array:
        """product · state, where a factor of 0 makes 0 of an infinite product."""
        return jnp.where(state == 0, self.zeros(), product * state)


def _scan_of(options: _Options, a: Any, b: Any, *, arrays: int) -> _Scan:
    """The call as the forward (3 arrays) or the backward (5) sees it."""
    tile = options.tiles or tiles(a, b)
    batch, length, dim = a.shape
    scan = _Scan(
        length=length,
        dim=dim,
        steps=options.steps(a, b),
        slots=tile.fwd_slots if arrays == 3 else tile.bwd_slots,
        reverse=options.reverse,
        per_segment=1,
    )
    nbytes = a.size * max(a.dtype.itemsize, b.dtype.itemsize)
    count = tile.segments or segments(batch * scan.columns, scan.whole, scan.steps, arrays, nbytes)
    return dataclasses.replace(scan, per_segment=-(-scan.whole // count))


def _padded(*arrays: Any) -> list[Any]:
    """`arrays` with channels added up to a number that the TMA can copy; None stays."""
    dim = arrays[0].shape[-1]
    itemsize = min(v.dtype.itemsize for v in arrays if v is not None)
    missing = max(LANES - dim, -dim % (16 // itemsize))
    return [
        v if v is None or not missing else jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
        for v in arrays
    ]


def _scratch(scan: _Scan, **arrays: Any) -> dict[str, Any]:
    """Slots for a chunk of each array (B, L, D), and for one state of (B, C, D) named before."""
    slots = {
        name: plgpu.SMEM(
            (scan.slots, *([] if name == "before" else [scan.steps]), LANES), array.dtype
        )
        for name, array in arrays.items()
    }
    return {**slots, "arrived": plgpu.Barrier(num_arrivals=len(slots), num_barriers=scan.slots)}


def _stream(scan: _Scan, smem: Any, refs: dict[str, Any], chunk: Any, parts: Any, carry: Any):
    """``carry = body(c, slot, carry)`` for the chunks c = ``chunk(i)``.

    Args:
      scan: the call.
      smem: the slots, by the names of `refs`.
      refs: the arrays in global memory.
      chunk: the number of the i-th chunk.
      parts: (end, body) for consecutive ranges of i.
      carry: what is handed from chunk to chunk.
    """
    batch, channels = scan.block()
    total = parts[-1][0]

    def fetch(i):
        @pl.when(i < total)
        def _():
            slot, c = lax.rem(i, scan.slots), chunk(i)
            for name, ref in refs.items():
                time = c if name == "before" else pl.ds(scan.start(c), scan.steps)
                source, target = ref.at[batch, time, channels], getattr(smem, name).at[slot]
                plgpu.copy_gmem_to_smem(source, target, smem.arrived.at[slot])

    for i in range(scan.slots - 1):
        fetch(jnp.int32(i))

    def run(body, i, carry):
        slot = lax.rem(i, scan.slots)
        plgpu.commit_smem()  # all lanes are done with the slot before
        fetch(i + scan.slots - 1)
        plgpu.barrier_wait(smem.arrived.at[slot])
        return body(chunk(i), slot, carry)

    begin = 0
    for end, body in parts:
        carry = lax.fori_loop(begin, end, functools.partial(run, body), carry)
        begin = end
    return carry


def _launch_carry(scan: _Scan, name: str, a: Any, x: Any, *, transposed: bool) -> Any:
    """What every segment hands on if nothing comes in, and the product of its a: (S−1, B, D), fp32.

    Forward, all segments but the last hand on; transposed, all but the first.
    """
    handed = jax.ShapeDtypeStruct((scan.segments - 1, a.shape[0], scan.dim), jnp.float32)
    return launch_kernel(
        functools.partial(_carry_kernel, scan, transposed),
        out_type=(handed, handed),
        scratch_types=_scratch(scan, a=a, x=x),
        grid=(scan.segments - 1, a.shape[0] * scan.columns),
        grid_names=(_SEGMENT, _BLOCK),
        kernel_name=name,
    )(a, x)


def _carry_kernel(scan, transposed, a_ref, x_ref, product_ref, state_ref, **scratch):
    smem = types.SimpleNamespace(**scratch)
    batch, channels = scan.block()
    between = lax.axis_index(_SEGMENT)
    first, _, count = scan.range(between + transposed)

    def steps(valid):
        def body(c, slot, carry):
            del c

            def step(row, carry):
                product, state = carry
                a, x = (scan.load(ref.at[slot, row]) for ref in (smem.a, smem.x))
                state = a * (state + x) if transposed else a * state + x
                return scan.multiply(product, a), state

            return scan.loop(valid, step, carry, backwards=transposed)

        return body

    whole, tail = steps(scan.steps), steps(scan.tail)
    if transposed:
        tails = count - scan.range(between + 1)[1]
        parts = [(tails, tail), (count, whole)] if scan.tail else [(count, whole)]
        chunk = lambda i: first + count - 1 - i
    else:
        parts = [(count, whole)]
        chunk = lambda i: first + i
    init = (scan.zeros() + 1.0, scan.zeros())
    product, state = _stream(scan, smem, {"a": a_ref, "x": x_ref}, chunk, parts, init)
    product_ref[between, batch, channels] = product
    state_ref[between, batch, channels] = state


def _fold(scan: _Scan, handed: Any, count: Any, index: Callable[[Any], Any], state: Any) -> Any:
    """`state` after the segments ``index(0)`` … ``index(count − 1)``, in that order."""
    batch, channels = scan.block()

    def group(g, state):
        order = [g * _FOLD + k for k in range(_FOLD)]
        loaded = []
        for i in order:
            s = index(jnp.minimum(i, count - 1))
            loaded.append([scan.load(ref.at[s, batch, channels]) for ref in handed])
        for i, (product, passed) in zip(order, loaded, strict=True):
            valid = scan.zeros() + jnp.where(i < count, 1.0, 0.0)
            state = jnp.where(valid > 0, passed + scan.multiply(product, state), state)
        return state

    return lax.fori_loop(0, (count + _FOLD - 1) // _FOLD, group, state)


# Forward


def _launch_fwd(options: _Options, save: bool, a: Any, b: Any, initial_state: Any):
    """h (B, L, D), and with `save` the state before every chunk, (B, C, D), fp32."""
    if a.size == 0:
        return _reference_fwd(options, save, a, b, initial_state)
    batch, _, dim = a.shape
    a, b, initial_state = _padded(a, b, initial_state)
    scan = _scan_of(options, a, b, arrays=3)
    handed = ()
    if scan.segments > 1:
        handed = _launch_carry(scan, "linear_scan_fwd_carry", a, b, transposed=False)
    initial = () if initial_state is None else (initial_state,)
    out_type = [jax.ShapeDtypeStruct(b.shape, b.dtype)]
    if save:
        out_type.append(jax.ShapeDtypeStruct((batch, scan.chunks, scan.dim), jnp.float32))
    out, *states = launch_kernel(
        functools.partial(_fwd_kernel, scan, len(initial), len(handed)),
        out_type=tuple(out_type),
        scratch_types=_scratch(scan, a=a, b=b),
        grid=(scan.segments, batch * scan.columns),
        grid_names=(_SEGMENT, _BLOCK),
        kernel_name="linear_scan_fwd",
    )(a, b, *initial, *handed)
    return out[..., :dim], states[0][..., :dim] if save else None


def _fwd_kernel(scan, has_initial, has_handed, a_ref, b_ref, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    initial, refs = refs[:has_initial], refs[has_initial:]
    handed, (out_ref, *states_ref) = refs[:has_handed], refs[has_handed:]
    batch, channels = scan.block()
    segment = lax.axis_index(_SEGMENT)
    first, whole, count = scan.range(segment)

    def steps(valid):
        def body(c, slot, h):
            if states_ref:
                states_ref[0][batch, c, channels] = h
            start = scan.start(c)

            def step(row, h):
                h = scan.load(smem.a.at[slot, row]) * h + scan.load(smem.b.at[slot, row])
                out_ref[batch, start + row, channels] = h.astype(out_ref.dtype)
                return h

            return scan.loop(valid, step, h)

        return body

    h = scan.zeros()
    if initial:
        h = h + scan.load(initial[0].at[batch, channels])
    if handed:
        h = _fold(scan, handed, segment, lambda i: i, h)
    parts = [(whole, steps(scan.steps))]
    if scan.tail:
        parts.append((count, steps(scan.tail)))
    _stream(scan, smem, {"a": a_ref, "b": b_ref}, lambda i: first + i, parts, h)


# Backward


def _launch_bwd(options: _Options, a: Any, b: Any, states: Any, dout: Any):
    """da and db (B, L, D), and the gradient of the initial state (B, D), fp32."""
    if a.size == 0:
        return _reference_bwd(options, a, b, states, dout)
    batch, _, dim = a.shape
    a, b, states, dout = _padded(a, b, states, dout)
    scan = _scan_of(options, a, b, arrays=5)
    handed = ()
    if scan.segments > 1:
        handed = _launch_carry(scan, "linear_scan_bwd_carry", a, dout, transposed=True)
    da, db, dstate = launch_kernel(
        functools.partial(_bwd_kernel, scan, len(handed)),
        out_type=(
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(b.shape, b.dtype),
            jax.ShapeDtypeStruct((batch, scan.dim), jnp.float32),
        ),
        scratch_types={
            **_scratch(scan, a=a, b=b, dout=dout, before=states),
            "h": plgpu.SMEM((scan.steps, LANES), jnp.float32),  # before every step
        },
        grid=(scan.segments, batch * scan.columns),
        grid_names=(_SEGMENT, _BLOCK),
        kernel_name="linear_scan_bwd",
    )(a, b, states, dout, *handed)
    return da[..., :dim], db[..., :dim], dstate[..., :dim]


def _bwd_kernel(scan, has_handed, a_ref, b_ref, states_ref, dout_ref, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    handed, (da_ref, db_ref, dstate_ref) = refs[:has_handed], refs[has_handed:]
    batch, channels = scan.block()
    segment = lax.axis_index(_SEGMENT)
    first, whole, count = scan.range(segment)

    def steps(valid):
        def body(c, slot, passed):  # passed = a[t+1] · dh[t+1]
            start = scan.start(c)

            def up(row, h):
                smem.h[row] = h
                return scan.load(smem.a.at[slot, row]) * h + scan.load(smem.b.at[slot, row])

            def down(row, passed):
                dh = scan.load(smem.dout.at[slot, row]) + passed
                da = dh * scan.load(smem.h.at[row])
                db_ref[batch, start + row, channels] = dh.astype(db_ref.dtype)
                da_ref[batch, start + row, channels] = da.astype(da_ref.dtype)
                return scan.load(smem.a.at[slot, row]) * dh

            before = 1.0 * scan.load(smem.before.at[slot])
            scan.loop(valid, up, before)
            return scan.loop(valid, down, passed, backwards=True)

        return body

    passed = scan.zeros()
    if handed:
        last = scan.segments - 2
        passed = _fold(scan, handed, last + 1 - segment, lambda i: last - i, passed)
    parts = [(count, steps(scan.steps))]
    if scan.tail:
        parts.insert(0, (count - whole, steps(scan.tail)))
    refs = {"a": a_ref, "b": b_ref, "dout": dout_ref, "before": states_ref}
    passed = _stream(scan, smem, refs, lambda i: first + count - 1 - i, parts, passed)

    @pl.when(segment == 0)
    def _():
        dstate_ref[batch, channels] = passed


# Plain JAX


_CHUNK = 8
"""Steps from one saved state to the next. On 2 CPU cores forward and backward at (8, 512, 1536) in
fp32 took 135 ms and 2.2 temporary arrays of the size of a; with chunks of 4 138 ms, of 16 192; an
associative scan 245 ms and 5.2 arrays."""


def linear_scan_reference(
    a: jax.Array, b: jax.Array, initial_state: jax.Array | None = None, *, reverse: bool = False
) -> jax.Array:
    """:func:`linear_scan` in plain JAX, differentiable in both modes and to any order.

    One step after the other; the backward keeps the state before each chunk of steps and runs the
    chunk again. Where the program is lowered for CUDA, an associative scan, of which the backward
    keeps the arguments: at (8, 2048, 2048) in bf16 it took an H200 0.21 ms, and the steps 1.3 ms.
    """
    if a.size == 0:
        return _chunked(_CHUNK, reverse, a, b, initial_state, b.dtype)[0]
    given = () if initial_state is None else (initial_state,)
    # A gradient outside of jit keeps what either branch needs, 0 where it is not the one that runs:
    # 4 arrays of the size of a with this checkpoint, 9 without.
    associative = jax.checkpoint(functools.partial(_associative, reverse))
    return lax.platform_dependent(
        *(a, b, *given),
        cuda=associative,
        default=lambda a, b, *h: _chunked(_CHUNK, reverse, a, b, h[0] if h else None, b.dtype)[0],
    )


def _associative(reverse: bool, a: Any, b: Any, *initial_state: Any) -> Any:
    acc = jnp.result_type(jnp.float32, a, b, *initial_state)
    first, dtype = -1 if reverse else 0, b.dtype
    a, b = a.astype(acc), b.astype(acc)
    for h in initial_state:
        b = b.at[:, first].add(a[:, first] * h)

    def combine(one, two):
        return two[0] * one[0], two[0] * one[1] + two[1]

    return lax.associative_scan(combine, (a, b), reverse=reverse, axis=1)[1].astype(dtype)


def _reference_fwd(options: _Options, save: bool, a, b, initial_state):
    steps = options.steps(a, b)
    size = math.gcd(_CHUNK, steps)
    out, states = _chunked(size, options.reverse, a, b, initial_state, b.dtype)
    return out, states[:, :: steps // size] if save else None


def _reference_bwd(options: _Options, a, b, states, dout):
    if a.size == 0:
        return jnp.zeros_like(a), jnp.zeros_like(b), jnp.zeros_like(a[:, :1]).sum(1)
    acc = states.dtype
    if options.reverse:
        a, b, dout = (jnp.flip(v, 1) for v in (a, b, dout))
    h, _ = _chunked(_CHUNK, False, a, b, states[:, 0], acc)
    before = jnp.concatenate([states[:, :1], h[:, :-1]], axis=1)
    after = jnp.concatenate([a[:, 1:], jnp.zeros_like(a[:, :1])], axis=1)
    dh, _ = _chunked(_CHUNK, True, after, dout.astype(acc), None, acc)
    da, db = (dh * before).astype(a.dtype), dh.astype(b.dtype)
    dstate = a[:, 0].astype(acc) * dh[:, 0]
    if options.reverse:
        da, db = jnp.flip(da, 1), jnp.flip(db, 1)
    return da, db, dstate


def _chunked(steps: int, reverse: bool, a, b, initial_state, dtype) -> tuple[Any, Any]:
    """All states, (B, L, D), in `dtype`, and the state before every chunk of `steps`, (B, C, D)."""
    batch, length, dim = a.shape
    steps = max(1, min(steps, length))
    more = () if initial_state is None else (initial_state,)
    acc = jnp.result_type(jnp.float32, a, b, *more)
    if length == 0:
        return jnp.zeros(a.shape, dtype), jnp.zeros((batch, 0, dim), acc)
    if reverse:
        a, b = jnp.flip(a, 1), jnp.flip(b, 1)
    if initial_state is None:  # zeros, distributed over devices as the states will be
        h = jnp.where(True, jnp.zeros((), acc), (a * b)[:, 0].astype(acc))
    else:
        h = initial_state.astype(acc)

    @jax.checkpoint
    def chunk(h, ab):
        before, outs = h, []
        for a, b in zip(*(jnp.unstack(v.astype(acc), axis=1) for v in ab), strict=True):
            h = a * h + b
            outs.append(h.astype(dtype))
        return h, (jnp.stack(outs, axis=1), before)

    whole = length // steps * steps
    split = lambda v: jnp.moveaxis(v[:, :whole].reshape(batch, length // steps, steps, dim), 1, 0)
    h, (outs, states) = lax.scan(chunk, h, (split(a), split(b)))
    out, states = jnp.moveaxis(outs, 0, 1).reshape(batch, whole, dim), jnp.moveaxis(states, 0, 1)
    if whole < length:
        _, (tail, before) = chunk(h, (a[:, whole:], b[:, whole:]))
        out = jnp.concatenate([out, tail], axis=1)
        states = jnp.concatenate([states, before[:, None]], axis=1)
    return jnp.flip(out, 1) if reverse else out, states
