"""Processes that share the work, and one device: some of them compile, or one of them times.

While XLA compiles it tries algorithms for products on the device, and so does Triton.
"""

import contextlib
import fcntl
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
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
    every: list[_Worker] = []
    idle: list[_Worker] = []

    def attempt(task: Task) -> Any:
        worker = idle.pop() if idle else _Worker(f, Path(folder))
        every.append(worker)
        result = worker.result(task, limit)
        if worker.done == most:
            worker.end()
        elif worker.process.is_alive():
            idle.append(worker)
        return result

    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(jobs) as threads:
        task_of = {threads.submit(attempt, task): task for task in tasks}
        try:
            for done in futures.as_completed(task_of):
                yield task_of[done], done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in every:
                worker.process.kill()


class _Worker:
    """A process that does tasks, one after the other."""

    def __init__(self, f: Callable[..., Any], folder: Path):
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_work, args=(f, theirs, folder), daemon=True)
        self.process.start()
        theirs.close()
        self.done = 0

    def result(self, task: Task, limit: float | None) -> Any:
        self.done += 1
        try:
            self.pipe.send(task)
            if self.pipe.poll(limit):
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return Failed(f"its process ended with status {self.process.exitcode}")
        self.end()
        return Failed(f"not done within {limit:.0f} s")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _work(f: Callable[..., Any], pipe: Any, folder: Path) -> None:
    global _folder
    _folder = folder
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


_folder: Path | None = None
"""The folder of the locks of a device that a process shares with others."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The device is this process's own; who waits for it goes before those who compile."""
    with locked("turn", fcntl.LOCK_EX), locked("use", fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Programs are compiled, as others may at the same time."""
    with locked("turn", fcntl.LOCK_SH):
        pass
    with locked("use", fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def locked(name: str, how: int) -> Iterator[None]:
    """Holds a lock, as :func:`fcntl.flock` knows it, which ends with its process at the latest."""
    if _folder is None:
        yield
        return
    with (_folder / name).open("w") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
