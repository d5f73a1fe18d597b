"""A token's arrays as columns of a wider row, in the passes of steps.

A product or a convolution gives several of a step's arrays as neighbouring columns of one row. A
kernel reads them where they are: to copy them out would take another kernel each, as XLA fuses no
slices with a kernel that works in place, and decoding takes as long as it launches kernels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import SplitSequence


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["row"], meta_fields=["first", "rest"]
)
@dataclasses.dataclass(frozen=True)
class Columns:
    """Neighbouring columns of a row, in place of an array.

    Attributes:
      row: (B, width).
      first: the first of the columns.
      rest: dimensions of the array after B.
    """

    row: Any
    first: int
    rest: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> "Columns":
        """Makes an array the columns of a row that has no others."""
        if isinstance(array, Columns):
            return array
        return cls(array.reshape(len(array), math.prod(array.shape[1:])), 0, array.shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.row.shape[:1], *self.rest

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.row.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> "Columns":
        return dataclasses.replace(self, rest=shape[1:])

    def copied(self) -> jax.Array:
        """Copies the columns out."""
        end = self.first + math.prod(self.rest)
        return lax.slice_in_dim(self.row, self.first, end, axis=1).reshape(self.shape)


def copied(args: Any) -> list[Any]:
    """The arguments, of which those that are columns are copied out."""
    return [a.copied() if isinstance(a, Columns) else a for a in args]


def check_columns(check: Callable[..., Any], *args: Any) -> Any:
    """Returns what ``check(*args)`` does, or if some are columns the arguments as they are."""
    if not any(isinstance(a, Columns) for a in args):
        return check(*args)
    jax.eval_shape(lambda *rows: check(*copied(rows)), *args)
    return jax.tree.map(jnp.asarray, args)


@dataclasses.dataclass(frozen=True, eq=False)
class StepPass:
    """The pass of a step, called with its options, arrays and :class:`Columns`.

    The options have `places`, in which it says what of each row is meant. On a mesh each device has
    a whole row, and copies its own columns out of it.

    Attributes:
      name, ins, outs, whole: as of :class:`KernelPass`.
      kernel, kernel_of_slices: those of the pass, but they take columns.
      reference: that of the pass.
      split: the factors over which states may be split, that of groups and another one; of columns
        of several groups the other one is not.
    """

    name: str
    _: dataclasses.KW_ONLY
    kernel: Callable[..., Any]
    kernel_of_slices: Callable[..., Any]
    reference: Callable[..., Any]
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    whole: str
    split: tuple[str, str]

    def __call__(self, options: Any, *args: Any) -> Any:
        places = tuple((a.first, a.rest) if isinstance(a, Columns) else None for a in args)
        arrays = (a.row if isinstance(a, Columns) else a for a in args)
        return self._pass(dataclasses.replace(options, places=places), *arrays)

    @functools.cached_property
    def _pass(self) -> KernelPass:
        return KernelPass(
            self.name,
            kernel=functools.partial(_with_columns, self.kernel),
            kernel_of_slices=functools.partial(_with_columns, self.kernel_of_slices),
            reference=functools.partial(_with_copies, self.reference),
            ins=self._ins,
            outs=self.outs,
            whole=self._whole,
            sequence=self._sequence,
        )

    def _ins(self, options: Any) -> tuple[str, ...]:
        named = zip(self.ins, options.places, strict=True)
        return tuple(f"b row{i}" if place else ins for i, (ins, place) in enumerate(named))

    def _whole(self, options: Any) -> str:
        factor = self._factor(options)
        others = [f for f in self.split if factor not in (None, f)]
        return " ".join([self.whole, *others, *(f"row{i}" for i in range(len(self.ins)))])

    def _factor(self, options: Any) -> str | None:
        """The factor over which states may be split; ``None`` where nothing is columns."""
        groups = [place[1][0] for place in options.places if place]
        return self.split[0 if groups[0] > 1 else 1] if groups else None

    def _sequence(self, options: Any) -> SplitSequence | None:
        if (factor := self._factor(options)) is None:
            return None
        axes = [f.split().index(factor) if factor in f.split() else None for f in self.ins]
        return SplitSequence(functools.partial(_on_part, axes), factor=factor)


def _columns(options: Any, args: tuple[Any, ...]) -> list[Any]:
    return [Columns(a, *p) if p else a for a, p in zip(args, options.places, strict=True)]


def _with_columns(f: Callable[..., Any], options: Any, *args: Any) -> Any:
    return f(options, *_columns(options, args))


def _with_copies(f: Callable[..., Any], options: Any, *args: Any) -> Any:
    return f(options, *copied(_columns(options, args)))


def _on_part(axes: list[int | None], run: Any, over: Any, options: Any, *args: Any) -> Any:
    """Computes a device's part, of arrays that are split along `axes`."""

    def own(given: Any, axis: int | None) -> Any:
        if not isinstance(given, Columns):
            return given
        array = given.copied()
        if axis is None:
            return array
        size = array.shape[axis] // lax.axis_size(over)
        return lax.dynamic_slice_in_dim(array, lax.axis_index(over) * size, size, axis)

    arrays = map(own, _columns(options, args), axes)
    return run(dataclasses.replace(options, places=(None,) * len(args)), *arrays)
