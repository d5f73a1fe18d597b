"""Sequence policies side by side: ``python -m bench backbones`` trains five backbones.

They and their task are in `bench.policies`; the loss is the cross-entropy, the optimizer Adam.

Every backbone runs on plain JAX (``xla``) and with this library's kernels (``mosaic``): the norm,
the MLP's gate, the Mamba block. Times are of one call, on a GPU the sum of the durations of its
kernels, whether or not the arguments are in the cache: of the loss (forward) and of loss and
gradients in one program; backward is the difference, and a step is that program and Adam's update.
`wall_us` is the time of a step in the training loop, where it is one program, with its launches.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench import pictures, program, timing
from bench.policies import BACKBONES, Params, Sizes, draw, init, logits
from bench.processes import device, each
from bench.program import FOLDER
from bench.program import RESULTS as RESULTS
from bench.report import NAMES, OURS, table
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
            return program.first_line(e)


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


def _attempt(job: Job, s: Sizes, steps: int, calls: int) -> dict[str, Any] | str:
    """The row of a job, or why there is none."""
    with device().compiling():
        programs = job.programs(s)
    if isinstance(programs, str):
        return programs
    try:
        with device():
            row = measure(job, programs, steps, calls)
    except RuntimeError as e:
        return program.first_line(e)
    print(f"{job}: {row['step_us']:,.0f} µs a step", file=sys.stderr, flush=True)
    return row


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
        "Generated by `python -m bench backbones`; do not edit.",
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
    found = {row["precision"] for row in report["rows"]}
    drawn = [p for p in PRECISIONS if p in found]
    figure, axes = pictures.pyplot().subplots(
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
        pictures.plain(axis.yaxis)
    axes[0, 0].set_ylabel("ms a step")
    axes[0, -1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    pictures.save(figure, out)


def main(argv: Sequence[str] | None = None) -> int:
    p = program.parser("backbones", "backbones")
    p.add_argument("--backbone", default=",".join(BACKBONES), help="comma-separated")
    p.add_argument("--length", help="comma-separated (60,120,180; without a GPU 16,32)")
    p.add_argument("--precision", default=",".join(PRECISIONS), help="comma-separated")
    p.add_argument("--steps", type=int, help="of training (100; without a GPU 10)")
    p.add_argument("--calls", type=int, default=20, help="timed calls of each pass")
    p.add_argument(
        "--jobs", type=int, default=1, help="processes that compile; they measure in turn"
    )
    p.add_argument("--table", type=Path, default=DOCUMENT, help="the document")
    p.add_argument("--picture", type=Path, default=PICTURE, help="the plot, an SVG")
    args = p.parse_args(argv)
    program.share_device(args.jobs)
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
    clock = program.clock(gpu, "device time (CUPTI)")
    report = program.machine(args.commit) | {"clock": clock, "sizes": dataclasses.asdict(s)}
    report |= {"steps": steps, "calls": args.calls, "failed": [], "rows": []}
    out, found = args.out, dict.fromkeys(jobs, "the run was stopped")
    tasks = [(job, s, steps, args.calls) for job in jobs]
    for task, result in each(_attempt, tasks, args.jobs):
        found[task[0]] = result
        report["rows"] = [row for row in found.values() if isinstance(row, dict)]
        report["failed"] = [f"{job}: {row}" for job, row in found.items() if isinstance(row, str)]
        out = program.write(report, args.out, "backbones")  # a run that is stopped keeps its rows
    args.table.write_text(text(report))
    plot(report, args.picture)
    print(args.table.read_text())
    print(f"wrote {out}, {args.table} and {args.picture}")
    return 1 if report["failed"] else 0
