"""The types of arrays on a mesh: over which axes they are split, and between which they vary."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MeshAxes = dict[str, tuple[str, ...]]
"""The axes of a mesh over which each factor of a pass is split."""


def vary_over(x: Any, axes: frozenset[str]) -> Any:
    """Types `x` as varying over the manual mesh axes `axes`, too."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TypeOf:
    """The type of an array, saved for :func:`match_primal` where the array itself is not needed."""

    aval: Any


def match_primal(grad: Any, primal: Any) -> Any:
    """Gives `grad` the type that `primal`, an array or its :class:`TypeOf`, has on a mesh.

    Inside ``shard_map(check_vma=True)`` it is summed over the axes on which `primal` is one for all
    devices. With ``check_vma=False`` JAX knows of no such axes, and a gradient stays each device's.
    """
    if grad is None:
        return None
    extra = tuple(sorted(varying(grad) - varying(primal)))
    grad = lax.psum(grad, extra) if extra else grad
    return match_sharding(vary_over(grad, varying(primal)), primal)


def gather(x: Any, axis: int, *, unless_parts_of: int = 1) -> Any:
    """Makes `axis` of `x` whole on an Explicit mesh, unless it is in parts that divide a number."""
    sharding = jax.typeof(x).sharding
    spec = [*_padded(sharding.spec, x.ndim)]
    if spec[axis] is None:
        return x
    if unless_parts_of % math.prod(sharding.mesh.shape[n] for n in _axis_names(spec[axis])) == 0:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def match_sharding(x: Any, like: Any) -> Any:
    """Splits `x` over an Explicit mesh as `like` is, where a pass had to gather a factor."""
    sharding = _type_of(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def _type_of(x: Any) -> Any:
    return x.aval if isinstance(x, TypeOf) else jax.typeof(x)


def varying(x: Any) -> frozenset[str]:
    return frozenset(_type_of(x).manual_axis_type.varying)


def _axis_names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _padded(spec: Any, ndim: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (ndim - len(spec)))


def spec_of(sharding: Any) -> Any:
    return sharding.spec if isinstance(sharding, NamedSharding) else ()


def partition_spec(factors: Sequence[str], axes: MeshAxes) -> PartitionSpec:
    """Says how an array with these factors is split."""
    return PartitionSpec(*(axes.get(f) for f in factors))


def split_factors(
    mesh_shape: dict[str, int],
    ins: Sequence[Sequence[str]],
    whole: frozenset[str],
    specs: Sequence[Any],
    shapes: Sequence[Any],
) -> MeshAxes:
    """Finds the mesh axes over which factors are split; where arrays differ, the first one counts.

    Args:
      mesh_shape: sizes of the axes.
      ins: the factors of each array.
      whole: factors that stay whole.
      specs, shapes: of the arrays.
    """
    axes: MeshAxes = {}
    used: set[str] = set()
    for factors, spec, shape in zip(ins, specs, shapes, strict=True):
        for factor, entry, size in zip(factors, _padded(spec, len(factors)), shape, strict=True):
            if factor in axes or factor in whole or not entry:
                continue
            names = tuple(n for n in _axis_names(entry) if n not in used)
            if names and size % math.prod(mesh_shape[n] for n in names) == 0:
                axes[factor] = names
                used.update(names)
    return axes
