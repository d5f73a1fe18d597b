"""Compiling for GPUs that are not there: what is read of compilers, and what counts as wrong."""

import copy
import ctypes
import json
import os
from importlib import metadata
from types import SimpleNamespace

import pytest

from bench import aot, generations, gpus, programs, ptxas
from bench.copies import copied_in
from bench.programs import Result, Training
from bench.ptxas import Kernel
from jaxkern.lowering.target import GPUS
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

HLO = """\
HloModule jit_train_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: f32[8]) -> f32[1] {
  ROOT %reduce-scatter.1 = f32[1]{0} reduce-scatter(%p), to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %all-reduce-start = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), to_apply=%add
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %named = f32[8]{0} negate(%p), metadata={op_name="jit(f)/ all-reduce(x)"}
  %r = (f32[8]{0}, f32[8]{0}, /*index=2*/f32[8]{0}) all-reduce(%p, %p, %p), to_apply=%add
  %collective-permute.3 = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1}}
  %gathered = f32[8]{0} fusion(%all-gather.2), kind=kLoop, calls=%fused
  ROOT %all-to-all = f32[8]{0} all-to-all(%p), dimensions={0}
}
"""


def test_registers_spills_shared_memory_and_serialized_products_are_read():
    assert ptxas.parsed(PTXAS) == [
        ("rms_norm_fwd", Kernel(registers=56, spills=0, shared_memory=0)),
        ("rms_norm_bwd", Kernel(registers=255, spills=60, shared_memory=1025)),
    ]
    assert ptxas.parsed("") == []
    assert ptxas.serialized(PTXAS) == []
    told = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources for the function "
        "'ssd_fwd_mosaic_gpu_kernel'\n"
    )
    assert ptxas.serialized(PTXAS + told + told) == ["ssd_fwd"]
    for line in "spill stores", "Used 255":
        lines = [given for given in PTXAS.splitlines() if line not in given]
        with pytest.raises(RuntimeError, match="not what ptxas tells"):
            ptxas.parsed("\n".join(lines))


def test_output_of_other_languages_is_caught(capfd):
    with ptxas.standard_output() as printed:
        ctypes.CDLL(None).puts(b"through C's buffer")
        os.write(1, b"past it\n")
    os.write(1, b"after\n")
    assert sorted(printed().splitlines()) == ["past it", "through C's buffer"]
    assert capfd.readouterr().out == "after\n"


def test_modules_of_kernels_are_taken_from_a_text():
    call = 'custom-call(%x), backend_config={{kernel_hash = "{}", module = "{}", cost = 1}}\n'
    given = call.format("a", r"ML\EFR\\\22") + call.format("b", "other") + call.format("a", "ML")
    text, modules = ptxas.without_modules(given)
    assert text == 3 * "custom-call(%x), backend_config={, cost = 1}\n"
    assert modules == {"a": b'ML\xefR\\"', "b": b"other"}


class Lowered:
    """A program whose compilation prints `said`, and whose kernels have the digests `kernels`."""

    def __init__(self, kernels, said):
        self.kernels, self.said = kernels, said

    def compiler_ir(self):
        return None

    def compile(self):
        os.write(1, self.said.encode())
        calls = (f'kernel_hash = "{d}", module = "{name}"' for d, name in self.kernels)
        text = "\n".join(calls)
        return SimpleNamespace(as_text=lambda: text)


@pytest.fixture
def compiler(monkeypatch):
    """Stands for programs whose kernels' modules are their names, and ask for 1000 bytes."""
    monkeypatch.setattr(ptxas, "_launch", lambda program, module: (module.decode(), 1000))
    return ptxas.Compiler()


def test_kernels_that_are_compiled_once_are_known_in_later_programs(compiler):
    two = [("a", "rms_norm_fwd"), ("b", "rms_norm_bwd"), ("a", "rms_norm_fwd")]
    forward = {"rms_norm_fwd": [Kernel(56, 0, 1000)]}
    assert compiler(Lowered(two, PTXAS)).kernels == forward | {
        "rms_norm_bwd": [Kernel(255, 60, 2025)]
    }
    assert compiler(Lowered(two[:1], "")).kernels == forward
    said = PTXAS.replace("rms", "layer").replace("bwd", "fwd")  # two of one name, in order
    pair = [("c", "layer_norm_fwd"), ("d", "layer_norm_fwd")]
    both = [Kernel(56, 0, 1000), Kernel(255, 60, 2025)]
    assert compiler(Lowered(pair, said)).kernels == {"layer_norm_fwd": both}
    assert compiler(Lowered(pair[1:], "")).kernels == {"layer_norm_fwd": both[1:]}


@pytest.mark.parametrize("said", ["", PTXAS])
def test_kernels_that_ptxas_does_not_tell_of_are_an_error(compiler, said):
    with pytest.raises(RuntimeError, match=r"new kernels are \['rms_norm_fwd'\]"):
        compiler(Lowered([("a", "rms_norm_fwd")], said))


def test_collectives_are_counted():
    assert programs.collectives_in(HLO) == {
        "all-reduce": 2,
        "all-gather": 0,
        "reduce-scatter": 1,
        "all-to-all": 1,
        "collective-permute": 1,
    }


def test_bytes_are_those_of_whole_arrays():
    assert programs.exchanged_in(HLO) == {
        "reduce-scatter": 4,  # of one device, as no groups are told
        "all-reduce": 32 + 3 * 32,
        "collective-permute": 32,
        "all-to-all": 32,
    }
    gathered = "  %g = (bf16[2,8]{1,0}, bf16[2,16]{1,0}) all-gather-start(%p), dimensions={1}\n"
    assert programs.exchanged_in(gathered) == {"all-gather": 64}
    for groups in "[2,4]<=[8]", "{{0,1,2,3},{4,5,6,7}}":
        scattered = f"  %s = f32[6]{{0}} reduce-scatter(%p), replica_groups={groups}\n"
        assert programs.exchanged_in(scattered) == {"reduce-scatter": 96}


COPIES = """\
HloModule jit_train_step, is_scheduled=true

%sliced (p: f32[8]) -> (f32[2], bf16[4]) {
  %p = f32[8]{0} parameter(0)
  %a = f32[2]{0} slice(%p), slice={[0:2]}
  %cut = f32[2]{0} slice(%p), slice={[2:4]}
  %b = bf16[4]{0} bitcast(%cut)
  ROOT %both = (f32[2]{0}, bf16[4]{0}) tuple(%a, %b)
}

%added (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %cut = f32[2]{0} slice(%p), slice={[0:2]}
  ROOT %sum = f32[2]{0} add(%cut, %cut)
}

%kernel (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %cut = f32[2]{0} slice(%p), slice={[0:2]}
  ROOT %run = f32[2]{0} custom-call(%cut), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %split = (f32[2]{0}, bf16[4]{0}) fusion(%p), kind=kLoop, calls=%sliced
  %computed = f32[2]{0} fusion(%p), kind=kLoop, calls=%added
  %launched = f32[2]{0} fusion(%p), kind=kCustom, calls=%kernel
  ROOT %twice = f32[16]{0} concatenate(%p, %p), dimensions={0}
}
"""


def test_copies_are_what_computes_nothing():
    assert copied_in(COPIES) == 2 * 4 + 4 * 2 + 16 * 4


def test_a_fusion_is_told_that_forgets_what_is_in_place():
    kernel = '%run = (f32[2]{0}) custom-call(%p), custom_call_target="mosaic_gpu_v2"'
    within = "%{} (p: f32[2]) -> f32[2] {{\n  %p = f32[2]{{0}} parameter(0)\n  {}{}\n}}\n\n"
    aliased = ", output_to_operand_aliasing={{0}: (0, {})}"
    told = lambda name, rest: ptxas.out_of_place(within.format(name, kernel, rest))
    assert told("dynamic-slice-fusion.3", aliased) == ["dynamic-slice-fusion.3"]
    assert told("dynamic-slice-fusion", "") == []
    assert told("region_0.6", aliased) == []
    of_xla = kernel.replace("mosaic_gpu_v2", "__cublas$gemm")
    assert ptxas.out_of_place(within.format("dynamic-slice-fusion", of_xla, aliased)) == []


def test_a_step_exchanges_what_its_mesh_needs_and_no_more():
    held = json.loads(aot.path_of(GPUS["h200"]).read_text())["training"]
    of = lambda mesh: (held[f"130m x {mesh}"]["collectives"], held[f"130m x {mesh}"]["exchanged"])
    exchanging = lambda kind: {name for name, found in held.items() if kind in found["collectives"]}
    assert not exchanging("all-to-all")
    assert exchanging("collective-permute") == {name for name in held if "sequence=" in name}
    width, inner, rank, states = 768, 1536, 48, 16
    matrices = 3 * width * inner + inner * (2 * rank + 2 * states)
    embedding, rest = 256 * width, 2 * width + inner * (4 + states + 3)
    counts, exchanged = of("data=8")
    assert (counts, exchanged) == (
        {"all-reduce": 1},
        {"all-reduce": 4 * (matrices + embedding + rest + 1)},  # and the loss
    )
    for mesh in "fsdp=8", "fsdp=64":
        counts, exchanged = of(mesh)
        assert counts == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
        assert exchanged["all-gather"] == 2 * matrices + 4 * embedding
        assert exchanged["reduce-scatter"] == 4 * (matrices + embedding)
        assert exchanged["all-reduce"] == 4 * (rest + 2)  # the loss, and the gradients' norm
    for mesh in "sequence=8", "data=2,sequence=4":
        # The gradients, the scan's carries each way, the filter's last inputs each way.
        assert of(mesh)[0] == {"all-reduce": 1, "all-gather": 2, "collective-permute": 2}
    # Two products of a block, each way; embedding and loss; the gradients' norm.
    assert of("tensor=8")[0] == {"all-reduce": 2 * 2 + 1 + 3 + 1}


def test_memory_counts_donated_arguments_once():
    stats = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=90,
        alias_size_in_bytes=80,
        temp_size_in_bytes=7,
    )
    assert programs.memory_of(stats) == 117


def test_gpus_are_described():
    config = gpus.target_config(GPUS["h200"])
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED" in config
    assert "shared_memory_per_block_optin: 232448" in config
    assert 'device_description_str: "NVIDIA H200"' in config
    for gpu in GPUS.values():
        assert f"core_count: {gpu.multiprocessors}\n" in gpus.target_config(gpu)
    with pytest.raises(ValueError, match="multiple of it, got 12"):
        gpus.described(GPUS["h200"], 12)


NAMES = "rms_norm 8x8 bfloat16", "tiny x 8"
PLAIN = {"rms_norm_sum": "it needs 9 bytes"}


def results():
    """Results of an op and of a training step."""
    kernels = {"rms_norm_fwd": [Kernel(56, 0, 0), Kernel(57, 0, 0)], "old": [Kernel(255, 8, 0)]}
    collectives = programs.collectives_in("") | {"all-reduce": 2}
    return [
        Result(NAMES[0], kernels, PLAIN),
        Result(NAMES[1], kernels, {}, 1.0, 2.0, 1 << 30, collectives),
    ]


@pytest.fixture
def figures():
    return {"jax": "1", **aot.figures(results())}


def changed(figures, *path, to):
    """A copy of `figures` with another value at `path`; without it if that is ``None``."""
    new = copy.deepcopy(figures)
    inner = new
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    if to is None:
        del inner[path[-1]]
    return new


SPILLED = ("kernels", NAMES[0], "rms_norm_fwd", 1, 1), f"{NAMES[0]}: spills of rms_norm_fwd: was 0"
REDUCED = (
    ("training", NAMES[1], "collectives", "all-reduce"),
    f"{NAMES[1]}: all-reduce: was 2, is 3",
)
GATHERED = ("training", NAMES[1], "collectives", "all-gather"), "all-gather: was 0, is 3"


@pytest.mark.parametrize(
    ("path", "to", "told"),
    [
        (SPILLED[0], 16, f"{SPILLED[1]} bytes, is 16"),
        (REDUCED[0], 3, REDUCED[1]),
        (GATHERED[0], 3, GATHERED[1]),
        (("kernels", NAMES[0]), None, f"{NAMES[0]}: is missing"),
        (("kernels", NAMES[0], "old"), None, "kernels old: was 1, is 0"),
        (("kernels", NAMES[0], "new"), [[8, 0, 0]], "kernels new: was 0, is 1"),
        (("kernels", NAMES[0], "rms_norm_fwd"), [[56, 0, 0]], "rms_norm_fwd: was 2, is 1"),
        (("plain", NAMES[0], "old"), "no room", f"{NAMES[0]}: old is plain JAX: no room"),
        (("training", NAMES[1], "memory"), int(1.03 * 2**30), "was 1.00 GiB, is 1.03 GiB"),
        (("training", NAMES[1], "copied"), 1 << 29, "bytes copied: was 0.00 GiB, is 0.50 GiB"),
        (("kernels", NAMES[0], "rms_norm_fwd", 0, 0), 255, ""),  # registers
        (("kernels", NAMES[0], "rms_norm_fwd", 0, 2), 2048, ""),  # shared memory
        (("kernels", NAMES[0], "old", 0, 1), 9, ""),  # it did spill
        (("plain", NAMES[0]), None, ""),
        (("training", NAMES[1], "memory"), int(1.01 * 2**30), ""),
        (("training", NAMES[1], "memory"), 1 << 29, ""),
    ],
)
def test_what_got_worse_is_told_and_nothing_else(figures, path, to, told):
    got = aot.differences(figures, changed(figures, *path, to=to), NAMES)
    assert len(got) == bool(told)
    assert told in "".join(got)


def test_new_tasks_are_told(figures):
    was = changed(figures, "kernels", NAMES[0], to=None)
    assert aot.differences(was, figures, NAMES) == [f"{NAMES[0]}: is new"]


def test_another_jax_is_held_to_spills_and_collectives_alone(figures):
    was = figures | {"jax": "2"}
    plain = ("plain", NAMES[0], "old"), "no room", "old is plain JAX"
    for path, to, told in ((SPILLED[0], 16, SPILLED[1]), (REDUCED[0], 3, REDUCED[1]), plain):
        (got,) = aot.differences(was, changed(figures, *path, to=to), NAMES)
        assert told in got
    for path, to in (
        (("kernels", NAMES[0]), None),
        (("kernels", NAMES[0], "old"), None),
        (("kernels", NAMES[0], "new"), [[8, 16, 0]]),
        (("training", NAMES[1], "memory"), 1 << 31),
    ):
        assert aot.differences(was, changed(figures, *path, to=to), NAMES) == []


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`bench.aot` for H200s, with compilers that give :func:`results`, and a folder of its own."""
    tasks = {NAMES[0]: None, NAMES[1]: Training("tiny", 8)}
    monkeypatch.setattr(aot, "tasks", lambda: tasks)
    monkeypatch.setattr(aot, "RESULTS", tmp_path)
    monkeypatch.setattr(aot, "GENERATIONS", ("h200",))
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    told = SimpleNamespace(results=results(), ran=[])

    def run(gpu, names, jobs):
        told.ran.append((gpu, list(names)))
        yield from (r for r in told.results if r.name in names)

    monkeypatch.setattr(aot, "run", run)
    return told


def test_command_writes_and_compares(command, capsys, tmp_path):
    assert aot.main([]) == 1
    assert "aot-sm_90.json is missing" in capsys.readouterr().err
    assert aot.main(["--write"]) == 0
    text = (tmp_path / "aot-sm_90.json").read_text()
    assert text == aot.text_of(json.loads(text))
    assert aot.main([]) == 0
    assert aot.main(["--only", "tiny"]) == 0
    command.results.pop(0)
    assert aot.main([]) == 1
    said = capsys.readouterr().err
    assert f"bench.aot: h200: {NAMES[0]}: is missing\n" in said
    assert "make matrix ARGS=--write" in said


def test_command_tells_of_what_does_not_compile(command, capsys):
    assert aot.main(["--write"]) == 0
    command.results[0] = Result(NAMES[0], error="ValueError: no")
    for arguments in ([], ["--write"]):
        assert aot.main(arguments) == 1
        assert capsys.readouterr().err.count(NAMES[0]) == 1


def test_command_renews_a_part(command, tmp_path):
    assert aot.main(["--write"]) == 0
    collectives = programs.collectives_in("")
    command.results[1] = Result(NAMES[1], {}, {}, 1.0, 2.0, 1 << 31, collectives)
    assert aot.main(["--write", "--only", "tiny"]) == 0
    held = json.loads((tmp_path / "aot-sm_90.json").read_text())
    assert held["training"][NAMES[1]]["memory"] == 1 << 31
    assert held["kernels"][NAMES[0]] == aot.figures(results())["kernels"][NAMES[0]]
    assert held["plain"] == {NAMES[0]: PLAIN}


def test_command_goes_on_with_what_is_missing(command):
    assert aot.main(["--write", "--only", "tiny"]) == 0
    for left in (NAMES[:1], ()):
        command.ran.clear()
        assert aot.main(["--write", "--missing"]) == 0
        assert command.ran == [("h200", list(left))]
    command.ran.clear()
    assert aot.main(["--write", "--gpu", "a100"]) == 0
    assert command.ran == [("a100", [NAMES[0]])], "training steps are the H200's"


def test_what_another_jax_differs_in_stands_beside_the_figures(command, monkeypatch, tmp_path):
    assert aot.main(["--write"]) == 0
    monkeypatch.setattr(metadata, "version", lambda name: "0.9")
    command.results[0] = Result(NAMES[0], {"rms_norm_fwd": [Kernel(255, 8, 0)]}, PLAIN)
    assert aot.main(["--write"]) == 0
    held = json.loads((tmp_path / "aot-sm_90.json").read_text())
    told = [f"{NAMES[0]}: spills of rms_norm_fwd: was 0 bytes, is 8"]
    assert held["jax"] == "1"
    assert held["jax 0.9"] == {NAMES[0]: told, NAMES[1]: []}
    assert held["kernels"][NAMES[0]] == aot.figures(results())["kernels"][NAMES[0]]


@pytest.mark.exhaustive
def test_a_task_that_ends_its_process_ends_no_other(monkeypatch):
    monkeypatch.setattr(aot, "attempt", ends_its_process)
    found = {r.name: r.error for r in aot.run("h200", ["a", "abort"], 1)}
    assert found.keys() == {"a", "abort"}
    assert [name for name, error in found.items() if error] == ["abort"]


def ends_its_process(gpu, name):
    if name == "abort":
        os._exit(134)
    return Result(name)


def test_the_chosen_part_has_every_kernel_in_every_tile():
    for gpu in aot.PART:
        held = aot.figures(()) | json.loads(aot.path_of(GPUS[gpu]).read_text())
        part = aot.chosen(held)
        cases = [name for name in part if name not in held["training"]]
        assert 20 < len(cases) < 100

        def tiles(names, held=held):
            return {
                (kernel, k[2] // aot.BRANCH)
                for name in names
                for kernel, of_name in held["kernels"][name].items()
                for k in of_name
            }

        every = set(held["kernels"]) - set(held["training"])
        assert tiles(cases) == tiles(every)
        if held["training"]:
            dtypes = lambda names: {(n.split()[0], n.split()[-1]) for n in names}
            assert dtypes(cases) == dtypes(every)


def test_the_guide_tells_what_is_plain_and_what_spills(tmp_path):
    of_case = {"rms_norm_fwd": [[40, 0, 9]], "rms_norm_bwd": [[255, 12, 9]]}
    figures = {
        "gpu": "NVIDIA L40S",
        "jax": "1",
        "ptxas": "2",
        "kernels": {"rms_norm 8x8 bfloat16": of_case, "rms_norm 9x9 float32": {}},
        "plain": {"rms_norm 9x9 float32": {"rms_norm_fwd": "it needs 9 bytes, and NVIDIA L40S .."}},
        "training": {},
        "jax 0.9": {"rms_norm 8x8 bfloat16": []},
    }
    for name in ("sm_100", "sm_89"):
        (tmp_path / f"aot-{name}.json").write_text(json.dumps(figures))
    held = generations.load(tmp_path)
    assert list(held) == ["sm_89", "sm_100"]
    rows = {row[0]: row[1:] for row in generations.matrix(held)[1]}
    assert rows["`rms_norm`"] == ["1 of 2, spills at 1"] * 2
    assert rows["`linear`"] == ["not compiled"] * 2
    assert [*generations.plain(held)] == [
        ["`rms_norm_fwd`", "9x9 float32", "sm_89, sm_100", "it needs 9 bytes"]
    ]
    assert [*generations.spills(held)] == [["`rms_norm_bwd`", "12 at 8x8", "12 at 8x8"]]
    assert "JAX 0.9 compiled 2 programs for sm_89, sm_100" in generations.versions(held)


def test_command_needs_a_task_and_the_compiler(command, monkeypatch, capsys):
    assert aot.main(["--only", "nothing"]) == 2
    assert "no task's name has nothing" in capsys.readouterr().err

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert aot.main([]) == 2
    assert "run make aot" in capsys.readouterr().err


HELD = [gpu for gpu in aot.GENERATIONS if aot.path_of(GPUS[gpu]).exists()]


@pytest.mark.parametrize("gpu", HELD)
def test_committed_figures_are_of_every_task(gpu):
    held = json.loads(aot.path_of(GPUS[gpu]).read_text())
    trainings = {name for name, task in aot.tasks().items() if isinstance(task, Training)}
    assert len(trainings) == 38
    assert set(held["training"]) == (trainings if gpu == "h200" else set())
    assert set(held["kernels"]) == set(aot.tasks()) - (trainings - set(held["training"]))
    newest = constraints("newest")
    assert held["jax"] == newest["jax"]
    assert held["ptxas"] == newest["nvidia-cuda-nvcc-cu12"]
    assert set(HELD) >= set(aot.PART)
