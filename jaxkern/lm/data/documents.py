"""Files of documents, read as streams, so that none needs to fit into memory.

A file of text is one document, or several in a .txt that has `MARKER` between them; a file of JSON
Lines holds one in each line and a file of Parquet one in each row, in the field or column "text"
unless another is named. Files of text and JSON Lines may be compressed.
"""

import bz2
import codecs
import contextlib
import dataclasses
import gzip
import importlib
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxkern.lm.config import RunError

_JSON_LINES = {".jsonl", ".ndjson", ".json"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
MARKER = b"<|endoftext|>"  # ends a document of a .txt; elsewhere it is text like any other
ZERO_BYTE = (
    "which ends a document of bytes (to a tokenizer, as of --tokenizer bpe:32000, it is a "
    "character like others)"
)
_CHUNK = 1 << 20
_READ = 1 << 17  # bytes of a file that are read at once
_ROWS = 256  # of Parquet that are read at once


_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


type _Read = Callable[[int], object] | None  # called with the bytes that are read


class NotTextError(Exception):
    """Why a file is no training text."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents.

    Attributes:
      name: its path below the folder that was named, with forward slashes.
      path: where it lies.
      field: the field or column that holds the documents, where there are several.
      texts: how many documents it holds; ``None`` for a text that is one, or until it is known.
    """

    name: str
    path: Path
    field: str = "text"
    texts: int | None = None

    @property
    def kind(self) -> Literal["text", "lines", "table"]:
        """Whether it is one document, JSON Lines, or Parquet."""
        if self.suffix in _JSON_LINES:
            return "lines"
        return "table" if self.suffix == ".parquet" else "text"

    @property
    def suffix(self) -> str:
        """That of its content, in lower case."""
        return Path(self.path.stem if self.compressed else self.path).suffix.lower()

    @property
    def compressed(self) -> bool:
        return self.path.suffix.lower() in _COMPRESSED

    @property
    def content(self) -> tuple[Path, str]:
        """What tells its documents from those of others: where they lie, and in which field."""
        return self.path.resolve(), "" if self.kind == "text" else self.field

    def names(self) -> Iterator[str]:
        """The names of its documents, by which the packed bytes are split."""
        if self.kind == "text" and self.texts is None:
            yield self.name
        else:
            yield from (f"{self.name}:{i}" for i in range(self.texts or 0))

    def documents(
        self, begin: int = 0, end: int | None = None, read: _Read = None
    ) -> Iterator[Iterable[bytes]]:
        """Yields the UTF-8 of its documents, each in parts; those that are empty are left out.

        Args:
            begin, end: a part of the file: of a text these bytes; of Parquet these groups of rows;
                of JSON Lines those that start between these bytes, or, where they are compressed,
                every `end`-th from line `begin` on.
            read: called with the bytes that were read, for what tells of progress.

        Raises:
            NotTextError: the file is not what its name says.
        """
        with readable():
            match self.kind:
                case "lines":
                    yield from ([text] for text in _json_texts(self, begin, end, read))
                case "table":
                    yield from ([text] for text in _table_texts(self, begin, end, read))
                case "text":
                    with open_file(self.path, read) as file:
                        behind = False
                        if begin:
                            file.seek(max(0, begin - len(MARKER)))
                            behind = file.read(min(begin, len(MARKER))) == MARKER
                        chunks = _chunks(file, sys.maxsize if end is None else end - begin)
                        if self.suffix == ".txt":
                            yield from _marked_texts(chunks, behind)
                        else:
                            yield chunks


def need_package(module: str, what: str) -> Any:
    """Import a package of the extra "data", or say what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise RunError(f"{what} needs {package}; run: pip install {package}") from None


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Inside, what a file cannot be read for is a `NotTextError`."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise NotTextError(f"cannot be decompressed ({error})") from None
    except OSError as error:
        if error.errno is None:  # of bz2 and pyarrow
            raise NotTextError(f"cannot be decompressed ({error})") from None
        raise NotTextError(f"cannot be read ({error.strerror})") from None


class _Told(io.FileIO):
    """A file that tells how many bytes of it are read."""

    def __init__(self, path: Path, read: Callable[[int], object]):
        super().__init__(path)
        self._tell_read = read

    def readinto(self, buffer: Any) -> int | None:
        size = super().readinto(buffer)
        self._tell_read(size or 0)
        return size


@contextlib.contextmanager
def open_file(path: Path, read: _Read = None) -> Iterator[Any]:
    """Opens a file of bytes, decompressed; `read` is called with the bytes that are read of it."""
    with contextlib.ExitStack() as files:
        file: Any = _Told(path, read) if read else io.FileIO(path)
        file = files.enter_context(io.BufferedReader(file, _READ))
        match path.suffix.lower():
            case ".gz":
                file = files.enter_context(gzip.open(file, "rb"))
            case ".bz2":
                file = files.enter_context(bz2.open(file, "rb"))
            case ".xz":
                file = files.enter_context(lzma.open(file, "rb"))
            case ".zst":
                pa = need_package("pyarrow", f"{path} is compressed by zstd, and reading it")
                stream = pa.CompressedInputStream(file, "zstd")
                file = files.enter_context(io.BufferedReader(stream, _CHUNK))
        yield file


def _chunks(file: Any, left: int) -> Iterator[bytes]:
    """The next bytes of a file, no more than `left`."""
    while chunk := file.read(min(_CHUNK, left)):
        left -= len(chunk)
        yield chunk


def _marked_texts(chunks: Iterator[bytes], behind: bool) -> Iterator[Iterator[bytes]]:
    """The texts between markers, each in parts, which have to be read before the next text is.

    Args:
        chunks: of the file, or of a part of it.
        behind: whether a marker is before the first.
    """
    parts = _between_markers(chunks, behind)
    for first in parts:
        if first is not None:
            yield itertools.chain([first], iter(parts.__next__, None))


def _between_markers(chunks: Iterator[bytes], begins: bool) -> Iterator[bytes | None]:
    """The bytes of a text, ``None`` for each marker; line ends beside a marker belong to it."""
    waiting = b""
    for chunk in chunks:
        *ended, waiting = (waiting + chunk).split(MARKER)
        for part in ended:
            if part := (part.lstrip(b"\r\n") if begins else part).rstrip(b"\r\n"):
                yield part
            yield None
            begins = True
        if begins:
            waiting = waiting.lstrip(b"\r\n")
        # What may be the beginning of a marker waits, and the line ends before it.
        if sure := waiting[: 1 - len(MARKER)].rstrip(b"\r\n"):
            yield sure
            waiting, begins = waiting[len(sure) :], False
    if waiting:
        yield waiting


def check_json(file: File) -> None:
    """Tell a file called .json that is JSON Lines from one value that spans lines.

    Raises:
        NotTextError: its first line that is not blank is no object.
    """
    with readable(), open_file(file.path) as stream:
        line = b""
        while not line.strip() and (line := stream.readline(_CHUNK)):
            pass
        # The first character tells of a list, which may be one line as long as the file.
        whole = line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
        if whole and len(line) == _CHUNK:
            line += stream.readline()
    try:
        whole = whole and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise NotTextError(
            "JSON, whose syntax would be trained on (its first line is not an object, as it is in "
            'JSON Lines; write a .jsonl file with the "text" of a document in each line, or rename '
            "it to .txt if the syntax is meant)"
        )


def _json_texts(file: File, begin: int, end: int | None, read: _Read) -> Iterator[bytes]:
    """The texts in a part of the lines of JSON."""
    lines = _compressed_lines if file.compressed else _plain_lines
    for where, line in lines(file.path, begin, end, read):
        if line.strip():
            try:
                content = _json_text(line, file.field)
            except NotTextError as error:
                number = where if file.compressed else _line_number(file.path, where)
                raise NotTextError(f"line {number} {error}") from None
            if content:
                yield content


def _plain_lines(
    path: Path, begin: int, end: int | None, read: _Read
) -> Iterator[tuple[int, bytes]]:
    """The lines that start from byte `begin` to before byte `end`, behind the byte of each."""
    with open_file(path, read) as stream:
        position = begin
        if begin:  # the line that the byte before belongs to is another part's
            stream.seek(begin - 1)
            position += len(stream.readline()) - 1
        while (end is None or position < end) and (line := stream.readline()):
            yield position, line
            position += len(line)


def _compressed_lines(
    path: Path, begin: int, end: int | None, read: _Read
) -> Iterator[tuple[int, bytes]]:
    """Every `end`-th line from line `begin` on, or all, behind the number of each from 1."""
    with open_file(path, read) as stream:
        yield from itertools.islice(enumerate(stream, 1), begin, None, end)


def _json_text(line: bytes, field: str) -> bytes:
    """The text of a record in UTF-8, which is empty where its field is null."""
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
    if text is None:
        return b""
    if not isinstance(text, str):
        raise NotTextError(
            f'has {_KINDS[type(text)]} as its "{field}", not a string; leave the line out, or name '
            "the field that holds the document behind the path, as in PATH:FIELD"
        )
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character, as where a text was cut, becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _line_number(path: Path, position: int) -> int:
    """The number of the line that starts at a byte, from 1."""
    number = 1
    with open_file(path) as stream:
        while position > 0 and (chunk := stream.read(min(_CHUNK, position))):
            number += chunk.count(b"\n")
            position -= len(chunk)
    return number


def row_groups(file: File) -> list[int]:
    """The bytes of documents in each group of rows of a file of Parquet."""
    with _table(file) as table:
        column = table.schema_arrow.get_field_index(file.field)
        # A column of nested values has several of the file's columns before those behind it.
        sizes = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        return [
            group.column(column).total_uncompressed_size
            if group.num_columns == len(table.schema_arrow)
            else group.total_byte_size
            for group in sizes
        ]


def _table_texts(file: File, begin: int, end: int | None, read: _Read) -> Iterator[bytes]:
    """The texts in the groups of rows from `begin` to before `end`."""
    with _table(file) as table:
        groups = range(begin, table.num_row_groups if end is None else end)
        row = sum(table.metadata.row_group(i).num_rows for i in range(begin))
        for rows in table.iter_batches(_ROWS, row_groups=groups, columns=[file.field]):
            try:
                texts = rows.column(0).to_pylist()
            except UnicodeDecodeError as error:
                where = f"a text in rows {row + 1:,} to {row + len(rows):,}"
                raise NotTextError(f"{where} is not UTF-8 ({error.reason})") from None
            row += len(rows)
            contents = [text.encode() for text in texts if text]
            if read:
                read(sum(map(len, contents)))
            yield from contents


@contextlib.contextmanager
def _table(file: File) -> Iterator[Any]:
    """Opens a file of Parquet whose column of documents holds text."""
    pa = need_package("pyarrow", f"{file.path} is Parquet, and reading it")
    parquet = need_package("pyarrow.parquet", f"{file.path} is Parquet, and reading it")
    try:
        table = parquet.ParquetFile(file.path)
    except pa.ArrowException as error:
        raise NotTextError(f"is not Parquet ({str(error).partition('.')[0]})") from None
    with table:
        schema = table.schema_arrow
        if not any(f.name == file.field and _is_text(pa, f.type) for f in schema):
            columns = ", ".join(f'"{f.name}" ({f.type})' for f in schema) or "none"
            raise NotTextError(
                f'has no column "{file.field}" of text (string), but {columns}; name the column '
                "that holds the documents behind the path, as in PATH:COLUMN"
            )
        yield table


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):  # pandas's categoricals
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)
