"""Files of a run that are whole after a crash."""

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


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder, as they are after a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
