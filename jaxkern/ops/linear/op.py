r"""Linear layers: products with weights, forward and backward.

Forward, with x (M, K), weight w (K, N), bias b and activation f:

    y = x · w + b          out = f(y)

Backward, for the cotangent dout:

    dy = dout · f'(y)          dx = dy · wᵀ          dw = xᵀ · dy          db = Σ_rows dy

Saved for the backward: x, w and, with an activation, y in the dtype of x (for ReLU out, which is
kept anyway). With an accumulator a of the weight's gradient, a + dw is computed instead of dw, in
the memory of a.

All products take the dtype of x and are summed in fp32: a cotangent that JAX leaves in fp32, where
a product was asked for in fp32, would take its two products off the 16-bit tensor cores. XLA
computes dy, which is elementwise, and db, a sum in fixed order.

Operations: 2·M·N·K a product, one forward and two backward. Bias and activation, which alone would
read and write 2·M·N elements, are computed in the epilogue of the first; dy reads and writes 3·M·N
elements, and an accumulator 2·K·N in fp32.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.core.arguments import (
    check_dtype,
    check_floating,
    check_optional,
)
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation, public_op, resolve
from jaxkern.core.kernel_pass import KernelPass, named
from jaxkern.core.mesh import Partial, match_primal, match_sharding
from jaxkern.ops.curves import CURVES, PLAIN, Activation, check_activation
from jaxkern.ops.linear import products
from jaxkern.ops.linear.products import (
    LinearOptions,
    check_accumulator,
    check_operands,
    unsupported,
)
from jaxkern.ops.norm.op import Settings, norm_then


@public_op
def linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    accumulator: jax.Array | None = None,
    accumulate_dtype: Any = jnp.float32,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""A linear layer, ``activation(x @ weight + bias)``.

    .. math:: y = f(x w + b)

    Products take the dtype of `x` (a weight of another one is converted) and are summed in fp32;
    bias and activation are applied to that sum, and the result is rounded once. So are the
    gradients: the cotangent's products run on the same tensor cores as the forward's.

    On a mesh, the rows, K and N may be split between devices in any way: the devices' parts of a
    split K are added, before bias and activation.

    With an `accumulator`, the gradient with respect to it is `accumulator` plus the gradient of
    `weight`, which itself gets zeros: over micro-batches, each a gradient with respect to the
    accumulators of the one before, gradients add up in their memory
    (:func:`jaxkern.accumulate_weight_grad`). `weight` is to be used once in a micro-batch.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight: (K, N), any of those dtypes.
      bias: (N,), any of those dtypes, or ``None``.
      activation: ``"relu"``, ``"relu_squared"``, ``"silu"``, ``"gelu"`` (by tanh, as
        ``jax.nn.gelu``; also ``"gelu_tanh"``), ``"gelu_erf"``, ``"quick_gelu"``, ``"sigmoid"``,
        ``"tanh"`` or ``None``.
      accumulator: (K, N), float32, the gradient of `weight` so far, or ``None``.
      accumulate_dtype: in which the devices' parts of a sum are rounded and added: of a split K in
        the forward, of split rows in the weight's gradient, of a split N in dx. float32,
        or the dtype of `x` for half the bytes between devices. On one device all sums are in fp32
        until they are rounded to the result. With ``implementation="xla"`` the compiler decides.
      precision: of products of float32, as for ``jax.lax.dot_general``: ``"highest"`` for true
        fp32, ``"TF32_TF32_F32"`` for tf32.
      implementation: ``"mosaic"`` for the Pallas GPU kernels, ``"xla"`` for plain JAX, ``None`` for
        the kernels on a GPU of compute capability 9.0 (Hopper), at sizes where they are measured
        faster than cuBLAS; of up to four rows in 16 bits without an activation, from 8.0 on.

    Returns:
      (..., N), the dtype of `x`.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or `accumulator` not float32.
      ValueError: a shape does not fit, or `activation`, `accumulate_dtype` or `implementation` is
        unknown.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax, jax.numpy as jnp, jaxkern
      >>> x, weight = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.linear(x, weight, jnp.zeros(128), activation="gelu").shape
      (2, 8, 128)
    """
    x, weight = check_operands(x, weight)
    bias = check_optional("bias", bias, weight.shape[1:], "(N,), N the last axis of weight")
    curve = check_activation(activation)
    if accumulator is not None:
        accumulator = check_accumulator(
            "accumulator", accumulator, weight.shape, "the shape of weight"
        )
    summed = check_dtype("accumulate_dtype", accumulate_dtype)
    if summed not in (jnp.float32, x.dtype):
        raise ValueError(
            f"accumulate_dtype must be float32 or the dtype of x, {x.dtype}; got {summed}"
        )
    mode = resolve(implementation, unsupported(x=x, weight=weight), op="linear")
    options = LinearOptions(curve, False, precision, str(summed), mode)
    return _product(x, weight, bias, accumulator, options)


def _product(x: Any, weight: Any, bias: Any, accumulator: Any, options: LinearOptions) -> jax.Array:
    if options.mode == "xla" and accumulator is None:
        return named("linear", products.reference_forward(options, x, weight, bias)[0])
    return _linear_jit(x, weight, bias, accumulator, options)


@public_op
def accumulate_weight_grad(
    accumulator: jax.Array,
    x: jax.Array,
    dout: jax.Array,
    *,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Add a linear layer's weight gradient to what earlier micro-batches gave.

    .. math:: a \leftarrow a + x^\top \mathrm{dout}

    The kernel adds to the accumulator in its memory: a gradient tree that is carried through a
    ``lax.scan`` over micro-batches, or donated, is read and written once for each, and no gradient
    of the micro-batch is written. In a model's backward the `accumulator` of
    :func:`jaxkern.linear` and the `accumulators` of :func:`jaxkern.gated_linear_unit` do the same.

    Args:
      accumulator: (K, N), float32.
      x: (..., K), bfloat16, float16 or float32.
      dout: (..., N), converted to the dtype of `x`.
      precision: as for :func:`linear`.
      implementation: as for :func:`linear`.

    Returns:
      (K, N), float32.

    Raises:
      TypeError: an argument is not an array of a floating dtype, or `accumulator` not float32.
      ValueError: a shape does not fit.
      NotImplementedError: ``implementation="mosaic"`` cannot take this call.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, dout = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((8, 128), jnp.bfloat16)
      >>> sums = jnp.zeros((64, 128), jnp.float32)
      >>> jaxkern.accumulate_weight_grad(sums, x, dout)[0, 0]
      Array(8., dtype=float32)
    """
    x, dout = check_floating("x", x), check_floating("dout", dout)
    if x.ndim < 1 or dout.shape[:-1] != x.shape[:-1] or dout.ndim != x.ndim:
        raise ValueError(
            f"dout must have shape (..., N) with the leading axes of x, {x.shape[:-1]}; "
            f"got {dout.shape}"
        )
    shape = (x.shape[-1], dout.shape[-1])
    accumulator = check_accumulator("accumulator", accumulator, shape, "(K, N) of x and dout")
    mode = resolve(implementation, unsupported(x=x, dout=dout), op="accumulate_weight_grad")
    options = LinearOptions(None, False, precision, "float32", mode)
    dout = dout.astype(x.dtype)
    if mode == "xla":
        total = products.reference_accumulate(options, accumulator, x, dout)[0]
    else:
        total = BACKWARD[1].accumulate(options, accumulator, x, dout)[0]
    return named("accumulate_weight_grad", match_sharding(total, accumulator))


def _linear(x: Any, weight: Any, bias: Any, accumulator: Any, options: LinearOptions) -> Any:
    del accumulator
    return products.match_product(FORWARD(options, x, weight, bias)[0], x, weight)


def _linear_fwd(x, weight, bias, accumulator, options):
    saving = options.activation not in (None, "relu")
    results = FORWARD(dataclasses.replace(options, save=saving), x, weight, bias)
    out, y = (products.match_product(v, x, weight) for v in results)
    return out, (x, weight, bias, accumulator, out if options.activation == "relu" else y)


def _linear_bwd(options, res, dout):
    x, weight, bias, accumulator, y = res
    dy = dout
    if options.activation is not None:
        times_slope = CURVES[options.activation](y.astype(jnp.float32), PLAIN)[1]
        dy = times_slope(dout.astype(jnp.float32)).astype(dout.dtype)
    grads = gradients(options, x, (dy,), (weight,), (bias,), (accumulator,))
    dx, [dweight], [dbias], [total] = grads
    return dx, dweight, dbias, total


_linear_jit = Differentiable(_linear_fwd, _linear_bwd, _linear)


def gradients(
    options: LinearOptions, x: Any, dys: Any, weights: Any, biases: Any, accumulators: Any
) -> tuple[Any, Any, Any, Any]:
    """The backward of x · w for one weight, or for two with as many `dys`.

    Returns:
      dx and tuples dweights, dbiases and sums with the accumulators; where these are given
      dweights are ``None``, else the sums.
    """
    passes = BACKWARD[len(dys)]
    [dx] = passes.dx(options.giving(dys[0].dtype), *dys, *weights)
    dbiases = tuple(
        match_primal(products.bias_gradient(d, b), b) for d, b in zip(dys, biases, strict=True)
    )
    matched = lambda values, like: tuple(map(match_primal, values, like))
    absent = (None,) * len(weights)
    if accumulators[0] is None:
        dweights = passes.dweight(options.giving(*(w.dtype for w in weights)), x, *dys)
        return match_primal(dx, x), matched(dweights, weights), dbiases, absent
    options = options.giving(*["float32"] * len(dys))
    if any(products.varies_more(v, a) for v in (x, *dys) for a in accumulators):
        # Devices that have the same accumulator add their gradients to it.
        sums = matched(passes.dweight(options, x, *dys), accumulators)
        sums = [a + dweight for a, dweight in zip(accumulators, sums, strict=True)]
    else:
        sums = passes.accumulate(options, *accumulators, x, *dys)
    return match_primal(dx, x), absent, dbiases, matched(sums, accumulators)


FORWARD = KernelPass(
    "linear_fwd",
    kernel=products.kernel_forward,
    reference=products.reference_forward,
    faster=products.faster_forward,
    unfit=products.unfit_forward,
    ins=("... k", "k n", "n"),
    outs=("... n", "... n"),
    partial=Partial(
        kernel=products.kernel_product,
        reference=products.reference_product,
        options=LinearOptions.of_part,
        finish=products.finish_forward,
    ),
)


class BackwardPasses(NamedTuple):
    """The passes of dx, of the weights' gradients, and of their sums with accumulators."""

    dx: KernelPass
    dweight: KernelPass
    accumulate: KernelPass


def _backward(weights: int) -> BackwardPasses:
    dx = KernelPass(
        products.DX[weights - 1],
        kernel=products.kernel_dx,
        reference=products.reference_dx,
        faster=products.faster_dx,
        unfit=products.unfit_for_gpu,
        ins=("... n",) * weights + ("k n",) * weights,
        outs=("... k",),
        partial=Partial(options=LinearOptions.of_part, finish=products.finish_gradients),
    )
    dweight = KernelPass(
        products.DWEIGHT[weights - 1],
        kernel=products.kernel_dweight,
        reference=products.reference_dweight,
        faster=products.faster_dweight,
        unfit=products.unfit_for_gpu,
        ins=("... k",) + ("... n",) * weights,
        outs=("k n",) * weights,
        partial=Partial(options=LinearOptions.of_part, finish=products.finish_gradients),
    )
    accumulate = KernelPass(
        products.ACCUMULATE[weights - 1],
        kernel=products.kernel_accumulate,
        reference=products.reference_accumulate,
        faster=products.faster_accumulate,
        unfit=products.unfit_for_gpu,
        ins=("k n",) * weights + ("... k",) + ("... n",) * weights,
        outs=("k n",) * weights,
        partial=Partial(
            kernel=products.kernel_added,
            reference=products.reference_added,
            options=LinearOptions.of_part,
            finish=products.finish_accumulate,
        ),
    )
    return BackwardPasses(dx, dweight, accumulate)


BACKWARD = {weights: _backward(weights) for weights in (1, 2)}
"""The backward's passes by the number of weights that multiply the same x."""


# A norm and the linear layers after it, which do not keep its result


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of one array with several matrices, as a function for :func:`norm_then`.

    Attributes:
      options: of each.
    """

    options: LinearOptions

    @classmethod
    def of(
        cls,
        x: jax.Array,
        weights: Any,
        implementation: Implementation | None,
        activation: Activation | None = None,
        precision: Any = None,
    ) -> "Products":
        """Products of arrays of the dtype of `x` with `weights`; the rest is as for linear."""
        reasons = [unsupported(x=x, weight=weight) for weight in weights]
        reason = next(filter(None, reasons), None)
        mode = resolve(implementation, reason, op="linear")
        return cls(LinearOptions(check_activation(activation), False, precision, "float32", mode))

    def __call__(self, x: jax.Array, weights: Any, biases: Any) -> tuple[jax.Array, ...]:
        """x (..., K) times each of `weights` (K, N), plus each of `biases` (N,) or ``None``.

        As XLA would make one product of several that have an operand in common, and copy its parts
        apart, each has a copy of x, which XLA takes for another. Equal barriers would be one: each
        is of the copy before.
        """
        barrier = lambda copy, _: jax.lax.optimization_barrier(copy)
        copies = itertools.accumulate(weights[1:], barrier, initial=x)
        each = zip(copies, weights, biases, strict=True)
        return tuple(_product(*of, None, self.options) for of in each)


@public_op
def rms_norm_linear(
    x: jax.Array,
    weight: jax.Array | None,
    w: jax.Array | tuple[jax.Array, ...],
    b: jax.Array | tuple[jax.Array | None, ...] | None = None,
    *,
    bias: jax.Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_activation: Activation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: Activation | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> Any:
    r"""RMS norm and linear layers: ``linear(rms_norm(x, weight), w, b)``.

    The normalised x, 2·M·K bytes in 16 bits, is not kept for the backward: the norm's kernel, which
    computes it anyway, writes it again for the gradient of `w`. With an `activation`, or where the
    norm runs in plain JAX, it is computed again. The sum of a bfloat16 x and a float32 `residual`
    is returned in float32, and kept for the norm's gradient in bfloat16.

    Args:
      x: (..., K), bfloat16, float16 or float32.
      weight: (K,), of the norm, or ``None``.
      w: (K, N), of the linear layer; or a tuple of such matrices, of any N, for as many products.
      b: (N,) or ``None``; with several matrices a tuple of as many, or ``None``.
      bias: (K,), of the norm, or ``None``.
      eps, weight_offset, residual, gate, gate_activation, norm_before_gate, group_size: as for
        :func:`jaxkern.rms_norm`.
      activation, precision: as for :func:`jaxkern.linear`.
      implementation: of both, as for each.

    Returns:
      (..., N), the dtype of `x`; a tuple of them for a tuple of matrices. With `residual`, a pair
      of that and the sum x + residual.

    Raises:
      TypeError, ValueError, NotImplementedError: as both.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.rms_norm_linear(x, jnp.ones(64), w).shape
      (2, 8, 128)
      >>> (q, k), x = jaxkern.rms_norm_linear(x, jnp.ones(64), (w, w), residual=x)
    """
    arrays = x, weight, bias, residual, gate
    settings = Settings(eps, weight_offset, None, gate_activation, norm_before_gate, group_size)
    of_linear = implementation, activation, precision
    return _normed("rms_norm", arrays, settings, w, b, of_linear)


@public_op
def layer_norm_linear(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    w: jax.Array | tuple[jax.Array, ...],
    b: jax.Array | tuple[jax.Array | None, ...] | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_activation: Activation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: Activation | None = None,
    precision: Any = None,
    implementation: Implementation | None = None,
) -> Any:
    r"""Layer norm and linear layers: ``linear(layer_norm(x, weight, bias), w, b)``.

    Arguments, result and errors are as for :func:`rms_norm_linear`; `bias` may be ``None``. A sum
    with `residual` is kept as it is returned.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> x, w = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128))
      >>> jaxkern.layer_norm_linear(x, jnp.ones(64), jnp.zeros(64), w).shape
      (2, 8, 128)
    """
    arrays = x, weight, bias, residual, gate
    settings = Settings(eps, weight_offset, None, gate_activation, norm_before_gate, group_size)
    of_linear = implementation, activation, precision
    return _normed("layer_norm", arrays, settings, w, b, of_linear)


def _normed(norm: str, arrays: Any, settings: Settings, w: Any, b: Any, of_linear: Any) -> Any:
    """Products after a norm, the result of which is not kept."""
    several = isinstance(w, tuple | list)
    weights, biases = (w, b) if several else ((w,), (b,))
    biases = (None,) * len(weights) if biases is None else biases
    if not isinstance(biases, tuple | list):
        raise TypeError(
            f"b must be a tuple of {len(weights)} arrays, as w is, or None; got {type(b).__name__}"
        )
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"w and b must have as many arrays, at least one; got {len(weights)} and {len(biases)}"
        )
    x = check_floating("x", arrays[0])
    weights = tuple(check_operands(x, w, "w")[1] for w in weights)
    shape = "(N,), N the last axis of w"
    biases = tuple(
        check_optional("b", b, w.shape[1:], shape) for w, b in zip(weights, biases, strict=True)
    )
    of_norm = norm, (x, *arrays[1:]), settings, of_linear[0]
    then = Products.of(x, weights, *of_linear)
    again = then.options.activation is not None
    outs, h = norm_then(f"{norm}_linear", *of_norm, then, (weights, biases), again=again)
    outs = outs if several else outs[0]
    return outs if h is None else (outs, h)
