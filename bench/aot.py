"""Compiles every op for each generation of GPU, none of which is there, and compares.

Down to ptxas, on a machine without a GPU (:mod:`bench.compilers`); nothing runs. CONTRIBUTING.md
says what is compiled, what of it is held against ``bench/results/aot-sm_90.json`` and the files of
the other generations, and what is wrong. The training steps of one layer on meshes (`MESHES`) are
those of which the guide tells what is exchanged: how many of each collective (one inside a loop
counts once), and the bytes of their arrays, after a gather or before a scatter. Kernels that an
earlier program of the same process had are lowered again, which tells that they are the same, and
not compiled again.

With another version of JAX than the committed figures are from, only spills, passes in plain JAX
and collectives count, and serialized products; ``--write`` notes them beside those figures.
"""

import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from bench import compilers, program
from bench.cases.optim import Step
from bench.compilers import COLLECTIVES, Kernel
from bench.measured import Case, named, passes, step_program
from bench.processes import Failed, Task, each
from bench.program import RESULTS, Row
from jaxkern.core import kernel_call, kernel_pass
from jaxkern.core.target import GPUS, Gpu
from jaxkern.lm.config import PRESETS, TrainConfig, axes_of
from jaxkern.lm.memory import needed_memory
from jaxkern.lm.program import Placement, lowered_step

GENERATIONS = ("a100", "a10g", "l40s", "h200", "b200", "b300", "rtx-pro-6000")
"""A GPU of each generation; the H200's programs are also the training steps."""

PART = ("l40s", "h200", "rtx-pro-6000")
"""Three that differ most: no TMA, clusters and wgmma, and a TMA with 99 KiB of shared memory."""

GROWTH = 1.02
"""Tolerated growth of a device's memory, or of bytes copied, over the committed figures."""

BRANCH = 8192
"""Kernels of one name whose shared memory differs by less are taken to have the same tiles."""

DEVICES = (1, 8, 64)
PER_DEVICE = 8
"""Sequences of a training step on one device."""

_BOTH = ("130m", "mamba2-130m")
MESHES = {
    "data=8": _BOTH,
    "fsdp=8": _BOTH,
    "tensor=8": _BOTH,
    "data=2,fsdp=2,tensor=2": _BOTH,
    "fsdp=64": ("130m",),
    "data=8,tensor=8": ("130m",),
    "sequence=8": _BOTH,
    "data=2,sequence=4": _BOTH,
}
"""Splits of one layer of presets."""

PARTS = ("kernels", "plain", "training")
"""The result of a task: registers, spills and shared memory of its kernels by their names; why a
pass is plain JAX; memory, collectives and bytes of a training step."""


# Programs


@dataclasses.dataclass(frozen=True)
class Training:
    """The training step of a preset on a number of devices."""

    preset: str
    devices: int
    mesh: str = ""  # as ``jaxkern train --mesh`` has it; by default all devices are for the batch
    layers: int | None = None  # by default the preset's


@functools.cache
def tasks() -> dict[str, Case | Step | Training]:
    """All that is compiled for an H200, by name: training steps from large to small, then cases."""
    size = lambda name: PRESETS[name].model.d_model ** 2 * PRESETS[name].model.n_layers
    # The slowest come first, and two presets beside each other mostly share no kernels.
    presets = sorted((n for n in PRESETS if not n.endswith("micro")), key=size, reverse=True)
    steps = [Training(preset, devices) for devices in DEVICES for preset in presets]
    for mesh, of_mesh in MESHES.items():
        devices = math.prod(axes_of(mesh).values())
        steps += [Training(preset, devices, mesh, layers=1) for preset in of_mesh]
    return {f"{of.preset} x {of.mesh or of.devices}": of for of in steps} | named()


_compiler = compilers.Compiler()


def compiled(gpu: str, name: str) -> Row:
    """The result of compiling a task for a GPU: its :data:`PARTS`, and a ``line`` in words."""
    task, start = tasks()[name], time.perf_counter()
    kernel_call.refused.clear()
    of_step = isinstance(task, Training)
    lowered = _lowered_training(task, GPUS[gpu]) if of_step else _lowered_op(task, GPUS[gpu])
    told: Row = {"kernels": {}, "plain": dict(kernel_call.refused), "training": {}}
    every: list[Kernel] = []
    if "mosaic_gpu" in lowered.as_text():  # else all of it is XLA's
        result, text, kernels = _compiler(lowered)
        told["kernels"] = {n: [list(kernel) for kernel in of] for n, of in kernels.items()}
        every = [kernel for of in kernels.values() for kernel in of]
        if of_step:
            told["training"] = _training(result, text)
    registers, spills = max((k.registers for k in every), default=0), sum(k.spills for k in every)
    line = f"{time.perf_counter() - start:.1f} s, {len(every)} kernels, at most {registers} "
    return told | {"line": line + f"registers, {spills} bytes spilled"}


def _training(compiled: jax.stages.Compiled, text: str) -> Row:
    """The result of a training step, whose final text is `text`."""
    exchanged = compilers.exchanged_in(text)
    return {
        "memory": needed_memory(compiled),
        "collectives": {kind: exchanged[kind][0] for kind in COLLECTIVES if kind in exchanged},
        "exchanged": {kind: size for kind, (_, size) in exchanged.items()},
        "copied": compilers.copied_in(text),
    }


def _lowered_training(training: Training, gpu: Gpu) -> Any:
    """The training step of :data:`PER_DEVICE` sequences for each part of the batch, lowered."""
    axes = axes_of(training.mesh) if training.mesh else {}
    parts = axes.get("tensor", 1) * axes.get("sequence", 1)
    flags: Row = {"preset": training.preset, "mixed_precision": "bf16", "mesh": training.mesh}
    flags["batch_size"] = PER_DEVICE * training.devices // parts
    if training.layers:
        flags["model.n_layers"] = training.layers
    config = TrainConfig.from_flags(flags)
    return lowered_step(config, Placement.of(config, compilers.described(gpu, training.devices)))


def _lowered_op(case: Case | Step, gpu: Gpu) -> Any:
    """Forward and backward of an op, or an optimizer's step, as one program for one device."""
    sharding = jax.sharding.SingleDeviceSharding(compilers.described(gpu, 1)[0])

    def shapes_of(f: Callable[..., Any], *args: Any) -> Any:
        """The results of `f`, as shapes on the device."""
        give = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(give, jax.eval_shape(f, *args))

    # "mosaic" has kernels also where XLA is faster, and here no error where one does not fit.
    falling_back = lambda name, kernel, reference, unfit, _, *a: kernel_call.kernel_call(
        name, kernel, reference, unfit, False, *a
    )
    arrays = shapes_of(case.arrays, jax.random.key(0))
    with mock.patch.object(kernel_pass, "kernel_call", falling_back):
        if isinstance(case, Step):
            init, run = step_program(case, "mosaic")
            step = jax.jit(lambda p, s, grads: run(grads, s, p), donate_argnums=(0, 1))
            return step.lower(arrays, shapes_of(init, arrays), arrays)
        return jax.jit(passes(case)).lower(*arrays)


# Committed figures


def path_of(gpu: Gpu) -> Path:
    return RESULTS / f"aot-sm_{gpu.capability[0]}{gpu.capability[1]}.json"


def held_for(gpu: Gpu) -> Row:
    """The committed figures of a GPU, or none."""
    path = path_of(gpu)
    return {part: {} for part in PARTS} | (json.loads(path.read_text()) if path.exists() else {})


def with_results(held: Row, results: Row) -> Row:
    """The figures `held` with those of :func:`compiled` by task, of tasks that there are."""
    found = dict(held)
    for part in PARTS:
        kept = {name: told for name, told in held[part].items() if name not in results}
        new = {n: r[part] for n, r in results.items() if r[part] or part == "kernels"}
        found[part] = {n: v for n, v in sorted((kept | new).items()) if n in tasks()}
    return found


def chosen(held: Row) -> list[str]:
    """The fewest cases that have each kernel in each of its tiles, by the figures `held`.

    Of the GPU that training steps are compiled for, also each op in each dtype and with each
    option, whatever number is in it; and of these steps, which tell of collectives, the smallest
    preset on each number of GPUs and a layer on each mesh of several axes.
    """
    kernels = {n: of for n, of in held["kernels"].items() if n not in held["training"]}
    sizes = {name: sum(map(len, of_name.values())) for name, of_name in kernels.items()}

    def shown(name: str) -> set[Any]:
        tiles = {(kernel, k[2] // BRANCH) for kernel, of in kernels[name].items() for k in of}
        plain = {(kernel, "plain") for kernel in held["plain"].get(name, ())}
        if not held["training"]:
            return tiles | plain
        op, shape, dtype = name.split()
        option = re.sub(r"^[\d.x]+[BM]?|\d+", "", shape)
        return tiles | plain | {(op, dtype), (op, option)}

    having = {name: shown(name) for name in kernels}
    left = set[Any]().union(*having.values())
    found = [name for name in held["training"] if name.startswith("tiny") or "," in name]
    while left:
        name = min(having, key=lambda name: (-len(having[name] & left), sizes[name], name))
        found.append(name)
        left -= having[name]
    return found


def differences(was: Row, now: Row, names: Iterable[str]) -> Iterator[str]:
    """Tells what is worse in the figures `now` than in those that `was` holds, of tasks `names`.

    Each has ``"jax"``, a version, and :data:`PARTS`.
    """
    same = was["jax"] == now["jax"]
    for name in names:
        before, after = was["kernels"].get(name), now["kernels"].get(name)
        if before is None or after is None:
            if same:
                yield f"{name}: is {'new' if before is None else 'missing'}"
            continue
        for kernel in sorted({*before, *after}):
            old, new = ([Kernel(*k) for k in part.get(kernel, ())] for part in (before, after))
            if same and len(old) != len(new):
                yield f"{name}: kernels {kernel}: was {len(old)}, is {len(new)}"
            spills = max((k.spills for k in new), default=0)
            if spills and old and not any(k.spills for k in old):
                yield f"{name}: spills of {kernel}: was 0 bytes, is {spills}"
        plain = now["plain"].get(name, {}).items() - was["plain"].get(name, {}).items()
        yield from (f"{name}: {kernel} is plain JAX: {reason}" for kernel, reason in sorted(plain))
        if name not in now["training"]:
            continue
        before, after = was["training"].get(name), now["training"][name]
        yield from other_counts(name, before["collectives"], after["collectives"])
        gib = lambda size: f"{size / 2**30:.2f} GiB"
        for part, told in ("memory", "memory of a device"), ("copied", "bytes copied"):
            if same and after[part] > GROWTH * before[part]:
                yield f"{name}: {told}: was {gib(before[part])}, is {gib(after[part])}"


def other_counts(name: str, was: dict[str, int], now: dict[str, int]) -> Iterator[str]:
    """Tells where the number of a kind of collective differs."""
    for kind in sorted({*was, *now}, key=COLLECTIVES.index):
        if was.get(kind, 0) != now.get(kind, 0):
            yield f"{name}: {kind}: was {was.get(kind, 0)}, is {now.get(kind, 0)}"


# The command


@program.command(
    write=(False, "renew the committed figures"),
    only=("", "only tasks whose name has this regular expression"),
    missing=(False, "only what the figures do not have"),
    part=(False, "on 3 generations a case for each tile"),
    gpu=([str], f"what is compiled for ({', '.join(GENERATIONS)})", *GPUS),
    jobs=(2, "processes that compile"),
)
def main(args: Any) -> int:
    start = time.perf_counter()
    names = [name for name in tasks() if re.search(args.only, name)]
    if not names:
        args.error(f"no task's name has {args.only}")
    try:
        versions = {part: metadata.version(part) for part in ("jax", "jax-cuda12-plugin")}
        versions["ptxas"] = metadata.version("nvidia-cuda-nvcc-cu12")
    except metadata.PackageNotFoundError as error:
        args.error(f"{error}; run make aot, which installs it")
    versions["commit"] = program.tree()  # before the figures change
    faults = []
    for gpu in args.gpu or (PART if args.part else GENERATIONS):
        print(f"for {GPUS[gpu]}, by JAX {versions['jax']}, ptxas {versions['ptxas']}", flush=True)
        faults += [f"{gpu}: {fault}" for fault in _on_generation(gpu, names, versions, args)]
    print(f"{time.perf_counter() - start:.0f} s")
    if faults and not args.write:
        faults.append("if this is meant, run make matrix ARGS=--write")
    return status("aot", faults)


def _on_generation(gpu: str, names: list[str], versions: Row, args: Any) -> list[str]:
    """Compiles the tasks of these names for a GPU, compares or writes, and tells faults."""
    path, was = path_of(GPUS[gpu]), held_for(GPUS[gpu])
    if "jax" not in was and not args.write:
        return [f"{path} is missing"]
    numbers = lambda version: [int(number) for number in re.findall(r"\d+", version)]
    if args.write and numbers(versions["jax"]) > numbers(was.get("jax", "")):
        was = {"jax": versions["jax"], **{part: {} for part in PARTS}}
    other = was["jax"] != versions["jax"]
    if gpu != "h200":
        names = [name for name in names if not isinstance(tasks()[name], Training)]
    if args.part and was["kernels"]:
        names = [name for name in chosen(was) if name in names]
    beside = f"jax {versions['jax']}"  # what another version of JAX differs in
    if args.missing:
        had = was.get(beside, {}) if other else was["kernels"]
        names = [name for name in names if name not in had]
    elif not (args.only or args.part or args.write):
        names = sorted({*names, *was["kernels"]})  # what is no task is missing
    if other:
        print(
            f"The committed figures are from JAX {was['jax']}: only spills, passes in plain JAX "
            "and collectives are held against them"
        )
    about = {"gpu": GPUS[gpu].name, **versions}
    now: Row = about | {part: {} for part in PARTS}
    faults: dict[str, str] = {}
    todo = [(gpu, name) for name in names if name in tasks()]
    for (_, name), result in run(compiled, todo, args.jobs):
        if isinstance(result, Failed):
            faults[name] = f"{name}: {result}"
            continue
        now = with_results(now, {name: result})
        if args.write and other:
            told = [*differences(was, now, [name])]
            was[beside] = dict(sorted({**was.get(beside, {}), name: told}.items()))
            path.write_text(program.with_lines(was))
        elif args.write:  # at once: it takes long, and may go on later
            was = with_results(was | about, {name: result})
            path.write_text(program.with_lines(was))
    if args.write:
        print(f"wrote {path}")
        return [*faults.values()]
    return [*faults.values(), *differences(was, now, (n for n in names if n not in faults))]


def status(command: str, faults: Sequence[str]) -> int:
    """The status of a command, whose faults it tells."""
    print(*(f"bench.{command}: {fault}\n" for fault in faults), sep="", end="", file=sys.stderr)
    return 1 if faults else 0


def run(f: Callable[..., Row], todo: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Any]]:
    """Compiles tasks in processes of their own, and tells what became of each, as they are done.

    The result of `f` has a ``line`` in words.
    """
    with compilers.for_gpus():
        for count, (task, result) in enumerate(each(f, todo, jobs, apart=True), 1):
            line = "failed" if isinstance(result, Failed) else result["line"]
            print(f"[{count:3}/{len(todo)}] {' '.join(task):44} {line}", flush=True)
            yield task, result
