"""Compiles every op and the language model's training step for GPUs that are not there.

Down to ptxas, on a machine without a GPU (:mod:`bench.gpus`); nothing runs. Figures are held
against committed ones:

* of each op at each of its shapes in `bench.cases`, forward and backward, the kernels, and the
  registers, spills and shared memory of each (:mod:`bench.ptxas`). All cases are compiled; kernels
  that an earlier case of the same process had are lowered again, which tells that they are the
  same, and not compiled again;
* of the training step of each preset, in bf16 and with 8 sequences a device, for 1, 8 and 64 GPUs,
  memory of a device and how many of each collective are in the final text.

Wrong is a kernel that spills and did not, a kernel that is missing or new, another number of
collectives, and more than 2% more memory. With another version of JAX than the committed figures
are from, only spills and collectives count. Seconds are those of this machine and never wrong.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from typing import Any

import jax

from bench import gpus, program, steps
from bench.cases import Case, cases
from bench.modules import passes
from bench.processes import each
from bench.program import RESULTS
from bench.ptxas import Compiler, Kernel, Kernels
from jaxkern.cases.optim import Step
from jaxkern.lowering.target import GPUS, Gpu

DEVICES = (1, 8, 64)
PER_DEVICE = 8
"""Sequences of a training step on one device."""

GROWTH = 1.02
"""How much more memory of a device than the committed is not told of."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Training:
    """The training step of a preset on a number of devices."""

    preset: str
    devices: int

    @property
    def name(self) -> str:
        return f"{self.preset} x {self.devices}"


Task = Case | Step | Training


def name_of(task: Task) -> str:
    return task.name if isinstance(task, Training) else f"{task.op} {task.shape} {task.dtype}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What compiling a task told.

    Attributes:
      name: of the task.
      kernels: of the program.
      lower_s, compile_s: seconds to lower it, and to compile what was lowered.
      memory: of a training step, bytes of one device: arguments and results, those that share
        their memory once, and temporaries.
      collectives: of a training step, how many instructions of each kind the final text has; one
        that is inside a loop counts once.
    """

    name: str
    kernels: Kernels
    lower_s: float
    compile_s: float
    memory: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)


@functools.cache
def tasks() -> dict[str, Task]:
    """All that is compiled, by name: training steps from large to small, then the cases."""
    from jaxkern.lm.config import PRESETS

    sizes = {
        name: preset.model.d_model**2 * preset.model.n_layers
        for name, preset in PRESETS.items()
        if name != "micro"
    }
    # What takes longest comes first, and two presets beside each other share no kernels.
    presets = sorted(sizes, key=lambda name: -sizes[name])
    trainings = [Training(preset, devices) for devices in DEVICES for preset in presets]
    return {name_of(task): task for task in (*trainings, *cases(small=False))}


# In a process that compiles

_compiler = Compiler()


def attempt(gpu: str, name: str) -> Result | str:
    """What compiling a task tells, or why it cannot be compiled."""
    try:
        return compiled(GPUS[gpu], tasks()[name])
    except Exception as error:  # the others go on, and all that failed are told of
        return f"{type(error).__name__}: {error}"
    finally:
        jax.clear_caches()


def compiled(gpu: Gpu, task: Task) -> Result:
    start = time.perf_counter()
    if isinstance(task, Training):
        lowered = _lowered_training(task, gpu)
    else:
        lowered = _lowered_op(task, gpu)
    middle = time.perf_counter()
    program = _compiler(lowered)
    seconds = round(middle - start, 1), round(time.perf_counter() - middle, 1)
    result = Result(name_of(task), program.kernels, *seconds)
    if not isinstance(task, Training):
        return result
    return dataclasses.replace(
        result,
        memory=memory_of(program.compiled.memory_analysis()),
        collectives=collectives_in(program.text),
    )


def _lowered_training(training: Training, gpu: Gpu) -> Any:
    from jaxkern.lm.config import TrainConfig
    from jaxkern.lm.program import Placement, lowered_step

    config = TrainConfig.from_flags(
        {
            "preset": training.preset,
            "mixed_precision": "bf16",
            "batch_size": PER_DEVICE * training.devices,
        }
    )
    return lowered_step(config, Placement.on(gpus.described(gpu, training.devices)))


def _lowered_op(case: Case | Step, gpu: Gpu) -> Any:
    """Forward and backward of an op, or an optimizer's step, as one program for one device."""
    sharding = jax.sharding.SingleDeviceSharding(gpus.described(gpu, 1)[0])

    def shapes_of(f: Callable[..., Any], *args: Any) -> Any:
        """What `f` gives, as shapes on the device."""
        give = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(give, jax.eval_shape(f, *args))

    arrays = shapes_of(case.arrays, jax.random.key(0))
    if isinstance(case, Step):
        init, run = steps.program(case, "mosaic")
        step = lambda params, state, grads: run(grads, state, params)
        return jax.jit(step, donate_argnums=(0, 1)).lower(arrays, shapes_of(init, arrays), arrays)
    return jax.jit(passes(case)).lower(*arrays)


def memory_of(stats: Any) -> int:
    """Bytes of one device that a program needs while it runs, from XLA's ``memory_analysis()``."""
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


_COLLECTIVE = re.compile(
    rf'^\s*(?:ROOT )?%?[\w.-]+ = [^"\n]*? ({"|".join(COLLECTIVES)})(?:-start)?\(', re.MULTILINE
)


def collectives_in(text: str) -> dict[str, int]:
    """How many instructions of each collective a program's text has."""
    found = collections.Counter(_COLLECTIVE.findall(text))
    return {name: found[name] for name in COLLECTIVES}


# Committed figures


def figures(results: Iterable[Result]) -> dict[str, Any]:
    """The part of the results that is committed."""
    found: dict[str, Any] = {"kernels": {}, "training": {}}
    for result in results:
        found["kernels"][result.name] = {
            name: [list(kernel) for kernel in of_name] for name, of_name in result.kernels.items()
        }
        if result.memory:
            found["training"][result.name] = {
                "memory": result.memory,
                "collectives": {k: n for k, n in result.collectives.items() if n},
            }
    for part in found:
        found[part] = dict(sorted(found[part].items()))
    return found


def differences(was: dict[str, Any], now: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Compares the figures `now` with those that `was` holds, of the tasks `names`; tells faults.

    Each has ``"jax"``, a version, ``"kernels"`` and ``"training"``, as :func:`figures` has them.
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
    if same and now["memory"] > GROWTH * was["memory"]:
        yield f"{name}: memory of a device: was {_gib(was['memory'])}, is {_gib(now['memory'])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def text_of(report: dict[str, Any]) -> str:
    """The committed file: JSON, with a line for each task."""
    lines = []
    for key, value in report.items():
        if isinstance(value, dict):
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            value = f"{{\n{entries}\n }}"
        else:
            value = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {value}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
        words += [_gib(result.memory)]
        words += [f"{n} {kind}" for kind, n in result.collectives.items() if n]
    return ", ".join(words)


def table(results: Iterable[Result]) -> str:
    """What there is to know of each op's kernels, and of each training step."""
    results = list(results)
    of_op: dict[str, list[Kernel]] = {}
    for result in results:
        for name, kernels in result.kernels.items():
            of_op.setdefault(name, []).extend(kernels)
    lines = [f"{'kernel':28}{'times':>9}{'registers':>11}{'spill':>7}{'shared memory':>15}"]
    for name, kernels in sorted(of_op.items()):
        registers, spills, shared = map(max, zip(*kernels, strict=True))
        lines.append(f"{name:28}{len(kernels):9}{registers:11}{spills:7}{shared:15}")
    trained = [result for result in results if result.memory]
    if trained:
        heads = "".join(f"{kind:>20}" for kind in COLLECTIVES)
        lines += ["", f"{'training':12}{'lower s':>9}{'compile s':>11}{'a device':>12}{heads}"]
    for result in trained:
        counts = "".join(f"{result.collectives[kind]:20}" for kind in COLLECTIVES)
        seconds = f"{result.lower_s:9.1f}{result.compile_s:11.1f}"
        lines.append(f"{result.name:12}{seconds}{_gib(result.memory):>12}{counts}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    p = program.parser("aot")
    p.add_argument("--write", action="store_true", help="renew the committed figures")
    p.add_argument("--only", metavar="REGEX", help="only tasks whose name has it")
    p.add_argument("--gpu", choices=GPUS, default="h200", help="what is compiled for")
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
    gpu = GPUS[args.gpu]
    print(f"for {gpu}, by JAX {versions['jax']}, ptxas {versions['ptxas']}", flush=True)
    try:
        results, failures = run(args.gpu, names, args.jobs)
    except BrokenProcessPool as error:
        print(f"bench.aot: error: {error}", file=sys.stderr)
        return 1
    results.sort(key=lambda result: names.index(result.name))
    seconds = time.perf_counter() - start
    print(f"\n{table(results)}\n\n{len(results)} programs in {seconds:.0f} s")
    now = {"gpu": gpu.name, **versions, "commit": program.tree(), **figures(results)}
    path = RESULTS / f"aot-sm_{gpu.capability[0]}{gpu.capability[1]}.json"
    was = json.loads(path.read_text()) if path.exists() else None
    if args.write and not failures:
        if args.only and was:
            merged = {part: was[part] | now[part] for part in ("kernels", "training")}
            now |= {part: dict(sorted(merged[part].items())) for part in merged}
        path.write_text(text_of(now))
        print(f"wrote {path}")
    elif was is None:
        failures.append(f"{path} is missing")
    elif not args.write:
        if was["jax"] != now["jax"]:
            print(
                f"The committed figures are from JAX {was['jax']}: only spills and collectives "
                "are held against them"
            )
        wanted = names if args.only else sorted({*names, *was["kernels"]})
        told = {failure.split(": ")[0] for failure in failures}
        failures += differences(was, now, (name for name in wanted if name not in told))
    for failure in failures:
        print(f"bench.aot: {failure}", file=sys.stderr)
    if failures and not args.write:
        print("bench.aot: if this is meant, run make aot ARGS=--write", file=sys.stderr)
    return 1 if failures else 0


def run(gpu: str, names: list[str], jobs: int) -> tuple[list[Result], list[str]]:
    """Compiles tasks in processes of their own, and tells what became of each."""
    results: list[Result] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        # The kernels that one process lowers serve the others, and none is left from before.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAXKERN_CACHE_DIR": folder,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        found = each(attempt, [(gpu, name) for name in names], jobs, apart=True)
        for count, ((_, name), result) in enumerate(found, 1):
            if isinstance(result, Result):
                results.append(result)
                line = line_of(result)
            else:
                failures.append(f"{name}: {result}")
                line = "failed"
            print(f"[{count:3}/{len(names)}] {name:44} {line}", flush=True)
    return results, failures
