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
from jaxkern.lm.data.sources import File, NotTextError, Source
from jaxkern.lm.data.tokenizer import FILE, Bytes, Tokenizer, dtype_of
from jaxkern.lm.stop import say

PARTS = ("train", "validation")
WRITTEN = "written.json"
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
        none = lambda: {part: {"tokens": 0, "documents": 0, "bytes": 0} for part in PARTS}
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
    """Append to the files of a source what is not `written` yet, and say so there."""
    dtype = np.dtype(dtype_of(tokenizer.size))
    with contextlib.ExitStack() as opened:
        files = {}
        for part, counts in ((part, written[part]) for part in PARTS):
            for kind, size in (
                ("tokens", counts["tokens"] * dtype.itemsize),
                ("starts", counts["documents"] * 8),
            ):
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
            encoded = tokenizer.encode([text for text, *_ in batch])
            for (text, part, first, last, _), ids in zip(batch, encoded, strict=True):
                counts = written[part]
                if first:
                    files[part, "starts"].write(np.int64(counts["tokens"]).tobytes())
                    counts["documents"] += 1
                edges = [tokenizer.begin] * first, [tokenizer.end] * last
                whole = np.concatenate([edges[0], ids, edges[1]]).astype(dtype)
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
        with named(file):
            for number, (text, last, read) in enumerate(file.parts() if i >= done[0] else (), 1):
                if of_bytes and "\0" in text:
                    raise NotTextError(
                        f"has a zero byte behind {text.partition('\0')[0][-20:]!r}, which ends a "
                        "document of bytes (to a tokenizer, as of --tokenizer bpe:32000, it is a "
                        "character like others)"
                    )
                first, of = not of, of or PARTS[_fraction(text[:_HEAD]) < source.held_out]
                if [i, number] > done:
                    yield text, of, first, last, [i, number]
                of = "" if last else of
                bar.update(before + read - bar.n)
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
