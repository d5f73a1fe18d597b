"""The table of cases: that it has every op, and that what it says of an op holds."""

import inspect

import jax
import numpy as np
import pytest

import jaxkern
from jaxkern.cases import MODELS, TABLE, case

pytestmark = pytest.mark.newest

OPS = {
    name
    for name, f in inspect.getmembers(jaxkern, inspect.isfunction)
    if f.__module__.startswith("jaxkern.ops")
}


def test_every_op_has_its_cases():
    """A call for the doctor, one for the strict modes, and errors against float64."""
    assert {c.op for c in TABLE if c.layer} >= OPS
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
