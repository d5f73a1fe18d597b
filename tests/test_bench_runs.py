"""The bench's commands that run ``jaxkern train``: loss curves, and what checkpoints cost."""

import json

import pytest

from bench import checkpoints, curves


def test_curves_are_compared_by_means():
    losses, beside = [3.0] * 20 + [2.0] * 20 + [1.5] * 5, [3.0] * 20 + [2.5] * 20 + [1.0] * 5
    got = curves.row("a", losses, beside)
    assert {k: got[k] for k in ("first", "last", "difference", "largest")} == {
        "first": 3.0,
        "last": 1.5,
        "difference": 0.5,
        "largest": 0.5,
    }
    assert got["losses"] == losses


@pytest.mark.exhaustive
def test_curves_begin_alike(tmp_path):
    (tmp_path / "a.txt").write_text("the same words again and again, " * 400)
    size = ["--preset", "micro", "--tokenizer", "bpe:300", "--batch-size", "2", "--seq-len", "16"]
    size += ["--steps", "3", "--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "c.json")]
    assert curves.main(size) == 0
    report = json.loads((tmp_path / "c.json").read_text())
    ours, plain = report["rows"]
    assert len(ours["losses"]) == len(plain["losses"]) == 3
    assert ours["losses"][0] == pytest.approx(plain["losses"][0], rel=5e-3)
    assert plain["largest"] == 0


def test_checkpoints_are_beside_none(monkeypatch, tmp_path):
    """A run with checkpoints takes 12 ms a step here, one without 10."""
    ran = []

    def reports(flags, folder):
        ran.append(flags["--checkpoint-every"])
        ms = 0.012 if flags["--checkpoint-every"] == 4 else 0.010
        return {step: step * ms for step in range(2, flags["--steps"] + 1, 2)}

    monkeypatch.setattr(checkpoints, "reports", reports)
    size = ["--every", "4", "--log-every", "2", "--count", "2", "--repeats", "1"]
    assert checkpoints.main([*size, "--out", str(tmp_path / "c.json")]) == 0
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["percent"] == 20.0
    assert ran == [4, 12]


@pytest.mark.exhaustive
def test_reports_of_a_run_are_timed(tmp_path):
    flags = {"--preset": "micro", "--steps": 4, "--log-every": 2, "--eval-every": 4}
    seen = checkpoints.reports(flags, tmp_path / "run")
    assert list(seen) == [2, 4]
    assert seen[2] < seen[4]


def test_checkpoints_need_reports_between_them(capsys):
    with pytest.raises(SystemExit):
        checkpoints.main(["--every", "100", "--log-every", "100"])
    assert "--every must be twice --log-every" in capsys.readouterr().err
