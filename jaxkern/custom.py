"""Ops from kernels of your own, in Pallas or Triton: :func:`custom_op` and :func:`triton_call`.

A :class:`jaxkern.core.kernel_pass.KernelPass` gives a kernel what JAX does not. Here one is made of
a user's functions for each of the two passes, and the gradient ties them together by names.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkern.core import target
from jaxkern.core.arguments import as_array
from jaxkern.core.bound import standard_promotion
from jaxkern.core.derivatives import Differentiable, without_derivative
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass
from jaxkern.core.mesh import TypeOf, match_primal

Arrays = tuple[Any, ...]
VMAPS = ("map", "strides", None)


def custom_op(
    signature: str,
    *,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    backward: str | None = None,
    backward_kernel: Callable[..., Any] | None = None,
    backward_reference: Callable[..., Any] | None = None,
    saved: str = "",
    whole: str = "",
    vmap: str | None = "map",
    unfit: Callable[..., str | None] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    r"""Make an op of JAX from a kernel in Pallas or Triton and the same in plain JAX.

    The op runs the kernel where a program is lowered for an NVIDIA GPU, and `reference` elsewhere.
    It can be compiled, differentiated in both modes and twice, mapped (``jax.vmap``), split over
    Auto and Explicit meshes and inside ``jax.shard_map`` without gathering what need not be,
    exported, and kept or recomputed by ``jax.checkpoint``, which finds its results by its name. A
    process lowers a kernel once for its options and the types of its arrays, and keeps it on disk
    if its functions are those of a module.

    Args:
      signature: names and dimensions of arguments and results, ``"x: ... n, b: n -> out: ... n"``.
        ``...`` stands for any number of dimensions, the same in all arrays. A mesh may split a
        dimension, unless it is in `whole`; a result that lacks one that is split is added up over
        the devices.
      reference: the op in plain JAX, differentiable: ``reference(*arrays, **options)`` gives one
        array, or a tuple as `signature` names them.
      kernel: the same by a kernel: any JAX around ``pl.pallas_call``, ``plgpu.kernel`` or
        :func:`jaxkern.triton_call`, traced for the arrays of one device.
      backward: the gradient's arguments and results by name, ``"x, b, dout -> dx, db"``: any of the
        op's arguments and results, ``d`` and a result for its cotangent, and ``d`` and an argument
        for its gradient. An argument whose gradient is not named has none, and differentiating by
        it is an error. By default the gradient is `reference`'s, by JAX.
      backward_kernel: the gradient by a kernel, called as `backward` says and with the options.
      backward_reference: the gradient in plain JAX; by default `reference`'s, by JAX.
      saved: results that the gradient needs and a caller does not get, such as ``"rstd"``.
      whole: dimensions that are not split between devices: those along which the kernel reduces,
        unless each device's part of the result is right by itself.
      vmap: how the kernel is mapped. ``"map"`` by ``jax.vmap``, as Pallas kernels can be.
        ``"strides"`` by itself, which suits Triton: it is called with ``batch``, the number of
        examples, and ``strides``, how far apart they are in each array, 0 for one that all share;
        arrays that are not shared, and all results, have an axis of examples in front. ``None``
        has `reference` run under ``vmap``.
      unfit: says of the types of one device's arguments, and the options, why the kernels cannot
        take them; ``None`` where they can. It is asked for each pass; an argument that is absent,
        or that the gradient does not take, is ``None``.
      name: of the op in errors, in lowered programs (``name_fwd``, ``name_bwd``) and for
        ``jax.checkpoint``; by default that of `reference`.

    Returns:
      ``op(*arrays, implementation=None, **options)``. Options are constants that can be hashed:
      numbers, texts, dtypes, tuples of them. `implementation` is ``"mosaic"`` for the kernel, also
      for one of Triton, ``"xla"`` for `reference`, ``None`` for the kernel where there is a GPU.

    Raises:
      ValueError: the signatures cannot be read, or do not fit together. The op raises it for an
        array whose dimensions are not those of its signature.
      TypeError: of the op: an option cannot be hashed; what the kernel gives has not the shapes
        and dtypes of what `reference` gives.
      NotImplementedError: of the op: ``implementation="mosaic"`` cannot run, or it is
        differentiated by an argument that `backward` gives no gradient of.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> from jax.experimental import pallas as pl
      >>> from jax.experimental.pallas import mosaic_gpu as plgpu
      >>> def scaled_silu(x, *, scale):
      ...     return scale * x * jax.nn.sigmoid(x)
      >>> def launch(x, *, scale):
      ...     def kernel(x_ref, out_ref):
      ...         out_ref[...] = scaled_silu(x_ref[...], scale=scale)
      ...     return plgpu.kernel(kernel, out_type=jax.typeof(x))(x)
      >>> op = jaxkern.custom_op("x: n -> out: n", reference=scaled_silu, kernel=launch)
      >>> print(jax.grad(lambda x: op(x, scale=2.0).sum())(jnp.zeros(2)))
      [1. 1.]
    """
    if vmap not in VMAPS:
        raise ValueError(f'vmap must be "map", "strides" or None, got {vmap!r}')
    name = name or reference.__name__
    if not name.isidentifier():
        raise ValueError(f"name must be one in Python, got {name!r}; give name=")
    ins, outs = _parsed(signature)
    hidden = frozenset(saved.replace(",", " ").split())
    if unknown := hidden - outs.keys():
        raise ValueError(f"saved names {', '.join(sorted(unknown))}, no result of {signature!r}")
    if hidden == outs.keys():
        raise ValueError(f"saved names every result of {signature!r}, and the op would give none")
    shown = tuple(each for each in outs if each not in hidden)

    def made(suffix: str, takes: Named, gives: Named, kernel: Any, plain: Any) -> KernelPass:
        return KernelPass(
            f"{name}_{suffix}",
            reference=plain,
            kernel=kernel and _Launched(kernel, plain, vmap == "strides"),
            ins=tuple(takes.values()),
            outs=tuple(gives.values()),
            whole=whole,
            unfit=unfit and _Asked(unfit, tuple(ins), tuple(takes)),
            batched=vmap is not None,
        )

    plain, taken, given, gradient = _Plain(reference, tuple(outs)), {}, {}, None
    if backward is not None:
        taken, given = _parsed_backward(backward, ins, outs, shown)
        plainly = _plain_gradient(backward_reference, backward, plain, ins, taken, given, shown)
        gradient = made("bwd", taken, given, backward_kernel, plainly)
    elif backward_kernel or backward_reference:
        raise ValueError(
            "backward_kernel and backward_reference need backward, which says what they take and "
            'give: "x, dout -> dx"'
        )
    forward = made("fwd", ins, outs, kernel, plain)
    run = _differentiable(forward, gradient, ins, outs, taken, given, shown)
    grads = frozenset(each for each in ins if gradient is None or f"d{each}" in given)

    @functools.partial(jax.jit, static_argnums=1, inline=True)
    def compiled(arrays: Arrays, options: _CustomOptions) -> Any:
        with standard_promotion():
            return run(arrays, options)

    def op(*args: Any, implementation: Implementation | None = None, **options: Any) -> Any:
        arrays = _arrays(name, ins, args, options)
        arrays = tuple(
            a
            if a is None or each in grads or not jnp.issubdtype(a.dtype, jnp.inexact)
            else without_derivative(a, _NO_GRADIENT.format(name, each))
            for each, a in zip(ins, arrays, strict=True)
        )
        mode = resolve(implementation, None, op=name)
        values = tuple(sorted(options.items()))
        try:
            hash(values)
        except TypeError as error:
            raise TypeError(
                f"{name}: options are compiled in, and must be numbers, texts, dtypes or tuples "
                f"of them, got {options!r} ({error})"
            ) from None
        return compiled(arrays, _CustomOptions(name, mode, values, _types(values)))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = reference.__doc__
    return op


_NO_GRADIENT = (
    "{0} has no gradient by {1}, and {1} depends on what is differentiated here; pass "
    "jax.lax.stop_gradient({1}), or name d{1} in the op's backward"
)


@dataclasses.dataclass(frozen=True)
class _CustomOptions:
    """Options of a call, compiled in; `types` tell 1, 1.0 and True apart, which are equal."""

    op: str
    mode: Mode
    values: tuple[tuple[str, Any], ...]
    types: Any


def _types(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_types, value))
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Signatures

_NAME = r"[A-Za-z_]\w*"
type Named = dict[str, str]
"""Factors of arrays by their names."""


def _parsed(signature: str) -> tuple[Named, Named]:
    sides = signature.split("->")
    found = [
        [re.fullmatch(rf"\s*({_NAME})\s*:((?:\s*(?:{_NAME}|\.\.\.))*)\s*", each) for each in side]
        for side in (side.split(",") for side in sides)
    ]
    if len(sides) != 2 or not all(each for side in found for each in side):
        raise ValueError(
            'signature must name arrays and their dimensions, like "x: ... n, b: n -> out: ... n"; '
            f"got {signature!r}"
        )
    ins, outs = ([(each[1], " ".join(each[2].split())) for each in side if each] for side in found)
    for each, factors in ins + outs:
        if len({*factors.split()}) != len(factors.split()):
            raise ValueError(f"signature {signature!r} gives {each} a dimension twice")
    names = [each for each, _ in ins + outs]
    if twice := {each for each in names if names.count(each) > 1}:
        raise ValueError(f"signature {signature!r} names {', '.join(sorted(twice))} twice")
    return dict(ins), dict(outs)


def _parsed_backward(
    backward: str, ins: Named, outs: Named, shown: tuple[str, ...]
) -> tuple[Named, Named]:
    sides = [side.replace(",", " ").split() for side in backward.split("->")]
    known = ins | outs | {f"d{each}": outs[each] for each in shown}
    gradients = {f"d{each}": factors for each, factors in ins.items()}
    if len(sides) != 2 or not (sides[0] and sides[1]):
        raise ValueError(f'backward must be like "x, b, dout -> dx, db", got {backward!r}')
    for names, there in zip(sides, (known, gradients), strict=True):
        if unknown := [each for each in names if each not in there]:
            raise ValueError(
                f"backward {backward!r} names {', '.join(unknown)}; there are {', '.join(there)}"
            )
    taken, given = sides
    return {each: known[each] for each in taken}, {each: gradients[each] for each in given}


def _arrays(name: str, ins: Named, args: Arrays, options: dict[str, Any]) -> Arrays:
    """Arguments in the order of the signature, of its dimensions; takes those of `options` out."""
    if len(args) > len(ins):
        raise TypeError(f"{name} takes {len(ins)} arrays ({', '.join(ins)}), got {len(args)}")
    given = dict(zip(ins, args, strict=False))
    for each in ins:
        if each in options:
            if each in given:
                raise TypeError(f"{name} got {each} twice")
            given[each] = options.pop(each)
    if missing := [each for each in ins if each not in given]:
        raise TypeError(f"{name} lacks {', '.join(missing)}; None stands for an absent array")
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    arrays = []
    for each, factors in ins.items():
        array = None if given[each] is None else as_array(each, given[each])
        arrays.append(array)
        if array is None:
            continue
        names = factors.split()
        rest = array.ndim - len(names) + 1
        if rest < 0 or ("..." not in names and array.ndim != len(names)):
            raise ValueError(
                f"{name}: {each} must have dimensions ({factors}), got shape {array.shape}"
            )
        at = 0
        for factor in names:
            width = rest if factor == "..." else 1
            size = array.shape[at : at + width]
            other, expected = sizes.setdefault(factor, (each, size))
            if size != expected:
                raise ValueError(
                    f"{name}: {factor} is {size} in {each} and {expected} in {other}; the shape of "
                    f"{each} is {array.shape}"
                )
            at += width
    return tuple(arrays)


# Passes


def _called(function: Any, options: _CustomOptions, arrays: Sequence[Any], **more: Any) -> Arrays:
    outs = function(*arrays, **dict(options.values), **more)
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A user's function in plain JAX, as a pass calls it."""

    function: Callable[..., Any]
    results: tuple[str, ...]

    def __call__(self, options: _CustomOptions, *arrays: Any) -> Arrays:
        outs = _called(self.function, options, arrays)
        if len(outs) != len(self.results):
            raise TypeError(
                f"{options.op}: {self.function.__name__} gives {len(outs)} arrays where the "
                f"signature has {len(self.results)} ({', '.join(self.results)})"
            )
        return tuple(None if out is None else jnp.asarray(out) for out in outs)


@dataclasses.dataclass(frozen=True)
class _Derived:
    """The gradient in plain JAX, derived from the op's reference."""

    reference: _Plain
    ins: tuple[str, ...]
    taken: tuple[str, ...]
    given: tuple[str, ...]
    shown: tuple[str, ...]

    def __call__(self, options: _CustomOptions, *arrays: Any) -> Arrays:
        named = dict(zip(self.taken, arrays, strict=True))
        moving = [each.removeprefix("d") for each in self.given]

        def of_moving(*moved: Any) -> dict[str, Any]:
            values = named | dict(zip(moving, moved, strict=True))
            outs = self.reference(options, *(values[each] for each in self.ins))
            found = dict(zip(self.reference.results, outs, strict=True))
            return {each: found[each] for each in self.shown}

        outs, transposed = jax.vjp(of_moving, *(named[each] for each in moving))
        zeros = lambda each: jnp.zeros_like(outs[each])
        douts = {n: named[f"d{n}"] if f"d{n}" in named else zeros(n) for n in self.shown}
        return transposed(douts)


def _plain_gradient(
    function: Callable[..., Any] | None,
    backward: str,
    reference: _Plain,
    ins: Named,
    taken: Named,
    given: Named,
    shown: tuple[str, ...],
) -> Callable[..., Arrays]:
    if function is not None:
        return _Plain(function, tuple(given))
    if missing := [each for each in ins if each not in taken]:
        raise ValueError(
            f"backward {backward!r} does not take {', '.join(missing)}, so JAX cannot derive it "
            "from reference; give backward_reference"
        )
    return _Derived(reference, tuple(ins), tuple(taken), tuple(given), shown)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A user's `unfit`, as a pass asks it of those of the op's arguments that the pass takes."""

    function: Callable[..., Any]
    ins: tuple[str, ...]
    taken: tuple[str, ...]

    def __call__(self, options: _CustomOptions, *types: Any) -> str | None:
        named = dict(zip(self.taken, types, strict=True))
        return self.function(*map(named.get, self.ins), **dict(options.values))


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A user's kernel, as a pass launches it; its results are held to the reference's types."""

    function: Callable[..., Any]
    reference: Callable[..., Arrays]
    strides: bool

    def __call__(self, options: _CustomOptions, *arrays: Any) -> Arrays:
        expected = jax.eval_shape(functools.partial(self.reference, options), *arrays)
        run = self._strided if self.strides else functools.partial(_called, self.function)
        outs = run(options, arrays)
        types = [(tuple(o.shape), jnp.dtype(o.dtype)) for o in outs]
        if types != (wanted := [(tuple(t.shape), jnp.dtype(t.dtype)) for t in expected]):
            show = lambda each: ", ".join(f"{dtype}{list(shape)}" for shape, dtype in each)
            raise TypeError(
                f"{options.op}: kernel {self.function.__name__} gives {show(types)}, and the plain "
                f"JAX beside it {show(wanted)}"
            )
        return outs

    def _strided(self, options: _CustomOptions, arrays: Arrays) -> Arrays:
        """Launches a kernel that takes all examples at once, for the one that is here so far."""
        present = [i for i, a in enumerate(arrays) if a is not None]

        def launch(*given: Any, batch: int, strides: Sequence[int]) -> Arrays:
            full = [dict(zip(present, of, strict=True)) for of in (given, strides)]
            every = [full[0].get(i) for i in range(len(arrays))]
            steps = tuple(full[1].get(i, 0) for i in range(len(arrays)))
            return _called(self.function, options, every, batch=batch, strides=steps)

        of_one = _of_examples(launch, 1, tuple(False for _ in present))
        return tuple(out[0] for out in of_one(*(arrays[i] for i in present)))


def _of_examples(launch: Callable[..., Arrays], size: int, apart: tuple[bool, ...]) -> Any:
    """`launch` for `size` examples; an array that they do not share has an axis of them in front.

    ``jax.vmap`` of it is the same for more examples: nested ones become one axis.
    """

    @custom_vmap
    def of_examples(*arrays: Any) -> Arrays:
        strides = [a.size // size if each else 0 for a, each in zip(arrays, apart, strict=True)]
        return launch(*arrays, batch=size, strides=strides)

    @of_examples.def_vmap
    def of_more(more: int, mapped: Sequence[bool], *arrays: Any) -> tuple[Arrays, Any]:
        joined = []
        for array, new, old in zip(arrays, mapped, apart, strict=True):
            if any(apart) and (new or old):
                array = array if new else jnp.broadcast_to(array, (more, *array.shape))
                array = array if old else jnp.repeat(array[:, None], size, 1)
                array = array.reshape(more * size, *array.shape[2:])
            joined.append(array)
        both = tuple(new or old for new, old in zip(mapped, apart, strict=True))
        outs = _of_examples(launch, more * size, both)(*joined)
        outs = tuple(out.reshape(more, size, *out.shape[1:]) for out in outs)
        return outs, tuple(True for _ in outs)

    return of_examples


# Derivatives


def _differentiable(
    forward: KernelPass,
    gradient: KernelPass | None,
    ins: Named,
    outs: Named,
    taken: Named,
    given: Named,
    shown: tuple[str, ...],
) -> Callable[[Arrays, _CustomOptions], Any]:
    """The op, whose gradient is the pass `gradient`, or else by JAX."""

    def fwd(arrays: Arrays, options: _CustomOptions) -> tuple[Any, Any]:
        found = dict(zip(outs, forward(options, *arrays), strict=True))
        named = dict(zip(ins, arrays, strict=True)) | found
        kept = {each: named[each] for each in taken if each in named}
        types = [None if a is None else TypeOf(jax.typeof(a)) for a in arrays]
        results = tuple(found[each] for each in shown)
        return results[0] if len(results) == 1 else results, (kept, types)

    if gradient is None:
        return lambda *args: fwd(*args)[0]

    def bwd(options: _CustomOptions, res: Any, douts: Any) -> Arrays:
        kept, types = res
        douts = douts if len(shown) > 1 else (douts,)
        named = kept | {f"d{n}": d for n, d in zip(shown, douts, strict=True)}
        grads = gradient(options, *(named[each] for each in taken))
        found = dict(zip(given, grads, strict=True))

        def typed(name: str, of: TypeOf | None) -> Any:
            grad = found.get(f"d{name}")
            if of is None or grad is None:
                return None
            return match_primal(grad.astype(of.aval.dtype), of)

        return (tuple(map(typed, ins, types)),)

    return Differentiable(fwd, bwd)


# Triton


def triton_call(
    *args: Any,
    kernel: Any,
    out_type: Any,
    grid: Any,
    num_warps: int | None = None,
    num_stages: int | None = None,
    **options: Any,
) -> Any:
    """Call a Triton kernel inside the `kernel` of a :func:`jaxkern.custom_op`.

    It is ``jax_triton.triton_call``, compiled for the GPU that the program is lowered for, which
    need not be there (:func:`jaxkern.lowering_for`).

    Args:
      args: arrays and numbers in the order of the kernel's parameters, without the results'
        pointers, which come behind them.
      kernel: of ``triton.jit``, or autotuned.
      out_type: shape and dtype of each result, such as ``jax.typeof(x)``; a tuple of them for
        several.
      grid: programs along each of up to three axes, or a function of the options that gives them.
      num_warps, num_stages: as Triton has them.
      options: ``tl.constexpr`` parameters by name.

    Returns:
      An array, or a tuple as `out_type` is one.

    Raises:
      ImportError: jax-triton or Triton is not installed, or not of a version that works.
    """
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]
    except (ImportError, TypeError) as error:  # a Triton that it does not know is a TypeError
        raise ImportError(
            f"jaxkern.triton_call needs jax-triton and Triton ({error}); run: pip install "
            '"jaxkernels[triton]"'
        ) from error
    gpu = target.current()
    if gpu is not None:
        options["compute_capability"] = 10 * gpu.capability[0] + gpu.capability[1]
    tuned = {"num_warps": num_warps, "num_stages": num_stages}
    options |= {name: value for name, value in tuned.items() if value is not None}
    return jax_triton.triton_call(*args, kernel=kernel, out_shape=out_type, grid=grid, **options)
