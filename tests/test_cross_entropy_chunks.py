"""linear_cross_entropy with its logits in chunks of rows, whose gradients the forward forms."""

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
from jaxkern.ops.cross_entropy.chunks import IN_CHUNKS, Chunks
from jaxkern.ops.cross_entropy.rows import Rows, Terms
from tests import check
from tests.losses import IGNORED, OPTIONS, inputs, oracle, plain

ROWS, K, CLASSES = (3, 500), 24, 300
FIRST, OTHERS = 492, 504
"""Rows of the chunks, three of them, where memory is for 520."""

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@pytest.fixture(scope="module", autouse=True)
def without_tf32():
    """GPUs multiply fp32 as such."""
    with jax.default_matmul_precision("highest"):
        yield


def memory_for(rows, dtype="float32", classes=CLASSES):
    return rows * classes * jnp.dtype(dtype).itemsize


def loss(x, weight, bias, *, labels, implementation=None, **options):
    return jaxkern.linear_cross_entropy(
        x, weight, labels, bias, implementation=implementation, **options
    )


def plain_mean(x, weight, bias, *, labels, **options):
    return plain(x, weight, bias, labels=labels, **options)[0].sum() / (labels != IGNORED).sum()


def oracle_of_mean(x, weight, bias, dmean, *, labels, **options):
    count = (np.asarray(labels) != IGNORED).sum()
    dloss = np.full(labels.shape, dmean / count)
    (losses, _), grads = oracle(x, weight, bias, dloss, 0 * dloss, labels=labels, **options)
    return losses.sum() / count, grads


def shapes_of_logits(f, *arrays):
    """How many rows of all classes `f` has at once in its traced program."""
    text = str(jax.make_jaxpr(f)(*arrays))
    return [rows for rows in range(CLASSES, 1536) if f"[{rows},{CLASSES}]" in text]


def no_worse_than_plain(got, arrays, labels, dmean=1.0, **options):
    """Holds `got`, a loss and its gradients, to twice the error of what a user would write."""
    dout, arrays = jnp.float32(dmean), tuple(arrays)
    by_plain = check.value_and_grads(plain_mean, arrays, dout, labels=labels, **options)
    wide = [np.asarray(v).astype(np.float64) for v in arrays]
    want = oracle_of_mean(*wide, dmean, labels=labels, **options)
    leaves = zip(*map(jax.tree.leaves, (got, by_plain, want)), strict=True)
    for name, each in zip(("loss", "dx", "dweight", "dbias"), leaves, strict=True):
        check.at_most_twice(name, *each)


@DTYPES
@EACH_OPTION
def test_accuracy(dtype, options):
    *arrays, labels = inputs(ROWS, K, CLASSES, dtype)
    own = {"memory": memory_for(520, dtype)}
    check.check_accuracy(
        functools.partial(loss, labels=labels),
        functools.partial(plain_mean, labels=labels),
        functools.partial(oracle_of_mean, labels=labels),
        arrays,
        None,
        own=own,
        dtypes=["float32"],
        **options,
    )
    run = lambda *a: jax.grad(functools.partial(loss, labels=labels, **own), (0, 1, 2))(*a)
    assert shapes_of_logits(run, *arrays) == [FIRST, OTHERS]


def test_accuracy_of_the_most_chunks():
    """In bf16, whose gradient of the weight is rounded once a chunk."""
    *arrays, labels = inputs((6, 512), 64, CLASSES, "bfloat16")
    memory = memory_for(512, "bfloat16")
    run = functools.partial(loss, labels=labels, memory=memory)
    assert shapes_of_logits(run, *arrays) == [512]
    no_worse_than_plain(check.value_and_grads(run, arrays, jnp.float32(1)), arrays, labels)
    *more, labels = inputs((7, 512), 8, CLASSES, "bfloat16")
    assert not shapes_of_logits(functools.partial(loss, labels=labels, memory=memory), *more)


@pytest.mark.parametrize("dmean", [1.0, 1016.0, 0.77])
def test_accuracy_of_cotangents(dmean):
    """A label's logit has nearly the gradient -dmean / 1016, which in bf16 is 0.4% off for 1."""
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    arrays = x / 128, weight, bias / 64  # all softmaxes are nearly alike
    counted = jnp.cumsum((labels != IGNORED).ravel()).reshape(labels.shape)
    labels = jnp.where(counted <= 1016, labels, IGNORED)
    run = functools.partial(loss, labels=labels, memory=memory_for(520, "bfloat16"))
    _, (dx, *_) = check.value_and_grads(run, arrays, jnp.float32(dmean))
    _, (by_plain, *_) = check.value_and_grads(plain_mean, arrays, jnp.float32(dmean), labels=labels)
    wide = [np.asarray(v).astype(np.float64) for v in arrays]
    _, (want, *_) = oracle_of_mean(*wide, dmean, labels=labels)
    check.at_most_twice("dx", dx, by_plain, want)


@pytest.mark.parametrize("own", ["chunks", "parts"])
def test_gradient_of_a_float32_bias_is_not_rounded(own):
    """To the bfloat16 of the weights beside it: it is as accurate as that of all logits at once."""
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    arrays = x, weight, bias.astype(jnp.float32)
    memory = memory_for(520, "bfloat16") if own == "chunks" else ROWS[0] * ROWS[1] * 128 * 2
    run = functools.partial(loss, labels=labels)
    grad = jax.grad(functools.partial(run, memory=memory), 2)(*arrays)
    wide = [np.asarray(v).astype(np.float64) for v in arrays]
    _, (*_, want) = oracle_of_mean(*wide, 1.0, labels=labels)
    check.at_most_twice("dbias", grad, jax.grad(run, 2)(*arrays), want)
    assert grad.dtype == jnp.float32
    assert np.mean(grad != grad.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


def test_strict_promotion_in_bfloat16():
    """JAX traces the rules after the call, and they are under the user's promotion, too."""
    *arrays, labels = inputs(ROWS, K, CLASSES, "bfloat16")
    run = functools.partial(loss, labels=labels, memory=memory_for(520, "bfloat16"))
    want = jax.grad(run, (0, 1, 2))(*arrays)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = jax.grad(jax.jit(run), (0, 1, 2))(*arrays)
        jax.grad(run, (0, 1, 2))(*arrays)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.skipif(check.ON_GPU, reason="float64 is plain JAX, the same on a GPU")
@pytest.mark.parametrize("split", [None, "rows", "classes"])
@pytest.mark.parametrize("memory", [None, memory_for(520, "float64"), 1500 * 128 * 8])
def test_float64_is_exact(memory, split):
    """With all logits, in chunks and in parts no number of fewer bits comes in between.

    Neither does it where devices add sums of theirs.
    """
    with jax.enable_x64(True):
        *arrays, labels = inputs((4, 375), K, CLASSES)
        wide = [v.astype(jnp.float64) for v in arrays]
        want = oracle_of_mean(*map(np.asarray, wide), 1.0, labels=labels)
        if split:
            mesh = jax.make_mesh((2,), (split,), (AxisType.Auto,), devices=jax.devices()[:2])
            rows, classes = ("rows", None) if split == "rows" else (None, "classes")
            specs = P(rows), P(None, classes), P(classes), P(rows)
            shardings = [NamedSharding(mesh, spec) for spec in specs]
            *wide, labels = map(jax.device_put, (*wide, labels), shardings)
        run = lambda x, weight, bias: loss(x, weight, bias, labels=labels, memory=memory)
        got = jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*wide)
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


@DTYPES
@EACH_OPTION
@pytest.mark.gpu
def test_kernels(dtype, options):
    """Kernels are as accurate, of chunks so small that the interpreter takes seconds."""
    x, weight, bias, labels = inputs((2, 10), 8, CLASSES, dtype)
    terms = Terms.checked(
        IGNORED,
        options.get("label_smoothing", 0),
        options.get("z_loss", 0),
        options.get("logit_softcap"),
    )
    rows = Rows(terms, CLASSES, "mosaic" if check.ON_GPU else "interpret")
    chunks = dataclasses.replace(Chunks.of(rows, 16, dtype), gradients=True)
    count = terms.count(labels)
    losses, *grads = jax.jit(functools.partial(IN_CHUNKS, chunks))(x, weight, bias, labels)
    got = losses.sum() / count, tuple(grads)
    no_worse_than_plain(got, (x, weight, bias), labels, float(count), **options)


@DTYPES
def test_the_kernels_are_those_of_the_logits(dtype):
    """Lowered for a GPU: one call of each for the first chunk, one in the loop of the others."""
    x, weight, bias, labels = inputs(ROWS, K, 16384, dtype)
    run = functools.partial(loss, labels=labels, memory=memory_for(768, dtype, 16384))
    lowered = jax.jit(jax.grad(run, (0, 1, 2))).trace(x, weight, bias)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("cross_entropy_fwd", "cross_entropy_bwd"):
        assert sum(kernel in line for line in text.splitlines() if "mosaic_gpu_v2" in line) == 2


@pytest.mark.compiled
def test_compiled_at_a_large_vocabulary():
    """Chunks of 50,280 classes in bf16 are as accurate as all logits, and give the same bits."""
    *arrays, labels = inputs((4096,), 256, 50280, "bfloat16")
    memories = None, memory_for(1024, "bfloat16", 50280)
    runs = [
        jax.jit(jax.value_and_grad(functools.partial(loss, labels=labels, memory=m), (0, 1, 2)))
        for m in memories
    ]
    at_once, got = (run(*arrays) for run in runs)
    truth = runs[0](*(v.astype(jnp.float32) for v in arrays))
    leaves = zip(*map(jax.tree.leaves, (got, at_once, truth)), strict=True)
    for name, each in zip(("loss", "dx", "dweight", "dbias"), leaves, strict=True):
        check.at_most_twice(name, *each)
    check.assert_same_bits(lambda: runs[1](*arrays))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cotangent", [1.0, -3.7])
def test_reductions_and_cotangents(reduction, cotangent):
    *arrays, labels = inputs(ROWS, K, CLASSES)
    run = lambda memory: jax.jit(
        jax.value_and_grad(
            lambda *a: cotangent * loss(*a, labels=labels, memory=memory, reduction=reduction),
            (0, 1, 2),
        )
    )
    check.assert_close(run(memory_for(520))(*arrays), run(None)(*arrays), 2e-6)


def test_ignored_rows_may_hold_nan_and_unknown_labels_give_it():
    x, weight, bias, labels = inputs(ROWS, K, CLASSES)
    run = jax.jit(
        jax.value_and_grad(
            lambda x, labels: loss(x, weight, bias, labels=labels, memory=memory_for(520))
        )
    )
    dirty = jnp.where((labels == IGNORED)[..., None], jnp.nan, x)
    clean = jnp.where((labels == IGNORED)[..., None], 0, x)
    for got, want in zip(run(dirty, labels), run(clean, labels), strict=True):
        np.testing.assert_array_equal(got, want)
    mean, dx = run(x, labels.at[2, 7].set(CLASSES))
    assert np.isnan(mean)
    assert np.isnan(dx).any(-1).nonzero() == ((2,), (7,))
    mean, dx = run(x, jnp.full_like(labels, IGNORED))
    assert mean == 0
    assert not dx.any()


def test_transformations():
    """Derivatives of the gradients, vmap over what is shared or not, checkpoint and scan."""
    x, weight, bias, labels = inputs((1, 1100), 4, 20)
    run = functools.partial(loss, bias=bias, labels=labels)
    chunked = functools.partial(run, memory=memory_for(560, classes=20))
    assert str(jax.make_jaxpr(chunked)(x, weight)).count("[552,20]")

    def second(f):
        total = lambda *a: sum(jnp.sum(jnp.sin(g * 100)) for g in jax.grad(f, (0, 1))(*a))
        return jax.grad(total, (0, 1))

    def stacked(f, axes):
        several = [
            a if axis is None else jnp.stack([a, 0.5 * a])
            for a, axis in zip((x, weight), axes, strict=True)
        ]
        return jax.vmap(jax.grad(f, (0, 1)), axes)(*several)

    def by_scan(f):
        step = lambda w, _: (w - 0.1 * jax.grad(f, 1)(x, w), f(x, w))
        return jax.lax.scan(step, weight, length=3)

    for transformed in (
        lambda f: second(f)(x, weight),
        lambda f: stacked(f, (0, None)),
        lambda f: stacked(f, (0, 0)),
        lambda f: jax.grad(jax.checkpoint(f), (0, 1))(x, weight),
        by_scan,
    ):
        got, want = (jax.jit(functools.partial(transformed, f))() for f in (chunked, run))
        check.assert_close(got, want, 1e-5)


@KINDS
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
@DTYPES
def test_rows_and_classes_of_devices(shape, kind, dtype):
    """Each device has chunks of its own rows and classes, 1 to 4; nothing is gathered."""
    x, weight, bias, labels = inputs((4, 640), K, CLASSES, dtype)
    mesh = jax.make_mesh(shape, ("data", "v"), (kind,) * 2, devices=jax.devices()[:4])
    placed = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))

    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def both(x, weight, bias, labels):
        run = functools.partial(loss, labels=labels, memory=memory_for(640, dtype), **options)
        return jax.value_and_grad(run, (0, 1, 2))(x, weight, bias)

    run = jax.jit(both)
    split = placed(x, "data"), placed(weight, None, "v"), placed(bias, "v"), placed(labels, "data")
    got = run(*split)
    no_worse_than_plain(got, (x, weight, bias), labels, **options)
    assert [g.dtype for g in got[1]] == [dtype] * 3
    assert got[1][1].sharding.shard_shape(weight.shape) == (K, CLASSES // shape[1])
    text = run.lower(*split).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@KINDS
def test_second_derivatives_on_a_mesh(kind):
    x, weight, _, labels = inputs((2, 560), 4, 20)
    mesh = jax.make_mesh((2, 2), ("data", "v"), (kind,) * 2, devices=jax.devices()[:4])
    placed = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
    run = functools.partial(loss, bias=None, memory=memory_for(560, classes=20))

    def total(x, weight, labels):
        dx, dweight = jax.grad(functools.partial(run, labels=labels), (0, 1))(x, weight)
        return jnp.sum(jnp.sin(100 * dx)) + jnp.sum(jnp.sin(100 * dweight))

    second = jax.jit(jax.grad(total, (0, 1)))
    got = second(placed(x, "data"), placed(weight, None, "v"), placed(labels, "data"))
    check.assert_close(got, second(x, weight, labels), 1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """The gradient of a weight that devices share is a sum over them, whose rows the user split."""
    x, weight, bias, labels = inputs((4, 640), K, CLASSES)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    run = lambda memory: jax.jit(
        jax.grad(
            lambda x, w: jnp.sum(
                jax.shard_map(
                    lambda x, w, y: loss(x, w, bias, labels=y, memory=memory, reduction="sum")[
                        None
                    ],
                    mesh=mesh,
                    in_specs=(P("data"), P(), P("data")),
                    out_specs=P("data"),
                    check_vma=check_vma,
                )(x, w, labels)
            ),
            (0, 1),
        )
    )
    check.assert_close(run(memory_for(520))(x, weight), run(None)(x, weight), 5e-6)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, [FIRST, OTHERS]),
        ({"memory": memory_for(512)}, [FIRST, OTHERS]),
        ({"memory": memory_for(760)}, [748, 752]),
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
    change = {"memory": memory_for(520), "dtype": "float32", **change}
    x, weight, bias, labels = inputs(ROWS, K, CLASSES, change.pop("dtype"))
    weight = weight.astype(change.pop("weight", weight.dtype))
    run = lambda x: jax.tree.leaves(loss(x, weight, bias, labels=labels, **change))[0].sum()
    assert shapes_of_logits(run, x) == rows


def test_memory():
    """A program on a CPU takes little more than the logits of a chunk and their gradient."""
    rows, classes = 4096, 4096
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 16), (16, classes))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    run = lambda x, w, y: loss(x, w, None, labels=y, memory=memory_for(1024, classes=classes))
    analysis: Any = jax.jit(jax.grad(run, (0, 1))).lower(*types, labels).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 2.1 * 1024 * classes * 4
