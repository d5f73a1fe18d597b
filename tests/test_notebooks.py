"""The notebooks run, at the size of the machine, and are committed with small outputs."""

import ast
import json
import linecache
import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BY_DEFAULT = ("02", "05")
"""Notebooks that compile little; the exhaustive suite runs the others."""
LARGE = ("03", "09", "10", "12")
"""Notebooks that need much of a GPU's memory."""
TRAINED = ("03", "06", "08", "10")
"""Notebooks that train by jaxkern.lm."""


def cells(path, kind):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def sources(path, kind):
    return "\n\n".join("".join(c["source"]) for c in cells(path, kind))


def marks(path):
    number = path.stem[:2]
    found = [pytest.mark.large] * (number in LARGE)
    found += [pytest.mark.needs("grain", "tyro")] * (number in TRAINED)
    return found + [pytest.mark.exhaustive] * (number not in BY_DEFAULT)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=marks(p)) for p in NOTEBOOKS])
def test_notebook_runs(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {}
    for number, cell in enumerate(cells(path, "code")):
        name, source = f"{path.name}[{number}]", "".join(cell["source"])
        linecache.cache[name] = len(source), None, source.splitlines(True), name  # Triton reads it
        exec(compile(source, name, "exec"), names)
    assert capsys.readouterr().out
    assert pyplot.get_fignums()
    first = matplotlib.colors.to_hex("C0")
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        lines = [line for axis in figure.axes for line in axis.lines]
        colours = {line.get_label(): matplotlib.colors.to_hex(line.get_color()) for line in lines}
        assert len({*colours.values()}) <= 1 or any(axis.get_legend() for axis in figure.axes)
        assert colours.get("jaxkern", first) == first
    pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_as_it_ran(path):
    """Every cell once, from first to last, with no error and nothing large."""
    code = cells(path, "code")
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [output for c in code for output in c["outputs"]]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_imports_what_a_wheel_brings(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("lm", "hf", "data", "flax", "equinox", "notebooks")
    required = sum((project["optional-dependencies"][e] for e in extras), project["dependencies"])
    brought = {"jaxkern", "numpy", *(re.match(r"[\w-]+", r)[0] for r in required)}
    imported, text = set(), sources(path, "code")
    brought |= {"triton"} if 'find_spec("jax_triton")' in text else set()  # where it is there
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {getattr(node, "module", None) or a.name for a in node.names}
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names <= brought


def results(pattern):
    """The timings in bfloat16 of the files of results that match: op, shape, pass, by, figures."""
    for path in (ROOT / "bench" / "results").glob(pattern):
        for row in json.loads(path.read_text())["rows"]:
            if row.get("dtype") == "bfloat16" and "us" in row:
                figures = {row["us"], row.get("percent"), row.get("temp_bytes")}
                key = row["op"], row["shape"], row["direction"]
                yield *key, row["implementation"], figures, row["us"]


@pytest.mark.parametrize("number", ["02", "05", "07"])
def test_figures_of_a_notebook_are_those_of_its_files(number):
    """The library that it shows beside ours is the fastest of all files."""
    (path,) = FOLDER.glob(f"{number}*")
    text = sources(path, "markdown") + sources(path, "code")
    named = set(re.findall(r"nvidia-[\w.-]+\.json", text))
    for name in named:
        assert json.loads((ROOT / "bench/results" / name).read_text())["commit"] in text
    known = {(*row[:4], figure) for name in named for row in results(name) for figure in row[4]}
    best = {}
    for *key, by, _, us in results("nvidia-h200-*.json"):
        if by not in ("mosaic", "auto", "without-tma"):
            best[*key] = min(us, best.get((*key,), us))
    shown = re.findall(r"^(\w+) +(\S+) +(forward|backward|both) *\| (.+)$", text, re.MULTILINE)
    assert shown
    for *key, timed in shown:
        by = {name: list(map(float, f)) for name, *f in map(str.split, timed.split(","))}
        assert {(*key, name, f) for name, figures in by.items() for f in figures} <= known
        others = [figures[0] for name, figures in by.items() if name != "mosaic"]
        if by.keys() - {"mosaic", "xla"}:
            assert min(others) <= 1.01 * best[*key], key


def test_links_between_notebooks_hold():
    text = "".join(sources(path, "markdown") for path in NOTEBOOKS)
    named = {part.split(")")[0] for part in text.split("](")[1:]}
    assert named
    assert [name for name in named if not (FOLDER / name).exists()] == []
