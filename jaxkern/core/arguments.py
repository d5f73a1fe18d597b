"""Checks of a public function's arguments: errors name the argument, the value and the remedy."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_COMPILED = (
    "as it is compiled in; got {}. Mark it static (jax.jit(..., static_argnames=...)) or close "
    "over it"
)


def as_array(name: str, x: Any) -> jax.Array:
    """`x` as an array, whatever its dtype."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as e:  # JAX has a ValueError for None
        raise TypeError(f"{name} must be an array, got {type(x).__name__}") from e


def check_floating(name: str, x: Any) -> jax.Array:
    """`x` as an array of a real floating dtype of at least 16 bits."""
    array = as_array(name, x)
    if array.dtype not in FLOATS:
        raise TypeError(
            f"{name} must have a floating dtype (bfloat16, float16, float32; float64 in plain "
            f"JAX), got {array.dtype}; convert it first, e.g. {name}.astype(jnp.float32)"
        )
    return array


def check_array(name: str, x: Any, shape: tuple[int, ...], meaning: str) -> jax.Array:
    """`x` as a floating array of `shape`, which `meaning` puts in words: ``"(D, N), D of x"``."""
    array = check_floating(name, x)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape} = {meaning}; got {array.shape}")
    return array


def check_optional(name: str, x: Any, shape: tuple[int, ...], meaning: str) -> jax.Array | None:
    """:func:`check_array`, or ``None`` for an array that is left out."""
    return None if x is None else check_array(name, x, shape, meaning)


def check_number(
    name: str,
    x: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    finite: bool = True,
    none: str = "",
) -> float:
    """`x` as a Python float: it is compiled into the kernel.

    Args:
      name: of the argument.
      x: what was given.
      minimum: the least number allowed.
      above: a number that it has to be larger than.
      maximum: the largest number allowed.
      finite: whether infinities are refused, too; NaN always is.
      none: what ``None`` is for, in the message, where the caller takes it: ``"no limit"``.
    """
    try:
        if isinstance(x, str | bytes | bool | np.bool_):
            raise TypeError("float would convert it")
        number = float(x)
    except jax.errors.ConcretizationTypeError as e:
        raise TypeError(f"{name} must be a Python number, {_COMPILED.format(x)}") from e
    except (TypeError, ValueError, OverflowError) as e:
        raise TypeError(f"{name} must be a Python number, got {x!r}") from e
    rule = None
    if above is not None and not number > above:
        rule = f"above {above:g}"
    elif minimum is not None and not number >= minimum:
        rule = f"at least {minimum:g}"
    elif maximum is not None and not number <= maximum:
        rule = f"at most {maximum:g}"
    elif math.isnan(number) or (finite and math.isinf(number)):
        rule = "finite" if finite else "a number"
    if rule:
        either, remedy = (" or None", f"; None is for {none}") if none else ("", "")
        raise ValueError(f"{name} must be {rule}{either}, got {x!r}{remedy}")
    return number


def check_integer(name: str, x: Any, *, minimum: int | None = None, optional: bool = False) -> int:
    """`x` as a Python int, which is compiled in; with `optional` the caller takes ``None``, too."""
    kind = "an int or None" if optional else "an int"
    if isinstance(x, Tracer):
        raise TypeError(f"{name} must be {kind}, {_COMPILED.format('a traced array')}")
    try:
        if isinstance(x, bool | np.bool_):
            raise TypeError("operator.index would convert it")
        number = operator.index(x)
    except TypeError as e:
        raise TypeError(f"{name} must be {kind}, got {x!r}") from e
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def check_flag(name: str, x: Any) -> bool:
    """`x` as a Python bool, which is compiled in."""
    if isinstance(x, Tracer):
        raise TypeError(f"{name} must be True or False, {_COMPILED.format('a traced array')}")
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {x!r}")
    return bool(x)


def check_dtype(name: str, x: Any) -> np.dtype:
    """`x` as a dtype; ``None`` and arrays, which NumPy takes for one, are none."""
    try:
        if not isinstance(x, str | type | np.dtype):
            raise TypeError("neither a dtype, nor the name or the class of one")
        return jnp.dtype(x)
    except TypeError as e:
        raise TypeError(f"{name} must be a dtype, got {x!r}; e.g. jnp.float32") from e


def floating_leaves(
    name: str, tree: Any, *, values: bool = True, kind: Any = jnp.floating
) -> tuple[list[Any], Any]:
    """The leaves of a tree as arrays, all floating of at least 16 bits, and its structure.

    Args:
      name: of the tree.
      tree: arrays and Python floats.
      values: whether a ``jax.ShapeDtypeStruct`` will not do.
      kind: of their dtypes.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for path, leaf in paths:
        if isinstance(leaf, float) and not isinstance(leaf, np.floating):
            leaf = jnp.asarray(leaf, float)
        dtype, struct = getattr(leaf, "dtype", None), isinstance(leaf, jax.ShapeDtypeStruct)
        is_a = lambda kind: dtype is not None and jnp.issubdtype(dtype, kind)  # noqa: B023
        if is_a(kind) and leaf.dtype.itemsize > 1 and not (struct and values):
            leaves.append(leaf if struct else jnp.asarray(leaf))
            continue
        if struct:
            remedy = "it needs values; call it under jax.eval_shape for shapes alone"
        elif is_a(jnp.complexfloating):
            remedy = "keep its parts apart, as optax.contrib.split_real_and_imaginary does"
        elif is_a(jnp.floating):
            remedy = "16 bits are the fewest: keep it in bfloat16, and cast it where it is used"
        else:
            remedy = "keep what is not trained out of the tree, or use optax.masked"
        got = type(leaf).__name__ if dtype is None or struct else dtype
        where = f"{name}{jax.tree_util.keystr(path)}"
        raise TypeError(f"{where} must be a floating array, got {got}; {remedy}")
    return leaves, treedef


def check_axis_names(name: str, axis: Any) -> tuple[str, ...]:
    """The names in `axis` of axes of the mesh of a ``jax.shard_map``; none for ``None``."""
    names = (axis,) if isinstance(axis, str) else () if axis is None else axis
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{name} must be a mesh axis's name or a tuple of names, got {axis!r}")
    for n in names:
        try:
            lax.axis_size(n)
        except NameError:
            raise ValueError(
                f"{name} must name an axis of the mesh of a jax.shard_map around the call; "
                f"{n!r} is none. Under jax.jit alone leave it out: what is split there, the arrays "
                "tell"
            ) from None
    return tuple(names)


def check_sequence_axis(axis: Any) -> tuple[str, ...]:
    """The names in `axis` of mesh axes that more than one device shares; none for ``None``."""
    return tuple(n for n in check_axis_names("sequence_axis", axis) if lax.axis_size(n) > 1)


def unfit(**arrays: Any) -> str | None:
    """Why no kernel takes such arrays, ``None`` for absent ones: by dtype, or by symbolic shape."""
    for name, array in arrays.items():
        if array is None:
            continue
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {array.dtype}, and the kernels take bfloat16, float16 and float32"
        if not all(isinstance(size, int) for size in array.shape):
            return f"{name} has the symbolic shape {array.shape}, and kernels are made for sizes"
    return None
