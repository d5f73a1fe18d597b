"""The states between the sections of a sequence, by the kernel and in plain JAX."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.core.target import interpreter
from jaxkern.ops import sections
from jaxkern.ops.sections import SectionOptions
from tests import check
from tests.pairs import combinations

INF, NAN = np.inf, np.nan


def _in_order(decay: Any, own: Any, first: Any, reverse: bool) -> Any:
    """One section after the other, in float64."""
    decay, own, h = (np.asarray(v, np.float64) for v in (decay, own, first))
    per_unit = own.shape[2] // max(1, decay.shape[2])
    decay, states = np.repeat(decay, per_unit, 2), np.empty_like(own)
    for s in range(own.shape[1])[:: -1 if reverse else 1]:
        states[:, s] = h
        kept = ~np.isnan(decay[:, s]) & ~(np.isinf(decay[:, s]) & (h == 0))
        h = own[:, s] + np.multiply(decay[:, s], h, where=kept, out=np.zeros_like(h))
    return states, h


def _arrays(batch: int, sections: int, units: int, size: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    decay = rng.uniform(size=(batch, sections, units))
    own, first = rng.normal(size=(batch, sections, size)), rng.normal(size=(batch, size))
    return jnp.float32(decay), jnp.float32(own), jnp.float32(first)


def _run(f: Any, *arrays: Any) -> Any:
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        return jax.jit(f)(*arrays)


RUNS = sections.launch_states, sections.reference_states
SHAPES = {
    "a decay a state": (1, 16, 384, 384),
    "padded": (2, 3, 300, 300),
    "a decay a unit": (2, 8, 2, 512),
    "units narrower than a block": (1, 4, 3, 240),
    "four states a lane": (2, 2, 2, 1024),
    "four states and decays a lane": (1, 2, 1024, 1024),
    "no rows": (0, 4, 8, 8),
    "no states": (2, 4, 0, 0),
}


@pytest.mark.gpu
@combinations("shape reverse", SHAPES, [True, False])
def test_states_are_those_of_a_loop(shape, reverse, monkeypatch):
    if shape[-1] == 1024:
        monkeypatch.setattr(sections, "num_sms", lambda: 1)  # for which 1024 are enough
    arrays = _arrays(*shape)
    want = _in_order(*arrays, reverse)
    for run in RUNS:
        got = _run(functools.partial(run, SectionOptions(reverse)), *arrays)
        check.assert_close(got, want, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "reverse"),
    [(1, True), (5, False), pytest.param(5, True, marks=pytest.mark.exhaustive)],
)
def test_state_after_sections_in_a_row(count, reverse):
    decay, own, _ = _arrays(count, 2, 3, 3 * 4)
    after = functools.partial(sections.state_after_all, reverse=reverse)
    got = _run(after, decay[..., None], own.reshape(count, 2, 3, 4))
    row = decay.reshape(1, count, -1), own.reshape(1, count, -1), np.zeros((1, 2 * 3 * 4))
    check.assert_close(got.reshape(1, -1), _in_order(*row, reverse)[1], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS)
def test_what_a_section_keeps_nothing_of(run):
    """A new segment keeps nothing even of a NaN; of a zero an infinite decay makes no NaN."""
    decay = jnp.array([[[NAN, NAN, INF, INF, 0.0, 0.0, 0.5, 0.5]]]).repeat(2, 1)
    first = jnp.array([[NAN, INF, 0.0, 1.0, NAN, 1.0, NAN, 0.0]])
    states, last = _run(functools.partial(run, SectionOptions()), decay, jnp.ones((1, 2, 8)), first)
    after = np.array([[1, 1, 1, INF, NAN, 1, NAN, 1]])
    np.testing.assert_array_equal(states, np.stack([first, after], 1))
    np.testing.assert_array_equal(last, [[1, 1, INF, INF, NAN, 1, NAN, 1.5]])


def test_gradients_pass_states_of_zero():
    decay, own, first = _arrays(1, 4, 6, 6)
    decay = decay.at[0, 1, 0].set(NAN)
    last = lambda first: sections.reference_states(SectionOptions(), decay, own, first)[1].sum()
    got = jax.grad(last)(jnp.zeros_like(first))
    want = jnp.where(jnp.isnan(decay), 0, decay).prod(1)
    check.assert_close(got, want, 1e-6)


def test_what_the_kernel_takes():
    decay, own, first = _arrays(1, 4, 6, 6)
    assert sections.unsupported_states(SectionOptions(), decay, own, first) is None
    half = own.astype(jnp.bfloat16)
    assert "bfloat16" in str(sections.unsupported_states(SectionOptions(), decay, half, first))
