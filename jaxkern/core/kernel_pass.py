"""One pass of an op: a GPU kernel and its plain-JAX twin, under every JAX transformation.

A :class:`KernelPass` is a constant of its op's module. ``FORWARD(options, *arrays)`` runs its
kernel where the program is lowered for an NVIDIA GPU and its reference elsewhere. From one line
that names the dimensions of every array (``"... n", "n" -> "... n", "..."``; each name is a
*factor*, and ``...`` any number of them) it derives how the pass behaves

* on a mesh: a factor may be split between devices unless it is in ``whole``; an output that lacks
  a split factor is a sum over it, so the devices' parts are added (``psum``);
* under ``vmap``: a new leading factor on the batched arrays;
* under differentiation (an op's ``custom_vjp`` covers the first order; the second differentiates
  the passes themselves): the derivative of ``reference``.

From the inside out, a call goes through

1. ``local``: one operation on a device's arrays, which becomes kernel or reference when the program
   is lowered (:mod:`jaxkern.lowering.kernel_call`);
2. ``on_mesh``: ``shard_map`` where the mesh has Explicit axes, ``custom_partitioning`` (a Shardy
   rule) for Auto ones; without them the compiler would gather the kernel's operands;
3. ``batchable``: ``custom_vmap``, as ``custom_partitioning`` has no batching rule;
4. ``differentiable``: ``custom_jvp``, as neither of those can be differentiated.

The results of a forward pass have a name, the op's, by which the policies of ``jax.checkpoint``
keep them or drop them: what the backward needs beside the arguments, and the output itself.
"""

import dataclasses
import functools
import hashlib
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import MeshAxes, partition_spec, spec_of, split_factors, vary_over, varying
from jaxkern.lowering.kernel_call import (
    Bound,
    Local,
    describe,
    kernel_call,
    placed,
    result_types,
    standard_promotion,
    surroundings,
)
from jaxkern.mosaic.launch import interpreter

Arrays = tuple[Any, ...]
type OfOptions[T] = T | Callable[[Any], T]
"""A value, or a function of a pass's options that gives it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A pass in two steps around the sum over devices.

    Attributes:
      finish: ``finish(options, *arrays, *sums)``, the arrays those of the pass, gives its results.
      kernel, reference: give what is summed, as many arrays as the pass and shaped like them; by
        default the pass's own.
      options: gives, of the pass's options, those of `kernel` and `reference`.
    """

    finish: Callable[..., Arrays]
    kernel: Callable[..., Arrays] | None = None
    reference: Callable[..., Arrays] | None = None
    options: Callable[[Any], Any] = lambda options: options


@dataclasses.dataclass(frozen=True, eq=False)
class KernelPass:
    """A pass of an op, called with options and arrays; ``None`` is an absent optional array.

    The options are what is compiled in: a frozen dataclass of numbers, texts, dtypes and functions
    of modules. Its ``mode`` says what runs, from :func:`jaxkern.core.dispatch.resolve`.

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
      partial: what a device computes where an output is a sum over devices, if that is not the pass
        itself on its part (a product without what is added to it).
      kernel_of_slices: `kernel` for what ``vmap`` gives it, slices of arrays, which begin wherever
        the one before ends; by default `kernel`.
      faster: tells of the types of one device's arrays whether the kernel is measured to be faster
        for them; where it is not, ``implementation=None`` takes the reference. By default it is.
      unfit: tells of the types of one device's arrays why the kernel cannot run on the GPU that the
        program is lowered for, :func:`jaxkern.lowering.target.current`; ``None`` where it can.
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
    partial: OfOptions[Partial | None] = None
    kernel_of_slices: Callable[..., Arrays] | None = None
    faster: Callable[..., bool] | None = None
    unfit: Callable[..., str | None] | None = None
    batched: bool = True
    saved_as: str | None = None

    def __call__(self, options: Any, *args: Any) -> Arrays:
        def of_options(value: Any) -> Any:
            return value(options) if callable(value) else value

        name = self.name.format(op=getattr(options, "op", ""))
        ins, outs = of_options(self.ins), of_options(self.outs)
        if len(args) != len(ins):
            raise TypeError(f"{name} takes {len(ins)} arrays, got {len(args)}")
        here = tuple(i for i, a in enumerate(args) if a is not None)
        arrays = [args[i] for i in here]
        rank = _ellipsis_rank([ins[i] for i in here], arrays)

        def bound(f: Callable[..., Any], options: Any = options) -> Bound:
            return Bound.of(functools.partial(f, options))

        def local(f: Callable[..., Any], options: Any = options) -> Local:
            return Local(bound(f, options), len(args), here)

        out_types = result_types(local(self.reference), *arrays)
        out_here = tuple(i for i, o in enumerate(out_types) if o is not None)
        count = len(out_types)
        kernel = self.kernel or self.reference
        partial: Partial | None = of_options(self.partial)
        present = _Present(
            name=name,
            mode=options.mode if self.kernel else "xla",
            kernel=local(kernel),
            kernel_of_slices=local(self.kernel_of_slices or kernel),
            reference=local(self.reference),
            ins=tuple(_factors(ins[i], rank) for i in here),
            outs=tuple(_factors(outs[i], rank) for i in out_here),
            whole=frozenset(of_options(self.whole).split()),
            partial=partial
            and _PresentPartial(
                kernel=local(partial.kernel or kernel, partial.options(options)),
                reference=local(partial.reference or self.reference, partial.options(options)),
                finish=_Finish(bound(partial.finish), len(args), here, count, out_here),
            ),
            faster=local(self.faster) if self.faster else None,
            unfit=local(self.unfit) if self.unfit else None,
            batched=self.batched,
        )
        results = _differentiable(present)(*arrays)
        full = tuple(placed(results, out_here, count))
        op = name.removesuffix("_fwd") if name.endswith("_fwd") else None
        op = self.saved_as.format(op=getattr(options, "op", "")) if self.saved_as else op
        return named(op, full) if op else full


def _ellipsis_rank(ins: Sequence[str], arrays: Sequence[Any]) -> int:
    """How many factors ``...`` stands for."""
    for factors, array in zip(ins, arrays, strict=True):
        if "..." in factors:
            return array.ndim - len(factors.split()) + 1
    return 0


def _factors(names: str, rank: int) -> tuple[str, ...]:
    return tuple(
        factor
        for name in names.split()
        for factor in ([f".{i}" for i in range(rank)] if name == "..." else [name])
    )


@dataclasses.dataclass(frozen=True)
class _Finish:
    """A :class:`Partial`'s `finish` as a function of the present arrays and the present sums."""

    function: Bound
    arguments: int
    present: tuple[int, ...]
    results: int
    sums: tuple[int, ...]
    in_axes: tuple[tuple[int | None, ...], ...] = ()

    def __call__(self, *arrays: Any) -> Arrays:
        call = self._of_one
        for axes in self.in_axes:
            call = jax.vmap(call, axes)
        with standard_promotion():
            return call(*arrays)

    def _of_one(self, *arrays: Any) -> Arrays:
        count = len(self.present)
        full = placed(arrays[:count], self.present, self.arguments)
        outs = self.function(*full, *placed(arrays[count:], self.sums, self.results))
        return tuple(outs[i] for i in self.sums)


@dataclasses.dataclass(frozen=True)
class _PresentPartial:
    """A :class:`Partial` over present arrays only."""

    kernel: Local
    reference: Local
    finish: _Finish

    def batched(self, in_axes: tuple[int | None, ...]) -> "_PresentPartial":
        finish_axes = (*in_axes, *(0 for _ in self.finish.sums))
        return _PresentPartial(
            kernel=self.kernel.batched(in_axes),
            reference=self.reference.batched(in_axes),
            finish=dataclasses.replace(self.finish, in_axes=(*self.finish.in_axes, finish_axes)),
        )


@dataclasses.dataclass(frozen=True)
class _Present:
    """A pass over present arrays only; `ins` and `outs` are lists of factors.

    Equal ones are one function to JAX (:func:`_differentiable`), which so traces and lowers a pass
    once for all layers of a model.
    """

    name: str
    mode: Mode
    kernel: Local
    kernel_of_slices: Local
    reference: Local
    ins: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    partial: _PresentPartial | None
    faster: Local | None
    unfit: Local | None
    batched: bool

    def batchable(self) -> Callable[..., Arrays]:
        call = custom_vmap(self.on_mesh)

        @call.def_vmap
        def vmap(axis_size: int, in_batched: Sequence[bool], *args: Any) -> tuple[Any, Any]:
            del axis_size
            used = {f for factors in (*self.ins, *self.outs) for f in factors}
            new = next(c for c in string.ascii_uppercase if c not in used)
            in_axes = tuple(0 if b else None for b in in_batched)
            if not self.batched and self.mode in ("mosaic", "interpret"):
                raise NotImplementedError(
                    f'{self.name}: implementation="mosaic" cannot take this call: the kernel has '
                    'no vmap. Use implementation="xla", or None to have it chosen.'
                )
            kernel = self.kernel_of_slices.batched(in_axes)
            batched = dataclasses.replace(
                self,
                mode=self.mode if self.batched else "xla",
                kernel=kernel,
                kernel_of_slices=kernel,
                reference=self.reference.batched(in_axes),
                partial=self.partial and self.partial.batched(in_axes),
                faster=self.faster and self.faster.batched(in_axes),
                unfit=self.unfit and self.unfit.batched(in_axes),
                ins=tuple((new, *f) if b else f for f, b in zip(self.ins, in_batched, strict=True)),
                outs=tuple((new, *f) for f in self.outs),
            )
            return batched.batchable()(*args), tuple(True for _ in self.outs)

        return call

    def on_mesh(self, *args: Any) -> Arrays:
        meshes = [jax.typeof(a).sharding.mesh for a in args]
        mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
        if mesh is not None:
            return self._on_explicit_mesh(mesh, args)
        if any(AxisType.Manual in m.axis_types for m in meshes):
            return self.local(*args)
        if self.mode in ("xla", "interpret"):  # XLA splits the one; the other's effects it cannot
            return self.local(*args)
        precision = jax.config.jax_default_matmul_precision
        return _on_auto_mesh(self, precision)(*args)

    def _on_explicit_mesh(self, mesh: Any, args: Arrays) -> Arrays:
        specs = [jax.typeof(a).sharding.spec for a in args]
        axes = self.mesh_axes(dict(mesh.shape), specs, [a.shape for a in args])
        in_specs = tuple(partition_spec(factors, axes) for factors in self.ins)
        args = tuple(
            jax.sharding.reshard(a, NamedSharding(mesh, spec))
            for a, spec in zip(args, in_specs, strict=True)
        )
        return jax.shard_map(
            _part(self, tuple(axes.items())),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=tuple(partition_spec(factors, axes) for factors in self.outs),
            axis_names={
                name
                for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if kind != AxisType.Manual
            },
        )(*args)

    def shardy_rule(self) -> tuple[str, list[str]]:
        """The einsum-like rule, whose factors Shardy wants named in order of appearance."""
        names: dict[str, str] = {}
        whole: list[str] = []

        def name(factor: str) -> str:
            if factor not in names:
                names[factor] = _factor_name(len(names))
                if factor in self.whole:
                    whole.append(names[factor])
            return names[factor]

        sides = [
            ", ".join(" ".join(name(f) for f in factors) for factors in side)
            for side in (self.ins, self.outs)
        ]
        return " -> ".join(sides), whole

    def mesh_axes(
        self, mesh_shape: dict[str, int], specs: Sequence[Any], shapes: Sequence[Any]
    ) -> MeshAxes:
        return split_factors(mesh_shape, self.ins, self.whole, specs, shapes)

    def local_summed(self, axes: MeshAxes, *args: Any) -> Arrays:
        """One device's part; outputs that lack a split factor are sums over its devices."""
        missing = [
            tuple(n for f, names in axes.items() if f not in factors for n in names)
            for factors in self.outs
        ]
        partial = self.partial if any(missing) else None
        part = self
        if partial is not None:
            part = dataclasses.replace(self, kernel=partial.kernel, reference=partial.reference)
        outs = tuple(
            lax.psum(out, names) if names else out
            for out, names in zip(part.local(*args), missing, strict=True)
        )
        return outs if partial is None else partial.finish(*args, *outs)

    def local(self, *args: Any) -> Arrays:
        """Kernel or reference, on the arrays of one device."""
        # All inputs vary alike, or a derivative taken inside `reference` would already sum over the
        # devices; all outputs do, as a kernel's vary over nothing by their type.
        axes = frozenset[str]().union(*(varying(a) for a in args))
        args = tuple(vary_over(a, axes) for a in args)

        def cast(f: Callable[..., Arrays]) -> Callable[..., Arrays]:
            return lambda *a: tuple(vary_over(o, axes) for o in f(*a))

        def interpreted(*a: Any) -> Arrays:
            with interpreter():
                return self.kernel(*a)

        mode = self.mode
        if mode == "auto" and self.faster is not None and not self.faster.of_types(*args):
            mode = "xla"
        match mode:
            case "xla":
                return cast(self.reference)(*args)
            case "interpret":
                return cast(interpreted)(*args)
            case "mosaic" | "auto":
                call = functools.partial(
                    kernel_call,
                    *(self.name, self.kernel, self.reference, self.unfit, mode == "mosaic"),
                )
                return cast(call)(*args)


@functools.lru_cache(maxsize=4096)
def _differentiable(present: _Present) -> Callable[..., Arrays]:
    """A pass as a function that JAX can transform."""
    call = jax.custom_jvp(present.batchable())

    @call.defjvp
    def jvp(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        plain = dataclasses.replace(present, mode="xla")
        return jax.jvp(plain.on_mesh, primals, tangents)

    return call


@functools.lru_cache(maxsize=4096)
def _on_auto_mesh(present: _Present, precision: str | None) -> Callable[..., Arrays]:
    """A pass that the compiler splits between devices.

    In the program's text there is a pointer where the kernel will be once the arrays are split.
    Whoever keeps compiled programs must tell two passes apart without it, as JAX does under
    ``jax_remove_custom_partitioning_ptr_from_cache_key``: so the name of the function around it
    tells all that the pass depends on.
    """

    def partition(mesh: Any, arg_shapes: Arrays, result_shapes: Arrays):
        del result_shapes
        specs = [spec_of(a.sharding) for a in arg_shapes]
        axes = present.mesh_axes(dict(mesh.shape), specs, [a.shape for a in arg_shapes])
        shard = functools.partial(NamedSharding, mesh)
        return (
            mesh,
            _part(present, tuple(axes.items())),
            tuple(shard(partition_spec(factors, axes)) for factors in present.outs),
            tuple(shard(partition_spec(factors, axes)) for factors in present.ins),
        )

    call = custom_partitioning(lambda *args: present.local(*args))
    rule, whole = present.shardy_rule()
    call.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=tuple(whole)
    )
    partial = present.partial and (present.partial.kernel, present.partial.reference)
    factors = present.ins, present.outs, sorted(present.whole)
    what = (present.mode, present.kernel, present.reference, partial, factors, precision)
    told = f"{describe(what)} {surroundings(present.kernel)}"

    def pass_on_mesh(*args: Any) -> Arrays:
        return call(*args)

    pass_on_mesh.__name__ = f"{present.name}_{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    return jax.jit(pass_on_mesh)


@functools.lru_cache(maxsize=4096)
def _part(
    present: _Present, axes: tuple[tuple[str, tuple[str, ...]], ...]
) -> Callable[..., Arrays]:
    """What a device computes of a pass that is split over mesh axes, the same function each time.

    So JAX traces it once, and not for every call that the compiler partitions.
    """
    return functools.partial(present.local_summed, dict(axes))


def named(op: str, outs: Any) -> Any:
    """`outs` with the name by which the policies of ``jax.checkpoint`` find what `op` computed."""
    return jax.tree.map(lambda a: checkpoint_name(a, op), outs)


def _factor_name(i: int) -> str:
    return string.ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "")
