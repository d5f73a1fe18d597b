r"""Gated linear units: two projections, one gating the other, as in the first half of a gated MLP.

Forward, with x (M, K), weights w_g, w_u (K, N), biases b_g, b_u and a gated unit of gate and up
(:class:`jaxkern.ops.curves.Unit`), without further options f(g) · u:

    g = x · w_g + b_g          u = x · w_u + b_u          out = unit(g, u)

Backward, for the cotangent dout:

    dg = dout · ∂unit/∂g           du = dout · ∂unit/∂u
    dx = dg · w_gᵀ + du · w_uᵀ     dw_g = xᵀ · dg          dw_u = xᵀ · du
                                   db_g = Σ_rows dg        db_u = Σ_rows du

Each line of products is one kernel: two products read the same rows of x, or are summed in the same
registers. The forward computes the unit in its epilogue. Saved for the backward are x, the weights,
and

* by default g and u, 4·M·N bytes in 16 bits: written by the forward (6·M·N bytes with out), and
  read again by an elementwise kernel of 10·M·N bytes for dg and du;
* with ``recompute`` only the biases: a kernel computes both projections again, 4·M·N·K operations
  beside the 12·M·N·K of forward and backward, and dg and du in its epilogue (6·M·N bytes).

With accumulators a_g, a_u of the weights' gradients, a_g + dw_g and a_u + dw_u are computed instead
of these, in the memory of the accumulators.

One weight w = [w_g, w_u], (K, 2N), is read without a copy of its halves. Then g and u are one array
[g, u], and the backward's products are those of a linear layer: dx = [dg, du] · wᵀ,
dw = xᵀ · [dg, du].
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import match_primal
from jaxkern.core.split import Partial
from jaxkern.ops.curves import Activation, check_unit
from jaxkern.ops.gated import gated_backward
from jaxkern.ops.linear import gated_products as products
from jaxkern.ops.linear import op
from jaxkern.ops.linear.gated_products import GatedOptions
from jaxkern.ops.linear.products import (
    Options,
    bias_gradient,
    check_accumulator,
    match_product,
    unfit_for_gpu,
    unsupported,
)


@public_op
def gated_linear_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None = None,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    *,
    activation: Activation = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    recompute: bool = False,
    accumulators: Any = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Two projections, one gating the other: ``activation(x @ w_gate) * (x @ w_up)``.

    .. math:: y = f(x w_g + b_g) \odot (x w_u + b_u + o)

    Products take the dtype of `x` and are summed in fp32, where biases, activation and product
    follow; the result is rounded once.

    With `limit`, the gate counts as at most `limit`, and the up projection as within ±`limit`; the
    gradient of what is beyond is 0. The clamped SwiGLU of gpt-oss is ``alpha=1.702, limit=7.0,
    up_offset=1.0``.

    Without `w_up`, `w_gate` holds both weights side by side, [gate, up], and `b_gate` both biases:
    no half is copied, and the gradients are one array, too. Columns that are interleaved, gate, up,
    gate, up, ..., as in the checkpoints of gpt-oss, are to be reordered once:
    ``jnp.concatenate([w[:, 0::2], w[:, 1::2]], axis=1)``.

    On a mesh, the rows, K and N may be split between devices in any way; the devices' parts of a
    split K are added first. The columns of a `w_gate` that holds both are gathered where they are
    split, as its halves belong together.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      w_gate: (K, N), any of those dtypes; (K, 2N) without `w_up`.
      w_up: (K, N), any of those dtypes, or ``None``.
      b_gate: (N,), any of those dtypes, or ``None``; (2N,) without `w_up`.
      b_up: (N,), any of those dtypes, or ``None``.
      activation: ``"silu"``, ``"gelu"`` (by tanh, as ``jax.nn.gelu``; also ``"gelu_tanh"``),
        ``"gelu_erf"``, ``"quick_gelu"``, ``"relu"``, ``"relu_squared"``, ``"sigmoid"`` or
        ``"tanh"``.
      alpha: of ``"silu"``, which is then g · sigmoid(alpha · g); positive.
      limit: positive, or ``None`` for no limit.
      up_offset: o, added to the up projection, after the limit.
      recompute: whether the backward computes both projections again, and the forward keeps
        neither of them: 2·M·N elements less to keep for 4·M·N·K operations. What is kept has the
        dtype of `x`; of float16 it ends at ±65504, and with ``recompute`` it does not.
      accumulators: float32, the gradients of the weights so far, as for :func:`jaxkern.linear`:
        two arrays (K, N), or without `w_up` one array (K, 2N); or ``None``.
      precision: of products of float32, as for ``jax.lax.dot_general``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the kernels on a GPU of compute capability 9.0 (Hopper), at sizes where they are measured
        faster than cuBLAS.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a floating dtype or not a Python number, or one of
        `accumulators` not float32.
      ValueError: a shape does not fit, `alpha`, `limit` or `up_offset` is out of range, or
        `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.gated_linear_unit(x, w, w).shape
      (2, 8, 128)
      >>> jaxkern.gated_linear_unit(x, jnp.concatenate([w, w], axis=1)).shape
      (2, 8, 128)

    References:
      Shazeer, `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_, 2020.
    """
    x, w_gate = check_floating("x", x), check_floating("w_gate", w_gate)
    if x.ndim < 1:
        raise ValueError("x must have at least one axis, the one that weights multiply; got ()")
    if w_gate.ndim != 2 or w_gate.shape[0] != x.shape[-1]:
        raise ValueError(
            f"w_gate must have shape (K, N), K = {x.shape[-1]} the last axis of x; "
            f"got {w_gate.shape}. A weight stored as (N, K) goes in as w_gate.T"
        )
    w_up, b_gate, b_up = _check_rest(w_gate, w_up, b_gate, b_up)
    accumulators = _check_accumulators(accumulators, w_gate, w_up)
    unit = check_unit(activation, alpha, limit, up_offset)
    reason = unsupported(x=x, w_gate=w_gate, w_up=w_up)
    mode = resolve(implementation, reason, op="gated_linear_unit")
    options = GatedOptions(unit, w_up is None, recompute, False, precision, mode)
    arrays = (x, w_gate, w_up, b_gate, b_up)
    if mode == "xla" and accumulators is None:
        f = functools.partial(products.reference_forward, options)
        out = (jax.checkpoint(f) if recompute else f)(*arrays)
        return named("gated_linear_unit", out[0])
    return _gated_jit(*arrays, accumulators, options)


def _check_rest(w_gate: jax.Array, w_up: Any, b_gate: Any, b_up: Any) -> tuple[Any, Any, Any]:
    """`w_up` and the biases, which fit `w_gate`."""
    columns = w_gate.shape[1:]
    if w_up is not None:
        w_up = check_array("w_up", w_up, w_gate.shape, "(K, N), the shape of w_gate")
    else:
        if w_gate.shape[1] % 2:
            raise ValueError(
                "w_gate must have shape (K, 2N) without w_up, both weights side by side; got "
                f"{w_gate.shape}, with an odd number of columns"
            )
        if b_up is not None:
            raise ValueError(
                "b_up must be None without w_up, as b_gate holds both biases, (2N,); got an array "
                f"of shape {jnp.shape(b_up)}"
            )
    if b_gate is not None:
        b_gate = check_array("b_gate", b_gate, columns, "as many as w_gate has columns")
    if b_up is not None:
        b_up = check_array("b_up", b_up, columns, "as many as w_up has columns")
    return w_up, b_gate, b_up


def _check_accumulators(accumulators: Any, w_gate: jax.Array, w_up: Any) -> Any:
    """A tuple of the accumulators, one for each weight."""
    if accumulators is None:
        return None
    shape = w_gate.shape
    if w_up is None:
        meaning = "(K, 2N), the shape of w_gate; without w_up there is one accumulator"
        return (check_accumulator("accumulators", accumulators, shape, meaning),)
    if not isinstance(accumulators, tuple | list) or len(accumulators) != 2:
        got = f"{len(accumulators)}" if isinstance(accumulators, tuple | list) else "one array"
        raise ValueError(
            f"accumulators must be two arrays {shape}, of w_gate and of w_up; got {got}"
        )
    return tuple(
        check_accumulator(f"accumulators[{i}]", a, shape, "the shape of w_gate")
        for i, a in enumerate(accumulators)
    )


# Forward and backward


@Differentiable
def _gated(x, w_gate, w_up, b_gate, b_up, accumulators, options: GatedOptions) -> Any:
    del accumulators
    return FORWARD(options, x, w_gate, w_up, b_gate, b_up)[0]


def _gated_fwd(x, w_gate, w_up, b_gate, b_up, accumulators, options):
    options = dataclasses.replace(options, save=not options.recompute)
    arrays = (x, w_gate, w_up, b_gate, b_up)
    out, gate, up = FORWARD(options, *arrays)
    if not options.one_weight:  # K may be split here, and is whole where nothing is saved
        out = match_product(out, x, w_gate)
    return out, (arrays, accumulators, gate, up)


def _gated_bwd(options, res, dout):
    arrays, accumulators, gate, up = res
    *_, b_gate, b_up = arrays
    if options.recompute:
        dgate, dup = SLOPES(options, *arrays, dout)
    else:
        projections = (gate,) if up is None else (gate, up)
        slopes = gated_backward(options.unit, options.mode, projections, dout)
        dgate, dup = (*slopes, None)[:2]
    backward = _of_one_weight if options.one_weight else _of_two_weights
    dx, dweights, sums = backward(options, arrays, accumulators, dgate, dup)
    if sums is not None:
        sums = tuple(match_primal(s, a) for s, a in zip(sums, accumulators, strict=True))
    dbiases = (bias_gradient(d, b) for d, b in ((dgate, b_gate), (dup, b_up)))
    grads = (dx, *dweights, *dbiases)
    return (*(match_primal(g, a) for g, a in zip(grads, arrays, strict=True)), sums)


_gated.defvjp(_gated_fwd, _gated_bwd)
_gated_jit = jax.jit(_gated, static_argnums=6)


def _of_one_weight(
    options: GatedOptions, arrays: Any, accumulators: Any, d: Any, _: Any
) -> tuple[Any, Any, Any]:
    """dx, the weights' gradients or the accumulators with them, by a linear layer's products."""
    x, w, *_ = arrays
    of_linear = Options(None, False, options.precision, "float32", options.mode)
    [dx] = op.DX(dataclasses.replace(of_linear, dtype=str(x.dtype)), d, w)
    if accumulators is None:
        [dw] = op.DWEIGHT(dataclasses.replace(of_linear, dtype=str(w.dtype)), x, d)
        return dx, (dw, None), None
    sums = op.accumulated(op.DWEIGHT, op.ACCUMULATE, of_linear, accumulators, x, d)
    return dx, (None, None), sums


def _of_two_weights(
    options: GatedOptions, arrays: Any, accumulators: Any, dgate: Any, dup: Any
) -> tuple[Any, Any, Any]:
    """The same as :func:`_of_one_weight`, by the products of two weights."""
    x, w_gate, w_up, *_ = arrays
    [dx] = DX(options.giving(x), dgate, dup, w_gate, w_up)
    if accumulators is None:
        return dx, DWEIGHTS(options.giving(w_gate, w_up), x, dgate, dup), None
    sums = op.accumulated(DWEIGHTS, ACCUMULATE, options, accumulators, x, dgate, dup)
    return dx, (None, None), sums


def _columns(options: GatedOptions) -> tuple[str, str]:
    """The factors of a weight's columns, and which of them stay whole: halves belong together."""
    return ("y", "y n") if options.one_weight else ("n", "")


def _partial(options: GatedOptions) -> Partial | None:
    """The sum over devices that K is split over: it needs the results that ``save`` adds.

    Without them K is gathered.
    """
    if not options.save:
        return None
    return Partial(
        kernel=products.kernel_projections,
        reference=products.reference_projections,
        finish=products.finish_forward,
    )


def _arguments(options: GatedOptions) -> tuple[str, ...]:
    """The factors of x, weights and biases."""
    columns = _columns(options)[0]
    return "... k", f"k {columns}", "k n", columns, "n"


FORWARD = KernelPass(
    "gated_fwd",
    kernel=products.kernel_forward,
    reference=products.reference_forward,
    faster=products.faster_forward,
    unfit=unfit_for_gpu,
    ins=_arguments,
    outs=lambda options: ("... n", f"... {_columns(options)[0]}", "... n"),
    whole=lambda options: _columns(options)[1] + ("" if options.save else " k"),
    partial=_partial,
    saved_as="gated_linear_unit",
)
SLOPES = KernelPass(
    "gated_bwd",
    kernel=products.kernel_slopes,
    reference=products.reference_slopes,
    faster=products.faster_slopes,
    unfit=unfit_for_gpu,
    ins=lambda options: (*_arguments(options), "... n"),
    outs=lambda options: (f"... {_columns(options)[0]}", "... n"),
    whole=lambda options: f"k {_columns(options)[1]}",
)
DX = KernelPass(
    "gated_dx",
    kernel=products.kernel_dx,
    reference=products.reference_dx,
    faster=products.faster_dx,
    unfit=unfit_for_gpu,
    ins=("... n", "... n", "k n", "k n"),
    outs=("... k",),
    partial=Partial(
        options=GatedOptions.of_part,
        finish=lambda options, dgate, dup, w_gate, w_up, dx: (dx.astype(options.dtypes[0]),),
    ),
)
DWEIGHTS = KernelPass(
    "gated_dweights",
    kernel=products.kernel_dweights,
    reference=products.reference_dweights,
    faster=products.faster_dweights,
    unfit=unfit_for_gpu,
    ins=("... k", "... n", "... n"),
    outs=("k n", "k n"),
    partial=Partial(
        options=GatedOptions.of_part,
        finish=lambda options, x, dgate, dup, *sums: tuple(
            s.astype(t) for s, t in zip(sums, options.dtypes, strict=True)
        ),
    ),
)
ACCUMULATE = KernelPass(
    "gated_accumulate",
    kernel=products.kernel_accumulate,
    reference=products.reference_accumulate,
    faster=products.faster_accumulate,
    unfit=unfit_for_gpu,
    ins=("k n", "k n", "... k", "... n", "... n"),
    outs=("k n", "k n"),
    partial=Partial(
        kernel=products.kernel_added,
        reference=products.reference_added,
        finish=lambda options, of_gate, of_up, x, dgate, dup, *sums: (
            of_gate + sums[0],
            of_up + sums[1],
        ),
    ),
)
