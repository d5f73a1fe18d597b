"""The table of cases: that it has every op, and that what it says of an op holds."""

import inspect
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from bench.cases import MODELS, TABLE, case

OPS = {
    name
    for name, f in inspect.getmembers(jaxkern, inspect.isfunction)
    if f.__module__.startswith("jaxkern.ops")
}


def test_every_op_has_its_cases():
    """One for the strict modes, and errors against float64."""
    assert {c.op for c in TABLE if c.strict} == OPS
    assert {c.op for c in TABLE if c.errors} == {op for op in OPS if not op.endswith("_step")}


def test_what_is_timed_has_a_cost_and_one_name():
    timed = [c for c in TABLE if c.shapes]
    assert len({c.name for c in timed}) == len(timed)
    assert all(
        c.forward and case.total(c.forward.elements, c.sizes(c.shapes[0].sizes)) for c in timed
    )
    assert {name for ops in MODELS.values() for name, _ in ops} <= {c.name for c in timed}


def test_sizes_of_arguments_and_costs():
    gated = next(c for c in TABLE if c.name == "gated_linear_unit, joined")
    sizes = gated.sizes(((2, 5), 8, 4))
    types = gated.types(sizes, case.dtypes("bfloat16", parameters="float32"))
    assert [(t.shape, str(t.dtype)) for t in types] == [
        ((2, 5, 8), "bfloat16"),
        ((8, 8), "bfloat16"),
        ((8,), "float32"),
    ]
    assert case.total("m k + 2 k h", {"m": 10, "k": 8, "h": 4}) == 10 * 8 + 2 * 8 * 4


COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"


def test_what_is_strict_says_how_a_mesh_splits_it():
    """Over axes of the case, one of which is the batch's or the rows' and in every result."""
    for c in (c for c in TABLE if c.strict):
        assert set(c.split.split()) <= set(c.axes.split())
        sizes = dict.fromkeys(case.AXES, 4) | {"m": (4, 2)}
        *_, result = c.specs(c.split[0], "data", sizes)
        assert "data" in result or c.op == "accumulate_weight_grad"
    (c,) = (c for c in TABLE if c.name == "linear, gelu")
    sizes = {"m": (4, 2), "k": 8, "h": 8}
    assert c.specs("m", "x", sizes) == (
        P("x", None, None),
        P(None, None),
        P(None),
        P("x", None, None),
    )
    assert c.specs("h", "x", sizes)[1:] == (P(None, "x"), P("x"), P(None, None, "x"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("c", [c for c in TABLE if c.strict and c.sequence], ids=lambda c: c.name)
def test_a_split_sequence_exchanges_what_its_case_says(c):
    """In plain JAX; what kernels exchange over every axis is in `bench collectives`."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sizes = dict.fromkeys(case.AXES, 8) | {"m": (8, 2), "w": 4, "g": 1}
    sizes["l"] = 512  # a part is a chunk of ssd
    sizes["d"] = 128  # for fewer plain JAX convolves, which XLA splits as it likes
    arrays = c.types(sizes, case.dtypes("float32"))

    def run(dout, *arrays):
        first = lambda *arrays: jax.tree.leaves(c.call(*arrays))[0]
        out, vjp = jax.vjp(first, *arrays)
        return out, vjp(dout)

    dout = jax.tree.leaves(jax.eval_shape(c.call, *arrays))[0]
    *ins, out = (NamedSharding(mesh, spec) for spec in c.specs("l", "data", sizes))
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip((dout, *arrays), (out, *ins), strict=True)
    ]
    text = jax.jit(run).lower(*given).compile().as_text()
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    assert {kind: n for kind, n in found.items() if n} == c.collectives("l")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "c", [c for c in TABLE if c.expression and c.errors and c.errors.small], ids=lambda c: c.name
)
def test_expressions_are_of_the_op(c):
    """In float32 both are near the truth, so that each is measured against what it should be."""
    sizes = c.sizes(c.errors.small)
    arrays = c.arrays(jax.random.key(5), sizes, case.dtypes("float32"))
    want, *_ = case.truth(c, arrays, np.ones(jax.eval_shape(c.expression, *arrays).shape))
    for got in (c.expression(*arrays), c.call(*arrays, implementation="xla")):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < 1e-5
