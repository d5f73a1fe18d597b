"""A step over a tree: its options, the state between steps, and its leaves and numbers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxkern.core.arguments import floating_leaves
from jaxkern.core.bound import standard_promotion, wide
from jaxkern.core.derivatives import without_derivative
from jaxkern.core.dispatch import Implementation
from jaxkern.optim.arithmetic import (
    CODE_BLOCK,
    SMALLEST_IN_CODES,
    Leaf,
    Quantised,
    StepNumbers,
    UpdateRule,
)
from jaxkern.optim.gradients import sum_of_squares
from jaxkern.precision import check_loss_scale

Tree = Any
Number = Any
"""A Python number, a scalar array, or for a schedule a function of the count."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The checked arguments of a transformation; what only Adam has comes last, with defaults."""

    name: str
    rule: UpdateRule
    learning_rate: Number
    b1: Number  # or SGD's momentum, None without mu
    mu_dtype: Any
    master: bool
    seed: Any
    clip_norm: Number | None
    skip_nonfinite: bool
    implementation: Implementation | None
    b2: Number = 0.0
    nu_dtype: Any = None
    eps: Number = 0.0
    eps_root: Number | None = None
    weight_decay: Number | None = None
    mask: Any = None


class FusedAdamState(NamedTuple):
    """The state of :func:`fused_adam` and :func:`fused_adamw`.

    Attributes:
      count: () int32, steps done, without those skipped.
      mu: like the parameters, the average of the gradients.
      nu: like the parameters, the average of their squares.
      master: the weights of which the parameters are a rounded copy; ``optax.MaskedNode()`` for a
        parameter that is its own master, ``None`` without `master_dtype`.
      last_finite: () bool, whether the last step was done; ``None`` without `skip_nonfinite`.
      total_notfinite: () int32, steps skipped; ``None`` without `skip_nonfinite`.
    """

    count: jax.Array
    mu: Tree
    nu: Tree
    master: Tree = None
    last_finite: Any = None
    total_notfinite: Any = None


class FusedSgdState(NamedTuple):
    """The state of :func:`fused_sgd`; what is not here is as in :class:`FusedAdamState`.

    Attributes:
      trace: like the parameters, the sum of the gradients; ``None`` without momentum.
    """

    count: jax.Array
    trace: Tree
    master: Tree = None
    last_finite: Any = None
    total_notfinite: Any = None


@standard_promotion()
def initial_state(options: OptimizerOptions, params: Tree) -> FusedAdamState | FusedSgdState:
    """Returns the state before the first step.

    `params` is a tree of floating arrays, or without master copies of ``jax.ShapeDtypeStruct``.
    """
    leaves, treedef = floating_leaves("params", params, values=options.master)
    zeros = lambda dtype: treedef.unflatten([_zeros(p, dtype) for p in leaves])
    masters = None
    if options.master:
        copy = lambda p: p.astype(jnp.float32) if _has_master(p) else optax.MaskedNode()
        masters = treedef.unflatten(map(copy, leaves))
    common = {
        "master": masters,
        "last_finite": jnp.array(True) if options.skip_nonfinite else None,
        "total_notfinite": jnp.int32(0) if options.skip_nonfinite else None,
    }
    mu = zeros(options.mu_dtype) if options.b1 is not None else None
    if options.rule.kind == "sgd":
        return FusedSgdState(jnp.int32(0), mu, **common)
    return FusedAdamState(jnp.int32(0), mu, zeros(options.nu_dtype), **common)


def _has_master(param: Any) -> bool:
    """Says whether a parameter is of a precision that has master copies."""
    return jnp.finfo(param.dtype).bits < 32


def _zeros(param: Any, dtype: Any) -> Any:
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        if param.size >= SMALLEST_IN_CODES and param.size % CODE_BLOCK == 0:
            scale = jnp.zeros(param.size // CODE_BLOCK, jnp.float32)
            return Quantised(jnp.zeros_like(param, dtype=dtype), scale)
        dtype = None
    return jnp.zeros_like(param, dtype=dtype or wide(param.dtype))


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The input of a step, checked, and what makes the new state of the new leaves."""

    options: OptimizerOptions
    state: Any
    treedef: Any
    leaves: list[Leaf]
    decays: tuple[bool, ...]  # of each leaf
    numbers: StepNumbers
    seed: jax.Array  # (3,) uint32
    finite: jax.Array  # () bool, whether the step is done

    def new_state(self, after: Sequence[Leaf]) -> Any:
        """Returns the state after the step, of the leaves after it."""
        options, state, unflatten = self.options, self.state, self.treedef.unflatten

        def column(field: str) -> Tree:
            pairs = [(getattr(leaf, field), getattr(leaf, f"{field}_scale")) for leaf in after]
            return unflatten([a if s is None else Quantised(a, s) for a, s in pairs])

        counted = lambda done, count: jnp.where(done, optax.safe_increment(count), count)
        changes: dict[str, Any] = {"count": counted(self.finite, state.count)}
        if options.skip_nonfinite:
            changes["last_finite"] = self.finite
            changes["total_notfinite"] = counted(~self.finite, state.total_notfinite)
        if options.master:
            copies = [optax.MaskedNode() if leaf.copy is None else leaf.weight for leaf in after]
            changes["master"] = unflatten(copies)
        if options.b1 is not None:
            changes["trace" if options.rule.kind == "sgd" else "mu"] = column("mu")
        if options.rule.kind == "adam":
            changes["nu"] = column("nu")
        return state._replace(**changes)


def prepare(options, mode, grads, state, params, loss_scale, grad_norm) -> PreparedStep:
    """Checks the trees of a step, and returns its leaves and numbers.

    Raises:
      TypeError, ValueError: trees, state and options do not belong together.
    """
    check_loss_scale(loss_scale)
    if grad_norm is not None:
        check_scalar("grad_norm", grad_norm, finite=False)
    decaying = options.weight_decay is not None
    if params is None and (decaying or options.master or options.rule.stochastic):
        raise ValueError(
            f"{options.name}: update needs params, for weight decay, a master copy or stochastic "
            "rounding; call update(grads, state, params)"
        )
    _check_state(options, state)
    leaves, treedef = _leaves(options, grads, state, params)
    decays = _decays(options, params) if decaying else [False] * len(leaves)
    f32 = jnp.float32
    if any(a.dtype == jnp.float64 for leaf in leaves for a in leaf if a is not None):
        f32 = jnp.float64
    of_grads = [leaf.grad for leaf in leaves]
    scale, finite = _gradient_scale(options, mode, of_grads, loss_scale, grad_norm, f32)
    numbers = _numbers(options, state.count, scale, finite, f32)
    seed, high = options.seed, 0
    if isinstance(seed, int):
        seed, high = jnp.uint32(seed & 0xFFFFFFFF), seed >> 32 & 0xFFFFFFFF
    words = jnp.asarray(seed), jnp.uint32(high), state.count
    seed = jnp.stack([word.astype(jnp.uint32) for word in words])
    return PreparedStep(options, state, treedef, leaves, tuple(decays), numbers, seed, finite)


# Its leaves


def _check_state(options: OptimizerOptions, state: Any) -> None:
    expected = FusedSgdState if options.rule.kind == "sgd" else FusedAdamState
    if not isinstance(state, expected):
        raise TypeError(
            f"{options.name}: state must be a {expected.__name__}, from this transformation's "
            f"init; got {type(state).__name__}"
        )
    if type(state.count).__module__.startswith("flax.nnx"):
        raise TypeError(f"{options.name}: state must hold arrays, got nnx.Variables; {_OF_NNX}")
    if options.master != (state.master is not None) or options.skip_nonfinite != (
        state.last_finite is not None
    ):
        raise ValueError(
            f"{options.name}: state is of another master_dtype or skip_nonfinite; init it anew"
        )


def _leaves(options, grads, state, params) -> tuple[list[Leaf], Any]:
    name, like = ("grads", grads) if params is None else ("params", params)
    of_like, treedef = floating_leaves(name, like)

    def aligned(what: str, tree: Tree) -> list[Any]:
        whole = (Quantised, optax.MaskedNode) if what == "master" else Quantised
        is_leaf = lambda a: isinstance(a, whole)
        if jax.tree.structure(tree, is_leaf=is_leaf) != treedef:
            where = _difference(what, tree, name, like, is_leaf)
            raise ValueError(f"{options.name}: {what} must have the structure of {name}; {where}")
        nodes = floating_leaves(what, tree)[0] if what == "grads" else treedef.flatten_up_to(tree)
        for node, other, path in zip(nodes, of_like, _paths(like), strict=True):
            if isinstance(node, optax.MaskedNode):
                continue
            if wrong := _wrong_dtype(what, node):
                raise TypeError(f"{options.name}: {what}{path} {wrong}; init the state anew")
            shape = (node.codes if isinstance(node, Quantised) else node).shape
            if shape != other.shape:
                raise ValueError(
                    f"{options.name}: {what}{path} must have shape {other.shape}, that of "
                    f"{name}{path}; got {shape}"
                )
        return nodes

    nothing = [None] * len(of_like)
    of_grads = aligned("grads", grads)
    of_params = nothing if params is None else of_like
    sums = state.trace if isinstance(state, FusedSgdState) else state.mu
    mu = aligned("mu", sums) if options.b1 is not None else nothing
    nu = aligned("nu", state.nu) if isinstance(state, FusedAdamState) else nothing
    masters = aligned("master", state.master) if options.master else nothing
    leaves = []
    for g, p, m, v, master in zip(of_grads, of_params, mu, nu, masters, strict=True):
        mastered = master is not None and not isinstance(master, optax.MaskedNode)
        if p is not None and mastered != (options.master and _has_master(p)):
            raise ValueError(
                f"{options.name}: a parameter is {p.dtype} and the state has "
                f"{'a' if mastered else 'no'} master copy of it; init the state for parameters "
                "of this dtype"
            )
        (m, m_scale), (v, v_scale) = (
            (a.codes, without_derivative(a.scale, _CODES_HAVE_NO_TANGENT))
            if isinstance(a, Quantised)
            else (a, None)
            for a in (m, v)
        )
        weight, copy = (master, p) if mastered else (p, None)
        leaves.append(Leaf(g, weight, m, v, copy, m_scale, v_scale))
    return leaves, treedef


def _paths(tree: Tree, is_leaf: Any = None) -> list[str]:
    """The path of each leaf, as Python would write it."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [jax.tree_util.keystr(path) for path, _ in found]


_CODES_HAVE_NO_TANGENT = (
    "a step cannot be differentiated by an average in 8 bits, whose codes are integers: through "
    "one step, parameters have derivatives, and not from one step to the next. Leave "
    'mu_dtype="int8" and nu_dtype="uint8" out'
)
_OF_NNX = "use jaxkern.nn.flax.Optimizer, or make arrays by nnx.as_pure"


def _difference(what: str, tree: Tree, name: str, like: Tree, is_leaf: Any) -> str:
    """Says where two trees differ first, in few words whatever they hold."""
    got, want = _paths(tree, is_leaf), _paths(like)
    missing = next((path for path in want if path not in got), "")
    extra = next((path for path in got if path not in want), "")
    arrays = {path.removesuffix(".value") for path in (got if missing else want)}
    if f"{missing}['codes']" in got or (missing or extra).removesuffix(".value") in arrays:
        return f"nnx.Optimizer or nnx.State made nnx.Variables of arrays; {_OF_NNX}"
    if missing or extra:
        return f"{what}{missing} is missing" if missing else f"{what}{extra} is not in {name}"
    kinds = f"{type(tree).__name__} of {what} and {type(like).__name__} of {name}"
    return f"the containers are of other types, as {kinds}"


def _wrong_dtype(what: str, node: Any) -> str | None:
    """Says what is wrong with the dtype of a gradient, an average, a master copy or codes."""
    if not isinstance(node, Quantised):
        wanted, kind = ("float32", jnp.float32) if what == "master" else ("floating", jnp.floating)
        right = jnp.issubdtype(node.dtype, kind)
        return None if right else f"must be a {wanted} array, got {node.dtype}"
    code, scales = "uint8" if what == "nu" else "int8", (node.codes.size // CODE_BLOCK,)
    if (node.codes.dtype, node.scale.dtype, node.scale.shape) == (code, jnp.float32, scales):
        return None
    return (
        f"must be {code} codes with a float32 scale for each {CODE_BLOCK}, {scales}; got "
        f"{node.codes.dtype} and {node.scale.dtype}{list(node.scale.shape)}"
    )


def _decays(options: OptimizerOptions, params: Tree) -> list[bool]:
    """Says of each leaf whether it decays: as a mask says of its path, or of the start of that.

    Containers may differ in type, a mask of dicts for parameters in a FrozenDict.
    """
    mask: Any = True if options.mask is None else mask_of(options.mask, params)
    words = lambda path: tuple(jax.tree_util.keystr((key,)) for key in path)
    told = {words(path): bool(m) for path, m in jax.tree_util.tree_leaves_with_path(mask)}
    empty = lambda node: not jax.tree.leaves(node)
    decays, used, wrong = [], set(), None
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=empty):
        starts = [words(path[:n]) for n in range(len(path) + 1) if words(path[:n]) in told]
        used |= set(starts)
        if not empty(node):
            decays.append(bool(starts) and told[starts[0]])
            wrong = wrong or (None if starts else f"mask{''.join(words(path))} is missing")
    extra = (f"mask{''.join(path)} is not in params" for path in told if path not in used)
    if wrong := wrong or next(extra, None):
        raise ValueError(
            f"{options.name}: mask must have the structure of params, or one boolean for a "
            f"subtree; {wrong}"
        )
    return decays


# Its numbers


def _gradient_scale(options, mode, grads, loss_scale, norm, f32) -> tuple[Any, Any]:
    """The factor of the gradients, and whether their norm is finite."""
    scale = jnp.ones((), f32)
    if loss_scale is not None:
        scale = 1 / jnp.asarray(loss_scale.loss_scale, f32)
    if options.clip_norm is None and not options.skip_nonfinite:
        return scale, jnp.array(True)
    if norm is None:
        squares = sum_of_squares(mode, grads, f32)
        # What is its own root has no derivative that is finite, and 0 times that is NaN.
        between = (squares > 0) & (squares < jnp.inf)
        norm = jnp.where(between, jnp.sqrt(jnp.where(between, squares, 1.0)), squares)
    norm = jnp.asarray(norm, f32)
    finite = jnp.isfinite(norm * scale) if options.skip_nonfinite else jnp.array(True)
    if options.clip_norm is not None:
        limit = jnp.asarray(options.clip_norm, f32)
        norm = jnp.where(finite, norm, 1.0) * scale
        below = norm < limit
        divisor = jnp.where(below | (norm == 0), 1.0, norm)
        scale = jnp.where(below, scale, scale * (limit / divisor))
    return scale, finite


def _numbers(options, count, scale, finite, f32) -> StepNumbers:
    def value(name: str) -> Any:
        number = getattr(options, name)
        if not callable(number):
            return number
        return check_scalar(f"the value of the schedule {name}", number(count))

    rule = options.rule
    b1 = 0.0 if options.b1 is None else options.b1
    steps = jnp.asarray(optax.safe_increment(count), f32)
    ahead = rule.kind == "adam" and rule.nesterov
    of_mu, of_nu = _one_minus_power(b1, steps), _one_minus_power(options.b2, steps)
    numbers = StepNumbers(
        finite=finite,
        scale=scale,
        rate=value("learning_rate"),
        decay=0.0 if options.weight_decay is None else value("weight_decay"),
        b1=b1,
        one_minus_b1=1 - b1,
        b2=options.b2,
        one_minus_b2=1 - options.b2,
        mu_factor=b1 / _one_minus_power(b1, steps + 1) if ahead else 1 / of_mu,
        nu_factor=1 / of_nu if rule.eps_root else jax.lax.rsqrt(of_nu),
        eps=options.eps,
        grad_factor=(1 - b1) / of_mu if ahead else None,
        eps_root=options.eps_root,
    )
    return StepNumbers(*(None if n is None else jnp.asarray(n).astype(f32) for n in numbers))


def _one_minus_power(b: Number, steps: jax.Array) -> jax.Array:
    """1 − b^steps, without the cancellation that costs 1 − 0.999 half its digits in fp32."""
    if isinstance(b, (int, float)):
        return -jnp.expm1(steps * (math.log(b) if b > 0 else -math.inf))
    b = jnp.asarray(b).astype(steps.dtype)
    exact = jax.lax.stop_gradient(-jnp.expm1(steps * jnp.log(b)))
    # Its derivative is that of the power: the logarithm has none at 0.
    plain = 1 - b**steps
    return exact + (plain - jax.lax.stop_gradient(plain))


# Checks


def check_scalar(name, value, low=-math.inf, high=math.inf, *, schedule=False, finite=True) -> Any:
    """Returns `value` if it is a number from `low` to below `high`, or with `schedule` a function.

    Of arrays of JAX only shape and dtype are looked at: they may be traced, and are not waited for.

    Raises:
      TypeError: it is no number, or of a dtype that is not real.
      ValueError: it is out of range, or has axes; without `finite` and `low` it may be any.
    """
    if callable(value):
        if schedule:
            return value
        raise TypeError(
            f"{name} must be a number, got {told(value)}; functions of the count are for "
            "learning_rate and weight_decay, and optax.inject_hyperparams makes them of others"
        )
    kinds = f"a number or a scalar array{', or a schedule (a function)' if schedule else ''}"
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real:
        remedy = f"float({value!r})" if isinstance(value, str) else "a float"
        raise TypeError(f"{name} must be {kinds}, got {told(value)}; pass {remedy}")
    if np.shape(value) != ():
        raise ValueError(
            f"{name} must be {kinds}, got shape {np.shape(value)}; it is one for all parameters, "
            "and optax.multi_transform has several"
        )
    if not isinstance(value, jax.Array) and (finite or low > -math.inf):
        below = f" and below {high}" if high < math.inf else ""
        if not (low <= value < high or value == high == math.inf):
            rule = f"at least {low}{below}" if low > -math.inf else "a number"
            raise ValueError(f"{name} must be {rule}, got {value}")
        if finite and math.isinf(value):
            raise ValueError(f"{name} must be finite, got {value}")
    return value


def told(value: Any) -> str:
    """Says in few words what `value` is."""
    if getattr(value, "dtype", None) is not None:
        return f"an array of dtype {value.dtype} and shape {np.shape(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def mask_of(mask: Any, params: Tree | None = None) -> Any:
    """The tree of booleans that a mask is or makes of `params`, without which a function stays.

    A tree that can be called, as a module is, is no function.

    Raises:
      TypeError: a leaf is no boolean.
    """
    if callable(mask) and all(map(callable, jax.tree.leaves(mask))):
        if params is None:
            return mask
        mask = mask(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if isinstance(leaf, Tracer) or np.ndim(leaf) or np.asarray(leaf).dtype != bool:
            raise TypeError(
                f"mask{jax.tree_util.keystr(path)} must be True or False, got {told(leaf)}; a "
                "step is compiled for what decays"
            )
    return mask
