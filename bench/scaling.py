"""Training steps on up to 1,024 GPUs: ``python -m bench scaling`` compiles them and predicts.

The steps of :data:`PRESETS` on :data:`MESHES` of H200s that are not there, as ``jaxkern train``
has them, with 8 sequences for each part of the batch: how long XLA takes, what a device holds, and
what it exchanges with which others, in ``bench/results/aot-scaling.json``. Nothing runs. ``--only``
compiles a part, and ``--missing`` what that file does not have.

A *predicted* step (:func:`predicted`) is one GPU's measured step, divided between the devices of
`tensor`, and after it all that is exchanged, at the bandwidths of the machine's data sheets and
hidden behind nothing. It knows of no latency, of no device that waits for another, and of no kernel
that loses multiprocessors to NCCL's: what was measured stands beside it.
"""

import json
import math
import re
import sys
import time
from importlib import metadata
from typing import Any

from bench import program
from bench.gpus import PER_HOST, compilers
from bench.processes import each
from bench.program import RESULTS

PRESETS = ("130m", "370m", "1.4b")

MESHES = (
    *("data=2", "fsdp=2", "tensor=2", "data=4", "fsdp=4"),
    *("data=8", "fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2"),
    *("data=64", "fsdp=64", "data=8,fsdp=8", "data=8,tensor=8"),
    *("data=1024", "data=128,fsdp=8", "data=128,tensor=8", "data=32,fsdp=8,tensor=4"),
)

SIZES = (8, 2048)
"""The sequences for each part of the batch, and the tokens of each."""

PATH = RESULTS / "aot-scaling.json"

NVLINK = 450e9
"""Bytes a second that a GPU of a host sends to others of it, and as many that it receives.

NVIDIA H200 data sheet: NVLink 900 GB/s, both ways together.
"""

NETWORK = 50e9
"""Bytes a second that a GPU sends to other hosts, and as many that it receives.

NVIDIA DGX H200 data sheet: for each GPU a network card of 400 Gb/s.
"""

Held = dict[str, Any]
"""A step's committed figures: ``exchanges`` are kind, axes, how many, and bytes of all arrays."""


def seconds_of(kind: str, axes: str, size: int, mesh: dict[str, int]) -> float:
    """How long devices exchange arrays of so many bytes, by a ring in each host and between hosts.

    In a host each device sends all but its own part to the next one, for an all-reduce twice: sums
    go around, and then results. Each device of a host then exchanges its part with those of the
    other hosts that have the same part, by a network card of its own.

    Args:
      kind: of collective.
      axes: of the mesh, with commas, between whose devices it is.
      size: bytes of the arrays that a device has after a gather or before a scatter.
      mesh: the sizes of all axes, in order; devices beside each other differ in the last.
    """
    ids = [0]
    stride = math.prod(mesh.values())
    for axis, count in mesh.items():
        stride //= count
        if axis in axes.split(","):
            ids = [first + i * stride for first in ids for i in range(count)]
    hosts = len({i // PER_HOST for i in ids})
    in_host = len(ids) // hosts
    times = 2 if kind == "all-reduce" else 1
    inside = times * (in_host - 1) / in_host * size / NVLINK
    between = times * (hosts - 1) / hosts * (size / in_host) / NETWORK
    return inside + between


def exchange_ms(mesh: str, held: Held) -> float:
    """Milliseconds of all that a step exchanges."""
    sizes = {
        axis: int(count) for axis, _, count in (part.partition("=") for part in mesh.split(","))
    }
    return 1e3 * sum(
        seconds_of(kind, axes, size, sizes) for kind, axes, _, size in held["exchanges"]
    )


def predicted(mesh: str, held: Held, one_ms: float) -> float:
    """Milliseconds of a step, those on one GPU being `one_ms`."""
    return one_ms / _of_tensor(mesh) + exchange_ms(mesh, held)


def _of_tensor(mesh: str) -> int:
    """How many devices share a layer, by `tensor`."""
    tensor = re.search(r"tensor=(\d+)", mesh)
    return int(tensor[1]) if tensor else 1


def devices_of(mesh: str) -> int:
    return math.prod(int(count) for count in re.findall(r"=(\d+)", mesh))


def rate(mesh: str, ms: float) -> float:
    """Tokens a second and GPU of a step."""
    return math.prod(SIZES) / _of_tensor(mesh) / (ms / 1e3)


def names() -> list[str]:
    """All steps, the smaller meshes first."""
    return [f"{preset} x {mesh}" for mesh in MESHES for preset in PRESETS]


# The command


def compiled(name: str) -> tuple[str, Held]:
    """Compiles the step of a name such as ``"130m x data=8"``, in a process of its own."""
    from bench.programs import Training, exchanges, lowered_training, memory_of
    from bench.ptxas import without_modules
    from jaxkern.lowering.target import GPUS

    preset, _, mesh = name.partition(" x ")
    start = time.perf_counter()
    lowered = lowered_training(Training(preset, devices_of(mesh), mesh), GPUS["h200"])
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    found: dict[tuple[str, str], list[int]] = {}
    for exchange in exchanges(without_modules(program.as_text())[0]):
        of_kind = found.setdefault((exchange.kind, exchange.axes), [0, 0])
        of_kind[0] += 1
        of_kind[1] += exchange.size
    return name, {
        "lower_s": round(middle - start, 1),
        "compile_s": round(end - middle, 1),
        "memory": memory_of(program.memory_analysis()),
        "exchanges": [[*key, *told] for key, told in sorted(found.items())],
    }


def main(argv: list[str] | None = None) -> int:
    p = program.parser("scaling")
    p.add_argument("--only", metavar="REGEX", default="", help="only steps whose name has it")
    p.add_argument("--missing", action="store_true", help="only what the figures do not have")
    p.add_argument("--jobs", type=int, default=2, help="processes that compile")
    args = p.parse_args(argv)
    held = json.loads(PATH.read_text()) if PATH.exists() else {"steps": {}}
    chosen = [name for name in names() if re.search(args.only, name)]
    if args.missing:
        chosen = [name for name in chosen if name not in held["steps"]]
    versions = {"jax": metadata.version("jax"), "commit": program.tree()}
    failed = 0
    with compilers():
        for (name,), told in each(
            _attempt, [(name,) for name in chosen], args.jobs, apart=True, most=1
        ):
            if isinstance(told, str):
                failed += 1
                print(f"{name}: {told}", file=sys.stderr, flush=True)
                continue
            steps = held["steps"] | {name: told}
            held = {**versions, "steps": {n: steps[n] for n in names() if n in steps}}
            # At once: it takes long, and may go on later.
            PATH.write_text(program.with_lines(held))
            seconds = told["lower_s"] + told["compile_s"]
            print(f"{name}: {seconds:.0f} s, {told['memory'] / 2**30:.1f} GiB", flush=True)
    print(f"wrote {PATH}")
    return 1 if failed else 0


def _attempt(name: str) -> Held | str:
    """What compiling a step tells, or why it cannot be compiled."""
    try:
        return compiled(name)[1]
    except Exception as error:  # the others go on
        return f"{type(error).__name__}: {program.first_line(error)}"
