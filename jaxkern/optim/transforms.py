r"""Adam, AdamW and SGD as Optax transformations, and `apply`, which updates the parameters itself.

    tx = jaxkern.fused_adamw(1e-3, clip_norm=1.0)
    state = tx.init(params)
    params, state = jaxkern.apply(tx, grads, state, params)

An Optax transformation returns updates, that `optax.apply_updates` then adds to the parameters.
`apply` does both in one pass over memory (`jaxkern.optim.update`), and with it what else a step
does to every element:

    unscale           the gradients are divided by the loss scale
    clip              and multiplied by min(1, clip_norm / norm), norm that of all gradients
    skip              where norm is not finite, parameters and state stay as they are
    master copy       parameters of lower precision are a rounded copy of fp32 weights in the state
    round             what is stored in bfloat16 may be rounded stochastically

The norm is the one thing that is not known before all gradients have been read: with `clip_norm` or
`skip_nonfinite` they are read twice.

A transformation's own `update` does the same in plain JAX, for `optax.chain` and its like.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.optim.gradients import floating_leaves, is_floating, leaf_paths, sum_of_squares
from jaxkern.optim.quantise import BLOCK, Quantised, quantisable
from jaxkern.optim.update import (
    Leaf,
    Numbers,
    Rule,
    Static,
    changed,
    leaf_unsupported,
    update_leaves,
)
from jaxkern.precision import LossScale

Tree = Any
Number = Any
"""A Python number, a scalar array, or for a schedule a function of the count."""


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


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate:
    """The ``update`` of a transformation that :func:`apply` runs in one pass, by `step`."""

    update: Callable[..., tuple[Tree, Any]]
    step: Callable[..., tuple[Tree, Any]]

    def __call__(self, updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any):
        return self.update(updates, state, params, **extra_args)


def apply(
    tx: optax.GradientTransformation,
    grads: Tree,
    state: Any,
    params: Tree,
    *,
    loss_scale: LossScale | None = None,
    grad_norm: jax.Array | None = None,
    **extra_args: Any,
) -> tuple[Tree, Any]:
    """Do a step of `tx`: its update and ``optax.apply_updates``, in one pass where it is fused.

    The kernels work in place. Call it under ``jax.jit`` with `params` and `state` donated, or XLA
    copies them first. JAX gives donated buffers away in the order of the arguments, each to the
    first result of its shape and dtype: arguments in the order of the results, `params` before
    `state`, keep theirs, where others are copied.

    Args:
      tx: any Optax transformation. Those of this module themselves take one pass; any other, also
        one that wraps them, takes ``tx.update`` and ``optax.apply_updates``.
      grads: the gradients, of the structure and shapes of `params`.
      state: of `tx`.
      params: the parameters.
      loss_scale: by which the gradients are to be divided; the next one is
        ``loss_scale.adjust(state.last_finite)``, with `skip_nonfinite` or
        ``optax.apply_if_finite``.
      grad_norm: the global norm of `grads` as they are, if it is known. Inside ``jax.shard_map``
        over split parameters it has to be given, for `clip_norm` and `skip_nonfinite`.
      **extra_args: for the update of another transformation.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: the trees differ in structure or shapes.
      TypeError: a leaf is not floating.
      NotImplementedError: the transformation has ``implementation="mosaic"``, which cannot take
        this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_sgd(0.5)
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = jaxkern.apply(tx, {"w": jnp.ones(2)}, tx.init(params), params)
      >>> params["w"]
      Array([0.5, 0.5], dtype=float32)
    """
    if isinstance(tx.update, FusedUpdate):
        return tx.update.step(grads, state, params, loss_scale=loss_scale, grad_norm=grad_norm)
    if loss_scale is not None:
        grads = loss_scale.unscale(grads)
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def fused_adamw(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 1e-4,
    *,
    mask: Any = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    master_dtype: Any = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    clip_norm: Number | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW, whose step :func:`jaxkern.apply` does in one pass.

    .. math::
        m &= b_1 m + (1 - b_1) g, \qquad v = b_2 v + (1 - b_2) g^2 \\
        p &= p - \eta \left( \frac{m / (1 - b_1^t)}{\sqrt{v / (1 - b_2^t)} + \epsilon}
             + \lambda p \right)

    The updates are those of ``optax.adamw``, computed in fp32. Every number may be traced, so
    ``optax.inject_hyperparams(jaxkern.fused_adamw)`` works.

    Args:
      learning_rate: η, or a schedule: a function of the count of steps done.
      b1: decay of the average of the gradients.
      b2: decay of the average of their squares.
      eps: ε, added outside of the root.
      weight_decay: λ, or a schedule. It is decoupled, and multiplied by η.
      mask: a tree of booleans, or a function of the parameters to one: which leaves decay. A
        boolean may stand for a subtree.
      mu_dtype: of m: float32 (the default), bfloat16, float16, or int8, for codes of 8 bits with a
        scale for each 256 elements (:class:`jaxkern.optim.quantise.Quantised`), always rounded
        stochastically. Leaves of fewer than 4096 elements, or not of a multiple of 256, stay
        float32. A NaN takes its block with it. On several devices the kernel takes them inside
        ``jax.shard_map`` alone.
      nu_dtype: of v. A bfloat16 that is rounded to nearest cannot shrink by less than 1/512: with
        b2 of 0.999 it never decays. Let it be rounded stochastically. With uint8 it is codes of
        8 bits, 6% apart, of the same blocks.
      master_dtype: float32 keeps fp32 weights in the state for parameters of lower precision,
        which are then their rounded copy. They begin as the parameters are when ``init`` is called.
      stochastic_rounding: round what is stored in bfloat16 up or down at random, so that the
        expectation is exact: m, v, and parameters without a master copy.
      seed: of the random bits, which are a function of it, the count, and an element's place in its
        leaf; of a leaf split over devices, in each device's part.
      clip_norm: the gradients' largest global norm; those of a larger one are scaled down to it.
      skip_nonfinite: leave a step out whose gradients' global norm is not finite, and count it in
        the state.
      implementation: of the pass of :func:`jaxkern.apply`: ``"mosaic"`` for the Pallas GPU kernel,
        ``"xla"`` for plain JAX (the only one that can be differentiated in forward mode),
        ``None`` for the fastest: the kernel on an NVIDIA GPU of compute capability 9.0 or newer,
        plain JAX elsewhere.

    Returns:
      A transformation with a :class:`jaxkern.optim.transforms.FusedAdamState`. Its updates have the
      dtype of the parameters.

    Raises:
      ValueError: a number is out of range, or a dtype not one of those above.
      TypeError: a dtype is none.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_adamw(1e-3, mask=lambda params: {"w": True, "b": False})
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(2)}
      >>> params, state = jaxkern.apply(tx, params, tx.init(params), params)
      >>> int(state.count)
      1

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014; Loshchilov and Hutter,
      `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2017.
    """
    return _fused(
        _Options(
            name="fused_adamw",
            rule=Rule("adam", stochastic=bool(stochastic_rounding)),
            learning_rate=learning_rate,
            b1=_in_range("b1", b1, 0, 1),
            b2=_in_range("b2", b2, 0, 1),
            eps=_in_range("eps", eps, 0),
            weight_decay=_decay(weight_decay),
            mask=mask,
            mu_dtype=_state_dtype("mu_dtype", mu_dtype, stochastic_rounding, "int8"),
            nu_dtype=_state_dtype("nu_dtype", nu_dtype, stochastic_rounding, "uint8"),
            master=_master(master_dtype),
            seed=seed,
            clip_norm=_in_range("clip_norm", clip_norm, 0),
            skip_nonfinite=skip_nonfinite,
            implementation=implementation,
        )
    )


def fused_adam(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    master_dtype: Any = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    clip_norm: Number | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam: :func:`fused_adamw` without weight decay.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_adam(0.5)
      >>> jaxkern.apply(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0].round(3)
      Array([0.5, 0.5], dtype=float32)
    """
    return fused_adamw(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay=None,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        master_dtype=master_dtype,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        clip_norm=clip_norm,
        skip_nonfinite=skip_nonfinite,
        implementation=implementation,
    )


def fused_sgd(
    learning_rate: Number,
    momentum: Number | None = None,
    nesterov: bool = False,
    *,
    accumulator_dtype: Any = None,
    master_dtype: Any = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    clip_norm: Number | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient descent, whose step :func:`jaxkern.apply` does in one pass.

    .. math:: m = \mu m + g, \qquad p = p - \eta m

    With Nesterov's momentum p − η (g + μ m). The updates are those of ``optax.sgd``, computed in
    fp32. ``optax.add_decayed_weights`` before it in a chain makes L2 regularization of it.

    Args:
      learning_rate: η, or a schedule.
      momentum: μ; ``None`` for none, and no state.
      nesterov: whether the step looks ahead.
      accumulator_dtype: of m: float32 (the default), bfloat16, float16 or int8, as `mu_dtype`.
      master_dtype: as for :func:`fused_adamw`; so are those below.
      stochastic_rounding: round what is stored in bfloat16 at random.
      seed: of the random bits.
      clip_norm: the gradients' largest global norm.
      skip_nonfinite: leave out steps of gradients that are not finite.
      implementation: of the pass.

    Returns:
      A transformation with a :class:`jaxkern.optim.transforms.FusedSgdState`.

    Raises:
      ValueError: a number is out of range, or a dtype not one of those above.
      TypeError: a dtype is none.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_sgd(0.5, momentum=0.9)
      >>> jaxkern.apply(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0]
      Array([0.5, 0.5], dtype=float32)

    References:
      Sutskever et al., `On the importance of initialization and momentum
      <https://proceedings.mlr.press/v28/sutskever13.html>`_, 2013.
    """
    return _fused(
        _Options(
            name="fused_sgd",
            rule=Rule("sgd", nesterov=bool(nesterov), stochastic=bool(stochastic_rounding)),
            learning_rate=learning_rate,
            b1=_in_range("momentum", momentum, 0, 1),
            mu_dtype=_state_dtype(
                "accumulator_dtype", accumulator_dtype, stochastic_rounding, "int8"
            ),
            master=_master(master_dtype),
            seed=seed,
            clip_norm=_in_range("clip_norm", clip_norm, 0),
            skip_nonfinite=skip_nonfinite,
            implementation=implementation,
        )
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    name: str
    rule: Rule
    learning_rate: Number
    b1: Number
    mu_dtype: Any
    master: bool
    seed: int
    clip_norm: Number | None
    skip_nonfinite: bool
    implementation: Implementation | None
    b2: Number = 0.0
    nu_dtype: Any = None
    eps: Number = 0.0
    weight_decay: Number | None = None
    mask: Any = None

    @property
    def has_mu(self) -> bool:
        return self.b1 is not None


def _fused(options: _Options) -> optax.GradientTransformationExtraArgs:
    if options.implementation not in (None, "mosaic", "xla"):
        resolve(options.implementation, None, op=options.name)

    def init(params):
        leaves, treedef = floating_leaves("params", params)
        zeros = lambda dtype: treedef.unflatten([_zeros(p, dtype) for p in leaves])
        masters = [p.astype(jnp.float32) if _has_master(p) else optax.MaskedNode() for p in leaves]
        common = {
            "master": treedef.unflatten(masters) if options.master else None,
            "last_finite": jnp.array(True) if options.skip_nonfinite else None,
            "total_notfinite": jnp.int32(0) if options.skip_nonfinite else None,
        }
        mu = zeros(options.mu_dtype) if options.has_mu else None
        if options.rule.kind == "sgd":
            return FusedSgdState(jnp.int32(0), mu, **common)
        return FusedAdamState(jnp.int32(0), mu, zeros(options.nu_dtype), **common)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        step = _prepare(options, "xla", updates, state, params, None, None)
        after, deltas = [], []
        for leaf, static in zip(step.leaves, step.statics, strict=True):
            new, delta = changed(
                options.rule, static.decays, step.numbers, step.seed, static.number, leaf
            )
            param = next(a for a in (leaf.copy, leaf.weight, leaf.grad) if a is not None)
            after.append(new)
            deltas.append(delta.astype(param.dtype))
        return step.treedef.unflatten(deltas), step.new_state(after)

    def apply_step(grads, state, params, *, loss_scale, grad_norm):
        if params is None:
            raise ValueError("params must be the parameters, got None")
        mode = resolve(options.implementation, None, op=options.name)
        step = _prepare(options, mode, grads, state, params, loss_scale, grad_norm)
        if options.implementation == "mosaic":
            reasons = (leaf_unsupported(options.rule, leaf) for leaf in step.leaves)
            resolve("mosaic", next((r for r in reasons if r), None), op=options.name)
        after = update_leaves(
            options.rule, mode, step.numbers, step.seed, step.leaves, step.statics
        )
        params = [leaf.weight if leaf.copy is None else leaf.copy for leaf in after]
        return step.treedef.unflatten(params), step.new_state(after)

    return optax.GradientTransformationExtraArgs(init, FusedUpdate(update, apply_step))


def _zeros(param: jax.Array, dtype: Any) -> Any:
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        if quantisable(param.shape):
            scale = jnp.zeros(param.size // BLOCK, jnp.float32)
            return Quantised(jnp.zeros_like(param, dtype=dtype), scale)
        dtype = None
    return jnp.zeros_like(param, dtype=dtype or jnp.promote_types(param.dtype, jnp.float32))


def _wrong_dtype(what: str, node: Any) -> str | None:
    """What is wrong with a gradient, an average or a master copy, a leaf or codes."""
    if not isinstance(node, Quantised):
        right = node.dtype == jnp.float32 if what == "master" else is_floating(node)
        wanted = "float32" if what == "master" else "floating"
        return None if right else f"must be a {wanted} array, got {node.dtype}"
    code, scales = "uint8" if what == "nu" else "int8", (node.codes.size // BLOCK,)
    if (node.codes.dtype, node.scale.dtype, node.scale.shape) == (code, jnp.float32, scales):
        return None
    return (
        f"must be {code} codes with a float32 scale for each {BLOCK}, {scales}; got "
        f"{node.codes.dtype} and {node.scale.dtype}{list(node.scale.shape)}"
    )


def _has_master(param: jax.Array) -> bool:
    return jnp.finfo(param.dtype).bits < 32


@dataclasses.dataclass(frozen=True)
class _Prepared:
    leaves: list[Leaf]
    statics: list[Static]
    treedef: Any
    numbers: Numbers
    seed: jax.Array
    new_state: Callable[[list[Leaf]], Any]


def _prepare(
    options: _Options,
    mode: Mode,
    grads: Tree,
    state: Any,
    params: Tree | None,
    loss_scale: LossScale | None,
    grad_norm: jax.Array | None,
) -> _Prepared:
    """The leaves and numbers of a step, checked."""
    decaying = options.weight_decay is not None
    if params is None and (decaying or options.master or options.rule.stochastic):
        raise ValueError(
            f"{options.name}: update needs params, for weight decay, a master copy or stochastic "
            "rounding; call update(grads, state, params)"
        )
    expected = FusedSgdState if options.rule.kind == "sgd" else FusedAdamState
    if not isinstance(state, expected):
        raise TypeError(
            f"{options.name}: state must be a {expected.__name__}, from this transformation's "
            f"init; got {type(state).__name__}"
        )
    if options.master != (state.master is not None) or options.skip_nonfinite != (
        state.last_finite is not None
    ):
        raise ValueError(
            f"{options.name}: state is of another master_dtype or skip_nonfinite; init it anew"
        )
    like = grads if params is None else params
    name = "grads" if params is None else "params"
    like_leaves, treedef = floating_leaves(name, like)

    def aligned(what: str, tree: Tree) -> list[jax.Array]:
        if what == "grads":
            floating_leaves(what, tree)
        whole = (Quantised, optax.MaskedNode) if what == "master" else Quantised
        structure = jax.tree.structure(tree, is_leaf=lambda a: isinstance(a, whole))
        if structure != treedef:
            raise ValueError(
                f"{options.name}: {what} must have the structure of {name}, {treedef}; got "
                f"{structure}"
            )
        nodes = treedef.flatten_up_to(tree)
        for node, other, path in zip(nodes, like_leaves, leaf_paths(like), strict=True):
            if isinstance(node, optax.MaskedNode):
                continue
            leaf = node.codes if isinstance(node, Quantised) else node
            if wrong := _wrong_dtype(what, node):
                raise TypeError(f"{options.name}: {what}{path} {wrong}; init the state anew")
            if leaf.shape != other.shape:
                raise ValueError(
                    f"{options.name}: {what}{path} must have shape {other.shape}, that of "
                    f"{name}{path}; got {leaf.shape}"
                )
        return nodes

    nothing = [None] * len(like_leaves)
    grad_leaves = aligned("grads", grads)
    param_leaves = nothing if params is None else like_leaves
    sums = state.trace if isinstance(state, FusedSgdState) else state.mu
    mu = aligned("mu", sums) if options.has_mu else nothing
    nu = aligned("nu", state.nu) if isinstance(state, FusedAdamState) else nothing
    masters = aligned("master", state.master) if options.master else nothing
    leaves = []
    for g, p, m, v, master in zip(grad_leaves, param_leaves, mu, nu, masters, strict=True):
        has_master = master is not None and not isinstance(master, optax.MaskedNode)
        if p is not None and has_master != (options.master and _has_master(p)):
            raise ValueError(
                f"{options.name}: a parameter is {p.dtype} and the state has "
                f"{'a' if has_master else 'no'} master copy of it; init the state for parameters "
                "of this dtype"
            )
        (m, m_scale), (v, v_scale) = (a if isinstance(a, Quantised) else (a, None) for a in (m, v))
        weight, copy = (master, p) if has_master else (p, None)
        leaves.append(Leaf(g, weight, m, v, copy, m_scale, v_scale))
    decays = _decays(options, params, treedef) if decaying else [False] * len(leaves)
    statics = [Static(i, d) for i, d in enumerate(decays)]
    f32 = jnp.float32
    if any(a.dtype == jnp.float64 for leaf in leaves for a in leaf if a is not None):
        f32 = jnp.float64
    scale, finite = _gradient_scale(options, mode, grad_leaves, loss_scale, grad_norm, f32)
    numbers = _numbers(options, state.count, scale, finite, f32)
    seed = jnp.stack([*_seed_words(options.seed), state.count.astype(jnp.uint32)])

    def new_state(after: list[Leaf]) -> Any:
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

    return _Prepared(leaves, statics, treedef, numbers, seed, new_state)


def _gradient_scale(
    options: _Options, mode: Mode, grads: list[jax.Array], loss_scale: Any, norm: Any, f32: Any
) -> tuple[Any, Any]:
    """What the gradients are multiplied by, and whether their norm is finite."""
    scale = jnp.ones((), f32)
    if loss_scale is not None:
        scale = 1 / jnp.asarray(loss_scale.loss_scale, f32)
    if options.clip_norm is None and not options.skip_nonfinite:
        return scale, jnp.array(True)
    if norm is None:
        norm = jnp.sqrt(sum_of_squares(mode, grads, f32))
    norm = jnp.asarray(norm, f32) * scale
    if options.clip_norm is not None:
        limit = jnp.asarray(options.clip_norm, f32)
        scale = jnp.where(norm < limit, scale, scale * (limit / norm))
    return scale, jnp.isfinite(norm) if options.skip_nonfinite else jnp.array(True)


def _numbers(options: _Options, count: Any, scale: Any, finite: Any, f32: Any) -> Numbers:
    value = lambda number: number(count) if callable(number) else number
    b1 = 0.0 if options.b1 is None else options.b1
    step = jnp.asarray(optax.safe_increment(count), f32)
    numbers = Numbers(
        finite=finite,
        scale=scale,
        rate=value(options.learning_rate),
        decay=0.0 if options.weight_decay is None else value(options.weight_decay),
        b1=b1,
        one_minus_b1=1 - b1,
        b2=options.b2,
        one_minus_b2=1 - options.b2,
        mu_factor=1 / _one_minus_power(b1, step),
        nu_factor=jax.lax.rsqrt(_one_minus_power(options.b2, step)),
        eps=options.eps,
    )
    return Numbers(*(jnp.asarray(n).astype(f32) for n in numbers))


def _one_minus_power(b: Number, step: jax.Array) -> jax.Array:
    """1 − b^step, without the cancellation that costs 1 − 0.999 half its digits in fp32."""
    if isinstance(b, (int, float)):
        return -jnp.expm1(step * (math.log(b) if b > 0 else -math.inf))
    return -jnp.expm1(step * jnp.log(b))


def _seed_words(seed: Any) -> tuple[jax.Array, jax.Array]:
    if isinstance(seed, int):
        return jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32 & 0xFFFFFFFF)
    return jnp.asarray(seed).astype(jnp.uint32), jnp.uint32(0)


def _decays(options: _Options, params: Tree, treedef: Any) -> list[bool]:
    if options.mask is None:
        return [True] * treedef.num_leaves
    mask = options.mask(params) if callable(options.mask) else options.mask
    spread = jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), mask, params)
    return jax.tree.leaves(spread)


def _in_range(name: str, value: Any, low: float, high: float = math.inf) -> Any:
    """`value` if it is traced, no number yet, or in [low, high)."""
    if isinstance(value, (int, float, np.floating)) and not low <= value < high:
        raise ValueError(f"{name} must be at least {low} and below {high}, got {value}")
    return value


def _decay(value: Any) -> Any:
    """``None`` where nothing decays, which is compiled in."""
    return None if isinstance(value, (int, float)) and value == 0 else value


def _state_dtype(name: str, dtype: Any, stochastic: bool, code: str) -> Any:
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name} must be a dtype, got {dtype!r}; e.g. jnp.bfloat16") from None
    if found.name not in ("float32", "bfloat16", "float16", "float64", code):
        raise ValueError(f"{name} must be float32, bfloat16, float16 or {code}, got {found.name}")
    if stochastic and found == jnp.float16:
        raise ValueError(
            f"{name}=float16 cannot be rounded stochastically; use bfloat16, or leave "
            "stochastic_rounding out"
        )
    return found


def _master(dtype: Any) -> bool:
    if dtype is not None and jnp.dtype(dtype) != jnp.float32:
        raise ValueError(f"master_dtype must be float32 or None, got {jnp.dtype(dtype).name}")
    return dtype is not None
