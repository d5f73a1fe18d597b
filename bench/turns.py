"""One device for several processes: some of them compile, or one of them times.

While XLA compiles it tries algorithms for products on the device, and so does Triton.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


class Alone:
    """The turns of a process that shares the device with no other."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def compiling(self) -> Any:
        """A context in which programs are compiled."""
        return contextlib.nullcontext()


class Turns:
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
