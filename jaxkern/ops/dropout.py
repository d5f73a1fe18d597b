r"""Dropout, whose mask is drawn again wherever it is needed and never stored.

Forward, for an activation f (by default none) and a mask m of zeros and ones:

    out = m · f(x) / (1 − p) + residual

Backward:

    dx = m · dout / (1 − p) · f'(x)          dresidual = dout

Element i of an array, counted through all its axes, is kept (m = 1) where 16 random bits are at
least t = round(2¹⁶ · rate), so that p = t / 2¹⁶ is the rate to within 2⁻¹⁷. As p and not the rate
divides, the expectation of out is exact. A rate of 0 keeps everything and a rate of 1 nothing.

The bits are Philox-4x32-10's. Its key and the upper half of its counter are the words of the user's
key, of whatever generator, and zeros after a shorter one's; the lower half is ⌊i / 8⌋. The result's
128 bits serve 8 elements, in order of their words and from the lower half of a word to the upper. A
mask therefore depends on key, rate and i alone: on no block size, device, sharding or
implementation.

Saved for the backward: the key's words, and x where there is an activation.

Bytes per element, in units of its size: 2 forward and backward (3 with a residual forward, 3 with
an activation backward). Operations: 60 of integers for the 8 elements of a lane, or the 4 of fp32,
which leave half of their bits unused, and about 6 an element around them: fewer than an H200 can do
while the elements are read and written.

Sources: Srivastava et al., Dropout, JMLR 15, 2014; Salmon, Moraes, Dror and Shaw, Parallel Random
Numbers: As Easy as 1, 2, 3, SC 2011 (Philox).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.bound import wide
from jaxkern.core.derivatives import Differentiable, without_derivative
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import TypeOf, match_primal, match_sharding, vary_over, varying
from jaxkern.mosaic.arithmetic import multiply_wide
from jaxkern.mosaic.elementwise import (
    Lanes,
    halves,
    launch,
    philox,
    unit,
    unsupported,
    wide_product,
)
from jaxkern.mosaic.lanes import join_lanes
from jaxkern.ops.curves import (
    CURVES,
    NOT_THROUGH_ZERO,
    PLAIN,
    Activation,
    check_activation,
    curve,
    kernel_functions,
    recomputing,
)

GROUP = 8
"""Elements that one call of the generator serves."""

Pair = tuple[Any, Any]
"""The lower and the upper 32 bits of an integer."""


@dataclasses.dataclass(frozen=True)
class DropoutOptions:
    """Static arguments of the passes.

    Attributes:
      op: the name of the public function.
      curve: of the activation, or None.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      shape: of the whole array, of which a device may have a part.
      dtype: of x, in the backward.
    """

    op: str
    curve: str | None
    mode: Mode
    shape: tuple[int, ...] = ()
    dtype: Any = None


@public_op
def dropout(
    x: jax.Array,
    rate: Any,
    key: jax.Array,
    *,
    activation: Activation | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Set each element to zero with probability `rate`, and scale the others up.

    .. math:: y_i = \frac{m_i f(x_i)}{1 - p}, \qquad P(m_i = 0) = p

    The mask is never stored: the backward draws it from `key` again. It is a function of key, rate
    and an element's position in the whole array: the same for every implementation, device,
    sharding and block size. Inside ``jax.shard_map`` the whole array is the shard: give each its
    own key, with ``jax.random.fold_in``.

    p is `rate` rounded to a multiple of 2⁻¹⁶, and 1 − p divides, so the expectation is exact. The
    result has no derivative by `rate`, whose mask moves in steps: pass a rate that depends on what
    is differentiated as ``jax.lax.stop_gradient(rate)``.

    Args:
      x: any shape, bfloat16, float16 or float32.
      rate: probability of a zero, from 0 to 1; a number or a scalar array, which may be traced
        (one outside is then taken as 0 or 1).
      key: a key of ``jax.random``, of any generator, or its words, (k,), uint32.
      activation: f, computed in the same pass: ``"relu"``, ``"relu_squared"``, ``"silu"``,
        ``"gelu"`` (by tanh; also ``"gelu_tanh"``), ``"gelu_erf"``, ``"quick_gelu"``,
        ``"sigmoid"``, ``"tanh"`` or ``None``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the fastest: the kernels on an NVIDIA GPU of compute capability 8.0 or newer, plain JAX
        elsewhere.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of a floating dtype, `rate` not a number, `key` not one key.
      ValueError: `rate` is not in [0, 1]; `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call, or it is
        differentiated by `rate`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> out = jaxkern.dropout(jnp.ones(1000), 0.5, jax.random.key(0))
      >>> sorted(set(out.tolist()))
      [0.0, 2.0]

    References:
      Srivastava et al., `Dropout <https://jmlr.org/papers/v15/srivastava14a.html>`_, 2014; Salmon
      et al., `Parallel Random Numbers <https://doi.org/10.1145/2063384.2063405>`_, 2011.
    """
    x = check_floating("x", x)
    curve_name = check_activation(activation)
    mode = resolve(implementation, unsupported(x=x), op="dropout")
    return _dropped(x, None, rate, key, DropoutOptions("dropout", curve_name, mode))


@public_op
def dropout_add(
    x: jax.Array,
    residual: jax.Array,
    rate: Any,
    key: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Dropout of `x`, added to a residual in the same pass.

    .. math:: y_i = r_i + \frac{m_i x_i}{1 - p}

    The mask is the same as :func:`jaxkern.dropout`'s. The sum is computed in fp32 and rounded once.

    Args:
      x: any shape, bfloat16, float16 or float32.
      residual: the shape of `x`, any of those dtypes.
      rate: as for :func:`jaxkern.dropout`.
      key: as for :func:`jaxkern.dropout`.
      implementation: as for :func:`jaxkern.dropout`.

    Returns:
      The shape of `x`, the dtype of `residual`.

    Raises:
      TypeError, ValueError, NotImplementedError: as :func:`jaxkern.dropout` does, and where
        `residual` has another shape.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, residual = jnp.ones(1000), jnp.full(1000, 3.0)
      >>> out = jaxkern.dropout_add(x, residual, 0.5, jax.random.key(0))
      >>> sorted(set(out.tolist()))
      [3.0, 5.0]
    """
    x = check_floating("x", x)
    residual = check_array("residual", residual, x.shape, "the shape of x")
    mode = resolve(implementation, unsupported(x=x, residual=residual), op="dropout_add")
    return _dropped(x, residual, rate, key, DropoutOptions("dropout_add", None, mode))


def _dropped(x: Any, residual: Any, rate: Any, key: Any, options: DropoutOptions) -> jax.Array:
    if x.ndim == 0:
        row = None if residual is None else residual.reshape(1)
        return _dropped(x.reshape(1), row, rate, key, options).reshape(())
    seeds = _key_words(key), _rate_words(rate)
    options = dataclasses.replace(options, shape=x.shape)
    if options.mode == "xla":
        return named(options.op, _plain_dropout(options, x, residual, *seeds))
    return _dropout_jit(x, residual, seeds, options)


@functools.partial(jax.jit, static_argnums=0)
def _plain_dropout(options: DropoutOptions, *args: Any) -> jax.Array:
    plain = lambda *args: reference_forward(options, *args, *positions_of(options.shape))[0]
    return recomputing(plain)(*args)


def _key_words(key: Any) -> jax.Array:
    """(k,), uint32: the words of a key, 4 at most."""
    try:
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        shape, words = key.shape, jax.random.key_data(key) if typed else jnp.asarray(key)
    except (AttributeError, TypeError) as e:
        raise TypeError(
            f"key must be a key of jax.random, got {key!r}; jax.random.key(0) makes one of a number"
        ) from e
    if words.dtype != jnp.uint32 or (typed and shape) or (not typed and len(shape) != 1):
        raise TypeError(
            f"key must be one key of jax.random, or its words, (k,) and uint32; got {words.dtype} "
            f"of shape {shape}. Split keys are for jax.vmap, or index them"
        )
    if words.size <= 4:
        return words
    words = jnp.pad(words, (0, -words.size % 4)).reshape(-1, 4)
    return functools.reduce(jnp.bitwise_xor, [words[i] for i in range(words.shape[0])])


def _rate_words(rate: Any) -> jax.Array:
    """(2,), uint32: the threshold and the bits of 1 / (1 − p)."""
    threshold = _threshold(rate)
    scale = lax.bitcast_convert_type(scale_of(threshold, jnp.float32), jnp.uint32)
    return jnp.stack([threshold, scale])


def _threshold(rate: Any) -> jax.Array:
    """uint32: of 2¹⁶ values of the random bits those below it drop their element."""
    try:
        array = jnp.asarray(rate)
    except (TypeError, ValueError) as e:
        raise TypeError(f"rate must be a number, got {type(rate).__name__}") from e
    if array.dtype == jnp.bool_ or jnp.iscomplexobj(array):
        raise TypeError(f"rate must be a real number, got {rate!r}")
    if array.ndim:
        raise TypeError(f"rate must be a number, got an array of shape {array.shape}")
    if not isinstance(rate, Tracer) and not 0 <= float(rate) <= 1:
        raise ValueError(f"rate must be between 0 and 1, got {rate!r}")
    constant = without_derivative(
        array.astype(jnp.float32),
        "dropout has no derivative by rate, and rate depends on what is differentiated here; pass "
        "jax.lax.stop_gradient(rate)",
    )
    return jnp.round(jnp.clip(constant, 0.0, 1.0) * 65536.0).astype(jnp.uint32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _DropoutTypes:
    """The types of arguments that are not saved for the backward."""

    dtype: Any
    x: Any
    residual: Any


def _dropout_fwd(x, residual, seeds, options):
    (out,) = FORWARD(options, x, residual, *seeds, *positions_of(options.shape))
    types = _DropoutTypes(
        x.dtype, *(None if a is None else TypeOf(jax.typeof(a)) for a in (x, residual))
    )
    return match_sharding(out, x), (x if options.curve else None, types, seeds)


def _dropout_bwd(options, res, dout):
    x, types, seeds = res
    options = dataclasses.replace(options, dtype=types.dtype)
    (dx,) = BACKWARD(options, x, dout, *seeds, *positions_of(options.shape))
    dresidual = None if types.residual is None else match_primal(dout, types.residual)
    return match_primal(dx, types.x), dresidual, (None, None)


_dropout_jit = Differentiable(_dropout_fwd, _dropout_bwd)


# In plain JAX: the specification and the "xla" implementation


def reference_forward(
    options: DropoutOptions, x: Any, residual: Any, key: Any, rate: Any, *positions: Any
) -> tuple[Any]:
    f32 = wide(*(a.dtype for a in (x, residual) if a is not None))
    v = x.astype(f32)
    out = _drop(options, key, rate, positions, curve(options.curve, v) if options.curve else v)
    if residual is None:
        return (out.astype(x.dtype),)
    return ((residual.astype(f32) + out).astype(residual.dtype),)


def reference_backward(
    options: DropoutOptions, x: Any, dout: Any, key: Any, rate: Any, *positions: Any
) -> tuple[Any]:
    f32 = wide(*(a.dtype for a in (x, dout) if a is not None))
    dropped = _drop(options, key, rate, positions, dout.astype(f32))
    if x is not None:
        assert options.curve
        dropped = CURVES[options.curve](x.astype(f32), PLAIN)[1](dropped)
    return (dropped.astype(options.dtype),)


def _drop(options: DropoutOptions, key: Any, rate: Any, positions: Any, v: jax.Array) -> jax.Array:
    """m · v / (1 − p)."""
    kept = random_bits(options.shape, key, positions) >= rate[0]
    return jnp.where(kept, v * scale_of(rate[0], v.dtype), 0.0)


def scale_of(threshold: jax.Array, dtype: Any) -> jax.Array:
    """1 / (1 − p), and 0 where nothing is kept."""
    kept = 65536 - threshold.astype(jnp.int32)
    return jnp.where(kept > 0, 65536.0 / jnp.maximum(kept, 1).astype(dtype), 0.0)


def positions_of(shape: tuple[int, ...]) -> list[jax.Array]:
    """The indices along each axis, split between devices as the axis is."""
    return [jnp.arange(n, dtype=jnp.uint32) for n in shape]


def random_bits(shape: tuple[int, ...], key: Any, positions: Sequence[Any]) -> jax.Array:
    """16 random bits for each element of the part, at `positions`, of an array of `shape`."""
    part = tuple(p.size for p in positions)
    grouped = shape[-1] % GROUP == part[-1] % GROUP == 0
    *others, last = positions
    along = [*others, last[::GROUP] if grouped else last]
    axes = range(len(shape))
    index = flat_index(
        shape, [jnp.expand_dims(p, [e for e in axes if e != d]) for d, p in enumerate(along)]
    )
    group = shift_right(index, GROUP.bit_length() - 1)
    bits = halves(_plain_words(group, [*key, *[jnp.uint32(0)] * (4 - key.size)]))
    if grouped:
        return jnp.stack(bits, axis=-1).reshape(part)
    which = index[0] & (GROUP - 1)
    return functools.reduce(lambda a, k: jnp.where(which == k, bits[k], a), range(1, 8), bits[0])


def flat_index(shape: tuple[int, ...], positions: Sequence[Any]) -> Pair:
    """The index, counted through all axes of an array of `shape`, of what is at `positions`."""
    index: Pair = jnp.uint32(0), jnp.uint32(0)
    for position, size in zip(positions, shape, strict=True):
        index = add(times(index, size), (position, jnp.uint32(0)))
    return index


def _plain_words(group: Pair, key: Sequence[Any]) -> Any:
    """The words of groups; XLA would compute them again for each element but for the barrier."""
    if jax.default_backend() == "gpu":  # where each round of a loop would go through memory
        return lax.optimization_barrier(random_words(group, key))
    axes = frozenset[str]().union(*map(varying, (*group, *key)))
    word = lambda w: vary_over(jnp.broadcast_to(w, group[0].shape), axes)
    counter = map(word, (*group, *key[2:]))
    return lax.optimization_barrier(philox((*counter,), [*map(word, key[:2])], rolled=True))


def random_words(group: Pair, key: Sequence[Any], product: Any = None) -> list[Any]:
    """The random bits of a group of 8 elements, two of them in each word."""
    return philox((*group, *key[2:]), key[:2], product)


def times(a: Pair, size: Any) -> Pair:
    """`a` times the size of an axis, which may be symbolic."""
    factor = jnp.uint32(size) if isinstance(size, int) else jnp.asarray(size).astype(jnp.uint32)
    high, low = wide_product(a[0], factor)
    return low, high + a[1] * factor


def add(a: Pair, b: Pair) -> Pair:
    low = a[0] + b[0]
    return low, a[1] + b[1] + jnp.where(low < b[0], jnp.uint32(1), jnp.uint32(0))


def shift_right(a: Pair, bits: int) -> Pair:
    if not bits:
        return a
    return (a[0] >> bits) | (a[1] << (32 - bits)), a[1] >> bits


# The kernels. A lane draws the bits of the group that its unit of elements lies in; units never
# cross groups. On a mesh a device has a part of an array, of which each lane finds its unit's index
# in the whole.


def launch_forward(
    options: DropoutOptions, x: Any, residual: Any, *seeds: Any, sliced: bool = False
) -> tuple[Any, ...]:
    if x.size == 0:
        return reference_forward(options, x, residual, *seeds)
    of = kernel_functions(exact=x.dtype == jnp.float32)
    ins = [x] if residual is None else [x, residual]
    out = jax.ShapeDtypeStruct(x.shape, ins[-1].dtype)
    part = part_of(options.shape, *ins, out)

    def body(lanes: Lanes, x: jax.Array, *residual: jax.Array) -> tuple[jax.Array]:
        early = options.curve in NOT_THROUGH_ZERO
        if options.curve and early:
            x = CURVES[options.curve](x, of)[0]
        x, scale = drop(lanes, part, x)
        if options.curve and not early:  # of 0 it is 0
            x = CURVES[options.curve](x, of)[0]
        return (residual[0] + x * scale if residual else x * scale,)

    words = part.seeds(*seeds)
    return launch(f"{options.op}_fwd", body, ins, [out], seeds=words, vec=part.vec, sliced=sliced)


@dataclasses.dataclass(frozen=True)
class DropoutPart:
    """A device's part of an array, and the way from a lane's unit to its index in the whole array.

    Attributes:
      of: the shape of the whole array.
      digits: (size, stride) from the last axis on; element e of the part lies at Σ digit · stride,
        with the digits of e in these sizes. Axes that are contiguous in the whole are one.
      vec: elements of a unit, which never crosses a group of the generator.
      whole: whether the part is all of the array.
    """

    of: tuple[int, ...]
    digits: tuple[tuple[int, int], ...]
    vec: int
    whole: bool

    def seeds(self, key: jax.Array, rate: jax.Array, *positions: jax.Array) -> list[jax.Array]:
        """Returns key and rate, and for a part the index of its first unit in the whole array."""
        if self.whole:
            return [key, rate]
        begin = flat_index(self.of, [p[0] for p in positions])
        return [key, rate, jnp.stack(shift_right(begin, self.vec.bit_length() - 1))]


def part_of(whole: tuple[int, ...], *arrays: Any) -> DropoutPart:
    """The part of an array of shape `whole` that `arrays` are."""
    shape, vec = arrays[0].shape, unit(*arrays)
    digits: list[tuple[int, int]] = []
    begins = []
    stride = 1
    for size, full in zip(reversed(shape), reversed(whole), strict=True):
        if digits and digits[-1][0] * digits[-1][1] == stride:
            digits[-1] = (digits[-1][0] * size, digits[-1][1])
        elif size > 1 or not digits:
            digits.append((size, stride))
        if size != full:
            begins.append(size * stride)
        stride *= full
    if begins:
        vec = math.gcd(vec, digits[0][0], *(stride for _, stride in digits[1:]), *begins)
    return DropoutPart(whole, tuple(digits), vec, shape == whole)


def drop(lanes: Lanes, part: DropoutPart, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns m · v and 1 / (1 − p), (LANES · vec,)."""
    key, (threshold, scale, *_) = lanes.seeds[:2]
    units = _units_in_whole(lanes, part)
    group = shift_right(units, (GROUP // lanes.vec).bit_length() - 1)
    bits = _bits_of_unit(random_words(group, key, multiply_wide), units[0], lanes.vec)
    keep = join_lanes(bits) >= join_lanes([threshold] * lanes.vec)
    scales = join_lanes([lax.bitcast_convert_type(scale, jnp.float32)] * lanes.vec)
    return jnp.where(keep, v, 0.0), scales


def _units_in_whole(lanes: Lanes, part: DropoutPart) -> Pair:
    """The indices of the lanes' units in the whole array."""
    if part.whole:
        return lanes.units, lanes.units & jnp.uint32(0)
    (low, high, *_), rest = lanes.seeds[2], lanes.units
    total = low, high
    for i, (size, stride) in enumerate(part.digits):
        size, stride = (size // lanes.vec, 1) if i == 0 else (size, stride // lanes.vec)
        digit = rest if i + 1 == len(part.digits) else lax.rem(rest, jnp.uint32(size))
        rest = lax.div(rest, jnp.uint32(size))
        high, low = multiply_wide(digit, stride % 2**32)
        total = add(total, (low, high + digit * jnp.uint32(stride >> 32)))
    return total


def _bits_of_unit(words: list[Any], units: Any, vec: int) -> list[Any]:
    """The 16 bits of each of a unit's elements, of the words of the group that it lies in."""
    half = 4
    while half >= vec:
        upper = units & jnp.uint32(half // vec) != 0
        if half == 1:
            return [jnp.where(upper, words[0] >> 16, words[0] & jnp.uint32(0xFFFF))]
        a, b = words[: half // 2], words[half // 2 :]
        words = [jnp.where(upper, y, x) for x, y in zip(a, b, strict=True)]
        half //= 2
    return halves(words)


def launch_backward(
    options: DropoutOptions, x: Any, dout: Any, *seeds: Any, sliced: bool = False
) -> tuple[Any, ...]:
    if dout.size == 0:
        return reference_backward(options, x, dout, *seeds)
    of = kernel_functions(exact=options.dtype == jnp.float32)
    ins = [dout] if x is None else [dout, x]
    dx = jax.ShapeDtypeStruct(dout.shape, options.dtype)
    part = part_of(options.shape, *ins, dx)

    def body(lanes: Lanes, dout: jax.Array, *x: jax.Array) -> tuple[jax.Array]:
        dout, scale = drop(lanes, part, dout)
        if options.curve:
            dout = CURVES[options.curve](x[0], of)[1](dout)
        return (dout * scale,)

    words = part.seeds(*seeds)
    return launch(f"{options.op}_bwd", body, ins, [dx], seeds=words, vec=part.vec, sliced=sliced)


def _factors_in(options: DropoutOptions) -> tuple[str, ...]:
    """Two arrays, the words of key and rate, and an index for each axis."""
    return "...", "...", "y", "z", *(f".{i}" for i in range(len(options.shape)))


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=launch_forward,
    kernel_of_slices=functools.partial(launch_forward, sliced=True),
    reference=reference_forward,
    ins=_factors_in,
    outs=("...",),
    whole="y z",
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=launch_backward,
    kernel_of_slices=functools.partial(launch_backward, sliced=True),
    reference=reference_backward,
    ins=_factors_in,
    outs=("...",),
    whole="y z",
)
