"""Errors in ulp against float64: ``python -m bench accuracy``; ``report`` writes accuracy.md.

Each op runs on random arguments in each dtype, forward and backward: by the kernels, by this
library's plain JAX (``implementation="xla"``), and as the plain expression that a user would write,
computed in that dtype (with XLA free, as it is by default, to keep more precision inside a fusion).
The truth is the same expression of the same arguments in float64.

An ulp is the distance between neighbouring numbers of the result's dtype at the true value, or at
the root mean square of the true array where that is larger: a value near zero, a rest of terms that
cancel, tells no more than the others. A correctly rounded result has errors of at most 0.5. Without
a GPU ``--interpret`` runs the kernels. An op without kernels for a case chooses by itself.
"""

import collections
import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import program
from bench.cases import TABLE
from bench.cases.case import Case, dtypes, result_and_gradients, truth
from bench.figures import NAMES, OURS, pivot
from bench.program import Row
from jaxkern.core.dispatch import interpret_kernels

DTYPES = ("float32", "bfloat16", "float16")
EXPRESSION = "expression"
IMPLEMENTATIONS = (OURS, "xla", EXPRESSION)


def subjects(small: bool) -> dict[str, tuple[Case, dict[str, int]]]:
    """The cases whose errors are measured and the sizes, by name; `small` ones without a GPU."""
    return {
        case.name: (case, case.sizes(sizes))
        for case in TABLE
        if case.errors and (sizes := case.errors.small if small else case.errors.sizes)
    }


def ulps(got: Any, want: np.ndarray) -> np.ndarray:
    """Errors of `got` in ulps of its dtype, as the module's docstring defines them."""
    kind = jnp.finfo(got.dtype)
    size = np.maximum(np.abs(want), np.sqrt(np.mean(want * want)))
    _, exponent = np.frexp(np.maximum(size, float(kind.tiny)))  # size in [½, 1) · 2^exponent
    errors = np.abs(np.asarray(got).astype(np.float64) - want)
    return np.where(np.isfinite(errors), errors, np.inf) * 2.0 ** (kind.nmant + 1 - exponent)


@functools.lru_cache(maxsize=1)
def _given(op: str, dtype: str) -> tuple[Any, Any, list[np.ndarray]]:
    """The arguments, all of `dtype`, the gradient of the result, and the truth."""
    case, sizes = subjects(jax.default_backend() != "gpu")[op]
    assert case.expression is not None
    key = jax.random.key(3)
    arrays = case.arrays(key, sizes, dtypes(dtype))
    shape = jax.eval_shape(case.expression, *arrays)
    dout = jax.random.normal(jax.random.fold_in(key, 2), shape.shape).astype(shape.dtype)
    return arrays, dout, truth(case, arrays, dout)


def measure(job: str) -> list[Row]:
    """A row for the result and each gradient, or one that says why it is ``refused``.

    Args:
      job: name of a case, dtype, and one of :data:`IMPLEMENTATIONS`: ``"gelu, erf, float32, xla"``.
    """
    op, dtype, name = job.rsplit(", ", 2)
    case, _ = subjects(jax.default_backend() != "gpu")[op]
    arrays, dout, want = _given(op, dtype)
    by_us: Any = functools.partial(case.call, implementation=name)
    f: Any = case.expression if name == EXPRESSION else by_us
    try:
        got = jax.jit(functools.partial(result_and_gradients, f))(arrays, dout)
    except NotImplementedError as error:
        reason = str(error).partition("\n")[0]
        return [{"refused": f"{op} {dtype}, {NAMES.get(name, name)}: {reason}"}]
    labels = ["out", *(f"d{argument}" for argument in case.names)]
    every = zip(labels, got, want, strict=True)
    results = [given for given in every if given[1].dtype != jax.dtypes.float0]  # of integers
    bound, rows = case.errors and case.errors.bound, []
    for label, g, w in results[:1] if bound else results:
        errors = ulps(g, w)
        row = {"op": op, "dtype": dtype, "array": label, "of": str(g.dtype), "implementation": name}
        told = {"max_ulp": errors.max(), "mean_ulp": errors.mean()}
        if bound:
            within = np.abs(np.asarray(g).astype(np.float64) - w) <= bound[0] * np.abs(w) + bound[1]
            told["beyond"] = np.mean(~within)
        rows.append(row | {key: float(f"{value:.4g}") for key, value in told.items()})
    return rows


def text(report: Row) -> str:
    """The ledger's table, its origin, and what was not computed."""
    keys, by = ("op", "array", "dtype"), collections.defaultdict(dict)
    for row in report["rows"]:
        by[tuple(row[key] for key in keys)][row["implementation"]] = row

    def told(row: Row) -> str:
        found = by[tuple(row[key] for key in keys)]
        marked = row is next(found[n] for n in IMPLEMENTATIONS if n in found) and _worse(found)
        return _cell(row) + (" ▼" if marked else "")

    names = {n: NAMES.get(n, n) for n in IMPLEMENTATIONS if any(n in of for of in by.values())}
    origin = ", ".join(f"{key} {report[key]}" for key in ("device", "jax", "commit", "date"))
    parts = [
        f"{origin}; {report['clock']}.",
        pivot(report["rows"], keys, "implementation", told, names),
        *(f"Not computed: {line}" for line in report["refused"]),
        *(f"Failed: {line}" for line in report["failed"]),
    ]
    return "\n\n".join(parts)


def _worse(found: dict[str, Row]) -> bool:
    ours = next(found[n] for n in IMPLEMENTATIONS if n in found)
    return EXPRESSION in found and ours["mean_ulp"] > 2 * found[EXPRESSION]["mean_ulp"]


def _cell(row: Row) -> str:
    beyond = f", {100 * row['beyond']:.2g}%" if "beyond" in row else ""
    return f"{row['max_ulp']:.3g} ({row['mean_ulp']:.2g}){beyond}"


@program.command(
    "accuracy",
    op=([str], "only this op"),
    dtype=(",".join(DTYPES), "comma-separated"),
    interpret=(False, "run the kernels without a GPU, slowly"),
    jobs=(1, "processes"),
)
def main(args: Any) -> int:
    program.share_device(args.jobs)
    gpu = jax.default_backend() == "gpu"
    known = [*subjects(small=not gpu)]
    chosen = [op for op in known if not args.op or op in args.op]
    if not chosen:
        args.error(f"no such op; there are: {'; '.join(known)}")
    names = IMPLEMENTATIONS if gpu or args.interpret else IMPLEMENTATIONS[1:]
    clock = "KERNELS IN THE INTERPRETER ON A CPU" if args.interpret else "PLAIN JAX ON A CPU"
    # The last ops take longest to compile, and begin.
    tasks = [
        f"{op}, {d}, {name}" for op in chosen[::-1] for d in args.dtype.split(",") for name in names
    ]
    place = lambda row: (known.index(row["op"]), DTYPES.index(row["dtype"]))

    def finish(rows: list[Row]) -> Row:
        found = sorted((row for row in rows if "refused" not in row), key=place)
        return {"refused": [row["refused"] for row in rows if "refused" in row], "rows": found}

    told = lambda job, row: row.get("refused") or f"{job}, {row['array']}: {_cell(row)}"
    interpret = args.interpret and not gpu
    with interpret_kernels() if interpret else contextlib.nullcontext():
        return program.measured(
            args,
            measure,
            tasks,
            {"clock": "compiled kernels" if gpu else clock, "refused": []},
            told,
            finish,
            lambda report: [text(report)],
            jobs=1 if interpret else args.jobs,
        )
