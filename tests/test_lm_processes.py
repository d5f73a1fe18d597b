"""Several processes of a run: how they are told, how they agree and end, and two that train.

What they say to each other is tried with processes that are threads of this one, without JAX; that
losses, checkpoints and ends hold with JAX, by two real processes of two devices each.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

import jaxkern
from jaxkern.lm import checkpoint, cli, processes, run, stop
from jaxkern.lm.config import RunError
from jaxkern.lm.processes import cluster, several, wire
from jaxkern.lm.processes.cluster import Told, own_devices, told
from jaxkern.lm.report import read_metrics
from tests.language_models import command

PATIENCE = 300  # seconds, of a machine that does much else
SLURM = {"SLURM_JOB_ID": "70001", "SLURM_STEP_NODELIST": "node[007-009],other3"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
SLURM |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPI |= {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def member(index, count=2, port=None, flags=None):
    return several.Several(Told(f"127.0.0.1:{port or free_port()}", count, index, ""), flags or {})


# How a process is told


BY_SLURM = ("node007", 4, 2, "by Slurm", None)  # one task on the node has all of its GPUs
BATCH_SCRIPT = {name: value for name, value in SLURM.items() if "STEP" not in name}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, BY_SLURM),
        (SLURM | MPI, ("10.96.0.1", 4, 3, "by Open MPI", [2, 3])),  # inside a job of Slurm
        (SLURM | MPICH, BY_SLURM),  # Slurm may set these variables, too
        # Nobody tells of others.
        ({}, None),
        (BATCH_SCRIPT, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in an allocation of 4 tasks
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        # One of several that cannot find the others does not run alone.
        (MPI | {"OMPI_MCA_orte_hnp_uri": "nonsense"}, "one of several by Open MPI, .*; "),
        (POD, r"JOB_COMPLETION_INDEX=1 says that this is a pod .* install it, or "),
        (MPICH, r"PMI_SIZE=4 and PMI_RANK=1 say that this process is one of 4 by MPICH or Intel.*"),
        (MPICH | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "PMI_SIZE=4 and PMI_RANK=1.*"),
    ],
)
def test_a_process_is_told_of_others_by_a_cluster_or_by_flags(monkeypatch, variables, expected):
    for name in {*os.environ}:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    for name, value in ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    assert told(None, 1, None) is None
    assert told("a:1", 4, 1) == Told("a:1", 4, 1, "by --processes")
    if isinstance(expected, str):
        with pytest.raises(RunError, match=f"{expected}name --coordinator HOST"):
            told(None, None, None)
        return
    found = told(None, None, None)
    values = found and (found.host, found.count, found.index, found.by, found.local_devices)
    assert values == expected


def test_an_mpi4py_of_another_mpi_is_refused(monkeypatch):
    monkeypatch.setattr(cluster, "_found", lambda method, by: ("a:1", 1, 0))
    with pytest.raises(RunError, match=r"one of 4 by Open MPI, and ompi finds 1, .*; build it for"):
        told(None, None, None, MPI)


def test_processes_of_a_host_share_its_gpus():
    visible = lambda gpus: {"CUDA_VISIBLE_DEVICES": gpus}
    assert cluster._tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert own_devices(1, 0, visible("0,1,2,3")) is None
    assert own_devices(4, 3, visible("4,5,6,7")) == [3]
    assert own_devices(2, 1, visible("0,1,2,3")) == [2, 3]
    assert own_devices(4, 3, visible("2")) is None  # the launcher has given it one
    with pytest.raises(RunError, match="the 3 processes of this host cannot share its 4 GPUs"):
        own_devices(3, 0, visible("0,1,2,3"))


# What they say to each other


class EndedError(Exception):
    """A process has ended."""


def threads_of(calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def ended(threads):
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture
def group(monkeypatch):
    """Starts processes that are threads: they join without JAX, and their ends are noted."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: None)
    monkeypatch.setattr(several, "_GRACE", 0.5)
    preemption = jax.config.jax_enable_preemption_service
    left, running = queue.Queue(), []

    def leave(self, code):
        left.put((self.index, code))
        raise EndedError

    monkeypatch.setattr(several.Several, "leave", leave)

    def start(count, *flags):
        port, errors = free_port(), {}
        members = [member(i, count, port, flags[i] if flags else None) for i in range(count)]

        def join(each):
            try:
                each.join()
            except RunError as error:
                errors[each.index] = str(error)

        ended(threads_of([lambda each=each: join(each) for each in members]))
        running.extend(members)
        return members, errors

    start.left_by = lambda count: dict(left.get(timeout=PATIENCE) for _ in range(count))
    yield start
    for each in running:
        each._ended = True
        if program := getattr(each, "_relay", None):
            program.stdin.close()
            program.wait(PATIENCE)
            program.stdout.close()
    jax.config.update("jax_enable_preemption_service", preemption)


def test_all_have_what_process_0_finds_and_end_together(group):
    members, errors = group(3)
    assert not errors
    assert members[0].share(lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    assert [each.share(lambda: 1 / 0) for each in members[1:]] == [{"a": [1, 2]}] * 2
    first = threads_of([each.finish for each in members[:2]])
    first[0].join(0.1)
    assert first[0].is_alive()
    ended([*first, *threads_of([members[2].finish])])


def test_all_stop_after_the_last_step_that_one_has_begun(group, monkeypatch):
    """The signal comes to process 1; process 2 is ahead, and process 0 behind."""
    members, _ = group(3)
    ahead, stopped = {0: 2, 1: 3, 2: 7}, {}
    for each in members:
        each.begin(0)
        assert not any(each.stop_after(done) for done in range(1, ahead[each.index]))

    def go_on(each):
        done = ahead[each.index]
        while (signum := each.stop_after(done)) is None:
            done += 1
            with each._changed:  # as the devices of one wait for those of the others
                each._changed.wait_for(lambda: each._held, PATIENCE)
        stopped[each.index] = done, signum

    monkeypatch.setattr(stop, "_request", signal.SIGTERM)
    first = threads_of([lambda: go_on(members[1])])
    with members[2]._changed:
        members[2]._changed.wait_for(lambda: members[2]._held, PATIENCE)
    monkeypatch.setattr(stop, "_request", None)
    ended([*first, *threads_of([lambda each=each: go_on(each) for each in members[::2]])])
    assert stopped == dict.fromkeys(range(3), (7, signal.SIGTERM))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("how", ["is lost", "ended by an error that it"])
def test_a_process_that_ends_alone_ends_all_others_with_a_line(group, capfd, index, how):
    members, _ = group(3)
    for each in members:
        each.standing = lambda: "step 8 is saved"
    lost = members[index]
    if how == "is lost":
        lost._ended = True  # it says nothing itself, as when it is killed
        for line in lost._lines.values():
            lost._loop.soon(line._writer.close)
    else:
        lost.fail(RunError("the disk is full"))
    others = sorted({0, 1, 2} - {index})
    assert group.left_by(2) == dict.fromkeys(others, 1)
    lines = sorted(capfd.readouterr().err.splitlines())
    for i, line in zip(others, lines, strict=True):
        assert line.startswith(f"jaxkern: process {i}: process {index} on {socket.gethostname()} ")
        assert how in line
        assert line.endswith("; step 8 is saved") or how != "is lost"


def test_a_process_that_is_silent_is_lost(group, capfd, monkeypatch):
    monkeypatch.setattr(wire, "LIMIT", 1.0)
    monkeypatch.setattr(wire, "BEAT", 1000.0)
    group(2)
    group.left_by(2)
    assert "is lost (nothing was heard of it for 1 s)" in capfd.readouterr().err


def test_lines_of_several_processes_stay_whole(monkeypatch, tmp_path):
    """Where each write is a system call, as under PYTHONUNBUFFERED, a line is one of them."""

    class Writes(list):
        write, flush = list.append, lambda self: None

    monkeypatch.setattr(sys, "stderr", writes := Writes())
    stop.tell("process 1: process 0 is lost")
    assert cli.main(["sample", "--run", str(tmp_path)]) == 1
    assert len(writes) == 2
    assert all(line.startswith("jaxkern: ") and line.endswith("\n") for line in writes)


def test_processes_that_were_started_otherwise_are_refused(group):
    _, errors = group(2, {"steps": "5"}, {"steps": "6"})
    assert len(set(errors.values())) == 1
    assert "--steps of process 1 on" in errors[0]
    assert "is 6 and of process 0 5; start all with the same flags" in errors[1]


def test_who_may_join():
    hello = {"process": 1, "processes": 2, "host": "b", "version": jaxkern.__version__, "flags": {}}
    wrong = lambda **changes: member(0)._wrong(hello | changes)
    assert wrong() is None
    for changes, words in (
        ({"process": 0}, r"two processes were started with --process 0, on \S+ and b; number them"),
        ({"processes": 3}, "process 1 on b was started with --processes 3 and process 0 with 2; "),
        ({"version": "0"}, "process 1 on b has jaxkern 0 and process 0 .*; install the same"),
        ({"flags": {"lr": "1"}}, "--lr of process 1 on b is 1 and of process 0 its default; "),
    ):
        assert re.match(words, wrong(**changes) or "")


def test_processes_that_cannot_reach_each_other_say_so(monkeypatch):
    monkeypatch.setattr(several, "JOINING", 0.1)
    with pytest.raises(RunError, match=r"process 1 did not join within 0.1 s; start all 2 with"):
        member(0).join()
    with pytest.raises(RunError, match=r"process 0 cannot be reached at 127.0.0.1:\d+ \("):
        member(1).join()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"listen to port {port}: Address already in use; "):
            member(0, port=port).join()


def test_a_folder_that_is_not_that_of_process_0_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_SEEING", 0.0)
    second = processes.Alone()
    second.main = False
    with run.held(tmp_path, processes.ALONE):
        second.share = lambda make: (tmp_path / ".lock").read_text()
        run.held(tmp_path, second).__enter__()
        second.share = lambda make: "another"
        for folder in (tmp_path, tmp_path / "missing"):
            with pytest.raises(RunError, match="is not the folder that process 0 has; name one on"):
                run.held(folder, second).__enter__()


# Two that train


class Run:
    """Two processes of a command, of two CPU devices each."""

    def __init__(self, folder, *argv):
        port = free_port()
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        self.outputs = [folder / f"{port}-{i}" for i in range(2)]
        self.processes = []
        for i, output in enumerate(self.outputs):
            which = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", i]
            line = [sys.executable, "-m", "jaxkern", *map(str, [*argv, *which])]
            with open(output, "w") as file:
                options = {"stdout": file, "stderr": file, "env": environment}
                self.processes.append(subprocess.Popen(line, **options))

    def wait(self):
        """The exit codes, and the last line of each."""
        try:
            codes = [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.kill()
        return codes, [(self.text(i).splitlines() or [""])[-1] for i in range(2)]

    def text(self, process):
        return self.outputs[process].read_text(errors="replace")

    def until(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            running = all(process.poll() is None for process in self.processes)
            if time.monotonic() > end or not running:
                self.kill()
                pytest.fail(self.text(0) + self.text(1))
            time.sleep(0.05)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def train(tmp_path):
    lines = (json.dumps({"text": f"{i} times {i} is {i * i}."}) for i in range(1500))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    argv = ["train", "--preset", "micro", "--scan-layers", "--data", tmp_path / "text.jsonl"]
    argv += ["--batch-size", 8, "--grad-accum", 2, "--steps", 6, "--checkpoint-every", 3]
    return [*argv, "--eval-every", 3, "--eval-batches", 1, "--log-every", 3]


def losses(out):
    records = read_metrics(out / "metrics.jsonl")
    return [record.get("loss", record.get("validation_loss")) for record in records]


@pytest.mark.exhaustive
@pytest.mark.skipif(len(jax.devices()) < 4, reason="one process has four devices")
def test_two_processes_have_the_losses_of_one(train, tmp_path, capsys):
    """Packed documents and fsdp; what they leave goes on in one process."""
    two, one = tmp_path / "two", tmp_path / "one"
    train += ["--pack", "--mesh", "data=2,fsdp=2", "--out"]
    started = Run(tmp_path, *train, two)
    command(capsys, *train, one)
    codes, _ = started.wait()
    assert codes == [0, 0], started.text(0) + started.text(1)
    assert "4 × cpu" in started.text(0)
    assert "a sample:" in started.text(0)
    assert "loss" not in started.text(1)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert checkpoint.steps(two) == [3, 6]
    (two / "checkpoints" / "6").rename(two / "6")
    assert "continued from step 3" in command(capsys, "train", "--resume", "--out", two)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)


@pytest.mark.exhaustive
def test_a_signal_stops_both_and_a_killed_process_ends_the_other(train, tmp_path):
    """Process 1 is asked to end, the run goes on, and process 0 is killed."""
    out = tmp_path / "run"
    saved = lambda: max(checkpoint.steps(out), default=0)
    train += ["--out", out, "--steps", 100_000, "--eval-every", 50_000, "--mesh", "fsdp=2,tensor=2"]
    two = Run(tmp_path, *train)
    two.until(lambda: saved() >= 3)
    two.processes[1].send_signal(signal.SIGTERM)
    codes, lines = two.wait()
    assert codes == [143, 143], two.text(0) + two.text(1)
    stopped, again = saved(), f"with the same command for every process, and --resume --out {out}"
    for i, line in enumerate(lines):
        assert f"process {i}: stopped (SIGTERM): step {stopped} of 100000 is saved in" in line
        assert line.endswith(f"; continue {again}")
    two = Run(tmp_path, *train, "--resume")
    two.until(lambda: saved() > stopped)
    two.processes[0].kill()
    codes, (_, line) = two.wait()
    assert codes == [-signal.SIGKILL, 1]
    assert f"jaxkern: process 1: process 0 on {socket.gethostname()} is lost (" in line
    assert line.endswith(f"is saved in {out}; continue {again}")
