"""Bench commands that train, decode and split models: short runs on a CPU, and their tables."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import checkpoints, curves, decode, devices, documents, layers, report, train, trainers
from jaxkern.lm.config import PRESETS
from jaxkern.nn import mamba2

TRAINED = trainers.Job("jaxkern", "micro", length=16, tokens=70, steps=12, warmup=2)
DECODED = decode.Job("jaxkern", "micro", 300, batches=(1, 3), prompt=5, tokens=16, repeats=1)
LAYER = layers.Job("auto", mamba2.Sizes(16, d_state=8, headdim=8), batch=2, length=16)
TWO_DEVICES = pytest.mark.skipif(len(jax.devices()) < 2, reason="it is split between two")


@pytest.fixture(autouse=True)
def memory_for_all(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def table(name, rows, **about):
    """The report of one file of results."""
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "failed": []} | about
    return report.text([(name, {**about, "rows": rows})])


# Training


def test_tokens_are_skewed_and_fill_the_batch():
    batches = trainers.draw(TRAINED, TRAINED.batch)
    assert {(b.shape, b.dtype) for b in batches} == {((4, 17), np.dtype(np.int32))}
    large = np.stack(trainers.draw(dataclasses.replace(TRAINED, length=999), 10))
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
    ("contender", "preset", "vocabulary", "parameters"),
    [
        ("xla-loop", "micro", 256, 8560),
        ("jaxkern-remat", "micro", 300, 8560 + 16 * 44),
        ("jaxkern-loop", "mamba2-micro", 256, 8088),
    ],
    ids=["xla-loop", "jaxkern-remat", "mamba2-loop"],
)
def test_contenders_learn_in_this_process(contender, preset, vocabulary, parameters):
    job = dataclasses.replace(TRAINED, contender=contender, preset=preset, vocab_size=vocabulary)
    found = train.measure(job)
    assert found["first_loss"] == pytest.approx(np.log(vocabulary), abs=0.05)
    assert found["last_loss"] < found["first_loss"] - 0.05
    assert found["steps"] == 12
    assert found["tokens_per_second"] == pytest.approx(64e3 / found["ms"], rel=0.02)
    assert (found["batch"], found["parameters"]) == (4, parameters)
    large = dataclasses.replace(job, vocab_size=50_280)
    assert str(large) == f"{contender}, {preset}, vocabulary 50,280, length 16"
    assert np.stack(trainers.draw(large, 50)).max() > 10_000


@pytest.mark.exhaustive
def test_documents_are_packed_and_kept_apart():
    job = dataclasses.replace(TRAINED, document=5)
    assert str(job) == "jaxkern, micro, documents of 5, length 16"
    ids = np.stack([d["segment_ids"] for d in trainers.draw_documents(job, 50)])
    assert ids.shape == (trainers.BATCHES, 50, 17)
    assert np.mean(np.diff(ids, axis=-1)) == pytest.approx(1 / 5, rel=0.1)
    apart, together = (train.measure(each)["first_loss"] for each in (job, TRAINED))
    assert apart != together
    assert apart == pytest.approx(together, abs=0.05)
    for contender in ("jla", "mamba_ssm"):
        with pytest.raises(ValueError, match=f"model of {contender} does not keep documents"):
            train.measure(dataclasses.replace(job, contender=contender))


@pytest.mark.exhaustive
def test_trainers_have_processes_of_their_own(tmp_path, capsys):
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
def test_a_failing_contender_leaves_its_reason():
    jobs = [dataclasses.replace(TRAINED, preset="none")]
    jobs.append(dataclasses.replace(TRAINED, contender="jla-loop"))
    assert list(train.attempt(jobs, 60)) == [
        (jobs[0], "KeyError: 'none'"),
        (jobs[1], "not installed"),
    ]
    assert list(train.attempt([TRAINED], 0.01)) == [(TRAINED, "not done within 0 s")]


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


def trained(contender, tokens_per_second, **rest):
    told = {"preset": "130m", "length": 2048, "batch": 8, "ms": 80.0, "ms_low": 79.0}
    told |= {"ms_high": 82.0, "tflop_s": 90.5, "compile_s": 30.0, "versions": "jax 1"}
    told |= {"first_loss": 5.5, "last_loss": 4.5, "peak_gib": 20.25}
    return {**told, "contender": contender, "tokens_per_second": tokens_per_second, **rest}


def test_table_of_training_and_the_fastest_other():
    rows = [trained("jaxkern", 195_000, program_gib=18.5), trained("xla", 39_000, peak_gib=None)]
    rows += [trained("mamba_ssm", 150_000), trained("mamba_ssm", 150_000, preset="370m")]
    text = table("a-lm.json", rows)
    assert "| 130m, 8 × 2048 | jaxkern | 195,000 |  | 80.0 ± 1.5 | 90.5 | 20.25 | 18.5 |" in text
    assert "| plain JAX | 39,000 | 5.00× | 80.0 ± 1.5 | 90.5 |  |  | 30.0 | 5.50 → 4.50 |" in text
    assert "| 130m, 8 × 2048 | mamba_ssm | 150,000 | 1.30× |" in text
    assert "| 370m, 8 × 2048 | mamba_ssm | 150,000 |  |" in text
    assert "## a-lm" not in text
    rows = [trained(*r) for r in (("jaxkern", 99_000), ("mamba_ssm", 50_000), ("jla", 60_000))]
    found = documents._training_rows([("a-lm.json", {"rows": rows})], [("130m", 2048)])
    told = ["99,000 tokens/s, 20.2 GiB", "", "jax-linear-attention 60,000 tokens/s, 20.2 GiB"]
    assert [*found] == [["language model, 130m, B 8, L 2048", "step", *told]]


# Loss curves, and what checkpoints cost


def test_curves_are_compared_by_means():
    losses, beside = [3.0] * 20 + [2.0] * 20 + [1.5] * 5, [3.0] * 20 + [2.5] * 20 + [1.0] * 5
    got = curves.row("a", losses, beside)
    want = {"first": 3.0, "last": 1.5, "difference": 0.5, "largest": 0.5, "losses": losses}
    assert {name: got[name] for name in want} == want


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


def test_checkpoints_are_beside_none(monkeypatch, tmp_path, capsys):
    """A run with checkpoints takes 12 ms a step here, one without 10."""
    ran = []

    def reports(flags, folder):
        ran.append(flags["--checkpoint-every"])
        ms = 0.012 if flags["--checkpoint-every"] == 4 else 0.010
        return {step: step * ms for step in range(2, flags["--steps"] + 1, 2)}

    monkeypatch.setattr(checkpoints, "reports", reports)
    size = ["--every", "4", "--log-every", "2", "--count", "2", "--repeats", "1"]
    assert checkpoints.main([*size, "--out", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["percent"] == 20.0
    assert ran == [4, 12]
    with pytest.raises(SystemExit):
        checkpoints.main(["--every", "100", "--log-every", "100"])
    assert "--every must be twice --log-every" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_reports_of_a_run_are_timed(tmp_path):
    flags = {"--preset": "micro", "--steps": 4, "--log-every": 2, "--eval-every": 4}
    seen = checkpoints.reports(flags, tmp_path / "run")
    assert list(seen) == [2, 4]
    assert seen[2] < seen[4]


# Several GPUs


@TWO_DEVICES
@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["none", "fsdp=2", "sequence=2"])
def test_a_training_step_is_timed(mesh):
    row = devices.measure(devices.Job("micro", (1, 16), mesh))
    count = 1 if mesh == "none" else 2
    assert (row["what"], row["sizes"], row["devices"]) == ("micro", "1 × 16", count)
    assert row["tokens_per_second"] == pytest.approx(16e3 * count / row["ms"], rel=0.01)
    assert row["first_step_s"] > 0


@TWO_DEVICES
@pytest.mark.parametrize(
    ("what", "sizes", "mesh", "error"),
    # In bf16 parts of `tensor` are rounded before they are added up, in every layer.
    [
        *(
            pytest.param("micro", (1, 16), mesh, error, marks=pytest.mark.exhaustive)
            for mesh, error in (
                *(("data=2", 4e-4), ("fsdp=2", 4e-4)),
                *(("tensor=2", 0.02), ("sequence=2", 3e-3)),
            )
        ),
        ("linear_scan", (1, 64, 8), "sequence=2", 1e-5),
    ],
)
def test_what_is_split_has_the_results_of_one_device(what, sizes, mesh, error):
    row = devices.measure(devices.Job(what, sizes, mesh, check=True))
    assert row["devices"] == 2
    assert 0 < float(row["error"]) < error


def test_efficiency_is_told_of_meshes_alone():
    def row(what, mesh, count, speed):
        return {"what": what, "mesh": mesh, "devices": count, "tokens_per_second": speed}

    rows = [row("a", "none", 1, 1000), row("a", "data=2", 2, 1900), row("b", "data=2", 2, 5)]
    rows += [row("a", "data=2", 2, 5) | {"sizes": "another"}]
    told = devices.with_efficiency([r | {"efficiency": ""} for r in rows])
    assert [r["efficiency"] for r in told] == ["", "95.0%", "", ""]


def test_sizes_and_ops_that_are_named_are_measured_alone():
    assert devices.jobs(2, ["130m"], ["sequence=2"], True, [(1, 65536)], "layer") == [
        devices.Job("130m", (1, 65536), mesh, "layer") for mesh in ("none", "sequence=2")
    ]
    jobs = devices.jobs(2, ["130m"], ["sequence=2"], True, ops=["ssd"])
    assert [str(job) for job in jobs] == [
        f"ssd, 1x{length}x24x64x128x1, {mesh}"
        for length in (65536, 524288)
        for mesh in ("none", "sequence=2")
    ]
    both = devices.jobs(2, ["130m"], ["data=2"], True, [(8, 4096)], ops=["ssd"])
    assert {job.what for job in both} == {"130m", "ssd"}


def test_a_run_on_several_gpus_is_a_section_of_the_report(tmp_path, monkeypatch):
    job = devices.Job("linear_scan", (1, 64, 8), "none")
    row = devices.measure(job)
    monkeypatch.setattr(devices, "jobs", lambda *_: [job])
    monkeypatch.setattr(devices, "attempt", lambda jobs, *_: [(jobs[0], row)])
    assert devices.main(["--out", str(tmp_path / "cpu-devices.json")]) == 0
    reports = report.load(tmp_path)
    assert "## Several GPUs" in report.text(reports)
    assert "| linear_scan | 1 × 64 × 8 | none | 1 |" in documents.FIGURES["devices"](reports)


# Decoding


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("contender", "preset"),
    [("jaxkern", "micro"), ("jaxkern-bf16", "mamba2-micro")]
    + [("transformers", preset) for preset in ("micro", "mamba2-micro")],
)
def test_contenders_decode_in_this_process(contender, preset, recwarn):
    del recwarn  # of the other library's
    if contender == "transformers" and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    rows = decode.measure(dataclasses.replace(DECODED, contender=contender, preset=preset))
    told = [(row["preset"], row["batch"], row["by"]) for row in rows]
    assert told == [(preset, 1, contender), (preset, 3, contender)]
    for row in rows:
        assert row["ms_first"] > 0
        assert row["ms_low"] <= row["ms_step"] <= row["ms_high"]


def test_speed_is_that_of_the_steps_after_the_first_token(monkeypatch):
    now = 0.0  # seconds, on a clock that only decoding moves

    def decode_slowly(prompts, length):
        nonlocal now
        now += 0.5 + 0.25 * (length - 1)
        return prompts[:, :1].repeat(length, axis=1)

    monkeypatch.setattr(decode, "of_jax", lambda job: decode.Decoder(decode_slowly, int, ""))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: now)
    rows = decode.measure(DECODED)
    assert [row["tokens_per_second"] for row in rows] == [4, 12]
    found = {(row["ms_first"], row["ms_low"], row["ms_step"], row["ms_high"]) for row in rows}
    assert found == {(500, 250, 250, 250)}
    few = decode.Decoder(lambda prompts, length: prompts[:, :1], int, "")
    monkeypatch.setattr(decode, "of_jax", lambda job: few)
    with pytest.raises(RuntimeError, match=r"gave \(1, 1\) tokens, not \(1, 17\)"):
        decode.measure(DECODED)


@pytest.mark.exhaustive
def test_decoders_have_processes_of_their_own(tmp_path, capsys):
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


def test_table_of_decoding():
    def row(by, speed, **rest):
        told = {"preset": "130m", "batch": 8, "by": by, "tokens_per_second": speed}
        told |= {"ms_step": 2.0, "ms_low": 1.9, "ms_high": 2.3, "ms_first": 30.25}
        return told | {"peak_gib": 1.5, "versions": "x 1"} | rest

    rows = [row("jaxkern", 4000), row("mamba_ssm", 3200, peak_gib=None)]
    rows.append(row("mamba_ssm", 3200, batch=1))
    text = table("a-decode.json", rows, prompt=128, tokens=64, vocab=50280)
    assert "| 130m, 8 | jaxkern | 4,000 |  | 2.00 ± 0.20 | 30.2 | 1.5 | x 1 | 1 |" in text
    assert "| 130m, 8 | mamba_ssm | 3,200 | 1.25× | 2.00 ± 0.20 | 30.2 |  | x 1 | 1 |" in text
    assert "| 130m, 1 | mamba_ssm | 3,200 |  |" in text
    assert text.count("## Decoding") == 1
    assert "## a-decode" not in text


def test_scans_of_decoding_are_beside_each_other():
    row = {"preset": "130m", "op": "ssd_step", "batch": 64, "us_layer": 25.04, "gb_s": 4021}
    of_both = [row | {"by": "kernel"}, row | {"by": "plain JAX", "us_layer": 50.0, "gb_s": 2014}]
    alone = {"rows": [], "scans": [row | {"by": "plain JAX", "batch": 1}]}
    parts = decode._scans([("a", {"rows": [], "scans": of_both}), ("b", alone)])
    assert "| 130m | `ssd_step` | 64 | 25.0 µs, 4,021 GB/s | 50.0 µs, 2,014 GB/s | 1 |" in parts[1]
    assert "| 130m | `ssd_step` | 1 |  | 25.0 µs, 4,021 GB/s | 2 |" in parts[1]
    assert decode._scans([("a", {"rows": []})]) == []


# Layers


@pytest.mark.exhaustive
def test_layers_are_timed(tmp_path):
    out = tmp_path / "a-layers.json"
    command = ["--d-model", "16", "--calls", "2", "--out", str(out)]
    assert layers.main([*command, "--only", "auto,jaxkern-scan,mamba_ssm"]) == 1
    told = json.loads(out.read_text())
    assert told["failed"] == ["mamba_ssm, d_model 16, 2 × 64: not installed"]
    row, again = told["rows"]
    assert again["implementation"] == "jaxkern-scan"
    assert (row["implementation"], row["d_model"], row["length"]) == ("auto", 16, 64)
    assert row["both_us"] > 0
    text = report.text([(out.name, told)])
    assert "| mamba2, d_model 16, 2 × 64 | jaxkern's choice |" in text
    assert "Not run: mamba_ssm, d_model 16, 2 × 64: not installed." in text


def test_another_result_is_refused(monkeypatch):
    def wrong(implementation, sizes):
        factor = 1.0 if implementation == "xla" else 1.5
        return lambda weights: weights, lambda weights, x: factor * x

    monkeypatch.setattr(layers, "_own", wrong)
    found = layers._attempt(LAYER, 1)
    assert found == "RuntimeError: output: relative error 5.0e-01 against plain JAX"
    assert isinstance(layers._attempt(dataclasses.replace(LAYER, contender="xla"), 1), dict)


def test_bytes_kept_are_those_between_forward_and_backward():
    """Of x (rows, 64) times a matrix: nothing. Of a product of two: both of them."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((2**14, 64), jnp.float32)

    def kept(call):
        one = jax.jit(layers._both(call)).lower(w, x, x).compile()
        return layers._kept(call, one, w, x) / (x.size * 4)

    wide = lambda w, x: jnp.sin(x @ w) * (x @ jnp.cos(w))
    for call, copies in ((lambda w, x: x @ w), 0), (wide, 2), (jax.checkpoint(wide), 0):
        assert kept(call) == pytest.approx(copies, abs=0.1)


def test_table_of_layers():
    shape = {"layer": "mamba2", "d_model": 1024, "batch": 8, "length": 2048, "kernels": 20}
    rows = [
        shape | {"implementation": "auto", "forward_us": 100.0, "both_us": 300.0, "kept_mib": 90.0},
        shape | {"implementation": "jla", "forward_us": 150.0, "both_us": 600.0, "kept_mib": 99.0},
    ]
    rows.append(rows[1] | {"d_model": 2048})
    text = table("a-layers", rows)
    where = "| mamba2, d_model 1024, 8 × 2048 |"
    assert f"{where} jaxkern's choice | 100 |  | 300 |  | 90 | 20 | 1 |" in text
    assert f"{where} jax-linear-attention | 150 | 1.50× | 600 | 2.00× | 99 | 20 | 1 |" in text
    assert "d_model 2048, 8 × 2048 | jax-linear-attention | 150 |  | 600 |  | 99 |" in text
    assert "## a-layers" not in text
