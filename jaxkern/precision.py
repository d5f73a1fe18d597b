"""Mixed precision: which dtype holds the parameters, the arithmetic and the results.

A `Policy` names three dtypes. Parameters stay in `params` (where the optimizer adds small updates
to them), are cast to `compute` where they are used, and results such as logits leave in `output`.
fp16 has 5 exponent bits, so gradients below 6e-8 vanish; a loss scale multiplies the loss by a
power of two before differentiation and divides the gradients by it after:

    loss      grads = jax.grad(lambda p: loss_scale.scale(loss(p)))(params)
    grads     grads = loss_scale.unscale(grads); finite = all_finite(grads)
    step      params, state = select_tree(finite, (new_params, new_state), (params, state))
    scale     loss_scale = loss_scale.adjust(finite)

`NoOpLossScale`, `StaticLossScale` and `DynamicLossScale` have the same three methods. Nothing here
waits for the device. `jaxkern.scale_gradients` does the second line in one pass, `jaxkern.apply`
the second and the third in the optimizer's.

References:
    Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from jaxkern.core.arguments import check_dtype, check_integer, check_number
from jaxkern.core.bound import standard_promotion, wide

_DTYPES = {name: name for name in ("float64", "float32", "bfloat16", "float16")}
_DTYPES |= {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FIELDS = ("params", "compute", "output")


def float_dtype(name: str, value: Any) -> np.dtype:
    """A floating dtype of 16 bits or more, or its name, as a dtype; errors call it `name`."""
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(
                f"{name}={value!r} is not a known floating dtype; use one of {', '.join(_DTYPES)}"
            )
        value = _DTYPES[value]
    try:
        dtype = check_dtype(name, value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not a dtype; use for example jnp.float32 or 'float32'"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{name}={dtype.name} must be a floating dtype of at least 16 bits; use for example "
            "jnp.float32"
        )
    return dtype


def _cast[Tree](tree: Tree, dtype: np.dtype) -> Tree:
    def cast(leaf):
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computation and output.

    Args:
        params: dtype in which parameters are stored and updated.
        compute: dtype to which parameters and inputs are cast where they are used.
        output: dtype of results (logits, losses).

    Raises:
        TypeError: if a field is not a dtype.
        ValueError: if a field is not a floating dtype.

    Example:
        >>> policy = Policy.parse("bf16")
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> policy.cast_to_compute({"w": jnp.ones(2), "n": 3})["w"].dtype
        dtype(bfloat16)
    """

    params: Any = "float32"
    compute: Any = "float32"
    output: Any = "float32"

    def __post_init__(self):
        for name in _FIELDS:
            object.__setattr__(self, name, float_dtype(f"Policy: {name}", getattr(self, name)))

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a policy from text.

        Args:
            text: "params=float32,compute=bfloat16,output=float32" (all three, in any order), or
                a shorthand: "fp32" (all float32), "bf16" or "fp16" (params and output float32,
                compute bfloat16 or float16).

        Returns:
            The policy; `Policy.parse(str(policy)) == policy`.

        Raises:
            TypeError: if `text` is not a string.
            ValueError: if a field is unknown, missing or given twice, or names no floating dtype.

        Example:
            >>> Policy.parse("fp16").compute
            dtype('float16')
        """
        if not isinstance(text, str):
            raise TypeError(f"Policy.parse: text must be a string, got {type(text).__name__}")
        form = '"params=float32,compute=bfloat16,output=float32", "fp32", "bf16" or "fp16"'
        text = text.strip()
        if text in ("fp32", "bf16", "fp16"):
            return cls(compute=text)
        fields: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in _FIELDS:
                raise ValueError(f"Policy.parse: cannot read {part!r} in {text!r}; write {form}")
            if name in fields:
                raise ValueError(f"Policy.parse: {name} is given twice in {text!r}; write it once")
            fields[name] = value
        missing = [name for name in _FIELDS if name not in fields]
        if missing:
            raise ValueError(
                f"Policy.parse: {', '.join(missing)} missing in {text!r}; write {form}"
            )
        return cls(**fields)

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name).name}" for name in _FIELDS)

    def cast_to_params[Tree](self, tree: Tree) -> Tree:
        """Cast the floating leaves of `tree` to `params`; other leaves are kept."""
        return _cast(tree, self.params)

    def cast_to_compute[Tree](self, tree: Tree) -> Tree:
        """Cast the floating leaves of `tree` to `compute`; other leaves are kept."""
        return _cast(tree, self.compute)

    def cast_to_output[Tree](self, tree: Tree) -> Tree:
        """Cast the floating leaves of `tree` to `output`; other leaves are kept."""
        return _cast(tree, self.output)

    def wrap(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Have `f` take its arguments and parameters in `compute` and return in `output`.

        The parameters stay as they are where `f` keeps them: the copy in `compute` lives for one
        call, and gradients flow through the cast back to `params`.

        Args:
            f: a function, such as the `apply` of a Flax linen module, whose floating arguments are
                cast; a Flax nnx module, whose `nnx.Param` are cast too, while its other variables
                (statistics, random counts) keep their dtype and their updates; or a module that is
                a pytree, as Equinox's are, whose floating leaves are cast too.

        Returns:
            A function of the same arguments.

        Raises:
            TypeError: if `f` cannot be called.

        Example:
            >>> dot = Policy.parse("bf16").wrap(lambda params, x: x @ params["w"])
            >>> dot({"w": jnp.ones((2, 3))}, jnp.ones(2)).dtype
            dtype('float32')
        """
        if not callable(f):
            raise TypeError(
                f"Policy.wrap: f must be a function or a module that can be called, got "
                f"{type(f).__name__}; of a linen module pass module.apply"
            )
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(f, nnx.Module):
            call = functools.partial(self._call_nnx, nnx, f)
        elif jax.tree.leaves(f) != [f]:
            call = lambda *args, **kwargs: self.cast_to_compute(f)(*args, **kwargs)
        else:
            call = f

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.cast_to_compute((args, kwargs))
            return self.cast_to_output(call(*args, **kwargs))

        return functools.wraps(f)(wrapped) if hasattr(f, "__name__") else wrapped

    def _call_nnx(self, nnx: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        copy = nnx.merge(graphdef, self.cast_to_compute(params), rest)
        out = copy(*args, **kwargs)
        nnx.update(module, nnx.state(copy, nnx.Not(nnx.Param)))
        return out


def all_finite(tree: Any) -> jax.Array:
    """Check on the device whether every floating leaf is free of NaN and infinity.

    Args:
        tree: any pytree of arrays.

    Returns:
        A boolean scalar; true for a tree with no floating leaf.

    Example:
        >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
        False
    """
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            finite &= jnp.isfinite(leaf).all()
    return finite


def select_tree[Tree](take_first: jax.Array, first: Tree, second: Tree) -> Tree:
    """Choose one of two trees of arrays on the device.

    Args:
        take_first: a boolean scalar.
        first: the result where `take_first` is true.
        second: the result elsewhere, of the structure, shapes and dtypes of `first`.

    Returns:
        One of the two, leaf by leaf.

    Raises:
        ValueError: if the trees differ in structure.

    Example:
        >>> select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"]
        Array([0., 0.], dtype=float32)
    """
    return jax.tree.map(lambda a, b: jnp.where(take_first, a, b), first, second)


def _pytree[Scale](cls: type[Scale]) -> type[Scale]:
    """Registers a loss scale: fields are leaves, but for static ones.

    JAX makes trees of shardings, shapes and the like of it, which the checks of `cls` are not for.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    static = [f.name for f in fields if f.metadata.get("static")]
    names = [f.name for f in fields if f.name not in static]

    def flatten(scale: Scale) -> tuple[Any, Any]:
        leaves = [(GetAttrKey(name), getattr(scale, name)) for name in names]
        return leaves, tuple(getattr(scale, name) for name in static)

    def unflatten(constants: Any, leaves: Any) -> Scale:
        scale = object.__new__(cls)
        for name, value in zip((*names, *static), (*leaves, *constants), strict=True):
            object.__setattr__(scale, name, value)
        return scale

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def _check_scale(name: str, value: Any) -> float:
    """Returns `value` if it and its inverse are normal numbers of float32."""
    return check_number(name, value, above=0, minimum=2.0**-126, maximum=2.0**126)


def _is_array(value: Any) -> bool:
    """Says whether `value` is an array, perhaps traced, or the type of one: no number to check."""
    return hasattr(value, "dtype") and not isinstance(value, np.generic)


class _LossScale:
    """The methods of a loss scale, which multiplies and divides by its `loss_scale`."""

    loss_scale: Any

    def scale[Tree](self, tree: Tree) -> Tree:
        """Multiply the floating leaves (the loss) by the scale, each in its own dtype."""
        return _multiply(tree, self.loss_scale)

    def unscale[Tree](self, tree: Tree) -> Tree:
        """Divide the floating leaves (the gradients) by the scale, each in its own dtype."""
        return _multiply(tree, 1 / self.loss_scale)

    def adjust(self, finite: jax.Array) -> Self:
        """Return the scale for the next step, given whether this step's gradients were finite."""
        del finite
        return self


@_pytree
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_LossScale):
    """A loss scale of 1 that computes nothing, for bf16 and fp32.

    Example:
        >>> float(NoOpLossScale().scale(jnp.float32(2)))
        2.0
    """

    @property
    def loss_scale(self) -> jax.Array:
        """() float32, 1."""
        return jnp.float32(1)

    def scale[Tree](self, tree: Tree) -> Tree:
        """Return `tree`."""
        return tree

    def unscale[Tree](self, tree: Tree) -> Tree:
        """Return `tree`."""
        return tree


@_pytree
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_LossScale):
    """A loss scale that stays what it is.

    Args:
        loss_scale: () float32, or a positive Python number.

    Raises:
        TypeError: if it is neither an array nor a number.
        ValueError: if a number, or its inverse, is not positive and finite in float32.

    Example:
        >>> float(StaticLossScale(1024.0).scale(jnp.float32(2)))
        2048.0
    """

    loss_scale: Any

    def __post_init__(self):
        if not _is_array(self.loss_scale):
            scale = _check_scale("loss_scale", self.loss_scale)
            object.__setattr__(self, "loss_scale", jnp.float32(scale))


@_pytree
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_LossScale):
    """A loss scale that halves on overflow and doubles after a quiet period.

    `loss_scale` s and `counter` c follow, for each step's `finite`:

        finite and c + 1 < period:   s' = s                              c' = c + 1
        finite and c + 1 = period:   s' = min(s · factor, max_scale)     c' = 0
        not finite:                  s' = max(s / factor, min_scale)     c' = 0

    It is a pytree: the two numbers are leaves and pass through jit, scan, shard_map and
    checkpoints, the rule's constants are static and stay with them. With powers of two, scaling and
    unscaling are exact.

    Args:
        loss_scale: () float32, the current scale, or a Python number.
        counter: () int32, finite steps since the scale last changed, or a Python number.
        period: finite steps after which the scale grows.
        factor: by how much the scale grows and shrinks.
        min_scale: lower bound of the scale.
        max_scale: upper bound of the scale.

    Raises:
        TypeError: if a value is no number, or `period` or `counter` no whole one.
        ValueError: if a number is out of range.

    Example:
        >>> scale = DynamicLossScale(1024.0, period=100)
        >>> float(scale.adjust(jnp.array(False)).loss_scale)
        512.0
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})
    min_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    max_scale: float = dataclasses.field(default=2.0**24, metadata={"static": True})

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        put("period", check_integer("period", self.period, minimum=1))
        put("factor", check_number("factor", self.factor, above=1))
        put("min_scale", _check_scale("min_scale", self.min_scale))
        put("max_scale", _check_scale("max_scale", self.max_scale))
        between = f"min_scale={self.min_scale} and max_scale={self.max_scale}"
        if self.min_scale > self.max_scale:
            raise ValueError(f"min_scale must be at most max_scale, got {between}")
        if not _is_array(self.loss_scale):
            scale = check_number("loss_scale", self.loss_scale)
            if not self.min_scale <= scale <= self.max_scale:
                raise ValueError(f"loss_scale must be between {between}, got {scale}")
            put("loss_scale", jnp.float32(scale))
        if not _is_array(self.counter):
            put("counter", jnp.int32(check_integer("counter", self.counter, minimum=0)))

    @standard_promotion()
    def adjust(self, finite: jax.Array) -> Self:
        grow = self.counter + 1 >= self.period
        grown = jnp.minimum(self.loss_scale * self.factor, self.max_scale)
        shrunk = jnp.maximum(self.loss_scale / self.factor, self.min_scale)
        kept = jnp.where(grow, grown, self.loss_scale)
        counter = jnp.where(finite & ~grow, self.counter + 1, 0)
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(finite, kept, shrunk).astype(jnp.float32),
            counter=counter.astype(jnp.int32),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def check_loss_scale(value: Any) -> None:
    """Raises a TypeError unless `value` is a loss scale or ``None``."""
    if not (value is None or (hasattr(value, "loss_scale") and hasattr(value, "unscale"))):
        raise TypeError(
            f"loss_scale must be one of jaxkern.precision, got {value!r:.60}; pass for example "
            "jaxkern.precision.StaticLossScale(1024.0)"
        )


@standard_promotion()
def _multiply[Tree](tree: Tree, by: jax.Array) -> Tree:
    def multiply(leaf):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        leaf = jnp.asarray(leaf)
        # In fp32 at least: a scale of 2^16 or more is not finite as fp16.
        of_product = wide(leaf.dtype)
        return (leaf.astype(of_product) * by.astype(of_product)).astype(leaf.dtype)

    return jax.tree.map(multiply, tree)
