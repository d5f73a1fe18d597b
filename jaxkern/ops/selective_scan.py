"""Selective scan: the recurrence of Mamba (S6), a diagonal linear system with per-token weights.

Forward, for a batch row b and a channel d, n running over the N states and h[−1] = 0:

    dt[t]  = softplus(dt[t] + dt_bias)                                 (softplus only if asked for)
    h[t,n] = a[t,n] · h[t−1,n] + dt[t] · x[t] · B[t,n]                 a[t,n] = exp(dt[t] · A[n])
    y[t]   = Σ_n C[t,n] · h[t,n] + D · x[t]
    out[t] = y[t] · silu(z[t])

Backward, for the cotangent dout, time running down from dh[L] = 0:

    dy[t]   = dout[t] · silu(z[t])                     dz[t] = dout[t] · y[t] · silu'(z[t])
    dh[t,n] = a[t+1,n] · dh[t+1,n] + C[t,n] · dy[t]    v[t,n] = dh[t,n] · a[t,n] · h[t−1,n]
    dx[t]   = dt[t] · Σ_n dh[t,n] · B[t,n] + D · dy[t]
    ddt[t]  = (Σ_n v[t,n] · A[n] + x[t] · Σ_n dh[t,n] · B[t,n]) · softplus'
    dB[t,n] = Σ_d dh[t,n] · dt[t] · x[t]               dC[t,n] = Σ_d dy[t] · h[t,n]
    dA[n]   = Σ_bt v[t,n] · dt[t]       dD = Σ_bt dy[t] · x[t]       ddt_bias = Σ_bt ddt[t]

Saved for the backward: the arguments, and the state before every 8th step, (B, L/8, N, D) in fp32:
4·N/8 bytes per element of x, 8 at N = 16. The states in between are recomputed, 8 steps at a time.

Per element of x the forward takes N exponentials, and 2 more for the gate and the softplus; the
backward 2·N, once to recompute the states and once on the way back. At N = 16 the exponential unit
of an H200 (16 per clock and multiprocessor) is the limit: it needs longer than the memory does for
the 8 bytes (bf16; 16 with states) of the forward and the 22 of the backward.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
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

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, Mode, device_unsupported, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding
from jaxkern.core.mosaic import LANES


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Run Mamba's selective state space recurrence along time.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t x_t B_t, \qquad
        \text{out}_t = (C_t \cdot h_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    for every batch row and channel, with N states each, from :math:`h_{-1} = 0`, where
    :math:`\Delta` is ``softplus(dt + dt_bias)`` or ``dt + dt_bias``. All of it is computed in fp32,
    whatever the dtypes; the result is rounded once, to the dtype of `x`. Any real `A` is taken; a
    positive one makes the state grow.

    For the backward, the arguments and the state before every 8th step are kept, ``4 * N / 8``
    bytes per element of `x`; nothing of size B·L·D·N is ever held. A NaN in one channel of one
    batch row stays there, but for the gradients that sum over channels (`B`, `C`) or over batch
    rows (`A`, `D`, `dt_bias`). The bits are the same on every run.

    On a mesh, batch and channels may be split between devices; a split L or N is gathered.

    Args:
      x: (B, L, D), bfloat16, float16 or float32.
      dt: (B, L, D), the step sizes before `dt_bias` and softplus; any of those dtypes, as are
        all arguments below.
      A: (D, N), the states' rates, negative in Mamba.
      B: (B, L, N), how x enters the states.
      C: (B, L, N), how the states are read.
      D: (D,), the weight of `x` in the output; ``None`` stands for zeros.
      z: (B, L, D), the gate; ``None`` for no gate.
      dt_bias: (D,), added to `dt`; ``None`` stands for zeros.
      dt_softplus: whether the step size is the softplus of that sum.
      implementation: ``"mosaic"`` for the Pallas GPU kernels (N up to 64), ``"xla"`` for plain JAX
        (the only one that supports forward-mode differentiation), ``None`` for the fastest: the
        kernels on an NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      (B, L, D), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a real floating dtype.
      ValueError: shapes do not fit, or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, dt, z = (jnp.ones((2, 64, 256), jnp.bfloat16) for _ in range(3))
      >>> A, B, C = -jnp.ones((256, 16)), jnp.ones((2, 64, 16)), jnp.ones((2, 64, 16))
      >>> jaxkern.selective_scan(x, dt, A, B, C, z=z, dt_softplus=True).shape
      (2, 64, 256)
      >>> dA = jax.grad(lambda a: jaxkern.selective_scan(x, dt, a, B, C).sum())(A)

    References:
      Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
      <https://arxiv.org/abs/2312.00752>`_, 2023.
    """
    args = _check(("B", "L"), x, dt, A, B, C, D, z, dt_bias)
    mode = resolve(implementation, _unsupported(args), op="selective_scan")
    options = _Options(dt_softplus=bool(dt_softplus), mode=mode)
    if mode == "xla":
        return selective_scan_reference(*args, dt_softplus=options.dt_softplus)
    return _jitted(*args, options)


def selective_scan_step(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
) -> tuple[jax.Array, jax.Array]:
    r"""Run :func:`selective_scan` for one token, to decode step by step. Plain JAX, differentiable.

    .. math::
        h_t = \exp(\Delta_t A) \, h_{t-1} + \Delta_t x_t B_t, \qquad
        \text{out}_t = (C_t \cdot h_t + D \, x_t) \cdot \operatorname{silu}(z_t)

    Args:
      state: (B, D, N), float32, :math:`h_{t-1}`; zeros to begin with.
      x: (B, D), any floating dtype, as are all arguments below.
      dt: (B, D).
      A: (D, N).
      B: (B, N).
      C: (B, N).
      D: (D,) or ``None``.
      z: (B, D) or ``None``.
      dt_bias: (D,) or ``None``.
      dt_softplus: whether the step size is ``softplus(dt + dt_bias)``.

    Returns:
      The output, (B, D), the dtype of `x`; and :math:`h_t`, (B, D, N), float32.

    Raises:
      TypeError: an argument is not an array of a real floating dtype.
      ValueError: shapes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> state, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1))
      >>> for _ in range(2):  # A = 0: the state adds up what enters
      ...     out, state = jaxkern.selective_scan_step(state, one, one, 0 * one, one, one)
      >>> out
      Array([[2.]], dtype=float32)

    References:
      Gu and Dao, `Mamba <https://arxiv.org/abs/2312.00752>`_, 2023, section 3.
    """
    x, dt, A, B, C, D, z, dt_bias = _check(("B",), x, dt, A, B, C, D, z, dt_bias)
    state = check_array("state", state, (*x.shape, A.shape[1]), "(B, D, N) of x and A")
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)
    h = jnp.swapaxes(state.astype(params.A.dtype), 1, 2)  # (B, N, D)
    h, out = _run_chunk(h, jax.tree.map(lambda v: v[:, None], tokens), params, dt_softplus)
    return out[:, 0], jnp.swapaxes(h, 1, 2)


def _check(lead: tuple[str, ...], x, dt, A, B, C, D, z, dt_bias) -> tuple[Any, ...]:
    """The arguments as arrays; `lead` names the dimensions before the last of those with tokens."""
    x, A = check_floating("x", x), check_floating("A", A)
    tokens = ", ".join(lead)
    if x.ndim != len(lead) + 1:
        raise ValueError(f"x must have shape ({tokens}, D), got {x.shape}")
    channels = x.shape[-1:]
    if A.ndim != 2 or A.shape[:1] != channels or A.shape[1] == 0:
        raise ValueError(
            f"A must have shape (D, N), D the {channels[0]} channels of x and N at least 1; "
            f"got {A.shape}"
        )
    states = (*x.shape[:-1], A.shape[1])

    def check(name, value, shape, meaning):
        return None if value is None else check_array(name, value, shape, meaning)

    return (
        x,
        check_array("dt", dt, x.shape, f"({tokens}, D) of x"),
        A,
        check_array("B", B, states, f"({tokens}, N) of x and A"),
        check_array("C", C, states, f"({tokens}, N) of x and A"),
        check("D", D, channels, "(D,) of x"),
        check("z", z, x.shape, f"({tokens}, D) of x"),
        check("dt_bias", dt_bias, channels, "(D,) of x"),
    )


def _unsupported(args: tuple[Any, ...]) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    for name, array in zip(("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), args, strict=True):
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {array.dtype}, and the kernels take bfloat16, float16 and float32"
    states = args[2].shape[1]
    if states > _MAX_STATES:
        return f"A has {states} states per channel, and the kernels hold at most {_MAX_STATES}"
    return device_unsupported()


@dataclasses.dataclass(frozen=True)
class _Options:
    dt_softplus: bool
    mode: Mode


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _selective_scan(x, dt, A, B, C, D, z, dt_bias, options):
    out, _ = _forward_pass(options, save=False)(x, dt, A, B, C, D, z, dt_bias)
    return match_sharding(out, x)


def _selective_scan_fwd(x, dt, A, B, C, D, z, dt_bias, options):
    args = (x, dt, A, B, C, D, z, dt_bias)
    out, states = _forward_pass(options, save=True)(*args)
    return match_sharding(out, x), (args, states)


def _selective_scan_bwd(options, res, dout):
    args, states = res
    grads = _backward_pass(options)(*args, states, dout)
    return tuple(
        None if arg is None else match_primal(grad, arg).astype(arg.dtype)
        for grad, arg in zip(grads, args, strict=True)
    )


_selective_scan.defvjp(_selective_scan_fwd, _selective_scan_bwd)
_jitted = jax.jit(_selective_scan, static_argnums=8)

_ARGUMENTS = ("b l d", "b l d", "d n", "b l n", "b l n", "d", "b l d", "d")
_STATES = "b c n d"


@functools.cache
def _forward_pass(options: _Options, *, save: bool) -> KernelPass:
    return KernelPass(
        name="selective_scan_fwd",
        mode=options.mode,
        kernel=functools.partial(_launch_fwd, options, save),
        reference=functools.partial(_reference_fwd, options, save),
        ins=_ARGUMENTS,
        outs=("b l d", _STATES),
        whole="l n c",
    )


@functools.cache
def _backward_pass(options: _Options) -> KernelPass:
    return KernelPass(
        name="selective_scan_bwd",
        mode=options.mode,
        kernel=functools.partial(_launch_bwd, options),
        reference=functools.partial(_reference_bwd, options),
        ins=(*_ARGUMENTS, _STATES, "b l d"),
        outs=_ARGUMENTS,
        whole="l n c",
    )


# What both kernels share.
#
# A block is one warpgroup and works on LANES channels of one batch row, one channel per lane: a
# (LANES,) array in the _ROW layout is one register, and what a lane writes to shared memory in that
# layout only the same lane reads. The arrays of the tokens come through a ring of two slots, copied
# by the TMA while the block works on the other slot. B and C are read as scalars.
#
# Pallas would put a barrier around every store. The kernels place their own instead (commit_smem),
# where one lane reads what another, or the TMA, writes: before a slot is copied to again, and
# around the sums over lanes.

_CHUNK = 8
"""Steps from one saved state to the next. In plain JAX on 2 CPU cores, forward + backward took 37
and 540 ms at (B, L, D, N) = (8, 256, 256, 16) and (8, 512, 1536, 16); with 4 steps 35 and 590, with
16 steps 44 and 630; a scan of single steps 87 and 890, an associative scan of 16 157 and 1840."""

_GROUP = 8
"""States that the backward works on at a time: their 8 steps are the 64 rows of one WGMMA tile."""

_MAX_STATES = 64
"""The backward holds two rows per state in shared memory, and the forward two registers."""

_LOG2E = 1.4426950408889634
_ROW = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


class _Arrays(NamedTuple):
    """The arguments padded to whole chunks, blocks and groups; D and dt_bias are always there."""

    x: Any  # (B, L, D)
    dt: Any  # (B, L, D)
    rate: Any  # (N, D), fp32: A · log2(e), so that a decay is one exp2
    B: Any  # (B, L, N), fp32
    C: Any  # (B, L, N), fp32
    D: Any  # (D,), fp32
    dt_bias: Any  # (D,), fp32
    z: Any  # (B, L, D); without a gate x stands in, unread


class _Gradients(NamedTuple):
    """What the backward kernel writes; sums over channels or batch rows as one part per block."""

    dx: Any  # (B, L, D)
    ddt: Any  # (B, L, D)
    dA: Any  # (B, N, D), fp32
    dB: Any  # (D / LANES, B, L / _CHUNK, N / _GROUP, _CHUNK · _GROUP), fp32
    dC: Any  # as dB
    dD: Any  # (B, D), fp32
    ddt_bias: Any  # (B, D), fp32
    dz: Any = None  # (B, L, D)


def _padded_arrays(x, dt, A, B, C, D, z, dt_bias) -> _Arrays:
    f32 = jnp.float32
    channels = jnp.zeros(x.shape[-1:], f32)

    def tokens(v):
        return _pad(v, (1, _CHUNK), (2, LANES))

    def weights(v):
        return _pad(v.astype(f32), (1, _CHUNK), (2, _GROUP))

    def per_channel(v):
        return _pad(channels if v is None else v.astype(f32), (0, LANES))

    x = tokens(x)
    return _Arrays(
        x=x,
        dt=tokens(dt),
        rate=_pad(A.astype(f32).T * _LOG2E, (0, _GROUP), (1, LANES)),
        B=weights(B),
        C=weights(C),
        D=per_channel(D),
        dt_bias=per_channel(dt_bias),
        z=x if z is None else tokens(z),
    )


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
    block = lax.axis_index("block")
    return lax.axis_index("batch"), block, pl.ds(block * LANES, LANES)


def _step_size(options: _Options, raw: jax.Array, length: int, padded: int, t: Any) -> jax.Array:
    """dt after the softplus; 0 beyond the end of the sequence, where it keeps the state."""
    dt = _softplus(raw) if options.dt_softplus else raw
    return dt if length == padded else dt * jnp.where(t < length, 1.0, 0.0)


def _softplus(v: jax.Array) -> jax.Array:
    """max(v, 0) + log1p(e), e = exp(−|v|), to fp32 accuracy relative to the result."""
    a = jnp.minimum(jnp.abs(v), 120.0)  # beyond, e is 0 in fp32
    # e by exp2 in two parts, the first product exact: rounding |v| · log2(e) as a whole would cost
    # up to 1e-6 of the result.
    head = a.astype(jnp.bfloat16).astype(jnp.float32)
    log2e_head = 1.4453125
    rest = head * (_LOG2E - log2e_head) + (a - head) * _LOG2E
    e = jnp.exp2(-head * log2e_head) * jnp.exp2(-rest)
    # log1p(e) = 2 · artanh(s), s = e / (2 + e) <= 1/3, by its series up to s^15.
    s = e / (2 + e)
    square = s * s
    series = 1 / 15
    for k in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / k
    return jnp.maximum(v, 0.0) + 2 * s * series


def _ring(steps: int, width: int, dtype: Any) -> Any:
    return plgpu.SMEM((2, steps, width), dtype)


def _fetch(copies: list[tuple[Any, Any]], slot: Any, arrived: Any) -> None:
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target.at[slot], arrived.at[slot])


# Forward


def _launch_fwd(options: _Options, save: bool, x, dt, A, B, C, D, z, dt_bias):
    if x.size == 0:
        return _reference_fwd(options, save, x, dt, A, B, C, D, z, dt_bias)
    length, dim = x.shape[1:]
    states = A.shape[1]
    arrays = _padded_arrays(x, dt, A, B, C, D, z, dt_bias)
    batch, padded, channels = arrays.x.shape
    n = arrays.rate.shape[0]
    tile = next(k for k in (32, 16, 8) if padded % k == 0)
    has_z = z is not None
    out_type = [jax.ShapeDtypeStruct(arrays.x.shape, x.dtype)]
    if save:
        shape = (batch, padded // _CHUNK, n, channels)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    scratch = {
        "x": _ring(tile, LANES, x.dtype),
        "dt": _ring(tile, LANES, dt.dtype),
        "B": _ring(tile, n, jnp.float32),
        "C": _ring(tile, n, jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=4 + has_z, num_barriers=2),
    }
    if has_z:
        scratch["z"] = _ring(tile, LANES, z.dtype)
    out, *saved = plgpu.kernel(
        functools.partial(_fwd_kernel, options, length, tile, states),
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=(channels // LANES, batch),
        grid_names=("block", "batch"),
        kernel_name="selective_scan_fwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays)
    return out[:, :length, :dim], saved[0][:, :, :states, :dim] if save else None


def _fwd_kernel(options, length, tile, states, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    has_z = hasattr(smem, "z")
    arrays, (out_ref, *states_ref) = _Arrays(*refs[:8]), refs[8:]  # states (B, L / _CHUNK, N, D)
    padded = arrays.x.shape[1]
    tiles = padded // tile
    batch, _, channels = _block()

    def fetch(i, slot):
        time = pl.ds(i * tile, tile)
        copies = [
            (arrays.x.at[batch, time, channels], smem.x),
            (arrays.dt.at[batch, time, channels], smem.dt),
            (arrays.B.at[batch, time], smem.B),
            (arrays.C.at[batch, time], smem.C),
        ]
        if has_z:
            copies.append((arrays.z.at[batch, time, channels], smem.z))
        _fetch(copies, slot, smem.arrived)

    fetch(0, 0)
    rate = [_load(arrays.rate.at[n, channels]) for n in range(states)]
    D, dt_bias = _load(arrays.D.at[channels]), _load(arrays.dt_bias.at[channels])

    def run_tile(i, h):
        slot = lax.rem(i, 2)
        plgpu.commit_smem()  # all lanes are done with the other slot

        @pl.when(i + 1 < tiles)
        def _():
            fetch(i + 1, 1 - slot)

        plgpu.barrier_wait(smem.arrived.at[slot])

        def run_chunk(c, h):
            for n in range(states if states_ref else 0):
                states_ref[0][batch, i * (tile // _CHUNK) + c, n, channels] = h[n]

            def step(k, h):
                t = c * _CHUNK + k
                x = _load(smem.x.at[slot, t])
                raw = _load(smem.dt.at[slot, t]) + dt_bias
                dt = _step_size(options, raw, length, padded, i * tile + t)
                dtx, y = dt * x, D * x
                h = list(h)
                for n in range(states):
                    h[n] = jnp.exp2(dt * rate[n]) * h[n] + dtx * smem.B[slot, t, n]
                    y = y + h[n] * smem.C[slot, t, n]
                if has_z:
                    z = _load(smem.z.at[slot, t])
                    y = y * z * jax.nn.sigmoid(z)
                out_ref[batch, i * tile + t, channels] = y.astype(out_ref.dtype)
                return tuple(h)

            return lax.fori_loop(0, _CHUNK, step, h, unroll=2)

        return lax.fori_loop(0, tile // _CHUNK, run_chunk, h)

    lax.fori_loop(0, tiles, run_tile, tuple(_zeros() for _ in range(states)))


# Backward


def _launch_bwd(options: _Options, x, dt, A, B, C, D, z, dt_bias, states, dout):
    if x.size == 0:
        return _reference_bwd(options, x, dt, A, B, C, D, z, dt_bias, states, dout)
    f32 = jnp.float32
    length, dim = x.shape[1:]
    arrays = _padded_arrays(x, dt, A, B, C, D, z, dt_bias)
    batch, padded, channels = arrays.x.shape
    n, blocks, chunks = arrays.rate.shape[0], channels // LANES, padded // _CHUNK
    has_z = z is not None
    shape = jax.ShapeDtypeStruct
    # dB and dC are sums over channels: one part per block, its 64 sums of a chunk side by side.
    parts = shape((blocks, batch, chunks, n // _GROUP, _CHUNK * _GROUP), f32)
    scratch = {
        "x": _ring(_CHUNK, LANES, x.dtype),
        "dt": _ring(_CHUNK, LANES, dt.dtype),
        "dout": _ring(_CHUNK, LANES, dout.dtype),
        "B": _ring(_CHUNK, n, f32),
        "C": _ring(_CHUNK, n, f32),
        "arrived": plgpu.Barrier(num_arrivals=5 + has_z, num_barriers=2),
        "h": plgpu.SMEM((_CHUNK * _GROUP, LANES), f32),
        "product": plgpu.SMEM((_CHUNK * _GROUP, LANES), f32),
        "dh": plgpu.SMEM((n, LANES), f32),
        "dA": plgpu.SMEM((n, LANES), f32),
    }
    for name in ("step", "dy", "y", "dh_b", "v_a"):
        scratch[name] = plgpu.SMEM((_CHUNK, LANES), f32)
    if has_z:
        scratch["z"] = _ring(_CHUNK, LANES, z.dtype)
    dx, ddt, dA, dB, dC, dD, ddt_bias, *dz = plgpu.kernel(
        functools.partial(_bwd_kernel, options, length, A.shape[1]),
        out_type=(
            shape(arrays.x.shape, x.dtype),
            shape(arrays.x.shape, dt.dtype),
            shape((batch, n, channels), f32),
            parts,
            parts,
            shape((batch, channels), f32),
            shape((batch, channels), f32),
            *([shape(arrays.x.shape, z.dtype)] if has_z else []),
        ),
        scratch_types=scratch,
        grid=(blocks, batch),
        grid_names=("block", "batch"),
        kernel_name="selective_scan_bwd",
        compiler_params=_COMPILER_PARAMS,
    )(*arrays, _pad(states, (2, _GROUP), (3, LANES)), _pad(dout, (1, _CHUNK), (2, LANES)))

    def over_blocks(parts):
        total = parts.sum(0).reshape(batch, chunks, n // _GROUP, _CHUNK, _GROUP)
        return total.swapaxes(2, 3).reshape(batch, padded, n)[:, :length, : A.shape[1]]

    return (
        dx[:, :length, :dim],
        ddt[:, :length, :dim],
        dA.sum(0).T[:dim, : A.shape[1]],
        over_blocks(dB),
        over_blocks(dC),
        None if D is None else dD.sum(0)[:dim],
        dz[0][:, :length, :dim] if has_z else None,
        None if dt_bias is None else ddt_bias.sum(0)[:dim],
    )


def _bwd_kernel(options, length, states, *refs, **scratch):
    smem = types.SimpleNamespace(**scratch)
    has_z = hasattr(smem, "z")
    arrays, (states_ref, dout_ref) = _Arrays(*refs[:8]), refs[8:10]
    grads = _Gradients(*refs[10:])
    padded, padded_states = arrays.x.shape[1], arrays.rate.shape[0]
    chunks = padded // _CHUNK
    batch, block, channels = _block()

    def fetch(c, slot):
        time = pl.ds(c * _CHUNK, _CHUNK)
        copies = [
            (arrays.x.at[batch, time, channels], smem.x),
            (arrays.dt.at[batch, time, channels], smem.dt),
            (dout_ref.at[batch, time, channels], smem.dout),
            (arrays.B.at[batch, time], smem.B),
            (arrays.C.at[batch, time], smem.C),
        ]
        if has_z:
            copies.append((arrays.z.at[batch, time, channels], smem.z))
        _fetch(copies, slot, smem.arrived)

    fetch(chunks - 1, 0)
    D, dt_bias = _load(arrays.D.at[channels]), _load(arrays.dt_bias.at[channels])

    @pl.loop(0, padded_states)
    def _(n):
        smem.dh[n] = _zeros()
        smem.dA[n] = _zeros()

    def sum_over_lanes(target_ref):
        """The sums of smem.product's 64 rows. In this layout a row is within one warp."""
        plgpu.commit_smem()
        products = plgpu.load(smem.product, layout=plgpu.Layout.WGMMA, optimized=False)
        target_ref[...] = jnp.sum(products, axis=1)
        plgpu.commit_smem()

    def run_chunk(i, sums):
        c = chunks - 1 - i
        slot = lax.rem(i, 2)
        plgpu.commit_smem()  # all lanes are done with the other slot

        @pl.when(i + 1 < chunks)
        def _():
            fetch(c - 1, 1 - slot)

        plgpu.barrier_wait(smem.arrived.at[slot])

        @pl.loop(0, _CHUNK)
        def _(t):
            raw = _load(smem.dt.at[slot, t]) + dt_bias
            dt = _step_size(options, raw, length, padded, c * _CHUNK + t)
            dy = _load(smem.dout.at[slot, t])
            if has_z:
                z = _load(smem.z.at[slot, t])
                dy = dy * z * jax.nn.sigmoid(z)
            smem.step[t] = dt
            smem.dy[t] = dy
            for sum_smem in (smem.y, smem.dh_b, smem.v_a):
                sum_smem[t] = _zeros()

        @pl.loop(0, padded_states // _GROUP)
        def _(g):
            run_group(c, slot, g)

        def finish(t, sums):
            dD, ddt_bias = sums
            x, dy, dh_b = _load(smem.x.at[slot, t]), _load(smem.dy.at[t]), _load(smem.dh_b.at[t])
            token = (batch, c * _CHUNK + t, channels)
            dx = _load(smem.step.at[t]) * dh_b + D * dy
            grads.dx[token] = dx.astype(grads.dx.dtype)
            ddt = _load(smem.v_a.at[t]) * (1 / _LOG2E) + x * dh_b
            if options.dt_softplus:
                ddt = ddt * jax.nn.sigmoid(_load(smem.dt.at[slot, t]) + dt_bias)
            grads.ddt[token] = ddt.astype(grads.ddt.dtype)
            if has_z:
                z = _load(smem.z.at[slot, t])
                gate = jax.nn.sigmoid(z)
                y = _load(smem.y.at[t]) + D * x
                dz = _load(smem.dout.at[slot, t]) * y * (gate * (1 + z * (1 - gate)))
                grads.dz[token] = dz.astype(grads.dz.dtype)
            return dD + dy * x, ddt_bias + ddt

        return lax.fori_loop(0, _CHUNK, finish, sums)

    def run_group(c, slot, g):
        """_GROUP states through the chunk: up, to recompute them, and down with their gradients."""
        group = [g * _GROUP + n for n in range(min(states, _GROUP))]
        rate = [_load(arrays.rate.at[n, channels]) for n in group]

        def up(t, h):
            dt, dy, y = _load(smem.step.at[t]), _load(smem.dy.at[t]), _load(smem.y.at[t])
            dtx = dt * _load(smem.x.at[slot, t])
            h = list(h)
            for k, n in enumerate(group):
                smem.h[t * _GROUP + k] = h[k]  # the state before step t
                h[k] = jnp.exp2(dt * rate[k]) * h[k] + dtx * smem.B[slot, t, n]
                y = y + h[k] * smem.C[slot, t, n]
                smem.product[t * _GROUP + k] = dy * h[k]
            smem.y[t] = y
            return tuple(h)

        # Under shard_map what is loaded from an argument is typed as varying over the mesh, and
        # what is computed in a kernel is not; a loop needs one type.
        before = tuple(1.0 * _load(states_ref.at[batch, c, n, channels]) for n in group)
        lax.fori_loop(0, _CHUNK, up, before)
        sum_over_lanes(grads.dC.at[block, batch, c, g])

        def down(i, carry):
            t = _CHUNK - 1 - i
            dh, dA = (list(v) for v in carry)
            dt, dy = _load(smem.step.at[t]), _load(smem.dy.at[t])
            dh_b, v_a = _load(smem.dh_b.at[t]), _load(smem.v_a.at[t])
            dtx = dt * _load(smem.x.at[slot, t])
            for k, n in enumerate(group):
                dh[k] = dh[k] + dy * smem.C[slot, t, n]
                smem.product[t * _GROUP + k] = dh[k] * dtx
                dh_b = dh_b + dh[k] * smem.B[slot, t, n]
                dh[k] = dh[k] * jnp.exp2(dt * rate[k])
                v = dh[k] * _load(smem.h.at[t * _GROUP + k])
                v_a = v_a + v * rate[k]
                dA[k] = dA[k] + v * dt
            smem.dh_b[t] = dh_b
            smem.v_a[t] = v_a
            return tuple(dh), tuple(dA)

        carry = tuple(tuple(_load(rows.at[n]) for n in group) for rows in (smem.dh, smem.dA))
        dh, dA = lax.fori_loop(0, _CHUNK, down, carry)
        for k, n in enumerate(group):
            smem.dh[n] = dh[k]
            smem.dA[n] = dA[k]
        sum_over_lanes(grads.dB.at[block, batch, c, g])

    dD, ddt_bias = lax.fori_loop(0, chunks, run_chunk, (_zeros(), _zeros()))
    grads.dD[batch, channels] = dD
    grads.ddt_bias[batch, channels] = ddt_bias

    @pl.loop(0, padded_states)
    def _(n):
        grads.dA[batch, n, channels] = _load(smem.dA.at[n])


# Plain JAX


class _Tokens(NamedTuple):
    """The arrays with a time axis."""

    x: Any
    dt: Any
    B: Any
    C: Any
    z: Any


class _Params(NamedTuple):
    """The arrays without one, in the dtype of the arithmetic."""

    A: Any
    D: Any
    dt_bias: Any


def _split(x, dt, A, B, C, D, z, dt_bias) -> tuple[_Tokens, _Params]:
    # Cast before the scan over chunks, whose backward adds these arrays' gradients up.
    acc = jnp.result_type(jnp.float32, x, dt, A, B, C)
    params = jax.tree.map(lambda v: v.astype(acc), _Params(A, D, dt_bias))
    return _Tokens(x, dt, B, C, z), params


def selective_scan_reference(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    *,
    dt_softplus: bool = False,
) -> jax.Array:
    """:func:`selective_scan` in plain JAX: a scan over chunks of 8 steps.

    Differentiable in both modes and to any order. The backward keeps the state before each chunk
    and runs the chunk again, so that it holds no more than the kernels do.
    """
    if x.shape[1] == 0:
        return jnp.zeros_like(x)
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)

    @jax.checkpoint
    def body(h, chunk):
        return _run_chunk(h, chunk[0], params, dt_softplus, chunk[1])

    _, out = lax.scan(body, _initial_state(tokens, params), _to_chunks(tokens))
    return _from_chunks(out, x.shape[1])


def _reference_fwd(options: _Options, save: bool, x, dt, A, B, C, D, z, dt_bias):
    tokens, params = _split(x, dt, A, B, C, D, z, dt_bias)
    if x.shape[1] == 0:
        empty = jnp.zeros((x.shape[0], 0, A.shape[1], A.shape[0]), jnp.float32)
        return jnp.zeros_like(x), empty if save else None

    @jax.checkpoint
    def body(h, chunk):
        after, out = _run_chunk(h, chunk[0], params, options.dt_softplus, chunk[1])
        return after, (out, h if save else None)

    _, (out, states) = lax.scan(body, _initial_state(tokens, params), _to_chunks(tokens))
    return _from_chunks(out, x.shape[1]), jnp.moveaxis(states, 0, 1) if save else None


def _reference_bwd(options: _Options, x, dt, A, B, C, D, z, dt_bias, states, dout):
    """The gradients; those that sum over channels, batch rows or time are left in fp32."""
    f32 = states.dtype
    tokens, params = _split(x, dt, A, B.astype(f32), C.astype(f32), D, z, dt_bias)
    if x.shape[1] == 0:
        zeros = jax.tree.map(jnp.zeros_like, (tokens, params))
        return _as_arguments(*zeros)

    @jax.checkpoint
    def body(carry, chunk):
        dh, dparams = carry
        tokens, valid, before, dout = chunk

        def run(h, tokens, params):
            return _run_chunk(h, tokens, params, options.dt_softplus, valid)

        _, vjp = jax.vjp(run, before, tokens, params)
        dh, dtokens, more = vjp((dh, dout))
        return (dh, jax.tree.map(jnp.add, dparams, more)), dtokens

    (chunks, valid), (douts, _) = _to_chunks(tokens), _to_chunks(dout)
    zeros = jax.tree.map(jnp.zeros_like, (states[:, 0], params))
    xs = (chunks, valid, jnp.moveaxis(states, 1, 0), douts)
    (_, dparams), dtokens = lax.scan(body, zeros, xs, reverse=True)
    return _as_arguments(jax.tree.map(lambda v: _from_chunks(v, x.shape[1]), dtokens), dparams)


def _as_arguments(tokens: _Tokens, params: _Params) -> tuple[Any, ...]:
    x, dt, B, C, z = tokens
    A, D, dt_bias = params
    return x, dt, A, B, C, D, z, dt_bias


def _run_chunk(h, tokens: _Tokens, params: _Params, dt_softplus: bool, valid: Any = None):
    """k steps from the state h, (B, N, D), to the state after them and out, (B, k, D).

    Steps that are not `valid`, (k,), leave the state as it is.
    """
    acc = h.dtype
    x, dt, B, C = (v.astype(acc) for v in tokens[:4])
    if params.dt_bias is not None:
        dt = dt + params.dt_bias
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    if valid is not None:
        dt = jnp.where(valid[:, None], dt, 0)
    A = params.A.T  # (N, D): channels last, so that loops run along them
    dtx = dt * x
    ys = []
    for t in range(x.shape[1]):
        decay = jnp.exp(dt[:, t, None, :] * A)
        h = decay * h + jnp.einsum("bd,bn->bnd", dtx[:, t], B[:, t])
        # As a dot, for its transpose is a sum over channels, which is slow as a sum on a CPU.
        ys.append(jnp.einsum("bnd,bn->bd", h, C[:, t], precision="highest"))
    y = jnp.stack(ys, axis=1)
    if params.D is not None:
        y = y + params.D * x
    if tokens.z is not None:
        y = y * jax.nn.silu(tokens.z.astype(acc))
    return h, y.astype(tokens.x.dtype)


def _initial_state(tokens: _Tokens, params: _Params) -> jax.Array:
    """Zeros (B, N, D), distributed over devices as the states will be."""
    x, dt, B, C, _ = tokens
    like = (x * dt)[:, 0, None, :] * (B * C)[:, 0, :, None] * params.A.T
    return jnp.where(True, jnp.zeros((), params.A.dtype), like.astype(params.A.dtype))


def _to_chunks(tokens: Any) -> tuple[Any, jax.Array | None]:
    """(B, L, ·) as (⌈L/k⌉, B, k, ·) with zeros after the end; and which steps are no such zeros."""
    length = jax.tree.leaves(tokens)[0].shape[1]
    k = min(_CHUNK, length)
    pad = -length % k

    def split(v):
        v = jnp.pad(v, ((0, 0), (0, pad), (0, 0)))
        return jnp.moveaxis(v.reshape(v.shape[0], v.shape[1] // k, k, v.shape[2]), 1, 0)

    valid = (jnp.arange(length + pad) < length).reshape(-1, k) if pad else None
    return jax.tree.map(split, tokens), valid


def _from_chunks(v: jax.Array, length: int) -> jax.Array:
    """(c, B, k, ·) as (B, L, ·)."""
    v = jnp.moveaxis(v, 0, 1)
    return v.reshape(v.shape[0], v.shape[1] * v.shape[2], v.shape[3])[:, :length]
