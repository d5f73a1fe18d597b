"""Runs that begin with a checkpoint of Hugging Face's layout, and runs that are written as one."""

import functools
import json
import os
import shutil
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.lm import checkpoint, data, hf, loader
from jaxkern.lm.config import PRESETS, ModelConfig, RunError, TrainConfig
from jaxkern.lm.report import read_metrics
from jaxkern.lm.run import begun_with
from jaxkern.nn import mamba, mamba2
from tests.language_models import command

SIZES = {
    "mamba": ModelConfig(mamba.Sizes(16, d_state=5, d_conv=3), 2, vocab_size=300),
    "mamba2": ModelConfig(
        mamba2.Sizes(16, d_state=5, headdim=8), 2, vocab_size=300, tie_embeddings=False
    ),
}


@functools.cache
def model_of(kind):
    """A model away from its initial symmetries."""
    leaves, tree = jax.tree.flatten(loader.initial(SIZES[kind]).params)
    rng = np.random.default_rng(0)
    moved = [leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return loader.LanguageModel(SIZES[kind], jax.tree.unflatten(tree, map(jnp.asarray, moved)))


def checkpoint_of(folder, kind):
    """A checkpoint of Hugging Face, with a tokenizer and a key of its own."""
    hf.save(folder, SIZES[kind], model_of(kind).params)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"eos_token_id": 7, "of": "theirs"}))
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


def run_of(folder, kind, **flags):
    """A run of two checkpoints, as jaxkern train leaves it."""
    folder.mkdir()
    config = {
        "format": checkpoint.FORMAT,
        "flags": flags,
        "model": SIZES[kind].stored(),
        "data": {},
        "precision": "params=float32,compute=bfloat16,output=float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for step, factor in ((5, 0.5), (10, 1.0)):
        params = jax.tree.map(lambda leaf, by=factor: leaf * by, model_of(kind).params)
        checkpoint.save(
            folder, step, params=params, optimizer={"a": jnp.ones(2)}, model=SIZES[kind]
        )
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(97, 123, 4000, np.uint8))
    return tmp_path / "text"


@pytest.fixture
def argv(text):
    argv = ["train", "--data", text, "--batch-size", 2, "--seq-len", 16, "--eval-batches", 1]
    return [*argv, "--steps", 4, "--checkpoint-every", 2]


def test_a_run_begins_with_a_checkpoint(tmp_path, capsys, argv, monkeypatch):
    begun, out = checkpoint_of(tmp_path / "begun", "mamba"), tmp_path / "run"
    batch = data.train_batch

    def stopped(*args, step, **options):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(*args, step=step, **options)

    monkeypatch.setattr(data, "train_batch", stopped)
    line = command(
        capsys, *argv, "--init-hf", begun, "--tokenizer", "bytes", "--out", out, code=143
    )
    assert "step 3 of 4 is saved" in line
    config = json.loads((out / "config.json").read_text())
    assert (config["flags"]["preset"], config["flags"]["lr"]) == ("micro", PRESETS["micro"].lr)
    assert config["flags"]["init_hf"] == str(begun)
    assert ModelConfig.from_stored(config["model"]) == SIZES["mamba"]

    model = loader.load_hf(begun)
    (windows,) = data.validation_batches(
        data.open_corpus(out / "corpus").validation, batch_size=2, seq_len=16, batches=1
    )
    logits = jax.nn.log_softmax(model(windows[:, :-1].astype(np.int32)))
    loss = -np.take_along_axis(np.asarray(logits), windows[:, 1:, None].astype(int), -1).mean()
    assert read_metrics(out / "metrics.jsonl")[0]["validation_loss"] == pytest.approx(
        loss, rel=1e-5
    )

    shutil.rmtree(begun)  # a run that has a checkpoint needs it no more
    printed = command(capsys, "train", "--resume", "--out", out)
    assert f"model    {begun}, " in printed
    assert checkpoint.steps(out) == [2, 3, 4]
    assert loader.load(out).config == SIZES["mamba"]
    assert "the run's" in command(
        capsys, "train", "--resume", "--out", out, "--init-hf", "other", code=1
    )
    shutil.rmtree(out / "checkpoints")  # killed before the first
    line = command(capsys, "train", "--resume", "--out", out, code=1)
    assert f"there is no folder {begun}" in line
    hf.save(begun, SIZES["mamba2"], model_of("mamba2").params)
    line = command(capsys, "train", "--resume", "--out", out, code=1)
    assert "is not the checkpoint that this run was begun with: block is mamba2, not mamba" in line


def test_what_is_not_given_is_of_the_preset_most_like_the_checkpoint(tmp_path):
    for name in ("130m", "370m", "1.4b", "mamba2-130m", "mamba2-780m"):
        model = PRESETS[name].model
        config = {"model_type": model.block.name, "hidden_size": model.d_model, "n_groups": 1}
        if model.block.name == "mamba2":
            config["num_heads"] = model.sizes.heads
        config |= {"num_hidden_layers": model.n_layers, "vocab_size": 50280}
        (tmp_path / "config.json").write_text(json.dumps(config))
        flags = {"init_hf": str(tmp_path), "lr": 0.5}
        with pytest.raises(RunError, match=r"holds no tokenizer.json, .* its 50280 tokens are"):
            begun_with(flags)
        flags = begun_with(flags | {"tokenizer": "bytes"})
        assert (flags["preset"], flags["lr"]) == (name, 0.5)
        assert flags["shape"].vocab_size == 50280
        packed = TrainConfig.from_flags(flags | {"pack": True}).for_tokens(256)
        assert packed.model == flags["shape"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 255}))
    with pytest.raises(RunError, match=r"--init-hf .* 255 tokens, and bytes are 256; name a"):
        begun_with({"init_hf": str(tmp_path)})


@pytest.mark.parametrize("kind", SIZES)
def test_export_writes_what_is_loaded(tmp_path, capsys, kind):
    out, theirs = run_of(tmp_path / "run", kind), tmp_path / "theirs"
    printed = command(capsys, "export", "--run", out, "--hf", theirs)
    count = sum(leaf.size for leaf in jax.tree.leaves(model_of(kind).params))
    assert printed == f"{theirs}: step 10 of {out}, {count:,} parameters, fp32\n"
    assert loader.load_hf(theirs).config == SIZES[kind]
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(loader.load_hf(theirs).params, model_of(kind).params)

    command(capsys, "export", "--run", out, "--hf", theirs, "--step", 5, "--dtype", "bf16")
    half = jax.tree.map(lambda leaf: (leaf / 2).astype(jnp.bfloat16), model_of(kind).params)
    same(loader.load_hf(theirs).params, jax.tree.map(lambda leaf: leaf.astype("f4"), half))
    assert json.loads((theirs / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_keeps_what_the_run_began_with(tmp_path, capsys):
    begun = checkpoint_of(tmp_path / "begun", "mamba")
    out, theirs = run_of(tmp_path / "run", "mamba", init_hf=str(begun)), tmp_path / "theirs"
    (begun / "tokenizer.json").write_text("{}")
    command(capsys, "export", "--run", out, "--hf", theirs)
    assert not (theirs / "tokenizer.json").exists()  # the run was trained on bytes
    config = json.loads((theirs / "config.json").read_text())
    assert (config["eos_token_id"], config["of"]) == (7, "theirs")
    assert (theirs / "special_tokens_map.json").exists()
    line = command(capsys, "export", "--run", out, "--hf", begun, code=1)
    assert "is the checkpoint that the run began with; name another" in line


def test_a_tokenizer_goes_with_the_model_and_comes_back(tmp_path, capsys, argv, text):
    """A run with a tokenizer is exported, and another begins with that, and with its tokenizer."""
    out, theirs, more = (tmp_path / name for name in ("run", "theirs", "more"))
    text.write_text("def scan(state): return state\n" * 90)
    argv += ["--preset", "micro"]
    command(capsys, *argv, "--tokenizer", "bpe:270", "--out", out)
    command(capsys, "export", "--run", out, "--hf", theirs)
    own, tokenizer = (json.loads((at / "tokenizer.json").read_text()) for at in (out, theirs))
    assert tokenizer == own | {"post_processor": tokenizer["post_processor"]}
    special = json.loads((theirs / "tokenizer_config.json").read_text())
    assert special["bos_token"] == special["eos_token"] == "<|endoftext|>"
    model, exported = loader.load(out), loader.load(theirs)
    for prompt in ("state", "", "é <|endoftext|>"):
        assert exported.encode(prompt) == model.encode(prompt)
    assert exported.codec.ends == model.codec.ends
    options = ["--prompt", "state", "--prompt", "", "--seed", 3, "--length", 40]
    texts = [command(capsys, "sample", *at, *options) for at in (("--run", out), ("--hf", theirs))]
    assert texts[0] == texts[1]

    command(capsys, *argv, "--init-hf", theirs, "--out", more)
    stored = lambda at: json.loads((at / "config.json").read_text())
    flags = stored(more)["flags"]
    assert (flags["tokenizer"], flags["vocab_size"]) == (str(theirs), model.config.vocab_size)
    assert json.loads((more / "tokenizer.json").read_text()) == tokenizer
    assert loader.load(more).encode("state") == model.encode("state")
    # Both runs have the same tokens: no document has a second one that begins it.
    assert stored(more)["data"]["fingerprint"] == stored(out)["data"]["fingerprint"]
    began, ended = (read_metrics(folder / "metrics.jsonl") for folder in (more, out))
    assert began[0]["validation_loss"] == pytest.approx(ended[-1]["validation_loss"], rel=1e-5)
    again = tmp_path / "again"
    command(capsys, "export", "--run", more, "--hf", again)
    assert (again / "tokenizer.json").read_text() == (theirs / "tokenizer.json").read_text()
    argv += ["--out", tmp_path / "x"]
    config = TrainConfig.from_flags(begun_with({"init_hf": str(theirs), "tokenizer": "bpe:500"}))
    with pytest.raises(RunError, match=r"bpe:500 has 500 tokens, more than the 320 of --init-hf "):
        config.for_tokens(500)
    line = command(capsys, *argv, "--init-hf", theirs, "--vocab-size", 999, code=1)
    assert f"--vocab-size 999 is not that of --init-hf {theirs}, " in line
    os.truncate(theirs / "model.safetensors", 999)
    line = command(capsys, *argv, "--init-hf", theirs, code=1)
    assert "model.safetensors is damaged" in line
    assert not (tmp_path / "x").exists()  # nothing was tokenised


def test_export_says_what_it_cannot_write(tmp_path, capsys):
    out = run_of(tmp_path / "run", "mamba")
    (tmp_path / "file").touch()
    for argv, words in (
        (("--hf", out), "that is not of Hugging Face's layout; name another folder"),
        (("--hf", tmp_path / "file"), "is a file; name a folder"),
        (("--hf", tmp_path / "new", "--step", 7), "has no checkpoint of step 7; it has 5, 10"),
    ):
        assert words in command(capsys, "export", "--run", out, *argv, code=1)
    assert "holds no run" in command(capsys, "export", "--run", tmp_path, "--hf", "x", code=1)
    assert checkpoint.read_config(out)


@pytest.mark.parametrize("kind", SIZES)
def test_logits_of_an_exported_run_are_those_of_transformers(tmp_path, capsys, kind):
    reason = "transformers and torch are not installed"
    out, theirs = run_of(tmp_path / "run", kind), tmp_path / "theirs"
    command(capsys, "export", "--run", out, "--hf", theirs)
    tokens = np.random.default_rng(1).integers(0, 300, (2, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason=reason)
        transformers = pytest.importorskip("transformers", reason=reason)
        model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
        with torch.no_grad():
            expected = model(torch.from_numpy(tokens)).logits.numpy()
    logits = loader.load(out)(tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())
