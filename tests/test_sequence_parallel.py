"""A sequence that a mesh splits, under plain jit: values, gradients and what devices exchange."""

import contextlib
import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.core import kernel_pass
from jaxkern.lowering import kernel_call
from jaxkern.mosaic.launch import interpreter
from jaxkern.ops import split_scan
from jaxkern.ops.ssd import carry, reference
from tests import check
from tests.sequences import (
    AUTO,
    EXPLICIT,
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


def _placed(op: Op, arrays: Any, mesh: Any, **split: Any) -> tuple[Any, ...]:
    specs = (P(*(split.get(letter) for letter in axes)) for axes in op.axes.split())
    return tuple(
        None if a is None else jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arrays, specs, strict=True)
    )


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
    run = value_and_grads(op, return_final_state=given != "alone")
    mesh = mesh_of(kind, shape, "xy"[: len(shape)])
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
    run = value_and_grads(op, implementation="xla", return_final_state=True)
    mesh = mesh_of(EXPLICIT, (4,), "x")
    got = run(*_placed(op, op.arrays, mesh, l="x"))
    check.assert_close(got, run(*op.arrays), TOLERANCE)


@FOUR_DEVICES
def test_gradients_of_a_convolution_in_bf16():
    """Tokens at the end of a part get a gradient from the next one, and are rounded once."""
    x, weight, bias, *_ = OPS["causal_conv1d"].arrays
    half, dout = x.astype(jnp.bfloat16), random(*x.shape, seed=7).astype(jnp.bfloat16)

    @jax.jit
    def dx(x, dout):
        call = lambda x: jaxkern.causal_conv1d(x, weight, bias, activation="silu")
        return jax.vjp(call, x)[1](dout)[0]

    split = NamedSharding(mesh_of(AUTO, (4,), "x"), P(None, "x"))
    got = dx(*jax.device_put((half, dout), split))
    assert got.dtype == jnp.bfloat16
    ends = np.arange(x.shape[1]).reshape(4, -1)[:3, -3:].reshape(-1)
    truth = dx(half.astype(jnp.float32), dout.astype(jnp.float32))
    of_ends = lambda v: np.asarray(v, np.float64)[:, ends]
    check.at_most_twice("dx", of_ends(got), of_ends(dx(half, dout)), of_ends(truth))


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
    run = value_and_grads(op, return_final_state=True)
    kernel_call.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = run(*_placed(op, arrays, mesh_of(kind, (4,), "x"), l="x"))
    assert any(re.search(message, str(warning.message)) for warning in told), told
    check.assert_close(got, run(*arrays), TOLERANCE)


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


@pytest.mark.newest
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
    want = value_and_grads(op, implementation="xla", return_final_state=True)(*arrays)
    monkeypatch.setattr(split_scan, "_LEAST", 16)
    monkeypatch.setattr(kernel_pass, "_on_mesh", functools.partial(_in_parts, parts, by_name))
    with check.running("mosaic"):
        got = value_and_grads(op, implementation="mosaic", return_final_state=True)(*arrays)
    check.assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize(
    "name", ["linear_scan reverse", "selective_scan none saved", "ssd none saved"]
)
def test_eight_parts(name, monkeypatch):
    """Segments through several of them."""
    op = OPS[name]
    want = value_and_grads(op, implementation="xla", return_final_state=True)(*op.arrays)
    monkeypatch.setattr(jax.lax, "ppermute", _permuted)
    monkeypatch.setattr(kernel_pass, "_on_mesh", functools.partial(_in_parts, 8, False))
    got = value_and_grads(op, return_final_state=True)(*op.arrays)
    check.assert_close(got, want, TOLERANCE)


@pytest.mark.newest
@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "p", "n"), [(False, 64, 16), (True, 80, 144)])
def test_ssd_kernels_carry(packed, p, n):
    """What a part hands on, in both directions; its products take 16 bits."""
    b, l, g, r = 1, 200, 1, 2
    half = lambda *shape: random(*shape).astype(jnp.bfloat16)
    x, dt, weights = (
        half(b, l, g, r, p),
        0.01 + 0.01 * jnp.abs(random(b, l, g, r)),
        half(b, l, g, n),
    )
    rank = ids_of(b, l) if packed else None
    options = reference.Options(True, 128, "interpret")
    forward, back = (x, dt, -dt, weights, rank), (-dt, weights, x, rank)
    run = lambda f, args: jax.jit(functools.partial(f, options))(*args)
    with contextlib.nullcontext() if check.ON_GPU else interpreter():
        got = run(carry.launch_device_carry, forward), run(carry.launch_device_bwd_carry, back)
    want = run(reference.reference_carry, forward), run(reference.reference_bwd_carry, back)
    check.assert_close(got, want, 2.0**-8)
