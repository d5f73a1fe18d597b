"""One pass of an op: a GPU kernel and its plain-JAX twin, under every JAX transformation.

A :class:`KernelPass` is a constant of its op's module. ``FORWARD(options, *arrays)`` runs its
kernel where the program is lowered for an NVIDIA GPU and its reference elsewhere. One line names
the dimensions of every array: ``"... n", "n" -> "... n", "..."``. Each name is a *factor*, and
``...`` stands for any number of them. From that line follows what JAX needs, in the order in
which a call goes through the functions below:

1. ``_differentiable``, a ``custom_jvp``. An op's rules (:mod:`jaxkern.core.derivatives`) give
   its first derivative; the second, and forward mode, differentiate the passes themselves, which
   is to differentiate ``reference``.
2. ``_batchable``, a ``custom_vmap``: under ``vmap`` the batched arrays have one more factor, in
   front.
3. ``_on_mesh``, ``shard_map`` where the mesh has Explicit axes and ``custom_partitioning`` (a
   Shardy rule) where it has Auto ones: without them the compiler would gather the kernel's
   operands. A factor may be split between devices unless it is in ``whole``.
4. ``_part``, what one device computes. An output that lacks a split factor is a sum over it, so the
   devices' outputs are added (``psum``). Where a sequence is split, along which something is
   carried, ``sequence`` says what the devices hand to each other. Inside a user's ``shard_map`` the
   options name the axes, ``sequence_axis``, and sums over these are left to the caller.
5. ``_on_device``, one operation that becomes kernel or reference when the program is lowered
   (:mod:`jaxkern.core.kernel_call`).

The results of a forward pass have a name, the op's, by which the policies of ``jax.checkpoint``
keep them or drop them: what the backward needs beside the arguments, and the output itself.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from jaxkern.core.bound import Arrays, Bound, identity
from jaxkern.core.dispatch import Mode
from jaxkern.core.kernel_call import kernel_call, result_types, warn_once
from jaxkern.core.mesh import (
    MeshAxes,
    Partial,
    SplitSequence,
    partition_spec,
    spec_of,
    split_factors,
    vary_over,
    varying,
)
from jaxkern.core.target import interpreter

type OfOptions[T] = T | Callable[[Any], T]
"""A value, or a function of a pass's options that gives it."""


@dataclasses.dataclass(frozen=True, eq=False)
class KernelPass:
    """A pass of an op, called with options and arrays; ``None`` is an absent optional array.

    The options are what is compiled in: a frozen dataclass of numbers, texts, dtypes and functions
    of modules. Its ``mode`` says what runs, from :func:`jaxkern.core.dispatch.resolve`, and
    ``alone``, if it has that, whether the pass is a part of another one's plain JAX.

    Attributes:
      name: for messages, e.g. ``"rms_norm_bwd"``; ``{op}`` in it is the options' ``op``.
      reference: the pass in plain JAX, differentiable, ``reference(options, *arrays)``; a tuple
        with one entry per output (``None`` for an absent one).
      kernel: the same by a GPU kernel, which it launches on the arrays of one device; ``None`` for
        a pass that is plain JAX everywhere, of what JAX itself would not split on a mesh.
      ins: the factors of each argument, one name per dimension: ``("... n", "n")``; those that
        ``...`` stands for are .0, .1 and so on.
      outs: the factors of each output.
      whole: factors that are not split between devices; a split one is gathered first.
      sequence: how a device computes its part where a factor is split along which something is
        carried; ``None`` where such a factor is in `whole`. Arrays may have it in chunks, whose
        number divides between the devices as the tokens do.
      partial: what a device computes where an output is a sum over devices, if that is not the pass
        itself on its part (a product without what is added to it).
      kernel_of_slices: `kernel` for what ``vmap`` gives it, slices of arrays, which begin wherever
        the one before ends; by default `kernel`.
      faster: says by the types of one device's arrays whether the kernel is measured to be faster
        for them; where it is not, ``implementation=None`` takes the reference. By default it is.
      unfit: says by the types of one device's arrays why the kernel cannot run on the GPU that the
        program is lowered for, :func:`jaxkern.core.target.current`; ``None`` where it can.
      batched: whether the kernel can run under ``vmap``; if not, the reference does.
      saved_as: the results' name for the policies of ``jax.checkpoint``; by default ``"rms_norm"``
        of a pass ``"rms_norm_fwd"``, and none of other passes.
    """

    name: str
    _: dataclasses.KW_ONLY
    reference: Callable[..., Arrays]
    kernel: Callable[..., Arrays] | None = None
    ins: OfOptions[tuple[str, ...]]
    outs: OfOptions[tuple[str, ...]]
    whole: OfOptions[str] = ""
    sequence: OfOptions[SplitSequence | None] = None
    partial: OfOptions[Partial | None] = None
    kernel_of_slices: Callable[..., Arrays] | None = None
    faster: Callable[..., bool] | None = None
    unfit: Callable[..., str | None] | None = None
    batched: bool = True
    saved_as: str | None = None

    def __call__(self, options: Any, *args: Any) -> Arrays:
        split = self.kernel or self.sequence  # any other plain JAX is XLA's to split
        call, types = self.bind(options, args, getattr(options, "mode", "auto") if split else "xla")
        full = call.full(types, _differentiable(call), args)
        saved_as = self.saved_as
        if saved_as is None and call.name.endswith("_fwd"):
            saved_as = call.name.removesuffix("_fwd")
        return named(saved_as, full) if saved_as else full

    def bind(self, options: Any, args: Arrays, mode: Mode) -> "tuple[PassCall, Arrays]":
        """Makes the function of those arrays that are given; also returns its results' types."""
        name = self.name.format(op=getattr(options, "op", ""))
        ins = of_options(self.ins, options)
        if len(args) != len(ins):
            raise TypeError(f"{name} takes {len(ins)} arrays, got {len(args)}")
        given = {i: a for i, a in enumerate(args) if a is not None}
        ranks = (a.ndim - len(ins[i].split()) + 1 for i, a in given.items() if "..." in ins[i])
        reference = Bound(self.reference, options, len(args), tuple(given))
        types = result_types(reference, *given.values())
        call = PassCall(
            of=self,
            name=name,
            options=options,
            mode=mode,
            arguments=len(args),
            present=tuple(given),
            results=tuple(i for i, t in enumerate(types) if t is not None),
            rank=next(ranks, 0),
            alone=getattr(options, "alone", False),
        )
        return call, types


def of_options(value: Any, options: Any) -> Any:
    """Evaluates `value` for a pass's options, of which it may be a function."""
    return value(options) if callable(value) else value


type Factors = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PassCall:
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

    of: KernelPass
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
        """Results of `f`, ``None`` where absent; `f` takes and gives only what is present."""
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

        A sequence that cannot be split so is gathered, with a warning.
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
        """Reason why the whole `arrays` cannot be split into `parts`; ``None`` where they can."""
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

    def summed_by(self, partial: Partial) -> "PassCall":
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


def named(op: str, outs: Any) -> Any:
    """Names `outs` for the policies of ``jax.checkpoint``, which find by it what `op` computed."""
    return jax.tree.map(lambda a: checkpoint_name(a, op), outs)


# 1. Derivatives


@functools.lru_cache(maxsize=4096)
def _differentiable(call: PassCall) -> Callable[..., Arrays]:
    f = jax.custom_jvp(_batchable(call))

    @f.defjvp
    def jvp(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        plain = dataclasses.replace(call, mode="xla")
        return jax.jvp(functools.partial(_on_mesh, plain), primals, tangents)

    return f


# 2. vmap


def _batchable(call: PassCall) -> Callable[..., Arrays]:
    f = custom_vmap(lambda *arrays: _on_mesh(call, *arrays))

    @f.def_vmap
    def vmap(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        if not call.of.batched and call.mode in ("mosaic", "interpret"):
            raise NotImplementedError(
                f'{call.name}: implementation="mosaic" cannot take this call: the kernel has '
                'no vmap. Use implementation="xla", or None to have it chosen.'
            )
        axes = tuple(0 if b else None for b in in_batched)
        mode = call.mode if call.of.batched and axis_size else "xla"  # no grid is of size 0
        inner = dataclasses.replace(call, mode=mode, in_axes=(*call.in_axes, axes))
        return _batchable(inner)(*arrays), tuple(True for _ in call.results)

    return f


# 3. Meshes


def _on_mesh(call: PassCall, *arrays: Any) -> Arrays:
    if call.alone:
        return _on_device(call, *arrays)
    if call.sequence_axis:
        call.check_parts(arrays)
    meshes = [jax.typeof(a).sharding.mesh for a in arrays]
    explicit = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    if explicit is not None:
        return _on_explicit_mesh(call, explicit, arrays)
    on_one = any(AxisType.Manual in m.axis_types for m in meshes)
    if call.of.kernel is None:  # its operations know the mesh that is set, if its arrays do not
        on_one |= bool(jax.sharding.get_abstract_mesh().explicit_axes)
    if call.sequence_axis:
        return _part(call, ())(*arrays)
    if on_one or call.mode in ("xla", "interpret"):  # XLA splits "xla", and cannot the interpreter
        return _on_device(call, *arrays)
    return _on_auto_mesh(call, jax.config.jax_default_matmul_precision)(*arrays)


def _on_explicit_mesh(call: PassCall, mesh: Any, arrays: Arrays) -> Arrays:
    axes = call.split_over(mesh, [jax.typeof(a).sharding.spec for a in arrays], arrays)
    in_specs = tuple(partition_spec(factors, axes) for factors in call.ins)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = {name for name, kind in kinds.items() if kind != AxisType.Manual}
    on_devices = jax.shard_map(
        _part(call, tuple(axes.items())),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(partition_spec(factors, axes) for factors in call.outs),
        # Where all axes are named, jax.vmap cannot map over one that the mesh splits.
        axis_names=others if len(others) < len(kinds) else frozenset(),
    )
    shardings = [NamedSharding(mesh, spec) for spec in in_specs]
    return on_devices(*map(jax.sharding.reshard, arrays, shardings))


@functools.lru_cache(maxsize=4096)
def _on_auto_mesh(call: PassCall, precision: str | None) -> Callable[..., Arrays]:
    """Has the compiler split a pass between devices.

    In the program's text there is a pointer where the kernel will be once the arrays are split.
    Whoever keeps compiled programs must distinguish two passes without it, as JAX does under
    ``jax_remove_custom_partitioning_ptr_from_cache_key``: so the name of the function around it
    depends on all that the pass depends on.
    """
    ins, outs = call.ins, call.outs

    def partition(mesh: Any, arg_shapes: Arrays, result_shapes: Arrays):
        del result_shapes
        axes = call.split_over(mesh, [spec_of(a.sharding) for a in arg_shapes], arg_shapes)
        sharding = lambda factors: NamedSharding(mesh, partition_spec(factors, axes))
        part = _part(call, tuple(axes.items()))
        return mesh, part, tuple(map(sharding, outs)), tuple(map(sharding, ins))

    letters = lambda factor: factor.replace(".", "axis")
    side = lambda arrays: ", ".join(" ".join(map(letters, factors)) for factors in arrays)
    in_order = dict.fromkeys(f for factors in (*ins, *outs) for f in factors)
    whole = tuple(f for f in in_order if f in call.whole)  # Shardy wants them as they appear
    split = custom_partitioning(lambda *arrays: _on_device(call, *arrays))
    split.def_partition(
        partition=partition,
        sharding_rule=f"{side(ins)} -> {side(outs)}",
        need_replication_factors=tuple(map(letters, whole)),
    )

    def pass_on_mesh(*arrays: Any) -> Arrays:
        return split(*arrays)

    summed = call.partial and call.summed_by(call.partial)
    summed = summed and (summed.kernel, summed.reference)
    identified = identity(
        call.reference,
        call.of.kernel and call.kernel,
        summed,
        call.mode,
        ins,
        outs,
        whole,
        precision,
    )
    pass_on_mesh.__name__ = f"{call.name}_{hashlib.sha256(identified.encode()).hexdigest()[:12]}"
    return jax.jit(pass_on_mesh)


# 4. One device's part


@functools.lru_cache(maxsize=4096)
def _part(call: PassCall, axes: tuple[tuple[str, tuple[str, ...]], ...]) -> Callable[..., Arrays]:
    """Makes the function of one device, of a pass that is split over mesh axes.

    It is the same function each time, so that JAX traces it once and not for every call that the
    compiler partitions.
    """
    sums = [
        tuple(n for f, names in axes if f not in factors for n in names) for factors in call.outs
    ]
    partial = call.partial if any(sums) else None
    summed = call.summed_by(partial) if partial else call
    sequence, in_parts = call.sequence, None
    over = dict(axes).get(sequence.factor, call.sequence_axis) if sequence else ()
    if sequence and over:
        run = functools.partial(_alone, call)
        in_parts = call.bound(functools.partial(sequence.part, run, over))

    def part(*arrays: Any) -> Arrays:
        if in_parts and lax.axis_size(over) > 1:
            outs = in_parts(*arrays)
        else:
            outs = _on_device(summed, *arrays)
        outs = tuple(lax.psum(o, n) if n else o for o, n in zip(outs, sums, strict=True))
        return call.finish(partial, arrays, outs) if partial else outs

    return part


def _alone(outer: PassCall, options: Any, *args: Any, of: KernelPass | None = None) -> Arrays:
    """Computes the pass of `outer`, or another one, on what this device has."""
    call, types = (of or outer.of).bind(options, args, outer.mode)
    call = dataclasses.replace(call, alone=True)
    f = functools.partial(_on_device, call) if call.mode == "xla" else _batchable(call)
    return call.full(types, f, args)


# 5. Kernel or reference


def _on_device(call: PassCall, *arrays: Any) -> Arrays:
    """Computes the pass on the arrays of one device."""
    # All inputs vary alike, or a derivative taken inside the reference would already sum over the
    # devices; all outputs do, as a kernel's vary over nothing by their type.
    axes = varying(*arrays)
    arrays = tuple(vary_over(a, axes) for a in arrays)
    mode, faster, unfit = call.mode, call.of.faster, call.of.unfit
    mode = mode if call.of.kernel else "xla"
    if mode == "auto" and faster and not call.bound(faster).of_types(*arrays):
        mode = "xla"
    match mode:
        case "xla":
            outs = call.reference(*arrays)
        case "interpret":
            with interpreter():
                outs = call.kernel(*arrays)
        case "mosaic" | "auto":
            why_not = call.bound(unfit) if unfit else None
            required = mode == "mosaic"
            outs = kernel_call(call.name, call.kernel, call.reference, why_not, required, *arrays)
    return tuple(vary_over(o, axes) for o in outs)
