"""Processes that share the work, and one device: some of them compile, or one of them times.

While XLA compiles it tries algorithms for products on the device, and so does Triton.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
Task = tuple[Any, ...]


def each(
    f: Callable[..., Any],
    tasks: Sequence[Task],
    jobs: int,
    *,
    apart: bool = False,
    most: int | None = None,
) -> Iterator[tuple[Task, Any]]:
    """Yields each task and what ``f(*task)`` gives, as they are done.

    Args:
      f: a function of a module.
      tasks: its arguments, no two alike.
      jobs: how many processes work; one is this process.
      apart: whether one is another process, too.
      most: how many tasks a process does before another one takes its place; it keeps memory.

    Raises:
      BrokenProcessPool: a process ended, as LLVM ends one where it cannot select code.
    """
    if jobs == 1 and not apart:
        yield from ((task, f(*task)) for task in tasks)
        return
    left = list(tasks)
    shared = Shared(SPAWN)
    with ProcessPoolExecutor(
        jobs, SPAWN, initializer=_begin, initargs=(shared,), max_tasks_per_child=most
    ) as pool:
        futures = {pool.submit(f, *task): task for task in tasks}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool as error:
                names = " or ".join(str(task[-1]) for task in left[:jobs])
                raise BrokenProcessPool(f"a process ended at {names}") from error
            left.remove(futures[future])
            yield futures[future], result


def _begin(shared: "Shared") -> None:
    global _device
    _device = shared


def device() -> "Alone | Shared":
    """The device of this process, held while it is used."""
    return _device


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


_device: Alone | Shared = Alone()
