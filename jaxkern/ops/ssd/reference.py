"""The SSD scan in plain JAX, in chunks: the specification and the ``"xla"`` implementation.

A scan over chunks (:mod:`jaxkern.ops.chunks`), each of which is the products of
:mod:`jaxkern.ops.ssd.op`. Arrays here have heads in groups: H = G·R, R heads of a group with the
same B and C.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes
from jaxkern.ops.chunks import (
    ChunkedScan,
    Marks,
    accumulator,
    bad_of,
    decay_sums,
    scan_bwd,
    scan_fwd,
)
from jaxkern.ops.segments import along

SAVED_CHUNK = 128
"""Tokens of which `checkpoint_every` is a multiple: a chunk of the kernels."""

DEFAULT_CHECKPOINT_EVERY = SAVED_CHUNK
"""Tokens from one saved state to the next where the caller does not say."""


@dataclasses.dataclass(frozen=True)
class SsdOptions:
    """The static arguments of the passes."""

    final: bool
    checkpoint_every: int | None
    mode: Mode
    num_segments: int | None = None
    isolate_nan: bool = True  # in its segment, on the kernels, too
    save: bool = False  # states, for the backward
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


def saves_y(options: SsdOptions, z: Any) -> bool:
    """Whether a forward saves what its gate multiplies, which the gradient of `z` needs."""
    return z is not None and options.save and options.checkpoint_every is not None


class Tokens(NamedTuple):
    """The floating arrays with a time axis; `dt` are step sizes, `a` logarithms of decays."""

    x: Any  # (B, L, G, R, P)
    dt: Any  # (B, L, G, R)
    a: Any  # (B, L, G, R)
    B: Any  # (B, L, G, N)
    C: Any  # (B, L, G, N)
    z: Any  # (B, L, G, R, P)

    @property
    def out(self) -> Any:
        return self.x

    @property
    def multiplied(self) -> tuple[Any, ...]:
        return self.x, self.B, self.C

    @property
    def state(self) -> tuple[int, ...]:
        return *self.x.shape[2:], self.B.shape[-1]

    @property
    def saved(self) -> Any:
        """The dtype of saved states: bf16 of bf16, else fp32; fp16 cannot hold one that grows."""
        if self.x.dtype == jnp.bfloat16:
            return jnp.bfloat16
        return jnp.promote_types(self.x.dtype, jnp.float32)

    def widened(self, acc: Any) -> "Tokens":
        return self._replace(B=self.B.astype(acc), C=self.C.astype(acc))

    def not_finite(self, dout: Any) -> tuple[Any, Any, Any]:
        """The last is of D, (G, R, P)."""
        enter = bad_of(self.x, -1) | bad_of(self.B, -1)[..., None] | bad_of(self.dt)
        enter = enter | jnp.isnan(self.a) | (self.a == jnp.inf)  # (B, L, G, R)
        own, skips = bad_of(self.C, -1)[..., None], bad_of(self.x, (0, 1))
        for v in (self.z, dout):
            own = own if v is None else own | bad_of(v, -1)
            skips = skips if v is None else skips | bad_of(v, (0, 1))
        return enter, own, skips

    def masks(self, bad: Any) -> tuple[Any, ...]:
        of_heads, of_group = bad[..., None], jnp.any(bad, axis=-1, keepdims=True)
        return of_heads, bad, bad, of_group, of_group, of_heads

    def run_chunk(self, scan: ChunkedScan, h: Any, marks: Marks, D: Any) -> tuple[Any, Any]:
        """Q tokens from the state, (B, G, R, P, N), to that after them; out and y, like x."""
        product = scan.product
        x, dt, a, B, C = (v.astype(scan.acc) for v in self[:5])
        dt = jnp.moveaxis(dt, 1, -1)  # (B, G, R, Q)
        cum, between = decay_sums(jnp.moveaxis(a, 1, -1))  # (B, G, R, Q), (B, G, R, Q, Q)
        times = jnp.arange(x.shape[1])
        same = times[:, None] >= times  # (Q, Q)
        if marks.rank is not None:
            same = same & (marks.rank[:, :, None] == marks.rank[:, None])  # (B, Q, Q)
            same = same[:, None, None]
        # Masked before the exponentials: what is above the diagonal, or of another segment, may be
        # that of large numbers, whose gradient would be 0 · ∞.
        decays = jnp.exp(jnp.where(same, between, -jnp.inf))
        scores = product("bign,bjgn->bgij", C, B)
        weights = decays * scores[:, :, None] * dt[..., None, :]
        y = product("bgrij,bjgrp->bigrp", weights, x)
        of_start = product("bign,bgrpn->bigrp", C, h)
        if marks.rank is not None:
            first = marks.rank == marks.before[:, None]  # (B, Q): of the segment h belongs to
            cum = jnp.where(first[:, None, None], cum, -jnp.inf)
            of_start = jnp.where(along(first, of_start), of_start, 0)
            h = jnp.where(along(first[:, -1], h), h, 0)
        from_start, to_end = jnp.exp(cum), decays[..., -1, :] * dt  # (B, G, R, Q)
        of_start = of_start * jnp.moveaxis(from_start, -1, 1)[..., None]
        entered = product("bjgrp,bjgn->bgrpn", jnp.moveaxis(to_end, -1, 1)[..., None] * x, B)
        h = from_start[..., -1, None, None] * h + entered
        y, dtype = with_skip(y + of_start, x, D), self.x.dtype
        saved = y.astype(dtype) if saves_y(scan.options, self.z) else None
        return h, (gated(y, self.z).astype(dtype), saved)


def ssd_reference(options: SsdOptions, *args: Any) -> tuple[Any, Any]:
    """:func:`ssd` in plain JAX: out (B, L, G, R, P), and the final state if wanted.

    Differentiable in both modes and to any order.
    """
    run = functools.partial(reference_fwd, dataclasses.replace(options, save=False))
    if options.checkpoint_every is None:
        run = jax.checkpoint(run)
    return run(*args)[:2]


def reference_fwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank, crossed
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states and y; ``None`` for what is not asked for.

    Of states the final one is (B, G, R, P, N), with `num_segments` (B, S, G, R, P, N), and those to
    save (B, c, G, R, P, N). y is what the gate multiplies, as the output (B, L, G, R, P).
    """
    return scan_fwd(options, Tokens(x, dt, a, B, C, z), D, initial_state, rank, crossed)


def reference_bwd(
    options: SsdOptions, x, dt, a, B, C, D, z, initial_state, rank, crossed, states, y, dout, dfinal
) -> tuple[Any, ...]:
    """The gradients; those that sum over heads, batch rows or time are left in fp32."""
    del y  # found again with the rest of a chunk
    tokens, given = Tokens(x, dt, a, B, C, z), (rank, crossed, states, dout, dfinal)
    (dx, ddt, da, dB, dC, dz), *rest = scan_bwd(options, tokens, D, initial_state, *given)
    return dx, ddt, da, dB, dC, rest[0], dz, rest[1], None, None


def reference_carry(options: SsdOptions, x, dt, a, B, rank) -> tuple[jax.Array, jax.Array]:
    """The decay over a part, (B, G, R), 0 where a segment begins in it, and its last state."""
    last = dataclasses.replace(options, final=True, save=False)
    _, state, *_ = reference_fwd(last, x, dt, a, B, B, None, None, None, rank, None)
    return _decay(a, rank), state


def reference_bwd_carry(options: SsdOptions, a, C, dy, rank) -> tuple[jax.Array, jax.Array]:
    """The decay over a part, and the gradient of the state before it, from zero after it.

    dh ← exp(a) · (dh + dy ⊗ C) is the forward's recurrence, from the end, with steps exp(a).
    """
    back = lambda v: jnp.flip(v, axis=1)
    from_end = None if rank is None else back(rank[:, -1:] - rank)
    _, dh = reference_carry(options, back(dy), back(jnp.exp(a)), back(a), back(C), from_end)
    return _decay(a, rank), dh


def _decay(a: jax.Array, rank: Any) -> jax.Array:
    total = jnp.sum(a, axis=1)
    if rank is not None:  # masked before the exponential, which may overflow over several segments
        total = jnp.where(along(rank[:, 0] == rank[:, -1], total), total, -jnp.inf)
    return jnp.exp(total)


def of_states(decay: jax.Array) -> jax.Array:
    """The decays of parts, (…, R), as factors of states, NaN for a 0, which keeps nothing."""
    return jnp.where(decay == 0, jnp.nan, decay)[..., None, None]


def step(tokens: Tokens, D: Any, h: jax.Array) -> tuple[Any, Any]:
    """One token, x (B, G, R, P): its output and the next state, (B, G, R, P, N)."""
    acc = accumulator(tokens, D, h)
    x, dt, a, B, C = (v.astype(acc) for v in tokens[:5])
    entered = jnp.einsum("bgrp,bgn->bgrpn", dt[..., None] * x, B)
    h = jnp.exp(a)[..., None, None] * h.astype(acc) + entered
    y = jnp.einsum("bgrpn,bgn->bgrp", h, C, precision="highest")
    y = with_skip(y, x, None if D is None else of_heads(D).astype(acc))
    return gated(y, tokens.z).astype(tokens.x.dtype), h


def of_heads(D: jax.Array) -> jax.Array:
    """D as (G, R, 1 or P)."""
    return D[..., None] if D.ndim == 2 else D


def with_skip(y: jax.Array, x: jax.Array, D: Any) -> jax.Array:
    """h · C + D · x; `D` is (G, R, 1) or (G, R, P)."""
    return y if D is None else y + D * x


def gated(y: jax.Array, z: Any) -> jax.Array:
    """The output of y."""
    return y if z is None else y * jax.nn.silu(z.astype(y.dtype))
