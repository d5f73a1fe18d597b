"""Checkpoints and metrics: whole or not there, and told from damaged ones."""

import errno
import fcntl
import os
import resource
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxkern.lm import checkpoint
from jaxkern.lm.config import PRESETS, ModelConfig, RunError
from jaxkern.lm.report import MetricsLog, read_metrics
from jaxkern.precision import DynamicLossScale
from tests.language_models import command

MODEL = ModelConfig(8, 1)
PARAMS = {"w": jnp.arange(1000.0) / 7, "b": {"half": jnp.ones((3, 5), jnp.bfloat16)}}
REST = {
    "opt_state": ({"mu": jnp.full((7,), 1e-30)}, None),
    "loss_scale": DynamicLossScale(4.0, period=3),
    "step": jnp.int32(9),
}


def save(run, *steps, **options):
    for step in steps:
        checkpoint.save(run, step, params=PARAMS, optimizer=REST, model=MODEL, **options)


def check_restored(run, step):
    """What is restored is what was saved, leaf by leaf."""
    checkpoint.check(run, step, MODEL)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for name, saved in (("params", PARAMS), ("optimizer", REST)):
        back = checkpoint.restore(run, step, name, checkpoint.abstract(saved, device))
        chex.assert_trees_all_equal(back, saved, strict=True)
        chex.assert_trees_all_equal_dtypes(back, saved)


def test_the_last_ones_are_kept(tmp_path):
    save(tmp_path, 5, 10, 15, 100, 20)
    assert checkpoint.steps(tmp_path) == [15, 20, 100]
    check_restored(tmp_path, 15)
    save(tmp_path, 110, 120, keep=4)
    assert checkpoint.steps(tmp_path) == [20, 100, 110, 120]
    save(tmp_path, 130, keep=1)
    assert checkpoint.steps(tmp_path) == [130]


def test_what_was_too_large_is_named(tmp_path, capsys):
    (tmp_path / "text").write_text("some words " * 500)
    begin = ["train", "--preset", "micro", "--data", tmp_path / "text", "--out", tmp_path / "run"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for flags, name in (([], "corpus"), (["--pack", "--data-cache", tmp_path / "c"], "c")):
            line = command(capsys, *begin, *flags, code=1)
            assert f"/{name}: File too large; raise the limit of a file's size (ulimit" in line
        with pytest.raises(OSError, match=r"File too large: .*/checkpoints/5\.partial"):
            save(tmp_path, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not checkpoint.steps(tmp_path)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def damage_bytes(path):
    content = bytearray(largest(path / "params").read_bytes())
    content[len(content) // 2] ^= 1
    largest(path / "params").write_bytes(content)


def cut_a_file(path):
    os.truncate(file := largest(path / "optimizer"), file.stat().st_size // 2)


CHANGED = "its files are not those that were written"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage_bytes, CHANGED),
        (cut_a_file, CHANGED),
        (lambda path: largest(path / "params").unlink(), CHANGED),
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text('["another"]'), "is no manifest"),
        (lambda path: path.rename(path.with_name("12")), "by its manifest.json it is of step 10"),
    ],
)
def test_a_run_goes_back_from_a_damaged_checkpoint(tmp_path, harm, words):
    folder = tmp_path / "checkpoints"
    save(tmp_path, 5, 10)
    harm(folder / "10")
    last = checkpoint.steps(tmp_path)[-1]
    with pytest.raises(checkpoint.DamagedError, match=words) as caught:
        check_restored(tmp_path, last)
    assert f"checkpoints/{last} is damaged: " in str(caught.value)
    assert "the one before is of step 5" in str(caught.value)
    assert checkpoint.newest(tmp_path, MODEL) == (5, [str(caught.value)])
    check_restored(tmp_path, 5)

    checkpoint.set_aside(tmp_path, 5)
    assert set(os.listdir(folder)) == {"5", f"{last}.damaged"}
    save(tmp_path, last)
    assert checkpoint.newest(tmp_path, MODEL) == (last, [])

    for step in (5, last):
        damage_bytes(folder / str(step))
    told = rf"^checkpoint {folder}/{last} is damaged: {CHANGED}, and none in {folder} is whole "
    told += rf"\(steps 5, {last}\); put one back from a copy, or train again with another --out$"
    with pytest.raises(RunError, match=told):
        checkpoint.newest(tmp_path, MODEL)


def test_another_models_checkpoint_is_refused(tmp_path):
    """Nothing is damaged, so that nothing is gone back from."""
    save(tmp_path, 5)
    words = "the run is of preset {}: d_model is 8, not 16, n_layers is 1, not 2, {}d_state "
    for name, kind in (("micro", ""), ("mamba2-micro", "layers is mamba, not mamba2, ")):
        model = PRESETS[name].model
        for read in (checkpoint.check, lambda run, step, model: checkpoint.newest(run, model)):
            with pytest.raises(RunError, match=words.format(name, kind)) as caught:
                read(tmp_path, 5, model)
            assert not isinstance(caught.value, checkpoint.DamagedError)
    manifest = tmp_path / "checkpoints" / "5" / "manifest.json"
    content = manifest.read_text()
    for old, new in (('"format": "jaxkern-lm-1"', '"format": "2"'), ("d_model", "width")):
        manifest.write_text(content.replace(old, new))
        with pytest.raises(RunError, match="not written by this version of jaxkern"):
            checkpoint.newest(tmp_path, MODEL)


@pytest.mark.parametrize(
    ("where", "failing"), [(ocp.StandardCheckpointer, "save"), (checkpoint, "write_atomically")]
)
def test_a_full_disk_leaves_the_finished_ones(tmp_path, monkeypatch, where, failing):
    save(tmp_path, 5)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(where, failing, mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 10)
    assert os.listdir(tmp_path / "checkpoints") == ["5"]
    check_restored(tmp_path, 5)


def test_leftovers_of_a_killed_process_are_no_checkpoints(tmp_path):
    save(tmp_path, 5)
    for name in ("10.partial", "1.removed"):
        (tmp_path / "checkpoints" / name / "params").mkdir(parents=True)
    assert checkpoint.steps(tmp_path) == [5]
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == ["5"]
    save(tmp_path, 10)
    assert checkpoint.steps(tmp_path) == [5, 10]


def test_two_processes_cannot_train_in_one_folder(tmp_path, monkeypatch):
    for _ in range(2):  # what has ended leaves the folder free
        with checkpoint.only_process(tmp_path):  # a lock is of an open file, not of a process
            with pytest.raises(RunError, match="another process is training"):
                checkpoint.only_process(tmp_path).__enter__()
            unsupported = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            with monkeypatch.context() as patch:  # as some network file systems have it
                patch.setattr(fcntl, "flock", mock.Mock(side_effect=unsupported))
                with checkpoint.only_process(tmp_path):
                    pass


def test_metrics_are_cut_back_to_the_step_of_the_checkpoint(tmp_path):
    path, last = tmp_path / "metrics.jsonl", {"step": 7, "loss": float("nan")}
    for resume_at, records in ((0, [{"step": i, "loss": i} for i in range(9)]), (6, [last])):
        log = MetricsLog(path, resume_at=resume_at)
        log.write(records)
        log.close()
        with path.open("a") as file:
            file.write('{"step": 9, "lo')  # killed while writing
    steps = [{"step": i, "loss": i} for i in range(7)]
    assert read_metrics(path) == [*steps, {"step": 7, "loss": None}]


def test_metrics_of_something_else_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line, content in (
        (1, b"hello\n"),
        (1, b"\xff\n"),
        (1, b"[1]\n"),
        (1, b'{"step": "1"}\n'),
        (2, b'{"step": 1}\n{"step": 2, "loss": "low"}\n'),
        (3, b'{"step": 1}\n{"step": 2}\n{"step": 2}\n'),
    ):
        path.write_bytes(content)
        with pytest.raises(RunError, match=rf"metrics\.jsonl, line {line} is not a record"):
            read_metrics(path)
