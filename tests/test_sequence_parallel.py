"""A sequence that is split between devices: values, gradients and what the devices exchange."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import kernel_pass
from jaxkern.lowering import kernel_call
from jaxkern.mosaic.launch import interpreter
from jaxkern.nn import mamba, mamba2
from jaxkern.ops import split_scan
from jaxkern.ops.selective_scan import devices as selective_scan_devices
from jaxkern.ops.ssd import carry, reference
from jaxkern.ops.ssd import devices as ssd_devices
from tests import check

TOLERANCE = 2e-5


def _random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((*shape, seed)).normal(size=shape).astype("float32"))


def _ids(batch: int, length: int) -> jax.Array:
    """Segments of which one goes through several parts, and some begin with one or end in one."""
    ends = [3, length // 8, length // 8 + 1, 5 * length // 8, length - 2]
    ids = [np.searchsorted(ends, np.arange(length) - row, side="right") for row in range(batch)]
    return jnp.asarray(np.stack(ids), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op at small size, with decays by which the last token remembers the first.

    Attributes:
      call: the op, of all `arrays`, the last two of which are the initial states and segment ids.
      arrays: in fp32.
      axes: of each array, a letter for each: b, l, d for channels or heads, and others.
    """

    call: Any
    arrays: tuple[Any, ...]
    axes: str


def _linear(reverse: bool) -> Op:
    b, l, d = 2, 64, 6

    def call(a, b, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "reverse": reverse}
        return jaxkern.linear_scan(a, b, **options)

    a = 1 - 0.02 * jax.nn.sigmoid(_random(b, l, d))
    return Op(call, (a, _random(b, l, d, seed=1), _random(b, d), _ids(b, l)), "bld bld bd bl")


def _conv(d: int) -> Op:
    b, l, w = 2, 32, 4

    def call(x, weight, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "activation": "silu"}
        return jaxkern.causal_conv1d(x, weight, bias, **options)

    arrays = _random(b, l, d), _random(d, w), _random(d), _random(b, w - 1, d), _ids(b, l)
    return Op(call, arrays, "bld dw d bkd bl")


def _selective(every: int | None = 8) -> Op:
    b, l, d, n = 2, 32, 6, 3

    def call(x, dt, A, B, C, D, z, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "checkpoint_every": every}
        options |= {"dt_bias": bias, "dt_softplus": True}
        return jaxkern.selective_scan(x, dt, A, B, C, D, z, **options)

    tokens = [_random(b, l, d, seed=i) for i in range(3)]
    weights = [_random(b, l, n, seed=i) for i in range(2)]
    x, dt, z = tokens
    arrays = (
        *(x, dt, -jnp.exp(_random(d, n)), *weights, _random(d), z),
        *(_random(d) - 5, _random(b, d, n), _ids(b, l)),
    )
    return Op(call, arrays, "bld bld dn bln bln d bld d bdn bl")


def _ssd(every: int | None = 128) -> Op:
    b, l, h, p, n = 2, 512, 4, 3, 5

    def call(x, dt, A, B, C, D, z, bias, state, ids, **options):
        options |= {"initial_state": state, "segment_ids": ids, "checkpoint_every": every}
        options |= {"dt_bias": bias, "dt_softplus": True}
        return jaxkern.ssd(x, dt, A, B, C, D, z, **options)

    x, z = (_random(b, l, h, p, seed=i) for i in range(2))
    weights = [_random(b, l, 1, n, seed=i) for i in range(2)]
    arrays = (
        *(x, _random(b, l, h), -jnp.exp(_random(h)), *weights, _random(h), z),
        *(_random(h) - 6, _random(b, h, p, n), _ids(b, l)),
    )
    return Op(call, arrays, "bldp bld d blgn blgn d bldp d bdpn bl")


OPS = {
    "linear_scan": _linear(False),
    "linear_scan reverse": _linear(True),
    "causal_conv1d": _conv(128),
    "causal_conv1d of few channels": _conv(6),
    "selective_scan": _selective(),
    "selective_scan none saved": _selective(None),
    "ssd": _ssd(),
    "ssd none saved": _ssd(None),
}


def _value_and_grads(op: Op, **options: Any) -> Any:
    """Results and the gradients of all arrays, by cotangents that differ everywhere."""

    def run(*arrays: Any) -> Any:
        *floats, ids = arrays
        of = functools.partial(op.call, ids=ids, **options)
        call = lambda *floats: of(*floats[:-1], state=floats[-1])
        out, vjp = jax.vjp(call, *floats)
        return out, vjp(jax.tree.map(lambda v: jnp.cos(2 * v), out))

    return jax.jit(run)


def _mesh(kind: AxisType, shape: tuple[int, ...], names: str) -> Any:
    count = int(np.prod(shape))
    return jax.make_mesh(shape, tuple(names), (kind,) * len(shape), devices=jax.devices()[:count])


def _placed(op: Op, arrays: Any, mesh: Any, **split: Any) -> tuple[Any, ...]:
    specs = (P(*(split.get(letter) for letter in axes)) for axes in op.axes.split())
    return tuple(
        None if a is None else jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arrays, specs, strict=True)
    )


GIVEN = {
    "alone": lambda arrays: (*arrays[:-2], None, None),
    "continued": lambda arrays: (*arrays[:-1], None),
    "packed": lambda arrays: arrays,
}


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FOUR_DEVICES = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "given", "shape", "split", "kind"),
    [
        *((name, "packed", (4,), {"l": "x"}, AUTO) for name in OPS),
        *((name, "packed", (4,), {"l": "x"}, EXPLICIT) for name in OPS if "saved" not in name),
        ("linear_scan", "alone", (2,), {"l": "x"}, AUTO),
        ("causal_conv1d", "alone", (2,), {"l": "x"}, AUTO),
        ("selective_scan", "continued", (2,), {"l": "x"}, AUTO),
        ("ssd", "alone", (2,), {"l": "x"}, AUTO),
        ("linear_scan", "packed", (2, 2), {"l": "x", "b": "y"}, AUTO),
        ("ssd", "packed", (2, 2), {"l": "y", "b": "x"}, AUTO),
        ("selective_scan", "packed", (2, 2), {"l": "y", "d": "x"}, AUTO),
        ("ssd", "continued", (2, 2), {"l": "y", "d": "x"}, EXPLICIT),
        ("causal_conv1d", "packed", (2, 2), {"l": ("y", "x")}, AUTO),
        ("selective_scan", "alone", (2, 2), {"l": ("x", "y")}, EXPLICIT),
    ],
)
def test_split_sequences_are_as_whole_ones(name, given, shape, split, kind):
    """Output, final state and gradients, with nothing as long as the sequence gathered."""
    op = OPS[name]
    arrays = GIVEN[given](op.arrays)
    run = _value_and_grads(op, return_final_state=given != "alone")
    mesh = _mesh(kind, shape, "xy"[: len(shape)])
    placed = _placed(op, arrays, mesh, **split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = run.lower(*placed).compile()
    got = compiled(*placed)
    check.assert_close(got, run(*arrays), TOLERANCE)
    text = compiled.as_text()
    assert "all-to-all(" not in text
    whole = op.arrays[0].shape[1]
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    assert bool(gathered) == ("conv" not in name or split["l"] == ("y", "x"))
    for line in gathered:
        sizes = line.partition("[")[2].partition("]")[0].split(",")
        assert str(whole) not in sizes, line
    out = jax.tree.leaves(got)[0]
    assert out.sharding.spec[1] == split["l"]


@FOUR_DEVICES
@pytest.mark.parametrize("name", ["linear_scan", "causal_conv1d", "selective_scan", "ssd"])
def test_plain_jax_of_split_sequences(name):
    """``implementation="xla"`` on Explicit axes, whose derivatives are JAX's own."""
    op = OPS[name]
    run = _value_and_grads(op, implementation="xla", return_final_state=True)
    mesh = _mesh(AxisType.Explicit, (4,), "x")
    got = run(*_placed(op, op.arrays, mesh, l="x"))
    check.assert_close(got, run(*op.arrays), TOLERANCE)


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "length", "message", "kind"),
    [
        ("linear_scan", 40, "linear_scan_fwd gathers .* 40 tokens must be a multiple of 16", AUTO),
        ("causal_conv1d", 8, "a part of its 8 tokens is shorter than the 3", EXPLICIT),
        ("selective_scan", 16, "over 4 devices of the mesh's x: .* multiple of 8, the", EXPLICIT),
        ("ssd", 256, "ssd_fwd gathers what is split .* must be a multiple of 128", AUTO),
    ],
)
def test_a_sequence_that_parts_do_not_fit_is_gathered(name, length, message, kind):
    op = OPS[name]
    cut = lambda v, axes: v[:, :length] if axes.startswith("bl") else v
    arrays = tuple(map(cut, op.arrays, op.axes.split()))
    run = _value_and_grads(op, return_final_state=True)
    kernel_call.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = run(*_placed(op, arrays, _mesh(kind, (4,), "x"), l="x"))
    assert any(re.search(message, str(warning.message)) for warning in told), told
    check.assert_close(got, run(*arrays), TOLERANCE)


# Inside of a user's shard_map


def _by_name(op: Op, mesh: Any, axes: Any, check_vma: bool, **options: Any) -> Any:
    """:func:`_value_and_grads` of the op inside ``shard_map``, which adds up devices' shares."""
    final = options["return_final_state"]

    def on_devices(*arrays: Any, state: Any, ids: Any, **given: Any) -> Any:
        present = [a is not None for a in (*arrays, state, ids)]
        specs = (P(*(axes if c == "l" else None for c in letters)) for letters in op.axes.split())

        def part(*values: Any) -> Any:
            left = iter(values)
            *floats, state, ids = (next(left) if is_given else None for is_given in present)
            return op.call(*floats, state=state, ids=ids, sequence_axis=axes, **given)

        mapped = jax.shard_map(
            part,
            mesh=mesh,
            in_specs=tuple(itertools.compress(specs, present)),
            out_specs=(P(None, axes), P()) if final else P(None, axes),
            check_vma=check_vma,
        )
        return mapped(*itertools.compress((*arrays, state, ids), present))

    return _value_and_grads(dataclasses.replace(op, call=on_devices), **options)


EIGHT_DEVICES = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "given", "shape", "axes", "options"),
    [
        *((name, "packed", (4,), "x", {}) for name in OPS),
        ("linear_scan", "alone", (2,), "x", {"implementation": "xla"}),
        ("linear_scan reverse", "continued", (2, 2), ("x", "y"), {"implementation": "xla"}),
        ("causal_conv1d", "continued", (2,), "x", {"check_vma": True}),
        ("causal_conv1d", "packed", (4,), "x", {"implementation": "xla"}),
        ("selective_scan", "continued", (2,), ("x",), {"check_vma": True}),
        ("selective_scan", "packed", (2, 2), ("y", "x"), {}),
        ("selective_scan", "packed", (4,), "x", {"implementation": "xla"}),
        ("ssd", "alone", (2,), "x", {}),
        ("ssd", "packed", (4,), "x", {"check_vma": True, "implementation": "xla"}),
        *(
            pytest.param(name, "packed", (8,), "x", {}, marks=EIGHT_DEVICES, id=f"{name} on eight")
            for name in ("causal_conv1d", "selective_scan none saved", "ssd none saved")
        ),
    ],
)
def test_parts_by_the_name_of_an_axis(name, given, shape, axes, options):
    """Output, final state and gradients inside ``shard_map``, with no array of the whole length."""
    op = OPS[name]
    arrays = GIVEN[given](op.arrays)
    options = {"check_vma": False, "return_final_state": given != "alone"} | options
    mesh = _mesh(AUTO, shape, "xy"[: len(shape)])
    compiled = _by_name(op, mesh, axes, **options).lower(*arrays).compile()
    del options["check_vma"]
    check.assert_close(compiled(*arrays), _value_and_grads(op, **options)(*arrays), TOLERANCE)
    for line in re.findall(r".* all-gather\(.*", compiled.as_text()):
        sizes = line.partition("[")[2].partition("]")[0].split(",")
        assert str(op.arrays[0].shape[1]) not in sizes, line


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "given", "count"),
    [
        ("linear_scan", "packed", 2),
        ("linear_scan reverse", "continued", 2),
        ("selective_scan", "packed", 2),
        ("selective_scan none saved", "continued", 4),
        ("selective_scan none saved", "packed", 4),
        ("ssd", "packed", 2),
        ("ssd none saved", "continued", 8),
        ("ssd none saved", "packed", 8),
    ],
)
def test_parts_in_sections(name, given, count, monkeypatch):
    """What a device with few rows cuts its part into."""
    op, found = OPS[name], []
    cut = lambda of, *args: found.append(of(*args)) or found[-1]
    monkeypatch.setattr(split_scan, "_LEAST", 4)
    monkeypatch.setattr(split_scan.Sections, "of", functools.partial(cut, split_scan.Sections.of))
    monkeypatch.setattr(selective_scan_devices, "CHUNK", 2)
    monkeypatch.setattr(ssd_devices, "SAVED_CHUNK", 32)
    run = _by_name(op, _mesh(AUTO, (2,), "x"), "x", check_vma=False, return_final_state=True)
    arrays = GIVEN[given](op.arrays)
    jax.clear_caches()
    got = run(*arrays)
    jax.clear_caches()
    assert {sections.count for sections in found} == {count}
    check.assert_close(got, _value_and_grads(op, return_final_state=True)(*arrays), TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((1, 1536, 262144, 8), 32),
        ((1, 1536, 256, 8), 1),
        ((8, 1536, 65536, 128), 1),
        ((1, 768, 65536, 128), 64),
        ((1, 1536, 8192 + 128, 128), 1),
        ((1, 64, 2**21, 8), 64),
    ],
)
def test_sections_fill_a_gpu(sizes, count):
    assert split_scan.Sections.of(*sizes).count == count


@pytest.mark.newest
def test_on_eight_devices():
    """The cases above that need as many, in a process that has them."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    tests = [__file__, "-k", "test_parts_by_the_name and eight"]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("linear_scan", 40, "linear_scan_fwd: sequence_axis x .* over 4 devices, but a part of it"),
        ("causal_conv1d", 8, "a part of its 8 tokens is shorter than the 3 .* Pad the sequence"),
        ("selective_scan", 16, "must be a multiple of 8, the tokens .* jax.lax.all_gather"),
        ("ssd", 256, "ssd_fwd: .* a part of its 256 tokens must be a multiple of 128"),
    ],
)
def test_parts_that_do_not_fit_are_told(name, length, message):
    op = OPS[name]
    cut = lambda v, axes: v[:, :length] if axes.startswith("bl") else v
    arrays = GIVEN["continued"](tuple(map(cut, op.arrays, op.axes.split())))
    run = _by_name(op, _mesh(AUTO, (4,), "x"), "x", check_vma=False, return_final_state=True)
    with pytest.raises(ValueError, match=message):
        run.lower(*arrays)


@FOUR_DEVICES
def test_calls_that_cannot_name_an_axis_are_told():
    op = OPS["linear_scan"]
    with pytest.raises(ValueError, match=r"'x' is none.* leave it out"):
        op.call(*op.arrays, sequence_axis="x")
    mesh, options = _mesh(AUTO, (4,), "x"), {"return_final_state": True, "num_segments": 2}
    arrays = *op.arrays[:2], jnp.zeros((2, 2, 6)), op.arrays[3]
    run = _by_name(op, mesh, "x", check_vma=False, **options)
    with pytest.raises(ValueError, match=r"num_segments=2 needs .* over x; leave"):
        run.lower(*arrays)
    alone = _by_name(op, _mesh(AUTO, (1,), "x"), "x", check_vma=False, **options)
    check.assert_close(alone(*arrays), _value_and_grads(op, **options)(*arrays), TOLERANCE)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_an_axis_of_one_device_may_be_named(name, implementation):
    """And the final state is typed as the same on all of it."""
    op, options = OPS[name], {"return_final_state": True, "implementation": implementation}
    arrays = GIVEN["packed"](op.arrays)
    run = _by_name(op, _mesh(AUTO, (1,), "x"), "x", check_vma=True, **options)
    check.assert_close(run(*arrays), _value_and_grads(op, **options)(*arrays), TOLERANCE)


@FOUR_DEVICES
@pytest.mark.parametrize("block", [mamba, mamba2])
def test_blocks_split_along_their_sequence(block):
    small: Any = {"headdim": 4} if block is mamba2 else {}
    sizes = block.Sizes(8, d_state=4, **small)
    length, keys = 256, iter(jax.random.split(jax.random.key(0), 16))
    inits = block.initializers(sizes).items()
    weights = block.BLOCK.weights_from({k: f(next(keys), s, jnp.float32) for k, (f, s) in inits})
    x, ids, cache = _random(2, length, 8), _ids(2, length), block.init_cache(sizes, 2, jnp.float32)
    cache = jax.tree.map(lambda v: _random(*v.shape), cache)

    def run(weights, x, cache, ids, **options):
        options |= {"segment_ids": ids, "return_cache": True}
        return block.BLOCK.apply(weights, sizes, x, cache, **options)

    def value_and_grads(f):
        def of(*args):
            out, vjp = jax.vjp(lambda *floats: f(*floats, ids), *args)
            return out, vjp(jax.tree.map(lambda v: jnp.cos(2 * v), out))

        return jax.jit(of)(weights, x, cache)

    along = P(None, "x")
    split = jax.shard_map(
        functools.partial(run, sequence_axis="x"),
        mesh=_mesh(AUTO, (2,), "x"),
        in_specs=(P(), along, P(), along),
        out_specs=(along, P()),
        check_vma=False,
    )
    check.assert_close(value_and_grads(split), value_and_grads(run), TOLERANCE)


# Kernels, whose devices are elements of a vmap: the interpreter cannot run on several


def _permuted(value: Any, axes: Any, pairs: Any) -> Any:
    """``lax.ppermute``, which under ``vmap`` wants a source for every element."""
    source = np.full(jax.lax.axis_size(axes), -1)
    for one, to in pairs:
        source[to] = one
    own = jnp.asarray(source)[jax.lax.axis_index(axes)]
    return jnp.where(own < 0, 0, jax.lax.all_gather(value, axes)[own])


def _in_parts(parts: int, by_name: bool, call: Any, *arrays: Any) -> Any:
    """What :func:`jaxkern.core.kernel_pass._on_mesh` gives on a mesh that splits a sequence.

    Or in a caller's ``shard_map``, `by_name` of its axis, and the sums of the devices' shares.
    """
    if call.alone or call.sequence is None:
        return kernel_pass._on_device(call, *arrays)
    along = lambda factors: factors.index("l") if "l" in factors else None
    cut = lambda v, axis: v if axis is None else jnp.stack(jnp.split(v, parts, axis))
    axes = list(map(along, call.ins))
    if by_name:
        options = dataclasses.replace(call.options, sequence_axis=("x",))
        part = kernel_pass._part(dataclasses.replace(call, options=options), ())
    else:
        part = kernel_pass._part(call, (("l", ("x",)),))
    mapped = jax.vmap(part, [None if a is None else 0 for a in axes], axis_name="x")
    whole = (lambda v: v.sum(0)) if by_name else lambda v: v[0]
    joined = lambda v, axis: whole(v) if axis is None else jnp.concatenate(list(v), axis)
    return tuple(map(joined, mapped(*map(cut, arrays, axes)), map(along, call.outs)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "given", "parts", "by_name"),
    [
        ("linear_scan", "packed", 4, False),
        ("linear_scan reverse", "continued", 2, True),
        ("causal_conv1d", "packed", 2, True),
        ("selective_scan", "packed", 2, False),
    ],
)
def test_kernels_of_parts(name, given, parts, by_name, monkeypatch):
    op = OPS[name]
    monkeypatch.setattr(jax.lax, "ppermute", _permuted)
    arrays = GIVEN[given](op.arrays)
    want = _value_and_grads(op, implementation="xla", return_final_state=True)(*arrays)
    monkeypatch.setattr(split_scan, "_LEAST", 16)
    monkeypatch.setattr(kernel_pass, "_on_mesh", functools.partial(_in_parts, parts, by_name))
    with check.running("mosaic"):
        got = _value_and_grads(op, implementation="mosaic", return_final_state=True)(*arrays)
    check.assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize(
    "name", ["linear_scan reverse", "selective_scan none saved", "ssd none saved"]
)
def test_eight_parts(name, monkeypatch):
    """Segments through several of them."""
    op = OPS[name]
    want = _value_and_grads(op, implementation="xla", return_final_state=True)(*op.arrays)
    monkeypatch.setattr(jax.lax, "ppermute", _permuted)
    monkeypatch.setattr(kernel_pass, "_on_mesh", functools.partial(_in_parts, 8, False))
    got = _value_and_grads(op, return_final_state=True)(*op.arrays)
    check.assert_close(got, want, TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "p", "n"), [(False, 64, 16), (True, 80, 144)])
def test_ssd_kernels_carry(packed, p, n):
    """What a part hands on, in both directions; its products take 16 bits."""
    b, l, g, r = 1, 200, 1, 2
    half = lambda *shape: _random(*shape).astype(jnp.bfloat16)
    x, dt, weights = (
        half(b, l, g, r, p),
        0.01 + 0.01 * jnp.abs(_random(b, l, g, r)),
        half(b, l, g, n),
    )
    rank = _ids(b, l) if packed else None
    options = reference.Options(True, 128, "interpret")
    forward, back = (x, dt, -dt, weights, rank), (-dt, weights, x, rank)
    run = lambda f, args: jax.jit(functools.partial(f, options))(*args)
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        got = run(carry.launch_device_carry, forward), run(carry.launch_device_bwd_carry, back)
    want = run(reference.reference_carry, forward), run(reference.reference_bwd_carry, back)
    check.assert_close(got, want, 2.0**-8)
