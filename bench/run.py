"""Runs the cases, forward and backward, for each implementation, and writes table and JSON."""

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import peers, program, steps, timing
from bench.cases import MODELS
from bench.cases.optim import Step
from bench.cases.peers import Arranged
from bench.figures import write_csv
from bench.measured import Case, bytes_of, cases, floating
from bench.processes import device, each

IMPLEMENTATIONS = ("mosaic", "xla", "auto")
"""Of jaxkern; ``"auto"`` is what ``None`` picks."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a pass of an op, or an optimizer's step, at a shape by an implementation.

    Times are device time in microseconds per call on a GPU, wall-clock time elsewhere; `gb_s` and
    `percent` (of the copy bandwidth measured in the same run) count each array of the pass once,
    `tflop_s` and `percent_products` (of a large product's rate in the same run) the operations of
    its products (0 where those do not count). `compile_s` is lowering and compilation, and
    `first_call_s` the wall-clock time of the first call after it; `temp_bytes` is what the program
    needs beside its arguments and results; `kernels` tells how often a call launches each. For
    PyTorch's the first two of these are 0, and the third, by its allocator, but for ``"both"``.
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
    tflop_s: float
    percent_products: float
    compile_s: float
    first_call_s: float
    temp_bytes: int
    kernels: dict[str, int]


class _Program:
    """A function compiled for arguments of some shapes."""

    def __init__(self, f: Callable[..., Any], *shapes: Any):
        start = time.perf_counter()
        self.run = jax.jit(f).lower(*shapes).compile()
        self.compile_s = time.perf_counter() - start
        self.first_call_s: float | None = None

    def __call__(self, *args: Any) -> Any:
        """Runs it; the first time alone is measured."""
        start = time.perf_counter()
        out = self.run(*args)
        if self.first_call_s is None:
            jax.block_until_ready(out)
            self.first_call_s = time.perf_counter() - start
        return out


def measure_case(
    case: Case, implementation: str, ceilings: timing.Ceilings, calls: int
) -> list[Row]:
    """The forward, the backward from what the forward saves, and both in one program."""

    how: Any = None if implementation == "auto" else implementation
    of = Arranged(functools.partial(case.call, implementation=how))
    if implementation not in IMPLEMENTATIONS:
        of = peers.arranged(case, implementation)

    def save(arrays: Any) -> Any:
        return jax.vjp(of.call, *arrays)

    def both(arrays: Any, dout: Any) -> Any:
        out, vjp = save(arrays)
        # A loss ends what is differentiated: nothing is multiplied by 1.
        return out, floating(vjp(jnp.ones_like(out) if case.scalar else dout))

    def backward(vjp: Any, dout: Any) -> Any:
        return vjp(dout)

    def differ(got: Any, want: Any) -> Any:
        if case.scalar:
            return _error((of.give(got[0]), of.back(*got[1])), want)
        return _error(of.give(got), want)

    def row(direction: str, program: _Program, sets: list[tuple[Any, ...]]) -> Row:
        program(*sets[0])
        timed = timing.measure(program.run, sets, calls)
        return dataclasses.replace(
            _row(case, implementation, direction, timed, ceilings),
            compile_s=round(program.compile_s, 2),
            first_call_s=_short(program.first_call_s or 0.0),
            temp_bytes=getattr(program.run.memory_analysis(), "temp_size_in_bytes", 0),
        )

    key = jax.random.key(0)
    given = jax.eval_shape(case.arrays, key)
    shapes = tuple(jax.eval_shape(of.take, *given))
    out = jax.eval_shape(of.call, *shapes)
    keys = jax.random.split(key, timing.sets_needed(bytes_of((shapes, out))))
    normal = lambda key: jax.tree.map(lambda o: jax.random.normal(key, o.shape, o.dtype), out)
    of_backward = of_save = None
    with device().compiling():
        of_call, of_plain = _Program(of.call, *shapes), _Program(case.plain, *given)
        make = _Program(case.arrays, key).run
        if case.differentiated:
            of_both, cotangent = _Program(both, shapes, out), _Program(normal, key).run
            if "backward" in case.of.passes:
                _, vjp = jax.eval_shape(save, shapes)
                of_save, of_backward = _Program(save, shapes), _Program(backward, vjp, out)
        told = jax.eval_shape(both, shapes, out) if case.scalar else out
        compare = _Program(differ, told, jax.eval_shape(case.plain, *given)).run
    with device():
        sets = [tuple(of.take(*make(k))) for k in keys]
        douts = [cotangent(k) for k in keys] if case.differentiated else []
        got = of_both(sets[0], douts[0]) if case.scalar else of_call(*sets[0])
        _check(case, compare(got, of_plain.run(*make(keys[0]))))
        del got
        rows = [row("forward", of_call, sets)]
        if not case.differentiated:
            return rows
        with_dout = list(zip(sets, douts, strict=True))
        rows.append(row("both", of_both, with_dout))
        if of_save and of_backward:
            saved = [(of_save.run(arrays)[1], dout) for arrays, dout in with_dout]
            del sets, with_dout
            rows.append(row("backward", of_backward, saved))
    return rows


def measure_step(step: Step, implementation: str, ceilings: timing.Ceilings, calls: int) -> Row:
    """A step of an optimizer."""
    if peers.is_torch(implementation):
        timed = peers.measure_torch_step(step, calls, device())
        return _row(step, implementation, "step", timed, ceilings)
    timed, seconds, temp_bytes = steps.measure(step, implementation, calls, device())
    row = _row(step, implementation, "step", timed, ceilings)
    return dataclasses.replace(row, compile_s=round(seconds, 2), temp_bytes=temp_bytes)


def _short(value: float) -> float:
    """`value` to four digits, however small it is on a slow or busy machine."""
    return float(f"{value:.4g}")


def _row(
    case: Case | Step,
    implementation: str,
    direction: str,
    timed: timing.Timing,
    ceilings: timing.Ceilings,
) -> Row:
    costs = case.costs
    nbytes, operations = costs.get(direction) or map(sum, zip(*costs.values(), strict=True))
    rate, products = 1e3 * nbytes / timed.median, 1e3 * operations / timed.median
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
        gb_s=_short(rate / 1e9),
        percent=_short(100 * rate / ceilings.copy),
        tflop_s=_short(products * 1e-12),
        percent_products=_short(100 * products / ceilings.products) if products else 0.0,
        compile_s=0.0,
        first_call_s=0.0,
        temp_bytes=0,
        kernels=dict(Counter(timed.kernels)),
    )


def _error(got: Any, want: Any, drawn: bool = False) -> jax.Array:
    """The largest relative error of several results; if they are `drawn` apart, of their norms.

    That of a scalar counts a hundredfold: a mean of many rows has little of each one's rounding.
    """
    errors = []
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        weight = 100 if w.ndim == 0 else 1
        g, w = (jnp.linalg.norm(g), jnp.linalg.norm(w)) if drawn else (g, w)
        errors.append(weight * jnp.linalg.norm(g - w) / jnp.linalg.norm(w))
    return jnp.max(jnp.stack(errors))


def _check(case: Case, error: Any) -> None:
    """No speed from a wrong result: the first call must agree with plain JAX."""
    if not float(error) < 1e-2:
        what = f"{case.op} {case.shape}"
        raise RuntimeError(f"{what}: relative error {float(error):.1e} against plain JAX")


def _attempt(
    index: int, implementation: str, ceilings: timing.Ceilings, calls: int
) -> list[Row] | str:
    """The rows of a case, or why there are none."""
    case = cases(small=not timing.on_gpu())[index]
    try:
        if isinstance(case, Step):
            return [measure_step(case, implementation, ceilings, calls)]
        if peers.is_torch(implementation):
            compare = jax.jit(functools.partial(_error, drawn=case.drawn))
            check = lambda got, want: _check(case, compare(got, want))
            times = peers.measure_torch(case, implementation, calls, device(), check)
            return [
                dataclasses.replace(
                    _row(case, implementation, direction, timed, ceilings), temp_bytes=temp_bytes
                )
                for direction, (timed, temp_bytes) in times.items()
            ]
        return measure_case(case, implementation, ceilings, calls)
    except Exception as e:  # a peer may raise anything, and the other cases go on
        if implementation in IMPLEMENTATIONS and not isinstance(
            e, RuntimeError | NotImplementedError
        ):
            raise
        return program.first_line(e)
    finally:
        jax.clear_caches()
        peers.forget()
        gc.collect()


_MOST = 4
"""The most tasks of one process: starting one takes long, and it keeps memory."""


def _parser() -> argparse.ArgumentParser:
    p = program.parser("run", "<ops>")
    others = [name for name in program.COMMANDS if name != "run"]
    p.epilog = f"Other commands: {', '.join(others)}; python -m bench COMMAND --help."
    p.add_argument("--op", action="append", help="only this op; repeat for more")
    p.add_argument("--shape", action="append", help="only this shape, as the table writes it")
    p.add_argument(
        "--model",
        action="append",
        choices=list(MODELS),
        help="only shapes of this model's ops; repeat for more",
    )
    p.add_argument(
        "--vs",
        default=",".join(["xla", *peers.installed()]),
        help="whom to time beside mosaic, comma-separated: xla and peers that are installed",
    )
    p.add_argument("--calls", type=int, default=30, help="timed calls a measurement")
    p.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes that compile; they time in turn, but their compile times are of no use",
    )
    p.add_argument("--csv", type=Path, help="also write the timings here, comma-separated")
    return p


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
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
        print("bench: error: the shapes of a --model are for a GPU; leave it out", file=sys.stderr)
        return 2
    if not chosen:
        names = ", ".join(sorted({f"{case.op} {case.shape}" for _, case in known}))
        print(f"bench: error: no such case; there are: {names}", file=sys.stderr)
        return 2
    ceilings = timing.Ceilings.measured(
        any(operations for case in chosen.values() for _, operations in case.costs.values())
    )
    report = _begun(args.commit, ceilings)
    names = ["mosaic"] * gpu + [v for v in args.vs.split(",") if v]
    tasks = [
        (index, name, ceilings, args.calls)
        for index, case in chosen.items()
        for name in names
        if _is_timed(case, name)
    ]
    ops = "-".join(sorted({case.op for case in chosen.values()}))
    out, failed, found = args.out, 0, {}
    for task, got in each(_attempt, tasks, args.jobs, most=_MOST):
        if isinstance(got, str):
            failed += 1
            print(_named(chosen[task[0]]) + f"{task[1]}: {got}", flush=True)
            continue
        found[tasks.index(task)] = got
        print(*map(_line, got), sep="\n", flush=True)
        rows = [dataclasses.asdict(row) for i in sorted(found) for row in found[i]]
        report["rows"] = rows
        out = program.write(report, args.out, ops)  # a run that is stopped keeps what it has
    if out is None or not found:
        return 1
    print(f"wrote {out}")
    if args.csv:
        write_csv(report["rows"], args.csv)
        print(f"wrote {args.csv}")
    return 1 if failed else 0


def _is_timed(case: Case | Step, name: str) -> bool:
    """Whether a name of ``--vs`` is of this case: not where it has something else to offer."""
    if name == "xla":
        return isinstance(case, Step) or case.of_plain_jax
    return name not in peers.installed() or peers.has(case, name)


def _begun(commit: str, ceilings: timing.Ceilings) -> dict[str, Any]:
    """A report without rows; prints where the figures come from, and the head of the table."""
    report = program.machine(commit) | {"copy_gb_s": round(ceilings.copy / 1e9, 1)}
    if ceilings.products:
        report["product_tflop_s"] = _short(ceilings.products * 1e-12)
    clock = program.clock(timing.on_gpu(), "device time (CUPTI), cold L2")
    products = f"products {ceilings.products * 1e-12:.1f} TFLOP/s, " if ceilings.products else ""
    print(
        f"{report['device']}, JAX {report['jax']}, copy {ceilings.copy / 1e9:.0f} GB/s, "
        f"{products}{clock}\n"
        f"{'op':24}{'shape':24}{'dtype':10}{'pass':10}{'runs':8}{'us':>10}{'±':>8}{'% copy':>8}"
        f"{'TFLOP/s':>9}{'% max':>6}{'temp MB':>9}{'compile s':>11}{'first ms':>10}",
        flush=True,
    )
    return report | {"clock": clock, "rows": []}


def _named(of: Case | Step | Row) -> str:
    return f"{of.op:24}{of.shape:24}{of.dtype:10}"


def _line(row: Row) -> str:
    spread = (row.us_high - row.us_low) / 2
    rates = (f"{row.tflop_s:.1f}", f"{row.percent_products:.1f}") if row.tflop_s else ("", "")
    return (
        f"{_named(row)}{row.direction:10}{row.implementation:8}{row.us:10.1f}{spread:8.1f}"
        f"{row.percent:8.1f}{rates[0]:>9}{rates[1]:>6}{row.temp_bytes / 1e6:9.0f}"
        f"{row.compile_s:11.1f}{row.first_call_s * 1e3:10.1f}"
    )
