"""Runs the cases, forward and backward, for each implementation, and writes table and JSON.

Of a row `us`, `us_low` and `us_high` are device time in microseconds per call on a GPU, wall-clock
time elsewhere; `gb_s` and `percent` (of the copy bandwidth measured in the same run) count each
array of the pass once, `tflop_s` and `percent_products` (of a large product's rate in the same run)
the operations of its products (0 where those do not count). `compile_s` is lowering and
compilation, and `first_call_s` the wall-clock time of the first call after it; `temp_bytes` is what
the program needs beside its arguments and results; `kernels` tells how often a call launches each.
For PyTorch's the first two of these are 0, and the third, by its allocator, but for ``"both"``.
"""

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxkern
from bench import peers, program, timing
from bench.cases import MODELS
from bench.cases.optim import Step
from bench.cases.peers import Arranged
from bench.figures import WITHOUT_TMA, write_csv
from bench.measured import Case, cases, measure_step
from bench.program import Row
from jaxkern.core import target

IMPLEMENTATIONS = {"mosaic": "mosaic", "xla": "xla", "auto": None, WITHOUT_TMA: "mosaic"}
"""Implementations of jaxkern, by the argument of the op."""


class Job(NamedTuple):
    """A case to time, by its index, with an implementation and a number of calls."""

    index: int
    case: str
    implementation: str
    ceilings: timing.Ceilings
    calls: int

    def __str__(self) -> str:
        return f"{self.case}{self.implementation}"


def measure(job: Job) -> list[Row]:
    """The rows of a case by an implementation."""
    case, name = cases(small=not timing.on_gpu())[job.index], job.implementation
    gpu = target.of_process()
    older = dataclasses.replace(gpu, tma=False) if gpu and name == WITHOUT_TMA else None
    try:
        if isinstance(case, Step):
            measure = peers.measure_torch_step if peers.is_torch(name) else measure_step
            passes = measure(case, name, job.calls)
        elif name in IMPLEMENTATIONS:
            call: Any = functools.partial(case.call, implementation=IMPLEMENTATIONS[name])
            with jaxkern.lowering_for(older) if older else contextlib.nullcontext():
                passes = peers.measure_jax(case, Arranged(call), job.calls)
        else:
            measure = peers.measure_torch if peers.is_torch(name) else peers.measure_jax
            passes = measure(case, peers.arranged(case, name), job.calls)
        return [_row(job, case, *of_pass) for of_pass in passes.items()]
    finally:
        jax.clear_caches()
        peers.forget()
        gc.collect()


def _row(job: Job, case: Case | Step, direction: str, told: tuple[timing.Timing, Row]) -> Row:
    timed, rest = told
    nbytes, operations = case.costs.get(direction) or map(
        sum, zip(*case.costs.values(), strict=True)
    )
    rate, products = 1e3 * nbytes / timed.median, 1e3 * operations / timed.median
    us = zip(("us", "us_low", "us_high"), timed[:3], strict=True)
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "implementation": job.implementation,
        "direction": direction,
        **{name: round(ms * 1e3, 2) for name, ms in us},
        "calls": timed.calls,
        "gb_s": timing.short(rate / 1e9),
        "percent": timing.short(100 * rate / job.ceilings.copy),
        "tflop_s": timing.short(products * 1e-12),
        "percent_products": timing.short(100 * products / (job.ceilings.products or 1)),
        **dict.fromkeys(("compile_s", "first_call_s"), 0.0),
        "temp_bytes": 0,
        "kernels": dict(Counter(timed.kernels)),
    } | rest


_MOST = 4
"""The most tasks of one process: starting one takes long, and it keeps memory."""


@program.command(
    "<ops>",
    op=([str], "only this op"),
    shape=([str], "only this shape, as the table writes it"),
    model=([str], "only shapes of this model's ops", *MODELS),
    vs=(
        ",".join(["xla", *peers.installed()]),
        "whom to time beside mosaic, comma-separated: xla, peers that are installed, "
        f"{WITHOUT_TMA}: kernels of older GPUs on this one",
    ),
    calls=(30, "timed calls a measurement"),
    jobs=(1, "processes that compile, and time in turn; compile times are of no use then"),
    csv=(Path, "also write the timings here, comma-separated"),
)
def main(args: Any) -> int:
    program.share_device(args.jobs)
    gpu = timing.on_gpu()
    known = list(enumerate(cases(small=not gpu)))
    chosen = {
        index: case
        for index, case in known
        if (not args.op or case.op in args.op)
        and (not args.shape or case.shape in args.shape)
        and (not args.model or set(args.model) & set(getattr(case, "models", ())))
    }
    if args.model and not gpu:
        args.error("the shapes of a --model are for a GPU; leave it out")
    if not chosen:
        names = sorted({f"{case.op} {case.shape}" for _, case in known})
        args.error(f"no such case; there are: {', '.join(names)}")
    operations = (of for case in chosen.values() for _, of in case.costs.values())
    ceilings = timing.ceilings(any(operations))
    about = program.clock(gpu, "device time (CUPTI), cold L2")
    about["copy_gb_s"] = round(ceilings.copy / 1e9, 1)
    if ceilings.products:
        about["product_tflop_s"] = timing.short(ceilings.products * 1e-12)
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    print(
        f"JAX {jax.__version__}, {told}\n"
        f"{'op':24}{'shape':24}{'dtype':10}{'pass':10}{'runs':8}{'us':>10}{'±':>8}{'% copy':>8}"
        f"{'TFLOP/s':>9}{'% max':>6}{'temp MB':>9}{'compile s':>11}{'first ms':>10}",
        flush=True,
    )
    jobs = [
        Job(index, f"{case.op:24}{case.shape:24}{case.dtype:10}", name, ceilings, args.calls)
        for index, case in chosen.items()
        for name in (*["mosaic"] * gpu, *filter(None, args.vs.split(",")))
        if _is_timed(case, name)
    ]

    def end(report: Row) -> list[str]:
        if args.csv:
            write_csv(report["rows"], args.csv)
        return [f"wrote {args.csv}"] if args.csv else []

    args.result = "-".join(sorted({case.op for case in chosen.values()}))
    how = {"jobs": args.jobs, "most": _MOST, "end": end}
    return program.measured(args, measure, jobs, about, _line, **how)


def _is_timed(case: Case | Step, name: str) -> bool:
    """Whether a name of ``--vs`` is of this case: not where it has something else to offer."""
    if name == "xla":  # which has logits only whole
        return isinstance(case, Step) or "memory" not in {**case.of.options, **case.at.options}
    return name not in peers.installed() or peers.has(case, name)


def _line(job: Job, row: Row) -> str:
    rates = (row["tflop_s"], row["percent_products"]) if row["tflop_s"] else ("", "")
    return (
        f"{job.case}{row['direction']:10}{job.implementation:8}{row['us']:10.1f}"
        f"{(row['us_high'] - row['us_low']) / 2:8.1f}{row['percent']:8.1f}{rates[0]:>9.4}"
        f"{rates[1]:>6.3}{row['temp_bytes'] / 1e6:9.0f}{row['compile_s']:11.1f}"
        f"{row['first_call_s'] * 1e3:10.1f}"
    )
