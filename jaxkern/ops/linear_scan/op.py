"""Linear scan: the first-order recurrence at the heart of S5, the RG-LRU and minGRU.

Forward, for a batch row and a channel, h[−1] the initial state or 0:

    h[t] = a[t] · h[t−1] + b[t]

Backward, for the cotangent dout, time running down from dh[L] = 0:

    dh[t] = dout[t] + a[t+1] · dh[t+1]          db[t] = dh[t]          da[t] = dh[t] · h[t−1]
    dh[−1] = a[0] · dh[0]

With ``reverse`` time runs the other way, in both. Where a segment of packed sequences begins, its
initial state stands in for h[t−1], and a[t] · dh[t] is that state's gradient instead of what is
passed on.

Saved for the backward: a, b and the state before every 32nd step in fp32 (every 16th if a or b is
fp32), 1/16 of the bytes of b. The states in between are recomputed from a and b, so that no
gradient sees h rounded to 16 bits.

Bytes per element, in units of its size: 3 forward (read a and b, write h), 5 backward (read a, b
and dout, write da and db), and 1/16 for the states. With 2 operations per element forward and 5
backward, both passes wait for memory alone. Where batch rows and channels are too few to fill the
GPU, the sequence is cut into parts, at 2 more in either pass.

Where a sequence is split between devices, each finds the product of its a and its last state from
zero; one all-gather collects them from all devices, and each computes the state before its
part. The backward does the same from the end to the start. A pass that finds carries reads 2
arrays: at L = 262,144 a device and D = 1024 in bf16 an array is 0.54 GB. A kernel that cuts its
part reads 2 more in either direction, 16 in all; :class:`jaxkern.ops.sections.Sections` leave 12,
as on one device. To scan from zeros and correct the output, by the product of a, takes 3.

There is no Triton implementation: one with ``tl.associative_scan`` was slower at every shape that
was measured.

Sources: Blelloch, Prefix Sums and Their Applications, 1990; Smith, Warrington and Linderman,
Simplified State Space Layers for Sequence Modeling, 2022, arXiv:2208.04933.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.core.arguments import check_floating, check_sequence_axis, unfit
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, final_state_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import is_first, is_last, match_primals, match_sharding, on_all, only_if
from jaxkern.ops import segments
from jaxkern.ops.linear_scan.kernel import launch_bwd, launch_device_carry, launch_fwd
from jaxkern.ops.linear_scan.reference import (
    last_state,
    linear_scan_reference,
    reference_bwd,
    reference_bwd_carry,
    reference_carry,
    reference_fwd,
)
from jaxkern.ops.linear_scan.tiles import LinearScanOptions
from jaxkern.ops.sections import Decays, Sections, sequences, unless_multiple


@final_state_op
def linear_scan(
    a: jax.Array,
    b: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    reverse: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Run a diagonal linear recurrence along time.

    .. math:: h_t = a_t \, h_{t-1} + b_t

    for every batch row and channel, from :math:`h_{-1}` = `initial_state`; with `reverse`,
    :math:`h_t = a_t \, h_{t+1} + b_t` from :math:`h_L` = `initial_state`. The state is fp32,
    whatever the dtypes; the result is rounded once, to the dtype of `b`, which it adds up.

    For the backward, `a`, `b` and a few fp32 states are kept; the others are recomputed, so that no
    gradient is taken at a rounded state. A NaN stays in its channel of its batch row, reaches only
    later steps (with `reverse`, earlier ones), and does not get past the end of its segment.
    ``a[t] = 0`` forgets a finite state; :math:`0 \cdot \infty` is NaN, as everywhere in JAX. The
    bits are the same on every run.

    The kernels may cut a long sequence into parts and multiply `a` over each: a product that
    underflows is 0, and one that overflows, with some \|a\| > 1, is infinite, and can make a state
    infinite or NaN that a loop over the steps would keep finite. It cannot where that state is 0 or
    is forgotten within the part. Plain JAX on an NVIDIA GPU multiplies `a` over any range of
    steps, and there a state of 0 and a reset are no exception.

    On a mesh, batch, channels and L may be split between devices; with `num_segments` a split L is
    gathered. Each device scans its part of L, which is a multiple of 32 steps (16 if `a` or `b` is
    fp32) if there is a backward, and one all-gather of two numbers a channel carries states over.
    The same inside ``jax.shard_map``, where `sequence_axis` says over which axis L is split; the
    gradient of `initial_state` is then a device's share of a sum, as JAX has it there.

    Args:
      a: (B, L, D), bfloat16, float16 or float32; complex with a complex `b`, in plain JAX only.
      b: (B, L, D), any of those dtypes.
      initial_state: (B, D), or with `num_segments` (B, S, D), any of those dtypes, the state before
        the first step; ``None`` stands for zeros.
      return_final_state, segment_ids, num_segments, sequence_axis: as for
        :func:`jaxkern.selective_scan`.
      reverse: whether time runs from the end to the start.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or newer, plain JAX
        elsewhere.

    Returns:
      (B, L, D), the dtype of `b`: all states but the initial one. With `return_final_state` a pair
      of it and the last state, (B, D), the dtype of `b`; with `num_segments` (B, S, D), where a
      segment that is absent leaves its initial state as it is.

    Raises:
      TypeError: an argument is not an array of a floating or complex dtype, or `b` is real and
        another argument complex; `segment_ids` are not integers, or `num_segments` no int.
      ValueError: shapes do not fit, `num_segments` is less than 1, without `segment_ids` or with
        `sequence_axis`, L cannot be split so, or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> a, b = jnp.full((1, 4, 1), 0.5), jnp.ones((1, 4, 1))
      >>> jaxkern.linear_scan(a, b)[0, :, 0]
      Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32)

      Two sequences of 1 and 3 steps in a row, each with its own states:

      >>> out, state = jaxkern.linear_scan(
      ...     a, b, segment_ids=jnp.array([[0, 1, 1, 1]]), num_segments=2,
      ...     initial_state=jnp.array([[[8.0], [0.0]]]), return_final_state=True,
      ... )
      >>> out[0, :, 0]
      Array([5.  , 1.  , 1.5 , 1.75], dtype=float32)
      >>> state[0, :, 0]
      Array([5.  , 1.75], dtype=float32)

    References:
      Smith, Warrington and Linderman, `Simplified State Space Layers for Sequence Modeling
      <https://arxiv.org/abs/2208.04933>`_, 2022. De et al., `Griffin
      <https://arxiv.org/abs/2402.19427>`_, 2024. Feng et al., `Were RNNs All We Needed?
      <https://arxiv.org/abs/2410.01201>`_, 2024.
    """
    a, b = _check(a, b)
    over = check_sequence_axis(sequence_axis)
    count = segments.check_num_segments(num_segments, segment_ids, over)
    if segment_ids is not None:
        segment_ids = segments.check_segment_ids(segment_ids, a.shape[:2], count, "a")
    initial_state = segments.check_states(
        initial_state, a.shape[0], count, a.shape[2:], "(B, D) of a", _check_inexact
    )
    if initial_state is not None:
        _check_complex("initial_state", initial_state, b)
    reason = unfit(a=a, b=b, initial_state=initial_state)
    mode = resolve(implementation, reason, op="linear_scan")
    final = return_final_state and count is None
    options = LinearScanOptions(reverse, mode, count, final=final, sequence_axis=over)
    # All arrays about segments are in the order of time.
    in_order = functools.partial(jnp.flip, axis=1) if reverse else lambda v: v
    ids = entered = None
    if segment_ids is not None and count is not None:
        ids = in_order(segment_ids)
        entered = in_order(segments.entered(ids, count))
    elif segment_ids is not None:
        new = segments.new_segments(segment_ids, reverse=reverse, sequence_axis=over)
        entered = jnp.where(new, 0, -1)
    if mode != "xla":
        out, final = _linear_scan_jit(a, b, initial_state, entered, options)
    else:
        out, final = named("linear_scan", PLAIN(options, a, b, initial_state, entered))
        out = match_sharding(out, b)
    if not return_final_state:
        return out
    if count is not None:
        return out, _final_states(options, count, out, initial_state, ids)
    return out, on_all(sequence_axis, final)


def _check(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    a, b = _check_inexact("a", a), _check_inexact("b", b)
    if a.ndim != 3:
        raise ValueError(f"a must have shape (B, L, D), got {a.shape}")
    if b.shape != a.shape:
        raise ValueError(f"b must have shape {a.shape} = (B, L, D) of a; got {b.shape}")
    _check_complex("a", a, b)
    return a, b


def _check_inexact(name: str, x: Any) -> jax.Array:
    """`x` as an array of a floating or complex dtype."""
    if isinstance(x, jax.Array | np.ndarray) and jnp.iscomplexobj(x):
        return jnp.asarray(x)
    return check_floating(name, x)


def _check_complex(name: str, array: jax.Array, b: jax.Array) -> None:
    if jnp.iscomplexobj(array) and not jnp.iscomplexobj(b):
        raise TypeError(
            f"b must be complex where {name} is ({array.dtype}), as the result has the dtype "
            f"of b; got {b.dtype}. Convert it first: b.astype({array.dtype})"
        )


def _final_states(options: LinearScanOptions, count: int, out, initial_state, ids) -> jax.Array:
    """The last state of each segment: `ids` are in the order of time."""
    length = out.shape[1]
    first, stop = segments.spans(ids, count)
    last = jnp.where(first < length, stop - 1, -1)
    if options.reverse:
        last = jnp.where(last < 0, -1, length - 1 - last)
    return segments.last_tokens(out, last, initial_state)


def _linear_scan(a, b, initial_state, entered, options):
    out, final, _ = FORWARD(options, a, b, initial_state, entered)
    return match_sharding(out, b), final


def _linear_scan_fwd(a, b, initial_state, entered, options):
    save = dataclasses.replace(options, save=True)
    out, final, states = FORWARD(save, a, b, initial_state, entered)
    return (match_sharding(out, b), final), (a, b, initial_state, entered, states)


def _linear_scan_bwd(options, res, cotangents):
    a, b, initial_state, entered, states = res
    own = None if options.num_segments is None else initial_state
    da, db, dstate = BACKWARD(options, a, b, own, entered, states, *cotangents)
    dstate = None if initial_state is None else dstate
    return *match_primals((da, db, dstate), (a, b, initial_state)), None


_linear_scan_jit = Differentiable(_linear_scan_fwd, _linear_scan_bwd, _linear_scan)


def _states(options: LinearScanOptions) -> str:
    """The factors of initial states."""
    return "b d" if options.num_segments is None else "b s d"


# A sequence split between devices

CARRY = KernelPass(
    "linear_scan_carry",
    kernel=launch_device_carry,
    reference=reference_carry,
    ins=("b l d", "b l d", "b l"),
    outs=("b d", "b d"),
    whole="l",
)
BWD_CARRY = KernelPass(
    "linear_scan_bwd_carry",
    kernel=functools.partial(launch_device_carry, transposed=True),
    reference=reference_bwd_carry,
    ins=("b l d", "b l d", "b l"),
    outs=("b d", "b d"),
    whole="l",
)


_PRODUCTS = Decays(decay=lambda product: product, over=jnp.prod)


def _sections(options: LinearScanOptions, a: Any, b: Any) -> Sections:
    return Sections.of(a.shape[0], a.shape[2], a.shape[1], options.steps(a, b))


def _split_forward(run: Any, axes: Any, options: LinearScanOptions, *args: Any) -> Any:
    a, b, initial_state, entered = args
    sections = _sections(options, a, b)
    a, b, entered = map(sections.cut, (a, b, entered))
    carry = run(options, a, b, entered, of=CARRY)
    reverse = options.reverse
    state = sections.states(run, axes, _PRODUCTS, carry, initial_state, reverse=reverse)
    out, final, *states = run(options, a, b, state, entered)
    last, number = (is_first, 0) if reverse else (is_last, -1)
    final = only_if(last(axes), sections.at(final, number))
    return sections.join(out), final, *map(sections.join, states)


def _split_backward(run: Any, axes: Any, options: LinearScanOptions, *args: Any) -> Any:
    a, b, initial_state, entered, states, dout, dfinal = args
    sections, reverse = _sections(options, a, b), not options.reverse
    a, b, entered, states, dout = map(sections.cut, (a, b, entered, states, dout))
    carry = run(options, a, dout, entered, of=BWD_CARRY)
    dfinal = sections.states(run, axes, _PRODUCTS, carry, dfinal, reverse=reverse)
    da, db, dstate = run(options, a, b, initial_state, entered, states, dout, dfinal)
    first, number = (is_first, 0) if reverse else (is_last, -1)
    dstate = only_if(first(axes), sections.at(dstate, number))
    return sections.join(da), sections.join(db), dstate


def _unfit(options: LinearScanOptions, parts: int, a: Any, b: Any, *_: Any) -> str | None:
    return unless_multiple(a.shape[1], parts, options.steps(a, b))


_SPLIT_FORWARD, _SPLIT_BACKWARD = sequences(_split_forward, _split_backward, _unfit)


# The passes


def _arguments(options: LinearScanOptions) -> tuple[str, ...]:
    return "b l d", "b l d", _states(options), "b l"


def _plain(options: LinearScanOptions, *args: Any) -> tuple[jax.Array, jax.Array | None]:
    out = linear_scan_reference(*args, reverse=options.reverse)
    return out, last_state(options, out, args[2])


FORWARD = KernelPass(
    "linear_scan_fwd",
    kernel=launch_fwd,
    reference=reference_fwd,
    ins=_arguments,
    outs=("b l d", "b d", "b l d"),
    whole="l s",
    sequence=_SPLIT_FORWARD,
)
BACKWARD = KernelPass(
    "linear_scan_bwd",
    kernel=launch_bwd,
    reference=reference_bwd,
    ins=lambda options: (*_arguments(options), "b l d", "b l d", "b d"),
    outs=lambda options: ("b l d", "b l d", _states(options)),
    whole="l s",
    sequence=_SPLIT_BACKWARD,
)
PLAIN = KernelPass(  # whose loops and gathers a mesh with Explicit axes cannot split
    "linear_scan",
    reference=_plain,
    ins=_arguments,
    outs=("b l d", "b d"),
    whole="l s",
    sequence=_SPLIT_FORWARD,
)
