"""Functions bound to static arguments: where those are equal, they are one function to JAX.

A kernel is kept for a whole process by the equality of its :class:`Bound`, and on disk by a text
that names all that it depends on, :func:`identity`.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import os
import sys
import sysconfig
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A pass's kernel, reference or the like as a function of those arrays that are present.

    Attributes:
      function: ``function(options, *arrays)``, of `arguments` arrays or ``None``, gives a tuple of
        arrays and ``None``.
      options: its first argument.
      arguments: how many arrays `function` takes.
      present: which of them are not ``None``.
      in_axes: of the ``vmap``s around it, from the inside out: 0 or ``None`` for each array.
    """

    function: Callable[..., Any]
    options: Any
    arguments: int
    present: tuple[int, ...]
    in_axes: tuple[tuple[int | None, ...], ...] = ()

    def full(self, *arrays: Any) -> Arrays:
        """Computes all results, ``None`` for absent ones."""
        call = self._of_one
        for axes in self.in_axes:
            call = jax.vmap(call, axes)
        with standard_promotion():
            return call(*arrays)

    def __call__(self, *arrays: Any) -> Arrays:
        """Computes the results, without the absent ones."""
        return tuple(out for out in self.full(*arrays) if out is not None)

    def of_types(self, *arrays: Any) -> Any:
        """Asks `function` about the types of arrays alone, as they are within the ``vmap``s."""
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        for axes in reversed(self.in_axes):
            types = [
                t if axis is None else jax.ShapeDtypeStruct(t.shape[1:], t.dtype)
                for t, axis in zip(types, axes, strict=True)
            ]
        return self._of_one(*types)

    def _of_one(self, *arrays: Any) -> Any:
        given = dict(zip(self.present, arrays, strict=True))
        return self.function(self.options, *(given.get(i) for i in range(self.arguments)))


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Sets JAX's promotion of dtypes and ranks that the package's own code relies on.

    A user who has JAX refuse them means expressions of their own.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@standard_promotion()
def wide(*dtypes: Any) -> Any:
    """The dtype of sums of numbers of `dtypes`: at least float32."""
    return functools.reduce(jnp.promote_types, dtypes, jnp.float32)


def identity(kernel: Bound, *others: Any) -> str:
    """Writes down all that a kernel depends on: itself, `others`, JAX's version, source, flags."""
    flags = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MOSAIC_GPU_")}
    versions = f"jax {jax.__version__} jaxlib {jaxlib.version.__version__}"
    return f"{describe((kernel, *others))} {versions} source {_source()} flags {flags}"


def outlives_process(identity: str) -> bool:
    """Whether another process can find what has this identity."""
    return _PROCESS not in identity


def describe(value: Any) -> str:
    """Writes down a static argument: the text is equal for equal ones, in every process.

    A function from outside of the package also has a digest of all source outside of installed
    packages, and their versions. One that has no file, or is made inside another function, is
    itself in this process alone.

    Raises:
      TypeError: `value` holds something whose text would not identify it.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, tuple | list):
        kind = "" if type(value) in (tuple, list) else _named(type(value))
        return f"{kind}({', '.join(map(describe, value))})"
    if isinstance(value, functools.partial):
        return f"partial{describe((value.func, value.args, sorted(value.keywords.items())))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return f"{_named(type(value))}({', '.join(f'{n}={describe(v)}' for n, v in fields)})"
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return np.dtype(value).name
    if isinstance(value, FunctionType) and not str(value.__module__).startswith("jaxkern."):
        return f"{_named(value)} {_users_source(value)}"
    if isinstance(value, FunctionType) and "<" not in value.__qualname__:
        return _named(value)
    raise TypeError(
        f"a kernel's static arguments must tell what they are, got {value!r}; use numbers, texts, "
        "dtypes, functions of a module, and tuples and dataclasses of those"
    )


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("core", "mosaic", "ops", "optim")


@functools.cache
def _source() -> str:
    """Digests the package's source that kernels are made of."""
    return _digest(f for room in _ROOMS for f in sorted((_PACKAGE / room).rglob("*.py")))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


_PROCESS = f"process {uuid.uuid4().hex}"
_numbers: weakref.WeakKeyDictionary[FunctionType, int] = weakref.WeakKeyDictionary()
_number = itertools.count()


def _users_source(function: FunctionType) -> str:
    """Identifies the source of a function that is not the package's, and all that it may call."""
    file = inspect.getsourcefile(function)
    if "<" in function.__qualname__ or file is None or not Path(file).is_file():
        return f"{_PROCESS} {_numbers.setdefault(function, next(_number))}"
    if not _is_users(Path(file)):
        return _installed()
    files = {Path(file)}
    for module in list(sys.modules.values()):
        if isinstance(name := getattr(module, "__file__", None), str) and name.endswith(".py"):
            files.add(Path(name))
    return f"{_digest(sorted(f for f in files if _is_users(f)))} {_installed()}"


def _is_users(file: Path) -> bool:
    """Whether a file belongs neither to this package, nor to Python or an installed one."""
    others = _PACKAGE, Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    return not installed and file.is_file() and not any(map(file.is_relative_to, others))


@functools.cache
def _installed() -> str:
    """Digests the names and versions of all installed packages."""
    found = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
