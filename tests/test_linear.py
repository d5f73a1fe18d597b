"""linear and accumulate_weight_grad: cases for the common suite, and what is their own."""

import functools
import math
import re
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
from jaxkern.ops.linear import matmul, matmul_kernel, tiles
from tests import check
from tests.products import PLAIN, extreme, inputs
from tests.products import faster_kernels as faster_kernels


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


def accurate(arrays, implementation, **options):
    truth = functools.partial(check.in_float64, oracle)
    check.check_accuracy(jaxkern.linear, plain, truth, arrays, implementation, **options)


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


def _with_norm(name, *scales):
    call = getattr(jaxkern, name)
    return lambda x, w, b, _, **options: call(x, *scales, w, b, activation="gelu", **options)


ON_MESH = {
    "linear": lambda x, w, b, sums, **options: jaxkern.linear(
        x, w, b, activation="gelu", accumulator=sums, **options
    ),
    "gated": lambda x, w, b, sums, **options: jaxkern.gated_linear_unit(
        x, w, 2 * w, b, 2 * b, accumulators=None if sums is None else (sums, sums), **options
    ),
    "gated by one weight": lambda x, w, b, sums, **options: jaxkern.gated_linear_unit(
        x, w, None, b, accumulators=sums, **options
    ),
    "rms norm": _with_norm("rms_norm_linear", None),
    "layer norm": _with_norm("layer_norm_linear", None, None),
}
SPLITS = [
    (("s",), (None, "s"), ("s", None)),
    ((("s", "t"),), ("t", "s"), (("s", "t"), None)),
    (("s", "t"), (None, ("s", "t")), ("s", "t")),
    ((None, "s"), (None, ("s", "t")), (None, ("s", "t"))),
]
FOUR_DEVICES = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def _placer(*sizes):
    names = "st"[: len(sizes)]
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, tuple(names), (AxisType.Explicit,) * len(sizes), devices=devices)
    return lambda v, *spec: jax.device_put(v, jax.NamedSharding(mesh, P(*spec)))


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("dtype", "implementation", "accumulated"),
    [("float32", None, True), ("bfloat16", None, False), ("bfloat16", "xla", False)],
)
@pytest.mark.parametrize(
    ("name", "of_x", "of_weight", "of_out"),
    [(name, *splits) for name in ON_MESH for splits in SPLITS[: 1 if "norm" in name else None]],
)
def test_one_axis_of_a_mesh_splits_both_operands(
    name, of_x, of_weight, of_out, dtype, implementation, accumulated
):
    """Values and gradients, each split as its argument, and results as in every implementation."""
    put, call = _placer(2, 2), functools.partial(ON_MESH[name], implementation=implementation)
    x, w, b = inputs(16, 8, 32, dtype)
    sums = jnp.ones(w.shape) if accumulated and "norm" not in name else None

    def run(*arrays):
        out, vjp = jax.vjp(call, *arrays)
        return out, vjp(jnp.cos(out))

    placed = put(x, *of_x), put(w, *of_weight), put(b, *of_weight[1:])
    placed = *placed, None if sums is None else put(sums, *of_weight)
    out, grads = jax.jit(run)(*placed)
    tolerance = 2e-5 if dtype == "float32" else 2.0**-6
    check.assert_close((out, grads), run(x, w, b, sums), tolerance)
    split = lambda v: None if v is None else jax.typeof(v).sharding.spec
    assert list(map(split, grads)) == list(map(split, placed))
    assert split(jax.jit(call)(*placed)) == split(out)
    if name != "gated by one weight":  # whose kernels gather its columns
        assert split(out) == P(*of_out)


@FOUR_DEVICES
def test_the_weight_is_gathered_and_not_the_rows():
    put = _placer(4)
    x, w, b = inputs(16, 8, 32, "float32")
    run = lambda x, w, b: jax.vjp(functools.partial(jaxkern.linear, activation="gelu"), x, w, b)
    both = jax.jit(lambda dout, *a: run(*a)[1](dout))
    placed = put(x, "s"), put(w, None, "s"), put(b, "s")
    text = both.lower(put(jnp.ones((16, 32)), "s"), *placed).compile().as_text()
    gathered = set(re.findall(r"= (\S+?)\{\S* all-gather\(", text))
    assert gathered == {"f32[8,32]", "f32[32]"}


@FOUR_DEVICES
def test_accumulator_split_otherwise_than_what_is_added():
    put = _placer(4)
    x, w, _ = inputs(16, 8, 32, "float32")
    sums, dout = jnp.ones(w.shape), jnp.sin(x @ w)
    got = jax.jit(jaxkern.accumulate_weight_grad)(
        put(sums, None, "s"), put(x, None, "s"), put(dout)
    )
    check.assert_close(got, jaxkern.accumulate_weight_grad(sums, x, dout), 1e-6)
    assert got.sharding.spec == P(None, "s")


def test_epilogue_of_several_boxes():
    """Each box of a tile meets its part of what the epilogue reads, in each of several tiles."""
    key = functools.partial(jax.random.fold_in, jax.random.key(0))
    a, b = (jax.random.normal(key(i), (256, 128), jnp.bfloat16) for i in range(2))
    c = jax.random.normal(key(2), (256, 256), jnp.bfloat16)
    product = matmul_kernel.Product(
        False, True, ("float32", "bfloat16"), lambda p, r, t: [p[0] + t[0], p[0] * t[0]], "test"
    )
    with interpreter():
        tile = tiles.Tile(128, 128, 64, 2, None)
        got = jax.jit(lambda *v: matmul.matmul(product, tile, *v))([a], [b], (), [c])
    a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
    assert check.relative_error(got[0], a @ b.T + c) < 1e-6
    assert check.relative_error(got[1], (a @ b.T) * c) < 2.0**-8


def test_choice_follows_the_table(monkeypatch):
    """None near nothing measured or near what is not faster; else the nearest row's tile."""
    slow, fast = tiles.Tile(128, 128), tiles.Tile(128, 256)
    rows = (
        tiles.Measured(4096, 4096, 4096, tile=slow),
        tiles.Measured(16384, 4096, 4096, tile=fast, faster=True),
    )
    monkeypatch.setattr(tiles, "MEASURED", {"linear_fwd": rows})
    pick = functools.partial(tiles.tile_for, "linear_fwd")
    assert pick("auto", 16384, 4096, 5000) == fast
    assert pick("auto", 4096, 4096, 4096) is None
    assert pick("mosaic", 4096, 4096, 4096) == slow
    assert pick("auto", 100000, 4096, 4096) is None
    assert pick("mosaic", 100000, 4096, 4096) is not None
    assert pick("mosaic", 0, 4096, 4096) is None
    monkeypatch.setattr(tiles, "MEASURED", MEASURED)
    assert tiles.faster("linear_activation_fwd", 16384, 3072, 768)
    for name, sizes in (  # differences within the noise, and a kernel that is slower
        ("linear_accumulate", (4096, 4096, 512)),
        ("linear_dweight", (4096, 4096, 8192)),
        ("gated_fwd", (8192, 14336, 4096)),
        ("gated_bwd", (8192, 14336, 4096)),
    ):
        assert not tiles.faster(name, *sizes)
        assert tiles.tile_for(name, "mosaic", *sizes) is not None


@pytest.mark.parametrize(("activation", "kernels"), [("gelu", 1), ("relu", 0), (None, 0)])
def test_choice_at_short_contractions(monkeypatch, activation, kernels):
    """GPT-2's up-projection: sums in fp32 cost XLA more there than its products gain."""
    monkeypatch.setattr(tiles, "MEASURED", MEASURED)
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


MEASURED = tiles.MEASURED


def test_measured_tiles_lower_for_cuda(monkeypatch):
    """With accumulators, whose tiles take shared memory beside the operands'."""
    monkeypatch.setattr(tiles, "MEASURED", MEASURED)
    call = functools.partial(jaxkern.accumulate_weight_grad, implementation="mosaic")
    for row in MEASURED["linear_accumulate"]:
        of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
        arrays = (
            of((row.m, row.n), "float32"),
            *(of((row.k, size), "bfloat16") for size in (row.m, row.n)),
        )
        lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",))
        assert "linear_accumulate" in lowered.as_text()


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
            tuple(int(v) for v in matmul_kernel.banded(i, rows, columns, width))
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
    axes="mtk kn n -> mtn",
    features="k",
    all_reduces=1,
    vmaps=[(0, None, None), (None, 0, None), (1, 0, 0)],
    tolerance=2.0**-8,  # gradients are rounded to bf16, and to its neighbours where sums differ
    once=True,
)
test_linear_transformations = check.transformations(LINEAR)


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
