r"""Gated projections, as in the first half of a gated MLP.

Forward, with x (M, K), weights w_g, w_u (K, N) and activation f:

    g = x · w_g          u = x · w_u          out = f(g) · u

Backward, for the cotangent dout:

    dg = dout · u · f'(g)          du = dout · f(g)
    dx = dg · w_gᵀ + du · w_uᵀ     dw_g = xᵀ · dg          dw_u = xᵀ · du

Each line is one kernel: two products share the rows of x, or add up in one accumulator, and what is
elementwise happens in their epilogue. Saved for the backward: x, the weights and, unless they are
recomputed, g and u: 4·M·N bytes in 16 bits, against 4·M·N·K operations more of 12.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import check_array, check_floating
from jaxkern.core.dispatch import Implementation, resolve
from jaxkern.core.kernel_pass import KernelPass, Partial, match_primal
from jaxkern.ops.linear.matmul import Product
from jaxkern.ops.linear.products import (
    ACTIVATIONS,
    activated,
    any_elements,
    dot,
    flat,
    launch,
    rows_of,
    unsupported,
)


@dataclasses.dataclass(frozen=True)
class _Options:
    activation: str
    recompute: bool
    save: bool
    precision: Any
    mode: Any
    weight_dtypes: tuple[str, str]


def gated_linear_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str = "silu",
    recompute: bool = False,
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
      activation: ``"silu"``, ``"gelu"`` (by tanh, as ``jax.nn.gelu``) or ``"relu"``.
      recompute: whether the backward computes both projections again, and the forward keeps
        neither of them: 2·M·N elements less to keep for 4·M·N·K operations.
      precision: of products of float32, as for ``jax.lax.dot_general``.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX (the only one
        that supports forward-mode differentiation), ``None`` for the fastest.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a floating dtype.
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
    if activation not in ACTIVATIONS:
        raise ValueError(f'activation must be "silu", "gelu" or "relu", got {activation!r}')
    mode = resolve(implementation, unsupported(x), op="gated_linear_unit")
    dtypes = str(w_gate.dtype), str(w_up.dtype)
    options = _Options(activation, bool(recompute), False, precision, mode, dtypes)
    if mode == "xla":
        f = functools.partial(_reference_forward, options)
        out = (jax.checkpoint(f) if recompute else f)(x, w_gate, w_up)
        return out[0]
    return _gated_jit(x, w_gate, w_up, options)


# Forward


def _kernel_forward(options: _Options, x: Any, w_gate: Any, w_up: Any) -> tuple[Any, Any, Any]:
    if not any_elements(x, w_gate):
        return _reference_forward(options, x, w_gate, w_up)

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del rows, tiles
        gate, up = products
        return [activated(options.activation, gate)[0] * up, *(products if options.save else [])]

    outs = launch(
        Product(False, False, (str(x.dtype),) * (1 + 2 * options.save), epilogue, "gated_fwd"),
        options.mode,
        [flat(x)],
        [w_gate.astype(x.dtype), w_up.astype(x.dtype)],
    )
    shape = (*x.shape[:-1], w_gate.shape[1])
    out, *saved = (v.reshape(shape) for v in outs)
    return (out, *saved) if saved else (out, None, None)  # pyright: ignore[reportReturnType]


def _reference_forward(options: _Options, x: Any, w_gate: Any, w_up: Any) -> Any:
    gate, up = (_project(options, x, w, None) for w in (w_gate, w_up))
    return _finish_forward(options, x, w_gate, w_up, None, gate, up)


def _finish_forward(
    options: _Options, x: Any, w_gate: Any, w_up: Any, _: Any, gate: Any, up: Any
) -> Any:
    del w_gate, w_up
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    gate, up = gate.astype(wide), up.astype(wide)
    out = (activated(options.activation, gate)[0] * up).astype(x.dtype)
    return (out, gate.astype(x.dtype), up.astype(x.dtype)) if options.save else (out, None, None)


def _project(options: _Options, x: Any, w: Any, dtype: Any) -> Any:
    return dot(options.precision, x, w.astype(x.dtype), x.ndim - 1, 0, dtype)


# Backward


def _slopes(activation: str, gate: Any, up: Any, dout: Any) -> list[Any]:
    """dg and du in fp32."""
    value, slope = activated(activation, gate)
    return [dout * up * slope, dout * value]


def _kernel_slopes(options: _Options, x: Any, w_gate: Any, w_up: Any, dout: Any) -> Any:
    """dg and du, with both projections computed again."""
    if not any_elements(x, w_gate):
        return _reference_slopes(options, x, w_gate, w_up, dout)

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del rows
        return _slopes(options.activation, products[0], products[1], tiles[0])

    outs = launch(
        Product(False, False, (str(x.dtype),) * 2, epilogue, "gated_bwd"),
        options.mode,
        [flat(x)],
        [w_gate.astype(x.dtype), w_up.astype(x.dtype)],
        tiles=[flat(dout)],
    )
    return tuple(v.reshape(dout.shape) for v in outs)


def _reference_slopes(options: _Options, x: Any, w_gate: Any, w_up: Any, dout: Any) -> Any:
    gate, up = (_project(options, x, w, None) for w in (w_gate, w_up))
    wide = dout.astype(gate.dtype)
    return tuple(v.astype(dout.dtype) for v in _slopes(options.activation, gate, up, wide))


def _kernel_dx(options: _Options, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> tuple[Any]:
    if not any_elements(dgate, w_gate):
        return _reference_dx(options, dgate, dup, w_gate, w_up)
    dtype = dgate.dtype
    [dx] = launch(
        Product(False, True, (str(dtype),), lambda p, rows, tiles: p, "gated_dx"),
        options.mode,
        [flat(dgate), flat(dup)],
        [w_gate.astype(dtype), w_up.astype(dtype)],
    )
    return (dx.reshape(*dgate.shape[:-1], w_gate.shape[0]),)


def _reference_dx(options: _Options, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> tuple[Any]:
    dtype, last = dgate.dtype, dgate.ndim - 1
    parts = [
        dot(options.precision, d, w.astype(dtype), last, 1, None)
        for d, w in ((dgate, w_gate), (dup, w_up))
    ]
    return ((parts[0] + parts[1]).astype(dtype),)


def _kernel_dweights(options: _Options, x: Any, dgate: Any, dup: Any) -> Any:
    if not any_elements(x, dgate):
        return _reference_dweights(options, x, dgate, dup)
    product = Product(
        True, False, options.weight_dtypes, lambda p, rows, tiles: p, "gated_dweights"
    )
    return tuple(launch(product, options.mode, [flat(x)], [flat(dgate), flat(dup)]))


def _reference_dweights(options: _Options, x: Any, dgate: Any, dup: Any) -> Any:
    return tuple(
        dot(options.precision, flat(x), flat(d), 0, 0, jnp.dtype(t))
        for d, t in zip((dgate, dup), options.weight_dtypes, strict=True)
    )


# The rule


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gated(x: Any, w_gate: Any, w_up: Any, options: _Options) -> Any:
    return _forward_pass(options, x.ndim)(x, w_gate, w_up)[0]


def _gated_fwd(x, w_gate, w_up, options):
    options = dataclasses.replace(options, save=not options.recompute)
    out, gate, up = _forward_pass(options, x.ndim)(x, w_gate, w_up)
    return out, (x, w_gate, w_up, gate, up)


def _gated_bwd(options, res, dout):
    x, w_gate, w_up, gate, up = res
    if options.recompute:
        dgate, dup = _slopes_pass(options, x.ndim)(x, w_gate, w_up, dout)
    else:
        wide = [v.astype(jnp.float32) for v in (gate, up, dout)]
        slopes = _slopes(options.activation, wide[0], wide[1], wide[2])
        dgate, dup = (v.astype(dout.dtype) for v in slopes)
    [dx] = _dx_pass(options, x.ndim)(dgate, dup, w_gate, w_up)
    dw_gate, dw_up = _dweights_pass(options, x.ndim)(x, dgate, dup)
    return match_primal(dx, x), match_primal(dw_gate, w_gate), match_primal(dw_up, w_up)


_gated.defvjp(_gated_fwd, _gated_bwd)
_gated_jit = jax.jit(_gated, static_argnums=3)


def _projections(options: _Options, kernel: bool) -> Any:
    """Both projections, as often as the pass has outputs."""
    saving = dataclasses.replace(options, save=True)
    forward = _kernel_forward if kernel else _reference_forward

    def project(x: Any, w_gate: Any, w_up: Any) -> Any:
        return forward(saving, x, w_gate, w_up)

    return project


@functools.cache
def _forward_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    # Without what it saves, the pass has nowhere to put the parts of a split K: it gathers K.
    partial = None
    if options.save:
        partial = Partial(
            kernel=_projections(options, True),
            reference=_projections(options, False),
            finish=functools.partial(_finish_forward, options),
        )
    return KernelPass(
        name="gated_fwd",
        mode=options.mode,
        kernel=functools.partial(_kernel_forward, options),
        reference=functools.partial(_reference_forward, options),
        ins=(f"{rows} k", "k n", "k n"),
        outs=(f"{rows} n",) * 3,
        whole="" if options.save else "k",
        partial=partial,
    )


@functools.cache
def _slopes_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_bwd",
        mode=options.mode,
        kernel=functools.partial(_kernel_slopes, options),
        reference=functools.partial(_reference_slopes, options),
        ins=(f"{rows} k", "k n", "k n", f"{rows} n"),
        outs=(f"{rows} n",) * 2,
        whole="k",
    )


@functools.cache
def _dx_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_dx",
        mode=options.mode,
        kernel=functools.partial(_kernel_dx, options),
        reference=functools.partial(_reference_dx, options),
        ins=(f"{rows} n", f"{rows} n", "k n", "k n"),
        outs=(f"{rows} k",),
    )


@functools.cache
def _dweights_pass(options: _Options, ndim: int) -> KernelPass:
    rows = rows_of(ndim)
    return KernelPass(
        name="gated_dweights",
        mode=options.mode,
        kernel=functools.partial(_kernel_dweights, options),
        reference=functools.partial(_reference_dweights, options),
        ins=(f"{rows} k", f"{rows} n", f"{rows} n"),
        outs=("k n", "k n"),
    )
