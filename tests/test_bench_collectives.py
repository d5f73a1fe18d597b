"""What devices exchange, compiled for GPUs that are not there: the rules, and what is wrong."""

import json
import re

from bench import aot, collectives, compilers
from bench.cases import TABLE
from bench.processes import Failed
from jaxkern.core.target import GPUS
from tests.test_package import constraints

HELD = json.loads(collectives.PATH.read_text())["programs"]

LINES = """
ROOT %r.1 = f32[1]{0} reduce-scatter(%p), to_apply=%add | reduce-scatter | 4
%a = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), to_apply=%add | all-reduce | 32
%d = f32[8]{0} all-reduce-done(%a)
%n = f32[8]{0} negate(%p), metadata={op_name="jit(f)/ all-reduce(x)"}
%r = (f32[8]{0}, f32[8]{0}, /*index=2*/f32[8]{0}) all-reduce(%p, %p, %p) | all-reduce | 96
%c.3 = f32[8]{0} collective-permute(%p), pairs={{0,1}} | collective-permute | 32
%g = f32[8]{0} fusion(%all-gather.2), kind=kLoop, calls=%fused
ROOT %all-to-all = f32[8]{0} all-to-all(%p), dimensions={0} | all-to-all | 32
%g = (bf16[2,8]{1,0}, bf16[2,16]{1,0}) all-gather-start(%p), dimensions={1} | all-gather | 64
%s = f32[6]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8] | reduce-scatter | 96
%s = f32[6]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}} | reduce-scatter | 96
%r = f32[4]{0} reduce-scatter(%p), replica_groups=mesh['a'=2,'b'=4] {'b'} | reduce-scatter | 64
%r = f32[] all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {'a','b'} | all-reduce | 4
"""
"""Lines of a program's text, and the exchange of each: kind, and bytes of whole arrays."""


def test_exchanges_of_a_program_are_read_and_counted():
    whole = {}
    for line in LINES.strip().splitlines():
        text, *rest = line.split(" | ")
        found = compilers.exchanged_in(f"  {text}\n")
        assert found == ({rest[0]: [1, int(rest[1])]} if rest else {}), line
        for kind, (_, size) in found.items():
            count, before = whole.get(kind, (0, 0))
            whole[kind] = [count + 1, before + size]
    text = "\n".join("  " + line.partition(" | ")[0] for line in LINES.strip().splitlines())
    assert compilers.exchanged_in(text) == whole


# Committed figures


def test_committed_figures_are_of_every_program():
    held = json.loads(collectives.PATH.read_text())
    assert list(held["programs"]) == collectives.names()
    assert held["jax"] == constraints("newest")["jax"]


def kinds(held):
    return {kind for of_pass in held.values() for kind in of_pass}


LOSS_OF_INPUTS = "linear_cross_entropy x k=8"
"""Without a gradient its operands are gathered, as there are no logits to add."""


def test_what_is_split_is_not_gathered():
    """No array goes from each device to each; a sequence's states and last inputs go on."""
    of_name = {case.name: case for case in TABLE}
    for name, held in HELD.items():
        case, axis, _ = re.split(" x |=", name)
        counts = {kind: count for kind, (count, _) in held.get("both", {}).items()}
        assert "all-to-all" not in kinds(held), name
        if axis == "l":
            assert kinds(held) <= {"all-gather", "all-reduce", "collective-permute"}, name
            assert "both" in held
            assert counts.get("collective-permute", 0) <= (2 if "conv" in case else 1), name
            assert counts.get("all-gather", 0) <= (0 if "conv" in case else 2), name
        elif axis in of_name[case].split.split():
            both = held | {"forward": {}} if name == LOSS_OF_INPUTS else held
            assert kinds(both) <= {"all-reduce"}, name
            one_sum = not re.search("cross_entropy|gated_linear_unit|_step", case)
            if "both" in held and one_sum:
                assert counts == of_name[case].collectives(axis), name


def test_what_devices_add_up_is_small_where_it_can_be():
    exchanged = lambda name, direction="both": HELD[name][direction]
    (rows, length), sizes = collectives.SIZES["m"], collectives.SIZES
    assert exchanged("rms_norm x d=8", "forward") == {"all-reduce": [1, 4 * rows * length]}
    assert exchanged("linear x h=8", "forward") == {}
    assert exchanged("linear x k=8")["all-reduce"][0] == 1
    loss, both = exchanged(LOSS_OF_INPUTS, "forward"), exchanged(LOSS_OF_INPUTS)
    assert 20 * loss["all-gather"][1] < both["all-reduce"][1]
    pair = exchanged("mlp x h=8"), exchanged("mlp x h=8", "forward")
    assert [of["all-reduce"][0] for of in pair] == [2, 1]
    count, size = exchanged("selective_scan x l=8", "forward")["all-gather"]
    assert count == 1
    states = 4 * sizes["b"] * sizes["d"] * (2 * sizes["n"] + 1) * 8  # and the steps' sums
    assert size <= states
    for name in "fused_adamw x k=8", "dropout x d=8", "dropout x m=8":
        assert kinds(HELD[name]) == set()


def test_a_step_exchanges_what_its_mesh_needs_and_no_more():
    held = json.loads(aot.path_of(GPUS["h200"]).read_text())["training"]
    exchanging = lambda kind: {name for name, found in held.items() if kind in found["collectives"]}
    assert not exchanging("all-to-all")
    assert exchanging("collective-permute") == {name for name in held if "sequence=" in name}
    # Devices that split sequences exchange the gradients, the scan's carries and the filter's last
    # inputs each way, these also where the convolution is computed again; those of tensor two
    # products of a block each way, embedding and loss, and the gradients' norm.
    sharded = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    of_sequences = {"all-reduce": 1, "all-gather": 2, "collective-permute": 3}
    wanted = {"data=8": {"all-reduce": 1}, "fsdp=8": sharded, "fsdp=64": sharded}
    wanted |= {"sequence=8": of_sequences, "data=2,sequence=4": of_sequences}
    wanted |= {"tensor=8": {"all-reduce": 2 * 2 + 1 + 3 + 1}}
    of_130m = {mesh: held[f"130m x {mesh}"] for mesh in wanted}
    assert {mesh: found["collectives"] for mesh, found in of_130m.items()} == wanted

    width, inner, rank, states = 768, 1536, 48, 16
    matrices = 3 * width * inner + inner * (2 * rank + 2 * states)
    embedding, rest = 256 * width, 2 * width + inner * (4 + states + 3)
    assert of_130m["data=8"]["exchanged"] == {
        "all-reduce": 4 * (matrices + embedding + rest + 1)  # and the loss
    }
    for mesh in "fsdp=8", "fsdp=64":
        assert of_130m[mesh]["exchanged"] == {
            "all-gather": 2 * matrices + 4 * embedding,
            "reduce-scatter": 4 * (matrices + embedding),
            "all-reduce": 4 * (rest + 2),  # the loss, and the gradients' norm
        }


# The commands


def test_another_number_of_collectives_is_told():
    one = {"all-reduce": [1, 8]}
    for was, now, told in (
        (one, {"all-reduce": [1, 9]}, []),
        (one, {"all-reduce": [2, 8]}, ["a, both: all-reduce: was 1, is 2"]),
        ({}, one, ["a, both: all-reduce: was 0, is 1"]),
        (one, {}, ["a, both: all-reduce: was 1, is 0"]),
    ):
        found = collectives.differences({"a": {"both": was}}, {"a": {"both": now}})
        assert [*found] == told
    assert [*collectives.differences({}, {"a": {"both": one}})] == ["a: is new"]


def test_collectives_are_written_and_compared(tmp_path, monkeypatch, capsys):
    now = {"a x m=8": {"both": {"all-reduce": [1, 8]}}, "b x m=64": {"both": {}}}
    result = lambda held: held if isinstance(held, Failed) else {"passes": held, "line": ""}
    compiled = lambda _, tasks, *args, **options: [(task, result(now[task[0]])) for task in tasks]
    monkeypatch.setattr(collectives, "PATH", tmp_path / "collectives.json")
    monkeypatch.setattr(aot, "each", compiled)
    monkeypatch.setattr(collectives, "names", lambda: [*now])
    assert collectives.main(["--write"]) == 0
    assert json.loads(collectives.PATH.read_text())["programs"] == now
    assert collectives.main([]) == 0
    now["a x m=8"] = {"both": {"all-reduce": [2, 8]}}
    now["b x m=64"] = Failed("ValueError: no")
    assert collectives.main(["--part"]) == 1
    told = capsys.readouterr().err
    assert "a x m=8, both: all-reduce: was 1, is 2" in told
    assert "b x m=64" not in told
    assert collectives.main([]) == 1
    assert "b x m=64: ValueError: no" in capsys.readouterr().err
