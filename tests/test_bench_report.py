"""Documents and pictures of bench/results: that they are up to date, and what stands in a line."""

import csv
import json
import re

import matplotlib
import pytest

from bench import documents, generations, pictures, report, titles


def timing(who, us, *, op="rms_norm", shape="8x64", direction="forward", **rest):
    row = {"op": op, "shape": shape, "dtype": "bfloat16", "implementation": who, "us": us}
    row |= {"direction": direction, "percent": 1e4 / us, "gb_s": 4e5 / us, "temp_bytes": 0}
    return row | rest


def results(*rows, **told):
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "copy_gb_s": 4000.0}
    return {**about, **told, "rows": list(rows)}


def test_documents_are_up_to_date():
    reports = report.load()
    written = {report.REPORT: report.text(reports), documents.REFERENCE: documents.reference()}
    guides = {path: path.read_text() for path in documents.DOCUMENTS}
    written |= {path: documents.renewed(text, reports) for path, text in guides.items()}
    for path, text in written.items():
        assert path.read_text() == text, "run: python -m bench report"
        assert text.count("<!-- figures: ") == text.count("<!-- end -->"), path
    marked = re.findall(r"<!-- figures: (\w+) -->", "".join(guides.values()))
    assert sorted(marked) == sorted(documents.FIGURES)
    absent = {"sm_1": {"gpu": "NVIDIA G", "kernels": {}}}
    assert generations.matrix(absent)[1][0][1:] == ["not compiled"]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_pictures_are_up_to_date(every, tmp_path, monkeypatch):
    """What they say, and by the matplotlib that drew them their paths, too."""
    committed = pictures.PICTURES
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    if every:
        pictures.main([])
    else:
        pictures.draw_overview(pictures.overview(report.load()), tmp_path / "overview.svg")
    drawn = [*tmp_path.iterdir()]
    words = lambda text: re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert "plain JAX" in words((tmp_path / "overview.svg").read_text())
    for path in drawn:
        was, now = (committed / path.name).read_text(), path.read_text()
        same = f"Matplotlib v{matplotlib.__version__}," in was
        assert words(was) == words(now), f"{path.name}: run: python -m bench pictures"
        assert was == now or not same, f"{path.name}: run: python -m bench pictures"


def test_lengths_of_one_run_are_drawn_beside_it(tmp_path):
    lengths = (64, 10.0), (128, 70.0), (256, 40.0)
    rows = [timing("mosaic", 9.0, shape=f"16x{n}", percent=percent) for n, percent in lengths]
    rows.append(timing("mosaic", 9.0, shape="8x128", percent=50.0))  # of two, that of most rows
    line = pictures.points(rows)["rms_norm"]["forward"]["mosaic"]
    assert line == [*lengths]
    assert pictures.draw(results(*rows), tmp_path / "a.svg")
    assert "rms_norm, forward" in (tmp_path / "a.svg").read_text()
    assert not pictures.draw(results(rows[0]), tmp_path / "b.svg")


def test_every_timing_is_in_the_report():
    """Whatever the shape, and whoever is faster; a file of no op has a title, not its name."""
    reports = report.load()
    keys = ("op", "shape", "dtype", "direction")
    lines = report.lines(reports)
    found = {(*(getattr(x, key) for key in keys), who) for x in lines for who in x.figures}
    rows = [row for _, one in reports for row in report.timings(one) if one["device"] != "cpu"]
    want = {tuple(row[key] for key in (*keys, "implementation")) for row in rows}
    assert found == want
    assert len(want) > 500
    text = report.REPORT.read_text()
    assert all(f"\n## {title}\n\n{about}" in text for title, about in titles.TITLES.values())
    stems = [name.removesuffix(".json") for name, _ in reports]
    assert [stem for stem in stems if f"\n## {stem}" in text] == []


def test_figures_of_others_are_lent_and_of_cpus_left_out():
    reports = [
        ("a", results(timing("xla", 20.0))),
        ("b", results(timing("mosaic", 10.0))),
        ("c", results(timing("mosaic", 11.0), timing("xla", 21.0))),
        ("d", results(timing("mosaic", 0.1), device="cpu")),
    ]
    lines = report.lines(reports)
    assert [line.files for line in lines] == [(2, 1), (3,)]
    assert [line.figures["xla"].us for line in lines] == [20.0, 21.0]


def test_figures_of_two_gpus_stay_apart():
    reports = [
        ("a", results(timing("mosaic", 10.0), device="NVIDIA H100")),
        ("b", results(timing("mosaic", 20.0), timing("mosaic", 30.0, shape="8x9"))),
        ("c", results(timing("xla", 40.0))),
    ]
    assert [line.files for line in report.lines(reports)] == [(1,), (2, 3), (2,)]
    assert [line.files for line in report.lines_of_most(reports)] == [(2, 3), (2,)]
    assert report.the_line(reports, "rms_norm", "8x64", "forward").files == (2, 3)


def test_csv_keeps_every_figure(tmp_path):
    rows = [timing("mosaic", 1.5, kernels={"k": 2}), timing("xla", 2.5, tflop_s=3.0)]
    report.write_csv(rows, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["us"], second["us"], second["tflop_s"]) == ("1.5", "2.5", "3.0")
    assert json.loads(first["kernels"]) == {"k": 2}
    assert first["tflop_s"] == second["kernels"] == ""
