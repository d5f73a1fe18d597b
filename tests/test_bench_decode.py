"""The bench of decoding: a short run on a CPU, and its part of the report."""

import dataclasses
import importlib.util
import json

import pytest

from bench import decode, report

JOB = decode.Job("jaxkern", "micro", 300, batches=(1, 3), prompt=5, tokens=16, repeats=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("contender", ["jaxkern", "jaxkern-bf16", "transformers"])
@pytest.mark.parametrize("preset", ["micro", "mamba2-micro"])
def test_contenders_decode_in_this_process(contender, preset, recwarn):
    del recwarn  # of the other library's
    if contender == "transformers" and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    rows = decode.measure(dataclasses.replace(JOB, contender=contender, preset=preset))
    assert [(row["preset"], row["batch"], row["by"]) for row in rows] == [
        (preset, 1, contender),
        (preset, 3, contender),
    ]
    for row in rows:
        assert row["ms_first"] > 0
        assert row["ms_low"] <= row["ms_step"] <= row["ms_high"]


def test_speed_is_that_of_the_steps_after_the_first_token(monkeypatch):
    now = 0.0  # seconds, on a clock that only decoding moves

    def decode_slowly(prompts, length):
        nonlocal now
        now += 0.5 + 0.25 * (length - 1)
        return prompts[:, :1].repeat(length, axis=1)

    slow = lambda job: decode.Decoder(decode_slowly, lambda: None, "")
    monkeypatch.setattr(decode, "of_jax", slow)
    monkeypatch.setattr(decode.time, "perf_counter", lambda: now)
    rows = decode.measure(JOB)
    assert [row["tokens_per_second"] for row in rows] == [4, 12]
    assert {(row["ms_first"], row["ms_low"], row["ms_step"], row["ms_high"]) for row in rows} == {
        (500, 250, 250, 250)
    }


def test_a_contender_that_gives_too_few_tokens_is_told(monkeypatch):
    few = lambda job: decode.Decoder(lambda prompts, length: prompts[:, :1], lambda: None, "")
    monkeypatch.setattr(decode, "of_jax", few)
    with pytest.raises(RuntimeError, match=r"gave \(1, 1\) tokens, not \(1, 17\)"):
        decode.measure(JOB)


@pytest.mark.exhaustive
def test_contenders_have_processes_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    words = f"--preset micro --batch 2 --vocab 300 --vs mamba_ssm --out {tmp_path / 'a.json'}"
    assert decode.main(words.split()) == 1
    assert "jaxkern, micro, batch 2: " in capsys.readouterr().out
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["failed"] == ["mamba_ssm, micro: not installed"]
    assert [(row["by"], row["batch"]) for row in told["rows"]] == [("jaxkern", 2)]
    text = report.text([("cpu-decode.json", told)])
    assert "prompts of 16 tokens, 16 more after the first, a vocabulary of 300;" in text
    assert "Not run: mamba_ssm, micro: not installed." in text
    with pytest.raises(SystemExit):
        decode.main(["--tokens", "20"])
    assert "--tokens must be a multiple of 16, got 20" in capsys.readouterr().err


def test_table_has_the_speed_up_over_each():
    def row(by, speed, **rest):
        told = {"preset": "130m", "batch": 8, "by": by, "tokens_per_second": speed}
        told |= {"ms_step": 2.0, "ms_low": 1.9, "ms_high": 2.3, "ms_first": 30.25}
        return told | {"peak_gib": 1.5, "versions": "x 1"} | rest

    rows = [row("jaxkern", 4000), row("mamba_ssm", 3200, peak_gib=None)]
    rows.append(row("mamba_ssm", 3200, batch=1))
    about = {"device": "NVIDIA H200", "prompt": 128, "tokens": 64, "vocab": 50280, "failed": []}
    text = report.text([("a-decode.json", {**about, "rows": rows})])
    assert "| 130m, 8 | jaxkern | 4,000 |  | 2.00 ± 0.20 | 30.2 | 1.5 | x 1 | 1 |" in text
    assert "| 130m, 8 | mamba_ssm | 3,200 | 1.25× | 2.00 ± 0.20 | 30.2 |  | x 1 | 1 |" in text
    assert "| 130m, 1 | mamba_ssm | 3,200 |  |" in text
    assert text.count("## Decoding") == 1
    assert "## a-decode" not in text


def test_scans_are_beside_each_other():
    row = {"preset": "130m", "op": "ssd_step", "batch": 64, "us_layer": 25.04, "gb_s": 4021}
    of_both = [row | {"by": "kernel"}, row | {"by": "plain JAX", "us_layer": 50.0, "gb_s": 2014}]
    alone = {"rows": [], "scans": [row | {"by": "plain JAX", "batch": 1}]}
    parts = decode._scans([("a", {"rows": [], "scans": of_both}), ("b", alone)])
    assert "| 130m | `ssd_step` | 64 | 25.0 µs, 4,021 GB/s | 50.0 µs, 2,014 GB/s | 1 |" in parts[1]
    assert "| 130m | `ssd_step` | 1 |  | 25.0 µs, 4,021 GB/s | 2 |" in parts[1]
    assert decode._scans([("a", {"rows": []})]) == []
