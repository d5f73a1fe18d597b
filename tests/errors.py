"""Errors against float64, and the rule that they are at most twice those of plain JAX."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxkern.core.dispatch import interpret_kernels

ON_GPU = jax.default_backend() == "gpu"
Arrays = tuple[Any, ...]

BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
)
WHOLE = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.compiled), "xla"]
)
"""What takes the interpreter too long."""


def sizes(*both, gpu=(), interpreted=()):
    """Cases (size, implementation): `both` for plain JAX and for kernels on a GPU, `gpu` for the
    kernels on a GPU alone, `interpreted` for the kernels anywhere."""
    marks = [(*both, *gpu), [pytest.mark.compiled]], [interpreted, [pytest.mark.gpu]]
    name = lambda size: "x".join(map(str, size))
    cases = [pytest.param(size, "xla", id=f"{name(size)}-xla") for size in both] + [
        pytest.param(size, "mosaic", marks=mark, id=f"{name(size)}-mosaic")
        for group, mark in marks
        for size in group
    ]
    return pytest.mark.parametrize(("size", "implementation"), cases)


def interpreted(implementation):
    return implementation == "mosaic" and not ON_GPU


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


def in_float64(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``f(*args)`` of float64 arrays: NumPy's, or where they are large and a GPU is there, JAX's.

    What a host computes in half a minute of float64, while the other processes of the tests wait
    for it, takes a GPU milliseconds.
    """
    f = functools.partial(f, **options)
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


@functools.lru_cache(64)
def program(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``run(arrays, cotangents, **more) -> (results, gradients)``, for all who ask for the same.

    It rounds wherever the code does; left free, XLA would keep intermediate results of 16 bits in
    fp32. One is compiled in a fraction of the time of the many that eager JAX runs.
    """

    def run(arrays: Arrays, cotangents: Any, **more: Any) -> Any:
        out, vjp = jax.vjp(functools.partial(f, **options, **more), *arrays)
        return out, vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, out))

    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def value_and_grads(f: Callable[..., Any], arrays: Arrays, cotangents: Any, **options: Any) -> Any:
    """``f(*arrays, **options)`` and its gradients, by one :func:`program`."""
    traced = {name: v for name, v in options.items() if isinstance(v, jax.Array)}
    static = {name: v for name, v in options.items() if name not in traced}
    return program(f, **static)(arrays, cotangents, **traced)


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


def running(implementation: str | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are interpreted where no GPU can run them."""
    interpreted = implementation == "mosaic" and not ON_GPU
    return interpret_kernels() if interpreted else contextlib.nullcontext()


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Every leaf within `tolerance` of `want`, relative in norm: fp32 sums in another order."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        error = relative_error(g, w)
        assert error <= tolerance, f"leaf {i}: relative error {error:.2e}"


def assert_same_bits(run, times=20):
    """All runs give the same, to the bit."""
    first = jax.tree.leaves(run())
    same = jax.jit(lambda a, b: [jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)])
    assert all(all(same(first, jax.tree.leaves(run()))) for _ in range(times))


def check_accuracy(
    call, plain, oracle, arrays, implementation, *, own=None, dtypes=None, rounding=None, **options
):
    """Results and gradients of `call` are at most twice as far from the truth as plain JAX's.

    Args:
      call: the op, a function of `arrays`, the implementation, the options and its `own`.
      plain: the plain expression that a user would write, computed in the dtypes of `arrays`.
      oracle: ``oracle(*arrays, *cotangents, **options) -> (results, grads)`` in float64 NumPy. A
        third item has by index, among results and gradients, the norm of the terms that one is
        summed from, where they may cancel: an error below 4 fp32 roundings of that is no error.
      arrays: the arguments.
      implementation: of `call`.
      own: options that `call` alone has.
      dtypes: of the results; by default that of the first array.
      rounding: if given, an error is at most one rounding of the result and this, relative. In
        bf16 plain JAX may be far off, so that twice its error lets much pass; this sees a state
        or a sum that is not fp32.
    """
    own = dict(own or {}, implementation=implementation)
    with running(implementation):
        like = jax.eval_shape(functools.partial(call, **own, **options), *arrays)
        rng = np.random.default_rng(17)
        draw = lambda o: jnp.asarray(rng.standard_normal(o.shape), jnp.float32).astype(o.dtype)
        cotangents = jax.tree.map(draw, like)
        got = value_and_grads(call, arrays, cotangents, **own, **options)
    by_plain = value_and_grads(plain, arrays, cotangents, **options)
    wide = [np.asarray(a).astype(np.float64) for a in (*arrays, *jax.tree.leaves(cotangents))]
    *want, terms = (*oracle(*wide, **options), {})[:3]
    results = jax.tree.leaves(got[0])
    found = [str(v.dtype) for v in results]
    assert found == list(dtypes or [str(arrays[0].dtype)] * len(found))
    rows = zip(*map(jax.tree.leaves, (got, by_plain, want)), strict=True)
    for i, (ours, other, truth) in enumerate(rows):
        name = f"result {i}" if i < len(results) else f"gradient {i - len(results)}"
        at_most_twice(name, ours, other, truth, terms.get(i))
        if rounding is not None:
            error = relative_error(ours, truth)
            assert error <= float(jnp.finfo(ours.dtype).eps) / 2 + rounding, f"{name}: {error:.1e}"
