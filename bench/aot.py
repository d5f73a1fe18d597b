"""Compiles every op for each generation of GPU, none of which is there, and compares.

Down to ptxas, on a machine without a GPU (:mod:`bench.gpus`); nothing runs. What each program of
:mod:`bench.programs` tells is held against committed figures, ``bench/results/aot-sm_90.json`` and
those of the other generations: the kernels, and the registers, spills and shared memory of each
(:mod:`bench.ptxas`); which passes are plain JAX, and why; of training steps also memory of a device
and how many of each collective there are.

Wrong is a kernel that spills and did not, one whose products ptxas serializes, a pass that is plain
JAX and was not, a kernel that is missing or new, another number of collectives, and more than 2%
more memory. With another version of JAX than the committed figures are from, only spills, passes in
plain JAX and collectives count, and serialized products; ``--write`` notes them beside those
figures. Seconds are those of this machine and never wrong.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import gpus, program
from bench.processes import each
from bench.program import RESULTS
from bench.programs import COLLECTIVES, Result, Training, attempt, tasks
from bench.ptxas import Kernel
from jaxkern.core.target import GPUS, Gpu

GENERATIONS = ("a100", "a10g", "l40s", "h200", "b200", "b300", "rtx-pro-6000")
"""A GPU of each generation; the H200's programs are also the training steps."""

PART = ("l40s", "h200", "rtx-pro-6000")
"""Three that differ most: no TMA, clusters and wgmma, and a TMA with 99 KiB of shared memory."""

GROWTH = 1.02
"""How much more memory of a device, or bytes copied, than the committed are not told of."""

BRANCH = 8192
"""Kernels of one name whose shared memory differs by less are taken to have the same tiles."""


# Committed figures


def path_of(gpu: Gpu) -> Path:
    return RESULTS / f"aot-sm_{gpu.capability[0]}{gpu.capability[1]}.json"


def figures(results: Iterable[Result]) -> dict[str, Any]:
    """The part of the results that is committed."""
    found: dict[str, Any] = {"kernels": {}, "plain": {}, "training": {}}
    for result in results:
        found["kernels"][result.name] = {
            name: [list(kernel) for kernel in of_name] for name, of_name in result.kernels.items()
        }
        if result.plain:
            found["plain"][result.name] = result.plain
        if result.memory:
            found["training"][result.name] = {
                "memory": result.memory,
                "collectives": {k: n for k, n in result.collectives.items() if n},
                "exchanged": result.exchanged,
                "copied": result.copied,
            }
    return found


def merged(was: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The figures of both, of tasks that there are; of those that both have, the figures `now`."""
    found = was | now
    for part in figures(()):
        kept = {n: v for n, v in was[part].items() if n not in now["kernels"]}
        found[part] = {n: v for n, v in sorted((kept | now[part]).items()) if n in tasks()}
    return found


def chosen(held: dict[str, Any]) -> list[str]:
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
    told = lambda name: name.startswith("tiny") or "," in name
    found = [name for name in held["training"] if told(name)]
    while left:
        name = min(having, key=lambda name: (-len(having[name] & left), sizes[name], name))
        found.append(name)
        left -= having[name]
    return found


def differences(was: dict[str, Any], now: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Compares the figures `now` with those that `was` holds, of the tasks `names`; tells faults.

    Each has ``"jax"``, a version, and the parts of :func:`figures`.
    """
    same = was["jax"] == now["jax"]
    found: list[str] = []
    for name in names:
        before, after = was["kernels"].get(name), now["kernels"].get(name)
        if before is None or after is None:
            if same:
                found.append(f"{name}: is {'new' if before is None else 'missing'}")
            continue
        found += _kernel_differences(name, before, after, same)
        plain = now["plain"].get(name, {}).items() - was["plain"].get(name, {}).items()
        found += [f"{name}: {kernel} is plain JAX: {reason}" for kernel, reason in sorted(plain)]
        if name in now["training"]:
            before, after = was["training"].get(name), now["training"][name]
            found += _training_differences(name, before, after, same)
    return found


def _kernel_differences(name: str, was: Any, now: Any, same: bool) -> Iterator[str]:
    for kernel in sorted({*was, *now}):
        before, after = ([Kernel(*k) for k in part.get(kernel, ())] for part in (was, now))
        if same and len(before) != len(after):
            yield f"{name}: kernels {kernel}: was {len(before)}, is {len(after)}"
        spills = max((k.spills for k in after), default=0)
        if spills and before and not any(k.spills for k in before):
            yield f"{name}: spills of {kernel}: was 0 bytes, is {spills}"


def _training_differences(name: str, was: Any, now: Any, same: bool) -> Iterator[str]:
    for kind in COLLECTIVES:
        before, after = (part["collectives"].get(kind, 0) for part in (was, now))
        if before != after:
            yield f"{name}: {kind}: was {before}, is {after}"
    for part, told in ("memory", "memory of a device"), ("copied", "bytes copied"):
        if same and now[part] > GROWTH * was[part]:
            yield f"{name}: {told}: was {_gib(was[part])}, is {_gib(now[part])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


# The command


def line_of(result: Result) -> str:
    kernels = [kernel for of_name in result.kernels.values() for kernel in of_name]
    words = [
        f"lowered in {result.lower_s:.1f} s",
        f"compiled in {result.compile_s:.1f} s",
        f"{len(kernels)} kernels",
        f"{max((k.registers for k in kernels), default=0)} registers",
        f"{sum(k.spills for k in kernels)} bytes spilled",
    ]
    if result.memory:
        words += [_gib(result.memory), f"{_gib(result.copied)} copied"]
        words += [f"{n} {kind}" for kind, n in result.collectives.items() if n]
    return ", ".join(words)


def _parser() -> argparse.ArgumentParser:
    p = program.parser("aot")
    p.add_argument("--write", action="store_true", help="renew the committed figures")
    p.add_argument("--only", metavar="REGEX", help="only tasks whose name has it")
    p.add_argument("--missing", action="store_true", help="only what the figures do not have")
    p.add_argument("--part", action="store_true", help="on 3 generations a case for each tile")
    every = f"what is compiled for; repeat for more ({', '.join(GENERATIONS)})"
    p.add_argument("--gpu", choices=GPUS, action="append", help=every)
    p.add_argument("--jobs", type=int, default=2, help="processes that compile")
    return p


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    start = time.perf_counter()
    names = [name for name in tasks() if re.search(args.only or "", name)]
    if not names:
        print(f"bench.aot: error: no task's name has {args.only}", file=sys.stderr)
        return 2
    try:
        versions = {part: metadata.version(part) for part in ("jax", "jax-cuda12-plugin")}
        versions["ptxas"] = metadata.version("nvidia-cuda-nvcc-cu12")
    except metadata.PackageNotFoundError as error:
        print(f"bench.aot: error: {error}; run make aot, which installs it", file=sys.stderr)
        return 2
    versions["commit"] = program.tree()  # before the figures change
    faults = []
    for gpu in args.gpu or (PART if args.part else GENERATIONS):
        print(f"for {GPUS[gpu]}, by JAX {versions['jax']}, ptxas {versions['ptxas']}", flush=True)
        faults += _on_generation(gpu, names, versions, args)
    print(f"{time.perf_counter() - start:.0f} s, and {_processor_seconds():.0f} s of processors")
    for fault in faults:
        print(f"bench.aot: {fault}", file=sys.stderr)
    if faults and not args.write:
        print("bench.aot: if this is meant, run make matrix ARGS=--write", file=sys.stderr)
    return 1 if faults else 0


def _processor_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _on_generation(
    gpu: str, names: list[str], versions: dict[str, str], args: argparse.Namespace
) -> list[str]:
    """Compiles the tasks of these names for a GPU, compares or writes, and tells faults."""
    path = path_of(GPUS[gpu])
    if not path.exists() and not args.write:
        return [f"{path} is missing"]
    was: dict[str, Any] = {"jax": versions["jax"], **figures(())}
    if path.exists():
        held = figures(()) | json.loads(path.read_text())
        if not (args.write and _newer(versions["jax"], held["jax"])):
            was = held
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
    now: dict[str, Any] = {"gpu": GPUS[gpu].name, **versions, **figures(())}
    faults: list[str] = []
    for result in run(gpu, [name for name in names if name in tasks()], args.jobs):
        if result.error:
            faults.append(f"{result.name}: {result.error}")
            continue
        for part, of_result in figures([result]).items():
            now[part] |= of_result
        if args.write and other:
            told = differences(was, now, [result.name])
            was[beside] = dict(sorted({**was.get(beside, {}), result.name: told}.items()))
            path.write_text(program.with_lines(was))
        elif args.write:  # at once: it takes long, and may go on later
            path.write_text(program.with_lines(merged(was, now)))
    if args.write:
        print(f"wrote {path}")
    else:
        failed = {fault.split(": ")[0] for fault in faults}
        faults += differences(was, now, (name for name in names if name not in failed))
    return [f"{gpu}: {fault}" for fault in faults]


def _newer(version: str, other: str) -> bool:
    numbers = lambda text: [int(number) for number in re.findall(r"\d+", text)]
    return numbers(version) > numbers(other)


def run(gpu: str, names: list[str], jobs: int) -> Iterator[Result]:
    """Compiles tasks in processes of their own, and tells what became of each, as they are done."""
    with gpus.compilers():
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        for count, result in enumerate(_surviving(gpu, names, jobs), 1):
            line = "failed" if result.error else line_of(result)
            print(f"[{count:3}/{len(names)}] {gpu} {result.name:44} {line}", flush=True)
            yield result


def _surviving(gpu: str, names: list[str], jobs: int) -> Iterator[Result]:
    """The results of tasks, of which one may end its process.

    That ends the others' processes, too: the next tasks then run in one process each.
    """
    left = dict.fromkeys(names)
    alone = 0
    while left:
        group = [*left][:1] if alone else [*left]
        try:
            for (_, name), result in each(attempt, [(gpu, n) for n in group], jobs, apart=True):
                del left[name]
                yield result
        except BrokenProcessPool as error:
            if alone:
                del left[group[0]]
                yield Result(group[0], error=f"{error}")
            else:
                alone = 2 * jobs + 1
        alone = max(0, alone - 1)
