"""The names by which the policies of jax.checkpoint keep or drop what the ops compute."""

import functools

import jax
import pytest

import jaxkern
from jaxkern.cases import TABLE, optim
from jaxkern.cases.case import dtypes
from tests.check import kernel_calls

CASES = {case.op: case for case in TABLE if case.layer and case.has_kernels}
OPS = [op for op, case in CASES.items() if case not in optim.CASES]


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("op", OPS)
def test_results_of_an_op_have_its_name(op, implementation):
    case = CASES[op]
    types = case.types(case.sizes(case.layer), dtypes("bfloat16"))
    call = functools.partial(case.call, implementation=implementation)
    assert f"name[name={op}]" in str(jax.make_jaxpr(call)(*types))


def test_policy_chooses_between_ops():
    """One op's kernel runs once, the other's again in the backward."""

    def f(x):
        x = jaxkern.rms_norm(x, implementation="mosaic")
        return jaxkern.swiglu(x, x, implementation="mosaic") ** 2

    x = jax.ShapeDtypeStruct((8, 128), "float32")
    for kept, counts in (("rms_norm", (1, 2)), ("swiglu", (2, 1)), ("", (2, 2))):
        policy = jax.checkpoint_policies.save_only_these_names(kept)
        grad = jax.jit(jax.grad(lambda x: (jax.checkpoint(f, policy=policy)(x) ** 2).sum()))  # noqa: B023
        text = grad.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        calls = kernel_calls(text)
        found = tuple(sum(f"{op}_fwd" in c for c in calls) for op in ("rms_norm", "swiglu"))
        assert found == counts
