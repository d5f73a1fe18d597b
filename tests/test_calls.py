"""What every op says of arguments that are wrong whatever the op, and does with empty ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.cases.case import dtypes
from tests import check
from tests.test_modes import BF16, CASES, EACH, F32, KERNELS, gradients

SIZES = {"b": 2, "m": 7, "l": 5, "d": 32, "k": 16, "h": 24, "n": 3, "w": 4}
SIZES |= {"heads": 6, "p": 64, "g": 1, "v": 40}
MIXED = dtypes(BF16, matrices=F32, parameters=F32)
OF_PRODUCTS = {"linear", "gated_linear_unit", "rms_norm_linear", "layer_norm_linear"}


@EACH
@check.BOTH
def test_empty_axes(name, implementation):
    """Results and gradients have their shapes and dtypes, and what nothing depends on is 0."""
    case = CASES[name]
    if implementation == "mosaic" and (name not in KERNELS or case.op in OF_PRODUCTS):
        implementation = None
    call = functools.partial(case.call, implementation=implementation)
    full = jax.eval_shape(call, *case.types(SIZES, MIXED))
    axes = set(case.axes.split()) & {
        *"bmlkhp",
        "heads",
        *("" if "group_size" in case.options else "d"),
    }
    for empty in ({*axes}, *({axis} for axis in axes)):
        none = {SIZES[axis] for axis in empty}
        shapes = [tuple(n * (n not in none) for n in v.shape) for v in jax.tree.leaves(full)]
        arrays = case.arrays(jax.random.key(0), SIZES | dict.fromkeys(empty, 0), MIXED)
        with check.running(implementation):
            results = jax.tree.leaves(call(*arrays))
            _, grads = gradients(call, arrays)(*arrays)
        assert [v.shape for v in results] == shapes
        floating = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
        for grad, array in zip(grads, floating, strict=True):
            assert (grad.shape, grad.dtype) == (array.shape, array.dtype)
            assert np.isfinite(np.float32(grad)).all()
            assert any(v.size for v in results) or not grad.any()


@pytest.mark.parametrize("name", KERNELS)
def test_unknown_implementations_are_refused(name):
    kinds = CASES[name].types(SIZES, MIXED)
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'triton\''):
        jax.eval_shape(functools.partial(CASES[name].call, implementation="triton"), *kinds)


@pytest.mark.skipif(check.ON_GPU, reason="of where there is none")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_need_a_gpu(name):
    kinds = CASES[name].types(SIZES | {"k": 128, "h": 128}, MIXED)
    run = jax.jit(functools.partial(CASES[name].call, implementation="mosaic"))
    with pytest.raises(NotImplementedError, match=r"lowered for cpu. Use implementation="):
        run.lower(*kinds)


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if case.run is None and "norm_linear" not in n]
)
def test_arguments_are_arrays(name):
    case = CASES[name]
    kinds = case.types(SIZES, MIXED)
    for i in range(len(kinds)):
        wrong = lambda *arrays, i=i: case.call(*arrays[:i], "ones", *arrays[i + 1 :])
        with pytest.raises(TypeError, match=r"^\w+ must be an array, got str"):
            jax.eval_shape(wrong, *kinds)
