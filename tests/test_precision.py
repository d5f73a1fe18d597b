"""jaxkern.precision: policies and loss scaling."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.precision import (
    DynamicLossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    all_finite,
    select_tree,
)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("fp32", ("float32", "float32", "float32")),
        ("bf16", ("float32", "bfloat16", "float32")),
        ("fp16", ("float32", "float16", "float32")),
        (
            "params=bfloat16,compute=float16,output=float32",
            ("bfloat16", "float16", "float32"),
        ),
        (" output=fp32 , params=fp32,compute=bf16 ", ("float32", "bfloat16", "float32")),
    ],
)
def test_parse(text, dtypes):
    policy = Policy.parse(text)
    assert (policy.params, policy.compute, policy.output) == tuple(map(jnp.dtype, dtypes))
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp8", ["'fp8'", "bf16"]),
        ("params=float32", ["compute, output", "missing"]),
        ("params=float32,params=float32,compute=float32,output=float32", ["params", "twice"]),
        ("params=int32,compute=float32,output=float32", ["params", "'int32'", "float32"]),
        ("weights=float32,compute=float32,output=float32", ["weights=float32"]),
        ("", ["bf16"]),
    ],
)
def test_parse_refuses(text, words):
    with pytest.raises(ValueError, match=r"Policy") as caught:
        Policy.parse(text)
    for word in words:
        assert word in str(caught.value)


def test_policy_refuses_other_than_floating_dtypes():
    with pytest.raises(ValueError, match="compute=int32 must be a floating dtype"):
        Policy(compute=jnp.int32)
    for value in (1.5, None, jnp.ones(2)):
        with pytest.raises(TypeError, match=r"output=.* is not a dtype"):
            Policy(output=value)
    with pytest.raises(TypeError, match="text must be a string, got NoneType"):
        Policy.parse(None)  # pyright: ignore[reportArgumentType]


def test_casts_touch_floating_leaves_only():
    policy = Policy("float32", "bfloat16", "float16")
    tree = {
        "w": jnp.ones(3, jnp.float16),
        "n": jnp.arange(3),
        "b": np.ones(2, np.float64),
        "flag": jnp.array(True),
        "count": 7,
        "none": None,
    }
    for cast, dtype in (
        (policy.cast_to_params, jnp.float32),
        (policy.cast_to_compute, jnp.bfloat16),
        (policy.cast_to_output, jnp.float16),
    ):
        out = cast(tree)
        assert out["w"].dtype == dtype
        assert out["b"].dtype == dtype
        assert out["n"].dtype == tree["n"].dtype
        assert out["flag"].dtype == bool
        assert out["count"] == 7
        assert out["none"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad):
    tree = {"a": jnp.ones((2, 3)), "n": jnp.arange(2), "h": jnp.ones(2, jnp.float16)}
    assert all_finite(tree)
    assert all_finite({})
    for name in ("a", "h"):
        broken = tree | {name: tree[name].at[..., -1].set(bad)}
        assert not all_finite(broken)
        assert not jax.jit(all_finite)(broken)


def test_scaling_and_unscaling_are_exact():
    scale = DynamicLossScale(2.0**15)
    grads = {"w": jax.random.normal(jax.random.key(0), (64,)), "n": jnp.arange(3)}
    back = scale.unscale(scale.scale(grads))
    np.testing.assert_array_equal(back["w"], grads["w"])
    np.testing.assert_array_equal(back["n"], grads["n"])
    # 2^17 itself is not finite in fp16, its product with a small gradient is.
    half = DynamicLossScale(2.0**17).scale(jnp.float16(2.0**-10))
    assert half.dtype == jnp.float16
    assert half == 128


def test_scaling_keeps_gradients_that_fp16_loses():
    weight = jnp.float16(1.0)

    def gradient(scale):
        def loss(w):
            # The cotangent passes through fp16, where 1e-8 is 0.
            return scale.scale((w.astype(jnp.float32) * 1e-8).astype(jnp.float32))

        return scale.unscale(jax.grad(loss)(weight).astype(jnp.float32))

    assert gradient(DynamicLossScale(1.0)) == 0
    np.testing.assert_allclose(gradient(DynamicLossScale(2.0**15)), 1e-8, rtol=1e-3)


def test_adjust_follows_its_rule():
    """Against a Python loop, over a run of finite and overflowing steps, under jit and scan."""
    finite = [True, True, True, False, True, True, True, True, True, True] + [False] * 9
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

    last, (values, counters) = jax.jit(lambda s, f: jax.lax.scan(step, s, f))(
        scale, jnp.array(finite)
    )
    assert list(zip(values.tolist(), counters.tolist(), strict=True)) == expected
    assert (last.period, last.factor, last.min_scale, last.max_scale) == (3, 2.0, 0.5, 16.0)
    assert last.loss_scale.dtype == jnp.float32
    assert last.counter.dtype == jnp.int32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"period": 0}, "period must be at least 1, got 0"),
        ({"factor": 1.0}, r"factor must be above 1, got 1\.0"),
        ({"factor": float("inf")}, "factor must be finite, got inf"),
        ({"min_scale": 0.0}, r"min_scale must be above 0, got 0\.0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be at most max_scale"),
        ({"max_scale": 1e39}, r"max_scale must be at most .*, got 1e\+39"),
        ({"loss_scale": np.float32("nan")}, "loss_scale must be finite, got .*nan"),
        ({"loss_scale": np.float32(-1)}, "loss_scale must be between min_scale"),
        ({"loss_scale": 2.0, "max_scale": 1.0}, "max_scale=1.0"),
    ],
)
def test_loss_scale_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        DynamicLossScale(**options)


SCALES = [NoOpLossScale(), StaticLossScale(512.0), DynamicLossScale(512.0, 1, 5, 4.0, 2.0, 1024.0)]


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: type(s).__name__)
def test_loss_scales_keep_every_field(scale, tmp_path):
    """Through jit, scan, shard_map, donation, a checkpoint and back."""
    import orbax.checkpoint as ocp

    def same(other):
        assert jax.tree.structure(other) == jax.tree.structure(scale)
        assert [(a.dtype, a) for a in jax.tree.leaves(other)] == [
            (a.dtype, a) for a in jax.tree.leaves(scale)
        ]

    same(jax.jit(lambda s: s)(scale))
    same(jax.lax.scan(lambda s, _: (s, None), scale, length=2)[0])
    mesh = jax.make_mesh((1,), ("data",))
    spec = jax.sharding.PartitionSpec()
    same(jax.shard_map(lambda s: s, mesh=mesh, in_specs=spec, out_specs=spec)(scale))
    tree = {"scale": scale, "step": jnp.int32(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scale", tree)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "scale", jax.eval_shape(lambda: tree))["scale"])


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaticLossScale(0.0), r"loss_scale must be above 0, got 0\.0"),
        (lambda: StaticLossScale(float("nan")), "loss_scale must be above 0, got nan"),
        (lambda: StaticLossScale(np.float32("inf")), "loss_scale must be at most .*inf"),
        (lambda: StaticLossScale(1e-50), "loss_scale must be at least .*, got 1e-50"),
        (lambda: DynamicLossScale(0.5), r"loss_scale must be between min_scale=1\.0 .*, got 0\.5"),
        (lambda: DynamicLossScale(counter=-1), "counter must be at least 0, got -1"),
        (lambda: DynamicLossScale(counter=np.int32(-1)), "counter must be at least 0, got -1"),
    ],
)
def test_loss_scales_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("value", [True, "1024", None])
def test_loss_scales_refuse_what_is_no_number(value):
    for name in ("loss_scale", "counter", "period", "factor", "min_scale", "max_scale"):
        with pytest.raises(TypeError, match=f"^{name} must be .*, got {value!r}"):
            DynamicLossScale(**{name: value})
    with pytest.raises(TypeError, match=f"^loss_scale must be .*, got {value!r}"):
        StaticLossScale(value)
    for name in ("counter", "period"):
        with pytest.raises(TypeError, match=rf"^{name} must be an int, got 1\.5"):
            DynamicLossScale(**{name: 1.5})


def test_loss_scales_take_numbers_of_numpy():
    scale = DynamicLossScale(np.float64(4), np.int64(1), np.int32(3), np.float32(4), np.int8(1))
    assert scale == DynamicLossScale(scale.loss_scale, scale.counter, 3, 4.0, 1.0)
    assert (scale.loss_scale.dtype, scale.counter.dtype) == (jnp.float32, jnp.int32)
    assert jax.tree.structure(scale) == jax.tree.structure(DynamicLossScale(4, 1, 3, 4.0, 1.0))


def test_loss_scales_may_hold_what_is_no_array():
    """JAX makes trees of shardings, names and booleans of any tree of arrays."""
    for leaf in ("data", True, None, jax.sharding.PartitionSpec()):
        made = jax.tree.map(lambda _, leaf=leaf: leaf, DynamicLossScale())
        assert (made.loss_scale, made.counter, made.period) == (leaf, leaf, 2000)


def test_select_tree_chooses_on_the_device():
    old, new = (
        {"w": jnp.zeros(2), "n": jnp.int32(1)},
        {"w": jnp.full(2, jnp.nan), "n": jnp.int32(2)},
    )
    choose = jax.jit(select_tree)
    for finite, expected in ((True, new), (False, old)):
        jax.tree.map(np.testing.assert_array_equal, choose(jnp.array(finite), new, old), expected)


POLICY = Policy("float32", "bfloat16", "float16")


def test_wrap_casts_a_function():
    seen = []

    def f(params, x, *, n):
        seen.append((params["w"].dtype, x.dtype, n.dtype))
        return x * params["w"], n

    out, n = POLICY.wrap(f)({"w": jnp.ones(2)}, jnp.ones(2), n=jnp.arange(2))
    assert seen == [(jnp.bfloat16, jnp.bfloat16, jnp.int32)]
    assert (out.dtype, n.dtype) == (jnp.float16, jnp.int32)
    assert POLICY.wrap(f).__name__ == "f"
    with pytest.raises(TypeError, match="got dict; of a linen module"):
        POLICY.wrap({})  # pyright: ignore[reportArgumentType]


def test_wrap_casts_flax_modules():
    from flax import linen, nnx

    dense = linen.Dense(3, dtype=None)
    x = jnp.ones((2, 4))
    variables = dense.init(jax.random.key(0), x)
    assert POLICY.wrap(dense.apply)(variables, x).dtype == jnp.float16

    class Net(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
            self.calls = nnx.BatchStat(jnp.float32(1))

        def __call__(self, x):
            assert self.dense.kernel.dtype == x.dtype == jnp.bfloat16
            self.calls[...] = self.calls[...] + 2.0**-12
            return self.dense(x)

    net = Net()
    loss = lambda net: POLICY.wrap(net)(x).astype(jnp.float32).sum()
    grads = nnx.grad(loss)(net)
    assert grads["dense"]["kernel"].dtype == net.dense.kernel.dtype == jnp.float32
    assert loss(net).dtype == jnp.float32
    assert net.calls[...] == 1 + 2.0**-11  # bf16 has no such number
    assert net.calls.dtype == jnp.float32


def test_wrap_casts_modules_that_are_pytrees():
    """As Equinox's are, with functions among the leaves."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: jax.Array
        activation: Callable

        def __call__(self, x):
            assert self.weight.dtype == x.dtype == jnp.bfloat16
            return self.activation(x @ self.weight)

    layer = Layer(jnp.ones((2, 2)), jnp.tanh)
    assert POLICY.wrap(layer)(jnp.ones(2)).dtype == jnp.float16
    loss = lambda w: POLICY.wrap(dataclasses.replace(layer, weight=w))(jnp.ones(2)).sum()
    assert jax.grad(lambda w: loss(w).astype(jnp.float32))(layer.weight).dtype == jnp.float32
    assert layer.weight.dtype == jnp.float32
