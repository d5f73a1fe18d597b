"""Files of documents, divided between the shards that several processes write.

How they are divided depends on the files alone: the tokens and their order are the same for any
number of processes.
"""

import dataclasses
import mmap
import re
from collections.abc import Iterator, Sequence

from jaxkern.lm.config import RunError
from jaxkern.lm.data.documents import MARKER, File, NotTextError, row_groups

_SHARD_BYTES = 64 << 20  # of files, compressed where they are, at most
_LEAST_BYTES = 4 << 20  # for which another process, which starts in seconds, is worth it
_SHARDS = 256  # that data of a middling size has, so that all processes have work to the end
_READERS = 16  # parts of a compressed file, at most
# A document of a text is divided behind so many bytes, which hold the characters that tell whether
# it is held out.
_HEAD_BYTES = (4 << 20) + 4096
_WINDOW = 1 << 16  # bytes in which a cut between two words is looked for


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file, or a part of it as `File.documents` takes it.

    Attributes:
      size: in bytes on disk.
      start: the byte at which the document begins that this part of a text goes on with; ``None``
        where it begins with a document.
      unfinished: whether the next part goes on with its last document.
    """

    file: File
    begin: int
    end: int | None
    size: int
    start: int | None = None
    unfinished: bool = False


def divide(files: Sequence[File], flag: str = "--data") -> list[tuple[Piece, ...]]:
    """Files in groups of about as many bytes, those in between divided where they can be."""
    most = shard_bytes(sum(file.path.stat().st_size for file in files))
    groups: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    size = 0
    for file in files:
        try:
            pieces = [*_pieces(file, most)]
        except NotTextError as error:
            raise RunError(f"{flag} {file.path}: {error}") from None
        for piece in pieces:
            if group and size + piece.size > most:
                groups.append(tuple(group))
                group, size = [], 0
            group.append(piece)
            size += piece.size
    return [*groups, tuple(group)] if group else groups


def shard_bytes(total: int) -> int:
    """The bytes of files for a shard of so many."""
    return min(_SHARD_BYTES, max(_LEAST_BYTES, total // _SHARDS))


def _pieces(file: File, most: int) -> Iterator[Piece]:
    size = file.path.stat().st_size
    if size <= most or (file.kind == "text" and file.compressed):
        yield Piece(file, 0, None, size)
    elif file.kind == "text":
        yield from _text_pieces(file, most)
    elif file.compressed:  # read by each, which takes less time than to tokenise what is its own
        parts = min(_READERS, -(-size // most))
        for i in range(parts):
            yield Piece(file, i, parts, (size + i) // parts)
    elif file.kind == "lines":
        for begin in range(0, size, most):
            end = min(begin + most, size)
            yield Piece(file, begin, end, end - begin)
    else:
        for i, rows in enumerate(row_groups(file)):
            yield Piece(file, i, i + 1, rows)


def _text_pieces(file: File, most: int) -> Iterator[Piece]:
    """The parts of a text: they end behind markers, and in a long document between two words."""
    with (
        open(file.path, "rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        begin, start, unfinished = 0, 0, False
        while begin < len(content):
            inside = start if unfinished else None
            end, start = _end(content, begin, start, most, marked=file.suffix == ".txt")
            unfinished = start < end < len(content)
            yield Piece(file, begin, end, end - begin, inside, unfinished)
            begin = end


def _end(content: mmap.mmap, begin: int, start: int, most: int, *, marked: bool) -> tuple[int, int]:
    """Where a part of a text ends, and where the document begins that it ends in."""
    at = begin + most
    if marked and (last := content.rfind(MARKER, begin, at)) >= 0:
        start = last + len(MARKER)
    cut = max(at, start + _HEAD_BYTES)
    if cut >= len(content):
        cut = len(content)
    if marked:
        reach = cut + max(most, 2 * _WINDOW)
        found = content.find(MARKER, max(begin, at - len(MARKER)), reach)
        if found >= 0:
            return found + len(MARKER), found + len(MARKER)
    return _between_words(content, cut), start


def _between_words(content: mmap.mmap, at: int) -> int:
    """The first byte from one on before which tokenizers cut, else of a line or a character."""
    window = content[at : at + _WINDOW]
    for pattern in (rb"(?<=[!-~])(?= [!-~])", rb"(?<=\n)(?=[^\r\n])"):
        if found := re.search(pattern, window):
            return at + found.start()
    while at < len(content) and content[at] & 0xC0 == 0x80:  # inside a character
        at += 1
    return at
