"""Files of documents: what --data names, found, told from what is no text, and read as streams.

A file of text is one document, or several in a .txt that has `MARKER` between them; a file of JSON
Lines holds one in each line and a file of Parquet one in each row, in the field or column "text"
unless another is named. Text and JSON Lines may be compressed. No file needs to fit into memory:
documents come in parts, which end between two words, where tokenizers cut, too.
"""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import importlib
import io
import itertools
import json
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxkern.lm.config import RunError, is_there, split_weight

MARKER = "<|endoftext|>"  # ends a document of a .txt; elsewhere it is text like any other
_JSON_LINES = {".jsonl", ".ndjson", ".json"}
_COMPRESSED = {".gz", ".zst"}
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# The standard library's own tests hold much deliberately odd text.
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test"}
_CHUNK = 1 << 20  # bytes of a file that are read at once
_PART = 1 << 18  # characters of a part of a document, which has less than twice as many
_ROWS = 256  # of Parquet that are read at once
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
_KINDS |= {dict: "an object", type(None): "null"}

type _Tell = Callable[[int], object]  # called with how many bytes of a file are read


class NotTextError(Exception):
    """Why a file is no training text."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One argument of --data or --eval-data: PATH, PATH:FIELD, either followed by =WEIGHT.

    Attributes:
      text: the argument.
      path: a file, a folder, or a pattern of them; "" for Python's standard library.
      field: the field of JSON Lines, or the column of Parquet, that holds the documents.
      weight: the share of training windows that are drawn from it; ``None`` if none is given.
      files: of documents, in a fixed order, once they are found.
      skipped: how many files of its folders hold no documents.
      example: one of those, and why it was skipped.
      held_out: the share of its documents that are validated with.
    """

    text: str
    path: str
    field: str = "text"
    weight: float | None = None
    files: tuple["File", ...] = ()
    skipped: int = 0
    example: str = ""
    held_out: float = 0

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.path or "standard library"


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents, and the field or column that holds them where there are several."""

    path: Path
    field: str = "text"

    @property
    def suffix(self) -> str:
        """That of its content, in lower case."""
        compressed = self.path.suffix.lower() in _COMPRESSED
        return Path(self.path.stem if compressed else self.path).suffix.lower()

    @property
    def kind(self) -> Literal["text", "lines", "table"]:
        """Whether it is text, JSON Lines, or Parquet."""
        if self.suffix in _JSON_LINES:
            return "lines"
        return "table" if self.suffix == ".parquet" else "text"

    @property
    def content(self) -> tuple[Path, str]:
        """What tells its documents from those of others: where they lie, and in which field."""
        return self.path.resolve(), "" if self.kind == "text" else self.field

    def parts(self, tell: _Tell = lambda _: None) -> Iterator[tuple[str, bool]]:
        """Yields the documents in parts, each with whether it ends its document.

        Raises:
          NotTextError: the file is not what its name says.
        """
        with _readable():
            if self.kind == "text":
                yield from _parts_of_text(self, tell)
                return
            texts = _json_texts if self.kind == "lines" else _table_texts
            for text in texts(self, tell):
                while len(text) >= 2 * _PART:
                    cut = _between_words(text)
                    yield text[:cut], False
                    text = text[cut:]
                if text:
                    yield text, True


def parse(texts: Sequence[str], flag: str = "--data") -> list[Source]:
    """Read the arguments of a flag; the standard library is meant if there are none.

    Raises:
      RunError: a weight is no weight, or only some arguments have one.
    """
    sources = [_parse(text, flag) for text in texts] or [Source("", "")]
    for source in sources:
        if (source.weight is None) != (sources[0].weight is None):
            raise RunError(
                f"{flag} {' '.join(texts)}: some have a weight and some do not; write =WEIGHT "
                "behind each, or behind none"
            )
    return sources


def _parse(text: str, flag: str) -> Source:
    (path, given), weight, field = split_weight(text), None, "text"
    if given is not None:
        try:
            weight = float(given)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise RunError(
                f"{flag} {text}: the weight {given} must be a number above 0, such as 0.3"
            )
    if not is_there(path) and (found := re.fullmatch(r"(.+):([^/:]+)", path, re.S)):
        path, field = found[1], found[2]
    return Source(text, path, field, weight)


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else []


def find(
    texts: Sequence[str], flag: str, *, held_out: float, left_out: Collection[Path] = ()
) -> list[Source]:
    """Find the files that a flag names, each once, but for those `left_out`.

    Raises:
      RunError: a path is missing or names no text, or only files that are named before.
    """
    found: list[Source] = []
    seen: set[tuple[Path, str]] = set()
    for source in parse(texts, flag):
        named = _with_files(source, flag)
        new = [f for f in named.files if f.content not in seen and f.path.resolve() not in left_out]
        if not new:
            raise RunError(
                f"{flag} {source.text}: all of its files are named before, by --data or "
                "--eval-data; leave it out"
            )
        seen |= {file.content for file in new}
        found.append(dataclasses.replace(named, files=tuple(new), held_out=held_out))
    return found


def _with_files(source: Source, flag: str) -> Source:
    """Find the files of a source, told from what is no text by their beginnings."""
    files: dict[Path, tuple[str, File]] = {}
    skipped: list[tuple[bool, str]] = []
    for root in _roots(source, flag):
        named = not root.is_dir()
        for path in [root] if named else _walk(root, flag, only_python=not source.path):
            file = File(path, source.field)
            name = root.name if named else path.relative_to(root).as_posix()
            try:
                _check(file)
                files.setdefault(path.resolve(), (name, file))
            except NotTextError as error:
                if named:
                    remedy = "give text files or folders of them"
                    raise RunError(f"{flag} {root}: {error}; {remedy}") from None
                skipped.append((file.kind == "text", f"{path}: {error}"))
    # Of files that should have held records the reason is to be known first.
    example = min(skipped, key=lambda each: each[0])[1] if skipped else ""
    if not files:
        there = f" ({describe_skipped(len(skipped), example, 'there')})" if skipped else ""
        where = source.path or sysconfig.get_paths()["stdlib"]
        raise RunError(f"no text to train on in {where}{there}; give text files to {flag}")
    ordered = sorted(files.values(), key=lambda each: (each[0], str(each[1].path)))
    of_source = tuple(file for _, file in ordered)
    return dataclasses.replace(source, files=of_source, skipped=len(skipped), example=example)


def describe_skipped(count: int, example: str, verb: str) -> str:
    """Say how many files hold no text, and name one of them."""
    such = ", such as" if count > 1 else ","
    return f"{counted(count, 'file')} without readable text {verb}{such} {example}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _roots(source: Source, flag: str) -> list[Path]:
    if not source.path:
        return [Path(sysconfig.get_paths()["stdlib"])]
    if os.path.exists(source.path):
        return [Path(source.path)]
    roots = [Path(path) for path in _matches(source.path)]
    if not roots:
        none = "no file matches" if glob.has_magic(source.path) else "no such file or folder"
        raise RunError(f"{flag} {source.text}: {none}")
    return roots


def _walk(root: Path, flag: str, *, only_python: bool) -> Iterator[Path]:
    """Yields the files below a folder, and below those that links lead to, each folder once."""

    def unreadable(error: OSError) -> None:
        if not only_python:
            raise RunError(f"{flag} {error.filename}: cannot be read ({error.strerror})")

    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    seen = {*map(str, root.resolve().parents)}  # no link leads around
    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name not in avoided and name[0] != "."]
        # Links last, so that what lies in the folder has the name that it has without them.
        folders.sort(key=lambda name, folder=folder: (Path(folder, name).is_symlink(), name))
        for path in (Path(folder, name) for name in sorted(files) if name[0] != "."):
            if path.is_file() and (path.suffix == ".py" or not only_python):
                yield path


def _check(file: File) -> None:
    """Read the beginning of a file.

    Raises:
      NotTextError: it is neither text nor documents.
    """
    if not file.path.is_file():
        raise NotTextError("not a regular file")
    with _readable():
        if file.suffix == ".json":
            _check_json(file)
        if file.kind != "text":
            if next(file.parts(), None) is None:
                raise NotTextError("a file without text")
            return
        with _open(file.path) as (stream, _):
            chunk = stream.read(_CHUNK)
        if not chunk:
            raise NotTextError("an empty file")
        if b"\0" in chunk:
            raise NotTextError("a binary file (it has zero bytes)")
        _decode(codecs.getincrementaldecoder("utf-8")(), chunk, final=len(chunk) < _CHUNK)


def need_package(module: str, what: str) -> Any:
    """Import a package of the extra "data", or say what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise RunError(f"{what} needs {package}; run: pip install {package}") from None


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Inside, what a file cannot be read for is a `NotTextError`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NotTextError(f"cannot be decompressed ({error})") from None
    except OSError as error:
        if error.errno is None:  # of pyarrow
            raise NotTextError(f"cannot be decompressed ({error})") from None
        raise NotTextError(f"cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Open a file of bytes, decompressed, beside how many bytes of it are read."""
    with open(path, "rb") as raw:
        stream: Any = raw
        if path.suffix.lower() == ".gz":
            stream = gzip.GzipFile(fileobj=raw)
        elif path.suffix.lower() == ".zst":
            pa = need_package("pyarrow", f"{path} is compressed by zstd, and reading it")
            stream = io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), _CHUNK)
        yield stream, raw.tell


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, *, final: bool) -> str:
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError:
        raise NotTextError(
            "a binary file (it is not UTF-8 text; iconv -t UTF-8 rewrites other encodings)"
        ) from None


def _between_words(text: str) -> int:
    """Find the last place between two words in the first `_PART` characters, or their end."""
    cuts = [m.start() for m in re.finditer(r"(?<=\S)(?= \S)", text[_PART - _PART // 64 : _PART])]
    return _PART - _PART // 64 + cuts[-1] if cuts else _PART


def _parts_of_text(file: File, tell: _Tell) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a text's documents; line ends beside a marker belong to it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, begun, behind = "", False, False  # whether a part is yielded, whether behind a marker
    with _open(file.path) as (stream, position):
        for chunk in itertools.chain(iter(lambda: stream.read(_CHUNK), b""), [b""]):
            tell(position())
            text += _decode(decoder, chunk, final=not chunk)
            if file.suffix == ".txt":
                *ended, text = text.split(MARKER)
                for each in ended:
                    each = (each.lstrip("\r\n") if behind and not begun else each).rstrip("\r\n")
                    if each or begun:
                        yield each, True
                    begun, behind = False, True
            if behind and not begun:
                text = text.lstrip("\r\n")
            while len(text) >= 2 * _PART:
                cut = _between_words(text)
                yield text[:cut], False
                text, begun = text[cut:], True
    if text or begun:
        yield text, True


def _check_json(file: File) -> None:
    """Refuse a .json whose first line that is not blank is no object: it is not JSON Lines."""
    with _open(file.path) as (stream, _):
        line = next(filter(bytes.strip, iter(lambda: stream.readline(_CHUNK), b"")), b"")
        # The first character tells of a list, which may be one line as long as the file.
        if len(line) == _CHUNK and line.lstrip().startswith(b"{"):
            line += stream.readline()
    try:
        is_record = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        is_record = False
    if not is_record:
        raise NotTextError(
            "JSON, whose syntax would be trained on (its first line is not an object, as it is in "
            'JSON Lines; write a .jsonl file with the "text" of a document in each line, or rename '
            "it to .txt if the syntax is meant)"
        )


def _json_texts(file: File, tell: _Tell) -> Iterator[str]:
    """Yields the texts of JSON Lines, "" where a field is null.

    By the standard library and not by pyarrow, whose reader takes a misspelt field for nulls, and
    names no line of a record that it cannot read.
    """
    with _open(file.path) as (stream, position):
        for number, line in enumerate(stream, 1):
            if number % _ROWS == 0:
                tell(position())
            if line.strip():
                try:
                    yield _json_text(line, file.field)
                except NotTextError as error:
                    raise NotTextError(f"line {number} {error}") from None


def _json_text(line: bytes, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotTextError(f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise NotTextError(f'is {_KINDS[type(record)]}, not an object with the field "{field}"')
    if field not in record:
        fields = ", ".join(f'"{name}"' for name in record) or "no field"
        raise NotTextError(
            f'has no "{field}" of a document, but {fields}; name the field that holds it behind '
            "the path, as in PATH:FIELD"
        )
    text = record[field]
    if not isinstance(text, str | None):
        raise NotTextError(
            f'has {_KINDS[type(text)]} as its "{field}", not a string; leave the line out, or name '
            "the field that holds the document behind the path, as in PATH:FIELD"
        )
    if text and not text.isascii():  # half a character, as where a text was cut, becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text or ""


def _table_texts(file: File, tell: _Tell) -> Iterator[str]:
    """Yields the texts of Parquet, "" where a row has none."""
    what = f"{file.path} is Parquet, and reading it"
    pa, parquet = need_package("pyarrow", what), need_package("pyarrow.parquet", what)
    try:
        table = parquet.ParquetFile(file.path)
    except pa.ArrowException as error:
        raise NotTextError(f"is not Parquet ({str(error).partition('.')[0]})") from None
    with table:
        schema, size = table.schema_arrow, file.path.stat().st_size
        if not any(f.name == file.field and _is_text(pa, f.type) for f in schema):
            columns = ", ".join(f'"{f.name}" ({f.type})' for f in schema) or "none"
            raise NotTextError(
                f'has no column "{file.field}" of text (string), but {columns}; name the column '
                "that holds the documents behind the path, as in PATH:COLUMN"
            )
        row = 0
        for rows in table.iter_batches(_ROWS, columns=[file.field]):
            try:
                texts = rows.column(0).to_pylist()
            except UnicodeDecodeError as error:
                where = f"a text in rows {row + 1:,} to {row + len(rows):,}"
                raise NotTextError(f"{where} is not UTF-8 ({error.reason})") from None
            row += len(rows)
            tell(size * row // table.metadata.num_rows)
            yield from (text or "" for text in texts)


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):  # pandas's categoricals
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)
