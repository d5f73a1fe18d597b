"""Trained models in Python: loaded, called, and sampled from, token by token.

Prompts of unequal lengths are decoded together: shorter ones are padded on the left, and the
padding leaves no trace in the state. Every row draws by a key of its own, made from its seed and
the token's position, so that it goes on as it would alone.
"""

import dataclasses
import functools
import operator
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkern.lm import checkpoint, data
from jaxkern.lm.config import ModelConfig, RunError, Sampling
from jaxkern.lm.hf_layouts import HOW_TO_GET, is_hf
from jaxkern.lm.model import MambaLM, Options, decayed, initial_params
from jaxkern.lm.step import make_model, precision_policy
from jaxkern.lm.tokenizer import Bytes, Tokenizer
from jaxkern.precision import Policy, float_dtype

_CHUNK = 16  # tokens decoded between two prints
_PART = 2048  # tokens of a prompt that are read at once, so that memory does not grow with it
_LEAST = 256  # tokens that attention has room for; more are powers of two, each compiled anew


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A trained language model, to be called and sampled from.

    Attributes:
      config: its shape.
      params: its parameters, a nested dict of arrays; :meth:`module` says what they are of.
      step: the optimizer steps that it has been trained for; ``None`` if that is not known.
      codec: how text becomes tokens and tokens text; ``None`` if the checkpoint does not say.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkern.lm.config import PRESETS
      >>> from jaxkern.lm.sample import LanguageModel, initial
      >>> model = initial(PRESETS["micro"].model)
      >>> model(jnp.array([[100, 101, 102]])).shape  # (B, L) -> (B, L, vocab_size)
      (1, 3, 256)
      >>> [len(text) for text in model.generate(["def ", "a longer prompt"], length=8, top_k=1)]
      [8, 8]
    """

    config: ModelConfig
    params: Any = dataclasses.field(repr=False)
    step: int | None = None
    codec: Bytes | Tokenizer | None = dataclasses.field(default=Bytes(), repr=False)

    def module(self, options: Options | None = None) -> MambaLM:
        """The flax.nnx module with these parameters, to be trained further or changed."""
        return nnx.merge(make_model(self.config, options or Options()), self.params)

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Tokens (B, L) -> logits (B, L, vocab_size), compiled.

        The options are `segment_ids` and `mask` of :class:`jaxkern.lm.model.MambaLM`.
        """
        return _logits(make_model(self.config, Options()), self.params, tokens, **options)

    def decoder(self, dtype: Any = None) -> tuple[nnx.GraphDef, Any]:
        """Returns a model and its parameters, for :func:`generate_tokens`.

        Matrices are in `dtype`, as for :meth:`generate`; what is small keeps its precision.
        """
        if dtype is None:
            dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        dtype = float_dtype("dtype", dtype)
        cast = lambda leaf, matrix: leaf.astype(dtype) if matrix else leaf
        params = jax.tree.map(cast, self.params, decayed(self.params))
        return make_model(self.config, Options(Policy(compute=dtype))), params

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        length: int = 400,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 0,
        dtype: Any = None,
        stop: Sequence[str] = (),
        timing: "Timing | None" = None,
    ) -> Any:
        """Continue texts, or tokens.

        Args:
          prompts: a text or a sequence of tokens, or several of any lengths; each is continued as
            it is alone, in 16 bits to rounding. A text begins with the token that begins one,
            tokens are taken as given.
          length: tokens of a continuation at most.
          temperature: divides the logits; 0 takes the likeliest token.
          top_k: draw from the k likeliest tokens; 0 for all.
          top_p: draw from the likeliest tokens that together have this probability.
          seed: of the draws; prompt i draws by ``seed + i``.
          dtype: of the matrices and the products with them, such as ``"fp32"``; ``None`` for
            bfloat16 on a GPU, which reads half the bytes, and float32 elsewhere.
          stop: texts; the continuation of a text ends before the first that it has whole.
          timing: is told of the tokens that are decoded.

        Returns:
          What follows the prompt, or a list of what follows each: after a text a text, after tokens
          a list of tokens.

        Raises:
          TypeError, ValueError: a prompt is neither, or an option has a value that it cannot have.
          RunError: the checkpoint does not say what its tokens are, or has logits that are not
            numbers.
        """
        several, alone = _several(prompts)
        if not several:
            return []
        options = {"length": length, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        options |= {"seed": seed, "dtype": dtype, "stop": stop, "timing": timing}
        pieces = [*self._pieces(several, **options)]
        found = [functools.reduce(operator.add, of_one) for of_one in zip(*pieces, strict=True)]
        return found[0] if alone else found

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Any]:
        """Continue one prompt as :meth:`generate` does, in pieces, as they are decoded."""
        return (piece for (piece,) in self._pieces([prompt], **options))

    def write(self, prompts: Sequence[str], **options: Any) -> None:
        """Write texts and what follows them to stdout; of one prompt as it is decoded.

        On a terminal escapes stand for what would control it. Options are as for :meth:`generate`.
        """
        if len(prompts) == 1:
            _show(prompts[0])
            for piece in self.stream(prompts[0], **options):
                _show(piece)
            print(flush=True)
            return
        for row, text in enumerate(self.generate(prompts, **options)):
            _show(f"--- {row + 1}\n{prompts[row]}{text}\n")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the one that begins it."""
        ids, size = self._known_codec().encode(text), self.config.vocab_size
        if max(ids) >= size:
            raise RunError(f"tokenizer.json has token {max(ids)}, and the model has {size}")
        return ids

    def decode(self, tokens: Sequence[int] | jax.Array) -> str:
        """The text of tokens, (L,) integers, without those that begin and end it."""
        return self._known_codec().decode([int(token) for token in tokens])

    def _known_codec(self) -> Any:
        if self.codec is None:
            size = self.config.vocab_size
            raise RunError(f"the checkpoint holds no tokenizer.json, of its {size} tokens")
        return self.codec

    def _pieces(
        self,
        prompts: list[Any],
        *,
        dtype: Any = None,
        stop: Sequence[str] = (),
        timing: "Timing | None" = None,
        **options: Any,
    ) -> Iterator[list[Any]]:
        """The next piece of what follows each prompt, as it is decoded: a text or tokens."""
        if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop must be a sequence of texts, got {stop!r}")
        if not all(stop):
            raise ValueError("stop has an empty text, before which nothing can be written")
        of_text = [isinstance(prompt, str) for prompt in prompts]
        if stop and not all(of_text):
            raise TypeError("stop ends texts, and a prompt is of tokens")
        codec: Any = self.codec
        ids = [self.encode(each) if t else each for each, t in zip(prompts, of_text, strict=True)]
        readers: list[Callable[[list[int], bool], tuple[Any, bool]]] = [
            _reader(codec.decoder(tokens), stop) if t else lambda tokens, final: (tokens, final)
            for tokens, t in zip(ids, of_text, strict=True)
        ]
        drawn, ends = (None, ()) if codec is None else (codec.drawn, codec.ends)  # None for any
        going = [True] * len(ids)
        for chunk in generate_tokens(*self.decoder(dtype), ids, among=drawn, **options):
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


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens, **options):
    return nnx.merge(graphdef, params)(tokens, **options)


def _several(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts, each a text or an array of tokens, and whether one was given by itself."""
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a text or token ids, or several, got {prompts!r}")
    several = list(prompts)
    of_tokens = not any(isinstance(each, str) or np.ndim(each) for each in several)
    return ([several], True) if several and of_tokens else (several, False)


def _reader(decode: Callable[[Sequence[int], bool], str], stops: Sequence[str]) -> Any:
    """A function (next tokens, whether they are the last) -> the next piece, and whether it is.

    The text ends before the stop that is the first to be whole in it.
    """
    text, sure, longest = "", 0, max(map(len, stops), default=1)

    def read(tokens: Sequence[int], final: bool) -> tuple[str, bool]:
        nonlocal text, sure
        text += decode(tokens, final)
        before = sure
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            sure = min(found)[1]
        else:  # a stop may begin in the last characters
            sure = len(text) if final else max(sure, len(text) - longest + 1)
        return text[before:sure], final or bool(found)

    return read


def _show(text: str) -> None:
    sys.stdout.write(text.translate(_ESCAPES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


# Bytes that are no UTF-8 are written as they came, and some of them control terminals, too.
_ESCAPES = {code: f"\\x{code:02x}" for code in {*range(32), *range(127, 160)} - {*b"\n\t"}}
_ESCAPES |= {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}


class Timing:
    """The speed at which tokens of all texts together are decoded."""

    def __init__(self):
        self._times, self._counts = [time.perf_counter()], list[int]()

    def add(self, tokens: int) -> None:
        """Notes that this number more are there."""
        self._times.append(time.perf_counter())
        self._counts.append(tokens)

    def __str__(self) -> str:
        if not self._counts:
            return "no token was decoded"
        (began, first, *_), (count, *more) = self._times, self._counts
        told = f"the first {count} tokens after {first - began:.2f} s, compilation included"
        speed = sum(more) / max(self._times[-1] - first, 1e-9)
        return told + (f"; then {sum(more)} at {speed:,.0f} tokens/s" if more else "")


def initial(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model of a given shape before any training."""
    return LanguageModel(config, jax.jit(lambda: initial_params(config, seed))(), 0)


def load(folder: Path, *, step: int | None = None) -> LanguageModel:
    """Load a trained language model; see :func:`jaxkern.lm.load`."""
    if not folder.exists():
        raise RunError(f"there is no folder {folder}; {HOW_TO_GET}")
    if is_hf(folder):
        if step is not None:
            raise RunError(f"{folder} is no run, so that it has no step {step}; leave step out")
        return load_hf(folder)
    return load_run(folder, lambda note: warnings.warn(note, stacklevel=5), step=step)


def load_run(run: Path, warn: Callable[[str], None], *, step: int | None = None) -> LanguageModel:
    """Load a run's newest whole checkpoint, or that of a step, and warn of damaged ones."""
    config, info = checkpoint.read(run)
    policy = precision_policy(config)
    like = jax.eval_shape(lambda: policy.cast_to_params(initial_params(config.model)))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    found = checkpoint.restore(run, {"params": checkpoint.abstract(like, device)}, step)
    for what in found.damaged:
        warn(f"{what}; that of step {found.step} is loaded")
    codec = data.open_tokenizer(config.tokenizer, run, info)
    return LanguageModel(config.model, found.state["params"], found.step, codec)


def load_hf(folder: Path | str) -> LanguageModel:
    """Load a checkpoint of Hugging Face; without a tokenizer.json one of 256 tokens is of bytes."""
    from jaxkern.lm import hf

    config, params = hf.load(folder)
    codec = hf.load_tokenizer(Path(folder)) or (Bytes() if config.vocab_size == 256 else None)
    return LanguageModel(config, jax.tree.map(jnp.asarray, params), None, codec)


def generate_tokens(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    among: Collection[int] | None = None,
    **options: Any,
) -> Iterator[np.ndarray]:
    """Decode tokens after each of several prompts, B, of at least one, in pieces (B, n), int32.

    They are drawn `among` those given, of which the model may lack some, by default all. The other
    options and the errors are as for :meth:`LanguageModel.generate`.
    """
    size = nnx.merge(graphdef, params).config.vocab_size
    ids = _check_prompts(prompts, size)
    by = Sampling(**options)
    greedy = by.temperature < np.finfo(np.float32).tiny or by.top_k == 1
    drawn = None if among is None else np.isin(np.arange(size), list(among))
    options = {"temperature": by.temperature, "top_p": by.top_p, "drawn": drawn}
    options |= {"top_k": min(by.top_k, size), "greedy": greedy, "nucleus": by.top_p < 1}
    return _generate(graphdef, params, ids, by.length, by.seed, options)


def _check_prompts(prompts: Sequence[Sequence[int]], size: int) -> list[np.ndarray]:
    ids = [np.asarray(prompt) for prompt in prompts]
    for i, prompt in enumerate(ids):
        if not prompt.size:
            raise ValueError(f"prompts[{i}] must have at least one token, got none")
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            given = f"shape {prompt.shape} and dtype {prompt.dtype}"
            raise TypeError(f"prompts[{i}] must be a sequence of integers, got {given}")
        if prompt.min() < 0 or prompt.max() >= size:
            wrong = prompt[(prompt < 0) | (prompt >= size)][0]
            raise ValueError(f"prompts[{i}] has token {wrong}, and the model has 0 to {size - 1}")
    return ids


def _generate(graphdef, params, ids, length, seed, options):
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(
        jnp.arange(seed, seed + len(ids), dtype=jnp.uint32)
    )
    each_layer = nnx.merge(graphdef, params).each_layer
    small = [_small(graphdef, kind, params, number) for kind, number in each_layer]
    logits, state = _read(graphdef, params, ids, length)
    ahead: list[jax.Array] = []  # the device goes on while the host has the tokens
    for start in range(0, length, _CHUNK):
        logits, state, chunk = _decode(
            graphdef, params, small, logits, state, keys, start, **options
        )
        ahead.append(chunk)
        if start:
            yield _numbers(ahead.pop(0))
    if ahead:
        yield _numbers(ahead[0])[:, : 1 + (length - 1) % _CHUNK]


def _numbers(chunk: jax.Array) -> np.ndarray:
    tokens = np.asarray(chunk)
    if (tokens < 0).any():
        raise RunError(
            "the model's logits are not numbers: its parameters are damaged, or its training "
            "diverged; take an earlier checkpoint"
        )
    return tokens


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
@jax.default_matmul_precision("highest")  # a GPU may round the factors for some batch sizes
def _prefill(graphdef, params, tokens, mask, state, room):
    model = nnx.merge(graphdef, params)
    state = model.init_state(len(tokens), room) if state is None else state
    return model.prefill(tokens, state, mask=mask)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _small(graphdef, kind, params, number):
    return nnx.merge(graphdef, params).small_params(kind, number)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("top_k", "greedy", "nucleus"),
    donate_argnames=("logits", "state"),
)
@jax.default_matmul_precision("highest")
def _decode(graphdef, params, small, logits, state, keys, start, **options):
    """The _CHUNK tokens, (B, _CHUNK), after the first `start`; -1 where logits are not numbers."""
    model = nnx.merge(graphdef, params)

    def one(carry, position):
        logits, state = carry
        key = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        token = _draw(logits, key, **options)
        return model.step(token, state, small), token

    positions = start + jnp.arange(_CHUNK)
    (logits, state), chunk = jax.lax.scan(one, (logits, state), positions)
    return logits, state, chunk.T


def _draw(
    logits, keys, temperature, top_p=1.0, drawn=None, *, top_k=0, greedy=False, nucleus=False
):
    """One token per row of logits (B, V), of those `drawn` (V,), by its key (B,): (B,) int32."""
    logits = logits.astype(jnp.float32)
    if drawn is not None:
        logits = jnp.where(drawn, logits, -jnp.inf)
    most = jnp.max(logits, axis=-1, keepdims=True)
    # Differences are divided, so that no temperature overflows.
    scaled = (logits - most) / temperature
    if greedy:
        token = jnp.argmax(logits, axis=-1)
    elif not (top_k or nucleus):
        token = jax.vmap(jax.random.categorical)(keys, scaled)
    else:
        scaled, ranked = jax.lax.top_k(scaled, top_k or scaled.shape[-1])
        if nucleus:
            probs = jax.nn.softmax(scaled)
            first = jnp.arange(scaled.shape[-1]) == 0
            likely = jnp.cumsum(probs, axis=-1) - probs < top_p
            scaled = jnp.where(likely | first, scaled, -jnp.inf)
        rank = jax.vmap(jax.random.categorical)(keys, scaled)
        token = jnp.take_along_axis(ranked, rank[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(most[:, 0]), token, -1).astype(jnp.int32)
