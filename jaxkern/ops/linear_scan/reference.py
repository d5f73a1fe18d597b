"""The linear scan in plain JAX: the specification and the ``"xla"`` implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.ops.linear_scan.tiles import LinearScanOptions
from jaxkern.ops.segments import with_zeros

CHUNK = 8
"""Steps from one saved state to the next where JAX derives the backward, which runs them again.
With 8 both were fastest on a CPU; an associative scan was slower and took more memory. The passes
have a loop of single steps instead, which compiles in half the time."""


def linear_scan_reference(
    a: jax.Array,
    b: jax.Array,
    initial_state: jax.Array | None = None,
    entered: jax.Array | None = None,
    *,
    reverse: bool = False,
) -> jax.Array:
    """:func:`linear_scan` in plain JAX, differentiable in both modes and to any order.

    One step after the other; the backward keeps the state before each chunk of steps and runs the
    chunk again. Where the program is lowered for CUDA it is an associative scan, of which the
    backward keeps the arguments: a GPU is several times slower at a loop of single steps.

    `entered` says where segments begin (:func:`jaxkern.ops.segments.entered`).
    """
    steps = functools.partial(chunked, CHUNK, reverse, dtype=b.dtype)
    if a.size == 0 or not isinstance(a.shape[1], int):  # none, or symbolic
        return steps(a, b, initial_state, entered)[0]
    names = [n for n, v in (("h", initial_state), ("e", entered)) if v is not None]
    given = [v for v in (initial_state, entered) if v is not None]

    def optional(others: Any) -> tuple[Any, Any]:
        by_name = dict(zip(names, others, strict=True))
        return by_name.get("h"), by_name.get("e")

    # A gradient outside of jit keeps what either branch needs, 0 where it is not the one that runs:
    # 4 arrays of the size of a with this checkpoint, 9 without.
    run = functools.partial(associative, reverse)
    return lax.platform_dependent(
        *(a, b, *given),
        cuda=jax.checkpoint(lambda a, b, *others: run(a, b, *optional(others))),
        default=lambda a, b, *others: steps(a, b, *optional(others))[0],
    )


def _starts(entered: Any, initial_state: Any, acc: Any) -> tuple[Any, Any]:
    """Mask of the steps that begin a segment, (B, L, 1), and their states: (B, L, D), or 0."""
    begins = entered[..., None] >= 0
    if initial_state is None or initial_state.ndim == 2:
        return begins, jnp.zeros((), acc)
    number = jnp.maximum(entered, 0)[..., None]
    return begins, jnp.take_along_axis(with_zeros(initial_state).astype(acc), number, axis=1)


def associative(reverse: bool, a: Any, b: Any, initial_state: Any, entered: Any = None) -> Any:
    """Computes all states by an associative scan."""
    given = () if initial_state is None else (initial_state,)
    acc = jnp.result_type(jnp.float32, a, b, *given)
    first, dtype = -1 if reverse else 0, b.dtype
    a, b = a.astype(acc), b.astype(acc)
    if initial_state is not None and initial_state.ndim == 2:
        b = b.at[:, first].add(a[:, first] * initial_state)
    if entered is None:

        def combine(one, two):
            return two[0] * one[0], two[0] * one[1] + two[1]

        return lax.associative_scan(combine, (a, b), reverse=reverse, axis=1)[1].astype(dtype)
    begins, start = _starts(entered, initial_state, acc)
    if start.ndim:
        b = b + jnp.where(begins, a * start, 0)
    a = jnp.where(begins, 0, a)

    def combine_packed(one, two):
        """Drops states before a segment's begin without a product by 0: they may be NaN."""
        (begun, a, b), (begins, later_a, later_b) = one, two
        a, b, by = (jnp.where(begins, 0, v) for v in (a, b, later_a))
        return begun | begins, by * a, by * b + later_b

    scanned = lax.associative_scan(combine_packed, (begins, a, b), reverse=reverse, axis=1)
    return scanned[2].astype(dtype)


def last_state(options: LinearScanOptions, out: jax.Array, initial_state: Any) -> jax.Array | None:
    """The state of the last step, (B, D), or the initial one where there are no steps."""
    if not options.final:
        return None
    if out.shape[1] == 0:
        zeros = jnp.zeros((out.shape[0], out.shape[2]), out.dtype)
        return zeros if initial_state is None else initial_state.astype(out.dtype)
    return out[:, 0 if options.reverse else -1]


def reference_fwd(options: LinearScanOptions, a, b, initial_state, entered):
    given = () if initial_state is None else (initial_state,)
    acc = jnp.result_type(jnp.float32, a, b, *given)
    h, before = chunked(1, options.reverse, a, b, initial_state, entered, dtype=acc)
    out = h.astype(b.dtype)
    final = last_state(options, out, initial_state)
    return out, final, before[:, :: options.steps(a, b)] if options.save else None


def reference_bwd(options: LinearScanOptions, a, b, initial_state, entered, states, dout, dfinal):
    count, (batch, _, dim), acc = options.num_segments, a.shape, states.dtype
    if a.size == 0:
        lead = (batch,) if count is None else (batch, count)
        dstate = jnp.zeros((*lead, dim), acc) if dfinal is None else dfinal.astype(acc)
        return jnp.zeros_like(a), jnp.zeros_like(b), dstate
    if options.reverse:
        a, b, dout = (jnp.flip(v, 1) for v in (a, b, dout))
        entered = None if entered is None else jnp.flip(entered, 1)
    dout = dout.astype(acc)
    if dfinal is not None:
        dout = dout.at[:, -1].add(dfinal)
    start = states[:, 0] if initial_state is None else initial_state
    h, _ = chunked(1, False, a, b, start, entered, dtype=acc)
    before = jnp.concatenate([states[:, :1], h[:, :-1]], axis=1)
    if entered is not None:
        before = jnp.where(*_starts(entered, initial_state, acc), before)
    after, following = _following(a, entered)
    dh, _ = chunked(1, True, after, dout, None, following, dtype=acc)
    da, db = (dh * before).astype(a.dtype), dh.astype(b.dtype)
    if count is None or entered is None:
        dstate = a[:, 0].astype(acc) * dh[:, 0]
    else:
        number = jnp.where(entered < 0, count, entered)
        dstates = jnp.zeros((batch, count + 1, dim), acc)
        dstate = dstates.at[jnp.arange(batch)[:, None], number].add(a.astype(acc) * dh)[:, :count]
    if options.reverse:
        da, db = jnp.flip(da, 1), jnp.flip(db, 1)
    return da, db, dstate


def reference_carry(options: LinearScanOptions, a, b, entered) -> tuple[jax.Array, jax.Array]:
    """The product of a part's a, NaN where a segment begins in it, and its last state, (B, D)."""
    acc = jnp.result_type(jnp.float32, a, b)
    out, _ = chunked(1, options.reverse, a, b, None, entered, dtype=acc)
    return _product(a, entered, acc), out[:, 0 if options.reverse else -1]


def reference_bwd_carry(
    options: LinearScanOptions, a, dout, entered
) -> tuple[jax.Array, jax.Array]:
    """The product of a part's decays, and the gradient of the state before the part."""
    acc = jnp.result_type(jnp.float32, a, dout)
    product = _product(a, entered, acc)
    if options.reverse:
        a, dout = jnp.flip(a, 1), jnp.flip(dout, 1)
        entered = None if entered is None else jnp.flip(entered, 1)
    after, following = _following(a, entered)
    dh, _ = chunked(1, True, after, dout.astype(acc), None, following, dtype=acc)
    passed = a[:, 0].astype(acc) * dh[:, 0]
    return product, passed if entered is None else jnp.where(entered[:, :1] < 0, passed, 0)


def _following(a: jax.Array, entered: Any) -> tuple[jax.Array, Any]:
    """The a of the step after each, 0 where a segment begins there, and its `entered`."""
    after = jnp.concatenate([a[:, 1:], jnp.zeros_like(a[:, :1])], axis=1)
    if entered is None:
        return after, None
    following = jnp.pad(entered[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(following[..., None] >= 0, 0, after), following


def _product(a: jax.Array, entered: Any, acc: Any) -> jax.Array:
    product = jnp.prod(a.astype(acc), axis=1)
    if entered is None:
        return product
    return jnp.where(jnp.any(entered >= 0, axis=1)[:, None], jnp.nan, product)


def chunked(
    steps: int, reverse: bool, a, b, initial_state, entered=None, *, dtype
) -> tuple[Any, Any]:
    """All states, (B, L, D), in `dtype`, and the state before every chunk of `steps`, (B, C, D)."""
    batch, length, dim = a.shape
    # A symbolic length is cut into single steps: what is left over of chunks would be unrolled.
    steps = max(1, min(steps, length)) if isinstance(length, int) else 1
    more = () if initial_state is None else (initial_state,)
    acc = jnp.result_type(jnp.float32, a, b, *more)
    if length == 0:
        return jnp.zeros(a.shape, dtype), jnp.zeros((batch, 0, dim), acc)
    arrays = (a, b) if entered is None else (a, b, entered)
    if reverse:
        arrays = tuple(jnp.flip(v, 1) for v in arrays)
    if initial_state is None or initial_state.ndim == 3:
        # Zeros, distributed over devices as the states will be.
        h = jnp.where(True, jnp.zeros((), acc), (a * b)[:, 0].astype(acc))
    else:
        h = initial_state.astype(acc)

    @jax.checkpoint
    def chunk(h, arrays):
        rates, inputs = (jnp.unstack(v.astype(acc), axis=1) for v in arrays[:2])
        before, outs = h, []
        begins: Any = None
        start: Any = None
        if entered is not None:
            begins, start = _starts(arrays[2], initial_state, acc)
        for k, (a, b) in enumerate(zip(rates, inputs, strict=True)):
            if begins is not None:
                h = jnp.where(begins[:, k], start[:, k] if start.ndim else start, h)
            h = a * h + b
            outs.append(h.astype(dtype))
        return h, (jnp.stack(outs, axis=1), before)

    whole = length // steps * steps
    split = lambda v: jnp.moveaxis(
        v[:, :whole].reshape(batch, length // steps, steps, *v.shape[2:]), 1, 0
    )
    h, (outs, states) = lax.scan(chunk, h, tuple(map(split, arrays)))
    out, states = jnp.moveaxis(outs, 0, 1).reshape(batch, whole, dim), jnp.moveaxis(states, 0, 1)
    if whole < length:
        _, (tail, before) = chunk(h, tuple(v[:, whole:] for v in arrays))
        out = jnp.concatenate([out, tail], axis=1)
        states = jnp.concatenate([states, before[:, None]], axis=1)
    return jnp.flip(out, 1) if reverse else out, states
