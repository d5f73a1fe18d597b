"""Pictures of all results: ``python -m bench pictures`` writes bench/pictures/*.svg.

For every op a roofline: the bandwidth that each pass reaches over the bytes that it must move,
under the bandwidth of a copy; for ops of matrix products TFLOP/s over operations per byte, under
the tensor cores' limit too. For ops along sequences instead the time of each pass at each shape,
beside the least that its bytes and its exponentials take. For ops of rows, percent of the copy
bandwidth over their length. And the memory ledger: what forward and backward in one program need
beside their arguments and results. And training steps on up to 1,024 GPUs, predicted and
measured. With files of results, the percent over the length of a row of
each, in an SVG beside it.
"""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import curves, documents, program, report, scaling
from bench.cases import Case, cases
from bench.program import FOLDER
from bench.report import CHOSEN, NAMES, OURS, Reports
from jaxkern.cases import TABLE

PICTURES = FOLDER / "pictures"

DIRECTIONS = ("forward", "backward")
MARKERS = "osD^vPX*h<>"

PASSES = (*DIRECTIONS, "step")
"""Those of ops, and an optimizer's."""

EXPONENTIALS_PER_S = 132 * 16 * 1.83e9
"""Of an H200: 16 a clock on each multiprocessor, at the clock that a scan ran at."""

OVERVIEW = (
    ("selective_scan", "8x2048x2048x16", "both"),
    ("rms_norm", "16384x4096", "backward"),
    ("dropout", "16384x8192", "forward"),
    ("fused_adamw", "1.1B", "step"),
)
"""What the README shows of the ops, beside the fastest other library and plain JAX."""

OF_JAX = (OURS, "xla", "tokamax")
"""Whose memory is known: JAX's compiler tells it."""

Point = tuple[float, float]


@dataclasses.dataclass
class Roofline:
    """An op's points by direction and implementation, under the machine's ceilings.

    A point is (MB, GB/s), or (FLOP/byte, TFLOP/s) for an op of matrix `products`.
    """

    copy_gb_s: float = 0.0
    product_tflop_s: float = 0.0
    products: bool = False
    points: Any = dataclasses.field(default_factory=lambda: {d: defaultdict(list) for d in PASSES})


@dataclasses.dataclass
class Times:
    """Milliseconds of an op along sequences, by pass and shape.

    Attributes:
      of: those of each implementation, the fastest of several measurements.
      least: what the bytes take at a copy's bandwidth, or the exponentials if they take longer.
    """

    of: Any = dataclasses.field(default_factory=lambda: {d: defaultdict(dict) for d in DIRECTIONS})
    least: Any = dataclasses.field(default_factory=lambda: {d: {} for d in DIRECTIONS})


def along_sequences() -> set[str]:
    """The ops that have an axis of a sequence's length."""
    return {case.op for case in TABLE if "l" in case.axes.split()}


def times(reports: Reports) -> dict[str, Times]:
    """The times of all ops along sequences, and the limits of the machine."""
    every = (case for case in cases(small=False) if isinstance(case, Case))
    exponentials = {(case.op, case.shape, case.dtype): case.exponentials for case in every}
    found: defaultdict[str, Times] = defaultdict(Times)
    for line in report.lines_of_most(reports):
        if line.op not in along_sequences() or line.direction not in DIRECTIONS:
            continue
        label = line.shape if line.dtype == "bfloat16" else f"{line.shape} {line.dtype}"
        of_shape = found[line.op].of[line.direction][label]
        for name, m in line.figures.items():
            of_shape[name] = min(of_shape.get(name, math.inf), m.us / 1e3)
            if m.percent:
                count = exponentials.get((line.op, line.shape, line.dtype), 0)
                bound = max(m.us / 1e3 * m.percent / 100, 1e3 * count / EXPONENTIALS_PER_S)
                found[line.op].least[line.direction][label] = bound
    return found


def rooflines(reports: Reports) -> dict[str, Roofline]:
    """All rooflines by op."""
    found: defaultdict[str, Roofline] = defaultdict(Roofline)
    for line in report.lines_of_most(reports):
        one = reports[line.files[0] - 1][1]
        copy, most = one.get("copy_gb_s"), one.get("product_tflop_s", 0.0)
        for name, m in line.figures.items():
            if copy is None or name in line.lent or line.direction not in PASSES or not m.percent:
                continue
            roofline, gb_s = found[line.op], m.percent / 100 * copy
            roofline.copy_gb_s = max(roofline.copy_gb_s, copy)
            roofline.product_tflop_s = max(roofline.product_tflop_s, most)
            roofline.products |= m.tflop_s > 0
            point = (m.tflop_s * 1e3 / gb_s, m.tflop_s) if m.tflop_s else (m.us * gb_s / 1e3, gb_s)
            roofline.points[line.direction][name].append(point)
    return found


def lengths(reports: Reports) -> Any:
    """Percent of the copy bandwidth over the length of a row, as :func:`points`."""
    keys = ("op", "shape", "dtype", "direction")
    return points(
        [
            {key: getattr(line, key) for key in keys}
            | {"implementation": who, "percent": m.percent}
            for line in report.lines_of_most(reports)
            for who, m in line.figures.items()
            if m.percent and who != CHOSEN
        ]
    )


def ledger(reports: Reports) -> dict[str, dict[str, float]]:
    """MB by case and implementation, for each op the shape that was timed in most variants.

    That is: temporary memory of the program that runs forward and backward. Cases in which nobody
    needs as much as a megabyte are left out.
    """
    groups: dict[tuple[str, str, str], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for _, one in reports:
        for row in report.timings(one):
            of_both = row["direction"] == "both" and "temp_bytes" in row
            if of_both and row["implementation"] in OF_JAX:
                base = re.split("[-/]", row["shape"])[0]
                label = f"{row['op']} {row['shape']} {row['dtype']}"
                group = groups[row["op"], base, row["dtype"]]
                group[label][row["implementation"]] = row["temp_bytes"] / 1e6
    most: dict[str, dict[str, dict[str, float]]] = {}
    for (op, _, _), group in groups.items():
        most[op] = max(most.get(op, {}), group, key=lambda g: sum(map(len, g.values())))
    held = {label: by for op in sorted(most) for label, by in sorted(most[op].items())}
    return {label: by for label, by in held.items() if max(by.values()) >= 1}


def points(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """(N, percent) by op, direction and implementation, of M×N in bf16 with the most rows each."""
    found: dict[tuple[str, str, str, int], tuple[int, float]] = {}
    for row in rows:
        size = re.fullmatch(r"(\d+)x(\d+)", row["shape"])
        if not size or row["dtype"] != "bfloat16" or row["direction"] not in DIRECTIONS:
            continue
        m, n = int(size[1]), int(size[2])
        key = (row["op"], row["direction"], row["implementation"], n)
        found[key] = max(found.get(key, (0, 0.0)), (m, row["percent"]))
    lines: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (op, direction, implementation, n), (_, percent) in sorted(found.items()):
        lines[op][direction][implementation].append((n, percent))
    return lines


def pyplot() -> Any:
    """matplotlib for small SVGs, the same bytes on every run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "jaxkern", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, out: Path) -> None:
    """Writes and closes `figure`, with nothing cut off."""
    figure.tight_layout()
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, metadata=metadata, bbox_inches="tight")
    pyplot().close(figure)


def in_order(names: set[str]) -> list[str]:
    """The implementations in the order of the tables."""
    return [name for name in NAMES if name in names] + sorted(names - set(NAMES))


def plain(axis: Any) -> None:
    """Ticks of a logarithmic `axis` written as numbers: 1, 10, 100, and of a short one 1, 2, 5."""
    from matplotlib import ticker

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def scatter(axis: Any, order: Sequence[str], at: Mapping[str, Sequence[Point]]) -> None:
    """Draws the points of each implementation; its marker is by its place in `order`."""
    for i, name in enumerate(order):
        if at.get(name):
            style = {"s": 26 if name == OURS else 14, "marker": MARKERS[i % len(MARKERS)]}
            label = NAMES.get(name, name)
            axis.scatter(*zip(*at[name], strict=True), label=label, alpha=0.8, **style)


def draw_roofline(op: str, of: Roofline, out: Path) -> None:
    """Writes the roofline of `op`."""
    plt = pyplot()
    drawn = [d for d in PASSES if of.points[d]]
    figure, axes = plt.subplots(
        1,
        len(drawn),
        figsize=(max(3.6 * len(drawn), 5), 2.9),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    order = in_order({name for by in of.points.values() for name in by})
    xs = [x for by in of.points.values() for at in by.values() for x, _ in at]
    left, right = min(xs) / 1.5, max(xs) * 1.5
    least = min(y for by in of.points.values() for at in by.values() for _, y in at)
    ridge = of.product_tflop_s * 1e3 / of.copy_gb_s
    roof = sorted([left, ridge, right]) if of.products else [left, right]
    height = [min(of.product_tflop_s, x * of.copy_gb_s * 1e-3) for x in roof]
    for axis, direction in zip(axes[0], drawn, strict=True):
        limit = height if of.products else [of.copy_gb_s] * 2
        axis.plot(roof, limit, color="black", lw=1, label="limit")
        scatter(axis, order, of.points[direction])
        axis.set(xscale="log", yscale="log", title=f"{op}, {direction}")
        axis.set_ylim(min(least / 1.5, limit[-1] / 10), limit[-1] * 1.3)
        axis.set_xlabel("operations per byte" if of.products else "MB that the pass must move")
        axis.grid(alpha=0.3)
        plain(axis.xaxis)
        plain(axis.yaxis)
    axes[0, 0].set_ylabel("TFLOP/s" if of.products else "GB/s")
    axes[0, 0].legend(fontsize=6)
    save(figure, out)


def draw(one: dict[str, Any], out: Path) -> bool:
    """Draws the lengths of one report; False if there are no three."""
    title = f"{one['device']}, JAX {one['jax']}, bf16, commit {one['commit']}"
    return draw_lengths(points(one["rows"]), title, out)


def draw_lengths(lines: dict[str, Any], title: str, out: Path) -> bool:
    """Writes :func:`points`, a row of panels for each op; False if there are no three lengths."""
    lines = {op: by for op, by in lines.items() if any(len(p) > 2 for p in _all(by))}
    if not lines:
        return False
    figure, axes = pyplot().subplots(
        len(lines), 2, figsize=(7.2, 2.9 * len(lines)), sharex=True, sharey=True, squeeze=False
    )
    found = {name for by in lines.values() for d in by.values() for name in d}
    implementations = in_order(found)
    for row, (op, by) in zip(axes, lines.items(), strict=True):
        for axis, direction in zip(row, DIRECTIONS, strict=True):
            for i, name in enumerate(implementations):
                if by[direction].get(name):
                    n, percent = zip(*by[direction][name], strict=True)
                    width = 2.2 if name == OURS else 1.2
                    marker, label = MARKERS[i % len(MARKERS)], NAMES.get(name, name)
                    axis.plot(n, percent, marker=marker, ms=4, lw=width, label=label)
            axis.set(ylim=(0, 105), title=f"{op}, {direction}", xscale="log")
            axis.set_xlabel("N, elements of a row")
            axis.grid(alpha=0.3)
            plain(axis.xaxis)
        row[0].set_ylabel("% of copy bandwidth")
    axes[0, 0].legend(fontsize=6)
    figure.suptitle(title, fontsize=9)
    save(figure, out)
    return True


def _all(by: dict[str, dict[str, list[tuple[int, float]]]]) -> list[list[tuple[int, float]]]:
    return [line for lines in by.values() for line in lines.values()]


def draw_times(op: str, of: Times, out: Path) -> None:
    """Writes the times of `op`: a row for each shape, a panel for each pass."""
    drawn = [d for d in DIRECTIONS if of.of[d]]
    labels = list(dict.fromkeys(label for d in drawn for label in of.of[d]))
    figure, axes = pyplot().subplots(
        1, len(drawn), figsize=(7.2, 1 + 0.19 * len(labels)), sharey=True, squeeze=False
    )
    order = in_order({name for d in drawn for by in of.of[d].values() for name in by})
    for axis, direction in zip(axes[0], drawn, strict=True):
        rows = {label: row for row, label in enumerate(labels)}
        at = defaultdict(list)
        for label, by in of.of[direction].items():
            for name, ms in by.items():
                at[name].append((ms, rows[label]))
        scatter(axis, order, at)
        if least := [(ms, rows[k]) for k, ms in of.least[direction].items()]:
            label = "limit of the machine"
            axis.scatter(*zip(*least, strict=True), s=60, marker="|", color="black", label=label)
        axis.set(xscale="log", title=f"{op}, {direction}", xlabel="ms")
        axis.grid(alpha=0.3)
        plain(axis.xaxis)
    axes[0, 0].set_yticks(range(len(labels)), labels, fontsize=6)
    axes[0, 0].invert_yaxis()
    axes[0, -1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, out)


def draw_ledger(held: dict[str, dict[str, float]], out: Path) -> None:
    """Writes the memory ledger as bars."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.8, 0.7 + 0.3 * len(held)))
    names = [name for name in OF_JAX if any(name in by for by in held.values())]
    for i, name in enumerate(names):
        bars = [(row, by[name]) for row, by in enumerate(held.values()) if name in by]
        at = [row + (i - (len(names) - 1) / 2) * 0.8 / len(names) for row, _ in bars]
        axis.barh(at, [mb for _, mb in bars], height=0.75 / len(names), label=NAMES[name])
        for y, (_, mb) in zip(at, bars, strict=True):
            axis.annotate(f" {mb:,.0f}", (max(mb, 1), y), va="center", fontsize=6)
    axis.set_yticks(range(len(held)), list(held))
    axis.invert_yaxis()
    axis.set(xscale="log", xlim=(1, 3 * max(mb for by in held.values() for mb in by.values())))
    plain(axis.xaxis)
    axis.set_xlabel("MB beside arguments and results, forward and backward in one program")
    axis.legend(fontsize=6)
    save(figure, out)


def overview(reports: Reports) -> dict[str, dict[str, float]]:
    """Speeds as parts of jaxkern's, by a label and an implementation, of :data:`OVERVIEW`."""
    found: dict[str, dict[str, float]] = {}
    for op, shape, direction in OVERVIEW:
        line = report.the_line(reports, op, shape, direction)
        assert line.own is not None, line
        shown = {line.rival or "xla", "xla"} & line.figures.keys()
        label = f"{op}, {direction}\n{shape}"
        speeds = {name: line.own.us / line.figures[name].us for name in in_order(shown)}
        found[label] = {OURS: 1.0} | speeds
    preset, length = documents.MODEL
    trained = report.trainings(reports)[preset, length]
    own = trained["jaxkern"]
    rates = {name: row["tokens_per_second"] for name, row in trained.items()}
    fastest = max(filter(report.is_rival, rates), key=lambda name: rates[name])
    label = f"Mamba of {own['parameters'] / 1e6:.0f} million, training\n{own['batch']} x {length}"
    found[label] = {OURS: 1.0, fastest: rates[fastest] / rates["jaxkern"]}
    return found


def draw_overview(held: dict[str, dict[str, float]], out: Path) -> None:
    """Writes the overview as bars."""
    figure, axis = pyplot().subplots(figsize=(6.8, 0.6 + 0.62 * len(held)))
    for i, name in enumerate(in_order({name for by in held.values() for name in by})):
        bars = []
        for row, by in enumerate(held.values()):
            names = in_order({*by})
            if name in names:
                at = row + (names.index(name) - (len(names) - 1) / 2) * 0.8 / len(names)
                bars.append((at, by[name], 0.72 / len(names)))
        for n, (at, speed, height) in enumerate(bars):
            axis.barh(at, speed, height, color=f"C{i}", label=None if n else NAMES[name])
            axis.annotate(f" {speed:.2g}", (speed, at), va="center", fontsize=6)
    axis.set_yticks(range(len(held)), list(held))
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.12), xlabel="speed, jaxkern's being 1; one H200")
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, out)


def draw_scaling(held: dict[str, dict[str, scaling.Line]], out: Path) -> None:
    """Writes the rates of training steps on several GPUs, predicted and measured."""
    figure, axes = pyplot().subplots(1, len(held), figsize=(7.2, 2.9), squeeze=False)
    for axis, (preset, lines) in zip(axes[0], held.items(), strict=True):
        for i, how in enumerate(scaling.LINES):
            axis.plot(*zip(*lines[how], strict=True), ".-", color=f"C{i}", label=how)
            if real := lines.get(f"{how}, measured"):
                style = {"marker": "*", "s": 60, "color": f"C{i}", "label": f"{how}, measured"}
                axis.scatter(*zip(*real, strict=True), **style)
        axis.set(xscale="log", title=preset, xlabel="H200s", ylim=(0, None))
        axis.grid(alpha=0.3)
        plain(axis.xaxis)
    axes[0, 0].set_ylabel("tokens a second and GPU")
    axes[0, 0].legend(fontsize=6)
    save(figure, out)


def draw_curves(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes the loss of every step of each run, and below it the means that are compared."""
    figure, axis = pyplot().subplots(figsize=(5.2, 2.9))
    for i, row in enumerate(rows):
        losses = row["losses"]
        axis.plot(range(1, len(losses) + 1), losses, color=f"C{i}", alpha=0.3, lw=0.7)
        means = curves.windows(losses)
        middles = [curves.WINDOW * (n + 0.5) for n in range(len(means))]
        axis.plot(middles, means, [".", "x"][i % 2], color=f"C{i}", label=row["run"])
    axis.set(xlabel="step", ylabel="nats a token")
    axis.legend(fontsize=6)
    save(figure, out)


def main(argv: list[str] | None = None) -> int:
    p = program.parser("pictures")
    p.add_argument("file", nargs="*", type=Path, help="results, for a picture beside each alone")
    if files := p.parse_args(argv).file:
        for path in files:
            out = path.with_suffix(".svg")
            drawn = draw(json.loads(path.read_text()), out)
            print(f"wrote {out}" if drawn else f"{path}: no three lengths of rows to draw")
        return 0
    reports = report.load()
    PICTURES.mkdir(exist_ok=True)
    for op, roofline in rooflines(reports).items():
        if op not in along_sequences():
            draw_roofline(op, roofline, PICTURES / f"{op}.svg")
    for op, of in times(reports).items():
        draw_times(op, of, PICTURES / f"{op}.svg")
    for op, by in lengths(reports).items():
        draw_lengths({op: by}, "bf16, the most rows of each length", PICTURES / f"{op}-lengths.svg")
    draw_ledger(ledger(reports), PICTURES / "memory.svg")
    draw_overview(overview(reports), PICTURES / "overview.svg")
    draw_scaling(scaling.points(reports), PICTURES / "scaling.svg")
    of_curves = next(r["rows"] for name, r in reports if name.endswith("-curves.json"))
    draw_curves(of_curves, PICTURES / "curves.svg")
    print(f"wrote {PICTURES}/*.svg")
    return 0
