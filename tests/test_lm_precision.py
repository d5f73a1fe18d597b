"""Mixed precision of whole runs: one that diverges ends with one line."""

import re

import pytest

from jaxkern.lm.report import read_metrics
from tests.language_models import command


@pytest.fixture
def argv(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words of a text, " * 400)
    argv = ["train", "--preset", "micro", "--data", text, "--out", tmp_path / "run"]
    return [*argv, "--eval-batches", 1, "--mixed-precision"]


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
