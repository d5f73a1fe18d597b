"""What the processes of a run say to each other: process 0 listens, and each other holds a line.

Both ends send messages, each a line of JSON, from a thread of asyncio. A connection that closes,
and one over which nothing comes for `LIMIT` seconds, is a lost process.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

BEAT = 5.0
"""Seconds between two signs of life."""

LIMIT = 45.0
"""Seconds without one after which a process is lost."""

_LINE = 1 << 26  # bytes of a message, at most
_GREETING = b"jaxkern"

Message = dict[str, Any]
Heard = Callable[[int, Message], None]
Lost = Callable[[int, str], None]
Joined = Callable[[Message, Any, Any], Coroutine[Any, Any, None]]


class Loop:
    """A thread that runs asyncio."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="processes", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs a coroutine there, and waits for what it gives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begins a coroutine there."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, f: Callable[..., Any], *arguments: Any) -> None:
        """Calls `f` there."""
        self._loop.call_soon_threadsafe(f, *arguments)


class Line:
    """One end of the connection between process 0 and another.

    Args:
      process: the one at the other end.
      reader, writer: of the connection.
      heard: is given every message, in the loop's thread.
      lost: is told, there, why nothing more will come.
    """

    def __init__(self, process: int, reader: Any, writer: Any, heard: Heard, lost: Lost):
        self._process, self._reader, self._writer = process, reader, writer
        self._heard, self._lost = heard, lost
        self._tasks = [asyncio.ensure_future(each) for each in (self._read(), self._beat())]

    def send(self, message: Message) -> None:
        """Sends a message; of one that cannot be sent the reader will know why."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def sent(self) -> None:
        """Waits until what was sent has left this process."""
        with contextlib.suppress(OSError):
            await asyncio.wait_for(self._writer.drain(), 5)

    async def _read(self) -> None:
        why = "its connection was closed"
        try:
            while line := await asyncio.wait_for(self._reader.readline(), LIMIT):
                message = json.loads(line)
                if message:  # an empty one is a sign of life
                    self._heard(self._process, message)
        except TimeoutError:
            why = f"nothing was heard of it for {LIMIT:g} s"
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        self._writer.close()
        self._lost(self._process, why)

    async def _beat(self) -> None:
        while not self._writer.is_closing():
            self.send({})
            await asyncio.sleep(BEAT)


async def listen(port: int, joined: Joined) -> Any:
    """Has process 0 listen.

    Args:
      port: for the other processes.
      joined: is given the first message of each, and its reader and writer.

    Raises:
      OSError: the port is taken.
    """

    async def connected(reader: Any, writer: Any) -> None:
        try:
            greeting, _, hello = (await asyncio.wait_for(reader.readline(), LIMIT)).partition(b" ")
            if greeting == _GREETING:
                await joined(json.loads(hello), reader, writer)
                return
        except (OSError, ValueError, KeyError):
            pass
        writer.close()  # it is no process of a run

    return await asyncio.start_server(connected, None, port, limit=_LINE)


async def connect(host: str, port: int, hello: Message, timeout: float) -> tuple[Any, Any, Message]:
    """Connects another process to process 0.

    Args:
      host, port: of process 0, which need not listen yet.
      hello: what it is told first.
      timeout: seconds after which it is given up.

    Returns:
      Reader and writer, and its answer.

    Raises:
      OSError: it does not listen, or has closed the connection.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        try:
            connecting = asyncio.open_connection(host, port, limit=_LINE)
            reader, writer = await asyncio.wait_for(connecting, max(1.0, end - loop.time()))
            break
        except OSError:
            if loop.time() >= end:
                raise
            await asyncio.sleep(0.2)
    writer.write(_GREETING + b" " + json.dumps(hello).encode() + b"\n")
    while True:
        line = await asyncio.wait_for(reader.readline(), max(LIMIT, end - loop.time()))
        if not line:
            raise ConnectionError("it closed the connection")
        if answer := json.loads(line):
            if "refused" in answer:
                writer.close()
            return reader, writer, answer
