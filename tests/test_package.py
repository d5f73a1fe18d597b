"""The package's promises: its metadata, its names, what it is tested with, and the suites."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import jaxkern
from tests import conftest, faults

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints(name):
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def version_key(version):
    return tuple(int(part) for part in version.split("."))


def test_package_version_is_written_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxkern.__version__)
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT


def test_star_brings_the_public_names_and_nothing_else():
    names = {}
    exec("from jaxkern import *", names)
    names.pop("__builtins__")
    assert set(names) == set(jaxkern.__all__)
    assert len(set(jaxkern.__all__)) == len(jaxkern.__all__)
    imported = {
        alias.asname or alias.name
        for statement in ast.parse(Path(jaxkern.__file__).with_name("_public.py").read_text()).body
        if isinstance(statement, ast.ImportFrom | ast.Import)
        for alias in statement.names
    }
    assert set(jaxkern.__all__) == imported


def test_inline_mlir_is_written_in_mosaic_alone():
    package = Path(jaxkern.__file__).parent
    importing = re.compile(r"^ *(from|import) jaxlib\.mlir\b", re.MULTILINE)
    found = {f.parent.name for f in package.rglob("*.py") if importing.search(f.read_text())}
    assert found == {"mosaic"}


def test_subpackages_are_there_after_importing_the_package():
    """None of them is imported before it is named."""
    program = """
import sys, jaxkern
assert not {"flax", "jaxkern.lm", "jaxkern.nn"} & sys.modules.keys()
assert callable(jaxkern.lm.load) and callable(jaxkern.precision.Policy)
assert jaxkern.nn.__doc__ and jaxkern.optim.__doc__ and not hasattr(jaxkern, "lmm")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["version"] == jaxkern.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in PROJECT["authors"]] == [
        author["name"] for author in citation["authors"]
    ]


def test_hosted_integration_runs_what_ours_does():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("name", ["bug", "request"])
def test_issue_forms_ask_for_something(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form.keys() >= {"name", "description", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_source_distribution_holds_every_file_once():
    """Hatchling follows links to folders, and packs what they lead to a second time."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = included["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name.strip("/")).exists()] == []
    packed = {"/README.md", "/CITATION.cff", "/.site", "/bench", "/notebooks", "/tests"}
    assert packed <= set(included)


def test_classifiers_name_the_supported_versions_of_python():
    prefix = "Programming Language :: Python :: 3."
    minors = [int(c[len(prefix) :]) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert minors == [12, 13]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"


def test_nothing_installs_the_other_package():
    """On PyPI `jaxkern` is a library of Gaussian processes."""
    assert PROJECT["name"] != "jaxkern"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if not name.endswith(".json")]
    other = re.compile(r"\bjaxkern\[|pip install[^\n#`)]* [j]axkern\b")
    assert len(files) > 200
    found = [f.name for f in files if f.exists() and other.search(f.read_text(errors="ignore"))]
    assert found == []


def test_constraints_hold_the_ends_of_the_supported_range():
    (jax_range,) = (d for d in PROJECT["dependencies"] if d.startswith("jax"))
    lower, upper = re.fullmatch(r"jax>=([\d.]+),<([\d.]+)", jax_range).groups()
    oldest, newest = constraints("oldest"), constraints("newest")
    assert oldest["jax"] == lower
    assert version_key(lower) < version_key(newest["jax"]) < version_key(upper)
    assert newest.keys() >= oldest.keys()
    for name, version in oldest.items():
        assert version_key(version) <= version_key(newest[name]), name


def test_compiler_for_absent_gpus_is_of_the_version_of_jax():
    newest, oldest = constraints("newest"), constraints("oldest")
    assert PROJECT["optional-dependencies"]["aot"] == [
        "jax-cuda12-pjrt",
        "jax-cuda12-plugin",
        "nvidia-cuda-nvcc-cu12",
    ]
    for pinned in (newest, oldest):
        assert pinned["jax-cuda12-pjrt"] == pinned["jax-cuda12-plugin"] == pinned["jax"]
        assert "nvidia-cuda-nvcc-cu12" in pinned


def test_lower_bounds_are_tested_ones():
    requirements = list(PROJECT["dependencies"])
    for extra in ("lm", "hf", "flax", "equinox"):
        requirements += PROJECT["optional-dependencies"][extra]
    for requirement in requirements:
        if requirement.startswith(PROJECT["name"]):
            continue
        name, lower = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        tested = constraints("oldest")[name]
        assert version_key(tested)[: len(version_key(lower))] == version_key(lower), requirement


def test_no_registry_addresses():
    for path in [*(ROOT / "constraints").iterdir(), ROOT / "pyproject.toml", ROOT / "Makefile"]:
        assert "://" not in path.read_text(), path
        assert "-index" not in path.read_text(), path
    assert not [*ROOT.glob("*.lock")]


# The suites: their budgets, and the table of faults that they are worth their time by

MINUTES = 8
"""What the default suite may take on two cores; one of them is to start and to collect."""


def test_the_default_suite_fits_its_minutes(request):
    seconds = json.loads(conftest.DURATIONS.read_text())
    default = request.config.stash[conftest.DEFAULT]
    assert sum(seconds.get(name, 0) for name in default) < 2 * 60 * (MINUTES - 1)
    assert conftest.over_budget(default, seconds) == []


def test_a_default_test_over_its_budget_is_named():
    seconds = {"slow": conftest.BUDGET + 0.1, "quick": conftest.BUDGET, "exhaustive": 100.0}
    told = conftest.over_budget(["slow", "quick", "new"], seconds)
    assert told == ["slow (5.1 CPU s of 5)"]


def test_faults_can_be_planted():
    """The lines that they change are in the package, once; a change of one of them changes both."""
    table = faults.table()
    assert len(table) >= 30
    for fault in table:
        text = (faults.ROOT / fault.file).read_text()
        assert fault.planted(text) != text
        assert fault.tests
        assert all((faults.ROOT / name).exists() for name in fault.tests)
