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
"-m "* | .site/* | tests/*) echo "$@" >>calls ;;
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


def test_setup_refuses_an_unknown_build(checkout):
    checkout.python("3.12")
    status, said = checkout.setup(EXTRA="rocm")
    assert status == 1
    assert said == "setup: error: EXTRA=rocm is not a build of JAX; use cuda12, cuda13 or cpu\n"


def test_setup_without_python(checkout):
    status, said = checkout.setup()
    assert status == 1
    assert said.startswith("setup: error: no Python 3.12 or newer on PATH (none runs); ")
    assert said.count("\n") == 1


def test_setup_with_only_an_old_python(checkout):
    path = checkout.python("3.11", name="python3")
    status, said = checkout.setup()
    assert status == 1
    assert f"no Python 3.12 or newer on PATH ({path} is 3.11); install one" in said
    assert said.count("\n") == 1


def test_setup_passes_over_a_shim_that_fails(checkout):
    shims = checkout.root / "shims"
    for name in ("python3.12", "python3"):
        checkout.command(name, "#!/bin/bash\necho not installed >&2; exit 127\n", shims)
    checkout.python("3.14", name="python3")
    status, said = checkout.setup(path=[shims])
    assert status == 0
    assert "creating .venv with Python 3.14" in said


@pytest.mark.parametrize(
    ("version", "said"),
    [("3.10", "is Python 3.10; 3.12 or newer is needed"), (None, "does not run")],
)
def test_setup_refuses_the_python_it_is_given(checkout, version, said):
    path = checkout.python(version, name="mine") if version else checkout.bin / "nothing"
    status, stderr = checkout.setup(PYTHON=str(path))
    assert status == 1
    assert stderr == f"setup: error: PYTHON={path} {said}\n"


def test_setup_without_the_venv_module(checkout):
    path = checkout.python("3.12", no_venv=1)
    status, said = checkout.setup()
    assert status == 1
    assert said.startswith(f"setup: error: {path} has no venv module; install it")
    assert said.count("\n") == 1


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


def test_make_passes_arguments_on(ready):
    assert ready.run("make", "train", "ARGS=--steps 50")[0] == 0
    assert ready.calls == ["-m jaxkern train --steps 50"]
    assert ready.run("make", "bench", "ARGS=--help")[0] == 0
    assert ready.calls == ["-m bench --help"]


def test_make_aot_has_an_environment_for_the_cpu_wherever_it_runs(checkout):
    checkout.python("3.12")
    checkout.driver("570.86.15")
    assert checkout.run("make", "aot", "ARGS=--only tiny")[0] == 0
    assert checkout.calls == [
        "venv",
        ".[lm,aot] by constraints/newest.txt",
        "-m bench aot --part --only tiny",
        "-m bench collectives --part",
    ]


def test_make_matrix_compiles_with_the_newest_and_the_oldest_jax(checkout):
    checkout.python("3.12")
    assert checkout.run("make", "matrix", "ARGS=--write")[0] == 0
    assert checkout.calls == [
        "venv",
        ".[lm,aot] by constraints/newest.txt",
        "-m bench aot --write",
        "-m bench collectives",
        "venv",
        ".[lm,aot] by constraints/oldest.txt",
        "-m bench aot --write",
    ]


def test_make_docs(ready):
    assert ready.run("make", "docs")[0] == 0
    assert ready.calls == [
        ".[docs,lm] by constraints/newest.txt",
        ".site/pages.py",
    ]


def test_make_trial(ready):
    assert ready.run("make", "trial", "ARGS=--mode x64")[0] == 0
    assert ready.calls == ["tests/trial.py --mode x64"]


def test_make_test_runs_everything_on_both_versions_of_jax(ready):
    assert ready.run("make", "test")[0] == 0
    assert ready.calls == [
        ".[lint,lm,test] by constraints/newest.txt",
        "-m ruff check .",
        "-m ruff format --check .",
        "-m pyright",
        "venv",
        ".[test] by constraints/oldest.txt",
        "-m pytest -n 2",
        "-m pytest -n 2 -m not newest -k not (mosaic or auto or xla or ssd_kernels or test_bench)"
        " or lowered or (rms_norm and transformations)",
    ]


def test_make_environments_makes_those_that_ci_needs(ready):
    assert ready.run("make", "environments")[0] == 0
    made = [call for call in ready.calls if call.startswith(".[")]
    assert sorted(made) == [
        ".[docs,lint,lm,test] by constraints/newest.txt",
        ".[lm,aot] by constraints/newest.txt",
        ".[test] by constraints/oldest.txt",
    ]


def test_make_test_runs_compiled_kernels_on_a_gpu(ready):
    ready.driver("550.54.14")
    ready.command("df", "#!/bin/bash\necho; echo a 0 0 99999999 0 /\n")
    assert ready.run("make", "test")[0] == 0
    assert ready.calls[0] == ".[lint,lm,test,cuda12] by constraints/newest.txt"
    assert ".[test] by constraints/oldest.txt" in ready.calls
    assert ready.calls[-1] == "-m pytest -m gpu"


def test_make_alone_explains_itself(checkout):
    assert checkout.run("make") == (0, "")
    done = subprocess.run(["make"], cwd=checkout.root, capture_output=True, text=True, check=True)
    for target in ("train", "test", "bench", "aot", "matrix", "docs", "trial", "lint"):
        assert f"make {target}" in done.stdout


def test_make_stops_when_the_setup_fails(checkout):
    status, said = checkout.run("make", "train")
    assert status == 2
    assert said.startswith("setup: error: no Python 3.12 or newer")
    assert checkout.calls == []
