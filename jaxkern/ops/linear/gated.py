r"""Gated projections, as in the first half of a gated MLP.

Forward, with x (M, K), weights w_g, w_u (K, N) and activation f:

    g = x · w_g          u = x · w_u          out = f(g) · u

Backward, for the cotangent dout:

    dg = dout · u · f'(g)          du = dout · f(g)
    dx = dg · w_gᵀ + du · w_uᵀ     dw_g = xᵀ · dg          dw_u = xᵀ · du

Each line is one kernel: two products share the rows of x, or add up in one accumulator. Forward,
what is elementwise happens in their epilogue. Saved for the backward are x and the weights, and

* by default g and u, 4·M·N bytes in 16 bits: written by the forward (6·M·N bytes with out), and
  read again by an elementwise kernel of 10·M·N bytes for dg and du;
* with ``recompute`` nothing else: a kernel computes both projections again, 4·M·N·K operations
  beside the 12·M·N·K of forward and backward, and has dg and du in its epilogue (6·M·N bytes).

With accumulators a_g, a_u of the weights' gradients, a_g + dw_g and a_u + dw_u take the place of
these, in the memory of the accumulators.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, Mode, resolve
from jaxkern.core.kernel_pass import KernelPass, Partial, match_primal, named
from jaxkern.ops.activations import ACTIVATION_CURVES, CURVES, PLAIN, Functions, curve_value
from jaxkern.ops.gated import gated_backward
from jaxkern.ops.linear.choice import faster
from jaxkern.ops.linear.matmul import Product
from jaxkern.ops.linear.products import (
    as_it_is,
    check_accumulator,
    dot,
    flat,
    in_epilogue,
    launch,
    rows_of,
    unsupported,
    varies_more,
    wide_product,
)


@dataclasses.dataclass(frozen=True)
class _Options:
    activation: str
    recompute: bool
    save: bool
    precision: Any
    mode: Mode


_Dtypes = tuple[str, str]
_WIDE = ("float32", "float32")


def gated_linear_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    recompute: bool = False,
    accumulators: tuple[jax.Array, jax.Array] | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Two projections, one gating the other: ``activation(x @ w_gate) * (x @ w_up)``.

    .. math:: y = f(x w_g) \odot (x w_u)

    Products take the dtype of `x` and are summed in fp32, where activation and product follow; the
    result is rounded once.

    On a mesh, the rows, K and N may be split between devices in any way; the devices' parts of a
    split K are added first.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      w_gate, w_up: (K, N), any of those dtypes.
      activation: ``"silu"``, ``"gelu"`` (by tanh, as ``jax.nn.gelu``), ``"relu"`` or
        ``"relu_squared"``.
      recompute: whether the backward computes both projections again, and the forward keeps
        neither of them: 2·M·N elements less to keep for 4·M·N·K operations. What is kept has the
        dtype of `x`; of float16 it ends at ±65504, and with ``recompute`` it does not.
      accumulators: (K, N) each, float32, the gradients of both weights so far, as for
        :func:`jaxkern.linear`, or ``None``.
      precision: of products of float32, as for ``jax.lax.dot_general``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the kernels on an NVIDIA GPU of
        compute capability 9.0 or newer, at sizes where they are measured faster than cuBLAS.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or of `accumulators` not float32.
      ValueError: a shape does not fit, or `activation` or `implementation` is unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.gated_linear_unit(x, w, w).shape
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
            f"got {w_gate.shape}"
        )
    w_up = check_array("w_up", w_up, w_gate.shape, "(K, N), the shape of w_gate")
    if activation not in ACTIVATION_CURVES:
        names = ", ".join(f'"{name}"' for name in ACTIVATION_CURVES)
        raise ValueError(f"activation must be {names}, got {activation!r}")
    if accumulators is not None:
        gate, up = (
            check_accumulator(f"accumulators[{i}]", a, w_gate.shape, "the shape of w_gate")
            for i, a in enumerate(accumulators)
        )
        accumulators = gate, up
    mode = resolve(implementation, unsupported(x), op="gated_linear_unit")
    options = _Options(activation, bool(recompute), False, precision, mode)
    if mode == "xla" and accumulators is None:
        f = functools.partial(_reference_forward, options)
        out = (jax.checkpoint(f) if recompute else f)(x, w_gate, w_up)
        return named("gated_linear_unit", out[0])
    return _gated_jit(x, w_gate, w_up, accumulators, options)


# Forward


def _kernel_forward(options: _Options, x: Any, w_gate: Any, w_up: Any) -> Any:
    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del rows, tiles
        gate, up = products
        out = _gate(options, gate, up, in_epilogue(options.mode))
        return [out, *(_kept(v, x.dtype) for v in products if options.save)]

    outs = launch(
        Product(False, False, (str(x.dtype),) * (1 + 2 * options.save), epilogue, "gated_fwd"),
        options.mode,
        [flat(x)],
        [w_gate.astype(x.dtype), w_up.astype(x.dtype)],
    )
    if outs is None:
        return _reference_forward(options, x, w_gate, w_up)
    out, *saved = (v.reshape(*x.shape[:-1], w_gate.shape[1]) for v in outs)
    return (out, *saved) if saved else (out, None, None)


def _reference_forward(options: _Options, x: Any, w_gate: Any, w_up: Any) -> Any:
    _, gate, up = _reference_projections(options, x, w_gate, w_up)
    return _finish_forward(options, x, w_gate, w_up, None, gate, up)


def _finish_forward(
    options: _Options, x: Any, w_gate: Any, w_up: Any, _: Any, gate: Any, up: Any
) -> Any:
    del w_gate, w_up
    out = _gate(options, gate, up, PLAIN).astype(x.dtype)
    saved = (_kept(v, x.dtype).astype(x.dtype) if options.save else None for v in (gate, up))
    return out, *saved


def _gate(options: _Options, gate: Any, up: Any, of: Functions) -> Any:
    return curve_value(ACTIVATION_CURVES[options.activation], gate, of) * up


def _kept(v: Any, dtype: Any) -> Any:
    """`v` as far as `dtype` goes: of an infinity, a cotangent of 0 would make a NaN."""
    if dtype != jnp.float16:
        return v
    most = float(jnp.finfo(dtype).max)
    return jnp.minimum(jnp.maximum(v, -most), most)


def _kernel_projections(options: _Options, x: Any, w_gate: Any, w_up: Any) -> Any:
    """Both projections in fp32, and in the place of the result the first again."""
    outs = launch(
        Product(False, False, ("float32",) * 2, as_it_is, "gated_fwd"),
        options.mode,
        [flat(x)],
        [w_gate.astype(x.dtype), w_up.astype(x.dtype)],
    )
    if outs is None:
        return _reference_projections(options, x, w_gate, w_up)
    gate, up = (v.reshape(*x.shape[:-1], w_gate.shape[1]) for v in outs)
    return gate, gate, up


def _reference_projections(options: _Options, x: Any, w_gate: Any, w_up: Any) -> Any:
    product = wide_product(options.precision)
    gate, up = (product(x, w.astype(x.dtype)) for w in (w_gate, w_up))
    return gate, gate, up


# Backward


def _kernel_slopes(options: _Options, x: Any, w_gate: Any, w_up: Any, dout: Any) -> Any:
    """dg and du, with both projections computed again."""

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del rows
        gate, up = products
        return _slopes(options, gate, up, tiles[0], in_epilogue(options.mode))

    outs = launch(
        Product(False, False, (str(x.dtype),) * 2, epilogue, "gated_bwd"),
        options.mode,
        [flat(x)],
        [w_gate.astype(x.dtype), w_up.astype(x.dtype)],
        tiles=[flat(dout)],
    )
    if outs is None:
        return _reference_slopes(options, x, w_gate, w_up, dout)
    return tuple(v.reshape(dout.shape) for v in outs)


def _reference_slopes(options: _Options, x: Any, w_gate: Any, w_up: Any, dout: Any) -> Any:
    _, gate, up = _reference_projections(options, x, w_gate, w_up)
    slopes = _slopes(options, gate, up, dout.astype(gate.dtype), PLAIN)
    return tuple(v.astype(dout.dtype) for v in slopes)


def _slopes(options: _Options, gate: Any, up: Any, dout: Any, of: Functions) -> list[Any]:
    """dg and du in fp32."""
    value, times_slope = CURVES[ACTIVATION_CURVES[options.activation]](gate, of)
    return [times_slope(dout * up), dout * value]


def _kernel_dx(options: _Options, dtype: str, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> Any:
    outs = launch(
        Product(False, True, (dtype,), as_it_is, "gated_dx"),
        options.mode,
        [flat(dgate), flat(dup)],
        [w_gate.astype(dgate.dtype), w_up.astype(dgate.dtype)],
    )
    if outs is None:
        return _reference_dx(options, dtype, dgate, dup, w_gate, w_up)
    return (outs[0].reshape(*dgate.shape[:-1], w_gate.shape[0]),)


def _reference_dx(
    options: _Options, dtype: str, dgate: Any, dup: Any, w_gate: Any, w_up: Any
) -> Any:
    last = dgate.ndim - 1
    parts = [
        dot(options.precision, d, w.astype(d.dtype), last, 1, None)
        for d, w in ((dgate, w_gate), (dup, w_up))
    ]
    return ((parts[0] + parts[1]).astype(dtype),)


def _kernel_dweights(options: _Options, dtypes: _Dtypes, x: Any, dgate: Any, dup: Any) -> Any:
    product = Product(True, False, dtypes, as_it_is, "gated_dweights")
    outs = launch(product, options.mode, [flat(x)], [flat(dgate), flat(dup)])
    return _reference_dweights(options, dtypes, x, dgate, dup) if outs is None else tuple(outs)


def _reference_dweights(options: _Options, dtypes: _Dtypes, x: Any, dgate: Any, dup: Any) -> Any:
    return tuple(
        dot(options.precision, flat(x), flat(d), 0, 0, jnp.dtype(t))
        for d, t in zip((dgate, dup), dtypes, strict=True)
    )


def _kernel_accumulate(
    options: _Options, of_gate: Any, of_up: Any, x: Any, dgate: Any, dup: Any
) -> Any:
    sums = launch(
        Product(True, False, _WIDE, as_it_is, "gated_accumulate"),
        options.mode,
        [flat(x)],
        [flat(dgate), flat(dup)],
        accumulators=[of_gate, of_up],
    )
    if sums is None:
        return _reference_accumulate(options, of_gate, of_up, x, dgate, dup)
    return tuple(sums)


def _reference_accumulate(
    options: _Options, of_gate: Any, of_up: Any, x: Any, dgate: Any, dup: Any
) -> Any:
    dw_gate, dw_up = _reference_dweights(options, _WIDE, x, dgate, dup)
    return of_gate + dw_gate, of_up + dw_up


# The rule


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gated(x: Any, w_gate: Any, w_up: Any, accumulators: Any, options: _Options) -> Any:
    del accumulators
    return _forward_pass(options, x.ndim)(x, w_gate, w_up)[0]


def _gated_fwd(x, w_gate, w_up, accumulators, options):
    options = dataclasses.replace(options, save=not options.recompute)
    out, gate, up = _forward_pass(options, x.ndim)(x, w_gate, w_up)
    return out, (x, w_gate, w_up, accumulators, gate, up)


def _gated_bwd(options, res, dout):
    x, w_gate, w_up, accumulators, gate, up = res
    if options.recompute:
        dgate, dup = _slopes_pass(options, x.ndim)(x, w_gate, w_up, dout)
    else:
        dgate, dup = gated_backward(options.activation, options.mode, gate, up, dout)
    [dx] = _dx_pass(options, str(dout.dtype), x.ndim)(dgate, dup, w_gate, w_up)
    dw_gate = dw_up = sums = None
    if accumulators is None:
        dtypes = str(w_gate.dtype), str(w_up.dtype)
        dw_gate, dw_up = _dweights_pass(options, dtypes, x.ndim)(x, dgate, dup)
    else:
        sums = _accumulated(options, accumulators, x, dgate, dup)
        sums = tuple(match_primal(s, a) for s, a in zip(sums, accumulators, strict=True))
    return match_primal(dx, x), match_primal(dw_gate, w_gate), match_primal(dw_up, w_up), sums


def _accumulated(options: _Options, accumulators: Any, x: Any, dgate: Any, dup: Any) -> Any:
    """The accumulators and the weights' gradients, summed over devices that share the former."""
    if any(varies_more(v, a) for v in (x, dgate, dup) for a in accumulators):
        dweights = _dweights_pass(options, _WIDE, x.ndim)(x, dgate, dup)
        pairs = zip(accumulators, dweights, strict=True)
        return tuple(a + match_primal(dw, a) for a, dw in pairs)
    return _accumulate_pass(options, x.ndim)(*accumulators, x, dgate, dup)


_gated.defvjp(_gated_fwd, _gated_bwd)
_gated_jit = jax.jit(_gated, static_argnums=4)


@functools.cache
def _forward_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    # Without what it saves, the pass has nowhere to put the parts of a split K: it gathers K.
    partial = None
    if options.save:
        partial = Partial(
            kernel=functools.partial(_kernel_projections, options),
            reference=functools.partial(_reference_projections, options),
            finish=functools.partial(_finish_forward, options),
        )
    return KernelPass(
        name="gated_fwd",
        mode=options.mode,
        kernel=functools.partial(_kernel_forward, options),
        reference=functools.partial(_reference_forward, options),
        faster=functools.partial(_faster, "gated_fwd"),
        ins=(f"{rows} k", "k n", "k n"),
        outs=(f"{rows} n",) * 3,
        whole="" if options.save else "k",
        partial=partial,
        saved_as="gated_linear_unit",
    )


@functools.cache
def _slopes_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_bwd",
        mode=options.mode,
        kernel=functools.partial(_kernel_slopes, options),
        reference=functools.partial(_reference_slopes, options),
        faster=functools.partial(_faster, "gated_bwd"),
        ins=(f"{rows} k", "k n", "k n", f"{rows} n"),
        outs=(f"{rows} n",) * 2,
        whole="k",
    )


@functools.cache
def _dx_pass(options: _Options, dtype: str, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_dx",
        mode=options.mode,
        kernel=functools.partial(_kernel_dx, options, dtype),
        reference=functools.partial(_reference_dx, options, dtype),
        faster=_faster_dx,
        ins=(f"{rows} n", f"{rows} n", "k n", "k n"),
        outs=(f"{rows} k",),
        partial=Partial(
            kernel=functools.partial(_kernel_dx, options, "float32"),
            reference=functools.partial(_reference_dx, options, "float32"),
            finish=lambda dgate, dup, w_gate, w_up, dx: (dx.astype(dtype),),
        ),
    )


@functools.cache
def _dweights_pass(options: _Options, dtypes: _Dtypes, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_dweights",
        mode=options.mode,
        kernel=functools.partial(_kernel_dweights, options, dtypes),
        reference=functools.partial(_reference_dweights, options, dtypes),
        faster=_faster_dweights,
        ins=(f"{rows} k", f"{rows} n", f"{rows} n"),
        outs=("k n", "k n"),
        partial=Partial(
            kernel=functools.partial(_kernel_dweights, options, _WIDE),
            reference=functools.partial(_reference_dweights, options, _WIDE),
            finish=lambda x, dgate, dup, *sums: tuple(
                s.astype(t) for s, t in zip(sums, dtypes, strict=True)
            ),
        ),
    )


@functools.cache
def _accumulate_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_accumulate",
        mode=options.mode,
        kernel=functools.partial(_kernel_accumulate, options),
        reference=functools.partial(_reference_accumulate, options),
        faster=_faster_accumulate,
        ins=("k n", "k n", f"{rows} k", f"{rows} n", f"{rows} n"),
        outs=("k n", "k n"),
        partial=Partial(
            kernel=functools.partial(_dweights_alone, _kernel_dweights, options),
            reference=functools.partial(_dweights_alone, _reference_dweights, options),
            finish=lambda of_gate, of_up, x, dgate, dup, *sums: (
                of_gate + sums[0],
                of_up + sums[1],
            ),
        ),
    )


def _faster(name: str, x: Any, w_gate: Any, *rest: Any) -> bool:
    return faster(name, math.prod(x.shape[:-1]), w_gate.shape[1], w_gate.shape[0])


def _faster_dx(dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> bool:
    del dup, w_up
    return faster("gated_dx", math.prod(dgate.shape[:-1]), w_gate.shape[0], w_gate.shape[1])


def _faster_dweights(x: Any, dgate: Any, dup: Any) -> bool:
    del dup
    return faster("gated_dweights", x.shape[-1], dgate.shape[-1], math.prod(x.shape[:-1]))


def _faster_accumulate(of_gate: Any, of_up: Any, x: Any, *rest: Any) -> bool:
    del of_up
    sizes = of_gate.shape[0], of_gate.shape[1], math.prod(x.shape[:-1])
    return faster("gated_accumulate", *sizes)


def _dweights_alone(dweights: Any, options: _Options, *arrays: Any) -> Any:
    """The gradients alone, without the two accumulators that come first in `arrays`."""
    return dweights(options, _WIDE, *arrays[2:])
