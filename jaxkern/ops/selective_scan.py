"""Selective scan, the recurrence of Mamba (S6): a diagonal linear system with per-token weights.

Forward, for every batch row b and channel d, with n running over the N states and h[−1] = 0::

    dt[t]  = softplus(dt[t] + dt_bias)                     (softplus only if dt_softplus)
    h[t,n] = exp(dt[t] · A[n]) · h[t−1,n] + dt[t] · x[t] · B[t,n]
    y[t]   = Σ_n C[t,n] · h[t,n] + D · x[t]
    out[t] = y[t] · silu(z[t])

Everything is float32 inside, whatever the dtypes of the arguments; out has the dtype of x.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

__all__ = ["selective_scan", "selective_scan_reference", "selective_scan_step"]

# Steps of time between two saved states.  On 2 CPU cores, forward + backward at (8, 256, 256, 16)
# and (8, 512, 1536, 16): 8 steps 37 and 540 ms, 4 steps 35 and 590, 16 steps 44 and 630 (twice the
# compile time); a scan over single steps 87 and 890, an associative scan per chunk 157 and 1840.
_CHUNK = 8


def selective_scan(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    implementation: Literal["mosaic", "xla"] | None = None,
) -> Array:
    """Runs Mamba's selective state space recurrence along time."""
    args = _check("selective_scan", x, dt, A, B, C, D, z, dt_bias, ndim=3)
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(
            f'selective_scan: implementation must be "mosaic", "xla" or None, '
            f"got {implementation!r}."
        )
    if implementation == "mosaic":
        raise NotImplementedError("selective_scan: the mosaic implementation is not there yet.")
    return selective_scan_reference(*args[:-1], dt_bias=args[-1], dt_softplus=dt_softplus)


def selective_scan_step(
    state: ArrayLike,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    *,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
) -> tuple[Array, Array]:
    """Runs :func:`selective_scan` for one token, for step-by-step decoding.

    The same equations as :func:`selective_scan` for a single t.  Start from zeros.

    Args:
        state: h[t−1] of shape ``(B, D, N)``, float32.
        x: Inputs ``(B, D)``, floating point.
        dt: Step sizes ``(B, D)``.
        A: Decay rates ``(D, N)``, real.
        B: Input weights ``(B, N)``.
        C: Output weights ``(B, N)``.
        D: Skip weights ``(D,)``, or None.
        z: Gates ``(B, D)``, or None.
        dt_bias: Added to dt, ``(D,)``, or None.
        dt_softplus: Whether softplus is applied to dt + dt_bias.

    Returns:
        Outputs ``(B, D)`` in the dtype of x, and h[t], ``(B, D, N)`` float32.

    Raises:
        TypeError: If an argument is not real floating point.
        ValueError: If shapes do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> state, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1))
        >>> for _ in range(2):  # A = 0: the state adds up its inputs
        ...     out, state = selective_scan_step(state, one, one, 0 * one, one, one)
        >>> out
        Array([[2.]], dtype=float32)

    References:
        Gu and Dao, `Mamba: Linear-Time Sequence Modeling with Selective State Spaces
        <https://arxiv.org/abs/2312.00752>`_, 2023.
    """
    name = "selective_scan_step"
    x, dt, A, B, C, D, z, dt_bias = _check(name, x, dt, A, B, C, D, z, dt_bias, ndim=2)
    state = jnp.asarray(state)
    if not jnp.issubdtype(state.dtype, jnp.floating):
        raise TypeError(f"{name}: state must be floating point, got {state.dtype}.")
    want = (*x.shape, A.shape[1])
    if state.shape != want:
        raise ValueError(
            f"{name}: state must have shape (B, D, N) = {want}, got {state.shape}. "
            "Start from zeros of that shape."
        )
    h = jnp.swapaxes(state.astype(_acc_dtype(x, dt, A, B, C)), 1, 2)  # (B, N, D)
    tokens = _Tokens(x, dt, B, C, z)
    params = _Params(A, D, dt_bias)
    h, out = _run_chunk(h, jax.tree.map(lambda v: v[:, None], tokens), params, dt_softplus)
    return out[:, 0], jnp.swapaxes(h, 1, 2)


class _Tokens(NamedTuple):
    """The arrays with a time axis, ``(B, k, ·)``."""

    x: Array
    dt: Array
    B: Array
    C: Array
    z: Array | None


class _Params(NamedTuple):
    """The arrays without one."""

    A: Array
    D: Array | None
    dt_bias: Array | None


def selective_scan_reference(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
) -> Array:
    """The specification of :func:`selective_scan` in plain JAX, and its ``"xla"`` implementation.

    A scan over chunks of a few steps each.  The backward keeps the state before each chunk,
    ``(L/8, B, N, D)`` float32, and recomputes within a chunk, so nothing of size B·L·D·N is ever
    held.  Differentiable in both modes and to any order.
    """
    if x.shape[1] == 0:
        return jnp.zeros_like(x)
    tokens, params = _Tokens(x, dt, B, C, z), _Params(A, D, dt_bias)

    @jax.checkpoint
    def body(h: Array, chunk: tuple[_Tokens, Array | None]) -> tuple[Array, Array]:
        return _run_chunk(h, chunk[0], params, dt_softplus, chunk[1])

    _, out = lax.scan(body, _initial_state(tokens, params), _to_chunks(tokens))
    return _from_chunks(out, x.shape[1])


def _run_chunk(
    h: Array,
    tokens: _Tokens,
    params: _Params,
    dt_softplus: bool,
    valid: Array | None = None,
) -> tuple[Array, Array]:
    """Runs the k steps of one chunk from the state h, ``(B, N, D)``.

    Returns the state after it and out, ``(B, k, D)``.  Where ``valid`` (k,) is False the state
    stays as it is.
    """
    acc = h.dtype
    x, dt, B, C = (v.astype(acc) for v in tokens[:4])
    if params.dt_bias is not None:
        dt = dt + params.dt_bias.astype(acc)
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    if valid is not None:
        dt = jnp.where(valid[:, None], dt, 0)
    A = params.A.astype(acc).T  # (N, D): channels last, so that every loop runs along them
    dtx = dt * x
    ys = []
    for t in range(x.shape[1]):
        decay = jnp.exp(dt[:, t, None, :] * A)
        h = decay * h + jnp.einsum("bd,bn->bnd", dtx[:, t], B[:, t])
        # A dot, because its transpose sums over channels, which XLA's CPU backend does faster so.
        ys.append(jnp.einsum("bnd,bn->bd", h, C[:, t], precision="highest"))
    y = jnp.stack(ys, axis=1)
    if params.D is not None:
        y = y + params.D.astype(acc) * x
    if tokens.z is not None:
        y = y * jax.nn.silu(tokens.z.astype(acc))
    return h, y.astype(tokens.x.dtype)


def _initial_state(tokens: _Tokens, params: _Params) -> Array:
    """Zeros ``(B, N, D)``, distributed over devices as the state will be."""
    x, dt, B, C, _ = tokens
    like = (x * dt)[:, 0, None, :] * (B * C)[:, 0, :, None] * params.A.T
    return jnp.where(True, jnp.zeros((), _acc_dtype(x, dt, params.A, B, C)), like)


def _to_chunks(tokens: _Tokens) -> tuple[_Tokens, Array | None]:
    """Splits time: every ``(B, L, ·)`` turns ``(⌈L/k⌉, B, k, ·)``, with the valid steps."""
    length = tokens.x.shape[1]
    k = min(_CHUNK, length)
    pad = -length % k

    def split(v: Array) -> Array:
        v = jnp.pad(v, ((0, 0), (0, pad), (0, 0)))
        return jnp.moveaxis(v.reshape(v.shape[0], v.shape[1] // k, k, v.shape[2]), 1, 0)

    valid = (jnp.arange(length + pad) < length).reshape(-1, k) if pad else None
    return jax.tree.map(split, tokens), valid


def _from_chunks(v: Array, length: int) -> Array:
    """Undoes :func:`_to_chunks`: ``(c, B, k, ·)`` to ``(B, L, ·)``."""
    v = jnp.moveaxis(v, 0, 1)
    return v.reshape(v.shape[0], v.shape[1] * v.shape[2], v.shape[3])[:, :length]


def _acc_dtype(*arrays: Array) -> jnp.dtype:
    """The dtype of the arithmetic: float32, or float64 if an argument is."""
    return jnp.result_type(jnp.float32, *arrays)


def _check(
    name: str,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None,
    z: ArrayLike | None,
    dt_bias: ArrayLike | None,
    *,
    ndim: int,
) -> tuple[Array, Array, Array, Array, Array, Array | None, Array | None, Array | None]:
    """Returns the arguments as arrays, or says which one breaks which rule."""
    x, dt, A, B, C = (jnp.asarray(v) for v in (x, dt, A, B, C))
    D, z, dt_bias = (None if v is None else jnp.asarray(v) for v in (D, z, dt_bias))
    labels = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    for label, value in zip(labels, (x, dt, A, B, C, D, z, dt_bias), strict=True):
        if value is not None and not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name}: {label} must be real floating point, got {value.dtype}. "
                f"Cast it, e.g. {label}.astype(jnp.float32)."
            )
    lead = ("B", "L")[: ndim - 1]
    if x.ndim != ndim:
        raise ValueError(f"{name}: x must have shape ({', '.join(lead)}, D), got {x.shape}.")
    dim = x.shape[-1]
    if A.ndim != 2 or A.shape[0] != dim or A.shape[1] < 1:
        raise ValueError(
            f"{name}: A must have shape (D, N) with D = {dim} channels of x and N >= 1, "
            f"got {A.shape}."
        )
    state = A.shape[1]
    rules = (
        ("dt", dt, (*lead, "D"), x.shape),
        ("B", B, (*lead, "N"), (*x.shape[:-1], state)),
        ("C", C, (*lead, "N"), (*x.shape[:-1], state)),
        ("D", D, ("D",), (dim,)),
        ("z", z, (*lead, "D"), x.shape),
        ("dt_bias", dt_bias, ("D",), (dim,)),
    )
    for label, value, letters, shape in rules:
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{name}: {label} must have shape ({', '.join(letters)}) = {shape} "
                f"to fit x {x.shape} and A {A.shape}, got {value.shape}."
            )
    return x, dt, A, B, C, D, z, dt_bias
