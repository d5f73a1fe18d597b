"""cross_entropy and linear_cross_entropy: cases for the common suite, and what is their own."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.ops.cross_entropy import passes
from jaxkern.ops.cross_entropy.rows import Rows, Terms
from jaxkern.ops.cross_entropy.tiles import shares_of
from tests import check
from tests.losses import (
    IGNORED,
    OPTIONS,
    SMALLEST,
    inputs,
    oracle,
    oracle_of_logits,
    plain,
    plain_of_logits,
)


@pytest.fixture(scope="module", autouse=True)
def without_tf32():
    """GPUs multiply fp32 as such."""
    with jax.default_matmul_precision("highest"):
        yield


def of_rows(call, **fixed):
    """`call` with labels by keyword, giving losses and lse of rows."""

    def run(*arrays, labels, implementation=None, **options):
        out = call(
            *arrays,
            labels=labels,
            implementation=implementation,
            reduction="none",
            return_lse=True,
            **fixed,
            **options,
        )
        return out

    return run


LINEAR = of_rows(
    lambda x, weight, bias, **options: jaxkern.linear_cross_entropy(x, weight, bias=bias, **options)
)
IN_PARTS = of_rows(
    lambda x, weight, bias, **options: jaxkern.linear_cross_entropy(
        x, weight, bias=bias, **options
    ),
    memory=SMALLEST,
)
LOGITS = of_rows(jaxkern.cross_entropy)


def accurate(call, plain, oracle, arrays, labels, implementation, options):
    check.check_accuracy(
        lambda *a, implementation: call(
            *a, labels=labels, implementation=implementation, **options
        ),
        functools.partial(plain, labels=labels, **options),
        functools.partial(oracle, labels=labels, **options),
        arrays,
        implementation,
        dtypes=["float32", "float32"],
    )


DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
EVERY = pytest.mark.parametrize(
    ("call", "implementation"),
    [(LINEAR, None), (LINEAR, "xla"), (IN_PARTS, None), (LINEAR, "mosaic"), (IN_PARTS, "mosaic")],
    ids=["at once", "plain JAX", "in parts", "by kernels", "in parts by kernels"],
)


@pytest.mark.newest
@DTYPES
@EACH_OPTION
@EVERY
def test_linear_cross_entropy_accuracy(call, implementation, dtype, options):
    *arrays, labels = inputs((3, 7), 24, 300, dtype)
    accurate(call, plain, oracle, arrays, labels, implementation, options)


@DTYPES
@EACH_OPTION
@pytest.mark.parametrize(
    ("implementation", "classes"),
    [
        (None, 300),
        ("xla", 300),
        ("mosaic", 300),
        ("mosaic", 256),
        ("mosaic", 13),
        ("mosaic", 4801),
        ("mosaic", 16386),
        ("mosaic", 16392),
    ],
)
def test_cross_entropy_accuracy(dtype, options, implementation, classes):
    """The kernels' shares begin anywhere, or at units; are shorter than one; take some steps."""
    rows = (2, 3) if implementation == "mosaic" else (3, 7)
    *_, labels = inputs(rows, 1, classes)
    logits = (4 * jax.random.normal(jax.random.key(5), (*rows, classes))).astype(dtype)

    def truth(logits, dloss, dlse, **options):
        results, dlogits = oracle_of_logits(logits, dloss, dlse, **options)
        return results, (dlogits,)

    accurate(LOGITS, plain_of_logits, truth, (logits,), labels, implementation, options)


@pytest.mark.parametrize(
    ("rows", "classes", "shares"),
    [
        (8192, 50304, 1),
        (8192, 65536, 2),
        (8192, 128256, 2),
        (8192, 256000, 4),
        (8192, 151643, 1),
        (512, 50304, 2),
        (512, 50280, 3),
        (16, 50280, 15),
        (16, 50368, 8),
        (16, 50257, 1),
        (16, 16384, 2),
        (16, 128256, 16),
        (1, 8192, 1),
    ],
)
def test_few_and_long_rows_are_cut_in_shares_of_whole_units_where_they_can(rows, classes, shares):
    assert shares_of(rows, classes, 8) == shares


def test_logits_beyond_what_kernels_count():
    """They count elements where rows have more than whole units; of a device, those it has."""
    logits = lambda classes: jax.ShapeDtypeStruct((300_000, classes), jnp.bfloat16)
    assert passes.unsupported(logits(32_008)) is None
    odd = str(passes.unsupported(logits(16_004)))
    assert "4801200000 elements can be accessed 1 at a time" in odd
    terms = Terms.checked(-100, 0.0, 0.0, None)
    for of in (passes.FORWARD, passes.BACKWARD):
        unfit = functools.partial(of.unfit, Rows(terms, 32_008, "auto"))
        assert "4801200000 elements" in unfit(logits(16_004))
        assert unfit(logits(32_008)) is None


@pytest.mark.compiled
@DTYPES
@EACH_OPTION
@pytest.mark.parametrize("classes", [50257, 50280, 50304, 128256])
def test_cross_entropy_accuracy_compiled(dtype, options, classes):
    test_cross_entropy_accuracy(dtype, options, "mosaic", classes)


@pytest.mark.compiled
@pytest.mark.parametrize("memory", [None, 2**22])
def test_kernels_give_the_same_bits_again(memory):
    x, weight, bias, labels = inputs((64,), 128, 50257, "bfloat16")
    run = lambda x, weight: jaxkern.linear_cross_entropy(
        x, weight, labels, bias, memory=memory, implementation="mosaic"
    )
    compiled = jax.jit(jax.value_and_grad(run, (0, 1)))
    check.assert_same_bits(lambda: compiled(x, weight))


def losses(call, **options):
    """A function of arrays and labels that returns the losses of rows alone."""

    def run(*arrays, implementation=None):
        *arrays, labels = arrays
        return call(*arrays, labels=labels, implementation=implementation, **options)[0]

    return run


def in_plain_jax(*arrays):
    *arrays, labels = arrays
    return plain(*arrays, labels=labels, **OPTIONS["all"])[0]


AT_ONCE = check.Op(
    name="linear_cross_entropy",
    call=losses(LINEAR, **OPTIONS["all"]),
    reference=in_plain_jax,
    arrays=lambda key: inputs((4, 2), 8, 256, key=key),
    kernels=("cross_entropy_fwd", "cross_entropy_bwd"),
    axes="mtk kv v mt -> mt",
    features="k",
    channels="v",
    all_reduces=1,
    vmaps=[(0, None, None, 0), (None, 0, 0, None), (1, 0, 0, 1)],
    cells=[
        *((name, None) for name in check.TRANSFORMATIONS if name not in (*check.ALONE, "scan")),
        *((name, "xla") for name in ("jvp", "explicit mesh", "rows and channels split")),
        *((name, "mosaic") for name in ("grad", "vmap(grad)", "checkpoint")),
        ("kernels lowered", "mosaic"),
        ("mesh axis names", "mosaic"),
    ],
)
SPLIT = "auto mesh", "explicit mesh", "vmap(grad) on explicit mesh", "rows and channels split"
AS_PARTS = dataclasses.replace(
    AT_ONCE,
    name="linear_cross_entropy, in parts",
    call=losses(IN_PARTS, **OPTIONS["all"]),
    features="",
    cells=[
        (name, None)
        for name in ("grad", "vmap(grad)", "grad(grad)", "shard_map", "shard_map unchecked", *SPLIT)
    ],
)


def logits_and_labels(key):
    """Logits (4, 2, 256) and labels."""
    *_, bias, labels = inputs((4, 2), 1, 256, key=key)
    return bias * jax.random.normal(key, (4, 2, 256)), labels


OF_LOGITS = dataclasses.replace(
    AT_ONCE,
    name="cross_entropy",
    call=losses(LOGITS, **OPTIONS["all"]),
    reference=lambda x, labels: plain_of_logits(x, labels=labels, **OPTIONS["all"])[0],
    arrays=logits_and_labels,
    axes="mtv mt -> mt",
    features="",
    all_reduces=0,
    vmaps=[(0, None), (1, 1)],
    cells=[
        *((name, None) for name in ("grad", "vmap(grad)", "grad(grad)", "jvp", "shard_map")),
        *((name, None) for name in ("auto mesh", "explicit mesh", "rows and channels split")),
        *((name, "xla") for name in ("jvp", "explicit mesh", "rows and channels split")),
        *((name, "mosaic") for name in ("grad", "vmap(grad)", "grad(grad)")),
        ("kernels lowered", "mosaic"),
        ("mesh axis names", "mosaic"),
    ],
)
test_cross_entropy_transformations = check.transformations(AT_ONCE, AS_PARTS, OF_LOGITS)


@EVERY
def test_ignored_rows_may_hold_nan(call, implementation):
    x, weight, bias, labels = inputs((10,), 8, 300)
    dirty = jnp.where((labels == IGNORED)[:, None], jnp.nan, x)
    clean = jnp.where((labels == IGNORED)[:, None], 0, x)

    def run(x):
        total = lambda *a: jnp.sum(sum(call(*a, labels=labels, implementation=implementation)))
        return jax.value_and_grad(total, (0, 1, 2))(x, weight, bias)

    with check.running(implementation):
        found, wanted = jax.jit(run)(dirty), jax.jit(run)(clean)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.any(found[1][0][::5])


@EVERY
@pytest.mark.parametrize("label", [300, -1, 2**31 - 1])
def test_a_label_that_is_no_class_gives_nan(call, implementation, label):
    x, weight, bias, labels = inputs((10,), 8, 300)
    labels = labels.at[3].set(label)
    with check.running(implementation):
        losses, lse = call(x, weight, bias, labels=labels, implementation=implementation)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(10) == 3)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_of_other_dtypes(dtype):
    """Of more classes than the dtype can count."""
    x, weight, bias, _ = inputs((4,), 8, 300)
    labels = jnp.array([3, 0, 100, 127])
    for call in (LINEAR, IN_PARTS):
        got, want = (call(x, weight, bias, labels=y) for y in (labels.astype(dtype), labels))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_labels_of_64_bits_are_not_cut(dtype):
    with jax.enable_x64(True):
        labels = jnp.array([1, 2**32 + 1], dtype)
        losses = jaxkern.cross_entropy(jnp.zeros((2, 8)), labels, reduction="none")
    assert np.isnan(losses).tolist() == [False, True]


@EVERY
def test_large_and_infinite_logits(call, implementation):
    """Classes that a user has masked by −∞, among them all of a part, and logits of 1e4."""
    bias = jnp.zeros(300).at[:140].set(-jnp.inf).at[7].set(1e4).at[299].set(9e3)
    x, weight, labels = jnp.zeros((3, 8)), jnp.ones((8, 300)), jnp.array([7, 299, 200])
    run = lambda b: call(x, weight, b, labels=labels, implementation=implementation)
    with check.running(implementation):
        losses, lse = run(bias)
        dbias = jax.jit(jax.grad(lambda b: run(b)[0].sum()))(bias)
    np.testing.assert_allclose(losses, [0, 1e3, 1e4])
    np.testing.assert_allclose(lse, 1e4)
    np.testing.assert_allclose(dbias[jnp.array([0, 7, 200, 299])], [0, 2, -1, -1])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("memory", [None, SMALLEST])
def test_reductions(reduction, memory):
    x, weight, bias, labels = inputs((3, 5), 8, 300)
    run = functools.partial(jaxkern.linear_cross_entropy, x, weight, labels, bias, memory=memory)
    rows = run(reduction="none")
    want = rows.sum() / (1 if reduction == "sum" else 12)
    np.testing.assert_allclose(run(reduction=reduction), want, rtol=1e-6)


@pytest.mark.parametrize("memory", [None, SMALLEST])
def test_no_row_counts(memory):
    x, weight, bias, labels = inputs((4,), 8, 300)
    ignored = jnp.full_like(labels, 7)
    run = lambda x: jaxkern.linear_cross_entropy(
        x, weight, ignored, bias, ignore_index=7, memory=memory
    )
    loss, dx = jax.value_and_grad(run)(x)
    assert loss == 0
    assert not dx.any()


@pytest.mark.parametrize("memory", [None, SMALLEST])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_accumulator(memory, dtype):
    """Its gradient is its value plus the gradient of the weight, which has none itself."""
    x, weight, bias, labels = inputs((12,), 8, 300, dtype)
    sums = jax.random.normal(jax.random.key(9), weight.shape)
    run = functools.partial(jaxkern.linear_cross_entropy, labels=labels, memory=memory)
    of = lambda w, a: run(x, w, bias=bias, accumulator=a)
    dweight, total = jax.jit(jax.grad(of, (0, 1)))(weight, sums)
    assert not dweight.any()
    assert total.dtype == jnp.float32
    wide = jax.grad(lambda w: run(x, w.astype(dtype), bias=bias))(weight.astype(jnp.float32))
    check.assert_close(total - sums, wide, 1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("memory", "logits"),
    [(None, 1), (2 * 64 * 1024, 1 / 4), (2 * 64 * 512, 1 / 8), (SMALLEST, 1 / 32)],
)
def test_memory(memory, logits):
    """What a program takes beside arguments and results, in logits in the dtype of x."""
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 16), (16, 4096))]
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    run = lambda x, w, y: jaxkern.linear_cross_entropy(x, w, y, memory=memory)
    compiled = jax.jit(jax.grad(run, (0, 1))).lower(*types, labels).compile()
    analysis: Any = compiled.memory_analysis()
    taken = analysis.temp_size_in_bytes / (2 * 64 * 4096)
    # A CPU multiplies in float32, and sums need some: less than 6 times the logits of a part.
    assert taken < 6 * logits
    assert memory is None or taken < 1


def test_parts_are_as_few_as_memory_allows():
    x, weight, _, labels = inputs((16,), 8, 1000)
    run = lambda memory: jax.make_jaxpr(
        lambda x: jaxkern.linear_cross_entropy(x, weight, labels, memory=memory)
    )(x)
    for memory, classes in ((1, 128), (16 * 4 * 300, 256), (16 * 4 * 999, 512)):
        assert f"f32[16,{classes}]" in str(run(memory))
    assert "f32[16,1000]" in str(run(16 * 4 * 1000))


@pytest.mark.parametrize("memory", [None, SMALLEST])
@pytest.mark.parametrize("shape", [(0, 4, 300), (3, 0, 300), (2, 4, 1)])
def test_empty(shape, memory):
    rows, k, classes = shape
    x, weight = jnp.ones((rows, k), jnp.bfloat16), jnp.ones((k, classes))
    run = lambda x, w: jaxkern.linear_cross_entropy(x, w, jnp.zeros(rows, jnp.int8), memory=memory)
    loss, grads = jax.value_and_grad(run, (0, 1))(x, weight)
    np.testing.assert_allclose(loss, np.log(classes) if rows else 0, rtol=1e-6)
    for grad, like in zip(grads, (x, weight), strict=True):
        assert (grad.shape, grad.dtype) == (like.shape, like.dtype)
        assert np.isfinite(np.float32(grad)).all()


WRONG = [
    ({"labels": jnp.zeros(4)}, TypeError, "labels must be integers, got float32; .* optax"),
    ({"labels": jnp.zeros((4, 1), int)}, ValueError, r"labels must have shape \(4,\)"),
    ({"ignore_index": 0.5}, TypeError, "ignore_index must be an int, got 0.5"),
    ({"ignore_index": 2**31}, ValueError, "ignore_index must be an int of 32 bits"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be at most 1"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be at least 0"),
    ({"z_loss": "some"}, TypeError, "z_loss must be a Python number, got 'some'"),
    ({"logit_softcap": 0}, ValueError, "logit_softcap must be above 0 or None, got 0"),
    ({"reduction": "max"}, ValueError, '"mean", "sum" or "none", got .max'),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_calls_of_both(options, error, message):
    x, weight, _, labels = inputs((4,), 8, 12)
    options = {"labels": labels, **options}
    with pytest.raises(error, match=message):
        jaxkern.cross_entropy(x, **options)
    with pytest.raises(error, match=message):
        jaxkern.linear_cross_entropy(x, weight, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": jnp.ones((12, 8))}, ValueError, r"goes in as weight\.T"),
        ({"bias": jnp.ones(8)}, ValueError, r"bias must have shape \(12,\)"),
        ({"memory": 0}, ValueError, "memory must be at least 1, got 0"),
        ({"memory": 0.5}, TypeError, "memory must be an int or None, got 0.5"),
        ({"memory": True}, TypeError, "memory must be an int or None, got True"),
        (
            {"accumulator": jnp.ones((8, 12), jnp.bfloat16)},
            TypeError,
            "accumulator must be float32",
        ),
    ],
)
def test_wrong_calls(options, error, message):
    x, weight, _, labels = inputs((4,), 8, 12)
    with pytest.raises(error, match=message):
        jaxkern.linear_cross_entropy(x, **{"weight": weight, "labels": labels, **options})
