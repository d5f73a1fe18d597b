"""Chains of Optax around a fused transformation: what its pass does itself, and what it cannot.

    optax.chain(*before, fused, *after)

`before` makes other gradients of the gradients. The pass does what it can itself, a clip by the
global norm and the weight decay of SGD without momentum; the rest runs first, as in the chain.
`after` may scale the updates, which the pass does by its learning rate. Anything else behind it has
to have the updates in memory, as has what wraps a transformation and is no chain.

Optax holds the parts of a chain and their numbers in closures. A function is known by its code
object, which all closures of one definition share: what is not Optax's own is not known.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxkern.core.bound import standard_promotion
from jaxkern.core.kernel_call import warn_once
from jaxkern.optim.step import (
    FusedAdamState,
    FusedSgdState,
    OptimizerOptions,
    check_scalar,
    mask_of,
)

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


class ChainPart(NamedTuple):
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
    def inner(self) -> "ChainPart | None":
        """The transformation that a mask is around, if this is a masked one."""
        inner = self.held("masked").get("inner")
        return inner and ChainPart(inner.update, self.state.inner_state)


def _links(update: Any, state: Any) -> dict[Any, ChainPart]:
    """The parts of a chain by the keys of its state; none of what is no chain, or not its state."""
    named = _held(_own(update), "named_chain").get("transforms", ())
    links = _held(_own(update), "chain").get("update_fns", ())
    links = dict(enumerate(links)) or {name: tx.update for name, tx in named}
    try:
        fits = len(state) == len(links)
        return {key: ChainPart(link, state[key]) for key, link in links.items()} if fits else {}
    except (TypeError, KeyError):
        return {}


def parts_of(update: Any, state: Any) -> list[ChainPart]:
    """The parts of a chain, and of chains in it, in their order; of anything else itself."""
    links = _links(update, state).values()
    return [p for link in links for p in parts_of(*link)] or [ChainPart(update, state)]


def joined(update: Any, state: Any, after: Iterator[Any]) -> Any:
    """The state of a chain after a step, of those of :func:`parts_of`: of the chain's own types."""
    links = _links(update, state)
    if not links:
        return next(after)
    states = [joined(*link, after) for link in links.values()]
    named = _held(_own(update), "named_chain")
    return collections.OrderedDict(zip(links, states, strict=True)) if named else tuple(states)


# Parts that the pass takes over


def one_pass(parts: Sequence[ChainPart]) -> tuple[int, OptimizerOptions] | None:
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


def _is_around_fused(part: ChainPart) -> bool:
    fused = lambda a: isinstance(a, (FusedAdamState, FusedSgdState))
    return any(map(fused, jax.tree.leaves(part.state, is_leaf=fused)))


@standard_promotion()
def _factor(part: ChainPart) -> Any:
    """The factor of the learning rate that a part behind the pass is, or ``None``."""
    factor: Any = part.held("scale").get("step_size")
    if schedule := part.held("schedule").get("step_size_fn"):
        factor = schedule(part.state.count)
    return jnp.asarray(factor, float) if _is_number(factor) else None


@standard_promotion()
def taken(
    options: OptimizerOptions, before: Sequence[ChainPart], params: Any
) -> tuple[Sequence[ChainPart], OptimizerOptions]:
    """Returns the parts in front that have to run by themselves, and options with the others.

    The pass clips and then adds the decay, so they are taken from the last part on.
    """
    while before and (more := _with_part(options, before[-1], params)):
        before, options = before[:-1], more
    return before, options


def _with_part(options: OptimizerOptions, part: ChainPart, params: Any) -> OptimizerOptions | None:
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


def stepped(part: ChainPart) -> Any:
    """The state of a part that the pass has done: what it makes of a step of no leaves."""
    if part.inner:
        return part.state._replace(inner_state=stepped(part.inner))
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


def _warn_of_two_passes(part: ChainPart) -> None:
    """Says once that a step takes two passes because of a part around or behind the pass."""
    masked = part.inner is not None and part.inner.held("decay")
    update = _own(part.inner.update if part.inner and masked else part.update)
    name = getattr(update, "__qualname__", type(update).__qualname__).split(".")[0]
    warn_once(
        f"jaxkern.apply takes two passes: {name} around or behind the fused transformation has to "
        f"have its updates in memory. Instead {_INSTEAD.get(name, _LEAVE)}"
    )
