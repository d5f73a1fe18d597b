"""Hugging Face's layout: folders read as transformers reads them, models written, runs exported."""

import dataclasses
import functools
import importlib.util
import io
import json
import math
import os
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxkern.lm
from jaxkern.lm import checkpoint, hf, sample
from jaxkern.lm import tokenizer as tokenizers
from jaxkern.lm.config import PRESETS, ModelConfig, TrainConfig
from jaxkern.lm.model import Options
from jaxkern.lm.report import read_metrics
from jaxkern.lm.step import make_model
from jaxkern.lm.train import begun_with
from tests.language_models import (
    command,
    greedy_float64,
    jit,
    logits_float64,
    random_params,
    refused,
    run_of,
)

EXHAUSTIVE = pytest.mark.exhaustive
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIELDS = {"vocab_size": 1100, "d_state": 5, "d_conv": 3}
FIELDS2 = FIELDS | {"head_dim": 8, "n_groups": 2, "tie_embeddings": False}
WITH = FIELDS2 | {"n_kv_heads": 2, "d_mlp": 20}
LAYERS = "mamba2, attention, mlp, mamba2"
GATED = "mamba2, swiglu, attention, swiglu, mamba2, swiglu"
SIZE = ModelConfig(24, 2, expand=3, dt_rank=2, **FIELDS)

# Of each model_type the shape of a model, and what transformers says of it; then, where each key
# has another value, what differs.
LIMIT = (1e-3, math.inf)
MODELS = {
    "mamba": SIZE,
    "mamba2": ModelConfig(24, 2, "mamba2", **FIELDS2),
    "nemotron_h": ModelConfig(
        *(24, 4, LAYERS), n_heads=4, attention_head_dim=10, dt_limit=LIMIT, **WITH
    ),
    "bamba": ModelConfig(*(24, 6, GATED), n_heads=6, attention_head_dim=4, rotary_dim=2, **WITH),
}
BOTH = {"vocab_size": 1100, "hidden_size": 24, "bos_token_id": 0, "eos_token_id": 7}
BOTH |= {"initializer_range": 0.1}
BLOCK = {"num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3, "layer_norm_epsilon": 1e-5}
CONFIGS = {
    "mamba": BLOCK | {"expand": 3, "time_step_rank": 2},
    "mamba2": BLOCK | {"num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
}
CONFIGS["mamba2"] |= {"time_step_limit": [0.0, math.inf]}
CONFIGS["nemotron_h"] = {"ssm_state_size": 5, "mamba_num_heads": 6, "mamba_head_dim": 8}
CONFIGS["nemotron_h"] |= {"n_groups": 2, "chunk_size": 16, "conv_kernel": 3, "head_dim": 10}
CONFIGS["nemotron_h"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS["nemotron_h"] |= {"intermediate_size": 20, "layers_block_type": ["linear_attention"]}
CONFIGS["nemotron_h"]["layers_block_type"] += ["full_attention", "mlp", "linear_attention"]
CONFIGS["bamba"] = {"mamba_d_state": 5, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_conv": 3}
CONFIGS["bamba"] |= {"mamba_n_groups": 2, "mamba_chunk_size": 16, "num_attention_heads": 6}
CONFIGS["bamba"] |= {"num_key_value_heads": 2, "intermediate_size": 20, "num_hidden_layers": 3}
CONFIGS["bamba"] |= {"attn_layer_indices": [1]}
BIASED = {"use_bias": True, "use_conv_bias": False}
ROPE = {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0}
OTHERWISE = {
    "mamba": {"time_step_rank": 1, "tie_word_embeddings": False, "intermediate_size": 48},
    "mamba2": {"n_groups": 1, "time_step_limit": [0.3, 1.5], "tie_word_embeddings": True},
    "nemotron_h": {"time_step_min": 0.3},
    "bamba": {"rope_parameters": ROPE, "rms_norm_eps": 0.3, "tie_word_embeddings": True}
    | {"mamba_proj_bias": True, "mamba_conv_bias": False},
}
OTHER = {
    "mamba": {"dt_rank": 1, "tie_embeddings": False, "expand": 2},
    "mamba2": {"n_groups": 1, "dt_limit": [0.3, 1.5], "tie_embeddings": True},
    "nemotron_h": {"dt_limit": [0.3, "inf"]},
    "bamba": {"rope_theta": 30.0, "rotary_dim": 4, "tie_embeddings": True},
}
CLASSES = {"mamba": "Mamba", "mamba2": "Mamba2", "nemotron_h": "NemotronH", "bamba": "Bamba"}
EVERY = [(kind, otherwise) for kind in MODELS for otherwise in (False, True)]
ONE_BY_DEFAULT = pytest.mark.parametrize(
    "kind",
    ["bamba", *(pytest.param(k, marks=EXHAUSTIVE) for k in ("mamba", "mamba2", "nemotron_h"))],
)


def model_of(kind, otherwise=False):
    """config.json of a model, and its shape."""
    config, size = BOTH | CONFIGS[kind] | {"model_type": kind}, MODELS[kind]
    config["architectures"] = [f"{CLASSES[kind]}ForCausalLM"]
    if otherwise:
        block = {} if kind == "bamba" else BIASED | {"layer_norm_epsilon": 0.3}
        config |= block | OTHERWISE[kind]
        size = dataclasses.replace(size, **OTHER[kind] | BIASED, eps=0.3)
    return config, size


THEIRS = {"norm": "norm.weight", "norm_weight": "mixer.norm.weight", "dt_bias": "mixer.dt_bias"}
THEIRS |= {name: f"mixer.{name}" for name in ("A_log", "D")}
THEIRS |= {f"{name}_bias": f"mixer.{name}_proj.bias" for name in ("in", "out")}
THEIRS |= {f"conv_{name}": f"mixer.conv1d.{name}" for name in ("weight", "bias")}
MIXERS = {"mamba2": "mamba", "attention": "self_attn", "swiglu": "feed_forward"}


def weights(size=SIZE):
    """The tensors of `random_params`, as transformers names them and lays them out."""
    params = jax.tree.map(np.asarray, random_params(size))
    gated = "swiglu" in size.kinds
    prefix, embedding, norm = "backbone", "embeddings", "norm_f"
    if gated:
        prefix, embedding, norm = "model", "embed_tokens", "final_layernorm"
    tensors = {f"{prefix}.{embedding}.weight": params["embedding"]}
    tensors[f"{prefix}.{norm}.weight"] = params["norm"]
    if not size.tie_embeddings:
        tensors["lm_head.weight"] = params["head"].T
    for i, kind in enumerate(size.kinds):
        of_kind = params["blocks"][kind] if size.hybrid else params["blocks"]
        for name, stacked in of_kind.items():
            leaf = stacked[size.kinds[:i].count(kind)]
            leaf = leaf[:, None] if name == "conv_weight" else leaf.T if "proj" in name else leaf
            theirs = THEIRS.get(name, f"mixer.{name}.weight")
            if name == "dt_bias" and kind == "mamba":
                theirs = "mixer.dt_proj.bias"
            if gated and name == "norm":
                theirs = ("pre_ff" if kind == "swiglu" else "input") + "_layernorm.weight"
            at = f"{prefix}.layers.{i // 2 if gated else i}"
            theirs = theirs.replace("mixer", MIXERS[kind]) if gated else theirs
            tensors[f"{at}.{theirs}"] = leaf
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def folder_of(folder, kind="mamba", otherwise=False, tensors=None, **more):
    """A checkpoint as transformers writes it."""
    config, size = model_of(kind, otherwise)
    folder.mkdir(exist_ok=True)
    write(folder, {"config": config | more})
    save_file(weights(size) if tensors is None else tensors, folder / WEIGHTS)
    return folder


def write(folder, files, encoding="utf-8"):
    """Write JSON files, by their stems."""
    for stem, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / f"{stem}.json").write_text(text, encoding=encoding)


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
TOKENS = np.random.default_rng(1).integers(0, SIZE.vocab_size, (2, 9))


@pytest.mark.parametrize(("kind", "otherwise"), EVERY)
def test_what_is_stored_is_read_by_its_name_and_written_back(tmp_path, kind, otherwise):
    """The model gives the logits of float64."""
    config, size = model_of(kind, otherwise)
    stored, saved = folder_of(tmp_path / "stored", kind, otherwise), tmp_path / "saved"
    (stored / "tokenizer.json").write_text("{}")
    loaded, params = hf.load(stored)
    assert loaded == size
    same(params, random_params(size))
    hf.save(saved, loaded, params, like=stored)
    same(load_file(saved / WEIGHTS), weights(size))
    expected = config | ({"expand": size.expand} if kind == "mamba" else {})
    assert expected.items() <= config_in(saved).items()
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert len({(saved / name).stat().st_mode for name in (WEIGHTS, "config.json")}) == 1
    hf.save(saved, loaded, jax.tree.map(jnp.asarray, params))
    assert hf.load(saved)[0] == size
    if otherwise:
        logits = jit(lambda p: nnx.merge(make_model(loaded, Options()), p)(TOKENS))(params)
        expected = np.stack([logits_float64(size, random_params(size), row) for row in TOKENS])
        close(logits, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize(("kind", "otherwise"), EVERY)
def test_logits_are_those_of_transformers(tmp_path, kind, otherwise):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
        torch.manual_seed(0)
        options, size = model_of(kind, otherwise)
        architecture = getattr(transformers, options["architectures"][0])
        theirs = architecture(architecture.config_class(**options)).eval()
        for name, leaf in theirs.named_parameters():
            if name.endswith(("proj.bias", "norm.weight", "mixer.D", "mamba.D")):
                torch.nn.init.normal_(leaf, std=0.3)
        theirs.save_pretrained(tmp_path / "theirs")

        def logits(model):
            with torch.no_grad():
                return model(torch.from_numpy(TOKENS)).logits.numpy()

        expected = logits(theirs)
        config, params = hf.load(tmp_path / "theirs")
        assert config == size
        ours = sample.LanguageModel(config, params)(TOKENS)
        close(ours, expected, atol=3e-6 * np.abs(expected).max())

        for name, like, reader in (
            ("ours", tmp_path / "theirs", architecture),
            ("alone", None, transformers.AutoModelForCausalLM),
        ):
            hf.save(tmp_path / name, config, params, like=like)
            same(logits(reader.from_pretrained(tmp_path / name)), expected)


def test_models_that_do_not_fit_are_not_written(tmp_path):
    for sizes, words in (
        ({"layers": "mamba2, swiglu, mlp", "n_layers": 3}, "transformers has mamba; mamba2; "),
        ({"layers": "mamba2, attention", "rotary_dim": 2}, "transformers has mamba; mamba2; "),
        ({"layers": "mamba2, mlp"}, r"dt_limit is \(0.0, inf\), and Nemotron-H's is a number"),
        ({"norm_groups": 1}, "norm_groups is 1 and n_groups 2, and transformers has one number"),
        ({"norm_eps": 0.5}, "norm_eps is 0.5 and eps 1e-05, and transformers has one number"),
        ({"use_bias": True}, r"params does not fit .*: blocks.in_bias"),
        ({"n_layers": 3}, r"params does not fit .*: blocks.A_log"),
    ):
        size = dataclasses.replace(MODELS["mamba2"], **sizes)
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "saved", size, random_params(MODELS["mamba2"]))
        assert not (tmp_path / "saved").exists()


WRONG = {
    "mamba": [
        ({"model_type": "mamba3"}, "model_type is 'mamba3', and here it is 'mamba' or 'mamba2' or"),
        ({"model_type": ["mamba"]}, "model_type is ['mamba'], and here it is 'mamba' or"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and here it is 'silu'"),
        ({"rms_norm": False}, "rms_norm is False"),
        ({"transformers_weights": "a"}, "transformers_weights is 'a', and here it is 'model.safe"),
        ({"use_bias": True}, "the weights have no backbone.layers.0.mixer.in_proj.bias"),
        ({"use_bias": "no"}, "use_bias is 'no', and must be True or False"),
        ({"use_conv_bias": False}, "the weights have backbone.layers.0.mixer.conv1d.bias"),
        ({"tie_word_embeddings": False}, "the weights have no lm_head.weight"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x', and must be a number"),
        ({"time_step_rank": 9}, "mixer.dt_proj.weight has shape (72, 2), and by config.json"),
        ({"intermediate_size": 9}, "intermediate_size is 9, and here it is a multiple of hidden"),
        ({"hidden_size": None}, "config.json: hidden_size is None, and must be a whole number"),
        ({"vocab_size": 2**25}, "vocab_size is 33554432, and must be from 1 to 2^24"),
        ({"num_hidden_layers": 3}, "the weights have no backbone.layers.2."),
        ({"num_hidden_layers": 1}, "the weights have backbone.layers.1.mixer.A_log"),
    ],
    "mamba2": [
        ({"num_heads": 5}, "num_heads · head_dim is 40, and here it is expand · hidden_size, 48"),
        ({"n_groups": 4}, "config.json: n_groups must divide the heads, expand · d_model / head_"),
        ({"time_step_limit": [0.1]}, "time_step_limit is [0.1], and must be two numbers in order"),
        ({"time_step_limit": [1.0, "x"]}, "time_step_limit is [1.0, 'x'], and must be a number"),
        ({"time_step_limit": [2, 1]}, "time_step_limit is [2, 1], and must be two numbers in"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
        ({"model_type": "mamba", "tie_word_embeddings": False}, "A_log has shape (6,), and by"),
    ],
    "nemotron_h": [
        ({"layers_block_type": ["moe"]}, "the layers are ['moe'], and here they are linear"),
        ({"layers_block_type": "M*"}, "layers_block_type is 'M*', and must be a list"),
        ({"layers_block_type": None, "hybrid_override_pattern": "ME"}, "layers are 'ME'"),
        ({"mlp_bias": True}, "mlp_bias is True, and here it is False"),
        ({"num_key_value_heads": 3}, "n_kv_heads must divide n_heads = 4, got 3"),
    ],
    "bamba": [
        ({"rope_parameters": {"rope_type": "yarn"}}, "and here rope_type is 'default'"),
        ({"rope_scaling": {"factor": 2.0}}, "and here rope_type is 'default'"),
        ({"attn_layer_indices": []}, "the weights have no model.layers.1.mamba."),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_models_of_another_kind_are_refused(tmp_path, kind):
    for wrong, words in WRONG[kind]:
        refused(re.escape(words), hf.load, folder_of(tmp_path, kind, **wrong))


@pytest.fixture
def stored(tmp_path):
    """A checkpoint in a cache of the hub."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    return folder_of(tmp_path / "snapshots" / "1")


def test_weights_under_other_names_in_parts_and_in_bfloat16(stored):
    limit = {"time_step_limit": [0, {"__float__": "Infinity"}]}
    assert hf.model_config(model_of("mamba2")[0] | limit) == MODELS["mamba2"]
    index = lambda **files: (stored / INDEX).write_text(json.dumps({"weight_map": files}))
    wide, embedding = weights(), "backbone.embeddings.weight"
    names = ("backbone.", ""), ("embeddings", "embedding"), (embedding, "lm_head.weight")
    for ours, theirs in names:
        renamed = {name.replace(ours, theirs): tensor for name, tensor in wide.items()}
        save_file(renamed, stored / "../../blobs/1")
        (stored / WEIGHTS).unlink()
        (stored / WEIGHTS).symlink_to("../../blobs/1")
        index(old="gone.safetensors")
        same(hf.load(stored)[1], random_params(SIZE))
    (stored / WEIGHTS).unlink()
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in wide.items()}
    tensors |= {"lm_head.weight": tensors[embedding]}  # the embedding is stored twice
    parts = {f"part-{i}.safetensors": dict(list(tensors.items())[i::2]) for i in (0, 1)}
    for name, part in parts.items():
        save_file(part, stored / name)
    index(**{name: file for file, part in parts.items() for name in part})
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype("f4"), random_params(SIZE))
    same(hf.load(stored)[1], half)


def test_folders_without_a_checkpoint_are_refused(stored, tmp_path):
    (tmp_path / "empty").mkdir()
    mixer = "backbone.layers.1.mixer"
    quantized, twice = {f"{mixer}.D": np.ones(72, np.int8)}, {"norm_f.weight": np.ones(24, "f4")}
    grouped = {f"{mixer}.conv1d.weight": np.ones((72, 2, 3), "f4")}
    having = lambda name, tensors: folder_of(tmp_path / name, tensors=weights() | tensors)
    for folder, words in (
        (tmp_path / "empty", r"holds no checkpoint \(no config.json\); .*hf download"),
        (tmp_path / "nowhere", r"nowhere is no folder; give one that .* hf download"),
        (having("q", quantized), r"layers.1.mixer.D is of dtype I8, and here weights"),
        (having("g", grouped), r"conv1d.weight has shape \(72, 2, 3\), and by .* \(72, 1, 3\)"),
        (having("t", twice), r"the weights have norm_f.weight twice"),
    ):
        refused(words, hf.load, folder)
    of_mamba_ssm = {"d_model": 24, "n_layer": 2, "ssm_cfg": {}, "vocab_size": 1100}
    for file, content, words in (  # one change after the other
        (WEIGHTS, "damaged", r"model.safetensors is damaged"),
        (WEIGHTS, None, r"holds no model.safetensors; download it whole, or write .*save_pretr"),
        (INDEX, [], "index.json cannot be read: it is no JSON object"),
        ("config.json", of_mamba_ssm, r"layout of mamba_ssm; .* ends in -hf, or have"),
        ("config.json", [], "config.json cannot be read: it is no JSON object"),
    ):
        (stored / file).unlink(missing_ok=True)
        if content is not None:
            (stored / file).write_text(json.dumps(content))
        refused(words, hf.load, stored)


of_index = lambda file: json.dumps({"weight_map": {"backbone.norm_f.weight": file}})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (INDEX, of_index("../secret"), "'../secret' lies outside of the folder"),
        (INDEX, of_index("link"), "'link' lies outside of the folder"),
        (INDEX, of_index("part"), "'part' is no file"),
        (INDEX, of_index("a\0"), r"'a\\x00' cannot be read"),
        (INDEX, '{"a":' * 99_999, "cannot be read: maximum recursion depth"),
        ("config.json", None, "'config.json' is no file"),
        ("config.json", '{"a": ' + "9" * 9999 + "}", "cannot be read: .* 9999 digits"),
        ("config.json", "ä".encode("latin-1"), r"is not UTF-8 \(unexpected end of data at byte 0"),
        ("config.json", " " * (2**24 + 1), "config.json has more than 16,777,216 bytes"),
        ("generation_config.json", '{"eos_token_id": [{}]}', r"eos_token_id is \[{}\], and is"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "name tokens that are none"),
        ("tokenizer_config.json", '{"bos_token": 3}', r"name tokens that are none \(3 is no"),
        ("tokenizer.json", '{"a": "\\ud800"}', "tokenizer.json cannot be read "),
    ],
)
def test_what_a_stranger_wrote_is_refused_in_a_line(stored, name, content, words):
    write(stored, of_words())
    os.link(stored / WEIGHTS, stored.parent / "secret")
    (stored / "link").symlink_to("../secret")
    (stored / "part").mkdir()
    for each in {name, WEIGHTS} if name == INDEX else {name}:
        (stored / each).unlink(missing_ok=True)
    if content is None:
        (stored / name).mkdir()
    else:
        (stored / name).write_bytes(content.encode() if isinstance(content, str) else content)
    refused(f"^[^\n]*{words}[^\n]*$", jaxkern.lm.load, stored)


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


def said(files=(), **config):
    """Files with a tokenizer_config.json, of a class that has no special tokens of its own."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    return {"tokenizer_config": config, **dict(files)}


older = lambda **special: {"special_tokens_map": special}
of_model = lambda **config: {"config": config}
generation = lambda **config: {"generation_config": config}
ENDS, X = {"bos_token": "<s>", "eos_token": "</s>"}, {"additional_special_tokens": ["<x>"]}
WIDE = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *WORDS]
ONE = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
NEW = {"added_tokens_decoder": {"11": {"content": "<x>", "special": False}}}
EXTRA = "extra_special_tokens"

# Files -> what transformers 5.24.0 takes from them: bos, eos and pad of the tokenizer | tokens of
# TEXT | the token that begins, and those that end, a text that is generated.
FOLDERS = {
    "nothing": (said(), "- - - | 8 1 8 | -"),
    "beyond ASCII": (
        said(of_words(WIDE, WIDE[:2]), bos_token=WIDE[0], eos_token=WIDE[1]),
        "0 1 - | 10 3 10 | -",
    ),
    "older": (said(older(eos_token={"content": "<b>"})), "- 2 - | 5 2 6 1 8 | -"),
    "older overrules": (said(older(bos_token="<b>"), **ENDS), "2 1 - | 5 2 6 1 8 | -"),
    "null": (said(older(bos_token=None, pad_token="<pad>"), **ENDS), "- 1 4 | 8 1 8 | -"),
    "list hides older": (said(older(bos_token="<b>"), **ENDS, **ONE), "0 1 - | 8 1 8 | -"),
    "listed": (said(bos_token="<b>", **NEW), "2 - - | 5 2 6 1 9 7 | -"),
    "new": (said(bos_token="<x>", eos_token="<b>"), "9 2 - | 5 2 6 1 9 7 | -"),
    "additional": (said(older(**X)), "- - - | 8 1 9 7 | -"),
    "extra": (said(older(**{EXTRA: ["<b>"]}), **{EXTRA: ["<x>"]}), "- - - | 5 2 6 1 9 7 | -"),
    "extra by name": (said(**{EXTRA: {"image_token": "<x>"}}), "- - - | 8 1 9 7 | -"),
    "of a kind": (said(image_token="<x>"), "- - - | 8 1 9 7 | -"),
    "added": (said({"added_tokens": {"<x>": 9}}), "- - - | 8 1 9 7 | -"),
    "add bos": (said(add_bos_token=True, add_eos_token=True, **ENDS), "0 1 - | 8 1 8 | -"),
    "begun": (said(of_words(begun=True), add_bos_token=False), "- - - | 0 8 1 8 | -"),
    "split": (said(bos_token="<b>", split_special_tokens=True), "2 - - | 8 1 8 | -"),
    "fixed": (said(of_words(fixed=True), model_max_length=2), "- - 8 | 8 1 8 | -"),
    "model": (said(of_model(eos_token_id=[2, 4], bos_token_id=3)), "- - - | 8 1 8 | 3 2 4"),
    "end": (said(of_model(eos_token_id=2) | generation(eos_token_id=4)), "- - - | 8 1 8 | - 4"),
    "no end": (said(of_model(eos_token_id=2) | generation(bos_token_id=5)), "- - - | 8 1 8 | 5"),
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
    named = [None if text is None else read.tokenizer.token_to_id(text) for text in texts]
    begin, ends = read.begin, read.ends
    assert run.begin in (named[0], begin) or named[0] is begin is None
    assert run.end in (named[1], *ends) or (named[1] is None and not ends)
    return shown(named, read.encode(TEXT), [begin, *ends])


READERS = [of_jaxkern, *[of_transformers][: importlib.util.find_spec("transformers") is not None]]


@pytest.mark.parametrize("read", READERS)
def test_what_a_folder_says_of_texts(tmp_path, monkeypatch, read):
    """Whatever the locale, and with a mark of byte order, which transformers refuses."""
    monkeypatch.setattr(io, "text_encoding", lambda given, level=2: given or "ascii")
    for name, (files, expected) in FOLDERS.items():
        (tmp_path / name).mkdir()
        files = {"config": {}} | of_words() | files
        files["config"]["model_type"] = "mamba"
        for encoding in ["utf-8", "utf-8-sig"][: 1 + (read is of_jaxkern)]:
            write(tmp_path / name, files, encoding)
            assert read(tmp_path / name) == expected, name


@ONE_BY_DEFAULT
def test_a_checkpoint_is_sampled_from(tmp_path, capsys, kind):
    """With a tokenizer whose tokens are words, the text is the likeliest and ends in time."""
    _, size = model_of(kind, True)
    stored = folder_of(tmp_path, kind, True)
    assert "holds no tokenizer.json" in command(capsys, "sample", "--hf", stored, code=1)
    write(stored, of_words([f"w{i}" for i in range(size.vocab_size)] + ["?"], ()))
    argv = ["sample", "--hf", stored, "--temperature", 0, "--length", 20]
    words = lambda tokens: " ".join(f"w{token}" for token in tokens) + "\n"
    tokens = greedy_float64(size, random_params(size), [5, 9], 20)
    assert command(capsys, *argv, "--prompt", "w5 w9") == words(tokens)

    folder_of(stored, kind, True, eos_token_id=[tokens[4], 3])
    cut = tokens[: 2 + tokens[2:].index(tokens[4])]
    assert command(capsys, *argv, "--prompt", "w5 w9") == words(cut)

    printed = command(capsys, *argv).split()  # no prompt: the text begins with bos_token_id
    begun = greedy_float64(size, random_params(size), [0], len(printed))
    assert printed == words(begun[1:]).split()


def test_a_model_of_bytes_needs_no_tokenizer(tmp_path):
    size = dataclasses.replace(SIZE, vocab_size=256, expand=2)
    more = {"vocab_size": 256, "expand": 2, "time_step_rank": "auto"}
    folder = folder_of(tmp_path, tensors=weights(size), **more)
    assert isinstance(sample.load_hf(folder).codec, tokenizers.Bytes)


@ONE_BY_DEFAULT
def test_export_writes_what_is_loaded(tmp_path, capsys, kind):
    (_, size), theirs = model_of(kind), tmp_path / "theirs"
    params = random_params(size)
    out = run_of(tmp_path / "run", size, params)
    printed = command(capsys, "export", "--run", out, "--hf", theirs)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert printed == f"{theirs}: step 10 of {out}, {count:,} parameters, fp32\n"
    assert sample.load_hf(theirs).config == size
    same(sample.load_hf(theirs).params, params)

    command(capsys, "export", "--run", out, "--hf", theirs, "--step", 5, "--dtype", "bf16")
    half = jax.tree.map(lambda leaf: (leaf / 2).astype(jnp.bfloat16).astype("f4"), params)
    same(sample.load_hf(theirs).params, half)
    assert config_in(theirs)["dtype"] == "bfloat16"

    (tmp_path / "file").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "config.json").write_text("{}")
    for argv, words in (
        (("--hf", tmp_path / "site"), "site holds something else; name another folder"),
        (("--hf", out), "run holds something else"),
        (("--hf", tmp_path / "file"), "file: File exists"),
        (("--hf", tmp_path / "new", "--step", 7), "has no checkpoint of step 7; it has 5, 10"),
    ):
        assert words in command(capsys, "export", "--run", out, *argv, code=1)
    assert "holds no run" in command(capsys, "export", "--run", tmp_path, "--hf", "x", code=1)
    assert checkpoint.read(out)


def test_every_file_of_an_export_is_of_the_tokenizer_of_the_run(tmp_path, capsys):
    """The tokenizer may be that of the run's first checkpoint, another, a new one, or bytes."""
    begun, other, theirs = (tmp_path / name for name in ("begun", "other", "theirs"))
    folder_of(begun, eos_token_id=7, of="theirs")
    write(begun, of_words() | generation(eos_token_id=[1, 3]))
    names = {"pad_token": "<pad>", EXTRA: ["<b>"]}
    write(begun, said(older(**ENDS), **names))
    other.mkdir()
    write(other, of_words(["a", "b", "?", "<pad>", "<z>"], ["<z>"]))
    write(other, said(bos_token="<z>", eos_token="<z>", chat_template="a"))
    out = run_of(tmp_path / "run", SIZE, random_params(SIZE))
    trained = tokenizers.train_bpe(iter([CORPUS]), 270, show=False)
    for spec, expected, kept in (
        (begun, "0 1 4 | 0 5 2 6 1 8 | 0 1 3", {EXTRA}),
        (other, "4 4 3 | 4 2 2 2 | 4 4", {"chat_template"}),
        ("bpe:270", "", set()),
        ("bytes", "0 0 0", set()),
    ):
        told, info = {"init_hf": str(begun), "tokenizer": str(spec)}, {}
        if spec != "bytes":
            read = trained if spec == "bpe:270" else tokenizers.load(spec)
            (out / "tokenizer.json").write_text(read.stored())
            info = {"tokenizer": {"begin": read.begin, "end": read.end}}
        checkpoint.write(out, TrainConfig.from_flags({"model": SIZE} | told), info)
        command(capsys, "export", "--run", out, "--hf", theirs)
        files = {path.name for path in theirs.iterdir()}
        config = config_in(theirs)
        assert config["of"] == "theirs"
        assert ("generation_config.json" in files) == (spec == begun)
        if spec == "bytes":
            assert files == {"config.json", WEIGHTS}
            assert "{bos_token_id} {eos_token_id} {pad_token_id}".format(**config) == expected
            continue
        assert {EXTRA, "chat_template"} & tokenizers.settings(theirs).keys() == kept
        if spec == "bpe:270":
            check_exported_tokenizer(out, theirs)
            continue
        assert {reader(theirs) for reader in READERS} == {expected}
        assert config["pad_token_id"] == int(expected.split()[2])
    line = command(capsys, "export", "--run", out, "--hf", begun, code=1)
    assert "the folder that is written; give another folder" in line


def check_exported_tokenizer(out, theirs):
    own, tokenizer = (json.loads((at / "tokenizer.json").read_text()) for at in (out, theirs))
    assert tokenizer == own | {"post_processor": tokenizer["post_processor"]}
    special = json.loads((theirs / "tokenizer_config.json").read_text())
    assert special["bos_token"] == special["eos_token"] == "<|endoftext|>"
    model, exported = sample.load(out), sample.load(theirs)
    for prompt in ("state", "", "é <|endoftext|>"):
        assert exported.encode(prompt) == model.encode(prompt)
    assert exported.codec.ends == model.codec.ends == (0,)
    return model


CORPUS = "def scan(state): return state\n" * 90


def test_what_is_not_given_is_of_the_preset_most_like_the_checkpoint(tmp_path):
    for name in ("130m", "370m", "1.4b", "mamba2-130m", "mamba2-780m"):
        model = PRESETS[name].model
        config = {"model_type": model.block.name, "hidden_size": model.d_model, "n_groups": 1}
        if model.block.name == "mamba2":
            config["num_heads"] = model.sizes.heads
        config |= {"num_hidden_layers": model.n_layers, "vocab_size": 50280}
        write(tmp_path, {"config": config})
        flags = {"init_hf": str(tmp_path), "lr": 0.5}
        refused(r"holds no tokenizer.json of its 50280 tokens; add", begun_with, flags)
        flags = begun_with(flags | {"tokenizer": "bytes"})
        assert (flags["preset"], flags["lr"]) == (name, 0.5)
        assert flags["model"].vocab_size == 50280
        packed = TrainConfig.from_flags(flags | {"pack": True}).for_tokens(256)
        assert packed.model == flags["model"]
    flags = begun_with({"init_hf": str(tmp_path), "tokenizer": "bpe:60000"})
    words = r"--tokenizer bpe:60000 has 60000 tokens, more than the 50280 of --init-hf"
    refused(words, TrainConfig.from_flags(flags).for_tokens, 60000)
    write(tmp_path, {"config": config | {"vocab_size": 255}})
    of_bytes = TrainConfig.from_flags(begun_with({"init_hf": str(tmp_path)}))
    refused(r"bytes has 256 tokens, more than the 255 of --init-hf", of_bytes.for_tokens, 256)


@pytest.fixture
def argv(tmp_path):
    text = tmp_path / "text"
    text.write_text(CORPUS)
    argv = ["train", "--data", text, "--batch-size", 2, "--seq-len", 16, "--eval-batches", 1]
    return [*argv, "--steps", 4, "--checkpoint-every", 2]


@EXHAUSTIVE
def test_a_run_begins_with_what_another_left(tmp_path, capsys, argv):
    """Its model and tokenizer, exported, which it needs until it has a checkpoint of its own."""
    out, theirs, more = (tmp_path / name for name in ("run", "theirs", "more"))
    command(capsys, *argv, "--preset", "micro", "--tokenizer", "bpe:270", "--out", out)
    command(capsys, "export", "--run", out, "--hf", theirs)
    model = check_exported_tokenizer(out, theirs)
    begun = [*argv, "--init-hf", theirs, "--out"]
    command(capsys, *begun, more, "--steps", 2)
    config, info = checkpoint.read(more)
    size = model.config.vocab_size
    assert (config.preset, config.tokenizer, config.vocab_size) == ("micro", str(theirs), size)
    # Both runs have the same tokens: no document has a second one that begins it.
    assert info | {"folder": ""} == checkpoint.read(out)[1] | {"folder": ""}
    began, ended = (read_metrics(folder / "metrics.jsonl") for folder in (more, out))
    assert began[0]["validation_loss"] == pytest.approx(ended[-1]["validation_loss"], rel=1e-5)
    command(capsys, "export", "--run", more, "--hf", again := tmp_path / "again")
    assert (again / "tokenizer.json").read_text() == (theirs / "tokenizer.json").read_text()

    line = command(capsys, *begun, tmp_path / "x", "--vocab-size", 999, code=1)
    assert f"--vocab-size is what the checkpoint of --init-hf {theirs} has; leave it out" in line
    os.truncate(theirs / WEIGHTS, 999)
    assert "model.safetensors is damaged" in command(capsys, *begun, tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()  # nothing was tokenised
    shutil.rmtree(theirs)
    resume = ["train", "--resume", "--out", more, "--steps", 4]
    assert f"model    {theirs}, " in command(capsys, *resume)
    assert checkpoint.steps(more) == [2, 4]
    assert "the run's" in command(capsys, *resume, "--init-hf", "other", code=1)
    shutil.rmtree(more / "checkpoints")  # killed before the first
    assert f"{theirs} is no folder" in command(capsys, *resume, code=1)
    folder_of(theirs)
    line = command(capsys, *resume, code=1)
    assert "is not the checkpoint that this run was begun with: d_model is 24, not 16" in line
