"""The kernels behind jaxkern.apply, jaxkern.scale_gradients and the norm; and all in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.optim import arithmetic, gradients, kernel
from jaxkern.optim.arithmetic import Leaf, StepNumbers, UpdateRule, is_code, number_names
from jaxkern.optim.gradients import sum_of_squares
from jaxkern.optim.kernel import update_leaves
from jaxkern.precision import DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite
from tests import check
from tests.check import FOUR_DEVICES, ON_GPU, combinations, running
from tests.test_optim import BF16, F16, F32, assert_close, assert_same, tree_of

SCALE = StaticLossScale(8.0)
I8, U8 = jnp.int8, jnp.uint8
KERNEL = "custom_call @mosaic_gpu"

VALUES = (1, 0.5, 0.01, 0.1, 0.9, 0.1, 0.99, 0.01, 10, 10, 1e-8, 0.3, 0.2)
NUMBERS = dict(zip(StepNumbers._fields, VALUES, strict=True))


def leaf_of(shape, dtypes, i):
    """Arrays of the dtypes of grad, weight, mu, nu and copy; those of 8 bits are codes."""
    rng = np.random.default_rng(i)
    arrays, scales = [], []
    for name, dtype in zip(("grad", "weight", "mu", "nu"), dtypes, strict=False):
        values = rng.standard_normal(shape).astype(np.float32)
        values, scale = np.abs(values) if name == "nu" else values, None
        if dtype in (I8, U8):
            scale = np.abs(values).reshape(-1, arithmetic.CODE_BLOCK).max(1)
            parts = values / arithmetic.of_elements(scale, shape)
            values = 127 * parts if dtype == I8 else 255 + 12 * np.log2(parts)
            values = np.clip(np.round(values), -127, 255)
        arrays.append(None if dtype is None else jnp.asarray(values, dtype))
        scales.append(scale)
    copy = None if dtypes[4] is None else arrays[1].astype(dtypes[4])
    return Leaf(*arrays, copy, *scales[2:])


ADAM, SGD = UpdateRule("adam"), UpdateRule("sgd", nesterov=True)
AHEAD = UpdateRule("adam", nesterov=True, eps_root=True)
RANDOM = UpdateRule("adam", stochastic=True)
FULL = (F32, F32, F32, F32, None)
KERNEL_CASES = {
    "sizes": (AHEAD, [((n,), FULL) for n in (12, 0, 1100, 8)]),
    "sgd": (SGD, [((40,), (BF16, F32, F32, None, None)), ((9,), (F32, F32, None, None, None))]),
    "random": (RANDOM, [((n,), (BF16, BF16, BF16, BF16, None)) for n in (12, 4)]),
    "8-bit": (ADAM, [((3, 256), (BF16, F32, I8, U8, BF16))]),
    "adam": (ADAM, [((3, 5), FULL), ((12,), FULL)]),
    "master": (ADAM, [((40,), (BF16, F32, F32, F32, BF16)), ((24,), (F16, F32, F32, F32, F16))]),
    "nu in 8 bits": (ADAM, [((256,), (F32, F32, F32, U8, None))]),
    "nesterov": (UpdateRule("adam", nesterov=True), [((3, 5), FULL)]),
    "eps_root": (UpdateRule("adam", eps_root=True), [((12,), (BF16, F32, F32, F32, BF16))]),
    "8-bit, ahead": (AHEAD, [((256,), (F32, F32, I8, U8, None))]),
    "random, odd": (RANDOM, [((3, 2), (BF16, F32, BF16, BF16, None)), ((), FULL)]),
}


@pytest.mark.gpu
@combinations("case", KERNEL_CASES, few=4)
def test_kernel_is_its_twin(case, monkeypatch):
    """Several leaves in a launch; rounded at random, the same bits; or skipped, unchanged."""
    monkeypatch.setattr(kernel, "may_be_split", lambda leaves: False)
    rule, shapes = case
    leaves = [leaf_of(shape, dtypes, i) for i, (shape, dtypes) in enumerate(shapes)]
    decays = tuple(i != 3 for i in range(len(leaves)))
    seed = jnp.array([5, 6, 7], jnp.uint32)

    def step(mode, **changes):
        values = {name: jnp.float32((NUMBERS | changes)[name]) for name in number_names(rule)}
        return update_leaves(rule, mode, decays, StepNumbers(**values), seed, leaves)

    mode = "mosaic" if ON_GPU else "interpret"
    for got, want in zip(step(mode), step("xla"), strict=True):
        assert [a is None for a in got] == [a is None for a in want]
        for a, b in zip(got, want, strict=True):
            if b is None:
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if is_code(a):
                off = np.abs(np.float64(a) - np.float64(b))
                assert off.max() <= 1
                assert (off > 0).mean() < 0.01
                continue
            if a.dtype != F32:
                assert np.mean(np.asarray(a) != np.asarray(b)) <= 0.05
            steps = 2.0 ** {F32: -22, BF16: -7, F16: -10}[a.dtype.type]
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=steps, atol=1e-7)
    for got, old in zip(step(mode, finite=0), leaves, strict=True):
        assert_same(got, old._replace(grad=None))


def lowered(f, *args, donate=()):
    """The text for CUDA, without the kernels' own code."""
    return re.sub(r'module = "[^"]*"', "", check.lowered(f, *args, donate=donate))


def test_a_chain_is_one_pass():
    """Its clip, its scales, SGD's decay: outside of the kernels nothing touches the elements."""
    mask, clip = {"w": True, "b": False}, optax.clip_by_global_norm(1.0)
    chains = (
        optax.chain(clip, jaxkern.fused_adamw(0.1), optax.scale_by_schedule(jnp.cos)),
        optax.chain(clip, optax.add_decayed_weights(0.1, mask), jaxkern.fused_sgd(0.1)),
    )
    params = {"w": jnp.ones(4096), "b": jnp.ones(4096)}
    for tx in chains:
        text = lowered(functools.partial(jaxkern.apply, tx), params, tx.init(params), params)
        touching = set(re.findall(r"stablehlo\.(\w+)\b.*tensor<4096xf32>", text))
        assert touching == {"custom_call", "optimization_barrier"}


def test_kernel_works_in_place(monkeypatch):
    """Every array that is written is aliased to its operand, in few launches."""
    monkeypatch.setattr(kernel, "LARGE", 1000)
    monkeypatch.setattr(kernel, "MAX_REFS", 16)
    tx = jaxkern.fused_adamw(0.1, clip_norm=1.0, mask=lambda p: jax.tree.map(lambda a: True, p))
    params = {f"w{i}": jnp.ones((8, 4 + i)) for i in range(10)} | {"large": jnp.ones(1024)}
    mesh = check.mesh_of(AxisType.Auto, 1)  # of a device, which is all
    params = jax.device_put(params, NamedSharding(mesh, P()))
    step = functools.partial(jaxkern.apply, tx)
    text = lowered(step, params, tx.init(params), params, donate=(1, 2))
    norm, large, others = 1, 1, -(-4 * 10 // 16)
    assert text.count(KERNEL) == norm + large + others
    assert text.count("output_operand_alias<") == 3 * 11
    assert text.count("tf.aliasing_output") == 3 * 11 + 1  # and the count
    plain = jaxkern.fused_adamw(0.1, implementation="xla")
    step = functools.partial(jaxkern.apply, plain)
    assert KERNEL not in lowered(step, params, plain.init(params), params)


def test_mosaic_refuses_what_it_cannot():
    tx = jaxkern.fused_adamw(0.1, implementation="mosaic")
    params = {"w": jnp.ones(4)}
    with jax.enable_x64(True):
        wide = {"w": jnp.ones(4, jnp.float64)}
        with pytest.raises(NotImplementedError, match="grad is float64"):
            jaxkern.apply(tx, wide, tx.init(wide), wide)
        with pytest.raises(NotImplementedError, match="a leaf is float64"):
            jaxkern.scale_gradients(wide, SCALE, implementation="mosaic")
        assert_same(jaxkern.scale_gradients(wide, SCALE)[0], SCALE.unscale(wide))
    go = lambda g: jaxkern.apply(tx, {"w": g}, tx.init(params), params)[0]
    with interpret_kernels(), pytest.raises(NotImplementedError, match="has no vmap"):
        jax.vmap(go)(jnp.ones((2, 4)))
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="for NVIDIA GPUs"):
            jax.jit(go)(jnp.ones(4))


def test_vmap_and_gradients_take_the_twin():
    """A program for CUDA has no kernel then either."""
    tx = jaxkern.fused_adamw(0.1)
    params = jnp.ones(4)
    go = lambda g: jaxkern.apply(tx, g, tx.init(params), params)[0]
    batch = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    assert_close(jax.jit(jax.vmap(go))(batch), jnp.stack([jax.jit(go)(g) for g in batch]))
    assert KERNEL not in lowered(jax.vmap(go), batch)
    assert KERNEL not in lowered(jax.grad(lambda g: go(g).sum()), batch[0])
    assert lowered(go, batch[0]).count(KERNEL) == 1


# Passes over the gradients


def gradients_of():
    """Three leaves of a launch, one of two blocks; other dtypes, an odd size, and an empty leaf."""
    draw = lambda *shape: np.random.default_rng(len(shape)).standard_normal(shape)
    return {
        "w": F32(draw(11, 101)),
        "v": F32(draw()),
        "h": F16(1e4 * draw(4, 8)),
        "odd": BF16(draw(3, 5)),
        "b": [F32(draw(7)), jnp.zeros((0, 3))],
    }


def broken(tree, name, value):
    leaf = tree[name]
    return tree | {name: leaf.at[(-1,) * leaf.ndim].set(value)}


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize(
    ("name", "value"), [("w", 2.0), ("w", np.nan), ("v", np.inf), ("odd", -np.inf)]
)
def test_passes_over_gradients(monkeypatch, implementation, name, value):
    """They are unscaled, their norm is taken, and both tell what is not finite."""
    monkeypatch.setattr(gradients, "may_be_split", lambda leaves: False)
    grads = broken(gradients_of(), name, value)
    with running(implementation):
        got, finite = jaxkern.scale_gradients(grads, SCALE, implementation=implementation)
    assert_same(got, jax.tree.map(lambda g: g / np.asarray(8, g.dtype), grads))
    assert (finite.dtype, bool(finite)) == (bool, np.isfinite(value))
    leaves = jax.tree.leaves(grads)
    mode = implementation if ON_GPU or implementation == "xla" else "interpret"
    exact = sum((np.float64(a) ** 2).sum() for a in leaves)
    np.testing.assert_allclose(sum_of_squares(mode, leaves), exact, rtol=1e-6)


@pytest.mark.gpu
@combinations("dtype", [F16, BF16, F32], few=1)
def test_it_tells_of_results_that_overflow(dtype):
    """Not of those that are rounded down to the largest number."""
    grads = [jnp.full(8, jnp.finfo(dtype).max, dtype)]
    for factor, fits in ((1.0, True), (1 + 2.0**-14, dtype != jnp.float32), (2.0, False)):
        with running("mosaic"):
            scale = StaticLossScale(jnp.float32(1 / factor))
            got, finite = jaxkern.scale_gradients(grads, scale, implementation="mosaic")
        assert bool(finite) == bool(all_finite(got)) == fits


def test_it_needs_no_scale_and_no_leaves():
    got, finite = jaxkern.scale_gradients({}, NoOpLossScale())
    assert (got, bool(finite)) == ({}, True)
    unscaled, _ = jax.jit(lambda g: jaxkern.scale_gradients(g, NoOpLossScale()))(gradients_of())
    assert_same(unscaled, gradients_of())


def test_a_tree_takes_one_launch(monkeypatch):
    """One for each dtype, in place; so does the norm."""
    monkeypatch.setattr(gradients, "may_be_split", lambda leaves: False)
    grads = {i: jnp.ones((8, 4 + i % 3), BF16 if i % 2 else F32) for i in range(20)}
    scale = functools.partial(jaxkern.scale_gradients, loss_scale=DynamicLossScale())
    text = lowered(scale, grads, donate=0)
    assert (text.count(KERNEL), text.count("output_operand_alias<")) == (2, 20 + 2)
    norm = functools.partial(sum_of_squares, "auto")
    assert lowered(norm, jax.tree.leaves(grads)).count(KERNEL) == 2
    assert KERNEL not in lowered(jax.vmap(scale), grads)


# Meshes


def on_mesh(kind, specs):
    """A mesh of four devices, and a function that splits a tree over them."""
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    mesh = check.mesh_of(axis_type, 4, names=("data",))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return mesh, lambda tree: jax.device_put(tree, shardings)


@FOUR_DEVICES
@combinations("kind", ["Auto", "shard_map", "Explicit"], few=2)
def test_a_step_on_a_mesh(kind):
    """Split parameters stay split, and the step is that of one device.

    In shard_map leaves that vary alike share a launch; the others keep their types.
    """
    specs = {"w": P("data", None), "b": P(None), "c": P("data")}
    mesh, put = on_mesh(kind, specs)
    params = {"w": F32(np.random.default_rng(0).standard_normal((8, 3)))}
    params |= {"b": jnp.ones(6), "c": jnp.ones(8)}
    tx = jaxkern.fused_adamw(0.1, clip_norm=None if kind == "shard_map" else 0.5)
    step, state = functools.partial(jaxkern.apply, tx), tx.init(params)
    want = jax.jit(step)(params, state, params)
    state = state._replace(mu=put(state.mu), nu=put(state.nu))
    if kind == "shard_map":
        state_specs = type(state)(P(), specs, specs, None, None, None)
        args = (specs, state_specs, specs)
        step = jax.shard_map(step, mesh=mesh, in_specs=args, out_specs=(specs, state_specs))
    program = jax.jit(step)
    args = (put(params), state, put(params))
    launch = "CustomSPMDPartitioning" if kind == "Auto" else "mosaic_gpu"
    with jax.set_mesh(mesh):
        got = program(*args)
        text = program.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        compiled = program.lower(*args).compile().as_text()
    assert_close(got, want)
    assert got[0]["w"].sharding.spec[0] == got[1].mu["w"].sharding.spec[0] == "data"
    assert "all-gather" not in compiled
    steps_and_norms = 2 if kind == "shard_map" else 2 * len(params)
    assert text.count(f"custom_call @{launch}") == steps_and_norms


@FOUR_DEVICES
@combinations("kind", ["Explicit", "Auto"], few=1)
def test_scaling_on_a_mesh(kind):
    """The flag and the norm are those of all devices' parts, and of a replicated leaf once."""
    mesh, put = on_mesh(kind, {"w": P("data", None), "b": P(None)})
    grads = {"w": jnp.arange(24.0).reshape(8, 3), "b": jnp.arange(5.0)}
    norm_of = lambda grads: sum_of_squares("auto", jax.tree.leaves(grads))
    both = jax.jit(lambda g: (*jaxkern.scale_gradients(g, SCALE), norm_of(g)))
    with jax.set_mesh(mesh):
        got, finite, norm = both(put(grads))
        assert not both(put(broken(grads, "w", np.inf)))[1]
        assert "all-gather" not in str(both.lower(put(grads)).compile().as_text())
    assert_same(got, SCALE.unscale(grads))
    assert finite
    np.testing.assert_allclose(norm, sum((a**2).sum() for a in grads.values()), rtol=1e-6)
    assert got["w"].sharding.spec[0] == "data"


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_apply_runs_the_kernel():
    params, grads = ({"w": tree_of(seed, BF16)["w"]} for seed in range(2))
    tx = functools.partial(jaxkern.fused_adamw, 0.1, clip_norm=1.0, master_dtype=F32)
    step = lambda tx: jax.jit(functools.partial(jaxkern.apply, tx))(grads, tx.init(params), params)
    want = step(tx(implementation="xla"))
    with running("mosaic"):
        assert_close(step(tx(implementation="mosaic")), want)


# Kernels that work in place keep away from slices, of which XLA would make one operation

ones = jnp.ones
ROWS = ones((64, 512), jnp.bfloat16)
MOSAIC = {"implementation": "mosaic"}
TX = jaxkern.fused_adamw(1e-3, **MOSAIC)
CASES = {
    "fused_adamw": (
        lambda p, g: jaxkern.apply(TX, g, TX.init(p), p),
        ones(4096),
        ones(4096),
    ),
    "scale_gradients": (
        lambda g: jaxkern.scale_gradients(g, StaticLossScale(2.0), **MOSAIC),
        [ones(4096)],
    ),
    "cross_entropy": (
        jax.grad(functools.partial(jaxkern.cross_entropy, **MOSAIC)),
        *(ROWS, jnp.zeros(64, int)),
    ),
    "accumulate_weight_grad": (
        functools.partial(jaxkern.accumulate_weight_grad, **MOSAIC),
        *(ones((512, 512)), ROWS, ROWS),
    ),
    "ssd_step": (
        lambda state, x, dt, w: jaxkern.ssd_step(state, x, dt, -ones(4), w, w, layer=1, **MOSAIC),
        *(
            ones((2, 1, 4, 16, 32)),
            ones((1, 4, 16)),
            ones((1, 4)),
            ones((1, 1, 32)),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_barriers_are_around_kernels_that_work_in_place(name):
    """All that one takes has been behind a barrier, and all that it gives goes behind one."""
    f, *args = CASES[name]
    text = lowered(f, *args)
    in_place = [line for line in text.splitlines() if "output_operand_alias<" in line]
    (function,) = [of for of in re.split(r"\n  func\.func ", text) if in_place[0] in of]
    assert len(in_place) == 1
    barriers = re.findall(r"(%\w+) = stablehlo\.optimization_barrier (%[\w#]+) :", function)
    behind, into = map(set, zip(*barriers, strict=True))
    kernel = r"(%\w+)(?::\d+)? = stablehlo\.custom_call @mosaic_gpu_v2\(([^)]*)\)"
    result, operands = re.search(kernel, in_place[0]).groups()
    uses = set(re.findall(rf"{result}(?:#\d+)?(?![\w#])", function.replace(in_place[0], "")))
    assert set(operands.split(", ")) <= behind
    assert uses
    assert uses <= into
