"""The sequence policies of the bench: what each may see, and the table of a short run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import backbones
from jaxkern.precision import Policy

SMALL = backbones.Sizes(batch=2, embed=4, hidden=16, state=2, heads=2, actions=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", backbones.BACKBONES)
def test_backbone_sees_the_past_and_not_the_future(name):
    """All but the MLP, which sees the present alone."""
    params = backbones.init(jax.random.key(0), name, SMALL)
    x, _ = backbones.draw(jax.random.key(1), 6, SMALL)

    def at_step_3(x):
        out = backbones.logits(name, Policy(), "xla", SMALL, params, x)
        return jnp.sum(out[:, 3] ** 2)

    by_step = np.abs(np.asarray(jax.jit(jax.grad(at_step_3))(x))).max((0, 2))
    assert by_step[3] > 0
    assert (by_step[4:] == 0).all()
    assert (by_step[:3] > 0).all() == (name != "mlp")
    assert name != "mlp" or (by_step[:3] == 0).all()


def test_actions_follow_the_average_of_the_observations():
    x, actions = backbones.draw(jax.random.key(1), 5, SMALL)
    directions = np.asarray(jax.random.normal(jax.random.key(99), (SMALL.embed, SMALL.actions)))
    weights = 0.9 ** np.arange(4, -1, -1.0)
    want = np.argmax(np.einsum("l,ble,ea->ba", weights, np.asarray(x), directions), -1)
    np.testing.assert_array_equal(actions[:, -1], want)


@pytest.mark.exhaustive
def test_run_and_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(backbones, "Sizes", lambda **_: SMALL)
    out, document, picture = (tmp_path / name for name in ("a.json", "a.md", "a.svg"))
    args = ["--backbone", "mlp", "--precision", "fp32", "--length", "4", "--steps", "60"]
    args += ["--out", str(out), "--table", str(document), "--picture", str(picture)]
    assert backbones.main(args) == 0
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["loss_after"] < row["loss_before"]
    assert row["step_us"] > row["forward_us"] > 0
    assert "ms a step" in picture.read_text()
    report["rows"].append(row | {"precision": "bf16", "step_us": row["step_us"] / 4})
    report["rows"].append(row | {"implementation": "mosaic", "step_us": row["step_us"] / 8})
    us = row["step_us"]
    gains = [f"{us:,.0f}", f"{us / 8:,.0f}", f"{us / 4:,.0f}", "", "8.00×", "", "4.00×", ""]
    assert f"| mlp | {' | '.join(gains)} |" in backbones.text(report)


def test_committed_table_is_up_to_date():
    reports = [json.loads(p.read_text()) for p in backbones.RESULTS.glob("*-backbones.json")]
    assert backbones.DOCUMENT.read_text() in [backbones.text(r) for r in reports]
