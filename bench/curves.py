"""Loss curves of the language model: kernels in bf16 beside plain JAX in fp32.

Both are ``jaxkern train`` with the same seed, so they begin with the same parameters and see the
same tokens; the loss is the fused linear cross-entropy of a vocabulary of tokens, by its kernels in
one run and by plain JAX in the other. ``python -m bench curves --steps 300``.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import program, timing

RUNS = {
    "kernels, bf16": {"--mixed-precision": "bf16", "--implementation": "auto"},
    "plain JAX, fp32": {"--mixed-precision": "fp32", "--implementation": "xla"},
}
"""The flags of each curve; the last one is what the others are compared with."""

WINDOW = 20
"""Steps over which losses are averaged, of which each is another batch's."""


def train(flags: dict[str, Any], folder: Path) -> list[float]:
    """The loss of every step of a run."""
    words = [str(word) for flag in flags.items() for word in flag]
    command = [sys.executable, "-m", "jaxkern", "train", *words, "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [round(r["loss"], 4) for r in records if "loss" in r]


def windows(losses: Sequence[float]) -> list[float]:
    """Means over WINDOW steps, one after another; the last may be of fewer."""
    return [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def row(name: str, losses: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
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


def main(argv: list[str] | None = None) -> int:
    p = program.parser("curves", "curves")
    p.add_argument("--preset", default="tiny", help="the model's shape")
    p.add_argument("--tokenizer", default="bpe:8192", help="of jaxkern train")
    p.add_argument("--data", help="of jaxkern train (Python's standard library)")
    p.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    p.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    p.add_argument("--steps", type=int, default=300, help="of each run")
    args = p.parse_args(argv)
    shared = {
        "--preset": args.preset,
        "--tokenizer": args.tokenizer,
        "--batch-size": args.batch_size,
        "--seq-len": args.seq_len,
        "--steps": args.steps,
        "--eval-every": args.steps,
        "--eval-batches": 1,
        "--checkpoint-every": args.steps,
    }
    shared |= {"--data": args.data} if args.data else {}
    with tempfile.TemporaryDirectory() as folder:
        shared["--data-cache"] = Path(folder) / "tokens"  # the second run finds the first one's
        losses = [
            train(shared | own, Path(folder) / f"run-{i}") for i, own in enumerate(RUNS.values())
        ]
    rows = [row(name, curve, losses[-1]) for name, curve in zip(RUNS, losses, strict=True)]
    clock = program.clock(timing.on_gpu(), "none: losses")
    settings = {k: getattr(args, k) for k in ("preset", "tokenizer", "batch_size", "seq_len")}
    report = program.machine(args.commit) | {"clock": clock} | settings | {"rows": rows}
    for run in rows[:-1]:
        told = f"{run['last']:.4f} nats in the end, {run['difference']:+.4f}"
        print(f"{run['run']} beside {rows[-1]['run']}: {told}; {run['largest']:.4f} at most")
    print(f"wrote {program.write(report, args.out, 'curves')}")
    return 0
