"""Decoding: text from a trained model, token by token, with the states carried along.

Prompts of unequal lengths are decoded together: shorter ones are padded on the left, and the
padding leaves no trace in the state. Every row draws by a key of its own, made from its seed and
the token's position, so that it goes on as it would alone.
"""

import codecs
import dataclasses
import functools
import math
import numbers
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkern.lm.config import ModelConfig, RunError
from jaxkern.lm.data import SEPARATOR
from jaxkern.lm.data import tokenizer as tokenizers
from jaxkern.lm.model import Options
from jaxkern.lm.step import make_model

_CHUNK = 16  # tokens decoded between two prints
_PART = 2048  # tokens of a prompt that are read at once, so that memory does not grow with it
_LEAST = 256  # tokens that attention has room for; more are powers of two, each compiled anew


def decoder(model: ModelConfig) -> nnx.GraphDef:
    """The model as decoding runs it: in fp32, which costs nothing for a few rows at a time."""
    return make_model(model, Options())


def stream(
    graphdef: nnx.GraphDef, params: Any, prompt: str, *, codec: Any = None, **options: Any
) -> None:
    """Write the prompt and what follows it to stdout as it is decoded."""
    show(prompt)
    for (piece,) in continuations(graphdef, params, codec or Bytes(), [prompt], **options):
        show(piece)


def show(text: str) -> None:
    """Write a text to stdout; on a terminal with escapes for what would control it."""
    sys.stdout.write(text.translate(_ESCAPES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


# Bytes that are no UTF-8 are written as they came, and some of them control terminals, too.
_ESCAPES = {code: f"\\x{code:02x}" for code in {*range(32), *range(127, 160)} - {*b"\n\t"}}
_ESCAPES |= {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}


def continuations(
    graphdef: nnx.GraphDef,
    params: Any,
    codec: "Bytes | Tokens | None",
    prompts: Sequence[Any],
    *,
    stop: Sequence[str] = (),
    timing: "Timing | None" = None,
    **options: Any,
) -> Iterator[list[Any]]:
    """What follows prompts, as it is decoded: the next piece of each, a text or a list of tokens.

    The prompts are texts, which may be empty, and sequences of tokens; where all are tokens there
    need not be a `codec`, and any token may be drawn. The other options are those of
    :meth:`jaxkern.lm.loader.LanguageModel.generate`.
    """
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise TypeError(f"stop must be a sequence of texts, got {stop!r}")
    if not all(stop):
        raise ValueError("stop has an empty text, before which nothing can be written")
    ids, readers = zip(*(_reader(codec, prompt, stop) for prompt in prompts), strict=True)
    drawn, ends = (None, frozenset()) if codec is None else (codec.drawn, codec.ends)
    going = [True] * len(ids)
    for chunk in generate_tokens(graphdef, params, ids, among=drawn, **options):
        if timing is not None:
            timing.add(sum(going) * chunk.shape[1])
        pieces: list[Any] = []
        for row, read in enumerate(readers):
            tokens = chunk[row].tolist() if going[row] else []
            end = next((i for i, token in enumerate(tokens) if token in ends), None)
            piece, ended = read(tokens[:end], end is not None)
            going[row] &= not ended
            pieces.append(piece)
        yield pieces
        if not any(going):
            return
    yield [read([], True)[0] for read in readers]


def _reader(codec: Any, prompt: Any, stops: Sequence[str]) -> tuple[Any, Callable[..., Any]]:
    """The tokens of a prompt, and a function (next tokens, whether they are the last) -> a piece.

    That also tells whether the continuation has ended.
    """
    if isinstance(prompt, (str, bytes)):
        ids = codec.encode(prompt)
        decode, ending = codec.decoder(ids), _Ending(stops)
        return ids, lambda tokens, final: ending(decode(tokens, final), final)
    if stops:
        raise TypeError(f"stop ends texts, and a prompt is of tokens: {prompt!r}")
    return prompt, lambda tokens, final: (tokens, final)


class _Ending:
    """Ends a text before the one of several others that is the first to be complete in it."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""  # the end of the text so far, with which one of them may begin
        self._ended = False

    def __call__(self, text: str, final: bool) -> tuple[str, bool]:
        """Takes what comes next; returns what is sure of the text, and whether it has ended."""
        if self._ended:
            return "", True
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops]
        if found := [each for each in found if each[1] >= 0]:
            self._ended = True
            return text[: min(found)[1]], True
        starts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        held = 0 if final else max(map(len, filter(text.endswith, starts)), default=0)
        sure = len(text) - held
        self._held, self._ended = text[sure:], final
        return text[:sure], final


class Timing:
    """How fast tokens are decoded, those of all texts together."""

    def __init__(self):
        self._times = [time.perf_counter()]
        self._tokens: list[int] = []

    def add(self, tokens: int) -> None:
        """Notes that so many more are there."""
        self._times.append(time.perf_counter())
        self._tokens.append(tokens)

    def __str__(self) -> str:
        if not self._tokens:
            return "no token was decoded"
        first = f"the first {self._tokens[0]} tokens after {self._times[1] - self._times[0]:.2f} s"
        if len(self._tokens) == 1:
            return f"{first}, compilation included"
        rest = sum(self._tokens[1:])
        rate = rest / (self._times[-1] - self._times[1])
        return f"{first}, compilation included; then {rest} at {rate:,.0f} tokens/s"


class Bytes:
    """The text of a model of bytes: UTF-8, after the separator of texts, which is never drawn."""

    drawn = range(SEPARATOR + 1, 256)
    ends: frozenset[int] = frozenset()

    def encode(self, prompt: str | bytes) -> list[int]:
        """The tokens of a prompt; bytes that are no text came as lone surrogates."""
        text = prompt.encode("utf-8", "surrogateescape") if isinstance(prompt, str) else prompt
        return [SEPARATOR, *text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without what separates texts."""
        return bytes(token for token in tokens if token != SEPARATOR).decode("utf-8", "replace")

    def decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int], bool], str]:
        """A function (next tokens, whether they are the last) -> the text that they complete."""
        del prompt
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda tokens, final: decode(bytes(tokens), final)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The text of a model of `size` tokens with a ``tokenizers.Tokenizer``.

    A text begins with the token `first`, and with nothing that the tokenizer would add, if it
    `begins` so, else as the tokenizer has it; the tokens `ends` end it.
    """

    tokenizer: Any
    size: int
    first: int | None = None
    ends: Collection[int] = ()
    begins: bool = False

    @property
    def drawn(self) -> Collection[int]:
        """All tokens that it has: a vocabulary that is rounded up has others besides."""
        return self.tokenizer.get_vocab(with_added_tokens=True).values()

    def encode(self, prompt: str | bytes) -> list[int]:
        """The tokens of a prompt, of one that is empty the first of any text."""
        given = prompt.encode("utf-8", "surrogateescape") if isinstance(prompt, str) else prompt
        text = given.decode("utf-8", "replace")
        with tokenizers.told("tokenizer.json has no tokens for a prompt"):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not self.begins).ids
        if self.first is not None and (self.begins or not ids):
            ids = [self.first, *ids]
        if not ids:
            raise RunError("this model's text begins with no token of its own; give a --prompt")
        if max(ids) >= self.size:
            raise RunError(
                f"tokenizer.json has token {max(ids)}, and the model has {self.size}; give the "
                "tokenizer that the model was trained with"
            )
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those that begin and end it."""
        return self.tokenizer.decode(list(tokens))

    def decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int], bool], str]:
        """A function (next tokens, whether they are the last) -> the text that they complete."""
        from tokenizers.decoders import DecodeStream

        # A prompt that ends within a character would be written again with its rest.
        known = None if self.decode(prompt).endswith("\ufffd") else list(prompt)
        stream, held = DecodeStream(known, skip_special_tokens=True), []

        def decode(tokens: Sequence[int], final: bool) -> str:
            nonlocal stream
            text = ""
            for token in tokens:
                held.append(token)
                try:
                    piece = stream.step(self.tokenizer, token)
                except Exception:  # bytes that are no UTF-8 can change the text before them
                    stream, piece = DecodeStream(skip_special_tokens=True), self.decode(held)
                if piece is not None:
                    text += piece
                    held.clear()
            return text + (self.decode(held) if final and held else "")

        return decode


def codec_of(tokenizer: Any) -> "Bytes | Tokens":
    """The text of a model that was trained with a tokenizer of `jaxkern.lm.data.tokenizer`."""
    if isinstance(tokenizer, tokenizers.Bytes):
        return Bytes()
    named = {"first": tokenizer.begin, "ends": frozenset([tokenizer.end]), "begins": True}
    return Tokens(tokenizer.tokenizer, tokenizer.size, **named)


def generate_tokens(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    among: Collection[int] | None = None,
    length: int = 400,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Decode `length` tokens after each of several prompts, B, in pieces (B, n), int32.

    The prompts are sequences of at least one token, of any lengths. Tokens are drawn `among` those
    given, of which the model may lack some, by default all. The other options, and the errors, are
    those of :meth:`jaxkern.lm.loader.LanguageModel.generate`.
    """
    size = nnx.merge(graphdef, params).config.vocab_size
    ids = _check_prompts(prompts, size)
    given = {"length": length, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, value in (given | {"seed": seed}).items():
        kind, told, fits, rule = _RULES[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must be {told}, got {value!r}")
        if not fits(value):
            raise ValueError(f"{name} must be {rule}, got {value}")
    greedy = float(temperature) < np.finfo(np.float32).tiny or top_k == 1
    static = {"top_k": int(min(top_k, size)), "greedy": greedy, "nucleus": bool(top_p < 1)}
    drawn = None if among is None else np.isin(np.arange(size), list(among))
    return _generate(graphdef, params, ids, length, temperature, top_p, seed, drawn, static)


_WHOLE, _NUMBER = (numbers.Integral, "a whole number"), (numbers.Real, "a number")
_RULES: dict[str, Any] = {
    "length": (*_WHOLE, lambda v: v >= 0, "at least 0"),
    "temperature": (*_NUMBER, lambda v: 0 <= v < math.inf, "at least 0 and finite"),
    "top_k": (*_WHOLE, lambda v: v >= 0, "at least 0"),
    "top_p": (*_NUMBER, lambda v: 0 < v <= 1, "above 0 and at most 1, which draws from all"),
    "seed": (*_WHOLE, lambda v: 0 <= v < 2**31, f"from 0 to {2**31 - 1}"),
}


def _check_prompts(prompts: Sequence[Sequence[int]], size: int) -> list[np.ndarray]:
    if not len(prompts):
        raise ValueError("prompts must have at least one prompt, got none")
    if np.ndim(prompts[0]) == 0 or isinstance(prompts, (str, bytes)):
        raise TypeError("prompts must be a sequence of prompts; give a single one as [prompt]")
    ids = [np.asarray(prompt) for prompt in prompts]
    for i, prompt in enumerate(ids):
        if not prompt.size:
            raise ValueError(f"prompts[{i}] must have at least one token, got none")
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise TypeError(
                f"prompts[{i}] must be a sequence of integers, got shape {prompt.shape} and dtype "
                f"{prompt.dtype}"
            )
        if prompt.min() < 0 or prompt.max() >= size:
            wrong = prompt[(prompt < 0) | (prompt >= size)][0]
            raise ValueError(f"prompts[{i}] has token {wrong}, and the model has 0 to {size - 1}")
    return ids


def _generate(graphdef, params, ids, length, temperature, top_p, seed, drawn, static):
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(
        jnp.arange(seed, seed + len(ids), dtype=jnp.uint32)
    )
    logits, state = _read(graphdef, params, ids, length)

    def decode(start: int) -> jax.Array:
        nonlocal logits, state
        logits, state, chunk = _decode(
            graphdef, params, logits, state, keys, start, temperature, top_p, drawn, **static
        )
        return chunk

    starts = range(0, length, _CHUNK)
    ahead = decode(0) if starts else None
    for start in starts:
        now = ahead
        if start + _CHUNK < length:  # the device goes on while the host has the tokens
            ahead = decode(start + _CHUNK)
        chunk = np.asarray(now)[:, : length - start]
        if (chunk < 0).any():
            raise RunError(
                "the model's logits are not numbers: its parameters are damaged, or its training "
                "diverged; take an earlier checkpoint"
            )
        yield chunk


def _read(graphdef, params, ids: list[np.ndarray], more: int) -> tuple[jax.Array, Any]:
    """Read prompts; logits (B, V) after the last token of each, and a state for `more` tokens.

    Padded to few lengths, as each is compiled.
    """
    longest = max(map(len, ids))
    length = max(16, 1 << (longest - 1).bit_length())
    if longest > _PART:
        length = -(-longest // _PART) * _PART
    tokens, mask = np.zeros((len(ids), length), np.int32), np.zeros((len(ids), length), bool)
    for row, prompt in enumerate(ids):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    attends = "attention" in nnx.merge(graphdef, params).config.kinds
    room = max(_LEAST, 1 << (longest + more + _CHUNK - 1).bit_length()) if attends else None
    logits: Any = None
    state: Any = None
    for start in range(0, length, _PART):
        part = np.s_[:, start : start + _PART]
        logits, state = _prefill(graphdef, params, tokens[part], mask[part], state, room)
    return logits, state


@functools.partial(jax.jit, static_argnums=(0, 5))
def _prefill(graphdef, params, tokens, mask, state, room):
    model = nnx.merge(graphdef, params)
    with _exactly():
        state = model.init_state(len(tokens), room) if state is None else state
        return model.prefill(tokens, state, mask=mask)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("top_k", "greedy", "nucleus"),
    donate_argnames=("logits", "state"),
)
def _decode(graphdef, params, logits, state, keys, start, temperature, top_p, drawn, **static):
    """The next _CHUNK tokens, (B, _CHUNK), given the logits of the first of them.

    They are those after the first `start`. Where a row's logits are not numbers they are -1. The
    memory of `logits` and `state` is used for those after the last token.
    """
    model = nnx.merge(graphdef, params)

    def one(carry, position):
        logits, state = carry
        key = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        token = _draw(logits, key, temperature, top_p, drawn, **static)
        return model.step(token, state), token

    with _exactly():
        positions = start + jnp.arange(_CHUNK)
        (logits, state), chunk = jax.lax.scan(one, (logits, state), positions)
    return logits, state, chunk.T


def _exactly() -> Any:
    """Keeps products in full fp32: a GPU may round their factors for some batch sizes."""
    return jax.default_matmul_precision("highest")


def _draw(
    logits,
    keys,
    temperature,
    top_p=1.0,
    drawn=None,
    *,
    top_k: int = 0,
    greedy: bool = False,
    nucleus: bool = False,
):
    """One token per row of logits (B, V), of those `drawn` (V,), by its key (B,): (B,) int32."""
    logits = logits.astype(jnp.float32)
    if drawn is not None:
        logits = jnp.where(drawn, logits, -jnp.inf)
    most = jnp.max(logits, axis=-1, keepdims=True)
    if greedy:
        token = jnp.argmax(logits, axis=-1)
    else:
        # Differences are divided, so that no temperature overflows.
        scaled = (logits - most) / temperature
        ranked = None
        if top_k or nucleus:
            scaled, ranked = jax.lax.top_k(scaled, top_k or scaled.shape[-1])
        if nucleus:
            probs = jax.nn.softmax(scaled)
            likelier = jnp.cumsum(probs, axis=-1) - probs
            first = jnp.arange(scaled.shape[-1])[None] == 0
            scaled = jnp.where((likelier < top_p) | first, scaled, -jnp.inf)
        token = jax.vmap(jax.random.categorical)(keys, scaled)
        if ranked is not None:
            token = jnp.take_along_axis(ranked, token[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(most[:, 0]), token, -1).astype(jnp.int32)
