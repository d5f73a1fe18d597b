"""linear and accumulate_weight_grad: cases for the common suite, and what is their own."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.mosaic.launch import interpreter
from jaxkern.ops.curves import Activation
from jaxkern.ops.linear import choice, matmul
from tests import check
from tests.test_activations import ELEMENTWISE

PLAIN = {name: f for name, (_, f) in ELEMENTWISE.items()} | {"gelu": jax.nn.gelu}


@pytest.fixture(scope="module", autouse=True)
def faster_kernels():
    """Where matrices are small, ``None`` picks the kernels, as where they are measured faster.

    And where a test does not say otherwise, GPUs multiply fp32 as such and not as tf32.
    """
    small = choice.Measured(8, 8, 8, speed=2.0, tile=matmul.Tile(128, 64, 64, 2, None))
    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "MEASURED", dict.fromkeys(choice.MEASURED, (small,)))
        yield


def oracle(x, w, b, dout, *, activation=None):
    """Output and gradients in float64."""
    out, slope = check.activated(activation, x @ w + b)
    dy = dout * slope
    rows = tuple(range(x.ndim - 1))
    dw = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
    return out, (dy @ w.T, dw, dy.sum(rows))


def plain(x, w, b, *, activation=None):
    """What a user would write, in the dtype of x."""
    y = x @ w.astype(x.dtype) + b.astype(x.dtype)
    return y if activation is None else PLAIN[activation](y)


def inputs(m, k, n, dtype, weight_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape, t: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(t)
    weight_dtype = weight_dtype or dtype
    return draw((m, k), dtype), draw((k, n), weight_dtype) / 8, draw((n,), weight_dtype)


def accurate(arrays, implementation, **options):
    call = functools.partial(jaxkern.linear, implementation=implementation, **options)
    by_plain = functools.partial(plain, **options)
    truth = functools.partial(check.in_float64, functools.partial(oracle, **options))
    with check.running(implementation):
        check.check_accuracy(call, by_plain, truth, arrays)


@pytest.mark.gpu
@pytest.mark.newest
@pytest.mark.parametrize(
    ("m", "k", "n", "activation"),
    [(130, 72, 65, None), (130, 72, 65, "gelu"), (1, 16, 200, "relu_squared")],
)
def test_linear_kernels(m, k, n, activation):
    accurate(inputs(m, k, n, "bfloat16"), "mosaic", activation=activation)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        *((4096, 4096, 4096), (1000, 1016, 2040), (1, 4096, 512), (4096, 16, 4096)),
        *((4096, 4096, 16), (5, 24, 48), (1001, 999, 1003)),
    ],
)
@pytest.mark.parametrize("activation", [None, *get_args(Activation)])
def test_linear_compiled(m, k, n, activation):
    accurate(inputs(m, k, n, "bfloat16"), "mosaic", activation=activation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "sigmoid", "tanh"])
def test_linear_plain(dtype, activation):
    accurate(inputs(6, 40, 24, dtype), "xla", activation=activation)


@pytest.mark.gpu
def test_weight_of_another_dtype():
    """It keeps its dtype in the gradient, which is not rounded to that of x on the way."""
    arrays = inputs(8, 64, 64, "bfloat16", "float32")
    accurate(arrays, "mosaic")
    with check.running("mosaic"):
        _, dw, _ = jax.grad(
            lambda *a: jaxkern.linear(*a, implementation="mosaic").sum(dtype=jnp.float32), (0, 1, 2)
        )(*arrays)
    assert dw.dtype == jnp.float32
    assert not np.array_equal(dw, dw.astype(jnp.bfloat16))


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 8, 0)])
def test_empty(shape, implementation):
    m, k, n = shape
    x, w, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n)), jnp.ones(n)
    call = functools.partial(jaxkern.linear, implementation=implementation)
    out, vjp = jax.vjp(call, x, w, b)
    np.testing.assert_array_equal(out, np.ones((m, n)))
    for got, like in zip(vjp(out), (x, w, b), strict=True):
        assert got.shape == like.shape


@pytest.mark.parametrize("implementation", ["xla", None])
def test_cotangents_stay_in_sixteen_bits(implementation):
    """No product of the backward has an operand in fp32."""
    x, w, b = inputs(8, 16, 32, "bfloat16", "float32")

    def loss(x, w, b):
        plain = jaxkern.linear(x, w, implementation=implementation)
        out = jaxkern.linear(x, w, b, activation="gelu", implementation=implementation)
        gated = jaxkern.gated_linear_unit(x, w, w, implementation=implementation)
        return jnp.sum((plain + out + gated).astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, w, b).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 12
    for line in products:
        operands = line.split(" : ")[-1].split("->")[0]
        assert "f32" not in operands.replace("bf16", ""), line


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64, 64), (24, 40, 72)])
def test_accumulation(shape):
    m, k, n = shape
    x, _, _ = inputs(m, k, n, "bfloat16")
    dout = inputs(m, n, 1, "bfloat16", seed=1)[0]
    start = jax.random.normal(jax.random.key(0), (k, n))
    with check.running("mosaic"):
        got = jaxkern.accumulate_weight_grad(start, x, dout, implementation="mosaic")
    wide = [np.asarray(v).astype(np.float64) for v in (start, x, dout)]
    want = wide[0] + wide[1].T @ wide[2]
    assert check.relative_error(got, want) < 1e-6


def test_accumulation_over_microbatches():
    """Carried through a scan, it is the gradient of the whole batch."""
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    dout = jax.random.normal(jax.random.key(1), (4, 8, 24))

    def step(acc, micro):
        return jaxkern.accumulate_weight_grad(acc, *micro), None

    got, _ = jax.lax.scan(step, jnp.zeros((16, 24)), (x, dout))
    want = np.einsum("bmk,bmn->kn", np.asarray(x, np.float64), np.asarray(dout, np.float64))
    assert check.relative_error(got, want) < 1e-6


@pytest.mark.parametrize("implementation", ["xla", None, "mosaic"])
def test_accumulators_over_microbatches(implementation):
    """Gradients with respect to them are sums over micro-batches, with no other memory for them."""
    k, n = 16, 24
    x, w, _ = inputs(4 * 8, k, n, "float32")
    w_gate, w_up = (inputs(4, n, n, "float32", seed=i)[1] for i in (1, 2))

    def loss(x, w, w_gate, w_up, sums, implementation=implementation):
        x, w, w_gate, w_up = (v.astype("bfloat16") for v in (x, w, w_gate, w_up))
        w_sum, *gated_sums = sums or (None,)
        h = jaxkern.linear(
            x, w, activation="silu", accumulator=w_sum, implementation=implementation
        )
        out = jaxkern.gated_linear_unit(
            h, w_gate, w_up, accumulators=gated_sums or None, implementation=implementation
        )
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    sums = tuple(jnp.zeros(v.shape) for v in (w, w_gate, w_up))

    def accumulate(sums, micro):
        return jax.grad(loss, 4)(micro, w, w_gate, w_up, sums), None

    over_all = lambda x: jax.lax.scan(accumulate, sums, x.reshape(4, 8, k))[0]
    if implementation == "mosaic":
        text = jax.jit(over_all).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        calls = check.kernel_calls(text)
        assert not any("_dweight" in line for line in calls)
        sums_of = [line for line in calls if "_accumulate" in line]
        assert [line.count("output_operand_alias<") for line in sums_of] == [2, 1]
        return
    want = jax.grad(loss, (1, 2, 3))(x, w, w_gate, w_up, None)
    check.assert_close(jax.jit(over_all)(x), want, 2.0**-7)
    zeros = jax.grad(loss, 1)(x, w, w_gate, w_up, sums)
    np.testing.assert_array_equal(zeros, np.zeros_like(w))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulators_shared_by_devices(dtype):
    """Inside a shard_map the devices' gradients are added to what they have in common, once."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    x, w, _ = inputs(8, 16, 24, dtype)
    start = jnp.ones(w.shape)

    def grad(x, w, start):
        f = lambda a: jnp.sum(jaxkern.linear(x, w, accumulator=a).astype(jnp.float32))
        return jax.grad(f)(start)

    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.shard_map(grad, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    check.assert_close(jax.jit(split)(x, w, start), grad(x, w, start), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_devices_add(dtype):
    """Parts of sums have `accumulate_dtype` between devices; results keep theirs."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x, w, b = inputs(8, 16, 24, "bfloat16")
    put = lambda v, *spec: jax.device_put(v, jax.NamedSharding(mesh, P(*spec)))
    call = functools.partial(jaxkern.linear, accumulate_dtype=dtype)

    def results(x, w, b):
        out, vjp = jax.vjp(call, x, w, b)
        return out, vjp(out)

    for placed in (
        (put(x, "data"), put(w), put(b)),
        (put(x, None, "data"), put(w, "data"), put(b)),
        (put(x), put(w, None, "data"), put(b, "data")),
    ):
        lowered = jax.jit(results).lower(*placed)
        assert {v.dtype for v in jax.tree.leaves(lowered.out_info)} == {jnp.dtype("bfloat16")}
        text = lowered.as_text().split('"stablehlo.all_reduce"')[1:]
        summed = [part.split(") -> ")[1].split(">")[0].split("x")[-1] for part in text]
        assert summed == [{"float32": "f32", "bfloat16": "bf16"}[dtype]], summed


def test_epilogue_of_several_boxes():
    """Each box of a tile meets its part of what the epilogue reads, in each of several tiles."""
    key = functools.partial(jax.random.fold_in, jax.random.key(0))
    a, b = (jax.random.normal(key(i), (256, 128), jnp.bfloat16) for i in range(2))
    c = jax.random.normal(key(2), (256, 256), jnp.bfloat16)
    product = matmul.Product(
        False, True, ("float32", "bfloat16"), lambda p, r, t: [p[0] + t[0], p[0] * t[0]], "test"
    )
    with interpreter():
        tile = matmul.Tile(128, 128, 64, 2, None)
        got = jax.jit(lambda *v: matmul.matmul(product, tile, *v))([a], [b], (), [c])
    a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
    assert check.relative_error(got[0], a @ b.T + c) < 1e-6
    assert check.relative_error(got[1], (a @ b.T) * c) < 2.0**-8


def test_choice_follows_the_table(monkeypatch):
    """None near nothing measured or near what is slower; else the nearest row's tile."""
    slow, fast = matmul.Tile(128, 128), matmul.Tile(128, 256)
    rows = (
        choice.Measured(4096, 4096, 4096, speed=0.9, tile=slow),
        choice.Measured(16384, 4096, 4096, speed=1.1, tile=fast),
    )
    monkeypatch.setattr(choice, "MEASURED", {"linear_fwd": rows})
    pick = functools.partial(choice.tile_for, "linear_fwd")
    assert pick("auto", 16384, 4096, 5000) == fast
    assert pick("auto", 4096, 4096, 4096) is None
    assert pick("mosaic", 4096, 4096, 4096) == slow
    assert pick("auto", 100000, 4096, 4096) is None
    assert pick("mosaic", 100000, 4096, 4096) is not None
    assert pick("mosaic", 0, 4096, 4096) is None


@pytest.mark.parametrize(("activation", "kernels"), [("gelu", 1), ("relu", 0), (None, 0)])
def test_choice_at_short_contractions(monkeypatch, activation, kernels):
    """GPT-2's up-projection: sums in fp32 cost XLA more there than its products gain."""
    monkeypatch.setattr(choice, "MEASURED", MEASURED)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 2048, 768), (768, 3072)))
    forward = jax.jit(functools.partial(jaxkern.linear, activation=activation))
    text = forward.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert len(check.kernel_calls(text)) == kernels


def test_kernels_fit_the_shared_memory():
    """And none of them pads matrices whose sizes are multiples of 64, or those of a LoRA."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for m, k, n in ((512, 256, 512), (3, 256, 16)):
        x, w, w_up = bf16((m, k)), bf16((k, n)), jax.ShapeDtypeStruct((k, n), jnp.float32)

        def loss(x, w, w_up):
            options = {"implementation": "mosaic"}
            out = jaxkern.linear(x, w, activation="gelu", **options)
            for recompute in (False, True):
                out += jaxkern.gated_linear_unit(x, w, w_up, recompute=recompute, **options)
            return jnp.sum(out.astype(jnp.float32))

        grad = jax.jit(jax.grad(loss, (0, 1, 2)))
        text = grad.trace(x, w, w_up).lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.pad" not in text
        calls = check.kernel_calls(text)
        count = lambda name, calls=calls: sum(name in line for line in calls)
        names = ("linear_activation_fwd", "linear_dx", "linear_dweight")
        assert [count(name) for name in names] == [1, 1, 1]
        names = ("gated_fwd", "gated_silu_bwd", "gated_bwd", "gated_dx", "gated_dweights")
        assert [count(name) for name in names] == [1, 1, 1, 2, 2]


MEASURED = choice.MEASURED


def test_measured_tiles_lower_for_cuda(monkeypatch):
    """With accumulators, whose tiles take shared memory beside the operands'."""
    monkeypatch.setattr(choice, "MEASURED", MEASURED)
    call = functools.partial(jaxkern.accumulate_weight_grad, implementation="mosaic")
    for row in MEASURED["linear_accumulate"]:
        of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
        arrays = (
            of((row.m, row.n), "float32"),
            *(of((row.k, size), "bfloat16") for size in (row.m, row.n)),
        )
        lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",))
        assert "linear_accumulate" in lowered.as_text()


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


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_large_gradients(implementation):
    """Those of 1e5 come through like small ones."""
    dtype = "bfloat16" if implementation == "mosaic" else "float32"
    arrays = inputs(16, 64, 64, dtype)
    dout = (1e5 * inputs(16, 64, 64, "float32", seed=1)[0]).astype(dtype)
    call = functools.partial(jaxkern.linear, activation="gelu", implementation=implementation)
    truth = functools.partial(oracle, activation="gelu")
    for got, want in zip(*extreme(call, truth, arrays, dout), strict=True):
        assert check.relative_error(got, want) < (1e-2 if dtype == "bfloat16" else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_float16_near_overflow(implementation):
    """Sums whose parts pass 65504 on the way, and results that stay below."""
    x, w, b = inputs(64, 64, 64, "float16")
    signs = jnp.where(jnp.arange(64) < 32, 1, -1).astype(jnp.float16)
    x, w, dout = x / 8 + 180 * signs, w / 8 + 180 * signs, w / 8 + 180 * signs[:, None]
    call = functools.partial(jaxkern.linear, implementation=implementation)
    for got, want in zip(*extreme(call, oracle, (x, w, b), dout), strict=True):
        assert check.relative_error(got, want) < 2e-3


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
    first = gradients(x, w, 2 * w)
    plain = functools.partial(call, implementation="xla")
    check.assert_close(first, jax.vjp(plain, x, w, 2 * w)[1](jnp.ones((16, n), x.dtype)), 1e-2)
    for _ in range(200):
        for a, b in zip(first, gradients(x, w, 2 * w), strict=True):
            assert (a == b).all()


PRECISIONS = {"highest": 1e-6, "tensorfloat32": 2e-3}
if check.ON_GPU:
    PRECISIONS["TF32_TF32_F32"] = 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_transposed_operands(precision):
    """Neither tf32 nor true fp32 minds how the matrices lie in memory."""
    x, w, b = inputs(24, 40, 72, "float32")

    @jax.jit
    def results(xt, wt, b, dout):
        call = lambda xt, wt, b: jaxkern.linear(xt.T, wt.T, b, precision=precision)
        out, vjp = jax.vjp(call, xt, wt, b)
        dxt, dwt, db = vjp(dout)
        return out, dxt.T, dwt.T, db

    dout = inputs(24, 72, 1, "float32", seed=1)[0] * 1e5
    out, grads = oracle(*(np.asarray(v, np.float64) for v in (x, w, b, dout)))
    for got, want in zip(results(x.T, w.T, b, dout), (out, *grads), strict=True):
        assert check.relative_error(got, want) < PRECISIONS[precision]


def test_tiles_of_the_result_are_each_taken_once():
    for rows, columns, width in ((1, 1, 8), (5, 7, 3), (16, 16, 8), (3, 20, 8)):
        seen = {
            tuple(int(v) for v in matmul._banded(i, rows, columns, width))
            for i in range(rows * columns)
        }
        assert seen == {(r, c) for r in range(rows) for c in range(columns)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.ones((2, 3), jnp.int32)}, TypeError, "x must have a floating dtype"),
        ({"weight": jnp.ones((4, 5))}, ValueError, r"weight must have shape \(K, N\), K = 3"),
        ({"bias": jnp.ones(4)}, ValueError, r"bias must have shape \(5,\)"),
        ({"activation": "mish"}, ValueError, r'activation must be one of "relu".* or None; got'),
        ({"accumulator": jnp.ones((5, 3))}, ValueError, r"accumulator must have shape \(3, 5\)"),
        ({"accumulator": jnp.ones((3, 5), "bfloat16")}, TypeError, "accumulator must be float32"),
        ({"accumulate_dtype": "bfloat16"}, ValueError, "accumulate_dtype must be float32 or"),
        ({"implementation": "mosaic"}, NotImplementedError, "x is float32"),
        ({"implementation": "cuda"}, ValueError, "implementation must be"),
    ],
)
def test_errors(change, error, words):
    arguments = {"x": jnp.ones((2, 3)), "weight": jnp.ones((3, 5)), **change}
    with pytest.raises(error, match=words):
        jaxkern.linear(**arguments)


def call(x, w, b, implementation="xla"):
    """In bf16, of small numbers with few bits: the products and their sums are exact."""
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    out = jaxkern.linear(x, w, b, activation="relu", implementation=implementation)
    return out.astype(jnp.float32)


LINEAR = check.Op(
    name="linear",
    call=call,
    reference=call,
    arrays=lambda key: tuple(
        jax.random.randint(jax.random.fold_in(key, i), shape, -3, 4).astype(jnp.float32) / 4
        for i, shape in enumerate([(4, 2, 8), (8, 8), (8,)])
    ),
    kernels=("linear_fwd", "linear_dx"),
    rows=(P("data"), P(), P(), P("data")),
    features=(P(None, None, "data"), P("data"), P(), P()),
    all_reduces=1,
    vmaps=[(0, None, None), (None, 0, None), (1, 0, 0)],
    tolerance=2.0**-8,  # gradients are rounded to bf16, and to its neighbours where sums differ
)


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
    call = functools.partial(
        jaxkern.gated_linear_unit,
        activation=activation,
        recompute=recompute,
        implementation=implementation,
    )
    with check.running("mosaic"):
        check.check_accuracy(
            call,
            functools.partial(gated_plain, activation=activation),
            functools.partial(
                check.in_float64, functools.partial(gated_oracle, activation=activation)
            ),
            arrays,
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


CLAMPED = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # as gpt-oss's, of smaller numbers


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
    limit = jnp.asarray(1.5, x.dtype)
    near = jnp.where(gate > limit, limit, gate)  # whose slope at the limit is 1, as PyTorch's
    up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    return near * jax.nn.sigmoid(1.702 * near) * (up + 1)


def in_one(x, w, b, **options):
    return jaxkern.gated_linear_unit(x, w, None, b, **CLAMPED, **options)


def apart(x, w, b, **options):
    halves = (*jnp.split(w, 2, -1), *jnp.split(b, 2))
    return jaxkern.gated_linear_unit(x, *halves, **CLAMPED, **options)


def clamped_accurate(arrays, implementation, recompute, call):
    options = {"recompute": recompute, "implementation": implementation}
    with check.running(implementation):
        check.check_accuracy(
            functools.partial(call, **options),
            clamped_plain,
            functools.partial(check.in_float64, clamped_oracle),
            arrays,
        )


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
        ({"limit": 0.0}, ValueError, "limit must be positive"),
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
    features=(P(None, None, "data"), P("data"), P(), P()),
)
SPLIT_COLUMNS = dataclasses.replace(ONE_WEIGHT, features=(P(), P(None, "data"), P("data"), P()))

# Beside the matrix of the two weights': what one array of both could break.
CELLS_OF_ONE = (
    *(("value", "mosaic"), ("vmap(grad)", "mosaic"), ("grad(grad)", "mosaic"), ("jvp", "xla")),
    *(("shard_map", None), ("auto mesh", None), ("explicit mesh", None), ("features split", None)),
    *(("kernels lowered", "mosaic"), ("features split", "xla")),
)


def test_norm_and_linear_keep_their_arguments_alone():
    """And the backward computes the norm again, but no product of the forward."""
    x = jnp.ones((512, 256), jnp.bfloat16)
    weight, bias, w = jnp.ones(256), jnp.zeros(256), jnp.ones((256, 128), jnp.bfloat16)

    def call(*arrays, implementation=None):
        return jaxkern.layer_norm_linear(*arrays, implementation=implementation)

    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(call, *a)[1], x, weight, bias, w))
    assert sorted(v.shape for v in kept if v.size > 1) == sorted(
        v.shape for v in (x, weight, bias, w)
    )

    def loss(*arrays):
        return call(*arrays, implementation="mosaic").astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(x, weight, bias, w)
    text = grad.lower(lowering_platforms=("cuda",)).as_text()
    calls = check.kernel_calls(text)
    count = lambda name: sum(name in line for line in calls)
    assert (count("layer_norm_fwd"), count("layer_norm_bwd")) == (1, 1)
    assert [count(f"linear_{name}") for name in ("fwd", "dx", "dweight")] == [0, 1, 1]


@pytest.mark.parametrize("op", ["rms_norm_linear", "layer_norm_linear"])
def test_norm_and_linear_are_both(op):
    x, w, b = inputs(6, 32, 24, "float32")
    f, options = getattr(jaxkern, op), {"weight_offset": 0.5, "activation": "gelu"}

    def fused(x, w, b, weight, bias):
        if op == "layer_norm_linear":
            return jnp.sum(jnp.sin(f(x, weight, bias, w, b, **options)))
        return jnp.sum(jnp.sin(f(x, weight, w, b, bias=bias, **options)))

    def apart(x, w, b, weight, bias):
        norm = getattr(jaxkern, op.removesuffix("_linear"))
        y = norm(x, weight, bias, weight_offset=0.5)
        return jnp.sum(jnp.sin(jaxkern.linear(y, w, b, activation="gelu")))

    arrays = (x, w, b, 1 + w[:, 0], w[:, 1])
    argnums = tuple(range(len(arrays)))
    got, want = (jax.value_and_grad(f, argnums)(*arrays) for f in (fused, apart))
    check.assert_close(got, want, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "name", "implementation"),
    [
        *((ONE_WEIGHT, *cell) for cell in CELLS_OF_ONE),
        (SPLIT_COLUMNS, "features split", None),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_one_weight_transformations(op, name, implementation, record_property):
    check.check_cell((op, name, implementation), record_property)


@check.matrix(GATED)
def test_gated_transformations(cell, record_property):
    check.skip_repeats(cell)
    check.check_cell(cell, record_property)


@check.matrix(LINEAR)
def test_linear_transformations(cell, record_property):
    check.skip_repeats(cell)
    check.check_cell(cell, record_property)
