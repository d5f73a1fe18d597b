"""A new user's first hour, from nothing: ``make trial``.

The source distribution and the wheel are built; the wheel is installed with its extras into a bare
environment of each Python. There, outside of the checkout and with every warning an error, run the
examples of the README, of the guides and of the docstrings, and the commands, under each of JAX's
modes, and the notebooks in its default one. Extras for NVIDIA's GPUs are resolved and not
installed: they are gigabytes.

    python .make/trial.py --python python3.13 --mode x64

It needs a package index, and a few minutes for each Python and mode.
"""

import argparse
import collections
import contextlib
import doctest
import hashlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "trial"
PYTHONS = ("python3.12", "python3.13")
MODES = {
    "default": {},
    "x64": {"JAX_ENABLE_X64": "1"},
    "leaks": {"JAX_CHECK_TRACER_LEAKS": "1"},
    "ranks": {"JAX_NUMPY_RANK_PROMOTION": "raise"},
}
RESOLVED = ("cuda12", "cuda13", "aot", "triton")
"""Extras that are not installed."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", help=f"interpreter {PYTHONS}; repeat for more")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeat for more (all)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return inside(options.inside)
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = build()
    failed = []
    for number, name in enumerate(options.python or PYTHONS):
        interpreter = found(name)
        if interpreter is None:
            if options.python:
                raise SystemExit(f"trial: {name} does not run")
            say(f"{name} does not run here: left out")
            continue
        python = install(interpreter, wheel, WORK / f"python-{number}")
        for mode in options.mode or MODES:
            started = time.monotonic()
            status = run_inside(python, MODES[mode], WORK / f"run-{number}-{mode}")
            verdict = "failed" if status else "passed"
            say(f"{name}, {mode}: {verdict}, {time.monotonic() - started:.0f} s")
            failed += [f"{name}, {mode}"] * bool(status)
    say(f"failed: {'; '.join(failed)}" if failed else "everything passed")
    return bool(failed)


def say(text: str) -> None:
    print(f"trial: {text}", flush=True)


def call(*command: object, **options: object) -> None:
    """Run a command, which is shown with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"trial: {' '.join(words)}\n{done.stdout}{done.stderr}")


def found(name: str) -> str | None:
    """The interpreter of that name, if it runs: a shim on the path may not."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        program = "import sys; print(sys.executable)"
        return subprocess.run(
            [name, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
    return None


def build() -> Path:
    """The wheel, made from the source distribution as an installer makes it."""
    tools, dist = WORK / "tools", WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    call(sys.executable, "-m", "venv", "--clear", tools)
    call(tools / "bin/python", "-m", "pip", "install", "--quiet", "build", "twine")
    call(tools / "bin/python", "-m", "build", "--outdir", dist, ROOT)
    call(tools / "bin/python", "-m", "twine", "check", "--strict", *dist.iterdir())
    (archive,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    if twice := packed_twice(archive):
        raise SystemExit(f"trial: {archive.name} holds files twice: {twice}")
    say(f"built {archive.name} and {wheel.name}")
    return wheel


def packed_twice(archive: Path) -> list[list[str]]:
    """Groups of files in an archive that have the same content, where there is some."""
    by_content = collections.defaultdict(list)
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            content = files.extractfile(member)
            text = content.read() if content else b""
            if text:
                by_content[hashlib.sha256(text).digest()].append(member.name)
    return [names for names in by_content.values() if len(names) > 1]


def install(interpreter: str, wheel: Path, folder: Path) -> Path:
    """The Python of a new environment that holds the wheel with its extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    here = ",".join(extra for extra in extras if extra not in RESOLVED)
    call(interpreter, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    call(*pip, f"{wheel}[{here}]")
    call(python, "-m", "pip", "check")
    for extra in RESOLVED:
        call(*pip, "--dry-run", f"{wheel}[{extra}]")
    say(f"installed {wheel.name}[{here}] for {interpreter}; {', '.join(RESOLVED)} can be")
    return python


def run_inside(python: Path, mode: dict[str, str], folder: Path) -> int:
    """Run :func:`inside` in an environment; -P keeps this file's folder from the path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "PYTHON"))}
    told = {"PYTHONWARNINGS": "error", "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", **mode}
    told["PATH"] = f"{python.parent}{os.pathsep}{clean['PATH']}"
    command = [python, "-P", __file__, "--inside", folder]
    return subprocess.run(command, cwd=folder, env=clean | told).returncode


def inside(folder: Path) -> int:
    """Everything once, in this process; returns the number of failures, and says what they are."""
    import jaxkern

    if Path(jaxkern.__file__).is_relative_to(ROOT / "jaxkern"):
        raise SystemExit(f"trial: {jaxkern.__file__} is the checkout's, not the installed one")
    documents = runpy.run_path(str(ROOT / "tests" / "documents.py"))
    failures = 0
    for name, step in steps(documents, folder):
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                step()
        except (Exception, SystemExit) as error:
            failures += 1
            last = "".join(traceback.format_exception(error))[-3000:]
            print(f"--- {name}\n{output.getvalue()[-2000:]}{last}", flush=True)
    return failures


def steps(documents: dict, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a user does: the commands, then the examples of documents and of docstrings."""
    (folder / "text").write_text("def main(): pass\n" * 200)
    small = ["--preset", "micro", "--data", "text", "--batch-size", "2", "--seq-len", "16"]
    run = documents["RUN"]
    for command in (
        ["train", *small, "--steps", "2", "--out", run],
        ["train", "--resume", "--steps", "3", "--out", run],
        ["sample", "--run", run, "--prompt", "def ", "--length", "4"],
        ["doctor"],
    ):
        yield f"jaxkern {' '.join(command)}", lambda command=command: shell("jaxkern", *command)
    for path in documents["DOCUMENTS"]:
        names = {"__name__": "example"}  # a page is read from its top
        for number, text in enumerate(documents["examples"](path)):
            code = compile(text, f"{path.name}[{number}]", "exec")
            yield code.co_filename, lambda code=code, names=names: exec(code, names)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if default_mode() else ():
        yield path.name, lambda path=path: shell(sys.executable, "-P", script(path, folder))
    for module in documents["modules"]():
        yield module, lambda module=module: examples_of(documents["docstrings"](module))


def default_mode() -> bool:
    return not any(os.environ.get(name) for mode in MODES.values() for name in mode)


def script(notebook: Path, folder: Path) -> str:
    """The code of a notebook as a program, which begins a process of its own as a kernel does."""
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    out = folder / f"{notebook.stem}.py"
    out.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    return str(out)


def shell(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


def examples_of(tests: Iterator[doctest.DocTest]) -> None:
    """Run docstrings' examples. What they print is the default mode's, and compared in it alone."""
    for test in tests:
        if not default_mode():
            source = "\n".join(e.source for e in test.examples if doctest.SKIP not in e.options)
            exec(compile(source, test.name, "exec"), dict(test.globs))
        elif doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed:
            raise AssertionError(test.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
