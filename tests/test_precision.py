"""jaxkern.precision: policies and loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.precision import DynamicLossScale, Policy, all_finite


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
    with pytest.raises(TypeError, match=r"output=1\.5 is not a dtype"):
        Policy(output=1.5)
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
    scale = DynamicLossScale.create(2.0**15)
    grads = {"w": jax.random.normal(jax.random.key(0), (64,)), "n": jnp.arange(3)}
    back = scale.unscale(scale.scale(grads))
    np.testing.assert_array_equal(back["w"], grads["w"])
    np.testing.assert_array_equal(back["n"], grads["n"])
    # 2^17 itself is not finite in fp16, its product with a small gradient is.
    half = DynamicLossScale.create(2.0**17).scale(jnp.float16(2.0**-10))
    assert half.dtype == jnp.float16
    assert half == 128


def test_scaling_keeps_gradients_that_fp16_loses():
    weight = jnp.float16(1.0)

    def gradient(scale):
        def loss(w):
            # The cotangent passes through fp16, where 1e-8 is 0.
            return scale.scale((w.astype(jnp.float32) * 1e-8).astype(jnp.float32))

        return scale.unscale(jax.grad(loss)(weight).astype(jnp.float32))

    assert gradient(DynamicLossScale.create(1.0)) == 0
    np.testing.assert_allclose(gradient(DynamicLossScale.create(2.0**15)), 1e-8, rtol=1e-3)


def test_adjust_follows_its_rule():
    """Against a Python loop, over a run of finite and overflowing steps, under jit and scan."""
    finite = [True, True, True, False, True, True, True, True, True, True] + [False] * 9
    scale = DynamicLossScale.create(8.0, period=3, factor=2.0, min_scale=0.5, max_scale=16.0)
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
        ({"period": 0}, "period=0"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"loss_scale": 2.0, "max_scale": 1.0}, "max_scale=1.0"),
    ],
)
def test_loss_scale_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        DynamicLossScale.create(**options)
