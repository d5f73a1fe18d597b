"""Arguments, oracles and plain expressions of the losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

IGNORED = -100
SMALLEST = 1
"""Bytes of memory that leave a part the fewest classes that it may have."""
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0},
    "plain": {},
}


@pytest.fixture(scope="module", autouse=True)
def without_tf32():
    """GPUs multiply fp32 as such."""
    with jax.default_matmul_precision("highest"):
        yield


def inputs(rows, k, classes, dtype="float32", seed=0):
    """x, weight, bias and labels, every fifth of which is ignored."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape)
    arrays = draw(*rows, k), draw(k, classes) / np.sqrt(k), draw(classes)
    labels = rng.integers(0, classes, rows, np.int32)
    labels.reshape(-1)[::5] = IGNORED
    return *(jnp.asarray(v.astype(jnp.dtype(dtype))) for v in arrays), jnp.asarray(labels)


def oracle_of_logits(
    logits, dloss, dlse, *, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None
):
    """Losses and lse of rows, and the gradient of the logits, in float64."""
    labels, count = np.asarray(labels), logits.shape[-1]
    slope: Any = 1.0
    if logit_softcap is not None:
        slope = 1 / np.cosh(logits / logit_softcap) ** 2
        logits = logit_softcap * np.tanh(logits / logit_softcap)
    lse = logsumexp(logits, axis=-1)
    target = np.full(logits.shape, label_smoothing / count)
    kept = labels != IGNORED
    onto = np.where(kept, labels, 0)[..., None]
    np.put_along_axis(target, onto, label_smoothing / count + 1 - label_smoothing, -1)
    losses = lse - (target * logits).sum(-1) + z_loss * lse**2
    softmax = np.exp(logits - lse[..., None])
    dlogits = (dloss * (1 + 2 * z_loss * lse) + dlse)[..., None] * softmax
    dlogits = (dlogits - dloss[..., None] * target) * slope * kept[..., None]
    return (losses * kept, lse * kept), dlogits


def oracle(x, weight, bias, dloss, dlse, **options):
    results, du = oracle_of_logits(x @ weight + bias, dloss, dlse, **options)
    rows = tuple(range(x.ndim - 1))
    return results, (du @ weight.T, np.tensordot(x, du, [rows, rows]), du.sum(rows))


def plain_of_logits(logits, *, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None):
    """What a user would write, from logits in their dtype on."""
    logits = logits.astype(jnp.float32)
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    count = logits.shape[-1]
    target = (1 - label_smoothing) * jax.nn.one_hot(labels, count) + label_smoothing / count
    losses = lse - (target * logits).sum(-1) + z_loss * lse**2
    return jnp.where(labels == IGNORED, 0, losses), jnp.where(labels == IGNORED, 0, lse)


def plain(x, weight, bias, **options):
    return plain_of_logits(x @ weight.astype(x.dtype) + bias.astype(x.dtype), **options)
