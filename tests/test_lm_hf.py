"""Checkpoints in the layout of Hugging Face: read, run, written back, sampled from."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxkern.lm
from jaxkern.lm import cli, hf, sample
from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.model import Options, decayed
from jaxkern.lm.step import loss_fn, make_model
from jaxkern.nn import mamba, mamba2
from tests.language_models import logits_float64

SIZE = ModelConfig(mamba.Sizes(24, d_state=5, expand=3, d_conv=3), 2, vocab_size=1100)
CONFIG = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 1100,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "state_size": 5,
    "expand": 3,
    "conv_kernel": 3,
    "time_step_rank": 2,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 7,
    "initializer_range": 0.1,
}
SIZE2 = ModelConfig(
    mamba2.Sizes(24, d_state=5, d_conv=3, headdim=8, ngroups=2),
    2,
    vocab_size=1100,
    tie_embeddings=False,
)
CONFIG2 = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 1100,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "state_size": 5,
    "conv_kernel": 3,
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, math.inf],
    "chunk_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 7,
    "initializer_range": 0.1,
}
# Unoptimised code of the same program is made much sooner.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# What config.json may say otherwise, and the fields of that model's shape.
OTHERS = {
    "epsilon": ({"layer_norm_epsilon": 0.3}, {"eps": 0.3}),
    "bias": ({"use_bias": True}, {"use_bias": True}),
    "no conv bias": ({"use_conv_bias": False}, {"use_conv_bias": False}),
    "rank": ({"time_step_rank": 1}, {"dt_rank": 1}),
    "untied": ({"tie_word_embeddings": False}, {"tie_embeddings": False}),
    "inner": ({"intermediate_size": 48}, {"expand": 2}),
}
OTHERS2 = {
    "epsilon": ({"layer_norm_epsilon": 0.3}, {"eps": 0.3, "norm_eps": 0.3}),
    "bias": OTHERS["bias"],
    "no conv bias": OTHERS["no conv bias"],
    "tied": ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
    "one group": ({"n_groups": 1}, {"ngroups": 1}),
    "limit": ({"time_step_limit": [0.3, 1.5]}, {"dt_limit": (0.3, 1.5)}),
}
KINDS = {"mamba": (CONFIG, SIZE, OTHERS), "mamba2": (CONFIG2, SIZE2, OTHERS2)}
KIND = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, which="none"):
    """config.json of a model, and its shape; of "all" with all that it may say otherwise."""
    config, size, others = KINDS[kind]
    names = list(others) if which == "all" else [which] if which in others else []
    stored = size.stored()
    for name in names:
        config, stored = config | others[name][0], stored | others[name][1]
    return config, ModelConfig.from_stored(stored)


ALL, ALL_SIZE = model_of("mamba", "all")


def layer_of(size):
    """The tensors of a mixer: theirs, the fields of the block's weights, their shapes."""
    s = size.sizes
    d, e, n = s.d_model, s.d_inner, s.d_state
    if size.block.name == "mamba":
        inputs, convolved = 2 * e, e
        own = {
            "x_proj.weight": ("x_proj", (s.rank + 2 * n, e)),
            "dt_proj.weight": ("dt_proj", (e, s.rank)),
            "dt_proj.bias": ("dt_bias", (e,)),
            "A_log": ("A_log", (e, n)),
            "D": ("D", (e,)),
        }
    else:
        inputs, convolved = 2 * (e + s.ngroups * n) + s.heads, e + 2 * s.ngroups * n
        own = {
            "dt_bias": ("dt_bias", (s.heads,)),
            "A_log": ("A_log", (s.heads,)),
            "D": ("D", (s.heads,)),
            "norm.weight": ("norm_weight", (e,)),
        }
    tensors = {
        "in_proj.weight": ("in_proj", (inputs, d)),
        "conv1d.weight": ("conv_weight", (convolved, 1, s.d_conv)),
        "conv1d.bias": ("conv_bias", (convolved,)),
        **own,
        "out_proj.weight": ("out_proj", (d, e)),
        "in_proj.bias": ("in_bias", (inputs,)),
        "out_proj.bias": ("out_bias", (d,)),
    }
    if not s.use_conv_bias:
        del tensors["conv1d.bias"]
    if not s.use_bias:
        del tensors["in_proj.bias"], tensors["out_proj.bias"]
    return tensors


def weights(size=SIZE):
    """Random tensors by the names and shapes of the layout, away from any symmetry."""
    d = size.d_model
    shapes = {"backbone.embeddings.weight": (size.vocab_size, d), "backbone.norm_f.weight": (d,)}
    for i in range(size.n_layers):
        shapes[f"backbone.layers.{i}.norm.weight"] = (d,)
        for name, (_, shape) in layer_of(size).items():
            shapes[f"backbone.layers.{i}.mixer.{name}"] = shape
    if not size.tie_embeddings:
        shapes["lm_head.weight"] = size.vocab_size, d
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape, scale=0.5).astype(np.float32) for name, shape in shapes.items()
    }


def params_of(tensors, size):
    """The model's parameters, from the stored tensors by names."""

    def ours(i, name):
        tensor = tensors[f"backbone.layers.{i}.mixer.{name}"]
        return tensor[:, 0] if name == "conv1d.weight" else tensor.T if "proj.w" in name else tensor

    layers = range(size.n_layers)
    blocks = {
        field: np.stack([ours(i, name) for i in layers])
        for name, (field, _) in layer_of(size).items()
    }
    blocks["norm"] = np.stack([tensors[f"backbone.layers.{i}.norm.weight"] for i in layers])
    params = {
        "embedding": tensors["backbone.embeddings.weight"],
        "norm": tensors["backbone.norm_f.weight"],
        "blocks": blocks,
    }
    return params if size.tie_embeddings else params | {"head": tensors["lm_head.weight"].T}


def write(folder, tensors=None, config=CONFIG, **more):
    folder.mkdir(exist_ok=True)
    config = config | more
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = weights(SIZE2 if config["model_type"] == "mamba2" else SIZE)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def stored(tmp_path):
    return write(tmp_path / "stored")


def forward(config, params, tokens):
    return jit(lambda p, t: nnx.merge(make_model(config, Options()), p)(t))(params, tokens)


TOKENS = np.random.default_rng(1).integers(0, SIZE.vocab_size, (2, 9))


@pytest.mark.parametrize(
    ("kind", "which"),
    [("mamba", which) for which in ("none", "bias", "rank", "untied", "all")]
    + [("mamba2", which) for which in ("none", "all")],
)
def test_logits_are_those_of_float64(tmp_path, kind, which):
    config, size = model_of(kind, which)
    tensors = weights(size)
    loaded, params = hf.load(write(tmp_path, tensors, config))
    assert loaded == size
    logits = forward(size, params, TOKENS)
    expected = np.stack([logits_float64(size, params_of(tensors, size), row) for row in TOKENS])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())


@KIND
def test_a_model_of_other_options_is_trained_saved_and_decoded(tmp_path, kind):
    config, size = model_of(kind, "all")
    tensors = weights(size)
    loaded, params = hf.load(write(tmp_path / "stored", tensors, config))
    graphdef = make_model(loaded, Options())
    grads = jit(jax.grad(functools.partial(loss_fn, graphdef)))(params, TOKENS)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))
    decays = decayed(params)
    assert decays.get("head", True)
    assert not decays["blocks"]["in_bias"]

    hf.save(tmp_path / "saved", loaded, params, like=tmp_path / "stored")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "saved")[1], params)
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    for keys, _ in KINDS[kind][2].values():
        assert keys == {name: said[name] for name in keys}
    without = dataclasses.replace(loaded, sizes=dataclasses.replace(loaded.sizes, use_bias=False))
    with pytest.raises(ValueError, match=r"params has shapes.*blocks.in_bias"):
        hf.save(tmp_path / "saved", without, params)

    (chunk,) = sample.generate_tokens(graphdef, params, [TOKENS[0]], length=3, temperature=0)
    assert [*TOKENS[0], *chunk[0]] == greedy(tensors, TOKENS[0], 3, size)


@pytest.mark.parametrize(
    ("kind", "which"),
    [(kind, which) for kind, (_, _, others) in KINDS.items() for which in ("none", *others)],
)
def test_logits_are_those_of_transformers(tmp_path, kind, which):
    reason = "transformers and torch are not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason=reason)
        transformers = pytest.importorskip("transformers", reason=reason)
        torch.manual_seed(0)
        options, size = model_of(kind, which)
        architecture = getattr(transformers, options["architectures"][0])
        theirs = architecture(architecture.config_class(**options)).eval()
        norm = getattr(theirs.backbone.layers[0].mixer, "norm", None)
        if options.get("n_groups", 1) > 1 and not hasattr(norm, "group_size"):
            pytest.skip("this version of transformers normalises all groups together")
        for name, leaf in theirs.named_parameters():
            if name.endswith(("proj.bias", "mixer.norm.weight", "mixer.D")):
                torch.nn.init.normal_(leaf, std=0.3)
        theirs.save_pretrained(tmp_path / "theirs")

        def logits(model):
            with torch.no_grad():
                return model(torch.from_numpy(TOKENS)).logits.numpy()

        expected = logits(theirs)
        config, params = hf.load(tmp_path / "theirs")
        assert config == size
        ours = forward(config, params, TOKENS)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())

        hf.save(tmp_path / "ours", config, params, like=tmp_path / "theirs")
        read = architecture.from_pretrained(tmp_path / "ours")
        np.testing.assert_array_equal(logits(read), expected)
        hf.save(tmp_path / "alone", config, params)
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
        np.testing.assert_array_equal(logits(read), expected)


@KIND
def test_save_writes_what_load_read(tmp_path, kind):
    given, _, _ = KINDS[kind]
    stored = write(tmp_path / "stored", config=given)
    (stored / "tokenizer.json").write_text("{}")
    config, params = hf.load(stored)
    hf.save(tmp_path / "saved", config, params, like=stored)
    before, after = (load_file(f / "model.safetensors") for f in (stored, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert given == {name: written[name] for name in given}
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    assert hf.load(tmp_path / "saved")[0] == config

    hf.save(tmp_path / "alone", config, jax.tree.map(jnp.asarray, params))
    assert hf.load(tmp_path / "alone")[0] == config


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"norm_groups": 1}, "norm_groups is 1, and transformers normalises as many groups"),
        ({"norm_eps": 0.5}, "norm_eps is 0.5 and eps 1e-05, and transformers has one epsilon"),
    ],
)
def test_models_that_transformers_has_not_are_not_written(tmp_path, sizes, words):
    size = dataclasses.replace(SIZE2, sizes=dataclasses.replace(SIZE2.sizes, **sizes))
    with pytest.raises(ValueError, match=words):
        hf.save(tmp_path / "saved", size, params_of(weights(SIZE2), SIZE2))
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_infinity_is_read_however_it_is_spelled(infinity):
    assert hf.model_config(CONFIG2 | {"time_step_limit": [0.0, infinity]}) == SIZE2


def test_load_takes_shards_older_names_a_stored_head_and_bfloat16(tmp_path):
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
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba3"}, "model_type is 'mamba3', and here it is 'mamba' or 'mamba2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and here it is 'silu'"),
        ({"rms_norm": False}, "rms_norm is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"use_bias": True}, "the weights have no backbone.layers.0.mixer.in_proj.bias"),
        ({"use_bias": "no"}, "use_bias is 'no', and must be true or false"),
        ({"use_conv_bias": False}, "the weights have backbone.layers.0.mixer.conv1d.bias"),
        ({"tie_word_embeddings": False}, "the weights have no lm_head.weight"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon is '1e-5', and must be a number"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0, and must be a number above 0"),
        ({"time_step_rank": 9}, "the weights have shapes {'blocks.x_proj': (2, 72, 12), "),
        ({"time_step_rank": "x"}, "time_step_rank is 'x', and must be \"auto\" or a whole number"),
        ({"intermediate_size": 9}, "intermediate_size is 9, and here it is a multiple of hidden"),
        ({"hidden_size": "x"}, "hidden_size is 'x', and must be a whole number, at least 1"),
        ({"hidden_size": None}, "config.json does not say hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a whole number, at least"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 1100.0}, "vocab_size is 1100.0"),
        ({"vocab_size": 1099}, "'embedding': (1100, 24)"),
        ({"state_size": 6}, "the weights have shapes"),
        ({"num_hidden_layers": 3}, "the weights have no backbone.layers.2.norm.weight"),
        ({"num_hidden_layers": 1}, "the weights have backbone.layers.1.mixer.A_log"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path, config, words):
    with pytest.raises(RunError, match=re.escape(words)):
        hf.load(write(tmp_path, **config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and here it is 'silu'"),
        ({"num_heads": 5}, "num_heads · head_dim is 40, and here it is expand · hidden_size, 48"),
        ({"n_groups": 4}, "config.json: ngroups must divide H = E / headdim = 6, got 4"),
        ({"n_groups": 1}, "the weights have shapes {'blocks.in_proj': (2, 24, 122), "),
        ({"time_step_limit": [0.1]}, "time_step_limit is [0.1], and must be two numbers in order"),
        ({"time_step_limit": [1.0, "inf"]}, "time_step_limit is [1.0, 'inf'], and must be two"),
        ({"time_step_limit": [2, 1]}, "time_step_limit is [2, 1], and must be two numbers in"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
        (CONFIG | {"tie_word_embeddings": False}, "the weights have no backbone.layers.0.mixer.x_"),
    ],
)
def test_models_of_mamba2_of_another_kind_are_refused(tmp_path, config, words):
    with pytest.raises(RunError, match=re.escape(words)):
        hf.load(write(tmp_path, weights(SIZE2), CONFIG2, **config))


def test_folders_without_a_checkpoint_are_refused(stored, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"holds no checkpoint \(no config.json\); .*hf download"):
        hf.load(tmp_path / "empty")
    with pytest.raises(RunError, match=r"there is no folder .*nowhere; give one that"):
        hf.load(tmp_path / "nowhere")
    for load in (hf.load, jaxkern.lm.load):
        with pytest.raises(RunError, match="hf download a/b --local-dir b and give the folder b"):
            load("a/b")
    tensors = weights() | {"backbone.layers.1.mixer.D": np.ones(72, np.int8)}
    with pytest.raises(RunError, match=r"layers.1.mixer.D is of dtype I8, and here weights are"):
        hf.load(write(tmp_path / "quantized", tensors))
    save_file(weights() | {"lm_head.weight": np.ones((1, 1))}, stored / "model.safetensors")
    with pytest.raises(RunError, match=r"lm_head.weight differs from the embedding"):
        hf.load(stored)
    (stored / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"model.safetensors is damaged"):
        hf.load(stored)
    (stored / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"holds no model.safetensors; download it whole"):
        hf.load(stored)
    (stored / "pytorch_model.bin").touch()
    with pytest.raises(RunError, match=r"pytorch_model.bin is not read; .*save_pretrained"):
        hf.load(stored)
    (stored / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(RunError, match=r"index.json is no index of weights"):
        hf.load(stored)
    of_mamba_ssm = {"d_model": 24, "n_layer": 2, "ssm_cfg": {}, "vocab_size": 1100}
    (stored / "config.json").write_text(json.dumps(of_mamba_ssm))
    with pytest.raises(RunError, match=r"of mamba_ssm; .* ends in -hf, .* convert_mamba_ssm"):
        hf.load(stored)
    of_mamba_ssm["ssm_cfg"] = {"layer": "Mamba2"}
    (stored / "config.json").write_text(json.dumps(of_mamba_ssm))
    with pytest.raises(RunError, match=r"layout of mamba_ssm; .* convert_mamba2_ssm"):
        hf.load(stored)
    (stored / "config.json").write_text('{"format": "jaxkern-lm-1", "flags": {}}')
    with pytest.raises(RunError, match=r"a run of jaxkern train; load it with jaxkern sample"):
        hf.load(stored)
    (stored / "config.json").write_text("[]")
    with pytest.raises(RunError, match=r"config.json is no configuration"):
        hf.load(stored)


def test_what_is_missing_is_named(stored, capsys, monkeypatch):
    find = importlib.util.find_spec
    missing = ("safetensors", "tokenizers")
    hide = lambda name: None if name in missing else find(name)
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    assert cli.main(["sample", "--hf", str(stored)]) == 1
    said = 'sample --hf needs safetensors, tokenizers; run: pip install "jaxkern[hf]"'
    assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "jaxkern.lm.hf")
    with pytest.raises(ImportError, match=r'pip install "jaxkern\[hf\]"'):
        importlib.import_module("jaxkern.lm.hf")


def greedy(tensors, tokens, length, size=SIZE):
    """The likeliest continuation, by float64."""
    tokens, params = list(tokens), params_of(tensors, size)
    for _ in range(length):
        tokens.append(int(logits_float64(size, params, tokens)[-1].argmax()))
    return tokens


@KIND
def test_sample(tmp_path, capsys, kind):
    """With a tokenizer whose tokens are words, the text is the likeliest and ends in time."""
    config, size, _ = KINDS[kind]
    stored, tensors = write(tmp_path, config=config), weights(size)
    names = {f"w{i}": i for i in range(SIZE.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(stored / "tokenizer.json"))
    argv = ["sample", "--hf", str(stored), "--temperature", "0", "--length", "20"]
    assert cli.main([*argv, "--prompt", "w5 w9"]) == 0
    tokens = greedy(tensors, [5, 9], 20, size)
    assert capsys.readouterr().out == " ".join(f"w{token}" for token in tokens) + "\n"

    write(stored, config=config, eos_token_id=[tokens[4], 3])
    cut = tokens[: 2 + tokens[2:].index(tokens[4])]
    assert cli.main([*argv, "--prompt", "w5 w9"]) == 0
    assert capsys.readouterr().out == " ".join(f"w{token}" for token in cut) + "\n"

    assert cli.main(argv) == 0  # no prompt: the text begins with bos_token_id
    shown = capsys.readouterr().out.split()
    assert shown == [f"w{token}" for token in greedy(tensors, [0], len(shown), size)[1:]]


def test_sample_of_bytes_needs_no_tokenizer(tmp_path, stored, capsys):
    assert cli.main(["sample", "--hf", str(stored)]) == 1
    assert "holds no tokenizer.json" in capsys.readouterr().err
    size = ModelConfig(mamba.Sizes(16, d_state=4), 1)
    tensors = weights(size)
    config = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    config |= {"expand": 2, "conv_kernel": 4, "time_step_rank": "auto"}
    folder = write(tmp_path / "bytes", tensors, **config)
    argv = ["sample", "--hf", str(folder), "--prompt", "ab", "--length", "20"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_characters_of_several_tokens_are_shown_whole(monkeypatch):
    class Bytes:
        def encode(self, text):
            return type("Encoding", (), {"ids": list(text.encode())})

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

        def get_vocab(self, with_added_tokens):
            return {}

    rest = "né€ 🙂".encode()
    pieces = [np.array([[token]]) for token in rest]
    monkeypatch.setattr(sample, "generate_tokens", lambda *args, **options: iter(pieces))
    for codec in (sample.Tokens(Bytes(), {"vocab_size": 256}), sample.Bytes()):
        written = [text for (text,) in sample.continuations(None, None, codec, ["a"])]
        assert list(filter(None, written)) == ["n", "é", "€", " ", "🙂"]


@pytest.mark.parametrize(
    ("error", "words", "stored"),
    [
        (ValueError, "n_layers must be at least 1, got 0", {"n_layers": 0}),
        (TypeError, "d_model must be a whole number, got 'x'", {"d_model": "x"}),
        (TypeError, "d_state must be a whole number, got True", {"d_state": True}),
        (TypeError, "use_bias must be True or False, got 1", {"use_bias": 1}),
        (TypeError, "tie_embeddings must be True or False, got 1", {"tie_embeddings": 1}),
        (ValueError, "eps must be above 0 and finite, got 0", {"eps": 0.0}),
        (ValueError, "dt_rank must be at least 1, got 0", {"dt_rank": 0}),
        (ValueError, "block must be mamba or mamba2, got 'mamba3'", {"block": "mamba3"}),
        (ValueError, "headdim must divide .* got 64", {"block": "mamba2"}),
        (TypeError, "unexpected keyword argument 'headdim'", {"headdim": 4}),
    ],
)
def test_shapes_that_no_model_has_are_refused(error, words, stored):
    with pytest.raises(error, match=words):
        ModelConfig.from_stored({"d_model": 8, "n_layers": 1} | stored)


def test_sizes_are_those_of_a_block():
    with pytest.raises(
        TypeError, match=r"sizes must be a .*mamba.Sizes or a .*mamba2.Sizes, got 8"
    ):
        ModelConfig(8, 1)  # pyright: ignore[reportArgumentType]
