"""Processes that share the work, and one device: some of them compile, or one of them times.

While XLA compiles it tries algorithms for products on the device, and so does Triton.
"""

import collections
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
Task = tuple[Any, ...]


class Failed(str):
    """Why a task has no result."""

    __slots__ = ()


def each(
    f: Callable[..., Any],
    tasks: Sequence[Task],
    jobs: int = 1,
    *,
    apart: bool = False,
    most: int | None = None,
    limit: float | None = None,
) -> Iterator[tuple[Task, Any]]:
    """Yields each task and what ``f(*task)`` gives, or why it :class:`Failed`, as they are done.

    A process that ends, as LLVM ends one where it cannot select code, costs its own task alone.

    Args:
      f: a function of a module.
      tasks: its arguments.
      jobs: how many processes work; one is this process.
      apart: whether one is another process, too.
      most: how many tasks a process does before another one takes its place; it keeps memory.
      limit: seconds after which a task's process is ended.
    """
    if jobs == 1 and not apart:
        yield from ((task, _attempt(f, task)) for task in tasks)
        return
    left, shared = collections.deque(tasks), Shared(SPAWN)
    idle: list[_Worker] = []
    busy: dict[Any, _Worker] = {}
    try:
        while left or busy:
            while left and len(busy) < jobs:
                worker = idle.pop() if idle else _Worker(f, shared)
                worker.begin(left.popleft(), limit)
                busy[worker.pipe] = worker
            ends = [worker.end for worker in busy.values() if worker.end is not None]
            wait = max(0.0, min(ends) - time.monotonic()) if ends else None
            ready = connection.wait(list(busy), wait)
            pipe: Any = ready[0] if ready else min(busy, key=lambda pipe: busy[pipe].end or 0)
            worker = busy.pop(pipe)
            result = worker.result() if ready else Failed(f"not done within {limit:.0f} s")
            if result is _ENDED or not ready:  # perhaps while it had the device: all begin again
                for other in (worker, *busy.values(), *idle):
                    other.process.kill()
                left.extendleft(other.task for other in busy.values())
                shared, idle, busy = Shared(SPAWN), [], {}
                worker.process.join()
                if result is _ENDED:
                    result = Failed(f"its process ended with status {worker.process.exitcode}")
            elif worker.done == most:
                worker.process.kill()
                worker.process.join()
            else:
                idle.append(worker)
            yield worker.task, result
    finally:
        for worker in (*busy.values(), *idle):
            worker.process.kill()


_ENDED = object()


class _Worker:
    """A process that does tasks, one after the other."""

    def __init__(self, f: Callable[..., Any], shared: "Shared"):
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_work, args=(f, theirs, shared), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task = ()
        self.end: float | None = None
        self.done = 0

    def begin(self, task: Task, limit: float | None) -> None:
        self.task, self.end = task, None if limit is None else time.monotonic() + limit
        self.pipe.send(task)

    def result(self) -> Any:
        self.done += 1
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return _ENDED


def _work(f: Callable[..., Any], pipe: Any, shared: "Shared") -> None:
    global _shared
    _shared = shared
    while True:
        pipe.send(_attempt(f, pipe.recv()))


def _attempt(f: Callable[..., Any], task: Task) -> Any:
    try:
        return f(*task)
    except Exception as error:  # another library may raise anything, and the other tasks go on
        lines = str(error).splitlines() or [""]
        return Failed(f"{type(error).__name__}: {lines[0]}"[:300])
    finally:
        if jax := sys.modules.get("jax"):
            jax.clear_caches()


def alone() -> Any:
    """A context in which the device is this process's own."""
    return _shared or contextlib.nullcontext()


def compiling() -> Any:
    """A context in which programs are compiled, and others compile theirs."""
    return _shared.compiling() if _shared else contextlib.nullcontext()


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


_shared: Shared | None = None
"""The device of a process that shares it with others."""
