"""Checks of a public function's arguments: errors name the argument, the value and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_floating(name: str, x: Any) -> jax.Array:
    """`x` as an array of a real floating dtype of at least 16 bits."""
    try:
        array = jnp.asarray(x)
    except TypeError as e:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}") from e
    if array.dtype not in _FLOATS:
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


def check_number(name: str, x: Any, *, minimum: float | None = None) -> float:
    """`x` as a Python float: it is compiled into the kernel."""
    try:
        number = float(x)
    except jax.errors.ConcretizationTypeError as e:
        raise TypeError(
            f"{name} must be a Python number, as it is compiled into the kernel; got {x}. Mark it "
            "static (jax.jit(..., static_argnames=...)) or close over it"
        ) from e
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be a Python number, got {x!r}") from e
    if minimum is not None and not number >= minimum:
        raise ValueError(f"{name} must be at least {minimum:g}, got {x!r}")
    return number


def check_sequence_axis(axis: Any) -> tuple[str, ...]:
    """The names in `axis` of mesh axes that more than one device shares; none for ``None``."""
    names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                "sequence_axis must name an axis of the mesh of a jax.shard_map around the call; "
                f"{name!r} is none. Under jax.jit alone leave it out: there L is split as the "
                "arrays are"
            ) from None
    return tuple(name for name in names if lax.axis_size(name) > 1)


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
