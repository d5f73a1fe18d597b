"""Compiling for GPUs that are not there: what is read of compilers, and what counts as wrong."""

import copy
import ctypes
import functools
import json
import operator
import os
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from bench import aot, compilers, program
from bench.aot import Training
from bench.compilers import Kernel
from bench.processes import Failed
from jaxkern.core.target import GPUS
from tests.test_package import constraints

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rms_norm_fwd_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for rms_norm_fwd_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers
ptxas info    : Compile time = 9.545 ms

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rms_norm_bwd_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for rms_norm_bwd_mosaic_gpu_kernel
    24 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 24 bytes cumulative stack size, 1025 bytes smem
ptxas info    : Compile time = 27.950 ms
"""


def test_registers_spills_shared_memory_and_serialized_products_are_read():
    assert compilers.parsed(PTXAS) == [
        ("rms_norm_fwd", Kernel(registers=56, spills=0, shared_memory=0)),
        ("rms_norm_bwd", Kernel(registers=255, spills=60, shared_memory=1025)),
    ]
    assert compilers.parsed("") == []
    assert compilers.serialized(PTXAS) == []
    told = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources for the function "
        "'ssd_fwd_mosaic_gpu_kernel'\n"
    )
    assert compilers.serialized(PTXAS + told + told) == ["ssd_fwd"]
    for line in "spill stores", "Used 255":
        lines = [given for given in PTXAS.splitlines() if line not in given]
        with pytest.raises(RuntimeError, match="not what ptxas tells"):
            compilers.parsed("\n".join(lines))


def test_output_of_other_languages_is_caught(capfd):
    with compilers.standard_output() as printed:
        ctypes.CDLL(None).puts(b"through C's buffer")
        os.write(1, b"past it\n")
    os.write(1, b"after\n")
    assert sorted(printed().splitlines()) == ["past it", "through C's buffer"]
    assert capfd.readouterr().out == "after\n"


def test_modules_of_kernels_are_taken_from_a_text():
    call = 'custom-call(%x), backend_config={{kernel_hash = "{}", module = "{}", cost = 1}}\n'
    given = call.format("a", r"ML\EFR\\\22") + call.format("b", "other") + call.format("a", "ML")
    text, modules = compilers.without_modules(given)
    assert text == 3 * "custom-call(%x), backend_config={, cost = 1}\n"
    assert modules == {"a": b'ML\xefR\\"', "b": b"other"}


def lowered(kernels, said):
    """A program whose compilation prints `said`, and whose kernels have the digests `kernels`."""
    calls = (f'kernel_hash = "{digest}", module = "{name}"' for digest, name in kernels)
    text = "\n".join(calls)

    def compile():
        os.write(1, said.encode())
        return SimpleNamespace(as_text=lambda: text)

    return SimpleNamespace(compile=compile, compiler_ir=lambda: None)


def test_kernels_are_known_in_later_programs_and_ptxas_tells_of_each_once(monkeypatch):
    """Stands for programs whose kernels' modules are their names, and ask for 1000 bytes."""
    monkeypatch.setattr(compilers, "_launch", lambda program, module: (module.decode(), 1000))
    compiler = compilers.Compiler()
    small, large = Kernel(56, 0, 1000), Kernel(255, 60, 2025)
    two = [("a", "rms_norm_fwd"), ("b", "rms_norm_bwd"), ("a", "rms_norm_fwd")]
    pair = [("c", "layer_norm_fwd"), ("d", "layer_norm_fwd")]  # of one name, in order
    of_pair = PTXAS.replace("rms", "layer").replace("bwd", "fwd")
    for kernels, said, found in (
        (two, PTXAS, {"rms_norm_fwd": [small], "rms_norm_bwd": [large]}),
        (two[:1], "", {"rms_norm_fwd": [small]}),
        (pair, of_pair, {"layer_norm_fwd": [small, large]}),
        (pair[1:], "", {"layer_norm_fwd": [large]}),
    ):
        assert compiler(lowered(kernels, said))[2] == found
    for said in "", PTXAS:
        with pytest.raises(RuntimeError, match=r"new kernels are \['rms_norm_fwd'\]"):
            compiler(lowered([("new", "rms_norm_fwd")], said))


COPIES = """\
HloModule jit_train_step, is_scheduled=true

%fused (p: f32[8]) -> (f32[2], bf16[4]) {{
  %p = f32[8]{{0}} parameter(0)
  %a = f32[2]{{0}} slice(%p), slice={{[0:2]}}
  %b = bf16[4]{{0}} bitcast(%a)
  ROOT %result = {}
}}

ENTRY %main (p: f32[8]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
  %split = {} fusion(%p), kind=kLoop, calls=%fused
  ROOT %twice = f32[16]{{0}} concatenate(%p, %p), dimensions={{0}}
}}
"""


@pytest.mark.parametrize(
    ("result", "operation", "copied"),
    [
        ("(f32[2]{0}, bf16[4]{0})", "tuple(%a, %b)", 2 * 4 + 4 * 2),
        ("f32[2]{0}", "add(%a, %a)", 0),
        ("f32[2]{0}", 'custom-call(%a), custom_call_target="mosaic_gpu_v2"', 0),
    ],
)
def test_copies_are_what_computes_nothing(result, operation, copied):
    assert compilers.copied_in(COPIES.format(f"{result} {operation}", result)) == copied + 16 * 4


def test_a_fusion_is_told_that_forgets_what_is_in_place():
    aliased = ", output_to_operand_aliasing={{0}: (0, {})}"
    for name, target, rest, lost in (
        ("dynamic-slice-fusion.3", "mosaic_gpu_v2", aliased, ["dynamic-slice-fusion.3"]),
        ("dynamic-slice-fusion", "mosaic_gpu_v2", "", []),
        ("region_0.6", "mosaic_gpu_v2", aliased, []),
        ("dynamic-slice-fusion", "__cublas$gemm", aliased, []),
    ):
        call = f'%run = (f32[2]{{0}}) custom-call(%p), custom_call_target="{target}"{rest}'
        assert compilers.out_of_place(f"%{name} (p: f32[2]) -> f32[2] {{\n  {call}\n}}\n") == lost


def test_gpus_are_described():
    config = compilers.target_config(GPUS["h200"])
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED" in config
    assert "shared_memory_per_block_optin: 232448" in config
    assert 'device_description_str: "NVIDIA H200"' in config
    for gpu in GPUS.values():
        assert f"core_count: {gpu.multiprocessors}\n" in compilers.target_config(gpu)
    with pytest.raises(ValueError, match="multiple of it, got 12"):
        compilers.described(GPUS["h200"], 12)


OP, STEP = NAMES = "rms_norm 8x8 bfloat16", "tiny x 8"
PLAIN = {"rms_norm_sum": "it needs 9 bytes"}
GIB = 1 << 30


def result_of_step(memory=GIB):
    kernels = {"rms_norm_fwd": [[56, 0, 0], [57, 0, 0]], "old": [[255, 8, 0]]}
    training = {"memory": memory, "collectives": {"all-reduce": 2}, "exchanged": {}, "copied": 0}
    return {"kernels": kernels, "plain": {}, "training": training}


def results():
    """Results of an op and of a training step."""
    step = result_of_step()
    return {OP: result_of_step() | {"plain": PLAIN, "training": {}}, STEP: step}


def figures(monkeypatch):
    monkeypatch.setattr(aot, "tasks", lambda: dict.fromkeys(NAMES))
    return {"jax": "1"} | aot.with_results({part: {} for part in aot.PARTS}, results())


@pytest.mark.parametrize(
    ("path", "to", "told", "of_another_jax"),
    [
        ("kernels rms_norm_fwd 1 1", 16, "spills of rms_norm_fwd: was 0 bytes, is 16", True),
        ("training collectives all-reduce", 3, "all-reduce: was 2, is 3", True),
        ("training collectives all-gather", 3, "all-gather: was 0, is 3", True),
        ("plain old", "no room", "old is plain JAX: no room", True),
        ("kernels", None, "is missing", False),
        ("kernels old", None, "kernels old: was 1, is 0", False),
        ("kernels new", [[8, 16, 0]], "kernels new: was 0, is 1", False),
        ("kernels rms_norm_fwd", [[56, 0, 0]], "kernels rms_norm_fwd: was 2, is 1", False),
        ("training memory", 1.03 * GIB, "memory of a device: was 1.00 GiB, is 1.03 GiB", False),
        ("training copied", GIB / 2, "bytes copied: was 0.00 GiB, is 0.50 GiB", False),
        ("kernels rms_norm_fwd 0 0", 255, "", False),  # registers
        ("kernels rms_norm_fwd 0 2", 2048, "", False),  # shared memory
        ("kernels old 0 1", 9, "", False),  # it did spill
        ("plain", None, "", False),
        ("training memory", 1.01 * GIB, "", False),
        ("training memory", GIB / 2, "", False),
    ],
)
def test_what_got_worse_is_told_and_nothing_else(path, to, told, of_another_jax, monkeypatch):
    """In figures of an op's kernels and of a training step; None removes the figure."""
    was = figures(monkeypatch)
    now = copy.deepcopy(was)
    part, *keys = path.split()
    name = STEP if part == "training" else OP
    *parents, last = part, name, *(int(key) if key.isdigit() else key for key in keys)
    inner = functools.reduce(operator.getitem, parents, now)
    if to is None:
        del inner[last]
    else:
        inner[last] = to
    for jax, want in ("1", told), ("2", told if of_another_jax else ""):
        got = [*aot.differences(was | {"jax": jax}, now, NAMES)]
        assert got == ([f"{name}: {want}"] if want else [])
    was["kernels"].pop(OP)
    assert f"{OP}: is new" in [*aot.differences(was, figures(monkeypatch), NAMES)]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`bench.aot` for H200s, with compilers that give :func:`results`, and a folder of its own."""
    tasks = {OP: None, STEP: Training("tiny", 8)}
    monkeypatch.setattr(aot, "tasks", lambda: tasks)
    monkeypatch.setattr(aot, "RESULTS", tmp_path)
    monkeypatch.setattr(aot, "GENERATIONS", ("h200",))
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    held = lambda: json.loads((tmp_path / "aot-sm_90.json").read_text())
    told = SimpleNamespace(results=results(), ran=[], held=held)

    def run(f, todo, jobs):
        told.ran.append(todo)
        yield from (((gpu, name), told.results[name]) for gpu, name in todo if name in told.results)

    monkeypatch.setattr(aot, "run", run)
    return told


def test_command_writes_and_compares(command, capsys, tmp_path):
    assert aot.main([]) == 1
    assert "aot-sm_90.json is missing" in capsys.readouterr().err
    assert aot.main(["--write"]) == 0
    assert (tmp_path / "aot-sm_90.json").read_text() == program.with_lines(command.held())
    assert aot.main([]) == 0
    command.results[STEP] = result_of_step(memory=2 * GIB)
    assert aot.main(["--write", "--only", "tiny"]) == 0
    held = command.held()
    assert held["training"][STEP]["memory"] == 2 * GIB
    assert held["kernels"][OP] == results()[OP]["kernels"]
    assert held["plain"] == {OP: PLAIN}
    assert aot.main(["--only", "tiny"]) == 0
    command.results.pop(OP)
    assert aot.main([]) == 1
    said = capsys.readouterr().err
    assert f"bench.aot: h200: {OP}: is missing\n" in said
    assert "make matrix ARGS=--write" in said
    command.results[OP] = Failed("ValueError: no")
    for arguments in ([], ["--write"]):
        assert aot.main(arguments) == 1
        assert capsys.readouterr().err.count(OP) == 1


def test_command_goes_on_with_what_is_missing(command):
    assert aot.main(["--write", "--only", "tiny"]) == 0
    for words, gpu, names in (
        ("--missing", "h200", [OP]),
        ("--missing", "h200", []),
        ("--gpu a100", "a100", [OP]),  # training steps are the H200's
    ):
        assert aot.main(["--write", *words.split()]) == 0
        assert command.ran[-1] == [(gpu, name) for name in names]


def test_what_another_jax_differs_in_stands_beside_the_figures(command, monkeypatch):
    assert aot.main(["--write"]) == 0
    monkeypatch.setattr(metadata, "version", lambda name: "0.9")
    command.results[OP] |= {"kernels": {"rms_norm_fwd": [[255, 8, 0]]}}
    assert aot.main(["--write"]) == 0
    told = {OP: [f"{OP}: spills of rms_norm_fwd: was 0 bytes, is 8"], STEP: []}
    held = command.held()
    assert (held["jax"], held["jax 0.9"]) == ("1", told)
    assert held["kernels"][OP] == results()[OP]["kernels"]


def test_command_needs_a_task_and_the_compiler(command, monkeypatch, capsys):
    absent = Mock(side_effect=metadata.PackageNotFoundError("ptxas"))
    monkeypatch.setattr(metadata, "version", absent)
    for words, told in (["--only", "nothing"], "no task's name has nothing"), ([], "run make aot"):
        with pytest.raises(SystemExit, match="2"):
            aot.main(words)
        assert told in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_task_that_ends_its_process_ends_no_other():
    found = dict(aot.run(ends_its_process, [("h200", name) for name in ("a", "abort", "b")], 2))
    assert found.pop(("h200", "abort")) == "its process ended with status 134"
    assert found == {("h200", name): {"line": name} for name in "ab"}


def ends_its_process(gpu, name):
    if name == "abort":
        os._exit(134)
    return {"line": name}


def test_the_chosen_part_has_every_kernel_in_every_tile():
    for gpu in aot.PART:
        held = aot.held_for(GPUS[gpu])
        part = aot.chosen(held)
        cases = [name for name in part if name not in held["training"]]
        assert 20 < len(cases) < 110

        tiles = lambda names: {
            (kernel, k[2] // aot.BRANCH)
            for name in names
            for kernel, of_name in held["kernels"][name].items()  # noqa: B023
            for k in of_name
        }
        every = set(held["kernels"]) - set(held["training"])
        assert tiles(cases) == tiles(every)
        if held["training"]:
            dtypes = lambda names: {(n.split()[0], n.split()[-1]) for n in names}
            assert dtypes(cases) == dtypes(every)


HELD = [gpu for gpu in aot.GENERATIONS if aot.path_of(GPUS[gpu]).exists()]


@pytest.mark.parametrize("gpu", HELD)
def test_committed_figures_are_of_every_task(gpu):
    held = json.loads(aot.path_of(GPUS[gpu]).read_text())
    trainings = {name for name, task in aot.tasks().items() if isinstance(task, Training)}
    assert len(trainings) == 50
    assert set(held["training"]) == (trainings if gpu == "h200" else set())
    assert set(held["kernels"]) == set(aot.tasks()) - (trainings - set(held["training"]))
    newest = constraints("newest")
    assert held["jax"] == newest["jax"]
    assert held["ptxas"] == newest["nvidia-cuda-nvcc-cu12"]
    assert set(HELD) >= set(aot.PART)
