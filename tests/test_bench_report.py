"""bench/report.md and the pictures: that it is up to date, and what they say of results."""

import csv
import json
import re
from pathlib import Path

import pytest

import jaxkern
from bench import cases, documents, pictures, report, titles


def timing(who, us, *, op="rms_norm", shape="8x64", direction="forward", **rest):
    row = {"op": op, "shape": shape, "dtype": "bfloat16", "implementation": who, "us": us}
    row |= {"direction": direction, "percent": 1e4 / us, "gb_s": 4e5 / us, "temp_bytes": 0}
    return row | rest


def results(*rows, **told):
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "copy_gb_s": 4000.0}
    return {**about, **told, "rows": list(rows)}


def test_committed_report_is_up_to_date():
    assert report.REPORT.read_text() == report.text(report.load()), "run: python -m bench report"


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.stem)
def test_figures_of_documents_are_up_to_date(path):
    text = path.read_text()
    assert text == documents.renewed(text, report.load()), "run: python -m bench report"
    assert text.count("<!-- figures: ") == text.count("<!-- end -->")


def test_documents_have_all_figures_and_readme_eight_rows():
    text = "".join(map(Path.read_text, documents.DOCUMENTS))
    marked = re.findall(r"<!-- figures: (\w+) -->", text)
    assert sorted(marked) == sorted(documents.FIGURES)
    rows = documents.FIGURES["readme"](report.load()).splitlines()[2:]
    assert len(rows) == 8
    assert all(row.count("|") == 6 for row in rows)


def test_reference_is_up_to_date():
    assert documents.REFERENCE.read_text() == documents.reference(), "run: python -m bench report"
    names = documents.families()
    assert [name for of in names.values() for name in of] == jaxkern.__all__
    assert list(names)[:-1] == list(documents.FAMILIES)


def test_picture_of_readme_is_up_to_date(tmp_path):
    """What it says: its paths differ with matplotlib's version."""
    pictures.draw_overview(pictures.overview(report.load()), tmp_path / "overview.svg")
    words = [
        re.findall(r"<text[^>]*>([^<]*)</text>", (folder / "overview.svg").read_text())
        for folder in (tmp_path, pictures.PICTURES)
    ]
    assert words[0] == words[1], "run: python -m bench pictures"
    assert "plain JAX" in words[0]


def test_every_timing_is_in_the_report():
    """Whatever the shape, and whoever is faster."""
    reports = report.load()
    found = {
        (x.op, x.shape, x.dtype, x.direction, who)
        for x in report.lines(reports)
        for who in x.figures
    }
    rows = [row for _, one in reports for row in report.timings(one) if one["device"] != "cpu"]
    keys = ("op", "shape", "dtype", "direction", "implementation")
    want = {tuple(row[key] for key in keys) for row in rows}
    assert found == want
    assert len(want) > 500


@pytest.mark.parametrize(
    ("ours", "verdict"), [(90.0, "faster"), (99.5, "even"), (100.5, "even"), (110.0, "slower")]
)
def test_verdict_is_against_the_fastest_other(ours, verdict):
    reports = [("a", results(timing("mosaic", ours), timing("xla", 300.0), timing("fla", 100.0)))]
    (line,) = report.lines(reports)
    assert line.verdict == verdict
    assert line.speedup == pytest.approx(100 / ours)
    text = report.text(reports)
    assert ("▼ |" in text) == (verdict == "slower")
    assert ("### Where we are slower (1)" in text) == (verdict == "slower")
    if verdict == "slower":
        assert "fla, 100 (100%) | 0.91× |" in text


def test_figures_of_others_are_lent_and_of_cpus_left_out():
    reports = [
        ("a", results(timing("xla", 20.0, percent=None))),
        ("b", results(timing("mosaic", 10.0))),
        ("c", results(timing("mosaic", 11.0), timing("xla", 21.0))),
        ("d", results(timing("mosaic", 0.1), device="cpu")),
    ]
    lines = report.lines(reports)
    assert [line.files for line in lines] == [(2, 1), (3,)]
    assert [line.figures["xla"].us for line in lines] == [20.0, 21.0]
    assert "| 10.0 (1000%) | 20.0 | 2.00× | 2, 1 |" in report.text(reports)


def test_figures_of_two_gpus_stay_apart():
    reports = [
        ("a", results(timing("mosaic", 10.0), device="NVIDIA H100")),
        ("b", results(timing("mosaic", 20.0), timing("mosaic", 30.0, shape="8x9"))),
        ("c", results(timing("xla", 40.0))),
    ]
    assert [line.files for line in report.lines(reports)] == [(1,), (2, 3), (2,)]
    assert [line.files for line in report.lines_of_most(reports)] == [(2, 3), (2,)]
    assert report.the_line(reports, "rms_norm", "8x64", "forward").files == (2, 3)
    text = report.text(reports)
    assert "| 8x64 | bfloat16 | forward | NVIDIA H100 | 10.0 (1000%) |  |  | 1 |" in text
    assert "| 8x64 | bfloat16 | forward | NVIDIA H200 | 20.0 (500%) | 40.0 (250%) |" in text
    assert "| 1 | 0 | 0 | 1 | 2.00× |" in text  # the summary is of the H200


def test_products_have_their_rate():
    known = timing("mosaic", 50.0, tflop_s=700.4, percent_products=87.6)
    rows = [known, timing("xla", 80.0, tflop_s=437.5)]
    text = report.text([("a", results(*rows, product_tflop_s=800.0))])
    assert "| 50.0 (200%); 700 (88%) | 80.0 (125%); 438 |" in text
    assert "4000 GB/s, 800 TFLOP/s" in text


def test_an_op_that_saves_memory_has_it_beside_the_time():
    shape = {"op": "linear_cross_entropy", "shape": "8x8x64-plain", "direction": "both"}
    rows = [
        timing("mosaic", 50.0, **shape | {"temp_bytes": 2 << 30, "tflop_s": 700.4}),
        timing("quack", 80.0, **shape | {"temp_bytes": 5 << 29, "percent": None}),
        timing("fla", 90.0, **shape),
        timing("mosaic", 20.0, **shape | {"direction": "forward", "temp_bytes": 1 << 30}),
        timing("mosaic", 20.0, direction="both", temp_bytes=1 << 30),
    ]
    text = report.text([("a", results(*rows))])
    assert "| 50.0 (200%); 700; 2.00 GiB | 90.0 (111%) | 80.0; 2.50 GiB |" in text
    assert text.count(" GiB |") == 2


def test_rows_without_an_op_are_a_table_of_their_own():
    text = report.text([("h-lm.json", results({"implementation": "xla", "tokens": 5}, preset="a"))])
    assert "## h-lm\n\npreset a\n\n| implementation | tokens |\n| --- | --- |\n| xla | 5 |" in text


def test_sections_say_what_they_are():
    """Every measured op says what its shapes are; a file of no op has a title, not its name."""
    text = report.REPORT.read_text()
    assert cases.shape_of("linear_scan").startswith("batch × length × channels; ")
    ops = {line.op for line in report.lines(report.load())}
    assert [op for op in ops if f"\n## {op}\n\nA shape is {cases.shape_of(op)}." not in text] == []
    assert all(f"\n## {title}\n\n{about}" in text for title, about in titles.TITLES.values())
    stems = [name.removesuffix(".json") for name, _ in report.load()]
    assert [stem for stem in stems if f"\n## {stem}" in text] == []
    assert "| first step, s |" in text


def test_csv_keeps_every_figure(tmp_path):
    rows = [timing("mosaic", 1.5, kernels={"k": 2}), timing("xla", 2.5, tflop_s=3.0)]
    report.write_csv(rows, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["us"], second["us"], second["tflop_s"]) == ("1.5", "2.5", "3.0")
    assert json.loads(first["kernels"]) == {"k": 2}
    assert first["tflop_s"] == second["kernels"] == ""


def test_pictures(tmp_path):
    rows = [
        timing(who, us, shape=f"8x{n}", direction=direction, percent=50.0, temp_bytes=n << 20)
        for direction in ("forward", "backward", "both")
        for n in (64, 128, 256)
        for who, us in (("mosaic", n / 10), ("xla", n / 5))
    ]
    rows.append(timing("mosaic", 50.0, op="linear", tflop_s=700.0))
    rows.append(timing("mosaic", 9.0, shape="8x128-gate", direction="both", temp_bytes=5e6))
    rows.append(timing("mosaic", 9.0, shape="8x128-silu", direction="both", temp_bytes=5e5))
    reports = [("a", results(*rows, product_tflop_s=800.0))]
    found = pictures.rooflines(reports)
    assert len(found["rms_norm"].points["forward"]["mosaic"]) == 3
    assert found["linear"].products
    assert found["linear"].points["forward"]["mosaic"] == [(pytest.approx(87.5), 700.0)]
    pictures.draw_roofline("rms_norm", found["rms_norm"], tmp_path / "r.svg")
    pictures.draw_roofline("linear", found["linear"], tmp_path / "l.svg")
    assert "rms_norm, backward" in (tmp_path / "r.svg").read_text()
    assert "operations per byte" in (tmp_path / "l.svg").read_text()
    assert pictures.lengths(reports)["rms_norm"]["backward"]["xla"] == [
        (64, 50.0),
        (128, 50.0),
        (256, 50.0),
    ]
    held = pictures.ledger(reports)
    assert held == {
        "rms_norm 8x128 bfloat16": {"mosaic": pytest.approx(134.2, 1e-3), "xla": 128 * 2**20 / 1e6},
        "rms_norm 8x128-gate bfloat16": {"mosaic": 5.0},
    }
    pictures.draw_ledger(held, tmp_path / "m.svg")
    assert "plain JAX" in (tmp_path / "m.svg").read_text()


def test_exponentials_lower_the_scans_limit(tmp_path):
    """2^23 of them take longer than 1 MB does at a copy's bandwidth."""
    shape = {"op": "selective_scan", "shape": "2x512x512x16"}
    rows = [
        timing("mosaic", 10.0, percent=2.5, **shape),
        timing("xla", 90.0, percent=None, **shape),
    ]
    (found,) = pictures.times([("a", results(*rows))]).values()
    assert found.of["forward"] == {"2x512x512x16": {"mosaic": 0.01, "xla": 0.09}}
    assert found.least["forward"]["2x512x512x16"] == pytest.approx(
        1e3 * 2**23 / (132 * 16 * 1.83e9)
    )
    assert found.least["forward"]["2x512x512x16"] > 1e-2 * 0.025
    pictures.draw_times("selective_scan", found, tmp_path / "s.svg")
    drawn = (tmp_path / "s.svg").read_text()
    assert "2x512x512x16" in drawn
    assert "limit of the machine" in drawn
