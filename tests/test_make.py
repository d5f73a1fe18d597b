"""The Makefile: environments that set themselves up, and what each target runs.

The set-up runs in a copy of the repository, on a PATH that holds only the tools it needs and an
interpreter that writes down what it is asked to do.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FAKE_PYTHON = """case "$1 $2" in
*version_info*) echo {version} ;;
*ensurepip*) exit {no_venv} ;;
"-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo venv >>calls ;;
"-m pip")
    echo "${{@: -1}} by ${{@: -3:1}}" >>calls
    if [[ -f pip-fails ]]; then cat pip-fails; exit 1; fi ;;
"-m "* | .site/* | .make/*) echo "$@" >>calls ;;
esac"""
TOOLS = "awk bash cat cksum cp dirname grep make mkdir paste rm sort tail tee tr"
INSTALLED = ".[lm] by constraints/newest.txt"


class Checkout:
    """A copy of what the set-up reads, and a PATH of its own."""

    def __init__(self, root):
        self.root, self.bin = root / "jaxkern", root / "bin"
        for name in ("pyproject.toml", "Makefile", ".make", "constraints", "jaxkern/__init__.py"):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, target)
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found, f"{tool} is needed by the Makefile or by its test"
            # Not a link: a test that replaces the tool would write through it.
            self.command(tool, f'exec {found} "$@"')
        self.has(gib=99)
        self.calls = []

    def command(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def has(self, python=None, *, name="python3.12", no_venv=0, folder=None, driver=None, gib=None):
        """Gives it a Python of this version, an NVIDIA driver, or (just not quite) so much disk."""
        if python:
            self.command(name, FAKE_PYTHON.format(version=python, no_venv=no_venv), folder)
        if driver:
            self.command("nvidia-smi", f"echo {driver}")
        if gib:
            self.command("df", f"echo; echo a 0 0 {gib * 2**20 - 1} 0 /")

    def run(self, *command, status=0, path=(), **environment):
        """Runs in the copy; `calls` is what the interpreter was asked to do."""
        record = self.root / "calls"
        record.unlink(missing_ok=True)
        done = subprocess.run(
            command,
            cwd=self.root,
            env={"PATH": os.pathsep.join(map(str, [*path, self.bin])), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.calls = record.read_text().splitlines() if record.exists() else []
        assert "line " not in done.stderr, done.stderr  # bash reports its own errors so
        assert done.returncode == status, done.stderr
        return done

    def setup(self, extras="lm", **options):
        """The set-up's output."""
        command = ".make/setup", ".venv", "constraints/newest.txt", extras
        return self.run(*command, **options).stderr


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    """A checkout with an interpreter and an environment made for the CPU."""
    checkout.has("3.12")
    checkout.setup()
    assert checkout.calls == ["venv", INSTALLED]
    return checkout


@pytest.mark.parametrize(
    ("changed", "calls"),
    [
        ("pyproject.toml", [INSTALLED]),
        ("constraints/newest.txt", [INSTALLED]),
        ("jaxkern/__init__.py", [INSTALLED]),
        ("Makefile", []),
    ],
)
def test_setup_installs_again_when_an_input_changed(ready, changed, calls):
    with (ready.root / changed).open("a") as file:
        file.write('\n# __version__ = "0.1.1"\n')
    assert bool(ready.setup()) == bool(calls)
    assert ready.calls == calls


def test_setup_adds_extras_to_those_installed(ready):
    ready.setup("lint,test")
    assert ready.calls == [".[lint,lm,test] by constraints/newest.txt"]
    assert ready.setup("lm") == ""
    assert ready.calls == []


def test_setup_rebuilds_for_another_python_and_where_it_is_gone(ready):
    ready.has("3.13", name="other")
    assert "it holds Python 3.12" in ready.setup(PYTHON=str(ready.bin / "other"))
    assert ready.calls == ["venv", INSTALLED]
    (ready.root / ".venv/bin/python").unlink()
    assert "no Python runs in it" in ready.setup()
    assert ready.calls == ["venv", INSTALLED]


def test_setup_adopts_an_environment_made_by_hand(checkout):
    checkout.has("3.12", name="python", folder=checkout.root / ".venv" / "bin")
    checkout.setup()
    assert checkout.calls == [INSTALLED]


@pytest.mark.parametrize(
    ("driver", "extra", "installed", "said"),
    [
        ("525.60.13", "", ".[lm,cuda12]", ""),
        ("580.95.05", "", ".[lm,cuda12]", ""),
        ("580.95.05", "cuda13", ".[lm,cuda13]", ""),
        ("580.95.05", "cpu", ".[lm]", ""),
        ("470.256.02", "", ".[lm]", "driver is 470, JAX needs 525 or newer; using JAX for the CPU"),
        ("NVIDIA-SMI has failed", "", ".[lm]", "finds no GPU; using JAX for the CPU"),
        ("550.54.14", "cuda13", ".[lm,cuda13]", "cuda13 needs NVIDIA driver 580 or newer"),
        (None, "cuda12", ".[lm,cuda12]", "nvidia-smi finds no GPU here"),
    ],
)
def test_setup_chooses_the_build_of_jax(checkout, driver, extra, installed, said):
    checkout.has("3.12", driver=driver)
    stderr = checkout.setup(EXTRA=extra)
    assert said in stderr
    assert len(stderr.splitlines()) == 2 + bool(said)
    assert checkout.calls == ["venv", f"{installed} by constraints/newest.txt"]


def test_setup_keeps_the_build_once_chosen(checkout):
    checkout.has("3.12", driver="580.95.05")
    checkout.setup(EXTRA="cuda13")
    assert checkout.setup() == ""
    (checkout.bin / "nvidia-smi").unlink()
    assert checkout.setup() == ""
    assert "it holds JAX for cuda13" in checkout.setup(EXTRA="cpu")
    assert checkout.calls == ["venv", INSTALLED]


DRIVEN = {"python": "3.12", "driver": "550.54.14"}


@pytest.mark.parametrize(
    ("having", "environment", "said"),
    [
        ({"python": "3.12"}, {"EXTRA": "rocm"}, "EXTRA=rocm is not a build of JAX; use cuda12, "),
        ({}, {}, "no Python 3.12 or newer on PATH (none runs); "),
        ({"python": "3.11", "name": "python3"}, {}, "on PATH (BIN/python3 is 3.11); install one"),
        ({"python": "3.12", "no_venv": 1}, {}, "BIN/python3.12 has no venv module; install it"),
        ({"python": "3.10", "name": "a"}, {"PYTHON": "BIN/a"}, "BIN/a is Python 3.10; 3.12 or "),
        ({}, {"PYTHON": "/nothing"}, "PYTHON=/nothing does not run"),
        ({"python": "3.12", "gib": 2}, {}, ".venv needs about 2 GiB of disk, 1 GiB is free in"),
        (DRIVEN | {"gib": 10}, {}, ".venv needs about 10 GiB of disk, 9 GiB is free in"),
    ],
)
def test_setup_refuses_in_one_line(checkout, having, environment, said):
    checkout.has(**having)
    in_bin = lambda text: text.replace("BIN", str(checkout.bin))
    given = {name: in_bin(value) for name, value in environment.items()}
    stderr = checkout.setup(status=1, **given)
    assert stderr.startswith("setup: error: ")
    assert in_bin(said) in stderr
    assert stderr.count("\n") == 1


def test_setup_passes_over_a_shim_that_fails(checkout):
    shims = checkout.root / "shims"
    for name in ("python3.12", "python3"):
        checkout.command(name, "echo not installed >&2; exit 127", shims)
    checkout.has("3.14", name="python3")
    assert "creating .venv with Python 3.14" in checkout.setup(path=[shims])


def test_setup_tries_again_after_a_failed_installation(ready):
    fails = ready.root / "pip-fails"
    fails.write_text(
        "Traceback (most recent call last):\nERROR: [Errno 28] No space left on device"
    )
    said = ready.setup("test", status=1)
    assert "Traceback" not in said
    assert "setup: error: the disk is full" in said
    fails.write_text("ERROR: No matching distribution found for jax\n")
    said = ready.setup("lm", status=1)
    assert "No matching distribution found for jax\n" in said
    assert "the whole story is in .venv/install.log" in said
    fails.unlink()
    ready.setup("lm")
    assert ready.calls == [INSTALLED]


NEWEST, OLDEST = "constraints/newest.txt", "constraints/oldest.txt"
LINTED = ["-m ruff check .", "-m ruff format --check .", "-m pyright"]
AHEAD = [f".[lm,aot] by {NEWEST}", "-m bench aot --part", "-m bench collectives --part"]
FULL = f".[docs,lint,lm,test] by {NEWEST}"
TARGETS = [
    ("train --steps 50", ["-m jaxkern train --steps 50"]),
    ("bench --help", ["-m bench --help"]),
    ("docs", [f".[docs,lm] by {NEWEST}", ".site/pages.py"]),
    ("trial --mode x64", [".make/trial.py --mode x64"]),
    ("faults --jobs 1", [FULL, "-m tests.faults --jobs 1"]),
    ("aot", ["venv", *AHEAD]),
    (
        "matrix --write",
        [
            *("venv", AHEAD[0], "-m bench aot --write", "-m bench collectives"),
            *("venv", f".[lm,aot] by {OLDEST}", "-m bench aot --write"),
        ],
    ),
    ("test -x", [f".[lint,lm,test] by {NEWEST}", *LINTED, "-m pytest -n 2 -x"]),
    ("smoke", ["venv", f".[test] by {OLDEST}", "-m pytest -n 2 -m smoke"]),
    ("eighth", [FULL, "-m pytest -n 2 -m exhaustive --splits 8 --group 4"]),
    (
        "test-all",
        [
            *(f".[docs,lm] by {NEWEST}", ".site/pages.py", FULL, *LINTED),
            *("venv", f".[test] by {OLDEST}", "venv", *AHEAD),
            *("-m pytest -n 2 -m ", "-m pytest -n 2 -m not bench"),
        ],
    ),
    ("environments", [FULL, "venv", f".[test] by {OLDEST}", "venv", AHEAD[0]]),
]


@pytest.mark.parametrize(("words", "calls"), TARGETS)
def test_make_runs_a_target_in_its_environment(ready, words, calls):
    """The commit is the 11th on main, so that CI runs the fourth eighth."""
    target, _, arguments = words.partition(" ")
    ready.command("git", "echo 11")
    ready.run("make", target, f"ARGS={arguments}")
    algorithm = " --splitting-algorithm least_duration"
    assert [call.replace(algorithm, "") for call in ready.calls] == calls


def test_make_on_a_gpu_runs_compiled_kernels_and_compiles_ahead_on_the_cpu(ready):
    ready.has(driver="570.86.15")
    ready.run("make", "test")
    assert ready.calls[0] == f".[lint,lm,test,cuda12] by {NEWEST}"
    assert ready.calls[-1] == "-m pytest -m gpu"
    ready.run("make", "aot")
    assert ready.calls == ["venv", *AHEAD]


def test_make_alone_explains_itself(checkout):
    told = checkout.run("make")
    assert told.stderr == ""
    for words, _ in TARGETS[:-1]:
        assert f"make {words.split()[0]} " in told.stdout


def test_make_stops_when_the_setup_fails(checkout):
    said = checkout.run("make", "train", status=2).stderr
    assert said.startswith("setup: error: no Python 3.12 or newer")
    assert checkout.calls == []
