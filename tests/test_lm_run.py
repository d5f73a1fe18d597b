"""Whole runs of the command line, as a user has them: learning, killing, resuming, sampling."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxkern.lm import checkpoint
from jaxkern.lm.config import PRESETS
from jaxkern.lm.report import read_metrics

STEPS, EVERY = 500, 20
MICRO = ["train", "--preset", "micro", "--log-every", "10", "--eval-batches", "4"]


def environment(devices=1):
    # Compiling unoptimised takes a third of the time; the programs are the same.
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def start(*argv, devices=1):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxkern", *map(str, argv)],
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*argv, devices=1, code=0):
    process = start(*argv, devices=devices)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out if code == 0 else err


def losses(folder):
    """Everything that a run records, but for its speed."""
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        record.pop("tokens_per_second", None)
    return records


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences from a few words, in thirty files."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = ["the", "a", "scan", "state", "of", "gate", "and", "chunk", "step", "reads", "keeps"]
    for i in range(30):
        lines = [" ".join(generator.choices(words, k=9)) + ".\n" for _ in range(40)]
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run that nothing disturbed: its folder and its output."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    argv = ["--data", text, "--out", out, "--steps", STEPS, "--checkpoint-every", EVERY]
    return out, run(*MICRO, *argv)


def test_a_run_learns_and_leaves_its_results(finished, text):
    out, printed = finished
    records = losses(out)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    validation = {
        r["step"]: r["validation_bits_per_byte"] for r in records if "validation_loss" in r
    }
    assert list(validation) == list(range(0, STEPS + 1, PRESETS["micro"].eval_every))
    assert 7.5 < validation[0] < 8.5
    assert validation[STEPS] < 2.5  # the rows are random words, eleven of them
    assert records[-1]["bits_per_byte"] == pytest.approx(records[-1]["loss"] / 0.6931471805599453)

    config = json.loads((out / "config.json").read_text())
    assert config["flags"]["preset"] == "micro"
    assert config["flags"]["data"] == [str(text)]
    assert config["model"]["d_model"] == 16
    assert len(config["data"]["fingerprint"]) == 32
    assert {"jax", "flax", "jaxkern"} <= config["versions"].keys()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint.steps(out) == [STEPS - 2 * EVERY, STEPS - EVERY, STEPS]

    assert f"step {STEPS}/{STEPS} · loss " in printed
    assert f"validation {validation[STEPS]:.3f} bits/byte after {STEPS} steps" in printed
    assert "tokens/s" in printed
    assert f"jaxkern sample --run {out}" in printed
    sample = printed.split("a sample:\n\n")[1].split("\n\nmore:")[0]
    assert len(sample.encode()) == 300
    assert " the " in sample


@pytest.mark.newest
def test_kill_and_resume_gives_the_same_losses(finished, text, tmp_path):
    """Killed twice with SIGKILL, once in the middle of whatever it was doing."""
    out = tmp_path / "killed"
    argv = [*MICRO, "--data", text, "--steps", STEPS, "--checkpoint-every", EVERY]
    kills = [5 * EVERY, 12 * EVERY]
    for resume, after in zip(([], ["--resume"]), kills, strict=True):
        process = start(*argv, "--out", out, *resume)
        while not (out / "checkpoints" / str(after)).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        time.sleep(random.Random(after).uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert after <= max(checkpoint.steps(out)) < STEPS
    printed = run("train", "--resume", "--out", out)
    assert "continued from step" in printed
    assert losses(out) == losses(finished[0])

    (out / "loss.png").unlink()  # as if killed between the last checkpoint and the picture
    printed = run("train", "--resume", "--out", out)
    assert f"already trained for {STEPS} steps" in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.newest
def test_a_finished_run_goes_on_with_more_steps(finished, tmp_path):
    out = tmp_path / "longer"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    before = losses(out)
    run("train", "--resume", "--out", out, "--steps", STEPS + 10)
    after = losses(out)
    assert after[: STEPS + 1] == before
    assert [record["step"] for record in after[STEPS + 1 :]] == list(range(STEPS + 1, STEPS + 11))
    assert json.loads((out / "config.json").read_text())["flags"]["steps"] == STEPS + 10


def test_a_run_is_not_overwritten_nor_changed(finished, tmp_path):
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert "already holds a run; add --resume" in run(*MICRO, "--out", out, code=1)
    argv = ["train", "--resume", "--out", out]
    assert "--lr 0.5 differs" in run(*argv, "--lr", "0.5", code=1)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert after == before


@pytest.mark.newest
def test_resuming_from_a_damaged_checkpoint_is_one_line(finished, tmp_path):
    out = tmp_path / "damaged"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    manifest = out / "checkpoints" / str(STEPS) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0", "1"))
    for argv in (
        ["train", "--resume", "--out", out, "--steps", STEPS + 10],
        ["sample", "--run", out],
    ):
        err = run(*argv, code=1)
        assert err.count("\n") == 1
        assert f"delete that folder to go back to step {STEPS - EVERY}" in err


@pytest.mark.newest
def test_sample(finished):
    argv = ["sample", "--run", finished[0], "--prompt", "the ", "--length", 50]
    first = run(*argv, "--seed", 3)
    assert first.startswith("the ")
    assert len(first.encode()) == len("the ") + 50 + len("\n")
    assert run(*argv, "--seed", 3) == first
    greedy = run(*argv, "--temperature", 0)
    assert greedy != first


@pytest.mark.newest
def test_two_devices_give_the_losses_of_one(text, tmp_path):
    argv = [*MICRO, "--data", text, "--steps", "5"]
    run(*argv, "--out", tmp_path / "one", devices=2)
    run(*argv, "--out", tmp_path / "two", "--devices", "all", devices=2)
    devices = [
        json.loads((tmp_path / name / "config.json").read_text())["devices"]
        for name in ("one", "two")
    ]
    assert [len(kinds) for kinds in devices] == [1, 2]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=2e-5)
