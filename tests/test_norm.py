"""rms_norm and layer_norm: accuracy, options, bad rows, and what the kernels' tiles do."""

import dataclasses
import functools
import itertools
import math
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxkern
from jaxkern.core import kernel_call
from jaxkern.mosaic.launch import LANES
from jaxkern.ops.norm import tiles
from jaxkern.ops.norm.kernel import launch_fwd
from jaxkern.ops.norm.reference import NormOptions
from jaxkern.ops.norm.rows import LongRow, RowWindows, long_row
from tests import check
from tests.check import PLAIN
from tests.test_activations import cases, exhaustive, oracle_of

OPS = {"rms_norm": jaxkern.rms_norm, "layer_norm": jaxkern.layer_norm}
EACH = pytest.mark.parametrize("op", list(OPS))
DEFAULTS = {"eps": 1e-5, "weight_offset": 0.0, "activation": None, "gate_activation": "silu"}
DEFAULTS |= {"norm_before_gate": True, "group_size": 0}


def ours(*arrays, op, names, **options):
    """Out, and the sum where there is a residual."""
    return OPS[op](**dict(zip(names, arrays, strict=True)), **options)


def plain(*arrays, op, names, held=lambda statistic: statistic, **options):
    """What a user would write, in the dtype of x; `held` is applied to the rows' statistics."""
    a, o = dict(zip(names, arrays, strict=True)), types.SimpleNamespace(**DEFAULTS | options)
    x = a["x"]
    cast = lambda name: a[name].astype(x.dtype)
    gate = PLAIN[o.gate_activation](cast("gate")) if "gate" in a else None
    h = x + cast("residual") if "residual" in a else x
    v = h if gate is None or o.norm_before_gate else h * gate
    v = v.reshape(*x.shape[:-1], -1, o.group_size or x.shape[-1])
    if op == "layer_norm":
        v = v - held(jnp.mean(v, axis=-1, keepdims=True))
    square = held(jnp.mean(v * v, axis=-1, keepdims=True))
    y = (v / jnp.sqrt(square + jnp.asarray(o.eps, x.dtype))).reshape(x.shape)
    if "weight" in a:
        y = y * (a["weight"] + jnp.asarray(o.weight_offset, a["weight"].dtype)).astype(x.dtype)
    y = y + cast("bias") if "bias" in a else y
    y = PLAIN[o.activation](y) if o.activation else y
    y = y * gate if gate is not None and o.norm_before_gate else y
    return (y, h) if "residual" in a else y


def oracle(*arrays, names, **options):
    """The truth, and what dx is summed from: in rows of one or two elements it cancels."""
    options["names"], results = names, 1 + ("residual" in names)
    outs, grads = oracle_of(plain, results)(*arrays, **options)
    of_out = *arrays[: len(names) + 1], *(0 * dsum for dsum in arrays[len(names) + 1 :])
    _, (terms, *_) = oracle_of(plain, results)(*of_out, held=jax.lax.stop_gradient, **options)
    size = np.linalg.norm(terms)
    return outs, grads, {results + names.index(n): size for n in {"x", "residual"} & {*names}}


def inputs(op, shape, dtype, extra="", weight_dtype=None, offset=0.0, seed=0):
    """Arrays by name: x, weight, the bias of layer_norm, and those in `extra`."""
    extra = extra.split()
    names = ["x", "weight", *(["bias"] if op == "layer_norm" and "bias" not in extra else [])]
    arrays = {}
    for i, name in enumerate([*names, *extra]):
        # Drawn by NumPy: nothing to compile for every shape.
        rng = np.random.default_rng([seed, i])
        if name in ("weight", "bias"):
            array = (name == "weight") + 0.1 * rng.standard_normal(shape[-1:])
            arrays[name] = jnp.asarray(array, weight_dtype or dtype)
        else:
            array = rng.standard_normal(shape) + (offset if name == "x" else 0)
            arrays[name] = jnp.asarray(array, jnp.float32).astype(dtype)
    return arrays


def check_case(op, arrays, implementation, **options):
    """Outputs and gradients at most twice as far from the truth as plain JAX's."""
    summed = jnp.result_type(*(arrays[n] for n in ("x", "residual") if n in arrays))
    dtypes = [str(arrays["x"].dtype), *([str(summed)] if "residual" in arrays else [])]
    options |= {"op": op, "names": tuple(arrays), "dtypes": dtypes}
    check.check_accuracy(ours, plain, oracle, tuple(arrays.values()), implementation, **options)


def run_vjp(op, arrays, implementation, **options):
    """Outputs, and gradients by name for cotangents that are all different."""
    options |= {"implementation": implementation, "op": op, "names": tuple(arrays)}
    rng = np.random.default_rng(3)
    draw = lambda o: jnp.asarray(rng.standard_normal(o.shape), o.dtype)
    values = tuple(arrays.values())
    with check.running(implementation):
        like = jax.eval_shape(functools.partial(ours, **options), *values)
        outs, grads = check.value_and_grads(ours, values, jax.tree.map(draw, like), **options)
    return outs, dict(zip(arrays, grads, strict=True))


# Accuracy

VARIANTS = {
    "alone": ("", {}),
    "large mean": ("", {}),  # x near 1e4, whose mean square is far from its variance
    "bare": ("", {}),  # without parameters
    "bias alone": ("", {}),
    "residual": ("residual", {}),
    "silu": ("", {"activation": "silu"}),
    "gelu": ("", {"activation": "gelu"}),
    "relu": ("", {"activation": "relu"}),
    "gate after": ("gate", {}),
    "gate before": ("gate", {"norm_before_gate": False}),
    "groups": ("", {"groups": 6}),
    "bias and offset": ("bias", {"weight_offset": 1.0, "eps": 0.1}),
    "bias, sigmoid of a gate after": ("bias gate", {"gate_activation": "sigmoid"}),
    "tanh, erf of a gate before": (
        "gate bias",
        {"activation": "tanh", "gate_activation": "gelu_erf", "norm_before_gate": False},
    ),
    "all, gate after": ("residual gate", {"activation": "silu", "groups": 2}),
    "all, bias and offset": (
        "bias residual gate",
        {"activation": "quick_gelu", "gate_activation": "tanh", "groups": 2}
        | {"weight_offset": 1.0, "eps": 0.1},
    ),
    "all, gate before": (
        "residual gate",
        {"activation": "gelu", "norm_before_gate": False, "groups": 8},
    ),
}
OTHERS = [*VARIANTS][4:]
DTYPES = ["bfloat16", "float16", "float32"]
EVERY = list(itertools.product(OPS, DTYPES))
SIZES = [1, 2, 7, 42, 127, 128, 129, 255, 256, 257, 287, 760, 769, 1128, 4096, 5120, 8192]
LONGEST = [16384, 24001, 24576, 32768, 65536, 131072, 262144, 100000, 200003]
WIDTHS = [(70, n) for n in (256, 1000, 4096, 8192, 16384, 65536)]
MANY_ROWS = [
    *itertools.product((132, 133, 1199, 65537), (256, 1000, 1024)),
    *itertools.product((1, 300), LONGEST),
]


def alone(op, dtype, *shapes):
    return [(op, dtype, shape, "alone") for shape in shapes]


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "variant", "implementation"),
    cases(
        [
            ("rms_norm", "bfloat16", (42,), "bare"),  # less than a window
            *alone("layer_norm", "float32", (2, 3, 1128)),  # overlapping windows, two warpgroups
            *alone("layer_norm", "bfloat16", (131, 64)),  # short rows, whose last tiles overlap
            ("layer_norm", "float32", (8, 256), "large mean"),
            ("layer_norm", "float32", (5, 768), "all, bias and offset"),
            ("rms_norm", "float16", (5, 768), "all, gate before"),
        ],
        [
            *alone("rms_norm", "float16", (2, 3, 1), (2, 3, 760)),
            *alone("rms_norm", "float32", (2, 3, 255), (256,), (3, *[1] * 28, 256)),
            *alone("rms_norm", "bfloat16", (2, 11008), (1, 256)),
            *alone("layer_norm", "float16", (2, 3, 769), (2, 3, 4096)),
            *alone("layer_norm", "float32", (2, 3, 256)),
            *alone("layer_norm", "bfloat16", (2, 16384), (33, 200), (2, 3, 127)),
            ("layer_norm", "float32", (8, 760), "large mean"),
            ("rms_norm", "bfloat16", (8, 1024), "large mean"),
            *(("layer_norm", "float32", (4, 300), given) for given in ("bare", "bias alone")),
            ("rms_norm", "float32", (4, 256), "bare"),
            *((*EVERY[i % 6], (5, 768), v) for i, v in enumerate(OTHERS[:-2])),
        ],
        [
            *(case for op, d in EVERY for case in alone(op, d, *((2, 3, n) for n in SIZES))),
            *(case for op, d in EVERY for case in alone(op, d, *((2, n) for n in LONGEST))),
            *(case for op in OPS for case in alone(op, "bfloat16", *MANY_ROWS)),
            *((*of, (5, 768), variant) for of in EVERY for variant in OTHERS),
            *itertools.product(OPS, DTYPES[:1], WIDTHS, OTHERS),
        ],
    ),
)
def test_norm_accuracy(op, dtype, shape, variant, implementation):
    extra, options = VARIANTS[variant]
    # Rows of one element are constant: with a smaller eps plain JAX's 1 / std³ overflows fp16.
    options = {"eps": 1e-3 if shape[-1] == 1 else 1e-5} | options
    if groups := options.pop("groups", 0):
        options["group_size"] = shape[-1] // min(groups, 8 if shape[-1] == 768 else 2)
    arrays = inputs(op, shape, dtype, extra, offset=1e4 * (variant == "large mean"))
    given = {"bare": ["x"], "bias alone": ["x", "bias"]}.get(variant, arrays)
    arrays = {name: arrays[name] for name in given}
    check_case(op, arrays, implementation, **options)


@pytest.mark.parametrize(
    ("op", "dtype", "other", "implementation"),
    cases(
        [("layer_norm", "bfloat16", "float32")],
        [
            *(("rms_norm", "float32", "bfloat16"), ("rms_norm", "bfloat16", "float32")),
            ("layer_norm", "float16", "float32"),
        ],
    ),
)
def test_norm_mixed_dtypes(op, dtype, other, implementation):
    """The sum has the dtype of x + residual, as in JAX, and every gradient that of its array."""
    arrays = inputs(op, (5, 300), dtype, "bias residual gate", weight_dtype=other)
    arrays["residual"] = arrays["residual"].astype(other)
    check_case(op, arrays, implementation, eps=1e-5)
    outs, grads = run_vjp(op, arrays, implementation, eps=1e-5)
    total = arrays["x"].astype("float32") + arrays["residual"].astype("float32")
    np.testing.assert_array_equal(outs[1], total.astype(outs[1].dtype))
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
    narrow = min(dtype, other, key=lambda d: jnp.dtype(d).itemsize)
    np.testing.assert_array_equal(grads["x"].astype(narrow), grads["residual"].astype(narrow))
    # The norm of the sum alone, in the dtype of x, is what the call gave beside the sum.
    summed = {**{n: v for n, v in arrays.items() if n != "residual"}, "x": outs[1]}
    again, grads = run_vjp(op, summed, implementation, eps=1e-5, dtype=dtype)
    assert (again.dtype, grads["x"].dtype) == (outs[0].dtype, outs[1].dtype)
    check.assert_close(
        again.astype("float32"), outs[0].astype("float32"), 2e-6 if dtype == "float32" else 5e-4
    )


# Edges


@pytest.mark.exhaustive
@EACH
@check.BOTH
def test_norm_of_the_sum_it_returns(op, implementation):
    """out, h = norm(x, residual=r) is norm(h), to the bit."""
    arrays = inputs(op, (6, 256), "bfloat16", "residual")
    with check.running(implementation):
        out, h = OPS[op](**arrays, implementation=implementation)
        del arrays["residual"]
        again = OPS[op](**arrays | {"x": h}, implementation=implementation)
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize(
    ("op", "n", "bad", "implementation"),
    cases(
        [("layer_norm", 256, np.nan)],
        [("layer_norm", 127, np.nan), ("rms_norm", 256, np.inf)],
    ),
)
def test_norm_bad_row_stays_alone(op, n, bad, implementation):
    arrays = inputs(op, (9, n), "float32", "gate")
    poisoned = arrays | {"x": arrays["x"].at[3, n // 2].set(bad)}
    others = np.arange(9) != 3
    out, grads = run_vjp(op, arrays, implementation, activation="relu")
    bad_out, bad_grads = run_vjp(op, poisoned, implementation, activation="relu")
    np.testing.assert_array_equal(bad_out[others], out[others])
    for name in ("x", "gate"):
        np.testing.assert_array_equal(bad_grads[name][others], grads[name][others])
        assert np.isnan(bad_grads[name][3]).any()
    assert np.isnan(bad_out[3]).any()


@pytest.mark.parametrize(("op", "implementation"), cases([("layer_norm",)], [("rms_norm",)]))
def test_norm_extreme_rows(op, implementation):
    """Zero, constant, denormal and large rows."""
    rng = np.random.default_rng(0).standard_normal(256)
    rows = [0 * rng, 0 * rng + 3, 1e-20 * rng, 1e-40 * rng, 1e18 * rng]
    x = jnp.asarray(np.stack(rows * 2), jnp.float32)
    out, grads = run_vjp(op, {"x": x, "weight": jnp.ones(256)}, implementation)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(out[1], 0 if op == "layer_norm" else 1, rtol=1e-6, atol=1e-6)
    tiny = x[2] - x[2].mean() if op == "layer_norm" else x[2]
    eps = 1e-5 if op == "layer_norm" else 1e-6
    np.testing.assert_allclose(out[2], tiny / math.sqrt(eps), rtol=1e-5, atol=1e-24)
    assert abs(float(jnp.mean(out[4] ** 2)) - 1) < 1e-4
    assert all(np.isfinite(grad).all() for grad in grads.values())


def test_float64():
    """x64 users get float64 arithmetic, from plain JAX."""
    with jax.enable_x64(True):
        x, far = np.random.default_rng(0).standard_normal((3, 200)), np.linspace(-700, 700, 11)
        norm = {"op": "layer_norm", "names": ("x",), "activation": "gelu"}
        run = lambda: (ours(x, **norm), plain(x, **norm), jaxkern.swiglu(far, far))
        out, want, gated = jax.jit(run)()
    np.testing.assert_allclose(out, want, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(gated, far * check.activated("silu", far)[0], rtol=1e-13)


# The kernels


def test_norm_saves_no_more_than_its_arguments():
    """For the backward, beside the arguments and the sum that is returned: two numbers per row."""
    a = inputs("layer_norm", (6, 512), "bfloat16", "residual gate")
    f = functools.partial(ours, op="layer_norm", names=tuple(a))
    held = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *a.values()))
    full = [v for v in held if v.size == 6 * 512]
    assert len(full) == 2  # the sum and the gate
    assert sum(v.size for v in held if v.size < 6 * 512) <= 2 * 512 + 2 * 6


LOWERED = [("rms_norm", 129), ("layer_norm", 65536)]
MORE_LOWERED = {*itertools.product(OPS, (64, 129, 1024, 4096, 65536, 262144))} - {*LOWERED}


@pytest.mark.parametrize(("op", "n"), [*LOWERED, *(exhaustive(*c) for c in sorted(MORE_LOWERED))])
def test_norm_lowers_for_cuda(op, n):
    """The kernels' layouts are accepted, with no GPU here, and so are clusters."""
    for dtype, extra in (("bfloat16", "residual gate"), ("float32", "")):
        arrays = inputs(op, (40, n), dtype, extra) if n < 2**17 else {"x": jnp.ones((40, n), dtype)}
        outs = lambda arrays: jax.tree.leaves(OPS[op](**arrays, implementation="mosaic"))
        loss = lambda arrays: outs(arrays)[0].astype(jnp.float32).sum()  # noqa: B023
        text = check.lowered(jax.grad(loss), arrays)
        assert f"{op}_fwd" in text
        assert f"{op}_bwd" in text


@pytest.mark.parametrize("m", [1, 100, 1 << 20])
def test_norm_sums_of_bounded_size(m):
    """The parts of dw and db do not grow with the rows."""
    for n in (64, 256, 1000, 1024, 4096, 16384, 262144):
        tile = tiles.backward(tiles.NormSizes(m, 1, n, 2, (2, 2), (4,), plain=True), 1)
        assert tile.clusters <= 8 * 132
        assert tile.clusters * n <= max(132 * 4096 * 2, 132 * n)


def test_windows_cover_every_element_once():
    """Over warpgroups and blocks, windows cover a row, and their masks count every element once."""
    for n in (128, 287, 1128, 8192, 11008, 20000, 100000, 200003, 262144):
        for few in (False, True):
            row = long_row(n, 2, 8 if few else 32, 8, 8 if few else 4)
            w, seen = row.windows, np.zeros(max(n, LANES), int)
            for i in range(row.windows_per_warpgroup * row.warpgroups * row.blocks):
                start = int(w.start(min(i, 10**6)))
                column = np.arange(start, start + w.size)
                seen[column[column >= i * w.size]] += 1
            np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize(
    ("stages", "params_in", "waves", "sums_ahead"),
    [
        (3, "shared", (), True),
        *(exhaustive(2, "shared", (), False), exhaustive(3, "registers", (), True)),
        *(exhaustive(3, "registers", (2, 1), False), exhaustive(0, "global", (1, 1, 1), False)),
    ],
)
def test_forward_in_clusters(stages, params_in, waves, sums_ahead):
    """In place of clusters, blocks of two warpgroups, each of which goes through several rows."""
    arrays = inputs("layer_norm", (5, 1024), "float32", "residual gate")
    dtype = "float32"
    options = "layer_norm", True, 1e-5, 0.0, None, "silu", True, 1024, dtype, dtype, "interpret"
    with check.in_kernels():
        row = long_row(1024, 4, 4, 2, 2)
        assert (row.warpgroups, row.windows_per_warpgroup) == (2, 2)
        tile = tiles.NormForwardTile(row, 2, stages, params_in, waves, sums_ahead)
        got = launch_fwd(NormOptions(*options), **arrays, tile=tile)[:2]
    want = jaxkern.layer_norm(**arrays, implementation="xla")
    for a, b in zip(got, want, strict=True):
        check.assert_close(a, b, 1e-6)


@pytest.mark.parametrize("n", [2048, 1792])
@pytest.mark.parametrize(("stages", "clusters"), [(1, 0), exhaustive(0, 0), exhaustive(2, 2)])
@EACH
def test_forward_reads_again(op, n, stages, clusters):
    """A row is not held in registers, but read for each of its sums and for its output."""
    arrays = inputs(op, (5, n), "float32", "residual gate")
    dtype = "float32"
    options = op, op == "layer_norm", 1e-5, 0.0, None, "silu", True, n, dtype, dtype, "interpret"
    with check.in_kernels():
        row = LongRow(RowWindows(n, 512, 4, 4), n, 2, 1)
        tile = tiles.NormForwardTile(row, clusters, stages, "global", keep=False)
        named = {"bias": None} | arrays
        got = launch_fwd(NormOptions(*options), **named, tile=tile)[:2]
    want = OPS[op](**arrays, eps=1e-5, implementation="xla")
    for a, b in zip(got, want, strict=True):
        check.assert_close(a, b, 1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("n", [256, 1000, 1024, 4096, 8192, 16384, 65536, 262144])
@EACH
def test_norm_same_bits(op, n):
    arrays = inputs(op, (400, n), "bfloat16", "gate")
    norm = lambda a: OPS[op](**a, implementation="mosaic")
    step = jax.jit(lambda a: jax.vjp(norm, a)[1](a["x"]))
    check.assert_same_bits(lambda: step(arrays))


@pytest.mark.compiled
@pytest.mark.large
@pytest.mark.parametrize(
    ("op", "shape"),
    [("layer_norm", ((1 << 19) + 3, 4352)), ("silu_and_mul", ((1 << 17) + 3, 16896))],
)
def test_beyond_int32(op, shape):
    """More than 2³¹ elements: the last rows are right."""
    f, m = getattr(jaxkern, op), shape[0]
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    out, vjp = jax.jit(lambda x: jax.vjp(f, x))(x)
    dout = jnp.cos(out)
    dx = jax.jit(lambda vjp, dout: vjp(dout)[0])(vjp, dout)
    for rows in (slice(0, 5), slice(m // 2, m // 2 + 5), slice(m - 5, m)):
        want, want_vjp = jax.vjp(functools.partial(f, implementation="xla"), x[rows])
        check.assert_close(out[rows], want, 2.0**-9)
        check.assert_close(dx[rows], want_vjp(dout[rows])[0], 2.0**-9)


# Transformations and meshes


def rms_norm_of(x, weight, implementation="xla"):
    options = {"eps": 1e-3, "weight_offset": 0.5, "implementation": implementation}
    return jaxkern.rms_norm(x, weight, **options)


def arrays_of(op, extra=""):
    return lambda key: tuple(inputs(op, (8, 2, 256), "float32", extra, seed=3).values())


RMS_NORM = check.Op(
    name="rms_norm",
    call=rms_norm_of,
    reference=rms_norm_of,
    arrays=arrays_of("rms_norm"),
    kernels=("rms_norm_fwd", "rms_norm_bwd"),
    axes="mtd d -> mtd",
    features="d",
    all_reduces=1,
    vmaps=[(0, None), (1, 0)],
)


def layer_norm_of(x, weight, bias, residual, gate, implementation="xla"):
    """Everything at once, as one array."""
    options = {"eps": 1e-3, "weight_offset": 0.5, "activation": "silu", "group_size": 128}
    options |= {"gate_activation": "sigmoid", "implementation": implementation}
    out, h = jaxkern.layer_norm(x, weight, bias, residual=residual, gate=gate, **options)
    return out + h


LAYER_NORM = dataclasses.replace(
    RMS_NORM,
    name="layer_norm",
    call=layer_norm_of,
    reference=layer_norm_of,
    arrays=arrays_of("layer_norm", "residual gate"),
    kernels=("layer_norm_fwd", "layer_norm_bwd"),
    axes="mtd d d mtd mtd -> mtd",
    vmaps=[(None, 0, None, None, 0), (1, 0, 0, 1, 1)],
)
test_norm_transformations = check.transformations(RMS_NORM, LAYER_NORM)


@pytest.mark.parametrize(
    ("op", "group_size", "gathers", "kind"),
    [
        ("layer_norm", 512, False, AxisType.Auto),
        ("rms_norm", 160, True, AxisType.Auto),
        *(exhaustive("rms_norm", size, False, AxisType.Auto) for size in (None, 128)),
        *(exhaustive("layer_norm", size, False, AxisType.Explicit) for size in (256, 512, 1024)),
        *(exhaustive("rms_norm", n, bool(n), AxisType.Explicit) for n in (None, 160)),
    ],
)
def test_rows_that_devices_share(op, group_size, gathers, kind):
    """Parts have several groups, or several have one; the sums of rows are all that is added up."""
    width = 800 if gathers else 1024
    mesh = check.mesh_of(kind, 4)
    names = "residual gate" + (" bias" if op == "rms_norm" else "")
    arrays = inputs(op, (6, width), "float32", names, seed=5)

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays, implementation):
        options = {"group_size": group_size, "implementation": implementation}
        out, vjp = jax.vjp(lambda a: OPS[op](**a, norm_before_gate=False, **options), arrays)
        return out, vjp(jax.tree.map(jnp.sin, out))

    spec = lambda a: PartitionSpec(*[None] * (a.ndim - 1), "x")
    placed = {n: jax.device_put(a, NamedSharding(mesh, spec(a))) for n, a in arrays.items()}
    kernel_call.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="groups of 160") if gathers else nullcontext():
        split = run.lower(placed, None).compile()
    assert (" all-gather(" in (split.as_text() or "")) == gathers
    check.assert_close(split(placed), run(arrays, "xla"), 2e-5)
