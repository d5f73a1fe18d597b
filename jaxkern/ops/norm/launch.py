"""How both passes are launched: rows by groups, a grid of clusters, arrays by name."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.mosaic.launch import LANES, grid_axes, launch_kernel
from jaxkern.ops.curves import WITHOUT_EXPONENTIALS
from jaxkern.ops.norm.long_row import LongRow
from jaxkern.ops.norm.pointwise import Options
from jaxkern.ops.norm.stream import Block, param_scratch, ring_scratch
from jaxkern.ops.norm.tiles import Backward, Forward

(_CLUSTER,) = grid_axes("cluster")


def launch(
    kernel: Callable[[Block], None],
    name: str,
    options: Options,
    tile: Forward | Backward,
    inputs: dict[str, Any],
    outs: dict[str, Any],
    *,
    streams: list[str],
    params: list[str],
    row_sums: int,
) -> dict[str, Any]:
    """Runs `kernel` in every block; its outputs by name, shaped as `outs`.

    Args:
      kernel: gets the :class:`Block`.
      name: the kernel's.
      options, tile: of the pass.
      inputs: the pass's arrays by name, None where absent.
      outs: shape and dtype of each output, None where absent; rows are (m, groups, width) of
        :func:`by_groups`.
      streams: the inputs that may go through the ring.
      params: the inputs that may be kept in shared memory.
      row_sums: the most sums over a row that are exchanged at a time.
    """
    rows, width = tile.rows, inputs[streams[0]].shape[-1]
    groups = width // options.group_size
    m = inputs[streams[0]].size // width
    arrays = {k: by_groups(options, tile, k, v) for k, v in inputs.items() if v is not None}
    made = {k: v for k, v in outs.items() if v is not None}
    scratch = rows.scratch(row_sums, param_sums=isinstance(tile, Backward))
    scratch |= param_scratch(tile, arrays, params)
    scratch |= ring_scratch(tile, arrays, streams)
    absent = dict.fromkeys([*inputs, *outs])

    def body(*refs: Any, **smem: Any) -> None:
        space = types.SimpleNamespace(**smem)
        regs, index = rows.registers(space), lax.axis_index(_CLUSTER)
        named = dict(zip([*arrays, *made], refs, strict=True))
        kernel(
            Block(
                options=options,
                tile=tile,
                regs=regs,
                m=m,
                cluster=lax.div(index, groups),
                group=lax.rem(index, groups),
                ref=types.SimpleNamespace(**absent | named),
                smem=space,
            )
        )

    used = [options.activation, options.gate_activation if "gate" in arrays else None]
    results = launch_kernel(
        body,
        out_type=tuple(made.values()),
        scratch_types=scratch,
        grid=(tile.num_clusters(m) * groups,),
        grid_names=(_CLUSTER,),
        kernel_name=name,
        # Exponentials, where there are, are those of the fast units.
        approx_math=any(curve not in (None, *WITHOUT_EXPONENTIALS) for curve in used),
        **rows.launch,
    )(*arrays.values())
    return dict.fromkeys(outs) | dict(zip(made, results, strict=True))


def by_groups(options: Options, tile: Forward | Backward, name: str, a: Any) -> Any:
    """An input's rows as (M, G, N / G), a parameter as (G, N / G), a statistic as (M, G).

    Where a window of a long row is longer than a group, the group is padded.
    """
    if name in ("mean", "rstd"):
        return a.reshape(-1, a.shape[-1])
    groups = a.shape[-1] // options.group_size
    is_param = name in ("weight", "bias")
    a = a.reshape((groups, options.group_size) if is_param else (-1, groups, options.group_size))
    missing = LANES - options.group_size
    if isinstance(tile.rows, LongRow) and missing > 0:
        a = jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, missing),))
    return a


def without_groups(options: Options, a: Any, shape: tuple[int, ...]) -> Any:
    """The inverse, None for None: `shape` of (M, G, N / G) or (G, N / G)."""
    return None if a is None else a[..., : options.group_size].reshape(shape)


def grouped_type(options: Options, tile: Forward | Backward, x: Any) -> jax.ShapeDtypeStruct:
    """(M, G, N / G), the type of `x` as the kernel has it."""
    return jax.eval_shape(lambda x: by_groups(options, tile, "x", x), x)
