"""A sequence that a user's ``shard_map`` splits, of which each device has a part."""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxkern.nn import mamba, mamba2
from jaxkern.ops import split_scan
from jaxkern.ops.selective_scan import devices as selective_scan_devices
from jaxkern.ops.ssd import devices as ssd_devices
from tests import check
from tests.sequences import (
    AUTO,
    FOUR_DEVICES,
    GIVEN,
    OPS,
    TOLERANCE,
    Op,
    ids_of,
    mesh_of,
    random,
    value_and_grads,
)


def _by_name(op: Op, mesh: Any, axes: Any, check_vma: bool, **options: Any) -> Any:
    """What :func:`value_and_grads` gives, inside ``shard_map``, which adds up devices' shares."""
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

    return value_and_grads(dataclasses.replace(op, call=on_devices), **options)


_EIGHT_DEVICES = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


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
            pytest.param(name, "packed", (8,), "x", {}, marks=_EIGHT_DEVICES, id=f"{name} on eight")
            for name in ("causal_conv1d", "selective_scan none saved", "ssd none saved")
        ),
    ],
)
def test_parts_by_the_name_of_an_axis(name, given, shape, axes, options):
    """Output, final state and gradients inside ``shard_map``, with no array of the whole length."""
    op = OPS[name]
    arrays = GIVEN[given](op.arrays)
    options = {"check_vma": False, "return_final_state": given != "alone"} | options
    mesh = mesh_of(AUTO, shape, "xy"[: len(shape)])
    compiled = _by_name(op, mesh, axes, **options).lower(*arrays).compile()
    del options["check_vma"]
    check.assert_close(compiled(*arrays), value_and_grads(op, **options)(*arrays), TOLERANCE)
    for line in re.findall(r".* all-gather\(.*", compiled.as_text()):
        sizes = line.partition("[")[2].partition("]")[0].split(",")
        assert str(op.arrays[0].shape[1]) not in sizes, line


@pytest.mark.newest
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
    run = _by_name(op, mesh_of(AUTO, (2,), "x"), "x", check_vma=False, return_final_state=True)
    arrays = GIVEN[given](op.arrays)
    jax.clear_caches()
    got = run(*arrays)
    jax.clear_caches()
    assert {sections.count for sections in found} == {count}
    check.assert_close(got, value_and_grads(op, return_final_state=True)(*arrays), TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((1, 1536, 262144, 8), 32),
        ((1, 1536, 256, 8), 1),
        ((8, 1536, 65536, 128), 1),
        ((1, 768, 65536, 128), 64),
        ((1, 1536, 8192 + 128, 128), 1),
        ((1, 64, 2**21, 8), 64),
        ((1, 0, 2**21, 8), 1),
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
    run = _by_name(op, mesh_of(AUTO, (4,), "x"), "x", check_vma=False, return_final_state=True)
    with pytest.raises(ValueError, match=message):
        run.lower(*arrays)


@FOUR_DEVICES
def test_calls_that_cannot_name_an_axis_are_told():
    op = OPS["linear_scan"]
    with pytest.raises(ValueError, match=r"'x' is none.* leave it out"):
        op.call(*op.arrays, sequence_axis="x")
    mesh, options = mesh_of(AUTO, (4,), "x"), {"return_final_state": True, "num_segments": 2}
    arrays = *op.arrays[:2], jnp.zeros((2, 2, 6)), op.arrays[3]
    run = _by_name(op, mesh, "x", check_vma=False, **options)
    with pytest.raises(ValueError, match=r"num_segments=2 needs .* over x; leave"):
        run.lower(*arrays)
    alone = _by_name(op, mesh_of(AUTO, (1,), "x"), "x", check_vma=False, **options)
    check.assert_close(alone(*arrays), value_and_grads(op, **options)(*arrays), TOLERANCE)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_an_axis_of_one_device_may_be_named(name, implementation):
    """And the final state is typed as the same on all of it."""
    op, options = OPS[name], {"return_final_state": True, "implementation": implementation}
    arrays = GIVEN["packed"](op.arrays)
    run = _by_name(op, mesh_of(AUTO, (1,), "x"), "x", check_vma=True, **options)
    check.assert_close(run(*arrays), value_and_grads(op, **options)(*arrays), TOLERANCE)


@FOUR_DEVICES
@pytest.mark.parametrize("block", [mamba, mamba2])
def test_blocks_split_along_their_sequence(block):
    small: Any = {"headdim": 4} if block is mamba2 else {}
    sizes = block.Sizes(8, d_state=4, **small)
    length, keys = 256, iter(jax.random.split(jax.random.key(0), 16))
    inits = block.initializers(sizes).items()
    weights = block.BLOCK.weights_from({k: f(next(keys), s, jnp.float32) for k, (f, s) in inits})
    x, ids, cache = random(2, length, 8), ids_of(2, length), block.init_cache(sizes, 2, jnp.float32)
    cache = jax.tree.map(lambda v: random(*v.shape), cache)

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
        mesh=mesh_of(AUTO, (2,), "x"),
        in_specs=(P(), along, P(), along),
        out_specs=(along, P()),
        check_vma=False,
    )
    check.assert_close(value_and_grads(split), value_and_grads(run), TOLERANCE)
