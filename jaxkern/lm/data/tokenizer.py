"""How text becomes tokens: bytes, Hugging Face's tokenizer.json, or a byte-level BPE of the data.

Every document is a token that begins it, those of its text, and one that ends it. Of bytes both are
the zero byte; of a tokenizer they are what its files name, or what the common ones are called.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxkern.lm.config import RunError
from jaxkern.lm.data.documents import MARKER, need_package

SEPARATOR = 0  # begins and ends a text of bytes
FILE = "tokenizer.json"
_SPECIAL = MARKER.decode()
_CUT = re.compile(r"(?<=<)(?=\|endoftext\|>)")  # inside it, where no token reaches across
_BEGINS = ("<s>", "<bos>", "<|begin_of_text|>", _SPECIAL, "[BOS]", "[CLS]")
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", _SPECIAL, "[EOS]", "[SEP]")


class Bytes:
    """UTF-8 itself: 256 tokens, of which the zero byte begins and ends a text."""

    size = 256
    begin = end = SEPARATOR

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts, without those that begin and end them."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def stored(self) -> str:
        """What tells it from others."""
        return "bytes"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes:
      tokenizer: a ``tokenizers.Tokenizer``.
      begin, end: the tokens that begin and end a text.
    """

    tokenizer: Any
    begin: int
    end: int

    @property
    def size(self) -> int:
        """One more than its largest token."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of texts, without those that begin and end them.

        The marker ``<|endoftext|>`` is read as its characters: as a token it would end a document
        inside one. Other special tokens are read as such, as formats of chats need them.
        """
        parts = [_CUT.split(text) for text in texts]
        flat = [*itertools.chain.from_iterable(parts)]
        encoded = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.array(next(encoded).ids, np.uint32) for _ in each]) for each in parts
        ]

    def stored(self) -> str:
        """The content of its tokenizer.json."""
        return self.tokenizer.to_str(pretty=True)


def kind_of(spec: str) -> int | str | None:
    """The size of ``bpe:SIZE``, the path of a tokenizer that there is, or ``None`` for bytes.

    Raises:
        RunError: it is none of them.
    """
    if spec == "bytes":
        return None
    if spec.startswith("bpe:"):
        number = spec.removeprefix("bpe:")
        if re.fullmatch("[0-9]{1,8}", number) and 257 <= int(number) <= 2**24:
            return int(number)
        raise RunError(
            f"--tokenizer {spec}: the size must be a whole number from 257 to 2^24, such as "
            "bpe:32000"
        )
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

    Args:
        path: the file or the folder.
        stored: "begin" and "end", where a run has kept them; else the files say.

    Raises:
        RunError: it is not there, or cannot be read.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise RunError(
            f"--tokenizer {path}: no such tokenizer; give bytes, bpe:32000 or another size, or a "
            "tokenizer.json of Hugging Face or its folder"
        )
    library = need_package("tokenizers", f"--tokenizer {path}")
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no exception of its own
        raise RunError(
            f"--tokenizer {path}: {file} cannot be read ({error}); give a tokenizer.json of "
            "Hugging Face"
        ) from None
    # What it was saved with for a model of fixed lengths: documents have any.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if stored is not None:
        return Tokenizer(tokenizer, stored["begin"], stored["end"])
    named = _named_tokens(file.parent)
    begin = _first(tokenizer, [named.get("bos_token"), *_BEGINS])
    end = _first(tokenizer, [named.get("eos_token"), *_ENDS])
    if begin is None and end is None:
        tokenizer.add_special_tokens([_SPECIAL])
        end = tokenizer.token_to_id(_SPECIAL)
    begin, end = (end if begin is None else begin), (begin if end is None else end)
    assert begin is not None
    assert end is not None
    return Tokenizer(tokenizer, begin, end)


def _named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files beside a tokenizer.json name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            tokens = {key: content.get(key) for key in ("bos_token", "eos_token")}
            texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
            return {key: text for key, text in texts.items() if isinstance(text, str)}
    return {}


def _first(tokenizer: Any, names: Sequence[str | None]) -> int | None:
    """The first of some tokens that a tokenizer has."""
    ids = (tokenizer.token_to_id(name) for name in names if name is not None)
    return next((token for token in ids if token is not None), None)


def train_bpe(texts: Iterator[str], size: int, *, show: bool) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens, or fewer where the texts have no more pairs.

    Args:
        texts: a sample of the documents.
        size: of the vocabulary, with the 256 bytes and the token that begins and ends a text.
        show: whether to draw a progress bar.
    """
    library = need_package("tokenizers", f"--tokenizer bpe:{size}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_SPECIAL],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show,
    )
    # In a thread of its own, so that a signal need not wait for it.
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(tokenizer.train_from_iterator, texts, trainer).result()
    finally:
        pool.shutdown(wait=False)
    token = tokenizer.token_to_id(_SPECIAL)
    return Tokenizer(tokenizer, token, token)
