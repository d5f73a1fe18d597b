"""An optimizer's arguments, checked where its user constructs it, and the checks of its trees."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxkern.core.arguments import check_dtype
from jaxkern.core.dispatch import Implementation
from jaxkern.optim.arithmetic import Rule

Tree = Any
Number = Any
"""A Python number, a scalar array, or for a schedule a function of the count."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of a transformation; what only Adam has comes last, with defaults."""

    name: str
    rule: Rule
    learning_rate: Number
    b1: Number
    mu_dtype: Any
    master: bool
    seed: Any
    clip_norm: Number | None
    skip_nonfinite: bool
    implementation: Implementation | None
    b2: Number = 0.0
    nu_dtype: Any = None
    eps: Number = 0.0
    eps_root: Number | None = None
    weight_decay: Number | None = None
    mask: Any = None
    rate_factor: Number | None = None  # of the learning rate, by what stands behind in a chain

    @property
    def has_mu(self) -> bool:
        return self.b1 is not None


def check_number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    schedule: bool = False,
    finite: bool = True,
) -> Any:
    """Returns `value` if it is a number that an optimizer can take.

    Args:
      name: of the argument.
      value: what was given. Of arrays of JAX only shape and dtype are looked at: they may be
        traced, and are not waited for.
      low: the least number allowed.
      high: the least number above `low` that is not; NaN never is.
      schedule: whether it may be a function of the count.
      finite: whether it may not be infinite.

    Raises:
      TypeError: it is no number, or of a dtype that is not real.
      ValueError: it is out of range, or has axes.
    """
    if callable(value):
        if schedule:
            return value
        raise TypeError(
            f"{name} must be a number, got {_told(value)}; functions of the count are for "
            "learning_rate and weight_decay, and optax.inject_hyperparams makes them of others"
        )
    check_scalar(name, value, ", or a schedule (a function)" if schedule else "")
    if not isinstance(value, jax.Array):
        below = f" and below {high}" if high < math.inf else ""
        if not (low <= value < high or value == high == math.inf):
            rule = f"at least {low}{below}" if low > -math.inf else "a number"
            raise ValueError(f"{name} must be {rule}, got {value}")
        if finite and math.isinf(value):
            raise ValueError(f"{name} must be finite, got {value}")
    return value


def check_scalar(name: str, value: Any, other: str = "") -> None:
    """Raises a TypeError or a ValueError unless `value` is one real number, or an array of one.

    `other` says what else the argument may be.
    """
    kinds = f"a number or a scalar array{other}"
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real:
        remedy = f"float({value!r})" if isinstance(value, str) else "a float"
        raise TypeError(f"{name} must be {kinds}, got {_told(value)}; pass {remedy}")
    if np.shape(value) != ():
        raise ValueError(
            f"{name} must be {kinds}, got shape {np.shape(value)}; it is one for all parameters, "
            "and optax.multi_transform has several"
        )


def check_seed(value: Any) -> Any:
    """Returns `value` if it is an integer."""
    dtype = getattr(value, "dtype", None)
    whole = (
        isinstance(value, int) and not isinstance(value, bool)
        if dtype is None
        else jnp.issubdtype(dtype, jnp.integer) and np.shape(value) == ()
    )
    if not whole:
        raise TypeError(
            f"seed must be an integer, got {_told(value)}; of a key of JAX's take "
            "jax.random.bits(key)"
        )
    return value


def check_mask(mask: Any) -> Any:
    """Returns `mask` if it is a function or a tree of booleans."""
    if not is_function(mask):
        check_mask_tree(mask)
    return mask


def is_function(mask: Any) -> bool:
    """Says whether a mask is a function, and no tree that can be called, as a module is."""
    return callable(mask) and all(map(callable, jax.tree.leaves(mask)))


def check_mask_tree(mask: Any) -> None:
    """Raises a TypeError unless the leaves of a mask are booleans."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        boolean = isinstance(leaf, (bool, np.bool_)) or (
            getattr(leaf, "dtype", None) == jnp.bool_
            and np.shape(leaf) == ()
            and not isinstance(leaf, Tracer)
        )
        if not boolean:
            raise TypeError(
                f"mask{jax.tree_util.keystr(path)} must be True or False, got {_told(leaf)}; a "
                "step is compiled for what decays"
            )


def check_state_dtype(name: str, dtype: Any, stochastic: bool, code: str) -> Any:
    """Returns the dtype of an average, or ``None``.

    Args:
      name: of the argument.
      dtype: what was given.
      stochastic: whether what is stored in bfloat16 is rounded stochastically.
      code: the dtype of the average's codes of 8 bits.
    """
    if dtype is None:
        return None
    found = check_dtype(name, dtype)
    if found.name not in ("float32", "bfloat16", "float16", "float64", code):
        raise ValueError(f"{name} must be float32, bfloat16, float16 or {code}, got {found.name}")
    if stochastic and found == jnp.float16:
        raise ValueError(
            f"{name}=float16 cannot be rounded stochastically; use bfloat16, or leave "
            "stochastic_rounding out"
        )
    return found


def check_master_dtype(dtype: Any) -> bool:
    """Returns whether there are master copies."""
    if dtype is None:
        return False
    try:
        found = check_dtype("master_dtype", dtype)
    except TypeError:
        raise TypeError(
            f"master_dtype must be float32 or None, got {dtype!r}; use jnp.float32"
        ) from None
    if found != jnp.float32:
        raise ValueError(f"master_dtype must be float32 or None, got {found.name}")
    return True


def check_loss_scale(value: Any) -> Any:
    """Returns `value` if it is a loss scale or ``None``."""
    if not (value is None or (hasattr(value, "loss_scale") and hasattr(value, "unscale"))):
        raise TypeError(
            f"loss_scale must be one of jaxkern.precision, got {_told(value)}; pass for example "
            "jaxkern.precision.StaticLossScale(1024.0)"
        )
    return value


def none_if_zero(value: Any) -> Any:
    """Returns ``None`` for a Python number that is 0: the step is then compiled without it."""
    return None if isinstance(value, (int, float)) and value == 0 else value


def _told(value: Any) -> str:
    if getattr(value, "dtype", None) is not None:
        return f"an array of dtype {value.dtype} and shape {np.shape(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


# Trees


def floating_leaves(
    name: str, tree: Any, *, values: bool = True, kind: Any = jnp.floating
) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree, all floating arrays, and its structure.

    Args:
      name: of the tree, for messages.
      tree: arrays and Python floats.
      values: whether a ``jax.ShapeDtypeStruct`` will not do.
      kind: of their dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, float) and not isinstance(leaf, np.floating):
            leaves[i] = jnp.asarray(leaf, float)
            continue
        struct = isinstance(leaf, jax.ShapeDtypeStruct)
        if not is_floating(leaf, kind) or (struct and values):
            dtype = getattr(leaf, "dtype", None)
            what = type(leaf).__name__ if dtype is None or struct else dtype
            raise TypeError(
                f"{name}{leaf_paths(tree)[i]} must be a floating array, got {what}; "
                f"{_instead(dtype, struct)}"
            )
        leaves[i] = leaf if struct else jnp.asarray(leaf)
    return leaves, treedef


def _instead(dtype: Any, struct: bool) -> str:
    if struct:
        return "this needs values, and jax.eval_shape gives shapes alone"
    if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
        return "keep real and imaginary parts apart, as optax.contrib.split_real_and_imaginary does"
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return "16 bits are the fewest: keep it in bfloat16, and cast it where it is used"
    return "keep what is not trained out of the tree, or wrap the transformation in optax.masked"


def is_floating(leaf: Any, kind: Any = jnp.floating) -> bool:
    """Says whether a leaf is an array of real numbers of 16 bits or more, or of another `kind`."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind) and leaf.dtype.itemsize > 1


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf, as Python would write it."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
