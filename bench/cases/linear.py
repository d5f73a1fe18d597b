"""Cases of linear layers, and of a block of a model that is made of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench.cases import peers
from bench.cases.activations import clamped
from bench.cases.case import Argument, Case, Cost, Errors, Shape, arguments, matrix, near_one, times
from bench.cases.norm import layer_normalised, rms_normalised

X = Argument("x", "m k")
WEIGHT = Argument("weight", "k h", matrix, "matrix")
BIAS = Argument("bias", "h", role="parameter")
SCALE = Argument("weight", "k", near_one, "parameter")
OFFSET = Argument("bias", "k", times(0.1), "parameter")
W, W_GATE, W_UP = (Argument(name, "k h", matrix, "matrix") for name in ("w", "w_gate", "w_up"))

_ERRORS = Errors((512, 1024, 1024), (16, 128, 256))
_SMALL, _WIDE = Shape((256, 256, 256), "float32"), Shape((8192, 4096, 14336))
_PRODUCT: dict[str, Any] = {"axes": "m k h", "result": "m h", "split": "m h"}
_ONE: dict[str, Any]
_TWO: dict[str, Any]
_ONE, _TWO = (
    _PRODUCT
    | {
        "forward": Cost(f"m k + {n} k h + m h", operations=f"{2 * n} m k h"),
        "backward": Cost(f"2 m k + {2 * n} k h + 2 m h", operations=f"{4 * n} m k h"),
    }
    for n in (1, 2)
)
"""Axes and costs of products with one weight, and with two."""


def _activated(activation: str, *shapes: tuple[int, ...], **rest: Any) -> Case:
    """A linear layer with a bias and an activation."""
    return Case(
        op="linear",
        variant=activation,
        arguments=(X, WEIGHT, BIAS),
        options={"activation": activation},
        shapes=[Shape((16384, 4096, 4096)), *map(Shape, shapes)],
        **_ONE,
        **rest,
    )


def _joined(variant: str, limit: float, **rest: Any) -> Case:
    """Both projections by one weight, with the biases and the limits of gpt-oss."""
    both: Any = {"w": ("k 2h", matrix, "matrix"), "b": ("2h", times(1 / 32), "parameter")}
    return Case(
        op="gated_linear_unit",
        variant=variant,
        arguments=(X, *arguments(**both)),
        options={"alpha": 1.702, "limit": limit, "up_offset": 1.0},
        run=lambda x, w, b, **how: jaxkern.gated_linear_unit(x, w, None, b, **how),
        expression=lambda x, w, b: clamped(limit)(*jnp.split(x @ w + b, 2, -1)),
        **_TWO | {"split": "m"},
        **rest,
    )


def _accumulating(accumulator: str, x: str, dout: str) -> dict[str, Any]:
    given = Argument("accumulator", accumulator, role="float32"), *arguments(x=x, dout=dout)
    return {"op": "accumulate_weight_grad", "axes": "m k h", "arguments": given}


_QUACK = [
    # As the tests of quack draw them, of a product that leaves its bound where XLA's does too.
    Case(
        **_accumulating("m h", "k m", "k h"),
        variant="x".join(map(str, sizes)),
        expression=lambda total, x, dout: (
            total + jnp.matmul(x.T, dout, preferred_element_type=total.dtype)
        ),
        errors=Errors(sizes, None, bound=(1e-5, 1e-4)),
    )
    for sizes in ((1920, 1024, 1504), (1920, 736, 2048))
]


def _accumulate(x: Any, dout: Any, **how: Any) -> Any:
    """Over micro-batches, of which each reads and writes the accumulator."""

    def step(accumulator: Any, micro: Any) -> Any:
        return jaxkern.accumulate_weight_grad(accumulator, *micro, **how), None

    return jax.lax.scan(step, jnp.zeros((x.shape[2], dout.shape[2])), (x, dout))[0]


def _mlp(
    x: Any, scale: Any, bias: Any, w: Any, w_gate: Any, w_up: Any, w_down: Any, **how: Any
) -> Any:
    """Layer norm and linear layer, gated projections, linear layer, residual."""
    y = jaxkern.layer_norm_linear(x, scale, bias, w, **how)
    return x + jaxkern.linear(jaxkern.gated_linear_unit(y, w_gate, w_up, **how), w_down, **how)


_MLP_WEIGHTS = {"w": "d d", "w_gate": "d h", "w_up": "d h", "w_down": "h d"}

CASES = [
    Case(
        op="linear",
        arguments=(X, Argument("weight", "k h", matrix)),
        expression=jnp.matmul,
        peers=peers.LINEAR,
        shapes=[
            *(Shape((8192, n, n)) for n in (8192, 4096)),
            *(Shape((16384, 4096, h)) for h in (4096, 11008, 14336, 16)),
            Shape((16384, 16, 4096)),
            Shape((8192, 4096, 4096), "float16"),
        ],
        errors=_ERRORS,
        strict=True,
        **_ONE,
    ),
    _activated("relu"),
    _activated("silu"),
    _activated("gelu", peers=peers.LINEAR_GELU, small=_SMALL, strict=True),
    Case(
        op="gated_linear_unit",
        arguments=(X, W_GATE, W_UP),
        expression=lambda x, w_gate, w_up: jax.nn.silu(x @ w_gate) * (x @ w_up),
        peers=peers.GATED_LINEAR_UNIT,
        shapes=[_WIDE, dataclasses.replace(_WIDE, word="-recompute", options={"recompute": True})],
        small=_SMALL,
        errors=_ERRORS,
        strict=True,
        **_TWO,
    ),
    _joined("joined", 7.0, shapes=[_WIDE]),
    # The limit is smaller than gpt-oss's, so that more of the numbers reach it.
    _joined("one weight", 1.5, errors=Errors((512, 1024, 512), (16, 128, 128))),
    Case(
        **_PRODUCT,
        op="rms_norm_linear",
        arguments=(X, SCALE, W),
        expression=lambda x, weight, w: rms_normalised(x, weight) @ w,
        errors=_ERRORS,
        strict=True,
    ),
    Case(
        op="layer_norm_linear",
        arguments=(X, SCALE, OFFSET, W),
        expression=lambda x, weight, bias, w: layer_normalised(x, weight, bias) @ w,
        peers=peers.LAYER_NORM_LINEAR,
        shapes=[Shape((16384, 4096, 4096))],
        small=_SMALL,
        errors=_ERRORS,
        strict=True,
        **_ONE,
    ),
    Case(
        op="layer_norm_linear",
        variant="no bias",
        **_PRODUCT,
        arguments=(X, SCALE, W),
        run=lambda x, weight, w, **how: jaxkern.layer_norm_linear(x, weight, None, w, **how),
        strict=True,
    ),
    Case(
        **_accumulating("k h", "m k", "m h"),
        split="m k h",
        expression=lambda total, x, dout: total + (x.T @ dout).astype(total.dtype),
        errors=Errors((512, 128, 256), (16, 128, 256)),
        strict=True,
    ),
    Case(
        op="accumulate_weight_grad",
        axes="i m k h",
        arguments=arguments(x="i m k", dout="i m h"),
        run=_accumulate,
        forward=Cost("i m k + i m h", nbytes="8 i k h", operations="2 i m k h"),
        peers=peers.ACCUMULATE_WEIGHT_GRAD,
        shapes=[Shape((4, m, 4096, 4096)) for m in (512, 2048)],
        small=Shape((2, 256, 256, 256), "float32"),
    ),
    *_QUACK,
    Case(
        op="mlp",
        axes="m d h",
        arguments=(
            Argument("x", "m d"),
            Argument("scale", "d", near_one, "parameter"),
            Argument("bias", "d", times(0.1), "parameter"),
            *(Argument(name, axes, matrix, "matrix") for name, axes in _MLP_WEIGHTS.items()),
        ),
        run=_mlp,
        forward=Cost("4 m d + 2 m h + d d + 3 d h", operations="2 m d d + 6 m d h"),
        backward=Cost("8 m d + 4 m h + 2 d d + 6 d h", operations="4 m d d + 12 m d h"),
        peers=peers.MLP,
        shapes=[Shape((16384, 4096, 11008))],
        small=Shape((256, 256, 512), "float32"),
    ),
]
