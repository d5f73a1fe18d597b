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
the 8 bytes (bf16; 16 with states) of the forward and the 22 of the backward. Where batch rows and
channels are too few to fill the GPU, the sequence is cut into segments, at N exponentials more.

Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
arXiv:2312.00752.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, device_unsupported, resolve
from jaxkern.core.kernel_pass import KernelPass, match_primal, match_sharding
from jaxkern.ops.selective_scan.kernels import MAX_STATES, launch_bwd, launch_fwd
from jaxkern.ops.selective_scan.reference import (
    Options,
    reference_bwd,
    reference_fwd,
    selective_scan_reference,
    step,
)


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
    options = Options(dt_softplus=bool(dt_softplus), mode=mode)
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
    return step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus=dt_softplus)


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
    if states > MAX_STATES:
        return f"A has {states} states per channel, and the kernels hold at most {MAX_STATES}"
    return device_unsupported()


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
def _forward_pass(options: Options, *, save: bool) -> KernelPass:
    return KernelPass(
        name="selective_scan_fwd",
        mode=options.mode,
        kernel=functools.partial(launch_fwd, options, save),
        reference=functools.partial(reference_fwd, options, save),
        ins=_ARGUMENTS,
        outs=("b l d", _STATES),
        whole="l n c",
    )


@functools.cache
def _backward_pass(options: Options) -> KernelPass:
    return KernelPass(
        name="selective_scan_bwd",
        mode=options.mode,
        kernel=functools.partial(launch_bwd, options),
        reference=functools.partial(reference_bwd, options),
        ins=(*_ARGUMENTS, _STATES, "b l d"),
        outs=_ARGUMENTS,
        whole="l n c",
    )
