"""What a run is looked at with: a trace of its steps, TensorBoard, Weights & Biases."""

import gzip
import importlib.util
import json
import os
import signal
import struct
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxkern.lm import cli, data, trackers
from jaxkern.lm.config import RunError
from jaxkern.lm.profiling import Profile
from jaxkern.lm.report import read_metrics
from tests.language_models import command


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(97, 123, 9000, np.uint8))
    argv = ["train", "--preset", "micro", "--data", tmp_path / "text", "--steps", 14]
    return [*argv, "--eval-batches", 1, "--checkpoint-every", 5, "--log-every", 2]


class Wandb(types.ModuleType):
    """As much of wandb as is used: a run keeps the steps that it was given, in order alone."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.began, self.logged, self.finished, self.step = [], [], 0, 0
        self.Settings = dict

    def init(self, **options):
        self.began.append(options)
        return self

    def log(self, scalars, step):
        assert step >= self.step
        self.logged.append((step, scalars))
        self.step = step + 1

    def finish(self):
        self.finished += 1


def events(folder):
    """{tag: {step: value}} of the event files of a folder, as TensorBoard has them."""
    curves = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.HasField("session_log"):  # of a run that goes on from this step
                for curve in curves.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def assert_same_curves(curves, records, dtype=float):
    names = {name for record in records for name in record} - {"step"}
    assert curves.keys() == names
    for name in names:
        expected = {r["step"]: dtype(r[name]) for r in records if r.get(name) is not None}
        assert curves[name] == expected


def test_a_run_is_shown_beside_its_metrics_and_goes_on_there(tmp_path, capsys, argv, monkeypatch):
    wandb, out, batch = Wandb(), tmp_path / "run", data.train_batch
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    stops = [lambda: os.kill(os.getpid(), signal.SIGTERM)]

    def train_batch(*args, step, **options):
        if step == 7 and stops:
            stops.pop()()
        return batch(*args, step=step, **options)

    monkeypatch.setattr(data, "train_batch", train_batch)
    argv += ["--out", out, "--log-to", "tensorboard", "wandb"]
    command(capsys, *argv, "--profile", "3:2", code=143)
    assert json.loads((out / "config.json").read_text())["flags"]["log_to"] == [
        "tensorboard",
        "wandb",
    ]
    assert [step for step, _ in wandb.logged] == list(range(9))
    (trace,) = (out / "profile").rglob("*.trace.json.gz")
    content = json.loads(gzip.decompress(trace.read_bytes()))
    names = [event.get("name") for event in content["traceEvents"]]
    assert names.count("train") == 2
    assert list(trace.parent.glob("*.xplane.pb"))

    os.rename(out / "checkpoints" / "8", out / "checkpoints" / "8.lost")  # as if it were killed
    printed = command(capsys, "train", "--resume", "--out", out, "--profile")
    assert "profile  steps 10 to 14: " in printed
    assert "https://ui.perfetto.dev opens " in printed
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(15))
    assert_same_curves(events(out / "tensorboard"), records, np.float32)
    assert [step for step, _ in wandb.logged] == list(range(15))
    assert wandb.logged[14][1] == {k: v for k, v in records[14].items() if k != "step"}
    assert wandb.finished == 2
    first, second = wandb.began
    assert first["id"] == second["id"]
    assert (second["resume"], second["config"]["flags"]["preset"]) == ("allow", "micro")

    # One that is asked for later has all that was before.
    late = tmp_path / "late"
    late.mkdir()
    for _ in range(2):
        trackers.TensorBoard(late, {}, records).close()
    assert_same_curves(events(late / "tensorboard"), records, np.float32)


def test_what_a_tracker_lacks_is_told(tmp_path, capsys, argv, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("wandb",) else find(name)
    )
    line = command(capsys, *argv, "--out", tmp_path / "run", "--log-to", "wandb", code=1)
    assert line == "jaxkern: error: --log-to wandb needs wandb; run: pip install wandb\n"
    assert not (tmp_path / "run").exists()
    line = command(capsys, *argv, "--log-to", "tensorboard", "none", code=1)
    assert "--log-to tensorboard none names none and another; give none alone, or leave" in line

    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    with pytest.raises(RunError, match=r"--log-to wandb: division by zero; run wandb login, or"):
        trackers.WeightsAndBiases(tmp_path, {}, [])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "--log-to", "comet"])
    assert "invalid choice: 'comet'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "done", "end", "traced"),
    [
        (None, 0, 100, (0, 0)),
        ("auto", 0, 100, (11, 15)),
        ("auto", 40, 100, (51, 55)),
        ("auto", 0, 12, (8, 12)),
        ("auto", 98, 100, (99, 100)),
        ("50", 40, 100, (50, 54)),
        ("100:1", 0, 100, (100, 100)),
    ],
)
def test_the_steps_that_are_traced(tmp_path, steps, done, end, traced):
    profile = Profile(tmp_path, steps, done=done, end=end)
    assert (profile.first, profile.last) == traced


@pytest.mark.parametrize(("steps", "words"), [("40:2", "40 to 41"), ("98:4", "98 to 101")])
def test_steps_that_the_run_has_not_are_not_traced(tmp_path, steps, words):
    with pytest.raises(
        RunError, match=rf"--profile {steps} are steps {words}, and those to come are 41 to 100; "
    ):
        Profile(tmp_path, steps, done=40, end=100)


def test_a_wrong_profile(capsys):
    for text in ("0:5", "5:0", "x", ":3"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["train", "--profile", text])
        assert f"must be STEP:COUNT, such as 100:5, got '{text}'" in capsys.readouterr().err
