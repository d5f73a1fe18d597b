"""linear, accumulate_weight_grad, gated_linear_unit: cases for the common suite, and their own."""

import dataclasses
import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core.target import interpreter
from jaxkern.ops.curves import Activation
from jaxkern.ops.linear import kernel, tiles
from jaxkern.ops.linear.op import Products
from jaxkern.ops.norm.op import Settings, norm_then
from tests import check
from tests.check import FOUR_DEVICES, PLAIN, combinations, mesh_of
from tests.test_activations import CLAMPED, exhaustive, gated_plain, oracle_of

MEASURED = tiles.MEASURED
DTYPES = ["bfloat16", "float16", "float32"]
UNITS = {"clamped": CLAMPED, "silu": {}, "gelu": {"activation": "gelu"}}


@pytest.fixture(scope="module", autouse=True)
def faster_kernels():
    """Lets ``None`` pick the kernels for small matrices too, as where they were timed faster.

    Unless a test says otherwise, GPUs multiply fp32 as such and not as tf32.
    """
    small = tiles.Measured(8, 8, 8, tiles.ProductTile(128, 64, 64, 2, None), faster=True)
    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MEASURED", dict.fromkeys(MEASURED, (small,)))
        yield


def inputs(m, k, n, dtype, weight_dtype=None, seed=0):
    rng, weight_dtype = np.random.default_rng(seed), weight_dtype or dtype
    draw = lambda *shape: rng.standard_normal(shape)
    of_weight = [jnp.asarray(v.astype(jnp.dtype(weight_dtype))) for v in (draw(k, n) / 8, draw(n))]
    return jnp.asarray(draw(m, k).astype(jnp.dtype(dtype))), *of_weight


def plain(x, w, b, *, activation=None):
    """What a user would write, in the dtype of x."""
    y = x @ w.astype(x.dtype) + b.astype(x.dtype)
    return y if activation is None else PLAIN[activation](y)


def plain_unit(x, w, b, **options):
    """The same of a gated unit, both of its weights and biases in one."""
    return gated_plain(*jnp.split(plain(x, w, b), 2, -1), **options)


def in_one(x, w, b, **options):
    return jaxkern.gated_linear_unit(x, w, None, b, **options)


def apart(x, w, b, **options):
    return jaxkern.gated_linear_unit(x, *jnp.split(w, 2, -1), *jnp.split(b, 2), **options)


accurate = functools.partial(check.check_accuracy, jaxkern.linear, plain, oracle_of(plain))


def gated_accurate(call, arrays, implementation, recompute, **options):
    own, truth = {"recompute": recompute}, oracle_of(plain_unit)
    check.check_accuracy(call, plain_unit, truth, arrays, implementation, own=own, **options)


KERNEL_CASES = {
    "float32 weight": ((130, 72, 65), "float32", {"rounding": 1e-6}),
    "one row": ((1, 16, 200), None, {"activation": "relu_squared"}),
    "gelu": ((130, 72, 65), None, {"activation": "gelu"}),
}


@combinations("case", KERNEL_CASES, few=2)
@pytest.mark.gpu
def test_linear_kernels(case):
    """A weight's gradient is not rounded to the dtype of x on the way to its own."""
    sizes, weight_dtype, options = case
    accurate(inputs(*sizes, "bfloat16", weight_dtype), "mosaic", **options)


SIZES = [(4096, 4096, 4096), (1000, 1016, 2040), (1, 4096, 512), (4096, 16, 4096)]
SIZES += [(4096, 4096, 16), (5, 24, 48), (1001, 999, 1003)]


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", [None, *get_args(Activation)])
def test_linear_compiled(sizes, activation):
    accurate(inputs(*sizes, "bfloat16"), "mosaic", activation=activation)


@combinations("activation dtype", ["gelu", "silu", None, "tanh", "sigmoid", "relu"], DTYPES, few=3)
def test_linear_plain(dtype, activation):
    accurate(inputs(6, 40, 24, dtype), "xla", activation=activation)


@combinations("recompute unit call", [True, False], ["clamped", "silu"], [in_one, apart], few=1)
@pytest.mark.gpu
def test_gated_kernels(call, unit, recompute):
    """With biases, both weights in one array and apart, of columns that are padded and not."""
    sizes = (24 if recompute else 130, 72, 2 * (65 if call is in_one else 64))
    arrays = inputs(*sizes, "bfloat16", "float32" if unit == "clamped" else None)
    gated_accurate(call, arrays, "mosaic", recompute, **UNITS[unit])


@pytest.mark.compiled
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "gelu_erf", "sigmoid", "tanh"])
def test_gated_compiled(activation, recompute):
    arrays = inputs(2000, 1024, 2 * (1536 + 8), "bfloat16")
    gated_accurate(apart, arrays, "mosaic", recompute, activation=activation)


@pytest.mark.compiled
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [8, 16, 64, 200, 1536, 1544])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_clamped_compiled(dtype, n, recompute):
    for call in (in_one, apart):
        arrays = inputs(2000, 1024, 2 * n, dtype, "float32")
        gated_accurate(call, arrays, "mosaic", recompute, **CLAMPED)


@combinations("dtype call options", DTYPES, [in_one, apart], UNITS)
def test_gated_plain(dtype, call, options):
    gated_accurate(call, inputs(6, 40, 48, dtype, "float32"), "xla", True, **options)


@combinations("name implementation", ["b_gate", "b_up"], [None, "xla"], few=1)
def test_one_bias_of_two(name, implementation):
    x, w, b = inputs(6, 16, 24, "float32")
    ours = lambda b: jaxkern.gated_linear_unit(
        x, w, 2 * w, **{name: b}, implementation=implementation
    )
    both = lambda b: jnp.concatenate([b * (name == "b_gate"), b * (name == "b_up")])
    plain = lambda b: plain_unit(x, jnp.concatenate([w, 2 * w], 1), both(b))
    got, want = (check.value_and_grads(f, (b,), x @ w) for f in (ours, plain))
    check.assert_close(got, want, 1e-6)


@combinations("implementation", [None, "xla"], few=1)
def test_few_elements(implementation):
    """A contraction of nothing gives the bias; a unit of one weight may have one element."""
    how = {"implementation": implementation}
    empty = np.ones((3, 0), jnp.bfloat16), np.ones((0, 4)), np.ones(4)
    np.testing.assert_array_equal(jaxkern.linear(*empty, **how), np.ones((3, 4)))
    arrays = jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1, 2)), jnp.zeros(2)
    out, grads = check.value_and_grads(in_one, arrays, np.ones((1, 1)), **CLAMPED, **how)
    assert [(v.shape, v.dtype) for v in (out, *grads)] == [
        (v.shape, v.dtype) for v in (arrays[0], *arrays)
    ]


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


# Accumulators


@combinations("sizes implementation", [(24, 40, 72), (128, 64, 64)], ["mosaic", None], few=2)
@pytest.mark.gpu
def test_accumulation(sizes, implementation):
    m, k, n = sizes
    x, dout = (inputs(m, v, 1, "bfloat16", seed=v)[0] for v in (k, n))
    start = inputs(k, n, 1, "float32")[0]
    with check.running(implementation):
        got = jaxkern.accumulate_weight_grad(start, x, dout, implementation=implementation)
    start, x, dout = (np.asarray(v).astype(np.float64) for v in (start, x, dout))
    assert check.relative_error(got, start + x.T @ dout) < 1e-6


@combinations("implementation", [None, "mosaic", "xla"], few=2)
def test_accumulators_over_microbatches(implementation):
    """Gradients with respect to them are sums over micro-batches, with no other memory for them."""
    k, n = 16, 24
    x, w, _ = inputs(4 * 8, k, n, "float32")
    w_gate, w_up = (inputs(4, n, n, "float32", seed=i)[1] for i in (1, 2))

    def loss(x, w, w_gate, w_up, sums):
        x, w, w_gate, w_up = (v.astype("bfloat16") for v in (x, w, w_gate, w_up))
        w_sum, *gated_sums = sums or (None,)
        of = functools.partial(jaxkern.linear, implementation=implementation)
        h = of(x, w, activation="silu", accumulator=w_sum)
        of = functools.partial(jaxkern.gated_linear_unit, implementation=implementation)
        out = of(h, w_gate, w_up, accumulators=gated_sums or None)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    weights = w, w_gate, w_up
    sums = tuple(jnp.zeros(v.shape) for v in weights)

    def over_all(x):
        step = lambda sums, micro: (jax.grad(loss, 4)(micro, *weights, sums), None)
        return jax.lax.scan(step, sums, x.reshape(4, 8, k))[0]

    if implementation == "mosaic":
        calls = check.kernel_calls(check.lowered(over_all, x))
        assert not any("_dweight" in line for line in calls)
        sums_of = [line for line in calls if "_accumulate" in line]
        assert [line.count("output_operand_alias<") for line in sums_of] == [2, 1]
        return
    of_weights = lambda x, sums: jax.grad(loss, (1, 2, 3))(x, *weights, sums)
    run = jax.jit(lambda x: (over_all(x), of_weights(x, None), of_weights(x, sums)))
    got, want, zeros = run(x)
    check.assert_close(got, want, 2.0**-7)
    assert not any(v.any() for v in zeros)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_one_accumulator(implementation):
    """The gradient with respect to it is the accumulator and that of the one weight."""
    x, w, b = inputs(8, 16, 48, "float32")
    start = inputs(16, 48, 1, "float32", seed=1)[0]

    def grads(recompute):
        def loss(w, total):
            options = {"recompute": recompute, "implementation": implementation, **CLAMPED}
            return jnp.sum(jnp.sin(in_one(x, w, b, accumulators=total, **options)))

        return *jax.grad(loss, (0, 1))(w, start), start + jax.grad(loss)(w, None)

    for zeros, total, want in jax.jit(lambda: [grads(False), grads(True)])():
        assert not zeros.any()
        check.assert_close(total, want, 1e-6)


# Devices


@FOUR_DEVICES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulators_shared_by_devices(dtype):
    """Inside a shard_map the devices' gradients are added to what they have in common, once."""
    x, w, _ = inputs(8, 16, 24, dtype)
    start = jnp.ones(w.shape)

    def grad(x, w, start):
        f = lambda a: jnp.sum(jaxkern.linear(x, w, accumulator=a).astype(jnp.float32))
        return jax.grad(f)(start)

    specs = {"in_specs": (P("x"), P(), P()), "out_specs": P()}
    split = jax.shard_map(grad, mesh=mesh_of(AxisType.Auto, 2), **specs)
    check.assert_close(jax.jit(split)(x, w, start), grad(x, w, start), 1e-6)


@FOUR_DEVICES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_devices_add(dtype):
    """Parts of sums have `accumulate_dtype` between devices; results keep theirs."""
    put, (x, w, b) = _placer(2), inputs(8, 16, 24, "bfloat16")
    call = functools.partial(jaxkern.linear, accumulate_dtype=dtype)

    def results(x, w, b):
        out, vjp = jax.vjp(call, x, w, b)
        return out, vjp(out)

    for placed in (
        (put(x, "s"), put(w), put(b)),
        (put(x, None, "s"), put(w, "s"), put(b)),
        (put(x), put(w, None, "s"), put(b, "s")),
    ):
        lowered = jax.jit(results).lower(*placed)
        assert {v.dtype for v in jax.tree.leaves(lowered.out_info)} == {jnp.dtype("bfloat16")}
        text = lowered.as_text().split('"stablehlo.all_reduce"')[1:]
        summed = [part.split(") -> ")[1].split(">")[0].split("x")[-1] for part in text]
        assert summed == [{"float32": "f32", "bfloat16": "bf16"}[dtype]], summed


def on_mesh(name, x, w, b, sums, **options):
    if name == "linear":
        return jaxkern.linear(x, w, b, activation="gelu", accumulator=sums, **options)
    if name == "gated":
        both = None if sums is None else (sums, sums)
        return jaxkern.gated_linear_unit(x, w, 2 * w, b, 2 * b, accumulators=both, **options)
    if name == "one weight":
        return jaxkern.gated_linear_unit(x, w, None, b, accumulators=sums, **options)
    scales = {"rms_norm": (None,), "layer_norm": (None, None)}[name]
    joined = getattr(jaxkern, f"{name}_linear")
    return joined(x, *scales, w, b, activation="gelu", **options)


OPS = ["linear", "gated", "one weight", "rms_norm", "layer_norm"]
SPLITS = {  # of x, of the weight and of what comes out
    "rows and columns": (("s", "t"), (None, ("s", "t")), ("s", "t")),
    "rows by both": ((("s", "t"),), ("t", "s"), (("s", "t"), None)),
    "columns": ((None, "s"), (None, ("s", "t")), (None, ("s", "t"))),
    "rows": (("s",), (None, "s"), ("s", None)),
}
HOW = {"sums": ("float32", None, 1), "bf16": ("bfloat16", None, 0), "xla": ("bfloat16", "xla", 0)}


def _placer(*sizes):
    mesh = mesh_of(AxisType.Explicit, *sizes, names="st")
    return lambda v, *spec: jax.device_put(v, jax.NamedSharding(mesh, P(*spec)))


@FOUR_DEVICES
@combinations("name splits how", OPS, SPLITS, HOW, few=3)
def test_one_axis_of_a_mesh_splits_both_operands(name, splits, how):
    """Values and gradients, each split as its argument, and results as in every implementation."""
    (of_x, of_weight, of_out), (dtype, implementation, accumulated) = splits, how
    put, call = _placer(2, 2), functools.partial(on_mesh, name, implementation=implementation)
    x, w, b = inputs(16, 8, 32, dtype)
    sums = jnp.ones(w.shape) if accumulated and "norm" not in name else None

    @jax.jit
    def run(*arrays):
        out, vjp = jax.vjp(call, *arrays)
        return out, vjp(jnp.cos(out))

    placed = put(x, *of_x), put(w, *of_weight), put(b, *of_weight[1:])
    placed = *placed, None if sums is None else put(sums, *of_weight)
    out, grads = run(*placed)
    check.assert_close((out, grads), run(x, w, b, sums), 2e-5 if dtype == "float32" else 2.0**-6)
    split = lambda v: None if v is None else jax.typeof(v).sharding.spec
    assert list(map(split, grads)) == list(map(split, placed))
    assert jax.eval_shape(call, *placed).sharding.spec == split(out)
    if name != "one weight":  # whose kernels gather its columns
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
    arrays = put(sums, None, "s"), put(x, None, "s"), put(dout)
    got = jax.jit(jaxkern.accumulate_weight_grad)(*arrays)
    check.assert_close(got, jaxkern.accumulate_weight_grad(sums, x, dout), 1e-6)
    assert got.sharding.spec == P(None, "s")


# The kernel, and when it is taken


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 256, 40), "bfloat16"),
        ((3, 1792, 24), "float16"),
        exhaustive((4, 256, 16), "bfloat16"),
        exhaustive((2, 128, 1544), "bfloat16"),
    ],
)
@pytest.mark.gpu
def test_few_rows(sizes, dtype):
    """Up to four rows, under vmap, too; blocks that overlap; steps beyond a whole group."""
    rows, inner, columns = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inner), (inner, columns), (columns,)
    arrays = [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]
    run = functools.partial(jaxkern.linear, implementation="mosaic")
    plain = jaxkern.linear(*arrays, implementation="xla")
    with check.running("mosaic"):
        got = jax.jit(run)(*arrays)
        each = jax.jit(jax.vmap(run, (0, None, None)))(arrays[0][:, None], *arrays[1:])
        check.assert_same_bits(lambda: jax.jit(run)(*arrays))
    x, weight, bias = (np.asarray(v, np.float64) for v in arrays)
    assert got.dtype == dtype
    for name, one in (("together", got), ("alone", each[:, 0])):
        check.at_most_twice(name, one, plain, x @ weight + bias)
    text = check.lowered(jaxkern.linear, *arrays)
    assert "linear_few_rows" in text


def test_epilogue_of_several_boxes():
    """Each box of a tile meets its part of what the epilogue reads, in each of several tiles."""
    draw = lambda n, seed: inputs(256, n, 1, "bfloat16", seed=seed)[0]
    a, b, c = draw(128, 0), draw(128, 1), draw(256, 2)
    product = kernel.Product(
        False, True, ("float32", "bfloat16"), lambda p, r, t: [p[0] + t[0], p[0] * t[0]], "test"
    )
    tile = tiles.ProductTile(128, 128, 64, 2, None)
    with interpreter():
        got = jax.jit(lambda *v: kernel.matmul(product, tile, *v))([a], [b], (), [c])
    a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
    assert check.relative_error(got[0], a @ b.T + c) < 1e-6
    assert check.relative_error(got[1], (a @ b.T) * c) < 2.0**-8


def test_tiles_of_the_result_are_each_taken_once():
    for rows, columns, width in ((1, 1, 8), (5, 7, 3), (16, 16, 8), (3, 20, 8)):
        banded = lambda i: kernel.banded(i, rows, columns, width)  # noqa: B023
        seen = {tuple(int(v) for v in banded(i)) for i in range(rows * columns)}
        assert seen == {(r, c) for r in range(rows) for c in range(columns)}


def test_choice_follows_the_table(monkeypatch):
    """None near nothing measured or near what is not faster; else the nearest row's tile."""
    slow, fast = tiles.ProductTile(128, 128), tiles.ProductTile(128, 256)
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
    of_gpt2 = 16384, 3072, 768  # sums in fp32 cost XLA more there than its products gain
    assert tiles.faster("linear_activation_fwd", *of_gpt2)
    assert not tiles.faster("linear_fwd", *of_gpt2)
    for name, sizes in (  # differences within the noise, and a kernel that is slower
        ("linear_accumulate", (4096, 4096, 512)),
        ("linear_dweight", (4096, 4096, 8192)),
        ("gated_fwd", (8192, 14336, 4096)),
        ("gated_bwd", (8192, 14336, 4096)),
    ):
        assert not tiles.faster(name, *sizes)
        assert tiles.tile_for(name, "mosaic", *sizes) is not None


def lowered_calls(f, *types):
    """The kernels of a program for CUDA, and its text."""
    text = check.lowered(f, *types)
    return check.kernel_calls(text), text


def counts(calls, *names):
    return [sum(name in line for line in calls) for name in names]


@combinations("recompute sizes", [False, True], [(512, 256, 512), (3, 256, 16)], few=1)
def test_kernels_fit_the_shared_memory(recompute, sizes):
    """None of them pads matrices whose sizes are multiples of 64, or those of a LoRA."""
    m, k, n = sizes
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    types = bf16((m, k)), bf16((k, n)), jax.ShapeDtypeStruct((k, n), jnp.float32)

    def loss(x, w, w_up):
        options = {"implementation": "mosaic"}
        out = jaxkern.linear(x, w, activation="gelu", **options)
        out += jaxkern.gated_linear_unit(x, w, w_up, recompute=recompute, **options)
        return jnp.sum(out.astype(jnp.float32))

    calls, text = lowered_calls(jax.grad(loss, (0, 1, 2)), *types)
    assert "stablehlo.pad" not in text
    assert counts(calls, *(f"linear_{n}" for n in ("activation_fwd", "dx", "dweight"))) == [1, 1, 1]
    names = "gated_fwd", "gated_silu_bwd", "gated_bwd", "gated_dx", "gated_dweights"
    assert counts(calls, *names) == [not recompute, not recompute, recompute, 1, 1]


@combinations("recompute", [False, True], few=1)
def test_one_weight_is_read_as_it_lies(recompute):
    """No half of it is copied, and its gradient, added to others or not, is one product."""
    x, w = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((256, 2 * 192), jnp.bfloat16)
    options = {"recompute": recompute, "implementation": "mosaic"}

    def loss(x, w, total):
        out = jaxkern.gated_linear_unit(x, w, accumulators=total, **options)
        return jnp.sum(out.astype(jnp.float32))

    first = ["gated_fwd", "gated_bwd" if recompute else "gated_silu_bwd", "linear_dx"]
    for argnums, total, last in (
        ((0, 1), None, "linear_dweight"),
        ((0, 2), jnp.zeros(w.shape), "linear_accumulate"),
    ):
        calls, text = lowered_calls(jax.value_and_grad(loss, argnums), x, w, total)
        for op in ("concatenate", "slice", "pad", "transpose"):
            assert f"stablehlo.{op}" not in text, op
        assert counts(calls, *first, last) == [1, 1, 1, 1]
        assert len(calls) == 4


@pytest.mark.exhaustive
def test_measured_tiles_lower_for_cuda(monkeypatch):
    """With accumulators, whose tiles take shared memory beside the operands'."""
    monkeypatch.setattr(tiles, "MEASURED", MEASURED)
    call = functools.partial(jaxkern.accumulate_weight_grad, implementation="mosaic")
    of = jax.ShapeDtypeStruct
    for row in MEASURED["linear_accumulate"]:
        factors = (of((row.k, size), "bfloat16") for size in (row.m, row.n))
        assert (
            "linear_accumulate" in lowered_calls(call, of((row.m, row.n), "float32"), *factors)[1]
        )


# Large numbers, and precisions


def check_extreme(call, plain, arrays, dout, limit, **options):
    """Whatever fits its dtype in float64 is finite, and all is within `limit`, relative in norm."""
    with check.running("mosaic"):
        got = jax.tree.leaves(check.value_and_grads(call, arrays, dout, **options))
    want = jax.tree.leaves(oracle_of(plain)(*arrays, dout, **options))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        fits = np.abs(w) <= 0.999 * float(jnp.finfo(g.dtype).max)
        assert fits.any()
        assert np.isfinite(np.asarray(g, np.float32)[fits]).all(), f"result {i}"
        assert check.relative_error(g, w) < limit, f"result {i}"


@combinations("implementation", ["xla", "mosaic"], few=1)
@pytest.mark.gpu
def test_large_gradients(implementation):
    """Gradients of 1e5 have the errors of small ones."""
    dtype = "bfloat16" if implementation == "mosaic" else "float32"
    arrays = inputs(16, 64, 64, dtype)
    dout = 1e5 * inputs(16, 64, 64, "float32", seed=1)[0]
    call = functools.partial(jaxkern.linear, implementation=implementation)
    limit = 1e-2 if dtype == "bfloat16" else 1e-6
    check_extreme(call, plain, arrays, dout.astype(dtype), limit, activation="gelu")


@combinations("implementation", ["xla", "mosaic"], few=1)
@pytest.mark.gpu
def test_float16_near_overflow(implementation):
    """Sums whose parts pass 65504 on the way, and results that stay below."""
    x, w, b = inputs(64, 64, 64, "float16")
    signs = jnp.where(jnp.arange(64) < 32, 1, -1).astype(jnp.float16)
    x, w, dout = x / 8 + 180 * signs, w / 8 + 180 * signs, w / 8 + 180 * signs[:, None]
    call = functools.partial(jaxkern.linear, implementation=implementation)
    check_extreme(call, plain, (x, w, b), dout, 2e-3)


@combinations("implementation recompute", ["mosaic", "xla"], [False, True])
@pytest.mark.gpu
def test_float16_gates_beyond_overflow(implementation, recompute):
    """A gate of 8e4 times a small projection fits, and so do its gradients, zeros among them."""
    x, w, _ = inputs(16, 64, 64, "float16")
    x, w = 20 + 0 * x, jnp.concatenate([62.5 + 0 * w, w / 1024], -1)
    dout = jnp.where(jnp.arange(64) % 2, 0.001, 0).astype(jnp.float16) + 0 * x
    call = functools.partial(apart, recompute=recompute, implementation=implementation)
    limit = 2e-3 if recompute or implementation == "xla" else 0.2  # what is kept ends at 65504
    check_extreme(call, plain_unit, (x, w, jnp.zeros(128, x.dtype)), dout, limit)


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
        return out, (dxt.T, dwt.T, db)

    dout = inputs(24, 72, 1, "float32", seed=1)[0] * 1e5
    want = oracle_of(plain)(x, w, b, dout)
    check.assert_close(results(x.T, w.T, b, dout), want, PRECISIONS[precision])


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


# The matrix


def exact(op, **options):
    """`op` in bf16, of small numbers with few bits: the products and their sums are exact."""

    def call(x, w, b, implementation="xla"):
        of = options | {"activation": "relu", "implementation": implementation}
        return op(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), b, **of).astype(jnp.float32)

    return {"call": call, "reference": call}


def small(*shapes):
    """Arrays of quarters, from a key."""
    draw = lambda key, shape: jax.random.randint(key, shape, -3, 4).astype(jnp.float32) / 4
    return lambda key: tuple(draw(jax.random.fold_in(key, i), s) for i, s in enumerate(shapes))


LINEAR = check.Op(
    name="linear",
    **exact(jaxkern.linear),
    arrays=small((4, 2, 8), (8, 8), (8,)),
    kernels=("linear_fwd", "linear_dx"),
    axes="mtk kn n -> mtn",
    features="k",
    all_reduces=1,
    vmaps=[(0, None, None), (None, 0, None), (1, 0, 0)],
    tolerance=2.0**-8,  # gradients are rounded to bf16, and to its neighbours where sums differ
    once=True,
)
GATED = dataclasses.replace(
    LINEAR,
    name="gated_linear_unit",
    **exact(lambda x, w, w_up, **of: jaxkern.gated_linear_unit(x, w, w_up.astype(x.dtype), **of)),
    arrays=small((4, 2, 8), (8, 8), (8, 8)),
    kernels=("gated_fwd", "gated_dx"),
    axes="mtk kn kn -> mtn",
    slow=[("vmap(grad)", "mosaic")],
    tolerance=2.0**-7,  # the projections, too, are rounded where they are kept
)
ONE_WEIGHT = dataclasses.replace(
    GATED,
    name="gated_linear_unit, one weight",
    **exact(in_one),
    arrays=small((4, 2, 8), (8, 16), (16,)),
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


def after_norm(x, weight, w, other, residual, gate, implementation="xla"):
    """Two products after a norm, and the sum that it gives; by its kernels as blocks have them."""
    weights, options = (w / 16, other / 16), {"weight_offset": 0.5, "norm_before_gate": False}
    if implementation == "mosaic":  # which multiplies no float32
        arrays, settings = (x, weight, None, residual, gate), Settings(1e-6, **options)
        of_norm = "rms_norm_linear", "rms_norm", arrays, settings, implementation
        then = Products.of(x, weights, None, precision="highest")
        (first, second), h = norm_then(*of_norm, then, (weights, (None, None)))
    else:
        options |= {"residual": residual, "gate": gate, "precision": "highest"}
        joined = functools.partial(jaxkern.rms_norm_linear, implementation=implementation)
        (first, second), h = joined(x, weight, weights, **options)
    return first - 2 * second + h.mean(-1, keepdims=True)


AFTER_NORM = check.Op(
    name="rms_norm_linear, gate and residual",
    call=after_norm,
    reference=after_norm,
    arrays=lambda key: tuple(
        jax.random.normal(jax.random.fold_in(key, i), shape)
        for i, shape in enumerate([(4, 2, 128), (128,), (128, 8), (128, 8), *[(4, 2, 128)] * 2])
    ),
    kernels=("rms_norm_fwd", "rms_norm_bwd"),
    axes="mtk k kn kn mtk mtk -> mtn",
    features="k",
    all_reduces=1,
    vmaps=[(0, None, None, None, 0, 0), (None, 0, 0, 0, None, None)],
    once=True,
    slow=[("value", "mosaic"), ("vmap(grad)", "mosaic"), ("grad(grad)", "mosaic")],
    cells=[
        *(("value", "mosaic"), ("grad", "mosaic"), ("grad(grad)", "mosaic"), ("jvp", "mosaic")),
        *(("vmap(grad)", "mosaic"), ("checkpoint", None), ("auto mesh", None)),
        *(("shard_map", None), ("shard_map unchecked", None)),
        *(("explicit mesh", None), ("features split", None), ("kernels lowered", "mosaic")),
    ],
)
OPS = LINEAR, GATED, ONE_WEIGHT, SPLIT_COLUMNS, AFTER_NORM
test_linear_transformations = check.transformations(*OPS)


# With a norm before


def test_norm_and_linear_keep_their_arguments_alone():
    """The rows' statistics too; the backward runs neither the norm nor a product again."""
    x = jnp.ones((512, 256), jnp.bfloat16)
    weight, bias, w = jnp.ones(256), jnp.zeros(256), jnp.ones((256, 128), jnp.bfloat16)
    arrays = x, weight, bias, w
    kept = jax.eval_shape(lambda *a: jax.vjp(jaxkern.layer_norm_linear, *a)[1], *arrays)
    shapes = sorted(v.shape for v in jax.tree.leaves(kept) if v.size > 1)
    assert shapes == sorted([*(v.shape for v in arrays), (512, 1), (512, 1)])

    def loss(*arrays):
        out = jaxkern.layer_norm_linear(*arrays, implementation="mosaic")
        return out.astype(jnp.float32).sum()

    calls, _ = lowered_calls(jax.grad(loss, (0, 1, 2, 3)), *arrays)
    assert counts(calls, "layer_norm_fwd", "layer_norm_bwd") == [1, 1]
    assert counts(calls, "linear_fwd", "linear_dx", "linear_dweight") == [0, 1, 1]


@pytest.mark.parametrize(
    ("norm", "dtype", "kept"),
    [
        ("rms_norm", "bfloat16", "bfloat16"),
        ("layer_norm", "bfloat16", "float32"),  # its mean may be much larger than what is left
        ("rms_norm", "float16", "float32"),  # of less range than the sum
    ],
)
def test_a_sum_before_an_rms_norm_is_kept_in_bf16(norm, dtype, kept):
    """The sum that is returned stays in float32, whichever is kept."""
    x, w = jnp.ones((512, 256), dtype), jnp.ones((256, 128), dtype)
    bias = {"bias": None} if norm == "layer_norm" else {}
    call = getattr(jaxkern, f"{norm}_linear")
    f = lambda x, h, w: call(x, None, w=w, residual=h, **bias)
    (_, h), pullback = jax.eval_shape(lambda *a: jax.vjp(f, *a), x, x.astype("float32"), w)
    assert h.dtype == jnp.float32
    assert [str(v.dtype) for v in jax.tree.leaves(pullback) if v.shape == x.shape] == [kept]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_gradients_from_a_sum_kept_in_bf16(implementation):
    """They are at most twice as far from the truth as plain JAX's, of a sum in float32."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), "float32")
    x, residual, weight, w = draw(24, 128), 8 * draw(24, 128), 1 + draw(128) / 4, draw(128, 32) / 8
    arrays = x.astype("bfloat16"), residual, weight, w.astype("bfloat16")
    given = draw(24, 32).astype("bfloat16"), draw(24, 128)

    def by_hand(x, residual, weight, w):
        h = x + residual
        normalised = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * weight
        return normalised.astype(w.dtype) @ w, h

    def by_op(x, residual, weight, w):
        return jaxkern.rms_norm_linear(
            x, weight, w, residual=residual, implementation=implementation
        )

    with check.running(implementation):
        got = jax.jit(lambda *a: jax.vjp(by_op, *a)[1](given))(*arrays)
    plain = jax.jit(lambda *a: jax.vjp(by_hand, *a)[1](given))(*arrays)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: v.astype("float64"), (arrays, given))
        truth = jax.vjp(by_hand, *wide[0])[1](wide[1])
    for name, *of_array in zip(["x", "residual", "weight", "w"], got, plain, truth, strict=True):
        check.at_most_twice(name, *of_array)


def test_products_in_an_op_on_an_explicit_mesh_of_one_device():
    """Zeros like an array that is split over one device are not split."""
    place = lambda *shape: jax.device_put(
        jnp.ones(shape),
        NamedSharding(mesh_of(AxisType.Explicit, 1), P("x", *[None] * (len(shape) - 1))),
    )
    x, w, u = place(4, 3, 128), place(128, 8), place(2, 5, 8)
    joined = lambda x, w: jaxkern.rms_norm_linear(x, None, w).sum()
    scan = lambda u, w: jaxkern.selective_scan(u, u, w.T, u, u, out_weight=w.T).sum()
    for f, *arrays in ((joined, x, w), (scan, u, place(8, 8))):
        grads = jax.eval_shape(jax.grad(f, (0, 1)), *arrays)
        assert [g.sharding.spec for g in grads] == [a.sharding.spec for a in arrays]


def test_a_linearised_norm_and_product_run_by_themselves():
    """A program of the tangents alone has kernels in 16 bits, which the compiler splits."""
    arrays = jnp.ones((2, 64), jnp.bfloat16), jnp.ones(64), jnp.ones((64, 8), jnp.bfloat16)
    out, along = jax.linearize(jaxkern.rms_norm_linear, *arrays)
    tangents = jax.tree.map(jnp.zeros_like, arrays[:2])
    np.testing.assert_array_equal(along(*tangents, arrays[2]), out)


@combinations("op", ["layer_norm", "rms_norm"], few=1)
def test_norm_and_linear_are_both(op):
    """With an activation, for which the backward computes both again."""
    x, w, b = inputs(6, 32, 24, "float32")
    norm = functools.partial(getattr(jaxkern, op), weight_offset=0.5)
    joined = functools.partial(getattr(jaxkern, f"{op}_linear"), weight_offset=0.5)
    both = lambda x, w, b, *scales, **o: jaxkern.linear(norm(x, *scales), w, b, **o)
    fused = lambda x, w, b, weight, bias, **o: joined(x, weight=weight, bias=bias, w=w, b=b, **o)
    arrays, dout = (x, w, b, 1 + w[:, 0], w[:, 1]), jnp.sin(x @ w)
    want, got = (check.value_and_grads(f, arrays, dout, activation="gelu") for f in (both, fused))
    check.assert_close(got, want, 1e-6)
