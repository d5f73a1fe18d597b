"""Files of documents: what --data names, found, told from what is no text, and read as streams.

A file of text is one document, or several in a .txt that has `MARKER` between them; a file of JSON
Lines holds one in each line and a file of Parquet one in each row, in the field or column "text"
unless another is named. Text and JSON Lines may be compressed. No file needs to fit into memory:
documents come in parts, which end between two words, where tokenizers cut, too.
"""

import contextlib
import dataclasses
import glob
import gzip
import io
import json
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkern.lm.config import RunError, is_there, split_weight

MARKER = "<|endoftext|>"  # ends a document of a .txt; elsewhere it is text like any other
_COMPRESSED = {".gz", ".zst"}
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# The standard library's own tests hold much deliberately odd text.
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test"}
_CHUNK = 1 << 20  # characters of a file that are read at once
_PART = 1 << 18  # characters of a part of a document, which has less than twice as many
_ROWS = 256  # of Parquet that are read at once
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
_BEHIND = "that holds the documents behind the path, as in PATH:FIELD"


class NotTextError(Exception):
    """Why a file is no training text."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One argument of --data or --eval-data: PATH, PATH:FIELD, either followed by =WEIGHT."""

    path: str  # a file, a folder, or a pattern of them; "" for Python's standard library
    field: str = "text"  # of JSON Lines, or column of Parquet, that holds the documents
    weight: float | None = None  # the share of training windows that are drawn from it
    files: tuple["File", ...] = ()  # in a fixed order, once they are found
    skipped: tuple[str, ...] = ()  # of each file of its folders that holds no documents, why
    held_out: float = 0  # the share of its documents that are validated with


class Part(NamedTuple):
    """A part of a document, whether it ends that, and how many bytes of the file are read."""

    text: str
    last: bool
    read: int


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents, and the field or column that holds them where there are several."""

    path: Path
    field: str = "text"

    @property
    def suffix(self) -> str:
        """The suffix of its content, in lower case: of "a.txt.gz" it is ".txt"."""
        compressed = self.path.suffix.lower() in _COMPRESSED
        return Path(self.path.stem if compressed else self.path).suffix.lower()

    @property
    def pieces(self) -> "Callable[[File], Iterator[Part]] | None":
        """The function that reads its documents where they are records, of JSON or of Parquet."""
        if self.suffix in (".jsonl", ".ndjson", ".json"):
            return _json_texts
        return _table_texts if self.suffix == ".parquet" else None

    def parts(self) -> Iterator[Part]:
        """Yields the documents in parts; NotTextError if the file is not what its name says.

        Line ends at both ends of a document in a .txt are not of it.
        """
        ends = "\r\n" if self.suffix == ".txt" else ""
        text, begun = "", False
        try:
            for piece, last, read in (self.pieces or _texts)(self):
                text = text + piece if begun else (text + piece).lstrip(ends)
                while len(text) >= 2 * _PART:
                    near = text[(least := _PART - _PART // 64) : _PART]
                    cuts = [least + found.start() for found in _BETWEEN_WORDS.finditer(near)]
                    cut = [_PART, *cuts][-1]
                    yield Part(text[:cut], False, read)
                    text, begun = text[cut:], True
                if last:
                    text = text.rstrip(ends)
                    if text or begun:
                        yield Part(text, True, read)
                    text, begun = "", False
        except UnicodeDecodeError:
            raise NotTextError(
                "a binary file (it is not UTF-8 text; iconv -t UTF-8 rewrites other encodings)"
            ) from None
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise NotTextError(f"cannot be read ({error.strerror})") from None
            raise NotTextError(f"cannot be decompressed ({error})") from None


def parse(texts: Sequence[str], flag: str = "--data") -> list[Source]:
    """Read the arguments of a flag; the standard library is meant if there are none."""
    sources = []
    for text in texts or [""]:
        (path, weight), field = split_weight(text), "text"
        if weight is not None and not 0 < weight < math.inf:
            raise RunError(f"{flag} {text}: the weight must be a number above 0, such as 0.3")
        if not is_there(path) and (found := re.fullmatch(r"(.+):([^/:]+)", path, re.S)):
            path, field = found[1], found[2]
        sources.append(Source(path, field, weight))
    if len({source.weight is None for source in sources}) > 1:
        raise RunError(f"{flag} {' '.join(texts)}: some have a weight and some do not")
    return sources


def find(
    texts: Sequence[str], flag: str, *, held_out: float, left_out: Collection[Path] = ()
) -> list[Source]:
    """Find the files that a flag names, but for those `left_out`."""
    found = []
    for source in parse(texts, flag):
        files, skipped = _files(source, flag)
        kept = tuple(file for file in files if file.path.resolve() not in left_out)
        if not kept:
            raise RunError(f"{flag} {source.path}: all of its files are of --eval-data")
        own = {"files": kept, "skipped": tuple(skipped), "held_out": held_out}
        found.append(dataclasses.replace(source, **own))
    return found


def _files(source: Source, flag: str) -> tuple[list[File], list[str]]:
    """The files of a source, and why others in its folders are none, by their beginnings."""
    where = source.path or sysconfig.get_paths()["stdlib"]
    roots = [where] if os.path.exists(where) else sorted(glob.glob(where, recursive=True))
    if not roots:
        raise RunError(f"{flag} {where}: no such file or folder, or no file matches")
    files: dict[Path, File] = {}
    skipped: list[str] = []
    for root in map(Path, roots):
        named = not root.is_dir()
        for path in [root] if named else _walk(root, flag, only_python=not source.path):
            file = File(path, source.field)
            try:
                _check(file)
                files.setdefault(path.resolve(), file)
            except NotTextError as error:
                if named:
                    raise RunError(f"{flag} {root}: {error}") from None
                # Of files that should have held records the reason is to be known first.
                skipped.insert(0 if file.pieces else len(skipped), f"{path}: {error}")
    if not files:
        what = f"{flag}: no text to train on in {where}"
        raise RunError(what + describe_skipped(len(skipped), [*skipped, ""][0]))
    return [*files.values()], skipped


def describe_skipped(count: int, example: str) -> str:
    """Say how many files hold no text, and why one of them does not."""
    return f"; {count:,} × no readable text, such as {example}" if count else ""


def _walk(root: Path, flag: str, *, only_python: bool) -> Iterator[Path]:
    """Yields the files below a folder, and below those that links lead to, each folder once."""

    def unreadable(error: OSError) -> None:
        raise RunError(f"{flag} {error.filename}: cannot be read ({error.strerror})")

    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    seen = {*map(str, root.resolve().parents)}  # no link leads around
    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        kept = (name for name in folders if name not in avoided and name[0] != ".")
        # Links last, so that what lies in the folder has the place that it has without them.
        folders[:] = sorted(kept, key=lambda name: (os.path.islink(f"{folder}/{name}"), name))
        for path in (Path(folder, name) for name in sorted(files) if name[0] != "."):
            if path.is_file() and (path.suffix == ".py" or not only_python):
                yield path


def _check(file: File) -> None:
    """Read the beginning of a file; NotTextError if it is neither text nor documents."""
    if not file.path.is_file():
        raise NotTextError("not a regular file")
    first = next(file.parts(), None)
    if first is None:
        raise NotTextError("a file without text")
    if "\0" in first.text and not file.pieces:
        raise NotTextError("a binary file (it has zero bytes)")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[io.TextIOWrapper, Callable[[], int]]]:
    """Open a file of text, decompressed, beside how many bytes of it are read."""
    with open(path, "rb") as raw:
        stream: Any = raw
        if path.suffix.lower() == ".gz":
            stream = gzip.GzipFile(fileobj=raw)
        elif path.suffix.lower() == ".zst":
            import pyarrow as pa

            stream = io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 20)
        yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n"), raw.tell


def _texts(file: File) -> Iterator[Part]:
    """Yields a file of text in pieces, which end where its documents do."""
    held = len(MARKER) - 1 if file.suffix == ".txt" else 0  # of a marker that a chunk cuts
    text = ""
    with _open(file.path) as (stream, position):
        while chunk := stream.read(_CHUNK):
            *ended, text = (text + chunk).split(MARKER) if held else [chunk]
            yield from (Part(each, True, position()) for each in ended)
            cut = max(0, len(text) - held)
            yield Part(text[:cut], False, position())
            text = text[cut:]
        yield Part(text, True, position())


def _json_texts(file: File) -> Iterator[Part]:
    """Yields the texts of JSON Lines, "" where a field is null; pyarrow's reader names no line."""
    with _open(file.path) as (stream, position):
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield Part(_json_text(line, file.field), True, position())
                except NotTextError as error:
                    raise NotTextError(f"line {number} {error}") from None


def _json_text(line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotTextError(f"is not JSON Lines ({error})") from None
    if not isinstance(record, dict) or field not in record:
        found = ", ".join(map(json.dumps, record)) if isinstance(record, dict) else line.strip()
        what = f'has no "{field}" of a document, but {found:.200}'
        raise NotTextError(f"{what}; name the field {_BEHIND}")
    text = record[field]
    if not isinstance(text, str | None):
        raise NotTextError(f'has {json.dumps(text):.40} as its "{field}", not a string')
    if text and not text.isascii():  # half a character, as where a text was cut, becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text or ""


def _table_texts(file: File) -> Iterator[Part]:
    """Yields the texts of Parquet, "" where a row has none."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file.path)
    except pa.ArrowException as error:
        raise NotTextError(f"is not Parquet ({str(error).partition('.')[0]})") from None
    with table:
        types = {column.name: column.type for column in table.schema_arrow}
        kind = types.get(file.field)
        if kind is not None and pa.types.is_dictionary(kind):  # pandas's categoricals
            kind = kind.value_type
        if kind not in (pa.string(), pa.large_string(), pa.string_view()):
            columns = ", ".join(f'"{name}" ({kind})' for name, kind in types.items()) or "none"
            raise NotTextError(
                f'has no column "{file.field}" of text (string), but {columns}; name the column '
                f"{_BEHIND}"
            )
        row, size = 0, file.path.stat().st_size
        for rows in table.iter_batches(_ROWS, columns=[file.field]):
            try:
                texts = rows.column(0).to_pylist()
            except UnicodeDecodeError as error:
                where = f"a text in rows {row + 1:,} to {row + len(rows):,}"
                raise NotTextError(f"{where} is not UTF-8 ({error.reason})") from None
            row += len(rows)
            read = size * row // table.metadata.num_rows
            yield from (Part(text or "", True, read) for text in texts)
