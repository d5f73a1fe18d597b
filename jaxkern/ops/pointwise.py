"""The passes of activations and gated units, each by kernel and in plain JAX.

A function works on each element alone, of one array or of a gate and an up, which may be the halves
of one array's rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.core.dispatch import Mode
from jaxkern.ops.curves import PLAIN, Unit, kernel_functions, wide
from jaxkern.ops.elementwise import Lanes, launch


@dataclasses.dataclass(frozen=True)
class Options:
    """What the passes are compiled for.

    Attributes:
      op: the name of the public function.
      name: of the kernels, without ``_fwd`` or ``_bwd``.
      function: of each element, an :class:`jaxkern.ops.curves.Alone` or ``Unit``.
      mode: from :func:`jaxkern.core.dispatch.resolve`.
      joined: whether one array holds gate and up side by side.
    """

    op: str
    name: str
    function: Any
    mode: Mode
    joined: bool = False


def launch_forward(options: Options, *ins: Any, sliced: bool = False) -> tuple[Any, ...]:
    out = jax.eval_shape(functools.partial(pointwise_reference, options.function), *ins)
    if out.size == 0:
        return (jnp.zeros(out.shape, out.dtype),)
    exact = out.dtype == jnp.float32

    def body(lanes: Lanes, *ins: jax.Array) -> tuple[jax.Array]:
        del lanes
        return (options.function.value(*ins, kernel_functions(exact)),)

    outs = [jax.ShapeDtypeStruct(out.shape, out.dtype)]
    columns = out.shape[-1] if options.joined else 0
    return launch(f"{options.name}_fwd", body, ins, outs, columns=columns, sliced=sliced)


def reference_forward(options: Options, *ins: Any) -> tuple[Any]:
    return (pointwise_reference(options.function, *ins),)


def launch_backward(options: Options, *ins_and_dout: Any, sliced: bool = False) -> tuple[Any, ...]:
    *ins, dout = ins_and_dout
    grads = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ins]
    if dout.size == 0:
        return tuple(jnp.zeros(g.shape, g.dtype) for g in grads)
    exact = dout.dtype == jnp.float32

    def body(lanes: Lanes, *ins_and_dout: jax.Array) -> tuple[jax.Array, ...]:
        del lanes
        return options.function.slopes(*ins_and_dout, kernel_functions(exact))

    columns = dout.shape[-1] if options.joined else 0
    return launch(f"{options.name}_bwd", body, ins_and_dout, grads, columns=columns, sliced=sliced)


def reference_backward(options: Options, *ins_and_dout: Any) -> tuple[Any, ...]:
    *ins, dout = ins_and_dout
    parts = _parts(options.function, ins)
    f32 = wide(*parts, dout)
    slopes = options.function.slopes(*(a.astype(f32) for a in (*parts, dout)), PLAIN)
    grads = tuple(d.astype(a.dtype) for d, a in zip(slopes, parts, strict=True))
    return (jnp.concatenate(grads, axis=-1),) if options.joined else grads


def pointwise_reference(function: Any, *ins: jax.Array) -> jax.Array:
    """`function` in plain JAX, computed in fp32 and rounded once."""
    parts = _parts(function, ins)
    f32 = wide(*parts)
    return function.value(*(a.astype(f32) for a in parts), PLAIN).astype(ins[0].dtype)


def _parts(function: Any, ins: Any) -> Any:
    """The arguments of `function`: gate and up, too, where one array holds both."""
    joined = isinstance(function, Unit) and len(ins) == 1
    return jnp.split(ins[0], 2, axis=-1) if joined else ins
