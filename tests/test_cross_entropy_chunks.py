"""linear_cross_entropy in chunks of rows and in parts of classes, and both where a mesh splits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.ops.cross_entropy.linear_op import IN_CHUNKS, ChunkOptions
from jaxkern.ops.cross_entropy.reference import LossOptions, Terms
from tests import check
from tests.pairs import combinations
from tests.test_cross_entropy import IGNORED, OPTIONS, SMALLEST, inputs, oracle, plain
from tests.test_cross_entropy import linear as loss
from tests.test_cross_entropy import without_tf32 as without_tf32

ROWS, K, CLASSES = (3, 500), 24, 300
FIRST, OTHERS = 492, 504
"""Rows of the chunks, three of them, where memory is for 520."""

AUTO, EXPLICIT = KINDS = AxisType.Auto, AxisType.Explicit
DTYPES = ["bfloat16", "float32"]
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
    counted = np.asarray(labels) != IGNORED
    dloss = counted * dmean / counted.sum()
    wide = [np.asarray(v).astype(np.float64) for v in arrays]
    (losses, _), grads = oracle(*wide, dloss, 0 * dloss, labels=labels, **options)
    return losses.sum() / counted.sum(), grads


def no_worse_than_plain(got, arrays, labels, dmean=1.0, **options):
    """Holds `got`, a loss and its gradients, to twice the error of what a user would write."""
    dout, arrays = jnp.float32(dmean), tuple(arrays)
    by_plain = check.value_and_grads(plain_mean, arrays, dout, labels=labels, **options)
    want = truth(arrays, labels, dmean, **options)
    leaves = zip(*map(jax.tree.leaves, (got, by_plain, want)), strict=True)
    for name, each in zip(("loss", "dx", "dweight", "dbias"), leaves, strict=True):
        check.at_most_twice(name, *each)


@combinations("options of", OPTIONS, CASES, few=1)
def test_accuracy(options, of):
    """In bf16 the gradient of the weight is rounded once a chunk."""
    rows, k, of_chunk, dtype = of
    *arrays, labels = inputs(rows, k, CLASSES, dtype)
    run = functools.partial(loss, memory=memory_for(of_chunk, dtype), **options)
    got = check.value_and_grads(run, tuple(arrays), jnp.float32(1), labels=labels)
    no_worse_than_plain(got, arrays, labels, **options)
    assert got[0].dtype == jnp.float32


def test_accuracy_of_cotangents():
    """A label's logit has nearly the gradient -dmean / 1016, which in bf16 is 0.4% off for 1."""
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    arrays = x / 128, weight, bias / 64  # all softmaxes are nearly alike
    counted = np.cumsum(np.ravel(labels != IGNORED)).reshape(labels.shape)
    labels = jnp.asarray(np.where(counted <= 1016, labels, IGNORED))
    run = functools.partial(loss, memory=memory_for(520, "bfloat16"))
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
    run = functools.partial(loss, labels=labels)
    both = lambda *a: [jax.grad(functools.partial(run, memory=m), 2)(*a) for m in (memory, None)]
    grad, at_once = jax.jit(both)(*arrays)
    check.at_most_twice("dbias", grad, at_once, truth(arrays, labels)[1][2])
    assert grad.dtype == jnp.float32
    assert np.mean(grad != grad.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


def test_strict_promotion_in_bfloat16():
    """JAX traces the rules after the call, and they are under the user's promotion, too."""
    *arrays, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    run = functools.partial(loss, labels=labels, memory=memory_for(520, "bfloat16"))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        lowered = jax.jit(jax.grad(jax.jit(run), (0, 1, 2))).lower(*arrays)
    assert {v.dtype for v in jax.tree.leaves(lowered.out_info)} == {jnp.dtype("bfloat16")}


@pytest.mark.skipif(check.ON_GPU, reason="float64 is plain JAX, the same on a GPU")
@combinations(
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
        run = lambda x, weight, bias, labels: loss(x, weight, bias, labels=labels, memory=memory)
        got = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*wide)
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


@combinations("options dtype", OPTIONS, DTYPES, few=0)
@pytest.mark.gpu
def test_kernels(options, dtype):
    """Kernels are as accurate, of chunks so small that the interpreter takes seconds."""
    x, weight, bias, labels = inputs((2, 6), 8, CLASSES, dtype)
    of = options.get
    smoothing, z = of("label_smoothing", 0), of("z_loss", 0)
    terms = Terms.checked(IGNORED, smoothing, z, of("logit_softcap"))
    rows = LossOptions(terms, CLASSES, "mosaic" if check.ON_GPU else "interpret")
    chunks = dataclasses.replace(ChunkOptions.of(rows, 8, dtype), gradients=True)
    count = terms.count(labels)
    losses, *grads = jax.jit(functools.partial(IN_CHUNKS, chunks))(x, weight, bias, labels)
    got = losses.sum() / count, grads
    no_worse_than_plain(got, (x, weight, bias), labels, float(count), **options)


@combinations("dtype", DTYPES, few=1)
def test_the_kernels_are_those_of_the_logits(dtype):
    """Lowered for a GPU: one call of each for the first chunk, one in the loop of the others."""
    x, weight, bias, labels = inputs(ROWS, K, 16384, dtype)
    run = functools.partial(loss, labels=labels, memory=memory_for(768, dtype, 16384))
    lowered = jax.jit(jax.grad(run, (0, 1, 2))).trace(x, weight, bias)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("cross_entropy_fwd", "cross_entropy_bwd"):
        assert sum(kernel in line for line in text.splitlines() if "mosaic_gpu_v2" in line) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("memory", [memory_for(1024, "bfloat16", 50280), 2**26])
def test_compiled_at_a_large_vocabulary(memory):
    """Chunks and parts in bf16 are as accurate as all logits, and all give the same bits again."""
    *arrays, labels = inputs((4096,), 256, 50280, "bfloat16")
    runs = [
        jax.jit(jax.value_and_grad(functools.partial(loss, labels=labels, memory=m), (0, 1, 2)))
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


@combinations("reduction", ["sum", "mean"], few=1)
def test_reductions_and_cotangents(reduction):
    *arrays, labels = inputs(ROWS, K, CLASSES)
    of = functools.partial(loss, labels=labels, memory=memory_for(520), reduction=reduction)
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
            lambda x, labels: loss(x, weight, bias, labels=labels, memory=memory_for(520))
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


@combinations("transformed", TRANSFORMED, few=1)
def test_transformations(transformed):
    x, weight, bias, labels = inputs((1, 1100), 4, 20)
    run = functools.partial(loss, bias=bias, labels=labels)
    chunked = functools.partial(run, memory=memory_for(560, classes=20))
    assert str(jax.make_jaxpr(chunked)(x, weight)).count("[552,20]")
    got, want = (jax.jit(functools.partial(transformed, f))(x, weight) for f in (chunked, run))
    check.assert_close(got, want, 1e-5)


SPLIT = {"x": P("data"), "labels": P("data"), "bias": P("v")}
SPLIT |= {"weight": P(None, "v"), "sums": P(None, "v")}


def on_mesh(sizes, kind, **arrays):
    """Arrays on a mesh of so many devices along "data" and "v", each split as it can be."""
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "v"), (kind,) * 2, devices=devices)
    return [jax.device_put(v, NamedSharding(mesh, SPLIT[name])) for name, v in arrays.items()]


def without_a_gather(run, *arrays):
    """Runs a compiled program in which devices move no logits and no weight."""
    compiled = jax.jit(run).lower(*arrays).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    return compiled(*arrays)


@combinations(
    "sizes of", [(2, 2), (1, 4), (4, 1)], [(AUTO, "bfloat16"), (EXPLICIT, "float32")], few=1
)
def test_rows_and_classes_of_devices(sizes, of):
    """Each device has chunks of its own rows and classes, 1 to 4; nothing is gathered."""
    kind, dtype = of
    x, weight, bias, labels = inputs((4, 640), K, CLASSES, dtype)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def both(x, weight, bias, labels):
        run = functools.partial(loss, labels=labels, memory=memory_for(640, dtype), **options)
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
    run = functools.partial(loss, bias=None, memory=memory_for(560, classes=20))
    second = jax.jit(lambda x, w, labels: _second(functools.partial(run, labels=labels), x, w))
    split = on_mesh((2, 2), kind, x=x, weight=weight, labels=labels)
    check.assert_close(second(*split), second(x, weight, labels), 1e-5)


@combinations("check_vma", [True, False], few=1)
def test_inside_shard_map(check_vma):
    """The gradient of a weight that devices share is a sum over them, whose rows the user split."""
    *arrays, labels = inputs((4, 640), K, CLASSES)
    mesh = jax.make_mesh((4,), ("data",), (AUTO,), devices=jax.devices()[:4])
    options: Any = {"memory": memory_for(520), "reduction": "sum"}
    split = jax.shard_map(
        lambda x, w, b, y: loss(x, w, b, labels=y, **options)[None],
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=P("data"),
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
    """Where one number is the cotangent of all losses, and six chunks or fewer have 512 rows."""
    change = {"memory": memory_for(520), "dtype": "float32", "rows": ROWS, **change}
    x, weight, bias, labels = inputs(change.pop("rows"), K, CLASSES, change.pop("dtype"))
    weight = weight.astype(change.pop("weight", weight.dtype))
    run = lambda x: jax.tree.leaves(loss(x, weight, bias, labels=labels, **change))[0].sum()
    text = str(jax.make_jaxpr(run)(x))
    assert [n for n in range(CLASSES, 1536) if f"[{n},{CLASSES}]" in text] == rows


def test_memory():
    """A program on a CPU takes little more than the logits of a chunk and their gradient."""
    rows, classes = 4096, 4096
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 16), (16, classes))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    run = lambda x, w, y: loss(x, w, None, labels=y, memory=memory_for(1024, classes=classes))
    analysis: Any = jax.jit(jax.grad(run, (0, 1))).lower(*types, labels).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 2.1 * 1024 * classes * 4


# All logits at once, and in parts of the classes


@combinations("kind sizes", KINDS, [(3, 999), (4, 1020)], few=1)
def test_classes_on_any_devices(kind, sizes):
    """As long as it divides them: no logits and no weight is gathered."""
    devices, classes = sizes
    x, weight, _, labels = inputs((8,), 16, classes)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}
    run = lambda x, w, y: jax.value_and_grad(loss, (0, 1))(x, w, None, labels=y, **options)
    split = on_mesh((1, devices), kind, x=x, weight=weight, labels=labels)
    (got, (dx, dweight)), no_bias = without_a_gather(run, *split), np.zeros(classes)
    want, (*grads, _) = truth((x, weight, no_bias), labels, **options)
    check.assert_close((got, dx, dweight), (want, *grads))


PARTS = 8 * 4 * 256
"""Bytes of the logits of 256 of the classes, which leave each device a share of every part."""


@combinations(
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
            mean, lse = loss(x, weight, bias, labels=labels, **options, **more)
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


@combinations("of", [(EXPLICIT, 996), (AUTO, 999)], few=1)
def test_parts_that_devices_cannot_share_are_told_of(of):
    kind, classes = of
    x, weight, _, labels = inputs((8,), 16, classes)
    run = jax.jit(lambda x, w, y: loss(x, w, None, labels=y, memory=SMALLEST))
    split = on_mesh((1, 3), kind, x=x, weight=weight, labels=labels)
    with pytest.warns(UserWarning, match=f"128 of {classes} classes at once, which 3 devices"):
        got = run(*split)
    check.assert_close(got, truth((x, weight, np.zeros(classes)), labels)[0])
