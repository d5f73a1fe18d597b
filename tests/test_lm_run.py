"""Whole runs of the command line, as a user has them: learning, stopping, resuming, sampling.

They run in this process, where a program is compiled once for all runs of one configuration, and in
processes of their own where it matters how these end.
"""

import contextlib
import errno
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import orbax.checkpoint as ocp
import pytest

from jaxkern.lm import checkpoint, cli, data, sample
from jaxkern.lm import train as train_module
from jaxkern.lm.report import read_metrics

STEPS, EVERY, EVAL_EVERY = 250, 50, 25
MICRO = ["train", "--preset", "micro", "--eval-batches", "4", "--eval-every", EVAL_EVERY]


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_once():
    compile_programs = train_module.compile_programs

    @functools.cache
    def compiled(config, placement, x64):
        return compile_programs(config, placement, fresh=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_module,
            "compile_programs",
            lambda config, place, *, fresh: compiled(config, place, jax.config.jax_enable_x64),
        )
        patch.setattr(train_module, "keep_programs", lambda: None)
        yield


def run(*argv, code=0):
    """What a command prints, or with a code its line on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        returned = cli.main([str(arg) for arg in argv])
    assert returned == code, err.getvalue()
    if code == 0:
        return out.getvalue()
    assert err.getvalue().count("\n") == 1
    return err.getvalue()


# Sends a signal to itself at an exact place: "step", "import", "compile" or "write", twice or once.
DRIVER = """
import os, signal, sys, time

place, name, *argv = sys.argv[1:]
strike = lambda: os.kill(os.getpid(), getattr(signal, name))
if place == "import":
    class Finder:
        def find_spec(self, module, path=None, target=None):
            if module == "jax.numpy":
                strike()
    sys.meta_path.insert(0, Finder())
else:
    import orbax.checkpoint as ocp
    from jaxkern.lm import data, program
    batch, write = data.train_batch, ocp.StandardCheckpointer.save
    def train_batch(text, *, step, **options):
        if place == "step" and step == 70:
            strike()
        return batch(text, step=step, **options)
    def save(self, *args):
        write(self, *args)
        if place == "write":
            strike()
    def lowered_step(config, placement):
        strike()
        time.sleep(1000)
    data.train_batch, ocp.StandardCheckpointer.save = train_batch, save
    if place == "compile":
        program.lowered_step = lowered_step
import runpy
sys.argv = ["bin/jaxkern", *argv]
runpy.run_module("jaxkern", run_name="__main__", alter_sys=True)
"""


def drive(place, name, *argv):
    """Run a command in a process that a signal meets: its exit code, stdout and stderr."""
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, place, name, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return process.returncode, process.stdout, process.stderr


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
def argv(text):
    return [*MICRO, "--data", text, "--steps", STEPS, "--checkpoint-every", EVERY]


@pytest.fixture(scope="module")
def finished(argv, tmp_path_factory):
    """A run that nothing disturbed: its folder and its output."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, run(*argv, "--out", out)


@pytest.fixture
def during(monkeypatch):
    """A function that has something done while the batch after a step is made."""
    batch = data.train_batch

    def arrange(after, act):
        def train_batch(*args, step, **options):
            if step == after:
                act()
            return batch(*args, step=step, **options)

        monkeypatch.setattr(data, "train_batch", train_batch)

    return arrange


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "copied")


def test_a_run_learns_and_leaves_its_results(finished, text):
    out, printed = finished
    records = losses(out)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    validation = {
        r["step"]: r["validation_bits_per_byte"] for r in records if "validation_loss" in r
    }
    assert list(validation) == list(range(0, STEPS + 1, EVAL_EVERY))
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

    assert printed.index("compiling") < printed.index("compiled the step in")
    assert f"step {STEPS}/{STEPS} · loss " in printed
    assert f"step {STEPS}/{STEPS} · saving took " in printed
    assert f"validation {validation[STEPS]:.3f} bits/byte after {STEPS} steps" in printed
    assert "tokens/s" in printed
    assert f"jaxkern sample --run {out}" in printed
    sample = printed.split("a sample:\n\n")[1].split("\n\nmore:")[0]
    assert len(sample.encode()) == 300
    assert " the " in sample


@pytest.mark.newest
def test_a_stopped_or_killed_run_goes_on_to_the_same_losses(finished, argv, tmp_path):
    """Stopped between two checkpoints, killed while it writes one, and stopped while it writes."""
    out = tmp_path / "stopped"
    code, printed, line = drive("step", "SIGTERM", *argv, "--out", out)
    assert code == 143
    assert line == (
        f"jaxkern: stopped (SIGTERM): step 71 of {STEPS} is saved in {out}; continue with: "
        f"jaxkern train --resume --out {out}\n"
    )
    assert "step  71/250 · saving took " in printed
    assert checkpoint.steps(out) == [EVERY, 71]
    assert losses(out) == losses(finished[0])[:72]

    code, _, line = drive("write", "SIGKILL", "train", "--resume", "--out", out)
    assert (code, line) == (-signal.SIGKILL, "")
    assert checkpoint.steps(out) == [EVERY, 71]
    assert (out / "checkpoints" / "100.partial").exists()

    with pytest.MonkeyPatch.context() as patch:
        write = ocp.StandardCheckpointer.save

        def save(self, *args):
            write(self, *args)
            patch.undo()
            os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(ocp.StandardCheckpointer, "save", save)
        line = run("train", "--resume", "--out", out, code=130)
    # Steps go on while step 100 is written: how many depends on the machine.
    at = int(re.search(rf"stopped \(SIGINT\): step (\d+) of {STEPS} is saved in ", line)[1])
    assert at > 100
    assert {100, at} < {EVERY, *checkpoint.steps(out)}

    assert f"continued from step {at}" in run("train", "--resume", "--out", out)
    assert losses(out) == losses(finished[0])
    (out / "loss.png").unlink()  # as if killed between the last checkpoint and the picture
    printed = run("train", "--resume", "--out", out)
    assert f"already trained for {STEPS} steps" in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.newest
@pytest.mark.parametrize("room", [True, False], ids=["device", "host"])
def test_steps_go_on_while_a_checkpoint_is_written(
    finished, argv, tmp_path, during, monkeypatch, room
):
    """It is of its own step, however many have followed when it is written."""
    out, write, reached = tmp_path / "run", checkpoint.save, threading.Event()

    def save(run, step, **state):
        assert step != EVERY or reached.wait(300)
        write(run, step, **state)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(train_module, "has_room", lambda *of: room)
    during(EVERY + 20, lambda: (reached.set(), os.kill(os.getpid(), signal.SIGTERM)))
    line = run(*argv, "--out", out, code=143)
    assert f"step {EVERY + 21} of {STEPS} is saved" in line
    assert checkpoint.steps(out) == [EVERY, EVERY + 21]
    shutil.rmtree(out / "checkpoints" / str(EVERY + 21))
    during(EVERY + 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
    run("train", "--resume", "--out", out, code=143)
    assert losses(out) == losses(finished[0])[: EVERY + 11]


@pytest.mark.newest
def test_a_checkpoint_that_cannot_be_written_ends_the_run(argv, tmp_path, monkeypatch):
    write = checkpoint.save

    def save(run, step, **state):
        if step == 2 * EVERY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, step, **state)

    monkeypatch.setattr(checkpoint, "save", save)
    assert "the disk is full; free some space" in run(*argv, "--out", tmp_path / "run", code=1)
    assert checkpoint.steps(tmp_path / "run") == [EVERY]


@pytest.mark.newest
@pytest.mark.parametrize("place", ["import", "compile"])
def test_ctrl_c_before_training_is_one_line_and_leaves_nothing(place, argv, tmp_path):
    out = tmp_path / "run"
    code, _, err = drive(place, "SIGINT", *argv, "--out", out)
    assert code == (-signal.SIGINT if place == "import" else 130)  # a shell has 130 for both
    assert re.fullmatch(r"jaxkern: stopped \(SIGINT\).*\n", err)
    assert not out.exists()


@pytest.mark.newest
def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal; from jaxkern.lm import stop\n"
        "with stop.handled(), stop.deferred():\n"
        "    for signum in (signal.SIGTERM, signal.SIGINT):\n"
        "        os.kill(os.getpid(), signum)\n"
        "        print('goes on', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "")


@pytest.fixture
def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as file:
        yield file


@pytest.mark.newest
@pytest.mark.parametrize("interrupt", [False, True], ids=["head", "tee"])
def test_a_run_whose_output_closes_saves_its_step(argv, tmp_path, during, closed_pipe, interrupt):
    """As of ``jaxkern train | head``, and of ``| tee log`` where Ctrl-C ends tee too."""

    def close():
        sys.stdout = closed_pipe
        if interrupt:
            os.kill(os.getpid(), signal.SIGINT)

    during(12, close)
    line = run(*argv, "--out", tmp_path / "run", code=130 if interrupt else 141)
    step, why = (13, "SIGINT") if interrupt else (20, "its output was closed")
    assert f"stopped ({why}): step {step} of {STEPS} is saved in {tmp_path / 'run'}; cont" in line
    assert checkpoint.steps(tmp_path / "run") == [step]


def test_ctrl_c_while_sampling_is_one_line(finished, copied, monkeypatch):
    def stream(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sample, "stream", stream)
    line = run("sample", "--run", finished[0], code=130)
    assert line == "jaxkern: stopped (SIGINT)\n"
    shutil.rmtree(copied / "checkpoints" / str(STEPS))
    line = run("train", "--resume", "--out", copied, code=130)
    assert f"training is finished, and step {STEPS} is saved in {copied}; sample with: " in line
    assert checkpoint.steps(copied)[-1] == STEPS


@pytest.mark.newest
def test_a_finished_run_goes_on_with_more_steps(finished, copied):
    before = losses(copied)
    run("train", "--resume", "--out", copied, "--steps", STEPS + 10, "--log-every", 5)
    after = losses(copied)
    assert after[: STEPS + 1] == before
    assert [record["step"] for record in after[STEPS + 1 :]] == list(range(STEPS + 1, STEPS + 11))
    assert json.loads((copied / "config.json").read_text())["flags"]["steps"] == STEPS + 10


@pytest.mark.newest
@pytest.mark.skipif(len(jax.devices()) < 2, reason="one device cannot share a batch")
def test_two_devices_give_the_losses_of_one_which_may_go_on_alone(finished, argv, tmp_path, during):
    out = tmp_path / "run"
    during(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert "step 6 of" in run(*argv, "--devices", 2, "--out", out, code=143)
    devices = lambda: json.loads((out / "config.json").read_text())["devices"]
    assert len(devices()) == 2
    for two, one in zip(losses(out), losses(finished[0])[:7], strict=True):
        assert two == pytest.approx(one, rel=2e-5)
    during(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert "step 8 of" in run("train", "--resume", "--out", out, "--devices", 1, code=143)
    assert len(devices()) == 1
    assert checkpoint.steps(out) == [6, 8]


@pytest.mark.newest
def test_a_run_of_mamba2_goes_on_to_the_same_losses_and_is_sampled(text, tmp_path, during):
    argv = ["train", "--preset", "mamba2-micro", "--data", text, "--steps", 40]
    argv += ["--eval-batches", 1, "--checkpoint-every", 15]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert "a sample:" in run(*argv, "--out", whole)
    during(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert "step 6 of 40" in run(*argv, "--out", out, code=143)
    stored = json.loads((out / "config.json").read_text())["model"]
    assert (stored["block"], stored["headdim"], stored["dt_limit"]) == ("mamba2", 8, [0.0, "inf"])
    assert "continued from step 6" in run("train", "--resume", "--out", out)
    assert losses(out) == losses(whole)
    assert losses(out)[-1]["loss"] < losses(out)[0]["validation_loss"] * 0.7
    assert run("sample", "--run", out, "--prompt", "the ", "--length", 8).startswith("the ")

    if len(jax.devices()) > 1:
        during(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run(*argv, "--devices", 2, "--out", tmp_path / "two", code=143)
        for two, one in zip(losses(tmp_path / "two"), losses(whole)[:4], strict=True):
            assert two == pytest.approx(one, rel=2e-5)


def test_a_run_is_not_overwritten_nor_changed(finished):
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert "already holds a run; add --resume" in run(*MICRO, "--out", out, code=1)
    argv = ["train", "--resume", "--out", out]
    assert "--lr 0.5 differs" in run(*argv, "--lr", "0.5", code=1)
    assert f"--steps 3 differs from the run's {STEPS} and can only grow" in run(
        *argv, "--steps", "3", code=1
    )
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert after == before


@pytest.mark.newest
def test_resuming_goes_back_from_a_damaged_checkpoint(finished, copied):
    manifest = copied / "checkpoints" / str(STEPS) / "manifest.json"
    manifest.write_text(manifest.read_text()[:-100])
    printed = run("train", "--resume", "--out", copied)
    path = manifest.parent
    assert f"checkpoint {path} is damaged: its manifest.json is no manifest; " in printed
    assert f"renamed to .damaged, and the run goes back to step {STEPS - EVERY}" in printed
    assert f"continued from step {STEPS - EVERY}" in printed
    assert losses(copied) == losses(finished[0])
    assert checkpoint.newest(copied, train_module.TrainConfig.from_flags({"preset": "micro"}).model)
    assert path.with_name(f"{STEPS}.damaged").is_dir()


def edit(name, **values):
    """A change of config.json that replaces values of a table in it."""

    def change(run):
        path = run / "config.json"
        config = json.loads(path.read_text())
        if name is None:
            config |= values
        else:
            config[name] |= values
        path.write_text(json.dumps(config))

    return change


def write(name, content):
    return lambda run: (run / name).write_bytes(content)


def take_another_presets_checkpoint(run):
    manifest = run / "checkpoints" / str(STEPS) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["model"] |= {"d_model": 128, "n_layers": 4, "d_state": 16}
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (write("config.json", b'{"format": "jaxk'), "config.json is damaged (Unterminated string"),
        (write("config.json", b"\xff"), "config.json is damaged ("),
        (write("config.json", b"[]"), "not written by this version of jaxkern"),
        (edit(None, format="jaxkern-lm-0"), "its format is 'jaxkern-lm-0', not 'jaxkern-lm-1'"),
        (edit(None, flags=None), 'config.json is damaged: it has no "flags"'),
        (edit("flags", speed=9), "flags.speed is no flag of this version"),
        (edit("flags", steps=-3), "flags.steps cannot be -3"),
        (edit("flags", lr=float("nan")), "flags.lr cannot be nan"),
        (edit("flags", devices=2), "flags.devices cannot be 2"),
        (edit("model", d_model=32), "model is not that of preset micro: d_model is 32, not 16."),
        (edit("model", width=32), "model is not that of preset micro: "),
        (edit(None, precision="fp8"), "precision is 'fp8', and by flags.mixed_precision it is"),
        (edit("data", fingerprint="0"), "is not the data that this run began with"),
        (write("corpus/train.bin", b"other text"), "is missing or has changed"),
        (write("metrics.jsonl", b'{"step": 0}\nhello\n'), "metrics.jsonl, line 2 is not a record"),
        (
            take_another_presets_checkpoint,
            "is of preset tiny, and the run is of preset micro: d_model is 128, not 16, ",
        ),
    ],
)
def test_what_cannot_be_resumed_is_told_before_anything_is_compiled(
    copied, monkeypatch, harm, words
):
    monkeypatch.delattr(train_module, "compile_programs")
    harm(copied)
    before = sorted(copied.rglob("*"))
    assert words in run("train", "--resume", "--out", copied, "--steps", STEPS + 10, code=1)
    assert sorted(copied.rglob("*")) == before


def test_sample(finished):
    argv = ["sample", "--run", finished[0], "--prompt", "the ", "--length", 50]
    first = run(*argv, "--seed", 3)
    assert first.startswith("the ")
    assert len(first.encode()) == len("the ") + 50 + len("\n")
    assert run(*argv, "--seed", 3) == first
    greedy = run(*argv, "--temperature", 0)
    assert greedy != first


@pytest.mark.newest
def test_double_precision_changes_nothing(finished, argv, tmp_path, during):
    """Under JAX_ENABLE_X64 the run's arrays are those that it has without."""
    out = tmp_path / "run"
    during(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        assert "step 6 of" in run(*argv, "--out", out, code=143)
        assert len(run("sample", "--run", out, "--length", 16, "--temperature", 0)) > 1
    finally:
        jax.config.update("jax_enable_x64", before)
    for wide, narrow in zip(losses(out), losses(finished[0])[:7], strict=True):
        assert wide == pytest.approx(narrow, rel=1e-6)
    during(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert "step 8 of" in run("train", "--resume", "--out", out, code=143)  # float32 and int32
    assert checkpoint.steps(out) == [6, 8]
