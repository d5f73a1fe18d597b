"""The products of a linear layer: each by kernel, in plain JAX, and which is faster."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding

from jaxkern.core.arguments import check_array, check_floating, unfit
from jaxkern.core.bound import wide
from jaxkern.core.dispatch import Mode
from jaxkern.core.mesh import gather, match_sharding, partition_spec, split_factors, varying
from jaxkern.mosaic.wgmma import without_wgmma
from jaxkern.ops.curves import Functions, curve, curve_value, kernel_functions
from jaxkern.ops.linear import few_rows
from jaxkern.ops.linear.kernel import Product, matmul
from jaxkern.ops.linear.tiles import ProductTile, faster, tile_for

_ROWS, _COLUMNS = 8, 64
"""Units of an array's first and last size that TMA can copy."""

_OF_CUBLAS = (None, "relu")
"""Activations that cuBLAS applies; XLA computes others itself, from fp32 sums in memory."""


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """Static arguments of the passes of a linear layer.

    Attributes:
      activation: name in :data:`jaxkern.ops.curves.CURVES`, or None.
      save: whether the forward also returns y, the input of the activation.
      precision: precision of fp32 products, as for ``jax.lax.dot_general``.
      accumulate_dtype: dtype of the partial products that devices add.
      mode: mode from :func:`jaxkern.core.dispatch.resolve`.
      dtypes: dtypes of the computed gradients, one for each.
    """

    activation: str | None
    save: bool
    precision: Any
    accumulate_dtype: str
    mode: Mode
    dtypes: tuple[str, ...] = ("float32",)

    def giving(self, *dtypes: Any) -> "LinearOptions":
        """Options of gradients with these dtypes."""
        return dataclasses.replace(self, dtypes=tuple(map(str, dtypes)))

    def of_part(self) -> "LinearOptions":
        """Options of the products that devices add."""
        return self.giving(*[self.accumulate_dtype] * len(self.dtypes))


def in_epilogue() -> Functions:
    """Functions of the curves, in the layout of a product's tiles."""
    return kernel_functions(False, plgpu.Layout.WGMMA)


# x · w, bias and activation


def kernel_forward(options: LinearOptions, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    activation = options.activation
    if activation is None and few_rows.fits(x, weight):
        out = few_rows.launch(flat(x), weight, bias).reshape(*x.shape[:-1], weight.shape[1])
        return out, out if options.save else None

    def epilogue(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
        del tiles
        y = products[0] + rows[0] if rows else products[0]
        out = curve_value(activation, y, in_epilogue()) if activation else y
        return [out, *([y] if options.save else [])]

    dtypes = (str(x.dtype),) * (1 + options.save)
    product = Product(False, False, dtypes, epilogue, _forward_name(options))
    rows = [] if bias is None else [bias.astype(jnp.float32)]
    outs = launch(product, options.mode, [flat(x)], [weight.astype(x.dtype)], rows)
    if outs is None:
        return reference_forward(options, x, weight, bias)
    out, *saved = (v.reshape(*x.shape[:-1], weight.shape[1]) for v in outs)
    return out, saved[0] if saved else None


def reference_forward(options: LinearOptions, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    if bias is None and options.activation is None:
        out = _product(options.precision, x, weight.astype(x.dtype), x.dtype)
        return out, out if options.save else None
    y = wide_product(options.precision, x, weight.astype(x.dtype))
    return finish_forward(options, x, weight, bias, y, None)


def finish_forward(
    options: LinearOptions, x: Any, weight: Any, bias: Any, sums: Any, _: Any
) -> Any:
    """Applies bias and activation to the product, or to its sum over devices where K is split."""
    del weight
    y = plus_bias(sums.astype(wide(sums.dtype)), bias)
    out = y if options.activation is None else curve(options.activation, y)
    return out.astype(x.dtype), y.astype(x.dtype) if options.save else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_product(precision: Any, x: Any, weight: Any) -> Any:
    """x · w in fp32; its gradients are products in the dtype of x and w."""
    return _product(precision, x, weight, None)


@wide_product.defjvp
def _wide_product_jvp(precision: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, weight), (dx, dweight) = primals, tangents
    y = wide_product(precision, x, weight)
    narrow = lambda x, weight: _product(precision, x, weight, x.dtype).astype(y.dtype)
    return y, narrow(dx, weight) + narrow(x, dweight)


def _product(precision: Any, x: Any, weight: Any, dtype: Any) -> Any:
    return dot(precision, x, weight, x.ndim - 1, 0, dtype)


def kernel_product(options: LinearOptions, x: Any, weight: Any, bias: Any) -> Any:
    """x · w alone, twice where the forward pass has two results."""
    product = Product(False, False, options.dtypes, unchanged, "linear_fwd")
    outs = launch(product, options.mode, [flat(x)], [weight.astype(x.dtype)])
    if outs is None:
        return reference_product(options, x, weight, bias)
    out = outs[0].reshape(*x.shape[:-1], weight.shape[1])
    return out, out if options.save else None


def reference_product(options: LinearOptions, x: Any, weight: Any, bias: Any) -> Any:
    del bias
    out = _product(options.precision, x, weight.astype(x.dtype), jnp.dtype(options.dtypes[0]))
    return out, out if options.save else None


def faster_forward(options: LinearOptions, x: Any, weight: Any, bias: Any) -> bool:
    del bias
    if options.activation is None and few_rows.fits(x, weight):
        return True
    return faster(_forward_name(options), row_count(x), weight.shape[1], weight.shape[0])


def _forward_name(options: LinearOptions) -> str:
    return "linear_fwd" if options.activation in _OF_CUBLAS else "linear_activation_fwd"


# dy · wᵀ, xᵀ · dy, and the latter added to an accumulator: of a linear layer, or of a gated unit's
# two weights, whose products are summed or share x

DX = ("linear_dx", "gated_dx")
DWEIGHT = ("linear_dweight", "gated_dweights")
ACCUMULATE = ("linear_accumulate", "gated_accumulate")
"""Kernel names for one weight and for two."""


def kernel_dx(options: LinearOptions, *arrays: Any) -> Any:
    dys, weights = _halves(arrays)
    product = Product(False, True, options.dtypes, unchanged, DX[len(dys) - 1])
    weights = [w.astype(d.dtype) for w, d in zip(weights, dys, strict=True)]
    outs = launch(product, options.mode, [flat(d) for d in dys], weights)
    if outs is None:
        return reference_dx(options, *arrays)
    return (outs[0].reshape(*dys[0].shape[:-1], weights[0].shape[0]),)


def reference_dx(options: LinearOptions, *arrays: Any) -> Any:
    dys, weights = _halves(arrays)
    [dtype] = options.dtypes
    summed = jnp.dtype(dtype) if len(dys) == 1 else None
    parts = [
        dot(options.precision, d, w.astype(d.dtype), d.ndim - 1, 1, summed)
        for d, w in zip(dys, weights, strict=True)
    ]
    return (functools.reduce(operator.add, parts).astype(dtype),)


def faster_dx(options: LinearOptions, *arrays: Any) -> bool:
    del options
    dys, weights = _halves(arrays)
    return faster(DX[len(dys) - 1], row_count(dys[0]), *weights[0].shape)


def _halves(arrays: Any) -> tuple[Any, Any]:
    return arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]


def kernel_dweight(options: LinearOptions, x: Any, *dys: Any) -> Any:
    product = Product(True, False, options.dtypes, unchanged, DWEIGHT[len(dys) - 1])
    outs = launch(product, options.mode, [flat(x)], [flat(d) for d in dys])
    return reference_dweight(options, x, *dys) if outs is None else tuple(outs)


def reference_dweight(options: LinearOptions, x: Any, *dys: Any) -> Any:
    return tuple(
        dot(options.precision, flat(x), flat(d), 0, 0, jnp.dtype(dtype))
        for d, dtype in zip(dys, options.dtypes, strict=True)
    )


def finish_gradients(options: LinearOptions, *arrays_and_sums: Any) -> Any:
    """Rounds the sums over devices of dx or of weight gradients."""
    sums = arrays_and_sums[-len(options.dtypes) :]
    return tuple(v.astype(dtype) for v, dtype in zip(sums, options.dtypes, strict=True))


def faster_dweight(options: LinearOptions, x: Any, *dys: Any) -> bool:
    del options
    return faster(DWEIGHT[len(dys) - 1], x.shape[-1], dys[0].shape[-1], row_count(x))


def kernel_accumulate(options: LinearOptions, *arrays: Any) -> Any:
    accumulators, (x, *dys) = _halves(arrays)
    product = Product(True, False, ("float32",) * len(dys), unchanged, ACCUMULATE[len(dys) - 1])
    dys = [flat(d) for d in dys]
    sums = launch(product, options.mode, [flat(x)], dys, accumulators=accumulators)
    return reference_accumulate(options, *arrays) if sums is None else tuple(sums)


def reference_accumulate(options: LinearOptions, *arrays: Any) -> Any:
    accumulators, rest = _halves(arrays)
    dweights = zip(accumulators, reference_dweight(options, *rest), strict=True)
    return tuple(a + match_sharding(d, a) for a, d in dweights)


def faster_accumulate(options: LinearOptions, *arrays: Any) -> bool:
    del options
    accumulators, (x, *dys) = _halves(arrays)
    rows, columns = accumulators[0].shape
    return faster(ACCUMULATE[len(dys) - 1], rows, columns, row_count(x))


def kernel_added(options: LinearOptions, *arrays: Any) -> Any:
    """xᵀ · dy alone; devices add it before the accumulator."""
    return kernel_dweight(options, *_halves(arrays)[1])


def reference_added(options: LinearOptions, *arrays: Any) -> Any:
    return reference_dweight(options, *_halves(arrays)[1])


def finish_accumulate(options: LinearOptions, *arrays_and_sums: Any) -> Any:
    count = len(options.dtypes)
    pairs = zip(arrays_and_sums[:count], arrays_and_sums[-count:], strict=True)
    return tuple(accumulator + total.astype(jnp.float32) for accumulator, total in pairs)


def bias_gradient(dy: Any, bias: Any) -> Any:
    """Sums `dy` over rows, (N,), in the dtype of `bias`; None without one."""
    if bias is None:
        return None
    return jnp.sum(dy, tuple(range(dy.ndim - 1)), dtype=wide(dy.dtype)).astype(bias.dtype)


# Launch, plain products and checks


def launch(
    product: Product,
    mode: Mode,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    rows: Sequence[jax.Array] = (),
    tiles: Sequence[jax.Array] = (),
    accumulators: Sequence[jax.Array] = (),
    columns: Sequence[jax.Array] = (),
    tile: ProductTile | None = None,
) -> list[jax.Array] | None:
    """Launches :func:`matmul` for any sizes, padded; None where plain JAX computes the product.

    The tile is the measured one by default.
    """
    k, m = lhs[0].shape if product.lhs_transposed else lhs[0].shape[::-1]
    n = rhs[0].shape[0 if product.rhs_transposed else -1]
    tile = tile or tile_for(product.name, mode, m, n, k)
    if tile is None:
        return None

    def padded(v: jax.Array, *sizes: int) -> jax.Array:
        if v.ndim > len(sizes):  # two matrices side by side
            sizes = (sizes[0], v.shape[1], sizes[1])
        if v.shape == sizes:
            return v
        return jnp.pad(v, [(0, size - s) for s, size in zip(v.shape, sizes, strict=True)])

    k_first = product.lhs_transposed and not product.rhs_transposed
    k_fit = _fitting(k, _ROWS if k_first else _COLUMNS)
    m_fit = _fitting(m, _COLUMNS if product.lhs_transposed else _ROWS)
    n_fit = _fitting(n, _COLUMNS)
    a_shape = (k_fit, m_fit) if product.lhs_transposed else (m_fit, k_fit)
    b_shape = (n_fit, k_fit) if product.rhs_transposed else (k_fit, n_fit)
    outs = matmul(
        product,
        tile,
        [padded(a, *a_shape) for a in lhs],
        [padded(b, *b_shape) for b in rhs],
        [padded(r, max(r.size, -(-n // _COLUMNS) * _COLUMNS)) for r in rows],
        [padded(t, m_fit, n_fit) for t in tiles],
        [padded(a, m_fit, n_fit) for a in accumulators],
        columns,
    )
    if product.sums:
        return outs
    return [out if out.shape[:: out.ndim - 1] == (m, n) else out[:m, ..., :n] for out in outs]


def _fitting(size: int, unit: int) -> int:
    """Rounds up `size` to one that :func:`matmul` takes."""
    if size < _ROWS if unit == _ROWS else size <= 32 and size % 8 == 0:
        return size
    return -(-size // unit) * unit


def dot(precision: Any, a: Any, b: Any, over_a: int, over_b: int, dtype: Any) -> Any:
    """Contracts a and b with sums in fp32, rounded to `dtype`, or not rounded for None."""
    return lax.dot_general(
        a,
        b,
        (((over_a,), (over_b,)), ((), ())),
        precision=precision,
        preferred_element_type=dtype or wide(a.dtype),
        out_sharding=_sharding(a, b, over_a, over_b),
    )


def _sharding(a: Any, b: Any, over_a: int, over_b: int) -> Any:
    """Sharding of a contraction on an Explicit mesh, for which JAX may ask.

    If both operands are split over the same axis of the mesh, `b`, the weight, is gathered.
    """
    mesh = jax.typeof(a).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    factors = [f".{i}" for i in range(a.ndim)], ["n", "n"]
    factors[0][over_a] = factors[1][over_b] = "k"
    specs = [jax.typeof(v).sharding.spec for v in (a, b)]
    axes = split_factors(mesh.shape, factors, frozenset("k"), specs, (a.shape, b.shape))
    of_out = [f for f in (*factors[0], *factors[1]) if f != "k"]
    return NamedSharding(mesh, partition_spec(of_out, axes))


def match_product(out: Any, x: Any, weight: Any) -> Any:
    """Reshards `out` on an Explicit mesh as x · w is, where a pass split K instead."""
    sharding = _sharding(x, weight, x.ndim - 1, 0)
    return out if out is None or sharding is None else jax.sharding.reshard(out, sharding)


def plus_bias(y: Any, bias: Any) -> Any:
    """Adds `bias`, if any, to `y`; it is gathered where the columns of `y` were."""
    if bias is None:
        return y
    of_y, of_bias = (jax.typeof(v).sharding.spec[-1] for v in (y, bias))
    bias = bias if of_bias == of_y else gather(bias, 0)
    return y + bias.astype(y.dtype)


def unfit_forward(options: LinearOptions, x: Any, weight: Any, bias: Any) -> str | None:
    """Reason why the forward's kernel cannot run on the GPU that a program is lowered for."""
    few = options.activation is None and few_rows.fits(x, weight)
    return None if few else unfit_for_gpu(options, x, weight, bias)


def unfit_for_gpu(options: Any, *types: Any) -> str | None:
    """Reason why the kernels cannot run on the GPU that a program is lowered for."""
    del options, types
    return without_wgmma()


def unsupported(**arrays: Any) -> str | None:
    """Reason why the kernels cannot take this call; products have the first array's dtype."""
    name, first = next(iter(arrays.items()))
    if first.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{name} is {first.dtype}, and the kernels multiply bfloat16 and float16"
    return unfit(**arrays)


def check_operands(
    x: Any, weight: Any, name: str = "weight", columns: str = "N"
) -> tuple[jax.Array, jax.Array]:
    """Checks x (..., K) and the weight `name`, (K, `columns`), and makes them arrays."""
    x, weight = check_floating("x", x), check_floating(name, weight)
    if x.ndim < 1:
        raise ValueError(f"x must have at least one axis, the one that {name} multiplies; got ()")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name} must have shape (K, {columns}), K = {x.shape[-1]} the last axis of x; "
            f"got {weight.shape}. A weight stored as ({columns}, K) goes in as {name}.T"
        )
    return x, weight


def check_accumulator(name: str, a: Any, shape: tuple[int, ...], meaning: str) -> jax.Array:
    """Checks an accumulator of weight gradients; arguments as for :func:`check_array`."""
    a = check_array(name, a, shape, meaning)
    if a.dtype != jnp.float32:
        raise TypeError(f"{name} must be float32, got {a.dtype}; convert it first")
    return a


def flat(x: Any) -> Any:
    """Reshapes `x` to (M, K)."""
    return x.reshape(row_count(x), x.shape[-1])


def row_count(x: Any) -> int:
    """M, the product of all sizes but the last."""
    return math.prod(x.shape[:-1])


def varies_more(x: Any, than: Any) -> bool:
    """Whether, inside a ``shard_map``, `x` differs between devices that have the same `than`."""
    return bool(varying(x) - varying(than))


def unchanged(products: list[Any], rows: list[Any], tiles: list[Any]) -> list[Any]:
    """Epilogue that returns the products."""
    del rows, tiles
    return products
