"""The gated delta rule in plain JAX, in chunks: the specification and ``"xla"``.

A scan over chunks (:mod:`jaxkern.ops.chunks`), each of which is the products of
:mod:`jaxkern.ops.delta_rule.op`. Arrays here have value heads in groups: H = G·R, R heads of a
group with the same q and k.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes, vary_over, varying
from jaxkern.ops.chunks import (
    ChunkedScan,
    Marks,
    accumulator,
    bad_of,
    decay_sums,
    least_log_decay,
    scan_bwd,
    scan_fwd,
)
from jaxkern.ops.segments import along

SAVED_EVERY = 256
"""Tokens from one state that is kept for the backward to the next. A state is K·V fp32: at K = V =
128 256 bytes a token and head, where q, k and v in bf16 have 768."""

KERNEL_CHUNK = 64
"""Tokens of a chunk in the kernels, which save T of each: 128 bytes a token and head."""

MOST_KEYS = 128
"""The most key channels that the kernels take."""

BLOCK = 16
"""The most tokens of a block of a chunk, whose part of the triangular system is inverted. Where
channels of a key have decays of their own, they share an anchor, too."""

NORM_EPS = 1e-6
"""The number beside the square of a norm, as in fla and in transformers' Qwen3-Next."""


@dataclasses.dataclass(frozen=True)
class DeltaRuleOptions:
    """The static arguments of the passes."""

    final: bool
    mode: Mode
    scale: float
    qk_l2norm: bool = False
    num_segments: int | None = None
    checkpoint_every: int = SAVED_EVERY
    save: bool = False  # states, for the backward
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


class Tokens(NamedTuple):
    """The floating arrays with a time axis; `g` are logarithms of decays."""

    q: Any  # (B, L, G, K)
    k: Any  # (B, L, G, K)
    v: Any  # (B, L, G, R, V)
    g: Any  # (B, L, G, R), (B, L, G, R, K) or None
    beta: Any  # (B, L, G, R) or None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, g: Any, beta: Any) -> "Tokens":
        """The tokens, with logarithms of decays whose sums are finite."""
        return cls(q, k, v, clipped_decays(g), beta)

    @property
    def out(self) -> Any:
        return self.v

    @property
    def multiplied(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v

    @property
    def state(self) -> tuple[int, ...]:
        groups, heads, values = self.v.shape[2:]
        return groups, heads, self.k.shape[-1], values

    @property
    def saved(self) -> Any:
        return jnp.promote_types(self.v.dtype, jnp.float32)

    def widened(self, acc: Any) -> "Tokens":
        return self._replace(q=self.q.astype(acc), k=self.k.astype(acc))

    def not_finite(self, dout: Any) -> tuple[Any, Any, Any]:
        enter = bad_of(self.v, -1) | bad_of(self.k, -1)[..., None]
        if self.beta is not None:
            enter = enter | bad_of(self.beta)
        if self.g is not None:
            enter = enter | bad_of(self.g, -1 if self.g.ndim == 5 else ())
        own = jnp.broadcast_to(bad_of(self.q, -1)[..., None], enter.shape)
        return enter, own if dout is None else own | bad_of(dout, -1), None

    def masks(self, bad: Any) -> tuple[Any, ...]:
        of_heads, of_group = bad[..., None], jnp.any(bad, axis=-1, keepdims=True)
        return of_group, of_group, of_heads, of_heads if of_channels(self.g) else bad, bad

    def run_chunk(self, scan: ChunkedScan, h: Any, marks: Marks, D: Any) -> tuple[Any, Any]:
        """Q tokens from the state, (B, G, R, K, V), to that after them; the output, like v."""
        del D
        product, rank = scan.product, marks.rank
        q, k, v, g, beta = self._by_head(scan.options, scan.acc)
        times = jnp.arange(v.shape[-2])
        upto, after = _sums(times[:, None] >= times, g), _sums(times[:, None] < times, g)
        first = None
        if rank is not None:
            first = (rank == marks.before[:, None])[:, None, None, :, None]  # of h's segment
            last = (rank == rank[:, -1:])[:, None, None, :, None]
            upto, after = jnp.where(first, upto, -jnp.inf), jnp.where(last, after, -jnp.inf)
        from_start, to_end = jnp.exp(upto), jnp.exp(after)  # (B, G, R, Q, 1 or K)
        pairs = (_pairs_of_heads if g.shape[-1] == 1 else _pairs_of_channels)(product, g, k, rank)

        def read(x: jax.Array) -> jax.Array:
            """x of each token times the state before the chunk, decayed up to the token."""
            read = product("bgrik,bgrkv->bgriv", x * from_start, h)
            return read if first is None else jnp.where(first, read, 0)

        coupling = jnp.where(times[:, None] > times, beta * pairs(k), 0)
        new = solve(product, coupling, beta * (v - read(k)))
        out = read(q) + product("bgrij,bgrjv->bgriv", pairs(q), new)
        kept = h if first is None else jnp.where(first[..., -1:, :], h, 0)
        h = jnp.swapaxes(from_start[..., -1:, :], -1, -2) * kept
        h = h + product("bgrjk,bgrjv->bgrkv", k * to_end, new)
        return h, (jnp.moveaxis(out, 3, 1).astype(self.v.dtype), None)

    def _by_head(self, options: DeltaRuleOptions, acc: Any) -> tuple[jax.Array, ...]:
        """The arrays of a chunk, (B, G, 1 or R, Q, …), in `acc`; g and beta with an axis more."""
        q, k = (jnp.swapaxes(v.astype(acc), 1, 2)[:, :, None] for v in (self.q, self.k))
        v = jnp.moveaxis(self.v.astype(acc), 1, 3)
        of_tokens = (*v.shape[:-1], 1)
        weights = []
        for x, absent in (self.g, 0), (self.beta, 1):
            if x is None:
                weights.append(jnp.full_like(v, absent, shape=of_tokens))
            else:
                moved = jnp.moveaxis(x.astype(acc), 1, 3)
                weights.append(moved if moved.ndim == v.ndim else moved[..., None])
        return *queries_and_keys(options, q, k), v, *weights


def of_channels(g: Any) -> bool:
    """Whether decays are of channels, (B, L, G, R, K)."""
    return g is not None and g.ndim == 5


def clipped_decays(g: Any) -> Any:
    """The logarithms of decays, or ``None``, such that their sums are finite.

    One that is below has a decay of 0, and so a gradient of 0.
    """
    if g is None:
        return None
    least = least_log_decay(jnp.promote_types(g.dtype, jnp.float32))
    return jnp.where(g < least, jnp.asarray(least, g.dtype), g)


def queries_and_keys(options: DeltaRuleOptions, q: jax.Array, k: jax.Array) -> tuple[Any, Any]:
    """q by the scale, and k; of length 1 if asked for."""
    if options.qk_l2norm:
        q, k = unit_length(q), unit_length(k)
    return options.scale * q, k


def unit_length(x: jax.Array) -> jax.Array:
    """`x` divided by its length along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + NORM_EPS)


def _sums(which: jax.Array, g: jax.Array) -> jax.Array:
    """Sums of g, (…, T, C), over the tokens that each row of the mask `which`, (T, T), has."""
    return jnp.einsum("it,...tc->...ic", which.astype(g.dtype), g, precision="highest")


def _pairs_of_heads(
    product: Any, g: jax.Array, k: jax.Array, rank: Any
) -> Callable[[jax.Array], jax.Array]:
    """Makes ``pairs(x)[i, j] = x[i] · k[j] · exp(Σ g over j < t ≤ i)``, 0 for j > i.

    And between segments. The sums are masked before the exponential: their gradient would be 0 · ∞.
    """
    times = jnp.arange(k.shape[-2])
    same = times[:, None] >= times
    if rank is not None:
        same = (same & (rank[:, :, None] == rank[:, None]))[:, None, None]
    decays = jnp.exp(jnp.where(same, decay_sums(g[..., 0])[1], -jnp.inf))
    return lambda x: decays * product("bgxik,bgxjk->bgxij", x, k)


def _pairs_of_channels(
    product: Any, g: jax.Array, k: jax.Array, rank: Any
) -> Callable[[jax.Array], jax.Array]:
    """Makes pairs where each channel has a decay: ``Σ_k x[i, k] · k[j, k] · exp(Σ g[t, k])``.

    Tokens are in blocks. Within one, all the exponentials are computed. Between two, i and j are
    decayed from and to an anchor, the start of i's block: no exponent is above 0 where g is not.
    """
    size, batch = k.shape[-2], g.shape[0]
    block = min(size, BLOCK)
    count = -(-size // block)
    rank = jnp.zeros((batch, size), jnp.int32) if rank is None else rank
    widths = (0, count * block - size)
    rank = jnp.pad(rank, ((0, 0), widths), mode="edge").reshape(batch, 1, 1, count, block)

    def cut(v: jax.Array) -> jax.Array:
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 2) + [widths, (0, 0)])
        return v.reshape(*v.shape[:-2], count, block, v.shape[-1])

    g, k = cut(g), cut(k)
    times, blocks = jnp.arange(block), jnp.arange(count)
    before = jnp.concatenate([rank[..., :1, -1], rank[..., :-1, -1]], -1)  # of the last block's end
    decay = lambda mask, sums: jnp.exp(jnp.where(mask[..., None], sums, -jnp.inf))

    upto, after = _sums(times[:, None] >= times, g), _sums(times[:, None] < times, g)
    from_anchor = decay(rank == before[..., None], upto)  # (…, I, i, K)
    between = (blocks[:, None, None] > blocks) & (blocks > blocks[:, None])  # (I, J, t)
    span = jnp.einsum(
        "ijt,...tk->...ijk", between.astype(g.dtype), upto[..., -1, :], precision="highest"
    )
    earlier = (blocks[:, None] > blocks)[..., None]  # (I, J, 1)
    earlier = earlier & (rank[..., None, :, :] == before[..., None, None])
    to_anchor = decay(earlier, span[..., None, :] + after[..., None, :, :, :])  # (…, I, J, j, K)
    within = (times[:, None] >= times) & (rank[..., :, None] == rank[..., None, :])
    sums = jnp.moveaxis(decay_sums(jnp.swapaxes(g, -1, -2))[1], -3, -1)  # (…, I, i, j, K)
    near, far = decay(within, sums), k[..., None, :, :, :] * to_anchor

    def pairs(x: jax.Array) -> jax.Array:
        x = cut(x)
        inside = jnp.sum(x[..., :, None, :] * near * k[..., None, :, :], -1)  # (…, I, i, j)
        found = product("bgrIik,bgrIJjk->bgrIiJj", x * from_anchor, far)
        found = found + inside[..., None, :] * jnp.eye(count, dtype=x.dtype)[:, None, :, None]
        return found.reshape(*found.shape[:3], *[count * block] * 2)[..., :size, :size]

    return pairs


def solve(product: Any, lower: jax.Array, rhs: jax.Array) -> jax.Array:
    """(I + `lower`)⁻¹ `rhs`, (B, G, R, Q, V), by substitution of one block after the other.

    `lower`, (B, G, R, Q, Q), is 0 on the diagonal and above. Its error is as small as that of a
    substitution row by row: products with the whole inverse have one half as large again.
    """
    size = lower.shape[-1]
    block = min(size, BLOCK)
    if more := -size % block:
        lower = jnp.pad(lower, [(0, 0)] * 3 + [(0, more), (0, more)])
        rhs = jnp.pad(rhs, [(0, 0)] * 3 + [(0, more), (0, 0)])
    spans = [slice(start, start + block) for start in range(0, size, block)]
    inverses = unit_lower_inverse(jnp.stack([lower[..., s, s] for s in spans], axis=-3))
    found = None
    for n, span in enumerate(spans):
        own = rhs[..., span, :]
        if found is not None:
            earlier = lower[..., span, : span.start]
            own = own - product("bgrij,bgrjv->bgriv", earlier, found)
        own = product("bgrij,bgrjv->bgriv", inverses[..., n, :, :], own)
        found = own if found is None else jnp.concatenate([found, own], axis=-2)
    assert found is not None
    return found[..., :size, :]


@jax.custom_jvp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + `lower`, (…, Q, Q), which is 0 on the diagonal and above.

    By doubling: with X the inverse of the blocks of some size on the diagonal, and S the part of
    `lower` in the lower left of blocks of twice that size, the inverse of these is X − X S X. So an
    entry is found from entries of the inverse, by substitution, and none is a power of `lower`,
    whose terms may be far larger than their sum.
    """
    size = lower.shape[-1]
    times = jnp.arange(size)
    inverse, block = jnp.eye(size, dtype=lower.dtype), 1
    while block < size:
        row, column = (times // block)[:, None], times // block
        pair = (row % 2 == 1) & (row == column + 1)
        own = jnp.where(pair, lower, 0)
        inverse = inverse - (own if block == 1 else _multiply(_multiply(inverse, own), inverse))
        block *= 2
    return jnp.broadcast_to(inverse, lower.shape)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: Any, tangents: Any) -> Any:
    inverse = unit_lower_inverse(*primals)
    return inverse, -_multiply(_multiply(inverse, *tangents), inverse)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def delta_rule_reference(options: DeltaRuleOptions, *args: Any) -> tuple[Any, Any]:
    """:func:`gated_delta_rule` in plain JAX: out (B, L, G, R, V), and the final state if wanted.

    Differentiable in both modes and to any order.
    """
    return reference_fwd(dataclasses.replace(options, save=False), *args)[:2]


def unsupported(num_segments: int | None, q: Any, k: Any, v: Any) -> str | None:
    """Why the kernels cannot take such arrays, or ``None``."""
    if num_segments is not None:
        return "it has num_segments, and the kernels keep one state of a row, not its segments'"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}, and the kernels take bfloat16"
    if q.shape[-1] > MOST_KEYS:
        return f"q has {q.shape[-1]} channels a head, and the kernels take at most {MOST_KEYS}"
    return None


def reference_fwd(
    options: DeltaRuleOptions, q, k, v, g, beta, initial_state, rank, crossed
) -> tuple[Any, Any, Any, Any]:
    """Output, final state and, to save, states and T; ``None`` for what is not asked for.

    Of states the final one is (B, G, R, K, V), with `num_segments` (B, S, G, R, K, V), and those to
    save (B, c, G, R, K, V). T is what the kernels save if they take such arrays, zeros here.
    """
    args = options, Tokens.of(q, k, v, g, beta), None, initial_state, rank, crossed
    T = None
    if options.save and not of_channels(g) and unsupported(options.num_segments, q, k, v) is None:
        chunks = -(-v.shape[1] // (2 * KERNEL_CHUNK)) * 2
        shape = (v.shape[0], chunks, *v.shape[2:4], KERNEL_CHUNK, KERNEL_CHUNK)
        T = vary_over(jnp.zeros(shape, jnp.bfloat16), varying(v))
    return *scan_fwd(*args)[:3], T


def reference_bwd(options: DeltaRuleOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients; that of the initial state and, where several heads share them, of q and k in
    fp32.

    Args:
      options: of the pass.
      *args: of :func:`reference_fwd`, what it saved, and the gradients of its results.
    """
    q, k, v, g, beta, initial_state, rank, crossed, states, _, dout, dfinal = args
    tokens, given = Tokens.of(q, k, v, g, beta), (rank, crossed, states, dout, dfinal)
    (dq, dk, *others), _, dinitial = scan_bwd(options, tokens, None, initial_state, *given)
    if v.shape[3] == 1:
        dq, dk = dq.astype(q.dtype), dk.astype(k.dtype)
    return dq, dk, *others, dinitial, None, None


def reference_carry(options: DeltaRuleOptions, k, v, g, beta, rank) -> tuple[jax.Array, ...]:
    """The matrix P and the state R of a part: S before it becomes P S + R after it.

    P is (B, G, R, K, K), R (B, G, R, K, V). Both are the last state of one scan: P is that of v = 0
    from the identity. The last result is 1 where P counts, (B,), and 0 where a segment begins in
    the part, after which nothing is left of S, whatever it is.
    """
    values, wider = v.shape[-1], _with_identity(v, k.shape[-1])
    last = dataclasses.replace(options, final=True, save=False)
    start = _identity(Tokens.of(k, k, wider, g, beta), values)
    state = reference_fwd(last, k, k, wider, g, beta, start, rank, None)[1]
    return state[..., values:], state[..., :values], whole(rank, state)


def reference_bwd_carry(
    options: DeltaRuleOptions, q, k, g, beta, dout, rank
) -> tuple[jax.Array, ...]:
    """The matrix P and the gradient R of a part: dS after it becomes Pᵀ dS + R before it.

    The gradient by the initial state of that scan, which is linear in it.
    """
    values, wider = dout.shape[-1], _with_identity(dout, k.shape[-1])
    after = _identity(Tokens.of(q, k, wider, g, beta), values)
    last = dataclasses.replace(options, final=True, save=False)
    args = q, k, jnp.zeros_like(wider), g, beta, jnp.zeros_like(after), rank, None
    *_, state, _, _ = reference_bwd(last, *args, None, None, wider, after)
    return state[..., values:], state[..., :values], whole(rank, state)


def _with_identity(v: jax.Array, keys: int) -> jax.Array:
    """`v` with zeros for as many columns as keys have channels."""
    return jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, keys)])


def _identity(tokens: Tokens, values: int) -> jax.Array:
    """States (B, G, R, K, V + K) of zeros and, in the last K columns, the identity."""
    keys = tokens.k.shape[-1]
    state = jnp.eye(keys, values + keys, values, dtype=accumulator(tokens, None, None))
    state = jnp.broadcast_to(state, (tokens.k.shape[0], *tokens.state))
    return vary_over(state, varying(tokens.v))


def whole(rank: Any, state: jax.Array) -> jax.Array:
    if rank is None:
        return jnp.ones(state.shape[0], state.dtype)
    return (rank[:, 0] == rank[:, -1]).astype(state.dtype)


def step(options: Any, tokens: Tokens, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token, q (B, G, K): its output (B, G, R, V), and the next state, (B, G, R, K, V)."""
    acc = accumulator(tokens, None, h)
    q, k, v = (x.astype(acc) for x in tokens[:3])
    q, k = queries_and_keys(options, q, k)
    read = lambda x: jnp.einsum("bgk,bgrkv->bgrv", x, h, precision="highest")
    h = h.astype(acc)
    if tokens.g is not None:
        h = along(jnp.exp(tokens.g.astype(acc)), h) * h
    new = v - read(k)
    new = new if tokens.beta is None else along(tokens.beta.astype(acc), new) * new
    h = h + k[:, :, None, :, None] * new[..., None, :]
    return read(q).astype(tokens.v.dtype), h
