"""The selective scan in plain JAX: the specification and the ``"xla"`` implementation.

A scan over chunks of CHUNK steps. For the backward, the state before every block of
`checkpoint_every` steps is kept; a block runs once more to find the states before its chunks, and a
chunk once more to find those in between. No array has the size B·L·D·N, unless all states are to be
saved.

Arrays here have the channels in groups: D = G·P, channels of a group with the same B and C.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import Axes, vary_over, varying
from jaxkern.ops.scan_options import SequenceBlocks, StepSizes
from jaxkern.ops.segments import Seen, along, with_zeros

CHUNK = 8
"""Steps of a chunk, which a kernel copies to shared memory at once."""

DEFAULT_CHECKPOINT_EVERY = 32
"""Steps from one saved state to the next, by default: a quarter of the states of every 8 steps, for
9% more time in both passes (805 and 741 µs, 8 × 2048 × 1536 × 16 on an H200)."""

RECOMPUTED_EVERY = 64
"""Steps between the states that a backward computes first where none were saved, and the most
between those that are saved."""

_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)


def saved_dtype(acc: Any, *tokens: Any) -> Any:
    """The dtype of saved states: bfloat16 where x, dt, B, C and z are, else that of sums, `acc`."""
    of_tokens = {v.dtype for v in tokens if v is not None}
    return jnp.bfloat16 if of_tokens == {jnp.dtype(jnp.bfloat16)} else acc


@dataclasses.dataclass(frozen=True)
class SelectiveScanOptions:
    """The static arguments of a call."""

    sizes: StepSizes
    final: bool
    checkpoint_every: int | None
    mode: Mode
    num_segments: int | None = None
    save: bool = False  # states, for the backward
    output: bool = False  # of the backward, too: what the forward gave
    sequence_axis: Axes = ()  # over which a caller's shard_map splits L


class _Tokens(NamedTuple):
    """The arrays with a time axis."""

    x: Any
    dt: Any
    B: Any
    C: Any
    z: Any


class _Masks(NamedTuple):
    """Integer and boolean masks: resets of the state before a token, and tokens, not padding.

    For segments with states `crossed` is one more than :func:`jaxkern.ops.segments.crossings` (so 0
    in padding).
    """

    reset: Any
    valid: Any
    crossed: Any


class _ScanParams(NamedTuple):
    """The arrays without a time axis, in the dtype of the arithmetic; A as (G, N, P).

    `starts` are the initial states of segments, (B, S + 1, G, N, P), the last of zeros.
    """

    A: Any
    D: Any
    dt_bias: Any
    starts: Any


class _ScanCarry(NamedTuple):
    """The carry of the recurrence: the state, and final states of segments that ended."""

    h: Any
    ends: Any


def selective_scan_reference(options: SelectiveScanOptions, *args: Any) -> tuple[Any, Any]:
    """:func:`selective_scan` in plain JAX: out (B, L, G, P), and the final state if wanted.

    Differentiable in both modes and to any order. The backward keeps the states that the options
    say and runs the steps in between again.
    """
    run = functools.partial(reference_fwd, dataclasses.replace(options, save=False))
    if options.checkpoint_every is None:
        run = jax.checkpoint(run)
    return run(*args)[:2]


def reference_fwd(options: SelectiveScanOptions, *args: Any) -> tuple[Any, Any, Any]:
    """Output, final state (B, G, P, N) and, to save, states (B, c, G, P, N); or ``None``.

    With `num_segments` the final states are (B, S, G, P, N), as the initial ones.
    """
    *_, initial_state, _, crossed = args
    tokens, masks, params, h = _split(options, *args)
    length = tokens.x.shape[1]
    ends = _no_ends(options, h)
    save = options.save and options.checkpoint_every is not None
    saved = saved_dtype(h.dtype, *tokens)
    if length == 0:
        out, states = jnp.zeros_like(tokens.x), jnp.zeros((h.shape[0], 0, *h.shape[1:]), saved)
    else:
        blocks = _blocks(options, length)

        @_checkpoint
        def body(before, block):
            tokens, masks = block
            after, out = _run_block(options, before, tokens, masks, params)
            return after, (out, before.h.astype(saved) if save else None)

        h = _start(options, h, tokens, masks, params)
        masks = masks._replace(valid=_valid(blocks))
        before = _ScanCarry(h, _no_ends(options, h))
        (h, ends), (out, states) = lax.scan(body, before, jax.tree.map(blocks.cut, (tokens, masks)))
        out = blocks.join(out)
        states = jnp.moveaxis(states, 0, 1) if save else None
    final = _states_last(h) if options.final else None
    if final is not None and options.num_segments is not None:
        seen = Seen.of(crossed, options.num_segments)
        final = seen.final(_states_last(ends), final, initial_state)
    return out, final, _states_last(states) if save else None


def reference_bwd(options: SelectiveScanOptions, *args: Any) -> tuple[Any, ...]:
    """The gradients, sums over channels, batch rows or time in fp32, and perhaps the output."""
    *given, states, dout, dfinal = args
    *_, initial_state, _, crossed = given
    count = options.num_segments
    seen = None if count is None else Seen.of(crossed, count)
    if states is None:
        every = dataclasses.replace(options, checkpoint_every=RECOMPUTED_EVERY, save=True)
        *_, states = reference_fwd(every, *given)
    tokens, masks, params, h = _split(options, *given)
    acc = h.dtype
    tokens = tokens._replace(B=tokens.B.astype(acc), C=tokens.C.astype(acc))  # as dB and dC will be
    dlast = dfinal if dfinal is None or seen is None else seen.of_row(dfinal)
    dh = jnp.zeros_like(h) if dlast is None else _states_last(dlast)
    dends = None if dfinal is None or seen is None else _states_last(dfinal)
    length = tokens.x.shape[1]
    if length == 0:
        dtokens, dparams = jax.tree.map(jnp.zeros_like, (tokens, params))
        out = dout if options.output else None
    else:
        blocks = _blocks(options, length)

        @_checkpoint
        def body(carry, block):
            dstates, dparams = carry
            tokens, masks, before, dout = block

            def run(before, tokens, params):
                return _run_block(options, before, tokens, masks, params)

            before = before.astype(acc)
            before = _ScanCarry(before, _no_ends(options, before))
            (_, out), vjp = jax.vjp(run, before, tokens, params)
            dstates, dtokens, more = vjp((dstates, dout))
            given = dtokens, out if options.output else None
            return (dstates, jax.tree.map(jnp.add, dparams, more)), given

        masks = masks._replace(valid=_valid(blocks))
        tokens, masks, dout = jax.tree.map(blocks.cut, (tokens, masks, dout))
        states = _states_last(jnp.moveaxis(states, 1, 0))
        dparams = jax.tree.map(jnp.zeros_like, params)
        dh = jnp.where(True, dh, states[0])
        init = _ScanCarry(dh, dends), dparams
        ((dh, _), dparams), given = lax.scan(
            body, init, (tokens, masks, states, dout), reverse=True
        )
        dtokens, out = jax.tree.map(blocks.join, given)
    dx, ddt, dB, dC, dz = dtokens
    dA, dD, ddt_bias, dstarts = dparams
    dinitial = None if initial_state is None else _states_last(dh)
    if dinitial is not None and seen is not None:
        dinitial = seen.initial(_states_last(dstarts[:, :-1]), dfinal)
    return dx, ddt, _states_last(dA), dB, dC, dD, dz, ddt_bias, dinitial, None, None, out


def reference_carry(options: SelectiveScanOptions, x, dt, A, B, dt_bias, keep) -> tuple[Any, Any]:
    """Σdt of a part, (B, G, P), ∞ where a segment begins, and its last state, (B, G, P, N)."""
    last = dataclasses.replace(options, final=True, save=False)
    _, state, _ = reference_fwd(last, x, dt, A, B, B, None, None, dt_bias, None, keep, None)
    return _total(_step_sizes(options, dt, dt_bias, state.dtype), keep), state


def reference_bwd_carry(
    options: SelectiveScanOptions, dt, A, C, z, dt_bias, keep, dout
) -> tuple[Any, Any]:
    """The sum of a part's steps, and the gradient of the state before it, from zero after it."""
    acc = jnp.result_type(jnp.float32, dt, A, dout)
    sizes, dy = _step_sizes(options, dt, dt_bias, acc), dout.astype(acc)
    if z is not None:
        dy = dy * jax.nn.silu(z.astype(acc))

    def back(dh: Any, now: Any) -> tuple[Any, None]:
        size, dy, C, keep = now
        dh = jnp.exp(size[..., None] * A) * (dh + dy[..., None] * C[:, :, None])
        return dh if keep is None else jnp.where(keep[:, None, None, None] > 0, dh, 0), None

    along = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (sizes, dy, C.astype(acc), keep))
    zeros = jnp.zeros((dt.shape[0], *A.shape), acc)
    zeros = vary_over(zeros, varying(dy))
    dh, _ = lax.scan(back, zeros, along, reverse=True, unroll=CHUNK)
    return _total(sizes, keep), dh


def _step_sizes(options: SelectiveScanOptions, dt: Any, dt_bias: Any, acc: Any) -> jax.Array:
    dt = dt.astype(acc)
    return options.sizes(dt if dt_bias is None else dt + dt_bias.astype(acc))


def _total(sizes: jax.Array, keep: Any) -> jax.Array:
    total = jnp.sum(sizes, axis=1)  # (B, G, P)
    return total if keep is None else jnp.where(jnp.all(keep > 0, 1)[:, None, None], total, jnp.inf)


def decay_of(A: jax.Array, resets: bool, total: jax.Array) -> jax.Array:
    """Decay over a part of `total` Σdt, (…, G, P, N); NaN for ∞, of a part with a new segment."""
    total = total[..., None]
    none = jnp.isinf(total) & resets
    return jnp.where(none, jnp.nan, jnp.exp(jnp.where(none, 0, total) * A))


def reference_step(
    options: SelectiveScanOptions, x, dt, A, B, C, D, z, dt_bias, state
) -> tuple[Any, Any]:
    """One token, x (B, G, P): its output and the next state, (B, G, P, N)."""
    tokens, masks, params, h = _split(options, x, dt, A, B, C, D, z, dt_bias, state, None, None)
    tokens = jax.tree.map(lambda v: v[:, None], tokens)
    (h, _), out = _run_chunk(options, _ScanCarry(h, None), tokens, masks, params)
    return out[:, 0], _states_last(h)


def _split(
    options, x, dt, A, B, C, D, z, dt_bias, initial_state, keep, crossed
) -> tuple[_Tokens, _Masks, _ScanParams, jax.Array]:
    """The arguments by kind; the state is (B, G, N, P), channels last: loops run along them."""
    floats = [v for v in (x, dt, A, B, C, D, z, dt_bias, initial_state) if v is not None]
    acc = jnp.result_type(jnp.float32, *floats)
    # Cast before the scan over chunks, whose backward adds these arrays' gradients up.
    of_segments = options.num_segments is not None
    starts = None
    if of_segments and initial_state is not None:
        starts = with_zeros(_states_last(initial_state))
    params = jax.tree.map(lambda v: v.astype(acc), _ScanParams(_states_last(A), D, dt_bias, starts))
    if initial_state is None or of_segments:
        h = jnp.zeros((x.shape[0], *params.A.shape), acc)
    else:
        h = _states_last(initial_state.astype(acc))
    reset = None if keep is None else keep == 0
    masks = _Masks(reset, None, crossed + 1) if of_segments else _Masks(reset, None, None)
    return _Tokens(x, dt, B, C, z), masks, params, h


def _states_last(h: Any) -> Any:
    """(…, N, P) as (…, P, N), and back."""
    return jnp.swapaxes(h, -1, -2)


def _start(options, h, tokens, masks, params) -> jax.Array:
    """`h`, distributed over devices as the states after it will be."""
    if jax.typeof(tokens.x).sharding.mesh.empty:
        return h
    first, masks = jax.tree.map(lambda v: v[:, :1], (tokens, masks))
    (after, _), _ = _run_chunk(options, _ScanCarry(h, None), first, masks, params)
    return jnp.where(True, h, lax.stop_gradient(after))


def _no_ends(options: SelectiveScanOptions, h: jax.Array) -> Any:
    """Final states of no segment yet, (B, S, G, N, P)."""
    if not options.final or options.num_segments is None:
        return None
    zeros = jnp.zeros_like(h)[:, None]
    return jnp.broadcast_to(zeros, (h.shape[0], options.num_segments, *h.shape[1:]))


def _blocks(options: SelectiveScanOptions, length: Any) -> SequenceBlocks:
    # A chunk is unrolled where a GPU would wait for the launches of single steps. Single steps are
    # as fast on a CPU, and compile in a third of the time.
    chunk = CHUNK if jax.default_backend() == "gpu" else 1
    return SequenceBlocks.of(length, options.checkpoint_every or RECOMPUTED_EVERY, chunk)


def _valid(blocks: SequenceBlocks) -> jax.Array | None:
    """(1, L): ones, to be padded with zeros; ``None`` where nothing is padded."""
    return jnp.ones((1, blocks.length), bool) if blocks.total - blocks.length else None


def _run_block(options, before, tokens, masks, params) -> tuple[_ScanCarry, jax.Array]:
    """The chunks of a block; only the states before them are kept for the backward."""
    if len(tokens.x) == 1:
        tokens, masks = jax.tree.map(lambda v: v[0], (tokens, masks))
        after, out = _run_chunk(options, before, tokens, masks, params)
        return after, out[None]

    @_checkpoint
    def body(before, chunk):
        tokens, masks = chunk
        return _run_chunk(options, before, tokens, masks, params)

    return lax.scan(body, before, (tokens, masks))


def _run_chunk(options, before: _ScanCarry, tokens: _Tokens, masks: _Masks, params: _ScanParams):
    """k steps from the state, (B, G, N, P), to that after them and out, (B, k, G, P)."""
    if before.h.shape[1] > 1:
        return _run_steps(options, before, tokens, masks, params)
    # With no axis of size 1 in its products, XLA's program for a CPU is a third faster.
    squeeze = functools.partial(jax.tree.map, lambda v: jnp.squeeze(v, -2))
    of_states = functools.partial(jax.tree.map, lambda v: jnp.squeeze(v, -3))
    small = squeeze(params._replace(A=None, starts=None))
    params = small._replace(A=of_states(params.A), starts=of_states(params.starts))
    after, out = _run_steps(options, of_states(before), squeeze(tokens), masks, params)
    return jax.tree.map(lambda v: jnp.expand_dims(v, -3), after), jnp.expand_dims(out, -2)


def _run_steps(options, before: _ScanCarry, tokens: _Tokens, masks: _Masks, params: _ScanParams):
    """Runs the steps of a chunk; all arrays may lack the axis G."""
    h, ends = before
    acc = h.dtype
    x, dt, B, C = (v.astype(acc) for v in tokens[:4])
    dt = options.sizes(dt if params.dt_bias is None else dt + params.dt_bias)
    if masks.valid is not None:  # a step of no size keeps the state as it is
        dt = jnp.where(along(masks.valid, dt), dt, 0)
    dtx = dt * x
    ys = []
    for t in range(x.shape[1]):
        if masks.reset is not None:
            h, ends = _cross(options, masks, params, t, h, ends)
        decay = jnp.exp(dt[:, t, ..., None, :] * params.A)
        h = decay * h + jnp.einsum("b...p,b...n->b...np", dtx[:, t], B[:, t])
        # As a dot, for its transpose is a sum over channels, which is slow as a sum on a CPU.
        ys.append(jnp.einsum("b...np,b...n->b...p", h, C[:, t], precision="highest"))
    y = jnp.stack(ys, axis=1)
    if params.D is not None:
        y = y + params.D * x
    if tokens.z is not None:
        y = y * jax.nn.silu(tokens.z.astype(acc))
    return _ScanCarry(h, ends), y.astype(tokens.x.dtype)


def _cross(options, masks: _Masks, params: _ScanParams, t: int, h, ends) -> tuple[Any, Any]:
    """The state that token t begins from, and final states, updated if a segment ends before it."""
    reset, begin = masks.reset[:, t], 0
    if options.num_segments is not None:
        none = options.num_segments
        crossed = masks.crossed[:, t] - 1
        reset = crossed >= 0
        if params.starts is not None:
            number = jnp.where(reset, crossed % (none + 1), none)
            begin = jax.vmap(lambda v, i: v[i])(params.starts, number)
        if ends is not None:
            number = jnp.where(reset, crossed // (none + 1), none)
            put = lambda v, i, h: v.at[i].set(h, mode="drop")
            ends = jax.vmap(put)(ends, number, h)
    return jnp.where(along(reset, h), begin, h), ends
