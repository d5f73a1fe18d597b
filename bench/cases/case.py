"""The description of an op for everything but the op itself: tests, bench, ledger, doctor, pages.

A :class:`Case` is an op called in one way. Its axes have names, and whoever reads it gives them
sizes: the tests small ones, the bench those of models.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
    """An array that an op takes.

    Attributes:
      name: what the reader calls it, and the op if it takes it by keyword alone.
      axes: names of its axes, or their sizes, as in ``"m 2h"``.
      draw: ``draw(key, shape)``, in float32.
      role: its part in a model, by which a reader chooses its dtype: ``"data"``, ``"matrix"``,
        ``"parameter"``; ``"float32"`` or ``"int32"`` for what always has that dtype.
    """

    name: str
    axes: str
    draw: Callable[[Any, tuple[int, ...]], jax.Array] = normal
    role: str = "data"

    def shape(self, sizes: Sizes) -> tuple[Any, ...]:
        """The shape for axes of these sizes."""
        return tuple(size for _, size in dimensions(self.axes, sizes))

    def type(self, sizes: Sizes, dtypes: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        """Shape and dtype, by :func:`dtypes`."""
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
    """The least that a pass takes; each is a sum of products of sizes, as ``"m k + k h"``.

    Attributes:
      elements: that it reads or writes, each array once, in the dtype of the data.
      nbytes: that it reads and writes besides.
      operations: multiplications and additions of its matrix products.
      exponentials: where these may take longer than the bytes.
    """

    elements: str
    nbytes: str = ""
    operations: str = ""
    exponentials: str = ""


def total(terms: str, sizes: Sizes) -> int:
    """The value of a sum of products of sizes."""
    value = lambda factor: sizes[factor] if factor in sizes else int(factor)
    products = (term.split() for term in terms.split("+") if term)
    return sum(math.prod(map(value, factors)) for factors in products)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape at which an op is timed.

    Attributes:
      sizes: of the axes, in the order of the case's.
      dtype: of the data.
      word: what the tables add to the shape for the `options`.
      options: of the call, beside the case's.
    """

    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    word: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Errors:
    """The sizes at which an op's errors are measured.

    Attributes:
      sizes: of the axes, in the order of the case's.
      small: the same for a machine without a GPU; ``None`` leaves the case out there.
      bound: of another library's test, relative and absolute: the share of errors beyond their
        sum is told of the result, and nothing of gradients.
    """

    sizes: tuple[int, ...]
    small: tuple[int, ...] | None
    bound: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """An op, called in one way.

    Attributes:
      op: its public name.
      variant: what is special about the call.
      axes: names of the axes, in the order in which tables write a shape.
      arguments: the arrays that it takes.
      result: names of the axes of its first result, ``""`` for one number, where they are not those
        of the first argument.
      split: the axes over which a mesh may split a call, each alone, with no gather; the arrays may
        be split over any other, and are gathered, but for a sequence.
      sequence: the collectives of value and gradient where L is split, beside sums over devices, by
        name; ``None`` where a split L is gathered.
      features: those of a norm whose rows are split, if `split` has ``d``.
      options: its other arguments, by keyword.
      run: ``run(*arrays, implementation=..., **options)``, where that is not the op itself.
      expression: what a user would write, in the dtypes of the arguments; it shares no code with
        the op. In float64 it is the truth.
      forward, backward: the cost of the passes; without a backward the op is not differentiated.
      passes: those that are timed. Where others compute the gradient in the forward, backward alone
        compares with nothing.
      peers: what makes another library's function of the same arrays, by the library's name.
      drawn: whether the result is random, and another library's another one.
      shapes: at which it is timed.
      small: the same for a machine without a GPU.
      errors: where its errors are measured.
      kernels: whether the op has kernels for any sizes, if it can be asked for them.
      strict: whether the tests of JAX's strict modes, symbolic shapes and dtypes run it.
    """

    op: str
    variant: str = ""
    axes: str
    arguments: tuple[Argument, ...]
    result: str | None = None
    split: str = ""
    sequence: Mapping[str, int] | None = None
    features: Mapping[str, int] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: Callable[..., Any] | None = None
    expression: Callable[..., Any] | None = None
    forward: Cost | None = None
    backward: Cost | None = None
    passes: Sequence[str] = ("forward", "both", "backward")
    peers: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    drawn: bool = False
    shapes: Sequence[Shape] = ()
    small: Shape | None = None
    errors: Errors | None = None
    kernels: bool = True
    strict: bool = False

    @property
    def name(self) -> str:
        """The op, and what is special about the call."""
        return f"{self.op}, {self.variant}" if self.variant else self.op

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(argument.name for argument in self.arguments)

    @property
    def has_kernels(self) -> bool:
        """Whether the op has implementations to choose from."""
        return self.kernels and self._takes_implementation

    @property
    def _takes_implementation(self) -> bool:
        return self.run is not None or "implementation" in self._parameters

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(getattr(jaxkern, self.op)).parameters

    def sizes(self, values: Sequence[Any]) -> dict[str, Any]:
        """The sizes of the axes by name."""
        return dict(zip(self.axes.split(), values, strict=True))

    def types(self, sizes: Sizes, dtypes: Mapping[str, Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments' shapes and dtypes."""
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
        names = [
            {name for name, _ in dimensions(a.axes, dict.fromkeys(AXES, 1))}
            for a in self.arguments
            if a.axes
        ]
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
        if self.has_kernels or (implementation == "xla" and self._takes_implementation):
            given["implementation"] = implementation
        if self.run is not None:
            return self.run(*arrays, **given)
        parameters = self._parameters
        named = [
            name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            for name in self.names
        ]
        by_keyword = {n: a for n, a, k in zip(self.names, arrays, named, strict=True) if k}
        by_place = [a for a, k in zip(arrays, named, strict=True) if not k]
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
