"""The bench of training steps: a short run on a CPU, and its table."""

import dataclasses
import json

import numpy as np
import pytest

from bench import documents, report, train, trainers
from jaxkern.lm.config import PRESETS

JOB = trainers.Job("jaxkern", "micro", length=16, tokens=70, steps=12, warmup=2)


def row(contender, tokens_per_second, **rest):
    told = {"preset": "130m", "length": 2048, "batch": 8, "ms": 80.0, "ms_low": 79.0}
    told |= {"ms_high": 82.0, "tflop_s": 90.5, "compile_s": 30.0, "versions": "jax 1"}
    told |= {"first_loss": 5.5, "last_loss": 4.5, "peak_gib": 20.25}
    return {**told, "contender": contender, "tokens_per_second": tokens_per_second, **rest}


def test_tokens_are_skewed_and_fill_the_batch():
    batches = trainers.draw(JOB, JOB.batch)
    assert {(b.shape, b.dtype) for b in batches} == {((4, 17), np.dtype(np.int32))}
    large = np.stack(trainers.draw(dataclasses.replace(JOB, length=999), 10))
    assert large.max() < 256
    share = 1 / np.sum(1 / np.arange(1, 257))
    assert np.mean(large == 0) == pytest.approx(share, rel=0.05)
    assert np.mean(large == 1) == pytest.approx(share / 2, rel=0.05)


@pytest.mark.parametrize(
    ("preset", "shapes"),
    [
        ("130m", [(768, 3072), (1536, 48 + 32), (48, 1536), (1536, 768)]),
        ("mamba2-130m", [(768, 3072 + 256 + 24), (1536, 768)]),
    ],
)
def test_operations_of_the_products(preset, shapes):
    """Six for each weight of a matrix, as in the model that has no others of two axes but A."""
    weights = 24 * sum(a * b for a, b in shapes) + 256 * 768
    assert train.product_operations(PRESETS[preset].model) == 6 * weights


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("contender", "preset", "parameters"),
    [
        ("xla-loop", "micro", 8560),
        ("jaxkern-remat", "micro", 8560),
        ("jaxkern-loop", "mamba2-micro", 8088),
    ],
    ids=["xla-loop", "jaxkern-remat", "mamba2-loop"],
)
def test_contenders_learn_in_this_process(contender, preset, parameters):
    found = train.measure(dataclasses.replace(JOB, contender=contender, preset=preset))
    assert found["last_loss"] < found["first_loss"] - 0.05
    assert found["first_loss"] == pytest.approx(np.log(256), abs=0.05)
    assert found["steps"] == 12
    assert found["tokens_per_second"] == pytest.approx(64e3 / found["ms"], rel=0.02)
    assert (found["batch"], found["parameters"]) == (4, parameters)


@pytest.mark.exhaustive
def test_contenders_have_processes_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    words = f"--preset micro --length 16 --tokens 64 --vs mamba_ssm --out {tmp_path / 'a.json'}"
    assert train.main([*words.split(), "--jobs", "2"]) == 1
    assert "WALL-CLOCK TIME ON A CPU" in capsys.readouterr().out
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["failed"] == ["mamba_ssm, micro, length 16: not installed"]
    assert [r["contender"] for r in told["rows"]] == ["jaxkern"]
    assert told["rows"][0]["last_loss"] < told["rows"][0]["first_loss"]
    text = report.text([("cpu-lm.json", told)])
    assert "Not run: mamba_ssm, micro, length 16: not installed." in text


@pytest.mark.exhaustive
def test_a_vocabulary_of_its_own():
    job = dataclasses.replace(JOB, vocab_size=50_280)
    assert str(job) == "jaxkern, micro, vocabulary 50,280, length 16"
    assert np.stack(trainers.draw(job, 50)).max() > 10_000
    found = train.measure(dataclasses.replace(job, vocab_size=300))
    assert (found["preset"], found["parameters"]) == ("micro, vocabulary 300", 8560 + 16 * 44)
    assert found["first_loss"] == pytest.approx(np.log(300), abs=0.05)


@pytest.mark.exhaustive
def test_documents_are_packed_and_kept_apart():
    job = dataclasses.replace(JOB, document=5)
    assert str(job) == "jaxkern, micro, documents of 5, length 16"
    ids = np.stack([d["segment_ids"] for d in trainers.draw_documents(job, 50)])
    assert ids.shape == (trainers.BATCHES, 50, 17)
    assert np.mean(np.diff(ids, axis=-1)) == pytest.approx(1 / 5, rel=0.1)
    apart, together = (train.measure(each)["first_loss"] for each in (job, JOB))
    assert apart != together
    assert apart == pytest.approx(together, abs=0.05)
    for contender in ("jla", "mamba_ssm"):
        with pytest.raises(ValueError, match=f"model of {contender} does not keep documents"):
            train.measure(dataclasses.replace(job, contender=contender))


def test_pytorch_trains_last_and_alone(tmp_path, monkeypatch):
    waves = []

    def attempt(jobs, limit):
        waves.append([job.contender for job in jobs])
        yield from ((job, "no") for job in jobs)

    monkeypatch.setattr(train, "attempt", attempt)
    words = "--preset micro --only jaxkern,mamba_ssm,xla --length 16 --length 32 --jobs 9"
    assert train.main([*words.split(), "--out", str(tmp_path / "a")]) == 1
    assert waves == [["jaxkern", "xla"] * 2, ["mamba_ssm"], ["mamba_ssm"]]
    told = json.loads((tmp_path / "a").read_text())["failed"]
    names = ["jaxkern", "mamba_ssm", "xla"]
    assert told == [f"{name}, micro, length {n}: no" for n in (16, 32) for name in names]


@pytest.mark.exhaustive
def test_failing_contender_leaves_its_reason():
    jobs = [
        dataclasses.replace(JOB, preset="none"),
        dataclasses.replace(JOB, contender="mamba_ssm"),
        dataclasses.replace(JOB, contender="jla-loop"),
    ]
    assert list(train.attempt(jobs, 60)) == [
        (jobs[0], "KeyError: 'none'"),
        (jobs[1], "not installed"),
        (jobs[2], "not installed"),
    ]
    assert list(train.attempt([JOB], 0.01)) == [(JOB, "not done within 0 s")]


def test_table_has_the_speed_up_over_each():
    rows = [row("jaxkern", 195_000, program_gib=18.5), row("xla", 39_000, peak_gib=None)]
    rows.append(row("mamba_ssm", 150_000))
    rows.append(row("mamba_ssm", 150_000, preset="370m"))
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "failed": []}
    text = report.text([("a-lm.json", {**about, "rows": rows})])
    assert "| 130m, 8 × 2048 | jaxkern | 195,000 |  | 80.0 ± 1.5 | 90.5 | 20.25 | 18.5 |" in text
    assert "| plain JAX | 39,000 | 5.00× | 80.0 ± 1.5 | 90.5 |  |  | 30.0 | 5.50 → 4.50 |" in text
    assert "| 130m, 8 × 2048 | mamba_ssm | 150,000 | 1.30× |" in text
    assert "| 370m, 8 × 2048 | mamba_ssm | 150,000 |  |" in text
    assert "## a-lm" not in text


def test_guide_names_the_fastest_other():
    rows = [row(*one) for one in (("jaxkern", 99_000), ("mamba_ssm", 50_000), ("jla", 60_000))]
    found = documents._training_rows([("a-lm.json", {"rows": rows})], [("130m", 2048)])
    told = ["99,000 tokens/s, 20.2 GiB", "", "jax-linear-attention 60,000 tokens/s, 20.2 GiB"]
    assert [*found] == [["language model, 130m, B 8, L 2048", "step", *told]]
