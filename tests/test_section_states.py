"""The states between the sections of a sequence, by the kernel and in plain JAX."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.mosaic.launch import interpreter
from jaxkern.ops import section_states
from jaxkern.ops.section_states import Options
from tests import check

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
    keys = jax.random.split(jax.random.key(0), 3)
    decay = jax.random.uniform(keys[0], (batch, sections, units))
    own = jax.random.normal(keys[1], (batch, sections, size))
    return decay, own, jax.random.normal(keys[2], (batch, size))


@pytest.mark.newest
@pytest.mark.gpu
@pytest.mark.parametrize("run", [section_states.launch, section_states.reference])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 16, 384, 384), id="a decay a state"),
        pytest.param((2, 3, 300, 300), id="padded"),
        pytest.param((2, 8, 2, 512), id="a decay a unit"),
        pytest.param((1, 4, 3, 240), id="units narrower than a block"),
        pytest.param((2, 2, 132, 132 * 512), id="four states a lane"),
        pytest.param((1, 2, 132 * 1024, 132 * 1024), id="four states and decays a lane"),
        pytest.param((0, 4, 8, 8), id="no rows"),
        pytest.param((2, 4, 0, 0), id="no states"),
    ],
)
def test_states_are_those_of_a_loop(run, reverse, shape):
    arrays = _arrays(*shape)
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        got = jax.jit(lambda *v: run(Options(reverse), *v))(*arrays)
    check.assert_close(got, _in_order(*arrays, reverse), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sections", [1, 5])
def test_state_after_sections_in_a_row(sections, reverse):
    decay, own, _ = _arrays(sections, 2, 3, 3 * 4)
    shaped = decay[..., None], own.reshape(sections, 2, 3, 4)
    after = functools.partial(section_states.state_after_all, reverse=reverse)
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        got = jax.jit(after)(*shaped)
    first = np.zeros((1, 2 * 3 * 4))
    row = decay.reshape(1, sections, -1), own.reshape(1, sections, -1), first
    check.assert_close(got.reshape(1, -1), _in_order(*row, reverse)[1], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [section_states.launch, section_states.reference])
def test_what_a_section_keeps_nothing_of(run):
    """A new segment keeps nothing even of a NaN; of a zero an infinite decay makes no NaN."""
    decay = jnp.array([[[NAN, NAN, INF, INF, 0.0, 0.0, 0.5, 0.5]]]).repeat(2, 1)
    first = jnp.array([[NAN, INF, 0.0, 1.0, NAN, 1.0, NAN, 0.0]])
    own = jnp.ones((1, 2, 8))
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        states, last = jax.jit(lambda *v: run(Options(), *v))(decay, own, first)
    after = np.array([[1, 1, 1, INF, NAN, 1, NAN, 1]])
    np.testing.assert_array_equal(states, np.stack([first, after], 1))
    np.testing.assert_array_equal(last, [[1, 1, INF, INF, NAN, 1, NAN, 1.5]])


def test_gradients_pass_states_of_zero():
    decay, own, first = _arrays(1, 4, 6, 6)
    decay = decay.at[0, 1, 0].set(NAN)
    last = lambda first: section_states.reference(Options(), decay, own, first)[1].sum()
    got = jax.grad(last)(jnp.zeros_like(first))
    want = jnp.where(jnp.isnan(decay), 0, decay).prod(1)
    check.assert_close(got, want, 1e-6)


def test_what_the_kernel_takes():
    decay, own, first = _arrays(1, 4, 6, 6)
    assert section_states.unsupported(Options(), decay, own, first) is None
    half = own.astype(jnp.bfloat16)
    assert "bfloat16" in str(section_states.unsupported(Options(), decay, half, first))
