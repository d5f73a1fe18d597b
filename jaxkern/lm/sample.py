"""Decoding: text from a trained model, one byte at a time, with the states carried along."""

import codecs
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkern.lm import checkpoint
from jaxkern.lm.config import ModelConfig, RunError, TrainConfig, resume_config
from jaxkern.lm.data import SEPARATOR
from jaxkern.lm.model import Options
from jaxkern.lm.step import init_state, make_model
from jaxkern.nn.mamba import Cache
from jaxkern.precision import Policy

_CHUNK = 16  # bytes decoded between two prints


def sample(
    run: Path, prompt: str, *, length: int, temperature: float, top_k: int, seed: int
) -> None:
    """Load a run's last checkpoint and stream text to stdout.

    Raises:
        RunError: if the run has no checkpoint, or one that cannot be read.
    """
    config = resume_config(checkpoint.read_config(run)["flags"], {})
    steps = checkpoint.steps(run)
    if not steps:
        raise RunError(f"{run} has no checkpoint yet; train it for longer")
    params = load_params(run, steps[-1], config)
    graphdef = decoder(config.model)
    stream(graphdef, params, prompt, length=length, temperature=temperature, top_k=top_k, seed=seed)
    print(flush=True)


def load_params(run: Path, step: int, config: TrainConfig) -> Any:
    """The parameters of a checkpoint, on the default device."""
    checkpoint.check(run, step, config.model)
    policy = Policy.parse(config.mixed_precision)
    like = jax.eval_shape(lambda: init_state(config, policy)).params
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return checkpoint.restore(run, step, "params", checkpoint.abstract(like, device))


def decoder(model: ModelConfig) -> nnx.GraphDef:
    """The model as decoding runs it: one row at a time, so in fp32, which costs nothing there."""
    return make_model(model, Options())


def stream(graphdef: nnx.GraphDef, params: Any, prompt: str, **options: Any) -> None:
    """Write the prompt and what follows it to stdout as it is decoded."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    sys.stdout.write(prompt)
    for chunk in generate(graphdef, params, prompt.encode("utf-8"), **options):
        sys.stdout.write(decode(chunk))
        sys.stdout.flush()
    sys.stdout.write(decode(b"", final=True))
    sys.stdout.flush()


def generate(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: bytes,
    *,
    length: int = 400,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[bytes]:
    """Decode `length` bytes after a prompt.

    Args:
        graphdef: from `decoder`.
        params: the model's parameters.
        prompt: what the text begins with; may be empty.
        length: how many bytes to decode.
        temperature: divides the logits; 0 takes the likeliest byte.
        top_k: draw from the k likeliest bytes; 0 for all.
        seed: of the draws.

    Yields:
        The bytes after the prompt, in pieces.
    """
    tokens = jnp.asarray(np.frombuffer(bytes([SEPARATOR]) + prompt, np.uint8))
    logits, state = _prefill(graphdef, params, tokens)
    draw = functools.partial(_draw, temperature=temperature, top_k=top_k)
    step = jax.jit(functools.partial(_decode, graphdef, draw))
    key = jax.random.key(seed)
    for start in range(0, length, _CHUNK):
        key, chunk_key = jax.random.split(key)
        logits, state, chunk = step(params, logits, state, chunk_key)
        yield np.asarray(chunk).tobytes()[: length - start]


@functools.partial(jax.jit, static_argnums=0)
def _prefill(graphdef, params, tokens):
    """Feed (T,) bytes; logits (1, V) after the last, and the state."""
    model = nnx.merge(graphdef, params)
    state = model.init_state(1)
    first = jnp.zeros((1, model.config.vocab_size), model.options.policy.output)

    def feed(carry, token):
        _, state = carry
        return model.step(token[None], state), None

    return jax.lax.scan(feed, (first, state), tokens)[0]


def _decode(graphdef, draw, params, logits, state: Cache, key):
    """The next _CHUNK bytes, given the logits of the first of them."""
    model = nnx.merge(graphdef, params)

    def one(carry, key):
        logits, state = carry
        token = draw(logits, key)
        return model.step(token, state), token[0]

    (logits, state), chunk = jax.lax.scan(one, (logits, state), jax.random.split(key, _CHUNK))
    return logits, state, chunk


def _draw(logits, key, *, temperature: float, top_k: int):
    """One byte per row of logits (B, V), never the separator: (B,) uint8."""
    logits = logits.astype(jnp.float32).at[:, SEPARATOR].set(-jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.uint8)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.uint8)
