"""The bench of layers: a short run on a CPU, what is refused, and its table."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from bench import layers, report
from jaxkern.nn import mamba2

JOB = layers.Job("auto", mamba2.Sizes(16, d_state=8, headdim=8), batch=2, length=16)


@pytest.mark.exhaustive
def test_run_and_its_table(tmp_path):
    out = tmp_path / "a-layers.json"
    command = ["--d-model", "16", "--calls", "2", "--out", str(out)]
    command += ["--only", "auto,jaxkern-scan,mamba_ssm"]
    assert layers.main(command) == 1
    told = json.loads(out.read_text())
    assert told["failed"] == ["mamba_ssm, d_model 16, 2 × 64: not installed"]
    row, again = told["rows"]
    assert again["implementation"] == "jaxkern-scan"
    assert (row["implementation"], row["d_model"], row["length"]) == ("auto", 16, 64)
    assert row["both_us"] > 0
    text = report.text([(out.name, told)])
    assert "| mamba2, d_model 16, 2 × 64 | jaxkern's choice |" in text
    assert "Not run: mamba_ssm, d_model 16, 2 × 64: not installed." in text
    assert "## a-layers" not in text


def test_another_result_is_refused(monkeypatch):
    def wrong(implementation, sizes):
        factor = 1.0 if implementation == "xla" else 1.5
        return lambda weights: weights, lambda weights, x: factor * x

    monkeypatch.setattr(layers, "_own", wrong)
    found = layers._attempt(JOB, 1)
    assert found == "RuntimeError: output: relative error 5.0e-01 against plain JAX"
    assert isinstance(layers._attempt(dataclasses.replace(JOB, contender="xla"), 1), dict)


def test_bytes_kept_are_those_between_forward_and_backward():
    """Of x (rows, 64) times a matrix: nothing. Of a product of two: both of them."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((2**14, 64), jnp.float32)

    def kept(call):
        one = jax.jit(layers._both(call)).lower(w, x, x).compile()
        return layers._kept(call, one, w, x) / (x.size * 4)

    assert kept(lambda w, x: x @ w) == pytest.approx(0, abs=0.1)
    wide = lambda w, x: jnp.sin(x @ w) * (x @ jnp.cos(w))
    assert kept(wide) == pytest.approx(2, abs=0.1)
    assert kept(jax.checkpoint(wide)) == pytest.approx(0, abs=0.1)


def test_table_has_the_speed_up_over_each():
    shape = {"layer": "mamba2", "d_model": 1024, "batch": 8, "length": 2048, "kernels": 20}
    rows = [
        shape | {"implementation": "auto", "forward_us": 100.0, "both_us": 300.0, "kept_mib": 90.0},
        shape | {"implementation": "jla", "forward_us": 150.0, "both_us": 600.0, "kept_mib": 99.0},
    ]
    rows.append(rows[1] | {"d_model": 2048})
    about = {"device": "NVIDIA H200", "jax": "1", "commit": "c", "failed": []}
    text = report.text([("b", {**about, "rows": []}), ("a-layers", {**about, "rows": rows})])
    where = "| mamba2, d_model 1024, 8 × 2048 |"
    assert f"{where} jaxkern's choice | 100 |  | 300 |  | 90 | 20 | 2 |" in text
    assert f"{where} jax-linear-attention | 150 | 1.50× | 600 | 2.00× | 99 | 20 | 2 |" in text
    assert "d_model 2048, 8 × 2048 | jax-linear-attention | 150 |  | 600 |  | 99 |" in text
