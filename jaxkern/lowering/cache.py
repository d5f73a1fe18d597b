"""Lowered kernels kept on disk, so that a later process need not lower them again.

An entry is a file whose name is the digest of all that the kernel depends on. It is written beside
its place and renamed, so that processes never see half of one, and holds a digest of its content,
so that a damaged one is known and written again. As an entry holds code for the GPU, the folder is
the user's alone.

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
    """What the cache holds.

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
    """Where the cache is; ``None`` if it is switched off or the user has no home."""
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
    place = _usable("programs")
    if place is not None:
        _evict(place, _LARGEST_PROGRAMS)
    return place


def load(key: str) -> bytes | None:
    """The content of the entry of `key`, or ``None`` if there is no whole one."""
    if (place := _usable("kernels")) is None:
        return None
    path = place / (_digest(key) + _SUFFIX)
    content = None
    with contextlib.suppress(OSError):
        content = _unpacked(path.read_bytes())
        os.utime(path)
    _note(place, "m" if content is None else "h")
    return content


def store(key: str, content: bytes) -> None:
    """Keep `content` under `key`; does nothing where it cannot be written."""
    if (place := _usable("kernels")) is None:
        return
    packed = b"".join((_MAGIC, hashlib.sha256(content).digest(), content))
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=place, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
            os.replace(temporary, place / (_digest(key) + _SUFFIX))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _evict(place, _LARGEST)


def summary() -> Summary:
    """What the cache holds now."""
    if (place := _usable("kernels")) is None:
        return Summary(folder())
    sizes = [size for _, size, _ in _entries(place)]
    compiled = _usable("programs")
    uses = b""
    with contextlib.suppress(OSError):
        uses = (place / _USES).read_bytes()
    return Summary(
        folder=folder(),
        entries=len(sizes),
        size=sum(sizes),
        hits=uses.count(b"h"),
        misses=uses.count(b"m"),
        programs=sum(size for _, size, _ in _entries(compiled)) if compiled else 0,
    )


def empty() -> int:
    """Remove all kernels and programs; how many there were."""
    count = 0
    for room in ("kernels", "programs"):
        if (place := _usable(room)) is not None:
            for path, _, _ in list(_entries(place)):
                with contextlib.suppress(OSError):
                    path.unlink()
                    count += 1
            (place / _USES).unlink(missing_ok=True)
    return count


def _usable(room: str) -> Path | None:
    """A folder of the cache, made if need be; ``None`` where it cannot or must not be used."""
    root = folder()
    if root is None:
        return None
    place = root / room
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        unsafe = next(filter(None, map(_unsafe, (root, place))), None)
    except OSError:
        return None
    if unsafe is not None:
        _warn_once(unsafe)
        return None
    return place


def _unsafe(path: Path) -> str | None:
    """Why somebody else may write to the folder `path`."""
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
    """The content of a whole entry."""
    start = len(_MAGIC)
    digest, content = packed[start : start + 32], packed[start + 32 :]
    whole = packed.startswith(_MAGIC) and hashlib.sha256(content).digest() == digest
    return content if whole else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _entries(place: Path) -> Iterator[tuple[Path, int, float]]:
    """Each file's path, size and time of last use, also of what a writer that died has left."""
    for path in place.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it
            about = path.stat()
            if path.name != _USES and stat.S_ISREG(about.st_mode):
                yield path, about.st_size, max(about.st_mtime, about.st_atime)


def _evict(place: Path, largest: int) -> None:
    """Remove what was not used for longest, beyond `largest` bytes."""
    entries = sorted(_entries(place), key=lambda entry: entry[2])
    total = sum(size for _, size, _ in entries)
    if total <= largest:
        return
    for path, size, _ in entries:
        if total <= _LEFT_AFTER_EVICTION * largest:
            break
        path.unlink(missing_ok=True)
        total -= size


def _note(place: Path, use: str) -> None:
    with contextlib.suppress(OSError):
        path = place / _USES
        with path.open("a") as file:
            if file.tell() >= _MOST_USES:
                file.truncate(0)
            file.write(use)
