"""Errors in ulp against float64: ``python -m bench accuracy`` writes JSON and a table.

Each op runs on random arguments in each dtype, forward and backward: by the kernels, by this
library's plain JAX (``implementation="xla"``), and as the plain expression that a user would write,
computed in that dtype (with XLA free, as it is by default, to keep more precision inside a fusion).
The truth is the same expression of the same arguments in float64.

An ulp is the distance between neighbouring numbers of the result's dtype at the true value; values
below the root mean square of the true array count in ulps of that, so that a value near zero, a
rest of terms that cancel, tells no more than the others. A correctly rounded result has errors of
at most 0.5. On a CPU there are no kernels; ``--interpret`` runs them in Pallas's interpreter.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import program
from bench.cases import TABLE
from bench.cases.case import Arrays, Case, dtypes, result_and_gradients, truth
from bench.figures import NAMES, OURS, table
from bench.processes import Failed, each
from bench.program import FOLDER
from bench.program import RESULTS as RESULTS
from jaxkern.core.dispatch import interpret_kernels

DTYPES = ("float32", "bfloat16", "float16")
EXPRESSION = "expression"
IMPLEMENTATIONS = (OURS, "xla", EXPRESSION)
ACCURACY = FOLDER / "accuracy.md"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A case of the table at the sizes at which its errors are measured."""

    case: Case
    sizes: dict[str, int]
    bound: tuple[float, float] | None

    @property
    def name(self) -> str:
        return self.case.name

    def arrays(self, key: Any, dtype: str) -> Arrays:
        """The arguments, matrices and parameters too, in `dtype`."""
        return self.case.arrays(key, self.sizes, dtypes(dtype))


def subjects(small: bool) -> Sequence[Subject]:
    """The ops whose errors are measured; `small` ones for a machine without a GPU."""
    return [
        Subject(case, case.sizes(sizes), case.errors.bound)
        for case in TABLE
        if case.errors and (sizes := case.errors.small if small else case.errors.sizes)
    ]


def ulps(got: Any, want: np.ndarray) -> np.ndarray:
    """Errors of `got` in ulps of its dtype, as the module's docstring defines them."""
    kind = jnp.finfo(got.dtype)
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want * want)))
    _, exponent = np.frexp(np.maximum(size, float(kind.tiny)))  # size in [½, 1) · 2^exponent
    errors = np.abs(np.asarray(got).astype(np.float64) - want)
    return np.where(np.isfinite(errors), errors, np.inf) * 2.0 ** (kind.nmant + 1 - exponent)


def _beyond(got: Any, want: np.ndarray, bound: tuple[float, float]) -> float:
    relative, absolute = bound
    errors = np.abs(np.asarray(got).astype(np.float64) - want)
    return float(np.mean(~(errors <= relative * np.abs(want) + absolute)))


@functools.cache
def _both(f: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients, compiled."""
    return jax.jit(functools.partial(result_and_gradients, f))


def measure(
    op: str, dtype: str, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """A row for the result and each gradient of `op` by each implementation.

    Besides, who refused to compute it, and who failed, a line each with the reason.
    """
    small = jax.default_backend() != "gpu"
    (subject,) = (s for s in subjects(small) if s.name == op)
    case = subject.case
    assert case.expression is not None
    key = jax.random.key(3)
    arrays = subject.arrays(key, dtype)
    shape = jax.eval_shape(case.expression, *arrays)
    dout = jax.random.normal(jax.random.fold_in(key, 2), shape.shape).astype(shape.dtype)
    want = truth(case, arrays, dout)
    rows, refused, failed = [], [], []
    for name in names:
        by_us = functools.partial(case.call, implementation=name)
        try:
            got = _both(case.expression if name == EXPRESSION else by_us)(arrays, dout)
        except (RuntimeError, NotImplementedError) as e:  # the others go on
            lines = refused if isinstance(e, NotImplementedError) else failed
            lines.append(f"{op} {dtype}, {NAMES.get(name, name)}: {str(e).partition('\n')[0]}")
            continue
        labels = ["out", *(f"d{argument}" for argument in case.names)]
        every = zip(labels, got, want, strict=True)
        results = [given for given in every if given[1].dtype != jax.dtypes.float0]  # of integers
        for label, g, w in results[:1] if subject.bound else results:
            errors = ulps(g, w)
            rows.append(
                {
                    "op": subject.name,
                    "dtype": dtype,
                    "array": label,
                    "of": str(g.dtype),
                    "implementation": name,
                    "max_ulp": float(f"{errors.max():.4g}"),
                    "mean_ulp": float(f"{errors.mean():.4g}"),
                }
            )
            if subject.bound:
                rows[-1]["beyond"] = float(f"{_beyond(g, w, subject.bound):.4g}")
    return rows, refused, failed


def text(report: dict[str, Any]) -> str:
    """The ledger as a document."""
    by: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in report["rows"]:
        by.setdefault((row["op"], row["array"], row["dtype"]), {})[row["implementation"]] = row
    present = [n for n in IMPLEMENTATIONS if any(n in found for found in by.values())]
    cells = []
    for key, found in by.items():
        mark = " ▼" if _worse(found) else ""
        cells.append([*key, *(_cell(found[n]) if n in found else "" for n in present)])
        cells[-1][3] += mark
    told = ", ".join(f"{key} {report[key]}" for key in ("device", "jax", "commit", "date"))
    head = ["op", "array", "dtype", *(NAMES.get(name, name) for name in present)]
    parts = [
        "# Errors in ulp against float64",
        "Generated by `python -m bench accuracy`; do not edit.",
        f"{told}; {report['clock']}.",
        "Largest error (mean error), in ulps of the array's dtype; values below the array's root "
        "mean square count in ulps of that. *plain JAX* is this library's, *expression* what a "
        "user would write, in the dtype of the arguments. ▼ marks where the "
        "first of the columns that is not empty has a mean error over twice that of the "
        "expression. A share in percent is that of errors beyond 1e-5 of the value plus 1e-4, the "
        "bound of quack's tests for PyTorch of its in-place product: fp32 sums that tensor cores, "
        "ours and cuBLAS's, do not add as fp32 would; of float32 arrays XLA's products are TF32 "
        "by default.",
        table(head, cells),
        *(f"Not computed: {line}" for line in report["refused"]),
        *(f"Failed: {line}" for line in report["failed"]),
    ]
    return "\n\n".join(parts) + "\n"


def _worse(found: dict[str, Any]) -> bool:
    ours = next(found[n] for n in IMPLEMENTATIONS if n in found)
    return EXPRESSION in found and ours["mean_ulp"] > 2 * found[EXPRESSION]["mean_ulp"]


def _cell(row: dict[str, Any]) -> str:
    beyond = f", {100 * row['beyond']:.2g}%" if "beyond" in row else ""
    return f"{row['max_ulp']:.3g} ({row['mean_ulp']:.2g}){beyond}"


def main(argv: list[str] | None = None) -> int:
    p = program.parser("accuracy", "accuracy")
    p.add_argument("--op", action="append", help="only this op; repeat for more")
    p.add_argument("--dtype", default=",".join(DTYPES), help="comma-separated")
    p.add_argument("--interpret", action="store_true", help="run the kernels without a GPU, slowly")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--table", type=Path, default=ACCURACY, help="the document")
    args = p.parse_args(argv)
    program.share_device(args.jobs)
    gpu = jax.default_backend() == "gpu"
    known = [s.name for s in subjects(small=not gpu)]
    chosen = [op for op in known if not args.op or op in args.op]
    if not chosen:
        print(f"bench.accuracy: error: no such op; there are: {'; '.join(known)}", file=sys.stderr)
        return 2
    names = IMPLEMENTATIONS if gpu or args.interpret else IMPLEMENTATIONS[1:]
    clock = "KERNELS IN THE INTERPRETER ON A CPU" if args.interpret else "PLAIN JAX ON A CPU"
    # The last ops take longest to compile, and begin.
    tasks = [(op, dtype, names) for op in chosen[::-1] for dtype in args.dtype.split(",")]
    interpret = args.interpret and not gpu
    rows, refused, failed = [], [], []
    with interpret_kernels() if interpret else contextlib.nullcontext():
        for (op, dtype, _), found in each(measure, tasks, 1 if interpret else args.jobs):
            print(f"{op}, {dtype}: measured", file=sys.stderr, flush=True)
            if isinstance(found, Failed):
                found = [], [], [f"{op} {dtype}: {found}"]
            for every, of_task in zip((rows, refused, failed), found, strict=True):
                every += of_task
    rows.sort(key=lambda row: (known.index(row["op"]), DTYPES.index(row["dtype"])))
    about = {"clock": "compiled kernels" if gpu else clock, "refused": refused, "failed": failed}
    report = program.machine(args.commit) | about | {"rows": rows}
    out = program.write(report, args.out, "accuracy")
    args.table.write_text(text(report))
    print(args.table.read_text())
    print(f"wrote {out} and {args.table}")
    return 1 if failed else 0
