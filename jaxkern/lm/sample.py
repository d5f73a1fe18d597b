"""Decoding: text from a trained model, token by token, with the states carried along."""

import codecs
import functools
import sys
from collections.abc import Iterator, Sequence
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

_CHUNK = 16  # tokens decoded between two prints


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


def sample_hf(
    folder: Path, prompt: str, *, length: int, temperature: float, top_k: int, seed: int
) -> None:
    """Load a checkpoint in the layout of Hugging Face and stream text to stdout.

    Its tokenizer.json says what its tokens are; without one they are bytes. The text ends at the
    checkpoint's end-of-text token, or after `length` tokens.

    Raises:
      RunError: if it cannot be read, or its tokens are not known.
    """
    from jaxkern.lm import hf

    config, params = hf.load(folder)
    params = jax.tree.map(jnp.asarray, params)
    graphdef = decoder(config)
    options = {"length": length, "temperature": temperature, "top_k": top_k, "seed": seed}
    tokenizer = hf.load_tokenizer(folder)
    if tokenizer is not None:
        _stream_tokens(graphdef, params, prompt, tokenizer, hf.read_config(folder), **options)
    elif config.vocab_size == 256:
        stream(graphdef, params, prompt, **options)
    else:
        raise RunError(
            f"{folder} holds no tokenizer.json, which says what its {config.vocab_size} tokens are"
        )
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


def _stream_tokens(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: str,
    tokenizer: Any,
    config: dict[str, Any],
    **options: Any,
) -> None:
    ids = tokenizer.encode(prompt).ids
    if not ids:
        first = config.get("bos_token_id")
        if first is None:
            raise RunError("this model's text begins with no token of its own; give a --prompt")
        ids = [first]
    if max(ids) >= config["vocab_size"]:
        raise RunError(f"tokenizer.json has tokens beyond the model's {config['vocab_size']}")
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    sys.stdout.write(prompt)
    shown = tokenizer.decode(ids)
    for chunk in generate_tokens(graphdef, params, ids, **options):
        stop = next((i for i, token in enumerate(chunk) if token in ends), None)
        ids += [int(token) for token in chunk[:stop]]
        text = tokenizer.decode(ids)
        # A character of several tokens is not to be shown in part.
        if stop is not None or not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
        if stop is not None:
            return
    sys.stdout.write(tokenizer.decode(ids)[len(shown) :])


def generate(graphdef: nnx.GraphDef, params: Any, prompt: bytes, **options: Any) -> Iterator[bytes]:
    """`generate_tokens` for a model of bytes: those after a prompt, which may be empty.

    The separator of texts stands before the prompt and is never drawn.
    """
    tokens = bytes([SEPARATOR]) + prompt
    for chunk in generate_tokens(graphdef, params, tokens, never=SEPARATOR, **options):
        yield chunk.astype(np.uint8).tobytes()


def generate_tokens(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: Sequence[int],
    *,
    never: int | None = None,
    length: int = 400,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Decode `length` tokens after a prompt.

    Args:
        graphdef: from `decoder`.
        params: the model's parameters.
        prompt: at least one token.
        never: a token that is not drawn.
        length: how many tokens to decode.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; 0 for all.
        seed: of the draws.

    Yields:
        The tokens after the prompt, in pieces, int32.
    """
    logits, state = _prefill(graphdef, params, jnp.asarray(list(prompt), jnp.int32))
    draw = functools.partial(_draw, temperature=temperature, top_k=top_k, never=never)
    step = jax.jit(functools.partial(_decode, graphdef, draw))
    key = jax.random.key(seed)
    for start in range(0, length, _CHUNK):
        key, chunk_key = jax.random.split(key)
        logits, state, chunk = step(params, logits, state, chunk_key)
        yield np.asarray(chunk)[: length - start]


@functools.partial(jax.jit, static_argnums=0)
def _prefill(graphdef, params, tokens):
    """Feed (T,) tokens; logits (1, V) after the last, and the state."""
    model = nnx.merge(graphdef, params)
    state = model.init_state(1)
    first = jnp.zeros((1, model.config.vocab_size), model.options.policy.output)

    def feed(carry, token):
        _, state = carry
        return model.step(token[None], state), None

    return jax.lax.scan(feed, (first, state), tokens)[0]


def _decode(graphdef, draw, params, logits, state: Cache, key):
    """The next _CHUNK tokens, given the logits of the first of them."""
    model = nnx.merge(graphdef, params)

    def one(carry, key):
        logits, state = carry
        token = draw(logits, key)
        return model.step(token, state), token[0]

    (logits, state), chunk = jax.lax.scan(one, (logits, state), jax.random.split(key, _CHUNK))
    return logits, state, chunk


def _draw(logits, key, *, temperature: float, top_k: int, never: int | None = SEPARATOR):
    """One token per row of logits (B, V): (B,) int32."""
    logits = logits.astype(jnp.float32)
    if never is not None:
        logits = logits.at[:, never].set(-jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
