"""Every measurement as tables: ``python -m bench report`` writes bench/report.md.

The report is made from bench/results/*.json and nothing else. A line of a table is an op's pass at
a shape, as one file has it; what other files of the same kind of GPU have of others is lent to it,
so that no competitor is missing beside a figure of ours.
"""

import csv
import dataclasses
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import program
from bench.program import FOLDER, RESULTS
from bench.titles import HEADS, TITLES

REPORT = FOLDER / "report.md"

OURS, CHOSEN = "mosaic", "auto"
NAMES = {
    CHOSEN: "jaxkern's choice",
    OURS: "jaxkern",
    "jaxkern-remat": "jaxkern, layers computed again",
    "jaxkern-cheap": "jaxkern, remat.CHEAP",
    "jaxkern-scan": "jaxkern, remat.SCAN",
    "jaxkern-loop": "jaxkern, layers in a loop",
    "xla": "plain JAX",
    "xla-loop": "plain JAX, layers in a loop",
    "optax": "optax",
    "update": "jaxkern's update",
    "tokamax": "tokamax",
    "jla": "jax-linear-attention",
    "jla-loop": "jax-linear-attention, layers in a loop",
    "jax": "JAX by hand",
    "compile": "torch.compile",
    "torch": "PyTorch",
    "liger": "Liger",
    "fla": "fla",
    "quack": "quack",
    "mamba_ssm": "mamba_ssm",
    "triton": "Triton",
}
"""Whom the tables know, in the order of their columns; others follow by name."""

Reports = Sequence[tuple[str, dict[str, Any]]]
"""Files of results, each with its name."""

OF_MEMORY = ("linear_cross_entropy",)
"""Ops that save memory, too: their tables have it beside the time."""

PLAIN = ("xla", "jax")
"""Plain JAX, which is beside the other libraries."""

STEADY = 0.1
"""A training step whose times differ by more than this part from their middle is left out."""

EVEN = 0.01
"""Times that differ by less than this part are even."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One implementation's figures; `temp_bytes` is 0 where nobody knows it."""

    us: float
    percent: float | None
    tflop_s: float
    percent_products: float | None
    temp_bytes: int


@dataclasses.dataclass(frozen=True)
class Line:
    """An op's pass at a shape: figures by implementation, and the files that they are from.

    All are of one kind of GPU, the `device`; those of `lent` are from another file than the first.
    """

    op: str
    shape: str
    dtype: str
    direction: str
    figures: dict[str, Measured]
    files: tuple[int, ...]
    device: str
    lent: frozenset[str] = frozenset()

    @property
    def own(self) -> Measured | None:
        """What a user gets: the choice of ``None`` where it was timed, else the kernels."""
        return self.figures.get(CHOSEN, self.figures.get(OURS))

    @property
    def others(self) -> dict[str, Measured]:
        return {name: m for name, m in self.figures.items() if name not in (OURS, CHOSEN)}

    @property
    def rival(self) -> str | None:
        """The fastest other library."""
        rivals = self.others.keys() - set(PLAIN)
        return min(rivals, key=lambda name: self.others[name].us, default=None)

    @property
    def speedup(self) -> float | None:
        """The fastest other's time over ours."""
        if self.own is None or not self.others:
            return None
        return min(m.us for m in self.others.values()) / self.own.us

    @property
    def verdict(self) -> str:
        ratio = self.speedup
        if ratio is None:
            return "alone"
        return "even" if abs(ratio - 1) < EVEN else "faster" if ratio > 1 else "slower"


def load(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """The reports in `folder` by name; what :mod:`bench.aot` compiled has not run, and is none."""
    paths = (path for path in sorted(folder.glob("*.json")) if not path.name.startswith("aot-"))
    return [(path.name, json.loads(path.read_text())) for path in paths]


def timings(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a report that time an op."""
    return (row for row in report["rows"] if "op" in row and "us" in row)


_Measurement = tuple[str, str, str, str]
"""Op, shape, dtype and pass."""


def lines(reports: Reports) -> list[Line]:
    """All lines, by op, shape, dtype and pass, in the order in which the files have them.

    Of several figures of one implementation in one file the fastest counts. Wall-clock times of a
    CPU, where no kernel runs, are left out.
    """
    found: dict[_Measurement, dict[int, dict[str, Measured]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for number, (_, report) in enumerate(reports, 1):
        for row in timings(report):
            if report["device"] == "cpu":
                continue
            who = row["implementation"]
            figures = found[row["op"], row["shape"], row["dtype"], row["direction"]][number]
            rates = (row.get("percent"), row.get("tflop_s", 0.0), row.get("percent_products"))
            m = Measured(row["us"], *rates, row.get("temp_bytes", 0))
            figures[who] = min(m, figures.get(who, m), key=lambda m: m.us)
    device = lambda number: reports[number - 1][1]["device"]
    result = []
    for key, by_file in found.items():
        for number, own in ((n, f) for n, f in by_file.items() if OURS in f or not _ours(by_file)):
            lent: dict[str, tuple[float, int]] = {}
            for other, more in by_file.items():
                for who in more.keys() - own.keys() - {OURS, CHOSEN}:
                    if device(other) == device(number):
                        lent[who] = min((more[who].us, other), lent.get(who, (math.inf, 0)))
            figures = own | {who: by_file[other][who] for who, (_, other) in lent.items()}
            files = (number, *sorted({other for _, other in lent.values()}))
            result.append(Line(*key, figures, files, device(number), frozenset(lent)))
    rank = {shape: i for i, shape in enumerate(dict.fromkeys((x.shape, x.dtype) for x in result))}
    passes = list(dict.fromkeys(["forward", "backward", "both", *(x.direction for x in result)]))
    order = lambda x: (rank[x.shape, x.dtype], x.files[0], passes.index(x.direction))
    return sorted(result, key=order)


def _ours(by_file: dict[int, dict[str, Measured]]) -> bool:
    return any(OURS in figures for figures in by_file.values())


def lines_of_most(reports: Reports) -> list[Line]:
    """The lines of the GPU that most of them are of."""
    every = lines(reports)
    most = Counter(line.device for line in every).most_common(1)
    return [line for line in every if line.device == most[0][0]]


def the_line(reports: Reports, op: str, shape: str, direction: str) -> Line:
    """The measurement of an op's pass at a shape, in bf16 if any, beside its fastest competitor.

    Of several it is the one whose file has both, and of these the one with most of the others.
    """
    every = lines_of_most(reports)
    same = [x for x in every if (x.op, x.shape, x.direction) == (op, shape, direction)]
    same = [x for x in same if x.dtype == "bfloat16"] or same

    def order(line: Line) -> tuple[float, bool, int]:
        rival = line.rival
        us = line.figures[rival].us if rival else math.inf
        return -us, rival not in line.lent, len(line.figures)

    return max(same, key=order)


def steady(row: dict[str, Any]) -> bool:
    """Whether a training step's times differ from their middle by at most :data:`STEADY` of it."""
    return row["ms_high"] - row["ms_low"] <= 2 * STEADY * row["ms"]


def trainings(reports: Reports) -> dict[tuple[str, int], dict[str, Any]]:
    """The steady rows of training steps by preset and length, and then by contender.

    They are of the GPU that most rows are of. Ours is of the file that has the fastest competitor.
    """
    every = [
        (number, one["device"], row)
        for number, (_, one) in enumerate(reports)
        for row in one["rows"]
        if "contender" in row and steady(row)
    ]
    most = Counter(device for _, device, _ in every).most_common(1)
    files: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for number, device, row in every:
        if device == most[0][0]:
            of_model = files.setdefault((row["preset"], row["length"]), {})
            of_model.setdefault(number, {})[row["contender"]] = row
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for key, by_file in files.items():
        rate = lambda rows: max(
            (r["tokens_per_second"] for who, r in rows.items() if is_rival(who)), default=0
        )
        for rows in sorted(by_file.values(), key=lambda rows: ("jaxkern" in rows, rate(rows))):
            found.setdefault(key, {}).update(rows)
    return found


def is_rival(contender: str) -> bool:
    """Whether another library trains, and not plain JAX."""
    return contender.partition("-")[0] not in ("jaxkern", "xla")


def text(reports: Reports) -> str:
    """The report."""
    from bench import decode, layers  # which import this

    by_op = _by_op(lines(reports))
    parts = [
        "# Benchmarks",
        "Generated by `python -m bench report` from bench/results; do not edit.",
        "Times are microseconds of one call; in brackets, percent of the bandwidth of a copy "
        "measured in the same run, each array of the pass counted once. *Both* is forward and "
        "backward in one program, where a compiler may merge them and read once what each of them "
        "reads: that is more than 100%. *jaxkern* is the Mosaic "
        "kernels, also where `implementation=None` would choose XLA; *jaxkern's choice* is what "
        "that runs, where it was timed. *Speed-up* is the fastest other's time over ours, that of "
        "the choice if there is one: ▼ marks where we are slower, and less than "
        f"{EVEN:.0%} is even. *File* numbers the [files](#files); after the first come those that "
        "lend others' figures, measured at another time. Errors are in [accuracy.md](accuracy.md), "
        "sequence policies of several kinds in [backbones.md](backbones.md).",
        *_summary(lines_of_most(reports)),
        *(part for op in sorted(by_op) for part in _section(op, by_op[op])),
        *layers.section(reports),
        *_training(reports),
        *decode.section(reports),
        *_others(reports),
        *_files(reports),
    ]
    return "\n\n".join(parts) + "\n"


def _by_op(every: Iterable[Line]) -> dict[str, list[Line]]:
    by_op: dict[str, list[Line]] = defaultdict(list)
    for line in every:
        by_op[line.op].append(line)
    return by_op


def _summary(every: list[Line]) -> Iterator[str]:
    by_op, rows = _by_op(every), []
    for op in sorted(by_op):
        compared = [line for line in by_op[op] if line.speedup is not None]
        counts = [sum(line.verdict == v for line in by_op[op]) for v in _VERDICTS]
        beside = [
            line.figures["xla"].us / line.own.us
            for line in compared
            if line.own and "xla" in line.figures
        ]
        best = max((line.speedup or 0 for line in compared), default=None)
        worst = min((line.speedup or 0 for line in compared), default=None)
        cells = [f"[`{op}`](#{op})", *counts, _times(statistics.median(beside) if beside else None)]
        rows.append([*cells, _times(best), _times(worst)])
    yield "## Summary"
    yield (
        "A measurement is a pass of an op at a shape in a dtype: how many are faster than the "
        "fastest other implementation, even with it, slower, or alone, with no other beside them; "
        "and the speed-ups of those that are not alone. They are of the GPU with most measurements"
        f"{f', {every[0].device}' if every else ''}."
    )
    head = ["op", "measurements that are faster", "even", "slower", "alone"]
    head += ["median speed-up over plain JAX", "best speed-up over the fastest other", "worst"]
    yield table(head, rows)
    yield "![memory beside arguments and results](pictures/memory.svg)"
    lost = sorted(
        (line for of in by_op.values() for line in of if line.verdict == "slower"),
        key=lambda line: line.speedup or 0,
    )
    yield f"### Where we are slower ({len(lost)})"
    if not lost:
        yield "Nowhere."
        return
    rows = []
    for line in lost:
        name, by = min(line.others.items(), key=lambda item: item[1].us)
        times = [_figure(line.own), f"{NAMES.get(name, name)}, {_figure(by)}"]
        where = [f"`{line.op}`", line.shape, line.dtype, line.direction]
        rows.append([*where, *times, _times(line.speedup)])
    head = ["op", "shape", "dtype", "pass", "jaxkern, µs (% of copy)", "fastest other, the same"]
    yield table([*head, "speed-up"], rows)


_VERDICTS = ("faster", "even", "slower", "alone")


def _section(op: str, of_op: list[Line]) -> Iterator[str]:
    from bench.cases import models_with, shape_of  # with JAX, which the rest has no need of

    yield f"## {op}"
    yield f"A shape is {shape_of(op)}."
    picture = FOLDER / "pictures" / f"{op}.svg"
    if picture.exists():
        yield f"![{op}: its passes beside the machine's limits](pictures/{picture.name})"
    lengths = picture.with_stem(f"{op}-lengths")
    if lengths.exists():
        yield f"![{op}: bandwidth over the length of a row](pictures/{lengths.name})"
    several = len({line.device for line in of_op}) > 1
    present = {name for line in of_op for name in line.figures}
    names = [name for name in NAMES if name in present]
    names += sorted(present - set(names))
    products = any(m.tflop_s for line in of_op for m in line.figures.values())
    rows = []
    for line in of_op:
        cells = [line.shape, line.dtype, line.direction, *([line.device] if several else [])]
        memory = op in OF_MEMORY and line.direction == "both"
        cells += [_figure(line.figures.get(name), products, memory) for name in names]
        mark = " ▼" if line.verdict == "slower" else ""
        rows.append([*cells, _times(line.speedup) + mark, ", ".join(map(str, line.files))])
    head = ["shape", "dtype", "pass", *(["GPU"] if several else [])]
    head += [f"{NAMES.get(n, n)}, µs (% of copy)" for n in names]
    head += ["speed-up over the fastest other", "file"]
    if of_models := models_with(op, {(line.shape, line.dtype) for line in of_op}):
        yield f"Shapes of models: {of_models}."
    if products:
        yield (
            "After the semicolon, TFLOP/s of the products, and percent of those of XLA's product "
            "of two 8192 × 8192 matrices in the same run."
        )
    if op in OF_MEMORY:
        yield "GiB are what forward and backward in one program take beside arguments and results."
    yield table(head, rows)


def _training(reports: Reports) -> Iterator[str]:
    """Training steps of the language model, from files of `bench train`."""
    rows, failed = [], []
    for number, (_, report) in enumerate(reports, 1):
        found = [row for row in report["rows"] if "contender" in row]
        ours = {(r["preset"], r["length"]): r for r in found if r["contender"] == "jaxkern"}
        failed += [
            f"{row['preset']}, {row['contender']}, length {row['length']}: its times differ "
            f"by more than {STEADY:.0%}"
            for row in found
            if not steady(row)
        ]
        for row in filter(steady, found):
            own = ours.get((row["preset"], row["length"]))
            ratio = own and own["tokens_per_second"] / row["tokens_per_second"]
            half = (row["ms_high"] - row["ms_low"]) / 2
            rows.append(
                [
                    f"{row['preset']}, {row['batch']} × {row['length']}",
                    f"{row['parameters'] / 1e6:,.1f}",
                    NAMES.get(row["contender"], row["contender"]),
                    f"{row['tokens_per_second']:,}",
                    _times(ratio if own is not row else None),
                    f"{row['ms']:,.1f} ± {half:.1f}",
                    row["tflop_s"],
                    *("" if row.get(k) is None else row[k] for k in ("peak_gib", "program_gib")),
                    row["compile_s"],
                    f"{row['first_loss']:.2f} → {row['last_loss']:.2f}",
                    row["versions"],
                    number,
                ]
            )
        failed += report["failed"] if found else []
    if not rows and not failed:
        return
    yield "## Training, end to end"
    yield (
        "Steps of the language model on random tokens, by `python -m bench train`: forward, "
        "backward and AdamW, with products in bf16 and parameters and state in fp32, nothing "
        "checkpointed by the caller unless it says so; every contender in a process of its own. "
        "*TFLOP/s* are those of the matrix products, *peak* is what the allocator gave out at "
        "most, *program* what JAX's compiled step needs, *compile* for PyTorch the first step. "
        "Without a GPU no kernel runs."
    )
    head = [
        "model, batch",
        "parameters, M",
        "by",
        "tokens/s",
        "jaxkern's speed-up",
        "ms a step",
        "TFLOP/s",
    ]
    head += ["peak, GiB", "program, GiB", "compile, s", "first → last loss", "versions", "file"]
    yield table(head, rows)
    yield from (f"Not run, or left out: {line}." for line in failed)


def _others(reports: Reports) -> Iterator[str]:
    """What the files hold that is no op's time, and has no document of its own: losses, …

    The name of a file of :data:`TITLES` ends in its key; any other is its section's title.
    """
    for name, report in reports:
        rows = [row for row in report["rows"] if "us" not in row and "contender" not in row]
        stem = name.removesuffix(".json")
        if not rows or stem.endswith(("-accuracy", "-backbones", "-layers", "-decode")):
            continue
        title, meaning = next((t for end, t in TITLES.items() if stem.endswith(end)), (stem, ""))
        yield f"## {title}"
        told = {k: v for k, v in report.items() if _plain(v) and k not in _OF_FILE}
        words = (v if k == "note" else f"{k.replace('_', ' ')} {v}" for k, v in told.items())
        if told := "; ".join(words):
            meaning = f"{meaning} ({told}.)" if meaning else told
        if meaning:
            yield meaning
        keys = [key for key, value in rows[0].items() if _plain(value)]
        head = [HEADS.get(key, key.replace("_", " ")) for key in keys]
        yield table(head, [[_cell(row.get(key)) for key in keys] for row in rows])


_OF_FILE = (
    *("device", "driver", "jax", "jaxkern", "commit", "date", "clock"),
    *("copy_gb_s", "product_tflop_s"),
)


def _files(reports: Reports) -> Iterator[str]:
    rows = []
    for number, (name, report) in enumerate(reports, 1):
        units = {"copy_gb_s": "GB/s", "product_tflop_s": "TFLOP/s"}
        ceilings = ", ".join(f"{report[k]:.0f} {u}" for k, u in units.items() if k in report)
        told = [report.get(key, "") for key in ("device", "driver", "jax", "commit", "date")]
        rows.append([number, f"[{name}](results/{name})", *told, ceilings, report.get("clock", "")])
    yield "## Files"
    yield table(
        ["number", "file", "device", "driver", "JAX", "commit", "date", "ceilings", "clock"], rows
    )


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str("" if value is None else value)


def _figure(m: Measured | None, products: bool = False, memory: bool = False) -> str:
    if m is None:
        return ""
    if memory and m.temp_bytes:
        return f"{_figure(m, products)}; {m.temp_bytes / 2**30:.2f} GiB"
    us = f"{m.us:.1f}" if m.us < 100 else f"{m.us:,.0f}"
    percent = "" if m.percent is None else f" ({m.percent:.0f}%)"
    if not (products and m.tflop_s):
        return us + percent
    of_products = f" ({m.percent_products:.0f}%)" if m.percent_products else ""
    return f"{us}{percent}; {m.tflop_s:.0f}{of_products}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table)


def write_csv(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Timings as comma-separated values; what a column lacks is left empty, `kernels` is JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            flat = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
            writer.writerow(flat)


def main(argv: list[str] | None = None) -> int:
    p = program.parser("report")
    p.add_argument("--out", type=Path, default=REPORT, help="the report")
    p.add_argument("--csv", type=Path, help="also write all timings here, with their files")
    args = p.parse_args(argv)
    from bench import documents  # which imports this

    reports = load()
    args.out.write_text(text(reports))
    print("wrote", args.out, *documents.write(reports))
    if args.csv:
        keys = ("device", "jax", "commit")
        write_csv(
            [
                {"file": name, **{key: report[key] for key in keys}, **row}
                for name, report in reports
                for row in timings(report)
            ],
            args.csv,
        )
        print(f"wrote {args.csv}")
    return 0
