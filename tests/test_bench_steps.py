"""Bench commands that train, decode and split models: short runs on a CPU, and their rows."""

import argparse
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import devices, layers, processes, train
from bench.cases import case
from jaxkern.lm.config import PRESETS
from jaxkern.nn import mamba2
from tests.check import exhaustive

TRAINED = train.Job("jaxkern", "micro", length=16, tokens=70, steps=12, warmup=2)
DECODED = train.Decoding("jaxkern", "micro", 300, batches=(1, 3), prompt=5, tokens=16, repeats=1)
LAYER = layers.Job("auto", mamba2.Sizes(16, d_state=8, headdim=8), 2, 16, calls=1)
TWO_DEVICES = pytest.mark.skipif(len(jax.devices()) < 2, reason="it is split between two")


@pytest.fixture(autouse=True)
def memory_for_all(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "words", "by", "absent"),
    [
        (
            train.main,
            "--preset micro --length 16 --tokens 64 --only jaxkern,",
            "contender",
            "length 16",
        ),
        (train.decode, "--preset micro --batch 2 --vocab 300 --only jaxkern,", "by", ""),
        (
            layers.main,
            "--layer mamba2 --calls 2 --only auto,jaxkern-scan,",
            "implementation",
            "2 × 64",
        ),
    ],
    ids=["train", "decode", "layers"],
)
def test_contenders_have_processes_of_their_own(command, words, by, absent, tmp_path):
    out = tmp_path / "a.json"
    words = f"{words} mamba_ssm".replace(", ", ",").split()
    assert command([*words, "--out", str(out)]) == 1
    told = json.loads(out.read_text())
    assert "ON A CPU" in told["clock"]
    (failed,) = told["failed"]
    assert re.fullmatch(f"mamba_ssm, .*{absent}: ModuleNotFoundError: No module .*", failed)
    ours = {"contender": ["jaxkern"], "by": ["jaxkern"], "implementation": ["auto", "jaxkern-scan"]}
    assert [row[by] for row in told["rows"]] == ours[by]


# Training


def test_tokens_are_skewed_and_fill_the_batch():
    batches = train.draw(TRAINED, TRAINED.batch)
    assert {(b.shape, b.dtype) for b in batches} == {((4, 17), np.dtype(np.int32))}
    large = np.stack(train.draw(dataclasses.replace(TRAINED, length=999), 10))
    assert large.max() < 256
    share = 1 / np.sum(1 / np.arange(1, 257))
    assert [np.mean(large == i) for i in (0, 1)] == pytest.approx([share, share / 2], rel=0.05)


def test_operations_of_the_products():
    """Six for each weight of a matrix."""
    shapes = [(768, 3072), (1536, 48 + 32), (48, 1536), (1536, 768)]
    weights = 24 * sum(a * b for a, b in shapes) + 256 * 768
    assert train.product_operations(PRESETS["130m"].model) == 6 * weights


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("contender", "preset", "vocabulary", "parameters"),
    [
        ("xla-loop", "micro", 256, 8560),
        ("jaxkern-remat", "micro", 300, 8560 + 16 * 44),
        ("jaxkern-loop", "mamba2-micro", 256, 8088),
    ],
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
    assert np.stack(train.draw(large, 50)).max() > 10_000


@pytest.mark.exhaustive
def test_a_failing_contender_leaves_its_reason():
    unknown = dataclasses.replace(TRAINED, preset="none")
    absent = dataclasses.replace(TRAINED, contender="jla-loop")
    apart = lambda *jobs, **how: dict(
        processes.each(train.measure, [(job,) for job in jobs], apart=True, most=1, **how)
    )
    told = apart(unknown, absent) | apart(TRAINED, limit=0.01)
    assert told[unknown,] == "KeyError: 'none'"
    assert told[absent,].startswith("ModuleNotFoundError: No module named ")
    assert told[TRAINED,] == "not done within 0 s"


# Time that checkpoints cost


def test_checkpoints_are_beside_none(monkeypatch, tmp_path):
    """A run with checkpoints takes 12 ms a step here, one without 10."""
    ran = []

    def reports(flags, folder):
        ran.append(flags["--checkpoint-every"])
        ms = 0.012 if flags["--checkpoint-every"] == 4 else 0.010
        return {step: step * ms for step in range(2, flags["--steps"] + 1, 2)}

    monkeypatch.setattr(train, "reports", reports)
    size = ["--every", "4", "--log-every", "2", "--count", "2", "--repeats", "1"]
    assert train.checkpoints([*size, "--out", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["percent"] == 20.0
    assert ran == [4, 12]


@pytest.mark.exhaustive
def test_reports_of_a_run_are_timed(tmp_path):
    flags = {"--preset": "micro", "--steps": 4, "--log-every": 2, "--eval-every": 4}
    seen = train.reports(flags, tmp_path / "run")
    assert list(seen) == [2, 4]
    assert seen[2] < seen[4]


# Several GPUs

SPLIT = [("none", 16, None), ("data=2", 32, 4e-4), ("fsdp=2", 32, 4e-4), ("sequence=2", 32, 3e-3)]
SPLIT += [("tensor=2", 16, 0.02)]  # parts are rounded to bf16 before they are added, in every layer
"""Meshes of a training step, tokens of all devices, and the error against one of them."""


@TWO_DEVICES
@pytest.mark.parametrize(
    ("what", "sizes", "mesh", "tokens", "error"),
    [
        *(exhaustive("micro", (1, 16), *case) for case in SPLIT),
        ("linear_scan", (1, 64, 8), "none", 64, None),
        ("linear_scan", (1, 64, 8), "sequence=2", 64, 1e-5),
        exhaustive("gated_delta_rule", (1, 512, 2, 8, 8, 1), "sequence=2", 512, 1e-5),
    ],
)
def test_what_is_split_is_timed_and_has_the_results_of_one_device(what, sizes, mesh, tokens, error):
    row = devices.measure(devices.Job(what, sizes, mesh, check=True))
    told = what, " × ".join(map(str, sizes)), mesh, 2 if error else 1
    assert (row["what"], row["sizes"], row["mesh"], row["devices"]) == told
    rounded = 0.0005 / row["ms"]  # the milliseconds have three digits behind the point
    assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"], rel=2 * rounded)
    assert row["first_step_s"] > 0
    if error:
        assert 0 < float(row["error"]) < error
    else:
        assert row["error"] == ""


def test_rows_of_meshes_have_their_efficiency():
    def row(what, mesh, count, speed, sizes="one"):
        told = {"what": what, "sizes": sizes, "mesh": mesh, "devices": count, "ms": 1.0}
        return told | {"tokens_per_second": speed, "efficiency": ""}

    rows = [row("a", "none", 1, 1000), row("a", "data=2", 2, 1900), row("b", "data=2", 2, 5)]
    rows.append(row("a", "data=2", 2, 5, sizes="another"))
    want = [row | ({"efficiency": "95.0%"} if row is rows[1] else {}) for row in rows]
    assert devices.with_efficiency(rows) == want
    for what, told in (("gated_delta_rule", "95.0%"), ("ssd", "")):
        part = row(what, "none", 1, 1000, "1 × 64 × 2")
        whole = row(what, "sequence=2", 2, 1900, "1 × 128 × 2")
        assert devices.with_efficiency([part, whole]) == [part, whole | {"efficiency": told}]


def test_sizes_and_ops_that_are_named_are_measured_alone():
    def named(**options):
        given = {"preset": None, "size": None, "op": None, "remat": "none", "check": False}
        args = argparse.Namespace(mesh=["sequence=2"], **given | options)
        return devices.jobs(args, gpu=True, count=2)

    meshes = ("none", "sequence=2")
    steps = [devices.Job("130m", (1, 65536), mesh, "layer") for mesh in meshes]
    assert named(size=["1x65536"], remat="layer") == steps
    lengths = [(length, mesh) for length in (65536, 524288) for mesh in meshes]
    scans = [f"ssd, 1x{length}x24x64x128x1, {mesh}" for length, mesh in lengths]
    assert [str(job) for job in named(op=["ssd"])] == scans
    assert {job.what for job in named(size=["8x4096"], op=["ssd"])} == {"130m", "ssd"}
    lengths = [(job.sizes[1], job.mesh) for job in named(op=["gated_delta_rule"])]
    long = [(262144, "none"), (524288, "sequence=2")]
    assert lengths == [(65536, "none"), (65536, "sequence=2"), *long]


# Decoding


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("contender", "preset"),
    [
        *(("jaxkern", "micro"), ("jaxkern-bf16", "mamba2-micro")),
        *(
            pytest.param("transformers", preset, marks=pytest.mark.needs("torch", "transformers"))
            for preset in ("micro", "mamba2-micro")
        ),
    ],
)
def test_contenders_decode_in_this_process(contender, preset, recwarn):
    del recwarn  # of the other library's
    rows = train.measure_decoding(dataclasses.replace(DECODED, contender=contender, preset=preset))
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

    monkeypatch.setattr(train, "decoder_of_jax", lambda job: (decode_slowly, "", lambda: None))
    monkeypatch.setattr(train.time, "perf_counter", lambda: now)
    rows = train.measure_decoding(DECODED)
    assert [row["tokens_per_second"] for row in rows] == [4, 12]
    found = {(row["ms_first"], row["ms_low"], row["ms_step"], row["ms_high"]) for row in rows}
    assert found == {(500, 250, 250, 250)}
    monkeypatch.setattr(
        train, "decoder_of_jax", lambda job: (lambda prompts, _: prompts[:, :1], "", None)
    )
    with pytest.raises(RuntimeError, match=r"gave \(1, 1\) tokens, not \(1, 17\)"):
        train.measure_decoding(DECODED)


# Layers


def test_another_result_is_refused(monkeypatch):
    def wrong(implementation, job):
        factor = 1.0 if implementation == "xla" else 1.5
        return lambda weights, x: factor * x

    monkeypatch.setattr(layers, "_own", wrong)
    with pytest.raises(RuntimeError, match=r"2 × 16: relative error 5.0e-01 against plain JAX"):
        layers.measure(LAYER)
    assert layers.measure(dataclasses.replace(LAYER, contender="xla"))["both_us"] > 0


@pytest.mark.exhaustive
def test_layers_are_timed_of_the_kinds_that_are_named(tmp_path):
    """mamba_ssm has the Mamba-2 layer alone."""
    out = tmp_path / "a.json"
    words = "--layer gdn --layer kda --calls 1 --only auto,xla,mamba_ssm --out"
    assert layers.main([*words.split(), str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    kinds = [(kind, name) for kind in ("gdn", "kda") for name in ("auto", "xla")]
    assert [(row["layer"], row["implementation"]) for row in rows] == kinds
    assert all(row["d_model"] == 32 and row["both_us"] > 0 for row in rows)


def test_bytes_kept_are_those_between_forward_and_backward():
    """A product with a matrix keeps nothing, and the product of two arrays both of them."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((2**14, 64), jnp.float32)

    def kept(call):
        both = lambda w, x, dout: case.result_and_gradients(call, (w, x), dout)
        one = jax.jit(both).lower(w, x, x).compile().memory_analysis().temp_size_in_bytes
        return layers.kept(call, one, w, x) / (x.size * 4)

    wide = lambda w, x: jnp.sin(x @ w) * (x @ jnp.cos(w))
    for call, copies in ((lambda w, x: x @ w), 0), (wide, 2), (jax.checkpoint(wide), 0):
        assert kept(call) == pytest.approx(copies, abs=0.1)
