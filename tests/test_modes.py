"""Every op under each of JAX's modes of strictness, for symbolic shapes, and for every dtype."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxkern
from tests import check

pytestmark = pytest.mark.skipif(check.ON_GPU, reason="of what JAX traces, the same on a GPU")

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
KEY = jax.random.key(0)


def call(name: str, *, first: int | None = None, **options: Any) -> Callable[..., Any]:
    """An op with options; `first` takes one of its results."""

    def of(*arrays: Any, **more: Any) -> Any:
        out = getattr(jaxkern, name)(*arrays, **options, **more)
        return out if first is None else out[first]

    return of


def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, **more: Any) -> Any:
    return jaxkern.selective_scan(
        x, jax.nn.softplus(dt), -jnp.exp(A), B, C, D, z=x, dt_bias=D, dt_softplus=True, **more
    )


def packed_scan(x: Any, dt: Any, A: Any, B: Any, state: Any, ids: Any, **more: Any) -> Any:
    out, last = jaxkern.selective_scan(
        *(x, dt, A, B, B),
        segment_ids=ids,
        initial_state=state,
        return_final_state=True,
        **more,
    )
    return out.sum().astype(last.dtype) + last.sum()


def convolved(x: Any, weight: Any, bias: Any, state: Any, **more: Any) -> Any:
    return jaxkern.causal_conv1d(x, weight, bias, initial_state=state, activation="silu", **more)


def dropped(x: Any, rate: Any, **more: Any) -> Any:
    return jaxkern.dropout(x, jax.lax.stop_gradient(rate), KEY, activation="gelu", **more)


def added(x: Any, y: Any, **more: Any) -> Any:
    return jaxkern.dropout_add(x, y, 0.25, KEY, **more)


# The axes b and t are symbolic under export; a trailing ! is for float32 whatever the rest has, a
# trailing # for int32.
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "rms_norm": (call("rms_norm"), "b t 32, 32!"),
    "rms_norm of all": (
        lambda x, w, gate, **more: jaxkern.rms_norm(
            x, w, w, residual=x, gate=gate, group_size=16, activation="silu", **more
        )[0],
        "b t 32, 32!, b t 32",
    ),
    "layer_norm": (call("layer_norm"), "b t 32, 32!, 32!"),
    **{
        name: (call(name), "b t 32")
        for name in ("relu", "relu_squared", "silu", "gelu", "quick_gelu", "sigmoid", "tanh")
    },
    **{name: (call(name), "b t 32, b t 32") for name in ("swiglu", "geglu", "reglu", "glu")},
    "silu_and_mul": (call("silu_and_mul", limit=7.0, up_offset=1.0), "b t 32"),
    "gelu_and_mul": (call("gelu_and_mul"), "b t 32"),
    "dropout": (dropped, "b t 32, !"),
    "dropout_add": (added, "b t 32, b t 32"),
    "linear": (call("linear", activation="gelu"), "b t 32, 32 48!, 48!"),
    "linear alone": (call("linear"), "b t 32, 32 48"),
    "gated_linear_unit": (call("gated_linear_unit"), "b t 32, 32 48!, 32 48!"),
    "accumulate_weight_grad": (call("accumulate_weight_grad"), "32 48!, b t 32, b t 48"),
    "layer_norm_linear": (
        lambda x, w, weight, **more: jaxkern.layer_norm_linear(x, w, None, weight, **more),
        "b t 32, 32!, 32 48!",
    ),
    "rms_norm_linear": (call("rms_norm_linear"), "b t 32, 32!, 32 48!"),
    "selective_scan": (scan, "b t 32, b t 32, 32 4!, b t 4, b t 4, 32!"),
    "packed selective_scan": (packed_scan, "b t 32, b t 32, 32 4!, b t 4, b 32 4!, b t#"),
    "selective_scan_step": (
        call("selective_scan_step", first=0),
        "b 32 4!, b 32, b 32, 32 4!, b 4, b 4",
    ),
    "linear_scan": (
        lambda a, b, state, **more: jaxkern.linear_scan(a, b, initial_state=state, **more),
        "b t 32, b t 32, b 32!",
    ),
    "causal_conv1d": (convolved, "b t 32, 32 4!, 32!, b 3 32"),
    "causal_conv1d_step": (call("causal_conv1d_step", first=0), "b 3 32, b 32, 32 4!"),
}
WITHOUT_CHOICE = ("selective_scan_step", "causal_conv1d_step")

EACH = pytest.mark.parametrize("name", list(CASES))


def types(specs: str, dtype: Any, sizes: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of a case's arrays, with the axes b and t of `sizes`."""
    found = []
    for spec in specs.split(","):
        axes = spec.replace("!", "").replace("#", "").split()
        shape = tuple(sizes[a] if a in sizes else int(a) for a in axes)
        of = jnp.dtype("int32") if "#" in spec else F32 if "!" in spec else dtype
        found.append(jax.ShapeDtypeStruct(shape, of))
    return found


def draw(kinds: list[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Arrays between 0.1 and 0.9, of which a scan and a rate are safe; integers are 0."""
    rng = np.random.default_rng(0)
    return [
        np.zeros(t.shape, t.dtype)
        if t.dtype == jnp.int32
        else rng.uniform(0.1, 0.9, t.shape).astype(t.dtype)
        for t in kinds
    ]


def gradients(f: Callable[..., Any], kinds: list[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    """Value and gradients of Σ f², by all floating arguments, as a function of all."""
    floating = tuple(i for i, t in enumerate(kinds) if jnp.issubdtype(t.dtype, jnp.floating))
    loss = lambda *arrays: jnp.sum(f(*arrays).astype(jnp.float32) ** 2)
    return jax.value_and_grad(loss, argnums=floating)


MODES: dict[str, Callable[[], Any]] = {
    "x64": lambda: jax.enable_x64(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "leaks": lambda: jax.check_tracer_leaks(True),
}


@EACH
@pytest.mark.parametrize("mode", list(MODES))
def test_traced_in_a_strict_mode(mode, name):
    """Value and gradients are traced, with the dtypes that they have without the mode."""
    f, specs = CASES[name]
    for dtype in (F32, BF16):
        kinds = types(specs, dtype, {"b": 2, "t": 5})
        run = lambda f=f, kinds=kinds: jax.eval_shape(gradients(f, kinds), *kinds)
        want = jax.tree.map(lambda a: a.dtype, run())
        with MODES[mode]():
            assert jax.tree.map(lambda a: a.dtype, run()) == want


@EACH
def test_kernels_lowered_under_x64(name):
    """For CUDA, where the kernels run."""
    f, specs = CASES[name]
    if name in WITHOUT_CHOICE:
        return
    kinds = types(specs.replace("32", "128"), BF16, {"b": 2, "t": 64})
    run = functools.partial(f, implementation="mosaic")
    if name != "accumulate_weight_grad":  # its derivative is that of plain JAX
        run = gradients(run, kinds)
    with jax.enable_x64(True):
        traced = jax.jit(run).trace(*kinds)
        assert check.kernel_calls(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.newest
@EACH
def test_values_under_x64_and_debug_nans(name):
    f, specs = CASES[name]
    kinds = types(specs, F32, {"b": 2, "t": 5})
    arrays = draw(kinds)
    want = jax.jit(gradients(f, kinds))(*arrays)
    with jax.enable_x64(True), jax.debug_nans(True):
        got = jax.jit(gradients(f, kinds))(*arrays)
    check.assert_close(got, want)


@pytest.mark.newest
@EACH
def test_values_without_jit(name):
    f, specs = CASES[name]
    kinds = types(specs, F32, {"b": 1, "t": 2})
    arrays = draw(kinds)
    want = jax.jit(gradients(f, kinds))(*arrays)
    with jax.disable_jit():
        got = gradients(f, kinds)(*arrays)
    check.assert_close(got, want)


@pytest.mark.newest
@EACH
def test_symbolic_shapes(name):
    """Batch and length are symbolic: plain JAX, right for the sizes it is called with."""
    f, specs = CASES[name]
    b, t = export.symbolic_shape("b, t")
    kinds = types(specs, F32, {"b": b, "t": t})
    exported = export.export(jax.jit(gradients(f, kinds)), platforms=["cpu", "cuda"])(*kinds)
    arrays = draw(types(specs, F32, {"b": 3, "t": 7}))
    check.assert_close(exported.call(*arrays), jax.jit(gradients(f, kinds))(*arrays))
    if name not in WITHOUT_CHOICE and name != "accumulate_weight_grad":
        kinds = types(specs, BF16, {"b": b, "t": t})
        asked = functools.partial(f, implementation="mosaic")
        with pytest.raises(NotImplementedError, match="has the symbolic shape"):
            export.export(jax.jit(asked), platforms=["cuda"])(*kinds)


@EACH
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int32", "bool", "complex64"])
def test_dtypes_refused(dtype, name):
    """In the op's words, with the remedy."""
    f, specs = CASES[name]
    kinds = types(specs, jnp.dtype(dtype), {"b": 2, "t": 5})
    if name == "linear_scan" and dtype == "complex64":  # in plain JAX
        assert jax.eval_shape(f, *kinds).dtype == jnp.complex64
        return
    with pytest.raises(TypeError, match=r"must have a floating dtype.*convert it first"):
        jax.eval_shape(f, *kinds)


@EACH
def test_float64_is_computed_in_plain_jax(name):
    f, specs = CASES[name]
    with jax.enable_x64(True):
        kinds = types(specs.replace("!", ""), jnp.dtype("float64"), {"b": 2, "t": 5})
        if name != "accumulate_weight_grad":  # whose sums are float32
            assert jax.eval_shape(f, *kinds).dtype == jnp.float64
        if name not in WITHOUT_CHOICE and name != "accumulate_weight_grad":
            with pytest.raises(NotImplementedError, match="is float64, and the kernels"):
                jax.eval_shape(functools.partial(f, implementation="mosaic"), *kinds)


def test_dropout_is_not_differentiated_by_its_rate():
    x = jnp.ones((4, 32))
    loss = lambda rate: jaxkern.dropout(x, rate, KEY).sum()
    assert jnp.isfinite(jax.jit(loss)(0.5))
    for f in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match=r"no derivative by rate.*stop_gradient"):
            f(0.5)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "linear", "linear_scan"])
def test_hessian_needs_no_other_implementation(name):
    """It is forward mode of a gradient, whose passes are differentiated as plain JAX."""
    f, specs = CASES[name]
    first, *rest = draw(types(specs, F32, {"b": 1, "t": 1}))
    of = lambda **how: jax.hessian(lambda x: jnp.sum(f(x, *rest, **how) ** 2))(first)
    check.assert_close(of(), of(implementation="xla"))


@pytest.mark.parametrize("name", ["swiglu", "gelu_and_mul", "linear_scan", "selective_scan"])
def test_forward_mode_names_its_remedy(name):
    f, specs = CASES[name]
    first, *rest = draw(types(specs, F32, {"b": 1, "t": 2}))
    run = lambda **how: jax.jvp(lambda x: f(x, *rest, **how), (first,), (first,))
    with pytest.raises(TypeError, match=r'no forward-mode derivative.*implementation="xla"'):
        run()
    assert all(np.isfinite(a).all() for a in run(implementation="xla"))
