"""Scans and convolutions at small size, to be split along their sequence."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkern
from tests import check

TOLERANCE = 2e-5
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FOUR_DEVICES = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def random(*shape: int, seed: int = 0) -> jax.Array:
    """Normal values in fp32, the same ones for a shape and seed."""
    return jnp.asarray(np.random.default_rng((*shape, seed)).normal(size=shape).astype("float32"))


def ids_of(batch: int, length: int) -> jax.Array:
    """Segments of which one goes through several parts, and some begin with one or end in one."""
    ends = [3, length // 8, length // 8 + 1, 5 * length // 8, length - 2]
    ids = [np.searchsorted(ends, np.arange(length) - row, side="right") for row in range(batch)]
    return jnp.asarray(np.stack(ids), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op at small size, with decays by which the last token remembers the first.

    Attributes:
      call: the op, of all `arrays`, the last two of which are the initial states and segment ids.
      arrays: in fp32.
      axes: of each array, a letter for each: b, l, d for channels or heads, and others.
    """

    call: Any
    arrays: tuple[Any, ...]
    axes: str


def _linear(reverse: bool) -> Op:
    b, l, d = 2, 64, 6

    def call(a, b, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "reverse": reverse}
        return jaxkern.linear_scan(a, b, **options)

    a = 1 - 0.02 * jax.nn.sigmoid(random(b, l, d))
    return Op(call, (a, random(b, l, d, seed=1), random(b, d), ids_of(b, l)), "bld bld bd bl")


def _conv(d: int) -> Op:
    b, l, w = 2, 32, 4

    def call(x, weight, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "activation": "silu"}
        return jaxkern.causal_conv1d(x, weight, bias, **options)

    arrays = random(b, l, d), random(d, w), random(d), random(b, w - 1, d), ids_of(b, l)
    return Op(call, arrays, "bld dw d bkd bl")


def _selective(every: int | None = 8) -> Op:
    b, l, d, n = 2, 32, 6, 3

    def call(x, dt, A, B, C, D, z, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "checkpoint_every": every}
        options |= {"dt_bias": bias, "dt_softplus": True}
        return jaxkern.selective_scan(x, dt, A, B, C, D, z, **options)

    tokens = [random(b, l, d, seed=i) for i in range(3)]
    weights = [random(b, l, n, seed=i) for i in range(2)]
    x, dt, z = tokens
    arrays = (
        *(x, dt, -jnp.exp(random(d, n)), *weights, random(d), z),
        *(random(d) - 5, random(b, d, n), ids_of(b, l)),
    )
    return Op(call, arrays, "bld bld dn bln bln d bld d bdn bl")


def _ssd(every: int | None = 128) -> Op:
    b, l, h, p, n = 2, 512, 4, 3, 5

    def call(x, dt, A, B, C, D, z, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "checkpoint_every": every}
        options |= {"dt_bias": bias, "dt_softplus": True}
        return jaxkern.ssd(x, dt, A, B, C, D, z, **options)

    x, z = (random(b, l, h, p, seed=i) for i in range(2))
    weights = [random(b, l, 1, n, seed=i) for i in range(2)]
    arrays = (
        *(x, random(b, l, h), -jnp.exp(random(h)), *weights, random(h), z),
        *(random(h) - 6, random(b, h, p, n), ids_of(b, l)),
    )
    return Op(call, arrays, "bldp bld d blgn blgn d bldp d bdpn bl")


OPS = {
    "linear_scan": _linear(False),
    "linear_scan reverse": _linear(True),
    "causal_conv1d": _conv(128),
    "causal_conv1d of few channels": _conv(6),
    "selective_scan": _selective(),
    "selective_scan none saved": _selective(None),
    "ssd": _ssd(),
    "ssd none saved": _ssd(None),
}


def value_and_grads(op: Op, **options: Any) -> Any:
    """Results and the gradients of all arrays, by cotangents that differ everywhere."""

    def run(*arrays: Any) -> Any:
        *floats, ids = arrays
        of = functools.partial(op.call, ids=ids, **options)
        call = lambda *floats: of(*floats[:-1], state=floats[-1])
        out, vjp = jax.vjp(call, *floats)
        return out, vjp(jax.tree.map(lambda v: jnp.cos(2 * v), out))

    return jax.jit(run)


def mesh_of(kind: AxisType, shape: tuple[int, ...], names: str) -> Any:
    """A mesh of the first devices, each letter of `names` an axis."""
    count = int(np.prod(shape))
    return jax.make_mesh(shape, tuple(names), (kind,) * len(shape), devices=jax.devices()[:count])


GIVEN = {
    "alone": lambda arrays: (*arrays[:-2], None, None),
    "continued": lambda arrays: (*arrays[:-1], None),
    "packed": lambda arrays: arrays,
}
"""Which of an op's arrays a test passes: neither state nor segments, a state, both."""


def check_results(
    got: Any,
    oracle: Callable[..., Any],
    arrays: Any,
    cotangents: Any,
    rounding: Any,
    **options: Any,
) -> None:
    """Holds results and gradients to a NumPy oracle, with no other program to compile.

    In fp32 an error is at most twice that of the oracle run in fp32. Where `rounding` is given it
    is also at most one rounding of the result and this, relative.

    Args:
      got: results and gradients, as the oracle has them.
      oracle: ``oracle(*arrays, *cotangents, **options)``.
      arrays: the op's arguments.
      cotangents: of its results.
      rounding: relative; it must be given where a result has 16 bits.
      options: of the oracle.
    """

    def run(dtype: str) -> list[Any]:
        given = (np.asarray(v).astype(dtype) for v in (*arrays, *cotangents))
        return jax.tree.leaves(oracle(*given, **options))

    ours, truths = jax.tree.leaves(got), run("float64")
    wide = all(v.dtype == jnp.float32 for v in jax.tree.leaves(got[0]))
    assert wide or rounding is not None
    others = run("float32") if wide else truths
    for i, (our, other, truth) in enumerate(zip(ours, others, truths, strict=True)):
        if wide:
            check.at_most_twice(f"array {i}", our, other.astype(our.dtype), truth)
        if rounding is not None:
            error = check.relative_error(our, truth)
            assert error <= float(jnp.finfo(our.dtype).eps) / 2 + rounding, (
                f"array {i}: {error:.1e}"
            )
        if our.dtype == jnp.bfloat16:  # rounded once: fp32 errors flip few roundings
            check.assert_close(our, truth.astype(our.dtype), 3e-4)
