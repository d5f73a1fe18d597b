"""Training steps on many GPUs: what is predicted of them, and the committed figures."""

import json

import pytest

from bench import pictures, programs, report, scaling
from bench.scaling import NETWORK, NVLINK
from tests.test_package import constraints

HOSTS = {"data": 16, "fsdp": 8, "tensor": 2}  # a host has two parts of each four of fsdp


@pytest.mark.parametrize(
    ("kind", "axes", "mesh", "seconds"),
    [
        ("all-reduce", "data", {"data": 2}, 1e9 / NVLINK),
        ("all-gather", "data", {"data": 8}, 7 / 8 * 1e9 / NVLINK),
        ("reduce-scatter", "tensor", HOSTS, 1 / 2 * 1e9 / NVLINK),
        ("all-reduce", "data", HOSTS, 2 * 15 / 16 * 1e9 / NETWORK),
        # Four of a host, and two hosts.
        (
            "all-gather",
            "fsdp",
            HOSTS,
            3 / 4 * 1e9 / NVLINK + 1 / 2 * 1e9 / 4 / NETWORK,
        ),
        (
            "all-reduce",
            "data,fsdp,tensor",
            {"data": 64},
            2 * (7 / 8 * 1e9 / NVLINK + 7 / 8 * 1e9 / 8 / NETWORK),
        ),
    ],
)
def test_seconds_of_an_exchange(kind, axes, mesh, seconds):
    assert scaling.seconds_of(kind, axes, 10**9, mesh) == pytest.approx(seconds)


def test_a_step_is_divided_by_tensor_alone():
    held = {"exchanges": [["all-reduce", "tensor", 3, 450_000_000]]}
    assert scaling.exchange_ms("data=4,tensor=2", held) == pytest.approx(1)
    assert scaling.predicted("data=4,tensor=2", held, 40) == pytest.approx(21)


def test_axes_of_collectives_are_read():
    line = '  %r = f32[4]{0} reduce-scatter(%p), replica_groups=mesh["data"=2,"fsdp"=4] {"fsdp"}\n'
    exchanged = [*programs.exchanges(line.replace('"', "'"))]
    assert exchanged == [("reduce-scatter", "fsdp", 4 * 16)]
    both = "  %r = f32[] all-reduce(%p), replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}\n"
    assert [*programs.exchanges(both)] == [("all-reduce", "data,fsdp", 4)]


def test_committed_figures_are_of_every_step(tmp_path):
    held = json.loads(scaling.PATH.read_text())
    assert list(held["steps"]) == scaling.names()
    assert held["jax"] == constraints("newest")["jax"]
    for name, step in held["steps"].items():
        kinds = {kind for kind, *_ in step["exchanges"]}
        assert kinds <= {"all-reduce", "all-gather", "reduce-scatter"}, name
        assert all(axes for _, axes, *_ in step["exchanges"]), name
    points = scaling.points(report.load())
    assert points["130m"]["data, measured"][0][1] < points["130m"]["data"][1][1]
    pictures.draw_scaling(points, tmp_path / "a.svg")
    assert "fsdp, measured" in (tmp_path / "a.svg").read_text()


def test_command_keeps_what_it_compiled(tmp_path, monkeypatch, capsys):
    first, second = scaling.names()[:2]
    step = {"lower_s": 1.0, "compile_s": 2.0, "memory": 1 << 30, "exchanges": []}
    asked = []
    monkeypatch.setattr(scaling, "PATH", tmp_path / "aot-scaling.json")

    def each(f, tasks, *_, **__):
        del f
        asked.append([name for (name,) in tasks])
        yield from ((task, step if task[0] == first else "ValueError: no") for task in tasks)

    monkeypatch.setattr(scaling, "each", each)
    only = f"^({first}|{second})$"
    assert scaling.main(["--only", only]) == 1
    assert f"{second}: ValueError: no" in capsys.readouterr().err
    assert json.loads(scaling.PATH.read_text())["steps"] == {first: step}
    scaling.main(["--only", only, "--missing"])
    assert asked == [[first, second], [second]]
