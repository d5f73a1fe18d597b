"""What --data names: files of documents, found, and told from what is no text."""

import codecs
import collections
import dataclasses
import glob
import math
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxkern.lm.config import RunError
from jaxkern.lm.data.documents import ZERO_BYTE, File, NotTextError, check_json, open_file, readable

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# The standard library's own tests hold much deliberately odd text.
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test"}
_CHUNK = 1 << 20


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


# Infinity and NaN are read as numbers, too, so that they are refused and no part of a field's name.
_WEIGHTED = re.compile(r"(?is)(.+)=([-+.\w]*\d[-+.\w]*|[-+]?(?:inf|infinity|nan))")


def _parse(text: str, flag: str) -> Source:
    path, weight, field = text, None, "text"
    if not _is_there(path) and (found := _WEIGHTED.fullmatch(path)):
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


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Files of folders that hold no documents.

    Attributes:
      count: how many there are.
      example: the path of one, and why it was skipped.
      records: whether that one should have held records: of those the reason is to be known first.
    """

    count: int = 0
    example: str = ""
    records: bool = False

    def __add__(self, other: "Skipped") -> "Skipped":
        better = not self.count or (other.records and not self.records)
        kept = other if better else self
        return dataclasses.replace(kept, count=self.count + other.count)

    def describe(self, verb: str) -> str:
        """How many there are, and one of them."""
        such = f"{', such as' if self.count > 1 else ','} {self.example}" if self.example else ""
        return f"{counted(self.count, 'file')} without readable text {verb}{such}"


def find_files(
    source: Source, flag: str = "--data", *, count: bool = False
) -> tuple[list[File], Skipped]:
    """The files of documents that a source names, and the others in its folders.

    Args:
        source: that names them.
        flag: by which it was given.
        count: read every file to its end, and count its documents; else the beginnings are read.

    Raises:
        RunError: there is no such path, or a file that is named itself holds no text.
    """
    files: dict[Path, File] = {}
    skipped = Skipped()
    for root in _roots(source, flag):
        named = not root.is_dir()
        for path in [root] if named else _walk(root, flag, only_python=not source.path):
            name = root.name if named else path.relative_to(root).as_posix()
            file = File(name, path, source.field)
            try:
                files.setdefault(path.resolve(), _checked(file, flag, count))
            except NotTextError as error:
                if named:
                    remedy = "give text files or folders of them"
                    raise RunError(f"{flag} {root}: {error}; {remedy}") from None
                skipped += Skipped(1, f"{path}: {error}", file.kind != "text")
    return sorted(files.values(), key=lambda f: (f.name, str(f.path))), skipped


def refuse_nothing(
    files: Sequence[File], skipped: Skipped, where: str, flag: str = "--data"
) -> None:
    """Raise RunError where a flag names no file of text."""
    if not files:
        passed = f" ({skipped.describe('there')})" if skipped.count else ""
        raise RunError(
            f"no text to train on in {where or standard_library()}{passed}; give text files to "
            f"{flag}"
        )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    """The files below a folder, and below those that links in it lead to, each folder once."""

    def unreadable(error: OSError) -> None:
        if not only_python:
            raise RunError(f"{flag} {error.filename}: cannot be read ({error.strerror})")

    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    waiting, seen = collections.deque([root]), set()
    # Links last, so that a file below the root has the name that it has without them.
    while waiting:
        for folder, folders, files in os.walk(waiting.popleft(), onerror=unreadable):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(f for f in folders if f not in avoided and not f.startswith("."))
            links = [path for path in (Path(folder, f) for f in folders) if path.is_symlink()]
            waiting += [link for link in links if not Path(real).is_relative_to(link.resolve())]
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
    with readable():
        if file.kind == "text":
            _check_text(file.path, whole=count)
            texts = _count(file) if count and file.suffix == ".txt" else 1
            return file if texts == 1 else dataclasses.replace(file, texts=texts)
        if file.suffix == ".json":
            check_json(file)
        texts = 0
        try:
            for (text,) in file.documents():
                if count and b"\0" in text:
                    raise NotTextError(f"document {texts + 1} has a zero byte, {ZERO_BYTE}")
                texts += 1
                if not count:
                    break
        except NotTextError as error:
            if texts:
                raise RunError(f"{flag} {file.path}: {error}; mend it or leave it out") from None
            raise
        if not texts:
            raise NotTextError("a file without text")
        return dataclasses.replace(file, texts=texts) if count else file


def _count(file: File) -> int:
    """How many documents a text holds.

    Raises:
        NotTextError: there is none between its markers.
    """
    texts = 0
    for parts in file.documents():
        collections.deque(parts, maxlen=0)
        texts += 1
    if not texts:
        raise NotTextError("a file without text")
    return texts


def _check_text(path: Path, *, whole: bool) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with open_file(path) as file:
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
