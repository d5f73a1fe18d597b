"""Arrays on a mesh: the axes over which they are split, and passes whose devices need each other.

What a pass carries along a sequence goes from one device's part to the next one's by JAX's
collectives, in the ``part`` of its :class:`SplitSequence`. The devices' order along `axes` is the
order of the parts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
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


def match_primals(grads: Sequence[Any], primals: Sequence[Any]) -> tuple[Any, ...]:
    """:func:`match_primal` of each gradient, in its primal's dtype; ``None`` for an absent one."""
    return tuple(
        None if grad is None else match_primal(grad, primal).astype(primal.dtype)
        for grad, primal in zip(grads, primals, strict=True)
    )


def gather(x: Any, axis: int, *, unless_parts_of: int = 1) -> Any:
    """Makes `axis` of `x` whole on an Explicit mesh, unless it is in parts that divide a number."""
    if unless_parts_of % parts_of(x, axis) == 0:
        return x
    sharding = jax.typeof(x).sharding
    spec = [*_padded(sharding.spec, x.ndim)]
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def parts_of(x: Any, axis: int) -> int:
    """Counts the parts into which an Explicit mesh splits `axis` of `x`."""
    sharding = jax.typeof(x).sharding
    entry = _padded(sharding.spec, x.ndim)[axis]
    return math.prod(sharding.mesh.shape[name] for name in _axis_names(entry) if name)


def match_sharding(x: Any, like: Any) -> Any:
    """Splits `x` over an Explicit mesh as `like` is, where a pass had to gather a factor."""
    sharding = _type_of(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def _type_of(x: Any) -> Any:
    return x.aval if isinstance(x, TypeOf) else jax.typeof(x)


def varying(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes over which any of `arrays`, or ``None``, varies."""
    types = (_type_of(a).manual_axis_type for a in arrays if a is not None)
    return frozenset[str]().union(*(of.varying for of in types))


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


# Passes whose devices need each other

type Arrays = tuple[Any, ...]
Axes = tuple[str, ...]
"""Names of mesh axes, the first of which changes slowest along the sequence."""

_UNROLLED = 16
"""Parts up to which a loop over all of them is unrolled: one small kernel on a GPU."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """A pass in two steps around the sum over devices.

    Attributes:
      finish: ``finish(options, *arrays, *sums)`` gives the pass's results from its arrays.
      kernel, reference: give what is summed, as many arrays as the pass and shaped like them; by
        default the pass's own.
      options: gives the options of `kernel` and `reference` from the pass's.
    """

    finish: Callable[..., Arrays]
    kernel: Callable[..., Arrays] | None = None
    reference: Callable[..., Arrays] | None = None
    options: Callable[[Any], Any] = lambda options: options


@dataclasses.dataclass(frozen=True, eq=False)
class SplitSequence:
    """Computation of a pass where a factor, along which it carries something, is split.

    Attributes:
      part: ``part(run, axes, options, *arrays)`` gives one device's results, `arrays` being its
        parts. ``run(options, *arrays)`` computes the pass on this device alone, and
        ``run(options, *arrays, of=other)`` another pass. A result that lacks the factor is the
        device's share of a sum over the devices.
      unfit: ``unfit(options, parts, *types)`` says why a sequence cannot be split into `parts`,
        with the types of the whole arrays; ``None`` where it can.
      factor: its name.
    """

    part: Callable[..., Arrays]
    unfit: Callable[..., str | None] = lambda *_: None
    factor: str = "l"


def is_first(axes: Axes) -> Any:
    """Whether this device has the first part."""
    return lax.axis_index(axes) == 0


def is_last(axes: Axes) -> Any:
    return lax.axis_index(axes) == lax.axis_size(axes) - 1


def only_if(condition: Any, value: Any) -> Any:
    """`value` or, for a sum over devices, zeros."""
    return None if value is None else jnp.where(condition, value, jnp.zeros((), value.dtype))


def on_all(axes: str | Axes | None, last: Any) -> Any:
    """Broadcasts the last part's value, for which other devices have zeros, to all devices.

    An axis of one device counts, too, where the type of `last` says that it varies over it.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    over = tuple(n for n in names if n in varying(last) or lax.axis_size(n) > 1)
    return lax.psum(last, over) if over and last is not None else last


def from_before(axes: Axes, value: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Hands each device's `value` to the device with the next part; the first one has zeros.

    In reverse it goes to the device with the previous part, and the last one has zeros.
    """
    if value.size == 0:
        return value
    count = lax.axis_size(axes)
    if len(axes) > 1:  # ppermute takes them in the mesh's order alone
        own = lax.axis_index(axes) + (1 if reverse else -1)
        value = lax.all_gather(value, axes)[own % count]
        return jnp.where((own < 0) | (own == count), jnp.zeros((), value.dtype), value)
    pairs = [(i, i + 1) for i in range(count - 1)]
    pairs = [(to, source) for source, to in pairs] if reverse else pairs
    return lax.ppermute(value, axes, pairs)


def carried(
    axes: Axes,
    after: Callable[[Any, Any], Any],
    carry: Any,
    first: jax.Array,
    *,
    reverse: bool = False,
) -> jax.Array:
    """The state before this device's part, from the state before the sequence.

    In reverse it is the state after the part, from the state after the sequence. One all-gather
    brings the carries of all parts.

    Args:
      axes: over which the sequence is split.
      after: ``after(carry, state)`` is the state on the other side of a part.
      carry: arrays of this device's part, of one dtype.
      first: the state before the sequence, the same on all devices.
      reverse: whether states go from the end to the start.
    """
    flat, unravel = ravel_pytree(carry)
    own, count = lax.axis_index(axes), lax.axis_size(axes)
    others = slice(1, None) if reverse else slice(count - 1)  # none follows the last part
    carries = jax.vmap(unravel)(lax.all_gather(flat, axes)[others])  # (parts - 1, ...)

    def step(state: Any, part: Any) -> tuple[Any, None]:
        number, carry = part
        is_before = number > own if reverse else number < own
        return jnp.where(is_before, after(carry, state), state).astype(state.dtype), None

    first = vary_over(first, varying(flat))
    numbers = jnp.arange(count)[others]
    unroll = max(1, count - 1) if count <= _UNROLLED else 1
    return lax.scan(step, first, (numbers, carries), reverse=reverse, unroll=unroll)[0]
