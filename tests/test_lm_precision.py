"""Mixed precision of whole runs: what diverges or cannot be had ends with one line."""

import re

import jax
import pytest

from jaxkern.lm.report import read_metrics
from tests.language_models import command


@pytest.fixture
def argv(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words of a text, " * 400)
    argv = ["train", "--preset", "micro", "--data", text, "--out", tmp_path / "run"]
    return [*argv, "--eval-batches", 1, "--mixed-precision"]


@pytest.mark.newest
@pytest.mark.parametrize(
    ("policy", "steps", "words"),
    [
        ("bf16", 40, r"at step 2 the loss is nan and the gradient norm nan; .* lower --lr than"),
        # The first step is done, and the scale halves from 2^15 to 1 while the next 15 are not.
        ("fp16", 40, r"at step 17 the loss is nan .*, or with --mixed-precision bf16"),
        (
            "fp16",
            8,
            r"after 8 steps the validation loss is not a number; .* lower --lr than 1e\+30",
        ),
    ],
)
def test_a_run_that_diverges_says_so(capsys, tmp_path, argv, policy, steps, words):
    line = command(capsys, *argv, policy, "--steps", steps, "--lr", 1e30, code=1)
    assert line.count("\n") == 1
    assert line.startswith("jaxkern: error: training diverged: ")
    assert re.search(words, line), line
    assert all(record["step"] <= 10 for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("field", ["params", "compute", "output"])
def test_float64_is_refused(capsys, tmp_path, argv, field, x64):
    """Without x64 JAX would compute in float32 and say nothing."""
    policy = "params=float32,compute=float32,output=float32".replace(
        f"{field}=float32", f"{field}=float64"
    )
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", x64)
    try:
        line = command(capsys, *argv, policy, code=1)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert f"--mixed-precision {policy}: float64 is more than the float32 that" in line
    assert line.endswith("; write float32\n")
    assert not (tmp_path / "run").exists()
