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

FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
*version_info*) echo {version} ;;
*ensurepip*) exit {no_venv} ;;
"-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo venv >>calls ;;
"-m pip")
    echo "${{@: -1}} by ${{@: -3:1}}" >>calls
    if [[ -f pip-fails ]]; then cat pip-fails; exit 1; fi ;;
"-m "* | .site/* | .make/*) echo "$@" >>calls ;;
esac
"""
TOOLS = "awk bash cat cksum cp df dirname grep make mkdir paste rm sort tail tee tr"


class Checkout:
    """A copy of what the set-up reads, and a PATH of its own."""

    def __init__(self, root):
        self.root, self.bin = root / "jaxkern", root / "bin"
        for name in ("pyproject.toml", "Makefile", ".make", "constraints", "jaxkern/__init__.py"):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, target)
        self.bin.mkdir()
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found, f"{tool} is needed by the Makefile or by its test"
            # Not a link: a test that replaces the tool would write through it.
            self.command(tool, f'#!/bin/bash\nexec {found} "$@"\n')
        self.calls = []

    def command(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, version, *, name="python3.12", folder=None, no_venv=0):
        return self.command(name, FAKE_PYTHON.format(version=version, no_venv=no_venv), folder)

    def driver(self, version):
        self.command("nvidia-smi", f"#!/bin/bash\necho {version}\n")

    def run(self, *command, path=(), **environment):
        """Runs in the copy; returns the exit status, stderr and what the interpreter was asked."""
        record = self.root / "calls"
        record.unlink(missing_ok=True)
        search = os.pathsep.join(map(str, [*path, self.bin]))
        done = subprocess.run(
            command,
            cwd=self.root,
            env={"PATH": search, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.calls = record.read_text().splitlines() if record.exists() else []
        assert "line " not in done.stderr, done.stderr  # bash reports its own errors so
        return done.returncode, done.stderr

    def setup(self, extras="lm", **options):
        return self.run(".make/setup", ".venv", "constraints/newest.txt", extras, **options)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    """A checkout with an interpreter and an environment made for the CPU."""
    checkout.python("3.12")
    status, _ = checkout.setup()
    assert status == 0
    assert checkout.calls == ["venv", ".[lm] by constraints/newest.txt"]
    return checkout


def test_setup_does_nothing_when_nothing_changed(ready):
    assert ready.setup() == (0, "")
    assert ready.calls == []


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints/newest.txt", "jaxkern/__init__.py"]
)
def test_setup_installs_again_when_an_input_changed(ready, name):
    path = ready.root / name
    path.write_text(path.read_text() + '\n# __version__ = "0.1.1"\n')
    assert ready.setup()[0] == 0
    assert ready.calls == [".[lm] by constraints/newest.txt"]


def test_setup_adds_extras_to_those_installed(ready):
    assert ready.setup("lint,test")[0] == 0
    assert ready.calls == [".[lint,lm,test] by constraints/newest.txt"]
    assert ready.setup("lm") == (0, "")
    assert ready.calls == []


def test_setup_rebuilds_for_another_python(ready):
    other = ready.python("3.13", name="other")
    status, said = ready.setup(PYTHON=str(other))
    assert status == 0
    assert "it holds Python 3.12" in said
    assert ready.calls == ["venv", ".[lm] by constraints/newest.txt"]


def test_setup_rebuilds_an_environment_whose_python_is_gone(ready):
    (ready.root / ".venv/bin/python").unlink()
    status, said = ready.setup()
    assert status == 0
    assert "no Python runs in it" in said
    assert ready.calls == ["venv", ".[lm] by constraints/newest.txt"]


def test_setup_adopts_an_environment_made_by_hand(checkout):
    checkout.python("3.12", name="python", folder=checkout.root / ".venv" / "bin")
    assert checkout.setup()[0] == 0
    assert checkout.calls == [".[lm] by constraints/newest.txt"]


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
    checkout.python("3.12")
    checkout.command("df", "#!/bin/bash\necho; echo a 0 0 99999999 0 /\n")
    if driver is not None:
        checkout.driver(driver)
    status, stderr = checkout.setup(EXTRA=extra)
    assert status == 0
    assert said in stderr
    assert len(stderr.splitlines()) == 2 + bool(said)
    assert checkout.calls == ["venv", f"{installed} by constraints/newest.txt"]


def test_setup_keeps_the_build_once_chosen(checkout):
    checkout.python("3.12")
    checkout.driver("580.95.05")
    checkout.command("df", "#!/bin/bash\necho; echo a 0 0 99999999 0 /\n")
    assert checkout.setup(EXTRA="cuda13")[0] == 0
    assert checkout.setup() == (0, "")
    (checkout.bin / "nvidia-smi").unlink()
    assert checkout.setup() == (0, "")
    status, said = checkout.setup(EXTRA="cpu")
    assert status == 0
    assert "it holds JAX for cuda13" in said
    assert checkout.calls == ["venv", ".[lm] by constraints/newest.txt"]


def test_setup_adds_cuda_when_a_gpu_appears(ready):
    ready.driver("550.54.14")
    ready.command("df", "#!/bin/bash\necho; echo a 0 0 99999999 0 /\n")
    assert ready.setup()[0] == 0
    assert ready.calls == [".[lm,cuda12] by constraints/newest.txt"]


REFUSED = [
    ({"name": "python3.12"}, {"EXTRA": "rocm"}, "EXTRA=rocm is not a build of JAX; use cuda12, "),
    (None, {}, "no Python 3.12 or newer on PATH (none runs); "),
    ({"version": "3.11", "name": "python3"}, {}, "on PATH ({path} is 3.11); install one"),
    ({"no_venv": 1}, {}, "{path} has no venv module; install it"),
    ({"version": "3.10", "name": "mine"}, {"PYTHON": "{path}"}, "{path} is Python 3.10; 3.12 or "),
    (None, {"PYTHON": "/nothing"}, "PYTHON=/nothing does not run"),
]


@pytest.mark.parametrize(("python", "environment", "said"), REFUSED)
def test_setup_refuses_in_one_line(checkout, python, environment, said):
    path = None if python is None else checkout.python(**{"version": "3.12"} | python)
    given = {name: value.format(path=path) for name, value in environment.items()}
    status, stderr = checkout.setup(**given)
    assert status == 1
    assert stderr.startswith("setup: error: ")
    assert said.format(path=path) in stderr
    assert stderr.count("\n") == 1


def test_setup_passes_over_a_shim_that_fails(checkout):
    shims = checkout.root / "shims"
    for name in ("python3.12", "python3"):
        checkout.command(name, "#!/bin/bash\necho not installed >&2; exit 127\n", shims)
    checkout.python("3.14", name="python3")
    status, said = checkout.setup(path=[shims])
    assert status == 0
    assert "creating .venv with Python 3.14" in said


@pytest.mark.parametrize(("driver", "least"), [(None, 2), ("550.54.14", 10)])
def test_setup_without_disk_space(checkout, driver, least):
    checkout.python("3.12")
    checkout.command("df", f"#!/bin/bash\necho; echo a 0 0 {least * 2**20 - 1} 0 /\n")
    if driver:
        checkout.driver(driver)
    status, said = checkout.setup()
    assert status == 1
    assert f".venv needs about {least} GiB of disk, {least - 1} GiB is free in" in said
    assert said.count("\n") == 1


def test_setup_tries_again_after_a_failed_installation(ready):
    (ready.root / "pip-fails").write_text(
        "Traceback (most recent call last):\nERROR: [Errno 28] No space left on device\n"
    )
    status, said = ready.setup("test")
    assert status == 1
    assert "Traceback" not in said
    assert "setup: error: the disk is full" in said
    status, said = ready.setup("lm")
    assert status == 1
    (ready.root / "pip-fails").write_text("ERROR: No matching distribution found for jax\n")
    status, said = ready.setup("lm")
    assert status == 1
    assert "No matching distribution found for jax\n" in said
    assert "the whole story is in .venv/install.log" in said
    (ready.root / "pip-fails").unlink()
    assert ready.setup("lm")[0] == 0
    assert ready.calls == [".[lm] by constraints/newest.txt"]


NEWEST, OLDEST = "constraints/newest.txt", "constraints/oldest.txt"
LINTED = ["-m ruff check .", "-m ruff format --check .", "-m pyright"]
AHEAD = [f".[lm,aot] by {NEWEST}", "-m bench aot --part", "-m bench collectives --part"]
TARGETS = {
    "train": ("--steps 50", ["-m jaxkern train --steps 50"]),
    "bench": ("--help", ["-m bench --help"]),
    "docs": ("", [f".[docs,lm] by {NEWEST}", ".site/pages.py"]),
    "trial": ("--mode x64", [".make/trial.py --mode x64"]),
    "faults": ("--jobs 1", [f".[docs,lint,lm,test] by {NEWEST}", "-m tests.faults --jobs 1"]),
    "aot": ("", ["venv", *AHEAD]),
    "matrix": (
        "--write",
        [
            *("venv", AHEAD[0], "-m bench aot --write", "-m bench collectives"),
            *("venv", f".[lm,aot] by {OLDEST}", "-m bench aot --write"),
        ],
    ),
    "test": ("-x", [f".[lint,lm,test] by {NEWEST}", *LINTED, "-m pytest -n 2 -x"]),
    "smoke": ("", ["venv", f".[test] by {OLDEST}", "-m pytest -n 2 -m smoke"]),
    "eighth": (
        "",
        [f".[docs,lint,lm,test] by {NEWEST}", "-m pytest -n 2 -m exhaustive --splits 8 --group 4"],
    ),
    "test-all": (
        "",
        [
            *(f".[docs,lm] by {NEWEST}", ".site/pages.py"),
            *(f".[docs,lint,lm,test] by {NEWEST}", *LINTED),
            *("venv", f".[test] by {OLDEST}", "venv", *AHEAD),
            *("-m pytest -n 2 -m ", "-m pytest -n 2 -m not bench"),
        ],
    ),
}


@pytest.mark.parametrize("target", TARGETS)
def test_make_runs_a_target_in_its_environment(ready, target):
    """The commit is the 11th on main, so that CI runs the fourth eighth."""
    arguments, calls = TARGETS[target]
    ready.command("git", "#!/bin/bash\necho 11\n")
    assert ready.run("make", target, f"ARGS={arguments}")[0] == 0
    algorithm = " --splitting-algorithm least_duration"
    assert [call.replace(algorithm, "") for call in ready.calls] == calls


def test_make_aot_is_for_the_cpu_wherever_it_runs(checkout):
    checkout.python("3.12")
    checkout.driver("570.86.15")
    assert checkout.run("make", "aot")[0] == 0
    assert checkout.calls == ["venv", *AHEAD]


def test_make_environments_makes_those_that_ci_needs(ready):
    assert ready.run("make", "environments")[0] == 0
    made = [call for call in ready.calls if call.startswith(".[")]
    wanted = ".[docs,lint,lm,test]", ".[lm,aot]"
    assert sorted(made) == [*(f"{w} by {NEWEST}" for w in wanted), f".[test] by {OLDEST}"]


def test_make_test_runs_compiled_kernels_on_a_gpu(ready):
    ready.driver("550.54.14")
    ready.command("df", "#!/bin/bash\necho; echo a 0 0 99999999 0 /\n")
    assert ready.run("make", "test")[0] == 0
    assert ready.calls[0] == f".[lint,lm,test,cuda12] by {NEWEST}"
    assert ready.calls[-1] == "-m pytest -m gpu"


def test_make_alone_explains_itself(checkout):
    assert checkout.run("make") == (0, "")
    done = subprocess.run(["make"], cwd=checkout.root, capture_output=True, text=True, check=True)
    for target in TARGETS:
        assert f"make {target} " in done.stdout


def test_make_stops_when_the_setup_fails(checkout):
    status, said = checkout.run("make", "train")
    assert status == 2
    assert said.startswith("setup: error: no Python 3.12 or newer")
    assert checkout.calls == []
