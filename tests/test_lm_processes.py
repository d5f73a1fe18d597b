"""Several processes of a run: how they are told, how they agree and end, and two that train.

What they say to each other is tried with processes that are threads of this one, without JAX; that
losses, checkpoints and ends hold with JAX, by two real processes of two devices each.
"""

import json
import os
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

pytestmark = pytest.mark.newest

PATIENCE = 300  # seconds, of a machine that does much else
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-009],other3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# How a process is told


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a cluster, and no others."""
    for name in {*os.environ}:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")

    def are(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return are


def test_a_cluster_tells_a_process_which_one_it_is(environment):
    environment(SLURM)
    found = told(None, None, None)
    assert found is not None
    assert (found.host, found.count, found.index, found.by) == ("node007", 4, 2, "by Slurm")
    assert found.local_devices is None  # one task on the node has all of its GPUs
    environment(MPI)  # started inside a job of Slurm
    found = told(None, None, None)
    assert found is not None
    assert (found.host, found.count, found.index, found.by) == ("10.96.0.1", 4, 3, "by Open MPI")
    assert found.local_devices == [2, 3]
    assert told(None, 1, None) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation of 4 tasks
        MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_process_that_nobody_tells_of_others_is_alone(environment, variables):
    environment(variables)
    assert told(None, None, None) is None


def test_hosts_that_a_cluster_does_not_tell_are_asked_for(environment):
    environment(MPI | {"OMPI_MCA_orte_hnp_uri": "nonsense"})
    with pytest.raises(RunError, match=r"one of several by Open MPI, .*; name --coordinator HOST"):
        told(None, None, None)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (POD, r"JOB_COMPLETION_INDEX=1 says that this is a pod .* install it, or"),
        (MPICH, r"PMI_SIZE=4 and PMI_RANK=1 say that this process is one of 4 by MPICH or Intel"),
        (MPICH | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "PMI_SIZE=4 and PMI_RANK=1"),
    ],
)
def test_one_of_several_that_cannot_find_the_others_does_not_run_alone(
    environment, monkeypatch, variables, words
):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    environment(variables)
    remedy = "name --coordinator HOST:PORT, --processes N and --process I, or --processes 1 for"
    with pytest.raises(RunError, match=f"{words}.*{remedy}"):
        told(None, None, None)
    assert told(None, 1, None) is None
    assert told("a:1", 4, 1) == Told("a:1", 4, 1, "by --processes")


def test_slurm_tells_also_where_it_sets_the_variables_of_mpich(environment):
    environment(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "4"})
    found = told(None, None, None)
    assert found is not None
    assert (found.count, found.index, found.by) == (4, 2, "by Slurm")


def test_an_mpi4py_of_another_mpi_is_refused(environment, monkeypatch):
    monkeypatch.setattr(cluster, "_found", lambda method, by: ("a:1", 1, 0))
    environment(MPI)
    with pytest.raises(RunError, match=r"one of 4 by Open MPI, and ompi finds 1, .*; build it for"):
        told(None, None, None)


def test_processes_of_a_host_share_its_gpus():
    visible = lambda gpus: {"CUDA_VISIBLE_DEVICES": gpus}
    assert cluster._tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert own_devices(1, 0, visible("0,1,2,3")) is None
    assert own_devices(4, 3, visible("4,5,6,7")) == [3]
    assert own_devices(2, 1, visible("0,1,2,3")) == [2, 3]
    assert own_devices(4, 3, visible("2")) is None  # the launcher has given it one
    with pytest.raises(RunError, match="the 3 processes of this host cannot share its 4 GPUs"):
        own_devices(3, 0, visible("0,1,2,3"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--coordinator", "a:1"), "--coordinator a:1 needs --processes and --process, too"),
        (("--processes", 2, "--process", 0), "needs --coordinator, too; give every process"),
        (
            ("--coordinator", "a:1", "--processes", 2, "--process", 2),
            "--process 2 is not one of --processes 2; they are numbered from 0 to 1",
        ),
    ],
)
def test_flags_that_tell_a_part_are_one_line(capsys, flags, words):
    line = command(capsys, "train", *flags, code=1)
    assert words in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:x", "host:65536"])
def test_an_address_without_host_or_port_is_refused(capsys, address):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--coordinator", address])
    assert f"must be HOST:PORT, such as node1:62100, got '{address}'" in capsys.readouterr().err


# What they say to each other


class EndedError(Exception):
    """A process has ended."""


@pytest.fixture
def group(monkeypatch):
    """Starts processes that are threads: they join without JAX, and their ends are noted."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: None)
    monkeypatch.setattr(several, "_GRACE", 0.5)
    preemption = jax.config.jax_enable_preemption_service
    left = {}
    changed = threading.Condition()

    def leave(self, code):
        with changed:
            left[self.index] = code
            changed.notify_all()
        raise EndedError

    monkeypatch.setattr(several.Several, "leave", leave)
    running = []

    def start(count, flags=None):
        port = free_port()
        flags = flags or [{}] * count
        members = [
            several.Several(Told(f"127.0.0.1:{port}", count, i, ""), f)
            for i, f in zip(range(count), flags, strict=True)
        ]
        errors = {}

        def join(i):
            try:
                members[i].join()
            except RunError as error:
                errors[i] = str(error)

        threads = [threading.Thread(target=join, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        running.extend(members)
        return members, errors

    def ended(count):
        with changed:
            assert changed.wait_for(lambda: len(left) >= count, PATIENCE)
        return left

    start.ended = ended
    yield start
    for member in running:
        member._ended = True
        if program := getattr(member, "_relay", None):
            program.stdin.close()
            program.wait(PATIENCE)
            program.stdout.close()
    jax.config.update("jax_enable_preemption_service", preemption)


def lose(member):
    """Close the connections of a process, as when it is killed."""
    member._ended = True  # it says nothing itself
    for line in member._lines.values():
        member._loop.soon(line._writer.close)


def test_all_have_what_process_0_finds(group):
    members, errors = group(3)
    assert not errors
    assert members[0].share(lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    assert [each.share(lambda: 1 / 0) for each in members[1:]] == [{"a": [1, 2]}] * 2


def test_all_stop_after_the_last_step_that_one_has_begun(group, monkeypatch):
    """The signal comes to process 1; process 2 is ahead, and process 0 behind."""
    members, _ = group(3)
    for member in members:
        member.begin(0)
    ahead = {0: 2, 1: 3, 2: 7}
    for member in members:
        for done in range(1, ahead[member.index]):
            assert member.stop_after(done) is None
    stopped = {}

    def go_on(member):
        done = ahead[member.index]
        while (signum := member.stop_after(done)) is None:
            done += 1
            with member._changed:  # as the devices of one wait for those of the others
                member._changed.wait_for(lambda: member._held, PATIENCE)
        stopped[member.index] = done, signum

    monkeypatch.setattr(stop, "_request", signal.SIGTERM)
    first = threading.Thread(target=go_on, args=(members[1],), daemon=True)
    first.start()
    with members[2]._changed:
        members[2]._changed.wait_for(lambda: members[2]._held, PATIENCE)
    monkeypatch.setattr(stop, "_request", None)
    others = [threading.Thread(target=go_on, args=(each,), daemon=True) for each in members[::2]]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(PATIENCE)
    assert stopped == dict.fromkeys(range(3), (7, signal.SIGTERM))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_all_others_with_a_line(group, capfd, lost):
    members, _ = group(3)
    for member in members:
        member.standing = lambda: "step 8 is saved"
    lose(members[lost])
    assert group.ended(2) == dict.fromkeys({0, 1, 2} - {lost}, 1)
    lines = sorted(capfd.readouterr().err.splitlines())
    for i, line in zip(sorted({0, 1, 2} - {lost}), lines, strict=True):
        assert line.startswith(f"jaxkern: process {i}: process {lost} on {socket.gethostname()} is")
        assert line.endswith("; step 8 is saved")


def test_lines_of_several_processes_stay_whole(monkeypatch, tmp_path):
    """Where each write is a system call, as under PYTHONUNBUFFERED, a line is one of them."""

    class Writes(list):
        write = list.append

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", writes := Writes())
    stop.tell("process 1: process 0 is lost")
    assert cli.main(["sample", "--run", str(tmp_path)]) == 1
    assert len(writes) == 2
    assert all(line.startswith("jaxkern: ") and line.endswith("\n") for line in writes)


def test_a_process_that_is_silent_is_lost(group, capfd, monkeypatch):
    monkeypatch.setattr(wire, "LIMIT", 1.0)
    monkeypatch.setattr(wire, "BEAT", 1000.0)
    group(2)
    group.ended(2)
    assert "is lost (nothing was heard of it for 1 s)" in capfd.readouterr().err


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_ends_the_others(group, capfd, failing):
    members, _ = group(3)
    members[failing].fail(RunError("the disk is full"))
    assert group.ended(2) == dict.fromkeys({0, 1, 2} - {failing}, 1)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert f"process {failing} on {socket.gethostname()} ended by an error that it" in line


def test_all_end_together(group):
    members, _ = group(3)
    threads = [threading.Thread(target=each.finish, daemon=True) for each in members]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.1)
    assert threads[0].is_alive()
    threads[2].start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_processes_that_were_started_otherwise_are_refused(group):
    _, errors = group(2, [{"steps": "5"}, {"steps": "6"}])
    assert len(set(errors.values())) == 1
    assert "--steps of process 1 on" in errors[0]
    assert "is 6 and of process 0 5; start all with the same flags" in errors[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"process": 0}, r"two processes were started with --process 0, on \S+ and b; number them"),
        ({"processes": 3}, "process 1 on b was started with --processes 3 and process 0 with 2; "),
        ({"version": "0"}, "process 1 on b has jaxkern 0 and process 0 .*; install the same"),
        ({"flags": {"lr": "1"}}, "--lr of process 1 on b is 1 and of process 0 its default; "),
        ({}, None),
    ],
)
def test_who_may_join(changes, words):
    hello = {"process": 1, "processes": 2, "host": "b", "version": jaxkern.__version__, "flags": {}}
    wrong = several.Several(Told("a:1", 2, 0, ""), {})._wrong(hello | changes)
    assert (wrong is None) if words is None else re.match(words, wrong or "")


def test_a_process_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(several, "JOINING", 0.1)
    member = several.Several(Told(f"127.0.0.1:{free_port()}", 2, 0, ""), {})
    with pytest.raises(RunError, match=r"process 1 did not join within 0.1 s; start all 2 with"):
        member.join()
    member = several.Several(Told(f"127.0.0.1:{free_port()}", 2, 1, ""), {})
    with pytest.raises(RunError, match=r"process 0 cannot be reached at 127.0.0.1:\d+ \("):
        member.join()


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        member = several.Several(Told(f"127.0.0.1:{port}", 2, 0, ""), {})
        with pytest.raises(RunError, match=f"listen to port {port}: Address already in use; "):
            member.join()


def test_a_folder_that_is_not_that_of_process_0_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_SEEING", 0.0)
    second = processes.Alone()
    second.main = False
    with run.held(tmp_path, processes.ALONE):
        second.share = lambda make: (tmp_path / ".lock").read_text()
        with run.held(tmp_path, second):
            pass
        second.share = lambda make: "another"
        for folder in (tmp_path, tmp_path / "missing"):
            with (
                pytest.raises(RunError, match="is not the folder that process 0 has; name one on"),
                run.held(folder, second),
            ):
                pass


# Two that train


class Run:
    """Two processes of a command, of two CPU devices each."""

    def __init__(self, folder, *argv):
        port = free_port()
        flags = os.environ.get("XLA_FLAGS", "")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
        }
        self.outputs = [folder / f"{port}-{i}" for i in range(2)]
        self.processes = []
        for i, output in enumerate(self.outputs):
            which = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", i]
            command = [sys.executable, "-m", "jaxkern", *map(str, [*argv, *which])]
            with open(output, "w") as file:
                self.processes.append(
                    subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                )

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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"text": f"{i} times {i} is {i * i}."}) for i in range(1500))
    path.write_text("\n".join(lines))
    return path


def common(text, out):
    argv = ["train", "--preset", "micro", "--scan-layers", "--data", text, "--out", out]
    argv += ["--batch-size", 8, "--grad-accum", 2, "--steps", 6, "--eval-every", 3]
    return [*argv, "--eval-batches", 1, "--checkpoint-every", 3, "--log-every", 3]


def losses(out):
    records = read_metrics(out / "metrics.jsonl")
    return [record.get("loss", record.get("validation_loss")) for record in records]


def test_two_processes_have_the_losses_of_one(text, tmp_path, capsys):
    """Packed documents and fsdp; what they leave goes on in one process."""
    if len(jax.devices()) < 4:
        pytest.skip("one process has four devices")
    two, one = tmp_path / "two", tmp_path / "one"
    shared = ["--pack", "--mesh", "data=2,fsdp=2"]
    started = Run(tmp_path, *common(text, two), *shared)
    command(capsys, *common(text, one), *shared)
    codes, _ = started.wait()
    assert codes == [0, 0], started.text(0) + started.text(1)
    assert "4 × cpu" in started.text(0)
    assert "a sample:" in started.text(0)
    assert "loss" not in started.text(1)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert checkpoint.steps(two) == [3, 6]
    for out in (two, one):
        command(capsys, "train", "--resume", "--out", out, "--steps", 8)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)


def test_a_signal_stops_both_and_a_killed_process_ends_the_other(text, tmp_path):
    """Process 1 is asked to end, the run goes on, and process 0 is killed."""
    out = tmp_path / "run"
    saved = lambda: max(checkpoint.steps(out), default=0)
    shared = [*common(text, out), "--steps", 100_000, "--eval-every", 50_000]
    shared += ["--mesh", "fsdp=2,tensor=2"]
    two = Run(tmp_path, *shared)
    two.until(lambda: saved() >= 3)
    two.processes[1].send_signal(signal.SIGTERM)
    codes, lines = two.wait()
    assert codes == [143, 143], two.text(0) + two.text(1)
    stopped, again = saved(), f"with the same command for every process, and --resume --out {out}"
    for i, line in enumerate(lines):
        assert f"process {i}: stopped (SIGTERM): step {stopped} of 100000 is saved in" in line
        assert line.endswith(f"; continue {again}")
    two = Run(tmp_path, *shared, "--resume")
    two.until(lambda: saved() > stopped)
    two.processes[0].kill()
    codes, (_, line) = two.wait()
    assert codes == [-signal.SIGKILL, 1]
    assert f"jaxkern: process 1: process 0 on {socket.gethostname()} is lost (" in line
    assert line.endswith(f"is saved in {out}; continue {again}")
