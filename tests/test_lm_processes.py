"""Several processes of a run: how they are found, agree and end, and two that train."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import jax
import pytest

from jaxkern.lm import checkpoint, cli, processes
from jaxkern.lm import train as train_module
from jaxkern.lm.config import RunError
from jaxkern.lm.report import read_metrics
from tests.language_models import command

PATIENCE = 300  # seconds, of a machine that does much else
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"}
PAIRS = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
MPI_5 = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPI_5 |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPI = MPI_5 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
OF = lambda devices, **more: {"num_processes": 4, "local_device_ids": devices} | more


def launched(monkeypatch, variables):
    """Sets what a launcher does, for a process that sees four GPUs."""
    for name in {*os.environ}:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    for name, value in ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"} | variables).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, OF([])),  # one task on the node has all of its GPUs
        (PAIRS, OF([2, 3])),
        (PAIRS | {"CUDA_VISIBLE_DEVICES": "2"}, OF([])),  # the launcher has given it one
        (PAIRS | {"SLURM_GPUS_PER_TASK": "4"}, OF([])),
        (SLURM | MPI, OF([2, 3])),  # inside a job of Slurm
        (MPI_5, OF([2, 3], cluster_detection_method="mpi4py")),
        (SLURM | MPICH, OF([])),  # Slurm may set these variables, too
        (POD, {"local_device_ids": []}),
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in an allocation of 4 tasks
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (MPICH | {"PMI_SIZE": "1"}, None),
    ],
)
def test_a_process_is_told_of_others_by_a_cluster_or_by_flags(monkeypatch, variables, expected):
    launched(monkeypatch, variables)
    assert processes.find(None, 1, None) is None
    by_flags = {"coordinator_address": "a:1", "num_processes": 4, "process_id": 1}
    assert by_flags.items() <= (processes.find("a:1", 4, 1) or {}).items()
    assert processes.find(None, None, None) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (MPICH, "PMI_SIZE=4 is of MPICH or Intel MPI, which do not tell .*; name --"),
        (MPICH | SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, "PMI_SIZE=4 is of"),
        (PAIRS | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "3 GPUs are not shared evenly by the 2"),
    ],
)
def test_processes_that_would_not_work_together_are_refused(monkeypatch, variables, words):
    launched(monkeypatch, variables)
    with pytest.raises(RunError, match=words):
        processes.find(None, None, None)


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot listen to port {port} .*another in --coord"):
            processes.Several({"coordinator_address": f"localhost:{port}", "process_id": 0})


def test_a_line_on_stderr_stays_whole(monkeypatch, tmp_path):
    """A line is one system call where each write is one, as under PYTHONUNBUFFERED."""
    monkeypatch.setattr(sys, "stderr", mock.Mock())
    assert cli.main(["sample", "--run", str(tmp_path)]) == 1
    (((line,), _),) = sys.stderr.write.call_args_list
    assert re.fullmatch("jaxkern: .*\n", line)


def test_a_folder_that_is_not_that_of_process_0_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "_SEEING", 0.0)
    second = processes.Alone()
    second.main = False
    with train_module.held(tmp_path, processes.ALONE):
        second.share = lambda make: (tmp_path / ".lock").read_text()
        train_module.held(tmp_path, second).__enter__()
        second.share = lambda make: "another"
        for folder in (tmp_path, tmp_path / "missing"):
            with pytest.raises(RunError, match="is not the folder that process 0 has"):
                train_module.held(folder, second).__enter__()


@pytest.fixture
def start(tmp_path):
    """Starts two processes of a Python program, of two CPU devices each; gives them and outputs."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    started = []

    def start(*line, own=((), ())):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        outputs = [tmp_path / f"{port}-{i}" for i in range(2)]
        for i, output in enumerate(outputs):
            which = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", i]
            options = {"env": os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}}
            with open(output, "w") as file:
                argv = [sys.executable, *map(str, [*line, *which, *own[i]])]
                started.append(subprocess.Popen(argv, stdout=file, stderr=file, **options))
        return started[-2:], lambda: [output.read_text(errors="replace") for output in outputs]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition, two):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert all(process.poll() is None for process in two)
        assert time.monotonic() < end
        time.sleep(0.05)


AGREEING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxkern.lm import cli, processes, stop

def train(flags):
    found = processes.find(sys.argv[2], int(sys.argv[4]), int(sys.argv[6]))
    with processes.joined(found, flags) as peers, stop.deferred():
        print(peers.share(lambda: ["é", "a" * 1000][: 2 - peers.index]), flush=True)
        stop.tell("begun")
        for step in range(1, 10_000):
            if signum := peers.stop_after(step):
                raise stop.Stopped(signum, f"step {step} is saved")
            time.sleep(0.02 + 0.02 * peers.index)

code = cli._run(train, {})
processes.current.leave(code)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_process_stops_both_after_one_step(start, signum):
    two, texts = start("-c", AGREEING)
    until(lambda: all("begun" in text for text in texts()), two)
    two[1].send_signal(signum)
    assert [each.wait(PATIENCE) for each in two] == [128 + signum] * 2, texts()
    ends = [text.splitlines()[-1].partition(f"process {i}: ") for i, text in enumerate(texts())]
    assert ends[0][2] == ends[1][2]
    assert re.fullmatch(rf"stopped \({signum.name}\): step \d+ is saved", ends[0][2])
    assert ["aaa" in text for text in texts()] == [True, False]  # one prints


def test_processes_with_different_flags_are_refused(start, tmp_path):
    line = "-m", "jaxkern", "train", "--out", tmp_path / "run"
    two, texts = start(*line, own=(["--steps", 5], ["--steps", 6]))
    assert [each.wait(PATIENCE) for each in two] == [1, 1], texts()
    words = "--steps of process 1 is 6 and of process 0 5; start all with the same\n"
    assert all(text.endswith(f"process {i}: error: {words}") for i, text in enumerate(texts()))
    assert not (tmp_path / "run").exists()


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
def test_two_processes_have_the_losses_of_one(start, train, tmp_path, capsys):
    """Packed documents and fsdp; what they leave goes on in one process."""
    two, one = tmp_path / "two", tmp_path / "one"
    train += ["--pack", "--mesh", "data=2,fsdp=2", "--out"]
    started, texts = start("-m", "jaxkern", *train, two)
    command(capsys, *train, one)
    assert [each.wait(PATIENCE) for each in started] == [0, 0], texts()
    assert all(words in texts()[0] for words in ("4 × cpu", "a sample:"))
    assert "loss" not in texts()[1]
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert checkpoint.steps(two) == [3, 6]
    (two / "checkpoints" / "6").rename(two / "6")
    assert "continued from step 3" in command(capsys, "train", "--resume", "--out", two)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)


@pytest.mark.exhaustive
def test_a_signal_stops_both_and_a_killed_process_ends_the_other(start, train, tmp_path):
    """Process 1 is asked to end, the run goes on, and process 0 is killed."""
    out = tmp_path / "run"
    saved = lambda: max(checkpoint.steps(out), default=0)
    train += ["--out", out, "--steps", 100_000, "--eval-every", 50_000, "--mesh", "fsdp=2,tensor=2"]
    two, texts = start("-m", "jaxkern", *train)
    until(lambda: saved() >= 3, two)
    two[1].send_signal(signal.SIGTERM)
    assert [each.wait(PATIENCE) for each in two] == [143, 143], texts()
    stopped = saved()
    for i, text in enumerate(texts()):
        line = text.splitlines()[-1]
        assert f"process {i}: stopped (SIGTERM): step {stopped} of 100000 is saved in" in line
        assert line.endswith(f"the same command for every process, and --resume --out {out}")
    two, texts = start("-m", "jaxkern", *train, "--resume")
    until(lambda: saved() > stopped, two)
    two[0].kill()
    killed = time.monotonic()
    assert two[1].wait(PATIENCE) in (-signal.SIGABRT, 1)  # by JAX, or before by itself
    assert time.monotonic() - killed < 60
    assert re.search(r"another task died|another process is lost \(", texts()[1])
