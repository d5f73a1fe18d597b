"""A pass with its options and the arrays that are present, as one function of these arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import MeshAxes, split_factors
from jaxkern.core.split import Partial
from jaxkern.core.split import Sequence as SplitSequence
from jaxkern.lowering.bound import Arrays, Bound
from jaxkern.lowering.kernel_call import warn_once

if TYPE_CHECKING:
    from jaxkern.core.kernel_pass import KernelPass


def of_options(value: Any, options: Any) -> Any:
    """What `value` is for a pass's options, of which it may be a function."""
    return value(options) if callable(value) else value


type Factors = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A pass with its options, as a function of those arrays that are present.

    Equal ones are one function to JAX, which so traces and lowers a pass once for all layers of a
    model.

    Attributes:
      of: the pass.
      name: its name, for messages.
      options: compiled in.
      mode: what runs.
      arguments: how many arrays the pass takes.
      present: which of them are not ``None``.
      results: which of the results are not ``None``.
      rank: how many factors ``...`` stands for.
      in_axes: of the ``vmap``s around the call, from the inside out: 0 or ``None`` for each array.
      alone: whether another pass, which is split between devices, calls it: it is then computed on
        the arrays of this device, and not split again.
    """

    of: "KernelPass"
    name: str
    options: Any
    mode: Mode
    arguments: int
    present: tuple[int, ...]
    results: tuple[int, ...]
    rank: int
    in_axes: tuple[tuple[int | None, ...], ...] = ()
    alone: bool = False

    def full(self, types: Arrays, f: Callable[..., Arrays], args: Arrays) -> Arrays:
        """All results of `f`, which takes and gives those that are not ``None``."""
        outs = iter(f(*(a for a in args if a is not None)))
        return tuple(None if t is None else next(outs) for t in types)

    @property
    def kernel(self) -> Bound:
        return self.bound((self.in_axes and self.of.kernel_of_slices) or self.of.kernel)

    @property
    def reference(self) -> Bound:
        return self.bound(self.of.reference)

    def bound(self, f: Any) -> Bound:
        """Binds a function of the pass to the options and the present arrays."""
        return Bound(f, self.options, self.arguments, self.present, self.in_axes)

    @property
    def ins(self) -> Factors:
        """The factors of each present array; a ``vmap`` adds one to those that it batches."""
        factors = [self._factors(of_options(self.of.ins, self.options)[i]) for i in self.present]
        for n, axes in enumerate(self.in_axes):
            pairs = zip(factors, axes, strict=True)
            factors = [f if axis is None else (f"vmap{n}", *f) for f, axis in pairs]
        return tuple(factors)

    @property
    def outs(self) -> Factors:
        """The factors of each present result; a ``vmap`` adds one to all."""
        vmaps = [f"vmap{n}" for n in reversed(range(len(self.in_axes)))]
        outs = of_options(self.of.outs, self.options)
        return tuple((*vmaps, *self._factors(outs[i])) for i in self.results)

    def _factors(self, names: str) -> tuple[str, ...]:
        ellipsis = " ".join(f".{i}" for i in range(self.rank))
        return tuple(names.replace("...", ellipsis).split())

    @property
    def sequence(self) -> SplitSequence | None:
        return of_options(self.of.sequence, self.options)

    @property
    def sequence_axis(self) -> tuple[str, ...]:
        """The axes of a ``shard_map`` around the call over which its caller split the sequence."""
        return getattr(self.options, "sequence_axis", ())

    @property
    def whole(self) -> frozenset[str]:
        whole = frozenset(of_options(self.of.whole, self.options).split())
        if self.sequence is None:
            return whole
        factor = {self.sequence.factor}
        return whole | factor if self.sequence_axis else whole - factor

    def split_over(self, mesh: Any, specs: Sequence[Any], arrays: Sequence[Any]) -> MeshAxes:
        """Chooses the axes of a mesh over which each factor is split, by the arrays' `specs`.

        A sequence that cannot be in so many parts is gathered, with a warning.
        """
        sizes, shapes = dict(mesh.shape), [a.shape for a in arrays]
        axes = split_factors(sizes, self.ins, self.whole, specs, shapes)
        sequence = self.sequence
        if sequence is None or sequence.factor not in axes:
            return axes
        over = axes[sequence.factor]
        parts = math.prod(sizes[name] for name in over)
        if (reason := self._unfit(sequence, parts, arrays)) is None:
            return axes
        warn_once(
            f"{self.name} gathers what is split over {parts} devices of the mesh's "
            f"{', '.join(over)}: {reason}"
        )
        return split_factors(sizes, self.ins, self.whole | {sequence.factor}, specs, shapes)

    def _unfit(self, sequence: SplitSequence, parts: int, arrays: Sequence[Any]) -> str | None:
        """Tells why the whole `arrays` cannot be in so many parts; ``None`` where they can."""
        unfit = self.bound(lambda options, *types: sequence.unfit(options, parts, *types))
        return unfit.of_types(*arrays)

    def check_parts(self, arrays: Sequence[Any]) -> None:
        """Checks that the devices' parts of arrays, split over `sequence_axis`, fit together."""
        sequence, parts = self.sequence, lax.axis_size(self.sequence_axis)
        if sequence is None:
            return

        def whole(array: Any, factors: tuple[str, ...]) -> Any:
            counts = (parts if factor == sequence.factor else 1 for factor in factors)
            shape = (size * n for size, n in zip(array.shape, counts, strict=True))
            return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

        if reason := self._unfit(sequence, parts, [*map(whole, arrays, self.ins)]):
            axes = ", ".join(self.sequence_axis)
            raise ValueError(
                f"{self.name}: sequence_axis {axes} splits L over {parts} devices, but {reason}. "
                "Pad the sequence, split it over fewer devices, or gather it first, by "
                "jax.lax.all_gather(..., axis=1, tiled=True), and leave sequence_axis out"
            )

    @property
    def partial(self) -> Partial | None:
        return of_options(self.of.partial, self.options)

    def summed_by(self, partial: Partial) -> "Call":
        """Makes a call of the first step of `partial`."""
        of = self.of
        of = dataclasses.replace(
            of,
            kernel=partial.kernel or of.kernel,
            kernel_of_slices=None if partial.kernel else of.kernel_of_slices,
            reference=partial.reference or of.reference,
        )
        return dataclasses.replace(self, of=of, options=partial.options(self.options))

    def finish(self, partial: Partial, arrays: Arrays, sums: Arrays) -> Arrays:
        """Does the second step of `partial`."""
        results = len(of_options(self.of.outs, self.options))
        return Bound(
            partial.finish,
            self.options,
            self.arguments + results,
            (*self.present, *(self.arguments + i for i in self.results)),
            tuple((*axes, *(0 for _ in sums)) for axes in self.in_axes),
        )(*arrays, *sums)
