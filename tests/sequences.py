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
    """Holds results and gradients to a NumPy oracle, with no other program to compile.

    In fp32 an error is at most twice that of the oracle run in fp32. Where `rounding` is given it
    is also at most one rounding of the result and this, relative.

    Args:
      got: results and gradients, as the oracle has them.
      oracle: ``oracle(*arrays, *cotangents, **options)``.
      arrays: the op's arguments.
      cotangents: of its results.
      rounding: relative; it must be given where a result has 16 bits.
      options: of the oracle.
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
            error = check.relative_error(our, truth)
            assert error <= float(jnp.finfo(our.dtype).eps) / 2 + rounding, (
                f"array {i}: {error:.1e}"
            )
