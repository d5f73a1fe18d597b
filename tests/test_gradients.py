"""jaxkern.scale_gradients, and the norm that the optimizers clip by."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.optim import gradients
from jaxkern.optim.gradients import sum_of_squares
from jaxkern.precision import DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite

ON_GPU = jax.default_backend() == "gpu"
KERNELS = contextlib.nullcontext if ON_GPU else interpret_kernels
SCALE = StaticLossScale(8.0)


def tree_of():
    """Two leaves of a launch, another dtype, an odd size, a scalar and an empty leaf."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    return {
        "w": normal(0, 41, 100),
        "v": normal(1, 8),
        "h": (normal(2, 4, 8) * 1e4).astype(jnp.float16),
        "odd": normal(3, 3, 5).astype(jnp.bfloat16),
        "b": [normal(4), jnp.zeros((0, 3))],
    }


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def broken(tree, name, value):
    leaf = tree[name]
    return tree | {name: leaf.at[(-1,) * leaf.ndim].set(value)}


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize(
    "change",
    [None, ("w", np.nan), ("v", np.inf), ("odd", -np.inf)],
    ids=["finite", "w", "v", "odd"],
)
def test_it_unscales_and_tells_what_is_not_finite(monkeypatch, implementation, change):
    monkeypatch.setattr(gradients, "may_be_split", lambda leaves: False)
    if change and implementation == "xla" and change[0] != "w":
        pytest.skip("one is enough")
    grads = broken(tree_of(), *change) if change else tree_of()
    with KERNELS():
        got, finite = jaxkern.scale_gradients(grads, SCALE, implementation=implementation)
    same(got, SCALE.unscale(grads))
    assert (finite.dtype, bool(finite)) == (bool, change is None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_it_tells_of_results_that_overflow(dtype):
    """Not of those that are rounded down to the largest number."""
    grads = [jnp.full(8, jnp.finfo(dtype).max, dtype)]
    for factor, fits in ((1.0, True), (1 + 2.0**-14, dtype != jnp.float32), (2.0, False)):
        with KERNELS():
            scale = StaticLossScale(jnp.float32(1 / factor))
            got, finite = jaxkern.scale_gradients(grads, scale, implementation="mosaic")
        assert bool(finite) == bool(all_finite(got)) == fits


def test_it_needs_no_scale_and_no_leaves():
    got, finite = jaxkern.scale_gradients({}, NoOpLossScale())
    assert (got, bool(finite)) == ({}, True)
    same(jaxkern.scale_gradients(tree_of(), NoOpLossScale())[0], tree_of())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_norm_of_a_tree(monkeypatch, implementation):
    monkeypatch.setattr(gradients, "may_be_split", lambda leaves: False)
    leaves = jax.tree.leaves(tree_of())
    exact = sum((np.float64(a) ** 2).sum() for a in leaves)
    mode = implementation if ON_GPU or implementation == "xla" else "interpret"
    np.testing.assert_allclose(sum_of_squares(mode, leaves), exact, rtol=1e-6)
    assert np.isnan(sum_of_squares(mode, jax.tree.leaves(broken(tree_of(), "w", np.nan))))


def calls(f, *args, donate=()):
    text = (
        jax.jit(f, donate_argnums=donate).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    )
    return len(re.findall(r"custom_call @mosaic_gpu", text)), text.count("output_operand_alias<")


def test_a_tree_takes_one_launch(monkeypatch):
    """Of each dtype, in place; so does the norm."""
    monkeypatch.setattr(gradients, "may_be_split", lambda leaves: False)
    grads = {i: jnp.ones((8, 4 + i % 3), jnp.bfloat16 if i % 2 else jnp.float32) for i in range(60)}
    scale = functools.partial(jaxkern.scale_gradients, loss_scale=DynamicLossScale())
    assert calls(scale, grads, donate=0) == (2, 60 + 2)
    norm = functools.partial(sum_of_squares, "auto")
    assert calls(norm, jax.tree.leaves(grads)) == (2, 0)
    assert calls(jax.vmap(scale), grads) == (0, 0)
    tx = jaxkern.fused_adamw(0.1, clip_norm=1.0)
    step = lambda grads, state: jaxkern.apply(tx, grads, state, grads)
    assert calls(step, [jnp.ones(8)] * 3, tx.init([jnp.ones(8)] * 3))[0] >= 2


def test_refuses_what_is_not_a_gradient():
    with pytest.raises(TypeError, match=r"grads\['n'\] must be a floating array, got int32"):
        jaxkern.scale_gradients({"n": jnp.ones(2, jnp.int32)}, SCALE)
    with jax.enable_x64(True):
        wide = [jnp.ones(2, jnp.float64)]
        with pytest.raises(NotImplementedError, match="a leaf has dtype float64"):
            jaxkern.scale_gradients(wide, SCALE, implementation="mosaic")
        same(jaxkern.scale_gradients(wide, SCALE)[0], SCALE.unscale(wide))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind):
    """The flag and the norm are those of all devices' parts, and of a replicated leaf once."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType[kind],))
    grads = {"w": jnp.arange(24.0).reshape(8, 3), "b": jnp.arange(5.0)}
    specs = {"w": P("data", None), "b": P(None)}
    place = lambda tree: jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs
    )
    both = jax.jit(
        lambda g: (
            *jaxkern.scale_gradients(g, SCALE),
            sum_of_squares("auto", jax.tree.leaves(g)),
        )
    )
    with jax.set_mesh(mesh):
        got, finite, norm = both(place(grads))
        assert not both(place(broken(grads, "w", np.inf)))[1]
        assert "all-gather" not in str(both.lower(place(grads)).compile().as_text())
    same(got, SCALE.unscale(grads))
    assert finite
    np.testing.assert_allclose(norm, sum((a**2).sum() for a in grads.values()), rtol=1e-6)
    assert got["w"].sharding.spec[0] == "data"
