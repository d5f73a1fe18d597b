"""Cases of activations and of gated units."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.cases import peers
from bench.cases.case import Argument, Case, Cost, Errors, Shape, arguments

_PAIR, _JOINED = arguments(gate="m h", up="m h"), arguments(x="m 2h")

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


def _pointwise(op: str, f: Any, variant: str = "", timed: bool = True, **options: Any) -> Case:
    return Case(
        op=op,
        variant=variant,
        axes="m d",
        split="m d",
        arguments=(Argument("x", "m d"),),
        options=options,
        expression=f,
        forward=Cost("2 m d"),
        backward=Cost("2 m d", nbytes="1/8 m d") if op == "relu" else Cost("3 m d"),  # x or a mask
        peers=peers.activation(f"{op}, {variant}" if variant else op) if timed else {},
        shapes=[Shape((16384, 8192))] if timed else (),
        errors=Errors((512, 4096), (16, 256)),
        strict=not variant,
    )


_GATED: dict[str, Any] = {"axes": "m h", "result": "m h"}
_GATED |= {"forward": Cost("3 m h"), "backward": Cost("5 m h")}
_APART: dict[str, Any] = _GATED | {"split": "m h", "arguments": _PAIR}
_HALVED: dict[str, Any] = _GATED | {"split": "m", "arguments": _JOINED}


def _clamped(limit: float, **rest: Any) -> Case:
    options = {"alpha": 1.702, "limit": limit, "up_offset": 1.0}
    how = _APART | {"options": options, "expression": clamped(limit)}
    return Case(op="swiglu", variant="clamped", **how, **rest)


def _gated(op: str, f: Any, *shapes: Shape, **rest: Any) -> Case:
    """A gated unit of two arrays, or of one that holds both halves."""

    def expression(*arrays: Any) -> Any:
        gate, up = arrays if len(arrays) == 2 else jnp.split(arrays[0], 2, -1)
        return f(gate) * up

    halved = op.endswith("_and_mul")
    return Case(
        op=op,
        expression=expression,
        peers={} if op == "glu" else peers.activation(op),
        shapes=[Shape((16384, 4096)), *shapes],
        errors=Errors((512, 2048), (16, 128)) if halved else Errors((512, 4096), (16, 256)),
        strict=True,
        **(_HALVED if halved else _APART),
        **rest,
    )


_WIDTHS = [Shape((16384, h)) for h in (11008, 14336, 13000)]
_DTYPES = [Shape((16384, 4096), dtype) for dtype in ("float32", "float16")]
_SMALL = Shape((256, 1024), "float32")

CASES = [
    _pointwise("relu", jax.nn.relu),
    _pointwise("relu_squared", lambda x: jax.nn.relu(x) ** 2),
    _pointwise("silu", jax.nn.silu),
    _pointwise("gelu", _gelu),
    _pointwise("gelu", _erf, "erf", approximate=False),
    _pointwise("quick_gelu", lambda x: x * jax.nn.sigmoid(1.702 * x), timed=False),
    _pointwise("sigmoid", jax.nn.sigmoid, timed=False),
    _pointwise("tanh", jnp.tanh, timed=False),
    _gated("swiglu", jax.nn.silu, *_WIDTHS, *_DTYPES, Shape((16383, 4097)), small=_SMALL),
    _gated("geglu", _gelu),
    _gated("reglu", jax.nn.relu),
    _gated("glu", jax.nn.sigmoid),
    _clamped(7.0, shapes=[Shape((16384, 4096))], strict=True),
    # The limit is smaller than gpt-oss's, so that more of the numbers reach it.
    _clamped(1.5, errors=Errors((512, 4096), (16, 256))),
    _gated("silu_and_mul", jax.nn.silu, *_WIDTHS, Shape((16384, 4097))),
    Case(
        op="silu_and_mul",
        variant="clamped",
        options={"limit": 7.0, "up_offset": 1.0},
        strict=True,
        **_HALVED,
    ),
    _gated("gelu_and_mul", _gelu),
]
