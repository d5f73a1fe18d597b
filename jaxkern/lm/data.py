"""Text files -> two packed files of bytes, memory-mapped -> batches.

Every document is preceded by a zero byte, which text does not contain: it separates documents in
training and starts the prompt in sampling. Documents are split into training and validation by a
hash of their path below the folder that was named, so that the same corpus is split alike on every
machine and adding a file moves no other. Batches are windows at random positions, drawn by a
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
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Document:
    name: str  # path below the folder that was named, with forward slashes
    path: Path


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The packed corpus: uint8 arrays, memory-mapped, and what is known about them."""

    train: np.ndarray
    validation: np.ndarray
    info: dict

    def describe(self) -> str:
        info = self.info
        text = (
            f"{info['documents']:,} files: {len(self.train):,} bytes to train on, "
            f"{len(self.validation):,} held out"
        )
        if info["split"] == "by position":
            text += " (one file: its end is held out)"
        if info["skipped"]:
            text += f"; {info['skipped']:,} files that are not text were skipped"
        return text


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
    documents, skipped = _find_documents(paths)
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = _split(documents)
    _pack(train, folder / "train.bin")
    if validation:
        _pack(validation, folder / "validation.bin")
    else:
        _cut_end(folder / "train.bin", folder / "validation.bin")
    info = {
        "paths": [str(Path(path).resolve()) for path in paths] or ["standard library"],
        "documents": len(documents),
        "skipped": skipped,
        "split": "by file" if validation else "by position",
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


def _find_documents(paths: tuple[str, ...]) -> tuple[list[Document], int]:
    """The documents below the named paths in a fixed order, and how many files are not text."""
    documents: dict[Path, Document] = {}
    skipped = 0
    for root in [Path(path) for path in paths] or [standard_library()]:
        if not root.exists():
            raise RunError(f"--data {root}: no such file or folder")
        if root.is_dir():
            for path in _walk(root, only_python=not paths):
                if _not_text(path):
                    skipped += 1
                else:
                    document = Document(path.relative_to(root).as_posix(), path)
                    documents.setdefault(path.resolve(), document)
        else:
            reason = _not_text(root)
            if reason:
                raise RunError(f"--data {root}: {reason}; give text files or folders of them")
            documents.setdefault(root.resolve(), Document(root.name, root))
    if not documents:
        where = " ".join(paths) or str(standard_library())
        passed = f" ({skipped} files there are empty or not text)" if skipped else ""
        raise RunError(f"no text to train on in {where}{passed}; give text files to --data")
    return sorted(documents.values(), key=lambda d: (d.name, str(d.path))), skipped


def _walk(root: Path, *, only_python: bool) -> Iterator[Path]:
    avoided = _SKIPPED_FOLDERS | (_SKIPPED_IN_STDLIB if only_python else set())
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in avoided and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            hidden = file.startswith(".")
            if not hidden and path.is_file() and (path.suffix == ".py" or not only_python):
                yield path


def _not_text(path: Path) -> str | None:
    """Why a file is no training text, or None."""
    if not path.is_file():
        return "not a regular file"
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                decoder.decode(chunk)
                if b"\0" in chunk:
                    return "a binary file (it has zero bytes)"
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "a binary file (it is not UTF-8 text)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if size else "an empty file"


def _split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and validation documents; validation is empty if there is but one document."""
    if len(documents) == 1:
        return documents, []

    def place(document: Document) -> float:
        digest = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    ordered = sorted(documents, key=place)
    held_out = sum(place(document) < VALIDATION_FRACTION for document in documents)
    held_out = min(max(held_out, 1), len(documents) - 1)
    validation = {document.path for document in ordered[:held_out]}
    train = [document for document in documents if document.path not in validation]
    return train, [document for document in documents if document.path in validation]


def _pack(documents: Iterable[Document], path: Path) -> None:
    with open(path, "wb") as out:
        for document in documents:
            out.write(bytes([SEPARATOR]))
            with open(document.path, "rb") as file:
                shutil.copyfileobj(file, out, _CHUNK)


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
