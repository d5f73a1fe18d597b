"""Ends a command early: on SIGINT, SIGTERM and SIGHUP, or when nobody reads its output any more.

The first signal raises `Stopped` where the main thread is. Inside `deferred` it is noted instead,
and the work there asks `requested` where it can end. A second signal ends the process at once.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

_handling = _signalled = False
_request: int | None = None
_deferring = 0


class Stopped(KeyboardInterrupt):
    """A command was asked to end."""

    def __init__(self, signum: int, message: str = ""):
        super().__init__(signum)
        self.signum = signum  # SIGPIPE where the output was closed
        self.message = message  # what is left of the work, and how to continue it

    @property
    def code(self) -> int:
        """The exit code, as a shell has it for a process that the signal ended."""
        return 128 + self.signum

    def __str__(self) -> str:
        closed = self.signum == signal.SIGPIPE
        why = "its output was closed" if closed else signal.Signals(self.signum).name
        return f"stopped ({why})" + (f": {self.message}" if self.message else "")


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Inside, signals that would end the process silently or with a stack trace raise `Stopped`.

    A signal that is ignored, as nohup has it, or that has a handler of its own is left alone; and
    so are all in another thread than the main one, and inside another such block.
    """
    global _handling, _signalled, _request
    if _handling or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [signum for signum in _SIGNALS if signal.getsignal(signum) in _DEFAULTS]
    before = {signum: signal.signal(signum, _handle) for signum in ours}
    _handling = True
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _handling, _signalled, _request = False, False, None


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a request to stop is noted; it raises `Stopped` when the block has ended."""
    global _deferring
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
    if _request is not None and not _deferring:
        raise Stopped(_request)


def requested() -> int | None:
    """The signal that asked for an end, or ``None``."""
    return _request


def say(text: str) -> None:
    """Print a line at once; where nobody reads it, ask for an end as SIGPIPE does."""
    with output_may_close():
        print(text, flush=True)


def tell(text: str) -> None:
    """Write a line to stderr by one write, so that it stays whole beside other processes'.

    Where nobody reads stderr, the line is dropped.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"jaxkern: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def output_may_close() -> Iterator[None]:
    """Inside, a pipe that was closed, or a terminal that has gone, asks for an end."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        discard_closed_output()
        _ask(_request or signal.SIGPIPE)


def discard_closed_output() -> None:
    """Send what is still written to a closed stdout or stderr nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _handle(signum: int, frame: Any) -> None:
    global _signalled
    del frame
    if _signalled:
        os._exit(128 + signum)
    _signalled = True
    _ask(signum)


def _ask(signum: int) -> None:
    global _request
    _request = signum
    if not _deferring:
        raise Stopped(signum)
