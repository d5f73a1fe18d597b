"""Choice of an op's implementation, and the messages where one cannot run."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Literal, Protocol, cast, get_args, overload

import jax
import numpy as np

from jaxkern.core.arguments import check_flag
from jaxkern.core.bound import standard_promotion

Implementation = Literal["mosaic", "xla"]
Mode = Literal["auto", "mosaic", "interpret", "xla"]

_interpreting = False


def public_op[F: Callable[..., Any]](f: F) -> F:
    """Makes `f` what users call: compiled, in standard promotion.

    Outside of ``jax.jit`` a call is a program that is compiled once for its options and the types
    of its arrays; inside, `f` is traced once for these. Options whose default is a bool are checked
    to be one, which `f` is given.
    """
    parameters = inspect.signature(f).parameters
    flags = [name for name, parameter in parameters.items() if isinstance(parameter.default, bool)]
    names = tuple(parameters)
    kinds = {name: {p.annotation, *get_args(p.annotation)} for name, p in parameters.items()}
    takes_arrays = {name for name, of in kinds.items() if jax.Array in of and int not in of}

    def checked(**given: Any) -> Any:
        given |= {name: check_flag(name, given[name]) for name in flags if name in given}
        with standard_promotion():
            return f(**given)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def compiled(options: tuple[tuple[str, type, Any], ...], arrays: dict[str, Any]) -> Any:
        return checked(**{name: value for name, _, value in options}, **arrays)

    @functools.wraps(f)
    def call(*args: Any, **keywords: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | keywords
        if len(given) != len(args) + len(keywords) or not parameters.keys() >= keywords.keys():
            return f(*args, **keywords)  # Python's own error
        is_array = {n: n in takes_arrays and isinstance(v, _ARRAYS) for n, v in given.items()}
        arrays = {name: value for name, value in given.items() if is_array[name]}
        options = tuple((n, type(v), v) for n, v in given.items() if not is_array[n])
        # An nnx.Param may change, and the value of a number is checked, of an array too.
        constant = all(_is_constant(value) for _, _, value in options)
        if _interpreting or not constant:
            return checked(**given)
        return compiled(options, arrays)

    return cast(F, call)


type _Pair = tuple[jax.Array, jax.Array]


class _FinalStateOp[**P](Protocol):
    @overload
    def __call__(self, *args: Any, return_final_state: Literal[True], **options: Any) -> _Pair: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> jax.Array: ...


class _LseOp[**P](Protocol):
    @overload
    def __call__(self, *args: Any, return_lse: Literal[True], **options: Any) -> _Pair: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> jax.Array: ...


class _ResidualOp[**P](Protocol):
    @overload
    def __call__(self, *args: Any, residual: jax.Array, **options: Any) -> _Pair: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> jax.Array: ...


def final_state_op[**P](f: Callable[P, Any]) -> _FinalStateOp[P]:
    """A `public_op` that returns a pair with ``return_final_state=True``, else one array."""
    return cast(Any, public_op(f))


def lse_op[**P](f: Callable[P, Any]) -> _LseOp[P]:
    """A `public_op` that returns a pair with ``return_lse=True``, else one array."""
    return cast(Any, public_op(f))


def residual_op[**P](f: Callable[P, Any]) -> _ResidualOp[P]:
    """A `public_op` that returns a pair with `residual`, else one array."""
    return cast(Any, public_op(f))


_ARRAYS = jax.Array | np.ndarray
_CONSTANTS = bool | int | float | complex | str | bytes | None | type | np.generic | np.dtype | Enum


def _is_constant(value: Any) -> bool:
    """Whether `value` never changes, so that a program may hold it."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def resolve(
    implementation: str | None,
    unsupported: str | None,
    *,
    op: str,
    slower: str | None = None,
) -> Mode:
    """Chooses what an op runs for the `implementation` its user asked for.

    Args:
      implementation: the user's word; ``None`` means the fastest.
      unsupported: why the kernels cannot take this call, or ``None`` if they can.
      op: the op's name, for the message.
      slower: why the kernels, able to, are not the fastest here, or ``None``.

    Returns:
      ``"xla"`` for the reference; ``"mosaic"`` for kernels or an error at lowering; ``"auto"`` for
      kernels where the program is lowered for CUDA and the reference elsewhere; ``"interpret"``
      for kernels in Pallas's interpreter, under :func:`interpret_kernels`.

    Raises:
      ValueError: `implementation` is no implementation.
      NotImplementedError: the kernels were asked for and cannot take this call.
    """
    match check_implementation(_default.value if implementation is None else implementation):
        case "xla":
            return "xla"
        case "mosaic":
            if unsupported:
                raise NotImplementedError(
                    f'{op}(implementation="mosaic") cannot take this call: {unsupported}. '
                    'Use implementation="xla", or None to have it chosen.'
                )
            return "interpret" if _interpreting else "mosaic"
    return "xla" if unsupported or slower else "auto"


def check_implementation(implementation: str | None) -> str | None:
    """Returns `implementation` if there is such a one."""
    if implementation not in ("mosaic", "xla", None):
        raise ValueError(f'implementation must be "mosaic", "xla" or None, got {implementation!r}')
    return implementation


_default = jax.make_user_context(os.environ.get("JAXKERN_IMPLEMENTATION"))


@contextlib.contextmanager
def default_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Sets what ``implementation=None`` means in the calls inside, of layers and optimizers too.

    Functions that ``jax.jit`` has compiled before are compiled again where it differs. For a whole
    process the environment says it: ``JAXKERN_IMPLEMENTATION=xla``.

    Args:
      implementation: ``"xla"`` for plain JAX, which runs anywhere; ``"mosaic"`` for the kernels, or
        an error from a call that they cannot take; ``None`` for the fastest.

    Raises:
      ValueError: `implementation` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxkern
      >>> with jaxkern.default_implementation("xla"):
      ...     out = jaxkern.swiglu(jnp.ones(3), jnp.ones(3))
      >>> print(out.round(3))
      [0.731 0.731 0.731]
    """
    with _default(check_implementation(implementation)):
        yield


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Runs kernels of ``implementation="mosaic"`` in Pallas's interpreter, on any device.

    For tests where there is no GPU: it shows a kernel's logic, not its races, layouts or speed.
    """
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
