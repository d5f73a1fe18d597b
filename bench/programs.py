"""The programs that ``python -m bench aot`` compiles, and what compiling one of them tells.

Each op at each of its shapes in `bench.measured`, forward and backward, and on an H200 the training
step of each preset of the language model, in bf16 and with 8 sequences a device, for 1, 8 and 64
GPUs; and that of one layer on meshes of them (`MESHES`), of which the guide tells what is
exchanged. Kernels that an earlier program of the same process had are lowered again, which tells
that they are the same, and not compiled again.

A pass whose kernel a GPU cannot take is plain JAX in its program, and the result says why.
"""

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from bench import gpus, steps
from bench.cases.optim import Step
from bench.copies import copied_in, sizes_in
from bench.measured import Case, cases
from bench.modules import passes
from bench.ptxas import Compiler, Kernels
from jaxkern.core import kernel_call, kernel_pass
from jaxkern.core.target import GPUS, Gpu

DEVICES = (1, 8, 64)
PER_DEVICE = 8
"""Sequences of a training step on one device."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


MESHES = {
    "data=8": ("130m", "mamba2-130m"),
    "fsdp=8": ("130m", "mamba2-130m"),
    "tensor=8": ("130m", "mamba2-130m"),
    "data=2,fsdp=2,tensor=2": ("130m", "mamba2-130m"),
    "fsdp=64": ("130m",),
    "data=8,tensor=8": ("130m",),
    "sequence=8": ("130m", "mamba2-130m"),
    "data=2,sequence=4": ("130m", "mamba2-130m"),
}
"""How one layer of presets is split."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The training step of a preset on a number of devices.

    Attributes:
      mesh: as ``jaxkern train --mesh`` has it; by default all devices are for the batch.
      layers: how many the model has; by default the preset's.
    """

    preset: str
    devices: int
    mesh: str = ""
    layers: int | None = None

    @property
    def name(self) -> str:
        return f"{self.preset} x {self.mesh}" if self.mesh else f"{self.preset} x {self.devices}"


Task = Case | Step | Training


def name_of(task: Task) -> str:
    return task.name if isinstance(task, Training) else f"{task.op} {task.shape} {task.dtype}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What compiling a task told.

    Attributes:
      name: of the task.
      kernels: of the program.
      plain: why a pass is plain JAX, by its name.
      lower_s, compile_s: seconds to lower it, and to compile what was lowered.
      memory: of a training step, bytes of one device: arguments and results, those that share
        their memory once, and temporaries.
      collectives: of a training step, how many instructions of each kind the final text has; one
        that is inside a loop counts once.
      exchanged: of a training step, bytes of the arrays of each kind of collective: of those that
        a device has after a gather or before a scatter.
      copied: of a training step, bytes that XLA writes without computing anything.
      error: why the program cannot be compiled, or ``""``.
    """

    name: str
    kernels: Kernels = dataclasses.field(default_factory=dict)
    plain: dict[str, str] = dataclasses.field(default_factory=dict)
    lower_s: float = 0.0
    compile_s: float = 0.0
    memory: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    exchanged: dict[str, int] = dataclasses.field(default_factory=dict)
    copied: int = 0
    error: str = ""


@functools.cache
def tasks() -> dict[str, Task]:
    """All that is compiled for an H200, by name: training steps from large to small, then cases."""
    from jaxkern.lm.config import PRESETS, axes_of

    sizes = {
        name: preset.model.d_model**2 * preset.model.n_layers
        for name, preset in PRESETS.items()
        if not name.endswith("micro")
    }
    # What takes longest comes first, and two presets beside each other share no kernels.
    presets = sorted(sizes, key=lambda name: -sizes[name])
    trainings = [Training(preset, devices) for devices in DEVICES for preset in presets]
    for mesh, of_mesh in MESHES.items():
        devices = math.prod(axes_of(mesh).values())
        trainings += [Training(preset, devices, mesh, layers=1) for preset in of_mesh]
    return {name_of(task): task for task in (*trainings, *cases(small=False))}


# In a process that compiles

_compiler = Compiler()


def attempt(gpu: str, name: str) -> Result:
    """What compiling a task tells, or why it cannot be compiled."""
    try:
        return compiled(GPUS[gpu], tasks()[name])
    except Exception as error:  # the others go on, and all that failed are told of
        return Result(name, error=f"{type(error).__name__}: {error}")
    finally:
        jax.clear_caches()


def compiled(gpu: Gpu, task: Task) -> Result:
    start = time.perf_counter()
    kernel_call.refused.clear()
    if isinstance(task, Training):
        lowered = lowered_training(task, gpu)
    else:
        lowered = _lowered_op(task, gpu)
    middle = time.perf_counter()
    result = Result(
        name_of(task), plain=dict(kernel_call.refused), lower_s=round(middle - start, 1)
    )
    if "mosaic_gpu" not in lowered.as_text():  # all of it is XLA's
        return result
    program = _compiler(lowered)
    seconds = round(time.perf_counter() - middle, 1)
    result = dataclasses.replace(result, kernels=program.kernels, compile_s=seconds)
    if not isinstance(task, Training):
        return result
    return dataclasses.replace(
        result,
        memory=memory_of(program.compiled.memory_analysis()),
        collectives=collectives_in(program.text),
        exchanged=exchanged_in(program.text),
        copied=copied_in(program.text),
    )


def lowered_training(training: Training, gpu: Gpu) -> Any:
    """The training step of :data:`PER_DEVICE` sequences for each part of the batch, lowered."""
    from jaxkern.lm.config import TrainConfig, axes_of
    from jaxkern.lm.program import Placement, lowered_step

    axes = axes_of(training.mesh) if training.mesh else {}
    parts = axes.get("sequence", 1)
    flags: dict[str, Any] = {
        "preset": training.preset,
        "mixed_precision": "bf16",
        "batch_size": PER_DEVICE * training.devices // (axes.get("tensor", 1) * parts),
        "mesh": training.mesh,
    }
    if training.layers:
        flags["model.n_layers"] = training.layers
    config = TrainConfig.from_flags(flags)
    return lowered_step(config, Placement.of(config, gpus.described(gpu, training.devices)))


def _lowered_op(case: Case | Step, gpu: Gpu) -> Any:
    """Forward and backward of an op, or an optimizer's step, as one program for one device."""
    sharding = jax.sharding.SingleDeviceSharding(gpus.described(gpu, 1)[0])

    def shapes_of(f: Callable[..., Any], *args: Any) -> Any:
        """What `f` gives, as shapes on the device."""
        give = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(give, jax.eval_shape(f, *args))

    def falling_back(name: Any, kernel: Any, reference: Any, unfit: Any, _: bool, *a: Any) -> Any:
        return kernel_call.kernel_call(name, kernel, reference, unfit, False, *a)

    arrays = shapes_of(case.arrays, jax.random.key(0))
    # "mosaic" has kernels also where XLA is faster, and here no error where one does not fit.
    with mock.patch.object(kernel_pass, "kernel_call", falling_back):
        if isinstance(case, Step):
            init, run = steps.program(case, "mosaic")
            step = jax.jit(lambda p, s, grads: run(grads, s, p), donate_argnums=(0, 1))
            return step.lower(arrays, shapes_of(init, arrays), arrays)
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
    r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<types>[^\"\n]*?) "
    rf"(?P<kind>{'|'.join(COLLECTIVES)})(?P<start>-start)?\((?P<rest>.*)",
    re.MULTILINE,
)


def collectives_in(text: str) -> dict[str, int]:
    """How many instructions of each collective a program's text has."""
    found = collections.Counter(match["kind"] for match in _COLLECTIVE.finditer(text))
    return {name: found[name] for name in COLLECTIVES}


def exchanges(text: str) -> Iterator[tuple[str, int]]:
    """Gives kind and bytes of a program's collectives, after a gather or before a scatter."""
    for match in _COLLECTIVE.finditer(text):
        kind, rest = match["kind"], match["rest"]
        sizes = sizes_in(match["types"])
        if match["start"]:  # arguments and results
            half = len(sizes) // 2
            size = max(sum(sizes[:half]), sum(sizes[half:]))
        else:
            size = sum(sizes) * (_group_size(rest) if kind == "reduce-scatter" else 1)
        yield kind, size


def exchanged_in(text: str) -> dict[str, int]:
    """Bytes of the arrays of each kind of collective in a program's text, where it has some."""
    found: collections.Counter[str] = collections.Counter()
    for kind, size in exchanges(text):
        found[kind] += size
    return dict(found)


def _group_size(attributes: str) -> int:
    """How many devices exchange with one another, by an instruction's attributes."""
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^]]*)\] ?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(groups[1].split(",")) if groups else 1
