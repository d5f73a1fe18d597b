"""Lowered kernels kept on disk, so that a later process need not lower them again.

An entry is a file whose name is the digest of all that the kernel depends on. It is written under
another name and then renamed, so that no process sees half of one. It holds a digest of its
content, so that a damaged one is known and written again. As an entry holds code for the GPU, the
folder is the user's alone.

``JAXKERN_CACHE_DIR`` names the folder, by default ``jaxkern`` in the user's cache folder
(``XDG_CACHE_HOME`` or ``~/.cache``); ``JAXKERN_CACHE=0`` keeps nothing. Beyond 512 MiB the entries
that were not used for longest go. ``jaxkern train`` has XLA keep its compiled programs beside them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"jaxkern kernel 1\n"
_SUFFIX = ".kernel"
_LARGEST = 512 * 2**20
_LARGEST_PROGRAMS = 4 * 2**30
_LEFT_AFTER_EVICTION = 0.8
_USES = "uses"
"""A file with a letter for each look-up: "h" of an entry that was there, "m" of one that was not.
Letters are appended one at a time, which needs no lock."""
_MOST_USES = 2**20
_OFF = ("0", "false", "no", "off")


class UnsafeCacheWarning(UserWarning):
    """The cache's folder is not the user's alone, and is not used."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Contents of the cache.

    Attributes:
      folder: where it is; ``None`` if it is switched off.
      entries: kernels.
      size: bytes of them.
      hits, misses: look-ups that found a kernel, and that did not.
      programs: bytes of XLA's compiled programs.
    """

    folder: Path | None
    entries: int = 0
    size: int = 0
    hits: int = 0
    misses: int = 0
    programs: int = 0


def folder() -> Path | None:
    """The folder of the cache; ``None`` if it is switched off or the user has no home."""
    if os.environ.get("JAXKERN_CACHE", "").strip().lower() in _OFF:
        return None
    if named := os.environ.get("JAXKERN_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return caches / "jaxkern"


def programs() -> Path | None:
    """The folder for XLA's compiled programs; ``None`` where there is none to be used."""
    if (path := _usable("programs")) is not None:
        _evict(path, _LARGEST_PROGRAMS)
    return path


def load(key: str) -> bytes | None:
    """Reads the content of the entry of `key`; ``None`` if there is no whole one."""
    if (kernels := _usable("kernels")) is None:
        return None
    path = kernels / (_digest(key) + _SUFFIX)
    content = None
    with contextlib.suppress(OSError):
        content = _unpacked(path.read_bytes())
        os.utime(path)
    _note(kernels, "m" if content is None else "h")
    return content


def store(key: str, content: bytes) -> None:
    """Keeps `content` under `key`; does nothing where it cannot be written."""
    if (kernels := _usable("kernels")) is None:
        return
    packed = b"".join((_MAGIC, hashlib.sha256(content).digest(), content))
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=kernels, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
            os.replace(temporary, kernels / (_digest(key) + _SUFFIX))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _evict(kernels, _LARGEST)


def summary() -> Summary:
    """Counts what the cache holds now."""
    if (kernels := _usable("kernels")) is None:
        return Summary(folder())
    sizes = [size for _, size, _ in _entries(kernels)]
    compiled = _usable("programs")
    uses = b""
    with contextlib.suppress(OSError):
        uses = (kernels / _USES).read_bytes()
    return Summary(
        folder=folder(),
        entries=len(sizes),
        size=sum(sizes),
        hits=uses.count(b"h"),
        misses=uses.count(b"m"),
        programs=sum(size for _, size, _ in _entries(compiled)) if compiled else 0,
    )


def empty() -> int:
    """Removes all kernels and programs, and says how many there were."""
    count = 0
    for name in ("kernels", "programs"):
        if (part := _usable(name)) is not None:
            for path, _, _ in list(_entries(part)):
                with contextlib.suppress(OSError):
                    path.unlink()
                    count += 1
            (part / _USES).unlink(missing_ok=True)
    return count


def _usable(name: str) -> Path | None:
    """Gives a folder of the cache, made if need be; ``None`` where it must not be used."""
    root = folder()
    if root is None:
        return None
    path = root / name
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        unsafe = _unsafe(root) or _unsafe(path)
    except OSError:
        return None
    if unsafe is not None:
        _warn_once(unsafe)
        return None
    return path


def _unsafe(path: Path) -> str | None:
    """Says why somebody else may write to the folder `path`; ``None`` if nobody may."""
    about = path.stat()
    if about.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if stat.S_IMODE(about.st_mode) & 0o022:
        return f"{path} can be written to by other users"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}: kernels are neither read from it nor kept there. Run chmod 700 on it, or name "
        "another folder by JAXKERN_CACHE_DIR",
        UnsafeCacheWarning,
        stacklevel=2,
    )


def _unpacked(packed: bytes) -> bytes | None:
    """Takes the content out of an entry; ``None`` if the entry is damaged."""
    start = len(_MAGIC)
    digest, content = packed[start : start + 32], packed[start + 32 :]
    whole = packed.startswith(_MAGIC) and hashlib.sha256(content).digest() == digest
    return content if whole else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _entries(path: Path) -> Iterator[tuple[Path, int, float]]:
    """Lists each file, its size and its last use; also what a writer that died has left."""
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it
            about = file.stat()
            if file.name != _USES and stat.S_ISREG(about.st_mode):
                yield file, about.st_size, max(about.st_mtime, about.st_atime)


def _evict(path: Path, largest: int) -> None:
    """Removes what was not used for longest, beyond `largest` bytes."""
    entries = sorted(_entries(path), key=lambda entry: entry[2])
    total = sum(size for _, size, _ in entries)
    if total <= largest:
        return
    for file, size, _ in entries:
        if total <= _LEFT_AFTER_EVICTION * largest:
            break
        file.unlink(missing_ok=True)
        total -= size


def _note(path: Path, use: str) -> None:
    """Appends a look-up to the file of uses."""
    with contextlib.suppress(OSError), (path / _USES).open("a") as file:
        if file.tell() >= _MOST_USES:
            file.truncate(0)
        file.write(use)
