"""What --data names: files of documents, found, told from what is no text, and read.

A file of text is one document; a file of JSON Lines holds one in each line and a file of Parquet
one in each row, in the field or column "text" unless another is named. Files of text and JSON Lines
may be compressed. Everything is read as a stream, so that no file needs to fit into memory.
"""

import bz2
import codecs
import contextlib
import dataclasses
import glob
import gzip
import importlib
import io
import itertools
import json
import lzma
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxkern.lm.config import RunError

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# The standard library's own tests hold much deliberately odd text.
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test"}
_JSON_LINES = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_CHUNK = 1 << 20
_ROWS = 256  # of Parquet that are read at once


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
    """

    text: str
    path: str
    field: str = "text"
    weight: float | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.path or "standard library"


def parse(texts: Sequence[str], flag: str = "--data") -> list[Source]:
    """What the arguments of a flag name; the standard library if there are none.

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
    path, weight, field = text, None, "text"
    if not _is_there(path) and (found := re.fullmatch(r"(.+)=([-+.\w]*\d[-+.\w]*)", path, re.S)):
        path = found[1]
        try:
            weight = float(found[2])
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise RunError(
                f"{flag} {text}: the weight {found[2]} must be a number above 0, such as 0.3"
            )
    if not _is_there(path) and (found := re.fullmatch(r"(.+):([^/:]+)", path, re.S)):
        path, field = found[1], found[2]
    return Source(text, path, field, weight)


def _is_there(path: str) -> bool:
    return os.path.exists(path) or bool(_matches(path))


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else []


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents.

    Attributes:
      name: its path below the folder that was named, with forward slashes.
      path: where it lies.
      field: the field or column that holds the documents, where there are several.
      texts: how many documents it holds; ``None`` for a file that is one, or until it is known.
    """

    name: str
    path: Path
    field: str = "text"
    texts: int | None = None

    @property
    def kind(self) -> Literal["text", "lines", "table"]:
        """Whether it is one document, JSON Lines, or Parquet."""
        suffix = Path(self.path.stem if self.compressed else self.path).suffix.lower()
        # Collections of text call compressed JSON Lines .json.gz, too.
        if suffix in _JSON_LINES or (self.compressed and suffix == ".json"):
            return "lines"
        return "table" if suffix == ".parquet" else "text"

    @property
    def compressed(self) -> bool:
        return self.path.suffix.lower() in _COMPRESSED

    def names(self) -> Iterator[str]:
        """The names of its documents, by which the packed bytes are split."""
        if self.kind == "text":
            yield self.name
        else:
            yield from (f"{self.name}:{i}" for i in range(self.texts or 0))

    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Iterable[bytes]]:
        """Yields the UTF-8 of its documents, each in parts; those that are empty are left out.

        Args:
            begin, end: a part of the file: of Parquet these groups of rows; of JSON Lines those
                that start between these bytes, or, where they are compressed, every `end`-th from
                line `begin` on.

        Raises:
            NotTextError: the file is not what its name says.
        """
        with _readable():
            match self.kind:
                case "lines":
                    yield from ([text] for text in _json_texts(self, begin, end))
                case "table":
                    yield from ([text] for text in _table_texts(self, begin, end))
                case "text":
                    with _open(self.path) as file:
                        yield iter(lambda: file.read(_CHUNK), b"")


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def find_files(
    source: Source, flag: str = "--data", *, count: bool = False
) -> tuple[list[File], int]:
    """The files of documents that a source names, and how many others there are.

    Args:
        source: that names them.
        flag: by which it was given.
        count: read every file to its end, and count its documents; else the beginnings are read.

    Raises:
        RunError: there is no such path, or a file that is named itself holds no text.
    """
    files: dict[Path, File] = {}
    skipped = 0
    for root in _roots(source, flag):
        named = not root.is_dir()
        for path in [root] if named else _walk(root, flag, only_python=not source.path):
            name = root.name if named else path.relative_to(root).as_posix()
            file = File(name, path, source.field)
            try:
                if named and path.suffix.lower() == ".json":
                    raise NotTextError(
                        "JSON, whose syntax would be trained on (rename it to .txt if that is "
                        'meant, or write a .jsonl file with the "text" of a document in each line)'
                    )
                files.setdefault(path.resolve(), _checked(file, flag, count))
            except NotTextError as error:
                if named:
                    remedy = "give text files or folders of them"
                    raise RunError(f"{flag} {root}: {error}; {remedy}") from None
                skipped += 1
    return sorted(files.values(), key=lambda f: (f.name, str(f.path))), skipped


def refuse_nothing(files: Sequence[File], skipped: int, where: str, flag: str = "--data") -> None:
    """Raise RunError where a flag names no file of text."""
    if not files:
        passed = f" ({counted(skipped, 'file')} there without readable text)" if skipped else ""
        raise RunError(
            f"no text to train on in {where or standard_library()}{passed}; give text files to "
            f"{flag}"
        )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def need_package(module: str, what: str) -> Any:
    """Import a package of the extra "data", or say what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise RunError(f'{what} needs {package}; run: pip install "jaxkern[data]"') from None


def _roots(source: Source, flag: str) -> list[Path]:
    if not source.path:
        return [standard_library()]
    if os.path.exists(source.path):
        return [Path(source.path)]
    roots = [Path(path) for path in _matches(source.path)]
    if not roots:
        none = "no file matches" if glob.has_magic(source.path) else "no such file or folder"
        raise RunError(f"{flag} {source.text}: {none}")
    return roots


def _walk(root: Path, flag: str, *, only_python: bool) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        if not only_python:
            raise RunError(f"{flag} {error.filename}: cannot be read ({error.strerror})")

    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = sorted(f for f in folders if f not in avoided and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            hidden = file.startswith(".")
            if not hidden and path.is_file() and (path.suffix == ".py" or not only_python):
                yield path


def _checked(file: File, flag: str, count: bool) -> File:
    """The file, with the number of its documents if they are counted.

    Raises:
        NotTextError: if it is neither text nor documents.
        RunError: if some of its documents can be read and another cannot.
    """
    if not file.path.is_file():
        raise NotTextError("not a regular file")
    with _readable():
        if file.kind == "text":
            _check_text(file.path, whole=count)
            return file
        texts = 0
        try:
            for (text,) in file.documents():
                if count and b"\0" in text:
                    raise NotTextError(f"document {texts + 1} has a zero byte in its text")
                texts += 1
                if not count:
                    break
        except NotTextError as error:
            if texts:
                raise RunError(f"{flag} {file.path}: {error}") from None
            raise
        if not texts:
            raise NotTextError("a file without text")
        return dataclasses.replace(file, texts=texts) if count else file


def _check_text(path: Path, *, whole: bool) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with _open(path) as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                decoder.decode(chunk)
                if b"\0" in chunk:
                    raise NotTextError("a binary file (it has zero bytes)")
                if not whole:
                    break
            if whole or size < _CHUNK:
                decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise NotTextError(
            "a binary file (it is not UTF-8 text; iconv -t UTF-8 rewrites other encodings)"
        ) from None
    if not size:
        raise NotTextError("an empty file")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Inside, what a file cannot be read for is a `NotTextError`."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise NotTextError(f"cannot be decompressed ({error})") from None
    except OSError as error:
        if error.errno is None:  # of bz2 and pyarrow
            raise NotTextError(f"cannot be decompressed ({error})") from None
        raise NotTextError(f"cannot be read ({error.strerror})") from None


def _open(path: Path) -> Any:
    """Opens a file of bytes, decompressed."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            pa = need_package("pyarrow", f"{path} is compressed by zstd, and reading it")
            stream: Any = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
            return io.BufferedReader(stream, _CHUNK)
    return open(path, "rb")


def _json_texts(file: File, begin: int, end: int | None) -> Iterator[bytes]:
    """The texts in a part of the lines of JSON."""
    lines = _compressed_lines if file.compressed else _plain_lines
    for where, line in lines(file.path, begin, end):
        if line.strip():
            try:
                content = _json_text(line, file.field)
            except NotTextError as error:
                number = where if file.compressed else _line_number(file.path, where)
                raise NotTextError(f"line {number} {error}") from None
            if content:
                yield content


def _plain_lines(path: Path, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that start from byte `begin` to before byte `end`, behind the byte of each."""
    with _open(path) as stream:
        position = begin
        if begin:  # the line that the byte before belongs to is another part's
            stream.seek(begin - 1)
            position += len(stream.readline()) - 1
        while (end is None or position < end) and (line := stream.readline()):
            yield position, line
            position += len(line)


def _compressed_lines(path: Path, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Every `end`-th line from line `begin` on, or all, behind the number of each from 1."""
    with _open(path) as stream:
        yield from itertools.islice(enumerate(stream, 1), begin, None, end)


def _json_text(line: bytes, field: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotTextError(f"is not JSON ({error})") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else line[:40]
        raise NotTextError(
            f'has no "{field}" of a document, but {fields!r}; name the field that holds it behind '
            "the path, as in PATH:FIELD"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NotTextError(f"is not Unicode text ({error.reason})") from None


def _line_number(path: Path, position: int) -> int:
    """The number of the line that starts at a byte, from 1."""
    number = 1
    with _open(path) as stream:
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


def _table_texts(file: File, begin: int, end: int | None) -> Iterator[bytes]:
    """The texts in the groups of rows from `begin` to before `end`."""
    with _table(file) as table:
        groups = range(begin, table.num_row_groups if end is None else end)
        for rows in table.iter_batches(_ROWS, row_groups=groups, columns=[file.field]):
            for text in rows.column(0).to_pylist():
                if text:
                    yield text.encode()


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
        columns = [f.name for f in schema if pa.types.is_string(f.type) or _large(pa, f.type)]
        if file.field not in columns:
            raise NotTextError(
                f'has no column "{file.field}" of text, but {", ".join(columns) or "none"}; name '
                "the column that holds the documents behind the path, as in PATH:COLUMN"
            )
        yield table


def _large(pa: Any, kind: Any) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
