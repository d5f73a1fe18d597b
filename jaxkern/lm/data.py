"""Text files -> two packed files of bytes, memory-mapped -> batches.

Every document is preceded by a zero byte, which text does not contain: it separates documents in
training and starts the prompt in sampling. Documents are split into training and validation by a
hash of their path below the folder that was named, so that the same corpus is split alike on every
machine and adding a file moves no other. A file of JSON Lines holds a document in each line, its
"text", which is named by the file and the line. Batches are windows at random positions, drawn by a
counter-based generator from (seed, step) alone: any step's batch can be had without those before.
"""

import codecs
import dataclasses
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxkern.lm.config import RunError

SEPARATOR = 0
VALIDATION_FRACTION = 0.05
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# The standard library's own tests hold much deliberately odd text.
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test"}
_JSON_LINES = {".jsonl", ".ndjson"}
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class File:
    """A file of text, which is one document, or of JSON Lines, each of which is one."""

    name: str  # path below the folder that was named, with forward slashes
    path: Path
    texts: int | None = None  # of a file of JSON Lines: how many it holds

    def names(self) -> Iterator[str]:
        """The names of its documents, by which they are split."""
        if self.texts is None:
            yield self.name
        else:
            yield from (f"{self.name}:{i}" for i in range(self.texts))

    def contents(self) -> Iterator[Iterable[bytes]]:
        """Yields the bytes of its documents, in parts."""
        if self.texts is None:
            with open(self.path, "rb") as file:
                yield iter(lambda: file.read(_CHUNK), b"")
        else:
            yield from ([text] for text in _json_texts(self.path))


class _NotTextError(Exception):
    """Why a file is no training text."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The packed corpus: uint8 arrays, memory-mapped, and what is known about them."""

    train: np.ndarray
    validation: np.ndarray
    info: dict

    def describe(self) -> str:
        info = self.info
        documents, skipped = info["documents"], info["skipped"]
        files = info.get("files", documents)
        text = _counted(files, "file")
        if documents != files:
            text += f" with {_counted(documents, 'document')}"
        text += f": {len(self.train):,} bytes to train on, {len(self.validation):,} held out"
        if info["split"] == "by position":
            text += f" ({'one file: ' if files == 1 else ''}its end is held out)"
        if skipped:
            text += f"; {_counted(skipped, 'file')} without readable text skipped"
        return text


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def build_corpus(paths: tuple[str, ...], folder: Path) -> Corpus:
    """Read text files, split them, and pack them into `folder`.

    Args:
        paths: files or folders; empty for the sources of Python's standard library.
        folder: where train.bin, validation.bin and corpus.json are written.

    Raises:
        RunError: if a path is missing, a named file is not text, or there is nothing to read.
    """
    files, skipped = _find_files(paths)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = _held_out(files)
    documents = _pack(files, held_out, folder)
    if held_out is None:
        _cut_end(folder / "train.bin", folder / "validation.bin")
    info = {
        "paths": [str(Path(path).resolve()) for path in paths] or ["standard library"],
        "files": len(files),
        "documents": documents,
        "skipped": skipped,
        "split": "by position" if held_out is None else "by document",
        "fingerprint": _fingerprint(folder),
    }
    write_atomically(folder / "corpus.json", json.dumps(info, indent=2) + "\n")
    return _map(folder, info)


def open_corpus(folder: Path) -> Corpus:
    """Open a packed corpus again, checking that its bytes are those that were written.

    Raises:
        RunError: if a file is missing or its content has changed.
    """
    try:
        info = json.loads((folder / "corpus.json").read_text())
        intact = _fingerprint(folder) == info["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise RunError(
            f"the packed data in {folder} is missing or has changed since the run began; "
            "start a new run with another --out"
        )
    return _map(folder, info)


def check_length(corpus: Corpus, seq_len: int) -> None:
    """Refuse a corpus that has not one window of seq_len + 1 bytes in each part."""
    for name in ("train", "validation"):
        size = len(getattr(corpus, name))
        if size < seq_len + 1:
            word = {"train": "training"}.get(name, name)
            raise RunError(
                f"the {word} data has {size} bytes, fewer than the {seq_len + 1} that "
                f"--seq-len {seq_len} needs; lower --seq-len or give more text to --data"
            )


def train_batch(data: np.ndarray, *, batch_size: int, seq_len: int, seed: int, step: int):
    """The windows of one step: a pure function of the data, the seed and the step.

    Returns:
        (batch_size, seq_len + 1) uint8: inputs are [:, :-1], targets [:, 1:].
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(data) - seq_len, size=batch_size)
    return np.stack([data[start : start + seq_len + 1] for start in starts])


def validation_batches(
    data: np.ndarray, *, batch_size: int, seq_len: int, batches: int
) -> Iterator[np.ndarray]:
    """Up to `batches` fixed batches of windows, spread evenly over the data."""
    count = batch_size * max(1, min(batches, (len(data) - 1) // (seq_len * batch_size)))
    starts = np.linspace(0, len(data) - seq_len - 1, count).astype(np.int64)
    for rows in starts.reshape(-1, batch_size):
        yield np.stack([data[start : start + seq_len + 1] for start in rows])


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _find_files(paths: tuple[str, ...]) -> tuple[list[File], int]:
    """The files of text below the named paths in a fixed order, and how many others there are."""
    files: dict[Path, File] = {}
    skipped = 0
    for root in [Path(path) for path in paths] or [standard_library()]:
        if not root.exists():
            raise RunError(f"--data {root}: no such file or folder")
        named = not root.is_dir()
        for path in [root] if named else _walk(root, only_python=not paths):
            try:
                if named and root.suffix.lower() == ".json":
                    raise _NotTextError(
                        "JSON, whose syntax would be trained on (rename it to .txt if that is "
                        'meant, or write a .jsonl file with the "text" of a document in each line)'
                    )
                texts = _texts(path)
            except _NotTextError as error:
                if named:
                    remedy = "give text files or folders of them"
                    raise RunError(f"--data {root}: {error}; {remedy}") from None
                skipped += 1
            else:
                name = root.name if named else path.relative_to(root).as_posix()
                files.setdefault(path.resolve(), File(name, path, texts))
    if not files:
        where = " ".join(paths) or str(standard_library())
        passed = f" ({_counted(skipped, 'file')} there without readable text)" if skipped else ""
        raise RunError(f"no text to train on in {where}{passed}; give text files to --data")
    return sorted(files.values(), key=lambda f: (f.name, str(f.path))), skipped


def _walk(root: Path, *, only_python: bool) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        if not only_python:
            raise RunError(f"--data {error.filename}: cannot be read ({error.strerror})")

    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = sorted(f for f in folders if f not in avoided and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            hidden = file.startswith(".")
            if not hidden and path.is_file() and (path.suffix == ".py" or not only_python):
                yield path


def _texts(path: Path) -> int | None:
    """How many texts a file of JSON Lines holds; ``None`` for a file that is one text.

    Raises:
        _NotTextError: if it is neither.
        RunError: if some lines of JSON have text and another does not.
    """
    if not path.is_file():
        raise _NotTextError("not a regular file")
    try:
        if path.suffix.lower() in _JSON_LINES:
            count = 0
            try:
                for _ in _json_texts(path):
                    count += 1
            except _NotTextError as error:
                if count:
                    raise RunError(f"--data {path}: {error}") from None
                raise
            if not count:
                raise _NotTextError("a file without text")
            return count
        _check_text(path)
    except OSError as error:
        raise _NotTextError(f"cannot be read ({error.strerror})") from None


def _check_text(path: Path) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                decoder.decode(chunk)
                if b"\0" in chunk:
                    raise _NotTextError("a binary file (it has zero bytes)")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _NotTextError(
            "a binary file (it is not UTF-8 text; iconv -t UTF-8 rewrites other encodings)"
        ) from None
    if not size:
        raise _NotTextError("an empty file")


def _json_texts(path: Path) -> Iterator[bytes]:
    """The "text" of each line of a file of JSON Lines, those that are empty left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _NotTextError(f"line {number} is not JSON ({error})") from None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                fields = ", ".join(map(str, record)) if isinstance(record, dict) else line[:40]
                raise _NotTextError(
                    f'line {number} has no "text" of a document, but {fields!r}; rename that field '
                    "to text"
                )
            try:
                content = text.encode()
            except UnicodeEncodeError as error:
                raise _NotTextError(f"line {number} is not Unicode text ({error.reason})") from None
            if b"\0" in content:
                raise _NotTextError(f"line {number} has a zero byte in its text")
            if content:
                yield content


def _fraction(name: str) -> float:
    """Hashes a document's name to a number from 0 to 1, which decides whether it is held out."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _held_out(files: list[File]) -> float | None:
    """The number below which a document is for validation: at least one is, and not all are.

    ``None`` if no such number divides them: there is one document, or all have one name.
    """
    fractions = np.fromiter(
        (_fraction(name) for file in files for name in file.names()), np.float64
    )
    least, largest = fractions.min(), fractions.max()
    if least == largest:
        return None
    return float(min(max(VALIDATION_FRACTION, np.nextafter(least, 1)), largest))


def _pack(files: Iterable[File], held_out: float | None, folder: Path) -> int:
    """Write train.bin and validation.bin; how many documents they hold."""
    count = 0
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as other:
        for file in files:
            for name, content in zip(file.names(), file.contents(), strict=True):
                held = held_out is not None and _fraction(name) < held_out
                out = other if held else train
                out.write(bytes([SEPARATOR]))
                out.writelines(content)
                count += 1
    return count


def _cut_end(train: Path, validation: Path) -> None:
    """Move the end of the only document to the validation file."""
    size = train.stat().st_size
    kept = size - max(1, int(size * VALIDATION_FRACTION))
    with open(train, "r+b") as file, open(validation, "wb") as out:
        file.seek(kept)
        shutil.copyfileobj(file, out, _CHUNK)
        file.truncate(kept)


def _fingerprint(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in ("train.bin", "validation.bin"):
        digest.update((folder / name).stat().st_size.to_bytes(8, "big"))
        with open(folder / name, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _map(folder: Path, info: dict) -> Corpus:
    train, validation = (
        np.memmap(folder / name, dtype=np.uint8, mode="r")
        for name in ("train.bin", "validation.bin")
    )
    return Corpus(train, validation, info)
