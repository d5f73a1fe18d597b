"""Errors against float64, and the rule that they are at most twice those of plain JAX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

ON_GPU = jax.default_backend() == "gpu"
Arrays = tuple[Any, ...]


def activated(activation, y):
    """f(y) and f'(y) in float64."""
    xp = jnp if isinstance(y, jax.Array) else np
    match activation:
        case None:
            return y, xp.ones_like(y)
        case "relu":
            return xp.maximum(y, 0), (y > 0).astype(float)
        case "relu_squared":
            return xp.maximum(y, 0) ** 2, 2 * xp.maximum(y, 0)
        case "silu":
            s = 1 / (1 + xp.exp(-y))
            return y * s, s + y * s * (1 - s)
        case "gelu" | "gelu_tanh":
            c = math.sqrt(2 / math.pi)
            t = xp.tanh(c * (y + 0.044715 * y**3))
            slope = (1 + t) / 2 + y / 2 * (1 - t**2) * c * (1 + 3 * 0.044715 * y**2)
            return y / 2 * (1 + t), slope
        case "gelu_erf":
            erf = (jax.scipy if xp is jnp else scipy).special.erf
            cdf = 0.5 * (1 + erf(y / math.sqrt(2)))
            return y * cdf, cdf + y * xp.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
        case "quick_gelu":
            s = 1 / (1 + xp.exp(-1.702 * y))
            return y * s, s + 1.702 * y * s * (1 - s)
        case "sigmoid":
            s = 1 / (1 + xp.exp(-y))
            return s, s * (1 - s)
        case "tanh":
            return xp.tanh(y), 1 / xp.cosh(y) ** 2
    raise KeyError(activation)


def in_float64(f: Callable[..., Any], *args: Any) -> Any:
    """``f(*args)`` of float64 arrays: NumPy's, or where they are large and a GPU is there, JAX's.

    What a host computes in half a minute of float64, while the other processes of the tests wait
    for it, takes a GPU milliseconds.
    """
    wide = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), args)
    if not ON_GPU or sum(a.size for a in jax.tree.leaves(wide)) < 1 << 20:
        return f(*wide)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.size == 0:
        return 0.0
    error = np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), floor, 1e-300)
    return float(error) if np.isfinite(error) else float("inf")


def value_and_grads(f: Callable[..., Any], arrays: Arrays, cotangents: Any) -> Any:
    """``f(*arrays)`` and its gradients, by one program that rounds wherever the code does.

    One is compiled in a fraction of the time of the many that eager JAX runs; left free, XLA would
    keep intermediate results of 16 bits in fp32.
    """

    def run(arrays: Arrays, cotangents: Any) -> Any:
        out, vjp = jax.vjp(f, *arrays)
        return out, vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, out))

    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})(arrays, cotangents)


def at_most_twice(name: str, got: Any, plain: Any, truth: Any, size: float | None = None) -> float:
    """Asserts that `got` is at most twice as far from the truth as plain JAX; returns its error.

    Args:
      name: what a failure calls the array.
      got: what the op computed.
      plain: what the plain expression gives, computed in the dtypes of the arguments.
      truth: the float64 oracle's result.
      size: the norm of the terms that the array is summed from, where they may cancel: an error
        below 4 fp32 roundings of that is no error. Default: the truth's own norm.
    """
    size = float(np.linalg.norm(truth)) if size is None else size
    ours, theirs = relative_error(got, truth, size), relative_error(plain, truth, size)
    assert np.isfinite(theirs), f"{name}: plain JAX is not finite and bounds nothing"
    assert ours <= 2 * theirs + 4 * 2.0**-24, f"{name}: error {ours:.2e}, plain JAX's {theirs:.2e}"
    return ours
