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
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from bench import peers, processes, program, steps, timing
from bench.cases import MODELS
from bench.cases.optim import Step
from bench.cases.peers import Arranged
from bench.figures import WITHOUT_TMA, write_csv
from bench.measured import Case, bytes_of, cases, floating
from bench.program import Row
from jaxkern.core import target

IMPLEMENTATIONS = {"mosaic": "mosaic", "xla": "xla", "auto": None, WITHOUT_TMA: "mosaic"}
"""Implementations of jaxkern, by the argument of the op."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A case to time, by its index, with an implementation and a number of calls."""

    index: int
    case: str
    implementation: str
    ceilings: timing.Ceilings
    calls: int

    def __str__(self) -> str:
        return f"{self.case}{self.implementation}"


class _Program:
    """A function compiled for arguments of some shapes."""

    def __init__(self, f: Callable[..., Any], *shapes: Any):
        start = time.perf_counter()
        self.run = timing.compiled(f, *shapes)
        self.compile_s = time.perf_counter() - start

    def row(self, told: Callable[..., Row], direction: str, sets: Any, calls: int) -> Row:
        """The figures of its time, and of the first call by itself."""
        start = time.perf_counter()
        jax.block_until_ready(self.run(*sets[0]))
        first = time.perf_counter() - start
        return told(direction, timing.measure(self.run, sets, calls)) | {
            "compile_s": round(self.compile_s, 2),
            "first_call_s": _short(first),
            "temp_bytes": getattr(self.run.memory_analysis(), "temp_size_in_bytes", 0),
        }


def measure_case(
    case: Case, implementation: str, ceilings: timing.Ceilings, calls: int
) -> list[Row]:
    """The forward, the backward from what the forward saves, and both in one program."""
    if implementation in IMPLEMENTATIONS:
        how: Any = IMPLEMENTATIONS[implementation]
        of = Arranged(functools.partial(case.call, implementation=how))
    else:
        of = peers.arranged(case, implementation)

    def save(arrays: Any) -> Any:
        return jax.vjp(of.call, *arrays)

    def both(arrays: Any, dout: Any) -> Any:
        out, vjp = save(arrays)
        # A loss ends what is differentiated: nothing is multiplied by 1.
        return out, floating(vjp(jnp.ones_like(out) if case.scalar else dout))

    def differ(got: Any, want: Any) -> Any:
        got = (of.give(got[0]), of.back(*got[1])) if case.scalar else of.give(got)
        return _error(got, want)

    key = jax.random.key(0)
    given = jax.eval_shape(case.arrays, key)
    shapes = tuple(jax.eval_shape(of.take, *given))
    out = jax.eval_shape(of.call, *shapes)
    keys = jax.random.split(key, timing.sets_needed(bytes_of((shapes, out))))
    normal = lambda key: jax.tree.map(lambda o: jax.random.normal(key, o.shape, o.dtype), out)
    of_both = of_save = of_backward = None
    with processes.compiling(), _lowering(implementation):
        of_call, of_plain = _Program(of.call, *shapes), _Program(case.plain, *given).run
        make, cotangent = _Program(case.arrays, key).run, _Program(normal, key).run
        if case.differentiated:
            of_both = _Program(both, shapes, out)
            if "backward" in case.of.passes:
                vjp = jax.eval_shape(save, shapes)[1]
                of_save = _Program(save, shapes).run
                of_backward = _Program(lambda vjp, dout: vjp(dout), vjp, out)
        told = jax.eval_shape(both, shapes, out) if case.scalar else out
        compare = _Program(differ, told, jax.eval_shape(case.plain, *given)).run
    row = functools.partial(_row, case, implementation, ceilings)
    with processes.alone():
        sets = [tuple(of.take(*make(k))) for k in keys]
        with_dout = [(arrays, cotangent(k)) for arrays, k in zip(sets, keys, strict=True)]
        got = of_both.run(*with_dout[0]) if case.scalar and of_both else of_call.run(*sets[0])
        timing.agrees(f"{case.op} {case.shape}", compare(got, of_plain(*make(keys[0]))))
        del got
        rows = [of_call.row(row, "forward", sets, calls)]
        if of_both:
            rows.append(of_both.row(row, "both", with_dout, calls))
        if of_save and of_backward:
            saved = [(of_save(arrays)[1], dout) for arrays, dout in with_dout]
            del sets, with_dout
            rows.append(of_backward.row(row, "backward", saved, calls))
    return rows


def _lowering(implementation: str) -> contextlib.AbstractContextManager[Any]:
    gpu = target.of_process()
    if implementation != WITHOUT_TMA or gpu is None:
        return contextlib.nullcontext()
    return jaxkern.lowering_for(dataclasses.replace(gpu, tma=False))


def measure(job: Job) -> list[Row]:
    """The rows of a case by an implementation."""
    case, name = cases(small=not timing.on_gpu())[job.index], job.implementation
    row = functools.partial(_row, case, name, job.ceilings)
    try:
        if isinstance(case, Step):
            if peers.is_torch(name):
                return [row("step", peers.measure_torch_step(case, job.calls))]
            timed, seconds, temp_bytes = steps.measure(case, name, job.calls)
            told = {"compile_s": round(seconds, 2), "temp_bytes": temp_bytes}
            return [row("step", timed) | told]
        if peers.is_torch(name):
            compare = jax.jit(functools.partial(_error, drawn=case.of.drawn))
            what = f"{case.op} {case.shape}"
            check = lambda got, want: timing.agrees(what, compare(got, want))
            times = peers.measure_torch(case, name, job.calls, check)
            return [row(d, timed) | {"temp_bytes": b} for d, (timed, b) in times.items()]
        return measure_case(case, name, job.ceilings, job.calls)
    finally:
        jax.clear_caches()
        peers.forget()
        gc.collect()


def _short(value: float) -> float:
    """`value` to four digits, however small it is on a slow or busy machine."""
    return float(f"{value:.4g}")


def _row(
    case: Case | Step,
    implementation: str,
    ceilings: timing.Ceilings,
    direction: str,
    timed: timing.Timing,
) -> Row:
    costs = case.costs
    nbytes, operations = costs.get(direction) or map(sum, zip(*costs.values(), strict=True))
    rate, products = 1e3 * nbytes / timed.median, 1e3 * operations / timed.median
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "implementation": implementation,
        "direction": direction,
        "us": round(timed.median * 1e3, 2),
        "us_low": round(timed.low * 1e3, 2),
        "us_high": round(timed.high * 1e3, 2),
        "calls": timed.calls,
        "gb_s": _short(rate / 1e9),
        "percent": _short(100 * rate / ceilings.copy),
        "tflop_s": _short(products * 1e-12),
        "percent_products": _short(100 * products / ceilings.products) if products else 0.0,
        "compile_s": 0.0,
        "first_call_s": 0.0,
        "temp_bytes": 0,
        "kernels": dict(Counter(timed.kernels)),
    }


def _error(got: Any, want: Any, drawn: bool = False) -> jax.Array:
    """The largest relative error of several results; if they are `drawn` apart, of their norms.

    That of a scalar counts a hundredfold: a mean of many rows has little of each one's rounding.
    """
    errors = []
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        weight = 100 if w.ndim == 0 else 1
        norms = (jnp.linalg.norm(v.astype(jnp.float32)) for v in (g, w))
        errors.append(weight * (timing.error(*norms) if drawn else timing.error(g, w)))
    return jnp.max(jnp.stack(errors))


_MOST = 4
"""The most tasks of one process: starting one takes long, and it keeps memory."""


def main(argv: list[str] | None = None) -> int:
    args = program.parsed(
        "run",
        argv,
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
    ceilings = timing.Ceilings.measured(any(operations))
    about = program.clock(gpu, "device time (CUPTI), cold L2")
    about["copy_gb_s"] = round(ceilings.copy / 1e9, 1)
    if ceilings.products:
        about["product_tflop_s"] = _short(ceilings.products * 1e-12)
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

    ops = "-".join(sorted({case.op for case in chosen.values()}))
    how = {"jobs": args.jobs, "most": _MOST, "end": end}
    return program.measured(args, ops, measure, jobs, about, _line, **how)


def _is_timed(case: Case | Step, name: str) -> bool:
    """Whether a name of ``--vs`` is of this case: not where it has something else to offer."""
    if name == "xla":
        return isinstance(case, Step) or case.of_plain_jax
    return name not in peers.installed() or peers.has(case, name)


def _line(job: Job, row: Row) -> str:
    rates = (row["tflop_s"], row["percent_products"]) if row["tflop_s"] else ("", "")
    return (
        f"{job.case}{row['direction']:10}{job.implementation:8}{row['us']:10.1f}"
        f"{(row['us_high'] - row['us_low']) / 2:8.1f}{row['percent']:8.1f}{rates[0]:>9.4}"
        f"{rates[1]:>6.3}{row['temp_bytes'] / 1e6:9.0f}{row['compile_s']:11.1f}"
        f"{row['first_call_s'] * 1e3:10.1f}"
    )
