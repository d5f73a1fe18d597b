"""gated_linear_unit: cases for the common suite, and what is its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from tests import check, test_gated
from tests.products import PLAIN, extreme, inputs
from tests.products import faster_kernels as faster_kernels
from tests.test_linear import LINEAR


def gated_oracle(x, w_gate, w_up, dout, *, activation):
    """Output and gradients in float64."""
    gate, up = x @ w_gate, x @ w_up
    value, slope = check.activated(activation, gate)
    dgate, dup = dout * up * slope, dout * value
    return value * up, (dgate @ w_gate.T + dup @ w_up.T, x.T @ dgate, x.T @ dup)


def gated_plain(x, w_gate, w_up, *, activation):
    w_gate, w_up = w_gate.astype(x.dtype), w_up.astype(x.dtype)
    return PLAIN[activation](x @ w_gate) * (x @ w_up)


def gated_accurate(arrays, implementation, activation, recompute):
    call, truth = jaxkern.gated_linear_unit, functools.partial(check.in_float64, gated_oracle)
    own = {"recompute": recompute}
    check.check_accuracy(
        call, gated_plain, truth, arrays, implementation, own=own, activation=activation
    )


def gated_inputs(m, k, n, dtype):
    return (*inputs(m, k, n, dtype)[:2], inputs(m, k, n, dtype, seed=1)[1])


@pytest.mark.gpu
@pytest.mark.newest
@pytest.mark.parametrize("recompute", [False, True])
def test_gated_kernels(recompute):
    gated_accurate(gated_inputs(130, 72, 65, "bfloat16"), "mosaic", "silu", recompute)


@pytest.mark.compiled
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gelu_erf", "sigmoid", "tanh"])
def test_gated_compiled(activation, recompute):
    arrays = gated_inputs(2000, 1024, 1536 + 8, "bfloat16")
    gated_accurate(arrays, "mosaic", activation, recompute)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_gated_plain(activation):
    gated_accurate(gated_inputs(6, 40, 24, "float32"), "xla", activation, True)


def clamped_oracle(x, w, b, dout):
    """Output and gradients in float64 of the clamped unit, both weights and biases in one."""
    half = w.shape[1] // 2
    gate, up = (x @ w + b)[:, :half], (x @ w + b)[:, half:]
    near, shifted = gate.clip(max=1.5), up.clip(-1.5, 1.5) + 1
    value, slope = check.activated("quick_gelu", near)
    dgate = dout * shifted * slope * (gate <= 1.5)
    dup = dout * value * (abs(up) <= 1.5)
    dx = dgate @ w[:, :half].T + dup @ w[:, half:].T
    side_by_side = (jnp if isinstance(x, jax.Array) else np).concatenate
    dw = side_by_side([x.T @ dgate, x.T @ dup], -1)
    return value * shifted, (dx, dw, side_by_side([dgate.sum(0), dup.sum(0)]))


def clamped_plain(x, w, b):
    gate, up = jnp.split(x @ w.astype(x.dtype) + b.astype(x.dtype), 2, -1)
    return test_gated.clamped_plain(gate, up)


def in_one(x, w, b, **options):
    return jaxkern.gated_linear_unit(x, w, None, b, **test_gated.CLAMPED, **options)


def apart(x, w, b, **options):
    halves = (*jnp.split(w, 2, -1), *jnp.split(b, 2))
    return jaxkern.gated_linear_unit(x, *halves, **test_gated.CLAMPED, **options)


def clamped_accurate(arrays, implementation, recompute, call):
    truth, own = functools.partial(check.in_float64, clamped_oracle), {"recompute": recompute}
    check.check_accuracy(call, clamped_plain, truth, arrays, implementation, own=own)


@pytest.mark.gpu
@pytest.mark.newest
@pytest.mark.parametrize(
    ("shape", "recompute", "call"),
    [
        *(((130, 72, 65), False, in_one), ((24, 72, 64), True, in_one)),
        ((24, 72, 64), False, apart),
    ],
)
def test_clamped_kernels(shape, recompute, call):
    """With biases, both weights in one array and apart, of columns that are padded and not."""
    m, k, n = shape
    clamped_accurate(inputs(m, k, 2 * n, "bfloat16", "float32"), "mosaic", recompute, call)


@pytest.mark.compiled
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [8, 16, 64, 200, 1536, 1544])
def test_clamped_compiled(n, recompute):
    for dtype in ("bfloat16", "float16"):
        arrays = inputs(2000, 1024, 2 * n, dtype, "float32")
        for call in (in_one, apart):
            clamped_accurate(arrays, "mosaic", recompute, call)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("call", [in_one, apart])
def test_clamped_plain(dtype, call):
    clamped_accurate(inputs(6, 40, 48, dtype, "float32"), "xla", True, call)


@pytest.mark.parametrize("which", ["b_gate", "b_up"])
def test_one_bias_of_two(which):
    x, w_gate, w_up = gated_inputs(6, 16, 24, "float32")
    b = inputs(6, 16, 24, "float32")[2]
    for implementation in ("xla", None):
        run = functools.partial(jaxkern.gated_linear_unit, implementation=implementation)
        out, vjp = jax.vjp(lambda b: run(x, w_gate, w_up, **{which: b}), b)  # noqa: B023
        add = lambda y, name, b=b: y + b if name == which else y
        want = jax.nn.silu(add(x @ w_gate, "b_gate")) * add(x @ w_up, "b_up")
        check.assert_close(out, want, 1e-6)
        assert np.linalg.norm(vjp(out)[0]) > 0


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 8, 0), (1, 1, 1)])
def test_one_weight_of_few_elements(shape, implementation):
    m, k, n = shape
    x, w, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, 2 * n)), jnp.zeros(2 * n)
    call = functools.partial(in_one, implementation=implementation)
    out, vjp = jax.vjp(call, x, w, b)
    assert out.shape == (m, n)
    for got, like in zip(vjp(out), (x, w, b), strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("recompute", [False, True])
def test_one_weight_is_read_as_it_lies(recompute):
    """No half of it is copied, and its gradient, added to others or not, is one product."""
    x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 2 * 192), jnp.bfloat16)
    options = {"recompute": recompute, "implementation": "mosaic"}

    def loss(x, w, total):
        out = jaxkern.gated_linear_unit(x, w, accumulators=total, **options)
        return jnp.sum(out.astype(jnp.float32))

    def lowered(argnums, total):
        grad = jax.jit(jax.value_and_grad(loss, argnums)).trace(x, w, total)
        return grad.lower(lowering_platforms=("cuda",)).as_text()

    first = ["gated_fwd", "gated_bwd" if recompute else "gated_silu_bwd", "linear_dx"]
    for text, names in (
        (lowered((0, 1), None), [*first, "linear_dweight"]),
        (lowered((0, 2), jnp.zeros(w.shape)), [*first, "linear_accumulate"]),
    ):
        for op in ("concatenate", "slice", "pad", "transpose"):
            assert f"stablehlo.{op}" not in text, op
        calls = check.kernel_calls(text)
        assert [sum(name in line for line in calls) for name in names] == [1, 1, 1, 1]
        assert len(calls) == 4


@pytest.mark.parametrize("implementation", ["xla", None])
def test_one_accumulator(implementation):
    """The gradient with respect to it is the accumulator and that of the one weight."""
    x, w, b = inputs(8, 16, 48, "float32")
    start = jax.random.normal(jax.random.key(0), w.shape)

    def loss(w, total, recompute):
        options = {"recompute": recompute, "implementation": implementation}
        return jnp.sum(jnp.sin(in_one(x, w, b, accumulators=total, **options)))

    for recompute in (False, True):
        zeros, total = jax.grad(loss, (0, 1))(w, start, recompute)
        np.testing.assert_array_equal(zeros, np.zeros_like(w))
        check.assert_close(total, start + jax.grad(loss)(w, None, recompute), 1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"w_gate": jnp.ones((3, 5)), "w_up": None}, ValueError, r"\(K, 2N\).*odd number"),
        ({"w_gate": jnp.ones((4, 6))}, ValueError, r"w_gate must have shape \(K, N\), K = 3"),
        ({"w_up": jnp.ones((3, 5))}, ValueError, r"w_up must have shape \(3, 6\)"),
        ({"w_up": None, "b_up": jnp.ones(3)}, ValueError, r"b_up must be None without w_up"),
        ({"b_gate": jnp.ones(3)}, ValueError, r"b_gate must have shape \(6,\)"),
        ({"b_up": jnp.ones(3)}, ValueError, r"b_up must have shape \(6,\)"),
        ({"b_up": jnp.ones(6, int)}, TypeError, "b_up must have a floating dtype"),
        ({"activation": None}, ValueError, "activation must be one of"),
        ({"limit": 0.0}, ValueError, "limit must be above 0"),
        ({"accumulators": jnp.ones((3, 6))}, ValueError, r"two arrays \(3, 6\).*got one array"),
        ({"accumulators": (jnp.ones((3, 6)),)}, ValueError, "of w_gate and of w_up; got 1"),
        (
            {"w_up": None, "accumulators": jnp.ones((3, 3))},
            ValueError,
            r"accumulators must have shape \(3, 6\) = \(K, 2N\)",
        ),
    ],
)
def test_gated_errors(change, error, words):
    arguments = {"x": jnp.ones((2, 3)), "w_gate": jnp.ones((3, 6)), "w_up": jnp.ones((3, 6))}
    with pytest.raises(error, match=words):
        jaxkern.gated_linear_unit(**arguments | change)


def gated_call(x, w_gate, w_up, implementation="xla"):
    """As `call`; the gate is ReLU's."""
    arrays = (v.astype(jnp.bfloat16) for v in (x, w_gate, w_up))
    out = jaxkern.gated_linear_unit(*arrays, activation="relu", implementation=implementation)
    return out.astype(jnp.float32)


GATED = dataclasses.replace(
    LINEAR,
    name="gated_linear_unit",
    call=gated_call,
    reference=gated_call,
    arrays=lambda key: tuple(
        jax.random.randint(jax.random.fold_in(key, i), shape, -3, 4).astype(jnp.float32) / 4
        for i, shape in enumerate([(4, 2, 8), (8, 8), (8, 8)])
    ),
    kernels=("gated_fwd", "gated_dx"),
    axes="mtk kn kn -> mtn",
    tolerance=2.0**-7,  # the projections, too, are rounded where they are kept
)


def one_weight_call(x, w, b, implementation="xla"):
    arrays = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), None, b
    out = jaxkern.gated_linear_unit(*arrays, activation="relu", implementation=implementation)
    return out.astype(jnp.float32)


ONE_WEIGHT = dataclasses.replace(
    GATED,
    name="gated_linear_unit, one weight",
    call=one_weight_call,
    reference=one_weight_call,
    arrays=lambda key: tuple(
        jax.random.randint(jax.random.fold_in(key, i), shape, -3, 4).astype(jnp.float32) / 4
        for i, shape in enumerate([(4, 2, 8), (8, 16), (16,)])
    ),
    kernels=("gated_fwd", "linear_dx"),
    axes="mtk kn n -> mtc",
    once=False,
    cells=[  # beside the matrix of the two weights': what one array of both could break
        *(("value", "mosaic"), ("vmap(grad)", "mosaic"), ("grad(grad)", "mosaic"), ("jvp", "xla")),
        *(("shard_map", None), ("auto mesh", None), ("explicit mesh", None)),
        *(("features split", None), ("features split", "xla"), ("kernels lowered", "mosaic")),
    ],
)
SPLIT_COLUMNS = dataclasses.replace(
    ONE_WEIGHT,
    name="gated_linear_unit, columns of one weight",
    features="n",
    cells=[("features split", None)],
)
test_gated_transformations = check.transformations(GATED, ONE_WEIGHT, SPLIT_COLUMNS)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("recompute", [False, True])
def test_float16_gates_beyond_overflow(implementation, recompute):
    """A gate of 8e4 times a small projection fits, and so do its gradients, zeros among them."""
    x, w, _ = inputs(16, 64, 64, "float16")
    x, w_gate, w_up = 20 + 0 * x, 62.5 + 0 * w, w / 1024
    dout = jnp.where(jnp.arange(64) % 2, 0.001, 0).astype(jnp.float16) + 0 * x
    options = {"recompute": recompute, "implementation": implementation}
    call = functools.partial(jaxkern.gated_linear_unit, **options)
    got, want = extreme(
        call, functools.partial(gated_oracle, activation="silu"), (x, w_gate, w_up), dout
    )
    limit = 2e-3 if recompute or implementation == "xla" else 0.2  # what is kept ends at 65504
    for g, v in zip(got, want, strict=True):
        assert check.relative_error(g, v) < limit


@pytest.mark.compiled
@pytest.mark.parametrize("n", [16, 64])
def test_results_of_few_columns_are_the_same_each_time(n):
    """A tile is wider than they are: what is stored last is not written over on its way."""
    x, w, _ = inputs(16, 64, n, "bfloat16")
    call = functools.partial(jaxkern.gated_linear_unit, implementation="mosaic")
    gradients = jax.jit(lambda *a: jax.vjp(call, *a)[1](jnp.ones((16, n), jnp.bfloat16)))
    plain = functools.partial(call, implementation="xla")
    want = jax.vjp(plain, x, w, 2 * w)[1](jnp.ones((16, n), x.dtype))
    check.assert_close(gradients(x, w, 2 * w), want, 1e-2)
    check.assert_same_bits(lambda: gradients(x, w, 2 * w), 200)
