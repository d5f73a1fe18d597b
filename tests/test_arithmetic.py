"""The functions that kernels compute by other means than the units for them, against float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.target import interpreter
from jaxkern.mosaic.arithmetic import exp2_by_polynomial, softplus
from jaxkern.mosaic.launch import launch_kernel
from jaxkern.ops.curves import kernel_functions
from tests import check

SIZE = 1024
LAYOUT = plgpu.Layout.WG_STRIDED((SIZE,), vec_size=8)
# Values of both signs, on both sides of where tanh becomes a polynomial, and far out.
BOTH_SIGNS = np.outer([1, -1], [*np.geomspace(1e-30, 30, SIZE // 2 - 3), 0.0, np.inf, np.nan])
FAR = np.resize([-np.inf, -1e30, -150, -126.6, -0.0, 0, 1, 128, 1e30, np.inf, np.nan], SIZE)
RANGE = np.linspace(-5, 40, SIZE)


def exp2(x):
    """In fp32, which has no denormal numbers here."""
    with np.errstate(over="ignore"):
        return np.where(x < -126, 0, np.float64(np.float32(np.exp2(x))))


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


@pytest.mark.parametrize(
    "run", [in_plain_jax, pytest.param(in_kernel, marks=pytest.mark.gpu)], ids=["xla", "mosaic"]
)
@pytest.mark.parametrize(
    ("f", "x", "want", "error"),
    [
        (exp2_by_polynomial, np.linspace(-125.4, 127.99, SIZE), np.exp2, 2 * 2.0**-23),
        (exp2_by_polynomial, FAR, exp2, 2.0**-22),
        *(
            (functools.partial(softplus, exact=exact), RANGE, functools.partial(np.logaddexp, 0), e)
            for exact, e in ((True, 6e-7), (False, 3e-6))
        ),
        *(
            (kernel_functions(exact, LAYOUT).tanh, BOTH_SIGNS.ravel(), np.tanh, e)
            for exact, e in ((True, 4e-7), (False, 2e-6))
        ),
    ],
    ids=["exp2", "exp2, far", "softplus, exact", "softplus", "tanh, exact", "tanh"],
)
def test_function_of_kernels(f, x, want, error, run):
    x = jnp.asarray(x, jnp.float32)
    got = np.asarray(run(f, x), np.float64)
    np.testing.assert_allclose(got, want(np.asarray(x, np.float64)), rtol=error, atol=0)
