"""What ops exchange, compiled for GPUs that are not there: the rules, and what is wrong."""

import json
import re

import pytest

from bench import collectives
from jaxkern.cases import TABLE
from tests.test_package import constraints

HELD = json.loads(collectives.PATH.read_text())


def kinds(held):
    return {kind for of_pass in held.values() for kind in of_pass}


def test_committed_figures_are_of_every_program():
    assert list(HELD["programs"]) == collectives.names()
    assert HELD["jax"] == constraints("newest")["jax"]
    assert set(collectives.part()) < set(collectives.names())


def test_what_is_split_is_not_gathered():
    """No array goes from each device to each; a sequence's states and last inputs go on."""
    of_name = {case.name: case for case in TABLE}
    for name, held in HELD["programs"].items():
        case, axis, _ = re.split(" x |=", name)
        assert "all-to-all" not in kinds(held), name
        if axis == "l":
            assert kinds(held) <= {"all-gather", "all-reduce", "collective-permute"}, name
            both = {kind: count for kind, (count, _) in held["both"].items()}
            assert both.get("collective-permute", 0) <= (2 if "conv" in case else 1), name
            assert both.get("all-gather", 0) <= (0 if "conv" in case else 2), name
        elif axis in of_name[case].split.split():
            assert kinds(held) <= {"all-reduce"}, name
            counts = {kind: count for kind, (count, _) in held.get("both", {}).items()}
            one_sum = not re.search("cross_entropy|gated_linear_unit|_step", case)
            if "both" in held and one_sum:
                assert counts == of_name[case].collectives(axis), name


def test_what_devices_add_up_is_small_where_it_can_be():
    exchanged = lambda name, direction="both": HELD["programs"][name][direction]
    (rows, length), sizes = collectives.SIZES["m"], collectives.SIZES
    tokens = rows * length
    assert exchanged("rms_norm x d=8", "forward") == {"all-reduce": [1, 4 * tokens]}
    assert exchanged("linear x h=8", "forward") == {}
    assert exchanged("linear x k=8")["all-reduce"][0] == 1
    pair = exchanged("mlp x h=8"), exchanged("mlp x h=8", "forward")
    assert [of["all-reduce"][0] for of in pair] == [2, 1]
    states = 4 * sizes["b"] * sizes["d"] * (2 * sizes["n"] + 1) * 8  # and the steps' sums
    forward = exchanged("selective_scan x l=8", "forward")["all-gather"]
    assert forward[0] == 1
    assert forward[1] <= states
    for name in "fused_adamw x k=8", "dropout x d=8", "dropout x m=8":
        assert kinds(HELD["programs"][name]) == set()


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ({"all-reduce": [1, 8]}, {"all-reduce": [1, 9]}, []),
        ({"all-reduce": [1, 8]}, {"all-reduce": [2, 8]}, ["a, both: all-reduce: was 1, is 2"]),
        ({}, {"all-gather": [1, 8]}, ["a, both: all-gather: was 0, is 1"]),
        ({"all-gather": [1, 8]}, {}, ["a, both: all-gather: was 1, is 0"]),
    ],
)
def test_another_number_of_collectives_is_told(was, now, told):
    assert [*collectives.differences({"a": {"both": was}}, {"a": {"both": now}})] == told
    assert [*collectives.differences({}, {"a": {"both": now}})] == ["a: is new"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command, of two programs, with a compiler that gives `now` and a file of its own."""
    now = {"a x m=8": {"both": {"all-reduce": [1, 8]}}, "b x m=64": {"both": {}}}
    monkeypatch.setattr(collectives, "PATH", tmp_path / "aot-collectives.json")
    monkeypatch.setattr(collectives, "names", lambda: [*now])
    monkeypatch.setattr(collectives, "attempt", now.get)
    each = lambda f, tasks, *_, **__: [(task, f(*task)) for task in tasks]
    monkeypatch.setattr(collectives, "each", each)
    return now


def test_command_writes_and_compares(command, capsys):
    assert collectives.main(["--write"]) == 0
    assert json.loads(collectives.PATH.read_text())["programs"] == command
    assert collectives.main([]) == 0
    command["a x m=8"] = {"both": {"all-reduce": [2, 8]}}
    command["b x m=64"] = "ValueError: no"
    assert collectives.main(["--part"]) == 1
    assert "a x m=8, both: all-reduce: was 1, is 2" in capsys.readouterr().err
    assert collectives.main([]) == 1
    assert "b x m=64: ValueError: no" in capsys.readouterr().err
