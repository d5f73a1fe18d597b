"""Cases of losses."""

from typing import Any

import jax
import jax.numpy as jnp

from bench.cases import peers
from bench.cases.case import Argument, Case, Cost, Errors, Shape, matrix, times


def _labels(classes: int) -> Argument:
    draw = lambda key, shape: jax.random.randint(key, shape, 0, classes)
    return Argument("labels", "m", draw, "int32")


LABELS = _labels(8)
OF_LINEAR = (
    Argument("x", "m k"),
    Argument("weight", "k v", matrix, "matrix"),
    LABELS,
    Argument("bias", "v", times(0.1), "parameter"),
)
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "none"}


def _losses(logits: Any, labels: Any) -> Any:
    """The loss as a user would write it, with the options above."""
    labels = labels.astype(jnp.int32)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    lse = jax.nn.logsumexp(wide, axis=-1)
    chosen = jnp.take_along_axis(wide, labels[..., None], axis=-1)[..., 0]
    return lse - 0.9 * chosen - 0.1 * wide.mean(-1) + 1e-3 * lse**2


def _linear(x: Any, weight: Any, labels: Any, bias: Any) -> Any:
    return _losses(x @ weight + bias, labels)


def _plain_losses(logits: Any, labels: Any) -> Any:
    """The loss as a user would write it without options, in as few passes as XLA makes."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    lse = jax.nn.logsumexp(wide, axis=-1)
    chosen = jnp.take_along_axis(logits, labels.astype(jnp.int32)[..., None], axis=-1)[..., 0]
    return lse - chosen.astype(wide.dtype)


def _plain_linear(x: Any, weight: Any, labels: Any) -> Any:
    return _plain_losses(x @ weight, labels).mean()


SHAPES = (16384, 768, 50304), (8192, 4096, 128256), (4096, 2560, 256000), (32768, 2048, 32000)
"""Rows, inputs, classes: of GPT-2, Llama 3, Gemma and Llama 2."""

OF_SHAPES = _labels(32000)
"""Labels among the classes that all of the shapes have."""

PEAKED = Argument("x", "m k", times(2.5))
"""Logits whose softmax is large enough to be seen in the gradients beside the labels."""

PARTS, CHUNKS = {"memory": 160 << 20}, {"memory": 336 << 20}
"""Memory for so few logits that they are computed twice, in parts of the classes, and for so many
that they are computed once, in chunks of the rows."""


def _trained(variant: str, **rest: Any) -> Case:
    """The mean, as training takes it: who knows that can compute the gradient in the forward."""
    return Case(
        op="linear_cross_entropy",
        variant=variant,
        axes="m k v",
        arguments=(PEAKED, Argument("weight", "k v", matrix, "matrix"), OF_SHAPES),
        result="",
        expression=_plain_linear,
        forward=Cost("m k + k v", "4 m", "2 m k v"),
        backward=Cost("2 m k + 2 k v", "8 m", "4 m k v"),
        passes=("forward", "both"),
        shapes=tuple(map(Shape, SHAPES)),
        **rest,
    )


_LINEAR: dict[str, Any] = {"op": "linear_cross_entropy", "axes": "m k v", "arguments": OF_LINEAR}
_LINEAR |= {"forward": Cost("m k + k v", "8 m", "2 m k v"), "expression": _linear}
_ONCE, _TWICE = (Cost("2 m k + 2 k v", "12 m", f"{n} m k v") for n in (4, 6))
"""The backward, where logits are computed in the forward alone, and where again."""

_MEAN: dict[str, Any] = {"expression": lambda *arrays: _linear(*arrays).mean()}
LOGITS = Argument("logits", "m v", times(2))
_ALONE: dict[str, Any] = {"op": "cross_entropy", "axes": "m v", "result": "m"}
_ALONE |= {"forward": Cost("m v", "8 m"), "backward": Cost("2 m v", "12 m")}

CASES = [
    Case(
        **_ALONE,
        arguments=(LOGITS, LABELS),
        split="m v",
        options=OPTIONS,
        expression=_losses,
        errors=Errors((512, 32000), (16, 512)),
        strict=True,
    ),
    Case(
        **_LINEAR,
        result="m",
        split="m k v",
        options=OPTIONS,
        backward=_ONCE,
        errors=Errors((512, 1024, 32000), (16, 128, 512)),
        strict=True,
    ),
    Case(
        **_LINEAR,
        variant="in parts",
        result="m",
        split="m v",
        options=OPTIONS | PARTS,
        backward=_TWICE,
    ),
    Case(
        **_LINEAR | _MEAN,
        variant="in chunks",
        result="",
        split="m v",
        options=OPTIONS | {"reduction": "mean"} | CHUNKS,
        backward=_ONCE,
        errors=Errors((11264, 256, 32000), None),
    ),
    Case(
        **_ALONE,
        variant="plain",
        arguments=(LOGITS, OF_SHAPES),
        options={"reduction": "none"},
        expression=_plain_losses,
        peers=peers.CROSS_ENTROPY,
        shapes=tuple(Shape((m, v)) for m, _, v in (*SHAPES, (8192, 0, 50257))),
    ),
    _trained(
        "plain",
        peers={**peers.LINEAR_CROSS_ENTROPY, "jax": lambda: _plain_linear},
        small=Shape((16, 64, 32000)),
    ),
    _trained("plain-160MiB", options=PARTS, peers=peers.LINEAR_CROSS_ENTROPY_IN_PARTS),
    _trained("plain-336MiB", options=CHUNKS, peers=peers.LINEAR_CROSS_ENTROPY_IN_PARTS),
]
