"""The products of linear layers, by kernel and in plain JAX."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkern.core.dispatch import Mode, device_unsupported
from jaxkern.core.mosaic import num_sms
from jaxkern.ops.linear.matmul import Product, Tile, matmul

ACTIVATIONS = ("relu", "silu", "gelu")
_ROWS = 8
_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """What is computed, and by whom.

    Attributes:
      activation: after the bias, or None.
      save: whether the forward gives what the activation is applied to, for the backward.
      precision: of products of float32, as for ``jax.lax.dot_general``.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
    """

    activation: str | None
    save: bool
    precision: Any
    mode: Mode


def activated(activation: str | None, y: Any) -> tuple[Any, Any]:
    """f(y) and f'(y) of a float32 array, None for 1; a NaN stays one."""
    match activation:
        case None:
            return y, None
        case "relu":
            return jnp.where(y <= 0, 0.0, y), jnp.where(y > 0, 1.0, 0.0)
        case "silu":
            s = 1 / (1 + jnp.exp(-y))
            return y * s, s * (1 + y * (1 - s))
        case "gelu":
            # y · sigmoid(2u) = y / 2 · (1 + tanh(u)), u = √(2/π) (y + 0.044715 y³). Beyond 16 the
            # sigmoid is 0 or 1, and the limit of y² keeps the slope's last term finite.
            square = jnp.minimum(y * y, 256.0)
            c = 2 * math.sqrt(2 / math.pi)
            s = 1 / (1 + jnp.exp(-(c * y * (1 + 0.044715 * square))))
            return y * s, s + y * s * (1 - s) * (c * (1 + 0.134145 * square))
        case _:
            raise ValueError(activation)


# x · w and what follows


def kernel_forward(options: Options, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    dtype = str(x.dtype)
    if not any_elements(x, weight):
        return reference_forward(options, x, weight, bias)

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del tiles
        y = products[0] + rows[0] if rows else products[0]
        return [activated(options.activation, y)[0], *([y] if options.save else [])]

    outs = launch(
        Product(False, False, (dtype,) * (1 + options.save), epilogue, "linear_fwd"),
        options.mode,
        [flat(x)],
        [weight.astype(x.dtype)],
        [] if bias is None else [bias.astype(jnp.float32)],
    )
    out, *saved = (v.reshape(*x.shape[:-1], weight.shape[1]) for v in outs)
    return out, saved[0] if saved else None


def reference_forward(options: Options, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    plain = bias is None and options.activation is None
    y = dot(options.precision, x, weight.astype(x.dtype), x.ndim - 1, 0, x.dtype if plain else None)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    out = activated(options.activation, y)[0].astype(x.dtype)
    return out, y.astype(x.dtype) if options.save else None


def finish_forward(options: Options, x: Any, weight: Any, bias: Any, sums: Any, _: Any) -> Any:
    """What comes after the sum over devices that share the contraction."""
    del weight
    y = sums.astype(jnp.promote_types(sums.dtype, jnp.float32))
    if bias is not None:
        y = y + bias.astype(y.dtype)
    out = activated(options.activation, y)[0].astype(x.dtype)
    return out, y.astype(x.dtype) if options.save else None


# dy · wᵀ


def kernel_dx(options: Options, dy: Any, weight: Any) -> tuple[Any]:
    if not any_elements(dy, weight):
        return reference_dx(options, dy, weight)
    product = Product(False, True, (str(dy.dtype),), _as_it_is, "linear_dx")
    [dx] = launch(product, options.mode, [flat(dy)], [weight.astype(dy.dtype)])
    return (dx.reshape(*dy.shape[:-1], weight.shape[0]),)


def reference_dx(options: Options, dy: Any, weight: Any) -> tuple[Any]:
    return (dot(options.precision, dy, weight.astype(dy.dtype), dy.ndim - 1, 1, dy.dtype),)


# xᵀ · dy


def kernel_dweight(options: Options, dtype: Any, x: Any, dy: Any) -> tuple[Any]:
    if not any_elements(x, dy):
        return reference_dweight(options, dtype, x, dy)
    product = Product(True, False, (str(dtype),), _as_it_is, "linear_dweight")
    [dweight] = launch(product, options.mode, [flat(x)], [flat(dy)])
    return (dweight,)


def reference_dweight(options: Options, dtype: Any, x: Any, dy: Any) -> tuple[Any]:
    return (dot(options.precision, flat(x), flat(dy), 0, 0, dtype),)


def kernel_accumulate(options: Options, accumulator: Any, x: Any, dy: Any) -> tuple[Any]:
    if not any_elements(x, dy):
        return reference_accumulate(options, accumulator, x, dy)
    product = Product(True, False, ("float32",), _as_it_is, "linear_accumulate")
    if options.mode == "interpret":  # it has no reductions of the TMA
        [total] = launch(product, options.mode, [flat(x)], [flat(dy)])
        return (accumulator + total,)
    [total] = launch(product, options.mode, [flat(x)], [flat(dy)], accumulator=accumulator)
    return (total,)


def reference_accumulate(options: Options, accumulator: Any, x: Any, dy: Any) -> tuple[Any]:
    return (accumulator + reference_dweight(options, accumulator.dtype, x, dy)[0],)


# How


def launch(
    product: Product,
    mode: Mode,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    rows: Sequence[jax.Array] = (),
    tiles: Sequence[jax.Array] = (),
    accumulator: jax.Array | None = None,
) -> list[jax.Array]:
    """:func:`matmul` of any sizes: the TMA takes rows of 64 elements, and 8 of them."""
    k, m = lhs[0].shape if product.lhs_transposed else lhs[0].shape[::-1]
    n = rhs[0].shape[0 if product.rhs_transposed else 1]
    deep, wide = (-(-s // _COLUMNS) * _COLUMNS for s in (k, n))
    high = _COLUMNS if product.lhs_transposed else _ROWS
    high = -(-m // high) * high

    def padded(v: jax.Array, *to: int) -> jax.Array:
        return jnp.pad(v, [(0, t - s) for s, t in zip(v.shape, to, strict=True)])

    a_shape = (deep, high) if product.lhs_transposed else (high, deep)
    b_shape = (wide, deep) if product.rhs_transposed else (deep, wide)
    products = 1 if len(lhs) > 1 else len(rhs)
    outs = matmul(
        product,
        tile_for(high, wide, products, mode == "interpret"),
        [padded(a, *a_shape) for a in lhs],
        [padded(b, *b_shape) for b in rhs],
        [padded(r, wide) for r in rows],
        [padded(t, high, wide) for t in tiles],
        None if accumulator is None else padded(accumulator, high, wide),
    )
    return [out[:m, :n] for out in outs]


@functools.cache
def tile_for(m: int, n: int, rhs_count: int, interpret: bool) -> Tile:
    """A tile for a product of (m, n): the largest of which there are enough."""
    if interpret:
        return Tile(128, 64, 64, 2, None)
    wide = 256 // rhs_count
    if -(-m // 128) * -(-n // wide) >= num_sms() or wide == 128:
        return Tile(128, wide, 64, 4, "rhs" if m > 128 else None)
    return Tile(128, 128, 64, 4, None)


def dot(precision: Any, a: Any, b: Any, over_a: int, over_b: int, dtype: Any) -> Any:
    """The contraction, summed in fp32; None for `dtype` leaves it there."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(
        a,
        b,
        (((over_a,), (over_b,)), ((), ())),
        precision=precision,
        preferred_element_type=dtype or wide,
        out_sharding=_sharding(a, b, over_a, over_b),
    )


def _sharding(a: Any, b: Any, over_a: int, over_b: int) -> Any:
    """How a contraction over a split axis lies on Explicit mesh axes, which JAX will not guess."""
    mesh = jax.typeof(a).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    (spec_a, split), (spec_b, _) = (
        ([*spec[:over], *spec[over + 1 :]], spec[over])
        for spec, over in (
            (jax.typeof(a).sharding.spec, over_a),
            (jax.typeof(b).sharding.spec, over_b),
        )
    )
    return None if split is None else NamedSharding(mesh, PartitionSpec(*spec_a, *spec_b))


def rows_of(ndim: int) -> str:
    """The factors of all axes but the last."""
    return " ".join("abcdefghij"[: ndim - 1])


def unsupported(x: Any) -> str | None:
    """Why the kernels cannot take this call."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}, and the kernels multiply bfloat16 and float16"
    return device_unsupported()


def flat(x: Any) -> Any:
    """(M, K), M all axes but the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def any_elements(*arrays: Any) -> bool:
    """Whether none of `arrays` is empty."""
    return all(a.size for a in arrays)


def _as_it_is(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
    del rows, tiles
    return products
