"""Optimizer steps to time: trees of parameters, bytes that a step must move, whom it is beside."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkern
from bench import timing
from bench.turns import Alone, Turns
from jaxkern.precision import StaticLossScale

Shapes = tuple[tuple[int, ...], ...]

_RATE, _DECAY = 1e-3, 0.1


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
"""Compiled once for a shape, as a program of hundreds takes minutes."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step over a tree; attributes that are not told of here are those of `bench.cases.Case`.

    Attributes:
      op: the public name of what does the step, ``"fused_adamw"`` or ``"scale_gradients"``.
      shape: what the table calls the tree and what is special of the step.
      dtype: of parameters and gradients.
      bytes_forward: bytes that a step must read and write.
      shapes: of the leaves.
      options: of the optimizer.
      scaled: whether the gradients come scaled.
    """

    op: str
    shape: str
    dtype: str
    bytes_forward: int
    shapes: Shapes
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaled: bool = False
    bytes_backward: int = 0
    operations_forward: int = 0
    operations_backward: int = 0

    def arrays(self, key: Any, normal: Callable[..., jax.Array] = _normal) -> list[jax.Array]:
        """A tree of the parameters' shapes, by ``jax.random.normal`` or what is in its place."""
        keys = jax.random.split(key, len(self.shapes))
        return [normal(k, s, self.dtype) for k, s in zip(keys, self.shapes, strict=True)]


def steps(small: bool) -> Sequence[Step]:
    """All steps; `small` ones for a machine without a GPU."""
    bf16, fp32 = "bfloat16", "float32"
    if small:
        return [_adamw("tree", ((256, 64),) * 4 + ((64,),) * 3, fp32, 28)]
    one = ((24414, 4096),)
    tree = _llama()
    small_leaves = ((256, 256),) * 300
    master: dict[str, Any] = {"master_dtype": fp32}
    averages: dict[str, Any] = {"mu_dtype": bf16, "nu_dtype": bf16, "stochastic_rounding": True}
    codes: dict[str, Any] = {"mu_dtype": "int8", "nu_dtype": "uint8"}
    folded: dict[str, Any] = {"clip_norm": 1.0, "skip_nonfinite": True}
    found = []
    for name, shapes in (("100M", one), ("1.1B", tree)):
        found += [
            _adamw(name, shapes, fp32, 28),
            _adamw(f"{name}-master", shapes, bf16, 28, **master),
            _adamw(f"{name}-bf16-state", shapes, fp32, 20, **averages),
            _adamw(f"{name}-8-bit-state", shapes, fp32, 16, **codes),
            _adamw(f"{name}-folded", shapes, fp32, 32, scaled=True, **folded),
            Step("scale_gradients", name, fp32, 8 * _size(shapes), shapes),
        ]
    return [
        *found,
        _adamw("100M-master-bf16-state", one, bf16, 20, **master, **averages),
        _adamw("100M-bf16-all", one, bf16, 14, **averages),
        _adamw("100M-bf16-8-bit-state", one, bf16, 10, **codes),
        _adamw("20M-300-leaves", small_leaves, fp32, 28),
        _adamw("20M-300-leaves-folded", small_leaves, fp32, 32, scaled=True, **folded),
    ]


def _adamw(
    shape: str, shapes: Shapes, dtype: str, per: int, scaled: bool = False, **options: Any
) -> Step:
    """`per` bytes a parameter; what the 8-bit codes' scales and small leaves add is left out."""
    return Step("fused_adamw", shape, dtype, per * _size(shapes), shapes, options, scaled)


def _size(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _llama() -> Shapes:
    """300 leaves, 1.1 billion parameters: 33 layers of width 1664."""
    d, kv, ffn, words = 1664, 256, 4608, 32000
    attention = ((d, d), (d, kv), (d, kv), (d, d))
    layer = (*attention, (d, ffn), (d, ffn), (ffn, d), (d,), (d,))
    return ((words, d), (d, words), (d,), *(layer * 33))


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
        return lambda params: jnp.array(True), lambda grads, state, params: scale(
            params, loss_scale
        )
    decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    if name != "optax":
        tx = jaxkern.fused_adamw(
            _RATE, weight_decay=_DECAY, mask=decays, implementation=implementation, **step.options
        )
        given = loss_scale if step.scaled else None
        if name == "update":

            def two_passes(grads: Any, state: Any, params: Any) -> Any:
                updates, state = tx.update(grads, state, params, loss_scale=given)
                return optax.apply_updates(params, updates), state

            return tx.init, two_passes
        return tx.init, lambda grads, state, params: jaxkern.apply(
            tx, grads, state, params, loss_scale=given
        )
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


def measure(
    step: Step, name: str, calls: int, turn: Alone | Turns
) -> tuple[timing.Timing, float, int]:
    """Time of a step, seconds to compile it, and bytes it needs beside arguments and results.

    No speed from a wrong step: the change of a small tree must be that of plain JAX.

    Parameters and state are donated, and each step takes those that the one before it left. They
    are in the order of the results, in which JAX hands their memory on.
    """
    init, run = program(step, name)
    in_place = lambda params, state, grads: run(grads, state, params)
    shapes = jax.eval_shape(step.arrays, jax.random.key(0))
    states = jax.eval_shape(init, shapes)
    key = jax.random.key(0)
    with turn.compiling():
        draws = {s: _normal.lower(key, s, step.dtype).compile() for s in set(step.shapes)}
        begin = jax.jit(init).lower(shapes).compile()
        start = time.perf_counter()
        compiled = jax.jit(in_place, donate_argnums=(0, 1)).lower(shapes, states, shapes).compile()
        seconds = time.perf_counter() - start
        change = changes_of(step, name), changes_of(step, "xla")
    draw = lambda key, shape, _: draws[shape](key)
    with turn:
        check(step, *(f() for f in change))
        grads, params = (step.arrays(jax.random.key(i), draw) for i in range(2))
        held: list[Any] = [params, begin(params)]
        del params

        def advance() -> Any:
            held[:] = compiled(*held, grads)
            return held[0]

        timed = timing.measure(advance, [()], calls)
    return timed, seconds, getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)


def changes_of(step: Step, name: str) -> Callable[[], jax.Array]:
    """What gives the change of a small tree's parameters, compiled."""
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

    return jax.jit(changes).lower().compile()


def check(step: Step, got: jax.Array, want: jax.Array) -> None:
    """That changes are those of plain JAX."""
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    if not error < 1e-2:
        what = f"{step.op} {step.shape}"
        raise RuntimeError(f"{what}: relative error {error:.1e} against plain JAX")
