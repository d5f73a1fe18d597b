"""The suite that every op goes through: accuracy against float64, and every JAX transformation.

:func:`check_accuracy` holds an op to its float64 oracle: errors are at most twice those of plain
JAX. :func:`transformations` makes the test of the cells of the matrix (:data:`TRANSFORMATIONS`) of
an op that is described once, as an :class:`Op`.

``implementation`` is ``"mosaic"`` for the kernels (compiled on a GPU, in Pallas's interpreter
elsewhere), ``None`` for the choice at lowering time, ``"xla"`` for plain JAX.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import target
from jaxkern.core.dispatch import interpret_kernels
from jaxkern.core.target import interpreter

ON_GPU = jax.default_backend() == "gpu"
Arrays = tuple[Any, ...]

BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
)
WHOLE = pytest.mark.parametrize(
    "implementation", [pytest.param("mosaic", marks=pytest.mark.compiled), "xla"]
)
"""Sizes that take the interpreter too long: kernels compiled, and plain JAX."""
FOUR_DEVICES = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


def without_wgmma():
    """A context in which the kernels are those of GPUs that have no wgmma."""
    if ON_GPU:  # as there is, but for its TMA
        return jaxkern.lowering_for(dataclasses.replace(target.of_process(), tma=False))
    return target.fitting_to(target.GPUS["a100"])


PRODUCTS = pytest.mark.parametrize(
    "products", [contextlib.nullcontext, without_wgmma], ids=["wgmma", "mma"]
)


def sizes(*both, gpu=(), interpreted=()):
    """Cases (size, implementation): `both` for plain JAX and for kernels on a GPU, `gpu` for the
    kernels on a GPU alone, `interpreted` for the kernels anywhere."""
    marks = [(*both, *gpu), [pytest.mark.compiled]], [interpreted, [pytest.mark.gpu]]
    name = lambda size: "x".join(map(str, size))
    cases = [pytest.param(size, "xla", id=f"{name(size)}-xla") for size in both] + [
        pytest.param(size, "mosaic", marks=mark, id=f"{name(size)}-mosaic")
        for group, mark in marks
        for size in group
    ]
    return pytest.mark.parametrize(("size", "implementation"), cases)


def interpreted(implementation):
    return implementation == "mosaic" and not ON_GPU


PLAIN = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
"""Activations, as a user would write them."""


def activated(activation, y):
    """f(y) and f'(y) in the dtype of y; NumPy's arrays give NumPy's."""
    with jax.enable_x64(True):
        out, slope = jax.jvp(PLAIN[activation], (jnp.asarray(y),), (jnp.ones_like(y),))
    return (out, slope) if isinstance(y, jax.Array) else (np.asarray(out), np.asarray(slope))


def in_float64(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``f(*args)`` of float64 arrays: NumPy's, or where they are large and a GPU is there, JAX's.

    What a host computes in half a minute of float64, while the other processes of the tests wait
    for it, takes a GPU milliseconds.
    """
    f = functools.partial(f, **options)
    wide = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), args)
    if not ON_GPU or sum(a.size for a in jax.tree.leaves(wide)) < 1 << 20:
        return f(*wide)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """‖got − want‖ / ‖want‖ in float64; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.size == 0:
        return 0.0
    error = np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), floor, 1e-300)
    return float(error) if np.isfinite(error) else float("inf")


@functools.lru_cache(64)
def program(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``run(arrays, cotangents, **more) -> (results, gradients)``, for all who ask for the same.

    It rounds wherever the code does; left free, XLA would keep intermediate results of 16 bits in
    fp32. One is compiled in a fraction of the time of the many that eager JAX runs.
    """

    def run(arrays: Arrays, cotangents: Any, **more: Any) -> Any:
        out, vjp = jax.vjp(functools.partial(f, **options, **more), *arrays)
        return out, vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, out))

    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def value_and_grads(f: Callable[..., Any], arrays: Arrays, cotangents: Any, **options: Any) -> Any:
    """``f(*arrays, **options)`` and its gradients, by one :func:`program`."""
    traced = {name: v for name, v in options.items() if isinstance(v, jax.Array | np.ndarray)}
    static = {name: v for name, v in options.items() if name not in traced}
    return program(f, **static)(arrays, cotangents, **traced)


def at_most_twice(name: str, got: Any, plain: Any, truth: Any, size: float | None = None) -> float:
    """Asserts that `got` is at most twice as far from the truth as plain JAX; returns its error.

    Args:
      name: what a failure calls the array.
      got: what the op computed.
      plain: what the plain expression gives, computed in the dtypes of the arguments.
      truth: the float64 oracle's result.
      size: the norm of the terms that the array is summed from, where they may cancel: an error
        below 4 fp32 roundings of that is no error. Default: the truth's own norm.
    """
    size = float(np.linalg.norm(truth)) if size is None else size
    ours, theirs = relative_error(got, truth, size), relative_error(plain, truth, size)
    assert np.isfinite(theirs), f"{name}: plain JAX is not finite and bounds nothing"
    assert ours <= 2 * theirs + 4 * 2.0**-24, f"{name}: error {ours:.2e}, plain JAX's {theirs:.2e}"
    return ours


def running(implementation: str | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are interpreted where no GPU can run them."""
    return interpret_kernels() if interpreted(implementation) else contextlib.nullcontext()


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """A context in which kernels are interpreted, and two warpgroups' race is an error.

    The interpreter knows reads and writes that no barrier puts in order. It tells of the order of
    warpgroups and of copies alone, not of warps; JAX 0.11 only logs it.
    """
    fields = {f.name for f in dataclasses.fields(plgpu.InterpretGPUParams)}
    raising: Any = {"on_race": "raise"} if "on_race" in fields else {}
    params = plgpu.InterpretGPUParams(detect_races=True, **raising)
    forced = functools.partial(plgpu.force_gpu_interpret_mode, params)
    with mock.patch.object(plgpu, "force_gpu_interpret_mode", forced), interpret_kernels():
        yield


def in_kernels() -> contextlib.AbstractContextManager[Any]:
    """A context in which a kernel that is launched by itself is interpreted where no GPU is."""
    return contextlib.nullcontext() if ON_GPU else interpreter()


def lowered(f: Callable[..., Any], *args: Any, donate: Any = ()) -> str:
    """The text of ``jax.jit(f)`` for CUDA."""
    traced = jax.jit(f, donate_argnums=donate).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def mesh_of(kind: AxisType, *sizes: int, names: Sequence[str] = "xy") -> Any:
    """A mesh of the first devices."""
    devices, names = jax.devices()[: math.prod(sizes)], tuple(names[: len(sizes)])
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=devices)


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Every leaf within `tolerance` of `want`, relative in norm: fp32 sums in another order."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        error = relative_error(g, w)
        assert error <= tolerance, f"leaf {i}: relative error {error:.2e}"


def assert_same_bits(run, times=20):
    """All runs give the same, to the bit."""
    first = jax.tree.leaves(run())
    same = jax.jit(lambda a, b: [jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)])
    assert all(all(same(first, jax.tree.leaves(run()))) for _ in range(times))


def check_accuracy(
    call, plain, oracle, arrays, implementation, *, own=None, dtypes=None, rounding=None, **options
):
    """Results and gradients of `call` are at most twice as far from the truth as plain JAX's.

    Args:
      call: the op, a function of `arrays`, the implementation, the options and its `own`.
      plain: the plain expression that a user would write, computed in the dtypes of `arrays`; None
        for the oracle in fp32, which bounds results of fp32: no other program is compiled.
      oracle: ``oracle(*arrays, *cotangents, **options) -> (results, grads)`` in float64 NumPy. A
        third item has by index, among results and gradients, the norm of the terms that one is
        summed from, where they may cancel: an error below 4 fp32 roundings of that is no error.
      arrays: the arguments.
      implementation: of `call`.
      own: options that `call` alone has.
      dtypes: of the results, if there is a plain expression; default: that of the first array.
      rounding: if given, an error is at most one rounding of the result and this, relative. In
        bf16 plain JAX may be far off, so that twice its error lets much pass; this sees a state
        or a sum that is not fp32.

    Returns results and gradients of both, the op and plain JAX.
    """
    own = dict(own or {}, implementation=implementation)
    with running(implementation):
        like = jax.eval_shape(functools.partial(call, **own, **options), *arrays)
        rng = np.random.default_rng(17)
        draw = lambda o: jnp.asarray(rng.standard_normal(o.shape), jnp.float32).astype(o.dtype)
        cotangents = jax.tree.map(draw, like)
        got = value_and_grads(call, arrays, cotangents, **own, **options)
    given = [np.asarray(a) for a in (*arrays, *jax.tree.leaves(cotangents))]
    by_oracle = lambda dtype: (*oracle(*(a.astype(dtype) for a in given), **options), {})
    *want, terms = by_oracle(np.float64)[:3]
    results = jax.tree.leaves(got[0])
    found = [str(v.dtype) for v in results]
    if plain is None:
        by_plain = by_oracle(np.float32)[:2]
        assert {*found} == {"float32"} or rounding is not None
    else:
        by_plain = value_and_grads(plain, arrays, cotangents, **options)
        assert found == list(dtypes or [str(arrays[0].dtype)] * len(found))
    rows = zip(*map(jax.tree.leaves, (got, by_plain, want)), strict=True)
    for i, (ours, other, truth) in enumerate(rows):
        name = f"result {i}" if i < len(results) else f"gradient {i - len(results)}"
        if plain is not None or {*found} == {"float32"}:
            at_most_twice(name, ours, other.astype(ours.dtype), truth, terms.get(i))
        if rounding is not None:
            error = relative_error(ours, truth)
            assert error <= float(jnp.finfo(ours.dtype).eps) / 2 + rounding, f"{name}: {error:.1e}"
    return got, by_plain


# Cases


def combinations(names: str, *axes: Collection[Any], few: int | None = None) -> Any:
    """Cases of all combinations of the axes' values; the default suite has `few` of them.

    The i-th of these has the i-th value of each axis, counted from the first again at its end. By
    default they are as many as have every value. An axis is a list, or a dict of test ids' names.
    """
    count = max(map(len, axes)) if few is None else few
    chosen = {tuple([*axis][i % len(axis)] for axis in axes) for i in range(count)}
    value = lambda axis, key: axis[key] if isinstance(axis, dict) else key
    name = lambda key: getattr(key, "name", getattr(key, "__name__", str(key)))
    return pytest.mark.parametrize(
        names.split(),
        [
            pytest.param(
                *map(value, axes, case),
                id="-".join(map(name, case)),
                marks=[] if case in chosen else pytest.mark.exhaustive,
            )
            for case in itertools.product(*axes)
        ],
    )


# Ops, and the matrix of their transformations


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op under test, as functions of its arrays alone (options are closed over).

    Attributes:
      name: what the matrix calls it.
      call: ``call(*arrays, implementation=...)``, the public function; returns one array.
      reference: the same in plain JAX, with no custom rule of any kind.
      arrays: small arrays for the matrix, from a key; in fp32, and integers that have no gradient.
        Axes that are split over devices have 4 elements or a multiple.
      kernels: names of the forward and the backward kernel in lowered text.
      axes: a letter for each axis of each array and of the output, as ``"mk kn n -> mn"``. The
        output's first axis can be split over devices with no gather.
      features: axes whose split over devices is legal but gathered; ``""`` if there are none.
      channels: axes that can be split beside the first one with no gather.
      all_reduces: how many sums over devices value-and-gradient needs where rows are split.
      vmaps: ``in_axes`` to map with; a mapped array is stacked from variations of itself.
      tolerance: of results in another order of sums, relative in norm.
      runs_again: whether the backward needs more than the arguments, so that ``jax.checkpoint``
        has the forward kernel run a second time.
      once: whether a CPU runs a cell once: its kernels, or where it cannot, what is chosen.
      cells: (transformation, implementation) of each cell, where it is not the whole matrix.
      without: transformations that the op has other tests of.
      slow: cells, as in `cells`, that the default suite leaves to the exhaustive one.
    """

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: Callable[[Any], Arrays]
    kernels: tuple[str, str]
    axes: str
    features: str = ""
    channels: str = ""
    all_reduces: int = 0
    vmaps: Sequence[tuple[int | None, ...]] = ()
    tolerance: float = 2e-5
    runs_again: bool = True
    once: bool = False
    cells: Sequence[tuple[str, str | None]] | None = None
    without: Sequence[str] = ()
    slow: Sequence[tuple[str, str | None]] = ()

    @property
    def row(self) -> str:
        return self.axes.split()[-1][0]

    def specs(self, **split: str) -> tuple[Any, ...]:
        """A ``PartitionSpec`` for each array and the output: axes to split, by axes of a mesh."""
        of = {letter: name for name, letters in split.items() for letter in letters}
        arrays = self.axes.replace(" ->", "").split()
        return tuple(P(*map(of.get, letters)) for letters in arrays)


# Transformations


_WANTED: dict[Op, dict[str, Any]] = {}


class _Cell:
    """What a cell of the matrix works with."""

    def __init__(self, op: Op, implementation: str | None):
        self.op = op
        self.implementation = implementation
        self.arrays = op.arrays(jax.random.key(0))
        self.argnums = tuple(
            i for i, a in enumerate(self.arrays) if jnp.issubdtype(a.dtype, jnp.floating)
        )
        self.interpreted = interpreted(implementation)
        self.local = implementation is None or ON_GPU  # elsewhere XLA splits as it likes
        self.cotangent = jax.random.normal(
            jax.random.key(1), jax.eval_shape(op.reference, *self.arrays).shape
        )

    def close(self, got: Any, want: Any, times: float = 1) -> None:
        assert_close(got, want, times * self.op.tolerance)

    def f(self, *arrays: Any) -> Any:
        with running(self.implementation):
            return self.op.call(*arrays, implementation=self.implementation)

    def loss(self, f: Callable[..., Any], cotangent: Any = None) -> Callable[..., Any]:
        """A scalar with a gradient, and a second one, that is different everywhere."""
        weights = self.cotangent if cotangent is None else cotangent
        return lambda *a: jnp.sum(jnp.sin(f(*a)) * weights)

    def grad(self, f: Callable[..., Any], cotangent: Any = None) -> Callable[..., Any]:
        return jax.grad(self.loss(f, cotangent), self.argnums)

    def want(self, transform: str, f: Callable[..., Any], *arrays: Any) -> Any:
        """``f(*arrays)`` of the reference, once for all implementations."""
        results = _WANTED.setdefault(self.op, {})
        if transform not in results:
            results[transform] = jax.jit(f)(*arrays)
        return results[transform]

    def want_value(self) -> Any:
        return self.want("value", self.op.reference, *self.arrays)

    def want_grad(self) -> Any:
        return self.want("grad", self.grad(self.op.reference), *self.arrays)

    def stacked(self, in_axes: Sequence[int | None], size: int = 3) -> Arrays:
        """Variations of arrays along new axes; of integers in another order."""
        floats = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
        varied = lambda a, i: a * (1 + 0.1 * i) if floats(a) else jnp.roll(a, i, 0)
        return tuple(
            a if axis is None else jnp.stack([varied(a, i) for i in range(size)], axis)
            for a, axis in zip(self.arrays, in_axes, strict=True)
        )

    def lowered_for_cuda(self, f: Callable[..., Any], *args: Any) -> str:
        call = functools.partial(self.op.call, implementation="mosaic")
        return lowered(f(call), *args)

    def kernel_counts(self, text: str) -> tuple[int, int]:
        """How often the forward and the backward kernel are called in lowered text."""
        calls = kernel_calls(text)
        return tuple(  # type: ignore[return-value]
            sum(
                f'"{name}"' in line or f"{name}_" in line or f"{name}\\22" in line for line in calls
            )
            for name in self.op.kernels
        )


def kernel_calls(text: str) -> list[str]:
    """The lines of a lowered program that run a kernel, as often as they do outside of loops."""
    functions: dict[str, list[str]] = {}
    for line in text.splitlines():
        if begins := re.search(r"func\.func \w+ @([\w.$-]+)", line):
            functions[begins[1]] = body = []
        elif functions:
            body.append(line)

    def of(name: str) -> list[str]:
        found = []
        for line in functions[name]:
            if "@mosaic_gpu_v2" in line:
                found.append(line)
            elif called := re.search(r"\bcall @([\w.$-]+)\(", line):
                found += of(called[1])
        return found

    return of("main")


def _value(c: _Cell) -> None:
    c.close(c.f(*c.arrays), c.want_value())


def _grad(c: _Cell) -> None:
    if not c.interpreted:  # without jit the interpreter runs in the gradient of one argument
        c.close(c.grad(c.f)(*c.arrays), c.want_grad())
    c.close(jax.jit(c.grad(c.f))(*c.arrays), c.want_grad())


def _grad_of_one(c: _Cell) -> None:
    """The gradient of each argument alone, with the others not differentiated.

    The kernels always compute all: where they are interpreted, which is slow, of the last. In
    plain JAX there is no rule of ours to test.
    """
    all_of_them = c.implementation is None or ON_GPU
    argnums = c.argnums if all_of_them else c.argnums[-1:]
    alone = jax.jit(lambda *arrays: [jax.grad(c.loss(c.f), i)(*arrays) for i in argnums])
    for i, got in zip(argnums, alone(*c.arrays), strict=True):
        c.close(got, c.want_grad()[i])


def _vmap(c: _Cell) -> None:
    for in_axes in c.op.vmaps[:-1] if c.interpreted else c.op.vmaps:
        arrays = c.stacked(in_axes)
        want = c.want(f"vmap {in_axes}", jax.vmap(c.op.reference, in_axes), *arrays)
        c.close(jax.vmap(c.f, in_axes)(*arrays), want)


def _vmap_grad(c: _Cell) -> None:
    """Per-example gradients, of shared arguments too.

    What is interpreted is mapped in one way, which :func:`_vmap` leaves to this.
    """
    for in_axes in c.op.vmaps[-1:] if c.interpreted else c.op.vmaps:
        arrays = c.stacked(in_axes)
        mapped = lambda f: jax.vmap(c.grad(f), in_axes)  # noqa: B023
        want = c.want(f"vmap(grad) {in_axes}", mapped(c.op.reference), *arrays)
        c.close(jax.jit(mapped(c.f))(*arrays), want)


def _vmap_vmap(c: _Cell) -> None:
    inner, outer = c.op.vmaps[0], c.op.vmaps[-1]
    twice = lambda f: jax.vmap(jax.vmap(f, inner), outer)
    half = lambda a: 0.5 * a if jnp.issubdtype(a.dtype, jnp.floating) else a
    arrays = tuple(
        a if axis is None else jnp.stack([a, half(a)], axis)
        for a, axis in zip(c.stacked(inner, size=2), outer, strict=True)
    )
    want = c.want("vmap(vmap)", twice(c.op.reference), *arrays)
    c.close(twice(c.f)(*arrays), want)


def _grad_grad(c: _Cell) -> None:
    def second(f: Callable[..., Any]) -> Callable[..., Any]:
        squares = lambda *a: sum(jnp.sum(g * g) for g in c.grad(f)(*a))
        return jax.grad(squares, c.argnums)

    want = c.want("grad(grad)", second(c.op.reference), *c.arrays)
    c.close(second(c.f)(*c.arrays), want, 10)


def _jvp(c: _Cell) -> None:
    """Forward mode, and forward over reverse."""
    tangents = tuple(
        jax.random.normal(jax.random.key(i), a.shape, a.dtype)
        if i in c.argnums
        else np.zeros(a.shape, jax.dtypes.float0)
        for i, a in enumerate(c.arrays)
    )
    along = lambda f: lambda *a: jax.jvp(f, a, tangents)
    c.close(along(c.f)(*c.arrays), c.want("jvp", along(c.op.reference), *c.arrays))
    want = c.want("jvp(grad)", along(c.grad(c.op.reference)), *c.arrays)
    c.close(along(c.grad(c.f))(*c.arrays), want, 10)


def _checkpoint(c: _Cell) -> None:
    if not c.interpreted:  # the interpreter cannot be rematerialised
        saving = jax.checkpoint(c.f)
        c.close(jax.jit(c.grad(saving))(*c.arrays), c.want_grad())
    if c.implementation == "mosaic":
        text = c.lowered_for_cuda(lambda f: c.grad(jax.checkpoint(f)), *c.arrays)
        again = c.op.runs_again
        assert c.kernel_counts(text) == (1 + again, 1), "in the backward the forward kernel runs"
        if c.cotangent.shape == c.arrays[0].shape:
            drop = jax.checkpoint_policies.save_only_these_names("another")
            second = lambda f: (
                lambda *a: jax.checkpoint(f, policy=drop)(jnp.sin(f(*a)).astype(a[0].dtype), *a[1:])
            )
            text = c.lowered_for_cuda(lambda f: c.grad(second(f)), *c.arrays)
            assert c.kernel_counts(text) == (2 + again, 2)
        keep = jax.checkpoint_policies.save_only_these_names(c.op.name.partition(",")[0])
        kept = lambda f: c.grad(jax.checkpoint(lambda *a: jnp.sin(f(*a)), policy=keep))
        text = c.lowered_for_cuda(kept, *c.arrays)
        assert c.kernel_counts(text) == (1, 1), "its results, that have its name, are kept"


def _scan(c: _Cell) -> None:
    """Applied again and again, the output fed back as the first argument."""

    def repeated(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, *rest: Any) -> Any:
            step = lambda x, _: (jnp.sin(f(x, *rest)).astype(x.dtype), None)
            return jax.lax.scan(step, first, length=3)[0]

        return run

    want = c.want("scan", c.grad(repeated(c.op.reference)), *c.arrays)
    c.close(jax.jit(c.grad(repeated(c.f)))(*c.arrays), want, 5)


def _mesh(kind: AxisType, names: tuple[str, ...] = ("data",)) -> Any:
    """All devices, up to 4, in one row, or where there are two names in a square."""
    count = 4 if jax.device_count() >= 4 else jax.device_count() if len(names) == 1 else 1
    shape = (count,) if len(names) == 1 else (int(count**0.5),) * 2
    return mesh_of(kind, *shape, names=names)


def _placed(c: _Cell, mesh: Any, specs: Sequence[Any]) -> tuple[Arrays, Any]:
    *ins, out = [NamedSharding(mesh, spec) for spec in specs]
    arrays = tuple(jax.device_put(a, s) for a, s in zip(c.arrays, ins, strict=True))
    return arrays, jax.device_put(c.cotangent, out)


def _value_and_grad(c: _Cell, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(arrays: Arrays, cotangent: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            given = dict(zip(c.argnums, floats, strict=True))
            return f(*(given.get(i, a) for i, a in enumerate(arrays)))

        out, vjp = jax.vjp(of_floats, *(arrays[i] for i in c.argnums))
        return out, vjp(cotangent)

    return run


def _on_meshes(c: _Cell, local: bool, **split: str) -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        _on_mesh(c, kind, local, **split)


def _on_mesh(c: _Cell, kind: AxisType, local: bool, **split: str) -> None:
    """Value and gradients with these axes split; `local`: nothing but sums leaves a device."""
    mesh = _mesh(kind, tuple(split))
    arrays, cotangent = _placed(c, mesh, c.op.specs(**split))
    reference = _value_and_grad(c, c.op.reference)
    want = c.want("value and grad", reference, c.arrays, c.cotangent)
    compiled = jax.jit(_value_and_grad(c, c.f)).lower(arrays, cotangent).compile()
    out, grads = compiled(arrays, cotangent)
    c.close((out, grads), want)
    text = compiled.as_text()
    if local and mesh.size > 1:
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert f"{collective}(" not in text, f"{collective} in the program of a split batch"
            assert f"{collective}-start(" not in text
        if len(split) == 1:
            reduces = text.count("all-reduce(") + text.count("all-reduce-start(")
            assert reduces == c.op.all_reduces, f"{reduces} all-reduces"
        assert len(out.sharding.device_set) == mesh.size
        assert not out.sharding.is_fully_replicated


def _explicit_mesh(c: _Cell) -> None:
    for context in (contextlib.nullcontext, lambda: jax.set_mesh(_mesh(AxisType.Explicit))):
        with context():
            _on_mesh(c, AxisType.Explicit, c.local, data=c.op.row)


def _vmap_explicit_mesh(c: _Cell) -> None:
    """Per-example gradients with the rows split, and with the mapped axis split too."""
    in_axes = tuple(0 for _ in c.arrays)
    stacked = c.stacked(in_axes, size=2)
    grad = lambda f: jax.vmap(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), c.argnums), in_axes)
    want = c.want("vmap(grad) of all", grad(c.op.reference), *stacked)
    for names in (("data",), ("data", "example")):
        mesh = _mesh(AxisType.Explicit, names)
        mapped = "example" if "example" in names else None
        specs = [P(mapped, *spec) for spec in c.op.specs(data=c.op.row)[:-1]]
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        placed = tuple(map(jax.device_put, stacked, shardings))
        c.close(jax.jit(grad(c.f))(*placed), want)


def _shard_map(c: _Cell, check_vma: bool) -> None:
    mesh = _mesh(AxisType.Auto)
    *in_specs, out_spec = c.op.specs(data=c.op.row)
    of_gradients = tuple(in_specs[i] for i in c.argnums)
    arrays, cotangent = _placed(c, mesh, (*in_specs, out_spec))
    want = c.want_grad()

    specs = {"mesh": mesh, "in_specs": (out_spec, *in_specs), "check_vma": check_vma}

    def outside(arrays: Arrays, cotangent: Any) -> Any:
        """Differentiated from outside: JAX sums what is shared."""
        local = lambda cotangent, *a: jax.lax.psum(c.loss(c.f, cotangent)(*a), "data")
        mapped = jax.shard_map(local, out_specs=P(), **specs)
        return jax.grad(lambda *a: mapped(cotangent, *a), c.argnums)(*arrays)

    def inside(arrays: Arrays, cotangent: Any) -> Any:
        """Differentiated inside: with check_vma=False, the user sums what is shared."""

        def local(cotangent: Any, *a: Any) -> Any:
            shared = [not check_vma and "data" not in str(spec) for spec in of_gradients]
            added = lambda g, is_shared: jax.lax.psum(g, "data") if is_shared else g
            return tuple(map(added, c.grad(c.f, cotangent)(*a), shared))

        return jax.shard_map(local, out_specs=of_gradients, **specs)(cotangent, *arrays)

    c.close(jax.jit(outside)(arrays, cotangent), want)
    c.close(jax.jit(inside)(arrays, cotangent), want)


def _axis_names(c: _Cell) -> None:
    """Device mesh axes named as a kernel might name its grid's change nothing.

    A kernel that takes the one for the other asks for the device's number; ours never should.
    """
    from jax.experimental.mosaic.gpu import launch_context

    def no_device_id(self: Any) -> Any:
        raise AssertionError("a kernel takes an axis of the device mesh for one of its grid")

    names = ("block", "batch", "segment", "column")
    mesh = mesh_of(AxisType.Auto, 1, 1, 1, 1, names=names)
    specs = tuple(
        P(*(names if entry == "data" else entry for entry in spec))
        for spec in c.op.specs(data=c.op.row)[:-1]
    )

    def on_mesh(f: Callable[..., Any]) -> Callable[..., Any]:
        of_grads = tuple(specs[i] for i in c.argnums)
        return jax.shard_map(c.grad(f), mesh=mesh, in_specs=specs, out_specs=of_grads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_context.LaunchContext, "device_id", no_device_id)
        text = c.lowered_for_cuda(on_mesh, *c.arrays)
    assert c.kernel_counts(text) == (1, 1)
    if ON_GPU:
        c.close(jax.jit(on_mesh(c.f))(*c.arrays), c.want_grad())


def _export(c: _Cell) -> None:
    """One export, for a GPU that may not be here and for the CPU."""
    traced = jax.jit(c.grad(functools.partial(c.op.call, implementation=None)))
    exported = jax.export.export(traced, platforms=("cuda", "cpu"))(*c.arrays)
    assert c.kernel_counts(exported.mlir_module()) == (1, 1)
    again = jax.export.deserialize(exported.serialize())
    c.close(again.call(*c.arrays), c.want_grad())


def _kernels(c: _Cell) -> None:
    """What is lowered for CUDA is the kernels, in both passes, and no kernel too many."""
    assert c.kernel_counts(c.lowered_for_cuda(lambda f: f, *c.arrays)) == (1, 0)
    assert c.kernel_counts(c.lowered_for_cuda(c.grad, *c.arrays)) == (1, 1)
    in_axes = c.op.vmaps[0]
    mapped = lambda f: jax.vmap(c.grad(f), in_axes)
    assert c.kernel_counts(c.lowered_for_cuda(mapped, *c.stacked(in_axes))) == (1, 1)


TRANSFORMATIONS: dict[str, Callable[[_Cell], None]] = {
    "value": _value,
    "grad": _grad,
    "grad of one argument": _grad_of_one,
    "vmap": _vmap,
    "vmap(vmap)": _vmap_vmap,
    "vmap(grad)": _vmap_grad,
    "grad(grad)": _grad_grad,
    "jvp": _jvp,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "shard_map": functools.partial(_shard_map, check_vma=True),
    "shard_map unchecked": functools.partial(_shard_map, check_vma=False),
    "auto mesh": lambda c: _on_mesh(c, AxisType.Auto, c.local, data=c.op.row),
    "explicit mesh": _explicit_mesh,
    "vmap(grad) on explicit mesh": _vmap_explicit_mesh,
    "features split": lambda c: _on_meshes(c, False, data=c.op.features),
    "rows and channels split": lambda c: _on_meshes(c, True, data=c.op.row, model=c.op.channels),
    "mesh axis names": _axis_names,
    "export": _export,
    "kernels lowered": _kernels,
}

WITHOUT_INTERPRETER = frozenset(
    {"shard_map", "shard_map unchecked", "auto mesh", "explicit mesh", "features split", "scan"}
    | {"vmap(grad) on explicit mesh", "rows and channels split", "jvp"}
)
"""Cells whose kernels only a GPU can run; elsewhere they run with the choice at lowering time."""

AROUND_A_RULE = frozenset({"grad of one argument", "checkpoint"})
"""Cells that differ from others in what JAX does around an op's rule.

The interpreter, which is slow, shows them with one op."""

OF_JAX = frozenset({"grad of one argument", "vmap", "vmap(vmap)", "checkpoint", "scan"})
"""Cells in which plain JAX, which has no rule of ours, is JAX's own affair: one op shows them."""

IMPLEMENTATIONS: tuple[str | None, ...] = ("mosaic", None, "xla")

ALONE: dict[str, str | None] = {
    "mesh axis names": "mosaic",
    "export": None,
    "kernels lowered": "mosaic",
}
"""Cells about one implementation, whichever was asked for: it alone has them."""

WHOLE_BY_DEFAULT = frozenset({"rms_norm", "linear", "selective_scan"})
"""Ops of rows, of products and of sequences, whose whole matrix is in the default suite."""

BY_DEFAULT: dict[str, str | None] = {
    "value": "mosaic",
    "grad": None,
    "vmap(grad)": None,
    "grad(grad)": None,
    "jvp": None,
    "auto mesh": None,
    "kernels lowered": "mosaic",
}
"""The cells of every other op that the default suite runs; the exhaustive one has the rest."""


def _interpreted(op: Op, transformation: str) -> bool:
    """Whether the cell runs in the interpreter; otherwise, where no GPU is, by the choice."""
    if transformation in AROUND_A_RULE:
        # And what jax.checkpoint does with an op whose forward need not run again.
        cells = ("rms_norm", transformation), ("causal_conv1d", "checkpoint")
        return (op.name, transformation) in cells
    return transformation not in WITHOUT_INTERPRETER


def _runs_on_a_cpu(op: Op, name: str, implementation: str | None) -> bool:
    interpreted = _interpreted(op, name)
    if implementation == "mosaic" and not interpreted:
        return False
    if implementation == "xla" and name in OF_JAX and op.name != "rms_norm":
        return False
    chosen = "mosaic" if interpreted else None
    return not op.once or name in ALONE or implementation == chosen


def _cells(op: Op) -> list[tuple[str, str | None]]:
    if op.cells is not None:
        cells = list(op.cells)
    else:
        left_out = {*op.without, *([] if op.channels else ["rows and channels split"])}
        left_out |= set() if op.features else {"features split"}
        cells = [
            (name, implementation)
            for name in TRANSFORMATIONS
            if name not in left_out
            for implementation in ([ALONE[name]] if name in ALONE else IMPLEMENTATIONS)
        ]
    return [cell for cell in cells if ON_GPU or _runs_on_a_cpu(op, *cell)]


def _marks(op: Op, name: str, implementation: str | None) -> list[pytest.MarkDecorator]:
    if op.name in WHOLE_BY_DEFAULT:
        by_default = True
    elif op.once:
        by_default = name in BY_DEFAULT
    elif "," in op.name:  # with other options than the op's first case
        by_default = name in ("auto mesh", "kernels lowered")
    else:
        by_default = (name, implementation) in BY_DEFAULT.items()
    by_default &= (name, implementation) not in op.slow
    return [
        *([] if implementation == "xla" else [pytest.mark.gpu]),
        *([pytest.mark.smoke] if op.name == "rms_norm" else []),
        *([] if by_default else [pytest.mark.exhaustive]),
    ]


def transformations(*ops: Op) -> Callable[..., None]:
    """A test of every cell of the ops' matrices."""
    cells = [
        pytest.param(
            op, *cell, id=f"{op.name}-{cell[0]}-{cell[1] or 'auto'}", marks=_marks(op, *cell)
        )
        for op in ops
        for cell in _cells(op)
    ]

    @pytest.mark.parametrize(("op", "name", "implementation"), cells)
    def test(op, name, implementation, record_property):
        record_property("cell", (name, f"{op.name} {implementation or 'auto'}"))
        TRANSFORMATIONS[name](_Cell(op, implementation))

    return test
