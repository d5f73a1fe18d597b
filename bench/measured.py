"""The measurements of the bench: cases of the table at their shapes, and optimizers' steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bench import steps
from bench.cases import MODELS, TABLE, case, optim
from bench.cases.case import Shape
from bench.cases.optim import Step


@dataclasses.dataclass(frozen=True)
class Case:
    """An op, called in one way, at one shape."""

    of: case.Case
    at: Shape
    models: tuple[str, ...] = ()  # of :data:`bench.cases.MODELS`, that have this shape

    limit = 1e-2  # the largest relative error that is no wrong result

    def __str__(self) -> str:
        return f"{self.op} {self.shape}"

    @property
    def op(self) -> str:
        return self.of.op

    @property
    def shape(self) -> str:
        """The name of the shape in tables."""
        variant = f"-{self.of.variant}" if self.of.variant else ""
        return "x".join(map(str, self.at.sizes)) + variant + self.at.word

    @property
    def dtype(self) -> str:
        """The dtype of the data; matrices have it too, other parameters are float32."""
        return self.at.dtype

    @property
    def passes(self) -> Sequence[str]:
        return self.of.passes if self.of.backward else ("forward",)

    @property
    def drawn(self) -> bool:
        return self.of.drawn

    @property
    def with_gradients(self) -> bool:
        """Whether plain JAX tells them, too: of one number, as a loss is, which says little."""
        return self.of.result == ""

    @property
    def sizes(self) -> dict[str, int]:
        return self.of.sizes(self.at.sizes)

    def arrays(self, key: Any) -> tuple[Any, ...]:
        return self.of.arrays(key, self.sizes, case.dtypes(self.dtype, parameters="float32"))

    def call(self, *arrays: Any, implementation: Any) -> Any:
        return self.of.call(*arrays, implementation=implementation, **self.at.options)

    def plain(self, arrays: Sequence[Any], _: Any) -> Any:
        """The results of plain JAX, and perhaps the gradients; a loss is multiplied by 1."""
        call = functools.partial(self.call, implementation="xla")
        if not self.with_gradients:
            return call(*arrays)
        out, vjp = jax.vjp(call, *arrays)
        return out, floating(vjp(jax.numpy.ones_like(out)))

    @property
    def costs(self) -> dict[str, tuple[int, int]]:
        """Bytes of each pass, each array once, and operations of its matrix products."""
        itemsize = jax.numpy.dtype(self.dtype).itemsize
        total = lambda terms: case.total(terms, self.sizes)
        passes = {"forward": self.of.forward, "backward": self.of.backward}
        return {
            name: (itemsize * total(c.elements) + total(c.nbytes), total(c.operations))
            for name, c in passes.items()
            if c
        }


def cases(small: bool) -> Sequence[Case | Step]:
    """All cases; `small` ones for a machine without a GPU, where no kernel is timed."""
    if small:
        return [*(Case(of, of.small) for of in TABLE if of.small), *optim.steps(small)]
    timed = {of.name: of for of in TABLE if of.shapes}
    every = [Case(of, at) for of in timed.values() for at in of.shapes]
    of_models = [
        Case(timed[name], Shape(sizes), (model,))
        for model, ops in MODELS.items()
        for name, sizes in ops
    ]
    found: dict[tuple[str, str, str], Case] = {}
    for one in (*every, *of_models):
        first = found.setdefault((one.op, one.shape, one.dtype), one)
        if first is not one:
            both = first.models + one.models
            found[one.op, one.shape, one.dtype] = dataclasses.replace(first, models=both)
    return [*found.values(), *optim.steps(small)]


@functools.cache
def named() -> dict[str, Case | Step]:
    """The cases of ops with kernels for a GPU by op, shape and dtype."""
    with_kernels = lambda case: isinstance(case, Step) or case.of.has_kernels
    found = filter(with_kernels, cases(small=False))
    return {f"{case.op} {case.shape} {case.dtype}": case for case in found}


def passes(case: Case | Step) -> Callable[..., Any]:
    """The kernels' program of a case: forward and backward, or an optimizer's step.

    The kernel of a forward that nobody differentiates may be another one, and is there too.
    """
    if isinstance(case, Step):
        init, run = steps.program(case, "mosaic")
        return lambda *params: run(params, init(params), params)
    forward = functools.partial(case.call, implementation="mosaic")
    if not case.of.backward:
        return forward

    def both(*arrays: Any) -> Any:
        out, backward = jax.vjp(forward, *arrays)
        return forward(*arrays), out, backward(out)

    return both


def floating(grads: Any) -> list[Any]:
    """The gradients, without those of integers, which are none."""
    return [grad for grad in jax.tree.leaves(grads) if grad.dtype != jax.dtypes.float0]


def bytes_of(arrays: Any) -> int:
    """The size of all arrays of a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
