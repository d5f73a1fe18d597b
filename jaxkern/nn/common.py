"""What the layers of the three libraries share.

A layer that the library has, too, leaves to it the calls that the ops cannot compute; a block is a
layer on functions of arrays, which are the same for every library.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.dispatch import Implementation, resolve

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
    """Why the ops cannot compute in all of `dtypes`, those that are ``None`` left out."""
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


Initializer = Callable[[Any, tuple[int, ...], Any], jax.Array]
"""A function (key, shape, dtype) -> initial values."""


class Block(NamedTuple):
    """A kind of block, as functions of arrays: its layer in each library only holds the arrays.

    A module such as :mod:`jaxkern.nn.mamba` describes one. Its `Weights` are a named tuple of
    arrays, ``None`` for those that a block has not; its cache is a tree of arrays.
    """

    name: str
    sizes: Callable[..., Any]  # (d_model, **options) -> the dimensions, a frozen dataclass
    weights: Any  # the class of the weights
    initializers: Callable[..., dict[str, tuple[Initializer, tuple[int, ...]]]]  # (sizes, n_layers)
    init_cache: Callable[..., Any]  # (sizes, batch_size, dtype) -> the cache before the first token
    check_call: Callable[..., jax.Array]  # (weights, x, cache, segment_ids, forms) -> x
    apply: Callable[..., Any]  # (weights, x, cache, **options) -> (B, L, D), or that and a cache
    step: Callable[..., Any]  # (weights, x, cache, **options) -> (B, D) and the next cache

    def weights_from(self, params: Mapping[str, Any]) -> Any:
        """The weights of a block from its parameters by name."""
        return self.weights(**{name: params.get(name) for name in self.weights._fields})


def check_call(
    x: Any, d_model: int, cache: Any, shapes: Any, segment_ids: Any, forms: tuple[str, ...]
) -> jax.Array:
    """Returns the input of a block as an array if it has one of the shapes `forms`.

    Args:
      x: the input.
      d_model: D, its last axis.
      cache: what earlier tokens left; ``None`` for none, but not where `x` is tokens.
      shapes: a cache that holds shapes without the batch axes in place of arrays.
      segment_ids: ``None``, or of the shape of `x` without its last axis.
      forms: the names of the axes of `x`; the last of them is ``"B L D"`` for sequences, or
        ``"B D"`` for tokens.

    Raises:
      TypeError: `x` is complex, or `cache` not a cache.
      ValueError: a shape does not fit.
    """
    x, tokens = jnp.asarray(x), forms[-1] == "B D"
    if jnp.iscomplexobj(x):
        raise TypeError(f"x must have a real dtype, got {x.dtype}; take x.real or jnp.abs(x)")
    if x.ndim not in [len(form.split()) for form in forms] or x.shape[-1] != d_model:
        expected = " or ".join(f"({form.replace(' ', ', ')})" for form in forms)
        remedy = (
            "Sequences go into the block itself, their tokens into step as x[:, t]"
            if tokens
            else "One sequence goes in as x[None], one token of each sequence into step"
        )
        raise ValueError(
            f"x must have shape {expected} with D = {d_model}, the d_model of the block; got "
            f"{x.shape}. {remedy}"
        )
    if segment_ids is not None and jnp.shape(segment_ids) != x.shape[:-1]:
        raise ValueError(
            f"segment_ids must have shape {x.shape[:-1]}, that of x without its last axis; "
            f"got {jnp.shape(segment_ids)}"
        )
    if cache is not None or tokens:
        _check_cache(cache, shapes, x.shape[:-1] if tokens else x.shape[:-2])
    return x


def _check_cache(cache: Any, shapes: Any, batch: tuple[int, ...]) -> None:
    kind = type(shapes)
    if not isinstance(cache, kind):
        raise TypeError(
            f"cache must be a {kind.__module__}.{kind.__name__}, which init_cache and "
            f"return_cache=True give; got {type(cache).__name__}"
        )
    for name, shape in shapes._asdict().items():
        if (got := jnp.shape(getattr(cache, name))) != (*batch, *shape):
            raise ValueError(
                f"cache.{name} must have shape {(*batch, *shape)} for this block and x; got {got}. "
                "A cache is of as many sequences as x: init_cache makes one"
            )
