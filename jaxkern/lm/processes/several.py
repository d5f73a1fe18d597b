"""One of several processes of a run: what :mod:`jaxkern.lm.processes.join` describes, by messages.

The messages go through process 0 (:mod:`jaxkern.lm.processes.wire`). Two are about the end: that of
a process that is lost, as process 0 sees it, and that of one that fails, as it says itself. Each
goes to all others.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jaxkern
from jaxkern.lm import stop
from jaxkern.lm.config import RunError
from jaxkern.lm.processes import relay, wire
from jaxkern.lm.processes.cluster import Told
from jaxkern.lm.processes.join import Alone

JOINING = 300.0
"""Seconds within which all processes have to have joined."""

_GRACE = 5.0  # seconds for a process to tell of its own error, which all may have


class Several(Alone):
    """One of the processes of a run.

    Args:
      told: which one it is, and of how many.
      flags: those that all of them are to have.
    """

    def __init__(self, told: Told, flags: dict[str, str]):
        self.index, self.count, self.main = told.index, told.count, told.index == 0
        self.name = f"process {self.index}: "
        self.failed = False
        self._told, self._flags = told, flags
        self._loop = wire.Loop()
        self._lines: dict[int, wire.Line] = {}
        self._changed = threading.Condition()  # of all that follows
        self._hosts = {self.index: socket.gethostname()}
        self._service = 0
        self._refused: str | None = None
        self._shared: deque[Any] = deque()
        self._finished: set[int] = set()
        self._together = self._ended = self._ending = False
        self._committed = -1  # the step that this process will still do
        self._asked = self._held = False
        self._commitments: dict[int, int] = {}
        self._last: int | None = None
        self._signum: int = signal.SIGTERM

    # Joining

    def join(self) -> None:
        """Wait for all processes, and have JAX start with them.

        Raises:
          RunError: one cannot be reached, does not come, or was started otherwise.
        """
        if self.main:
            bound = f"[::]:{(service := _free_port())}"
            try:
                self._loop.run(wire.listen(self._told.port, self._joined))
            except OSError as error:
                raise RunError(
                    f"process 0 cannot listen to port {self._told.port}: "
                    f"{os.strerror(error.errno or 0)}; name another in --coordinator HOST:PORT"
                ) from None
            self._wait_for_all()
            self._tell({"all": [*self._hosts.items()], "service": service})
        else:
            self._connect()
            self._relay, service = relay.start(self._told.host, self._service)
            bound = None
        import jax

        # Its handler of SIGTERM would take the place of ours.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(
                f"127.0.0.1:{service}",
                self.count,
                self.index,
                local_device_ids=self._told.local_devices,
                cluster_detection_method="deactivate",
                coordinator_bind_address=bound,
                initialization_timeout=int(JOINING),
                heartbeat_timeout_seconds=int(4 * wire.LIMIT),  # ours is to be the one that tells
            )
        except (RuntimeError, ValueError) as error:
            raise RunError(f"JAX cannot start with {self.count} processes: {error}") from None

    def _wait_for_all(self) -> None:
        began, said = time.monotonic(), False
        with self._changed:
            while missing := sorted({*range(self.count)} - self._hosts.keys()):
                self._changed.wait(1.0)
                if self._refused is not None:
                    raise RunError(self._refused)
                waited = time.monotonic() - began
                if waited > JOINING:
                    raise RunError(
                        f"{_listed(missing)} did not join within {JOINING:g} s; start all "
                        f"{self.count} with --coordinator {self._told.coordinator}, which they "
                        "have to reach"
                    )
                if waited > 5 and not said:
                    said = True
                    stop.say(f"waiting for {_listed(missing)} of {self.count} …")

    async def _joined(self, hello: wire.Message, reader: Any, writer: Any) -> None:
        """Takes another process in, in process 0, or refuses it."""
        process = hello["process"]
        with self._changed:
            wrong = self._wrong(hello)
            line = wire.Line(-1 if wrong else process, reader, writer, self._heard, self._lost)
            if wrong is None:
                self._lines[process] = line
                line.send({"welcome": True})
                self._hosts[process] = hello["host"]
            else:
                line.send({"refused": wrong})
                self._refused = wrong
            self._changed.notify_all()

    def _wrong(self, hello: wire.Message) -> str | None:
        """Why a process that wants to join cannot."""
        process, host = hello["process"], hello["host"]
        if hello["version"] != jaxkern.__version__:
            return (
                f"process {process} on {host} has jaxkern {hello['version']} and process 0 "
                f"{jaxkern.__version__}; install the same on all hosts"
            )
        if hello["processes"] != self.count:
            return (
                f"process {process} on {host} was started with --processes {hello['processes']} "
                f"and process 0 with {self.count}; start all with the same number"
            )
        if process in self._hosts:
            return (
                f"two processes were started with --process {process}, on {self._hosts[process]} "
                f"and {host}; number them from 0 to {self.count - 1}"
            )
        theirs = hello["flags"]
        for flag in sorted(theirs.keys() | self._flags.keys()):
            values = [flags.get(flag, "its default") for flags in (theirs, self._flags)]
            if values[0] != values[1]:
                return (
                    f"--{flag.replace('_', '-')} of process {process} on {host} is {values[0]} "
                    f"and of process 0 {values[1]}; start all with the same flags"
                )
        return None

    def _connect(self) -> None:
        """Joins process 0, which tells the port of JAX's coordination service there."""
        hello = {
            "process": self.index,
            "processes": self.count,
            "host": socket.gethostname(),
            "version": jaxkern.__version__,
            "flags": self._flags,
        }
        address = self._told.host, self._told.port
        try:
            reader, writer, answer = self._loop.run(wire.connect(*address, hello, JOINING))
        except (OSError, TimeoutError, ValueError) as error:
            raise RunError(
                f"process 0 cannot be reached at {self._told.coordinator} "
                f"({error or 'no answer'}); start it with the same --coordinator, a host and a "
                "port that all processes can reach"
            ) from None
        if "refused" in answer:
            raise RunError(answer["refused"])

        async def hold() -> None:
            self._lines[0] = wire.Line(0, reader, writer, self._heard, self._lost)

        self._loop.run(hold())
        with self._changed:
            while len(self._hosts) < self.count:
                self._changed.wait(1.0)

    # While the run goes on

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` gives in process 0, for which the others wait."""
        if self.main:
            value = make()
            self._tell({"share": value})
            return value
        with self._changed:
            while not self._shared:
                self._changed.wait(1.0)
            return self._shared.popleft()

    def begin(self, done: int) -> None:
        with self._changed:
            self._committed = done + 1

    def stop_after(self, done: int) -> int | None:
        signum = stop.requested()
        if signum is not None and not self._asked:
            self._asked = True
            self._to_main({"stop": signum})
        with self._changed:
            while self._held and self._last is None:
                self._changed.wait(1.0)
            if self._last is not None and done >= self._last:
                self._together = True
                return self._signum
            self._committed = done + 1
        return None

    def trained(self) -> None:
        self._together = True

    # The end

    def finish(self) -> None:
        """Wait until every process has come to its end."""
        with contextlib.suppress(stop.Stopped), stop.deferred():  # it is ending
            self._to_main({"finished": True})
            with self._changed:
                while not self._ended:
                    self._changed.wait(1.0)
            self._loop.run(self._sent())

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends by an error.

        When another process is lost, what a collective raises comes here, too: then the line that
        tells of the loss is the last of this process, and the call does not return.
        """
        if self._together:  # all have stopped after the same step, or have done all
            return self.finish()
        own = isinstance(error, RunError | stop.Stopped)
        with self._changed:
            if not own:
                self._changed.wait_for(lambda: self._ending, _GRACE)
            self.failed = own or not self._ending
        while not self.failed:
            time.sleep(1.0)
        stopped = isinstance(error, stop.Stopped)
        self._ending = True
        why = "was stopped by a signal" if stopped else "ended by an error that it has told"
        message = {"failed": f"process {self.index} on {self._hosts[self.index]} {why}"}
        (self._tell if self.main else self._to_main)(message)
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._sent(), _GRACE)

    def leave(self, code: int) -> NoReturn:
        """End the process without JAX, which would wait for processes that may be lost."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    async def _end(self, what: str, wait: float) -> None:
        """Ends the process after a line that says `what` is with another one.

        Its own main thread has `wait` seconds to tell of an error that both have.
        """
        with self._changed:
            if self._ending or self._ended:
                return
            self._ending = True
            self._changed.notify_all()
        await self._sent()
        await asyncio.sleep(wait)
        standing = ""
        with contextlib.suppress(Exception):  # the folder may be what is lost
            found = asyncio.get_running_loop().run_in_executor(None, self.standing)
            standing = await asyncio.wait_for(found, _GRACE)
        if self.failed:
            return
        stop.tell(self.name + what + (f"; {standing}" if standing else ""))
        self.leave(1)

    async def _sent(self) -> None:
        for line in self._lines.values():
            await line.sent()

    # Messages; these run in the loop's thread, but for what sends

    def _tell(self, message: wire.Message) -> None:
        """Sends a message of process 0 to all others."""

        def send() -> None:
            for line in self._lines.values():
                line.send(message)

        self._loop.soon(send)

    def _to_main(self, message: wire.Message) -> None:
        """Sends a message to process 0, which may be this one."""
        if self.main:
            self._loop.soon(self._heard, 0, message)
        else:
            self._loop.soon(lambda: self._lines[0].send(message))

    def _heard(self, process: int, message: wire.Message) -> None:
        with self._changed:
            for kind, value in message.items():
                match kind:
                    case "all":
                        self._hosts |= dict(value)
                    case "service":
                        self._service = value
                    case "share":
                        self._shared.append(value)
                    case "stop":
                        self._hold(value)
                    case "hold":
                        self._held = True
                        self._to_main({"committed": self._committed})
                    case "committed":
                        self._commit(process, value)
                    case "last":
                        self._last, self._signum = value
                    case "finished":
                        self._finish(process)
                    case "ended":
                        self._ended = True
                    case "failed":
                        if self.main:
                            self._tell(message)
                        self._loop.start(self._end(value, _GRACE))
                    case "lost":
                        self._loop.start(self._end(value, 0))
            self._changed.notify_all()

    def _hold(self, signum: int) -> None:
        """Process 0 asks all up to which step they will go on; they do not go further."""
        if not self._held:
            self._held, self._signum = True, signum
            self._tell({"hold": True})
            self._commit(0, self._committed)

    def _commit(self, process: int, step: int) -> None:
        self._commitments[process] = step
        if len(self._commitments) == self.count:
            self._last = max(self._commitments.values())
            self._tell({"last": [self._last, self._signum]})

    def _finish(self, process: int) -> None:
        self._finished.add(process)
        if len(self._finished) == self.count:
            self._ended = True
            self._tell({"ended": True})

    def _lost(self, process: int, why: str) -> None:
        if process < 0 or process in self._finished or self._ended:
            return
        what = f"process {process} on {self._hosts.get(process)} is lost ({why})"
        if self.main:
            self._tell({"lost": what})
        self._loop.start(self._end(what, 0))


def _free_port() -> int:
    """A port of this host that nobody listens to."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


def _listed(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"process{'es' if len(numbers) > 1 else ''} {first}{more}"
