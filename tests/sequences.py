"""A comparison with NumPy oracles, which tests of ops along sequences share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import check


def check_results(
    got: Any,
    oracle: Callable[..., Any],
    arrays: Any,
    cotangents: Any,
    rounding: Any,
    **options: Any,
) -> None:
    """Holds results and gradients, `got`, to an oracle in NumPy: there is no program to compile.

    In fp32 an error is at most twice that of the oracle run in fp32. With `rounding`, as any result
    of 16 bits needs, it is also at most one rounding of the result and this, relative.
    """

    def run(dtype: str) -> list[Any]:
        given = (np.asarray(v).astype(dtype) for v in (*arrays, *cotangents))
        return jax.tree.leaves(oracle(*given, **options))

    ours, truths = jax.tree.leaves(got), run("float64")
    wide = all(v.dtype == jnp.float32 for v in jax.tree.leaves(got[0]))
    assert wide or rounding is not None
    others = run("float32") if wide else truths
    for i, (our, other, truth) in enumerate(zip(ours, others, truths, strict=True)):
        if wide:
            check.at_most_twice(f"array {i}", our, other.astype(our.dtype), truth)
        if rounding is not None:
            least = float(jnp.finfo(our.dtype).eps) / 2
            assert check.relative_error(our, truth) <= least + rounding, f"array {i}"
