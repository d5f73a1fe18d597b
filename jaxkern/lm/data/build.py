"""The tokenised documents of a run: made from --data and --eval-data, found again, opened."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import tokenizer as tokenizers
from jaxkern.lm.data.corpus import MOST_HELD_OUT, VALIDATION_FRACTION
from jaxkern.lm.data.documents import File
from jaxkern.lm.data.files import write_atomically
from jaxkern.lm.data.packed import PackedCorpus, PackedSource, Stream
from jaxkern.lm.data.pieces import Piece, divide
from jaxkern.lm.data.shards import (
    PARTS,
    Shard,
    beginnings,
    read_shard,
    tokenise,
)
from jaxkern.lm.data.sources import Skipped, Source, find_files, parse, refuse_nothing
from jaxkern.lm.data.tokenizer import Bytes, Tokenizer, dtype_of
from jaxkern.lm.stop import say

_FORMAT = 2  # of what a key names: raised where the same files give other tokens
_SAMPLE = 1 << 27  # characters that a BPE is trained on


@dataclasses.dataclass(frozen=True)
class _Documents:
    """A source of --data or --eval-data, found.

    Attributes:
      source: what was named.
      held_out: the share of its documents that are validated with: 0 or 1 beside --eval-data.
      groups: its files, by shards.
      skipped: the files below it that hold no text.
    """

    source: Source
    held_out: float
    groups: list[tuple[Piece, ...]]
    skipped: Skipped


def build_packed(config: TrainConfig, out: Path) -> PackedCorpus:
    """Tokenise the documents of a run, but for those that already are.

    The shards lie in a folder below --data-cache or the run's own, which is named by a digest of
    the files and the tokenizer: other runs with the same find it there.

    Raises:
        RunError: a path is missing, holds no text, or too little.
    """
    found = _found(config)
    shared = shared_folder(config, out)
    tokenizer = _tokenizer(config.tokenizer, found, shared)
    plan = json.dumps(
        [
            _FORMAT,
            hashlib.sha256(tokenizer.stored().encode()).hexdigest(),
            [tokenizer.begin, tokenizer.end],
            [[documents.held_out, *map(_identity, documents.groups)] for documents in found],
        ]
    )
    key = hashlib.sha256(plan.encode()).hexdigest()[:16]
    folder = shared / key
    if config.data_cache is None:
        _remove_others(shared, key)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder):
        if isinstance(tokenizer, Tokenizer):
            write_atomically(folder / tokenizers.FILE, tokenizer.stored())
        shards, sources = [], []
        for documents in found:
            first = len(shards)
            for pieces in documents.groups:
                path = folder / f"{len(shards):05}"
                shards.append(Shard(path, pieces, documents.held_out))
            sources.append(
                {
                    "name": _name(documents, found),
                    "weight": documents.source.weight,
                    "held_out": documents.held_out,
                    "most_held_out": MOST_HELD_OUT,
                    "skipped": documents.skipped.count,
                    "skipped_example": documents.skipped.example,
                    "shards": [first, len(shards)],
                }
            )
        tokenise(shards, tokenizer, folder / tokenizers.FILE)
    stored = {"begin": tokenizer.begin, "end": tokenizer.end, "size": tokenizer.size}
    return _opened(folder, {"folder": key, "tokenizer": stored, "sources": sources}, tokenizer)


def open_packed(config: TrainConfig, out: Path, info: dict[str, Any]) -> PackedCorpus:
    """Open the tokenised documents of a run that is resumed.

    Args:
        config: of the run.
        out: its folder.
        info: what its config.json keeps of them.

    Raises:
        RunError: they are not there any more, or not those that the run began with.
    """
    shared = shared_folder(config, out)
    try:
        tokenizer = open_tokenizer(config.tokenizer, out, info)
        known = {key: info[key] for key in ("folder", "tokenizer", "sources")}
        corpus = _opened(shared / info["folder"], known, tokenizer)
        intact = corpus.info["fingerprint"] == info["fingerprint"]
    except (KeyError, TypeError, ValueError, OSError):
        intact = False
    if not intact:
        raise RunError(
            f"the tokens in {shared} are missing or have changed since the run began; name the "
            "folder that holds them with --data-cache, or start a new run with another --out"
        )
    return corpus


def open_shards(config: TrainConfig, out: Path, info: dict[str, Any]) -> PackedCorpus:
    """Open the tokenised documents that another process of the run has made.

    Args:
        config: of the run.
        out: its folder.
        info: of the corpus that the other process has.

    Raises:
        RunError: this process does not see them.
    """
    folder = shared_folder(config, out) / info["folder"]
    try:
        path = folder / tokenizers.FILE
        bytes_alone = config.tokenizer == "bytes"
        tokenizer = Bytes() if bytes_alone else tokenizers.load(path, info["tokenizer"])
        known = {key: info[key] for key in ("folder", "tokenizer", "sources")}
        corpus = _opened(folder, known, tokenizer)
        intact = corpus.info["fingerprint"] == info["fingerprint"]
    except (ValueError, OSError):
        intact = False
    if not intact:
        raise RunError(
            f"the tokens that process 0 has made are not in {folder} here; --out and --data-cache "
            "have to be on a file system that all hosts share"
        )
    return corpus


def open_tokenizer(spec: str, out: Path, info: dict[str, Any]) -> Bytes | Tokenizer:
    """The tokenizer that a run keeps in its folder; `info` is its "data" in config.json."""
    return Bytes() if spec == "bytes" else tokenizers.load(out / tokenizers.FILE, info["tokenizer"])


def shared_folder(config: TrainConfig, out: Path) -> Path:
    """Where the shards of a run are."""
    return out / "corpus" if config.data_cache is None else Path(config.data_cache)


def has_shards(out: Path) -> bool:
    """Whether a run's own folder holds tokens, which cost time to make."""
    return any(out.glob("corpus/*/[0-9]*.json"))


def _found(config: TrainConfig) -> list[_Documents]:
    """The documents that a run names, each once.

    A file of --eval-data is not trained on, whatever its field: another may hold the same text.
    """
    if not config.eval_data:
        return _of_flag("--data", config.data, VALIDATION_FRACTION)
    validation = _of_flag("--eval-data", config.eval_data, 1.0)
    groups = itertools.chain.from_iterable(documents.groups for documents in validation)
    left_out = {piece.file.path.resolve() for piece in itertools.chain.from_iterable(groups)}
    return [*_of_flag("--data", config.data, 0.0, left_out), *validation]


def _of_flag(
    flag: str, texts: Sequence[str], held_out: float, left_out: Collection[Path] = ()
) -> list[_Documents]:
    """The documents that a flag names, each once, but for those of the files `left_out`."""
    found: list[_Documents] = []
    seen: set[tuple[Path, str]] = set()
    for source in parse(texts, flag):
        named, skipped = find_files(source, flag)
        refuse_nothing(named, skipped, source.path, flag)
        files = [
            file
            for file in named
            if file.content not in seen and file.path.resolve() not in left_out
        ]
        if not files:
            raise RunError(
                f"{flag} {source.text}: all of its files are named before, by --data or "
                "--eval-data; leave it out"
            )
        seen |= {file.content for file in files}
        found.append(_Documents(source, held_out, divide(files, flag), skipped))
    return found


def _identity(pieces: Sequence[Piece]) -> list[Any]:
    """What tells a shard's documents from others, as far as can be told without reading them."""
    identities = []
    for piece in pieces:
        status = piece.file.path.stat()
        file = [str(piece.file.path.resolve()), piece.file.field, status.st_size]
        identities.append([*file, status.st_mtime_ns, piece.begin, piece.end])
    return identities


def _tokenizer(spec: str, found: Sequence[_Documents], shared: Path) -> Bytes | Tokenizer:
    """The tokenizer that is asked for; a BPE is trained on --data unless it was already."""
    kind = tokenizers.kind_of(spec)
    if kind is None:
        return Bytes()
    if isinstance(kind, str):
        return tokenizers.load(kind)
    learned = [documents for documents in found if documents.held_out < 1]
    identity = json.dumps([_FORMAT, [[*map(_identity, each.groups)] for each in learned]])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = shared / f"bpe-{kind}-{key}.json"
    if not path.exists():
        say(f"training a byte-level BPE of {kind:,} tokens …")
        files = {piece.file: None for each in learned for pieces in each.groups for piece in pieces}
        texts = _sample([*files])
        trained = tokenizers.train_bpe(texts, kind, show=sys.stderr.isatty())
        shared.mkdir(parents=True, exist_ok=True)
        write_atomically(path, trained.stored())
    return tokenizers.load(path)


def _sample(files: Sequence[File]) -> Iterator[str]:
    """The beginnings of all files, of `_SAMPLE` characters where the data has as many."""
    left = _SAMPLE
    for i, file in enumerate(sorted(files, key=lambda file: file.path.stat().st_size)):
        share = left // (len(files) - i)  # what small files leave is for the larger ones
        for text in beginnings(file):
            yield text[:share]
            size = min(len(text), share)
            left, share = left - size, share - size
            if not share:
                break


def _name(documents: _Documents, found: Sequence[_Documents]) -> str:
    """What reports call a source: the end of its path, where no other's of its flag is the same.

    Else its path, and where that is the same, too, its field.
    """
    of_flag = [each.source for each in found if each.held_out == documents.held_out]
    source = documents.source
    short = lambda source: source.name.rstrip("/").rpartition("/")[2]
    if [*map(short, of_flag)].count(short(source)) == 1 and "*" not in short(source):
        return short(source)
    several = sum(each.name == source.name for each in of_flag) > 1
    return f"{source.name}:{source.field}" if several else source.name


def _remove_others(shared: Path, key: str) -> None:
    """Remove what a run that never began, with other data, has left in its folder."""
    for path in shared.glob("[0-9a-f]" * 16):
        if path.name != key:
            shutil.rmtree(path)


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Hold a folder of shards; a second process waits until the first has written them."""
    import fcntl

    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that tokenises the same data into {folder} …")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def _opened(folder: Path, info: dict[str, Any], tokenizer: Bytes | Tokenizer) -> PackedCorpus:
    """The corpus of whole shards, and what they hold added to `info`.

    Raises:
        ValueError: a shard is missing.
        RunError: a source has too few tokens.
    """
    dtype = dtype_of(tokenizer.size)
    train: list[PackedSource] = []
    validation: list[PackedSource] = []
    digests, described, split = [], [], "by document"
    for source in info["sources"]:
        paths = [folder / f"{i:05}" for i in range(*source["shards"])]
        shards = [shard for shard in map(read_shard, paths) if shard is not None]
        if len(shards) < len(paths):
            raise ValueError(f"{folder} lacks shards")
        digests += [shard["digest"] for shard in shards]
        learned, held = (_part(source, part, paths, shards, dtype) for part in PARTS)
        both = learned.together(held)
        if both.stream.size < 4:
            flag = "--eval-data" if source["held_out"] == 1 else "--data"
            raise RunError(f"{flag} {both.name} has {both.stream.size} tokens; give more text")
        if source["held_out"] in (0, 1):
            (validation if source["held_out"] else train).append(both)
            split = "by source"
        else:
            size = both.stream.size
            most = source.get("most_held_out", 1) * size  # a run of an earlier version has no bound
            if not learned.stream.size or not 0 < held.stream.size <= most:
                cut = size - max(2, int(size * VALIDATION_FRACTION))
                learned, held = both.part(0, cut), both.part(cut, size)
                split = "by position"
            train.append(learned)
            validation.append(held)
        documents = sum(shard[part]["documents"] for shard in shards for part in PARTS)
        described.append(
            source | {"documents": documents, "tokens": both.stream.size, "bytes": both.bytes}
        )
    fingerprint = hashlib.sha256(json.dumps([digests, split]).encode()).hexdigest()[:32]
    info = info | {"sources": described, "split": split, "fingerprint": fingerprint}
    return PackedCorpus(train, validation, tokenizer, info)


def _part(
    source: dict[str, Any], part: str, paths: Sequence[Path], shards: Sequence[Any], dtype: Any
) -> PackedSource:
    """What the shards of a source hold to train on, or what they hold out."""
    sizes = [shard[part]["tokens"] for shard in shards]
    stream = Stream([path.with_name(f"{path.name}.{part}") for path in paths], sizes, dtype)
    size = sum(shard[part]["bytes"] for shard in shards)
    predicted = sum(sizes) - sum(shard[part]["documents"] for shard in shards)
    return PackedSource(source["name"], stream, source["weight"], predicted, size)
