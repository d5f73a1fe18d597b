"""linear_cross_entropy whose rows or classes a mesh splits, at once and in parts of the classes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from tests import check
from tests.losses import IGNORED, SMALLEST, inputs

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def _placed(mesh: Any, v: jax.Array, *spec: Any) -> jax.Array:
    return jax.device_put(v, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("memory", [None, SMALLEST])
@KINDS
def test_accumulator_on_a_mesh(kind, memory):
    """The devices' parts of the weight's gradient are added once to it."""
    x, weight, bias, labels = inputs((8,), 8, 256)
    sums = jax.random.normal(jax.random.key(9), weight.shape)
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    placed = functools.partial(_placed, mesh)
    run = jax.jit(
        jax.grad(
            lambda x, w, b, a, y: jaxkern.linear_cross_entropy(
                x, w, y, b, memory=memory, accumulator=a
            ),
            (0, 2, 3),
        )
    )
    want = run(x, weight, bias, sums, labels)
    got = run(placed(x, "data"), *(placed(v) for v in (weight, bias, sums)), placed(labels, "data"))
    check.assert_close(got, want)
    assert got[0].sharding.spec[0] == "data"


@KINDS
@pytest.mark.parametrize(("devices", "classes"), [(3, 36), (3, 999), (4, 1020)])
def test_classes_on_any_devices(devices, classes, kind):
    """As long as it divides them: no logits and no weight is gathered."""
    x, weight, _, labels = inputs((8,), 16, classes)
    mesh = jax.make_mesh((devices,), ("v",), (kind,), devices=jax.devices()[:devices])
    placed = functools.partial(_placed, mesh)
    loss = functools.partial(jaxkern.linear_cross_entropy, label_smoothing=0.1, z_loss=1e-3)
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    split = placed(x), placed(weight, None, "v"), placed(labels)
    check.assert_close(run(*split), run(x, weight, labels))
    text = run.lower(*split).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@KINDS
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("accumulated", [False, True])
def test_parts_of_classes_of_devices(shape, kind, accumulated):
    """Each device computes a share of every part; neither logits nor weight are gathered."""
    x, weight, bias, labels = inputs((8,), 16, 1000, key=jax.random.key(3))
    labels = labels.at[1].set(IGNORED)
    sums = jax.random.normal(jax.random.key(9), weight.shape)
    mesh = jax.make_mesh(shape, ("data", "v"), (kind,) * 2, devices=jax.devices()[:4])
    placed = functools.partial(_placed, mesh)
    for_256_of_them = 8 * 4 * 256

    def loss(x, weight, bias, sums, labels):
        options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3, "memory": for_256_of_them}
        if accumulated:
            options["accumulator"] = sums
        return jaxkern.linear_cross_entropy(x, weight, labels, bias, return_lse=True, **options)

    def both(x, *rest):
        def scalar(*args):
            mean, lse = loss(*args, labels=rest[-1])
            return mean + jnp.sum(jnp.sin(lse))

        wanted = (0, 3, 2) if accumulated else (0, 1, 2)
        return loss(x, *rest), jax.grad(scalar, wanted)(x, *rest[:-1])

    run = jax.jit(both)
    split = [
        placed(x, "data"),
        placed(weight, None, "v"),
        placed(bias, "v"),
        placed(sums, None, "v"),
        placed(labels, "data"),
    ]
    got = run(*split)
    check.assert_close(got, run(x, weight, bias, sums, labels))
    assert got[1][1].sharding.spec == P(None, "v")
    text = run.lower(*split).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize(("kind", "classes"), [(AxisType.Auto, 999), (AxisType.Explicit, 996)])
def test_parts_that_devices_cannot_share_are_told_of(kind, classes):
    x, weight, _, labels = inputs((8,), 16, classes)
    mesh = jax.make_mesh((3,), ("v",), (kind,), devices=jax.devices()[:3])
    placed = functools.partial(_placed, mesh)
    run = jax.jit(functools.partial(jaxkern.linear_cross_entropy, memory=SMALLEST))
    with pytest.warns(UserWarning, match=f"128 of {classes} classes at once, which 3 devices"):
        got = run(placed(x), placed(weight, None, "v"), placed(labels))
    check.assert_close(got, run(x, weight, labels))
