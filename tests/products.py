"""What the tests of linear layers and of gated linear units share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.ops.linear import tiles
from tests import check
from tests.test_activations import ELEMENTWISE

PLAIN = {name: f for name, (_, f) in ELEMENTWISE.items()} | {"gelu": jax.nn.gelu}


@pytest.fixture(scope="module", autouse=True)
def faster_kernels():
    """Where matrices are small, ``None`` picks the kernels, as where they are measured faster.

    And where a test does not say otherwise, GPUs multiply fp32 as such and not as tf32.
    """
    small = tiles.Measured(8, 8, 8, tiles.Tile(128, 64, 64, 2, None), faster=True)
    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MEASURED", dict.fromkeys(tiles.MEASURED, (small,)))
        yield


def inputs(m, k, n, dtype, weight_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape, t: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(t)
    weight_dtype = weight_dtype or dtype
    return draw((m, k), dtype), draw((k, n), weight_dtype) / 8, draw((n,), weight_dtype)


def extreme(call, truth, arrays, dout):
    """Whatever fits its dtype in float64 is finite; output and gradients, and the true ones."""
    with check.running("mosaic"):
        out, vjp = jax.vjp(call, *arrays)
        got = (out, *vjp(dout))
    want_out, want_grads = truth(*(np.asarray(v).astype(np.float64) for v in (*arrays, dout)))
    want = (want_out, *want_grads)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        fits = np.abs(w) <= 0.999 * float(jnp.finfo(g.dtype).max)
        assert fits.any()
        assert np.isfinite(np.asarray(g, np.float32)[fits]).all(), f"result {i}"
    return got, want
