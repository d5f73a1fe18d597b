"""Checkpoints, metrics and the folder of a run: whole or not there, and held by one process."""

import contextlib
import errno
import fcntl
import gc
import os
import resource
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils

from jaxkern.lm import checkpoint, cli
from jaxkern.lm.config import RunError
from jaxkern.lm.report import MetricsLog, read_metrics
from jaxkern.lm.step import TrainState
from jaxkern.precision import DynamicLossScale, NoOpLossScale

STATE = TrainState(
    params={"w": jnp.arange(1000.0) / 7, "b": {"half": jnp.ones((3, 5), jnp.bfloat16)}},
    opt_state=({"mu": jnp.full((7,), 1e-30)}, None),  # pyright: ignore
    loss_scale=DynamicLossScale(4.0, period=3),
    step=jnp.int32(9),
)
DEVICE = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
LIKE = checkpoint.abstract(jax.tree.map(jnp.asarray, STATE), DEVICE)


# Callbacks of tensorstore that come when orbax has seen the first error.
NOISY = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def save(run, *steps, keep=3, like=None, state=STATE):
    with contextlib.closing(checkpoint.Saver(run, keep=keep, like=like)) as saver:
        for step in steps:
            saver.start(step, jax.tree.map(jnp.asarray, state), {"next_index": step})


@pytest.mark.parametrize("like", [LIKE, None], ids=["copied", "brought to the host"])
def test_what_is_restored_is_what_was_saved_and_the_last_ones_are_kept(tmp_path, monkeypatch, like):
    # The run alone asks this, about steps in their order: processes agree on the next one.
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked := mock.Mock())
    save(tmp_path, 5, 10, 15, 100, like=like)
    assert not asked.called
    assert checkpoint.steps(tmp_path) == [10, 15, 100]
    save(tmp_path, 110, keep=1)
    assert checkpoint.steps(tmp_path) == [110]
    found = checkpoint.restore(tmp_path, LIKE)
    assert (found.step, found.data, found.damaged) == (110, {"next_index": 110}, [])
    chex.assert_trees_all_equal(found.state, jax.tree.map(jnp.asarray, STATE), strict=True)
    chex.assert_trees_all_equal_dtypes(found.state, LIKE)
    part = checkpoint.restore(tmp_path, {"params": LIKE.params}, 110).state
    chex.assert_trees_all_equal(part, {"params": STATE.params}, strict=True)
    without_scale = STATE._replace(loss_scale=NoOpLossScale())  # a node without leaves
    save(tmp_path, 120, state=without_scale)
    like = LIKE._replace(loss_scale=NoOpLossScale())
    assert checkpoint.restore(tmp_path, like).state.loss_scale == NoOpLossScale()
    with pytest.raises(RunError, match=r"has no checkpoint of step 7; it has 110, 120"):
        checkpoint.restore(tmp_path, LIKE, 7)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@NOISY
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: cut(largest(path / "state")),
        lambda path: largest(path / "state").unlink(),
        lambda path: flip(path / "state" / "manifest.ocdbt"),
        lambda path: (path / "state" / "_METADATA").unlink(),
        lambda path: cut(path / "data" / "metadata"),
    ],
)
def test_a_run_goes_back_from_a_damaged_checkpoint(tmp_path, harm):
    folder = tmp_path / "checkpoints"
    save(tmp_path, 5, 10)
    harm(folder / "10")
    found = checkpoint.restore(tmp_path, LIKE)
    assert (found.step, found.data, len(found.damaged)) == (5, {"next_index": 5}, 1)
    assert found.damaged[0].startswith(f"checkpoint {folder / '10'} cannot be read (")
    chex.assert_trees_all_equal(found.state, jax.tree.map(jnp.asarray, STATE))
    checkpoint.set_aside(tmp_path, 5)
    assert {*os.listdir(folder)} == {"5", "10.damaged"}
    save(tmp_path, 10)
    assert checkpoint.restore(tmp_path, LIKE).step == 10
    for step in (5, 10):
        harm(folder / str(step))
    told = rf"^checkpoint {folder}/10 cannot be read \(.*\), nor any other of 5, 10; put it back"
    with pytest.raises(RunError, match=told):
        checkpoint.restore(tmp_path, LIKE)
    gc.collect()  # coroutines that orbax leaves behind complain here


def test_another_models_checkpoint_is_refused(tmp_path):
    save(tmp_path, 5)
    narrow = checkpoint.abstract({"w": jnp.ones(5)}, DEVICE)
    more = LIKE.params | {"head": LIKE.params["w"]}
    for like, told in (
        (
            LIKE._replace(params=LIKE.params | narrow),
            r"w has the shape \(1000,\), and .* \(5,\)",
        ),
        ({"params": more}, "it has no params/head"),
    ):
        with pytest.raises(RunError, match=rf"5 cannot be read \(.*{told}\); put it back"):
            checkpoint.restore(tmp_path, like)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of orbax
@NOISY
def test_a_file_that_is_too_large_is_told(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(Exception, match=os.strerror(errno.EFBIG)) as raised:
            save(tmp_path, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "raise its limit (ulimit -f)" in (cli._explain(raised.value) or "")
    assert not checkpoint.steps(tmp_path)
    del raised
    gc.collect()  # files and futures left behind complain here


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
    """A file that is not one of metrics is refused."""
    path, last = tmp_path / "metrics.jsonl", {"step": 7, "loss": float("nan")}
    for resume_at, records in ((0, [{"step": i, "loss": i} for i in range(9)]), (6, [last])):
        with contextlib.closing(MetricsLog(path, resume_at=resume_at)) as log:
            log.write(records)
        with path.open("a") as file:
            file.write('{"step": 9, "lo')  # killed while writing
    steps = [{"step": i, "loss": i} for i in range(7)]
    assert read_metrics(path) == [*steps, {"step": 7, "loss": None}]
    for line, content in (
        (1, b"\xff\n"),
        (1, b'{"loss": 2}\n'),
        (3, b'{"step": 1}\n{"step": 2}\n{"step": 2}\n'),
    ):
        path.write_bytes(content)
        with pytest.raises(RunError, match=rf"metrics\.jsonl, line {line} is not a record"):
            read_metrics(path)
