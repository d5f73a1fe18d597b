"""cross_entropy and linear_cross_entropy: cases for the common suite, and what is their own."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import jaxkern
from jaxkern.ops.cross_entropy import op
from jaxkern.ops.cross_entropy.kernel import shares_of
from jaxkern.ops.cross_entropy.reference import LossOptions, Terms
from tests import check
from tests.pairs import combinations

IGNORED = -100
SMALLEST = 1
"""Bytes of memory that leave a part the fewest classes that it may have."""
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0},
    "plain": {},
}


@pytest.fixture(scope="module", autouse=True)
def without_tf32():
    """GPUs multiply fp32 as such."""
    with jax.default_matmul_precision("highest"):
        yield


def inputs(rows, k, classes, dtype="float32", seed=0):
    """x, weight, bias and labels, every fifth of which is ignored."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape)
    arrays = draw(*rows, k), draw(k, classes) / np.sqrt(k), draw(classes)
    labels = rng.integers(0, classes, rows, np.int32)
    labels.reshape(-1)[::5] = IGNORED
    return *(jnp.asarray(v.astype(jnp.dtype(dtype))) for v in arrays), jnp.asarray(labels)


def oracle_of_logits(
    logits, dloss, dlse, *, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None
):
    """Losses and lse of rows, and the gradient of the logits, in float64."""
    labels, count = np.asarray(labels), logits.shape[-1]
    slope: Any = 1.0
    if logit_softcap is not None:
        slope = 1 / np.cosh(logits / logit_softcap) ** 2
        logits = logit_softcap * np.tanh(logits / logit_softcap)
    lse = logsumexp(logits, axis=-1)
    kept, onto = labels != IGNORED, labels[..., None] == np.arange(count)
    target = (1 - label_smoothing) * onto + label_smoothing / count
    losses = lse - (target * logits).sum(-1) + z_loss * lse**2
    softmax = np.exp(logits - lse[..., None])
    dlogits = (dloss * (1 + 2 * z_loss * lse) + dlse)[..., None] * softmax
    dlogits = (dlogits - dloss[..., None] * target) * slope * kept[..., None]
    return (losses * kept, lse * kept), dlogits


def oracle(x, weight, bias, dloss, dlse, **options):
    results, du = oracle_of_logits(x @ weight + bias, dloss, dlse, **options)
    rows = tuple(range(x.ndim - 1))
    return results, (du @ weight.T, np.tensordot(x, du, [rows, rows]), du.sum(rows))


def plain_of_logits(logits, *, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None):
    """What a user would write, from logits in their dtype on."""
    logits = logits.astype(jnp.float32)
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    count = logits.shape[-1]
    target = (1 - label_smoothing) * jax.nn.one_hot(labels, count) + label_smoothing / count
    losses = lse - (target * logits).sum(-1) + z_loss * lse**2
    return jnp.where(labels == IGNORED, 0, losses), jnp.where(labels == IGNORED, 0, lse)


def plain(x, weight, bias, **options):
    return plain_of_logits(x @ weight.astype(x.dtype) + bias.astype(x.dtype), **options)


def linear(x, weight, bias, *, labels, **options):
    return jaxkern.linear_cross_entropy(x, weight, labels, bias, **options)


# Of arrays and labels, giving losses and lse of rows.
LOGITS, LINEAR = (
    functools.partial(call, reduction="none", return_lse=True)
    for call in (jaxkern.cross_entropy, linear)
)
IN_PARTS = functools.partial(LINEAR, memory=SMALLEST)
WAYS = {
    "at once": (LINEAR, None),
    "plain JAX": (LINEAR, "xla"),
    "in parts": (IN_PARTS, None),
    "by kernels": (LINEAR, "mosaic"),
    "in parts by kernels": (IN_PARTS, "mosaic"),
}
EACH_WAY = combinations("way", WAYS, few=4)
DTYPES = ["bfloat16", "float16", "float32"]


FLOATS = ["float32", "float32"]


@combinations("way dtype options", WAYS, DTYPES, OPTIONS, few=4)
def test_linear_cross_entropy_accuracy(way, dtype, options):
    call, implementation = way
    *arrays, labels = inputs((3, 7), 24, 300, dtype)
    options = options | {"labels": labels, "dtypes": FLOATS}
    check.check_accuracy(call, plain, oracle, tuple(arrays), implementation, **options)


def accurate_of_logits(classes, implementation, dtype, options):
    rows = (2, 2) if implementation == "mosaic" else (3, 7)
    *_, labels = inputs(rows, 1, classes)
    logits = 4 * np.random.default_rng(5).standard_normal((*rows, classes))

    def truth(*arrays, **options):
        results, dlogits = oracle_of_logits(*arrays, **options)
        return results, (dlogits,)

    arrays = (jnp.asarray(logits.astype(jnp.dtype(dtype))),)
    options = options | {"labels": labels, "dtypes": FLOATS}
    check.check_accuracy(LOGITS, plain_of_logits, truth, arrays, implementation, **options)


OF_LOGITS = {"xla": (300, "xla"), "auto": (300, None)}
# Shares of the kernels begin anywhere, or at units; are shorter than one; take some steps.
OF_LOGITS |= {f"kernels {n}": (n, "mosaic") for n in (16386, 13, 4801, 16392)}


@combinations("of dtype options", OF_LOGITS, DTYPES, OPTIONS, few=5)
def test_cross_entropy_accuracy(of, dtype, options):
    accurate_of_logits(*of, dtype, options)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("classes", [50257, 50280, 50304, 128256])
def test_cross_entropy_accuracy_compiled(dtype, options, classes):
    accurate_of_logits(classes, "mosaic", dtype, options)


SHARES = {
    8192: {50304: 1, 65536: 2, 128256: 2, 256000: 4, 151643: 1},
    512: {50304: 2, 50280: 3},
    16: {50280: 15, 50368: 8, 50257: 1, 16384: 2, 128256: 16},
    1: {8192: 1},
}


@pytest.mark.parametrize("rows", SHARES)
def test_few_and_long_rows_are_cut_in_shares_of_whole_units_where_they_can(rows):
    assert {classes: shares_of(rows, classes, 8) for classes in SHARES[rows]} == SHARES[rows]


def test_logits_beyond_what_kernels_count():
    """They count elements where rows have more than whole units; of a device, those it has."""
    logits = lambda classes: jax.ShapeDtypeStruct((300_000, classes), jnp.bfloat16)
    assert op.unsupported(logits(32_008)) is None
    odd = str(op.unsupported(logits(16_004)))
    assert "4801200000 elements can be accessed 1 at a time" in odd
    terms = Terms.checked(-100, 0.0, 0.0, None)
    for of in (op.FORWARD, op.BACKWARD):
        unfit = functools.partial(of.unfit, LossOptions(terms, 32_008, "auto"))
        assert "4801200000 elements" in unfit(logits(16_004))
        assert unfit(logits(32_008)) is None


def losses(call):
    """A function of arrays and labels that returns the losses of rows alone."""
    return lambda *a, **how: call(*a[:-1], labels=a[-1], **how, **OPTIONS["all"])[0]


def cells(chosen, mosaic):
    plain, kernels = ["jvp", "explicit mesh", "rows and channels split"], [*mosaic, *OF_KERNELS]
    by = {None: chosen, "xla": plain, "mosaic": kernels}
    return [(name, implementation) for implementation, names in by.items() for name in names]


OF_KERNELS = "kernels lowered", "mesh axis names"
SPLIT = "auto mesh", "explicit mesh", "rows and channels split"
AT_ONCE = check.Op(
    name="linear_cross_entropy",
    call=losses(LINEAR),
    reference=losses(plain),
    arrays=lambda key: inputs((4, 2), 8, 256),
    kernels=("cross_entropy_fwd", "cross_entropy_bwd"),
    axes="mtk kv v mt -> mt",
    features="k",
    channels="v",
    all_reduces=1,
    vmaps=[(0, None, None, 0), (None, 0, 0, None), (1, 0, 0, 1)],
    cells=cells(
        [name for name in check.TRANSFORMATIONS if name not in (*check.ALONE, "scan")],
        ["grad", "vmap(grad)", "checkpoint"],
    ),
)
AS_PARTS = dataclasses.replace(
    AT_ONCE,
    name="linear_cross_entropy, in parts",
    call=losses(IN_PARTS),
    features="",
    cells=[
        *((name, None) for name in ("grad", "vmap(grad)", "grad(grad)", "shard_map", *SPLIT)),
        *((name, None) for name in ("shard_map unchecked", "vmap(grad) on explicit mesh")),
    ],
)


LOGITS_ALONE = dataclasses.replace(
    AT_ONCE,
    name="cross_entropy",
    call=losses(LOGITS),
    reference=losses(plain_of_logits),
    arrays=lambda key: inputs((4, 2), 256, 256)[::3],
    axes="mtv mt -> mt",
    features="",
    all_reduces=0,
    vmaps=[(0, None), (1, 1)],
    cells=cells(
        ["grad", "vmap(grad)", "grad(grad)", "jvp", "shard_map", *SPLIT],
        ["grad", "vmap(grad)", "grad(grad)"],
    ),
)
test_cross_entropy_transformations = check.transformations(AT_ONCE, AS_PARTS, LOGITS_ALONE)


def run(way, arrays, labels, cotangents):
    call, implementation = way
    options = {"labels": labels, "implementation": implementation}
    with check.running(implementation):
        return check.value_and_grads(call, arrays, cotangents, **options)


ONES, ZEROS = np.ones(10, np.float32), np.zeros(10, np.float32)


@EACH_WAY
def test_labels_that_are_no_classes(way):
    """Ignored rows may hold NaN; rows whose label is unknown have the loss NaN."""
    x, weight, bias, labels = inputs((10,), 8, 300)
    ignored = np.arange(10) % 5 == 0
    in_ignored = lambda value: np.where(ignored[:, None], np.float32(value), x)
    dirty, clean = (
        run(way, (in_ignored(v), weight, bias), labels, (ONES, ONES)) for v in (np.nan, 0)
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.any(dirty[1][0][ignored])
    unknown = np.array([3, 4, 6])
    labels = labels.at[unknown].set(np.array([300, -1, 2**31 - 1], np.int32))
    (losses, lse), (dx, *_) = run(way, (x, weight, bias), labels, (ONES, ZEROS))
    for rows in (losses, dx.sum(-1)):
        np.testing.assert_array_equal(np.isnan(rows).nonzero()[0], unknown)
    assert np.isfinite(lse).all()


@EACH_WAY
def test_large_and_infinite_logits(way):
    """Classes that a user has masked by −∞, among them all of a part, and logits of 1e4."""
    bias = np.zeros(300, np.float32)
    bias[:140], bias[7], bias[299] = -np.inf, 1e4, 9e3
    labels = jnp.asarray([7, 299, 200, *(IGNORED,) * 7], jnp.int32)
    arrays = np.zeros((10, 8), np.float32), np.ones((8, 300), np.float32), bias
    (losses, lse), (*_, dbias) = run(way, arrays, labels, (ONES, ZEROS))
    np.testing.assert_allclose(losses[:3], [0, 1e3, 1e4])
    np.testing.assert_allclose(lse[:3], 1e4)
    np.testing.assert_allclose(dbias[np.array([0, 7, 200, 299])], [0, 2, -1, -1])


def test_labels_of_other_dtypes():
    """Of more classes than the dtype can count."""
    logits = inputs((4,), 300, 1)[0]
    dtypes = ["int32", "int8", "uint8", "int16", "uint32"]
    labels = [np.array([3, 0, 100, 127], dtype) for dtype in dtypes]
    want, *others = jax.jit(lambda labels: [LOGITS(logits, labels=y) for y in labels])(labels)
    for got in others:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("ignored", [-100, -1])
def test_labels_at_the_ends_of_their_dtype_are_no_class(dtype, ignored):
    """They wrap around neither to a class nor to the label of ignored rows."""
    with jax.enable_x64(True):
        info = jnp.iinfo(dtype)
        around = [2**32 + 1] * (info.bits == 64) + [info.max + 1 + ignored] * (info.min == 0)
        labels = jnp.array([1, info.min or info.max, info.max, *around], dtype)
        logits = jnp.zeros((len(labels), 8))
        losses = jaxkern.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    assert np.isnan(losses).tolist() == [False] + [True] * (len(labels) - 1)


@pytest.mark.parametrize("memory", [None, SMALLEST])
def test_reductions(memory):
    """The mean is that of the rows that are not ignored, and 0 where all are."""
    x, weight, bias, labels = inputs((3, 5), 8, 300)
    labels = np.where(labels == IGNORED, 7, labels)

    @jax.jit
    def run(x, labels):
        of = lambda x, reduction: jaxkern.linear_cross_entropy(
            x, weight, labels, bias, memory=memory, ignore_index=7, reduction=reduction
        )
        return of(x, "none"), of(x, "sum"), jax.value_and_grad(of)(x, "mean")

    rows, total, (mean, _) = run(x, labels)
    np.testing.assert_array_equal(rows == 0, labels == 7)
    np.testing.assert_allclose(total, rows.sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, rows.sum() / (labels != 7).sum(), rtol=1e-6)
    *_, (mean, dx) = run(x, np.full_like(labels, 7))
    assert mean == 0
    assert not dx.any()


@combinations("memory dtype", [None, SMALLEST], ["float32", "bfloat16"])
def test_accumulator(memory, dtype):
    """Its gradient is its value plus the gradient of the weight, not rounded, which has none."""
    x, weight, bias, labels = inputs((12,), 8, 300, dtype)
    loss = functools.partial(jaxkern.linear_cross_entropy, labels=labels, memory=memory)
    of = lambda w, a: loss(x, w, bias=bias, accumulator=a)
    run = jax.jit(jax.grad(of, (0, 1)))
    sums = inputs(weight.shape[:1], weight.shape[1], 1)[0]
    (dweight, total), (_, alone) = run(weight, sums), run(weight, 0 * sums)
    assert not dweight.any()
    assert total.dtype == jnp.float32
    wide = [np.asarray(v).astype(np.float64) for v in (x, weight, bias)]
    dloss = np.full(12, 1 / (labels != IGNORED).sum())
    _, (_, want, _) = oracle(*wide, dloss, 0 * dloss, labels=labels)
    check.assert_close(total - sums, want, 1e-2 if dtype == "bfloat16" else 1e-5)
    assert np.mean(alone != alone.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


LOGITS_OF = {None: 1, SMALLEST: 1 / 32, 2 * 64 * 1024: 1 / 4, 2 * 64 * 512: 1 / 8}


@combinations("memory", [*LOGITS_OF], few=2)
def test_memory(memory):
    """What a program takes beside arguments and results, in logits in the dtype of x."""
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 16), (16, 4096))]
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    run = lambda x, w, y: jaxkern.linear_cross_entropy(x, w, y, memory=memory)
    analysis: Any = jax.jit(jax.grad(run, (0, 1))).lower(*types, labels).compile().memory_analysis()
    taken = analysis.temp_size_in_bytes / (2 * 64 * 4096)
    # A CPU multiplies in float32, and sums need some: less than 6 times the logits of a part.
    assert taken < 6 * LOGITS_OF[memory]
    assert memory is None or taken < 1


def test_parts_are_as_few_as_memory_allows():
    x, weight, _, labels = inputs((16,), 8, 1000)
    run = lambda memory: jax.make_jaxpr(
        lambda x: jaxkern.linear_cross_entropy(x, weight, labels, memory=memory)
    )(x)
    for memory, classes in ((1, 128), (16 * 4 * 300, 256), (16 * 4 * 999, 512)):
        assert f"f32[16,{classes}]" in str(run(memory))
    assert "f32[16,1000]" in str(run(16 * 4 * 1000))


@pytest.mark.parametrize("shape", [(0, 4, 300), (3, 0, 300), (2, 4, 1)])
def test_parts_of_nothing(shape):
    rows, k, classes = shape
    x, weight = jnp.ones((rows, k), jnp.bfloat16), jnp.ones((k, classes))
    run = lambda x, w: jaxkern.linear_cross_entropy(
        x, w, jnp.zeros(rows, jnp.int8), memory=SMALLEST
    )
    loss, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(x, weight)
    np.testing.assert_allclose(loss, np.log(classes) if rows else 0, rtol=1e-6)
    for grad, like in zip(grads, (x, weight), strict=True):
        assert (grad.shape, grad.dtype) == (like.shape, like.dtype)
        assert np.isfinite(np.float32(grad)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": np.zeros(4)}, TypeError, "labels must be integers, got float32; .* optax"),
        ({"labels": np.zeros((4, 1), int)}, ValueError, r"labels must have shape \(4,\)"),
        ({"ignore_index": 2**31}, ValueError, "ignore_index must be an int of 32 bits"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be at most 1"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be at least 0"),
        ({"logit_softcap": 0}, ValueError, "logit_softcap must be above 0 or None, got 0"),
        ({"reduction": "max"}, ValueError, '"mean", "sum" or "none", got .max'),
        ({"weight": np.ones((12, 8))}, ValueError, r"goes in as weight\.T"),
        ({"bias": np.ones(8)}, ValueError, r"bias must have shape \(12,\)"),
        ({"memory": 0}, ValueError, "memory must be at least 1, got 0"),
        ({"accumulator": np.ones((8, 12), jnp.bfloat16)}, TypeError, "accumulator must be float32"),
    ],
)
def test_wrong_calls(change, error, message):
    x, weight, labels = np.ones((4, 8)), np.ones((8, 12)), np.zeros(4, int)
    with pytest.raises(error, match=message):
        jaxkern.linear_cross_entropy(**{"x": x, "weight": weight, "labels": labels, **change})
    if not change.keys() & {"weight", "bias", "memory", "accumulator"}:
        with pytest.raises(error, match=message):
            jaxkern.cross_entropy(**{"logits": x, "labels": labels, **change})
