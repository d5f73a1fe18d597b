"""Training runs that are timed from outside: ``python -m bench checkpoints``, and ``first_step``.

checkpoints  the time of a step with a checkpoint every so many steps, and with one at the end
first_step   the time to the first step, with empty caches and with those of an earlier process
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import program
from bench.program import Row

_STARTED = time.time()  # before JAX is imported, which a first step counts

# Checkpoints

_REPORT = re.compile(r"step +(\d+)/\d+ · loss")


def reports(flags: Row, folder: Path) -> dict[int, float]:
    """When ``jaxkern train`` reported each step that it reports, in seconds."""
    words = [str(word) for flag in flags.items() for word in flag]
    command = [sys.executable, "-u", "-m", "jaxkern", "train", *words, "--out", str(folder)]
    seen: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if found := _REPORT.match(line):
                seen[int(found[1])] = time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"jaxkern train ended with status {process.returncode}")
    return seen


def _step_ms(flags: Row, run: tuple[int, int]) -> Row:
    """The time of a step, by the first report after everything was run and the last but one."""
    first, last = flags["--log-every"], flags["--steps"] - flags["--log-every"]
    with tempfile.TemporaryDirectory() as folder:
        seen = reports(flags | {"--checkpoint-every": run[1]}, Path(folder) / "run")
    ms = 1e3 * (seen[last] - seen[first]) / (last - first)
    return {"preset": flags["--preset"], "checkpoints": run[1] < flags["--steps"], "ms": ms}


def checkpoint_share(rows: list[Row]) -> Row:
    """The rows, and the percentage of the time that checkpoints take, by the best of each kind."""
    best = {row["checkpoints"]: row["ms"] for row in sorted(rows, key=lambda row: -row["ms"])}
    told = {"percent": round(100 * (best[True] / best[False] - 1), 2)} if len(best) == 2 else {}
    return told | {"rows": rows}


def checkpoints(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench checkpoints``: compares the time between two reports of a run."""
    args = program.parsed(
        "checkpoints",
        argv,
        "checkpoints",
        preset=("130m", "the model's shape"),
        every=(100, "steps between two checkpoints"),
        count=(4, "checkpoints that are timed"),
        log_every=(50, "steps between two reports"),
        repeats=(2, "runs of each kind, in turn"),
    )
    if args.every % args.log_every or args.every < 2 * args.log_every:
        args.error(f"--every must be twice --log-every or another multiple; got {args.every}")
    program.share_device(2, one=False)  # this process trains nothing
    steps = args.count * args.every + 2 * args.log_every
    from bench import timing  # with JAX

    gpu = timing.on_gpu()
    flags: Row = {"--preset": args.preset, "--mixed-precision": "bf16" if gpu else "fp32"}
    flags |= {"--steps": steps, "--log-every": args.log_every, "--eval-every": steps}
    clock = program.clock(gpu, "wall-clock time of steps")
    told = f"a checkpoint every {args.every} steps takes {{percent}}% of the time".format_map
    return program.measured(
        args,
        "checkpoints",
        functools.partial(_step_ms, flags | {"--eval-batches": 1}),
        [*itertools.product(range(args.repeats), (args.every, steps))],
        clock | {"every": args.every, "count": args.count},
        lambda run, row: f"a checkpoint every {run[1]} of {steps} steps: {row['ms']:.3f} ms a step",
        checkpoint_share,
        lambda report: [told(report)] if "percent" in report else [],
    )


# The first step


def _first(batch_size: int, folder: str, run: tuple[str, int, str]) -> Row:
    """A training run's first step in this process, which has just started."""
    preset, devices, cache = run
    os.environ["JAXKERN_CACHE_DIR"] = f"{folder}/{preset}-{devices}"

    import jax
    import numpy as np

    from jaxkern.core import kernel_call
    from jaxkern.lm.config import TrainConfig
    from jaxkern.lm.data.corpus import Packed
    from jaxkern.lm.program import Placement, compile_programs, keep_programs
    from jaxkern.lm.step import schedule_of

    flags = {"preset": preset, "batch_size": batch_size * devices, "mixed_precision": "bf16"}
    config = TrainConfig.from_flags(flags)
    keep_programs()
    placement = Placement.of(config, jax.devices()[:devices])
    compiling = time.time()
    programs = compile_programs(config, placement, fresh=True)
    compiled = time.time()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 255, (1, config.batch_size, config.seq_len + 1), dtype=np.uint8)
    state = programs.init(np.int32(config.seed))
    windows = jax.device_put(tokens, placement.second_split)
    _, metrics = programs.step(state, Packed(windows), schedule_of(config))
    loss = float(metrics["loss"])
    return {
        "preset": preset,
        "devices": devices,
        "first_step_s": round(time.time() - _STARTED, 1),
        "programs_s": round(compiled - compiling, 1),
        "kernels_lowered": sum(kernel_call.lowerings.values()),
        "loss": round(loss, 3),
        "cache": cache,
    }


def first_step(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench first_step --preset 130m --preset 370m --devices 1 --devices 4``.

    A figure counts from the start of its process: imports, lowering, compiling, the state's initial
    values, one step.
    """
    args = program.parsed(
        "first_step",
        argv,
        "first-step",
        preset=([str], "of jaxkern train"),
        devices=([int], "GPUs"),
        batch_size=(8, "sequences of a GPU"),
    )
    program.share_device(2, one=False)  # this process holds a device as well
    told = "{first_step_s:5.1f} s, {kernels_lowered} kernels".format_map
    with tempfile.TemporaryDirectory() as folder:
        return program.measured(
            args,
            "first-step",
            functools.partial(_first, args.batch_size, folder),
            [*itertools.product(args.preset or ["130m"], args.devices or [1], ("empty", "filled"))],
            {"clock": "wall-clock time of processes"},
            lambda run, row: f"{run[0]:6} {run[1]} GPUs, cache {run[2]:6}: {told(row)}",
            apart=True,
            most=1,
        )
