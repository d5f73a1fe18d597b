"""What tests of selective_scan share: a float64 oracle, plain JAX, inputs, a check of accuracy."""

import contextlib
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.selective_scan import op, reference, steps
from jaxkern.ops.step_sizes import StepSizes
from tests import check

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
INF = float("inf")


def upward(
    x, dt, A, B, C, D, dt_bias, h, *, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None
):
    """A run in float64, one step at a time: (sizes, slopes, keep, states, final state, output).

    `states` are those after the step before each, (L, B, D, N), the first the initial one.
    """
    batch, length, _ = x.shape
    ids = np.zeros((batch, length)) if segment_ids is None else np.asarray(segment_ids)
    keep = np.ones((batch, length, 1, 1))
    keep[:, 1:, 0, 0] = ids[:, 1:] == ids[:, :-1]
    raw = dt + dt_bias
    smooth = np.logaddexp(raw, 0) if dt_softplus else raw
    slope = 1 / (1 + np.exp(-raw)) if dt_softplus else np.ones_like(raw)
    slope = slope * (smooth >= dt_limit[0]) * (smooth <= dt_limit[1])
    step = np.minimum(np.maximum(smooth, dt_limit[0]), dt_limit[1])
    before, y = np.empty((length, *h.shape)), np.empty_like(x)
    for t in range(length):
        before[t] = h
        enters = (step[:, t] * x[:, t])[:, :, None] * of_channels(B[:, t], x)
        h = np.exp(step[:, t, :, None] * A) * keep[:, t] * h + enters
        y[:, t] = np.sum(of_channels(C[:, t], x) * h, axis=-1) + D * x[:, t]
    return step, slope, keep, before, h, y


def of_channels(v, x):
    """B or C at a step, (B, N) or (B, G, N), of each channel of x."""
    groups = v.shape[1] if v.ndim == 3 else 1
    return np.repeat(v.reshape(len(v), groups, -1), x.shape[2] // groups, axis=1)


def oracle(x, dt, A, B, C, D, z, dt_bias, h, dout, dfinal, **options):
    """Output, final state and gradients in float64 NumPy; without a gate z is ``None``."""
    groups = B.shape[2] if B.ndim == 4 else 1
    of_group = lambda v: v.reshape(len(x), groups, -1, A.shape[1]).sum(2).reshape(B[:, 0].shape)
    step, slope, keep, states, final, y = upward(x, dt, A, B, C, D, dt_bias, h, **options)
    silu, dsilu = (1.0, 0.0) if z is None else check.activated("silu", z)
    out, dy, dz = y * silu, dout * silu, dout * y * dsilu
    dx, dstep = dy * D, np.zeros_like(x)
    dA, dB, dC = np.zeros_like(A), np.zeros_like(B), np.zeros_like(C)
    dh = dfinal.copy()
    for t in reversed(range(x.shape[1])):
        decay = np.exp(step[:, t, :, None] * A)
        before = keep[:, t] * states[t]
        entered = (step[:, t] * x[:, t])[:, :, None]
        after = decay * before + entered * of_channels(B[:, t], x)
        dh += dy[:, t, :, None] * of_channels(C[:, t], x)
        dC[:, t] = of_group(dy[:, t, :, None] * after)
        dB[:, t] = of_group(dh * entered)
        into = np.sum(dh * of_channels(B[:, t], x), axis=-1)
        ddecay = dh * before * decay
        dx[:, t] += into * step[:, t]
        dstep[:, t] = into * x[:, t] + np.sum(ddecay * A, axis=-1)
        dA += np.einsum("bdn,bd->dn", ddecay, step[:, t])
        dh = keep[:, t] * dh * decay
    ddt = dstep * slope
    sums = ((dy * x).sum((0, 1)), ddt.sum((0, 1)))
    return (out, final), (dx, ddt, dA, dB, dC, sums[0], dz, sums[1], dh)


def plain(
    x, dt, A, B, C, D, z, dt_bias, initial_state=None,
    *, dt_softplus=True, dt_limit=(0.0, INF), segment_ids=None,
):  # fmt: skip
    """What a user would write: a scan over time, in the dtype of x."""
    if absent := initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *A.shape))
    A, B, C, D, dt, dt_bias, h = (
        v.astype(x.dtype) for v in (A, B, C, D, dt, dt_bias, initial_state)
    )
    dt = dt + dt_bias
    dt = jax.nn.softplus(dt) if dt_softplus else dt
    dt = jnp.where(dt < dt_limit[0], dt_limit[0], jnp.where(dt > dt_limit[1], dt_limit[1], dt))
    of_channel = lambda v: jnp.repeat(v, A.shape[0] // v.shape[2], axis=2)
    B, C = (of_channel(v if v.ndim == 4 else v[:, :, None]) for v in (B, C))
    ids = jnp.zeros(x.shape[:2], int) if segment_ids is None else segment_ids
    keep = (ids == jnp.concatenate([ids[:, :1], ids[:, :-1]], 1)).astype(x.dtype)

    def step(h, token):
        x, dt, b, c, keep = token
        h = jnp.exp(dt[..., None] * A) * keep[:, None, None] * h + (dt * x)[..., None] * b
        return h, jnp.sum(h * c, axis=-1)

    tokens = tuple(jnp.moveaxis(v, 1, 0) for v in (x, dt, B, C, keep))
    h, y = jax.lax.scan(step, h, tokens)
    out = (jnp.moveaxis(y, 0, 1) + D * x) * jax.nn.silu(z.astype(x.dtype))
    return out if absent else (out, h)


def inputs(batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None):
    """Like a Mamba block's: step sizes from 0.01 to 1, rates from 1 to N. No initial state."""
    return inputs_and_state(batch, length, dim, states, dtype, weight_dtype, seed, groups)[:-1]


def inputs_and_state(
    batch, length, dim, states, dtype="float32", weight_dtype=None, seed=0, groups=None
):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    grouped = () if groups is None else (groups,)
    arrays = (
        normal(batch, length, dim),
        normal(batch, length, dim) - 2,
        -np.arange(1.0, states + 1) * np.exp(0.1 * normal(dim, states)),
        normal(batch, length, *grouped, states),
        normal(batch, length, *grouped, states),
        1 + 0.1 * normal(dim),
        normal(batch, length, dim),
        0.5 * normal(dim),
        normal(batch, dim, states),
    )
    weights = {"A", "D", "dt_bias", "initial_state"}
    return tuple(
        jnp.asarray(v.astype(jnp.dtype((weight_dtype or dtype) if name in weights else dtype)))
        for name, v in zip(NAMES, arrays, strict=True)
    )


def scan(*arrays, implementation, dt_softplus=True, **options):
    """selective_scan of arrays in the order of NAMES."""
    return jaxkern.selective_scan(
        *arrays[:7],
        **dict(zip(NAMES[7:], arrays[7:], strict=False)),
        dt_softplus=dt_softplus,
        implementation=implementation,
        **options,
    )


def check_case(arrays, implementation, **options):
    """With an initial state among the arrays, the final state and its cotangent are checked too."""
    full, length = len(arrays) == len(NAMES), arrays[0].shape[1]
    own = {name: options.pop(name) for name in ("checkpoint_every",) if name in options}
    check.check_accuracy(
        scan,
        plain,
        oracle_of_case,
        arrays,
        implementation,
        own=own | {"return_final_state": full},
        dtypes=[str(arrays[0].dtype), "float32"][: 1 + full],
        rounding=3e-6 * max(1, length / 1024) ** 0.5,
        **options,
    )


def oracle_of_case(*arrays, **options):
    """:func:`oracle`, of zeros for an absent state, and the size of the terms of dD.

    They are dout · silu(z) · x; with few tokens their sum can be small, and rounding one in fp32
    is no error of the kernel's.
    """
    full, (x, _, A, _, _, _, z) = len(arrays) == len(NAMES) + 2, arrays[:7]
    zeros = np.zeros((x.shape[0], *A.shape))
    of_op = arrays if full else (*arrays[:-1], zeros, arrays[-1], zeros)
    (out, final), grads = oracle(*of_op, **options)
    terms = np.abs(of_op[9] * z / (1 + np.exp(-z)) * x).sum((0, 1))
    if full:
        return (out, final), grads, {7: np.linalg.norm(terms)}
    return out, grads[:-1], {6: np.linalg.norm(terms)}


def packed_ids(batch, length):
    """Segments of 1 to 6 tokens, with other ends in each row."""
    ids = np.cumsum(np.random.default_rng(0).integers(0, 4, (batch, length)) == 0, axis=1)
    return jnp.asarray(ids, jnp.int32)


def below_zero(x, dt, A, B, C, D, z, dt_bias, *initial_state):
    """Step sizes for no softplus, some below 0, which is the lowest by default."""
    dt = jnp.exp(dt) - 0.1
    assert 0 < jnp.sum(dt < 0) < dt.size
    return x, dt, A, B, C, D, z, 0.01 * dt_bias, *initial_state


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
        out, final, states = self._run(op.FORWARD, arrays, segment_ids)
        joined = (out, 2), (final, 1), (states, 2)
        return [reference.join_channels(v, axis) for v, axis in joined]

    def backward(self, arrays, dout, dfinal, segment_ids=None):
        """The gradients, from the states that float64 saves."""
        states = self.saved(self.wide(arrays, segment_ids))
        x, *_, state = reference.by_group(arrays)
        given = (
            states.reshape(*states.shape[:2], *state.shape[1:]).astype(jnp.float32),
            dout,
            dfinal,
        )
        shapes = given[0].shape, x.shape, state.shape
        given = (jnp.reshape(v, shape) for v, shape in zip(given, shapes, strict=True))
        grads = self._run(op.BACKWARD, arrays, segment_ids, *given)
        return [g if g is None else g.reshape(a.shape) for g, a in zip(grads, arrays, strict=False)]

    def _run(self, kernel_pass, arrays, segment_ids, *more):
        keep = None
        if segment_ids is not None:
            new = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            keep = 1 - new.astype(jnp.float32)
        sizes = StepSizes(self.dt_softplus, *self.dt_limit)
        options = reference.Options(sizes, True, self.every, "interpret", save=True)
        with short_chunks(self.chunk):
            run = _jitted(kernel_pass, options, self.chunk)
            return run(*reference.by_group(arrays), keep, None, *more)

    def wide(self, arrays, segment_ids):
        """Arguments of the oracle in float64, zeros for what is absent but a gate, and options."""
        zeros = np.zeros(arrays[0].shape[2])
        arrays = [zeros if v is None and i != 6 else v for i, v in enumerate(arrays)]
        options = {"dt_softplus": self.dt_softplus, "dt_limit": self.dt_limit}
        wide = [v if v is None else np.asarray(v, np.float64) for v in arrays]
        return wide, options | {"segment_ids": segment_ids}

    def saved(self, wide):
        (*of, _, dt_bias, state), options = wide
        before = upward(*of, dt_bias, state, **options)[3]
        return np.moveaxis(before[:: self.every], 0, 1)

    def check(self, name, arrays, segment_ids=None):
        """One pass, ``"forward"`` or ``"backward"``, to a rounding of its results."""
        rng, wide = np.random.default_rng(17), self.wide(arrays, segment_ids)
        given = [jnp.asarray(rng.normal(size=v.shape), v.dtype) for v in (arrays[0], arrays[8])]
        results, grads = oracle(*wide[0], *(np.asarray(v, np.float64) for v in given), **wide[1])
        if name == "forward":
            got, want = self.forward(arrays, segment_ids), (*results, self.saved(wide))
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
