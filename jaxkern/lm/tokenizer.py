"""Tokenizers: bytes, Hugging Face's tokenizer.json, or a byte-level BPE of the data.

Every document is a token that begins it, those of its text, and one that ends it. Of bytes both are
the zero byte; of a tokenizer they are what its files name, or what the common ones are called.
"""

import codecs
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxkern.lm import untrusted
from jaxkern.lm.config import RunError
from jaxkern.lm.sources import MARKER

FILE = "tokenizer.json"
FILES = tuple(f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map"))
FILES += ("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")
FILES += ("chat_template.json", "chat_template.jinja")
_CUT = re.compile(r"(?<=<)(?=\|endoftext\|>)")  # inside it, where no token reaches across
_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", MARKER, "[BOS]", "[CLS]")
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", MARKER, "[EOS]", "[SEP]")
_PADS = ("<pad>", "<|padding|>", "<|pad|>", "[PAD]")
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Bytes:
    """UTF-8 itself: 256 tokens, of which the zero byte begins and ends a text, and is not drawn."""

    size = 256
    begin = end = pad = 0
    drawn = range(1, 256)
    ends = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to go on from; bytes that are no text came as lone surrogates."""
        return [0, *text.encode("utf-8", "surrogateescape")]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts, without those that begin and end them."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those that begin and end it."""
        return bytes(tokens).replace(b"\0", b"").decode("utf-8", "replace")

    def decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int], bool], str]:
        """A function (next tokens, whether they are the last) -> the text that they complete."""
        del prompt
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda tokens, final: decode(bytes(tokens), final)

    def stored(self) -> str:
        """A text that tells it from other tokenizers."""
        return "bytes"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library, and what the files beside its tokenizer.json say."""

    tokenizer: Any
    begin: Any  # the token that begins a text; with a `template` one that is empty, or ``None``
    ends: tuple[int, ...]  # the tokens that end a text
    said: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    template: bool = False  # whether a text to go on from begins as tokenizer.json has it

    @property
    def end(self) -> int:
        return self.ends[0]

    @property
    def pad(self) -> int:
        """The token that fills up texts: the one that is named so, else the one that ends them."""
        token = _first(self.tokenizer, [text_of(self.said, "pad_token"), *_PADS])
        return self.end if token is None else token

    @property
    def size(self) -> int:
        """One more than its largest token."""
        return max(self.drawn) + 1

    @property
    def drawn(self) -> Collection[int]:
        """All tokens that it has: a vocabulary that is rounded up has others besides."""
        return self.tokenizer.get_vocab(with_added_tokens=True).values()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to go on from."""
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        with told("tokenizer.json has no tokens for a prompt"):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=self.template).ids
        if self.begin is not None and not (self.template and ids):
            ids = [self.begin, *ids]
        if not ids:
            raise RunError("this model's text begins with no token of its own; give a --prompt")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts, without those that begin and end them.

        The marker ``<|endoftext|>`` is read as its characters: as a token it would end a document
        inside one. Other special tokens are read as such, as formats of chats need them.
        """
        parts = [_CUT.split(text) for text in texts]
        flat = [*itertools.chain.from_iterable(parts)]
        with told("the tokenizer has no tokens for a text"):
            encoded = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.array(next(encoded).ids, np.uint32) for _ in each]) for each in parts
        ]

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
            if final and held:
                text += self.decode(held)
                held.clear()
            return text

        return decode

    def stored(self) -> str:
        """The content of its tokenizer.json."""
        return self.tokenizer.to_str(pretty=True)


def kind_of(spec: str) -> int | str | None:
    """The size of ``bpe:SIZE``, the path of a tokenizer that there is, or ``None`` for bytes."""
    if spec == "bytes":
        return None
    if spec.startswith("bpe:"):
        number = spec.removeprefix("bpe:")
        if re.fullmatch("[0-9]{1,8}", number) and 257 <= int(number) <= 2**24:
            return int(number)
        raise RunError(f"--tokenizer {spec}: the size must be a whole number from 257 to 2^24")
    return spec


def size_of(spec: str) -> int:
    """The tokens of a tokenizer; of a BPE that is yet to be trained, those that are asked for."""
    kind = kind_of(spec)
    if isinstance(kind, str):
        return load(kind).size
    return Bytes.size if kind is None else kind


def dtype_of(size: int) -> Any:
    """The integers that hold that many tokens."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32


def load(path: Path | str, stored: dict[str, Any] | None = None) -> Tokenizer:
    """Open a tokenizer.json, or the folder that holds one.

    The tokens that begin and end a text are `stored` where a run has kept them; else the files say.
    """
    path = Path(path)
    file = untrusted.file_in(path, FILE) if path.is_dir() else path
    if file is None or not file.is_file():
        right = "bytes, bpe:32000, or a tokenizer.json of Hugging Face or its folder"
        what = f"--tokenizer {path}: no such tokenizer; give {right}"
        raise RunError(what if stored is None else f"{path} is lost; copy it from the run's corpus")
    tokenizer, said = open_file(file, {} if stored is not None else None)
    if stored is not None:
        return Tokenizer(tokenizer, stored["begin"], (stored["end"],))
    bos, eos = generation(path) if path.is_dir() else (None, [])
    of_model = lambda ids: [tokenizer.id_to_token(token) for token in ids if token is not None]
    begin = _first(tokenizer, [text_of(said, "bos_token"), *of_model([bos]), *_BEGINS])
    end = _first(tokenizer, [text_of(said, "eos_token"), *of_model(eos), *_ENDS])
    if begin is None and end is None:
        tokenizer.add_special_tokens([MARKER])
        end = tokenizer.token_to_id(MARKER)
    begin, end = (end if begin is None else begin), (begin if end is None else end)
    assert end is not None
    return Tokenizer(tokenizer, begin, (end,), said)


def open_file(file: Path, said: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """The ``tokenizers.Tokenizer`` of a tokenizer.json, and its settings, whose tokens it has, too.

    The settings are by default those of the files beside it. What it was saved with for a model of
    fixed lengths is left out: texts have any.
    """
    import tokenizers

    said = settings(file.parent) if said is None else said
    text = untrusted.read_text(file, untrusted.LARGE)
    with told(f"{file} cannot be read"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.encode("")
    if tokenizer.padding:
        said = {"pad_token": tokenizer.padding["pad_token"]} | said
    tokenizer.no_truncation()
    tokenizer.no_padding()
    listed, special = _added(said, file.parent)
    tokenizer.add_tokens(listed)
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in special if token.content not in there])
    return tokenizer, said


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Inside, a RunError tells what `tokenizers` cannot do: it has no exception of its own."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RunError(f"{what} ({' '.join(str(error).split())})") from None


def settings(folder: Path) -> dict[str, Any]:
    """The files beside a tokenizer.json, merged as transformers does it.

    Two files are of the time before tokenizer_config.json listed the added tokens: where it does,
    they say nothing, and else they overrule it.
    """
    said = untrusted.read_json(folder, "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in said:
        older = untrusted.read_json(folder, "special_tokens_map.json") or {}
        extra, more = (each.get("extra_special_tokens") for each in (said, older))
        if isinstance(extra, list) and isinstance(more, list):
            older["extra_special_tokens"] = extra + more
        said |= older
        added = untrusted.read_json(folder, "added_tokens.json") or {}
        special = {token.content for token in _added(said, folder)[1]}
        said["added_tokens_decoder"] = {
            number: {"content": text, "special": text in special} for text, number in added.items()
        }
    return said


def _added(said: dict[str, Any], folder: Path) -> tuple[list[Any], list[Any]]:
    """The ``AddedToken`` that settings list under a number, and the special ones that they name.

    Both are in the order in which transformers adds them, which numbers those that are new.
    """
    from tokenizers import AddedToken

    def added(token: Any, **properties: bool) -> Any:
        known = token if isinstance(token, dict) else {"content": token}
        if not isinstance(known.get("content"), str):
            raise ValueError(f"{token!r} is no token")
        kept = {name: known[name] for name in _PROPERTIES if name in known}
        return AddedToken(known["content"], **kept | properties)

    try:
        listed = (said.get("added_tokens_decoder") or {}).items()
        named = {name: said.get(name) for name in NAMED}
        named |= {k: v for k, v in said.items() if k.endswith("_token") and isinstance(v, str)}
        extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
        extra = extra.values() if isinstance(extra, dict) else extra
        special = [token for token in (*named.values(), *extra) if token is not None]
        in_order = sorted(listed, key=lambda each: int(each[0]))
        return [added(token) for _, token in in_order], [added(t, special=True) for t in special]
    except (AttributeError, TypeError, ValueError) as error:
        what = f"{folder}: the files beside {FILE} name tokens that are none"
        raise RunError(f"{what} ({error})") from None


def text_of(said: dict[str, Any], name: str) -> str | None:
    """The text of a special token by `settings`; ``None`` if they name none."""
    token = said.get(name)
    return token.get("content") if isinstance(token, dict) else token


def generation(folder: Path) -> tuple[int | None, list[int]]:
    """The token that transformers begins a text with that has none, and those that end a text."""
    name = "generation_config.json"
    if (said := untrusted.read_json(folder, name)) is None:
        name = "config.json"
        said = untrusted.read_json(folder, name) or {}
    begin, ends = said.get("bos_token_id"), said.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for key, tokens in (("bos_token_id", [] if begin is None else [begin]), ("eos_token_id", ends)):
        if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise RunError(f"{folder / name}: {key} is {said[key]!r}, and is a token's number")
    return begin, ends


def _first(tokenizer: Any, names: Sequence[str | None]) -> int | None:
    """The first of some tokens that a tokenizer has."""
    ids = (tokenizer.token_to_id(name) for name in names if name is not None)
    return next((token for token in ids if token is not None), None)


def train_bpe(texts: Iterator[str], size: int, *, show: bool) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens, or fewer where the texts have no more pairs.

    Among them are the 256 bytes and the token that begins and ends a text.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[MARKER],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show,
    )
    # In a thread of its own, so that a signal need not wait for it.
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(tokenizer.train_from_iterator, texts, trainer).result()
    finally:
        pool.shutdown(wait=False)
    token: Any = tokenizer.token_to_id(MARKER)
    return Tokenizer(tokenizer, token, (token,))
