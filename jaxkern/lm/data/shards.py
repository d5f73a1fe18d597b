"""Documents -> tokens on disk, in shards that several processes write.

A shard holds the tokens of some files, or of a part of a large one:

    00012.train.tokens       those to train on, one document after another
    00012.train.starts       where the documents begin, int64
    00012.validation.…       the same of those that are held out
    00012.json               how many of each, and a digest; written last: it makes the shard whole

After a kill the shards that are whole are kept, and the others written again. A document is held
out by a hash of its text, so that the split depends neither on names nor on the number of shards,
and two copies of one text are on the same side.
"""

import codecs
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkern.lm import stop
from jaxkern.lm.config import RunError
from jaxkern.lm.data.documents import ZERO_BYTE, File, NotTextError
from jaxkern.lm.data.files import write_atomically
from jaxkern.lm.data.pieces import Piece
from jaxkern.lm.data.tokenizer import Bytes, Tokenizer, dtype_of, load

PARTS = ("train", "validation")
_PROCESS_BYTES = 4 << 20  # for which another process, which starts in seconds, is worth it
_TEXT = 1 << 20  # characters that are tokenised at once, and at most of a document


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the documents, which one process tokenises.

    Attributes:
      path: of its files, without what tells them apart.
      pieces: what it holds the documents of.
      held_out: which share of them is for validation.
    """

    path: Path
    pieces: tuple[Piece, ...]
    held_out: float

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def whole(self) -> dict[str, Any] | None:
        """What it holds, or ``None`` if it is not written yet."""
        return read_shard(self.path)


def read_shard(path: Path) -> dict[str, Any] | None:
    """What a shard holds by its .json; ``None`` if that, or the size of another file, is wrong."""
    try:
        content = json.loads(path.with_name(path.name + ".json").read_text(encoding="utf-8"))
        for part in PARTS:
            held, width = content[part], content["width"]
            sizes = {"tokens": held["tokens"] * width, "starts": held["documents"] * 8}
            for kind, size in sizes.items():
                if path.with_name(f"{path.name}.{part}.{kind}").stat().st_size != size:
                    return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content


def tokenise(shards: Sequence[Shard], tokenizer: Bytes | Tokenizer, stored: Path) -> None:
    """Write the shards that are not whole yet, by as many processes as there are cores.

    Args:
        shards: all that are to be there.
        tokenizer: of their documents.
        stored: its tokenizer.json, for the other processes; does not exist for bytes.

    Raises:
        RunError: a file cannot be read, or a process was killed.
    """
    missing = [shard for shard in shards if shard.whole() is None]
    if not missing:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, left = (sum(shard.size for shard in each) for each in (shards, missing))
    workers = min(len(missing), cores or 1, 1 + left // _PROCESS_BYTES)
    with contextlib.closing(_Bar(total, total - left)) as bar:
        if workers == 1:
            for shard in missing:
                write_shard(shard, tokenizer, bar.add)
            return
        tokens = (tokenizer.begin, tokenizer.end)
        start = (os.getpid(), None if isinstance(tokenizer, Bytes) else stored, tokens)
        spawned = multiprocessing.get_context("spawn")
        done = spawned.Value("q", 0)  # bytes, of all processes
        others = multiprocessing.active_children()
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, spawned, _begin_worker, (*start, max(1, (cores or 1) // workers), done)
        )
        try:
            with _without_interrupts():
                waiting = {pool.submit(_write_in_worker, shard) for shard in missing}
            told = 0
            while waiting:
                written, waiting = concurrent.futures.wait(
                    waiting, _TICK, concurrent.futures.FIRST_COMPLETED
                )
                for future in written:
                    future.result()
                # Without the lock, which a process that is killed may hold.
                so_far = done.get_obj().value
                if so_far > told:
                    bar.add(so_far - told)
                told = so_far
        except concurrent.futures.process.BrokenProcessPool:
            raise RunError(
                "a process that tokenises was killed, perhaps for want of memory; run the same "
                "command again, which keeps what is done"
            ) from None
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started inside leave Ctrl-C to their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# A process of the pool has a tokenizer, and the bytes that all processes have done.
_tokenizer: Bytes | Tokenizer = Bytes()
_done: Any = None


def _begin_worker(
    parent: int, stored: Path | None, tokens: tuple[int, int], threads: int, done: Any
) -> None:
    """Prepares a process, which ends when its parent does."""
    global _tokenizer, _done
    _done = done
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of tokenizers

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if stored is not None:
        _tokenizer = load(stored, {"begin": tokens[0], "end": tokens[1]})


def _write_in_worker(shard: Shard) -> None:
    write_shard(shard, _tokenizer, _tell)


def _tell(size: int) -> None:
    with _done.get_lock():
        _done.value += size


def write_shard(shard: Shard, tokenizer: Bytes | Tokenizer, tell: Callable[[int], object]) -> None:
    """Tokenise the documents of a shard, and write its files.

    Args:
        shard: to write.
        tokenizer: of its documents.
        tell: called with the bytes that are done since the last call, `shard.size` in all.
    """
    dtype = dtype_of(tokenizer.size)
    with contextlib.ExitStack() as files:
        parts = [files.enter_context(_Part(shard.path, part, dtype)) for part in PARTS]
        waiting: list[tuple[_Part, str, bool, bool]] = []
        size = 0
        for each in _texts(shard, parts, tell, bytes_alone=isinstance(tokenizer, Bytes)):
            waiting.append(each)
            size += len(each[1])
            if size >= _TEXT:
                _write(waiting, tokenizer)
                waiting, size = [], 0
        _write(waiting, tokenizer)
    content = {
        **{part.name: part.held() for part in parts},
        "width": np.dtype(dtype).itemsize,
        "digest": hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest(),
    }
    write_atomically(shard.path.with_name(shard.path.name + ".json"), json.dumps(content) + "\n")


class _Part:
    """The two files of a shard's documents that are trained on, or that are held out."""

    def __init__(self, path: Path, name: str, dtype: Any):
        self.name = name
        self._path = path.with_name(f"{path.name}.{name}")
        self._dtype = dtype
        self._starts: list[int] = []
        self._tokens = self._bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> "_Part":
        self._file = open(f"{self._path}.tokens", "wb")
        return self

    def __exit__(self, *error: object) -> None:
        starts = np.array(self._starts, np.int64).tobytes()
        self._digest.update(starts)
        with self._file as tokens, open(f"{self._path}.starts", "wb") as file:
            file.write(starts)
            for each in (tokens, file):
                each.flush()
                os.fsync(each.fileno())

    def begin(self) -> None:
        self._starts.append(self._tokens)

    def write(self, tokens: Sequence[int] | np.ndarray, size: int = 0) -> None:
        """Append tokens, of `size` bytes of text."""
        content = np.asarray(tokens).astype(self._dtype).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self._tokens += len(tokens)
        self._bytes += size

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def held(self) -> dict[str, int]:
        """Counts tokens, documents and bytes of text."""
        return {
            "tokens": self._tokens,
            "documents": len(self._starts),
            "bytes": self._bytes,
        }


def _write(waiting: list[tuple[_Part, str, bool, bool]], tokenizer: Bytes | Tokenizer) -> None:
    """Tokenise texts at once, and write each to its part."""
    encoded = tokenizer.encode([text for _, text, _, _ in waiting])
    for (part, text, first, last), tokens in zip(waiting, encoded, strict=True):
        if first:
            part.begin()
            part.write([tokenizer.begin])
        part.write(tokens, len(text.encode()))
        if last:
            part.write([tokenizer.end])


def _texts(
    shard: Shard, parts: Sequence[_Part], tell: Callable[[int], object], *, bytes_alone: bool
) -> Iterator[tuple[_Part, str, bool, bool]]:
    """The documents in texts of at most `_TEXT` characters, each with whether it is the first and
    whether it is the last of its document.

    Long documents are cut before a space between two words, where tokenizers cut them, too. Of
    `bytes_alone` the zero byte is what ends a document, and so none may have it.
    """
    train, validation = parts
    part_of = lambda head: validation if _fraction(head) < shard.held_out else train
    for piece in shard.pieces:
        progress = _Progress(piece, tell)
        texts = _piece_texts(piece, part_of, progress.read)
        with _named(piece.file):
            for each in _left_open(texts) if piece.unfinished else texts:
                if bytes_alone and (at := each[1].find("\0")) >= 0:
                    raise NotTextError(
                        f"has a zero byte behind {each[1][:at][-20:]!r}, {ZERO_BYTE}"
                    )
                yield each
        progress.end()


def _piece_texts(
    piece: Piece, part_of: Callable[[str], _Part], read: Callable[[int], None]
) -> Iterator[tuple[_Part, str, bool, bool]]:
    """The texts of a part of a file; `part_of` tells by its first text where a document goes."""
    part = None if piece.start is None else part_of(_head(piece.file, piece.start))
    for document in piece.file.documents(piece.begin, piece.end, read):
        text = ""
        for more, final in _decoded(document):
            text += more
            while len(text) > _TEXT or final:
                end = _cut(text) if len(text) > _TEXT else len(text)
                first = part is None
                if part is None:
                    part = part_of(text[:end])
                last = final and end == len(text)
                yield part, text[:end], first, last
                text = text[end:]
                if last:
                    break
        part = None


def _left_open(
    texts: Iterator[tuple[_Part, str, bool, bool]],
) -> Iterator[tuple[_Part, str, bool, bool]]:
    """Texts, of which the last is not the last of its document."""
    waiting = None
    for each in texts:
        if waiting is not None:
            yield waiting
        waiting = each
    if waiting is not None:
        yield (*waiting[:3], False)


def _head(file: File, start: int) -> str:
    """The first text of a long document of a text, by which it is held out or not."""
    text = ""
    for document in file.documents(start):
        for more, _ in _decoded(document):
            text += more
            if len(text) > _TEXT:
                break
        break
    return text[: _cut(text)] if len(text) > _TEXT else text


class _Progress:
    """Tells of the bytes of a piece while its file is read, and never of more than it has."""

    def __init__(self, piece: Piece, tell: Callable[[int], object]):
        divided = piece.file.compressed and piece.end is not None
        self._readers = piece.end if divided and piece.end else 1  # each reads all of the file
        self._left = piece.size
        self._tell = tell

    def read(self, size: int) -> None:
        self._add(min(self._left, size // self._readers))

    def end(self) -> None:
        self._add(self._left)

    def _add(self, size: int) -> None:
        if size:
            self._left -= size
            self._tell(size)


def beginnings(file: File) -> Iterator[str]:
    """The text of a file's documents, in parts."""
    with _named(file):
        for document in file.documents():
            for text, _ in _decoded(document):
                yield text


@contextlib.contextmanager
def _named(file: File) -> Iterator[None]:
    """Inside, a file that cannot be read is a RunError."""
    try:
        yield
    except NotTextError as error:
        raise RunError(
            f"{file.path}: {error}; mend it or leave it out, and run the same command again"
        ) from None


def _decoded(document: Iterable[bytes]) -> Iterator[tuple[str, bool]]:
    """The parts of a document as text, each with whether it is the last."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in document:
            yield decoder.decode(chunk), False
        yield decoder.decode(b"", final=True), True
    except UnicodeDecodeError as error:
        raise NotTextError(f"is not UTF-8 text ({error.reason})") from None


def _cut(text: str) -> int:
    """Where the first `_TEXT` characters of a text, or a few less, end between two words."""
    cuts = [found.start() for found in re.finditer(r"(?<=\S)(?= \S)", text[_TEXT - 4096 : _TEXT])]
    return _TEXT - 4096 + cuts[-1] if cuts and _TEXT > 4096 else _TEXT


def _fraction(text: str) -> float:
    """Hashes a text to a number from 0 to 1, which decides whether its document is held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Bar:
    """How many bytes of files are tokenised: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, done: int):
        self._total, self._done, self._before = total, done, done
        self._began = self._told = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            form = "tokenise {percentage:3.0f}% {bar} {n_fmt}B/{total_fmt}B · {remaining} left"
            self._bar = tqdm(
                initial=done, total=total, unit_scale=True, dynamic_ncols=True, bar_format=form
            )

    def add(self, size: int) -> None:
        """Tell that `size` bytes more are done."""
        self._done += size
        now = time.monotonic()
        if self._bar is not None:
            with stop.output_may_close():
                self._bar.update(size)
        elif now - self._told > _QUIET and self._done < self._total:
            self._told = now
            done = self._done - self._before
            left = (now - self._began) / done * (self._total - self._done)
            stop.say(
                f"tokenise {self._done / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB · "
                f"{left / 60:.0f} min left"
            )

    def close(self) -> None:
        if self._bar is not None:
            with stop.output_may_close():
                self._bar.close()


_TICK = 0.5  # seconds after which the bar moves
_QUIET = 10.0  # between two lines
