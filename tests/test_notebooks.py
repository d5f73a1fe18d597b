"""The notebooks run, at the size of the machine, and are committed with small outputs."""

import json
from pathlib import Path

import matplotlib
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BY_DEFAULT = ("02", "05")
"""Those that compile little; the exhaustive suite runs the others."""


def cells(path, kind):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def marks(path):
    large = [pytest.mark.large] * ("train" in path.stem)
    return large + [pytest.mark.exhaustive] * (path.stem[:2] not in BY_DEFAULT)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=marks(p)) for p in NOTEBOOKS])
def test_notebook_runs(path, capsys):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {}
    for number, cell in enumerate(cells(path, "code")):
        exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), names)
    assert capsys.readouterr().out
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


def test_links_between_notebooks_hold():
    text = "".join("".join(c["source"]) for p in NOTEBOOKS for c in cells(p, "markdown"))
    named = {part.split(")")[0] for part in text.split("](")[1:]}
    assert named
    assert [name for name in named if not (FOLDER / name).exists()] == []
