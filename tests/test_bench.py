"""The bench's report: what is drawn of it, and what becomes of a peer that is not there."""

import dataclasses
import json
import multiprocessing
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from bench import cases, peers, pictures, precision, processes, run, steps, timing
from jaxkern.cases import MODELS, optim
from jaxkern.cases.peers import Arranged


def report(percents):
    """A report of rms_norm over rows of 2^k elements."""
    row = run.Row("rms_norm", "", "bfloat16", "xla", "forward", *[1] * 5, *[0] * 6, {})
    rows = [
        dataclasses.replace(row, shape=f"{m}x{n}", percent=percent)
        for (m, n), percent in percents.items()
    ]
    return {
        "device": "GPU",
        "jax": "1",
        "commit": "c",
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def test_picture_has_the_most_rows_of_each_length(tmp_path):
    sizes = {(8, 64): 10.0, (16, 64): 20.0, (8, 128): 30.0, (8, 256): 40.0}
    got = report(sizes)
    line = pictures.points(got["rows"])["rms_norm"]["forward"]["xla"]
    assert line == [(64, 20.0), (128, 30.0), (256, 40.0)]
    assert pictures.draw(got, tmp_path / "a.svg")
    assert "rms_norm, forward" in (tmp_path / "a.svg").read_text()
    assert not pictures.draw(report({(8, 64): 10.0}), tmp_path / "b.svg")


@pytest.mark.exhaustive
def test_imports_leave_the_device_alone():
    """Each process says by itself how much of the device's memory it takes, before it takes it."""
    modules = "accuracy, aot, backbones, layers, pictures, precision, report, run, train"
    asked = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    command = [sys.executable, "-c", f"from bench import {modules}; {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_peers_have_an_op_with_its_options():
    mine = {case.shape: case for case in cases.cases(small=False) if case.op == "selective_scan"}
    assert peers.has(mine["8x2048x2048x16"], "mamba_ssm")
    assert not peers.has(mine["8x2048x2048x16/64"], "mamba_ssm")
    assert not peers.has(mine["8x2048x2048x16"], "liger")
    scan = next(case for case in cases.cases(small=False) if case.op == "linear_scan")
    assert [name for name in ("fla", "mamba_ssm") if peers.has(scan, name)] == ["fla"]
    step = optim.steps(small=False)[0]
    assert peers.has(step, "optax")
    assert not peers.has(step, "mamba_ssm")


def test_shapes_of_models_are_cases():
    """Once each, with the names of all that have them."""
    every = cases.cases(small=False)
    places = [(case.op, case.shape, case.dtype) for case in every]
    assert len(set(places)) == len(places)
    models = {place: getattr(case, "models", ()) for place, case in zip(places, every, strict=True)}
    assert models["selective_scan", "8x2048x1536x16", "bfloat16"] == ("mamba-130m",)
    assert models["rms_norm", "16384x4096", "bfloat16"] == ("llama-2-7b", "llama-3-8b")
    assert {name for names in models.values() for name in names} == set(MODELS)
    assert not any(models["rms_norm", "16384x4096", dtype] for dtype in ("float32", "float16"))


def test_models_are_for_a_gpu(capsys):
    assert run.main(["--model", "mamba-130m"]) == 2
    assert "for a GPU" in capsys.readouterr().err


def test_products_are_beside_their_ceiling(tmp_path, capsys):
    out = tmp_path / "r.json"
    args = ["--op", "linear", "--calls", "2", "--vs", "xla", "--out", str(out)]
    assert run.main(args) == 0
    told = json.loads(out.read_text())
    assert told["product_tflop_s"] > 0
    assert "products " in capsys.readouterr().out
    for row in told["rows"]:
        rate = {"forward": 2, "backward": 4, "both": 6}[row["direction"]] * 256**3 / row["us"]
        assert row["percent_products"] > 0
        assert row["tflop_s"] == pytest.approx(rate * 1e-6, rel=2e-3)
        assert row["first_call_s"] > 0
        assert row["compile_s"] >= 0


def test_absent_peer_is_named(tmp_path, capsys):
    """It is an error to ask for one, and the others are timed."""
    out = tmp_path / "r.json"
    args = ["--op", "rms_norm", "--calls", "1", "--vs", "nobody", "--out", str(out)]
    assert run.main(args) == 1
    assert "nobody does not have it" in capsys.readouterr().out


def losses(row):
    """The case of the loss whose shape ends in this."""
    return next(
        case
        for case in cases.cases(small=False)
        if case.op == "linear_cross_entropy" and case.shape == f"8192x4096x128256-{row}"
    )


def test_peers_of_the_loss():
    """Who saves memory is beside the kernels that do; plain JAX cannot, and is not timed there."""
    whole, in_parts = losses("plain"), losses("plain-160MiB")
    names = ["jax", "quack", "liger", "jla", "compile"]
    assert [name for name in names if peers.has(whole, name)] == names
    assert [name for name in names if peers.has(in_parts, name)] == ["liger", "jla"]
    assert [run._is_timed(case, "xla") for case in (whole, in_parts)] == [True, False]
    assert all(run._is_timed(in_parts, name) for name in ("mosaic", "auto", "nobody"))


SMALL = next(case for case in cases.cases(small=True) if case.op == "linear_cross_entropy")
CEILINGS = timing.Ceilings(1e9, 1e9)


def embedded(change=lambda x: x):
    """The loss of a weight that lies as an embedding does, and of a changed x."""
    loss = SMALL.of.peers["jax"]()
    return Arranged(
        lambda x, w, labels: loss(change(x), w.T, labels),
        lambda x, w, labels: (x, w.T, labels),
        back=lambda dx, dw: (dx, dw.T),
    )


@pytest.mark.exhaustive
def test_a_loss_is_timed_with_its_gradient(monkeypatch):
    """And one that is off by little, or has no gradient, is a wrong result."""
    monkeypatch.setattr(peers, "arranged", lambda *_: embedded())
    rows = run.measure_case(SMALL, "jax", CEILINGS, calls=1)
    assert [row.direction for row in rows] == ["forward", "both"]
    for change in (jax.lax.stop_gradient, lambda x: 1.1 * x):
        monkeypatch.setattr(peers, "arranged", lambda *_, by=change: embedded(by))
        with pytest.raises(RuntimeError, match="against plain JAX"):
            run.measure_case(SMALL, "jax", CEILINGS, calls=1)


def test_a_mean_is_held_to_a_hundredth_of_other_errors():
    assert float(run._error(jnp.float32(2.001), jnp.float32(2))) == pytest.approx(0.05, 1e-2)
    assert float(run._error(jnp.full(3, 2.001), jnp.full(3, 2.0))) == pytest.approx(5e-4, 1e-2)


@pytest.mark.compiled
@pytest.mark.large
def test_pytorch_is_timed_in_each_pass(tmp_path):
    """In processes that hold nothing of JAX's; a loss has no backward of its own."""
    pytest.importorskip("torch")
    out = tmp_path / "r.json"
    words = "--op rms_norm --shape 16384x256 --op linear_cross_entropy "
    words += f"--shape 16384x768x50304-plain --vs compile --calls 1 --out {out}"
    subprocess.run([sys.executable, "-m", "bench", "run", *words.split()], check=True)
    rows = [r for r in json.loads(out.read_text())["rows"] if r["implementation"] == "compile"]
    found = {op: {r["direction"] for r in rows if r["op"] == op} for op in ("rms_norm", SMALL.op)}
    assert found == {"rms_norm": {"forward", "both", "backward"}, SMALL.op: {"forward", "both"}}
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_optimizer_steps_are_timed_beside_optax(tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    args = ["--op", "fused_adamw", "--calls", "1", "--vs", "xla,optax,update,liger"]
    args += ["--out", str(out)]
    monkeypatch.setattr(peers, "installed", lambda: ["optax", "update", "liger"])
    assert run.main(args) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["implementation"], r["direction"]) for r in rows] == [
        ("xla", "step"),
        ("optax", "step"),
        ("update", "step"),
    ]


@pytest.mark.exhaustive
def test_optax_does_the_same_steps():
    found = {s.shape: s for s in optim.steps(small=False) if s.op == "fused_adamw"}
    for shape in ("100M", "100M-master", "100M-folded", "100M-bf16-all"):
        for name in ("optax", "update")[shape == "100M-bf16-all" :]:
            changes = (steps.changes_of(found[shape], by)() for by in (name, "xla"))
            steps.check(found[shape], *changes)
    assert peers.has(found["100M-folded"], "optax")
    assert not peers.has(found["100M-8-bit-state"], "optax")


def test_a_wrong_step_is_not_timed(monkeypatch):
    right = steps.program

    def wrong(step, name):
        init, go = right(step, name)
        if name == "xla":
            return init, go
        return init, lambda g, s, p: go(g, s, [0.9 * a for a in p])

    monkeypatch.setattr(steps, "program", wrong)
    with pytest.raises(RuntimeError, match="against plain JAX"):
        steps.measure(optim.steps(small=True)[0], "optax", 1, processes.Alone())


def test_losses_are_compared_with_fp32_seed_by_seed():
    losses = {"fp32": (2.0, 3.0), "bf16": (2.1, 3.1), "fp16": (1.9, 3.0)}
    rows = [
        {"precision": name, "seed": seed, "validation_loss": loss}
        for name, of_seed in losses.items()
        for seed, loss in enumerate(of_seed)
    ]
    got = {row["precision"]: row for row in precision.summary(rows)}
    assert [round(got[name]["to_fp32"], 6) for name in losses] == [0.0, 0.1, -0.05]
    assert round(got["bf16"]["mean"], 6) == 2.6
    assert round(got["fp32"]["spread"], 6) == 0.707107


def test_who_times_is_alone_and_goes_before_those_who_compile():
    shared = processes.Shared(multiprocessing.get_context("fork"))
    order, started, asked = [], threading.Event(), threading.Event()

    def compile_first():
        with shared.compiling():
            started.set()
            asked.wait()
            order.append("compiled")

    def measure():
        with shared:
            order.append("timed")

    def compile_later():
        with shared.compiling():
            order.append("compiled later")

    threads = [threading.Thread(target=f) for f in (compile_first, measure, compile_later)]
    threads[0].start()
    started.wait()
    threads[1].start()
    while not shared._waiting.value:  # a compiler that asks now finds one that waits to time
        time.sleep(0.001)
    threads[2].start()
    asked.set()
    for thread in threads:
        thread.join()
    assert order == ["compiled", "timed", "compiled later"]


def test_kernels_of_other_threads_are_counted_to_their_calls():
    """As a backward's, that CUPTI may report after all forwards."""
    forward, backward = [("f", 1.0), ("f", 2.0)], [("g", 10.0), ("h", 5.0), ("g", 20.0), ("h", 5.0)]
    assert timing.by_call(forward + backward, 2) == ([16.0, 27.0], ["f", "g", "h"])
    with pytest.raises(RuntimeError, match="3 kernels were recorded for 2 calls"):
        timing.by_call([*forward, ("g", 1.0)], 2)
