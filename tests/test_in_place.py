"""Kernels that work in place keep away from slices, of which XLA would make one operation."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern.precision import StaticLossScale
from tests.test_optim_kernel import lowered

ones = jnp.ones
ROWS = ones((64, 512), jnp.bfloat16)
MOSAIC = {"implementation": "mosaic"}
TX = jaxkern.fused_adamw(1e-3, **MOSAIC)
CASES = {
    "fused_adamw": (lambda p, g: jaxkern.apply(TX, g, TX.init(p), p), ones(4096), ones(4096)),
    "scale_gradients": (
        lambda g: jaxkern.scale_gradients(g, StaticLossScale(2.0), **MOSAIC),
        [ones(4096)],
    ),
    "cross_entropy": (
        jax.grad(functools.partial(jaxkern.cross_entropy, **MOSAIC)),
        *(ROWS, jnp.zeros(64, int)),
    ),
    "accumulate_weight_grad": (
        functools.partial(jaxkern.accumulate_weight_grad, **MOSAIC),
        *(ones((512, 512)), ROWS, ROWS),
    ),
    "ssd_step": (
        lambda state, x, dt, w: jaxkern.ssd_step(state, x, dt, -ones(4), w, w, layer=1, **MOSAIC),
        *(ones((2, 1, 4, 16, 32)), ones((1, 4, 16)), ones((1, 4)), ones((1, 1, 32))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_barriers_are_around_kernels_that_work_in_place(name):
    """All that one takes has been behind a barrier, and all that it gives goes behind one."""
    f, *args = CASES[name]
    text = lowered(f, *args)
    in_place = [line for line in text.splitlines() if "output_operand_alias<" in line]
    (function,) = [of for of in re.split(r"\n  func\.func ", text) if in_place[0] in of]
    assert len(in_place) == 1
    barriers = re.findall(r"(%\w+) = stablehlo\.optimization_barrier (%[\w#]+) :", function)
    behind, into = map(set, zip(*barriers, strict=True))
    kernel = r"(%\w+)(?::\d+)? = stablehlo\.custom_call @mosaic_gpu_v2\(([^)]*)\)"
    result, operands = re.search(kernel, in_place[0]).groups()
    uses = set(re.findall(rf"{result}(?:#\d+)?(?![\w#])", function.replace(in_place[0], "")))
    assert set(operands.split(", ")) <= behind
    assert uses
    assert uses <= into
