"""Small files of a run, written whole."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
