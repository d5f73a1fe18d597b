r"""Adam, AdamW and SGD as Optax transformations, and `apply`, which updates the parameters itself.

    tx = jaxkern.fused_adamw(1e-3, clip_norm=1.0)
    state = tx.init(params)
    params, state = jaxkern.apply(tx, grads, state, params)

An Optax transformation returns updates, that `optax.apply_updates` then adds to the parameters.
`apply` does both in one pass over memory (`jaxkern.optim.kernel`), and with it what else a step
does to every element:

    unscale           the gradients are divided by the loss scale
    clip              and multiplied by min(1, clip_norm / norm), norm that of all gradients
    skip              where norm is not finite, parameters and state stay as they are
    master copy       parameters of lower precision are a rounded copy of fp32 weights in the state
    round             what is stored in bfloat16 may be rounded stochastically

The norm is the one thing that is not known before all gradients have been read: with `clip_norm` or
`skip_nonfinite` they are read twice.

A transformation's own `update` gives Optax's updates, in plain JAX. Of an `optax.chain` around it
`apply` makes one pass where it can:

    optax.chain(*before, fused, *after)

`before` makes other gradients of the gradients. The pass does what it can itself, a clip by the
global norm and the weight decay of SGD without momentum; the rest runs first, as in the chain.
`after` may scale the updates, which the pass does by its learning rate. Anything else behind it has
to have the updates in memory, as has what wraps a transformation and is no chain.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkern.core.arguments import check_dtype, check_flag
from jaxkern.core.bound import standard_promotion
from jaxkern.core.dispatch import Implementation, check_implementation, resolve
from jaxkern.core.kernel_call import warn_once
from jaxkern.optim.arithmetic import Quantised as Quantised
from jaxkern.optim.arithmetic import UpdateRule, changed
from jaxkern.optim.kernel import leaf_unsupported, update_leaves
from jaxkern.optim.step import FusedAdamState as FusedAdamState
from jaxkern.optim.step import FusedSgdState as FusedSgdState
from jaxkern.optim.step import (
    Number,
    OptimizerOptions,
    Tree,
    check_scalar,
    initial_state,
    mask_of,
    prepare,
    told,
)
from jaxkern.precision import LossScale, check_loss_scale


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate:
    """The ``update`` of a transformation that :func:`apply` knows to do in one pass."""

    options: OptimizerOptions

    @standard_promotion()
    def __call__(self, updates, state, params=None, *, loss_scale=None, grad_norm=None, **_):
        """Returns what is to be added to the parameters, and the new state, in plain JAX."""
        step = prepare(self.options, "xla", updates, state, params, loss_scale, grad_norm)
        after, deltas = [], []
        for i, (leaf, decays) in enumerate(zip(step.leaves, step.decays, strict=True)):
            new, delta = changed(self.options.rule, decays, step.numbers, step.seed, i, leaf)
            param = next(a for a in (leaf.copy, leaf.weight, leaf.grad) if a is not None)
            after.append(new)
            deltas.append(delta.astype(jnp.promote_types(leaf.grad.dtype, param.dtype)))
        return step.treedef.unflatten(deltas), step.new_state(after)


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
      tx: any Optax transformation. Those of this module take one pass, and so they do in an
        ``optax.chain``: parts in front change the gradients before it, or are parts of it
        (``clip_by_global_norm``, and ``add_decayed_weights`` before SGD without momentum); behind
        there may be ``scale``, ``scale_by_schedule`` and ``scale_by_learning_rate``. Any other
        takes ``tx.update`` and ``optax.apply_updates``, with a warning if it wraps one of this
        module. Numbers may be traced: make the transformation inside of ``jax.jit`` from what
        changes, such as a learning rate, instead of wrapping it in ``optax.inject_hyperparams``.
      grads: the gradients, of the structure and shapes of `params`.
      state: of `tx`.
      params: the parameters.
      loss_scale: by which the gradients are to be divided; the next one is
        ``loss_scale.adjust(state.last_finite)``, with `skip_nonfinite` or
        ``optax.apply_if_finite``; of a chain's state ``optax.tree.get(state, "last_finite")``.
      grad_norm: the global norm of `grads` as they are, if it is known. Inside ``jax.shard_map``
        over split parameters it has to be given, for `clip_norm` and `skip_nonfinite`.
      **extra_args: for the parts of a chain, and other transformations.

    Returns:
      The new parameters and the new state.

    The result can be differentiated, in either mode, by every array and number that it depends on;
    stochastic rounding counts as its expectation. An average in 8 bits has no derivative.

    Raises:
      ValueError: the trees differ in structure or shapes, or `grad_norm` is given to another
        transformation than those of this module, or to parts in front that the pass does not do.
      TypeError: a leaf is not floating, `state` of another kind, or `loss_scale` no loss scale.
      NotImplementedError: the transformation has ``implementation="mosaic"``, which cannot take
        this call, or it is differentiated by an average in 8 bits.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_sgd(0.5)
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = jaxkern.apply(tx, {"w": jnp.ones(2)}, tx.init(params), params)
      >>> params["w"]
      Array([0.5, 0.5], dtype=float32)
    """
    parts = _parts_of(check_transformation(tx).update, state)
    if (found := _one_pass(parts)) is None:
        grads = _unscaled(grads, loss_scale, grad_norm)
        tx = optax.with_extra_args_support(tx)
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state
    at, options = found
    before, options = _taken(options, parts[:at], params)
    if before:
        grads = _unscaled(grads, loss_scale, grad_norm)
        loss_scale = None
    states = []
    for part in before:
        grads, after = part.update(grads, part.state, params, **extra_args)
        states.append(after)
    params, after = _apply_fused(options, grads, parts[at].state, params, loss_scale, grad_norm)
    states += [after if part is parts[at] else _stepped(part) for part in parts[len(before) :]]
    return params, _joined(tx.update, state, iter(states))


@standard_promotion()
def _apply_fused(
    options: OptimizerOptions, grads: Tree, state: Any, params: Tree, loss_scale: Any, norm: Any
) -> tuple[Tree, Any]:
    """Does a step of one of this module's transformations, in one pass."""
    if params is None:
        raise ValueError("params must be the parameters, got None")
    mode = resolve(options.implementation, None, op=options.name)
    step = prepare(options, mode, grads, state, params, loss_scale, norm)
    if options.implementation == "mosaic":
        reasons = (leaf_unsupported(options.rule, leaf) for leaf in step.leaves)
        resolve("mosaic", next(filter(None, reasons), None), op=options.name)
    after = update_leaves(options.rule, mode, step.decays, step.numbers, step.seed, step.leaves)
    params = [leaf.weight if leaf.copy is None else leaf.copy for leaf in after]
    return step.treedef.unflatten(params), step.new_state(after)


def _unscaled(grads: Tree, loss_scale: LossScale | None, grad_norm: jax.Array | None) -> Tree:
    """The gradients for a transformation that knows neither their scale nor their norm."""
    if grad_norm is not None:
        raise ValueError(
            "grad_norm must be None for a transformation other than jaxkern's own, also for one in "
            "front of those in a chain that is no clip_by_global_norm; leave it out"
        )
    check_loss_scale(loss_scale)
    return grads if loss_scale is None else loss_scale.unscale(grads)


def check_transformation(tx: Any) -> Any:
    """Returns `tx` if it is a transformation."""
    if not callable(getattr(tx, "update", None)):
        raise TypeError(
            f"tx must be an Optax transformation, got {type(tx).__name__}; jaxkern.fused_adamw, "
            "for example, makes one"
        )
    return tx


def fused_adamw(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    weight_decay: Number = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
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
        p &= p - \eta \left( \frac{m / (1 - b_1^t)}
             {\sqrt{v / (1 - b_2^t) + \bar\epsilon} + \epsilon} + \lambda p \right)

    The updates are those of ``optax.adamw``, computed in fp32, and so are the arguments, up to
    `nesterov`. Every number may be traced, so ``optax.inject_hyperparams(jaxkern.fused_adamw)``
    works, and the result can be differentiated by it.

    Args:
      learning_rate: η, or a schedule: a function of the count of steps done.
      b1: decay of the average of the gradients.
      b2: decay of the average of their squares.
      eps: ε, added outside of the root.
      eps_root: ε̄, added inside of the root, which has no derivative at 0 otherwise.
      mu_dtype: of m: float32 (the default), bfloat16, float16, or int8, for codes of 8 bits with a
        scale for each 256 elements (:class:`jaxkern.optim.transforms.Quantised`), always rounded
        stochastically. Leaves of fewer than 4096 elements, or not of a multiple of 256, stay
        float32. A NaN takes its block with it. On several devices the kernel takes them inside
        ``jax.shard_map`` alone.
      weight_decay: λ, or a schedule. It is decoupled, and multiplied by η.
      mask: a tree of booleans, or a function of the parameters to one: which leaves decay. A
        boolean may stand for a subtree.
      nesterov: take b₁ m / (1 − b₁ᵗ⁺¹) + (1 − b₁) g / (1 − b₁ᵗ) for m / (1 − b₁ᵗ).
      nu_dtype: of v. A bfloat16 that is rounded to nearest cannot shrink by less than 1/512: with
        b2 of 0.999 it never decays. Let it be rounded stochastically. With uint8 it is codes of
        8 bits, 6% apart, of the same blocks.
      master_dtype: float32 keeps fp32 weights in the state for parameters of lower precision,
        which are then their rounded copy. They begin as the parameters are when ``init`` is called.
      stochastic_rounding: round what is stored in bfloat16 up or down at random, so that the
        expectation is exact: m, v, and parameters without a master copy.
      seed: of the random bits, which are a function of it, the count, and an element's index in its
        leaf, or in a device's part of a leaf that is split over devices.
      clip_norm: the gradients' largest global norm; those of a larger one are scaled down to it.
      skip_nonfinite: leave a step out whose gradients' global norm is not finite, and count it in
        the state.
      implementation: of the pass of :func:`jaxkern.apply`: ``"mosaic"`` for the Pallas GPU kernel,
        ``"xla"`` for plain JAX, ``None`` for the fastest: the kernel on an NVIDIA GPU of compute
        capability 8.0 or newer, plain JAX elsewhere. Derivatives are those of plain JAX.

    Returns:
      A transformation with a :class:`jaxkern.optim.transforms.FusedAdamState`. Its ``update`` gives
      Optax's updates, of the dtype that gradients and parameters have together, and takes
      `loss_scale` and `grad_norm` as :func:`jaxkern.apply` does. With `master_dtype` or
      `stochastic_rounding`, which Optax has not, they lead to what parameters are rounded to. Its
      ``init`` takes trees of ``jax.ShapeDtypeStruct``, too.

    Raises:
      ValueError: a number is out of range, or a dtype not one of those above.
      TypeError: a number, a flag, a mask or a dtype is none.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_adamw(1e-3, mask=lambda params: {"w": True, "b": False})
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(2)}
      >>> params, state = jaxkern.apply(tx, params, tx.init(params), params)
      >>> int(state.count)
      1

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014; Loshchilov and Hutter,
      `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2017; Dozat,
      `Incorporating Nesterov Momentum into Adam <https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ>`_,
      2016.
    """
    stochastic = check_flag("stochastic_rounding", stochastic_rounding)
    eps_root = _none_if_zero(check_scalar("eps_root", eps_root, 0))
    return _transformation(
        "fused_adamw",
        UpdateRule("adam", check_flag("nesterov", nesterov), eps_root is not None, stochastic),
        learning_rate=check_scalar("learning_rate", learning_rate, schedule=True),
        b1=check_scalar("b1", b1, 0, 1),
        b2=check_scalar("b2", b2, 0, 1),
        eps=check_scalar("eps", eps, 0),
        eps_root=eps_root,
        weight_decay=_none_if_zero(check_scalar("weight_decay", weight_decay, schedule=True)),
        mask=mask_of(mask),
        mu_dtype=_check_average("mu_dtype", mu_dtype, stochastic, "int8"),
        nu_dtype=_check_average("nu_dtype", nu_dtype, stochastic, "uint8"),
        master_dtype=master_dtype,
        seed=seed,
        clip_norm=clip_norm,
        skip_nonfinite=skip_nonfinite,
        implementation=implementation,
    )


def fused_adam(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    nu_dtype: Any = None,
    master_dtype: Any = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    clip_norm: Number | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam: :func:`fused_adamw` without weight decay, with the arguments of ``optax.adam``.

    Args, Returns and Raises are those of :func:`fused_adamw`, without `weight_decay` and `mask`.

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
        eps_root,
        mu_dtype,
        weight_decay=0.0,
        nesterov=nesterov,
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
    accumulator_dtype: Any = None,
    *,
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
    fp32, and so are the arguments, up to `accumulator_dtype`. ``optax.add_decayed_weights`` before
    it in a chain makes L2 regularization of it.

    Args:
      learning_rate: η, or a schedule.
      momentum: μ; ``None`` for none, and no state.
      nesterov: whether the step looks ahead.
      accumulator_dtype: of m: float32 (the default), bfloat16, float16 or int8, as `mu_dtype`.
      master_dtype, stochastic_rounding, seed, clip_norm, skip_nonfinite, implementation: as for
        :func:`fused_adamw`.

    Returns:
      A transformation with a :class:`jaxkern.optim.transforms.FusedSgdState`.

    Raises:
      ValueError, TypeError: as :func:`fused_adamw` does.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> tx = jaxkern.fused_sgd(0.5, momentum=0.9)
      >>> jaxkern.apply(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0]
      Array([0.5, 0.5], dtype=float32)

    References:
      Sutskever et al., `On the importance of initialization and momentum
      <https://proceedings.mlr.press/v28/sutskever13.html>`_, 2013.
    """
    stochastic = check_flag("stochastic_rounding", stochastic_rounding)
    return _transformation(
        "fused_sgd",
        UpdateRule("sgd", check_flag("nesterov", nesterov), stochastic=stochastic),
        learning_rate=check_scalar("learning_rate", learning_rate, schedule=True),
        b1=None if momentum is None else check_scalar("momentum", momentum, 0, 1),
        mu_dtype=_check_average("accumulator_dtype", accumulator_dtype, stochastic, "int8"),
        master_dtype=master_dtype,
        seed=seed,
        clip_norm=clip_norm,
        skip_nonfinite=skip_nonfinite,
        implementation=implementation,
    )


def _transformation(
    name, rule, *, master_dtype, seed, clip_norm, skip_nonfinite, implementation, **of_optimizer
) -> optax.GradientTransformationExtraArgs:
    """Checks the arguments that all optimizers have, and makes one of them."""
    if master_dtype is not None and check_dtype("master_dtype", master_dtype) != jnp.float32:
        raise ValueError(f"master_dtype must be float32 or None, got {master_dtype!r}")
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    if (dtype := getattr(seed, "dtype", None)) is not None:
        whole = jnp.issubdtype(dtype, jnp.integer) and jnp.shape(seed) == ()
    if not whole:
        raise TypeError(
            f"seed must be an integer, got {told(seed)}; of a key of JAX's take "
            "jax.random.bits(key)"
        )
    if clip_norm is not None:
        clip_norm = check_scalar("clip_norm", clip_norm, 0, finite=False)
    check_implementation(implementation)
    options = OptimizerOptions(
        name=name,
        rule=rule,
        master=master_dtype is not None,
        seed=seed,
        clip_norm=clip_norm,
        skip_nonfinite=check_flag("skip_nonfinite", skip_nonfinite),
        implementation=implementation,
        **of_optimizer,
    )
    init = functools.partial(initial_state, options)
    return optax.GradientTransformationExtraArgs(init, FusedUpdate(options))


def _check_average(name: str, dtype: Any, stochastic: bool, code: str) -> Any:
    """Returns the dtype of an average, whose codes of 8 bits have the dtype `code`, or ``None``."""
    if dtype is None:
        return None
    found = check_dtype(name, dtype)
    if found.name not in ("float32", "bfloat16", "float16", "float64", code):
        raise ValueError(f"{name} must be float32, bfloat16, float16 or {code}, got {found.name}")
    if stochastic and found == jnp.float16:
        raise ValueError(
            f"{name}=float16 cannot be rounded stochastically; use bfloat16, or leave "
            "stochastic_rounding out"
        )
    return found


def _none_if_zero(value: Any) -> Any:
    """Returns ``None`` for a Python number that is 0: the step is then compiled without it."""
    return None if isinstance(value, (int, float)) and value == 0 else value


# Chains around a fused transformation
#
# Optax holds the parts of a chain and their numbers in closures. A function is known by its code
# object, which all closures of one definition share: what is not Optax's own is not known.

_NOTHING = optax.GradientTransformation(*optax.identity())  # which takes no extra arguments
_CODES = {
    kind: getattr(tx.update, "__code__", None)
    for kind, tx in {
        "wrapped": optax.with_extra_args_support(_NOTHING),
        "chain": optax.chain(_NOTHING),
        "named_chain": optax.named_chain(("nothing", _NOTHING)),
        "masked": optax.masked(_NOTHING, True),
        "clip": optax.clip_by_global_norm(1.0),
        "decay": optax.add_decayed_weights(1.0),
        "scale": optax.scale(1.0),
        "schedule": optax.scale_by_schedule(lambda count: 1.0),
    }.items()
}


def _held(update: Any, kind: str) -> dict[str, Any]:
    """Returns the closure of an ``update``, by Optax's names, if it is Optax's of that kind."""
    code = getattr(update, "__code__", None)
    if code is None or code is not _CODES[kind]:
        return {}
    cells = (cell.cell_contents for cell in update.__closure__ or ())
    return dict(zip(code.co_freevars, cells, strict=True))


def _own(update: Any) -> Any:
    """The ``update`` that was given to a chain, without what lets it take extra arguments."""
    wrapped = _held(update, "wrapped")
    return _own(wrapped["tx"].update) if "tx" in wrapped else update


class _ChainPart(NamedTuple):
    """The ``update`` of a transformation, and its state."""

    update: Any
    state: Any

    def held(self, kind: str) -> dict[str, Any]:
        """Returns the arguments that it was made with, if it is Optax's of that kind."""
        return _held(_own(self.update), kind)

    @property
    def options(self) -> OptimizerOptions | None:
        """The options of a fused transformation."""
        options = getattr(_own(self.update), "options", None)
        return options if isinstance(options, OptimizerOptions) else None

    @property
    def inner(self) -> "_ChainPart | None":
        """The transformation that a mask is around, if this is a masked one."""
        inner = self.held("masked").get("inner")
        return inner and _ChainPart(inner.update, self.state.inner_state)


def _links(update: Any, state: Any) -> dict[Any, _ChainPart]:
    """The parts of a chain by the keys of its state; none of what is no chain, or not its state."""
    named = _held(_own(update), "named_chain").get("transforms", ())
    links = _held(_own(update), "chain").get("update_fns", ())
    links = dict(enumerate(links)) or {name: tx.update for name, tx in named}
    try:
        fits = len(state) == len(links)
        return {key: _ChainPart(link, state[key]) for key, link in links.items()} if fits else {}
    except (TypeError, KeyError):
        return {}


def _parts_of(update: Any, state: Any) -> list[_ChainPart]:
    """The parts of a chain, and of chains in it, in their order; of anything else itself."""
    links = _links(update, state).values()
    return [p for link in links for p in _parts_of(*link)] or [_ChainPart(update, state)]


def _joined(update: Any, state: Any, after: Iterator[Any]) -> Any:
    """The state of a chain after a step, of the states of its parts: of the chain's own types."""
    links = _links(update, state)
    if not links:
        return next(after)
    states = [_joined(*link, after) for link in links.values()]
    named = _held(_own(update), "named_chain")
    return collections.OrderedDict(zip(links, states, strict=True)) if named else tuple(states)


# Parts that the pass takes over


def _one_pass(parts: Sequence[_ChainPart]) -> tuple[int, OptimizerOptions] | None:
    """Returns which part is the pass, and its options with the parts behind it.

    None where the step takes two passes, with a warning if there is something fused in it.
    """
    at = max((i for i, part in enumerate(parts) if part.options), default=len(parts))
    behind = parts[at + 1 :]
    factors = [_factor(part) for part in behind]
    odd = next((p for p, factor in zip(behind, factors, strict=True) if factor is None), None)
    if odd is None and at == len(parts):
        odd = next(filter(_is_around_fused, parts), None)
    elif odd is None and (options := parts[at].options):
        rate: Any = options.learning_rate
        factor: Any = math.prod(factors)
        scaled = lambda count: (rate(count) if callable(rate) else rate) * factor
        return at, dataclasses.replace(options, learning_rate=scaled) if factors else options
    if odd is not None:
        _warn_of_two_passes(odd)
    return None


def _is_around_fused(part: _ChainPart) -> bool:
    fused = lambda a: isinstance(a, (FusedAdamState, FusedSgdState))
    return any(map(fused, jax.tree.leaves(part.state, is_leaf=fused)))


@standard_promotion()
def _factor(part: _ChainPart) -> Any:
    """The factor of the learning rate that a part behind the pass is, or ``None``."""
    factor: Any = part.held("scale").get("step_size")
    if schedule := part.held("schedule").get("step_size_fn"):
        factor = schedule(part.state.count)
    return jnp.asarray(factor, float) if _is_number(factor) else None


@standard_promotion()
def _taken(
    options: OptimizerOptions, before: Sequence[_ChainPart], params: Any
) -> tuple[Sequence[_ChainPart], OptimizerOptions]:
    """Returns the parts in front that have to run by themselves, and options with the others.

    The pass clips and then adds the decay, so they are taken from the last part on.
    """
    while before and (more := _with_part(options, before[-1], params)):
        before, options = before[:-1], more
    return before, options


def _with_part(options: OptimizerOptions, part: _ChainPart, params: Any) -> OptimizerOptions | None:
    """The options with a part in front of the pass, if the pass can do it."""
    if clip := part.held("clip"):
        limit: Any = clip.get("max_norm")
        if not _is_number(limit, 0) or (not isinstance(limit, jax.Array) and limit == 0):
            return None  # of gradients of zero, Optax makes 0 / 0
        both = limit if options.clip_norm is None else jnp.minimum(limit, options.clip_norm)
        return dataclasses.replace(options, clip_norm=both)
    # A norm would be of gradients and decay, and Optax's is not of a master copy.
    plain = options.b1 is None and not (options.master or options.skip_nonfinite)
    unused = options.clip_norm is None and options.weight_decay is None
    decay = (part.inner or part).held("decay")
    if not (decay and plain and unused):
        return None
    number = decay.get("weight_decay")
    if callable(number):
        number = number((part.inner or part).state.count)
    try:
        mask = mask_of(part.held("masked").get("mask"), params)
    except TypeError:
        return None
    taken = _is_number(number)
    return dataclasses.replace(options, weight_decay=number, mask=mask) if taken else None


def _is_number(value: Any, low: float = -math.inf) -> bool:
    """Says whether an option can be `value`."""
    try:
        return check_scalar("value", value, low, finite=False) is not None
    except (TypeError, ValueError):
        return False


def _stepped(part: _ChainPart) -> Any:
    """The state of a part that the pass has done: what it makes of a step of no leaves."""
    if part.inner:
        return part.state._replace(inner_state=_stepped(part.inner))
    return part.update({}, part.state, {})[1]


# Parts that take two passes

_LEAVE = "write it in front of the fused one in the chain, if it can stand there, or leave it out"
_INSTEAD = {
    "add_decayed_weights": "write weight_decay=... in jaxkern.fused_adamw",
    "apply_if_finite": "write skip_nonfinite=True in the fused transformation",
    "MultiSteps": "write loss, grads = jaxkern.accumulate_gradients(loss_fn, params, microbatches)",
    "inject_hyperparams": "write tx = jaxkern.fused_adamw(rate) in the jitted step, rate traced",
    "masked": "write jaxkern.apply(fused, ...) of the part of the tree that is trained",
    "partition": "write jaxkern.apply(fused, ...) once for each part of the tree",
    "flatten": "write jaxkern.apply(fused, ...), which takes many leaves in one launch",
}


def _warn_of_two_passes(part: _ChainPart) -> None:
    """Says once that a step takes two passes because of a part around or behind the pass."""
    masked = part.inner is not None and part.inner.held("decay")
    update = _own(part.inner.update if part.inner and masked else part.update)
    name = getattr(update, "__qualname__", type(update).__qualname__).split(".")[0]
    warn_once(
        f"jaxkern.apply takes two passes: {name} around or behind the fused transformation has to "
        f"have its updates in memory. Instead {_INSTEAD.get(name, _LEAVE)}"
    )
