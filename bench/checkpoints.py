"""What checkpoints cost a training run: ``python -m bench checkpoints --preset 130m``.

``jaxkern train`` runs twice, with a checkpoint every so many steps and with one at the end. The
time between two of its reports, which wait for the steps, is compared: the first after everything
was compiled and run, the last before the end.
"""

import itertools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import program, timing

_REPORT = re.compile(r"step +(\d+)/\d+ · loss")


def reports(flags: dict[str, Any], folder: Path) -> dict[int, float]:
    """When a run reported each step that it reports, in seconds."""
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


def main(argv: list[str] | None = None) -> int:
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
        "--mixed-precision": "bf16" if timing.on_gpu() else "fp32",
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
    clock = program.clock(timing.on_gpu(), "wall-clock time of steps")
    report = program.machine(args.commit) | {"clock": clock} | told
    print(f"a checkpoint every {args.every} steps takes {share}% of the time")
    print(f"wrote {program.write(report, args.out, 'checkpoints')}")
    return 0
