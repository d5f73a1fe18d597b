"""Decoding one prompt and several, and models loaded to be called and sampled from."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkern.lm
from jaxkern.lm import checkpoint, cli, data, loader, sample
from jaxkern.lm.config import PRESETS, RunError
from jaxkern.lm.model import Options
from jaxkern.lm.step import make_model
from jaxkern.precision import Policy

MICRO = PRESETS["micro"].model
GRAPHDEF = sample.decoder(MICRO)


@functools.cache
def trained():
    """A model away from its initial symmetries, whose texts are not all alike."""
    leaves, tree = jax.tree.flatten(loader.initial(MICRO).params)
    rng = np.random.default_rng(0)
    moved = [leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return loader.LanguageModel(MICRO, jax.tree.unflatten(tree, map(jnp.asarray, moved)), 7)


def tokens_after(*prompts, graphdef=GRAPHDEF, params=None, **options):
    params = trained().params if params is None else params
    chunks = list(sample.generate_tokens(graphdef, params, prompts, **options))
    return np.concatenate(chunks, axis=1)


PROMPTS = [*b"def "], [*b"a"], list(range(1, 201)), [*b"of 17 bytes or so"]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"top_k": 0, "top_p": 0.7}])
def test_prompts_of_unequal_lengths_are_continued_as_each_is_alone(options, monkeypatch):
    monkeypatch.setattr(sample, "_PART", 64)  # the longest is read in four parts, all padded
    together = tokens_after(*PROMPTS, length=21, **options)
    assert together.shape == (4, 21)
    assert len({tuple(row) for row in together}) == 4
    monkeypatch.setattr(sample, "_PART", 2048)
    for i, prompt in enumerate(PROMPTS):
        alone = tokens_after(prompt, length=21, **options | {"seed": options.get("seed", 0) + i})
        np.testing.assert_array_equal(together[i], alone[0])


@pytest.mark.newest
def test_decoding():
    model = trained()
    text = functools.partial(tokens_after, PROMPTS[0])
    some = {"among": range(1, 256)}
    greedy = text(length=21, temperature=0, **some)
    fed = np.concatenate([[PROMPTS[0]], greedy], axis=1)
    logits = np.array(model(fed[:, :-1]))[:, 3:]
    logits[:, :, 0] = -np.inf
    np.testing.assert_array_equal(logits.argmax(-1), greedy)
    np.testing.assert_array_equal(text(length=21, top_k=1, **some), greedy)
    np.testing.assert_array_equal(text(length=21, temperature=1e-30, top_p=0.9, **some), greedy)

    some = {"among": [*range(7), *range(8, 999)]}
    drawn = text(length=40, seed=1, top_k=0, **some)
    np.testing.assert_array_equal(drawn, text(length=40, seed=1, top_k=0, **some))
    np.testing.assert_array_equal(drawn[:, :19], text(length=19, seed=1, top_k=0, **some))
    assert not np.array_equal(drawn, text(length=40, seed=2, top_k=0, **some))
    assert 7 not in drawn
    assert not list(sample.generate_tokens(GRAPHDEF, model.params, PROMPTS, length=0))


def test_decoding_is_compiled_once():
    sizes = sample._prefill._cache_size, sample._decode._cache_size
    tokens_after(PROMPTS[0], PROMPTS[1], length=3)
    before = [size() for size in sizes]
    tokens_after(PROMPTS[3][:9], PROMPTS[1], length=9, temperature=0.3, seed=9)
    assert [size() for size in sizes] == before


def test_draws_follow_temperature_top_k_and_top_p():
    logits = jnp.tile(jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)

    after_first = jnp.arange(4) > 0

    def close(expected, temperature=1.0, top_p=1.0, **options):
        draws = sample._draw(logits, keys, temperature, top_p, nucleus=top_p < 1, **options)
        counts = np.bincount(draws, minlength=4) / len(keys)
        np.testing.assert_allclose(counts, np.array(expected) / sum(expected), atol=0.03)

    close([4, 3, 2, 1])
    close([0, 3, 2, 1], drawn=after_first)
    close([0, 3, 2, 0], drawn=after_first, top_k=2)
    close([16, 9, 4, 1], temperature=0.5)
    close([4, 3, 0, 0], top_p=0.5)
    close([4, 0, 0, 0], top_p=1e-9)
    close([0, 3, 2, 0], top_p=0.8, drawn=after_first)
    close([4, 3, 0, 0], top_p=0.99, top_k=2)
    close([1, 0, 0, 0], greedy=True)
    close([1, 0, 0, 0], temperature=1e-37)
    tied = sample._draw(0 * logits, keys, 1.0, top_k=2)
    assert set(tied.tolist()) == {0, 1}  # two, though all four are as likely


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_k": 0}, {"top_k": 300, "top_p": 0.99}]
)
def test_a_token_that_no_text_has_is_not_drawn(options, monkeypatch):
    """Where the vocabulary is larger than the tokenizer's, or this one's tokens have a hole."""
    config = dataclasses.replace(MICRO, vocab_size=320)
    params = jax.tree.map(lambda leaf: leaf * 1.0, loader.initial(config).params)
    more = 9 * np.random.default_rng(0).normal(size=(320, MICRO.d_model)).astype(np.float32)
    params["embedding"] = jnp.where(jnp.arange(320)[:, None] % 9 == 7, more, params["embedding"])
    known = {f"w{i}": i for i in range(290) if i != 7}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    generate, tokens = sample.generate_tokens, []

    def noted(*args, **kwargs):
        for chunk in generate(*args, **kwargs):
            tokens.extend(chunk.ravel().tolist())
            yield chunk

    monkeypatch.setattr(sample, "generate_tokens", noted)
    theirs = sample.Tokens(words, {"vocab_size": 320, "bos_token_id": 0})
    ours = sample.codec_of(data.tokenizer.Tokenizer(words, 0, 999))
    for codec, there in ((theirs, known.values()), (ours, known.values()), (None, range(1, 256))):
        model = loader.LanguageModel(config, params, codec=codec or sample.Bytes())
        tokens.clear()
        model.generate(["", "", ""], length=48, **options)
        assert len(tokens) == 144
        assert set(tokens) <= set(there)
    everything = list(noted(sample.decoder(config), params, [[0]] * 3, length=48, **options))
    assert not set(np.concatenate(everything).ravel().tolist()) <= set(known.values())


def test_logits_that_are_not_numbers_are_told():
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, trained().params)
    for temperature in (0, 1):
        with pytest.raises(RunError, match="logits are not numbers"):
            tokens_after(PROMPTS[1], params=params, temperature=temperature)


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (ValueError, "temperature must be at least 0 and finite, got -1", {"temperature": -1}),
        (ValueError, "temperature must be at least 0 and finite, got nan", {"temperature": np.nan}),
        (TypeError, "temperature must be a number, got '1'", {"temperature": "1"}),
        (ValueError, "top_k must be at least 0, got -1", {"top_k": -1}),
        (TypeError, "top_k must be a whole number, got 1.5", {"top_k": 1.5}),
        (ValueError, "top_p must be above 0 and at most 1, got 0", {"top_p": 0}),
        (ValueError, "top_p must be above 0 and at most 1, got 2", {"top_p": 2}),
        (ValueError, "length must be at least 0, got -3", {"length": -3}),
        (ValueError, "seed must be from 0 to 2147483647, got -1", {"seed": -1}),
        (ValueError, "prompts must have at least one prompt", {"prompts": []}),
        (TypeError, r"give a single one as \[prompt\]", {"prompts": [1, 2]}),
        (TypeError, r"give a single one as \[prompt\]", {"prompts": "text"}),
        (ValueError, r"prompts\[1\] must have at least one token", {"prompts": [[1], []]}),
        (TypeError, r"prompts\[0\] must be .* dtype float64", {"prompts": [[0.5]]}),
        (ValueError, r"prompts\[0\] has token 256, .* 0 to 255", {"prompts": [[1, 256]]}),
        (ValueError, r"prompts\[0\] has token -1", {"prompts": [[-1]]}),
    ],
)
def test_wrong_options_are_refused_before_anything_is_computed(error, words, options):
    prompts = options.pop("prompts", [[1]])
    with pytest.raises(error, match=words):
        sample.generate_tokens(GRAPHDEF, trained().params, prompts, **options)


def test_top_k_beyond_the_vocabulary_is_all_of_it():
    kept = {"length": 5, "seed": 2}
    np.testing.assert_array_equal(
        tokens_after(PROMPTS[0], top_k=999, **kept), tokens_after(PROMPTS[0], top_k=256, **kept)
    )


@pytest.mark.newest
def test_decoding_in_bfloat16_and_between_devices():
    """What is drawn depends neither on where the parameters lie nor on how the layers run."""
    options = {"length": 12, "temperature": 0}
    want = tokens_after(*PROMPTS[:2], **options)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(trained().params, NamedSharding(mesh, PartitionSpec()))
    looped = make_model(MICRO, Options(scan_layers=True, remat="layer"))
    got = tokens_after(*PROMPTS[:2], graphdef=looped, params=placed, **options)
    np.testing.assert_array_equal(got, want)
    low = make_model(MICRO, Options(Policy.parse("bf16")))
    assert tokens_after(*PROMPTS[:2], graphdef=low, **options).shape == want.shape


def test_texts_of_a_loaded_model():
    model = trained()
    prompts = ["né€ 🙂", "", "\udcff", "plain"]  # the third is a byte that is no UTF-8
    texts = model.generate(prompts, length=17, seed=3)
    for i, prompt in enumerate(prompts):
        assert model.generate(prompt, length=17, seed=3 + i) == texts[i]
        assert "".join(model.stream(prompt, length=17, seed=3 + i)) == texts[i]
    (ids,) = tokens_after([0, 0xFF], length=17, seed=5, among=range(1, 256))
    assert bytes(ids.tolist()).decode(errors="replace") == texts[2]
    assert model.generate([], length=2) == []
    with pytest.raises(TypeError, match=r"prompts\[1\] must be a text, got 3"):
        model.generate(["x", 3])
    with pytest.raises(TypeError, match="prompts must be a text or several, got 3"):
        model.generate(3)
    without = dataclasses.replace(model, codec=None)
    with pytest.raises(RunError, match=r"no tokenizer.json, which says what its 256 tokens are"):
        without.generate("a")
    assert without.module(Options(remat="scan")).options.remat == "scan"
    assert "Array" not in repr(model)


@pytest.fixture
def run(tmp_path):
    """A run of two checkpoints, as jaxkern train leaves it."""
    model, path = trained(), tmp_path / "run"
    path.mkdir()
    config = {
        "format": checkpoint.FORMAT,
        "flags": {"of": "another version"},
        "model": MICRO.stored(),
        "data": {},
        "precision": str(Policy.parse("bf16")),
        "versions": {"jaxkern": "0.0.9"},
    }
    (path / "config.json").write_text(json.dumps(config))
    for step, factor in ((5, 0.5), (10, 1.0)):
        params = jax.tree.map(lambda leaf, by=factor: leaf * by, model.params)
        checkpoint.save(path, step, params=params, optimizer={"a": jnp.ones(2)}, model=MICRO)
    return path


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_load(run):
    model = jaxkern.lm.load(os.fspath(run))
    assert (model.config, model.step) == (MICRO, 10)
    jax.tree.map(np.testing.assert_array_equal, model.params, trained().params)
    assert model.generate("a", length=8) == trained().generate("a", length=8)
    tokens = np.array([[1, 2, 3, 4]])
    logits = nnx.merge(make_model(MICRO, Options()), model.params)(tokens)
    np.testing.assert_allclose(model(tokens), logits, rtol=1e-5, atol=1e-5)
    half = jaxkern.lm.load(run, step=5)
    np.testing.assert_array_equal(2 * half.params["embedding"], model.params["embedding"])

    # Before these fields were there, models were of one kind.
    kept = ("d_model", "n_layers", "d_state", "expand", "d_conv", "vocab_size")
    old = lambda content: content.update(model={k: content["model"][k] for k in kept})
    rewrite(run / "config.json", old)
    rewrite(run / "checkpoints" / "10" / "manifest.json", old)
    assert jaxkern.lm.load(run).config == MICRO


def test_load_goes_back_from_a_damaged_checkpoint(run):
    manifest = run / "checkpoints" / "10" / "manifest.json"
    rewrite(manifest, lambda content: content["files"].update({"params/more": "0"}))
    with pytest.warns(UserWarning, match=r"/10 is damaged: .*; that of step 5 is loaded") as caught:
        assert jaxkern.lm.load(run).step == 5
    assert caught[0].filename == __file__
    with pytest.raises(RunError, match=r"/10 is damaged"):
        jaxkern.lm.load(run, step=10)
    manifest = run / "checkpoints" / "5" / "manifest.json"
    manifest.unlink()
    with pytest.raises(RunError, match=r"and none in .*run/checkpoints is whole"):
        jaxkern.lm.load(run)


def test_load_says_what_a_folder_is_not(run, tmp_path):
    with pytest.raises(RunError, match=r"has no checkpoint of step 7; it has 5, 10"):
        jaxkern.lm.load(run, step=7)
    with pytest.raises(RunError, match=r"is one checkpoint of a run; give the run's folder, .*run"):
        jaxkern.lm.load(run / "checkpoints" / "10")
    with pytest.raises(RunError, match=r"holds no run \(no config.json\)"):
        jaxkern.lm.load(tmp_path)
    with pytest.raises(RunError, match=r"there is no folder .*nowhere; give one that"):
        jaxkern.lm.load(tmp_path / "nowhere")
    rewrite(run / "config.json", lambda content: content["model"].update(heads=4))
    with pytest.raises(RunError, match=r"was written by version 0.0.9 of jaxkern, .*heads"):
        jaxkern.lm.load(run)
    rewrite(run / "config.json", lambda content: content.update(format="jaxkern-lm-2"))
    with pytest.raises(RunError, match=r"was not written by this version"):
        jaxkern.lm.load(run)
    (run / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(RunError, match=r"is no run, so that it has no step 5"):
        jaxkern.lm.load(run, step=5)
    with pytest.raises(RunError, match=r"layout of Hugging Face, and no run; .*--hf"):
        loader.load_run(run)


def test_several_prompts_from_the_command_line(run, tmp_path, capsys):
    (tmp_path / "prompts").write_bytes("né\r\n\n\xff\n".encode("latin-1"))
    argv = ["sample", "--run", str(run), "--length", "5", "--temperature", "0"]
    file = ["--prompts", str(tmp_path / "prompts")]
    assert cli.main([*argv, "--prompt", "def ", "--prompt", "a", *file]) == 0
    prompts = ["def ", "a", "n\udce9", "\udcff"]
    texts = trained().generate(prompts, length=5, temperature=0)
    shown = "".join(
        f"--- {i + 1}\n{prompt}{text}\n"
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    )
    printed = capsys.readouterr().out
    plain = lambda text: text.encode("utf-8", "replace").decode()
    assert plain(printed) == plain(shown)
    (tmp_path / "prompts").write_text("\n \n")
    assert cli.main([*argv, *file]) == 1
    assert "has no line of text" in capsys.readouterr().err


def test_importing_it_waits_for_nothing():
    code = "import sys, jaxkern.lm; sys.exit('flax' in sys.modules or not jaxkern.lm.load.__doc__)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
