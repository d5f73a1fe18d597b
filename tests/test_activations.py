"""Activations and gated units: the elementwise kernels, and every op that has an activation."""

import dataclasses
import re
from collections import Counter
from functools import partial
from typing import get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.ir import WalkResult

import jaxkern
from bench.modules import kernel_modules
from jaxkern.core.dispatch import resolve
from jaxkern.core.target import interpreter
from jaxkern.mosaic import elementwise
from jaxkern.mosaic.arithmetic import exp2_by_polynomial, softplus
from jaxkern.mosaic.launch import launch_kernel
from jaxkern.ops import activations, curves
from jaxkern.ops.curves import kernel_functions
from tests import check
from tests.check import PLAIN, exhaustive


def with_options(*functions, **options):
    return tuple(partial(f, **options) for f in functions)


ELEMENTWISE = {
    name: getattr(jaxkern, name)
    for name in ("relu", "relu_squared", "silu", "quick_gelu", "sigmoid", "tanh")
}
ELEMENTWISE |= {"gelu_tanh": jaxkern.gelu, "gelu_erf": partial(jaxkern.gelu, approximate=False)}
CLAMPED = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # as gpt-oss's, of smaller numbers
GATED = {
    "silu": (jaxkern.swiglu, jaxkern.silu_and_mul),
    "gelu_tanh": (jaxkern.geglu, jaxkern.gelu_and_mul),
    "gelu_erf": with_options(jaxkern.geglu, jaxkern.gelu_and_mul, approximate=False),
    "clamped": with_options(jaxkern.swiglu, jaxkern.silu_and_mul, **CLAMPED),
    "relu": (jaxkern.reglu, None),
}
for curve in ("sigmoid", "tanh", "quick_gelu", "relu_squared"):
    GATED[curve] = (*with_options(jaxkern.glu, activation=curve), None)


def normal(shape, dtype, seed=0, scale=2.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def cases(few, more=(), compiled=()):
    """Cases of the default and the exhaustive suite, both ways, and of kernels on a GPU alone."""
    param = lambda case, way, *marks: pytest.param(*case, way, marks=marks)
    found = []
    for some, *marks in ((few,), (more, pytest.mark.exhaustive)):
        found += [param(case, "mosaic", pytest.mark.gpu, *marks) for case in some]
        found += [param(case, "xla", *marks) for case in some]
    return [*found, *(param(case, "mosaic", pytest.mark.compiled) for case in compiled)]


def gated_plain(gate, up, *, activation="silu", alpha=None, limit=None, up_offset=0.0):
    """What a user would write of a gated unit."""
    if limit is not None:
        limit = jnp.asarray(limit, gate.dtype)
        gate = jnp.where(gate > limit, limit, gate)  # whose slope at the limit is 1, as PyTorch's
        up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    return PLAIN["quick_gelu" if alpha else activation](gate) * (up + up_offset)


def oracle_of(plain, results=1):
    """The oracle of a plain expression: what it gives, and its gradients, in float64."""

    def oracle(*arrays, **options):
        wide = tuple(np.asarray(a).astype(np.float64) for a in arrays)
        arrays, cotangents = wide[:-results], wide[-results:]
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            like = jax.eval_shape(partial(plain, **options), *arrays)
            cotangents = jax.tree.unflatten(jax.tree.structure(like), cotangents)
            found = check.value_and_grads(plain, arrays, cotangents, **options)
            return jax.tree.map(np.asarray, found)

    return oracle


def curves_of(*xs, names):
    """Plain curves, each of an array, and units of a stacked pair or of two halves of one."""

    def one(name, x):
        *form, curve = name.split(":")
        if not form:
            return PLAIN[curve](x)
        options = CLAMPED if curve == "clamped" else {"activation": curve}
        return gated_plain(*(x if form == ["pair"] else jnp.split(x, 2, -1)), **options)

    return tuple(map(one, names, xs))


def ours(*xs, names, implementation):
    """The same by jaxkern."""

    def one(name, x):
        *form, curve = name.split(":")
        f = GATED[curve][form == ["halves"]] if form else ELEMENTWISE[curve]
        return f(*(x if form == ["pair"] else [x]), implementation=implementation)

    return tuple(map(one, names, xs))


def gradients(implementation, calls):
    """[(value, gradients)] of each of several (function, arguments, cotangent), by one program."""
    functions, *arrays = zip(*calls, strict=True)

    def run(of_each, cotangents):
        found = []
        for f, args, dout in zip(functions, of_each, cotangents, strict=True):
            out, vjp = jax.vjp(partial(f, implementation=implementation), *args)
            found.append((out, vjp(dout)))
        return found

    with check.running(implementation):
        return jax.jit(run)(*arrays)


@pytest.mark.parametrize(
    ("dtype", "shape", "names", "implementation"),
    cases(
        [  # every curve once, and every dtype
            ("float32", (3, 704), "silu relu_squared gelu_erf tanh"),
            ("bfloat16", (3, 704), "relu gelu_tanh sigmoid"),
            ("float16", (3, 704), "quick_gelu"),
            # Sizes that no access width divides: below one access, and above one block.
            *(("float32", (2, *shape), "pair:silu") for shape in ((), (257, 3))),
            ("float32", (2, 3, 704), "pair:clamped"),
            ("float32", (2, 3, 144), "halves:gelu_erf"),
            ("float16", (3, 1408), "halves:clamped"),
            ("bfloat16", (5, 2750), "halves:silu"),  # whose rows no access of two divides
        ],
        [
            ("float32", (2, 7), "pair:silu"),
            ("float32", (3, 704), "gelu_tanh sigmoid"),
            ("float16", (3, 704), "sigmoid tanh"),
            ("bfloat16", (3, 704), "relu_squared silu gelu_erf quick_gelu tanh"),
            ("float32", (2, 3, 704), "pair:gelu_erf pair:silu"),
            ("float16", (2, 3, 704), "pair:tanh pair:silu pair:clamped"),
            ("bfloat16", (2, 3, 704), "pair:silu pair:gelu_tanh pair:relu pair:sigmoid"),
            ("bfloat16", (2, 3, 704), "pair:quick_gelu pair:clamped"),
            ("bfloat16", (5, 12), "halves:silu"),  # whose rows an access of two divides
            ("bfloat16", (3, 1408), "halves:clamped"),
            ("float32", (3, 1408), "halves:clamped halves:gelu_tanh"),
        ],
    ),
)
def test_accuracy(dtype, shape, names, implementation):
    """Several are computed by one program, each from its own array."""
    names = tuple(names.split())
    xs = tuple(normal(shape, dtype, seed) for seed in range(len(names)))
    options = {"names": names, "dtypes": [dtype] * len(names)}
    check.check_accuracy(
        ours, curves_of, oracle_of(curves_of, len(names)), xs, implementation, **options
    )


EXTREMES = {
    "float32": ("silu gelu_tanh gelu_erf quick_gelu", [1e4, 3e38, 1e-40, 88.0, 104.0, np.inf]),
    "float16": ("silu gelu_tanh gelu_erf", [1e4, 65504.0, 1e-6, np.inf]),
    "bfloat16": ("silu relu quick_gelu", [1e4, 3e38, 1e-40, np.inf]),
}


@pytest.mark.parametrize(
    ("dtype", "implementation"), cases([("float32",)], [("float16",), ("bfloat16",)])
)
def test_activation_extremes(dtype, implementation):
    """Where the curve is 0 or x, it and its slope are so, at infinity too; a NaN stays one.

    Where it is bounded it is constant far out, and near 0 as exact as elsewhere.
    """
    names, far = EXTREMES[dtype]
    both_signs = lambda values: jnp.asarray([*values, *np.negative(values), np.nan], dtype)
    x, of_bounded = both_signs([*far, 0.0]), both_signs([1e4, np.inf, 1e-4, 1e-7, 0.0])
    calls = [(ELEMENTWISE[name], (x,), jnp.ones_like(x)) for name in names.split()]
    bounded = ("sigmoid", "tanh") if dtype != "bfloat16" else ()
    calls += [(ELEMENTWISE[n], (of_bounded,), jnp.ones_like(of_bounded)) for n in bounded]
    found = gradients(implementation, calls)
    for name, (out, (dx,)) in zip(names.split(), found, strict=False):
        wide, out, dx = (np.asarray(a, np.float64) for a in (x, out, dx))
        assert np.isnan(out[-1])
        assert np.isfinite(dx[:-1]).all()
        large, small = np.abs(wide) > 80, np.abs(wide) < 1e-5
        np.testing.assert_allclose(out[large], np.maximum(wide, 0)[large], rtol=0, atol=1e-35)
        np.testing.assert_allclose(dx[large], (wide > 0)[large], rtol=0, atol=1e-35)
        if name != "relu":
            # Half of fp16's 17 smallest steps is 8 or 9 of them; denormal fp32 may be 0.
            np.testing.assert_allclose(out[small], wide[small] / 2, atol=1.2e-38, rtol=0.06)
            np.testing.assert_allclose(dx[small], 0.5, rtol=1e-6)
    for name, (out, (dx,)) in zip(bounded, found[len(names.split()) :], strict=True):
        with np.errstate(over="ignore"):
            want, slope = check.activated(name, np.asarray(of_bounded, np.float64))
        np.testing.assert_allclose(out, want, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-45)
        np.testing.assert_allclose(dx, slope, rtol=2e-3, atol=1e-7)


@check.BOTH
def test_relu_lets_nothing_past_its_corner(implementation):
    """Where the slope is 0 the gradient is, of an infinite cotangent too, as in JAX."""
    x = jnp.asarray([-1.0, 0.0, 2.0, -np.inf, np.inf, np.nan, 1e-45, -0.0] * 2)  # two bytes of mask
    dout = jnp.asarray([np.inf] * 8 + [np.nan] * 8)
    gate, up = jnp.asarray([[-1.0, 0.0, 2.0, -1.0, 2.0], [np.inf, np.nan, 3.0, 1.0, np.inf]])
    edge = jnp.ones(5).at[3].set(np.inf)
    calls = [
        *((ELEMENTWISE[name], PLAIN[name], (x,), dout) for name in ("relu", "relu_squared")),
        (jaxkern.reglu, lambda g, u: jax.nn.relu(g) * u, (gate, up), edge),
    ]
    found = gradients(implementation, [(f, args, dout) for f, _, args, dout in calls])
    plain = lambda f: lambda *args, implementation: f(*args)
    wants = gradients(None, [(plain(f), args, dout) for _, f, args, dout in calls])
    for (_, got), (_, want) in zip(found, wants, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("gated", [False, True])
def test_plain_backward_keeps_only_the_arguments(gated):
    """No sigmoid is saved, at any precision."""
    x = normal((4, 32), "bfloat16")
    f = partial(jaxkern.swiglu, up=x) if gated else jaxkern.silu
    vjp = jax.eval_shape(lambda x: jax.vjp(lambda x: f(x, implementation="xla"), x)[1], x)
    assert {(a.shape, a.dtype) for a in jax.tree.leaves(vjp)} <= {(x.shape, x.dtype)}


@pytest.mark.parametrize(
    ("shape", "saved"), [((3, 16), {((3, 2), "uint8")}), ((3, 12), {((3, 12), "bfloat16")})]
)
def test_relu_keeps_a_bit_of_each_element(shape, saved):
    """Or x, where its rows are no whole bytes."""
    f = partial(jaxkern.relu, implementation="mosaic")
    vjp = jax.eval_shape(lambda x: jax.vjp(f, x)[1], normal(shape, "bfloat16"))
    assert {(a.shape, str(a.dtype)) for a in jax.tree.leaves(vjp)} == saved


KEY = jax.random.key(0)
OF_FEW = {
    "silu": jaxkern.silu,
    "swiglu": lambda x, **how: jaxkern.swiglu(x, x + 1, **how),
    "silu_and_mul": lambda x, **how: jaxkern.silu_and_mul(jnp.stack([jnp.tile(x, 2)] * 4), **how),
    "dropout": lambda x, **how: jaxkern.dropout(x, 0.5, KEY, **how),
    "dropout_add": lambda x, **how: jaxkern.dropout_add(x, x.astype("float32"), 0.5, KEY, **how),
}


def of_few(name, implementation):
    """Value and gradient, where the elements are so few that an index may be a constant."""

    def run(x):
        out, vjp = jax.vjp(lambda x: OF_FEW[name](x, implementation=implementation), x)
        return out, vjp(jnp.ones_like(out))

    return run


@pytest.mark.parametrize(
    "name", ["silu_and_mul", "dropout_add", *map(exhaustive, ("silu", "swiglu", "dropout"))]
)
def test_few_elements_lower(name):
    for n in (1, 9):  # of one element, and of one access and an element
        x = jax.ShapeDtypeStruct((n,), jnp.bfloat16)
        assert len(kernel_modules(of_few(name, "mosaic"), x)) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", OF_FEW)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 31, 127, 129])
def test_few_elements(n, name, dtype):
    x = normal((n,), dtype, seed=n)
    got, want = (jax.jit(of_few(name, i))(x) for i in ("mosaic", "xla"))
    ulp = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2e-5}[dtype]  # a tie either way
    check.assert_close(got, want, ulp)


@pytest.mark.parametrize(
    ("shape", "dtype", "accesses"),
    [
        ((1024,), "bfloat16", {"8xbf16": 1}),
        ((1027,), "bfloat16", {"8xbf16": 1, "1xbf16": 3}),
        ((1027,), "float32", {"4xf32": 1, "1xf32": 3}),
        ((3,), "float16", {"1xf16": 3}),
        ((2, 1024), "bfloat16", {"8xbf16": 1}),
        ((2, 1028), "bfloat16", {"4xbf16": 2, "1xbf16": 4}),
        ((2, 1027), "float32", {"1xf32": 4 + 3}),
    ],
)
def test_accesses_are_as_wide_as_they_may_be(shape, dtype, accesses):
    """Whatever the size; of slices, which ``vmap`` makes of rows, as wide as those are aligned."""
    run = partial(jaxkern.silu, implementation="mosaic")
    run = jax.vmap(run) if len(shape) > 1 else run
    (module,) = kernel_modules(run, jax.ShapeDtypeStruct(shape, dtype))
    loads = Counter()

    def visit(op):
        found = re.fullmatch(r"vector<(\w+)>", str(op.results[0].type)) if op.results else None
        if op.name.endswith("llvm.load") and found:
            loads[found[1]] += 1
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    assert loads == accesses


def test_unit_divides_the_columns():
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    assert elementwise.unit(array(24), array(24, dtype=jnp.float32)) == 4
    assert [elementwise.unit(array(16, 2 * h), columns=h) for h in (24, 12, 5)] == [8, 4, 1]


@pytest.mark.parametrize("every", [False, exhaustive(True)])
def test_every_op_with_an_activation_takes_every_one(every):
    """From the one table, and each computes what it says."""
    x, w = normal((4, 128), "float32"), jnp.eye(128)
    ops = {
        "glu": lambda x, name: jaxkern.glu(x, x, activation=name),
        "linear": lambda x, name: jaxkern.linear(x, w, activation=name),
        "gated": lambda x, name: jaxkern.gated_linear_unit(x, w, w, activation=name),
        "dropout": lambda x, name: jaxkern.dropout(x, 0.25, KEY, activation=name),
        "norm": lambda x, name: jaxkern.rms_norm(x, activation=name),
        "norm, gate": lambda x, name: jaxkern.rms_norm(x, gate=x, gate_activation=name),
    }
    pairs = [(op, name) for op in ops for name in get_args(curves.Activation)]
    pairs = pairs if every else pairs[::8]  # each op and most of the names
    normed = lambda x: (jaxkern.rms_norm(x), jaxkern.dropout(jnp.ones_like(x), 0.25, KEY))
    with jax.default_matmul_precision("highest"):
        found, of_none = jax.jit(lambda x: ([ops[op](x, name) for op, name in pairs], normed(x)))(x)
    x, normed, scale = (np.asarray(a, np.float64) for a in (x, *of_none))
    for (op, name), got in zip(pairs, found, strict=True):
        value, of_normed = (check.activated(name, v)[0] for v in (x, normed))
        wants = {"glu": value * x, "gated": value * x, "dropout": value * scale}
        wants |= {"linear": value, "norm": of_normed, "norm, gate": normed * value}
        np.testing.assert_allclose(got, wants[op], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gelu_erf", 128),
        *(exhaustive(name, 128) for name in ("quick_gelu", "sigmoid", "tanh")),
        *(exhaustive(name, 1) for name in ("gelu_erf", "quick_gelu", "sigmoid", "tanh")),
    ],
)
def test_activations_lower_for_cuda(name, rows):
    """In the layouts of long rows, or of short ones and of a product's tiles."""
    options = {"implementation": "mosaic"}
    n = 2048 if rows == 1 else 128

    def loss(x, gate, w):
        out = jaxkern.rms_norm(x, w[0], activation=name, gate=gate, gate_activation=name, **options)
        if len(w) > 1:
            out = jaxkern.linear(out, w, activation=name, **options)
            out = jaxkern.gated_linear_unit(out, w, w, activation=name, recompute=True, **options)
        return jnp.sum(out.astype(jnp.float32))

    kernels = ["rms_norm_fwd", "rms_norm_bwd"]
    if rows > 1:
        kernels += ["linear_activation_fwd", "linear_dx", "gated_fwd", "gated_bwd"]
    x, w = jnp.ones((128, n), jnp.bfloat16), jnp.ones((rows, n), jnp.bfloat16)
    calls = check.kernel_calls(check.lowered(jax.value_and_grad(loss, (0, 1, 2)), x, x, w))
    for kernel in kernels:
        assert any(kernel in line for line in calls), kernel


# Gated units


@check.BOTH
def test_gated_extremes(implementation):
    """At the limit the gradient passes, as PyTorch's clamp has it; a NaN stays one."""
    inf, nan = np.inf, np.nan
    gate = jnp.asarray([1.5, 1.6, -1.6, inf, -inf, nan, 1.0, 1.0, 1.0, 1.0])
    up = jnp.asarray([1.5, 1.0, -1.5, 1.0, 1.0, 1.0, inf, -inf, nan, -1.6])
    half = jnp.asarray(
        [[1e4, -1e4, inf, -inf, nan, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0, inf]], "float16"
    )
    clamped = GATED["clamped"][0], (gate, up), jnp.ones(10)
    (out, (dgate, dup)), of_half = gradients(
        implementation, [clamped, (jaxkern.swiglu, tuple(half), jnp.ones(6, "float16"))]
    )
    numbers = ~(np.isnan(gate) | np.isnan(up))
    np.testing.assert_array_equal(np.isnan(out), ~numbers)
    assert np.isfinite(dup[numbers]).all()
    np.testing.assert_array_equal((dgate == 0)[numbers], [0, 1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal((dup == 0)[numbers], [0, 0, 0, 0, 1, 1, 1, 1])
    out, (dgate, dup) = of_half
    np.testing.assert_array_equal(out, [20000, 0, inf, 0, nan, inf])
    np.testing.assert_array_equal(dgate, [2, 0, 2, 0, nan, inf])
    np.testing.assert_array_equal(dup[:5], [1e4, 0, inf, 0, nan])


@check.BOTH
def test_gated_mixed_dtypes(implementation):
    gate, up = normal((4, 40), "bfloat16"), normal((4, 40), "float32", seed=1)
    dout = jnp.ones((4, 40), jnp.bfloat16)
    [(out, (dgate, dup))] = gradients(implementation, [(jaxkern.swiglu, (gate, up), dout)])
    assert (out.dtype, dgate.dtype, dup.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wide = gate.astype(jnp.float32)
    np.testing.assert_allclose(dup, jax.nn.silu(wide), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out, (jax.nn.silu(wide) * up).astype(jnp.bfloat16))
    np.testing.assert_allclose(jaxkern.glu(up), jax.nn.glu(up), rtol=1e-6)


def test_what_is_chosen():
    """XLA for what it fuses at little cost; a gated unit has kernels both ways."""
    x = jnp.ones((64, 256), jnp.bfloat16)
    for name, call in ELEMENTWISE.items():
        by_itself = check.lowered(jax.grad(lambda x: call(x).sum()), x)  # noqa: B023
        assert ("mosaic_gpu" in by_itself) is (name == "gelu_erf")
        grad = jax.grad(lambda x: call(x, implementation="mosaic").sum())  # noqa: B023
        assert "_bwd" in check.lowered(grad, x)
    for pair, halves in (GATED["silu"], GATED["relu"], GATED["gelu_erf"]):
        for function in filter(None, (lambda x, f=pair: f(x, x), halves)):
            text = check.lowered(jax.value_and_grad(lambda x: function(x).sum()), x)  # noqa: B023
            assert len(check.kernel_calls(text)) == 2
            assert "stablehlo.concatenate" not in text.replace("custom_partitioning", "")


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(1000, 4096), (1001, 1001)])
def test_gated_same_bits(shape):
    gate, up, dout = (normal(shape, "bfloat16", seed) for seed in range(3))
    run = jax.jit(lambda g, u, d: jax.vjp(jaxkern.swiglu, g, u)[1](d))
    check.assert_same_bits(lambda: run(gate, up, dout))


@pytest.mark.parametrize(("h", "fits"), [(2**16, True), (2**16 + 1, False)])
def test_halves_beyond_32_bits_of_units(h, fits):
    """The rows of the one begin at multiples of 16 bytes; the other's elements are too many."""
    x = jax.ShapeDtypeStruct((2**16, 2 * h), jnp.bfloat16)
    assert ("mosaic_gpu" in check.lowered(jaxkern.silu_and_mul, x)) is fits
    if not fits:
        with pytest.raises(NotImplementedError, match="1 at a time"):
            jax.eval_shape(partial(jaxkern.silu_and_mul, implementation="mosaic"), x)


SWIGLU = check.Op(
    name="swiglu",
    call=jaxkern.swiglu,
    reference=lambda g, u: jax.nn.silu(g) * u,
    arrays=lambda key: tuple(jax.random.normal(k, (8, 2, 40)) for k in jax.random.split(key)),
    kernels=("swiglu_fwd", "swiglu_bwd"),
    axes="mtd mtd -> mtd",
    features="d",
    vmaps=[(0, None), (None, 0), (1, 0)],
    runs_again=False,
    once=True,
)


def beside(name, cells, **changes):
    """An op beside swiglu's matrix: what its other shapes or curve could break."""
    cells = [(cell, implementation) for cell in cells for implementation in ("mosaic", None)]
    return dataclasses.replace(SWIGLU, name=name, cells=cells, **changes)


OF_ONE = {"axes": "mtd -> mtd", "vmaps": [(0,), (1,)]}
SILU_AND_MUL = beside(
    "silu_and_mul",
    ["vmap", "vmap(grad)", "auto mesh", "explicit mesh", "features split", "kernels lowered"],
    call=jaxkern.silu_and_mul,
    reference=lambda x: jax.nn.silu(x[..., :40]) * x[..., 40:],
    arrays=lambda key: (jax.random.normal(key, (8, 2, 80)),),
    kernels=("silu_and_mul_fwd", "silu_and_mul_bwd"),
    **OF_ONE,
)
GELU = beside(
    "gelu",
    ["grad(grad)", "explicit mesh", "kernels lowered"],
    call=ELEMENTWISE["gelu_erf"],
    reference=PLAIN["gelu_erf"],
    arrays=lambda key: (jax.random.normal(key, (8, 2, 40)),),
    kernels=("gelu_erf_fwd", "gelu_erf_bwd"),
    **OF_ONE,
)


def relu_by_passes(x, *, implementation):
    """By default its passes, too, which XLA would otherwise be chosen for."""
    of_passes = lambda implementation, reason, *, op, slower: resolve(implementation, reason, op=op)
    with mock.patch.object(activations, "resolve", of_passes):
        return jaxkern.relu(x, implementation=implementation)


RELU = beside(
    "relu",
    [
        *("vmap(grad)", "grad(grad)", "jvp", "auto mesh", "explicit mesh"),
        *("rows and channels split", "kernels lowered"),
    ],
    call=relu_by_passes,
    reference=jax.nn.relu,
    arrays=lambda key: (jax.random.normal(key, (8, 2, 32)),),
    kernels=("relu_fwd", "relu_bwd"),
    channels="d",
    **OF_ONE,
)
CLAMPED_SWIGLU = beside(
    "swiglu, clamped",
    ["value", "grad(grad)", "kernels lowered", "jvp"],
    call=GATED["clamped"][0],
    reference=partial(gated_plain, **CLAMPED),
)
test_gated_transformations = check.transformations(SWIGLU, SILU_AND_MUL, GELU, RELU, CLAMPED_SWIGLU)


# The functions that kernels compute by other means than the units for them, against float64

SIZE = 1024
LAYOUT = plgpu.Layout.WG_STRIDED((SIZE,), vec_size=8)
# Values of both signs, on both sides of where tanh becomes a polynomial, and far out.
BOTH_SIGNS = np.outer([1, -1], [*np.geomspace(1e-30, 30, SIZE // 2 - 3), 0.0, np.inf, np.nan])
FAR = np.resize([-np.inf, -1e30, -150, -126.6, -0.0, 0, 1, 128, 1e30, np.inf, np.nan], SIZE)
RANGE = np.linspace(-5, 40, SIZE)


def exp2(x):
    """In fp32, which has no denormal numbers here."""
    with np.errstate(over="ignore"):
        return np.where(x < -126, 0, np.float64(np.float32(np.exp2(x))))


def in_kernel(f):
    def kernel(x_ref, out_ref):
        out_ref[...] = f(plgpu.load(x_ref, layout=LAYOUT, optimized=False))

    out_type = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    return launch_kernel(kernel, out_type=out_type, kernel_name="arithmetic", approx_math=True)


@pytest.mark.parametrize(
    "run", [jax.jit, pytest.param(in_kernel, marks=pytest.mark.gpu)], ids=["xla", "mosaic"]
)
@pytest.mark.parametrize(
    ("f", "x", "want", "error"),
    [
        (exp2_by_polynomial, np.linspace(-125.4, 127.99, SIZE), np.exp2, 2 * 2.0**-23),
        (exp2_by_polynomial, FAR, exp2, 2.0**-22),
        *(
            (partial(softplus, exact=exact), RANGE, partial(np.logaddexp, 0), e)
            for exact, e in ((True, 6e-7), (False, 3e-6))
        ),
        *(
            (kernel_functions(exact, LAYOUT).tanh, BOTH_SIGNS.ravel(), np.tanh, e)
            for exact, e in ((True, 4e-7), (False, 2e-6))
        ),
    ],
    ids=["exp2", "exp2, far", "softplus, exact", "softplus", "tanh, exact", "tanh"],
)
def test_function_of_kernels(f, x, want, error, run):
    x = jnp.asarray(x, jnp.float32)
    with check.in_kernels() if run is in_kernel else interpreter():
        got = np.asarray(run(f)(x), np.float64)  # plain JAX, too, has the GPU's instructions there
    np.testing.assert_allclose(got, want(np.asarray(x, np.float64)), rtol=error, atol=0)
