"""What is measured: for every op its shapes, the bytes that it must move, and whom it is beside."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
      op: the op's public name.
      shape: what the table calls the shape.
      dtype: of the activations.
      arrays: draws the arguments from a key.
      call: ``call(*arrays, implementation)``.
      bytes_forward: bytes that the forward must read and write, each array once.
      bytes_backward: the same for the backward, from the saved residuals.
    """

    op: str
    shape: str
    dtype: str
    arrays: Callable[[Any], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes_forward: int
    bytes_backward: int


def _rms_norm(m: int, n: int, dtype: str) -> Case:
    itemsize = jnp.dtype(dtype).itemsize

    def arrays(key: Any) -> tuple[Any, ...]:
        x, w = jax.random.split(key)
        weight = 1 + 0.1 * jax.random.normal(w, (n,))
        return jax.random.normal(x, (m, n), dtype), weight

    return Case(
        op="rms_norm",
        shape=f"{m}x{n}",
        dtype=dtype,
        arrays=arrays,
        call=lambda x, w, implementation: jaxkern.rms_norm(x, w, implementation=implementation),
        bytes_forward=2 * m * n * itemsize,
        bytes_backward=3 * m * n * itemsize,
    )


def _selective_scan(b: int, l: int, d: int, n: int, dtype: str) -> Case:
    itemsize = jnp.dtype(dtype).itemsize

    def arrays(key: Any) -> tuple[Any, ...]:
        k = jax.random.split(key, 5)
        x, dt, z = (jax.random.normal(k[i], (b, l, d), dtype) for i in range(3))
        B, C = (jax.random.normal(k[3 + i], (b, l, n), dtype) for i in range(2))
        A = -jnp.broadcast_to(jnp.arange(1.0, n + 1), (d, n))
        return x, dt, A, B, C, jnp.ones(d), z, jnp.linspace(-6.0, -2.0, d)

    def call(x, dt, A, B, C, D, z, dt_bias, implementation):
        return jaxkern.selective_scan(
            x, dt, A, B, C, D, z, dt_bias=dt_bias, dt_softplus=True, implementation=implementation
        )

    wide, narrow = b * l * d * itemsize, b * l * n * itemsize
    return Case(
        op="selective_scan",
        shape=f"{b}x{l}x{d}x{n}",
        dtype=dtype,
        arrays=arrays,
        call=call,
        bytes_forward=4 * wide + 2 * narrow,
        bytes_backward=7 * wide + 4 * narrow,
    )


def cases(small: bool) -> Sequence[Case]:
    """All cases; `small` ones for a machine without a GPU, where no kernel is timed."""
    if small:
        return [_rms_norm(256, 4096, "float32"), _selective_scan(2, 256, 256, 16, "float32")]
    elements = 1 << 27
    sizes = [64, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 11008, 16384, 65536]
    norms = [_rms_norm(min(16384, elements // n), n, "bfloat16") for n in sizes]
    norms += [_rms_norm(16384, n, dtype) for n in (4096, 8192) for dtype in ("float32", "float16")]
    norms += [_rms_norm(4096, 1024, "bfloat16"), _rms_norm(16384, 1000, "bfloat16")]
    scans = [
        _selective_scan(*shape, "bfloat16")
        for shape in (
            (8, 2048, 2048, 16),
            (4, 4096, 5120, 16),
            (1, 16384, 2048, 16),
            (2, 512, 512, 16),
        )
    ]
    return [*norms, *scans]


def bytes_of(arrays: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
