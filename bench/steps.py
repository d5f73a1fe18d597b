"""Times an optimizer's steps, by jaxkern and by Optax."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkern
from bench import processes, timing
from bench.cases.optim import Step, normal_of_shape
from jaxkern.precision import StaticLossScale

_RATE, _DECAY = 1e-3, 0.1


def program(step: Step, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
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


def measure(step: Step, name: str, calls: int) -> timing.Passes:
    """Time of a step, with what it takes to compile and the bytes beside arguments and results.

    No speed from a wrong step: the change of a small tree must be that of plain JAX.

    Parameters and state are donated, and each step takes those that the one before it left. They
    are in the order of the results, in which JAX hands their memory on.
    """
    init, run = program(step, name)
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
    init, run = program(small, name)
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
