"""The bytes of documents in two packed files, memory-mapped, and random windows of them.

Every document is preceded by a zero byte, which text does not contain: it separates documents in
training and starts the prompt in sampling. Documents are split into training and validation by a
hash of their path below the folder that was named, so that the same corpus is split alike on every
machine and adding a file moves no other. A document of JSON Lines or Parquet is named by the file
and its number. Where the documents cannot be divided so, or more than a quarter of the bytes would
be held out, as of two files, the end of all is held out.

Batches are windows at random positions, drawn by a counter-based generator from (seed, step) alone:
any step's batch can be had without those before.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxkern.lm.config import RunError
from jaxkern.lm.data.documents import File
from jaxkern.lm.data.files import write_atomically
from jaxkern.lm.data.sources import Skipped, counted, find_files, parse, refuse_nothing
from jaxkern.lm.data.tokenizer import SEPARATOR, Bytes

VALIDATION_FRACTION = 0.05
MOST_HELD_OUT = 0.25  # of the text, by whole documents
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The packed corpus: uint8 arrays, memory-mapped, and what is known about them."""

    train: np.ndarray
    validation: np.ndarray
    info: dict
    tokenizer = Bytes()
    tokens_per_byte = 1.0

    def describe(self) -> str:
        info = self.info
        documents = info["documents"]
        skipped = Skipped(info["skipped"], info.get("skipped_example", ""))
        files = info.get("files", documents)
        text = counted(files, "file")
        if documents != files:
            text += f" with {counted(documents, 'document')}"
        text += f": {len(self.train):,} bytes to train on, {len(self.validation):,} held out"
        if info["split"] == "by position":
            text += f" ({'one file: its' if files == 1 else 'their'} end is held out)"
        if skipped.count:
            text += f"; {skipped.describe('skipped')}"
        return text


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
    sizes = [(folder / name).stat().st_size for name in ("train.bin", "validation.bin")]
    by_position = held_out is None or sizes[1] > MOST_HELD_OUT * sum(sizes)
    if by_position:
        _cut_end(folder / "train.bin", folder / "validation.bin")
    info = {
        "paths": [str(Path(path).resolve()) for path in paths] or ["standard library"],
        "files": len(files),
        "documents": documents,
        "skipped": skipped.count,
        "skipped_example": skipped.example,
        "split": "by position" if by_position else "by document",
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
        info = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
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


def train_batch(
    data: np.ndarray,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    step: int,
    rows: np.ndarray | None = None,
):
    """The windows of one step: a pure function of the data, the seed and the step.

    Returns:
        (batch_size, seq_len + 1) uint8: inputs are [:, :-1], targets [:, 1:]. With `rows`, numbers
        of rows, only these.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(data) - seq_len, size=batch_size)
    starts = starts if rows is None else starts[rows]
    return np.stack([data[start : start + seq_len + 1] for start in starts])


def validation_batches(
    data: np.ndarray, *, batch_size: int, seq_len: int, batches: int
) -> Iterator[np.ndarray]:
    """Up to `batches` fixed batches of windows, spread evenly over the data."""
    count = batch_size * max(1, min(batches, (len(data) - 1) // (seq_len * batch_size)))
    starts = np.linspace(0, len(data) - seq_len - 1, count).astype(np.int64)
    for rows in starts.reshape(-1, batch_size):
        yield np.stack([data[start : start + seq_len + 1] for start in rows])


def _find_files(paths: tuple[str, ...]) -> tuple[list[File], Skipped]:
    """The files of text below the named paths in a fixed order, and the others there."""
    files: dict[tuple[Path, str], File] = {}
    skipped = Skipped()
    for source in parse(paths):
        found, others = find_files(source, count=True)
        skipped += others
        for file in found:
            files.setdefault(file.content, file)
    refuse_nothing([*files.values()], skipped, " ".join(paths))
    return sorted(files.values(), key=lambda f: (f.name, str(f.path), f.field)), skipped


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
            for name, content in zip(file.names(), file.documents(), strict=True):
                held = held_out is not None and _fraction(name) < held_out
                out = other if held else train
                out.write(bytes([SEPARATOR]))
                out.writelines(content)
                count += 1
    return count


def _cut_end(train: Path, validation: Path) -> None:
    """Hold out the end of all documents, those last that were held out whole."""
    with open(train, "ab") as out, open(validation, "rb") as file:
        shutil.copyfileobj(file, out, _CHUNK)
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
