"""Derivatives of an op in both modes, from the two rules that ``jax.custom_vjp`` takes.

With the residuals fixed, the backward rule is a linear map B from cotangents of the results to
cotangents of the arguments. Reverse mode runs it. Forward mode needs its transpose,

    dout = Bᵀ · darguments,

which JAX derives from B: a pass is differentiated as its reference, so tangents are computed in
plain JAX, also beside a kernel's forward. Between the two modes stands one operation, ``linear_p``,
on residuals and tangents: transposed it is the backward rule, lowered it is the transpose of it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

type Arrays = tuple[Any, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_derivative(x: jax.Array, why: str) -> jax.Array:
    """`x`; to differentiate by it is a NotImplementedError with the text `why`."""
    del why
    return x


@without_derivative.defjvp
def _refuse(why: str, primals: Arrays, tangents: Arrays) -> Any:
    del primals, tangents
    raise NotImplementedError(why)


class Differentiable:
    """A function with the rules of a ``jax.custom_vjp``, compiled once for its static arguments.

    Args:
      fwd: fwd(*arrays, *options) -> (out, res), of arrays or trees of them.
      bwd: bwd(*options, res, douts) -> the cotangents of the arrays.
      alone: alone(*arrays, *options) -> out, where nothing is differentiated; by default as `fwd`.
      options: how many static arguments there are.
    """

    def __init__(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        alone: Callable[..., Any] | None = None,
        *,
        options: int = 1,
    ):
        self.fwd, self.bwd = fwd, bwd
        self.alone = alone or (lambda *args: fwd(*args)[0])

        def call(*args: Any) -> Any:
            arrays, tree = jax.tree.flatten(args[:-options])
            return _of_arrays(self, args[-options:], tree)(*arrays)

        call.__name__ = fwd.__name__.removesuffix("_fwd")
        count = len(inspect.signature(fwd).parameters)
        self.jitted = jax.jit(call, static_argnums=tuple(range(count - options, count)))

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)


@functools.lru_cache(maxsize=4096)
def _of_arrays(of: Differentiable, options: Arrays, tree: Any) -> Callable[..., Any]:
    f = jax.custom_jvp(lambda *arrays: of.alone(*jax.tree.unflatten(tree, arrays), *options))

    def jvp(primals: Arrays, tangents: Arrays) -> tuple[Any, Any]:
        out, res = of.fwd(*jax.tree.unflatten(tree, primals), *options)
        outs, out_tree = jax.tree.flatten(out)
        residuals, res_tree = jax.tree.flatten(res)
        moving = tuple(
            i
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero) and t.dtype != jax.dtypes.float0
        )
        douts = linear_p.bind(
            *residuals,
            *(tangents[i] for i in moving),
            rule=_Rule(of.bwd, options, tree, res_tree, out_tree, moving),
            residuals=len(residuals),
            types=tuple(jax.typeof(o).to_tangent_aval() for o in outs),
            inside=_partitioned(),
        )
        return out, jax.tree.unflatten(out_tree, douts)

    f.defjvp(jvp, symbolic_zeros=True)
    return f


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A backward rule with all that it takes but arrays.

    Attributes:
      bwd, options: the rule and its static arguments.
      arguments, res, outs: the trees of arguments, residuals and results.
      moving: which leaves of the arguments have tangents.
      in_axes: of the ``vmap``s around it, from the inside out: 0 or ``None`` for each residual.
    """

    bwd: Callable[..., Any]
    options: Arrays
    arguments: Any
    res: Any
    outs: Any
    moving: tuple[int, ...]
    in_axes: tuple[tuple[int | None, ...], ...] = ()

    def cotangents(self, residuals: Arrays, douts: Arrays) -> Arrays:
        """Computes the cotangents of arguments that have tangents; ``None`` stands for 0."""

        def bwd(residuals: Arrays, douts: Arrays) -> Arrays:
            res = jax.tree.unflatten(self.res, residuals)
            grads = self.bwd(*self.options, res, jax.tree.unflatten(self.outs, douts))
            leaves = self.arguments.flatten_up_to(tuple(grads))
            return tuple(leaves[i] for i in self.moving)

        for axes in self.in_axes:
            bwd = jax.vmap(bwd, in_axes=(axes, 0))
        return bwd(tuple(residuals), tuple(douts))

    def tangents(self, types: Arrays, residuals: Arrays, tangents: Arrays) -> Arrays:
        """Computes the tangents of the results, by the transpose of `cotangents`."""
        douts = tuple(ad.instantiate_zeros(ad.Zero(t)) for t in types)
        grads, transposed = jax.vjp(lambda *douts: self.cotangents(residuals, douts), *douts)
        return transposed(
            tuple(None if g is None else t for g, t in zip(grads, tangents, strict=True))
        )


@functools.cache
def _partitioned() -> Any:
    """A program with an operation that the compiler splits between devices.

    JAX has to know the devices when it lowers one, and looks for it in the parameters of other
    operations: so `linear_p`, which becomes such ones when it is lowered, has this among its own.
    """
    f = custom_partitioning(lambda x: x)
    f.def_partition(partition=lambda *_: None, sharding_rule="->")
    return jax.make_jaxpr(f)(jax.ShapeDtypeStruct((), "float32"))


linear_p = Primitive("linear")
linear_p.multiple_results = True
linear_p.def_impl(functools.partial(xla.apply_primitive, linear_p))
linear_p.def_abstract_eval(lambda *_, types, **__: list(types))


def _forward(*args: Any, rule: _Rule, residuals: int, types: Arrays, **_: Any) -> Arrays:
    return rule.tangents(types, args[:residuals], args[residuals:])


mlir.register_lowering(linear_p, mlir.lower_fun(_forward, multiple_results=True))


def _transpose(douts: Arrays, *args: Any, rule: _Rule, residuals: int, **_: Any) -> list[Any]:
    grads = rule.cotangents(args[:residuals], tuple(map(ad.instantiate_zeros, douts)))
    return [*(None,) * residuals, *grads]


ad.primitive_transposes[linear_p] = _transpose


def _jvp(primals: Arrays, tangents: Arrays, *, residuals: int, **params: Any) -> tuple[Any, Any]:
    """It is linear in the tangents, and differentiated as plain JAX in the residuals."""
    params["residuals"] = residuals
    if all(isinstance(t, ad.Zero) for t in tangents[:residuals]):
        along = (*primals[:residuals], *map(ad.instantiate_zeros, tangents[residuals:]))
        return linear_p.bind(*primals, **params), linear_p.bind(*along, **params)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_moving(*arrays: Any) -> Arrays:
        moved = dict(zip(moving, arrays, strict=True))
        return _forward(*(moved.get(i, p) for i, p in enumerate(primals)), **params)

    given = [primals[i] for i in moving]
    return jax.jvp(of_moving, given, [tangents[i] for i in moving])


ad.primitive_jvps[linear_p] = _jvp


def _batch(args: Any, dims: Any, *, rule: _Rule, residuals: int, types: Arrays, **more: Any) -> Any:
    """Batches all tangents, so that each has its own cotangent."""
    axes = tuple(None if d is None else 0 for d in dims)
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    batched = args[axes.index(0)]

    def repeat(*arrays: Any) -> Any:
        in_axes = (0, *(None for _ in arrays))
        return jax.vmap(lambda _, *arrays: arrays, in_axes)(batched, *arrays)

    for i in range(residuals, len(args)):
        if axes[i] is None:
            (args[i],) = repeat(args[i])
    outs = linear_p.bind(
        *args,
        rule=dataclasses.replace(rule, in_axes=(*rule.in_axes, axes[:residuals])),
        residuals=residuals,
        types=tuple(jax.make_jaxpr(repeat)(*types).out_avals),
        **more,
    )
    return outs, [0] * len(outs)


batching.primitive_batchers[linear_p] = _batch
