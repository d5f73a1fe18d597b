"""The processes of a run, on one host or several: they join, agree when to stop, and end together.

They run on JAX's distributed runtime, which a run of one process does not start, and which ends all
where one is lost. Process 0 tells the others what it alone finds out, writes and prints.
"""

import contextlib
import glob
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import jaxkern
from jaxkern.lm import stop
from jaxkern.lm.config import RunError

_LONG = 7 * 24 * 3600  # seconds for process 0 to make data, or a sample, while the others wait
_TIMES: dict[str, Any] = {
    "initialization_timeout": 300,  # for all to join
    "heartbeat_timeout_seconds": 40,  # after which one without a sign of life is lost
    "shutdown_timeout_seconds": _LONG,
}
_BY_HAND = "name --coordinator HOST:PORT, --processes N, --process from 0 to N-1, or --processes 1"
_LOST = r"Gloo \w+ failed|remote process exited|Socket closed|heartbeat|distributed service"


class Alone:
    """The process of a run of one, or process `index` of `count`; 0 is the main one.

    Its lines on stderr begin with `name`.
    """

    index, count, main, name = 0, 1, True, ""

    def share(self, make: Callable[[], Any]) -> Any:
        """Returns the result of `make` in process 0, in values that JSON has."""
        return make()

    def stop_after(self, done: int) -> int | None:
        """The signal for which all stop after step `done`; for ``None`` they go on to the next."""
        del done
        return stop.requested()

    def trained(self) -> None:
        """Says that all steps are done: every process comes to its end by itself."""

    def leave(self, code: int) -> int:
        """The exit code of the command, which one of several processes ends here."""
        return code


current = ALONE = Alone()


class Several(Alone):
    """One of several processes, which it joins by these arguments of JAX."""

    def __init__(self, arguments: dict[str, Any]):
        import jax

        count = arguments.get("num_processes", "all")
        if arguments.get("process_id") == 0:  # JAX would crash
            port = arguments["coordinator_address"].rpartition(":")[2]
            try:
                socket.create_server(("", int(port))).close()
            except (OSError, ValueError, OverflowError) as error:
                what = f"process 0 cannot listen to port {port} ({error})"
                raise RunError(f"{what}; name another in --coordinator HOST:PORT") from None
        stop.say(f"hosts    waiting at most 5 minutes for {count} processes …")
        # JAX holds Python's lock while it waits, so no handler runs, and then handles SIGTERM.
        before = signal.getsignal(signal.SIGINT)
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        try:
            jax.distributed.initialize(**arguments, **_TIMES)
            self.index, self.count = jax.process_index(), jax.process_count()
        except Exception as error:  # of the cluster's own kinds
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RunError(f"JAX cannot join {count} processes ({reason}); {_BY_HAND}") from None
        finally:
            signal.signal(signal.SIGINT, before)
        if (own := jax.local_device_count()) * self.count != jax.device_count():
            what = f"process {self.index} of {self.count} has {own} of all {jax.device_count()}"
            raise RunError(f"{what} devices; give each as many, by CUDA_VISIBLE_DEVICES")
        self.main, self.name = self.index == 0, f"process {self.index}: "
        self.together, self._asked, self._told = False, False, 0

    def check(self, flags: dict[str, Any]) -> None:
        """Refuse processes that were started with different flags or have different versions."""
        own = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}
        first, *others = self._tell(own | {"the version of jaxkern": jaxkern.__version__})
        for index, their in enumerate(others, 1):
            for name in sorted(first | their):
                if (a := their.get(name, "its default")) != (b := first.get(name, "its default")):
                    self.together = True
                    what = f"{name} of process {index} is {a} and of process 0 {b}"
                    raise RunError(f"{what}; start all with the same")

    def share(self, make: Callable[[], Any]) -> Any:
        told = self._tell({"value": make() if self.main else None})[0]
        if "error" in told:
            raise RunError(told["error"])
        return told["value"]

    def stop_after(self, done: int) -> int | None:
        from jax.experimental import multihost_utils

        own = stop.requested() or 0
        if own and not self._asked:
            self._asked = True
            os.kill(os.getpid(), signal.SIGTERM)  # for JAX, which tells all processes
        if not multihost_utils.reached_preemption_sync_point(done):
            return None
        self.together = True
        return int(multihost_utils.process_allgather(np.int32(own)).max()) or signal.SIGTERM

    def trained(self) -> None:
        self.together = True

    def leave(self, code: int) -> NoReturn:
        stop.discard_closed_output()
        os._exit(code)  # JAX would wait for processes that may be lost

    def end(self) -> None:
        """Wait for the others' end, or tell those that wait for process 0 of an error of it."""
        import jax

        with contextlib.suppress(Exception, stop.Stopped), stop.deferred():
            if self.together:
                jax.distributed.shutdown()
            elif self.main:  # if all have that error, they have 5 seconds to tell of it
                self._tell({"error": "process 0 has ended, and says why"}, timeout=5)

    def _tell(self, value: Any, *, timeout: int = _LONG) -> list[Any]:
        """The values of all processes, which JSON has."""
        from jax.experimental.multihost_utils import process_allgather
        from orbax.checkpoint.multihost import sync_global_processes

        self._told += 1
        everyone = set(range(self.count))
        # Devices would not wait for each other for so long.
        sync_global_processes(f"jaxkern {self._told}", timeout=timeout, processes=everyone)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = process_allgather(np.int32(data.size))
        rows = process_allgather(np.pad(data, (0, sizes.max() - data.size)))
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def joined(arguments: dict[str, Any] | None, flags: dict[str, Any]) -> Iterator[Alone]:
    """Inside, the processes of a run work together, all by these flags; each is what it yields."""
    global current
    if arguments is None:
        yield ALONE
        return
    current = several = Several(arguments)
    try:
        several.check(flags | {"processes": arguments.get("num_processes")})
        if not several.main:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        yield several
        several.together = True
    except Exception as error:
        if not re.search(_LOST, reason := str(error).partition("\n")[0]):
            raise
        remedy = "start all again, with --resume if a step is saved"
        raise RunError(f"another process is lost ({reason}); {remedy}") from None
    finally:
        several.end()


def find(
    coordinator: str | None, processes: int | None, process: int | None
) -> dict[str, Any] | None:
    """JAX's arguments by these flags or the environment; ``None`` for a process alone."""
    if processes == 1 and not process:
        return None
    if coordinator is None and processes is None and process is None:
        return _launched()
    if coordinator is None or processes is None or process is None or process >= processes:
        given = f"--coordinator {coordinator}, --processes {processes}, --process {process}"
        raise RunError(f"{given} do not go together; {_BY_HAND}")
    arguments = {"coordinator_address": coordinator, "num_processes": processes}
    return arguments | {"process_id": process, "cluster_detection_method": "deactivate"}


_OPEN_MPI, _SLURM = (  # how many processes there are, of these on this host, and which one is this
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
)


def _launched() -> dict[str, Any] | None:
    """JAX's arguments where Slurm, Open MPI or Kubernetes runs this process as one of several."""
    mpi = _OPEN_MPI[0] in os.environ  # which may itself be a task of Slurm
    starts = (re.match(r"\d+", os.environ.get(name, "")) for name in (_OPEN_MPI if mpi else _SLURM))
    count, on_host, local = (int(start[0]) if start else 1 for start in starts)
    mpich = os.environ.get("PMI_SIZE", "1")  # which Slurm may set, too
    if not mpi and mpich not in ("1", str(count)):
        what = f"PMI_SIZE={mpich} is of MPICH or Intel MPI, which do not tell where process 0 is"
        raise RunError(f"{what}; {_BY_HAND}")
    if count == 1:
        pod = {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"} <= os.environ.keys()
        return {"local_device_ids": []} if pod else None
    arguments: dict[str, Any] = {"num_processes": count}
    if mpi and "OMPI_MCA_orte_hnp_uri" not in os.environ:  # version 5 names no host
        arguments["cluster_detection_method"] = "mpi4py"
    # By itself JAX takes one GPU for each process. An empty list stands for all that it sees.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = glob.glob("/dev/nvidia[0-9]*")
    gpus = there if visible is None else [gpu for gpu in visible.split(",") if gpu]
    shared = on_host > 1 and "SLURM_GPUS_PER_TASK" not in os.environ
    if shared and len(gpus) > on_host and len(gpus) % on_host:
        raise RunError(f"{len(gpus)} GPUs are not shared evenly by the {on_host} processes here")
    each = len(gpus) // on_host if shared else 0
    return arguments | {"local_device_ids": [*range(local * each, (local + 1) * each)]}
