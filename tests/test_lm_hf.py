"""Checkpoints in the layout of Hugging Face: read, run, written, sampled from, begun with."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxkern.lm
from jaxkern.lm import checkpoint, data, hf, loader, sample
from jaxkern.lm.config import PRESETS, ModelConfig, TrainConfig
from jaxkern.lm.model import Options
from jaxkern.lm.report import read_metrics
from jaxkern.lm.step import make_model
from jaxkern.lm.train import begun_with
from tests import test_lm_hf_folders as folders
from tests.language_models import (
    command,
    greedy_float64,
    jit,
    logits_float64,
    loss_float64,
    random_params,
    refused,
    run_of,
)

BOTH = {"vocab_size": 1100, "hidden_size": 24, "bos_token_id": 0, "eos_token_id": 7}
OF_MAMBA = {"num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3, "layer_norm_epsilon": 1e-5}
OF_MAMBA |= BOTH | {"initializer_range": 0.1}
CONFIG = OF_MAMBA | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
CONFIG |= {"expand": 3, "time_step_rank": 2}
SIZE = ModelConfig(24, 2, d_state=5, expand=3, d_conv=3, vocab_size=1100)
CONFIG2 = OF_MAMBA | {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
CONFIG2 |= {"num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 16}
CONFIG2 |= {"time_step_limit": [0.0, math.inf]}
SIZE2 = ModelConfig(24, 2, "mamba2", d_state=5, d_conv=3, head_dim=8, n_groups=2)
SIZE2 = dataclasses.replace(SIZE2, vocab_size=1100, tie_embeddings=False)
NEMOTRON = BOTH | {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
NEMOTRON |= {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]}
NEMOTRON |= {"ssm_state_size": 5, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2}
NEMOTRON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "chunk_size": 16}
NEMOTRON |= {"intermediate_size": 20, "conv_kernel": 3, "initializer_range": 0.1}
LAYERS, ATTENTION = "mamba2, attention, mlp, mamba2", {"n_heads": 4, "n_kv_heads": 2, "d_mlp": 20}
WITH = dataclasses.replace(SIZE2, n_layers=4, layers=LAYERS, dt_limit=(1e-3, math.inf))
WITH = dataclasses.replace(WITH, attention_head_dim=10, **ATTENTION)
BAMBA = BOTH | {"model_type": "bamba", "architectures": ["BambaForCausalLM"]}
BAMBA |= {"num_hidden_layers": 3, "attn_layer_indices": [1], "intermediate_size": 20}
BAMBA |= {"mamba_d_state": 5, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2}
BAMBA |= {"num_attention_heads": 6, "num_key_value_heads": 2, "mamba_chunk_size": 16}
BAMBA |= {"mamba_d_conv": 3, "initializer_range": 0.1}
LAYERS = "mamba2, swiglu, attention, swiglu, mamba2, swiglu"
GATED = dataclasses.replace(SIZE2, n_layers=6, layers=LAYERS, **ATTENTION | {"n_heads": 6})
GATED = dataclasses.replace(GATED, rotary_dim=2)

# What config.json may say otherwise, and the fields of that model's shape.
ROPE = {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0}
BIAS, NO_BIAS = ({"use_bias": True},) * 2, ({"use_conv_bias": False},) * 2
EPSILON = {"layer_norm_epsilon": 0.3}, {"eps": 0.3}
TIED = {"tie_word_embeddings": True}, {"tie_embeddings": True}
OTHERS = {
    "mamba": {
        "rank": ({"time_step_rank": 1}, {"dt_rank": 1}),
        "untied": ({"tie_word_embeddings": False}, {"tie_embeddings": False}),
        "inner": ({"intermediate_size": 48}, {"expand": 2}),
        "epsilon": EPSILON,
        "bias": BIAS,
        "no conv bias": NO_BIAS,
    },
    "mamba2": {
        "one group": ({"n_groups": 1}, {"n_groups": 1}),
        "limit": ({"time_step_limit": [0.3, 1.5]}, {"dt_limit": [0.3, 1.5]}),
        "epsilon": EPSILON,
        "bias": BIAS,
        "no conv bias": NO_BIAS,
        "tied": TIED,
    },
    "nemotron_h": {
        "limit": ({"time_step_min": 0.3}, {"dt_limit": [0.3, "inf"]}),
        "epsilon": EPSILON,
        "bias": BIAS,
        "no conv bias": NO_BIAS,
    },
    "bamba": {
        "epsilon": ({"rms_norm_eps": 0.3}, {"eps": 0.3}),
        "bias": ({"mamba_proj_bias": True}, {"use_bias": True}),
        "rotary": ({"rope_parameters": ROPE}, {"rope_theta": 30.0, "rotary_dim": 4}),
        "tied": TIED,
    },
}
KINDS = {"mamba": (CONFIG, SIZE), "mamba2": (CONFIG2, SIZE2)}
KINDS |= {"nemotron_h": (NEMOTRON, WITH), "bamba": (BAMBA, GATED)}
ONE_BY_DEFAULT = pytest.mark.parametrize(
    "kind",
    [
        *("mamba2", "bamba"),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("mamba", "nemotron_h")),
    ],
)


def model_of(kind, which="none"):
    """config.json of a model, and its shape; of "all" with all that it may say otherwise."""
    config, size = KINDS[kind]
    stored = size.stored()
    for name, (theirs, ours) in OTHERS[kind].items():
        if which in ("all", name):
            config, stored = config | theirs, stored | ours
    return config, ModelConfig.from_stored(stored)


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


def write(folder, tensors=None, config=CONFIG, **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | more))
    tensors = weights(SIZE2 if config is CONFIG2 else SIZE) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def stored(tmp_path):
    return write(tmp_path / "stored")


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
EVERY = [(kind, which) for kind in KINDS for which in ("none", *OTHERS[kind])]
TOKENS = np.random.default_rng(1).integers(0, SIZE.vocab_size, (2, 9))


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("kind", "which"), [*EVERY, *((kind, "all") for kind in KINDS)])
def test_what_is_stored_is_read_by_its_name_and_written_back(tmp_path, kind, which):
    """And its logits are those of float64, with all that it may say otherwise."""
    config, size = model_of(kind, which)
    tensors = weights(size)
    stored, saved = write(tmp_path / "stored", tensors, config), tmp_path / "saved"
    (stored / "tokenizer.json").write_text("{}")
    loaded, params = hf.load(stored)
    assert loaded == size
    same(params, random_params(size))
    hf.save(saved, loaded, params, like=stored)
    same(load_file(saved / "model.safetensors"), tensors)
    if kind == "mamba":
        config = config | {"expand": size.expand}
    assert config.items() <= config_in(saved).items()
    assert (saved / "tokenizer.json").read_text() == "{}"
    hf.save(saved, loaded, jax.tree.map(jnp.asarray, params))
    assert hf.load(saved)[0] == size
    if which == "all":
        logits = jit(lambda p: nnx.merge(make_model(loaded, Options()), p)(TOKENS))(params)
        expected = np.stack([logits_float64(size, random_params(size), row) for row in TOKENS])
        close(logits, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize(("kind", "which"), EVERY)
def test_logits_are_those_of_transformers(tmp_path, kind, which):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
        torch.manual_seed(0)
        options, size = model_of(kind, which)
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
        ours = loader.LanguageModel(config, params)(TOKENS)
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
        ({"norm_groups": 1}, "norm_groups is 1, and transformers normalises as many groups"),
        ({"norm_eps": 0.5}, "norm_eps is 0.5 and eps 1e-05, and transformers has one epsilon"),
        ({"use_bias": True}, r"params has shapes.*blocks.in_bias"),
    ):
        size = ModelConfig.from_stored(SIZE2.stored() | sizes)
        with pytest.raises(ValueError, match=words):
            hf.save(tmp_path / "saved", size, random_params(SIZE2))
        assert not (tmp_path / "saved").exists()


def test_load_takes_other_spellings_shards_a_stored_head_and_bfloat16(tmp_path):
    assert hf.model_config(CONFIG2 | {"time_step_limit": [0, {"__float__": "Infinity"}]}) == SIZE2
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in weights().items()}
    folder = write(tmp_path, tensors, torch_dtype="bfloat16")
    _, expected = hf.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(expected)} == {np.dtype(np.float32)}

    embedding = tensors.pop("backbone.embeddings.weight")
    tensors |= {"backbone.embedding.weight": embedding, "lm_head.weight": embedding}
    parts = {f"part-{i}.safetensors": dict(list(tensors.items())[i::2]) for i in (0, 1)}
    for name, part in parts.items():
        save_file(part, folder / name)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    same(hf.load(folder)[1], expected)


WRONG = [
    ({"model_type": "mamba3"}, "model_type is 'mamba3', and here it is 'mamba', 'mamba2',"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and here it is 'silu'"),
    ({"rms_norm": False}, "rms_norm is False"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ({"use_bias": True}, "the weights have no backbone.layers.0.mixer.in_proj.bias"),
    ({"use_bias": "no"}, "use_bias is 'no', and must be true or false"),
    ({"use_conv_bias": False}, "the weights have backbone.layers.0.mixer.conv1d.bias"),
    ({"tie_word_embeddings": False}, "the weights have no lm_head.weight"),
    ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon is '1e-5', and must be a number"),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0, and must be a number above 0"),
    ({"time_step_rank": 9}, "the weights have shapes {'blocks.dt_proj': (2, 2, 72)"),
    ({"time_step_rank": "x"}, "time_step_rank is 'x', and must be \"auto\" or a whole number"),
    ({"intermediate_size": 9}, "intermediate_size is 9, and here it is a multiple of hidden"),
    ({"hidden_size": "x"}, "hidden_size is 'x', and must be a whole number, at least 1"),
    ({"hidden_size": None}, "config.json does not say hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a whole number, at least"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"vocab_size": 1100.0}, "vocab_size is 1100.0"),
    ({"vocab_size": 2**25}, "vocab_size is 33554432, and must be a whole number, at most 16777216"),
    ({"transformers_weights": "a"}, "transformers_weights is 'a', and here it is 'model.safe"),
    ({"vocab_size": 1099}, "'embedding': (1100, 24)"),
    ({"num_hidden_layers": 3}, "the weights have no backbone.layers.2.mixer.A_log"),
    ({"num_hidden_layers": 1}, "the weights have backbone.layers.1.mixer.A_log"),
]
WRONG3 = [
    (NEMOTRON, {"layers_block_type": ["moe"]}, "the layers are ['moe'], and here they are linear"),
    (NEMOTRON, {"layers_block_type": "M*"}, "layers_block_type is 'M*', and must be a list of te"),
    (NEMOTRON | {"layers_block_type": None}, {"hybrid_override_pattern": "ME"}, "layers are 'ME'"),
    (NEMOTRON, {"mlp_bias": True}, "mlp_bias is True, and here it is False"),
    (NEMOTRON, {"mamba_num_heads": 8}, "mamba_num_heads · mamba_head_dim is 64, and here it is"),
    (NEMOTRON, {"num_key_value_heads": 3}, "n_kv_heads must divide n_heads = 4, got 3"),
    (BAMBA, {"attention_bias": True}, "attention_bias is True, and here it is False"),
    (BAMBA, {"rope_parameters": {"rope_type": "yarn"}}, "and here rope_type is 'default'"),
    (BAMBA, {"rope_scaling": {"factor": 2.0}}, "and here rope_type is 'default'"),
    (BAMBA, {"attn_layer_indices": []}, "the weights have no model.layers.1.mamba."),
]
WRONG2 = [
    ({"num_heads": 5}, "num_heads · head_dim is 40, and here it is expand · hidden_size, 48"),
    (
        {"n_groups": 4},
        "config.json: n_groups must divide the heads, expand · d_model / head_",
    ),
    ({"n_groups": 1}, "the weights have shapes {'blocks.conv_bias': (2, 68), "),
    ({"time_step_limit": [0.1, True]}, "time_step_limit is [0.1, True], and must be two numbers"),
    ({"time_step_limit": [0.1]}, "time_step_limit is [0.1], and must be two numbers in order"),
    ({"time_step_limit": [1.0, "inf"]}, "time_step_limit is [1.0, 'inf'], and must be two"),
    ({"time_step_limit": [2, 1]}, "time_step_limit is [2, 1], and must be two numbers in"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
    (CONFIG | {"tie_word_embeddings": False}, "the weights have no backbone.layers.0.mixer."),
]


@pytest.mark.parametrize(
    ("given", "wrong", "words"),
    [*((CONFIG, *row) for row in WRONG), *((CONFIG2, *row) for row in WRONG2), *WRONG3],
)
def test_models_of_another_kind_are_refused(tmp_path, given, wrong, words):
    tensors = weights(KINDS[given["model_type"]][1])
    refused(re.escape(words), hf.load, write(tmp_path, tensors, given, **wrong))


def test_folders_without_a_checkpoint_are_refused(stored, tmp_path):
    (tmp_path / "empty").mkdir()
    quantized = weights() | {"backbone.layers.1.mixer.D": np.ones(72, np.int8)}
    grouped = weights() | {"backbone.layers.1.mixer.conv1d.weight": np.ones((72, 2, 3), "f4")}
    twice = weights() | {"norm_f.weight": np.ones(24, "f4")}
    of_hub = "hf download a/b --local-dir b and give the folder b"
    for folder, words in (
        (tmp_path / "empty", r"holds no checkpoint \(no config.json\); .*hf download"),
        (tmp_path / "nowhere", r"there is no folder .*nowhere; give one that"),
        ("a/b", of_hub),
        (write(tmp_path / "q", quantized), r"layers.1.mixer.D is of dtype I8, and here weights"),
        (write(tmp_path / "g", grouped), r"the layers' mixer.conv1d.weight are of wrong shapes"),
        (write(tmp_path / "t", twice), r"the weights have norm_f.weight twice"),
    ):
        refused(words, hf.load, folder)
    refused(of_hub, jaxkern.lm.load, "a/b")
    of_mamba_ssm = {"d_model": 24, "n_layer": 2, "ssm_cfg": {}, "vocab_size": 1100}
    of_mamba2 = of_mamba_ssm | {"ssm_cfg": {"layer": "Mamba2"}}
    of_a_run = {"format": "jaxkern-lm-1", "flags": {}}
    for file, content, words in (  # one change after the other
        ("model.safetensors", "damaged", r"model.safetensors is damaged"),
        ("model.safetensors", None, r"holds no model.safetensors; download it whole"),
        ("pytorch_model.bin", "", r"pytorch_model.bin is not read; .*save_pretrained"),
        ("model.safetensors.index.json", [], r"index.json is no index of weights"),
        ("config.json", of_mamba_ssm, r"of mamba_ssm; .* ends in -hf, .* convert_mamba_ssm"),
        ("config.json", of_mamba2, r"layout of mamba_ssm; .* convert_mamba2_ssm"),
        ("config.json", of_a_run, r"a run of jaxkern train; load it with jaxkern sample"),
        ("config.json", [], r"config.json is no configuration"),
    ):
        (stored / file).unlink(missing_ok=True)
        if content is not None:
            (stored / file).write_text(json.dumps(content))
        refused(words, hf.load, stored)


def test_importing_it_without_safetensors_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "jaxkern.lm.hf")
    with pytest.raises(ImportError, match="pip install safetensors tokenizers"):
        importlib.import_module("jaxkern.lm.hf")


@ONE_BY_DEFAULT
def test_sample(tmp_path, capsys, kind):
    """With a tokenizer whose tokens are words, the text is the likeliest and ends in time."""
    config, size = model_of(kind, "all")
    tensors = weights(size)
    stored = write(tmp_path, tensors, config)
    names = {f"w{i}": i for i in range(size.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(stored / "tokenizer.json"))
    argv = ["sample", "--hf", stored, "--temperature", 0, "--length", 20]
    words = lambda tokens: " ".join(f"w{token}" for token in tokens) + "\n"
    tokens = greedy_float64(size, random_params(size), [5, 9], 20)
    assert command(capsys, *argv, "--prompt", "w5 w9") == words(tokens)

    write(stored, tensors, config, eos_token_id=[tokens[4], 3])
    cut = tokens[: 2 + tokens[2:].index(tokens[4])]
    assert command(capsys, *argv, "--prompt", "w5 w9") == words(cut)

    shown = command(capsys, *argv).split()  # no prompt: the text begins with bos_token_id
    begun = greedy_float64(size, random_params(size), [0], len(shown))
    assert shown == words(begun[1:]).split()


def test_a_model_of_bytes_needs_no_tokenizer(tmp_path, stored, capsys):
    line = command(capsys, "sample", "--hf", stored, code=1)
    assert "holds no tokenizer.json" in line
    config = CONFIG | {"vocab_size": 256, "expand": 2, "time_step_rank": "auto"}
    size = ModelConfig.from_stored(SIZE.stored() | {"vocab_size": 256, "expand": 2})
    folder = write(tmp_path / "bytes", weights(size), config)
    assert isinstance(loader.load_hf(folder).codec, sample.Bytes)


def test_characters_of_several_tokens_are_shown_whole(monkeypatch):
    tokens = models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
    fallback = Tokenizer(tokens)
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rest = "né€ 🙂".encode()
    for codec in (sample.Tokens(fallback, 256), sample.Bytes()):
        for end, last in ((b"", []), (b"\xe2\xff", ["��"])):
            pieces = [np.array([[token]]) for token in rest + end]
            monkeypatch.setattr(sample, "generate_tokens", lambda *_, p=pieces, **__: iter(p))
            written = [text for (text,) in sample.continuations(None, None, codec, ["a"])]
            shown = "".join(written).removeprefix("né€ 🙂")
            assert shown == "".join(last)
            if not end:
                assert list(filter(None, written)) == ["n", "é", "€", " ", "🙂"]


MAMBA2_OF_8 = {"layers": "mamba2", "head_dim": 8}
HEADS = {"layers": "mamba, attention", "n_layers": 2, "n_heads": 2}


@pytest.mark.parametrize(
    ("error", "words", "stored"),
    [
        (ValueError, "n_layers must be at least 1, got 0", {"n_layers": 0}),
        (TypeError, "d_model must be a whole number, got 'x'", {"d_model": "x"}),
        (TypeError, "d_state must be a whole number or None, got True", {"d_state": True}),
        (TypeError, "tie_embeddings must be True or False, got 1", {"tie_embeddings": 1}),
        (ValueError, "eps must be above 0 and finite, got 0", {"eps": 0.0}),
        (ValueError, "dt_rank must be at least 1, got 0", {"dt_rank": 0}),
        (ValueError, "layers must be names of mamba, .* got 'mamba3'", {"layers": "mamba3"}),
        (ValueError, r"got 'mamba\*0'", {"layers": "mamba*0"}),
        (ValueError, "must have one of mamba and mamba2, and not both", {"layers": "mlp"}),
        (ValueError, "are 3 layers, and n_layers 1 .* choose 3", {"layers": "mamba, mlp*2"}),
        (ValueError, "head_dim must divide .* got 64", {"layers": "mamba2"}),
        (ValueError, "n_groups must divide .* 2, got 3", MAMBA2_OF_8 | {"n_groups": 3}),
        (ValueError, "n_heads must divide d_model = 8, got 3", HEADS | {"n_heads": 3}),
        (ValueError, "n_kv_heads must divide n_heads = 2", HEADS | {"n_kv_heads": 4}),
        (ValueError, "rotary_dim must be even and at most the 4", HEADS | {"rotary_dim": 6}),
        (ValueError, "norm_groups must divide .* 16, got 3", MAMBA2_OF_8 | {"norm_groups": 3}),
        (ValueError, "dt_limit must be two numbers in order", {"dt_limit": [2, 1]}),
        (TypeError, "layers must be a text, got", {"layers": ["mamba"]}),
        (ValueError, "eps must be above 0 and finite, got nan", {"eps": math.nan}),
        (ValueError, "dropout must be .* below 1, got 1.0", {"dropout": 1.0}),
        (TypeError, "unexpected keyword argument 'headdim'", {"headdim": 4}),
    ],
)
def test_shapes_that_no_model_has_are_refused(error, words, stored):
    with pytest.raises(error, match=words):
        ModelConfig.from_stored({"d_model": 8, "n_layers": 1} | stored)


def checkpoint_of(folder, size=SIZE):
    """A checkpoint with a file and a key of its own."""
    hf.save(folder, size, random_params(size))
    content = config_in(folder) | {"eos_token_id": 7, "of": "theirs"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@ONE_BY_DEFAULT
def test_export_writes_what_is_loaded(tmp_path, capsys, kind):
    (_, size), theirs = model_of(kind), tmp_path / "theirs"
    params = random_params(size)
    out = run_of(tmp_path / "run", size, params)
    printed = command(capsys, "export", "--run", out, "--hf", theirs)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert printed == f"{theirs}: step 10 of {out}, {count:,} parameters, fp32\n"
    assert loader.load_hf(theirs).config == size
    same(loader.load_hf(theirs).params, params)

    command(capsys, "export", "--run", out, "--hf", theirs, "--step", 5, "--dtype", "bf16")
    half = jax.tree.map(lambda leaf: (leaf / 2).astype(jnp.bfloat16).astype("f4"), params)
    same(loader.load_hf(theirs).params, half)
    assert config_in(theirs)["dtype"] == "bfloat16"

    (tmp_path / "file").touch()
    for argv, words in (
        (("--hf", out), "holds a run; name another folder"),
        (("--hf", tmp_path / "file"), "is a file; name a folder"),
        (("--hf", tmp_path / "new", "--step", 7), "has no checkpoint of step 7; it has 5, 10"),
    ):
        assert words in command(capsys, "export", "--run", out, *argv, code=1)
    assert "holds no run" in command(capsys, "export", "--run", tmp_path, "--hf", "x", code=1)
    assert checkpoint.read_config(out)


def test_every_file_of_an_export_is_of_the_tokenizer_of_the_run(tmp_path, capsys):
    """That of the checkpoint which the run began with, another one, or bytes."""
    begun, other, theirs = (tmp_path / name for name in ("begun", "other", "theirs"))
    checkpoint_of(begun)
    folders.write(begun, folders.of_words() | folders.generation(eos_token_id=[1, 3]))
    names = {"pad_token": "<pad>", "extra_special_tokens": ["<b>"]}
    folders.write(begun, folders.said(folders.older(**folders.BOTH), **names))
    other.mkdir()
    folders.write(other, folders.of_words(["a", "b", "?", "<pad>", "<z>"], ["<z>"]))
    folders.write(other, folders.said(bos_token="<z>", eos_token="<z>", chat_template="a"))
    out, readers = run_of(tmp_path / "run", SIZE, random_params(SIZE)), [folders.of_jaxkern]
    if importlib.util.find_spec("transformers"):
        readers.append(folders.of_transformers)
    for spec, expected, kept in (
        (begun, "0 1 4 | 0 5 2 6 1 8 | 0 1 3", {"extra_special_tokens"}),
        (other, "4 4 3 | 4 2 2 2 | 4 4", {"chat_template"}),
        ("bytes", "0 0 0", set()),
    ):
        told = {"flags": {"init_hf": str(begun), "tokenizer": str(spec)}}
        if spec != "bytes":
            read = data.tokenizer.load(spec)
            (out / "tokenizer.json").write_text(read.stored())
            told["data"] = {"tokenizer": {"begin": read.begin, "end": read.end}}
        (out / "config.yaml").write_text(json.dumps(told["flags"]))
        record = json.loads((out / "run.json").read_text()) | {"data": told.get("data", {})}
        (out / "run.json").write_text(json.dumps(record))
        command(capsys, "export", "--run", out, "--hf", theirs)
        files = {path.name for path in theirs.iterdir()}
        config = config_in(theirs)
        assert config["of"] == "theirs"
        if spec == "bytes":
            assert files == {"config.json", "model.safetensors"}
            assert "{bos_token_id} {eos_token_id} {pad_token_id}".format(**config) == expected
            continue
        assert {reader(theirs) for reader in readers} == {expected}
        assert config["pad_token_id"] == int(expected.split()[2])
        names = {"extra_special_tokens", "chat_template"}
        assert names & data.tokenizer.settings(theirs).keys() == kept
        assert ("generation_config.json" in files) == (spec == begun)
    line = command(capsys, "export", "--run", out, "--hf", begun, code=1)
    assert "is the checkpoint that the run began with; name another" in line


def check_exported_tokenizer(out, theirs):
    own, tokenizer = (json.loads((at / "tokenizer.json").read_text()) for at in (out, theirs))
    assert tokenizer == own | {"post_processor": tokenizer["post_processor"]}
    special = json.loads((theirs / "tokenizer_config.json").read_text())
    assert special["bos_token"] == special["eos_token"] == "<|endoftext|>"
    model, exported = loader.load(out), loader.load(theirs)
    for prompt in ("state", "", "é <|endoftext|>"):
        assert exported.encode(prompt) == model.encode(prompt)
    assert exported.codec.ends == model.codec.ends == {0}
    return model


TEXT = "def scan(state): return state\n" * 90


def test_export_takes_the_tokenizer_of_the_run_along(tmp_path, capsys):
    trained = data.tokenizer.train_bpe(iter([TEXT]), 270, show=False)
    told = {"tokenizer": {"begin": 0, "end": 0, "size": trained.size}}
    options = {"flags": {"tokenizer": "bpe:270"}, "data": told}
    out = run_of(tmp_path / "run", SIZE, random_params(SIZE), **options)
    (out / "tokenizer.json").write_text(trained.stored())
    command(capsys, "export", "--run", out, "--hf", tmp_path / "theirs")
    check_exported_tokenizer(out, tmp_path / "theirs")


def test_what_is_not_given_is_of_the_preset_most_like_the_checkpoint(tmp_path):
    for name in ("130m", "370m", "1.4b", "mamba2-130m", "mamba2-780m"):
        model = PRESETS[name].model
        config = {"model_type": model.block.name, "hidden_size": model.d_model, "n_groups": 1}
        if model.block.name == "mamba2":
            config["num_heads"] = model.sizes.heads
        config |= {"num_hidden_layers": model.n_layers, "vocab_size": 50280}
        (tmp_path / "config.json").write_text(json.dumps(config))
        flags = {"init_hf": str(tmp_path), "lr": 0.5}
        refused(r"holds no tokenizer.json, .* its 50280 tokens are", begun_with, flags)
        flags = begun_with(flags | {"tokenizer": "bytes"})
        assert (flags["preset"], flags["lr"]) == (name, 0.5)
        assert flags["model"].vocab_size == 50280
        packed = TrainConfig.from_flags(flags | {"pack": True}).for_tokens(256)
        assert packed.model == flags["model"]
    flags = begun_with({"init_hf": str(tmp_path), "tokenizer": "bpe:60000"})
    words = r"bpe:60000 has 60000 tokens, more than the 50280 of --init-hf"
    refused(words, TrainConfig.from_flags(flags).for_tokens, 60000)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 255}))
    words = r"--init-hf .* 255 tokens, and bytes are 256; name a"
    refused(words, begun_with, {"init_hf": str(tmp_path)})


@pytest.fixture
def argv(tmp_path):
    text = tmp_path / "text"
    text.write_text(TEXT)
    argv = ["train", "--data", text, "--batch-size", 2, "--seq-len", 16, "--eval-batches", 1]
    return [*argv, "--steps", 4, "--checkpoint-every", 2]


@pytest.mark.exhaustive
def test_a_run_begins_with_a_checkpoint(tmp_path, capsys, argv):
    small = ModelConfig(16, 1, d_state=5, vocab_size=300)
    begun, out = checkpoint_of(tmp_path / "begun", small), tmp_path / "run"
    flags = ["--init-hf", begun, "--tokenizer", "bytes", "--out", out]
    command(capsys, *argv, *flags, "--steps", 2)
    config = checkpoint.read_config(out)
    rate = config["flags"]["optimizer"]["lr"]
    assert (config["flags"]["preset"], rate) == ("micro", PRESETS["micro"].optimizer.lr)
    assert config["flags"]["init_hf"] == str(begun)
    assert ModelConfig.from_stored(config["model"]) == small

    trained = checkpoint.config_of(out, config)
    ((_, (batch,)),) = data.reopen(trained, out, config["data"]).validation(trained)
    loss = loss_float64(small, random_params(small), batch.tokens)
    first = read_metrics(out / "metrics.jsonl")[0]
    assert first["validation_loss"] == pytest.approx(loss, rel=1e-5)

    shutil.rmtree(begun)  # a run that has a checkpoint needs it no more
    resume = ["train", "--resume", "--out", out, "--steps", 4]
    assert f"model    {begun}, " in command(capsys, *resume)
    assert checkpoint.steps(out) == [2, 4]
    assert loader.load(out).config == small
    assert "the run's" in command(capsys, *resume, "--init-hf", "other", code=1)
    shutil.rmtree(out / "checkpoints")  # killed before the first
    assert f"there is no folder {begun}" in command(capsys, *resume, code=1)
    checkpoint_of(begun, SIZE2)
    line = command(capsys, *resume, code=1)
    assert "is not the checkpoint that this run was begun with: d_model is 24, not 16" in line


@pytest.mark.exhaustive
def test_a_tokenizer_goes_with_the_model_and_comes_back(tmp_path, capsys, argv):
    """A run with a tokenizer is exported, and another begins with that, and with its tokenizer."""
    out, theirs, more = (tmp_path / name for name in ("run", "theirs", "more"))
    argv += ["--preset", "micro"]
    command(capsys, *argv, "--tokenizer", "bpe:270", "--out", out)
    command(capsys, "export", "--run", out, "--hf", theirs)
    model = check_exported_tokenizer(out, theirs)
    options = ["--prompt", "state", "--prompt", "", "--seed", 3, "--length", 40]
    texts = [command(capsys, "sample", *at, *options) for at in (("--run", out), ("--hf", theirs))]
    assert texts[0] == texts[1]

    command(capsys, *argv, "--init-hf", theirs, "--out", more)
    flags = checkpoint.read_config(more)["flags"]
    assert (flags["tokenizer"], flags["vocab_size"]) == (str(theirs), model.config.vocab_size)
    tokenizer = (theirs / "tokenizer.json").read_text()
    assert json.loads((more / "tokenizer.json").read_text()) == json.loads(tokenizer)
    assert loader.load(more).encode("state") == model.encode("state")
    # Both runs have the same tokens: no document has a second one that begins it.
    kept = [checkpoint.read_config(folder)["data"] | {"folder": ""} for folder in (more, out)]
    assert kept[0] == kept[1]
    began, ended = (read_metrics(folder / "metrics.jsonl") for folder in (more, out))
    assert began[0]["validation_loss"] == pytest.approx(ended[-1]["validation_loss"], rel=1e-5)
    again = tmp_path / "again"
    command(capsys, "export", "--run", more, "--hf", again)
    assert (again / "tokenizer.json").read_text() == tokenizer
    argv += ["--out", tmp_path / "x", "--init-hf", theirs]
    line = command(capsys, *argv, "--vocab-size", 999, code=1)
    assert f"--vocab-size 999 is not that of --init-hf {theirs}, " in line
    os.truncate(theirs / "model.safetensors", 999)
    assert "model.safetensors is damaged" in command(capsys, *argv, code=1)
    assert not (tmp_path / "x").exists()  # nothing was tokenised
