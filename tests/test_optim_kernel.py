"""The kernel behind jaxkern.apply: beside its twin, its launches, on meshes."""

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
from jaxkern.optim import quantise, update
from jaxkern.optim.arithmetic import Leaf, Numbers, Rule, Static, is_code, number_names
from jaxkern.optim.update import update_leaves
from tests.test_optim import BF16, F16, F32, ON_GPU, assert_close, grads_of, params_of


def numbers(rule, **changes):
    values = {
        "finite": 1,
        "scale": 0.5,
        "rate": 0.01,
        "decay": 0.1,
        "b1": 0.9,
        "one_minus_b1": 0.1,
        "b2": 0.99,
        "one_minus_b2": 0.01,
        "mu_factor": 10,
        "nu_factor": 10,
        "eps": 1e-8,
        "grad_factor": 0.3,
        "eps_root": 0.2,
    }
    values |= changes
    return Numbers(**{name: jnp.float32(values[name]) for name in number_names(rule)})


def coded_leaf(shape, dtypes, i=0):
    """With mu and nu as codes where their dtype is of 8 bits."""
    leaf = leaf_of(shape, [F32 if d in (jnp.int8, jnp.uint8) else d for d in dtypes], i)
    for field, dtype in zip(("mu", "nu"), dtypes[2:4], strict=True):
        if dtype in (jnp.int8, jnp.uint8):
            scale = quantise.largest(getattr(leaf, field))
            every, bits = quantise.spread(scale, shape), jnp.full(shape, 2**15, jnp.uint32)
            codes = quantise.code(dtype, getattr(leaf, field), every, bits).astype(dtype)
            leaf = leaf._replace(**{field: codes, f"{field}_scale": scale})
    return leaf


def leaf_of(shape, dtypes, i=0):
    """dtypes of grad, weight, mu, nu, copy."""
    keys = jax.random.split(jax.random.key(i), 4)
    arrays = [
        None if d is None else jax.random.normal(k, shape).astype(d)
        for k, d in zip(keys, dtypes, strict=False)
    ]
    arrays[3] = None if arrays[3] is None else jnp.abs(arrays[3])
    return Leaf(*arrays, None if dtypes[4] is None else arrays[1].astype(dtypes[4]))


ADAM, SGD = Rule("adam"), Rule("sgd", nesterov=True)
AHEAD = Rule("adam", nesterov=True, eps_root=True)
RANDOM = Rule("adam", stochastic=True)
FULL = (F32, F32, F32, F32, None)
KERNEL_CASES = {
    "sizes": (ADAM, [((), FULL), ((3, 5), FULL), (0, FULL), (1100, FULL), (12, FULL)], {}),
    "master": (ADAM, [(40, (BF16, F32, F32, F32, BF16)), (24, (F16, F32, F32, F32, F16))], {}),
    "skipped": (ADAM, [(40, (BF16, F32, F32, F32, BF16))], {"finite": 0}),
    "sgd": (SGD, [(40, (BF16, F32, F32, None, None)), (9, (F32, F32, None, None, None))], {}),
    "random": (RANDOM, [(n, (BF16, F32, BF16, BF16, None)) for n in (12, 4)], {}),
    "8-bit": (ADAM, [((3, 256), (BF16, F32, jnp.int8, jnp.uint8, BF16))], {}),
    "8-bit-skipped": (ADAM, [((256,), (F32, F32, F32, jnp.uint8, None))], {"finite": 0}),
    "nesterov": (Rule("adam", nesterov=True), [((3, 5), FULL)], {}),
    "eps-root": (Rule("adam", eps_root=True), [(12, (BF16, F32, F32, F32, BF16))], {}),
    "both-8-bit": (AHEAD, [((256,), (F32, F32, jnp.int8, jnp.uint8, None))], {}),
    "random-odd": (RANDOM, [((3, 2), (BF16, BF16, BF16, BF16, None))], {}),
}


@pytest.mark.newest
@pytest.mark.gpu
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernel_is_its_twin(case, monkeypatch):
    """Several leaves in a launch; rounded at random, the same bits."""
    monkeypatch.setattr(update, "may_be_split", lambda leaves: False)
    rule, shapes, changes = KERNEL_CASES[case]
    leaves = [
        coded_leaf(s if isinstance(s, tuple) else (s,), dtypes, i)
        for i, (s, dtypes) in enumerate(shapes)
    ]
    statics = tuple(Static(i + 2, i != 3) for i in range(len(leaves)))
    seed = jnp.array([5, 6, 7], jnp.uint32)
    plain = update_leaves(rule, "xla", statics, numbers(rule, **changes), seed, leaves)
    mode = "mosaic" if ON_GPU else "interpret"
    kernel = update_leaves(rule, mode, statics, numbers(rule, **changes), seed, leaves)
    for got, want, old in zip(kernel, plain, leaves, strict=True):
        assert [a is None for a in got] == [a is None for a in want]
        for a, b, before in zip(got, want, old, strict=True):
            if b is None:
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if changes.get("finite") == 0:
                np.testing.assert_array_equal(a, before)
            if is_code(a):
                off = np.abs(np.float64(a) - np.float64(b))
                assert off.max() <= 1
                assert (off > 0).mean() < 0.01
                continue
            if a.dtype != F32:
                assert np.mean(np.asarray(a) != np.asarray(b)) <= 0.05
            steps = 2.0 ** {F32: -22, BF16: -7, F16: -10}[a.dtype.type]
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=steps, atol=1e-7)


@pytest.mark.gpu
def test_apply_runs_the_kernel():
    tx = functools.partial(jaxkern.fused_adamw, 0.1, clip_norm=1.0, master_dtype=F32)
    params = {"w": params_of(BF16)["w"]}
    grads = grads_of(params)
    context = contextlib.nullcontext if ON_GPU else interpret_kernels
    plain = tx(implementation="xla")
    want = jaxkern.apply(plain, grads, plain.init(params), params)
    kernel = tx(implementation="mosaic")
    with context():
        got = jaxkern.apply(kernel, grads, kernel.init(params), params)
    assert_close(got, want)


def lowered(f, *args, donate=()):
    """As CUDA gets it, without the kernels' own code."""
    program = jax.jit(f, donate_argnums=donate).trace(*args)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r'module = "[^"]*"', "", text)


def calls(text):
    return len(re.findall(r"custom_call @mosaic_gpu", text))


def test_kernel_works_in_place(monkeypatch):
    """Every array that is written is aliased to its operand, in few launches."""
    monkeypatch.setattr(update, "LARGE", 1000)
    tx = jaxkern.fused_adamw(0.1, clip_norm=1.0, mask=lambda p: jax.tree.map(lambda a: True, p))
    params = {f"w{i}": jnp.ones((8, 4 + i)) for i in range(40)} | {"large": jnp.ones(1024)}
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))  # of a device, which is all
    params = jax.device_put(params, NamedSharding(mesh, P()))
    text = lowered(
        functools.partial(jaxkern.apply, tx), params, tx.init(params), params, donate=(1, 2)
    )
    operands = 4 * 40
    norm, large = 1, 1
    assert calls(text) == norm + large + -(-operands // update.MAX_REFS)
    assert text.count("output_operand_alias<") == 3 * 41
    assert text.count("tf.aliasing_output") == 3 * 41 + 1  # and the count
    plain = jaxkern.fused_adamw(0.1, implementation="xla")
    assert (
        calls(lowered(functools.partial(jaxkern.apply, plain), params, plain.init(params), params))
        == 0
    )


def test_mosaic_refuses_what_it_cannot():
    tx = jaxkern.fused_adamw(0.1, implementation="mosaic")
    params = {"w": jnp.ones(4)}
    with jax.enable_x64(True):
        wide = {"w": jnp.ones(4, jnp.float64)}
        with pytest.raises(NotImplementedError, match="dtype float64"):
            jaxkern.apply(tx, wide, tx.init(wide), wide)
    go = lambda g: jaxkern.apply(tx, {"w": g}, tx.init(params), params)[0]
    with interpret_kernels(), pytest.raises(NotImplementedError, match="has no vmap"):
        jax.vmap(go)(jnp.ones((2, 4)))
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="for NVIDIA GPUs"):
            jax.jit(go)(jnp.ones(4))


def test_vmap_and_gradients_take_the_twin():
    """Of a program for CUDA too."""
    tx = jaxkern.fused_adamw(0.1)
    params = jnp.ones(4)
    go = lambda g: jaxkern.apply(tx, g, tx.init(params), params)[0]
    batch = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    assert_close(jax.vmap(go)(batch), jnp.stack([go(g) for g in batch]))
    slope = jax.grad(lambda g: go(g).sum())
    plain = jaxkern.fused_adamw(0.1, implementation="xla")
    want = jax.grad(lambda g: jaxkern.apply(plain, g, plain.init(params), params)[0].sum())
    assert_close(slope(batch[0]), want(batch[0]))
    assert calls(lowered(jax.vmap(go), batch)) == calls(lowered(slope, batch[0])) == 0
    assert calls(lowered(go, batch[0])) == 1


# Meshes


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
def test_on_a_mesh(kind):
    """Split parameters stay split, and the step is that of one device.

    In shard_map leaves that vary alike share a launch; the others keep their types.
    """
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    specs = {"w": P("data", None), "b": P(None), "c": P("data")}
    params = {"w": jax.random.normal(jax.random.key(0), (8, 3)), "b": jnp.ones(6)}
    params["c"] = jnp.ones(8)
    tx = jaxkern.fused_adamw(0.1, clip_norm=None if kind == "shard_map" else 0.5)
    want = jaxkern.apply(tx, params, tx.init(params), params)
    place = lambda tree: jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs
    )
    step = functools.partial(jaxkern.apply, tx)
    state = tx.init(params)
    state = state._replace(mu=place(state.mu), nu=place(state.nu))
    if kind == "shard_map":
        state_specs = type(state)(P(), specs, specs, None, None, None)
        args = (specs, state_specs, specs)
        step = jax.shard_map(step, mesh=mesh, in_specs=args, out_specs=(specs, state_specs))
    program = jax.jit(step)
    args = (place(params), state, place(params))
    launch = "CustomSPMDPartitioning" if kind == "Auto" else "mosaic_gpu"
    with jax.set_mesh(mesh):
        got = program(*args)
        text = program.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        compiled = program.lower(*args).compile().as_text()
    assert_close(got, want)
    assert got[0]["w"].sharding.spec[0] == got[1].mu["w"].sharding.spec[0] == "data"
    assert "all-gather" not in compiled
    norms = len(params)
    assert len(re.findall(f"custom_call @{launch}", text)) == (
        2 if kind == "shard_map" else norms + len(params)
    )
