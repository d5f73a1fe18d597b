"""Training runs of the language model that are compared: losses, checkpoints and the first step.

Each is ``jaxkern train`` in a process of its own:

    precision    the loss in fp32, bf16 and fp16, of several seeds; a seed draws parameters and
                 data, so the same one in another precision starts alike
    curves       the loss of each step by the kernels in bf16 and by plain JAX in fp32, of one seed
    checkpoints  the time of a step with a checkpoint every so many steps, and with one at the end
    first_step   the time to the first step, with empty caches and with those of an earlier process
"""

import argparse
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import program
from bench.program import Row

_STARTED = time.time()  # before JAX is imported, which a first step counts


def _on_gpu() -> bool:
    from bench import timing  # with JAX

    return timing.on_gpu()


def command(flags: Row, folder: Path) -> list[str]:
    """The words of a run that writes to `folder`."""
    words = [str(word) for flag in flags.items() for word in flag]
    return [sys.executable, "-u", "-m", "jaxkern", "train", *words, "--out", str(folder)]


def logged(flags: Row, folder: Path) -> list[Row]:
    """Trains, and returns what the run logged."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run(command(flags, folder), check=True, env=env, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _with_shape(p: argparse.ArgumentParser, steps: int) -> argparse.ArgumentParser:
    p.add_argument("--preset", default="tiny", help="the model's shape")
    p.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    p.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    p.add_argument("--steps", type=int, default=steps, help="of each run")
    return p


def _settings(args: argparse.Namespace) -> tuple[Row, Row]:
    """The shape of the runs, for the report, and the flags of each."""
    shape = {key: getattr(args, key) for key in ("preset", "batch_size", "seq_len", "steps")}
    flags = {f"--{key.replace('_', '-')}": value for key, value in shape.items()}
    return shape, flags | {"--eval-every": args.steps, "--checkpoint-every": args.steps}


# Precisions

PRECISIONS = ("fp32", "bf16", "fp16")


def _last_loss(flags: Row, run: tuple[str, int]) -> Row:
    """The last validation loss of a run."""
    own = {"--mixed-precision": run[0], "--seed": run[1], "--log-every": flags["--steps"]}
    with tempfile.TemporaryDirectory() as folder:
        last = logged(flags | own, Path(folder) / "run")[-1]
    row = {"precision": run[0], "seed": run[1], "validation_loss": last["validation_loss"]}
    return row | {key: last[key] for key in ("skipped", "loss_scale") if "skipped" in last}


def summary(rows: list[Row]) -> list[Row]:
    """For each precision the mean over seeds, its spread, and the mean difference to fp32."""
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["precision"], {})[row["seed"]] = row["validation_loss"]
    return [
        {
            "precision": precision,
            "mean": statistics.mean(of_seed.values()),
            "spread": statistics.stdev(of_seed.values()) if len(of_seed) > 1 else 0.0,
            "to_fp32": statistics.mean(loss - losses["fp32"][s] for s, loss in of_seed.items()),
        }
        for precision, of_seed in losses.items()
    ]


def precision(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench precision``."""
    p = _with_shape(program.parser("precision", "precision"), steps=240)
    p.add_argument("--seeds", type=int, default=3, help="runs of each precision")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = p.parse_args(argv)
    program.share_device(2)  # this process trains nothing
    shape, flags = _settings(args)
    report = program.measured(
        args,
        "precision",
        functools.partial(_last_loss, flags),
        [*itertools.product(PRECISIONS, range(args.seeds))],
        shape,
        lambda run, row: f"{run[0]}, seed {run[1]}: {row['validation_loss']:.4f} nats",
        lambda rows: {"rows": rows, "summary": summary(rows)},
        jobs=args.jobs,
    )
    for row in report.get("summary", ()):
        print(
            f"{row['precision']:5} validation loss {row['mean']:.4f} ± {row['spread']:.4f} nats, "
            f"to fp32 {row['to_fp32']:+.4f}"
        )
    return 1 if report["failed"] else 0


# Loss curves

RUNS = {
    "kernels, bf16": {"--mixed-precision": "bf16", "--implementation": "auto"},
    "plain JAX, fp32": {"--mixed-precision": "fp32", "--implementation": "xla"},
}
"""The flags of each curve; the last one is what the others are compared with."""

WINDOW = 20
"""Steps over which losses are averaged, of which each is another batch's."""


def _losses(flags: Row, folder: str, run: str) -> Row:
    records = logged(flags | RUNS[run], Path(folder) / run.split()[0])
    return {"run": run, "losses": [round(r["loss"], 4) for r in records if "loss" in r]}


def curves_of(rows: list[Row]) -> list[Row]:
    """The rows with means over WINDOW steps, and their differences from those of the last row."""
    windows = lambda losses: [
        statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)
    ]
    beside, found = windows(rows[-1]["losses"]), []
    for row in rows:
        means = windows(row["losses"])
        differences = [a - b for a, b in zip(means, beside, strict=True)]
        told = {"first": means[0], "last": means[-1], "difference": differences[-1]}
        told["largest"] = max(map(abs, differences))
        told = {key: round(value, 4) for key, value in told.items()}
        found.append({"run": row["run"], **told, "losses": row["losses"]})
    return found


def curves(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench curves``."""
    p = _with_shape(program.parser("curves", "curves"), steps=300)
    p.add_argument("--tokenizer", default="bpe:8192", help="of jaxkern train")
    p.add_argument("--data", help="of jaxkern train (Python's standard library)")
    args = p.parse_args(argv)
    program.share_device(2)  # this process trains nothing
    shape, flags = _settings(args)
    flags |= {"--tokenizer": args.tokenizer, "--eval-batches": 1}
    flags |= {"--data": args.data} if args.data else {}
    about = program.clock(_on_gpu(), "none: losses") | {"tokenizer": args.tokenizer, **shape}
    with tempfile.TemporaryDirectory() as folder:
        flags["--data-cache"] = Path(folder) / "tokens"  # the second run finds the first one's
        report = program.measured(
            args,
            "curves",
            functools.partial(_losses, flags, folder),
            [*RUNS],
            about,
            lambda run, row: f"{run}: {row['losses'][-1]:.4f} nats in the end",
            lambda rows: {"rows": curves_of(rows)},
        )
    for row in report["rows"][:-1]:
        told = f"{row['difference']:+.4f} in the end, {row['largest']:.4f} at most"
        print(f"{row['run']} beside plain JAX: {told}")
    return 1 if report["failed"] else 0


# Checkpoints

_REPORT = re.compile(r"step +(\d+)/\d+ · loss")


def reports(flags: Row, folder: Path) -> dict[int, float]:
    """When a run reported each step that it reports, in seconds."""
    seen: dict[int, float] = {}
    with subprocess.Popen(command(flags, folder), stdout=subprocess.PIPE, text=True) as process:
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
    p = program.parser("checkpoints", "checkpoints")
    p.add_argument("--preset", default="130m", help="the model's shape")
    p.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    p.add_argument("--count", type=int, default=4, help="checkpoints that are timed")
    p.add_argument("--log-every", type=int, default=50, help="steps between two reports")
    p.add_argument("--repeats", type=int, default=2, help="runs of each kind, in turn")
    args = p.parse_args(argv)
    if args.every % args.log_every or args.every < 2 * args.log_every:
        p.error(f"--every must be twice --log-every or another multiple; got {args.every}")
    program.share_device(2)  # this process trains nothing
    steps = args.count * args.every + 2 * args.log_every
    gpu = _on_gpu()
    flags: Row = {"--preset": args.preset, "--mixed-precision": "bf16" if gpu else "fp32"}
    flags |= {"--steps": steps, "--log-every": args.log_every, "--eval-every": steps}
    clock = program.clock(gpu, "wall-clock time of steps")
    report = program.measured(
        args,
        "checkpoints",
        functools.partial(_step_ms, flags | {"--eval-batches": 1}),
        [*itertools.product(range(args.repeats), (args.every, steps))],
        clock | {"every": args.every, "count": args.count},
        lambda run, row: f"a checkpoint every {run[1]} of {steps} steps: {row['ms']:.3f} ms a step",
        checkpoint_share,
    )
    print(f"a checkpoint every {args.every} steps takes {report.get('percent')}% of the time")
    return 1 if report["failed"] else 0


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
    p = program.parser("first_step", "first-step")
    p.add_argument("--preset", action="append", help="of jaxkern train; repeat for more")
    p.add_argument("--devices", action="append", type=int, help="GPUs; repeat for more")
    p.add_argument("--batch-size", type=int, default=8, help="sequences of a GPU")
    args = p.parse_args(argv)
    program.share_device(2)  # this process holds a device as well
    told = "{first_step_s:5.1f} s, {kernels_lowered} kernels".format_map
    with tempfile.TemporaryDirectory() as folder:
        report = program.measured(
            args,
            "first-step",
            functools.partial(_first, args.batch_size, folder),
            [*itertools.product(args.preset or ["130m"], args.devices or [1], ("empty", "filled"))],
            {"clock": "wall-clock time of processes"},
            lambda run, row: f"{run[0]:6} {run[1]} GPUs, cache {run[2]:6}: {told(row)}",
            apart=True,
            most=1,
        )
    return 1 if report["failed"] else 0
