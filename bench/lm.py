"""Tokens per second of training the language model, on the kernels and on plain JAX.

Runs ``jaxkern train`` once for each implementation, in a process of its own, and reads what it
logged: ``python -m bench.lm --preset 130m --batch-size 8 --seq-len 2048``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.run import RESULTS, machine


def measure(args: argparse.Namespace, implementation: str) -> dict[str, object]:
    """Trains for a few steps; the median over them leaves out the first, which may hold set-up."""
    steps = {"auto": args.steps, "xla": args.steps_xla}[implementation]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = {
            "--preset": args.preset,
            "--mixed-precision": args.mixed_precision,
            "--batch-size": args.batch_size,
            "--seq-len": args.seq_len,
            "--steps": steps,
            "--log-every": max(1, steps // 4),
            "--eval-batches": 1,
            "--implementation": implementation,
            "--out": run,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        subprocess.run([sys.executable, "-m", "jaxkern", "train", *words], check=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return {
        "implementation": implementation,
        "steps": steps,
        "tokens_per_second": round(statistics.median(speeds[len(speeds) // 4 :])),
        "last_loss": records[-1]["loss"],
    }


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bench.lm", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--preset", default="130m", help="the model's shape")
    p.add_argument("--mixed-precision", default="bf16", help="fp32, bf16 or fp16")
    p.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    p.add_argument("--seq-len", type=int, default=2048, help="bytes a sequence")
    p.add_argument("--steps", type=int, default=40, help="steps on the kernels")
    p.add_argument("--steps-xla", type=int, default=12, help="steps on plain JAX")
    p.add_argument("--commit", default="", help="what to call this tree, where git cannot tell")
    p.add_argument("--out", type=Path, help="JSON file (bench/results/<device>-lm.json)")
    args = p.parse_args(argv)
    rows = [measure(args, implementation) for implementation in ("auto", "xla")]
    where = machine(args.commit)
    device = str(where["device"]).lower().replace(" ", "-")
    out = args.out or RESULTS / f"{device}-lm.json"
    keys = ("preset", "mixed_precision", "batch_size", "seq_len")
    report = {**where, **{key: getattr(args, key) for key in keys}, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(f"{row['implementation']:6} {row['tokens_per_second']:>10,} tokens/s")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
