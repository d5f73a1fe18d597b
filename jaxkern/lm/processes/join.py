"""The processes of a run, on one host or several: they join, agree when to stop, and end together.

Process 0 tells the others what it alone finds out (`share`), writes the run's folder and prints. A
signal to one of them ends all after the same step (`stop_after`): each has said up to which step it
will go on, process 0 asks for these when there is a signal, and names the last of them. When one is
lost, or ends by an error, every other says so in one line and ends, although its devices may wait
for the lost one forever.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jaxkern.lm import stop
from jaxkern.lm.processes.cluster import Told


class Alone:
    """A run of one process.

    Attributes:
      index: its number.
      count: how many there are.
      main: whether it is process 0, which writes and prints.
      name: what its lines on stderr begin with.
      standing: says how far the run is and how it goes on; the last line of a process ends so.
    """

    index, count, main = 0, 1, True
    name = ""
    standing: Callable[[], str] = staticmethod(lambda: "")

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` gives in process 0, in values that JSON has."""
        return make()

    def begin(self, done: int) -> None:
        """Says that step `done` + 1 will be begun."""

    def stop_after(self, done: int) -> int | None:
        """The signal for which all stop after step `done`; for ``None`` they go on to the next."""
        del done
        return stop.requested()

    def trained(self) -> None:
        """Says that all steps are done, so that every process comes to its end by itself."""


ALONE = Alone()


@contextlib.contextmanager
def joined(told: Told | None, flags: dict[str, Any]) -> Iterator[Alone]:
    """Inside, the processes of a run work together; each is what the block is given.

    Args:
      told: which process this is, and of how many; ``None`` for one alone.
      flags: those of the command line.

    Raises:
      RunError: they cannot join.
    """
    global _several
    if told is None:
        yield ALONE
        return
    from jaxkern.lm.processes.several import (
        Several,  # it imports asyncio, which one process can do without
    )

    _several = several = Several(told, {name: str(value) for name, value in flags.items()})
    try:
        several.join()
        if several.main:
            stop.say(f"hosts    {told.count} processes {told.by}, with {told.coordinator}")
        else:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        yield several
    except BaseException as error:
        several.fail(error)
        raise
    several.finish()


_several: Any = None


def name() -> str:
    """What the process's lines on stderr begin with."""
    return "" if _several is None else _several.name


def leave(code: int) -> int:
    """The exit code of the command, which does not return where it is one of several processes."""
    return code if _several is None else _several.leave(code)
