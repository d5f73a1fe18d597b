"""How long a training run takes to its first step, with nothing kept on disk and with all of it.

    python -m bench first_step --preset 130m --preset 370m --devices 1 --devices 4

Each figure is of a process of its own, from its start: imports, lowering, compiling, the state's
initial values, one step. The first process of a case finds an empty cache, the second one what the
first has left there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench import program

_STARTED = time.time()


def main(argv: list[str] | None = None) -> int:
    parser = program.parser("first_step", "first-step")
    parser.add_argument("--preset", action="append", help="of jaxkern train; repeat for more")
    parser.add_argument("--devices", action="append", type=int, help="GPUs; repeat for more")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    presets, counts = args.preset or ["130m"], args.devices or [1]
    if args.child:
        print(json.dumps(measure(presets[0], counts[0], args.batch_size)))
        return 0
    rows = []
    for preset in presets:
        for count in counts:
            rows += _cold_and_warm(preset, count, args.batch_size)
    # After the processes that are timed: it takes hold of the GPU.
    report = program.machine(args.commit) | {"clock": "wall-clock time of processes", "rows": rows}
    print(f"wrote {program.write(report, args.out, 'first-step')}")
    return 0


def _cold_and_warm(preset: str, devices: int, batch_size: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            command = [sys.executable, "-m", "bench", "first_step", "--child"]
            command += [f"--preset={preset}", f"--devices={devices}", f"--batch-size={batch_size}"]
            environment = os.environ | {"JAXKERN_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]) | {"cache": cache})
            seconds, lowered = rows[-1]["first_step_s"], rows[-1]["kernels_lowered"]
            print(
                f"{preset:6} {devices} GPUs, cache {cache:6}: {seconds:5.1f} s, {lowered} kernels"
            )
    return rows


def measure(preset: str, devices: int, batch_size: int) -> dict[str, Any]:
    """A training run's first step in this process."""
    import jax
    import numpy as np

    from jaxkern.lm.config import TrainConfig
    from jaxkern.lm.program import Placement, compile_programs, keep_programs
    from jaxkern.lowering import kernel_call

    flags = {"preset": preset, "batch_size": batch_size * devices, "mixed_precision": "bf16"}
    config = TrainConfig.from_flags(flags)
    keep_programs()
    placement = Placement.of(config, jax.devices()[:devices])
    compiling = time.time()
    programs = compile_programs(config, placement, fresh=True)
    compiled = time.time()
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 255, (1, config.batch_size, config.seq_len + 1), dtype=np.uint8)
    state = programs.init()
    _, metrics = programs.step(state, jax.device_put(windows, placement.second_split))
    loss = float(metrics["loss"])
    return {
        "preset": preset,
        "devices": devices,
        "first_step_s": round(time.time() - _STARTED, 1),
        "programs_s": round(compiled - compiling, 1),
        "kernels_lowered": sum(kernel_call.lowerings.values()),
        "loss": round(loss, 3),
    }
