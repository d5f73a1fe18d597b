"""Plants the faults of tests/faults.toml one at a time in a copy, and says which tests find them.

    python -m tests.faults                    the default suite's files that concern each fault
    python -m tests.faults --suite all        with the exhaustive tests of these files
    python -m tests.faults --only selective   faults whose file or sentence has this text

A fault is one that somebody might write: a sign, an end of a chunk that is off by one, a sum over
devices left out. A suite is worth its time by what it finds of them: the default one at least 28 of
30, the exhaustive one all.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("faults.toml")
COPIED = ("bench", "jaxkern", "tests", "pyproject.toml", ".test_durations")
SUITES = {"default": "not exhaustive", "exhaustive": "exhaustive", "all": ""}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
      file: of the package.
      before: text that the file has once.
      after: what stands there in its place.
      breaks: what goes wrong.
      tests: the files of tests that concern it.
    """

    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {self.before!r} {text.count(self.before)} times")
        return text.replace(self.before, self.after)


def table() -> list[Fault]:
    """The committed faults."""
    rows = tomllib.loads(TABLE.read_text())["fault"]
    return [Fault(**row | {"tests": tuple(row["tests"])}) for row in rows]


def copy(folder: Path) -> None:
    """Copies what tests need of the checkout."""
    for name in COPIED:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)


def found_by(fault: Fault, suite: str) -> str:
    """The first test that finds the fault, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        copy(folder)
        planted = folder / fault.file
        planted.write_text(fault.planted(planted.read_text()))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", SUITES[suite], *fault.tests]
        ran = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"JAXKERN_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": name},
            capture_output=True,
            text=True,
        )
        found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
        if ran.returncode not in (0, 1) or bool(found) != bool(ran.returncode):
            raise RuntimeError(f"{fault.file}: pytest ended with {ran.returncode}:\n{ran.stdout}")
        return found[0] if found else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, default="default")
    parser.add_argument("--only", default="", help="text in a fault's file or sentence")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (2)")
    options = parser.parse_args(arguments)
    faults = [f for f in table() if options.only in f"{f.file} {f.breaks}"]
    missed = 0

    def attempt(fault: Fault) -> tuple[Fault, str, float]:
        started = time.monotonic()
        return fault, found_by(fault, options.suite), time.monotonic() - started

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for fault, by, seconds in pool.map(attempt, faults):
            missed += not by
            print(f"{seconds:5.0f} s  {fault.file}: {fault.breaks}", flush=True)
            print(f"         {f'found by {by}' if by else 'NOT FOUND'}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found by the {options.suite} tests")
    return missed > (len(faults) // 15 if options.suite == "default" else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
