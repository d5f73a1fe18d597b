"""Documents -> tokens on disk, from where a process that was stopped or killed left them.

Source i has in the folder, beside written.json, which says how far all of them are written:

    i.train.tokens        the documents to train on, one after another
    i.train.starts        where each of them begins, int64
    i.validation.…        the same of those that are held out, by a hash of how they begin

All cores tokenise: the threads are those of `tokenizers`.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkern.lm.config import RunError
from jaxkern.lm.data.files import write_atomically
from jaxkern.lm.data.sources import File, NotTextError, Source
from jaxkern.lm.data.tokenizer import FILE, Bytes, Tokenizer, dtype_of
from jaxkern.lm.stop import say

PARTS = ("train", "validation")
WRITTEN = "written.json"
_MOST_HELD_OUT = 0.25  # of the tokens, by whole documents
_AT_ONCE = 1 << 22  # characters that are tokenised at once
_HEAD = 1 << 16  # characters by which a document is held out or not
_SAVE = 5.0  # seconds of work that a kill may cost


def tokenise(
    folder: Path, found: Sequence[Source], tokenizer: Bytes | Tokenizer
) -> list[dict[str, Any]]:
    """Write the tokens of all sources; a second process waits until the first has.

    Returns:
      Of each source how its documents are "split", "by document", "by position" or "by source", and
      of each part how many "tokens", "documents" and "bytes" of text it holds.

    Raises:
      RunError: a file cannot be read.
    """
    from tqdm import tqdm

    path = folder / WRITTEN
    with _held(folder):
        if isinstance(tokenizer, Tokenizer):
            write_atomically(folder / FILE, tokenizer.stored())
        written = json.loads(path.read_text()) if path.exists() else []
        left = [i for i in range(len(found)) if i >= len(written) or not written[i]["split"]]
        total = sum(file.path.stat().st_size for i in left for file in found[i].files)
        form = "tokenise {percentage:3.0f}% {bar} {n_fmt}B/{total_fmt}B · {remaining} left"
        every = 0.5 if sys.stderr.isatty() else 30
        options = {"unit_scale": True, "leave": False, "delay": 1, "mininterval": every}
        with tqdm(total=total, bar_format=form, dynamic_ncols=True, **options) as bar:
            for i in left:
                if i == len(written):
                    none = {part: {"tokens": 0, "documents": 0, "bytes": 0} for part in PARTS}
                    written.append({"split": "", "file": 0, "part": 0} | none)
                save = lambda: write_atomically(path, json.dumps(written) + "\n")
                _write_source(folder / str(i), found[i], tokenizer, written[i], save, bar)
                written[i]["split"] = _split(folder / str(i), found[i].held_out, written[i])
                save()
    return written


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
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


def _write_source(
    path: Path,
    source: Source,
    tokenizer: Bytes | Tokenizer,
    written: dict[str, Any],
    save: Any,
    bar: Any,
) -> None:
    """Append to the files of a source what is not `written` yet, and tell it there."""
    dtype = dtype_of(tokenizer.size)
    with contextlib.ExitStack() as opened:
        writers = {}
        for part in PARTS:
            tokens = opened.enter_context(open(f"{path}.{part}.tokens", "ab"))
            starts = opened.enter_context(open(f"{path}.{part}.starts", "ab"))
            writers[part] = _Writer(tokens, starts, written[part], dtype)
        size, saved = 0, time.monotonic()
        waiting: list[tuple[str, str, bool, bool]] = []

        def flush(file: int, part: int) -> None:
            texts = [text for _, text, _, _ in waiting]
            for each, tokens in zip(waiting, tokenizer.encode(texts), strict=True):
                to, text, first, last = each
                begin, end = tokenizer.begin if first else None, tokenizer.end if last else None
                writers[to].append(tokens, text, begin, end)
            waiting.clear()
            written["file"], written["part"] = file, part

        bytes_alone = isinstance(tokenizer, Bytes)
        for file, part, to, text, first, last in _texts(source, written, bar, bytes_alone):
            waiting.append((to, text, first, last))
            size += len(text)
            if size >= _AT_ONCE:
                flush(file, part)
                size = 0
                if time.monotonic() - saved > _SAVE:
                    for writer in writers.values():
                        writer.sync()
                    save()
                    saved = time.monotonic()
        flush(len(source.files), 0)
        for writer in writers.values():
            writer.sync()


def _texts(
    source: Source, written: dict[str, Any], bar: Any, bytes_alone: bool
) -> Iterator[tuple[int, int, str, str, bool, bool]]:
    """Yields the documents of a source in parts, but for those that are written.

    Each part comes as its file, how many parts of that are done with it, where its document
    belongs, its text, and whether it begins and whether it ends the document.
    """
    first_file, first_part = written["file"], written["part"]
    for i, file in enumerate(source.files):
        before, belongs = bar.n, ""
        if i >= first_file:
            tell = lambda at, before=before: bar.update(before + at - bar.n)
            with named(file):
                for j, (text, last) in enumerate(file.parts(tell), 1):
                    if bytes_alone and (at := text.find("\0")) >= 0:
                        raise NotTextError(
                            f"has a zero byte behind {text[:at][-20:]!r}, which ends a document of "
                            "bytes (to a tokenizer, as of --tokenizer bpe:32000, it is a character "
                            "like others)"
                        )
                    first = not belongs
                    belongs = belongs or PARTS[_fraction(text[:_HEAD]) < source.held_out]
                    if i > first_file or j > first_part:
                        yield i, j, belongs, text, first, last
                    belongs = "" if last else belongs
        bar.update(before + file.path.stat().st_size - bar.n)


@contextlib.contextmanager
def named(file: File) -> Iterator[None]:
    """Inside, a file that cannot be read is a RunError."""
    try:
        yield
    except NotTextError as error:
        raise RunError(
            f"{file.path}: {error}; mend it or leave it out, and run the same command again"
        ) from None


def _fraction(text: str) -> float:
    """Hashes a text to a number from 0 to 1, which decides whether its document is held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Writer:
    """The files of a source's documents to train on, or of those held out.

    Args:
      tokens, starts: the files.
      counts: what they hold; what is behind it there a process has left that was killed.
      dtype: of the tokens.
    """

    def __init__(self, tokens: Any, starts: Any, counts: dict[str, int], dtype: Any):
        self._tokens, self._starts, self._counts, self._dtype = tokens, starts, counts, dtype
        self._tokens.truncate(counts["tokens"] * np.dtype(dtype).itemsize)
        self._starts.truncate(counts["documents"] * 8)

    def append(self, tokens: np.ndarray, text: str, begin: int | None, end: int | None) -> None:
        """Append a part of a document, between what begins and what ends it, if it does."""
        if begin is not None:
            self._starts.write(np.int64(self._counts["tokens"]).tobytes())
            self._counts["documents"] += 1
        before, behind = ([] if edge is None else [edge] for edge in (begin, end))
        content = np.concatenate([before, tokens, behind]).astype(self._dtype)
        self._tokens.write(content.tobytes())
        self._counts["tokens"] += len(content)
        self._counts["bytes"] += len(text.encode())

    def sync(self) -> None:
        for file in (self._tokens, self._starts):
            file.flush()
            os.fsync(file.fileno())


def _split(path: Path, held_out: float, written: dict[str, Any]) -> str:
    """Tell how documents are split; where whole ones cannot be, all go to those to train on."""
    if held_out in (0, 1):
        return "by source"
    train, held = (written[part] for part in PARTS)
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
