"""How a process is told that it is one of several: by flags, or by what started it.

Slurm, Open MPI and Kubernetes set variables of the environment. They are believed where they tell
this very process that it is one of several: not in a shell inside an allocation, nor in a job of
one task. MPICH and Intel MPI set variables, too, but none that names a host: their processes need
flags, and without these are refused, as each would otherwise run alone into one folder.
"""

import dataclasses
import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxkern.lm.config import RunError

_BY_HAND = (
    "name --coordinator HOST:PORT, --processes N and --process I, or --processes 1 for a run of "
    "this process alone"
)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a process knows of itself and the others.

    Attributes:
      coordinator: host and port that process 0 listens to, as ``"HOST:PORT"``.
      count: how many processes there are.
      index: the number of this one.
      by: how this is known.
      local_devices: which GPUs of its host are its own; ``None`` for all that it sees.
    """

    coordinator: str
    count: int
    index: int
    by: str
    local_devices: list[int] | None = None

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


def told(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Told | None:
    """What the flags of those names say, or else the environment; ``None`` for a process alone.

    Raises:
      RunError: they say a part, or what cannot be.
    """
    flags = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in flags.items() if value is None]
    if processes == 1 and not process:
        return None
    if len(missing) == 3:
        return _by_cluster(environment)
    if coordinator is None or processes is None or process is None:
        given = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
        raise RunError(
            f"{given} needs {' and '.join(missing)}, too; give every process the same "
            "--coordinator and --processes, and a --process of its own"
        )
    if process >= processes:
        raise RunError(
            f"--process {process} is not one of --processes {processes}; they are numbered from 0 "
            f"to {processes - 1}"
        )
    return Told(coordinator, processes, process, "by --processes")


def _by_cluster(environment: Mapping[str, str]) -> Told | None:
    """What the program that started this process says of it."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else default

    on_host, local, bound = 1, 0, False
    tasks_of_step = number("SLURM_STEP_NUM_TASKS", 1) if "SLURM_PROCID" in environment else 1
    if "OMPI_COMM_WORLD_SIZE" in environment:  # mpirun may itself be a task of Slurm
        if number("OMPI_COMM_WORLD_SIZE", 1) < 2:
            return None
        method, by = "ompi", "by Open MPI"
        if "OMPI_MCA_orte_hnp_uri" not in environment:  # of version 5, which names no host
            method = "mpi4py"
        on_host = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
        local = number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    elif (count := number("PMI_SIZE", 1)) > 1 and count != tasks_of_step:
        # Where Slurm has as many tasks, it has set PMI_SIZE, or has started the processes.
        raise RunError(
            f"PMI_SIZE={count} and PMI_RANK={environment.get('PMI_RANK', '')} say that this "
            f"process is one of {count} by MPICH or Intel MPI, which do not tell where process 0 "
            f"is; {_BY_HAND}"
        )
    elif tasks_of_step > 1:
        method, by = "slurm", "by Slurm"
        tasks = _tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = number("SLURM_NODEID", 0)
        on_host = tasks[node] if node < len(tasks) else 1
        local, bound = number("SLURM_LOCALID", 0), "SLURM_GPUS_PER_TASK" in environment
    elif "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        if importlib.util.find_spec("kubernetes") is None:
            raise RunError(
                f"JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']} says that this is a "
                "pod of an Indexed Job; how many there are, and where, is asked by the package "
                f"kubernetes, which is not installed; install it, or {_BY_HAND}"
            )
        method, by = "k8s", "by Kubernetes"
    else:
        return None
    coordinator, count, index = _found(method, by)
    if method in ("ompi", "mpi4py") and count != (started := number("OMPI_COMM_WORLD_SIZE", 1)):
        raise RunError(
            f"this process is one of {started} {by}, and {method} finds {count}, as a package "
            f"mpi4py that was built for another MPI does; build it for this one, or {_BY_HAND}"
        )
    if count < 2:
        return None
    devices = None if bound else own_devices(on_host, local, environment)
    return Told(coordinator, count, index, by, devices)


def _found(method: str, by: str) -> tuple[str, int, int]:
    """What JAX's own detection says, which has no public name."""
    try:
        from jax._src.clusters import ClusterEnv  # pyright: ignore[reportPrivateImportUsage]

        if method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
            raise RuntimeError("Open MPI 5 tells its hosts to the package mpi4py alone")
        detect: Any = ClusterEnv.auto_detect_unset_distributed_params
        coordinator, count, index, _ = detect(None, None, None, [], method, 300)
        return str(coordinator), int(count), int(index)
    except Exception as error:  # of the cluster's own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(
            f"this process is one of several {by}, and where the others are is not told: {reason}; "
            f"{_BY_HAND}"
        ) from None


def _tasks_of_nodes(text: str) -> list[int]:
    """How many tasks each node has, of Slurm's text such as ``"2(x3),1"``."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def own_devices(on_host: int, local: int, environment: Mapping[str, str]) -> list[int] | None:
    """Which of the GPUs that are visible a process takes; ``None`` for all of them.

    Args:
      on_host: how many processes share the host.
      local: the number of this one among them.
      environment: whose CUDA_VISIBLE_DEVICES says what is visible.

    Raises:
      RunError: the processes cannot share the GPUs evenly.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    listed = glob.glob("/dev/nvidia[0-9]*") if visible is None else visible.split(",")
    count = len([each for each in listed if each])
    if on_host == 1 or count < on_host:  # whoever started the processes has given each its own
        return None
    if count % on_host:
        raise RunError(
            f"the {on_host} processes of this host cannot share its {count} GPUs evenly; start one "
            "process for each host, or for each GPU"
        )
    each = count // on_host
    return [*range(local * each, (local + 1) * each)]
