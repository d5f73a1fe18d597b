"""Kernels are lowered once, alone, for the GPU of the program that needs them."""

import contextlib
import dataclasses
import functools
import re
import shutil
from pathlib import Path
from types import FunctionType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import bound, cache, kernel_call, target
from jaxkern.core.bound import Bound, describe
from jaxkern.core.target import GPUS
from jaxkern.ops.norm.kernel import launch_fwd
from jaxkern.ops.norm.reference import NormOptions
from tests.check import kernel_calls, mesh_of

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def nothing_lowered(tmp_path, monkeypatch):
    """Neither in this process nor on disk."""
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_call, "_lowered", {})
    monkeypatch.setattr(kernel_call, "lowerings", {})


def another_process(monkeypatch):
    """Empties the caches that a new process would not have; those on disk stay."""
    jax.clear_caches()
    monkeypatch.setattr(kernel_call, "_lowered", {})
    monkeypatch.setattr(kernel_call, "lowerings", {})


# A model of four layers


def layer(x, weight, taps):
    h = jaxkern.rms_norm(x, weight, implementation="mosaic")
    h = jaxkern.causal_conv1d(h, taps, activation="silu", implementation="mosaic")
    return x + jaxkern.swiglu(h, x, implementation="mosaic")


def loss(x, weights, *, remat=False):
    f = jax.checkpoint(layer) if remat else layer
    for weight, taps in weights:
        x = f(x, weight, taps)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def arrays(batch, sharding=None, replicated=None, layers=4):
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = [
        (of((256,), sharding=replicated), of((256, 4), sharding=replicated)) for _ in range(layers)
    ]
    return of((batch, 32, 256), sharding=sharding), weights


def lower(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


EACH_ONCE = {
    f"{op}_{way}": 1 for op in ("rms_norm", "causal_conv1d", "swiglu") for way in ("fwd", "bwd")
}


def split_by_xla(lowered):
    """Lower what each device has: the partitioner is the first thing that compiling runs."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="mosaic_gpu"):  # the CPU has no such call
        lowered.compile()


@pytest.mark.parametrize("remat", [False, True])
def test_every_layer_and_program_shares_a_kernel(remat):
    gradient = jax.grad(functools.partial(loss, remat=remat), (0, 1))
    calls = kernel_calls(lower(gradient, *arrays(2)).as_text())
    assert len(calls) >= 4 * len(EACH_ONCE)
    assert kernel_call.lowerings == EACH_ONCE
    lower(gradient, *arrays(2, layers=5))
    lower(lambda *a: loss(*a, remat=remat), *arrays(2))
    assert kernel_call.lowerings == EACH_ONCE


def test_vmap_makes_a_kernel_of_its_own():
    x, weights = arrays(2)
    x = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    mapped = jax.vmap(jax.grad(loss, (0, 1)), (0, None))
    for _ in range(2):
        lower(mapped, x, weights)
        assert kernel_call.lowerings == EACH_ONCE


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("remat", [False, True])
def test_every_device_shares_a_kernel(kind, remat):
    mesh = mesh_of(kind, 4)
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    gradient = jax.grad(functools.partial(loss, remat=remat), (0, 1))
    for layers in (4, 5):
        lowered = lower(gradient, *arrays(8, split, whole, layers))
        if kind == AxisType.Auto:
            split_by_xla(lowered)
        assert kernel_call.lowerings == EACH_ONCE
    lower(gradient, *arrays(2))  # one device has as much as each of the four
    assert kernel_call.lowerings == EACH_ONCE


def test_shard_map_shares_a_kernel():
    mesh = mesh_of(AxisType.Auto, 4)
    x, weights = arrays(8, NamedSharding(mesh, P("x")), NamedSharding(mesh, P()))
    for check in (True, False):
        specs = {"in_specs": (P("x"), P()), "out_specs": P("x"), "check_vma": check}
        lower(jax.shard_map(jax.grad(loss), mesh=mesh, **specs), x, weights)
        assert kernel_call.lowerings == EACH_ONCE


def test_kernels_differ_where_anything_they_depend_on_does():
    x, weight = jnp.ones((8, 256), jnp.bfloat16), jnp.ones(256)
    norm = functools.partial(jaxkern.rms_norm, implementation="mosaic")
    lower(norm, x, weight)
    lower(functools.partial(norm, eps=1e-3), x, weight)
    lower(norm, x.astype(jnp.float16), weight)
    lower(norm, x[:7], weight)
    lower(norm, x, weight.astype(jnp.bfloat16))
    fewer = dataclasses.replace(GPUS["h200"], multiprocessors=66)
    without_tma = dataclasses.replace(GPUS["h200"], name="without TMA", tma=False)
    for gpu in ("h100", "b200", fewer, without_tma):
        with jaxkern.lowering_for(gpu):
            lower(norm, x, weight)
    with jax.default_matmul_precision("highest"):
        lower(norm, x, weight)
    assert kernel_call.lowerings == {"rms_norm_fwd": 10}


def test_where_no_kernel_runs_none_is_traced(monkeypatch):
    def trace(*_, **__):
        raise AssertionError("a kernel was traced")

    monkeypatch.setattr(kernel_call, "_export", trace)
    x, weight = jnp.ones((3, 8, 256)), jnp.ones(256)
    loss = lambda x, w: jnp.sum(jaxkern.rms_norm(x, w))
    jax.jit(jax.vmap(jax.grad(loss), (0, None))).lower(x, weight)
    with pytest.raises(AssertionError, match="a kernel was traced"):
        lower(jax.grad(loss), x, weight)


def test_the_text_of_a_program_tells_its_kernels_apart_before_it_is_split():
    """A cache of compiled programs leaves the pointers out, which differ in each process."""
    mesh = mesh_of(AxisType.Auto, 4)
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    weight = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=NamedSharding(mesh, P()))

    def text(**options):
        f = functools.partial(jaxkern.rms_norm, implementation="mosaic", **options)
        text = lower(lambda x, weight: f(x, weight), x, weight).as_text()
        assert "CustomSPMDPartitioning" in text
        return re.sub(r'backend_config = "\d+"', "", text)

    assert text() == text()
    assert len({text(), text(eps=1e-3), text(activation="silu")}) == 3


# On disk


def test_another_process_finds_the_kernels(monkeypatch):
    gradient = jax.grad(loss, (0, 1))
    text = lower(gradient, *arrays(2)).as_text()
    another_process(monkeypatch)
    assert lower(gradient, *arrays(2)).as_text() == text
    assert kernel_call.lowerings == {}
    assert (cache.summary().entries, cache.summary().hits) == (6, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(jax, "__version__", "0.0"),
        lambda patch: patch.setattr(bound, "_source", lambda: "another"),
        lambda patch: patch.setenv("MOSAIC_GPU_SOME_FLAG", "1"),
    ],
    ids=["jax", "source", "flag"],
)
def test_other_code_lowers_anew(monkeypatch, change):
    x, weight = jnp.ones((8, 256), jnp.bfloat16), jnp.ones(256)
    norm = functools.partial(jaxkern.rms_norm, implementation="mosaic")
    lower(norm, x, weight)
    another_process(monkeypatch)
    change(monkeypatch)
    lower(norm, x, weight)
    assert kernel_call.lowerings == {"rms_norm_fwd": 1}


@pytest.mark.parametrize("room", ["core", "mosaic", "ops", "optim"])
def test_the_source_of_every_room_is_part_of_the_key(monkeypatch, tmp_path, room):
    package = shutil.copytree(Path(jaxkern.__file__).parent, tmp_path / "jaxkern")
    monkeypatch.setattr(bound, "_PACKAGE", package)
    source = bound._source.__wrapped__
    before = source()
    assert source() == before
    file = next((package / room).rglob("[a-z]*.py"))
    file.write_text(file.read_text() + "# changed")
    assert source() != before


# The user's configuration of JAX


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it numbers the modules in their text")
@pytest.mark.parametrize(
    "configured",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.debug_nans(True),
        lambda: jax.checking_leaks(),
    ],
    ids=["x64", "rank promotion", "dtype promotion", "nans", "leaks"],
)
def test_kernels_are_lowered_the_same_however_jax_is_configured(configured):
    types = (((8, 2048), jnp.dtype("bfloat16")), ((2048,), jnp.dtype("float32")))
    of_kernel = "bfloat16", None, "mosaic"
    options = NormOptions("rms_norm", False, 1e-6, 0.0, None, "silu", True, 2048, *of_kernel)
    kernel = Bound(launch_fwd, options, 5, (0, 2))
    texts = []
    for context in (contextlib.nullcontext, configured):
        with context():
            exported = kernel_call._export("rms_norm_fwd", kernel, types, GPUS["h200"], None)
        texts.append(exported.mlir_module())
    assert texts[0] == texts[1]


# The target


def norm_text(gpu=None):
    x, weight = jnp.ones((1024, 4096), jnp.bfloat16), jnp.ones(4096)
    with jaxkern.lowering_for(gpu) if gpu else contextlib.nullcontext():
        return lower(jaxkern.rms_norm, x, weight).as_text()


def test_a_program_is_lowered_for_the_gpu_that_is_stated():
    """The one function that ``jax.jit`` has in its cache is lowered for each of them."""
    # What a generation alone has stands where no lane goes: another's compiler refuses it.
    assert "wgmma.fence.aligned" in norm_text("h200")
    assert "tcgen05.relinquish_alloc_permit" in norm_text("b200")
    assert norm_text("h200") != norm_text("b200")
    assert "mosaic_gpu" not in norm_text("t4")
    assert norm_text() == norm_text("h200")


@pytest.mark.parametrize("gpu", ["h300", ["h100"], None])
def test_an_unknown_gpu_is_refused(gpu):
    words = rf"gpu must be one of t4, a100, .*got {re.escape(repr(gpu))}"
    with pytest.raises(ValueError, match=words), jaxkern.lowering_for(gpu):
        pass


class Device:
    """A GPU as JAX describes it."""

    platform, device_kind, core_count, compute_capability = "gpu", "NVIDIA H100 PCIe", 114, "9.0"


def test_the_programs_devices_come_first():
    of_devices = lambda *devices: target.of_program(SimpleNamespace(device_assignment=devices))
    assert of_devices(Device()).multiprocessors == 114
    assert of_devices(*jax.devices()) == (target.of_process() or GPUS["h200"])
    with jaxkern.lowering_for("b200"):
        assert of_devices(Device()) == GPUS["b200"]
    assert target.of_program(None) == (target.of_process() or GPUS["h200"])
    # A mesh without devices names its GPU.
    device = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), abstract_device=device)
    assert target.of_program(SimpleNamespace(mesh=mesh)) == GPUS["b200"]


def test_gpus_are_described_by_what_jax_tells():
    gpu = target.describe(Device())
    assert gpu is not None
    assert (gpu.capability, gpu.shared_memory, gpu.unsupported) == ((9, 0), 232448, None)
    newer = type("Newer", (Device,), {"compute_capability": "12.9"})
    assert target.describe(newer()).shared_memory == 101376  # pyright: ignore
    rocm = type("Rocm", (Device,), {"compute_capability": "gfx90a"})
    assert target.describe(rocm()) is None
    assert target.describe(jax.devices("cpu")[0]) is None


# Static arguments


@dataclasses.dataclass(frozen=True)
class Static:
    eps: float
    dtype: object


def test_descriptions_tell_static_arguments_apart():
    values = [
        None, True, 1, 1.0, "1", (1,), (1, 1), ((1,), 1), jnp.float32, jnp.dtype("bfloat16"),
        AxisType.Auto, Static(1.0, jnp.float32), Static(1.0, jnp.float16), loss, layer,
        functools.partial(loss, remat=True), functools.partial(loss, remat=False),
        functools.partial(loss, 1),
    ]  # fmt: skip
    texts = [describe(value) for value in values]
    assert len(set(texts)) == len(texts)
    assert texts[-3] == describe(functools.partial(loss, remat=True))
    assert not any(" at 0x" in text for text in texts)


OURS = FunctionType((lambda: 0).__code__, {"__name__": "jaxkern.ops"})  # made in another function


@pytest.mark.parametrize("value", [OURS, object(), {1: 2}], ids=["lambda", "object", "dict"])
def test_what_does_not_describe_itself_is_refused(value):
    with pytest.raises(TypeError, match="a kernel's static arguments must tell what they are"):
        describe(value)


def norm_gradients(implementation=None, size=16384):
    norm = functools.partial(jaxkern.rms_norm, implementation=implementation)
    loss = lambda x, weight: jnp.sum(norm(x, weight).astype(jnp.float32))
    arrays = jnp.ones((8, size), jnp.bfloat16), jnp.ones(size)
    return lower(jax.grad(loss, (0, 1)), *arrays).as_text()


def gated_gradients(implementation=None):
    x, w = jnp.ones((8192, 4096), jnp.bfloat16), jnp.ones((4096, 14336), jnp.bfloat16)
    unit = functools.partial(jaxkern.gated_linear_unit, implementation=implementation)
    loss = lambda *arrays: jnp.sum(unit(*arrays).astype(jnp.float32))
    return lower(jax.grad(loss, (0, 1, 2)), x, w, w).as_text()


def scanned(implementation=None):
    x, A = jnp.ones((1, 64, 128), jnp.bfloat16), -jnp.ones((128, 16))
    scan = functools.partial(jaxkern.selective_scan, implementation=implementation)
    return lower(scan, x, x, A, x[..., :16], x[..., :16]).as_text()


TINY = dataclasses.replace(GPUS["h200"], name="NVIDIA Tiny", shared_memory=8192)
LACKING = [
    ("t4", norm_gradients, "T4.*compute capability 7.5, .* need 8.0 .Ampere. or newer.*xla"),
    (TINY, scanned, r"selective_scan_fwd: .*needs \d+ bytes of shared memory .*has 8192.*xla"),
    (
        *("l40s", functools.partial(norm_gradients, size=65536)),
        "rows of 65536 elements take clusters of blocks, which Hopper brought.*xla",
    ),
    # Tensor cores are others: what multiplies is left to XLA, what comes behind a product is not.
    *(
        (gpu, gated_gradients, "gated_fwd: .*wgmma, which Hopper alone.*xla")
        for gpu in ("b200", "rtx-pro-6000")
    ),
]


@pytest.mark.parametrize(("gpu", "program", "words"), LACKING)
def test_what_a_gpu_lacks_is_plain_jax_unless_the_kernels_are_asked_for(gpu, program, words):
    assert kernel_calls(program())
    with jaxkern.lowering_for(gpu):
        calls = kernel_calls(program())
        with pytest.raises(NotImplementedError, match=words):
            program("mosaic")
    assert bool(calls) == (program is gated_gradients)
    assert all("gated_silu_bwd" in line for line in calls)


def test_a_gpu_of_an_unknown_generation_gets_plain_jax_unless_the_user_asks():
    unknown = jaxkern.Gpu("NVIDIA Z1", (14, 0), 200, 232448)
    kernel_call.warn_once.cache_clear()
    with jaxkern.lowering_for("l40s"):
        assert kernel_calls(norm_gradients())
    with jaxkern.lowering_for(unknown):
        with pytest.warns(UserWarning, match=r"Z1 has compute capability 14.0, .*plain JAX runs"):
            assert "mosaic_gpu" not in norm_text(unknown)
        assert "mosaic_gpu" in norm_gradients("mosaic")
