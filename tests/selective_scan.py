"""What tests of selective_scan share: what those of ssd do, and its kernels each by itself."""

import contextlib
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.scan_options import StepSizes, join_groups
from jaxkern.ops.selective_scan import op, reference, steps
from tests import check, ssd
from tests.ssd import ALONG, INF, NAMES


def in_heads(x, dt, A, B, C, D, z, dt_bias, *states_and_dout):
    """Arguments of ssd's oracle: channels are heads of one, with a rate for each state."""
    h, dout, dfinal = (*states_and_dout, None, None, None)[:3]
    x, z, dout = (v if v is None else v[..., None] for v in (x, z, dout))
    h, dfinal = (v if v is None else v[:, :, None] for v in (h, dfinal))
    B, C = (v if v.ndim == 4 else v[:, :, None] for v in (B, C))
    return x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal


NO_LIMIT = {"dt_limit": (-INF, INF)}
"""The default of selective_scan alone."""


def oracle(*arrays, **options):
    """Output, final state and gradients in float64 NumPy; what is absent is None."""
    (out, final), grads = ssd.oracle(*in_heads(*arrays), **NO_LIMIT | options)
    flat = (g if a is None else g.reshape(a.shape) for g, a in zip(grads, arrays, strict=False))
    return (out[..., 0], final[:, :, 0]), tuple(flat)


def plain(*arrays, **options):
    """What a user would write: a scan over time, in the dtype of x."""
    state = arrays[8:] or [jnp.zeros((len(arrays[0]), *arrays[2].shape))]
    out, final = ssd.plain(*in_heads(*arrays[:8], *state)[:9], **NO_LIMIT | options)
    return (out[..., 0], final[:, :, 0]) if arrays[8:] else out[..., 0]


def inputs(*size_and_dtypes, **options):
    """Like a Mamba block's, with rates from 1 to N. No initial state."""
    return inputs_and_state(*size_and_dtypes, **options)[:-1]


def inputs_and_state(
    batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None
):
    x, weights = (batch, length, dim), (*(() if groups is None else (groups,)), states)
    rates = lambda rng: -np.arange(1.0, states + 1) * np.exp(0.1 * rng.normal(size=(dim, states)))
    of_tokens = x, x, rates, (batch, length, *weights)
    return ssd.drawn(*of_tokens, (dim,), (batch, dim, states), dtype, weight_dtype, seed)


scan = functools.partial(ssd.scan, op=jaxkern.selective_scan)
STEP = jaxkern.selective_scan_step
check_case = functools.partial(ssd.check_scan, scan, plain, oracle)


@contextlib.contextmanager
def short_chunks(count):
    """Chunks of `count` steps: the interpreter compiles each step of a chunk, 8 for half a minute.

    What is traced inside must have options or shapes that nothing traced outside has.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("jaxkern.ops.selective_scan.") and hasattr(module, "CHUNK"):
                patch.setattr(module, "CHUNK", count)
        patch.setattr(steps.Steps.__init__, "__defaults__", (count,))
        yield


class Kernels(NamedTuple):
    """The kernels of both passes in the interpreter, each by itself and against float64.

    A chunk has `chunk` steps, and states are saved `every` steps.
    """

    chunk: int
    every: int
    dt_softplus: bool = True
    dt_limit: tuple[float, float] = (0.0, INF)

    def forward(self, arrays, segment_ids=None):
        """Output, final state and saved states."""
        results = self._run(op.FORWARD, arrays, segment_ids)
        return [join_groups(v, n) for v, n in zip(results, (2, 1, 2), strict=True)]

    def backward(self, arrays, dout, dfinal, segment_ids=None):
        """The gradients, from the states that float64 saves."""
        x, *_, state = reference.by_group(arrays)
        saved = jnp.float32(self._saved(arrays, segment_ids))
        given = (
            (saved, (*saved.shape[:2], *state.shape[1:])),
            (dout, x.shape),
            (dfinal, state.shape),
        )
        given = (v.reshape(shape) for v, shape in given)
        grads = self._run(op.BACKWARD, arrays, segment_ids, *given)
        return [g if g is None else g.reshape(a.shape) for g, a in zip(grads, arrays, strict=False)]

    def _run(self, kernel_pass, arrays, segment_ids, *more):
        keep = None
        if segment_ids is not None:
            new = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            keep = 1 - new.astype(jnp.float32)
        sizes = StepSizes(self.dt_softplus, *self.dt_limit)
        options = reference.SelectiveScanOptions(sizes, True, self.every, "interpret", save=True)
        with short_chunks(self.chunk):
            run = _jitted(kernel_pass, options, self.chunk)
            return run(*reference.by_group(arrays), keep, None, *more)

    def _oracle(self, *arrays, segment_ids):
        options = {"dt_softplus": self.dt_softplus, "dt_limit": self.dt_limit}
        return check.in_float64(oracle, *arrays, segment_ids=segment_ids, **options)

    def _saved(self, arrays, segment_ids):
        """The oracle's states before the first step and then after `every` more."""
        states, along = [], [name in ALONG for name in NAMES]
        for count in range(0, arrays[0].shape[1], self.every):
            cut = lambda v: None if v is None else v[:, :count]  # noqa: B023
            x, *of = (cut(v) if is_along else v for v, is_along in zip(arrays, along, strict=True))
            results, _ = self._oracle(x, *of, x, None, segment_ids=cut(segment_ids))
            states.append(results[1])
        return np.stack(states, axis=1)

    def check(self, name, arrays, segment_ids=None):
        """One pass, ``"forward"`` or ``"backward"``, to a rounding of its results."""
        rng = np.random.default_rng(17)
        given = [jnp.asarray(rng.normal(size=v.shape), v.dtype) for v in (arrays[0], arrays[8])]
        results, grads = self._oracle(*arrays, *given, segment_ids=segment_ids)
        if name == "forward":
            got = self.forward(arrays, segment_ids)
            want = *results, self._saved(arrays, segment_ids)
        else:
            got, want = self.backward(arrays, *given, segment_ids), grads
        for i, (ours, truth) in enumerate(zip(got, want, strict=True)):
            if ours is not None:
                error, rounding = check.relative_error(ours, truth), jnp.finfo(ours.dtype).eps / 2
                assert error <= float(rounding) + 3e-6, f"{name} {i}: {error:.1e}"


@functools.cache
def _jitted(kernel_pass, options, chunk):
    del chunk  # of which there is a program each
    return jax.jit(functools.partial(kernel_pass, options))


KERNELS, SIZE = Kernels(chunk=2, every=2), (2, 5, 66, 5)
"""Three chunks, the last with padding, of two blocks of channels: one program for many tests."""
