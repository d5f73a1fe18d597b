"""Cases of the optimizers: a call of each, and the steps over trees that are timed."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxkern
from bench.cases.case import Argument, Case
from jaxkern.precision import NoOpLossScale

Shapes = tuple[tuple[int, ...], ...]

normal_of_shape = jax.jit(jax.random.normal, static_argnums=(1, 2))
"""Compiled once for a shape, as a program of hundreds takes minutes."""


def _step(optimizer: str) -> Callable[..., Any]:
    def run(params: Any, *, implementation: Any) -> Any:
        tx = getattr(jaxkern, optimizer)(1e-3, implementation=implementation)
        return jaxkern.apply(tx, params, tx.init(params), params)

    return run


_RUNS = {name: _step(name) for name in ("fused_adamw", "fused_adam", "fused_sgd")}
_RUNS["scale_gradients"] = lambda grads, **how: jaxkern.scale_gradients(
    grads, NoOpLossScale(), **how
)

CASES = [
    Case(op=op, axes="k h", arguments=(Argument("params", "k h"),), run=run)
    for op, run in _RUNS.items()
]
"""The calls of one array of parameters or gradients; `jaxkern.apply` does an optimizer's step."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step over leaves of these `shapes`, by ``"fused_adamw"`` or ``"scale_gradients"``.

    It must read and write `nbytes`, and its gradients may come `scaled`; `options` are the
    optimizer's, other attributes those of a case of the bench.
    """

    op: str
    shape: str
    dtype: str
    nbytes: int
    shapes: Shapes
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaled: bool = False

    @property
    def costs(self) -> dict[str, tuple[int, int]]:
        return {"step": (self.nbytes, 0)}

    def arrays(self, key: Any, normal: Callable[..., Any] = normal_of_shape) -> list[jax.Array]:
        """A tree of the parameters' shapes, by ``jax.random.normal`` or what is in its place."""
        keys = jax.random.split(key, len(self.shapes))
        return [normal(k, s, self.dtype) for k, s in zip(keys, self.shapes, strict=True)]


def steps(small: bool) -> Sequence[Step]:
    """All steps; `small` ones for a machine without a GPU."""
    bf16, fp32 = "bfloat16", "float32"
    if small:
        return [_adamw("tree", ((256, 64),) * 4 + ((64,),) * 3, fp32, 28)]
    one, small_leaves = ((24414, 4096),), ((256, 256),) * 300
    master: dict[str, Any] = {"master_dtype": fp32}
    averages: dict[str, Any] = {"mu_dtype": bf16, "nu_dtype": bf16, "stochastic_rounding": True}
    codes: dict[str, Any] = {"mu_dtype": "int8", "nu_dtype": "uint8"}
    folded: dict[str, Any] = {"clip_norm": 1.0, "skip_nonfinite": True}
    found = []
    for name, shapes in (("100M", one), ("1.1B", _llama())):
        found += [
            _adamw(name, shapes, fp32, 28),
            _adamw(f"{name}-master", shapes, bf16, 28, **master),
            _adamw(f"{name}-bf16-state", shapes, fp32, 20, **averages),
            _adamw(f"{name}-8-bit-state", shapes, fp32, 16, **codes),
            _adamw(f"{name}-folded", shapes, fp32, 32, scaled=True, **folded),
            Step("scale_gradients", name, fp32, 8 * _size(shapes), shapes),
        ]
    return [
        *found,
        _adamw("100M-master-bf16-state", one, bf16, 20, **master, **averages),
        _adamw("100M-bf16-all", one, bf16, 14, **averages),
        _adamw("100M-bf16-8-bit-state", one, bf16, 10, **codes),
        _adamw("20M-300-leaves", small_leaves, fp32, 28),
        _adamw("20M-300-leaves-folded", small_leaves, fp32, 32, scaled=True, **folded),
    ]


def _adamw(
    shape: str, shapes: Shapes, dtype: str, per: int, scaled: bool = False, **options: Any
) -> Step:
    """`per` bytes a parameter; what the 8-bit codes' scales and small leaves add is left out."""
    return Step("fused_adamw", shape, dtype, per * _size(shapes), shapes, options, scaled)


def _size(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _llama() -> Shapes:
    """300 leaves, 1.1 billion parameters: 33 layers of width 1664."""
    d, kv, ffn, words = 1664, 256, 4608, 32000
    attention = ((d, d), (d, kv), (d, kv), (d, d))
    layer = (*attention, (d, ffn), (d, ffn), (ffn, d), (d,), (d,))
    return ((words, d), (d, words), (d,), *(layer * 33))
