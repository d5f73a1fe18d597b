"""Runs the cases, forward and backward, for each implementation, and writes table and JSON."""

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench import timing
from bench.cases import Case, bytes_of, cases

RESULTS = Path(__file__).parent / "results"
IMPLEMENTATIONS = ("mosaic", "xla")


def machine(commit: str) -> dict[str, Any]:
    """Where the figures come from: without it they mean nothing."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jaxkern": jaxkern.__version__,
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if _output("git", "status", "--porcelain") else "")


def _output(*command: str) -> str:
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=RESULTS.parent
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a pass of an op at a shape by an implementation.

    Times are device time in microseconds per call on a GPU, wall-clock time elsewhere; `gb_s` and
    `percent` (of the copy bandwidth measured in the same run) count each array of the pass once;
    `temp_bytes` is what the program needs beside its arguments and results; `kernels` tells how
    often a call launches each.
    """

    op: str
    shape: str
    dtype: str
    implementation: str
    direction: str
    us: float
    us_low: float
    us_high: float
    calls: int
    gb_s: float
    percent: float
    compile_s: float
    temp_bytes: int
    kernels: dict[str, int]


def measure_case(case: Case, implementation: str, copy: float, calls: int) -> Iterator[Row]:
    """The forward, the backward from what the forward saves, and both in one program."""

    def call(*arrays: Any) -> Any:
        return case.call(*arrays, implementation)

    def forward(*arrays: Any) -> Any:
        return jax.vjp(call, *arrays)

    key = jax.random.key(0)
    shapes = jax.eval_shape(case.arrays, key)
    count = timing.sets_needed(bytes_of(shapes))
    sets = [case.arrays(k) for k in jax.random.split(key, count)]
    _check(case, call, sets[0])
    yield _row(case, implementation, "forward", call, sets, case.bytes_forward, copy, calls)

    def both(arrays: Any, dout: Any) -> Any:
        out, vjp = forward(*arrays)
        return out, vjp(dout)

    out = jax.eval_shape(call, *sets[0])
    draw = lambda key: jax.tree.map(lambda o: jax.random.normal(key, o.shape, o.dtype), out)
    douts = [draw(jax.random.key(i)) for i in range(len(sets))]
    with_dout = list(zip(sets, douts, strict=True))
    nbytes = case.bytes_forward + case.bytes_backward
    yield _row(case, implementation, "both", both, with_dout, nbytes, copy, calls)
    save = jax.jit(forward)
    saved = [(save(*arrays)[1], dout) for arrays, dout in with_dout]
    del sets, with_dout

    def backward(vjp: Any, dout: Any) -> Any:
        return vjp(dout)

    yield _row(case, implementation, "backward", backward, saved, case.bytes_backward, copy, calls)


def _check(case: Case, call: Any, arrays: tuple[Any, ...]) -> None:
    """No speed from a wrong result: the first call must agree with plain JAX."""
    got = jax.tree.leaves(jax.jit(call)(*arrays))
    want = jax.tree.leaves(jax.jit(lambda *a: case.call(*a, "xla"))(*arrays))
    for g, w in zip(got, want, strict=True):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        error = float(jnp.linalg.norm(g - w) / jnp.linalg.norm(w))
        if not error < 1e-2:
            what = f"{case.op} {case.shape}"
            raise RuntimeError(f"{what}: relative error {error:.1e} against plain JAX")


def _row(
    case: Case,
    implementation: str,
    direction: str,
    f: Any,
    sets: list[tuple[Any, ...]],
    nbytes: int,
    copy: float,
    calls: int,
) -> Row:
    start = time.perf_counter()
    program = jax.jit(f).lower(*sets[0]).compile()
    compile_s = time.perf_counter() - start
    timed = timing.measure(program, sets, calls)
    memory = program.memory_analysis()
    rate = nbytes / (timed.median * 1e-3)
    return Row(
        op=case.op,
        shape=case.shape,
        dtype=case.dtype,
        implementation=implementation,
        direction=direction,
        us=round(timed.median * 1e3, 2),
        us_low=round(timed.low * 1e3, 2),
        us_high=round(timed.high * 1e3, 2),
        calls=timed.calls,
        gb_s=round(rate / 1e9, 1),
        percent=round(100 * rate / copy, 1),
        compile_s=round(compile_s, 2),
        temp_bytes=getattr(memory, "temp_size_in_bytes", 0),
        kernels=dict(Counter(timed.kernels)),
    )


def _write(out: Path, report: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time jaxkern's ops, forward and backward, beside plain JAX.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--op", action="append", help="only this op; repeat for more")
    p.add_argument("--shape", action="append", help="only this shape, as the table writes it")
    p.add_argument("--vs", default="xla", help="implementations beside mosaic, comma-separated")
    p.add_argument("--calls", type=int, default=30, help="timed calls a measurement")
    p.add_argument("--commit", default="", help="what to call this tree, where git cannot tell")
    p.add_argument("--out", type=Path, help="JSON file (bench/results/<device>-<op>.json)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    gpu = timing.on_gpu()
    chosen = [
        case
        for case in cases(small=not gpu)
        if (not args.op or case.op in args.op) and (not args.shape or case.shape in args.shape)
    ]
    if not chosen:
        known = ", ".join(sorted({f"{c.op} {c.shape}" for c in cases(small=not gpu)}))
        print(f"bench: error: no such case; there are: {known}", file=sys.stderr)
        return 2
    where = machine(args.commit)
    copy = timing.copy_bandwidth()
    clock = (
        "device time (CUPTI), cold L2" if gpu else "WALL-CLOCK TIME ON A CPU: no kernel runs here"
    )
    print(f"{where['device']}, JAX {where['jax']}, copy {copy / 1e9:.0f} GB/s, {clock}", flush=True)
    print(f"{'op':15}{'shape':24}{'dtype':10}{'pass':10}{'runs':8}{'us':>10}{'±':>8}{'% copy':>8}")
    device = str(where["device"]).lower().replace(" ", "-")
    ops = "-".join(sorted({c.op for c in chosen}))
    out = args.out or RESULTS / f"{device}-{ops}.json"
    report = {**where, "copy_gb_s": round(copy / 1e9, 1), "clock": clock, "rows": []}
    failed = 0
    names = ["mosaic"] * gpu + [v for v in args.vs.split(",") if v]
    for case in chosen:
        for implementation in names:
            try:
                for row in measure_case(case, implementation, copy, args.calls):
                    report["rows"].append(dataclasses.asdict(row))
                    spread = (row.us_high - row.us_low) / 2
                    print(
                        f"{row.op:15}{row.shape:24}{row.dtype:10}{row.direction:10}"
                        f"{row.implementation:8}{row.us:10.1f}{spread:8.1f}{row.percent:8.1f}",
                        flush=True,
                    )
            except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as e:
                failed += 1
                reason = str(e).splitlines()[0]
                print(f"{case.op:15}{case.shape:24}{case.dtype:10}{implementation}: {reason}")
            gc.collect()
            _write(out, report)  # after every case: a run that is stopped keeps what it has
    print(f"wrote {out}")
    return 1 if failed else 0
