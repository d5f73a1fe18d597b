"""The tokens of documents on disk, and the batches of windows that grain draws from them.

Documents are tokenised once, into a folder below --data-cache or the run's own whose name is a
digest of the files and the tokenizer. A process that was stopped or killed leaves there what the
next one goes on from. Source i has in it, beside written.json, which says how far all are written:

    i.train.tokens        the documents to train on, one after another
    i.train.starts        where each of them begins, int64
    i.validation.…        the same of those that are held out, by a hash of how they begin

Window j of a source has its tokens j·L to j·L + L: the last token of a window is the first of the
next, so that each is predicted once in an epoch. In packed windows a segment ends where a document
does, and what is missing of the last one is padding of one segment a token, of which none is
predicted. Without segments the last window begins early enough to be full.

Batch n is a function of the tokens, the seed and n: grain shuffles the windows of each epoch anew,
and the state of its iterator is the number of the next batch.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from jaxkern.lm import tokenizer as tokenizers
from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.sources import File, NotTextError, Source, describe_skipped, find
from jaxkern.lm.stop import say
from jaxkern.lm.tokenizer import Bytes, Tokenizer, dtype_of

VALIDATION_FRACTION = 0.05
_PARTS = ("train", "validation")
_WRITTEN = "written.json"
_FORMAT = 3  # of what a key names: raised where the same files give other tokens
_SAMPLE = 1 << 27  # characters that a BPE is trained on
_MOST_HELD_OUT = 0.25  # of the tokens, by whole documents
_AT_ONCE = 1 << 22  # characters that are tokenised at once
_HEAD = 1 << 16  # characters by which a document is held out or not
_SAVE = 5.0  # seconds of work that a kill may cost


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(path: Path, when_held: Callable[[], None]) -> Iterator[IO[str]]:
    """Hold the lock of a file, which is emptied; where another process has it, say so and wait."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_held()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield file


class Packed(NamedTuple):
    """A batch of windows; without segments documents are not packed."""

    tokens: Any  # (..., L + 1)
    segment_ids: Any = None  # (..., L + 1), int32; a document ends where the number changes


@dataclasses.dataclass(frozen=True)
class Stream:
    """The documents of a source, one after another: those to train on, or those held out."""

    name: str  # in reports
    tokens: np.ndarray  # of all documents, mapped
    starts: np.ndarray  # of each
    share: float  # of all sources, by weight or by size
    tokens_per_byte: float  # the factor from a loss of tokens to one of bytes


class Windows:
    """The windows (L + 1) of a stream, as grain reads them; those beyond the last are padding."""

    def __init__(self, stream: Stream, config: TrainConfig):
        self._stream, self._seq_len, self._packed = stream, config.seq_len, config.pack
        self._dtype = dtype_of(config.model.vocab_size)

    def __len__(self) -> int:
        return -(-(len(self._stream.tokens) - 1) // self._seq_len)

    def __getitem__(self, index: Any) -> Packed:
        tokens, starts = self._stream.tokens, self._stream.starts
        size, begin = self._seq_len + 1, int(index) * self._seq_len
        if not self._packed:
            begin = min(begin, len(tokens) - size)
            return Packed(tokens[begin : begin + size].astype(self._dtype))
        content = tokens[begin : begin + size]
        window, first = np.zeros(size, self._dtype), np.zeros(size, np.int32)  # of a segment
        window[: len(content)] = content
        inside = slice(*np.searchsorted(starts, (begin, begin + len(content))))
        first[starts[inside] - begin] = 1
        first[len(content) :] = 1
        return Packed(window, np.cumsum(first, dtype=np.int32))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenised documents, in sources."""

    train: list[Stream]
    held_out: list[Stream]
    tokenizer: Bytes | Tokenizer
    info: dict[str, Any]  # what the run's record keeps of them, as JSON has it

    def describe(self) -> str:
        """Say in a line what it holds."""
        sources = self.info["sources"]
        documents = sum(source[part]["documents"] for source in sources for part in _PARTS)
        train, held_out = (sum(len(s.tokens) for s in part) for part in (self.train, self.held_out))
        text = f"{documents:,} document{'s' * (documents != 1)}: {train:,} tokens to train on, "
        text += f"{held_out:,} held out; {1 / self.tokens_per_byte:.2f} bytes per token"
        examples = [source["example"] for source in sources if source["skipped"]]
        return text + describe_skipped(sum(s["skipped"] for s in sources), [*examples, ""][0])

    @property
    def tokens_per_byte(self) -> float:
        """The factor from a loss of its tokens to one of bytes."""
        return tokens_per_byte(self.train)

    def batches(self, config: TrainConfig) -> Any:
        """grain's endless iterator of `Packed` (B, L + 1); its state is the next one's number."""
        import grain  # takes a second

        sets = [grain.MapDataset.source(Windows(stream, config)) for stream in self.train]
        if self.info["sources"][0]["weight"] is None:  # all windows are one pool
            drawn = grain.MapDataset.concatenate(sets).shuffle(config.seed).repeat()
        else:
            seeds = np.random.SeedSequence(config.seed).generate_state(len(sets)).tolist()
            each = [one.shuffle(seed).repeat() for one, seed in zip(sets, seeds, strict=True)]
            # grain cuts weights to hundredths of the least one: rounded, these stay what they are.
            least = min(stream.share for stream in self.train)
            weights = [round(100 * stream.share / least) for stream in self.train]
            drawn = grain.MapDataset.mix(each, weights)
        batches = drawn.batch(config.batch_size)
        # Two threads make eight batches beforehand, while a disk is waited for.
        return iter(batches.to_iter_dataset(grain.ReadOptions(2, 8)))

    def validation(self, config: TrainConfig) -> list[tuple[Stream, list[Packed]]]:
        """Each source with up to its part of --eval-batches fixed batches, spread evenly over it.

        They have as many rows (B/K, L + 1) as a part of a batch to train on.
        """
        rows = config.batch_size // config.grad_accum
        most = max(1, config.eval_batches * config.grad_accum // len(self.held_out))
        found = []
        for stream in self.held_out:
            windows = Windows(stream, config)
            count = rows * max(1, min(most, len(windows) // rows))
            chosen = np.linspace(0, len(windows) - 1, count).astype(int)
            if config.pack and count > len(windows):  # those beyond predict nothing
                chosen = np.arange(count)
            of_batch = ([windows[i] for i in part] for part in chosen.reshape(-1, rows))
            stack = lambda *leaves: np.stack(leaves)
            found.append((stream, [jax.tree.map(stack, *each) for each in of_batch]))
        return found


def tokens_per_byte(streams: Sequence[Stream]) -> float:
    """The factor from a loss of tokens to one of bytes, of sources drawn by their shares."""
    return 1 / sum(stream.share / stream.tokens_per_byte for stream in streams)


def predicted(batch: Packed) -> int:
    """Number of tokens of a batch that are predicted: all but the first of each segment."""
    tokens, segments = batch
    if segments is None:
        return tokens[..., 1:].size
    return int(np.count_nonzero(segments[..., 1:] == segments[..., :-1]))


def put(tree: Any, sharding: Any) -> Any:
    """Bring arrays to the devices; every process has the whole arrays, and gives its own rows."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    of_process = lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)
    return jax.tree.map(of_process, tree)


# Tokens on disk


def build(config: TrainConfig, out: Path) -> Corpus:
    """Tokenise the documents of a run, but for what is there already."""
    found, shared = _found(config), _folder(config, out)
    shared.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=shared).close()  # what cannot be written to is told now
    tokenizer = _tokenizer(config.tokenizer, found, shared)
    identities = [[each.held_out, _identity(each.files)] for each in found]
    key = _digest([tokenizer.stored(), tokenizer.begin, tokenizer.end, identities])
    folder = shared / key
    if config.data_cache is None:
        for other in set(shared.glob("[0-9a-f]" * 16)) - {folder}:  # of a run that never began
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for each, counts in zip(found, _tokenise(folder, found, tokenizer), strict=True):
        of = {"name": _name(each, found), "weight": each.weight}
        of |= {"skipped": len(each.skipped), "example": next(iter(each.skipped), "")}
        sources.append(of | counts)
    stored = {"begin": tokenizer.begin, "end": tokenizer.end, "size": tokenizer.size}
    info = {"folder": key, "tokenizer": stored, "sources": sources}
    corpus = _opened(config, folder, info, tokenizer)
    _check_length(config, corpus)
    return corpus


def reopen(config: TrainConfig, out: Path, info: dict[str, Any]) -> Corpus:
    """Open the tokens of a run that is resumed, or that another process made, by their `info`."""
    folder = _folder(config, out) / str(info.get("folder"))
    try:
        (folder / _WRITTEN).stat()  # first: of a tokenizer that is missing other words are said
        return _opened(config, folder, info, open_tokenizer(config.tokenizer, folder, info))
    except (KeyError, TypeError, ValueError, OSError):
        what = f"the tokens in {folder} are missing or have changed since the run began"
        remedy = "name what holds them, on several hosts for all of them, with --data-cache"
        raise RunError(f"{what}; {remedy}") from None


def open_tokenizer(spec: str, out: Path, info: dict[str, Any]) -> Bytes | Tokenizer:
    """The tokenizer that a run, or its tokens, have in their folder; `info` is the corpus's."""
    return Bytes() if spec == "bytes" else tokenizers.load(out / tokenizers.FILE, info["tokenizer"])


def has_tokens(out: Path) -> bool:
    """Whether a run's own folder holds tokens that cost time to make, as bytes do not."""
    return any(out.glob(f"corpus/*/{tokenizers.FILE}"))


def _folder(config: TrainConfig, out: Path) -> Path:
    return out / "corpus" if config.data_cache is None else Path(config.data_cache)


def _found(config: TrainConfig) -> list[Source]:
    """The documents that a run names, each once.

    A file of --eval-data is not trained on, whatever its field: another may hold the same text.
    Without segments all documents are one source, but where weights tell several apart.
    """
    if config.eval_data:
        validation = find(config.eval_data, "--eval-data", held_out=1)
        left_out = {file.path.resolve() for each in validation for file in each.files}
        return find(config.data, "--data", held_out=0, left_out=left_out) + validation
    found = find(config.data, "--data", held_out=VALIDATION_FRACTION)
    if config.pack or found[0].weight is not None:
        return found
    files = tuple(file for each in found for file in each.files)
    skipped = tuple(reason for each in found for reason in each.skipped)
    return [dataclasses.replace(found[0], files=files, skipped=skipped)]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, content]).encode()).hexdigest()[:16]


def _identity(files: Sequence[File]) -> list[Any]:
    """An identity of files, as far as it can be had without reading them."""
    stats = [(file, file.path.stat()) for file in files]
    return [[str(f.path.resolve()), f.field, s.st_size, s.st_mtime_ns] for f, s in stats]


def _name(source: Source, others: Sequence[Source]) -> str:
    """The name of a source in reports: the end of its path, or all of it where others end alike."""
    end = lambda source: os.path.basename(source.path.rstrip("/")) or "standard library"
    same = [each for each in others if (end(each), each.held_out) == (end(source), source.held_out)]
    if len(same) == 1 and "*" not in end(source):
        return end(source)
    return source.path + f":{source.field}" * (source.field != "text")


def _tokenizer(spec: str, found: Sequence[Source], shared: Path) -> Bytes | Tokenizer:
    """The tokenizer that is asked for; a BPE is trained on --data unless it was already."""
    kind = tokenizers.kind_of(spec)
    if kind is None:
        return Bytes()
    if isinstance(kind, str):
        return tokenizers.load(kind)
    files = [file for each in found if each.held_out < 1 for file in each.files]
    path = shared / f"bpe-{kind}-{_digest(_identity(files))}.json"
    if not path.exists():
        say(f"training a byte-level BPE of {kind:,} tokens …")
        trained = tokenizers.train_bpe(_sample(files), kind, show=sys.stderr.isatty())
        write_atomically(path, trained.stored())
    return tokenizers.load(path)


def _sample(files: Sequence[File]) -> Iterator[str]:
    """The beginnings of all files, of `_SAMPLE` characters where the data has as many."""
    left = _SAMPLE
    for i, file in enumerate(sorted(files, key=lambda file: file.path.stat().st_size)):
        share = left // (len(files) - i)  # what small files leave is for the larger ones
        with _named(file):
            for text, *_ in file.parts():
                yield text[:share]
                size = min(len(text), share)
                left, share = left - size, share - size
                if not share:
                    break


def _opened(
    config: TrainConfig, folder: Path, info: dict[str, Any], tokenizer: Bytes | Tokenizer
) -> Corpus:
    """The corpus of tokens that are there; OSError or ValueError where they are not, or not all."""

    def mapped(name: str, size: int, dtype: Any) -> np.ndarray:
        # An empty file cannot be mapped.
        return np.memmap(folder / name, dtype, "r", shape=size) if size else np.zeros(0, dtype)

    of_parts: tuple[list[Stream], list[Stream]] = [], []
    for i, source in enumerate(info["sources"]):
        parts = [
            (
                mapped(f"{i}.{part}.tokens", source[part]["tokens"], dtype_of(tokenizer.size)),
                mapped(f"{i}.{part}.starts", source[part]["documents"], np.int64),
            )
            for part in _PARTS
        ]
        if (size := sum(len(tokens) for tokens, _ in parts)) < 4:
            raise RunError(f"the source {source['name']} has {size} tokens; give more text")
        counts = [source[part] for part in _PARTS]
        if source["split"] == "by position":
            (tokens, starts), cut = parts[0], size - max(2, int(size * VALIDATION_FRACTION))
            k = int(np.searchsorted(starts, cut))
            parts = [(tokens[:cut], starts[:k]), (tokens[cut:], starts[k:] - cut)]
            counts = [counts[0]] * 2
        for streams, (tokens, starts), count in zip(of_parts, parts, counts, strict=True):
            if len(tokens):
                of_text = count["tokens"] - (count["documents"] if config.pack else 0)
                share = source["weight"] or len(tokens)
                ratio = of_text / count["bytes"]
                streams.append(Stream(source["name"], tokens, starts, share, ratio))
    train, held_out = (
        [dataclasses.replace(s, share=s.share / sum(t.share for t in part)) for s in part]
        for part in of_parts
    )
    return Corpus(train, held_out, tokenizer, info)


def _check_length(config: TrainConfig, corpus: Corpus) -> None:
    """Refuse documents that fill no sequence, and warn of a source that does not.

    What is missing is padding, which costs as much as tokens do; without segments there is none.
    """
    length, parts = config.seq_len, {"training": corpus.train}
    needed = f"the {length + 1:,} that --seq-len {length} needs"
    if not config.pack:
        parts["validation"] = corpus.held_out
    for part, streams in parts.items():
        if (size := max(len(stream.tokens) for stream in streams)) <= length:
            what = f"the {part} data has {size:,} tokens, fewer than {needed}"
            raise RunError(f"{what}; lower --seq-len or give more text to --data")
    if short := [stream.name for stream in corpus.train if len(stream.tokens) <= length]:
        told = f"{len(short)} of {len(corpus.train)} sources of --data, such as {short[0]}"
        say(f"warning: {told}, have fewer tokens than {needed}, and padding takes the rest")


# How they are written; all cores tokenise, by the threads of `tokenizers`


def _tokenise(
    folder: Path, found: Sequence[Source], tokenizer: Bytes | Tokenizer
) -> list[dict[str, Any]]:
    """Write the tokens of all sources; a second process waits until the first has.

    Of each source it tells how documents are "split", "by document", "by position" or "by source",
    and of each part how many "tokens", "documents" and "bytes" of text it holds.
    """
    from tqdm import tqdm

    path = folder / _WRITTEN
    waiting = f"waiting for another process that tokenises the same data into {folder} …"
    with locked(folder / ".lock", lambda: say(waiting)):
        if isinstance(tokenizer, Tokenizer):
            write_atomically(folder / tokenizers.FILE, tokenizer.stored())
        none = lambda: {part: {"tokens": 0, "documents": 0, "bytes": 0} for part in _PARTS}
        written = [{"split": "", "done": [0, 0]} | none() for _ in found]
        if path.exists():
            written = json.loads(path.read_text())
        left = [i for i, of in enumerate(written) if not of["split"]]
        total = sum(file.path.stat().st_size for i in left for file in found[i].files)
        save = lambda: write_atomically(path, json.dumps(written) + "\n")
        form = "tokenise {percentage:3.0f}% {bar} {n_fmt}B/{total_fmt}B · {remaining} left"
        every = 0.5 if sys.stderr.isatty() else 30
        options = {"unit_scale": True, "leave": False, "delay": 1, "mininterval": every}
        with tqdm(total=total, bar_format=form, dynamic_ncols=True, **options) as bar:
            for i in left:
                _write_source(folder / str(i), found[i], tokenizer, written[i], save, bar)
                written[i]["split"] = _split(folder / str(i), found[i].held_out, written[i])
                save()
    return written


def _write_source(
    path: Path, source: Source, tokenizer: Any, written: dict[str, Any], save: Any, bar: Any
) -> None:
    """Append to the files of a source what is not `written` yet, and say so there."""
    dtype = np.dtype(dtype_of(tokenizer.size))
    with contextlib.ExitStack() as opened:
        files = {}
        for part in _PARTS:
            counts = written[part]
            sizes = {"tokens": counts["tokens"] * dtype.itemsize, "starts": counts["documents"] * 8}
            for kind, size in sizes.items():
                file = opened.enter_context(open(f"{path}.{part}.{kind}", "ab"))
                file.truncate(size)  # what is behind that a process has left that was killed
                files[part, kind] = file

        def sync() -> None:
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())

        saved = time.monotonic()
        texts = _texts(source, written["done"], bar, of_bytes=isinstance(tokenizer, Bytes))
        while batch := [*_of_size(texts)]:
            encoded = tokenizer.encode_batch([text for text, *_ in batch])
            for (text, part, first, last, _), ids in zip(batch, encoded, strict=True):
                counts = written[part]
                if first:
                    files[part, "starts"].write(np.int64(counts["tokens"]).tobytes())
                    counts["documents"] += 1
                begin, end = [tokenizer.begin] * first, [tokenizer.end] * last
                whole = np.concatenate([begin, ids, end]).astype(dtype)
                files[part, "tokens"].write(whole.tobytes())
                counts["tokens"] += len(whole)
                counts["bytes"] += len(text.encode())
            written["done"] = batch[-1][-1]
            if time.monotonic() - saved > _SAVE:
                sync()
                save()
                saved = time.monotonic()
        written["done"] = [len(source.files), 0]
        sync()


def _of_size(texts: Iterator[tuple]) -> Iterator[tuple]:
    """The next texts, of `_AT_ONCE` characters."""
    size = 0
    while size < _AT_ONCE and (text := next(texts, None)):
        size += len(text[0])
        yield text


def _texts(
    source: Source, done: list[int], bar: Any, *, of_bytes: bool
) -> Iterator[tuple[str, str, bool, bool, list[int]]]:
    """Yields the documents of a source in parts, but for those up to the file and part `done`.

    Each part comes as its text, where its document belongs, whether it begins and whether it ends
    that, and the numbers of its file and of itself there.
    """
    for i, file in enumerate(source.files):
        before, of = bar.n, ""
        with _named(file):
            for number, (text, last, read) in enumerate(file.parts() if i >= done[0] else (), 1):
                if of_bytes and "\0" in text:
                    where = f"has a zero byte behind {text.partition('\0')[0][-20:]!r}"
                    raise NotTextError(f"{where}, which of bytes ends a document")
                first, of = not of, of or _PARTS[_fraction(text[:_HEAD]) < source.held_out]
                if [i, number] > done:
                    yield text, of, first, last, [i, number]
                of = "" if last else of
                bar.update(before + read - bar.n)
        bar.update(before + file.path.stat().st_size - bar.n)


@contextlib.contextmanager
def _named(file: File) -> Iterator[None]:
    """Inside, a file that cannot be read is a RunError."""
    try:
        yield
    except NotTextError as error:
        what = f"{file.path}: {error}"
        raise RunError(f"{what}; mend it or leave it out, and run the same command again") from None


def _fraction(text: str) -> float:
    """Hashes a text to a number from 0 to 1, which decides whether its document is held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _split(path: Path, held_out: float, written: dict[str, Any]) -> str:
    """Tell how documents are split; where whole ones cannot be, all go to those to train on."""
    if held_out in (0, 1):
        return "by source"
    train, held = (written[part] for part in _PARTS)
    size = train["tokens"] + held["tokens"]
    if train["tokens"] and 0 < held["tokens"] <= _MOST_HELD_OUT * size:
        return "by document"
    starts = np.fromfile(f"{path}.validation.starts", np.int64) + train["tokens"]
    with open(f"{path}.train.starts", "ab") as file:
        file.write(starts.tobytes())
    with open(f"{path}.train.tokens", "ab") as to, open(f"{path}.validation.tokens", "rb") as file:
        shutil.copyfileobj(file, to)
    for name in train:
        train[name], held[name] = train[name] + held[name], 0
    return "by position"
