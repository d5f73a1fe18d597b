"""Models loaded, called, and sampled from: one prompt and several, texts and tokens."""

import dataclasses
import functools
import json
import os
import random
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkern.lm
from jaxkern.lm import cli, sample
from jaxkern.lm import model as lm_model
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.model import Options, initial_params
from jaxkern.lm.step import make_model
from jaxkern.lm.tokenizer import Bytes, Tokenizer
from jaxkern.precision import Policy
from tests import check
from tests.check import exhaustive
from tests.language_models import (
    HYBRID,
    MICRO,
    ROTARY,
    command,
    greedy_float64,
    jit,
    logits_float64,
    random_params,
    refused,
    run_of,
)

GRAPHDEF, PARAMS = make_model(MICRO, Options()), random_params(MICRO)
MODEL = sample.LanguageModel(MICRO, PARAMS, 10)
BYTES = range(1, 256)
# Of three prompts, and of one, with these options: few programs are compiled.
PROMPTS = [*b"def "], [*b"a"], list(range(1, 41))
GREEDY, DRAWN = {"temperature": 0, "among": BYTES}, {"seed": 5, "top_p": 0.7, "among": BYTES}


def tokens_after(*prompts, graphdef=GRAPHDEF, params=PARAMS, **options):
    chunks = list(sample.generate_tokens(graphdef, params, prompts, **options))
    return np.concatenate(chunks, axis=1)


@pytest.fixture
def parts(monkeypatch):
    """The longest prompt is read in three parts, all padded."""
    monkeypatch.setattr(sample, "_PART", 16)


@pytest.mark.parametrize("shape", [MICRO, HYBRID, exhaustive(ROTARY)])
def test_the_likeliest_tokens_are_those_of_float64(parts, monkeypatch, shape):
    """After prompts of unequal lengths, in two chunks; attention has room for all of them."""
    monkeypatch.setattr(sample, "_LEAST", 16)
    if shape.hybrid:
        monkeypatch.setattr(lm_model, "_SMALL", 512)  # matrices are sliced in the loop
        shape = dataclasses.replace(shape, layers=f"{shape.kinds[0]}, attention", n_layers=2)
    model = sample.LanguageModel(shape, random_params(shape), codec=None)  # of any tokens
    found = model.generate(PROMPTS, length=21, temperature=0)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert [*prompt, *tokens] == greedy_float64(shape, model.params, prompt, 21)
    assert model.generate(PROMPTS, length=0) == [[], [], []]
    if shape is MICRO:
        alone = model.stream(jnp.array(PROMPTS[1]), length=21, temperature=0)
        assert [token for piece in alone for token in piece] == found[1]
        return
    with pytest.raises(ValueError, match="length must say how many tokens"):
        model.module().init_state(1)
    step = jit(lambda params, state: model.module().step(jnp.array([5]), state))
    state = model.module().init_state(1, 2)
    for known in (True, True, False):
        logits, state = step(model.params, state)
        assert np.isfinite(logits).all() == known


def test_tokens_in_bfloat16_are_the_likeliest_to_rounding():
    found = MODEL.generate(PROMPTS, length=21, temperature=0, dtype="bf16")
    graphdef, params = MODEL.decoder("bf16")
    decoder = nnx.merge(graphdef, params)
    dtypes = {name: leaf.dtype for name, leaf in params["blocks"].items()}
    assert (dtypes["in_proj"], dtypes["A_log"], params["norm"].dtype) == ("bfloat16", "f4", "f4")
    in_training = nnx.merge(make_model(MICRO, Options(Policy.parse("bf16"))), PARAMS)
    errors = []
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        whole = jnp.asarray([[*prompt, *tokens]])
        of_tokens = MODEL(whole)[0, len(prompt) - 1 : -1, 1:]  # byte 0 is never drawn
        taken = np.take_along_axis(of_tokens, np.array(tokens)[:, None] - 1, -1)[:, 0]
        assert np.all(of_tokens.max(-1) - taken <= 2 * 2**-8 * np.abs(of_tokens).max())
        both = (model(whole)[0, len(prompt) - 1 : -1, 1:] for model in (decoder, in_training))
        errors.append([check.relative_error(logits, of_tokens) for logits in both])
    ours, plain = np.max(errors, axis=0)
    assert 2**-12 < ours <= 2 * plain  # in bf16, as in training
    with pytest.raises(ValueError, match="dtype='int8' is not a known floating dtype; use one of"):
        MODEL.generate("a", dtype="int8")


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_loop_over_tokens_leaves_parameters_to_products(kind, monkeypatch):
    """In it are no slices of small parameters, and nothing is computed of them alone."""
    monkeypatch.setattr(lm_model, "_SMALL", 40_000)  # of which out_proj has less
    config = ModelConfig(64, 3, kind, vocab_size=256, d_state=64)
    params = jax.eval_shape(lambda: initial_params(config))
    graphdef = make_model(config, Options(Policy.parse("bf16")))
    before = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_state(1), params)

    def decode(params, tokens, state):
        model = nnx.merge(graphdef, params)
        small = [model.small_params(*of) for of in model.each_layer]
        return jax.lax.scan(
            lambda state, token: model.step(token, state, small)[::-1], state, tokens
        )

    tokens = jax.ShapeDtypeStruct((5, 1), jnp.int32)
    text = check.lowered(decode, params, tokens, before).partition("stablehlo.while")[2]
    text = text.partition("func.func")[0]
    sliced = 3 if kind == "mamba" else 2  # in_proj; x_proj and what dt_proj multiplies, or a gate
    assert text.count("stablehlo.slice") == config.n_layers * sliced
    assert not re.search("stablehlo.(exponential|negate)", text)


def test_prompts_of_unequal_lengths_are_continued_as_each_is_alone(parts):
    together = tokens_after(*PROMPTS, length=21, **DRAWN)
    assert len({tuple(row) for row in together}) == 3
    for i in (0, 2):
        alone = tokens_after(PROMPTS[i], length=21, **DRAWN | {"seed": 5 + i})
        np.testing.assert_array_equal(together[i], alone[0])
    short = tokens_after(PROMPTS[0], length=9, **DRAWN)
    np.testing.assert_array_equal(short[0], together[0, :9])
    assert not np.array_equal(short, tokens_after(PROMPTS[0], length=9, **DRAWN | {"seed": 6}))
    # Neither lengths nor numbers are compiled.
    sizes = sample._prefill._cache_size, sample._decode._cache_size
    before = [size() for size in sizes]
    tokens_after(PROMPTS[1] * 9, length=3, **DRAWN | {"temperature": 0.3, "seed": 9})
    assert [size() for size in sizes] == before
    broken = jax.tree.map(lambda leaf: leaf * np.nan, PARAMS)
    for options in (GREEDY, DRAWN):
        with pytest.raises(RunError, match="logits are not numbers"):
            tokens_after(*PROMPTS, params=broken, **options)


@pytest.mark.exhaustive
def test_decoding_depends_neither_on_devices_nor_on_loops():
    options = {"length": 12, "temperature": 0}
    want = tokens_after(*PROMPTS[:2], **options)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    looped = make_model(MICRO, Options(scan_layers=True, remat="layer"))
    got = tokens_after(*PROMPTS[:2], graphdef=looped, params=placed, **options)
    np.testing.assert_array_equal(got, want)
    low = make_model(MICRO, Options(Policy.parse("bf16")))
    assert tokens_after(*PROMPTS[:2], graphdef=low, **options).shape == want.shape


def test_draws_follow_temperature_top_k_and_top_p(monkeypatch):
    logits = jnp.tile(jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), (4000, 1))
    keys, after_first = jax.random.split(jax.random.key(0), 4000), jnp.arange(4) > 0
    for expected, options in (
        ([4, 3, 2, 1], {}),
        ([0, 3, 2, 1], {"drawn": after_first}),
        ([0, 3, 2, 0], {"drawn": after_first, "top_k": 2}),
        ([16, 9, 4, 1], {"temperature": 0.5}),
        ([4, 3, 0, 0], {"top_p": 0.5}),
        ([4, 0, 0, 0], {"top_p": 1e-9}),
        ([0, 3, 2, 0], {"top_p": 0.8, "drawn": after_first}),
        ([4, 3, 0, 0], {"top_p": 0.99, "top_k": 2}),
        ([1, 0, 0, 0], {"greedy": True}),
        ([1, 0, 0, 0], {"temperature": 1e-37}),
        ([1, 0, 0, 0], {"temperature": 1e-30, "top_p": 0.9}),
    ):
        options = {"temperature": 1.0, "nucleus": "top_p" in options} | options
        counts = np.bincount(sample._draw(logits, keys, **options), minlength=4) / len(keys)
        np.testing.assert_allclose(counts, np.array(expected) / sum(expected), atol=0.03)
    tied = sample._draw(0 * logits, keys, 1.0, top_k=2)
    assert set(tied.tolist()) == {0, 1}  # two, though all four are as likely

    monkeypatch.setattr(sample, "_generate", lambda *arguments: arguments[-1])
    for options, top_k, greedy, nucleus in (
        ({}, 40, False, False),
        ({"top_k": 999, "top_p": 0.9}, 256, False, True),
        ({"top_k": 1}, 1, True, False),
        ({"temperature": 0, "top_k": 0}, 0, True, False),
        ({"temperature": 1e-39}, 40, True, False),
    ):
        found = sample.generate_tokens(GRAPHDEF, PARAMS, [[1]], among=[0, 2, 999], **options)
        assert np.flatnonzero(found["drawn"]).tolist() == [0, 2]
        compiled = {"top_k": top_k, "greedy": greedy, "nucleus": nucleus}
        assert {name: found[name] for name in compiled} == compiled


def test_a_token_that_no_text_has_is_not_drawn(monkeypatch):
    """The vocabulary is larger than the tokenizer's, or the tokenizer leaves a number out."""
    config, options = dataclasses.replace(MICRO, vocab_size=320), {"top_k": 300, "top_p": 0.99}
    likely = jnp.where(jnp.arange(320) % 9 == 7, 9.0, 1.0)[:, None]
    params = random_params(config)
    params = params | {"embedding": params["embedding"] * likely}
    known = {f"w{i}": i for i in range(290) if i != 7}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    generate, tokens = sample.generate_tokens, []

    def noted(*args, **kwargs):
        for chunk in generate(*args, **kwargs):
            tokens.extend(chunk.ravel().tolist())
            yield chunk

    monkeypatch.setattr(sample, "generate_tokens", noted)
    theirs = Tokenizer(words, 0, (), template=True)
    ours = Tokenizer(words, 0, (999,))
    small = dataclasses.replace(MODEL, codec=ours)
    refused("tokenizer.json has token 289, and the model has 256", small.encode, "w289")
    for codec, there in ((theirs, known.values()), (ours, known.values()), (Bytes(), BYTES)):
        model = sample.LanguageModel(config, params, codec=codec)
        tokens.clear()
        model.generate(["", "", ""], length=48, **options)
        assert len(tokens) == 144
        assert set(tokens) <= set(there)
    tokens.clear()
    graphdef = make_model(config, Options())
    list(noted(graphdef, params, [[0]] * 3, length=48, among=range(320), **options))
    assert not set(tokens) <= set(known.values())


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (ValueError, "temperature must be at least 0 and finite, got nan", {"temperature": np.nan}),
        (TypeError, "temperature must be a number, got 'x'", {"temperature": "x"}),
        (TypeError, "top_k must be a whole number, got 1.5", {"top_k": 1.5}),
        (ValueError, "top_p must be above 0 and at most 1, got 0", {"top_p": 0}),
        (ValueError, "length must be from 0 to .*, got -3", {"length": -3}),
        (TypeError, r"prompts\[0\] must be a sequence of integers, got", {"prompts": [1, 2]}),
        (ValueError, r"prompts\[1\] must have at least one token", {"prompts": [[1], []]}),
        (TypeError, r"prompts\[0\] must be .* dtype float64", {"prompts": [[0.5]]}),
        (ValueError, r"prompts\[0\] has token 256, .* 0 to 255", {"prompts": [[1, 256]]}),
        (ValueError, r"prompts\[0\] has token -1", {"prompts": [[-1]]}),
        (TypeError, r"prompts\[1\] must be a sequence of integers, got", {"texts": ["x", 3]}),
        (TypeError, "prompts must be a text or token ids, or several, got 3", {"texts": 3}),
        (TypeError, "unexpected keyword argument 'lenght'", {"texts": "a", "lenght": 3}),
        (TypeError, "stop ends texts, and a prompt is of tokens", {"texts": [[1]], "stop": ["a"]}),
        (TypeError, "stop must be a sequence of texts, got 'a'", {"texts": "a", "stop": "a"}),
        (ValueError, "stop has an empty text", {"texts": "a", "stop": [""]}),
    ],
)
def test_wrong_options_are_refused_before_anything_is_computed(error, words, options):
    tokens = functools.partial(sample.generate_tokens, GRAPHDEF, PARAMS, prompts=[[1]])
    texts = lambda texts, **options: MODEL.generate(texts, **options)
    with pytest.raises(error, match=words):
        (texts if "texts" in options else tokens)(**options)


def test_texts_of_a_loaded_model():
    prompts = ["né€ 🙂", "\udcff", ""]  # the second is a byte that is no UTF-8
    options = {"length": 17, "top_p": 0.7}
    texts = MODEL.generate(prompts, seed=3, **options)
    for i, prompt in enumerate(prompts):
        assert MODEL.generate(prompt, seed=3 + i, **options) == texts[i]
    assert "".join(MODEL.stream(prompts[0], seed=3, **options)) == texts[0]
    (ids,) = tokens_after([0, 0xFF], seed=4, among=BYTES, **options)
    assert bytes(ids.tolist()).decode(errors="replace") == texts[1]
    assert MODEL.generate([], length=2) == []
    without = dataclasses.replace(MODEL, codec=None)
    refused("holds no tokenizer.json, of its 256 tokens", without.generate, "a")
    assert without.module(Options(remat="scan")).options.remat == "scan"
    assert "Array" not in repr(MODEL)


def test_characters_of_several_tokens_are_shown_whole(monkeypatch):
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    read = tokenizers.Tokenizer(tokenizers.models.BPE(fallback, [], byte_fallback=True))
    of_bytes = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    read.decoder = tokenizers.decoders.Sequence(of_bytes)
    for codec in (Tokenizer(read, None, (), template=True), Bytes()):
        model = dataclasses.replace(MODEL, codec=codec)
        for end, last in ((b"", ""), (b"\xe2\xff", "��")):
            pieces = [np.array([[token]]) for token in "né€ 🙂".encode() + end]
            monkeypatch.setattr(sample, "generate_tokens", lambda *_, p=pieces, **__: iter(p))
            written = list(model.stream("a"))
            assert "".join(written) == f"né€ 🙂{last}"
            if not end:
                assert list(filter(None, written)) == ["n", "é", "€", " ", "🙂"]
    # A text that has ended within a character is not written again while another goes on.
    chunks = np.array([[0xE2, 0], [97, 98]]), np.array([[1, 1], [99, 100]])
    monkeypatch.setattr(sample, "generate_tokens", lambda *_, **__: iter(chunks))
    model = dataclasses.replace(MODEL, codec=Tokenizer(read, None, (0,), template=True))
    assert model.generate(["a", "a"]) == ["�", "abcd"]


def before(text, stops):
    """The text up to the first of other texts that is complete in it."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def test_a_text_ends_before_the_first_stop_however_it_comes():
    """Random texts come in random pieces."""
    generator = random.Random(0)
    for stops in (["ab"], ["aab", "b"], ["abab", "ba"], ["c"], ["aaaa", "aab"]):
        for _ in range(200):
            text = "".join(generator.choices("ab", k=generator.randint(0, 12)))
            read, shown, at, ended = sample._reader(lambda t, _: "".join(t), stops), "", 0, False
            while not ended and at < len(text):
                size = generator.randint(1, 4)
                piece, ended = read([*text[at : at + size]], False)
                shown, at = shown + piece, at + size
            if not ended:
                shown += read([], True)[0]
            assert shown == before(text, stops)
            assert ended == (shown != text)


def test_texts_of_several_prompts_end_each_by_itself():
    """The prompts are of unequal lengths; a stop text may lie across two chunks."""
    prompts, options = ["a", "a longer prompt", "of 17 bytes or so"], {"length": 40}
    whole = MODEL.generate(prompts, seed=3, **options)
    assert len(set(whole)) == 3
    for stops in ([whole[0][14:18]], [whole[1][3:5], whole[2][30:33]], ["not there at all"]):
        ended = [before(text, stops) for text in whole]
        assert MODEL.generate(prompts, seed=3, stop=stops, **options) == ended
        assert "".join(MODEL.stream(prompts[1], seed=4, stop=stops, **options)) == ended[1]

    # Decoding ends when all texts have.
    options, timing = {"length": 4000, "seed": 3, "stop": [whole[0][1:3]]}, sample.Timing()
    assert str(timing) == "no token was decoded"
    assert MODEL.generate("a", timing=timing, **options) == whole[0][:1]
    assert re.fullmatch(r"the first 16 tokens after .* s, compilation included", str(timing))


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path / "run", MICRO, PARAMS, mixed_precision="bf16")


def test_load(run):
    model = jaxkern.lm.load(os.fspath(run))
    assert (model.config, model.step) == (MICRO, 10)
    jax.tree.map(np.testing.assert_array_equal, model.params, PARAMS)
    assert model.decode(model.encode("é")) == "é"
    tokens = np.array([[1, 2, 3, 4]])
    expected = logits_float64(MICRO, PARAMS, tokens[0])
    np.testing.assert_allclose(model(tokens)[0], expected, rtol=1e-4, atol=1e-5 * expected.max())
    half = jaxkern.lm.load(run, step=5)
    np.testing.assert_array_equal(2 * half.params["embedding"], model.params["embedding"])
    # It goes back from a damaged checkpoint.
    shutil.rmtree(run / "checkpoints" / "10" / "state")
    words = r"/10 cannot be read \(.*; that of step 5 is loaded"
    with pytest.warns(UserWarning, match=words) as caught:
        assert jaxkern.lm.load(run).step == 5
    assert caught[0].filename == __file__
    refused(r"/10 cannot be read", jaxkern.lm.load, run, step=10)
    shutil.rmtree(run / "checkpoints" / "5" / "state")
    refused(r"/10 cannot be read .*, nor any other of 5, 10", jaxkern.lm.load, run)


def test_load_says_what_a_folder_is_not(run, tmp_path):
    def rewrite(**change):
        path = run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    refused(r"has no checkpoint of step 7; it has 5, 10", jaxkern.lm.load, run, step=7)
    refused(r"holds no run \(no run.json\)", jaxkern.lm.load, tmp_path)
    refused(r"there is no folder .*nowhere; give one that", jaxkern.lm.load, tmp_path / "nowhere")
    rewrite(format="jaxkern-lm-1")
    refused(r"was not written by this version", jaxkern.lm.load, run)
    (run / "config.json").write_text('{"model_type": "mamba"}')
    refused(r"is no run, so that it has no step 5", jaxkern.lm.load, run, step=5)


def test_a_terminal_gets_no_control_bytes(monkeypatch, capsys):
    text = "\x1b[2J\ta\nb\r\x07\x7f\x9b é"
    monkeypatch.setattr(MODEL.__class__, "_pieces", lambda *_, **__: iter([["\x1b"]]))
    MODEL.write([text])
    assert capsys.readouterr().out == f"{text}\x1b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    MODEL.write([text + "\udc9b"])
    shown = r"\x1b[2J" + "\ta\nb" + r"\x0d\x07\x7f\x9b é\x9b" + "\\x1b\n"
    assert capsys.readouterr().out == shown


def test_the_command_line(run, tmp_path, capsys):
    (tmp_path / "prompts").write_bytes("né\r\n\n\xff\n".encode("latin-1"))
    argv = ["sample", "--run", run, "--length", 5, "--temperature", 0]
    file = ["--prompts", tmp_path / "prompts"]
    printed = command(capsys, *argv, "--prompt", "def ", *file)
    prompts = ["def ", "n\udce9", "\udcff"]
    texts = MODEL.generate(prompts, length=5, temperature=0)
    each = enumerate(zip(prompts, texts, strict=True), 1)
    shown = "".join(f"--- {i}\n{prompt}{text}\n" for i, (prompt, text) in each)
    plain = lambda text: text.encode("utf-8", "replace").decode()
    assert plain(printed) == plain(shown)
    (tmp_path / "prompts").write_text("\n \n")
    assert "has no line of text" in command(capsys, *argv, *file, code=1)

    argv = ["sample", "--run", str(run), "--prompt", "a", "--length", "40"]
    assert cli.main([*argv, "--timing"]) == 0
    printed, told = capsys.readouterr()
    first = r"jaxkern: the first 16 tokens after \d+\.\d\d s, compilation included; "
    assert re.fullmatch(first + r"then 24 at [\d,]+ tokens/s\n", told)
    stops = printed[2:4], printed[20:23]
    assert cli.main([*argv, "--stop", stops[0], "--stop", stops[1]]) == 0
    assert capsys.readouterr() == ("a" + before(printed[1:-1], stops) + "\n", "")
    assert "--stop must have a value, got ''" in command(capsys, *argv, "--stop", "", code=2)
