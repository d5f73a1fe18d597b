"""What tests of ops along sequences share: oracles in NumPy, calls of one shape, a comparison."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from bench.cases.scans import delta_rule
from tests import check, selective_scan, ssd


def linear_scan(a, b, state, dout, dfinal=0.0, *, reverse=False, segment_ids=None):
    """Results and gradients of linear_scan, one step at a time, there and back."""
    order = range(a.shape[1])[:: -1 if reverse else 1]
    keep = np.ones((*a.shape[:2], 1), a.dtype)
    if segment_ids is not None:
        same = np.diff(segment_ids, axis=1) == 0
        keep[:, (slice(-1) if reverse else slice(1, None)), 0] = same
    h, before, out = state, np.empty_like(a), np.empty_like(b)
    for t in order:
        before[:, t] = keep[:, t] * h
        h = a[:, t] * before[:, t] + b[:, t]
        out[:, t] = h
    da, db, dh = np.empty_like(a), np.empty_like(b), dfinal
    for t in reversed(order):
        dh = dh + dout[:, t]
        da[:, t], db[:, t] = dh * before[:, t], dh
        dh = keep[:, t] * a[:, t] * dh
    return (out, h), (da, db, dh)


def causal_conv1d(x, weight, bias, state, dout, dfinal=0.0, *, activation="silu", segment_ids=None):
    """Results and gradients of causal_conv1d, one tap at a time."""
    (batch, length, dim), width = x.shape, weight.shape[1]
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    inputs = np.concatenate([state, x], axis=1)
    segments = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    segments = np.pad(segments, ((0, 0), (width - 1, 0)))[..., None]
    seen = [segments[:, w : w + length] == segments[:, width - 1 :] for w in range(width)]
    taps = [np.where(s, inputs[:, w : w + length], 0) for w, s in enumerate(seen)]
    s = bias + sum(weight[:, w] * tap for w, tap in enumerate(taps))
    with np.errstate(over="ignore"):
        out, slope = check.activated(activation, s)
    ds, dinputs = dout * slope, np.zeros_like(inputs)
    for w in range(width):
        dinputs[:, w : w + length] += np.where(seen[w], weight[:, w] * ds, 0)
    kept = segments[:, length:] == segments[:, -1:]
    dinputs[:, length:] += np.where(kept, dfinal, 0)
    total = lambda v: np.moveaxis(v, -1, 0).reshape(dim, -1).sum(1)  # pairwise
    dweight = np.stack([total(ds * tap) for tap in taps], 1)
    grads = dinputs[:, width - 1 :], dweight, total(ds), dinputs[:, : width - 1]
    return (out, np.where(kept, inputs[:, length:], 0)), grads


def gated_delta_rule(v, k, q, g, beta, state, dout, dfinal=0.0, *, segment_ids=None, **options):
    """Results and gradients of gated_delta_rule, token by token, with JAX's derivative."""
    new = np.zeros(v.shape[:2], bool)
    if segment_ids is not None:
        new[:, 1:] = np.diff(segment_ids, axis=1) != 0
    arrays = v, k, q, g, beta, state
    given = dout, np.broadcast_to(dfinal, state.shape).astype(state.dtype)
    with jax.enable_x64(True):
        found = check.program(_delta_rule_of_tokens, **options)(arrays, given, new=new)
        return jax.tree.map(np.asarray, found)


def _delta_rule_of_tokens(v, k, q, g, beta, state, new, **options):
    return delta_rule(q, k, v, g, beta, state, new, **options)


def random(*shape: int, seed: int = 0) -> jax.Array:
    """Normal values in fp32, the same ones for a shape and seed."""
    return jnp.asarray(np.random.default_rng((*shape, seed)).normal(size=shape).astype("float32"))


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op that carries a state along time, a function of its arrays, the initial state last.

    Attributes:
      call: ``call(*arrays, **options)``.
      oracle: ``oracle(*arrays, dout, dfinal, segment_ids=...) -> (out, final), gradients``.
      axes: of each array a letter for each: b, l, d for channels or heads, and others.
      remembering: makes of normal values arrays by which the last token remembers the first.
      reverse: whether time runs from the end to the start.
    """

    call: Callable[..., Any]
    oracle: Callable[..., Any]
    axes: str
    remembering: Callable[..., tuple[Any, ...]] = lambda *arrays: arrays
    reverse: bool = False

    @property
    def along(self) -> list[bool]:
        """Whether each array but the state is along time."""
        return [axes.startswith("bl") for axes in self.axes.split()[:-1]]

    def arrays(self, states: int | None = None, **sizes: int) -> tuple[Any, ...]:
        """Arrays of these sizes of axes, with this many initial states in a row, or one."""
        *shapes, (batch, *state) = ([sizes[c] for c in axes] for axes in self.axes.split())
        shapes.append([batch, *([states] if states else []), *state])
        return self.remembering(*(random(*v, seed=i) for i, v in enumerate(shapes)))


def _linear_scan(a, b, state, **options):
    return jaxkern.linear_scan(a, b, initial_state=state, **options)


def _causal_conv1d(x, weight, bias=None, state=None, **options):
    options = {"activation": "silu", "initial_state": state} | options
    return jaxkern.causal_conv1d(x, weight, bias, **options)


def _delta_rule(v, k, q, g, beta, state, **options):
    return jaxkern.gated_delta_rule(q, k, v, g, beta, initial_state=state, **options)


def _slowly_forgetting(v, k, q, g, beta, state):
    """Keys of length 1 at most; decays and moves to new values that add up to about 1."""
    k = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1)
    g, beta = (jax.nn.sigmoid(x) / v.shape[1] for x in (g, beta))
    return v, k, q, -g, 8 * beta, state


def _of_steps(op, oracle, axes):
    """An op whose step sizes are found from dt and here add up to about 1."""

    def call(*arrays, **options):
        *arrays, bias, state = arrays
        options = {"dt_softplus": True, "dt_bias": bias, "initial_state": state} | options
        return op(*arrays, **options)

    def remembering(x, dt, A, B, C, D, z, bias, state):
        return x, dt, -jnp.exp(A), B, C, D, z, bias - np.log(4 * x.shape[1]), state

    return Op(call, oracle, axes, remembering)


def _decays(a, *rest):
    return 1 - 0.02 * jax.nn.sigmoid(a), *rest


OPS = {
    "linear_scan": Op(_linear_scan, linear_scan, "bld bld bd", _decays),
    "linear_scan reverse": Op(
        functools.partial(_linear_scan, reverse=True),
        functools.partial(linear_scan, reverse=True),
        "bld bld bd",
        _decays,
        reverse=True,
    ),
    "causal_conv1d": Op(_causal_conv1d, causal_conv1d, "bld dw d bkd"),
    "selective_scan": _of_steps(
        jaxkern.selective_scan, selective_scan.oracle, "bld bld dn bln bln d bld d bdn"
    ),
    "gated_delta_rule": Op(
        _delta_rule, gated_delta_rule, "bldp blgn blgn bld bld bdnp", _slowly_forgetting
    ),
    "KDA": Op(_delta_rule, gated_delta_rule, "bldp blgn blgn bldn bld bdnp", _slowly_forgetting),
    "ssd": _of_steps(jaxkern.ssd, ssd.oracle, "bldp bld d blgn blgn d bldp d bdpn"),
}


def check_case(call, oracle, arrays, implementation, *, absent=0, final=True, own=None, **options):
    """Holds results and gradients to an oracle in NumPy by :func:`tests.check.check_accuracy`.

    The last arrays, `absent` of them, are left out, and zeros to the oracle; without `final` so is
    the final state. Returns the output, and the oracle's of fp32 arrays.
    """
    given = len(arrays) - absent

    def truth(*wide, **options):
        zeros = (np.zeros_like(v) for v in arrays[given:])
        results, grads = oracle(*wide[:given], *zeros, *wide[given:], **options)
        return results[: 1 + final], grads[:given]

    own = {"return_final_state": final} | (own or {})
    found = check.check_accuracy(
        call, None, truth, arrays[:given], implementation, own=own, **options
    )
    return tuple(jax.tree.leaves(each)[0] for each in found)
