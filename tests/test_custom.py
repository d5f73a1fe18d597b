"""custom_op: the guide's op in Pallas and in Triton, wrong definitions and wrong calls."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import bound, cache, kernel_call
from tests import check
from tests.check import activated
from tests.documents import ROOT, examples

GUIDE = ROOT / ".site" / "guide" / "own_kernels.md"


@functools.cache
def guide(language):
    """The guide's op as a module with a file, which Triton reads and by which kernels are kept."""
    folder = ROOT / "build" / "guide"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"own_{language}.py"
    block = {
        "pallas": lambda: examples(GUIDE)[0],
        "triton": lambda: examples(GUIDE, "python triton")[0],
    }
    if not path.exists() or path.read_text() != block[language]():
        path.write_text(block[language]())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arrays(key, shape=(4, 3, 256), dtype=jnp.float32):
    keys = jax.random.split(key, 3)
    x, mask = jax.random.normal(keys[0], shape), jax.random.bernoulli(keys[2], 0.7, shape)
    return x.astype(dtype), jax.random.normal(keys[1], shape[-1:]), mask.astype(jnp.int32)


def plain(x, b, mask):
    return (jax.nn.gelu(x.astype(jnp.float32) + b) * mask).astype(x.dtype)


def of_guide(language):
    call = lambda *args, **options: guide(language).bias_gelu_mask(*args, **options)
    return check.Op(
        "bias_gelu_mask" if language == "pallas" else "bias_gelu_mask, Triton",
        call,
        plain,
        arrays,
        kernels=("bias_gelu_mask_fwd", "bias_gelu_mask_bwd"),
        axes="mkn n mkn -> mkn",
        all_reduces=1,
        vmaps=((0, None, 0), (1, 0, None), (0, 0, 0)),
        tolerance=1e-5,
        runs_again=False,
        once=True,
        slow=[("kernels lowered", "mosaic")],
    )


test_custom_op_transformations = check.transformations(of_guide("pallas"))


def test_what_the_kernels_cannot_take_is_plain_jax_in_both_passes():
    op, arrays_of = guide("pallas").bias_gelu_mask, arrays(jax.random.key(0), (4, 300))
    loss = lambda x, b, mask: jnp.sum(jnp.sin(op(x, b, mask)))
    kernel_call.refused.clear()
    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays_of).lower(lowering_platforms=("cuda",))
    assert not check.kernel_calls(lowered.as_text())
    names = {"bias_gelu_mask_fwd", "bias_gelu_mask_bwd"}
    assert kernel_call.refused == dict.fromkeys(names, "n is 300, no multiple of 256")


@pytest.mark.compiled
@pytest.mark.needs("jax_triton")
@pytest.mark.parametrize("language", ["pallas", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_guides_op_in_float64(language, dtype):
    def oracle(x, b, mask, dout):
        value, slope = activated("gelu", x + b)
        dv = dout * mask * slope
        return [value * mask], [dv, dv.sum((0, 1))]

    x, b, mask = arrays(jax.random.key(0), (8, 300, 768), dtype)
    op = lambda x, b, **options: guide(language).bias_gelu_mask(x, b, mask, **options)
    by_hand = lambda x, b: plain(x, b, mask)
    whole = lambda x, b, dout: oracle(x, b, np.asarray(mask), dout)
    check.check_accuracy(op, by_hand, whole, (x, b), "mosaic")


@pytest.mark.compiled
@pytest.mark.needs("jax_triton")
def test_a_triton_kernel_is_mapped_by_strides():
    op, (x, b, mask) = guide("triton").bias_gelu_mask, arrays(jax.random.key(0))
    loss = lambda f: lambda x, b, mask: jnp.sum(jnp.sin(f(x, b, mask)))
    for axes in (((0, None, 0), (None, 0, None)), ((0, None, None), (0, None, None))):
        given = [x, b, mask]
        for level in axes:
            given = [
                a if i is None else jnp.stack([a, a + 1]) for a, i in zip(given, level, strict=True)
            ]
        twice = lambda f: jax.vmap(jax.vmap(f, axes[0]), axes[1])  # noqa: B023
        grads = lambda f: jax.jit(twice(jax.grad(loss(f), (0, 1))))  # noqa: B023
        kernel = functools.partial(op, implementation="mosaic")
        check.assert_close(grads(kernel)(*given), grads(plain)(*given))


@pytest.mark.compiled
@pytest.mark.needs("jax_triton")
def test_a_triton_op_is_split_and_gathers_nothing():
    op, (x, b, mask) = guide("triton").bias_gelu_mask, arrays(jax.random.key(0), (8, 64, 256))
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), (AxisType.Auto,))
    split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, mask)]
    loss = lambda f: lambda x, b, mask: jnp.sum(jnp.sin(f(x, b, mask)))
    kernel = functools.partial(op, implementation="mosaic")
    compiled = jax.jit(jax.grad(loss(kernel), (0, 1))).lower(split[0], b, split[1]).compile()
    check.assert_close(compiled(split[0], b, split[1]), jax.grad(loss(plain), (0, 1))(x, b, mask))
    assert "all-gather" not in compiled.as_text()


@pytest.mark.compiled
@pytest.mark.needs("jax_triton", "liger_kernel")
def test_a_triton_kernel_written_for_pytorch():
    """Liger's, which has its result's pointer before numbers: an argument is the result."""
    from liger_kernel.ops.swiglu import _swiglu_forward_kernel

    def swiglu(a, b, *, factor):
        return jax.nn.silu(factor * a.astype(jnp.float32)).astype(a.dtype) * b

    def kernel(a, b, *, factor):
        n = a.shape[-1]
        sizes = {"grid": (a.size // n,), "n_cols": n, "BLOCK_SIZE": 1 << (n - 1).bit_length()}
        return jaxkern.triton_call(
            *(a, b, jnp.zeros_like(a), n, factor),
            kernel=_swiglu_forward_kernel,
            out_type=jax.ShapeDtypeStruct(a.shape, a.dtype),
            input_output_aliases={2: 0},
            **sizes,
        )

    op = jaxkern.custom_op(
        "a: ... n, b: ... n -> out: ... n", reference=swiglu, kernel=kernel, whole="n", vmap=None
    )
    a, b = jax.random.normal(jax.random.key(0), (2, 3, 50, 300), jnp.bfloat16)
    both = lambda f: jax.jit(jax.value_and_grad(lambda a: jnp.sum(f(a, b).astype(jnp.float32))))
    got = both(functools.partial(op, factor=2.0, implementation="mosaic"))(a)
    check.assert_close(got, both(functools.partial(swiglu, factor=2.0))(a), 2.0**-8)
    mapped = jax.vmap(functools.partial(op, factor=2.0))(a, b)
    check.assert_close(mapped, swiglu(a, b, factor=2.0), 2.0**-8)


# Parts of an op, tested by "kernels" that are plain JAX


def rms(x, weight, *, eps=1e-6):
    rstd = jax.lax.rsqrt(jnp.mean(x * x, -1) + eps)
    return x * rstd[..., None] * weight, rstd


def rms_backward(x, weight, rstd, dout, *, eps=1e-6):
    del eps
    xhat, g = x * rstd[..., None], dout * weight
    dx = rstd[..., None] * (g - xhat * jnp.mean(g * xhat, -1, keepdims=True))
    return dx, jnp.sum((dout * xhat).reshape(-1, x.shape[-1]), 0)


def norm(**options):
    signature = "x: ... n, weight: n -> out: ... n, rstd: ..."
    given = {"reference": rms, "kernel": rms, "saved": "rstd", "whole": "n"}
    return jaxkern.custom_op(signature, **given | options)


BY_HAND = {"backward": "x weight rstd dout -> dx dweight", "backward_reference": rms_backward}


def test_what_is_saved_goes_to_the_backward_alone():
    x, weight = jax.random.normal(jax.random.key(0), (3, 8)), jnp.linspace(0.5, 1.5, 8)
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w, eps=1e-2)))
    first = lambda *args, **options: rms(*args, **options)[0]
    want = jax.jit(jax.grad(loss(first), (0, 1)))(x, weight)
    for op in (norm(), norm(**BY_HAND, backward_kernel=rms_backward)):
        assert jax.eval_shape(op, x, weight).shape == x.shape
        check.assert_close(jax.jit(jax.grad(loss(op), (0, 1)))(x, weight), want)
    with check.running("mosaic"):  # a kernel of plain JAX is interpreted as such
        kernels = functools.partial(op, implementation="mosaic")
        check.assert_close(jax.jit(jax.grad(loss(kernels), (0, 1)))(x, weight), want)


def strided(x, y, *, batch, strides, scale):
    """A kernel that finds its examples by their strides in flat memory."""
    n = y.shape[-1]
    flat = lambda a, stride: jnp.stack([a.reshape(-1)[e * stride :][:n] for e in range(batch)])
    return flat(x, strides[0]) + scale * flat(y, strides[1])


def test_examples_are_strides_of_a_kernel():
    op = jaxkern.custom_op(
        "x: n, y: n -> out: n",
        reference=lambda x, y, *, scale: x + scale * y,
        kernel=strided,
        vmap="strides",
        name="scaled_sum",
    )
    x, y = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(12.0).reshape(3, 4)
    call = functools.partial(op, scale=3.0, implementation="mosaic")
    with check.running("mosaic"):
        np.testing.assert_array_equal(call(x[0, 0], y[0]), x[0, 0] + 3 * y[0])
        for first, second in (((0, 0), (0, None)), ((0, None), (None, 0)), ((0, None), (0, None))):
            a = x if None not in (first[0], second[0]) else x[0]
            b = {0: y[0], 1: y, 2: x}[2 - [first[1], second[1]].count(None)]
            both = jax.vmap(jax.vmap(call, first), second)
            want = jax.vmap(jax.vmap(lambda a, b: a + 3 * b, first), second)(a, b)
            np.testing.assert_array_equal(both(a, b), want)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"signature": "x: n, y -> out: n"}, "signature must name arrays and their dimensions"),
        ({"signature": "x: n"}, "signature must name arrays"),
        ({"signature": "x: n -> x: n"}, "names x twice"),
        ({"signature": "x: n n -> y: n"}, "gives x a dimension twice"),
        ({"name": "<lambda>"}, "name must be one in Python"),
        ({"saved": "mean"}, "saved names mean, no result"),
        ({"saved": "out rstd"}, "saved names every result"),
        ({"backward": "x dout"}, "backward must be like"),
        ({"backward": "x drstd -> dx", "saved": "rstd"}, "names drstd; there are x, weight, out, "),
        ({"backward": "x dout -> dz"}, "names dz; there are dx, dweight"),
        ({"backward": "x dout -> dx"}, "does not take weight, so JAX cannot derive it"),
        ({"backward_kernel": rms_backward}, "need backward, which says"),
        ({"vmap": "loop"}, "vmap must be"),
    ],
)
def test_a_wrong_definition_is_told(options, words):
    signature = options.pop("signature", "x: ... n, weight: n -> out: ... n, rstd: ...")
    with pytest.raises(ValueError, match=words):
        jaxkern.custom_op(signature, reference=rms, kernel=rms, **options)


def test_a_wrong_call_is_told():
    op, x, weight = norm(**BY_HAND), jnp.ones((3, 8)), jnp.ones(8)
    for error, words, call in (
        (TypeError, "rms lacks weight", lambda: op(x)),
        (TypeError, "rms got weight twice", lambda: op(x, weight, weight=weight)),
        (TypeError, "takes 2 arrays", lambda: op(x, weight, 1e-6)),
        (TypeError, "options are compiled in", lambda: op(x, weight, eps=[1e-6])),
        (ValueError, r"weight must have dimensions \(n\)", lambda: op(x, x)),
        (ValueError, r"n is \(4,\) in weight and \(8,\) in x", lambda: op(x, weight[:4])),
        (ValueError, "implementation must be", lambda: op(x, weight, implementation="cuda")),
    ):
        with pytest.raises(error, match=words):
            call()
    assert op(weight=weight, x=x).shape == (3, 8)
    times = lambda x, *, by: x * by
    scaled = jaxkern.custom_op("x: n -> out: n", reference=times, kernel=times, name="times")
    found = [scaled(jnp.ones(2, jnp.int32), by=by).dtype for by in (2, 2.0, 2)]
    assert found == [jnp.int32, jnp.float32, jnp.int32]
    alone = norm(**BY_HAND | {"backward": "x weight rstd dout -> dx"}, name="alone")
    with pytest.raises(NotImplementedError, match="alone has no gradient by weight"):
        jax.grad(lambda w: alone(x, w).sum())(weight)


def test_a_kernels_results_are_those_of_the_reference():
    narrow = lambda x, weight: tuple(out.astype(jnp.bfloat16) for out in rms(x, weight))
    op, x = norm(kernel=narrow), jax.ShapeDtypeStruct((3, 8), jnp.float32)
    weight = jax.ShapeDtypeStruct((8,), jnp.float32)
    words = r"gives bfloat16\[3, 8\], bfloat16\[3\], and the plain JAX beside it float32\[3, 8\]"
    with pytest.raises(TypeError, match=words):
        jax.jit(op).trace(x, weight).lower(lowering_platforms=("cuda",))


def test_kernels_are_kept_until_their_source_changes(tmp_path, monkeypatch):
    """By the source outside of installed packages; one without a file is this process's alone."""
    text = "import jax.numpy as jnp\ndef double(x):\n    return 2 * x\n"
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    assert cache.folder() is not None

    def lowerings(double):
        kernel_call._lowered.clear()
        op = jaxkern.custom_op("x: n -> out: n", reference=double, kernel=double, name="double")
        before = kernel_call.lowerings.get("double_fwd", 0)
        with jaxkern.lowering_for("h200"):
            export.export(jax.jit(op), platforms=["cuda"])(jnp.ones(3))
        return kernel_call.lowerings.get("double_fwd", 0) - before

    def written(text):
        (tmp_path / "doubled.py").write_text(text)
        return importlib.reload(importlib.import_module("doubled")).double

    assert [lowerings(written(text)) for _ in range(2)] == [1, 0]
    assert lowerings(written(text + "# changed\n")) == 1
    assert [lowerings(lambda x: 2 * x) for _ in range(2)] == [1, 1]
    assert not bound.outlives_process(bound.describe(lambda x: x))


def test_triton_call_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax_triton", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkernels\[triton\]"'):
        jaxkern.triton_call(jnp.ones(3), kernel=None, out_type=jnp.ones(3), grid=1)
