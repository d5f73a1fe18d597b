"""cross_entropy and linear_cross_entropy: whole, in chunks of rows, in parts of classes, split."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.ops.cross_entropy import op
from jaxkern.ops.cross_entropy.kernel import shares_of
from jaxkern.ops.cross_entropy.linear_kernel import sums_of_product
from jaxkern.ops.cross_entropy.linear_op import IN_CHUNKS, ChunkOptions
from jaxkern.ops.cross_entropy.reference import LossOptions, Terms
from tests import check
from tests.test_activations import oracle_of

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


def plain_of_logits(logits, *, labels, label_smoothing=0.0, z_loss=0.0, logit_softcap=None):
    """What a user would write, from logits in their dtype on."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if logit_softcap is not None:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    count = logits.shape[-1]
    target = (1 - label_smoothing) * jax.nn.one_hot(labels, count) + label_smoothing / count
    losses = lse - (target * logits).sum(-1) + z_loss * lse**2
    return jnp.where(labels == IGNORED, 0, losses), jnp.where(labels == IGNORED, 0, lse)


def plain(x, weight, bias, **options):
    return plain_of_logits(x @ weight.astype(x.dtype) + bias.astype(x.dtype), **options)


oracle = oracle_of(plain, 2)


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
EACH_WAY = check.combinations("way", WAYS, few=4)
NO_F16 = ["bfloat16", "float32"]
DTYPES = ["bfloat16", "float16", "float32"]


FLOATS = ["float32", "float32"]


@check.combinations("way dtype options", WAYS, DTYPES, OPTIONS, few=4)
def test_linear_cross_entropy_accuracy(way, dtype, options):
    call, implementation = way
    *arrays, labels = inputs((3, 7), 24, 300, dtype)
    options = options | {"labels": labels, "dtypes": FLOATS}
    check.check_accuracy(call, plain, oracle, tuple(arrays), implementation, **options)


def accurate_of_logits(classes, implementation, dtype, options):
    rows = (2, 2) if implementation == "mosaic" else (3, 7)
    *_, labels = inputs(rows, 1, classes)
    logits = 4 * np.random.default_rng(5).standard_normal((*rows, classes))
    arrays = (jnp.asarray(logits.astype(jnp.dtype(dtype))),)
    options, truth = options | {"labels": labels, "dtypes": FLOATS}, oracle_of(plain_of_logits, 2)
    check.check_accuracy(LOGITS, plain_of_logits, truth, arrays, implementation, **options)


OF_LOGITS = {"xla": (300, "xla"), "auto": (300, None)}
# Shares of the kernels begin anywhere, or at units; are shorter than one; take some steps.
OF_LOGITS |= {f"kernels {n}": (n, "mosaic") for n in (16386, 13, 4801, 16392)}


@check.combinations("of dtype options", OF_LOGITS, DTYPES, OPTIONS, few=5)
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
    """There are more classes than the dtype can count."""
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


@check.combinations("memory dtype", [None, SMALLEST], ["float32", "bfloat16"])
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


MEMORY = {  # rows, dtype, memory, and the most that is taken, in logits in the dtype of x
    "at once": (64, "bfloat16", None, 6),
    "in the fewest classes": (64, "bfloat16", SMALLEST, 6 / 32),
    "in chunks": (4096, "float32", 4 * 4096 * 1024, 2.1 / 4),
    "in fourths": (64, "bfloat16", 2 * 64 * 1024, 6 / 4),
    "in eighths": (64, "bfloat16", 2 * 64 * 512, 6 / 8),
}


@check.combinations("of", MEMORY, few=3)
def test_memory(of):
    """Measures what a program takes beside arguments and results.

    A CPU multiplies in float32, and sums need some: less than 6 times the logits of a part, and
    little more than those of a chunk and their gradient.
    """
    rows, dtype, memory, most = of
    types = [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, 16), (16, 4096))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    run = lambda x, w, y: jaxkern.linear_cross_entropy(x, w, y, memory=memory)
    analysis: Any = jax.jit(jax.grad(run, (0, 1))).lower(*types, labels).compile().memory_analysis()
    taken = analysis.temp_size_in_bytes / (jnp.dtype(dtype).itemsize * rows * 4096)
    assert taken < min(most, 1 if memory else most)


ALONE = {
    "one tile": ((2, 64), 64, 256, "all", False),
    "edges": ((3, 7), 24, 300, "all", True),
    "tiles": ((150,), 72, 1000, "plain", True),
    "classes of a quarter tile": ((130,), 128, 832, "all", False),
}


@check.combinations("case dtype", ALONE, ["bfloat16", "float16"], few=3)
@pytest.mark.gpu
def test_loss_without_gradient(case, dtype):
    """Sums in the product's epilogue are as accurate as those of stored logits."""
    rows, k, classes, options, biased = case
    x, weight, bias, labels = inputs(rows, k, classes, dtype)
    x, bias = 4 * x, bias if biased else None
    x = jnp.where((labels == IGNORED)[..., None], jnp.nan, x)
    options = OPTIONS[options] | {"labels": labels}
    mode = "mosaic" if check.ON_GPU else "interpret"
    arrays = tuple(np.nan_to_num(np.asarray(v, np.float32)) for v in (x, weight))
    arrays += (np.zeros(classes) if bias is None else np.asarray(bias, np.float32),)
    with jax.enable_x64(True):
        exact = plain(*(jnp.asarray(v, "float64") for v in arrays), **options)
    want = plain(*(jnp.asarray(v, dtype) for v in arrays), **options)
    of = options.get
    terms = Terms.checked(
        IGNORED, of("label_smoothing", 0.0), of("z_loss", 0.0), of("logit_softcap")
    )
    of_logits = LossOptions(terms, classes, mode)
    sums = lambda *a: sums_of_product(of_logits, *a, labels, 0)
    run = jax.jit(lambda *a: of_logits.loss(sums(*a), labels))
    with check.in_kernels():
        losses, lse = run(x, weight, bias)
        check.assert_same_bits(lambda: run(x, weight, bias))
    for name, *each in zip(("loss", "lse"), (losses, lse.value), want, exact, strict=True):
        check.at_most_twice(name, *each)


@check.combinations("memory", [None, 160 << 20, 336 << 20], few=3)
def test_only_a_gradient_stores_logits(memory):
    """Lowered for a GPU: the loss alone takes one kernel, of the whole product."""
    x, weight, _, labels = inputs((2048,), 64, 50280, "bfloat16")
    run = functools.partial(jaxkern.linear_cross_entropy, labels=labels, memory=memory)
    calls = lambda f, w=weight: [
        line for line in check.lowered(f, x, w).splitlines() if "mosaic_gpu_v2" in line
    ]
    (alone,) = calls(run)
    assert "linear_cross_entropy_fwd" in alone
    assert not any("linear_cross_entropy_fwd" in line for line in calls(jax.grad(run)))
    for classes, copied in ((50257, 1), (2**21 + 1, 0)):  # a padded copy of 6 and of 256 MiB
        other = calls(run, jax.ShapeDtypeStruct((64, classes), weight.dtype))
        assert sum("linear_cross_entropy_fwd" in line for line in other) == copied


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


# In chunks of rows

ROWS, K, CLASSES = (3, 500), 24, 300
FIRST, OTHERS = 492, 504
"""Rows of the chunks, three of them, where memory is for 520."""

AUTO, EXPLICIT = KINDS = AxisType.Auto, AxisType.Explicit
CASES = {
    "bfloat16": (ROWS, K, 520, "bfloat16"),
    "float32": (ROWS, K, 520, "float32"),
    "six chunks": ((6, 512), 64, 512, "bfloat16"),
}


def memory_for(rows, dtype="float32", classes=CLASSES):
    return rows * classes * jnp.dtype(dtype).itemsize


def plain_mean(x, weight, bias, *, labels, **options):
    return plain(x, weight, bias, labels=labels, **options)[0].sum() / (labels != IGNORED).sum()


def truth(arrays, labels, dmean=1.0, **options):
    """The mean of losses and its gradients in float64."""
    return oracle_of(plain_mean)(*arrays, dmean, labels=labels, **options)


def no_worse_than_plain(got, arrays, labels, dmean=1.0, **options):
    """Holds `got`, a loss and its gradients, to twice the error of what a user would write."""
    dout, arrays = jnp.float32(dmean), tuple(arrays)
    by_plain = check.value_and_grads(plain_mean, arrays, dout, labels=labels, **options)
    want = truth(arrays, labels, dmean, **options)
    leaves = zip(*map(jax.tree.leaves, (got, by_plain, want)), strict=True)
    for name, each in zip(("loss", "dx", "dweight", "dbias"), leaves, strict=True):
        check.at_most_twice(name, *each)


@check.combinations("options of", OPTIONS, CASES, few=1)
def test_accuracy_in_chunks(options, of):
    """In bf16 the gradient of the weight is rounded once a chunk."""
    rows, k, of_chunk, dtype = of
    *arrays, labels = inputs(rows, k, CLASSES, dtype)
    run = functools.partial(linear, memory=memory_for(of_chunk, dtype), **options)
    got = check.value_and_grads(run, tuple(arrays), jnp.float32(1), labels=labels)
    no_worse_than_plain(got, arrays, labels, **options)
    assert got[0].dtype == jnp.float32


def test_accuracy_of_cotangents():
    """A label's logit has nearly the gradient -dmean / 1016, which in bf16 is 0.4% off for 1."""
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    arrays = x / 128, weight, bias / 64  # all softmaxes are nearly alike
    counted = np.cumsum(np.ravel(labels != IGNORED)).reshape(labels.shape)
    labels = jnp.asarray(np.where(counted <= 1016, labels, IGNORED))
    run = functools.partial(linear, memory=memory_for(520, "bfloat16"))
    for dmean in (1.0, 1016.0, 0.77):
        (_, (dx, *_)), (_, (by_plain, *_)) = (
            check.value_and_grads(f, arrays, jnp.float32(dmean), labels=labels)
            for f in (run, plain_mean)
        )
        check.at_most_twice("dx", dx, by_plain, truth(arrays, labels, dmean)[1][0])


@pytest.mark.parametrize("memory", [memory_for(520, "bfloat16"), memory_for(511, "bfloat16")])
def test_gradient_of_a_float32_bias_is_not_rounded(memory):
    """To the bfloat16 of the weights beside it: it is as accurate as that of all logits at once."""
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    arrays = x, weight, bias.astype(jnp.float32)
    run = functools.partial(linear, labels=labels)
    both = lambda *a: [jax.grad(functools.partial(run, memory=m), 2)(*a) for m in (memory, None)]
    grad, at_once = jax.jit(both)(*arrays)
    check.at_most_twice("dbias", grad, at_once, truth(arrays, labels)[1][2])
    assert grad.dtype == jnp.float32
    assert np.mean(grad != grad.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


def test_strict_promotion_in_bfloat16():
    """JAX traces the rules after the call, and they are under the user's promotion, too."""
    *arrays, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    run = functools.partial(linear, labels=labels, memory=memory_for(520, "bfloat16"))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        lowered = jax.jit(jax.grad(jax.jit(run), (0, 1, 2))).lower(*arrays)
    assert {v.dtype for v in jax.tree.leaves(lowered.out_info)} == {jnp.dtype("bfloat16")}


@pytest.mark.skipif(check.ON_GPU, reason="float64 is plain JAX, the same on a GPU")
@check.combinations(
    "sizes memory",
    [None, (2, 1), (1, 2)],
    [memory_for(520, "float64"), memory_for(511, "float64"), None],
)
def test_float64_is_exact(memory, sizes):
    """With all logits, in chunks and in parts no number of fewer bits comes in between.

    Neither does it where devices add sums of theirs.
    """
    *arrays, labels = inputs((4, 375), K, CLASSES)
    wide = [np.asarray(v).astype(np.float64) for v in arrays]
    want = truth(wide, labels)
    with jax.enable_x64(True):
        wide = dict(zip(("x", "weight", "bias"), wide, strict=True)) | {"labels": labels}
        wide = on_mesh(sizes, AUTO, **wide) if sizes else wide.values()
        run = lambda x, weight, bias, labels: linear(x, weight, bias, labels=labels, memory=memory)
        got = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*wide)
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


@check.combinations("options dtype", OPTIONS, NO_F16, few=0)
@pytest.mark.gpu
def test_kernels_in_chunks(options, dtype):
    """Kernels are as accurate, of chunks so small that the interpreter takes seconds."""
    x, weight, bias, labels = inputs((2, 6), 8, CLASSES, dtype)
    of = options.get
    smoothing, z = of("label_smoothing", 0), of("z_loss", 0)
    terms = Terms.checked(IGNORED, smoothing, z, of("logit_softcap"))
    rows = LossOptions(terms, CLASSES, "mosaic" if check.ON_GPU else "interpret")
    chunks = ChunkOptions.of(rows, 8, CLASSES, dtype)
    count = terms.count(labels)
    losses, *grads = jax.jit(functools.partial(IN_CHUNKS, chunks))(x, weight, bias, labels)
    got = losses.sum() / count, grads
    no_worse_than_plain(got, (x, weight, bias), labels, float(count), **options)


@check.combinations("dtype", NO_F16, few=1)
def test_the_kernels_are_those_of_the_logits(dtype):
    """Lowered for a GPU: one call of each for the first chunk, one in the loop of the others."""
    x, weight, bias, labels = inputs(ROWS, K, 16384, dtype)
    run = functools.partial(linear, labels=labels, memory=memory_for(768, dtype, 16384))
    text = check.lowered(jax.grad(run, (0, 1, 2)), x, weight, bias)
    for kernel in ("cross_entropy_fwd", "cross_entropy_bwd"):
        assert sum(kernel in line for line in text.splitlines() if "mosaic_gpu_v2" in line) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("memory", [memory_for(1024, "bfloat16", 50280), 2**26])
def test_compiled_at_a_large_vocabulary(memory):
    """Chunks and parts in bf16 are as accurate as all logits, and all give the same bits again."""
    *arrays, labels = inputs((4096,), 256, 50280, "bfloat16")
    runs = [
        jax.jit(jax.value_and_grad(functools.partial(linear, labels=labels, memory=m), (0, 1, 2)))
        for m in (memory, None)
    ]
    results = [
        run(*arrays) for run in (*runs, lambda *a: runs[1](*(v.astype("float32") for v in a)))
    ]
    for name, *each in zip(
        ("loss", "dx", "dweight", "dbias"), *map(jax.tree.leaves, results), strict=True
    ):
        check.at_most_twice(name, *each)
    for run in runs:
        check.assert_same_bits(lambda run=run: run(*arrays))


@check.combinations("reduction", ["sum", "mean"], few=1)
def test_reductions_and_cotangents(reduction):
    *arrays, labels = inputs(ROWS, K, CLASSES)
    of = functools.partial(linear, labels=labels, memory=memory_for(520), reduction=reduction)
    run = jax.jit(jax.value_and_grad(lambda c, *a: c * of(*a), (1, 2, 3)))
    count = 1 if reduction == "mean" else np.sum(labels != IGNORED)
    mean, grads = truth(arrays, labels)
    for cotangent in (1.0, -3.7):
        want = jax.tree.map(lambda v: cotangent * count * v, (mean, grads))  # noqa: B023
        check.assert_close(run(cotangent, *arrays), want, 2e-6)


def test_ignored_rows_may_hold_nan_and_unknown_labels_give_it():
    x, weight, bias, labels = inputs(ROWS, K, CLASSES)
    run = jax.jit(
        jax.value_and_grad(
            lambda x, labels: linear(x, weight, bias, labels=labels, memory=memory_for(520))
        )
    )
    ignored = np.asarray(labels == IGNORED)[..., None]
    dirty, clean = (np.where(ignored, np.float32(v), x) for v in (np.nan, 0))
    for got, want in zip(run(dirty, labels), run(clean, labels), strict=True):
        np.testing.assert_array_equal(got, want)
    mean, dx = run(x, labels.at[2, 7].set(CLASSES))
    assert np.isnan(mean)
    assert np.isnan(dx).any(-1).nonzero() == ((2,), (7,))
    mean, dx = run(x, jnp.full_like(labels, IGNORED))
    assert mean == 0
    assert not dx.any()


def _second(f, *arrays):
    total = lambda *a: sum(jnp.sum(jnp.sin(g * 100)) for g in jax.grad(f, (0, 1))(*a))
    return jax.grad(total, (0, 1))(*arrays)


def _mapped(axes, f, *arrays):
    stack = lambda a, axis: a if axis is None else jnp.stack([a, 0.5 * a])
    return jax.vmap(jax.grad(f, (0, 1)), axes)(*map(stack, arrays, axes))


def _scanned(f, x, weight):
    step = lambda w, _: (w - 0.1 * jax.grad(f, 1)(x, w), f(x, w))
    return jax.lax.scan(step, weight, length=3)


TRANSFORMED = {
    "grad(grad)": _second,
    "vmap of x": functools.partial(_mapped, (0, None)),
    "vmap": functools.partial(_mapped, (0, 0)),
    "checkpoint": lambda f, *arrays: jax.grad(jax.checkpoint(f), (0, 1))(*arrays),
    "scan": _scanned,
}


@check.combinations("transformed", TRANSFORMED, few=1)
def test_transformations_in_chunks(transformed):
    x, weight, bias, labels = inputs((1, 1100), 4, 20)
    run = functools.partial(linear, bias=bias, labels=labels)
    chunked = functools.partial(run, memory=memory_for(560, classes=20))
    assert str(jax.make_jaxpr(jax.grad(chunked))(x, weight)).count("[552,20]")
    got, want = (jax.jit(functools.partial(transformed, f))(x, weight) for f in (chunked, run))
    check.assert_close(got, want, 1e-5)


PLACES = {"x": P("data"), "labels": P("data"), "bias": P("v")}
PLACES |= {"weight": P(None, "v"), "sums": P(None, "v")}


def on_mesh(sizes, kind, **arrays):
    """Arrays on a mesh of so many devices along "data" and "v", each split as it can be."""
    mesh = check.mesh_of(kind, *sizes, names=("data", "v"))
    return [jax.device_put(v, NamedSharding(mesh, PLACES[name])) for name, v in arrays.items()]


def without_a_gather(run, *arrays):
    """Runs a compiled program in which devices move no logits and no weight."""
    compiled = jax.jit(run).lower(*arrays).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    return compiled(*arrays)


@check.combinations(
    "sizes of", [(2, 2), (1, 4), (4, 1)], [(AUTO, "bfloat16"), (EXPLICIT, "float32")], few=1
)
def test_rows_and_classes_of_devices(sizes, of):
    """Each device has chunks of its own rows and classes, 1 to 4; nothing is gathered."""
    kind, dtype = of
    x, weight, bias, labels = inputs((4, 640), K, CLASSES, dtype)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def both(x, weight, bias, labels):
        run = functools.partial(linear, labels=labels, memory=memory_for(640, dtype), **options)
        return jax.value_and_grad(run, (0, 1, 2))(x, weight, bias)

    split = on_mesh(sizes, kind, x=x, weight=weight, bias=bias, labels=labels)
    got = without_a_gather(both, *split)
    no_worse_than_plain(got, (x, weight, bias), labels, **options)
    assert [g.dtype for g in got[1]] == [dtype] * 3
    assert got[1][1].sharding.shard_shape(weight.shape) == (K, CLASSES // sizes[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_on_a_mesh(kind):
    x, weight, _, labels = inputs((2, 560), 4, 20)
    run = functools.partial(linear, bias=None, memory=memory_for(560, classes=20))
    second = jax.jit(lambda x, w, labels: _second(functools.partial(run, labels=labels), x, w))
    split = on_mesh((2, 2), kind, x=x, weight=weight, labels=labels)
    check.assert_close(second(*split), second(x, weight, labels), 1e-5)


@check.combinations("check_vma", [True, False], few=1)
def test_inside_shard_map(check_vma):
    """The gradient of a weight that devices share is a sum over them, whose rows the user split."""
    *arrays, labels = inputs((4, 640), K, CLASSES)
    options: Any = {"memory": memory_for(520), "reduction": "sum"}
    split = jax.shard_map(
        lambda x, w, b, y: linear(x, w, b, labels=y, **options)[None],
        mesh=check.mesh_of(AUTO, 4),
        in_specs=(P("x"), P(), P(), P("x")),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    got = jax.jit(jax.grad(lambda *a: jnp.sum(split(*a, labels)), (0, 1, 2)))(*arrays)
    count = np.sum(labels != IGNORED)
    check.assert_close(got, [count * v for v in truth(arrays, labels)[1]], 5e-6)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, [FIRST, OTHERS]),
        ({"dtype": "bfloat16", "memory": memory_for(520, "bfloat16")}, [FIRST, OTHERS]),
        ({"memory": memory_for(512)}, [FIRST, OTHERS]),
        ({"memory": memory_for(760)}, [748, 752]),
        ({"rows": (6, 512), "dtype": "bfloat16", "memory": memory_for(512, "bfloat16")}, [512]),
        ({"rows": (7, 512), "dtype": "bfloat16", "memory": memory_for(512, "bfloat16")}, []),
        ({"memory": memory_for(1504)}, []),
        ({"memory": memory_for(511)}, []),
        ({"reduction": "none"}, []),
        ({"return_lse": True}, []),
        ({"dtype": "float16", "memory": memory_for(520, "float16")}, []),
        ({"weight": "bfloat16"}, []),
        ({"accumulator": jnp.zeros((K, CLASSES))}, []),
        ({"implementation": "xla"}, []),
    ],
)
def test_what_is_in_chunks(change, rows):
    """Chunks need one cotangent for all losses, and no more than six of at least 512 rows."""
    change = {"memory": memory_for(520), "dtype": "float32", "rows": ROWS, **change}
    x, weight, bias, labels = inputs(change.pop("rows"), K, CLASSES, change.pop("dtype"))
    weight = weight.astype(change.pop("weight", weight.dtype))
    run = lambda x: jax.tree.leaves(linear(x, weight, bias, labels=labels, **change))[0].sum()
    text = str(jax.make_jaxpr(jax.grad(run))(x))
    assert [n for n in range(CLASSES, np.prod(ROWS)) if f"[{n},{CLASSES}]" in text] == rows


# All logits at once, and in parts of the classes


@check.combinations("kind sizes", KINDS, [(3, 999), (4, 1020)], few=1)
def test_classes_on_any_devices(kind, sizes):
    """Their number divides the classes: no logits and no weight is gathered."""
    devices, classes = sizes
    x, weight, _, labels = inputs((8,), 16, classes)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}
    run = lambda x, w, y: jax.value_and_grad(linear, (0, 1))(x, w, None, labels=y, **options)
    split = on_mesh((1, devices), kind, x=x, weight=weight, labels=labels)
    (got, (dx, dweight)), no_bias = without_a_gather(run, *split), np.zeros(classes)
    want, (*grads, _) = truth((x, weight, no_bias), labels, **options)
    check.assert_close((got, dx, dweight), (want, *grads))


PARTS = 8 * 4 * 256
"""Bytes of the logits of 256 of the classes, which leave each device a share of every part."""


@check.combinations(
    "of sizes kind",
    [(True, PARTS), (True, None), (False, PARTS)],
    [(2, 2), (4, 1), (1, 4)],
    KINDS[::-1],
    few=2,
)
def test_accumulators_and_parts_of_devices(of, sizes, kind):
    """The parts of a weight's gradient are added once to it; nothing of all classes is gathered."""
    accumulated, memory = of
    x, weight, bias, labels = inputs((8,), 16, 1000, seed=3)
    labels = labels.at[1].set(IGNORED)
    sums = inputs((16,), 1000, 1, seed=9)[0]
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def both(x, weight, bias, sums, labels):
        def of(x, weight, bias, sums):
            more: Any = {"accumulator": sums} if accumulated else {}
            more |= {"memory": memory, "return_lse": True}
            mean, lse = linear(x, weight, bias, labels=labels, **options, **more)
            return mean + jnp.sum(jnp.sin(lse)), (mean, lse)

        wanted = (0, 3, 2) if accumulated else (0, 1, 2)
        return jax.value_and_grad(of, wanted, has_aux=True)(x, weight, bias, sums)

    split = on_mesh(sizes, kind, x=x, weight=weight, bias=bias, sums=sums, labels=labels)
    (_, results), grads = without_a_gather(both, *split)
    counted = np.asarray(labels != IGNORED)
    of = lambda dlse: oracle(
        *(np.asarray(v, np.float64) for v in (x, weight, bias)),
        *(counted / counted.sum(), dlse),
        labels=labels,
        **options,
    )
    (losses, lse), _ = of(0 * counted)
    _, (dx, dweight, dbias) = of(np.cos(lse))
    want = losses.sum() / counted.sum(), lse
    check.assert_close((results, grads), (want, (dx, dweight + accumulated * sums, dbias)))
    shapes = [g.sharding.shard_shape(g.shape) for g in grads[:2]]
    assert shapes == [(8 // sizes[0], 16), (16, 1000 // sizes[1])]


@check.combinations("of", [(EXPLICIT, 996), (AUTO, 999)], few=1)
def test_parts_that_devices_cannot_share_are_told_of(of):
    kind, classes = of
    x, weight, _, labels = inputs((8,), 16, classes)
    run = jax.jit(lambda x, w, y: linear(x, w, None, labels=y, memory=SMALLEST))
    split = on_mesh((1, 3), kind, x=x, weight=weight, labels=labels)
    with pytest.warns(UserWarning, match=f"128 of {classes} classes at once, which 3 devices"):
        got = run(*split)
    check.assert_close(got, truth((x, weight, np.zeros(classes)), labels)[0])
