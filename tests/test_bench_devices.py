"""The bench of several GPUs: short runs on a CPU, and its part of the report."""

import jax
import pytest

from bench import devices, documents, report

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 2, reason="steps and sequences are split between two"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["none", "fsdp=2", "sequence=2"])
def test_a_training_step_is_timed(mesh):
    row = devices.measure(devices.Job("micro", (1, 16), mesh))
    count = 1 if mesh == "none" else 2
    assert (row["what"], row["sizes"], row["devices"]) == ("micro", "1 × 16", count)
    assert row["tokens_per_second"] == pytest.approx(16e3 * count / row["ms"], rel=0.01)
    assert row["first_step_s"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "error"),
    # In bf16 parts of `tensor` are rounded before they are added up, in every layer.
    [("data=2", 4e-4), ("fsdp=2", 4e-4), ("tensor=2", 0.02), ("sequence=2", 3e-3)],
)
def test_a_split_step_has_the_gradients_of_one_device(mesh, error):
    row = devices.measure(devices.Job("micro", (1, 16), mesh, check=True))
    assert 0 < float(row["error"]) < error


def test_a_split_sequence_has_the_results_of_one_device():
    row = devices.measure(devices.Job("linear_scan", (1, 64, 8), "sequence=2", check=True))
    assert row["devices"] == 2
    assert float(row["error"]) < 1e-5


def test_efficiency_is_told_of_meshes_alone():
    def row(what, mesh, count, speed):
        return {"what": what, "mesh": mesh, "devices": count, "tokens_per_second": speed}

    rows = [row("a", "none", 1, 1000), row("a", "data=2", 2, 1900), row("b", "data=2", 2, 5)]
    rows += [row("a", "data=2", 2, 5) | {"sizes": "another"}]
    told = devices.with_efficiency([r | {"efficiency": ""} for r in rows])
    assert [r["efficiency"] for r in told] == ["", "95.0%", "", ""]


def test_steps_of_given_sizes_are_measured_alone():
    assert devices.jobs(2, ["130m"], ["sequence=2"], True, [(1, 65536)], "layer") == [
        devices.Job("130m", (1, 65536), mesh, "layer") for mesh in ("none", "sequence=2")
    ]


def test_ops_that_are_named_are_measured_alone():
    jobs = devices.jobs(2, ["130m"], ["sequence=2"], True, ops=["ssd"])
    assert [str(job) for job in jobs] == [
        "ssd, 1x65536x24x64x128x1, none",
        "ssd, 1x65536x24x64x128x1, sequence=2",
        "ssd, 1x524288x24x64x128x1, none",
        "ssd, 1x524288x24x64x128x1, sequence=2",
    ]
    both = devices.jobs(2, ["130m"], ["data=2"], True, [(8, 4096)], ops=["ssd"])
    assert {job.what for job in both} == {"130m", "ssd"}


def test_a_run_is_a_section_of_the_report(tmp_path, monkeypatch):
    job = devices.Job("micro", (1, 16), "none")
    row = devices.measure(job)
    monkeypatch.setattr(devices, "jobs", lambda *_: [job])
    monkeypatch.setattr(devices, "attempt", lambda jobs, *_: [(jobs[0], row)])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert devices.main(["--out", str(tmp_path / "cpu-devices.json")]) == 0
    reports = report.load(tmp_path)
    assert "## Several GPUs" in report.text(reports)
    assert "| micro | 1 × 16 | none | 1 |" in documents.FIGURES["devices"](reports)
