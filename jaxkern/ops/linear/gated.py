r"""Gated linear units: two projections, one gating the other, as in the first half of a gated MLP.

Forward, with x (M, K), weights w_g, w_u (K, N), biases b_g, b_u and a gated unit of gate and up
(:class:`jaxkern.ops.curves.GatedUnit`), without further options f(g) · u:

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
[g, u], and the backward has the products of a linear layer: dx = [dg, du] · wᵀ,
dw = xᵀ · [dg, du].
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import (
    check_array,
    check_optional,
)
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, Mode, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import Partial
from jaxkern.ops.curves import PLAIN, Activation, GatedUnit, check_unit
from jaxkern.ops.gated import gated_backward
from jaxkern.ops.linear.kernel import Product
from jaxkern.ops.linear.op import gradients
from jaxkern.ops.linear.products import (
    LinearOptions,
    check_accumulator,
    check_operands,
    flat,
    in_epilogue,
    launch,
    match_product,
    plus_bias,
    row_count,
    unchanged,
    unfit_for_gpu,
    unsupported,
    wide_product,
)
from jaxkern.ops.linear.tiles import faster


@dataclasses.dataclass(frozen=True)
class GatedOptions:
    """Static arguments of the passes of a gated linear unit.

    Attributes:
      unit: the function of gate and up.
      one_weight: whether one array holds both weights; up and dup are then None, as gate and dgate
        hold both halves.
      recompute: whether the backward computes both projections again.
      save: whether the forward also returns both projections.
      precision: precision of fp32 products, as for ``jax.lax.dot_general``.
      mode: mode from :func:`jaxkern.core.dispatch.resolve`.
    """

    unit: GatedUnit
    one_weight: bool
    recompute: bool
    save: bool
    precision: Any
    mode: Mode


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
    x, w_gate = check_operands(x, w_gate, "w_gate")
    w_up, b_gate, b_up = _check_rest(w_gate, w_up, b_gate, b_up)
    accumulators = _check_accumulators(accumulators, w_gate, w_up)
    unit = check_unit(activation, alpha, limit, up_offset)
    reason = unsupported(x=x, w_gate=w_gate, w_up=w_up)
    mode = resolve(implementation, reason, op="gated_linear_unit")
    options = GatedOptions(unit, w_up is None, recompute, False, precision, mode)
    arrays = (x, w_gate, w_up, b_gate, b_up)
    if mode == "xla" and accumulators[0] is None:
        f = functools.partial(reference_forward, options)
        out = (jax.checkpoint(f) if recompute else f)(*arrays)
        return named("gated_linear_unit", out[0])
    return _gated_jit(*arrays, accumulators, options)


def _check_rest(w_gate: jax.Array, w_up: Any, b_gate: Any, b_up: Any) -> tuple[Any, Any, Any]:
    """Checks `w_up` and the biases against `w_gate`."""
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
    b_gate = check_optional("b_gate", b_gate, columns, "as many as w_gate has columns")
    return w_up, b_gate, check_optional("b_up", b_up, columns, "as many as w_up has columns")


def _check_accumulators(accumulators: Any, w_gate: jax.Array, w_up: Any) -> Any:
    """Checks the accumulators, and returns a tuple of one, or of ``None``, for each weight."""
    if accumulators is None:
        return (None,) * (1 if w_up is None else 2)
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
    x, w_gate, w_up, b_gate, b_up = arrays
    if options.recompute:
        dgate, dup = SLOPES(options, *arrays, dout)
    else:
        projections = (gate,) if up is None else (gate, up)
        slopes = gated_backward(options.unit, options.mode, projections, dout)
        dgate, dup = (*slopes, None)[:2]
    present = lambda *values: [v for v in values if v is not None]
    of_linear = LinearOptions(None, False, options.precision, "float32", options.mode)
    dys, weights = present(dgate, dup), present(w_gate, w_up)
    biases = (b_gate, b_up)[: len(dys)]
    dx, dweights, dbiases, sums = gradients(of_linear, x, dys, weights, biases, accumulators)
    return dx, *(*dweights, None)[:2], *(*dbiases, None)[:2], sums


_gated_jit = Differentiable(_gated_fwd, _gated_bwd, _gated)


def _columns(options: GatedOptions) -> tuple[str, str]:
    """Factors of a weight's columns, and those that stay whole: halves belong together."""
    return ("y", "y n") if options.one_weight else ("n", "")


def _partial(options: GatedOptions) -> Partial | None:
    """Sum over devices where K is split, which needs the results that ``save`` adds."""
    if not options.save:
        return None
    return Partial(finish_forward, kernel_projections, reference_projections)


def _arguments(options: GatedOptions) -> tuple[str, ...]:
    """Factors of x, weights and biases."""
    columns = _columns(options)[0]
    return "... k", f"k {columns}", "k n", columns, "n"


WIDE = ("float32", "float32")


# Forward products


def kernel_forward(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any
) -> Any:
    biases, rows_of_biases = _biases(options, b_gate, b_up)

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del tiles
        gate, up = biases(products, rows)
        out = options.unit.value(gate, up, in_epilogue())
        return [out, *(_kept(v, x.dtype) for v in (gate, up) if options.save)]

    dtypes = (str(x.dtype),) * (1 + 2 * options.save)
    pair = options.one_weight and options.save
    outs = launch(
        Product(False, False, dtypes, epilogue, "gated_fwd", pair),
        options.mode,
        [flat(x)],
        _weights(options, x.dtype, w_gate, w_up),
        rows_of_biases,
    )
    if outs is None:
        return reference_forward(options, x, w_gate, w_up, b_gate, b_up)
    out, *saved = (v.reshape(*x.shape[:-1], -1) for v in outs)
    return (out, *saved, None, None)[:3]


def reference_forward(options: GatedOptions, *arrays: Any) -> Any:
    return finish_forward(options, *arrays, *reference_projections(options, *arrays))


def finish_forward(options: GatedOptions, *arrays_and_sums: Any) -> Any:
    """Applies biases and unit to the products, or to their sums over devices where K is split."""
    x, _, _, b_gate, b_up, _, gate, up = arrays_and_sums
    gate, up = plus_bias(gate, b_gate), plus_bias(up, b_up)
    kept = [gate, up]
    if options.one_weight:
        gate, up = jnp.split(gate, 2, axis=-1)
    out = options.unit.value(gate, up, PLAIN).astype(x.dtype)
    if not options.save:
        return out, None, None
    return out, *(None if v is None else _kept(v, x.dtype).astype(x.dtype) for v in kept)


def _kept(v: Any, dtype: Any) -> Any:
    """Clips `v` to the range of float16: an infinity times a cotangent of 0 would be NaN."""
    if dtype != jnp.float16:
        return v
    most = float(jnp.finfo(dtype).max)
    return jnp.minimum(jnp.maximum(v, -most), most)


def kernel_projections(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any
) -> Any:
    """Computes both projections in fp32 without bias, as :func:`_projected` returns them."""
    outs = launch(
        Product(False, False, WIDE, unchanged, "gated_fwd", options.one_weight),
        options.mode,
        [flat(x)],
        _weights(options, x.dtype, w_gate, w_up),
    )
    if outs is None:
        return reference_projections(options, x, w_gate, w_up, b_gate, b_up)
    return _projected(*(v.reshape(*x.shape[:-1], -1) for v in outs))


def reference_projections(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any
) -> Any:
    del b_gate, b_up
    product = functools.partial(wide_product, options.precision)
    weights = [w for w in (w_gate, w_up) if w is not None]
    return _projected(*(product(x, w.astype(x.dtype)) for w in weights))


def _projected(gate: Any, up: Any = None) -> Any:
    return gate if up is not None else gate[..., : gate.shape[-1] // 2], gate, up


def _weights(options: GatedOptions, dtype: Any, w_gate: Any, w_up: Any) -> list[Any]:
    """Weights as a kernel takes them: one array of both as (K, 2, N)."""
    if options.one_weight:
        k, columns = w_gate.shape
        return [w_gate.astype(dtype).reshape(k, 2, columns // 2)]
    return [w_gate.astype(dtype), w_up.astype(dtype)]


def _biases(options: GatedOptions, b_gate: Any, b_up: Any) -> tuple[Any, list[Any]]:
    """Function that adds the biases in an epilogue, and the rows that it reads."""
    both = [b_gate, b_up]
    if options.one_weight and b_gate is not None:
        both = jnp.split(b_gate, 2)
    here = [b is not None for b in both]

    def added(products: list[Any], rows: list[Any]) -> list[Any]:
        rest = iter(rows)
        return [p + next(rest) if b else p for p, b in zip(products, here, strict=True)]

    return added, [b.astype(jnp.float32) for b in both if b is not None]


def faster_projections(name: str, options: GatedOptions, x: Any, w_gate: Any, *rest: Any) -> bool:
    del rest
    k, columns = w_gate.shape
    return faster(name, row_count(x), columns // (1 + options.one_weight), k)


# Backward products


def kernel_slopes(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any, dout: Any
) -> Any:
    """dg and du, from projections that are computed again."""
    biases, rows_of_biases = _biases(options, b_gate, b_up)

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        gate, up = biases(products, rows)
        return list(options.unit.slopes(gate, up, tiles[0], in_epilogue()))

    outs = launch(
        Product(False, False, (str(x.dtype),) * 2, epilogue, "gated_bwd", options.one_weight),
        options.mode,
        [flat(x)],
        _weights(options, x.dtype, w_gate, w_up),
        rows_of_biases,
        tiles=[flat(dout)],
    )
    if outs is None:
        return reference_slopes(options, x, w_gate, w_up, b_gate, b_up, dout)
    return (*(v.reshape(*dout.shape[:-1], -1) for v in outs), None)[:2]


def reference_slopes(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any, dout: Any
) -> Any:
    _, gate, up = reference_projections(options, x, w_gate, w_up, b_gate, b_up)
    gate, up = plus_bias(gate, b_gate), plus_bias(up, b_up)
    if options.one_weight:
        gate, up = jnp.split(gate, 2, axis=-1)
    slopes = options.unit.slopes(gate, up, dout.astype(gate.dtype), PLAIN)
    dgate, dup = (v.astype(dout.dtype) for v in slopes)
    return (jnp.concatenate([dgate, dup], axis=-1), None) if options.one_weight else (dgate, dup)


# Passes


FORWARD = KernelPass(
    "gated_fwd",
    kernel=kernel_forward,
    reference=reference_forward,
    faster=functools.partial(faster_projections, "gated_fwd"),
    unfit=unfit_for_gpu,
    ins=_arguments,
    outs=lambda options: ("... n", f"... {_columns(options)[0]}", "... n"),
    whole=lambda options: _columns(options)[1] + ("" if options.save else " k"),
    partial=_partial,
    saved_as="gated_linear_unit",
)
SLOPES = KernelPass(
    "gated_bwd",
    kernel=kernel_slopes,
    reference=reference_slopes,
    faster=functools.partial(faster_projections, "gated_bwd"),
    unfit=unfit_for_gpu,
    ins=lambda options: (*_arguments(options), "... n"),
    outs=lambda options: (f"... {_columns(options)[0]}", "... n"),
    whole=lambda options: f"k {_columns(options)[1]}",
)
