"""Sequences that devices split, under jit and in a user's ``shard_map``, and their sections."""

import dataclasses
import functools
import re
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.core import kernel_call, kernel_pass
from jaxkern.nn import delta_net, mamba, mamba2
from jaxkern.ops import delta_rule, linear_scan, selective_scan, ssd
from jaxkern.ops import sections as sections_of
from jaxkern.ops.scan_options import StepSizes
from jaxkern.ops.sections import SectionOptions
from tests import check, sequences
from tests.check import FOUR_DEVICES, exhaustive, mesh_of
from tests.sequences import random

TOLERANCE = 2e-5
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def ids_of(batch: int, length: int) -> jax.Array:
    """Segments of which one goes through several parts, and some begin with one or end in one."""
    ends = [3, length // 8, length // 8 + 1, 5 * length // 8, length - 2]
    ids = [np.searchsorted(ends, np.arange(length) - row, side="right") for row in range(batch)]
    return jnp.asarray(np.stack(ids), jnp.int32)


def _op(name: str, length: int, channels: int, **options: Any) -> Any:
    """An op at small size: its arrays, the last of segment ids, and a letter for each axis."""
    of_heads = name in ("ssd", "gated_delta_rule", "KDA")
    op, groups = sequences.OPS[name], {"n": 5, "p": 3, "g": 1} if of_heads else {"n": 3}
    arrays = op.arrays(b=2, l=length, d=channels, w=4, k=3, **groups)
    call = functools.partial(op.call, **options)
    arrays, axes = (*arrays, ids_of(2, length)), f"{op.axes} bl"
    return SimpleNamespace(call=call, oracle=op.oracle, arrays=arrays, axes=axes)


OPS = {
    "linear_scan": _op("linear_scan", 64, 6),
    "linear_scan reverse": _op("linear_scan reverse", 64, 6),
    "causal_conv1d": _op("causal_conv1d", 32, 128),
    "causal_conv1d of few channels": _op("causal_conv1d", 32, 6),
    "selective_scan": _op("selective_scan", 32, 6, checkpoint_every=8),
    "selective_scan seldom saved": _op("selective_scan", 32, 6, checkpoint_every=16),
    "selective_scan none saved": _op("selective_scan", 32, 6, checkpoint_every=None),
    "ssd": _op("ssd", 512, 4, checkpoint_every=128),
    "ssd none saved": _op("ssd", 512, 4, checkpoint_every=None),
    "gated_delta_rule": _op("gated_delta_rule", 1024, 2),
    "KDA": _op("KDA", 1024, 2),
}
GIVEN = {  # of an op's arrays: neither state nor segments, a state, both
    "alone": lambda arrays: (*arrays[:-2], None, None),
    "continued": lambda arrays: (*arrays[:-1], None),
    "packed": lambda arrays: arrays,
}


def value_and_grads(call: Any, *, grads: bool = True, **options: Any) -> Any:
    """Results and the gradients of all arrays, by cotangents that differ everywhere."""

    def run(*arrays: Any) -> Any:
        *floats, ids = arrays
        f = functools.partial(call, segment_ids=ids, **options)
        if not grads:
            return f(*floats)
        out, vjp = jax.vjp(f, *floats)
        return out, vjp(jax.tree.map(lambda v: jnp.cos(2 * v), out))

    return jax.jit(run)


@functools.cache
def wanted(name: str, given: str, length: int | None = None) -> Any:
    """What :func:`value_and_grads` gives, in float64 NumPy; the final state unless "alone"."""
    op = OPS[name]
    *floats, ids = (np.asarray(v) for v in _cut(op, length))
    floats = [v.astype("float64") for v in floats]
    if given == "alone":
        floats[-1] *= 0
    oracle = functools.partial(op.oracle, *floats, segment_ids=ids if given == "packed" else None)
    (out, final), _ = oracle(0 * floats[0], 0 * floats[-1])
    if given == "alone":
        (out, _), grads = oracle(np.cos(2 * out), 0 * final)
        return out, grads[:-1]
    return oracle(np.cos(2 * out), np.cos(2 * final))


def _cut(op: Any, length: int | None) -> Any:
    """The op's arrays, as long as `length`."""
    cut = lambda v, axes: v[:, :length] if axes.startswith("bl") else v
    return tuple(map(cut, op.arrays, op.axes.split()))


def assert_nothing_whole(compiled: Any, op: Any) -> None:
    """No all-gather gives an array as long as the sequence."""
    for line in re.findall(r".* all-gather\(.*", compiled.as_text()):
        sizes = line.partition("[")[2].partition("]")[0].split(",")
        assert str(op.arrays[0].shape[1]) not in sizes, line


# Under plain jit


def _placed(op: Any, arrays: Any, mesh: Any, **split: Any) -> tuple[Any, ...]:
    specs = (P(*(split.get(letter) for letter in axes)) for axes in op.axes.split())
    return tuple(
        None if a is None else jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arrays, specs, strict=True)
    )


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "given", "shape", "split", "kind", "implementation"),
    [
        ("linear_scan", "packed", (4,), {"l": "x"}, AUTO, None),
        ("linear_scan", "packed", (4,), {"l": "x"}, EXPLICIT, "xla"),
        ("linear_scan reverse", "packed", (4,), {"l": "x"}, EXPLICIT, None),
        ("causal_conv1d", "packed", (4,), {"l": "x"}, AUTO, None),
        ("causal_conv1d of few channels", "packed", (4,), {"l": "x"}, EXPLICIT, None),
        exhaustive("selective_scan", "packed", (4,), {"l": "x"}, AUTO, None),
        ("ssd", "packed", (4,), {"l": "x"}, AUTO, None),
        exhaustive("gated_delta_rule", "packed", (4,), {"l": "x"}, EXPLICIT, None),
        exhaustive("gated_delta_rule", "packed", (4,), {"l": "x"}, AUTO, None),
        exhaustive("gated_delta_rule", "continued", (2, 2), {"l": "y", "d": "x"}, AUTO, None),
        exhaustive("gated_delta_rule", "alone", (2,), {"l": "x"}, EXPLICIT, "xla"),
        exhaustive("KDA", "packed", (2, 2), {"l": "y", "b": "x"}, AUTO, None),
        exhaustive("KDA", "packed", (4,), {"l": "x"}, EXPLICIT, "xla"),
        exhaustive("linear_scan", "alone", (2,), {"l": "x"}, EXPLICIT, None),
        exhaustive("linear_scan reverse", "packed", (2, 2), {"l": "x", "b": "y"}, AUTO, None),
        exhaustive("causal_conv1d", "alone", (2,), {"l": "x"}, EXPLICIT, None),
        exhaustive("causal_conv1d", "packed", (4,), {"l": "x"}, EXPLICIT, "xla"),
        exhaustive("causal_conv1d", "packed", (2, 2), {"l": ("y", "x")}, AUTO, None),
        exhaustive("causal_conv1d of few channels", "packed", (4,), {"l": "x"}, AUTO, None),
        exhaustive("selective_scan", "packed", (4,), {"l": "x"}, EXPLICIT, "xla"),
        exhaustive(
            "selective_scan seldom saved", "alone", (2, 2), {"l": ("x", "y")}, EXPLICIT, None
        ),
        exhaustive("selective_scan", "packed", (2, 2), {"l": "y", "d": "x"}, AUTO, None),
        exhaustive("selective_scan none saved", "continued", (4,), {"l": "x"}, AUTO, None),
        exhaustive("ssd", "packed", (4,), {"l": "x"}, EXPLICIT, "xla"),
        exhaustive("ssd", "alone", (2,), {"l": "x"}, AUTO, None),
        exhaustive("ssd", "continued", (2, 2), {"l": "y", "d": "x"}, EXPLICIT, None),
        exhaustive("ssd none saved", "packed", (2, 2), {"l": "y", "b": "x"}, AUTO, None),
    ],
)
def test_split_sequences_are_as_whole_ones(name, given, shape, split, kind, implementation):
    """Output, final state and gradients, with nothing as long as the sequence gathered."""
    op, options = OPS[name], {"implementation": implementation}
    placed = _placed(op, GIVEN[given](op.arrays), mesh_of(kind, *shape), **split)
    run = value_and_grads(op.call, return_final_state=given != "alone", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = run.lower(*placed).compile()
    got = compiled(*placed)
    check.assert_close(got, wanted(name, given), TOLERANCE)
    assert_nothing_whole(compiled, op)
    assert jax.tree.leaves(got)[0].sharding.spec[1] == split["l"]


@FOUR_DEVICES
def test_gradients_of_a_convolution_in_bf16():
    """Tokens at the end of a part get a gradient from the next one, and are rounded once."""
    call, (x, *weights) = OPS["causal_conv1d"].call, OPS["causal_conv1d"].arrays[:3]
    half, dout = x.astype(jnp.bfloat16), random(*x.shape, seed=7).astype(jnp.bfloat16)
    dx = lambda x, dout: check.value_and_grads(call, (x, *weights), dout)[1][0]
    got = dx(*jax.device_put((half, dout), NamedSharding(mesh_of(AUTO, 4), P(None, "x"))))
    assert got.dtype == jnp.bfloat16
    ends = np.arange(x.shape[1]).reshape(4, -1)[:3, -3:].reshape(-1)
    truth = dx(half.astype(jnp.float32), dout.astype(jnp.float32))
    of_ends = lambda v: np.asarray(v, np.float64)[:, ends]
    check.at_most_twice("dx", of_ends(got), of_ends(dx(half, dout)), of_ends(truth))


UNFIT = {
    "linear_scan": (40, "tokens must be a multiple of 16", AUTO),
    "causal_conv1d": (8, "a part of its 8 tokens is shorter than the 3", EXPLICIT),
    "selective_scan": (16, "must be a multiple of 8, the tokens", EXPLICIT),
    "ssd": (256, "a part of its 256 tokens must be a multiple of 128", AUTO),
    "gated_delta_rule": (512, "a part of its 512 tokens must be a multiple of 256", EXPLICIT),
}
"""Lengths of which a quarter is no part of the sequence, why, and a kind of mesh to gather on."""


@FOUR_DEVICES
@pytest.mark.parametrize(
    "name",
    [
        "linear_scan",
        "causal_conv1d",
        *map(exhaustive, ("selective_scan", "ssd", "gated_delta_rule")),
    ],
)
def test_a_sequence_that_parts_do_not_fit_is_gathered(name):
    op, (length, why, kind) = OPS[name], UNFIT[name]
    run = value_and_grads(op.call, return_final_state=True)
    kernel_call.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = run(*_placed(op, _cut(op, length), mesh_of(kind, 4), l="x"))
    message = f"{name}_fwd gathers what is split over 4 devices of the mesh's x: .*{why}"
    assert any(re.search(message, str(warning.message)) for warning in told), told
    check.assert_close(got, wanted(name, "packed", length), TOLERANCE)


# Inside shard_map


def _by_name(op: Any, mesh: Any, axes: Any, check_vma: bool, **options: Any) -> Any:
    """What :func:`value_and_grads` gives, inside ``shard_map``, which adds up devices' shares."""
    specs = tuple(P(*(axes if c == "l" else None for c in letters)) for letters in op.axes.split())
    along, final = P(None, axes), options["return_final_state"]

    def on_devices(*arrays: Any, segment_ids: Any, **given: Any) -> Any:
        part = lambda *v: op.call(*v[:-1], segment_ids=v[-1], sequence_axis=axes, **given)
        out_specs = (along, P()) if final else along
        how = {"in_specs": specs, "out_specs": out_specs, "check_vma": check_vma}
        return jax.shard_map(part, mesh=mesh, **how)(*arrays, segment_ids)

    return value_and_grads(on_devices, **options)


XLA, CHECKED = {"implementation": "xla"}, {"check_vma": True}


@FOUR_DEVICES
@pytest.mark.parametrize(
    ("name", "given", "shape", "axes", "options"),
    [
        ("linear_scan", "alone", (2,), "x", XLA),
        ("linear_scan reverse", "packed", (4,), "x", {}),
        ("causal_conv1d", "packed", (2, 2), ("y", "x"), {}),
        ("selective_scan", "continued", (2,), ("x",), CHECKED | {"grads": False}),
        ("ssd", "packed", (4,), "x", {"grads": False}),
        ("gated_delta_rule", "packed", (4,), "x", {"grads": False}),
        exhaustive("gated_delta_rule", "packed", (4,), "x", CHECKED),
        exhaustive("KDA", "packed", (2, 2), ("y", "x"), XLA),
        exhaustive("KDA", "continued", (2,), "x", {}),
        exhaustive("linear_scan", "packed", (4,), "x", CHECKED),
        exhaustive("linear_scan reverse", "continued", (2, 2), ("x", "y"), XLA),
        exhaustive("causal_conv1d", "continued", (2,), "x", CHECKED),
        exhaustive("causal_conv1d", "packed", (4,), "x", XLA),
        exhaustive("causal_conv1d of few channels", "packed", (4,), "x", {}),
        exhaustive("selective_scan", "continued", (2,), ("x",), CHECKED),
        exhaustive("selective_scan", "packed", (2, 2), ("y", "x"), {}),
        exhaustive("selective_scan", "packed", (4,), "x", XLA),
        exhaustive("selective_scan none saved", "packed", (4,), "x", {}),
        exhaustive("ssd", "packed", (4,), "x", {}),
        exhaustive("ssd", "packed", (4,), "x", CHECKED | XLA),
        exhaustive("ssd none saved", "alone", (2,), "x", {}),
    ],
)
def test_parts_by_the_name_of_an_axis(name, given, shape, axes, options):
    """Output, final state and gradients inside ``shard_map``, with no array of the whole length."""
    op = OPS[name]
    arrays = GIVEN[given](op.arrays)
    options = {"check_vma": False, "return_final_state": given != "alone"} | options
    compiled = _by_name(op, mesh_of(AUTO, *shape), axes, **options).lower(*arrays).compile()
    want = wanted(name, given)
    want = want if options.get("grads", True) else want[0]
    check.assert_close(compiled(*arrays), want, TOLERANCE)
    assert_nothing_whole(compiled, op)


@FOUR_DEVICES
@pytest.mark.parametrize("name", UNFIT)
def test_parts_that_do_not_fit_are_told(name):
    op, (length, why, _) = OPS[name], UNFIT[name]
    run = _by_name(op, mesh_of(AUTO, 4), "x", check_vma=False, return_final_state=True)
    message = f"{name}_fwd: sequence_axis x .* over 4 devices, but .*{why}.*jax.lax.all_gather"
    with pytest.raises(ValueError, match=message):
        run.lower(*GIVEN["continued"](_cut(op, length)))


@FOUR_DEVICES
def test_calls_that_cannot_name_an_axis_are_told():
    op = OPS["linear_scan"]
    with pytest.raises(ValueError, match=r"'x' is none.* leave it out"):
        op.call(*op.arrays[:-1], sequence_axis="x")
    options = {"return_final_state": True, "num_segments": 2}
    arrays = *op.arrays[:2], jnp.zeros((2, 2, 6)), op.arrays[3]
    run = _by_name(op, mesh_of(AUTO, 4), "x", check_vma=False, **options)
    with pytest.raises(ValueError, match=r"num_segments=2 needs .* over x; leave"):
        run.lower(*arrays)
    alone = _by_name(op, mesh_of(AUTO, 1), "x", check_vma=False, **options)
    assert jax.eval_shape(alone, *arrays)[0][1].shape == (2, 2, 6)


@pytest.mark.parametrize("implementation", [None, exhaustive("xla")])
@pytest.mark.parametrize(
    "name", [n if "linear" in n or "conv" in n else exhaustive(n) for n in OPS if "saved" not in n]
)
def test_an_axis_of_one_device_may_be_named(name, implementation):
    """The final state is typed as the same on all of it."""
    op, options = OPS[name], {"return_final_state": True, "implementation": implementation}
    run = _by_name(op, mesh_of(AUTO, 1), "x", check_vma=True, **options)
    (out, final), grads = jax.eval_shape(run, *op.arrays)
    assert (out.shape, final.shape) == (op.arrays[0].shape, op.arrays[-2].shape)
    assert [v.shape for v in grads] == [v.shape for v in op.arrays[:-1]]


@FOUR_DEVICES
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("block", "small"),
    [
        (mamba.BLOCK, {"d_state": 4}),
        (mamba2.BLOCK, {"d_state": 4, "headdim": 4}),
        (delta_net.GATED_DELTA_NET, {"num_heads": 2, "d_key": 4, "d_value": 4}),
        (delta_net.KIMI_DELTA_ATTENTION, {"num_heads": 2, "d_key": 4, "d_value": 4}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_blocks_split_along_their_sequence(block, small):
    sizes, length = block.sizes(8, **small), 2 * block.chunk
    keys = iter(jax.random.split(jax.random.key(0), 16))
    inits = block.initializers(sizes).items()
    weights = block.weights_from({k: f(next(keys), s, jnp.float32) for k, (f, s) in inits})
    cache = block.init_cache(sizes, 2, jnp.float32)
    arrays = weights, random(2, length, 8), jax.tree.map(lambda v: random(*v.shape), cache)

    def run(weights, x, cache, segment_ids, **options):
        options |= {"segment_ids": segment_ids, "return_cache": True}
        return block.apply(weights, sizes, x, cache, **options)

    def split(*arrays, segment_ids):
        in_specs, out_specs = (P(), P(None, "x"), P(), P(None, "x")), (P(None, "x"), P())
        how = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        of_part = functools.partial(run, sequence_axis="x")
        return jax.shard_map(of_part, mesh=mesh_of(AUTO, 2), **how)(*arrays, segment_ids)

    got, want = (value_and_grads(f)(*arrays, ids_of(2, length)) for f in (split, run))
    check.assert_close(got, want, TOLERANCE)


# Devices that are elements of a vmap: one program without a mesh, which may be interpreted


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


KERNELS = functools.partial(pytest.param, marks=[pytest.mark.exhaustive, pytest.mark.gpu])


@pytest.mark.parametrize(
    ("name", "given", "parts", "sections", "by_name", "implementation"),
    [
        exhaustive("linear_scan", "packed", 2, 2, False, None),
        exhaustive("linear_scan reverse", "packed", 8, 1, True, None),
        exhaustive("selective_scan none saved", "continued", 4, 2, False, None),
        exhaustive("ssd none saved", "packed", 8, 2, True, None),
        exhaustive("linear_scan reverse", "continued", 2, 2, False, None),
        exhaustive("causal_conv1d", "packed", 8, 1, True, None),
        exhaustive("selective_scan", "packed", 2, 2, True, None),
        ("selective_scan none saved", "packed", 2, 4, True, None),
        exhaustive("ssd", "packed", 2, 2, False, None),
        exhaustive("ssd none saved", "continued", 2, 8, False, None),
        KERNELS("linear_scan", "packed", 2, 2, True, "mosaic"),
        KERNELS("linear_scan reverse", "continued", 4, 1, False, "mosaic"),
        KERNELS("causal_conv1d", "packed", 2, 1, True, "mosaic"),
        pytest.param("selective_scan", "packed", 2, 2, False, "mosaic", marks=pytest.mark.compiled),
    ],
)
def test_parts_and_their_sections(
    name, given, parts, sections, by_name, implementation, monkeypatch
):
    """A device with few rows cuts its part into sections, which are rows to the kernels."""
    op, found = OPS[name], set()
    length = op.arrays[0].shape[1] // parts
    cut = lambda of, *args: (found.add(of(*args).count), of(*args))[1]
    monkeypatch.setattr(sections_of, "_LEAST", length // sections)
    monkeypatch.setattr(sections_of.Sections, "of", functools.partial(cut, sections_of.Sections.of))
    monkeypatch.setattr(selective_scan.op, "CHUNK", 2)
    monkeypatch.setattr(ssd.devices, "SAVED_CHUNK", 32)
    monkeypatch.setattr(jax.lax, "ppermute", _permuted)
    monkeypatch.setattr(kernel_pass, "_on_mesh", functools.partial(_in_parts, parts, by_name))
    jax.clear_caches()  # of what is traced without all this
    with check.running(implementation):
        run = value_and_grads(op.call, implementation=implementation, return_final_state=True)
        got = run(*GIVEN[given](op.arrays))
    jax.clear_caches()
    assert found == (set() if "conv" in name else {sections})
    check.assert_close(got, wanted(name, given), TOLERANCE)


def test_sections_fill_a_gpu():
    of = lambda *sizes: sections_of.Sections.of(*sizes).count
    assert of(1, 1536, 262144, 8) == 32
    assert of(1, 1536, 256, 8) == 1
    assert of(8, 1536, 65536, 128) == 1
    assert of(1, 768, 65536, 128) == of(1, 64, 2**21, 8) == 64
    assert of(1, 1536, 8192 + 128, 128) == of(1, 0, 2**21, 8) == 1


def _carries(name: str, packed: bool) -> Any:
    """The options of the passes that find what a device hands on, and their arrays."""
    if name == "ssd":
        b, l, g, r, p, n = (1, 200, 1, 2, 80, 144) if packed else (1, 200, 1, 2, 64, 16)
        half = lambda *shape: random(*shape).astype(jnp.bfloat16)
        x, weights, dt = half(b, l, g, r, p), half(b, l, g, n), jnp.abs(random(b, l, g, r))
        dt, rank = 0.01 + 0.01 * dt, ids_of(b, l) if packed else None
        options = ssd.reference.SsdOptions(True, 128, "interpret")
        return options, (x, dt, -dt, weights, rank), (-dt, weights, x, rank)
    if name in ("gated_delta_rule", "KDA"):
        half = lambda *shape, seed: random(*shape, seed=seed).astype(jnp.bfloat16)
        v, q, k = (
            half(1, 200, 1, 2, 32, seed=0),
            half(1, 200, 1, 64, seed=1),
            half(1, 200, 1, 64, seed=2),
        )
        decays = v.shape[:-1] if name != "KDA" else (*v.shape[:-1], 64)
        steps = -jnp.abs(random(*decays, seed=3)) / 8, jax.nn.sigmoid(random(*v.shape[:-1], seed=4))
        options = delta_rule.reference.DeltaRuleOptions(True, "interpret", 0.5, qk_l2norm=True)
        rank = ids_of(1, 200) if packed else None
        return options, (k, v, *steps, rank), (q, k, *steps, v, rank)
    b, l, d, n = 1, 14, 3, 2
    keep = jnp.ones((b, l)).at[0, 9].set(0.0)
    if name == "selective_scan":
        sizes = StepSizes(True, 0.0, float("inf"))
        options = selective_scan.reference.SelectiveScanOptions(sizes, True, 8, "interpret")
        x, dt, z = (random(b, l, 1, d, seed=i) for i in range(3))
        A, weights, bias = -jnp.exp(random(1, d, n)), random(b, l, 1, n), random(1, d)
        return options, (x, dt, A, weights, bias, keep), (dt, A, weights, z, bias, keep, x)
    tiles = linear_scan.tiles.LinearScanTiles(4, parts=3)
    options = linear_scan.tiles.LinearScanOptions(not packed, "interpret", tiles=tiles)
    entered = jnp.where(keep > 0, -1, 0) if packed else None
    arrays = random(b, l, d), random(b, l, d, seed=1), entered
    return options, arrays, arrays


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("linear_scan", True),
        exhaustive("linear_scan", False),
        exhaustive("selective_scan", True),
        exhaustive("ssd", True),
        exhaustive("ssd", False),
        exhaustive("gated_delta_rule", True),
        exhaustive("gated_delta_rule", False),
        exhaustive("KDA", False),
    ],
)
def test_kernels_find_what_a_device_hands_on(name, packed, monkeypatch):
    """In both directions; products take 16 bits."""
    ops = {"linear_scan": linear_scan.op, "selective_scan": selective_scan.op}
    ops |= {"ssd": ssd.devices, "gated_delta_rule": delta_rule.devices, "KDA": delta_rule.devices}
    monkeypatch.setattr(delta_rule.call, "_parts", lambda call: 2)
    options, *arrays = _carries(name, packed)
    passes = ops[name].CARRY, ops[name].BWD_CARRY
    run = lambda f, args: jax.jit(functools.partial(f, options))(*args)
    with check.in_kernels():
        got = [run(p.kernel, args) for p, args in zip(passes, arrays, strict=True)]
    want = [run(p.reference, args) for p, args in zip(passes, arrays, strict=True)]
    finite = lambda v: np.nan_to_num(np.asarray(v, np.float64), nan=7.0, posinf=9.0)
    # Of the delta rule a plain scan in bf16 errs by 3e-2 in the matrix and by 7e-3 in the state.
    tolerance = {"ssd": 2.0**-8, "gated_delta_rule": 2.0**-7, "KDA": 2.0**-7}.get(name, 1e-6)
    check.assert_close(jax.tree.map(finite, got), jax.tree.map(finite, want), tolerance)


# The states between the sections of a sequence, by the kernel and in plain JAX

INF, NAN = np.inf, np.nan


def _in_order(decay: Any, own: Any, first: Any, reverse: bool) -> Any:
    """One section after the other, in float64."""
    decay, own, h = (np.asarray(v, np.float64) for v in (decay, own, first))
    per_unit = own.shape[2] // max(1, decay.shape[2])
    decay, states = np.repeat(decay, per_unit, 2), np.empty_like(own)
    for s in range(own.shape[1])[:: -1 if reverse else 1]:
        states[:, s] = h
        kept = ~np.isnan(decay[:, s]) & ~(np.isinf(decay[:, s]) & (h == 0))
        h = own[:, s] + np.multiply(decay[:, s], h, where=kept, out=np.zeros_like(h))
    return states, h


def _arrays(batch: int, sections: int, units: int, size: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    decay = rng.uniform(size=(batch, sections, units))
    own, first = rng.normal(size=(batch, sections, size)), rng.normal(size=(batch, size))
    return jnp.float32(decay), jnp.float32(own), jnp.float32(first)


def _run(f: Any, *arrays: Any) -> Any:
    with check.in_kernels():
        return jax.jit(f)(*arrays)


RUNS = sections_of.launch_states, sections_of.reference_states
SHAPES = {
    "a decay a state": (1, 16, 384, 384),
    "padded": (2, 3, 300, 300),
    "a decay a unit": (2, 8, 2, 512),
    "units narrower than a block": (1, 4, 3, 240),
    "four states a lane": (2, 2, 2, 1024),
    "four states and decays a lane": (1, 2, 1024, 1024),
    "no rows": (0, 4, 8, 8),
    "no states": (2, 4, 0, 0),
}


@pytest.mark.gpu
@check.combinations("shape reverse", SHAPES, [True, False])
def test_states_are_those_of_a_loop(shape, reverse, monkeypatch):
    if shape[-1] == 1024:
        monkeypatch.setattr(sections_of, "num_sms", lambda: 1)  # for which 1024 are enough
    arrays = _arrays(*shape)
    want = _in_order(*arrays, reverse)
    for run in RUNS:
        got = _run(functools.partial(run, SectionOptions(reverse)), *arrays)
        check.assert_close(got, want, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "reverse"),
    [(1, True), (5, False), exhaustive(5, True)],
)
def test_state_after_sections_in_a_row(count, reverse):
    decay, own, _ = _arrays(count, 2, 3, 3 * 4)
    after = functools.partial(sections_of.state_after_all, reverse=reverse)
    got = _run(after, decay[..., None], own.reshape(count, 2, 3, 4))
    row = decay.reshape(1, count, -1), own.reshape(1, count, -1), np.zeros((1, 2 * 3 * 4))
    check.assert_close(got.reshape(1, -1), _in_order(*row, reverse)[1], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS)
def test_what_a_section_keeps_nothing_of(run):
    """A new segment keeps nothing even of a NaN; of a zero an infinite decay makes no NaN."""
    decay = jnp.array([[[NAN, NAN, INF, INF, 0.0, 0.0, 0.5, 0.5]]]).repeat(2, 1)
    first = jnp.array([[NAN, INF, 0.0, 1.0, NAN, 1.0, NAN, 0.0]])
    states, last = _run(functools.partial(run, SectionOptions()), decay, jnp.ones((1, 2, 8)), first)
    after = np.array([[1, 1, 1, INF, NAN, 1, NAN, 1]])
    np.testing.assert_array_equal(states, np.stack([first, after], 1))
    np.testing.assert_array_equal(last, [[1, 1, INF, INF, NAN, 1, NAN, 1.5]])


def test_gradients_pass_states_of_zero():
    decay, own, first = _arrays(1, 4, 6, 6)
    decay = decay.at[0, 1, 0].set(NAN)
    last = lambda first: sections_of.reference_states(SectionOptions(), decay, own, first)[1].sum()
    got = jax.grad(last)(jnp.zeros_like(first))
    want = jnp.where(jnp.isnan(decay), 0, decay).prod(1)
    check.assert_close(got, want, 1e-6)


def test_what_the_kernel_takes():
    decay, own, first = _arrays(1, 4, 6, 6)
    assert sections_of.unsupported_states(SectionOptions(), decay, own, first) is None
    half = own.astype(jnp.bfloat16)
    assert "bfloat16" in str(sections_of.unsupported_states(SectionOptions(), decay, half, first))
