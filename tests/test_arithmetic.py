"""The functions that kernels compute by other means than the units for them, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.mosaic.launch import interpreter, launch_kernel
from jaxkern.ops.curves import kernel_functions
from jaxkern.ops.softplus import exp2_by_polynomial, softplus
from tests import check

SIZE = 1024
LAYOUT = plgpu.Layout.WG_STRIDED((SIZE,), vec_size=8)


def in_kernel(f, x):
    def kernel(x_ref, out_ref):
        out_ref[...] = f(plgpu.load(x_ref, layout=LAYOUT, optimized=False))

    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        return launch_kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((SIZE,), jnp.float32),
            kernel_name="arithmetic",
            approx_math=True,
        )(x)


def in_plain_jax(f, x):
    with interpreter():  # instructions of the GPU are functions of JAX's there
        return jax.jit(f)(x)


both = pytest.mark.parametrize(
    "run",
    [
        pytest.param(in_plain_jax, id="xla"),
        pytest.param(in_kernel, id="mosaic", marks=pytest.mark.gpu),
    ],
)


@both
def test_exp2_by_polynomial(run):
    x = jnp.linspace(-125.4, 127.99, SIZE, dtype=jnp.float32)
    want = np.exp2(np.asarray(x, np.float64))
    got = np.asarray(run(exp2_by_polynomial, x), np.float64)
    assert abs(got / want - 1).max() < 2 * 2.0**-23


@both
def test_exp2_by_polynomial_out_of_range(run):
    inf, nan = np.inf, np.nan
    x = [-inf, -1e30, -150, -126.6, -0.0, 0, 1, 128, 1e30, inf, nan]
    want = [0, 0, 0, 0, 1, 1, 2, inf, inf, inf, nan]
    got = run(exp2_by_polynomial, jnp.resize(jnp.array(x, jnp.float32), SIZE))
    np.testing.assert_allclose(got[: len(x)], np.float32(want), rtol=2.0**-22)


@both
@pytest.mark.parametrize(("exact", "error"), [(True, 6e-7), (False, 3e-6)])
def test_softplus(run, exact, error):
    x = jnp.linspace(-5, 40, SIZE, dtype=jnp.float32)
    want = np.logaddexp(0, np.asarray(x, np.float64))
    got = np.asarray(run(lambda v: softplus(v, exact), x), np.float64)
    assert abs(got / want - 1).max() < error


@both
@pytest.mark.parametrize(("exact", "error"), [(True, 4e-7), (False, 2e-6)])
def test_tanh(run, exact, error):
    """Of both signs, on both sides of where it becomes a polynomial, and far out."""
    x = np.concatenate([np.geomspace(1e-30, 30, SIZE // 2 - 3), [0.0, np.inf, np.nan]])
    x = jnp.asarray(np.concatenate([x, -x]), jnp.float32)
    got = np.asarray(run(kernel_functions(exact, LAYOUT).tanh, x), np.float64)
    want = np.tanh(np.asarray(x, np.float64))
    np.testing.assert_allclose(got, want, rtol=error, atol=0)
