"""Sequence policies side by side: ``python -m bench.backbones`` trains five backbones.

They and their task are in `bench.policies`; the loss is the cross-entropy, the optimizer Adam.

Every backbone runs on plain JAX (``xla``) and with this library's kernels (``mosaic``): the norm,
the MLP's gate, the Mamba block. Times are of one call, on a GPU the sum of the durations of its
kernels, whether or not the arguments are in the cache: of the loss (forward) and of loss and
gradients in one program; backward is the difference, and a step is that program and Adam's update.
`wall_us` is the time of a step in the training loop, where it is one program, with its launches.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench import timing
from bench.policies import BACKBONES, Params, Sizes, draw, init, logits
from bench.report import FOLDER, NAMES, OURS, RESULTS, table
from bench.run import machine
from jaxkern.precision import Policy

DOCUMENT = FOLDER / "backbones.md"
PICTURE = FOLDER / "pictures" / "backbones.svg"
PRECISIONS = ("fp32", "bf16")

_OPTIMIZER = optax.adam(3e-3)


@dataclasses.dataclass(frozen=True)
class Job:
    """A backbone to time."""

    backbone: str
    precision: str
    implementation: str
    length: int

    def __str__(self) -> str:
        return f"{self.backbone}, {self.precision}, {self.implementation}, length {self.length}"

    def programs(self, s: Sizes) -> dict[str, Any] | str:
        """Compiled: all that a measurement runs; or why there is nothing."""
        policy = Policy.parse(self.precision)

        def loss(params: Params, batch: Any) -> jax.Array:
            x, actions = batch
            out = logits(self.backbone, policy, self.implementation, s, params, x)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, actions))

        def update(params: Params, state: Any, grads: Params) -> Any:
            updates, state = _OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def train(params: Params, state: Any, batch: Any) -> Any:
            return update(params, state, jax.grad(loss)(params, batch))

        make = lambda seed: init(jax.random.key(seed), self.backbone, s)
        sample = lambda seed: draw(jax.random.key(seed), self.length, s)
        params, batch = jax.eval_shape(make, 0), jax.eval_shape(sample, 0)
        state = jax.eval_shape(_OPTIMIZER.init, params)
        programs = {
            "init": (make, 0),
            "draw": (sample, 0),
            "begin": (_OPTIMIZER.init, params),
            "forward": (loss, params, batch),
            "both": (jax.value_and_grad(loss), params, batch),
            "update": (update, params, state, params),
        }
        trained = jax.jit(train, donate_argnums=(0, 1))
        try:
            compiled = {k: jax.jit(f).lower(*args).compile() for k, (f, *args) in programs.items()}
            return compiled | {"train": trained.lower(params, state, batch).compile()}
        except Exception as e:  # the other jobs go on
            return _first_line(e)


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]


def measure(job: Job, programs: dict[str, Any], steps: int, calls: int) -> dict[str, Any]:
    """Trains for `steps`, then times the programs."""
    params = programs["init"](0)
    state = programs["begin"](params)
    unseen, *batches = jax.block_until_ready([programs["draw"](i) for i in range(steps + 1)])
    before = float(programs["forward"](params, unseen))
    warm, start = steps // 5, 0.0
    for i, batch in enumerate(batches):
        if i == warm:
            jax.block_until_ready(params)
            start = time.perf_counter()
        params, state = programs["train"](params, state, batch)
    jax.block_until_ready(params)
    wall = (time.perf_counter() - start) / (steps - warm)
    after = float(programs["forward"](params, unseen))
    _, grads = programs["both"](params, unseen)
    args: dict[str, tuple[Any, ...]] = dict.fromkeys(("forward", "both"), (params, unseen))
    args["update"] = (params, state, grads)
    us = {name: 1e3 * timing.measure(programs[name], [a], calls).median for name, a in args.items()}
    return {
        **dataclasses.asdict(job),
        "forward_us": round(us["forward"], 1),
        "backward_us": round(us["both"] - us["forward"], 1),
        "step_us": round(us["both"] + us["update"], 1),
        "wall_us": round(wall * 1e6, 1),
        "loss_before": round(before, 3),
        "loss_after": round(after, 3),
    }


_all_compiled: Callable[[], Any] = lambda: None
_turn: Any = contextlib.nullcontext()


def _begin(barrier: Any, lock: Any) -> None:
    global _all_compiled, _turn
    _all_compiled, _turn = functools.partial(barrier.wait, timeout=600), lock


def _measure_all(jobs: list[Job], s: Sizes, steps: int, calls: int) -> list[dict[str, Any] | str]:
    """Rows, or why there are none; several processes compile at once and measure in turn."""
    compiled = [job.programs(s) for job in jobs]
    _all_compiled()
    rows = []
    with _turn:
        for job, programs in zip(jobs, compiled, strict=True):
            try:
                fails = isinstance(programs, str)
                rows.append(programs if fails else measure(job, programs, steps, calls))
            except RuntimeError as e:
                rows.append(_first_line(e))
            found = f"{rows[-1]['step_us']:,.0f} µs a step" if isinstance(rows[-1], dict) else "✗"
            print(f"{job}: {found}", file=sys.stderr, flush=True)
    return rows


def _spread(
    jobs: list[Job], processes: int, *args: Any
) -> Iterator[dict[Job, dict[str, Any] | str]]:
    """Runs :func:`_measure_all` in several processes, and yields the rows of each one's jobs."""
    processes = min(processes, len(jobs))
    if processes == 1:
        for job in jobs:
            yield {job: _measure_all([job], *args)[0]}
        return
    context = multiprocessing.get_context("spawn")
    sync = (context.Barrier(processes), context.Lock())
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=sync)
    with pool:
        shares = [jobs[i::processes] for i in range(processes)]
        futures = {pool.submit(_measure_all, share, *args): share for share in shares}
        for done in as_completed(futures):
            yield dict(zip(futures[done], done.result(), strict=True))


def text(report: dict[str, Any]) -> str:
    """The tables: what bf16 and the kernels gain at the longest length, and every time."""
    rows = report["rows"]
    keys = ("backbone", "length", "precision", "implementation")
    steps = {tuple(row[key] for key in keys): row["step_us"] for row in rows}
    longest = max((row["length"] for row in rows), default=0)

    def step(backbone: str, precision: str, who: str) -> float | None:
        return steps.get((backbone, longest, precision, who))

    def gain(slow: float | None, fast: float | None) -> str:
        return f"{slow / fast:.2f}×" if slow and fast else ""

    gains = [
        [
            backbone,
            *(
                f"{us:,.0f}" if (us := step(backbone, precision, who)) else ""
                for precision in PRECISIONS
                for who in ("xla", OURS)
            ),
            *(gain(step(backbone, p, "xla"), step(backbone, p, OURS)) for p in PRECISIONS),
            *(gain(step(backbone, "fp32", w), step(backbone, "bf16", w)) for w in ("xla", OURS)),
        ]
        for backbone in dict.fromkeys(row["backbone"] for row in rows)
    ]
    cells = [
        [
            *(row[key] for key in keys[:-1]),
            NAMES[row["implementation"]],
            *(f"{row[f'{k}_us']:,.0f}" for k in ("forward", "backward", "step", "wall")),
            f"{row['loss_before']:.2f} → {row['loss_after']:.2f}",
        ]
        for row in rows
    ]
    of_each = [f"{p}, {NAMES[who]}" for p in PRECISIONS for who in ("xla", OURS)]
    over = [f"by the kernels, {p}" for p in PRECISIONS]
    over += [f"by bf16, {NAMES[who]}" for who in ("xla", OURS)]
    head = ["backbone", "length", "precision", "by", "forward", "backward", "step", "wall", "loss"]
    told = ", ".join(f"{k} {report[k]}" for k in ("device", "jax", "commit", "date"))
    sizes = ", ".join(f"{k} {v}" for k, v in report["sizes"].items())
    parts = [
        "# Backbones",
        "Generated by `python -m bench.backbones`; do not edit.",
        f"{told}; {report['clock']}; {sizes}; {report['steps']} steps of training.",
        f"Microseconds of a step, forward, backward and Adam, at length {longest}, and how many "
        "times faster the kernels make it, and bf16:",
        table(["backbone", *of_each, *over], gains),
        "![milliseconds a step by length](pictures/backbones.svg)",
        "## Every measurement",
        "Microseconds. *Wall* is a step of the training loop, launches included. The loss is that "
        "of unseen sequences, before and after.",
        table(head, cells),
        *(f"Not run: {line}." for line in report["failed"]),
    ]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], out: Path) -> None:
    """Step time over length, a panel for each precision."""
    from bench.plot import plain, pyplot, save

    found = {row["precision"] for row in report["rows"]}
    drawn = [p for p in PRECISIONS if p in found]
    figure, axes = pyplot().subplots(
        1, len(drawn), figsize=(1.8 + 3 * len(drawn), 3), sharey=True, squeeze=False
    )
    names = [b for b in BACKBONES if any(row["backbone"] == b for row in report["rows"])]
    for axis, precision in zip(axes[0], drawn, strict=True):
        for (i, name), how in itertools.product(enumerate(names), ("xla", OURS)):
            want = {"backbone": name, "precision": precision, "implementation": how}
            line = [r for r in report["rows"] if want.items() <= r.items()]
            axis.plot(
                [r["length"] for r in line],
                [r["step_us"] / 1e3 for r in line],
                color=f"C{i}",
                ls="-" if how == OURS else ":",
                marker="o",
                ms=3,
                label=f"{name}, {NAMES[how]}",
            )
        axis.set(yscale="log", title=precision, xlabel="length")
        axis.set_xticks(sorted({row["length"] for row in report["rows"]}))
        axis.grid(alpha=0.3)
        plain(axis.yaxis)
    axes[0, 0].set_ylabel("ms a step")
    axes[0, -1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, out)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bench.backbones",
        description="Train five sequence policies, and time them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--backbone", default=",".join(BACKBONES), help="comma-separated")
    p.add_argument("--length", help="comma-separated (60,120,180; without a GPU 16,32)")
    p.add_argument("--precision", default=",".join(PRECISIONS), help="comma-separated")
    p.add_argument("--steps", type=int, help="of training (100; without a GPU 10)")
    p.add_argument("--calls", type=int, default=20, help="timed calls of each pass")
    p.add_argument(
        "--jobs", type=int, default=1, help="processes that compile; they measure in turn"
    )
    p.add_argument("--commit", default="", help="what to call this tree, where git cannot tell")
    p.add_argument("--out", type=Path, help="JSON file (bench/results/<device>-backbones.json)")
    p.add_argument("--table", type=Path, default=DOCUMENT, help="the document")
    p.add_argument("--picture", type=Path, default=PICTURE, help="the plot, an SVG")
    args = p.parse_args(argv)
    if args.jobs > 1:  # before JAX takes hold of the device: they share its memory
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu = timing.on_gpu()
    s = Sizes() if gpu else Sizes(batch=4, embed=32, hidden=64)
    lengths = [int(word) for word in (args.length or ("60,120,180" if gpu else "16,32")).split(",")]
    steps = args.steps or (100 if gpu else 10)
    implementations = ("xla", OURS) if gpu else ("xla",)
    jobs = [
        Job(*job)
        for job in itertools.product(
            args.backbone.split(","), args.precision.split(","), implementations, lengths
        )
    ]
    where = machine(args.commit)
    clock = "device time (CUPTI)" if gpu else "WALL-CLOCK TIME ON A CPU: no kernel runs here"
    report: dict[str, Any] = {**where, "clock": clock, "sizes": dataclasses.asdict(s)}
    report |= {"steps": steps, "calls": args.calls, "failed": [], "rows": []}
    device = str(where["device"]).lower().replace(" ", "-")
    out = args.out or RESULTS / f"{device}-backbones.json"
    found: dict[Job, Any] = {}
    for share in _spread(jobs, args.jobs, s, steps, args.calls):
        found |= share
        rows = [(job, found.get(job, "the run was stopped")) for job in jobs]
        report["rows"] = [row for _, row in rows if isinstance(row, dict)]
        report["failed"] = [f"{job}: {row}" for job, row in rows if isinstance(row, str)]
        out.write_text(json.dumps(report, indent=1) + "\n")  # a run that is stopped keeps its rows
    args.table.write_text(text(report))
    plot(report, args.picture)
    print(args.table.read_text())
    print(f"wrote {out}, {args.table} and {args.picture}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
