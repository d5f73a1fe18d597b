"""Whole runs on tokens: trained, stopped, continued, sampled, loaded."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import jaxkern.lm
from jaxkern.lm import cli, data, run, sample
from jaxkern.lm import train as train_module
from jaxkern.lm.config import RunError
from jaxkern.lm.report import read_metrics
from tests.language_models import command

WORDS = ["the", "a", "scan", "state", "of", "gate", "chunk", "step", "reads", "keeps"]


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_once():
    compile_programs = train_module.compile_programs

    @functools.cache
    def compiled(config, placement):
        return compile_programs(config, placement, fresh=True)

    with pytest.MonkeyPatch.context() as patch:
        lookup = lambda config, place, *, fresh: compiled(config, place)
        patch.setattr(train_module, "compile_programs", lookup)
        patch.setattr(train_module, "keep_programs", lambda: None)
        yield


def write_lines(path, count, seed):
    rng = np.random.default_rng(seed)
    texts = (" ".join(rng.choice(WORDS, size=rng.integers(3, 40))) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    a, b, c, d = (write_lines(folder / f"{name}.jsonl", 60, i) for i, name in enumerate("abcd"))
    flags = ["train", "--preset", "micro", "--tokenizer", "bpe:300", "--data", f"{a}=3", f"{b}=1"]
    flags += ["--eval-data", c, d, "--steps", 8, "--checkpoint-every", 4, "--eval-every", 4]
    return [str(flag) for flag in [*flags, "--grad-accum", 2, "--eval-batches", 2, "--out"]]


@pytest.fixture(scope="module")
def finished(argv, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main([*argv, str(out)]) == 0
    return out


def losses(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


def test_a_run_on_tokens_learns_and_reports_every_source(finished):
    first, *_, last = read_metrics(finished / "metrics.jsonl")
    assert last["validation_loss"] < first["validation_loss"]
    assert last["validation_perplexity"] == pytest.approx(np.exp(last["validation_loss"]))
    for name in ("c.jsonl", "d.jsonl"):
        loss = last[f"validation_loss/{name}"]
        assert last[f"validation_perplexity/{name}"] == pytest.approx(np.exp(loss))
    each = [last[f"validation_loss/{name}"] for name in ("c.jsonl", "d.jsonl")]
    assert min(each) <= last["validation_loss"] <= max(each)
    stored = json.loads((finished / "config.json").read_text())
    assert stored["flags"]["vocab_size"] == stored["model"]["vocab_size"] == 320
    assert stored["data"]["tokenizer"] == {"begin": 0, "end": 0, "size": 293}
    # A loss of bytes is one of tokens by how many there are of each.
    ratio = last["validation_bits_per_byte"] * np.log(2) / last["validation_loss"]
    assert 0.2 < ratio < 0.9


def test_a_run_goes_on_as_if_it_had_not_been_stopped(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "copied")
    shutil.rmtree(out / "checkpoints" / "8")
    assert cli.main(["train", "--resume", "--out", str(out)]) == 0
    assert "continued from step 4" in (shown := capsys.readouterr().out)
    assert " · perplexity " in shown
    assert "(c.jsonl " in shown
    assert losses(out) == losses(finished)
    shutil.rmtree(next((out / "corpus").glob("*/")))
    assert cli.main(["train", "--resume", "--out", str(out), "--steps", "9"]) == 1
    assert "--data-cache, or start a new run" in capsys.readouterr().err
    shutil.copytree(finished / "corpus", tmp_path / "cache")
    assert cli.main(["train", "--resume", "--out", str(out), "--tokenizer", "bytes"]) == 1
    assert "--tokenizer bytes differs from the run's bpe:300" in capsys.readouterr().err
    argv = ["train", "--resume", "--out", str(out), "--data-cache", str(tmp_path / "cache")]
    assert cli.main(argv) == 0  # it is found there, and has all its steps
    assert "already trained for 8 steps" in capsys.readouterr().out


def test_text_of_a_run_is_that_of_its_tokenizer(finished, tmp_path, capsys):
    model = jaxkern.lm.load(finished)
    ids = model.encode("the scan reads é")
    assert ids[0] == 0
    assert len(ids) < len("the scan reads é")
    assert model.decode(ids) == "the scan reads é"
    assert model.config.vocab_size == 320
    text = model.generate("the scan", length=5, temperature=0)
    argv = ["sample", "--run", str(finished), "--prompt", "the scan", "--length", "5"]
    capsys.readouterr()
    assert cli.main([*argv, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"the scan{text}\n"
    plain = sample.Bytes()
    assert plain.decode(plain.encode("é")) == "é"
    lost = shutil.copytree(finished, tmp_path / "it's lost")
    (lost / "tokenizer.json").unlink()
    sample_argv = ["sample", "--run", lost, "--length", 5]
    line = command(capsys, *sample_argv, code=1)
    assert "it's lost has lost its tokenizer.json, by which its model reads and writes" in line
    assert command(capsys, "train", "--resume", "--steps", 9, "--out", lost, code=1) == line
    subprocess.run(line.partition("with: ")[2], shell=True, check=True)  # what it says
    command(capsys, *sample_argv)
    shutil.rmtree(lost / "corpus")
    (lost / "tokenizer.json").unlink()
    line = command(capsys, *sample_argv, code=1)
    assert "put it back from a backup, its --data-cache, or a folder that jaxkern export" in line


def test_a_text_ends_where_its_tokenizer_says(finished):
    codec = jaxkern.lm.load(finished).codec
    assert codec.ends == {0}
    assert codec.encode("") == [0]


def test_two_devices_see_the_batches_of_one(argv, finished, tmp_path):
    import jax

    if len(jax.devices()) < 2:
        pytest.skip("one device cannot share a batch")
    assert cli.main([*argv, str(tmp_path / "two"), "--devices", "2"]) == 0
    for one, two in zip(losses(finished), losses(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        np.testing.assert_allclose([*one.values()], [*two.values()], rtol=1e-4)


# Ends itself by a signal when the third shard is to be written, or one in another process.
DRIVER = """
import os, signal, sys

name, *argv = sys.argv[1:]
from jaxkern.lm.data import pieces, shards

write, pieces._SHARD_BYTES = shards.write_shard, 3000
written = []
def write_shard(shard, tokenizer, tell):
    written.append(shard)
    if len(written) == 3:
        os.kill(os.getpid(), getattr(signal, name))
    write(shard, tokenizer, tell)
shards.write_shard = write_shard
import runpy
sys.argv = ["bin/jaxkern", *argv]
runpy.run_module("jaxkern", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_run_that_is_stopped_while_it_tokenises_goes_on(argv, tmp_path, name, monkeypatch):
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, name, *argv, str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if name == "SIGINT":
        assert done.returncode == 128 + signal.SIGINT
        assert done.stderr.startswith("jaxkern: stopped (SIGINT): training had not begun; ")
        assert "keeps the tokens that are made" in done.stderr
    else:
        assert done.returncode == -signal.SIGKILL
    assert len([*out.glob("corpus/*/0*.json")]) == 2
    assert not (out / "config.json").exists()
    written = []
    write = data.shards.write_shard
    monkeypatch.setattr(data.pieces, "_SHARD_BYTES", 3000)

    def write_shard(shard, tokenizer, tell):
        written.append(shard.path.name)
        write(shard, tokenizer, tell)

    monkeypatch.setattr(data.shards, "write_shard", write_shard)
    monkeypatch.setattr(train_module.Trainer, "compile", lambda self, fresh: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([*argv, str(out)])
    assert written[0] == "00002"
    assert data.has_shards(out)


def test_what_a_run_on_tokens_cannot_begin_with(argv, tmp_path, capsys, monkeypatch):
    """Each is told before a tokenizer is trained, and leaves no folder behind."""
    out = tmp_path / "run"
    (tmp_path / "file").touch()
    monkeypatch.setattr(data.tokenizer, "train_bpe", lambda *_, **__: 1 / 0)
    for flags, words in (
        (["--tokenizer", "bpe:5"], "--tokenizer bpe:5: the size must be a whole number from 257"),
        (["--tokenizer", "x.json"], "--tokenizer x.json: no such tokenizer; give bytes, bpe:32000"),
        (["--eval-data", "nowhere"], "--eval-data nowhere: no such file or folder"),
        (["--data", "a=1", "b"], "some have a weight and some do not"),
        (["--tokenizer", "bytes", "--vocab-size", "512"], "512: bytes are 256 tokens; leave it"),
        (["--vocab-size", "280"], "--vocab-size 280 is less than the 300 tokens"),
        (["--profile", "7:3"], "--profile 7:3 are steps 7 to 9, and those to come are 1 to 8"),
        (["--data-cache", str(tmp_path / "file" / "a")], "/file/a cannot be written to (Not a dir"),
    ):
        assert cli.main([*argv, str(out), *flags]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert not out.exists()


def test_sequences_that_the_data_does_not_fill_are_refused(argv, tmp_path, capsys):
    out = ["--out", tmp_path / "run", "--tokenizer", "bytes", "--pack", "--seq-len", 4096]
    few = write_lines(tmp_path / "few.jsonl", 2, 0)
    line = command(capsys, *argv[:3], *out, "--data", few, code=1)
    assert "error: the training data has " in line
    assert "tokens, fewer than the 4,097 that --seq-len 4096 needs; lower --seq-len or" in line

    def corpus_of(*sizes):
        streams = [types.SimpleNamespace(size=size) for size in sizes]
        train = [types.SimpleNamespace(name=f"of {s.size}", stream=s) for s in streams]
        return types.SimpleNamespace(train=train)

    with pytest.raises(RunError, match=r"no source of --data has more than 80 tokens, fewer than"):
        run.check_length(corpus_of(20, 80), 80)
    run.check_length(corpus_of(81), 80)
    assert not capsys.readouterr().out
    run.check_length(corpus_of(20, 81, 80), 80)
    assert "warning: 2 of 3 sources of --data (of 20, of 80) have" in capsys.readouterr().out
