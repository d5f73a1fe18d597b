"""Device time of compiled programs, and the limits of the machine they ran on.

On an NVIDIA GPU a program's time is the sum of its kernels' durations, as CUPTI records them:
launch gaps are not in it. Every call takes another set of arguments, and all sets and results
together are several times the L2 cache, so what a call reads comes from memory. Elsewhere the time
is wall-clock time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FOOTPRINT = 512 << 20
"""Bytes that all arguments and results take together: over eight times an H200's L2 cache."""


class Timing(NamedTuple):
    """Milliseconds of one call, over many calls: the median, 10th and 90th percentiles."""

    median: float
    low: float
    high: float
    calls: int
    kernels: tuple[str, ...]

    @classmethod
    def of(cls, times: Sequence[float], kernels: Sequence[str] = ()) -> "Timing":
        ordered = sorted(times)
        low, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, len(ordered), tuple(kernels))


Passes = dict[str, tuple[Timing, dict[str, Any]]]
"""The time of each pass by name, and what else its row has."""


def compiled(f: Callable[..., Any], *shapes: Any, **how: Any) -> Any:
    """The program of `f` for arguments of these shapes."""
    return jax.jit(f, **how).lower(*shapes).compile()


def error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The relative error of an array, in the norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def agrees(what: str, error: Any, limit: float = 1e-2) -> None:
    """No speed from a wrong result: raises where its relative error is `limit` or more."""
    if not float(error) < limit:
        raise RuntimeError(f"{what}: relative error {float(error):.1e} against plain JAX")


def short(value: float) -> float:
    """`value` to four digits, however small it is on a slow or busy machine."""
    return float(f"{value:.4g}")


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def sets_needed(bytes_per_set: int) -> int:
    return -(-FOOTPRINT // max(1, bytes_per_set)) if on_gpu() else 1


def measure(
    program: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    calls: int,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Timing:
    """Time `program`, compiled, on `calls` of the argument `sets` in turn; `wait` for results."""
    for args in sets:
        wait(program(*args))
    order = [sets[i % len(sets)] for i in range(calls)]
    return (_measure_cupti if on_gpu() else _measure_wall)(program, order, wait)


def _measure_cupti(run: Callable[..., Any], order: Sequence[Any], wait: Any) -> Timing:
    from jax._src.lib import mosaic_gpu  # the only door to CUPTI that takes several arguments sets

    cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    cupti._cupti_init()
    try:
        for args in order:
            out = run(*args)
        wait(out)
    finally:
        records = cupti._cupti_get_timings(False)
    return Timing.of(*by_call(records, len(order)))


def by_call(records: Sequence[tuple[str, float]], calls: int) -> tuple[list[float], list[str]]:
    """The time of each call, and the kernels that it launches.

    Args:
      records: name and duration of each kernel, those of one name in the order of the calls. What
        other threads launch, as PyTorch's backward does, may stand after everything else.
      calls: how many there were, alike.
    """
    by_name: dict[str, list[float]] = {}
    for name, duration in records:
        by_name.setdefault(name, []).append(duration)
    if not records or any(len(durations) % calls for durations in by_name.values()):
        raise RuntimeError(f"{len(records)} kernels were recorded for {calls} calls")
    times, kernels = [0.0] * calls, []
    for name, durations in by_name.items():
        per_call = len(durations) // calls
        kernels += [name] * per_call
        for i in range(calls):
            times[i] += sum(durations[i * per_call : (i + 1) * per_call])
    return times, kernels


def _measure_wall(run: Callable[..., Any], order: Sequence[Any], wait: Any) -> Timing:
    times = []
    for args in order:
        start = time.perf_counter()
        wait(run(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return Timing.of(times)


class Program:
    """A function compiled for arguments of some shapes, by ``jax.jit(f, **how)``."""

    def __init__(self, f: Callable[..., Any], *shapes: Any, **how: Any):
        start = time.perf_counter()
        self.run = compiled(f, *shapes, **how)
        seconds, memory = time.perf_counter() - start, self.run.memory_analysis()
        self.told = {"compile_s": round(seconds, 2)}
        self.told["temp_bytes"] = getattr(memory, "temp_size_in_bytes", 0)

    def timed(self, sets: Sequence[Any], calls: int) -> tuple[Timing, dict[str, Any]]:
        """Times it; tells also what compiling takes, and the first call by itself."""
        start = time.perf_counter()
        jax.block_until_ready(self.run(*sets[0]))
        first = short(time.perf_counter() - start)
        return measure(self.run, sets, calls), self.told | {"first_call_s": first}


class Ceilings(NamedTuple):
    """The best that the machine reaches."""

    copy: float  # bytes a second, read and written, of a copy
    products: float  # operations a second of matrix products; 0 where they are not asked for


def ceilings(products: bool) -> Ceilings:
    """Measures both, or the copy alone: by XLA's ``x + 1`` and its product of square matrices."""
    seconds = lambda f, sets: measure(compiled(f, *sets[0]), sets, calls=20).median * 1e-3
    size = 1 << 30 if on_gpu() else 1 << 24
    copied = [(jnp.full((size // 4,), i, jnp.float32),) for i in range(2)]
    copy = 2 * size / seconds(lambda x: x + 1, copied)
    if not products:
        return Ceilings(copy, 0.0)
    del copied
    n, dtype = (8192, jnp.bfloat16) if on_gpu() else (512, jnp.float32)
    draw = jax.jit(lambda i: jax.random.normal(jax.random.key(i), (2, n, n), dtype))
    return Ceilings(copy, 2 * n**3 / seconds(jnp.matmul, [tuple(draw(i)) for i in range(2)]))
