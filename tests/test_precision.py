"""jaxkern.precision, policies and loss scaling, and jaxkern.accumulate_gradients."""

import functools
import re
from collections.abc import Callable

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.precision import (
    DynamicLossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    all_finite,
    select_tree,
)
from tests.check import FOUR_DEVICES, exhaustive, mesh_of

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
POLICY = Policy("float32", "bfloat16", "float16")

same = functools.partial(chex.assert_trees_all_equal, strict=True)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("fp32", (F32, F32, F32)),
        ("bf16", (F32, BF16, F32)),
        ("fp16", (F32, F16, F32)),
        ("params=bfloat16,compute=float16,output=float32", (BF16, F16, F32)),
        (" output=fp32 , params=fp32,compute=bf16 ", (F32, BF16, F32)),
    ],
)
def test_parse(text, dtypes):
    policy = Policy.parse(text)
    assert (policy.params, policy.compute, policy.output) == tuple(map(jnp.dtype, dtypes))
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@pytest.mark.parametrize(("part", "dtype"), [("params", F32), ("compute", BF16), ("output", F16)])
def test_casts_touch_floating_leaves_only(part, dtype):
    tree = {"w": jnp.ones(3, F16), "b": np.ones(2, np.float64)}
    others = {"n": jnp.arange(3), "flag": jnp.array(True), "count": 7, "none": None}
    out = getattr(POLICY, f"cast_to_{part}")(tree | others)
    assert out["w"].dtype == out["b"].dtype == dtype
    assert all(out[name] is others[name] for name in others)


def test_wrap_casts_a_function():
    seen = []

    def f(params, x, *, n):
        seen.append((params["w"].dtype, x.dtype, n.dtype))
        return x * params["w"], n

    out, n = POLICY.wrap(f)({"w": jnp.ones(2)}, jnp.ones(2), n=jnp.arange(2))
    assert seen == [(BF16, BF16, jnp.int32)]
    assert (out.dtype, n.dtype) == (F16, jnp.int32)
    assert POLICY.wrap(f).__name__ == "f"


def test_wrap_casts_flax_modules():
    dense, x = linen.Dense(3, dtype=None), jnp.ones((2, 4))
    run = lambda: POLICY.wrap(dense.apply)(dense.init(jax.random.key(0), x), x)
    assert jax.eval_shape(run).dtype == F16

    class Net(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
            self.calls = nnx.BatchStat(jnp.float32(1))

        def __call__(self, x):
            assert self.dense.kernel.dtype == x.dtype == BF16
            self.calls[...] = self.calls[...] + 2.0**-12
            return self.dense(x)

    net = Net()
    value, grads = nnx.value_and_grad(lambda net: POLICY.wrap(net)(x).astype(F32).sum())(net)
    assert grads["dense"]["kernel"].dtype == net.dense.kernel.dtype == F32
    assert value.dtype == F32
    assert net.calls[...] == 1 + 2.0**-12  # bf16 has no such number
    assert net.calls.dtype == F32


def test_wrap_casts_modules_that_are_pytrees():
    """Equinox's modules are, and have functions among their leaves."""

    class Layer(eqx.Module):
        weight: jax.Array
        activation: Callable

        def __call__(self, x):
            assert self.weight.dtype == x.dtype == BF16
            return self.activation(x @ self.weight)

    weight = jnp.ones((2, 2))
    run = lambda w: POLICY.wrap(Layer(w, jnp.tanh))(jnp.ones(2)).sum()
    assert jax.eval_shape(run, weight).dtype == F16
    assert jax.eval_shape(jax.grad(lambda w: run(w).astype(F32)), weight).dtype == F32


# Loss scales

SCALES = [NoOpLossScale(), StaticLossScale(512.0), DynamicLossScale(512.0, 1, 5, 4.0, 2.0, 1024.0)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad):
    tree = {"a": jnp.ones((2, 3)), "n": jnp.arange(2), "h": jnp.ones(2, F16)}
    assert all_finite({})
    assert jax.jit(all_finite)(tree)
    for name in ("a", "h"):
        assert not jax.jit(all_finite)(tree | {name: tree[name].at[..., -1].set(bad)})


@pytest.mark.parametrize("finite", [True, False])
def test_select_tree_chooses_on_the_device(finite):
    old = {"w": jnp.zeros(2), "n": jnp.int32(1)}
    new = {"w": jnp.full(2, jnp.nan), "n": jnp.int32(2)}
    same(jax.jit(select_tree)(jnp.array(finite), new, old), new if finite else old)


def test_scaling_and_unscaling_are_exact():
    scale = DynamicLossScale(2.0**15)
    grads = {"w": F32(np.random.default_rng(0).standard_normal(64)), "n": jnp.arange(3)}
    same(scale.unscale(scale.scale(grads)), grads)
    # 2^17 itself is not finite in fp16, its product with a small gradient is.
    half = DynamicLossScale(2.0**17).scale(F16(2.0**-10))
    assert half.dtype == F16
    assert half == 128

    def gradient(scale):
        # The cotangent passes through fp16, where 1e-8 is 0.
        loss = lambda w: scale.scale(w.astype(F32) * 1e-8)
        return scale.unscale(jax.grad(loss)(F16(1)).astype(F32))

    assert gradient(DynamicLossScale(1.0)) == 0
    np.testing.assert_allclose(gradient(scale), 1e-8, rtol=1e-3)


def test_adjust_follows_its_rule():
    """Compares with a Python loop over finite and overflowing steps, under jit and scan."""
    finite = [*[True] * 3, False, *[True] * 2, False, *[True] * 9, *[False] * 9]
    scale = DynamicLossScale(8.0, period=3, factor=2.0, min_scale=0.5, max_scale=16.0)
    value, counter, expected = 8.0, 0, []
    for ok in finite:
        if not ok:
            value, counter = max(value / 2, 0.5), 0
        elif counter + 1 == 3:
            value, counter = min(value * 2, 16.0), 0
        else:
            counter += 1
        expected.append((value, counter))

    def step(scale, ok):
        scale = scale.adjust(ok)
        return scale, (scale.loss_scale, scale.counter)

    run = jax.jit(lambda s, f: jax.lax.scan(step, s, f))
    last, (values, counters) = run(scale, jnp.array(finite))
    assert list(zip(values.tolist(), counters.tolist(), strict=True)) == expected
    assert (last.period, last.factor, last.min_scale, last.max_scale) == (3, 2.0, 0.5, 16.0)
    assert (last.loss_scale.dtype, last.counter.dtype) == (F32, jnp.int32)


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: type(s).__name__)
def test_loss_scales_keep_every_field(scale, tmp_path):
    """Sends them through jit, scan, shard_map, a checkpoint and back."""
    same(jax.jit(lambda s: s)(scale), scale)
    same(jax.lax.scan(lambda s, _: (s, None), scale, length=2)[0], scale)
    mesh = jax.make_mesh((1,), ("data",))
    same(jax.shard_map(lambda s: s, mesh=mesh, in_specs=P(), out_specs=P())(scale), scale)
    tree = {"scale": scale, "step": jnp.int32(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scale", tree)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "scale", jax.eval_shape(lambda: tree)), tree)


def test_loss_scales_agree():
    """Static is dynamic that does not move, and no-op is static of 1."""
    tree = {"loss": jnp.float16(3), "n": jnp.int32(2)}
    for scale, factor in zip(SCALES, (1, 512, 512), strict=True):
        scaled = scale.scale(tree)
        assert (scaled["loss"], scaled["n"]) == (3 * factor, 2)
        assert scale.unscale(scaled)["loss"] == 3
        assert scale.loss_scale == factor
    for scale in SCALES[:2]:
        assert scale.adjust(jnp.array(False)) is scale


def test_loss_scales_take_numbers_of_numpy_and_what_is_no_array():
    """JAX makes trees of shardings, names and booleans of any tree of arrays."""
    scale = DynamicLossScale(np.float64(4), np.int64(1), np.int32(3), np.float32(4), np.int8(1))
    assert scale == DynamicLossScale(scale.loss_scale, scale.counter, 3, 4.0, 1.0)
    assert (scale.loss_scale.dtype, scale.counter.dtype) == (F32, jnp.int32)
    assert jax.tree.structure(scale) == jax.tree.structure(DynamicLossScale(4, 1, 3, 4.0, 1.0))
    for leaf in ("data", True, None, P()):
        made = jax.tree.map(lambda _, leaf=leaf: leaf, DynamicLossScale())
        assert (made.loss_scale, made.counter, made.period) == (leaf, leaf, 2000)


# Accumulated gradients


def draw(seed, *shape):
    return F32(np.random.default_rng(seed).standard_normal(shape))


PARAMS = {"w": draw(0, 5, 3), "b": draw(1, 3)}
BATCH = {"x": draw(2, 24, 5), "label": jnp.arange(24) % 3}
ONES = jnp.ones((2, 3))


@pytest.fixture(autouse=True)
def exact_products():
    """GPUs multiply fp32 as such and not as tf32."""
    with jax.default_matmul_precision("highest"):
        yield


def loss_fn(params, batch):
    logits = jnp.tanh(batch["x"].astype(params["w"].dtype)) @ params["w"] + params["b"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
    return -chosen.mean()


accumulate = functools.partial(jaxkern.accumulate_gradients, loss_fn)
whole = jax.jit(jax.value_and_grad(loss_fn))


def parts(k, batch=BATCH):
    return jax.tree.map(lambda a: a.reshape(k, -1, *a.shape[1:]), batch)


def assert_close(got, want, rtol=1e-6):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=rtol / 10, strict=True)


@pytest.mark.parametrize("k", [4, *map(exhaustive, (1, 24))])
def test_accumulated_gradients_are_those_of_the_whole_batch(k):
    assert_close(jax.jit(accumulate)(PARAMS, parts(k)), whole(PARAMS, BATCH))


def test_what_else_the_loss_returns_is_stacked():
    """NaN of one microbatch is not lost, either."""
    loss = lambda params, batch: (loss_fn(params, batch), batch["label"])
    run = jax.jit(functools.partial(jaxkern.accumulate_gradients, loss, PARAMS, has_aux=True))
    (value, labels), grads = run(parts(4))
    np.testing.assert_array_equal(labels, parts(4)["label"])
    assert_close((value, grads), whole(PARAMS, BATCH))
    (value, _), grads = run(parts(4, BATCH | {"x": BATCH["x"].at[7, 0].set(jnp.nan)}))
    assert np.isnan(value)
    assert np.isnan(grads["b"]).all()


def test_sums_are_in_float32():
    """Adds a bfloat16 gradient 1 and a thousand of 1/512, which bfloat16 sums would lose."""
    slopes = jnp.array([1.0] + [2.0**-9] * 1023)
    loss = lambda p, slope: (p * slope.astype(p.dtype)).sum()
    one = jnp.ones((), BF16)
    _, grad = jax.jit(functools.partial(jaxkern.accumulate_gradients, loss))(one, slopes)
    assert grad.dtype == BF16
    assert grad == BF16((1 + 1023 * 2.0**-9) / 1024)
    value, grads = jax.eval_shape(accumulate, jax.tree.map(F16, PARAMS), parts(4))
    assert value.dtype == grads["w"].dtype == F16
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), PARAMS)
        assert_close(jax.jit(accumulate)(wide, parts(4)), whole(wide, BATCH), 1e-12)


@FOUR_DEVICES
@pytest.mark.parametrize("check_vma", [True, exhaustive(False)])
def test_in_shard_map_the_devices_exchange_their_sums_once(check_vma):
    """Counts one sum of each gradient and of the loss, in float32, after the loop."""
    mesh, axes = mesh_of(AxisType.Auto, 2, 2), ("x", "y")
    specs = {"in_specs": (P(), P(None, axes)), "out_specs": P(), "check_vma": check_vma}
    split = functools.partial(accumulate, axis_name=axes)
    step = jax.jit(jax.shard_map(split, mesh=mesh, **specs))
    params = jax.tree.map(BF16, PARAMS)
    got = step(params, parts(2))
    assert {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype(BF16)}
    assert_close(jax.tree.map(F32, got), whole(jax.tree.map(F32, params), BATCH), 2e-2)
    text = step.lower(params, parts(2)).as_text()
    reductions = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((tensor<[^>]*>)', text, re.DOTALL)
    assert sorted(reductions) == ["tensor<3xf32>", "tensor<5x3xf32>", "tensor<f32>"]
    lines = [line for line in text.splitlines() if "all_reduce" in line or ".while" in line]
    assert "while" in lines[0]
    assert len({len(line) - len(line.lstrip()) for line in lines}) == 1, "none is inside the loop"


def test_accumulation_takes_python_floats_and_complex_parameters():
    loss = lambda params, x: params["w"] * jnp.abs(params["c"]) * x.sum()
    params = {"w": 2.0, "c": jnp.complex64(1j)}
    value, grads = jaxkern.accumulate_gradients(loss, params, ONES)
    assert (value, grads["w"], grads["c"].dtype) == (6, 3, jnp.complex64)


# Wrong calls

REST = "compute=float32,output=float32"
NUMBERS = ("loss_scale", "counter", "period", "factor", "min_scale", "max_scale")
refused = functools.partial(accumulate, params=PARAMS, microbatches=ONES)


WRONG_VALUES = [
    (Policy.parse, {"text": "fp8"}, "Policy.*'fp8'.*bf16"),
    (Policy.parse, {"text": ""}, "Policy.*bf16"),
    (Policy.parse, {"text": "params=float32"}, "Policy.*compute, output.*missing"),
    (Policy.parse, {"text": f"params=float32,params=float32,{REST}"}, "Policy.*params.*twice"),
    (Policy.parse, {"text": f"weights=float32,params=float32,{REST}"}, "weights=float32"),
    (Policy.parse, {"text": f"params=int32,{REST}"}, "Policy.*params.*'int32'.*float32"),
    (Policy, {"compute": jnp.int32}, "compute=int32 must be a floating dtype"),
    (Policy, {"compute": jnp.float8_e4m3fn}, "compute=float8_e4m3fn must be .* at least 16 bits"),
    (DynamicLossScale, {"period": 0}, "period must be at least 1, got 0"),
    (DynamicLossScale, {"factor": 1.0}, r"factor must be above 1, got 1\.0"),
    (DynamicLossScale, {"factor": np.inf}, "factor must be finite, got inf"),
    (DynamicLossScale, {"min_scale": 0.0}, r"min_scale must be above 0, got 0\.0"),
    (DynamicLossScale, {"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be at most max_s"),
    (DynamicLossScale, {"max_scale": 1e39}, r"max_scale must be at most .*, got 1e\+39"),
    (DynamicLossScale, {"loss_scale": np.float32("nan")}, "loss_scale must be finite, .*nan"),
    (DynamicLossScale, {"loss_scale": np.float32(-1)}, "loss_scale must be between min_scale"),
    (DynamicLossScale, {"loss_scale": 2.0, "max_scale": 1.0}, "max_scale=1.0"),
    (DynamicLossScale, {"loss_scale": 0.5}, r"be between min_scale=1\.0 .*, got 0\.5"),
    (DynamicLossScale, {"counter": -1}, "counter must be at least 0, got -1"),
    (DynamicLossScale, {"counter": np.int32(-1)}, "counter must be at least 0, got -1"),
    (StaticLossScale, {"loss_scale": 0.0}, r"loss_scale must be above 0, got 0\.0"),
    (StaticLossScale, {"loss_scale": float("nan")}, "loss_scale must be above 0, got nan"),
    (StaticLossScale, {"loss_scale": np.float32("inf")}, "loss_scale must be at most .*inf"),
    (StaticLossScale, {"loss_scale": 1e-50}, "loss_scale must be at least .*, got 1e-50"),
    (refused, {"microbatches": {}}, "microbatches must be arrays .*of no array"),
    (refused, {"microbatches": jnp.ones((0, 2))}, r"microbatches must be arrays .*\(0,\)"),
    (refused, {"microbatches": (ONES, ONES.T)}, r"be arrays .*\(2,\), \(3,\)"),
    (refused, {"microbatches": jnp.float32(1)}, r"microbatches must be arrays .*\(\)"),
    (refused, {"axis_name": "x"}, "must name an axis of .* 'x' is none"),
]
WRONG_TYPES = [
    (Policy.parse, {"text": None}, "text must be a string, got NoneType"),
    *((Policy, {"output": value}, "output=.* is not a dtype") for value in (1.5, None, ONES)),
    (POLICY.wrap, {"f": {}}, "got dict; of a linen module"),
    *(
        (scale, {name: value}, f"^{name} must be .*, got {value!r}")
        for scale, names in ((DynamicLossScale, NUMBERS), (StaticLossScale, NUMBERS[:1]))
        for name in names
        for value in (True, "1024", None)
    ),
    (DynamicLossScale, {"counter": 1.5}, r"^counter must be an int, got 1\.5"),
    (DynamicLossScale, {"period": 1.5}, r"^period must be an int, got 1\.5"),
    (refused, {"params": {"w": 1}}, r"^params\['w'\] must be a floating array, got int"),
    (refused, {"params": {"w": "one"}}, r"^params\['w'\] must be a floating array, got str"),
    (refused, {"params": {"w": jnp.arange(3)}}, "must be a floating array, got int32"),
    (refused, {"has_aux": "no"}, "has_aux must be True or False, got 'no'"),
    (refused, {"axis_name": 3}, "must be a mesh axis's name or .*, got 3"),
]


@pytest.mark.parametrize(("error", "wrong"), [(ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)])
def test_wrong_calls(error, wrong):
    for call, options, words in wrong:
        with pytest.raises(error, match=f"(?s){words}"):
            call(**options)
