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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import program

_STARTED = time.time()  # before JAX is imported, which a first step counts


def _on_gpu() -> bool:
    from bench import timing  # with JAX

    return timing.on_gpu()


def command(flags: dict[str, Any], folder: Path) -> list[str]:
    """The words of a run that writes to `folder`."""
    words = [str(word) for flag in flags.items() for word in flag]
    return [sys.executable, "-u", "-m", "jaxkern", "train", *words, "--out", str(folder)]


def logged(flags: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
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


def _flags_of(args: argparse.Namespace) -> dict[str, Any]:
    shape = {f"--{key.replace('_', '-')}": value for key, value in _settings(args).items()}
    return shape | {"--eval-every": args.steps, "--checkpoint-every": args.steps}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in ("preset", "batch_size", "seq_len", "steps")}


# Precisions

PRECISIONS = ("fp32", "bf16", "fp16")


def _last_loss(args: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """The last validation loss of a run."""
    flags = {"--mixed-precision": precision, "--seed": seed, "--log-every": args.steps}
    with tempfile.TemporaryDirectory() as folder:
        last = logged(_flags_of(args) | flags, Path(folder) / "run")[-1]
    row = {"precision": precision, "seed": seed, "validation_loss": last["validation_loss"]}
    return row | {key: last[key] for key in ("skipped", "loss_scale") if "skipped" in last}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each precision the mean over seeds, its spread, and the mean difference to fp32."""
    losses = {
        p: {r["seed"]: r["validation_loss"] for r in rows if r["precision"] == p}
        for p in PRECISIONS
    }
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
    runs = list(itertools.product(PRECISIONS, range(args.seeds)))
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(functools.partial(_last_loss, args), *zip(*runs, strict=True)))
    report = program.machine(args.commit) | _settings(args)
    report |= {"rows": rows, "summary": summary(rows)}
    for row in report["summary"]:
        print(
            f"{row['precision']:5} validation loss {row['mean']:.4f} ± {row['spread']:.4f} nats, "
            f"to fp32 {row['to_fp32']:+.4f}"
        )
    print(f"fp16 left out {sum(row.get('skipped', 0) for row in rows)} steps")
    print(f"wrote {program.write(report, args.out, 'precision')}")
    return 0


# Loss curves

RUNS = {
    "kernels, bf16": {"--mixed-precision": "bf16", "--implementation": "auto"},
    "plain JAX, fp32": {"--mixed-precision": "fp32", "--implementation": "xla"},
}
"""The flags of each curve; the last one is what the others are compared with."""

WINDOW = 20
"""Steps over which losses are averaged, of which each is another batch's."""


def windows(losses: Sequence[float]) -> list[float]:
    """Means over WINDOW steps, one after another; the last may be of fewer."""
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def curve(name: str, losses: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """The row of a run: means over WINDOW steps, and their differences from those `beside`."""
    means = windows(losses)
    differences = [a - b for a, b in zip(means, windows(beside), strict=True)]
    return {
        "run": name,
        "first": round(means[0], 4),
        "last": round(means[-1], 4),
        "difference": round(differences[-1], 4),
        "largest": round(max(map(abs, differences)), 4),
        "losses": list(losses),
    }


def curves(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench curves``."""
    p = _with_shape(program.parser("curves", "curves"), steps=300)
    p.add_argument("--tokenizer", default="bpe:8192", help="of jaxkern train")
    p.add_argument("--data", help="of jaxkern train (Python's standard library)")
    args = p.parse_args(argv)
    shared = _flags_of(args) | {"--tokenizer": args.tokenizer, "--eval-batches": 1}
    shared |= {"--data": args.data} if args.data else {}
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        shared["--data-cache"] = Path(folder) / "tokens"  # the second run finds the first one's
        for i, own in enumerate(RUNS.values()):
            records = logged(shared | own, Path(folder) / f"run-{i}")
            losses.append([round(r["loss"], 4) for r in records if "loss" in r])
    rows = [curve(name, found, losses[-1]) for name, found in zip(RUNS, losses, strict=True)]
    clock = program.clock(_on_gpu(), "none: losses")
    settings = {"tokenizer": args.tokenizer, **_settings(args)}
    report = program.machine(args.commit) | {"clock": clock} | settings | {"rows": rows}
    for run in rows[:-1]:
        told = f"{run['last']:.4f} nats in the end, {run['difference']:+.4f}"
        print(f"{run['run']} beside {rows[-1]['run']}: {told}; {run['largest']:.4f} at most")
    print(f"wrote {program.write(report, args.out, 'curves')}")
    return 0


# Checkpoints

_REPORT = re.compile(r"step +(\d+)/\d+ · loss")


def reports(flags: dict[str, Any], folder: Path) -> dict[int, float]:
    """When a run reported each step that it reports, in seconds."""
    seen: dict[int, float] = {}
    with subprocess.Popen(command(flags, folder), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if found := _REPORT.match(line):
                seen[int(found[1])] = time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"jaxkern train ended with status {process.returncode}")
    return seen


def checkpoints(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench checkpoints``.

    The time between two reports of a run, which wait for the steps, is compared: the first after
    everything was compiled and run, the last before the end.
    """
    p = program.parser("checkpoints", "checkpoints")
    p.add_argument("--preset", default="130m", help="the model's shape")
    p.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    p.add_argument("--count", type=int, default=4, help="checkpoints that are timed")
    p.add_argument("--log-every", type=int, default=50, help="steps between two reports")
    p.add_argument("--repeats", type=int, default=2, help="runs of each kind, in turn")
    args = p.parse_args(argv)
    if args.every % args.log_every or args.every < 2 * args.log_every:
        p.error(f"--every must be twice --log-every or another multiple; got {args.every}")
    first, last = args.log_every, args.log_every + args.count * args.every
    steps = last + args.log_every
    shared = {
        "--preset": args.preset,
        "--mixed-precision": "bf16" if _on_gpu() else "fp32",
        "--steps": steps,
        "--log-every": args.log_every,
        "--eval-every": steps,
        "--eval-batches": 1,
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, every in itertools.product(range(args.repeats), (args.every, steps)):
            out = Path(folder) / f"run-{i}-{every}"
            seen = reports(shared | {"--checkpoint-every": every}, out)
            ms = 1e3 * (seen[last] - seen[first]) / (last - first)
            rows.append({"preset": args.preset, "checkpoints": every == args.every, "ms": ms})
            print(f"{args.preset}, a checkpoint every {every} of {steps} steps: {ms:.3f} ms a step")
    best = {kind: min(r["ms"] for r in rows if r["checkpoints"] == kind) for kind in (True, False)}
    share = round(100 * (best[True] / best[False] - 1), 2)
    told = {"every": args.every, "count": args.count, "percent": share, "rows": rows}
    clock = program.clock(_on_gpu(), "wall-clock time of steps")
    report = program.machine(args.commit) | {"clock": clock} | told
    print(f"a checkpoint every {args.every} steps takes {share}% of the time")
    print(f"wrote {program.write(report, args.out, 'checkpoints')}")
    return 0


# The first step


def first_step(argv: list[str] | None = None) -> int:
    """Runs ``python -m bench first_step --preset 130m --preset 370m --devices 1 --devices 4``.

    A figure counts from the start of its process: imports, lowering, compiling, the state's initial
    values, one step.
    """
    p = program.parser("first_step", "first-step")
    p.add_argument("--preset", action="append", help="of jaxkern train; repeat for more")
    p.add_argument("--devices", action="append", type=int, help="GPUs; repeat for more")
    p.add_argument("--batch-size", type=int, default=8, help="sequences of a GPU")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    cases = list(itertools.product(args.preset or ["130m"], args.devices or [1]))
    if args.child:
        print(json.dumps(_measure_first(*cases[0], args.batch_size)))
        return 0
    rows = []
    for preset, devices in cases:
        words = [sys.executable, "-m", "bench", "first_step", "--child", f"--preset={preset}"]
        words += [f"--devices={devices}", f"--batch-size={args.batch_size}"]
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                env = os.environ | {"JAXKERN_CACHE_DIR": folder}
                done = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]) | {"cache": cache})
                told = "{first_step_s:5.1f} s, {kernels_lowered} kernels".format(**rows[-1])
                print(f"{preset:6} {devices} GPUs, cache {cache:6}: {told}")
    # After the processes that are timed: it takes hold of the GPU.
    report = program.machine(args.commit) | {"clock": "wall-clock time of processes", "rows": rows}
    print(f"wrote {program.write(report, args.out, 'first-step')}")
    return 0


def _measure_first(preset: str, devices: int, batch_size: int) -> dict[str, Any]:
    """A training run's first step in this process."""
    import jax
    import numpy as np

    from jaxkern.core import kernel_call
    from jaxkern.lm.config import TrainConfig
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
    _, metrics = programs.step(state, windows, schedule_of(config))
    loss = float(metrics["loss"])
    return {
        "preset": preset,
        "devices": devices,
        "first_step_s": round(time.time() - _STARTED, 1),
        "programs_s": round(compiled - compiling, 1),
        "kernels_lowered": sum(kernel_call.lowerings.values()),
        "loss": round(loss, 3),
    }
