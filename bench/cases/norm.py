"""Cases of the norms."""

from typing import Any

import jax
import jax.numpy as jnp

from bench.cases import peers
from bench.cases.case import Argument, Case, Cost, Errors, Shape, near_one, times

X, RESIDUAL, GATE = (Argument(name, "m d") for name in ("x", "residual", "gate"))
WEIGHT = Argument("weight", "d", near_one, "parameter")
BIAS = Argument("bias", "d", times(0.1), "parameter")


def rms_normalised(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def layer_normalised(x: Any, weight: Any, bias: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight + bias


_SPLIT: dict[str, dict[str, Any]] = {
    # Sums of the squares, and of what the backward is saved; of products with the gradient.
    "rms_norm": {"split": "m d", "features": {"all-reduce": 3}},
    # Sums for the mean, too, and of the gradient; XLA joins two each time.
    "layer_norm": {"split": "m d", "features": {"all-reduce": 4}},
}
"""Collectives of a norm on a mesh: statistics are sums over the devices that have a row."""

_WIDTHS = (64, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 11008, *(1 << i for i in range(14, 19)))
_SHAPES = (
    *(Shape((min(16384, (1 << 27) // d), d)) for d in _WIDTHS),
    *(Shape((16384, d), dtype) for d in (4096, 8192) for dtype in ("float32", "float16")),
    *(Shape((4096, 1024)), Shape((16384, 1000))),
    Shape((16384, 4096), word="-silu", options={"activation": "silu"}),
)
_VARIANT = (Shape((16384, 4096)),)
_ERRORS = Errors((512, 4096), (16, 256))


def _cases(op: str, inputs: tuple[Argument, ...], expression: Any) -> list[Case]:
    """A norm alone, of the sum with a residual, and gated; the sum is a second result."""
    of_op: dict[str, Any] = {"op": op, "axes": "m d", **_SPLIT[op]}
    return [
        Case(
            **of_op,
            arguments=inputs,
            expression=expression,
            forward=Cost("2 m d"),
            backward=Cost("3 m d"),
            peers=peers.RMS_NORM if op == "rms_norm" else peers.LAYER_NORM,
            shapes=_SHAPES,
            small=Shape((256, 4096), "float32") if op == "rms_norm" else None,
            errors=_ERRORS,
            strict=True,
        ),
        Case(
            **of_op,
            variant="residual",
            arguments=(*inputs, RESIDUAL),
            forward=Cost("4 m d"),
            backward=Cost("4 m d"),
            shapes=_VARIANT,
        ),
        Case(
            **of_op,
            variant="gate",
            arguments=(*inputs, GATE),
            expression=lambda *a: expression(*a[:-1]) * jax.nn.silu(a[-1]),
            forward=Cost("3 m d"),
            backward=Cost("5 m d"),
            peers=peers.RMS_NORM_GATE if op == "rms_norm" else {},
            shapes=_VARIANT,
            errors=_ERRORS if op == "rms_norm" else None,
        ),
    ]


CASES = [
    *_cases("rms_norm", (X, WEIGHT), rms_normalised),
    Case(
        op="rms_norm",
        variant="bias",
        axes="m d",
        **_SPLIT["rms_norm"],
        arguments=(X, WEIGHT, BIAS),
        expression=lambda x, weight, bias: rms_normalised(x, weight) + bias,
        forward=Cost("2 m d"),
        backward=Cost("3 m d"),
        shapes=_VARIANT,
        errors=_ERRORS,
    ),
    Case(
        op="rms_norm",
        variant="all",
        axes="m d",
        split="m",
        arguments=(X, WEIGHT, BIAS, RESIDUAL, GATE),
        options={"group_size": 16, "activation": "silu"},
        strict=True,
    ),
    *_cases("layer_norm", (X, WEIGHT, BIAS), layer_normalised),
    Case(
        op="layer_norm",
        variant="residual-gate",
        axes="m d",
        **_SPLIT["layer_norm"],
        arguments=(X, WEIGHT, BIAS, RESIDUAL, GATE),
        forward=Cost("5 m d"),
        backward=Cost("6 m d"),
        small=Shape((256, 4096), "float32"),
    ),
]
