"""Helpers of the language model's tests: the model in float64, small models and runs."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.lm import checkpoint, cli
from jaxkern.lm.config import PRESETS, ModelConfig, RunError, TrainConfig
from jaxkern.lm.model import initial_params
from tests.layers import KINDS, rms_float64

MICRO, MICRO2 = (PRESETS[name].model for name in ("micro", "mamba2-micro"))

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiles without optimisation, which takes less time than it saves in a program run once."""


@functools.cache
def random_params(config, seed=0):
    """Parameters away from any symmetry, whose texts are not all alike."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: initial_params(config)))
    rng = np.random.default_rng(seed)
    normal = [jnp.asarray(rng.normal(size=leaf.shape, scale=0.5), "f4") for leaf in leaves]
    return jax.tree.unflatten(tree, normal)


HYBRID = ModelConfig(
    *(16, 8, "mamba2*2, attention, mlp"),
    d_state=4,
    head_dim=8,
    d_mlp=24,
    vocab_size=1030,
    tie_embeddings=False,
    n_heads=4,
    n_kv_heads=2,
    attention_head_dim=6,
)
ROTARY = ModelConfig(
    *(16, 3, "mamba, attention, swiglu"),
    d_state=4,
    n_heads=2,
    n_kv_heads=1,
    rotary_dim=4,
    rope_theta=30.0,
)
GDN = ModelConfig(
    *(16, 2, "gdn"), d_state=4, head_dim=8, n_key_heads=2, use_bias=True, use_conv_bias=False
)
KDA = ModelConfig(*(16, 3, "kda, attention, swiglu"), head_dim=8, d_mlp=24, use_conv_bias=False)


def logits_float64(config, params, tokens):
    """The model on one sequence of tokens (L,) in NumPy: (L, vocab_size)."""
    wide = lambda leaf: np.asarray(leaf, np.float64)
    x = wide(params["embedding"])[np.asarray(tokens)]  # (L, d_model)
    for i, kind in enumerate(config.kinds):
        stack = params["blocks"][kind] if config.hybrid else params["blocks"]
        at = config.kinds[:i].count(kind)
        layer = {name: wide(value[at]) for name, value in stack.items()}
        normalised = rms_float64(x, layer.pop("norm"), config.eps)
        x = x + layer_float64(config, kind, layer, normalised)
    x = rms_float64(x, wide(params["norm"]), config.eps)
    return x @ wide(params["embedding"].T if config.tie_embeddings else params["head"])


def layer_float64(config, kind, layer, x):
    """A layer of a kind on one sequence (L, d_model), without its norm."""
    if kind in KINDS:
        return KINDS[kind].float64(config.block.weights_from(layer), config.sizes, x)
    up = x @ layer["up_proj"] if kind != "attention" else None
    if kind == "mlp":
        return np.maximum(up, 0) ** 2 @ layer["down_proj"]
    if kind == "swiglu":
        gate = x @ layer["gate_proj"]
        return (gate / (1 + np.exp(-gate)) * up) @ layer["down_proj"]
    (queries, keys), width = config.heads
    q, k, v = ((x @ layer[f"{name}_proj"]).reshape(len(x), -1, width) for name in "qkv")
    for heads in (q, k):  # (L, heads, P), as complex numbers that turn with their position
        half = config.rotary_dim // 2
        angle = np.arange(len(x))[:, None] / config.rope_theta ** (np.arange(half) / max(half, 1))
        turned = heads[..., :half] + 1j * heads[..., half : 2 * half]
        turned *= np.exp(1j * angle)[:, None]
        heads[..., :half], heads[..., half : 2 * half] = turned.real, turned.imag
    out = np.empty_like(q)
    for h in range(queries):
        of = h // (queries // keys)
        scores = np.exp(q[:, h] @ k[:, of].T / np.sqrt(width)) * np.tri(len(x))
        out[:, h] = scores / scores.sum(-1, keepdims=True) @ v[:, of]
    return out.reshape(len(x), -1) @ layer["o_proj"]


def loss_float64(config, params, sequences):
    """The mean cross-entropy of all tokens of sequences but their first."""
    losses = []
    for tokens in sequences:
        logits = logits_float64(config, params, tokens[:-1])
        of_next = logits[np.arange(len(logits)), tokens[1:]]
        losses.append(np.logaddexp.reduce(logits, axis=-1) - of_next)
    return np.concatenate(losses).mean()


def check_gradients(config, params, grads, sequences):
    """Compares the slope in random directions, in which every array changes as much."""
    rng, grads = np.random.default_rng(1), jax.tree.map(np.float64, grads)
    for _ in range(3):
        moves = jax.tree.map(lambda g: rng.normal(size=g.shape) / np.linalg.norm(g), grads)
        at = lambda by, v=moves: jax.tree.map(lambda p, v: np.float64(p) + by * v, params, v)
        up, down = (loss_float64(config, at(by), sequences) for by in (1e-6, -1e-6))
        expected = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads, moves)))
        np.testing.assert_allclose((up - down) / 2e-6, expected, rtol=0, atol=2e-5)


def greedy_float64(config, params, tokens, length, first=0):
    """A sequence of tokens and its likeliest continuation by the tokens from `first` on."""
    tokens = list(tokens)
    for _ in range(length):
        logits = logits_float64(config, params, tokens)[-1]
        tokens.append(first + int(logits[first:].argmax()))
    return tokens


def run_of(folder, model, params, **flags):
    """A run as jaxkern train leaves it, whose checkpoint of step 10 has the parameters."""
    folder.mkdir()
    config = TrainConfig.from_flags({"preset": "micro", "model": model} | flags)
    checkpoint.write(folder, config, {})
    with contextlib.closing(checkpoint.Saver(folder, keep=2)) as saver:
        for step, factor in ((5, 0.5), (10, 1.0)):
            at_step = jax.tree.map(lambda leaf, by=factor: leaf * by, params)
            saver.start(step, {"params": at_step, "opt_state": jnp.ones(2)}, {})
    return folder


def command(capsys, *argv, code=0):
    """What a command prints, or with a code its one line on stderr."""
    try:
        returned = cli.main([str(arg) for arg in argv])
    except SystemExit as stop:  # of a wrong flag
        returned = stop.code
    out, err = capsys.readouterr()
    assert returned == code, err
    if not code:
        return out
    (line,) = err.splitlines()
    assert line.startswith("jaxkern: error: " if code in (1, 2) else "jaxkern: ")
    return line


def refused(words, call, *args, **options):
    """Checks that a call ends with a RunError of these words."""
    with pytest.raises(RunError, match=words):
        call(*args, **options)
