"""Checkpoints and metrics: whole or not there, and told from damaged ones."""

import errno
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxkern.lm import checkpoint
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.report import MetricsLog, read_metrics
from jaxkern.precision import DynamicLossScale

MODEL = ModelConfig(d_model=8, n_layers=1)
PARAMS = {"w": jnp.arange(1000.0) / 7, "b": {"half": jnp.ones((3, 5), jnp.bfloat16)}}
REST = {
    "opt_state": ({"mu": jnp.full((7,), 1e-30)}, None),
    "loss_scale": DynamicLossScale(4.0, period=3),
    "step": jnp.int32(9),
}


def save(run, *steps):
    for step in steps:
        checkpoint.save(run, step, params=PARAMS, optimizer=REST, model=MODEL)


def restore(run, step):
    checkpoint.check(run, step, MODEL)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return [
        checkpoint.restore(run, step, name, checkpoint.abstract(like, device))
        for name, like in (("params", PARAMS), ("optimizer", REST))
    ]


def test_what_was_saved_is_restored(tmp_path):
    save(tmp_path, 5)
    back = restore(tmp_path, 5)
    assert jax.tree.structure(back) == jax.tree.structure([PARAMS, REST])
    for new, old in zip(jax.tree.leaves(back), jax.tree.leaves([PARAMS, REST]), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, old)


def test_the_last_three_are_kept(tmp_path):
    save(tmp_path, 5, 10, 15, 100, 20)
    assert checkpoint.steps(tmp_path) == [15, 20, 100]
    restore(tmp_path, 15)


def damage_bytes(path):
    largest = max((path / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def cut_a_file(path):
    file = max((path / "optimizer").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    os.truncate(file, file.stat().st_size // 2)


def remove_a_file(path):
    next(p for p in (path / "params").rglob("*") if p.is_file()).unlink()


def remove_the_manifest(path):
    (path / "manifest.json").unlink()


def write_another_manifest(path):
    (path / "manifest.json").write_text('["something else"]')


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage_bytes, "is damaged"),
        (cut_a_file, "is damaged"),
        (remove_a_file, "is damaged"),
        (remove_the_manifest, "not written by this version of jaxkern"),
        (write_another_manifest, "not written by this version of jaxkern"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path, harm, words):
    save(tmp_path, 5, 10)
    harm(tmp_path / "checkpoints" / "10")
    with pytest.raises(RunError, match=words) as caught:
        restore(tmp_path, 10)
    assert "checkpoints/10" in str(caught.value)
    assert "back to step 5" in str(caught.value)
    restore(tmp_path, 5)


def test_another_models_checkpoint_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(RunError, match="is of another model"):
        checkpoint.check(tmp_path, 5, ModelConfig(d_model=16, n_layers=1))


@pytest.mark.parametrize("failing", ["save", "manifest"])
def test_a_full_disk_leaves_the_finished_ones(tmp_path, monkeypatch, failing):
    save(tmp_path, 5)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if failing == "save":
        monkeypatch.setattr(ocp.StandardCheckpointer, "save", full)
    else:
        monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 10)
    assert os.listdir(tmp_path / "checkpoints") == ["5"]
    restore(tmp_path, 5)


def test_leftovers_of_a_killed_process_are_no_checkpoints(tmp_path):
    save(tmp_path, 5)
    for name in ("10.partial", "1.removed"):
        (tmp_path / "checkpoints" / name / "params").mkdir(parents=True)
    assert checkpoint.steps(tmp_path) == [5]
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == ["5"]
    save(tmp_path, 10)
    assert checkpoint.steps(tmp_path) == [5, 10]


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jaxkern.lm import checkpoint\n"
        "with checkpoint.only_process(Path(sys.argv[1])): print('held')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with checkpoint.only_process(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another process is training" in refused.stderr
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "held\n"


def test_metrics_are_cut_back_to_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resume_at=0)
    log.write([{"step": step, "loss": 1 / (step + 1)} for step in range(9)])
    log.close()
    with path.open("a") as file:
        file.write('{"step": 9, "lo')  # killed while writing
    log = MetricsLog(path, resume_at=6)
    log.write([{"step": 7, "loss": float("nan")}])
    log.close()
    records = read_metrics(path)
    assert [record["step"] for record in records] == list(range(8))
    assert records[6]["loss"] == 1 / 7
    assert records[7]["loss"] is None


def test_metrics_of_something_else_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("hello\n")
    with pytest.raises(RunError, match="is not a metrics file"):
        read_metrics(path)
