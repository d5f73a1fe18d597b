"""Shared code of the layers for the three libraries.

A layer that the library has, too, leaves to it the calls that the ops cannot compute; a block is a
layer on functions of arrays, which are the same for every library.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, overload

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern.core.arguments import (
    check_axis_names,
    check_dtype,
    check_flag,
    check_integer,
    check_number,
)
from jaxkern.core.bound import wide
from jaxkern.core.dispatch import Implementation, resolve
from jaxkern.nn.collectives import enter, leave, whole_beside
from jaxkern.ops.linear.op import Products
from jaxkern.ops.norm.op import Settings, norm_then

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


def left_to_parent(layer: Any, reason: str | None) -> bool:
    """Whether the class that `layer` stands in for computes a call that the ops cannot, and why.

    Raises:
      ValueError: the layer's `implementation` is none.
      NotImplementedError: the layer was made for the kernels alone.
    """
    if reason is None:
        return False
    resolve(layer.implementation, reason, op=type(layer).__name__)
    return True


def dtype_reason(*dtypes: Any) -> str | None:
    """Why the ops cannot compute in all of `dtypes`, except those that are ``None``."""
    for dtype in [jax.dtypes.canonicalize_dtype(d) for d in dtypes if d is not None]:
        if dtype not in _DTYPES:
            return f"it computes with {dtype}, the kernels with bfloat16, float16 and float32"
    return None


def norm_reason(layer: Any, ndim: int, mask: Any) -> str | None:
    """Why the ops cannot compute this call of a norm of flax, whatever its dtypes."""
    if ndim == 0:
        return "x is a scalar, which has no axis to normalise"
    for name in ("reduction_axes", "feature_axes"):
        axes = getattr(layer, name)
        axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
        if {axis + ndim if axis < 0 else axis for axis in axes} != {ndim - 1}:
            return f"{name} is {getattr(layer, name)}, and the kernels normalise the last axis"
    if mask is not None:
        return "the kernels take no mask"
    if layer.axis_name is not None:
        return "axis_name asks for statistics over devices"
    return None


def normalised(
    layer: Any, op: Callable[..., jax.Array], x: Any, params: Sequence[Any], dtype: Any
) -> jax.Array:
    """A norm of flax by `op`: statistics of `x` as it is given, the result rounded to `dtype`."""
    x = jnp.asarray(x)
    x = x if x.dtype in _DTYPES else x.astype(jnp.float32)
    return op(x, *params, eps=layer.epsilon, dtype=dtype, implementation=layer.implementation)


def dropout_reason(layer: Any, dtype: Any) -> str | None:
    """Why the op cannot compute this dropout of flax."""
    if layer.broadcast_dims:
        return "the kernels draw a mask of their own for every element, without broadcast_dims"
    return dtype_reason(dtype)


def implementation_of_products(implementation: Implementation | None) -> Literal["xla"] | None:
    """The implementation of the products of a block made for `implementation`.

    The kernels of ``"mosaic"`` multiply no float32, so that only plain JAX is handed on.
    """
    return "xla" if implementation == "xla" else None


class Block(NamedTuple):
    """A kind of block, as functions of arrays: its layer in each library only holds the arrays.

    A module such as :mod:`jaxkern.nn.mamba` describes one. Its `Weights` are a named tuple of
    arrays, ``None`` for those that a block has not; its cache is a named tuple of arrays.
    """

    name: str
    sizes: Callable[..., Any]  # (d_model, **options) -> the dimensions, a frozen dataclass
    weights: Any  # the class of the weights
    initializers: Callable[..., "dict[str, Initial]"]  # (sizes, n_layers), by the weights' names
    init_cache: Callable[..., Any]  # (sizes, batch_size, dtype) -> the cache before the first token
    apply: Callable[..., Any]  # (weights, sizes, x, cache, **options) -> (B, L, D), or with a cache
    step: Callable[..., Any]  # (weights, sizes, x, cache, **options) -> (B, D) and the next cache
    chunk: int  # tokens that are a part's least, where its sequence is split between devices

    def weights_from(self, params: Mapping[str, Any]) -> Any:
        """The weights of a block from its parameters by name."""
        return self.weights(**{name: params.get(name) for name in self.weights._fields})

    def check_call(
        self,
        sizes: Any,
        x: Any,
        cache: Any,
        segment_ids: Any,
        forms: tuple[str, ...],
        layer: Any = None,
    ) -> jax.Array:
        """Returns the input of a block as an array if it has one of the shapes `forms`.

        Args:
          sizes: the block's dimensions.
          x: the input.
          cache: what earlier tokens left; ``None`` for none, but not where `x` is tokens.
          segment_ids: ``None``, or of the shape of `x` without its last axis.
          forms: the names of the axes of `x`; the last of them is ``"B L D"`` for sequences, or
            ``"B D"`` for tokens.
          layer: which of the layers of `cache` is meant; ``None`` where it is of one.

        Raises:
          TypeError: `x` is complex, or `cache` not a cache.
          ValueError: a shape does not fit.
        """
        x, tokens = jnp.asarray(x), forms[-1] == "B D"
        if jnp.iscomplexobj(x):
            raise TypeError(f"x must have a real dtype, got {x.dtype}; take x.real or jnp.abs(x)")
        if x.ndim not in [len(form.split()) for form in forms] or x.shape[-1] != sizes.d_model:
            expected = " or ".join(f"({form.replace(' ', ', ')})" for form in forms)
            remedy = (
                "Sequences go into the block itself, their tokens into step as x[:, t]"
                if tokens
                else "One sequence goes in as x[None], one token of each sequence into step"
            )
            raise ValueError(
                f"x must have shape {expected} with D = {sizes.d_model}, the d_model of the block; "
                f"got {x.shape}. {remedy}"
            )
        if segment_ids is not None and jnp.shape(segment_ids) != x.shape[:-1]:
            raise ValueError(
                f"segment_ids must have shape {x.shape[:-1]}, that of x without its last axis; "
                f"got {jnp.shape(segment_ids)}"
            )
        if cache is not None or tokens:
            batch = x.shape[:-1] if tokens else x.shape[:-2]
            self._check_cache(sizes, cache, batch, 0 if layer is None else 1)
        return x

    def _check_cache(self, sizes: Any, cache: Any, batch: tuple[int, ...], layers: int) -> None:
        first = jax.eval_shape(lambda: self.init_cache(sizes, 1, jnp.float32))
        kind = type(first)
        if not isinstance(cache, kind):
            got = f"{type(cache).__module__}.{type(cache).__name__}".removeprefix("builtins.")
            raise TypeError(
                f"cache must be a {kind.__module__}.{kind.__name__}, which init_cache and "
                f"return_cache=True give; got {got}"
            )
        for name, leaf in first._asdict().items():
            shape, got = (*batch, *leaf.shape[1:]), jnp.shape(getattr(cache, name))
            if got[layers:] != shape or len(got) != len(shape) + layers:
                behind = " behind an axis of layers" if layers else ""
                raise ValueError(
                    f"cache.{name} must have shape {shape}{behind} for this block and x; got "
                    f"{got}. A cache is of as many sequences as x: init_cache makes one"
                )


class SizeOptions(TypedDict, total=False):
    """The options of the blocks' dimensions; each kind of block takes those of its `sizes`."""

    d_state: int
    d_conv: int
    expand: int
    dt_rank: int | None
    headdim: int
    ngroups: int
    norm_groups: int | None
    norm_eps: float
    dt_limit: tuple[float, float]
    num_heads: int | None
    num_key_heads: int | None
    d_key: int
    d_value: int
    gate_rank: int | None
    use_bias: bool
    use_conv_bias: bool


def takes_sizes[F: Callable[..., None]](init: F, block: Block) -> F:
    """The ``__init__`` of a layer of `block`: `init`, its ``**sizes`` the options of the block's.

    They are named in its signature, and in errors the layer is.
    """
    own, of_sizes = (inspect.signature(f).parameters.values() for f in (init, block.sizes))
    first, _, *others, _ = own  # without d_model, which is one of the sizes, and **sizes
    signature = inspect.Signature([first, *of_sizes, *others])

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        try:
            signature.bind_partial(self, *args, **options)  # what is wrong before what is missing
            signature.bind(self, *args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
        init(self, *args, **options)

    found: Any = checked
    found.__signature__ = signature
    return found


class BlockCalls:
    """The calls of a layer of a kind of block, `_block`, which has `_weights` and `_sizes`."""

    _block: ClassVar[Block]

    @overload
    def __call__(
        self: Any, x: jax.Array, cache: Any = None, *, return_cache: Literal[True], **options: Any
    ) -> tuple[jax.Array, Any]: ...

    @overload
    def __call__(self: Any, x: jax.Array, cache: Any = None, **options: Any) -> jax.Array: ...

    def __call__(self: Any, x: jax.Array, cache: Any = None, **options: Any) -> Any:
        """x (B, L, D) -> the same shape; with `return_cache`, also the cache for what follows.

        The options are `return_cache` and `segment_ids`: packed sequences end where `segment_ids`
        (B, L), integers, change, and a NaN surely stays in its sequence with `isolate_nan`;
        `axis_name` and `sequence_axis`, of what ``jax.shard_map`` splits; `norm`, for the block to
        compute the norm before it; and of Mamba `checkpoint_every`. See
        :func:`jaxkern.nn.mamba.mamba`, :func:`jaxkern.nn.mamba2.mamba2` and
        :func:`jaxkern.nn.delta_net.delta_net`.
        """
        options |= {"dtype": self.dtype, "implementation": self.implementation}
        return self._block.apply(self._weights(), self._sizes(), x, cache, **options)

    def step(self: Any, x: jax.Array, cache: Any, *, layer: Any = None) -> tuple[jax.Array, Any]:
        """One token: x (B, D) -> the same shape, and the next cache.

        Of a `cache` with an axis of layers in front, `layer` says which is this block's.
        """
        how: Any = {"dtype": self.dtype, "implementation": self.implementation, "layer": layer}
        return self._block.step(self._weights(), self._sizes(), x, cache, **how)

    def init_cache(self: Any, batch_size: int) -> Any:
        """The cache before the first token."""
        dtype = jnp.float32 if self.dtype is None else self.dtype
        return self._block.init_cache(self._sizes(), batch_size, dtype)


# What the kinds of block share


def check_sizes(sizes: Any) -> None:
    """Checks the numbers and booleans of a block's dimensions, by the types of their fields.

    Raises:
      TypeError: a value is of another type.
      ValueError: a whole number is less than 1, or another number not above 0 and finite.
    """
    for field in dataclasses.fields(sizes):
        name, kind, value = field.name, field.type, getattr(sizes, field.name)
        if kind is bool:
            check_flag(name, value)
        elif kind is float:
            check_number(name, value, above=0)
        elif kind is int or (kind == int | None and value is not None):
            check_integer(name, value, minimum=1, optional=kind is not int)


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Checks that a dimension divides another one; ValueError names a divisor."""
    if whole % value:
        divisor = next(d for d in range(min(value, whole), 0, -1) if whole % d == 0)
        raise ValueError(
            f"{name} must divide {whole_name} = {whole}, got {value}; {divisor} divides it"
        )


def check_options(axis_name: Any, **flags: Any) -> None:
    """Checks a block's options: the name of an axis, and booleans by name.

    Raises:
      TypeError: a value is of another type.
      ValueError: there is no such axis.
    """
    check_axis_names("axis_name", axis_name)
    for name, flag in flags.items():
        check_flag(name, flag)


Initializer = Callable[[Any, tuple[int, ...], Any], jax.Array]
"""A function (key, shape, dtype) -> initial values."""

Initial = tuple[Initializer, tuple[int, ...]]
"""The initial values of a parameter, and its shape."""


def uniform(bound: float) -> Initializer:
    """Draws from the numbers between -`bound` and `bound`."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


def dt_bias(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws dt_bias so that softplus(dt_bias) is log-uniform in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)


def a_log(low: float) -> Initializer:
    """Draws A_log so that exp(A_log) is uniform in [low, 16]."""
    draw = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low, 16)
    return lambda key, shape, dtype: jnp.log(draw(key, shape)).astype(dtype)


def cast(x: jax.Array, weights: Any, dtype: Any) -> jax.Array:
    """The input of a block in the dtype of its products."""
    if dtype is None:
        return x.astype(jnp.result_type(x, weights.in_proj))
    return x.astype(check_dtype("dtype", dtype))


def projection(implementation: Implementation | None) -> Callable[..., jax.Array]:
    """The product with a matrix, of a block made for `implementation`."""
    of_products = implementation_of_products(implementation)
    return lambda *args: jaxkern.linear(*args, implementation=of_products)


class Norm(NamedTuple):
    """The norm before a block, as the block computes it: its result is not kept for the backward.

    Attributes:
      weight: (D,), of :func:`jaxkern.rms_norm`.
      residual: (B, L, D), the residual stream, to which the block's input is added first; ``None``
        for none.
      eps: as for :func:`jaxkern.rms_norm`.
    """

    weight: jax.Array
    residual: jax.Array | None = None
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class _Projections:
    """Products of a block after a norm, as :func:`jaxkern.ops.norm.op.norm_then` takes them.

    Attributes:
      products: without what follows.
      axis_name: the mesh axis over which the matrices' columns are split.
      of_heads: whether the norm is of heads (..., H, V), and the products of their H · V elements.
    """

    products: Products
    axis_name: str | None = None
    of_heads: bool = False

    def __call__(self, x: jax.Array, weights: Any, biases: Any) -> tuple[jax.Array, ...]:
        x = x.reshape(*x.shape[:-2], len(weights[0])) if self.of_heads else x
        return self.products(enter(x, self.axis_name), weights, biases)


def project_in(
    weights: Any,
    x: jax.Array,
    at: Any,
    norm: Norm | None,
    axis_name: str | None,
    implementation: Implementation | None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The products of `x` with the columns of `in_proj` from each of `at` on.

    Of one product the parts would be copied apart, and their gradients together. With `norm` x is
    added to the residual stream and normalised first, and the sum is returned, too.
    """
    columns = tuple(jnp.split(weights.in_proj, at, axis=-1))
    bias = weights.in_bias
    biases = (None,) * len(columns) if bias is None else tuple(jnp.split(bias, at))
    products = Products.of(x, columns, implementation_of_products(implementation))
    then = _Projections(products, axis_name)
    if norm is None:
        return then(x, columns, biases), None
    if not isinstance(norm, Norm):
        kind = type(norm).__name__
        raise TypeError(f"norm must be a jaxkern.nn.common.Norm or None, got one of type {kind}")
    arrays = x, whole_beside(norm.weight, x), None, norm.residual, None
    of_norm = "rms_norm", arrays, Settings(norm.eps), implementation
    outs, h = norm_then("rms_norm_linear", *of_norm, then, (columns, biases))
    return outs, h


def project_out(
    weights: Any,
    arrays: Any,
    settings: Settings,
    axis_name: str | None,
    implementation: Implementation | None,
    of_heads: bool = False,
) -> jax.Array:
    """The output projection of a block after an RMS norm of `arrays` and `settings`.

    It is the sum over devices where `axis_name` splits its input.
    """
    bias, matrices = weights.out_bias if axis_name is None else None, (weights.out_proj,)
    products = Products.of(arrays[0], matrices, implementation_of_products(implementation))
    then = _Projections(products, of_heads=of_heads)
    of_norm = "rms_norm", arrays, settings, implementation
    (out,), _ = norm_then("rms_norm_linear", *of_norm, then, (matrices, (bias,)))
    return out if axis_name is None else projected_out(out, weights, axis_name)


def projected_out(out: jax.Array, weights: Any, axis_name: str | None) -> jax.Array:
    """The product with `out_proj`, the sum over devices and the bias added."""
    out = out if axis_name is None else leave(out, axis_name)
    return out if weights.out_bias is None else out + weights.out_bias.astype(out.dtype)


def results(out: jax.Array, h: jax.Array | None, after: Any, before: Any) -> Any:
    """Joins what a block returns: `out`, the stream `h` of a norm before it, and its cache.

    The cache `after` is in the dtypes of `before`, if that was given, so that a loop can carry it.
    """
    found = out if h is None else (out, h)
    if after is None:
        return found
    if before is not None:
        after = jax.tree.map(lambda a, b: a.astype(b.dtype), after, before)
    return found, after


def conv_filter(weights: Any, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """The convolution's weight (channels, W) and bias (channels,), in `dtype`."""
    bias = weights.conv_bias
    return weights.conv_weight.astype(dtype), None if bias is None else bias.astype(dtype)


def convolved(
    weights: Any, cache: Any, arrays: Sequence[jax.Array], at: list[int], options: dict[str, Any]
) -> tuple[list[Any], Any]:
    """The convolutions of `arrays`, channels from each of `at` on, and the cache's `conv` after."""
    split = lambda a, axis: (
        [None] * len(arrays) if a is None else jnp.split(a, at, axis=axis) if at else [a]
    )
    weight, bias = conv_filter(weights, arrays[0].dtype)
    lasts = split(None if cache is None else cache.conv, -1)
    found: Any = [
        jaxkern.causal_conv1d(*of_array, activation="silu", initial_state=last, **options)
        for *of_array, last in zip(arrays, split(weight, 0), split(bias, 0), lasts, strict=True)
    ]
    if not options["return_final_state"]:
        return found, None
    found, lasts = zip(*found, strict=True)
    return found, jnp.concatenate(lasts, axis=-1)


def convolved_step(
    weights: Any, cache: Any, u: Any, layer: Any, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """The convolution of a token's channels, the columns `u`, and the cache's `conv` after it."""
    return jaxkern.causal_conv1d_step(
        cache.conv,
        u,
        *conv_filter(weights, u.dtype),
        activation="silu",
        layer=layer,
        implementation=implementation_of_products(implementation),
    )


def prepared(weights: Any, dtype: Any) -> Any:
    """The weights with what each step would compute of them alone."""
    weight, bias = conv_filter(weights, dtype)
    rates = {"A": decay_rates(weights)} if hasattr(weights, "A") else {}
    return weights._replace(conv_weight=weight, conv_bias=bias, **rates)


def decay_rates(weights: Any) -> jax.Array:
    """A of the scan, in float32 at least: exp would lose digits in a narrow dtype."""
    if getattr(weights, "A", None) is not None:
        return weights.A
    return -jnp.exp(weights.A_log.astype(wide(weights.A_log.dtype)))
