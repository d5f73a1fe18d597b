"""The accuracy ledger: what an ulp is, what it finds, and that its document is up to date."""

import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from bench import accuracy

ABOUT = {"device": "d", "jax": "1", "commit": "c", "date": "t", "clock": "k"}
ABOUT |= {"refused": [], "failed": []}


@pytest.mark.parametrize("dtype", accuracy.DTYPES)
def test_an_ulp_is_the_distance_of_neighbours(dtype):
    x = np.array([1.0, -1.5, 1.9], np.float64)
    got = jnp.asarray(x, dtype)
    step = float(jnp.finfo(dtype).eps)
    assert accuracy.ulps(got, np.asarray(got, np.float64) + step).tolist() == [1.0, 1.0, 1.0]
    assert accuracy.ulps(got, x).max() <= 0.5
    assert accuracy.ulps(jnp.asarray([1.0, np.nan], dtype), np.ones(2)).tolist() == [0.0, np.inf]


def test_small_values_count_in_ulps_of_the_root_mean_square():
    want = np.array([1.0] * 99 + [1e-6])
    got = want.astype(np.float32)
    got[-1] += 2.0**-24  # half an ulp of the root mean square, which is just below 1
    assert accuracy.ulps(got, want)[-1] == pytest.approx(1.0, rel=1e-3)


def measured(op, folder, *args):
    out, document = folder / "a.json", folder / "a.md"
    args = ["--op", op, "--dtype", "bfloat16", "--out", str(out), "--table", str(document), *args]
    assert accuracy.main(args) == 0
    return json.loads(out.read_text())


def test_ledger_of_an_op(tmp_path, capsys):
    report = measured("silu", tmp_path, "--interpret")
    assert "INTERPRETER" in report["clock"]
    errors = {(r["implementation"], r["array"]): r["max_ulp"] for r in report["rows"]}
    assert len(errors) == 6
    for array in ("out", "dx"):
        assert errors["mosaic", array] <= 0.51  # rounded once
        assert errors["xla", array] <= 0.51
        assert errors["expression", array] > 0.6
    assert "| silu | dx | bfloat16 |" in capsys.readouterr().out
    assert accuracy.main(["--op", "nothing"]) == 2


@pytest.mark.exhaustive
def test_labels_have_no_errors(tmp_path):
    rows = measured("cross_entropy", tmp_path)["rows"]
    assert {row["array"] for row in rows} == {"out", "dlogits"}
    assert all(row["max_ulp"] < 2 for row in rows if row["implementation"] == "xla")


def test_worse_than_twice_the_expression_is_marked():
    row = {"op": "silu", "array": "out", "dtype": "float32", "max_ulp": 4.0}
    expression = row | {"implementation": "expression", "mean_ulp": 0.2}
    for mean, marked in ((0.39, False), (0.41, True)):
        rows = [row | {"implementation": "xla", "mean_ulp": mean}, expression]
        assert ("▼ |" in accuracy.text({**ABOUT, "rows": rows})) == marked


def test_who_refused_is_named():
    rows, refused, failed = accuracy.measure("linear", "float32", ["mosaic", "xla"])
    assert {row["implementation"] for row in rows} == {"xla"}
    assert failed == []
    assert refused[0].startswith("linear float32, jaxkern: ")
    row = {"op": "silu", "array": "out", "dtype": "float32", "max_ulp": 4.0, "mean_ulp": 1.0}
    rows = [*rows, {**row, "implementation": "mosaic"}]
    document = accuracy.text({**ABOUT, "refused": refused, "rows": rows})
    assert f"Not computed: {refused[0]}" in document
    assert "| linear | out | float32 |  | " in document


def test_ledger_has_every_op_and_is_up_to_date():
    functions = inspect.getmembers(jaxkern, inspect.isfunction)
    ops = {name for name, f in functions if f.__module__.startswith("jaxkern.ops")}
    subjects = {s.case.op for s in accuracy.subjects(small=True)}
    assert subjects == {name for name in ops if not name.endswith("_step")}
    reports = [json.loads(p.read_text()) for p in accuracy.RESULTS.glob("*-accuracy.json")]
    assert accuracy.ACCURACY.read_text() in [accuracy.text(r) for r in reports]
