"""A program between JAX's client in a process and its coordination service in process 0.

The client would end its process with a stack trace the moment that the service is gone. It talks to
this program, which keeps the near end open when the far one closes, so that the run ends by what
its processes say to each other (:mod:`jaxkern.lm.processes.wire`). A program of its own, as the
client holds Python's lock while it connects.

    python relay.py HOST PORT

It writes the port that it listens to on this host to stdout, and ends when stdin is closed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading


def start(host: str, port: int) -> tuple[subprocess.Popen[str], int]:
    """Start the program; returns it, to be kept, and the port that it listens to."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-I", "-S", __file__, host, str(port)]
    program = subprocess.Popen(command, start_new_session=True, **pipes)
    assert program.stdout is not None
    return program, int(program.stdout.readline())


def _main(host: str, port: int) -> None:
    # What asks the run for an end is for the run alone, which ends this, too.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    near = socket.create_server(("127.0.0.1", 0))
    print(near.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(near, host, port), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def _accept(near: socket.socket, host: str, port: int) -> None:
    while True:
        client, _ = near.accept()
        with contextlib.suppress(OSError):
            service = socket.create_connection((host, port))
            for ends in ((client, service), (service, client)):
                threading.Thread(target=_pump, args=(*ends, ends[0] is client), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, close: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if close:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
