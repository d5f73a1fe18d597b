r"""RMS normalisation.

Forward, for a row x of N elements, weight w and offset o:

    rstd = 1 / sqrt(mean(x²) + eps)          x̂ = x · rstd          y = x̂ · (w + o)

Backward, for the cotangent dy:

    g  = dy · (w + o)          dx = rstd · (g − x̂ · mean(g · x̂))          dw = Σ_rows dy · x̂

Saved for the backward: x, w and rstd (fp32, one per row); x̂ is recomputed.

Bytes per element of x, in units of its size: 2 forward (read x, write y), 3 backward (read x and
dy, write dx). With about 4 operations per element forward and 12 backward, both passes wait for
memory alone.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.arguments import check_array, check_floating, check_number
from jaxkern.core.dispatch import Implementation, Mode, device_unsupported, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding
from jaxkern.core.mosaic import LANES, grid_axes, lane_vector, num_sms, windows


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Normalise the last axis of `x` by its root mean square.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + o)

    Squares, their mean and the products are computed in fp32, whatever the dtypes; the result is
    rounded once, to the dtype of `x`. For the backward, `x`, `weight` and one fp32 number per row
    are kept. A row with a NaN or an infinity does not touch the others' results or gradients (but
    for the gradient of `weight`, which sums over rows).

    On a mesh, the rows may be split between devices in any way; a split last axis is gathered.

    Args:
      x: (..., N), bfloat16, float16 or float32.
      weight: (N,), any of those dtypes; ``None`` stands for ones, without `weight_offset`.
      eps: added to the mean square.
      weight_offset: added to `weight` in fp32; 1.0 for models that store ``weight - 1``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest: the kernels on an
        NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or not a Python number.
      ValueError: a shape does not fit, or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, weight = jnp.ones((2, 8, 256), jnp.bfloat16), jnp.ones(256)
      >>> jaxkern.rms_norm(x, weight).shape
      (2, 8, 256)
      >>> dweight = jax.grad(lambda w: jaxkern.rms_norm(x, w).sum())(weight)

    References:
      Zhang and Sennrich, `Root Mean Square Layer Normalization
      <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    x = check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis to normalise, got a scalar")
    if weight is not None:
        weight = check_array("weight", weight, (x.shape[-1],), "(N,), N the last axis of x")
    options = _Options(
        eps=check_number("eps", eps, minimum=0.0),
        weight_offset=check_number("weight_offset", weight_offset),
        mode=resolve(
            implementation, _unsupported(x, weight), op="rms_norm", slower=_slower(x.shape[-1])
        ),
    )
    if options.mode == "xla":
        return rms_norm_reference(x, weight, eps=eps, weight_offset=weight_offset)
    return _rms_norm_jit(x, weight, options)


def _unsupported(x: Any, weight: Any) -> str | None:
    """Why the kernels, forward and backward, cannot take this call."""
    for name, array in (("x", x), ("weight", weight)):
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {array.dtype}, and the kernels take bfloat16, float16 and float32"
    return device_unsupported()


def _slower(n: int) -> str | None:
    """Why XLA is faster than the kernels for rows of `n`."""
    if n < LANES:  # on an H200 at 64, forward 13.5 µs against 2.2 and backward 22.2 against 8.1
        return f"a row of {n} elements is padded to {LANES} for the kernel"
    return None


@dataclasses.dataclass(frozen=True)
class _Options:
    eps: float
    weight_offset: float
    mode: Mode


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array | None, options: _Options) -> jax.Array:
    return _rms_norm_fwd(x, weight, options)[0]


def _rms_norm_fwd(x, weight, options):
    out, rstd = _forward_pass(options, x.ndim)(x, weight)
    return match_sharding(out, x), (x, weight, rstd)


def _rms_norm_bwd(options, res, dout):
    x, weight, rstd = res
    dx, dweight = _backward_pass(options, x.ndim)(x, weight, rstd, dout)
    return match_primal(dx, x), match_primal(dweight, weight)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
_rms_norm_jit = jax.jit(_rms_norm, static_argnums=2)


@functools.cache
def _forward_pass(options: _Options, ndim: int) -> KernelPass:
    rows = " ".join("abcdefghijklm"[: ndim - 1])
    return KernelPass(
        name="rms_norm_fwd",
        mode=options.mode,
        kernel=functools.partial(_launch_fwd, options),
        reference=functools.partial(_reference_fwd, options),
        ins=(f"{rows} n", "n"),
        outs=(f"{rows} n", rows),
        whole="n",
    )


@functools.cache
def _backward_pass(options: _Options, ndim: int) -> KernelPass:
    rows = " ".join("abcdefghijklm"[: ndim - 1])
    return KernelPass(
        name="rms_norm_bwd",
        mode=options.mode,
        kernel=functools.partial(_launch_bwd, options),
        reference=functools.partial(_reference_bwd, options),
        ins=(f"{rows} n", "n", rows, f"{rows} n"),
        outs=(f"{rows} n", "n"),
        whole="n",
    )


_BLOCK, _COLUMN, _SEGMENT = grid_axes("block", "column", "segment")


# Tiles


_FWD_RESIDENT = 16384
"""Longest row that the forward holds in registers: 128 elements per thread, 64 registers in bf16.
A longer one is read twice, the second time from the L2 cache."""

_BWD_RESIDENT = 8192
"""Longest row for which the backward holds its part of dw in registers, 64 per thread. Beyond it,
dx and dw are two kernels."""

_CHUNK = 8192
"""Elements of a longer row in registers at a time. Forward at 65536, % of an H200's copy bandwidth:
58 with 4096, 63 with 8192 and with 16384."""

_BOX = 256
"""Most elements along one dimension of a TMA copy."""

_SHARED_BYTES = 220 << 10


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How rows are spread over the GPU.

    Attributes:
      fwd_rows: rows per block of the forward, all loaded before the first is summed.
      bwd_blocks_per_sm: blocks per multiprocessor of the backward, each with its own partial dw.
      bwd_stages: rows of x and dy on their way through shared memory, per block.
      bwd_keep_weight: whether the backward keeps the weight in registers from row to row.
    """

    fwd_rows: int
    bwd_blocks_per_sm: int
    bwd_stages: int
    bwd_keep_weight: bool

    def __post_init__(self) -> None:
        assert self.fwd_rows >= 1, self
        assert self.bwd_blocks_per_sm >= 1, self
        assert self.bwd_stages >= 2, self


def tiles(n: int, itemsize: int) -> Tiles:
    """The fastest on an H200 over 16384 rows in bf16; % of the copy bandwidth, best of each sweep.

    Forward: one row per block reaches 94 at 2048 and 96 at 4096; two rows gain 2 at 1024 (90) and
    3 at 8192 (97), and lose 2 at 4096. Backward: 8 / 2 / 1 blocks per multiprocessor reach 82 / 97
    / 91 at 1024 / 4096 / 8192; with one block more at 4096 it is 83, as the registers (dw and, up
    to 4096, the weight) no longer fit. At 8192 four stages make up for the single block: 91 against
    59 with three, and the weight is better read again from the L1 cache (57 when kept).
    """
    blocks = max(1, min(8, 8192 // n))
    stages = 4 if blocks == 1 else 2
    return Tiles(
        fwd_rows=1 if 1024 < n < 8192 or n > 8192 else 2,
        bwd_blocks_per_sm=blocks,
        bwd_stages=max(2, min(stages, _SHARED_BYTES // (2 * n * itemsize))),
        bwd_keep_weight=n <= 4096,
    )


def _itemsize(*arrays: Any) -> int:
    return min(a.dtype.itemsize for a in arrays if a is not None)


def _rows(x: jax.Array) -> jax.Array:
    """(M, N) with N >= LANES: zeros after a shorter row's end, which change no sum."""
    x = x.reshape(-1, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, max(0, LANES - x.shape[-1]))))


# Forward


def _launch_fwd(options: _Options, x: Any, weight: Any):
    if x.size == 0:
        return _reference_fwd(options, x, weight)
    n = x.shape[-1]
    tile = tiles(n, x.dtype.itemsize)
    rows, weights = _rows(x), [] if weight is None else [_rows(weight)[0]]
    m, width = rows.shape
    resident = width <= _FWD_RESIDENT
    row_windows = windows(width, width if resident else _CHUNK, _itemsize(x, weight))
    per_block = tile.fwd_rows if resident else 1
    body = functools.partial(
        _fwd_kernel if resident else _fwd_long_kernel, options, row_windows, n, per_block
    )
    out, rstd = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((m, width), x.dtype),
            jax.ShapeDtypeStruct((m,), jnp.float32),
        ),
        grid=(-(-m // per_block),),
        grid_names=(_BLOCK,),
        kernel_name="rms_norm_fwd",
    )(rows, *weights)
    return out[:, :n].reshape(x.shape), rstd.reshape(x.shape[:-1])


def _fwd_kernel(options, row, n, per_block, x_ref, *refs):
    *weight_ref, out_ref, rstd_ref = refs  # x, out (M, N); weight (N,); rstd (M,)
    # The last block's surplus rows repeat the last row.
    first = lax.axis_index(_BLOCK) * per_block
    indices = [jnp.minimum(first + r, x_ref.shape[0] - 1) for r in range(per_block)]
    xs = [[row.load(x_ref.at[m], i) for i in range(row.count)] for m in indices]
    scales = [_scale(options, row, weight_ref, i) for i in range(row.count)]
    for m, x in zip(indices, xs, strict=True):
        x = [v.astype(jnp.float32) for v in x]
        squares = sum(row.once(i, v * v) for i, v in enumerate(x))  # (window,)
        rstd = lax.rsqrt(jnp.sum(squares) * (1 / n) + options.eps)
        rstd_ref[m] = rstd
        for i, v in enumerate(x):
            row.store(out_ref.at[m], i, _times(v * rstd, scales[i]))


def _fwd_long_kernel(options, row, n, per_block, x_ref, *refs):
    del per_block
    *weight_ref, out_ref, rstd_ref = refs
    m = lax.axis_index(_BLOCK)

    def add_squares(i, squares):
        v = row.load(x_ref.at[m], i).astype(jnp.float32)
        return squares + row.once(i, v * v)

    squares = lax.fori_loop(0, row.count, add_squares, row.full(0.0))
    rstd = lax.rsqrt(jnp.sum(squares) * (1 / n) + options.eps)
    rstd_ref[m] = rstd

    @pl.loop(0, row.count)
    def _(i):
        v = row.load(x_ref.at[m], i).astype(jnp.float32)
        row.store(out_ref.at[m], i, _times(v * rstd, _scale(options, row, weight_ref, i)))


def _scale(options, row, weight_ref, i):
    """w + o of window `i` in fp32, or None without a weight."""
    if not weight_ref:
        return None
    return row.load(weight_ref[0], i).astype(jnp.float32) + options.weight_offset


def _times(x, scale):
    return x if scale is None else x * scale


# Backward


def _launch_bwd(options: _Options, x: Any, weight: Any, rstd: Any, dout: Any):
    if x.size == 0:
        return _reference_bwd(options, x, weight, rstd, dout)
    n = x.shape[-1]
    tile = tiles(n, x.dtype.itemsize)
    if n > _BWD_RESIDENT:
        launch = _launch_bwd_split
    elif n % _BOX == 0:
        launch = _launch_bwd_ring
    else:
        launch = _launch_bwd_direct
    weights = [] if weight is None else [_rows(weight)[0]]
    dx, partial_dweight = launch(options, tile, n, _rows(x), weights, rstd.reshape(-1), _rows(dout))
    dx = dx[:, :n].reshape(x.shape)
    if weight is None or partial_dweight is None:
        return dx, None
    return dx, jnp.sum(partial_dweight, axis=0)[:n].astype(weight.dtype)


def _launch_bwd_ring(options, tile, n, x, weights, rstd, dout):
    """A block's rows stream through a ring of slots in shared memory, ahead of the arithmetic."""
    m = x.shape[0]
    row = (n // _BOX, _BOX)
    blocks = min(m, num_sms() * tile.bwd_blocks_per_sm)
    ring = [
        plgpu.SMEM((tile.bwd_stages, *row), x.dtype),
        plgpu.SMEM((tile.bwd_stages, *row), x.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=tile.bwd_stages),
    ]
    dx, *partial = plgpu.kernel(
        functools.partial(_bwd_ring_kernel, options, n, tile, bool(weights)),
        out_type=(
            jax.ShapeDtypeStruct((m, *row), x.dtype),
            *(jax.ShapeDtypeStruct((blocks, *row), jnp.float32) for _ in weights),
        ),
        scratch_types=ring,
        grid=(blocks,),
        grid_names=(_BLOCK,),
        kernel_name="rms_norm_bwd",
    )(x.reshape(m, *row), rstd, dout.reshape(m, *row), *(w.reshape(row) for w in weights))
    return dx.reshape(m, n), partial[0].reshape(blocks, n) if partial else None


def _bwd_ring_kernel(options, n, tile, has_weight, x_ref, rstd_ref, dout_ref, *refs):
    *weight_ref, dx_ref = refs[: 1 + has_weight]  # x, dout, dx (M, N / 256, 256)
    *partial_ref, x_smem, dout_smem, arrived = refs[1 + has_weight :]
    m, *shape = x_ref.shape
    stages = tile.bwd_stages
    block, blocks = lax.axis_index(_BLOCK), lax.axis_size(_BLOCK)
    rows = (m - block + blocks - 1) // blocks
    layout = plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=lane_vector(n, x_ref.dtype.itemsize))

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def fetch(k):
        @pl.when(k < rows)
        def _():
            index, slot = block + k * blocks, lax.rem(k, stages)
            plgpu.copy_gmem_to_smem(x_ref.at[index], x_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(dout_ref.at[index], dout_smem.at[slot], arrived.at[slot])

    def scale():
        return load(weight_ref[0]) + options.weight_offset if has_weight else None

    kept = scale() if tile.bwd_keep_weight else None

    def step(k, partial):
        fetch(k + stages - 1)
        index, slot = block + k * blocks, lax.rem(k, stages)
        rstd = rstd_ref[index]
        plgpu.barrier_wait(arrived.at[slot])
        xhat = load(x_smem.at[slot]) * rstd
        dout = load(dout_smem.at[slot])
        g = _times(dout, kept if tile.bwd_keep_weight else scale())
        mean = jnp.sum(g * xhat) * (1 / n)
        dx_ref[index] = ((g - xhat * mean) * rstd).astype(dx_ref.dtype)
        return partial + dout * xhat if has_weight else partial

    for k in range(stages - 1):
        fetch(k)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout) if has_weight else ()
    partial = lax.fori_loop(0, rows, step, zeros)
    if has_weight:
        partial_ref[0][block] = partial


def _launch_bwd_direct(options, tile, n, x, weights, rstd, dout):
    """Rows that no TMA copy fits, from global memory to registers."""
    m, width = x.shape
    row = windows(width, width, _itemsize(x, *weights))
    blocks = min(m, num_sms() * tile.bwd_blocks_per_sm)
    dx, *partial = plgpu.kernel(
        functools.partial(_bwd_direct_kernel, options, row, n, bool(weights)),
        out_type=(
            jax.ShapeDtypeStruct((m, width), x.dtype),
            *(jax.ShapeDtypeStruct((blocks, width), jnp.float32) for _ in weights),
        ),
        grid=(blocks,),
        grid_names=(_BLOCK,),
        kernel_name="rms_norm_bwd",
    )(x, rstd, dout, *weights)
    return dx, partial[0] if partial else None


def _bwd_direct_kernel(options, row, n, has_weight, x_ref, rstd_ref, dout_ref, *refs):
    *weight_ref, dx_ref = refs[: 1 + has_weight]  # x, dout, dx (M, N)
    partial_ref = refs[1 + has_weight :]  # (blocks, N)
    block, blocks = lax.axis_index(_BLOCK), lax.axis_size(_BLOCK)
    rows = (x_ref.shape[0] - block + blocks - 1) // blocks
    each = range(row.count)

    def step(k, partial):
        index = block + k * blocks
        rstd = rstd_ref[index]
        xhat = [row.load(x_ref.at[index], i).astype(jnp.float32) * rstd for i in each]
        dout = [row.load(dout_ref.at[index], i).astype(jnp.float32) for i in each]
        g = [_times(dout[i], _scale(options, row, weight_ref, i)) for i in each]
        mean = jnp.sum(sum(row.once(i, g[i] * xhat[i]) for i in each)) * (1 / n)
        for i in each:
            row.store(dx_ref.at[index], i, (g[i] - xhat[i] * mean) * rstd)
        return tuple(p + dout[i] * xhat[i] for i, p in enumerate(partial))

    zeros = tuple(row.full(0.0) for _ in each) if has_weight else ()
    partial = lax.fori_loop(0, rows, step, zeros)
    for i, p in enumerate(partial):
        row.store(partial_ref[0].at[block], i, p)


def _launch_bwd_split(options, tile, n, x, weights, rstd, dout):
    """dx row by row, reading it twice (the second time from L2), then dw column by column."""
    del tile
    m, width = x.shape
    row = windows(width, _CHUNK, _itemsize(x, *weights))
    dx = plgpu.kernel(
        functools.partial(_bwd_dx_kernel, options, row, n),
        out_type=jax.ShapeDtypeStruct((m, width), x.dtype),
        grid=(m,),
        grid_names=(_BLOCK,),
        kernel_name="rms_norm_bwd",
    )(x, rstd, dout, *weights)
    if not weights:
        return dx, None
    columns = windows(width, LANES * 8, _itemsize(x, dout))
    segments = min(m, max(1, num_sms() * 8 // columns.count))
    partial = plgpu.kernel(
        functools.partial(_bwd_dweight_kernel, columns),
        out_type=jax.ShapeDtypeStruct((segments, width), jnp.float32),
        grid=(columns.count, segments),
        grid_names=(_COLUMN, _SEGMENT),
        kernel_name="rms_norm_bwd_dweight",
    )(x, rstd, dout)
    return dx, partial


def _bwd_dx_kernel(options, row, n, x_ref, rstd_ref, dout_ref, *refs):
    *weight_ref, dx_ref = refs
    m = lax.axis_index(_BLOCK)
    rstd = rstd_ref[m]

    def g_and_xhat(i):
        xhat = row.load(x_ref.at[m], i).astype(jnp.float32) * rstd
        dout = row.load(dout_ref.at[m], i).astype(jnp.float32)
        return _times(dout, _scale(options, row, weight_ref, i)), xhat

    def add_products(i, products):
        g, xhat = g_and_xhat(i)
        return products + row.once(i, g * xhat)

    mean = jnp.sum(lax.fori_loop(0, row.count, add_products, row.full(0.0))) * (1 / n)

    @pl.loop(0, row.count)
    def _(i):
        g, xhat = g_and_xhat(i)
        row.store(dx_ref.at[m], i, (g - xhat * mean) * rstd)


def _bwd_dweight_kernel(columns, x_ref, rstd_ref, dout_ref, partial_ref):
    m = x_ref.shape[0]
    column = lax.axis_index(_COLUMN)
    segment, segments = lax.axis_index(_SEGMENT), lax.axis_size(_SEGMENT)

    def add_row(k, partial):
        index = segment + k * segments
        x = columns.load(x_ref.at[index], column).astype(jnp.float32)
        dout = columns.load(dout_ref.at[index], column).astype(jnp.float32)
        return partial + dout * (x * rstd_ref[index])

    rows = (m - segment + segments - 1) // segments
    partial = lax.fori_loop(0, rows, add_row, columns.full(0.0))
    columns.store(partial_ref.at[segment], column, partial)


# Reference


def rms_norm_reference(
    x: jax.Array, weight: jax.Array | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0
) -> jax.Array:
    """:func:`rms_norm` in plain JAX, with every step in fp32 and one rounding at the end."""
    return _reference_fwd(_Options(eps, weight_offset, "xla"), x, weight)[0]


def _reference_fwd(options, x, weight):
    x_wide = x.astype(_wide(x))
    rstd = lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1) + options.eps)
    out = x_wide * rstd[..., None]
    if weight is not None:
        out = out * (weight.astype(out.dtype) + options.weight_offset)
    return out.astype(x.dtype), rstd


def _reference_bwd(options, x, weight, rstd, dout):
    xhat = x.astype(_wide(x)) * rstd[..., None]
    dout = dout.astype(xhat.dtype)
    g = dout
    if weight is not None:
        g = dout * (weight.astype(xhat.dtype) + options.weight_offset)
    dx = rstd[..., None] * (g - xhat * jnp.mean(g * xhat, axis=-1, keepdims=True))
    if weight is None:
        return dx.astype(x.dtype), None
    dweight = jnp.sum(dout * xhat, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)
