"""Every op under each of JAX's modes of strictness, for symbolic shapes, and for every dtype."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from bench.cases import TABLE
from bench.cases.case import dtypes
from jaxkern import precision
from tests import check

pytestmark = pytest.mark.skipif(check.ON_GPU, reason="of what JAX traces, the same on a GPU")

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
CASES = {case.name: case for case in TABLE if case.strict}
EACH = pytest.mark.parametrize("name", list(CASES))
KERNELS = [n for n, c in CASES.items() if c.has_kernels]

SIZES = {"d": 32, "k": 32, "h": 48, "n": 4, "w": 4, "heads": 4, "p": 8, "g": 2, "v": 40}
MIXED = dtypes(F32), dtypes(BF16, matrices=F32, parameters=F32)
"""Parameters are float32 whatever the rest has."""


def types(name: str, of_role: dict[str, Any], rows: Any, length: Any, **sizes: int) -> list[Any]:
    """The types of a case's arrays, with `rows` for the batch and `length` for its sequences."""
    of_tokens = {"b": rows, "l": length, "m": (rows, length)}
    return CASES[name].types({**SIZES, **of_tokens, **sizes}, of_role)


def draw(name: str, rows: int, length: int) -> tuple[Any, ...]:
    """The case's arrays in float32."""
    sizes = {**SIZES, "b": rows, "l": length, "m": (rows, length)}
    return CASES[name].arrays(jax.random.key(0), sizes, MIXED[0])


def gradients(f: Callable[..., Any], kinds: Sequence[Any]) -> Callable[..., Any]:
    """Value and gradients, by all floating arguments, of Σ f² over all results."""
    floating = tuple(i for i, t in enumerate(kinds) if jnp.issubdtype(t.dtype, jnp.floating))

    def loss(*arrays: Any) -> Any:
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in jax.tree.leaves(f(*arrays)))

    return jax.value_and_grad(loss, argnums=floating)


@contextlib.contextmanager
def strict():
    """The modes at once in which JAX refuses what it lets pass elsewhere."""
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        yield


@pytest.mark.smoke
@EACH
def test_traced_in_strict_modes(name):
    """Value and gradients have their dtypes; those of the arrays are in rotation."""
    kinds = types(name, MIXED[list(CASES).index(name) % 2], 2, 5)
    with strict():
        value, grads = jax.eval_shape(gradients(CASES[name].call, kinds), *kinds)
    assert value.dtype == F32
    assert [g.dtype for g in grads] == [
        t.dtype for t in kinds if jnp.issubdtype(t.dtype, jnp.floating)
    ]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.exhaustive] * (n != "rms_norm")) for n in CASES],
)
def test_no_tracer_leaks(name):
    """Apart from the other modes: after each trace JAX looks through all that is in memory."""
    kinds = types(name, MIXED[0], 2, 5)
    with jax.check_tracer_leaks(True):
        jax.eval_shape(gradients(CASES[name].call, kinds), *kinds)


def _of_tree(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of a tree in bfloat16 as parameters and gradients, for both ways of an optimizer."""

    def run(tree: Any) -> Any:
        state = step().init(tree)
        scale = precision.StaticLossScale(2.0)
        updates = step().update(tree, state, tree, loss_scale=scale)
        return jaxkern.apply(step(), tree, state, tree, loss_scale=scale), updates

    return run


def _accumulated(tree: Any) -> Any:
    loss = lambda params, x: sum(jnp.sum(a) for a in jax.tree.leaves(params)) * jnp.sum(x)
    return jaxkern.accumulate_gradients(loss, tree, jnp.ones((2, 3), BF16))


def _scaled(tree: Any) -> Any:
    scale = precision.DynamicLossScale(1024)
    grads, finite = jaxkern.scale_gradients(scale.scale(tree), scale)
    return scale.unscale(grads), scale.adjust(finite & precision.all_finite(tree))


OPTIMIZER = {
    "adamw": _of_tree(lambda: jaxkern.fused_adamw(0.1, clip_norm=1.0, skip_nonfinite=True)),
    "adam, masters": _of_tree(lambda: jaxkern.fused_adam(0.1, master_dtype=F32, nesterov=True)),
    "adam, rounded": _of_tree(
        lambda: jaxkern.fused_adam(0.1, mu_dtype=BF16, nu_dtype=F32, stochastic_rounding=True)
    ),
    "sgd": _of_tree(lambda: jaxkern.fused_sgd(lambda count: 0.1, 0.9, nesterov=True)),
    "accumulated": _accumulated,
    "scaled": _scaled,
    "adamw, 8 bits": _of_tree(lambda: jaxkern.fused_adamw(0.1, mu_dtype="int8", nu_dtype="uint8")),
}
DIFFERENTIATED = {*OPTIMIZER} - {"adam, rounded", "adamw, 8 bits"}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_optimizers_in_strict_modes(name):
    """A step and its gradients."""
    kinds = {"w": jax.ShapeDtypeStruct((64, 128), BF16), "b": jax.ShapeDtypeStruct((8,), BF16)}
    f = OPTIMIZER[name]

    def loss(tree: Any) -> Any:
        floating = (a for a in jax.tree.leaves(jax.jit(f)(tree)) if a.dtype in (BF16, F32))
        return sum(jnp.sum(a.astype(F32)) for a in floating)

    def dtypes_of() -> Any:
        step = lambda tree: (f(tree), name in DIFFERENTIATED and jax.grad(loss)(tree))
        return jax.tree.map(lambda a: a.dtype, jax.eval_shape(step, kinds))

    want = dtypes_of()
    with strict():
        assert dtypes_of() == want


def in_turn(turn: int, of: int, names: Sequence[str] = tuple(CASES)) -> Any:
    """Each case; by default the first of every op whose turn it is, one in `of`."""
    first = list({CASES[name].op: name for name in reversed(names)}.values())[::-1]
    by_default = first[turn::of]
    params = [
        pytest.param(name, marks=[] if name in by_default else [pytest.mark.exhaustive])
        for name in names
    ]
    return pytest.mark.parametrize("name", params)


@pytest.mark.smoke
@in_turn(0, 1, KERNELS)
def test_kernels_lowered_under_x64(name):
    """For CUDA, where the kernels run."""
    case = CASES[name]
    kinds = types(name, MIXED[1], 2, 64, d=128, k=128, h=128, p=64)
    run = functools.partial(case.call, implementation="mosaic")
    if name != "accumulate_weight_grad":  # its derivative is that of plain JAX
        run = gradients(run, kinds)
    with jax.enable_x64(True):
        assert check.kernel_calls(check.lowered(run, *kinds))


@in_turn(0, 3)
def test_values_under_x64_and_debug_nans(name):
    arrays = draw(name, 2, 5)
    run = gradients(CASES[name].call, arrays)
    want = jax.jit(run)(*arrays)
    with jax.enable_x64(True), jax.debug_nans(True):
        got = jax.jit(run)(*arrays)
    check.assert_close(got, want)


@in_turn(1, 3)
def test_values_without_jit(name):
    arrays = draw(name, 1, 2)
    run = gradients(CASES[name].call, arrays)
    want = jax.jit(run)(*arrays)
    with jax.disable_jit():
        got = run(*arrays)
    check.assert_close(got, want)


@in_turn(2, 3)
def test_symbolic_shapes(name):
    """Batch and length are symbolic: plain JAX, right for the sizes it is called with."""
    case = CASES[name]
    b, t = export.symbolic_shape("b, t")
    kinds = types(name, MIXED[0], b, t)
    run = jax.jit(gradients(case.call, kinds))
    exported = export.export(run, platforms=["cpu", "cuda"])(*kinds)
    arrays = draw(name, 3, 7)
    check.assert_close(exported.call(*arrays), run(*arrays))
    if case.has_kernels and name != "accumulate_weight_grad":
        kinds = types(name, MIXED[1], b, t)
        asked = functools.partial(case.call, implementation="mosaic")
        with pytest.raises(NotImplementedError, match="has the symbolic shape"):
            export.export(jax.jit(asked), platforms=["cuda"])(*kinds)


@EACH
def test_dtypes_refused(name):
    """In the op's words, with the remedy; one of the dtypes for each case, in rotation."""
    refused = ["float8_e4m3fn", "int32", "bool", "complex64"]
    dtype = refused[list(CASES).index(name) % len(refused)]
    f = CASES[name].call
    kinds = types(name, dtypes(dtype, matrices=F32, parameters=F32), 2, 5)
    if CASES[name].op == "linear_scan" and dtype == "complex64":  # in plain JAX
        assert jax.eval_shape(f, *kinds).dtype == jnp.complex64
        return
    with pytest.raises(TypeError, match=r"must have a floating dtype.*convert it first"):
        jax.eval_shape(f, *kinds)


@EACH
def test_float64_is_computed_in_plain_jax(name):
    case = CASES[name]
    with jax.enable_x64(True):
        kinds = types(name, dtypes("float64") | {"float32": jnp.dtype("float64")}, 2, 5)
        if name != "accumulate_weight_grad":  # whose sums are float32
            results = jax.tree.leaves(jax.eval_shape(case.call, *kinds))
            assert {a.dtype for a in results} == {jnp.dtype("float64")}
        if case.has_kernels and name != "accumulate_weight_grad":
            with pytest.raises(NotImplementedError, match="is float64, and the kernels"):
                jax.eval_shape(functools.partial(case.call, implementation="mosaic"), *kinds)


def test_dropout_is_not_differentiated_by_its_rate():
    x = jnp.ones((4, 32))
    loss = lambda rate: jaxkern.dropout(x, rate, jax.random.key(0)).sum()
    assert jnp.isfinite(jax.jit(loss)(0.5))
    for f in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match=r"no derivative by rate.*stop_gradient"):
            f(0.5)
    kept = lambda rate: rate * loss(jax.lax.stop_gradient(rate))
    assert jax.grad(kept)(0.5) == loss(0.5)


@pytest.mark.parametrize("name", ["gelu_and_mul", "linear_scan, continued"])
def test_forward_mode_mixes_with_other_transformations(name):
    """``jacfwd`` maps tangents alone, and those of a gradient; and reverse over forward."""
    f = CASES[name].call
    first, *rest = draw(name, 2, 2)
    plain, by_rules = ({"implementation": name} for name in ("xla", None))
    along = lambda x, how: jax.jvp(lambda x: f(x, *rest, **how), (x,), (jnp.sin(x),))[1]
    check.assert_close(
        jax.jacfwd(lambda x: f(x, *rest, **by_rules))(first),
        jax.jacrev(lambda x: f(x, *rest, **plain))(first),
    )
    hessian = lambda how: jax.hessian(lambda x: jnp.sum(f(x, *rest, **how) ** 2))(first)
    check.assert_close(hessian(by_rules), hessian(plain))
    reverse = lambda how: jax.grad(lambda x: jnp.sum(along(x, how) ** 2))(first)
    check.assert_close(reverse(by_rules), reverse(plain), 4e-6)
    mesh = check.mesh_of(AxisType.Explicit, 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(first, NamedSharding(mesh, P("x")))
        check.assert_close(jax.jit(lambda x: along(x, by_rules))(split), along(first, plain))


def test_default_implementation_is_in_the_key_of_compiled_programs():
    run = jax.jit(lambda x: jaxkern.rms_norm(x))
    text = lambda: run.trace(jnp.ones((8, 128))).lower(lowering_platforms=("cuda",)).as_text()
    assert "rms_norm_fwd" in text()
    with jaxkern.default_implementation("xla"):
        assert "rms_norm_fwd" not in text()
    assert "rms_norm_fwd" in text()


@pytest.mark.parametrize("name", KERNELS)
def test_policies_of_checkpoint_find_results_by_the_name_of_their_op(name):
    kinds = types(name, MIXED[1], 2, 5)
    for implementation in None, "xla":
        call = functools.partial(CASES[name].call, implementation=implementation)
        assert f"name[name={CASES[name].op}]" in str(jax.make_jaxpr(call)(*kinds))
