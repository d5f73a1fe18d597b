"""The products of gated linear units: each by kernel, in plain JAX, and which is faster.

Each projection has a weight and perhaps a bias, or one array holds both weights side by side and
another both biases. Then w_up and b_up are None, and so are up and dup: the saved projections and
their gradients are one array, too.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxkern.core.dispatch import Mode
from jaxkern.ops.curves import PLAIN, Unit
from jaxkern.ops.linear.matmul_kernel import Product
from jaxkern.ops.linear.products import (
    dot,
    flat,
    in_epilogue,
    launch,
    plus_bias,
    row_count,
    unchanged,
    wide_product,
)
from jaxkern.ops.linear.tiles import faster


@dataclasses.dataclass(frozen=True)
class GatedOptions:
    """What the passes of a gated linear unit are compiled for.

    Attributes:
      unit: the function of gate and up.
      one_weight: whether one array holds the weights of both.
      recompute: whether the backward computes both projections again.
      save: whether the forward also returns both projections.
      precision: of products of float32, as for ``jax.lax.dot_general``.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      dtypes: of the gradients that are computed, one or two.
    """

    unit: Unit
    one_weight: bool
    recompute: bool
    save: bool
    precision: Any
    mode: Mode
    dtypes: tuple[str, ...] = ("float32", "float32")

    def giving(self, *like: Any) -> "GatedOptions":
        """The options of gradients with the dtypes of these arrays."""
        return dataclasses.replace(self, dtypes=tuple(str(a.dtype) for a in like))

    def of_part(self) -> "GatedOptions":
        """The options of the products that devices add, in fp32."""
        return dataclasses.replace(self, dtypes=("float32",) * len(self.dtypes))


WIDE = ("float32", "float32")


# Forward


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
    """Biases and unit of the products, or of their sums over the devices that K is split over."""
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
    """`v` within the range of `dtype`: times a cotangent of 0, an infinity would be a NaN."""
    if dtype != jnp.float16:
        return v
    most = float(jnp.finfo(dtype).max)
    return jnp.minimum(jnp.maximum(v, -most), most)


def kernel_projections(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any
) -> Any:
    """Both projections in fp32 without bias, after a first result that has the shape of out."""
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
    """The weights as a kernel takes them: one of both as (K, 2, N)."""
    if options.one_weight:
        k, columns = w_gate.shape
        return [w_gate.astype(dtype).reshape(k, 2, columns // 2)]
    return [w_gate.astype(dtype), w_up.astype(dtype)]


def _biases(options: GatedOptions, b_gate: Any, b_up: Any) -> tuple[Any, list[Any]]:
    """A function that adds the biases in an epilogue, and the rows that it reads for it."""
    both = [b_gate, b_up]
    if options.one_weight and b_gate is not None:
        both = jnp.split(b_gate, 2)
    here = [b is not None for b in both]

    def added(products: list[Any], rows: list[Any]) -> list[Any]:
        rest = iter(rows)
        return [p + next(rest) if b else p for p, b in zip(products, here, strict=True)]

    return added, [b.astype(jnp.float32) for b in both if b is not None]


def faster_forward(options: GatedOptions, x: Any, w_gate: Any, *rest: Any) -> bool:
    del rest
    return _faster_projections("gated_fwd", options, x, w_gate)


def _faster_projections(name: str, options: GatedOptions, x: Any, w_gate: Any) -> bool:
    k, columns = w_gate.shape
    return faster(name, row_count(x), columns // (1 + options.one_weight), k)


# Backward


def kernel_slopes(
    options: GatedOptions, x: Any, w_gate: Any, w_up: Any, b_gate: Any, b_up: Any, dout: Any
) -> Any:
    """dg and du, with both projections computed again."""
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


def faster_slopes(options: GatedOptions, x: Any, w_gate: Any, *rest: Any) -> bool:
    del rest
    return _faster_projections("gated_bwd", options, x, w_gate)


def kernel_dx(options: GatedOptions, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> Any:
    outs = launch(
        Product(False, True, options.dtypes, unchanged, "gated_dx"),
        options.mode,
        [flat(dgate), flat(dup)],
        [w_gate.astype(dgate.dtype), w_up.astype(dgate.dtype)],
    )
    if outs is None:
        return reference_dx(options, dgate, dup, w_gate, w_up)
    return (outs[0].reshape(*dgate.shape[:-1], w_gate.shape[0]),)


def reference_dx(options: GatedOptions, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> Any:
    last = dgate.ndim - 1
    parts = [
        dot(options.precision, d, w.astype(d.dtype), last, 1, None)
        for d, w in ((dgate, w_gate), (dup, w_up))
    ]
    return ((parts[0] + parts[1]).astype(options.dtypes[0]),)


def faster_dx(options: GatedOptions, dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> bool:
    del options, dup, w_up
    return faster("gated_dx", row_count(dgate), w_gate.shape[0], w_gate.shape[1])


def kernel_dweights(options: GatedOptions, x: Any, dgate: Any, dup: Any) -> Any:
    product = Product(True, False, options.dtypes, unchanged, "gated_dweights")
    outs = launch(product, options.mode, [flat(x)], [flat(dgate), flat(dup)])
    return reference_dweights(options, x, dgate, dup) if outs is None else tuple(outs)


def reference_dweights(options: GatedOptions, x: Any, dgate: Any, dup: Any) -> Any:
    return tuple(
        dot(options.precision, flat(x), flat(d), 0, 0, jnp.dtype(t))
        for d, t in zip((dgate, dup), options.dtypes, strict=True)
    )


def faster_dweights(options: GatedOptions, x: Any, dgate: Any, dup: Any) -> bool:
    del options, dup
    return faster("gated_dweights", x.shape[-1], dgate.shape[-1], row_count(x))


def kernel_accumulate(
    options: GatedOptions, of_gate: Any, of_up: Any, x: Any, dgate: Any, dup: Any
) -> Any:
    sums = launch(
        Product(True, False, WIDE, unchanged, "gated_accumulate"),
        options.mode,
        [flat(x)],
        [flat(dgate), flat(dup)],
        accumulators=[of_gate, of_up],
    )
    if sums is None:
        return reference_accumulate(options, of_gate, of_up, x, dgate, dup)
    return tuple(sums)


def reference_accumulate(
    options: GatedOptions, of_gate: Any, of_up: Any, x: Any, dgate: Any, dup: Any
) -> Any:
    dw_gate, dw_up = reference_dweights(options, x, dgate, dup)
    return of_gate + dw_gate, of_up + dw_up


def faster_accumulate(options: GatedOptions, of_gate: Any, of_up: Any, x: Any, *rest: Any) -> bool:
    del options, of_up, rest
    sizes = of_gate.shape[0], of_gate.shape[1], row_count(x)
    return faster("gated_accumulate", *sizes)


def kernel_added(options: GatedOptions, of_gate: Any, of_up: Any, *arrays: Any) -> Any:
    """xᵀ · dg and xᵀ · du alone, which devices add before they go into the accumulators."""
    del of_gate, of_up
    return kernel_dweights(options, *arrays)


def reference_added(options: GatedOptions, of_gate: Any, of_up: Any, *arrays: Any) -> Any:
    del of_gate, of_up
    return reference_dweights(options, *arrays)
