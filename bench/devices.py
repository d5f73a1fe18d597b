"""Training steps and sequences split between several GPUs: ``python -m bench devices``.

The guide to many GPUs says what is measured. A training step has as many sequences for each part of
the batch, and as many tokens for each part of a sequence, as one GPU has (``--size``). Steps and
calls wait in the devices' queues, and the time is wall-clock, the best of three runs of ten, or of
as many as take two seconds. *First step* counts from the start of the process. *Error* is that of
the split results against those of one GPU, the largest of the relative errors, in the norm, of the
result and the gradients; of a training step, with ``--check``, that of all its gradients together,
for which one GPU has to hold the whole batch. Each mesh is measured in a process of its own.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from bench import program, timing
from bench.cases import TABLE, case
from bench.program import Row
from bench.train import peak_gib
from jaxkern.core import kernel_call
from jaxkern.lm.config import AXES, PRESETS, REMATS, TrainConfig, axes_of
from jaxkern.lm.data import Packed
from jaxkern.lm.program import Placement, compile_programs, keep_programs
from jaxkern.lm.step import schedule_of

_RUNS, _CALLS = 3, 10
_SECONDS = 2
"""A run is at most so long: with slow calls it has fewer than ten."""
SEQUENCES = {
    "ssd": (24, 64, 128, 1),
    "gated_delta_rule": (32, 128, 128, 16),
    "selective_scan": (1536, 16),
    "linear_scan": (1024,),
    "causal_conv1d": (2048, 4),
}
"""Ops, and the sizes of their axes but for batch and length."""
LENGTHS = 65536, 524288
"""Lengths of the ops' sequences. What the first ones give is compared with one device's results;
for the others that would take the host a minute."""
IN_PARTS = ("gated_delta_rule",)
"""Ops whose longest sequence with its gradients may be too large for one GPU: that has a part."""
SMALL = {"linear_scan": (8,)}
"""Ops and sizes for a machine without a GPU."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A measurement: a training step of a preset, or an op, on a mesh or on one device, ``none``.

    The sizes are those of the axes of an op, or the sequences for each part of the batch, and the
    tokens for each part of a sequence.
    """

    what: str
    sizes: tuple[int, ...]
    mesh: str
    remat: str = "none"
    check: bool = False

    def __str__(self) -> str:
        return f"{self.told}, {'x'.join(map(str, self.sizes))}, {self.mesh}"

    @property
    def told(self) -> str:
        """The measured thing, in words."""
        return self.what if self.remat == "none" else f"{self.what} --remat {self.remat}"


def measure(job: Job) -> Row:
    """The row of a job."""
    began = time.perf_counter()
    return (_train if job.what in PRESETS else _scan)(job, began)


def _best(run: Callable[[], Any]) -> float:
    """Milliseconds of a call."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    calls = max(1, min(_CALLS, int(_SECONDS / timed(1))))
    return 1e3 * min(timed(calls) for _ in range(_RUNS))


def _row(job: Job, tokens: int, devices: int, ms: float, **rest: Any) -> Row:
    told = {"what": job.told, "sizes": " × ".join(map(str, job.sizes)), "mesh": job.mesh}
    per_second = {"ms": round(ms, 3), "tokens_per_second": round(1e3 * tokens / ms)}
    empty = dict.fromkeys(("efficiency", "first_step_s", "peak_gib", "error"), "")
    return told | {"devices": devices} | per_second | empty | rest


def _train(job: Job, began: float) -> Row:
    sequences, tokens = job.sizes
    mesh = "" if job.mesh == "none" else job.mesh
    axes = axes_of(mesh) if mesh else {}
    length = tokens * axes.get("sequence", 1)
    flags: Row = {"preset": job.what, "mixed_precision": "bf16", "mesh": mesh, "steps": 1000}
    flags["batch_size"] = sequences * axes.get("data", 1) * axes.get("fsdp", 1)
    config = TrainConfig.from_flags(flags | {"seq_len": length, "remat": job.remat})
    devices = jax.devices()[: math.prod(axes.values())]
    step, state = _first_step(config, devices)
    told: Row = {"first_step_s": round(time.perf_counter() - began, 1)}
    split = _gradients(config, devices, state) if job.check and mesh else None

    def run() -> Any:
        nonlocal state
        state, metrics = step(state)
        return metrics

    ms = _best(run)
    told["peak_gib"] = max(peak_gib(device) or 0.0 for device in devices)
    if split is not None:
        del state
        alone = dataclasses.replace(config, mesh="")
        whole = _gradients(alone, devices[:1], _first_step(alone, devices[:1])[1])
        told["error"] = f"{_error(split, whole):.1e}"
    return _row(job, config.batch_size * length, len(devices), ms, **told)


def _first_step(config: TrainConfig, devices: Sequence[Any]) -> Any:
    """A step on random bytes, state -> (state, metrics), and the state after it."""
    shape = 1, config.batch_size, config.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    placement = Placement.of(config, devices)
    programs = compile_programs(config, placement, fresh=True)
    windows = jax.device_put(placement.split.windows(tokens), placement.windows(None))
    step = lambda state: programs.step(state, Packed(windows), schedule_of(config))
    return step, jax.block_until_ready(step(programs.init(np.int32(config.seed)))[0])


def _gradients(config: TrainConfig, devices: Sequence[Any], state: Any) -> np.ndarray:
    """All gradients of the first step, (parameters,), but for a factor: their first average."""
    averages = Placement.of(config, devices).to_stored(state).opt_state.mu
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(averages)])


def _scan(job: Job, began: float) -> Row:
    of = next(of for of in TABLE if of.name == job.what)
    sizes = of.sizes(job.sizes)
    dtype = "bfloat16" if timing.on_gpu() else "float32"
    arrays = of.arrays(jax.random.key(0), sizes, case.dtypes(dtype, parameters="float32"))

    both = jax.jit(lambda *given: case.result_and_gradients(of.call, given[:-1], given[-1]))
    devices = jax.devices()
    dout = jax.random.normal(jax.random.key(1), jax.eval_shape(of.call, *arrays).shape, dtype)
    whole = [jax.device_put(a, devices[0]) for a in (*arrays, dout)]
    told, run, count = {}, functools.partial(both, *whole), 1
    if job.mesh != "none":
        count = int(job.mesh.partition("=")[2])
        axes = Mesh(np.array(devices[:count]), ("sequence",), axis_types=(AxisType.Auto,))
        specs = (NamedSharding(axes, spec) for spec in of.specs("l", "sequence", sizes))
        run = functools.partial(both, *map(jax.device_put, whole, specs))
        if job.check:
            told["error"] = f"{_error(run(), both(*whole)):.1e}"
    jax.block_until_ready(run())
    told["first_step_s"] = round(time.perf_counter() - began, 1)
    return _row(job, sizes["b"] * sizes["l"], count, _best(run), **told)


def _error(got: Any, want: Any) -> float:
    """The largest relative error of any array."""
    arrays = lambda tree: [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]
    norm = lambda a: max(float(np.linalg.norm(a)), 1e-30)
    pairs = zip(arrays(got), arrays(want), strict=True)
    return max(norm(g - w) / norm(w) for g, w in pairs)


def jobs(args: argparse.Namespace, gpu: bool, count: int) -> list[Job]:
    """Lists steps and ops on `count` devices and on one: those that are named alone, if any are."""
    size, lengths, known = ("8x2048", LENGTHS, SEQUENCES) if gpu else ("1x16", (64,), SMALL)
    sizes = args.size or ([] if args.op else [size])
    meshes = args.mesh or [f"{axis}={count}" for axis in AXES]
    training = [
        Job(preset, tuple(map(int, size.split("x"))), mesh, args.remat, args.check)
        for preset in args.preset or ["130m" if gpu else "micro"]
        for size in sizes
        for mesh in ("none", *meshes)
    ]
    scans = [
        Job(op, (1, length // parts, *(SEQUENCES | known)[op]), mesh, check=length == lengths[0])
        for op in args.op or ([] if args.size else known)
        for length in lengths
        for mesh, parts in (
            ("none", count if op in IN_PARTS and length == lengths[-1] else 1),
            (f"sequence={count}", 1),
        )
    ]
    return [*training, *scans]


def with_efficiency(rows: list[Row]) -> list[Row]:
    """The rows, those of a mesh with their efficiency: beside the same on one, or else a part."""
    of_one = lambda row: row["tokens_per_second"] / row["devices"]
    alone = {(row["what"], row["sizes"]): of_one(row) for row in rows if row["mesh"] == "none"}

    def told(what: str, sizes: str, row: Row) -> Row:
        if what in IN_PARTS and (what, sizes) not in alone:
            batch, length, *rest = sizes.split(" × ")
            sizes = " × ".join([batch, f"{int(length) // row['devices']}", *rest])
        beside = alone.get((what, sizes)) if row["mesh"] != "none" else None
        return {"efficiency": f"{of_one(row) / beside:.1%}"} if beside else {}

    return [row | told(row["what"], row["sizes"], row) for row in rows]


def _first(batch_size: int, folder: str, run: tuple[str, int, str]) -> Row:
    """A training run's first step in this process, which has just started."""
    preset, count, cache = run
    os.environ["JAXKERN_CACHE_DIR"] = f"{folder}/{preset}-{count}"
    flags = {"preset": preset, "batch_size": batch_size * count, "mixed_precision": "bf16"}
    keep_programs()
    _first_step(TrainConfig.from_flags(flags), jax.devices()[:count])
    # Since the process started, imports included.
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    told = {"first_step_s": round(age, 1), "kernels_lowered": sum(kernel_call.lowerings.values())}
    return {"preset": preset, "devices": count, **told, "cache": cache}


@program.command(
    "first-step",
    preset=([str], "of jaxkern train"),
    devices=([int], "GPUs"),
    batch_size=(8, "sequences of a GPU"),
)
def first_step(args: Any) -> int:
    """Runs ``python -m bench first_step --preset 130m --preset 370m --devices 1 --devices 4``.

    A figure counts from the start of its process: imports, lowering, compiling, the state's initial
    values, one step; with empty caches, and with those of an earlier process.
    """
    program.share_device(2, one=False)  # this process holds a device as well
    with tempfile.TemporaryDirectory() as folder:
        return program.measured(
            args,
            functools.partial(_first, args.batch_size, folder),
            [*itertools.product(args.preset or ["130m"], args.devices or [1], ("empty", "filled"))],
            {"clock": "wall-clock time of processes"},
            **program.ALONE,
        )


@program.command(
    "devices",
    preset=([str], "the model's shape (130m; without a GPU micro)"),
    op=([str], "this one alone", *SEQUENCES),
    mesh=([str], "how devices are split (each axis, of all devices)"),
    size=([str], "SEQUENCESxTOKENS of a training step on one GPU, for these alone"),
    remat=("none", "of training steps", *REMATS),
    check=(False, "compare gradients of steps with those on one GPU"),
    limit=(240.0, "seconds for each mesh"),
)
def main(args: Any) -> int:
    # This process measures nothing, and of the others one at a time.
    program.share_device(2, one=False)
    if args.check:  # memory for the whole batch, beside what the split step has left in pieces
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    gpu = timing.on_gpu()
    return program.measured(
        args,
        measure,
        jobs(args, gpu, jax.device_count()),
        program.clock(gpu, "wall-clock time of calls that wait in the devices' queues"),
        finish=lambda rows: {"rows": with_efficiency(rows)},
        limit=args.limit,
        **program.ALONE,
    )
