"""Whole runs of the command line, as a user has them: stopped, resumed, looked at, sampled.

Most are of a step that stands in for the model's: it is compiled in no time, and its losses depend
on every batch, learning rate and array of the state before. Those of the model compile it once.
"""

import contextlib
import dataclasses
import errno
import functools
import gzip
import importlib.util
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
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event

import jaxkern.lm
from jaxkern.lm import checkpoint, cli, data, program, report, sample, stop
from jaxkern.lm import train as train_module
from jaxkern.lm.config import PRESETS, RunError, TrainConfig
from jaxkern.lm.report import read_metrics
from jaxkern.lm.step import TrainState, learning_rate
from jaxkern.precision import DynamicLossScale, NoOpLossScale

STEPS, EVERY = 20, 5  # of a run of the stand-in
REAL_STEPS = 60
ONE = dataclasses.replace(PRESETS["micro"].model, n_layers=1)


@pytest.fixture(scope="module", autouse=True)
def small_models():
    """Models of one layer, of which each program is compiled once."""
    compiled = functools.cache(lambda *of: program.compile_programs(*of, fresh=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "compile_programs", lambda *of, fresh: compiled(*of))
        for name in ("micro", "mamba2-micro"):
            model = dataclasses.replace(PRESETS[name].model, n_layers=1)
            patch.setitem(PRESETS, name, dataclasses.replace(PRESETS[name], model=model))
        yield


interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
terminate = functools.partial(signal.raise_signal, signal.SIGTERM)


def run(*argv, code=0, after=None, act=terminate):
    """What a command prints, or with a code its line on stderr.

    Where a step is named, something is done while the batch after it is made.
    """
    batches, out, err = data.Corpus.batches, io.StringIO(), io.StringIO()

    class Batches:
        def __init__(self, corpus, config):
            self.drawn = batches(corpus, config)
            self.get_state, self.set_state = self.drawn.get_state, self.drawn.set_state

        def __next__(self):
            if self.drawn.get_state()["next_index"] == after:
                act()
            return next(self.drawn)

    with (
        mock.patch.object(data.Corpus, "batches", lambda *args: Batches(*args)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        returned = cli.main([str(arg) for arg in argv])
    assert returned == code, err.getvalue()
    assert code == 0 or err.getvalue().count("\n") == 1
    return (err if code else out).getvalue()


def resume(out, *argv, **options):
    return run("train", "--resume", "--out", out, *argv, **options)


PARTIAL = ".orbax-checkpoint-tmp"  # behind the name of a checkpoint that is being written


@contextlib.contextmanager
def writing(act):
    """Inside, something is done when the arrays of a step are written, before it has its name."""
    begin = ocp.PyTreeCheckpointHandler.async_save

    class Act:
        def __init__(self, folder):
            self.step = int(re.search(r"/(\d+)[^/]*/[^/]*$", str(folder))[1])

        def result(self, timeout=None):
            act(self.step)

    async def async_save(self, directory, *args, **options):
        return [*(await begin(self, directory, *args, **options) or []), Act(directory)]

    with mock.patch.object(ocp.PyTreeCheckpointHandler, "async_save", async_save):
        yield


def losses(folder):
    """Everything that a run records, but for its speed."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences from a few words, in three files."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = ["the", "a", "scan", "state", "of", "gate", "and", "chunk", "step", "reads", "keeps"]
    for i in range(3):
        lines = [" ".join(generator.choices(words, k=9)) + ".\n" for _ in range(200)]
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder


# Runs of the stand-in


@functools.cache
def stand_in(configuration, placement):
    """Programs that are compiled in no time, in place of those of a model."""
    state = program.abstract_state(configuration, placement)
    scales = program.precision_policy(configuration).compute == jnp.float16
    scale = DynamicLossScale() if scales else NoOpLossScale()
    zeros = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    def loss(params, windows):
        squares = [jnp.mean(leaf**2) for leaf in jax.tree.leaves(params)]
        return jnp.mean(windows.tokens / 256) + sum(squares)

    def step(state, windows, schedule):
        rate = learning_rate(schedule)(state.opt_state.count)
        floats = lambda leaf: leaf.dtype == jnp.float32
        value = loss([*filter(floats, jax.tree.leaves(state[:2]))], windows)
        finite = jnp.isfinite(value)

        def after(leaf):
            new = 0.9 * leaf + rate * value if floats(leaf) else leaf + 1
            return jnp.where(finite, new, leaf).astype(leaf.dtype)

        params, opt_state = jax.tree.map(after, state[:2])
        metrics = {"loss": value, "grad_norm": 2 * value, "learning_rate": rate}
        metrics |= {"skipped": 0, "loss_scale": state.loss_scale.loss_scale} if scales else {}
        next_scale = state.loss_scale.adjust(finite)
        return TrainState(params, opt_state, next_scale, state.step + 1), metrics

    init = lambda seed: jax.tree.map(zeros, state)._replace(loss_scale=scale)
    return program.Programs(init, jax.jit(step, donate_argnums=0), jax.jit(loss))


def standing_in(patch):
    same: dict = {"log_every": 1, "checkpoint_every": 1, "eval_every": 1, "eval_batches": 1}
    same |= {"keep": 1, "log_to": (), "data": ()}
    programs = lambda config, *args, fresh: stand_in(dataclasses.replace(config, **same), *args)
    patch.setattr(train_module, "compile_programs", programs)
    patch.setattr(train_module, "check_memory", lambda *args: None)
    patch.setattr(train_module, "has_room", lambda *args: True)
    patch.setattr(sample.LanguageModel, "write", lambda *args, **options: None)


stands_in = pytest.fixture(lambda monkeypatch: standing_in(monkeypatch))


@pytest.fixture(scope="module")
def argv(text):
    flags = {"preset": "micro", "data": text, "checkpoint-every": EVERY, "steps": STEPS}
    flags |= {"eval-every": 10, "eval-batches": 1}
    return ["train", *(f"--{name}={value}" for name, value in flags.items())]


@pytest.fixture(scope="module")
def finished(argv, tmp_path_factory):
    """A run of the stand-in that nothing disturbed: its folder."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        standing_in(patch)
        run(*argv, "--out", out)
    return out


@pytest.fixture
def copied(finished, tmp_path, stands_in):
    return shutil.copytree(finished, tmp_path / "copied")


def test_a_stopped_or_killed_run_goes_on_to_the_same_losses(finished, argv, tmp_path, stands_in):
    """Stopped between two checkpoints, killed while it writes one, and stopped while it writes."""
    out = tmp_path / "stopped"
    assert run(*argv, "--out", out, code=143, after=6) == (
        f"jaxkern: stopped (SIGTERM): step 7 of {STEPS} is saved in {out}; continue with: "
        f"jaxkern train --resume --out {out}\n"
    )
    assert checkpoint.steps(out) == [EVERY, 7]
    assert losses(out) == losses(finished)[:8]
    shutil.copytree(out / "checkpoints/7/state", out / f"checkpoints/10{PARTIAL}/state")
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(losses(finished)[8]) + '\n{"step": 9, "lo')

    with writing(lambda step: step == 10 and interrupt()):
        line = resume(out, code=130)
    # Steps go on while step 10 is written: how many depends on the machine.
    told = rf"stopped \(SIGINT\): (?:step (\d+) of {STEPS} is|training is finished, and step 20 is)"
    at = int(re.search(f"{told} saved in ", line)[1] or STEPS)
    assert at >= 10
    assert {10, at} <= {*checkpoint.steps(out)}
    printed = resume(out)
    assert at == STEPS or f"continued from step {at}" in printed
    assert losses(out) == losses(finished)
    assert not [*(out / "checkpoints").glob(f"*{PARTIAL}")]
    (out / "loss.png").unlink(missing_ok=True)  # as if killed between the last checkpoint and it
    assert f"already trained for {STEPS} steps" in resume(out)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"--out {out} already holds a run; add --resume" in run(*argv, "--out", out, code=1)


@pytest.mark.parametrize("room", [True, False], ids=["device", "host"])
def test_steps_go_on_while_a_checkpoint_is_written(
    finished, argv, tmp_path, monkeypatch, stands_in, room
):
    """It is of its own step, however many have followed when it is written."""
    out, reached = tmp_path / "run", threading.Event()
    monkeypatch.setattr(train_module, "has_room", lambda *of: room)
    stop_there = lambda: (reached.set(), terminate())
    with writing(lambda step: step != EVERY or reached.wait(300)):
        line = run(*argv, "--out", out, code=143, after=EVERY + 3, act=stop_there)
    assert f"step {EVERY + 4} of {STEPS} is saved" in line
    assert checkpoint.steps(out) == [EVERY, EVERY + 4]
    shutil.rmtree(out / "checkpoints" / str(EVERY + 4))
    resume(out, code=143, after=EVERY + 1)
    assert losses(out) == losses(finished)[: EVERY + 3]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(argv, tmp_path, stands_in):
    def fill(step):
        if step == 2 * EVERY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writing(fill):
        assert "the disk is full; free some space" in run(*argv, "--out", tmp_path / "run", code=1)
    assert checkpoint.steps(tmp_path / "run") == [EVERY]


def test_a_run_goes_back_from_a_damaged_checkpoint_and_on_with_more_steps(finished, copied):
    assert checkpoint.steps(copied) == [10, 15, STEPS]
    path, before = copied / "checkpoints" / str(STEPS), STEPS - EVERY
    largest = max((p for p in (path / "state").rglob("*") if p.is_file()), key=os.path.getsize)
    os.truncate(largest, largest.stat().st_size // 2)
    printed = resume(copied)
    told = rf"warning: checkpoint {path} cannot be read \(.*\); it is renamed to"
    assert re.search(told, printed)
    assert f"continued from step {before}" in printed
    assert losses(copied) == losses(finished)
    assert path.with_name(f"{STEPS}.damaged").is_dir()
    resume(copied, "--steps", STEPS + 10, "--log-every", 5, "--keep", 2, "--checkpoint-every", 1)
    after = losses(copied)
    assert after[: STEPS + 1] == losses(finished)
    assert [record["step"] for record in after[STEPS + 1 :]] == list(range(STEPS + 1, STEPS + 11))
    assert checkpoint.read(copied)[0].steps == STEPS + 10
    assert checkpoint.steps(copied) == [STEPS + 9, STEPS + 10]


def test_a_run_on_tokens_keeps_its_tokenizer_and_finds_them_elsewhere(tmp_path, stands_in):
    """The run trains on weighted sources and validates on others."""
    out, cache = tmp_path / "run", tmp_path / "cache"
    for i, name in enumerate("abcd"):
        texts = (f"{name} scan reads {i * j} é" for j in range(60))
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    a, b, c, d = (tmp_path / f"{name}.jsonl" for name in "abcd")
    argv = ["train", "--preset", "micro", "--tokenizer", "bpe:300", "--data", f"{a}=3", f"{b}=1"]
    argv += ["--eval-data", c, d, "--steps", 8, "--checkpoint-every", 4, "--eval-every", 4]
    run(*argv, "--out", out)
    *_, last = whole = losses(out)
    each = {f"/{path.name}": last[f"validation_loss/{path.name}"] for path in (c, d)}
    for name, loss in (each | {"": last["validation_loss"]}).items():
        assert last[f"validation_perplexity{name}"] == pytest.approx(np.exp(loss))
    assert min(each.values()) < last["validation_loss"] < max(each.values())
    # A loss of bytes is one of tokens by how many there are of each.
    assert 0.2 < last["validation_bits_per_byte"] * np.log(2) / last["validation_loss"] < 0.9
    config, info = checkpoint.read(out)
    assert config.vocab_size == config.model.vocab_size == 320
    assert info["tokenizer"] == {"begin": 0, "end": 0, "size": 300}

    shutil.rmtree(out / "checkpoints" / "8")
    (out / "corpus").rename(cache)
    assert "with --data-cache" in resume(out, code=1)
    (out / "tokenizer.json").unlink()
    assert "run/tokenizer.json is lost; copy it from" in run("sample", "--run", out, code=1)
    shown = resume(out, "--data-cache", cache)  # which puts it back
    assert all(told in shown for told in ("continued from step 4", " · perplexity ", "(c.jsonl "))
    assert losses(out) == whole
    ids = (model := sample.load(out)).encode("the scan reads é")
    assert (ids[0], model.decode(ids)) == (0, "the scan reads é")


def test_parallel_alone_is_over_all_devices(argv, tmp_path, monkeypatch):
    """Also on a CPU, where a run without it takes one."""
    count, compiled = len(jax.devices()), jax.jit(lambda: 0).lower().compile()
    none = program.Programs(lambda seed: TrainState({}, *[None] * 3), compiled, None)
    monkeypatch.setattr(train_module, "compile_programs", lambda *args, fresh: none)
    trained = train_module.Trained(tmp_path, 0, None, [], 0.0, None)
    describe = lambda self, state, done: self._describe(state) or trained
    monkeypatch.setattr(train_module.Trainer, "_train", describe)
    out, start = tmp_path / "one", [*argv, "--batch-size", count, "--out"]
    assert "device   1 × cpu" in run(*start, out)
    shared = f"device   {count} × cpu, fp32\nmesh     fsdp={count}\n"
    assert shared in run(*start, tmp_path / "all", "--parallel", "fsdp")
    assert shared in resume(out, "--parallel", "fsdp")
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    edit(out / "config.yaml", parallel=None, mesh="tensor=4")
    line = "jaxkern: error: --mesh tensor=4 is more than this machine's 1 devices (cpu)\n"
    assert resume(out, code=1) == line
    assert "error: --mesh fsdp=2 is more than" in resume(out, "--mesh", "fsdp=2", code=1)


def edit(path, **values):
    """Replaces values in a file of JSON or YAML, or some of a table there."""
    content = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
    for name, value in values.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


CONFIG, RECORD = "config.yaml", "run.json"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (RECORD, b'{"format": "jaxk', "damaged (Unterminated string"),
        (RECORD, {"format": "jaxkern-lm-1"}, "its format is 'jaxkern-lm-1', not 'jaxkern-lm-2'"),
        (RECORD, {"data": {"folder": "0"}}, "are missing or have changed since the run began"),
        (CONFIG, b"\xff", "config.yaml cannot be read ('utf-8' codec can't decode byte 0xff"),
        (CONFIG, {"mixed_precision": "fp8"}, "--mixed-precision fp8: "),
        (CONFIG, {"step": 3}, "config.yaml: step is no setting of a run; did you mean steps?"),
        ("metrics.jsonl", b'{"step": 0}\nhello\n', "metrics.jsonl, line 2 is not a record"),
    ],
)
def test_what_cannot_be_resumed_is_told_before_anything_is_compiled(
    copied, monkeypatch, file, change, words
):
    monkeypatch.delattr(train_module, "compile_programs")
    path = copied / file
    if isinstance(change, dict):
        edit(path, **change)
    else:
        path.write_bytes(change)
    before = sorted(copied.rglob("*"))
    assert words in resume(copied, "--steps", STEPS + 10, code=1)
    assert sorted(copied.rglob("*")) == before


@pytest.mark.parametrize(
    ("policy", "steps", "words"),
    [
        ("bf16", 40, r"at step 2 the loss is inf and the gradient norm inf; .* lower --lr than"),
        # The first step is done, and the scale halves from 2^15 to 1 while the next 15 are not.
        ("fp16", 40, r"at step 17 the loss is inf .*, or with --mixed-precision bf16"),
        ("fp16", 8, r"after 8 steps the validation loss is not a number; .* --lr than 1e\+30"),
    ],
)
def test_a_run_that_diverges_says_so(argv, tmp_path, stands_in, policy, steps, words):
    flags = ["--mixed-precision", policy, "--steps", steps, "--lr", 1e30, "--checkpoint-every", 100]
    line = run(*argv, *flags, "--out", tmp_path / "run", code=1)
    assert line.startswith("jaxkern: error: training diverged: ")
    assert re.search(words, line), line
    assert all(record["step"] <= 10 for record in losses(tmp_path / "run"))


def test_a_trainer_in_a_thread_of_python(text, tmp_path, stands_in):
    """It takes a configuration, handles no signals, and gives what the command leaves."""
    flags = {"preset": "micro", "data": (str(text),), "checkpoint_every": EVERY, "steps": 8}
    config = TrainConfig.from_flags(flags | {"eval_every": 10, "eval_batches": 1})
    found, before = [], signal.getsignal(signal.SIGINT)

    def train():
        with mock.patch.object(train_module.Trainer, "show", None):  # the command's alone
            found.append(jaxkern.lm.Trainer(config, tmp_path / "run").fit())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    (trained,) = found
    assert signal.getsignal(signal.SIGINT) is before
    assert (trained.step, trained.out, len(trained.records)) == (8, tmp_path / "run", 9)
    assert int(trained.state.step) == 8
    assert (tmp_path / "run" / "loss.png").exists()
    again = jaxkern.lm.Trainer.resume(tmp_path / "run").fit()
    assert (again.step, again.tokens_per_second) == (8, 0.0)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.state, trained.state))


# How it ends: signals, and outputs that are closed


@pytest.mark.parametrize("interrupted", [False, True], ids=["head", "tee"])
def test_a_run_whose_output_closes_saves_its_step(argv, tmp_path, stands_in, interrupted):
    """For example in ``jaxkern train | head``, or in ``| tee log`` where Ctrl-C ends tee too."""
    reading, writing = os.pipe()
    os.close(reading)

    def close():
        sys.stdout = closed
        if interrupted:
            interrupt()

    flags = ["--out", tmp_path / "run", "--eval-every", STEPS, "--checkpoint-every", STEPS]
    with open(writing, "w") as closed:
        line = run(*argv, *flags, code=130 if interrupted else 141, after=12, act=close)
    step, why = (13, "SIGINT") if interrupted else (20, "its output was closed")
    saved = f"step {step} of {STEPS} is saved in {tmp_path / 'run'}; cont"
    assert f"stopped ({why}): {saved}" in line
    assert checkpoint.steps(tmp_path / "run") == [step]


def test_ctrl_c_while_sampling_is_one_line(copied, monkeypatch):
    monkeypatch.setattr(sample.LanguageModel, "write", lambda *args, **options: interrupt())
    assert run("sample", "--run", copied, code=130) == "jaxkern: stopped (SIGINT)\n"
    shutil.rmtree(copied / "checkpoints" / str(STEPS))
    line = resume(copied, code=130)
    assert f"training is finished, and step {STEPS} is saved in {copied}; sample with: " in line
    assert checkpoint.steps(copied)[-1] == STEPS


def test_an_error_of_an_interrupted_import_is_the_interruption(monkeypatch):
    def broken(flags):
        try:
            terminate()
        except KeyboardInterrupt:
            raise ImportError("an extension could not be initialised") from None

    monkeypatch.setitem(cli._COMMANDS, "train", (cli.Train, broken))
    assert run("train", code=143) == "jaxkern: stopped (SIGTERM)\n"


def test_signals_that_are_ignored_or_handled_already_stay_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stop.handled():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, runpy, signal, types\n"
        f"stop = types.SimpleNamespace(**runpy.run_path({stop.__file__!r}))\n"
        "with stop.handled(), stop.deferred():\n"
        "    for signum in (signal.SIGTERM, signal.SIGINT):\n"
        "        os.kill(os.getpid(), signum)\n"
        "        print('goes on', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "")


# Sends a signal to itself at an exact place: "import", "compile" or "write".
DRIVER = """
import os, runpy, signal, sys, time

place, name, *argv = sys.argv[1:]
sys.argv = ["bin/jaxkern", *argv]
strike = lambda *args: os.kill(os.getpid(), getattr(signal, name))
if place in ("tyro", "jax.numpy"):
    class Finder:
        def find_spec(self, module, path=None, target=None):
            if module == place:
                strike()
    sys.meta_path.insert(0, Finder())
else:
    from jaxkern.lm import program
    from tests.test_lm_run import ONE, PRESETS, dataclasses
    PRESETS["micro"] = dataclasses.replace(PRESETS["micro"], model=ONE)
    if place == "compile":
        program.lowered_step = lambda *args: (strike(), time.sleep(1000))
    else:
        from tests.test_lm_run import writing
        struck = writing(lambda step: strike())
        struck.__enter__()
runpy.run_module("jaxkern", run_name="__main__", alter_sys=True)
"""


def drive(place, name, *argv):
    """Run a command in a process that a signal meets: its exit code and stderr."""
    command = [sys.executable, "-c", DRIVER, place, name, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "place", ["tyro", "jax.numpy", pytest.param("compile", marks=pytest.mark.exhaustive)]
)
def test_ctrl_c_before_training_is_one_line_and_leaves_nothing(place, argv, tmp_path):
    out = tmp_path / "run"
    code, err = drive(place, "SIGINT", *argv, "--out", out)
    assert code == 130
    assert re.fullmatch(r"jaxkern: stopped \(SIGINT\).*\n", err)
    assert not out.exists()


# Runs of the model


@pytest.fixture(scope="module", params=["micro", "mamba2-micro"])
def learned(request, text, tmp_path_factory):
    """An undisturbed run of a model: its flags, folder and output."""
    out = tmp_path_factory.mktemp("runs") / "learned"
    argv = ["train", "--preset", request.param, "--data", text, "--steps", REAL_STEPS]
    argv += ["--lr", 0.05, "--seq-len", 8]
    argv += ["--checkpoint-every", 20, "--eval-every", 20, "--eval-batches", 2]
    with pytest.MonkeyPatch.context() as patch:
        written = lambda *args, length, **_: print("x" * length)
        patch.setattr(sample.LanguageModel, "write", written)
        patch.setattr(train_module, "has_room", lambda *args: False)  # nothing to compile
        patch.setattr(train_module, "plot_losses", lambda *args, **options: None)
        return argv, out, run(*argv, "--out", out)


@pytest.mark.exhaustive
def test_a_run_learns_and_leaves_its_results(learned, text):
    argv, out, printed = learned
    records = losses(out)
    assert [record["step"] for record in records] == list(range(REAL_STEPS + 1))
    bits = "validation_bits_per_byte"
    validation = {r["step"]: r[bits] for r in records if "validation_loss" in r}
    assert list(validation) == [0, 20, 40, 60]
    assert 7.5 < validation[0] < 8.5
    assert validation[REAL_STEPS] < 3.0  # the text is of eleven words
    in_bits = records[-1]["loss"] / np.log(2)  # of what begins and ends documents, too
    assert records[-1]["bits_per_byte"] == pytest.approx(in_bits, rel=1e-3)

    config, info = checkpoint.read(out)
    assert (config.preset, config.data) == (argv[2], (str(text),))
    assert config.model == PRESETS[argv[2]].model
    assert len(info["folder"]) == 16
    assert {"jax", "flax", "jaxkern"} <= json.loads((out / RECORD).read_text())["versions"].keys()
    assert checkpoint.steps(out) == [20, 40, 60]

    told = [
        *("compiling", "compiled the step in", "step 60/60 · loss ", "step 60/60 · saving took "),
        *(f"validation {validation[60]:.3f} bits/byte after 60 steps", "tokens/s"),
        *(f"a sample:\n\n{'x' * 300}\n\nmore:", f"jaxkern sample --run {out}"),
    ]
    assert re.search(".*".join(map(re.escape, told)), printed, re.DOTALL), printed
    sampled = run("sample", "--run", out, "--prompt", "the ", "--length", 200)
    words = {"a", "scan", "state", "of", "gate", "and", "chunk", "step", "reads", "keeps"}
    assert len(words & {*re.findall("[a-z]+", sampled)}) >= 2


@pytest.mark.exhaustive
def test_a_killed_run_of_a_model_goes_on_to_the_same_losses(learned, tmp_path):
    argv, whole, _ = learned
    out = tmp_path / "run"
    assert "step 13 of" in run(*argv, "--out", out, code=143, after=12)
    assert "step 16 of" in resume(out, code=143, after=15)
    assert drive("write", "SIGKILL", "train", "--resume", "--out", out) == (-signal.SIGKILL, "")
    assert checkpoint.steps(out) == [13, 16]
    assert (out / "checkpoints" / f"20{PARTIAL}").exists()
    assert "continued from step 16" in resume(out)
    assert losses(out) == losses(whole)


@pytest.mark.exhaustive
def test_double_precision_changes_nothing(learned, tmp_path):
    """Under JAX_ENABLE_X64 the run's arrays are those that it has without."""
    argv, whole, _ = learned
    out = tmp_path / "run"
    jax.config.update("jax_enable_x64", True)
    try:
        assert "step 6 of" in run(*argv, "--out", out, code=143, after=5)
        assert len(run("sample", "--run", out, "--length", 16, "--temperature", 0)) > 1
    finally:
        jax.config.update("jax_enable_x64", False)
    for wide, narrow in zip(losses(out), losses(whole)[:7], strict=True):
        assert wide == pytest.approx(narrow, rel=1e-6)
    assert "step 8 of" in resume(out, code=143, after=7)  # float32 and int32
    assert checkpoint.steps(out) == [6, 8]


# What it is looked at with: a trace of its steps, TensorBoard, Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for wandb, whose run takes steps in order alone."""
    found = mock.MagicMock(__spec__=importlib.util.spec_from_loader("wandb", None), step=0)
    found.init.return_value = found
    found.log.side_effect = lambda scalars, step: setattr(found, "step", step + 1)
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def curves(folder):
    """The values of the event files of a folder by name and step, as TensorBoard has them."""
    found = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.HasField("session_log"):  # of a run that goes on from this step
                found = {key: value for key, value in found.items() if key[1] < event.step}
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def test_a_run_is_shown_beside_its_metrics_and_goes_on_there(argv, tmp_path, stands_in, wandb):
    out, logged = tmp_path / "run", lambda: [call.kwargs["step"] for call in wandb.log.mock_calls]
    flags = ["--out", out, "--log-every", 2, "--log-to", "tensorboard", "wandb"]
    run(*argv, *flags, "--profile", "3:2", code=143, after=7)
    assert checkpoint.read(out)[0].log_to == ("tensorboard", "wandb")
    assert logged() == [*range(9)]
    (trace,) = (out / "profile").rglob("*.trace.json.gz")
    content = json.loads(gzip.decompress(trace.read_bytes()))
    assert [event.get("name") for event in content["traceEvents"]].count("train") == 2
    assert list(trace.parent.glob("*.xplane.pb"))

    os.rename(out / "checkpoints" / "8", out / "checkpoints" / "8.lost")  # as if it were killed
    line = resume(out, "--profile", "5:2", code=1)
    assert "--profile 5:2 are steps 5 to 6, and those to come are 6 to 20" in line
    printed = resume(out, "--profile")
    assert "profile  steps 16 to 20: " in printed
    assert "https://ui.perfetto.dev opens " in printed
    records = read_metrics(out / "metrics.jsonl")
    assert [record.pop("step") for record in records] == logged() == [*range(STEPS + 1)]
    assert wandb.log.mock_calls[14].args == (records[14],)
    assert wandb.finish.call_count == 2
    first, second = (call.kwargs for call in wandb.init.mock_calls)
    assert first["id"] == second["id"]
    assert (second["resume"], second["config"]["preset"]) == ("allow", "micro")

    expected = {(k, i): np.float32(v) for i, r in enumerate(records) for k, v in r.items()}
    assert curves(out / "tensorboard") == expected
    (late := tmp_path / "late").mkdir()  # one that is asked for later has all that was before
    for _ in range(2):
        report.TensorBoard(late, {}, read_metrics(out / "metrics.jsonl")).close()
    assert curves(late / "tensorboard") == expected


def test_what_a_tracker_lacks_is_told(argv, tmp_path, monkeypatch, wandb):
    wandb.init.side_effect = ZeroDivisionError("division by zero")
    with pytest.raises(RunError, match=r"--log-to wandb: division by zero; run wandb login, or"):
        report.WeightsAndBiases(tmp_path, {}, [])
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = run(*argv, "--out", tmp_path / "run", "--log-to", "wandb", code=1)
    assert line == "jaxkern: error: wandb is missing; run: pip install wandb\n"
    assert not (tmp_path / "run").exists()


def test_the_steps_that_are_traced(tmp_path):
    for steps, done, end, traced in (
        (None, 0, 100, (0, 0)),
        ("auto", 0, 100, (11, 15)),
        ("auto", 40, 100, (51, 55)),
        ("auto", 0, 12, (8, 12)),
        ("auto", 98, 100, (99, 100)),
        ("50", 40, 100, (50, 54)),
        ("100:1", 0, 100, (100, 100)),
    ):
        profile = report.Profile(tmp_path, steps, done=done, end=end)
        assert (profile.first, profile.last) == traced
