"""What kernels do on generations of GPUs that differ from Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.core import kernel_call, target
from jaxkern.core.target import GPUS
from tests.check import combinations

BEFORE_HOPPER = ("a100", "a10g", "l40s")


def arrays(*shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def rms_norm(tokens, channels):
    x, weight = arrays((tokens, channels), (channels,))
    return jaxkern.rms_norm, (x, weight)


def causal_conv1d(tokens, channels):
    x, weight, bias = arrays((2, tokens, channels), (channels, 4), (channels,))
    return functools.partial(jaxkern.causal_conv1d, activation="silu"), (x, weight, bias)


def linear_scan(tokens, channels):
    a, x = arrays((2, tokens, channels), (2, tokens, channels))
    return jaxkern.linear_scan, (jax.nn.sigmoid(a), x)


def selective_scan(tokens, channels):
    x, dt, A, B, C = arrays(
        *[(2, tokens, channels)] * 2, (channels, 16), (2, tokens, 16), (2, tokens, 16)
    )
    op = functools.partial(jaxkern.selective_scan, dt_softplus=True, checkpoint_every=8)
    return op, (x, dt, -jnp.exp(A.astype(jnp.float32)), B, C)


RINGS = (rms_norm, causal_conv1d, linear_scan, selective_scan)
"""The ops whose kernels have rings in shared memory."""


def value_and_gradients(op):
    def run(*args):
        out, vjp = jax.vjp(functools.partial(op, implementation="mosaic"), *args)
        return out, vjp(out)

    return jax.jit(run)


def lowered(gpu, f, *args):
    with jaxkern.lowering_for(gpu):
        return f.trace(*args).lower(lowering_platforms=("cuda",))


def text(case, gpu):
    op, args = case(256, 4096)
    return lowered(gpu, value_and_gradients(op), *args).as_text()


@combinations("case gpu", RINGS, BEFORE_HOPPER, few=3)
def test_lanes_copy_where_there_is_no_tma(case, gpu):
    told = text(case, gpu)
    assert "cp.async.commit_group" in told
    assert "cp.async.bulk" not in told
    assert "cp.async.commit_group" not in text(case, "h200")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["two warpgroups", "one"])
def test_scan_with_few_checkpoints_fits_99_kib(dtype):
    """The sequence is cut into parts, whose carries are a pass of the backward."""
    tokens, states = (1, 2048, 256), (1, 2048, 16)
    x, dt, A, B, C, D, z = arrays(tokens, tokens, (256, 16), states, states, (256,), tokens)
    op = value_and_gradients(functools.partial(jaxkern.selective_scan, checkpoint_every=128))
    lowered("l40s", op, *(a.astype(dtype) for a in (x, dt, A, B, C, D, z)))


@pytest.mark.compiled
@pytest.mark.parametrize("size", [(512, 4096), (301, 1000), (40, 256)], ids=str)
@pytest.mark.parametrize("shared_memory", [232448, 101376], ids=["227 KiB", "99 KiB"])
@pytest.mark.parametrize("case", RINGS)
def test_lanes_copy_what_the_tma_copies(case, shared_memory, size):
    op, args = case(*size)
    here = target.of_process()
    assert here is not None

    def results(tma):
        name = f"tma={tma}, {shared_memory} bytes"
        gpu = dataclasses.replace(here, name=name, tma=tma, shared_memory=shared_memory)
        with jaxkern.lowering_for(gpu):
            return jax.tree.leaves(value_and_gradients(op)(*args))

    for by_lanes, by_tma in zip(results(False), results(True), strict=True):
        np.testing.assert_array_equal(by_lanes, by_tma)


def test_it_is_noted_why_a_pass_is_plain_jax():
    kernel_call.refused.clear()
    product = jax.jit(functools.partial(jaxkern.linear, implementation="mosaic"))
    traced = product.trace(*arrays((256, 256), (256, 256)))
    with jaxkern.lowering_for("l40s"), pytest.raises(NotImplementedError, match="wgmma"):
        traced.lower(lowering_platforms=("cuda",))
    assert "wgmma" in kernel_call.refused["linear_fwd"]


def test_what_a_gpu_is_said_to_have_follows_its_capability():
    assert [name for name, gpu in GPUS.items() if not gpu.tma] == ["t4", *BEFORE_HOPPER]
    assert [name for name, gpu in GPUS.items() if gpu.unsupported] == ["t4"]
    assert dataclasses.replace(GPUS["h200"], tma=False).tma is False
