"""Cases of dropout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from bench.cases import peers
from bench.cases.case import Case, Cost, Errors, Shape, arguments, constant

EXACT_RATE = 0.125
"""At which errors are measured: a multiple of 2⁻¹⁶, so that exactly what is kept is scaled by."""


@functools.cache
def _kept(shape: tuple[int, ...]) -> np.ndarray:
    """The elements that dropout keeps; key and shape alone decide."""
    with jax.ensure_compile_time_eval(), jax.enable_x64(False):
        ones = jnp.ones(shape, jnp.float32)
        kept = jaxkern.dropout(ones, EXACT_RATE, jax.random.key(11), implementation="xla")
        return np.asarray(kept) != 0


def _dropped(x: Any) -> Any:
    return jnp.where(_kept(x.shape), x / (1 - EXACT_RATE), 0)


def _of_rate(x: Any, rate: Any, **how: Any) -> Any:
    """Runs dropout with a rate that is an array."""
    rate = jax.lax.stop_gradient(rate)
    return jaxkern.dropout(x, rate, jax.random.key(0), activation="gelu", **how)


_OF_ROWS: dict[str, Any] = {"axes": "m d", "split": "m d"}
_ONE: dict[str, Any] = _OF_ROWS | {"op": "dropout", "arguments": arguments(x="m d")}
_TWO: dict[str, Any] = _OF_ROWS | {
    "op": "dropout_add",
    "arguments": arguments(x="m d", residual="m d"),
}


def _drawn(of: dict[str, Any], **rest: Any) -> Case:
    """The op with its key made where it is called."""

    def run(*arrays: Any, seed: int = 0, **how: Any) -> Any:
        return getattr(jaxkern, of["op"])(*arrays, key=jax.random.key(seed), **how)

    return Case(**of, run=run, drawn=True, **rest)


def _exact(of: dict[str, Any], expression: Any) -> Case:
    options = {"rate": EXACT_RATE, "seed": 11}
    errors = Errors((512, 4096), (16, 256))
    return _drawn(of, options=options, expression=expression, errors=errors)


CASES = [
    _drawn(
        _ONE,
        options={"rate": peers.RATE},
        forward=Cost("2 m d"),
        backward=Cost("2 m d"),
        peers=peers.in_torch("dropout"),
        shapes=[
            *(Shape((16384, d)) for d in (4096, 11008, 14336, 13000, 8192)),
            *(Shape((16383, 4097)), Shape((16384, 8192), "float32")),
        ],
        small=Shape((256, 1024), "float32"),
    ),
    _drawn(
        _ONE,
        variant="silu",
        options={"rate": peers.RATE, "activation": "silu"},
        forward=Cost("2 m d"),
        backward=Cost("3 m d"),
        peers=peers.in_torch("dropout, silu"),
        shapes=[Shape((16384, 8192))],
    ),
    _exact(_ONE, _dropped),
    Case(
        **_OF_ROWS,
        op="dropout",
        arguments=arguments(x="m d", rate=("", constant(0.25), "float32")),
        run=_of_rate,
        strict=True,
    ),
    _drawn(
        _TWO,
        options={"rate": peers.RATE},
        forward=Cost("3 m d"),
        backward=Cost("2 m d"),
        peers=peers.in_torch("dropout_add"),
        shapes=[Shape((16384, 8192))],
        strict=True,
    ),
    _exact(_TWO, lambda x, residual: residual + _dropped(x)),
]
