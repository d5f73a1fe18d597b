"""The description of an op for everything but the op itself: tests, bench, ledger, doctor, pages.

A :class:`Case` is an op called in one way. Its axes have names, and whoever reads it gives them
sizes: the tests small ones, the bench those of models.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxkern

Arrays = tuple[Any, ...]
Sizes = Mapping[str, Any]
"""The size of each axis by its name; of rows, ``m``, also a tuple of the sizes of several axes."""

AXES = {
    "m": "rows",
    "d": "channels",
    "k": "inputs",
    "h": "outputs",
    "b": "batch",
    "l": "length",
    "n": "states",
    "w": "taps",
    "i": "micro-batches",
    "heads": "heads",
    "p": "head size",
    "g": "groups",
    "v": "classes",
}
"""Meanings of the axes."""


def normal(key: Any, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape)


def times(scale: float) -> Callable[..., jax.Array]:
    """Draws normal numbers of this standard deviation."""
    return lambda key, shape: scale * normal(key, shape)


def near_one(key: Any, shape: tuple[int, ...]) -> jax.Array:
    return 1 + 0.1 * normal(key, shape)


def matrix(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Draws a (inputs, outputs) matrix whose products are as large as what it multiplies."""
    return normal(key, shape) / math.sqrt(shape[0])


def constant(value: float) -> Callable[..., jax.Array]:
    return lambda key, shape: jnp.full(shape, value)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that an op takes, by keyword where it takes it so alone."""

    name: str
    axes: str  # their names, or their sizes, as in "m 2h"
    draw: Callable[[Any, tuple[int, ...]], jax.Array] = normal  # of a key and a shape, in float32
    # Its part in a model, by which a reader chooses its dtype, "data", "matrix" or "parameter", or
    # the dtype that it always has, "float32" or "int32".
    role: str = "data"

    def shape(self, sizes: Sizes) -> tuple[Any, ...]:
        return tuple(size for _, size in dimensions(self.axes, sizes))

    def type(self, sizes: Sizes, dtypes: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape(sizes), dtypes[self.role])


Arguments = tuple[Argument, ...]


def arguments(**of: Any) -> Arguments:
    """Arguments by name: the axes of each, or a tuple of axes, `draw` and `role`."""
    told: dict[str, Any] = {name: (g,) if isinstance(g, str) else g for name, g in of.items()}
    return tuple(Argument(name, *given) for name, given in told.items())


def dimensions(axes: str, sizes: Sizes) -> list[tuple[str, Any]]:
    """Name and size of each dimension of an array; of several axes of rows the first is named."""
    found: list[tuple[str, Any]] = []
    for axis in axes.split():
        count = axis.rstrip("".join(AXES))  # 2 of "2h", and of "3" all
        name = axis[len(count) :]
        size = sizes[name] if name else 1
        if isinstance(size, tuple):
            found += zip((name, *[""] * (len(size) - 1)), size, strict=True)
        else:
            found.append((name, int(count or 1) * size))
    return found


def dtypes(data: Any, matrices: Any = None, parameters: Any = None) -> dict[str, Any]:
    """The dtype of each role: matrices and parameters have that of the data if not told."""
    of_role = {"data": data, "matrix": matrices or data, "parameter": parameters or data}
    return {role: jnp.dtype(d) for role, d in of_role.items()} | {
        name: jnp.dtype(name) for name in ("float32", "int32")
    }


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that a pass takes; each is a sum of products of sizes, as ``"m k + 1/8 k h"``."""

    elements: str  # that it reads or writes, each array once, in the dtype of the data
    nbytes: str = ""  # that it reads and writes besides
    operations: str = ""  # multiplications and additions of its matrix products
    exponentials: str = ""  # where these may take longer than the bytes


def total(terms: str, sizes: Sizes) -> int:
    """The value of a sum of products of sizes."""
    value = lambda factor: sizes[factor] if factor in sizes else Fraction(factor)
    products = (term.split() for term in terms.split("+") if term)
    return math.ceil(sum(math.prod(map(value, factors)) for factors in products))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape at which an op is timed."""

    sizes: tuple[int, ...]  # of the axes, in the order of the case's
    dtype: str = "bfloat16"  # of the data
    word: str = ""  # what the tables add to the shape for the options
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # beside the case's


@dataclasses.dataclass(frozen=True)
class Errors:
    """The sizes at which an op's errors are measured."""

    sizes: tuple[int, ...]  # of the axes, in the order of the case's
    small: tuple[int, ...] | None  # for a machine without a GPU, where None leaves the case out
    # The tolerances of another library's test, relative and absolute: the ledger gives the share of
    # the result's errors beyond their sum, and nothing of gradients.
    bound: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """An op, called in one way."""

    op: str  # its public name
    variant: str = ""  # what is special about the call
    axes: str  # their names, in the order in which tables write a shape
    arguments: Arguments  # the arrays that it takes
    # The axes of its first result, "" for one number, where they are not the first argument's.
    result: str | None = None
    # The axes over which a mesh may split a call, each alone, with no gather; the arrays may be
    # split over any other, and are gathered, but for a sequence.
    split: str = ""
    # The collectives of value and gradient, beside sums over devices, by name: where L is split
    # (None where a split L is gathered), and where the features of a norm are, if `split` has "d".
    sequence: Mapping[str, int] | None = None
    features: Mapping[str, int] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by keyword
    # ``run(*arrays, implementation=..., **options)``, where that is not the op itself.
    run: Callable[..., Any] | None = None
    # The op as a user would write it, in the dtypes of the arguments; it shares no code with the
    # op. In float64 it is the truth.
    expression: Callable[..., Any] | None = None
    forward: Cost | None = None
    backward: Cost | None = None  # without it the op is not differentiated
    # The passes that are timed. Where others compute the gradient in the forward, backward alone
    # compares with nothing.
    passes: Sequence[str] = ("forward", "both", "backward")
    # Makers of other libraries' functions of the same arrays, by the libraries' names.
    peers: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    drawn: bool = False  # whether the result is random, and another library's another one
    shapes: Sequence[Shape] = ()  # at which it is timed
    small: Shape | None = None  # the same for a machine without a GPU
    errors: Errors | None = None
    kernels: bool = True  # whether the op has some for any sizes, if it can be asked for them
    strict: bool = False  # whether tests of strict modes, symbolic shapes and dtypes run it

    @property
    def name(self) -> str:
        """The op, and what is special about the call."""
        return f"{self.op}, {self.variant}" if self.variant else self.op

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @property
    def has_kernels(self) -> bool:
        """Whether the op has implementations to choose from."""
        return self.kernels and self._takes("implementation")

    def _takes(self, keyword: str) -> bool:
        """Whether the op has a parameter that is given by keyword alone; what runs it has any."""
        if self.run is not None:
            return True
        found = inspect.signature(getattr(jaxkern, self.op)).parameters.get(keyword)
        return found is not None and found.kind is inspect.Parameter.KEYWORD_ONLY

    def sizes(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.axes.split(), values, strict=True))

    def types(self, sizes: Sizes, dtypes: Mapping[str, Any]) -> list[jax.ShapeDtypeStruct]:
        return [argument.type(sizes, dtypes) for argument in self.arguments]

    def specs(self, axis: str, over: str, sizes: Sizes) -> tuple[PartitionSpec, ...]:
        """Shardings of arguments and result where the mesh axis `over` splits the case's `axis`."""
        result = self.arguments[0].axes if self.result is None else self.result
        every = [*(a.axes for a in self.arguments), result]
        return tuple(
            PartitionSpec(*(over if name == axis else None for name, _ in dimensions(axes, sizes)))
            for axes in every
        )

    def collectives(self, axis: str) -> dict[str, int]:
        """Number of each collective that value and gradient need, split over `axis`.

        The gradient of an array that does not have the axis is a sum over devices; XLA joins
        several.
        """
        sizes = dict.fromkeys(AXES, 1)
        names = (dict(dimensions(a.axes, sizes)) for a in self.arguments if a.axes)
        sums = {"all-reduce": 1} if any(axis not in of_one for of_one in names) else {}
        of_axis = {"l": self.sequence, "d": self.features}.get(axis)
        return sums | dict(of_axis or {})

    def arrays(self, key: Any, sizes: Sizes, dtypes: Mapping[str, Any]) -> Arrays:
        """Draws the arguments."""
        keys = jax.random.split(key, len(self.arguments))
        return tuple(
            a.draw(k, a.shape(sizes)).astype(dtypes[a.role])
            for k, a in zip(keys, self.arguments, strict=True)
        )

    def call(self, *arrays: Any, implementation: Any = None, **options: Any) -> Any:
        """Calls the op; `options` are beside those of the case.

        Without kernels the op chooses for every `implementation` but plain JAX.
        """
        given = {**self.options, **options}
        if self.has_kernels or (implementation == "xla" and self._takes("implementation")):
            given["implementation"] = implementation
        if self.run is not None:
            return self.run(*arrays, **given)
        named = dict(zip(self.names, arrays, strict=True))
        by_keyword = {name: a for name, a in named.items() if self._takes(name)}
        by_place = (a for name, a in named.items() if name not in by_keyword)
        return getattr(jaxkern, self.op)(*by_place, **by_keyword, **given)


def result_and_gradients(f: Callable[..., Any], arrays: Arrays, dout: Any) -> Any:
    """``f(*arrays)`` and its gradients by all of them, in one tuple."""
    out, vjp = jax.vjp(f, *arrays)
    return out, *vjp(dout)


def truth(case: Case, arrays: Arrays, dout: Any) -> list[np.ndarray]:
    """The result and gradients of the case's expression in float64."""
    assert case.expression is not None
    expression = case.expression
    run = jax.jit(lambda arrays, dout: result_and_gradients(expression, arrays, dout))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = lambda a: jnp.asarray(np.asarray(a).astype(np.float64))
        results = run(tuple(map(wide, arrays)), wide(dout))
        return [np.asarray(r) for r in results]
