"""Files that a stranger may have written: read within bounds, or refused in one line.

The files of a checkpoint or of a tokenizer come from anywhere. They lie in their folder, links
followed, and are read no further than a bound.
"""

import json
from pathlib import Path
from typing import Any

from jaxkern.lm.config import RunError

LARGE = 2**29
"""Bytes that a tokenizer's vocabulary may have."""

_SMALL = 2**24  # of settings and of an index


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a file of a folder; ``None`` if it has none of this name."""
    try:
        root, path = folder.resolve(), folder / name
        roots = [root]
        if root.parent.name == "snapshots":  # a cache of Hugging Face's hub links to its blobs
            roots.append(root.parents[1] / "blobs")
        if not any(path.resolve().is_relative_to(each) for each in roots):
            raise RunError(f"{folder}: {name!r} lies outside of the folder")
        if path.is_file():
            return path
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # of names and links that no system has
        raise RunError(f"{folder}: {name!r} cannot be read ({error})") from None
    if there:
        raise RunError(f"{folder}: {name!r} is no file")
    return None


def read_text(path: Path, limit: int = _SMALL) -> str:
    """The text of a file, UTF-8 with or without a mark of byte order."""
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise RunError(f"{path} has more than {limit:,} bytes, and no such file needs them")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise RunError(f"{path} is not UTF-8 ({where})") from None


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of a folder; ``None`` if it has none of this name."""
    path = file_in(folder, name)
    return None if path is None else parse(read_text(path), path)


def parse(text: str, path: Path) -> dict[str, Any]:
    """The JSON object that a text of `path` is."""
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} cannot be read: it is no JSON object")
    return content
