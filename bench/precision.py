"""The loss that training the language model reaches in fp32, bf16 and fp16, over several seeds.

Runs ``jaxkern train`` once for each precision and seed, and reads what it logged; fp16 is trained
with a dynamic loss scale. Seeds draw parameters and data: the same one in another precision starts
alike. ``python -m bench precision --jobs 3``.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import program

PRECISIONS = ("fp32", "bf16", "fp16")


def train(args: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """Trains, and tells the last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = {
            "--preset": args.preset,
            "--mixed-precision": precision,
            "--batch-size": args.batch_size,
            "--seq-len": args.seq_len,
            "--steps": args.steps,
            "--eval-every": args.steps,
            "--log-every": args.steps,
            "--checkpoint-every": args.steps,
            "--seed": seed,
            "--out": run,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run(
            [sys.executable, "-m", "jaxkern", "train", *words],
            check=True,
            env=env,
            stdout=subprocess.DEVNULL,
        )
        lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    row = {"precision": precision, "seed": seed, "validation_loss": last["validation_loss"]}
    if "skipped" in last:
        row |= {"skipped": last["skipped"], "loss_scale": last["loss_scale"]}
    return row


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


def main(argv: list[str] | None = None) -> int:
    p = program.parser("precision", "precision")
    p.add_argument("--preset", default="tiny", help="the model's shape")
    p.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    p.add_argument("--seq-len", type=int, default=256, help="bytes a sequence")
    p.add_argument("--steps", type=int, default=240, help="of each run")
    p.add_argument("--seeds", type=int, default=3, help="runs of each precision")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = p.parse_args(argv)
    runs = list(itertools.product(PRECISIONS, range(args.seeds)))
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(functools.partial(train, args), *zip(*runs, strict=True)))
    keys = ("preset", "batch_size", "seq_len", "steps")
    settings = {key: getattr(args, key) for key in keys}
    told = {"rows": rows, "summary": summary(rows)}
    report = program.machine(args.commit) | settings | told
    out = program.write(report, args.out, "precision")
    for row in report["summary"]:
        print(
            f"{row['precision']:5} validation loss {row['mean']:.4f} ± {row['spread']:.4f} nats, "
            f"to fp32 {row['to_fp32']:+.4f}"
        )
    skipped = sum(row.get("skipped", 0) for row in rows)
    print(f"fp16 left out {skipped} steps\nwrote {out}")
    return 0
