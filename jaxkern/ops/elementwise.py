"""The kernel behind every op that works element by element: registers between loads and stores.

A block is one warpgroup. Each lane loads, from every input, a few *units* of neighbouring elements
in accesses of up to 16 bytes, computes in fp32, and stores; nothing passes between lanes. Units
past the end repeat the last one, so every size runs without a tail.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.core.mosaic import LANES, grid_axes, load_shared, load_units, store_units

_BLOCK = grid_axes("block")[0]
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)

UNITS = 2
"""Units of each input on their way to a lane at a time."""

MAX_UNITS = 2**32 - 2**16
"""Most units of an array: a lane counts them in 32 bits."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What a kernel's body knows of the elements it is given.

    Attributes:
      units: (LANES,), uint32, which unit of the arrays each lane has.
      vec: elements of a unit.
      seeds: the 4 words of each of the launch's seeds, each word (LANES,).
      interpret: whether this runs in Pallas's interpreter.
    """

    units: jax.Array
    vec: int
    seeds: Sequence[Sequence[jax.Array]]
    interpret: bool


def launch(
    name: str,
    body: Callable[..., tuple[Any, ...]],
    ins: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    columns: int = 0,
    seeds: Sequence[jax.Array] = (),
    vec: int | None = None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Runs `body` over arrays of equally many elements, not 0.

    Args:
      name: of the kernel.
      body: ``body(lanes, *ins) -> outs`` on fp32 arrays (LANES · vec,).
      ins: arrays. One of twice the elements is two inputs whose rows, of `columns` elements, lie
        side by side: (..., 2 · columns).
      outs: shapes and dtypes of the results, of which some may be two in the same way.
      columns: elements of a row, where an array is two.
      seeds: arrays (k,), uint32, of up to 4 words that every lane reads; zeros make up the rest.
      vec: elements of a unit; by default as many as make 16 bytes of the widest dtype.
      interpret: whether to run in Pallas's interpreter.

    Raises:
      NotImplementedError: an array has more than `MAX_UNITS` units.
    """
    arrays = [*ins, *outs]
    size = min(a.size for a in arrays)
    if vec is None:
        vec = unit(*arrays, columns=columns)
    if reason := too_large(vec, *arrays):
        raise NotImplementedError(f'{name}: {reason}. Use implementation="xla".')
    parts = tuple(a.size // size for a in arrays)
    plan = _Plan(
        count=size // vec,
        vec=vec,
        row=columns // vec,
        parts=parts,
        inputs=sum(parts[: len(ins)]),
        seeds=len(seeds),
        interpret=interpret,
    )
    results = plgpu.kernel(
        functools.partial(_kernel, plan, body),
        out_type=tuple(jax.ShapeDtypeStruct((o.size,), o.dtype) for o in outs),
        grid=(-(-plan.count // (LANES * UNITS)),),
        grid_names=(_BLOCK,),
        kernel_name=name,
        compiler_params=_COMPILER_PARAMS,
    )(*seeds, *(a.reshape(-1) for a in ins))
    return tuple(r.reshape(o.shape) for r, o in zip(results, outs, strict=True))


def unit(*arrays: Any, columns: int = 0) -> int:
    """Elements of a unit of `arrays` and `columns`: as many as make 16 bytes, if they divide both.

    Args and meaning are those of :func:`launch`.
    """
    size = min(a.size for a in arrays)
    return math.gcd(16 // max(a.dtype.itemsize for a in arrays), size, columns)


def too_large(vec: int, *arrays: Any) -> str | None:
    """Why a kernel cannot count the units, of `vec` elements, of `arrays`."""
    size = max(a.size for a in arrays)
    if size <= vec * MAX_UNITS:
        return None
    return f"its {size} elements can be accessed {vec} at a time, and the kernels count to 2^32"


@dataclasses.dataclass(frozen=True)
class _Plan:
    count: int  # units of an input
    vec: int  # elements of a unit
    row: int  # units of a row, where an array is two inputs
    parts: tuple[int, ...]  # inputs or outputs in each array
    inputs: int
    seeds: int
    interpret: bool


def _kernel(plan: _Plan, body: Callable[..., tuple[Any, ...]], *refs: Any) -> None:
    seeds = [load_shared(ref, 4, interpret=plan.interpret) for ref in refs[: plan.seeds]]
    refs = refs[plan.seeds :]
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    lane = plgpu.broadcasted_iota(jnp.uint32, (LANES,), 0, layout=layout)
    first = lax.axis_index(_BLOCK).astype(jnp.uint32) * jnp.uint32(LANES * UNITS)

    def places(units: jax.Array) -> list[tuple[Any, jax.Array]]:
        """Where `units` of every input and output are."""
        found = []
        for ref, parts in zip(refs, plan.parts, strict=True):
            if parts == 1:
                found.append((ref, units))
                continue
            row_start = lax.div(units, jnp.uint32(plan.row)) * jnp.uint32(plan.row)
            found += [(ref, units + row_start + jnp.uint32(i * plan.row)) for i in range(parts)]
        return found

    work = []
    for k in range(UNITS):
        units = lane + (first + jnp.uint32(k * LANES))
        if plan.count % (LANES * UNITS):
            units = jnp.minimum(units, jnp.uint32(plan.count - 1))
        where = places(units)
        load = functools.partial(load_units, vec=plan.vec, interpret=plan.interpret)
        values = [load(ref, at) for ref, at in where[: plan.inputs]]
        work.append((Lanes(units, plan.vec, seeds, plan.interpret), values, where[plan.inputs :]))
    for lanes, values, where in work:
        for (ref, at), value in zip(where, body(lanes, *values), strict=True):
            store_units(ref, at, value, plan.vec, interpret=plan.interpret)
