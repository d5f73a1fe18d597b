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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import TypeOf, match_primal, match_sharding
from jaxkern.elementwise.launch import unsupported
from jaxkern.ops.curves import Activation, check_activation, recomputing
from jaxkern.ops.dropout.kernel import launch_backward, launch_forward
from jaxkern.ops.dropout.reference import (
    DropoutOptions,
    positions_of,
    reference_backward,
    reference_forward,
    scale_of,
)


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
    within = jnp.clip(_without_derivative(array.astype(jnp.float32)), 0.0, 1.0)
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _DropoutTypes:
    """The types of arguments that are not saved for the backward."""

    dtype: Any
    x: Any
    residual: Any


@Differentiable
def _dropout(x: Any, residual: Any, seeds: Any, options: DropoutOptions) -> jax.Array:
    return _dropout_fwd(x, residual, seeds, options)[0]


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


_dropout.defvjp(_dropout_fwd, _dropout_bwd)
_dropout_jit = jax.jit(_dropout, static_argnums=3)


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
