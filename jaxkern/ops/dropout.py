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
which leave half of their bits unused, and about 6 an element around them; on an H200 memory leaves
time for 28, or for 57 of fp32.

Sources: Srivastava et al., Dropout, JMLR 15, 2014; Salmon, Moraes, Dror and Shaw, Parallel Random
Numbers: As Easy as 1, 2, 3, SC 2011 (Philox).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, TypeOf, match_primal, match_sharding, named
from jaxkern.mosaic.instructions import multiply_wide
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
    wide,
)
from jaxkern.ops.elementwise import Lanes, launch, unit, unsupported

_GROUP = 8
"""Elements that one call of the generator serves."""

_Pair = tuple[Any, Any]
"""The lower and the upper 32 bits of an integer."""

_Seeds = tuple[jax.Array, jax.Array]
"""The words of the key, and those of the rate."""

_Wide = Callable[[Any, int], _Pair]
"""(a, b) -> the upper and the lower half of a · b."""


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

    The mask is drawn from `key` anew in the backward, and never stored. It is a function of key,
    rate and an element's position in the whole array: the same for every implementation, device,
    sharding and block size. Inside ``jax.shard_map`` the whole array is the shard: give each its
    own key, with ``jax.random.fold_in``.

    p is `rate` rounded to a multiple of 2⁻¹⁶, and 1 − p divides, so the expectation is exact. The
    gradient with respect to `rate` is zero.

    Args:
      x: any shape, bfloat16, float16 or float32.
      rate: probability of a zero, from 0 to 1; a number or a scalar array, which may be traced
        (one outside is then taken as 0 or 1).
      key: a key of ``jax.random``, of any generator, or its words, (k,), uint32.
      activation: f, computed in the same pass: ``"relu"``, ``"relu_squared"``, ``"silu"``,
        ``"gelu"`` (by tanh; also ``"gelu_tanh"``), ``"gelu_erf"``, ``"quick_gelu"``,
        ``"sigmoid"``, ``"tanh"`` or ``None``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest: the kernels on an
        NVIDIA GPU of compute capability 9.0 or newer, plain JAX elsewhere.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of a floating dtype, `rate` not a number, `key` not one key.
      ValueError: `rate` is not in [0, 1]; `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

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
    return _dropped(x, None, rate, key, _Options("dropout", curve_name, mode))


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

    The mask is that of :func:`jaxkern.dropout`. The sum is computed in fp32 and rounded once.

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
    residual = check_array("residual", residual, x.shape, "that of x")
    mode = resolve(implementation, unsupported(x=x, residual=residual), op="dropout_add")
    return _dropped(x, residual, rate, key, _Options("dropout_add", None, mode))


@dataclasses.dataclass(frozen=True)
class _Options:
    op: str
    curve: str | None
    mode: Mode
    shape: tuple[int, ...] = ()  # of the whole array
    dtype: Any = None  # of x, in the backward


def _dropped(x: Any, residual: Any, rate: Any, key: Any, options: _Options) -> jax.Array:
    seeds = _key_words(key), _rate_words(rate)
    if x.ndim == 0:
        as_row = None if residual is None else residual.reshape(1)
        return _dropped_array(x.reshape(1), as_row, seeds, options).reshape(())
    return _dropped_array(x, residual, seeds, options)


def _dropped_array(x: Any, residual: Any, seeds: _Seeds, options: _Options) -> jax.Array:
    options = dataclasses.replace(options, shape=x.shape)
    if options.mode == "xla":
        return named(options.op, _plain_dropout(options, x, residual, *seeds))
    return _dropout_jit(x, residual, seeds, options)


@functools.partial(jax.jit, static_argnums=0)
def _plain_dropout(options: _Options, *args: Any) -> jax.Array:
    plain = lambda *args: _reference_fwd(options, *args, *_positions(options.shape))[0]
    return recomputing(plain)(*args)


def _positions(shape: tuple[int, ...]) -> list[jax.Array]:
    """The indices along each axis: split as the axis is, they tell a device what part it has."""
    return [jnp.arange(n, dtype=jnp.uint32) for n in shape]


def _key_words(key: Any) -> jax.Array:
    """(k,), uint32: the words of a key, 4 at most."""
    try:
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        shape, words = key.shape, jax.random.key_data(key) if typed else jnp.asarray(key)
    except (AttributeError, TypeError) as e:
        raise TypeError(f"key must be a key of jax.random, got {type(key).__name__}") from e
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
    scale = lax.bitcast_convert_type(_scale(threshold, jnp.float32), jnp.uint32)
    return jnp.stack([threshold, scale])


def _threshold(rate: Any) -> jax.Array:
    """uint32: of 2¹⁶ values of the random bits those below it drop their element."""
    try:
        array = jnp.asarray(rate, jnp.float32)
    except (TypeError, ValueError) as e:
        raise TypeError(f"rate must be a number, got {type(rate).__name__}") from e
    if array.ndim:
        raise TypeError(f"rate must be a number, got an array of shape {array.shape}")
    if not isinstance(rate, Tracer) and not 0 <= float(rate) <= 1:
        raise ValueError(f"rate must be between 0 and 1, got {rate!r}")
    within = jnp.clip(_without_derivative(array), 0.0, 1.0)
    return jnp.round(within * 65536.0).astype(jnp.uint32)


@jax.custom_jvp
def _without_derivative(rate: jax.Array) -> jax.Array:
    """`rate`, by which the mask, and so the result, has no derivative."""
    return rate


@_without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise NotImplementedError(
        "dropout has no derivative by rate, and rate depends on what is differentiated here; pass "
        "jax.lax.stop_gradient(rate)"
    )


def _scale(threshold: jax.Array, dtype: Any) -> jax.Array:
    """1 / (1 − p), and 0 where nothing is kept."""
    kept = 65536 - threshold.astype(jnp.int32)
    return jnp.where(kept > 0, 65536.0 / jnp.maximum(kept, 1).astype(dtype), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dropout(x: Any, residual: Any, seeds: _Seeds, options: _Options) -> jax.Array:
    return _dropout_fwd(x, residual, seeds, options)[0]


def _dropout_fwd(x, residual, seeds, options):
    (out,) = FORWARD(options, x, residual, *seeds, *_positions(options.shape))
    types = _Types(x.dtype, *(None if a is None else TypeOf(jax.typeof(a)) for a in (x, residual)))
    return match_sharding(out, x), (x if options.curve else None, types, seeds)


def _dropout_bwd(options, res, dout):
    x, types, seeds = res
    options = dataclasses.replace(options, dtype=types.dtype)
    (dx,) = BACKWARD(options, x, dout, *seeds, *_positions(options.shape))
    dresidual = None if types.residual is None else match_primal(dout, types.residual)
    return match_primal(dx, types.x), dresidual, (None, None)


_dropout.defvjp(_dropout_fwd, _dropout_bwd)
_dropout_jit = jax.jit(_dropout, static_argnums=3)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """What the backward must know of arguments that are not saved for it."""

    dtype: Any
    x: Any
    residual: Any


# Kernels


def _launch_fwd(options: _Options, x: Any, residual: Any, *where: Any, sliced: bool = False):
    if x.size == 0:
        return _reference_fwd(options, x, residual, *where)
    exact = x.dtype == jnp.float32
    ins = [x] if residual is None else [x, residual]
    out = jax.ShapeDtypeStruct(x.shape, ins[-1].dtype)
    levels = _levels(options.shape, *ins, out)

    def body(lanes: Lanes, x: jax.Array, *residual: jax.Array):
        of = kernel_functions(exact)
        early = options.curve in NOT_THROUGH_ZERO
        if options.curve and early:
            x = CURVES[options.curve](x, of)[0]
        x, scale = _drop_in_kernel(lanes, levels, x)
        if options.curve and not early:  # of 0 it is 0
            x = CURVES[options.curve](x, of)[0]
        return (residual[0] + x * scale if residual else x * scale,)

    return _launch(f"{options.op}_fwd", options, levels, body, ins, out, *where, sliced=sliced)


def _launch_bwd(options: _Options, x: Any, dout: Any, *where: Any, sliced: bool = False):
    if dout.size == 0:
        return _reference_bwd(options, x, dout, *where)
    exact = options.dtype == jnp.float32
    ins = [dout] if x is None else [dout, x]
    dx = jax.ShapeDtypeStruct(dout.shape, options.dtype)
    levels = _levels(options.shape, *ins, dx)

    def body(lanes: Lanes, dout: jax.Array, *x: jax.Array):
        dout, scale = _drop_in_kernel(lanes, levels, dout)
        if options.curve:
            of = kernel_functions(exact)
            dout = CURVES[options.curve](x[0], of)[1](dout)
        return (dout * scale,)

    return _launch(f"{options.op}_bwd", options, levels, body, ins, dx, *where, sliced=sliced)


def _launch(name, options, levels, body, ins, out, key, rate, *positions, sliced):
    """With the key, the rate, and where in the whole array the device's part begins."""
    seeds = [key, rate]
    if not levels.whole:
        strides = _strides(options.shape)
        begins = [_multiply(p[0], s) for p, s in zip(positions, strides, strict=True)]
        begin = _shift_right(functools.reduce(_add, begins), levels.vec.bit_length() - 1)
        seeds.append(jnp.stack(begin))
    return launch(
        name,
        body,
        ins,
        [out],
        seeds=seeds,
        vec=levels.vec,
        sliced=sliced,
    )


@dataclasses.dataclass(frozen=True)
class _Levels:
    """Where in the whole array the elements of a device's part lie, from its first one on.

    Element e of the part is at Σ digit · stride over `digits`, (size, stride), with e's digits from
    the lowest on. A unit of `vec` elements never leaves one group of the generator.
    """

    digits: tuple[tuple[int, int], ...]
    vec: int
    whole: bool  # the part is all of the array


def _levels(whole: tuple[int, ...], *arrays: Any) -> _Levels:
    """Those of a part that `arrays` are."""
    part, vec = arrays[0].shape, unit(*arrays)
    digits: list[tuple[int, int]] = []
    begins = []
    for size, full, stride in reversed([*zip(part, whole, _strides(whole), strict=True)]):
        if digits and digits[-1][0] * digits[-1][1] == stride:
            digits[-1] = (digits[-1][0] * size, digits[-1][1])
        elif size > 1 or not digits:
            digits.append((size, stride))
        if size != full:
            begins.append(size * stride)
    if begins:
        vec = math.gcd(vec, digits[0][0], *(stride for _, stride in digits[1:]), *begins)
    return _Levels(tuple(digits), vec, part == whole)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _drop_in_kernel(lanes: Lanes, levels: _Levels, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """m · v and 1 / (1 − p), (LANES · vec,)."""
    product = functools.partial(multiply_wide)
    join = functools.partial(join_lanes)
    key, (threshold, scale, *_) = lanes.seeds[:2]
    units = _units_in_whole(lanes, levels, product)
    group = _shift_right(units, (_GROUP // lanes.vec).bit_length() - 1)
    bits = _of_unit(_random_words(*group, key, product), units[0], lanes.vec)
    keep = join(bits) >= join([threshold] * lanes.vec)
    scales = join([lax.bitcast_convert_type(scale, jnp.float32)] * lanes.vec)
    return jnp.where(keep, v, 0.0), scales


def _of_unit(words: list[Any], unit: Any, vec: int) -> list[Any]:
    """The 16 bits of each of a unit's elements, of the words of the group that it lies in."""
    half = 4
    while half >= vec:
        upper = unit & jnp.uint32(half // vec) != 0
        if half == 1:
            return [jnp.where(upper, words[0] >> 16, words[0] & jnp.uint32(0xFFFF))]
        a, b = words[: half // 2], words[half // 2 :]
        words = [jnp.where(upper, y, x) for x, y in zip(a, b, strict=True)]
        half //= 2
    return _halves(words)


def _units_in_whole(lanes: Lanes, levels: _Levels, product: _Wide) -> _Pair:
    """The lanes' units, counted in the whole array."""
    if levels.whole:
        return lanes.units, lanes.units & jnp.uint32(0)
    (low, high, *_), rest = lanes.seeds[2], lanes.units
    total = low, high
    for i, (size, stride) in enumerate(levels.digits):
        size, stride = (size // lanes.vec, 1) if i == 0 else (size, stride // lanes.vec)
        digit = rest if i + 1 == len(levels.digits) else lax.rem(rest, jnp.uint32(size))
        rest = lax.div(rest, jnp.uint32(size))
        total = _add(total, _multiply(digit, stride, product))
    return total


# The generator


def wide_product(a: jax.Array, b: int | jax.Array) -> _Pair:
    """The high and low words of a product, of 16-bit halves: Shardy does not know ``lax.mulhi``."""
    low, high = a & jnp.uint32(0xFFFF), a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    cross = high * b_low + (low * b_low >> 16)
    other = low * b_high + (cross & jnp.uint32(0xFFFF))
    return high * b_high + (cross >> 16) + (other >> 16), a * jnp.uint32(b)


def _multiply(a: jax.Array, b: int, product: _Wide = wide_product) -> _Pair:
    high, low = product(a, b % 2**32)
    return low, high + a * jnp.uint32(b >> 32)


def _times(a: _Pair, size: Any) -> _Pair:
    """`a` times the size of an axis, which may be symbolic."""
    factor = jnp.uint32(size) if isinstance(size, int) else jnp.asarray(size).astype(jnp.uint32)
    high, low = wide_product(a[0], factor)
    return low, high + a[1] * factor


def _add(a: _Pair, b: _Pair) -> _Pair:
    low = a[0] + b[0]
    return low, a[1] + b[1] + jnp.where(low < b[0], jnp.uint32(1), jnp.uint32(0))


def _shift_right(a: _Pair, bits: int) -> _Pair:
    if not bits:
        return a
    return (a[0] >> bits) | (a[1] << (32 - bits)), a[1] >> bits


def philox(
    counter: Sequence[Any],
    key: Sequence[Any],
    product: _Wide = wide_product,
    *,
    rounds: int = 10,
) -> list[Any]:
    """Philox-4x32 of Salmon et al.: four words of 32 random bits, from four and a key of two."""
    a, b, c, d = counter
    k, l = key
    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = product(a, 0xD2511F53), product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ l, low_a
        k, l = k + jnp.uint32(0x9E3779B9), l + jnp.uint32(0xBB67AE85)
    return [a, b, c, d]


def _random_words(
    low: Any, high: Any, key: Sequence[Any], product: _Wide = wide_product
) -> list[Any]:
    """The random bits of group number (low, high), of two elements in each word."""
    return philox((low, high, *key[2:]), key[:2], product)


def _halves(words: Sequence[Any]) -> list[Any]:
    """The 16 bits of each element."""
    return [half for w in words for half in (w & jnp.uint32(0xFFFF), w >> 16)]


# Reference


def dropout_reference(
    x: jax.Array,
    rate: Any,
    key: jax.Array,
    *,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """:func:`dropout` and :func:`dropout_add` in plain JAX, computed in fp32 and rounded once."""
    curve_name = check_activation(activation)
    return _dropped(x, residual, rate, key, _Options("dropout", curve_name, "xla"))


def _drop(options: _Options, key: Any, rate: Any, positions: Any, v: jax.Array) -> jax.Array:
    scale = _scale(rate[0], v.dtype)
    return jnp.where(_random(options, key, positions) >= rate[0], v * scale, 0.0)


def _random(options: _Options, key: Any, positions: Sequence[Any]) -> jax.Array:
    """16 random bits for each element of the part of an array that is at `positions`."""
    whole, part = options.shape, tuple(p.size for p in positions)
    grouped = whole[-1] % _GROUP == part[-1] % _GROUP == 0
    *others, last = positions
    places = [*others, last[::_GROUP] if grouped else last]
    index: _Pair = (jnp.uint32(0), jnp.uint32(0))
    for d, (place, size) in enumerate(zip(places, whole, strict=True)):
        axes = [e for e in range(len(whole)) if e != d]
        here = jnp.expand_dims(place, axes), jnp.uint32(0)
        index = _add(_times(index, size), here)
    group = _shift_right(index, _GROUP.bit_length() - 1)
    bits = _halves(_random_words(*group, [*key, *[jnp.uint32(0)] * (4 - key.size)]))
    if grouped:
        return jnp.stack(bits, axis=-1).reshape(part)
    which = index[0] & (_GROUP - 1)
    return functools.reduce(lambda a, k: jnp.where(which == k, bits[k], a), range(1, 8), bits[0])


def _reference_fwd(options, x, residual, key, rate, *positions):
    f32 = wide(*(a for a in (x, residual) if a is not None))
    v = x.astype(f32)
    out = _drop(options, key, rate, positions, curve(options.curve, v) if options.curve else v)
    if residual is None:
        return (out.astype(x.dtype),)
    return ((residual.astype(f32) + out).astype(residual.dtype),)


def _reference_bwd(options, x, dout, key, rate, *positions):
    f32 = wide(dout if x is None else x, dout)
    dropped = _drop(options, key, rate, positions, dout.astype(f32))
    if x is not None:
        dropped = CURVES[options.curve](x.astype(f32), PLAIN)[1](dropped)
    return (dropped.astype(options.dtype),)


def _factors_in(options: _Options) -> tuple[str, ...]:
    """Two arrays, the words of key and rate, and an index for each axis."""
    return "...", "...", "y", "z", *(f".{i}" for i in range(len(options.shape)))


FORWARD = KernelPass(
    "{op}_fwd",
    kernel=_launch_fwd,
    kernel_of_slices=functools.partial(_launch_fwd, sliced=True),
    reference=_reference_fwd,
    ins=_factors_in,
    outs=("...",),
    whole="y z",
)
BACKWARD = KernelPass(
    "{op}_bwd",
    kernel=_launch_bwd,
    kernel_of_slices=functools.partial(_launch_bwd, sliced=True),
    reference=_reference_bwd,
    ins=_factors_in,
    outs=("...",),
    whole="y z",
)
