"""rms_norm and layer_norm: accuracy, and the common suite's transformations."""

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxkern
from jaxkern.lowering import kernel_call
from tests import check
from tests.norms import EACH, VARIANTS, check_case, each_way, in_turn, inputs

SIZES = [1, 42, 127, 255, 256, 760, 769, 1128, 4096]
MORE_SIZES = [2, 7, 128, 129, 257, 287, 5120, 8192]
LONGEST = [16384, 24001, 24576, 32768, 65536, 131072, 262144, 100000, 200003]


@each_way(SIZES, [*MORE_SIZES, *LONGEST])
def test_norm_accuracy(case, implementation):
    for op, dtype in in_turn([*SIZES, *MORE_SIZES, *LONGEST].index(case)):
        # Rows of one element are constant: with a smaller eps plain JAX's 1 / std³ overflows fp16.
        eps = 1e-3 if case == 1 else 1e-5
        shape = (2, case) if case in LONGEST else (2, 3, case)
        check_case(op, inputs(op, shape, dtype), implementation, eps=eps)


@each_way(
    [
        *(("rms_norm", 2, 11008), ("layer_norm", 2, 16384)),
        # Counts that no tile divides.
        *(("rms_norm", 1, 256), ("rms_norm", 131, 64), ("layer_norm", 33, 200)),
    ],
    [("layer_norm", 1199, 256), ("rms_norm", 133, 1000)],
)
def test_norm_row_counts(case, implementation):
    op, m, n = case
    check_case(op, inputs(op, (m, n), "bfloat16", seed=m), implementation)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("m", "n"),
    [
        *((m, n) for m in (132, 133, 1199, 65537) for n in (256, 1000, 1024)),
        *((m, n) for m in (1, 300) for n in LONGEST),
    ],
)
@EACH
def test_norm_many_rows(op, m, n):
    check_case(op, inputs(op, (m, n), "bfloat16", seed=m), "mosaic")


@check.BOTH
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_norm_variants(variant, implementation):
    v = VARIANTS[variant]
    for op, dtype in in_turn(list(VARIANTS).index(variant)):
        arrays = inputs(op, (5, 768), dtype, v.extra)
        check_case(op, arrays, implementation, **dict(v.options))


@pytest.mark.compiled
@pytest.mark.parametrize("n", [256, 1000, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("variant", list(VARIANTS))
@EACH
def test_norm_variants_compiled(op, variant, n):
    v = VARIANTS[variant]
    options = dict(v.options)
    if "group_size" in options:
        options["group_size"] = n // 2
    check_case(op, inputs(op, (70, n), "bfloat16", v.extra), "mosaic", **options)


def rms_norm_of(x, weight, bias=None, implementation="xla"):
    return jaxkern.rms_norm(
        x, weight, bias, eps=1e-3, weight_offset=0.5, implementation=implementation
    )


RMS_NORM = check.Op(
    name="rms_norm",
    call=rms_norm_of,
    reference=rms_norm_of,
    arrays=lambda key: tuple(inputs("rms_norm", (8, 2, 256), "float32", seed=3).values()),
    kernels=("rms_norm_fwd", "rms_norm_bwd"),
    axes="mtd d -> mtd",
    features="d",
    all_reduces=1,
    vmaps=[(0, None), (None, 0), (1, 0)],
)
RMS_NORM_WITH_BIAS = dataclasses.replace(
    RMS_NORM,
    name="rms_norm, bias",
    arrays=lambda key: tuple(inputs("rms_norm", (8, 2, 256), "float32", "bias", seed=3).values()),
    axes="mtd d d -> mtd",
    vmaps=[(0, None, None), (None, 0, 0), (1, 0, None)],
    cells=[("auto mesh", None), ("kernels lowered", "mosaic"), ("vmap(grad)", "mosaic")],
)
test_rms_norm_transformations = check.transformations(RMS_NORM, RMS_NORM_WITH_BIAS)


def layer_norm_of(x, weight, bias, residual, gate, implementation="xla"):
    """Everything at once, as one array."""
    out, h = jaxkern.layer_norm(
        x,
        weight,
        bias,
        eps=1e-3,
        residual=residual,
        gate=gate,
        gate_activation="sigmoid",
        weight_offset=0.5,
        activation="silu",
        group_size=128,
        implementation=implementation,
    )
    return out + h


LAYER_NORM = dataclasses.replace(
    RMS_NORM,
    name="layer_norm",
    call=layer_norm_of,
    reference=layer_norm_of,
    arrays=lambda key: tuple(
        inputs("layer_norm", (8, 2, 256), "float32", "residual gate", seed=3).values()
    ),
    kernels=("layer_norm_fwd", "layer_norm_bwd"),
    axes="mtd d d mtd mtd -> mtd",
    vmaps=[(0, None, None, 0, None), (None, 0, None, None, 0), (1, 0, 0, 1, 1)],
)
test_layer_norm_transformations = check.transformations(LAYER_NORM)


@pytest.mark.newest
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("op", "group_size", "gathers"),
    [
        *(("rms_norm", None, False), ("layer_norm", 256, False), ("layer_norm", 512, False)),
        *(("rms_norm", 128, False), ("layer_norm", 1024, False), ("rms_norm", 160, True)),
    ],
)
def test_rows_that_devices_share(op, group_size, gathers, kind):
    """Parts have several groups, or several have one; the sums of rows are all that is added up."""
    width = 800 if gathers else 1024
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    names = "residual gate" + (" bias" if op == "rms_norm" else "")
    arrays = inputs(op, (6, width), "float32", names, seed=5)

    def run(arrays, implementation):
        def f(arrays):
            options = {"group_size": group_size, "implementation": implementation}
            return getattr(jaxkern, op)(**arrays, norm_before_gate=False, **options)

        out, vjp = jax.vjp(f, arrays)
        return out, vjp(jax.tree.map(lambda a: jnp.sin(a), out))

    spec = lambda a: PartitionSpec(*[None] * (a.ndim - 1), "x")
    placed = {n: jax.device_put(a, NamedSharding(mesh, spec(a))) for n, a in arrays.items()}
    kernel_call.warn_once.cache_clear()
    told = pytest.warns(UserWarning, match="groups of 160") if gathers else nullcontext()
    with told:
        split = jax.jit(run, static_argnums=1).lower(placed, None).compile()
    assert (" all-gather(" in (split.as_text() or "")) == gathers
    check.assert_close(split(placed), run(arrays, "xla"), 2e-5)
