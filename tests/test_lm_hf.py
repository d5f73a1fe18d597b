"""Checkpoints in the layout of Hugging Face: read, run, written back, sampled from."""

import dataclasses
import functools
import importlib.util
import json
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
from jaxkern.lm.model import MambaLM, Options, decayed, rows_of
from jaxkern.lm.step import loss_fn, make_model
from jaxkern.nn import mamba
from tests.layers import mamba_float64, rms_float64

SIZE = ModelConfig(24, 2, d_state=5, expand=3, d_conv=3, vocab_size=1100)
CONFIG = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": SIZE.vocab_size,
    "hidden_size": SIZE.d_model,
    "num_hidden_layers": SIZE.n_layers,
    "state_size": SIZE.d_state,
    "expand": SIZE.expand,
    "conv_kernel": SIZE.d_conv,
    "time_step_rank": SIZE.rank,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 7,
    "initializer_range": 0.1,
}
# Unoptimised code of the same program is made much sooner.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# What config.json may say otherwise, and the shape of that model.
OTHERS = {
    "epsilon": ({"layer_norm_epsilon": 0.3}, {"eps": 0.3}),
    "bias": ({"use_bias": True}, {"use_bias": True}),
    "no conv bias": ({"use_conv_bias": False}, {"use_conv_bias": False}),
    "rank": ({"time_step_rank": 1}, {"dt_rank": 1}),
    "untied": ({"tie_word_embeddings": False}, {"tie_embeddings": False}),
    "inner": ({"intermediate_size": 48}, {"expand": 2}),
}
ALL = {k: v for config, _ in OTHERS.values() for k, v in config.items()}
ALL_SIZE = dataclasses.replace(SIZE, **{k: v for _, of in OTHERS.values() for k, v in of.items()})


def weights(size=SIZE):
    """Random tensors by the names and shapes of the layout, away from any symmetry."""
    d, e, n, r = size.d_model, size.d_inner, size.d_state, size.rank
    layer = {
        "norm.weight": (d,),
        "mixer.in_proj.weight": (2 * e, d),
        "mixer.conv1d.weight": (e, 1, size.d_conv),
        "mixer.conv1d.bias": (e,),
        "mixer.x_proj.weight": (r + 2 * n, e),
        "mixer.dt_proj.weight": (e, r),
        "mixer.dt_proj.bias": (e,),
        "mixer.A_log": (e, n),
        "mixer.D": (e,),
        "mixer.out_proj.weight": (d, e),
    }
    if size.use_bias:
        layer |= {"mixer.in_proj.bias": (2 * e,), "mixer.out_proj.bias": (d,)}
    if not size.use_conv_bias:
        del layer["mixer.conv1d.bias"]
    shapes = {"backbone.embeddings.weight": (size.vocab_size, d), "backbone.norm_f.weight": (d,)}
    for i in range(size.n_layers):
        shapes |= {f"backbone.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not size.tie_embeddings:
        shapes["lm_head.weight"] = size.vocab_size, d
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape, scale=0.5).astype(np.float32) for name, shape in shapes.items()
    }


def logits_float64(tensors, tokens, size=SIZE):
    """The model on one sequence in NumPy, from the stored tensors."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    embedding = w["backbone.embeddings.weight"]
    x = embedding[np.asarray(tokens)]
    for i in range(size.n_layers):
        of = lambda name, i=i: w.get(f"backbone.layers.{i}.{name}")
        block = mamba.Weights(
            in_proj=of("mixer.in_proj.weight").T,
            in_bias=of("mixer.in_proj.bias"),
            conv_weight=of("mixer.conv1d.weight")[:, 0],
            conv_bias=of("mixer.conv1d.bias"),
            x_proj=of("mixer.x_proj.weight").T,
            dt_proj=of("mixer.dt_proj.weight").T,
            dt_bias=of("mixer.dt_proj.bias"),
            A_log=of("mixer.A_log"),
            D=of("mixer.D"),
            out_proj=of("mixer.out_proj.weight").T,
            out_bias=of("mixer.out_proj.bias"),
        )
        x = x + mamba_float64(block, rms_float64(x, of("norm.weight"), size.eps))
    x = rms_float64(x, w["backbone.norm_f.weight"], size.eps)
    return x @ w.get("lm_head.weight", embedding).T


def write(folder, tensors=None, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def stored(tmp_path):
    return write(tmp_path / "stored")


def forward(config, params, tokens):
    return jit(lambda p, t: nnx.merge(make_model(config, Options()), p)(t))(params, tokens)


TOKENS = np.random.default_rng(1).integers(0, SIZE.vocab_size, (2, 9))


@pytest.mark.parametrize("which", ["none", "bias", "rank", "untied", "all"])
def test_logits_are_those_of_float64(tmp_path, which):
    config, size = ALL, ALL_SIZE
    if which != "all":
        config, size = OTHERS.get(which, ({}, {}))
        size = dataclasses.replace(SIZE, **size)
    tensors = weights(size)
    loaded, params = hf.load(write(tmp_path, tensors, **config))
    assert loaded == size
    logits = forward(size, params, TOKENS)
    expected = np.stack([logits_float64(tensors, row, size) for row in TOKENS])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())


def test_a_model_of_other_options_is_trained_saved_and_decoded(tmp_path):
    tensors = weights(ALL_SIZE)
    size, params = hf.load(write(tmp_path / "stored", tensors, **ALL))
    graphdef = make_model(size, Options())
    grads = jit(jax.grad(functools.partial(loss_fn, graphdef)))(params, TOKENS)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))
    decays = decayed(params)
    assert decays["head"]
    assert not decays["blocks"]["in_bias"]

    hf.save(tmp_path / "saved", size, params, like=tmp_path / "stored")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "saved")[1], params)
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert said.items() >= ALL.items()
    with pytest.raises(ValueError, match=r"params has shapes.*blocks.in_bias"):
        hf.save(tmp_path / "saved", dataclasses.replace(size, use_bias=False), params)

    (chunk,) = sample.generate_tokens(graphdef, params, [TOKENS[0]], length=3, temperature=0)
    assert [*TOKENS[0], *chunk[0]] == greedy(tensors, TOKENS[0], 3, size)


@pytest.mark.parametrize("which", ["none", *OTHERS])
def test_logits_are_those_of_transformers(tmp_path, which):
    reason = "transformers and torch are not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason=reason)
        transformers = pytest.importorskip("transformers", reason=reason)
        torch.manual_seed(0)
        options = CONFIG | OTHERS.get(which, ({},))[0]
        theirs = transformers.MambaForCausalLM(transformers.MambaConfig(**options)).eval()
        for name, bias in theirs.named_parameters():
            if name.endswith("proj.bias"):
                torch.nn.init.normal_(bias, std=0.3)
        theirs.save_pretrained(tmp_path / "theirs")

        def logits(model):
            with torch.no_grad():
                return model(torch.from_numpy(TOKENS)).logits.numpy()

        expected = logits(theirs)
        config, params = hf.load(tmp_path / "theirs")
        ours = forward(config, params, TOKENS)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max())

        hf.save(tmp_path / "ours", config, params, like=tmp_path / "theirs")
        read = transformers.MambaForCausalLM.from_pretrained(tmp_path / "ours")
        np.testing.assert_array_equal(logits(read), expected)


def test_save_writes_what_load_read(stored, tmp_path):
    (stored / "tokenizer.json").write_text("{}")
    config, params = hf.load(stored)
    hf.save(tmp_path / "saved", config, params, like=stored)
    before, after = weights(), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written.items() >= CONFIG.items()
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    assert hf.load(tmp_path / "saved")[0] == config

    hf.save(tmp_path / "alone", config, jax.tree.map(jnp.asarray, params))
    assert hf.load(tmp_path / "alone")[0] == config


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
        ({"model_type": "mamba2"}, "model_type is 'mamba2', and here it is 'mamba'"),
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
    with pytest.raises(RunError, match=r"layout of mamba_ssm; .* ends in -hf"):
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
    tokens = list(tokens)
    for _ in range(length):
        tokens.append(int(logits_float64(tensors, tokens, size)[-1].argmax()))
    return tokens


def test_sample(stored, capsys):
    """With a tokenizer whose tokens are words, the text is the likeliest and ends in time."""
    names = {f"w{i}": i for i in range(SIZE.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(stored / "tokenizer.json"))
    argv = ["sample", "--hf", str(stored), "--temperature", "0", "--length", "20"]
    assert cli.main([*argv, "--prompt", "w5 w9"]) == 0
    tokens = greedy(weights(), [5, 9], 20)
    assert capsys.readouterr().out == " ".join(f"w{token}" for token in tokens) + "\n"

    write(stored, eos_token_id=[tokens[4], 3])
    cut = tokens[: 2 + tokens[2:].index(tokens[4])]
    assert cli.main([*argv, "--prompt", "w5 w9"]) == 0
    assert capsys.readouterr().out == " ".join(f"w{token}" for token in cut) + "\n"

    assert cli.main(argv) == 0  # no prompt: the text begins with bos_token_id
    shown = capsys.readouterr().out.split()
    assert shown == [f"w{token}" for token in greedy(weights(), [0], len(shown))[1:]]


def test_sample_of_bytes_needs_no_tokenizer(tmp_path, stored, capsys):
    assert cli.main(["sample", "--hf", str(stored)]) == 1
    assert "holds no tokenizer.json" in capsys.readouterr().err
    size = ModelConfig(16, 1, d_state=4)
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

    rest = "né€ 🙂".encode()
    pieces = [np.array([[token]]) for token in rest]
    monkeypatch.setattr(sample, "generate_tokens", lambda *args, **options: iter(pieces))
    for codec in (sample.Tokens(Bytes(), {"vocab_size": 256}), sample.Bytes()):
        written = [text for (text,) in sample.continuations(None, None, codec, ["a"])]
        assert list(filter(None, written)) == ["n", "é", "€", " ", "🙂"]


@pytest.mark.parametrize("count", [0, 1, 60])
def test_gradient_of_the_embedding(count):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(11, 4)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 11, (count // 2, 2) if count > 1 else (count,)))
    dout = rng.normal(size=(*tokens.shape, 4)).astype(np.float32)
    out, vjp = jax.vjp(lambda table: rows_of(table, tokens), table)
    np.testing.assert_array_equal(out, np.asarray(table)[np.asarray(tokens)])
    expected = np.zeros((11, 4))
    np.add.at(expected, np.asarray(tokens), dout)
    np.testing.assert_allclose(vjp(jnp.asarray(dout))[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [300, 1030])  # a product, and rows that are read
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16"])
def test_tokens_of_any_integer_dtype_are_the_same(size, dtype):
    model = MambaLM(ModelConfig(8, 1, d_state=2, vocab_size=size), rngs=nnx.Rngs(0))
    tokens = np.array([[1, 44, 100, 127]])
    np.testing.assert_array_equal(
        model._embed(jnp.asarray(tokens, dtype))[0], model.embedding[...][tokens]
    )
    graphdef, params = nnx.split(model)
    loss = jax.grad(lambda p, t: nnx.merge(graphdef, p)._embed(t)[0].sum())
    grads = [loss(params, jnp.asarray(tokens, d))["embedding"][...] for d in (dtype, "int32")]
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize(
    ("error", "words", "sizes"),
    [
        (ValueError, "n_layers must be at least 1, got 0", {"n_layers": 0}),
        (TypeError, "d_model must be of type int, got 'x'", {"d_model": "x"}),
        (TypeError, "d_state must be of type int, got True", {"d_state": True}),
        (TypeError, "use_bias must be of type bool, got 1", {"use_bias": 1}),
        (ValueError, "eps must be above 0, got 0", {"eps": 0.0}),
        (ValueError, "dt_rank must be at least 1, got 0", {"dt_rank": 0}),
    ],
)
def test_shapes_that_no_model_has_are_refused(error, words, sizes):
    with pytest.raises(error, match=f"ModelConfig: {words}"):
        ModelConfig(**{"d_model": 8, "n_layers": 1} | sizes)
