"""Folders of Hugging Face's layout: read as transformers reads them, and nothing beyond them."""

import io
import json
import os

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxkern.lm
from jaxkern.lm import hf
from jaxkern.lm.config import ModelConfig
from jaxkern.lm.data import tokenizer as tokenizers
from tests.language_models import random_params, refused

SIZE = ModelConfig(4, 2, d_state=2, vocab_size=12)
WORDS = ["<s>", "</s>", "<b>", "<e>", "<pad>", "a", "b", "c", "?"]
TEXT = "a<b>b </s> <x>c"


def of_words(words=WORDS, special=("<s>", "</s>"), begun=False, fixed=False):
    """A tokenizer.json that splits texts at spaces and at special tokens."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*special])
    if begun:
        template = {"single": "<s> $A", "special_tokens": [("<s>", 0)]}
        made.post_processor = processors.TemplateProcessing(**template)
    if fixed:
        made.enable_truncation(2)
        made.enable_padding(pad_id=8, pad_token="?", length=12)
    return {"tokenizer": json.loads(made.to_str())}


def write(folder, files, encoding="utf-8"):
    """Write JSON files, by their stems."""
    for stem, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / f"{stem}.json").write_text(text, encoding=encoding)


def said(files=(), **config):
    """Files with a tokenizer_config.json, of a class that has no special tokens of its own."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    return {"tokenizer_config": config, **dict(files)}


older = lambda **special: {"special_tokens_map": special}
model = lambda **config: {"config": config}
generation = lambda **config: {"generation_config": config}
BOTH, X = {"bos_token": "<s>", "eos_token": "</s>"}, {"additional_special_tokens": ["<x>"]}
WIDE = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *WORDS]
ENDS = {"bos_token": WIDE[0], "eos_token": WIDE[1]}
ONE = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
NEW = {"added_tokens_decoder": {"11": {"content": "<x>", "special": False}}}
EXTRA = "extra_special_tokens"

# Files -> what transformers 5.24.0 takes from them: bos, eos and pad of the tokenizer | tokens of
# TEXT | the token that begins, and those that end, a text that is generated.
FOLDERS = {
    "nothing": (said(), "- - - | 8 1 8 | -"),
    "beyond ASCII": (said(of_words(WIDE, WIDE[:2]), **ENDS), "0 1 - | 10 3 10 | -"),
    "older": (said(older(eos_token={"content": "<b>"})), "- 2 - | 5 2 6 1 8 | -"),
    "older overrules": (said(older(bos_token="<b>"), **BOTH), "2 1 - | 5 2 6 1 8 | -"),
    "null": (said(older(bos_token=None, pad_token="<pad>"), **BOTH), "- 1 4 | 8 1 8 | -"),
    "list hides older": (said(older(bos_token="<b>"), **BOTH, **ONE), "0 1 - | 8 1 8 | -"),
    "listed": (said(bos_token="<b>", **NEW), "2 - - | 5 2 6 1 9 7 | -"),
    "new": (said(bos_token="<x>", eos_token="<b>"), "9 2 - | 5 2 6 1 9 7 | -"),
    "additional": (said(older(**X)), "- - - | 8 1 9 7 | -"),
    "extra": (said(older(**{EXTRA: ["<b>"]}), **{EXTRA: ["<x>"]}), "- - - | 5 2 6 1 9 7 | -"),
    "extra by name": (said(**{EXTRA: {"image_token": "<x>"}}), "- - - | 8 1 9 7 | -"),
    "of a kind": (said(image_token="<x>"), "- - - | 8 1 9 7 | -"),
    "added": (said({"added_tokens": {"<x>": 9}}), "- - - | 8 1 9 7 | -"),
    "add bos": (said(add_bos_token=True, add_eos_token=True, **BOTH), "0 1 - | 8 1 8 | -"),
    "begun": (said(of_words(begun=True), add_bos_token=False), "- - - | 0 8 1 8 | -"),
    "split": (said(bos_token="<b>", split_special_tokens=True), "2 - - | 8 1 8 | -"),
    "fixed": (said(of_words(fixed=True), model_max_length=2), "- - 8 | 8 1 8 | -"),
    "model": (said(model(eos_token_id=[2, 4], bos_token_id=3)), "- - - | 8 1 8 | 3 2 4"),
    "end": (said(model(eos_token_id=2) | generation(eos_token_id=4)), "- - - | 8 1 8 | - 4"),
    "no end": (said(model(eos_token_id=2) | generation(bos_token_id=5)), "- - - | 8 1 8 | 5"),
}


def shown(*parts):
    words = lambda part: " ".join("-" if token is None else str(token) for token in part)
    return " | ".join(map(words, parts))


def of_transformers(folder):
    import transformers

    read, options = transformers.AutoTokenizer.from_pretrained(folder), {}
    if not (folder / "generation_config.json").exists():
        options = {"config_file_name": "config.json", "_from_model_config": True}
    said = transformers.GenerationConfig.from_pretrained(folder, **options)
    ends = said.eos_token_id if isinstance(said.eos_token_id, list) else [said.eos_token_id]
    named = read.bos_token_id, read.eos_token_id, read.pad_token_id
    return shown(named, read(TEXT).input_ids, [said.bos_token_id, *ends]).removesuffix(" -")


def of_jaxkern(folder):
    read, run = hf.load_tokenizer(folder), tokenizers.load(folder)
    texts = [tokenizers.text_of(run.said, f"{name}_token") for name in ("bos", "eos", "pad")]
    named = [None if text is None else read.token_to_id(text) for text in texts]
    begin, ends = tokenizers.generation(folder)
    assert run.begin in (named[0], begin) or named[0] is begin is None
    assert run.end in (named[1], *ends) or (named[1] is None and not ends)
    return shown(named, read.encode(TEXT).ids, [begin, *ends])


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(
    "read", [of_jaxkern, pytest.param(of_transformers, marks=pytest.mark.needs("transformers"))]
)
def test_what_a_folder_says(tmp_path, monkeypatch, read, name):
    """Whatever the locale, and with a mark of byte order, which transformers refuses."""
    files, expected = FOLDERS[name]
    files = {"config": {}} | of_words() | files
    files["config"]["model_type"] = "mamba"
    monkeypatch.setattr(io, "text_encoding", lambda given, level=2: given or "ascii")
    for encoding in ["utf-8", "utf-8-sig"][: 1 + (read is of_jaxkern)]:
        write(tmp_path, files, encoding)
        assert read(tmp_path) == expected


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, RENAMED = "backbone.norm_f.weight", [("backbone.", ""), ("embeddings", "embedding")]
RENAMED += [("backbone.embeddings.weight", "lm_head.weight")]
index = lambda file: json.dumps({"weight_map": {NORM: file}})


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "blobs").mkdir()
    hf.save(tmp_path / "snapshots" / "1", SIZE, random_params(SIZE))
    return tmp_path / "snapshots" / "1"


@pytest.mark.parametrize(("ours", "theirs"), RENAMED)
def test_weights_of_other_names_beside_an_old_index(stored, ours, theirs):
    """In a cache of the hub, whose files are links to its blobs."""
    tensors = load_file(stored / WEIGHTS)
    renamed = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(renamed, stored / "../../blobs/1")
    (stored / WEIGHTS).unlink()
    (stored / WEIGHTS).symlink_to("../../blobs/1")
    (stored / INDEX).write_text(index("gone.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, hf.load(stored)[1], random_params(SIZE))


def with_a_tensor_twice(content):
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].decode()
    entry = json.dumps(json.loads(header)[NORM] | {"dtype": "I32"})
    header = f'{{"{NORM}":{entry},{header[1:]}'
    header += " " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header.encode() + content[8 + size :]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (INDEX, index("../secret"), "'../secret' lies outside of the folder"),
        (INDEX, index("/etc/hostname"), "'/etc/hostname' lies outside of the folder"),
        (INDEX, index("link"), "'link' lies outside of the folder"),
        (INDEX, index("part"), "'part' is no file"),
        (INDEX, index(""), "'' is no file"),
        (INDEX, index("a\0"), r"'a\\x00' cannot be read"),
        (INDEX, '{"a":' * 99_999, "is no index of weights: it is nested too deep"),
        (WEIGHTS, with_a_tensor_twice, "has 'backbone.norm_f.weight' twice, with two values"),
        (WEIGHTS, None, "'model.safetensors' is no file"),
        ("config.json", None, "'config.json' is no file"),
        ("config.json", "[" * 99_999, "is no configuration of a model: it is nested too deep"),
        ("config.json", '{"a":' * 70 + "1" + "}" * 70, "it is nested too deep"),
        ("config.json", '{"vocab_size": 12, "vocab_size": 13}', "it has 'vocab_size' twice"),
        ("config.json", '{"a": ' + "9" * 999 + "}", "it has a number of 999 digits"),
        ("config.json", '{"a": "\\ud800"}', "surrogates not allowed"),
        ("config.json", "ä".encode("latin-1"), r"is not UTF-8 \(unexpected end of data at byte 0"),
        ("config.json", " " * (2**24 + 1), "config.json has more than 16,777,216 bytes"),
        ("generation_config.json", '{"eos_token_id": [{}]}', r"eos_token_id is \[{}\], and is"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "name tokens that are none"),
        ("tokenizer_config.json", '{"bos_token": 3}', r"name tokens that are none \(3 is no"),
        ("tokenizer.json", '{"a": 1, "a": 2}', "tokenizer.json is no tokenizer: it has 'a' twice"),
    ],
)
def test_what_a_stranger_wrote_is_refused_in_a_line(stored, name, content, words):
    write(stored, of_words())
    path, weights = stored / name, stored / WEIGHTS
    os.link(weights, stored.parent / "secret")
    (stored / "link").symlink_to("../secret")
    (stored / "part").mkdir()
    content = content(weights.read_bytes()) if callable(content) else content
    for each in (path, weights) if name == INDEX else (path,):
        each.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(f"^[^\n]*{words}[^\n]*$", jaxkern.lm.load, stored)
