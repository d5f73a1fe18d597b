"""Cases of activations and of gated units."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.cases import peers
from bench.cases.case import Argument, Case, Cost, Errors, Shape

X = Argument("x", "m d")
GATE, UP = Argument("gate", "m h"), Argument("up", "m h")
BOTH = Argument("x", "m 2h")

_gelu = jax.nn.gelu
_erf = functools.partial(jax.nn.gelu, approximate=False)


def clamped(limit: float) -> Callable[[Any, Any], Any]:
    """The gated unit of gpt-oss, which keeps both of its halves near zero."""

    def unit(gate: Any, up: Any) -> Any:
        most = jnp.asarray(limit, gate.dtype)
        near = jnp.where(gate > most, most, gate)  # whose slope at the limit is 1, as PyTorch's
        up = jnp.where(jnp.abs(up) > most, jnp.sign(up) * most, up)
        return near * jax.nn.sigmoid(1.702 * near) * (up + 1)

    return unit


def _clamped(limit: float, **rest: Any) -> Case:
    return Case(
        op="swiglu",
        variant="clamped",
        arguments=(GATE, UP),
        options={"alpha": 1.702, "limit": limit, "up_offset": 1.0},
        expression=clamped(limit),
        **_GATED | {"split": "m h"},
        **rest,
    )


def _pointwise(op: str, f: Any, variant: str = "", timed: bool = True, **options: Any) -> Case:
    return Case(
        op=op,
        variant=variant,
        axes="m d",
        split="m d",
        arguments=(X,),
        options=options,
        expression=f,
        forward=Cost("2 m d"),
        backward=Cost("3 m d"),
        peers=peers.activation(f"{op}, {variant}" if variant else op) if timed else {},
        shapes=[Shape((16384, 8192))] if timed else (),
        errors=Errors((512, 4096), (16, 256)),
        strict=not variant,
    )


_GATED: dict[str, Any] = {
    "axes": "m h",
    "result": "m h",
    "split": "m",
    "forward": Cost("3 m h"),
    "backward": Cost("5 m h"),
}


def _gated(op: str, f: Any, shapes: Any, **rest: Any) -> Case:
    """A gated unit of two arrays."""
    return Case(
        op=op,
        arguments=(GATE, UP),
        expression=lambda gate, up: f(gate) * up,
        peers={} if op == "glu" else peers.activation(op),
        shapes=[Shape((16384, 4096)), *shapes],
        errors=Errors((512, 4096), (16, 256)),
        strict=True,
        **_GATED | {"split": "m h"},
        **rest,
    )


def _halved(op: str, f: Any, shapes: Any) -> Case:
    """A gated unit of one array that holds both halves."""

    def expression(x: Any) -> Any:
        half = x.shape[-1] // 2
        return f(x[:, :half]) * x[:, half:]

    return Case(
        op=op,
        arguments=(BOTH,),
        expression=expression,
        peers=peers.activation(op),
        shapes=[Shape((16384, 4096)), *shapes],
        errors=Errors((512, 2048), (16, 128)),
        strict=True,
        **_GATED,
    )


_WIDTHS = [Shape((16384, h)) for h in (11008, 14336, 13000)]
_DTYPES = [Shape((16384, 4096), dtype) for dtype in ("float32", "float16")]

CASES = [
    _pointwise("relu", jax.nn.relu),
    _pointwise("relu_squared", lambda x: jax.nn.relu(x) ** 2),
    _pointwise("silu", jax.nn.silu),
    _pointwise("gelu", _gelu),
    _pointwise("gelu", _erf, "erf", approximate=False),
    _pointwise("quick_gelu", lambda x: x * jax.nn.sigmoid(1.702 * x), timed=False),
    _pointwise("sigmoid", jax.nn.sigmoid, timed=False),
    _pointwise("tanh", jnp.tanh, timed=False),
    _gated(
        "swiglu",
        jax.nn.silu,
        [*_WIDTHS, *_DTYPES, Shape((16383, 4097))],
        small=Shape((256, 1024), "float32"),
    ),
    _gated("geglu", _gelu, ()),
    _gated("reglu", jax.nn.relu, ()),
    _gated("glu", jax.nn.sigmoid, ()),
    _clamped(7.0, shapes=[Shape((16384, 4096))], strict=True),
    # The limit is smaller than gpt-oss's, so that more of the numbers reach it.
    _clamped(1.5, errors=Errors((512, 4096), (16, 256))),
    _halved("silu_and_mul", jax.nn.silu, [*_WIDTHS, Shape((16384, 4097))]),
    Case(
        op="silu_and_mul",
        variant="clamped",
        arguments=(BOTH,),
        options={"limit": 7.0, "up_offset": 1.0},
        strict=True,
        **_GATED,
    ),
    _halved("gelu_and_mul", _gelu, ()),
]
