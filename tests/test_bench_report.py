"""Documents and pictures of bench/results: that they are up to date, and what stands in a line."""

import csv
import json
import re

import matplotlib
import pytest

from bench import figures, report
from bench.figures import Results


def timing(who, us, *, op="rms_norm", shape="8x64", direction="forward", **rest):
    row = {"op": op, "shape": shape, "dtype": "bfloat16", "implementation": who, "us": us}
    return row | {"direction": direction, "percent": 1e4 / us, "temp_bytes": 0} | rest


def results(*files):
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "date": "2026-01-01"}
    return Results(
        [(f"{i}", about | told | {"rows": rows}) for i, (told, *rows) in enumerate(files)]
    )


def test_documents_are_up_to_date(tmp_path):
    loaded = Results.load()
    written = report.written(loaded)
    report.write_csv(loaded.newest(), tmp_path / "report.csv")
    written[report.CSV] = (tmp_path / "report.csv").read_text()
    for path, text in written.items():
        assert path.read_text() == text, "run: python -m bench report"
        begins = re.findall("<!-- (?:figures|ours|row): ", text)
        assert len(begins) == text.count("<!-- end -->"), path
    marked = re.findall(r"<!-- figures: (\w+) -->", "".join(map(str, written.values())))
    assert sorted(marked) == sorted(report.FIGURES)
    assert report.in_kernels("rms_norm", {"kernels": {}}) == "not compiled"


def test_the_report_is_short_and_has_every_op():
    text = report.REPORT.read_text()
    sections = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lengths = {name: body.count("\n| ") - 2 for name, body in sections}
    for name in ("Where we are slower", "Files and versions"):
        assert lengths.pop(name) > 12
    assert max(lengths.values()) <= report.MOST
    slug = lambda name: name.lower().replace(" ", "_")
    families = "".join(body for name, body in sections if slug(name) in report.families())
    assert {op for op, *_ in Results.load().best if f"`{op}`" not in families} == set()
    assert not re.search(r"\d+x\d", text)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_pictures_are_up_to_date(every, tmp_path, monkeypatch):
    """Their texts; their paths too, by the matplotlib version that drew them."""
    committed = report.PICTURES
    monkeypatch.setattr(report, "PICTURES", tmp_path)
    if every:
        report.draw(Results.load())
        assert {path.name for path in tmp_path.iterdir()} == {p.name for p in committed.iterdir()}
    else:
        report.overview(Results.load(), tmp_path / "overview.svg")
    words = lambda text: re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert "plain JAX" in words((tmp_path / "overview.svg").read_text())
    for path in tmp_path.iterdir():
        was, now = (committed / path.name).read_text(), path.read_text()
        same = f"Matplotlib v{matplotlib.__version__}," in was
        assert words(was) == words(now), f"{path.name}: run: python -m bench report"
        assert was == now or not same, f"{path.name}: run: python -m bench report"
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", now)]
        assert min(sizes) >= 9


def test_the_table_has_the_newest_timing_of_each_contender():
    keys = ("gpu", "op", "shape", "dtype", "direction", "implementation")
    with report.CSV.open() as file:
        rows = list(csv.DictReader(file))
    assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows) > 1500
    newest = {tuple(row[key] for key in keys): row["date"] for row in rows}
    for row in Results.load().rows:
        assert newest[tuple(row[key] for key in keys)] >= row["date"]


def test_ours_is_beside_the_fastest_library_or_the_newest():
    """Others' fastest is of any file; wall-clock times of a CPU are left out."""
    of = lambda *files: results(*files).best["rms_norm", "8x64", "bfloat16", "forward"]
    old, new = {"date": "2025-01-01"}, {"date": "2026-01-01"}
    plain = (old, timing("mosaic", 10.0)), (new, timing("mosaic", 12.0)), (old, timing("xla", 20.0))
    line = of(*plain, (new, timing("xla", 21.0)), ({"device": "cpu"}, timing("mosaic", 0.1)))
    assert (line.own["us"], line.speedup, line.fastest, line.rival) == (12.0, 20 / 12, "xla", None)
    ours = timing("mosaic", 11.0), timing("auto", 10.5)
    line = of(*plain, (old, *ours, timing("fla", 9.0)), (new, timing("fla", 9.5)))
    assert (line.own["us"], line.fastest, line.rival) == (10.5, "fla", "fla")
    line = of(*plain, (old, timing("auto", 1.0), timing("fla", 9.5)), (new, timing("fla", 9.0)))
    assert line.figures.keys() == {"auto", "xla", "fla"}
    line = of((old, *ours, timing("fla", 9.0)), (new, timing("mosaic", 9.9), timing("fla", 9.5)))
    assert (line.own["us"], line.speedup) == (9.9, 9.5 / 9.9)
    line = of((new, timing("mosaic", 3.0), timing("update", 1.0), timing("fla", 2.0)))
    assert (line.fastest, line.rival) == ("fla", "fla")


def test_figures_of_two_gpus_stay_apart():
    loaded = results(
        ({"device": "NVIDIA H100"}, timing("mosaic", 10.0)),
        ({}, timing("mosaic", 20.0), timing("mosaic", 30.0, shape="8x9")),
        ({}, timing("xla", 40.0)),
    )
    assert [line.own["us"] for line in loaded.lines.values()] == [10.0, 20.0, 30.0]
    line = loaded.line("rms_norm", "8x64", "forward")
    assert (line.own["us"], line.speedup) == (20.0, 2.0)
    assert loaded.line("rms_norm", "8x64", "both") is None


def test_training_compares_by_tokens_and_leaves_out_what_is_not_steady():
    """A batch that did not fit was halved, and its step takes less time. Our ways are newest."""

    def trained(who, ms, rate, high=None):
        row = {"contender": who, "preset": "130m", "length": 9, "batch": 2, "parameters": 1}
        row |= {"ms": ms, "ms_low": ms, "ms_high": high or ms, "tokens_per_second": rate}
        return row

    steps = [trained("jaxkern", 10.0, 900), trained("xla-loop", 7.0, 600)]
    steps += [trained("jla", 8.0, 500), trained("mamba_ssm", 9.0, 700, high=12.0)]
    loaded = results(({}, *steps))
    (line,) = loaded.lines.values()
    assert (line.rival, line.fastest, line.speedup) == ("jla", "xla-loop", 1.5)
    assert [*loaded.trainings()] == [("130m", 9)]
    assert len(loaded.newest()) == 4
    cheap, date = trained("jaxkern-cheap", 11.0, 800), {"date": "2030-01-01"}
    loaded = results((date, cheap, trained("jla", 8.5, 480)), ({}, *steps, cheap | {"ms": 10.5}))
    (line,) = loaded.lines.values()
    rates = {name: row["tokens_per_second"] for name, row in line.figures.items()}
    assert rates == {"jaxkern": 900, "jaxkern-cheap": 800, "jla": 480, "xla-loop": 600}
    assert line.figures["jaxkern-cheap"]["ms"] == 11.0


def test_csv_keeps_every_figure(tmp_path):
    rows = [timing("mosaic", 1.5, kernels={"k": 2}), timing("xla", 2.5, tflop_s=3.0)]
    figures.write_csv(rows, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first.keys() == rows[0].keys() | rows[1].keys()
    assert (first["us"], second["us"], second["tflop_s"]) == ("1.5", "2.5", "3.0")
    assert json.loads(first["kernels"]) == {"k": 2}
    assert first["tflop_s"] == second["kernels"] == ""


def test_shapes_are_told_in_plain_words():
    for shape, words in (
        ("8x64-plain", "8 × 64"),
        ("8x2048x16/None", "8 × 2048 × 16, no checkpoints"),
        ("100M-bf16-8-bit-state", "100M, bf16, state in 8 bits"),
        ("20M-300-leaves", "20M in 300 arrays"),
        ("8x64-gated", "8 × 64, gated"),
    ):
        assert figures.plain_shape(shape) == words
