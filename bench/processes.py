"""Processes that share the work, and one device: some of them compile, or one of them times.

While XLA compiles it tries algorithms for products on the device, and so does Triton.
"""

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


def each(
    f: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    jobs: int,
    *,
    begin: Callable[["Shared"], None] | None = None,
    chunk: int = 1,
) -> Iterator[Any]:
    """Yields what ``f(*task)`` gives for each task, in order.

    Args:
      f: a function of a module.
      tasks: its arguments.
      jobs: how many processes work; one is this process.
      begin: called in each new process with the device that they share; then a process does one
        chunk of the tasks and ends.
      chunk: how many tasks a process takes at a time.
    """
    if jobs == 1:
        yield from itertools.starmap(f, tasks)
        return
    options: dict[str, Any] = {}
    if begin:
        options = {"initializer": begin, "initargs": (Shared(SPAWN),), "max_tasks_per_child": 1}
    with ProcessPoolExecutor(jobs, SPAWN, **options) as pool:
        yield from pool.map(f, *zip(*tasks, strict=True), chunksize=chunk)


class Alone:
    """The device of a process that shares it with no other."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def compiling(self) -> Any:
        """A context in which programs are compiled."""
        return contextlib.nullcontext()


class Shared:
    """A context in which the device is its process's own; who waits for it goes before compilers.

    Args:
      context: of ``multiprocessing``, in which the processes start.
    """

    def __init__(self, context: Any):
        self._changed = context.Condition()
        self._compiling, self._waiting, self._taken = (context.RawValue("i", 0) for _ in range(3))

    def __enter__(self) -> None:
        with self._changed:
            self._waiting.value += 1
            self._changed.wait_for(lambda: not self._compiling.value and not self._taken.value)
            self._waiting.value -= 1
            self._taken.value = 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._taken.value = 0
            self._changed.notify_all()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which programs are compiled, as others may at the same time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting.value and not self._taken.value)
            self._compiling.value += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling.value -= 1
                self._changed.notify_all()
