"""The leaves and numbers of an optimizer's step, checked, and the state after it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxkern.core.dispatch import Mode
from jaxkern.optim.arguments import (
    Number,
    Options,
    Tree,
    check_loss_scale,
    check_mask_tree,
    check_number,
    check_scalar,
    floating_leaves,
    is_function,
    leaf_paths,
)
from jaxkern.optim.arithmetic import Leaf, Numbers, Static
from jaxkern.optim.gradients import sum_of_squares
from jaxkern.optim.quantise import Quantised
from jaxkern.optim.state import FusedAdamState, FusedSgdState, has_master, wrong_dtype
from jaxkern.precision import LossScale


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The input of a step, and `new_state`, which makes the new state of the new leaves."""

    leaves: list[Leaf]
    statics: tuple[Static, ...]
    treedef: Any
    numbers: Numbers
    seed: jax.Array
    new_state: Callable[[list[Leaf]], Any]


def prepare(
    options: Options,
    mode: Mode,
    grads: Tree,
    state: Any,
    params: Tree | None,
    loss_scale: LossScale | None,
    grad_norm: jax.Array | None,
) -> Prepared:
    """Checks the trees of a step, and returns its leaves and numbers.

    Raises:
      TypeError, ValueError: trees, state and options do not belong together.
    """
    check_loss_scale(loss_scale)
    if grad_norm is not None:
        check_scalar("grad_norm", grad_norm)
    decaying = options.weight_decay is not None
    if params is None and (decaying or options.master or options.rule.stochastic):
        raise ValueError(
            f"{options.name}: update needs params, for weight decay, a master copy or stochastic "
            "rounding; call update(grads, state, params)"
        )
    _check_state(options, state)
    leaves, treedef = _leaves(options, grads, state, params)
    decays = _decays(options, params) if decaying else [False] * len(leaves)
    statics = tuple(Static(i, d) for i, d in enumerate(decays))
    f32 = jnp.float32
    if any(a.dtype == jnp.float64 for leaf in leaves for a in leaf if a is not None):
        f32 = jnp.float64
    of_grads = [leaf.grad for leaf in leaves]
    scale, finite = _gradient_scale(options, mode, of_grads, loss_scale, grad_norm, f32)
    numbers = _numbers(options, state.count, scale, finite, f32)
    seed = jnp.stack([*_seed_words(options.seed), state.count.astype(jnp.uint32)])

    def new_state(after: list[Leaf]) -> Any:
        return _new_state(options, treedef, state, finite, after)

    return Prepared(leaves, statics, treedef, numbers, seed, new_state)


def _check_state(options: Options, state: Any) -> None:
    expected = FusedSgdState if options.rule.kind == "sgd" else FusedAdamState
    if not isinstance(state, expected):
        raise TypeError(
            f"{options.name}: state must be a {expected.__name__}, from this transformation's "
            f"init; got {type(state).__name__}"
        )
    if type(state.count).__module__.startswith("flax.nnx"):
        raise TypeError(
            f"{options.name}: state must hold arrays, got the nnx.Variables of an nnx.Optimizer; "
            "update by jaxkern.nn.flax.Optimizer, or pass nnx.as_pure(optimizer.opt_state)"
        )
    if options.master != (state.master is not None) or options.skip_nonfinite != (
        state.last_finite is not None
    ):
        raise ValueError(
            f"{options.name}: state is of another master_dtype or skip_nonfinite; init it anew"
        )


def _leaves(
    options: Options, grads: Tree, state: Any, params: Tree | None
) -> tuple[list[Leaf], Any]:
    like = grads if params is None else params
    name = "grads" if params is None else "params"
    like_leaves, treedef = floating_leaves(name, like)

    def aligned(what: str, tree: Tree) -> list[Any]:
        whole = (Quantised, optax.MaskedNode) if what == "master" else Quantised
        is_leaf = lambda a: isinstance(a, whole)
        if jax.tree.structure(tree, is_leaf=is_leaf) != treedef:
            where = _difference(what, tree, name, like, is_leaf)
            raise ValueError(f"{options.name}: {what} must have the structure of {name}; {where}")
        nodes = floating_leaves(what, tree)[0] if what == "grads" else treedef.flatten_up_to(tree)
        for node, other, path in zip(nodes, like_leaves, leaf_paths(like), strict=True):
            if isinstance(node, optax.MaskedNode):
                continue
            leaf = node.codes if isinstance(node, Quantised) else node
            if wrong := wrong_dtype(what, node):
                raise TypeError(f"{options.name}: {what}{path} {wrong}; init the state anew")
            if leaf.shape != other.shape:
                raise ValueError(
                    f"{options.name}: {what}{path} must have shape {other.shape}, that of "
                    f"{name}{path}; got {leaf.shape}"
                )
        return nodes

    nothing = [None] * len(like_leaves)
    of_grads = aligned("grads", grads)
    of_params = nothing if params is None else like_leaves
    sums = state.trace if isinstance(state, FusedSgdState) else state.mu
    mu = aligned("mu", sums) if options.has_mu else nothing
    nu = aligned("nu", state.nu) if isinstance(state, FusedAdamState) else nothing
    masters = aligned("master", state.master) if options.master else nothing
    leaves = []
    for g, p, m, v, master in zip(of_grads, of_params, mu, nu, masters, strict=True):
        mastered = master is not None and not isinstance(master, optax.MaskedNode)
        if p is not None and mastered != (options.master and has_master(p)):
            raise ValueError(
                f"{options.name}: a parameter is {p.dtype} and the state has "
                f"{'a' if mastered else 'no'} master copy of it; init the state for parameters "
                "of this dtype"
            )
        (m, m_scale), (v, v_scale) = map(_codes_and_scale, (m, v))
        weight, copy = (master, p) if mastered else (p, None)
        leaves.append(Leaf(g, weight, m, v, copy, m_scale, v_scale))
    return leaves, treedef


def _difference(what: str, tree: Tree, name: str, like: Tree, is_leaf: Any) -> str:
    """Says where two trees differ first, in few words whatever they hold."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    got = [jax.tree_util.keystr(path) for path, _ in found]
    want = leaf_paths(like)
    if {path.removesuffix(".value") for path in got} == {p.removesuffix(".value") for p in want}:
        if got != want:
            return f"{what} or {name} holds nnx.Variables, of which nnx.as_pure makes arrays"
        return f"the containers are of other types, as {type(tree).__name__} of {what} and " + (
            f"{type(like).__name__} of {name}"
        )
    if missing := next((path for path in want if path not in got), None):
        if f"{missing}['codes']" in got:
            return (
                f"nnx.Optimizer took the 8-bit average {what}{missing} apart; use "
                "jaxkern.nn.flax.Optimizer"
            )
        return f"{what}{missing} is missing"
    return f"{what}{next(path for path in got if path not in want)} is not in {name}"


def _codes_and_scale(node: Any) -> tuple[Any, Any]:
    if isinstance(node, Quantised):
        return node.codes, _of_first_order(node.scale)
    return node, None


@jax.custom_jvp
def _of_first_order(scale: jax.Array) -> jax.Array:
    """The scale of codes; as codes have no tangent, differentiating by it is refused."""
    return scale


@_of_first_order.defjvp
def _refuse_second_step(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "a step cannot be differentiated by an average in 8 bits, whose codes are integers: "
        "through one step, parameters have derivatives, and not from one step to the next. Leave "
        'mu_dtype="int8" and nu_dtype="uint8" out'
    )


def _new_state(
    options: Options, treedef: Any, state: Any, finite: jax.Array, after: list[Leaf]
) -> Any:
    def column(field: str) -> Tree:
        pairs = [(getattr(leaf, field), getattr(leaf, f"{field}_scale")) for leaf in after]
        return treedef.unflatten([a if s is None else Quantised(a, s) for a, s in pairs])

    count = optax.safe_increment(state.count)
    changes: dict[str, Any] = {"count": count}
    if options.skip_nonfinite:
        skipped = optax.safe_increment(state.total_notfinite)
        changes = {
            "count": jnp.where(finite, count, state.count),
            "last_finite": finite,
            "total_notfinite": jnp.where(finite, state.total_notfinite, skipped),
        }
    if options.master:
        copies = [optax.MaskedNode() if leaf.copy is None else leaf.weight for leaf in after]
        changes["master"] = treedef.unflatten(copies)
    if options.has_mu:
        changes["trace" if options.rule.kind == "sgd" else "mu"] = column("mu")
    if options.rule.kind == "adam":
        changes["nu"] = column("nu")
    return state._replace(**changes)


def _gradient_scale(
    options: Options,
    mode: Mode,
    grads: Sequence[jax.Array],
    loss_scale: Any,
    norm: Any,
    f32: Any,
) -> tuple[Any, Any]:
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


def _numbers(options: Options, count: Any, scale: Any, finite: Any, f32: Any) -> Numbers:
    def value(name: str) -> Any:
        number = getattr(options, name)
        if not callable(number):
            return number
        return check_number(f"the value of the schedule {name}", number(count))

    rule, factor = options.rule, options.rate_factor
    b1 = 0.0 if options.b1 is None else options.b1
    steps = jnp.asarray(optax.safe_increment(count), f32)
    ahead = rule.kind == "adam" and rule.nesterov
    of_mu, of_nu = _one_minus_power(b1, steps), _one_minus_power(options.b2, steps)
    numbers = Numbers(
        finite=finite,
        scale=scale,
        rate=value("learning_rate") if factor is None else value("learning_rate") * factor,
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
    return Numbers(*(None if n is None else jnp.asarray(n).astype(f32) for n in numbers))


def _one_minus_power(b: Number, steps: jax.Array) -> jax.Array:
    """1 − b^steps, without the cancellation that costs 1 − 0.999 half its digits in fp32."""
    if isinstance(b, (int, float)):
        return -jnp.expm1(steps * (math.log(b) if b > 0 else -math.inf))
    b = jnp.asarray(b).astype(steps.dtype)
    exact = jax.lax.stop_gradient(-jnp.expm1(steps * jnp.log(b)))
    # Its derivative is that of the power: the logarithm has none at 0.
    plain = 1 - b**steps
    return exact + (plain - jax.lax.stop_gradient(plain))


def _seed_words(seed: Any) -> tuple[jax.Array, jax.Array]:
    if isinstance(seed, int):
        return jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32 & 0xFFFFFFFF)
    return jnp.asarray(seed).astype(jnp.uint32), jnp.uint32(0)


def _decays(options: Options, params: Tree) -> list[bool]:
    """Says of each leaf whether it decays: as a mask says of its path, or of the start of that.

    Containers may differ in type, a mask of dicts for parameters in a FrozenDict.
    """
    mask: Any = True if options.mask is None else options.mask
    mask = mask(params) if is_function(mask) else mask
    check_mask_tree(mask)
    told = {_words(path): bool(m) for path, m in jax.tree_util.tree_leaves_with_path(mask)}
    empty = lambda node: not jax.tree.leaves(node)
    decays, used, wrong = [], set(), None
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=empty):
        words = _words(path)
        starts = [words[:n] for n in range(len(words) + 1) if words[:n] in told]
        used |= set(starts)
        if not empty(node):
            decays.append(bool(starts) and told[starts[0]])
            wrong = wrong or (None if starts else f"mask{''.join(words)} is missing")
    extra = (f"mask{''.join(words)} is not in params" for words in told if words not in used)
    if wrong := wrong or next(extra, None):
        raise ValueError(
            f"{options.name}: mask must have the structure of params, or one boolean for a "
            f"subtree; {wrong}"
        )
    return decays


def _words(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)
