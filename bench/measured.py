"""The measurements of the bench: cases of the table at their shapes, and optimizers' steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkern
from bench import processes, timing
from bench.cases import MODELS, TABLE, case, optim
from bench.cases.case import Shape
from bench.cases.optim import Step, normal_of_shape
from jaxkern.precision import StaticLossScale


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
        return out, floating(vjp(jnp.ones_like(out)))

    @property
    def costs(self) -> dict[str, tuple[int, int]]:
        """Bytes of each pass, each array once, and operations of its matrix products."""
        itemsize = jnp.dtype(self.dtype).itemsize
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
        init, run = step_program(case, "mosaic")
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


# Steps of optimizers

_RATE, _DECAY = 1e-3, 0.1


def step_program(step: Step, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``init(params)`` and ``run(grads, state, params) -> (params, state)``.

    Args:
      step: what to do. ``"scale_gradients"`` scales what it is given as `params`, and its state is
        whether they were finite.
      name: by an implementation of jaxkern, by ``"optax"``, or by ``"update"``, jaxkern's as Optax
        runs any: its ``update`` and ``optax.apply_updates``.
    """
    implementation: Any = None if name == "update" else name
    loss_scale = StaticLossScale(1024.0)
    if step.op == "scale_gradients":
        scale = functools.partial(jaxkern.scale_gradients, implementation=implementation)
        finite = lambda params: jnp.array(True)
        return finite, lambda grads, state, params: scale(params, loss_scale)
    decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    if name != "optax":
        how = {"mask": decays, "implementation": implementation, **step.options}
        tx = jaxkern.fused_adamw(_RATE, weight_decay=_DECAY, **how)
        given = loss_scale if step.scaled else None

        def apply(grads: Any, state: Any, params: Any) -> Any:
            if name == "update":
                updates, state = tx.update(grads, state, params, loss_scale=given)
                return optax.apply_updates(params, updates), state
            return jaxkern.apply(tx, grads, state, params, loss_scale=given)

        return tx.init, apply
    tx: Any = optax.adamw(_RATE, weight_decay=_DECAY, mask=decays)
    if "clip_norm" in step.options:
        tx = optax.chain(optax.clip_by_global_norm(step.options["clip_norm"]), tx)
    if step.options.get("skip_nonfinite"):
        tx = optax.apply_if_finite(tx, 5)
    wide = lambda tree: jax.tree.map(jnp.float32, tree)

    def run(grads: Any, state: Any, params: Any) -> Any:
        master, state = state
        grads = loss_scale.unscale(grads) if step.scaled else grads
        weights = params if master is None else master
        updates, state = tx.update(grads if master is None else wide(grads), state, weights)
        weights = optax.apply_updates(weights, updates)
        if master is None:
            return weights, (None, state)
        return jax.tree.map(lambda w, p: w.astype(p.dtype), weights, params), (weights, state)

    def init(params: Any) -> Any:
        master = wide(params) if "master_dtype" in step.options else None
        return master, tx.init(params if master is None else master)

    return init, run


def measure_step(step: Step, name: str, calls: int) -> timing.Passes:
    """Time of a step, with what it takes to compile and the bytes beside arguments and results.

    No speed from a wrong step: the change of a small tree must be that of plain JAX.

    Parameters and state are donated, and each step takes those that the one before it left. They
    are in the order of the results, in which JAX hands their memory on.
    """
    init, run = step_program(step, name)
    in_place = lambda params, state, grads: run(grads, state, params)
    shapes = jax.eval_shape(step.arrays, jax.random.key(0))
    states = jax.eval_shape(init, shapes)
    key = jax.random.key(0)
    with processes.compiling():
        draws = {s: normal_of_shape.lower(key, s, step.dtype).compile() for s in set(step.shapes)}
        begin = timing.compiled(init, shapes)
        program_of = timing.Program(in_place, shapes, states, shapes, donate_argnums=(0, 1))
        change = changes_of(step, name), changes_of(step, "xla")
    draw = lambda key, shape, _: draws[shape](key)
    with processes.alone():
        got, want = (f() for f in change)
        timing.agrees(f"{step.op} {step.shape}", timing.error(got, want))
        grads, params = (step.arrays(jax.random.key(i), draw) for i in range(2))
        held: list[Any] = [params, begin(params)]
        del params

        def advance() -> Any:
            held[:] = program_of.run(*held, grads)
            return held[0]

        return {"step": (timing.measure(advance, [()], calls), program_of.told)}


def changes_of(step: Step, name: str) -> Callable[[], jax.Array]:
    """The compiled function that gives the change of a small tree's parameters."""
    small = dataclasses.replace(step, shapes=((64, 128), (96,)))
    init, run = step_program(small, name)
    flat = lambda tree: jnp.concatenate([jnp.float32(a).ravel() for a in jax.tree.leaves(tree)])

    def changes() -> jax.Array:
        # As arguments are: rounded, which XLA leaves out of what it widens again.
        draws = [small.arrays(jax.random.key(i)) for i in range(2)]
        grads, params = jax.lax.optimization_barrier(draws)
        after, state = run(grads, init(params), params)
        weights = getattr(state, "master", None) or after
        weights = state[0] if name == "optax" and state[0] is not None else weights
        return flat(weights)[: flat(params).size] - flat(params)

    return timing.compiled(changes)
